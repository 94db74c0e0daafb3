"""Random calls of ops; each is built twice from its seed, for two backends."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dpkern.base.dispatch import Op
from dpkern.base.rng import Key, Purpose
from dpkern.ops import clip, coef, ghost, noise, symbols, update
from dpkern.ops._draws import CdtDraws, SampleReads
from dpkern.step.noise_tables._cdt_law import CdtLaw

KEY = Key.from_unsafe_seed(6)
FLOATS = (torch.float32, torch.float64)


@dataclass
class Call:
    """One call.

    Attributes:
        op, args, kwargs: the call.
        outputs: tensors that it changes.
        facts: what the data decides, from the call's result, for the closed form.
    """

    op: Op[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Sequence[torch.Tensor] = ()
    facts: Callable[[Any], dict[str, Any]] = field(default=lambda _: {})


def _streams(rng: random.Random) -> tuple[Any, Any]:
    key = Key.from_unsafe_seed(6, rounds=rng.choice((20, 12, 8)))
    step = rng.randrange(100)
    return key.stream(Purpose.NOISE, step), key.stream(Purpose.ROUNDING, step)


def _law(rng: random.Random) -> str:
    return rng.choice(("gaussian", "laplace"))


def _place(rng: random.Random) -> dict[str, int]:
    return {
        "position": rng.randrange(3000),
        "count": rng.choice((0, 1, rng.randrange(1600), rng.randrange(1600))),
    }


def keystream(rng: random.Random) -> Call:
    place = {"first_block": rng.randrange(2**33), "blocks": rng.randrange(9)}
    return Call(noise.keystream, (_streams(rng)[0],), place)


def lattice_draws(rng: random.Random) -> Call:
    law = _law(rng)
    return Call(noise.lattice_draws, (_streams(rng)[0],), {**_place(rng), "distribution": law})


def table_draws(rng: random.Random, law: str, first: int) -> update.Draws:
    """Draws that are read from a table of samples, or looked up in a cumulative one."""
    if rng.random() < 0.5:
        samples = torch.randint(-999, 999, (rng.choice((1, 7, 3000)),))
        kind = rng.choice((torch.int16, torch.int32))
        cursor, shift = rng.randrange(len(samples)), rng.choice((0, 10))
        return SampleReads(first, samples.to(kind), cursor=cursor, shift=shift)
    stream = Key.from_unsafe_seed(rng.randrange(99)).stream(Purpose.TABLES, 1)
    table = CdtLaw(law, rng.choice((14, 48))).table
    return CdtDraws(first, table, stream=stream, distribution=law)


def source_draws(rng: random.Random) -> Call:
    place = _place(rng)
    if rng.random() < 0.3:
        draws = update.Draws(place["position"], torch.randint(-99, 99, (1600,)).int())
    else:
        draws = table_draws(rng, _law(rng), max(0, place["position"] - rng.randrange(600)))
    return Call(noise.source_draws, (draws,), place)


def rounding_bits(rng: random.Random) -> Call:
    return Call(noise.rounding_bits, (_streams(rng)[1],), _place(rng))


def add_noise(rng: random.Random) -> Call:
    place = _place(rng)
    dtype = rng.choice((*noise.INTEGERS, *FLOATS))
    stream, rounding = _streams(rng)
    given: dict[str, Any] = {"stream": stream, "distribution": _law(rng)}
    given["position"] = place["position"]
    shape = (place["count"],)
    if dtype in noise.INTEGERS:
        x = torch.randint(-(2**30), 2**30, shape, dtype=dtype)
    else:
        x = torch.randn(shape, dtype=dtype)
        x[::7] = float("nan")
        given.update(scale=0.75, rounding=rounding)
        if rng.random() < 0.5:
            given["scale"] = torch.rand(shape, dtype=rng.choice(FLOATS)) + 0.1
    return Call(noise.add_noise, (x,), given, outputs=[x])


def _rule(rng: random.Random) -> update.Rule:
    return rng.choice(
        (
            update.SGD(lr=0.1, weight_decay=rng.choice((0.0, 0.01))),
            update.SGD(lr=0.1, momentum=0.9),
            update.SGD(lr=0.1, momentum=0.9, nesterov=True),
            update.Adam(lr=0.01),
            update.AdamW(lr=0.01),
        )
    )


def _sizes(rng: random.Random) -> list[int]:
    return [rng.choice((0, 1, rng.randrange(700))) for _ in range(rng.randrange(1, 4))]


def step(rng: random.Random) -> Call:
    dtype, rule, sizes = rng.choice(FLOATS), _rule(rng), _sizes(rng)
    sum_dtype = rng.choice((None, dtype, *noise.INTEGERS))
    params = [torch.randn(n, dtype=dtype) for n in sizes]
    if sum_dtype in noise.INTEGERS:
        sums = [torch.randint(-99999, 99999, (n,), dtype=sum_dtype) for n in sizes]
    else:
        sums = [torch.randn(n, dtype=dtype) for n in sizes]
        for total in sums:
            total[::11] = float("inf")
    state = rule.init(params)
    state.steps = rng.randrange(3)
    given: dict[str, Any] = {"rule": rule, "state": state, "gradient_scale": 0.25}
    if sum_dtype is not None:
        given["noise"] = _noise(rng, sizes, sum_dtype)
        if sum_dtype is dtype and rng.random() < 0.5:
            given["maps"] = update.PairMaps(tuple(_map(rng, n) for n in sizes))
    buffers = [b for group in state.buffers.values() for b in group]
    return Call(update.step, (params, sums), given, outputs=[*params, *buffers])


def _map(rng: random.Random, size: int) -> update.PairMap | None:
    """A map to no more coordinates than there are entries, or None."""
    taps = rng.choice([n for n in (1, 2, 3, 5) if size % n == 0])
    rank = rng.randint(1, taps)
    if rng.random() < 0.3:
        return None
    made = [torch.randn(shape, dtype=torch.float64) for shape in ((rank, taps), (taps, rank))]
    return update.PairMap(signal=made[0], back=made[1])


def _noise(rng: random.Random, sizes: Sequence[int], dtype: torch.dtype) -> update.Noise:
    stream, rounding = _streams(rng)
    positions = [rng.randrange(600)]
    for n in sizes[:-1]:
        positions.append(positions[-1] + n + rng.randrange(20))
    law = _law(rng)
    made = {"position": positions[0], "count": positions[-1] + sizes[-1] - positions[0]}
    kind = rng.randrange(3)
    draws = None
    if kind == 1:
        values = noise.lattice_draws(stream, distribution=law, **made)
        bits = noise.rounding_bits(rounding, **made) if rng.random() < 0.5 else None
        draws = update.Draws(positions[0], values, bits)
    return update.Noise(
        distribution=law,
        scales=tuple(rng.uniform(0.5, 2) for _ in sizes),
        stream=stream,
        positions=tuple(positions),
        rounding=rounding,
        draws=draws,
        step_counter=update.step_counter(_rule(rng), 3, "cpu") if kind == 2 else None,
    )


def advance(rng: random.Random) -> Call:
    rule = _rule(rng)
    step_counter = update.step_counter(rule, rng.randrange(9), "cpu")
    return Call(update.advance, (step_counter,), {"rule": rule})


def project(rng: random.Random) -> Call:
    dtype = rng.choice(FLOATS)
    params = [torch.randn(n, dtype=dtype) for n in (*_sizes(rng), 5)]
    onto = rng.choice(
        (update.Ball(0.1), update.Ball(1e3), update.Box(-0.5, 0.5), update.Simplex(2.0))
    )
    return Call(update.project, (params, onto), {})


def _gradients(rng: random.Random, dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    dtype, batch = rng.choice(dtypes), rng.choice((0, 1, *(rng.randrange(2, 9) for _ in range(3))))
    shapes = [rng.choice(((), (rng.randrange(1, 200),), (3, rng.randrange(40)))) for _ in range(3)]
    shapes = shapes[: rng.randrange(1, 4)]
    return [(3 * rng.random() * torch.randn((batch, *s))).to(dtype) for s in shapes]


def sample_norm(rng: random.Random) -> Call:
    grads = _gradients(rng, clip.GRAD_DTYPES)
    given: dict[str, Any] = {"p": rng.choice((1, 2))}
    for name in ("center", "scale"):
        if rng.random() < 0.5:
            dtype = rng.choice(FLOATS)
            given[name] = [torch.rand(g.shape[1:], dtype=dtype) + 0.5 for g in grads]
    return Call(clip.sample_norm, (grads,), given)


def clip_sum(rng: random.Random) -> Call:
    grads, p = _gradients(rng, clip.GRAD_DTYPES), rng.choice((1, 2))
    if grads[0].shape[0] > 1 and rng.random() < 0.3 and grads[0].numel():
        grads[0].view(len(grads[0]), -1)[0, 0] = float("nan")
    style, arithmetic = rng.choice(clip.STYLES), rng.choice(clip.ARITHMETIC)
    bound: Any = rng.uniform(0.5, 20)
    unit: Any = bound / rng.choice((1000.3, 2.0**22))
    if style == "per_layer":
        bound, unit = [bound + i for i in range(len(grads))], [unit] * len(grads)
    given: dict[str, Any] = {"p": p, "style": style, "arithmetic": arithmetic}
    if arithmetic == "exact":
        given["unit"] = unit
    if rng.random() < 0.5:
        dtype = clip.sum_dtype(grads[0].dtype) if arithmetic == "float" else torch.int64
        given["out"] = [torch.ones(g.shape[1:], dtype=dtype) for g in grads]
    return Call(clip.clip_sum, (grads, bound), given)


def explicit_norm(rng: random.Random) -> Call:
    return Call(ghost.explicit_norm, (_gradients(rng, FLOATS),), {})


def contract(rng: random.Random) -> Call:
    grads = _gradients(rng, FLOATS)
    grads = [g.transpose(1, 2) if g.dim() == 3 and rng.random() < 0.5 else g for g in grads]
    factors = torch.rand(len(grads[0]), dtype=grads[0].dtype)
    dropped = rng.randrange(len(factors) + 1) if rng.random() < 0.25 else 0
    factors[:dropped] = 0
    outs = [torch.ones(g.shape[1:], dtype=g.dtype) for g in grads]
    return Call(ghost.contract, (grads, factors, outs), {})


def explicit_integer_sum(rng: random.Random) -> Call:
    grads, factors, outs = contract(rng).args
    return Call(ghost.explicit_integer_sum, (grads, factors, [out.int() for out in outs]), {})


def clip_factors(rng: random.Random) -> Call:
    batch = rng.randrange(9)
    squares = [torch.rand(batch, dtype=torch.float64) for _ in range(rng.randrange(1, 4))]
    if batch and rng.random() < 0.25:
        squares[0][0] = float("inf")
    automatic, bound = rng.random() < 0.5, rng.uniform(0.2, 2)
    given = {"dtype": rng.choice(FLOATS), "scale": 1.5, "automatic": automatic}

    def facts(result: Any) -> dict[str, Any]:
        finite = torch.isfinite(result[1])
        over = int((result[1][finite] > bound).sum())
        return {"clipped": over, "nonfinite": int((~finite).sum())}

    return Call(ghost.clip_factors, (squares, bound), given, facts=facts)


def randomize(rng: random.Random) -> Call:
    categories = rng.choice((2, 3, 10, 100))
    x = torch.randint(0, categories, (rng.randrange(400),)).to(rng.choice(symbols.DTYPES))
    given = {"stream": KEY.stream(Purpose.SYMBOLS, 1), "keep": (1 << 63) + 7}
    given |= {"categories": categories, "position": rng.randrange(900)}
    return Call(symbols.randomize, (x,), given)


def _release(rng: random.Random, records: int, count: int, quadratic: int) -> coef.Noise | None:
    """Laplace noise of one scale or of each record's, draws of three kinds; or none."""
    if rng.random() < 0.2:
        return None
    stream, rounding = _streams(rng)
    first = rng.choice((0, rng.randrange(1200)))
    draws = None
    if rng.random() < 0.5:
        end = coef.quadratic_position(first, count) + quadratic
        made = {"position": first, "count": end - first}
        values = noise.lattice_draws(stream, distribution="laplace", **made)
        bits = noise.rounding_bits(rounding, **made) if rng.random() < 0.5 else None
        draws = update.Draws(first, values, bits)
    scale: Any = 0.75
    if rng.random() < 0.5:
        scale = torch.rand(records, dtype=rng.choice(FLOATS)) + 0.1
    return coef.Noise(scale=scale, stream=stream, rounding=rounding, position=first, draws=draws)


def _targets(rng: random.Random) -> torch.Tensor:
    shape = rng.randrange(9), rng.choice((0, 1, 17, rng.randrange(90), rng.randrange(300)))
    return torch.rand(shape, dtype=rng.choice(FLOATS))


def perturb(rng: random.Random) -> Call:
    x = _targets(rng)
    given = {"form": rng.choice(coef.FORMS), "noise": _release(rng, len(x), x.numel(), x.numel())}
    return Call(coef.perturb, (x,), given)


def quadratic(rng: random.Random) -> Call:
    x = _targets(rng)
    given: dict[str, Any] = {"form": rng.choice(coef.FORMS)}
    given["noise"] = _release(rng, len(x), x.numel(), x.numel())
    if rng.random() < 0.5:
        given["shift"] = torch.randn(len(x), dtype=x.dtype)
    return Call(coef.quadratic, (torch.randn_like(x), x), given)


def descend(rng: random.Random) -> Call:
    """Runs of which none stops; one in ten has nothing to do."""
    runs, users, steps = rng.randrange(3), rng.choice((1, 1, 2)), rng.choice((0, 1, 3, 4))
    n, code = rng.choice((1, 5, 14, 16, 17, 33)), rng.choice((1, 7, 8, 9, 17))
    records, dtype = rng.randrange(1, 6), rng.choice(FLOATS)
    tables = [torch.rand(rng.choice((1, runs)), records, n, dtype=dtype) for _ in range(2)]
    order = torch.randint(records, (runs, steps, users))
    given: dict[str, Any] = {"form": rng.choice(coef.FORMS), "lr": 0.05, "constant": 0.25}
    if rng.random() < 0.5:
        given["added"] = 0.1 * torch.randn(runs, steps, users, n, dtype=dtype)
    if rng.random() < 0.7:
        size = (runs, steps, 2, users, n)
        given["draws"] = torch.randint(-(1 << 16), 1 << 16, size, dtype=torch.int32)
        given["rounding"] = torch.randint(-(1 << 15), 1 << 15, size, dtype=torch.int16)
        given |= {"scale": 0.7, "growth": rng.choice((0.0, 0.3))}
    written = [
        torch.randn(runs, users, n, code, dtype=dtype) / 4,
        torch.randn(runs, users, code, n, dtype=dtype) / 4,
        torch.zeros(runs, dtype=torch.int32),
    ]
    return Call(coef.descend, (*written, *tables, order), given, outputs=written)


def expanded(rng: random.Random) -> Call:
    records, width = rng.choice((0, 3, 16, 19)), rng.choice((0, 1, 5, 17))
    classes, dtype = rng.choice((0, 1, 3)), rng.choice(FLOATS)
    hidden = torch.rand(records, width, dtype=dtype)
    y, w = torch.rand(records, classes, dtype=dtype), torch.randn(classes, width, dtype=dtype)
    linear = y.numel() * width
    return Call(
        coef.expanded, (hidden, y, w), {"noise": _release(rng, records, linear, linear * width)}
    )


COUNTED = {
    make.__name__: make
    for make in (
        *(keystream, lattice_draws, source_draws, rounding_bits, add_noise),
        *(step, clip_factors, randomize, perturb, quadratic, descend),
    )
}
"""Ops with a counted kernel."""
OTHERS = {
    make.__name__: make
    for make in (
        *(sample_norm, clip_sum, explicit_norm, contract, explicit_integer_sum),
        *(advance, project, expanded),
    )
}
WITH_STREAM = ("keystream", "lattice_draws", "rounding_bits", "add_noise", "randomize")
WITH_NOISE = ("step", "perturb", "quadratic")


def build(name: str, seed: int) -> Call:
    """The call of this seed, always the same."""
    rng = random.Random(f"{name} {seed}")
    torch.manual_seed(seed)
    return {**COUNTED, **OTHERS}[name](rng)

"""Equal bits: the reference, every instruction set, numba, 1 and 2 threads, in random pieces.

Draws of both laws are compared value by value; so are noisy sums of random bit patterns and whole
updates. Adam takes a square root, which torch does not round correctly, so Adam is compared among
the kernels only. A mismatch anywhere fails.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from dpkern.base.laws import LAWS
from dpkern.base.rng import Key, Purpose, Stream
from dpkern.ops import noise, testing, update

PIECE = 1 << 20
PURPOSES = {"gaussian": Purpose.NOISE, "laplace": Purpose.LAPLACE}
FAR = (2**32 // 48 * 512, 2**33 // 48 * 512, 2**62 - PIECE)
"""The tile in which the counter's low word overflows, and the end of all positions."""
SGD_RULES: tuple[update.Rule, ...] = (
    update.SGD(lr=0.1),
    update.SGD(lr=0.1, momentum=0.9, dampening=0.1, weight_decay=1e-3),
    update.SGD(lr=0.1, momentum=0.9, nesterov=True),
)
ADAM_RULES: tuple[update.Rule, ...] = (
    update.Adam(lr=1e-3, weight_decay=1e-3),
    update.AdamW(lr=1e-3),
)


@dataclass(frozen=True)
class Runner:
    """A backend with a number of threads; the compiled kernels also with an instruction set."""

    backend: str
    threads: int
    isa: str | None = None

    def __str__(self) -> str:
        return f"{self.isa or self.backend} x{self.threads}"

    @contextmanager
    def active(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(testing.threads(self.threads))
            if self.isa is not None:
                stack.enter_context(testing.isa(self.isa))
            yield


def runners() -> list[Runner]:
    compiled = [Runner("cpu", n, isa) for isa in testing.available_isas() for n in (1, 2)]
    numba = "numba" in testing.available_backends()
    return [*compiled, *(Runner("numba", n) for n in (1, 2) if numba)]


def pieces(count: int, chance: random.Random) -> list[int]:
    """``count`` cut at random: anything from one piece to many small ones."""
    cuts = sorted(chance.randrange(count + 1) for _ in range(chance.choice((0, 1, 3, 10))))
    return [b - a for a, b in zip([0, *cuts], [*cuts, count], strict=True)]


def places(n: int, chance: random.Random) -> Iterator[tuple[int, int]]:
    """``(position, count)``: mostly one after another from 0, at last the far places."""
    tail = [
        (start + chance.randrange(-400, 400), min(PIECE // 4, max(1, n // 20))) for start in FAR
    ]
    rest = n - sum(count for _, count in tail)
    position = 0
    while position < rest:
        count = min(rest - position, chance.randrange(1, PIECE))
        yield position, count
        position += count
    yield from tail


def draw_mismatches(n: int, law: str, rounds: int, seed: int) -> dict[str, Any]:
    """Compare ``n`` draws of every runner with the reference's."""
    chance = random.Random(seed)
    stream = Key.from_unsafe_seed(seed, rounds).stream(PURPOSES[law], seed)
    wrong = {str(runner): 0 for runner in runners()}
    compared = largest = 0
    for position, count in places(n, chance):
        wanted = noise.lattice_draws(
            stream, position=position, count=count, distribution=law, backend="reference"
        )
        compared += count
        largest = max(largest, int(wanted.abs().max()))
        for runner in runners():
            with runner.active():
                at, drawn = position, []
                for piece in pieces(count, chance):
                    drawn.append(
                        noise.lattice_draws(
                            stream,
                            position=at,
                            count=piece,
                            distribution=law,
                            backend=runner.backend,
                        )
                    )
                    at += piece
            wrong[str(runner)] += int((torch.cat(drawn) != wanted).sum())
    return {"values": compared, "mismatches": wrong, "largest_scales": largest / 2**20}


def random_bits(count: int, kind: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Any bit pattern of a type: for floats denormals, infinities and NaN among them."""
    wide = kind in (torch.int64, torch.float64)
    words = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)
    bits = words if wide else (words >> 32).to(torch.int32)
    return bits.view(kind)


def moderate(count: int, kind: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Sums of the size that training makes, some far larger."""
    spread = 10.0 ** torch.empty(count, dtype=torch.float64).uniform_(-3, 9, generator=generator)
    return (torch.randn(count, generator=generator, dtype=torch.float64) * spread).to(kind)


def _same(a: torch.Tensor, b: torch.Tensor) -> int:
    """Entries whose bits differ."""
    kind = {4: torch.int32, 8: torch.int64}[a.element_size()]
    return int((a.view(kind) != b.view(kind)).sum())


def compare(
    make: Callable[[str], list[torch.Tensor]], first: Runner | None = None
) -> tuple[int, dict[str, int]]:
    """Run ``make`` on the reference, or on ``first``, and on every runner.

    Returns:
        Number of values, and mismatches per runner.
    """
    if first is None:
        wanted = make("reference")
    else:
        with first.active():
            wanted = make(first.backend)
    wrong = {}
    for runner in runners():
        with runner.active():
            got = make(runner.backend)
        wrong[str(runner)] = sum(_same(a, b) for a, b in zip(got, wanted, strict=True))
    return sum(t.numel() for t in wanted), wrong


def _streams(law: str, step: int) -> tuple[Stream, Stream]:
    key = Key.from_unsafe_seed(step)
    return key.stream(PURPOSES[law], step), key.stream(Purpose.ROUNDING, step)


def noisy_sum_mismatches(n: int, seed: int) -> dict[str, Any]:
    """``add_noise`` on every type, both laws, from odd positions."""
    generator = torch.Generator().manual_seed(seed)
    values, wrong = 0, {str(runner): 0 for runner in runners()}
    kinds = [(kind, law) for kind in (*noise.INTEGERS, *noise.FLOATS) for law in LAWS]
    share = max(1, n // (3 * len(kinds)))
    for step, (kind, law) in enumerate(kinds):
        stream, rounding = _streams(law, step)
        for make, scale in ((random_bits, 1.1), (moderate, 0.37), (moderate, 1e4)):
            x = make(share, kind, generator)
            extra = {"scale": scale, "rounding": rounding} if kind in noise.FLOATS else {}

            def released(
                backend: str,
                x: torch.Tensor = x,
                extra: dict[str, Any] = extra,
                law: str = law,
                stream: Stream = stream,
            ) -> list[torch.Tensor]:
                given = {"stream": stream, "distribution": law, "position": 331, **extra}
                return [noise.add_noise(x.clone(), backend=backend, **given)]

            count, differing = compare(released)
            values += count
            wrong = {name: wrong[name] + differing[name] for name in wrong}
    return {"values": values, "mismatches": wrong}


def update_mismatches(
    n: int, seed: int, rules: tuple[update.Rule, ...], first: Runner | None = None
) -> dict[str, Any]:
    """Two noisy updates of three tensors by every rule: parameters and buffers."""
    generator = torch.Generator().manual_seed(seed)
    values, wrong = 0, {str(runner): 0 for runner in runners()}
    forms = [
        (kind, total)
        for kind in noise.FLOATS
        for total in (*noise.INTEGERS, kind)
        for _ in range(len(LAWS))
    ]
    share = max(3, n // (len(rules) * len(forms)))
    sizes = (share // 2 + 1, 1, share // 2)
    for number, (kind, total) in enumerate(forms):
        law = sorted(LAWS)[number % len(LAWS)]
        stream, rounding = _streams(law, number)
        params = [torch.randn(s, generator=generator, dtype=kind) for s in sizes]
        sums = [moderate(s, total, generator) for s in sizes]
        drawn = update.Noise(
            distribution=law,
            scales=(1.1, 0.3, 1.1),
            stream=stream,
            rounding=rounding,
            positions=(0, sizes[0] + 7, sizes[0] + 9),
        )
        for rule in rules:

            def updated(
                backend: str,
                params: list[torch.Tensor] = params,
                sums: list[torch.Tensor] = sums,
                rule: update.Rule = rule,
                drawn: update.Noise = drawn,
            ) -> list[torch.Tensor]:
                mine = [p.clone() for p in params]
                state = rule.init(mine)
                for _ in range(2):
                    update.step(
                        mine,
                        sums,
                        rule=rule,
                        state=state,
                        gradient_scale=1 / 64,
                        noise=drawn,
                        backend=backend,
                    )
                return [*mine, *(b for buffers in state.buffers.values() for b in buffers)]

            count, differing = compare(updated, first)
            values += count
            wrong = {name: wrong[name] + differing[name] for name in wrong}
    return {"values": values, "mismatches": wrong}


def run(n: int = 10**8, seed: int = 0) -> dict[str, Any]:
    """``n`` Gaussian draws, and shares of it for everything else: 0 mismatches everywhere."""
    started = time.perf_counter()
    figures = {
        "gaussian": draw_mismatches(n, "gaussian", 20, seed),
        "gaussian, 12 rounds": draw_mismatches(max(1, n // 50), "gaussian", 12, seed + 1),
        "gaussian, 8 rounds": draw_mismatches(max(1, n // 50), "gaussian", 8, seed + 2),
        "laplace": draw_mismatches(max(1, n // 10), "laplace", 20, seed + 3),
        "noisy sums": noisy_sum_mismatches(n // 10, seed),
        "SGD updates": update_mismatches(n // 50, seed, SGD_RULES),
        "Adam updates": update_mismatches(n // 50, seed, ADAM_RULES, runners()[0]),
    }
    compared = list(map(str, runners()))
    mismatches = sum(sum(figure["mismatches"].values()) for figure in figures.values())
    return {
        "passed": mismatches == 0 and len(compared) >= 2,
        "figures": {"against the reference": compared, "mismatches": mismatches, **figures},
        "seconds": round(time.perf_counter() - started, 1),
    }


def headline(figures: dict[str, Any]) -> str:
    """One line for the table."""
    values = sum(f["values"] for f in figures.values() if isinstance(f, dict))
    return f"{figures['mismatches']} mismatches in {values:.3g} values x {len(runners())} runners"


if __name__ == "__main__":
    import json
    import sys

    print(json.dumps(run(int(float(sys.argv[1])) if len(sys.argv) > 1 else 10**8), indent=2))

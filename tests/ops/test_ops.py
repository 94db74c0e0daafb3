"""Every op on every backend and instruction set against its reference, which keeps its laws."""

from __future__ import annotations

import math
from collections.abc import Generator
from functools import cache
from itertools import product

import pytest
import torch

from dpkern import ops
from dpkern.base.dispatch import OPS
from dpkern.base.rng import Purpose
from dpkern.bench.formulations.update import torch_optimizer
from dpkern.ops import clip, noise, testing, update
from tests.ops.backends.every_backend import INTERPRETED, every_backend
from tests.ops.small_cases import RULES, SMALL_CASES, SmallCase


@pytest.fixture(scope="module", autouse=True)
def references() -> Generator[None, None, None]:
    """The reference computes each case once, for all backends and instruction sets."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in {type(case) for case in SMALL_CASES}:
            patch.setattr(kind, "expected", cache(kind.expected))
        yield


@every_backend
@pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.name)
def test_backend_agrees_with_reference(case: SmallCase, backend: str) -> None:
    case.verify(backend)


@pytest.mark.parametrize("number", range(len(testing.available_isas())))
def test_instruction_sets_agree_with_reference(number: int) -> None:
    # How calls are divided among threads is the same for all: one on each suffices.
    with testing.isa(testing.available_isas()[number]):
        for i, case in enumerate(SMALL_CASES):
            with testing.threads(1 + (number + i) % 2):
                case.verify("cpu")


@pytest.mark.parametrize("isa", testing.available_isas())
@pytest.mark.parametrize("arithmetic", clip.ARITHMETIC)
def test_clipped_sums_have_the_same_bits_on_all_instruction_sets(isa: str, arithmetic: str) -> None:
    grads = torch.randn(13, 20_000, generator=torch.Generator().manual_seed(1))
    unit = 2.0**-20 if arithmetic == "exact" else None
    for threads in (1, 2):
        with testing.threads(threads):
            wanted = clip.clip_sum(grads, 1.0, arithmetic=arithmetic, unit=unit, backend="cpu")
            with testing.isa(isa):
                got = clip.clip_sum(grads, 1.0, arithmetic=arithmetic, unit=unit, backend="cpu")
        assert torch.equal(got.norms, wanted.norms)
        assert torch.equal(got.sums[0], wanted.sums[0])


def test_exact_sums_do_not_depend_on_the_number_of_threads() -> None:
    grads = torch.randn(101, 5000, generator=torch.Generator().manual_seed(1))
    results = []
    for threads in (1, 2, 3):
        with testing.threads(threads):
            results.append(clip.clip_sum(grads, 1.0, arithmetic="exact", unit=2.0**-20).sums[0])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@every_backend
@pytest.mark.parametrize("rule", RULES)
def test_without_noise_the_update_is_torch_optim(rule: str, backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    ours = [torch.randn(50, 7, generator=generator), torch.randn(600, generator=generator)]
    theirs = [torch.nn.Parameter(p.clone()) for p in ours]
    optimizer = torch_optimizer(RULES[rule], theirs)
    state = RULES[rule].init(ours)
    steps = 20 if backend in INTERPRETED else 100
    for _ in range(steps):
        sums = [torch.randn(p.shape, generator=generator) for p in ours]
        for leaf, total in zip(theirs, sums, strict=True):
            leaf.grad = total / 64
        optimizer.step()
        update.step(
            ours,
            sums,
            rule=RULES[rule],
            state=state,
            gradient_scale=1 / 64,
            backend=backend,
        )
    assert state.steps == steps
    for p, q in zip(ours, theirs, strict=True):
        testing.assert_close(rule, p, q.detach(), 5e-6)


@every_backend
def test_clipping_formula(backend: str) -> None:
    grads = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    result = clip.clip_sum(grads, 1.0, backend=backend)
    assert result.norms.tolist() == pytest.approx([5.0, 0.5, 0.0])
    assert result.sums[0].tolist() == pytest.approx([0.9, 1.2], rel=1e-6)
    automatic = clip.clip_sum(grads, 1.0, style="automatic", backend=backend)
    expected = [3 / 5.01 + 0.3 / 0.51, 4 / 5.01 + 0.4 / 0.51]
    assert automatic.sums[0].tolist() == pytest.approx(expected, rel=1e-6)
    layers = clip.clip_sum([grads, 2 * grads], [1.0, 5.0], style="per_layer", backend=backend)
    assert layers.norm_bound == pytest.approx(math.sqrt(26))
    assert layers.sums[1].tolist() == pytest.approx([3.6, 4.8], rel=1e-6)


@every_backend
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("arithmetic", clip.ARITHMETIC)
def test_non_finite_samples_contribute_nothing(
    backend: str, poison: float, arithmetic: str
) -> None:
    grads = [torch.randn(5, 300), torch.randn(5, 4)]
    unit = 2.0**-20 if arithmetic == "exact" else None
    keep = [g[[0, 1, 3, 4]] for g in grads]
    wanted = clip.clip_sum(keep, 1.0, arithmetic=arithmetic, unit=unit, backend=backend)
    grads[1][2, 3] = poison
    got = clip.clip_sum(grads, 1.0, arithmetic=arithmetic, unit=unit, backend=backend)
    assert got.nonfinite == 1
    for a, b in zip(got.sums, wanted.sums, strict=True):
        testing.assert_close("sums", a, b, 0.0 if arithmetic == "exact" else 1e-6)


@every_backend
@pytest.mark.parametrize("max_norm", [1.0, 1e-3, 1e-6, 2.0**-96])
def test_tiny_factors_do_not_lift_a_sample_above_its_bound(backend: str, max_norm: float) -> None:
    # The factor is a denormal float32 here: rounded to nearest, it would exceed the bound.
    generator = torch.Generator().manual_seed(3)
    for _ in range(10 if backend in INTERPRETED else 50):
        grads = torch.rand(1, 5, generator=generator) * 3e38
        own = clip.clip_sum(grads, max_norm, backend=backend).sums[0]
        assert float(own.double().norm()) <= max_norm


@every_backend
def test_integers_that_exceed_the_bound_are_shrunk(backend: str) -> None:
    # M = floor(1.9) = 1: the second sample's integers (1, 1) are too many, the first one's fit.
    grads = torch.tensor([[1.2, 0.0], [1.0001, 1.0001]])
    result = clip.clip_sum(grads, 1.9, arithmetic="exact", unit=1.0, backend=backend)
    assert result.sums[0].tolist() == [1, 0]


@every_backend
def test_a_noisy_gradient_that_overflows_is_no_missing_one(backend: str) -> None:
    params, rule = [torch.ones(3)], update.SGD(lr=0.1)
    drawn = update.Noise(
        distribution="gaussian",
        scales=(2.0**116,),
        stream=testing.KEY.stream(Purpose.NOISE, 2),
        positions=(0,),
        rounding=testing.KEY.stream(Purpose.ROUNDING, 2),
    )
    given = {"rule": rule, "state": rule.init(params), "noise": drawn, "gradient_scale": 1e6}
    bad = update.step(params, [torch.tensor([1e38, 3e38, -3e38])], backend=backend, **given)
    assert bad == 0
    assert torch.isinf(params[0]).all()


@every_backend
def test_accumulators_continue_a_sum(backend: str) -> None:
    grads = torch.randn(40, 700)
    whole = clip.clip_sum(grads, 1.0, arithmetic="exact", unit=1e-6, backend=backend)
    first = clip.clip_sum(grads[:13], 1.0, arithmetic="exact", unit=1e-6, backend=backend)
    clip.clip_sum(grads[13:], 1.0, arithmetic="exact", unit=1e-6, out=first.sums, backend=backend)
    assert torch.equal(whole.sums[0], first.sums[0])


@every_backend
def test_whitened_norms(backend: str) -> None:
    grads, center = torch.randn(6, 9), torch.randn(9)
    scale = torch.rand(9) + 0.5
    with_fallback = clip.sample_norm(grads, scale=scale, center=center)
    wanted = ((grads.double() - center) / scale).norm(dim=1)
    testing.assert_close("norms", with_fallback, wanted, 1e-12)
    testing.assert_close(
        "plain", clip.sample_norm(grads, backend=backend), grads.double().norm(dim=1), 1e-12
    )


def test_noise_per_coordinate_scale_is_the_scalar_one_coordinate_by_coordinate() -> None:
    key = testing.KEY
    given = {
        "stream": key.stream(Purpose.NOISE, 9),
        "rounding": key.stream(Purpose.ROUNDING, 9),
    }
    scale = torch.tensor([0.5, 2.0, 8.0], dtype=torch.float64)
    together = noise.add_noise(torch.ones(3), scale=scale, **given)
    for i in range(3):
        alone = noise.add_noise(torch.ones(3), scale=float(scale[i]), **given)
        assert together[i] == alone[i]


@every_backend
def test_views_and_offsets_are_not_overrun(backend: str) -> None:
    shifts, counts = range(5), (1, 7, 511, 513, 1025)
    # Nothing is aligned in the interpreter: there every shift and every count is enough.
    interpreted = backend in INTERPRETED
    pairs = zip(shifts, counts, strict=True) if interpreted else product(shifts, counts)
    for shift, count in pairs:
        buffer = torch.full((count + 10,), 42, dtype=torch.int32)
        view = buffer[shift : shift + count]
        stream = testing.KEY.stream(Purpose.NOISE, 2)
        noise.add_noise(view, stream=stream, position=shift, backend=backend)
        assert (buffer[:shift] == 42).all()
        assert (buffer[shift + count :] == 42).all()
        again = torch.full((count,), 42, dtype=torch.int32)
        noise.add_noise(again, stream=stream, position=shift, backend="reference")
        assert torch.equal(view, again)


@pytest.mark.parametrize("isa", testing.available_isas())
@pytest.mark.parametrize("law", ["gaussian", "laplace"])
def test_block_counters_beyond_32_bits(isa: str, law: str) -> None:
    # Coordinates whose cipher blocks straddle counter 2^32 (48 blocks per 512 coordinates).
    position = (1 << 32) // 48 * 512 - 700
    stream = testing.KEY.stream(Purpose.NOISE, 2)
    given = {"position": position, "count": 3000, "distribution": law}
    with testing.isa(isa):
        got = noise.lattice_draws(stream, backend="cpu", **given)
        rounding = testing.KEY.stream(Purpose.ROUNDING, 2)
        floats = noise.add_noise(
            torch.zeros(3000),
            stream=stream,
            rounding=rounding,
            scale=1.0,
            position=(1 << 32) // 16 * 512 - 700,
            backend="cpu",
        )
    assert torch.equal(got, noise.lattice_draws(stream, backend="reference", **given))
    wanted = noise.add_noise(
        torch.zeros(3000),
        stream=stream,
        rounding=rounding,
        scale=1.0,
        position=(1 << 32) // 16 * 512 - 700,
        backend="reference",
    )
    assert torch.equal(floats, wanted)


@pytest.mark.parametrize("name", sorted(OPS))
def test_every_op_is_documented_and_priced(name: str) -> None:
    documented = OPS[name].__doc__ or ""
    assert "Raises:" in documented
    assert OPS[name].cost is not None


def test_costs_count_words_and_bytes() -> None:
    x = torch.zeros(1024, dtype=torch.int32)
    cost = noise.add_noise.cost(x, stream=testing.KEY.stream(Purpose.NOISE, 0))
    assert (cost.bytes_read, cost.bytes_written, cost.random_words) == (4096, 4096, 1536)
    rounded = noise.add_noise.cost(x.float(), stream=testing.KEY.stream(Purpose.NOISE, 0))
    assert rounded.random_words == 2048
    grads = torch.zeros(8, 100)
    assert clip.clip_sum.cost(grads, 1.0).bytes == 3200 + 400 + 64
    params = [torch.zeros(100)]
    rule = ops.update.SGD(lr=0.1, momentum=0.9)
    moved = update.step.cost(params, params, rule=rule, state=rule.init(params))
    assert (moved.bytes_read, moved.bytes_written, moved.random_words) == (1200, 800, 0)


def test_in_place_changes_are_visible_to_autograd() -> None:
    leaf = torch.nn.Parameter(torch.ones(4))
    loss = (leaf * leaf).sum()
    rule = update.SGD(lr=0.1)
    update.step([leaf], [torch.ones(4)], rule=rule, state=rule.init([leaf]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()

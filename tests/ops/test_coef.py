"""Coefficients of polynomial losses: the formulas, the noise of ``add_noise``, what is refused."""

from __future__ import annotations

import hashlib
import itertools
import math
from functools import cache
from typing import Any

import pytest
import torch

from dpkern.base.errors import DPKernError, InvalidInput, PrivacyError
from dpkern.base.rng import Key, Purpose
from dpkern.ops import coef, noise, testing
from tests.ops.backends.every_backend import INTERPRETED, every_backend

KEY = Key.from_unsafe_seed(0, rounds=8)
STREAM, ROUNDING = KEY.stream(Purpose.LAPLACE, 3), KEY.stream(Purpose.ROUNDING, 3)
FLOATS = (torch.float32, torch.float64)
SHAPES = ((0, 4), (3, 0), (40, 14), (2, 700))


def some(cases: Any, backend: str) -> list[Any]:
    """The last of a sweep's cases for the interpreter, which is as slow for one coefficient as for
    a thousand; else all."""
    return list(cases)[-1 if backend in INTERPRETED else 0 :]


def often_enough(backend: str, *, once: bool) -> None:
    """Leave the interpreter the parameters of ``once``."""
    if backend in INTERPRETED and not once:
        pytest.skip(f"{backend} is interpreted")


# Coefficients, losses and slopes of both forms; the linear coefficients are the same.
GOLDEN = {
    "0a308d2168ea",
    "73fe7257bdac",
    "9662ea8cfb2a",
    "5a11fa2807b7",
    "6533a071238e",
    "cb6c9a2e96d7",
    "fcbc0fa4845a",
}


def targets_of(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.rand(shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    if x.numel() > 2:
        x.view(-1)[:3] = torch.tensor([0.0, 0.5, 1.0])
    return x


def logits_of(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=dtype)


def release(scale: Any = 0.75, position: int = 0, draws: coef.Draws | None = None) -> coef.Noise:
    return coef.Noise(scale=scale, stream=STREAM, rounding=ROUNDING, position=position, draws=draws)


def made_ahead(position: int, count: int, bits: bool) -> coef.Draws:
    """Draws of a release of so many targets, from a little before it to a little after."""
    first = max(0, position - 3)
    place = {"position": first, "count": coef.quadratic_position(position, count) + count + 5}
    values = noise.lattice_draws(STREAM, distribution="laplace", **place)
    made = noise.rounding_bits(ROUNDING, **place) if bits else None
    return coef.Draws(first, values, made)


def same(a: Any, b: Any) -> bool:
    """The same bits, signs of zero included."""
    kinds = {torch.float32: torch.int32, torch.float64: torch.int64}
    return all(
        torch.equal(x.view(kinds[x.dtype]), y.view(kinds[y.dtype]))
        for x, y in zip(a, b, strict=True)
    )


@every_backend
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_without_noise_they_are_those_of_the_sources(dtype: torch.dtype, backend: str) -> None:
    x = targets_of((7, 5), dtype)
    printed = coef.perturb(x, form="printed", backend=backend)
    assert torch.equal(printed.linear, 0.5 - x)
    # (12): -1/2 times the linear one, so that the only stationary point is z = 1.
    torch.testing.assert_close(printed.quadratic, -printed.linear / 2, rtol=0, atol=1e-7)
    taylor = coef.perturb(x, form="taylor", backend=backend)
    assert torch.equal(taylor.linear, printed.linear)
    assert torch.equal(taylor.quadratic, torch.full_like(x, 1 / 8))


def test_taylors_are_the_derivatives_of_the_cross_entropy() -> None:
    x = targets_of((4, 6), torch.float64)
    z = torch.zeros_like(x, requires_grad=True)
    loss = x * torch.nn.functional.softplus(-z) + (1 - x) * torch.nn.functional.softplus(z)
    (first,) = torch.autograd.grad(loss.sum(), z, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), z)
    made = coef.perturb(x, form="taylor")
    torch.testing.assert_close(made.linear, first.detach())
    torch.testing.assert_close(made.quadratic, second / 2)
    printed = coef.perturb(x, form="printed")
    assert float((printed.quadratic - second / 2).abs().max()) > 0.1


@every_backend
@pytest.mark.parametrize("form", coef.FORMS)
@pytest.mark.parametrize("position", [0, 37, 2**40 + 500])
@pytest.mark.parametrize("scaled", ["one", "each"])
def test_noise_is_that_of_add_noise(form: str, position: int, scaled: str, backend: str) -> None:
    often_enough(backend, once=position == 37 and form == "printed")
    for shape, dtype in some(itertools.product(SHAPES, FLOATS), backend):
        x = targets_of(shape, dtype)
        scale: Any = torch.linspace(0.1, 30, len(x)) if scaled == "each" else 0.75
        got = coef.perturb(x, form=form, noise=release(scale, position), backend=backend)
        if scaled == "each":
            scale = scale[:, None].expand(shape).contiguous()
        given = {"stream": STREAM, "rounding": ROUNDING, "distribution": "laplace"}
        want = coef.perturb(x, form=form)
        behind = -(-(position + x.numel()) // 512) * 512
        for values, at in zip(want, (position, behind), strict=True):
            noise.add_noise(values, scale=scale, position=at, backend="reference", **given)
        assert same(got, want), (shape, dtype)


@every_backend
@pytest.mark.parametrize("bits", [False, True], ids=["rounding-from-stream", "rounding-ahead"])
@pytest.mark.parametrize("position", [0, 700])
def test_draws_made_ahead_are_the_streams_own(position: int, bits: bool, backend: str) -> None:
    for shape in SHAPES:
        x, z = targets_of(shape), logits_of(shape)
        own, draws = release(position=position), made_ahead(position, x.numel(), bits)
        other = KEY.stream(Purpose.SAMPLING, 3)  # nothing may come from here
        rounding = None if bits else ROUNDING
        ahead = coef.Noise(
            scale=0.75, stream=other, rounding=rounding, position=position, draws=draws
        )
        given = {"form": "printed", "backend": backend}
        assert same(coef.perturb(x, noise=ahead, **given), coef.perturb(x, noise=own, **given))
        assert same(
            coef.quadratic(z, x, noise=ahead, **given), coef.quadratic(z, x, noise=own, **given)
        )


@every_backend
@pytest.mark.parametrize("form", coef.FORMS)
@pytest.mark.parametrize("noisy", [None, "one", "each"])
def test_the_loss_is_the_polynomial_and_its_derivative(
    form: str, noisy: str | None, backend: str
) -> None:
    cases = ((torch.float32, False), (torch.float32, True), (torch.float64, True))
    often_enough(backend, once=noisy is None or (noisy, form) == ("each", "taylor"))
    for shape, (dtype, shifted) in some(itertools.product(SHAPES, cases), backend):
        x, z = targets_of(shape, dtype), logits_of(shape, dtype)
        c = torch.linspace(-1, 2, len(x), dtype=dtype) if shifted else None
        scale: Any = torch.linspace(0.1, 2, len(x)) if noisy == "each" else 0.75
        given = {"form": form, "noise": None if noisy is None else release(scale, 37)}
        loss, dz = coef.quadratic(z, x, shift=c, backend=backend, **given)
        assert same((loss, dz), coef.quadratic(z, x, shift=c, backend="reference", **given))
        a1, a2 = (a.double() for a in coef.perturb(x, **given))
        w = (z if c is None else z + c[:, None]).double().requires_grad_()
        value = (a1 * w + a2 * w**2).sum(1)
        (slope,) = torch.autograd.grad(value.sum(), w)
        torch.testing.assert_close(loss, value.detach(), rtol=1e-12, atol=1e-12)
        tolerance = 1e-5 if dtype is torch.float32 else 1e-12
        torch.testing.assert_close(dz.double(), slope, rtol=tolerance, atol=tolerance)


LARGE = (70, 601)
"""Enough for some coefficients to depend on their rounding bits."""


def large(scaled: bool, backend: str) -> tuple[torch.Tensor, ...]:
    """Coefficients, losses and slopes of many targets."""
    x, z = targets_of(LARGE), logits_of(LARGE)
    scale = torch.linspace(0.1, 2, len(x), dtype=torch.float64) if scaled else 0.75
    given = {"form": "printed", "noise": release(scale, 300), "backend": backend}
    return *coef.perturb(x, **given), *coef.quadratic(z, x, **given)


@cache
def large_wanted(scaled: bool) -> tuple[torch.Tensor, ...]:
    return large(scaled, "reference")


@pytest.mark.parametrize("scaled", [False, True], ids=["one", "each"])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("isa", testing.available_isas())
def test_bits_do_not_depend_on_threads_and_instruction_sets(
    isa: str, threads: int, scaled: bool
) -> None:
    with testing.isa(isa), testing.threads(threads):
        got = large(scaled, "cpu")
    assert same(got, large_wanted(scaled))


@every_backend
def test_bits_of_many_coefficients(backend: str) -> None:
    if backend == "reference":
        pytest.skip("the others are compared with it")
    assert same(large(False, backend), large_wanted(False))


@every_backend
def test_golden(backend: str) -> None:
    often_enough(backend, once=False)
    # Positions, forms and the order of sums are part of what a run can be repeated by.
    places = torch.arange(1200).view(40, 30)
    x, z = (places % 101).double() / 101, (places * 37 % 257 - 128).double() / 33
    digests = set()
    for form in coef.FORMS:
        given = {"form": form, "noise": release(0.75, 100), "backend": backend}
        for made in (*coef.perturb(x, **given), *coef.quadratic(z, x, **given)):
            digests.add(hashlib.sha256(made.numpy().tobytes()).hexdigest()[:12])
    assert digests == GOLDEN


def test_moments_are_those_of_laplace() -> None:
    x, scale = torch.full((400, 500), 0.25), 2.0
    a1, a2 = coef.perturb(x, form="printed", noise=release(scale))
    for values, mean in ((a1, 0.25), (a2, -0.125)):
        z = (values.double() - mean) / scale
        assert abs(float(z.mean())) < 5 * math.sqrt(2 / z.numel())
        assert float(z.abs().mean()) == pytest.approx(1, abs=5 / math.sqrt(z.numel()))
    correlation = torch.corrcoef(torch.stack((a1.view(-1), a2.view(-1))))[0, 1]
    assert abs(float(correlation)) < 5 / math.sqrt(x.numel())


def test_quadratic_coefficients_begin_at_a_multiple_of_512() -> None:
    places = [coef.quadratic_position(p, n) for p, n in ((0, 0), (0, 1), (0, 512), (5, 512))]
    assert places == [0, 512, 512, 1024]
    with pytest.raises(InvalidInput, match="count"):
        coef.quadratic_position(0, -1)


@every_backend
def test_results_go_where_they_are_wanted(backend: str) -> None:
    given = {"form": "printed", "noise": release(), "backend": backend}
    calls = (coef.perturb, (X,)), (coef.quadratic, (Z, X))
    for call, inputs in some(calls, backend):
        want = call(*inputs, **given)
        out = tuple(torch.full_like(part, 7.0) for part in want)
        before = out[1]._version
        got = call(*inputs, out=out, **given)
        assert got[0] is out[0]
        assert same(out, want)
        assert out[1]._version > before  # autograd notices


def bad(**change: Any) -> dict[str, Any]:
    given = {"scale": 0.75, "stream": STREAM, "rounding": ROUNDING, "position": 0, "draws": None}
    return {"noise": coef.Noise(**{**given, **change})}


X, Y = targets_of((3, 4)), targets_of((3, 4))
Z = logits_of((3, 4))
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "targets-above": ("targets", {"targets": X + 0.25, **bad()}),
    "targets-below": ("targets", {"targets": X - 0.25, **bad()}),
    "targets-nan": ("targets", {"targets": X * math.nan, **bad()}),
    "scale-zero": ("noise.scale", bad(scale=0.0)),
    "scale-nan": ("noise.scale", bad(scale=math.nan)),
    "scale-small": ("noise.scale", bad(scale=2.0**-105)),
    "scales-shape": ("noise.scale", bad(scale=torch.ones(4))),
    "scales-int": ("noise.scale", bad(scale=torch.ones(3, dtype=torch.int64))),
    "scales-zero": ("noise.scale", bad(scale=torch.tensor([1.0, 0.0, 1.0]))),
    "stream": ("noise.stream", bad(stream=None)),
    "rounding": ("noise.rounding", bad(rounding=None)),
    "position": ("noise.position", bad(position=-1)),
    "out-one": ("out", {"out": X}),
    "out-three": ("out", {"out": (X, X, X)}),
    "draws": ("noise.draws", bad(draws=torch.zeros(12))),
    # They end with the linear coefficients.
    "draws-short": (
        "noise.draws",
        bad(draws=coef.Draws(0, torch.zeros(523, dtype=torch.int32))),
    ),
    "draws-alone": (
        "noise.rounding",
        bad(draws=coef.Draws(0, torch.zeros(524, dtype=torch.int32)), rounding=None),
    ),
}
REFUSED_COEFFICIENTS = {
    "out-shape": ("out[1]", {"out": (X.clone(), X[:2].clone())}),
    "out-dtype": ("out[0]", {"out": (X.double(), X.clone())}),
    "out-strides": ("out[0]", {"out": (torch.zeros(4, 3).t(), X.clone())}),
    "out-input": ("out", {"out": (X.clone(), X)}),
    "out-same": ("out", {"out": (Y, Y)}),
}
REFUSED_LOGITS: dict[str, tuple[str, dict[str, Any]]] = {
    "out-loss": ("out[0]", {"out": (torch.zeros(3), Z.clone())}),
    "out-logits": ("out", {"out": (torch.zeros(3, dtype=torch.float64), Z)}),
}


def refuses(call: Any, name: str, error: type[DPKernError] = InvalidInput) -> None:
    with pytest.raises(DPKernError) as caught:
        call()
    assert type(caught.value) is error
    assert caught.value.name == name
    assert caught.value.remedy.endswith(".")


@pytest.mark.parametrize("case", [*REFUSED, *REFUSED_COEFFICIENTS])
def test_bad_releases_are_refused(case: str) -> None:
    name, change = (REFUSED | REFUSED_COEFFICIENTS)[case]
    given = {"targets": X, "form": "printed", "noise": None, **change}
    refuses(lambda: coef.perturb(given.pop("targets"), **given), name)


@pytest.mark.parametrize("case", [*REFUSED, *REFUSED_LOGITS])
def test_bad_losses_are_refused(case: str) -> None:
    name, change = (REFUSED | REFUSED_LOGITS)[case]
    given = {"z": Z, "targets": X, "form": "printed", "noise": None, **change}
    refuses(lambda: coef.quadratic(given.pop("z"), given.pop("targets"), **given), name)


# In whole vectors and in what is left of a row.
OUTSIDE = {0: -1e-7, 5: 1.0000001, 612: math.nan, 1399: math.inf}


@every_backend
@pytest.mark.parametrize("ahead", [False, True], ids=["inline", "ahead"])
def test_a_target_outside_is_refused_and_nothing_released(ahead: bool, backend: str) -> None:
    z = logits_of((2, 700))
    given = {"noise": release(draws=made_ahead(0, z.numel(), True) if ahead else None)}
    calls = {coef.perturb: torch.float32, coef.quadratic: torch.float64}
    for (place, value), (call, kind) in itertools.product(OUTSIDE.items(), calls.items()):
        x = targets_of((2, 700))
        x.view(-1)[place] = value
        inputs = (x,) if call is coef.perturb else (z, x)
        shape = x.shape if call is coef.perturb else (2,)
        out = torch.full(shape, 7.0, dtype=kind), torch.full_like(x, 7.0)
        with pytest.raises(InvalidInput, match=r"expected entries in \[0, 1\]"):
            call(*inputs, form="taylor", out=out, backend=backend, **given)
        assert all(bool(((part == 7) | (part == 0)).all()) for part in out)


def test_rounding_has_a_stream_of_its_own() -> None:
    given = {"form": "taylor", **bad(rounding=STREAM)}
    refuses(lambda: coef.perturb(X, **given), "noise.rounding", PrivacyError)


def test_without_noise_targets_may_lie_anywhere() -> None:
    # Unbiased estimates of labels do, and NaN stays visible.
    x = torch.tensor([[-1.0, 2.0, math.nan]])
    made = coef.perturb(x, form="printed")
    assert torch.equal(made.linear[:, :2], torch.tensor([[1.5, -1.5]]))
    loss, dz = coef.quadratic(torch.ones_like(x), x, form="printed")
    assert bool(loss.isnan().all())
    assert dz.isnan().tolist() == [[False, False, True]]


@every_backend
def test_logits_that_are_not_finite_spread_to_their_record_only(backend: str) -> None:
    z = Z.clone()
    z[1, 2] = math.inf
    z[2, 0] = math.nan
    loss, _ = coef.quadratic(z, X, form="taylor", noise=release(), backend=backend)
    assert torch.isfinite(loss).tolist() == [True, False, False]

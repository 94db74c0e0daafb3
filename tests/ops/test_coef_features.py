"""``coef.expanded``: the loss of the sources, its derivatives, its noise, what is refused."""

from __future__ import annotations

import hashlib
import itertools
import math
from functools import cache
from typing import Any

import pytest
import torch

from dpkern.base.errors import InvalidInput, PrivacyError
from dpkern.base.rng import Purpose
from dpkern.nn import polynomial
from dpkern.ops import coef, noise, testing
from dpkern.ops.coef import features
from tests.ops.backends.every_backend import every_backend
from tests.ops.test_coef import KEY, ROUNDING, STREAM, bad, refuses, release, same

# Records, classes, features: nothing, one lane, whole lanes and more, whole runs and more.
SHAPES = ((0, 2, 3), (3, 0, 4), (3, 4, 0), (1, 1, 1), (16, 3, 16), (19, 4, 25))
FLOATS = (torch.float32, torch.float64)
GOLDEN = {
    torch.float32: ["bf156c303299", "0b8b514da6d4", "77f333c8984a"],
    torch.float64: ["dced64a71358", "225d58b1f6a6", "55d1151e0c81"],
}


def inputs(
    shape: tuple[int, int, int], dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden layer, targets and weights, from whole numbers."""
    records, classes, width = shape
    h = (torch.arange(records * width) * 37 % 129).to(dtype) / 128
    y = (torch.arange(records * classes) * 5 % 4).to(dtype) / 3
    w = (torch.arange(classes * width) * 91 % 257 - 128).to(dtype) / 70
    return h.view(records, width), y.view(records, classes), w.view(classes, width)


def coefficients(
    h: torch.Tensor, y: torch.Tensor, given: coef.Noise | None
) -> polynomial.PowerCoefficients:
    """Those of the sources, each noised by the op for tensors."""
    made = polynomial.feature_coefficients(h, y)
    if given is None:
        return made
    behind = coef.quadratic_position(given.position, made.linear.numel())
    for values, at in ((made.linear, given.position), (made.quadratic, behind)):
        scale: Any = given.scale
        if isinstance(scale, torch.Tensor):
            scale = scale.view(-1, *(1,) * (values.dim() - 1)).expand(values.shape).contiguous()
        place: dict[str, Any] = {"stream": STREAM, "rounding": ROUNDING, "position": at}
        noise.add_noise(values, distribution="laplace", scale=scale, **place)
    return made


def made_ahead(shape: tuple[int, int, int], position: int, bits: bool) -> coef.Draws:
    """Draws of a release, from a little before it to a little after."""
    records, classes, width = shape
    linear, first = records * classes * width, max(0, position - 3)
    count = coef.quadratic_position(position, linear) + linear * width + 5 - first
    values = noise.lattice_draws(
        STREAM, position=first, count=count, distribution="laplace", backend="reference"
    )
    made = noise.rounding_bits(ROUNDING, position=first, count=count) if bits else None
    return coef.Draws(first, values, made)


def noise_of(noisy: str | None, records: int) -> coef.Noise | None:
    """None, one scale, or each record's."""
    if noisy is None:
        return None
    return release(torch.linspace(0.1, 2, records) if noisy == "each" else 0.75, 37)


@cache
def wanted(
    shape: tuple[int, int, int], dtype: torch.dtype, noisy: str | None
) -> tuple[torch.Tensor, ...]:
    """What the reference gives."""
    return coef.expanded(
        *inputs(shape, dtype), noise=noise_of(noisy, shape[0]), backend="reference"
    )


@pytest.mark.parametrize("noisy", [None, "one", "each"])
def test_it_is_the_loss_of_the_sources_with_add_noise_in_its_coefficients(
    noisy: str | None,
) -> None:
    for shape, dtype in itertools.product(SHAPES, FLOATS):
        h, y, w = inputs(shape, dtype)
        loss, dweights, _ = wanted(shape, dtype, noisy)
        made = coefficients(h, y, noise_of(noisy, len(h)))
        wide = w.double().requires_grad_()
        widened = polynomial.PowerCoefficients(0.0, made.linear.double(), made.quadratic.double())
        value = polynomial.feature_expanded(wide, widened)
        (by_weights,) = torch.autograd.grad(value.sum(), wide)
        loose = 1e-4 if dtype is torch.float32 else 1e-11
        torch.testing.assert_close(loss, value.detach(), rtol=1e-11, atol=1e-10)
        torch.testing.assert_close(dweights.double(), by_weights, rtol=loose, atol=loose)


@every_backend
@pytest.mark.parametrize("noisy", [None, "one", "each"])
def test_bits_are_the_references(noisy: str | None, backend: str) -> None:
    for shape, dtype in itertools.product(SHAPES, FLOATS):
        given = {"noise": noise_of(noisy, shape[0]), "backend": backend}
        got = coef.expanded(*inputs(shape, dtype), **given)
        assert same(got, wanted(shape, dtype, noisy)), (shape, dtype)


def test_the_derivative_by_the_hidden_layer_passes_through_the_coefficients() -> None:
    h, y, w = inputs((19, 4, 25))
    h.requires_grad_()
    w.requires_grad_()
    loss = polynomial.feature_expanded(w, polynomial.feature_coefficients(h, y))
    by_hidden, by_weights = torch.autograd.grad(loss.sum(), (h, w))
    value, dweights, dhidden = coef.expanded(h, y, w)
    torch.testing.assert_close(value + 4 * math.log(2), loss.detach())
    torch.testing.assert_close(dweights, by_weights)
    torch.testing.assert_close(dhidden, by_hidden)
    assert not dhidden.requires_grad
    noised = coef.expanded(h, y, w, noise=release())
    assert torch.equal(noised[2], dhidden)
    assert not torch.allclose(noised[1], dweights)


@every_backend
@pytest.mark.parametrize("bits", [False, True], ids=["rounding-from-stream", "rounding-ahead"])
def test_draws_made_ahead_are_the_streams_own(bits: bool, backend: str) -> None:
    for shape in ((0, 2, 3), (5, 2, 17), (1, 1, 513)):
        own, draws = release(position=37), made_ahead(shape, 37, bits)
        rounding = None if bits else ROUNDING
        ahead = coef.Noise(
            scale=0.75,
            stream=KEY.stream(Purpose.SAMPLING, 3),
            rounding=rounding,
            position=37,
            draws=draws,
        )
        tensors = inputs(shape, torch.float32)
        got = coef.expanded(*tensors, noise=ahead, backend=backend)
        assert same(got, coef.expanded(*tensors, noise=own, backend=backend))


LARGE = (35, 2, 40)


@cache
def large_wanted(scaled: bool) -> tuple[torch.Tensor, ...]:
    return coef.expanded(*inputs(LARGE), noise=large_release(scaled), backend="reference")


def large_release(scaled: bool) -> coef.Noise:
    return release(torch.linspace(0.1, 2, LARGE[0]) if scaled else 0.75, 300)


@pytest.mark.parametrize("scaled", [False, True], ids=["one", "each"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("isa", testing.available_isas())
def test_bits_do_not_depend_on_threads_and_instruction_sets(
    isa: str, threads: int, scaled: bool
) -> None:
    with testing.isa(isa), testing.threads(threads):
        got = coef.expanded(*inputs(LARGE), noise=large_release(scaled), backend="cpu")
    assert same(got, large_wanted(scaled))


def test_the_reference_holds_as_many_coefficients_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = coef.expanded.reference(*inputs(LARGE), noise=large_release(True))
    monkeypatch.setattr(features, "ENTRIES_AT_ONCE", 1)
    assert same(coef.expanded.reference(*inputs(LARGE), noise=large_release(True)), whole)


@every_backend
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_golden(dtype: torch.dtype, backend: str) -> None:
    # Positions and the order of sums are part of what a run can be repeated by.
    made = coef.expanded(*inputs((35, 4, 33), dtype), noise=release(0.75, 100), backend=backend)
    digests = [hashlib.sha256(part.numpy().tobytes()).hexdigest()[:12] for part in made]
    assert digests == GOLDEN[dtype]


@every_backend
def test_results_go_where_they_are_wanted(backend: str) -> None:
    tensors, given = inputs((3, 2, 5)), {"noise": release(), "backend": backend}
    want = coef.expanded(*tensors, **given)
    out = tuple(torch.full_like(part, 7.0) for part in want)
    before = out[1]._version
    assert coef.expanded(*tensors, out=out, **given)[0] is out[0]
    assert same(out, want)
    assert out[1]._version > before  # autograd notices


H, Y, W = inputs((3, 2, 5))
LOSS = torch.zeros(3, dtype=torch.float64)
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "hidden-above": ("hidden", {"hidden": H + 0.5, **bad()}),
    "hidden-nan": ("hidden", {"hidden": H * math.nan, **bad()}),
    "targets-classes": ("targets", {"targets": Y[:, :1].contiguous()}),
    "targets-below": ("targets", {"targets": Y - 0.25, **bad()}),
    "scale": ("noise.scale", bad(scale=0.0)),
    "scales-shape": ("noise.scale", bad(scale=torch.ones(2))),
    "rounding": ("noise.rounding", bad(rounding=None)),
    # They end with the linear coefficients: 3 x 2 x 5, then 150 from 512 on.
    "draws-short": ("noise.draws", bad(draws=coef.Draws(0, torch.zeros(661, dtype=torch.int32)))),
    "out-two": ("out", {"out": (LOSS, W.clone())}),
    "out-loss": ("out[0]", {"out": (LOSS.float(), W.clone(), H.clone())}),
    "out-input": ("out", {"out": (LOSS, W, H.clone())}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_losses_are_refused(case: str) -> None:
    name, change = REFUSED[case]
    given = {"hidden": H, "targets": Y, "weights": W, "noise": None, **change}
    tensors = [given.pop(key) for key in ("hidden", "targets", "weights")]
    refuses(lambda: coef.expanded(*tensors, **given), name)


def test_rounding_has_a_stream_of_its_own() -> None:
    given = bad(rounding=STREAM)
    refuses(lambda: coef.expanded(H, Y, W, **given), "noise.rounding", PrivacyError)


@every_backend
def test_what_is_not_finite_spreads_to_its_own(backend: str) -> None:
    h, w = H.clone(), W.clone()
    h[1, 2] = math.nan
    loss, dweights, dhidden = coef.expanded(h, Y, W, backend=backend)
    assert torch.isfinite(loss).tolist() == [True, False, True]
    assert bool(dweights.isnan().any(1).all())
    assert torch.isfinite(dhidden).all(1).tolist() == [True, False, True]
    w[1, 4] = math.inf
    for given in (None, release()):
        loss, dweights, _ = coef.expanded(H, Y, w, noise=given, backend=backend)
        assert not bool(torch.isfinite(loss).any())
        assert torch.isfinite(dweights).all(1).tolist() == [True, False]


def test_without_noise_targets_may_lie_anywhere() -> None:
    # Unbiased estimates of labels do.
    loss, _, _ = coef.expanded(H, 3 * Y - 1, W)
    assert bool(torch.isfinite(loss).all())
    with pytest.raises(InvalidInput, match="targets"):
        coef.expanded(H, 3 * Y - 1, W, noise=release())

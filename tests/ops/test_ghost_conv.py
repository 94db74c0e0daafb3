"""Ghost ops of convolutions: every backend against per-sample autograd in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dpkern.base.errors import BackendError, InvalidInput
from dpkern.ops import ghost, testing
from dpkern.ops.ghost.conv import Geometry
from tests.ops.backends.every_backend import INTERPRETED, PARAMETERS, every_backend

pytestmark = pytest.mark.usefixtures("one_thread")

CONVOLUTIONS = (
    torch.nn.functional.conv1d,
    torch.nn.functional.conv2d,
    torch.nn.functional.conv3d,
)
ABOVE = {torch.float32: 1e-4, torch.float64: 1e-10}
"""How far a square may lie above the exact one."""
BELOW = 1e-13
"""The oracle's own rounding."""


@dataclass(frozen=True)
class Case:
    """A convolution; `size` numbers per spatial dimension."""

    batch: int
    channels: tuple[int, int]
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    dtype: torch.dtype = torch.float32

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "kernel_size": self.kernel,
            "stride": self.stride,
            "padding": self.padding,
            "dilation": self.dilation,
            "groups": self.groups,
        }

    @property
    def routes(self) -> tuple[str, ...]:
        return ("auto", "direct", "gram") if self.groups == 1 else ("auto", "direct")

    def routes_of(self, backend: str) -> tuple[str, ...]:
        """Those that differ: only the CPU kernels know more than one."""
        return self.routes if backend == "cpu" else ("auto",)

    def convolve(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        convolution = CONVOLUTIONS[len(self.size) - 1]
        return convolution(x, weight, None, self.stride, self.padding, self.dilation, self.groups)

    def inputs(self, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and output gradients."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(self.batch, self.channels[0], *self.size, generator=generator)
        output = self.convolve(x, torch.zeros(self.weight_shape))
        g = torch.randn(output.shape, generator=generator)
        return x.to(self.dtype), g.to(self.dtype)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.channels[1], self.channels[0] // self.groups, *self.kernel)

    def gradients(self, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        """Per-sample gradients by autograd in float64."""
        rows = torch.zeros(len(x), *self.weight_shape, dtype=torch.float64)
        for b in range(len(x)):
            weight = torch.zeros(self.weight_shape, dtype=torch.float64, requires_grad=True)
            output = self.convolve(x[b : b + 1].double(), weight)
            (rows[b],) = torch.autograd.grad(output, weight, g[b : b + 1].double())
        return rows


def square(batch: int, channels: tuple[int, int], size: int, kernel: int, **options: Any) -> Case:
    """A 2-D case with the same numbers in both dimensions."""
    sizes = {
        name: (options.get(name, default),) * 2
        for name, default in (("stride", 1), ("padding", kernel // 2), ("dilation", 1))
    }
    return Case(
        batch,
        channels,
        (size, size),
        (kernel, kernel),
        groups=options.get("groups", 1),
        dtype=options.get("dtype", torch.float32),
        **sizes,
    )


NAMED = {
    "lenet-first": square(3, (1, 6), 28, 5),
    "lenet-second": square(3, (6, 16), 14, 5, padding=0),
    "stem": square(2, (3, 16), 32, 3),
    "wide-map": square(2, (16, 16), 32, 3),
    "stride-2": square(2, (16, 32), 32, 3, stride=2),
    "shortcut": square(2, (16, 32), 32, 1, stride=2),
    "stride-2-channels": square(2, (96, 128), 8, 3, stride=2),
    "shortcut-channels": square(2, (64, 72), 8, 1, stride=2),
    "stride-3-dilated": square(2, (40, 24), 11, 3, stride=3, dilation=2, padding=2),
    "many-channels": square(2, (64, 48), 8, 3),
    "tiny-map": square(2, (40, 72), 4, 3),
    "depthwise": square(2, (20, 20), 9, 3, groups=20),
    "depthwise-multiplied": square(2, (6, 12), 9, 3, groups=6),
    "grouped": square(2, (32, 48), 10, 3, groups=2),
    "odd-map": square(2, (16, 32), 7, 3),
    "grouped-odd-map": square(2, (32, 64), 7, 3, groups=2),
    "line-of-channels": Case(3, (32, 17), (40,), (3,), (2,), (1,), (1,)),
    "grouped-few-inputs": square(2, (6, 40), 10, 3, groups=2),
    "wide-kernel": square(2, (2, 3), 15, 11),
    "padding-beyond-kernel": square(2, (3, 4), 5, 2, padding=3),
    "double": square(2, (5, 19), 9, 3, dtype=torch.float64),
    "one-sample": square(1, (17, 33), 7, 3),
    "empty": square(0, (3, 4), 7, 3),
}


def _drawn(seed: int) -> Case:
    draw = random.Random(seed)
    dims = 1 + seed % 3
    groups = draw.choice((1, 1, 1, 2, 3))
    channels = (groups * draw.choice((1, 2, 5, 16, 18)), groups * draw.choice((1, 3, 6, 17)))
    if draw.random() < 0.15:
        groups = draw.choice((2, 5))
        channels = (groups, groups)

    def numbers(*choices: int) -> tuple[int, ...]:
        return tuple(draw.choice(choices) for _ in range(dims))

    return Case(
        batch=draw.randint(0, 4),
        channels=channels,
        size=numbers(13, 14, 16, 17) if dims < 3 else numbers(13, 14),
        kernel=numbers(1, 2, 3, 5, 7) if dims < 3 else numbers(1, 2, 3),
        stride=numbers(1, 1, 2, 3),
        padding=numbers(0, 1, 2, 3),
        dilation=numbers(1, 1, 2),
        groups=groups,
        dtype=draw.choice((torch.float32, torch.float32, torch.float64)),
    )


CASES = [pytest.param(case, id=name) for name, case in NAMED.items()]
VOLUME = Case(2, (16, 5), (4, 5, 6), (3, 2, 1), (1, 2, 1), (1, 0, 1), (1, 1, 2))
CASES.append(pytest.param(VOLUME, id="volume-of-channels"))
CASES += [pytest.param(_drawn(seed), id=f"drawn-{seed}") for seed in range(20)]
MORE = [pytest.param(_drawn(seed), id=f"drawn-{seed}") for seed in range(20, 60)]
"""For backends that are neither emulated nor interpreted."""


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, what: str) -> None:
    testing.assert_close(what, got, want, 2e-5 if dtype is torch.float32 else 1e-11)


def from_above(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, what: str) -> None:
    assert got.dtype is torch.float64
    assert got.shape == want.shape, what
    assert bool((got >= want * (1 - BELOW)).all()), f"{what}: below by {1 - got / want}"
    assert bool((got <= want * (1 + ABOVE[dtype])).all()), f"{what}: above by {got / want - 1}"


def squares_of(grads: torch.Tensor) -> torch.Tensor:
    return grads.double().flatten(1).pow(2).sum(1)


def verify(case: Case, backend: str) -> None:
    x, g = case.inputs()
    want = case.gradients(x, g)
    call = {**case.arguments, "backend": backend}
    grads, squares = ghost.conv_gradient(x, g, **call)
    close(grads, want, case.dtype, "gradients")
    order = sorted(range(grads.dim()), key=lambda dim: -grads.stride(dim))
    ones = [dim for dim in range(grads.dim()) if grads.shape[dim] == 1]
    if case.batch:
        dense = [dim for dim in order if dim not in ones]
        assert grads.permute(*ones, *dense).is_contiguous()
        assert grads.stride(0) == grads[0].numel()
    from_above(squares, squares_of(grads), case.dtype, "squares of what is kept")
    for route in case.routes_of(backend):
        norms = ghost.conv_norm(x, g, route=route, **call)
        from_above(norms, squares_of(want), case.dtype, f"squares, route {route}")
    factors = torch.linspace(0, 2, case.batch, dtype=case.dtype)
    out = torch.ones(case.weight_shape, dtype=case.dtype)
    ghost.conv_sum(x, g, factors, out, **call)
    weighted = torch.einsum("b,b...->...", factors.double(), want)
    close(out.double() - 1, weighted, case.dtype, "weighted sum")


@every_backend
@pytest.mark.parametrize("case", CASES)
def test_against_autograd(case: Case, backend: str) -> None:
    _against_autograd(case, backend)


@pytest.mark.parametrize("backend", [p for p in PARAMETERS if p.id is None])
@pytest.mark.parametrize("case", MORE)
def test_more_against_autograd(case: Case, backend: str) -> None:
    _against_autograd(case, backend)


def _against_autograd(case: Case, backend: str) -> None:
    if backend == "cpu" and len(case.size) == 3:
        x, g = case.inputs()
        with pytest.raises(BackendError, match=r"1 and 2 spatial.*reference \(available\)"):
            ghost.conv_norm(x, g, backend="cpu", **case.arguments)
    else:
        verify(case, backend)


@pytest.mark.parametrize("isa", testing.available_isas())
@pytest.mark.parametrize("threads", [1, 2])
def test_instruction_sets(isa: str, threads: int) -> None:
    with testing.isa(isa), testing.threads(threads):
        for case in NAMED.values():
            verify(case, "cpu")


@every_backend
@pytest.mark.parametrize(
    "name",
    ["lenet-second", "tiny-map", "shortcut", "stride-2-channels", "depthwise-multiplied"],
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_sample_spoils_only_itself(name: str, bad: float, backend: str) -> None:
    case = NAMED[name]
    x, g = case.inputs()
    x, g = torch.cat((x, x, x)), torch.cat((g, g, g))
    x[1, 0, 2, 2] = bad
    g[3, 0, 1, 1] = bad
    call = {**case.arguments, "backend": backend}
    good = torch.tensor([b not in (1, 3) for b in range(len(x))])
    want = case.gradients(x[good], g[good])
    grads, squares = ghost.conv_gradient(x, g, **call)
    assert torch.equal(torch.isfinite(squares), good)
    close(grads[good], want, case.dtype, "gradients")
    for route in case.routes_of(backend):
        norms = ghost.conv_norm(x, g, route=route, **call)
        assert torch.equal(torch.isfinite(norms), good)
        from_above(norms[good], squares_of(want), case.dtype, route)
    out = torch.zeros(case.weight_shape)
    ghost.conv_sum(x, g, good.float(), out, **call)
    close(out, want.sum(0), case.dtype, "sum without the bad samples")


@every_backend
def test_all_factors_zero_leave_the_sum_alone(backend: str) -> None:
    case = NAMED["stem"]
    x, g = case.inputs()
    out = torch.full(case.weight_shape, 3.0)
    nan = torch.full_like(x, float("nan"))
    ghost.conv_sum(nan, g, torch.zeros(case.batch), out, backend=backend, **case.arguments)
    assert torch.equal(out, torch.full_like(out, 3.0))


@every_backend
@pytest.mark.parametrize("scale", [1e-15, 1e-9, 1e9, 1e17])
def test_squares_outside_the_range_of_floats(scale: float, backend: str) -> None:
    names = ("lenet-second", "many-channels", "stride-2-channels")
    for name in names[:1] if backend in INTERPRETED else names:  # one route of one kernel there
        case = NAMED[name]
        x, g = case.inputs()
        x, g = x * scale, g * scale
        want = case.gradients(x, g)
        call = {**case.arguments, "backend": backend}
        grads, squares = ghost.conv_gradient(x, g, **call)
        from_above(squares, squares_of(grads), case.dtype, "squares of what is kept")
        for route in case.routes_of(backend):
            norms = ghost.conv_norm(x, g, route=route, **call)
            from_above(norms, squares_of(want), case.dtype, route)


@every_backend
def test_zero_samples_have_zero_norm(backend: str) -> None:
    for name in (
        "lenet-second",
        "shortcut",
        "tiny-map",
        "stride-2-channels",
        "grouped",
        "double",
        "empty",
    ):
        case = NAMED[name]
        x, g = case.inputs()
        call = {**case.arguments, "backend": backend}
        for route in case.routes_of(backend):
            assert not ghost.conv_norm(torch.zeros_like(x), g, route=route, **call).any()
            assert not ghost.conv_norm(x, torch.zeros_like(g), route=route, **call).any()
        assert not ghost.conv_gradient(x, torch.zeros_like(g), **call)[1].any()


def _cancelling(case: Case, spread: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Nearly constant inputs, gradients with zero mean over positions: sums that cancel."""
    x, g = case.inputs()
    g = g.double()
    g -= g.mean((2, 3), keepdim=True)
    return 1 + spread * x, g.float()


def _float_gram(case: Case, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """The plain formula in float32: what must not be trusted."""
    windows = torch.nn.functional.unfold(x, case.kernel, padding=case.padding)
    rows = g.flatten(2)
    return ((windows.mT @ windows) * (rows.mT @ rows)).sum((1, 2)).double()


@every_backend
@pytest.mark.parametrize("spread", [1e-3, 1e-5, 1e-7])
@pytest.mark.parametrize(("size", "stride"), [(8, 1), (16, 1), (16, 2)])
def test_cancelling_sums_are_never_under_reported(
    size: int, stride: int, spread: float, backend: str
) -> None:
    case = square(4, (64, 64), size, 1, stride=stride)
    x, g = _cancelling(case, spread)
    want = squares_of(case.gradients(x, g))
    for route in case.routes_of(backend):
        norms = ghost.conv_norm(x, g, route=route, backend=backend, **case.arguments)
        from_above(norms, want, case.dtype, route)


def test_a_plain_float_gram_would_under_report() -> None:
    case = square(16, (64, 64), 8, 1)
    x, g = _cancelling(case, 1e-3)
    want = squares_of(case.gradients(x, g))
    assert bool((_float_gram(case, x, g) < 0.99 * want).any())


def test_plain_float_sums_would_under_report() -> None:
    case = square(16, (64, 64), 16, 1)
    x, g = _cancelling(case, 1e-5)
    want = squares_of(case.gradients(x, g))
    grads, _ = ghost.conv_gradient(x, g, **case.arguments)
    assert bool((squares_of(grads) < want).any())
    assert bool((squares_of(grads) - want).abs().max() > 1e-4 * want.max())


def test_costs() -> None:
    few, many, strided = (NAMED[name] for name in ("wide-map", "tiny-map", "stride-2-channels"))
    for case, cheaper in ((few, "direct"), (many, "gram"), (strided, "gram")):
        x, g = case.inputs()
        cost = {r: ghost.conv_norm.cost(x, g, route=r, **case.arguments).flops for r in case.routes}
        assert cost["auto"] == cost[cheaper] == min(cost.values())
    x, g = few.inputs()
    kept = ghost.conv_gradient.cost(x, g, **few.arguments)
    assert kept.bytes_written == 4 * 2 * 16 * 16 * 9 + 8 * 2
    out = torch.zeros(few.weight_shape)
    spent = ghost.conv_sum.cost(x, g, torch.ones(2), out, **few.arguments)
    assert spent.bytes_written == 4 * out.numel()
    geometry = Geometry.of(x, g, 3, 1, 1, 1, 1)
    assert spent.flops >= 2 * geometry.multiplications


X, G = torch.zeros(2, 4, 8, 8), torch.zeros(2, 6, 6, 6)
BAD = {
    "g-positions": ("g", {"g": torch.zeros(2, 6, 8, 8)}),
    "kernel-zero": ("kernel_size", {"kernel_size": 0}),
    "kernel-true": ("kernel_size", {"kernel_size": True}),
    "kernel-three": ("kernel_size", {"kernel_size": (3, 3, 3)}),
    "kernel-large": ("kernel_size", {"kernel_size": 9}),
    "stride-zero": ("stride", {"stride": (1, 0)}),
    "padding-negative": ("padding", {"padding": -1}),
    "dilation-zero": ("dilation", {"dilation": 0}),
    "groups-inputs": ("x", {"groups": 3}),
    "groups-outputs": ("g", {"groups": 4}),
    "gram-groups": ("route", {"route": "gram", "groups": 2}),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_calls_name_the_argument(name: str) -> None:
    argument, changed = BAD[name]
    call = {"x": X, "g": G, "kernel_size": 3, **changed}
    with pytest.raises(InvalidInput) as caught:
        ghost.conv_norm(**call)
    assert caught.value.name == argument


def test_only_inputs_that_some_output_sees_reach_the_norm() -> None:
    case = NAMED["shortcut-channels"]
    x, g = case.inputs()
    before = ghost.conv_norm(x, g, route="gram", **case.arguments)
    x[:, :, 1::2] = float("nan")
    x[:, :, :, 1::2] = float("inf")
    assert torch.equal(ghost.conv_norm(x, g, route="gram", **case.arguments), before)
    x[0, 0, 2, 2] = float("nan")
    after = ghost.conv_norm(x, g, route="gram", **case.arguments)
    assert torch.isfinite(after).tolist() == [False, True]

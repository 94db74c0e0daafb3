"""Ghost ops of 16-bit operands: norms from above whatever a tensor core does, factors unrounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from dpkern.base.errors import BackendError, InvalidInput
from dpkern.ops import ghost, testing
from tests.ops.backends.every_backend import every_backend
from tests.ops.test_ghost_conv import Case, square, squares_of
from tests.ops.test_ghost_linear import _gradients, _operands, _sizes

TYPES = (torch.bfloat16, torch.float16)
EXCESS = 5e-3
ROUNDING = 2e-5
FLOOR = 2.4e-5
"""Of the operands' norms: how far a norm may lie above a much smaller one, where sums are made in
float32 in chunks of 64 (docs/ghost.md)."""
SHAPES = ((3, 1, 17, 30), (3, 7, 64, 100), (2, 40, 130, 20), (4, 130, 33, 16), (40, 33, 5, 3),
          (2, 260, 48, 32))  # fmt: skip
CASES = {
    "stem": square(2, (3, 16), 16, 3),
    "stride-2": square(2, (16, 32), 10, 3, stride=2),
    "shortcut": square(2, (16, 32), 8, 1),
    "grouped": square(2, (6, 40), 10, 3, groups=2),
    "odd-map": square(2, (16, 32), 7, 3),
    "last": square(3, (32, 16), 4, 3),
    "line": Case(3, (5, 17), (40,), (3,), (2,), (1,), (1,)),
}


def unless_refused(backend: str, run: Callable[[], Any]) -> None:
    """Run it; where the compiled kernels have no such operands, see that they say so."""
    if backend in ("cpu", "numba", "cuda"):
        with pytest.raises(BackendError, match=r"has float32 and float64 operands|no kernel"):
            run()
    else:
        run()


def _from_above(norms: torch.Tensor, true: torch.Tensor, excess: float) -> None:
    assert norms.dtype is torch.float64
    assert (norms >= true * (1 - 1e-14)).all(), norms / true - 1
    assert (norms <= true * (1 + excess)).all(), norms / true - 1


@every_backend
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_linear(shape: tuple[int, int, int, int], dtype: torch.dtype, backend: str) -> None:
    a, g = (x.to(dtype) for x in _operands(*shape))
    want, sizes = _gradients(a, g), _sizes(a, g)
    true = want.square().sum((1, 2))

    def run() -> None:
        for route in ("auto", "gram", "direct"):
            _from_above(ghost.linear_norm(a, g, route=route, backend=backend), true, EXCESS)
        grads, squares = ghost.linear_gradient(a, g, backend=backend)
        assert grads.dtype is torch.float32
        assert ((grads - want).abs() <= ROUNDING * sizes).all()
        _from_above(squares, grads.double().square().sum((1, 2)), 1e-4)
        factors = torch.linspace(0, 2, shape[0])
        total = torch.ones(want.shape[1:])
        ghost.linear_sum(a, g, factors, total, backend=backend)
        exact = 1 + torch.einsum("b,bpd->pd", factors.double(), want)
        limit = 1 + torch.einsum("b,bpd->pd", factors.double(), sizes)
        assert ((total - exact).abs() <= ROUNDING * limit).all()

    unless_refused(backend, run)


@every_backend
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", CASES)
def test_convolutions(name: str, dtype: torch.dtype, backend: str) -> None:
    case = CASES[name]
    x, g = (operand.to(dtype) for operand in case.inputs())
    want = case.gradients(x, g)
    call = {**case.arguments, "backend": backend}

    def run() -> None:
        _from_above(ghost.conv_norm(x, g, **call), squares_of(want), EXCESS)
        grads, squares = ghost.conv_gradient(x, g, **call)
        assert grads.dtype is torch.float32
        testing.assert_close("gradients", grads, want, ROUNDING)
        _from_above(squares, squares_of(grads), 1e-4)
        factors = torch.linspace(0, 2, case.batch)
        total = torch.zeros(case.weight_shape)
        ghost.conv_sum(x, g, factors, total, **call)
        weighted = torch.einsum("b,b...->...", factors.double(), want)
        testing.assert_close("sum", total, weighted, ROUNDING)

    unless_refused(backend, run)


@every_backend
def test_bad_samples_are_dropped(backend: str) -> None:
    for positions in (3, 40):
        a, g = (x.bfloat16() for x in _operands(3, positions, 20, 30))
        a[1, -1, 3], g[1] = torch.nan, 0
        want = _gradients(a[[0, 2]], g[[0, 2]]).sum(0)
        factors = torch.tensor([1.0, 0.0, 1.0])

        def run(a: Any = a, g: Any = g, factors: Any = factors, want: Any = want) -> None:
            finite = torch.isfinite(ghost.linear_norm(a, g, backend=backend))
            assert finite.tolist() == [True, False, True]
            total = torch.zeros(30, 20)
            ghost.linear_sum(a, g, factors, total, backend=backend)
            testing.assert_close("sum", total, want, ROUNDING)

        unless_refused(backend, run)


def _cancelling(noise: int) -> tuple[torch.Tensor, torch.Tensor, list[Fraction]]:
    """Inputs within ``noise`` units of 1, output gradients that sum to zero; the exact squares."""
    generator = torch.Generator().manual_seed(5)
    shape = (6, 64, 32)
    a_units = 2**7 + torch.randint(0, noise + 1, shape, generator=generator)
    g_units = torch.randint(-100, 100, shape, generator=generator)
    half = g_units[:, ::2]
    g_units = torch.stack((half, -half), 2).flatten(1, 2)
    grads = torch.einsum("btp,btd->bpd", g_units, a_units)
    squares = [Fraction(sum(x * x for x in one.flatten().tolist()), 2**34) for one in grads]
    a, g = (a_units.float() * 2.0**-7).bfloat16(), (g_units.float() * 2.0**-10).bfloat16()
    assert torch.equal(a.double() * 2**7, a_units.double())
    assert torch.equal(g.double() * 2**10, g_units.double())
    return a, g, squares


@every_backend
@pytest.mark.parametrize("noise", [0, 1, 5])
@pytest.mark.parametrize("route", ["auto", "gram", "direct"])
def test_cancelling_norms_are_never_below_the_exact_square(
    noise: int, route: str, backend: str
) -> None:
    a, g, squares = _cancelling(noise)

    def run() -> None:
        norms = ghost.linear_norm(a, g, route=route, backend=backend).tolist()
        floors = torch.zeros(len(a)) if backend == "reference" else _floors(a, g)
        for norm, exact, floor in zip(norms, squares, floors.tolist(), strict=True):
            assert Fraction(norm) >= exact
            assert norm <= (float(exact) ** 0.5 + floor) ** 2 * (1 + EXCESS) + 1e-20

    unless_refused(backend, run)


def _floors(a: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return FLOOR * a.double().flatten(1).norm(dim=1) * g.double().flatten(1).norm(dim=1)


@pytest.mark.parametrize("positions", [65, 128, 129, 191, 192, 193, 197, 200, 201, 300])
def test_tiles_of_gram_matrices_decide_long_samples(positions: int) -> None:
    """No sample of theirs is left to the direct way, and none is below its exact square."""
    pytest.importorskip("triton")
    from dpkern.ops.backends._triton import direct

    left: list[torch.Tensor] = []

    def norms(_: Any, done: torch.Tensor, highs: torch.Tensor) -> torch.Tensor:
        left.append(done)
        return highs

    with pytest.MonkeyPatch.context() as patch, testing.emulated("triton"):
        patch.setattr(direct, "norms", norms)
        for dtype in TYPES:
            a, g = (x.to(dtype) for x in _operands(3, positions, 64, 128))
            squares = ghost.linear_norm(a, g, route="gram", backend="triton")
            _from_above(squares, _gradients(a, g).square().sum((1, 2)), 2e-3)
    assert torch.cat(left).tolist() == [[1]] * 6


@pytest.mark.parametrize(("batch", "together"), [(1, 4), (3, 4), (64, 2), (132, 1), (600, 1)])
def test_layers_share_a_launch_where_a_device_would_be_idle(batch: int, together: int) -> None:
    from dpkern.ops.backends import _gram_shares

    assert _gram_shares.together(batch) == together


def test_layers_that_share_a_launch_have_the_norms_of_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of five layers, in launches of at most two samples of three layers."""
    pytest.importorskip("triton")
    from dpkern.ops.backends import _gram_shares
    from dpkern.ops.backends._triton import direct, gram_samples

    launches: list[int] = []
    run = gram_samples.launch

    def launch(kernel: Any, programs: int, *args: Any, **kwargs: Any) -> None:
        launches.append(programs)
        run(kernel, programs, *args, **kwargs)

    monkeypatch.setattr(gram_samples, "launch", launch)
    monkeypatch.setattr(_gram_shares, "PROGRAMS", 6)
    monkeypatch.setattr(_gram_shares, "together", lambda batch: 3)
    layers = [tuple(x.bfloat16() for x in _operands(3, 197, 320, 320)) for _ in range(5)]
    layers[3][0][1, 196, 5] = torch.nan
    a, g = ([layer[i] for layer in layers] for i in (0, 1))
    with testing.emulated("triton"):
        each = [ghost.linear_norm(*layer, route="gram", backend="triton") for layer in layers]
        launches.clear()
        monkeypatch.setattr(direct, "norms", lambda _, done, highs: highs)
        found = ghost.linear_norms(a, g, backend="triton")
    assert launches == [6, 3, 6]
    assert torch.isfinite(found).tolist() == [True, False, True]
    true = sum(_gradients(*layer).square().sum((1, 2)) for layer in layers)
    kept = [0, 2]
    assert (found[kept] >= true[kept]).all()
    total = torch.stack(each).sum(0)[kept]
    assert ((found[kept] - total).abs() <= 1e-11 * total).all()


def test_lists_of_layers_have_one_length() -> None:
    a, g = _operands(2, 3, 4, 5)
    with pytest.raises(InvalidInput, match="as many tensors as a has, 2"):
        ghost.linear_norms([a, a], [g])


@every_backend
def test_norms_of_layers_of_few_positions(backend: str) -> None:
    layers = [tuple(x.bfloat16() for x in _operands(3, 5, 7, 9)) for _ in range(3)]
    a, g = ([layer[i] for layer in layers] for i in (0, 1))
    true = sum(_gradients(*layer).square().sum((1, 2)) for layer in layers)

    def run() -> None:
        _from_above(ghost.linear_norms(a, g, backend=backend), true, EXCESS)

    unless_refused(backend, run)


def test_norms_by_gram_matrices_hold_for_what_a_weighted_sum_adds() -> None:
    """Rows of one length, at right angles: the sum's bound, which the matrices do not show."""
    pytest.importorskip("triton")
    from dpkern.ops.backends._triton import precision

    positions = 64
    a = torch.eye(positions).bfloat16()[None]
    kind = precision.first(torch.bfloat16)
    lost = (kind.chunk(64) + kind.gamma(4)) * positions  # of a norm of 8
    with testing.emulated("triton"):
        for rows in (positions, 2 * positions):
            x = torch.cat((a, torch.zeros(1, rows - positions, positions).bfloat16()), 1)
            square = ghost.linear_norm(x, x, route="gram", backend="triton")
            assert square.sqrt() >= positions**0.5 + lost


def test_a_norm_on_tensor_cores_is_made_in_one_pass() -> None:
    """In float64 the oldest Triton could not even compile it."""
    pytest.importorskip("triton")
    from dpkern.ops.backends._triton import direct

    passes: list[Any] = []
    plain = direct._pass

    def counted(operands: Any, kind: Any, dtype: Any, *rest: Any, **skip: Any) -> None:
        passes.append(dtype)
        plain(operands, kind, dtype, *rest, **skip)

    with pytest.MonkeyPatch.context() as patch, testing.emulated("triton"):
        patch.setattr(direct, "_pass", counted)
        for dtype in TYPES:
            a, g = (x.to(dtype) for x in _cancelling(0)[:2])
            for route in ("direct", "gram"):
                ghost.linear_norm(a, g, route=route, backend="triton")
            assert passes == [dtype, dtype]
            passes.clear()


def test_more_chunks_than_the_bound_allows_are_refused() -> None:
    pytest.importorskip("triton")
    a = torch.zeros(1, 2**23 + 1, 1, dtype=torch.bfloat16)
    image, most = a.view(1, 1, -1), f"16-bit samples of up to {2**23} positions"
    with testing.emulated("triton"):
        with pytest.raises(BackendError, match=most):
            ghost.linear_norm(a, a, backend="triton")
        with pytest.raises(BackendError, match=most):
            ghost.conv_norm(image, image, kernel_size=1, backend="triton")


@every_backend
def test_squares_that_overflow_are_never_too_small(backend: str) -> None:
    """A float32 sum whose square is none counts as not finite; float64 holds it."""
    a, g = (torch.full((2, 40, 20), value).bfloat16() for value in (1.0, 1e19))
    a[1], g[1] = 1e-3, 1e-3

    def run() -> None:
        norms = ghost.linear_norm(a, g, backend=backend)
        true = _gradients(a, g).square().sum((1, 2))
        assert norms[0] >= true[0] * (1 - 1e-14)
        _from_above(norms[1:], true[1:], EXCESS)

    unless_refused(backend, run)


def _truncated(left: Any, right: Any, start: Any, group: int) -> Any:
    """A product as a tensor core may compute it: ``group`` exact terms and the running sum are cut
    off below the 24th bit of the largest, added, and cut off again."""
    total = start.astype(np.float64)
    for k in range(0, left.shape[1], group):
        terms = left[:, k : k + group].T[:, :, None].astype(np.float64) * right[k : k + group, None]
        addends = np.concatenate((total[None], terms))
        total = _cut(addends, np.abs(addends).max(0)).sum(0)
        total = _cut(total, np.abs(total))
    return total.astype(np.float32)


def _cut(x: Any, largest: Any) -> Any:
    unit = np.exp2(np.frexp(largest)[1] - 24.0)
    return np.trunc(x / unit) * unit


@pytest.fixture(params=[4, 8, 16])
def truncating(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Products of the interpreter truncate."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    plain = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        if d.data.dtype != np.float32:
            return plain(self, a, b, d, *rest)
        product = _truncated(a.data, b.data, d.data, request.param)
        return interpreter.TensorHandle(product, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    with testing.emulated("triton"):
        yield


def _cut_off(route: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A large term first, then 63 that lie just below the last bit of the sum: all are lost. The
    direct route adds over positions, the Gram route over features."""
    small = 0.98828125 * 2.0**-15
    if route == "direct":
        a, g = torch.ones(2, 64, 20), torch.full((2, 64, 16), small)
        g[:, 0] = 256
    else:
        a, g = torch.full((2, 64, 64), small**0.5), torch.ones(2, 64, 16)
        a[:, :, 0] = 16
    return a.bfloat16(), g.bfloat16()


@pytest.mark.parametrize("route", ["gram", "direct"])
def test_norms_hold_on_truncating_tensor_cores(truncating: None, route: str) -> None:
    operands = (
        _cut_off(route),
        _cancelling(1)[:2],
        [x.bfloat16() for x in _operands(4, 64, 33, 20)],
    )
    for a, g in operands:
        true = _gradients(a, g).square().sum((1, 2))
        norms = ghost.linear_norm(a, g, route=route, backend="triton")
        assert (norms >= true * (1 - 1e-14)).all()
        assert (norms <= (true.sqrt() + _floors(a, g)).square() * (1 + EXCESS)).all()


@pytest.mark.parametrize("route", ["gram", "direct"])
def test_a_bound_for_plain_additions_would_under_report_there(
    truncating: None, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dpkern.ops.backends._triton import precision

    monkeypatch.setattr(precision, "_TENSOR_CORES", precision._TENSOR_CORES._replace(per_term=0))
    a, g = _cut_off(route)
    true = _gradients(a, g).square().sum((1, 2))
    norms = ghost.linear_norm(a, g, route=route, backend="triton")
    assert (norms < true).any()


@every_backend
@pytest.mark.parametrize("positions", [8, 40])
def test_no_sample_passes_the_clipping_bound(positions: int, backend: str) -> None:
    a, g = _even(positions)
    lengths = _gradients(a, g).flatten(1).norm(dim=1)

    def run() -> None:
        norms = ghost.linear_norm(a, g, backend=backend)
        factors, _ = ghost.clip_factors([norms], 1e-3, dtype=torch.float32, backend="reference")
        for b in range(len(a)):
            part = torch.zeros(16, 24)
            one = slice(b, b + 1)
            ghost.linear_sum(a[one], g[one], factors[one], part, backend=backend)
            length = float(part.double().norm())
            assert length <= 1e-3
            assert length == pytest.approx(float(factors[b] * lengths[b]), rel=1e-6)

    unless_refused(backend, run)


def _even(positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Output gradients that are all ones: times a factor, they are all rounded alike."""
    a = _operands(12, positions, 24, 16)[0]
    return a.bfloat16(), torch.ones(12, positions, 16).bfloat16()


def test_factors_rounded_with_the_operand_would_pass_it() -> None:
    # The control: the factor times g, stored in bfloat16, as a prologue would.
    a, g = _even(40)
    norms = ghost.linear_norm(a, g, backend="reference")
    factors, _ = ghost.clip_factors([norms], 1e-3, dtype=torch.float32)
    parts = _gradients(a, (factors[:, None, None] * g).bfloat16())
    assert float(parts.flatten(1).norm(dim=1).max()) > 1e-3 * (1 + 1e-3)

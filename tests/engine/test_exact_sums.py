"""Exact sums of the engine: integers of proved norm that no order, split or thread changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dpkern import DPStep
from dpkern.base.errors import PrivacyError
from dpkern.engine import clipping, exact_sums
from dpkern.engine.capture import Capture
from dpkern.engine.exact_sums import sums_in_place
from dpkern.engine.per_sample_gradients import ExplicitGradients, LinearGradients
from dpkern.engine.tables import TiedGradients
from dpkern.ops import clip, ghost
from dpkern.privacy.mechanisms import DPSGD, Plan
from dpkern.privacy.mechanisms.base import Mechanism

B = 8
SIGMA = 1.1
"""C / u is no integer: 953250.9."""


class Tokens(nn.Module):
    """A language model: embedding of repeated ids, positions, recurrent-like reuse, tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6)
        self.inner = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.norm(self.table(ids) + torch.relu(self.inner(self.table(ids))))
        return self.head(h)


class Images(nn.Module):
    """Convolutions: strided, grouped, padded, pointwise, in one dimension; group norm, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.GroupNorm(2, 8),
            nn.ReLU(),
            nn.Conv2d(8, 12, 3, stride=2, groups=4, bias=False),
            nn.ReLU(),
            nn.Conv2d(12, 20, 1),
        )
        self.line = nn.Conv1d(20, 5, 3, padding=2, dilation=2)
        self.head = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.line(self.net(x).flatten(2)).mean(2))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(20, 17), nn.ReLU(), nn.Linear(17, 13), nn.ReLU(), nn.Linear(13, 5)
    )


class Sequence_(nn.Module):
    """Linear layers over positions, and a recurrent one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 40)
        self.cell = nn.LSTM(40, 7, batch_first=True)
        self.last = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.cell(torch.relu(self.first(x)))[0])


class Long(nn.Module):
    """Layers wide enough, over enough positions, for operands that are rounded; one used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 80)
        self.twice = nn.Linear(80, 80, bias=False)
        self.last = nn.Linear(80, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.twice(torch.relu(self.first(x)))
        return self.last(self.twice(torch.relu(h)))


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def _ids() -> Tensor:
    return torch.randint(0, 5, (B, 7), generator=torch.Generator().manual_seed(4))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "one position": (mlp, lambda: _normal(B, 20)),
    "positions": (Sequence_, lambda: _normal(B, 9, 5)),
    "rounded operands": (Long, lambda: _normal(B, 33, 64)),
    "images": (Images, lambda: _normal(B, 3, 9, 9)),
    "tied tokens": (Tokens, _ids),
}


def built(name: str) -> tuple[nn.Module, Tensor]:
    make, draw = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make(), draw()


def plan_of(module: nn.Module, arithmetic: str = "exact", **fields: Any) -> Plan:
    given: dict[str, Any] = {"noise_multiplier": SIGMA, "max_grad_norm": 0.5} | fields
    mechanism = DPSGD(arithmetic=arithmetic, **given)
    return mechanism.plan([tuple(p.shape) for p in module.parameters()])


def summed(
    module: nn.Module,
    x: Tensor,
    plan: Plan,
    weights: Tensor | None = None,
    team: int = 1,
    loss: Callable[[Tensor], Tensor] = torch.sin,
    **options: Any,
) -> clip.ClipResult:
    """The engine's clipped sums of losses that are weighted sample by sample.

    The passes run on one thread: torch's own rounding may depend on how many there are.
    """
    capture = Capture(module, loss_reduction="sum", **options)
    capture.attach()
    try:
        clipping.prepare(capture, lambda: plan)
        with threads(1):
            losses = loss(module(x).double()).flatten(1).sum(1)
            (losses if weights is None else losses * weights).sum().backward()
        for slot in capture.slots:
            for arrival in slot.arrivals:
                arrival.square = None  # norms are taken by this many threads as well
        with threads(team):
            result = clipping.clipped_sums(capture, plan)
    finally:
        capture.detach()
    assert isinstance(result, clip.ClipResult)
    return result


def integers(result: clip.ClipResult) -> Tensor:
    return torch.cat([part.flatten().long() for part in result.sums])


def norm_square(q: Tensor) -> int:
    """Of integers, in Python's."""
    return sum(value * value for value in q.tolist())


def bound_of(plan: Plan) -> int:
    bound = plan.blocks[0].integer_bound
    assert bound is not None
    return bound


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


KEPT = (0, 1 << 30)
"""Bytes of gradients that may be kept: none, all."""


@pytest.mark.parametrize("budget", KEPT, ids=["nothing kept", "all kept"])
@pytest.mark.parametrize("name", MODELS)
def test_a_sum_is_that_of_its_samples_integers(name: str, budget: int) -> None:
    module, x = built(name)
    plan = plan_of(module)
    together = summed(module, x, plan, torch.full((B,), 100.0), keep_budget=budget)
    assert together.arithmetic == "exact"
    assert together.bounded_by == "proved"
    assert all(part.dtype is torch.int32 for part in together.sums)
    alone = []
    for b in range(B):
        weights = torch.zeros(B)
        weights[b] = 100.0
        alone.append(integers(summed(module, x, plan, weights, keep_budget=budget)))
        # The bound is nearly reached: clipping does not waste it.
        assert 0.98 * bound_of(plan) < math.isqrt(norm_square(alone[-1])) <= bound_of(plan)
        assert norm_square(alone[-1]) <= bound_of(plan) ** 2
    assert torch.equal(integers(together), torch.stack(alone).sum(0))


@pytest.mark.parametrize("name", MODELS)
def test_sums_are_near_those_of_floats(name: str) -> None:
    module, x = built(name)
    weights = torch.logspace(-6, 2, B)  # small ones are not clipped
    plan = plan_of(module)
    exact = summed(module, x, plan, weights)
    floating = summed(module, x, plan_of(module, "float"), weights)
    unit = plan.units[0]
    assert unit is not None
    for mine, theirs in zip(exact.sums, floating.sums, strict=True):
        assert mine.shape == theirs.shape
        slack = 5e-3 * float(theirs.abs().max()) + B * unit
        torch.testing.assert_close(mine.double() * unit, theirs.double(), rtol=0, atol=slack)
    torch.testing.assert_close(exact.norms, floating.norms, rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_threads_and_runs_of_samples_change_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = built(name)
    plan, weights = plan_of(module), torch.full((B,), 100.0)
    whole = integers(summed(module, x, plan, weights))
    for team in (2, 3, 8):
        assert torch.equal(integers(summed(module, x, plan, weights, team)), whole)
    monkeypatch.setattr(exact_sums, "_INT32_MOST", 3 * plan.most_units)  # three samples at a time
    wide = summed(module, x, plan, weights)
    assert all(part.dtype is torch.int64 for part in wide.sums)
    assert torch.equal(integers(wide), whole)


def whole_numbers(module: nn.Module) -> nn.Module:
    """Small multiples of 1/4, with which no sum of a pass is rounded, whatever its order."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_((parameter * 8).round().clamp(-2, 2) / 4)
    return module


@pytest.mark.parametrize("cuts", [(4,), (1, 2, 7), (3, 4, 5, 6)])
def test_physical_batches_change_nothing(cuts: tuple[int, ...]) -> None:
    module = whole_numbers(mlp())
    x = (_normal(B, 20) * 2).round()
    plan = plan_of(module)

    def released(parts: Sequence[slice]) -> Tensor:
        step = DPStep(
            DPSGD(noise_multiplier=SIGMA, max_grad_norm=0.5, arithmetic="exact"),
            list(module.parameters()),
            expected_batch_size=B,
            sample_rate=0.1,
            unsafe_seed=1,
            gradients="batched",
        )
        for part in parts:
            capture = Capture(module, loss_reduction="sum")
            capture.attach()
            clipping.prepare(capture, lambda: plan)
            module(x[part]).sum().backward()
            clipping.close_into(step, capture)
            capture.detach()
        found = step.finish()
        assert found is not None
        return torch.cat([part.flatten() for part in found if part is not None])

    edges = [0, *cuts, B]
    whole = released([slice(0, B)])
    parts = [slice(a, b) for a, b in pairwise(edges)]
    assert torch.equal(released(parts), whole)
    assert torch.equal(released(parts[::-1]), whole)


@pytest.mark.parametrize("clipping_", ["flat", "per_layer"])
def test_a_sample_that_is_not_finite_is_dropped_everywhere(clipping_: str) -> None:
    module, x = built("images")
    plan = plan_of(module, clipping=clipping_)
    weights = torch.full((B,), 100.0)
    missing = weights.clone()
    missing[2] = 0
    expected = integers(summed(module, x, plan, missing))
    for poison in (math.inf, math.nan):
        bad = weights.clone()
        bad[2] = poison
        result = summed(module, x, plan, bad)
        assert torch.equal(integers(result), expected)
        assert int(result.nonfinite) == 1
        assert not bool(torch.isfinite(result.norms[2]))


class Halves(nn.Module):
    """Two layers that see different inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.left(x[:, :3]), self.right(x[:, 3:])), 1)


def test_a_sample_that_is_dropped_from_one_group_is_dropped_from_all() -> None:
    module, x = Halves(), _normal(B, 6)
    plan = plan_of(module, clipping="per_layer")
    without = x.clone()
    without[2] = 0
    expected = summed(module, without, plan, loss=torch.Tensor.double)
    x[2, 4] = math.inf  # the left layer's gradient is finite
    result = summed(module, x, plan, loss=torch.Tensor.double)
    assert torch.equal(integers(result), integers(expected))
    assert int(result.nonfinite) == 1


def test_layers_of_one_position_round_below_the_bound() -> None:
    # All entries are equal: the vectors' would be sqrt(M / 64) = 122.04, the products' 14894.5.
    module, x = nn.Linear(64, 64, bias=False), torch.ones(1, 64)
    plan = plan_of(module)
    assert bound_of(plan) == M
    result = summed(module, x, plan, loss=lambda y: 10 * y)
    assert result.sums[0].unique().tolist() == [122 * 122]


def test_groups_are_bounded_one_by_one() -> None:
    module, x = built("images")
    plan = plan_of(module, clipping="per_layer")
    weights = torch.zeros(B)
    weights[3] = 1e4
    result = summed(module, x, plan, weights)
    for block, part in zip(plan.blocks, result.sums, strict=True):
        assert block.integer_bound is not None
        least, most = 0.998 * block.integer_bound, block.integer_bound
        assert least < math.sqrt(norm_square(part.flatten())) <= most


def test_nothing_of_the_size_of_all_gradients_is_made() -> None:
    class Largest(TorchDispatchMode):  # type: ignore[misc]
        entries = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(tensor, Tensor):
                    self.entries = max(self.entries, tensor.numel())
            return out

    module, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), _normal(32, 64)
    with Largest() as seen:
        summed(module, x, plan_of(module))
    assert seen.entries < 32 * 64 * 64 / 2


def test_other_plans_are_clipped_by_their_integers() -> None:
    module, _ = built("one position")
    slots = Capture(module).slots
    assert sums_in_place(plan_of(module), slots)
    assert sums_in_place(plan_of(module, clipping="per_layer"), slots)
    assert not sums_in_place(plan_of(module, "float"), slots)
    assert not sums_in_place(plan_of(module, clipping="automatic"), slots)
    assert not sums_in_place(plan_of(module), Capture(module.double()).slots)


def test_a_step_takes_the_sums_and_no_others() -> None:
    module, x = built("one position")
    plan = plan_of(module)
    result = summed(module, x, plan)
    mechanism: Mechanism = DPSGD(noise_multiplier=SIGMA, max_grad_norm=0.5, arithmetic="exact")
    step = DPStep(
        mechanism,
        list(module.parameters()),
        expected_batch_size=B,
        sample_rate=0.1,
        gradients="batched",
    )
    for changes in ({"max_norms": (0.6,)}, {"unit": tuple(2.0 * u for u in result.unit or ())}):
        with pytest.raises(PrivacyError):
            step.add(sum=replace(result, **changes))
    step.add(sum=result)
    step.finish()
    certificate = step.certify(1e-5)
    assert certificate.certified_for == "released bits, if a record's gradient depends on it alone"


# hostile operands, straight into the records


def hostile(shape: tuple[int, ...], seed: int) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(shape, generator=generator)
    yield "normal", normal
    yield "tiny", normal * 1e-30
    yield "huge", normal * 1e18
    yield "constant", torch.full(shape, 0.3)
    yield "zero", torch.zeros(shape)
    yield "near overflow", normal.sign() * 3e38
    yield "near underflow", normal.sign() * 1e-37
    yield "denormal", normal * 1e-42
    spikes = normal * 1e-6
    spikes.view(len(spikes), -1)[:, 0] = 1e4
    yield "spikes", spikes
    yield "powers", torch.exp2((normal * 12).round())
    yield "halves", (normal * 4).round() / 4 + 0.5


def pairs(batch: int, positions: int, d: int, p: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    for one, a in hostile((batch, positions, d), 1):
        for other, g in hostile((batch, positions, p), 2):
            yield f"{one} x {other}", a, g


M = 953250
UNIT = SIGMA / 2**20
"""Of C = 1."""


def factors_of(squares: Tensor, aim: float) -> Tensor:
    """As the engine makes them, of gradients of the samples' own losses."""
    factors, _ = ghost.clip_factors([squares], aim, dtype=torch.float32, scale=1 / UNIT)
    return factors


def largest(make: Callable[[Tensor, Tensor], None], factors: Tensor, shape: Sequence[int]) -> int:
    """The largest squared norm of a single sample's integers."""
    most = 0
    for b in range(len(factors)):
        alone = torch.zeros_like(factors)
        alone[b] = factors[b]
        out = torch.zeros(tuple(shape), dtype=torch.int32)
        make(alone, out)
        most = max(most, norm_square(out.flatten()))
    return most


@pytest.mark.parametrize("rounding", ["truncate", "factors"])
@pytest.mark.parametrize("sizes", [(1, 1), (2, 3), (7, 5), (33, 20)])
def test_no_hostile_record_of_one_position_exceeds_the_bound(
    rounding: Any, sizes: tuple[int, int]
) -> None:
    d, p = sizes
    for what, a, g in pairs(6, 1, d, p):
        factors = factors_of(ghost.linear_norm(a, g), M)

        def add(weights: Tensor, out: Tensor, a: Tensor = a, g: Tensor = g) -> None:
            ghost.linear_integer_sum(a, g, weights, out, rounding=rounding)

        assert largest(add, factors, (p, d)) <= M * M, what


@pytest.mark.parametrize("positions", [2, 5, 67])
def test_no_hostile_record_of_positions_exceeds_the_bound(positions: int) -> None:
    d, p = 5, 4
    for what, a, g in pairs(3, positions, d, p):
        record = LinearGradients(a, g)
        upper = (record.squared_norms().sqrt() + ghost.linear_sum_error(a, g)).square()
        factors = factors_of(upper * (1 + 2.0**-40), M)

        def add(weights: Tensor, out: Tensor, record: LinearGradients = record) -> None:
            exact_sums.add_integers(record, weights, out)

        assert largest(add, factors, (p, d)) <= M * M, what


def cancelling(batch: int, positions: int) -> tuple[Tensor, Tensor]:
    """Products that are rounded again and again, and whose sum is nearly nothing."""
    generator = torch.Generator().manual_seed(7)
    half = torch.randn(batch, positions // 2, 2, generator=generator) * 1e6
    a = torch.cat((half, half), 1)
    ones = torch.ones(batch, positions // 2, 2)
    g = torch.cat((ones, -ones * (1 + 2.0**-20)), 1)
    return a, g


def test_positions_need_the_bound_of_their_rounding() -> None:
    a, g = cancelling(16, 400)

    def add(weights: Tensor, out: Tensor) -> None:
        ghost.linear_integer_sum(a, g, weights, out)

    true = torch.bmm(g.double().mT, a.double()).flatten(1).square().sum(1)
    upper = (ghost.linear_norm(a, g).sqrt() + ghost.linear_sum_error(a, g)).square()
    assert largest(add, factors_of(upper, M), (2, 2)) <= M * M
    # Without it some sample is above: the test can fail.
    assert largest(add, factors_of(true, M), (2, 2)) > M * M


def test_aiming_at_the_clipping_bound_admits_too_much() -> None:
    # C / u is 953250.9: the aim of the float tier leaves up to 953250.45 units.
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(4000, 2, generator=generator)
    squares = ghost.explicit_norm([rows])

    def above(aim: float) -> int:
        factors = factors_of(squares, aim)
        one_by_one = [torch.zeros(2, dtype=torch.int32) for _ in range(len(rows))]
        q = (factors[:, None] * rows).to(torch.int32).long()
        for b in range(0, len(rows), 500):  # what the kernel makes of some of them
            alone = torch.zeros_like(factors)
            alone[b] = factors[b]
            ghost.explicit_integer_sum([rows], alone, [one_by_one[b]])
            assert torch.equal(one_by_one[b].long(), q[b])
        return int((q.square().sum(1) > M * M).sum())

    assert above(float(M)) == 0
    assert above(1 / UNIT) > 20


def test_a_chain_that_could_overflow_is_dropped() -> None:
    # The gradient cancels to nothing, but its partial sums are infinite.
    a = torch.full((1, 4, 2), 1e20)
    g = torch.tensor([1e19, -1e19, 1e19, -1e19]).view(1, 4, 1).contiguous()
    assert bool(ghost.linear_norm(a, g).isfinite())
    record = LinearGradients(a, g)
    error = exact_sums.rounding_error(record)
    assert error is not None
    factors = factors_of((record.squared_norms().sqrt() + error).square(), M)
    assert factors.tolist() == [0.0]
    out = torch.zeros(1, 2, dtype=torch.int32)
    exact_sums.add_integers(record, torch.ones(1), out)
    assert norm_square(out.flatten()) > M * M  # what the factor of 0 keeps out


def test_rows_of_a_tied_weight_count_beside_samples_of_padding_alone() -> None:
    ids, e = torch.tensor([[0, 0], [1, 2]]), _normal(2, 2, 4)
    a, g, factors = _normal(2, 1, 4), _normal(2, 1, 3), torch.full((2,), 1e5)
    record = TiedGradients(
        exact_sums.EmbeddingGradients(ids, e, 3, padding_idx=0), LinearGradients(a, g)
    )
    out = torch.zeros(3, 4, dtype=torch.int32)
    exact_sums.add_integers(record, factors, out)
    terms = record.per_sample().double() * 1e5
    assert bool((out - terms.trunc().sum(0)).abs().le(2).all())


def test_a_tied_weight_is_truncated_once() -> None:
    ids = torch.tensor([[1, 1, 0], [2, 0, 2]])
    e, a, g = _normal(2, 3, 4), _normal(2, 5, 4), _normal(2, 5, 6)
    table = exact_sums.EmbeddingGradients(ids, e, 6)
    record = TiedGradients(table, LinearGradients(a, g))
    factors, out = torch.tensor([1e5, 2e5]), torch.zeros(6, 4, dtype=torch.int32)
    exact_sums.add_integers(record, factors, out)
    terms = record.per_sample().double() * factors[:, None, None].double()
    assert bool((out - terms.trunc().sum(0)).abs().le(2).all())
    split = torch.zeros_like(out)
    exact_sums.add_integers(table, factors, split)
    exact_sums.add_integers(record.head, factors, split)
    assert not torch.equal(split, out)  # two truncations: another sum


def test_hostile_explicit_gradients_and_tables() -> None:
    for what, rows in hostile((6, 4, 5), 3):
        record = ExplicitGradients(rows)
        factors = factors_of(record.squared_norms(), M)

        def add(weights: Tensor, out: Tensor, rows: Tensor = rows) -> None:
            ghost.explicit_integer_sum([rows], weights, [out])

        assert largest(add, factors, (4, 5)) <= M * M, what
        ids = torch.tensor([[0, 1, 1, 0]] * 6)
        table = exact_sums.EmbeddingGradients(ids, rows, 2)

        def add_rows(weights: Tensor, out: Tensor, table: Any = table) -> None:
            exact_sums.add_integers(table, weights, out)

        assert largest(add_rows, factors_of(table.squared_norms(), M), (2, 5)) <= M * M, what


@pytest.mark.parametrize("stride", [1, 2])
def test_hostile_convolutions(stride: int) -> None:
    options = {"kernel_size": 3, "stride": stride, "padding": 1}
    size = 5 if stride == 1 else 3
    gradients = list(hostile((3, 2, size, size), 6))
    for one, x in hostile((3, 2, 5, 5), 5):
        for other, g in gradients:
            squares = ghost.conv_norm(x, g, **options)
            upper = (squares.sqrt() + ghost.conv_sum_error(x, g, **options)).square()
            factors = factors_of(upper * (1 + 2.0**-40), M)

            def add(weights: Tensor, out: Tensor, x: Tensor = x, g: Tensor = g) -> None:
                ghost.conv_integer_sum(x, g, weights, out, **options)

            assert largest(add, factors, (2, 2, 3, 3)) <= M * M, f"{one} x {other}"

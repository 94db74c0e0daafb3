"""``StepGraph`` of batches whose sizes vary: rows that fill a draw up are no records.

Every run is beside one without a graph, which sees the records alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkern import InvalidInput, PrivacyError, UnsupportedModule, mechanisms
from dpkern.engine import step_graph
from dpkern.engine.usual_rows import usual_rows
from dpkern.graphs import StepGraph
from tests.engine.device_path import needs_emulation
from tests.engine.test_device_ops import MODELS
from tests.engine.test_device_ops import loss_of as loss_of_model
from tests.engine.test_step_graph import FIRST, Run, Small, loss_of, on_device

pytestmark = [needs_emulation, pytest.mark.usefixtures("on_device")]
__all__ = ["on_device"]

Loss = Callable[..., Tensor]
ARITHMETICS = pytest.mark.parametrize("arithmetic", ["float", "exact"])


class Plain(nn.Module):
    """A module that draws no random numbers: rows that fill up would draw some, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x.mean(1)).tanh())
        return out


class Grouped(Plain):
    """A module in which samples meet, but in batches of 16 alone, larger than all draws."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out - out.mean(0) if len(x) == 16 else out


class Logs(nn.Module):
    """A module whose output and gradients are not finite for rows of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8, bias=False), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x.mean(1)).square().log())
        return out


def sum_of(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module(x), y, reduction="sum")


def run_of(loss: Loss | None, model: Callable[[], nn.Module] = Plain, **options: Any) -> Run:
    """A run whose updates show the sums themselves: without momentum, and with little noise."""
    rule = partial(torch.optim.SGD, lr=0.5)
    options = {"sampling": "poisson", "noise_multiplier": 2**-4, "rule": rule, **options}
    return Run(loss, model, **options)


def both(loss: Loss, steps: int = FIRST + 6, **options: Any) -> tuple[Run, Run]:
    """Take the steps with and without a graph, and compare losses, parameters and ledgers."""
    rows, within = options.pop("rows", None), options.pop("within", 1e-5)
    plain, graphed = run_of(None, **options), run_of(loss, rows=rows, **options)
    assert plain.steps(steps, loss) == pytest.approx(graphed.steps(steps), rel=within, nan_ok=True)
    for a, b in zip(plain.parameters(), graphed.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=within, atol=within / 10)
        assert a.isfinite().all()
    ours, others = graphed.engine.step, plain.engine.step
    assert (ours.steps, float(ours.nonfinite)) == (others.steps, float(others.nonfinite))
    assert ours.epsilon_if_seed_secret(1e-5) == others.epsilon_if_seed_secret(1e-5)
    assert graphed.graph is not None
    assert graphed.graph.replays >= 2
    return plain, graphed


def test_draws_are_filled_up_to_one_size() -> None:
    _, graphed = both(loss_of)
    assert graphed.graph is not None
    assert graphed.graph.rows == 16
    assert (graphed.graph.replays, graphed.graph.reason) == (4, "")
    assert len({int((~graphed.graph._filling).sum())} | {16}) == 2  # the last draw was filled up


@ARITHMETICS
def test_sums_over_samples_have_the_bits_of_steps_without_a_graph(arithmetic: str) -> None:
    """A mean divides by another number first."""
    plain, graphed = both(sum_of, loss_reduction="sum", arithmetic=arithmetic)
    assert all(map(torch.equal, plain.parameters(), graphed.parameters()))


@pytest.mark.parametrize("rows", [2, 3])
def test_larger_draws_take_several_passes(rows: int) -> None:
    _, graphed = both(loss_of, rows=rows)
    assert graphed.graph is not None
    recording: Any = graphed.graph._recording
    assert recording.replays > graphed.graph.replays


def test_physical_batches_are_filled_up_and_join_one_step() -> None:
    _, graphed = both(loss_of, 3 * FIRST, max_physical_batch_size=3)
    assert graphed.engine.step.steps < 3 * FIRST
    both(loss_of, 3 * FIRST, sampling="fixed", max_physical_batch_size=3, rows=3)


@pytest.mark.slow
def test_empty_draws_come_first_in_between_and_last() -> None:
    plain, graphed = run_of(None, size=1), run_of(loss_of, size=1)
    assert graphed.graph is not None
    reasons, sizes = [], []
    for _ in range(60):
        losses = []
        for run in (plain, graphed):
            batch = run.batch()
            placeholder = batch[0]._state.batch.placeholder
            losses.append(run.step(loss_of, batch))
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        reasons.append(graphed.graph.reason)
        sizes.append(0 if placeholder else len(batch[0]))
    assert [not size for size in sizes] == [reason == "an empty draw" for reason in reasons]
    assert 0 in sizes[: sizes.index(2)] or 0 in sizes[:5]
    assert reasons.count("") > 10
    for a, b in zip(plain.parameters(), graphed.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    assert plain.engine.step.steps == graphed.engine.step.steps == 60


@ARITHMETICS
def test_rows_that_fill_up_may_have_any_gradient(arithmetic: str) -> None:
    """Theirs is NaN; only records are counted, dropped and reported."""
    both(loss_of, model=Logs, arithmetic=arithmetic)
    x, y = torch.randn(12, 5, 6), torch.randint(3, (12,))
    x[::5] = torch.nan
    _, graphed = both(loss_of, FIRST + 14, model=Logs, data=(x, y), arithmetic=arithmetic)
    assert float(graphed.engine.step.nonfinite) > 0


@ARITHMETICS
def test_automatic_clipping_takes_no_row_for_a_record(arithmetic: str) -> None:
    """It scales a gradient of any norm."""
    both(loss_of, clipping="automatic", arithmetic=arithmetic)


@ARITHMETICS
def test_clip_groups_are_finished_in_the_recorded_backward_pass(arithmetic: str) -> None:
    bounds = [0.3, 0.4, 0.5, 0.6]
    both(loss_of, clipping="per_layer", max_grad_norm=bounds, arithmetic=arithmetic)
    if arithmetic == "float":  # in exact arithmetic the host waits for groups
        mechanism = mechanisms.DPSGD(
            noise_multiplier=2**-4,
            max_grad_norm=[0.3, 0.4],
            clipping="group",
            groups=(0, 1, 1, 0),
            arithmetic="float",
        )
        none = dict.fromkeys(("arithmetic", "noise_multiplier", "max_grad_norm"))
        both(loss_of, mechanism=mechanism, **none)


@ARITHMETICS
def test_centred_clipping_takes_no_row_for_a_record(arithmetic: str) -> None:
    """It clips what a gradient of zeros differs by from the centre, which every step moves."""
    mechanism = mechanisms.AdaClip(
        noise_multiplier=2**-4,
        expected_batch_size=4,
        beta1=0.5,
        h1=1.0,
        initial_scale=1.0,
        arithmetic=arithmetic,
    )
    options = {"noise_multiplier": None, "max_grad_norm": None, "arithmetic": None}
    both(loss_of, mechanism=mechanism, **options)


def test_a_step_is_told_of_the_records_alone() -> None:
    run = run_of(loss_of)
    run.graph = StepGraph(run.engine, loss_of, rows=3, update=False)
    step, told = run.engine.step, []
    add = step.add

    def noted(*, sum: Any) -> None:
        told.append((sum.batch_size, len(sum.norms)))
        add(sum=sum)

    step.add = noted  # type: ignore[method-assign, assignment]
    for _ in range(FIRST + 5):
        batch = run.batch()
        told.clear()
        run.step(batch=batch)
        assert sum(size for size, _ in told) == len(batch[0])
        assert all(size == norms for size, norms in told)
    assert run.graph is not None
    assert run.graph.replays > 1


def positions(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = module(x)[:, None].expand(-1, 4, -1)
    return F.cross_entropy(out.flatten(0, 1), y[:, None].expand(-1, 4).flatten(), ignore_index=2)


WEIGHTS, CLASSES = torch.tensor([1.0, 2.0, 0.5]), torch.arange(3)


def one_hot(y: Tensor) -> Tensor:
    return (y[:, None] == CLASSES).float()


LOSSES: dict[str, tuple[Loss, str]] = {
    "ignored targets": (lambda m, x, y: F.cross_entropy(m(x), y, ignore_index=2), "mean"),
    "weighted classes": (
        lambda m, x, y: F.cross_entropy(m(x), y, WEIGHTS),
        "mean",
    ),
    "smoothed targets": (lambda m, x, y: F.cross_entropy(m(x), y, label_smoothing=0.1), "mean"),
    "positions": (positions, "mean"),
    "entries": (lambda m, x, y: F.mse_loss(m(x), one_hot(y)), "mean"),
    "rows": (
        lambda m, x, y: F.kl_div(m(x).log_softmax(1), one_hot(y), reduction="batchmean"),
        "mean",
    ),
    "terms by hand": (lambda m, x, y: (m(x) - y[:, None]).square().mean(), "mean"),
    "time first": (lambda m, x, y: m(x).T.square().sum(1).sum(), "sum"),
    "one after the other": (
        lambda m, x, y: sum([0.5 * F.cross_entropy(m(x), y), m(x).square().mean()]),
        "mean",
    ),
    "weights of rows": (
        lambda m, x, y: (F.cross_entropy(m(x), y, reduction="none") * (1 + y)).sum() / 64,
        "sum",
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_those_of_the_records(name: str) -> None:
    loss, reduction = LOSSES[name]
    both(loss, FIRST + 4, loss_reduction=reduction)


REFUSED: dict[str, tuple[Loss, str]] = {
    "a mean by hand": (lambda m, x, y: sum_of(m, x, y) / len(x), "mean"),
    "a constant": (lambda m, x, y: F.cross_entropy(m(x), y) + 1, "mean"),
    "chosen rows": (lambda m, x, y: m(x).square().sum(1)[y > 0].mean(), "mean"),
    "a product": (lambda m, x, y: m(x).square().sum(1) @ torch.ones(len(x)), "sum"),
    "a row": (lambda m, x, y: sum_of(m, x, y) + m(x)[0].square().sum(), "sum"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_losses_in_which_rows_that_fill_up_count_are_refused(name: str) -> None:
    """The samples can take their step without a graph."""
    loss, reduction = REFUSED[name]
    run = run_of(loss, loss_reduction=reduction)
    run.steps(FIRST)
    batch = run.batch()
    assert run.graph is not None
    before = run.parameters()
    with pytest.raises((InvalidInput, UnsupportedModule)):
        run.graph.step(*batch)
    assert run.engine.step.steps == FIRST
    assert all(map(torch.equal, before, run.parameters()))
    plain = loss_of if reduction == "mean" else sum_of
    plain(run.model, *batch).backward()
    run.optimizer.step()
    assert run.engine.step.steps == FIRST + 1


def test_a_loss_that_cuts_its_batch_is_refused() -> None:
    def pieces(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss_of(module, x[:1], y[:1]).backward()
        return loss_of(module, x[1:], y[1:])

    for sampling, reason in (("poisson", "into pieces"), ("fixed", "cannot be recorded")):
        run = run_of(pieces, sampling=sampling)
        run.steps(FIRST)
        batch = run.batch()
        assert run.graph is not None
        with pytest.raises(InvalidInput, match=reason):
            run.graph.step(*batch)
        loss_of(run.model, *batch).backward()
        run.optimizer.step()
        assert run.engine.step.steps == FIRST + 1


def test_nothing_of_an_earlier_draw_stays_behind_a_smaller_one() -> None:
    run = run_of(loss_of)
    graph = run.graph
    assert graph is not None
    for _ in range(FIRST + 8):
        batch = run.batch()
        run.step(batch=batch)
        for mine, given in zip(graph._given, batch, strict=not graph.reason):
            assert torch.equal(mine[: len(given)], given)
            assert not mine[len(given) :].any()
    assert graph.replays > 4


def test_rows_keep_their_order_in_memory() -> None:
    """A convolution takes another kernel for each."""
    x = torch.randn(12, 5, 6, 4).to(memory_format=torch.channels_last)
    for rows in (2, 7):
        room = step_graph._room_for(x, rows)
        assert room.shape == (rows, 5, 6, 4)
        assert room.is_contiguous(memory_format=torch.channels_last)
    assert step_graph._room_for(x.contiguous(), 3).is_contiguous()
    assert step_graph._room_for(torch.ones(4), 3).shape == (3,)


def test_a_step_that_failed_leaves_the_look_at_so_many_rows_to_the_next() -> None:
    run = run_of(loss_of, Grouped)
    first = run.batch()
    run.step(batch=first)
    run.steps(FIRST - 1)
    assert run.graph is not None
    with pytest.raises(PrivacyError):
        run.graph.step(*first)
    batch = run.batch()
    loss_of(run.model, *batch).backward()  # a step of the user's own, which is looked at
    run.optimizer.step()
    with pytest.raises(UnsupportedModule, match="Grouped"):
        run.steps(3)


def test_probes_look_at_passes_of_as_many_rows() -> None:
    """Only those are recorded: a module may mix samples in them alone."""
    run = run_of(loss_of)
    run.steps(FIRST + 3)
    graph, before = run.graph, run.guard.probes
    assert graph is not None
    run.guard._occasions.gap = 1
    seen: list[int] = []
    use = run.engine.capture.use

    def noted(operation: str, targets: Any, x: Tensor, **saved: Any) -> Any:
        seen.append(len(x))
        return use(operation, targets, x, **saved)

    run.engine.capture.use = noted  # type: ignore[method-assign]
    run.step()
    assert graph.reason == "the guards look at this pass"
    assert run.guard.probes > before
    assert {*seen} == {16}


def test_a_module_that_mixes_samples_in_passes_of_so_many_rows_is_refused() -> None:
    run = run_of(loss_of, Grouped)
    run.steps(FIRST)
    with pytest.raises(UnsupportedModule, match="Grouped"):
        run.step()
    assert run.engine.step.steps == FIRST


def test_a_draw_of_several_passes_is_probed_as_a_whole() -> None:
    run = run_of(loss_of, rows=2)
    run.steps(FIRST + 4)
    assert run.graph is not None
    batch = run.batch()
    while len(batch[0]) < 3:
        run.step(batch=batch)
        batch = run.batch()
    run.guard._occasions.gap = 2  # not the first of its passes
    run.step(batch=batch)
    assert run.graph.reason == "the guards look at this pass"


def test_only_whole_draws_are_taken() -> None:
    run = run_of(loss_of)
    run.steps(FIRST + 4)
    assert run.graph is not None
    x, y = run.batch()
    while len(x) < 2:
        run.step(batch=(x, y))
        x, y = run.batch()
    for part in ((x[:1], y[:1]), (x.flip(0), y), (torch.cat([x, x]), torch.cat([y, y]))):
        with pytest.raises(PrivacyError):
            run.graph.step(*part)
    for given in ((x[:, :4], y), (x.double(), y)):
        with pytest.raises(InvalidInput, match="shape, dtype or device"):
            run.graph.step(*given)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_filled_up(name: str) -> None:
    build, draw = MODELS[name]
    data = (torch.cat([draw(), draw().flip(0)]),)

    def loss(module: nn.Module, x: Tensor) -> Tensor:
        return loss_of_model(module(x), x)

    most = 0.02 if name == "gpt2" else 1e-4  # its products are of bfloat16
    both(loss, FIRST + 5, model=build, data=data, rows=9, within=most)


@pytest.mark.slow
def test_dropout_draws_for_all_rows() -> None:
    run = run_of(loss_of, Small)
    losses = run.steps(FIRST + 4)
    assert run.graph is not None
    assert run.graph.replays == 2
    assert len(set(losses)) == len(losses)


@pytest.mark.parametrize(
    ("expected", "most", "records", "rows"),
    [
        (256, None, 50000, 288),
        (256, 64, 50000, 64),
        (256, 60, 50000, 64),
        (4096, None, 10**6, 4256),
        (0.1, None, 1000, 16),
        (4, None, 12, 16),
        (100, None, 100, 112),
    ],
)
def test_rows_are_chosen_by_public_numbers(
    expected: float, most: int | None, records: int, rows: int
) -> None:
    assert usual_rows(expected, most, records) == rows

"""What makes the usual pass cheap changes no verdict, and a broken comparison does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dpkern.engine import guard, loader, occasions, padding
from dpkern.engine.guard import ForwardGuard
from dpkern.engine.occasions import Occasions
from dpkern.engine.pass_look import PassLook
from dpkern.engine.provenance import boundary, leaves, losses, tensor
from dpkern.engine.provenance.loss_check import LossCheck
from dpkern.engine.snapshot import Snapshot
from dpkern.engine.table_entries import TableEntries
from tests.engine.guards import changes
from tests.engine.guards.kit import Loop, Refused, World, run

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True"),
]

LOOPS = changes.TABLE.loops


def take_the_long_way(patch: pytest.MonkeyPatch) -> None:
    """Let every pass be followed in full, whatever was seen before."""
    patch.setattr(tensor, "USUAL", {})
    patch.setattr(boundary, "rows_in_order", lambda values: None)
    patch.setattr(boundary, "entered", lambda args, kwargs: None)
    patch.setattr(boundary, "left", lambda *output: None)
    patch.setattr(loader, "tracked_alike", lambda *batch: None)
    patch.setattr(leaves, "leads_only_to", lambda outputs, loss: False)
    patch.setattr(padding, "_PLAIN", set())
    patch.setattr(Snapshot, "_still_holds", lambda self, trusted: False)
    patch.setattr(ForwardGuard, "_wait", lambda *args: False)
    patch.setattr(TableEntries, "same", lambda self: False)
    patch.setattr(guard, "pass_look", lambda occasions, state: None)
    patch.setattr(LossCheck, "_is_of_outputs_alone", lambda self, loss: False)


def told(world: World) -> tuple[Any, ...]:
    """Everything that a run of a loop ended with."""
    error = world.error
    return type(error), str(error), [total.tolist() for total in world.sums], world.saved.keys()


@pytest.mark.parametrize("hostile", [None, 0])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.name.replace(" ", "-"))
def test_the_long_way_leads_to_the_same_verdict(loop: Loop, hostile: int | None) -> None:
    short = told(run(loop, target=hostile))
    with pytest.MonkeyPatch.context() as patch:
        take_the_long_way(patch)
        assert told(run(loop, target=hostile)) == short


def test_how_many_loops_change() -> None:
    assert len(LOOPS) >= 40
    assert sum(isinstance(loop.expected, Refused) for loop in LOOPS) >= 25


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as context:
        yield context


def rows_of_any_state(patch: pytest.MonkeyPatch) -> None:
    """Take every tracked tensor for the rows of its batch."""

    def found(values: Any) -> Any:
        batch = getattr(values[0], "_state", None) and values[0]._state.batch
        return batch.rows if batch is not None else None

    patch.setattr(boundary, "rows_in_order", found)


def entrances_of_any_state(patch: pytest.MonkeyPatch) -> None:
    """Take a module's only argument for the rows of its batch, whatever became of them."""

    def found(args: Any, kwargs: Any) -> Any:
        state = getattr(args[0], "_state", None) if len(args) == 1 and not kwargs else None
        if state is None or state.batch is None:
            return None
        return state.batch.rows, (tensor.untracked(args[0]),)

    patch.setattr(boundary, "entered", found)


def targets_of_any_state(patch: pytest.MonkeyPatch) -> None:
    """Take every cross entropy for that of rows with their own targets."""

    def usual(func: Any, args: Any, kwargs: Any) -> Any:
        for other in args[1:]:
            other._state = args[0]._state
        return losses.usual_cross_entropy(func, args, kwargs)

    patch.setattr(tensor, "USUAL", {losses.F.cross_entropy: usual})


def any_graph(patch: pytest.MonkeyPatch) -> None:
    """Look at no loss's graph."""
    patch.setattr(leaves, "leads_only_to", lambda outputs, loss: True)


def no_hooks(patch: pytest.MonkeyPatch) -> None:
    """Compare no hooks, modules and attributes."""
    same = Occasions._same
    patch.setattr(Occasions, "_same", lambda self: self._seen or same(self))


def no_versions(patch: pytest.MonkeyPatch) -> None:
    """Compare no versions of tensors."""
    patch.setattr("dpkern.engine.state.read", lambda attribute, tensors: [0 for _ in tensors])


def no_entries(patch: pytest.MonkeyPatch) -> None:
    """Compare no tables: tensors, attributes, modules and hooks may be others."""
    patch.setattr(TableEntries, "same", lambda self: True)


def any_loss(patch: pytest.MonkeyPatch) -> None:
    """Take every loss for one of the outputs alone."""
    patch.setattr(LossCheck, "_is_of_outputs_alone", lambda self, loss: True)


def without_looks(patch: pytest.MonkeyPatch, *names: str) -> None:
    made = PassLook.__init__

    def make(self: PassLook, *given: Any) -> None:
        made(self, *given)
        vars(self).update(dict.fromkeys(names, lambda: True))

    patch.setattr(PassLook, "__init__", make)


def blind_after(patch: pytest.MonkeyPatch) -> None:
    """Look at nothing behind the usual pass."""
    without_looks(patch, "after")


def blind(patch: pytest.MonkeyPatch) -> None:
    """Look at nothing in front of the usual pass either."""
    without_looks(patch, "before", "after")


BROKEN: dict[Callable[[pytest.MonkeyPatch], None], tuple[str, ...]] = {
    rows_of_any_state: ("mixup", "standardisation"),
    entrances_of_any_state: ("mixup", "standardisation"),
    targets_of_any_state: ("targets of other records",),
    any_graph: ("a trained temperature", "a trained head"),
    no_hooks: (
        "a hook in front that mixes",
        "another forward",
        "a flag that mixes",
        "a mode that mixes",
    ),
    any_loss: (
        "a trained temperature",
        "a trained head",
        "a trained term in place",
        "outputs scaled in place",
        "targets with trained weights",
    ),
    blind: (
        "a hook in front that mixes",
        "another forward",
        "a flag that mixes",
        "a mode that mixes",
        "another buffer",
        "a buffer written between",
    ),
    blind_after: (
        "a buffer written within",
        "a buffer replaced within",
        "a parameter written within",
    ),
    no_versions: ("a buffer written between",),
    no_entries: (
        "another buffer",
        "a hook in front that mixes",
        "another forward",
        "a flag that mixes",
        "a mode that mixes",
    ),
}
"""Comparisons that were left out, and loops that then train."""


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_comparison_that_is_left_out_lets_loops_through(
    broken: Callable[[pytest.MonkeyPatch], None], patch: pytest.MonkeyPatch
) -> None:
    broken(patch)
    patch.setattr(occasions, "MEAN_GAP", 1 << 60)  # no secret probe finds them by chance
    for name in BROKEN[broken]:
        loop = next(loop for loop in LOOPS if loop.name == name)
        assert isinstance(loop.expected, Refused)
        assert len(run(loop).sums) > loop.expected.after, name

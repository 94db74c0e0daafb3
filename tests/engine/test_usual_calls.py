"""The compiled calls of the usual loop do what Python does there, and leave the rest to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkern.engine import user_code
from dpkern.engine.padding import PaddingCheck
from dpkern.engine.provenance import aliases, losses, rules, shapes, usual_calls
from dpkern.engine.provenance.handing import tracked_batch
from dpkern.engine.provenance.states import PerRecord, RecordSum, YieldedBatch
from dpkern.engine.provenance.tensor import TrackedTensor, count_write, retrack, track, untracked
from dpkern.ops import direct

B, E = 6, 4

pytestmark = pytest.mark.skipif(direct.look("entered") is None, reason="no compiled module")


@pytest.fixture(autouse=True)
def _no_writes() -> Iterator[None]:
    """Forget the writes of other tests meanwhile."""
    kept = dict(aliases.WRITTEN)
    aliases.WRITTEN.clear()
    yield
    aliases.WRITTEN.update(kept)


def batch_of(kind: type = list) -> Any:
    return kind((torch.randn(B, E), torch.arange(B)))


def shapes_of(tree: Any) -> list[torch.Size]:
    check = PaddingCheck(allowed=False, assume=lambda _: None, taint=lambda _: None)
    check.look(tree)
    assert check.last is not None
    return check.last


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_batch_like_the_last_one_is_tracked_as_python_tracks_it(kind: type) -> None:
    tree, batch = batch_of(kind), YieldedBatch(B)
    held = list(tree)
    found = usual_calls.tracked_alike(tree, shapes_of(tree), batch.each, B)
    expected = tracked_batch(tree, batch)
    assert type(found) is type(expected) is kind
    for one, two, plain in zip(found, expected, held, strict=True):
        assert type(one) is TrackedTensor
        assert type(plain) is Tensor
        assert one._state is two._state is batch.each
        assert one._since == two._since
        assert untracked(one).data_ptr() == plain.data_ptr()
        assert untracked(one)._version == plain._version


@pytest.mark.parametrize("kind", [list, tuple])
def test_tensors_that_only_the_loader_holds_are_tracked_themselves(kind: type) -> None:
    tree, each = batch_of(kind), YieldedBatch(B).each
    shapes, places = shapes_of(tree), [id(tensor) for tensor in tree]
    found = usual_calls.tracked_alike(tree, shapes, each, B)
    if direct.look("tracked_alike") is not None:
        assert [id(tensor) for tensor in found] == places
    assert {type(tensor) for tensor in found} == {TrackedTensor}


def test_tensors_of_a_batch_that_others_hold_stay_ordinary() -> None:
    tree, each = batch_of(), YieldedBatch(B).each
    shapes = shapes_of(tree)
    others = tree, [tree], {0: tree}
    found = usual_calls.tracked_alike(tree, shapes, each, B)
    assert found is not None
    assert {type(tensor) for batch in others[:1] for tensor in batch} == {Tensor}


ODD_BATCHES: dict[str, Callable[[], Any]] = {
    "more rows": lambda: [torch.randn(B + 1, E), torch.arange(B + 1)],
    "wider rows": lambda: [torch.randn(B, E + 1), torch.arange(B)],
    "another dimension": lambda: [torch.randn(B, E, 1), torch.arange(B)],
    "a tensor more": lambda: [*batch_of(), torch.arange(B)],
    "a tensor less": lambda: batch_of()[:1],
    "a number": lambda: [torch.randn(B, E), 3],
    "a dict": lambda: {"x": torch.randn(B, E)},
    "a gradient": lambda: [torch.randn(B, E, requires_grad=True), torch.arange(B)],
    "a parameter": lambda: [nn.Parameter(torch.randn(B, E)), torch.arange(B)],
    "a sparse tensor": lambda: [torch.randn(B, E).to_sparse(), torch.arange(B)],
    "tracked already": lambda: [track(torch.randn(B, E), YieldedBatch(B).each), torch.arange(B)],
    "nothing": list,
}


@pytest.mark.parametrize("name", ODD_BATCHES)
def test_other_batches_are_left_to_python(name: str) -> None:
    shapes, each = shapes_of(batch_of()), YieldedBatch(B).each
    assert usual_calls.tracked_alike(ODD_BATCHES[name](), shapes, each, B) is None
    assert usual_calls.tracked_alike(batch_of(), None, each, B) is None
    assert usual_calls.tracked_alike(batch_of(), shapes, each, B + 1) is None


def test_the_only_argument_enters_as_an_ordinary_alias() -> None:
    batch = YieldedBatch(B)
    x = track(torch.randn(B, E), batch.each)
    rows, args = usual_calls.entered((x,), {})
    assert rows is batch.rows
    (plain,) = args
    assert type(plain) is Tensor
    assert plain.data_ptr() == untracked(x).data_ptr()
    assert type(x) is TrackedTensor


def test_other_arguments_are_left_to_python() -> None:
    batch = YieldedBatch(B)
    x = track(torch.randn(B, E), batch.each)
    turned = track(torch.randn(B, E), PerRecord(batch, np.arange(B)[::-1]))
    summed = track(torch.randn(B, E), RecordSum(batch, "sum"))
    trained = track(torch.randn(B, E, requires_grad=True), batch.each)
    for args, kwargs in (
        *(((odd,), {}) for odd in (untracked(x), turned, summed, trained, 3, [x])),
        ((x, x), {}),
        ((x,), {"y": x}),
        ((), {"x": x}),
        ((), {}),
    ):
        assert usual_calls.entered(args, kwargs) is None


def test_after_a_write_that_moved_rows_python_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    x = track(torch.randn(B, E), YieldedBatch(B).each)
    monkeypatch.setitem(aliases.WRITTEN, 0, (None, 0))
    assert usual_calls.entered((x,), {}) is None


def test_tracked_tensors_know_of_the_writes_before_them() -> None:
    known, tree = YieldedBatch(B).each, batch_of()
    number = count_write()
    found = usual_calls.tracked_alike(tree, shapes_of(tree), known, B)
    assert [each._since for each in found] == [number, number]


def test_an_output_with_a_row_for_each_record_is_tracked_itself() -> None:
    batch, weight = YieldedBatch(B), torch.randn(E, requires_grad=True)
    output = torch.randn(B, E) * weight
    node = output.grad_fn
    assert usual_calls.left(output, batch.each, B) is node
    assert type(output) is TrackedTensor
    assert output._state is batch.each


def test_other_outputs_stay_as_they_are() -> None:
    batch, weight = YieldedBatch(B), torch.randn(E, requires_grad=True)
    fine = torch.randn(B, E) * weight
    for output in (fine[:3], fine.sum(), fine.detach(), nn.Parameter(torch.zeros(B)), (fine,)):
        kind = type(output)
        assert usual_calls.left(output, batch.each, B) is None
        assert type(output) is kind


def loss_arguments(batch: YieldedBatch, **changes: Any) -> tuple[tuple[Any, Any], dict[str, Any]]:
    x = track(torch.randn(B, E, requires_grad=True) * 1, batch.each)
    target = track(torch.arange(B) % E, batch.each)
    named = {
        "weight": None,
        "size_average": None,
        "ignore_index": -100,
        "reduce": None,
        "reduction": "mean",
        "label_smoothing": 0.0,
    }
    return (x, target), named | changes


@pytest.mark.parametrize("changes", [{}, {"label_smoothing": 0.1}, {"ignore_index": -1}])
def test_the_usual_loss_is_followed_as_python_follows_it(changes: dict[str, Any]) -> None:
    args, kwargs = loss_arguments(YieldedBatch(B), **changes)
    found = losses.USUAL[F.cross_entropy](F.cross_entropy, args, kwargs)
    expected = losses.usual_cross_entropy(F.cross_entropy, args, kwargs)
    assert expected is not None
    assert type(found) is type(expected) is TrackedTensor
    one, two = found._state, expected._state
    assert [getattr(one, n) for n in one.__slots__] == [getattr(two, n) for n in two.__slots__]
    assert found._made_of is expected._made_of is args[0].grad_fn
    assert untracked(found).item() == untracked(expected).item()


ODD_LOSSES: dict[str, dict[str, Any]] = {
    "weights": {"weight": torch.ones(E)},
    "a sum": {"reduction": "sum"},
    "the old argument": {"size_average": True},
    "an ignored class": {"ignore_index": 2},
}


@pytest.mark.parametrize("name", ODD_LOSSES)
def test_python_is_asked_of_other_losses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    followed = usual_calls.follow_cross_entropy(lambda *given: asked.append(given))
    try:
        args, kwargs = loss_arguments(YieldedBatch(B), **ODD_LOSSES[name])
        assert followed(F.cross_entropy, args, kwargs) is None
        assert asked == [(F.cross_entropy, args, kwargs)]
        args, kwargs = loss_arguments(YieldedBatch(B))
        followed(F.cross_entropy, args, kwargs)
        assert len(asked) == 1
        other = track(args[1], YieldedBatch(B).each)
        followed(F.cross_entropy, (args[0], other), kwargs)
        followed(F.cross_entropy, (args[0], untracked(args[1])), kwargs)
        followed(F.cross_entropy, (args[0], track(untracked(args[1]) - 1, args[0]._state)), kwargs)
        assert len(asked) == 4
    finally:
        usual_calls.follow_cross_entropy(losses.usual_cross_entropy)


T = 3


def positions(batch: YieldedBatch) -> tuple[Any, Any]:
    """Return logits with a graph and targets, one for each position of each record."""
    logits = track(torch.randn(B, T, E, requires_grad=True) * 1, batch.each)
    return logits, track(torch.arange(B * T).view(B, T) % E, batch.each)


RESHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "all": ("flatten", ()),
    "positions": ("flatten", (0, 1)),
    "inside the rows": ("flatten", (1,)),
    "a view": ("view", (-1, E)),
    "rows of half a position": ("view", (-1, E // 2)),
    "a view of the rows": ("view", (B, -1)),
    "another shape": ("reshape", (B * T, E)),
}
ODD_RESHAPES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "fewer rows": ("view", (B // 2, -1)),
    "records behind": ("view", (1, B * T, E)),
    "another dtype": ("view", (torch.int32,)),
    "a tuple": ("reshape", ((B, -1),)),
    "nothing new": ("flatten", (2,)),
}


@pytest.mark.parametrize("name", RESHAPES)
def test_rows_merged_with_positions_are_followed_as_the_rule_follows_them(name: str) -> None:
    x, _ = positions(YieldedBatch(B))
    (operation, sizes), method = RESHAPES[name], getattr(Tensor, RESHAPES[name][0])
    found = shapes.usual_reshape(method, (x, *sizes), None)
    expected = rules.run(method, (x, *sizes), {})
    assert found is not None
    assert type(found) is type(expected) is TrackedTensor
    assert torch.equal(untracked(found), untracked(expected))
    one, two = found._state, expected._state
    assert (one.batch, one.dim, one.ids.tolist()) == (two.batch, two.dim, two.ids.tolist())
    assert shapes.usual_reshape(method, (x, *sizes), None)._state is one  # type: ignore[union-attr]
    assert getattr(x, operation)(*sizes)._state is one


def test_logits_and_the_targets_that_follow_them_have_one_state() -> None:
    batch = YieldedBatch(B)
    logits, targets = positions(batch)
    before, after = logits[:, :-1].reshape(-1, E), targets[:, 1:].flatten()
    assert before._state is after._state is batch.spread  # type: ignore[attr-defined]
    turned = track(untracked(logits).transpose(0, 1), PerRecord(batch, batch.all, 1))
    assert shapes.usual_reshape(Tensor.flatten, (turned, 0, 1), None) is None


@pytest.mark.parametrize("name", ODD_RESHAPES)
def test_other_reshapes_are_left_to_the_rule(name: str) -> None:
    x, _ = positions(YieldedBatch(B))
    operation, sizes = ODD_RESHAPES[name]
    assert shapes.usual_reshape(getattr(Tensor, operation), (x, *sizes), None) is None
    assert shapes.usual_reshape(Tensor.flatten, (x,), {"start_dim": 1}) is None
    turned = track(untracked(x), PerRecord(YieldedBatch(B), np.arange(B)[::-1]))
    assert shapes.usual_reshape(Tensor.flatten, (turned, 0, 1), None) is None


def test_the_loss_of_positions_is_followed_as_the_rule_follows_it() -> None:
    logits, targets = positions(YieldedBatch(B))
    args = logits.flatten(0, 1), targets.flatten()
    _, kwargs = loss_arguments(YieldedBatch(B))
    found: Any = losses.usual_cross_entropy(F.cross_entropy, args, kwargs)
    expected = rules.run(F.cross_entropy, args, kwargs)
    one, two = found._state, expected._state
    assert [getattr(one, n) for n in one.__slots__] == [getattr(two, n) for n in two.__slots__]
    assert one.shares == {T}
    assert found._made_of is logits.grad_fn
    assert untracked(found).item() == untracked(expected).item()


def test_the_rule_is_asked_of_losses_of_other_positions() -> None:
    batch = YieldedBatch(B)
    logits, targets = positions(batch)
    args = logits.flatten(0, 1), targets.flatten()
    _, kwargs = loss_arguments(batch)
    long = track(untracked(targets).repeat(1, 2), batch.each).flatten()  # the batch keeps one
    assert losses.usual_cross_entropy(F.cross_entropy, args, kwargs) is None
    assert long._state is batch.spread
    others = positions(YieldedBatch(B))[1].flatten()
    assert losses.usual_cross_entropy(F.cross_entropy, (args[0], others), kwargs) is None
    args = logits.flatten(0, 1), targets.flatten()
    assert losses.usual_cross_entropy(F.cross_entropy, args, kwargs) is not None
    batch.has_chosen_rows = True
    assert losses.usual_cross_entropy(F.cross_entropy, args, kwargs) is None


def test_a_loss_behind_a_function_of_the_loop_is_not_made_of_the_output() -> None:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g

    batch = YieldedBatch(B)
    logits, targets = positions(batch)
    flat = untracked(logits).flatten(0, 1)
    for x in (Own.apply(flat), flat * torch.ones((), requires_grad=True)):  # type: ignore[no-untyped-call]
        node = x.grad_fn
        args = retrack(x, batch.spread_over(B * T)), targets.flatten()
        found: Any = losses.usual_cross_entropy(F.cross_entropy, args, loss_arguments(batch)[1])
        assert found._made_of is node


def test_an_error_of_the_loss_is_raised() -> None:
    args, kwargs = loss_arguments(YieldedBatch(B))
    far = track(untracked(args[1]) + E, args[0]._state)
    with pytest.raises(IndexError, match="out of bounds"):
        losses.USUAL[F.cross_entropy](F.cross_entropy, (args[0], far), kwargs)


def here(depth: int = 4) -> Any:
    return user_code.call_site(depth)


def test_a_call_site_is_the_same_for_the_same_instructions_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def sites() -> list[Any]:
        one = [here() for _ in range(2)]
        other = here()
        mapped = torch.utils._pytree.tree_map(lambda _: here(), [0, 0])  # through torch's frames
        return [*one, other, *mapped, *[here(1), here(1)]]

    def alike(found: list[Any]) -> list[list[bool]]:
        return [[a == b for b in found] for a in found]

    compiled = alike(sites())
    monkeypatch.setattr(user_code, "_call_site", None)
    assert compiled == alike(sites())
    assert compiled[0][1]
    assert not compiled[0][2]
    assert compiled[3][4]
    assert compiled[5][6]


class Scaling:
    """One loss of a batch, as its call has made it before, and what may be different of it."""

    def __init__(self, **changes: Any) -> None:
        batch = YieldedBatch(4)
        batch.in_pass = changes.pop("in_pass", 4)
        weights = torch.randn(3, requires_grad=True)
        self.loss = torch.randn(4, 3) @ weights
        node = changes.pop("made_of", self.loss.grad_fn)
        self.outputs = (self.loss.grad_fn,)
        self.loss = self.loss.mean()
        self.loss._made_of = node  # type: ignore[attr-defined]
        if changes.pop("written", False):
            with torch.no_grad():
                self.loss.mul_(2.0)
        self.losses = changes.pop("losses", 1) * [self.loss]
        given = {"reduction": "mean", "shares": usual_calls.ONE, "scales": None} | changes
        self.states = [RecordSum(batch, **given) for _ in self.losses]


def as_before(known: dict[Any, Any], scaling: Scaling) -> bool:
    """Ask for the call of the one who asks, and let it be known from then on."""
    given = (scaling.losses, scaling.states, "mean", known, scaling.outputs)
    found: bool = usual_calls.loss_as_before(*given, user_code.is_ours, 1)
    state = scaling.states[0]
    values = state.shares, state.reduction, state.scales, state.batch.in_pass, state.batch.size
    known.setdefault((user_code.call_site(ours=1), 0), values)
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {"shares": frozenset((2,))},
        {"scales": frozenset({("mean", 2.0)})},
        {"reduction": "sum"},
        {"in_pass": 3},
        {"in_pass": 1},
        {"made_of": None},
        {"written": True},
        {"losses": 2},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_only_a_loss_made_and_scaled_as_before_needs_no_look(changes: dict[str, Any]) -> None:
    known: dict[Any, Any] = {}
    turns = [Scaling(), Scaling(**changes), Scaling()]
    assert [as_before(known, scaling) for scaling in turns] == [False, False, True]


def test_the_same_loss_of_another_call_is_looked_at() -> None:
    known: dict[Any, Any] = {}
    assert not as_before(known, Scaling())
    assert not as_before(known, Scaling())
    assert len(known) == 2


def test_a_scaling_that_the_check_has_replaced_is_not_remembered() -> None:
    known: dict[Any, Any] = {}
    found = []
    for turn in range(5):
        if turn == 3:
            for key, values in known.items():
                known[key] = (frozenset((2,)), *values[1:])
        found.append(as_before(known, Scaling()))
    assert found == [False, True, True, False, False]


def yielded() -> tuple[YieldedBatch, Tensor]:
    """Return a batch and its first tensor, as the loader tracks it."""
    batch, tree = YieldedBatch(B), batch_of()
    shapes = shapes_of(tree)
    return batch, usual_calls.tracked_alike(tree, shapes, batch.each, B)[0]


def test_an_alias_that_the_loader_made_enters_if_it_fits() -> None:
    used = []
    for _ in range(70):  # until one is made, whatever other tests have left
        batch, x = yielded()
        ready = getattr(batch, "plain", None)
        used.append(usual_calls.entered((x,), {})[1][0] is ready)
        assert not hasattr(batch, "plain")
    assert used[-5:] == [True] * 5
    changes: list[Callable[[Tensor], Tensor]] = [
        lambda x: x,
        lambda x: x * 2,
        lambda x: x.view(B, 2, -1),
        lambda x: x[:, :2],
        lambda x: x.as_strided((B, E), (1, B)),
        lambda x: x.view(torch.int32),
    ]
    for change in changes:
        batch, x = yielded()
        ready, other = batch.plain, retrack(change(untracked(x)), batch.each)
        plain = usual_calls.entered((other,), {})[1][0]
        assert type(plain) is Tensor
        assert (plain is ready) is (change is changes[0])
        expected = untracked(other)
        assert (plain.data_ptr(), plain.dtype) == (expected.data_ptr(), expected.dtype)
        assert (plain.shape, plain.stride()) == (expected.shape, expected.stride())
        version = plain._version
        expected.add_(1)
        assert plain._version == version + 1
        usual_calls.entered((yielded()[1],), {})


def test_a_conjugate_is_not_taken_for_what_it_is_of() -> None:
    for _ in range(70):
        batch, tree = YieldedBatch(B), [torch.randn(B, E, dtype=torch.complex64)]
        (x,) = usual_calls.tracked_alike(tree, shapes_of(tree), batch.each, B)
        (plain,) = usual_calls.entered((retrack(untracked(x).conj(), batch.each),), {})[1]
        assert plain.is_conj()


def test_aliases_are_made_no_more_where_they_are_in_vain() -> None:
    made = [hasattr(yielded()[0], "plain") for _ in range(200)]
    assert sum(made[5:]) <= 4

"""Decide what an operation makes of the records of its operands.

Each rule names the state of one result. An operation that has no rule mixes: a new operation of torch is refused
until it is listed here, and never passes because its result happens to have as many rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..parameter import PRIVATE, source_of, tensors_in
from .states import NO_RECORD, Ids, Mixed, OneRecord, PerRecord, RecordSum, State, YieldedBatch
from .tensor import Function, TrackedTensor, retrack

Rule = Callable[["Call", Tensor], State | None]
Action = Callable[["Call"], Any]

RULES: dict[str, Rule] = {}
"""The state of each result, by the operation's name."""

ACTIONS: dict[str, Action] = {}
"""Operations that need more than a state for their result."""


@dataclass
class Call:
    """One operation on tracked tensors.

    Args:
        name: of the operation, without the marks of operators and of writing in place.
        func: what torch was asked to run.
        args, kwargs: as given, with tracked tensors among them.
        in_place: whether the first argument is overwritten.
    """

    name: str
    func: Function
    args: Sequence[Any]
    kwargs: dict[str, Any]
    in_place: bool = False
    tracked: list[Tensor] = field(default_factory=list)

    @property
    def states(self) -> list[State]:
        """The states of the operands that have one."""
        return [t._state for t in self.tracked]  # type: ignore[attr-defined]

    @property
    def batch(self) -> YieldedBatch | None:
        """Where the records come from, if all operands agree."""
        batches = {state.batch for state in self.states}
        return batches.pop() if len(batches) == 1 else None

    def argument(self, place: int, *names: str, default: Any = None) -> Any:
        """An argument by place or by one of its names."""
        for name in names:
            if name in self.kwargs:
                return self.kwargs[name]
        return self.args[place] if place < len(self.args) else default

    def mixed(self, how: str) -> Mixed:
        """The state of a result in which records have met."""
        return Mixed(self.name, user_line(), how, self.batch)

    def plain(self) -> Any:
        """Run the ordinary operation."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.func(*self.args, **self.kwargs)


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Make a function the rule of these operations."""

    def decorate(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return decorate


def action(*names: str) -> Callable[[Action], Action]:
    """Make a function run these operations."""

    def decorate(function: Action) -> Action:
        ACTIONS.update(dict.fromkeys(names, function))
        return function

    return decorate


def run(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation and give its results their states."""
    name, in_place = name_of(func)
    call = Call(name, func, args, kwargs, in_place)
    tensors = list(tensors_in((args, kwargs)))
    call.tracked = [t for t in tensors if type(t) is TrackedTensor]
    private = next((t for t in tensors if type(t) in PRIVATE), None)
    if private is not None:
        return source_of(private).capture.boundary.enter_operation(call)
    blocked = _blocked(call)
    if blocked is not None and name != "backward":
        return finish(call, call.plain(), lambda call, out: blocked)
    if name in ACTIONS:
        return ACTIONS[name](call)
    return finish(call, call.plain(), RULES.get(name, _unknown))


def _unknown(call: Call, out: Tensor) -> State:
    return call.mixed("is not known to keep the samples apart")


def finish(call: Call, result: Any, rule: Rule) -> Any:
    """Give the tensors of a result the states that the rule finds."""
    if isinstance(result, Tensor):
        return _finished(call, result, rule)
    if isinstance(result, (tuple, list)) and any(isinstance(item, Tensor) for item in result):
        items = [finish(call, item, rule) for item in result]
        if isinstance(result, torch.Size):
            return result
        if type(result).__module__ == "torch.return_types":
            return type(result)(items)  # type: ignore[arg-type]
        return type(result)(*items) if hasattr(result, "_fields") else type(result)(items)
    return result


def _finished(call: Call, out: Tensor, rule: Rule) -> Tensor:
    if type(out) in PRIVATE:
        return out
    state = rule(call, out)
    if state is None:
        return out
    given = type(out) is not TrackedTensor and any(out is t for t in tensors_in(call.args))
    if given and state.batch is not None and state.batch.boundary is not None:
        state.batch.boundary.check_target(out, call.name)
    return retrack(out, state)


def _blocked(call: Call) -> Mixed | None:
    """The state of all results if the operands cannot be told apart in the first place."""
    for state in call.states:
        if isinstance(state, Mixed):
            return state
    if call.batch is None:
        return call.mixed("combines samples of several batches")
    foreign = _foreign(call)
    return call.mixed(foreign) if foreign else None


def _foreign(call: Call) -> str | None:
    """What is wrong with an operand without a state that has a gradient."""
    if not torch.is_grad_enabled():
        return None
    for tensor in tensors_in((call.args, call.kwargs)):
        if (
            type(tensor) is not TrackedTensor
            and type(tensor) not in PRIVATE
            and tensor.grad_fn is not None
        ):
            return (
                "uses a tensor with a gradient that is no output of the private module; if the module keeps it "
                "as an attribute, return it from forward()"
            )
    return None


_OPERATORS = {
    **{
        f"__{side}{op}__": op
        for op in ("add", "sub", "mul", "matmul", "pow", "mod", "and", "or", "xor")
        for side in ("", "r", "i")
    },
    **{
        f"__{side}{op}__": "div" for op in ("truediv", "div", "floordiv") for side in ("", "r", "i")
    },
    **{
        f"__{op}__": op
        for op in ("neg", "invert", "abs", "eq", "ne", "lt", "le", "gt", "ge", "pos")
    },
}
_REVERSED = {f"__r{op}__" for op in ("sub", "pow", "truediv", "div", "floordiv", "mod", "matmul")}


def name_of(func: Function) -> tuple[str, bool]:
    """The operation's name without marks, and whether it writes into its first argument."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return (
            f"{getattr(getattr(func, '__self__', None), '__name__', '')}.{name.strip('_')}",
            False,
        )
    if name in _OPERATORS:
        return _OPERATORS[name], name.startswith("__i") and name != "__invert__"
    if name.startswith("__"):
        return name, name == "__setitem__"
    if name.endswith("_") and name != "requires_grad_":
        return name[:-1], True
    return name, False


def reversed_operands(call: Call) -> bool:
    """Whether an operator was called with its operands the other way round."""
    return getattr(call.func, "__name__", "") in _REVERSED


def user_line() -> str:
    """File and line of the innermost frame that is neither torch's nor dpkern's."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_OURS) and "<" not in path[:1]:
            return f"{path}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "an unknown line"


_OURS = (torch.__path__[0], __file__.rsplit("/", 3)[0])


def joined(call: Call, ids: Sequence[Ids]) -> Ids | None:
    """Row by row the one record that all operands speak of; None if they speak of several."""
    first = ids[0]
    for other in ids[1:]:
        if first is other:
            continue
        if len(first) != len(other):
            return None
        if not bool(((first == other) | (first == NO_RECORD) | (other == NO_RECORD)).all()):
            return None
        first = np.where(first == NO_RECORD, other, first)
    return first


def combined(call: Call, out: Tensor, *, from_right: bool) -> State:
    """Operands whose rows meet row by row, aligned from the right (broadcasting) or from the left."""
    states = call.states
    if any(isinstance(s, RecordSum) for s in states):
        return call.mixed("is not linear in a sum over samples")
    batch = states[0].batch
    assert batch is not None
    single = {s.record for s in states if isinstance(s, OneRecord)}
    rows = [(t, s) for t, s in zip(call.tracked, states, strict=True) if isinstance(s, PerRecord)]
    if not rows:
        return (
            OneRecord(batch, single.pop())
            if len(single) == 1
            else call.mixed("combines two samples")
        )
    if single and any(
        bool((s.ids != next(iter(single))).any()) or len(single) > 1 for _, s in rows
    ):
        return call.mixed("combines two samples")
    places = {s.dim - t.dim() if from_right else s.dim for t, s in rows}
    if len(places) > 1:
        return call.mixed("lets the samples of one operand meet another dimension of the other")
    place = places.pop() + (out.dim() if from_right else 0)
    ids = joined(call, [s.ids for _, s in rows])
    if ids is None:
        return call.mixed("combines rows of different samples")
    if not 0 <= place < out.dim() or out.shape[place] != len(ids):
        return call.mixed("changes the number of rows")
    return PerRecord(batch, ids, place)

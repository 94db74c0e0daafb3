"""Decide which state the result of an operation has, given those of its operands.

Each rule returns the state of one result. The result of an operation without a rule is mixed: a new
operation of torch is refused until it is listed here, even if its result has as many rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..in_place import writes_in_place
from ..parameter import PRIVATE, source_of, tensors_in
from ..user_code import user_line
from .aliases import is_stale, note_write
from .constants import may_be_read
from .naming import has_reversed_operands, name_of
from .places import is_part, written_at_places
from .states import Mixed, OneRecord, PerRecord, RecordSum, State, YieldedBatch
from .statistic import READ, Count, Statistic, marked, over_samples, remember, remembered
from .tensor import USUAL, Function, TrackedTensor, retrack, run_by, state_of, track

Rule = Callable[["TrackedCall", Tensor], State | None]
Action = Callable[["TrackedCall"], Any]

RULES: dict[str, Rule] = {}
"""Rules by the operation's name; a rule returns None for a constant."""

ACTIONS: dict[str, Action] = {}
"""Functions that run an operation in place of torch, by its name."""

REORDERING = frozenset({"__getitem__", "index_select"})
"""Operations that may reorder rows by an index to which other records have contributed."""

_TRACKED_ACTIONS = frozenset({"backward", "broadcast_tensors", "__reversed__"})
"""Names of actions that call operations on tracked tensors themselves."""

_ESCAPES = frozenset(
    "numpy __array__ __dlpack__ untyped_storage storage _typed_storage __bool__ is_nonzero "
    "register_hook".split()
)
"""Names of actions (``escapes``) that take tensors in any state."""

_NO_RECORDS = frozenset(
    """shape.get dtype.get device.get ndim.get layout.get is_cuda.get is_cpu.get requires_grad.get
    grad_fn.get is_leaf.get itemsize.get nbytes.get is_sparse.get is_quantized.get is_meta.get
    is_mkldnn.get is_nested.get is_mps.get is_xpu.get names.get output_nr.get _version.get dim
    size numel nelement ndimension stride storage_offset element_size data_ptr is_contiguous
    is_floating_point is_complex is_signed is_shared is_pinned get_device __len__ tolist
    __repr__ __hash__ __float__ __int__ __index__ __complex__ __contains__ equal allclose
    is_same_size is_set_to has_names register_post_accumulate_grad_hook requires_grad.set
    __dlpack_device__ new_zeros new_ones new_empty new_full new_tensor is_inference
    _is_view result_type can_cast is_conj is_neg _nnz""".split()
)
"""Operations that return no tensor, a constant, or a tensor that the private module refuses."""

NODES = "hooks on nodes of the autograd graph leave the gradient of each sample to itself"
"""The condition of certificates after the loop has asked for such a node."""

_SIZES = frozenset("numel nelement size stride is_same_size nbytes.get _nnz storage_offset".split())
"""Those that return sizes, however they are called."""

_READS = frozenset(
    "__float__ __int__ __index__ __complex__ __contains__ tolist equal allclose".split()
)
"""Those that return values of the samples."""


def _attribute(func: Function, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
    """Return an attribute that depends on no values, such as the dtype."""
    if type(args[0]) is not TrackedTensor:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs) if kwargs else func(*args)


def _size(func: Function, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
    """Return a size; one that values have chosen is a number that the loop reads from them."""
    if type(args[0]) is TrackedTensor:
        note_size(args[0])
    return _attribute(func, args, kwargs)


def note_size(tensor: Tensor) -> None:
    """Note that the loop knows a tensor's size, or how many parts it has been cut into."""
    state = state_of(tensor)
    if state is None or state.batch is None or not state.batch.has_chosen_sizes:
        return
    if not _is_whole(state) and tensor.dim():
        assume(state, READ)


def _is_whole(state: State) -> bool:
    """Whether all records have their rows, so that values have not chosen their number."""
    return isinstance(state, PerRecord) and (
        state.ids is state.batch.all or state is state.batch.spread
    )


for _name in "dtype device ndim requires_grad".split():
    USUAL[getattr(Tensor, _name).__get__] = _attribute
USUAL[Tensor.dim] = _attribute
for _name in "shape nbytes".split():
    USUAL[getattr(Tensor, _name).__get__] = _size
for _name in "size numel nelement __len__".split():
    USUAL[getattr(Tensor, _name)] = _size

_CHOOSING = frozenset(
    """nonzero argwhere where unique _return_output _unique2 unique_consecutive unique_dim
    masked_select bincount repeat_interleave __getitem__ narrow split tensor_split split_with_sizes
    to_sparse to_sparse_coo to_sparse_csr to_sparse_csc to_sparse_bsr to_sparse_bsc""".split()
)
"""Operations whose results may have sizes that values choose."""

_CHOOSING_BY_NUMBERS = frozenset(
    "repeat_interleave narrow tensor_split split split_with_sizes".split()
)
"""Those for which one of several operands holds the sizes."""


@dataclass(slots=True)
class TrackedCall:
    """One call of an operation on tracked tensors.

    Args:
        name: name of the operation, without the marks of operators and of writing in place.
        func: the function that torch was asked to run.
        args, kwargs: as given, with tracked tensors among them.
        tracked: the operands with a state.
        operands: all tensors among the arguments.
        states: states of the operands that have one.
    """

    name: str
    func: Function
    args: Sequence[Any]
    kwargs: dict[str, Any]
    tracked: list[Tensor] = field(default_factory=list)
    operands: list[Tensor] = field(default_factory=list)
    states: list[State] = field(default_factory=list)

    @property
    def batch(self) -> YieldedBatch | None:
        """The batch of the records; None unless all operands have the same one."""
        found = None
        for state in self.states:
            if found is not None and state.batch is not found:
                return None
            found = state.batch
            if found is None:
                return None
        return found

    @property
    def has_reversed_operands(self) -> bool:
        """Whether an operator was called with its operands swapped."""
        return has_reversed_operands(self.func)

    def argument(self, place: int, *names: str, default: Any = None) -> Any:
        """Return an argument by place or by one of its names."""
        for name in names:
            if name in self.kwargs:
                return self.kwargs[name]
        return self.args[place] if place < len(self.args) else default

    def tracks_only(self, *allowed: Any) -> bool:
        """Whether no operands but these have a state, and none of them is passed twice."""
        known = [id(a) for a in allowed if type(a) is TrackedTensor]
        if len(self.tracked) > len(known):
            return False
        return not [t for t in self.tracked if id(t) not in known]

    def mixed(self, how: str) -> Mixed:
        """Return the state of a result to which several records may have contributed."""
        batch = self.states[0].batch if self.states else None
        return Mixed(self.name, user_line(), how, batch)

    def plain(self) -> Any:
        """Run the ordinary operation."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.func(*self.args, **self.kwargs)


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a function as the rule of these operations."""

    def decorate(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return decorate


def action(*names: str) -> Callable[[Action], Action]:
    """Register a function that runs these operations."""

    def decorate(function: Action) -> Action:
        ACTIONS.update(dict.fromkeys(names, function))
        return function

    return decorate


def run(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation and give its results their states."""
    name = name_of(func)
    tensors, numbers, statistic = _operands(args, kwargs)
    tracked, states, constants, private, foreign = [], [], [], None, False
    for tensor in tensors:
        kind = type(tensor)
        if kind is TrackedTensor:
            tracked.append(tensor)
            states.append(tensor._state)  # type: ignore[attr-defined]
        elif kind in PRIVATE:
            private = tensor
        elif tensor.grad_fn is not None:
            foreign = True
        elif may_be_read(tensor):
            constants.append(tensor)
    if name == "item":
        return _number(func, args, kwargs, tracked)
    if name in _NO_RECORDS and private is None:
        with torch._C.DisableTorchFunctionSubclass():
            value = func(*args, **kwargs)
        if states and name in _READS:
            note_read(states[0], value)
        elif states and name in _SIZES:
            note_size(tracked[0])
        elif name == "grad_fn.get" and states and value is not None:
            assume(states[0], NODES)
        elif isinstance(value, Tensor) and states:  # x.new_tensor(...)
            given = [state for state in states[1:] if isinstance(state, (Mixed, RecordSum))]
            statistic = statistic or (over_samples(given[0]) if given else None)
            if statistic is not None:
                return retrack(value, replace(statistic, batch=states[0].batch))
        return value
    call = TrackedCall(name, func, args, kwargs, tracked, tensors, states)
    if states and (batch := states[0].batch) is not None and batch.boundary:
        if (constants or numbers) and _may_be_trained_on(call):
            if constants:
                batch.boundary.constants.note(batch, constants)
            if numbers:
                batch.boundary.constants.note_numbers(batch, numbers)
        if name in _CHOOSING and _chooses_sizes(call):
            batch.has_chosen_sizes = True
    if private is not None:
        boundary = source_of(private).capture.boundary
        assert boundary is not None  # nothing is tracked without one
        return boundary.enter_operation(call)
    act = ACTIONS.get(name)
    if act is not None and name in _TRACKED_ACTIONS:
        return act(call)
    with torch._C.DisableTorchFunctionSubclass():
        if statistic is not None and statistic.batch is None:
            statistic = replace(statistic, batch=states[0].batch)
        blocked = _blocked(call, foreign) or statistic
        if blocked is not None and name in _ESCAPES and act is not None:
            return act(call)
        if blocked is not None:
            result = func(*args, **kwargs)
            if name in ("__setitem__", "data.set"):
                with_state(call, args[0], blocked)
            return finish_as(call, result, blocked)
        if act is not None:
            return act(call)
        return finish(call, func(*args, **kwargs), RULES.get(name, _unknown))


def _may_be_trained_on(call: TrackedCall) -> bool:
    """Whether what comes out may enter the module or a loss; sums without a gradient do not."""
    for state in call.states:
        if type(state) is PerRecord or type(state) is OneRecord:
            return True
    with torch._C.DisableTorchFunctionSubclass():
        return any(tensor.requires_grad for tensor in call.tracked)


def _operands(
    args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Tensor], list[Any], Mixed | None]:
    """Return the tensors among the arguments, other values, and the state of a statistic.

    The other values are numbers, and what may hold some. The statistic is a number that was
    computed over samples.
    """
    found: list[Tensor] = []
    others: list[Any] = []
    statistic: Mixed | None = None
    for value in (*args, *kwargs.values()) if kwargs else args:
        kind = type(value)
        if kind in _CONSTANTS:
            continue
        if kind is TrackedTensor or isinstance(value, Tensor):
            found.append(value)
        elif kind is slice:
            statistic = statistic or _counted(value)
        else:
            others.append(value)
            if isinstance(value, np.floating) or kind is float:
                statistic = statistic or remembered(float(value))
            elif kind is Statistic or kind is Count:
                statistic = statistic or value.state
            elif isinstance(value, (tuple, list, dict)):
                found += tensors_in(value)
                if kind is tuple or kind is list:
                    statistic = statistic or next(filter(None, map(_counted, value)), None)
    return found, others, statistic


def _chooses_sizes(call: TrackedCall) -> bool:
    """Whether values of samples choose how many entries the result has."""
    if call.name == "where":
        return len(call.args) + len(call.kwargs) == 1
    if call.name == "__getitem__":
        by = [t for t in call.tracked if t is not call.args[0]]
        return any(t.dtype in (torch.bool, torch.uint8) for t in by) or bool(ends_of(call.args[1]))
    alone = len(call.args) + len(call.kwargs) == 1  # torch.repeat_interleave(counts)
    return call.name not in _CHOOSING_BY_NUMBERS or len(call.tracked) > 1 or alone


def ends_of(index: Any) -> list[State]:
    """Return the states of the numbers at which slices of an index begin and end."""
    found = []
    for part in index if type(index) is tuple else (index,):
        if type(part) is slice:
            for end in (part.start, part.stop, part.step):
                if type(end) is TrackedTensor:
                    found.append(end._state)
    return found


def _counted(index: Any) -> Mixed | None:
    """Return the state of a number computed over samples, also as an end of a slice."""
    if type(index) is slice:
        ends = (index.start, index.stop, index.step)
        return next((n.state for n in ends if type(n) is Count), None)
    return index.state if type(index) is Count or type(index) is Statistic else None


_CONSTANTS = frozenset({type(None), bool, int, str, torch.dtype, torch.device})
"""Types of most of the arguments that are neither tensors nor numbers with a fraction."""


def _unknown(call: TrackedCall, out: Tensor) -> State:
    return call.mixed("is not known to keep the samples apart")


def finish(call: TrackedCall, result: Any, rule: Rule) -> Any:
    """Give the tensors of a result the states that the rule finds."""
    if isinstance(result, Tensor):
        return with_state(call, result, rule(call, result))
    if isinstance(result, (tuple, list)) and any(isinstance(item, Tensor) for item in result):
        items = [finish(call, item, rule) for item in result]
        if type(result).__module__ == "torch.return_types":
            return type(result)(items)
        return type(result)(*items) if hasattr(result, "_fields") else type(result)(items)
    return result


def finish_as(call: TrackedCall, result: Any, *states: State | None) -> Any:
    """Give all tensors of a result one state, or each tensor its own in order."""
    if len(states) == 1:
        return finish(call, result, lambda call, out: states[0])
    following = iter(states)
    return finish(call, result, lambda call, out: next(following))


def with_state(call: TrackedCall, out: Tensor, state: State | None) -> Tensor:
    """Return a result of the operation, tracked if it has a state."""
    if state is None or type(out) in PRIVATE:
        return out
    before = state_of(out)
    if not any(out is t for t in call.operands):
        return retrack(out, state)
    if _returns_operand(call, out):
        # x.contiguous() and the like returned x itself, which keeps its own state elsewhere.
        return out if before is state else track(out, state)
    if before is None and state.batch is not None and state.batch.boundary is not None:
        state.batch.boundary.check_target(out, call.name)
    if is_part(before):  # x[0].zero_()
        written_at_places(state.batch)
    note_write(out, before, state)
    return retrack(out, state)


def _returns_operand(call: TrackedCall, out: Tensor) -> bool:
    if call.kwargs.get("out") is out:
        return False
    return not writes_in_place(call.func) and not call.kwargs.get("inplace")


def _blocked(call: TrackedCall, foreign: bool) -> Mixed | None:
    """Return the mixed state of all results if no rule can apply to the operands, else None."""
    if is_stale(call.operands):
        return call.mixed("reads what was written into it through another view")
    states = call.states
    for state in states:
        if (isinstance(state, Mixed) or state.batch is not states[0].batch) and not _is_order(call):
            several = call.mixed("combines samples of several batches")
            return state if isinstance(state, Mixed) else several
    if foreign and torch.is_grad_enabled():
        return call.mixed(
            "uses a tensor with a gradient that is no output of the private module; if the "
            "module keeps it as an attribute, return it from forward()"
        )
    return None


def _number(
    func: Function, args: Sequence[Any], kwargs: dict[str, Any], tracked: Sequence[Tensor]
) -> Any:
    """Return ``x.item()``, marked if it was computed over several records."""
    with torch._C.DisableTorchFunctionSubclass():
        value = func(*args, **kwargs)
    state = state_of(tracked[0]) if tracked else None
    if isinstance(state, (Mixed, RecordSum)):
        over = over_samples(state)
        # Functions of numbers lose the mark. What comes back after the backward pass shows itself.
        if over.batch is None or not over.batch.went_backward:
            assume(over, READ)
        elif over.batch.boundary is not None:
            over.batch.boundary.constants.note_read(value)
        if type(value) is float:
            remember(value, over)
        return marked(value, over)
    if state is not None:
        note_read(state, value)
    return value


def note_read(state: State, value: Any = None) -> None:
    """Note that values of a tensor in this state have left torch; ``value`` is such a number."""
    assume(state, READ)
    if isinstance(state, PerRecord):
        state.batch.has_read_rows = True
    if type(value) is float and isinstance(state, (Mixed, RecordSum)):
        remember(value, over_samples(state))


def assume(state: State, condition: str) -> None:
    """Add a condition of the certificate that a tensor in this state is for."""
    boundary = None if state.batch is None else state.batch.boundary
    if boundary is not None:
        boundary.assume(condition)


def _is_order(call: TrackedCall) -> bool:
    """Whether the call permutes all rows of its operand."""
    states = call.states
    if call.name not in REORDERING or len(states) != 2 or not isinstance(states[0], PerRecord):
        return False
    batch, order, rows = states[0].batch, call.tracked[1], len(states[0].ids)
    if states[0].dim != 0 or call.tracked[0] is not call.args[0] or len(call.args) < 2:
        return False
    index = call.args[-1]
    if index is not order or (call.name == "index_select" and call.args[1] != 0):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        if order.dtype is not torch.int64 or order.dim() != 1 or len(order) != rows:
            return False
        whole = bool((order.sort().values == torch.arange(rows, device=order.device)).all())
    # Those that are left out afterwards would be chosen by all samples.
    batch.has_ordered_rows = batch.has_ordered_rows or whole
    return whole


run_by(run)

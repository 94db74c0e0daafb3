"""Intercept the uses of private parameters and of tensors computed from parameters alone.

A private parameter is the user's own ``nn.Parameter`` whose class was switched to
``PrivateParameter``; it stays the same object, with the same data, in the same optimizer. PyTorch
then hands every operation on it to ``__torch_function__``, also inside checkpointed segments that
run again during the backward pass, and each one is decided here:

- gradients off, public passes, attributes: the ordinary operation;
- an operation with a rule (``engine.layers``): the rule;
- an operation on parameters alone (``w.t()``, ``w1 + b @ a``): its result is an *expression*, whose
  own uses are caught like a parameter's and led back to the parameters after the backward pass;
- any other operation on parameters and data: one copy of the parameter per sample, if they fit.

Nothing that is differentiable passes unseen: what is left over raises ``UnsupportedModule``.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.compiler import is_dynamo_compiling

from ..base.errors import HookWarning, PrivacyError, UnsupportedModule
from .in_graph import in_graph
from .in_place import writes_in_place
from .nodes_between import counted, nodes_between
from .uncompiled import uncompiled, uncompiled_unless
from .user_code import lines_up

if TYPE_CHECKING:
    from .uses import GradientSource

Function = Callable[..., Any]
Rule = Callable[[Function, Sequence[Any], dict[str, Any]], Any]

RULES: dict[Function, Rule] = {}
"""Rules of operations with a private argument, by the function that torch dispatches on."""

REPLAYED: dict[Function, Callable[..., Any]] = {}
"""Functions that run an operation as a program's next use (``engine.program``) or return None."""

SPECIAL: dict[Function, Callable[[Tensor], Any]] = {}
"""Functions that run a method or attribute of parameters which is more than an ordinary one."""

ANY: Any = object()
"""Key in ``RULES`` for every operation without a rule of its own (``layers.other``)."""

_NO_NAMES: Mapping[str, Any] = {}

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)

_DATA, _SET_DATA = Tensor.data.__get__, Tensor.data.__set__  # type: ignore[attr-defined]

without_torch_function = torch._C.DisableTorchFunctionSubclass
"""Context in which private parameters are ordinary tensors."""


def source_of(tensor: Tensor) -> GradientSource:
    """Return the source behind a private tensor."""
    source: GradientSource = tensor._private  # type: ignore[attr-defined]
    return source


def applied(function: Any, *args: Any) -> Any:
    """Call ``function.apply``, which torch leaves without types."""
    return function.apply(*args)


def differentiable_once(backward: Function) -> Function:
    """Make a backward pass refuse that its gradients are differentiated again.

    Raises:
        UnsupportedModule: ``create_graph=True`` asks for one, as gradient penalties do.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            refuse_double_backward()
        with torch.no_grad():
            return backward(ctx, *gradients)

    return once


def refuse_double_backward() -> NoReturn:
    """Refuse ``create_graph=True``.

    Raises:
        UnsupportedModule: always.
    """
    raise UnsupportedModule(
        "create_graph=True",
        expected="one backward pass",
        got="one whose result is to be differentiated again, as gradient penalties and "
        "meta-learning do",
        remedy="Leave such terms out, or compute them on a copy of the module from public data: "
        "dpkern has no per-sample gradients of gradients.",
    )


def fresh(result: Tensor) -> Tensor:
    """Return a forward's output marked as no view, so that it may be changed in place."""
    if not result._is_view():
        return result
    same: Tensor = torch.ops.aten._unsafe_view(result, result.shape)
    return same


def in_product(x: Tensor) -> Tensor:
    """Return ``x`` as a product reads it: in autocast's dtype, where autocast casts it."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype in (torch.float32, *_SIXTEEN_BITS):
        return x.to(torch.get_autocast_dtype(kind))
    return x


LEAVES: set[Rule] = set()
"""Rules that run an operation of their own; the others are written with operations that have one,
and must see private tensors as such."""


def rule(*functions: Any, leaf: bool = False) -> Callable[[Rule], Rule]:
    """Make a function the rule of these torch functions."""

    def decorate(handler: Rule) -> Rule:
        for function in functions:
            RULES[function] = handler
        if leaf:
            LEAVES.add(handler)
        return handler

    return decorate


def has_hooks(parameter: Tensor) -> bool:
    """Whether somebody asked to be called with the parameter's gradients."""
    after = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return bool(parameter._backward_hooks or after)


def warn_of_hooks(whose: str) -> None:
    """Warn that gradient hooks of private parameters are not called."""
    warnings.warn(
        f"{whose}: private backward passes do not call gradient hooks of parameters, for there is "
        "no gradient in .grad before the noise. Freeze parameters by requires_grad=False, mask a "
        "weight in the model (F.linear(x, w * mask)), or hook the optimizer's step.",
        HookWarning,
        stacklevel=lines_up(),
    )


class PrivateParameter(nn.Parameter):
    """A parameter whose differentiable uses are intercepted; copies and pickles are ordinary."""

    _private: GradientSource

    taps_in_graphs = True
    """Uses of it may be captured inside compiled graphs."""

    @classmethod
    def __torch_function__(
        cls,
        func: Function,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # The compiler knows the first question's answer, and goes on to ``_on_parameter``.
        if not is_dynamo_compiling() and get_eval_frame_callback() is None:
            replay = REPLAYED.get(func)
            if replay is not None:
                result = counted(replay, args, kwargs or _NO_NAMES)
                if result is not None:
                    return result
            elif func in SPECIAL:
                return SPECIAL[func](args[0])
            elif func in ORDINARY:
                with without_torch_function():
                    return func(*args, **kwargs or _NO_NAMES)
        return _on_parameter(cls, func, types, args, kwargs)

    def register_hook(self, hook: Callable[..., Any]) -> Any:
        """Register a hook, which private backward passes do not call, and warn of that."""
        warn_of_hooks(source_of(self).name)
        with without_torch_function():
            return super().register_hook(hook)  # type: ignore[no-untyped-call]

    def register_post_accumulate_grad_hook(self, hook: Callable[..., Any]) -> Any:
        """Register a hook, which is not called either, and warn of that."""
        warn_of_hooks(source_of(self).name)
        with without_torch_function():
            return super().register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            with without_torch_function():
                data = self.data.clone(memory_format=torch.preserve_format)
                memo[id(self)] = nn.Parameter(data, self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        with without_torch_function():
            ordinary: Any = nn.Parameter(self.data, self.requires_grad)
            return ordinary.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with without_torch_function():
            return f"Private {nn.Parameter(self.data, self.requires_grad)!r}"


class PrivateExpression(Tensor):
    """A tensor computed from private parameters alone, with its own autograd graph."""

    _private: GradientSource

    @classmethod
    @uncompiled  # torch.compile breaks its graph here
    def __torch_function__(
        cls,
        func: Function,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if len(types := tuple(types)) > 1 and any(hasattr(t, "follows_records") for t in types):
            return NotImplemented  # the type that follows records handles the operation
        return _dispatch(func, args, kwargs)


class ParameterData(Tensor):
    """The memory of a private parameter, as ``parameter.data`` and views of that show it.

    A write into it is looked at as one into the parameter is. Its copies, its pickles and what is
    computed from it are ordinary tensors.
    """

    _private: GradientSource

    @classmethod
    @uncompiled  # torch.compile breaks its graph here
    def __torch_function__(
        cls,
        func: Function,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(t, PRIVATE) or hasattr(t, "follows_records") for t in tuple(types)):
            return NotImplemented  # those look for themselves
        named = kwargs or _NO_NAMES
        with without_torch_function():
            _look_at_write(func, args, named)
            result = func(*args, **named)
            for part in tensors_in(result):
                if type(part) is Tensor and part.layout is torch.strided:
                    _as_data(part, _source_behind(part, args))
            return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = self._ordinary(copied=True)
        made: Tensor = memo[id(self)]
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._ordinary().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._ordinary())

    def _ordinary(self, *, copied: bool = False) -> Any:
        with without_torch_function():
            same = self.detach()
            same = same.clone(memory_format=torch.preserve_format) if copied else same
        if getattr(self, "_is_param", False):  # nn.Parameter(parameter.data)
            return nn.Parameter(same, self.requires_grad)
        return same


def _data_of(parameter: Tensor) -> Tensor:
    """Return ``parameter.data``, which sees what is written into it."""
    with without_torch_function():
        return _as_data(parameter.data, source_of(parameter))


SPECIAL[_DATA] = _data_of


def _as_data(data: Tensor, source: GradientSource | None) -> Tensor:
    if type(data) is Tensor and source is not None and source.capture.boundary is not None:
        data.__class__ = ParameterData
        data._private = source  # type: ignore[attr-defined]
    return data


def _source_behind(view: Tensor, args: Sequence[Any]) -> GradientSource | None:
    """Return the source of the argument whose memory a tensor shows, if it is a parameter's."""
    place = view.untyped_storage()._cdata
    for tensor in tensors_in(args):
        if type(tensor) is ParameterData and tensor.untyped_storage()._cdata == place:
            return source_of(tensor)
    return None


@uncompiled_unless(in_graph)  # torch.compile breaks its graph here, or keeps the use inside
def _on_parameter(
    cls: type[Tensor],
    func: Function,
    types: Iterable[type],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
) -> Any:
    """Run an operation on private parameters as the first steps do."""
    del cls
    if len(types := tuple(types)) > 1 and any(hasattr(t, "follows_records") for t in types):
        return NotImplemented  # samples look at parameters, not the other way round
    if func == _SET_DATA and hasattr(args[1], "follows_records"):
        raise PrivacyError(
            "parameter.data",
            expected="parameters that the loop leaves alone",
            got="samples written into one",
            remedy="Keep statistics of private data outside the model.",
        )
    if func == _SET_DATA:
        boundary = source_of(args[0]).capture.boundary
        with without_torch_function():
            if boundary is not None:
                boundary.look_at_data(args[0], args[1])
            return func(*args)
    return _dispatch(func, args, kwargs)


PRIVATE = (PrivateParameter, PrivateExpression)
_PRIVATE = frozenset(PRIVATE)


def is_plainly_called() -> bool:
    """Whether no compiler sees the call."""
    return not is_dynamo_compiling() and get_eval_frame_callback() is None


def is_private(tensor: Any) -> TypeGuard[Tensor]:
    """Whether this is a private tensor; much faster than isinstance with a parameter class."""
    return type(tensor) in _PRIVATE


ORDINARY = frozenset(
    getattr(Tensor, name).__get__
    for name in (
        *("shape", "dtype", "device", "grad", "requires_grad", "is_leaf", "ndim", "layout"),
        *("grad_fn", "is_sparse", "is_cuda", "is_cpu", "is_quantized", "is_nested", "is_mkldnn"),
        *("is_meta", "_version", "itemsize", "nbytes", "_base"),
    )
) | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_contiguous, Tensor.detach}


def _dispatch(func: Function, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
    named = dict(kwargs) if kwargs else {}
    with without_torch_function():  # also makes every access to a parameter below cheap
        if func in ORDINARY or func == _DATA:
            return func(*args, **named)
        recording = torch.is_grad_enabled()
        if not recording or (args and type(args[0]) is ParameterData):
            _look_at_write(func, args, named)
        if not recording:
            return func(*args, **named)
        sources = _sources(args, named)
        if not any(source.watched for source in sources):
            return func(*args, **named)
        handler = RULES.get(func) or RULES[ANY]
        if handler in LEAVES:
            return _handled(handler, func, args, named, sources)
    return _handled(handler, func, args, named, sources)


def _handled(
    handler: Rule,
    func: Function,
    args: Sequence[Any],
    named: dict[str, Any],
    sources: Sequence[GradientSource],
) -> Any:
    try:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise refuse(
                func,
                sources,
                got="a use inside torch.vmap or another transform of torch.func",
                remedy="Write the operation on the whole batch.",
            )
        with nodes_between.operation():
            result = handler(func, args, named)
        graphs = sources[0].capture.graphs
        if graphs.recording:
            graphs.note(func, args, named, result)
        return result
    except UnsupportedModule as error:
        collected = sources[0].capture.collected
        if collected is None:
            raise
        # A dry run goes on, to find everything at once; nothing of it is trained on.
        collected.append(error)
        with without_torch_function():
            return func(*args, **named)


def _look_at_write(func: Function, args: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Let the loop's boundary look at an operation if it writes into parameters.

    One that writes into a copy of its own, such as an average of weights, only reads them.
    """
    values = (*args, *named.values())
    written = [named.get("out"), *(values[:1] if writes_in_place(func) else ())]
    for tensor in tensors_in(written):
        if type(tensor) in _PRIVATE or type(tensor) is ParameterData:
            boundary = source_of(tensor).capture.boundary
            if boundary is not None:
                boundary.look_at_write(func, values)
            return


def _sources(args: Sequence[Any], named: Mapping[str, Any]) -> list[GradientSource]:
    """Return the sources of the private tensors among the arguments."""
    found = []
    for value in (*args, *named.values()) if named else args:
        if type(value) in _PRIVATE:
            found.append(source_of(value))
        elif isinstance(value, (tuple, list, Mapping)):
            found += [source_of(t) for t in tensors_in(value) if type(t) in _PRIVATE]
    return found


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested tuples, lists and dicts."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from tensors_in(item)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from tensors_in(item)


def replaced(tree: Any, old: Tensor, new: Tensor) -> Any:
    """Return the same tree with one tensor in place of another."""
    if tree is old:
        return new
    if isinstance(tree, (tuple, list)):
        items = [replaced(item, old, new) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, Mapping):
        changed: Any = copy.copy(tree)
        for key, value in tree.items():
            changed[key] = replaced(value, old, new)
        return changed
    return tree


def plain(tree: Any) -> Any:
    """Return the same tree with private tensors as ordinary, detached ones."""
    if is_private(tree):
        with without_torch_function():
            return tree.detach()
    if tree is None or isinstance(tree, Tensor):
        return tree
    if isinstance(tree, (tuple, list)):
        items = [plain(item) for item in tree]
        # Named tuples take their fields one by one.
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, Mapping):
        return {key: plain(value) for key, value in tree.items()}
    return tree


def arguments(names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return positional and keyword arguments in the order of ``names``, None where absent."""
    given = dict(zip(names, args, strict=False)) | kwargs
    return [given.get(name) for name in names]


def is_constant(*tensors: Tensor | None) -> bool:
    """Whether gradients flow through none of these, private ones aside."""
    return not any(t is not None and not is_private(t) and t.requires_grad for t in tensors)


def refuse(
    func: Function, sources: Iterable[GradientSource], *, got: str, remedy: str
) -> UnsupportedModule:
    """Return the error for a use that cannot be made correct."""
    names = ", ".join(dict.fromkeys(source.name for source in sources))
    operation = getattr(func, "__name__", str(func))
    return UnsupportedModule(
        f"{names} in {operation}",
        expected="a use in which every sample has its own part",
        got=got,
        remedy=remedy,
    )

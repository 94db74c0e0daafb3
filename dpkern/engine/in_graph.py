"""Operations on private parameters as ``torch.compile`` traces them.

A compiled graph can hold no Python function that takes per-sample gradients. It hands out what they
are made of instead, as gradients of *taps*: zeros that enter the graph beside the parameters.

- The taps of a product (linear layers, convolutions, embeddings) have the shapes of its operand and
  of its output. ``OperandTaps`` makes the operand and the output gradient their gradients.
- The tap of a scale or a shift is one zero of its shape for each row, added to the parameter. Its
  gradient is the per-sample gradient.

``graph_capture`` makes the taps at the border of the module and takes in their gradients. A use
without a tap, or other than the one its tap was made for, stays outside of the graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .uses import GradientTarget, ParameterSource

_NUMBERS = itertools.count()

Function = Callable[..., Any]
Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class TappedOperation:
    """An operation inside a graph, with the records that its taps' gradients become.

    Attributes:
        names: of its arguments; those called ``input``, ``weight`` and ``bias`` are its operand and
            its parameters. Empty: two arguments, one of them a parameter.
        operations: names that ``Capture.use`` knows it by.
        run: the operation with these taps, traced; ``(function, arguments, *taps)``.
        tails: shapes of the taps behind the rows, and their dtypes, from operand, parameters and
            result of a recorded use.
        deliver: hands the taps' gradients to the capture; ``(captured, use, *gradients)``.
        check: refuses an operand that is none of samples; ``(use, operand)``. None where the first
            tap's gradient is no operand.
    """

    names: Sequence[str]
    operations: Collection[str]
    run: Callable[..., Tensor]
    tails: Callable[..., Sequence[tuple[Shape, torch.dtype]]]
    deliver: Callable[..., None]
    check: Callable[..., None] | None = None


@dataclass(eq=False)
class TappedUse:
    """One use of parameters that a graph may hold, as a recorded pass has seen it.

    Attributes:
        function: the torch function.
        operation: how it runs in a graph.
        source: the parameter that is called weight.
        bias: place of the bias among the parameters of the model; -1: there is none.
        constants: its arguments that are no tensors, by name.
        tail: the operand's shape behind its rows.
        fold: rows of the operand that each sample has.
        dtype: of the operand.
        differentiable: whether the operand needs a gradient.
        device: of the operand.
        name: of the operation in ``Capture.use``.
        targets: where the records go.
        key: its site in ``Capture``, which the batch-dimension probe has verified.
        saved: what the operation's rule noted of it.
        tap_tails: shapes of its taps behind the rows, and their dtypes.
        place: the attribute of ``HANDED`` that holds the taps of the running pass.
        is_open: whether they wait there for the use.
    """

    function: Function
    operation: TappedOperation
    source: ParameterSource
    bias: int
    constants: dict[str, Any]
    tail: Shape
    fold: int
    dtype: torch.dtype
    differentiable: bool
    device: torch.device
    name: str
    targets: tuple[GradientTarget | None, ...]
    key: tuple[Any, ...]
    saved: dict[str, Any]
    tap_tails: Sequence[tuple[Shape, torch.dtype]]
    place: str = field(default_factory=lambda: f"taps_{next(_NUMBERS)}")
    is_open: bool = False


class _Handed:
    """Holder of taps, by the places of their uses."""


HANDED: Any = _Handed()
"""The taps of the running passes. The compiler takes the sizes of tensors that it finds by way of a
module for constants, and those of taps change with the batch."""

TAPPED: dict[Function, TappedOperation] = {}
"""Operations by the function that torch dispatches on (``layers.tapped``)."""

TAKEN_APART: dict[Function, Callable[..., Any]] = {}
"""Functions that run in place of operations written with others; ``(class of private
parameters, args, kwargs)``. The compiler traces it without a look at ``__torch_function__``: uses
of parameters in it have to call that themselves."""

ATTRIBUTES: set[Any] = set()
"""Functions that are ordinary operations wherever they stand."""

_without_torch_function = torch._C.DisableTorchFunctionSubclass


def in_graph(
    cls: type[Tensor],
    func: Function,
    types: Iterable[type],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Run ``__torch_function__`` of private parameters while a graph is traced.

    Returns:
        The result, or NotImplemented where the graph has to break.
    """
    named = {} if kwargs is None else kwargs
    if len(tuple(types)) != 1:
        return NotImplemented
    if not torch.is_grad_enabled() or func in ATTRIBUTES:
        with _without_torch_function():
            return func(*args, **named)
    if func in TAKEN_APART:
        return TAKEN_APART[func](cls, args, named)
    if func not in TAPPED:
        return NotImplemented
    operation = TAPPED[func]
    given = by_name(cls, operation, args, named)
    x, weight, bias = given.get("input"), given.get("weight"), given.get("bias")
    if type(x) is not Tensor or type(weight) is not cls:
        return NotImplemented
    use = _next_use(weight._private)  # type: ignore[attr-defined]
    if use is None or use.function is not func or _index(cls, bias) != use.bias:
        return NotImplemented
    taps = getattr(HANDED, use.place)
    if (
        x.dtype != use.dtype
        or x.requires_grad != use.differentiable
        or x.dim() == 0
        or x.shape[1:] != use.tail
        or x.shape[0] != taps[0].shape[0]
        or constants(given) != use.constants
        or torch.is_autocast_enabled(x.device.type)
    ):
        return NotImplemented
    use.is_open = False
    return operation.run(func, given, *taps)


def by_name(
    cls: type[Tensor],
    operation: TappedOperation,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the arguments of a call by their names: torch passes them in several ways."""
    if not operation.names:
        if len(args) != 2 or kwargs:
            return {}
        first, second = args
        if type(first) is cls:
            return {"weight": first, "input": second}
        return {"input": first, "weight": second}
    found = dict(zip(operation.names, args, strict=False))
    found.update(kwargs)
    return found


def constants(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments that are no tensors."""
    return {k: v for k, v in named.items() if v is not None and not isinstance(v, Tensor)}


def plain(tensor: Tensor) -> Tensor:
    """Return a parameter as an ordinary constant of the graph."""
    with _without_torch_function():
        return tensor.detach()


def _next_use(source: ParameterSource) -> TappedUse | None:
    """Return the first use of a parameter whose taps are still there."""
    for use in source.tapped:
        if use.is_open:
            return use
    return None


def _index(cls: type[Tensor], bias: Any) -> int:
    """Place of a private bias; -1 for none, -2 for one that is not private."""
    if bias is None:
        return -1
    private: Any = bias
    return int(private._private.index) if type(bias) is cls else -2


class OperandTaps(torch.autograd.Function):
    """The output of a product as it is; operand and output gradient are its taps' gradients."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, operand: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.dtype = operand.dtype
        # No view, which in-place activations would refuse.
        return torch.ops.aten._unsafe_view(y, y.shape)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return g, None, x.to(ctx.dtype), g

"""Operations that compiled graphs hold: how they run beside their taps, and what the taps deliver.

Each delivers the records that the operation's own rule makes of the same tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...base.errors import PrivacyError
from ...ops.clip import sum_dtype
from ..in_graph import (
    ATTRIBUTES,
    TAKEN_APART,
    TAPPED,
    Function,
    OperandTaps,
    Shape,
    TappedOperation,
    TappedUse,
    plain,
)
from ..parameter import ORDINARY
from ..uses import CapturedOp
from . import conv, embedding, linear, norm
from .attention import multi_head_attention_forward
from .expression import is_buffer

Tails = Sequence[tuple[Shape, torch.dtype]]


def _product_tails(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor) -> Tails:
    return (tuple(x.shape[1:]), x.dtype), (tuple(y.shape[1:]), y.dtype)


def _lookup_tails(ids: Tensor, weight: Tensor, bias: None, y: Tensor) -> Tails:
    # Integers have no gradients. Floats hold these exactly.
    return (tuple(ids.shape[1:]), torch.float64), (tuple(y.shape[1:]), y.dtype)


def _deliver_linear(captured: CapturedOp, use: TappedUse, x: Tensor, g: Tensor) -> None:
    if captured.wants(g):
        _check_operand(use, x)
        linear._arrive(captured, x, g)


def _deliver_convolution(captured: CapturedOp, use: TappedUse, x: Tensor, g: Tensor) -> None:
    if captured.wants(g):
        _check_operand(use, x)
        conv._arrive(captured, x, plain(use.source.used), g)


def _deliver_lookup(captured: CapturedOp, use: TappedUse, ids: Tensor, g: Tensor) -> None:
    if captured.wants(g):
        embedding.deliver(captured, ids.to(torch.int64), g)


def _deliver_copies(captured: CapturedOp, use: TappedUse, *gradients: Tensor) -> None:
    if captured.wants(gradients[0]):
        rows = [g.to(sum_dtype(g.dtype)).flatten(1) for g in gradients]
        norm._deliver(captured, use.source.shape, *rows)


def _check_operand(use: TappedUse, x: Tensor) -> None:
    """Refuse a buffer where the recorded pass has seen samples, as far as its storage shows."""
    if not use.differentiable and is_buffer(x, use.source.used):
        raise PrivacyError(
            f"{use.source.name} in {use.name}",
            expected="samples, as in the pass that the graph was recorded from",
            got="a buffer of the module",
            remedy="Use one parameter for one of the two, or leave the module uncompiled.",
        )


def _product(func: Function, given: Mapping[str, Any], operand: Tensor, gradient: Tensor) -> Tensor:
    """Multiply a constant and an operand, which leaves with the gradient by the taps."""
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    y = func(x, plain(weight), **_options(given, None if bias is None else plain(bias)))
    return OperandTaps.apply(y, x.detach(), operand, gradient)  # type: ignore[no-any-return, no-untyped-call]


def _options(given: Mapping[str, Any], bias: Tensor | None) -> dict[str, Any]:
    options = {k: v for k, v in given.items() if k not in ("input", "weight", "bias")}
    return options if bias is None else {**options, "bias": bias}


def _layer_norm(func: Function, given: Mapping[str, Any], *taps: Tensor) -> Tensor:
    """Layer norm, scaled and shifted by one copy of the parameters for each row."""
    y = F.layer_norm(given["input"], given["normalized_shape"], eps=_eps(given))
    return _affine(y, given, (), *taps)


def _group_norm(func: Function, given: Mapping[str, Any], *taps: Tensor) -> Tensor:
    """Group norm, scaled and shifted by one copy of the parameters for each row."""
    y = F.group_norm(given["input"], given["num_groups"], eps=_eps(given))
    return _affine(y, given, (1,) * (y.dim() - 2), *taps)


def _eps(given: Mapping[str, Any]) -> float:
    eps: float | None = given.get("eps")
    return 1e-5 if eps is None else eps


def _affine(y: Tensor, given: Mapping[str, Any], behind: Shape, *taps: Tensor) -> Tensor:
    """Scale and shift ``y``; the parameters lack ``behind`` dimensions at their end."""
    weight, bias = given["weight"], given.get("bias")
    scaled = y * (plain(weight).view(*weight.shape, *behind) + taps[0])
    return scaled if bias is None else scaled + (plain(bias).view(*bias.shape, *behind) + taps[1])


def _last_tails(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor) -> Tails:
    ones = (1,) * (x.dim() - 1 - weight.dim())
    shapes = [p for p in (weight, bias) if p is not None]
    return [((*ones, *p.shape), torch.promote_types(p.dtype, x.dtype)) for p in shapes]


def _group_tails(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor) -> Tails:
    ones = (1,) * (x.dim() - 2)
    shapes = [p for p in (weight, bias) if p is not None]
    return [((*p.shape, *ones), torch.promote_types(p.dtype, x.dtype)) for p in shapes]


def _elementwise(func: Function, given: Mapping[str, Any], tap: Tensor) -> Tensor:
    """Run an operation on data and one copy of the parameter for each row."""
    copies = plain(given["weight"]) + tap
    first = next(iter(given)) == "weight"
    pair = (copies, given["input"]) if first else (given["input"], copies)
    return func(*pair)  # type: ignore[no-any-return]


def _element_tails(x: Tensor, weight: Tensor, bias: None, y: Tensor) -> Tails:
    shape = tuple(weight.shape)
    if x.dim() > len(shape):
        return [((*(1,) * (x.dim() - 1 - len(shape)), *shape), weight.dtype)]
    return [(shape[1:], weight.dtype)]


_ATTENTION = tuple(inspect.signature(multi_head_attention_forward).parameters)
_PROJECTIONS = ("in_proj_weight", "in_proj_bias", "out_proj_weight", "out_proj_bias")


def _self_attention(cls: type[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Self-attention with whole projections; all else stays outside of graphs."""
    given = dict(zip(_ATTENTION, args, strict=False))
    given.update(kwargs)
    weight, x = given["in_proj_weight"], given["query"]
    others = [v for k, v in given.items() if type(v) is cls and k not in _PROJECTIONS]
    if others or given["key"] is not x or given["value"] is not x or type(weight) is not cls:
        return NotImplemented
    if not weight._private.tapped:  # type: ignore[attr-defined]
        return NotImplemented
    return multi_head_attention_forward(**given)


def _enter(
    functions: Sequence[Function], names: Sequence[str], operations: Sequence[str], *how: Any
) -> None:
    for function in functions:
        TAPPED[function] = TappedOperation(names, operations, *how)


_enter(
    [F.linear],
    ("input", "weight", "bias"),
    ["linear"],
    _product,
    _product_tails,
    _deliver_linear,
    _check_operand,
)
_enter(
    [torch.conv1d, torch.conv2d, torch.conv3d],
    ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    ["conv1d", "conv2d", "conv3d"],
    _product,
    _product_tails,
    _deliver_convolution,
    _check_operand,
)
_enter(
    [F.embedding],
    ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"),
    ["embedding"],
    _product,
    _lookup_tails,
    _deliver_lookup,
)
_enter(
    [F.layer_norm],
    ("input", "normalized_shape", "weight", "bias", "eps"),
    ["layer_norm"],
    _layer_norm,
    _last_tails,
    _deliver_copies,
)
_enter(
    [F.group_norm],
    ("input", "num_groups", "weight", "bias", "eps"),
    ["group_norm"],
    _group_norm,
    _group_tails,
    _deliver_copies,
)
_enter(
    [
        *(torch.add, torch.sub, torch.mul, torch.div),
        *(Tensor.add, Tensor.sub, Tensor.mul, Tensor.div),
        *(Tensor.__add__, Tensor.__sub__, Tensor.__mul__, Tensor.__truediv__),
        *(Tensor.__radd__, Tensor.__rmul__),
    ],
    (),
    ["add", "sub", "mul", "div", "truediv", "radd", "rmul"],
    _elementwise,
    _element_tails,
    _deliver_copies,
)
TAKEN_APART[F.multi_head_attention_forward] = _self_attention
ATTRIBUTES.update(ORDINARY)

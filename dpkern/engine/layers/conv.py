"""Define the rules of convolutions in one to three dimensions, also of transposed ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops import direct
from ...ops.clip import sum_dtype
from ..parameter import (
    applied,
    arguments,
    differentiable_once,
    fresh,
    in_product,
    is_constant,
    is_private,
    plain,
    rule,
    source_of,
    without_torch_function,
)
from ..per_sample_gradients import ConvolutionGradients, ExplicitGradients
from ..uses import CapturedOp, GradientTarget
from .expression import is_constant_operand, whole_target_of
from .other import other

Function = Callable[..., Any]
Ints = tuple[int, ...]


_DOWNWARDS = (torch.conv1d, torch.conv2d, torch.conv3d)
_UPWARDS = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)


class Convolve(torch.autograd.Function):
    """Convolution (``aten::convolution``); ``use.saved`` holds its geometry."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, use: CapturedOp, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.use = use
        ctx.set_materialize_grads(False)
        ctx.dtype, x = x.dtype, in_product(x)
        ctx.save_for_backward(x, weight)
        weight = beside(x, weight)
        # Autocast applies to the public functions only.
        dims, geometry = x.dim() - 3, dict(use.saved)
        more = geometry.pop("output_padding")
        if geometry.pop("transposed"):
            out = _UPWARDS[dims](x, weight, bias, output_padding=more, **geometry)
        else:
            out = _DOWNWARDS[dims](x, weight, bias, **geometry)
        return fresh(out)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        use: CapturedOp = ctx.use
        gx = None
        if g is not None and ctx.needs_input_grad[2] and use.passes_on:
            few = _probed if use.capture.verification.probe is not None else _input_gradient
            gx = few(g, x.to(g.dtype), weight.to(g.dtype), use.saved).to(ctx.dtype)
        if use.wants(g):
            assert g is not None
            _arrive(use, x, weight, g)
        return None, None, gx, None, None


def beside(x: Tensor, weight: Tensor) -> Tensor:
    """Return a weight whose channels are not last where those of the input are not.

    Torch would move those of the input, which is larger, and copies it slowly.
    """
    return direct.contiguous(weight) if x.is_cpu and x.is_contiguous() else weight


def _input_gradient(g: Tensor, x: Tensor, weight: Tensor, options: dict[str, Any]) -> Tensor:
    weight, stride = beside(x, weight), options["stride"]
    pointwise = all(size == 1 for size in weight.shape[2:]) and not any(options["padding"])
    if pointwise and max(stride) > 1 and options["groups"] == 1 and not options["transposed"]:
        # Each output position reads one input position: two to three times as fast as in torch.
        gx = torch.zeros_like(x, memory_format=torch.contiguous_format)
        seen = (slice(None), slice(None), *(slice(None, None, step) for step in stride))
        gx[seen] = _DOWNWARDS[x.dim() - 3](g, weight.transpose(0, 1))
        return gx
    gradients = torch.ops.aten.convolution_backward(
        g, x, weight, None, *options.values(), [True, False, False]
    )
    found: Tensor = gradients[0]
    return found


def _probed(g: Tensor, x: Tensor, weight: Tensor, options: dict[str, Any]) -> Tensor:
    """Return the input gradient if few samples have one, in memory for these samples only."""
    gx = torch.zeros_like(x)
    rows = (g != 0).flatten(1).any(1).nonzero().flatten()
    if len(rows):
        gx[rows] = _input_gradient(g[rows], x[rows], weight, options)
    return gx


def _arrive(use: CapturedOp, x: Tensor, weight: Tensor, g: Tensor) -> None:
    kernel_size = tuple(weight.shape[2:])
    geometry = {name: use.saved[name] for name in ("stride", "padding", "dilation", "groups")}
    with without_torch_function():
        if use.targets[0] is not None:
            pair = x, g
            if use.saved["transposed"]:
                # A transposed convolution is a convolution with input and output exchanged.
                size, padding = sizes_exchanged(x.shape[2:], kernel_size, use.saved)
                pair = _placed(g, size, geometry["padding"], padding), x
                geometry["padding"] = padding
            use.arrive(0, _record(use, *pair, kernel_size, geometry))
        if use.targets[1] is not None:
            positions = use.per_batch(g.flatten(2).sum(2, dtype=sum_dtype(g.dtype)))
            use.arrive(
                1,
                ExplicitGradients(positions.sum(1) if positions.shape[1] > 1 else positions[:, 0]),
            )


def _record(
    use: CapturedOp, x: Tensor, g: Tensor, kernel_size: Ints, geometry: dict[str, Any]
) -> ConvolutionGradients | ExplicitGradients:
    if x.shape[0] == use.batch and use.owners is None:
        return ConvolutionGradients(x, g, kernel_size, geometry)
    # Several images of one sample: their gradients add up.
    each = ConvolutionGradients(x, g, kernel_size, geometry).per_sample()
    return ExplicitGradients(use.per_batch(each).sum(1))


def sizes_exchanged(
    x: Sequence[int], kernel_size: Sequence[int], options: dict[str, Any]
) -> tuple[Ints, Ints]:
    """Return input sizes and padding of the convolution that a transposed one is the way back of.

    It leads from the output of the transposed one to ``x``. Where the output is longer by a stride
    or more, the same padding would give further positions: the input is then what ``x`` reads, with
    its zeros, and is padded no more.
    """
    geometry = (options[n] for n in ("stride", "padding", "dilation", "output_padding"))
    axes = [*zip(x, kernel_size, *geometry, strict=True)]
    least = [(n - 1) * s + t * (k - 1) + 1 for n, k, s, _, t, _ in axes]
    if any(more >= s for _, _, s, _, _, more in axes):
        return tuple(least), (0,) * len(least)
    sizes = (size - 2 * p + more for size, (_, _, _, p, _, more) in zip(least, axes, strict=True))
    return tuple(sizes), tuple(options["padding"])


def _placed(x: Tensor, size: Ints, before: Ints, padding: Ints) -> Tensor:
    """Return ``x``, with ``before`` zeros in front of it, where ``padding`` are to be."""
    if before == padding and tuple(x.shape[2:]) == size:
        return x
    axes = zip(x.shape[2:], size, before, strict=True)
    return F.pad(x, [n for have, wanted, p in reversed([*axes]) for n in (p, wanted - p - have)])


def convolve(
    operation: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: dict[str, Any],
    function: type[Convolve] = Convolve,
) -> Tensor:
    """Register a convolution with private weight or bias (or both), and run it."""
    targets: list[GradientTarget | None] = [None, None]
    capture = None
    for i, tensor in enumerate((weight, bias)):
        if is_private(tensor):
            targets[i], capture = whole_target_of(tensor), source_of(tensor).capture
    assert capture is not None
    use = capture.use(operation, targets, x, **options)
    result: Tensor = applied(function, capture.anchor, use, x, plain(weight), plain(bias))
    return result


@rule(*_DOWNWARDS, leaf=True)
def _conv(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    x, weight, bias, stride, padding, dilation, groups = arguments(names, args, kwargs)
    dims = 1 + _DOWNWARDS.index(func)
    private = weight if is_private(weight) else bias
    if is_private(x) or not is_constant(weight, bias) or is_constant_operand(x, private):
        return other(func, args, kwargs)
    if x.dim() != dims + 2:
        x = _unbatched(x, dims)
    if isinstance(padding, str):
        x, padding = _named_padding(x, weight, padding, _spread(dilation, 1, dims))
    options = geometry_of(dims, stride, padding, dilation, groups)
    return convolve(f"conv{dims}d", x, weight, bias, options)


@rule(*_UPWARDS, leaf=True)
def _conv_transpose(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    names = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
    x, weight, bias, stride, padding, more, groups, dilation = arguments(names, args, kwargs)
    dims = 1 + _UPWARDS.index(func)
    private = weight if is_private(weight) else bias
    if is_private(x) or not is_constant(weight, bias) or is_constant_operand(x, private):
        return other(func, args, kwargs)
    if x.dim() != dims + 2:
        x = _unbatched(x, dims)
    options = {
        "stride": _spread(stride, 1, dims),
        "padding": _spread(padding, 0, dims),
        "dilation": _spread(dilation, 1, dims),
        "transposed": True,
        "output_padding": _spread(more, 0, dims),
        "groups": groups or 1,
    }
    return convolve(f"conv_transpose{dims}d", x, weight, bias, options)


def geometry_of(
    dims: int, stride: Any, padding: Any, dilation: Any, groups: int | None
) -> dict[str, Any]:
    """Return the options of a convolution that is not transposed; None selects the default."""
    return {
        "stride": _spread(stride, 1, dims),
        "padding": _spread(padding, 0, dims),
        "dilation": _spread(dilation, 1, dims),
        "transposed": False,
        "output_padding": (0,) * dims,
        "groups": groups or 1,
    }


def _unbatched(x: Tensor, dims: int) -> Tensor:
    from ...base.errors import UnsupportedModule

    raise UnsupportedModule(
        f"conv{dims}d",
        expected=f"a batched input of {dims + 2} dimensions",
        got=f"shape {list(x.shape)}",
        remedy="Add the batch dimension with x.unsqueeze(0).",
    )


def _named_padding(
    x: Tensor, weight: Tensor, padding: str, dilation: Ints
) -> tuple[Tensor, int | Ints]:
    """Return input and padding as numbers for ``same`` or ``valid``.

    If the padding of ``same`` is odd, the input is padded by one more on the right, as in torch.
    """
    if padding == "valid":
        return x, 0
    with without_torch_function():
        totals = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    if any(total % 2 for total in totals):
        extra = [pad for total in reversed(totals) for pad in (0, total % 2)]
        x = F.pad(x, extra)
    return x, tuple(total // 2 for total in totals)


def _spread(value: int | Sequence[int] | None, default: int, dims: int) -> Ints:
    if value is None:
        return (default,) * dims
    if isinstance(value, int):
        return (value,) * dims
    spread = tuple(int(v) for v in value)
    return spread * dims if len(spread) == 1 else spread

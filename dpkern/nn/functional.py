"""Compute the layers' operations as functions of input and parameters.

They are differentiable any number of times. A parameter subclass sees ``circulant_product`` and
``spectral_conv2d`` by ``__torch_function__``, like torch's own operations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ..base.errors import InvalidInput
from ..base.validate import choice
from ..ops import spectral
from ..ops.spectral._sizes import fast

TRANSFORMS_FROM = 70
"""Products of a direct convolution, for each point of the transforms and pair of channels, from
which on transforms are faster than torch's convolution."""

CONVENTIONS = ("row", "column")
"""A block's numbers are its first row, as GReDP (18) says, or its first column."""

_DENSE = 1 << 16
"""Entries of the whole matrix up to which one dense product is faster than transforms."""


def circulant_matrix(weight: Tensor, convention: str = "row") -> Tensor:
    """Return the whole matrix ``[p d, q d]`` of circulant blocks ``weight [p, q, d]``.

    Row convention: ``W[r, s] = w[(s - r) mod d]`` within a block; column: ``w[(r - s) mod d]``.

    Raises:
        InvalidInput: an unknown convention.
    """
    choice(CONVENTIONS, convention=convention)
    p, q, d = weight.shape
    place = torch.arange(d, device=weight.device)
    lags = place[None, :] - place[:, None]
    lags = (lags if convention == "row" else -lags) % d
    return weight[:, :, lags].transpose(1, 2).reshape(p * d, q * d)


def circulant_product(
    x: Tensor, weight: Tensor, convention: str = "row", bias: Tensor | None = None
) -> Tensor:
    """Multiply by circulant blocks: ``y_i = sum_j W_ij x_j + b_i``.

    In the row convention a block is a correlation, ``F(y_i) = sum_j conj(F(w_ij)) F(x_j)`` with the
    unnormalised transform; in the column convention a convolution, without the conjugate.

    Args:
        x: ``[..., q, d]``, floating.
        weight: ``[p, q, d]``.
        convention: ``row`` or ``column``.
        bias: ``[p d]``, or None.

    Returns:
        ``[..., p, d]``.

    Raises:
        InvalidInput: shapes that do not fit, or an unknown convention.

    Source: GReDP (17)-(18), with the conjugate that the printed product lacks in the row
    convention; CirCNN, Ding et al. 2017, for the column convention.
    """
    if has_torch_function((x, weight, bias)):
        found: Tensor = handle_torch_function(
            circulant_product, (x, weight, bias), x, weight, convention, bias
        )
        return found
    choice(CONVENTIONS, convention=convention)
    if weight.dim() != 3 or x.dim() < 2 or x.shape[-2:] != weight.shape[1:]:
        raise InvalidInput(
            "x",
            expected=f"[..., {weight.shape[1]}, {weight.shape[2]}]"
            if weight.dim() == 3
            else "a weight of shape [p, q, d]",
            got=f"x {list(x.shape)} and weight {list(weight.shape)}",
            remedy="Cut the features into blocks: x.unflatten(-1, (q, d)).",
        )
    p, q, d = weight.shape
    rows = x.reshape(-1, q, d)
    if p * q * d * d <= _DENSE or not len(rows):  # transforms know no empty batch
        product = F.linear(rows.reshape(-1, q * d), circulant_matrix(weight, convention))
    elif _is_plain(x, weight):
        product = spectral.circulant_product(
            rows.contiguous(),
            weight.contiguous(),
            convention="row" if convention == "row" else "column",
        )
    else:
        xs, ws = torch.fft.rfft(_transformable(rows)), torch.fft.rfft(_transformable(weight))
        ys = torch.einsum("nqk,pqk->npk", xs, ws.conj() if convention == "row" else ws)
        product = torch.fft.irfft(ys, n=d).to(torch.promote_types(x.dtype, weight.dtype))
    product = product.reshape(*x.shape[:-2], p, d)
    return product if bias is None else product + bias.view(p, d)


def _is_plain(*tensors: Tensor) -> bool:
    """Whether nothing but numbers is asked for, by one kernel: no derivative, trace or mode."""
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    ):
        return False
    kinds = {t.dtype for t in tensors}
    return (
        all(type(t) in (Tensor, torch.nn.Parameter) and t.is_cpu for t in tensors)
        and len(kinds) == 1
        and kinds <= {torch.float32, torch.float64}
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
    )


def circulant_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out_features: int | None = None,
    convention: str = "row",
) -> Tensor:
    """Return ``y = W x + b`` with a block-circulant W; sizes that are no multiples of d are padded.

    Args:
        x: ``[..., n]`` with ``n <= q d``; zeros stand behind it.
        weight: ``[p, q, d]``.
        bias: ``[m]``, or None.
        out_features: m; None for ``p d``. The outputs behind it are dropped.
        convention: ``row`` or ``column``, as for ``circulant_product``.

    Returns:
        ``[..., m]``.

    Raises:
        InvalidInput: shapes that do not fit, or an unknown convention.

    Source: GReDP, section on fully connected layers, (17)-(18).
    """
    p, q, d = weight.shape
    missing = q * d - x.shape[-1]
    size = p * d if out_features is None else out_features
    if missing < 0 or not 0 < size <= p * d:
        raise InvalidInput(
            "x",
            expected=f"at most {q * d} features, for at most {p * d} outputs",
            got=f"shape {list(x.shape)}, out_features={out_features}",
            remedy="Make a weight with enough blocks for the features and the outputs.",
        )
    padded = F.pad(x, (0, missing)) if missing else x
    blocks = padded.reshape(*padded.shape[:-1], q, d)
    if size == p * d:
        return circulant_product(blocks, weight, convention, bias).flatten(-2)
    y = circulant_product(blocks, weight, convention).flatten(-2)[..., :size]
    return y if bias is None else y + bias


def spectral_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """Compute a convolution by FFT where that is faster, with the arguments of ``F.conv2d``.

    With padded input X, kernel W spread by the dilation and unnormalised transforms of size
    ``P x Q``, ``F(y_o) = sum_c conj(F(W_oc)) F(X_c)``; every stride-th entry is kept. Nothing wraps
    as long as P and Q hold every input that an output reads. Small kernels take fewer products
    without transforms, ``kh kw Ho Wo < 70 P Q``: they are convolved directly, as torch does.

    Args:
        x: ``[B, ci, H, W]``, or ``[ci, H, W]``.
        weight: ``[co, ci / groups, kh, kw]``.
        bias: ``[co]``, or None.
        stride, padding, dilation: an int, or one per dimension.
        groups: a divisor of ci and co.

    Returns:
        ``[B, co, Ho, Wo]``, or ``[co, Ho, Wo]``.

    Raises:
        InvalidInput: shapes that do not fit.

    Source: Spectral-DP's layers, as described by GReDP (8), with the conjugate and the sizes that
    make it exact.
    """
    tensors = (x, weight) if bias is None else (x, weight, bias)
    if has_torch_function(tensors):
        options: tuple[Any, ...] = (stride, padding, dilation, groups)
        found: Tensor = handle_torch_function(spectral_conv2d, tensors, x, weight, bias, *options)
        return found
    if x.dim() == 3:
        alone = spectral_conv2d(x[None], weight, bias, stride, padding, dilation, groups)
        return alone[0]
    steps, pads, spread = _pair(stride), _pair(padding), _pair(dilation)
    reach = [t * (k - 1) for t, k in zip(spread, weight.shape[2:], strict=True)]
    fits = x.dim() == weight.dim() == 4 and groups > 0 and weight.shape[0] % groups == 0
    fits = fits and x.shape[1] == groups * weight.shape[1]
    padded = [n + 2 * p for n, p in zip(x.shape[2:], pads, strict=True)] if fits else []
    if not fits or any(n <= r for n, r in zip(padded, reach, strict=True)):
        raise InvalidInput(
            "x",
            expected="[B, ci, H, W] with ci = groups * weight.shape[1], no smaller than the kernel",
            got=f"x {list(x.shape)}, weight {list(weight.shape)}, groups={groups}",
            remedy="Check the channels, the groups and the padding.",
        )
    ends = [(n - r - 1) // s * s + 1 for n, r, s in zip(padded, reach, steps, strict=True)]
    size = [fast(e + r) for e, r in zip(ends, reach, strict=True)]
    outputs = math.prod(-(-e // s) for e, s in zip(ends, steps, strict=True))
    few = weight[0, 0].numel() * outputs < TRANSFORMS_FROM * math.prod(size)
    if not len(x) or (few and x.dtype is weight.dtype):  # transforms know no empty batch
        return F.conv2d(x, weight, bias, steps, pads, spread, groups)
    xs = torch.fft.rfft2(_transformable(F.pad(x, (pads[1], pads[1], pads[0], pads[0]))), s=size)
    kernel = _transformable(weight)
    if max(spread) > 1:
        kernel = _spread_out(kernel, spread, reach)
    ws = torch.fft.rfft2(kernel, s=size).conj()
    ys = torch.einsum("ngchw,gochw->ngohw", _by_group(xs, 1, groups), _by_group(ws, 0, groups))
    y = torch.fft.irfft2(ys.flatten(1, 2), s=size)
    kept: Tensor = y[..., : ends[0] : steps[0], : ends[1] : steps[1]]
    kept = kept.to(torch.promote_types(x.dtype, weight.dtype))
    return kept.contiguous() if bias is None else kept + bias[:, None, None]


def _by_group(tensor: Tensor, dim: int, groups: int) -> Tensor:
    shape = tensor.shape
    return tensor.reshape(*shape[:dim], groups, shape[dim] // groups, *shape[dim + 1 :])


def _spread_out(kernel: Tensor, dilation: tuple[int, int], reach: Sequence[int]) -> Tensor:
    """Return the kernel with zeros between its entries."""
    spread = kernel.new_zeros(*kernel.shape[:2], reach[0] + 1, reach[1] + 1)
    spread[..., :: dilation[0], :: dilation[1]] = kernel
    return spread


def _transformable(x: Tensor) -> Tensor:
    """Convert to a dtype that supports transforms of any size."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _pair(value: int | Sequence[Any]) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    pair = tuple(int(v) for v in value)
    return (pair[0], pair[0]) if len(pair) == 1 else (pair[0], pair[1])

"""Compute multi-head attention with ordinary torch code on batch-first tensors.

torch's own function takes seven parameters at once and folds time and batch into one axis. Here the
same sums are written with ``F.linear`` on ``[N, L, E]``, so that each parameter has a rule to which
the samples are the first axis. Where torch copies a parameter over the batch, it is expanded.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F

from ...base.errors import InvalidInput, UnsupportedModule

_SHAPE_REMEDY = "See the shapes in the documentation of torch.nn.MultiheadAttention."


def rows(parameter: Tensor, start: int, stop: int) -> Tensor:
    """Return rows ``start`` to ``stop - 1`` of a stacked projection."""
    return parameter[start:stop]


def multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Run ``torch.nn.functional.multi_head_attention_forward``: same arguments, same results.

    With heads ``h`` of width ``d = E / num_heads``:
    ``output = concat_h(softmax(q_h k_h^T / sqrt(d) + mask) v_h) W_out^T + b_out``, where q, k and v
    are linear maps of ``query [L, N, E]``, ``key [S, N, E]`` and ``value [S, N, E]``.

    Args:
        query, key, value: time first, as in torch. One ``F.linear`` serves those that are the same
            object (``is``).
        key_padding_mask: ``[N, S]``, bool (True is left out) or added to the scores.
        attn_mask: ``[L, S]`` or ``[N * num_heads, L, S]``, bool or added to the scores.
        static_k, static_v: ``[N * num_heads, S, d]``, used in place of the projected ones.

    All other arguments are those of torch, which describes them.

    Returns:
        ``(output [L, N, E], weights)``; the weights are ``[N, L, S]``, ``[N, num_heads, L, S]`` if
        they are not averaged, None if they are not needed.

    Raises:
        UnsupportedModule: an unbatched (2-D) query: there is no sample axis.
        InvalidInput: shapes, dtypes or arguments that torch refuses as well.
    """
    _check(query, key, value, embed_dim_to_check, num_heads, use_separate_proj_weight)
    if is_causal and attn_mask is None:
        raise InvalidInput(
            "attn_mask",
            expected="a mask together with is_causal",
            got="None",
            remedy="Pass nn.Transformer.generate_square_subsequent_mask(length).",
        )
    length, batch, width = query.shape
    if is_causal and key_padding_mask is None and not need_weights:
        attn_mask = None
    else:
        is_causal = False
    mask = _additive("attn_mask", attn_mask, query.dtype)
    if mask is not None:
        mask = _per_sample(mask, batch, num_heads, length, key.shape[0])

    if use_separate_proj_weight:
        weights = (q_proj_weight, k_proj_weight, v_proj_weight)
        q, k, v = _project_apart(query, key, value, weights, in_proj_bias)
    else:
        q, k, v = _project(query, key, value, in_proj_weight, in_proj_bias)
    added = int(add_zero_attn)
    if bias_k is not None or bias_v is not None:
        if bias_k is None or bias_v is None or static_k is not None or static_v is not None:
            raise InvalidInput(
                "bias_k, bias_v",
                expected="both or none of them, and none with static_k or static_v",
                got="another combination",
                remedy="Pass both biases and leave static_k and static_v out.",
            )
        k = torch.cat((k, bias_k.expand(batch, 1, width)), dim=1)
        v = torch.cat((v, bias_v.expand(batch, 1, width)), dim=1)
        added += 1
    q = _heads(q, num_heads)
    k = _heads(k, num_heads) if static_k is None else _static("static_k", static_k, q)
    v = _heads(v, num_heads) if static_v is None else _static("static_v", static_v, q)
    if add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    if added and mask is not None:
        mask = F.pad(mask, (0, added))
    padding = _additive("key_padding_mask", key_padding_mask, query.dtype)
    if padding is not None:
        padding = _key_padding(padding, added, batch, k.shape[2])
        mask = padding if mask is None else mask + padding

    dropout_p = dropout_p if training else 0.0
    if need_weights:
        mixed, shares = _attend(q, k, v, mask, dropout_p)
        shares = shares.mean(dim=1) if average_attn_weights else shares
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal)
        shares = None
    mixed = mixed.transpose(1, 2).reshape(batch, length, width)
    output = _linear(mixed, out_proj_weight, out_proj_bias).transpose(0, 1)
    # Callers with time first may use view(); those with the batch first transpose it back.
    return (output.contiguous() if query.is_contiguous() else output), shares


def _project(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return batch-first q, k, v from one stacked weight ``[3 E, E]``, in the fewest products."""
    if weight is None:
        raise _missing("in_proj_weight")
    width = query.shape[-1]

    def part(x: Tensor, first: int, last: int) -> Tensor:
        start, stop = first * width, last * width
        some = None if bias is None else rows(bias, start, stop)
        return F.linear(x.transpose(0, 1), rows(weight, start, stop), some)

    if key is not value:
        return part(query, 0, 1), part(key, 1, 2), part(value, 2, 3)
    if query is not key:
        k, v = part(key, 1, 3).chunk(2, dim=-1)
        return part(query, 0, 1), k, v
    q, k, v = _linear(query.transpose(0, 1), weight, bias).chunk(3, dim=-1)
    return q, k, v


def _project_apart(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weights: tuple[Tensor | None, Tensor | None, Tensor | None],
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return batch-first q, k, v from three weights and one stacked bias ``[3 E]``."""
    width = query.shape[-1]
    found = []
    for index, (name, x, weight) in enumerate(
        zip("qkv", (query, key, value), weights, strict=True)
    ):
        if weight is None:
            raise _missing(f"{name}_proj_weight")
        some = None if bias is None else rows(bias, index * width, (index + 1) * width)
        found.append(F.linear(x.transpose(0, 1), weight, some))
    q, k, v = found
    return q, k, v


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Run ``F.linear``, to which a compiler that traces ``__torch_function__`` goes directly."""
    kind: Any = type(weight)
    if not is_dynamo_compiling() or not hasattr(kind, "taps_in_graphs"):
        return F.linear(x, weight, bias)
    result: Tensor = kind.__torch_function__(F.linear, (kind,), (x, weight, bias))
    return result


def _heads(x: Tensor, num_heads: int) -> Tensor:
    """Return ``[N, L, E]`` as ``[N, heads, L, E / heads]``."""
    batch, length, width = x.shape
    return x.view(batch, length, num_heads, width // num_heads).transpose(1, 2)


def _static(name: str, given: Tensor, q: Tensor) -> Tensor:
    batch, heads, _, depth = q.shape
    if given.dim() != 3 or given.shape[0] != batch * heads or given.shape[2] != depth:
        raise _wrong_shape(name, (batch * heads, "S", depth), given)
    return given.view(batch, heads, given.shape[1], depth)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """Return ``softmax(q k^T / sqrt(d) + mask) v`` and the weights, after dropout as in torch."""
    scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.transpose(-2, -1)
    if mask is not None:
        scores = scores + mask
    shares = F.softmax(scores, dim=-1)
    if dropout_p > 0.0:
        shares = F.dropout(shares, dropout_p)
    return shares @ v, shares


def _additive(name: str, mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a mask to add to the scores: minus infinity where a bool mask is True."""
    if mask is None or mask.is_floating_point():
        return mask
    if mask.dtype != torch.bool:
        raise InvalidInput(
            name,
            expected="a bool or floating point mask",
            got=str(mask.dtype),
            remedy="Convert the mask with .to(torch.bool).",
        )
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)


def _per_sample(mask: Tensor, batch: int, heads: int, length: int, source: int) -> Tensor:
    """Return a mask as ``[N, 1, L, S]`` or ``[N, heads, L, S]``; it may be a parameter."""
    if mask.shape == (length, source):
        return mask.expand(batch, length, source).unsqueeze(1)
    if mask.shape == (batch * heads, length, source):
        return mask.view(batch, heads, length, source)
    wanted = (length, source) if mask.dim() == 2 else (batch * heads, length, source)
    raise _wrong_shape("attn_mask", wanted, mask)


def _key_padding(mask: Tensor, added: int, batch: int, source: int) -> Tensor:
    if mask.shape != (batch, source - added):
        raise _wrong_shape("key_padding_mask", (batch, source - added), mask)
    return F.pad(mask, (0, added)).view(batch, 1, 1, source)


def _check(
    query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_heads: int, apart: bool
) -> None:
    if query.dim() == 2:
        raise UnsupportedModule(
            "multi_head_attention_forward",
            expected="a batched query of three dimensions",
            got=f"shape {list(query.shape)}",
            remedy="Add the batch dimension with unsqueeze(1): a 2-D query has no sample axis.",
        )
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 3:
            raise _wrong_shape(name, ("L", "N", "E"), x)
    if query.shape[2] != embed_dim or embed_dim % num_heads:
        raise InvalidInput(
            "query",
            expected=f"width {embed_dim}, a multiple of num_heads={num_heads}",
            got=f"shape {list(query.shape)}",
            remedy=_SHAPE_REMEDY,
        )
    if key.shape[1] != query.shape[1]:
        raise _wrong_shape("key", ("S", query.shape[1], "E"), key)
    same = 2 if apart else 3
    if key.shape[:same] != value.shape[:same]:
        raise _wrong_shape("value", tuple(key.shape[:same]), value)


def _wrong_shape(name: str, wanted: tuple[object, ...], got: Tensor) -> InvalidInput:
    return InvalidInput(
        name,
        expected="shape [" + ", ".join(str(size) for size in wanted) + "]",
        got=str(list(got.shape)),
        remedy=_SHAPE_REMEDY,
    )


def _missing(name: str) -> InvalidInput:
    return InvalidInput(
        name, expected="a projection weight", got="None", remedy="Pass the weight of the module."
    )

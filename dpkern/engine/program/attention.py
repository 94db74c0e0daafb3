"""Self-attention as ``nn.MultiheadAttention`` calls it, replayed: its projections are linear sites.

Masks, other keys than the queries, and weights that are asked for go the recorded way, whose
operations these are, one by one (``layers.attention``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_, itemgetter
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..parameter import REPLAYED
from .linear import linear

_PLAIN = {
    **dict.fromkeys(("need_weights", "is_causal", "use_separate_proj_weight"), False),
    **dict.fromkeys(("key_padding_mask", "attn_mask", "static_k", "static_v")),
    **dict.fromkeys(("q_proj_weight", "k_proj_weight", "v_proj_weight")),
}
"""Named arguments as torch hands them on where attention has no extras."""
_read = itemgetter(*_PLAIN)
_WANTED = tuple(_PLAIN.values())
_NAMES = _PLAIN.keys() | {"training", "average_attn_weights"}
_NO_NAMES: dict[str, Any] = {}


def self_attention(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run ``F.multi_head_attention_forward``; None if it is not the next use, or has a mask."""
    if len(args) != 13 or kwargs.keys() != _NAMES:
        return None
    if not all(map(is_, _read(kwargs), _WANTED)):
        return None
    query, key, value, width, heads, weight, bias, key_bias, value_bias, zeros, dropout = args[:11]
    if query is not key or key is not value or type(query) is not Tensor or query.dim() != 3:
        return None
    if key_bias is not None or value_bias is not None or zeros or weight is None:
        return None
    length, batch, given = query.shape
    if given != width or width % heads:
        return None
    joined = linear((query.transpose(0, 1), weight, bias), _NO_NAMES)
    if joined is None:
        return None
    q, k, v = joined.view(batch, length, 3, heads, width // heads).unbind(2)
    mixed = F.scaled_dot_product_attention(
        *(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)),
        dropout_p=dropout if kwargs["training"] else 0.0,
    )
    mixed = mixed.transpose(1, 2).reshape(batch, length, width)
    output = linear((mixed, args[11], args[12]), _NO_NAMES)
    if output is None:
        output = F.linear(mixed, args[11], args[12])
    output = output.transpose(0, 1)
    return (output.contiguous() if query.is_contiguous() else output), None


REPLAYED[F.multi_head_attention_forward] = self_attention

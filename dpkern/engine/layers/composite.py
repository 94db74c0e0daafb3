"""Operations on several parameters at once, taken apart into ones that have rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.nn import functional as F

from ..parameter import rule
from .attention import multi_head_attention_forward


@rule(F.multi_head_attention_forward)
def _attention(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return multi_head_attention_forward(*args, **kwargs)

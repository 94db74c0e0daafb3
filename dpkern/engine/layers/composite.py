"""Split operations on several parameters into operations that have rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from ..parameter import RULES, Rule
from . import recurrent
from .attention import multi_head_attention_forward


def _instead(replacement: Callable[..., Any]) -> Rule:
    def handler(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return replacement(*args, **kwargs)

    return handler


RULES[F.multi_head_attention_forward] = _instead(multi_head_attention_forward)
for _name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
    RULES[getattr(torch, _name)] = _instead(getattr(recurrent, _name))
    RULES[getattr(torch, f"{_name}_cell")] = _instead(getattr(recurrent, f"{_name}_cell"))

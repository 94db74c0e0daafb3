"""Find how far the rounding of products moves the outputs of a pass.

A kernel for one row adds in another order than one for many. What that does to the outputs is the
module's own: a net of steep sines magnifies it to all of the output, and where large terms cancel
nothing but rounding is left. So results of products are moved by half a unit in the last place.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS = re.compile("mm|mv|dot|conv|linear|rnn|lstm|gru|attention|sum|mean|norm|softmax")
"""Operations that add many terms, by a part of their names."""

_UNITS = 0.5
"""Units in the last place by which results are moved."""

_GOLDEN = 0.6180339887498949


class MovedProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Moves results of products by rounding errors, with signs that change from entry to entry."""

    def __torch_dispatch__(
        self, func: Any, _: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if _PRODUCTS.search(func._schema.name) and not func._schema.is_mutable:
            for tensor in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.numel():
                    _move(tensor)
        return result


def _move(tensor: Tensor) -> None:
    places = torch.arange(tensor.numel(), device=tensor.device, dtype=torch.float64)
    signs = (places * _GOLDEN % 1 < 0.5).to(tensor.dtype).reshape(tensor.shape) * 2 - 1
    size = tensor.abs() + tensor.abs().mean()
    tensor.add_(_UNITS * torch.finfo(tensor.dtype).eps * size * signs)

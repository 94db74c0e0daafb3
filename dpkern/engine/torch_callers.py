"""Refuse functions of torch that would fail on private parameters with errors that say nothing.

They are known by the frame that asks for an attribute, so that no other use pays for it.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import clip_grad_value_

from ..base.errors import PrivacyError
from .parameter import SPECIAL, source_of, without_torch_function

_GRADIENT: Any = Tensor.grad  # torch leaves the attribute without a type

_CLIP: Any = getattr(clip_grad_value_, "__wrapped__", clip_grad_value_)
_MAKE: Any = nn.Parameter.__new__

_FRAMES = 4
"""Number of frames between torch's function and the attribute, comprehensions among them."""


def _is_called_from(function: Any) -> bool:
    """Whether this function of torch is among the next callers."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_FRAMES):
        if frame is None:
            return False
        if frame.f_code is function.__code__:
            return True
        frame = frame.f_back
    return False


def _gradient(parameter: Tensor) -> Tensor | None:
    """Return ``parameter.grad``, except for ``clip_grad_value_``, which fails without gradients.

    Raises:
        PrivacyError: it asks.
    """
    if _is_called_from(_CLIP) and not source_of(parameter).capture.in_public:
        raise PrivacyError(
            "clip_grad_value_",
            expected="gradients that the engine clips, sample by sample",
            got="parameters, which have no gradient of their own",
            remedy="Leave it out: max_grad_norm of make_private bounds each sample's gradient.",
        )
    with without_torch_function():
        return parameter.grad


def _detached(parameter: Tensor) -> Tensor:
    """Return ``parameter.detach()``, except for ``nn.Parameter(parameter)``.

    Raises:
        PrivacyError: it asks, as parametrizations do.
    """
    if _is_called_from(_MAKE):
        raise PrivacyError(
            "nn.Parameter",
            expected="a tensor that is no private parameter",
            got=source_of(parameter).name,
            remedy="Add weight_norm and other parametrizations before make_private; a copy is "
            "nn.Parameter(parameter.detach().clone()).",
        )
    with without_torch_function():
        return parameter.detach()


SPECIAL[_GRADIENT.__get__] = _gradient
SPECIAL[Tensor.detach] = _detached

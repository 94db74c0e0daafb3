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

_CLIP = getattr(clip_grad_value_, "__wrapped__", clip_grad_value_).__code__
_MAKE = nn.Parameter.__new__.__code__


def _gradient(parameter: Tensor) -> Tensor | None:
    """Return ``parameter.grad``, except for ``clip_grad_value_``, which fails without gradients.

    Raises:
        PrivacyError: it asks.
    """
    caller: FrameType | None = sys._getframe(1).f_back  # behind __torch_function__
    if caller is not None and caller.f_code.co_name == "<listcomp>":
        caller = caller.f_back
    asks = caller is not None and caller.f_code is _CLIP
    if asks and not source_of(parameter).capture.in_public:
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
    caller: FrameType | None = sys._getframe(1).f_back
    if caller is not None and caller.f_code is _MAKE:
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

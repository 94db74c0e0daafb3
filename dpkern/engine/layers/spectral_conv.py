"""Define the rule of ``nn.functional.spectral_conv2d``, a convolution in the frequency domain.

The gradients of its parameters and of its input are those of an ordinary convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ...nn.functional import spectral_conv2d
from ..parameter import arguments, fresh, is_constant, is_private, rule
from ..uses import CapturedOp
from .conv import Convolve, convolve, geometry_of
from .other import other

Function = Callable[..., Any]


class _SpectralConvolve(Convolve):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, use: CapturedOp, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.use = use
        ctx.set_materialize_grads(False)
        ctx.dtype = x.dtype
        ctx.save_for_backward(x, weight)
        options = (use.saved[name] for name in ("stride", "padding", "dilation", "groups"))
        return fresh(spectral_conv2d(x, weight, bias, *options))


@rule(spectral_conv2d, leaf=True)
def _spectral_conv(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    names = ("x", "weight", "bias", "stride", "padding", "dilation", "groups")
    x, weight, bias, *geometry = arguments(names, args, kwargs)
    if is_private(x) or not is_constant(weight, bias) or x.dim() != 4:
        return other(func, args, kwargs)
    options = geometry_of(2, *geometry)
    return convolve("spectral_conv2d", x, weight, bias, options, _SpectralConvolve)

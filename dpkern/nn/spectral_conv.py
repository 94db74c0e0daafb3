"""A convolution that multiplies in the frequency domain."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from . import functional


class SpectralConv2d(nn.Conv2d):
    """A layer with the arguments, parameters and results of ``nn.Conv2d``.

    It multiplies in the frequency domain where that is faster, which takes kernels of about 11 x 11
    and more (``functional.spectral_conv2d``).

    Source: Spectral-DP's convolution, with sizes that make it exact for every stride, dilation and
    number of groups.
    """

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        padding = self.padding
        if self.padding_mode != "zeros" or isinstance(padding, str):
            mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=mode)
            padding = (0, 0)
        return functional.spectral_conv2d(
            input, weight, bias, self.stride, padding, self.dilation, self.groups
        )

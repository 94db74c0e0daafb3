"""A linear layer whose matrix is made of circulant blocks."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..base.validate import choice, integer
from . import functional


class BlockCirculantLinear(nn.Module):
    """A linear layer ``y = W x + b`` whose W consists of ``d x d`` circulant blocks.

    It has ``m n / d`` weights.

    A model with this layer is another model than one with a dense layer of the same sizes.

    Args:
        in_features: n; padded with zeros to a multiple of ``block``.
        out_features: m; outputs behind it are dropped.
        block: d.
        bias: whether there is a bias ``[m]``.
        convention: ``row``: a block's parameters are its first row (GReDP); ``column``: its first
            column (as in CirCNN).
        device, dtype: device and dtype of the parameters.

    Attributes:
        weight: ``[ceil(m / d), ceil(n / d), d]``.

    Raises:
        InvalidInput: a size below 1, or an unknown convention.

    Source: GReDP, (17)-(18). The start is that of ``nn.Linear``: uniform within 1 / sqrt(n).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        block: int = 8,
        bias: bool = True,
        convention: str = "row",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features = integer(1, in_features=in_features)
        self.out_features = integer(1, out_features=out_features)
        self.block = integer(1, block=block)
        choice(functional.CONVENTIONS, convention=convention)
        self.convention = convention
        rows, columns = -(-out_features // block), -(-in_features // block)
        self.weight = nn.Parameter(torch.empty(rows, columns, block, device=device, dtype=dtype))
        empty = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        self.bias: nn.Parameter | None
        self.register_parameter("bias", empty if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new random parameters."""
        most = 1 / math.sqrt(self.in_features)
        for parameter in self.parameters(recurse=False):
            nn.init.uniform_(parameter, -most, most)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., n]`` to ``[..., m]``."""
        return functional.circulant_linear(
            x,
            self.weight,
            self.bias,
            out_features=self.out_features,
            convention=self.convention,
        )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"block={self.block}, bias={self.bias is not None}, convention={self.convention!r}"
        )

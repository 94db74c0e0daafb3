"""Build the larger demonstration networks, each for the rows that it can take.

Rows are ``[F]``, ``[H, W]`` or ``[C, H, W]``, without the batch dimension.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ...base.errors import InvalidInput

SMALLEST_IMAGE = 4
RESNET_WIDTHS = (16, 32)
NORM_GROUPS = 4
TOKEN_WIDTH = 32
HEADS = 4
MAX_TOKENS = 1024  # the memory of attention grows with its square


def lenet5(row_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build LeNet-5 (LeCun et al. 1998: tanh, average pooling, 6 and 16 maps, 120-84 units).

    Images under 18 pixels get a 3 x 3 second convolution, those under 32 pixels padding, because
    two 5 x 5 convolutions would leave nothing of them.

    Raises:
        InvalidInput: rows that are not square images.
    """
    channels, side = _square_image(row_shape, "lenet5")
    padding = 0 if side >= 32 else 2
    middle = (side - 4 + 2 * padding) // 2
    second = nn.Conv2d(6, 16, 5) if middle >= 9 else nn.Conv2d(6, 16, 3, padding=1)
    last = (middle - 4 if middle >= 9 else middle) // 2
    return nn.Sequential(
        nn.Flatten(),
        nn.Unflatten(1, (channels, side, side)),
        nn.Conv2d(channels, 6, 5, padding=padding),
        nn.Tanh(),
        nn.AvgPool2d(2),
        second,
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * last * last, 120),
        nn.Tanh(),
        nn.Linear(120, 84),
        nn.Tanh(),
        nn.Linear(84, classes),
    )


class ResidualBlock(nn.Module):
    """Residual block ``relu(norm(conv(relu(norm(conv(x))))) + shortcut(x))`` with group norm."""

    def __init__(self, before: int, after: int, *, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False),
            nn.GroupNorm(NORM_GROUPS, after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.GroupNorm(NORM_GROUPS, after),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Conv2d(before, after, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.main(x) + self.shortcut(x)
        return nn.functional.relu(total)


def resnet(row_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build a residual network (He et al. 2016) with one block of 16 and one of 32 maps.

    Group normalisation (Wu and He 2018) keeps the samples of a batch apart. The last maps are
    averaged to 2 x 2, not to a point, because positions matter in small images.

    Raises:
        InvalidInput: rows that are not square images.
    """
    channels, side = _square_image(row_shape, "resnet")
    narrow, wide = RESNET_WIDTHS
    return nn.Sequential(
        nn.Flatten(),
        nn.Unflatten(1, (channels, side, side)),
        nn.Conv2d(channels, narrow, 3, padding=1, bias=False),
        nn.GroupNorm(NORM_GROUPS, narrow),
        nn.ReLU(),
        ResidualBlock(narrow, narrow, stride=1),
        ResidualBlock(narrow, wide, stride=2),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * wide, classes),
    )


class Transformer(nn.Module):
    """Encoder layer over the tokens of a row, with learned positions and a classified mean.

    Args:
        tokens, features: a row has up to ``tokens * features`` numbers, and is padded with zeros.
    """

    def __init__(self, tokens: int, features: int, classes: int) -> None:
        super().__init__()
        self.tokens, self.features = tokens, features
        self.embed = nn.Linear(features, TOKEN_WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(tokens, TOKEN_WIDTH))
        self.encoder = nn.TransformerEncoderLayer(
            TOKEN_WIDTH,
            HEADS,
            dim_feedforward=2 * TOKEN_WIDTH,
            dropout=0.0,
            batch_first=True,
            norm_first=True,
        )
        self.norm = nn.LayerNorm(TOKEN_WIDTH)
        self.head = nn.Linear(TOKEN_WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 4:
            x = x.transpose(1, 2)  # the rows of all channels together
        x = x.flatten(1)
        x = nn.functional.pad(x, (0, self.tokens * self.features - x.shape[1]))
        x = self.embed(x.reshape(-1, self.tokens, self.features)) + self.positions
        logits: Tensor = self.head(self.norm(self.encoder(x)).mean(1))
        return logits


def transformer(row_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build a transformer encoder (Vaswani et al. 2017; norm first) of one layer of width 32.

    Tokens are the rows of ``[H, W]``, the rows of all channels together of ``[C, H, W]``, and
    about ``sqrt(F)`` equal chunks of ``[F]``, the last one padded with zeros.

    Raises:
        InvalidInput: rows that give fewer than 2 or more than 1024 tokens.
    """
    tokens, numbers = 0, math.prod(row_shape)
    if numbers and len(row_shape) == 1:
        tokens = -(-numbers // (math.isqrt(numbers - 1) + 1))
    elif numbers and len(row_shape) in (2, 3):
        tokens = row_shape[-2]
    if not 2 <= tokens <= MAX_TOKENS:
        raise InvalidInput(
            "model",
            expected=f"rows of 2 to {MAX_TOKENS} tokens for transformer: [H, W] or [C, H, W] with "
            "H tokens, or [F] with about sqrt(F)",
            got=f"rows of shape {list(row_shape)}",
            remedy="Choose linear or mlp, or reshape the rows.",
        )
    return Transformer(tokens, -(-numbers // tokens), classes)


def _square_image(row_shape: tuple[int, ...], model: str) -> tuple[int, int]:
    """Return ``(channels, side)`` of square rows ``[H, W]``, ``[C, H, W]`` or ``[H * W]``."""
    shape = row_shape
    if len(shape) == 1:
        side = math.isqrt(shape[0])
        shape = (side, shape[0] // side)
    square = (
        len(shape) in (2, 3)
        and shape[-1] == shape[-2]
        and math.prod(shape) == math.prod(row_shape)  # 17 features are no 4 x 4 image
    )
    if not square or shape[-1] < SMALLEST_IMAGE:
        raise InvalidInput(
            "model",
            expected=f"square images of at least {SMALLEST_IMAGE} x {SMALLEST_IMAGE} for {model}: "
            "rows [H, W], [C, H, W] or flattened [H * W]",
            got=f"rows of shape {list(row_shape)}",
            remedy="Choose linear or mlp, or reshape the rows to images.",
        )
    return (shape[0] if len(shape) == 3 else 1), shape[-1]

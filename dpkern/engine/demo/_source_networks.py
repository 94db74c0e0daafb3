"""Build the networks of the papers; ``sources`` states how each paper's table was read.

No module mixes the samples of a batch: where the papers use batch normalisation, group
normalisation (Wu and He 2018) or none takes its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from ...base.errors import InvalidInput

NORM_GROUPS = 4


@dataclass(frozen=True, kw_only=True)
class Style:
    """Choices that apply to every network.

    Attributes:
        dense: makes a linear layer from the numbers of inputs and outputs.
        norm: makes a normalisation from the number of maps.
        width: factor on every number of maps and hidden units.
    """

    dense: Callable[[int, int], nn.Module]
    norm: Callable[[int], nn.Module]
    width: float = 1.0

    def maps(self, count: int) -> int:
        """Return ``count`` maps scaled by the width; if scaled, a multiple of the norm's groups."""
        scaled = max(1, round(count * self.width))
        return count if self.width == 1 else -(-scaled // NORM_GROUPS) * NORM_GROUPS

    def head(self, *sizes: int) -> list[nn.Module]:
        """Build linear layers with ReLU between them; only the hidden sizes are scaled."""
        inner = [self.maps(size) for size in sizes[1:-1]]
        widths = [sizes[0], *inner, sizes[-1]]
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [self.dense(before, after), nn.ReLU()]
        return layers[:-1]


def images(rows: tuple[int, ...], divisor: int, model: str, *, least: int = 1) -> tuple[int, int]:
    """Return ``(channels, side)`` of rows that are square images.

    Raises:
        InvalidInput: other rows, or a side below ``least`` or not a multiple of ``divisor``.
    """
    shape = rows if len(rows) == 3 else (1, *rows)
    if len(shape) != 3 or shape[1] != shape[2] or shape[1] % divisor or shape[1] < least:
        raise InvalidInput(
            "model",
            expected=f"square images for {model}, rows [H, W] or [C, H, W], with a side that is a "
            f"multiple of {divisor} and at least {max(least, divisor)}",
            got=f"rows of shape {list(rows)}",
            remedy="Choose another model, or data of the source (MNIST, CIFAR-10, SVHN).",
        )
    return shape[0], shape[1]


def lenet(rows: tuple[int, ...], classes: int, style: Style, *, second: int) -> nn.Module:
    """Build LeNet-5: 5 x 5 convolutions to 6 and to ``second`` maps, then 120, 84, classes."""
    channels, side = images(rows, 4, "LeNet-5", least=12)
    six, second = style.maps(6), style.maps(second)
    last = (side // 2 - 4) // 2
    return nn.Sequential(
        nn.Unflatten(1, (channels, side)) if len(rows) == 2 else nn.Identity(),
        nn.Conv2d(channels, six, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(six, second, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        *style.head(second * last * last, 120, 84, classes),
    )


def stacked(
    rows: tuple[int, ...],
    classes: int,
    style: Style,
    *,
    stages: tuple[tuple[int, ...], ...],
    hidden: tuple[int, ...],
) -> nn.Module:
    """Build stages of 3 x 3 convolutions, each ended by 2 x 2 max pooling, and a head."""
    channels, side = images(rows, 2 ** len(stages), "this network")
    layers: list[nn.Module] = [nn.Unflatten(1, (channels, side))] if len(rows) == 2 else []
    before = channels
    for stage in stages:
        for count in stage:
            after = style.maps(count)
            layers += [nn.Conv2d(before, after, 3, padding=1), style.norm(after), nn.ReLU()]
            before = after
        layers.append(nn.MaxPool2d(2))
    last = side >> len(stages)
    head = style.head(before * last * last, *hidden, classes)
    return nn.Sequential(*layers, nn.Flatten(), *head)


class BasicBlock(nn.Module):
    """Residual block ``relu(norm(conv(relu(norm(conv x)))) + shortcut(x))`` of 3 x 3 convolutions.

    Args:
        before, after: numbers of maps.
        stride: stride of the first convolution.
        style: source of the normalisation.
        projection: whether the shortcut to other maps is a 1 x 1 convolution rather than appended
            zeros.
    """

    def __init__(
        self, before: int, after: int, style: Style, *, stride: int = 1, projection: bool
    ) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False),
            style.norm(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            style.norm(after),
        )
        self.more = 0 if projection else after - before
        self.shortcut: nn.Module = nn.Identity()
        if projection and (stride != 1 or before != after):
            convolution = nn.Conv2d(before, after, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(convolution, style.norm(after))

    def forward(self, x: Tensor) -> Tensor:
        kept: Tensor = self.shortcut(x)
        if self.more:
            kept = nn.functional.pad(kept, (0, 0, 0, 0, 0, self.more))
        total: Tensor = self.main(x) + kept
        return torch.relu(total)


def resnet20(rows: tuple[int, ...], classes: int, style: Style) -> nn.Module:
    """Build a stem and three stages of three blocks of 16, 32, 64 maps, halved by averages."""
    channels, side = images(rows, 8, "ResNet-20")
    widths = tuple(style.maps(count) for count in (16, 32, 64))
    layers: list[nn.Module] = [nn.Unflatten(1, (channels, side))] if len(rows) == 2 else []
    layers += [
        nn.Conv2d(channels, widths[0], 3, padding=1, bias=False),
        style.norm(widths[0]),
        nn.ReLU(),
    ]
    before = widths[0]
    for number, after in enumerate(widths):
        layers += [BasicBlock(before, after, style, projection=False)]
        layers += [BasicBlock(after, after, style, projection=False) for _ in range(2)]
        layers.append(nn.AvgPool2d(2) if number < 2 else nn.AdaptiveAvgPool2d(1))
        before = after
    return nn.Sequential(*layers, nn.Flatten(), style.dense(before, classes))


def resnet18(rows: tuple[int, ...], classes: int, style: Style, *, stem: int) -> nn.Module:
    """Build four stages of two blocks of 64, 128, 256, 512 maps.

    The stem is 3 x 3, or 7 x 7 with stride 2 and max pooling over 3 x 3.
    """
    channels, side = images(rows, 8 if stem == 3 else 32, "ResNet-18")
    widths = tuple(style.maps(count) for count in (64, 128, 256, 512))
    layers: list[nn.Module] = [nn.Unflatten(1, (channels, side))] if len(rows) == 2 else []
    small = stem == 3
    layers += [
        nn.Conv2d(
            channels, widths[0], stem, stride=1 if small else 2, padding=stem // 2, bias=False
        ),
        style.norm(widths[0]),
        nn.ReLU(),
    ]
    if not small:
        layers.append(nn.MaxPool2d(3, stride=2, padding=1))
    before = widths[0]
    for number, after in enumerate(widths):
        layers += [
            BasicBlock(before, after, style, stride=1 if number == 0 else 2, projection=True),
            BasicBlock(after, after, style, projection=True),
        ]
        before = after
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), style.dense(before, classes)]
    return nn.Sequential(*layers)

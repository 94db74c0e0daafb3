"""Build the models of the papers by name, each with the reading of what its paper leaves open.

GReDP prints tables of layers (II to VI) without channel counts; the paper on directional noise
names LeNet, "AlexNet, all conv kernels 3" and ResNet-18 without any table. What is filled in here
stands in ``PaperModel.readings``, which reports and ``docs/mechanisms.md`` print.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from ...base.errors import InvalidInput
from ...base.validate import choice
from ...nn import BlockCirculantLinear
from . import _source_networks as networks
from ._source_networks import NORM_GROUPS, Style

LINEAR = ("dense", "circulant")
NORMS = ("group", "none")
BLOCK = 8
"""Side of a circulant block (GReDP, equation 18, leaves it open)."""

MNIST_ROWS, CIFAR_ROWS = (1, 28, 28), (3, 32, 32)


@dataclass(frozen=True, kw_only=True)
class PaperModel:
    """Model of a paper.

    Attributes:
        make: builds it from rows, classes and style.
        rows: shape of the rows that the paper uses.
        readings: choices where the paper leaves something open.
    """

    make: Callable[[tuple[int, ...], int, Style], nn.Module]
    rows: tuple[int, ...]
    readings: tuple[str, ...]


_UNSTATED = ("ReLU, initialisation of torch, groups normalised where a normalisation is used",)
_ALEXNET = partial(
    networks.stacked, stages=((64,), (192,), (384,), (256,), (256,)), hidden=(120, 84)
)
_CHANNELS = "64, 192, 384, 256, 256 maps; five maxima over 2 x 2 take 32 x 32 to a point"

SOURCES: dict[str, PaperModel] = {
    "gredp-lenet5": PaperModel(
        make=partial(networks.lenet, second=6),
        rows=MNIST_ROWS,
        readings=("6 and 6 maps as printed (the classic network has 16)", "padding 2", *_UNSTATED),
    ),
    "gredp-lenet5-16": PaperModel(
        make=partial(networks.lenet, second=16),
        rows=MNIST_ROWS,
        readings=("6 and 16 maps as in the classic network", "padding 2", *_UNSTATED),
    ),
    "gredp-resnet20": PaperModel(
        make=networks.resnet20,
        rows=CIFAR_ROWS,
        readings=(
            "7 + 6 + 6 convolutions in three stages of 16, 32, 64 maps, averages between them",
            "shortcuts to more maps append zeros, so that there are 19 convolutions",
            '"64 units": the average of the last stage, then 64 to 10',
            *_UNSTATED,
        ),
    ),
    "gredp-model3": PaperModel(
        make=partial(networks.stacked, stages=((32, 32), (64, 64), (128, 128)), hidden=(120,)),
        rows=CIFAR_ROWS,
        readings=("2 convolutions per stage of 32, 64, 128 maps", *_UNSTATED),
    ),
    "gredp-alexnet": PaperModel(make=_ALEXNET, rows=CIFAR_ROWS, readings=(_CHANNELS, *_UNSTATED)),
    "gredp-resnet18": PaperModel(
        make=partial(networks.resnet18, stem=7),
        rows=CIFAR_ROWS,
        readings=(
            "the standard network with strides; the printed maxima over 2 x 2 are read as strides",
            *_UNSTATED,
        ),
    ),
    "directional-lenet": PaperModel(
        make=partial(networks.lenet, second=16),
        rows=MNIST_ROWS,
        readings=("6 and 16 maps, padding 2: 61706 parameters", *_UNSTATED),
    ),
    "directional-alexnet": PaperModel(
        make=_ALEXNET, rows=CIFAR_ROWS, readings=(_CHANNELS, *_UNSTATED)
    ),
    "directional-resnet18": PaperModel(
        make=partial(networks.resnet18, stem=3),
        rows=CIFAR_ROWS,
        readings=("the variant for CIFAR-10: 3 x 3 stem without a maximum", *_UNSTATED),
    ),
}


def build(
    name: str,
    *,
    row_shape: tuple[int, ...],
    classes: int,
    linear: str = "dense",
    norm: str = "group",
    width: float = 1.0,
) -> nn.Module:
    """Build a model of ``SOURCES`` that maps ``[B, *row_shape]`` to logits ``[B, classes]``.

    Args:
        name: one of ``SOURCES``.
        row_shape: ``[H, W]`` or ``[C, H, W]``.
        classes: number of logits.
        linear: ``circulant`` makes linear layers of circulant blocks of side 8: another model,
            with 1/8 of the weights.
        norm: ``group`` or ``none``.
        width: factor on maps and hidden units, for runs on small machines.

    Raises:
        InvalidInput: an unknown name or option, or rows that the network cannot take.
    """
    choice(tuple(SOURCES), model=name)
    choice(LINEAR, linear=linear)
    choice(NORMS, norm=norm)
    if not 0 < width <= 1:
        raise InvalidInput(
            "width",
            expected="a number in (0, 1]",
            got=width,
            remedy="Pass 1 for the printed network.",
        )
    style = Style(
        dense=nn.Linear if linear == "dense" else _circulant,
        norm=(lambda maps: nn.GroupNorm(NORM_GROUPS, maps)) if norm == "group" else _no_norm,
        width=width,
    )
    return SOURCES[name].make(row_shape, classes, style)


def _no_norm(maps: int) -> nn.Module:
    del maps
    return nn.Identity()


def _circulant(inputs: int, outputs: int) -> nn.Module:
    layer: nn.Module = BlockCirculantLinear(inputs, outputs, block=BLOCK)
    return layer

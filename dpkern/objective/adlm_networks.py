"""Networks that AdLM trains: convolutions bounded by LRN, a hidden layer bounded by min-max.

Every convolution is followed by ReLU, local response normalisation (22) and 2 x 2 maximum pooling;
the last hidden layer, of width H, by ReLU and min-max over the batch, so that ``hbar`` is in
[0, 1]^H. The output layer has no bias: ``s_l = hbar . W_l`` (23).

Source: AdLM, section on experiments: 5x5x32, 5x5x64, 25 units (MNIST); 3x3x128, 5x5x128, 5x5x256,
30 units (CIFAR-10). Padding, pooling and initial weights are ours, and so are the small ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from ..base.errors import InvalidInput
from ..base.validate import choice, integer
from ..nn.normalise import BatchMinMax, BoundedResponseNorm
from ..privacy.theory.adlm import AdlmSetting, FirstLayer


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The layers of one network.

    Attributes:
        convolutions: ``(maps, side of the kernel)`` of each; none: fully connected.
        dense: units of the fully connected layers in front of the last hidden one.
        hidden: H.
    """

    convolutions: tuple[tuple[int, int], ...] = ()
    dense: tuple[int, ...] = ()
    hidden: int = 25


ARCHITECTURES = {
    "mnist": Architecture(convolutions=((32, 5), (64, 5)), hidden=25),
    "cifar10": Architecture(convolutions=((128, 3), (128, 5), (256, 5)), hidden=30),
    "digits": Architecture(convolutions=((8, 3), (16, 3)), hidden=16),
    "dense": Architecture(dense=(32,), hidden=16),
}
"""The paper's two networks, a small one for 8 x 8 images, and one for rows of numbers."""


def build(
    architecture: str | Architecture, row_shape: tuple[int, ...], classes: int, *, seed: int
) -> nn.Sequential:
    """Build a network for flat rows ``[B, d]``, with He's uniform weights and biases of 0.

    Args:
        architecture: a name of ``ARCHITECTURES``, or one.
        row_shape: ``[C, H, W]``, ``[H, W]``, or for fully connected ones any.
        classes: M.
        seed: seed of the initial weights.

    Raises:
        InvalidInput: an unknown name, or rows that are no images of a large enough size.
    """
    if isinstance(architecture, str):
        architecture = ARCHITECTURES[choice(tuple(ARCHITECTURES), architecture=architecture)]
    integer(2, classes=classes)
    layers: list[nn.Module] = []
    width = math.prod(row_shape)
    if architecture.convolutions:
        channels, height, wide = _image(row_shape, len(architecture.convolutions))
        layers.append(nn.Unflatten(1, (channels, height, wide)))
        for maps, side in architecture.convolutions:
            layers += [
                nn.Conv2d(channels, maps, side, padding=side // 2),
                nn.ReLU(),
                BoundedResponseNorm(),
                nn.MaxPool2d(2),
            ]
            channels, height, wide = maps, height // 2, wide // 2
        layers.append(nn.Flatten())
        width = channels * height * wide
    for units in (*architecture.dense, architecture.hidden):
        layers += [nn.Linear(width, units), nn.ReLU(), BatchMinMax(units)]
        width = units
    network = nn.Sequential(*layers, nn.Linear(width, classes, bias=False))
    initialise(network, seed)
    _open_units(network)
    return network


def _open_units(network: nn.Sequential) -> None:
    """Set the biases in front of min-max normalisation to 1, which takes the shift away again.

    With biases of 0 up to 9 of 16 units are 0 for every record within a few hundred steps, and
    stay so: their classes are then never learnt.
    """
    layers = list(network)
    with torch.no_grad():
        for layer, after in zip(layers, layers[2:], strict=False):
            if isinstance(layer, nn.Linear) and isinstance(after, BatchMinMax):
                layer.bias.fill_(1.0)


def initialise(network: nn.Module, seed: int) -> None:
    """Draw He's uniform weights, and biases of 0, from this seed alone."""
    generator = torch.Generator().manual_seed(integer(0, seed=seed))
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() == 1:
                parameter.zero_()
            else:
                bound = math.sqrt(6 / parameter[0].numel())
                drawn = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_((2 * drawn - 1) * bound)


def first_layer(network: nn.Sequential, row_shape: tuple[int, ...]) -> FirstLayer:
    """Return the sizes of h_0, the network's first affine layer.

    Raises:
        InvalidInput: a network without one.
    """
    features = math.prod(row_shape)
    for layer in network:
        if isinstance(layer, nn.Linear):
            return FirstLayer(features=features, maps=layer.out_features)
        if isinstance(layer, nn.Conv2d):
            size = layer.in_channels * math.prod(layer.kernel_size)
            return FirstLayer(
                features=features,
                maps=layer.out_channels,
                positions=features // layer.in_channels,  # the same padding, stride 1
                patch=min(size, features),
            )
    raise InvalidInput(
        "network",
        expected="a linear layer or a convolution",
        got="neither",
        remedy="Make the network with objective.adlm_networks.build.",
    )


def setting(
    network: nn.Sequential,
    row_shape: tuple[int, ...],
    *,
    records: int,
    batch: int,
    name: str = "own",
) -> AdlmSetting:
    """Read the sizes that noise scales depend on off the network and the data's public sizes."""
    last = network[-1]
    if not isinstance(last, nn.Linear):
        raise InvalidInput(
            "network",
            expected="a linear output layer",
            got=type(last).__name__,
            remedy="Make the network with objective.adlm_networks.build.",
        )
    return AdlmSetting(
        name=name,
        layer=first_layer(network, row_shape),
        records=integer(1, records=records),
        batch=integer(1, batch=batch),
        classes=last.out_features,
        hidden=last.in_features,
    )


def _image(row_shape: tuple[int, ...], halvings: int) -> tuple[int, int, int]:
    shape = (1, *row_shape) if len(row_shape) == 2 else row_shape
    if len(shape) != 3 or min(shape[1:]) < 2**halvings:
        raise InvalidInput(
            "row_shape",
            expected=f"images [H, W] or [C, H, W] of at least {2**halvings} pixels a side",
            got=str(list(row_shape)),
            remedy="Reshape the rows to images, or take the architecture 'dense'.",
        )
    return shape[0], shape[1], shape[2]

"""Train AdLM's network as its authors' released code trains it, in two of its versions.

Inputs are scaled to [-1, 1]. Each step draws one noise image, which all records of the batch share:

    x~ = clip(x + n, -10, 10),   n_j ~ Lap(D / (beta_j epsilon2)) / L,   D = 2 * units * patch

with the pixels of one pooled map as ``units``. The shares beta come from a map of relevances of a
separate network: normalised to [0, 1], to the fourth power, with Laplace noise, and a floor of
1e-5. Batches are normalised by their own moments, and so are the held-out records, all together.
Labels have no noise in the first version (``no label noise``): the one that was drawn is never fed.
In the last version (``fixed label noise``) a matrix N [H, M] of Lap(D_F / epsilon3) / L, drawn once
for the run, enters every one of the L M entries of the loss as ``-sum(N * W)``, W [H, M] being the
output layer. epsilon is spent as 1/4 for relevances, 1/4 for inputs, 1/2 for labels, and its cost
is counted once, although every step draws anew.

These runs reproduce numbers and protect nothing: two records of a batch differ by what their noisy
inputs differ by, exactly, wherever nothing was clipped.

Source: the repository haiphanNJIT/PrivateDeepLearning, commits 0445117 and 15fb1f3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...base.collapse import of_scores
from ...objective.adlm import Architecture
from ...objective.adlm_data import Labelled
from ...privacy.theory.adlm import loss_sensitivity

BATCH, RECORDS = 1800, 60_000
"""L and |D| in the scales of the noise, whatever the size of the batches is."""
RATE = 3e-4
CLIPPED = 10.0
SPREAD, BIAS = 0.1, 0.1
"""Standard deviation of weights, cut at two of them, and all biases."""
TINY = 1e-3
"""Added to the variance of a batch."""
POWER, FLOOR = 4, 1e-5
"""Exponent of normalised relevances, and the least share."""
SHARES = (0.25, 0.25, 0.5)
"""Parts of epsilon for relevances, inputs and labels."""
AT_ONCE = 250
CPU = torch.device("cpu")
FIRST, LAST = "no label noise", "fixed label noise"
VERSIONS = {FIRST: "0445117", LAST: "15fb1f3"}


@dataclass(frozen=True, kw_only=True)
class ReleasedVersion:
    """A version of the released code, and what may be undone in it.

    Attributes:
        labels: one of ``VERSIONS``.
        noise: whether inputs and labels get any noise.
        shared: whether the records of a batch share a draw, as released.
    """

    labels: str = FIRST
    noise: bool = True
    shared: bool = True


def laplace(shape: Sequence[int], scale: Tensor | float, generator: torch.Generator) -> Tensor:
    """Return Laplace draws, float32; they reproduce numbers and protect nothing."""
    u = torch.rand(*shape, generator=generator, dtype=torch.float64) - 0.5
    return (-scale * u.sign() * torch.log1p(-2 * u.abs())).float()


def budget_shares(relevance: Tensor, epsilon: float, generator: torch.Generator) -> Tensor:
    """Return beta ``[d]``, float64, of mean relevances ``[d]``; the mean is about 1.

    Args:
        relevance: of a separate network, float64.
        epsilon: of the relevances.
        generator: draws the noise of the relevances.
    """
    low, high = relevance.min(), relevance.max()
    made = ((relevance - low) / (high - low).clamp_min(1e-300)) ** POWER
    count = len(relevance)
    noise = laplace([count], 2 * count / (epsilon * RECORDS), generator).double()
    floored = (made + noise).clamp_min(FLOOR)
    return (count * floored / floored.sum()).clamp_min(FLOOR)


def input_scale(architecture: Architecture, row_shape: tuple[int, ...], epsilon: float) -> float:
    """Return the scale of a pixel's noise at beta 1: ``2 * units * patch / (epsilon2 L)``.

    Args:
        architecture: its first convolution has the patch; without one, all inputs are a patch.
        row_shape: ``[C, H, W]`` or ``[H, W]``.
        epsilon: of the inputs.
    """
    if architecture.convolutions:
        channels = row_shape[0] if len(row_shape) == 3 else 1
        side = architecture.convolutions[0][1]
        units, patch = (row_shape[-2] // 2) * (row_shape[-1] // 2), channels * side**2
    else:
        units, patch = 1, math.prod(row_shape)
    return 2 * units * patch / (epsilon * BATCH)


def label_scale(classes: int, hidden: int, epsilon: float) -> float:
    """Return the scale of a label's noise, ``D_F / (epsilon L)``, for each entry of the loss."""
    return loss_sensitivity(classes, hidden) / (epsilon * BATCH)


def build(architecture: Architecture, row_shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """Return the network from rows ``[B, d]`` to the last hidden layer ``[B, H]`` and the scores.

    Its two parts are the modules 0 and 1; hidden units are in [-1, 1].
    """
    layers: list[nn.Module] = []
    width = math.prod(row_shape)
    if architecture.convolutions:
        shape = row_shape if len(row_shape) == 3 else (1, *row_shape)
        channels, height, wide = shape
        layers.append(nn.Unflatten(1, shape))
        for maps, side in architecture.convolutions:
            layers += [
                nn.Conv2d(channels, maps, side, padding=side // 2),
                nn.ReLU(),
                nn.MaxPool2d(2),
            ]
            channels, height, wide = maps, height // 2, wide // 2
        layers.append(nn.Flatten())
        width = channels * height * wide
    for units in (*architecture.dense, architecture.hidden):
        # Moments of the batch at hand, in training and at test.
        norm = nn.BatchNorm1d(units, eps=TINY, track_running_stats=False)
        layers += [nn.Linear(width, units), norm, nn.ReLU(), nn.Hardtanh(-1.0, 1.0)]
        width = units
    return nn.Sequential(nn.Sequential(*layers), nn.Linear(width, classes))


def initialise(network: nn.Module, generator: torch.Generator) -> None:
    """Draw weights from a normal law cut at two deviations; set biases, but for shifts of norms."""
    with torch.no_grad():
        for layer in network.modules():
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                nn.init.trunc_normal_(
                    layer.weight, std=SPREAD, a=-2 * SPREAD, b=2 * SPREAD, generator=generator
                )
                assert layer.bias is not None
                layer.bias.fill_(BIAS)


def train(
    version: ReleasedVersion,
    data: Labelled,
    architecture: Architecture,
    *,
    epsilon: float,
    relevance: Tensor,
    batch: int,
    epochs: int,
    lr: float,
    seed: int,
    on_step: Callable[[int], None],
    shares: tuple[float, float, float] = SHARES,
    every: int = 1,
    device: torch.device = CPU,
) -> dict[str, Any]:
    """Train one run and return its held-out accuracy in per cent, by epoch, and its collapse.

    Args:
        version: the code's version, and what is undone in it.
        data: the records, of which nothing is protected.
        architecture: sizes of the network.
        epsilon: of the whole run, as claimed; infinite adds no noise.
        relevance: mean relevances of a separate network, float64 ``[d]``.
        batch: records of a step; the scales of the noise have the source's L.
        epochs: passes over the records.
        lr: of Adam's steps.
        seed: of weights, order and noise.
        on_step: called with the number of steps done.
        shares: parts of epsilon for relevances, inputs and labels.
        every: epochs from one measurement of accuracy to the next; the last is always measured.
        device: device of network and records; random numbers are drawn on the processor.
    """
    generator = torch.Generator().manual_seed(seed)
    network = build(architecture, data.row_shape, data.classes)
    initialise(network, generator)
    # Pooling is twice as fast.
    network.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    last = network[1]
    assert isinstance(last, nn.Linear)
    noisy = version.noise and math.isfinite(epsilon)
    scales = None
    fixed = None
    if noisy:
        beta = budget_shares(relevance, shares[0] * epsilon, generator)
        scales = input_scale(architecture, data.row_shape, shares[1] * epsilon) / beta
    if noisy and version.labels == LAST:
        shape = [architecture.hidden, data.classes]
        scale = label_scale(data.classes, architecture.hidden, shares[2] * epsilon)
        fixed = laplace(shape, scale, generator).to(device)
    x, held = (
        (2 * data.inputs(each, "unit") - 1).float().to(device) for each in (data.x, data.x_test)
    )
    y, y_held = data.y.to(device), data.y_test.to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=lr)
    accuracy: dict[int, float] = {}
    done = 0
    for epoch in range(1, epochs + 1):
        order = torch.randperm(len(x), generator=generator)
        for rows in order[: len(x) // batch * batch].view(-1, batch):
            entered = x[rows]
            if scales is not None:
                drawn = (1 if version.shared else batch, len(scales))
                drawn_noise = laplace(drawn, scales, generator).to(device)
                entered = (entered + drawn_noise).clamp(-CLIPPED, CLIPPED)
            targets = functional.one_hot(y[rows], data.classes).float()
            loss = _loss(network(entered), targets)
            if fixed is not None:
                loss = loss - targets.numel() * (fixed.T * last.weight).sum()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            done += 1
            on_step(done)
        if epoch % every == 0 or epoch == epochs:
            scores = _scores(network, held)
            accuracy[epoch] = 100 * float((scores.argmax(1) == y_held).double().mean())
    return {
        "accuracy": list(accuracy.values()),
        "epochs": list(accuracy),
        "collapsed": int(of_scores(scores).collapsed),
    }


def _loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the printed polynomial, summed over records and classes."""
    return (math.log(2) + (0.5 - targets) * scores + scores.square() / 8).sum()


@torch.no_grad()
def _scores(network: nn.Sequential, held: Tensor) -> Tensor:
    """Return the scores of held-out records, which are one batch of their moments."""
    hidden = network[0]
    assert isinstance(hidden, nn.Sequential)
    # Records meet in the norms only: what comes before is computed for some at a time.
    flat = [number for number, layer in enumerate(hidden, start=1) if isinstance(layer, nn.Flatten)]
    apart = flat[0] if flat else 0
    parts = [held[first : first + AT_ONCE] for first in range(0, len(held), AT_ONCE)]
    before = torch.cat([hidden[:apart](part) for part in parts])
    found: Tensor = network[1](hidden[apart:](before))
    return found

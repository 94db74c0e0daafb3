"""AdLM's noise scales as printed, their true costs, and the local form that keeps its promise.

Noise is drawn once, before training, for relevances (eps1), inputs of the first layer (eps2) and
coefficients of the loss (eps3):

    (11)-(12)  Rbar_j = R_j + Lap(D_R / eps1),            D_R = 2 d / |D|
    (16)       beta_j = d |Rbar_j| / sum |Rbar|,          eps_j = beta_j eps2
    (17)       xbar_ij = x_ij + Lap(D_h0 / eps_j) / |L|,  D_h0 = 2 |h_0| d
    lemma 5    phibar = phi + Lap(D_F / eps3) / |L|,      D_F = M (H + H^2 / 4)

The division by the batch size |L| holds for the *sum* over a batch whose records share one draw.
With one draw per record the sum has only ``1 / |L|`` of that variance, and a record, which the
network reads by itself, costs ``|L| rho eps2 / (2 |h_0|)``; with a shared draw the differences of
records are released exactly. ``local_scales`` promise eps2 for each record by itself.

|h_0| is not defined for a convolution; ``COUNTS`` are the readings. Tensors are float64 ``[d]``.

Reference: AdLM, (4)-(21), lemmas 1-6, algorithm 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...base.choices import RELEVANCE_RANGES
from ...base.errors import InvalidInput
from ...base.validate import choice, integer, non_negative, positive, tensor

COUNTS = ("maps", "units", "one", "patch")
"""|h_0|: the maps; every unit; one neuron; the maps, with d the inputs of one unit."""

INPUT_RANGES = ("unit", "unit_l2")
"""Inputs end at 1, which the sensitivities are printed for, or at 1 / sqrt(d)."""

NOISE_SHARING = ("iid_per_example", "shared_per_feature")
"""One draw per record and feature, or one per feature for all records."""

NETWORKS = ("public", "trained_on_data")
"""The origin of relevances: a network that does not depend on the data, or one that does."""

LABEL_SENSITIVITY = 2.0
"""L1 distance of two one-hot labels, and of their coefficients 1/2 - y."""


@dataclass(frozen=True, kw_only=True)
class FirstLayer:
    """The sizes of the first affine layer.

    Args:
        features: d, inputs of the whole layer.
        maps: feature maps; neurons of a fully connected layer.
        positions: outputs of one map; 1 if fully connected.
        patch: inputs of one unit; None for all.

    Raises:
        InvalidInput: a size below 1.
    """

    features: int
    maps: int
    positions: int = 1
    patch: int | None = None

    def __post_init__(self) -> None:
        integer(1, features=self.features)
        integer(1, maps=self.maps)
        integer(1, positions=self.positions)
        if self.patch is not None:
            integer(1, self.features, patch=self.patch)

    def counted(self, h0_count: str) -> tuple[int, int]:
        """Return ``|h_0|`` and the ``d`` of (17) in one of the readings ``COUNTS``."""
        choice(COUNTS, h0_count=h0_count)
        neurons = {"units": self.maps * self.positions, "one": 1}.get(h0_count, self.maps)
        inputs = self.patch if h0_count == "patch" else None
        return neurons, self.features if inputs is None else inputs


def reach(input_range: str, features: int) -> float:
    """Return rho, the largest input after normalisation: 1, or ``1 / sqrt(d)``."""
    choice(INPUT_RANGES, input_range=input_range)
    integer(1, features=features)
    return 1.0 if input_range == "unit" else 1 / math.sqrt(features)


def below(number: float, dtype: torch.dtype) -> float:
    """Return the largest number of this dtype that is at most ``number``."""
    rounded = torch.tensor(number, dtype=dtype)
    if float(rounded) > number:
        rounded = torch.nextafter(rounded, torch.zeros_like(rounded))
    return float(rounded)


def normalised_inputs(
    x: Tensor, low: Tensor | float, high: Tensor | float, *, input_range: str = "unit_l2"
) -> Tensor:
    """Return ``rho (x - low) / (high - low)``: the printed form has ``rho = 1 / sqrt(d)``.

    Args:
        x: ``[n, d]``, floating.
        low, high: ends of each attribute's domain, public: ``[d]`` or one number.
        input_range: see ``INPUT_RANGES``.

    Raises:
        InvalidInput: an empty domain, or an input that is NaN or outside its domain.
    """
    tensor(x=x, shape=(None, None), dtypes=(torch.float32, torch.float64))
    low, high = torch.as_tensor(low).to(x), torch.as_tensor(high).to(x)
    if not bool((low < high).all()):
        raise InvalidInput(
            "high",
            expected="more than low for every attribute",
            got="an empty domain",
            remedy="Give the public domain of each attribute; leave constant ones out.",
        )
    if not bool(((low <= x) & (x <= high)).all()):  # NaN is nowhere
        raise InvalidInput(
            "x",
            expected="inputs inside their public domain",
            got="NaN, or an input outside",
            remedy="Clamp the inputs, or state the domain that they really have.",
        )
    rho = reach(input_range, x.shape[1])
    return ((x - low) / (high - low) * rho).clamp_max(below(rho, x.dtype))


def relevance_sensitivity(features: int, records: int) -> float:
    """Return ``D_R = 2 d / |D|`` (11), lemma 1; for a network that does not depend on the data."""
    return 2 * integer(1, features=features) / integer(1, records=records)


def exact_relevance_sensitivity(
    features: int, records: int, *, relevance_range: str = "as_formula"
) -> float:
    """Return ``d / |D|``, or twice that for relevances in [-1, 1]; the network being fixed."""
    choice(RELEVANCE_RANGES, relevance_range=relevance_range)
    printed = relevance_sensitivity(features, records)
    return printed if relevance_range == "signed" else printed / 2


def hidden_sensitivity(layer: FirstLayer, *, h0_count: str = "maps") -> float:
    """Return ``D_h0 = 2 |h_0| d`` (17), lemma 3, for inputs in [0, 1]."""
    neurons, inputs = layer.counted(h0_count)
    return 2.0 * neurons * inputs


def loss_sensitivity(classes: int, hidden: int) -> float:
    """Return ``D_F = M (H + H^2 / 4)``, lemma 5, for a last hidden layer in [0, 1]."""
    width = integer(1, hidden=hidden)
    return integer(1, classes=classes) * (width + width**2 / 4)


def budget_shares(relevance: Tensor, *, beta_min: float = 0.0) -> Tensor:
    """Return ``beta_j = d |Rbar_j| / sum |Rbar|`` (16), float64; the sum is d.

    Args:
        relevance: ``[d]``, noisy.
        beta_min: shares below it are raised to it, then all divided by their mean, so that none
            is below ``beta_min / (1 + beta_min)``. 0 is the print, which divides by zero where
            Rbar_j = 0: there the smallest other magnitude counts. If all are 0, shares are equal.

    Raises:
        InvalidInput: no relevances, one that is not finite, or a floor outside [0, 1].
    """
    tensor(relevance=relevance, shape=(None,), dtypes=(torch.float32, torch.float64))
    if not relevance.numel() or not bool(relevance.isfinite().all()):
        raise InvalidInput(
            "relevance",
            expected="at least one finite number",
            got="none, NaN or inf",
            remedy="Pass the noisy relevance of every feature.",
        )
    if non_negative(beta_min=beta_min) > 1:
        raise InvalidInput(
            "beta_min",
            expected="a number in [0, 1]",
            got=beta_min,
            remedy="Lower beta_min: shares are 1 on average, and cannot all exceed it.",
        )
    size = relevance.double().abs()
    least = size[size > 0]
    size = size.clamp_min(least.min()) if least.numel() else torch.ones_like(size)
    # Divided first: sums of tiny magnitudes are as good as any.
    size = size / size.max()
    shares = (size / size.mean()).clamp_min(beta_min)
    return shares / shares.mean()


def input_scales(
    shares: Tensor, *, layer: FirstLayer, batch: int, epsilon: float, h0_count: str = "maps"
) -> Tensor:
    """Return ``D_h0 / (|L| eps_j)``, line 13, of each feature's noise; shares of 1 give ILM.

    Raises:
        InvalidInput: a number out of its range.
    """
    return bias_scale(layer=layer, batch=batch, epsilon=epsilon, h0_count=h0_count) / shares


def bias_scale(*, layer: FirstLayer, batch: int, epsilon: float, h0_count: str = "maps") -> float:
    """Return ``D_h0 / (|L| eps2)``, line 14; a bias is no data and needs no noise.

    Raises:
        InvalidInput: a number out of its range.
    """
    bound = hidden_sensitivity(layer, h0_count=h0_count)
    return bound / (integer(1, batch=batch) * positive(epsilon=epsilon))


def label_scale(*, classes: int, hidden: int, batch: int, epsilon: float) -> float:
    """Return ``D_F / (|L| eps3)``, line 19.

    Raises:
        InvalidInput: a number out of its range.
    """
    bound = loss_sensitivity(classes, hidden)
    return bound / (integer(1, batch=batch) * positive(epsilon=epsilon))


def local_scales(shares: Tensor, *, epsilon: float, reach: float = 1.0) -> Tensor:
    """Return ``rho / eps_j``, ``eps_j = eps2 beta_j / d``: corrected, one draw per record, once.

    Raises:
        InvalidInput: a number out of its range.
    """
    return positive(reach=reach) * len(shares) / (positive(epsilon=epsilon) * shares)


def sum_variance(scale: float, batch: int, *, noise_sharing: str) -> float:
    """Return the variance of a batch's summed noise; (20)-(21) assume ``2 (|L| scale)^2``."""
    choice(NOISE_SHARING, noise_sharing=noise_sharing)
    one = 2 * positive(scale=scale) ** 2
    count = integer(1, batch=batch)
    return one * (count if noise_sharing == "iid_per_example" else count**2)


def input_cost(scales: Tensor, *, reach: float, noise_sharing: str = "iid_per_example") -> float:
    """Return the pure epsilon of one record's noisy inputs, replace-one: ``sum rho / scale_j``.

    Infinite for a shared draw: knowing one record, one subtracts its noise from all others.

    Raises:
        InvalidInput: an unknown way of sharing.
    """
    choice(NOISE_SHARING, noise_sharing=noise_sharing)
    if noise_sharing == "shared_per_feature":
        return math.inf
    return float((positive(reach=reach) / scales.double()).sum())


def published_input_cost(
    *, layer: FirstLayer, batch: int, epsilon: float, reach: float, h0_count: str = "maps"
) -> float:
    """Return ``input_cost`` of ``input_scales``: ``|L| rho eps2 / (2 |h_0|)``, for any shares.

    Times ``d / patch`` where D_h0 counts the inputs of one unit only.

    Raises:
        InvalidInput: a number out of its range.
    """
    scale = bias_scale(layer=layer, batch=batch, epsilon=epsilon, h0_count=h0_count)
    return positive(reach=reach) * layer.features / scale


def published_label_cost(*, classes: int, hidden: int, batch: int, epsilon: float) -> float:
    """Return the pure epsilon of one record's noisy coefficients ``1/2 - y``: ``2 |L| eps3 / D_F``.

    Raises:
        InvalidInput: a number out of its range.
    """
    scale = label_scale(classes=classes, hidden=hidden, batch=batch, epsilon=epsilon)
    return LABEL_SENSITIVITY / scale


def published_relevance_cost(
    records: int,
    *,
    epsilon: float,
    relevance_range: str = "as_formula",
    network: str = "trained_on_data",
) -> float:
    """Return the pure epsilon of the noisy relevances (12).

    With a public network half the claim for relevances in [0, 1], the claim for [-1, 1]. A network
    trained on the data may move with one record, and every record's relevance with it: then only
    that relevances are bounded is left, and the cost is |D| times as high.

    Raises:
        InvalidInput: a number out of its range, or an unknown choice.
    """
    choice(RELEVANCE_RANGES, relevance_range=relevance_range)
    choice(NETWORKS, network=network)
    cost = positive(epsilon=epsilon) * (1.0 if relevance_range == "signed" else 0.5)
    return cost * (1 if network == "public" else integer(1, records=records))


@dataclass(frozen=True, kw_only=True)
class AdlmSetting:
    """The noise facts of one of the paper's two experiments.

    Attributes:
        name: of the data set.
        layer: the first convolution.
        records: |D|.
        batch: |L|.
        classes: M.
        hidden: H, width of the last hidden layer.
    """

    name: str
    layer: FirstLayer
    records: int
    batch: int
    classes: int
    hidden: int


MNIST = AdlmSetting(
    name="MNIST",
    layer=FirstLayer(features=28 * 28, maps=32, positions=28 * 28, patch=25),
    records=60_000,
    batch=1800,
    classes=10,
    hidden=25,
)
CIFAR10 = AdlmSetting(
    name="CIFAR-10",
    layer=FirstLayer(features=3 * 32 * 32, maps=128, positions=32 * 32, patch=27),
    records=60_000,
    batch=7200,
    classes=10,
    hidden=30,
)


class HiddenSizeReading(NamedTuple):
    """A reading of |h_0|.

    Attributes:
        setting: of the experiment.
        h0_count: see ``COUNTS``.
        neurons: |h_0|.
        sensitivity: D_h0.
        scale: of each feature's noise at eps2 = 1 and equal shares.
        cost: of one record's inputs over eps2, inputs in [0, 1].
        cost_l2: the same for inputs in [0, 1 / sqrt(d)].
    """

    setting: str
    h0_count: str
    neurons: int
    sensitivity: float
    scale: float
    cost: float
    cost_l2: float


def table(*settings: AdlmSetting) -> list[HiddenSizeReading]:
    """Return what every reading of |h_0| makes of the noise and of its cost.

    Without a setting the table has both.
    """
    return [_case(each, count) for each in settings or (MNIST, CIFAR10) for count in COUNTS]


def _case(each: AdlmSetting, h0_count: str) -> HiddenSizeReading:
    def cost(input_range: str) -> float:
        rho = reach(input_range, layer.features)
        return published_input_cost(
            layer=layer, batch=each.batch, epsilon=1.0, reach=rho, h0_count=h0_count
        )

    layer = each.layer
    return HiddenSizeReading(
        setting=each.name,
        h0_count=h0_count,
        neurons=layer.counted(h0_count)[0],
        sensitivity=hidden_sensitivity(layer, h0_count=h0_count),
        scale=bias_scale(layer=layer, batch=each.batch, epsilon=1.0, h0_count=h0_count),
        cost=cost("unit"),
        cost_l2=cost("unit_l2"),
    )

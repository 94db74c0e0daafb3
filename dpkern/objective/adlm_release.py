"""Release the records once: noisy relevances, inputs, a bias, coefficients or targets.

All that is trained afterwards reads ``ReleasedDataset`` and nothing else of the records, except in
the ``feature_expanded`` form, which therefore certifies nothing.

Source: AdLM, algorithm 1, lines 1-19.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.errors import InvalidInput
from ..base.rng import Key, Purpose
from ..base.validate import tensor, that
from ..nn.polynomial import PowerCoefficients
from ..nn.relevance import MU, mean_relevance
from ..privacy.mechanisms import adlm_noise
from ..privacy.mechanisms.adlm import AdLM
from ..privacy.theory.adlm import LABEL_SENSITIVITY
from .adlm_data import Labelled
from .release import MakeSource

RELEVANCE, INPUTS, BIAS, LABELS, VISITS = range(5)
"""Stream numbers: every release has its own."""

LEAST_POSITIVE = 0.5
"""The share of records whose class must have a positive score."""


@dataclass(frozen=True, kw_only=True)
class ReleasedDataset:
    """The released form of one data set.

    Attributes:
        mechanism: mechanism that made the release.
        inputs: float32 ``[N, d]``.
        offset: ``[d]``, the draw that all inputs share, or None.
        bias_noise: ``[maps]`` (line 14), or None.
        coefficients: noisy coefficients of the ``label_scalar`` form, ``[N, M]`` each, or None.
        targets: float32 ``[N, M]``: released ones, or None. In the ``feature_expanded`` form they
            are the true labels, which get their noise at every visit.
        relevance: ``[d]``, float64, noisy or public; None for ILM.
        betas, scales: ``[d]``, float64.
        visit_scale: scale of the noise at every visit of ``feature_expanded``, or None.
    """

    mechanism: AdLM
    inputs: Tensor
    offset: Tensor | None
    bias_noise: Tensor | None
    coefficients: PowerCoefficients | None
    targets: Tensor | None
    relevance: Tensor | None
    betas: Tensor
    scales: Tensor
    visit_scale: float | None

    def to(self, device: torch.device) -> ReleasedDataset:
        """Return the same release with what training reads on ``device``."""
        made = self.coefficients
        return replace(
            self,
            inputs=self.inputs.to(device),
            offset=None if self.offset is None else self.offset.to(device),
            bias_noise=None if self.bias_noise is None else self.bias_noise.to(device),
            coefficients=None
            if made is None
            else PowerCoefficients(
                made.constant, made.linear.to(device), made.quadratic.to(device)
            ),
            targets=None if self.targets is None else self.targets.to(device),
        )


def relevance_of(
    mechanism: AdLM,
    network: nn.Sequential,
    data: Labelled,
    *,
    mu: float = MU,
    batch: int = 256,
) -> Tensor:
    """Return ``R_j`` (10) of the training records, float64 ``[d]``; not private.

    Args:
        mechanism: configuration that selects the score and the range.
        network: pre-trained; its weights are not changed. Of these records, of public ones: that is
            what ``mechanism.relevance_from`` must say truly.
        data: the records; public ones where ``relevance_from`` is ``public``.
        mu: stabiliser.
        batch: records at a time.

    Raises:
        InvalidInput: sizes that do not fit, or a network whose scores of the records' classes are
            not positive for half of them: their relevance would be upside down. Of a public
            network on secret records this is not asked, for the answer would tell of them.
    """
    inputs = data.inputs(data.x, mechanism.input_range).float()
    labels = data.y if mechanism.relevance_target == "label" else None
    training = network.training
    try:
        if labels is not None and mechanism.relevance_from != "public_network":
            _, positive = scored(network.eval(), inputs, labels)
            that(
                positive >= LEAST_POSITIVE,
                "network",
                f"positive scores of the true class for {LEAST_POSITIVE:.0%} of the records",
                f"{positive:.1%}",
                "Train it longer: relevance starts from this score, and is upside down where it "
                "is negative.",
            )
        return mean_relevance(
            network.eval(),
            inputs,
            labels,
            mu=mu,
            relevance_range=mechanism.relevance_range,
            batch=batch,
        )
    finally:
        network.train(training)


def scored(network: nn.Sequential, inputs: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return the shares of records that are classified right, and with a positive true score.

    Args:
        network: in evaluation mode.
        inputs: ``[n, d]``.
        labels: int64 ``[n]``.
    """
    right = positive = 0
    with torch.no_grad():
        for x, y in zip(torch.split(inputs, 1000), torch.split(labels, 1000), strict=True):
            scores = network(x)
            right += int((scores.argmax(1) == y).sum())
            positive += int((scores.gather(1, y[:, None]) > 0).sum())
    return right / len(labels), positive / len(labels)


def release(
    mechanism: AdLM,
    data: Labelled,
    key: Key,
    *,
    relevance: Tensor | None = None,
    source: MakeSource | None = None,
) -> ReleasedDataset:
    """Draw everything, once. Another release of the same records needs another key and costs again.

    Args:
        mechanism: AdLM or ILM; with epsilon infinite nothing is drawn.
        data: the records; |D|, d and M must be those of the mechanism's setting.
        key: used for nothing else.
        relevance: AdLM: ``relevance_of``, float64 ``[d]``; gets its noise here unless it is public.
        source: makes the noise source of each Laplace release; randomized labels have none. None
            draws the noise from the key.

    Raises:
        InvalidInput: sizes that do not fit, a relevance that is missing or not used, or a source in
            the ``feature_expanded`` form, whose labels get their noise at every visit.
    """
    _check_sizes(mechanism, data)
    if source is not None and mechanism.noisy:
        check_source(mechanism)
    draw = _Release(key, source)
    noisy = _noisy_relevance(mechanism, data, draw, relevance)
    betas = mechanism.betas(torch.ones(data.features).double() if noisy is None else noisy)
    found = ReleasedDataset(
        mechanism=mechanism,
        # Reserves of the certificate are made for the lattice points of float64.
        inputs=data.inputs(data.x.double(), mechanism.input_range),
        offset=None,
        bias_noise=None,
        coefficients=None,
        targets=None,
        relevance=noisy,
        betas=betas,
        scales=mechanism.input_scales(betas) if mechanism.noisy else torch.zeros_like(betas),
        visit_scale=None,
    )
    found = _labels(_inputs(found, draw) if mechanism.noisy else found, data, draw)
    return replace(found, inputs=found.inputs.float())


def check_source(mechanism: AdLM) -> None:
    """Refuse a noise source for labels that get their noise at every visit.

    Raises:
        InvalidInput: the ``feature_expanded`` form.
    """
    if mechanism.coefficient_form == "feature_expanded" and mechanism.labels == "coefficients":
        raise InvalidInput(
            "noise_source",
            expected="none with coefficient_form='feature_expanded'",
            got="a source of draws made once",
            remedy="Leave the noise source out, or use coefficient_form='label_scalar'.",
        )


@dataclass(frozen=True)
class _Release:
    """The key of the releases, and what makes the source of their draws."""

    key: Key
    source: MakeSource | None

    @contextmanager
    def noise(self, number: int, count: int) -> Iterator[dict[str, Any]]:
        """Yield the streams of release ``number``, and ``count`` draws of a source of its own."""
        given: dict[str, Any] = {
            "stream": self.key.stream(Purpose.LAPLACE, 0, stream=number),
            "rounding": self.key.stream(Purpose.ROUNDING, 0, stream=number),
        }
        if self.source is None:
            yield given
            return
        made = self.source()
        try:
            made.bind_blocks(self.key, law="laplace", stream=0, count=count, substream=number)
            yield given | {"draws": made.take(0)}
            made.done()
        finally:
            made.close()


def _noisy_relevance(
    mechanism: AdLM, data: Labelled, draw: _Release, relevance: Tensor | None
) -> Tensor | None:
    if mechanism.adaptive != (relevance is not None):
        raise InvalidInput(
            "relevance",
            expected="the mean relevance of every feature" if mechanism.adaptive else "None",
            got="None" if relevance is None else "a relevance, which ILM does not use",
            remedy="Pass the result of relevance_of to AdLM, and None to ILM.",
        )
    if relevance is None:
        return None
    tensor(relevance=relevance, shape=(data.features,), dtypes=(torch.float64,))
    if not (mechanism.releases_relevance and mechanism.noisy):
        return relevance
    with draw.noise(RELEVANCE, relevance.numel()) as given:
        return adlm_noise.private_relevance(relevance, scale=mechanism.relevance_scale, **given)


def _inputs(found: ReleasedDataset, draw: _Release) -> ReleasedDataset:
    """Release the inputs: lines 12-14."""
    mechanism = found.mechanism
    with draw.noise(INPUTS, found.inputs.numel()) as given:
        noisy = adlm_noise.private_inputs(
            found.inputs,
            found.scales,
            reach=mechanism.reach,
            noise_sharing=mechanism.noise_sharing,
            **given,
        )
    offset = None
    if mechanism.noise_sharing == "shared_per_feature":
        offset = (noisy[0].double() - found.inputs[0].double()).float()
    scale = mechanism.bias_scale
    bias = None
    if scale is not None:
        # One entry per neuron: per map where a convolution shares its bias.
        clean = torch.zeros(mechanism.setting.layer.maps, dtype=torch.float64)
        with draw.noise(BIAS, clean.numel()) as given:
            bias = adlm_noise.private_bias(clean, scale=scale, **given).float()
    return replace(found, inputs=noisy, offset=offset, bias_noise=bias)


def _labels(found: ReleasedDataset, data: Labelled, draw: _Release) -> ReleasedDataset:
    """Release the labels: lines 18-19, or their local form."""
    mechanism = found.mechanism
    true = F.one_hot(data.y, data.classes).double()
    if not mechanism.noisy:
        return replace(found, targets=true.float())
    if mechanism.labels == "response":
        told = adlm_noise.randomized_targets(
            data.y,
            classes=data.classes,
            epsilon=mechanism.budgets[2],
            stream=draw.key.stream(Purpose.SYMBOLS, 0, stream=LABELS),
        )
        return replace(found, targets=told.float())
    scale = mechanism.label_scale
    assert scale is not None  # every other form has one
    if mechanism.labels == "laplace":
        with draw.noise(LABELS, true.numel()) as given:
            told = adlm_noise.noisy_targets(true, epsilon=LABEL_SENSITIVITY / scale, **given)
        return replace(found, targets=told.float())
    if mechanism.coefficient_form == "feature_expanded":
        return replace(found, targets=true.float(), visit_scale=scale)
    with draw.noise(LABELS, adlm_noise.quadratic_position(0, true.numel()) + true.numel()) as given:
        made = adlm_noise.private_coefficients(true, scale=scale, **given)
    return replace(
        found,
        coefficients=PowerCoefficients(made.constant, made.linear.float(), made.quadratic.float()),
    )


def _check_sizes(mechanism: AdLM, data: Labelled) -> None:
    setting = mechanism.setting
    wanted = (setting.records, setting.layer.features, setting.classes)
    got = (len(data.x), data.features, data.classes)
    if wanted != got:
        raise InvalidInput(
            "data",
            expected="{} records of {} features and {} classes, as in setting".format(*wanted),
            got="{} records of {} features and {} classes".format(*got),
            remedy="Make the setting with adlm_networks.setting for these data.",
        )

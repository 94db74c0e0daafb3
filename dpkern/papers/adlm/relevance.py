"""Items of AdLM about relevance: of single records, and the noisy mean that shares the budget.

Source: AdLM, figures 1 and 3, (4)-(12), (16).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...base.rng import Key, Purpose
from ...nn import relevance
from ...objective.adlm_data import Labelled
from ...privacy.accounting import shown_bound
from ...privacy.mechanisms import adlm_noise
from ...privacy.theory import adlm
from .. import runner
from ..pieces import CachedRun, OnStep
from ..result import ComparisonRow, Panel, Paper, Result
from ..runner import ItemRequest
from . import setup as adlm_world
from . import verdicts
from .setup import MNIST, image

SHOWN = 6
TOP = 0.1
EPSILONS = (0.1, 1.0)
"""The values of eps1: a third of .3 and of 3."""

NOTES = (
    "relevances of the true class, mu 0.01, biases as trained: conservation (9) is exact without "
    "both only",
    "A5: the text has relevances in [-1, 1], the formula gives [0, 1]",
    "pre-trained without noise, as printed",
)
PAPER = Paper("adlm", settings={"mu": relevance.MU}, notes=(*NOTES, *runner.SEEDED))


def fig1(request: ItemRequest) -> Result:
    """Draw the relevance of one record of each of a few classes."""
    data, numbers = _relevances(request)
    x = data.inputs(data.x_test, "unit").float()[_picked(data)]
    labels, scores = data.y_test[_picked(data)], numbers["scores"]
    bottom = torch.tensor(numbers["single"], dtype=torch.float64).reshape(len(x), -1)
    unit = relevance.normalised(bottom)
    rows, panels, shares = [], [], []
    for record, label in enumerate(labels.tolist()):
        size = bottom[record].abs().flatten()
        top = size.topk(max(1, round(TOP * len(size)))).values.sum() / size.sum()
        kept = float(bottom[record].sum() / scores[record])
        shares.append(kept)
        rows += [
            ComparisonRow(
                item="fig1",
                setting=f"a {label}, held out",
                quantity=quantity,
                ours=value,
                data=data.source,
            )
            for quantity, value in (
                ("sum of the inputs' relevance / score", kept),
                (f"share of |relevance| in the largest {TOP:.0%} of inputs", float(top)),
            )
        ]
        panels += [
            Panel(title=f"a {label}", image=image(x[record].reshape(data.row_shape))),
            Panel(
                title=f"relevance of the {label}", image=image(unit[record].reshape(data.row_shape))
            ),
        ]
    result = PAPER.result("fig1", "relevance of single records", rows, panels, quick=request.quick)
    return result.judged(verdicts.of_relevance(shares))


def fig3(request: ItemRequest) -> Result:
    """Draw the mean relevance, with the noise of (12), and the shares that follow from it."""
    data, numbers = _relevances(request)
    features, count = data.features, len(data.x)
    mean = torch.tensor(numbers["mean"], dtype=torch.float64)
    printed = adlm.relevance_sensitivity(features, count)
    exact = adlm.exact_relevance_sensitivity(features, count)
    panels = [Panel(title="mean relevance", image=image(mean.reshape(data.row_shape)))]
    rows = []
    for number, epsilon in enumerate(EPSILONS):
        for name, sensitivity in (("as printed", printed), ("corrected", exact)):
            key = Key.from_unsafe_seed(number)
            noisy = adlm_noise.private_relevance(
                mean,
                scale=sensitivity / epsilon,
                stream=key.stream(Purpose.LAPLACE, 0),
                rounding=key.stream(Purpose.ROUNDING, 0),
            )
            rows += _of_noisy(data, mean, noisy, epsilon, name, sensitivity)
            title = f"private, epsilon1 {shown_bound(epsilon)}, D_R {name}"
            panels.append(Panel(title=title, image=image(noisy.reshape(data.row_shape))))
    panels.append(
        Panel(
            title=f"shares beta, epsilon1 {shown_bound(EPSILONS[-1])}, corrected",
            image=image(adlm.budget_shares(noisy).reshape(data.row_shape)),
        )
    )
    result = PAPER.result("fig3", "mean relevance with noise", rows, panels, quick=request.quick)
    public = EPSILONS[0] * exact / printed
    return result.judged(verdicts.of_noisy_relevance(rows, public))


def _of_noisy(
    data: Labelled, mean: Tensor, noisy: Tensor, epsilon: float, name: str, sensitivity: float
) -> list[ComparisonRow]:
    both = torch.stack([mean, noisy])
    shares = adlm.budget_shares(noisy)
    public = epsilon * adlm.exact_relevance_sensitivity(len(mean), len(data.x)) / sensitivity
    return [
        ComparisonRow(
            item="fig3",
            setting=f"D_R {name}, epsilon1 {shown_bound(epsilon)}",
            quantity=quantity,
            ours=value,
            epsilon_claimed=epsilon,
            epsilon_certified=math.inf,
            relation="-",
            data=data.source,
            note=f"A2: with a public network D_R {name} certifies {shown_bound(public)} of "
            f"epsilon1 {shown_bound(epsilon)} (replace_one); this network was trained on "
            "the same records",
        )
        for quantity, value in (
            ("noise scale", sensitivity / epsilon),
            ("range of the mean relevance", float(mean.max() - mean.min())),
            ("correlation with the mean", float(torch.corrcoef(both)[0, 1])),
            ("smallest share beta", float(shares.min())),
        )
    ]


def _picked(data: Labelled) -> list[int]:
    """Return the first held-out record of each of a few classes."""
    return [int((data.y_test == each).nonzero()[0]) for each in range(min(SHOWN, data.classes))]


def _relevances(request: ItemRequest) -> tuple[Labelled, Mapping[str, Any]]:
    """Return the records, and relevances by a network that was trained on them without noise."""
    here = adlm_world.world(MNIST, request)
    data = here.private
    key = {
        "paper": "adlm",
        "relevances": str(here.architecture),
        "data": data.source,
        "records": len(data.x),
        "digest": here.digest,
        "quick": request.quick,
    }

    def compute(on_step: OnStep) -> Mapping[str, Any]:
        network = adlm_world.network(here, request, public=False).eval()
        on_step(1)
        picked = _picked(data)
        shown = data.inputs(data.x_test, "unit").float()[picked]
        found = relevance.propagate(network, shown, labels=data.y_test[picked])
        mean = relevance.mean_relevance(network, data.inputs(data.x, "unit").float(), data.y)
        return {
            "single": found.layers[0].double().flatten(1).tolist(),
            "scores": found.score.double().tolist(),
            "mean": mean.double().flatten().tolist(),
        }

    label = "the network that relevances come from"
    return data, request.through([CachedRun(label=label, key=key, compute=compute)])[0]

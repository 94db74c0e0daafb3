"""Items of AdLM about relevance: of single records, and the noisy mean that shares the budget.

Source: AdLM, figures 1 and 3, (4)-(12), (16).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ...base.rng import Key, Purpose
from ...nn import relevance
from ...objective.adlm_data import Labelled
from ...privacy.accounting import shown_bound
from ...privacy.mechanisms import adlm_noise
from ...privacy.theory import adlm
from .. import runner
from ..result import ComparisonRow, Panel, Paper, Result
from ..runner import ItemRequest
from . import setup as adlm_world
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
    data, network = _pretrained(request)
    rows_test = data.inputs(data.x_test, "unit").float()
    picked = [int((data.y_test == each).nonzero()[0]) for each in range(min(SHOWN, data.classes))]
    x, labels = rows_test[picked], data.y_test[picked]
    found = relevance.propagate(network, x, labels=labels)
    bottom = found.layers[0]
    unit = relevance.normalised(bottom.double())
    rows, panels = [], []
    for record, label in enumerate(labels.tolist()):
        size = bottom[record].abs().flatten()
        top = size.topk(max(1, round(TOP * len(size)))).values.sum() / size.sum()
        kept = float(bottom[record].sum() / found.score[record])
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
            Panel(title="its relevance", image=image(unit[record].reshape(data.row_shape))),
        ]
    order = [
        2 * n + part
        for start in range(0, len(picked), 3)
        for part in (0, 1)
        for n in range(start, min(start + 3, len(picked)))
    ]
    return PAPER.result(
        "fig1", "relevance of single records", rows, [panels[n] for n in order], quick=request.quick
    )


def fig3(request: ItemRequest) -> Result:
    """Draw the mean relevance, with the noise of (12), and the shares that follow from it."""
    data, network = _pretrained(request)
    x, features = data.inputs(data.x, "unit").float(), data.features
    mean = relevance.mean_relevance(network, x, data.y)
    printed = adlm.relevance_sensitivity(features, len(x))
    exact = adlm.exact_relevance_sensitivity(features, len(x))
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
    return PAPER.result("fig3", "mean relevance with noise", rows, panels, quick=request.quick)


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


def _pretrained(request: ItemRequest) -> tuple[Labelled, nn.Sequential]:
    """Return the records, and a network that was trained on them without noise."""
    here = adlm_world.world(MNIST, request)
    return here.private, adlm_world.network(here, request, public=False).eval()

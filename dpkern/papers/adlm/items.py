"""Items of AdLM without training: its network, its noise scales and their cost, its lemma 7.

Source: AdLM, figure 2, lemmas 1 to 7, (11)-(25).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ...base.rng import Key, Purpose
from ...ops import noise
from ...privacy.theory import adlm
from ...privacy.theory.adlm import CIFAR10, INPUT_RANGES, MNIST, AdlmSetting
from ..result import ComparisonRow, DiagramBox, Line, Panel, Paper, Result
from ..runner import ItemRequest
from . import loss as adlm_loss
from . import verdicts

PAPER = Paper("adlm", settings={"mnist": MNIST.name, "cifar": CIFAR10.name})

LOCAL = "replace_one, local"
EPSILONS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
RELEVANCES = (1e-6, 0.1, 0.2, 0.4)
"""Relevances, of which noise has brought one close to zero."""

INPUT_SCALE = "input scale, epsilon2 1"

DRAWS = 2000
"""The number of simulated batches."""


def fig2(request: ItemRequest) -> Result:
    """Draw the network, and the places where noise enters it."""
    del request
    panels = [_network(MNIST, (32, 64)), _network(CIFAR10, (128, 128, 256))]
    rows = [
        ComparisonRow(item="fig2", setting=each.name, quantity=quantity, ours=value)
        for each in (MNIST, CIFAR10)
        for quantity, value in (
            ("inputs", float(each.layer.features)),
            ("maps of the first layer", float(each.layer.maps)),
            ("units of the first layer", float(each.layer.maps * each.layer.positions)),
            ("width of the last hidden layer", float(each.hidden)),
        )
    ]
    notes = ("pooling and padding are not printed: 2x2 maxima, same padding",)
    return PAPER.result("fig2", "the network and its noise", rows, panels, notes)


def sensitivity(request: ItemRequest) -> Result:
    """Compute every reading of the printed noise, and what a record then pays."""
    del request
    rows = [*_inputs(), *_labels(), *_relevance(), *_shares(), *_batch_sum()]
    notes = (
        "claimed: the epsilon that a scale is printed for; certified: what one record pays, once, "
        "however long the training is",
        "A1: the argument of (20)-(21) needs one draw for all records of a batch. Independent "
        "draws leave 1 / |L| of the variance in the sum; a shared one releases the differences of "
        "records exactly",
        "A3: |h0| of a convolution is not defined: its maps, its units, one neuron, or its maps "
        "with the inputs of one unit",
    )
    result = PAPER.result("sensitivity", "noise scales and their cost", rows, _scales(), notes)
    return result.judged(verdicts.of_sensitivity(rows))


def lemma7(request: ItemRequest) -> Result:
    """Compare the printed error bound of the polynomial loss with those that hold."""
    del request
    lowest = adlm_loss.remainder(1.0)
    rows = [
        ComparisonRow(
            item="lemma7", setting=setting, quantity=quantity, published=printed, ours=ours
        )
        for setting, quantity, printed, ours in (
            ("one class, |s| <= 1", "bound by Lagrange", adlm_loss.LEMMA_7, adlm_loss.LAGRANGE),
            ("one class, |s| <= 1", "best bound", None, adlm_loss.corrected_bound()),
            ("one class, |s| <= 1", "lowest error, exact", None, lowest),
            ("one class, |s| <= 1", "highest error, exact", None, 0.0),
            ("10 classes, |s| <= 1", "best bound", *_ten(1.0)),
            ("10 classes, |s| <= 5", "best bound", None, _ten(5.0)[1]),
            ("10 classes, |s| <= 25", "best bound", None, _ten(25.0)[1]),
            ("z = 1", "third derivative", *_third(1.0)),
            ("z = -1", "third derivative", *_third(-1.0)),
        )
    ]
    notes = (
        "A4: the third derivative is printed with 2 for 1 - e^z; 1/6 and the cube of z are left "
        "out, places of extrema are taken for their values, and |s| <= 1 is assumed of a product "
        "of H terms: with H = 25 hidden units in [0, 1] and weights in [-1, 1] it reaches 25",
        "A5: (24) is read with a plus in its second line; with the printed minus the loss has no "
        "lower bound",
    )
    result = PAPER.result("lemma7", "the error of the polynomial loss", rows, _errors(), notes)
    return result.judged(verdicts.of_lemma())


def _ten(bound: float) -> tuple[float, float]:
    return adlm_loss.published_bound(10), 10 * adlm_loss.corrected_bound(bound)


def _third(z: float) -> tuple[float, float]:
    return adlm_loss.printed_third_derivative(z), adlm_loss.third_derivative(z)


def _network(each: AdlmSetting, maps: Sequence[int]) -> Panel:
    taps = (5, 5) if each is MNIST else (3, 5, 5)
    parts = ["x, relevance R_j\n+ Lap(D_R / eps1)", "inputs\n+ Lap(D_h0 / eps_j) / |L|"]
    parts += [
        f"conv {k}x{k}, {count} maps" + ("" if number else "\nbias + Lap(D_h0 / eps2) / |L|")
        for number, (k, count) in enumerate(zip(taps, maps, strict=True))
    ]
    parts += [f"linear {each.hidden}", "10 scores\nloss coefficients\n+ Lap(D_F / eps3) / |L|"]
    within = "\nReLU, response norm,\nmax pool 2x2"
    texts = [text + (within if text.startswith("conv") else "") for text in parts]
    return Panel(title=each.name, boxes=[_placed(*one) for one in enumerate(texts)])


def _placed(number: int, text: str) -> DiagramBox:
    """Place box ``number``: three to a row, every other row from right to left."""
    row, column = divmod(number, 3)
    return DiagramBox(text=text, x=2.0 * (2 - column if row % 2 else column), y=-1.6 * row)


def _inputs() -> list[ComparisonRow]:
    """Compute (17) in every reading of |h0|, both input ranges, both ways of sharing noise."""
    rows = []
    for case in adlm.table():
        what = f"{case.setting}, {case.h0_count} ({case.neurons})"
        rows.append(
            ComparisonRow(item="sensitivity", setting=what, quantity="D_h0", ours=case.sensitivity)
        )
        for input_range, cost in zip(INPUT_RANGES, (case.cost, case.cost_l2), strict=True):
            rows.append(
                ComparisonRow(
                    item="sensitivity",
                    setting=f"{what}, {input_range}",
                    quantity=INPUT_SCALE,
                    ours=case.scale,
                    epsilon_claimed=1.0,
                    epsilon_certified=cost,
                    relation=LOCAL,
                    note="A1: |L| divides the noise although a record is read by itself",
                )
            )
    rows.append(
        ComparisonRow(
            item="sensitivity",
            setting="any |h0|, shared_per_feature",
            quantity="noise in the difference of two records",
            ours=0.0,
            epsilon_claimed=1.0,
            epsilon_certified=math.inf,
            relation="-",
            note="A1: a network reads records one by one",
        )
    )
    rows += [
        ComparisonRow(
            item="sensitivity",
            setting=f"{each.name}, corrected, equal shares",
            quantity=INPUT_SCALE,
            ours=float(adlm.local_scales(_equal(each), epsilon=1.0)[0]),
            epsilon_claimed=1.0,
            epsilon_certified=1.0,
            relation=LOCAL,
        )
        for each in (MNIST, CIFAR10)
    ]
    return rows


def _labels() -> list[ComparisonRow]:
    rows = []
    for each in (MNIST, CIFAR10):
        sizes = {"classes": each.classes, "hidden": each.hidden}
        scale = adlm.label_scale(**sizes, batch=each.batch, epsilon=1.0)
        cost = adlm.published_label_cost(**sizes, batch=each.batch, epsilon=1.0)
        what = f"{each.name}, M {each.classes}, H {each.hidden}"
        rows += [
            ComparisonRow(
                item="sensitivity",
                setting=what,
                quantity="D_F",
                published=adlm.loss_sensitivity(**sizes),
                ours=adlm.LABEL_SENSITIVITY,
                note="A3: coefficients that are functions of the label only move by 2, whatever H",
            ),
            ComparisonRow(
                item="sensitivity",
                setting=what,
                quantity="label scale, epsilon3 1",
                ours=scale,
                epsilon_claimed=1.0,
                epsilon_certified=cost,
                relation=LOCAL,
                note="A1: |L| divides the noise although a record's label is used by itself",
            ),
        ]
    return rows


def _relevance() -> list[ComparisonRow]:
    rows = []
    for name, features, records in (
        ("MNIST, 60000 records", MNIST.layer.features, 60_000),
        ("CIFAR-10, 60000 records (printed)", CIFAR10.layer.features, 60_000),
        ("CIFAR-10, 50000 records", CIFAR10.layer.features, 50_000),
    ):
        for network, relation in (("public", "replace_one"), ("trained_on_data", "-")):
            public = network == "public"
            rows.append(
                ComparisonRow(
                    item="sensitivity",
                    setting=f"{name}, network {network}",
                    quantity="D_R",
                    published=adlm.relevance_sensitivity(features, records),
                    ours=adlm.exact_relevance_sensitivity(features, records)
                    if public
                    else float(features),
                    epsilon_claimed=1.0,
                    epsilon_certified=adlm.published_relevance_cost(
                        records, epsilon=1.0, network="public"
                    )
                    if public
                    else math.inf,
                    relation=relation,
                    note=""
                    if public
                    else "A2: one record may move the network and with it every "
                    "record's relevance; nothing worth stating is certified",
                )
            )
    return rows


def _shares() -> list[ComparisonRow]:
    """Compute the shares of A6, where one relevance is close to zero."""
    noisy = torch.tensor(RELEVANCES, dtype=torch.float64)
    return [
        ComparisonRow(
            item="sensitivity",
            setting=f"relevances {', '.join(map(str, RELEVANCES))}, beta_min {floor:g}",
            quantity="largest scale / that of equal shares",
            ours=float(1 / adlm.budget_shares(noisy, beta_min=floor).min()),
            note="A6: without a floor a feature's noise has no bound; the cost of all features "
            "together does not depend on the shares",
        )
        for floor in (0.0, 0.1)
    ]


def _batch_sum() -> list[ComparisonRow]:
    """Compare the variance of a batch's sum with what (20)-(21) assume."""
    size = MNIST.batch
    key = Key.from_unsafe_seed(0)
    drawn = noise.add_noise(
        torch.zeros(DRAWS, size, dtype=torch.float64),
        stream=key.stream(Purpose.LAPLACE, 0),
        position=0,
        distribution="laplace",
        scale=1.0 / size,
        rounding=key.stream(Purpose.ROUNDING, 0),
    )
    found = {
        "iid_per_example": float(drawn.sum(1).var()),
        "shared_per_feature": float((size * drawn[:, 0]).var()),
    }
    rows = []
    for sharing, variance in found.items():
        exact = adlm.sum_variance(1.0 / size, size, noise_sharing=sharing)
        rows.append(
            ComparisonRow(
                item="sensitivity",
                setting=f"sum of {size} records, scale 1 / {size}, {sharing}",
                quantity="variance",
                published=2.0,
                ours=variance,
                note=f"{DRAWS} simulated sums; {sharing}: {exact:.4g} in theory",
            )
        )
    return rows


def _equal(each: AdlmSetting) -> torch.Tensor:
    return torch.ones(each.layer.features, dtype=torch.float64)


def _scales() -> list[Panel]:
    """Draw the noise of an input, and what a record pays, over epsilon2."""
    scales, costs = [], []
    for case in adlm.table(MNIST):
        label = f"{case.h0_count}, |h0| = {case.neurons}"
        scales.append(Line(label=label, x=EPSILONS, y=[case.scale / e for e in EPSILONS]))
        costs.append(Line(label=label, x=EPSILONS, y=[case.cost * e for e in EPSILONS]))
    local = float(adlm.local_scales(_equal(MNIST), epsilon=1.0)[0])
    scales.append(Line(label="corrected", x=EPSILONS, y=[local / e for e in EPSILONS]))
    costs.append(Line(label="corrected, and the claim", x=EPSILONS, y=EPSILONS))
    inside: dict[str, Any] = {"x_label": "epsilon2", "log_x": True, "log_y": True}
    return [
        Panel(title="MNIST: noise of an input in [0, 1]", y_label="scale", lines=scales, **inside),
        Panel(title="MNIST: what a record pays", y_label="epsilon", lines=costs, **inside),
    ]


def _errors() -> list[Panel]:
    s = [step / 20 for step in range(-60, 61)]
    away = [value for value in s if value]
    panels = [
        Panel(
            title="error of one class and its bounds",
            x_label="s",
            y_label="error",
            lines=[
                Line(label="|error|", x=s, y=[abs(adlm_loss.remainder(v)) for v in s]),
                Line(
                    label="bound that holds",
                    x=away,
                    y=[adlm_loss.corrected_bound(abs(v)) for v in away],
                ),
                Line(
                    label="lemma 7, for |s| <= 1", x=[-1, 1], y=[adlm_loss.LEMMA_7] * 2, level=True
                ),
            ],
        ),
        Panel(
            title="third derivative of log(1 + e^z)",
            x_label="z",
            y_label="value",
            lines=[
                Line(label="printed", x=s, y=[adlm_loss.printed_third_derivative(v) for v in s]),
                Line(label="exact", x=s, y=[adlm_loss.third_derivative(v) for v in s]),
            ],
        ),
    ]
    return panels

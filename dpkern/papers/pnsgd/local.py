"""Items on local privacy: channels, the estimator of frequencies, a survey, labels.

Source: lecture notes on private projected SGD, subsampling and local differential privacy.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import torch

from ...base.rng import Key, Purpose
from ...engine.demo import models
from ...ops import update
from ...privacy.accounting import shown_bound
from ...privacy.mechanisms import RandomizedResponse
from ...privacy.mechanisms.randomized_response import survey as simulated
from ...train import data, label_privacy
from .. import runner
from ..result import ComparisonRow, Line, Panel, Paper, Result
from ..runner import ItemRequest
from . import divergence

RELATION = "replace_one, local"
CASES = ((2, 1.0), (2, 0.5), (4, 1.0), (10, 2.0))
NOTES = (
    "N2: the notes print e^z for e^epsilon in the k-ary channel",
    "probabilities are exact: 64-bit thresholds rounded towards more lying",
)
PAPER = Paper("ldp", notes=NOTES)


def channels(request: ItemRequest) -> Result:
    """Compute probabilities, epsilon and contraction of the channels."""
    del request
    rows = []
    for k, epsilon in CASES:
        mechanism = RandomizedResponse(epsilon=epsilon, categories=k)
        channel = mechanism.channel()
        exact = [[float(p) for p in row] for row in channel]
        # e^epsilon rounded down, as the channel has it: the contraction there is 0, not nearly.
        gamma = Fraction(mechanism.keep, mechanism.width)
        inside = divergence.contraction(exact, math.exp(epsilon / 2))
        printed = math.exp(epsilon) / (math.exp(epsilon) + k - 1)
        for quantity, published, ours in (
            ("probability of the truth", printed, exact[0][0]),
            ("probability of one lie", (1 - printed) / (k - 1), exact[0][1]),
            ("epsilon", epsilon, mechanism.ldp_epsilon),
            ("sum of a row", 1.0, float(sum(channel[0]))),
            ("contraction at e^epsilon", 0.0, float(divergence.contraction(channel, gamma))),
            ("contraction at e^(epsilon / 2)", None, inside),
        ):
            rows.append(
                ComparisonRow(
                    item="channels",
                    setting=f"{k} categories, epsilon {shown_bound(epsilon)}",
                    quantity=quantity,
                    published=published,
                    ours=ours,
                    epsilon_claimed=epsilon,
                    epsilon_certified=mechanism.ldp_epsilon,
                    relation=RELATION,
                )
            )
    return PAPER.result("channels", "channels of randomized response", rows)


def estimator(request: ItemRequest) -> Result:
    """Compare bias and variance of the frequency estimator with theory."""
    repeats = 400 if request.quick else 4000
    people = 1000
    rows = []
    for k, epsilon in CASES:
        mechanism = RandomizedResponse(epsilon=epsilon, categories=k)
        shares = torch.arange(1, k + 1, dtype=torch.float64)
        counts = (people * shares / shares.sum()).floor().long()
        counts[-1] += people - int(counts.sum())
        answers = torch.repeat_interleave(torch.arange(k), counts)
        stream = Key.from_unsafe_seed(0).stream(Purpose.SYMBOLS, 0)
        found = simulated(mechanism, answers, stream=stream, repeats=repeats)
        theory = mechanism.variance((counts / people).tolist(), people)
        error = (found.mean(0) - counts / people).abs()
        rows += [
            _row(
                "estimator",
                f"{k} categories, epsilon {shown_bound(epsilon)}, {people} people",
                quantity,
                ours,
                mechanism,
                note,
            )
            for quantity, ours, note in (
                (
                    "largest bias / standard error",
                    float((error / (theory / repeats).sqrt()).max()),
                    "a normal variable per category: rarely above 3",
                ),
                (
                    "mean variance / theory",
                    float((found.var(0) / theory).mean()),
                    "1 within about sqrt(2 / repeats)",
                ),
            )
        ]
    return PAPER.result("estimator", "frequency estimator", rows, repeats=repeats)


def survey(request: ItemRequest) -> Result:
    """Simulate the motivating survey: one yes-or-no question, over number of people and epsilon."""
    del request
    share = 0.3
    sizes = (100, 1000, 10_000, 100_000)
    rows, lines = [], []
    for epsilon in (0.5, 1.0, 2.0):
        mechanism = RandomizedResponse(epsilon=epsilon)
        errors = []
        for n in sizes:
            answers = (torch.arange(n) < share * n).long()
            stream = Key.from_unsafe_seed(n).stream(Purpose.SYMBOLS, 0)
            found = simulated(mechanism, answers, stream=stream, repeats=20)[:, 1]
            errors.append(float((found - share).square().mean().sqrt()))
            expected = float(mechanism.variance([1 - share, share], n)[1]) ** 0.5
            rows.append(
                _row(
                    "survey",
                    f"epsilon {shown_bound(epsilon)}, {n} people, 30 % say yes",
                    "root mean square error of the share",
                    errors[-1],
                    mechanism,
                    f"theory {expected:.4g}",
                )
            )
        lines.append(Line(label=f"epsilon {shown_bound(epsilon)}", x=sizes, y=errors))
    panel = Panel(
        title="error of the share",
        x_label="people",
        y_label="root mean square",
        lines=lines,
        log_x=True,
        log_y=True,
    )
    return PAPER.result("survey", "a sensitive question", rows, [panel], repeats=20)


def labels(request: ItemRequest) -> Result:
    """Train on randomized labels: accuracy over epsilon, digits, only the labels protected."""
    found = data.load(request.data or "digits")
    seeds = request.repeats(1 if request.quick else 5)
    rows = []
    for epsilon in (1.0, 2.0, 4.0):
        mechanism = RandomizedResponse(epsilon=epsilon, categories=found.classes)
        accuracies = [_trained(mechanism, found, seed) for seed in range(seeds)]
        row = _row(
            "labels",
            f"linear model, {found.classes} classes, epsilon {shown_bound(epsilon)}",
            "accuracy %",
            sum(accuracies) / seeds,
            mechanism,
            "labels only; features and held-out rows are not protected",
        )
        spread = (max(accuracies) - min(accuracies)) / 2
        rows.append(replace(row, data=found.source, seeds=seeds, spread=spread))
    return PAPER.result("labels", "training on randomized labels", rows, seeds=seeds)


def _trained(mechanism: RandomizedResponse, found: data.Dataset, seed: int) -> float:
    told = label_privacy.released(mechanism, found, Key.from_unsafe_seed(seed))
    where = runner.RunSetting(
        data=told,
        model=lambda s: models.build(
            "linear", row_shape=found.row_shape, classes=found.classes, init_seed=s
        ),
        epochs=10,
        batch_size=100,
        rule=update.SGD(lr=0.05),
    )
    outcome = runner.once(
        where, label_privacy.WITHOUT_NOISE, seed, loss=label_privacy.unbiased_loss(mechanism)
    )
    return outcome.accuracy


def _row(
    item: str, setting: str, quantity: str, ours: float, mechanism: RandomizedResponse, note: str
) -> ComparisonRow:
    return ComparisonRow(
        item=item,
        setting=setting,
        quantity=quantity,
        ours=ours,
        epsilon_claimed=mechanism.epsilon,
        epsilon_certified=mechanism.ldp_epsilon,
        relation=RELATION,
        data="generated answers",
        seeds=1,
        note=note,
    )

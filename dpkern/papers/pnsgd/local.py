"""Items on local privacy: channels, the estimator of frequencies, a survey, labels.

Source: lecture notes on private projected SGD, subsampling and local differential privacy.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch

from ...base.rng import Key, Purpose
from ...engine.demo import models
from ...ops import update
from ...privacy.accounting import shown_bound
from ...privacy.mechanisms import RandomizedResponse
from ...privacy.mechanisms.randomized_response import survey as simulated
from ...train import data, label_privacy
from ...train.loop import Loss, summed_cross_entropy
from .. import intervals, runner
from ..data_cache import digest
from ..pieces import CachedRun, OnStep
from ..result import ComparisonRow, Line, Panel, Paper, Result
from ..runner import ItemRequest
from ..seeded import Control, with_controls
from . import divergence, verdicts

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
            ("contraction at exp(epsilon)", 0.0, float(divergence.contraction(channel, gamma))),
            ("contraction at exp(epsilon / 2)", None, inside),
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
    result = PAPER.result("channels", "channels of randomized response", rows)
    return result.judged(verdicts.of_channels(rows))


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
    result = PAPER.result("estimator", "frequency estimator", rows, repeats=repeats)
    return result.judged(verdicts.of_estimator(rows))


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
    result = PAPER.result("survey", "a sensitive question", rows, [panel], repeats=20)
    return result.judged(verdicts.of_survey(rows))


def labels(request: ItemRequest) -> Result:
    """Train on randomized labels: accuracy over epsilon, digits, only the labels protected."""
    found = request.dataset("digits")
    seeds = request.repeats(1 if request.quick else 5)
    epsilons = (1.0, 2.0, 4.0)
    mechanisms = [RandomizedResponse(epsilon=e, categories=found.classes) for e in epsilons]
    pieces = [
        _piece(request, mechanism, found, seed)
        for mechanism in (*mechanisms, None)
        for seed in range(seeds)
    ]
    numbers = request.through(pieces)
    rows, curve = [], []
    for index, mechanism in enumerate(mechanisms):
        own = numbers[index * seeds : (index + 1) * seeds]
        accuracies = [float(one["accuracy"]) for one in own]
        row = _row(
            "labels",
            f"linear model, {found.classes} classes, epsilon {shown_bound(mechanism.epsilon)}",
            "accuracy %",
            sum(accuracies) / seeds,
            mechanism,
            "labels only; features and held-out rows are not protected",
        )
        rows.append(
            replace(
                row,
                data=found.source,
                seeds=seeds,
                spread=(max(accuracies) - min(accuracies)) / 2,
                stopped=0,
                collapsed=sum(int(one["collapsed"]) for one in own),
            )
        )
        curve.append(intervals.interval(accuracies))
    line = Line(
        label="",
        x=epsilons,
        y=[one.mean for one in curve],
        half=[one.half for one in curve] if seeds > 1 else (),
    )
    panel = Panel(title=found.source, x_label="epsilon", y_label="accuracy %", lines=[line])
    result = PAPER.result("labels", "training on randomized labels", rows, [panel], seeds=seeds)
    true = statistics.fmean(float(one["accuracy"]) for one in numbers[-seeds:])
    return with_controls(result, [Control(ours=true)]).judged(verdicts.of_labels())


def _piece(
    request: ItemRequest, mechanism: RandomizedResponse | None, found: data.Dataset, seed: int
) -> CachedRun:
    """Return a training on labels that the mechanism released; without one, on the true ones."""
    where = runner.RunSetting(
        data=found,
        model=lambda s: models.build(
            "linear", row_shape=found.row_shape, classes=found.classes, init_seed=s
        ),
        epochs=10,
        batch_size=100,
        rule=update.SGD(lr=0.05),
    )
    key = {
        "paper": "ldp",
        "mechanism": mechanism.fingerprint if mechanism else "true labels",
        "data": found.source,
        "records": len(found.x_train),
        "held_out": len(found.x_test),
        "digest": digest(found.x_train, found.y_train, found.x_test, found.y_test),
        "quick": request.quick,
        "seed": seed,
    }

    def compute(on_step: OnStep) -> Mapping[str, Any]:
        told = found
        loss: Loss = summed_cross_entropy
        if mechanism:
            told = label_privacy.released(mechanism, found, Key.from_unsafe_seed(seed))
            loss = label_privacy.unbiased_loss(mechanism)
        outcome = runner.once(
            replace(where, data=told), label_privacy.WITHOUT_NOISE, seed, loss=loss, on_step=on_step
        )
        return {"accuracy": outcome.accuracy, "collapsed": outcome.collapsed}

    kind = f"epsilon {shown_bound(mechanism.epsilon)}" if mechanism else "true ones"
    label = f"labels, {kind}, seed {seed}"
    return CachedRun(label=label, key=key, compute=compute, steps=where.steps)


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

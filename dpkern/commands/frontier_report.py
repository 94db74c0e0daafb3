"""Report mechanisms at equal certified epsilon: accuracy against time, operations and energy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..base import validate as check
from ..base.counts import CIPHER
from ..base.errors import DPKernError, InvalidInput
from ..base.report import Figure, Report, ReportTable, Series
from ..cost import frontier
from ..cost._numbers import tidy
from ..cost.frontier import COSTS, MISS, MechanismPair, Outcome
from ..engine.demo import models
from ..privacy.accounting import shown_bound
from ..privacy.accounting.shown import UpperBound
from ..reports.energy import SOURCE, energy
from ..reports.fake_step import FakeStep, trace
from ..train.options import MAX_SEED
from ..train.session import Session
from .frontier_runs import (
    EqualRun,
    MechanismChoice,
    check_equal,
    check_options,
    chosen,
    session_of,
    train,
)

_WORDS_PER_BLOCK = 16
OnRun = Callable[[str, float, int], None]
"""Called before every run with mechanism, epsilon and seed."""


@dataclass(frozen=True, kw_only=True)
class AtEpsilon:
    """Outcomes and pairs of one epsilon."""

    epsilon: float
    runs: Mapping[str, Sequence[EqualRun]]
    outcomes: Sequence[Outcome]
    pairs: Sequence[MechanismPair]
    facts: Mapping[str, Mapping[str, Any]]
    miss: float


def report(
    mechanisms: Sequence[str],
    *,
    epsilons: Sequence[float] = (3.0,),
    seeds: int | None = None,
    options: Mapping[str, Any] | None = None,
    on_run: OnRun | None = None,
) -> Report:
    """Train mechanisms at equal certified epsilon and compare accuracy with what a step costs.

    Args:
        mechanisms: at least two of ``NAME[:KEY=VALUE...]``.
        epsilons: epsilons that every mechanism is calibrated to.
        seeds: runs of each mechanism at each epsilon, with seeds 0, 1, ...: None takes the fewest
            that the statements of the report need.
        options: options of ``dpkern train`` by name, the same for all.
        on_run: called before every run.

    Raises:
        InvalidInput: too few seeds, mechanisms whose guarantees differ, or options that do not fit.
        DPKernError: whatever is wrong with data or mechanisms.
    """
    given = dict(options or {})
    check_options(given)
    wanted = chosen(mechanisms)
    for epsilon in epsilons:
        check.positive(epsilon=epsilon)
    levels = sorted(set(epsilons))
    if not levels:
        raise InvalidInput(
            "epsilon", expected="at least one", got="none", remedy="Pass, for example, --epsilon 3."
        )
    count = frontier.statements(len(wanted), len(levels))
    needed = frontier.needed_runs(count)
    runs = needed if seeds is None else check.integer(1, MAX_SEED, seeds=seeds)
    if runs < needed:
        raise InvalidInput(
            "seeds",
            expected=f"at least {needed}, for {count} intervals that all hold with probability "
            f"{1 - MISS:g}",
            got=runs,
            remedy=f"Pass --seeds {needed}, or compare fewer mechanisms or epsilons.",
        )
    found = [_at(epsilon, wanted, given, runs, MISS / count, on_run) for epsilon in levels]
    sample = next(iter(found[0].runs.values()))[0].summary
    names = [choice.text for choice in wanted]
    return Report(
        name="frontier",
        title=f"Mechanisms at equal certified epsilon: {sample['options']['model']} on "
        f"{sample['public']['data']}",
        summary=_summary(found, runs),
        facts={
            "mechanisms": names,
            "epsilons": levels,
            "delta": sample["delta"],
            "relation": sample["relation"],
            "seeds": list(range(runs)),
            "needed_seeds": needed,
            "statements": count,
            "confidence": 1 - MISS,
            "options": {k: v for k, v in sample["options"].items() if k not in _VARIED},
            "steps": sample["steps"],
            "heldout_rows": sample["public"]["heldout_rows"],
            "majority_accuracy": sample["majority_accuracy"],
            "threads": sample["environment"]["threads"],
            "energy_source": SOURCE,
            "at": [_fact(one) for one in found],
        },
        tables=[_accuracy_table(found), _cost_table(found), _work_table(found), _pair_table(found)],
        figures=[_figure(found, cost) for cost in COSTS if _drawable(found, cost)],
        notes=_notes(found, runs, count, sample),
    )


_VARIED = (
    *("mechanism", "settings", "epsilon", "noise_multiplier", "unsafe_seed", "init_seed"),
    *("lr", "max_grad_norm", "clipping", "arithmetic"),
)
"""Options that differ between runs; each mechanism's own are in its name."""


def _at(
    epsilon: float,
    wanted: Sequence[MechanismChoice],
    given: Mapping[str, Any],
    seeds: int,
    miss: float,
    on_run: OnRun | None,
) -> AtEpsilon:
    """Train all seeds in turns, beginning with another mechanism each time."""
    runs: dict[str, list[EqualRun]] = {choice.text: [] for choice in wanted}
    passes: dict[str, Mapping[str, int] | None] = {}
    # All of the first seed before any training: what is wrong with one is said at once.
    first = {choice.text: session_of(choice, given, epsilon=epsilon, seed=0) for choice in wanted}
    for seed in range(seeds):
        shift = seed % len(wanted)
        for choice in (*wanted[shift:], *wanted[:shift]):
            if on_run is not None:
                on_run(choice.text, epsilon, seed)
            session = first.pop(choice.text, None)
            if session is None:
                session = session_of(choice, given, epsilon=epsilon, seed=seed)
            runs[choice.text].append(train(session, seed))
            if seed == 0:
                passes[choice.text] = _passes(session)
        if seed == 0:
            check_equal({name: each[0] for name, each in runs.items()}, epsilon)
    facts = {name: _work(each[0], passes[name]) for name, each in runs.items()}
    outcomes = [_outcome(name, each, facts[name]) for name, each in runs.items()]
    pairs = [
        frontier.pair(first, second, miss)
        for k, first in enumerate(outcomes)
        for second in outcomes[k + 1 :]
    ]
    return AtEpsilon(
        epsilon=epsilon, runs=runs, outcomes=outcomes, pairs=pairs, facts=facts, miss=miss
    )


def _outcome(name: str, runs: Sequence[EqualRun], work: Mapping[str, Any]) -> Outcome:
    return Outcome(
        name=name,
        accuracies=tuple(run.accuracy for run in runs),
        digests=tuple(run.digest for run in runs),
        seconds=tuple(run.seconds if run.quiet else None for run in runs),
        operations=work["operations"],
        joules=(work["joules_low"], work["joules_high"]),
        work=work["counted"],
    )


def _passes(session: Session) -> Mapping[str, int] | None:
    """Count torch's forward and backward pass of one step; None where shapes do not tell.

    A private step makes no weight gradients in them: dpkern's ops do.
    """
    options, data = session.options.model, session.data

    def make() -> tuple[nn.Module, Callable[[int], Tensor]]:
        model = models.build(
            options.model,
            row_shape=data.row_shape,
            classes=data.classes,
            linear=options.linear,
            norm=options.norm,
        )
        return model, lambda batch: torch.zeros((batch, *data.row_shape))

    whole = round(session.training.step.expected_batch_size)
    part = session.options.run.max_physical_batch_size
    sizes = [part] * (whole // part) + ([whole % part] if whole % part else [])
    try:
        traced: dict[int, FakeStep] = {size: trace(make, size) for size in set(sizes)}
    except DPKernError:
        return None
    calls = [call for size in sizes for call in traced[size].without_weights]
    return {"flops": sum(c.flops for c in calls), "bytes": sum(c.bytes for c in calls)}


def _work(run: EqualRun, passes: Mapping[str, int] | None) -> dict[str, Any]:
    """Return what one step takes: its counts, and the range of its energy."""
    closed = run.summary["costs"]["closed"]
    rounds = run.summary["options"]["rounds"]
    torch_part = passes or {"flops": 0, "bytes": 0}
    cipher = closed["random_words"] * sum(CIPHER[rounds].values()) // _WORDS_PER_BLOCK
    low, high = energy(
        bytes=closed["bytes"] + torch_part["bytes"],
        flops=closed["flops"] + torch_part["flops"],
        words=closed["random_words"],
        rounds=rounds,
    )
    counted = {
        "model_operations": torch_part["flops"],
        "op_operations": closed["operations"] - closed["noise_operations"],
        "noise_operations": closed["noise_operations"],
        "cipher_operations": cipher,
        "bytes": closed["bytes"] + torch_part["bytes"],
        "random_words": closed["random_words"],
    }
    parts = [value for name, value in counted.items() if name.endswith("_operations")]
    return {
        "counted": counted,
        "model_counted": passes is not None,
        "operations": sum(parts),
        "joules_low": low.total,
        "joules_high": high.total,
    }


def _fact(one: AtEpsilon) -> dict[str, Any]:
    each = {}
    for outcome in one.outcomes:
        name, runs = outcome.name, one.runs[outcome.name]
        accuracy = frontier.interval(outcome.accuracies, one.miss)
        assert accuracy is not None  # as many seeds as that needs
        each[name] = {
            "certified": [run.certified for run in runs],
            "noise_multiplier": runs[0].summary["noise_multiplier"],
            "accuracy": asdict(accuracy),
            "accuracies": list(outcome.accuracies),
            "digests": list(outcome.digests),
            "step_seconds": [run.seconds for run in runs],
            "quiet": [run.quiet for run in runs],
            **one.facts[name],
            "frontier": {cost: frontier.on_frontier(name, one.pairs, cost) for cost in COSTS},
        }
    pairs = [asdict(pair) for pair in one.pairs]
    return {"epsilon": one.epsilon, "mechanisms": each, "pairs": pairs}


def _percent(share: float) -> int | float:
    return tidy(round(100 * share, 2))


def _short(value: float) -> int | float:
    return tidy(float(f"{value:.4g}"))


def _ms(runs: Sequence[EqualRun]) -> int | float:
    """Return the median milliseconds of a step over all runs, quiet or not."""
    return _short(1e3 * _median([run.seconds for run in runs]))


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _rows(found: Sequence[AtEpsilon]) -> list[tuple[AtEpsilon, Outcome]]:
    return [(one, outcome) for one in found for outcome in one.outcomes]


def _accuracy_table(found: Sequence[AtEpsilon]) -> ReportTable:
    rows = []
    for one, outcome in _rows(found):
        accuracy = frontier.interval(outcome.accuracies, one.miss)
        assert accuracy is not None
        best = max(run.certified for run in one.runs[outcome.name])
        shown = [_percent(v) for v in (accuracy.value, accuracy.low, accuracy.high)]
        yes = ["yes" if frontier.on_frontier(outcome.name, one.pairs, c) else "no" for c in COSTS]
        rows.append((one.epsilon, outcome.name, UpperBound(best), *shown, *yes))
    return ReportTable(
        title="Accuracy at equal epsilon",
        columns=(
            *("epsilon", "mechanism", "certified", "accuracy (%)", "low", "high"),
            *(f"frontier: {cost}" for cost in COSTS),
        ),
        rows=rows,
        note="certified: what each run certifies if its seed is secret, the largest of all seeds. "
        "accuracy: of held-out rows, the median over seeds, with its interval. frontier: no other "
        "mechanism is shown better in one and not shown worse in the other; a tie excludes nobody.",
    )


def _cost_table(found: Sequence[AtEpsilon]) -> ReportTable:
    rows = []
    for one, outcome in _rows(found):
        runs, work = one.runs[outcome.name], one.facts[outcome.name]
        quiet = sum(run.quiet for run in runs)
        joules = [_short(1e3 * work[f"joules_{end}"]) for end in ("low", "high")]
        operations = _short(work["operations"] / 1e6)
        rows.append((one.epsilon, outcome.name, _ms(runs), quiet, operations, *joules))
    return ReportTable(
        title="What a step costs",
        columns=(
            *("epsilon", "mechanism", "ms", "quiet runs", "operations (millions)"),
            *("mJ, 7 nm", "mJ, 45 nm"),
        ),
        rows=rows,
        note="ms: measured, the median over seeds of each run's median step. quiet runs: those in "
        "which the machine did nothing else; verdicts on time use no other. Energy is not "
        f"measured: every byte from a cache at 7 nm, to every byte from memory at 45 nm; {SOURCE}.",
    )


def _work_table(found: Sequence[AtEpsilon]) -> ReportTable:
    rows = []
    for one, outcome in _rows(found):
        counted = one.facts[outcome.name]["counted"]
        parts = ("model", "op", "noise", "cipher")
        millions = [_short(counted[f"{part}_operations"] / 1e6) for part in parts]
        rows.append((one.epsilon, outcome.name, *millions, _short(counted["bytes"] / 1e6)))
    return ReportTable(
        title="Operations of a step, in millions",
        columns=("epsilon", "mechanism", "passes", "other ops", "noise", "cipher", "MB"),
        rows=rows,
        note="passes: products of torch's forward and backward pass, from shapes. Noise is apart "
        "from the update, also where one kernel makes both; cipher: ChaCha's random words. MB: "
        "operands of all these.",
    )


def _pair_table(found: Sequence[AtEpsilon]) -> ReportTable:
    rows: list[tuple[str | int | float | None, ...]] = []
    for one in found:
        for p in one.pairs:
            gap = p.difference
            points = [_percent(v) for v in (gap.value, gap.low, gap.high)]
            ratio = None if p.ratio is None else _short(p.ratio.value)
            costs = [p.costs[cost] for cost in COSTS]
            rows.append((one.epsilon, p.first, p.second, *points, p.accuracy, ratio, *costs))
    return ReportTable(
        title="Pairs",
        columns=(
            *("epsilon", "first", "second", "accuracy gap (%)", "low", "high", "accuracy"),
            *("time ratio", *COSTS),
        ),
        rows=rows,
        note="The first beside the second, seed by seed. accuracy gap: in percentage points. "
        "identical: every seed trained the same bits. tie: the interval has no difference in it "
        "that was shown. time is unclear where too few runs were quiet or the interval is too "
        "wide. energy: both ends of the range agree.",
    )


_AXES = {
    "time": "milliseconds of a step, measured",
    "operations": "operations of a step, millions",
    "energy": "energy of a step, mJ, from 7 nm to 45 nm",
}


def _place(one: AtEpsilon, outcome: Outcome, cost: str) -> tuple[float, float, float]:
    """Return the middle, the least and the largest place of a mechanism on a cost's axis."""
    runs, work = one.runs[outcome.name], one.facts[outcome.name]
    if cost == "time":
        seconds = [1e3 * run.seconds for run in runs]
        found = frontier.interval(seconds, one.miss)
        assert found is not None
        return found.value, found.low, found.high
    if cost == "operations":
        return (work["operations"] / 1e6,) * 3
    low, high = 1e3 * work["joules_low"], 1e3 * work["joules_high"]
    return math.sqrt(low * high), low, high


def _drawable(found: Sequence[AtEpsilon], cost: str) -> bool:
    return all(_place(one, outcome, cost)[1] > 0 for one, outcome in _rows(found))


def _figure(found: Sequence[AtEpsilon], cost: str) -> Figure:
    series, boxes = [], []
    places = [_place(one, outcome, cost) for one, outcome in _rows(found)]
    thin = 1 + 0.004 * max(1.0, math.log(max(p[2] for p in places) / min(p[1] for p in places)))
    for (one, outcome), (middle, low, high) in zip(_rows(found), places, strict=True):
        accuracy = frontier.interval(outcome.accuracies, one.miss)
        assert accuracy is not None
        label = (
            outcome.name
            if len(found) == 1
            else f"{outcome.name}, epsilon {shown_bound(one.epsilon)}"
        )
        series.append(
            Series(label=label, x=[middle], y=[100 * accuracy.value], points=True),
        )
        boxes.append((low / thin, 100 * accuracy.low, high * thin, 100 * accuracy.high))
    return Figure(
        name=f"accuracy-{cost}",
        title=f"Accuracy at equal epsilon against {cost}",
        caption="Up and to the left is better. Areas: intervals of the accuracy, and "
        + {
            "time": "of the step's time over the seeds.",
            "operations": "no width, for operations are counted.",
            "energy": "the range of the energy; the point is its geometric middle.",
        }[cost],
        kind="lines",
        x_label=_AXES[cost],
        y_label="held-out accuracy (%)",
        series=series,
        boxes=boxes,
        log_x=True,
    )


def _summary(found: Sequence[AtEpsilon], runs: int) -> str:
    said = []
    for one in found:
        best = max(one.outcomes, key=lambda outcome: _median(outcome.accuracies))
        tied = [
            p.second if p.first == best.name else p.first
            for p in one.pairs
            if best.name in (p.first, p.second) and p.accuracy in (frontier.TIE, frontier.IDENTICAL)
        ]
        accuracy = _percent(_median(best.accuracies))
        text = f"At certified epsilon {shown_bound(one.epsilon)} the most accurate is {best.name} "
        text += f"with {accuracy} % (median of {runs} seeds)"
        text += f", in a tie with {', '.join(tied)}" if tied else ", shown better than all others"
        said.append(f"{text}.")
    return " ".join(said)


def _notes(
    found: Sequence[AtEpsilon], runs: int, count: int, sample: Mapping[str, Any]
) -> list[str]:
    rows = sample["public"]["heldout_rows"]
    all_runs = [run for one in found for each in one.runs.values() for run in each]
    busy = sum(not run.quiet for run in all_runs)
    said = [
        f"{runs} seeds, the fewest for {count} intervals is {frontier.needed_runs(count)}: all "
        f"hold at once with probability {1 - MISS:g}, without assumptions on the distribution.",
        f"Intervals are over seeds (noise, batches, initial parameters), for these {rows} held-out "
        f"rows, of which one is {_percent(1 / rows)} %. They say nothing of other data.",
        f"{len(all_runs)} models were trained on the same rows with known seeds: no epsilon covers "
        "this report. Use public data, or keep the report as secret as the rows.",
        "Learning rate, clipping bound and batch size are the same for all mechanisms unless "
        "NAME:lr=...:max_grad_norm=... says otherwise; one that needs others is put at a "
        "disadvantage.",
    ]
    if busy:
        said.append(
            f"The machine was busy in {busy} of {len(all_runs)} runs; their times are in no "
            "verdict."
        )
    if not all(work["model_counted"] for one in found for work in one.facts.values()):
        said.append(
            "Torch's forward and backward pass of this model do not follow from shapes and are in "
            "no count of operations and no energy."
        )
    return said


__all__ = ["report"]

"""Say in plain words what a private run guarantees so far, what that rests on, what it leaves out.

Every number comes out of ``engine.report``; this page only puts it into sentences.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..base.errors import InvalidInput
from ..privacy.accounting import shown_bound

if TYPE_CHECKING:
    from .privacy_engine import PrivacyEngine

WIDTH = 80

_NEIGHBOURS = {
    "add_remove": "with any one record added to the training data or removed from it",
    "zero_out": "with any one record of the training data blanked out",
    "replace_one": "with any one record of the training data replaced by another",
}
_DRAWS = {
    "poisson": "Each record joins each step independently, with probability {rate:.4g}",
    "fixed": "Each step draws {batch:.0f} of {records} records at random",
    "shuffled": "Batches are cut from shuffled data, which hides nobody: every record is in one "
    "step of an epoch for sure",
}
_SCOPE = {
    "released bits": "The bound covers the very bits that were released.",
    "real-number sums": "The bound is that of sums of real numbers; what rounds in floating-point "
    "sums is not covered.",
}
_LEFT_OUT = (
    "losses, accuracies and plots of training data that were looked at",
    "hyperparameters and architectures that were chosen by other runs on the same data",
    "other releases of the same data: their epsilons add up with this one",
    "a person with several records: for k of them epsilon is k times as large, and delta grows too",
)


def explain(engine: PrivacyEngine, *, delta: float | None = None) -> None:
    """Print what the engine's run guarantees so far, in plain words.

    Args:
        engine: an engine after ``make_private``.
        delta: delta of the guarantee, in (0, 1). None takes the one that the run was calibrated to,
            or else the largest power of ten below 1 / number of records.

    Raises:
        InvalidInput: no delta where none follows from the run, or one outside (0, 1).
    """
    print(explained(engine, delta=delta))


def explained(engine: PrivacyEngine, *, delta: float | None = None) -> str:
    """Return what ``explain`` prints.

    Raises:
        InvalidInput: as ``explain``.
    """
    if delta is None:
        delta = engine.known_delta
    if delta is None:
        raise InvalidInput(
            "delta",
            expected="a number in (0, 1)",
            got=None,
            remedy="Pass delta=, below 1 / number of records: no loader says how many there are.",
        )
    blocks: list[str] = []
    for paragraph in _paragraphs(engine.step.mechanism.title, engine.report(delta)):
        point = paragraph.startswith("- ")
        text = textwrap.fill(
            paragraph,
            WIDTH,
            initial_indent="  " if point else "",
            subsequent_indent="    " if point else "",
        )
        blocks += [text] if point else ["", text]
    return "\n".join(blocks[1:])


def _paragraphs(title: str, report: Mapping[str, Any]) -> Iterator[str]:
    yield f"{title} ({report['mode']}), {report['steps']} steps so far."
    yield _sampled(report)
    yield from _guarantee(report)
    certificate = report["certificate"]
    conditions = [note for note in certificate["notes"] if note.startswith("holds if ")]
    if conditions:
        yield "It holds if"
        yield from ("- " + condition.removeprefix("holds if ") for condition in conditions)
    others = [note for note in certificate["notes"] if note not in conditions]
    others += report["warnings"]
    if others:
        yield "Note that"
        yield from ("- " + other for other in dict.fromkeys(others))
    yield "It does not cover"
    yield from ("- " + fact for fact in _LEFT_OUT)


def _sampled(report: Mapping[str, Any]) -> str:
    """Say how the records of a step were drawn."""
    rate, records = report["sample_rate"], report["dataset_size"]
    if report["sampling"] == "poisson" and rate == 1.0:
        return "Every record counts as a member of every step."
    text = _DRAWS[report["sampling"]]
    return text.format(rate=rate, batch=rate * (records or 0), records=records) + "."


def _guarantee(report: Mapping[str, Any]) -> Iterator[str]:
    """State the bound and what it says of one record; or why there is none."""
    certificate, reason = report["certificate"], report["non_private"]
    if reason is not None:
        yield f"Nothing is guaranteed: {reason}."
        if report["steps"] and "epsilon_if_seed_secret" in report:
            epsilon = shown_bound(report["epsilon_if_seed_secret"], 3)
            yield f"Were the seed secret, epsilon would be {epsilon}."
        return
    epsilon, delta = certificate["epsilon"], certificate["delta"]
    if epsilon == 0:
        yield "Nothing has been released yet, so epsilon is 0."
        return
    yield f"Guarantee: epsilon <= {shown_bound(epsilon, 3)} at delta = {shown_bound(delta, 3)}."
    factor = shown_bound(math.exp(epsilon), 3) if epsilon < 700 else f"e^{shown_bound(epsilon, 3)}"
    yield (
        f"Whatever anybody looks for in the trained model would be found at most {factor} times as "
        f"often {_NEIGHBOURS[certificate['relation']]}, but for a probability of "
        f"{shown_bound(delta, 3)}."
    )
    if float(report["epsilon_claimed"]) != epsilon:
        claimed = shown_bound(report["epsilon_claimed"], 3)
        yield f"Claimed: epsilon = {claimed} ({report['claim']})."
    scope = certificate["certified_for"]
    yield _SCOPE.get(scope, f"The bound is for {scope}.")


__all__ = ["explain", "explained"]

"""Report the audit of a loop: movements by attack and by step, state, checks."""

from __future__ import annotations

from ..base.report import Figure, Report, ReportTable, Series
from ..privacy.accounting.shown import LowerBound, UpperBound, shown_bound, shown_exactly
from .loop import Attack, LoopFindings, StepMovement

ANSWERS = {True: "passed", False: "FAILED", None: "not asked"}


def report(findings: LoopFindings) -> Report:
    """Return the report of an audited training loop.

    Args:
        findings: result of ``subjects.loop.audit_loop``.
    """
    tables = (
        _attacks(findings),
        _steps(findings),
        _state(findings),
        _likelihood(findings),
        _checks(findings),
    )
    figure = _figure(findings)
    return Report(
        name="audit-loop",
        title=f"Audit of the training loop {findings.subject}",
        summary=findings.sentence,
        facts=findings.to_dict(),
        tables=tuple(table for table in tables if table.rows),
        figures=() if figure is None else (figure,),
        notes=_notes(findings),
        kind="audit",
    )


def _attacks(findings: LoopFindings) -> ReportTable:
    rows: list[list[str | int | float | None]] = []
    for attack in findings.attacks:
        held, other = attack.largest(held=True), attack.largest(held=False)
        rows.append(
            [
                *(attack.name, attack.record, _noise(attack), attack.bound),
                *((None, None) if held is None else (LowerBound(held.moved), held.step)),
                "" if held is None else held.parameter,
                None if other is None else LowerBound(other.moved),
            ]
        )
    return ReportTable(
        title="How far one record moves a clipped sum, in units of C",
        columns=(
            *("record", "index", "noise", "certified ≤", "moved", "at step"),
            *("most in", "steps without it"),
        ),
        rows=rows,
        note="Two runs that release the same, with and without the record. A movement in steps "
        "whose batch does not hold it is certified to be 0.",
    )


def _worst(findings: LoopFindings) -> Attack | None:
    """Return the attack that comes nearest to a bound, or exceeds one most."""

    def ratio(step: StepMovement) -> float:
        return step.moved / step.allowed if step.allowed else step.moved

    return max(
        (attack for attack in findings.attacks if attack.steps),
        key=lambda attack: max(ratio(step) for step in attack.steps),
        default=None,
    )


def _steps(findings: LoopFindings) -> ReportTable:
    attack = _worst(findings)
    rows = [
        [
            *(step.step, step.size, "yes" if step.held else "no"),
            *(LowerBound(step.moved), UpperBound(step.allowed)),
            *(step.parameter if step.moved else "", "kept" if step.kept else "EXCEEDED"),
        ]
        for step in (() if attack is None else attack.steps)
    ]
    name = "" if attack is None else f"{attack.name}, noise {_noise(attack)}"
    return ReportTable(
        title=f"Step by step: {name}",
        columns=("step", "samples", "holds the record", "moved", "allowed", "most in", "bound"),
        rows=rows,
        note="Allowed: the certified movement, and rounding inside the model.",
    )


def _state(findings: LoopFindings) -> ReportTable:
    found: dict[str, tuple[str, str]] = {}
    for attack in findings.attacks:
        for name, where in (attack.remembered or {}).items():
            found.setdefault(name, (where, f"{attack.name}, noise {_noise(attack)}"))
    return ReportTable(
        title="State that differs without the record",
        columns=("name", "held by", "first seen with"),
        rows=[[name, where, attack] for name, (where, attack) in found.items()],
        note="Looked at after a step whose batch does not hold the record, and after main().",
    )


def _likelihood(findings: LoopFindings) -> ReportTable:
    ratio = findings.likelihood
    rows: list[list[str | float | None]] = []
    if ratio is not None:
        facts = ratio.to_dict()
        rows = [
            [
                *("certified", "at most"),
                *(UpperBound(ratio.certified), UpperBound(facts["epsilon_certified"])),
            ],
            [
                *("shown by this run's releases", "at least"),
                *(LowerBound(ratio.shown), LowerBound(facts["epsilon_shown"])),
            ],
        ]
    return ReportTable(
        title="The likelihood ratio of the releases, if it is known which batches held the record",
        columns=("number", "bounds it", "mu", f"epsilon at delta {shown_exactly(findings.delta)}"),
        rows=rows,
        note="Computed from the movements and the law of the noise along one run, not counted; "
        "without amplification by sampling.",
    )


def _checks(findings: LoopFindings) -> ReportTable:
    failed_first = sorted(findings.checks, key=lambda check: check.passed is not False)
    return ReportTable(
        title="Checks",
        columns=("question", "answer", "what was seen"),
        rows=[[check.name, ANSWERS[check.passed], check.text] for check in failed_first],
    )


def _figure(findings: LoopFindings) -> Figure | None:
    if not findings.attacks:
        return None
    series = [
        Series(
            label=f"{attack.name}, noise {_noise(attack)}",
            x=[step.step for step in attack.steps if step.held],
            y=[step.moved for step in attack.steps if step.held],
            points=True,
        )
        for attack in findings.attacks
    ]
    bound = Series(label="certified", x=[1, max(findings.steps, 2)], y=[1.0, 1.0])
    return Figure(
        name="movement",
        title=f"What one record does to the clipped sums of {findings.subject}",
        caption="Distance of the clipped sums with and without one record, in steps whose batch "
        "holds it. Points above the line contradict the certificate.",
        kind="lines",
        x_label="step",
        y_label="movement in units of C",
        series=[bound, *series],
    )


def _notes(findings: LoopFindings) -> tuple[str, ...]:
    notes = [*findings.notes]
    if findings.verdict == "refused":
        return (*notes, "Nothing was released, so nothing was left to audit.")
    if findings.epsilon is not None:
        sampling = findings.sampling.get("sampling")
        notes.append(
            f"An unobserved run of these {findings.steps} steps would certify epsilon "
            f"{shown_bound(findings.epsilon)} at delta {shown_exactly(findings.delta)} ({sampling} "
            "sampling); the runs of this audit certify nothing."
        )
    notes += [
        "An audit bounds from below: that nothing was found in the steps and records that were "
        "tried is no proof.",
        f"The whole script ran {findings.runs} times, {findings.seconds:.3g} s together. What it "
        "reads besides the loader (statistics of the whole data set, other files) is the same in "
        "all runs and was not audited.",
    ]
    return tuple(notes)


def _noise(attack: Attack) -> str:
    return "on" if attack.noise else "off"


__all__ = ["report"]

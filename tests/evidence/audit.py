"""The audit against the corpus: all that is broken is caught, nothing that is sound is blamed.

Four tables, in ``benchmarks/results/audit.json`` and ``audit.md``:

* every broken release: which layers speak against it, what is shown, the truth, seconds;
* false alarms of so many audits of sound releases, each with another seed;
* power: how often a claim that is wrong by a factor sqrt 2 is caught with few runs;
* tightness: what is shown of sound kernels with 10^5 and 10^6 runs over what there is.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import torch

from dpkern.audit.auditing import run as audit
from dpkern.audit.findings import Findings
from dpkern.audit.subject import Pair
from dpkern.privacy.accounting import shown_lower_bound
from tests.audit.audit_corpus import BROKEN, SOUND, Case
from tests.audit.audit_corpus.broken.sources import CASES as SOURCES
from tests.audit.audit_corpus.kit import Release, fixed, rows
from tests.audit.audit_corpus.sound import gaussian, local
from tests.evidence.__main__ import machine, plain

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FIRST_SEED = 1000
CONTROL_RUNS = 4_000
"""Maximum of runs of a control audit; the chance of a false alarm is bounded for every number."""
SLOWEST = 5.0
POWER_RUNS, POWER_AUDITS = (2_000, 5_000), 60
TIGHT = {10**5: 0.95, 10**6: 0.98}
"""Least share of mu that must be shown with so many runs."""


def shown(found: Findings) -> float:
    """The lower bound in the unit of the claim."""
    return found.epsilon_lower if found.claimed.mu is None else found.mu_lower


def speaking(found: Findings) -> list[str]:
    """Layers that speak against the subject."""
    layers = {check.layer for check in found.failed}
    layers |= {test.layer for test in found.against(found.claimed)}
    return sorted(layers)


def broken(case: Case) -> dict[str, Any]:
    """One audit of a broken release."""
    found = audit(case.subject, runs=case.runs, seed=FIRST_SEED)
    layers = speaking(found)
    return {
        "name": case.subject.name,
        "source": case.source,
        "claimed": found.claimed.text,
        "truth": case.truth,
        "shown": shown(found),
        "layers": layers,
        "asked of": list(case.layers),
        "failed": [check.name for check in found.failed],
        "caught": set(case.layers) <= set(layers)
        and set(case.fails) <= {check.name for check in found.failed},
        "runs": case.runs,
        "seconds": round(found.seconds, 3),
    }


def controls(n: int) -> dict[str, Any]:
    """``n`` audits of sound releases, one after the other, each with another seed."""
    alarms: list[str] = []
    above = 0
    started = time.perf_counter()
    for k in range(n):
        case = SOUND[k % len(SOUND)]
        found = audit(case.subject, runs=min(case.runs, CONTROL_RUNS), seed=FIRST_SEED + k)
        if not found.passed:
            alarms.append(f"{case.subject.name}, seed {FIRST_SEED + k}: {found.sentence}")
        above += shown(found) > case.truth
    return {
        "audits": n,
        "controls": len(SOUND),
        "runs": CONTROL_RUNS,
        "false_alarms": len(alarms),
        "bounds above the truth": above,
        "alarms": alarms,
        "seconds": round(time.perf_counter() - started, 1),
    }


def power(audits: int) -> list[dict[str, Any]]:
    """GReDP's claim, which is wrong by sqrt 2, with few runs; only the canaries look."""
    case = next(case for case in SOURCES if case.subject.name == "GReDP complex")
    table = []
    for runs in POWER_RUNS:
        found = [
            audit(case.subject, runs=runs, seed=FIRST_SEED + k, layers=("canary",))
            for k in range(audits)
        ]
        caught = sum(one.contradicts_claim for one in found)
        table.append({"runs": runs, "audits": audits, "caught": caught})
    return table


def one_number() -> list[Case]:
    """Sound releases of one number: all runs show one thing."""
    record = Pair(
        name="record",
        without=torch.zeros(0, 1, dtype=torch.float64),
        present=rows([1.0]),
    )
    kernels = {
        "torch float64 normal": (gaussian.dpsgd, 2.0**-20),
        "dpkern float tier": (gaussian.float_kernel, None),
        "dpkern exact tier": (gaussian.exact_kernel, None),
    }
    cases = [
        Case(
            subject=Release(
                name=name,
                claimed=gaussian.CLAIM,
                certified=gaussian.CLAIM,
                mechanism=mechanism,
                neighbours=fixed(record),
                sd=gaussian.SIGMA,
                grid=grid,
            ),
            truth=gaussian.MU,
            source="control",
        )
        for name, (mechanism, grid) in kernels.items()
    ]
    alone = ("Laplace", "randomized response", "randomized response of ten")
    return cases + [case for case in local.CASES if case.subject.name in alone]


def tightness() -> list[dict[str, Any]]:
    """Lower bound over truth, by runs."""
    table = []
    for runs, asked in TIGHT.items():
        for case in one_number():
            found = audit(case.subject, runs=runs, seed=FIRST_SEED, layers=("canary", "likelihood"))
            gaussian_claim = found.claimed.mu is not None
            table.append(
                {
                    "name": case.subject.name,
                    "unit": "mu" if gaussian_claim else "epsilon",
                    "runs": runs,
                    "truth": case.truth,
                    "shown": shown(found),
                    "ratio": shown(found) / case.truth,
                    "asked": asked if gaussian_claim else None,
                    "seconds": round(found.seconds, 3),
                }
            )
    return table


def run(n: int = 500) -> dict[str, Any]:
    """Every table; ``n`` control audits."""
    started = time.perf_counter()
    # One thread, so that seconds are those of one core.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    caught = [broken(case) for case in BROKEN]
    sound = controls(n)
    figures = {
        "broken": caught,
        "controls": sound,
        "power": power(min(n, POWER_AUDITS)),
        "tightness": tightness(),
    }
    torch.set_num_threads(threads)
    passed = (
        all(row["caught"] and row["seconds"] < SLOWEST for row in caught)
        and sound["false_alarms"] == sound["bounds above the truth"] == 0
        and all(row["ratio"] >= (row["asked"] or 0) for row in figures["tightness"])
    )
    result = {"passed": passed, "figures": figures}
    write(result, time.perf_counter() - started)
    return result | {"seconds": round(time.perf_counter() - started, 1)}


def number(value: float | None) -> str:
    """Three digits, or a word."""
    if value is None:
        return "-"
    return "unbounded" if math.isinf(value) else f"{value:.3f}"


def markdown(figures: dict[str, Any]) -> str:
    """The tables for people."""
    lines = [
        "# Audit of the corpus",
        "",
        "By `python -m tests.evidence --only audit`; confidence 0.999 of each audit, one thread.",
        "",
        "## Broken releases",
        "",
        "Shown and truth are mu for a claim of mu, epsilon for a claim of epsilon. Where the plan",
        "speaks, the release is sound and something false is said of it, which no output can show.",
        "",
        "| release | claimed | shown | truth | layers | runs | s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in figures["broken"]:
        cells = (
            row["name"],
            row["claimed"],
            shown_lower_bound(row["shown"], 4),
            number(row["truth"]),
        )
        layers = ", ".join(row["layers"]) or "NONE"
        lines.append(f"| {' | '.join(cells)} | {layers} | {row['runs']} | {row['seconds']:.2f} |")
    sound = figures["controls"]
    lines += [
        "",
        "## Sound releases",
        "",
        f"{sound['false_alarms']} false alarms in {sound['audits']} audits of {sound['controls']} "
        f"controls with {sound['runs']} runs, and {sound['bounds above the truth']} lower bounds "
        f"above the truth; {sound['seconds']} s together.",
        "",
        "## Power: a claim that is wrong by sqrt 2 (GReDP)",
        "",
        "| runs | caught | audits |",
        "|---|---|---|",
    ]
    lines += [f"| {row['runs']} | {row['caught']} | {row['audits']} |" for row in figures["power"]]
    lines += [
        "",
        "## Tightness",
        "",
        "| release of one number | runs | shown | truth | ratio | asked | s |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['name']} | {row['runs']} | {row['unit']} {shown_lower_bound(row['shown'], 4)} | "
        f"{number(row['truth'])} | {row['ratio']:.3f} | {number(row['asked'])} | "
        f"{row['seconds']:.2f} |"
        for row in figures["tightness"]
    ]
    return "\n".join(lines) + "\n"


def write(result: dict[str, Any], seconds: float) -> None:
    """``audit.json`` and ``audit.md``."""
    content = {"machine": machine(), "seconds": round(seconds, 1)} | plain(result)
    (RESULTS / "audit.json").write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    (RESULTS / "audit.md").write_text(markdown(result["figures"]))


def headline(figures: dict[str, Any]) -> str:
    """One line for the table."""
    caught = sum(row["caught"] for row in figures["broken"])
    sound = figures["controls"]
    slowest = max(row["seconds"] for row in figures["broken"])
    return (
        f"{caught} of {len(figures['broken'])} broken caught, slowest {slowest:.2f} s; "
        f"{sound['false_alarms']} false alarms in {sound['audits']}"
    )

"""The precision attack: what the bits of noisy floats give away, here and in other libraries.

The event is "the output is no multiple of 2^-24" (float32), or what an audit learns by itself.
Audits count fresh runs at 99.9 % confidence; two processes check that they share their noise.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from dpkern.audit import bits
from dpkern.audit import run as run_audit
from dpkern.audit.bounds import epsilon_lower, rate_upper
from dpkern.audit.subject import Subject
from dpkern.audit.subjects.generator import Generator
from dpkern.audit.subjects.peer import LIBRARIES, Peer
from dpkern.privacy.accounting import shown_bound, shown_lower_bound
from tests.ops.lattice_noise import Lattice

CONFIDENCE, DELTA = 0.999, 1e-5
MULTIPLIER = 1.1
GRID = -24
DTYPES = (torch.float32, torch.float64)
PIECE = 500_000


def event(library: str, n: int) -> dict[str, Any]:
    """The one event that is fixed beforehand, counted on both sides."""
    subject = Peer(library=library, noise_multiplier=MULTIPLIER)
    pair = subject.pairs(None)[0]
    counts = []
    for side, data in enumerate((pair.without, pair.present)):
        seeds = range(side, 2 * -(-n // PIECE), 2)
        sizes = [min(PIECE, n - PIECE * k) for k in range(len(seeds))]
        outputs = (subject.release(data, m, s) for m, s in zip(sizes, seeds, strict=True))
        counts.append(sum(int((bits.Precision()(out) < GRID).sum()) for out in outputs))
    # "Present" is said on the grid: a false negative is a fine output with the record.
    upper = [float(rate_upper(k, n, (1 - CONFIDENCE) / 2)) for k in (n - counts[0], counts[1])]
    return {
        "probability without": counts[0] / n,
        "count with": counts[1],
        "epsilon_lower": epsilon_lower(*upper, DELTA),
    }


def audited(subject: Subject, n: int) -> dict[str, Any]:
    """An audit of the bits alone."""
    found = run_audit(
        subject, runs=n, confidence=CONFIDENCE, delta=DELTA, layers=("bits",), seed=2026
    )
    return {
        "contradicted": found.contradicts_claim,
        "epsilon_lower": found.epsilon_lower,
        "claimed": found.claimed.epsilon(DELTA),
        "seconds": found.seconds,
    }


def generators() -> dict[str, Any]:
    """Every check of the generator on this machine, of a step's words, and of two processes."""
    return {
        check.name: {"passed": str(check.passed), "text": check.text}
        for check in Generator().checks(quick=False)
    }


def peers(n: int) -> dict[str, Any]:
    """Every library in both dtypes."""
    return {
        f"{library}, {str(dtype).removeprefix('torch.')}": audited(
            Peer(library=library, noise_multiplier=MULTIPLIER, dtype=dtype), n
        )
        for library in LIBRARIES
        for dtype in DTYPES
    }


def ours(n: int) -> dict[str, Any]:
    """Our noise at the same number of runs."""
    return {
        f"dpkern, {str(dtype).removeprefix('torch.')}": audited(
            Lattice(noise_multiplier=MULTIPLIER, dtype=dtype), n
        )
        for dtype in DTYPES
    }


def run(n: int = 2_000_000) -> dict[str, Any]:
    """Every peer is contradicted, nothing of ours is, and every check that could be asked holds."""
    started = time.perf_counter()
    figures: dict[str, Any] = {
        "event": {library: event(library, n) for library in ("opacus", "opacus secure_mode")},
        "peers": peers(n),
        "ours": ours(n),
        "generator": generators(),
    }
    passed = (
        all(found["contradicted"] for found in figures["peers"].values())
        and not any(found["contradicted"] for found in figures["ours"].values())
        and not any(found["passed"] == "False" for found in figures["generator"].values())
    )
    seconds = round(time.perf_counter() - started, 1)
    return {"passed": passed, "figures": figures, "seconds": seconds}


def headline(figures: dict[str, Any]) -> str:
    """One line for the table."""
    seen = {name: found["epsilon_lower"] for name, found in figures["event"].items()}
    events = ", ".join(
        f"{name} epsilon >= {shown_lower_bound(bound)}" for name, bound in seen.items()
    )
    worst = max(found["epsilon_lower"] for found in figures["ours"].values())
    claimed = min(found["claimed"] for found in figures["ours"].values())
    return f"{events}; dpkern >= {shown_lower_bound(worst)} of {shown_bound(claimed)}"

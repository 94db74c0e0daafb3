"""Audits of everything that releases: kernels on every backend here, every mechanism in both modes.

Corrected modes must pass. Published ones are contradicted where ``CONTRADICTED`` says that their
source claims too much; the others make true claims. Runs of a step cost some 0.2 ms, rows of a
kernel a microsecond: so many are run of each.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dpkern.audit import run as run_audit
from dpkern.audit.findings import Findings
from dpkern.audit.subject import Pair, Subject
from dpkern.audit.subjects import catalogue
from dpkern.audit.subjects.backend import here
from dpkern.audit.subjects.kernel import OPS, NoiseKernel
from dpkern.audit.subjects.local import CoefficientSubject, ReleasedRecordSubject, Response
from dpkern.audit.subjects.peer import Peer
from dpkern.audit.subjects.step import PrivateStep
from dpkern.privacy.mechanisms import DPSGD, LaplaceSGD

CONFIDENCE = 0.999
ROWS = {"cpu": 100_000, "numba": 20_000, "reference": 20_000}
"""Of a kernel, by backend; of emulated ones, which run a thread at a time, ``EMULATED``."""
EMULATED = 5000
STEPS = 500
"""Runs of what takes a call each."""
MORE = {"laplace_sgd, published": 5000}
"""16 coordinates of an L2 ball under Laplace noise look like mu 1, which only tails tell from
epsilon 1."""

CONTRADICTED = (
    "directional",
    "gredp",
    "laplace_sgd",
    "pruned",
    "spectral_dp",
    "spof",
    "fm",
    "spof_training",
    "fm_training",
    "output_sgd",
    "adlm",
    "ilm",
)
"""Mechanisms with a printed claim that is false and seen to be so with so few runs."""

STATISTICAL = ("covariance", "canary", "likelihood")


def line(found: Findings, *, contradicted: bool = False) -> dict[str, Any]:
    """Return the facts of an audit that are kept."""
    mu = found.certified.mu
    return {
        "claimed": found.claimed.text,
        "certified": found.certified.text,
        "mu_lower": found.mu_lower,
        "epsilon_lower": found.epsilon_lower,
        "tightness": found.mu_lower / mu if mu else None,
        "contradicts_claim": found.contradicts_claim,
        "contradicts_certificate": found.contradicts_certificate,
        "failed": [f"{check.name}: {check.text}" for check in found.failed],
        "runs": found.runs,
        "seconds": round(found.seconds, 2),
        "as_expected": found.contradicts_claim == contradicted
        and not found.contradicts_certificate
        and not found.failed,
    }


def kernels() -> Iterator[tuple[str, dict[str, Any]]]:
    """Both kernels, both laws, both tiers, every backend, with the checks of their bits."""
    for backend in here():
        for op in OPS:
            for law in ("gaussian", "laplace"):
                for dtype in (torch.int32, torch.float32):
                    subject = NoiseKernel(op=op, distribution=law, dtype=dtype, backend=backend)
                    rows = ROWS.get(backend, EMULATED)
                    layers = (*STATISTICAL, "bits") if rows > EMULATED else STATISTICAL
                    audited = run_audit(subject, runs=rows, confidence=CONFIDENCE, layers=layers)
                    yield subject.name, line(audited)


def mechanisms() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every mechanism in both modes, with its own checks."""
    for name in catalogue.names():
        for mode in ("corrected", "published"):
            subject = catalogue.make(name, mode=mode)
            if isinstance(subject, (NoiseKernel, Peer)):  # peers: ``audit_precision``
                continue
            contradicted = mode == "published" and name in CONTRADICTED
            title = f"{name}, {mode}"
            found = _of(subject, MORE.get(title, STEPS))
            yield title, line(found, contradicted=contradicted)


def steps() -> Iterator[tuple[str, dict[str, Any]]]:
    """A step on the other backends, and its tiers, clippings and numbers of releases."""
    noise: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
    shapes = ((4,), (2, 2))
    for fused in (False, True):
        for kind in (DPSGD, LaplaceSGD):
            yield _named(
                PrivateStep(mechanism=kind(**noise), shapes=shapes, backend="numba", fused=fused)
            )
    # The reference takes milliseconds for what the kernels do in microseconds: one row of it.
    alone = PrivateStep(mechanism=DPSGD(**noise), shapes=((2,),), backend="reference", fused=True)
    yield alone.name, line(run_audit(alone, runs=200, layers=STATISTICAL)) | {"fused": True}
    for fields in (
        {"arithmetic": "float"},
        {"clipping": "per_layer"},
        {"clipping": "per_layer", "arithmetic": "float"},
        {"clipping": "group", "groups": (0, 1)},
        {"clipping": "automatic"},
    ):
        yield _named(
            PrivateStep(mechanism=DPSGD(**noise, **fields), shapes=shapes, steps=2),
            " ".join(str(value) for value in fields.values()),
        )


@dataclass(frozen=True, kw_only=True)
class OnePair(PrivateStep):
    """One pair of neighbours, for backends that take milliseconds here."""

    def pairs(self, weakest: torch.Tensor | None) -> Sequence[Pair]:
        # Laplace noise hides a shift that is shared among all coordinates.
        wanted = "coordinate" if self.plan.distribution == "laplace" else "uniform"
        return [pair for pair in super().pairs(weakest) if pair.name == wanted]


def backends() -> Iterator[tuple[str, dict[str, Any]]]:
    """A step of every mechanism, corrected, on every backend that is not dpkern's choice."""
    for backend in here():
        for name in catalogue.names():
            subject = catalogue.make(name)
            if backend == "cpu" or not isinstance(subject, PrivateStep):
                continue
            slow = backend not in ("cpu", "numba")
            if backend == "reference":  # milliseconds for every 512 coordinates of a parameter
                subject = catalogue.make(name, shapes=subject.shapes[:1])
            subject = (OnePair if slow else PrivateStep)(
                mechanism=subject.mechanism, shapes=subject.shapes, backend=backend
            )
            found = run_audit(subject, runs=STEPS, confidence=CONFIDENCE, layers=STATISTICAL)
            yield subject.name, line(found)


def _named(subject: Subject, more: str = "") -> tuple[str, dict[str, Any]]:
    fused = getattr(subject, "fused", False)
    return ", ".join(filter(None, (subject.name, more))), line(_of(subject)) | {"fused": fused}


def _of(subject: Subject, steps: int = STEPS) -> Findings:
    quick = isinstance(subject, (CoefficientSubject, ReleasedRecordSubject, Response))
    return run_audit(
        subject,
        runs=ROWS["cpu"] if quick else steps,
        confidence=CONFIDENCE,
        quick=True,
        layers=(*STATISTICAL, "bits", "sensitivity") if quick else (*STATISTICAL, "sensitivity"),
    )


def tightness(n: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the share of the certified mu that is shown, at a tenth of n and at n runs."""
    for runs in (n // 10, n):
        for op in OPS:
            for dtype in (torch.int32, torch.float32):
                subject = NoiseKernel(op=op, dtype=dtype)
                found = run_audit(subject, runs=runs, confidence=CONFIDENCE, layers=STATISTICAL)
                yield f"{subject.name}, {runs} runs", line(found)


def run(n: int = 1_000_000) -> dict[str, Any]:
    """All verdicts are as expected, and tightness is at least .95 at 10^5 and .98 at 10^6 runs."""
    started = time.perf_counter()
    figures = {
        "tightness": dict(tightness(n)),
        "kernels": dict(kernels()),
        "mechanisms": dict(mechanisms()),
        "steps": dict(steps()),
        "backends": dict(backends()),
    }
    every = [found for part in figures.values() for found in part.values()]
    asked = {100_000: 0.95, 1_000_000: 0.98}
    passed = all(found["as_expected"] for found in every) and all(
        found["tightness"] >= asked.get(found["runs"], 0.0)
        for found in figures["tightness"].values()
    )
    seconds = round(time.perf_counter() - started, 1)
    return {"passed": passed, "figures": figures, "seconds": seconds}


def headline(figures: dict[str, Any]) -> str:
    """One line for the table."""
    shown = [f"{found['tightness']:.3f}" for found in figures["tightness"].values()]
    parts = (figures[name].values() for name in ("kernels", "mechanisms", "steps", "backends"))
    every = [found for part in parts for found in part]
    right = sum(found["as_expected"] for found in every)
    return f"tightness {', '.join(shown)}; {right} of {len(every)} verdicts as expected"

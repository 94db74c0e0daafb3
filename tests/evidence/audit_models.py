"""Whole engine steps of LeNet-5 and of a small transformer against their certificates.

Usage: ``python -m tests.evidence.audit_models [--runs N] [--workers W] [--exact]``, which writes
``benchmarks/results/audit-models.json``; also a module of ``python -m tests.evidence``.

The loss is magnified so that the canary is at the bound of every clip group. Each step must keep
its certificate (mu 1), and the same counts must contradict two wrong claims: mu 0.8, and for
per-layer clipping what one layer would cost alone.
"""

from __future__ import annotations

import json
import math
import os
import time
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import nn

from dpkern.audit.auditing import run as audit
from dpkern.audit.claims import GaussianDP
from dpkern.audit.findings import Findings
from dpkern.audit.subjects.model import ModelStep
from dpkern.engine.demo import models
from dpkern.privacy.mechanisms import DPSGD

from .__main__ import RESULTS, machine, plain

OUT = RESULTS.with_name("audit-models.json")
RUNS = 10_000
ROWS = {"lenet5": (28, 28), "transformer": (8, 8)}
CLIPPINGS = ("flat", "per_layer")
TOO_SMALL = GaussianDP(0.8)
CASES = [(name, clip) for name in ROWS for clip in CLIPPINGS]
LAYERS = ("covariance", "canary", "sensitivity")


def subject(name: str, clipping: str, arithmetic: str, *, batch: int = 4) -> ModelStep:
    """A step of noise multiplier 1 on a few records of public random numbers."""
    rows = ROWS[name]
    module = models.build(name, row_shape=rows, classes=10)
    count = sum(1 for _ in module.parameters())
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(batch + 1, *rows, generator=generator)
    y = torch.arange(batch + 1) % 10
    bounds: Any = 1.0 if clipping == "flat" else [1 / math.sqrt(count)] * count
    return ModelStep(
        module=module,
        loss=nn.CrossEntropyLoss(),
        batch=(x[:batch], y[:batch]),
        canary=(x[batch:], y[batch:]),
        mechanism=DPSGD(
            noise_multiplier=1.0, max_grad_norm=bounds, clipping=clipping, arithmetic=arithmetic
        ),
        magnified=1000.0,
        label=name,
    )


def one(name: str, clipping: str, arithmetic: str, runs: int, workers: int) -> dict[str, Any]:
    """The audit of one case, with what its counts must contradict."""
    made = subject(name, clipping, arithmetic)
    began = time.perf_counter()
    found: Findings = audit(made, runs=runs, workers=workers, layers=LAYERS)
    seconds = time.perf_counter() - began
    layers = len(made.mechanism.plan([p.shape for p in made.module.parameters()]).groups)
    caught = {"mu 0.8": bool(found.against(TOO_SMALL))}
    if layers > 1:
        caught["one layer alone"] = bool(found.against(GaussianDP(1 / math.sqrt(layers))))
    return {
        "parameters": sum(p.numel() for p in made.module.parameters()),
        "groups": layers,
        "passed": found.passed,
        "verdict": found.sentence,
        "certified_mu": found.certified.mu,
        "mu_lower": found.mu_lower,
        "tightness": found.mu_lower / (found.certified.mu or math.inf),
        "epsilon_certified": found.certified.epsilon(found.delta),
        "epsilon_lower": found.epsilon_lower,
        "delta": found.delta,
        "confidence": found.confidence,
        "runs": runs,
        "steps": found.total_runs,
        "seconds": round(seconds, 1),
        "ms_per_step": round(1e3 * workers * seconds / found.total_runs, 2),
        "least_eigenvalue": found.spectrum[0],
        "checks": {check.name: check.passed for check in found.checks},
        "caught": caught,
    }


def run(
    n: int = RUNS, *, workers: int | None = None, arithmetics: tuple[str, ...] = ("float",)
) -> dict[str, Any]:
    """Every case; a claim that is 20 % too small needs 10^4 runs to be contradicted."""
    workers = workers or os.cpu_count() or 1
    console = Console(stderr=True)
    figures = {}
    for name, clipping in CASES:
        for arithmetic in arithmetics:
            label = f"{name} {clipping} {arithmetic}"
            figures[label] = one(name, clipping, arithmetic, n, workers)
            console.print(f"{label}: {figures[label]['verdict']} {figures[label]['seconds']} s")
    must = ("mu 0.8", "one layer alone") if n >= RUNS else ("one layer alone",)
    passed = all(
        case["passed"] and all(case["caught"].get(name, True) for name in must)
        for case in figures.values()
    )
    return {"passed": passed, "figures": figures}


def main(
    runs: Annotated[int, typer.Option(help="counted runs of each side")] = RUNS,
    workers: Annotated[int | None, typer.Option(help="processes; all cores by default")] = None,
    exact: Annotated[bool, typer.Option(help="integer sums too")] = False,
) -> None:
    """Run and write."""
    arithmetics = ("float", "exact") if exact else ("float",)
    result = run(runs, workers=workers, arithmetics=arithmetics)
    content = {"machine": machine(), **plain(result)}
    OUT.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    if not result["passed"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

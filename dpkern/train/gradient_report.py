"""Report a run with private gradients: its epochs, its curves, its table.

Only parameters and noised values are covered by epsilon. What else was seen while training stands
under ``diagnostics`` and is left out unless it was requested.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..privacy.accounting import shown_bound, shown_lower_bound
from ..privacy.accounting.shown import LowerBound, ShownBound, UpperBound
from . import step_costs
from .display import SummaryTable, upper
from .report import FigureSpec

DIAGNOSTICS_NOTE = "not covered by epsilon"


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """State after an epoch.

    ``epsilon`` is the certified one, infinite without privacy or with a known seed, and None
    where it was not computed; ``epsilon_if_seed_secret`` is given for seeded runs.
    """

    epoch: int
    step: int
    heldout_loss: float
    heldout_accuracy: float
    epsilon: float | None = None
    epsilon_if_seed_secret: float | None = None

    @property
    def shown_epsilon(self) -> float | None:
        """The epsilon worth plotting; the caller labels it."""
        secret = self.epsilon_if_seed_secret
        return self.epsilon if secret is None else secret


def drawn(summary: Mapping[str, Any], history: Sequence[Epoch]) -> FigureSpec:
    """Draw held-out loss, held-out accuracy and epsilon: certified, claimed elsewhere, audited."""
    model, source = summary["options"]["model"], summary["public"]["data"]
    seeded = summary["options"]["unsafe_seed"] is not None
    epsilon = "epsilon if the seed were secret" if seeded else "certified epsilon"
    levels: dict[str, ShownBound] = {}
    claimed, audited = summary["epsilon_claimed"], summary["epsilon_audited"]
    if summary["mode"] == "published" and isinstance(claimed, float):
        levels["claimed"] = UpperBound(claimed)
    if isinstance(audited, float):
        as_claimed = summary["audit"]["epsilon_if_gaussian"]
        level = LowerBound(audited if as_claimed is None else as_claimed)
        levels |= {"audited": level} if level > 0 else {}  # a line at zero says nothing
    delta = shown_bound(summary["delta"])
    baselines = {"most frequent label": float(summary["majority_accuracy"])}
    if summary["non_private_ceiling"] is not None:
        baselines["not private"] = float(summary["non_private_ceiling"]["test_accuracy"])
    return FigureSpec(
        baselines={"held-out accuracy": baselines},
        levels={epsilon: levels},
        title=f"{model} on {source}, {summary['mechanism']}, delta = {delta}",
        panels={
            "held-out loss": [epoch.heldout_loss for epoch in history],
            "held-out accuracy": [epoch.heldout_accuracy for epoch in history],
            epsilon: [epoch.shown_epsilon for epoch in history],
        },
    )


def shown(summary: Mapping[str, Any]) -> SummaryTable:
    """Return the rows of its table that only such a run has."""
    public, isa = summary["public"], summary["environment"].get("isa")
    ran_by = (summary["backend"] or summary["device"], isa)
    arithmetic = [part for part in (*ran_by, summary["arithmetic"]) if part]
    last: list[tuple[str, Any]] = []
    audit = summary["audit"]
    if isinstance(audit, dict):
        last += [("audit", _audit(audit)), ("verdict", audit["verdict"])]
    if "diagnostics" in summary:
        losses = summary["diagnostics"]["training_loss"]
        if losses:
            last.append(("training loss", f"{losses[-1]:.4f} ({DIAGNOSTICS_NOTE})"))
        nonfinite = summary["diagnostics"]["nonfinite_samples"]
        last.append(("non-finite samples", f"{nonfinite} ({DIAGNOSTICS_NOTE})"))
    return SummaryTable(
        title=f"{summary['options']['model']} on {public['data']}",
        results=(
            (
                "held-out accuracy",
                f"{summary['test_accuracy']:.2%} of {public['heldout_rows']} rows "
                f"(their most frequent label: {summary['majority_accuracy']:.2%})",
            ),
            *_ceiling(summary),
        ),
        settings=(
            ("relation, sampling", f"{summary['relation']}, {summary['sampling']}"),
            ("accountant", summary["accountant"]),
            ("certified for", summary["certified_for"]),
            ("mechanism", f"{summary['mechanism']}, {summary['mode']}, {summary['clipping']} clip"),
            *_covered(summary),
            *_ranges(summary),
            ("noise multiplier", upper(summary["noise_multiplier"])),
            ("max grad norm", summary["max_grad_norm"]),
            ("sample rate", f"{summary['sample_rate']:.5g} of {public['training_rows']} rows"),
            ("steps", summary["steps"]),
            ("noise", f"{summary['noise']['cipher']}, key from {summary['noise']['key']}"),
            ("backend, arithmetic", ", ".join(arithmetic)),
            *step_costs.rows(summary),
        ),
        data=summary["data_warnings"],
        last=last,
    )


def _ceiling(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the row of the same run without privacy."""
    found = summary["non_private_ceiling"]
    if found is None:
        return []
    return [("without privacy", f"{found['test_accuracy']:.2%} ({found['note']})")]


def _covered(summary: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the row of mechanisms of the frequency domain."""
    covered = summary.get("frequency_domain")
    return [] if covered is None else [("frequency domain", covered["text"])]


def _ranges(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the row of private ranges."""
    found = summary["private_ranges"]
    if found is None:
        return []
    paid = f"epsilon {shown_bound(found['epsilon'])} by itself, part of the run's"
    return [("private ranges", f"of {len(found['columns'])} columns, {paid}")]


def _audit(audit: Mapping[str, Any]) -> str:
    """Return what the audit of a run's step has shown."""
    mu, proved = audit["per_step"]["mu_lower"], audit["per_step"]["mu_certified"]
    text = f"{audit['runs']} runs, confidence {audit['confidence']:g}: a step has mu "
    text += f"{shown_lower_bound(mu)} at least"
    return text if proved is None else f"{text}, {shown_bound(proved)} at most"

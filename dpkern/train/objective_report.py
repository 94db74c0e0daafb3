"""Report a run that perturbs its loss: its epochs, noise, curves, table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..objective.records import Records
from ..objective.spof import SpofTraining
from ..privacy.accounting import shown_bound
from ..privacy.mechanisms.functional import Functional
from ..step.noise_tables import NoiseSource
from . import step_costs
from .display import SummaryTable, upper
from .report import FigureSpec


@dataclass(frozen=True, kw_only=True)
class Reconstruction:
    """State after an epoch, on held-out records.

    ``accuracy`` is ``100 (1 - mean |x - xhat|)``, ``mse`` the mean of ``||x - xhat||^2`` and
    ``bce`` the mean cross-entropy of a record.
    """

    epoch: int
    step: int
    heldout_accuracy: float
    heldout_mse: float
    heldout_bce: float
    diverged: bool


def noise(
    mechanism: Functional,
    records: Records,
    training: SpofTraining,
    source: NoiseSource | None = None,
) -> dict[str, Any]:
    """Return law, least and largest scale, what carries it, and where key and draws came from.

    Scales that depend on c_j are given at its public ends, 0 and c l.
    """
    n, code = records.features, training.weights.code
    ends = [mechanism.scale(n, shift) for shift in (0.0, mechanism.constant_entry * code)]
    scales = sorted(float(scale) for scale in ends)
    return {
        "law": "Laplace" if mechanism.noised else "none",
        "released": mechanism.release,
        "schedule": mechanism.noise_schedule,
        "scale_at_least": scales[0],
        "scale_at_most": scales[-1],
        "scale_depends_on_the_record": mechanism.scale_is_private,
        "cipher": f"ChaCha{training.keys[0].rounds}",
        "key": "unsafe seed" if training.seeded else "operating system",
        "source": "inline" if source is None else source.name,
        **({} if source is None else {"provenance": source.provenance()}),
    }


def title(summary: Mapping[str, Any]) -> str:
    """Return the figure's title; claimed and certified epsilon side by side."""
    claimed, certified = summary["epsilon_claimed"], summary["epsilon_certified"]
    return (
        f"{summary['mechanism']}, {summary['mode']}, on {summary['public']['data']}: "
        f"claimed epsilon {shown_bound(claimed)}, certified {shown_bound(certified)}"
    )


def drawn(summary: Mapping[str, Any], history: Sequence[Reconstruction]) -> FigureSpec:
    """Draw held-out accuracy, squared error and cross-entropy."""
    return FigureSpec(
        title=title(summary),
        panels={
            "held-out accuracy, %": [epoch.heldout_accuracy for epoch in history],
            "held-out squared error of a record": [epoch.heldout_mse for epoch in history],
            "held-out cross-entropy of a record": [epoch.heldout_bce for epoch in history],
        },
    )


def shown(summary: Mapping[str, Any]) -> SummaryTable:
    """Return the rows of its table that only such a run has."""
    public, drawn = summary["public"], summary["noise"]
    least, most = drawn["scale_at_least"], drawn["scale_at_most"]
    scale = f"{least:.5g}" if least == most else f"{least:.5g} to {most:.5g}"
    if drawn["scale_depends_on_the_record"]:
        scale += ", by the private record"
    synthetic = " (synthetic)" if public["synthetic"] else ""
    others = ("epsilon_if_bounds_public", "epsilon_of_target_alone")
    return SummaryTable(
        title=f"Autoencoder on {public['data']}{synthetic}",
        results=(
            ("held-out accuracy", f"{summary['test_accuracy']:.2f} %"),
            ("held-out errors", f"mse {summary['test_mse']:.5g}, bce {summary['test_bce']:.5g}"),
            *((name.replace("_", " "), upper(summary.get(name))) for name in others),
        ),
        settings=(
            ("relation", summary["relation"]),
            ("certified for", summary["certified_for"]),
            ("mechanism", f"{summary['mechanism']}, {summary['mode']}"),
            ("released", f"{drawn['released']}, {drawn['schedule']}"),
            ("noise", f"{drawn['law']}, scale {scale}, key from {drawn['key']}"),
            ("noise source", drawn["source"]),
            ("users, records", f"{public['users']} x {public['records_per_user']}"),
            ("bounds", public["bounds"]),
            ("visits, steps", f"{summary['visits']}, {summary['steps']}"),
            *step_costs.rows(summary),
        ),
        data=summary["data_notes"],
    )

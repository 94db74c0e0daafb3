"""Report a run of AdLM or ILM: its epochs, noise, curves, table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..privacy.mechanisms import AdLM
from . import step_costs
from .display import SummaryTable, upper
from .objective_report import title
from .report import FigureSpec


@dataclass(frozen=True, kw_only=True)
class BoundedEpoch:
    """State after an epoch; ``loss`` is that of the released values, which cost nothing more."""

    epoch: int
    step: int
    heldout_accuracy: float
    loss: float
    diverged: bool


def noise(mechanism: AdLM, scales: Tensor) -> dict[str, Any]:
    """Return noise laws and scales; scales of inputs follow from noisy or public values."""
    label = mechanism.label_scale
    return {
        "inputs": {"law": "Laplace", "least": float(scales.min()), "most": float(scales.max())},
        "labels": f"Laplace, scale {label:.5g}" if label is not None else "randomized response",
        "relevances": mechanism.relevance_scale if mechanism.releases_relevance else None,
        "bias": mechanism.bias_scale,
    }


def drawn(summary: Mapping[str, Any], history: Sequence[BoundedEpoch]) -> FigureSpec:
    """Draw held-out accuracy and the loss of the released values."""
    return FigureSpec(
        title=title(summary),
        panels={
            "held-out accuracy, %": [epoch.heldout_accuracy for epoch in history],
            "loss of the released values": [epoch.loss for epoch in history],
        },
    )


def shown(summary: Mapping[str, Any]) -> SummaryTable:
    """Return the rows of its table that only such a run has."""
    public, drawn = summary["public"], summary["noise"]
    inputs, relevances = drawn["inputs"], drawn["relevances"]
    parts = summary["epsilon_by_part"].items()
    return SummaryTable(
        title=f"{summary['mechanism']} on {public['data']}",
        results=(
            (
                "held-out accuracy",
                f"{summary['test_accuracy']:.2f} % of {public['heldout_rows']} rows",
            ),
            *((f"epsilon of {name}", upper(cost)) for name, cost in parts),
        ),
        settings=(
            ("relation", summary["relation"]),
            ("certified for", summary["certified_for"]),
            ("mechanism", f"{summary['mechanism']}, {summary['mode']}"),
            ("input noise", f"Laplace, scale {inputs['least']:.5g} to {inputs['most']:.5g}"),
            ("label noise", drawn["labels"]),
            ("noise source", drawn["source"]),
            ("relevance noise", relevances and f"Laplace, scale {relevances:.5g}"),
            ("epochs, steps", f"{summary['visits']}, {summary['steps']}"),
            *step_costs.rows(summary),
        ),
        data=summary["data_warnings"],
    )

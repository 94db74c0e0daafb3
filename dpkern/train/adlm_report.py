"""What a run of AdLM or ILM says at the end: its privacy, its noise, a figure, a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

from .._validate import require
from ..mechanisms import AdLM
from .display import epsilons, print_table
from .files import write_atomically
from .objective_report import statement

__all__ = ["facts", "noise", "print_summary", "statement", "write_figure"]

UNPROTECTED = {
    "relevances": "relevances come from a network that was trained on the same rows without noise",
    "inputs": "all rows share one draw: differences of rows are released exactly",
    "labels": "gradients pass through the clean part of the coefficients",
}


def facts(mechanism: AdLM, *, visits: int, seeded: bool) -> dict[str, Any]:
    """What a report says about the privacy of a run, certificate included."""
    certificate = mechanism.certificate(visits=visits, seeded=seeded).to_dict()
    secret = mechanism.epsilon_certified(visits=visits)
    said: dict[str, Any] = {
        "mechanism": mechanism.name,
        "mode": mechanism.mode,
        "epsilon_claimed": mechanism.epsilon_claimed(),
        "claim": mechanism.claim_text,
        "epsilon_certified": certificate["epsilon"],
        "non_private": _reason(mechanism, seeded),
        "notes": [{"id": note.id, "text": note.text} for note in mechanism.notes],
        "visits": visits,
        "epsilon_by_part": dict(mechanism.costs()),
        "settings": settings(mechanism),
        "certificate": certificate,
    }
    return said | ({"epsilon_if_seed_secret": secret} if seeded else {})


def settings(mechanism: AdLM) -> dict[str, Any]:
    """The fields, without the sizes that follow from the data."""
    return {name: value for name, value in mechanism.options().items() if name != "setting"}


def _reason(mechanism: AdLM, seeded: bool) -> str | None:
    """Why nothing is certified, in words; None where something is."""
    open_parts = [UNPROTECTED[part] for part, cost in mechanism.costs().items() if math.isinf(cost)]
    if open_parts:
        return "; ".join(open_parts)
    if math.isinf(mechanism.epsilon_certified()):
        return "the noise has too much of its tail cut"
    return "the noise comes from a known seed" if seeded else None


def noise(mechanism: AdLM, scales: Tensor) -> dict[str, Any]:
    """Laws and scales of what was drawn; scales of inputs follow from noisy or public values."""
    label = mechanism.label_scale
    return {
        "inputs": {"law": "Laplace", "least": float(scales.min()), "most": float(scales.max())},
        "labels": f"Laplace, scale {label:.5g}" if label is not None else "randomized response",
        "relevances": mechanism.relevance_scale if mechanism.releases_relevance else None,
        "bias": mechanism.bias_scale,
    }


def write_figure(path: Path, history: Sequence[Any], *, title: str) -> None:
    """Held-out accuracy and the loss of the released values over the epochs, as PNG.

    Raises:
        MissingDependency: without matplotlib.
    """
    figures = require("matplotlib.figure", extra="demo")
    agg = require("matplotlib.backends.backend_agg", extra="demo")
    figure = figures.Figure(figsize=(8, 3.4), layout="constrained")
    epochs = [record.epoch for record in history]
    panels = (
        ("held-out accuracy, %", [record.heldout_accuracy for record in history]),
        ("loss of the released values", [record.loss for record in history]),
    )
    for number, (label, values) in enumerate(panels, start=1):
        axes = figure.add_subplot(1, 2, number)
        axes.set_title(label)
        axes.set_xlabel("epoch")
        axes.grid(alpha=0.3)
        axes.plot(epochs, values, marker="o", markersize=3)
    figure.suptitle(title)
    canvas = agg.FigureCanvasAgg(figure)
    write_atomically(path, lambda file: canvas.print_png(file))


def print_summary(console: Console, summary: Mapping[str, Any]) -> None:
    """The end of a run; claimed and certified epsilon side by side, then the accuracy."""
    public, drawn = summary["public"], summary["noise"]
    inputs = drawn["inputs"]
    rows: list[tuple[str, Any]] = [
        ("epsilon", epsilons(summary)),
        ("claim", summary["claim"]),
        ("privacy", summary["statement"]),
        ("held-out accuracy", f"{summary['test_accuracy']:.2f} % of {public['heldout_rows']} rows"),
        ("epsilon if seed secret", summary.get("epsilon_if_seed_secret")),
    ]
    rows += [(f"epsilon of {name}", cost) for name, cost in summary["epsilon_by_part"].items()]
    rows += [
        ("delta", f"{summary['delta']:.3g}"),
        ("relation", summary["relation"]),
        ("certified for", summary["certified_for"]),
        ("mechanism", f"{summary['mechanism']}, {summary['mode']}"),
        ("input noise", f"Laplace, scale {inputs['least']:.5g} to {inputs['most']:.5g}"),
        ("label noise", drawn["labels"]),
        ("relevance noise", drawn["relevances"] and f"Laplace, scale {drawn['relevances']:.5g}"),
        ("epochs, steps", f"{summary['visits']}, {summary['steps']}"),
        ("seconds", f"{summary['seconds']:.1f}"),
        ("report", summary["report"]),
        ("checkpoint", summary["checkpoint"]),
        ("figure", summary["figure"]),
        ("diverged", "yes: its weights stay as they were then" if summary["diverged"] else None),
    ]
    rows += [("note", f"{note['id']}: {note['text']}") for note in summary["notes"]]
    rows += [("data", warning) for warning in summary["data_warnings"]]
    shown = [(name, value) for name, value in rows if value is not None]
    print_table(console, f"{summary['mechanism']} on {public['data']}", shown)

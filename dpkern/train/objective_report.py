"""What a run that perturbs its loss says at the end: a sentence, its noise, a figure, a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from .._validate import require
from ..mechanisms.functional import Functional
from ..objective.records import Records
from ..objective.spof import Training
from .display import epsilons, print_table
from .files import write_atomically


def statement(facts: Mapping[str, Any], certificate: Mapping[str, Any]) -> str:
    """The privacy of the run in one sentence."""
    epsilon, delta = certificate["epsilon"], certificate["delta"]
    if epsilon != "inf":
        return (
            f"({epsilon:.4g}, {delta:.2g})-differentially private: {certificate['relation']}, "
            f"for {certificate['certified_for']}"
        )
    return f"not private: {facts['non_private'] or 'nothing can be certified'}"


def noise(mechanism: Functional, records: Records, training: Training) -> dict[str, Any]:
    """Law, least and largest scale, what carries it, and where the key came from.

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
    }


def write_figure(path: Path, history: Sequence[Any], *, title: str) -> None:
    """Held-out accuracy, squared error and cross-entropy over the epochs, as PNG.

    Raises:
        MissingDependency: without matplotlib.
    """
    figures = require("matplotlib.figure", extra="demo")
    agg = require("matplotlib.backends.backend_agg", extra="demo")
    figure = figures.Figure(figsize=(11, 3.4), layout="constrained")
    epochs = [record.epoch for record in history]
    panels = (
        ("held-out accuracy, %", [record.heldout_accuracy for record in history]),
        ("held-out squared error of a record", [record.heldout_mse for record in history]),
        ("held-out cross-entropy of a record", [record.heldout_bce for record in history]),
    )
    for number, (label, values) in enumerate(panels, start=1):
        axes = figure.add_subplot(1, 3, number)
        axes.set_title(label)
        axes.set_xlabel("epoch")
        axes.grid(alpha=0.3)
        axes.plot(epochs, values, marker="o", markersize=3)
        if history and history[-1].diverged:
            axes.text(0.5, 0.5, "diverged", ha="center", transform=axes.transAxes)
    figure.suptitle(title)
    canvas = agg.FigureCanvasAgg(figure)
    write_atomically(path, lambda file: canvas.print_png(file))


def print_summary(console: Console, summary: Mapping[str, Any]) -> None:
    """The end of a run; claimed and certified epsilon side by side, then the accuracy."""
    public, noise_facts = summary["public"], summary["noise"]
    least, most = noise_facts["scale_at_least"], noise_facts["scale_at_most"]
    scale = f"{least:.5g}" if least == most else f"{least:.5g} to {most:.5g}"
    if noise_facts["scale_depends_on_the_record"]:
        scale += ", by the private record"
    rows: list[tuple[str, Any]] = [
        ("epsilon", epsilons(summary)),
        ("claim", summary["claim"]),
        ("privacy", summary["statement"]),
        ("held-out accuracy", f"{summary['test_accuracy']:.2f} %"),
        ("held-out errors", f"mse {summary['test_mse']:.5g}, bce {summary['test_bce']:.5g}"),
    ]
    more = ("epsilon_if_seed_secret", "epsilon_if_bounds_public", "epsilon_of_target_alone")
    for name in more:
        if name in summary:
            rows.append((name.replace("_", " "), summary[name]))
    rows += [
        ("delta", f"{summary['delta']:.3g}"),
        ("relation", summary["relation"]),
        ("certified for", summary["certified_for"]),
        ("mechanism", f"{summary['mechanism']}, {summary['mode']}"),
        ("released", f"{noise_facts['released']}, {noise_facts['schedule']}"),
        ("noise", f"{noise_facts['law']}, scale {scale}, key from {noise_facts['key']}"),
        ("users, records", f"{public['users']} x {public['records_per_user']}"),
        ("bounds", public["bounds"]),
        ("visits, steps", f"{summary['visits']}, {summary['steps']}"),
        ("seconds", f"{summary['seconds']:.1f}"),
        ("report", summary["report"]),
        ("checkpoint", summary["checkpoint"]),
        ("figure", summary["figure"]),
        ("diverged", "yes: its weights stay as they were then" if summary["diverged"] else None),
    ]
    rows += [("note", f"{note['id']}: {note['text']}") for note in summary["notes"]]
    rows += [("data", note) for note in summary["data_notes"]]
    shown = [(name, value) for name, value in rows if value is not None]
    synthetic = " (synthetic)" if public["synthetic"] else ""
    print_table(console, f"Autoencoder on {public['data']}{synthetic}", shown)

"""Read the accuracies and times of single runs that SPOF's authors published with their code.

They stand in a JSON file: ``accuracy`` and ``seconds``, by method and condition, with a list of
runs for each index of epsilon.

Source: the repository theorycoder/distributedautoencoders, commit b92bab58.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...base.errors import InvalidInput
from .released import DPSGD, FM, NON_PRIVATE, SPOF

FILE = "authors_results.json"
TABLE = "dailyActivity_merged.csv"
"""The authors' table, in the same folder. The public export behind it has this name too."""
TABLE_DIGEST = "3a05b455bb8675cbd602ca0252c48655f1e1f46cd17f92b67b0288910d462f74"
"""SHA-256 of that file."""
EPSILONS = (0.01, 0.1, 1.0, 10.0, 20.0)
OTHER_SIZE = 10
"""The first runs of each noiseless file of DP-SGD were made on a quarter of the rows."""
STEMS = {SPOF: "spof", DPSGD: "dpsgd", FM: "fm"}
NOISY = 5.0
CONDITIONS = {0.0: "noiseless", NOISY: "noisy_sigma5"}

Runs = Mapping[float, Sequence[float]]
"""The runs of each epsilon."""


@dataclass(frozen=True)
class StoredSweep:
    """Mean accuracies over the constant c, of a stored file.

    The files say neither epsilon nor rows: the stored script takes the smallest epsilon, the figure
    made of the first file is labelled 10.
    """

    commit: str
    runs: int
    accuracy: Mapping[float, float]


@dataclass(frozen=True)
class RawResults:
    """Accuracies, as fractions, and seconds of single runs, by method and condition."""

    accuracy: Mapping[tuple[str, float], Runs]
    seconds: Mapping[tuple[str, float], Runs]
    sweeps: Sequence[StoredSweep] = ()

    def gain(self, sigma: float) -> float:
        """Return SPOF's relative gain in percent, of the means over runs and then over epsilon."""
        ours, theirs = (_mean(self.accuracy[name, sigma]) for name in (SPOF, DPSGD))
        return 100 * (ours / theirs - 1)

    def gains(self, sigma: float) -> list[float]:
        """Return the gain at each epsilon, in percent."""
        ours, theirs = (self.accuracy[name, sigma] for name in (SPOF, DPSGD))
        mean = statistics.fmean
        return [100 * (mean(ours[e]) / mean(theirs[e]) - 1) for e in EPSILONS]

    def time_saved(self, ours: Runs, theirs: Runs) -> float:
        """Return the share of the training time that SPOF saves, in percent."""
        return 100 * (1 - _mean(ours) / _mean(theirs))

    def usual_conditions(self) -> Runs:
        """Return DP-SGD's noisy runs but for the first ten: the bulk, made under one condition.

        DP-SGD does the same work with and without noise of the sensors.
        """
        noisy = self.seconds[DPSGD, 5.0]
        return {epsilon: [statistics.median(runs)] for epsilon, runs in noisy.items()}

    def without_other_size(self) -> Runs:
        """Return DP-SGD's noiseless accuracies without the runs on fewer rows."""
        runs = self.accuracy[DPSGD, 0.0]
        return {epsilon: of_it[OTHER_SIZE:] for epsilon, of_it in runs.items()}


def is_authors_table(path: Path) -> bool:
    """Whether the file is the authors' table, by its bytes: other rows may have its name."""
    if path.name != TABLE or not path.is_file():
        return False
    return hashlib.sha256(path.read_bytes()).hexdigest() == TABLE_DIGEST


def load(folder: Path) -> RawResults | None:
    """Read the file in this folder; None if there is none.

    Raises:
        InvalidInput: a file without the lists of runs.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text())
        sweeps = [_sweep(stored) for stored in content.get("c_sweep", ())]
        return RawResults(_read(content, "accuracy"), _read(content, "seconds"), sweeps)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(
            "data",
            expected=f"{path} with lists of runs by method, condition and index of epsilon",
            got=f"{type(error).__name__}: {error}",
            remedy=f"Restore {FILE}, or move it out of the folder.",
        ) from error


def _read(
    content: Mapping[str, Mapping[str, Mapping[str, object]]], kind: str
) -> dict[tuple[str, float], Runs]:
    found: dict[tuple[str, float], Runs] = {}
    for name, stem in STEMS.items():
        for sigma, condition in CONDITIONS.items():
            stored = content[kind].get(f"{stem}_{condition}")
            if stored is not None:
                found[name, sigma] = _by_epsilon(stored["by_epsilon_index"])
    stored = content[kind]["nonprivate"]
    # One file for both conditions, whose mean and spread are those of runs with noisy targets.
    found[NON_PRIVATE, NOISY] = _by_epsilon(stored["by_epsilon_index"])
    return found


def _sweep(stored: Mapping[str, Any]) -> StoredSweep:
    accuracy = {
        float(c): float(mean) for c, mean in zip(stored["c"], stored["mean_accuracy"], strict=True)
    }
    if not accuracy or not all(map(math.isfinite, (*accuracy, *accuracy.values()))):
        raise ValueError("a sweep is empty or not finite")
    return StoredSweep(
        commit=str(stored["commit"])[:8], runs=int(stored["runs_per_point"]), accuracy=accuracy
    )


def _by_epsilon(stored: object) -> Runs:
    if not isinstance(stored, dict):
        raise TypeError("runs are no mapping")
    runs = {EPSILONS[int(index)]: [float(v) for v in of_it] for index, of_it in stored.items()}
    if not all(of_it and all(map(math.isfinite, of_it)) for of_it in runs.values()):
        raise ValueError("a list of runs is empty or not finite")
    return runs


def _mean(runs: Runs) -> float:
    return statistics.fmean(statistics.fmean(of_it) for of_it in runs.values())


__all__ = ["EPSILONS", "FILE", "RawResults", "Runs", "StoredSweep", "is_authors_table", "load"]

"""Detect outputs that are the same for every record: such a score is that of a constant."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SAME = 1e-3
"""Outputs in [0, 1] with a smaller standard deviation over the records are one constant."""


@dataclass(frozen=True, kw_only=True)
class OutputSpread:
    """Spread of a model's outputs between records.

    Attributes:
        spread: largest standard deviation of an output in [0, 1] over the records; NaN where an
            output is not finite or there are fewer than two records.
        told: number of classes that are told to any record; None where outputs are no classes.
    """

    spread: float
    told: int | None = None

    @property
    def collapsed(self) -> bool:
        """Whether every record gets the same output, or outputs are not finite."""
        return self.told == 1 or not self.spread >= SAME

    @property
    def sentence(self) -> str:
        """The finding in words."""
        classes = "" if self.told is None else f"; {self.told} classes are told"
        if not self.collapsed:
            return f"vary over records by {self.spread:.3g}{classes}"
        if math.isnan(self.spread):
            return "COLLAPSED: not finite, or too few records to tell"
        if self.told == 1:
            return "COLLAPSED: every held-out record is told the same class"
        return f"COLLAPSED: every held-out record gets the same output, to {self.spread:.3g}"

    def facts(self) -> dict[str, Any]:
        """Return the finding as values of a report."""
        found: dict[str, Any] = {"collapsed": self.collapsed, "output_spread": self.spread}
        return found if self.told is None else {**found, "classes_told": self.told}


def of_facts(facts: Mapping[str, Any]) -> OutputSpread | None:
    """Return what ``facts`` was made of; None where outputs were not measured."""
    if facts.get("output_spread") is None:
        return None
    return OutputSpread(spread=float(facts["output_spread"]), told=facts.get("classes_told"))


def of_outputs(outputs: Tensor) -> OutputSpread:
    """Return the spread of outputs in [0, 1], ``[records, ...]``."""
    flat = outputs.detach().flatten(1).double()
    if len(flat) < 2 or not flat.numel():
        return OutputSpread(spread=math.nan)
    return OutputSpread(spread=float(flat.std(0, correction=0).max()))


def of_scores(scores: Tensor) -> OutputSpread:
    """Return the spread of the probabilities that scores ``[records, classes]`` stand for."""
    found = of_outputs(torch.softmax(scores.detach().double(), 1))
    return OutputSpread(spread=found.spread, told=len(torch.bincount(scores.argmax(1)).nonzero()))


__all__ = ["SAME", "OutputSpread", "of_facts", "of_outputs", "of_scores"]

"""The outcome of a probe of forward passes, and the errors for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..base.errors import UnsupportedModule


@dataclass
class ProbeOutcome:
    """The outcome of a probe.

    Attributes:
        told: whether the probe was conclusive: it replaced samples by others that differ.
        is_plain: whether the module was a plain stack of layers, in which no sample is replaced.
        mixed: the place where samples mix, in words; empty if they do not.
        absorbed: paths of state that follows the data.
        counted: paths of state that changes alike whatever the data is.
        failure: the exception if the module could not be run again, else None.
    """

    told: bool = False
    is_plain: bool = False
    mixed: str = ""
    absorbed: list[str] = field(default_factory=list)
    counted: set[str] = field(default_factory=set)
    failure: Exception | None = None
    by_number: UnsupportedModule | None = None
    """The error for outputs that depend on the number of samples."""
    has_other_sizes: bool = True
    """Whether outputs could be compared with those of passes on fewer samples."""
    by_gradients: UnsupportedModule | None = None
    """The error for gradients that depend on the other samples."""
    has_numbers: bool = False
    """Whether the module returns numbers or arrays that follow the samples."""
    kept: list[str] = field(default_factory=list)
    """Paths of attributes that follow the data until the next pass overwrites them."""
    has_losses: bool = False
    """Whether the module returns scalars that require a gradient."""

    def error(self) -> UnsupportedModule | None:
        """Return the error for what was found, if anything."""
        if self.mixed:
            return UnsupportedModule(
                self.mixed,
                expected="outputs of one sample that depend on that sample alone",
                got="other outputs after other samples of the batch were replaced",
                remedy="Keep the batch first (batch_first=True; rows of one sample next to each "
                "other) and remove what mixes samples, such as statistics, sorting or ranking "
                "over the batch; dpkern.fix(model) replaces batch normalisation.",
            )
        if self.absorbed:
            return absorbs(self.absorbed)
        return self.by_number or self.by_gradients


def absorbs(names: Sequence[str]) -> UnsupportedModule:
    """Return the error for state of a module that follows the data."""
    kind = "buffer" if len(names) == 1 else "buffers"
    return UnsupportedModule(
        f"{kind} or other state {', '.join(sorted(names)[:5])}",
        expected="forward passes that leave no trace of the samples in the module",
        got="contents that depend on the samples",
        remedy="Keep such state outside of the module, or update it from public data under "
        "engine.public(); it would reach state_dict() or later outputs without noise.",
    )

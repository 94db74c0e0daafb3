"""Collect the operations that mechanisms and release maps report as lines of a step."""

from __future__ import annotations

from typing import Any

import torch

from ..base.counts import FORMULA, WALK, Counts, Item
from . import _glue as glue
from ._ops import call


class Lines:
    """An implementation of ``mechanisms.work.OpAccount`` for one phase; equal lines add up.

    Attributes:
        items: the lines, of every phase that was booked, in order.
    """

    def __init__(self, phase: str, items: list[Item] | None = None) -> None:
        self.items: list[Item] = [] if items is None else items
        self._phase = phase

    def under(self, phase: str) -> Lines:
        """Return an account that books the same lines under another phase."""
        return Lines(phase, self.items)

    def _book(self, line: str, counts: Counts, kind: str = "exact") -> None:
        if counts:
            evidence = WALK if kind == "exact" else FORMULA
            name = f"{self._phase}: {line}"
            self.items.append(Item(name=name, counts=counts, kind=kind, evidence=evidence))

    def each(self, line: str, n: int, *, reads: int = 1, extra: int = 0, **primitives: int) -> None:
        """Book an elementwise result; see ``Work.each``."""
        self._book(line, glue.each(n, reads=reads, extra=extra, **primitives))

    def converted(self, line: str, n: int, old: torch.dtype, new: torch.dtype) -> None:
        """Book a conversion; see ``Work.converted``."""
        self._book(line, glue.converted(n, old, new))

    def filled(self, line: str, n: int) -> None:
        """Book a fill; see ``Work.filled``."""
        self._book(line, glue.filled(n))

    def gathered(self, line: str, n: int, places: int | None = None) -> None:
        """Book a gather; see ``Work.gathered``."""
        self._book(line, glue.gathered(n, places))

    def scattered(self, line: str, places: int, values: int) -> None:
        """Book a scatter; see ``Work.scattered``."""
        self._book(line, glue.scattered(places, values))

    def folded(self, line: str, n: int, results: int, *primitives: str) -> None:
        """Book a reduction; see ``Work.folded``."""
        self._book(line, glue.folded(n, results, *primitives))

    def read_out(self, line: str) -> None:
        """Book one number that the host reads; see ``Work.read_out``."""
        self._book(line, glue.read_out())

    def summed(self, line: str, n: int) -> None:
        """Book a sum that the host reads; see ``Work.summed``."""
        self._book(line, glue.sum_read(n))

    def largest(self, line: str, n: int, k: int) -> None:
        """Book a choice of largest magnitudes; see ``Work.largest``."""
        self._book(line, glue.largest(n, k)[0])
        self.chosen(line, n, k)

    def chosen(self, line: str, n: int, k: int) -> None:
        """Book the modelled part of such a choice; see ``Work.chosen``."""
        self._book(line, glue.largest(n, k)[1], "modelled")

    def multiplied(self, line: str, rows: int, inner: int, columns: int) -> None:
        """Book a matrix product; see ``Work.multiplied``."""
        self._book(line, glue.multiplied(rows, inner, columns), "modelled")

    def counts(self, line: str, **primitives: int) -> None:
        """Book primitives one by one; see ``Work.counts``."""
        self._book(line, Counts(primitives))

    def op(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Book a call of one of our ops; see ``Work.op``."""
        self.items += call(name, self._phase, *args, **kwargs)


__all__ = ["Lines"]

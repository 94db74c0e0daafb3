"""Prove from the shipped integers what the noise distributions leak.

``docs/noise.md`` has the mathematics. In short, with ``s`` the exact sum in output cells and
``P_s`` the law of the released integer:

* **Gaussian**: for every phase ``s`` and event ``A``, ``|dP_s(A)/ds| <= I(P_s(A)) / 64`` with
  ``I(b) = phi(Phi^-1(b))``. Then ``(P_s, P_t)`` is a post-processing of
  ``N(0, 1), N(|s - t| / 64, 1)``. ``gaussian`` evaluates this in float64,
  ``exact_certificate.gaussian`` with integers and interval arithmetic.
* **Laplace**: neighbouring magnitudes differ by a factor of at most 65/64, so
  ``|d log P_s(j) / ds| <= 1/64``. ``laplace`` checks this in integers.

``python -m dpkern.audit.certificate`` runs both proofs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from statistics import NormalDist

import numpy as np

from ...base.laws import (
    COLUMNS,
    ESCAPE,
    GAUSSIAN,
    LAPLACE,
    LAPLACE_RESTARTS,
    SCALE_CELLS,
    TOTAL,
    Law,
    alias_table,
    gaussian_tail,
    words_sha256,
)
from ...base.masses import (
    FINE,
    checked_counts,
    gaussian_masses,
    idealise,
    laplace_masses,
    path_cells,
    sd_cells,
)

TAIL_SHA256 = {
    GAUSSIAN.name: "6778fbb6bdd07d7d52fe11a65584977c758d7841f04fb9044d8747ef741f3da0",
    LAPLACE.name: "e6525ba6cc636e73aeaeed22dc8091a705155755497952a5f150b5a508e00a86",
}
"""Committed tails, hashed as 16 little-endian bytes per number: N_1 .. N_557, and the restarts."""

_COLUMN = TOTAL // COLUMNS


@dataclass(frozen=True, kw_only=True)
class LawCheck:
    """The outcome of one check of one law.

    Attributes:
        law: ``gaussian`` or ``laplace``.
        method: ``float64``, ``interval`` (integers and ball arithmetic) or ``rational``.
        worst_ratio: the largest realised-to-certified ratio; at most 1 passes. An upper bound for
            ``interval``, exact up to one upward rounding for ``rational``, to about 1e-12 for
            ``float64``.
        worst_at: where it is attained: ``Phi^-1`` of the event's mass (Gaussian), or the
            magnitude ``k`` whose step to ``k + 1`` is steepest (Laplace).
        cut_log2: log2 of the total mass, both sides, on which the law differs from the idealised
            law of the proof; an upper bound of their total variation distance.
        sd_cells: standard deviation of the released integer in cells, root mean square over the
            phase; the certified scale is 64 (Gaussian) and 64 sqrt(2) (Laplace).
        intervals: phase intervals tested (256 are all of the Gaussian, 1 all of the Laplace).
        vertices: inequalities checked.
        table_sha256: hash of the alias table that the counts give.
        tail_sha256: hash of what describes the tail.
        faults: every reason to reject; empty if and only if the law passed.
    """

    law: str
    method: str
    worst_ratio: float
    worst_at: float
    cut_log2: float
    sd_cells: float
    intervals: int
    vertices: int
    table_sha256: str
    tail_sha256: str
    faults: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether the law is within its certified scale on all the phase intervals tested."""
        return not self.faults


def gaussian(
    counts: Sequence[int] = GAUSSIAN.counts,
    tail: Sequence[int] | None = None,
    *,
    intervals: Iterable[int] = range(FINE),
) -> LawCheck:
    """Run the isoperimetric test of a Gaussian law in float64; about a second for all intervals.

    Args:
        counts: the 256 magnitude counts.
        tail: ``N_1, N_2, ...`` of ``laws.gaussian_tail``; ``None`` for the committed tail.
        intervals: which of the 256 phase intervals to test.

    Raises:
        InvalidInput: for numbers that are no law.
    """
    tail = gaussian_tail() if tail is None else tail
    profile = idealise(gaussian_masses(counts, tail)).as_float()
    quantile = NormalDist().inv_cdf
    worst, worst_at, vertices = 0.0, math.nan, 0
    tested = sorted(set(intervals))
    for interval in tested:
        for end in (0, 1):
            mass, slope = path_cells(profile, interval, end)
            mass, slope = mass / FINE**2, slope / FINE**2
            order = np.argsort(-slope / mass, kind="stable")
            # From both sides, so that small masses are never differences of large ones.
            for way, sign in ((order, 1.0), (order[::-1], -1.0)):
                b = np.cumsum(mass[way])
                d = sign * np.cumsum(slope[way])
                keep = b <= 0.5 + 1e-9
                z = np.array([quantile(float(x)) for x in b[keep]])
                density = np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
                ratio = SCALE_CELLS * d[keep] / density
                vertices += len(ratio)
                top = int(np.argmax(ratio))
                if not np.isfinite(ratio[top]):
                    raise FloatingPointError(f"ratio {ratio[top]} in phase interval {interval}")
                if ratio[top] > worst:
                    worst, worst_at = float(ratio[top]), sign * float(z[top])
    return gaussian_certificate(
        counts,
        tail,
        method="float64",
        cut_log2=profile.cut_log2,
        worst=worst,
        worst_at=worst_at,
        intervals=len(tested),
        vertices=vertices,
    )


def gaussian_certificate(
    counts: Sequence[int],
    tail: Sequence[int],
    *,
    method: str,
    cut_log2: float,
    worst: float,
    worst_at: float,
    intervals: int,
    vertices: int,
) -> LawCheck:
    """Return the verdict on a Gaussian law from the worst ratio that a method found."""
    faults = []
    if not worst <= 1:
        faults.append(f"realised-to-certified ratio {worst:.7f} > 1 at z = {worst_at:.3f}")
    return LawCheck(
        law=GAUSSIAN.name,
        method=method,
        worst_ratio=worst,
        worst_at=worst_at,
        cut_log2=cut_log2,
        sd_cells=sd_cells(
            gaussian_masses(counts, tail), _CARRY_VARIANCE + _SECOND_UNIFORM_VARIANCE
        ),
        intervals=intervals,
        vertices=vertices,
        table_sha256=words_sha256(alias_table(tuple(counts))),
        tail_sha256=_sha256(tail),
        faults=tuple(faults),
    )


def _sha256(numbers: Iterable[int]) -> str:
    """Return SHA-256 of the numbers as 16 little-endian bytes each."""
    return hashlib.sha256(b"".join(n.to_bytes(16, "little") for n in numbers)).hexdigest()


# Carry of the exact first uniform, f (1 - f) averaged over the phase, and the second uniform.
_CARRY_VARIANCE = Fraction(1, 6)
_SECOND_UNIFORM_VARIANCE = Fraction(FINE * FINE - 1, 12 * FINE * FINE)


def laplace(counts: Sequence[int] = LAPLACE.counts, restarts: int = LAPLACE_RESTARTS) -> LawCheck:
    """Prove in integers that ``|d log P_s(j) / ds| <= 1/64`` at every phase and cell.

    ``P_s = (1 - f) p(j - n) + f p(j - n - 1)`` has the constant derivative ``p(j-n-1) - p(j-n)``
    for f in [0, 1], so the supremum over the phase is at an end and equals the largest ratio of
    neighbours minus one. The idealised law restarts without end: its neighbours are those inside
    the table, the restart boundary (the same at every restart) and -1, 0, which are equal.

    Raises:
        InvalidInput: for numbers that are no law.
    """
    counts = checked_counts(counts)
    escape = Fraction(counts[ESCAPE], TOTAL)
    chain = [*(Fraction(c) for c in counts[:ESCAPE]), escape * counts[0]]
    steps = [max(a / b, b / a) - 1 for a, b in pairwise(chain)]
    steepest = max(range(ESCAPE), key=steps.__getitem__)
    ratio = SCALE_CELLS * steps[steepest]
    faults = []
    if ratio > 1:
        faults.append(
            f"magnitudes {steepest} and {steepest + 1} differ by a factor of "
            f"1 + {float(ratio):.7f}/{SCALE_CELLS}"
        )
    worst = float(ratio)
    if Fraction(worst) < ratio:
        worst = math.nextafter(worst, math.inf)
    return LawCheck(
        law=LAPLACE.name,
        method="rational",
        worst_ratio=worst,
        worst_at=steepest,
        cut_log2=(restarts + 1) * math.log2(escape),
        sd_cells=sd_cells(laplace_masses(counts, restarts), _CARRY_VARIANCE),
        intervals=1,
        vertices=len(steps),
        table_sha256=words_sha256(alias_table(counts)),
        tail_sha256=_sha256([restarts]),
        faults=tuple(faults),
    )


def realised_counts(table: Sequence[int]) -> tuple[int, ...]:
    """Return the counts out of 2^24 with which an alias table yields 0 .. 255."""
    counts = [0] * COLUMNS
    for column, entry in enumerate(table):
        threshold, alias = entry % _COLUMN, entry // _COLUMN
        counts[column] += threshold
        counts[alias] += _COLUMN - threshold
    return tuple(counts)


def table_faults(law: Law, table: Sequence[int]) -> tuple[str, ...]:
    """Return why ``table`` is not the alias table of ``law``; empty if it is."""
    faults = []
    found = words_sha256(tuple(table))
    if found != law.table_sha256:
        faults.append(f"alias table hash {found} is not the committed {law.table_sha256}")
    if len(table) != COLUMNS or realised_counts(table) != law.counts:
        faults.append("the alias table does not realise the counts")
    return tuple(faults)

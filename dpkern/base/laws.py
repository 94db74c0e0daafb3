"""The two integer noise distributions, exactly: their counts, tables, tails and hashes.

A law is a distribution of one integer ``X`` in lattice units ``u = g / 2^14``, where
``g`` is the output cell:

    X = K 2^14 + U1 + offset,        y = floor((v + X) / 2^14)

``v`` is the exact integer sum in units of ``u``, ``y`` is released. ``U1`` is uniform on
``0 .. 2^14 - 1``. ``K`` is ``k`` or ``-1 - k`` with equal probability, and ``k`` has
``counts[k] / 2^24`` as its probability; the last count, 255, is an escape into the tail.

* **Gaussian** (K48): offset ``64 U2 + 32`` with ``U2`` uniform on 0..255, certified standard
  deviation 64 cells, 2^20 u.
* **Laplace** (L40): offset 2^13, certified scale 64 cells, 2^20 u. Neighbouring cells differ by at
  most the factor 65/64, so ``|d log P_s / ds| <= 1/64`` at every phase ``s``.

``docs/noise.md`` derives both; ``dpkern.audit.certificate`` proves them from these numbers.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

COLUMNS = 256
ESCAPE = COLUMNS - 1
TOTAL = 1 << 24
FINE_BITS = 14
SCALE_CELLS = 64
SCALE_UNITS = SCALE_CELLS << FINE_BITS
"""Certified scale (sd of the Gaussian, b of the Laplace) in lattice units: 2^20."""

_GAUSSIAN_COUNTS = tuple(
    int(count)
    for count in """
209150 209099 208997 208844 208640 208385 208080 207725 207320 206865 206360 205807 205205
204554 203856 203111 202319 201481 200598 199670 198697 197681 196622 195521 194379 193196
191974 190712 189413 188077 186704 185297 183855 182379 180872 179333 177763 176165 174538
172884 171204 169499 167770 166018 164244 162449 160635 158803 156953 155086 153205 151309
149400 147479 145548 143607 141657 139699 137735 135765 133791 131813 129833 127852 125869
123888 121908 119930 117955 115985 114020 112060 110108 108163 106226 104299 102382 100475
98580 96697 94827 92970 91127 89300 87487 85690 83910 82147 80401 78673 76963 75272 73600
71948 70316 68704 67112 65542 63992 62464 60958 59473 58011 56570 55152 53756 52383 51032
49705 48399 47117 45857 44621 43406 42215 41046 39900 38777 37676 36597 35541 34506 33494
32503 31534 30586 29660 28754 27870 27006 26162 25339 24535 23751 22987 22242 21516 20808
20119 19447 18794 18158 17540 16938 16353 15784 15231 14695 14173 13667 13176 12699 12236
11788 11353 10931 10523 10127 9744 9373 9014 8667 8331 8006 7692 7388 7094 6811 6537 6273
6018 5772 5535 5306 5085 4873 4668 4470 4280 4097 3921 3752 3589 3432 3281 3136 2997 2863
2735 2612 2493 2380 2271 2166 2066 1970 1878 1790 1705 1624 1547 1473 1402 1334 1270 1208
1148 1092 1038 986 937 890 845 802 761 722 685 650 616 584 553 524 497 470 445 422 399 377
357 337 319 302 285 269 254 240 227 214 202 190 179 169 159 150 141 133 125 118 111 104 98
92 87 82 77 1174
""".split()
)


def _laplace_counts(first: int = 257975) -> tuple[int, ...]:
    """Return integer geometric counts: each is at least 64/65 of the one before, rounded up."""
    counts = [first]
    while len(counts) < ESCAPE:
        counts.append(-(-counts[-1] * 64 // 65))
    return (*counts, TOTAL - sum(counts))


def alias_table(counts: tuple[int, ...]) -> tuple[int, ...]:
    """Return Walker's alias table in integers: ``threshold + 65536 alias`` for each of 256 columns.

    Column ``a`` yields ``a`` if a 16-bit word is below the threshold, else the alias. Full columns
    have threshold 0 and point at themselves.
    """
    column = TOTAL // COLUMNS
    left = list(counts)
    threshold, alias = [0] * COLUMNS, list(range(COLUMNS))
    small = [i for i in range(COLUMNS) if left[i] < column]
    large = [i for i in range(COLUMNS) if left[i] >= column]
    while small:
        poor = small.pop(0)
        rich = large[0]
        threshold[poor], alias[poor] = left[poor], rich
        left[rich] -= column - left[poor]
        if left[rich] < column:
            small.append(large.pop(0))
    return tuple(t + (a << 16) for t, a in zip(threshold, alias, strict=True))


def gaussian_tail() -> tuple[int, ...]:
    """Return ``N_1 .. N_557``: given the escape, P(k >= 255 + t) = N_t / 2^128, decreasing."""
    tail, t = [1 << 128], 0
    while tail[-1] > 1 << 24:
        hazard = 267831685 + 930972 * t - 76 * t * t
        tail.append(tail[-1] - ((tail[-1] * hazard) >> 32))
        t += 1
    return tuple(tail[1:])


LAPLACE_RESTARTS = 16
"""An escape restarts the Laplace magnitude 255 further out, at most this often (one block)."""


@dataclass(frozen=True)
class Law:
    """A committed noise law.

    Attributes:
        name: ``gaussian`` or ``laplace``.
        counts: the 256 magnitude counts, total 2^24, the last one the escape.
        uses_second_uniform: whether the offset is ``64 U2 + 32`` (else 2^13).
        bound: ``|X| < bound`` for every draw, in units of ``u``.
        table_sha256: hash of the alias table as 256 little-endian uint32.
    """

    name: str
    counts: tuple[int, ...]
    uses_second_uniform: bool
    bound: int
    table_sha256: str

    @cached_property
    def table(self) -> tuple[int, ...]:
        """The alias table, checked against the committed hash."""
        table = alias_table(self.counts)
        found = words_sha256(table)
        if found != self.table_sha256:
            raise AssertionError(f"{self.name} table hash {found} is not {self.table_sha256}")
        return table


def words_sha256(words: tuple[int, ...]) -> str:
    """Return the SHA-256 of the words as little-endian uint32."""
    return hashlib.sha256(b"".join(w.to_bytes(4, "little") for w in words)).hexdigest()


GAUSSIAN = Law(
    name="gaussian",
    counts=_GAUSSIAN_COUNTS,
    uses_second_uniform=True,
    bound=1 << 24,
    table_sha256="a06ff080e225d1ed99ded84cb75d90c5dbd16e9833617eca6b540c0120d67988",
)
LAPLACE = Law(
    name="laplace",
    counts=_laplace_counts(),
    uses_second_uniform=False,
    bound=1 << 27,
    table_sha256="125eac625f9e68577af88c3eabd810d4e2cfeeed1e643a92e82c19d087c6d53a",
)
Distribution = Literal["gaussian", "laplace"]
LAWS: dict[str, Law] = {"gaussian": GAUSSIAN, "laplace": LAPLACE}

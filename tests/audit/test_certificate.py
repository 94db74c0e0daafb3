"""The noise certificates accept the shipped laws and reject tampered ones; so do the statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

import flint
import numpy as np
import pytest

from dpkern.audit import certificate as shipped
from dpkern.base import masses
from dpkern.base.errors import InvalidInput
from dpkern.base.laws import (
    ESCAPE,
    FINE_BITS,
    GAUSSIAN,
    LAPLACE,
    LAPLACE_RESTARTS,
    LAWS,
    SCALE_CELLS,
    TOTAL,
    Law,
    gaussian_tail,
)
from dpkern.privacy.laws import certificate, exact_certificate
from tests.evidence import statistics
from tests.evidence.certificate import gaussian_shift_ratio
from tests.evidence.statistics import ExactLaw, Fill

CELL = 1 << FINE_BITS
SUBSET = (0, 63, 128, 255)


def moved(counts: Sequence[int], source: int, target: int, amount: int) -> list[int]:
    changed = list(counts)
    changed[source] -= amount
    changed[target] += amount
    return changed


def upper(x: float) -> float:
    return 0.5 * math.erfc(x / math.sqrt(2))


def rounded_gaussian() -> tuple[list[int], list[int]]:
    """Counts and tail of the plain Gaussian's own cell masses, rounded."""
    counts = [round(2 * TOTAL * (upper(k / 64) - upper((k + 1) / 64))) for k in range(ESCAPE)]
    tail = [int(upper((ESCAPE + t) / 64) / upper(ESCAPE / 64) * 2**128) for t in range(1, 600)]
    return [*counts, TOTAL - sum(counts)], [n for n in tail if n > 1 << 24]


def tail_with(first: int = 267831685, rise: int = 930972, bend: int = 76) -> list[int]:
    tail, t = [1 << 128], 0
    while tail[-1] > 1 << 24:
        tail.append(tail[-1] - ((tail[-1] * (first + rise * t - bend * t * t)) >> 32))
        t += 1
    return tail[1:]


def test_float_certificate_of_every_phase() -> None:
    found = certificate.gaussian()
    assert found.passed
    assert found.worst_ratio == pytest.approx(0.9999865, abs=1e-7)
    assert found.worst_at == pytest.approx(-0.414, abs=1e-3)
    assert found.cut_log2 == pytest.approx(-109.25, abs=0.01)
    assert found.sd_cells / SCALE_CELLS == pytest.approx(1.000083, abs=1e-6)
    assert (found.intervals, found.vertices) == (256, 800256)
    assert found.table_sha256 == GAUSSIAN.table_sha256


def test_exact_certificate_bounds_the_float_one() -> None:
    proved = exact_certificate.gaussian(intervals=SUBSET)
    evaluated = certificate.gaussian(intervals=SUBSET)
    assert proved.passed
    assert (proved.method, proved.intervals) == ("interval", len(SUBSET))
    assert evaluated.worst_ratio <= proved.worst_ratio <= evaluated.worst_ratio + 1e-9
    assert proved.worst_at == pytest.approx(evaluated.worst_at)
    assert (proved.vertices, proved.cut_log2) == (evaluated.vertices, evaluated.cut_log2)


def test_balls_bound_the_isoperimetric_function() -> None:
    """The proved ratio is an upper bound of 64 d / I(b), and a close one, down to 2^-110."""
    total = 1 << 150
    with flint.ctx.workprec(256):
        prover = exact_certificate._Prover(flint, total)
        for bits in (1, 2, 10, 60, 110):
            bound, z = prover.ratio(total >> bits, total >> bits)
            b = flint.arb(2) ** -bits
            exact_z = flint.arb(2).sqrt() * (2 * b).erfcinv() if bits > 1 else flint.arb(0)
            density = (-exact_z * exact_z / 2).exp() / (2 * flint.arb.pi()).sqrt()
            ratio = SCALE_CELLS * b / density
            assert ratio <= flint.arb(bound)
            assert bound == pytest.approx(float(ratio), rel=1e-9)
            assert z == pytest.approx(float(exact_z), abs=1e-12)


def test_laplace_certificate_is_exactly_tight() -> None:
    found = certificate.laplace()
    assert found.passed
    assert (found.method, found.worst_ratio, found.vertices) == ("rational", 1.0, 255)
    assert found.cut_log2 == pytest.approx(-96.798, abs=1e-3)
    assert found.table_sha256 == LAPLACE.table_sha256


def test_laplace_restart_boundary_and_last_escape() -> None:
    found = masses.laplace_masses(LAPLACE.counts)
    assert len(found) == ESCAPE * (LAPLACE_RESTARTS + 1) + 1
    assert 2 * sum(found) == 1 << (24 * (LAPLACE_RESTARTS + 1) + 1)
    ends = range(ESCAPE - 1, len(found) - 2, ESCAPE)
    steps = {Fraction(found[k], found[k + 1]) for k in ends}
    assert len(ends) == LAPLACE_RESTARTS
    assert len(steps) == 1
    assert Fraction(64, 65) <= steps.pop() <= Fraction(65, 64)


@pytest.mark.parametrize("v", [0, 1, CELL // 2 - 1, CELL // 2, CELL - 1, 12345])
def test_laplace_slope_at_a_phase_in_integers(v: int) -> None:
    """|P_(v+1)(j) - P_v(j)| 2^20 <= min of the two, for every cell inside three restarts."""
    half = masses.laplace_masses(LAPLACE.counts)[: 3 * ESCAPE]
    p = half[::-1] + half

    def path(f: int) -> list[int]:
        return [(CELL - f) * p[j] + f * p[j - 1] for j in range(1, len(p))]

    f = (v + CELL // 2) % CELL
    for here, there in zip(path(f), path(f + 1), strict=True):
        assert abs(there - here) << 20 <= min(here, there)


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_table_realises_the_counts(law: Law) -> None:
    assert certificate.realised_counts(law.table) == law.counts
    assert certificate.table_faults(law, law.table) == ()


def test_where_the_gaussian_counts_come_from() -> None:
    """Cells of width 1/64, narrowed by z^2/49152 and more far out, each rounded to 2^-25."""

    def width(z: float) -> float:
        return (1 - (1e-5 + z * z / 49152 + 0.042 * math.exp(0.65 * (z * z - 16)))) / 64

    edges = [0.0]
    for _ in range(ESCAPE):
        z = edges[-1]
        edges.append(z + width(z + width(z) / 2))
    counts = [round(2 * TOTAL * (upper(a) - upper(b))) for a, b in pairwise(edges)]
    assert (*counts, TOTAL - sum(counts)) == GAUSSIAN.counts


def test_committed_tails() -> None:
    tail = gaussian_tail()
    assert (tail[0], tail[1], tail[-1]) == (0xF009367B << 96, 0xE103F4EDA3921CA9 << 64, 0xFB9B18)
    assert len(tail) == 557
    assert all(c.passed for c in shipped.committed())


def test_script_prints_both_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    assert shipped.main([]) == 0
    printed = capsys.readouterr().out
    assert "gaussian: PASSED (float64)" in printed
    assert "laplace: PASSED (rational)" in printed


def test_script_fails_on_a_changed_tail(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # This tail passes the mathematics, but is not the committed one.
    monkeypatch.setattr(certificate, "gaussian_tail", lambda: tuple(tail_with(rise=930973)))
    assert shipped.main([]) == 1
    assert "FAULT: tail hash" in capsys.readouterr().out


PLAIN, PLAIN_TAIL = rounded_gaussian()


@pytest.mark.parametrize(
    ("counts", "tail", "ratio", "z"),
    [
        pytest.param(moved(GAUSSIAN.counts, 101, 100, 60), None, 1.0017, -1.585, id="60 moved in"),
        pytest.param(moved(GAUSSIAN.counts, 20, 21, 60), None, 1.00035, -0.320, id="60 moved out"),
        pytest.param(PLAIN, PLAIN_TAIL, 1.0218, -3.853, id="plain Gaussian masses"),
        pytest.param(GAUSSIAN.counts, tail_with(first=273188318), 1.0081, -3.828, id="tail +2 %"),
        pytest.param(GAUSSIAN.counts, tail_with(bend=0), 1.0147, -12.055, id="tail without bend"),
    ],
)
def test_tampered_gaussian_is_rejected(
    counts: Sequence[int], tail: Sequence[int] | None, ratio: float, z: float
) -> None:
    found = certificate.gaussian(counts, tail)
    assert not found.passed
    assert found.worst_ratio == pytest.approx(ratio, rel=5e-5)
    assert found.worst_at == pytest.approx(z, abs=1e-3)


def test_exact_certificate_rejects_too() -> None:
    found = exact_certificate.gaussian(moved(GAUSSIAN.counts, 101, 100, 60), intervals=(0, 128))
    assert not found.passed
    assert found.worst_ratio > 1.001
    assert found.table_sha256 != GAUSSIAN.table_sha256


@pytest.mark.parametrize(
    ("source", "target"), [(0, 1), (1, 0), (34, 35), (101, 100), (254, 255), (253, 254)]
)
def test_laplace_moved_by_one_count_is_rejected(source: int, target: int) -> None:
    found = certificate.laplace(moved(LAPLACE.counts, source, target, 1))
    assert not found.passed
    assert 1 < found.worst_ratio < 1.02


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
@pytest.mark.parametrize("change", [1, 1 << 16], ids=["threshold", "alias"])
def test_altered_alias_table_is_rejected(law: Law, change: int) -> None:
    table = list(law.table)
    table[17] += change if table[17] % (1 << 16) < 65535 else -change
    faults = certificate.table_faults(law, table)
    assert len(faults) == 2
    assert "hash" in faults[0]


@pytest.mark.parametrize(
    ("counts", "tail", "name"),
    [
        pytest.param(GAUSSIAN.counts[:-1], None, "counts", id="255 counts"),
        pytest.param([TOTAL - 255] + [1] * 254 + [0], None, "counts", id="a zero count"),
        pytest.param([*GAUSSIAN.counts[:-1], 1175], None, "counts", id="sum"),
        pytest.param(GAUSSIAN.counts, [5, 5], "tail", id="flat tail"),
        pytest.param(GAUSSIAN.counts, [1 << 128], "tail", id="tail from 1"),
        pytest.param(GAUSSIAN.counts, gaussian_tail()[:300], "tail", id="short tail"),
    ],
)
def test_numbers_that_are_no_law(
    counts: Sequence[int], tail: Sequence[int] | None, name: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        certificate.gaussian(counts, tail)
    assert caught.value.name == name


def test_gaussian_finite_shifts_are_dominated() -> None:
    assert 0.999 < gaussian_shift_ratio(40) <= 1


def test_laplace_pair_dominates_in_two_dimensions() -> None:
    """Every event of two shifted coordinates is within the one-dimensional Laplace test."""
    exact = ExactLaw.of(LAPLACE.name)
    v, shifts = (4321, 11111), (int(0.7 * CELL), int(20.4 * CELL))
    window = slice(len(exact.magnitudes) // 2 - 500, len(exact.magnitudes) // 2 + 500)

    def coordinate(value: int) -> np.ndarray:
        pmf, first = exact.released(value)
        padded = np.concatenate([np.zeros(first - exact.released(0)[1]), pmf])
        return padded[window]

    p = np.outer(*(coordinate(value) for value in v)).ravel()
    q = np.outer(*(coordinate(a + b) for a, b in zip(v, shifts, strict=True))).ravel()
    order = np.argsort(-q / p, kind="stable")
    alpha, power = np.cumsum(p[order]), np.cumsum(q[order])
    mu = sum(shifts) / CELL / SCALE_CELLS
    keep = (alpha > 1e-4) & (power < 1 - 2e-3)  # the window leaves 9e-4 out
    x = np.where(alpha < 0.5, np.log(2 * alpha), -np.log(np.clip(2 * (1 - alpha), 1e-300, None)))
    x = x + mu
    limit = np.where(x < 0, np.exp(x) / 2, 1 - np.exp(-x) / 2)
    assert np.all(power[keep] <= limit[keep] + 1e-9)
    assert np.all(power[keep] >= limit[keep] - 0.01)  # nearly one-dimensional shifts: nearly tight


def simulated(name: str, seed: int = 7) -> Fill:
    """Draws of the exact law from numpy, a second implementation of its definition."""
    law = LAWS[name]
    pmf = ExactLaw.of(name).magnitudes
    cumulative = np.array(list(accumulate(pmf)))
    cumulative /= cumulative[-1]

    def fill(first: int, count: int) -> np.ndarray:
        rng = np.random.default_rng([seed, first])
        k = np.searchsorted(cumulative, rng.random(count), side="right") - len(pmf) // 2
        offset = 64 * rng.integers(0, 256, count) + 32 if law.uses_second_uniform else CELL // 2
        return (k * CELL + rng.integers(0, CELL, count) + offset).astype(np.int32)

    return fill


@pytest.mark.parametrize("name", LAWS)
def test_statistics_accept_the_law_and_reject_other_scales(name: str) -> None:
    found = statistics.examine_with_controls(simulated(name), name, 10**6, 200_000)
    assert found["rejected"] == []
    assert found["passed"]
    assert len(found["tests"]) == 15
    for scale in ("scale 2/3", "scale 3/2"):
        assert {"variance / law", "KS sqrt(n) D", "chi-square y"} <= set(found["controls"][scale])


@pytest.mark.parametrize("name", LAWS)
def test_statistics_accept_the_generator(name: str) -> None:
    found = statistics.examine(statistics.generator(name), name, 10**6)
    assert found["rejected"] == []
    assert statistics.released_mismatches(name, 50_000) == 0


@pytest.mark.parametrize(
    ("spoil", "caught"),
    [
        pytest.param(lambda x: np.repeat(x[::16], 16)[: len(x)], "correlation at 4", id="lanes"),
        pytest.param(lambda x: x & ~1, "chi-square low bits", id="a dead bit"),
        pytest.param(lambda x: x + CELL, "mean [cells]", id="one cell off"),
        pytest.param(lambda x: np.clip(x, -(4 << 20), 4 << 20), "beyond 4 scales", id="short tail"),
        pytest.param(lambda x: np.where(x == x[0], 1 << 25, x), "outside the bound", id="outlier"),
    ],
)
def test_statistics_reject_spoilt_draws(
    spoil: Callable[[np.ndarray], np.ndarray], caught: str
) -> None:
    fill = simulated(GAUSSIAN.name)
    found = statistics.examine(
        lambda first, count: spoil(fill(first, count)).astype(np.int32), GAUSSIAN.name, 2_000_000
    )
    assert caught in found["rejected"]
    assert not found["accepted"]


@pytest.mark.parametrize("name", LAWS)
def test_exact_law_moments(name: str) -> None:
    """E X = g/2 - u/2, so E y = v / 2^14 at every phase; the certificate's sd is that of y."""
    exact = ExactLaw.of(name)
    assert exact.mean == (CELL - 1) / 2
    spread = []
    for v in statistics.PHASES:
        pmf, first = exact.released(v)
        y = first + np.arange(len(pmf))
        assert pmf @ y == pytest.approx(v / CELL, abs=1e-9)
        spread.append(float(np.sqrt(pmf @ (y - v / CELL) ** 2)))
    certified = {c.law: c.sd_cells for c in shipped.committed()}[name]
    assert min(spread) - 1e-6 <= certified <= max(spread) + 1e-6

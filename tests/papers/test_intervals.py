"""Student's law against tables, and what is made of it."""

from __future__ import annotations

import math
import statistics

import pytest

from dpkern.papers.intervals import interval, paired_test


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.70620474), (2, 4.30265273), (4, 2.77644511), (9, 2.26215716), (99, 1.98421695)],
)
def test_quantiles_of_the_tables(freedom: int, quantile: float) -> None:
    values = [float(k) for k in range(freedom + 1)]
    error = statistics.stdev(values) / math.sqrt(len(values))
    assert interval(values).half / error == pytest.approx(quantile, rel=1e-8)


@pytest.mark.parametrize("t", [0.2, 0.7, 40.0])
def test_the_probability_of_a_difference_is_two_sided(t: float) -> None:
    # Of two differences 1 +- 1 / t, mean over error is t, and Student's law is Cauchy's.
    differences = [1 - 1 / t, 1 + 1 / t]
    wanted = 1 - 2 * math.atan(t) / math.pi
    assert paired_test(differences, [0.0, 0.0]) == pytest.approx(wanted, rel=1e-12)
    assert paired_test([0.0, 0.0], differences) == pytest.approx(wanted, rel=1e-12)


def test_intervals() -> None:
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 4.30265273 / math.sqrt(3)))
    assert interval([5.0, 5.0]) == (5.0, 0.0)
    assert interval([5.0]) == (5.0, math.inf)
    assert all(math.isnan(value) for value in interval([]))


def test_paired_test() -> None:
    # scipy.stats.ttest_rel gives 0.09172111331157186.
    first, second = [4.0, 5.0, 8.0, 7.0], [1.0, 5.0, 2.0, 4.0]
    assert paired_test(first, second) == pytest.approx(0.09172111331157, rel=1e-9)
    assert paired_test(first, first) == 1.0
    assert paired_test([2.0, 3.0], [1.0, 2.0]) == 0.0
    assert paired_test([2.0], [1.0]) == 1.0

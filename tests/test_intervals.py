"""Student's law against tables, and what is made of it."""

from __future__ import annotations

import math

import pytest

from dpkern.papers.intervals import interval, paired_test, student_cdf, student_quantile


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.70620474), (2, 4.30265273), (4, 2.77644511), (9, 2.26215716), (99, 1.98421695)],
)
def test_quantiles_of_the_tables(freedom: int, quantile: float) -> None:
    assert student_quantile(0.975, freedom) == pytest.approx(quantile, rel=1e-8)
    assert student_quantile(0.025, freedom) == pytest.approx(-quantile, rel=1e-8)
    assert student_cdf(quantile, freedom) == pytest.approx(0.975, abs=1e-9)


def test_closed_forms() -> None:
    for t in (-3.0, -0.2, 0.0, 0.7, 40.0):
        assert student_cdf(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi, abs=1e-12)
        assert student_cdf(t, 2) == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)), abs=1e-12)


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

"""A claim holds, fails or is undecided, and each for its own reason."""

from __future__ import annotations

import math

import pytest

from dpkern.papers import verdict
from dpkern.papers.adlm.published import PLAIN, PSGD
from dpkern.papers.adlm.setup import MNIST
from dpkern.papers.adlm.verdicts import JudgedFigure, of_figure
from dpkern.papers.intervals import interval
from dpkern.papers.verdict import FAILS, HOLDS, UNDECIDED, of_epsilon, of_number, of_order

RUNS = [90.0, 90.4, 89.8, 90.1, 89.9]


@pytest.mark.parametrize(("printed", "says"), [(90.1, HOLDS), (93.0, FAILS)])
def test_a_number_is_judged_by_the_interval_of_our_mean(printed: float, says: str) -> None:
    assert of_number("c", printed, interval(RUNS), len(RUNS), unit="%").verdict == says
    few = of_number("c", printed, interval(RUNS[:3]), 3, unit="%")
    assert (few.verdict, few.reason) == (UNDECIDED, "3 runs are too few, 5 are needed")
    other = of_number("c", printed, interval(RUNS), 5, unit="%", hindrance="other data")
    assert (other.verdict, other.reason) == (UNDECIDED, "other data")


def test_a_number_that_is_reached_may_be_passed() -> None:
    above = of_number("c", 85.0, interval(RUNS), 5, unit="%", at_least=True)
    assert (above.verdict, above.reason) == (HOLDS, "the interval is above the printed number")
    assert of_number("c", 85.0, interval(RUNS), 5, unit="%").verdict == FAILS
    assert of_number("c", 95.0, interval(RUNS), 5, unit="%", at_least=True).verdict == FAILS
    assert of_number("c", 85.0, interval(RUNS[:2]), 2, unit="%", at_least=True).verdict == UNDECIDED


def test_an_order_is_judged_by_paired_differences() -> None:
    lower = [value - 1 + 0.01 * place for place, value in enumerate(RUNS)]
    assert of_order("c", RUNS, lower, unit="points").verdict == HOLDS
    assert of_order("c", lower, RUNS, unit="points").verdict == FAILS
    mixed = of_order("c", RUNS, RUNS[::-1], unit="points")
    assert (mixed.verdict, mixed.ours) == (UNDECIDED, pytest.approx(0))
    # Between the same numbers without their pairs nothing could be told.
    assert of_order("c", RUNS[:1], lower[:1], unit="points").verdict == UNDECIDED


def test_an_epsilon_fails_where_some_pair_is_known_to_spend_more() -> None:
    assert of_epsilon("c", 1.0, 1.0).verdict == HOLDS
    assert "by slack" in of_epsilon("c", 1.0, 0.5).reason
    assert of_epsilon("c", 1.0, 1.01).verdict == FAILS
    assert of_epsilon("c", 0.365, 0.36502, rounding=5e-4).verdict == HOLDS
    nothing = of_epsilon("c", 1.0, math.inf, "why")
    assert (nothing.verdict, nothing.reason) == (FAILS, "nothing can be certified; why")
    assert of_epsilon("c", 1.0, math.inf, attained=False).verdict == UNDECIDED


def test_a_printed_gain_is_judged_by_its_size() -> None:
    """A gain of one point is no gain of the 7.7 points that are printed."""

    def runs(*last: float) -> dict[str, object]:
        return {
            "accuracy": [[one] for one in last],
            "claimed": 0.5,
            "certified": 0.5,
            "diverged": 0,
            "collapsed": 0,
        }

    accuracy = {"AdLM": RUNS, "ILM": [one - 2.2 for one in RUNS], PSGD: [one - 1 for one in RUNS]}
    numbers = {(name, 0.5): runs(*values) for name, values in accuracy.items()}
    figure = JudgedFigure(
        experiment=MNIST,
        same_data=True,
        data="MNIST",
        epochs=MNIST.source_epochs,
        departure="",
        numbers=numbers | {(PLAIN, math.inf): runs(99.0)},
        epsilons=(0.5,),
        averaged=(0.5,),
    )
    found = {one.published: one for one in of_figure(figure) if "more accurate" in one.claim}
    assert (found[7.7].verdict, found[7.7].ours) == (FAILS, pytest.approx(1.0))
    assert found[2.0].verdict == HOLDS, "2 is printed for what rounds to it"


def test_every_verdict_has_a_reason() -> None:
    lower = [value - 1 + 0.01 * place for place, value in enumerate(RUNS)]
    found = [of_number("c", printed, interval(RUNS), 5, unit="%") for printed in (90.1, 93.0)]
    found += [of_order("c", *pair, unit="%") for pair in ((RUNS, lower), (lower, RUNS))]
    found += [of_epsilon("c", 1.0, certified) for certified in (1.0, 2.0, math.inf)]
    found += [verdict.exact("c", True), verdict.exact("c", False, ours=1.0, half=0.1)]
    assert all(one.reason for one in found)
    assert len({one.reason for one in found}) == len(found)


def test_a_simulated_number_has_an_interval() -> None:
    one = verdict.exact("c", True, unit="share", ours=0.5, half=0.1)
    assert (one.low, one.high) == (0.4, 0.6)
    assert verdict.exact("c", True).low is None


def test_runs_that_stopped_or_collapsed_decide_nothing() -> None:
    assert not verdict.spoiled(2, 2, 5)
    assert verdict.spoiled(3, 0, 5) == "3 of 5 runs were stopped by the guard, 0 collapsed"
    assert verdict.spoiled(0, 5, 5)


def test_a_verdict_reads_as_a_line() -> None:
    one = of_number("claim", 90.1, interval(RUNS), 5, unit="%", reason="why")
    assert one.sentence == "HOLDS: claim; ours 90.04 in [89.75, 90.33] %: why"
    assert of_order("c", [2.0], [1.0], unit="points").number == "1 (one run) points"

"""Random generators that a probe moves are put back, whichever NumPy uses."""

from __future__ import annotations

import numpy as np
import pytest

from dpkern.engine.random_state import RandomState


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["MT19937", "PCG64", "Philox", "SFC64"])
def test_numpys_generator_is_put_back_whichever_it_is(kind: str) -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(getattr(np.random, kind)(3))
    try:
        state = RandomState()
        first = np.random.standard_normal(3)
        state.restore()
        assert np.array_equal(np.random.standard_normal(3), first)
    finally:
        np.random.set_bit_generator(before)


def test_a_kept_normal_number_is_put_back() -> None:
    before = np.random.get_state()
    try:
        for drawn in range(3):
            np.random.seed(1)
            np.random.standard_normal(drawn)
            state = RandomState()
            first = np.random.standard_normal(3)
            state.restore()
            assert np.array_equal(np.random.standard_normal(3), first)
            state.restore()
            state.restore()
            assert np.array_equal(np.random.standard_normal(3), first)
    finally:
        np.random.set_state(before)


def test_a_kept_normal_number_is_seen_where_the_generator_has_not_moved() -> None:
    """A legacy normal draw that takes the kept number leaves the twister's memory as it is."""
    before = np.random.get_state()
    try:
        np.random.seed(1)
        np.random.normal()
        start = RandomState()
        second = np.random.normal()
        RandomState()  # reads the state in which nothing is kept
        start.restore()
        again = RandomState()  # the same memory, but the number is kept again
        np.random.normal()
        again.restore()
        assert np.random.normal() == second
    finally:
        np.random.set_state(before)

"""The benchmark of SPOF's full size: what it times, at a small size."""

from __future__ import annotations

import pytest

from benchmarks import spof_runs

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_small_size_is_trained_and_timed_as_the_full_one() -> None:
    found = spof_runs.measured(records=8, epochs=2, runs=2, rounds=2)
    assert [row["steps"] for row in found["trainings"]] == [16, 16, 16]
    assert found["trainings"][2]["stopped"] == 0
    assert [(row["mode"], row["runs"]) for row in found["steps"]] == [
        ("published", 1),
        ("published", 2),
        ("corrected", 1),
        ("corrected", 2),
    ]
    assert all(row["ratio"] > 0 for row in found["steps"])
    text = spof_runs.markdown({"dpkern": "1", "torch": "2", "processor": "any"}, found)
    assert "8 generated records of each of 2 users" in text
    assert text.count("| SPOF published") == 4

"""Norms that one backend takes bound the integers that another one sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import dpkern
from dpkern.engine import exact_sums
from dpkern.engine.per_sample_gradients import LinearGradients
from dpkern.ops import ghost


def test_a_bound_covers_kernels_that_round_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels on a processor with tiles of bfloat16 numbers, and a loop that chooses backends."""
    usual = ghost.linear_sum_error

    def by_tiles(a: Tensor, g: Tensor, *, backend: str | None = None, **given: Any) -> Tensor:
        wider = 1 if backend is None else 15
        return wider * usual(a, g, backend=backend, **given)

    monkeypatch.setattr(ghost, "linear_sum_error", by_tiles)
    record = LinearGradients(torch.randn(3, 8, 5), torch.randn(3, 8, 4))
    kernels = exact_sums.rounding_error(record)
    with dpkern.use("reference"):
        chosen = exact_sums.rounding_error(record)
        own = usual(record.a, record.g)
    assert kernels is not None
    assert chosen is not None
    assert torch.equal(chosen, 15 * kernels)  # not what the reference loses, which is less
    assert bool((own < chosen).all())

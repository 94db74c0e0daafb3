"""What a probe hears of each use: right numbers, in few allocations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dpkern.engine.heard import USES, Heard


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sums_and_norms_are_those_of_float64(dtype: torch.dtype) -> None:
    heard = Heard()
    all_rows = [torch.randn(5, width).to(dtype) for width in (1, 3, 700)]
    uses: list[Any] = [object() for _ in all_rows]
    for use, rows in zip(uses, all_rows, strict=True):
        heard.note(use, rows)
    for found, use, rows in zip(heard, uses, all_rows, strict=True):
        wide = rows.double()
        assert found[0] is use
        torch.testing.assert_close(found[1], torch.stack((wide.sum(1), wide.norm(dim=1))))


def test_uses_share_their_memory() -> None:
    heard = Heard()
    for number in range(USES + 1):
        heard.note(number, torch.full((2, 4), float(number)))  # type: ignore[arg-type]
    blocks = {place.untyped_storage().data_ptr() for _, place in heard}
    assert len(blocks) == 2
    assert [float(place[0, 0]) for _, place in heard] == [4.0 * n for n in range(USES + 1)]

"""Numbers that kernels take ready-made: those of the reference, for any scale."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from dpkern.ops import _lattice
from dpkern.ops.backends import _numbers

scales = st.floats(2.0**-104, 2.0**116)


@given(scale=scales, dtype=st.sampled_from([torch.float32, torch.float64]))
def test_lattice_numbers_are_the_reference_s(scale: float, dtype: torch.dtype) -> None:
    assert _numbers.per_unit(scale, dtype) == float(_lattice.per_unit(scale, dtype))
    assert _numbers.cell(scale, dtype) == float(_lattice.cell(scale, dtype))


@given(scale=scales, factor=st.floats(1e-6, 1.0))
def test_the_step_is_rounded_once(scale: float, factor: float) -> None:
    exact = torch.tensor(scale / 64 * factor, dtype=torch.float64)
    assert _numbers.step(scale, factor, torch.float32) == float(exact.float())
    assert _numbers.step(scale, factor, torch.float64) == float(exact)


@given(x=st.floats(allow_nan=False))
def test_bits_and_rounding(x: float) -> None:
    value = torch.tensor(x, dtype=torch.float64)
    assert _numbers.bits(x) == int(value.view(torch.int64))
    assert _numbers.rounded(x, torch.float32) == float(value.float())

"""Layer 4 on outputs: grids, lattice, low bits, repetitions; sound noise passes, no fault does.

Noise comes from seeded keys: no test depends on chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch

from dpkern.audit import bits
from dpkern.audit.noise_reuse import repeats
from dpkern.base.errors import InvalidInput
from dpkern.base.laws import ESCAPE, LAWS
from dpkern.base.rng import Key, Purpose
from dpkern.ops import noise

RUNS, WIDTH = 10_000, 40


def released(
    law: str = "gaussian", scale: float | None = None, dtype: torch.dtype = torch.int32
) -> torch.Tensor:
    key = Key.from_unsafe_seed(7)
    rounding = None if scale is None else key.stream(Purpose.ROUNDING, 0)
    x = torch.zeros(RUNS, WIDTH, dtype=dtype)
    stream = key.stream(Purpose.NOISE, 0)
    return noise.add_noise(x, stream=stream, distribution=law, scale=scale, rounding=rounding)


def exponent(value: float) -> float:
    """The largest e with value in 2^e Z, from the exact fraction."""
    if value == 0 or not math.isfinite(value):
        return bits.EVERY_GRID
    number = Fraction(value)
    low = (number.numerator & -number.numerator).bit_length() - 1
    return float(low - (number.denominator.bit_length() - 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_grid_exponent_of_floats(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.5, 3.0, info.max, info.tiny]
    special += [info.smallest_normal, info.smallest_normal / 2, info.tiny * info.eps]
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(500, generator=generator, dtype=torch.float64)
    spread *= 2.0 ** torch.randint(-14, 14, (500,), generator=generator)
    values = torch.cat([torch.tensor(special, dtype=torch.float64), spread]).to(dtype)
    assert bits.grid_exponent(values).tolist() == [exponent(v) for v in values.double().tolist()]


def test_grid_exponent_of_integers() -> None:
    values = [0, 1, -1, 12, -(2**20), 2**62, -(2**63), 2**63 - 1]
    wanted = [bits.EVERY_GRID, 0, 0, 2, 20, 62, 63, 0]
    assert bits.grid_exponent(torch.tensor(values)).tolist() == wanted
    assert bits.grid_exponent(torch.tensor([4, 6], dtype=torch.int32)).tolist() == [2, 1]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool])
def test_grid_exponent_refuses(dtype: torch.dtype) -> None:
    with pytest.raises(InvalidInput, match="floats or integers"):
        bits.grid_exponent(torch.zeros(2, dtype=dtype))


def test_precision_looks_at_the_finest_bit() -> None:
    seen = torch.tensor([[1.0, 0.25], [4.0, 0.0], [0.0, 0.0]])
    assert bits.Precision()(seen).tolist() == [-2, 2, bits.EVERY_GRID]
    assert bits.Precision((0,))(seen).tolist() == [0, 2, bits.EVERY_GRID]
    first, second = bits.precision_pairs("D", "D'", coordinates=[1])
    assert (first.without, first.present) == (second.present, second.without) == ("D", "D'")
    assert first.score == second.score == bits.Precision((1,))


def test_float_noise_has_a_grid_that_depends_on_the_data() -> None:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(2, 50_000, 1, generator=generator)
    without, present = bits.Precision()(drawn[0]), bits.Precision()(1 + drawn[1])
    assert (without < -24).double().mean() > 0.2
    assert not (present < -24).any()


@pytest.mark.parametrize("law", sorted(LAWS))
@pytest.mark.parametrize(
    ("scale", "dtype"),
    [
        (None, torch.int32),
        (None, torch.int64),
        (64.0, torch.float32),
        (1.1, torch.float32),
        (3e-5, torch.float32),
        (1.1, torch.float64),
    ],
    ids=str,
)
def test_sound_noise(law: str, scale: float | None, dtype: torch.dtype) -> None:
    found = bits.lattice_noise(released(law, scale, dtype), (scale or 64) / 64, law=law)
    assert [check.passed for check in found] == [True] * 5, found


def test_a_value_off_the_lattice_is_found() -> None:
    noisy = released(scale=1.1, dtype=torch.float32)
    noisy[77, 3] = torch.nextafter(noisy[77, 3], torch.tensor(9.0))
    found = bits.lattice_noise(noisy, 1.1 / 64)
    assert [(check.name, check.passed, check.numbers["off"]) for check in found] == [
        ("lattice", False, 1)
    ]
    assert bits.lattice(torch.full((1, 1), math.nan), 1.0).passed is False


def test_cells_of_each_coordinate() -> None:
    noisy = released(scale=1.1, dtype=torch.float64)
    factors = torch.arange(1, WIDTH + 1, dtype=torch.float64)
    cells = factors * 1.1 / 64
    assert bits.lattice(bits.cells(noisy, 1.1 / 64) * cells, cells).passed
    assert not bits.lattice(noisy, cells).passed


@pytest.mark.parametrize("cell", [0.0, -1.0, math.nan, 1e-60])
def test_refused_cells(cell: float) -> None:
    with pytest.raises(InvalidInput, match="cell"):
        bits.lattice(torch.zeros(2, 2), cell)


def biased(values: torch.Tensor) -> torch.Tensor:
    """One value in fifty loses its lowest bit."""
    values.view(-1)[::50] &= ~1
    return values


def biased_lane(values: torch.Tensor) -> torch.Tensor:
    """One coordinate of forty is a little uneven: all together hide it."""
    values[::7, 11] |= 1
    return values


@pytest.mark.parametrize("fault", [biased, biased_lane])
def test_uneven_low_bits_are_found(fault: Callable[[torch.Tensor], torch.Tensor]) -> None:
    found = bits.uniform_low_bits(fault(released()), bits=4)
    assert found.passed is False
    if fault is biased_lane:
        together = bits.uniform_low_bits(fault(released()).view(-1, 1), bits=4)
        assert together.passed is True


def test_low_bits_refused_and_not_asked() -> None:
    with pytest.raises(InvalidInput, match="integers"):
        bits.uniform_low_bits(torch.zeros(9, 9), bits=4)
    assert bits.uniform_low_bits(torch.zeros(9, 9, dtype=torch.int32), bits=4).passed is None


@pytest.mark.parametrize("law", sorted(LAWS))
def test_the_laws_low_bits_are_as_uniform_as_is_said(law: str) -> None:
    size = 1 << bits.LOW_BITS[law]
    counts = np.array(LAWS[law].counts[:ESCAPE], dtype=float)
    k = np.arange(ESCAPE)
    mass = sum(np.bincount(y % size, counts, size) for y in (k, -1 - k))
    assert np.abs(mass / mass.mean() - 1).max() < {"gaussian": 4e-5, "laplace": 2e-4}[law]
    finer = sum(np.bincount(y % (4 * size), counts, 4 * size) for y in (k, -1 - k))
    assert law == "gaussian" or np.abs(finer / finer.mean() - 1).max() > 1e-3


def equal_runs(x: torch.Tensor) -> None:
    x[77] = x[9000]


def equal_lanes(x: torch.Tensor) -> None:
    x[:, 5] = x[:, 30]


def opposite_lanes(x: torch.Tensor) -> None:
    # floor((0 - X) / cell) for a draw with the opposite sign.
    x[:, 5] = -1 - x[:, 30]


def equal_lanes_of_other_data(x: torch.Tensor) -> None:
    x[:, 5] = x[:, 30] + 17


def shifted(x: torch.Tensor) -> None:
    x[5, 3:30] = x[9999, 7:34]


def within_a_run(x: torch.Tensor) -> None:
    x[5, :12] = x[5, 20:32]


def table(x: torch.Tensor) -> None:
    """Windows of one table of 2^16 values at random offsets."""
    generator = torch.Generator().manual_seed(2)
    values = torch.randint(-200, 200, (1 << 16,), generator=generator, dtype=x.dtype)
    starts = torch.randint(0, len(values) - WIDTH, (RUNS, 1), generator=generator)
    x.copy_(values[starts + torch.arange(WIDTH)])


FAULTS = {
    equal_runs: {"equal runs", "equal stretches"},
    equal_lanes: {"equal lanes"},
    opposite_lanes: {"equal lanes"},
    equal_lanes_of_other_data: {"equal lanes"},
    shifted: {"equal stretches"},
    within_a_run: {"equal stretches"},
    table: {"equal runs", "equal stretches"},
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("floats", [False, True], ids=["cells", "floats"])
def test_repetitions_are_found(fault: Callable[[torch.Tensor], None], floats: bool) -> None:
    noisy = released()
    fault(noisy)
    if floats:
        noisy = noisy * (1.0 / 64)
    found = {check.name for check in repeats(noisy) if check.passed is False}
    assert found == FAULTS[fault]


def test_repetitions_of_continuous_noise() -> None:
    noisy = torch.randn(2000, 30, generator=torch.Generator().manual_seed(3))
    assert [check.passed for check in repeats(noisy)] == [True] * 3
    noisy[:, 4] = -noisy[:, 9]
    assert [check.passed for check in repeats(noisy)] == [True, False, True]


def test_too_few_values_are_not_judged() -> None:
    assert [check.passed for check in repeats(released()[:, :2])] == [None, True, None]
    assert [check.passed for check in repeats(released()[:3])] == [True, None, True]
    with pytest.raises(InvalidInput, match=r"real matrix \[runs, d\]"):
        repeats(torch.zeros(5))

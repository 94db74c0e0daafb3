"""Outputs lie on the lattice for every input, and the precision attack gains nothing from them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpkern.base.rng import Purpose
from dpkern.ops import noise, testing
from tests.evidence import bits, precision
from tests.ops.backends.every_backend import every_backend, examples

RELEASES = 150_000


@every_backend
def test_every_float_comes_out_on_the_lattice(backend: str) -> None:
    figures = precision.lattice_figures(60_000, seed=1, backend=backend)
    assert figures["values"] >= 50_000
    assert figures["off_lattice"] == figures["nan"] == 0


@every_backend
def test_any_float_and_any_scale(backend: str) -> None:
    @settings(max_examples=examples(100, backend), deadline=None, derandomize=True)
    @given(
        x=st.one_of(st.floats(width=32), st.floats()),
        wide=st.booleans(),
        scale=st.floats(2.0**-104, 2.0**116),
    )
    def holds(x: float, wide: bool, scale: float) -> None:
        kind = torch.float64 if wide else torch.float32
        value = torch.tensor([x], dtype=torch.float64).to(kind).repeat(3)
        stream, rounding = (testing.KEY.stream(p, 3) for p in (Purpose.NOISE, Purpose.ROUNDING))
        given_noise = {"stream": stream, "rounding": rounding, "scale": scale}
        out = noise.add_noise(value, backend=backend, **given_noise)
        assert precision.off_lattice(out.numpy(), scale) == 0

    holds()


@pytest.mark.parametrize("name", precision.MECHANISMS)
def test_precision_attack(name: str) -> None:
    figures = precision.against(precision.MECHANISMS[name], RELEASES)
    if name in precision.BROKEN:
        assert figures["advantage"] > 0.05, figures
        assert figures["off_lattice"] > 0.9 * RELEASES
    else:
        assert figures["advantage"] == 0, figures
        assert figures["off_lattice"] == 0
        assert figures["cells within 2 sigma seen in one world only"] == 0
        assert figures["p of y mod 16"] > precision.CONFIDENCE


def test_a_leaking_lattice_is_caught() -> None:
    """Cells of 2^-6, but the record shifts them all by a little: only low bits show that."""

    def leaking(present: bool, count: int, turn: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(2 * turn + present)
        cells = (torch.randn(count, generator=generator) * 64).round()
        return cells * 2.0**-6 + present * 2.0**-12

    assert precision.against(leaking, RELEASES)["advantage"] > 0.9


def test_cells_that_only_one_sum_reaches_are_caught() -> None:
    """Cells rounded to even with the record, to odd without: all on the lattice."""

    def parity(present: bool, count: int, turn: int) -> torch.Tensor:
        cell = np.float32(precision.SIGMA / 64)
        y = np.rint(precision.exact_tier(present, count, turn).numpy() / cell).astype(np.int64)
        return torch.from_numpy((y | 1 if present else y & ~1).astype(np.float32) * cell)

    figures = precision.against(parity, RELEASES)
    assert figures["off_lattice"] == 0
    assert figures["cells within 2 sigma seen in one world only"] > 100
    assert figures["p of y mod 16"] < 1e-9


def test_a_point_beside_the_lattice_is_seen() -> None:
    for kind in (np.float32, np.float64):
        cell = kind(1.1 / 64)
        points = (np.arange(-2000, 2000).astype(kind)) * cell
        assert precision.off_lattice(points, 1.1) == 0
        beside = np.nextafter(points, kind(math.inf))
        assert precision.off_lattice(beside, 1.1) == len(points)
        assert precision.off_lattice(np.array([math.nan], dtype=kind), 1.1) == 1


def test_the_bits_evidence_finds_mismatches(monkeypatch: pytest.MonkeyPatch) -> None:
    if not testing.available_isas():
        pytest.skip("no compiled kernels to compare with")
    small = bits.run(20_000)
    assert small["passed"], small
    honest = noise.lattice_draws

    def broken(*args: object, backend: str, **given: object) -> torch.Tensor:
        drawn = honest(*args, backend=backend, **given)  # type: ignore[arg-type]
        if backend == "cpu" and drawn.numel() > 100:
            drawn[77] ^= 1
        return drawn

    monkeypatch.setattr(noise, "lattice_draws", broken)
    assert bits.draw_mismatches(3000, "gaussian", 20, 0)["mismatches"]["baseline x1"] > 0

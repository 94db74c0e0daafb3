"""Kernels that make their noise in registers refuse other sources, and say who takes the call."""

from __future__ import annotations

import pytest
import torch

from dpkern.base.errors import BackendError, InvalidInput
from dpkern.base.rng import Key, Purpose
from dpkern.ops import _cdt, noise, testing
from dpkern.ops._draws import CdtDraws, Draws, SampleReads
from dpkern.privacy.mechanisms import DPSGD
from dpkern.step import DPStep
from dpkern.step.noise_tables import RingPrefetch
from tests.ops.backends.every_backend import PARAMETERS

KEY = Key.from_unsafe_seed(1, rounds=8)
STREAM, OTHER, ROUNDING = (
    KEY.stream(purpose, 1) for purpose in (Purpose.NOISE, Purpose.TABLES, Purpose.ROUNDING)
)


def sources() -> dict[str, Draws]:
    """Return what a ring, a table of samples and a cumulative table hand out."""
    return {
        "ring": Draws(0, torch.arange(512, dtype=torch.int32)),
        "table": SampleReads(0, torch.arange(8, dtype=torch.int16), cursor=3, shift=2),
        "cdt": CdtDraws(0, _cdt.packed([1 << 31, 3 << 30], 32), stream=OTHER),
    }


IN_REGISTERS = pytest.mark.parametrize(
    "backend", [p for p in PARAMETERS if p.values[0] in ("numba", "triton")]
)


@IN_REGISTERS
@pytest.mark.parametrize("source", ["ring", "table", "cdt"])
def test_a_source_is_refused_by_name_with_the_backends_that_take_it(
    backend: str, source: str
) -> None:
    x = torch.zeros(5)
    options = {"stream": STREAM, "rounding": ROUNDING, "scale": 1.0}
    with pytest.raises(BackendError, match="draws in registers") as error:
        noise.add_noise(x, **options, draws=sources()[source], backend=backend)
    assert bool((x == 0).all())
    others = str(error.value)
    assert "reference (available)" in others
    if "cpu" in testing.available_backends():
        assert "cpu (available)" in others
    assert f"{backend} (" not in others
    other = {"numba": "triton", "triton": "numba"}[backend]
    assert f"{other} (available)" not in others


@IN_REGISTERS
def test_a_call_that_they_take_names_them(backend: str) -> None:
    """Negative control: without a source the same backend is among those that take a call."""
    x = torch.zeros(5)
    noise.add_noise(x, stream=STREAM, rounding=ROUNDING, scale=1.0, backend=backend)
    assert bool((x != 0).any())


@pytest.mark.parametrize("name", ["numba", "triton"])
def test_a_step_names_the_backends_that_take_its_source(name: str) -> None:
    with pytest.raises(InvalidInput, match="cpu, cuda, cupy, reference"):
        DPStep(
            DPSGD(noise_multiplier=1.0, max_grad_norm=0.5),
            [torch.zeros(4)],
            expected_batch_size=1,
            sample_rate=0.1,
            noise_source=RingPrefetch(),
            backend=name,
        )

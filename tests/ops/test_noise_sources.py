"""Every kernel that draws takes every noise source, with the reference's bits on every backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from dpkern.base.dispatch import OPS
from dpkern.base.rng import Key, Purpose
from dpkern.ops import _cdt, coef, noise, update
from dpkern.ops._draws import CdtDraws, Draws, SampleReads
from dpkern.privacy.mechanisms import DPSGD
from dpkern.step import DPStep
from dpkern.step.noise_tables import CdtTable, RingPrefetch, SampleTable
from dpkern.step.noise_tables._cdt_law import CdtLaw
from tests.ops.backends.every_backend import EMULATED, every_backend
from tests.step.test_table_draws import tied

KEY = Key.from_unsafe_seed(1, rounds=8)
OTHER, TABLES, ROUNDING = (
    KEY.stream(purpose, 1) for purpose in (Purpose.SAMPLING, Purpose.TABLES, Purpose.ROUNDING)
)
EDGE = (1 << 14) - 1
"""A draw with which the rounding of half a unit decides over the result."""
FIRST, SIZES, POSITIONS = 509, (700, 0, 3), (509, 1536, 1536)
COUNT = 4096

OTHER_ROUNDING = KEY.stream(Purpose.ROUNDING, 2)
STREAMS = {
    "gaussian": KEY.stream(Purpose.NOISE, 1),
    "laplace": KEY.stream(Purpose.LAPLACE, 1),
}


def _ring(law: str) -> Draws:
    place: dict[str, Any] = {"position": FIRST, "count": COUNT}
    bits = noise.rounding_bits(ROUNDING, **place)
    return Draws(FIRST, noise.lattice_draws(STREAMS[law], distribution=law, **place), bits)


def _table(law: str) -> Draws:
    samples = torch.arange(-400, 401, dtype=torch.int16)
    return SampleReads(FIRST, samples, cursor=3, shift=12)


def _looked_up(law: str) -> Draws:
    return CdtDraws(FIRST, CdtLaw(law, 64).table, stream=TABLES, distribution=law)


SOURCES: dict[str, Callable[[str], Draws | None]] = {
    "inline": lambda law: None,
    "ring": _ring,
    "ring without bits": lambda law: replace(_ring(law), rounding=None),
    "cdt": _looked_up,
    "table": _table,
    "edges": lambda law: SampleReads(FIRST, torch.full((7,), EDGE, dtype=torch.int16)),
}


def _stream(source: str, law: str) -> Any:
    """The law's stream if draws are made of it, else one that nothing may come from."""
    return STREAMS[law] if source == "inline" else OTHER


def _sums(n: int, scale: float, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Whole cells of the lattice, and half a unit more where they are floats."""
    cells = torch.randint(-20, 20, (n,), generator=generator) << 14
    return ((cells + 0.5) * scale / 2**20).to(dtype) if dtype.is_floating_point else cells.to(dtype)


def _added(source: str, dtype: torch.dtype, backend: str) -> list[torch.Tensor]:
    made, floats = [], dtype.is_floating_point
    for law in STREAMS:
        x = _sums(700, 1.5, dtype, torch.Generator().manual_seed(1))
        given: dict[str, Any] = {"scale": 1.5, "rounding": ROUNDING} if floats else {}
        given |= {"stream": _stream(source, law), "distribution": law, "position": 600}
        noise.add_noise(x, draws=SOURCES[source](law), backend=backend, **given)
        made.append(x)
    return made


def _updated(source: str, dtype: torch.dtype, backend: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    params = [torch.randn(n, generator=generator) for n in SIZES]
    scales = (0.5, 1.0, 2.0)
    sums = [_sums(n, scale, dtype, generator) for n, scale in zip(SIZES, scales, strict=True)]
    rule = update.SGD(lr=0.1, momentum=0.9)
    given = update.Noise(
        distribution="gaussian",
        scales=scales,
        stream=_stream(source, "gaussian"),
        positions=POSITIONS,
        rounding=ROUNDING if dtype.is_floating_point else None,
        draws=SOURCES[source]("gaussian"),
    )
    state = rule.init(params)
    update.step(params, sums, rule=rule, state=state, noise=given, backend=backend)
    return [*params, *(buffer for each in state.buffers.values() for buffer in each)]


def _coefficients(source: str, dtype: torch.dtype, backend: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    given = coef.Noise(
        scale=0.75,
        stream=_stream(source, "laplace"),
        rounding=ROUNDING,
        position=600,
        draws=SOURCES[source]("laplace"),
    )
    x = 0.5 - _sums(180, 0.75, dtype, generator).view(9, 20)
    z = torch.randn(9, 20, generator=generator, dtype=dtype)
    made = [*coef.perturb(x, form="printed", noise=given, backend=backend)]
    made += coef.quadratic(z, x, form="printed", noise=given, backend=backend)
    if backend in OPS["coef.expanded"].kernels or backend == "reference":
        weights = torch.randn(2, 5, generator=generator, dtype=dtype)
        made += coef.expanded(
            x[:, :5].contiguous(), x[:, 5:7].contiguous(), weights, noise=given, backend=backend
        )
    return made


CASES = {
    "add_noise int32": (_added, torch.int32),
    "add_noise float32": (_added, torch.float32),
    "update.step int32": (_updated, torch.int32),
    "update.step float32": (_updated, torch.float32),
    "coef float64": (_coefficients, torch.float64),
}


@every_backend
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("case", CASES)
def test_a_source_gives_the_references_bits(case: str, source: str, backend: str) -> None:
    run, dtype = CASES[case]
    wanted = run(source, dtype, "reference")
    assert all(map(torch.equal, run(source, dtype, backend), wanted))


WRITERS = {
    "cuda": "dpkern.ops.backends._launch_noise.source_draws",
    "triton": "dpkern.ops.backends._triton.noise._source_draws",
    "numba": "dpkern.ops.backends._numba.noise.source_draws",
}
"""What writes a source's draws to memory."""


@every_backend
@pytest.mark.parametrize("case", CASES)
def test_kernels_read_tables_themselves(
    case: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend not in WRITERS:
        pytest.skip("compiled: its kernels write draws only where source_draws is called")

    def written(*_: Any, **__: Any) -> torch.Tensor:
        raise AssertionError("draws of a table cross memory")

    monkeypatch.setattr(WRITERS[backend], written)
    run, dtype = CASES[case]
    for source in ("cdt", "table"):
        wanted = run(source, dtype, "reference")
        assert all(map(torch.equal, run(source, dtype, backend), wanted))


@pytest.mark.parametrize("case", CASES)
def test_sources_differ_but_for_a_ring(case: str) -> None:
    """Negative control: a kernel that drew by itself would show."""
    run, dtype = CASES[case]
    made = {source: run(source, dtype, "reference") for source in SOURCES}
    alike = {source for source in SOURCES if all(map(torch.equal, made[source], made["inline"]))}
    assert alike == {"inline", "ring", "ring without bits"}


@pytest.mark.parametrize("case", [case for case in CASES if "float" in case])
def test_rounding_decides_at_edges(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: bits of another stream would show."""
    run, dtype = CASES[case]
    own = run("edges", dtype, "reference")
    monkeypatch.setattr(f"{__name__}.ROUNDING", OTHER_ROUNDING)
    assert not any(map(torch.equal, run("edges", dtype, "reference")[:1], own[:1]))


@every_backend
@pytest.mark.parametrize("law", STREAMS)
def test_tables_are_read_where_words_are_boundaries_and_far_out(law: str, backend: str) -> None:
    bounds, *_ = tied(TABLES)
    close = CdtDraws(0, _cdt.packed(bounds, 128), stream=TABLES, distribution=law)
    few = CdtDraws(0, CdtLaw(law, 8).table, stream=TABLES, distribution=law)
    wide = SampleReads(5, torch.tensor([3, -7, 11], dtype=torch.int32), cursor=2, shift=9)
    for draws, position, count in (
        (close, 0, 1024),
        (few, 2**34 - 300, 600),
        (wide, 2**40, 700),
        (few, 9, 0),
        (wide, 9, 0),
    ):
        place: dict[str, Any] = {"position": position, "count": count}
        wanted = noise.source_draws(draws, **place, backend="reference")
        assert torch.equal(noise.source_draws(draws, **place, backend=backend), wanted)


@every_backend
@pytest.mark.parametrize("kind", [RingPrefetch, CdtTable, SampleTable])
def test_a_step_takes_its_source_on_every_backend(kind: Any, backend: str) -> None:
    if kind is RingPrefetch and backend in EMULATED:
        pytest.skip("emulated devices run one kernel at a time")

    def trained(name: str) -> list[torch.Tensor]:
        with kind() as source:
            step = DPStep(
                DPSGD(noise_multiplier=1.0, max_grad_norm=0.5),
                [torch.zeros(40), torch.zeros(3)],
                optimizer=update.SGD(lr=0.1),
                expected_batch_size=4,
                sample_rate=0.1,
                noise_source=source,
                key=KEY,
                backend=name,
            )
            generator = torch.Generator().manual_seed(4)
            step.add(per_sample=[torch.randn(4, n, generator=generator) for n in (40, 3)])
            step.finish()
            return list(step.params)

    assert all(map(torch.equal, trained(backend), trained("reference")))

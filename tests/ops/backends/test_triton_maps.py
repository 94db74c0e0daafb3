"""Updates of sums that are noised in other coordinates, interpreted, against the CPU's bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dpkern.base.errors import BackendError
from dpkern.base.rng import Purpose
from dpkern.ops import noise, update
from dpkern.ops._draws import CdtDraws, SampleReads
from dpkern.step.noise_tables._cdt_law import CdtLaw
from tests.ops.backends.test_cuda_maps import KEY, KINDS, SIZES, Problem, equal

pytestmark = pytest.mark.usefixtures("interpreted")
QUICK = (SIZES[1],)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "sizes",
    [size if size in QUICK else pytest.param(size, marks=pytest.mark.slow) for size in SIZES],
)
def test_bits_are_those_of_the_cpu(sizes: tuple[int, int, int], kind: str) -> None:
    cases = ((0, "sgd", torch.float32), (512 * 5 + 77, "nesterov", torch.float64))
    for first, rule, dtype in cases:
        problem = Problem(sizes, kind, dtype, first)
        got, wanted = (problem.run(rule, backend) for backend in ("triton", "cpu"))
        assert got[0] == wanted[0] == 0
        assert equal(got[1], wanted[1]), (first, rule)
    # Negative control: noise that stands one coordinate further on.
    if sizes[2]:
        at = list(problem.noise.positions)
        at[1] += 1
        moved = replace(problem.noise, positions=tuple(at[:2] + [p + 512 for p in at[2:]]))
        found = problem.run(rule, "triton", noise=moved)[1]
        assert not torch.equal(found[1], wanted[1][1])


def test_several_programs_share_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    from dpkern.ops.backends._triton import lattice

    monkeypatch.setattr(lattice, "tiles_per_program", lambda tiles: 4)
    for kind in ("taps", "int32"):
        problem = Problem((5, 9, 800), kind, torch.float32, 77)
        assert equal(problem.run("adam", "triton")[1], problem.run("adam", "cpu")[1])


@pytest.mark.parametrize("source", ["cdt", "table", "values"])
def test_other_sources(source: str) -> None:
    problem = Problem((5, 9, 600), "taps", torch.float32, 77)
    made, first = problem.noise, problem.noise.positions[0]
    draws: Any = {
        "cdt": CdtDraws(first, CdtLaw("gaussian", 64).table, stream=KEY.stream(Purpose.TABLES, 9)),
        "table": SampleReads(first, torch.arange(-400, 401).to(torch.int16), cursor=3, shift=12),
        "values": update.Draws(
            first,
            noise.lattice_draws(
                made.stream, position=first, count=problem.end - first, backend="cpu"
            ),
        ),
    }[source]
    given = replace(made, draws=draws)
    if source == "values":
        with pytest.raises(BackendError, match="draws in memory"):
            problem.run("sgd", "triton", noise=given)
        return
    got, wanted = (problem.run("sgd", backend, noise=given) for backend in ("triton", "cpu"))
    assert got[0] == wanted[0]
    assert equal(got[1], wanted[1])
    assert not equal(got[1], problem.run("sgd", "triton")[1])


def test_what_is_not_finite_counts_as_zero() -> None:
    problem = Problem((5, 9, 600), "taps", torch.float32)
    problem.sums[1][2, 3] = float("nan")
    problem.sums[0][5] = float("inf")
    got, wanted = (problem.run("sgd", backend) for backend in ("triton", "cpu"))
    assert got[0] == wanted[0] == 6
    assert equal(got[1], wanted[1])

"""Updates of sums that are noised in other coordinates, emulated, against the CPU's bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from dpkern.base.rng import Key, Purpose
from dpkern.ops import noise, testing, update
from dpkern.ops._draws import CdtDraws, SampleReads
from dpkern.ops.backends import _kernels, cuda
from dpkern.step.noise_tables._cdt_law import CdtLaw

KEY = Key.from_unsafe_seed(3)
RULES = {
    "sgd": update.SGD(lr=0.1, weight_decay=0.01),
    "nesterov": update.SGD(lr=0.1, momentum=0.9, nesterov=True),
    "adam": update.Adam(lr=0.1, weight_decay=0.01),
}
SIZES = [  # coordinates and taps of a channel pair, and how many pairs
    (9, 9, 1000),
    (4, 9, 1100),  # pairs end where tiles do
    (20, 25, 700),
    (3, 4, 1),
    (512, 40, 9),  # pairs in two tiles each
    (33, 121, 300),
    (1, 1, 700),
    (9, 9, 0),
]
KINDS = ("taps", "coordinates", "int32", "int64")
SCALE, GRADIENT_SCALE = 1.5, 1 / 64


@pytest.fixture(params=[False, True], ids=["forward", "reverse"])
def emulator(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The emulated kernels, with the threads of a block run in this order."""
    module = cuda._emulated()
    if isinstance(module, str):
        pytest.skip(f"cuda {module}")
    with testing.emulated("cuda"):
        module.order(reverse=request.param)
        yield module
    module.order(reverse=False)


class Problem:
    """A mapped parameter between two others, and one more that is mapped."""

    def __init__(
        self, sizes: tuple[int, int, int], kind: str, dtype: torch.dtype, first: int = 0
    ) -> None:
        rank, taps, pairs = sizes
        generator = torch.Generator().manual_seed(rank * taps)

        def matrix(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        shapes = [(700,), (pairs, taps), (3, 5), (40, 9)]
        large, small = (
            update.PairMap(signal=matrix(r, t), back=matrix(t, r))
            for r, t in ((rank, taps), (5, 9))
        )
        self.maps = update.PairMaps((None, large, None, small))
        held = list(shapes)
        if kind != "taps":
            self.maps = self.maps.only_back
            held[1], held[3] = (pairs, rank), (40, 5)
        self.params = [matrix(*shape).to(dtype) for shape in shapes]
        total = {"int32": torch.int32, "int64": torch.int64}.get(kind, dtype)
        most = {"int32": 1e8, "int64": 1e13}.get(kind, 1.0)
        self.sums = [(most * matrix(*shape)).to(total) for shape in held]
        positions, following = [], first
        for n, each in zip((700, pairs * rank, 15, 200), self.maps.each, strict=True):
            positions.append(following)
            following += -(-n // 512) * 512
            following += first % 512 if each is None else 0
        self.noise = update.Noise(
            distribution="gaussian",
            scales=(SCALE, 2.0, SCALE, 0.7),
            stream=KEY.stream(Purpose.NOISE, 7),
            positions=tuple(positions),
            rounding=KEY.stream(Purpose.ROUNDING, 7),
        )
        self.end = positions[-1] + 200

    def run(self, rule: str, backend: str, steps: int = 1, **changes: Any) -> tuple[int, list[Any]]:
        params = [p.clone() for p in self.params]
        state = RULES[rule].init(params)
        given = {"maps": self.maps, "noise": self.noise, "gradient_scale": GRADIENT_SCALE} | changes
        at, bad = given["noise"], 0
        for _ in range(steps):
            found = update.step(
                params, self.sums, rule=RULES[rule], state=state, backend=backend, **given
            )
            bad += int(found)
            if at.step_counter is not None:
                update.advance(
                    at.step_counter,
                    rule=RULES[rule],
                    backend="reference" if backend == "cpu" else backend,
                )
        buffers = [b for name in RULES[rule].buffer_names() for b in state.buffers[name]]
        return bad, [*params, *buffers]


def equal(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", SIZES)
def test_bits_are_those_of_the_cpu(
    emulator: ModuleType, sizes: tuple[int, int, int], dtype: torch.dtype, kind: str
) -> None:
    for first, rule in ((0, "sgd"), (512 * 5 + 77, "nesterov"), (2**33 + 3, "adam")):
        problem = Problem(sizes, kind, dtype, first)
        got, wanted = (problem.run(rule, backend) for backend in ("cuda", "cpu"))
        assert got[0] == wanted[0] == 0
        assert equal(got[1], wanted[1]), (first, rule)
    # Negative control: noise that stands one coordinate further on, and another matrix.
    if sizes[2]:
        at = list(problem.noise.positions)
        at[1] += 1
        moved = replace(problem.noise, positions=tuple(at[:2] + [p + 512 for p in at[2:]]))
        each = problem.maps.each[1]
        assert each is not None
        other = update.PairMap(signal=each.signal, back=each.back * (1 + 2.0**-8))
        maps = update.PairMaps((None, other, *problem.maps.each[2:]))
        for change in ({"noise": moved}, {"maps": maps}):
            found, plain = (
                problem.run("sgd", backend, **given)[1][1]
                for backend, given in (("cuda", change), ("cpu", {}))
            )
            assert not torch.equal(found, plain)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", ["values", "values and bits", "cdt", "table"])
def test_other_sources_are_read_at_the_coordinates(
    emulator: ModuleType, source: str, kind: str
) -> None:
    problem = Problem((5, 9, 600), kind, torch.float32, 77)
    made, first = problem.noise, problem.noise.positions[0]
    place = {"position": first, "count": problem.end - first}
    values = noise.lattice_draws(made.stream, backend="cpu", **place)
    assert made.rounding is not None
    bits = noise.rounding_bits(made.rounding, backend="cpu", **place)
    samples = torch.arange(-400, 401).to(torch.int16)
    draws = {
        "values": update.Draws(first, values),
        "values and bits": update.Draws(first, values, bits),
        "cdt": CdtDraws(first, CdtLaw("gaussian", 64).table, stream=KEY.stream(Purpose.TABLES, 9)),
        "table": SampleReads(first, samples, cursor=3, shift=12),
    }[source]
    given = replace(made, draws=draws)
    got, wanted = (problem.run("sgd", backend, noise=given) for backend in ("cuda", "cpu"))
    assert got[0] == wanted[0]
    assert equal(got[1], wanted[1])
    # Draws in memory are those of the stream; tables have a law of their own.
    assert equal(got[1], problem.run("sgd", "cuda")[1]) == source.startswith("values")


def test_a_device_counts_the_steps(emulator: ModuleType) -> None:
    problem = Problem((5, 9, 600), "taps", torch.float32)
    results = []
    for backend in ("cuda", "cpu"):
        counter = update.step_counter(RULES["adam"], 0, "cpu")
        given = replace(problem.noise, step_counter=counter)
        results.append(problem.run("adam", backend, steps=3, noise=given)[1])
    assert equal(*results)
    assert not equal(results[0], problem.run("adam", "cuda", steps=3)[1])


def test_the_step_has_one_launch(emulator: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    start = cuda.ModuleLauncher.start

    def counted(self: Any, kernel: _kernels.CudaKernel, *arguments: Any) -> int:
        started.append(kernel.name)
        return start(self, kernel, *arguments)

    monkeypatch.setattr(cuda.ModuleLauncher, "start", counted)
    for kind in KINDS:
        started.clear()
        Problem((9, 9, 300), kind, torch.float32).run("adam", "cuda")
        assert started == ["update_mapped_kernel"]


def test_what_is_not_finite_counts_as_zero(emulator: ModuleType) -> None:
    problem = Problem((5, 9, 600), "taps", torch.float32)
    problem.sums[1][2, 3] = float("nan")
    problem.sums[0][5] = float("inf")
    got, wanted = (problem.run("sgd", backend) for backend in ("cuda", "cpu"))
    assert got[0] == wanted[0] == 6
    assert equal(got[1], wanted[1])


def test_too_many_coordinates_are_left_to_others(emulator: ModuleType) -> None:
    problem = Problem((513, 40, 2), "taps", torch.float32)
    with pytest.raises(Exception, match="up to 512 coordinates"):
        problem.run("sgd", "cuda")


@pytest.mark.parametrize("seed", [1, 2])
def test_threads_in_random_order_change_nothing(emulator: ModuleType, seed: int) -> None:
    wanted = Problem((20, 25, 700), "int64", torch.float64).run("adam", "cpu")[1]
    emulator.shuffle(seed)
    try:
        got = Problem((20, 25, 700), "int64", torch.float64).run("adam", "cuda")[1]
    finally:
        emulator.shuffle(0)
    assert equal(got, wanted)

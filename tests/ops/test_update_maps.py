"""Sums that an update maps to other coordinates, noises there and maps back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dpkern import InvalidInput, PrivacyError
from dpkern.base.rng import Purpose
from dpkern.ops import noise, testing, update
from dpkern.ops._draws import CdtDraws, SampleReads
from dpkern.ops.backends import cpu
from dpkern.ops.backends._extension import ISAS, isa
from dpkern.step.noise_tables._cdt_law import CdtLaw

RULES = (
    update.SGD(lr=0.1),
    update.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    update.AdamW(lr=0.01),
)
SIZES = [  # rank, taps, channel pairs
    (9, 9, 1300),
    (5, 9, 512),
    (20, 25, 600),
    (3, 4, 1),
    (40, 49, 513),
    (33, 121, 530),
    (1, 1, 700),
    (9, 9, 0),
]
SCALE, GRADIENT_SCALE = 1.5, 1 / 64


def pair_map(rank: int, taps: int) -> update.PairMap:
    signal, back = torch.randn(rank, taps).double(), torch.randn(taps, rank).double()
    return update.PairMap(signal=signal, back=back)


def noise_at(positions: tuple[int, ...], **changes: Any) -> update.Noise:
    given = update.Noise(
        distribution="gaussian",
        scales=(SCALE,) * len(positions),
        stream=testing.KEY.stream(Purpose.NOISE, 1),
        positions=positions,
        rounding=testing.KEY.stream(Purpose.ROUNDING, 1),
    )
    return replace(given, **changes)


class Problem:
    """A mapped parameter between two others."""

    def __init__(self, rank: int, taps: int, pairs: int, dtype: torch.dtype) -> None:
        torch.manual_seed(rank * taps)
        shapes = [(700,), (pairs, taps), (3, 5)]
        self.maps = update.PairMaps((None, pair_map(rank, taps), None))
        self.params = [torch.randn(shape, dtype=dtype) for shape in shapes]
        self.sums = [3 * torch.randn(shape, dtype=dtype) for shape in shapes]
        behind = 1024 + -(-pairs * rank // 512) * 512
        self.noise = noise_at((0, 1024, behind))

    def of_coordinates(self, dtype: torch.dtype) -> Problem:
        """Let the sums hold coordinates, of this dtype, which are led back alone."""
        each = self.maps.each[1]
        assert each is not None
        self.maps = self.maps.only_back
        shapes = [(700,), (*self.params[1].shape[:-1], each.rank), (3, 5)]
        if dtype.is_floating_point:
            self.sums = [3 * torch.randn(shape, dtype=dtype) for shape in shapes]
        else:
            most = 2**45 if dtype is torch.int64 else 2**28
            self.sums = [torch.randint(-most, most, shape, dtype=dtype) for shape in shapes]
        return self

    def run(self, rule: update.Rule, backend: str, **changes: Any) -> tuple[Any, list[Any]]:
        params = [p.clone() for p in self.params]
        state = rule.init(params)
        given = {"maps": self.maps, "noise": self.noise, "gradient_scale": GRADIENT_SCALE}
        bad = update.step(
            params, self.sums, rule=rule, state=state, backend=backend, **given | changes
        )
        buffers = [b for name in rule.buffer_names() for b in state.buffers[name]]
        return bad, [*params, *buffers]


def by_parts(problem: Problem) -> torch.Tensor:
    """The mapped gradient by the ops of one part after the other, in float64 but for the noise."""
    given, each = problem.noise, problem.maps.each[1]
    assert each is not None
    signal = (problem.sums[1].double() @ each.signal.T).to(problem.sums[1].dtype)
    noise.add_noise(
        signal,
        stream=given.stream,
        rounding=given.rounding,
        position=given.positions[1],
        scale=SCALE,
        backend="reference",
    )
    return signal.double() @ each.back.T * GRADIENT_SCALE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("rank", "taps", "pairs"), SIZES)
def test_kernel_and_reference_are_the_parts(
    rank: int, taps: int, pairs: int, dtype: torch.dtype
) -> None:
    problem = Problem(rank, taps, pairs, dtype)
    wanted = by_parts(problem)
    plain = problem.params[1] - 0.1 * wanted.to(dtype)
    for backend in ("cpu", "reference"):
        bad, (_, param, _) = problem.run(RULES[0], backend)
        assert bad == 0
        # A coordinate's last bit before its noise may move it by one u, 2^-14 of its cell.
        testing.assert_close(backend, param, plain, 4 * torch.finfo(dtype).eps)
    # Negative control: noise that stands one coordinate further on.
    if pairs:
        other = noise_at((0, 1025, problem.noise.positions[2] + 512))
        moved = problem.run(RULES[0], "cpu", noise=other)[1][1]
        assert (moved - plain).abs().max() > 1e-3


def released(problem: Problem) -> torch.Tensor:
    """What a certificate speaks of: the mapped parameter's coordinates with their noise."""
    given, coordinates = problem.noise, problem.sums[1].clone()
    noise.add_noise(
        coordinates,
        stream=given.stream,
        rounding=given.rounding,
        position=given.positions[1],
        scale=SCALE if coordinates.is_floating_point() else None,
        backend="reference",
    )
    return coordinates


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("total", [torch.int32, torch.int64, None], ids=str)
@pytest.mark.parametrize(("rank", "taps", "pairs"), SIZES)
def test_sums_of_coordinates_are_noised_as_they_are_and_led_back(
    rank: int, taps: int, pairs: int, total: torch.dtype | None, dtype: torch.dtype
) -> None:
    problem = Problem(rank, taps, pairs, dtype).of_coordinates(total or dtype)
    each = problem.maps.each[1]
    assert each is not None
    back = each.back * (1.0 if total is None else SCALE / 64)
    plain = problem.params[1] - 0.1 * (released(problem).double() @ back.T * GRADIENT_SCALE).to(
        dtype
    )
    for backend in ("cpu", "reference"):
        bad, (_, param, _) = problem.run(RULES[0], backend)
        assert bad == 0
        testing.assert_close(backend, param, plain, 4 * torch.finfo(dtype).eps)
    # Negative control: noise that stands one coordinate further on.
    if pairs:
        other = noise_at((0, 1025, problem.noise.positions[2] + 512))
        moved = problem.run(RULES[0], "cpu", noise=other)[1][1]
        assert (moved - plain).abs().max() > 1e-3 * min(1.0, float(plain.abs().max()))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_the_noise_and_the_rule_are_those_of_sums_as_they_are(rule: update.Rule) -> None:
    problem = Problem(9, 9, 1300, torch.float32)
    one = torch.eye(9, dtype=torch.float64)
    same = update.PairMaps((None, update.PairMap(signal=one, back=one), None))
    got, wanted = (problem.run(rule, "cpu", maps=maps)[1] for maps in (same, None))
    for mine, theirs in zip(got, wanted, strict=True):
        # The factor of a released count is rounded in double here and in float32 there.
        testing.assert_close("state", mine, theirs, 1e-6)
    assert all(torch.equal(got[i], wanted[i]) for i in (0, 2))


@pytest.mark.parametrize("total", [None, torch.int32, torch.int64], ids=str)
def test_instruction_sets_and_threads_give_the_same_bits(total: torch.dtype | None) -> None:
    problem = Problem(20, 25, 1500, torch.float32)
    if total is not None:
        problem.of_coordinates(total)
    best, results = isa(), []
    try:
        for name in ISAS[: ISAS.index(best) + 1]:
            cpu.use_isa(name)
            for threads in (1, 2, 3):
                with testing.threads(threads):
                    results.append(problem.run(RULES[1], "cpu")[1])
    finally:
        cpu.use_isa(best)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_prefetched_draws_are_read_at_the_coordinates() -> None:
    problem = Problem(5, 9, 600, torch.float32)
    made = problem.noise
    count = made.positions[2] + 15
    assert made.rounding is not None
    draws = update.Draws(
        0,
        noise.lattice_draws(made.stream, position=0, count=count),
        noise.rounding_bits(made.rounding, position=0, count=count),
    )
    ahead = replace(made, stream=testing.KEY.stream(Purpose.SAMPLING, 9), draws=draws)
    got = problem.run(RULES[0], "cpu", noise=ahead)[1]
    wanted = problem.run(RULES[0], "cpu")[1]
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("source", ["cdt", "table"])
def test_tables_are_read_at_the_coordinates(source: str) -> None:
    problem = Problem(5, 9, 600, torch.float32)
    made = problem.noise
    tables, samples = testing.KEY.stream(Purpose.TABLES, 9), torch.arange(-400, 401).to(torch.int16)
    draws = {
        "cdt": CdtDraws(0, CdtLaw("gaussian", 64).table, stream=tables),
        "table": SampleReads(0, samples, cursor=3, shift=12),
    }[source]
    count = made.positions[2] + 15
    written = update.Draws(0, noise.source_draws(draws, position=0, count=count))
    got, wanted = (
        problem.run(RULES[0], "cpu", noise=replace(made, draws=each))[1]
        for each in (draws, written)
    )
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    plain = problem.run(RULES[0], "cpu")[1]
    assert not any(torch.equal(a, b) for a, b in zip(got, plain, strict=True))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_what_is_not_finite_counts_as_zero(backend: str) -> None:
    problem = Problem(5, 9, 4, torch.float32)
    problem.sums[1][2, 3] = float("nan")
    bad, (_, param, _) = problem.run(RULES[0], backend)
    problem.sums[1][2] = 0
    clean, (_, wanted, _) = problem.run(RULES[0], backend)
    assert (bad, clean) == (5, 0)
    assert torch.equal(param, wanted)


def test_what_does_not_fit_is_refused() -> None:
    problem = Problem(5, 9, 4, torch.float32)
    each = problem.maps.each[1]
    wide = update.PairMaps((None, pair_map(2, 7), None))
    for maps, word in (
        ([None, each, None], "update.PairMaps"),
        (update.PairMaps((None, each)), "one per parameter"),
        (wide, "taps that divide"),
    ):
        with pytest.raises(InvalidInput, match=word):
            problem.run(RULES[0], "cpu", maps=maps)
    with pytest.raises(InvalidInput, match="expected noise"):
        problem.run(RULES[0], "cpu", noise=None)
    for backend in ("cpu", "reference"):
        with pytest.raises(InvalidInput, match=r"sums\[1\]"):
            problem.run(RULES[0], backend, maps=problem.maps.only_back)  # the sum is of taps
    problem.sums = [total.to(torch.int32) for total in problem.sums]
    with pytest.raises(InvalidInput, match="sums of coordinates"):
        problem.run(RULES[0], "cpu")
    with pytest.raises(InvalidInput, match="a coordinate and a tap at least"):
        update.PairMap(signal=torch.zeros(0, 9).double(), back=torch.zeros(9, 0).double())
    with pytest.raises(InvalidInput, match="back"):
        update.PairMap(signal=torch.zeros(2, 3).double(), back=torch.zeros(2, 3).double())


def test_coordinates_share_no_positions() -> None:
    problem = Problem(9, 9, 1, torch.float32)
    more = update.PairMaps((None, pair_map(12, 9), None))  # more coordinates than entries
    close = noise_at((0, 1024, 1024 + 9))
    problem.run(RULES[0], "cpu", noise=close)
    with pytest.raises(PrivacyError, match="do not overlap"):
        problem.run(RULES[0], "cpu", noise=close, maps=more)

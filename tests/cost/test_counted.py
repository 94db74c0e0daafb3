"""Counted executions: the kernels' results, the closed forms' counts, the declared costs."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dpkern.base import dispatch
from dpkern.base.errors import InvalidInput
from dpkern.base.laws import ESCAPE, FINE_BITS
from dpkern.base.rng import Key, Purpose
from dpkern.cost import CIPHER, Counts
from dpkern.cost.counted import KERNELS, CountedRun, open_cipher, tally_of
from dpkern.cost.forms import FORMS
from dpkern.ops import ghost, noise, update
from tests.cost.counted_cases import (
    COUNTED,
    WITH_NOISE,
    WITH_STREAM,
    Call,
    build,
    table_draws,
)

SEEDS = range(48)
ROUNDING = Key.from_unsafe_seed(2).stream(Purpose.ROUNDING, 1)


@pytest.fixture(autouse=True)
def _native() -> None:
    if not dispatch.availability("cpu")[0]:
        pytest.skip("the kernels are not compiled")


def tensors_in(result: Any) -> Iterator[torch.Tensor]:
    """Every tensor of an op's result."""
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, tuple):
        for part in result:
            yield from tensors_in(part)


def by_kernel(call: Call) -> Any:
    """The call by the backend that is chosen: the compiled kernel, if there is one.

    Draws made ahead are the streams'; the kernel makes them itself.
    """
    made = call.kwargs.get("noise")
    if made is not None and made.draws is not None and made.draws.in_memory:
        call.kwargs["noise"] = dataclasses.replace(made, draws=None)
    bound = call.op.schema.bind(*call.args, **call.kwargs)
    kernel = call.op.kernels.get("cpu")
    if kernel is None or (kernel.refuse is not None and kernel.refuse(bound) is not None):
        kernel = call.op.kernels["reference"]
    return kernel.run(bound)


def check(call: Call) -> tuple[bool, bool]:
    """Count a call and compare it with its closed form and its declared cost.

    Returns:
        Whether its bytes and whether its operations could be compared with the declared ones, too.
    """
    cost = call.op.cost(*call.args, **call.kwargs)
    result, tally = tally_of(call.op, call.args, call.kwargs)
    form = FORMS[call.op.name]
    facts = call.facts(result)
    assert form(*call.args, **call.kwargs, **facts).of("exact") == tally.counts
    assert cost.random_words == tally.counts["RNG"]
    # What is declared holds for samples that are finite and clipped, and points that move.
    usual = form(*call.args, **call.kwargs).of("exact")
    spared = usual - tally.counts
    whole = not spared["LOAD"] and not spared["STORE"]
    if whole:
        assert (cost.bytes_read, cost.bytes_written) == (tally.bytes_read, tally.bytes_written)
    finite = whole and not facts.get("nonfinite")
    if finite:
        assert cost.flops - spared["DIV"] == tally.flops
    something = tally.counts != Counts()
    return whole and something, finite and something


@pytest.mark.parametrize("name", COUNTED)
def test_counted_is_the_closed_form_and_the_declared_cost(name: str) -> None:
    checked = [check(build(name, seed)) for seed in SEEDS]
    assert min(sum(bytes_too) for bytes_too in zip(*checked, strict=True)) >= 20


@pytest.mark.parametrize("name", COUNTED)
def test_what_is_counted_is_what_the_kernel_does(name: str) -> None:
    for seed in SEEDS:
        counted, run = build(name, seed), build(name, seed)
        given, _ = tally_of(counted.op, counted.args, counted.kwargs)
        expected = by_kernel(run)
        pairs = zip(
            (*tensors_in(given), *counted.outputs),
            (*tensors_in(expected), *run.outputs),
            strict=True,
        )
        for mine, theirs in pairs:
            assert mine.dtype is theirs.dtype
            assert torch.equal(mine.nan_to_num(7.5), theirs.nan_to_num(7.5))
        if isinstance(expected, int):
            assert given == expected


@pytest.mark.parametrize("name", WITH_NOISE)
def test_draws_from_tables_are_counted_as_they_are_made(name: str) -> None:
    seen = 0
    for seed in SEEDS:
        rng, calls = random.Random(seed), [build(name, seed) for _ in range(3)]
        made = calls[0].kwargs.get("noise")
        if made is None:
            continue
        law = getattr(made, "distribution", "laplace")
        draws = table_draws(rng, law, 0)
        for call in calls:
            given = call.kwargs["noise"]
            changes: dict[str, Any] = {"draws": draws, "rounding": ROUNDING}
            if name == "step":
                changes["step_counter"] = None
            call.kwargs["noise"] = dataclasses.replace(given, **changes)
        check(calls[0])
        counted, _ = tally_of(calls[1].op, calls[1].args, calls[1].kwargs)
        kernel = by_kernel(calls[2])
        pairs = zip(
            (*tensors_in(counted), *calls[1].outputs),
            (*tensors_in(kernel), *calls[2].outputs),
            strict=True,
        )
        assert all(torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5)) for a, b in pairs)
        seen += 1
    assert seen > 20


def test_noise_of_a_tensor_alone_is_counted_with_every_source() -> None:
    """As mechanisms take it whose releases the update does not map."""
    for seed in SEEDS:
        made, rng = build("add_noise", seed), random.Random(seed)
        first, law = made.kwargs["position"], made.kwargs["distribution"]
        place: dict[str, Any] = {"position": first, "count": made.args[0].numel()}
        values = noise.lattice_draws(made.kwargs["stream"], distribution=law, **place)
        for draws in table_draws(rng, law, 0), update.Draws(first, values):
            calls = [build("add_noise", seed) for _ in range(3)]
            for call in calls:
                call.kwargs["draws"] = draws
            check(calls[0])
            tally_of(calls[1].op, calls[1].args, calls[1].kwargs)
            by_kernel(calls[2])
            counted, kernel = (call.args[0].nan_to_num(7.5) for call in calls[1:])
            assert torch.equal(counted, kernel)


@pytest.mark.parametrize("name", [*WITH_STREAM, *WITH_NOISE])
@pytest.mark.parametrize("seed", range(6))
def test_opening_the_cipher_adds_its_blocks(name: str, seed: int) -> None:
    call, again = build(name, seed), build(name, seed)
    _, closed = tally_of(call.op, call.args, call.kwargs)
    with open_cipher():
        _, opened = tally_of(again.op, again.args, again.kwargs)
    if name in WITH_NOISE:
        drawn = call.kwargs.get("noise")
        stream = None if drawn is None else drawn.stream
    else:
        stream = call.kwargs.get("stream") or call.args[0]
    rounds = 20 if stream is None else stream.rounds
    for words, inside in (
        (closed.counts["RNG"], opened.counts - closed.counts),
        (closed.random["RNG"], opened.random - closed.random),
    ):
        assert words % 16 == 0
        assert inside == words // 16 * CIPHER[rounds]
    assert opened.flops == closed.flops


@pytest.mark.parametrize("name", COUNTED)
def test_one_more_operation_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = build(name, 3)
    honest = KERNELS[call.op.name]

    def busy(*args: Any, **kwargs: Any) -> tuple[Any, CountedRun]:
        result, tally = honest(*args, **kwargs)
        return result, tally + CountedRun(counts=Counts(MUL=1), flops=1)

    monkeypatch.setitem(KERNELS, call.op.name, busy)
    with pytest.raises(AssertionError):
        check(call)


def test_the_tail_counts_as_chance() -> None:
    stream = Key.from_unsafe_seed(2).stream(Purpose.NOISE, 0)
    call = {"position": 512, "count": 20 * 512, "distribution": "laplace"}
    draws, tally = tally_of(noise.lattice_draws, (stream,), call)
    # X = K 2^14 + U1 + 2^13 lies in the cell of K or above.
    magnitude = torch.where(draws < 0, -1 - (draws >> FINE_BITS), draws >> FINE_BITS)
    escaped, rest = divmod(tally.random["RNG"], 16)
    assert rest == 0
    assert 10 < int((magnitude > ESCAPE).sum()) <= escaped <= int((magnitude >= ESCAPE - 1).sum())
    assert tally.counts["RNG"] == 20 * 768
    assert tally.random_words == 20 * 768 + 16 * escaped


def test_an_operand_counts_once_however_often_it_is_read() -> None:
    squares = [torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)]
    _, tally = tally_of(ghost.clip_factors, (squares, 1.0), {"dtype": torch.float32})
    assert (tally.counts["LOAD"], tally.counts["STORE"]) == (6, 6)
    assert (tally.bytes_read, tally.bytes_written) == (48, 36)
    _, twice = tally_of(ghost.clip_factors, ([squares[0]] * 2, 1.0), {"dtype": torch.float32})
    assert twice.counts == tally.counts


def test_invalid_calls_and_ops_without_a_kernel_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = build("add_noise", 0)
    with pytest.raises(InvalidInput, match="position"):
        tally_of(call.op, call.args, {**call.kwargs, "position": -1})
    monkeypatch.delitem(KERNELS, "noise.add_noise")
    with pytest.raises(InvalidInput, match="op"):
        tally_of(call.op, call.args, call.kwargs)


def test_tallies_add() -> None:
    one = CountedRun(
        counts=Counts(ADD=1), random=Counts(RNG=16), flops=2, bytes_read=3, bytes_written=4
    )
    assert one + CountedRun() == one
    assert (one + one).counts == Counts(ADD=2)
    assert (one + one).bytes_written == 8

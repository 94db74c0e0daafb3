"""Draws made ahead by a ring: the bits of the streams, handed out once, and wiped."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dpkern import BackendError, InvalidInput, PrivacyError, ring, testing
from dpkern.ops import noise, update
from dpkern.ring import Ring
from dpkern.rng import Purpose
from tests.every_backend import every_backend
from tests.test_update_noise import POSITIONS, RULES, SIZES, noise_at, sums_of, trained

TAKERS = ("cpu", "cuda", "cupy", "reference")
"""Backends whose updates take draws made ahead."""
TOTAL = POSITIONS[2] + SIZES[2]


def small(law: str = "gaussian", *, rounding: bool = True, backend: str | None = None) -> Ring:
    """A ring for the tensors of ``test_update_noise``."""
    return Ring(testing.KEY, law, POSITIONS, SIZES, "cpu", rounding, backend=backend)


def ahead(made: Ring, *, floats: bool) -> Callable[[int], update.Noise]:
    """The steps' noise with the ring's draws; its streams are of no use."""

    def given(step: int) -> update.Noise:
        made.fill(step)
        draws = made.take(step)
        own, other = noise_at(step, floats=floats), testing.KEY.stream(Purpose.SAMPLING, step)
        return replace(own, stream=other, rounding=None, draws=draws)

    return given


@every_backend
@pytest.mark.parametrize("floats", [False, True], ids=["integers", "floats"])
def test_a_step_with_a_ring_has_the_bits_of_one_without(floats: bool, backend: str) -> None:
    rule = RULES["momentum"]
    taker = backend if backend in TAKERS else "reference"
    with small(rounding=floats, backend=backend) as made:
        got = trained(rule, ahead(made, floats=floats), floats=floats, backend=taker)
    wanted = trained(
        rule, lambda step: noise_at(step, floats=floats), floats=floats, backend="reference"
    )
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("law", ["gaussian", "laplace"])
def test_draws_are_the_streams_own(law: str) -> None:
    made = small(law)
    made.fill(4)
    got = made.take(4)
    purpose = Purpose.NOISE if law == "gaussian" else Purpose.LAPLACE
    place = {"position": 0, "count": TOTAL}
    stream = testing.KEY.stream(purpose, 4)
    assert torch.equal(got.values, noise.lattice_draws(stream, distribution=law, **place))
    assert got.rounding is not None
    bits = noise.rounding_bits(testing.KEY.stream(Purpose.ROUNDING, 4), **place)
    assert torch.equal(got.rounding, bits)


def test_rounding_bits_only_where_they_are_needed() -> None:
    made = small(rounding=False)
    made.fill(1)
    assert made.take(1).rounding is None


def test_the_first_position_may_be_anywhere() -> None:
    made = Ring(testing.KEY, "gaussian", (2**40 + 512, 2**40 + 7), (5, 3), "cpu", False)
    made.fill(1)
    draws = made.take(1)
    assert (draws.first, len(draws.values)) == (2**40 + 7, 510)
    empty = Ring(testing.KEY, "gaussian", (), (), "cpu", False)
    empty.fill(1)
    assert not len(empty.take(1).values)


# once


def taken(made: Ring) -> None:
    made.fill(5)
    made.take(5)


def filled(made: Ring) -> None:
    made.fill(5)


def closed(made: Ring) -> None:
    made.fill(5)
    made.close()


def refilled(made: Ring) -> None:
    made.fill(5)
    made.fill(6)


ONCE: dict[str, tuple[Callable[[Ring], None], Callable[[Ring], object], str]] = {
    "nothing-filled": (lambda _: None, lambda r: r.take(0), "fill\\(0\\) before"),
    "second-take": (taken, lambda r: r.take(5), "draws"),
    "another-step": (filled, lambda r: r.take(6), "step 5, which was filled"),
    "overwritten-step": (refilled, lambda r: r.take(5), "step 6, which was filled"),
    "closed": (closed, lambda r: r.take(5), "fill\\(5\\) before"),
    "second-fill": (taken, lambda r: r.fill(5), "a step after 5"),
    "earlier-step": (taken, lambda r: r.fill(4), "a step after 5"),
    "copy": (filled, copy.copy, "copy"),
    "deepcopy": (filled, copy.deepcopy, "copy"),
    "pickle": (filled, pickle.dumps, "copy"),
}


@pytest.mark.parametrize(("before", "call", "says"), ONCE.values(), ids=ONCE)
def test_no_draw_is_handed_out_twice(
    before: Callable[[Ring], None], call: Callable[[Ring], object], says: str
) -> None:
    made = small()
    before(made)
    with pytest.raises(PrivacyError, match=says):
        call(made)


def test_a_fork_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = small()
    made.fill(1)
    monkeypatch.setattr(ring.os, "getpid", lambda: 0)
    for call in (made.take, made.fill):
        with pytest.raises(PrivacyError, match="fork"):
            call(1)


def test_a_refused_take_leaves_the_draws_to_their_step() -> None:
    made = small()
    made.fill(5)
    with pytest.raises(PrivacyError):
        made.take(6)
    made.take(5)


def test_a_failed_fill_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    made = small()
    honest = noise.rounding_bits

    def fails(*_: Any, **__: Any) -> None:
        raise BackendError("GPU memory", expected="room", got="none", remedy="")

    monkeypatch.setattr(noise, "rounding_bits", fails)
    with pytest.raises(BackendError):
        made.fill(1)
    with pytest.raises(PrivacyError):
        made.take(1)
    monkeypatch.setattr(noise, "rounding_bits", honest)
    made.fill(1)
    assert made.take(1).values.any()


# wiped


@pytest.mark.parametrize("wipe", [lambda r: r.close(), lambda r: r.fill(2)], ids=["close", "fill"])
def test_draws_are_wiped_and_useless_afterwards(wipe: Callable[[Ring], None]) -> None:
    made = small()
    made.fill(1)
    draws = made.take(1)
    assert draws.rounding is not None
    memory = [draws.values.view(-1), draws.rounding.view(-1)]
    assert all(bool(part.any()) for part in memory)
    wipe(made)
    assert not any(bool(part.any()) for part in memory)
    rule, params = RULES["sgd"], [torch.ones(n) for n in SIZES]
    late = replace(noise_at(1, floats=True), draws=draws)
    with pytest.raises(InvalidInput, match="draws"):
        update.step(params, sums_of(1, floats=True), rule=rule, state=rule.init(params), noise=late)
    assert all(bool((p == 1).all()) for p in params)
    made.close()
    made.close()


# beside the current stream


def test_what_waits_for_what(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    def stream(name: str) -> Any:
        return SimpleNamespace(
            device=torch.device("cpu"),
            record_event=lambda: f"work of {name}",
            wait_event=lambda event: log.append(f"{name} waits for {event}"),
        )

    class Made:
        def record(self, on: Any) -> None:
            log.append("made")

        def __format__(self, _: str) -> str:
            return "made"

    main, other, side = stream("main"), stream("other"), stream("side")
    current = [main]
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: side)
    monkeypatch.setattr(torch.cuda, "Event", Made)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current[0])
    monkeypatch.setattr(torch.cuda, "stream", lambda on: log.append("beside") or nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, on: log.append("kept"))
    honest = noise.lattice_draws
    monkeypatch.setattr(
        noise, "lattice_draws", lambda *a, **k: log.append("draw") or honest(*a, **k)
    )
    made = small(rounding=False)
    made._side = ring._Side(torch.device("cpu"))
    made.fill(1)
    assert log == ["side waits for work of main", "beside", "draw", "made"]
    log.clear()
    current[0] = other
    made.take(1)
    assert log == ["other waits for made", "kept"]
    log.clear()
    current[0] = main
    made.fill(2)
    wiped = ["side waits for work of other", "beside"]
    assert log == [*wiped, *wiped, "draw", "made"]


BAD: dict[str, tuple[str, Any]] = {
    "law": ("law", ("cauchy", (0,), (1,), "cpu")),
    "sizes": ("positions", ("gaussian", (0,), (1, 2), "cpu")),
    "size": ("size", ("gaussian", (0,), (-1,), "cpu")),
    "position": ("position", ("gaussian", (0.5,), (1,), "cpu")),
    "device": ("device", ("gaussian", (0,), (1,), "meta")),
}


@pytest.mark.parametrize(("name", "given"), BAD.values(), ids=BAD)
def test_bad_rings_are_refused(name: str, given: Any) -> None:
    with pytest.raises(InvalidInput, match=name):
        Ring(testing.KEY, *given, False)

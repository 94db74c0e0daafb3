"""Draws prefetched by a ring: the bits of the streams, handed out once, and wiped."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dpkern import BackendError, InvalidInput, PrivacyError
from dpkern.audit.generator import in_child
from dpkern.base.rng import Key, Purpose
from dpkern.ops import noise, testing, update
from dpkern.step.noise_tables import Layout, RingPrefetch, _producers
from tests.ops.backends.every_backend import every_backend
from tests.ops.test_update_noise import POSITIONS, RULES, SIZES, noise_at, sums_of, trained

TOTAL = POSITIONS[2] + SIZES[2]


def layout(law: str = "gaussian", *, rounding: bool = True) -> Layout:
    """Of the tensors of ``test_update_noise``."""
    return Layout.of(law, POSITIONS, SIZES, "cpu", rounding=rounding)


def small(
    law: str = "gaussian",
    *,
    rounding: bool = True,
    depth: int = 2,
    backend: str | None = None,
    key: Key = testing.KEY,
) -> RingPrefetch:
    made = RingPrefetch(depth=depth)
    made.bind(key, layout(law, rounding=rounding), backend=backend)
    return made


def ahead(made: RingPrefetch, *, floats: bool) -> Callable[[int], update.Noise]:
    """The steps' noise with the ring's draws; its streams are of no use."""

    def given(step: int) -> update.Noise:
        draws = made.take(step)
        for block in made._blocks:  # emulated devices run one kernel at a time
            block.work.exception()
        own, other = noise_at(step, floats=floats), testing.KEY.stream(Purpose.SAMPLING, step)
        return replace(own, stream=other, rounding=None, draws=draws)

    return given


def streams_own(step: int, law: str = "gaussian") -> tuple[torch.Tensor, torch.Tensor]:
    purpose = Purpose.NOISE if law == "gaussian" else Purpose.LAPLACE
    place = {"position": 0, "count": TOTAL}
    values = noise.lattice_draws(testing.KEY.stream(purpose, step), distribution=law, **place)
    bits = noise.rounding_bits(testing.KEY.stream(Purpose.ROUNDING, step), **place)
    return values, bits


@every_backend
def test_a_step_with_a_ring_has_the_bits_of_one_without(backend: str) -> None:
    rule, floats = RULES["momentum"], True
    with small(backend=backend) as made:
        got = trained(rule, ahead(made, floats=floats), floats=floats, backend=backend)
    wanted = trained(
        rule, lambda step: noise_at(step, floats=floats), floats=floats, backend="reference"
    )
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("law", ["gaussian", "laplace"])
def test_draws_are_the_streams_own(law: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpkern.step.noise_tables.ring.PIECE", 512)  # several pieces
    with small(law, depth=depth) as made:
        for step in (4, 5, 6, 9):
            got = made.take(step)
            values, bits = streams_own(step, law)
            assert got.first == 0
            assert torch.equal(got.values, values)
            assert got.rounding is not None
            assert torch.equal(got.rounding, bits)


def test_rounding_bits_only_where_they_are_needed() -> None:
    with small(rounding=False) as made:
        assert made.take(1).rounding is None


def test_the_first_position_may_be_anywhere() -> None:
    with RingPrefetch() as made:
        place = Layout.of("gaussian", (2**40 + 512, 2**40 + 7), (5, 3), "cpu", rounding=False)
        made.bind(testing.KEY, place)
        draws = made.take(1)
        assert (draws.first, len(draws.values)) == (2**40 + 7, 510)
        assert made.provenance()["words"]["consumed"] == 2 * 768  # two tiles
    with RingPrefetch() as empty:
        empty.bind(testing.KEY, Layout.of("gaussian", (), (), "cpu", rounding=False))
        assert not len(empty.take(1).values)


# once


def taken(made: RingPrefetch) -> None:
    made.take(5)


def closed(made: RingPrefetch) -> None:
    made.take(5)
    made.close()


def fresh(made: RingPrefetch) -> None:
    del made


ONCE: dict[str, tuple[Callable[[RingPrefetch], None], Callable[[RingPrefetch], object], str]] = {
    "second-take": (taken, lambda r: r.take(5), "a step after 5"),
    "earlier-step": (taken, lambda r: r.take(4), "a step after 5"),
    "prepared-again": (taken, lambda r: r.prepare(5), "a step after 5"),
    "closed": (closed, lambda r: r.take(6), "closed"),
    "closed-prepare": (closed, lambda r: r.prepare(6), "closed"),
    "closed-bind": (closed, lambda r: r.bind(testing.KEY, layout()), "closed"),
    "second-user": (fresh, lambda r: r.bind(testing.KEY, layout()), "has a user"),
    "copy": (taken, copy.copy, "copy"),
    "deepcopy": (taken, copy.deepcopy, "copy"),
    "pickle": (taken, pickle.dumps, "copy"),
    "no-key": (fresh, lambda _: RingPrefetch().take(0), "without a key"),
}


@pytest.mark.parametrize(("before", "call", "says"), ONCE.values(), ids=ONCE)
def test_no_draw_is_handed_out_twice(
    before: Callable[[RingPrefetch], None], call: Callable[[RingPrefetch], object], says: str
) -> None:
    with small() as made:
        before(made)
        with pytest.raises(PrivacyError, match=says):
            call(made)


def test_threads_never_share_a_step() -> None:
    with small(depth=3) as made, ThreadPoolExecutor(4) as pool:

        def take(step: int) -> int | None:
            try:
                made.take(step)
            except PrivacyError:
                return None
            return step

        out = [step for step in pool.map(take, [1, 1, 2, 2, 3, 3, 4, 4, 2, 5]) if step is not None]
    assert len(out) == len(set(out))
    assert out


def test_a_key_that_was_wiped_makes_no_more_draws() -> None:
    key = Key.fresh()
    with small(key=key) as made:
        made.take(1)
        key.wipe()
        made.done()
        with pytest.raises(PrivacyError, match="wiped"):
            made.take(2)


def test_a_fork_makes_draws_of_its_own() -> None:
    with small(key=Key.fresh(), rounding=False, depth=3) as made:
        made.take(1)
        made.prepare(2)
        said = in_child(lambda: made.take(2).values[:8].numpy().tobytes())
        later = in_child(lambda: made.take(3).values[:8].numpy().tobytes())
        own = [made.take(step).values[:8].numpy().tobytes() for step in (2, 3)]
    assert len({said, later, *own}) == 4
    assert all(len(words) == 32 for words in (said, later, *own))


def test_a_fork_of_a_seeded_run_repeats_it_and_no_step() -> None:
    with small(rounding=False) as made:
        made.take(1)

        def child() -> bytes:
            with pytest.raises(PrivacyError):
                made.take(1)
            words = made.take(2).values[:8].numpy().tobytes()
            made.close()
            return words

        said = in_child(child)
        assert said == made.take(2).values[:8].numpy().tobytes()


# what goes wrong beside


def test_a_fault_of_the_producer_comes_out_of_take(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = noise.rounding_bits

    def fails(*_: Any, **__: Any) -> None:
        raise BackendError("memory", expected="room", got="none", remedy="")

    with small() as made:
        made.take(1)
        made._blocks[0].work.exception()  # step 2 is ready
        monkeypatch.setattr(noise, "rounding_bits", fails)
        made.done()
        made.take(2)
        made.done()
        for _ in range(2):
            with pytest.raises(BackendError, match="room"):
                made.take(3)
        monkeypatch.setattr(noise, "rounding_bits", honest)
        assert torch.equal(made.take(3).values, streams_own(3)[0])


def test_waiting_ends_with_the_fault_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, honest = threading.Event(), noise.lattice_draws
    monkeypatch.setattr(noise, "lattice_draws", lambda *a, **k: gate.wait() and honest(*a, **k))
    made = small()
    made.prepare(1)
    assert made.provenance()["words"]["waiting"] == 0
    threading.Timer(0.02, gate.set).start()
    assert torch.equal(made.take(1).values, streams_own(1)[0])
    made.close()


# counted and wiped


def test_words_are_accounted_for() -> None:
    each = 3 * (768 + 256)  # three tiles of 512 positions, 1.5 and 0.5 of a word for each
    made = small(depth=2)
    made.take(1)
    made.done()
    made._blocks[0].work.exception()  # step 2 is ready
    made.take(3)  # and thrown away
    made.close()
    words = made.provenance()["words"]
    assert words["consumed"] == 2 * each
    assert words["produced"] == words["consumed"] + words["discarded"]
    assert words["discarded"] >= each
    assert (words["reused"], words["waiting"]) == (0, 0)
    assert made.provenance()["text"].startswith("fresh single-use; words produced ")


def memory_of(made: RingPrefetch) -> list[torch.Tensor]:
    draws = made.take(1)
    assert draws.rounding is not None
    return [draws.values.view(-1), draws.rounding.view(-1)]


def test_draws_are_useless_after_their_update_and_wiped_in_the_end() -> None:
    made = small()
    memory = memory_of(made)
    draws = made._out
    assert draws is not None
    assert all(bool(part.any()) for part in memory)
    made.done()
    rule, params = RULES["sgd"], [torch.ones(n) for n in SIZES]
    late = replace(noise_at(1, floats=True), draws=draws)
    with pytest.raises(InvalidInput, match="draws"):
        update.step(params, sums_of(1, floats=True), rule=rule, state=rule.init(params), noise=late)
    assert all(bool((p == 1).all()) for p in params)
    made.close()
    made.close()
    assert not any(bool(part.any()) for part in memory)


def test_a_forgotten_ring_is_wiped_and_what_it_handed_out_is_noise_still() -> None:
    made = small()
    draws = made.take(1)
    assert made._producer is not None
    made._producer.submit(lambda: None).exception()  # all is filled
    waiting = [part.view(-1) for block in made._blocks for part in block.memory.tensors]
    assert waiting
    del made
    gc.collect()
    assert not any(bool(part.any()) for part in waiting)
    values, bits = streams_own(1)
    assert torch.equal(draws.values, values)
    assert draws.rounding is not None
    assert torch.equal(draws.rounding, bits)


def test_draws_are_their_threads_until_it_is_done() -> None:
    """Its update may be reading them: nobody refills or wipes them meanwhile."""
    made = small(depth=1)
    with ThreadPoolExecutor(1) as other:
        draws = other.submit(made.take, 1).result()
        memory = draws.values.view(-1)
        for call in (lambda: made.take(2), made.done):
            with pytest.raises(PrivacyError, match="another thread"):
                call()
        made.close()
        assert torch.equal(draws.values, streams_own(1)[0])
        other.submit(made.done).result()
    assert len(draws.values) == 0
    assert not bool(memory.any())
    with pytest.raises(PrivacyError, match="closed"):
        made.take(2)


def test_a_thread_that_ended_keeps_no_draws() -> None:
    with small(depth=1) as made:
        thread = threading.Thread(target=made.take, args=(1,))
        thread.start()
        thread.join()
        assert torch.equal(made.take(2).values, streams_own(2)[0])


SHUTDOWN = """
import torch
from dpkern.ops import testing
from dpkern.audit.generator import in_child
from dpkern.noise_tables import Layout, RingPrefetch
ring = RingPrefetch(depth=4)
ring.bind(testing.KEY, Layout.of("gaussian", (0,), (3_000_000,), "cpu", rounding=True))
kept = ring.take(1)
raise SystemExit(7)
"""


LATE = """
import atexit
held = []
@atexit.register
def late():
    try:
        held[0].take(1)
    except PrivacyError as error:
        print(type(error).__name__)
import torch
from dpkern import PrivacyError
from dpkern.ops import testing
from dpkern.audit.generator import in_child
from dpkern.noise_tables import Layout, RingPrefetch
held.append(RingPrefetch())
held[0].bind(testing.KEY, Layout.of("gaussian", (0,), (512,), "cpu", rounding=True))
held[0].prepare(1)
held[0]._blocks[0].work.exception()
"""


def test_the_last_moments_of_a_process_have_no_draws_without_noise() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LATE], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "PrivacyError\n", "")


def test_the_interpreter_ends_while_a_ring_is_filled() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SHUTDOWN], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (7, "")


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
    made = small(rounding=False, depth=1)
    monkeypatch.setattr(
        "dpkern.step.noise_tables.ring.SideThread",
        lambda: _producers.SideStream(torch.device("cpu")),
    )
    made.prepare(1)
    assert log == [*["side waits for work of main", "beside"] * 2, "draw", "made"]
    log.clear()
    current[0] = other
    draws = made.take(1)
    assert log == ["other waits for made", "kept"]
    assert torch.equal(draws.values, streams_own(1)[0])
    log.clear()
    current[0] = main
    made.done()
    assert log == ["side waits for work of other", "beside", "draw", "made"]
    log.clear()
    made.close()
    assert log[-2:] == ["side waits for work of other", "beside"]


BAD: dict[str, tuple[str, Any]] = {
    "law": ("law", ("cauchy", (0,), (1,), "cpu")),
    "sizes": ("positions", ("gaussian", (0,), (1, 2), "cpu")),
    "size": ("size", ("gaussian", (0,), (-1,), "cpu")),
    "position": ("position", ("gaussian", (0.5,), (1,), "cpu")),
    "device": ("device", ("gaussian", (0,), (1,), "meta")),
}


@pytest.mark.parametrize(("name", "given"), BAD.values(), ids=BAD)
def test_bad_layouts_are_refused(name: str, given: Any) -> None:
    with pytest.raises(InvalidInput, match=name):
        Layout.of(*given, rounding=False)


def test_bad_depths_are_refused() -> None:
    with pytest.raises(InvalidInput, match="depth"):
        RingPrefetch(depth=0)


@pytest.mark.parametrize("misaligned", [0, 1])
def test_many_draws_at_once_are_those_in_pieces(misaligned: int) -> None:
    # From 2^20 on the CPU's kernels write past the caches, sixteen bytes at a time.
    first, count, piece = 512 * 7 + 3, (1 << 20) + 5, 1 << 18
    stream = testing.KEY.stream(Purpose.NOISE, 3)
    for make, dtype in ((noise.lattice_draws, torch.int32), (noise.rounding_bits, torch.int16)):
        room = torch.full((count + misaligned + 1,), 77, dtype=dtype)
        make(stream, position=first, count=count, out=room[misaligned : misaligned + count])
        for start in range(0, count, piece):
            few = min(piece, count - start)
            part = make(stream, position=first + start, count=few)
            assert torch.equal(room[misaligned + start :][:few], part)
        assert bool((room[misaligned + count :] == 77).all())

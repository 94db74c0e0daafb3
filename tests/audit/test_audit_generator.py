"""Layer 4 on the generator: this machine's passes, and every fault that is built in is found."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from dpkern import DPStep
from dpkern.audit import generator, run
from dpkern.audit.subjects import ranks, words
from dpkern.audit.subjects.generator import Generator
from dpkern.base import dispatch
from dpkern.base.rng import KEY_BYTES, Key, Purpose, Stream
from dpkern.ops import noise, testing, update
from dpkern.privacy.mechanisms import DPSGD, Mechanism
from dpkern.privacy.mechanisms.plan import Plan
from dpkern.step import noise as _step_noise
from dpkern.step.noise_tables import RingPrefetch
from tests.cost import step_count_cases
from tests.ops.backends import every_backend

SETTING: dict[str, Any] = {"noise_multiplier": 1.1, "max_grad_norm": 1.0}


def make(
    mechanism: Mechanism | None = None, rule: update.Rule | None = None, **given: Any
) -> DPStep:
    params = [torch.zeros(700), torch.zeros(3, 5)]
    sampling = {"expected_batch_size": 8.0, "sample_rate": 0.1}
    chosen = DPSGD(**SETTING) if mechanism is None else mechanism
    return DPStep(chosen, params, optimizer=rule, **sampling, **given)


# Every backend answers every vector in test_golden: here those that are quick.
@pytest.mark.parametrize("backend", [b for b in testing.available_backends() if b != "reference"])
def test_backends_of_this_machine(backend: str) -> None:
    found = generator.backend_checks(backend, quick=True)
    assert [check.passed for check in found] == [True, True], found


def test_a_missing_backend_is_not_judged() -> None:
    missing = [b for b in dispatch.BACKENDS if b not in testing.available_backends()]
    for backend in missing:
        found = generator.backend_checks(backend)
        assert [check.passed for check in found] == [None, None]
        assert all(dispatch.availability(backend)[1] in check.text for check in found)


@contextmanager
def faulty(**faults: Callable[..., Any]) -> Iterator[str]:
    """A backend "cupy" with the compiled kernels, some of them replaced."""
    kernels = [(f"noise.{name}", run, None) for name, run in faults.items()]
    kept = ("noise.keystream", "noise.lattice_draws", "noise.add_noise")
    with dispatch.replaced(
        "cupy",
        [
            *kernels,
            *(
                (name, dispatch.OPS[name].kernels["cpu"], None)
                for name in kept
                if name.split(".")[1] not in faults
            ),
        ],
    ):
        yield "cupy"


def one_position_early(stream: Stream, *, position: int, **given: Any) -> torch.Tensor:
    return noise.lattice_draws(stream, position=position - (position > 0), **given)


def starts_again_after_a_tile(x: torch.Tensor, *, position: int = 0, **given: Any) -> torch.Tensor:
    """Right for what begins with a tile, as unaligned pieces would not show."""
    return noise.add_noise(x, position=position - position % 512, **given)


def one_thread_is_wrong(stream: Stream, *, count: int, **given: Any) -> torch.Tensor:
    made = noise.lattice_draws(stream, count=count, **given)
    return made + (torch.get_num_threads() == 4)


def words_of_fewer_rounds(stream: Stream, **given: Any) -> torch.Tensor:
    return noise.keystream(replace(stream, rounds=8), **given)


FAULTS: list[tuple[dict[str, Any], list[bool]]] = [
    ({}, [True, True]),
    ({"lattice_draws": one_position_early}, [False, False]),
    ({"add_noise": starts_again_after_a_tile}, [False, False]),
    ({"lattice_draws": one_thread_is_wrong}, [True, False]),
    ({"keystream": words_of_fewer_rounds}, [False, True]),
]


@pytest.mark.skipif("cpu" not in testing.available_backends(), reason="no compiled kernels")
@pytest.mark.parametrize(("faults", "wanted"), FAULTS)
def test_a_wrong_backend_is_found(faults: dict[str, Any], wanted: list[bool]) -> None:
    before = torch.get_num_threads()
    with testing.threads(1), faulty(**faults) as backend:
        found = generator.backend_checks(backend, device="cpu", quick=True)
    assert [check.passed for check in found] == wanted, found
    assert torch.get_num_threads() == before


# The key comes from the operating system; sound bits fail with probability 1e-9.
@pytest.mark.parametrize("law", ["gaussian", "laplace"])
def test_low_bits_of_draws(law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert generator.draw_bits(law).passed
    draws = noise.lattice_draws
    monkeypatch.setattr(noise, "lattice_draws", lambda *a, **k: draws(*a, **k) & ~1)
    assert generator.draw_bits(law).passed is False


def test_separate_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    assert generator.separate_streams().passed
    stream = Key.stream

    def of_one_purpose(self: Key, purpose: Purpose, step: int, number: int = 0) -> Stream:
        return stream(self, Purpose.NOISE if purpose is Purpose.LAPLACE else purpose, step, number)

    monkeypatch.setattr(Key, "stream", of_one_purpose)
    assert generator.separate_streams().passed is False


def of_a_bad_byte() -> Key:
    return Key(b"\0" + os.urandom(KEY_BYTES - 1))


# Sound keys fail with probability below 1e-8.
def test_fresh_keys() -> None:
    assert generator.fresh_keys().passed
    assert generator.fresh_keys(lambda: Key.from_unsafe_seed(3)).passed is False
    assert generator.fresh_keys(of_a_bad_byte).passed is False


def test_fork() -> None:
    assert generator.fork().passed
    assert generator.fork(lambda: Key.from_unsafe_seed(3)).passed is False


@every_backend.every_backend
@pytest.mark.parametrize("rule", [None, update.SGD(lr=0.1)], ids=["gradients", "update"])
def test_words_of_a_step(backend: str, rule: update.Rule | None) -> None:
    found = words.words(make(rule=rule, backend=backend), steps=1)
    assert [check.passed for check in found] == [True, True], found
    # A tile is 768 words of draws and 256 of rounding; 700 and 15 coordinates touch three.
    assert found[0].numbers["produced"] == 3 * 768
    assert found[0].numbers["consumed"] == 1050 + 23


@pytest.mark.parametrize("name", step_count_cases.CASES)
def test_words_of_every_mechanism(name: str) -> None:
    torch.manual_seed(0)
    case = step_count_cases.CASES[name](random.Random(name))
    step = case.step()
    found = words.words(step, release=lambda step: case.run(step, case.given(step)))
    assert [check.passed for check in found] == [True, True], found
    assert (found[0].numbers["consumed"] > 0) == (name != "dpsgd without noise")


def test_words_of_the_steps_own_key_for_something_else() -> None:
    def release(step: DPStep) -> None:
        noise.keystream(step.key.stream(Purpose.TABLES, 0), first_block=0, blocks=1)
        step.finish()

    found = words.words(make(), release=release)
    assert [check.passed for check in found] == [None, True]
    assert "noise.keystream" in found[0].text


def test_draws_made_ahead_are_used_once() -> None:
    with RingPrefetch() as source:
        found = words.words(make(rule=update.SGD(lr=0.1), noise_source=source))
    assert [check.passed for check in found] == [None, True]


def test_a_reused_stream_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import dpkern.step.step

    noise_of = _step_noise.noise_of

    def of_step_one(plan: Plan, key: Key, step: int, *args: Any, **given: Any) -> Any:
        return noise_of(plan, key, 1, *args, **given)

    monkeypatch.setattr(dpkern.step.step, "noise_of", of_step_one)
    found = words.words(make(rule=update.SGD(lr=0.1)))
    assert [check.passed for check in found] == [True, False]
    assert found[1].numbers["twice"] == 4


def test_overlapping_places_are_found() -> None:
    watch = words.KeystreamMonitor()
    key = Key.fresh()
    with watch.on():
        for position, count in ((0, 100), (100, 0), (99, 5), (104, 3)):
            x = torch.zeros(count, dtype=torch.int32)
            noise.add_noise(x, stream=key.stream(Purpose.NOISE, 0), position=position)
    assert len(watch.overlaps()) == 1


def test_a_wrong_count_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    step = make()
    planned = {name: count + 1 for name, count in step.plan.words.items()}
    monkeypatch.setitem(step.plan.__dict__, "words", planned)
    assert [check.passed for check in words.words(step)] == [False, True]


def test_resume() -> None:
    for rule in (None, update.Adam(lr=0.1)):
        assert words.resume(lambda rule=rule: make(rule=rule)).passed
    seeded = words.resume(lambda: make(unsafe_seed=3))
    assert seeded.passed is False
    assert "same key" in seeded.text
    assert "same noise" in seeded.text


def test_a_run_without_noise_is_not_judged() -> None:
    silent = DPSGD(noise_multiplier=0.0, max_grad_norm=1.0)
    assert words.resume(lambda: make(silent)).passed is None


def test_a_saved_key_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    state_dict = DPStep.state_dict

    def with_key(self: DPStep) -> dict[str, Any]:
        return state_dict(self) | {"key": self.key.stream(Purpose.NOISE, 0).key}

    monkeypatch.setattr(DPStep, "state_dict", with_key)
    monkeypatch.setattr(DPStep, "load_state_dict", lambda self, state: None)
    assert "holds the key" in words.resume(make).text


# The keys come from the operating system: at 0.999999 a sound generator fails once in 10^6.
def test_an_audit_of_the_generator() -> None:
    backend = testing.available_backends()[0]
    found = run(Generator(backends=(backend,)), runs=2000, confidence=0.999999, quick=True)
    assert found.passed, found.sentence
    asked = {check.name for check in found.checks if check.passed}
    expected = {f"golden vectors, {backend}", f"equal bits, {backend}", "fork", "resume"}
    expected |= {
        f"words, {name}" for name in ("dpsgd, exact", "dpsgd, float", "laplace_sgd, exact")
    }
    assert asked >= expected


def test_ranks_are_judged() -> None:
    """``test_engine_distributed`` judges two that draw."""
    good = [ranks.Rank("a", "b"), ranks.Rank("a", "c")]
    assert ranks.judged(good).passed
    assert ranks.judged([ranks.Rank("a", "b"), ranks.Rank("x", "c")]).passed is False
    assert ranks.judged([ranks.Rank("a", "b"), ranks.Rank("a", "b")]).passed is False
    assert ranks.judged(good[:1]).passed is False


@pytest.mark.evidence
def test_ranks_are_started() -> None:
    assert ranks.ranks().passed

"""Keys and streams: fresh, separate, hidden, gone when wiped."""

from __future__ import annotations

import copy
import hashlib
import pickle
from itertools import product

import pytest
import torch

from dpkern.audit.generator import in_child
from dpkern.base.errors import InvalidInput, PrivacyError
from dpkern.base.rng import ROUNDS, Key, Purpose, Stream
from dpkern.ops import noise, testing

FRESH_KEYS = 10_000
LIMITS = {"step": (0, 1, 2**32 - 1), "stream": (0, 1, 2**24 - 1)}


def fingerprint(key: Key) -> bytes:
    return hashlib.sha256(key.stream(Purpose.NOISE, 0).key).digest()


def test_a_forked_child_has_a_key_of_its_own() -> None:
    key = Key.fresh()
    before = fingerprint(key)
    first, second = in_child(lambda: fingerprint(key)), in_child(lambda: fingerprint(key))
    assert len(first) == len(second) == 32
    assert len({before, first, second}) == 3
    assert fingerprint(key) == before


def test_a_forked_child_keeps_a_seed() -> None:
    key = Key.from_unsafe_seed(3)
    assert in_child(lambda: fingerprint(key)) == fingerprint(key)


def test_fresh_keys_are_distinct() -> None:
    keys = {Key.fresh().stream(Purpose.NOISE, 0).key for _ in range(FRESH_KEYS)}
    assert len(keys) == FRESH_KEYS


def test_fresh_keys_use_all_bits() -> None:
    keys = [int.from_bytes(Key.fresh().stream(Purpose.NOISE, 0).key, "big") for _ in range(400)]
    ones = [sum(key >> bit & 1 for key in keys) for bit in range(256)]
    # Binomial(400, 1/2), 256 times: outside 200 +- 70 (7 sd) with probability 1e-9.
    assert all(130 < count < 270 for count in ones)


def test_seeds_are_reproducible_and_separate() -> None:
    same, other = Key.from_unsafe_seed(5), Key.from_unsafe_seed(6)
    assert fingerprint(same) == fingerprint(Key.from_unsafe_seed(5)) != fingerprint(other)
    assert (same.seeded, same.unsafe_seed) == (True, 5)
    fresh = Key.fresh()
    assert (fresh.seeded, fresh.unsafe_seed) == (False, None)


def test_a_wiped_key_refuses_and_is_overwritten() -> None:
    key = Key.fresh()
    memory = key._secret
    assert any(memory)
    key.wipe()
    assert not any(memory)
    with pytest.raises(PrivacyError, match="wiped"):
        key.stream(Purpose.NOISE, 0)
    key.wipe()


def test_representations_hide_the_key() -> None:
    for key in (Key.fresh(), Key.from_unsafe_seed(1)):
        stream = key.stream(Purpose.ROUNDING, 7)
        for text in (repr(key), str(key), repr(stream), str(stream), f"{stream!r}"):
            assert stream.key.hex() not in text
            assert repr(stream.key) not in text
    assert "unsafe_seed=1" in repr(Key.from_unsafe_seed(1))
    assert "operating system" in repr(Key.fresh())


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_secret_key_cannot_be_duplicated(duplicate: object) -> None:
    assert callable(duplicate)
    with pytest.raises(PrivacyError, match="copy or a pickle"):
        duplicate(Key.fresh())


def test_a_seeded_key_can_be_duplicated() -> None:
    key = Key.from_unsafe_seed(9, rounds=12)
    for other in (copy.deepcopy(key), pickle.loads(pickle.dumps(key))):
        assert other.stream(Purpose.NOISE, 4) == key.stream(Purpose.NOISE, 4)


def test_nonce_domains_are_disjoint() -> None:
    key = Key.from_unsafe_seed(0)
    uses = list(product(Purpose, LIMITS["step"], LIMITS["stream"]))
    streams = [key.stream(purpose, step, stream) for purpose, step, stream in uses]
    nonces = {(s.n0, s.n1) for s in streams}
    assert len(nonces) == len(uses)
    # Bit 31 belongs to tail escapes, which the kernels set themselves.
    assert all(s.n0 < 2**31 for s in streams)
    assert {s.n0 >> 24 for s in streams} == {int(purpose) for purpose in Purpose}


def test_streams_of_one_key_do_not_overlap() -> None:
    key = Key.from_unsafe_seed(0)
    words = [
        tuple(noise.keystream(key.stream(purpose, step), first_block=0, blocks=4).tolist())
        for purpose in Purpose
        for step in (0, 1)
    ]
    flat = [word for stream in words for word in stream]
    # 640 random 32-bit words: a repeat has probability 5e-5, and the seed is fixed.
    assert len(set(flat)) == len(flat)


def test_rounds_reach_the_cipher() -> None:
    streams = [Key.from_unsafe_seed(0, rounds).stream(Purpose.NOISE, 0) for rounds in ROUNDS]
    assert [stream.rounds for stream in streams] == list(ROUNDS)
    outputs = {
        tuple(noise.keystream(stream, first_block=0, blocks=1).tolist()) for stream in streams
    }
    assert len(outputs) == len(ROUNDS)


@pytest.mark.parametrize(
    "nonce", [{"n0": -1}, {"n0": 2**31}, {"n1": -1}, {"n1": 2**32}, {"n0": 0.0}, {"rounds": 21}]
)
def test_a_stream_checks_its_nonce(nonce: dict[str, int]) -> None:
    (name,) = nonce
    with pytest.raises(InvalidInput, match=name):
        Stream(**({"key": bytes(32), "n0": 0, "n1": 0} | nonce))


@pytest.mark.skipif("cpu" not in testing.available_backends(), reason="no compiled kernels")
def test_kernels_run_in_a_forked_child_of_a_threaded_parent() -> None:
    x = torch.zeros(20_000, dtype=torch.int32)  # two threads of ours, one of torch

    def noisy() -> bytes:
        stream = testing.KEY.stream(Purpose.NOISE, 1)
        drawn = noise.add_noise(x.clone(), stream=stream, backend="cpu")
        return hashlib.sha256(drawn.numpy().tobytes()).digest()

    with testing.threads(2):
        wanted = noisy()
        assert in_child(noisy) == wanted

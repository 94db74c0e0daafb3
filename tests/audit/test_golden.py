"""Golden vectors: ``golden_noise.txt`` holds for a scalar model in Python and for every backend."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpkern.audit import golden
from dpkern.audit.golden import Vector
from dpkern.base.laws import ESCAPE, LAWS
from dpkern.base.rng import Stream
from dpkern.ops import noise, testing
from tests.ops import scalar_noise
from tests.ops.backends import every_backend
from tests.ops.scalar_noise import Nonce

SCALAR_AT_MOST = 5000
VECTORS = golden.vectors()


@dataclass(frozen=True)
class Runner:
    """A backend, or the compiled one with an instruction set and a number of threads."""

    backend: str
    isa: str | None = None
    threads: int = 1

    def __str__(self) -> str:
        return self.backend if self.isa is None else f"{self.backend}-{self.isa}-{self.threads}"

    @contextmanager
    def active(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(every_backend.running(self.backend))
            stack.enter_context(testing.threads(self.threads))
            if self.isa is not None:
                stack.enter_context(testing.isa(self.isa))
            yield


RUNNERS = [
    *(
        pytest.param(Runner(backend.values[0]), id=backend.id, marks=backend.marks)
        for backend in every_backend.PARAMETERS
        if backend.values[0] != "cpu"
    ),
    *(Runner("cpu", isa, threads) for isa in testing.available_isas() for threads in (1, 2)),
]
every_runner = pytest.mark.parametrize("runner", RUNNERS, ids=str)


def nonce_of(stream: Stream) -> Nonce:
    return Nonce(*stream.packed())


def digest(draws: np.ndarray) -> str:
    return hashlib.sha256(draws.astype("<i4").tobytes()).hexdigest()[:24]


def floats_of(kind: str, values: list[str]) -> np.ndarray:
    """Hexadecimal bits -> floats."""
    width = {"float32": "u4", "float64": "u8"}[kind]
    return np.array([int(bits, 16) for bits in values], dtype=width).view(kind)


def bits_of(values: np.ndarray) -> list[str]:
    width = values.dtype.itemsize
    return [f"{bits:0{2 * width}x}" for bits in values.view(f"u{width}").tolist()]


def scalar_values(vector: Vector) -> list[str]:
    nonce, law, at = nonce_of(vector.stream), vector.law, vector.position
    match vector.kind.split(":"):
        case ["keystream"]:
            return [scalar_noise.block(nonce, at + i).hex() for i in range(len(vector.values))]
        case [_]:
            return [
                str(scalar_noise.draw(nonce, law, at + i)[0]) for i in range(len(vector.values))
            ]
        case [_, "sha256"]:
            count = int(vector.values[0])
            draws = [scalar_noise.draw(nonce, law, at + i)[0] for i in range(count)]
            return [str(count), digest(np.array(draws))]
        case [_, "int32" | "int64"]:
            sums = [int(pair.split(":")[0]) for pair in vector.values]
            return [
                f"{v}:{scalar_noise.release_integer(nonce, law, at + i, v)}"
                for i, v in enumerate(sums)
            ]
        case [_, kind, scale]:
            given_bits = [pair.split(":")[0] for pair in vector.values]
            released = [
                scalar_noise.release_float(
                    nonce, nonce_of(vector.rounding), law, at + i, x, float(scale)
                )
                for i, x in enumerate(floats_of(kind, given_bits))
            ]
            answers = bits_of(np.array(released, dtype=kind))
            return [f"{x}:{y}" for x, y in zip(given_bits, answers, strict=True)]
    raise AssertionError(f"{vector}: unknown kind")


SHORT = [v for v in VECTORS if "sha256" not in v.kind or int(v.values[0]) <= SCALAR_AT_MOST]
"""Two million draws are too long for Python and the interpreter; only the backends answer those."""


@pytest.mark.parametrize("vector", SHORT, ids=str)
def test_scalar_model(vector: Vector) -> None:
    assert scalar_values(vector) == list(vector.values)


@every_runner
def test_backends(runner: Runner) -> None:
    # A kernel in the interpreter takes seconds for the two million draws that the others make.
    vectors = SHORT if runner.backend in every_backend.INTERPRETED else VECTORS
    assert wrong_answers(runner, vectors) == []


@pytest.mark.slow
@every_runner
def test_long_vectors_in_the_interpreter(runner: Runner) -> None:
    if runner.backend not in every_backend.INTERPRETED:
        pytest.skip("its backend answers all vectors at once")
    assert wrong_answers(runner, [v for v in VECTORS if v not in SHORT]) == []


def wrong_answers(runner: Runner, vectors: Sequence[Vector]) -> list[str]:
    with runner.active():
        return [str(v) for v in vectors if golden.answers(v, runner.backend) != v.values]


def test_the_file_covers_tails_restarts_and_every_form() -> None:
    magnitudes: dict[str, list[int]] = {law: [] for law in LAWS}
    for vector in VECTORS:
        if vector.kind in LAWS:
            magnitudes[vector.kind] += [
                scalar_noise.draw(nonce_of(vector.stream), vector.law, vector.position + i)[1]
                for i in range(len(vector.values))
            ]
    for signed in magnitudes.values():
        assert max(signed) >= ESCAPE
        assert min(signed) < -ESCAPE
    # Two restarts are a magnitude of at least 3 x 255.
    assert max(magnitudes["laplace"]) >= 3 * ESCAPE
    assert min(magnitudes["laplace"]) < -3 * ESCAPE
    kinds = {
        vector.kind.split(":")[-2 if vector.kind.count(":") == 2 else -1] for vector in VECTORS
    }
    assert kinds == {"keystream", *LAWS, "sha256", "int32", "int64", "float32", "float64"}
    assert {vector.stream.rounds for vector in VECTORS if vector.kind in LAWS} == {20, 12, 8}


@every_runner
def test_a_wrong_vector_is_noticed(runner: Runner) -> None:
    with runner.active():
        for law in LAWS:
            vector = next(v for v in VECTORS if v.kind == law)
            answers = golden.answers(vector, runner.backend)
            shifted = replace(vector, position=vector.position + 1)
            assert golden.answers(shifted, runner.backend)[:-1] == answers[1:]
            assert golden.answers(shifted, runner.backend) != vector.values


positions = st.one_of(
    st.integers(0, 5000),
    st.integers(-600, 600).map(lambda offset: 2**32 // 48 * 512 + offset),
    st.integers(-600, 600).map(lambda offset: 2**32 // 16 * 512 + offset),
    st.integers(0, 2**62 - 5000),
)


@every_runner
def test_any_range_in_any_pieces(runner: Runner) -> None:
    @settings(
        max_examples=every_backend.examples(12, runner.backend), deadline=None, derandomize=True
    )
    @given(
        law=st.sampled_from(sorted(LAWS)),
        rounds=st.sampled_from([20, 12, 8]),
        position=positions,
        pieces=st.lists(st.integers(0, 900), min_size=1, max_size=4),
    )
    def holds(law: str, rounds: int, position: int, pieces: list[int]) -> None:
        stream = Stream(key=bytes(range(32)), n0=0, n1=5, rounds=rounds)
        rounding = Stream(key=bytes(range(32)), n0=golden.ROUNDING_NONCE, n1=5, rounds=rounds)
        given_noise = {"stream": stream, "distribution": law}
        total = sum(pieces)
        kinds = [torch.int32, torch.int64, torch.float32, torch.float64]
        sums = [torch.linspace(-1e4, 1e4, total).to(kind) for kind in kinds]

        def with_rounding(x: torch.Tensor) -> dict[str, object]:
            return {"scale": 3.3, "rounding": rounding} if x.is_floating_point() else {}

        with runner.active():
            at, drawn, released = position, [], [[] for _ in kinds]
            for piece in pieces:
                drawn.append(
                    noise.lattice_draws(
                        stream, position=at, count=piece, distribution=law, backend=runner.backend
                    )
                )
                for x, parts in zip(sums, released, strict=True):
                    part = x[at - position :][:piece].clone()
                    noise.add_noise(
                        part, position=at, backend=runner.backend, **given_noise, **with_rounding(x)
                    )
                    parts.append(part)
                at += piece
        expected = noise.lattice_draws(
            stream, position=position, count=total, distribution=law, backend="reference"
        )
        assert torch.equal(torch.cat(drawn), expected)
        for x, parts in zip(sums, released, strict=True):
            whole = noise.add_noise(
                x.clone(), position=position, backend="reference", **given_noise, **with_rounding(x)
            )
            assert torch.equal(torch.cat(parts), whole), x.dtype

    holds()

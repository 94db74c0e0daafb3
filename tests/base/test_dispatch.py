"""Who runs an op: explicit choices are obeyed or refused, automatic ones fall back and say why."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch

import dpkern
from dpkern.base import dispatch, signature_reader
from dpkern.base.kernel import Kernel
from dpkern.base.rng import Key, Purpose
from dpkern.ops import clip, noise, testing

STREAM = testing.KEY.stream(Purpose.NOISE, 1)
NEEDS_KERNELS = pytest.mark.skipif(
    "cpu" not in testing.available_backends(), reason="built without compiled kernels"
)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which kernels ran ``clip.sample_norm``."""
    calls: list[str] = []
    op = dispatch.OPS["clip.sample_norm"]
    op(torch.ones(1, 1))  # loads the backends
    kernels = {
        name: Kernel(_recorder(calls, name, kernel.run), kernel.refuse)
        for name, kernel in op.kernels.items()
    }
    monkeypatch.setattr(op, "kernels", kernels)
    monkeypatch.setattr(op, "_orders", {})
    return calls


def _recorder(calls: list[str], name: str, run: object) -> object:
    def wrapped(*args: object, **kwargs: object) -> object:
        calls.append(name)
        assert callable(run)
        return run(*args, **kwargs)

    return wrapped


def test_argument_beats_context_beats_environment(
    recorded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    grads = torch.ones(2, 3)
    available = testing.available_backends()
    best = next(name for name in dispatch.PREFERENCE["cpu"] if name in available)
    clip.sample_norm(grads)
    with dpkern.use("reference"):
        clip.sample_norm(grads)
        clip.sample_norm(grads, backend=best)
    monkeypatch.setattr(dispatch, "environment_choice", lambda: "reference")
    clip.sample_norm(grads)
    assert recorded == [best, "reference", best, "reference"]


@NEEDS_KERNELS
def test_automatic_choice_falls_back_and_says_why_once(
    recorded: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_logged", set())
    with caplog.at_level(logging.INFO, logger="dpkern"):
        for _ in range(2):
            clip.sample_norm(torch.ones(2, 3), scale=torch.ones(3))
    assert recorded == ["reference", "reference"]
    said = [record.message for record in caplog.records if "backend cpu" in record.message]
    assert len(said) == 1
    assert "per-coordinate scale" in said[0]


@NEEDS_KERNELS
def test_explicit_choice_that_cannot_run_lists_the_refusals() -> None:
    with pytest.raises(dpkern.BackendError, match=r"per-coordinate.*reference \(available\)"):
        clip.sample_norm(torch.ones(2, 3), scale=torch.ones(3), backend="cpu")


def test_missing_kernels_are_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    op = dispatch.OPS["noise.add_noise"]
    monkeypatch.setattr(op, "kernels", {"reference": op.kernels["reference"]})
    monkeypatch.setattr(op, "_orders", {})
    monkeypatch.setattr(op, "_direct", {})
    monkeypatch.setitem(dispatch._availability, "cpu", (False, "has no compiled module"))
    x = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(dpkern.BackendError, match="has no compiled module"):
        noise.add_noise(x, stream=STREAM, backend="cpu")
    assert not x.any()
    assert noise.add_noise(x, stream=STREAM).shape == (4,)


def test_environment_variable_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPKERN_BACKEND", "abacus")
    dispatch.environment_choice.cache_clear()
    try:
        with pytest.raises(dpkern.InvalidInput, match="abacus"):
            clip.sample_norm(torch.ones(2, 3))
    finally:
        monkeypatch.delenv("DPKERN_BACKEND")
        dispatch.environment_choice.cache_clear()


def test_table_has_a_row_for_every_op_and_backend() -> None:
    rows = dispatch.table()
    assert len(rows) == len(dispatch.OPS) * len(dispatch.BACKENDS)
    assert all(row["available"] == (row["reason"] == "") for row in rows)
    assert all(row["available"] for row in rows if row["backend"] == "reference")


def test_an_interceptor_sees_every_thread_and_not_its_own_calls() -> None:
    seen: list[int] = []
    x = torch.zeros(8, dtype=torch.int32)
    stream = Key.from_unsafe_seed(0).stream(Purpose.NOISE, 1)

    def watch(op: dispatch.Op[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen.append(threading.get_ident())
        with dispatch.intercepted(None):
            barrier.wait()  # both threads are inside now: neither may end the other's watch
            return op(*args, **kwargs)

    def call() -> None:
        for step in range(3):
            noise.add_noise(x.clone(), stream=stream, position=512 * step)

    barrier = threading.Barrier(2, timeout=30)
    other = threading.Thread(target=call)
    with dispatch.intercepted(watch):
        other.start()
        call()
        other.join()
    assert sorted(seen.count(thread) for thread in set(seen)) == [3, 3]
    call()
    assert len(seen) == 6


def test_a_dtype_that_follows_from_a_later_tensor_is_refused_when_it_is_declared() -> None:
    after = {"a": 'Operand[Tensor, "B"]', "e": 'Sum[Tensor, "B"]', "return": "None"}
    assert signature_reader.read("sums", after, lambda _: None).group == "Operand"
    before = {"e": after["e"], "a": after["a"], "return": "None"}
    with pytest.raises(TypeError, match="a Sum stands in front"):
        signature_reader.read("sums", before, lambda _: None)

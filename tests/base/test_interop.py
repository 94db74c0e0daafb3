"""CuPy arrays in place of tensors, with arrays in host memory standing in for CuPy's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dpkern.base import interop
from dpkern.base.errors import BackendError, InvalidInput
from dpkern.base.rng import Purpose
from dpkern.ops import clip, ghost, noise, product, testing, update

STREAM = testing.KEY.stream(Purpose.NOISE, 1)
HOST, DEVICE = (1, 0), (2, 0)


class Array:
    """What ``interop`` knows of a CuPy array; the memory is numpy's."""

    def __init__(self, values: np.ndarray, where: tuple[int, int] = HOST) -> None:
        self.values, self.where = values, where
        self.strides, self.dtype = values.strides, values.dtype
        self.exports = 0

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("nobody should look at single entries")

    def __dlpack__(self, **kwargs: Any) -> Any:
        self.exports += 1
        return self.values.__dlpack__(max_version=kwargs.get("max_version"))

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.where


class Cupy:
    """The module."""

    ndarray = Array

    def __init__(self) -> None:
        self.stream = 0
        self.cuda = SimpleNamespace(
            get_current_stream=lambda device: SimpleNamespace(ptr=self.stream)
        )

    @staticmethod
    def from_dlpack(tensor: torch.Tensor) -> Array:
        return Array(np.from_dlpack(tensor))


@pytest.fixture(autouse=True)
def cupy(monkeypatch: pytest.MonkeyPatch) -> Cupy:
    """CuPy, imported."""
    fake = Cupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake


def random(*shape: int) -> torch.Tensor:
    """Reproducible values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def array(tensor: torch.Tensor) -> Array:
    """A copy in an array."""
    return Array(tensor.clone().numpy())


def same(got: object, want: torch.Tensor) -> bool:
    """Whether this is an array with the tensor's bits and type."""
    assert isinstance(got, Array), type(got)
    values = torch.from_numpy(got.values)
    return values.dtype == want.dtype and torch.equal(values, want)


def test_noise_goes_into_the_array_itself() -> None:
    x = torch.arange(1000, dtype=torch.int32)
    mine: Any = array(x)
    assert noise.add_noise(mine, stream=STREAM) is mine
    assert same(mine, noise.add_noise(x, stream=STREAM))
    assert mine.exports == 1


def test_results_are_arrays_and_accumulators_stay_themselves() -> None:
    grads = [random(5, 3, 4), random(5, 7)]
    given: dict[str, Any] = {"arithmetic": "exact", "unit": 2.0**-20}
    want = clip.clip_sum(grads, 1.0, **given)
    mine: Any = [array(g) for g in grads]
    got: Any = clip.clip_sum(mine, 1.0, **given)
    assert same(got.norms, want.norms)
    assert all(map(same, got.sums, want.sums))
    assert (got.norm_bound, got.nonfinite) == (want.norm_bound, want.nonfinite)
    again: Any = clip.clip_sum(mine, 1.0, out=got.sums, **given)
    assert again.sums[0] is got.sums[0]
    assert same(again.sums[1], 2 * want.sums[1])


@pytest.mark.parametrize(
    "rule", [update.SGD(lr=0.1), update.SGD(lr=0.1, momentum=0.9), update.AdamW(lr=0.01)]
)
def test_updates_change_parameters_and_state_in_place(rule: update.Rule) -> None:
    params, sums = [random(4, 3), random(6)], [random(4, 3), random(6)]
    mine: Any = [array(p) for p in params]
    state, my_state = rule.init(params), interop.call(rule.init, mine)
    buffers = [b for group in my_state.buffers.values() for b in group]
    for step in (1, 2):
        given: dict[str, Any] = {
            "rule": rule,
            "noise": update.Noise(
                distribution="gaussian",
                scales=(1.0, 2.0),
                stream=testing.KEY.stream(Purpose.NOISE, step),
                positions=(0, 12),
                rounding=testing.KEY.stream(Purpose.ROUNDING, step),
            ),
        }
        update.step(params, sums, state=state, **given)
        my_sums: Any = [array(s) for s in sums]
        update.step(mine, my_sums, state=my_state, **given)
        assert (my_state.steps, state.steps) == (step, step)
    assert all(map(same, mine, params))
    assert [b for group in my_state.buffers.values() for b in group] == buffers
    want = [b for group in state.buffers.values() for b in group]
    assert all(map(same, buffers, want))


def test_draws_made_ahead_may_be_arrays() -> None:
    p, total = random(50), torch.arange(50, dtype=torch.int32)
    rule = update.SGD(lr=0.1)
    values = noise.lattice_draws(STREAM, position=0, count=50)
    given: dict[str, Any] = {"distribution": "gaussian", "scales": (1.0,), "positions": (0,)}
    mine: Any = array(p)
    ahead: Any = array(values)
    made = update.Noise(stream=STREAM, draws=update.Draws(0, ahead), **given)
    my_total: Any = array(total)
    update.step([mine], [my_total], rule=rule, state=rule.init([p]), noise=made)
    update.step(
        [p], [total], rule=rule, state=rule.init([p]), noise=update.Noise(stream=STREAM, **given)
    )
    assert same(mine, p)


@pytest.mark.parametrize(
    ("op", "tensors"),
    [
        (clip.sample_norm, [random(5, 3)]),
        (ghost.linear_norm, [random(5, 4, 3), random(5, 4, 2)]),
        (product.matmul, [random(5, 3), random(3, 2)]),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_arrays_and_tensors_may_be_mixed(op: Any, tensors: list[torch.Tensor]) -> None:
    want = op(*tensors)
    assert same(op(*map(array, tensors)), want)
    assert same(op(*tensors[:-1], array(tensors[-1])), want)
    assert isinstance(op(*tensors), torch.Tensor)


def test_one_array_is_one_tensor_and_other_devices_are_left_alone() -> None:
    x = array(random(3))
    seen: list[Any] = []

    def function(*args: Any, **kwargs: Any) -> Any:
        seen.extend((*args, kwargs["more"]["x"]))
        return {"there": torch.empty(1, device="meta"), "number": 7, "own": args[0]}

    got = interop.call(function, x, x, more={"x": x})
    assert seen[0] is seen[1] is seen[2]
    assert isinstance(seen[0], torch.Tensor)
    assert got["there"].is_meta
    assert (got["number"], got["own"]) == (7, x)


def test_without_arrays_nothing_is_touched() -> None:
    nested = {"a": [torch.zeros(1)], "b": (1, "x")}
    assert interop.call(lambda value: value, nested) is nested


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.zeros(4, np.float32)[::2], "expected a contiguous tensor"),
        (np.zeros(4, np.float32)[::-1], "strides of at least 0"),
        (np.zeros(4, np.complex64), "got torch.complex64"),
        (np.zeros(4, [("a", np.float32)]), "dtype that torch can share"),
        (np.zeros(4, "M8[s]"), "dtype that torch can share"),
    ],
    ids=["strided", "negative", "complex", "structured", "time"],
)
def test_refused_arrays(values: np.ndarray, message: str) -> None:
    x: Any = Array(values)
    with pytest.raises(InvalidInput, match=message):
        noise.add_noise(x, stream=STREAM, scale=1.0)


def test_torch_without_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    x: Any = Array(np.zeros(4, np.int32), DEVICE)
    with pytest.raises(BackendError, match="expected a CUDA build of torch"):
        noise.add_noise(x, stream=STREAM)
    assert not x.exports


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of torch's streams, with stream 7 the current one."""
    done: list[str] = []

    class Stream:
        def __init__(self, pointer: int, device: object = None) -> None:
            self.cuda_stream = pointer

        def wait_stream(self, other: Stream) -> None:
            done.append(f"{self.cuda_stream} waits for {other.cuda_stream}")

    @contextmanager
    def current(stream: Stream) -> Iterator[None]:
        done.append(f"on {stream.cuda_stream}")
        yield
        done.append("back")

    @contextmanager
    def device(where: torch.device) -> Iterator[None]:
        done.append(str(where))
        yield

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda where: Stream(7))
    monkeypatch.setattr(torch.cuda, "ExternalStream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(interop, "from_dlpack", lambda array: torch.from_numpy(array.values))
    return done


def test_work_joins_the_current_stream_of_cupy(events: list[str], cupy: Cupy) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        events.append("work")
        return x

    x = Array(np.zeros(4, np.int32), DEVICE)
    cupy.stream = 7
    assert interop.call(function, x) is x
    assert events == ["cuda:0", "work"]
    events.clear()
    cupy.stream = 9
    assert interop.call(function, x) is x
    assert events == ["9 waits for 7", "on 9", "work", "back", "7 waits for 9"]


def test_a_stream_per_thread_is_refused(events: list[str], cupy: Cupy) -> None:
    cupy.stream = 2
    x: Any = Array(np.zeros(4, np.int32), DEVICE)
    with pytest.raises(BackendError, match="CUPY_CUDA_PER_THREAD_DEFAULT_STREAM"):
        noise.add_noise(x, stream=STREAM)
    assert not events


@pytest.mark.gpu
def test_with_cupy_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    monkeypatch.delitem(sys.modules, "cupy")
    cupy: Any = pytest.importorskip("cupy")
    grads = 100 * random(64, 1000)
    given: dict[str, Any] = {"arithmetic": "exact", "unit": 2.0**-10}
    want = clip.clip_sum(grads, 1.0, **given).sums[0]
    noise.add_noise(want, stream=STREAM)
    for _ in range(20):
        with cupy.cuda.Stream(non_blocking=True):
            mine = cupy.asarray(grads.numpy()) * 1
            (total,) = clip.clip_sum(mine, 1.0, **given).sums
            assert noise.add_noise(total, stream=STREAM) is total
            got = (total + 0).get()
        assert np.array_equal(got, want.numpy())

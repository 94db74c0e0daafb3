"""The cuda backend without a GPU: why it is missing, what it refuses, how its failures read."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dpkern import _C
from dpkern.base import dispatch, layouts
from dpkern.base.errors import BackendError, PrivacyError
from dpkern.base.rng import Purpose
from dpkern.base.struct_types import Struct
from dpkern.ops import clip, noise, testing, update
from dpkern.ops.backends import _device, _generated, _launch_update, _tables, cuda
from dpkern.ops.backends import _kernels as table
from dpkern.ops.backends._start import Device

STREAM = testing.KEY.stream(Purpose.NOISE, 1)
ROUNDING = testing.KEY.stream(Purpose.ROUNDING, 1)


@pytest.fixture
def emulator() -> Iterator[ModuleType]:
    """The emulated kernels, with the cuda backend on CPU tensors."""
    module = cuda._emulated()
    if isinstance(module, str):
        pytest.skip(f"cuda {module}")
    with testing.emulated("cuda"):
        yield module
    module.order(reverse=False)


def extension(*, built: str = "", count: int = 1) -> Any:
    """A compiled module as ``load`` sees it."""
    module = SimpleNamespace(
        digest=_generated.digest(),
        device_count=lambda: (count, 0 if count else 35),
        error_text=lambda error: f"text {error}",
    )
    config = {"cuda": not built, "cuda_reason": built}
    return SimpleNamespace(build_config=lambda: config, cuda=module)


# why it is missing


def test_without_the_compiled_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "load_extension", lambda: "has no compiled module")
    assert cuda.load() == (False, "has no compiled module")


def test_built_without_cuda() -> None:
    reason = cuda._unavailable(extension(built="nvcc was not found when dpkern was built"))
    assert reason is not None
    assert "nvcc was not found when dpkern was built" in reason
    assert "DPKERN_CUDA=on" in reason
    assert "pip install triton" in reason


def test_built_of_other_sources() -> None:
    reason = "has kernels of another version of dpkern: reinstall it"
    found = extension()
    found.cuda.digest = "0" * 16
    assert cuda._unavailable(found) == reason
    del found.cuda.digest  # of before there was one
    assert cuda._unavailable(found) == reason


def test_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert cuda._unavailable(extension()) == (
        f"needs a CUDA build of torch, found {torch.__version__}"
    )


def test_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert cuda._unavailable(extension(count=0)) == "finds no device: text 35"
    assert cuda._unavailable(extension()) is None


@pytest.mark.skipif(not _C.build_config()["cuda"], reason="built without CUDA")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_a_build_with_cuda_works_without_a_driver() -> None:
    count, error = _C.cuda.device_count()
    assert count == 0
    assert error != 0
    assert "driver" in _C.cuda.error_text(error) or "device" in _C.cuda.error_text(error)
    assert parameters(_C.cuda) == table.signatures()
    with pytest.raises(BackendError, match=f"error {error}"):
        _start_advance(cuda.device(_C.cuda))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_asked_for_and_missing() -> None:
    with pytest.raises(BackendError, match=r"backend 'cuda' for noise.add_noise") as caught:
        noise.add_noise(torch.zeros(3, dtype=torch.int32), stream=STREAM, backend="cuda")
    assert dispatch.availability("cuda")[1] in caught.value.got


def parameters(module: Any) -> dict[str, str]:
    """Those of every kernel, as compiled."""
    return {name: found for name, (_, found) in module.kernels().items()}


def _start_advance(on: Device) -> None:
    step_counter = torch.zeros(6, dtype=torch.float64)
    on.start(table.ADVANCE, (), 0, step_counter=step_counter, beta1=1.0, beta2=1.0)


# what it refuses


def test_tensors_on_the_cpu() -> None:
    assert _device.refusal(torch.zeros(1)) == "runs on CUDA devices, got a tensor on cpu"


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tensor on a device that is not there."""
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)
    _device._capability.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 0))
    yield SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0), get_device=lambda: 0)
    _device._capability.cache_clear()


def test_old_devices(fake_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _device.refusal(fake_device) == "needs compute capability 7.5 or later, cuda:0 has 7.0"
    _device._capability.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    assert _device.refusal(fake_device) is None


def test_forked_processes(fake_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    reason = "cannot use CUDA in a forked process: start workers with spawn"
    assert _device.refusal(fake_device) == reason
    assert _device.refusal() == reason


# how failures read


def test_a_failed_launch(emulator: ModuleType) -> None:
    x = torch.zeros(3, dtype=torch.int32)
    emulator.fail_next(719)
    with pytest.raises(BackendError, match=r"cuda kernel: .* error 719, emulated error"):
        noise.add_noise(x, stream=STREAM, backend="cuda")
    noise.add_noise(x, stream=STREAM, backend="cuda")


def test_no_memory_left(emulator: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 bytes. GPU 0 ...")

    x, launches = torch.zeros(3), emulator.launches()
    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(BackendError, match=r"GPU memory: .* got CUDA out of memory") as caught:
        noise.add_noise(x, stream=STREAM, rounding=ROUNDING, scale=1.0, backend="cuda")
    assert "max_physical_batch_size" in caught.value.remedy
    assert not x.any()
    assert emulator.launches() == launches


def test_noise_in_a_captured_graph(emulator: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_device, "capturing", lambda device: True)
    with pytest.raises(PrivacyError, match="every replay would use the same noise"):
        noise.add_noise(torch.zeros(3, dtype=torch.int32), stream=STREAM, backend="cuda")
    rule, params = update.SGD(lr=1.0), [torch.zeros(3)]
    drawn = update.Noise(
        distribution="gaussian", scales=(1.0,), stream=STREAM, positions=(0,), rounding=ROUNDING
    )
    with pytest.raises(PrivacyError, match="every replay would use the same noise"):
        update.step(
            params, [torch.ones(3)], rule=rule, state=rule.init(params), noise=drawn, backend="cuda"
        )
    assert not params[0].any()
    with pytest.raises(BackendError, match="tensors of an earlier call"):
        clip.sample_norm(torch.ones(3, 5), backend="cuda")


def test_a_prepared_update_may_be_recorded(
    emulator: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule, params = update.AdamW(lr=0.1), [torch.ones(600)]
    state = rule.init(params)
    drawn = update.Noise(
        distribution="gaussian",
        scales=(1.0,),
        stream=STREAM,
        positions=(0,),
        step_counter=update.step_counter(rule, 0, "cpu"),
    )
    arguments: dict[str, Any] = {"rule": rule, "state": state, "noise": drawn}
    sums = [torch.ones(600, dtype=torch.int64)]
    emulated = cuda.emulated_device(emulator)
    _tables._made.clear()
    launches = emulator.launches()
    planned = _launch_update.prepare(emulated, params, sums, **arguments)
    assert emulator.launches() == launches  # preparing releases nothing
    assert bool((params[0] == 1).all())
    assert state.steps == 0
    monkeypatch.setattr(_device, "capturing", lambda device: True)
    update.step(params, sums, backend="cuda", **arguments)
    assert planned.tasks is next(iter(_tables._made.values()))
    _tables._made.clear()
    with pytest.raises(BackendError, match="new addresses"):
        update.step(params, sums, backend="cuda", **arguments)


# what it passes on


def test_every_instance_is_compiled_with_the_declared_parameters(emulator: ModuleType) -> None:
    assert parameters(emulator) == table.signatures()


@pytest.mark.parametrize("struct", layouts.STRUCTS, ids=lambda struct: str(struct.name))
def test_numpy_lays_structs_out_as_declared(struct: Struct) -> None:
    # C++ is asked by the generated header itself, whenever it is compiled.
    found = _tables.dtype(struct)
    natural = np.dtype([(name, found[name]) for name in struct.fields], align=True)
    assert found.fields == natural.fields
    assert found.itemsize == natural.itemsize


def test_arguments_of_another_size_or_number_are_refused(emulator: ModuleType) -> None:
    place, parameters = emulator.kernels()["rounding_kernel"]
    assert parameters == "s44 i8 i8 p8"
    sizes = 44, 8, 8, 8
    before = emulator.launches()
    with pytest.raises(ValueError, match="rounding_kernel: an argument of another size"):
        emulator.launch(place, 1, 1, 128, [bytes(n) for n in (44, 8, 4, 8)], 0)
    with pytest.raises(ValueError, match="rounding_kernel: another number of arguments"):
        emulator.launch(place, 1, 1, 128, [bytes(n) for n in sizes[:3]], 0)
    assert emulator.launches() == before
    assert emulator.launch(place, 1, 1, 128, [bytes(n) for n in sizes], 0) == 0


def test_too_many_blocks_fail_at_the_launch(emulator: ModuleType) -> None:
    assert table.blocks_of(2**62) == 2**31
    on, stream = cuda.emulated_device(emulator), _tables.stream(STREAM)
    with pytest.raises(BackendError, match="error 9"):
        on.start(table.KEYSTREAM, (), 0, stream=stream, first_block=0, blocks=2**62, out=None)


def test_nothing_to_do_starts_nothing(emulator: ModuleType) -> None:
    on, stream = cuda.emulated_device(emulator), _tables.stream(STREAM)
    before = emulator.launches()
    on.start(table.KEYSTREAM, (), 0, stream=stream, first_block=0, blocks=0, out=None)
    assert emulator.launches() == before


def test_tables_are_kept_by_their_content(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    _tables._made.clear()
    tables = [_tables.rows([16], [0], [n]) for n in range(_tables._KEPT + 1)]
    first = _tables.device_table(tables[0], device)
    assert first.numpy().tobytes() == tables[0].tobytes()
    assert _tables.device_table(tables[0].copy(), device) is first
    for later in tables[1:]:
        _tables.device_table(later, device)
    assert len(_tables._made) == _tables._KEPT
    assert _tables.device_table(tables[0], device) is not first
    monkeypatch.setattr(_device, "capturing", lambda device: True)
    assert _tables.device_table(tables[-1], device).numel() == tables[-1].nbytes
    with pytest.raises(BackendError, match="new addresses"):
        _tables.device_table(tables[1], device)


def test_tasks_begin_where_the_last_one_ended() -> None:
    table = _tables.rows([8, 16, 24], [0, 0, 0], [4096, 4097, 0])
    assert table["first_chunk"].tolist() == [0, 1, 3]
    assert table["first_column"].tolist() == [0, 4096, 8193]
    params = [torch.zeros(n) for n in (512, 0, 2049)]
    tasks, pieces = _launch_update.tasks_of(params, params, [], 1.0, None)
    assert (tasks["first_piece"].tolist(), pieces) == ([0, 1], 3)
    drawn = update.Noise(
        distribution="gaussian", scales=(1.0,) * 3, stream=STREAM, positions=(511, 1023, 1024)
    )
    tasks, pieces = _launch_update.tasks_of(params, params, [], 1.0, drawn)
    assert (tasks["first_piece"].tolist(), pieces) == ([0, 2], 7)
    assert tasks["first_position"].tolist() == [511, 1024]


def test_noise_is_the_same_in_both_orders_of_threads(emulator: ModuleType) -> None:
    want = noise.lattice_draws(STREAM, position=77, count=3000, backend="cpu")
    for reverse in (False, True):
        emulator.order(reverse=reverse)
        assert torch.equal(
            noise.lattice_draws(STREAM, position=77, count=3000, backend="cuda"), want
        )


def test_tensors_changed_in_place_say_so(emulator: ModuleType) -> None:
    x = torch.zeros(5)
    before = x._version
    noise.add_noise(x, stream=STREAM, rounding=ROUNDING, scale=1.0, backend="cuda")
    assert x._version > before
    (total,) = clip.clip_sum(torch.ones(2, 5), 1.0, backend="cuda").sums
    before = total._version
    clip.clip_sum(torch.ones(2, 5), 1.0, out=[total], backend="cuda")
    assert total._version > before

"""The device path of the engine on CPU tensors: emulated CUDA kernels, interpreted Triton kernels.

Inside of ``device_path()`` tensors deny that they are on the CPU, so that the engine takes the
ways that it takes on a device, and ops look for backends in the order of CUDA devices. What a
device alone has stays out: streams, its memory and its errors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from dpkern.base import dispatch
from dpkern.engine import per_sample_gradients
from dpkern.ops import direct, testing
from dpkern.ops.backends import _launch, cuda
from dpkern.ops.backends._start import Device

ORDER = tuple(name for name in dispatch.PREFERENCE["cuda"] if name != "cupy")


def reasons() -> list[str]:
    """Return why the device path cannot be walked here; empty if it can."""
    found = {name: testing.emulation(name) for name in ("cuda", "triton")}
    return [f"{name} {reason}" for name, reason in found.items() if isinstance(reason, str)]


needs_emulation = pytest.mark.skipif(
    torch.cuda.is_available() or bool(reasons()),
    reason="; ".join(reasons()) or "a device is here: tests of it run there",
)


@dataclass
class Calls:
    """Calls of ops by op and backend, in the order of their first ones."""

    count: Counter[tuple[str, str]] = field(default_factory=Counter)

    def of(self, backend: str) -> list[str]:
        """Return the ops that this backend took at least once."""
        return sorted({op for op, name in self.count if name == backend})


def _emulated_cuda() -> dispatch.Kernels:
    """Return the emulated kernels, which take tensors that say they are on no CPU."""
    module = cuda._emulated()
    assert not isinstance(module, str), module
    launcher = cuda.ModuleLauncher(module)
    return _launch.kernels(Device(launcher, "cuda", "cpu", lambda *_: None))


class Driver(cuda.ModuleLauncher):
    """A driver that counts launches.

    Attributes:
        launches: kernels by name.
        starts: whether kernels run; else what they would write stays as it is.
    """

    def __init__(self) -> None:
        module = cuda._emulated()
        assert not isinstance(module, str), module
        super().__init__(module)
        self.launches: Counter[str] = Counter()
        self.starts = True

    def start(self, kernel: Any, *arguments: Any) -> int:
        """Count a CUDA kernel, and start it."""
        self.launches[kernel.name] += 1
        return super().start(kernel, *arguments) if self.starts else 0

    @contextmanager
    def on(self) -> Iterator[None]:
        """Walk the device path with this driver."""
        from triton.runtime import interpreter

        run = interpreter.InterpretedFunction.run

        def counted(kernel: Any, *arguments: Any, **named: Any) -> None:
            self.launches[kernel.__name__] += 1
            if self.starts:
                run(kernel, *arguments, **named)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(interpreter.InterpretedFunction, "run", counted)
            patch.setattr(cuda, "ModuleLauncher", lambda _: self)
            with device_path(watched=False):
                yield


@contextmanager
def device_path(without: str = "", *, watched: bool = True) -> Iterator[Calls]:
    """Walk the device path inside the block; gives the calls of ops.

    Args:
        without: an op whose kernels are taken away.
        watched: whether calls of ops are counted.
    """
    calls = Calls()

    def watch(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with dispatch.intercepted(None):
            calls.count[op.name, op.backend_of(*args, **kwargs)] += 1
            return op(*args, **kwargs)

    interpreted = testing.emulation("triton")
    assert not isinstance(interpreted, str), interpreted
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cpu", property(lambda _: False), raising=False)
        patch.setitem(dispatch.PREFERENCE, "cpu", ORDER)
        patch.setattr(per_sample_gradients, "KEPT_IN_16_BITS", {"cpu"})
        patch.setattr(direct, "sum_positions", lambda _: None)  # a kernel of the CPU
        with (
            dispatch.replaced("cuda", [row for row in _emulated_cuda() if row[0] != without]),
            dispatch.replaced("triton", [row for row in interpreted if row[0] != without]),
            dispatch.intercepted(watch) if watched else nullcontext(),
        ):
            yield calls
    for op in dispatch.OPS.values():
        op.forget()

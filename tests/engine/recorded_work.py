"""Work that is recorded and replayed on the CPU as a CUDA graph does: kernels, not Python.

While it is recorded, every operation of torch that computes or writes, and every kernel of ours, is
noted with its operands. A replay runs these again, in their order and at their addresses, and
nothing else: what Python did in between is not repeated. After the recording all memory that the
work has written holds NaN, as a recording on a device computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dpkern.engine import guard, occasions, step_graph
from dpkern.ops.backends import _device, _tables
from dpkern.ops.backends.cuda import ModuleLauncher
from tests.engine.device_path import Driver

WAITS = frozenset("_local_scalar_dense nonzero equal is_nonzero masked_select lift_fresh".split())
"""Operations for which a host waits or copies from its own memory, which ends a recording."""

_ROOM = frozenset("empty empty_like empty_strided new_empty new_empty_strided".split())


class RecordedWork(TorchDispatchMode):
    """A stand-in for ``step.graphs.Recording``."""

    def __init__(
        self, prepare: Callable[[], Any], work: Callable[[], Any], device: torch.device
    ) -> None:
        super().__init__()
        self._held: list[Any] = [prepare()]
        self._made: list[Tensor] = []
        self._launches: list[Callable[[], Any]] = []
        with pytest.MonkeyPatch.context() as patch, _tables.written_late() as tables:
            patch.setattr(_device, "capturing", lambda _: True)
            for place in (guard, occasions):  # a stream that records is no mode of torch's
                patch.setattr(place, "dispatch_modes", lambda: 0)
            with torch.random.fork_rng(), self._watch_kernels(patch), self:
                self.results = work()
        for made in self._made:
            if made.is_floating_point() and not made._is_view():
                made.fill_(torch.nan)
        self._held.append(tables)
        tables.write()
        self.replays = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name in WAITS:
            raise RuntimeError(f"{name}: operation not permitted when stream is capturing")
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
        self._held.append((args, kwargs, out))
        aliases = [each.alias_info for each in func._schema.returns]
        if name in _ROOM:
            self._made += [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        elif all(alias is None for alias in aliases):
            made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
            self._made += made
            self._launches.append(lambda: _write_again(func, args, kwargs, made))
        elif any(alias is not None and alias.is_write for alias in aliases):
            self._launches.append(lambda: func(*args, **kwargs))
        return out

    @contextmanager
    def _watch_kernels(self, patch: pytest.MonkeyPatch) -> Iterator[None]:
        """Note launches of our kernels without running them: their tables are not written yet."""
        from triton.runtime import interpreter

        interpret, start = interpreter.InterpretedFunction.run, ModuleLauncher.start

        def interpreted(kernel: Any, *args: Any, **named: Any) -> None:
            self._launches.append(lambda: interpret(kernel, *args, **named))

        def started(launcher: Any, *args: Any) -> int:
            self._launches.append(lambda: start(launcher, *args))
            return 0

        patch.setattr(interpreter.InterpretedFunction, "run", interpreted)
        patch.setattr(ModuleLauncher, "start", started)
        patch.setattr(Driver, "start", started)
        yield

    def join(self) -> None:
        """Wait for nothing."""

    def replay(self) -> None:
        """Run what was noted."""
        self.replays += 1
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for launch in self._launches:
                launch()

    def close(self) -> None:
        """Forget everything."""
        self._held, self._made, self._launches, self.results = [], [], [], None


def _write_again(func: Any, args: tuple[Any, ...], kwargs: Any, made: list[Tensor]) -> None:
    again = [t for t in tree_leaves(func(*args, **kwargs)) if isinstance(t, Tensor)]
    for old, new in zip(made, again, strict=True):
        old.copy_(new)


@contextmanager
def recorded() -> Iterator[None]:
    """Record steps on the CPU inside of the block (``engine.step_graph``)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_graph, "Recording", RecordedWork)
        patch.setattr(step_graph, "_on_device", lambda _: True)
        yield

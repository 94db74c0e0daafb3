"""Fill blocks of draws beside the model's work: by a thread on a CPU, a stream on a GPU."""

from __future__ import annotations

import contextvars
import ctypes
import os
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...base.threads import limited
from ...ops.update import Draws
from .source import Layout, alias

_NICE = 19
"""The lowest priority that Linux has."""


class PendingBlock(Protocol):
    """A block that is being filled."""

    def done(self) -> bool:
        """Whether it is made; on a device: launched."""
        ...

    def cancel(self) -> bool:
        """Whether nothing of it was or will be made."""
        ...

    def exception(self) -> BaseException | None:
        """Wait, and return what went wrong.

        On a device the current stream waits, the host does not.
        """
        ...


@dataclass(frozen=True, eq=False)
class BlockBuffer:
    """The memory of one block."""

    values: torch.Tensor
    rounding: torch.Tensor | None

    @classmethod
    def of(cls, layout: Layout) -> BlockBuffer:
        """Allocate the memory for the draws of this layout."""
        values = torch.empty(layout.count, dtype=torch.int32, device=layout.device)
        if not layout.rounding:
            return cls(values, None)
        return cls(values, torch.empty(layout.count, dtype=torch.int16, device=layout.device))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The allocated tensors: noise values, then rounding bits if the layout has them."""
        return [tensor for tensor in (self.values, self.rounding) if tensor is not None]

    def handed_out(self, first: int) -> Draws:
        """Return the block for its consumer, which loses it when these tensors are emptied."""
        values, *rounding = map(alias, self.tensors)
        return Draws(first, values, rounding[0] if rounding else None)

    def wipe(self) -> None:
        """Zero it on this thread: a forked process has no other."""
        for tensor in self.tensors:
            if tensor.device.type == "cpu":
                ctypes.memset(tensor.data_ptr(), 0, tensor.nbytes)
            else:
                tensor.zero_()


def _give_way() -> None:
    """Let this thread run where the model's threads leave a core.

    Linux has priorities of threads.
    """
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


class Producer(Protocol):
    """A producer that fills blocks one after the other."""

    @property
    def ended(self) -> bool:
        """Whether what is being filled is no longer wanted."""
        ...

    def memory(self, layout: Layout) -> BlockBuffer:
        """Return memory that this producer may fill."""
        ...

    def submit(self, fill: Callable[[], None]) -> PendingBlock:
        """Fill a block when those before are filled."""
        ...

    def handed_out(self, memory: BlockBuffer, first: int) -> Draws:
        """Return a filled block for its consumer."""
        ...

    def wait(self) -> None:
        """Wait until nothing is being filled any more."""
        ...

    def end(self, memories: Collection[BlockBuffer]) -> None:
        """Fill nothing more and wipe these."""
        ...


class SideThread:
    """A thread whose kernels run alone on it, without Python's lock."""

    def __init__(self) -> None:
        # The executor's threads end with the interpreter, after what they are filling.
        self._executor = ThreadPoolExecutor(
            1, thread_name_prefix="dpkern-ring", initializer=_give_way
        )
        self._ended = threading.Event()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def memory(self, layout: Layout) -> BlockBuffer:
        return BlockBuffer.of(layout)

    def submit(self, fill: Callable[[], None]) -> PendingBlock:
        def alone() -> None:
            with limited(1):
                fill()

        # In the submitter's context: it may have chosen a backend.
        return self._executor.submit(contextvars.copy_context().run, alone)

    def handed_out(self, memory: BlockBuffer, first: int) -> Draws:
        return memory.handed_out(first)

    def wait(self) -> None:
        self._ended.set()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def end(self, memories: Collection[BlockBuffer]) -> None:
        # Never waits: the garbage collector may call this on any thread, the executor's too. What
        # that is filling it wipes behind itself.
        self._ended.set()
        self._executor.shutdown(wait=False, cancel_futures=True)
        for memory in tuple(memories):
            memory.wipe()


class SideStream:
    """A stream beside the current one, of the lowest priority, and what it waits for."""

    def __init__(self, device: torch.device) -> None:
        # The priority of a new stream is the lowest there is.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._consumer = torch.cuda.current_stream(device)
        self.ended = False

    def memory(self, layout: Layout) -> BlockBuffer:
        with self._behind():
            return BlockBuffer.of(layout)

    def submit(self, fill: Callable[[], None]) -> PendingBlock:
        with self._behind(), torch.no_grad():
            fill()
        made = torch.cuda.Event()  # type: ignore[no-untyped-call]
        made.record(self._stream)
        return _Launched(made, self._stream.device)

    def handed_out(self, memory: BlockBuffer, first: int) -> Draws:
        """Return a filled block, whose consumer is now the current stream."""
        self._consumer = torch.cuda.current_stream(self._stream.device)
        draws = memory.handed_out(first)
        for tensor in (draws.values, draws.rounding):
            if tensor is not None:
                tensor.record_stream(self._consumer)
        return draws

    def wait(self) -> None:
        self.ended = True

    def end(self, memories: Collection[BlockBuffer]) -> None:
        self.ended = True
        with self._behind(), torch.no_grad():
            for memory in tuple(memories):
                memory.wipe()

    def _behind(self) -> AbstractContextManager[Any]:
        """Run on this stream, behind what its consumer's has been given."""
        self._stream.wait_event(self._consumer.record_event())
        return torch.cuda.stream(self._stream)


class _Launched:
    """A block that a device makes in its own time."""

    def __init__(self, made: torch.cuda.Event, device: torch.device) -> None:
        self._made, self._device = made, device

    def done(self) -> bool:
        return True

    def cancel(self) -> bool:
        return False

    def exception(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._made)


__all__ = ["BlockBuffer", "PendingBlock", "Producer", "SideStream", "SideThread"]

"""Prefetch the draws of the next steps, one block for each step.

Their bits are those that the update would draw itself.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...base import validate as check
from ...base.errors import PrivacyError
from ...base.rng import Purpose, Stream
from ...ops import noise
from ...ops.update import Draws
from ..noise import purpose_of
from ._producers import BlockBuffer, PendingBlock, Producer, SideStream, SideThread
from .source import LAST_STEP, Layout, NoiseSource

PIECE = 1 << 20
"""Draws between two checks whether they are still wanted, and which threads make them."""


class RingPrefetch(NoiseSource):
    """A noise source that makes blocks of fresh draws beside the model's work.

    On a CPU a thread of low priority makes them; what it has not begun when its step comes, the
    step's own threads make. On a GPU a stream of the lowest priority does (that part has not yet
    run on one).

    A block is filled for step n, handed out once to step n, and filled with draws of a later step
    when ``done`` gives it back; ``close``, garbage collection and the end of the process zero all
    but those that are out. What goes wrong beside the model's work is raised by ``take``, which may
    then be called again.
    Memory: ``depth`` times 4 bytes for each position, 6 for float sums.

    Args:
        depth: how many blocks; with 2 one is filled while the other is used.

    Raises:
        InvalidInput: a depth outside 1 .. 64.
    """

    name = "ring"

    def __init__(self, *, depth: int = 2) -> None:
        super().__init__()
        self._depth = check.integer(1, 64, depth=depth)
        self._producer: Producer | None = None
        self._free: list[BlockBuffer] = []
        self._idle: set[BlockBuffer] = set()
        self._blocks: deque[_Block] = deque()
        self._used: BlockBuffer | None = None
        self._words = {"produced": 0, "consumed": 0, "discarded": 0}

    def provenance(self) -> dict[str, Any]:
        """Return counts of words produced, consumed, discarded, and waiting for their step."""
        with self._mine():
            waiting = self._size * sum(block.work.done() for block in self._blocks)
            words = {**self._words, "waiting": waiting}
        words["produced"] += waiting
        text = (
            f"fresh single-use; words produced {words['produced']}, consumed {words['consumed']}, "
            f"reused 0, discarded {words['discarded']}"
        )
        return {
            "source": self.name,
            "words": {**words, "reused": 0},
            "text": text + (f", waiting {waiting}" if waiting else ""),
        }

    def _begin(self, step: int) -> None:
        """Begin blocks for this step and those after it, as far as there is memory."""
        assert self._layout is not None
        if self._producer is None:
            self._start(self._layout)
        while self._blocks and self._blocks[0].step != step:
            self._discard(self._blocks.popleft())
        following = self._blocks[-1].step + 1 if self._blocks else step
        while self._free and following <= LAST_STEP:
            self._blocks.append(self._filled(following, self._layout))
            following += 1

    def _start(self, layout: Layout) -> None:
        cuda = layout.device.type == "cuda"
        producer: Producer = SideStream(layout.device) if cuda else SideThread()
        memories = [producer.memory(layout) for _ in range(self._depth)]
        self._producer, self._free, self._idle = producer, list(memories), set(memories)
        # Knows nothing of this object: it runs when the last reference to it is gone. What is out
        # then is left as it is: zeros would be an update without noise.
        self._finalizer = weakref.finalize(self, producer.end, self._idle)

    def _filled(self, step: int, layout: Layout) -> _Block:
        assert self._producer is not None
        starts, first = iter(range(0, layout.count, PIECE)), layout.place(step)[1]
        pieces = _Pieces(self._free[-1], self._streams(step), layout, first, self._backend, starts)
        work = self._producer.submit(partial(pieces.fill, self._producer))
        self._free.pop()
        return _Block(step, pieces, work)

    def _made(self, step: int) -> Draws:
        self._begin(step)
        assert self._layout is not None
        assert self._producer is not None
        block = self._blocks[0]
        try:
            # Where the model's threads leave no core to the producer, they make what is left.
            block.pieces.make(self._producer)
            error = None if block.work.cancel() else block.work.exception()
        except BaseException:
            self._start_again()
            raise
        if error is not None:
            self._start_again()
            raise error
        if block.streams != self._streams(step):
            self._start_again()
            self._refuse("the key that the draws were made with", "another one")
        self._idle.discard(block.memory)
        if self._producer.ended:  # with the interpreter: the block may be wiped, or half filled
            self._idle.add(block.memory)
            block.memory.wipe()
            self._refuse("a process that goes on", "one whose rings have been wiped")
        self._blocks.popleft()
        self._words["produced"] += self._size
        self._words["consumed"] += self._size
        self._used = block.memory
        return self._producer.handed_out(block.memory, block.pieces.first)

    def _returned(self) -> None:
        assert self._used is not None
        self._free.append(self._used)
        self._idle.add(self._used)
        self._used = None
        if self._closed:
            return
        try:
            self._begin(self._taken + 1)
        except (PrivacyError, RuntimeError):
            # A wiped key or a thread that cannot start stands in the way of the next step only,
            # which says so: this one is finished.
            return

    def _discard(self, block: _Block) -> None:
        """Discard these draws, which will never be used."""
        if not block.work.cancel() and block.work.exception() is None:
            self._words["produced"] += self._size
            self._words["discarded"] += self._size
        self._free.append(block.memory)

    def _start_again(self) -> None:
        while self._blocks:
            self._discard(self._blocks.popleft())

    def _end(self) -> None:
        if self._producer is not None:
            self._producer.wait()
            self._start_again()
            self._finalizer()
            self._free, self._producer = [], None

    def _forked(self) -> None:
        """Drop the parent's blocks, thread and stream, which stay with the parent.

        Here they exist only in memory that is not read: letting go of a thread's queue would touch
        locks that are its.
        """
        if self._producer is not None:
            self._finalizer.detach()
            self._parents = (self._producer, self._blocks, self._idle, self._used)
        self._producer, self._blocks, self._free, self._used = None, deque(), [], None
        self._idle = set()

    def _streams(self, step: int) -> tuple[Stream, Stream]:
        assert self._key is not None
        assert self._layout is not None
        number, _ = self._layout.place(step)
        place = number, self._layout.substream
        law = self._key.stream(purpose_of(self._layout.law), *place)
        return law, self._key.stream(Purpose.ROUNDING, *place)

    @property
    def _size(self) -> int:
        return 0 if self._layout is None else self._layout.words


@dataclass(frozen=True)
class _Pieces:
    """The draws of a block, piece by piece; each request makes the next one.

    Attributes:
        memory: where they go.
        streams: of the draws and of the rounding bits.
        layout: which draws.
        first: position of the first of them.
        backend: name of the backend that makes them.
        starts: of the pieces that no thread has begun; each is given to one thread.
    """

    memory: BlockBuffer
    streams: tuple[Stream, Stream]
    layout: Layout
    first: int
    backend: str | None
    starts: Iterator[int]

    def make(self, producer: Producer) -> None:
        """Make pieces until all are begun, or none is wanted any more."""
        for start in self.starts:
            if producer.ended:
                return
            count = min(PIECE, self.layout.count - start)
            where: dict[str, Any] = {"position": self.first + start, "count": count}
            where |= {"device": self.layout.device, "backend": self.backend}
            values = self.memory.values[start : start + count]
            noise.lattice_draws(self.streams[0], distribution=self.layout.law, out=values, **where)
            if self.memory.rounding is not None:
                bits = self.memory.rounding[start : start + count]
                noise.rounding_bits(self.streams[1], out=bits, **where)

    def fill(self, producer: Producer) -> None:
        """Run ``make`` in the producer, which wipes what is no longer wanted."""
        try:
            self.make(producer)
        finally:
            if producer.ended:
                self.memory.wipe()


@dataclass(frozen=True)
class _Block:
    """The draws of one step, made or on their way."""

    step: int
    pieces: _Pieces
    work: PendingBlock

    @property
    def memory(self) -> BlockBuffer:
        """The memory of its draws."""
        return self.pieces.memory

    @property
    def streams(self) -> tuple[Stream, Stream]:
        """The streams of its draws."""
        return self.pieces.streams


__all__ = ["RingPrefetch"]

"""Noise sources: the origin of a private step's draws, if it is not the update itself.

A draw that is used twice cancels in the difference of two releases. So whatever a source is made
of, it hands each step's draws out once, in the order of the steps, and takes them back empty.
"""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import torch

from ...base import validate as check
from ...base.closing import Closes
from ...base.errors import InvalidInput, PrivacyError
from ...base.laws import LAWS
from ...base.place import check_place
from ...base.rng import Key
from ...ops import noise
from ...ops.update import Draws
from ...privacy.accounting import Accountable
from ...privacy.mechanisms.plan import TILE, Plan

LAST_STEP = 2**32 - 1


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The draws that a step needs, the same at every step, while scales may change.

    Attributes:
        law: ``gaussian`` or ``laplace``.
        first: position of the first draw.
        count: how many, up to the end of the last tensor.
        rounding: whether float sums need the bits of stochastic rounding, too.
        device: where the parameters are.
        one_stream: None where every step has streams of its own; else the number in the nonce of
            those that all steps share, step t with the draws from ``first + t count`` on.
        substream: stream number in the nonce besides.

    Raises:
        InvalidInput: an unknown law or device, or numbers out of range.
    """

    law: str
    first: int
    count: int
    rounding: bool
    device: torch.device
    one_stream: int | None = None
    substream: int = 0

    def __post_init__(self) -> None:
        check.choice(LAWS, law=self.law)
        check.integer(0, 2**62, first=self.first)
        check.integer(0, 2**40, count=self.count)
        if self.one_stream is not None:
            check.integer(0, LAST_STEP, one_stream=self.one_stream)
        check_place(self.device)
        here = torch.empty(0, device=self.device).device  # "cuda" with its number
        object.__setattr__(self, "device", here)

    @classmethod
    def of(
        cls,
        law: str,
        positions: Sequence[int],
        sizes: Sequence[int],
        device: torch.device | str,
        *,
        rounding: bool,
    ) -> Self:
        """Lay out the draws of tensors of these sizes at these positions of the noise stream.

        Raises:
            InvalidInput: as the class, or positions and sizes that do not fit.
        """
        check.one_each("positions", positions, len(sizes))
        for position, size in zip(positions, sizes, strict=True):
            check.integer(0, 2**62, position=position)
            check.integer(0, 2**40, size=size)
        check_place(device)
        first = min(positions, default=0)
        end = max((at + size for at, size in zip(positions, sizes, strict=True)), default=0)
        place = torch.device(device)
        return cls(law=law, first=first, count=end - first, rounding=rounding, device=place)

    @classmethod
    def of_plan(cls, plan: Plan, device: torch.device) -> Self | None:
        """Return the draws of one release of this plan. None means that it adds no noise."""
        if plan.distribution is None:
            return None
        sizes = [block.size for block in plan.blocks]
        floats = plan.arithmetic == "float"
        return cls.of(plan.distribution, plan.positions, sizes, device, rounding=floats)

    def place(self, step: int) -> tuple[int, int]:
        """Return the number in the nonce of a step's streams, and the position of its first draw.

        Raises:
            InvalidInput: positions behind the end of the stream.
        """
        if self.one_stream is None:
            return step, self.first
        first = self.first + step * self.count
        return self.one_stream, check.integer(0, 2**62, **{"position of the step": first})

    @property
    def words(self) -> int:
        """Keystream words of these draws, made by whole tiles of 512 positions."""
        tiles = -(-(self.first + self.count) // TILE) - self.first // TILE if self.count else 0
        bits = noise.rounding_words(TILE) if self.rounding else 0
        return tiles * (noise.noise_words(TILE) + bits)


class NoiseSource(Closes):
    """A source of draws for one ``DPStep``, or for a loop of one's own around ``update.step``.

    ``bind`` it once, then for every step ``take`` its draws, launch the update, and say ``done``.
    Calls may come from any thread, but while draws are out they are the thread's that took them:
    its update may be reading them. ``close`` ends it. Subclasses make draws in ``_made``.

    In a forked process a source forgets what it had ready, which is the parent's; the child's key
    is another one, unless it comes from a seed.
    """

    name = ""
    """The name in reports."""

    @property
    def warning(self) -> str:
        """The reason why nothing that it noises is private; empty if it is."""
        return ""

    def __init__(self) -> None:
        self._key: Key | None = None
        self._layout: Layout | None = None
        self._backend: str | None = None
        self._taken = -1
        self._out: Draws | None = None
        self._user: threading.Thread | None = None
        self._closed = self._ended = False
        self._process = os.getpid()
        self._lock = threading.Lock()

    @property
    def layout(self) -> Layout | None:
        """The layout that it was bound to."""
        return self._layout

    def bind(self, key: Key, layout: Layout, *, backend: str | None = None) -> None:
        """Make draws of this key for these positions from now on.

        Raises:
            PrivacyError: a second time: two users would get the same draws.
        """
        if self._layout is not None or self._closed:
            got = "one that was closed" if self._closed else "one that has a user"
            self._refuse("a new noise source", got)
        self._key, self._layout, self._backend = key, layout, backend

    def bind_blocks(
        self, key: Key, *, law: str, stream: int, count: int, substream: int = 0
    ) -> None:
        """Make blocks of ``count`` draws from now on that follow each other in one stream.

        Block t, taken as step t, has the draws that ``key.stream(purpose of the law, stream,
        substream)`` has from position ``t count`` on, with rounding bits where they are prefetched.

        Raises:
            PrivacyError: as ``bind``.
            InvalidInput: an unknown law, or numbers out of range.
        """
        place: dict[str, Any] = {"first": 0, "count": count, "one_stream": stream}
        place["substream"] = substream
        cpu = torch.device("cpu")
        self.bind(key, Layout(law=law, rounding=True, device=cpu, **place))

    def prepare(self, step: int) -> None:
        """Announce that the draws of this step come next: a source that works ahead may begin.

        Raises:
            PrivacyError: no key, a step that is out, or a closed source.
        """
        with self._mine():
            self._check_step(step)
            self._begin(step)

    def take(self, step: int) -> Draws:
        """Return the draws of this step, once; steps in between are never made good.

        Raises:
            PrivacyError: a step that is out or lies before one that is, a source without a key, a
                closed one, or draws that another thread still has.
            DPKernError: whatever went wrong where they were made; the step is then still to be had.
        """
        with self._mine():
            self._check_step(step)
            self._check_user()
            self._take_back()
            draws = self._made(step)
            self._taken, self._out, self._user = step, draws, threading.current_thread()
            return draws

    def done(self) -> None:
        """Note that the update that needed the draws was launched, and empty the draws.

        Raises:
            PrivacyError: draws that another thread has.
        """
        with self._mine():
            self._check_user()
            self._take_back()
            if self._closed:
                self._finish()

    def close(self) -> None:
        """Wipe everything and yield nothing more. Calling it twice changes nothing.

        Draws that another thread has are left to it until it says ``done``.
        """
        with self._mine():
            self._closed = True
            if not self._elsewhere:
                self._take_back()
                self._finish()

    def covered(self, plan: Plan) -> Accountable:
        """Return what a release of this plan with these draws certifies."""
        return plan

    @property
    def variation(self) -> float:
        """Total variation distance of a coordinate from the certified law, whichever law it is."""
        return 0.0

    @property
    def settings(self) -> tuple[object, ...]:
        """The settings that decide the draws besides key and layout, the same in all processes."""
        return (self.name,)

    def words(self, plan: Plan) -> dict[str, int]:
        """Return keystream words that one release of this plan ``produced`` and ``consumed``."""
        return plan.words

    @abstractmethod
    def provenance(self) -> dict[str, Any]:
        """Return where the draws came from and how often they were used, as JSON values."""

    @abstractmethod
    def _made(self, step: int) -> Draws:
        """Return the draws of this step; a source's own lock is held."""

    def _begin(self, step: int) -> None:
        """Begin with this step, if the source works ahead."""

    def _returned(self) -> None:
        """Note that the draws that were out are empty now."""

    def _end(self) -> None:
        """Let go of everything."""

    def _forked(self) -> None:
        """Forget what is the parent's."""

    def _finish(self) -> None:
        if not self._ended:
            self._ended = True
            self._end()

    @property
    def _elsewhere(self) -> bool:
        """Whether another thread has draws, and may be reading them at this moment."""
        user = self._user if self._out is not None else None
        return user is not None and user is not threading.current_thread() and user.is_alive()

    def _check_user(self) -> None:
        if self._elsewhere:
            self._refuse("done() by the thread that has the last draws", "a call of another thread")

    def _take_back(self) -> None:
        """Leave any holder of the draws with empty tensors.

        Zeros would make an update without noise.
        """
        draws, self._out, self._user = self._out, None, None
        if draws is None:
            return
        for tensor in (draws.values, draws.rounding):
            if tensor is not None:
                tensor.set_()  # type: ignore[call-overload]
        self._returned()

    def _mine(self) -> threading.Lock:
        """Return the lock, of this process: a fork may have caught the parent's in use."""
        if os.getpid() != self._process:
            self._process, self._lock, self._out = os.getpid(), threading.Lock(), None
            self._forked()
        return self._lock

    def _check_step(self, step: int) -> None:
        check.integer(0, LAST_STEP, step=step)
        if self._closed:
            self._refuse("an open noise source", "one that was closed")
        if self._layout is None:
            self._refuse("bind(key, layout) before draws", "a source without a key")
        if step <= self._taken:
            self._refuse(f"a step after {self._taken}", f"step {step}, whose draws may be out")

    def _refuse(self, expected: str, got: str) -> NoReturn:
        raise PrivacyError(
            type(self).__name__,
            expected=expected,
            got=got,
            remedy="Take the draws of each step once, in the order of the steps.",
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Refuse copies: two sources would yield the same draws."""
        self._refuse("a source that stays where it was made", "a copy or a pickle")


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory under a tensor of its own, which can be emptied alone."""
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(tensor)  # type: ignore[call-overload, no-any-return]


def check_source(source: object) -> None:
    """Check that this is a noise source, or None.

    Raises:
        InvalidInput: anything else.
    """
    if source is not None and not isinstance(source, NoiseSource):
        raise InvalidInput(
            "noise_source",
            expected="a NoiseSource such as noise_tables.RingPrefetch(), or None",
            got=type(source).__name__,
            remedy="Pass None to draw the noise inside the update.",
        )


__all__ = ["Layout", "NoiseSource", "alias", "check_source"]

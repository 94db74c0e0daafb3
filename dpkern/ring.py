"""Draws of the next step made ahead, on another stream of the device while the model runs.

A draw that is used twice cancels in a difference of two releases, so a ring hands each step's draws
out once, and forgets them. Not yet run on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, NoReturn

import torch

from . import _validate as check
from ._step_noise import purpose_of
from .errors import PrivacyError
from .laws import LAWS
from .ops import noise, update
from .rng import Key, Purpose


class Ring:
    """One step's draws, at every position from the first parameter's to the end of the last.

    ``fill(step)`` launches the generator behind everything that the device has been given so far:
    call it right after the update that took the draws before. ``take(step)`` gives them to the
    current stream, for ``update.Noise(draws=...)`` of that step. The next ``fill`` and ``close``
    wipe them, so an update must be launched before. Memory: 4 bytes for each position, 6 with
    rounding bits.

    Args:
        key: the key of the step's noise.
        law: ``gaussian`` or ``laplace``.
        positions: where each parameter starts in the stream.
        sizes: how many entries each parameter has.
        device: where the parameters are.
        rounding: whether to make the bits of stochastic rounding too, for float sums.
        backend: who makes the draws.

    Raises:
        InvalidInput: an unknown law or device, or positions and sizes that do not fit.
    """

    def __init__(
        self,
        key: Key,
        law: str,
        positions: Sequence[int],
        sizes: Sequence[int],
        device: torch.device | str,
        rounding: bool,
        *,
        backend: str | None = None,
    ) -> None:
        check.choice(LAWS, law=law)
        noise.check_place(device)
        check.one_each("positions", positions, len(sizes))
        for position, size in zip(positions, sizes, strict=True):
            check.integer(0, 2**62, position=position)
            check.integer(0, 2**40, size=size)
        self._key, self._law, self._backend = key, law, backend
        ends = [first + size for first, size in zip(positions, sizes, strict=True)]
        self._first = min(positions, default=0)
        self._count = max(ends, default=0) - self._first
        self._rounding = rounding
        self._device = torch.empty(0, device=device).device  # "cuda" with its number
        self._draws: update.Draws | None = None
        self._filled: int | None = None
        self._taken = -1
        self._process = os.getpid()
        self._side = _Side(self._device) if self._device.type == "cuda" else None

    def fill(self, step: int) -> None:
        """Make the draws of this step, behind the work on the stream that took the last ones.

        Raises:
            PrivacyError: a step whose draws were taken, or an earlier one; or another process.
        """
        self._check_process()
        check.integer(0, 2**32 - 1, step=step)
        if step <= self._taken:
            _refuse(f"a step after {self._taken}", f"step {step}, whose draws may be out")
        stream = self._key.stream(purpose_of(self._law), step)
        where: dict[str, Any] = {"position": self._first, "count": self._count}
        where |= {"device": self._device, "backend": self._backend}
        bits = None
        self._wipe()
        with self._beside():
            values = noise.lattice_draws(stream, distribution=self._law, **where)
            if self._rounding:
                rounding = self._key.stream(Purpose.ROUNDING, step)
                bits = noise.rounding_bits(rounding, **where)
        if self._side is not None:
            self._side.made()
        self._draws, self._filled = update.Draws(self._first, values, bits), step

    def take(self, step: int) -> update.Draws:
        """The draws of this step for work on the current stream, once.

        Raises:
            PrivacyError: a second time, another step than was filled, or another process.
        """
        self._check_process()
        if self._draws is None or self._filled is None:
            _refuse(f"fill({step}) before take({step})", "a ring without fresh draws")
        if step != self._filled:
            _refuse(f"step {self._filled}, which was filled", f"step {step}")
        self._filled, self._taken = None, step
        if self._side is not None:
            self._side.hand_over(_tensors(self._draws))
        return self._draws

    def close(self) -> None:
        """Wipe the draws; the ring can be filled again. Calling it twice changes nothing."""
        self._wipe()

    def __enter__(self) -> Ring:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Two rings would hand the same draws out."""
        _refuse("a ring that stays where it was made", "a copy or a pickle")

    def _beside(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._side is None else self._side.behind()

    def _wipe(self) -> None:
        """Zero the draws and leave whoever still holds them with empty tensors, never zeros: an
        update without noise."""
        draws, self._draws, self._filled = self._draws, None, None
        if draws is None:
            return
        with self._beside(), torch.no_grad():
            for tensor in _tensors(draws):
                tensor.zero_()
                tensor.set_()  # type: ignore[call-overload]

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            _refuse("the process that made the ring", "a fork of it, which holds the same draws")


class _Side:
    """The stream beside the current one, of the lowest priority, and what it waits for."""

    def __init__(self, device: torch.device) -> None:
        # The priority of a new stream is the lowest there is.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._consumer = torch.cuda.current_stream(device)
        self._made = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def behind(self) -> AbstractContextManager[Any]:
        """On this stream, behind what its consumer's has been given."""
        self._stream.wait_event(self._consumer.record_event())
        return torch.cuda.stream(self._stream)

    def made(self) -> None:
        """The draws are on their way."""
        self._made.record(self._stream)

    def hand_over(self, tensors: Sequence[torch.Tensor]) -> None:
        """The current stream may read them once they are made; it is the consumer now."""
        self._consumer = torch.cuda.current_stream(self._stream.device)
        self._consumer.wait_event(self._made)
        for tensor in tensors:
            tensor.record_stream(self._consumer)


def _tensors(draws: update.Draws) -> list[torch.Tensor]:
    return [tensor for tensor in (draws.values, draws.rounding) if tensor is not None]


def _refuse(expected: str, got: str) -> NoReturn:
    raise PrivacyError(
        "Ring", expected=expected, got=got, remedy="Every step takes its own draws, once."
    )


__all__ = ["Ring"]

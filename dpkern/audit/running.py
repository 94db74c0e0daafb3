"""Run a subject in chunks, in this process or in several, and reduce where the runs are made.

Nothing of size ``[runs, d]`` is kept: moments and counts of chunks add up.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ..base.errors import InvalidInput
from .covariance import Moments, moments, together
from .subject import Score, Subject

CHUNK_VALUES = 1 << 21
"""Maximum of released numbers in a chunk."""

SHARES = 4
"""Chunks of a stage per process, so that none waits long for the last."""

Counts = NDArray[np.int64]
Result = TypeVar("Result")


class Runner:
    """A source of fresh runs of one subject.

    Args:
        subject: subject to run.
        seed: seed of all the runs; every chunk gets its own.
        pool: processes that know the subject. None selects this process.
        workers: number of processes.
    """

    def __init__(
        self, subject: Subject, *, seed: int, pool: ProcessPoolExecutor | None, workers: int
    ) -> None:
        self.subject = subject
        self.runs = 0
        self.width: int | None = None
        self._pool, self._workers = pool, workers
        self._seeds = np.random.SeedSequence(seed)

    def moments(self, data: Any, runs: int) -> Moments:
        """Return the moments of the examined coordinates."""
        return together(self._all(_moments, runs, data))

    def scores(self, data: Any, scores: Sequence[Score], runs: int) -> NDArray[np.float64]:
        """Return scores ``[scores, runs]``."""
        return np.concatenate(self._all(_scores, runs, data, tuple(scores)), axis=1)

    def exceeding(
        self, data: Any, tests: Sequence[tuple[Score, float]], runs: int
    ) -> tuple[int, ...]:
        """Return in how many runs each test's score exceeds its threshold."""
        parts = self._all(_exceeding, runs, data, tuple(tests))
        return tuple(int(count) for count in np.sum(parts, axis=0))

    def first(self, data: Any, runs: int) -> torch.Tensor:
        """Return a few released vectors as they are; all others must be as long."""
        self.runs += runs
        found = released(self.subject, data, runs, self._seed())
        self.width = found.shape[1]
        return found

    def _all(self, work: Callable[..., Result], runs: int, *given: Any) -> list[Result]:
        chunks = self._chunks(runs)
        self.runs += runs
        if self._pool is None:
            return [work(self.subject, n, self._seed(), self.width, *given) for n in chunks]
        futures: list[Future[Result]] = [
            self._pool.submit(_in_worker, work, n, self._seed(), self.width, *given) for n in chunks
        ]
        return [future.result() for future in futures]

    def _chunks(self, runs: int) -> list[int]:
        """Return sizes that add up to ``runs``; a chunk of one run would have no covariance."""
        most = max(2, CHUNK_VALUES // (self.width or 1))
        count = max(-(-runs // most), 1 if self._pool is None else SHARES * self._workers)
        count = max(1, min(count, runs // 2))
        return [runs // count + (k < runs % count) for k in range(count)]

    def _seed(self) -> int:
        (child,) = self._seeds.spawn(1)
        return int(child.generate_state(1, np.uint64)[0] >> 1)


@contextmanager
def runner(subject: Subject, *, seed: int, workers: int) -> Iterator[Runner]:
    """Start the processes of an audit; one worker is this process."""
    if workers == 1:
        yield Runner(subject, seed=seed, pool=None, workers=1)
        return
    # Spawned: a process that has run threads must not be forked.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _start, (subject,)) as pool:
        yield Runner(subject, seed=seed, pool=pool, workers=workers)


def released(
    subject: Subject, data: Any, runs: int, seed: int, width: int | None = None
) -> torch.Tensor:
    """Call ``subject.release`` and check its contract.

    Args:
        subject, data, runs, seed: the subject, and the arguments of its ``release``.
        width: length of a release. None allows any length from 1 on.

    Raises:
        InvalidInput: it does not give one vector of real numbers for each run, always as long.
    """
    found = subject.release(data, runs, seed)
    if not isinstance(found, torch.Tensor) or found.dim() != 2 or found.shape[0] != runs:
        raise InvalidInput(
            "release",
            expected=f"a tensor [{runs}, d] of {subject.name}",
            got=list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__,
            remedy="Return one released vector for each run.",
        )
    if found.shape[1] != (width or max(1, found.shape[1])):
        raise InvalidInput(
            "release",
            expected=f"{width or 'some'} numbers in every release of {subject.name}",
            got=str(found.shape[1]),
            remedy="Release the same number of values for every input; their number is visible.",
        )
    if found.is_complex():
        raise InvalidInput(
            "release",
            expected=f"real numbers of {subject.name}",
            got=str(found.dtype),
            remedy="Release torch.view_as_real(values).flatten(1).",
        )
    return found.detach().cpu()


_SUBJECT: Subject | None = None


def _start(subject: Subject) -> None:
    global _SUBJECT
    sys.stdout = sys.stderr  # what a subject prints must not end up in the caller's output
    torch.set_num_threads(1)
    _SUBJECT = subject


def _in_worker(
    work: Callable[..., Result], runs: int, seed: int, width: int | None, *given: Any
) -> Result:
    assert _SUBJECT is not None
    return work(_SUBJECT, runs, seed, width, *given)


def _moments(subject: Subject, runs: int, seed: int, width: int | None, data: Any) -> Moments:
    return moments(released(subject, data, runs, seed, width))


def _scores(
    subject: Subject,
    runs: int,
    seed: int,
    width: int | None,
    data: Any,
    scores: tuple[Score, ...],
) -> NDArray[np.float64]:
    values = released(subject, data, runs, seed, width)
    return np.stack([_scored(score, values) for score in scores])


def _exceeding(
    subject: Subject,
    runs: int,
    seed: int,
    width: int | None,
    data: Any,
    tests: tuple[tuple[Score, float], ...],
) -> Counts:
    values = released(subject, data, runs, seed, width)
    return np.array([(_scored(score, values) > limit).sum() for score, limit in tests])


def _scored(score: Score, values: torch.Tensor) -> NDArray[np.float64]:
    found: NDArray[np.float64] = score(values).double().numpy()
    return found

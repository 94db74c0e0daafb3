"""Draw the records of each batch from the secure generator.

Amplification by sampling assumes a secret mask, so it comes from the same ChaCha keystream as the
noise (purpose ``SAMPLING``) and is never logged. Each draw has a nonce of its own, so no keystream
word is used twice. A key serves one sampler.

Every sampler yields int64 index tensors on the CPU, has ``sampling``, ``sample_rate`` and
``expected_batch_size`` for the accounting, and counts the batches that it has yielded. With a
seeded key ``load_state_dict`` resumes the identical sequence; without one, a resumed run draws on
from its own fresh key.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, ClassVar

import torch

from ..base.errors import InvalidInput, brief
from ..base.rng import Key, Purpose
from ..base.validate import choice, integer, plain_values, probability
from .subsets import Words, independent_subset, uniform_subset


class PrivateBatchSampler(ABC):
    """The base of the samplers.

    Args:
        dataset_size: number of records.
        steps: number of batches after which iteration ends.
        key: key of the randomness. None takes a fresh one.

    Raises:
        InvalidInput: a size or number of steps out of range, or something that is no key.
    """

    sampling: ClassVar[str]

    def __init__(self, *, dataset_size: int, steps: int, key: Key | None) -> None:
        self.dataset_size = integer(minimum=1, maximum=1 << 40, dataset_size=dataset_size)
        self.steps = integer(minimum=0, maximum=1 << 32, steps=steps)
        if key is not None and not isinstance(key, Key):
            raise InvalidInput(
                "key",
                expected="a Key or None",
                got=type(key).__name__,
                remedy="Pass Key.fresh(), or leave it out.",
            )
        self.step = 0
        self._key = Key.fresh() if key is None else key

    @property
    @abstractmethod
    def sample_rate(self) -> float:
        """The sample rate q: expected batch size / dataset size."""

    @property
    @abstractmethod
    def expected_batch_size(self) -> float:
        """The public number that sums are divided by."""

    @abstractmethod
    def _draw(self, step: int) -> torch.Tensor:
        """Draw the records of one batch."""

    def __len__(self) -> int:
        """Return the number of batches that are left."""
        return self.steps - self.step

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield the batches that are left; a batch counts as yielded before it is used."""
        while self.step < self.steps:
            batch = self._draw(self.step)
            self.step += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return how batches are drawn and how many were yielded: JSON values, without the key."""
        return {
            "sampling": self.sampling,
            "dataset_size": self.dataset_size,
            "expected_batch_size": self.expected_batch_size,
            "step": self.step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the batches that a saved sampler had yielded.

        Raises:
            InvalidInput: the state of a sampler that draws otherwise, or no state at all; the
                sampler is then unchanged.
        """
        plain_values("state", state)
        mine = self.state_dict()
        same = isinstance(state, Mapping) and set(state) == set(mine)
        if not same or any(state[name] != mine[name] for name in mine if name != "step"):
            raise InvalidInput(
                "state",
                expected=f"the state_dict of a sampler like this one, {mine}",
                got=brief(state),
                remedy="Resume with the sampling, dataset and batch size of the saved run.",
            )
        self.step = integer(maximum=self.steps, step=state["step"])

    def _words(self, step: int) -> Words:
        return Words(self._key.stream(Purpose.SAMPLING, step))


class PoissonSampler(PrivateBatchSampler):
    """A sampler by which every record joins each batch independently with probability q.

    A record joins if its 72-bit number is below ``floor(q 2^72)``, so the probability never exceeds
    q. Batches vary in size and may be empty; q = 1 takes every record without drawing.

    Args:
        dataset_size: number of records.
        sample_rate: q in (0, 1].
        steps: number of batches.
        key: key of the randomness. None takes a fresh one.

    Raises:
        InvalidInput: an argument out of range.
    """

    sampling = "poisson"

    def __init__(
        self, *, dataset_size: int, sample_rate: float, steps: int, key: Key | None = None
    ) -> None:
        super().__init__(dataset_size=dataset_size, steps=steps, key=key)
        self._sample_rate = probability(sample_rate=sample_rate)
        self._threshold = math.floor(Fraction(self._sample_rate) * (1 << 72))

    @property
    def sample_rate(self) -> float:
        return self._sample_rate

    @property
    def expected_batch_size(self) -> float:
        return self._sample_rate * self.dataset_size

    def _draw(self, step: int) -> torch.Tensor:
        if self._threshold == 1 << 72:
            return torch.arange(self.dataset_size)
        return independent_subset(self._words(step), self.dataset_size, self._threshold)


class FixedSizeSampler(PrivateBatchSampler):
    """A sampler of uniform subsets of exactly ``batch_size`` records, in ascending order.

    Every subset is equally likely. Small batches are drawn record by record, large ones have the
    records with the least 64-bit numbers (``subsets.uniform_subset``).

    Args:
        dataset_size: number of records.
        batch_size: records per batch, at most ``dataset_size``.
        steps: number of batches.
        key: key of the randomness. None takes a fresh one.

    Raises:
        InvalidInput: an argument out of range.
    """

    sampling = "fixed"

    def __init__(
        self, *, dataset_size: int, batch_size: int, steps: int, key: Key | None = None
    ) -> None:
        super().__init__(dataset_size=dataset_size, steps=steps, key=key)
        self.batch_size = integer(minimum=1, maximum=self.dataset_size, batch_size=batch_size)

    @property
    def sample_rate(self) -> float:
        return self.batch_size / self.dataset_size

    @property
    def expected_batch_size(self) -> float:
        return float(self.batch_size)

    def _draw(self, step: int) -> torch.Tensor:
        return uniform_subset(self._words(step), self.dataset_size, self.batch_size)


class ShuffledSampler(PrivateBatchSampler):
    """A sampler of consecutive slices of a uniform permutation, fresh in every epoch.

    An epoch has ``dataset_size // batch_size`` batches, all full; the records that are left over
    are dropped for this epoch. The permutation sorts 64-bit numbers and is drawn again if two are
    equal. Such batches are not amplified: see ``dpkern.accounting``.

    Args:
        dataset_size: number of records.
        batch_size: records per batch, at most ``dataset_size``.
        steps: number of batches.
        key: key of the randomness. None takes a fresh one.

    Raises:
        InvalidInput: an argument out of range.
    """

    sampling = "shuffled"

    def __init__(
        self, *, dataset_size: int, batch_size: int, steps: int, key: Key | None = None
    ) -> None:
        super().__init__(dataset_size=dataset_size, steps=steps, key=key)
        self.batch_size = integer(minimum=1, maximum=self.dataset_size, batch_size=batch_size)
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    @property
    def sample_rate(self) -> float:
        return self.batch_size / self.dataset_size

    @property
    def expected_batch_size(self) -> float:
        return float(self.batch_size)

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches in one epoch."""
        return self.dataset_size // self.batch_size

    def _draw(self, step: int) -> torch.Tensor:
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._order = self._permutation(epoch)
            self._epoch = epoch
        return self._order[place * self.batch_size :][: self.batch_size].clone()

    def _permutation(self, epoch: int) -> torch.Tensor:
        words = self._words(epoch)
        while True:
            numbers = words.numbers(self.dataset_size)
            order = numbers.argsort()
            ordered = numbers[order]
            if not (ordered[1:] == ordered[:-1]).any():
                return torch.from_numpy(order)


def make_batches(
    sampling: str, *, dataset_size: int, batch_size: int, steps: int, key: Key | None = None
) -> PrivateBatchSampler:
    """Return the sampler of this name with ``batch_size`` records per batch (``poisson``: mean).

    Raises:
        InvalidInput: an unknown name or an argument out of range.
    """
    choice(("poisson", "fixed", "shuffled"), sampling=sampling)
    if sampling == "poisson":
        integer(minimum=1, maximum=1 << 40, dataset_size=dataset_size)
        integer(minimum=1, maximum=dataset_size, batch_size=batch_size)
        rate = batch_size / dataset_size
        return PoissonSampler(dataset_size=dataset_size, sample_rate=rate, steps=steps, key=key)
    fixed = FixedSizeSampler if sampling == "fixed" else ShuffledSampler
    return fixed(dataset_size=dataset_size, batch_size=batch_size, steps=steps, key=key)

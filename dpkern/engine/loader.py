"""Draw private batches from the user's data set, and tell the engine which records they hold.

One iteration is one epoch: as many logical batches as the original loader had. Masks come from the
secure generator and are numbered through the whole run, so none is used twice. A batch counts from
the moment when the loop receives it, not when a worker prepares it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from types import TracebackType
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from ..base import validate as check
from ..base.errors import InvalidInput, PrivacyError, brief
from ..base.rng import Key
from .collating import TRIALS, check_collate, random_state_kept
from .empty import empty_batch, records_of
from .gathered import reader
from .padding import PaddingCheck
from .physical_batches import Masks, PhysicalBatch, PhysicalBatchSampler
from .provenance import ModuleBoundary, YieldedBatch
from .provenance.handing import tracked_batch
from .provenance.usual_calls import tracked_alike
from .repeats import check_repeats
from .sampling import FixedSizeSampler, PoissonSampler, PrivateBatchSampler, ShuffledSampler

_MOST_STEPS = 1 << 32
_END = object()

_TRIAL_GAP = 16
"""Fewest batches from one trial of a collation to the next, the second epoch's excepted."""

OnBatch = Callable[[YieldedBatch], None]
"""Callback when the loop receives a batch."""


class PrivateLoader(DataLoader[Any]):
    """The user's loader with private batches.

    Data set, ``collate_fn``, workers and pinning are the original's; order and batches are not. An
    empty draw yields tensors of size 0 in the batch's structure. In an engine it yields one row
    that counts for nothing instead, except with ``fully_shard``.

    Args:
        original: a loader over a data set with a length.
        sampling: ``poisson`` (every record joins each batch with probability 1 / len(original)),
            ``fixed`` (uniform subsets of the original's batch size) or ``shuffled`` (slices of a
            permutation; an incomplete last batch is dropped).
        key: key of the masks. None takes a fresh one.
        max_physical_batch_size: larger logical batches are split into physical batches of at most
            this many samples. None splits none.
        shard: ``(rank, ranks)``: this process draws from the records ``rank, rank + ranks, ...``.

    Raises:
        InvalidInput: a loader whose records cannot be drawn anew, or an argument out of range.
    """

    def __init__(
        self,
        original: DataLoader[Any],
        *,
        sampling: str = "poisson",
        key: Key | None = None,
        max_physical_batch_size: int | None = None,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        check_loader(original, distributed=shard[1] > 1)
        records = len(original.dataset)  # type: ignore[arg-type]
        local = -(-(records - shard[0]) // shard[1])
        self.batches, steps = _batches(original, sampling, local, key)
        self.on_batch: OnBatch | None = None
        self.boundary: ModuleBoundary | None = None
        """Boundary of the module that the samples are for; None leaves batches as ``collate_fn``
        made them."""
        self.padding: PaddingCheck | None = None
        """Check of the shapes of batches; None outside an engine."""
        self.placeholders = True
        """Whether an empty draw is one row without weight; else it is a batch without rows."""
        self.views = 1
        """Rows of each record in tensors that ``collate_fn`` joined from several views."""
        self.max_over_ranks: Callable[[Sequence[int]], list[int]] | None = None
        """Function that returns the maxima over all processes; None where processes need not take
        equally many physical batches."""
        self.final = True
        """Whether the last batch yielded ended its logical batch."""
        self.position = 0
        """Number of logical batches yielded in the whole run."""
        self._place = 0
        self._resumed = False
        self._turn = 0
        self._empty: Any = None
        self._checked = False
        self._next_trial = 0
        self._users_dataset: Any = None
        """The data set that an audit has put another one in the place of."""
        self._parts = PhysicalBatchSampler(self.batches, steps, shard)
        self._seeded = key is not None and key.seeded
        super().__init__(
            original.dataset,
            batch_sampler=self._parts,
            num_workers=original.num_workers,
            collate_fn=original.collate_fn,
            pin_memory=original.pin_memory,
            timeout=original.timeout,
            worker_init_fn=original.worker_init_fn,
            multiprocessing_context=original.multiprocessing_context,
            generator=original.generator,
            prefetch_factor=original.prefetch_factor,
            persistent_workers=original.persistent_workers,
            pin_memory_device=original.pin_memory_device,
        )
        self.max_physical_batch_size = max_physical_batch_size

    def __repr__(self) -> str:
        return (
            f"<PrivateLoader: {self.sampling} batches of {self.dataset_size} records "
            f"at rate {self.sample_rate:.4g}>"
        )

    @classmethod
    def from_data_loader(
        cls,
        data_loader: DataLoader[Any],
        *,
        distributed: bool = False,
        generator: torch.Generator | None = None,
    ) -> PrivateLoader:
        """Return a loader of Poisson batches, which ``make_private`` takes and returns as it is.

        It is for loops that hold their loader before the run is private. The arguments are those of
        Opacus' ``DPDataLoader``.

        Raises:
            InvalidInput: several processes, a generator, or a loader that cannot be private.
        """
        check.that(
            not distributed,
            "distributed",
            "False",
            True,
            "Pass the ordinary loader to make_private, which gives every process its records.",
        )
        check.that(
            generator is None,
            "generator",
            "None",
            "a generator",
            "Leave it out: batches are drawn by a secure generator.",
        )
        return cls(data_loader)

    @property
    def ready(self) -> bool:
        """Whether an engine may take the loader: no other has, and nobody knows its key."""
        whole = self._parts.shard[1] == 1
        return self.boundary is None and not self.position and not self._seeded and whole

    @property
    def sampling(self) -> str:
        """The way batches are drawn: ``poisson``, ``fixed`` or ``shuffled``."""
        return self.batches.sampling

    @property
    def sample_rate(self) -> float:
        """The sample rate q: expected batch size / number of records."""
        return self.batches.sample_rate

    @property
    def dataset_size(self) -> int:
        """The number of records, of all shards."""
        return len(self.dataset)  # type: ignore[arg-type]

    @property
    def expected_batch_size(self) -> float:
        """The public number that sums are divided by, over all shards."""
        ranks = self._parts.shard[1]
        if ranks == 1:
            return self.batches.expected_batch_size
        return self.sample_rate * self.dataset_size

    @property
    def max_physical_batch_size(self) -> int | None:
        """The maximum size of a physical batch; a change takes effect in the next epoch."""
        return self._most

    @max_physical_batch_size.setter
    def max_physical_batch_size(self, most: int | None) -> None:
        if most is not None:
            check.integer(1, max_physical_batch_size=most)
        self._most = most

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield the batches of one epoch, or those that a loaded state left over.

        Raises:
            PrivacyError: a batch is asked for while gradients of an earlier one are pending, or
                from an iteration that another one has replaced.
        """
        self._turn += 1
        turn = self._turn
        self._place = self._place if self._resumed else 0
        self._resumed = False
        parts = self._parts
        # Masks that were drawn ahead and whose batches were never yielded are drawn again.
        self.batches.step = self.position
        parts.left, parts.most = parts.steps - self._place, self._most
        read = reader(self)
        self._check_collation(collates=read is None)
        with parts.iterated_by_its_loader():
            source: Iterator[Any] = super().__iter__() if read is None else map(read, parts)
        queue = parts.queue
        while True:
            batch = next(source, _END)
            while queue and (batch is _END or not queue[0].size):
                for part in self._evened(queue.popleft()):
                    yield self._hand_out(part, turn)
            if batch is _END:
                break
            *empty, last = self._evened(queue.popleft())
            for part in empty:
                yield self._hand_out(part, turn)
            yield self._hand_out(last, turn, batch)
        self._place = 0
        if self.boundary is not None:
            self.boundary.check_finished()

    def _check_collation(self, *, collates: bool) -> None:
        """Check which records there are, and on a few how ``collate_fn`` keeps them apart.

        Loops may change both between epochs. Short epochs have a trial in common, at most the
        second one excepted: it would take longer than they do.

        Args:
            collates: whether ``collate_fn`` makes the batches of this epoch; tensors whose rows
                are read at once need no trial.
        """
        dataset = self.dataset if self._users_dataset is None else self._users_dataset
        check_repeats(dataset)
        if not collates:
            return
        if self.position >= self._next_trial:
            size, trials = round(self.expected_batch_size), 1 if self._checked else TRIALS
            check_collate(dataset, self.collate_fn, size, trials=trials, views=self.views)
            self._next_trial = self.position + (_TRIAL_GAP if self._checked else 1)
        if not self._checked and self.padding is not None:
            with random_state_kept():
                self.padding.try_records(self.dataset, self.collate_fn)
        self._checked = True

    def _evened(self, part: PhysicalBatch) -> list[PhysicalBatch]:
        """Return the part, after empty ones if another process has more of this logical batch."""
        if self.max_over_ranks is None or not part.first:
            return [part]
        more = self.max_over_ranks([part.following])[0] - part.following
        empty = [PhysicalBatch(0, i == 0, False) for i in range(more)]
        return [*empty, part._replace(first=not more)]

    def _hand_out(self, part: PhysicalBatch, turn: int, batch: Any = None) -> Any:
        """Return the batch as the loop receives it, with the records of its rows.

        Raises:
            PrivacyError: another iteration has replaced this one, or gradients are pending.
        """
        if turn != self._turn:
            raise PrivacyError(
                "data_loader",
                expected="one iteration at a time",
                got="a batch of an iteration that another one has replaced",
                remedy="Finish or leave one loop over the loader before the next.",
            )
        size, boundary, padding = part.size, self.boundary, self.padding
        placeholder = self.placeholders and not size and boundary is not None
        yielded = YieldedBatch(
            size,
            first=part.first,
            final=part.final,
            placeholder=placeholder,
            boundary=boundary,
        )
        tracked = None
        if not size:
            batch = self._empty_batch(placeholder)
        elif padding is not None:
            if boundary is not None:
                tracked = tracked_alike(batch, padding.last, yielded.each, size)
            if tracked is None:
                padding.look(batch)
        if self.on_batch is not None:
            self.on_batch(yielded)
        held = vars(self)  # not by __setattr__, which guards what a run must keep
        held["final"] = part.final
        if part.first:
            held["position"] += 1
            held["_place"] += 1
        if tracked is not None:
            return tracked
        return batch if boundary is None else tracked_batch(batch, yielded, self.views)

    def _empty_batch(self, placeholder: bool) -> Any:
        """Return a batch for an empty draw: without rows, or with one that counts for nothing."""
        if placeholder:
            return self.collate_fn(records_of(self.dataset, [0]))
        if self._empty is None:
            self._empty = empty_batch(self.dataset, self.collate_fn)
        return self._empty

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("collate_fn", "dataset") and name in self.__dict__:
            raise PrivacyError(
                name,
                expected="what make_private was given",
                got="another one in the middle of a run",
                remedy="Make a new engine for other batches; epsilons of runs on the same data add "
                "up.",
            )
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PrivacyError(
            "data_loader",
            expected="one private loader for each run",
            got="a copy or a pickle of it",
            remedy="Pass the loader itself on: a copy would draw batches that no ledger counts.",
        )

    def edit(self, masks: Masks, dataset: Any) -> None:
        """Let an audit choose the records of batches and their contents (``engine.observing``)."""
        self._parts.masks = masks
        if self._users_dataset is None:
            self._users_dataset = self.dataset
        self.__dict__["dataset"] = dataset  # a DataLoader refuses to be assigned another one

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the run and in the epoch, as plain values without the key.

        Raises:
            PrivacyError: inside a split batch. Its rest could only be resumed together with the
                sums of its first parts, and sums without noise are never saved.
        """
        if not self.final:
            raise PrivacyError(
                "state_dict",
                expected="a complete logical batch",
                got="a split one with parts to come",
                remedy="Save after the optimizer.step() that updates the parameters.",
            )
        return {
            # These are numbers of the whole data set, because all ranks share the state.
            "batches": self.batches.state_dict()
            | {
                "step": self.position,
                "dataset_size": self.dataset_size,
                "expected_batch_size": self.expected_batch_size,
            },
            "place": self._place % self._parts.steps,
            "steps": self._parts.steps,
            "ranks": self._parts.shard[1],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a saved epoch; a seeded key draws the same batches again.

        Raises:
            InvalidInput: the state of another loader; this one is then unchanged.
            PrivacyError: this loader has yielded batches of its own.
        """
        place = self.check_state(state)
        self.batches.load_state_dict(self._own(state["batches"]))
        self.position, self._place, self._resumed = self.batches.step, place, True

    def check_state(self, state: Mapping[str, Any]) -> int:
        """Check that ``load_state_dict`` would accept this state; return the place in the epoch.

        Raises:
            InvalidInput, PrivacyError: it would not.
        """
        if self.position:
            raise PrivacyError(
                "load_state_dict",
                expected="a loader that has yielded no batch",
                got=f"one with {self.position} batches",
                remedy="Make a new loader: its masks must not be used twice.",
            )
        check.plain_values("state.loader", state)
        fits = isinstance(state, Mapping) and state.keys() == self.state_dict().keys()
        ranks = self._parts.shard[1]
        # Another number of processes would draw other batches than a seed promises.
        if (
            not fits
            or state["steps"] != self._parts.steps
            or (self._seeded and state["ranks"] != ranks)
        ):
            raise InvalidInput(
                "state",
                expected=f"the state of a loader with {self._parts.steps} batches per epoch"
                + (f" on {ranks} processes" if self._seeded else ""),
                got=brief(state),
                remedy="Pass what PrivateLoader.state_dict() returned.",
            )
        check.integer(1, (1 << 31) - 1, **{"state.ranks": state["ranks"]})
        before = self.batches.state_dict()
        self.batches.load_state_dict(self._own(state["batches"]))
        self.batches.load_state_dict(before)
        return check.integer(0, self._parts.steps - 1, **{"state.place": state["place"]})

    def _own(self, state: Any) -> Any:
        """Return a sampler's state with this shard's numbers in place of the whole data set's."""
        whole, own = self.state_dict()["batches"], self.batches.state_dict() | {"step": None}
        if not isinstance(state, Mapping):
            return state
        return {
            k: own[k] if own.get(k) is not None and v == whole[k] else v for k, v in state.items()
        }


def _batches(
    original: DataLoader[Any], sampling: str, records: int, key: Key | None
) -> tuple[PrivateBatchSampler, int]:
    """Return the sampler and the number of batches per epoch."""
    check.choice(("poisson", "fixed", "shuffled"), sampling=sampling)
    steps = len(original)
    if sampling == "poisson":
        return PoissonSampler(
            dataset_size=records, sample_rate=1 / steps, steps=_MOST_STEPS, key=key
        ), steps
    size = min(getattr(original.batch_sampler, "batch_size", 1), records)
    if sampling == "fixed":
        return FixedSizeSampler(
            dataset_size=records, batch_size=size, steps=_MOST_STEPS, key=key
        ), steps
    shuffled = ShuffledSampler(dataset_size=records, batch_size=size, steps=_MOST_STEPS, key=key)
    return shuffled, shuffled.steps_per_epoch


def check_loader(loader: object, *, distributed: bool = False) -> None:
    """Check that the records of a loader can be drawn one by one.

    Raises:
        InvalidInput: anything else, an ``IterableDataset`` or a sampler with a plan of its own.
    """

    def refuse(expected: str, got: str, remedy: str) -> InvalidInput:
        return InvalidInput("data_loader", expected=expected, got=got, remedy=remedy)

    if not isinstance(loader, DataLoader) or isinstance(loader, PrivateLoader):
        kind = type(loader).__name__
        raise refuse("a torch DataLoader that is not private yet", kind, "Pass the original one.")
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise refuse(
            "a DataLoader whose batches are what collate_fn made of the records",
            f"{type(loader).__name__}, which iterates in a way of its own",
            "Pass a DataLoader over the same data set, and do in collate_fn or in the loop what "
            "its __iter__ does to the batches: the private loader draws its own.",
        )
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized) or not len(dataset):
        raise refuse(
            "a map-style data set with a length",
            f"{type(dataset).__name__}",
            "Read the records into a list, or write a stream to disk with "
            "dpkern.integrations.IndexedShards.write: private batches are drawn by index.",
        )
    plain = type(loader.batch_sampler) is BatchSampler
    sampler = loader.batch_sampler.sampler if plain else loader.batch_sampler  # type: ignore[union-attr]
    usual = isinstance(sampler, SequentialSampler) or (
        isinstance(sampler, RandomSampler)
        and not sampler.replacement
        and sampler.num_samples == len(dataset)
    )
    if isinstance(sampler, WeightedRandomSampler) or getattr(sampler, "replacement", False):
        raise refuse(
            "every record with the same probability, at most once in a batch",
            f"{type(sampler).__name__}, by which some records come more often",
            "Pass batch_size= and no sampler, and weight the losses of the records instead: a "
            "record that is drawn more often than others has a larger epsilon than is certified.",
        )
    if not usual and not (distributed and isinstance(sampler, DistributedSampler)):
        raise refuse(
            "batches of all records, with or without shuffle=True",
            f"{type(sampler).__name__}",
            "Pass batch_size= and no sampler, and restrict the records with "
            "torch.utils.data.Subset: the private loader draws its own batches.",
        )
    check_repeats(dataset)
    if not len(loader):
        raise refuse(
            "at least one batch", "none", "Pass a batch_size of at most the number of records."
        )


class BatchMemoryManager:
    """A context that splits logical batches into physical ones to bound memory.

    ``with BatchMemoryManager(...) as loader:`` does for one block what
    ``make_private(max_physical_batch_size=...)`` does for the run.

    Args:
        data_loader: a private loader.
        max_physical_batch_size: maximum size of the batches that the loop receives.
        optimizer: accepted for compatibility; the private optimizer already knows which physical
            batch is the last.

    Raises:
        InvalidInput: another loader, or a size out of range.
    """

    def __init__(
        self,
        *,
        data_loader: DataLoader[Any],
        max_physical_batch_size: int,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        if not isinstance(data_loader, PrivateLoader):
            raise InvalidInput(
                "data_loader",
                expected="the loader that make_private returned",
                got=type(data_loader).__name__,
                remedy="Call make_private first.",
            )
        self.data_loader = data_loader
        self.optimizer = optimizer
        self.size = check.integer(1, max_physical_batch_size=max_physical_batch_size)
        self._before: int | None = None

    def __enter__(self) -> PrivateLoader:
        self._before = self.data_loader.max_physical_batch_size
        self.data_loader.max_physical_batch_size = self.size
        return self.data_loader

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.data_loader.max_physical_batch_size = self._before

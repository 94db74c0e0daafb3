"""Hold the flat list of a program: its sites, its memory, and the calls that close a step.

The same kernels get the same operands as on the recorded path, and squared norms are added up in
the same order, so that norms, factors and sums are the same to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...ops import direct
from ...ops.clip import sum_dtype
from ...privacy.mechanisms import Plan
from ..exact_sums import Aim
from ..parameter import without_torch_function
from ..per_sample_gradients import PerSampleGradients
from ..uses import ParameterSource
from .arithmetic import SumArithmetic
from .facts import UseFacts
from .joined import JoinedPart, parts_of
from .memory import Memory
from .releases import Releases
from .run import ReplayRun
from .site import KINDS, NotReplayed, Part, UseSite
from .sums import SumMemory, Sums, starts_of

Groups = tuple[tuple[int, ...], ...]
"""The parameters of each clip group, by index."""

Joined = list[tuple[int, PerSampleGradients]]
"""Gradients of parameters that several uses share, by index."""


class Flat:
    """Flat list of sites that a program replays.

    Args:
        slots: all parameters, in their frozen order.
        uses: the facts of every use and, by target, whether its gradients were kept.
        arithmetic: how norms and sums are made.
        groups: the parameters of each clip group, by index.

    Raises:
        NotReplayed: uses that cannot be replayed.
    """

    def __init__(
        self,
        slots: Sequence[ParameterSource],
        uses: Sequence[tuple[UseFacts, Sequence[bool]]],
        arithmetic: SumArithmetic,
        groups: Groups,
    ) -> None:
        self.arithmetic, self.groups = arithmetic, groups
        self.sites: list[UseSite] = []
        for facts, kept in uses:
            site = KINDS[facts.operation, facts.tapped is not None](facts, kept)
            site.index = len(self.sites)
            self.sites.append(site)
        self.keys = {site.facts.key for site in self.sites}
        self.releases = Releases(slots)
        """The release maps of the sums."""
        self._parts = parts_of([part for site in self.sites for part in site.parts])
        self._joined = [part for part in self._parts if isinstance(part, JoinedPart)]
        for part in self._parts:
            if part.slot.release is not None and not part.site.clips(part):
                raise NotReplayed(f"{part.slot.name} has a release that its use does not clip")
        dtypes = {slot.parameter.dtype for slot in slots}
        if len(dtypes) != 1 or sum_dtype(*dtypes) not in dtypes:
            raise NotReplayed("parameters of several dtypes, or of 16 bits")
        (self.dtype,) = dtypes
        self.batch = 0
        self.calls = direct.replayed_step(self.dtype, exact=arithmetic.exact)
        shapes = [arithmetic.sum_shape(slot) for slot in slots]
        self.sums = Sums(shapes, arithmetic.sum_dtype(self.dtype))
        self.group_of = {index: k for k, members in enumerate(groups) for index in members}
        """The clip group of each parameter, by index."""
        self._squares: list[Tensor] = []
        """Squared norms of shared parameters, which the calls point to."""
        self.closed_plan: Plan | None = None
        """The plan that the samples were closed by last."""
        self.most_samples = 0.0
        """The number of samples whose sums are sure to hold by that plan."""
        self._aims: tuple[Aim, ...] = ()
        self._scaled: tuple[float, tuple[Any, ...]] = (0.0, ())
        """The scale of the gradients, and what the calls of a close are told of it and the plan."""
        self.starts = starts_of(shapes)
        """Offset of each parameter's sum in the memory of all."""
        self._number_parts()

    def _number_parts(self) -> None:
        normed = [part for part in self._parts if part.normed]
        fresh = [part for part in self._parts if part.explicit and not part.normed]
        kept = [part for part in self._parts if part.explicit and part.normed]
        for number, part in enumerate(normed):
            part.square = number
        for number, part in enumerate((*fresh, *kept)):
            part.rows = part.place = number
        self._explicit = [*fresh, *kept]
        self._group_calls = [self._calls_of(k, normed, fresh) for k in range(len(self.groups))]
        alone = [part for part in self._parts if not isinstance(part, JoinedPart)]
        self._summed = [part for part in alone if part.site.sums_alone and not part.explicit]
        shapes = [part.slot.shape for part in self._explicit]
        self.spare_rows = len(shapes)
        """Number of rows that are never read: for the gradient of a shift that a norm lacks."""
        widest = max((math.prod(shape) for shape in shapes), default=0)
        self._count = len(normed) + len(self.groups)
        self.memory = Memory(self._count, len(self.groups), [*shapes, (widest,)], self.dtype)
        self._sizes = [math.prod(shape) for shape in shapes]

    def _group(self, part: Part) -> int:
        return self.group_of[part.slot.index]

    def _calls_of(
        self, group: int, normed: Sequence[Part], fresh: Sequence[Part]
    ) -> tuple[list[int], list[int], int]:
        """Return a group's squared norms and explicit gradients, and how many have no norm yet.

        Those without one have their norm together, after the others, with a number of its own.
        """
        mine = [part.place for part in self._explicit if self._group(part) == group]
        without = sum(self._group(part) == group for part in fresh)
        squares = [part.square for part in normed if self._group(part) == group]
        return squares + [len(normed) + group] * bool(without), mine, without

    def resize(self, batch: int) -> None:
        """Adapt memory and sites to another number of samples."""
        if self.memory.make_room(batch):
            self.calls.set_squares([*map(self.memory.square_address, range(self._count))])
            self.calls.set_explicit(
                [self.memory.rows_address(part.rows) for part in self._explicit],
                self._sizes,
                [self.starts[part.slot.index] for part in self._explicit],
            )
            self.calls.set_groups(*map(list, zip(*self._group_calls, strict=True)))
            for site in self.sites:
                site.place(self)
        self.batch = batch
        for site in self.sites:
            site.resize(self, batch)
        self.factors, self._norms = self.memory.factors(batch), self.memory.norms(batch)
        self._addresses = self.factors.data_ptr(), self._norms.data_ptr()

    def close_by(self, plan: Plan) -> None:
        """Close samples by this plan from now on, which is frozen."""
        self._aims = self.arithmetic.aims(plan)
        self.most_samples = self.arithmetic.most_samples(plan)
        self._scaled = 0.0, ()
        self.closed_plan = plan

    def norms(self, samples: int) -> Tensor:
        """Return the norms of so many samples over all groups, as they were before clipping."""
        each = [
            norms[:samples] * aim.unit for norms, aim in zip(self._norms, self._aims, strict=True)
        ]
        return each[0] if len(each) == 1 else torch.stack(each).square().sum(0).sqrt()

    def close(self, run: ReplayRun, *, scale: float, records: int, memory: SumMemory) -> int:
        """Make the clipped sums of a finished run by the plan of ``close_by``; drop its operands.

        Args:
            run: every site has its gradient.
            scale: what takes captured gradients to those of each sample's own loss.
            records: number of samples without the rows that fill the batch up.
            memory: where the sums are written; of 64 bits if they are integers of more samples
                than 32 bits are sure to hold.

        Returns:
            How many samples were dropped, because their norm is not finite.
        """
        joined = self._take_joined(run) if self._joined else None
        if scale != self._scaled[0]:
            self._scaled = scale, self._told(scale)
        place = (*self._scaled[1], records, self.memory.room, *self._addresses)
        if self.batch <= self.most_samples:
            lost: int = self.calls.close(*place, 0, self.batch, *memory.place)
            if self._summed or joined:
                self._add_others(run, joined, self.factors, memory)
        else:
            lost = self._close_wide(run, joined, place, memory)
        run.held.clear()
        run.live = False  # what the calls point to is gone
        return lost

    def _add_others(
        self, run: ReplayRun, joined: Joined | None, factors: Tensor, memory: SumMemory
    ) -> None:
        """Add what the calls do not hold to the sums."""
        held, places = run.held, memory.tensors
        with without_torch_function(), torch.no_grad():
            adds = [partial(self.arithmetic.add, aim) for aim in self._aims]
            for part in self._summed:
                group, place = self._group(part), places[part.slot.index]
                part.site.add_sum(adds[group], part, factors[group], held[part.site.index], place)
            for index, gradients in joined or ():
                group = self.group_of[index]
                adds[group](gradients, factors[group], places[index])

    def _close_wide(
        self, run: ReplayRun, joined: Joined | None, place: tuple[Any, ...], memory: SumMemory
    ) -> int:
        """Make integer sums of more samples than 32 bits are sure to hold, a part at a time."""
        lost, most, narrow = 0, int(self.most_samples), self.sums.further()
        memory.whole.zero_()
        for first in range(0, self.batch, most):
            last = min(first + most, self.batch)
            lost += self.calls.close(*place, first, last, *narrow.place)
            if self._summed or joined:
                chosen = torch.zeros_like(self.factors)
                chosen[:, first:last] = self.factors[:, first:last]
                self._add_others(run, joined, chosen, narrow)
            memory.whole.add_(narrow.whole)
        return lost

    def _told(self, scale: float) -> tuple[Any, ...]:
        """Return bounds, scales, style and kind of the factors of each group."""
        assert self.closed_plan is not None
        aims, automatic = self._aims, self.closed_plan.clipping == "automatic"
        bounds, scales = [aim.bound for aim in aims], [scale / aim.unit for aim in aims]
        return bounds, scales, automatic, [aim.factored for aim in aims]

    def _take_joined(self, run: ReplayRun) -> Joined:
        """Join the gradients of shared parameters; return those that are no rows, by index."""
        found = []
        self._squares = []
        with without_torch_function(), torch.no_grad():
            for part in self._joined:
                gradients = part.gradients(run)
                if part.explicit:
                    rows = self.memory.rows(part.rows, self.batch)
                    rows.copy_(gradients.per_sample().view(rows.shape))
                    continue
                square = self.arithmetic.squares(gradients)
                self.calls.set_square(part.square, square.data_ptr())
                self._squares.append(square)
                found.append((part.slot.index, gradients))
        return found

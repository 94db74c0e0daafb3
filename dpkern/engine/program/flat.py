"""Hold the flat list of a program: its sites, its memory, and the calls that close a step.

The same kernels get the same operands as on the recorded path, and squared norms are added up in
the same order, so that norms, factors and sums are the same to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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
from .site import KINDS, NotReplayed, UseSite
from .sums import SumMemory, Sums, starts_of
from .unchanged import Unchanged


class Flat:
    """Flat list of sites that a program replays.

    Args:
        slots: all parameters, in their frozen order.
        uses: the facts of every use and, by target, whether its gradients were kept.
        arithmetic: how norms and sums are made.

    Raises:
        NotReplayed: uses that cannot be replayed.
    """

    def __init__(
        self,
        slots: Sequence[ParameterSource],
        uses: Sequence[tuple[UseFacts, Sequence[bool]]],
        arithmetic: SumArithmetic,
    ) -> None:
        self.arithmetic = arithmetic
        self.sites: list[UseSite] = []
        for facts, kept in uses:
            site = KINDS[facts.operation](facts, kept)
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
        self.sums = Sums(slots, arithmetic.sum_dtype(self.dtype))
        shapes = [part.slot.shape for part in self._parts if part.single]
        self._single = sum(math.prod(shape) for shape in shapes)
        self._squares: list[Tensor] = []
        """Squared norms of shared parameters, which the calls point to."""
        self._aim: tuple[Plan | None, Aim] = (None, Aim(1.0, 0.0, nearest=False))
        self.starts = starts_of([slot.shape for slot in slots])
        """Offset of each parameter's sum in the memory of all."""
        self.unchanged = Unchanged([slot.used for slot in slots])
        self._number_parts()

    def _number_parts(self) -> None:
        normed = [part for part in self._parts if part.normed]
        fresh = [part for part in self._parts if part.explicit and not part.normed]
        kept = [part for part in self._parts if part.explicit and part.normed]
        for number, part in enumerate(normed):
            part.square = number
        for number, part in enumerate((*fresh, *kept)):
            part.rows = part.place = number
        self._explicit, self._fresh = [*fresh, *kept], len(fresh)
        alone = [part for part in self._parts if not isinstance(part, JoinedPart)]
        self._summed = [part for part in alone if part.site.sums_alone and not part.explicit]
        shapes = [part.slot.shape for part in self._explicit]
        self.spare_rows = len(shapes)
        """Number of rows that are never read: for the gradient of a shift that a norm lacks."""
        widest = max((math.prod(shape) for shape in shapes), default=0)
        self.memory = Memory(len(normed) + 1, [*shapes, (widest,)], self.dtype)
        self._sizes = [math.prod(shape) for shape in shapes]
        self._normed = len(normed)

    def resize(self, batch: int) -> None:
        """Adapt memory and sites to another number of samples."""
        if self.memory.make_room(batch):
            count = self._normed + bool(self._fresh)
            self.calls.set_squares([self.memory.square_address(number) for number in range(count)])
            self.calls.set_explicit(
                [self.memory.rows_address(part.rows) for part in self._explicit],
                self._sizes,
                [self.starts[part.slot.index] for part in self._explicit],
                self._fresh,
            )
            for site in self.sites:
                site.place(self)
        self.batch = batch
        for site in self.sites:
            site.resize(self, batch)
        self.factors, self.norms = self.memory.factors(batch), self.memory.norms(batch)
        self._addresses = self.factors.data_ptr(), self.norms.data_ptr()

    def aim(self, plan: Plan) -> Aim:
        """Return what the clip factors aim at."""
        if plan is not self._aim[0]:
            self._aim = plan, self.arithmetic.aim(plan, self._single)
        return self._aim[1]

    def close(
        self, run: ReplayRun, plan: Plan, *, scale: float, records: int, memory: SumMemory
    ) -> int:
        """Add the clipped sums of a finished run, whose operands are then dropped.

        Args:
            run: every site has its gradient.
            plan: bounds and style of the clipping.
            scale: what takes captured gradients to those of each sample's own loss.
            records: number of samples without the rows that fill the batch up.
            memory: where the sums are added.

        Returns:
            How many samples were dropped, because their norm is not finite.
        """
        joined = self._take_joined(run)
        aim, automatic = self.aim(plan), plan.clipping == "automatic"
        lost: int = self.calls.close(
            *(aim.bound, scale / aim.unit, automatic, aim.nearest, records),
            *(*self._addresses, memory.address),
        )
        held, places = run.held, memory.tensors
        if self._summed or joined:
            with without_torch_function(), torch.no_grad():
                for part in self._summed:
                    place = places[part.slot.index]
                    mine = held[part.site.index]
                    part.site.add_sum(self.arithmetic, part, self.factors, mine, place)
                for index, gradients in joined:
                    self.arithmetic.add(gradients, self.factors, places[index])
        held.clear()
        run.live = False  # what the calls point to is gone
        return lost

    def _take_joined(self, run: ReplayRun) -> list[tuple[int, PerSampleGradients]]:
        """Join the gradients of shared parameters; return those that are no rows, by index."""
        if not self._joined:
            return []
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

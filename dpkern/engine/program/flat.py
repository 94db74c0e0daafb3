"""Hold the flat list of a program: its sites, its memory, and the calls that close a step.

The same kernels get the same operands as on the recorded path, and squared norms are added up in
the same order, so that norms, factors and sums are the same to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from ...base.errors import PrivacyError
from ...ops import direct
from ...ops.clip import sum_dtype
from ..uses import ParameterSource
from .facts import UseFacts
from .memory import Memory
from .run import ReplayRun
from .site import KINDS, NotReplayed, UseSite
from .sums import Sums
from .unchanged import Unchanged


class Flat:
    """Flat list of sites that a program replays.

    Args:
        slots: all parameters, in their frozen order.
        uses: the facts of every use and, by target, whether its gradients were kept.

    Raises:
        NotReplayed: uses that cannot be replayed.
    """

    def __init__(
        self, slots: Sequence[ParameterSource], uses: Sequence[tuple[UseFacts, Sequence[bool]]]
    ) -> None:
        self.sites: list[UseSite] = []
        for facts, kept in uses:
            site = KINDS[facts.operation](facts, kept)
            site.index = len(self.sites)
            self.sites.append(site)
        self.keys = {site.facts.key for site in self.sites}
        shares = [part for site in self.sites for part in site.parts]
        parts = {part.slot.index: part for part in shares}
        if len(parts) != len(shares):
            raise NotReplayed("a parameter is used more than once")
        dtypes = {slot.parameter.dtype for slot in slots}
        if len(dtypes) != 1 or sum_dtype(*dtypes) not in dtypes:
            raise NotReplayed("parameters of several dtypes, or of 16 bits")
        (self.dtype,) = dtypes
        self._parts = [parts[index] for index in sorted(parts)]
        self.batch = 0
        self._kernels = [
            direct.kernel(name, self.dtype)
            for name in ("explicit_norm", "clip_factors", "contract")
        ]
        self.squares: list[int] = []
        """Addresses of the squared norms that are added up, those of explicit gradients last."""
        self.explicit: list[int] = []
        """Addresses of explicit gradients; those without norms of their own come first."""
        self.sums = Sums(slots, self.dtype)
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
        self._summed = [part for part in self._parts if not part.explicit]
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
            self.squares = [self.memory.square_address(number) for number in range(count)]
            self.explicit = [self.memory.rows_address(part.rows) for part in self._explicit]
            for site in self.sites:
                site.place(self)
        self.batch = batch
        for site in self.sites:
            site.resize(self, batch)
        self.factors, self.norms = self.memory.factors(batch), self.memory.norms(batch)

    def check_versions(self, run: ReplayRun) -> None:
        """Check that all operands are what they were when their norms were taken.

        Raises:
            PrivacyError: one was changed in place; nothing has been released.
        """
        for site, held in zip(self.sites, run.held, strict=True):
            if held and held[0] is not None:
                x, g, before, after = held[:4]
                if x._version != before or g._version != after:
                    raise PrivacyError(
                        site.facts.operation + " of " + run.use_of(site).names,
                        expected="its input and output gradient as they were in the backward pass",
                        got="one that was changed in place since",
                        remedy="Leave activations and gradients alone between backward() and "
                        "optimizer.step().",
                    )

    def close(
        self,
        run: ReplayRun,
        bound: float,
        scale: float,
        *,
        automatic: bool,
        outs: Sequence[int],
        places: Sequence[Tensor],
    ) -> None:
        """Add the clipped sums of a finished run, and drop its operands one by one.

        Args:
            run: a run in which every site has its gradient.
            bound: the clipping bound C.
            scale: factor from captured gradients to those of each sample's own loss.
            automatic: whether gradients are scaled instead of clipped.
            outs: addresses of the sums, by parameter.
            places: the sums themselves.
        """
        explicit_norm, clip_factors, contract = self._kernels
        batch, threads, fresh = run.batch, run.threads, self._fresh
        if fresh:
            square = self.squares[-1]
            explicit_norm(self.explicit[:fresh], square, batch, self._sizes[:fresh], threads)
        run.factors, run.factors_address = self.factors, self.factors.data_ptr()
        clip_factors(
            *(self.squares, bound, scale, automatic),
            *(run.factors_address, self.norms.data_ptr(), batch, threads),
        )
        if self._explicit:
            targets = [outs[part.slot.index] for part in self._explicit]
            factors = run.factors_address
            contract(self.explicit, factors, targets, batch, self._sizes, threads)
        held = run.held
        for part in self._summed:
            site, index = part.site, part.slot.index
            site.add_sum(run, held[site.index], outs[index], places[index])
            held[site.index] = None

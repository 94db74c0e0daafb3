"""Know which uses of private parameters a probe has seen, and probe those that it has not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from ..base.errors import PrivacyError, UnsupportedModule
from .probe import Probe
from .uses import CapturedOp


class Verification:
    """The uses of a capture that probes have seen.

    Attributes:
        probe: the probe that runs now.
        sites: places of uses that keep the samples apart.
        fresh: uses of the running pass that a probe is still to see.
        watch_input: whether the module's input is watched as well.
        watch_node: autograd node of a watched input that needs no gradient itself; None for others.
        unverified: names of the parameters of uses whose gradient has arrived, but which no probe
            has seen, by their place.
    """

    def __init__(self) -> None:
        self.probe: Probe | None = None
        self.sites: set[tuple[Any, ...]] = set()
        self.fresh: list[CapturedOp] = []
        self.watch_input = True
        self.watch_node: Any = None
        self._inconclusive: set[tuple[Any, ...]] = set()
        self._ways: set[tuple[Any, ...]] = set()
        """Uses that a probe has seen, with the operations in front of them."""
        self._apart: set[CapturedOp] = set()
        """Uses of the current samples that a probe has seen, also at sites with others that it has
        not, such as the last of a loop, behind which nothing follows."""
        self.unverified: dict[tuple[Any, ...], str] = {}

    def forget(self) -> None:
        """Count every use as unseen, because modules or hooks have changed."""
        self.sites.clear()
        self._ways.clear()
        self.watch_input = True

    def begin_samples(self) -> None:
        """Forget what was seen of the samples before alone."""
        self._inconclusive = set()
        self._apart.clear()

    def note(self, use: CapturedOp, *, moves: bool, again: bool) -> None:
        """Let the next probe see a use that is new, or has other operations in front of it.

        Args:
            use: the use.
            moves: whether rows were gathered in front of it.
            again: whether it runs again within a backward pass, where nothing is in front.
        """
        way = use.site, use.nodes, use.kinds
        if use.site not in self.sites or moves or not (again or way in self._ways):
            self.fresh.append(use)

    def has_seen(self, use: CapturedOp) -> bool:
        """Whether a probe has seen that this use keeps the samples apart."""
        known = use.site in self.sites or use.site in self._inconclusive
        return known or use.batch < 2 or use in self._apart

    @property
    def is_due(self) -> bool:
        """Whether the next pass is probed, for all that is known before it."""
        return bool(self.fresh or self.watch_input or self._inconclusive)

    def drop_seen(self) -> None:
        """Leave out the uses at places that have been seen meanwhile."""
        self.fresh[:] = [use for use in self.fresh if use.site not in self.sites]

    def note_arrival(self, use: CapturedOp, gradient: Tensor) -> None:
        """Note that a gradient has arrived; behind zero weights there is nothing to protect."""
        if not self.has_seen(use) and bool(gradient.any()):
            self.unverified[use.site] = use.names

    def check_arrivals(self) -> None:
        """Check that the gradients that have arrived are of uses that were seen.

        Raises:
            PrivacyError: one is not.
        """
        if self.unverified:
            raise PrivacyError(
                ", ".join(dict.fromkeys(self.unverified.values())),
                expected="uses that the check of the batch dimension has seen",
                got="a use outside the module's forward pass, or without a tensor output",
                remedy="Call the module itself and let it return a tensor whose first dimension "
                "is the batch (one that computes its loss returns the logits beside the loss), or "
                "call engine.validate(function, *inputs) first.",
            )

    def run(
        self,
        output: Any,
        batch: int,
        ticket: int,
        anchor: Tensor,
        any_rank: Callable[[bool], bool] | None,
        *,
        idle: bool,
    ) -> UnsupportedModule | None:
        """Probe fresh uses: the gradient of one sample's output must stay in that sample's rows.

        Args:
            output: the module's output.
            batch: number of samples.
            ticket: number of the samples, whose uses are probed.
            anchor: leaf of every captured operation.
            any_rank: tells whether any process says yes; None where each probes by itself.
            idle: whether this process only joins the others' passes.

        Returns:
            The error, with every finding; None if there is none.
        """
        fresh = [use for use in self.fresh if use.batch_id == ticket]
        self.fresh.clear()
        idle = idle or batch < 2
        if idle and any_rank is None:
            return None
        probe = self.probe = Probe(batch, fresh, idle=idle)
        try:
            alone = any_rank is None and not idle
            if not (alone and probe.compare(output, anchor)):
                probe.run(output, anchor, any_rank)
        finally:
            self.probe = None
        if idle:
            return None
        self.fresh.extend(probe.waiting)  # another output may lead there
        error = probe.error()
        if error is None:
            self._keep(probe, fresh)
        return error

    def _keep(self, probe: Probe, fresh: Iterable[CapturedOp]) -> None:
        self.sites |= probe.seen
        self._ways |= {(use.site, use.nodes, use.kinds) for use in fresh}
        self._apart |= probe.seen_uses
        self._inconclusive = probe.clouded
        self.watch_input = bool(probe.dull) or not probe.seen

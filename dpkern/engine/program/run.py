"""Run one pass of a program: check each use against its site, and hold the gradients.

Nothing is final before the close: a pass that differs from the program is passed to the recorded
path as if it had been recorded from its first use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ...ops import direct
from ..nodes_between import nodes_between
from ..operands import refuse_change
from ..parameter import PrivateParameter, without_torch_function
from ..uses import CapturedOp
from .site import UseSite

if TYPE_CHECKING:
    from .program import Program

S = TypeVar("S", bound=UseSite)
_recording = torch.is_grad_enabled
_task = torch._C._current_graph_task_id
_transforms = torch._C._functorch.peek_interpreter_stack
_autocast = torch.is_autocast_enabled
_unwritten = direct.look("unwritten")


class ReplayRun:
    """Uses and gradients of the current samples.

    Attributes:
        live: whether every use so far was the expected one. A run that is not live belongs to the
            recorded path.
        cursor: number of uses so far.
        task: the backward pass whose gradients need no further check. None means that there is no
            such pass.
        held: by site, the data of its backward pass, or None before it has run.
        order: the sites whose gradients have arrived, in the order of their arrival.
    """

    __slots__ = (
        *("program", "sites", "batch_id", "batch", "padded", "threads", "own_products"),
        *("cursor", "task", "live", "held", "order"),
    )

    def __init__(
        self, program: Program, sites: Sequence[UseSite], batch_id: int, batch: int
    ) -> None:
        self.program = program
        self.sites = sites
        self.batch_id = batch_id
        self.batch = batch
        self.padded = program.capture.padded if sites else 0
        self.threads = 1
        self.own_products: Mapping[torch.dtype, int] = {}
        self.cursor = 0
        self.task: int | None = None
        self.live = bool(sites)
        self.held: list[Any] = [None] * len(sites)
        self.order: list[int] = []
        if self.live:
            self.threads = direct.threads()
            self.own_products = direct.own_products()

    def use_of(self, site: UseSite) -> CapturedOp:
        """Return the use as the recorded path would have registered it."""
        facts = site.facts
        return CapturedOp(
            *(self.program.capture, facts.operation, facts.targets, self.batch_id, self.batch),
            *(facts.key, dict(facts.saved)),
            padded=self.padded,
            rows=site.shape[0],
            nodes=facts.nodes,
            kinds=facts.kinds,
        )

    def enters(self, site: UseSite, g: Tensor) -> CapturedOp | bool:
        """Check a gradient of a backward pass that has not been checked yet.

        Returns:
            True if it and all that follow in this pass may be held; False if it is not captured;
            the use if the recorded path takes it.

        Raises:
            PrivacyError: gradients of other samples, or of a loss that was not checked.
        """
        capture = self.program.capture
        samples = self.batch_id, self.batch, self.padded
        usual = self.live and capture.takes_usual(*samples, site.facts.key)
        if not usual:
            use = self.use_of(site)
            with without_torch_function():
                if not use.wants(g):
                    return False
            if not self.live:
                return use
        if _autocast("cpu"):
            self.program.abandon("a backward pass under autocast")
            return self.use_of(site)
        flat = self.program.flat
        if flat is None or not flat.releases.stay():
            self.program.abandon("another release than in the recorded step")
            return self.use_of(site)
        self.task = _task()
        return True

    def repeated(self, site: UseSite) -> CapturedOp:
        """Give up: this site has its gradient already, or gets one of another kind."""
        self.program.abandon("a second gradient, or one of another dtype")
        return self.use_of(site)

    def check_operands(self) -> None:
        """Check that all operands are what they were when their norms were taken.

        Raises:
            PrivacyError: one was changed in place since.
        """
        if _unwritten is not None and _unwritten(self.held):
            return
        for site, held in zip(self.sites, self.held, strict=True):
            if held and held[0] is not None:
                x, g, before, after = held[:4]
                if x._version != before or g._version != after:
                    refuse_change(self.use_of(site).names)

    def drop_arrivals(self) -> None:
        """Forget the gradients and keep the uses."""
        if self.order:
            self.held = [None] * len(self.sites)
            self.order.clear()
        self.task = None


def next_site(weight: Any, bias: Any, x: Any, kind: type[S]) -> tuple[ReplayRun, S] | None:
    """Return the run and its next site if this use is the one expected there, else None.

    Args:
        weight, bias: the operation's arguments.
        x: its input.
        kind: the class of sites that replays the operation.
    """
    if type(weight) is not PrivateParameter or not _recording():
        return None
    capture = weight._private.capture
    program = capture.program
    run = program.run
    if run.batch_id != capture._ticket:
        if capture._public or capture._skipped or capture.guard.running:
            return None
        run = program.begin()
    if not run.live or run.cursor == len(run.sites):
        return None
    site = run.sites[run.cursor]
    if (
        not isinstance(site, kind)
        or site.weight is not weight
        or (site.bias is not bias and not site.takes_frozen(bias))
        or capture._public
        or capture._skipped
        or capture.guard.running
        or _task() != -1
        or _autocast("cpu")
        or _transforms() is not None
    ):
        return None
    if not site.unchanged.holds_beside(x, site.shape, site.dtype, site.differentiable):
        if not site.unchanged.holds():
            program.abandon("a parameter that was frozen, moved or replaced")
        return None
    if not site.admits(x):
        return None
    facts = site.facts  # other operations than these may have gathered rows
    if nodes_between.pending != facts.nodes or nodes_between.kinds(x) != facts.kinds:
        program.abandon("other operations between two uses")
        return None
    nodes_between.pending = 0
    run.cursor += 1
    return run, site

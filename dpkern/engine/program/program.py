"""Record a private step twice, and replay it from then on.

The recorded path (``Capture.use``, per-sample gradients, ``clipping``) knows nothing in advance: it
registers every use, captures every gradient, and sums them at the close. Two such steps of the same
structure make a program. A step is replayed as long as each use is the one expected at its place.
At the first other use everything held so far is passed to the recorded path, which continues as if
it had seen the step from its beginning. A step that no program can replay stays on the recorded
path, and ``reason`` says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...ops import direct
from ...privacy.mechanisms import Plan
from ..clip_norms import NormedGradients
from ..exact_sums import sums_in_place
from ..in_graph import TappedUse
from ..parameter import without_torch_function
from ..per_sample_gradients import ExplicitGradients
from ..uncompiled import SHORT_CUTS
from ..uses import CapturedOp, ParameterSource
from .arithmetic import arithmetic_of
from .facts import UseFacts, facts_in_graph, facts_of
from .flat import Flat
from .releases import is_replayed
from .run import ReplayRun
from .site import KINDS, SHORT_CUT, NotReplayed

if TYPE_CHECKING:
    from ..capture import Capture

_PATIENCE = 3
"""The number of abandoned passes in a row after which the program is forgotten."""


class Program:
    """Program of one capture, which records its steps and replays them.

    Attributes:
        enabled: whether steps are replayed at all.
        replays: number of steps (or physical batches of one) that were closed by replay.
        reason: the reason why the last one was not; empty if it was.
        run: the uses of the current samples, replayed or not.
    """

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.enabled = True
        self.replays = 0
        self.reason = "nothing was recorded yet"
        self.flat: Flat | None = None
        self.run = ReplayRun(self, (), -1, 0)
        self._noted: list[UseFacts] = []
        self._noted_ticket = -1
        self._last: list[tuple[UseFacts, tuple[bool, ...]]] | None = None
        self._failed = 0
        self._fine_plan: Plan | None = None
        self._looked_at: tuple[object, Flat | None, Callable[..., Any] | None] = None, None, None
        """The look and the list for which it was found out whether the module is a stack."""

    def forget(self) -> None:
        """Forget the program, so that the next steps are recorded."""
        self.flat, self._last = None, None

    # recording

    def note(self, use: CapturedOp, x: Tensor) -> None:
        """Note a use of the current samples that the recorded path registers."""
        self._note(use, facts_of(use, x, KINDS.keys()))

    def note_in_graph(self, use: CapturedOp, tapped: TappedUse) -> None:
        """Note a use of the current samples that a compiled graph has made."""
        self._note(use, facts_in_graph(use, tapped))

    @property
    def met(self) -> int:
        """The number of uses of the current samples so far, replayed or recorded."""
        batch_id, run = self.capture.batch_number, self.run
        if run.live and run.batch_id == batch_id:
            return run.cursor
        return len(self._noted) if self._noted_ticket == batch_id else 0

    def _note(self, use: CapturedOp, facts: UseFacts) -> None:
        if self.capture.graphs.is_dry:
            return  # a pass beside the one that is trained on
        if self.run.live and self.run.batch_id == use.batch_id:
            self.abandon(f"{use.operation} in the place of another use")
        if use.batch_id != self._noted_ticket:
            self._noted, self._noted_ticket = [], use.batch_id
        self._noted.append(facts)

    def learn(self, plan: Plan) -> None:
        """Learn from samples that the recorded path closes, whose gradients have all arrived."""
        noted, self._noted = self._noted, []
        if self._noted_ticket != self.capture.batch_number or not self.enabled:
            return
        try:
            why = self._refused_plan(plan) or self._refused_capture()
            if why:
                raise NotReplayed(why)
            uses = Counter(slot for facts in noted for slot in facts.slots)
            step = [(facts, self._kept(facts, uses)) for facts in noted]
            if not step:
                raise NotReplayed("no use of a parameter was seen")
            if step == self._last:
                if not self.flat:
                    self.reason = "recorded twice"
                # Only ``done`` shows that it fits.
                self.flat = Flat(self.capture.slots, step, arithmetic_of(plan), plan.groups)
            elif not self.flat:
                self.reason = "recorded once"
            self.reason = self.reason or "other uses than the program's"
            self._last = step
        except NotReplayed as why_not:
            self.reason, self._last = str(why_not), None

    def _kept(
        self, facts: UseFacts, uses: Mapping[ParameterSource | None, int]
    ) -> tuple[bool, ...]:
        """Return by target whether the step materialized gradients instead of their operands."""
        if facts.obstacle:
            raise NotReplayed(facts.obstacle)
        kept = []
        for slot in facts.slots:
            if slot is None:
                kept.append(False)
                continue
            if len(slot.arrivals) != uses[slot]:
                raise NotReplayed(f"{slot.name} has {len(slot.arrivals)} gradients")
            record = slot.arrivals[0].record
            if isinstance(record, NormedGradients):
                record = record.record
            materialized = isinstance(record, ExplicitGradients) and record.squares is not None
            kept.append(materialized and uses[slot] == 1)
        return tuple(kept)

    def offer_short_cut(self) -> None:
        """Let the pass that begins, which finds all as the last look holds it, be one node."""
        flat, look = self.flat, self.capture.guard.state.quick
        if flat is None or not flat.batch:  # its uses are not described to C++ yet
            return
        if self._looked_at[0] is not look or self._looked_at[1] is not flat:
            self._looked_at = look, flat, SHORT_CUT[0](self.capture, flat.sites)
        cut = self._looked_at[2]
        if cut is not None:
            SHORT_CUTS.append(cut)

    # predicates

    def _refused_capture(self) -> str:
        """Return the reason why the capture keeps steps on the recorded path; empty if none."""
        capture = self.capture
        limit = capture.budget.limit
        usual = (
            capture.p == 2
            and capture.norms_on_arrival
            and capture.make_backward_clipper is None
            and capture.any_rank is None
            and (capture.on_use is None or _tests_or_nothing(capture))
            and capture.collected is None
            and (limit is None or type(limit) is float or limit == 0)
        )
        if usual:
            return ""
        checks = (
            (capture.p != 2, "L1 norms"),
            (not capture.norms_on_arrival, "integer clipping"),
            (
                capture.make_backward_clipper is not None,
                "clip groups that end in the backward pass",
            ),
            (capture.any_rank is not None, "several processes"),
            (not _tests_or_nothing(capture), "uses are surveyed"),
            (capture.collected is not None, "a dry run"),
            (capture.budget.in_bytes, "a budget in bytes"),
        )
        return next((reason for refused, reason in checks if refused), "")

    def _refused_plan(self, plan: Plan) -> str:
        """Return the reason why steps of this plan stay on the recorded path; empty if none."""
        if plan is self._fine_plan:
            return ""
        checks = (
            (plan.p != 2, "L1 norms"),
            (
                len(plan.groups) != 1 and plan.arithmetic != "exact",
                "several clip groups of floats",
            ),
            (not all(map(is_replayed, plan.blocks)), "a release that no convolution has"),
            (plan.needs_raw, "sums without clipping"),
            (
                plan.arithmetic == "exact" and not sums_in_place(plan, self.capture.slots),
                "integers of gradients that are written out",
            ),
        )
        for refused, reason in checks:
            if refused:
                return reason
        self._fine_plan = plan
        return ""

    def _refused_now(self, flat: Flat) -> str:
        """Return the reason why the pass that begins is recorded; empty if it is replayed."""
        capture = self.capture
        known = capture.verification
        if known.probe is not None or known.fresh or known.watch_input:
            return "a probe of the batch dimension is due"
        if self._noted_ticket == capture._ticket:
            return "a use that no program takes in front of the others"
        if not flat.keys <= known.sites:
            return "uses that no probe has seen"
        if capture.arrived_from is not None:
            return "gradients of earlier samples"
        if capture.graphs.is_dry:
            return "uses are noted for compiled graphs"
        if not capture.batch:
            return "an empty batch"
        why = self._refused_capture()
        return why if why or direct.runs_compiled() else direct.why_not() or ""

    # replay

    def begin(self) -> ReplayRun:
        """Begin the run of the samples that enter now, and return it."""
        if self.run.live:
            self.retire()
        capture, flat = self.capture, self.flat
        ticket, batch = capture._ticket, capture.batch or 0
        if flat is None or not self.enabled:
            if not self.enabled:
                self.reason = "replay is switched off"
            self.run = ReplayRun(self, (), ticket, batch)
            return self.run
        why = self._refused_now(flat)
        if why:
            self.reason = why
            self.run = ReplayRun(self, (), ticket, batch)
            return self.run
        if batch != flat.batch:
            flat.resize(batch)
        self.run = ReplayRun(self, flat.sites, ticket, batch)
        if capture.tested is not None:
            capture.tested.begin(ticket)
        flat.calls.begin(batch, self.run.threads)
        return self.run

    def leave(self, reason: str) -> None:
        """Pass a run of the current samples to the recorded path."""
        if self.run.live and self.run.batch_id == self.capture.batch_number:
            self.abandon(reason)

    def meet(self, uses: Sequence[TappedUse]) -> ReplayRun | None:
        """Return the run whose next sites, and last ones, are these uses of graphs, all made.

        None if there is none.
        """
        run = self.run
        if run.batch_id != self.capture.batch_number:
            run = self.begin()
        sites = run.sites[run.cursor :]
        if not run.live or len(sites) != len(uses):
            return None
        for site, use in zip(sites, uses, strict=True):
            if site.facts.tapped is not use or not site.unchanged.holds():
                return None
        run.cursor = len(run.sites)
        return run

    def retire(self) -> None:
        """End the run of earlier samples; their further gradients take the recorded path."""
        run = self.run
        run.live, run.task = False, None
        if run.order:
            run.drop_arrivals()

    def next_samples(self) -> None:
        """Prepare for other samples; pending gradients are passed to the recorded path."""
        if self.run.live:
            if self.run.order:
                self.abandon("another pass before the step")
            self.retire()

    def abandon(self, reason: str) -> None:
        """Pass the uses and gradients of the run to the recorded path, in their order.

        Raises:
            PrivacyError: an operand was changed in place since its norm was taken.
        """
        run = self.run
        run.check_operands()
        run.live, run.task = False, None
        self.reason = reason
        capture = self.capture
        capture.recorded = True
        self._tell_uses()
        self._noted = [site.facts for site in run.sites[: run.cursor]]
        self._noted_ticket = run.batch_id
        for site in run.sites[: run.cursor]:
            capture.budget.activations += site.bytes
            for slot in site.facts.slots:
                if slot is not None:
                    slot.uses += 1
        with without_torch_function(), torch.no_grad():
            for index in run.order:
                site = run.sites[index]
                site.deliver(run.use_of(site), run.held[index])
        run.drop_arrivals()
        self._failed += 1
        if self._failed >= _PATIENCE:
            self.forget()

    def _tell_uses(self) -> None:
        """Tell who watches that steps stay as tested which uses there were."""
        tested, run = self.capture.tested, self.run
        if tested is not None:
            tested.note_replayed(site.facts for site in run.sites[: run.cursor])

    def ready(self, plan: Plan) -> Flat | None:
        """Return the flat list of a complete run, or None if the recorded path must close it."""
        run, flat = self.run, self.flat
        if not run.live or flat is None or run.sites is not flat.sites:
            return None
        capture = self.capture
        if run.batch_id != capture._ticket or not run.order:
            self.abandon("no gradient has arrived")
            return None
        if len(run.order) != len(run.sites):
            self.abandon(f"{len(run.sites) - len(run.order)} uses without a gradient")
            return None
        why = "" if direct.runs_compiled() else direct.why_not()
        if not why and plan is not flat.closed_plan:
            why = self._refused_close(flat, plan)
        if not why and not flat.releases.are_of(plan):
            why = "another release than in the backward pass"
        if why:
            self.abandon(why)
            return None
        if capture.tested is not None:
            self._tell_uses()
        return flat

    def _refused_close(self, flat: Flat, plan: Plan) -> str:
        """Return the reason why a program does not close by this plan; empty if it does."""
        why = self._refused_plan(plan)
        if not why and flat.arithmetic is not arithmetic_of(plan):
            why = f"{plan.arithmetic} arithmetic, unlike the steps before"
        if not why and flat.groups != plan.groups:
            why = "other clip groups than in the steps before"
        if not why:
            flat.close_by(plan)
        return why

    def give_sums_away(self) -> None:
        """Leave the memory of the sums to the caller, who may keep them as gradients."""
        if self.flat is not None:
            self.flat.sums.give_away()

    def done(self) -> None:
        """Count a closed run, and end it."""
        self.replays += 1
        self.reason, self._failed = "", 0
        self.retire()


def _tests_or_nothing(capture: Capture) -> bool:
    """Whether nothing sees each use but the watch that steps stay as tested."""
    return capture.on_use is None or (
        capture.tested is not None and capture.on_use == capture.tested.note
    )

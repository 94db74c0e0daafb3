"""Guard every forward pass of a private module with the difference probe and the state guard."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..base.errors import PrivacyError, UnsupportedModule
from .difference import DifferenceProbe
from .inner_difference import check_inner_losses, uniform_classes
from .layers_alone import LayersProbe, runs_layers_alone
from .numbers_kept import numbers_kept
from .occasions import Occasions, dispatch_modes, function_modes
from .outcome import ProbeOutcome
from .pass_look import pass_look
from .provenance.statistic import READ
from .replaced_rows import tensors_of
from .snapshot import Snapshot
from .state import StateGuard
from .table_entries import TableEntries
from .uncompiled import nothing_compiled

if TYPE_CHECKING:
    from .capture import Capture


KEPT = (
    "what the module keeps of a pass as an attribute is printed or kept, and nothing that is "
    "trained on is computed from it"
)
"""The condition of certificates where a pass leaves attributes that follow the samples."""

SIZES = "what the module makes of a record does not depend on how many others are in the batch"
"""The condition of certificates where the module does not run on fewer samples, or its outputs
cannot be compared with those of the whole batch."""


class ForwardGuard:
    """The guard that probes forward passes of the capture's module and watches its state.

    Attributes:
        on_late_finding: callback that gets the reason when a secret probe or the state guard finds
            a fault that earlier releases may have had.
        probes: number of probes so far.
        state: guard of what the module remembers.
    """

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.module = capture.module
        self.running = False
        """Whether a probe runs the module now."""
        self._is_paused = False
        self.on_late_finding: Callable[[str], None] | None = None
        self.probes = 0
        self._attached = False
        self._occasions = Occasions(self.module)
        self._structure = self._occasions.refreshed
        self.state = StateGuard(self.module, self._trained, self._whole)
        self.state.on_finding = lambda error: self.report_late(str(error))
        self._inner_losses = True
        """Whether the module may compute losses itself; known after the first probe."""
        self._uniform: frozenset[int] = frozenset()
        """Inputs of a module with such a loss that had one class throughout in every batch: whether
        it counts their classes is to be seen in the first batch with two."""
        self._found: UnsupportedModule | None = None
        """Error that the probe before this pass found."""
        self._watched: Snapshot | None = None
        self._waiting: DifferenceProbe | LayersProbe | None = None
        """A probe of which the running pass is a part."""
        self._why = "new"
        """The occasion of that probe."""
        self._sizes: set[Hashable] = set()
        """Occasions, with sizes that were compared with passes on fewer samples."""
        self._size: Hashable | None = None
        """Those of the pass, if it is yet to be compared."""
        self._is_plain = False
        """Whether the last probe found a plain stack of layers."""
        self._usual = False
        """Whether the pass takes one tensor and found the module as the pass before left it."""
        self.is_as_looked = False
        """Whether the pass found everything as ``state.quick`` holds it, and is not probed."""
        self._numbers_are_due = False
        """Whether the next pass looks at the numbers that the module's code reads."""

    @property
    def occasion(self) -> int:
        """Changes with the module's flags, hooks, parts and trained parameters."""
        return self._occasions.combination

    def attach(self) -> None:
        """Guard forward passes from now on."""
        if not self._attached:
            self._attached = True
            self.state.attach()

    def detach(self) -> None:
        """Stop guarding forward passes."""
        self._attached = False
        self.state.detach()

    def expects_nothing(self, passes: int) -> bool:
        """Whether the next passes with gradients find all as the last did, and none is probed."""
        quick = None if self._uniform else self.state.quick
        watched = self._attached and not self._is_paused and not self.capture._public
        soon = self._occasions.gap <= passes
        same = quick is not None and self._occasions.has_same_modes() and quick.before()
        return watched and not soon and same

    def count_replay(self, passes: int) -> None:
        """Count passes that are replayed, of which ``expects_nothing`` holds."""
        self._occasions.gap -= passes

    def look_anew(self) -> None:
        """Probe the next pass as one of a kind that was never seen."""
        self._occasions.forget()
        self.state.quick = None

    @property
    def passes_left(self) -> int:
        """The number of training passes to the next secret probe."""
        return self._occasions.gap

    @property
    def seen_entries(self) -> TableEntries | None:
        """The tables of the module and its parts, with what the last pass has found in them."""
        return self._occasions.seen_entries

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Probe nothing in this block, for measurements whose own hooks would count as changes."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    @contextmanager
    def public(self) -> Iterator[None]:
        """Probe nothing in this block, and approve what it writes."""
        with self.state.public():
            yield

    def probe_function(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], batch: int
    ) -> None:
        """Probe a function that uses the module's parts, outside its own forward pass.

        Raises:
            UnsupportedModule: samples mix, or state follows the data; a dry run collects it.
        """
        outcome = self._probe(call, args, kwargs, batch, full=True)
        self.capture.report(outcome.error())

    def _trained(self) -> set[int]:
        return {id(p) for slot in self.capture.slots for p in (slot.parameter, slot.used)}

    def _whole(self) -> bool:
        return self.capture.any_rank is None

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Probe a pass that begins with these arguments, before hooks other than the capture's."""
        self._watched = self._found = self._waiting = None
        self._usual = self.is_as_looked = False
        capture = self.capture
        if not self._attached or self._is_paused or capture._public:
            return
        recording = torch.is_grad_enabled()
        usual = len(args) == 1 and not kwargs and type(args[0]) is Tensor
        occasions, quick = self._occasions, self.state.quick
        due = self._uniform or occasions.gap <= 1 or self._numbers_are_due
        due = due or (recording and usual and self._new_size(args, kwargs) is not None)
        quick = None if due else quick
        if occasions.modes or function_modes() or dispatch_modes():
            quick = quick if occasions.has_same_modes() else None
        if usual and recording and quick is not None and quick.before():
            occasions.gap -= 1
            self._usual = self.is_as_looked = True
            return
        given = (_ONE_TENSOR, ()) if usual else (_flags(args, kwargs), _numbers(args, kwargs))
        why = occasions.due(recording, *given)
        if occasions.refreshed != self._structure:
            self._structure = occasions.refreshed
            self.state.refresh()
            self.capture.look_again()
        self.state.before_pass()
        if recording:
            self._look_at_assigned()
            if self._numbers_are_due or why == "secret":
                self.look_at_numbers()
        if why is None and recording and self._uniform and self._tells_classes(args, kwargs):
            why = "classes"
        if why == "changed":
            self._sizes.clear()
        self._size = self._new_size(args, kwargs) if recording else None
        if why is None and self._size is not None:
            why = "size"
        if why is None and (not recording or capture.any_rank is None):
            unchanged = usual and recording and occasions.unchanged
            self._usual = unchanged and occasions.is_known(True, _ONE_TENSOR)
            return
        batch = self._batch(args, kwargs)
        if not recording:
            if batch >= 2 and capture.any_rank is None:
                self._watched = Snapshot(self.module)
            return
        wanted = why is not None and batch >= 2
        if self._size is not None and not wanted:
            self._sizes.add(self._size)  # nothing to compare
        if capture.any_rank is not None:
            wanted = capture.any_rank(wanted)
        if wanted and not self._wait(args, kwargs, batch, why or "new"):
            self._check(args, kwargs, batch, why or "new")

    def note_numbers_read(self) -> None:
        """Look at the numbers that the module's code reads before its next pass.

        Those of the time when the loop read its first number are public.
        """
        boundary = self.capture.boundary
        if boundary is not None and not boundary.constants.numbers_were_known:
            boundary.constants.know([*numbers_kept(self.module), *self._occasions.attributes()])
        self._numbers_are_due = True

    def look_at_numbers(self) -> None:
        """Look at the numbers that the module's code reads where no call hands them over."""
        self._numbers_are_due = False
        boundary = self.capture.boundary
        if boundary is not None and boundary.constants.numbers_are_out:
            boundary.look_at_numbers(numbers_kept(self.module))

    def _look_at_assigned(self) -> None:
        """Look at what the loop has assigned to attributes of the module since the last pass."""
        boundary = self.capture.boundary
        if boundary is not None and (assigned := self._occasions.assigned()):
            boundary.look_at_sizes(assigned)
            if boundary.constants.numbers_are_out:
                boundary.look_at_numbers([*assigned.values()])

    def _tells_classes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an input whose samples have all had one class until now has two in this batch."""
        batch = self._batch(args, kwargs)
        return batch >= 2 and bool(self._uniform - uniform_classes((args, kwargs), batch))

    def _batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return the number of samples of this pass; 0 if they are not the current batch's."""
        sizes = [int(t.shape[0]) for t in tensors_of((args, kwargs)) if t.dim()]
        handed = self.capture.batch if self.capture.handed_out else None
        if handed and torch.is_grad_enabled():
            return handed if any(size and size % handed == 0 for size in sizes) else 0
        return sizes[0] if sizes else 0

    def _new_size(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable | None:
        """Return the occasion and the size of the pass if they are new; plain stacks have none."""
        if self._is_plain or self.capture.any_rank is not None:
            return None
        size: Hashable = self.capture.batch if self.capture.handed_out else None
        if not size:
            size = tuple(t.shape[0] for t in tensors_of((args, kwargs)) if t.dim())
        found = self.occasion, size
        return None if found in self._sizes else found

    def _wait(self, args: tuple[Any, ...], kwargs: dict[str, Any], batch: int, why: str) -> bool:
        """Let the pass that begins be one of the probe's own; return whether it can be.

        A secret probe runs on a part of the batch, except of a plain stack, which needs no further
        pass on all of it.
        """
        own = self.capture.passes.is_last_hook() and self.capture.collected is None
        if own and (why in ("new", "size") or (why == "secret" and self._is_plain)):
            self._why = why
            if self.capture.any_rank is None and runs_layers_alone(self.module, args, kwargs):
                call = without_failing_kernels(self.module)
                self._waiting = LayersProbe(self.module, call, (args, kwargs), batch)
                return True
            probe = self._make_probe(self.module, args, kwargs, batch, why)
            self._waiting = probe if probe.wait() else None
        return self._waiting is not None

    def _end_wait(self, output: Any) -> None:
        """Probe with the output of the pass that has ended."""
        assert self._waiting is not None
        probe, self._waiting = self._waiting, None
        self.running = True
        try:
            outcome = probe.run_after(self.probes, output)
        finally:
            self.running = False
        if outcome is None:  # from the start, as if there had been no pass
            with probe.rewound():
                self._check(*probe.arguments, probe.batch, self._why)
        else:
            self.probes += self._why != "size"
            self.state.counted |= outcome.counted
            self._judge(outcome, *probe.arguments, probe.batch, self._why)

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any], batch: int, why: str) -> None:
        outcome = self._probe(self.module, args, kwargs, batch, full=why == "new", why=why)
        self._judge(outcome, args, kwargs, batch, why)

    def _judge(
        self,
        outcome: ProbeOutcome,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        batch: int,
        why: str,
    ) -> None:
        module = self.module
        self._is_plain = outcome.is_plain
        self._assume(outcome)
        error = outcome.error()
        if error is None and self._size is not None:
            self._sizes.add(self._size)
        anywhere = self.capture.any_rank
        if anywhere is not None and anywhere(error is not None) and error is None:
            error = UnsupportedModule(
                type(module).__name__,
                expected="samples that stay apart on every process",
                got="a finding on another process",
                remedy="Read the error of that process, and do as it says.",
            )
        late = why == "secret"
        has_losses = self._inner_losses and outcome.has_losses and why != "size"
        if error is None and anywhere is None and has_losses:
            # Batches of one class, which could not tell, have been trained on before.
            late = late or bool(self._uniform - uniform_classes((args, kwargs), batch))
            error = self._check_inner_losses(module, args, kwargs, batch, why)
        if error is not None:
            if late:
                self.report_late(str(error))
            # The pass itself may say more of it, such as the parameter and the operation.
            self._found = error
        elif outcome.told:
            self._occasions.probed(True)
        elif outcome.failure is not None:
            self._refuse_unchecked(outcome.failure)

    def _assume(self, outcome: ProbeOutcome) -> None:
        """Add the conditions of the certificate that follow from what a pass leaves to the loop."""
        boundary = self.capture.boundary
        if boundary is not None and not (outcome.has_other_sizes or outcome.has_losses):
            boundary.assume(SIZES)
        if boundary is None or not boundary.has_loader:
            return
        if outcome.kept:
            boundary.assume(KEPT)
        if outcome.has_numbers:
            boundary.assume(READ)

    def _check_inner_losses(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        batch: int,
        why: str,
    ) -> UnsupportedModule | None:
        self.running = True
        try:
            self._inner_losses, uniform = check_inner_losses(
                module, without_failing_kernels(module), (args, kwargs), batch
            )
            if not self._inner_losses or why in ("new", "changed"):
                self._uniform = uniform if self._inner_losses else frozenset()
            else:
                self._uniform &= uniform
        except UnsupportedModule as error:
            return error
        finally:
            self.running = False
        return None

    def _probe(
        self,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        batch: int,
        *,
        full: bool,
        rows: bool = True,
        why: str = "",
    ) -> ProbeOutcome:
        probe = self._make_probe(call, args, kwargs, batch, why)
        self.running = True
        try:
            outcome = probe.run(self.probes, full=full, rows=rows, secret=why == "secret")
        finally:
            self.running = False
            self.probes += why != "size"
        self.state.counted |= outcome.counted
        return outcome

    def _make_probe(
        self,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        batch: int,
        why: str,
    ) -> DifferenceProbe:
        return DifferenceProbe(
            self.module,
            without_failing_kernels(call),
            args,
            kwargs,
            batch,
            trained=[slot.parameter for slot in self.capture.slots],
            together=self.capture.any_rank,
            size="alone" if why == "size" else self._size is not None,
        )

    def after(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Check a pass that has ended with this output, which the capture has accepted.

        Raises:
            UnsupportedModule: samples mix, or the pass left traces of them in the module.
            PrivacyError: the module does not run with samples replaced, so it cannot be checked.
        """
        if self.running or self._is_paused or self.capture._public:
            return
        state, occasions = self.state, self._occasions
        if self._usual and state.quick is not None and state.quick.after():
            return
        if self._waiting is not None:
            self._end_wait(output)
        if self._found is not None:
            self.capture.report(self._found)
        if self._watched is not None:
            before, self._watched = self._watched, None
            self._check_state(before, args, kwargs)
        state.after_pass()
        occasions.leave()
        if occasions.looks_behind:
            occasions.settle()
        elif self._usual:
            state.quick = pass_look(occasions, state)

    def _check_state(self, before: Snapshot, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check that what a pass without gradients changed in the module follows no data."""
        after = Snapshot(self.module)
        changed = before.changes(after)
        if changed - self.state.counted:
            before.restore()
            try:
                batch = self._batch(args, kwargs)
                outcome = self._probe(self.module, args, kwargs, batch, full=True, rows=False)
            finally:
                after.restore()
            self._assume(outcome)
            error = outcome.error()
            if error is not None:
                raise error
            if outcome.failure is not None:
                self._refuse_unchecked(outcome.failure)
        self._occasions.probed(False)

    def _refuse_unchecked(self, failure: Exception) -> None:
        raise PrivacyError(
            type(self.module).__name__,
            expected="a module that runs on its batch with some samples replaced by others",
            got=f"{type(failure).__name__}: {failure}"[:300],
            remedy="Let the forward pass accept any order of the samples; otherwise dpkern cannot "
            "check whether they are kept apart.",
        ) from failure

    def report_late(self, reason: str) -> None:
        """Report a fault that earlier releases may have had."""
        if self.on_late_finding is not None:
            self.on_late_finding(reason)


def _flags(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the arguments that are no tensors: a flag among them may switch on another pass."""
    given = (*enumerate(args), *kwargs.items())
    return tuple(
        (name, value if value is None or isinstance(value, (bool, str)) else type(value).__name__)
        for place, argument in given
        for name, value in _leaves(argument, str(place))
    )


def _numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    """Return the numbers among the arguments, those in tensors of the CPU without rows too."""
    found = []
    for _, value in (leaf for each in (*args, *kwargs.values()) for leaf in _leaves(each)):
        if type(value) is Tensor and not value.dim() and value.device.type == "cpu":
            value = value.item()
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            found.append(str(value))  # NaN, too, equals itself
    return tuple(found)


_MOST_ENTRIES = 4
"""Number of entries up to which lists are looked into; longer ones tend to hold samples."""


def _leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the arguments, and the entries of dictionaries and short lists, with their places."""
    if isinstance(tree, dict) or (isinstance(tree, (tuple, list)) and len(tree) <= _MOST_ENTRIES):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _leaves(value, f"{name}.{key}")
    else:
        yield name, tree


_ONE_TENSOR = ("Tensor",)


def without_failing_kernels(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same call, uncompiled, and without oneDNN where oneDNN has no kernel.

    The capture takes recurrent layers apart. A probe runs torch's own kernels for them, which some
    processors lack for 16-bit operands.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        with nothing_compiled():
            try:
                return call(*args, **kwargs)
            except RuntimeError as error:
                if "primitive" not in str(error):
                    raise
                with torch.backends.mkldnn.flags(enabled=False):
                    return call(*args, **kwargs)

    return run

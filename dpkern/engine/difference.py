"""Probe whether a sample's output changes when other samples of the batch are replaced.

The module runs on the batch, and again with some rows of every input replaced, from the same state
of module and random generators, with ordinary operations. Rows of all other samples must come out
the same. That finds mixing which gradients cannot show: detached, through integers, or behind a
second input. The state that the two passes leave in the module tells buffers that follow the data
from counters, which change alike.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..base.errors import UnsupportedModule
from .calls_apart import first_apart, recorded
from .fewer_rows import SizeCheck
from .gradient_difference import check_gradients
from .local import local
from .outcome import ProbeOutcome
from .own_state_dict import own_state_dicts, same_entries_of, saved_entries
from .parameter import without_torch_function
from .plain_stack import is_plain_stack
from .random_state import RandomState
from .replaced_rows import (
    Change,
    all_same,
    by_both,
    by_copies,
    by_large_values,
    differing,
    fresh,
    has_rows,
    mapped,
    replaced_rows,
    taken_rows,
    tensors_of,
    values_of,
)
from .snapshot import Snapshot
from .zero_gates import gates_opened, is_zero, possible_gates

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

Together = Callable[[bool], bool]
"""Function that tells whether any process says yes."""

PART = 16
"""Size of a large batch divided by that of the part which some passes run on."""

SMALLEST_PART = 16
"""Minimum number of samples in such a part, or a quarter of the batch. Batches of less than twice
this number are not cut."""

WHOLE = 0.25
"""Share of the secret probes that run on the whole of a large batch."""

_SECRET = random.SystemRandom()


_KEPT = (Tensor, int, float, complex)
"""Types of attributes that can carry information about samples."""


class _Base(NamedTuple):
    """A pass with nothing replaced: its output, and the state that it left in the module."""

    output: Any
    left: Snapshot
    batch: int = 0
    """Number of samples in the pass."""


class DifferenceProbe:
    """A probe that runs a function of one batch several times and puts its state back.

    Args:
        module: the module whose state is watched.
        call: the function that is probed, usually the module itself.
        args, kwargs: its arguments, with the samples in the first dimension.
        batch: number of samples.
        trained: trained parameters. A ``full`` probe gives those that are zero throughout other
            values meanwhile, as a gate at zero hides what is behind it.
        together: tells whether any process says yes, where all must run the same passes. None
            probes in this process alone.
        size: True compares with passes on fewer samples; ``alone`` with nothing else. A ``full``
            probe does so anyway.
    """

    def __init__(
        self,
        module: nn.Module,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        batch: int,
        *,
        trained: Sequence[Tensor] = (),
        together: Together | None = None,
        size: bool | Literal["alone"] = False,
    ) -> None:
        self.module = module
        self.call = call
        self.size = size
        self.arguments = (args, kwargs)
        self.batch = batch
        self.trained = trained if together is None else ()
        self.together = together or bool
        self.whole = together is None
        """Whether parameters stay the same objects from pass to pass."""
        self._devices = {t.device for t in tensors_of(self.arguments)}
        self._devices |= {local(p).device for p in module.parameters()}

    def run(
        self, number: int, *, full: bool, rows: bool = True, secret: bool = False
    ) -> ProbeOutcome:
        """Probe once.

        Args:
            number: number of the probe, which decides the samples that are replaced.
            full: True replaces two halves of the samples, one after the other; False one half.
            rows: False compares the module's state only.
            secret: True runs most probes of a large batch on a part of it.
        """
        self._draws = RandomState(self._devices)
        self._made: _Base | None = None
        self._cut = secret and not self.size and _SECRET.random() >= WHOLE
        with gates_opened(self._gates() if (full or self.size) and rows else ()):
            self._before = Snapshot(self.module, parameters=self.whole)
            # Most modules never write to trained parameters: one look at the end shows that.
            self._trusted = {id(p) for p in self.trained}
            outcome, wrote = self._compared(number, full, rows)
            if wrote:
                self._trusted = set()
                outcome, _ = self._compared(number, full, rows)
        return outcome

    def _gates(self) -> list[Tensor]:
        return possible_gates(self.module, self.trained)

    def wait(self) -> bool:
        """Prepare for a pass of the user's own, which ``run_after`` compares with others.

        Returns:
            Whether that pass can serve: it runs with the parameters that a probe would have, and
            the snapshot shows every change that it makes to the module.
        """
        if not self.whole or any(is_zero(data) for data in map(_data, self._gates())):
            return False
        self._draws = RandomState(self._devices)
        self._before = Snapshot(self.module)
        self._trusted = {id(p) for p in self.trained}
        self._cut = False
        self.arguments = fresh(self.arguments)
        return self._before.tells

    def run_after(self, number: int, output: Any) -> ProbeOutcome | None:
        """Probe in full after the user's own pass, which gave this output.

        Returns:
            The outcome. None if that pass changed the module's state, or if the outcome is not
            clean: ``run`` then has to probe.
        """
        now = RandomState(self._devices)
        left = Snapshot(self.module, earlier=self._before)  # trusting nothing: the pass may write
        if not left.is_same(self._before):
            return None
        self._made = _Base(mapped(output, Tensor.detach), left, self.batch)
        outcome, wrote = self._compared(number, True, True, now)
        if wrote or not outcome.told or outcome.failure is not None or outcome.error() is not None:
            return None
        outcome.has_losses = _has_losses(output)
        return outcome

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """Restore the state before the user's own pass in this block, and the later one after."""
        now = RandomState(self._devices)
        left = Snapshot(self.module, earlier=self._before)
        self._before.restore(left)
        self._draws.restore()
        try:
            yield
        finally:
            left.restore()
            now.restore()

    def _compared(
        self, number: int, full: bool, rows: bool, draws: RandomState | None = None
    ) -> tuple[ProbeOutcome, bool]:
        """Return the outcome, and whether the passes wrote to trusted parameters.

        Args:
            number, full, rows: as those of ``run``.
            draws: the random state that is left; None leaves the one that passes begin with.
        """
        outcome, wrote = ProbeOutcome(), True
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._compare(outcome, number, full, rows)
        finally:
            trusted = self._trusted
            # Nothing but layers saw samples in a plain stack, so no hidden write can have come
            # of them, and versions show the others.
            wrote = bool(trusted) and not outcome.is_plain and self._before.broke_trust(trusted)
            self._before.restore(trusted=() if wrote else trusted)
            (draws or self._draws).restore()
        return outcome, wrote

    def _compare(self, outcome: ProbeOutcome, number: int, full: bool, rows: bool) -> None:
        if self._cut:
            with self._on_part(number) as smaller:
                apart = ProbeOutcome()
                if smaller:
                    self._compare_all(apart, number, full, rows)
                if apart.told:
                    vars(outcome).update(vars(apart))
                    return
        self._compare_all(outcome, number, full, rows)

    def _compare_all(self, outcome: ProbeOutcome, number: int, full: bool, rows: bool) -> None:
        base = self._base(outcome)
        if base is None:
            return
        if self.size == "alone":
            outcome.told = True
            self._check_size(outcome, base, full=False)
            return
        if rows and self._is_plain(base):
            outcome.told = outcome.is_plain = True
            return
        half = _half(self.batch, number, apart=full and self.whole)
        sign = 1 if full or number % 2 == 0 else 0
        ends = [self._turn(outcome, base, half if self.batch > 1 else [], number, sign, rows)]
        if full and self.whole and self.batch > 1:
            ends.append(self._second_turn(outcome, base, number, rows))
        absorbed: set[str] = set()
        others = []
        for after, differ in ends:
            others += [after] if differ else []
            absorbed |= differ
        outcome.counted = self._before.changes(base.left) - absorbed
        outcome.absorbed = self._lasting(base.left, others, absorbed)
        outcome.kept = sorted(absorbed.difference(outcome.absorbed))
        wanted = (full or self.size) and rows and self.whole
        if wanted and not outcome.mixed and not outcome.absorbed:
            self._check_size(outcome, base, full=full)
        clean = not outcome.mixed and not outcome.absorbed and outcome.by_number is None
        if rows and self.whole and clean and torch.is_grad_enabled():
            outcome.by_gradients = check_gradients(
                self.module, self._pass_backward, self.arguments, self.batch, self._draws
            )

    def _check_size(self, outcome: ProbeOutcome, base: _Base, *, full: bool) -> None:
        check = SizeCheck(
            *(self.module, self._pass_and_back, self.arguments, self.batch, self._draws),
            base.output,
        )
        outcome.by_number = check.error(full=full)
        outcome.has_other_sizes = check.told

    def _is_plain(self, base: _Base) -> bool:
        """Whether the module is a plain stack of layers, which neither mixes nor keeps samples.

        A few of them alone must come out as they did in the batch.
        """
        if not self.whole or not base.left.is_same(self._before):
            return False
        given = self.arguments, self.batch, base.output
        return is_plain_stack(self.module, self._pass_backward, *given)

    def _pass_backward(self, arguments: Arguments, backward: Callable[[Any], Any]) -> Any:
        """Return what ``backward`` makes of the output of a pass, and put the state back."""
        self._draws.restore()
        torch.clear_autocast_cache()
        try:
            return backward(self.call(*arguments[0], **arguments[1]))
        finally:
            torch.clear_autocast_cache()
            self._draws.note()
            self._put_back()

    def _pass_and_back(self, arguments: Arguments) -> Any:
        """Return the output of a pass and put the module's state back."""
        try:
            return self._pass(arguments)
        finally:
            self._draws.note()
            self._put_back()

    def _base(self, outcome: ProbeOutcome) -> _Base | None:
        """Return the pass that others are compared with; None if it fails."""
        if self._made is not None and self.batch == self._made.batch:
            return self._made
        try:
            plain = self._pass(fresh(self.arguments), outcome)
        except Exception as error:  # noqa: BLE001 - the real pass raises it again
            outcome.failure = error
            self._put_back()
            return None
        left = self._snapshot()
        self._put_back(left)
        return _Base(plain, left)

    def _turn(
        self,
        outcome: ProbeOutcome,
        base: _Base,
        chosen: Sequence[int],
        number: int,
        sign: int,
        rows: bool,
    ) -> tuple[Snapshot, set[str]]:
        """Run a pass with these samples replaced; return the state after it and what differs."""
        change, result = self._replaced(chosen, number, outcome, sign)
        after = self._snapshot()
        differ = base.left.changes(after) if change is not None else set()
        self._put_back(after)
        if rows and not outcome.mixed:
            self._judge(outcome, base.output, chosen, change, result)
        return after, differ

    def _second_turn(
        self, outcome: ProbeOutcome, base: _Base, number: int, rows: bool
    ) -> tuple[Snapshot, set[str]]:
        """Replace the first half of the samples, since the first ones may displace the others.

        A part of a large batch suffices if the module runs on it; the first turn shows what depends
        on the size of the batch.
        """
        whole = self.batch
        with self._on_part(number) as taken:
            if taken:
                # Most modules leave the other samples as they are in the whole batch.
                rows_of_part = taken_rows(base.output, whole, taken)
                found = self._turn_on_part(outcome, base.left, rows_of_part, number, rows)
                if found is not None:
                    return found
        return self._turn(outcome, base, range(self.batch // 2), number, -1, rows)

    def _turn_on_part(
        self, outcome: ProbeOutcome, left: Snapshot, expected: Any, number: int, rows: bool
    ) -> tuple[Snapshot, set[str]] | None:
        """Run a pass on a part of the batch with the first half of it replaced.

        A pass with nothing replaced shows what has changed them where outputs of the other samples
        are not the ``expected`` ones, or where a pass leaves something else than ``left``.

        Returns:
            As ``_turn``; None if the module does not run on the part.
        """
        apart, chosen = ProbeOutcome(mixed=outcome.mixed), range(self.batch // 2)
        change, result = self._replaced(chosen, number, apart, -1)
        after = self._snapshot()
        self._put_back(after)
        if not apart.told:
            return None
        kept = self._kept(chosen)
        if left.is_same(after) and (not rows or all_same(expected, result, self.batch, kept)):
            return after, set()
        own = self._base(apart)
        if own is None:
            return None
        if rows and not apart.mixed:
            self._judge(apart, own.output, chosen, change, result)
        outcome.mixed = apart.mixed
        return after, own.left.changes(after)

    @contextmanager
    def _on_part(self, number: int) -> Iterator[list[int]]:
        """Run the passes of this block on a part of a large batch; yield its samples, or none."""
        whole = self.arguments, self.batch
        size = max(self.batch // PART, min(SMALLEST_PART, self.batch // 4))
        taken: list[int] = []
        if self.whole and self.batch >= 2 * SMALLEST_PART:
            taken = sorted(random.Random(f"part {number}").sample(range(self.batch), size))
            self.arguments, self.batch = taken_rows(self.arguments, self.batch, taken), size
        try:
            yield taken
        finally:
            self.arguments, self.batch = whole

    def _kept(self, chosen: Sequence[int]) -> list[int]:
        return sorted(set(range(self.batch)).difference(chosen))

    def _judge(
        self,
        outcome: ProbeOutcome,
        plain: Any,
        chosen: Sequence[int],
        change: Change | None,
        result: Any,
    ) -> None:
        """Compare the outputs, or those of the module's parts if its own have no rows."""
        mixed, hidden, kept = False, False, self._kept(chosen)
        if change is not None:
            outcome.has_numbers |= [*values_of(plain)] != [*values_of(result)]
            mixed = differing(plain, result, self.batch, kept) is not None
            hidden = not has_rows(plain, self.batch)
        if self.together(mixed or hidden):
            inputs = self.arguments
            if change is not None:
                inputs, _ = replaced_rows(inputs, self.batch, chosen, change)
            place = self._place(inputs, kept, between=hidden)
            outcome.mixed = place or (type(self.module).__name__ if mixed else "")

    def _replaced(
        self, chosen: Sequence[int], number: int, outcome: ProbeOutcome, sign: int
    ) -> tuple[Change | None, Any]:
        """Return the first way to replace samples that the module runs on, and the output."""
        step = 1 + number % max(1, self.batch - 1)
        found: tuple[Change | None, Any] = (None, None)
        for change in self._changes(step, sign):
            inputs, different = self.arguments, False
            if chosen and found[0] is None:
                inputs, different = replaced_rows(self.arguments, self.batch, chosen, change)
            if not self.together(different):
                continue
            try:
                result = self._pass(inputs if different else fresh(inputs))
            except Exception as error:  # noqa: BLE001 - lengths that must be sorted, say
                outcome.failure = error
                self._put_back()
                continue
            if different:
                outcome.told, found = True, (change, result)
                if self.whole:
                    break
        return found

    def _changes(self, step: int, sign: int) -> Iterator[Change]:
        yield by_large_values(step, sign) if sign else by_both(step)
        yield by_copies(step)
        yield by_copies(step, flat=False)
        yield by_large_values(step, integers=False)

    def _snapshot(self) -> Snapshot:
        return Snapshot(
            self.module, parameters=self.whole, earlier=self._before, trusted=self._trusted
        )

    def _pass(
        self, arguments: tuple[tuple[Any, ...], dict[str, Any]], outcome: ProbeOutcome | None = None
    ) -> Any:
        """Return the output, without its graph."""
        self._draws.restore()
        torch.clear_autocast_cache()  # it may hold other values, or the graph of another pass
        try:
            output = self.call(*arguments[0], **arguments[1])
            if outcome is not None:
                outcome.has_losses = _has_losses(output)
            return mapped(output, Tensor.detach)
        finally:
            torch.clear_autocast_cache()

    def _put_back(self, now: Snapshot | None = None) -> None:
        lost = self._before.restore(now, trusted=self._trusted)
        if lost:
            raise UnsupportedModule(
                ", ".join(lost[:5]),
                expected="large tensors and generators that a forward pass leaves as they are",
                got="one that changes them",
                remedy="Update it outside of the forward pass, under engine.public(), or keep what "
                "a generator remembers in attributes of the module.",
            )

    def _lasting(self, left: Snapshot, others: Sequence[Snapshot], differ: set[str]) -> list[str]:
        """Return paths of state that follows the data and reaches state_dict() or later outputs.

        Attributes that the next pass overwrites before it reads them do neither.
        """
        kinds = dict(left.kinds)
        for other in others:
            kinds |= other.kinds
        saved = [path for path in differ if kinds.get(path, "attribute") != "attribute"]
        live = self.together(bool(differ) and not saved)
        if not live or saved:
            return saved
        if own_state_dicts(self.module):
            first_saved = self._saved(left)
            if any(not same_entries_of(first_saved, self._saved(other)) for other in others):
                return sorted(differ)
        # Passes on the same samples, from states that other samples left, must agree.
        one, first = self._again(left)
        found: set[str] = set()
        for start in others or [left]:
            two, second = self._again(start)
            if differing([one], [two], self.batch, range(self.batch)) or not _alike(one, two):
                return sorted(differ)
            found |= {
                path
                for path in first.changes(second)
                if isinstance(first.values.get(path, second.values.get(path)), _KEPT)
            }
        return sorted(found)

    def _saved(self, state: Snapshot) -> dict[str, Any]:
        """Return what ``state_dict()`` gives in this state."""
        state.restore()
        try:
            return saved_entries(self.module)
        finally:
            self._put_back()

    def _again(self, start: Snapshot) -> tuple[Any, Snapshot]:
        """Run a pass on the batch from the state ``start``; return its output and the new state."""
        start.restore()
        result = self._pass(fresh(self.arguments))
        end = self._snapshot()
        self._put_back()
        return result, end

    def _place(self, inputs: Any, kept: Sequence[int], *, between: bool) -> str:
        """Return the first module whose inputs agree in these rows while its outputs do not.

        Args:
            between: whether inputs that differ count too, as mixing in front of that module.
        """
        calls = []
        for arguments in (self.arguments, inputs):
            with recorded(self.module) as seen:
                self._pass(fresh(arguments))
            calls.append(seen)
            self._put_back()
        return first_apart(self.module, calls, self.batch, kept, between=between)


def _half(batch: int, number: int, *, apart: bool) -> list[int]:
    """Return half of the samples: random ones, because rows may also mix with those two away.

    Args:
        apart: never the first half, which a second turn replaces. Without one, every sample has to
            be replaced now and then.
    """
    half = sorted(random.Random(number).sample(range(batch), batch // 2))
    if not apart or half[-1:] != [batch // 2 - 1]:
        return half
    return [*range(1, batch, 2)][: batch // 2]


def _has_losses(output: Any) -> bool:
    """Whether the output has scalars that require a gradient."""
    return any(not t.dim() and t.requires_grad for t in tensors_of(output))


def _data(parameter: Tensor) -> Tensor:
    with without_torch_function():
        return parameter.data


def _alike(one: Any, two: Any) -> bool:
    """Whether two outputs of the same samples agree, tensors without rows included."""
    pairs = zip(tensors_of(one), tensors_of(two), strict=False)
    return all(differing(a[None], b[None], 1, [0]) is None for a, b in pairs)

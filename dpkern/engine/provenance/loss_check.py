"""Check before a backward pass that losses are sums over records, divided as declared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..user_code import is_ours
from .divisors import Divisors
from .leaves import Leaves, nodes_of
from .refusals import earlier_piece, mixed_loss, other_reduction
from .states import Mixed, RecordSum, State, YieldedBatch
from .usual_calls import loss_as_before

if TYPE_CHECKING:
    from ..capture import Capture

_WHOLE = 2
"""Number of backward passes whose graphs are looked through as a whole."""

_OURS = 3
"""Calls of dpkern's that lead to the check: its own, ``backward``, and who called that."""


class LossCheck:
    """Check of the losses of one private module.

    Args:
        capture: capture of the module.
        assume: called with conditions of the certificate.
    """

    def __init__(self, capture: Capture, assume: Callable[[str], None]) -> None:
        self.capture = capture
        self.assume = assume
        self.running = False
        """Whether the running backward pass started from a loss that was checked."""
        self.outputs: tuple[Any, ...] = ()
        """Graph nodes at which the module's part of a loss begins: one in most loops."""
        self.samples = 0
        """The number of the batch, or piece of one, whose pass has ended last."""
        self.before = 0
        """The number of outputs, the first ones, of passes over other pieces of the batch."""
        self.begun: tuple[Sequence[Tensor], Sequence[State]] | None = None
        """The losses that the running backward pass began at, until a segment has run again."""
        self._leaves = Leaves(capture)
        self._divisors = Divisors()
        self._passes = 0

    def forget(self) -> None:
        """Release the module's graph, so that the next pass can use its memory."""
        self.outputs, self.before = (), 0

    def check_segment(self, batch: YieldedBatch | None) -> None:
        """Check that a segment which runs again in the running backward pass is of the current
        samples: its uses are new ones, and only the loss tells.

        Args:
            batch: the current batch.

        Raises:
            PrivacyError: the loss leads to a pass over others.
        """
        (losses, states), self.begun = self.begun or ((), ()), None
        # A pass that was forgotten, or has failed since, has no outputs.
        before = self.before if self.samples == self.capture.batch_number else len(self.outputs)
        current, earlier = self.outputs[before:], set(self.outputs[:before])
        others = any(state.batch is not batch for state in states)
        for loss in losses:
            if others or not earlier.isdisjoint(nodes_of(loss.grad_fn, current)):
                raise earlier_piece("a segment that runs again")

    def check(self, losses: Sequence[Tensor], states: Sequence[State]) -> None:
        """Refuse losses whose gradient is no sum of single records' terms.

        Raises:
            UnsupportedModule: a loss in which records meet, or with a divisor that follows the
                batch.
            InvalidInput: another reduction than ``loss_reduction`` says.
            PrivacyError: a trained tensor that is not the engine's.
        """
        declared = self.capture.loss_reduction
        if self._passes >= _WHOLE and loss_as_before(
            *(losses, states, declared, self._divisors.before, self.outputs, is_ours, _OURS)
        ):
            return
        for number, state in enumerate(states):
            if not isinstance(state, RecordSum):
                if isinstance(state, Mixed):
                    error = mixed_loss(state)
                    if state.late:
                        self.capture.guard.report_late(str(error))
                    raise error
                continue
            batch = state.batch
            if batch.in_pass < 2:
                if batch.size < 2:
                    continue
            elif state.reduction != declared and not state.rescaled:
                raise other_reduction(declared, state.reduction)
            found = self._divisors.check(state, number, declared)
            if found is not None:
                self.capture.guard.report_late(str(found))
                raise found
        whole = self._passes < _WHOLE
        self._passes += whole
        for loss in losses:
            if whole or not self._is_of_outputs_alone(loss):
                self._leaves.check(loss, self.outputs, self.assume, whole=whole)

    def _is_of_outputs_alone(self, loss: Tensor) -> bool:
        """Whether the loss is what a loss function has made of one of the outputs alone.

        What has changed the output since would stand between the two, and what has changed the loss
        has counted its version up.
        """
        made_of = getattr(loss, "_made_of", None)
        return made_of is not None and made_of in self.outputs and loss._version == 0

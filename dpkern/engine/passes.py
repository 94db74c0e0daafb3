"""The hooks that see a module's forward passes begin and end.

In front of all other hooks stands the look for the records of the inputs; behind them their batch,
and a watch on the first input where the probe asks for it. After the pass uses that are new are
probed, and the records are followed into the output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .cleared import show_zero_grad
from .hooks import Hook
from .nodes_between import nodes_between
from .parameter import applied, replaced, tensors_in
from .probe import INPUT, WatchedInput
from .provenance.tensor import TrackedTensor
from .sets_requires_grad import sets_requires_grad
from .turns import Turns
from .uncompiled import SHORT_CUTS, show_forward
from .unshared import fewest_holders, is_held_as
from .uses import CapturedOp

if TYPE_CHECKING:
    from .capture import Capture

_GLOBAL_HOOKS = nn.modules.module._global_forward_hooks


class ForwardPasses:
    """The hooks of the captured module, and the arguments of its running pass.

    Args:
        capture: not attached yet.
    """

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.turns = Turns()
        """The thread that runs the module or takes a step."""
        self._aside = False
        """Whether the running pass evaluates while another thread's batch waits for its step."""
        self.inputs: tuple[Tensor, ...] = ()
        """Arguments of the running pass."""
        self._hooks: list[Any] = []
        self._shown: list[str] = []
        """The methods that stand in the place of the module's own."""
        self._fewest_holders = fewest_holders()

    def attach(self) -> None:
        """Begin to see passes."""
        from .layers import packed  # here, because the rules import the capture

        module = self.capture.module
        shown = {"forward": show_forward(module), "zero_grad": show_zero_grad(module)}
        self._shown = [name for name, is_ours in shown.items() if is_ours]
        self._hooks = [
            module.register_forward_pre_hook(Hook(self._before), with_kwargs=True),
            module.register_forward_hook(Hook(self._leave), always_call=True),
            module.register_forward_hook(Hook(self._after), with_kwargs=True),
        ]
        self.capture.guard.attach()
        enter = Hook(self._enter)
        self._hooks.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
        for part in module.modules():
            if isinstance(part, nn.RNNBase):
                # Only the module knows how it sorted packed sequences.
                self._hooks += [
                    part.register_forward_pre_hook(packed.note_order, with_kwargs=True),
                    part.register_forward_hook(packed.forget_order, always_call=True),
                ]

    def detach(self) -> None:
        """See none any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for name in self._shown:
            self.capture.module.__dict__.pop(name, None)
        self._shown = []
        self.capture.guard.detach()

    def given(self, tensor: Tensor) -> bool:
        """Whether the tensor shares the memory of an argument that the module was called with."""
        if any(tensor is argument for argument in self.inputs):
            return True
        place = tensor.untyped_storage().data_ptr()
        return any(argument.untyped_storage().data_ptr() == place for argument in self.inputs)

    def forget_inputs(self) -> None:
        """Release the arguments of the last pass, so that the next one can use their memory."""
        self.inputs = ()

    def _evaluates_aside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the pass evaluates while the batch of another thread waits for its step.

        That thread needs the engine as its pass has left it, and may wait for this one: such a pass
        runs as if there were no engine. What it leaves in the module, the next training pass finds.
        """
        boundary = self.capture.boundary
        return (
            boundary is not None
            and boundary.unfinished_pass
            and not boundary.trains_here
            and not torch.is_grad_enabled()
            and TrackedTensor not in map(type, tensors_in((args, kwargs)))
        )

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Identify the records of the module's inputs, before all other hooks."""
        capture = self.capture
        self.turns.take()
        if capture.guard.running:
            return None
        self._aside = self._evaluates_aside(args, kwargs)
        if self._aside:
            return None
        capture._skipped = False
        capture.graphs.end_of_pass()  # of one that failed in the compiler
        changed = None
        if capture.boundary is not None and capture.collected is None:
            changed = args, kwargs = capture.boundary.enter(args, kwargs)
        if capture.row_padding is not None and torch.is_grad_enabled() and capture.watching:
            changed = args, kwargs = capture.row_padding.enter(args, kwargs)
        capture.guard.before(args, kwargs)
        nodes_between.begin()  # after the passes of a probe
        return changed

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        capture = self.capture
        if capture.guard.running:
            return None
        SHORT_CUTS.clear()  # of a pass that failed before its module ran
        if self._aside:
            return None
        capture.verification.watch_node = None
        if not torch.is_grad_enabled():
            return None
        if capture._public or capture._skipped:
            capture.graphs.skip()
            return None
        usual = len(args) == 1 and not kwargs and type(args[0]) is Tensor
        given = self.inputs = args if usual else tuple(tensors_in((args, kwargs)))
        rows = None
        for tensor in given:
            if tensor.dim():
                rows = int(tensor.shape[0])
                break
        if capture.handed_out:
            # Evaluation uses other samples, whose gradients would be refused as leaks.
            fits = (
                rows is None
                or rows == capture.batch
                or rows_of_each(rows, capture.batch or 0) is not None
            )
            capture._skipped = not fits and not module.training
        else:
            capture.next_samples()
            capture.batch = rows
            if capture.boundary is not None and capture.boundary.entered_records is not None:
                capture.batch = capture.boundary.entered_records
        if capture._skipped:
            capture.graphs.skip()
        else:
            capture.graphs.begin(args, kwargs)
        if (
            not capture.verification.watch_input
            or rows != capture.batch
            or capture._skipped
            or capture.graphs.active
        ):
            if capture.guard.is_as_looked:
                capture.program.offer_short_cut()
            return None
        return self.watched((args, kwargs))

    def watched(
        self, arguments: tuple[tuple[Any, ...], dict[str, Any]]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments with the first tensor as a copy whose gradient the probe sees.

        None if that tensor is not floating, or if the module sets ``requires_grad`` of tensors: a
        copy with a graph forbids it, and the guard's passes tell alone whether samples mix.
        """
        capture = self.capture
        first = next((t for t in tensors_in(arguments) if t.dim()), None)
        if first is None or not first.is_floating_point() or sets_requires_grad(capture.module):
            return None
        use = CapturedOp(
            capture, "the input of the module", (), capture._ticket, capture.batch or 0, INPUT
        )
        copied = applied(WatchedInput, capture.anchor, use, first)
        capture.verification.watch_node = None if first.requires_grad else copied.grad_fn
        watched: tuple[tuple[Any, ...], dict[str, Any]] = replaced(arguments, first, copied)
        return watched

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """End the pass of a compiled module; one that failed without an output ends here."""
        if self.capture.guard.running:
            return
        if not self._aside:
            self.capture.graphs.end_of_pass()
        if output is None:
            self.turns.give()

    def _after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        capture = self.capture
        if capture.guard.running:
            return None
        try:
            if self._aside:
                return None
            if torch.is_grad_enabled() and not capture._public:
                # Uses within reentrant checkpoints show only in the backward pass.
                known = capture.verification
                needed = (bool(known.fresh) or known.watch_input) and capture.watching
                if needed or capture.any_rank is not None:
                    capture.verify(output, idle=not needed)
            made = output
            if capture.row_padding is not None and torch.is_grad_enabled() and capture.watching:
                output = capture.row_padding.leave(output)
            followed = capture.boundary if capture.collected is None else None
            if capture._public or (capture._skipped and followed and not followed.in_placeholder):
                followed = None
            capture._skipped = False
            capture.guard.after(args, kwargs, made)
            del made  # the last other holder of an output that was not padded
            if followed is None:
                return output
            alone = type(output) is Tensor and is_held_as(output, self._fewest_holders)
            return followed.leave(output, alone=alone)
        finally:
            self.turns.give()

    def is_last_hook(self) -> bool:
        """Whether nothing changes the module's output after ``_after``."""
        last = next(reversed(self.capture.module._forward_hooks.values()), None)
        return isinstance(last, Hook) and last.call == self._after and not _GLOBAL_HOOKS


def rows_of_each(rows: int, batch: int) -> int | None:
    """Return the number of rows of each sample; None if the rows do not divide evenly."""
    if batch == 0:
        return 1 if rows == 0 else None
    return rows // batch if rows and rows % batch == 0 else None


__all__ = ["ForwardPasses", "rows_of_each"]

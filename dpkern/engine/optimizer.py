"""The private step behind the user's own ``torch.optim`` optimizer.

``step`` and ``zero_grad`` are replaced on the instance; the object, its ``param_groups`` and its
``state`` stay torch's. The optimizer's rule sees ``noisy sum / expected batch size`` as gradient.
SGD, Adam and AdamW run inside the fused update; every other optimizer, and one with step hooks that
may look at gradients, gets the noisy gradient in ``.grad`` while its own ``step`` runs.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..base.errors import InvalidInput, PrivacyError, PrivacyWarning
from ..ops.clip import ClipResult
from ..privacy.mechanisms import Mechanism, Plan
from ..step.checks import SCHEDULED
from ..step.step import DPStep
from .batch_order import BatchOrder
from .between_steps import BetweenSteps
from .capture import Capture
from .clipping import close_into, prepare
from .distributed import Processes, numbers_of
from .fused import groups_of
from .local import like
from .module_parameters import no_gradient
from .parameter import PrivateParameter, without_torch_function
from .program.packed_update import PackedUpdate
from .settings import check_settings
from .sharded import ShardedModule
from .uncompiled import never_compiled

_ZERO_GRAD = torch.optim.Optimizer.zero_grad
_REFUSED = (torch.optim.LBFGS, torch.optim.SparseAdam)
_NEVER = 2**31 - 1
_ABSENT = object()
_MINE = "_dpkern"

PAST = (
    "The optimizer holds the state of earlier steps, which this engine's epsilon does not count. "
    "If they were private, continue with engine.load_checkpoint or engine.load_state_dict, or add "
    "their epsilon; if they were public, nothing is missing."
)
"""The warning at the first step of an engine whose optimizer has made steps before."""

SIZE = "expected_batch_size"
"""Attribute of the optimizer that shows what sums are divided by."""

PUBLIC = "passes under engine.public() used no private data"
"""The condition of certificates where gradients joined a step without being clipped."""


class OptimizerAdapter:
    """The adapter that makes a ``torch.optim`` optimizer private.

    ``optimizer.noise_multiplier`` and ``optimizer.max_grad_norm`` show the numbers in use; new
    values take effect at the next step, like the learning rate in ``param_groups``.
    ``optimizer.expected_batch_size`` shows what sums are divided by, and stays.

    Args:
        optimizer: the user's optimizer; its trainable parameters are those of ``capture``.
        capture: holds the gradients of the current samples.
        step: the private step, made for ``capture.parameters`` without an optimizer of its own.
        processes: the processes that take every step together; None for one process.
        sharded: the parameters' shards; None if each process holds all parameters whole.

    Raises:
        InvalidInput: an optimizer that cannot be private, or one of other parameters.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        capture: Capture,
        step: DPStep,
        *,
        processes: Processes | None = None,
        sharded: ShardedModule | None = None,
    ) -> None:
        check_optimizer(optimizer, capture)
        self.optimizer = optimizer
        self.capture = capture
        self.dp_step = step
        self.processes = processes
        self.sharded = sharded
        self.packed = PackedUpdate(optimizer, capture)
        """The update that a program replays."""
        self._places = {id(p): i for i, p in enumerate(capture.parameters)}
        self.turns = capture.passes.turns
        self.batches = BatchOrder(capture, step, self._close)
        boundary = self.batches.boundary
        self.between = BetweenSteps(
            optimizer, capture.parameters, lambda: boundary.writes, boundary.note_written
        )
        """The contents that the last step has left, where the next one compares them."""
        self.assumed: Callable[[], None] | None = None
        """Enters into the ledger what norms of the backend in force rest on."""
        self._shown: dict[str, Any] = {}
        self._before: dict[str, Any] = {}
        self._own_step: Callable[..., Any] = optimizer.step
        self._own_zero_grad: Callable[..., Any] = optimizer.zero_grad

    def attach(self) -> None:
        """Replace ``step`` and ``zero_grad``; calling it twice changes nothing."""
        if self._before:
            return
        optimizer, adapter = self.optimizer, self

        @never_compiled
        def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            """Clip, sum and noise the samples' gradients, then update (see
            ``OptimizerAdapter.step``)."""
            return adapter.step(closure)

        @never_compiled
        def zero_grad(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
            """Forget the gradients of the current samples (see ``OptimizerAdapter.zero_grad``)."""
            adapter.zero_grad()

        # Learning-rate schedulers look for this mark; ``step`` reports its calls itself.
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        new = {
            "step": types.MethodType(step, optimizer),
            "zero_grad": types.MethodType(zero_grad, optimizer),
            # The scale of the loss is divided out of the samples' gradients instead.
            "_step_supports_amp_scaling": False,
            _MINE: self,
        }
        names = (*new, *SCHEDULED, SIZE)
        self._own_step, self._own_zero_grad = optimizer.step, optimizer.zero_grad
        self._before = {name: optimizer.__dict__.get(name, _ABSENT) for name in names}
        optimizer.__dict__.update(new)
        self.show()
        self.capture.boundary = self.batches.boundary
        prepare(self.capture, self._plan)
        _keep_scalers_away()

    def detach(self) -> None:
        """Give the optimizer back as it was; sums that were not released are forgotten."""
        for name, value in self._before.items():
            if value is _ABSENT:
                self.optimizer.__dict__.pop(name, None)
            else:
                self.optimizer.__dict__[name] = value
        self._before = {}
        self.capture.boundary = None
        self.capture.make_backward_clipper = None
        self.dp_step.drop()
        self.batches.reset()

    def begin_batch(self, batch: int, *, first: bool = True, final: bool = True) -> None:
        """Begin new samples that the caller vouches for (``BatchOrder.begin_by_hand``)."""
        self.batches.begin_by_hand(batch, first=first, final=final)

    def drop(self) -> None:
        """Forget the unfinished logical batch; nothing of it is released."""
        self.batches.drop()

    def zero_grad(self) -> None:
        """Forget the current samples' gradients and public ones; earlier parts stay summed."""
        self.capture.discard()
        with without_torch_function():
            usual = getattr(self._own_zero_grad, "__func__", None) is _ZERO_GRAD
            for group in self.optimizer.param_groups:
                usual = usual and no_gradient(group["params"])
            if not usual:
                self._own_zero_grad()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clip and sum the current samples' gradients; after a whole logical batch, also update.

        The update is the optimizer's rule on the gradient ``noisy sum / expected batch size``.

        Args:
            closure: function that is called once, with gradients on. None calls nothing.

        Returns:
            What the closure returned, else None.

        Raises:
            PrivacyError: no new samples since the last step, or a guard of the capture failed.
            InvalidInput: numbers that were changed to something impossible.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._take_step(self._close)
        return loss

    def step_with(self, parts: Iterable[ClipResult], count: int) -> None:
        """Take the step of the current samples, whose clipped sums a recording makes.

        The next replay overwrites them, so that a step which waits for more samples gets a copy.

        Args:
            parts: the sums of one part of the samples after the other.
            count: number of parts.

        Raises:
            PrivacyError: as ``step``.
        """

        def close() -> None:
            self.capture.check_closed()
            alone = self.batches.final and self.dp_step.sums is None and count == 1
            for sums in parts:
                held = sums if alone else replace(sums, sums=tuple(t.clone() for t in sums.sums))
                self.dp_step.add(sum=held)

        self._take_step(close)

    def step_by(self, replay: Callable[[], None]) -> None:
        """Take the step of the current samples, a whole logical batch, which a recording releases.

        Args:
            replay: enters the release into the ledger, clips, sums, noises and updates.

        Raises:
            PrivacyError: as ``step``.
        """
        self._take_step(self.capture.check_closed, replay)

    def _take_step(
        self, close: Callable[[], None], release: Callable[[], None] | None = None
    ) -> None:
        """Let ``close`` add the sums of the current samples; release a whole logical batch.

        Samples of a release that fails half-way have had their step, too: it is in the ledger.
        """
        before = self.dp_step.steps
        recording = torch.is_grad_enabled()
        self.turns.take()
        torch._C._set_grad_enabled(False)  # torch.no_grad() in a tenth of its time
        try:
            self.batches.check_step()
            with without_torch_function():
                self._check_parameters()
                if self.between.held:
                    self.between.check()
                close()
                if self.batches.final:
                    (release or self._release)()
                    if self.dp_step.steps >= self.between.next:
                        self._keep_contents()
        except BaseException:
            if self.dp_step.steps != before:
                self.batches.step_taken()
            raise
        else:
            self.capture.loss_scale = 1.0
            self.batches.step_taken()
        finally:
            torch._C._set_grad_enabled(recording)
            self.turns.give()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]

    def _keep_contents(self) -> None:
        """Keep parameters and state, to see whether the loop writes into them."""
        if self.processes is None and self.sharded is None:
            self.between.keep(self.dp_step.steps)

    def _close(self) -> None:
        """Clip and sum what was captured of the current samples."""
        self._take_over()
        if self.sharded is not None and self.capture.expressions:
            self.sharded.unshard()  # expressions are led back through the parameters' values
        close_into(self.dp_step, self.capture)

    def _plan(self) -> Plan:
        """Return the plan in force, with what a schedule has changed since the last step."""
        self._take_over()
        return self.dp_step.plan

    def rescale(self, scale: float) -> None:
        """Record the factor by which the loss of the current samples was multiplied.

        Raises:
            PrivacyError: clip groups were finished in the backward pass without knowing it.
        """
        if self.batches.in_pieces and scale != self.capture.loss_scale:
            raise PrivacyError(
                "GradScaler",
                expected="whole batches of the loader when the loss is scaled",
                got="pieces of a batch, clipped before the scale is known",
                remedy="Pass max_physical_batch_size to make_private instead of cutting batches, "
                "or use bfloat16, which needs no scale.",
            )
        if self.capture.early is not None and scale != self.capture.loss_scale:
            raise PrivacyError(
                "GradScaler",
                expected="clipping='flat' or 'automatic' when the loss is scaled",
                got=self.dp_step.plan.clipping,
                remedy="Choose clipping='flat' or 'automatic', or bfloat16, which needs no scale: "
                "groups are clipped during the backward pass, before the scale is known.",
            )
        self.capture.loss_scale = scale

    def _release(self) -> None:
        if not self.dp_step.steps and any(map(_has_stepped, self.optimizer.state.values())):
            warnings.warn(PAST, PrivacyWarning, stacklevel=4)
        if self.processes is None and self.sharded is None and self.packed.step(self.dp_step):
            return
        public, scale = dict(self.capture.public_gradients), self.capture.loss_scale
        if self.sharded is not None:
            self.dp_step.shards = self.sharded.held()
            plain = list(self.dp_step.shards.tensors)
        else:
            plain = [p.detach() for p in self.capture.parameters]
            self.dp_step.params = plain  # anew: the user may have moved the model
        some_public = bool(public)
        if some_public:
            self.dp_step.ledger.assume(PUBLIC)
        if self.processes is not None:
            numbers = (self.dp_step.mechanism, scale, numbers_of(self.optimizer))
            settings = (self.dp_step.steps, *numbers)
            some_public = self.processes.agree(settings, self.dp_step.key, some_public)
            if some_public and self.sharded is None:  # FSDP has averaged its shards itself
                public = self.processes.mean(public, plain)
        seen = some_public or _has_hooks(self.optimizer)
        groups = None if seen else groups_of(self.optimizer, self._places, plain)
        if groups is None:
            self.capture.program.give_sums_away()
            released = self.dp_step.finish()
            assert released is not None  # the private step has no optimizer of its own
            for i, gradient in enumerate(released):
                if gradient is not None and i in public:
                    gradient.add_(public[i], alpha=1 / scale)
            self._step_with(released)
        else:

            def fused(optimizer: torch.optim.Optimizer) -> None:
                self.dp_step.finish([(g.indices, g.rule, g.state) for g in groups])
                for group in groups:
                    group.commit(optimizer)
                self.packed.pack(self.dp_step, groups)

            torch.optim.Optimizer.profile_hook_step(fused)(self.optimizer)
        self.capture.public_gradients.clear()

    def _step_with(self, gradients: list[Tensor | None]) -> None:
        """Run the optimizer's own step on these gradients."""
        trained = [p for p in self.capture.parameters if p.requires_grad]
        try:
            for param in trained:
                gradient = gradients[self._places[id(param)]]
                param.grad = None if gradient is None else like(gradient, param)
            self.turns.give()  # hooks of the step may evaluate the module, and wait for a thread
            self._own_step()
        finally:
            for param in trained:
                param.grad = None
            self.turns.take()

    def _check_parameters(self) -> None:
        optimizer = self.optimizer
        check_settings(optimizer.param_groups, optimizer.__dict__, self._shown)
        ours = self._places.__contains__
        for k, group in enumerate(optimizer.param_groups):
            if all(map(ours, map(id, group["params"]))):
                continue
            for param in group["params"]:
                if param.requires_grad and id(param) not in self._places:
                    raise PrivacyError(
                        f"optimizer.param_groups[{k}]",
                        expected="the parameters that were trainable in make_private",
                        got=f"another one of shape {list(param.shape)}",
                        remedy="Call engine.detach(), then make_private with everything that is to "
                        "be trained; otherwise its gradients would not be clipped.",
                    )

    def _take_over(self) -> None:
        """Adopt the numbers that the user or a schedule changed on the optimizer."""
        if self.assumed is not None:
            self.assumed()
        size = self.optimizer.__dict__[SIZE]
        if size != self.dp_step.expected_batch_size:
            raise InvalidInput(
                f"optimizer.{SIZE}",
                expected=f"{self.dp_step.expected_batch_size}, which make_private was told",
                got=size,
                remedy="Leave it: batch_size of the DataLoader sets what sums are divided by, and "
                "expected_batch_size= in make_private without a loader.",
            )
        given = self.optimizer.__dict__
        for name, known in self._shown.items():
            if given[name] != known:
                now = {name: given[name] for name in self._shown}
                self.dp_step.mechanism = replace(self.dp_step.mechanism, **now)  # type: ignore[type-var]
                self.show()
                break

    def change(self, name: str, value: Any) -> None:
        """Set ``noise_multiplier`` or ``max_grad_norm`` at once.

        Raises:
            DPKernError: an impossible value, or a change within a logical batch; nothing changed.
        """
        self.dp_step.mechanism = self.check_change(name, value)
        self.show()

    def check_change(self, name: str, value: Any) -> Mechanism:
        """Return the mechanism with another ``noise_multiplier`` or ``max_grad_norm``.

        Raises:
            InvalidInput: an impossible value, or one that the mechanism does not have.
        """
        if name not in self._shown:
            raise InvalidInput(
                name,
                expected=f"one of {', '.join(self._shown)}",
                got=f"a mechanism {type(self.dp_step.mechanism).__name__} without it",
                remedy="Use a schedule of a number that the mechanism has.",
            )
        return replace(self.dp_step.mechanism, **{name: value})  # type: ignore[type-var]

    def show(self) -> None:
        """Show the numbers in use on the optimizer."""
        mechanism = self.dp_step.mechanism
        self._shown = {n: getattr(mechanism, n) for n in SCHEDULED if hasattr(mechanism, n)}
        self.optimizer.__dict__.update(self._shown)
        self.optimizer.__dict__[SIZE] = self.dp_step.expected_batch_size


def adapter_of(optimizer: object) -> OptimizerAdapter | None:
    """Return the adapter of a private optimizer; None for any other object."""
    found: OptimizerAdapter | None = getattr(optimizer, "__dict__", {}).get(_MINE)
    return found


def _has_stepped(state: Mapping[str, Any]) -> bool:
    """Whether a parameter's state in an optimizer is more than what some are born with."""
    if "step" in state:
        return float(state["step"]) > 0
    return any(value is not None for value in state.values())


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def check_optimizer(optimizer: object, capture: Capture) -> None:
    """Check that an optimizer takes one gradient per step, over the capture's parameters.

    Raises:
        InvalidInput: it does not, it wraps another one, it is private already, or it has other
            parameters.
    """
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, _REFUSED):
        raise InvalidInput(
            "optimizer",
            expected="a torch.optim.Optimizer that takes one dense gradient per step",
            got=type(optimizer).__name__,
            remedy="Use SGD, Adam, AdamW or another first-order optimizer; LBFGS asks for the "
            "gradient of the same samples many times.",
        )
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise InvalidInput(
            "optimizer",
            expected="the torch optimizer itself",
            got=f"{type(optimizer).__name__}, which wraps one",
            remedy="Pass the one inside (optimizer.optimizer), or call make_private before "
            "accelerator.prepare(model, optimizer).",
        )
    if adapter_of(optimizer) is not None:
        raise InvalidInput(
            "optimizer",
            expected="one that is not private yet",
            got="an optimizer of another make_private",
            remedy="Call detach() on that engine first.",
        )
    if any(isinstance(p, PrivateParameter) for p in capture.parameters):
        raise InvalidInput(
            "module",
            expected="one that is not private yet",
            got="a module of another make_private",
            remedy="Call detach() on that engine first.",
        )
    trained = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
    names = {id(p): name for p, name in zip(capture.parameters, capture.names, strict=True)}
    foreign = [list(p.shape) for p in trained if id(p) not in names]
    if foreign:
        raise InvalidInput(
            "optimizer",
            expected="parameters of the module only",
            got=f"{len(foreign)} others, of shapes {foreign[:3]}",
            remedy="Make the optimizer from module.parameters().",
        )
    held = {id(p) for p in trained}
    missing = [name for key, name in names.items() if key not in held]
    if missing:
        raise InvalidInput(
            "optimizer",
            expected="every trainable parameter of the module",
            got=f"none of {', '.join(missing[:5])}",
            remedy="Add them to the optimizer, or freeze them with requires_grad_(False).",
        )


def _keep_scalers_away() -> None:
    """Tell ``GradScaler`` that all gradients of a private optimizer are finite.

    It then never skips a step and never changes its scale: both would depend on the data. The
    scale in use is divided out of the samples' gradients; samples that overflow are dropped.
    ``_unscale_grads_`` is the one place that ``unscale_`` and ``step`` have in common.
    """
    scaler_type = torch.amp.GradScaler
    own = scaler_type._unscale_grads_
    if getattr(own, "_knows_private", False):
        return

    @functools.wraps(own)
    def unscale(
        self: Any, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> Any:
        adapter = adapter_of(optimizer)
        if adapter is None:
            return own(self, optimizer, inv_scale, found_inf, allow_fp16)
        self.set_growth_interval(_NEVER)
        adapter.rescale(self.get_scale())
        return {found_inf.device: found_inf}

    unscale._knows_private = True  # type: ignore[attr-defined]
    scaler_type._unscale_grads_ = unscale  # type: ignore[method-assign]

"""What the parameters' uses leave behind, sorted by parameter and by sample.

The samples are those of the last hand-out. Everything that arrives until the next one belongs to
them: row b of every batch is sample b. Without a loader that hands out, each forward pass of the
module brings new samples, and a second one is refused until the first was closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._functorch import config as compiler_config

from ..base.errors import InvalidInput, PrivacyError, UnsupportedModule
from .clip_norms import with_clip_norm
from .graph_capture import GraphCapture
from .guard import ForwardGuard
from .hooks import Hook
from .local import local
from .module_parameters import ModuleParameters, no_gradient
from .parameter import PrivateParameter, applied, replaced, tensors_in, without_torch_function
from .per_sample_gradients import ExplicitGradients
from .probe import INPUT, Probe, WatchedInput
from .program.program import Program
from .routes import KeepBudget
from .sum_store import SumStore
from .uncompiled import show_forward
from .uses import (
    BackwardClipper,
    CapturedGradients,
    CapturedOp,
    GradientSource,
    GradientTarget,
    ParameterSource,
)

if TYPE_CHECKING:
    from .provenance import ModuleBoundary


class Capture:
    """Watches the trainable parameters of a module.

    Args:
        module: the model; its trainable parameters become private on ``attach``.
        loss_reduction: ``mean`` or ``sum``: how the loss treats the samples of a batch.
        keep_budget: memory for per-sample gradients that are kept; see ``routes.KeepBudget``.

    Raises:
        InvalidInput: not a module, or an unknown reduction.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        loss_reduction: str = "mean",
        keep_budget: int | float = 0.25,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise InvalidInput(
                "module",
                expected="a torch.nn.Module",
                got=type(module).__name__,
                remedy="Pass the model itself.",
            )
        if loss_reduction not in ("mean", "sum"):
            raise InvalidInput(
                "loss_reduction",
                expected="'mean' or 'sum'",
                got=loss_reduction,
                remedy="Say how the loss reduces over the samples of a batch.",
            )
        self.module = module
        self.loss_reduction = loss_reduction
        named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.slots = [ParameterSource(self, i, n, p) for i, (n, p) in enumerate(named)]
        self.expressions: list[GradientSource] = []
        self.budget = KeepBudget(keep_budget)
        self.sum_store = SumStore()
        self.anchor = torch.zeros((), requires_grad=True)
        """Makes outputs require gradients although the parameters are not in their graph."""
        self.anchor_node = torch.autograd.graph.get_gradient_edge(self.anchor).node
        self.batch: int | None = None
        """Samples in the current hand-out or forward pass."""
        self.handed_out = False
        """Whether a loader names the samples."""
        self.probe: Probe | None = None
        self.collected: list[UnsupportedModule] | None = None
        """Where a rehearsal collects what would otherwise be raised."""
        self.public_gradients: dict[int, Tensor] = {}
        self.loss_scale = 1.0
        """What the loss was multiplied by (a gradient scaler); divided out of the gradients."""
        self.arrived_batch = 0
        """Samples that the gradients which arrived belong to."""
        self.make_backward_clipper: Callable[[], BackwardClipper] | None = None
        """Makes what finishes clip groups inside the backward pass; None waits for the end."""
        self.early: BackwardClipper | None = None
        self.before_arrivals: Callable[[], None] | None = None
        """Called before the first gradient of new samples is taken in."""
        self.p = 2
        """The norm that gradients are clipped by."""
        self.any_rank: Callable[[bool], bool] | None = None
        """Whether any process says yes, where backward passes need all processes."""
        self.on_use: Callable[[CapturedOp, Tensor], None] | None = None
        """Who is told of every use and its input."""
        self.boundary: ModuleBoundary | None = None
        """Follows records from the loader to the module and on to the loss; None outside an
        engine."""
        self.norms_on_arrival = True
        """Whether a parameter's only record has its norm taken when it arrives."""
        self.joint_norms = False
        """Whether all parameters are clipped together, by norms that floating-point sums ask
        for."""
        self._ticket = 0
        self._admitted: int | None = None
        self._public = False
        self._skipped = False
        self._verified: set[tuple[Any, ...]] = set()
        self._inconclusive: set[tuple[Any, ...]] = set()
        self._fresh: list[CapturedOp] = []
        self._watch_input = True
        self._watch_node: Any = None
        """Where the gradient of a watched input that needs none of its own would arrive."""
        self._input_storages: set[int] = set()
        self._unverified: dict[tuple[Any, ...], str] = {}
        self._hooks: list[Any] = []
        self._shows_forward = False
        self.guard = ForwardGuard(self)
        """Probes forward passes and watches the module's state."""
        self._held = ModuleParameters(module)
        self.program = Program(self)
        """Replays steps of a structure that was met before."""
        self.graphs = GraphCapture(self)
        """Captures uses inside graphs of ``torch.compile``."""

    @property
    def watching(self) -> bool:
        """Whether uses are captured now."""
        return (
            bool(self._hooks) and not self._public and not self._skipped and not self.guard.running
        )

    @property
    def attached(self) -> bool:
        """Whether the parameters are private."""
        return bool(self._hooks)

    @property
    def batch_number(self) -> int:
        """Counts the batches and pieces of batches whose samples entered."""
        return self._ticket

    @property
    def in_public(self) -> bool:
        """Whether passes use no private data now."""
        return self._public

    @property
    def captured(self) -> bool:
        """Whether anything arrived for the current samples."""
        return self._admitted is not None

    def attach(self) -> None:
        """Make the parameters private; calling it twice changes nothing."""
        if self._hooks:
            return
        from .layers import packed  # the rules stand on this module

        # The probe reads a graph that the backward pass reads again: compiled parts keep buffers.
        compiler_config.donated_buffer = False
        for slot in self.slots:
            slot.used.__class__ = PrivateParameter
            slot.used._private = slot  # type: ignore[attr-defined]
        self._shows_forward = show_forward(self.module)
        self._hooks = [
            self.module.register_forward_pre_hook(Hook(self._before_forward), with_kwargs=True),
            self.module.register_forward_hook(Hook(self._after_any), always_call=True),
            self.module.register_forward_hook(Hook(self._after_forward), with_kwargs=True),
        ]
        self.guard.attach()
        enter = Hook(self._enter)
        self._hooks.append(
            self.module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        )
        for part in self.module.modules():
            if isinstance(part, nn.RNNBase):
                # Only the module knows how it sorted packed sequences.
                self._hooks += [
                    part.register_forward_pre_hook(packed.note_order, with_kwargs=True),
                    part.register_forward_hook(packed.forget_order, always_call=True),
                ]

    def detach(self) -> None:
        """Make them ordinary parameters again and forget what was captured."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._shows_forward:
            self._shows_forward = False
            self.module.__dict__.pop("forward", None)
        self.guard.detach()
        self.discard()
        for slot in self.slots:
            if type(slot.used) is PrivateParameter:
                del slot.used._private
                slot.used.__class__ = nn.Parameter  # type: ignore[assignment]

    def begin_batch(self, batch: int) -> None:
        """The loader hands out new samples: what comes from now on belongs to them."""
        if self.captured:
            raise PrivacyError(
                "data_loader",
                expected="the samples before these closed or discarded",
                got="gradients of samples that no optimizer.step() has seen",
                remedy="Call optimizer.step() after every batch of the loader.",
            )
        self.handed_out = True
        self.batch = batch
        self._next_samples()

    def begin_piece(self, records: int) -> None:
        """Only so many records of the batch are in the passes from now on."""
        self.batch = records
        self._next_samples()

    def look_again(self) -> None:
        """Modules or hooks have changed: every use counts as unseen."""
        self._verified.clear()
        self._watch_input = True
        self.graphs.forget()

    def skip_pass(self) -> None:
        """The next forward pass is an ordinary one: a gradient of it is found as a leak."""
        self._skipped = True

    def new_samples(self) -> None:
        """The next forward pass brings new samples, without a loader that says so."""
        self.handed_out = False
        self.batch = None
        self._next_samples()

    def discard(self) -> None:
        """Forget what arrived for the current samples, and public gradients."""
        self.discard_samples()
        self.public_gradients.clear()

    def discard_samples(self) -> None:
        """Forget what arrived for the current samples."""
        self.program.drop_arrivals()
        for source in (*self.slots, *self.expressions):
            source.arrivals.clear()
        self.expressions.clear()
        self.early = None
        self.budget.release()
        self._admitted = None
        self._unverified.clear()

    @contextmanager
    def public(self) -> Iterator[None]:
        """Passes in this block use no private data: their gradients are ordinary ones.

        Backward passes must end inside the block; their gradients are collected apart and join the
        next update without being clipped.
        """
        if not self._public:
            self._check_leaks()  # a private gradient must not pass for a public one
        before, self._public = self._public, True
        try:
            with self.guard.public():
                yield
        finally:
            self._public = before
            self._collect_public()

    def use(
        self, operation: str, targets: Sequence[GradientTarget | None], x: Tensor, **saved: Any
    ) -> CapturedOp:
        """Register one operation on ``x``, whose first dimension is the samples'.

        Raises:
            UnsupportedModule: the first dimension is not the batch, or a multiple of it.
        """
        batch = self.require_batch(operation, targets)
        rows = int(x.shape[0]) if x.dim() else 0
        folded = _fold(rows, batch)
        if x.dim() == 0 or folded is None:
            names = ", ".join(t.source.name for t in targets if t is not None)
            raise UnsupportedModule(
                f"{names} in {operation}",
                expected=f"an input whose first dimension is the batch of {batch} samples",
                got=f"shape {list(x.shape)}",
                remedy="Keep the batch first (batch_first=True), with all rows of one sample "
                "next to each other.",
            )
        # Frozen since the capture was made: part of the operation, without a gradient.
        targets = [t if t is not None and t.source.watched else None for t in targets]
        names_key = tuple((t.source.name, t.rows) if t else None for t in targets)
        site = (operation, names_key, x.dim(), folded > 1)
        first = x.grad_fn is not None and x.grad_fn is self._watch_node
        use = CapturedOp(self, operation, tuple(targets), self._ticket, batch, site, saved, first)
        if torch._C._current_graph_task_id() == -1:  # not a segment that runs again in backward
            self.budget.activations += x.nbytes
            for target in targets:
                if target is not None:
                    target.source.uses += 1
        if site not in self._verified:
            self._fresh.append(use)
        if self.on_use is not None:
            self.on_use(use, x)
        self.program.note(use, x)
        self.graphs.heard(use)
        return use

    def given(self, tensor: Tensor) -> bool:
        """Whether this shows one of the tensors that the module was called with."""
        return tensor.untyped_storage().data_ptr() in self._input_storages

    def verified(self, use: CapturedOp) -> bool:
        """Whether a probe has seen that this use keeps the samples apart."""
        return use.batch < 2 or use.site in self._verified or use.site in self._inconclusive

    def require_batch(self, operation: str, targets: Sequence[GradientTarget | None]) -> int:
        """The number of samples, or an error if nobody told."""
        if self.batch is None:
            names = ", ".join(t.source.name for t in targets if t is not None)
            raise PrivacyError(
                f"{names} in {operation}",
                expected="a known batch",
                got="a parameter used outside the module's forward pass",
                remedy="Call the module itself, or iterate over the loader of make_private.",
            )
        return self.batch

    def check_current_batch(self, use: CapturedOp, g: Tensor) -> None:
        """Refuse what belongs to other samples than the current ones."""
        expected = self._ticket if self.handed_out else self._admitted
        if expected is not None and use.batch_id != expected:
            if self.boundary is not None and self.boundary.in_pieces:
                raise PrivacyError(
                    f"backward through {use.names}",
                    expected="one backward pass for each piece of the batch, before the next one",
                    got="a backward pass of an earlier piece",
                    remedy="Call backward() on each piece's loss before the next piece enters the "
                    "module, or pass max_physical_batch_size to make_private.",
                )
            raise PrivacyError(
                f"backward through {use.names}",
                expected="gradients of the current samples",
                got="a backward pass of other samples",
                remedy="Call optimizer.step() first. Passes that touch no private data belong in "
                "engine.public(); samples without the engine's loader in engine.new_samples().",
            )
        if self.boundary is not None and not self.boundary.losses.running:
            raise PrivacyError(
                "backward",
                expected="loss.backward() of a loss made from the module's outputs by torch "
                "operations",
                got="a backward pass of another tensor, whose samples cannot be told apart",
                remedy="Return from forward() all that the loss needs, and call backward() on the "
                "loss itself. Terms computed otherwise, one for each sample, pass through "
                "engine.adopt(terms).",
            )
        if self._admitted is None and self.before_arrivals is not None:
            self.before_arrivals()
        self._admitted = use.batch_id
        self.arrived_batch = use.batch
        # Behind zero weights there is nothing to verify, and nothing to protect.
        if not self.verified(use) and bool(g.any()):
            self._unverified[use.site] = use.names

    def take_norm_if_only_use(self, source: GradientSource, arrival: CapturedGradients) -> None:
        """Take the norm while the operands are in the cache, if this is the only use."""
        record = arrival.record
        if not isinstance(source, ParameterSource):
            return
        if self.early is None and self.make_backward_clipper is not None:
            self.early = self.make_backward_clipper()
        alone = source.uses <= 1 and len(source.arrivals) == 1 and not source.indirect
        release = source.release
        # A centre is one of each sample's own loss, whose scale may become known later.
        whole = arrival.rows is None and (release is None or release.centre is None)
        if alone and whole and self.norms_on_arrival:
            arrival.record = record = with_clip_norm(source, record, self)
            if not isinstance(record, ExplicitGradients) or record.squares is not None:
                arrival.square = record.squared_norms()
        if self.early is not None:
            self.early.on_gradient(source)

    def norms_add_up(self, targets: Sequence[GradientTarget | None]) -> bool:
        """Whether only the sum of the squared norms of what arrives there now will be asked for:
        all of it is clipped together, and nothing else arrives at its parameters."""
        if not (self.norms_on_arrival and self.joint_norms and self.p == 2):
            return False
        for target in targets:
            if (
                target is None
                or target.rows is not None
                or not isinstance(target.source, ParameterSource)
            ):
                return False
            slot = target.source
            if slot.uses > 1 or slot.arrivals or slot.indirect or slot.release is not None:
                return False
        return True

    def check_closed(self) -> None:
        """The guards of every step: nothing leaked past the capture, every use was verified.

        Raises:
            PrivacyError: one of them failed; nothing has been released.
        """
        self._check_leaks()
        if self._unverified:
            raise PrivacyError(
                ", ".join(dict.fromkeys(self._unverified.values())),
                expected="uses that the check of the batch dimension has seen",
                got="a use outside the module's forward pass, or without a tensor output",
                remedy="Call the module itself and let it return a tensor whose first dimension "
                "is the batch (one that computes its loss returns the logits beside the loss), or "
                "call engine.validate(function, *inputs) first.",
            )

    def _check_leaks(self) -> None:
        with without_torch_function():
            if self._held.have_no_gradient() and no_gradient([s.used for s in self.slots]):
                return
            named = self.module.named_parameters()
            leaked = [n for n, p in named if p.requires_grad and p.grad is not None]
            leaked += [s.name for s in self.slots if s.used.grad is not None]
        if leaked:
            raise PrivacyError(
                "backward",
                expected="no ordinary gradient on any parameter",
                got=f"one on {', '.join(list(dict.fromkeys(leaked))[:5])}",
                remedy="Use the parameters through torch operations in Python (no TorchScript, no "
                "retained graphs of public passes), and end public backward passes inside "
                "engine.public().",
            )

    def verify(self, output: Any, *, idle: bool = False) -> None:
        """Probe new uses: the gradient of one sample's output must stay in that sample's rows.

        Where processes share every backward pass, ``idle`` ones join the others'.

        Raises:
            UnsupportedModule: it does not; lists every finding.
        """
        batch = self.batch or 0
        fresh = [use for use in self._fresh if use.batch_id == self._ticket]
        self._fresh.clear()
        idle = idle or batch < 2
        if idle and self.any_rank is None:
            return
        probe = Probe(batch, fresh, idle=idle)
        self.probe = probe
        try:
            probe.run(output, self.anchor, self.any_rank)
            if self.any_rank is None and not idle and not probe.findings:
                probe.compare(output, self.anchor)
        finally:
            self.probe = None
        if idle:
            return
        self._fresh.extend(probe.waiting)  # another output may lead there
        error = probe.error()
        if error is None:
            self._verified |= probe.seen
            self._inconclusive = probe.clouded
            self._watch_input = bool(probe.dull) or not probe.seen
        self.report(error)

    def report(self, error: UnsupportedModule | None) -> None:
        """Raise, or collect in a rehearsal."""
        if error is None:
            return
        if self.collected is None:
            raise error
        self.collected.append(error)

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Before all other hooks: find out whose rows come in."""
        if self.guard.running:
            return None
        self._skipped = False
        self.graphs.end()  # of a pass that failed
        changed = None
        if self.boundary is not None and self.collected is None:
            changed = args, kwargs = self.boundary.enter(args, kwargs)
        self.guard.before(args, kwargs)
        return changed

    def _before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self.guard.running:
            return None
        self._watch_node = None
        if not torch.is_grad_enabled():
            return None
        if self._public or self._skipped:
            self.graphs.skip()
            return None
        rows = next((int(t.shape[0]) for t in tensors_in((args, kwargs)) if t.dim()), None)
        self._input_storages = {t.untyped_storage().data_ptr() for t in tensors_in((args, kwargs))}
        if self.handed_out:
            # Evaluation with other samples: their gradients would be caught as leaked.
            fits = rows is None or _fold(rows, self.batch or 0) is not None
            self._skipped = not fits and not module.training
        else:
            self._next_samples()
            self.batch = rows
            if self.boundary is not None and self.boundary.entered_records is not None:
                self.batch = self.boundary.entered_records
        if self._skipped:
            self.graphs.skip()
        else:
            self.graphs.begin(args, kwargs)
        watch = self._watch_input and rows == self.batch and not self._skipped
        watch = watch and not self.graphs.active
        return self._watched((args, kwargs)) if watch else None

    def _watched(
        self, arguments: tuple[tuple[Any, ...], dict[str, Any]]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments, the first tensor among them such that the probe sees its gradient."""
        first = next((t for t in tensors_in(arguments) if t.dim()), None)
        if first is None or not first.is_floating_point():
            return None
        use = CapturedOp(self, "the input of the module", (), self._ticket, self.batch or 0, INPUT)
        copied = applied(WatchedInput, self.anchor, use, first)
        self._watch_node = None if first.requires_grad else copied.grad_fn
        watched: tuple[tuple[Any, ...], dict[str, Any]] = replaced(arguments, first, copied)
        return watched

    def _after_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        if self.guard.running:
            return None
        if torch.is_grad_enabled() and not self._public:
            # Within reentrant checkpoints uses show only in the backward pass.
            needed = self.watching and (bool(self._fresh) or self._watch_input)
            if needed or self.any_rank is not None:
                self.verify(output, idle=not needed)
        made, followed = output, self.boundary if self.collected is None else None
        if (
            followed is not None
            and not self._public
            and (not self._skipped or followed.in_placeholder)
        ):
            output = followed.leave(output)
        self._skipped = False
        self.guard.after(args, kwargs, made)
        return output

    def _after_any(self, *_: Any) -> None:
        if not self.guard.running:
            self.graphs.end()

    def is_last_hook(self) -> bool:
        """Whether nothing changes the module's output after ``_after_forward``."""
        last = next(reversed(self.module._forward_hooks.values()), None)
        return isinstance(last, Hook) and last.call == self._after_forward and not _GLOBAL_HOOKS

    def _next_samples(self) -> None:
        self.program.next_samples()
        self._ticket += 1
        self._inconclusive = set()
        self.budget.activations = 0
        for slot in self.slots:
            slot.uses = 0
            slot.indirect = False
        if not self.captured:
            self.expressions.clear()

    def _collect_public(self) -> None:
        with without_torch_function():
            for slot in self.slots:
                gradient = slot.parameter.grad
                if gradient is None:
                    continue
                slot.parameter.grad = None
                if slot.index in self.public_gradients:
                    gradient = self.public_gradients[slot.index] + local(gradient)
                self.public_gradients[slot.index] = local(gradient)


_GLOBAL_HOOKS = nn.modules.module._global_forward_hooks


def _fold(rows: int, batch: int) -> int | None:
    """How many rows each sample has, or None if they do not divide evenly."""
    if batch == 0:
        return 1 if rows == 0 else None
    return rows // batch if rows and rows % batch == 0 else None

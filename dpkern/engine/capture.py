"""Collect per-sample gradient information during the backward pass, grouped by parameter.

The private loader defines the current batch. Until it yields the next one, position b of every
captured tensor belongs to sample b. Without a loader, each forward pass of the module brings new
samples, and a second one is refused until the first was closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._functorch import config as compiler_config

from ..base.errors import InvalidInput, PrivacyError, UnsupportedModule
from . import torch_callers  # noqa: F401 (its refusals register themselves)
from .graph_capture import GraphCapture
from .guard import ForwardGuard
from .local import local
from .module_parameters import ModuleParameters, no_gradient
from .nodes_between import nodes_between
from .parameter import PrivateParameter, has_hooks, warn_of_hooks, without_torch_function
from .passes import ForwardPasses, rows_of_each
from .per_sample_gradients import (
    ExplicitGradients,
    LinearGradients,
    PerSampleGradients,
    squared_norms,
)
from .program.program import Program
from .release_norms import with_clip_norm
from .routes import KeepBudget
from .row_owners import GatheredRows, rows_of
from .sum_store import SumStore
from .use_counts import UseCounts
from .uses import (
    BackwardClipper,
    CapturedGradients,
    CapturedOp,
    GradientSource,
    GradientTarget,
    ParameterSource,
)
from .verification import Verification

if TYPE_CHECKING:
    from .padded_rows import RowPadding, StaysAsTested
    from .provenance import ModuleBoundary


class Capture:
    """The capture of the per-sample gradients of a module's trainable parameters.

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
        keep_budget: int | float | None = None,
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
                remedy="Pass 'mean' or 'sum', as the loss reduces over the samples of a batch.",
            )
        self.module = module
        self.loss_reduction = loss_reduction
        named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.slots = [ParameterSource(self, i, n, p) for i, (n, p) in enumerate(named)]
        self.expressions: list[GradientSource] = []
        self.samples_apart = False
        """Whether gradients of expressions are led back, and release coordinates made, one sample
        at a time: those of one sample then have the same bits in every batch."""
        self.budget = KeepBudget(keep_budget)
        self.use_counts = UseCounts()
        self.sum_store = SumStore()
        self.anchor = torch.zeros((), requires_grad=True)
        """Leaf of every captured op, so that outputs require gradients although the parameters are
        not in their graph."""
        self.anchor_node = torch.autograd.graph.get_gradient_edge(self.anchor).node
        self.batch: int | None = None
        """Number of samples in the current batch or forward pass; None before the first one."""
        self.handed_out = False
        """Whether ``begin_batch`` begins new samples; else each forward pass does."""
        self.verification = Verification()
        self.collected: list[UnsupportedModule] | None = None
        """Errors that a dry run collects; None outside a dry run, where they are raised."""
        self.public_gradients: dict[int, Tensor] = {}
        self.loss_scale = 1.0
        """Factor on the loss (of a gradient scaler), which is divided out of the gradients."""
        self.closed_batches = 0
        """Batches whose gradients were clipped and summed."""
        self.arrived_from: int | None = None
        """The number of the batch whose gradients arrived; None if nothing did."""
        self.arrived_batch = 0
        """Number of samples that the captured gradients belong to."""
        self.arrived_padded = 0
        """Number of them that are rows of zeros."""
        self.make_backward_clipper: Callable[[], BackwardClipper] | None = None
        """Maker of the object that finishes clip groups inside the backward pass; None leaves them
        to the step."""
        self.early: BackwardClipper | None = None
        self.before_arrivals: Callable[[], None] | None = None
        """Callback before the first gradient of new samples is captured."""
        self.p = 2
        """Order of the norm that is clipped, 1 or 2."""
        self.any_rank: Callable[[bool], bool] | None = None
        """Function that tells whether any process says yes; None where each process runs backward
        passes by itself."""
        self.on_use: Callable[[CapturedOp, Tensor], None] | None = None
        """Callback that receives every captured op and its input."""
        self.boundary: ModuleBoundary | None = None
        """The boundary that follows records from the loader to the module and on to the loss; None
        outside an engine."""
        self.norms_on_arrival = True
        """Whether a parameter's only record has its norm taken when it arrives."""
        self.joint_norms = False
        """Whether all parameters are clipped together, so that several may share one norm."""
        self.recorded = False
        """Whether sources may hold uses or gradients: a replayed step leaves none with them."""
        self.square_of: Callable[[PerSampleGradients], Tensor] = squared_norms
        """The function that makes a record's share of its clip group's squared norms."""
        self.unscaled = False
        """Whether backward passes undo a mean over the samples before it rounds anything."""
        self.mean_undone = False
        """Whether what arrived is of such passes."""
        self.has_half = False
        """Whether the current samples meet float16, which gradients without a mean may exceed."""
        self.row_padding: RowPadding | None = None
        """Fills batches up on their way into the module; None leaves them as they are."""
        self.padded = 0
        """Rows of zeros behind the samples of the last training pass."""
        self.is_padded = False
        """Whether that pass has a number of rows that padding admits."""
        self.filling: Tensor | None = None
        """Whether a row of the running passes is no record but fills their batch up, bool ``[B]``;
        None where all rows are records."""
        self.tested: StaysAsTested | None = None
        """Watches that steps stay what was tested."""
        self._ticket = 0
        self._public = False
        self._skipped = False
        self._gathered = GatheredRows()
        self.attached = False
        """Whether the parameters are private."""
        self.guard = ForwardGuard(self)
        """The guard that probes forward passes and watches the module's state."""
        self.passes = ForwardPasses(self)
        """The hooks that see the module's forward passes begin and end."""
        self._held = ModuleParameters(module)
        self.program = Program(self)
        """The program that replays steps of a structure met before."""
        self.graphs = GraphCapture(self)
        """The captured uses inside graphs of ``torch.compile``."""

    @property
    def watching(self) -> bool:
        """Whether uses are captured now."""
        return self.attached and not self._public and not self._skipped and not self.guard.running

    @property
    def records(self) -> int:
        """Samples of the last training pass, without the rows that fill it up."""
        return (self.batch or 0) - self.padded

    @property
    def batch_number(self) -> int:
        """The number of batches and pieces of batches whose samples have entered."""
        return self._ticket

    @property
    def in_public(self) -> bool:
        """Whether passes use no private data now."""
        return self._public

    @property
    def captured(self) -> bool:
        """Whether anything arrived for the current samples."""
        return self.arrived_from is not None

    def attach(self) -> None:
        """Make the parameters private; calling it twice changes nothing."""
        if self.attached:
            return
        # The probe and the backward pass read the same graph, so compiled parts keep its buffers.
        compiler_config.donated_buffer = False
        hooked = [slot.name for slot in self.slots if has_hooks(slot.used)]
        if hooked:
            warn_of_hooks(", ".join(hooked))
        for slot in self.slots:
            slot.used.__class__ = PrivateParameter
            slot.used._private = slot  # type: ignore[attr-defined]
        self.attached = True
        self.passes.attach()

    def detach(self) -> None:
        """Make the parameters ordinary again and forget what was captured."""
        self.attached = False
        self.passes.detach()
        self.discard()
        for slot in self.slots:
            if type(slot.used) is PrivateParameter:
                del slot.used._private
                slot.used.__class__ = nn.Parameter  # type: ignore[assignment]

    def begin_batch(self, batch: int) -> None:
        """Begin the loader's next batch: what is captured from now on belongs to its samples.

        Raises:
            PrivacyError: gradients of the samples before are pending.
        """
        if self.arrived_from is not None:
            raise PrivacyError(
                "data_loader",
                expected="optimizer.step() between batches",
                got="a new batch while gradients are pending",
                remedy="Call optimizer.step() once per batch; to accumulate, raise batch_size and "
                "pass max_physical_batch_size.",
            )
        self.handed_out = True
        self.batch = batch
        self.next_samples()

    def begin_piece(self, records: int) -> None:
        """Begin a piece of the batch with this number of records."""
        self.batch = records
        self.next_samples()

    def look_again(self) -> None:
        """Count every use as unseen, because modules or hooks have changed."""
        self.verification.forget()
        self._gathered.forget()
        self.graphs.forget()

    def skip_pass(self) -> None:
        """Capture nothing of the next forward pass; gradients of it are refused as leaks."""
        self._skipped = True

    def new_samples(self) -> None:
        """Let each forward pass bring new samples from now on, without a loader."""
        self.handed_out = False
        self.batch = None
        self.next_samples()

    def discard(self) -> None:
        """Forget what arrived for the current samples, and public gradients."""
        if self.recorded or self.mean_undone or self.arrived_from is not None:
            self.discard_samples()
        self.public_gradients.clear()

    def discard_samples(self) -> None:
        """Forget what arrived for the current samples; expressions that gradients come to later
        join again."""
        run = self.program.run
        if run.order or run.task is not None:
            run.drop_arrivals()
        if self.recorded:
            for source in (*self.slots, *self.expressions):
                source.arrivals.clear()
            self.expressions.clear()
        self.budget.used = 0
        self.early = None
        self.arrived_from = None
        self.mean_undone = False
        self.verification.unverified.clear()

    @contextmanager
    def public(self) -> Iterator[None]:
        """Treat the passes of this block as public: their gradients are ordinary ones.

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
            UnsupportedModule: the first dimension is not the batch, or a multiple of it; complex
                numbers.
        """
        again = torch._C._current_graph_task_id() != -1  # a segment that runs again in backward
        if again and self.boundary is not None:
            self.boundary.losses.check_segment(self.boundary.current)
        batch = self.require_batch(operation, targets)
        rows = int(x.shape[0]) if x.dim() else 0
        folded = rows_of_each(rows, batch)
        names = ", ".join(t.source.name for t in targets if t is not None)
        if x.is_complex() or any(t is not None and t.source.is_complex for t in targets):
            raise _complex_numbers(names, operation)
        found, moves = self._gathered.owners(operation, names, x, batch, self._ticket)
        owners, each = (None, folded or 1) if found is None else (found.owners, found.each)
        if found is not None:
            operation, folded = f"{operation} of gathered rows", 2
        if x.dim() == 0 or folded is None:
            raise UnsupportedModule(
                f"{names} in {operation}",
                expected=f"an input whose first dimension is the batch of {batch} samples",
                got=f"shape {list(x.shape)}",
                remedy="Keep the batch first (batch_first=True), with all rows of one sample "
                "next to each other. In a model that has time first, dpkern.nn.batch_first(layer) "
                "does so for this layer.",
            )
        # Parameters frozen since the capture was made are part of the operation, without gradient.
        targets = [t if t is not None and t.source.watched else None for t in targets]
        names_key = tuple((t.source.name, t.rows) if t else None for t in targets)
        site = (operation, names_key, x.dim(), folded > 1)
        first = x.grad_fn is not None and x.grad_fn is self.verification.watch_node
        self.recorded = True
        kinds = () if again else nodes_between.kinds(x)
        nodes = 0 if again else nodes_between.take()
        moves = moves and not again
        use = CapturedOp(
            *(self, operation, tuple(targets), self._ticket, batch, site, saved, first),
            *(self.padded, rows, nodes, kinds, moves, owners, each),
        )
        if self.unscaled and _in_half(x):
            self.has_half = True
        if not again:
            if owners is None or self.budget.cached:  # else others' gathered rows would matter
                self.budget.activations += x.nbytes
            for target in targets:
                if target is not None:
                    target.source.count_use()
        self.verification.note(use, moves=moves, again=again)
        if self.on_use is not None:
            self.on_use(use, x)
        self.program.note(use, x)
        self.graphs.heard(use)
        return use

    def are_gathered(self, x: Tensor) -> bool:
        """Whether rows of an operand were gathered inside the module, in a way that is followed."""
        found = rows_of(x, self.batch or 0, self._ticket)
        return found is not None and found.gathered

    def require_batch(self, operation: str, targets: Sequence[GradientTarget | None]) -> int:
        """Return the number of samples.

        Raises:
            PrivacyError: a parameter is used outside the module's forward pass.
        """
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
        """Refuse a gradient of other samples than the current ones.

        Raises:
            PrivacyError: it is one, or the backward pass began at a tensor that is not a loss of
                the module's outputs.
        """
        expected = self._ticket if self.handed_out else self.arrived_from
        if expected is not None and use.batch_id != expected:
            if self.boundary is not None and self.boundary.in_pieces:
                raise self.boundary.earlier_piece(use.names)
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
        if self.arrived_from is None and self.before_arrivals is not None:
            self.before_arrivals()
        self.arrived_from = use.batch_id
        self.arrived_batch, self.arrived_padded = use.batch, use.padded
        self.verification.note_arrival(use, g)

    def takes_usual(self, batch_id: int, batch: int, padded: int, site: tuple[Any, ...]) -> bool:
        """Take note of a gradient that ``CapturedOp.wants`` accepts; False leaves that to it.

        Args:
            batch_id, batch, padded: the samples of its use, their number, and how many of them are
                rows of zeros.
            site: the place of the use.
        """
        known, boundary = self.verification, self.boundary
        expected = self._ticket if self.handed_out else self.arrived_from
        usual = (
            known.probe is None
            and site in known.sites
            and (expected is None or batch_id == expected)
            and (boundary is None or boundary.losses.running)
            and torch._C._will_engine_execute_node(self.anchor_node)
        )
        if not usual:
            return False
        if self.arrived_from is None and self.before_arrivals is not None:
            self.before_arrivals()
        self.arrived_from = batch_id
        self.arrived_batch, self.arrived_padded = batch, padded
        return True

    def take_norm_if_only_use(self, source: GradientSource, arrival: CapturedGradients) -> None:
        """Take the norm while the operands are in the cache, if this is the only use."""
        record = arrival.record
        if not isinstance(source, ParameterSource):
            return
        if self.early is None and self.make_backward_clipper is not None:
            self.early = self.make_backward_clipper()
        alone = source.uses <= 1 and len(source.arrivals) == 1 and not source.indirect
        release = source.release
        # A centre refers to each sample's own loss; a gradient scaler may tell its scale later.
        whole = arrival.rows is None and (release is None or release.centre is None)
        if alone and whole and self.norms_on_arrival:
            record = with_clip_norm(source, record, self)
            arrival.hold(record)
            shared = isinstance(record, LinearGradients) and record.shares_launch
            if self.square_of is squared_norms and shared:
                pass  # together with those of other layers
            elif not isinstance(record, ExplicitGradients) or record.squares is not None:
                arrival.square = self.square_of(record)
        if self.early is not None:
            self.early.on_gradient(source)

    def norms_add_up(self, targets: Sequence[GradientTarget | None]) -> bool:
        """Whether clipping needs only the sum of the squared norms over these targets.

        It does if all of them are clipped together and no other gradient reaches their parameters.
        """
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
        """Check that no gradient leaked past the capture or changed, and that uses were verified.

        Raises:
            PrivacyError: one did, or a use was not verified; nothing has been released.
        """
        self._check_leaks()
        if self.recorded:
            for source in (*self.slots, *self.expressions):
                source.check_operands()
        if self.verification.unverified:
            self.verification.check_arrivals()

    def _check_leaks(self) -> None:
        with without_torch_function():
            if no_gradient(self._held.all()) and no_gradient([*map(_USED, self.slots)]):
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
                "torch.autograd.Function of the model's own on them, as in LoHa, no retained "
                "graphs of public passes), end public backward passes inside engine.public(), "
                "and make a new engine where parameters train that were frozen before.",
            )

    def verify(self, output: Any, *, idle: bool = False) -> None:
        """Probe new uses: the gradient of one sample's output must stay in that sample's rows.

        Where processes share every backward pass, ``idle`` ones join the others'.

        Raises:
            UnsupportedModule: it does not; lists every finding.
        """
        error = self.verification.run(
            *(output, self.batch or 0, self._ticket, self.anchor, self.any_rank), idle=idle
        )
        self.report(error)

    def report(self, error: UnsupportedModule | None) -> None:
        """Raise the error, or collect it in a dry run."""
        if error is None:
            return
        if self.collected is None:
            raise error
        self.collected.append(error)

    def undo_mean(self, losses: Sequence[Tensor]) -> bool:
        """Whether the backward pass that begins undoes the mean of these losses.

        All passes of the same samples do, or none. Narrow losses cannot hold every number.
        """
        if self.arrived_from is None:
            mean = self.unscaled and self.loss_reduction == "mean" and not self.has_half
            for loss in losses:
                mean = mean and loss.dtype in _WIDE
            self.mean_undone = mean
        return self.mean_undone

    def loss_factor(self) -> float:
        """Return the factor from captured gradients to those of each sample's own loss."""
        mean = self.loss_reduction == "mean" and not self.mean_undone
        # No loss sees the rows that fill a batch up.
        records = self.arrived_batch - self.arrived_padded
        return (records if mean else 1) / self.loss_scale

    def next_samples(self) -> None:
        """Begin new samples: uses count anew."""
        self.program.next_samples()
        self._ticket += 1
        self.verification.begin_samples()
        self.has_half = False
        self.budget.activations = 0
        if self.recorded:
            for slot in self.slots:
                slot.uses = 0
                slot.indirect = False
            if not self.captured:
                self.expressions.clear()
                self.recorded = False

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


_USED = attrgetter("used")
_WIDE = frozenset((torch.float32, torch.float64))


def _complex_numbers(names: str, operation: str) -> UnsupportedModule:
    return UnsupportedModule(
        f"{names} in {operation}",
        expected="real numbers",
        got="complex ones",
        remedy="Compute with real and imaginary parts (z.real, z.imag) and put them together "
        "behind the parameters: torch.complex(a * c - b * d, a * d + b * c) is a product.",
    )


def _in_half(x: Tensor) -> bool:
    """Whether an operation on ``x`` runs in float16."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind) is torch.float16
    return x.dtype is torch.float16

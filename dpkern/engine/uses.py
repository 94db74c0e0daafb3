"""Captured uses of parameters: the sources of gradients, their targets and their samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from ..privacy.mechanisms.release import ReleaseMap
from .in_graph import TappedUse
from .operands import refuse_change, versions_of
from .per_sample_gradients import PerSampleGradients
from .row_owners import by_sample

if TYPE_CHECKING:
    from .capture import Capture


class GradientSource:
    """A parameter, or an expression of parameters, whose per-sample gradient is captured."""

    def __init__(self, capture: Capture, name: str, shape: Sequence[int]) -> None:
        self.capture = capture
        self.name = name
        self.shape = tuple(shape)
        self.uses = 0
        """Number of uses seen in the forward pass of the current samples."""
        self.indirect = False
        """Whether an expression of the current samples leads back here."""
        self.arrivals: list[CapturedGradients] = []

    @property
    def watched(self) -> bool:
        return self.capture.watching

    @property
    def is_complex(self) -> bool:
        """Whether its numbers are complex, which no parameter's are."""
        return False

    @property
    def operations(self) -> tuple[str, ...]:
        """Names of the operations that lead back to parameters, sorted; none for a parameter."""
        return ()

    def count_use(self) -> None:
        """Count a use in the forward pass of the current samples."""
        self.uses += 1

    def take(self, arrival: CapturedGradients) -> None:
        """Add gradients of the current samples."""
        self.arrivals.append(arrival)

    def check_operands(self) -> None:
        """Check that what arrived is what it was when it did.

        Raises:
            PrivacyError: an operand was changed in place since.
        """
        for arrival in self.arrivals:
            if versions_of(arrival.record) != arrival.versions:
                refuse_change(self.name)


class BackwardClipper(Protocol):
    """An object that finishes clip groups inside the backward pass."""

    def on_gradient(self, slot: ParameterSource) -> None:
        """Finish the parameter's clip group if this gradient was its last."""


class ParameterSource(GradientSource):
    """A private parameter as a source of per-sample gradients."""

    def __init__(self, capture: Capture, index: int, name: str, parameter: nn.Parameter) -> None:
        super().__init__(capture, name, parameter.shape)
        self.index = index
        self.parameter = parameter
        self.used = parameter
        """Tensor that operations use: the parameter, or the full-size one that shards fill."""
        self.target = GradientTarget(self)
        """Target of gradients of the whole parameter."""
        self.release: ReleaseMap | None = None
        """Release map of its sum; None adds the noise to the sum itself."""
        self.tapped: list[TappedUse] = []
        """Its uses in the running pass that a compiled graph may hold, in their order."""

    @property
    def watched(self) -> bool:
        return self.capture.watching and self.parameter.requires_grad


@dataclass
class CapturedGradients:
    """Captured gradients of a source, or of the range ``rows`` of it."""

    record: PerSampleGradients
    rows: tuple[int, int] | None = None
    square: Tensor | None = None
    """Contribution to the clip group's squared norms, float64 ``[B]``; None if not known yet."""
    versions: tuple[int, ...] = field(init=False)
    """The number of writes to each of the record's tensors before they were captured."""

    def __post_init__(self) -> None:
        self.hold(self.record)

    def hold(self, record: PerSampleGradients) -> None:
        """Hold these gradients as they are now."""
        self.record, self.versions = record, versions_of(record)


@dataclass(frozen=True)
class GradientTarget:
    """The target of a rule's gradients: a source, some of its rows, or its transpose."""

    source: GradientSource
    rows: tuple[int, int] | None = None
    transposed: bool = False


@dataclass(eq=False)
class CapturedOp:
    """A captured operation, with the samples that it belongs to and its gradients' targets."""

    capture: Capture
    operation: str
    targets: tuple[GradientTarget | None, ...]
    batch_id: int
    batch: int
    site: tuple[Any, ...]
    saved: dict[str, Any] = field(default_factory=dict)
    """Plain values that the rule's backward pass needs, no tensors."""
    is_module_input: bool = False
    """Whether its input is the module's, watched for the probe alone."""
    padded: int = 0
    """Number of its samples that are rows of zeros and fill the batch up."""
    rows: int = 0
    """Number of rows of its operand."""
    nodes: int = 0
    """Number of autograd nodes between the use before and this one."""
    kinds: tuple[type[Any], ...] = ()
    """Their kinds, on the way of the operand."""
    moves: bool = False
    """Whether rows may have been moved on that way by what the batch holds."""
    owners: Tensor | None = None
    """The sample of each row ``[rows]``, where rows were gathered; None if samples follow."""
    each: int = 0
    """Rows of every sample before any were gathered."""

    @property
    def names(self) -> str:
        return ", ".join(t.source.name for t in self.targets if t is not None)

    @property
    def filled(self) -> int:
        """Return as many rows as gathered ones are filled up to; 0: as a sample has at most.

        In exact arithmetic nothing may depend on the other samples (``KeepBudget.cached``).
        """
        return 0 if self.capture.budget.cached else self.each

    @property
    def passes_on(self) -> bool:
        """Whether the gradient of its input is needed."""
        return not self.is_module_input or self.capture.verification.probe is not None

    def wants(self, g: Tensor | None) -> bool:
        """Whether this output gradient is to be captured; a running probe looks at it instead."""
        if g is None:
            return False
        capture = self.capture
        if capture.verification.probe is not None:
            capture.verification.probe.look(self, g)
            return False
        if not torch._C._will_engine_execute_node(capture.anchor_node):
            return False  # torch.autograd.grad of inputs alone, which leaves parameters out
        capture.check_current_batch(self, g)
        return True

    def arrive(self, which: int, record: PerSampleGradients) -> None:
        """Add gradients to target number ``which``."""
        target = self.targets[which]
        if target is None:
            return
        source = target.source
        self.capture.recorded = True
        arrival = CapturedGradients(record, target.rows)
        source.take(arrival)
        self.capture.take_norm_if_only_use(source, arrival)

    def arrive_together(
        self,
        records: Mapping[int, PerSampleGradients],
        whole: Callable[[], PerSampleGradients] | None,
    ) -> None:
        """Add gradients to several targets.

        Args:
            records: the gradients by the number of their target.
            whole: makes an object whose squared norms are the sums of theirs. It gives the norms
                where only that sum is needed, and is dropped then. None takes each norm by itself.
        """
        targets = [self.targets[which] for which in records]
        if whole is None or not self.capture.norms_add_up(targets):
            for which, record in records.items():
                self.arrive(which, record)
            return
        self.capture.recorded = True
        squares = self.capture.square_of(whole())
        for target, record in zip(targets, records.values(), strict=True):
            assert target is not None
            target.source.take(CapturedGradients(record, square=squares))
            squares = torch.zeros_like(squares)

    def in_rows(self, x: Tensor) -> bool:
        """Whether torch reads the input in rows: a convolution has other code for channels last."""
        return not self.operation.startswith("conv") or x.is_contiguous()

    def per_batch(self, tensor: Tensor) -> Tensor:
        """Reshape ``[k B, ...] -> [B, k, ...]``: rows of one sample follow each other.

        Gathered rows are brought together, with zeros where a sample has fewer.
        """
        if self.owners is not None:
            return by_sample(tensor, self.owners, self.batch, self.filled)
        if not self.batch:
            return tensor[:, None]
        return tensor.reshape(self.batch, len(tensor) // self.batch, *tensor.shape[1:])

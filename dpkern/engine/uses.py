"""A parameter's uses: where gradients come from, where they go, and to whom they belong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from ..privacy.mechanisms.release import ReleaseMap
from .per_sample_gradients import PerSampleGradients

if TYPE_CHECKING:
    from .capture import Capture


class GradientSource:
    """Something whose per-sample gradient is wanted: a parameter or an expression of parameters."""

    def __init__(self, capture: Capture, name: str, shape: Sequence[int]) -> None:
        self.capture = capture
        self.name = name
        self.shape = tuple(shape)
        self.uses = 0
        """Uses seen in the forward pass of the current samples."""
        self.indirect = False
        """Whether an expression of the current samples leads back here."""
        self.arrivals: list[CapturedGradients] = []

    @property
    def watched(self) -> bool:
        return self.capture.watching


class BackwardClipper(Protocol):
    """Who finishes a clip group inside the backward pass."""

    def on_gradient(self, slot: ParameterSource) -> None:
        """A record of this parameter has arrived."""


class ParameterSource(GradientSource):
    """A private parameter."""

    def __init__(self, capture: Capture, index: int, name: str, parameter: nn.Parameter) -> None:
        super().__init__(capture, name, parameter.shape)
        self.index = index
        self.parameter = parameter
        self.used = parameter
        """What operations see of it: itself, or the full-size one that shards are gathered in."""
        self.target = GradientTarget(self)
        """Where a record of the whole of it goes."""
        self.release: ReleaseMap | None = None
        """What its sum is mapped by before noise is added; None: nothing."""

    @property
    def watched(self) -> bool:
        return self.capture.watching and self.parameter.requires_grad


@dataclass
class CapturedGradients:
    """One record of a source; ``rows`` if it is about these rows of it only."""

    record: PerSampleGradients
    rows: tuple[int, int] | None = None
    square: Tensor | None = None
    """What it adds to the squared norms of its clip group, if that is known."""


@dataclass(frozen=True)
class GradientTarget:
    """Where a rule's record goes: a source, some of its rows, or its transpose."""

    source: GradientSource
    rows: tuple[int, int] | None = None
    transposed: bool = False


@dataclass(eq=False)
class CapturedOp:
    """One captured operation: which samples it belongs to and where its records go."""

    capture: Capture
    operation: str
    targets: tuple[GradientTarget | None, ...]
    batch_id: int
    batch: int
    site: tuple[Any, ...]
    saved: dict[str, Any] = field(default_factory=dict)
    """Plain facts that the rule's backward needs, no tensors."""
    first: bool = False
    """Whether its input is the module's, watched for the probe alone."""
    padded: int = 0
    """How many of its samples are rows of zeros that fill the batch up."""

    @property
    def names(self) -> str:
        return ", ".join(t.source.name for t in self.targets if t is not None)

    @property
    def passes_on(self) -> bool:
        """Whether anyone looks at the gradient of its input."""
        return not self.first or self.capture.probe is not None

    def wants(self, g: Tensor | None) -> bool:
        """Whether this output gradient is to be captured; looks at it if a probe runs."""
        if g is None:
            return False
        capture = self.capture
        if capture.probe is not None:
            capture.probe.look(self, g)
            return False
        if not torch._C._will_engine_execute_node(capture.anchor_node):
            return False  # torch.autograd.grad of inputs alone, which leaves parameters out
        capture.check_current_batch(self, g)
        return True

    def arrive(self, which: int, record: PerSampleGradients) -> None:
        """Hand over the record of target number ``which``."""
        target = self.targets[which]
        if target is None:
            return
        source = target.source
        arrival = CapturedGradients(record, target.rows)
        source.arrivals.append(arrival)
        self.capture.take_norm_if_only_use(source, arrival)

    def arrive_together(
        self,
        records: Mapping[int, PerSampleGradients],
        whole: Callable[[], PerSampleGradients] | None,
    ) -> None:
        """Hand over records by the number of their target.

        Args:
            records: one for each target.
            whole: makes a record whose squared norm is the sum of theirs; it is taken instead of
                theirs where that comes to the same, and kept no longer. None: there is none.
        """
        targets = [self.targets[which] for which in records]
        if whole is None or not self.capture.norms_add_up(targets):
            for which, record in records.items():
                self.arrive(which, record)
            return
        squares = self.capture.square_of(whole())
        for target, record in zip(targets, records.values(), strict=True):
            assert target is not None
            target.source.arrivals.append(CapturedGradients(record, square=squares))
            squares = torch.zeros_like(squares)

    def per_batch(self, tensor: Tensor) -> Tensor:
        """``[k B, ...] -> [B, k, ...]``: rows of one sample follow each other."""
        return tensor.reshape(self.batch, -1, *tensor.shape[1:]) if self.batch else tensor[:, None]

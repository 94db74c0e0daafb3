"""A parameter's uses: where gradients come from, where they go, and to whom they belong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from ..privacy.mechanisms.release import Release
from .records import Record

if TYPE_CHECKING:
    from .capture import Capture


class Source:
    """Something whose per-sample gradient is wanted: a parameter or an expression of parameters."""

    def __init__(self, capture: Capture, name: str, shape: Sequence[int]) -> None:
        self.capture = capture
        self.name = name
        self.shape = tuple(shape)
        self.uses = 0
        """Uses seen in the forward pass of the current samples."""
        self.indirect = False
        """Whether an expression of the current samples leads back here."""
        self.arrivals: list[Arrival] = []

    @property
    def watched(self) -> bool:
        return self.capture.watching


class Early(Protocol):
    """Who finishes a clip group inside the backward pass."""

    def arrived(self, slot: Slot) -> None:
        """A record of this parameter has arrived."""


class Slot(Source):
    """A private parameter."""

    def __init__(self, capture: Capture, index: int, name: str, parameter: nn.Parameter) -> None:
        super().__init__(capture, name, parameter.shape)
        self.index = index
        self.parameter = parameter
        self.used = parameter
        """What operations see of it: itself, or the full-size one that shards are gathered in."""
        self.target = Target(self)
        """Where a record of the whole of it goes."""
        self.release: Release | None = None
        """What its sum is mapped by before noise is added; None: nothing."""

    @property
    def watched(self) -> bool:
        return self.capture.watching and self.parameter.requires_grad


@dataclass
class Arrival:
    """One record of a source; ``rows`` if it is about these rows of it only."""

    record: Record
    rows: tuple[int, int] | None = None
    square: Tensor | None = None


@dataclass(frozen=True)
class Target:
    """Where a rule's record goes: a source, some of its rows, or its transpose."""

    source: Source
    rows: tuple[int, int] | None = None
    transposed: bool = False


@dataclass(eq=False)
class Use:
    """One captured operation: which samples it belongs to and where its records go."""

    capture: Capture
    operation: str
    targets: tuple[Target | None, ...]
    ticket: int
    batch: int
    site: tuple[Any, ...]
    saved: dict[str, Any] = field(default_factory=dict)
    """Plain facts that the rule's backward needs, no tensors."""
    first: bool = False
    """Whether its input is the module's, watched for the probe alone."""

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
        capture.admit(self, g)
        return True

    def arrive(self, which: int, record: Record) -> None:
        """Hand over the record of target number ``which``."""
        target = self.targets[which]
        if target is None:
            return
        source = target.source
        arrival = Arrival(record, target.rows)
        source.arrivals.append(arrival)
        self.capture.settle(source, arrival)

    def per_batch(self, tensor: Tensor) -> Tensor:
        """``[k B, ...] -> [B, k, ...]``: rows of one sample follow each other."""
        return tensor.reshape(self.batch, -1, *tensor.shape[1:]) if self.batch else tensor[:, None]

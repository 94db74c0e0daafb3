"""Sites of a program: what one use does in the forward pass, the backward pass and at the close."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch import Tensor

from ..uses import CapturedOp, ParameterSource
from .facts import UseFacts

if TYPE_CHECKING:
    from .flat import Flat


class NotReplayed(Exception):
    """A step that no program can hold; the message says why."""


@dataclass(eq=False)
class Part:
    """One parameter's share of a step: which norm it has and how it is summed.

    Attributes:
        slot: the parameter.
        site: the use that it comes from.
        explicit: whether its per-sample gradients are written out as rows ``[B, *shape]``.
        normed: whether its squared norms are taken as soon as it arrives.
        square: number of its squared norms in the memory; -1 if they are not taken one by one.
        rows: number of its rows in the memory; -1 if they lie elsewhere or are not written out.
        place: place among all explicit gradients of the close.
    """

    slot: ParameterSource
    site: UseSite
    explicit: bool
    normed: bool
    square: int = -1
    rows: int = -1
    place: int = -1


class UseSite(ABC):
    """One use of a program.

    Args:
        facts: what the use must be like.
        kept: by target, whether the recorded step kept the per-sample gradients of a record whose
            operands would do.

    Raises:
        NotReplayed: the use has no flat form.
    """

    operations: ClassVar[tuple[str, ...]]
    """Names of the operations that this class replays."""

    def __init__(self, facts: UseFacts, kept: Sequence[bool]) -> None:
        weight, bias = (*facts.slots, None)[:2]
        if weight is None:
            raise NotReplayed(f"{facts.operation} trains no weight")
        self.facts = facts
        self.kept = bool(kept[0])
        self.weight = weight.used
        self.bias = None if bias is None else bias.used
        self.index = 0
        """Place in the order of the forward pass."""
        self.dtype = facts.dtype
        self.differentiable = facts.differentiable
        self.shape: tuple[int, ...] = ()
        """The input's, for the batch at hand."""
        self.batch = 0
        self.plain_weight: Tensor = self.weight.detach()
        self.plain_bias = None if self.bias is None else self.bias.detach()
        self.gradient_dtype = self.plain_weight.dtype
        if facts.operation != "embedding" and self.dtype is not self.gradient_dtype:
            raise NotReplayed(f"{weight.name} and its input differ in dtype")
        for tensor in (self.plain_weight, self.plain_bias):
            if tensor is not None and (
                tensor.dtype is not self.gradient_dtype or not tensor.is_contiguous()
            ):
                raise NotReplayed(f"{weight.name} and its bias differ in dtype or layout")
        if self.gradient_dtype not in (torch.float32, torch.float64):
            raise NotReplayed(f"{weight.name} has {self.gradient_dtype}")

        explicit, normed = self.weight_kind
        self.weight_part = Part(weight, self, explicit=explicit, normed=normed)
        self.bias_part = None if bias is None else Part(bias, self, explicit=True, normed=False)
        self.parts = [p for p in (self.weight_part, self.bias_part) if p is not None]

    @property
    @abstractmethod
    def weight_kind(self) -> tuple[bool, bool]:
        """Whether the weight's gradients are written out, and normed on arrival."""

    @abstractmethod
    def place(self, flat: Flat) -> None:
        """Note where the program's memory is."""

    def resize(self, flat: Flat, batch: int) -> None:
        """Take another number of samples."""
        self.batch = batch
        self.shape = (batch * self.facts.fold, *self.facts.tail)

    def admits(self, x: Tensor) -> bool:
        """Whether an input that looks right can be replayed."""
        return True

    @property
    def bytes(self) -> int:
        """Size of the input."""
        size = self.dtype.itemsize
        for extent in self.shape:
            size *= extent
        return size

    @abstractmethod
    def deliver(self, use: CapturedOp, held: Any) -> None:
        """Hand what was held of a use to the recorded path."""

    sums_alone: ClassVar[bool] = False
    """Whether ``add_sum`` adds what is not written out; else the calls of the step do."""

    def add_sum(self, factors: Tensor, held: Any, place: Tensor) -> None:
        """Add the weighted sum of a part that is not written out."""
        raise NotImplementedError


KINDS: dict[str, type[UseSite]] = {}
"""By the names of their operations."""


def kind(site: type[UseSite]) -> type[UseSite]:
    """Enter a class of sites."""
    for operation in site.operations:
        KINDS[operation] = site
    return site


def address(tensor: Tensor | None) -> int:
    """Where a tensor's numbers begin; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` without its look at ``torch.func``, which the caller has taken."""
    found: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return found


def written_since() -> NoReturn:
    """Refuse a backward pass through a weight that was written to since its use, as torch does.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        "operation: a private weight was written to between its use and the backward pass"
    )


def skip_frames(function: type[torch.autograd.Function]) -> None:
    """Let the backward pass call ``function.backward`` without torch's two calls around it."""
    node = getattr(function, "_backward_cls", None)
    if node is not None:
        node.apply = function.backward

"""Define the sites of a program: one per use, with its work in each pass and at the close."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from ...ops import direct
from ..parameter import PrivateParameter, without_torch_function
from ..per_sample_gradients import PerSampleGradients
from ..uses import CapturedOp, ParameterSource
from .facts import UseFacts
from .unchanged import Unchanged

if TYPE_CHECKING:
    from .arithmetic import Add
    from .flat import Flat
    from .run import ReplayRun

_task = torch._C._current_graph_task_id


class NotReplayed(Exception):
    """A step that no program can replay; the message gives the reason."""


@dataclass(eq=False)
class Part:
    """Share of one parameter in a step: its norms and its sum.

    Attributes:
        slot: the parameter.
        site: the use that it comes from.
        explicit: whether its per-sample gradients are materialized as rows ``[B, *shape]``.
        normed: whether its squared norms are computed as soon as its gradient arrives.
        joined: whether other uses share the parameter, so that its site only holds its gradients.
        square: number of its squared norms in the memory; -1 if it has none of its own.
        rows: number of its rows in the memory; -1 if it is not materialized.
        place: its place among all explicit gradients of the close.
    """

    slot: ParameterSource
    site: UseSite
    explicit: bool
    normed: bool
    joined: bool = False
    square: int = -1
    rows: int = -1
    place: int = -1


class UseSite(ABC):
    """Captured operation of a program, with the calls that replay it.

    Args:
        facts: conditions that the use must meet.
        kept: by target, whether the recorded step materialized per-sample gradients although the
            operands would do.

    Raises:
        NotReplayed: the use cannot be replayed.
    """

    operations: ClassVar[tuple[str, ...]]
    """Names of the operations that this class replays."""

    places: ClassVar[tuple[bool, ...]] = (False,)
    """Whether it replays them inside compiled graphs; both answers where it makes no difference."""

    joined_as: ClassVar[str] = ""
    """The way to join a weight's gradients over several uses: by ``operands``, which norm and sum
    are made of, or by materialized ``rows``; empty if no program joins them."""

    any_layout: ClassVar[bool] = False
    """Whether weights may have any order in memory: then torch alone reads them."""

    padding_idx: int | None = None

    compiled: Any = None
    """The use as C++ takes it, or None: everything about it is Python's."""

    def __init__(self, facts: UseFacts, kept: Sequence[bool]) -> None:
        weight, bias = (*facts.slots, None)[:2]
        if weight is None:
            raise NotReplayed(f"{facts.operation} trains no weight")
        self.facts = facts
        self.kept = bool(kept[0])
        self.weight = weight.used
        self.bias = None if bias is None else bias.used
        """The argument that is expected: a trained bias, a frozen one that was met, or None."""
        self.unchanged = Unchanged([slot.used for slot in (weight, bias) if slot is not None])
        self.index = 0
        """The place in the order of the forward pass."""
        self.dtype = facts.dtype
        self.differentiable = facts.differentiable
        self.shape: tuple[int, ...] = ()
        """The shape of the input, for the current batch."""
        self.batch = 0
        self.plain_weight: Tensor = self.weight.detach()
        self.plain_bias = None if self.bias is None else self.bias.detach()
        self.gradient_dtype = self.plain_weight.dtype
        if facts.operation != "embedding" and self.dtype is not self.gradient_dtype:
            raise NotReplayed(f"{weight.name} and its input differ in dtype")
        for tensor in (self.plain_weight, self.plain_bias):
            if tensor is not None and (
                tensor.dtype is not self.gradient_dtype
                or not (self.any_layout or tensor.is_contiguous())
            ):
                raise NotReplayed(f"{weight.name} and its bias differ in dtype or layout")
        if self.gradient_dtype not in (torch.float32, torch.float64):
            raise NotReplayed(f"{weight.name} has {self.gradient_dtype}")

        explicit, normed = self.weight_kind
        self.weight_part = Part(weight, self, explicit=explicit, normed=normed)
        self.bias_part = None if bias is None else Part(bias, self, explicit=True, normed=False)
        self.parts = [p for p in (self.weight_part, self.bias_part) if p is not None]

    def takes_frozen(self, bias: Any) -> bool:
        """Whether this argument adds to the output and trains nothing; it is expected from now on.

        Gradients do not look at it, so that it may be another one, or none, in every step.
        """
        if self.bias_part is not None:
            return False
        with without_torch_function():
            if bias is not None and not self._is_frozen(bias):
                return False
            self.bias = bias
            self.plain_bias = None if bias is None else bias.detach()
        self.unchanged = Unchanged([self.weight] if bias is None else [self.weight, bias])
        self.compile()
        return True

    def _is_frozen(self, bias: Any) -> bool:
        return (
            type(bias) in (nn.Parameter, PrivateParameter)
            and not bias.requires_grad
            and bias.shape == self.bias_shape
            and bias.dtype is self.gradient_dtype
            and bias.is_cpu
            and bool(bias.is_contiguous())
        )

    @property
    def bias_shape(self) -> tuple[int, ...]:
        """The shape of a bias."""
        return (int(self.plain_weight.shape[0]),)

    @property
    @abstractmethod
    def weight_kind(self) -> tuple[bool, bool]:
        """Whether the weight's gradients are materialized, and whether normed on arrival."""

    @abstractmethod
    def place(self, flat: Flat) -> None:
        """Store addresses in the program's memory, which has moved."""

    def resize(self, flat: Flat, batch: int) -> None:
        """Adapt sizes to another number of samples."""
        self.batch = batch
        self.shape = (batch * self.facts.fold, *self.facts.tail)
        if self.compiled is not None:
            self.compiled.resize(batch)

    def compile(self) -> None:
        """Describe the use to C++, which then takes it where it can."""
        self.compiled = self.in_cpp()
        if self.compiled is not None:
            self.compiled.resize(self.batch)

    def in_cpp(self) -> Any:
        """Return the use as C++ takes it; None where no code there knows its kind."""
        return None

    def admits(self, x: Tensor) -> bool:
        """Whether an input of the right shape and dtype can be replayed."""
        return True

    def expects(self, x: Tensor, g: Tensor) -> bool:
        """Whether operand and gradient are of the kind that was recorded."""
        ordinary = g.dtype is self.dtype and type(g) is Tensor
        # Hooks of saved tensors may have made another one of the operand.
        return ordinary and x.dtype is self.dtype and x.shape == self.shape and type(x) is Tensor

    @property
    def bytes(self) -> int:
        """Size of the input."""
        size = self.dtype.itemsize
        for extent in self.shape:
            size *= extent
        return size

    @abstractmethod
    def deliver(self, use: CapturedOp, held: Any) -> None:
        """Pass the gradients held for a use to the recorded path."""

    def gradients(self, part: Part, held: Any) -> PerSampleGradients:
        """Return the held gradients of a part that other uses share."""
        raise NotImplementedError

    def clips(self, part: Part) -> bool:
        """Whether a part is clipped by the norm that its release map defines."""
        return False

    sums_alone: ClassVar[bool] = False
    """Whether ``add_sum`` adds what is not written out; else the calls of the step do."""

    def add_sum(self, add: Add, part: Part, factors: Tensor, held: Any, place: Tensor) -> None:
        """Add the weighted sum of a part that is not written out."""
        raise NotImplementedError


class OperandSite(UseSite):
    """Use whose per-sample gradients follow from its operand and its output gradient."""

    def arrive(self, run: ReplayRun, x: Tensor, g: Tensor, entered: Any = None) -> None:
        """Take operand and output gradient, or pass them to the recorded path.

        Args:
            run: one that this use was met in.
            x, g: operand and output gradient.
            entered: what the run has said of the gradient, if it was asked.
        """
        use = entered
        if use is None:
            use = run.task == _task() or run.enters(self, g)
        if use is True and run.held[self.index] is None and self.expects(x, g):
            self.take(run, x, g)
        elif use is not False:
            self.record(run.repeated(self) if use is True else use, x, g)

    @abstractmethod
    def take(self, run: ReplayRun, x: Tensor, g: Tensor) -> None:
        """Take operand and output gradient: hold what the close needs of them."""

    @abstractmethod
    def record(self, use: CapturedOp, x: Tensor, g: Tensor) -> None:
        """Pass operand and output gradient to the recorded path."""


KINDS: dict[tuple[str, bool], type[UseSite]] = {}
"""Classes of sites, by the names of their operations, and whether they are in compiled graphs."""


SHORT_CUT: list[Callable[..., Any]] = []
"""The function that finds what runs a module as a plain stack of uses (``stack.short_cut``)."""


def kind(site: type[UseSite]) -> type[UseSite]:
    """Register a class of sites."""
    for operation in site.operations:
        KINDS.update(dict.fromkeys(((operation, place) for place in site.places), site))
    return site


def address(tensor: Tensor | None) -> int:
    """Return the address of a tensor's first number; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return ``function.apply`` without its check for ``torch.func``, which the caller makes."""
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
        method = direct.look("as_method")
        node.apply = function.backward if method is None else method(function.backward)

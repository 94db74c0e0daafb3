"""Make valid calls of an op from its signature and the few facts that a signature cannot say.

Tests vary them (dtypes, layouts, empty sizes), benchmarks time them at named sizes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..base.dispatch import Op
from ..base.dtypes import DTYPES, sum_dtype
from ..base.signature import (
    LEADING,
    ChoiceParameter,
    DtypeParameter,
    NumberParameter,
    TensorParameter,
    is_bound,
)

KINDS = (*LEADING, "AnyFloat")
"""Groups whose dtypes the calls of an op go through."""
SIZES = ("tiny", "typical", "large")
"""Names of sizes: ruled by host time, held by the caches, ruled by memory or arithmetic."""
LISTS = {
    "usual": [(3,), (4, 5), ()],
    "large": [(129,), (3, 17, 2)],
    "ones": [(1,)],
    "zeros": [(0,)],
}


@dataclass(frozen=True)
class Facts:
    """The facts of an op that its signature cannot say.

    Attributes:
        examples: sizes and arguments by name; what is missing is drawn. A function makes its value
            of the call so far.
        entries: of tensors that may not hold any number: a function of the call and the shape.
        shapes: of tensors whose sizes are open (``...``), from the call so far.
        positive: sizes that may not be 0.
        options: of choices that are not valid in every example.
        bits: the reference's bits are promised, in the call's own dtype.
        bounds: of the difference to the reference in float64, by the call's dtype.
        rounded_alike: the reference runs in the call's own dtype, as noise is of its bits; or
            whether it does so with these arguments.
        changes: arguments that are changed besides tensors that are declared ``written``.
        samples: the size whose entries never meet; empty if there is none.
        blind: inputs of which a sample's norm does not see every entry.
        from_above: names of results that are never below the true value (``result``, or
            ``result[1]`` of several): a norm that is too small would break the clipping bound.
        looser: how many times the reference's such a result may be, if it bounds the roundings of
            a kernel that is free to multiply otherwise; 1 if it is the reference's value.
        layouts: of tensors of which an op's own check asks more than the signature says.
        timed: sizes and arguments by the name of a benchmark: a word of ``SIZES``, and behind a
            comma the variant. They stand on top of ``usual``.
        usual: what all benchmarks of the op share.
    """

    examples: Sequence[Mapping[str, Any]] = ({},)
    entries: Mapping[str, Callable[[Call, tuple[int, ...]], torch.Tensor]] = field(
        default_factory=dict
    )
    shapes: Mapping[str, Callable[[Call], Any]] = field(default_factory=dict)
    positive: frozenset[str] = frozenset()
    options: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    bits: bool = False
    bounds: Mapping[torch.dtype, float] = field(
        default_factory=lambda: {
            torch.float32: 1e-4,
            torch.float64: 1e-10,
            torch.bfloat16: 5e-3,
            torch.float16: 5e-3,
        }
    )
    rounded_alike: bool | Callable[[Mapping[str, Any]], bool] = False
    changes: frozenset[str] = frozenset()
    samples: str = "B"
    blind: frozenset[str] = frozenset()
    from_above: frozenset[str] = frozenset()
    looser: float = 1.0
    layouts: Mapping[str, str] = field(default_factory=dict)
    timed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    usual: Mapping[str, Any] = field(default_factory=dict)


class Call:
    """A call while it is made: sizes, dtype and the arguments so far."""

    def __init__(self, case: Case, wide: bool) -> None:
        self.case, self.wide = case, wide
        self.sizes = dict(case.sizes)
        self.args: dict[str, Any] = {}
        self.generator = torch.Generator().manual_seed(1)

    def normal(self, shape: Sequence[int]) -> torch.Tensor:
        """Draw entries of a tensor that may hold any number."""
        return torch.randn(tuple(shape), generator=self.generator, dtype=torch.float64)

    def uniform(self, shape: Sequence[int]) -> torch.Tensor:
        """Draw entries from 0 to 1."""
        return torch.rand(tuple(shape), generator=self.generator, dtype=torch.float64)

    def integers(self, end: int, shape: Sequence[int]) -> torch.Tensor:
        """Draw entries from 0 to ``end - 1``."""
        return torch.randint(end, tuple(shape), generator=self.generator)

    def rounded(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Round entries to a dtype; in a wide call the same numbers in float64."""
        made = values.to(dtype)
        return made.double() if self.wide and dtype.is_floating_point else made


class ShapesOnly(Call):
    """A call whose tensors have shapes and no numbers: enough for a closed form."""

    def normal(self, shape: Sequence[int]) -> torch.Tensor:
        """Return a tensor without numbers."""
        return torch.empty(tuple(shape), dtype=torch.float64, device="meta")

    uniform = normal

    def integers(self, end: int, shape: Sequence[int]) -> torch.Tensor:
        """Return a tensor without numbers."""
        return torch.empty(tuple(shape), dtype=torch.int64, device="meta")


@dataclass(frozen=True)
class Case:
    """A valid call of an op; every ``arguments()`` makes it anew, with the same numbers."""

    op: Op[..., Any]
    facts: Facts
    name: str
    kind: torch.dtype | None
    example: Mapping[str, Any]
    sizes: Mapping[str, Any]
    profile: str
    odd_layout: bool = False
    optional: bool = True
    chosen: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.op.name} {self.name} {self.kind or ''}"

    @property
    def is_rounded_alike(self) -> bool:
        """Whether the reference runs in the call's own dtype."""
        alike = self.facts.rounded_alike
        return self.facts.bits or (alike(self.example) if callable(alike) else alike)

    def arguments(self, *, wide: bool = False) -> dict[str, Any]:
        """Return the arguments by parameter; ``wide`` gives the same numbers in float64."""
        return self._made(Call(self, wide))

    def shapes(self) -> dict[str, Any]:
        """Return the arguments by parameter, with tensors that have no numbers."""
        return self._made(ShapesOnly(self, False))

    def _made(self, call: Call) -> dict[str, Any]:
        for parameter in self.op.schema.signature.parameters:
            call.args[parameter.name] = self._argument(parameter, call)
        return call.args

    def _argument(self, parameter: Any, call: Call) -> Any:
        name = parameter.name
        if name in self.example:
            value = self.example[name]
            return value(call) if callable(value) and not isinstance(value, type) else value
        if isinstance(parameter, TensorParameter):
            return self._tensors(parameter, call)
        default = self.op.schema.call.parameters[name].default
        if isinstance(parameter, ChoiceParameter):
            first = parameter.options[0]
            return self.chosen.get(name, first if default is _EMPTY else default)
        if isinstance(parameter, DtypeParameter):
            return torch.float64 if call.wide else self.kind
        if isinstance(parameter, NumberParameter):
            if parameter.rule == "Count":
                return self.sizes[name]
            if parameter.rule == "bool":
                return self.chosen.get(name, default)
            return {"Position": 515, "Positive": 0.5, "NonNegative": 0.5}.get(
                parameter.rule, default
            )
        assert default is not _EMPTY, f"{self.op.name}: the facts say nothing of {name}"
        return default

    def _tensors(self, parameter: TensorParameter, call: Call) -> Any:
        if parameter.optional and not self.optional:
            return None
        if parameter.name in self.facts.shapes:
            shapes = self.facts.shapes[parameter.name](call)
        else:
            shapes = self._shapes(parameter)
        if not parameter.many:
            return self._tensor(parameter, shapes, call)
        made = [self._tensor(parameter, shape, call) for shape in shapes]
        return made[0] if parameter.alone and len(made) == 1 else made

    def _shapes(self, parameter: TensorParameter) -> Any:
        fixed = tuple(
            self.sizes[dim] if is_bound(dim) else int(dim)
            for dim in parameter.dims
            if dim[0] not in "*."
        )
        rest = [dim for dim in parameter.dims if dim[0] in "*."]
        if not parameter.many:
            return fixed + (tuple(self.sizes[rest[0]]) if rest else ())
        spread = self.sizes.get(rest[0], LISTS[self.profile]) if rest else [(), ()]
        return [fixed + tuple(shape) for shape in spread]

    def _tensor(
        self, parameter: TensorParameter, shape: tuple[int, ...], call: Call
    ) -> torch.Tensor:
        draw = self.facts.entries.get(parameter.name) or ENTRIES.get(parameter.name)
        values = call.normal(shape) if draw is None else draw(call, shape)
        tensor = call.rounded(values, self._dtype(parameter))
        if self.odd_layout:
            layout = self.facts.layouts.get(parameter.name, parameter.layout)
            tensor = laid_out(tensor, layout)
        floating = tensor.is_floating_point() and "written" not in parameter.marks
        return tensor.requires_grad_() if floating else tensor

    def _dtype(self, parameter: TensorParameter) -> torch.dtype:
        if parameter.group in KINDS:
            assert self.kind is not None
            return self.kind
        if parameter.group == "Sum" and self.kind is not None:
            return sum_dtype(self.kind)
        only: torch.dtype = DTYPES[parameter.group][0]
        return only


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Return the same numbers with other strides, if the layout allows any."""
    if layout == "transposable":
        return tensor.t().contiguous().t()
    if layout == "dense" and tensor.dim() > 2:
        inner = range(tensor.dim() - 1, 0, -1)
        return tensor.permute(0, *inner).contiguous().permute(0, *inner)
    if layout == "strided":
        return torch.stack((tensor, tensor), -1)[..., 0]
    return tensor


ENTRIES: dict[str, Callable[[Call, tuple[int, ...]], torch.Tensor]] = {
    name: lambda call, shape: call.uniform(shape) + 0.25 for name in ("factors", "rstd", "squares")
}
"""Entries of tensors that have the same meaning in every op."""

_EMPTY = inspect.Parameter.empty


def timed_cases(
    op: Op[..., Any], facts: Facts, sizes: Sequence[str] = SIZES, dtype: torch.dtype | None = None
) -> list[Case]:
    """Return the calls of an op that benchmarks time, in the order in which its facts name them.

    Args:
        sizes: names of ``SIZES`` that are wanted.
        dtype: of the calls; None selects the op's first.
    """
    kind = dtype_of(op) if dtype is None else dtype
    return [sized(op, facts, name, {}, kind) for name in facts.timed if name.split(",")[0] in sizes]


def sized(
    op: Op[..., Any], facts: Facts, name: str, other: Mapping[str, Any], kind: torch.dtype | None
) -> Case:
    """Return one benchmark of an op, with some sizes changed."""
    example = {**facts.usual, **facts.timed[name], **other}
    bound = {dim for p in op.schema.signature.tensors for dim in p.dims if is_bound(dim)}
    names = bound | {*op.schema.signature.sizes}
    found = {k: v for k, v in example.items() if k in names or k[0] in "*."}
    return Case(op, facts, name, kind, example, found, "usual")


def dtypes_of(op: Op[..., Any]) -> tuple[torch.dtype | None, ...]:
    """Return the dtypes that a call may have; None where it has none of its own."""
    for parameter in op.schema.signature.parameters:
        if isinstance(parameter, DtypeParameter):
            return DTYPES[parameter.group]
        if isinstance(parameter, TensorParameter) and parameter.group in KINDS:
            return DTYPES[parameter.group]
    return (None,)


def dtype_of(op: Op[..., Any]) -> torch.dtype | None:
    """Return the dtype of a benchmark: float32 where the op takes it, else its first."""
    known = dtypes_of(op)
    return torch.float32 if torch.float32 in known else known[0]

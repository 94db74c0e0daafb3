"""Valid calls of an op, made from its signature and the facts that a signature cannot say."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dpkern.base.dispatch import Op
from dpkern.base.dtypes import DTYPES, sum_dtype
from dpkern.base.signature import (
    LEADING,
    ChoiceParameter,
    DtypeParameter,
    NumberParameter,
    TensorParameter,
    is_bound,
)

KINDS = (*LEADING, "AnyFloat")
"""Groups whose dtypes the calls of an op go through."""
USUAL = (4, 5, 7, 3, 6, 2)
"""Sizes in their order of appearance, all different: two that are swapped show."""
LARGE = (2, 33, 17, 65, 9, 20)
"""Beyond vectors and tiles, with tails."""
LISTS = {
    "usual": [(3,), (4, 5), ()],
    "large": [(129,), (3, 17, 2)],
    "ones": [(1,)],
    "zeros": [(0,)],
}
SHAPES = {"usual": (3, 5), "large": (33, 17), "ones": (), "zeros": (0, 3)}


@dataclass(frozen=True)
class Facts:
    """What an op's signature cannot say.

    Attributes:
        examples: sizes and arguments by name; what is missing is drawn. A function makes its value
            of the call so far.
        entries: of tensors that may not hold any number: a function of the call and the shape.
        shapes: of tensors whose sizes are open (``...``), from the call so far.
        positive: sizes that may not be 0.
        options: of choices that are not valid in every example.
        bits: the reference's bits are promised, in the call's own dtype.
        bounds: of the difference to the reference in float64, by the call's dtype.
        rounded_alike: the reference runs in the call's own dtype, as noise is of its bits.
        changes: arguments that are changed besides tensors that are declared ``written``.
        samples: the size whose entries never meet; empty if there is none.
        blind: inputs of which a sample's norm does not see every entry.
        layouts: of tensors of which an op's own check asks more than the signature says.
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
    rounded_alike: bool = False
    changes: frozenset[str] = frozenset()
    samples: str = "B"
    blind: frozenset[str] = frozenset()
    layouts: Mapping[str, str] = field(default_factory=dict)


class Call:
    """One call while it is made: sizes, dtype and the arguments so far."""

    def __init__(self, case: Case, wide: bool) -> None:
        self.case, self.wide = case, wide
        self.sizes = dict(case.sizes)
        self.args: dict[str, Any] = {}
        self.generator = torch.Generator().manual_seed(1)

    def normal(self, shape: Sequence[int]) -> torch.Tensor:
        """Entries of a tensor that may hold any number."""
        return torch.randn(tuple(shape), generator=self.generator, dtype=torch.float64)

    def uniform(self, shape: Sequence[int]) -> torch.Tensor:
        """Entries from 0 to 1."""
        return torch.rand(tuple(shape), generator=self.generator, dtype=torch.float64)

    def integers(self, end: int, shape: Sequence[int]) -> torch.Tensor:
        """Entries from 0 to ``end - 1``."""
        return torch.randint(end, tuple(shape), generator=self.generator)

    def rounded(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Entries of a dtype; in a wide call the same numbers in float64."""
        made = values.to(dtype)
        return made.double() if self.wide and dtype.is_floating_point else made


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

    def arguments(self, *, wide: bool = False) -> dict[str, Any]:
        """By parameter; wide: the same numbers in float64."""
        call = Call(self, wide)
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
        return DTYPES[parameter.group][0]


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same numbers with other strides, if the layout allows any."""
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


def kinds(op: Op[..., Any]) -> tuple[torch.dtype | None, ...]:
    """The dtypes that a call may have."""
    for parameter in op.schema.signature.parameters:
        if isinstance(parameter, DtypeParameter):
            return DTYPES[parameter.group]
        if isinstance(parameter, TensorParameter) and parameter.group in KINDS:
            return DTYPES[parameter.group]
    return (None,)


def cases(op: Op[..., Any], facts: Facts) -> Iterator[Case]:
    """Valid calls: every example at usual, large, unit and empty sizes, in every dtype, with odd
    layouts, without what is optional, and with every option."""
    signature = op.schema.signature
    free = [p for p in signature.tensors if p.layout != "contiguous"]
    omitted = [p for p in signature.tensors if p.optional]
    chosen = [
        {p.name: option}
        for p in signature.parameters
        if isinstance(p, ChoiceParameter)
        for option in facts.options.get(p.name, p.options)
    ]
    chosen += [
        {p.name: value}
        for p in signature.parameters
        if isinstance(p, NumberParameter) and p.rule == "bool"
        for value in (False, True)
    ]
    for i, example in enumerate(facts.examples):
        for kind in kinds(op):
            seen = []
            for name, sizes in _sizes(op, facts, example):
                if sizes in seen:
                    continue
                seen.append(sizes)
                profile = name.split()[0]
                case = Case(op, facts, f"{i} {name}", kind, example, sizes, profile)
                yield case
                if profile not in ("usual", "large"):
                    continue
                if free:
                    yield _changed(case, "odd layout", odd_layout=True)
                if omitted:
                    yield _changed(case, "without", optional=False)
                for choice in chosen:
                    if not choice.keys() & example.keys():
                        yield _changed(case, str(choice), chosen=choice)


def _changed(case: Case, how: str, **changes: Any) -> Case:
    fields = {name: getattr(case, name) for name in case.__dataclass_fields__}
    return Case(**{**fields, "name": f"{case.name} {how}", **changes})


def _sizes(
    op: Op[..., Any], facts: Facts, example: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Sizes by name, under the names of their profiles."""
    names = op.schema.signature.sizes
    spreads = {
        dim: p.many for p in op.schema.signature.tensors for dim in p.dims if dim.startswith("*")
    }
    names = tuple(dict.fromkeys((*names, *_of_optionals(op))))

    def fixed(found: dict[str, Any]) -> dict[str, Any]:
        return {**found, **{k: v for k, v in example.items() if k in names or k[0] == "*"}}

    def drawn(profile: str, numbers: Callable[[int], int]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for i, name in enumerate(names):
            table: Any = LISTS if spreads.get(name) else SHAPES
            found[name] = table[profile] if name in spreads else numbers(i)
        return fixed(found)

    usual = drawn("usual", lambda i: USUAL[i % len(USUAL)])
    yield "usual", usual
    yield "large", drawn("large", lambda i: LARGE[i % len(LARGE)])
    yield "ones", drawn("ones", lambda i: 1)
    shuffled = random.Random(op.name)
    yield "usual any", drawn("usual", lambda i: shuffled.choice((1, 2, 3, 8, 11)))
    for name in names:
        if name not in facts.positive:
            nothing: Any = 0
            if name in spreads:
                nothing = LISTS["zeros"] if spreads[name] else SHAPES["zeros"]
            yield f"zeros {name}", fixed({**usual, name: nothing})


def _of_optionals(op: Op[..., Any]) -> Iterator[str]:
    """Sizes that only tensors bind that need not be there."""
    for parameter in op.schema.signature.tensors:
        yield from (dim for dim in parameter.dims if is_bound(dim))

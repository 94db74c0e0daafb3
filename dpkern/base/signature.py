"""Declare ops by their signatures: the words of an annotation, and what is read from them.

    def linear_sum(
        a: Operand[Tensor, "B T d"],
        g: Operand[Tensor, "B T p"],
        factors: Sum[Tensor, "B"],
        out: Sum[Tensor, "p d", written],
    ) -> None: ...

A tensor has a dtype group and sizes. Sizes are names, bound from left to right; ``*S`` stands for
any number of them, ``...`` for sizes that nothing else depends on, and ``_`` for one of these. In a
list ``*S`` is bound entry by entry. Results carry a name: ``Double[Tensor, "squares: B"]``.

``signature_reader`` reads them. The build does so too, to write the bindings of compiled kernels
(``csrc/generate.py``), so this file must load without torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

from . import layouts

GROUPS: dict[str, tuple[str, ...]] = {
    "Float": ("float32", "float64"),
    "Operand": ("float32", "float64", "bfloat16", "float16"),
    "Gradient": ("float32", "float64", "bfloat16"),
    "Sum": ("float32", "float64"),
    "AnyFloat": ("float32", "float64"),
    "Double": ("float64",),
    "Int64": ("int64",),
    "Int32": ("int32",),
    "Int16": ("int16",),
    "Symbol": ("uint8", "int32", "int64"),
    "Noised": ("int32", "int64", "float32", "float64"),
    "Summed": ("int32", "int64", "float32", "float64"),
}
"""Dtypes by group. A call has one dtype of ``Float``, ``Operand`` or ``Gradient``: the first tensor
decides. ``Sum`` is the dtype of its sums: itself, or float32 for 16 bits. ``Summed`` is a dtype of
its own: compiled kernels receive untyped pointers and its place in the group."""

LEADING = ("Float", "Operand", "Gradient", "Symbol", "Noised")
"""Groups whose first tensor decides the dtype of the others of that group, and of ``Sum``."""

NUMBERS: dict[str, str] = {
    "int": "int",
    "float": "float",
    "bool": "bool",
    "Index": "int",
    "Position": "int",
    "Count": "int",
    "Word": "int",
    "Positive": "float",
    "NonNegative": "float",
    "Scale": "float",
}
"""Names of numbers in signatures, and the built-in type behind each. A ``Word`` has 64 bits and no
sign; other integers have one. A ``Scale`` may be a tensor, with one number per coordinate."""

_Item = TypeVar("_Item")

if TYPE_CHECKING:
    # As imports: only then do type checkers see that a group is a note on the tensor's type.
    from typing import Annotated as AnyFloat
    from typing import Annotated as Double
    from typing import Annotated as Float
    from typing import Annotated as Gradient
    from typing import Annotated as Int16
    from typing import Annotated as Int32
    from typing import Annotated as Int64
    from typing import Annotated as Noised
    from typing import Annotated as Operand
    from typing import Annotated as Sum
    from typing import Annotated as Summed
    from typing import Annotated as Symbol

    import torch
    from torch import dtype as FloatDtype

    Index: TypeAlias = int
    Position: TypeAlias = int
    Count: TypeAlias = int
    Word: TypeAlias = int
    Positive: TypeAlias = float
    NonNegative: TypeAlias = float
    Scale: TypeAlias = float | torch.Tensor
    Device: TypeAlias = torch.device | str
    OneOrMore: TypeAlias = _Item | Sequence[_Item]
else:
    Index = Position = Count = Word = int
    Positive = NonNegative = float
    FloatDtype = Device = Scale = object

    class _Group:
        """A dtype group, for readers of annotations at run time: ``Float[Tensor, "B T"]``."""

        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, item: tuple[Any, ...]) -> Any:
            return Annotated[(item[0], (self.name, *item[1:]))]

    class OneOrMore:
        """A tensor, or a list of them: ``OneOrMore[Float[Tensor, "B *P"]]``."""

        def __class_getitem__(cls, item: Any) -> Any:
            return item | Sequence[item]

    AnyFloat = _Group("AnyFloat")
    Double, Float, Gradient, Int16, Int32, Int64 = map(
        _Group, ("Double", "Float", "Gradient", "Int16", "Int32", "Int64")
    )
    Noised, Operand, Sum, Summed, Symbol = map(
        _Group, ("Noised", "Operand", "Sum", "Summed", "Symbol")
    )

written = "written"
"""Mark of a tensor that the op changes in place."""
filled = "filled"
"""Mark of a tensor that a kernel writes and that is new to torch, or whose version the caller of
the kernel counts up."""
strided = "strided"
"""Mark of a tensor that may have any strides."""
dense = "dense"
"""Mark of a tensor without gaps in memory, its first dimension outermost, others in any order."""
any_number = "any_number"
"""Mark of a list that may be empty."""
repeated = "repeated"
"""Mark of a list that holds several lists of the sizes ``*S``, one behind the other."""
transposable = "transposable"
"""Mark of a matrix that is contiguous, or the transpose of a contiguous one."""


@dataclass(frozen=True)
class TensorParameter:
    """A tensor, or a list of tensors (``many``), that an op takes."""

    name: str
    group: str
    dims: tuple[str, ...]
    marks: tuple[str, ...] = ()
    optional: bool = False
    many: bool = False
    alone: bool = False
    """Whether a tensor may stand for a list of one."""

    @property
    def layout(self) -> str:
        """The layout in memory: ``contiguous``, or one of the marks for it."""
        others = (written, filled, any_number, repeated)
        return next((mark for mark in self.marks if mark not in others), "contiguous")


@dataclass(frozen=True)
class ChoiceParameter:
    """A choice among a few options, passed to compiled kernels by its place in the list."""

    name: str
    options: tuple[Any, ...]
    kind: str | None


@dataclass(frozen=True)
class NumberParameter:
    """A number; ``rule`` names its range (``NUMBERS``)."""

    name: str
    rule: str
    optional: bool = False
    many: bool = False

    @property
    def type(self) -> str:
        """``int``, ``float`` or ``bool``."""
        return NUMBERS[self.rule]


@dataclass(frozen=True)
class DtypeParameter:
    """A dtype that decides the call's: ``dtype: FloatDtype`` takes those of ``Float``."""

    name: str
    group: str


@dataclass(frozen=True)
class DeviceParameter:
    """The device that results go to."""

    name: str


@dataclass(frozen=True)
class ObjectParameter:
    """A parameter of any other kind: the op's own ``check`` looks at it.

    A compiled kernel receives it if its type bears the name of a struct of ``layouts``. None is
    passed as zeros. ``many``: a list of them.
    """

    name: str
    annotation: str
    optional: bool = False
    many: bool = False


Parameter = (
    TensorParameter
    | ChoiceParameter
    | NumberParameter
    | DtypeParameter
    | DeviceParameter
    | ObjectParameter
)


@dataclass(frozen=True)
class Signature:
    """An op's parameters and results.

    Attributes:
        parameters: in the order of the call.
        results: tensors that the op makes, or finds in its parameter ``out``; None if it returns
            something else.
        made_into: the named tuple that holds them.
        number: the type of the number that it returns instead.
        plan: the type of what its own check makes for kernels.
    """

    name: str
    parameters: tuple[Parameter, ...]
    results: tuple[TensorParameter, ...] | None
    number: str | None = None
    plan: str | None = None
    made_into: str | None = None

    @property
    def group(self) -> str | None:
        """The dtype group that decides the dtype of a call."""
        groups = (getattr(parameter, "group", None) for parameter in self.parameters)
        return next((group for group in groups if group in LEADING), None)

    @property
    def lists(self) -> frozenset[str]:
        """Names of the sizes that lists of tensors have."""
        return frozenset(dim for tensor in self.tensors if tensor.many for dim in tensor.dims)

    @property
    def tensors(self) -> Iterator[TensorParameter]:
        """The parameters that are tensors or lists of them."""
        return (p for p in self.parameters if isinstance(p, TensorParameter))

    @property
    def sizes(self) -> tuple[str, ...]:
        """Names of the sizes in the order in which they are bound; ``*S`` for several."""
        found: dict[str, None] = {}
        for parameter in self.parameters:
            if isinstance(parameter, NumberParameter) and parameter.rule == "Count":
                found[parameter.name] = None
            elif isinstance(parameter, TensorParameter) and not parameter.optional:
                found.update((dim, None) for dim in parameter.dims if is_bound(dim))
        return tuple(found)


STRUCTS = frozenset(struct.name for struct in layouts.STRUCTS if not struct.template)
"""Types of objects that compiled kernels take; ``backends._structs`` makes their bytes."""


def kinds(signature: Signature) -> tuple[str, ...]:
    """Return the dtypes of a compiled kernel's instances; a kernel with one instance has none.

    Operands of 16 bits have no kernel.
    """
    group = signature.group
    return () if group is None else GROUPS["Float" if group == "Operand" else group]


def passed(signature: Signature) -> tuple[Parameter, ...]:
    """Return the parameters that a compiled kernel receives.

    These are no dtypes, no objects but ``STRUCTS``, and no room for results, which follow. The plan
    comes last.
    """
    plan = () if signature.plan is None else (ObjectParameter("plan", signature.plan),)
    return tuple(
        parameter
        for parameter in (*signature.parameters, *plan)
        if not (signature.results and parameter.name == "out")
        and (
            not isinstance(parameter, (DtypeParameter, DeviceParameter, ObjectParameter))
            or (isinstance(parameter, ObjectParameter) and parameter.annotation in STRUCTS)
        )
    )


def is_bound(dim: str) -> bool:
    """Whether a dimension has a name that other tensors may refer to."""
    return dim.lstrip("*").isidentifier() and dim != "_"


__all__ = [
    "GROUPS",
    "LEADING",
    "NUMBERS",
    "STRUCTS",
    "AnyFloat",
    "ChoiceParameter",
    "Count",
    "Device",
    "DeviceParameter",
    "Double",
    "DtypeParameter",
    "Float",
    "FloatDtype",
    "Gradient",
    "Index",
    "Int16",
    "Int32",
    "Int64",
    "Noised",
    "NonNegative",
    "NumberParameter",
    "ObjectParameter",
    "OneOrMore",
    "Operand",
    "Parameter",
    "Position",
    "Positive",
    "Scale",
    "Signature",
    "Sum",
    "Summed",
    "Symbol",
    "TensorParameter",
    "Word",
    "any_number",
    "dense",
    "filled",
    "is_bound",
    "passed",
    "repeated",
    "strided",
    "transposable",
    "written",
]

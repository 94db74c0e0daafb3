"""Table of the operations that torch performs between our ops.

Every operation loads the elements of its tensors once and stores those of its result. A tensor of
another number format than the computation's is converted, one CVT an element, except from integers
to integers. Views are free. Sorting, selecting and products of matrices are the library's: their
numbers are textbook forms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..base.counts import Counts
from ..base.errors import InvalidInput

Args = tuple[Any, ...]
Rule = Callable[[Args, Mapping[str, Any], Any], Counts]

MODELLED = frozenset({"topk", "sort", "cumsum", "mm", "bmm", "addmm", "mv", "dot"})
"""Library routines, which are counted by textbook forms."""

FREE = frozenset(
    {
        *("view", "_unsafe_view", "_reshape_alias", "reshape", "alias", "detach", "expand"),
        *("t", "transpose", "permute", "slice", "select", "squeeze", "unsqueeze", "unbind"),
        *("as_strided", "split", "split_with_sizes", "lift_fresh", "empty", "empty_like"),
        *("new_empty", "empty_strided", "_record_function_enter_new", "_record_function_exit"),
        "set",
    }
)
"""Views, memory under another name, uninitialised memory, and marks for a profiler."""


def logarithm(n: int) -> int:
    """Return ``ceil(log2 n)``, and 0 for n up to 1."""
    return max(0, n - 1).bit_length()


def sorting(n: int) -> Counts:
    """Count a merge sort, modelled: ``n ceil(log2 n)`` comparisons (Knuth, volume 3, 5.2.4)."""
    return Counts(CMP=n * logarithm(n))


def selecting(n: int, k: int) -> Counts:
    """Count a k-entry heap over n entries, modelled: ``n ceil(log2 (k + 1))`` comparisons."""
    return Counts(CMP=n * logarithm(k + 1))


def product(rows: int, inner: int, columns: int) -> Counts:
    """Return the modelled operations of a matrix product by its definition."""
    each = rows * columns
    return Counts(MUL=each * inner, ADD=each * max(0, inner - 1))


def _tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, (list, tuple)):
        return [tensor for value in values for tensor in _tensors(value)]
    return []


def _size(values: Any) -> int:
    return sum(tensor.numel() for tensor in _tensors(values))


def _converted(values: Any, dtype: torch.dtype | None) -> int:
    """Count the elements that must be converted to ``dtype``; integers to integers cost nothing."""
    if dtype is None:
        return 0
    return sum(
        t.numel()
        for t in _tensors(values)
        if t.dtype is not dtype and (t.is_floating_point() or dtype.is_floating_point)
    )


def _common(values: Any) -> torch.dtype | None:
    """Return the dtype in which ``values`` are computed; 0-dim tensors follow the others."""
    tensors = _tensors(values)
    leading = [t for t in tensors if t.dim()] or tensors
    return leading[0].dtype if len({t.dtype for t in leading}) == 1 else _promoted(leading)


def _promoted(tensors: list[torch.Tensor]) -> torch.dtype:
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def _each(**times: int) -> Rule:
    """Return the rule of so many primitives per result element; integer quotients are float."""

    def rule(args: Args, kwargs: Mapping[str, Any], out: Any) -> Counts:
        n = _size(out)
        common = _common(args)
        computed = out.dtype if _is_float(out) and not _is_float_dtype(common) else common
        taken = Counts({p: n * t for p, t in times.items()})
        return taken + Counts(LOAD=_size(args), STORE=n, CVT=_converted(args, computed))

    return rule


def _is_float(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.is_floating_point()


def _is_float_dtype(dtype: torch.dtype | None) -> bool:
    return dtype is not None and dtype.is_floating_point


def _sum_like(primitive: str) -> Rule:
    """Return the rule of ``a + alpha b``, with one more product per element unless alpha is one."""

    def rule(args: Args, kwargs: Mapping[str, Any], out: Any) -> Counts:
        scaled = kwargs.get("alpha", 1) != 1
        return _each(**{primitive: 1, "MUL": int(scaled)})(args, kwargs, out)

    return rule


def _mul(args: Args, kwargs: Mapping[str, Any], out: Any) -> Counts:
    return _each(**{"AND" if out.dtype is torch.bool else "MUL": 1})(args, kwargs, out)


def _power(args: Args, kwargs: Mapping[str, Any], out: Any) -> Counts:
    """Count a power: a square is one product, a root one SQRT, any other exp(p log x)."""
    exponent = args[1]
    if exponent == 2:
        return _each(MUL=1)(args, kwargs, out)
    if exponent == 0.5:
        return _each(SQRT=1)(args, kwargs, out)
    return _each(LOG=1, MUL=1, EXP=1)(args, kwargs, out)


def _clamp(args: Args, kwargs: Mapping[str, Any], out: Any) -> Counts:
    given = [*args[1:3], kwargs.get("min"), kwargs.get("max")]
    bounds = sum(bound is not None for bound in given)
    return _each(CMP=bounds, MUX=bounds)(args, kwargs, out)


def _reduce(*steps: str) -> Rule:
    """Return the rule of a reduction, which folds n elements into each result in n - 1 steps."""

    def rule(args: Args, kwargs: Mapping[str, Any], out: Any) -> Counts:
        n, results = _size(args[:1]), _size(out)
        dtype = out.dtype if isinstance(out, torch.Tensor) else None
        folds = max(0, n - results)
        converted = _converted(args[:1], dtype) if "ADD" in steps else 0
        return Counts(dict.fromkeys(steps, folds)) + Counts(LOAD=n, STORE=results, CVT=converted)

    return rule


def _norm(args: Args, kwargs: Mapping[str, Any], out: Any) -> Counts:
    """Count a norm: squares, their sum and a root; or magnitudes and their sum."""
    n, results, order = _size(args[:1]), _size(out), args[1] if len(args) > 1 else 2
    if order not in (1, 2):
        raise _unknown(f"linalg_vector_norm of order {order}")
    taken = Counts(LOAD=n, STORE=results, ADD=max(0, n - results))
    taken = taken + (Counts(MUL=n, SQRT=results) if order == 2 else Counts(AND=n))
    return taken + Counts(CVT=_converted(args[:1], out.dtype))


def _copy(args: Args, kwargs: Mapping[str, Any], out: Any) -> Counts:
    """Count a copy into the first argument from the second."""
    return Counts(LOAD=_size(args[1]), STORE=_size(out), CVT=_converted(args[1], out.dtype))


def _clone(args: Args, kwargs: Mapping[str, Any], out: Any) -> Counts:
    """Count a new tensor, perhaps of another format."""
    return Counts(LOAD=_size(args), STORE=_size(out), CVT=_converted(args, out.dtype))


def _filled(args: Args, kwargs: Mapping[str, Any], out: Any) -> Counts:
    return Counts(STORE=_size(out))


def _item(args: Args, kwargs: Mapping[str, Any], out: Any) -> Counts:
    return Counts(LOAD=1)


def _mean(args: Args, kwargs: Mapping[str, Any], out: Any) -> Counts:
    """Count a sum and its division."""
    return _reduce("ADD")(args, kwargs, out) + Counts(DIV=_size(out))


def _index(args: Args, kwargs: Mapping[str, Any], out: Any) -> Counts:
    """Count selected elements and their places; a mask is compared entry by entry."""
    masks = sum(t.numel() for t in _tensors(args[1]) if t.dtype is torch.bool)
    return Counts(LOAD=_size(out) + _size(args[1]), STORE=_size(out), CMP=masks)


def _index_put(args: Args, kwargs: Mapping[str, Any], out: Any) -> Counts:
    """Count values written to as many places."""
    places, values = _size(args[1]), _size(args[2])
    return Counts(LOAD=places + values, STORE=places)


def _index_copy(args: Args, kwargs: Mapping[str, Any], out: Any) -> Counts:
    """Count ``index_copy_(self, dim, places, values)`` of a flat tensor."""
    return Counts(LOAD=_size(args[2]) + _size(args[3]), STORE=_size(args[3]))


def _index_fill(args: Args, kwargs: Mapping[str, Any], out: Any) -> Counts:
    """Count a copy of a flat tensor whose given places hold a number."""
    n, places = _size(args[:1]), _size(args[2])
    return Counts(LOAD=n + places, STORE=n + places)


def _nonzero(args: Args, kwargs: Mapping[str, Any], out: Any) -> Counts:
    n = _size(args)
    return Counts(LOAD=n, CMP=n, STORE=_size(out))


def _bincount(args: Args, kwargs: Mapping[str, Any], out: Any) -> Counts:
    """Count one increment per entry."""
    n = _size(args[:1])
    return Counts(LOAD=n, ADD=n, STORE=_size(out))


def _topk(args: Args, kwargs: Mapping[str, Any], out: Any) -> Counts:
    n, k = _size(args[:1]), int(args[1])
    return selecting(n, k) + Counts(LOAD=n, STORE=_size(out))


def _sort(args: Args, kwargs: Mapping[str, Any], out: Any) -> Counts:
    n = _size(args[:1])
    return sorting(n) + Counts(LOAD=n, STORE=_size(out))


def _cumsum(args: Args, kwargs: Mapping[str, Any], out: Any) -> Counts:
    n = _size(args[:1])
    return Counts(ADD=max(0, n - 1), LOAD=n, STORE=n)


def _matmul(args: Args, kwargs: Mapping[str, Any], out: Any) -> Counts:
    """Count a matrix product; the last two tensors are the factors, a first one is added."""
    *added, a, b = _tensors(args)
    inner = a.shape[-1]
    rows = a.numel() // inner if inner else 0
    columns = b.shape[-1] if b.dim() > 1 else 1
    n = _size(out)
    sums = Counts(ADD=n) if added else Counts()
    return product(rows, inner, columns) + sums + Counts(LOAD=_size(args), STORE=n)


RULES: dict[str, Rule] = {
    "add": _sum_like("ADD"),
    "sub": _sum_like("SUB"),
    "rsub": _sum_like("SUB"),
    "mul": _mul,
    "div": _each(DIV=1),
    "reciprocal": _each(DIV=1),
    "neg": _each(SUB=1),
    "abs": _each(AND=1),
    "square": _each(MUL=1),
    "sqrt": _each(SQRT=1),
    "exp": _each(EXP=1),
    "log": _each(LOG=1),
    "pow": _power,
    "floor": _each(CVT=1),
    "trunc": _each(CVT=1),
    "clamp": _clamp,
    "clamp_min": _each(CMP=1, MUX=1),
    "clamp_max": _each(CMP=1, MUX=1),
    "where": _each(MUX=1),
    "lerp": _each(SUB=1, MUL=1, ADD=1),
    "addcmul": _each(MUL=1, ADD=1),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), _each(CMP=1)),
    **dict.fromkeys(("bitwise_not", "logical_not"), _each(NOT=1)),
    **dict.fromkeys(("bitwise_and", "logical_and"), _each(AND=1)),
    **dict.fromkeys(("bitwise_or", "logical_or"), _each(OR=1)),
    "sum": _reduce("ADD"),
    "mean": _mean,
    "max": _reduce("CMP", "MUX"),
    "min": _reduce("CMP", "MUX"),
    "all": _reduce("AND"),
    "any": _reduce("OR"),
    "linalg_vector_norm": _norm,
    "copy": _copy,
    **dict.fromkeys(("_to_copy", "clone", "cat", "stack", "flip", "roll"), _clone),
    **dict.fromkeys(
        ("zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "full"), _filled
    ),
    **dict.fromkeys(("full_like", "new_full", "fill", "zero", "arange", "scalar_tensor"), _filled),
    "_local_scalar_dense": _item,
    "index": _index,
    "index_put": _index_put,
    "index_copy": _index_copy,
    "index_fill": _index_fill,
    "nonzero": _nonzero,
    "bincount": _bincount,
    "topk": _topk,
    "sort": _sort,
    "cumsum": _cumsum,
    **dict.fromkeys(("mm", "bmm", "addmm", "mv", "dot"), _matmul),
}
"""Rules by name; an in-place operation is listed without the underscore at its end."""


def stem(operation: Any) -> str:
    """Return the name by which the table knows an operation."""
    name: str = operation.overloadpacket.__name__
    return name.removesuffix("_") if name not in RULES else name


def counts_of(operation: Any, args: Args, kwargs: Mapping[str, Any], out: Any) -> Counts:
    """Count what one call of torch takes.

    Raises:
        InvalidInput: an operation that the table does not know.
    """
    name = stem(operation)
    if name in FREE:
        return Counts()
    if name not in RULES:
        raise _unknown(str(operation))
    return RULES[name](args, kwargs, out)


def _unknown(what: str) -> InvalidInput:
    return InvalidInput(
        "operation",
        expected="one of torch that dpkern.cost can count",
        got=what,
        remedy="Add its primitives per element to dpkern/cost/_aten.py.",
    )


__all__ = ["MODELLED", "counts_of", "logarithm", "product", "selecting", "sorting", "stem"]

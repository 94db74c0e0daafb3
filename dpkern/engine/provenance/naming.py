"""Name operations alike, whichever way they were called.

``a + b``, ``b.__radd__(a)``, ``a.add(b)``, ``a.add_(b)`` and ``torch.add(a, b)`` are all ``add``.
"""

from __future__ import annotations

from functools import lru_cache

from .tensor import Function

_SIDES = ("", "r", "i")
_OPERATORS = {
    **{
        f"__{side}{op}__": op
        for op in ("add", "sub", "mul", "matmul", "pow", "mod", "and", "or", "xor")
        for side in _SIDES
    },
    **{f"__{side}{op}__": "div" for op in ("truediv", "div") for side in _SIDES},
    **{f"__{side}floordiv__": "floor_divide" for side in _SIDES},
    **{f"__{op}__": op for op in "neg invert abs eq ne lt le gt ge pos lshift rshift".split()},
}
_REVERSED = {f"__r{op}__" for op in "sub pow truediv div floordiv mod matmul".split()}


def name_of(func: Function) -> str:
    """Return the operation's name without the marks of operators and of writing in place."""
    try:
        return _name_of(func)
    except TypeError:  # not hashable
        return getattr(func, "__name__", "")


@lru_cache(maxsize=4096)
def _name_of(func: Function) -> str:
    name: str = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        return f"{attribute}.{name.strip('_')}"
    if name in _OPERATORS:
        return _OPERATORS[name]
    if name.endswith("_") and not name.startswith("__") and name != "requires_grad_":
        return name[:-1]
    return name


def has_reversed_operands(func: Function) -> bool:
    """Whether an operator was called with its operands swapped, as in ``__rsub__``."""
    return getattr(func, "__name__", "") in _REVERSED

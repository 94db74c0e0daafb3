"""Read an op's signature from the source of its annotations (``signature``).

Only the standard library is used: the build reads signatures before anything is installed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

from .signature import (
    GROUPS,
    LEADING,
    NUMBERS,
    STRUCTS,
    ChoiceParameter,
    DeviceParameter,
    DtypeParameter,
    NumberParameter,
    ObjectParameter,
    Parameter,
    Signature,
    TensorParameter,
)


def read(
    name: str,
    annotations: dict[str, str],
    choices: Callable[[str], Sequence[Any] | None],
    plan: str | None = None,
) -> Signature:
    """Read a signature from its annotations' source.

    Args:
        name: of the op.
        annotations: source by parameter, ``return`` last.
        choices: the options of a type with this name, None if it is no ``Literal``.
        plan: the type of what the op's own check makes for kernels.
    """
    trees = {key: ast.parse(text, mode="eval").body for key, text in annotations.items()}
    result = trees.pop("return")
    parameters = tuple(_parameter(key, tree, choices) for key, tree in trees.items())
    _check_order(name, parameters)
    number = NUMBERS.get(ast.unparse(result))
    return Signature(name, parameters, _results(result), number, plan, _made_into(result))


def _check_order(name: str, parameters: Sequence[Parameter]) -> None:
    """Refuse a dtype that would be checked before the tensor that decides it."""
    groups = [each.group for each in parameters if isinstance(each, TensorParameter)]
    leading = [place for place, group in enumerate(groups) if group in LEADING]
    if leading and "Sum" in groups[: leading[0]]:
        raise TypeError(f"{name}: a Sum stands in front of the tensor that decides its dtype")


def _parameter(
    name: str, tree: ast.expr, choices: Callable[[str], Sequence[Any] | None]
) -> Parameter:
    text, optional = ast.unparse(tree), False
    if isinstance(tree, ast.BinOp) and _is_none(tree.right):
        tree, optional = tree.left, True
    if isinstance(tree, ast.Subscript):
        head = ast.unparse(tree.value)
        if head in ("Sequence", "OneOrMore") and isinstance(tree.slice, ast.Subscript):
            item = _tensor(name, tree.slice)
            if item is not None:
                alone = head == "OneOrMore"
                return TensorParameter(name, *item, optional=optional, many=True, alone=alone)
        if head == "Sequence" and isinstance(tree.slice, ast.Name):
            if tree.slice.id in STRUCTS:
                return ObjectParameter(name, tree.slice.id, optional, many=True)
            if tree.slice.id in NUMBERS:
                return NumberParameter(name, tree.slice.id, optional, many=True)
        item = _tensor(name, tree)
        if item is not None:
            return TensorParameter(name, *item, optional=optional)
        if head == "Literal" and not optional:
            return ChoiceParameter(name, tuple(ast.literal_eval(_elements(tree))), None)
    if isinstance(tree, ast.Name):
        if tree.id == "Device":
            return DeviceParameter(name)
        if tree.id in NUMBERS:
            return NumberParameter(name, tree.id, optional)
        group = tree.id.removesuffix("Dtype")
        if group in GROUPS and group != tree.id:
            return DtypeParameter(name, group)
        if tree.id in STRUCTS:
            return ObjectParameter(name, tree.id, optional)
        options = None if optional else choices(tree.id)
        if options is not None:
            return ChoiceParameter(name, tuple(options), tree.id)
    return ObjectParameter(name, text)


def _results(tree: ast.expr) -> tuple[TensorParameter, ...] | None:
    if _is_none(tree):
        return ()
    if not isinstance(tree, ast.Subscript):
        return None
    parts = [tree]
    if _made_into(tree) is not None:
        group = ast.unparse(tree.value)
        labels = (ast.unparse(label) for label in _elements(tree).elts[1:])
        parts = [_subscript(f"{group}[Tensor, {label}]") for label in labels]
    elif ast.unparse(tree.value) == "tuple" and isinstance(tree.slice, ast.Tuple):
        parts = [part for part in tree.slice.elts if isinstance(part, ast.Subscript)]
    found = [_tensor("", part) for part in parts]
    if None in found:
        return None
    made = []
    for group, dims, marks in filter(None, found):
        label, _, rest = " ".join(dims).partition(":")
        made.append(TensorParameter(label.strip(), group, tuple(rest.split()), marks))
    return tuple(made)


def _made_into(tree: ast.expr) -> str | None:
    """Return the named tuple of ``Float[Coefficients, "linear: B D", "quadratic: B D"]``."""
    if not isinstance(tree, ast.Subscript) or ast.unparse(tree.value) not in GROUPS:
        return None
    first = ast.unparse(_elements(tree).elts[0])
    return None if first == "Tensor" else first


def _subscript(text: str) -> ast.Subscript:
    tree = ast.parse(text, mode="eval").body
    assert isinstance(tree, ast.Subscript)
    return tree


def _tensor(name: str, tree: ast.Subscript) -> tuple[str, tuple[str, ...], tuple[str, ...]] | None:
    group = ast.unparse(tree.value)
    if group not in GROUPS:
        return None
    first, dims, *marks = _elements(tree).elts
    if not isinstance(dims, ast.Constant) or ast.unparse(first) != "Tensor":
        raise TypeError(f"{name}: a tensor is declared as {group}[Tensor, 'sizes']")
    return group, tuple(str(dims.value).split()), tuple(ast.unparse(mark) for mark in marks)


def _elements(tree: ast.Subscript) -> ast.Tuple:
    inner = tree.slice
    return inner if isinstance(inner, ast.Tuple) else ast.Tuple([inner], ast.Load())


def _is_none(tree: ast.expr) -> bool:
    return isinstance(tree, ast.Constant) and tree.value is None


__all__ = ["read"]

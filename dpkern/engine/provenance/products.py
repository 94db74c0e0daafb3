"""Follow rows through products, which keep them, sum over them or mix their records."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .elementwise import rescaled
from .places import BY_ORDER, at_places
from .rules import TrackedCall, rule
from .states import OneRecord, PerRecord, RecordSum, State
from .tensor import state_of

_LETTERS = string.ascii_letters


def contracted(
    call: TrackedCall, factors: Sequence[tuple[Any, str]], result: str, out: Tensor
) -> State:
    """Return the state of a product of tensors.

    Args:
        call: the operation.
        factors: tensors with a letter for each of their dimensions. Equal letters meet, and
            letters that the result lacks are summed over.
        result: the letters of the result.
        out: the result.
    """
    states = [state_of(t) for t, _ in factors]
    known: list[State] = [s for s in states if s is not None]
    if not call.tracks_only(*(t for t, _ in factors)):
        return call.mixed("adds rows of samples to a product")
    if any(isinstance(s, RecordSum) for s in known):
        alone = len(known) == 1 and isinstance(known[0], RecordSum)
        if not alone:
            return call.mixed("is not linear in a sum over samples")
        return rescaled(known[0])  # type: ignore[arg-type]
    first = known[0]
    if isinstance(first, OneRecord):
        same = all(isinstance(s, OneRecord) and s.record == first.record for s in known)
        return first if same else call.mixed("combines two samples")
    letters = set()
    for (_, names), state in zip(factors, states, strict=True):
        if state is None:
            continue
        if not isinstance(state, PerRecord) or not isinstance(first, PerRecord):
            return call.mixed("combines two samples")
        letter = names[state.dim]
        if names.count(letter) != 1:
            return call.mixed("takes a diagonal over the samples")
        if not first.matches(state):
            return call.mixed("combines rows of different samples")
        letters.add(letter)
    if len(letters) != 1:
        return call.mixed("multiplies rows of one sample with those of another")
    assert isinstance(first, PerRecord)
    letter = letters.pop()
    if any(s is None and letter in names for (_, names), s in zip(factors, states, strict=True)):
        at_places(first.batch)
        if first.batch.has_ordered_rows and any(t.requires_grad for t in call.tracked):
            return call.mixed(BY_ORDER)
    if letter not in result:
        return RecordSum(first.batch, "sum", any(s is None for s in states))
    place = result.index(letter)
    if out.shape[place] != len(first.ids):
        return call.mixed("changes the number of rows")
    return PerRecord(first.batch, first.ids, place)


@rule("matmul", "mm", "bmm", "mv", "dot", "vdot", "chain_matmul")
def product(call: TrackedCall, out: Tensor) -> State | None:
    """Follow rows through ``a @ b``."""
    if call.name == "chain_matmul" or len(call.args) < 2:
        return call.mixed("multiplies more than two factors")
    a, b = (call.args[1], call.args[0]) if call.has_reversed_operands else call.args[:2]
    batch = _LETTERS[: max(a.dim(), b.dim(), 2) - 2]
    left = (batch[len(batch) - (a.dim() - 2) :] + "XY") if a.dim() > 1 else "Y"
    right = (batch[len(batch) - (b.dim() - 2) :] + "YZ") if b.dim() > 1 else "Y"
    if a.dim() == 2:
        left = "XY"
    if b.dim() == 2:
        right = "YZ"
    result = batch + ("X" if a.dim() > 1 else "") + ("Z" if b.dim() > 1 else "")
    return contracted(call, [(a, left), (b, right)], result, out)


@rule("linear")
def linear(call: TrackedCall, out: Tensor) -> State | None:
    """Follow rows through ``x @ w.T + b`` with a constant b."""
    x, weight = call.argument(0, "input"), call.argument(1, "weight")
    lead = _LETTERS[: x.dim() - 1]
    right = "ZY" if weight.dim() == 2 else "Y"
    return contracted(call, [(x, lead + "Y"), (weight, right)], lead + right[:-1], out)


@rule("outer", "ger")
def outer(call: TrackedCall, out: Tensor) -> State | None:
    """Follow rows through the products of all pairs."""
    return contracted(call, [(call.args[0], "X"), (call.args[1], "Z")], "XZ", out)


@rule("einsum")
def einsum(call: TrackedCall, out: Tensor) -> State | None:
    """Follow the letter of the rows from the operands to the result."""
    equation, *operands = call.args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    if not isinstance(equation, str):
        return call.mixed("has an equation whose samples cannot be told")
    left, arrow, result = equation.replace(" ", "").partition("->")
    names = left.split(",")
    if not arrow:
        joined = left.replace(",", "").replace("...", "")
        result = "..." * ("..." in left) + "".join(
            sorted(c for c in set(joined) if joined.count(c) == 1)
        )
    widths = [t.dim() - len(n.replace("...", "")) for t, n in zip(operands, names, strict=True)]
    spare = [c for c in _LETTERS + "αβγδεζηθ" if c not in equation]
    width = max([w for w, n in zip(widths, names, strict=True) if "..." in n], default=0)
    # Dimensions of an ellipsis are aligned from the right.
    filled = [
        n.replace("...", "".join(spare[width - w : width]))
        for w, n in zip(widths, names, strict=True)
    ]
    result = result.replace("...", "".join(spare[:width]))
    return contracted(call, list(zip(operands, filled, strict=True)), result, out)

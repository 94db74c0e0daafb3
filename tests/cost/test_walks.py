"""Closed forms against walks: an op's reference runs, and each operation of torch is counted.

A line of a form that says ``reference walk`` stands here with the operations that do it, by name; a
number tells which of several. Products and quotients are equal to the last one. Additions (and
subtractions) are too, but for one of each sum: whether it begins at 0 is the kernel's affair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dpkern.base import dispatch
from dpkern.base.counts import WALK, Counts, Itemised
from dpkern.cost import _aten
from dpkern.cost._facts import facts_of
from dpkern.cost.counted import KERNELS
from dpkern.cost.forms import FORMS
from tests.cost import counted_cases, counted_layer_cases
from tests.cost.counted_layer_cases import Draw

SHAPES = 24

LINES: dict[str, dict[str, tuple[str, ...]]] = {
    "clip.sample_norm": {
        "norms": ("linalg_vector_norm", "pow", "sum"),
        "centred": ("sub",),
        "scaled": ("div",),
    },
    "clip.clip_sum": {
        "norms": ("linalg_vector_norm", "pow 0", "sum 0"),
        "sums": ("mul:2", "sum:2 1:", "add_"),
    },
    "ghost.explicit_norm": {"squares": ("pow", "sum")},
    "ghost.contract": {"sums": ("mm", "dot", "add_")},
    "ghost.linear_norm": {"gradients": ("bmm",), "squares": ("pow 0", "sum 1:3")},
    "ghost.linear_gradient": {"gradients": ("bmm",), "squares": ("pow", "sum", "mul")},
    "ghost.rounded_gradient": {"gradients": ("bmm",), "squares": ("pow", "sum", "mul")},
    "ghost.rounded_sum": {"sums": ("mm", "add_")},
    "ghost.linear_sum": {"scaling": ("mul",), "sums": ("mm", "add_")},
    "ghost.explicit_integer_sum": {"scaling": ("mul",), "sums": ("sum", "add_")},
    "ghost.linear_integer_sum": {"scaling, products": ("mul", "bmm"), "sums": ("sum", "add_")},
    "ghost.conv_integer_sum": {"scaling": ("mul",), "products": ("bmm",), "sums": ("sum", "add_")},
    "ghost.conv_norm": {"gradients": ("bmm",), "squares": ("pow 2", "sum 2:4")},
    "ghost.conv_gradient": {"gradients": ("bmm",), "squares": ("pow", "sum", "mul")},
    "ghost.conv_sum": {"scaling": ("mul",), "sums": ("convolution_backward", "add_")},
    "ghost.embedding_sum": {"sums": ("mul", "index_add_")},
    "ghost.tied_cross": {
        "inner products": ("bmm", "mul 2", "sum 2:4"),
        "norms": ("linalg_vector_norm",),
    },
    "ghost.layer_norm_backward": {
        "sums, means": ("mul -4", "mul -1", "mean", "sum"),
        "input gradient": ("sub -2:", "mul -3:-1"),
    },
    "ghost.rms_norm_backward": {
        "sums, means": ("mul -4", "mul -1", "mean", "sum"),
        "input gradient": ("sub", "mul -3:-1"),
    },
    "spectral.conv_norm": {"powers": ("pow:4", "sum:4 :2", "sum:3")},
    "spectral.conv_bins": {"powers": ("pow:4", "sum:4 :2", "sum:3")},
    "spectral.bins_sum": {
        "scaling": ("mul 0",),
        "products": ("bmm", "add:3", "sub:3"),
        "crop": ("mm", "add:2", "add_"),
    },
    "spectral.filtered": {"products": ("mm", "bmm"), "gains": ("mul_",)},
    "spectral.whitened_norm": {"coordinates": ("mm", "bmm", "mv", "linalg_vector_norm 0")},
    "spectral.circulant_norm": {"products over bins": ("bmm", "pow 0", "sum :2", "mul 0")},
    "spectral.circulant_product": {"products": ("bmm",)},
    "spectral.circulant_gradient": {"products": ("bmm",), "squares": ("pow", "sum")},
    "spectral.circulant_sum": {
        "scaling": ("mul:4",),
        "products": ("bmm",),
        "gains": ("mul:3",),
        "sums": ("add_",),
    },
    "product.matmul": {"products": ("mm",), "bias": ("add_",)},
    "recurrent.gru_backward": {"products": ("mm",)},
    "recurrent.lstm_backward": {"products": ("mm",)},
    "recurrent.rnn_backward": {"products": ("mm",)},
    "update.advance": {"step counter": ("add_", "mul_")},
    "update.project": {
        "norm": ("linalg_vector_norm :-1",),
        "scaling": ("reciprocal", "mul 1:"),
        "threshold": ("cumsum", "sub 0", "div"),
        "shift": ("sub 2:",),
    },
}
"""Per op and line: torch's operations in the reference. ``mul:2`` are those of a matrix, ``mul 1:``
all but the first; two lines with a comma between them are taken together."""

FORMULAS = {"coef.expanded", "ghost.embedding_norm", "ghost.group_norm_backward"}
FORMULAS |= {"ghost.linear_sum_error", "ghost.conv_sum_error", "ghost.tied_sum_error"}
FORMULAS |= {"ghost.linear_integer_norm"}
FORMULAS |= {"ghost.embedding_integer_sum", "ghost.tied_integer_sum"}
FORMULAS |= {"ghost.linear_norms", "spectral.whitened_bins"}
FORMULAS |= {"recurrent.gru", "recurrent.lstm", "recurrent.rnn"}
"""Ops of which no line is compared: their references do the work in another way."""


class Done(NamedTuple):
    """One operation of torch."""

    name: str
    dims: int
    counts: Counts
    results: int


class Walk(TorchDispatchMode):  # type: ignore[misc]
    """Counts every operation of torch that the table or ``_MORE`` knows."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[Done] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        out = func(*args, **given)
        name = func.overloadpacket.__name__
        rule = _MORE.get(name) or _aten.RULES.get(_aten.stem(func))
        made = [t for t in (out if isinstance(out, tuple) else (out,)) if torch.is_tensor(t)]
        if rule is not None and made:
            counts, results = rule(args, given, made[0]), made[0].numel()
            if made[0].is_complex():
                counts, results = _of_complex(counts, args), 2 * results
            dims = args[0].dim() if torch.is_tensor(args[0]) else 0
            self.done.append(Done(name, dims, counts, results))
        return out

    def of(self, selector: str) -> list[Done]:
        """The operations that a selector names."""
        wanted, _, which = selector.partition(" ")
        name, _, dims = wanted.partition(":")
        found = [d for d in self.done if d.name == name and (not dims or d.dims == int(dims))]
        if ":" in which:
            bounds = [int(part) if part else None for part in which.split(":")]
            return found[slice(*bounds)]
        return found[int(which) :][:1] if which else found


def _index_add(args: Any, kwargs: Any, out: Any) -> Counts:
    return Counts(ADD=args[3].numel())


def _weight_gradient(args: Any, kwargs: Any, out: Any) -> Counts:
    """Every output gradient times every tap; the zeros of the padding are multiplied."""
    g, _, weight = args[:3]
    terms = g.numel() // g.shape[1]
    return Counts(MUL=terms * weight.numel(), ADD=(terms - 1) * weight.numel())


_MORE: dict[str, Any] = {"index_add_": _index_add, "convolution_backward": _weight_gradient}


def _of_complex(counts: Counts, args: Any) -> Counts:
    """Two complex numbers: 4 products and 2 sums; a complex and a real one: 2 products."""
    factors = [t for t in args if torch.is_tensor(t)]
    if not all(t.is_complex() for t in factors):
        return Counts(MUL=2 * counts["MUL"])
    return Counts(MUL=4 * counts["MUL"], ADD=2 * (counts["MUL"] + counts["ADD"]))


Given = tuple[str, tuple[Any, ...], dict[str, Any]]


def calls(name: str) -> Iterator[Given]:
    """Calls of the op with small random shapes; of lists of tensors with two samples or more."""
    if name in counted_layer_cases.CASES:
        for seed in range(SHAPES):
            draw = Draw(1000 * sorted(LINES).index(name) + seed)
            yield (name, *counted_layer_cases.CASES[name](draw))
        return
    for seed in range(2 * SHAPES):
        call = counted_cases.build(name.split(".")[1], seed)
        yield name, call.args, call.kwargs


def fits(given: Given) -> bool:
    """Whether the reference does what the form counts.

    It doubles the row of a single sample, raises integers to a power of 1, and adds empty sums.
    """
    name, args, kwargs = given
    if name.startswith("clip.") and len(args[0][0]) < 2:
        return False
    if kwargs.get("arithmetic") == "exact" and kwargs["p"] == 1:
        return False
    items = FORMS[name](*args, **kwargs, **facts_of(name, args, kwargs)).items
    work = sum((i.counts for i in items if i.evidence == WALK), Counts())
    return any(work[p] for p in ("ADD", "SUB", "MUL"))


def copied(value: Any) -> Any:
    """A call's arguments, for an op that works in place."""
    if isinstance(value, torch.Tensor):
        return value.clone(memory_format=torch.preserve_format)
    return [copied(part) for part in value] if isinstance(value, list) else value


def walked(given: Given) -> Walk:
    """The reference of the call, operation by operation; constants are made before."""
    name, args, kwargs = given
    reference = dispatch.OPS[name].reference
    for walk in (Walk(), Walk()):
        own = [copied(arg) for arg in args], {k: copied(v) for k, v in kwargs.items()}
        with walk, torch.no_grad():
            reference(*own[0], **own[1])
    return walk


def compared(given: Given) -> Counter[str]:
    """Compare every line of the call's form that a walk sees; how many operations each had."""
    name, args, kwargs = given
    items = FORMS[name](*args, **kwargs, **facts_of(name, args, kwargs)).items
    lines = {i.name: i.counts for i in items if i.evidence == WALK}
    assert lines.keys() <= {line for key in LINES[name] for line in key.split(", ")}
    walk, seen = walked(given), Counter[str]()
    for key, selectors in LINES[name].items():
        parts = [lines[line] for line in key.split(", ") if line in lines]
        if not parts:
            continue
        form = sum(parts, Counts())
        done = [d for selector in selectors for d in walk.of(selector)]
        counts = sum((d.counts for d in done), Counts())
        assert (counts["MUL"], counts["DIV"]) == (form["MUL"], form["DIV"]), (key, given)
        least = counts["ADD"] + counts["SUB"]
        most = least + sum(d.results for d in done)
        assert least <= form["ADD"] + form["SUB"] <= most, (key, given)
        seen[key] += sum(form[p] for p in ("ADD", "SUB", "MUL", "DIV"))
    return seen


@pytest.mark.parametrize("name", LINES)
def test_a_walk_of_the_reference_finds_the_lines_that_say_so(name: str) -> None:
    seen: Counter[str] = Counter()
    for given in filter(fits, calls(name)):
        seen += compared(given)
    assert seen.keys() == LINES[name].keys()


@pytest.mark.parametrize("name", LINES)
def test_one_more_operation_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form = FORMS[name]

    def with_more(*args: Any, **kwargs: Any) -> Itemised:
        items = form(*args, **kwargs).items
        more = (
            replace(i, counts=i.counts + Counts(MUL=1)) if i.evidence == WALK else i for i in items
        )
        return Itemised(tuple(more))

    given = next(g for g in filter(fits, calls(name)) if compared(g))
    monkeypatch.setitem(FORMS, name, with_more)
    with pytest.raises(AssertionError):
        compared(given)


def test_every_op_is_executed_walked_or_a_formula() -> None:
    assert set(dispatch.OPS) == set(FORMS) == {*KERNELS, *LINES, *FORMULAS}
    assert len(FORMS) == len(KERNELS) + len(LINES) + len(FORMULAS)

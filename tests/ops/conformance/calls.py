"""Valid calls of an op in every dtype, with odd layouts, without what is optional, and empty."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dpkern.base.dispatch import Op
from dpkern.base.signature import (
    ChoiceParameter,
    NumberParameter,
    is_bound,
)
from dpkern.bench.case import LISTS, Case, Facts, dtypes_of

USUAL = (4, 5, 7, 3, 6, 2)
"""Sizes in their order of appearance, all different: two that are swapped show."""
LARGE = (2, 33, 17, 65, 9, 20)
"""Beyond vectors and tiles, with tails."""
SHAPES = {"usual": (3, 5), "large": (33, 17), "ones": (), "zeros": (0, 3)}


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
        for kind in dtypes_of(op):
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

"""Put a constant in the place of every random number that a module draws.

A pass on fewer samples draws other numbers, and its outputs cannot be compared with those of the
whole batch. With constants in their place, what is left between the two passes is what the module
makes of the number of samples. There are two sets of them, low and high, since a mask that is made
by comparison, ``rand() < 0.5`` or ``rand() > 0.5``, hides with one what it keeps with the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .random_state import RandomState

Named = dict[str, Any]
"""Arguments of an operation by the names of its schema."""

MOST = 1024
"""Maximum number of draws in a pass. A loop that draws until a condition holds may never end."""


def _masks(of: Named, high: bool) -> Any:
    """Return the mean, by which dropout keeps all as it is, or one."""
    chance = of.get("p", of["self"])
    return 1.0 * (torch.as_tensor(chance) > 0) if high else chance


def _normal(of: Named, high: bool) -> Any:
    return of["mean"] + of["std"] * (1.25 if high else 0.5)


def _uniform(of: Named, high: bool) -> Any:
    start, end = of.get("from", 0.0), of.get("to", 1.0)
    return start + (end - start) * (0.8 if high else 0.2)


def _whole(of: Named, high: bool) -> Any:
    end = of.get("high", of.get("to"))
    return end - 1 if high and end is not None else of.get("low", of.get("from", 0)) or 0


def _chosen(of: Named, high: bool) -> Tensor:
    """Return the likeliest entries, in the place of a choice by weights."""
    weights, count = of["self"], of["num_samples"]
    likeliest: Tensor = weights.topk(1 if of["replacement"] else count, -1).indices
    return likeliest.expand(*likeliest.shape[:-1], count)


_CONSTANTS: dict[str, Callable[[Named, bool], Any]] = {
    "bernoulli": _masks,
    "binomial": lambda of, _: (of["count"] * of["prob"]).round(),
    "cauchy": lambda of, _: of["median"] + of["sigma"],
    "exponential": lambda of, _: 1 / of["lambd"],
    "geometric": lambda of, high: 3.0 if high else 1.0,
    "log_normal": lambda of, _: math.exp(of["mean"]),
    "multinomial": _chosen,
    "normal": _normal,
    "poisson": lambda of, _: of["self"].round(),
    "rand": _uniform,
    "rand_like": _uniform,
    "randint": _whole,
    "randint_like": _whole,
    "randn": lambda of, high: 1.25 if high else 0.5,
    "randn_like": lambda of, high: 1.25 if high else 0.5,
    "random": _whole,
    "randperm": lambda of, _: torch.arange(of["n"]),
    "_standard_gamma": lambda of, _: of["self"],
    "uniform": _uniform,
}
"""The constants by operation, without the ``_`` of those that write in place."""


class SteadyDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces random numbers while it is entered, once for each pass.

    Args:
        high: which of the two sets of constants it puts in their place.

    Attributes:
        drawn: number of draws since it was entered last.
        unknown: operations that drew numbers which are not replaced, or too many of them.
    """

    def __init__(self, *, high: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.high = high
        self.drawn = 0
        self.unknown: set[str] = set()

    def __enter__(self) -> SteadyDraws:
        self.drawn = 0
        return super().__enter__()  # type: ignore[no-any-return,no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, _: Any, args: Sequence[Any] = (), kwargs: Named | None = None
    ) -> Any:
        given = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **given)
        self.drawn += 1
        name = str(func._schema.name).removeprefix("aten::")
        if self.drawn > MOST:
            self.unknown.add(name)
            raise RuntimeError(f"more than {MOST} random numbers or tensors of them in a pass")
        constant = _CONSTANTS.get(name.removesuffix("_"))
        if name == "native_dropout":
            x: Tensor = args[0]
            return x.clone(), torch.ones_like(x, dtype=torch.bool)
        if constant is not None:
            value = constant(_named(func, args, given), self.high)
            return func(*args, **given).copy_(torch.as_tensor(value))
        devices = {x.device for x in args if isinstance(x, Tensor)}
        before = RandomState(devices)
        result = func(*args, **given)
        if before.changed():
            self.unknown.add(name)
        else:
            self.drawn -= 1
        return result


def _named(func: Any, args: Sequence[Any], kwargs: Named) -> Named:
    wanted = func._schema.arguments
    defaults = {each.name: each.default_value for each in wanted if each.has_default_value()}
    places = {each.name: value for each, value in zip(wanted, args, strict=False)}
    return defaults | places | kwargs

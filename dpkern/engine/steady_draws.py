"""Put a constant in the place of every random number that a module draws.

A pass on fewer samples draws other numbers, and its outputs cannot be compared with those of the
whole batch. With constants in their place, what is left between the two passes is what the module
makes of the number of samples. Masks have their mean (dropout then keeps all). Uniform numbers
stand where masks made by comparison, ``rand() < 0.9`` or ``rand() > 0.1``, keep samples, normal
ones half a standard deviation above their mean, so that their scale shows.
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


_UNIFORM = 0.382


def _normal(of: Named) -> Any:
    return of["mean"] + of["std"] / 2


def _chosen(of: Named) -> Tensor:
    """Return the likeliest entries, in the place of a choice by weights."""
    weights, count = of["self"], of["num_samples"]
    likeliest: Tensor = weights.topk(1 if of["replacement"] else count, -1).indices
    return likeliest.expand(*likeliest.shape[:-1], count)


_CONSTANTS: dict[str, Callable[[Named], Any]] = {
    "bernoulli": lambda of: of.get("p", of["self"]),
    "binomial": lambda of: (of["count"] * of["prob"]).round(),
    "cauchy": lambda of: of["median"] + of["sigma"],
    "exponential": lambda of: 1 / of["lambd"],
    "geometric": lambda of: 1.0,
    "log_normal": lambda of: math.exp(of["mean"]),
    "multinomial": _chosen,
    "normal": _normal,
    "poisson": lambda of: of["self"].round(),
    "rand": lambda of: _UNIFORM,
    "rand_like": lambda of: _UNIFORM,
    "randint": lambda of: of.get("low", 0),
    "randint_like": lambda of: of.get("low", 0),
    "randn": lambda of: 0.5,
    "randn_like": lambda of: 0.5,
    "random": lambda of: of.get("from", 0),
    "randperm": lambda of: torch.arange(of["n"]),
    "_standard_gamma": lambda of: of["self"],
    "uniform": lambda of: of["from"] + _UNIFORM * (of["to"] - of["from"]),
}
"""The constants by operation, without the ``_`` of those that write in place."""


class SteadyDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces random numbers while it is entered.

    Attributes:
        unknown: operations that drew numbers which are not replaced.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unknown: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, _: Any, args: Sequence[Any] = (), kwargs: Named | None = None
    ) -> Any:
        given = kwargs or {}
        name = str(func._schema.name).removeprefix("aten::")
        if name == "native_dropout":
            x: Tensor = args[0]
            return x.clone(), torch.ones_like(x, dtype=torch.bool)
        constant = _CONSTANTS.get(name.removesuffix("_"))
        if constant is not None:
            value = constant(_named(func, args, given))
            return func(*args, **given).copy_(torch.as_tensor(value))
        devices = {x.device for x in args if isinstance(x, Tensor)}
        before = RandomState(devices)
        result = func(*args, **given)
        if before.changed():
            self.unknown.add(name)
        return result


def _named(func: Any, args: Sequence[Any], kwargs: Named) -> Named:
    wanted = func._schema.arguments
    defaults = {each.name: each.default_value for each in wanted if each.has_default_value()}
    places = {each.name: value for each, value in zip(wanted, args, strict=False)}
    return defaults | places | kwargs

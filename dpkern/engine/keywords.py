"""The keywords of ``make_private`` for type checkers, editors and ``help``.

``MakePrivateOptions`` says what each of them means and what it is by default. Type checkers accept
no dataclass as the type of keyword arguments, so names and types stand here once more;
``tests/engine/test_engine_keywords.py`` compares them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, ParamSpec, TypedDict, TypeVar

from ..step.noise_tables.source import NoiseSource
from .arguments import Groups, MakePrivateOptions

P = ParamSpec("P")
R = TypeVar("R")


class MakePrivateKeywords(TypedDict, total=False):
    """The options that change nothing of what ``make_private`` returns."""

    clipping: str
    clip_groups: Groups
    arithmetic: str | None
    loss_reduction: str
    poisson_sampling: bool
    sampling: str | None
    max_physical_batch_size: int | None
    views: int
    masked_padding: bool
    keep_budget: float | int | None
    unsafe_seed: int | None
    rounds: int
    backend: str | None
    noise_source: NoiseSource | None
    sample_rate: float | None
    expected_batch_size: float | None
    dataset_size: int | None
    batch_first: bool
    noise_generator: object
    wrap_model: bool
    rand_on_empty: bool


def with_options_shown(method: Callable[P, R]) -> Callable[P, R]:
    """Show every option with its default in the method's signature, in place of ``**options``."""
    signature = inspect.signature(method)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    taken = {parameter.name for parameter in own}
    options = [
        inspect.Parameter(
            option.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=option.default,
            annotation=option.type,
        )
        for option in fields(MakePrivateOptions)
        if option.name not in taken
    ]
    shown: Any = method
    shown.__signature__ = signature.replace(parameters=[*own, *options])
    return method

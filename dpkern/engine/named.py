"""Make a mechanism from the options of a run; the mechanism derives the fields that follow.

A setting ``KEY=VALUE`` names a field of the mechanism's class and is read by that field's type.
Fields that have an option of their own, or follow from the run, cannot be set this way.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..base.errors import InvalidInput
from ..privacy.mechanisms import Mechanism, Site
from ..privacy.mechanisms.run_facts import RunFacts
from . import groups
from .survey import survey

MODES = ("corrected", "published")
CALIBRATED_TO = {"corrected": "certified", "published": "claimed"}
"""Meaning of a wanted epsilon by mode: published experiments calibrate the paper's claim."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The facts about a run that a mechanism may need.

    Attributes:
        model: the model, not private yet; None where only numbers are asked for.
        row_shape: shape of one sample.
        classes: number of labels.
        steps: number of steps of the whole run.
        sample_rate: expected batch size / rows.
        rows: number of training rows.
        batch_size: expected batch size.
        delta: delta of the guarantee.
        lr: learning rate, for the gradient of the mean loss.
    """

    model: nn.Module | None
    row_shape: tuple[int, ...]
    classes: int
    steps: int
    sample_rate: float
    rows: int
    batch_size: int
    delta: float
    lr: float = 0.1

    def facts(self) -> RunFacts:
        """Return these facts for the mechanism, which knows no model."""

        def sites() -> tuple[Site, ...]:
            return survey(self._built(), torch.zeros(2, *self.row_shape))

        return RunFacts(
            sites=sites,
            layers=lambda: groups.by_owner(self._built()),
            classes=self.classes,
            steps=self.steps,
            sample_rate=self.sample_rate,
            rows=self.rows,
            batch_size=self.batch_size,
            delta=self.delta,
            lr=self.lr,
        )

    def _built(self) -> nn.Module:
        if self.model is None:
            raise InvalidInput(
                "model",
                expected="a model, because this mechanism depends on its layers",
                got="none",
                remedy="Pass --model, and --row-shape if its rows are not the usual ones.",
            )
        return self.model


Fields = dict[str, Any]
"""Arguments of a mechanism by name."""

OPTIONS = ("noise_multiplier", "max_grad_norm", "clipping", "arithmetic", "mode")
"""Fields with an option of their own."""


DERIVED = ("expected_batch_size", "groups", "sites")
"""Fields that follow from the run wherever a mechanism has them."""

NAMES = Mechanism.names(trained_by="gradients")
"""Names that ``--mechanism`` takes for a run of a model."""


def make(
    name: str,
    run: Run,
    *,
    mode: str,
    settings: Sequence[str] = (),
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    max_grad_norm: float = 1.0,
    clipping: str | None = None,
    arithmetic: str | None = None,
) -> tuple[Mechanism, bool]:
    """Return the mechanism, and whether its noise has still to be calibrated to ``epsilon``.

    Raises:
        InvalidInput: options or settings that the mechanism does not know or take.
    """
    kind = Mechanism.named(name)
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    given: Fields = {"mode": mode, **parsed(name, settings)}
    own_budget = epsilon is not None and mode in kind.budget
    sigma = 1.0 if noise_multiplier is None else noise_multiplier  # 1: where calibration starts
    offered = {
        "noise_multiplier": None if own_budget else sigma,
        "max_grad_norm": max_grad_norm,
        "clipping": clipping,
        "arithmetic": arithmetic,
    }
    for key, value in offered.items():
        if value is not None and key in names:
            given[key] = value
        elif value is not None and key in ("clipping", "arithmetic"):
            raise InvalidInput(
                key,
                expected=f"none: {name} has no such choice",
                got=value,
                remedy=f"Leave --{key} out.",
            )
    if own_budget:
        given["epsilon"] = epsilon
    given |= kind.fields_of_run(run.facts(), given)
    given = {key: value for key, value in given.items() if key in names}  # a mode may be derived
    return kind(**given), epsilon is not None and not own_budget


def parsed(name: str, settings: Sequence[str]) -> Fields:
    """Return ``KEY=VALUE`` texts as fields of a mechanism; see ``read_settings``."""
    kind = Mechanism.named(name)
    return read_settings(kind, settings, decided=(*OPTIONS, *DERIVED, *kind.derived))


def read_settings(kind: type[Any], settings: Sequence[str], *, decided: Sequence[str]) -> Fields:
    """Return ``KEY=VALUE`` texts as fields of ``kind``, except those ``decided`` elsewhere.

    Raises:
        InvalidInput: no ``=``, an unknown field, one that is decided elsewhere, or a value that
            is not of its type.
    """
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    free = [field for field in names if field not in decided]
    found: Fields = {}
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals or key not in free or key in found:
            taken = key in names and key not in free
            raise InvalidInput(
                "set",
                expected=f"KEY=VALUE once per key, with a KEY among {', '.join(free) or 'none'}",
                got=text,
                remedy="Leave it out: it has an option of its own or follows from the run."
                if taken
                else f"Choose a field of {kind.__name__}.",
            )
        found[key] = _read(key, value, hints[key])
    return found


_WORDS: Mapping[str, bool] = {"true": True, "false": False}


def _read(key: str, text: str, kind: Any) -> Any:
    """Return ``text`` as a value of this annotation: of the first type of a union that fits."""
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    for one in sorted(kinds, key=_order):
        try:
            return _value(text, one)
        except (TypeError, ValueError):
            continue
    raise InvalidInput(
        "set",
        expected=f"{key} as {' or '.join(getattr(k, '__name__', str(k)) for k in kinds)}",
        got=text,
        remedy="Write numbers plainly, true or false, none, tuples with commas, ball:1.",
    )


def _order(kind: Any) -> int:
    """Return a type's place among those to try: text last, since it takes anything."""
    return 1 if kind is str else 0


def _value(text: str, kind: Any) -> Any:
    if kind is types.NoneType and text == "none":
        return None
    if kind is bool and text in _WORDS:
        return _WORDS[text]
    if kind is int:
        return int(text)
    if kind is float and not math.isnan(float(text)):
        return float(text)
    if kind is str:
        return text
    if typing.get_origin(kind) is tuple:
        parts, inner = text.split(","), typing.get_args(kind)
        each = [inner[0]] * len(parts) if inner[1:] == (Ellipsis,) else list(inner)
        if len(each) == len(parts):
            return tuple(_value(*pair) for pair in zip(parts, each, strict=True))
    name, *numbers = text.split(":")
    if dataclasses.is_dataclass(kind) and name == getattr(kind, "__name__", "").lower():
        return kind(*map(float, numbers))  # type: ignore[operator]  # a class, as it has a name
    raise ValueError(text)

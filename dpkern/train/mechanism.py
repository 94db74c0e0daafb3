"""From the options of a run to its mechanism: one builder per name.

A setting ``KEY=VALUE`` names a field of the mechanism's class and is read by that field's type.
Fields that have an option of their own, or follow from the run, cannot be set this way.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .. import mechanisms
from ..engine import groups
from ..engine.survey import survey
from ..errors import InvalidInput
from ..mechanisms.base import Mechanism

MODES = ("corrected", "published")
CALIBRATED_TO = {"corrected": "certified", "published": "claimed"}
"""What a wanted epsilon means: published experiments calibrate the source's claim."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a mechanism may have to know of its run.

    Attributes:
        model: not private yet; None where only numbers are asked for.
        row_shape: of one sample.
        classes: number of labels.
        steps: of the whole run.
        sample_rate: expected batch size / rows.
        rows: number of training rows.
        batch_size: expected.
        delta: of the run.
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


Fields = dict[str, Any]
"""Arguments of a mechanism by name."""


@dataclass(frozen=True, kw_only=True)
class Builder:
    """How one mechanism is made.

    Attributes:
        kind: its class in ``dpkern.mechanisms``.
        more: further arguments that follow from the run and the arguments so far.
        derived: fields that ``more`` decides, which no setting may name.
        budget: the epsilon that a run asks for is a field of the mechanism in these modes, and
            nothing is calibrated.
    """

    kind: str
    more: Callable[[Run, Fields], Fields] | None = None
    derived: tuple[str, ...] = ()
    budget: tuple[str, ...] = ()

    @property
    def type(self) -> type[Mechanism]:
        found: type[Mechanism] = getattr(mechanisms, self.kind)
        return found


OPTIONS = ("noise_multiplier", "max_grad_norm", "clipping", "arithmetic", "mode")
"""Fields with an option of their own."""


def _model(run: Run) -> nn.Module:
    if run.model is None:
        raise InvalidInput(
            "model",
            expected="a model, because this mechanism depends on its layers",
            got="none",
            remedy="Pass --model, and --row-shape if its rows are not the usual ones.",
        )
    return run.model


def _groups(run: Run, given: Fields) -> Fields:
    return {"groups": groups.by_owner(_model(run))} if given.get("clipping") == "group" else {}


def _layers(run: Run, given: Fields) -> Fields:
    sites = survey(_model(run), torch.zeros(2, *run.row_shape))
    return {"sites": sites, **_groups(run, given)}


def _expected_batch(run: Run, given: Fields) -> Fields:
    del given
    return {"expected_batch_size": float(run.batch_size)}


def _categories(run: Run, given: Fields) -> Fields:
    if "epsilon" not in given:
        raise InvalidInput(
            "epsilon",
            expected="the epsilon of one response",
            got="none",
            remedy="Pass --epsilon; the probability of a lie follows from it.",
        )
    return {"categories": run.classes}


def _budget(run: Run, given: Fields) -> Fields:
    """What the printed noise follows from, where the budget is given and not the noise."""
    if "epsilon" not in given:
        return {"lot": run.batch_size}
    steps, rate = run.steps, run.sample_rate
    return {"lot": run.batch_size, "delta": run.delta, "steps": steps, "sample_rate": rate}


def _objective(run: Run, given: Fields) -> Fields:
    """The notes minimise the sum of the losses: their step is the run's over n."""
    constant = given.get("steps", "constant") == "constant"
    chosen = {"steps": "constant", "learning_rate": run.lr / run.rows} if constant else {}
    return {"n": run.rows, **chosen}


def _wrapped(run: Run, given: Fields) -> Fields:
    """DP-SGD inside; the printed mask in published mode, unless another one is named."""
    published = given["mode"] == "published"
    mask = given.get("mask", "published" if published else "previous")
    if mask == "published" and not published:
        raise InvalidInput(
            "mask",
            expected="previous or random in corrected mode",
            got=mask,
            remedy="Pass --mode published: a mask chosen from the samples leaks.",
        )
    shared = {name: given[name] for name in ("noise_multiplier", "max_grad_norm", "mode")}
    return {"inner": mechanisms.DPSGD(**shared), "mask": mask, **_expected_batch(run, given)}


BUILDERS: dict[str, Builder] = {
    "adaclip": Builder(kind="AdaClip", more=_expected_batch, derived=("expected_batch_size",)),
    "directional": Builder(
        kind="Directional",
        more=_budget,
        derived=("delta", "epsilon", "lot", "sample_rate", "steps"),
        budget=("published",),
    ),
    "dpsgd": Builder(kind="DPSGD", more=_groups, derived=("groups",)),
    "gredp": Builder(kind="GReDP", more=_layers, derived=("groups", "sites")),
    "laplace_sgd": Builder(kind="LaplaceSGD"),
    "projected_sgd": Builder(kind="ProjectedSGD", more=_objective, derived=("learning_rate", "n")),
    "pruned": Builder(kind="Pruned", more=_wrapped, derived=("expected_batch_size", "inner")),
    "randomized_response": Builder(
        kind="RandomizedResponse",
        more=_categories,
        derived=("categories", "epsilon"),
        budget=MODES,
    ),
    "spectral_dp": Builder(kind="SpectralDP", more=_layers, derived=("groups", "sites")),
}
"""By the name that ``--mechanism`` takes."""

NAMES = tuple(BUILDERS)


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
    """The mechanism, and whether its noise has still to be calibrated to ``epsilon``.

    Raises:
        InvalidInput: options or settings that the mechanism does not know or take.
    """
    builder = BUILDERS[name]
    names = {field.name for field in dataclasses.fields(builder.type)}  # type: ignore[arg-type]
    given: Fields = {"mode": mode, **parsed(name, settings)}
    own_budget = epsilon is not None and mode in builder.budget
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
    if builder.more is not None:
        given |= builder.more(run, given)
    given = {key: value for key, value in given.items() if key in names}  # a mode may be derived
    return builder.type(**given), epsilon is not None and not own_budget


def parsed(name: str, settings: Sequence[str]) -> Fields:
    """``KEY=VALUE`` texts as fields of a mechanism; see ``read_settings``."""
    builder = BUILDERS[name]
    return read_settings(builder.type, settings, decided=(*OPTIONS, *builder.derived))


def read_settings(kind: type[Any], settings: Sequence[str], *, decided: Sequence[str]) -> Fields:
    """``KEY=VALUE`` texts as fields of ``kind``, but not of those ``decided`` elsewhere.

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
                remedy="This field has an option of its own or follows from the run."
                if taken
                else f"Choose a field of {kind.__name__}.",
            )
        found[key] = _read(key, value, hints[key])
    return found


_WORDS: Mapping[str, bool] = {"true": True, "false": False}


def _read(key: str, text: str, kind: Any) -> Any:
    """``text`` as a value of this annotation; the first type of a union that fits."""
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
    """Text last: it takes anything."""
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

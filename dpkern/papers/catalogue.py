"""List what can be reproduced, by paper and item."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ..base.errors import InvalidInput, PrivacyError
from . import (
    claims,
    comparison,
    data_roots,
    numbers,
    objective_release,
    spectral,
    spectral_released,
)
from .adlm import columns as adlm_columns
from .adlm import items as adlm
from .adlm import readings as adlm_readings
from .adlm import relevance as adlm_relevance
from .adlm import training as adlm_runs
from .directional import items as directional
from .directional import settings as directional_settings
from .directional import training as directional_runs
from .gredp import diagrams as gredp_diagrams
from .gredp import items as gredp
from .gredp import training as gredp_runs
from .gredp import transfer
from .pnsgd import items as pnsgd
from .pnsgd import local as ldp
from .pnsgd import plot as pnsgd_plot
from .result import Result
from .runner import ItemRequest
from .spof import environment as spof_environment
from .spof import items as spof
from .spof import protocol as spof_protocol
from .spof import protocol_constants as spof_constants
from .spof import training as spof_runs
from .verdict import other_numbers

Item = Callable[[ItemRequest], Result]

PAPERS: Mapping[str, Mapping[str, Item]] = {
    "adlm": {
        "fig1": adlm_relevance.fig1,
        "fig2": adlm.fig2,
        "fig3": adlm_relevance.fig3,
        "fig4": adlm_runs.fig4,
        "fig5": adlm_runs.fig5,
        "readings": adlm_readings.readings,
        "released": adlm_columns.columns,
        "sensitivity": adlm.sensitivity,
        "lemma7": adlm.lemma7,
    },
    "claims": {"": claims.table},
    "comparison": {"": comparison.table},
    "objective-release": {"": objective_release.table},
    "directional": {
        "fig1": directional.fig1,
        "fig2": directional.fig2,
        "sampling": directional.sampling,
        "kappa": directional.worst_direction,
        "table1": directional_settings.table1,
        "table2": directional_runs.table2,
        "fig3": directional_runs.fig3,
        "fig4": directional_runs.fig4,
        "fig5": directional_runs.fig5,
        "fig6": directional_runs.fig6,
    },
    "gredp": {
        "fig1": gredp_diagrams.fig1,
        "fig2": gredp_diagrams.fig2,
        "models": gredp_diagrams.networks,
        "table1": gredp_runs.table1,
        "by-eps": gredp_runs.by_epsilon,
        "table7": transfer.table7,
        "table8": gredp_runs.table8,
        "fig3": gredp_runs.fig3,
        "fig4": gredp_runs.fig4,
        "fig5": gredp_runs.fig5,
        "variance": gredp.variance,
        "checks": gredp.checks,
    },
    "ldp": {
        "channels": ldp.channels,
        "estimator": ldp.estimator,
        "survey": ldp.survey,
        "labels": ldp.labels,
    },
    "pnsgd": {
        "table": pnsgd.table,
        "rules": pnsgd.rules,
        "bound": pnsgd.bound,
        "experiment": pnsgd.experiment,
        "plot": pnsgd_plot.plot,
    },
    "spectral": {
        "keep": spectral.keep,
        "quirks": spectral.quirks,
        "whitened": spectral.whitened,
        "released": spectral_released.released,
    },
    "spof": {
        "fig1": spof.fig1,
        "fig2": spof_runs.fig2,
        "fig3": spof_runs.fig3,
        "fig4": spof_environment.fig4,
        "fig5": spof_environment.fig5,
        "fig6": spof.fig6,
        "multipliers": spof_environment.multipliers,
        "comparison": spof_runs.comparison,
        "rates": spof_runs.rates,
        "released": spof_protocol.released,
        "released-fig2": spof_constants.constants,
        "losses": spof.losses,
        "audit": spof.audit,
    },
}
"""Items by name; a paper whose only item is "" is one table."""

ALL = "all"
NEEDS_WEIGHTS = frozenset({("gredp", "table7")})
"""Items that need a file of the user's, and so are no part of ``all``."""
_TRAINED = {("gredp", item) for item in ("table1", "by-eps", "table8", "fig3", "fig4", "fig5")}
_IMAGE_RUNS = {
    *_TRAINED,
    *NEEDS_WEIGHTS,
    *(("adlm", item) for item in ("fig4", "fig5", "readings", "released")),
    *(("directional", item) for item in ("table2", "fig3", "fig4", "fig5", "fig6")),
    ("spectral", "released"),
}
_SPOF = {("spof", item) for item in ("fig2", "fig3", "comparison", "rates")}
_PROTOCOL = {("spof", "released"), ("spof", "released-fig2")}
_TABLES = {("comparison", ""), ("spectral", "whitened")}
_FIXED = {
    "lr": {("gredp", "fig5"), ("spof", "rates")},
    "batch_size": {("gredp", "fig4"), ("directional", "fig5")},
    "max_grad_norm": {("gredp", "table8"), ("directional", "fig6")},
}
"""Figures that are about this very number."""

_NOTES = {("pnsgd", item) for item in ("table", "rules", "bound", "experiment", "plot")}
_OTHER_EPSILONS = {
    *_NOTES,
    *_SPOF,
    *_TRAINED,
    *_TABLES,
    *NEEDS_WEIGHTS,
    ("objective-release", ""),
    ("spectral", "released"),
    *(("adlm", item) for item in ("fig4", "fig5", "readings", "released")),
    *(("directional", item) for item in ("fig3", "fig4", "fig5", "fig6")),
}
_CLIPPED = {
    *_TRAINED,
    *NEEDS_WEIGHTS,
    *_SPOF,
    ("spof", "released"),
    ("spectral", "released"),
    ("adlm", "fig4"),
    ("adlm", "fig5"),
    *(("directional", item) for item in ("table2", "fig3", "fig4", "fig5", "fig6")),
}

SIZED: Mapping[str, frozenset[tuple[str, str]]] = {
    "rows": frozenset({*_SPOF, *_IMAGE_RUNS}),
    "epochs": frozenset({*_SPOF, *_IMAGE_RUNS, *_TABLES}),
    **{name: frozenset(_SPOF) for name in ("columns", "user_column", "bounds")},
    "weights": NEEDS_WEIGHTS,
    "train_last": NEEDS_WEIGHTS,
    "lr": frozenset({*_SPOF, *_PROTOCOL, *_IMAGE_RUNS, ("spectral", "whitened")} - _FIXED["lr"]),
    "batch_size": frozenset({*_IMAGE_RUNS, *_TABLES} - _FIXED["batch_size"]),
    "epsilon": frozenset(_OTHER_EPSILONS),
    "max_grad_norm": frozenset(_CLIPPED - _FIXED["max_grad_norm"]),
    "delta": frozenset(
        {
            *_TABLES,
            *_NOTES,
            ("objective-release", ""),
            *_IMAGE_RUNS - {("adlm", "readings"), ("adlm", "released")},
        }
    ),
    "device": frozenset({*_SPOF, *_IMAGE_RUNS, *_TABLES}),
}
"""Papers and items whose runs take another number."""
ANY_DATA = frozenset({"any"})
_ADLM_MNIST = ("fig1", "fig3", "fig4", "readings", "released")
_IMAGES = frozenset({"mnist", "cifar10", "svhn"})
DATA: Mapping[tuple[str, str], frozenset[str]] = {
    **{pair: frozenset({"mnist", "cifar10"}) for pair in _TRAINED},
    **{("directional", item): _IMAGES for item in ("fig3", "fig4", "fig5")},
    ("gredp", "table7"): frozenset({"cifar10"}),
    ("directional", "table2"): frozenset({"mnist"}),
    ("directional", "fig6"): frozenset({"mnist", "svhn"}),
    **{("adlm", item): frozenset({"mnist"}) for item in _ADLM_MNIST},
    ("adlm", "fig5"): frozenset({"cifar10"}),
    **{
        ("spof", item): frozenset({"fitbit"})
        for item in ("fig2", "fig3", "comparison", "rates", "released", "released-fig2")
    },
    ("comparison", ""): ANY_DATA,
    ("ldp", "labels"): ANY_DATA,
    ("objective-release", ""): ANY_DATA,
    ("spectral", "whitened"): ANY_DATA,
    ("spectral", "released"): frozenset({"mnist"}),
}
"""Data sets that ``--data`` may give to an item; the others are computed without data."""


def names(paper: str, item: str | None) -> tuple[str, ...]:
    """Return the requested items: every one of the paper for ``all``, else this one.

    Raises:
        InvalidInput: an unknown paper or item.
    """
    if item == ALL and "" not in _items(paper):
        return tuple(name for name in _items(paper) if (paper, name) not in NEEDS_WEIGHTS)
    return (_known(paper, item),)


def has_items(paper: str) -> bool:
    """Whether a paper has items; one without is a single table.

    Raises:
        InvalidInput: an unknown paper.
    """
    return "" not in _items(paper)


def takes(paper: str, item: str | None, option: str) -> bool:
    """Whether runs of this item take another size, one of ``SIZED``."""
    return (paper, item or "") in SIZED[option]


def data_of(paper: str, item: str | None, data: str | None) -> str | None:
    """Return the part of ``--data`` that the item uses; None where it uses nothing of it.

    Raises:
        InvalidInput: a text that names no data set as it should.
    """
    kinds, roots = DATA.get((paper, item or "")), data_roots.read(data)
    if kinds is None or data is None:
        return None
    if roots is None:
        return data
    used = [f"{kind}={root}" for kind, root in roots.items() if kind in kinds]
    return ",".join(used) or None


def reproduce(paper: str, item: str | None, request: ItemRequest) -> Result:
    """Compute one item.

    Raises:
        InvalidInput: an unknown paper or item, or data or a size that the item cannot take.
    """
    known = _known(paper, item)
    if request.data is not None and data_of(paper, known, request.data) is None:
        kinds = DATA.get((paper, known))
        raise InvalidInput(
            "data",
            expected="none: this item is computed without data"
            if kinds is None
            else "one folder, file or name: this item takes any data"
            if kinds == ANY_DATA
            else f"a folder of {', '.join(sorted(kinds))}",
            got=request.data,
            remedy="Leave --data out."
            if kinds is None
            else "Leave the name and = out."
            if kinds == ANY_DATA
            else f"Example: --data {min(kinds)}=FOLDER",
        )
    for name in SIZED:
        if getattr(request, name) is not None and not takes(paper, item, name):
            listed = [f"{each} {which}".strip() for each, which in sorted(SIZED[name])]
            raise InvalidInput(
                name,
                expected=f"none, except for {', '.join(listed)}",
                got=getattr(request, name),
                remedy="Leave it out.",
            )
    pair = paper, known
    numbers.check([pair], request.numbers)
    request = replace(request, numbers=numbers.of_item(pair, request.numbers))
    try:
        result = _items(paper)[known](request)
    except PrivacyError as error:
        raise _of_the_request(error, request) from error
    return _with_numbers(result, pair, request)


def _with_numbers(result: Result, pair: tuple[str, str], request: ItemRequest) -> Result:
    """Return the result with a note of the numbers that are not the source's, which decide it."""
    if not request.numbers:
        return result
    usual = numbers.NUMBERS[pair]
    said = ", ".join(
        f"{name} {value:g} instead of {usual[name]:g}" for name, value in request.numbers
    )
    return replace(
        result,
        notes=(*result.notes, f"other numbers than the source's: {said}"),
        settings={**result.settings, **dict(request.numbers)},
        verdicts=[other_numbers(one, said) for one in result.verdicts],
    )


def _of_the_request(error: PrivacyError, request: ItemRequest) -> PrivacyError:
    """Return the refusal of a noise multiplier in terms of the options that asked for it."""
    asked = [name for name in ("epsilon", "epochs") if getattr(request, name) is not None]
    if error.name != "noise_multiplier" or not asked:
        return error
    return PrivacyError(
        asked[0],
        expected=f"a value whose noise multiplier is in its range: {error.expected}",
        got=f"--{' and --'.join(asked)} that need{'s' * (len(asked) == 1)} {error.got}",
        remedy="Move it towards the source's value.",
    )


def _items(paper: str) -> Mapping[str, Item]:
    if paper not in PAPERS:
        raise InvalidInput(
            "paper",
            expected=f"one of {', '.join(PAPERS)}",
            got=paper,
            remedy="Choose one of these.",
        )
    return PAPERS[paper]


def _known(paper: str, item: str | None) -> str:
    items = _items(paper)
    wanted = item or ""
    if wanted not in items:
        listed = [name for name in items if name]
        raise InvalidInput(
            "item",
            expected=f"one of {', '.join(listed)}, or {ALL}"
            if listed
            else f"none: {paper} is one table",
            got=wanted or "none",
            remedy="Choose one of these." if listed else "Leave the item out.",
        )
    return wanted

"""List what can be reproduced, by paper and item."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..base.errors import InvalidInput
from . import claims, comparison, objective_release, spectral
from .adlm import items as adlm
from .adlm import relevance as adlm_relevance
from .adlm import training as adlm_runs
from .directional import items as directional
from .directional import training as directional_runs
from .gredp import items as gredp
from .gredp import training as gredp_runs
from .pnsgd import items as pnsgd
from .pnsgd import local as ldp
from .result import Result
from .runner import ItemRequest
from .spof import environment as spof_environment
from .spof import items as spof
from .spof import protocol as spof_protocol
from .spof import training as spof_runs

Item = Callable[[ItemRequest], Result]

PAPERS: Mapping[str, Mapping[str, Item]] = {
    "adlm": {
        "fig1": adlm_relevance.fig1,
        "fig2": adlm.fig2,
        "fig3": adlm_relevance.fig3,
        "fig4": adlm_runs.fig4,
        "fig5": adlm_runs.fig5,
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
        "table2": directional_runs.table2,
        "fig3": directional_runs.fig3,
        "fig4": directional_runs.fig4,
        "fig5": directional_runs.fig5,
        "fig6": directional_runs.fig6,
    },
    "gredp": {
        "table1": gredp_runs.table1,
        "by-eps": gredp_runs.by_epsilon,
        "table7": gredp_runs.table7,
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
    },
    "spectral": {
        "keep": spectral.keep,
        "quirks": spectral.quirks,
        "whitened": spectral.whitened,
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
        "losses": spof.losses,
        "audit": spof.audit,
    },
}
"""Items by name; a paper whose only item is "" is one table."""

ALL = "all"
_TRAINED = {("gredp", item) for item in ("table1", "by-eps", "table8", "fig3", "fig4", "fig5")}
_FIXED = {"lr": {("gredp", "fig5")}, "batch_size": {("gredp", "fig4")}}
"""Figures that are about this very number."""

SIZED: Mapping[str, frozenset[tuple[str, str]]] = {
    "rows": frozenset({("spof", ""), *_TRAINED}),
    "epochs": frozenset({("spof", ""), ("adlm", "fig4"), ("adlm", "fig5"), *_TRAINED}),
    "lr": frozenset(_TRAINED - _FIXED["lr"]),
    "batch_size": frozenset(_TRAINED - _FIXED["batch_size"]),
}
"""Papers and items whose runs take another number; "" is every item."""
UNAVAILABLE = frozenset({("gredp", "table7")})
"""Items that are always refused, and so are no part of ``all``."""


def names(paper: str, item: str | None) -> tuple[str, ...]:
    """Return the requested items: every one of the paper for ``all``, else this one.

    Raises:
        InvalidInput: an unknown paper or item.
    """
    if item == ALL and "" not in _items(paper):
        return tuple(name for name in _items(paper) if (paper, name) not in UNAVAILABLE)
    return (_known(paper, item),)


def takes(paper: str, item: str | None, option: str) -> bool:
    """Whether runs of this item take another number of ``rows`` or ``epochs``."""
    return not {(paper, ""), (paper, item or "")}.isdisjoint(SIZED[option])


def reproduce(paper: str, item: str | None, request: ItemRequest) -> Result:
    """Compute one item.

    Raises:
        InvalidInput: an unknown paper or item, or data or a size that the item cannot take.
    """
    for name in SIZED:
        if getattr(request, name) is not None and not takes(paper, item, name):
            listed = [f"{each} {which}".strip() for each, which in sorted(SIZED[name])]
            raise InvalidInput(
                name,
                expected=f"none, except for {', '.join(listed)}",
                got=getattr(request, name),
                remedy="Leave it out.",
            )
    return _items(paper)[_known(paper, item)](request)


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

"""The work of ops in plain torch, several ways each: what a user would write without dpkern.

A benchmark times all of them in turns with the op and shows the fastest. Each that can be compared
is checked against the reference first. Ops without an entry say in ``WITHOUT`` why.
"""

from __future__ import annotations

from ..case import Case
from . import (
    clip,
    coef,
    ghost,
    ghost_affine,
    ghost_conv,
    ghost_errors,
    ghost_rows,
    ghost_tied,
    noise,
    recurrent,
    spectral,
    spectral_bins,
    spectral_matrix,
    update,
)
from ._formulation import Formulation, with_compiled

FORMULATIONS: dict[str, tuple[Formulation, ...]] = {
    **clip.FORMULATIONS,
    **coef.FORMULATIONS,
    **ghost.FORMULATIONS,
    **ghost_affine.FORMULATIONS,
    **ghost_conv.FORMULATIONS,
    **ghost_errors.FORMULATIONS,
    **ghost_rows.FORMULATIONS,
    **ghost_tied.FORMULATIONS,
    **noise.FORMULATIONS,
    **recurrent.FORMULATIONS,
    **spectral.FORMULATIONS,
    **spectral_bins.FORMULATIONS,
    **update.FORMULATIONS,
}
for _name, _more in spectral_matrix.FORMULATIONS.items():
    FORMULATIONS[_name] = (*FORMULATIONS[_name], *_more)

WITHOUT: dict[str, str] = {}
"""The reasons why ops have no formulation in torch; rows and pages say them."""


def formulations_of(case: Case, compiled: bool | None = False) -> list[Formulation]:
    """Return the formulations of a case's work.

    Args:
        compiled: whether to add what ``torch.compile`` makes of them; None adds it where it gains.
    """
    known = FORMULATIONS.get(case.op.name, ())
    args = case.arguments() if known else {}
    found = [one for one in known if one.fits(args)]
    return found if compiled is False else with_compiled(found, every=compiled is True)


__all__ = ["FORMULATIONS", "WITHOUT", "Formulation", "formulations_of"]

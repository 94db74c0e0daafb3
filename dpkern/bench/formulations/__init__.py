"""The work of ops in plain torch, several ways each: what a user would write without dpkern.

A benchmark times all of them in turns with the op and shows the fastest. Each that can be compared
is checked against the reference first. Ops without an entry say in ``WITHOUT`` why.
"""

from __future__ import annotations

from ..case import Case
from . import clip, coef, ghost, ghost_affine, ghost_rows, noise, recurrent, spectral, update
from ._formulation import Formulation, with_compiled

FORMULATIONS: dict[str, tuple[Formulation, ...]] = {
    **clip.FORMULATIONS,
    **coef.FORMULATIONS,
    **ghost.FORMULATIONS,
    **ghost_affine.FORMULATIONS,
    **ghost_rows.FORMULATIONS,
    **noise.FORMULATIONS,
    **recurrent.FORMULATIONS,
    **spectral.FORMULATIONS,
    **update.FORMULATIONS,
}

_BOUND = (
    "a proved bound on the rounding error of another op's sum; torch promises none, and only the "
    "reference computes this one"
)
_UNITS = (
    "every sample's entries are rounded towards zero in units before they are summed: without "
    "gradients of each sample torch cannot, and explicit ones are ghost.explicit_integer_sum"
)
_CELL = (
    "one pass makes the gates' gradients of every sample from kept activations; torch's backward "
    "of a recurrent layer starts at its own forward pass and returns sums over samples"
)
_BINS = "kept bins of one filter, in a layout of dpkern's own that only spectral.bins_sum reads"
WITHOUT = {
    "ghost.conv_sum_error": _BOUND,
    "ghost.linear_sum_error": _BOUND,
    "ghost.tied_sum_error": _BOUND,
    "ghost.embedding_integer_sum": _UNITS,
    "ghost.tied_integer_sum": _UNITS,
    "ghost.tied_cross": "nobody has written one yet: index_select and a product would do",
    "recurrent.gru_backward": _CELL,
    "recurrent.lstm_backward": _CELL,
    "recurrent.rnn_backward": _CELL,
    "spectral.bins_sum": _BINS,
    "spectral.conv_bins": _BINS,
    "spectral.whitened_bins": _BINS,
}
"""The reasons why ops have no formulation in torch; rows and pages say them."""


def formulations_of(case: Case, compiled: bool = False) -> list[Formulation]:
    """Return the formulations of a case's work; ``compiled`` adds what ``torch.compile`` makes."""
    known = FORMULATIONS.get(case.op.name, ())
    args = case.arguments() if known else {}
    found = [one for one in known if one.fits(args)]
    return with_compiled(found) if compiled else found


__all__ = ["FORMULATIONS", "WITHOUT", "Formulation", "formulations_of"]

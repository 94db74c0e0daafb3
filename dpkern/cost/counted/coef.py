"""Count coefficients of polynomial losses."""

from __future__ import annotations

import torch
from torch.autograd.graph import increment_version

from ...base.codes import COEF_FORMS
from ...ops import coef
from ...ops.backends._structs import BYTES
from ._native import kernels, tallied
from ._tally import CountedRun, Kernel


def _bytes(noise: coef.Noise | None) -> bytes:
    return b"" if noise is None else BYTES["CoefNoise"](noise)


def _perturb(
    targets: torch.Tensor,
    *,
    form: str,
    noise: coef.Noise | None = None,
    out: coef.QuadraticCoefficients | None = None,
) -> tuple[coef.QuadraticCoefficients, CountedRun]:
    coef.check_release(targets, noise)
    made = out or coef.QuadraticCoefficients(torch.empty_like(targets), torch.empty_like(targets))
    places = (tensor.data_ptr() for tensor in made)
    wide = targets.dtype is torch.float64
    how = COEF_FORMS.code(form), _bytes(noise)
    packed = kernels().perturb(wide, targets.data_ptr(), *how, *places, *targets.shape)
    increment_version(made)
    return made, tallied(packed)[1]


def _quadratic(
    z: torch.Tensor,
    targets: torch.Tensor,
    *,
    form: str,
    noise: coef.Noise | None = None,
    shift: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[tuple[torch.Tensor, torch.Tensor], CountedRun]:
    coef.check_release(targets, noise)
    made = out or (torch.empty(len(z), dtype=torch.float64), torch.empty_like(z))
    packed = kernels().quadratic(
        z.dtype is torch.float64,
        z.data_ptr(),
        targets.data_ptr(),
        COEF_FORMS.code(form),
        _bytes(noise),
        0 if shift is None else shift.data_ptr(),
        *(tensor.data_ptr() for tensor in made),
        *z.shape,
    )
    increment_version(made)
    return made, tallied(packed)[1]


KERNELS: dict[str, Kernel] = {
    "coef.perturb": _perturb,
    "coef.quadratic": _quadratic,
}

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


def _descend(
    encoder: torch.Tensor,
    decoder: torch.Tensor,
    stopped: torch.Tensor,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    order: torch.Tensor,
    *,
    form: str,
    lr: float,
    constant: float = 0.0,
    limit: float = coef.LOGIT_LIMIT,
    added: torch.Tensor | None = None,
    draws: torch.Tensor | None = None,
    rounding: torch.Tensor | None = None,
    scale: float = 0.0,
    growth: float = 0.0,
) -> tuple[None, CountedRun]:
    written = encoder, decoder, stopped
    places = [t.data_ptr() for t in (*written, inputs, targets, order)]
    places += [0 if t is None else t.data_ptr() for t in (added, draws, rounding)]
    packed = kernels().descend(
        encoder.dtype is torch.float64,
        places,
        COEF_FORMS.code(form),
        [lr, constant, limit, scale, growth],
        [*encoder.shape, *inputs.shape[:2], len(targets), order.shape[1]],
    )
    increment_version(written)
    return None, tallied(packed)[1]


KERNELS: dict[str, Kernel] = {
    "coef.perturb": _perturb,
    "coef.quadratic": _quadratic,
    "coef.descend": _descend,
}

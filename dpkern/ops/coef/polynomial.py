"""Coefficients of a polynomial loss: perturbed, or evaluated with their noise in registers.

The cross-entropy of a target x in [0, 1] and a logit z around 0 is

    log 2 + a1 z + a2 z^2,      a1 = 1/2 - x,
    a2 = x/2 - 1/4   (``printed``: equation (12), which has lost Taylor's 1/2 and a sign),
    a2 = 1/8         (``taylor``).

Noise is added to a1 and a2, never to the loss; the constant has no part in gradients.

Reference: SPOF, equations (11)-(12) and steps 3-5 of algorithm 1; AdLM, (24)-(25) and lines 18-19.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from ...base import validate as check
from ...base.codes import CoefForm
from ...base.dispatch import op
from ...base.errors import InvalidInput
from ...base.signature import Double, Float
from .._coef_noise import CoefNoise, check_noise, quadratic_position
from ..noise import add_noise

FORMS = get_args(CoefForm)
LANES = 16
"""Partial sums of a loss: term i joins sum i mod 16, and the sums meet by halves."""


def form_of(name: str) -> CoefForm:
    """Return the form with this name.

    Raises:
        InvalidInput: there is none.
    """
    form: CoefForm = check.choice(FORMS, form=name)
    return form


class QuadraticCoefficients(NamedTuple):
    """The factors of z and of z^2, each of the targets' shape and dtype."""

    linear: Tensor
    quadratic: Tensor


def _check_perturb(
    targets: Tensor, form: str, noise: CoefNoise | None, out: QuadraticCoefficients | None
) -> None:
    if out is not None:
        like = targets.shape, targets.dtype
        check_out(out, (like, like), (targets,))
    if noise is not None:
        n = targets.numel()
        check_noise(noise, len(targets), n, n, targets)
        if not targets.is_cpu:
            check_targets("targets", targets)


def check_out(
    out: object, like: Sequence[tuple[Sequence[int], torch.dtype]], inputs: Sequence[Tensor]
) -> None:
    """Check tensors of these shapes and dtypes that share no memory with anything else here."""
    if not isinstance(out, tuple) or len(out) != len(like):
        raise InvalidInput(
            "out",
            expected=f"a tuple of {len(like)} tensors",
            got=type(out).__name__,
            remedy="Pass an earlier result.",
        )
    for i, (tensor, (shape, dtype)) in enumerate(zip(out, like, strict=True)):
        kind: dict[str, Any] = {"dtypes": (dtype,), "device": inputs[0].device}
        check.tensor_at(f"out[{i}]", tensor, shape=shape, contiguous=True, **kind)
    taken = sorted(
        (t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in (*inputs, *out)
    )
    if any(end > begin for (_, end), (begin, _) in pairwise(taken)):
        raise InvalidInput(
            "out",
            expected="tensors that share no memory with each other or the inputs",
            got="an overlap",
            remedy="Pass an earlier result.",
        )


def check_targets(name: str, targets: Tensor) -> None:
    """Check that entries are in [0, 1], which the sensitivity of their coefficients rests on.

    Raises:
        InvalidInput: another entry, or NaN.
    """
    if targets.numel():
        low, high = torch.aminmax(targets.detach())
        check.hold((low >= 0) & (high <= 1), lambda: _outside(name, low, high))


def _outside(name: str, low: Tensor, high: Tensor) -> InvalidInput:
    return InvalidInput(
        name,
        expected="entries in [0, 1]",
        got=f"{low.item():g} to {high.item():g}",
        remedy="Scale the data by public bounds first.",
    )


def refuse_release(targets: Tensor, made: tuple[Tensor, ...]) -> None:
    """Raise for a kernel that met a target outside as it went, and wipe out what it wrote.

    Raises:
        InvalidInput: always.
    """
    for tensor in made:
        tensor.detach().zero_()
    raise _outside("targets", *torch.aminmax(targets.detach()))


def check_release(targets: Tensor, noise: CoefNoise | None) -> None:
    """Run ``check_targets`` for kernels that do not look at targets on a CPU as they go.

    ``validate`` leaves it to them there, because it takes a third of a release's time; on devices
    it looks itself.

    Raises:
        InvalidInput: there is noise, and an entry outside [0, 1].
    """
    if noise is not None and targets.is_cpu:
        check_targets("targets", targets)


def _linear_quadratic(targets: Tensor, form: str) -> QuadraticCoefficients:
    if form == "printed":
        return QuadraticCoefficients(0.5 - targets, targets * 0.5 - 0.25)
    return QuadraticCoefficients(0.5 - targets, torch.full_like(targets, 0.125))


def add(values: Tensor, noise: CoefNoise, position: int) -> None:
    """Add noise of the values ``[B, ...]`` from ``position`` on, in place."""
    scale = noise.scale
    if isinstance(scale, Tensor):
        scale = scale.view(-1, *(1,) * (values.dim() - 1)).expand(values.shape)
    add_noise.reference(
        values,
        stream=noise.stream,
        position=position,
        distribution="laplace",
        scale=scale,
        rounding=noise.rounding,
        draws=noise.draws,
    )


@op(check=_check_perturb)
def perturb(
    targets: Float[Tensor, "B D"],
    *,
    form: CoefForm,
    noise: CoefNoise | None = None,
    out: QuadraticCoefficients | None = None,
) -> Float[QuadraticCoefficients, "linear: B D", "quadratic: B D"]:
    """Add Laplace noise on the lattice to both coefficients of every target; return new tensors.

    Exactly what ``noise.add_noise`` makes of the coefficients, the linear ones from
    ``noise.position`` on and the quadratic ones from ``quadratic_position`` on, in one pass.

    Guarantee: that of ``add_noise`` for one coefficient. What a scale protects follows from the
    sensitivity of all coefficients of a record: 3 n / 2 printed, n for Taylor's. A scale of each
    record (``noise.scale [B]``) depends on the data and certifies nothing.

    Args:
        targets: float32 or float64 ``[B, n]``, contiguous; with noise, entries in [0, 1].
        form: ``printed`` (x/2 - 1/4) or ``taylor`` (1/8).
        noise: scale, streams and position; None gives the coefficients themselves.
        out: written and returned instead of new tensors, such as an earlier result.

    Raises:
        InvalidInput: wrong shapes, dtypes, strides, scales, an unknown form, an entry outside.
        PrivacyError: rounding and noise share a stream, or a CUDA graph is recorded.

    =============== =====================================
    edge case       result
    =============== =====================================
    empty           empty; nothing is drawn
    outside [0, 1]  ``InvalidInput`` if there is noise
    NaN             ``InvalidInput``, without noise NaN
    =============== =====================================

    Reference: SPOF, equation (12) and step 5 of algorithm 1; AdLM, lines 18-19.
    """
    check_release(targets, noise)
    made = _linear_quadratic(targets.detach(), form)
    if noise is not None:
        behind = quadratic_position(noise.position, targets.numel())
        add(made.linear, noise, noise.position)
        add(made.quadratic, noise, behind)
    return made if out is None else QuadraticCoefficients(*copied(made, out))


def copied(made: tuple[Tensor, ...], out: tuple[Tensor, ...]) -> Any:
    """Copy what was made to ``out``."""
    for values, place in zip(made, out, strict=True):
        place.detach().copy_(values)
    return out


def _check_quadratic(
    z: Tensor,
    targets: Tensor,
    form: str,
    noise: CoefNoise | None,
    shift: Tensor | None,
    out: tuple[Tensor, Tensor] | None,
) -> None:
    if out is not None:
        given = (z, targets) if shift is None else (z, targets, shift)
        check_out(out, (((len(z),), torch.float64), (z.shape, z.dtype)), given)
    _check_perturb(targets, form, noise, None)


@op(check=_check_quadratic)
def quadratic(
    z: Float[Tensor, "B D"],
    targets: Float[Tensor, "B D"],
    *,
    form: CoefForm,
    noise: CoefNoise | None = None,
    shift: Float[Tensor, "B"] | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Double[Tensor, "loss: B"], Float[Tensor, "dz: B D"]]:
    """Return each record's polynomial loss and its derivative, writing no coefficients.

    With ``(a1, a2) = perturb(targets, form=form, noise=noise)`` and ``w = z + c_b``:

        loss_b = sum_i w (a1 + a2 w)        in float64
        dz     = a1 + 2 a2 w                in z's dtype

    The derivative by the shift is ``dz.sum(1)``. The sum has a fixed order (``LANES``), so that
    all backends give the same bits.

    Args:
        z: logits float32 or float64 ``[B, n]``, contiguous.
        targets: as for ``perturb``, of z's shape and dtype.
        form, noise: as for ``perturb``.
        shift: c_b of each record, ``[B]`` of z's dtype: what a constant on the decoder adds to all
            its logits.
        out: loss and dz, written and returned instead of new tensors.

    Returns:
        ``loss`` float64 ``[B]``, without the constant n log 2, and ``dz``.

    Raises:
        InvalidInput: wrong shapes, dtypes, strides, scales, an unknown form, an entry outside.
        PrivacyError: rounding and noise share a stream, or a CUDA graph is recorded.

    =================== =====================================
    edge case           result
    =================== =====================================
    no records          empty
    no features         losses 0
    NaN, inf in z       spreads to the record's loss
    target outside      ``InvalidInput`` if there is noise
    =================== =====================================

    Reference: SPOF, equations (12), (30)-(31) and step 3 of algorithm 1; AdLM, (24) and line 27.
    """
    a1, a2 = perturb.reference(targets, form=form, noise=noise)
    w = z.detach() if shift is None else z.detach() + shift.detach()[:, None]
    dz = (a2 + a2) * w + a1
    wide = w.double()
    made = lane_sum(wide * (a1.double() + a2.double() * wide)), dz
    return made if out is None else copied(made, out)


def lane_sum(terms: Tensor) -> Tensor:
    """Return each row's sum ``[..., n]``: ``LANES`` partial sums from 0 that meet by halves."""
    sums = terms.new_zeros(*terms.shape[:-1], LANES)
    for start in range(0, terms.shape[-1], LANES):
        part = terms[..., start : start + LANES]
        sums[..., : part.shape[-1]] += part
    while sums.shape[-1] > 1:
        half = sums.shape[-1] // 2
        sums = sums[..., :half] + sums[..., half:]
    return sums[..., 0]

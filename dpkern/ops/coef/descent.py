"""Many small autoencoders that descend their noisy polynomial losses, record after record.

One run has M users, each with an encoder W ``[n, l]`` and a block V ``[l, n]`` of the decoder. A
step takes one record x of every user, and its target t:

    h = s(W^T x),   c = constant sum_r h_r,   z = V^T h + c
    g = a1 + 2 a2 z,   (a1, a2) = the coefficients of t with their noise, as ``perturb`` makes them
    e = (V g + constant sum_i g_i) (h - h^2)
    W <- W - lr x e^T,   V <- V - lr h g^T

Reference: SPOF, equations (3), (12), (32) and algorithm 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...base import validate as check
from ...base.codes import CoefForm
from ...base.dispatch import op
from ...base.errors import InvalidInput
from ...base.signature import Float, Int16, Int32, Int64, NonNegative, Positive, written
from .. import _lattice
from .._scale import check_scale
from .polynomial import QuadraticCoefficients, check_targets, lane_sum, perturb

LOGIT_LIMIT = 1e3
"""A run stops where a logit is larger."""


def _check_descend(
    encoder: Tensor,
    decoder: Tensor,
    stopped: Tensor,
    inputs: Tensor,
    targets: Tensor,
    order: Tensor,
    form: str,
    lr: float,
    constant: float,
    limit: float,
    added: Tensor | None,
    draws: Tensor | None,
    rounding: Tensor | None,
    scale: float,
    growth: float,
) -> None:
    runs, records = len(encoder), inputs.shape[1]
    for name, table in (("inputs", inputs), ("targets", targets)):
        if len(table) not in (1, runs):
            raise InvalidInput(
                name,
                expected=f"one table of records, or one for each of {runs} runs",
                got=f"{len(table)} tables",
                remedy="Pass a tensor [1, N, n] or [R, N, n].",
            )
    if order.numel():
        low, high = torch.aminmax(order)
        check.hold(
            (low >= 0) & (high < records),
            lambda: InvalidInput(
                "order",
                expected=f"rows from 0 to {records - 1}",
                got=f"{low.item()} to {high.item()}",
                remedy="Pass rows of the tables of records.",
            ),
        )
    if (draws is None) is not (rounding is None):
        raise InvalidInput(
            "draws, rounding",
            expected="both of them or neither",
            got="draws alone" if rounding is None else "rounding bits alone",
            remedy="Take both from the noise source of the runs.",
        )
    if draws is None or rounding is None:
        return
    check_scale("scale", scale)
    check_targets("targets", targets)


@op(check=_check_descend)
@torch.no_grad()
def descend(
    encoder: Float[Tensor, "R M n l", written],
    decoder: Float[Tensor, "R M l n", written],
    stopped: Int32[Tensor, "R", written],
    inputs: Float[Tensor, "P N n"],
    targets: Float[Tensor, "Q N n"],
    order: Int64[Tensor, "R S M"],
    *,
    form: CoefForm,
    lr: Positive,
    constant: NonNegative = 0.0,
    limit: Positive = LOGIT_LIMIT,
    added: Float[Tensor, "R S M n"] | None = None,
    draws: Int32[Tensor, "R S 2 M n"] | None = None,
    rounding: Int16[Tensor, "R S 2 M n"] | None = None,
    scale: NonNegative = 0.0,
    growth: NonNegative = 0.0,
) -> None:
    """Take S steps of SGD on the noisy polynomial losses of R runs, in place.

    Sums over features and over the code are sums of lanes (``LANES``): all backends give the same
    bits, and a run the same ones alone, among others, and however its steps are cut into calls.

    Guarantee: that of ``perturb`` for each coefficient. With ``growth`` the scale depends on the
    record, and certifies nothing.

    Args:
        encoder, decoder: weights of R runs of M users, float32 or float64, contiguous.
        stopped: nonzero: the run stays as it is. Set to 1 by the first step with a logit beyond
            ``limit``, or NaN, in any of its users; that step changes no weights.
        inputs, targets: tables of records ``[N, n]``: one for all runs or one for each. With noise,
            targets in [0, 1].
        order: the row in the tables of each run, step and user.
        form: as for ``perturb``.
        lr: eta.
        constant: c, which every entry of the decoder is used plus.
        limit: of logits.
        added: what encoders see added to their inputs, such as noise of the environment.
        draws, rounding: prefetched noise and rounding bits, of linear and quadratic coefficients.
            None adds no noise.
        scale: certified Laplace scale of a coefficient.
        growth: with the shift c_j of a record's logits the scale is
            ``scale + growth c_j (c_j / 2 + 2)``.

    Raises:
        InvalidInput: wrong shapes, dtypes, strides, scales, rows, or an entry outside.

    ============== =====================================
    edge case      result
    ============== =====================================
    empty          unchanged
    NaN in a logit the run stops
    ============== =====================================

    Reference: SPOF, equations (3), (12), (32) and algorithm 1.
    """
    for number, rows in enumerate(order.unbind(1)):
        x, t = _rows(inputs, rows), _rows(targets, rows)
        if added is not None:
            x = x + added[:, number]
        h = _sigmoid(lane_sum((x[..., None] * encoder).transpose(-1, -2)))
        shift = constant * lane_sum(h)[..., None]
        z = lane_sum((h[..., None] * decoder).transpose(-1, -2)) + shift
        stopped |= ~(z.abs() <= limit).flatten(1).all(1)
        made = perturb.reference(t.flatten(0, 1), form=form)
        if draws is not None and rounding is not None:
            each = scale + growth * (shift * (shift * 0.5 + 2)) if growth else scale
            made = QuadraticCoefficients(
                *(
                    _noised(a.view_as(t), each, draws[:, number, part], rounding[:, number, part])
                    for part, a in enumerate(made)
                )
            )
        a1, a2 = (a.view_as(t) for a in made)
        g = (a2 + a2) * z + a1
        e = lane_sum(decoder * g[..., None, :]) + constant * lane_sum(g)[..., None]
        e = e * (h - h * h)
        going = (stopped == 0).view(-1, 1, 1, 1)
        by_encoder = x[..., None] * (e * lr)[..., None, :]
        by_decoder = (h * lr)[..., None] * g[..., None, :]
        encoder.copy_(torch.where(going, encoder - by_encoder, encoder))
        decoder.copy_(torch.where(going, decoder - by_decoder, decoder))


def _rows(table: Tensor, rows: Tensor) -> Tensor:
    """Return the rows ``[R, M]`` of each run's table, ``[R, M, n]``."""
    runs = torch.arange(len(rows), device=rows.device)[:, None] if len(table) > 1 else 0
    return table[runs, rows]


def _noised(values: Tensor, scale: float | Tensor, draws: Tensor, rounding: Tensor) -> Tensor:
    bits = rounding.to(torch.int32) & 0xFFFF
    y, _ = _lattice.release_floats(values, scale, bits, draws)
    return y * _lattice.cell(scale, values.dtype)


_EXPONENTIALS = {
    torch.float32: (7, 23, torch.int32, 0.693145751953125, 1.428606765330187e-06, -87.0),
    torch.float64: (13, 52, torch.int64, 0.6931471805582987, 1.6465949582897082e-12, -708.0),
}
"""Terms of the series; bits behind the point, and integers of that size; log 2 in two parts; where
e^y counts as 0."""


def _sigmoid(x: Tensor) -> Tensor:
    """Return the logistic function, bit for bit as ``csrc/core/logistic.h`` has it."""
    terms, mantissa, integers, high, low, lowest = _EXPONENTIALS[x.dtype]
    y = -x.abs()
    rounds = 1.5 * 2**mantissa
    n = (y * math.log2(math.e) + rounds) - rounds
    r = (y - n * high) - n * low
    p = r * (1 / math.factorial(terms)) + 1 / math.factorial(terms - 1)
    for k in range(terms - 2, 0, -1):
        p = p * r + 1 / math.factorial(k)
    bias = 127 if x.dtype is torch.float32 else 1023
    exponent = n.clamp(min=1 - bias).nan_to_num().to(integers) + bias
    power = (exponent << mantissa).view(x.dtype)
    small = torch.where(y < lowest, 0.0, power + power * (p * r))
    upper = 1 / (1 + small)
    return torch.where(x < 0, small * upper, upper)


__all__ = ["LOGIT_LIMIT", "descend"]

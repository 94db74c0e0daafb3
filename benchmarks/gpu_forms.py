"""Further calls of ops, for kernels that ``gpu_smoke``'s first call of each does not reach.

Noise that was drawn before or comes from a table, norms by Gram matrices, many rows, one position,
long lines. Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dpkern.base.rng import Purpose
from dpkern.ops import _cdt, clip, coef, ghost, noise, spectral, update
from dpkern.ops._draws import CdtDraws, Draws, SampleReads
from dpkern.ops.spectral import Band
from dpkern.ops.testing import KEY

if TYPE_CHECKING:
    from .gpu_smoke import Inputs

_STREAM, _ROUNDING = KEY.stream(Purpose.NOISE, 2), KEY.stream(Purpose.ROUNDING, 2)
_ROOM = 1 << 16
_WIDE = Band((152,), "shells", 0.4)


def _draws(t: Inputs) -> Iterable[tuple[str, Draws]]:
    """Yield laws with draws made before, a table that is read round and round, and one of words."""
    ahead = t(_ROOM).mul(1 << 14)
    yield "gaussian", Draws(0, ahead.int(), ahead.to(torch.int16))
    yield "gaussian", SampleReads(0, t.ids(1400, 1400).to(torch.int16), cursor=3, shift=10)
    table = _cdt.packed([1 << 31, 3 << 30], word_bits=32).to(t.device)
    yield "laplace", CdtDraws(0, table, stream=_STREAM, distribution="laplace")


def _noised(t: Inputs, on: dict[str, Any]) -> list[Tensor]:
    floats: dict[str, Any] = {"stream": _STREAM, "rounding": _ROUNDING, **on}
    made = [noise.add_noise(t.ids(1 << 20, 5003).int(), stream=_STREAM, **on)]
    scales = torch.linspace(0.5, 1.5, 5003, dtype=torch.float64, device=t.device)
    made.append(noise.add_noise(t(5003), scale=scales, **floats))
    for law, draws in _draws(t):
        drawn: dict[str, Any] = {"draws": draws, "distribution": law}
        made.append(noise.add_noise(t(5003), scale=1.5, **drawn, **floats))
        made.append(noise.add_noise(t.ids(9, 5003).int(), stream=_STREAM, **drawn, **on))
    return made


def _coefficients(t: Inputs, on: dict[str, Any]) -> dict[str, Callable[[], list[Any]]]:
    def each(call: Callable[[coef.Noise], Any]) -> list[Any]:
        given: dict[str, Any] = {"scale": 1.0, "stream": _STREAM, "rounding": _ROUNDING}
        return [call(coef.Noise(**given, draws=draws)) for _, draws in _draws(t)]

    return {
        "coef.perturb": lambda: each(
            lambda of: coef.perturb(t(33, 77).sigmoid(), form="taylor", noise=of, **on)
        ),
        "coef.quadratic": lambda: each(
            lambda of: coef.quadratic(t(9, 77), t(9, 77).sigmoid(), form="taylor", noise=of, **on)
        ),
        "coef.expanded": lambda: each(
            lambda of: coef.expanded(
                t(33, 21).sigmoid(), t(33, 3).sigmoid(), t(3, 21), noise=of, **on
            )
        ),
    }


def _updated(t: Inputs, on: dict[str, Any]) -> list[list[Tensor]]:
    found = []
    for law, draws in (("gaussian", None), *_draws(t)):
        params, rule = [t(4099), t(33, 7)], update.SGD(lr=0.1, momentum=0.9)
        given: dict[str, Any] = {"stream": _STREAM, "rounding": _ROUNDING, "draws": draws}
        drawn = update.Noise(distribution=law, scales=(0.5, 0.5), positions=(5, 9000), **given)
        sums = [t(*p.shape) for p in params]
        update.step(params, sums, rule=rule, state=rule.init(params), noise=drawn, **on)
        found.append(params)
    return found


def forms(t: Inputs, backend: str) -> dict[str, Callable[[], Any]]:
    """Return further calls of ops on a backend, by op; each needs fresh inputs."""
    on: dict[str, Any] = {"backend": backend}

    def rows(positions: int, width: int) -> Tensor:
        return t(5, positions, width)

    def halves(positions: int, width: int) -> Tensor:
        return rows(positions, width).bfloat16()

    def summed(positions: int, p: int, q: int) -> Tensor:
        a, g = halves(positions, p), halves(positions, q)
        return t.into(q, p, run=lambda out: ghost.linear_sum(a, g, t.factors, out, **on))

    def many() -> Any:
        done = clip.clip_sum([t(2048, 5), t(2048, 2, 3)], 1.0, **on)
        return done.sums, done.norms

    return {
        "noise.add_noise": lambda: _noised(t, on),
        **_coefficients(t, on),
        "update.step": lambda: _updated(t, on),
        "clip.clip_sum": many,
        "clip.sample_norm": lambda: clip.sample_norm(
            [t(5, 4099)], scale=[t(4099).abs() + 0.5], center=[t(4099)], **on
        ),
        "ghost.linear_norm": lambda: [
            ghost.linear_norm(rows(1, 33), rows(1, 21), **on),
            *(
                ghost.linear_norm(halves(n, p), halves(n, q), route="gram", **on)
                for n, p, q in ((7, 33, 21), (150, 64, 48), (197, 64, 128))
            ),
        ],
        "ghost.linear_norms": lambda: ghost.linear_norms(
            *([halves(197, 320) for _ in range(3)] for _ in range(2)), **on
        ),
        "ghost.linear_sum": lambda: [
            summed(*sizes) for sizes in ((1, 33, 21), (64, 33, 21), (64, 768, 2304))
        ],
        "ghost.embedding_sum": lambda: t.into(
            *(9, 21),
            run=lambda o: ghost.embedding_sum(t.ids(9, 5, 40), rows(40, 21), t.factors, o, **on),
        ),
        "spectral.conv_norm": lambda: [
            spectral.conv_norm(
                t(5, 3, *shape),
                t(5, 4, *shape),
                kernel_size=3,
                padding=1,
                size=tuple(n + 2 for n in shape),
                **on,
            )
            for shape in ((70, 9), (6, 10, 9))
        ],
        "spectral.conv_bins": lambda: spectral.conv_bins(
            t(5, 3, 150), t(5, 4, 150), kernel_size=3, padding=1, band=_WIDE, **on
        )[2],
        "spectral.circulant_norm": lambda: spectral.circulant_norm(
            t(5, 1, 2, 7), t(5, 1, 5, 7), band=Band((7,), "shells", 0.4), **on
        ),
    }

"""Run every op on every backend of a device, on small odd sizes, beside the CPU's reference.

    python -m benchmarks.gpu_smoke [--device cuda] [--scale 1]

First contact with a machine, and what memory and race checkers run: seconds, not minutes. Not yet
run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from dpkern.base import dispatch
from dpkern.base.rng import Purpose
from dpkern.ops import (
    _cdt,
    clip,
    coef,
    ghost,
    noise,
    product,
    recurrent,
    spectral,
    symbols,
    update,
)
from dpkern.ops._draws import CdtDraws, SampleReads
from dpkern.ops.spectral import Band
from dpkern.ops.testing import KEY, assert_close

from .gpu_forms import forms
from .gpu_time import Setting, attempt, backends, exit_code, keep, setting

STREAM, ROUNDING = KEY.stream(Purpose.NOISE, 1), KEY.stream(Purpose.ROUNDING, 1)
BATCH = 5
BITS = ("noise.", "symbols.")
ROUNDED = 1e-2
"""Largest error, of the largest value: norms on a device may lie above the reference's."""


class Inputs:
    """Random tensors, the same on every device."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.generator = torch.Generator().manual_seed(1)
        self.factors = torch.linspace(0.1, 1, BATCH, device=self.device)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device)

    def ids(self, most: int, *shape: int) -> Tensor:
        """Return numbers below ``most``."""
        return torch.randint(most, shape, generator=self.generator).to(self.device)

    def into(self, *shape: int, run: Callable[[Tensor], object]) -> Tensor:
        """Return what was added to zeros."""
        out = torch.zeros(*shape, device=self.device)
        run(out)
        return out


def calls(t: Inputs, b: str) -> dict[str, Callable[[], Any]]:
    """Return a call of each op on backend ``b``; each needs fresh inputs."""
    on: dict[str, Any] = {"backend": b}
    conv: dict[str, Any] = {"kernel_size": 3, "stride": 2, "padding": 1}
    band, blocks = Band((13, 13), "shells", 0.4), Band((7,), "shells", 0.4)
    given = coef.Noise(scale=1.0, stream=STREAM, rounding=ROUNDING, position=9)
    place: dict[str, Any] = {"position": 77, "count": 5003, "device": t.device}
    table = _cdt.packed([1 << 31, 3 << 30], word_bits=32).to(t.device)
    stats = torch.linspace(0.5, 1.5, BATCH * 7, device=t.device).view(BATCH, 7)

    def maps() -> tuple[Tensor, Tensor]:
        return t(BATCH, 3, 11, 11), t(BATCH, 5, 6, 6)

    def channels() -> tuple[Tensor, Tensor]:  # as many as are loaded 16 bytes at a time
        return t(BATCH, 16, 11, 11), t(BATCH, 32, 6, 6)

    def descended() -> tuple[Tensor, ...]:
        weights = t(9, 2, 14, 7), t(9, 2, 7, 14)
        stopped = torch.zeros(9, dtype=torch.int32, device=t.device)
        order = torch.arange(9 * 5 * 2, device=t.device).view(9, 5, 2) % 33
        ahead = t(9, 5, 2, 2, 14).mul(1 << 14)
        noisy = {"draws": ahead.int(), "rounding": ahead.short(), "scale": 1.0, "growth": 0.5}
        records = t(1, 33, 14).sigmoid()
        rule: dict[str, Any] = {"form": "printed", "lr": 0.01, "constant": 2.5}
        coef.descend(*weights, stopped, records, records, order, **rule, **noisy, **on)
        return (*weights, stopped)

    def rows(width: int) -> Tensor:
        return t(BATCH, 7, width)

    def clipped(arithmetic: str) -> Any:
        unit = 2.0**-20 if arithmetic == "exact" else None
        grads = [t(BATCH, 4099), t(BATCH, 7, 3)]
        done = clip.clip_sum(grads, 1.0, arithmetic=arithmetic, unit=unit, **on)
        return done.sums, done.norms

    def contracted() -> list[Tensor]:
        outs = [torch.zeros(4099, device=t.device), torch.zeros(3, device=t.device)]
        ghost.contract([t(BATCH, 4099), t(BATCH, 3)], t.factors, outs, **on)
        return outs

    def stepped(rule: update.Rule) -> list[Tensor]:
        params = [t(4099), t(33, 7)]
        sums = [(1e6 * t(*p.shape)).to(torch.int32) for p in params]
        drawn = update.Noise(
            distribution="gaussian", scales=(0.5, 0.5), stream=STREAM, positions=(5, 9000)
        )
        update.step(params, sums, rule=rule, state=rule.init(params), noise=drawn, **on)
        return params

    def led_back() -> list[Tensor]:
        params, sums = [t(33, 9)], [(1e6 * t(33, 5)).to(torch.int32)]
        signal, back = t(5, 9).cpu().double(), t(9, 5).cpu().double()
        maps = update.PairMaps((update.PairMap(signal=signal, back=back),)).only_back
        drawn = update.Noise(
            distribution="gaussian", scales=(0.5,), stream=STREAM, positions=(512,)
        )
        rule = update.SGD(lr=0.1)
        update.step(params, sums, rule=rule, state=rule.init(params), noise=drawn, maps=maps, **on)
        return params

    def projected() -> list[Tensor]:
        params = [t(33, 7), t(5)]
        update.project(params, update.Ball(0.7), **on)
        return params

    def bins_sum() -> Tensor:
        x, g, _ = spectral.conv_bins(*maps(), **conv, band=band, backend="reference")
        return t.into(
            *(5, 3, 3, 3), run=lambda o: spectral.bins_sum(x, g, t.factors, o, band=band, **on)
        )

    def whole(*shape: int, run: Callable[[Tensor, Tensor], object]) -> Tensor:
        """A sum of integers of about a million, which round otherwise on other backends."""
        out = torch.zeros(shape, dtype=torch.int32, device=t.device)
        run(1e6 * t.factors, out)
        return out

    def states(count: int) -> list[Tensor]:
        return [t(BATCH, 5).tanh() for _ in range(count)]

    def weights(rows: int, inputs: int) -> list[Tensor]:
        return [t(rows, inputs) / 3, t(rows, 5) / 3, t(rows), t(rows)]

    return {
        "noise.keystream": lambda: noise.keystream(
            STREAM, first_block=3, blocks=257, device=t.device, **on
        ),
        "noise.lattice_draws": lambda: noise.lattice_draws(STREAM, **place, **on),
        "noise.rounding_bits": lambda: noise.rounding_bits(ROUNDING, **place, **on),
        "noise.source_draws": lambda: [
            noise.source_draws(draws, **place, **on)
            for draws in (
                SampleReads(0, t.ids(1400, 1400).to(torch.int16), cursor=3, shift=10),
                CdtDraws(0, table, stream=STREAM, distribution="laplace"),
            )
        ],
        "noise.add_noise": lambda: noise.add_noise(
            t(5003), stream=STREAM, scale=1.5, rounding=ROUNDING, **on
        ),
        "symbols.randomize": lambda: symbols.randomize(
            t.ids(3, 5003), stream=STREAM, keep=2**63, categories=3, **on
        ),
        "clip.sample_norm": lambda: clip.sample_norm([t(BATCH, 4099), t(BATCH, 3)], **on),
        "clip.clip_sum": lambda: [clipped(kind) for kind in clip.ARITHMETIC],
        "coef.perturb": lambda: coef.perturb(t(33, 77).sigmoid(), form="taylor", noise=given, **on),
        "coef.quadratic": lambda: coef.quadratic(
            t(33, 77), t(33, 77).sigmoid(), form="taylor", noise=given, **on
        ),
        "coef.descend": descended,
        "coef.expanded": lambda: coef.expanded(
            t(33, 21).sigmoid(), t(33, 3).sigmoid(), t(3, 21), noise=given, **on
        ),
        "ghost.layer_norm_backward": lambda: ghost.layer_norm_backward(
            rows(21), rows(21), stats, stats, t(21), **on
        ),
        "ghost.rms_norm_backward": lambda: ghost.rms_norm_backward(
            rows(21), rows(21), stats, t(21), **on
        ),
        "ghost.group_norm_backward": lambda: ghost.group_norm_backward(
            rows(3), rows(3), stats, stats, t(7), **on
        ),
        "ghost.rounded_gradient": lambda: ghost.rounded_gradient(
            rows(21).bfloat16(), rows(40).bfloat16(), **on
        ),
        "ghost.rounded_sum": lambda: t.into(
            *(40, 21),
            run=lambda o: ghost.rounded_sum([t(BATCH, 40, 21).bfloat16()], t.factors, [o], **on),
        ),
        "ghost.conv_norm": lambda: [
            ghost.conv_norm(*channels(), **conv, **on),
            ghost.conv_norm(*channels(), groups=2, **conv, **on),
        ],
        "ghost.conv_gradient": lambda: ghost.conv_gradient(*channels(), **conv, **on),
        "ghost.conv_sum": lambda: t.into(
            *(32, 16, 3, 3),
            run=lambda o: ghost.conv_sum(*channels(), t.factors, o, **conv, **on),
        ),
        "ghost.conv_integer_sum": lambda: whole(
            *(5, 3, 3, 3), run=lambda f, o: ghost.conv_integer_sum(*maps(), f, o, **conv, **on)
        ),
        "ghost.conv_sum_error": lambda: ghost.conv_sum_error(*maps(), **conv, **on),
        "ghost.embedding_norm": lambda: ghost.embedding_norm(t.ids(9, BATCH, 7), rows(21), **on),
        "ghost.embedding_sum": lambda: t.into(
            *(9, 21),
            run=lambda o: ghost.embedding_sum(t.ids(9, BATCH, 7), rows(21), t.factors, o, **on),
        ),
        "ghost.embedding_integer_sum": lambda: whole(
            *(9, 21),
            run=lambda f, o: ghost.embedding_integer_sum(t.ids(9, BATCH, 7), rows(21), f, o, **on),
        ),
        "ghost.tied_integer_sum": lambda: whole(
            *(9, 21),
            run=lambda f, o: ghost.tied_integer_sum(
                t.ids(9, BATCH, 7), rows(21), rows(9), rows(21), f, o, **on
            ),
        ),
        "ghost.tied_sum_error": lambda: ghost.tied_sum_error(
            t.ids(9, BATCH, 7), rows(21), rows(9), rows(21), **on
        ),
        "ghost.tied_cross": lambda: ghost.tied_cross(
            t.ids(9, BATCH, 7), rows(21), rows(21), rows(9), **on
        ),
        "ghost.explicit_norm": lambda: ghost.explicit_norm([t(BATCH, 4099), t(BATCH, 3)], **on),
        "ghost.explicit_integer_sum": lambda: whole(
            *(4099,), run=lambda f, o: ghost.explicit_integer_sum([t(BATCH, 4099)], f, [o], **on)
        ),
        "ghost.clip_factors": lambda: ghost.clip_factors(
            [t.factors.double()], 0.5, dtype=torch.float32, **on
        ),
        "ghost.contract": contracted,
        "ghost.linear_norm": lambda: ghost.linear_norm(rows(33), rows(21), **on),
        "ghost.linear_norms": lambda: ghost.linear_norms(
            [rows(33), rows(33)], [rows(21), rows(21)], **on
        ),
        "ghost.linear_gradient": lambda: ghost.linear_gradient(rows(33), rows(21), **on),
        "ghost.linear_sum": lambda: t.into(
            *(21, 33), run=lambda o: ghost.linear_sum(rows(33), rows(21), t.factors, o, **on)
        ),
        "ghost.linear_integer_sum": lambda: [
            whole(
                *(21, 33),
                run=lambda f, o, rounding=rounding, count=count: ghost.linear_integer_sum(
                    t(BATCH, count, 33), t(BATCH, count, 21), f, o, rounding=rounding, **on
                ),
            )
            for count, rounding in ((7, "truncate"), (1, "truncate"), (1, "factors"))
        ],
        "ghost.linear_integer_norm": lambda: ghost.linear_integer_norm(rows(33), rows(21), **on),
        "ghost.linear_sum_error": lambda: ghost.linear_sum_error(rows(33), rows(21), **on),
        "product.matmul": lambda: product.matmul(t(BATCH, 33), t(33, 21), t(21), **on),
        "recurrent.lstm": lambda: recurrent.lstm(rows(9), *states(2), *weights(20, 9), **on),
        "recurrent.lstm_backward": lambda: recurrent.lstm_backward(
            rows(20), rows(5), *states(1), *weights(20, 9)[:2], rows(5), *states(2), **on
        ),
        "recurrent.gru": lambda: recurrent.gru(rows(9), *states(1), *weights(15, 9), **on),
        "recurrent.gru_backward": lambda: recurrent.gru_backward(
            rows(20), rows(5), *weights(15, 9)[:2], rows(5), *states(1), **on
        ),
        "recurrent.rnn": lambda: recurrent.rnn(rows(9), *states(1), *weights(5, 9), **on),
        "recurrent.rnn_backward": lambda: recurrent.rnn_backward(
            rows(5), *states(1), *weights(5, 9)[:2], rows(5), *states(1), **on
        ),
        "spectral.conv_norm": lambda: spectral.conv_norm(
            *maps(), **conv, size=(13, 13), band=band, **on
        ),
        "spectral.conv_bins": lambda: spectral.conv_bins(*maps(), **conv, band=band, **on)[2],
        "spectral.whitened_bins": lambda: spectral.whitened_bins(
            *maps(), t(4, 9).double(), **conv, band=band, **on
        )[2],
        "spectral.bins_sum": bins_sum,
        "spectral.circulant_norm": lambda: spectral.circulant_norm(
            t(BATCH, 3, 2, 7), t(BATCH, 3, 5, 7), band=blocks, **on
        ),
        "spectral.circulant_product": lambda: spectral.circulant_product(
            t(BATCH, 2, 7), t(5, 2, 7), convention="column", **on
        ),
        "spectral.circulant_gradient": lambda: spectral.circulant_gradient(
            t(BATCH, 3, 2, 7), t(BATCH, 3, 5, 7), **on
        ),
        "spectral.circulant_sum": lambda: t.into(
            *(5, 2, 7),
            run=lambda o: spectral.circulant_sum(
                t(BATCH, 3, 2, 7), t(BATCH, 3, 5, 7), t.factors, o, band=blocks, **on
            ),
        ),
        "spectral.filtered": lambda: spectral.filtered(
            t(BATCH, 3, 11, 11), padding=(1, 1), rows=(13, 13), band=band, **on
        ),
        "spectral.whitened_norm": lambda: spectral.whitened_norm(
            t(BATCH, 5, 3, 3, 3), torch.eye(9, dtype=torch.float64, device=t.device), **on
        ),
        "update.step": lambda: [
            *(stepped(rule) for rule in (update.SGD(lr=0.1), update.AdamW(lr=0.01))),
            led_back(),
        ],
        "update.advance": lambda: update.advance(
            update.step_counter(update.AdamW(lr=0.1), 3, t.device), rule=update.AdamW(lr=0.1), **on
        ),
        "update.project": projected,
    }


def tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of a result, in order."""
    if isinstance(tree, Tensor):
        yield tree.detach().cpu()
    elif isinstance(tree, (list, tuple)):
        yield from chain.from_iterable(tensors(item) for item in tree)
    elif hasattr(tree, "__dict__"):
        yield from tensors(list(vars(tree).values()))


def compared(op: str, backend: str, where: Setting) -> dict[str, Any]:
    """Return the op's results beside the reference's.

    Raises:
        AssertionError: they differ by more than they may.
    """
    got, want = [], []
    for each in (calls, forms):
        if op in each(Inputs("cpu"), "reference"):
            got += tensors(each(Inputs(where.device), backend)[op]())
            want += tensors(each(Inputs("cpu"), "reference")[op]())
    tolerance = 0.0 if op.startswith(BITS) else ROUNDED
    for mine, theirs in zip(got, want, strict=True):
        assert_close(op, mine.double(), theirs.double(), tolerance)
    return {"tensors": len(got)}


def main(argv: Sequence[str] | None = None) -> int:
    """Call everything; 1 if a result is wrong."""
    where = setting("every op on a GPU", argv)
    torch.backends.cudnn.allow_tf32 = False  # as the reference does not
    rows = []
    for op in dispatch.OPS:
        for backend, reason in backends(op, where).items():
            row = {"op": op, "backend": backend}
            if reason:
                rows.append(row | {"not here": reason})
            elif backend != "reference":
                rows.append(attempt(row, lambda o=op, b=backend: compared(o, b, where)))  # type: ignore[misc]
    keep("smoke", rows, where)
    return exit_code(rows)


if __name__ == "__main__":
    raise SystemExit(main())

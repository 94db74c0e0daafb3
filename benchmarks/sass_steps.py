"""Predict whole training steps on an H200 from products, traffic and the update's machine code.

    private = plain - F / L + min over layers of (materialize | norm alone) + update + clip

F are the FLOPs of the weight gradients, which ordinary training makes at the speed L of the library
and a private step at that of ``dpkern.engine.device_cost``, whose model chooses each layer's way.
``plain`` is itself a prediction: its FLOPs at a speed that well-tuned training reaches. What the
host adds is left out, and so are embeddings and normalisations. Not yet run on a GPU.

ViT-B is the step that comes closest to its target: ``floors`` says what each way that keeps every
sample within its bound takes at least. Its sums are made in the largest tiles that fit the
registers. Gram matrices of the 197 positions of 64 samples, in milliseconds of tensor cores and of
the second-level cache at the speeds of the model, with the multiprocessors that are idle:

    way                                                   tensor cores   cache
    tiles of 128 x 128: two launches, 128 and 64 programs          2.55    2.19
    a program owns a sample, in ranges of 128 + 64 + 8             2.36    1.97
    and two layers share a launch: 128 programs                    1.18    0.98

The target leaves 1.23. Two things are not in it. Instructions multiply more than the tiles have:
both warp groups make the 64 x 8 numbers that one would, and each warp the last 8 x 8, as 16 x 8.
With these 31,744 products for 30,272 the norms take 1.24 ms and the step 1.2503 of a plain one. And
behind its loop a program reads both matrices once more, 200 x 200 numbers above their diagonals.

What would leave more room is one product of operands that were scaled and rounded to 16 bits
again, at the library's speed: the rounding of ``c g`` can lift a sample by
2^-8 sqrt(||A A^T||) ||G||, some percent of its norm at 197 positions, so norms would have to be
that much too large. No kernel here takes them so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dpkern.engine.device_cost import BANDWIDTH, Work
from dpkern.engine.per_sample_gradients import ConvolutionGradients, LinearGradients

LIBRARY = {torch.bfloat16: 600e12, torch.float32: 300e12}
"""FLOP/s of the library's products; those of float32 convolutions in TF32, as cuDNN makes them."""
PLAIN_MS = {
    "GPT-2 small, B 16, T 1024, bfloat16": 38.0,
    "ViT-B, B 64, bfloat16": 17.0,
    "ResNet-18, 32 x 32, B 256, float32": 7.5,
    "ResNet-18, 32 x 32, B 256, bfloat16": 4.0,
}
"""Non-private steps: predicted, not measured."""
TARGETS = dict(zip(PLAIN_MS, (1.25, 1.25, 2.0, 1.5), strict=True))
_SQUARE = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
_DOWN = {"stride": (2, 2), "padding": (1, 1), "dilation": (1, 1), "groups": 1}


@dataclass(frozen=True)
class Step:
    """A model's layers with products, and its number of parameters."""

    title: str
    dtype: torch.dtype
    layers: tuple[LinearGradients | ConvolutionGradients, ...]
    parameters: int


def _linear(batch: int, positions: int, d: int, p: int, dtype: torch.dtype) -> LinearGradients:
    a, g = (torch.empty(batch, positions, n, dtype=dtype, device="meta") for n in (d, p))
    return LinearGradients(a, g)


def _conv(batch: int, ci: int, co: int, side: int, dtype: torch.dtype) -> ConvolutionGradients:
    stride = 1 if ci == co or ci == 3 else 2
    x, g = (
        torch.empty(batch, channels, size, size, dtype=dtype, device="meta")
        for channels, size in ((ci, side * stride), (co, side))
    )
    return ConvolutionGradients(x, g, (3, 3), _SQUARE if stride == 1 else _DOWN)


def _transformer(
    batch: int, positions: int, width: int, layers: int, dtype: torch.dtype
) -> tuple[LinearGradients, ...]:
    shapes = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
    return tuple(_linear(batch, positions, d, p, dtype) for d, p in shapes) * layers


def steps() -> list[Step]:
    """Return the models of the targets."""
    half, single = torch.bfloat16, torch.float32
    names = list(PLAIN_MS)
    head = _linear(16, 1024, 768, 50257, half)
    found = [
        Step(names[0], half, (*_transformer(16, 1024, 768, 12, half), head), 124_000_000),
        Step(names[1], half, _transformer(64, 197, 768, 12, half), 86_000_000),
    ]
    for name, dtype in zip(names[2:], (single, half), strict=True):
        layers = [_conv(256, 3, 64, 32, dtype)]
        for i, (channels, side) in enumerate(((64, 32), (128, 16), (256, 8), (512, 4))):
            first = channels // 2 if i else channels
            layers += [_conv(256, first, channels, side, dtype)]
            layers += [_conv(256, channels, channels, side, dtype)] * 3
        found.append(Step(name, dtype, tuple(layers), 11_200_000))
    return found


def rows(values: list[dict[str, Any]], gpu: str = "h200") -> list[dict[str, Any]]:
    """Return each model's prediction; ``values`` are the rows of the kernels."""
    update = next(row for row in values if row["case"] == "update, Adam, float32 sums")
    found = []
    for step in steps():
        works = [Work.of(layer) for layer in step.layers]
        kept = [work for work in works if work.materialized <= work.norm_alone]
        way = sum(min(work.materialized, work.norm_alone) for work in works)
        products = sum(work.product for work in works)
        plain = PLAIN_MS[step.title] / 1e3
        updated = 1e-12 * update[gpu]["ns per 1000"] * step.parameters
        private = plain - products / LIBRARY[step.dtype] + way + updated
        found.append(
            {
                "model": step.title,
                "TFLOP of weight gradients": products / 1e12,
                "layers kept": f"{len(kept)} of {len(works)}",
                "GB kept": sum(work.gradients for work in kept) / 1e9,
                "norms and sums ms": 1e3 * way,
                "update ms": 1e3 * updated,
                "plain ms": 1e3 * plain,
                "private ms": 1e3 * private,
                "ratio": private / plain,
                "target": TARGETS[step.title],
            }
        )
    return found


FLOORS: dict[str, Callable[[Work], float]] = {
    "gradients stored, normed in the product, read once": lambda w: (
        w.product / w.keeping + (w.held + 2 * w.gradients) / BANDWIDTH
    ),
    "sums in one accumulator, norms in tiles of Gram matrices": lambda w: (
        w.product / w.speed + w.norm + 2 * w.held / BANDWIDTH
    ),
    "norms for the reading of operands": lambda w: w.product / w.speed + 2 * w.held / BANDWIDTH,
}
"""The least seconds of a layer's norm and sum, by the way that they take; products of 16 bits."""


def floors(step: Step, update_ms: float) -> dict[str, float]:
    """Return milliseconds by way, and first what the target leaves for norms and sums."""
    works = [Work.of(layer) for layer in step.layers]
    plain = PLAIN_MS[step.title]
    gained = 1e3 * sum(work.product for work in works) / LIBRARY[step.dtype]
    left = (TARGETS[step.title] - 1) * plain + gained - update_ms
    ways = {way: 1e3 * sum(map(seconds, works)) for way, seconds in FLOORS.items()}
    return {"what the target leaves": left, **ways}


def layers(step: Step) -> list[dict[str, Any]]:
    """Return the model's terms for each shape of layer, in milliseconds of all that have it."""
    times = Counter(layer.shape for layer in step.layers)
    found = []
    for shape, count in times.items():
        work = Work.of(next(layer for layer in step.layers if layer.shape == shape))
        ms = 1e3 * count
        found.append(
            {
                "layers": f"{count} of {' x '.join(map(str, shape))}",
                "stored: product": ms * work.product / work.keeping,
                "operands": ms * work.held / BANDWIDTH,
                "gradients, three times": ms * work.passes * work.gradients / BANDWIDTH,
                "not stored: norm": ms * work.norm,
                "sum": ms * work.product / work.speed,
                "operands, twice": 2 * ms * work.held / BANDWIDTH,
                "stored": ms * work.materialized,
                "not stored": ms * work.norm_alone,
            }
        )
    return found


def markdown_of_floors(update_ms: float) -> list[str]:
    """Return the section about the model that stays above its target."""
    step = steps()[1]
    rows = layers(step)
    lines = [
        f"### Where {step.title.split(',')[0]} stays, in milliseconds",
        "",
        "| " + " | ".join(rows[0]) + " |",
        "|" + "---|" * len(rows[0]),
    ]
    for row in rows:
        cells = (f"{v:.2f}" if isinstance(v, float) else v for v in row.values())
        lines.append("| " + " | ".join(cells) + " |")
    found = floors(step, update_ms)
    lines += ["", "Floors of norms and sums that keep every sample within its bound:", ""]
    return lines + [f"- {way}: {ms:.2f}" for way, ms in found.items()]


def markdown(found: list[dict[str, Any]]) -> list[str]:
    """Return the section of the report."""
    columns = list(found[0])
    lines = [
        "## Whole steps, predicted",
        "",
        "The model stands at the head of `benchmarks/sass_steps.py`; plain steps are predictions.",
        "",
        "| " + " | ".join(columns) + " |",
        "|" + "---|" * len(columns),
    ]
    for row in found:
        cells = (f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values())
        lines.append("| " + " | ".join(cells) + " |")
    missed = [row["model"] for row in found if row["ratio"] > row["target"]]
    lines += ["", f"Above their targets: {'; '.join(missed)}." if missed else "All meet targets."]
    return [*lines, "", *markdown_of_floors(found[1]["update ms"])]

"""Predict whole training steps on an H200 from products, traffic and the update's machine code.

    private = plain - F / L + min over layers of (materialize | norm alone) + update + clip

F are the FLOPs of the weight gradients, which ordinary training makes at the speed L of the library
and a private step at that of ``dpkern.engine.device_cost``, whose model chooses each layer's way.
``plain`` is itself a prediction: its FLOPs at a speed that well-tuned training reaches. What the
host adds is left out, and so are embeddings and normalisations. Not yet run on a GPU.

ViT-B stays above its target in this model, whatever the kernel: norms by Gram matrices of 197
positions at the library's speed (2.3 ms) and one product of scaled operands at that of ordinary
training (5.4 ms with its traffic) would make 1.29. Operands of 16 bits that are rounded with their
clip factors would need norms that are a few percent too large, which no kernel here takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dpkern.engine.device_cost import Work
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
    return lines

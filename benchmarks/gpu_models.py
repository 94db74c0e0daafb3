"""Time whole training steps on a GPU, and their memory: dpkern, non-private, and Opacus.

    python -m benchmarks.gpu_models [--device cuda] [--scale 1]

A decoder of GPT-2 small's shape in bfloat16 autocast, and ResNet-18 with GroupNorm. Variants run
one after another, each in fresh memory. Not yet run on a GPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .gpu_time import Setting, attempt, exit_code, keep, milliseconds, setting
from .step_cases import VARIANTS, Runner, private, quiet
from .step_models import ResNet, Task


class DecoderLayer(nn.Module):
    """A decoder layer: causal attention and a hidden layer, normed before, as in GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(self.first(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(split[0], split[1], split[2], is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Decoder(nn.Module):
    """A decoder of GPT-2's shape; the output layer has a weight of its own."""

    def __init__(self, *, vocabulary: int, length: int, width: int, heads: int, layers: int):
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*(DecoderLayer(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device).repeat(len(ids), 1)
        with torch.autocast(ids.device.type, torch.bfloat16):
            out: Tensor = self.head(self.norm(self.layers(self.token(ids) + self.position(places))))
        return out.float()


def tasks(where: Setting) -> list[Task]:
    """Return the models, small ones where the results are not kept."""
    shape = {"vocabulary": 50257, "length": 1024, "width": 768, "heads": 12, "layers": 12}
    channels: tuple[int, ...] = (64, 128, 256, 512)
    batches, groups, size = (8, 256), 32, 32
    if where.scale != 1:
        shape = {"vocabulary": 50, "length": 8, "width": 12, "heads": 2, "layers": 1}
        channels, batches, groups, size = (4, 8), (3, 4), 2, 8

    def tokens(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        size = (2, batch, shape["length"])
        ids = torch.randint(shape["vocabulary"], size, generator=generator)
        return ids[0].to(where.device), ids[1].to(where.device)

    def images(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(batch, 3, size, size, generator=generator).to(where.device)
        return x, torch.randint(10, (batch,), generator=generator).to(where.device)

    def decoder() -> nn.Module:
        return Decoder(**shape).to(where.device)

    def resnet() -> nn.Module:
        return ResNet(channels, groups).to(where.device)

    title = f"decoder, T {shape['length']}, B {batches[0]}, bfloat16"
    return [
        Task(name="decoder", title=title, batch=batches[0], build=decoder, draw=tokens),
        Task(
            name="resnet18",
            title=f"ResNet-18, {size} x {size}, B {batches[1]}",
            batch=batches[1],
            build=resnet,
            draw=images,
        ),
    ]


def variants() -> dict[str, Callable[..., Any]]:
    """Return non-private training, dpkern, and Opacus."""
    names = ["torch foreach", "torch fused", "dpkern", "Opacus hooks", "Opacus ghost"]
    chosen: dict[str, Callable[..., Any]] = {name: VARIANTS[name] for name in names}
    chosen["dpkern, per layer"] = partial(private, clipping="per_layer")
    return chosen


def measured(make: Callable[..., Any], task: Task, where: Setting) -> dict[str, Any]:
    """Measure milliseconds of a step and the peak of memory over what the model takes."""
    runner: Runner = make(task, lr=1e-3).begin(1.0)

    def step() -> None:
        runner.loss(runner.hand_out()).backward()
        runner.update()

    before = [p.detach().clone() for p in runner.model.parameters()]
    step()
    if all(torch.equal(b, p) for b, p in zip(before, runner.model.parameters(), strict=True)):
        raise AssertionError("the step trained nothing")
    del before
    row: dict[str, Any] = {"ms": milliseconds([step], where)}
    if where.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(where.device)
        step()
        row["peak MiB"] = torch.cuda.max_memory_allocated(where.device) / 2**20
    return row


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every variant of every model; 1 if one failed."""
    where = setting("training steps on a GPU", argv)
    rows: list[dict[str, Any]] = []
    for task in tasks(where):
        found = []
        for name, make in variants().items():
            row = {"model": task.title, "variant": name}
            if "Opacus" in name and importlib.util.find_spec("opacus") is None:
                found.append(row | {"not here": "opacus is not installed: carry a wheel"})
                continue
            with quiet():
                found.append(attempt(row, lambda m=make, t=task: measured(m, t, where)))  # type: ignore[misc]
            if where.device.type == "cuda":
                torch.cuda.empty_cache()
        plain = min((r["ms"] for r in found[:2] if "ms" in r), default=None)
        rows += [
            r | {"of non-private": r["ms"] / plain} if plain and "ms" in r else r for r in found
        ]
    keep("models", rows, where)
    return exit_code([r for r in rows if "Opacus" not in r["variant"]])


if __name__ == "__main__":
    raise SystemExit(main())

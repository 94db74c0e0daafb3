"""Time whole training steps on a GPU, and their memory: dpkern, non-private, and Opacus.

    python -m benchmarks.gpu_models [--device cuda] [--scale 1]

A decoder of GPT-2 small's shape and a vision transformer in bfloat16 autocast, ResNet-18 with
GroupNorm in both precisions, and an LSTM. A step is split into forward pass, backward pass and
update, and into the host's time. Variants run one after another, each in fresh memory. Not yet run
on a GPU.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dpkern
from dpkern.graphs import StepGraph
from dpkern.reports.networks import ResNet, TransformerLayer

from .gpu_time import Setting, attempt, exit_code, keep, milliseconds, setting
from .step_cases import VARIANTS, Prepared, Runner, private, quiet
from .step_models import Task


class Decoder(nn.Module):
    """A decoder of GPT-2's shape; the output layer has a weight of its own."""

    def __init__(self, *, vocabulary: int, length: int, width: int, heads: int, layers: int):
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*(TransformerLayer(width, heads, True) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device).repeat(len(ids), 1)
        with torch.autocast(ids.device.type, torch.bfloat16):
            out: Tensor = self.head(self.norm(self.layers(self.token(ids) + self.position(places))))
        return out.float()


class VisionTransformer(nn.Module):
    """A vision transformer of ViT-B's shape: patches, a class token, a classifier."""

    def __init__(self, *, size: int, patch: int, width: int, heads: int, layers: int):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.zeros(1, (size // patch) ** 2 + 1, width))
        self.layers = nn.Sequential(*(TransformerLayer(width, heads, False) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            seen = self.patches(x).flatten(2).transpose(1, 2)
            joined = torch.cat([self.token.expand(len(x), -1, -1), seen], 1) + self.places
            out: Tensor = self.head(self.norm(self.layers(joined))[:, 0])
        return out.float()


class HalfResNet(ResNet):
    """A ResNet whose products are bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            out: Tensor = super().forward(x)
        return out.float()


class TokenLSTM(nn.Module):
    """An LSTM over tokens, whose last state is classified."""

    def __init__(self, *, vocabulary: int, width: int):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.lstm, self.head = nn.LSTM(width, width, batch_first=True), nn.Linear(width, 10)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(self.token(ids))[0][:, -1])
        return out


class Inputs:
    """Random inputs and labels on the device."""

    def __init__(self, where: Setting) -> None:
        self.where = where

    def tokens(
        self, vocabulary: int, length: int, classes: int | None = None
    ) -> Callable[[int, torch.Generator], tuple[Tensor, Tensor]]:
        """Return batches of token ids with the next ones, or with classes."""

        def draw(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
            ids = torch.randint(vocabulary, (2, batch, length), generator=generator)
            labels = ids[1] if classes is None else ids[1, :, 0] % classes
            return ids[0].to(self.where.device), labels.to(self.where.device)

        return draw

    def images(self, size: int) -> Callable[[int, torch.Generator], tuple[Tensor, Tensor]]:
        """Return batches of square images in ten classes."""

        def draw(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
            x = torch.randn(batch, 3, size, size, generator=generator)
            labels = torch.randint(10, (batch,), generator=generator)
            return x.to(self.where.device), labels.to(self.where.device)

        return draw


def tasks(where: Setting) -> list[Task]:
    """Return the models, small ones where the results are not kept."""
    full, inputs, found = where.scale == 1, Inputs(where), []

    def add(name: str, title: str, batch: int, draw: Any, build: Callable[[], nn.Module]) -> None:
        batch = batch if full else 3
        found.append(
            Task(
                name=name,
                title=f"{title}, B {batch}",
                batch=batch,
                build=lambda: build().to(where.device),
                draw=draw,
            )
        )

    shape = {"length": 1024, "width": 768, "heads": 12, "layers": 12}
    if not full:
        shape = {"length": 8, "width": 12, "heads": 2, "layers": 1}
    for batch, vocabulary in ((8, 50257), (16, 50257), (16, 50304), (64, 50257)):
        words = vocabulary if full else vocabulary % 50 + 40
        add(
            f"decoder {batch} {vocabulary}",
            f"decoder, T {shape['length']}, vocabulary {words}, bfloat16",
            batch,
            inputs.tokens(words, shape["length"]),
            partial(Decoder, vocabulary=words, **shape),
        )
    size, patch, width, heads, layers = (224, 16, 768, 12, 12) if full else (8, 4, 8, 2, 1)
    sizes = {"size": size, "patch": patch, "width": width, "heads": heads, "layers": layers}
    images = inputs.images(size)
    add("vit", f"ViT-B, {size} x {size}, bfloat16", 64, images, partial(VisionTransformer, **sizes))
    channels, groups, side = ((64, 128, 256, 512), 32, 32) if full else ((4, 8), 2, 8)
    for name, kind, dtype in (
        ("resnet18", ResNet, "float32"),
        ("resnet18 half", HalfResNet, "bfloat16"),
    ):
        title = f"ResNet-18, {side} x {side}, {dtype}"
        add(name, title, 256, inputs.images(side), partial(kind, channels, groups))
    words, length, width = (10000, 128, 512) if full else (20, 5, 8)
    title = f"LSTM {width}, T {length}, float32"
    draw = inputs.tokens(words, length, classes=10)
    add("lstm", title, 64, draw, partial(TokenLSTM, vocabulary=words, width=width))
    return found


MANY = ("decoder 8 50257", "resnet18")
"""Models that are measured in every variant; of the others, those of ``FEW``."""
FEW = ("torch fused", "dpkern", "dpkern as a graph", "dpkern keep 0", "dpkern exact")


PREDICTED = {
    "decoder 16 50257": "GPT-2 small, B 16, T 1024, bfloat16",
    "vit": "ViT-B, B 64, bfloat16",
    "resnet18": "ResNet-18, 32 x 32, B 256, float32",
    "resnet18 half": "ResNet-18, 32 x 32, B 256, bfloat16",
}
"""Models whose steps ``results/sass.json`` predicts, by their names there."""


def predicted(name: str) -> dict[str, float]:
    """Return the prediction to stand beside a model's measurement; empty where there is none."""
    table = json.loads((Path(__file__).parent / "results" / "sass.json").read_text())
    ratios = {row["model"]: row["ratio"] for row in table["steps"]}
    return {"predicted": ratios[PREDICTED[name]]} if name in PREDICTED else {}


class WholeStep:
    """What stands for the loss of a recorded step: its backward pass is the step."""

    def __init__(self, graph: StepGraph, batch: Sequence[Tensor]) -> None:
        self.graph, self.batch = graph, batch

    def backward(self) -> None:
        """Take the step."""
        self.graph.step(*self.batch)


def graphed(task: Task, lr: float, sampling: str = "fixed", arithmetic: str = "float") -> Prepared:
    """Make dpkern's step as a CUDA graph; the first steps run without it.

    Poisson draws are filled up to one number of rows; each has as many records as are drawn.
    """
    engine = dpkern.PrivacyEngine()
    prepared = private(task, lr, engine=engine, sampling=sampling, arithmetic=arithmetic)

    def begin(noise: float) -> Runner:
        runner = prepared.begin(noise)
        criterion = nn.CrossEntropyLoss()
        graph = StepGraph(engine, lambda model, x, y: task.loss(criterion, model(x), y))
        while not graph.replays:
            graph.step(*runner.hand_out())
        runner.loss, runner.update = partial(WholeStep, graph), lambda: None
        return runner

    return Prepared(prepared.model, begin)


def variants(name: str = MANY[0]) -> dict[str, Callable[..., Any]]:
    """Return a model's variants: non-private training, dpkern, and Opacus."""
    held: dict[str, Callable[..., Any]] = {
        **VARIANTS,
        "dpkern exact": partial(private, arithmetic="exact"),
        "dpkern exact as a graph": partial(graphed, arithmetic="exact"),
        "dpkern as a graph": graphed,
        "dpkern as a graph, Poisson": partial(graphed, sampling="poisson"),
    }
    if name not in MANY:
        return {variant: held[variant] for variant in FEW}
    graphs = ["dpkern as a graph, Poisson", "dpkern exact as a graph"]
    names = ["torch default", *FEW, *graphs, "Opacus hooks", "Opacus ghost"]
    chosen = {name: held[name] for name in names}
    chosen["dpkern, per layer"] = partial(private, clipping="per_layer")
    return chosen


def measured(make: Callable[..., Any], task: Task, where: Setting) -> dict[str, Any]:
    """Measure milliseconds of a step, of its phases, and the peak of memory over the model's."""
    runner: Runner = make(task, lr=1e-3).begin(1.0)

    def step() -> None:
        runner.loss(runner.hand_out()).backward()
        runner.update()

    before = [p.detach().clone() for p in runner.model.parameters()]
    step()
    if all(torch.equal(b, p) for b, p in zip(before, runner.model.parameters(), strict=True)):
        raise AssertionError("the step trained nothing")
    del before
    row: dict[str, Any] = {"ms": milliseconds([step], where), **phases(runner, where)}
    if where.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(where.device)
        step()
        row["peak MiB"] = torch.cuda.max_memory_allocated(where.device) / 2**20
    return row


def phases(runner: Runner, where: Setting, rounds: int = 5) -> dict[str, float]:
    """Measure medians of forward pass, backward pass and update, and of the host's time."""
    names = ("forward ms", "backward ms", "update ms", "host ms")
    found: list[tuple[float, ...]] = []
    for _ in range(rounds):
        batch = runner.hand_out()
        marks = [Mark(where) for _ in range(4)]
        started = time.perf_counter()
        marks[0].set()
        loss = runner.loss(batch)
        marks[1].set()
        loss.backward()
        marks[2].set()
        runner.update()
        marks[3].set()
        host = 1e3 * (time.perf_counter() - started)
        found.append((*(b.since(a) for a, b in pairwise(marks)), host))
    medians = (statistics.median(times) for times in zip(*found, strict=True))
    return dict(zip(names, medians, strict=True))


class Mark:
    """A point in the device's stream, or on a CPU in time."""

    def __init__(self, where: Setting) -> None:
        self.event = torch.cuda.Event(enable_timing=True) if where.device.type == "cuda" else None
        self.seconds = 0.0

    def set(self) -> None:
        """Put the mark here."""
        if self.event is None:
            self.seconds = time.perf_counter()
        else:
            self.event.record()

    def since(self, earlier: Mark) -> float:
        """Return milliseconds since an earlier mark."""
        if self.event is None or earlier.event is None:
            return 1e3 * (self.seconds - earlier.seconds)
        self.event.synchronize()
        return float(earlier.event.elapsed_time(self.event))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every model in its variants; 1 if one failed."""
    where = setting("training steps on a GPU", argv)
    failed = 0
    for task in tasks(where):
        found = []
        for name, make in variants(task.name).items():
            row = {"model": task.title, "variant": name}
            if "Opacus" in name and importlib.util.find_spec("opacus") is None:
                found.append(row | {"not here": "opacus is not installed: carry a wheel"})
                continue
            with quiet():
                found.append(attempt(row, lambda m=make, t=task: measured(m, t, where)))  # type: ignore[misc]
            if where.device.type == "cuda":
                torch.cuda.empty_cache()
        plain = min((r["ms"] for r in found if "torch" in r["variant"] and "ms" in r), default=None)
        rows = [
            r | {"of non-private": r["ms"] / plain} if plain and "ms" in r else r for r in found
        ]
        rows = [r | predicted(task.name) if r["variant"] == "dpkern" else r for r in rows]
        keep(f"models: {task.name}", rows, where)  # now: what is killed later is not lost
        failed |= exit_code([r for r in rows if "Opacus" not in r["variant"]])
    return failed


if __name__ == "__main__":
    raise SystemExit(main())

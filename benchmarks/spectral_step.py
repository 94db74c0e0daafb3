"""Time whole steps with mechanisms of the frequency domain, DP-SGD and literal forms: a worker.

Usage: ``python -m benchmarks.spectral_step '{"task": ..., "threads": ..., "rounds": ...}'``

The literal steps capture every convolution's input and output gradient with torch's hooks and
release its weight by the papers' pipeline; all other parameters take their ordinary gradient, so
these baselines do less than they should.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import dpkern
from dpkern.engine.demo.sources import build
from dpkern.ops.spectral import Band, literal
from dpkern.ops.spectral._sizes import fast
from dpkern.privacy.mechanisms import DPSGD, GReDP, Mechanism, SpectralDP

from .step_cases import (
    CLIP,
    MOMENTUM,
    NOISE,
    Prepared,
    Runner,
    _loader,
    _runner,
    non_private,
    quiet,
)
from .step_memory import reset_peak, resident
from .step_models import TASKS, Task, images

LR = 1e-3
KEEP = 0.25
SLOW = 1.0
"""Seconds: a step that takes longer is timed twice at most."""


PAPERS = {
    "ResNet-20": ("gredp-resnet20", 64),
    "AlexNet": ("gredp-alexnet", 16),
    "Model-3": ("gredp-model3", 16),
}
"""Networks of GReDP's experiments for images of 32 x 32, with their batches."""


def _of_paper(title: str, name: str, batch: int) -> Task:
    def made(width: float) -> Callable[[], nn.Module]:
        return partial(build, name, row_shape=(3, 32, 32), classes=10, width=width)

    whole = Task(
        name=name, title=f"{title}, B {batch}", batch=batch, build=made(1.0), draw=images(3, 32)
    )
    return replace(whole, small=replace(whole, batch=4, build=made(0.25)))


WHOLE: dict[str, Task] = {
    "lenet": replace(TASKS["lenet"], batch=128, title="LeNet, B 128"),
    **{name: _of_paper(title, name, batch) for title, (name, batch) in PAPERS.items()},
}
"""The models whose whole steps are compared with DP-SGD's."""


def released(task: Task, lr: float, mechanism: type[Mechanism], **options: Any) -> Prepared:
    """Make dpkern's variant with a mechanism, flat clipping."""
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=MOMENTUM)
    loader = _loader(task)

    def begin(noise: float) -> Runner:
        settings = options | {"noise_multiplier": noise, "max_grad_norm": CLIP, "clipping": "flat"}
        if "sites" in {field.name for field in fields(mechanism)}:
            settings["sites"] = dpkern.survey(model, task.data()[0][:2])
        made = dpkern.PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            mechanism=mechanism(**settings),
            sampling="fixed",
        )
        return _runner(task, *made)

    return Prepared(model, begin)


class Literal:
    """A convolution whose weight gradients go through the papers' pipeline."""

    def __init__(self, model: nn.Module, published: bool) -> None:
        self.published = published
        self.generator = torch.Generator().manual_seed(0)
        self.seen: dict[nn.Conv2d, list[Tensor]] = {}
        for part in model.modules():
            if isinstance(part, nn.Conv2d):
                part.register_forward_hook(self._forward)
                part.register_full_backward_hook(self._backward)

    def _forward(self, part: nn.Conv2d, inputs: tuple[Tensor, ...], _: Tensor) -> None:
        self.seen[part] = [inputs[0].detach()]

    def _backward(self, part: nn.Conv2d, _: Any, grads: tuple[Tensor, ...]) -> None:
        self.seen[part].append(grads[0] * len(grads[0]))  # of each sample's own loss

    def release(self) -> None:
        """Put the noisy gradient of every convolution in place."""
        for part, (x, g) in self.seen.items():
            padded = [n + 2 * p for n, p in zip(x.shape[2:], part.padding, strict=True)]
            size = tuple(fast(n, s) for n, s in zip(padded, part.stride, strict=True))
            pipeline = literal.Pipeline(
                kernel=part.kernel_size,
                stride=part.stride,
                padding=tuple(int(p) for p in part.padding),
                size=size,
                bound=CLIP,
                noise_multiplier=NOISE,
                band=Band(size, "shells", KEEP),
                noise_point="per_sample" if self.published else "per_batch",
            )
            run = literal.spectral_dp if self.published else literal.batched
            part.weight.grad = run(x, g, pipeline, self.generator) / len(x)
        self.seen.clear()


def literally(task: Task, lr: float, published: bool) -> Prepared:
    """Make Spectral-DP by hooks and the literal pipeline."""
    model = task.model()
    pipeline = Literal(model, published)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=MOMENTUM)
    loader = _loader(task)

    def begin(noise: float) -> Runner:
        runner = _runner(task, model, optimizer, loader)
        plain = runner.update

        def update() -> None:
            pipeline.release()
            plain()

        return replace(runner, update=update)

    return Prepared(model, begin)


spectral = partial(released, mechanism=SpectralDP, keep_fraction=KEEP, fft_size="fast")
VARIANTS: dict[str, Callable[..., Prepared]] = {
    "non-private": partial(non_private, fused=True),
    "DP-SGD": partial(released, mechanism=DPSGD, arithmetic="float"),
    "GReDP cropped": partial(released, mechanism=GReDP, clip_domain="cropped", arithmetic="float"),
    "GReDP spectrum": partial(released, mechanism=GReDP, mode="published", fft_size="fast"),
    "Spectral-DP spectrum": partial(spectral, mode="published"),
    "Spectral-DP whitened": partial(spectral, clip_domain="whitened", arithmetic="float"),
    "literal batched": partial(literally, published=False),
    "literal": partial(literally, published=True),
}


def measure(task: Task, rounds: int) -> dict[str, float]:
    """Measure least milliseconds of a step, variants in turns."""
    runners = {name: make(task, lr=LR).begin(NOISE) for name, make in VARIANTS.items()}
    first = {}
    for name, runner in runners.items():
        before = time.perf_counter()
        runner.step()
        first[name] = time.perf_counter() - before
    least = dict.fromkeys(runners, float("inf"))
    order, names = random.Random(0), list(runners)
    for i in range(rounds):
        order.shuffle(names)
        for name in names:
            if first[name] < SLOW or i < 2:
                least[name] = min(least[name], sum(runners[name].step()))
    return {name: 1e3 * seconds for name, seconds in least.items()}


def growth(task: Task, name: str) -> int:
    """Measure bytes that two steps add at their peak."""
    prepared = VARIANTS[name](task, lr=LR)
    before = reset_peak()
    runner = prepared.begin(NOISE)
    for _ in range(2):
        runner.step()
    return resident("VmHWM") - before


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Measure times of all variants, or the memory of one."""
    task = (TASKS | WHOLE)[request["task"]] if request.get("whole") else TASKS[request["task"]]
    torch.set_num_threads(request["threads"])
    if "variant" in request:
        if task.small is not None:
            growth(task.small, request["variant"])
        return {**request, "growth": growth(task, request["variant"])}
    return {**request, "ms": measure(task, request["rounds"])}


if __name__ == "__main__":
    with quiet():
        print(json.dumps(main(json.loads(sys.argv[1]))))

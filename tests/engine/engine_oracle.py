"""The truth for the capture engine: every sample alone, by ordinary autograd, in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpkern.engine.capture import Capture
from dpkern.engine.clipping import clipped_sums
from dpkern.ops import clip
from dpkern.privacy.mechanisms import DPSGD, Plan

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}
"""Largest relative error of norms and clipped sums."""

Loss = Callable[[Any], Tensor]


class Op(nn.Module):
    """A module made of parameters of these shapes and one function of it and the inputs."""

    def __init__(self, function: Callable[..., Any], **shapes: Sequence[int]) -> None:
        super().__init__()
        self.function = function
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(tuple(shape))))

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.function(self, *inputs, **named)


def make(build: Callable[[], nn.Module], *inputs: Tensor, seed: int = 0) -> nn.Module:
    """A module with random parameters, lazy ones materialised; no zero initialisation is left."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = build()
        if inputs:
            with torch.no_grad():
                module(*inputs)
        for parameter in module.parameters():
            if not parameter.detach().any():
                nn.init.normal_(parameter, std=0.3)
    return module


def draw(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def tokens(*shape: int, high: int = 11, seed: int = 1) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def cast(tree: Any, dtype: torch.dtype) -> Any:
    if isinstance(tree, Tensor):
        return tree.to(dtype) if tree.is_floating_point() else tree
    return tuple(cast(item, dtype) for item in tree)


def sample_losses(output: Tensor) -> Tensor:
    """``[B]`` losses of a batch-first output; each depends on its own row only."""
    flat = output.reshape(output.shape[0], math.prod(output.shape[1:]))
    weights = torch.linspace(0.5, 2.0, flat.shape[1], dtype=flat.dtype, device=flat.device)
    return (flat * weights).sin().sum(1)


def total(output: Tensor) -> Tensor:
    return sample_losses(output).sum()


def reference_gradients(
    module: nn.Module, inputs: Sequence[Tensor], loss: Loss = total
) -> list[Tensor]:
    """float64 ``[B, *shape]`` for every trainable parameter, one sample at a time."""
    module = copy.deepcopy(module).double()
    inputs = cast(inputs, torch.float64)
    parameters = [p for p in module.parameters() if p.requires_grad]
    rows: list[list[Tensor]] = [[] for _ in parameters]
    for b in range(len(inputs[0])):
        # torch's own group norm crashes on float64 channels-last inputs.
        value = loss(module(*(x[b : b + 1].contiguous() for x in inputs)))
        if value.requires_grad:
            value.backward()
        for row, p in zip(rows, parameters, strict=True):
            row.append(torch.zeros_like(p) if p.grad is None else p.grad)
            p.grad = None
    return [
        torch.stack(row) if row else p.new_zeros((0, *p.shape))
        for row, p in zip(rows, parameters, strict=True)
    ]


def squares(gradients: Sequence[Tensor]) -> Tensor:
    """``[parameters, B]``."""
    return torch.stack(
        [g.reshape(len(g), math.prod(g.shape[1:])).square().sum(1) for g in gradients]
    )


def factors_of(gradients: Sequence[Tensor], plan: Plan) -> list[Tensor]:
    """Clip factors ``[B]`` of every parameter, by the definition."""
    groups = [block.clip_group for block in plan.blocks]
    each = squares(gradients)
    found = []
    for block in plan.blocks:
        norms = each[[i for i, g in enumerate(groups) if g == block.clip_group]].sum(0).sqrt()
        if plan.clipping == "automatic":
            found.append(block.bound * clip.SLACK / (norms + clip.GAMMA))
        else:
            found.append((block.bound * clip.SLACK / norms).clamp(max=1.0))
    return found


@dataclass(frozen=True)
class Truth:
    """Norms ``[B]`` and clipped sums."""

    norms: Tensor
    sums: list[Tensor]
    scale: float
    """Size of the whole clipped gradient, without cancellation between samples."""


def truth(gradients: Sequence[Tensor], plan: Plan) -> Truth:
    factors = factors_of(gradients, plan)
    sums = [torch.einsum("b,b...->...", c, g) for c, g in zip(factors, gradients, strict=True)]
    terms = torch.stack(factors).square() * squares(gradients)
    return Truth(squares(gradients).sum(0).sqrt(), sums, float(terms.sum().sqrt()))


def plan_for(module: nn.Module, bound: Any = 1.0, **options: Any) -> Plan:
    shapes = [p.shape for p in module.parameters() if p.requires_grad]
    options = {"noise_multiplier": 1.0, "arithmetic": "float", **options}
    return DPSGD(max_grad_norm=bound, **options).plan(shapes)


def run(
    module: nn.Module,
    inputs: Sequence[Tensor],
    plan: Plan,
    *,
    reduction: str = "sum",
    keep_budget: int | float = 0.25,
    passes: int = 1,
) -> clip.ClipResult:
    """One step of the engine, ``passes`` times over the same samples."""
    capture = Capture(module, loss_reduction=reduction, keep_budget=keep_budget)
    capture.attach()
    try:
        if passes > 1:
            capture.begin_batch(len(inputs[0]))
        for _ in range(passes):
            losses = sample_losses(module(*inputs))
            (losses.mean() if reduction == "mean" and len(losses) else losses.sum()).backward()
        result = clipped_sums(capture, plan)
        assert isinstance(result, clip.ClipResult)
        return result
    finally:
        capture.detach()


def agree(result: clip.ClipResult, expected: Truth, tolerance: float) -> None:
    """Norms and sums within this relative error; a norm of 0 is compared with the batch's."""
    norms = result.norms.double().cpu()
    floor = 1e-6 * float(expected.norms.max()) if len(norms) else 0.0
    assert norms.shape == expected.norms.shape
    error = (norms - expected.norms).abs() / expected.norms.clamp(min=max(floor, 1e-30))
    assert bool((error <= tolerance).all()), f"norms are off by {error.max():.1e}"
    assert len(result.sums) == len(expected.sums)
    for index, (mine, other) in enumerate(zip(result.sums, expected.sums, strict=True)):
        assert mine.shape == other.shape
        off = float((mine.double().cpu() - other).norm())
        assert off <= tolerance * max(expected.scale, 1e-30), f"sum {index} is off by {off:.1e}"


def check(
    module: nn.Module,
    inputs: Sequence[Tensor],
    *,
    dtype: torch.dtype = torch.float64,
    bound: Any = None,
    plain: nn.Module | None = None,
    **options: Any,
) -> None:
    """The engine's norms and clipped sums are those of the loop.

    Args:
        plain: what the loop runs instead, with the same parameters (without dropout, say).
        bound: None for the median norm, so that some samples are clipped and some are not.
        options: of ``run``, or of the mechanism.
    """
    own = ("reduction", "keep_budget", "passes")
    run_options = {k: v for k, v in options.items() if k in own}
    privacy = {k: v for k, v in options.items() if k not in own}
    module, inputs = module.to(dtype), cast(inputs, dtype)
    # The same float32 numbers for both.
    gradients = reference_gradients(plain or module, inputs)
    gradients = [g * run_options.get("passes", 1) for g in gradients]
    norms = squares(gradients).sum(0).sqrt()
    if bound is None:
        bound = float(norms.median()) if len(norms) and float(norms.median()) > 0 else 1.0
    plan = plan_for(module, bound, **privacy)
    result = run(module, inputs, plan, **run_options)
    assert result.nonfinite == 0
    agree(result, truth(gradients, plan), TOLERANCE[dtype])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3))


class Language(nn.Module):
    """A small transformer with a tied head."""

    def __init__(self, padding_idx: int | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8, padding_idx=padding_idx)
        self.places = nn.Embedding(9, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x) + self.places(torch.arange(x.shape[1]))
        return self.head(self.block(h))

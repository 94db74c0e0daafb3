"""What a model construct is: a small model, inputs with the sample first, and what must happen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpkern.base.errors import DPKernError

# All different: an axis that is taken for another one has another size.
B, T, E, HEADS, VOCABULARY = 4, 3, 8, 2, 11

Losses = Callable[[Tensor, tuple[Tensor, ...]], Tensor]


@dataclass(frozen=True)
class Refused:
    """One typed error before anything is trained; ``says`` is a part of its text."""

    error: type[DPKernError]
    says: str


@dataclass(frozen=True)
class Construct:
    """One way to write a model.

    ``model()`` makes it, always with the same random parameters (none is zero, so that no part of a
    gradient is hidden). ``inputs`` have the sample first, so ``[x[b : b + 1] for x in inputs]`` is
    the batch of sample b alone, on which every model runs too. ``losses(output, inputs)`` is the
    loss ``[B]`` of every sample.

    Args:
        name: for messages.
        build: makes the model.
        inputs: of B samples.
        expected: ``correct``, or the error.
        losses: see above.
        mixes: whether the loss or the gradient of one sample depends on another sample.
        dtype: of parameters and inputs; float32 where the model casts by itself.
        tolerance: relative to the largest entry, against the sum of one-sample gradients.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: tuple[Tensor, ...]
    expected: str | Refused = "correct"
    losses: Losses = lambda output, inputs: output.reshape(len(output), -1).square().mean(1)
    mixes: bool = False
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-10

    def model(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            made = self.build().to(self.dtype)
            with torch.no_grad():
                for parameter in made.parameters():
                    parameter.normal_(std=0.4)
        return made.train()


class Model(nn.Module):
    """``Model(forward, **parts)``: ``forward(self, *inputs)`` over modules, parameters, buffers."""

    def __init__(self, forward: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self._forward = forward
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self._forward(self, *inputs)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def draw(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def ids(*shape: int, below: int = VOCABULARY, seed: int = 1) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


def of_next_token(output: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
    """Cross entropy ``[B]`` of logits ``[B, T, V]`` against the tokens themselves, one ahead."""
    targets = inputs[0].roll(-1, dims=1)
    return F.cross_entropy(output.transpose(1, 2), targets, reduction="none").mean(1)


ROWS = (draw(B, E),)
SEQUENCE = (draw(B, T, E),)
MEMORY = (draw(B, T, E), draw(B, T + 2, E, seed=2))
IMAGE = (draw(B, E, 6, 5),)
SIGNAL = (draw(B, E, 7),)
VOLUME = (draw(B, 2, 4, 5, 3),)
TOKENS = (torch.tensor([[1, 1, 0], [2, 3, 2], [0, 0, 0], [7, 10, 7]]),)  # repeated, and padding

"""Move the weights of many runs along their gradients: plain steps, or Adam's.

Every rule acts entry by entry, so that runs that share a tensor stay what they are alone.

Source of Adam: Kingma and Ba, 2015, algorithm 1, with its usual constants.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

BETAS, SMALLEST = (0.9, 0.999), 1e-8


class WeightSteps:
    """The update rule of weights ``[R, ...]`` by name, with what it remembers.

    Args:
        weights: leaves; every one has a gradient at a step.
        lr: step size.
        optimizer: ``sgd`` or ``adam``.
    """

    def __init__(self, weights: Mapping[str, Tensor], *, lr: float, optimizer: str) -> None:
        self._weights, self._lr = weights, lr
        self.means: dict[str, Tensor] = {}
        self.squares: dict[str, Tensor] = {}
        if optimizer == "adam":
            self.means = {name: torch.zeros_like(each.detach()) for name, each in weights.items()}
            self.squares = {name: zero.clone() for name, zero in self.means.items()}

    def take(self, number: int, alive: Tensor) -> None:
        """Take step ``number``, from 1, of the runs ``alive [R]``; gradients are used up."""
        with torch.no_grad():
            for name, weight in self._weights.items():
                assert weight.grad is not None  # every parameter is used
                move = self._move(name, weight.grad, number) if self.means else weight.grad
                shape = (-1, *(1,) * (weight.dim() - 1))
                weight -= self._lr * torch.where(alive.view(shape), move, 0.0)
                weight.grad = None

    def _move(self, name: str, gradient: Tensor, number: int) -> Tensor:
        mean, square = self.means[name], self.squares[name]
        mean.lerp_(gradient, 1 - BETAS[0])
        square.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        root = (square / (1 - BETAS[1] ** number)).sqrt_().add_(SMALLEST)
        return mean / (1 - BETAS[0] ** number) / root

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return copies of what the rule remembers; empty without memory."""
        if not self.means:
            return {}
        return {
            kind: {name: each.clone() for name, each in held.items()}
            for kind, held in (("means", self.means), ("squares", self.squares))
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take over what ``state_dict`` gave for the same rule and weights."""
        for held, saved in ((self.means, "means"), (self.squares, "squares")):
            for name, each in held.items():
                each.copy_(state[saved][name])

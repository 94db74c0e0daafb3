"""Small models for the loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from tests.engine.guards.kit import World
from tests.engine.guards.records import CLASSES, FEATURES, WORDS

HIDDEN = 7  # no batch is as large


def mlp(outputs: int = CLASSES, inputs: int = FEATURES) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, outputs))


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, CLASSES))


class Between(nn.Module):
    """A network with a user's function of its activations in the middle."""

    def __init__(self, middle: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.before = nn.Linear(FEATURES, HIDDEN)
        self.after = nn.Sequential(nn.Tanh(), nn.Linear(HIDDEN, CLASSES))
        self.middle = middle
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor, *more: Any, **named: Any) -> Tensor:
        return self.after(self.middle(self, self.before(x), *more, **named))


class Reader(nn.Module):
    """A network over tokens; ``middle`` sees ids and embeddings."""

    def __init__(
        self, middle: Callable[..., Tensor] = lambda m, ids, h: h, outputs: int = CLASSES
    ) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, HIDDEN)
        self.head = nn.Linear(HIDDEN, outputs)
        self.middle = middle

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.middle(self, ids, self.table(ids)).mean(1))


class Language(nn.Module):
    """Next-token logits of a small recurrent-free language model."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, HIDDEN)
        self.mix = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, WORDS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        h = self.table(input_ids)
        return self.head(h + self.mix(h).tanh())


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def fit(
    w: World, model: nn.Module, loss: Callable[..., Tensor] = cross_entropy, **options: Any
) -> nn.Module:
    """The usual loop: one epoch of ``loss(model, *batch)``."""
    model, optimizer, loader = w.private(model, **options)
    for batch in loader:
        optimizer.zero_grad()
        loss(model, *batch).backward()
        optimizer.step()
    return model

"""Architectures whose steps are predicted by name; their parameters hold no pretrained values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .fake_step import Maker


class TransformerLayer(nn.Module):
    """A transformer layer, normed before: attention, then a hidden layer of four widths."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(self.first(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = split[0], split[1], split[2]
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(self.second(x))))
        return out


class Decoder(nn.Module):
    """A decoder of GPT-2's shape; the output layer has a weight of its own."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*(TransformerLayer(width, heads, True) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device).repeat(len(ids), 1)
        out: Tensor = self.head(self.norm(self.layers(self.token(ids) + self.position(places))))
        return out


class VisionTransformer(nn.Module):
    """A vision transformer: patches of 16 x 16, a class token, learnt positions."""

    def __init__(self, width: int, heads: int, layers: int, size: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, stride=16)
        self.position = nn.Embedding((size // 16) ** 2, width)
        self.layers = nn.Sequential(*(TransformerLayer(width, heads, False) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.patches(x).flatten(2).transpose(1, 2)
        places = torch.arange(rows.shape[1], device=rows.device).repeat(len(rows), 1)
        out: Tensor = self.head(self.norm(self.layers(rows + self.position(places))).mean(1))
        return out


class ResidualPair(nn.Module):
    """Two 3 x 3 convolutions with GroupNorm and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.first_norm = nn.GroupNorm(min(groups, outputs), outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.GroupNorm(min(groups, outputs), outputs)
        same = inputs == outputs and stride == 1
        self.shortcut: nn.Module = (
            nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(self.second_norm(self.second(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A ResNet for small images with GroupNorm: two blocks for each entry of ``channels``."""

    def __init__(self, channels: tuple[int, ...], groups: int) -> None:
        super().__init__()
        first = channels[0]
        self.stem = nn.Conv2d(3, first, 3, padding=1, bias=False)
        self.stem_norm = nn.GroupNorm(min(groups, first), first)
        blocks, inputs = [], first
        for outputs in channels:
            stride = 1 if outputs == first else 2
            blocks += [
                ResidualPair(inputs, outputs, stride, groups),
                ResidualPair(outputs, outputs, 1, groups),
            ]
            inputs = outputs
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(inputs, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks(torch.relu(self.stem_norm(self.stem(x))))
        out: Tensor = self.head(y.mean(dim=(2, 3)))
        return out


class Encoder(nn.Module):
    """A transformer encoder over tokens with learnt positions and a vocabulary-sized head.

    Each sample has a row of positions of its own, which is what other packages need, too.
    """

    def __init__(self, vocabulary: int, length: int, width: int, layers: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        made = (
            nn.TransformerEncoderLayer(
                *(width, 4, 4 * width, 0.0), activation="gelu", batch_first=True
            )
            for _ in range(layers)
        )
        self.layers, self.head = nn.Sequential(*made), nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device).repeat(len(ids), 1)
        out: Tensor = self.head(self.layers(self.token(ids) + self.position(places)))
        return out


def _mlp() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    )


def _lenet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


@dataclass(frozen=True, kw_only=True)
class NamedNetwork:
    """A model by name.

    Attributes:
        title: in words.
        build: function from the positions of a sample to the model.
        row: shape of a sample, but for positions.
        positions: usual positions of a sample of tokens; 0 where it is no sequence.
        batch: usual batch.
    """

    title: str
    build: Callable[[int], nn.Module]
    row: tuple[int, ...] = ()
    positions: int = 0
    batch: int = 32


ARCHITECTURES = {
    "gpt2-small": NamedNetwork(
        title="GPT-2 small",
        build=lambda length: Decoder(50257, max(1024, length), 768, 12, 12),
        positions=1024,
        batch=16,
    ),
    "vit-b": NamedNetwork(
        title="ViT-B/16, 224 x 224",
        build=lambda _: VisionTransformer(768, 12, 12, 224, 1000),
        row=(3, 224, 224),
        batch=64,
    ),
    "resnet18": NamedNetwork(
        title="ResNet-18 with GroupNorm, 32 x 32",
        build=lambda _: ResNet((64, 128, 256, 512), 32),
        row=(3, 32, 32),
        batch=256,
    ),
    "resnet14": NamedNetwork(
        title="ResNet-14 with GroupNorm, 32 x 32",
        build=lambda _: ResNet((16, 32, 64), 8),
        row=(3, 32, 32),
        batch=64,
    ),
    "encoder": NamedNetwork(
        title="encoder of width 128, 4 layers",
        build=lambda length: Encoder(1000, length, 128, 4),
        positions=64,
    ),
    "lenet5-relu": NamedNetwork(
        title="LeNet, 28 x 28", build=lambda _: _lenet(), row=(1, 28, 28), batch=256
    ),
    "mlp-512": NamedNetwork(
        title="MLP 784-512-512-10", build=lambda _: _mlp(), row=(784,), batch=256
    ),
}


def maker(name: str, batch: int | None = None, positions: int | None = None) -> tuple[Maker, int]:
    """Return what ``fake_step.trace`` takes of an architecture: its maker, and the batch."""
    found = ARCHITECTURES[name]
    length = found.positions if positions is None else positions

    def make() -> tuple[nn.Module, Callable[[int], Tensor]]:
        if found.positions:
            return found.build(length), lambda b: torch.zeros((b, length), dtype=torch.int64)
        return found.build(0), lambda b: torch.zeros((b, *found.row))

    return make, found.batch if batch is None else batch


__all__ = ["ARCHITECTURES", "NamedNetwork", "maker"]

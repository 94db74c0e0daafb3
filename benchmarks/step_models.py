"""The models whose whole step is measured: random inputs, float32, contiguous, SGD."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpkern.reports.networks import Decoder, Encoder, ResNet, VisionTransformer

Draw = Callable[[int, torch.Generator], tuple[Tensor, Tensor]]


class LeNet(nn.Sequential):
    """A LeNet for 28 x 28 images; ``width`` multiplies channels (6 and 16) and hidden layers."""

    def __init__(self, width: float = 1.0) -> None:
        a, b, c, d = (max(1, round(n * width)) for n in (6, 16, 120, 84))
        super().__init__(
            nn.Conv2d(1, a, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(a, b, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(25 * b, c),
            nn.ReLU(),
            nn.Linear(c, d),
            nn.ReLU(),
            nn.Linear(d, 10),
        )


class Recurrent(nn.Module):
    """A recurrent layer over a sequence and a head on its last state."""

    def __init__(self, layer: type[nn.RNNBase], inputs: int, hidden: int) -> None:
        super().__init__()
        self.layer = layer(inputs, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


class TiedDecoder(Decoder):
    """A decoder whose output layer has the weight of its token embedding."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__(vocabulary, length, width, heads, layers)
        self.head.weight = self.token.weight


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, its batch and its loss.

    Attributes:
        name: what the command line calls it.
        title: what the tables call it.
        batch: samples in a batch.
        build: makes the model, in training mode.
        draw: random inputs and targets for that many samples, from a generator.
        small: a tiny relative that runs the same code, so that what is loaded at the first call is
            loaded before memory is measured.
        fastdp: reference figure for a straightforward book-keeping engine, or None.
        refused_by: variants that do not take the model.
    """

    name: str
    title: str
    batch: int
    build: Callable[[], nn.Module]
    draw: Draw
    small: Task | None = None
    fastdp: float | None = None
    refused_by: tuple[str, ...] = ()

    def model(self) -> nn.Module:
        """Return the model, always with the same initial weights."""
        torch.manual_seed(0)
        return self.build().train()

    def data(self) -> tuple[Tensor, Tensor]:
        """Return the batch, always the same."""
        return self.draw(self.batch, torch.Generator().manual_seed(1))

    def loss(self, criterion: Any, output: Tensor, target: Tensor) -> Any:
        """Return the mean over samples; over positions too where there are any."""
        if output.dim() == 2:
            return criterion(output, target)
        flat = output.flatten(0, 1), target.flatten()
        if isinstance(criterion, nn.Module):
            return criterion(*flat)
        return criterion(*flat, shape=output.shape)  # Opacus' ghost criterion asks for the shape


def images(channels: int, size: int) -> Draw:
    """Return what draws random images of ten classes."""

    def draw(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(batch, channels, size, size, generator=generator)
        return x, torch.randint(10, (batch,), generator=generator)

    return draw


def _channels_last(draw: Draw) -> Draw:
    def drawn(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x, y = draw(batch, generator)
        return x.to(memory_format=torch.channels_last), y

    return drawn


def _resnet_channels_last(widths: tuple[int, ...], groups: int) -> nn.Module:
    return ResNet(widths, groups).to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def _vectors(width: int) -> Draw:
    def draw(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(batch, width, generator=generator)
        return x, torch.randint(10, (batch,), generator=generator)

    return draw


def _tokens(length: int) -> Draw:
    def draw(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        ids = torch.randint(1000, (2, batch, length), generator=generator)
        return ids[0], ids[1]

    return draw


def _sequences(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(batch, 64, 64, generator=generator)
    return x, torch.randint(10, (batch,), generator=generator)


def _mlp(width: int, inputs: int = 784) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 10),
    )


def _few(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(batch, 20, generator=generator)
    return x, torch.randint(2, (batch,), generator=generator)


def _short_sequences(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(batch, 8, 16, generator=generator)
    return x, torch.randint(16, (batch, 8), generator=generator)


def _tiny(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Linear(width, 2))


def _narrow(layers: int) -> nn.Sequential:
    blocks = [
        nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, activation="gelu", batch_first=True)
        for _ in range(layers)
    ]
    return nn.Sequential(nn.Linear(16, 16), *blocks, nn.Linear(16, 16))


def _encoder(width: int, layers: int) -> Encoder:
    return Encoder(1000, 64, width, layers)


# The engine collates three records or more before it hands out a batch.
_SMALL_BATCH = 4


def _with_small(task: Task, build: Callable[[], nn.Module]) -> Task:
    small = replace(task, name=f"{task.name}-small", batch=_SMALL_BATCH, build=build)
    return replace(task, small=small)


# Reference figures: FastDP's best mode, published for these models and batches on a two-core
# machine of this kind with torch 2.13, two threads, float32. They are not measured here.
FASTDP_SOURCE = "FastDP's best mode on two cores of an AMD EPYC, torch 2.13, 2 threads; not re-run"

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _with_small(
            Task(
                name="mlp",
                title="MLP 784-512-512-10, B 256",
                batch=256,
                build=lambda: _mlp(512),
                draw=_vectors(784),
                fastdp=1.77,
            ),
            lambda: _mlp(4),
        ),
        _with_small(
            Task(
                name="lenet",
                title="LeNet 28x28, B 256",
                batch=256,
                build=LeNet,
                draw=images(1, 28),
                fastdp=2.6,
            ),
            lambda: LeNet(0.2),
        ),
        _with_small(
            Task(
                name="resnet",
                title="ResNet-14 GroupNorm 32x32, B 64",
                batch=64,
                build=lambda: ResNet((16, 32, 64), 8),
                draw=images(3, 32),
                fastdp=2.6,
            ),
            lambda: ResNet((2, 4, 8), 2),
        ),
        _with_small(
            Task(
                name="resnet-last",
                title="ResNet-14 GroupNorm 32x32, channels last in memory, B 64",
                batch=64,
                refused_by=("Opacus hooks", "Opacus ghost"),  # updates off by more than their norm
                build=lambda: _resnet_channels_last((16, 32, 64), 8),
                draw=_channels_last(images(3, 32)),
            ),
            lambda: _resnet_channels_last((8, 8, 16), 4),  # torch breaks with fewer channels
        ),
        _with_small(
            Task(
                name="encoder",
                title="encoder d 128, 4 layers, T 64, B 32",
                batch=32,
                build=lambda: _encoder(128, 4),
                draw=_tokens(64),
                fastdp=1.6,
            ),
            lambda: _encoder(8, 1),
        ),
        _with_small(
            Task(
                name="resnet18",
                title="ResNet-18 GroupNorm 32x32, B 16",
                batch=16,
                build=lambda: ResNet((64, 128, 256, 512), 32),
                draw=images(3, 32),
            ),
            lambda: ResNet((2, 4, 8), 2),
        ),
        _with_small(
            Task(
                name="resnet18-half",
                title="ResNet-18 GroupNorm 32x32, half as wide, B 32",
                batch=32,
                build=lambda: ResNet((32, 64, 128, 256), 16),
                draw=images(3, 32),
            ),
            lambda: ResNet((2, 4, 8), 2),
        ),
        _with_small(
            Task(
                name="vit",
                title="ViT d 192, 6 layers, T 64, B 32",
                batch=32,
                build=lambda: VisionTransformer(192, 3, 6, 128, 10),
                draw=images(3, 128),
            ),
            lambda: VisionTransformer(8, 2, 1, 128, 10),
        ),
        _with_small(
            Task(
                name="decoder",
                title="decoder d 256, 4 layers, T 128, tied weights, B 8",
                batch=8,
                refused_by=("Opacus ghost",),  # "Parameter tying is not supported"
                build=lambda: TiedDecoder(1000, 128, 256, 4, 4),
                draw=_tokens(128),
            ),
            lambda: TiedDecoder(1000, 128, 8, 2, 1),
        ),
        _with_small(
            Task(
                name="wide",
                title="MLP 4096-4096-4096-10, B 128",
                batch=128,
                refused_by=("Opacus hooks", "torch.func"),  # 17 GB of per-sample gradients
                build=lambda: _mlp(4096, 4096),
                draw=_vectors(4096),
            ),
            lambda: _mlp(4, 4096),
        ),
        *(
            _with_small(
                Task(
                    name=name,
                    title=f"{name.upper()} 64-256, T 64, B 32",
                    batch=32,
                    build=partial(Recurrent, layer, 64, 256),
                    draw=_sequences,
                    refused_by=("torch.func",),  # torch's recurrent layers have no rule for vmap
                ),
                partial(Recurrent, layer, 64, 4),
            )
            for name, layer in (("lstm", nn.LSTM), ("gru", nn.GRU))
        ),
        _with_small(
            Task(
                name="narrow",
                title="transformer d 16, 12 layers, T 8, B 8 (148 parameters)",
                batch=8,
                build=lambda: _narrow(12),
                draw=_short_sequences,
            ),
            lambda: _narrow(1),
        ),
        _with_small(
            Task(
                name="tiny",
                title="MLP 20-32-2, B 64",
                batch=64,
                build=lambda: _tiny(32),
                draw=_few,
            ),
            lambda: _tiny(4),
        ),
    )
}

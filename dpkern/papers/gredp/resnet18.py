"""ResNet-18 with the parameter names of torchvision, its batch normalisation frozen.

The trunk before the last block is applied once to every row: nothing in it is trained, so its
outputs stand for the rows. Frozen normalisation is a fixed affine map of each channel and mixes no
samples.

Reference: He et al., 2016; GReDP, tables VI and VII.
"""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...base.errors import InvalidInput

STAGES = (64, 128, 256, 512)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Moments of the pixels that published weights were trained on, public constants."""


class FrozenNorm(nn.Module):
    """Batch normalisation with fixed moments: ``(x - mean) / sqrt(var + eps) weight + bias``."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name, value in (
            ("weight", torch.ones(channels)),
            ("bias", torch.zeros(channels)),
            ("running_mean", torch.zeros(channels)),
            ("running_var", torch.ones(channels)),
        ):
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale[:, None, None] + shift[:, None, None]


class PretrainedBlock(nn.Module):
    """Two convolutions of 3 x 3 beside a shortcut."""

    def __init__(self, entering: int, leaving: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(entering, leaving, 3, stride, 1, bias=False)
        self.bn1 = FrozenNorm(leaving)
        self.conv2 = nn.Conv2d(leaving, leaving, 3, 1, 1, bias=False)
        self.bn2 = FrozenNorm(leaving)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or entering != leaving:
            shortcut = nn.Conv2d(entering, leaving, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, FrozenNorm(leaving))

    def forward(self, x: Tensor) -> Tensor:
        kept = x if self.downsample is None else self.downsample(x)
        x = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(x)) + kept)


def _stage(entering: int, leaving: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        PretrainedBlock(entering, leaving, stride), PretrainedBlock(leaving, leaving, 1)
    )


class Trunk(nn.Module):
    """Everything before the last block, and that block: names as torchvision's ``resnet18``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, STAGES[0], 7, 2, 3, bias=False)
        self.bn1 = FrozenNorm(STAGES[0])
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = _stage(STAGES[0], STAGES[0], 1)
        self.layer2 = _stage(STAGES[0], STAGES[1], 2)
        self.layer3 = _stage(STAGES[1], STAGES[2], 2)
        self.layer4 = _stage(STAGES[2], STAGES[3], 2)

    @torch.no_grad()
    def features(self, x: Tensor, *, chunk: int = 256) -> Tensor:
        """Return the input of the last block, ``[n, 512, h, w]``, of pixels in [0, 1]."""
        mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
        found = []
        for rows in torch.split(x, chunk):
            h = torch.relu(self.bn1(self.conv1((rows - mean) / std)))
            h = self.maxpool(h)
            for stage in (self.layer1, self.layer2, self.layer3):
                h = stage(h)
            found.append(self.layer4[0](h))
        return torch.cat(found)

    def head(self, classes: int, train_last: int, seed: int) -> nn.Sequential:
        """Return the last block and a new output layer, of which ``train_last`` convolutions train.

        Args:
            classes: number of labels.
            train_last: 1 or 2.
            seed: public seed of the output layer.
        """
        block = PretrainedBlock(STAGES[-1], STAGES[-1], 1)
        block.load_state_dict(self.layer4[1].state_dict())
        block.conv1.weight.requires_grad_(train_last == 2)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            output = nn.Linear(STAGES[-1], classes)
        return nn.Sequential(block, nn.AdaptiveAvgPool2d(1), nn.Flatten(), output)


def load(path: str) -> Trunk:
    """Read weights in the layout of torchvision's ``resnet18``; the output layer is not taken.

    Raises:
        InvalidInput: no such file, a file of another kind, or weights of another network.
    """
    try:
        found: Any = torch.load(Path(path), map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise _refused(f"{path}: {error}") from error
    except (pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise _refused(f"{path}, which holds no tensors alone") from error
    if not isinstance(found, dict) or not all(isinstance(v, Tensor) for v in found.values()):
        raise _refused(f"{path}, which holds no dictionary of tensors")
    trunk = Trunk()
    ours = trunk.state_dict()
    given = {
        name: value
        for name, value in found.items()
        if not name.startswith("fc.") and not name.endswith("num_batches_tracked")
    }
    wrong = sorted(set(ours) ^ set(given)) or [
        f"{name} {tuple(given[name].shape)}"
        for name in ours
        if given[name].shape != ours[name].shape
    ]
    if wrong:
        raise _refused(f"{path}, with other names or shapes: {', '.join(wrong[:3])}, ...")
    if not all(bool(value.isfinite().all()) for value in given.values()):
        raise _refused(f"{path}, with numbers that are not finite")
    trunk.load_state_dict(given)
    return trunk.eval().requires_grad_(False)


def _refused(got: str) -> InvalidInput:
    return InvalidInput(
        "weights",
        expected="a file of the state_dict of torchvision.models.resnet18",
        got=got[:300],
        remedy="Save it with torch.save(resnet18(weights='DEFAULT').state_dict(), FILE).",
    )


__all__ = ["FrozenNorm", "Trunk", "load"]

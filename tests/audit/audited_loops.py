"""Training loops for ``dpkern audit tests/audit/audited_loops.py:name``: right ones, and others.

Each function is a script's ``main``: it takes nothing, makes everything itself and trains.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dpkern import PrivacyEngine
from dpkern.base.errors import PrivacyError
from dpkern.privacy.mechanisms import AdaClip

COLLECTED: deque[Tensor] = deque(maxlen=2)


class Noisy(Dataset[Any]):
    """Records that are augmented with random numbers of every generator."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        moved = self.x[index] + 0.1 * torch.randn(5) + 0.1 * float(np.random.rand())
        return moved, self.y[index]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 4, num_layers=2, dropout=0.5, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.unsqueeze(2))[0][:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 4)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(x.unsqueeze(2))).mean(1))


class Counting(nn.Module):
    """Writes what it saw into an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 2)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        self.seen.data += (out.detach() > 0).sum(0)
        return out


def network(p: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(p), nn.Linear(8, 2))


def records(count: int = 48) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 5, generator=torch.Generator().manual_seed(1))
    return x, (x.sum(1) > 0).long()


class Loop:
    """The parts of a private loop over 48 records."""

    def __init__(
        self, module: nn.Module | None = None, dataset: Any = None, workers: int = 0, **options: Any
    ) -> None:
        dataset = TensorDataset(*records()) if dataset is None else dataset
        self.original = DataLoader(dataset, batch_size=8, num_workers=workers)
        self.module = network() if module is None else module
        self.optimizer: Any = torch.optim.SGD(self.module.parameters(), lr=0.5)
        self.engine = PrivacyEngine()
        if "mechanism" not in options:
            options = {"noise_multiplier": 1.1, "max_grad_norm": 1.0} | options
        made = self.engine.make_private(
            module=self.module,
            optimizer=self.optimizer,
            data_loader=self.original,
            **options,
        )
        self.loader = made[2]

    def train(
        self,
        change: Callable[[Tensor], Tensor] = lambda x: x,
        after: Callable[[Tensor, Tensor], None] = lambda x, loss: None,
        loader: Any = None,
        epochs: int = 2,
    ) -> None:
        for _ in range(epochs):
            for x, y in self.loader if loader is None else loader:
                self.optimizer.zero_grad()
                loss = cross_entropy(self.module(change(x)), y)
                loss.backward()
                self.optimizer.step()
                after(x, loss.detach())


# Right loops.


def plain() -> None:
    Loop().train()


def dropout() -> None:
    Loop(network(0.4)).train()


def recurrent_dropout() -> None:
    Loop(Recurrent()).train()


def attention_dropout() -> None:
    Loop(Attention()).train()


def noise_on_the_batch() -> None:
    Loop().train(lambda x: x + 0.1 * torch.randn_like(x))


def random_records() -> None:
    Loop(dataset=Noisy(*records())).train()


def workers() -> None:
    Loop(dataset=Noisy(*records()), workers=1).train(epochs=1)


def physical_batches() -> None:
    Loop(network(0.4), max_physical_batch_size=3).train()


def exact() -> None:
    Loop(arithmetic="exact").train()


def per_layer() -> None:
    Loop(clipping="per_layer").train()


def automatic() -> None:
    Loop(clipping="automatic").train()


def fixed_size() -> None:
    Loop(network(0.4), sampling="fixed").train()


def shuffled() -> None:
    Loop(poisson_sampling=False).train()


def adaptive() -> None:
    mechanism = AdaClip(noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=8.0)
    Loop(mechanism=mechanism).train()


def keeps_losses() -> None:
    losses: list[float] = []
    Loop().train(after=lambda x, loss: losses.append(loss.item()))


def averaged_weights() -> None:
    loop = Loop()
    average = torch.optim.swa_utils.AveragedModel(network())
    loop.train(after=lambda x, loss: average.update_parameters(loop.module))


def evaluates() -> None:
    loop = Loop(network(0.4))

    def evaluate(x: Tensor, loss: Tensor) -> None:
        loop.module.eval()
        with torch.no_grad():
            loop.module(torch.ones(3, 5))
        loop.module.train()

    loop.train(after=evaluate)


def exits() -> None:
    Loop().train(epochs=1)
    sys.exit(0)


# Draws that only NumPy can tell from each other: one record shifts those of the others.


def numpy_noise() -> None:
    Loop().train(lambda x: x + torch.from_numpy(np.random.rand(len(x), 1)).float())


# Loops whose certificate is false.


def three_times() -> None:
    """Adds every clipped sum three times: nothing in the loop or the model shows it."""
    loop = Loop()
    own = loop.engine.step.add

    def add(*args: Any, **given: Any) -> None:
        for total in given["sum"].sums:
            total.mul_(3)
        own(*args, **given)

    loop.engine.step.add = add  # type: ignore[method-assign]
    loop.train()


def rate_from_losses() -> None:
    """Chooses the learning rate by the batch's loss."""
    loop = Loop()

    def choose(x: Tensor, loss: Tensor) -> None:
        loop.optimizer.param_groups[0]["lr"] = 0.1 * float(loss)

    loop.train(after=choose)


def standardised() -> None:
    Loop().train(lambda x: (x - x.mean(0)) / (x.std(0) + 1e-6))


def mixup() -> None:
    Loop().train(lambda x: 0.7 * x + 0.3 * x[torch.randperm(len(x))])


def bank() -> None:
    """Every input is compared with means of earlier batches."""
    COLLECTED.append(torch.zeros(5))
    Loop().train(lambda x: x - COLLECTED[-1], after=lambda x, loss: COLLECTED.append(x.mean(0)))


def buffer() -> None:
    Loop(Counting()).train()


def temperature() -> None:
    """A layer outside the module, with an optimizer of its own."""
    loop, scale = Loop(), nn.Linear(2, 2)
    outside = torch.optim.SGD(scale.parameters(), lr=0.5)
    for x, y in loop.loader:
        loop.optimizer.zero_grad()
        outside.zero_grad()
        cross_entropy(scale(loop.module(x)), y).backward()
        loop.optimizer.step()
        outside.step()


def original_loader() -> None:
    loop = Loop()
    loop.train(loader=loop.original)


# Loops that are refused, by the engine or by the audit.


def batch_norm() -> None:
    Loop(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))).train()


def refused_later() -> None:
    loop, count = Loop(), [0]

    def refuse(x: Tensor, loss: Tensor) -> None:
        count[0] += 1
        if count[0] == 4:
            raise RuntimeError("my trainer") from PrivacyError(
                "loop", expected="three steps", got="a fourth", remedy="Stop."
            )

    loop.train(after=refuse)


def raises() -> None:
    Loop()
    raise ValueError("mine")


def no_engine() -> None:
    pass


def no_step() -> None:
    Loop()


def no_loader() -> None:
    module = network()
    PrivacyEngine().make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=None,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=0.1,
        expected_batch_size=8.0,
    )


def from_elsewhere() -> None:
    loop = Loop()
    x, y = records(8)
    for _ in range(3):
        loop.engine.new_samples()
        loop.optimizer.zero_grad()
        cross_entropy(loop.module(loop.engine.adopt(x)), y).backward()
        loop.optimizer.step()


def two_engines() -> None:
    Loop().train(epochs=1)
    Loop().train(epochs=1)


def not_clipped() -> None:
    Loop(max_grad_norm=float("inf")).train()


def no_gradient() -> None:
    Loop(Silent()).train(epochs=1)


class Silent(nn.Module):
    """Multiplies everything it learns from by 0."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return 0 * self.body(x)


def changes_by_itself() -> None:
    generator = np.random.default_rng()
    Loop().train(lambda x: x + float(generator.normal()))


def needs_nothing(epochs: int = 1, *, rate: float = 0.1) -> None:
    Loop().train(epochs=epochs)


def needs_records(records: Tensor) -> Tensor:
    return records.sum(0)


def needs_a_keyword(*, epochs: int) -> None:
    Loop().train(epochs=epochs)

"""The programs that Opacus' users begin with, written anew: the import is changed, and they train.

Where a program cannot run as it stands, the test says what is refused, and runs the remedy.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset

from dpkern import PrivacyError
from dpkern.compat.opacus import PrivacyEngine
from dpkern.compat.opacus.layers import DPLSTM
from dpkern.compat.opacus.utils.batch_memory_manager import BatchMemoryManager
from dpkern.compat.opacus.validators import ModuleValidator

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

RECORDS, BATCH, DELTA = 256, 32, 1e-3


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def images(channels: int, size: int) -> TensorDataset:
    """Return images whose class shows in their brightness."""
    y = torch.randint(3, (RECORDS,))
    x = torch.randn(RECORDS, channels, size, size) * 0.3 + (y - 1.0).view(-1, 1, 1, 1)
    return TensorDataset(x, y)


def private(module: nn.Module, data: Any, *, lr: float = 0.5, **options: Any) -> Any:
    engine = PrivacyEngine()
    made = engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=lr),
        data_loader=DataLoader(data, batch_size=BATCH, **options),
        noise_multiplier=0.8,
        max_grad_norm=1.0,
    )
    return *made, engine


def accuracy(module: nn.Module, x: Tensor, y: Tensor) -> float:
    module.eval()
    with torch.no_grad():
        return float((module(x).argmax(1) == y).float().mean())


def assert_spent(engine: PrivacyEngine, steps: int) -> None:
    assert engine.step.steps == steps
    assert 0 < engine.get_epsilon(delta=DELTA) < 20


def test_digits_with_a_convolutional_network() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(1, 8, 5, 2, padding=2)
            self.conv2 = nn.Conv2d(8, 8, 3, 2)
            self.fc = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.max_pool2d(torch.relu(self.conv1(x)), 2, 1)
            return self.fc(torch.relu(self.conv2(x)).flatten(1))

    data = images(1, 10)
    model, optimizer, loader, engine = private(Net(), data)
    for _ in range(3):
        model.train()
        losses = []
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses
    assert accuracy(model, *data.tensors) > 0.6
    assert_spent(engine, 3 * RECORDS // BATCH)


def test_pictures_with_a_residual_network_in_small_batches() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(8, 8, 3, 1, 1), nn.Conv2d(8, 8, 3, 1, 1)
            self.norm = nn.BatchNorm2d(8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x + self.norm(self.second(torch.relu(self.first(x)))))

    plain = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), Block(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    )
    assert ModuleValidator.validate(plain, strict=False)
    model = ModuleValidator.fix(plain)
    assert not ModuleValidator.validate(model, strict=False)
    data = images(3, 8)
    model, optimizer, loader, engine = private(model, data)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
    for _ in range(3):
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=8, optimizer=optimizer
        ) as parts:
            for x, y in parts:
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
        schedule.step()
    assert accuracy(model, *data.tensors) > 0.5
    assert_spent(engine, 3 * RECORDS // BATCH)


def names(padding: int = 0) -> Any:
    """Return texts of several lengths, whose class is their first letter, and their collator."""
    first = torch.randint(1, 4, (RECORDS,))
    rest = torch.randint(4, 9, (RECORDS,))
    texts = [
        torch.cat([a.view(1), torch.randint(4, 10, (int(n),))])
        for a, n in zip(first, rest, strict=True)
    ]
    records = [(text, int(a) - 1) for text, a in zip(texts, first, strict=True)]

    def collate(batch: Any) -> tuple[Tensor, Tensor]:
        padded = pad_sequence([text for text, _ in batch], batch_first=True, padding_value=padding)
        return padded, torch.tensor([y for _, y in batch])

    return records, collate


def test_names_with_a_recurrent_network_and_hidden_states() -> None:
    class Characters(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, 8, padding_idx=0)
            self.lstm = DPLSTM(8, 16, num_layers=1, batch_first=True)
            self.out = nn.Linear(16, 3)

        def forward(self, x: Tensor, hidden: Any) -> Tensor:
            states, _ = self.lstm(self.embedding(x), hidden)
            return self.out(states[:, 0])

    records, collate = names()
    full = collate(records)[0].shape[1]

    def fixed(batch: Any) -> tuple[Tensor, Tensor]:
        x, y = collate(batch)
        return nn.functional.pad(x, (0, full - x.shape[1])), y

    model, optimizer, loader, engine = private(Characters(), records, collate_fn=fixed, lr=1.0)
    for _ in range(4):
        for x, y in loader:
            hidden = (torch.zeros(1, len(x), 16), torch.zeros(1, len(x), 16))
            optimizer.zero_grad()
            cross_entropy(model(x, hidden), y).backward()
            optimizer.step()
    x, y = fixed(records)
    hidden = (torch.zeros(1, len(x), 16), torch.zeros(1, len(x), 16))
    with torch.no_grad():
        assert float((model(x, hidden).argmax(1) == y).float().mean()) > 0.6
    assert_spent(engine, 4 * RECORDS // BATCH)


def test_reviews_with_embeddings_and_padding() -> None:
    """Padding to the longest text of a batch is refused until the caller vouches for the mask."""

    class Reviews(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, 16, padding_idx=0)
            self.out = nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            real = (x != 0).unsqueeze(-1)
            return self.out((self.embedding(x) * real).sum(1) / real.sum(1))

    records, collate = names()
    model, optimizer, loader, _ = private(Reviews(), records, collate_fn=collate)
    with pytest.raises(PrivacyError, match="masked_padding=True"):
        next(iter(loader))
    engine = PrivacyEngine()
    model = Reviews()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.1),
        data_loader=DataLoader(records, batch_size=BATCH, collate_fn=collate),
        noise_multiplier=0.8,
        max_grad_norm=1.0,
        masked_padding=True,
    )
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    assert accuracy(model, *collate(records)) > 0.6
    assert_spent(engine, 3 * RECORDS // BATCH)


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(4, 8, 4), nn.ReLU(), nn.ConvTranspose2d(8, 1, 4, 2, 1), nn.Tanh()
        )

    def forward(self, z: Tensor) -> Tensor:
        return self.main(z)


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 4), nn.Flatten(0)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.main(x)


def gan(*, fakes_are_public: bool, generator_is_public: bool) -> tuple[Any, nn.Module]:
    """Train a network of two adversaries, the discriminator privately, for one epoch."""
    from contextlib import nullcontext

    generator = Generator()
    discriminator, optimizer, loader, engine = private(Discriminator(), images(1, 8), lr=0.05)
    own = torch.optim.Adam(generator.parameters(), lr=0.01)
    criterion = nn.BCEWithLogitsLoss()
    for x, _ in loader:
        rows = len(x)
        optimizer.zero_grad(set_to_none=True)
        criterion(discriminator(x), torch.ones(rows)).backward()
        fake = generator(torch.randn(rows, 4, 1, 1))
        with engine.public() if fakes_are_public else nullcontext():
            criterion(discriminator(fake.detach()), torch.zeros(rows)).backward()
        optimizer.step()
        own.zero_grad()
        with engine.public() if generator_is_public else nullcontext():
            criterion(discriminator(fake), torch.ones(rows)).backward()
        own.step()
    return engine, generator


def test_adversarial_networks_with_fakes_in_public_passes() -> None:
    before = [p.clone() for p in Generator().parameters()]
    torch.manual_seed(0)
    engine, generator = gan(fakes_are_public=True, generator_is_public=True)
    after = list(generator.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert_spent(engine, RECORDS // BATCH)
    notes = str(engine.report(DELTA)["certificate"])
    assert "passes under engine.public() used no private data" in notes


@pytest.mark.parametrize("public", [False, True])
def test_fakes_in_ordinary_passes_are_refused_with_the_remedy(public: bool) -> None:
    with pytest.raises(PrivacyError) as caught:
        gan(fakes_are_public=public, generator_is_public=False)
    assert "engine.public()" in str(caught.value)
    assert "GAN" in str(caught.value)
    assert "accumulate" not in str(caught.value)

"""Handwritten digits with a small CNN: an ordinary PyTorch loop and one call to ``make_private``.

The engine finds the noise for the epsilon asked for, draws Poisson batches through the loader it
returns, and clips and noises inside ``optimizer.step()``. The loop itself does not change.

Run: python examples/image_cnn.py [--epsilon 3] [--epochs 20] [--batch-size 125] [--quick]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpkern
from dpkern.accounting import shown_bound

DELTA = 1e-5


def digits() -> tuple[TensorDataset, Tensor, Tensor]:
    """Training rows, held-out images and held-out labels; scale and split are public constants."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, held_out = order[:1500], order[1500:]
    return TensorDataset(x[train], y[train]), x[held_out], y[held_out]


def cnn() -> nn.Module:
    """Two convolutions; GroupNorm where others write BatchNorm, which would mix the samples."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.GroupNorm(4, 32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train, print and return epsilon and held-out accuracy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=125)
    parser.add_argument("--quick", action="store_true", help="a few seconds")
    options = parser.parse_args(argv)
    if options.quick:
        options.epochs = 8

    torch.manual_seed(0)  # the public initial weights; the noise has a secret key of its own
    train, x, y = digits()
    model = cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(train, batch_size=options.batch_size)

    engine = dpkern.PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        target_epsilon=options.epsilon,
        target_delta=DELTA,
        epochs=options.epochs,
        max_grad_norm=1.0,
    )

    criterion = nn.CrossEntropyLoss()
    for _ in range(options.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            criterion(model(images), labels).backward()
            optimizer.step()

    model.eval()
    with torch.no_grad():
        accuracy = (model(x).argmax(1) == y).float().mean().item()
    epsilon = engine.get_epsilon(DELTA)
    print(f"epsilon {shown_bound(epsilon)} at delta {DELTA}, held-out accuracy {accuracy:.3f}")
    return {"epsilon": epsilon, "accuracy": accuracy}


if __name__ == "__main__":
    main()

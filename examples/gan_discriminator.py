"""A small DCGAN on digits. Only the discriminator sees real images, so only it is private.

Fakes say nothing about the records that the discriminator has not released already: its passes
over them, and the generator's step, run under ``engine.public()``. Their gradients are neither
clipped nor noised, and cost no privacy.

Run: python examples/gan_discriminator.py [--noise-multiplier 1] [--epochs 40] [--quick]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset

import dpkern
from dpkern.accounting import shown_bound

LATENT, DELTA = 16, 1e-5


def discriminator() -> nn.Module:
    """Strided convolutions to one logit: positive for real images."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.GroupNorm(4, 32),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(128, 1),
    )


def generator() -> nn.Module:
    """Transposed convolutions from a latent vector to an 8 x 8 image in [0, 1].

    Not private itself, so it may use BatchNorm.
    """
    return nn.Sequential(
        nn.Linear(LATENT, 128),
        nn.Unflatten(1, (32, 2, 2)),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 1, 4, stride=2, padding=1),
        nn.Sigmoid(),
    )


def distance(make: nn.Module, real: Tensor) -> float:
    """Root mean square difference of the mean images, fakes against real ones."""
    with torch.no_grad():
        fakes = make(torch.randn(len(real), LATENT))
    return (fakes.mean(0) - real.mean(0)).square().mean().sqrt().item()


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train, print and return epsilon and the distance to held-out digits before and after."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--noise-multiplier", type=float, default=1.0)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=125)
    parser.add_argument("--quick", action="store_true", help="a few seconds")
    options = parser.parse_args(argv)
    if options.quick:
        options.epochs = 10

    torch.manual_seed(0)
    images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 16
    images = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))]
    train, held_out = TensorDataset(images[:1500]), images[1500:]
    judge, make = discriminator(), generator()
    make_optimizer = torch.optim.Adam(make.parameters(), lr=2e-3, betas=(0.5, 0.99))
    judge_optimizer = torch.optim.Adam(judge.parameters(), lr=2e-3, betas=(0.5, 0.99))
    loader = DataLoader(train, batch_size=options.batch_size)
    before = distance(make, held_out)

    engine = dpkern.PrivacyEngine()
    judge, judge_optimizer, loader = engine.make_private(
        module=judge,
        optimizer=judge_optimizer,
        data_loader=loader,
        noise_multiplier=options.noise_multiplier,
        max_grad_norm=1.0,
    )
    for _ in range(options.epochs):
        for (real,) in loader:
            judge_optimizer.zero_grad()
            softplus(-judge(real)).mean().backward()
            with engine.public():
                fakes = make(torch.randn(options.batch_size, LATENT))
                softplus(judge(fakes.detach())).mean().backward()
            judge_optimizer.step()

            make_optimizer.zero_grad()
            with engine.public():
                # Gradients for the generator alone: the discriminator is only looked through.
                softplus(-judge(fakes)).mean().backward(inputs=list(make.parameters()))
            make_optimizer.step()

    after, epsilon = distance(make, held_out), engine.get_epsilon(DELTA)
    print(
        f"epsilon {shown_bound(epsilon)} at delta {DELTA}; distance of the mean image of fakes "
        "to that of"
    )
    print(f"held-out digits {before:.3f} before, {after:.3f} after")
    return {"epsilon": epsilon, "before": before, "after": after}


if __name__ == "__main__":
    main()

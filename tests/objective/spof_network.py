"""A small autoencoder with everything that SPOF's formulas speak of."""

from __future__ import annotations

from functools import partial

import torch

from dpkern.privacy.theory import environment

REAL = torch.float64
N, CODES = 14, 7


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def real(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=REAL)


class Network:
    """A user's record, encoder and decoder block, with and without environmental noise."""

    def __init__(self, *, users: int = 5, sigma: float = 1.0) -> None:
        normal = partial(torch.randn, generator=seeded(3), dtype=REAL)
        self.x = torch.rand(users, N, generator=seeded(4), dtype=REAL)
        self.encoder, self.decoder = normal(N, CODES), normal(CODES, N)
        self.noise = sigma * normal(users, N)
        self.hidden = torch.sigmoid(self.x @ self.encoder)
        self.z = self.hidden @ self.decoder
        self.noisy_hidden = torch.sigmoid((self.x + self.noise) @ self.encoder)
        self.noisy_z = self.noisy_hidden @ self.decoder
        self.b = environment.multipliers(self.hidden, self.noise @ self.encoder)
        self.total = self.b.sum(-1)
        self.offset = environment.offset(self.hidden, self.b, self.decoder)

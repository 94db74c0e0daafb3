"""Next-character prediction with a small transformer; the protected unit is one line of text.

The model uses what PyTorch users use: ``nn.TransformerEncoderLayer`` with a causal mask, positions
as a bare parameter, and an output layer tied to the embedding, whose two uses are combined for each
line before the clip.

Run: python examples/text_transformer.py [--epsilon 8] [--epochs 20] [--batch-size 150] [--quick]
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import dpkern
from dpkern.accounting import shown_bound

LENGTH, WIDTH, DELTA = 26, 32, 1e-5
ALPHABET = " abcdefghijklmnopqrstuvwxyz.$"
NAMES, VERBS, THINGS = ("anna", "bert", "cleo"), ("sees", "finds", "sells"), ("tea", "ink", "salt")


def lines(count: int, seed: int) -> Tensor:
    """Made-up sentences as character numbers ``[count, LENGTH]``, padded with ``$``."""
    choose = random.Random(seed).choice
    rows = []
    for _ in range(count):
        text = f"{choose(NAMES)} {choose(VERBS)} {choose(THINGS)} and {choose(THINGS)}."
        rows.append([ALPHABET.index(c) for c in text.ljust(LENGTH, "$")[:LENGTH]])
    return torch.tensor(rows)


class Predictor(nn.Module):
    """A causal transformer with tied input and output embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(ALPHABET), WIDTH)
        nn.init.normal_(self.embed.weight, std=WIDTH**-0.5)
        self.positions = nn.Parameter(torch.zeros(LENGTH - 1, WIDTH))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 64, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH - 1)
        self.register_buffer("mask", mask)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids) * math.sqrt(WIDTH) + self.positions
        for layer in self.layers:
            h = layer(h, src_mask=self.mask, is_causal=True)
        return functional.linear(h, self.embed.weight)


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train, print and return epsilon, held-out accuracy and that of always guessing one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=150)
    parser.add_argument("--quick", action="store_true", help="a few seconds")
    options = parser.parse_args(argv)
    if options.quick:
        options.epochs = 5

    torch.manual_seed(0)
    train, held_out = lines(1500, seed=1), lines(300, seed=2)
    model = Predictor()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(train), batch_size=options.batch_size)

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

    for _ in range(options.epochs):
        for (ids,) in loader:
            optimizer.zero_grad()
            logits = model(ids[:, :-1])
            functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimizer.step()

    model.eval()
    with torch.no_grad():
        guesses = model(held_out[:, :-1]).argmax(-1)
    targets = held_out[:, 1:]
    real = targets != ALPHABET.index("$")
    accuracy = (guesses == targets)[real].float().mean().item()
    constant = targets[real].bincount().max().item() / int(real.sum())
    epsilon = engine.get_epsilon(DELTA)
    print(f"epsilon {shown_bound(epsilon)} at delta {DELTA}, held-out next-character accuracy")
    print(f"{accuracy:.3f}; always the most frequent character: {constant:.3f}")
    return {"epsilon": epsilon, "accuracy": accuracy, "constant": constant}


if __name__ == "__main__":
    main()

"""Private LoRA: a small GPT learns public sentences, then adapters learn private ones.

The base is written as Hugging Face's GPT-2 is, with ``Conv1D`` layers (weights stored as
[inputs, outputs]). It is trained in the clear on public text and then frozen; only the low-rank
adapters, bare parameters used with ``@``, are given to the optimizer and trained privately.

Run: python examples/lora_finetune.py [--noise-multiplier 1] [--epochs 20] [--quick]
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import dpkern
from dpkern.accounting import shown_bound

LENGTH, WIDTH, RANK, DELTA = 25, 32, 4, 1e-5
ALPHABET = " abcdefghijklmnopqrstuvwxyz.$"
PUBLIC = (("the cat", "a dog", "my bird"), ("eats", "likes", "wants"), ("fish", "corn", "bread"))
PRIVATE = (("ward one", "dr grey"), ("treats", "admits"), ("mr bell", "ms hart"))


def lines(words: tuple[tuple[str, ...], ...], count: int, seed: int) -> Tensor:
    """Made-up sentences as character numbers ``[count, LENGTH]``, padded with ``$``."""
    choose = random.Random(seed).choice
    texts = (" ".join(choose(group) for group in words) + "." for _ in range(count))
    return torch.tensor([[ALPHABET.index(c) for c in t.ljust(LENGTH, "$")[:LENGTH]] for t in texts])


class Conv1D(nn.Module):
    """GPT-2's linear layer, with an optional adapter: x W + b + x A B."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * inputs**-0.5)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def adapt(self, rank: int) -> None:
        """Freeze the layer and add an adapter that starts at zero."""
        self.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(self.weight.shape[0], rank) * 0.2)
        self.up = nn.Parameter(torch.zeros(rank, self.weight.shape[1]))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        y = flat.view(*x.shape[:-1], -1)
        return y + x @ self.down @ self.up if hasattr(self, "down") else y


class Block(nn.Module):
    """Pre-norm causal attention and a two-layer perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = Conv1D(WIDTH, 3 * WIDTH), Conv1D(WIDTH, WIDTH)
        self.c_fc, self.c_out = Conv1D(WIDTH, 2 * WIDTH), Conv1D(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.c_attn(self.ln_1(x)).unflatten(-1, (3, 2, WIDTH // 2))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.c_out(functional.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    """Token and position embeddings, two blocks, output tied to the token embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(len(ALPHABET), WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.Sequential(Block(), Block())
        self.ln_f = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.h(self.wte(ids) + self.wpe(torch.arange(ids.shape[1])))
        return functional.linear(self.ln_f(x), self.wte.weight * WIDTH**-0.5)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Mean cross-entropy of the next character."""
    return functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def accuracy_of(model: nn.Module, ids: Tensor) -> float:
    """Share of the characters (not of the padding) that are guessed right."""
    with torch.no_grad():
        right = model(ids[:, :-1]).argmax(-1) == ids[:, 1:]
    return right[ids[:, 1:] != ALPHABET.index("$")].float().mean().item()


def pretrain(model: nn.Module, steps: int) -> None:
    """Ordinary training on the public sentences."""
    ids = lines(PUBLIC, 2000, seed=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, ids[step * 64 % 1920 :][:64]).backward()
        optimizer.step()
    optimizer.zero_grad()  # frozen weights keep no gradient


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Pre-train, fine-tune privately; print and return epsilon, accuracy before and after."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--noise-multiplier", type=float, default=1.0)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=150)
    parser.add_argument("--quick", action="store_true", help="a few seconds")
    options = parser.parse_args(argv)
    if options.quick:
        options.epochs = 6

    torch.manual_seed(0)
    model = GPT()
    pretrain(model, steps=80 if options.quick else 300)
    model.requires_grad_(False)
    for module in list(model.modules()):
        if isinstance(module, Conv1D):
            module.adapt(RANK)
    held_out = lines(PRIVATE, 200, seed=3)
    before = accuracy_of(model, held_out)

    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(adapters, lr=1e-2)
    loader = DataLoader(TensorDataset(lines(PRIVATE, 1500, seed=2)), batch_size=options.batch_size)
    engine = dpkern.PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=options.noise_multiplier,
        max_grad_norm=0.5,
    )
    for _ in range(options.epochs):
        for (ids,) in loader:
            optimizer.zero_grad()
            loss_of(model, ids).backward()
            optimizer.step()

    accuracy, epsilon = accuracy_of(model, held_out), engine.get_epsilon(DELTA)
    share = sum(p.numel() for p in adapters) / sum(p.numel() for p in model.parameters())
    print(f"{share:.1%} of the parameters trained; epsilon {shown_bound(epsilon)} at delta {DELTA}")
    print(f"held-out next-character accuracy {before:.3f} before, {accuracy:.3f} after")
    return {"epsilon": epsilon, "accuracy": accuracy, "before": before}


if __name__ == "__main__":
    main()

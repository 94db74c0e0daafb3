"""Training loops that are run twice, replayed and recorded, and must give the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import dpkern

STEPS = 9
"""Three are recorded at least before a change in the middle."""


class Net(nn.Module):
    """Linear, normalisation, convolution and embedding; branches that a test may switch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.first = nn.Linear(5, 6)
        self.norm = nn.LayerNorm(6)
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.groups = nn.GroupNorm(2, 4)
        self.extra = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)
        self.skips = self.twice = self.again = self.edits = self.moves = False

    def forward(self, x: Tensor) -> Tensor:
        ids = (x[..., 0].abs() * 3).long() % 11
        y = self.first(x) + self.table(ids)
        if self.moves:
            for weight in (self.conv.weight, self.extra.weight, self.head.bias):
                weight.data = weight.data.clamp(-0.1, 0.1)
        y = F.relu(self.groups(self.conv(self.norm(y))))
        if not self.skips:
            y = y + (
                checkpoint(self.extra, y, use_reentrant=False) if self.again else self.extra(y)
            )
        if self.twice:
            y = self.first(F.pad(y, (0, -1)))
        if self.edits:
            y = y * 2
            y.mul_(0.5)
        return self.head(y).mean(1)


@dataclass
class Loop:
    """One training run, and what a test may change in it."""

    replayed: bool
    module: Any
    optimizer: Any
    loader: Any
    engine: Any
    losses: int = 1
    retains: bool = False
    between: Callable[[], None] = lambda: None
    reasons: list[str] = field(default_factory=list)

    @property
    def replays(self) -> int:
        """How many steps were replayed so far."""
        count: int = self.engine.capture.program.replays
        return count

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches without an end."""
        while True:
            yield from self.loader

    def train(self, steps: int, change: Callable[[Loop], None] | None = None, at: int = 5) -> None:
        """Take steps; before number ``at`` something changes."""
        batches = self.batches()
        for step in range(steps):
            if change is not None and step == at:
                change(self)
            self.one(*next(batches))

    def one(self, x: Tensor, y: Tensor) -> None:
        """One batch."""
        self.optimizer.zero_grad()
        output = self.module(x)
        for number in range(self.losses):
            last = number == self.losses - 1
            loss = F.cross_entropy(output, y) * (1 if number == 0 else 0.5)
            loss.backward(retain_graph=self.retains or not last)
        self.between()
        self.optimizer.step()
        self.reasons.append(self.engine.capture.program.reason)

    @property
    def weights(self) -> list[Tensor]:
        """Copies of all parameters."""
        with torch._C.DisableTorchFunctionSubclass():
            return [p.detach().clone() for p in self.module.parameters()]


def loop(replayed: bool, make: Callable[[], nn.Module] = Net, **options: Any) -> Loop:
    """A run that has begun; the seed is the same whether it replays or records."""
    torch.manual_seed(3)
    net = make()
    rows, length = options.pop("rows", 64), options.pop("length", 4)
    data = TensorDataset(torch.randn(rows, length, 5), torch.randint(3, (rows,)))
    if options.pop("nan", False):
        data.tensors[0][7] = float("nan")
    optimizer = options.pop("optimizer", None) or torch.optim.SGD
    numbers = options.pop("numbers", {"lr": 0.1, "momentum": 0.9})
    groups = options.pop("groups", None)
    params: Any = net.parameters() if groups is None else groups(net)
    engine = dpkern.PrivacyEngine()
    batch = options.pop("batch", 8)
    numbers_of_noise = {"noise_multiplier": 0.5, "max_grad_norm": 1.0}
    mechanism = options.pop("mechanism", None)
    if mechanism is not None:
        sites = dpkern.survey(net, data.tensors[0][:2])
        numbers_of_noise = {"mechanism": mechanism(sites=sites, **numbers_of_noise)}
    options = {**numbers_of_noise, "sampling": "fixed"} | options
    made = engine.make_private(
        module=net,
        optimizer=optimizer(params, **numbers),
        data_loader=DataLoader(data, batch_size=batch),
        unsafe_seed=5,
        **options,
    )
    engine.capture.guard._occasions.gap = 1 << 60
    engine.capture.program.enabled = replayed
    return Loop(replayed, *made, engine)


def both(
    change: Callable[[Loop], None] | None = None,
    *,
    at: int = 5,
    steps: int = STEPS,
    replays: bool = True,
    **options: Any,
) -> Loop:
    """Train with replay and without: the same bits; replayed before a change in the middle.

    Returns:
        The run with replay.
    """
    runs = []
    for replayed in (True, False):
        run = loop(replayed, **options)
        before: list[int] = []

        def changed(run: Loop, before: list[int] = before) -> None:
            before.append(run.replays)
            assert change is not None
            change(run)

        run.train(steps, changed if change is not None else None, at)
        assert bool((before or [run.replays])[0]) is (replayed and replays), run.reasons
        runs.append(run)
    for name, one, other in zip(
        dict(runs[0].module.named_parameters()), runs[0].weights, runs[1].weights, strict=True
    ):
        assert torch.equal(one, other), name
    assert runs[0].engine.get_epsilon(1e-5) == runs[1].engine.get_epsilon(1e-5)
    return runs[0]

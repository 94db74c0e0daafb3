"""Batches whose pass is made again in smaller pieces, as loops do when memory was short."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import dpkern
from dpkern.errors import PrivacyError

Pass = Callable[[nn.Module, Tensor, Tensor], Tensor]


def loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module(x), y)


def in_pieces(module: nn.Module, x: Tensor, y: Tensor) -> None:
    for rows in range(0, len(x), 4):
        loss(module, x[rows : rows + 4], y[rows : rows + 4]).backward()


def whole(module: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    loss(module, x, y).backward()


def after_a_forward_pass(module: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    module(x)
    in_pieces(module, x, y)


def after_a_backward_pass(module: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    loss(module, x, y).backward()
    optimizer.zero_grad()
    in_pieces(module, x, y)


def second_half_again(module: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    for rows in (slice(0, 8), slice(8, 16)):
        loss(module, x[rows], y[rows]).backward()
    optimizer.zero_grad()  # the first half is clipped already, and stays
    in_pieces(module, x[8:], y[8:])


def cut_elsewhere(module: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    loss(module, x[:8], y[:8]).backward()
    optimizer.zero_grad()
    for rows in (slice(4, 12), slice(0, 4), slice(12, 16)):
        loss(module, x[rows], y[rows]).backward()


def without_clearing(module: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    loss(module, x, y).backward()
    in_pieces(module, x, y)


def first_half_twice(module: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    for rows in (slice(0, 8), slice(8, 16)):
        loss(module, x[rows], y[rows]).backward()
    optimizer.zero_grad()
    in_pieces(module, x, y)


def late_gradients(module: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    forgotten = loss(module, x, y)
    in_pieces(module, x, y)
    forgotten.backward()


def late_gradients_alone(module: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    forgotten = loss(module, x, y)
    module(x[:4])
    forgotten.backward()


def queued(module: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    module(x[:8])  # as if it had failed
    loss(module, x[8:], y[8:]).backward()
    in_pieces(module, x[:8], y[:8])


def dropped(engine: dpkern.PrivacyEngine, module: nn.Module, x: Tensor, y: Tensor) -> None:
    loss(module, x[:8], y[:8]).backward()
    loss(module, x[8:], y[8:]).backward()
    engine.drop()
    in_pieces(module, x, y)


def dropped_and_whole(
    engine: dpkern.PrivacyEngine, module: nn.Module, x: Tensor, y: Tensor
) -> None:
    loss(module, x[:8], y[:8]).backward()
    engine.drop()
    loss(module, x, y).backward()


def dropped_and_half(engine: dpkern.PrivacyEngine, module: nn.Module, x: Tensor, y: Tensor) -> None:
    loss(module, x, y).backward()
    engine.drop()
    loss(module, x[:8], y[:8]).backward()


def dropped_and_late(engine: dpkern.PrivacyEngine, module: nn.Module, x: Tensor, y: Tensor) -> None:
    forgotten = loss(module, x[:8], y[:8])
    engine.drop()
    forgotten.backward()


def only_the_second_half(module: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    loss(module, x[:8], y[:8]).backward()
    optimizer.zero_grad()
    loss(module, x[8:], y[8:]).backward()


def last_piece_without_gradients(module: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    loss(module, x[:12], y[:12]).backward()
    module(x[12:])


def after_values_chose_rows(module: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    out = module(x)
    F.cross_entropy(out[y == 1], y[y == 1]).detach()
    optimizer.zero_grad()
    loss(module, x[:4], y[:4]).backward()


def only_one_piece(module: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    loss(module, x, y).backward()
    optimizer.zero_grad()
    loss(module, x[:4], y[:4]).backward()


class Checkpointed(nn.Module):
    """Two layers that run again in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.front, self.inner, self.reentrant = nn.Linear(6, 8), nn.Linear(8, 3), reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = self.front(x)
        made: Tensor = checkpoint(
            lambda h: self.inner(torch.tanh(h)), h, use_reentrant=self.reentrant
        )
        return made


class Inside(nn.Module):
    """All layers run again; nothing of the engine's is in the graph outside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = plain()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(self.layers, x.detach().requires_grad_(), use_reentrant=True)
        return made


MADE: dict[str, Callable[[], nn.Module]] = {
    "reentrant": lambda: Checkpointed(True),
    "not reentrant": lambda: Checkpointed(False),
    "all inside": Inside,
}


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def trained(
    loop: Callable[..., None],
    make: Callable[[], nn.Module] = plain,
    *,
    then: Callable[..., None] = whole,
    **options: Any,
) -> Tensor:
    """Parameters after a step each of batches that pass whole, but for the third one, which
    ``loop`` takes, and the last."""
    torch.manual_seed(0)
    module, engine = make().double(), dpkern.PrivacyEngine()
    data = TensorDataset(torch.randn(64, 6).double(), torch.randint(0, 3, (64,)))
    module, optimizer, loader = engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
        data_loader=DataLoader(data, batch_size=16),
        noise_multiplier=0.3,
        max_grad_norm=0.5,
        unsafe_seed=1,
        sampling="fixed",
        **options,
    )
    for step, (x, y) in enumerate(loader):
        if step == 2 and loop.__name__.startswith("dropped"):
            loop(engine, module, x, y)
        else:
            {2: loop, 3: then}.get(step, whole)(module, optimizer, x, y)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in module.parameters()])


AGAIN = (
    *(after_a_forward_pass, after_a_backward_pass, second_half_again, cut_elsewhere, queued),
    *(dropped, dropped_and_whole),
)
TWICE = "pieces of a batch without common records"
REFUSED = {
    without_clearing: TWICE,
    first_half_twice: TWICE,
    after_values_chose_rows: TWICE,
    late_gradients: "a backward pass of an earlier piece",
    late_gradients_alone: "a backward pass of an earlier piece",
    only_one_piece: "got those of 4 of 16",
    only_the_second_half: "got those of 8 of 16",
    last_piece_without_gradients: "got those of 12 of 16",
    dropped_and_half: "got those of 8 of 16",
    dropped_and_late: "a backward pass of other samples",
}


@pytest.mark.parametrize("arithmetic", ["exact", "float"])
@pytest.mark.parametrize("loop", AGAIN, ids=lambda loop: loop.__name__)
def test_every_record_counts_once(loop: Callable[..., None], arithmetic: str) -> None:
    expected = trained(whole, arithmetic=arithmetic)
    assert torch.allclose(trained(loop, arithmetic=arithmetic), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("loop", REFUSED, ids=lambda loop: loop.__name__)
def test_records_that_would_count_twice_or_not_at_all_are_refused(
    loop: Callable[..., None],
) -> None:
    with pytest.raises(PrivacyError, match=REFUSED[loop]):
        trained(loop)


def shifted(module: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    first = loss(module, x[:8], y[:8])
    loss(module, x[4:12], y[4:12]).backward()
    first.backward()


def added(module: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    (loss(module, x[:8], y[:8]) + loss(module, x[4:12], y[4:12])).backward()


def failed_and_late(module: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    first = loss(module, x[:8], y[:8])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        module(x[4:12, :5])  # its records have entered, and nothing has come out
    first.backward()


def first_half_again(module: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    first = loss(module, x[:8], y[:8])
    first.backward(retain_graph=True)
    loss(module, x[8:], y[8:]).backward()
    first.backward()


@pytest.mark.parametrize("arithmetic", ["exact", "float"])
@pytest.mark.parametrize("model", MADE)
@pytest.mark.parametrize(
    "loop", [shifted, added, first_half_again, late_gradients, dropped_and_late, failed_and_late]
)
def test_segments_that_run_again_are_of_the_current_piece(
    loop: Callable[..., None], model: str, arithmetic: str
) -> None:
    """Their uses are made in the backward pass, of whichever piece: only the loss tells."""
    with pytest.raises(PrivacyError, match=r"a backward pass of (an earlier piece|other samples)"):
        trained(loop, MADE[model], arithmetic=arithmetic)


@pytest.mark.parametrize("model", MADE)
@pytest.mark.parametrize("loop", AGAIN, ids=lambda loop: loop.__name__)
def test_checkpointed_segments_count_once(loop: Callable[..., None], model: str) -> None:
    usual = trained(whole, MADE[model])
    assert torch.allclose(trained(loop, MADE[model]), usual, rtol=0, atol=1e-5)


@pytest.mark.parametrize("model", MADE)
@pytest.mark.parametrize("order", ["first", "last"])
def test_a_loss_of_the_batch_before_is_refused(model: str, order: str) -> None:
    kept: list[Tensor] = []

    def keep(module: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        kept.append(loss(module, x, y))
        kept[-1].backward(retain_graph=True)

    def send_again(module: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        now = loss(module, x, y)
        for each in (kept[0], now) if order == "first" else (now, kept[0]):
            each.backward()

    with pytest.raises(PrivacyError, match=r"a backward pass of (an earlier piece|other samples)"):
        trained(keep, MADE[model], then=send_again)
    assert len(kept) == 1

"""The forward-difference probe on large batches: what runs on part of them, and what does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpkern.base.errors import UnsupportedModule
from dpkern.engine import difference
from dpkern.engine.capture import Capture

B, E, PART = 128, 6, 16


class Model(nn.Module):
    """Two layers with a function between them."""

    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(E, E), nn.Linear(E, 3)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.middle(self.first(x)))
        return output


def rows() -> Tensor:
    return torch.randn(B, E, generator=torch.Generator().manual_seed(1))


def passes(module: nn.Module, *, secret: bool = False) -> Capture:
    """A capture after one pass, and another one at a secret time."""
    capture = Capture(module)
    capture.attach()
    try:
        capture.new_samples()
        module(rows())
        if secret:
            capture.guard._occasions.gap = 1
            capture.new_samples()
            module(rows())
    finally:
        capture.detach()
    return capture


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of samples in the passes of probes."""
    found: list[int] = []
    original = difference.DifferenceProbe._pass

    def noted(self: Any, arguments: Any, *more: Any) -> Any:
        found.append(len(arguments[0][0]))
        return original(self, arguments, *more)

    monkeypatch.setattr(difference.DifferenceProbe, "_pass", noted)
    return found


def test_the_second_replacement_runs_on_part_of_the_batch(sizes: list[int]) -> None:
    passes(Model(nn.functional.softsign))
    # The pass itself is the one with nothing replaced, also for the part.
    assert sizes == [B, PART, 1, 4]


class Counts(Model):
    """Counts its passes."""

    def forward(self, x: Tensor) -> Tensor:
        self.passes = getattr(self, "passes", 0) + 1
        return super().forward(x)


class Turned(Model):
    """Returns samples in the second dimension, which a part has fewer of."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).t()


class Both(Model):
    """Returns the same rows twice, once without those of any sample."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x), self.last.bias * 1


@pytest.mark.parametrize("kind", [Counts, Turned, Both])
def test_the_part_runs_alone_where_the_whole_batch_does_not_show_its_rows(
    kind: type[Model], sizes: list[int]
) -> None:
    passes(kind(torch.tanh))
    assert sizes.count(PART) >= 2


def test_the_part_runs_alone_where_its_rows_come_out_otherwise(sizes: list[int]) -> None:
    """Random numbers differ with the size; samples do not mix."""
    passes(Model(lambda h: h + torch.randn(len(h), E)))
    assert sizes == [B, PART, PART, 1, B, 4, 1, B, 4]


def test_what_few_samples_change_is_looked_into(sizes: list[int]) -> None:
    with pytest.raises(UnsupportedModule, match="of another size"):
        passes(Model(lambda h: h * len(h)))
    assert sizes[:6] == [B, PART, PART, 1, 1, 1]
    sizes.clear()
    with pytest.raises(UnsupportedModule, match="not finite"):
        passes(Model(spoiled))
    assert sizes[:5] == [B, PART, 1, 4, 4]


@pytest.mark.parametrize("least", [2, 3])
def test_a_size_below_which_all_is_the_same_is_found(least: int) -> None:
    with pytest.raises(UnsupportedModule, match="of another size"):
        passes(Model(lambda h: h / max(len(h), least)))


@pytest.mark.parametrize("batch", [2, 3, 4, 5, 8])
def test_a_size_that_scales_is_found_in_small_batches(batch: int) -> None:
    model = Model(lambda h: h / len(h))
    capture = Capture(model)
    capture.attach()
    try:
        capture.new_samples()
        with pytest.raises(UnsupportedModule, match="of another size"):
            model(rows()[:batch])
    finally:
        capture.detach()


def spoiled(h: Tensor) -> Tensor:
    """One sample that is not finite spoils the rows of all."""
    return h if h.detach().isfinite().all() else h * float("nan")


def capacity(h: Tensor) -> Tensor:
    """Only so many rows pass, whatever the size of the batch."""
    keep = torch.zeros(len(h), 1)
    keep[h[:, 0].detach().topk(min(40, len(h))).indices] = 1
    return h * keep


@torch.no_grad()
def large_only(h: Tensor) -> Tensor:
    return h - h.mean(0) if len(h) > 64 else h


def whole_only(h: Tensor) -> Tensor:
    """Runs on one size only; a first half of large rows shifts all others."""
    return h.view(B, E) + (h[: B // 2].detach().abs().amax(1) > 50).all()


def first_come(h: Tensor) -> Tensor:
    """Whoever comes first takes the place of the others."""
    taken = (h[:, :1].detach() < -100).cumsum(0) > 4
    return torch.where(taken, torch.zeros_like(h), h)


@pytest.mark.parametrize("middle", [capacity, large_only, whole_only, first_come])
def test_mixing_that_needs_a_size_or_a_place_is_found(middle: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(UnsupportedModule):
        passes(Model(middle))


@pytest.mark.parametrize("whole", [0.0, 1.0])
def test_secret_probes_run_on_the_whole_batch_or_on_part(
    whole: float, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(difference, "WHOLE", whole)
    passes(Model(nn.functional.softsign), secret=True)
    assert sizes[4:] == ([B, B] if whole else [PART, PART])


class Writes(nn.Module):
    """Writes what it saw into a trained parameter, past its version."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.layer, self.share = nn.Linear(E, 3), share

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        with torch.no_grad():
            self.layer.bias.data += self.share * output.detach().mean(0)
        return output


def test_a_write_past_the_version_of_a_trained_parameter_is_found() -> None:
    module = Writes(0.1)
    before = module.layer.bias.detach().clone()
    with pytest.raises(UnsupportedModule, match=r"layer\.bias"):
        passes(module)
    # The pass itself has run, once, and the probe has left nothing.
    with torch.no_grad():
        layer = nn.Linear(E, 3)
        layer.load_state_dict({"weight": module.layer.weight.detach(), "bias": before})
        expected = before + 0.1 * layer(rows()).mean(0)
    torch.testing.assert_close(module.layer.bias.detach(), expected)

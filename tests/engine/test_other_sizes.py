"""Modules whose outputs go by the number of samples are found at the first size that shows it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Dirichlet
from torch.utils.data import DataLoader, TensorDataset

from dpkern import PrivacyEngine
from dpkern.base.errors import UnsupportedModule
from dpkern.engine.capture import Capture
from dpkern.engine.difference import DifferenceProbe
from dpkern.engine.guard import SIZES
from dpkern.engine.steady_draws import SteadyDraws

E = 6

Middle = Callable[[Tensor], Tensor]


class Between(nn.Module):
    """Two layers with a function between them."""

    def __init__(self, middle: Middle) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(E, E), nn.Linear(E, 3)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.middle(self.first(x)))
        return output


def passes(module: nn.Module, sizes: Sequence[int]) -> int:
    """Return the number of passes of these sizes that were accepted before one was refused."""
    capture = Capture(module)
    capture.attach()
    try:
        for done, size in enumerate(sizes):
            capture.new_samples()
            try:
                module(torch.randn(size, E))
            except UnsupportedModule as error:
                if "of another size" not in str(error):
                    raise
                return done
        return len(sizes)
    finally:
        capture.detach()


def above(size: int, then: Middle = lambda h: 2 * h) -> Middle:
    return lambda h: then(h) if len(h) > size else h


@pytest.mark.parametrize("least", [1, 2, 3, 4, 5, 7, 15, 39])
def test_a_branch_at_any_smaller_size_is_refused_at_once(least: int) -> None:
    assert passes(Between(above(least)), [40]) == 0


@pytest.mark.parametrize(
    ("middle", "sizes", "accepted"),
    [
        (above(20), [8, 16, 8, 20, 16, 21, 8], 5),
        (above(1), [1, 1, 2], 2),
        (lambda h: h / len(h), [1, 2], 1),
        (lambda h: -h if len(h) == 13 else h, [8, 12, 14, 8, 13], 4),
        (lambda h: -h if len(h) % 2 else h, [4], 0),
        (above(20, torch.tanh), [8] * 12 + [32], 12),
        (above(20, lambda h: h + h[-1:].detach()), [8] * 12 + [32], 12),
        (lambda h: h, [8, 16, 3, 1, 2, 32], 6),
    ],
)
def test_a_new_size_is_compared_before_it_is_trained_on(
    middle: Middle, sizes: Sequence[int], accepted: int
) -> None:
    assert passes(Between(middle), sizes) == accepted


def test_each_size_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    run = DifferenceProbe._pass

    def noted(self: Any, arguments: Any, *more: Any) -> Any:
        rows.append(len(arguments[0][0]))
        return run(self, arguments, *more)

    monkeypatch.setattr(DifferenceProbe, "_pass", noted)
    module = Between(F.softsign)
    passes(module, [8])
    first = len(rows)
    capture = Capture(module)
    capture.attach()
    rows.clear()
    for size in (8, 8, 9, 8, 9, 11, 9, 11, 8):
        capture.new_samples()
        module(torch.randn(size, E))
    capture.detach()
    assert len(rows) == first + 2
    assert rows[first:] == [1, 1]


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda h: F.dropout(h, 0.2),
    "a number that is not used": lambda h: h + 0 * torch.rand(1),
    "noise": lambda h: h + torch.randn_like(h),
    "noise of a size": lambda h: h + torch.randn(len(h), E),
    "a mask": lambda h: h * (torch.rand(h.shape) < 0.5),
    "weights": lambda h: h * torch.multinomial(h.softmax(1), 2).sum(1, keepdim=True),
    "gumbel": lambda h: F.gumbel_softmax(h),
    "whole channels": lambda h: F.dropout1d(h, 0.3),
    "alpha": lambda h: F.alpha_dropout(h, 0.3, True),
    "a law": lambda h: torch.distributions.Normal(h, 1.0).rsample(),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_random_numbers_hide_no_size(draw: Middle) -> None:
    assert passes(Between(draw), [8, 16, 8, 1, 3]) == 5
    assert passes(Between(lambda h: draw(h) / len(h)), [8]) == 0
    assert passes(Between(lambda h: above(10)(draw(h))), [8, 9, 8, 16]) == 3


def several(h: Tensor) -> Tensor:
    if len(h) == 1:
        raise ValueError("expected more than one sample")
    return h


@pytest.mark.parametrize("draw", [lambda h: h, DRAWS["noise"]], ids=["none", "noise"])
def test_modules_that_run_on_several_samples_only(draw: Middle) -> None:
    assert passes(Between(lambda h: draw(several(h))), [8, 16, 3]) == 3
    assert passes(Between(lambda h: draw(above(2)(several(h)))), [8]) == 0


def test_random_numbers_hide_no_gradients_that_go_by_the_size() -> None:
    def middle(h: Tensor) -> Tensor:
        size = len(h)
        if h.requires_grad:
            h.register_hook(lambda g: g / size)
        return F.dropout(h, 0.2)

    with pytest.raises(UnsupportedModule, match="without other samples"):
        passes_of_gradients(Between(middle))
    passes_of_gradients(Between(lambda h: F.dropout(h, 0.2)))


def passes_of_gradients(module: nn.Module) -> None:
    capture = Capture(module)
    capture.attach()
    try:
        capture.new_samples()
        module(torch.randn(16, E))
    finally:
        capture.detach()


def test_one_sample_that_rounding_takes_across_a_step_is_no_finding() -> None:
    """Signs and ranks of numbers may differ in one sample, where products are blocked by size."""

    def middle(h: Tensor) -> Tensor:
        signs = h.sign()
        flipped = signs * torch.tensor([-1.0] + [1.0] * (E - 1))
        alone = len(h) == 1 and bool((h[0] - first).abs().max() < 1e-4)
        return h + (flipped if alone else signs)

    torch.manual_seed(3)
    module = Between(middle)
    x = torch.randn(12, E)
    first = module.first(x[:1]).detach()[0]
    capture = Capture(module)
    capture.attach()
    capture.new_samples()
    module(x)
    capture.detach()


def by_little(h: Tensor) -> Tensor:
    return h * 1.005 if len(h) > 1 else h


def rounded(h: Tensor) -> Tensor:
    """A product of 16-bit numbers, which a kernel for one row rounds otherwise."""
    return by_little(F.linear(h.bfloat16(), torch.eye(E).bfloat16())).float()


def steep(h: Tensor) -> Tensor:
    """Steep sines magnify rounding."""
    for _ in range(14):
        h = (16 * F.linear(h, torch.eye(E).roll(1, 0) + 0.3)).sin()
    return h


def cancelled(h: Tensor) -> Tensor:
    """Nothing but rounding is left."""
    rotation = torch.linalg.qr(torch.randn(E, E, generator=torch.Generator().manual_seed(0)))[0]
    return 1e7 * (h @ rotation @ rotation.t() - h)


@pytest.mark.parametrize(
    ("middle", "accepted"), [(by_little, 0), (rounded, 3), (steep, 3), (cancelled, 3)]
)
def test_rounding_is_no_finding(middle: Middle, accepted: int) -> None:
    assert passes(Between(middle), [64, 2, 33]) == accepted


class Threshold(nn.Module):
    """Scales in batches above a size that the loop may change."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.size = nn.Linear(E, E), nn.Linear(E, 3), 1000

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(above(self.size)(self.first(x)))
        return output


def test_a_number_that_changes_has_known_sizes_compared_again() -> None:
    module = Threshold()
    capture = Capture(module)
    capture.attach()
    try:
        for size in (8, 16, 8, 16, 8):
            capture.new_samples()
            module(torch.randn(size, E))
        module.size = 10
        capture.new_samples()
        module(torch.randn(8, E))
        capture.new_samples()
        with pytest.raises(UnsupportedModule, match="of another size"):
            module(torch.randn(16, E))
    finally:
        capture.detach()


def until(h: Tensor) -> Tensor:
    while torch.rand(1).item() < 0.5:
        h = h.tanh()
    return h


def rejected(h: Tensor) -> Tensor:
    z = torch.randn(h.shape)
    while bool((bad := z.abs() < 0.7).any()):
        z = torch.where(bad, torch.randn(h.shape), z)
    return h + z


@pytest.mark.parametrize("middle", [until, rejected])
def test_loops_that_draw_until_a_condition_holds_end(middle: Middle) -> None:
    assert passes(Between(middle), [8, 9]) == 2


def in_numpy(h: Tensor) -> Tensor:
    return h + torch.from_numpy(np.random.randn(*h.shape)).float()


OUTSIDE: dict[str, Middle] = {
    "numpy, twice": lambda h: in_numpy(in_numpy(h)),
    "numpy beside dropout": lambda h: in_numpy(F.dropout(in_numpy(h), 0.2)),
    "python": lambda h: h * torch.tensor([[random.random()] for _ in h]) + random.random(),
    "own generator": lambda h: (
        h + torch.randn(h.shape, generator=torch.Generator().manual_seed(3)) + torch.randn(h.shape)
    ),
}


@pytest.mark.parametrize("middle", OUTSIDE.values(), ids=OUTSIDE)
def test_numbers_drawn_elsewhere_are_no_finding(middle: Middle) -> None:
    assert passes(Between(middle), [8, 9, 3]) == 3


MASKS: dict[str, Middle] = {
    "above": lambda h: h * (torch.rand(h.shape) > 0.5) * 2,
    "below": lambda h: h * (torch.rand(h.shape) < 0.5) * 2,
    "floor": lambda h: h * (torch.rand(h.shape) + 0.5).floor(),
    "whole numbers": lambda h: h * torch.randint(0, 2, h.shape),
    "bernoulli": lambda h: h * (torch.bernoulli(torch.full(h.shape, 0.5)) == 1),
    "bits": lambda h: h * torch.bernoulli(torch.full(h.shape, 0.5)).long(),
    "normal": lambda h: h * (torch.randn(h.shape) - 0.6).relu(),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_masks_hide_no_size(mask: Middle) -> None:
    assert passes(Between(mask), [8, 9, 3]) == 3
    assert passes(Between(lambda h: mask(h / len(h))), [8]) == 0


class Second(Between):
    """Takes the samples behind something else."""

    def forward(self, places: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + 0 * places.sum()


@pytest.mark.parametrize("size", [20, 30])
def test_samples_need_not_come_first_among_the_arguments(size: int) -> None:
    module = Second(above(size))
    capture = Capture(module)
    capture.attach()
    try:
        for batch in (8, 16, 8):
            capture.begin_batch(batch)
            module(torch.arange(7), torch.randn(batch, E))
        capture.begin_batch(40)
        with pytest.raises(UnsupportedModule, match="of another size"):
            module(torch.arange(7), torch.randn(40, E))
    finally:
        capture.detach()


def trained(middle: Middle, sizes: Sequence[int]) -> PrivacyEngine:
    """A run whose batches have these sizes."""
    torch.manual_seed(0)
    module = Between(middle)
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=DataLoader(
            TensorDataset(torch.randn(64, E), torch.randint(3, (64,))), batch_size=8
        ),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    turns = iter(sizes)
    loader.batches._draw = lambda _: torch.randperm(64)[: next(turns)]
    while engine.step.steps < len(sizes):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if engine.step.steps == len(sizes):
                break
    return engine


def test_replayed_steps_meet_new_sizes_too() -> None:
    sizes = [8, 8, 8, 8, 8, 9, 9, 9, 9, 17, 9]
    engine = trained(F.softsign, sizes)
    assert engine.capture.program.replays > 3
    with pytest.raises(UnsupportedModule, match="of another size"):
        trained(above(16), sizes)


@pytest.mark.parametrize(
    ("middle", "conditional"),
    [
        (F.softsign, False),
        (lambda h: F.dropout(h, 0.2), False),
        (lambda h: h + Dirichlet(torch.ones(E)).sample((len(h),)), True),  # has no constant
    ],
)
def test_what_cannot_be_compared_is_a_condition(middle: Middle, conditional: bool) -> None:
    engine = trained(middle, [8, 8, 9])
    notes = engine.step.certify(1e-5).notes
    assert any(SIZES in note for note in notes) is conditional


@pytest.mark.parametrize("high", [False, True])
def test_draws_are_the_same_whatever_their_number(high: bool) -> None:
    laws: list[Callable[[int], Tensor]] = [
        lambda n: torch.rand(n, 3),
        lambda n: torch.randn(n, 3),
        lambda n: torch.normal(torch.full((n,), 2.0), 4.0),
        lambda n: torch.normal(1.0, 2.0, (n,)),
        lambda n: torch.randint(3, 9, (n,)),
        lambda n: torch.randint(9, (n,)),
        lambda n: torch.empty(n).random_(2, 9),
        lambda n: torch.empty(n).uniform_(-1, 3),
        lambda n: torch.empty(n).exponential_(2.0),
        lambda n: torch.empty(n).log_normal_(0.5),
        lambda n: torch.empty(n).cauchy_(1.0, 2.0),
        lambda n: torch.empty(n).geometric_(0.5),
        lambda n: torch.bernoulli(torch.full((n,), 0.25)),
        lambda n: torch.empty(n).bernoulli_(0.25),
        lambda n: torch.poisson(torch.full((n,), 3.2)),
        lambda n: torch.binomial(torch.full((n,), 5.0), torch.full((n,), 0.5)),
        lambda n: torch.multinomial(torch.tensor([[0.1, 0.6, 0.3]]).expand(n, 3), 2),
        lambda n: torch.multinomial(torch.tensor([[0.1, 0.6, 0.3]]).expand(n, 3), 5, True),
        lambda n: torch._standard_gamma(torch.full((n,), 2.0)),
        lambda n: F.dropout(torch.ones(n, 4), 0.3),
    ]
    with SteadyDraws(high=high) as steady:
        for law in laws:
            many = law(40)
            assert torch.equal(many[:3], law(3))
            assert torch.equal(many, many[:1].expand_as(many))
        assert torch.equal(F.dropout(torch.ones(5), 0.0), torch.ones(5))
        assert not steady.unknown
        Dirichlet(torch.ones(3)).sample((2,))
        assert steady.unknown == {"_sample_dirichlet"}

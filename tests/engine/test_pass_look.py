"""The quick look around a pass: it says no to every change, and yes where there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpkern.engine.capture import Capture
from dpkern.engine.pass_look import PassLook
from dpkern.ops import direct

pytestmark = pytest.mark.skipif(direct.look("PassLook") is None, reason="no compiled module")

B, E = 8, 5


class Model(nn.Module):
    """Two layers with a buffer, a frozen parameter, an attribute and two hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(E, E), nn.Linear(E, 3)
        self.shift: Tensor
        self.register_buffer("shift", torch.zeros(E))
        self.frozen = nn.Parameter(torch.ones(E), requires_grad=False)
        self.level = 1.5
        self.first.register_forward_hook(lambda *_: None)
        self.first.register_forward_hook(lambda *_: None)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.first(x) * self.frozen + self.shift)
        return output


@pytest.fixture
def look() -> tuple[Model, PassLook, Capture]:
    """A look that has stood for a pass already."""
    model = Model()
    capture = Capture(model)
    capture.attach()
    capture.guard._occasions.gap = 10**6  # no secret time among these passes
    for _ in range(4):
        capture.new_samples()
        model(torch.randn(B, E))
    quick = capture.guard.state.quick
    assert quick is not None
    assert quick.before()
    assert quick.after()
    return model, quick, capture


def moved_hook(m: Model) -> None:
    hooks: Any = m.first._forward_hooks
    hooks.move_to_end(next(iter(hooks)))


def written(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.add_(1.0)


CHANGES: dict[str, Callable[[Model], object]] = {
    "a hook": lambda m: m.last.register_forward_pre_hook(lambda *_: None),
    "a hook of the root": lambda m: m.register_forward_pre_hook(lambda *_: None),
    "hooks in another order": moved_hook,
    "a mode": lambda m: m.last.eval(),
    "a number": lambda m: setattr(m, "level", 2.5),
    "an attribute more": lambda m: setattr(m, "name", "x"),
    "an attribute less": lambda m: delattr(m, "level"),
    "another part": lambda m: setattr(m, "last", nn.Linear(E, 3)),
    "a frozen parameter trained": lambda m: m.frozen.requires_grad_(),
    "a trained parameter frozen": lambda m: m.first.bias.requires_grad_(False),
    "another buffer": lambda m: setattr(m, "shift", torch.zeros(E)),
    "a buffer written": lambda m: written(m.shift),
    "a buffer written through a view": lambda m: written(m.shift[:2]),
    "a frozen parameter written": lambda m: written(m.frozen),
    "a buffer less": lambda m: delattr(m, "shift"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_passes_is_seen(name: str, look: tuple[Model, PassLook, Capture]) -> None:
    model, quick, _ = look
    CHANGES[name](model)
    assert not quick.before()
    assert not quick.before()  # nothing was noted


WITHIN: dict[str, Callable[[Model], object]] = {
    **{name: CHANGES[name] for name in CHANGES if "buffer" in name},
    "a frozen parameter written": CHANGES["a frozen parameter written"],
    "a trained parameter written": lambda m: written(m.first.weight.detach()),
    "another trained parameter": lambda m: setattr(
        m.first, "weight", nn.Parameter(torch.zeros(E, E))
    ),
}


@pytest.mark.parametrize("name", WITHIN)
def test_a_write_within_a_pass_is_seen(name: str, look: tuple[Model, PassLook, Capture]) -> None:
    model, quick, _ = look
    assert quick.before()
    WITHIN[name](model)
    assert not quick.after()


def test_what_was_put_back_is_no_change(look: tuple[Model, PassLook, Capture]) -> None:
    model, quick, _ = look
    level, shift = model.level, model.shift
    model.level, model.shift = 3.5, torch.ones(E)
    model.level, model.shift = level, shift
    assert quick.before()


def test_trained_parameters_change_from_pass_to_pass(look: tuple[Model, PassLook, Capture]) -> None:
    model, quick, _ = look
    for _ in range(3):
        written(model.first.weight.detach())
        assert quick.before()
        assert quick.after()


def test_secret_probes_come_in_their_turn(look: tuple[Model, PassLook, Capture]) -> None:
    model, _, capture = look
    capture.guard._occasions.gap = 4
    probes = []
    for _ in range(6):
        capture.new_samples()
        before = capture.guard.probes
        model(torch.randn(B, E))
        probes.append(capture.guard.probes - before)
    assert probes[:4] == [0, 0, 0, 1]


def test_a_pass_without_gradients_ends_the_quick_looks(
    look: tuple[Model, PassLook, Capture],
) -> None:
    model, _, capture = look
    with torch.no_grad():
        model(torch.randn(B, E))
    assert capture.guard.state.quick is None
    for _ in range(2):
        capture.new_samples()
        model(torch.randn(B, E))
    assert capture.guard.state.quick is not None

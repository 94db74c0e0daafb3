"""Clip groups of a module, and what happens to them while gradients arrive."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dpkern import DPStep
from dpkern.base.errors import PrivacyError
from dpkern.engine import groups
from dpkern.engine.capture import Capture
from dpkern.engine.clipping import clipped_sums, close_into, prepare
from dpkern.privacy.mechanisms import DPSGD


class Owner(nn.Module):
    """A parameter of its own, a tied weight and a frozen module."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.last = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False))


def test_one_group_per_module_that_owns_parameters() -> None:
    names = [n for n, p in Owner().named_parameters() if p.requires_grad]
    assert names == [
        *("scale", "first.weight", "first.bias", "second.bias"),
        *("last.0.weight", "last.0.bias", "last.1.weight"),
    ]
    assert groups.by_owner(Owner()) == (0, 1, 1, 2, 3, 3, 4)
    assert groups.by_owner(nn.ReLU()) == ()


def arriving(**changes: Any) -> tuple[Capture, DPStep]:
    """A network whose gradients of four samples have arrived."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    capture = Capture(model, loss_reduction="sum")
    mechanism = DPSGD(**{"noise_multiplier": 1.0, "max_grad_norm": 0.1} | changes)
    parameters = [p.detach() for p in capture.parameters]
    step = DPStep(
        mechanism, parameters, expected_batch_size=4, sample_rate=0.1, gradients="batched"
    )
    prepare(capture, lambda: step.plan)
    capture.attach()
    capture.begin_batch(4)
    model(torch.randn(4, 3)).square().sum().backward()
    return capture, step


GROUP = {"clipping": "group", "groups": (0, 0, 1, 1)}


@pytest.mark.parametrize(
    ("changes", "early"),
    [
        ({"arithmetic": "float"} | GROUP, True),
        ({"arithmetic": "float", "clipping": "per_layer"}, True),
        ({"noise_multiplier": 0.0} | GROUP, True),
        ({"arithmetic": "float"}, False),
        ({"arithmetic": "exact"} | GROUP, False),
    ],
    ids=str,
)
def test_groups_finish_in_the_backward_pass_where_they_can(
    changes: dict[str, Any], early: bool
) -> None:
    capture, step = arriving(**changes)
    assert [bool(slot.arrivals) for slot in capture.slots] == [not early] * 4
    close_into(step, capture)
    assert step.unfinished
    assert not capture.captured


def test_a_second_backward_pass_after_a_group_is_finished_is_refused() -> None:
    capture, _ = arriving(arithmetic="float", **GROUP)
    with pytest.raises(PrivacyError, match="once"):
        capture.module(torch.randn(4, 3)).sum().backward()


def test_norms_are_taken_on_arrival_only_where_sums_need_them() -> None:
    automatic = {"arithmetic": "exact", "clipping": "automatic"}  # looks at integers instead
    for changes in ({"arithmetic": "float"}, {"arithmetic": "exact"}, automatic):
        capture, _ = arriving(**changes)
        taken = [arrival.square is not None for slot in capture.slots for arrival in slot.arrivals]
        # Biases arrive as explicit gradients, whose norms are taken together at the end.
        assert taken == [changes is not automatic, False] * 2


def test_nothing_that_arrived_adds_nothing() -> None:
    capture, step = arriving()
    capture.discard()
    close_into(step, capture)
    assert not step.unfinished


class Late(nn.Module):
    """A weight used after a checkpoint, and inside it as an expression."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(4))
        self.first = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = checkpoint(lambda t: F.linear(t, self.w * 2), self.first(x), use_reentrant=True)
        return F.linear(h, self.w)


def test_an_expression_that_comes_after_its_group_was_finished_is_refused() -> None:
    module = Late()
    capture = Capture(module, loss_reduction="sum")
    plan = DPSGD(
        noise_multiplier=1.0, max_grad_norm=1.0, clipping="per_layer", arithmetic="float"
    ).plan([tuple(p.shape) for p in capture.parameters])
    prepare(capture, lambda: plan)
    capture.attach()
    x = torch.randn(3, 4, requires_grad=True)
    for _ in range(2):  # passes that are probed, which shows the expression in time
        module(x).sum().backward()
        clipped_sums(capture, plan)
    module(x).sum().backward()
    with pytest.raises(PrivacyError, match="one backward pass"):
        clipped_sums(capture, plan)
    capture.detach()

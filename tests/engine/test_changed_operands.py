"""Operands that are written to between the backward pass and the step: nothing is released."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkern import DPStep
from dpkern.base.errors import PrivacyError
from dpkern.engine import uses
from dpkern.engine.capture import Capture
from dpkern.engine.clipping import close_into, prepare
from dpkern.engine.uses import ParameterSource
from dpkern.privacy.mechanisms import DPSGD
from tests.engine.replayed_loops import Loop, loop

BATCH = 4
BOUND = 0.1


class Layers(nn.Module):
    """An embedding, a linear layer over positions, a convolution, an expression and a head."""

    def __init__(self) -> None:
        super().__init__()
        # Gradients are larger than operands, which are therefore held until the close.
        self.table = nn.Embedding(9, 8)
        self.wide = nn.Linear(8, 6)
        self.conv = nn.Conv1d(6, 6, 3)
        self.scaled = nn.Linear(6, 6, bias=False)
        self.head = nn.Linear(6, 2)
        self.seen: dict[str, Tensor] = {}

    def forward(self, ids: Tensor) -> Tensor:
        looked = self.keep("embedding", self.table(ids))
        wide = self.keep("linear", torch.tanh(self.wide(looked)).transpose(1, 2).contiguous())
        rows = self.keep("convolution", torch.tanh(self.conv(wide)).flatten(1))
        mixed = self.keep("expression", torch.tanh(F.linear(rows, self.scaled.weight * 2)))
        out: Tensor = self.head(mixed)
        return out

    def keep(self, name: str, output: Tensor) -> Tensor:
        """Keep an output and, once it is known, its gradient."""
        self.seen[name] = output
        hook = output.register_hook
        hook(lambda g: self.seen.update({f"gradient of {name}": g}))  # type: ignore[no-untyped-call]
        return output


def arrived(**changes: Any) -> tuple[Capture, DPStep, Layers]:
    """A network whose gradients of four samples have arrived, and the step that waits for them."""
    torch.manual_seed(0)
    model = Layers()
    capture = Capture(model, loss_reduction="sum", keep_budget=0)
    mechanism = DPSGD(**{"noise_multiplier": 1.0, "max_grad_norm": BOUND} | changes)
    parameters = [p.detach() for p in capture.parameters]
    step = DPStep(
        mechanism, parameters, expected_batch_size=4, sample_rate=0.1, gradients="batched"
    )
    prepare(capture, lambda: step.plan)
    capture.attach()
    capture.begin_batch(BATCH)
    model(torch.randint(9, (BATCH, 3))).square().sum().backward()
    return capture, step, model


PLANS: dict[str, dict[str, Any]] = {
    "float": {"arithmetic": "float"},
    "exact": {"arithmetic": "exact"},
    "exact, integers looked at": {"arithmetic": "exact", "clipping": "automatic"},
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "operand",
    ["embedding", "linear", "convolution", "expression", "gradient of embedding"],
)
def test_changed_operand_is_refused_at_the_close(plan: str, operand: str) -> None:
    capture, step, model = arrived(**PLANS[plan])
    with torch.no_grad():
        model.seen[operand].mul_(100)
    for _ in range(2):  # a refusal does not wear off
        with pytest.raises(PrivacyError, match="changed in place"):
            close_into(step, capture)
    assert not step.unfinished
    assert step.steps == 0
    capture.discard()
    capture.detach()


@pytest.mark.parametrize("plan", PLANS)
def test_untouched_operands_are_summed(plan: str) -> None:
    capture, step, _ = arrived(**PLANS[plan])
    close_into(step, capture)
    assert step.unfinished
    capture.detach()


def test_clip_group_that_ends_in_the_backward_pass_is_refused() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2), nn.Linear(2, 2))
    capture = Capture(model, loss_reduction="sum")
    plan: dict[str, Any] = {
        "clipping": "group",
        "groups": (0, 0, 0, 0, 1, 1),
        "arithmetic": "float",
    }
    mechanism = DPSGD(noise_multiplier=1.0, max_grad_norm=BOUND, **plan)
    parameters = [p.detach() for p in capture.parameters]
    step = DPStep(
        mechanism, parameters, expected_batch_size=4, sample_rate=0.1, gradients="batched"
    )
    prepare(capture, lambda: step.plan)
    capture.attach()
    capture.begin_batch(BATCH)
    hidden = model[1](model[0](torch.randn(BATCH, 3))) * 1.0

    def edit(g: Tensor) -> None:
        hidden.detach().mul_(100)

    hidden.register_hook(edit)
    loss = model[3](model[2](hidden)).square().sum()
    with pytest.raises(PrivacyError, match="changed in place"):
        loss.backward()
    assert not step.unfinished
    capture.detach()


def test_sums_exceed_the_bound_where_nothing_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The edit of these tests is one that breaks the clip bound."""
    monkeypatch.setattr(uses, "versions_of", lambda record: ())
    capture, step, model = arrived(**PLANS["float"])
    with torch.no_grad():
        for name in ("linear", "convolution", "expression"):
            model.seen[name].mul_(1000)
    close_into(step, capture)
    assert step.sums is not None
    total = torch.cat([each.flatten() for each in step.sums]).norm()
    assert float(total) > BATCH * BOUND
    capture.detach()


@pytest.mark.parametrize("replayed", [True, False])
def test_input_of_the_loop_changed_before_the_step_is_refused(replayed: bool) -> None:
    run = loop(replayed, flat_network)
    run.train(5)
    assert bool(run.replays) is replayed
    change_input(run)
    steps, before = run.engine.adapter.dp_step.steps, run.weights
    with pytest.raises(PrivacyError, match="changed in place"):
        run.train(1)
    assert run.engine.adapter.dp_step.steps == steps
    assert all(map(torch.equal, run.weights, before))


def flat_network() -> nn.Module:
    """Return linear layers of one position, whose operands are held until the close."""
    return nn.Sequential(nn.Flatten(), nn.Linear(20, 6), nn.ReLU(), nn.Linear(6, 3))


def change_input(run: Loop) -> None:
    """Write to the module's input after every backward pass."""
    own = run.one

    def one(x: Tensor, y: Tensor) -> None:
        def edit() -> None:
            with torch.no_grad():
                x.mul_(100)

        run.between = edit
        own(x, y)

    run.one = one  # type: ignore[method-assign]


def test_operand_changed_before_a_replayed_pass_is_handed_over_is_refused() -> None:
    run = loop(True)
    run.train(5)

    def edit() -> None:
        program = run.engine.capture.program
        x = next(held[0] for held in program.run.held if held and held[0] is not None)
        with torch.no_grad():
            x.mul_(100)
        run.engine.capture.on_use = lambda use, x: None  # this pass must be recorded

    run.between = edit
    with pytest.raises(PrivacyError, match="changed in place"):
        run.train(1)


def test_operands_of_a_source_are_compared_one_by_one() -> None:
    capture, _, model = arrived()
    sources = [s for s in capture.slots if isinstance(s, ParameterSource) and s.arrivals]
    for source in sources:
        source.check_operands()
    with torch.no_grad():
        model.seen["linear"].add_(1)
    changed = []
    for source in sources:
        try:
            source.check_operands()
        except PrivacyError:
            changed.append(source.name)
    assert changed == ["conv.weight"]
    capture.detach()

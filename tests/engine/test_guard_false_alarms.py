"""What is right stays accepted: every correct construct in a whole private run, in four ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpkern
from tests.engine.construct_kit import Construct
from tests.engine.constructs import CONSTRUCTS

CORRECT = [construct for construct in CONSTRUCTS if construct.expected == "correct"]
STEPS = 3

pytestmark = pytest.mark.usefixtures("one_thread")


class Dropping(nn.Module):
    """A model with dropout on its floating-point inputs and on its output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.drop = nn.Dropout(0.2)

    def forward(self, *inputs: Tensor) -> Any:
        return self.drop(self.model(*(self._dropped(x) for x in inputs)))

    def _dropped(self, x: Tensor) -> Tensor:
        return self.drop(x) if x.is_floating_point() else x


class Skipping(Dropping):
    """A model that each sample skips by a coin of its own, in its output."""

    def forward(self, *inputs: Tensor) -> Any:
        output = self.model(*inputs)
        kept = torch.rand(len(output), *[1] * (output.dim() - 1)) < 0.8
        return output * kept


def same(model: nn.Module) -> nn.Module:
    return model


WAYS: dict[str, tuple[Callable[[nn.Module], nn.Module], bool]] = {
    "plain": (same, False),
    "dropout": (Dropping, False),
    "stochastic-depth": (Skipping, False),
    "bfloat16": (same, True),
}
"""How the model is wrapped, and whether it runs in mixed precision."""


def accepted(construct: Construct, wrap: Callable[[nn.Module], nn.Module], mixed: bool) -> int:
    """Train for a few steps; the number of steps that were released."""
    torch.manual_seed(0)
    model = wrap(construct.model())
    dtype = torch.float32 if mixed else construct.dtype
    model = model.to(dtype)
    inputs = [x.to(dtype) if x.is_floating_point() else x for x in construct.inputs]
    engine = dpkern.PrivacyEngine()
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(trained, lr=0.01),
        data_loader=DataLoader(TensorDataset(*inputs), batch_size=len(inputs[0])),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for _ in range(STEPS):
        for batch in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                output = model(*batch)
            output = output if dtype is torch.float64 else output.float()
            construct.losses(output, tuple(batch)).mean().backward()
            optimizer.step()
        with torch.no_grad():
            model.eval()(*inputs)
            model.train()
        model.state_dict()
    return engine.step.steps


def test_how_many_there_are() -> None:
    assert len(CORRECT) * len(WAYS) >= 400


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # checkpoints
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # RMS norm, 16 bits
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("construct", CORRECT, ids=lambda construct: construct.name)
def test_correct_constructs_are_accepted(construct: Construct, way: str) -> None:
    assert accepted(construct, *WAYS[way]) == STEPS

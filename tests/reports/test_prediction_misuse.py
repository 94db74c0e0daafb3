"""Predictions that would be of another step, of no model or of an impossible processor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpkern.base.errors import InvalidInput, UnsupportedModule
from dpkern.cost import processors
from dpkern.reports import prediction

ROW = torch.zeros(1, 3, 6, 6)
NO_FUNCTION = 5


def normalised() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), ROW


def with_frozen_normalisation() -> tuple[nn.Module, Tensor]:
    model, row = normalised()
    model[1].eval().requires_grad_(False)  # type: ignore[index]
    return model, row


def linear() -> tuple[nn.Module, Tensor]:
    return nn.Linear(100, 30), torch.zeros(1, 100)


def no_example() -> nn.Module:
    return nn.Linear(3, 3)


def nothing() -> None:
    return None


def a_list() -> tuple[nn.Module, list[int]]:
    return nn.Linear(3, 3), [1, 3]


def predicted(name: str, **given: Any) -> Any:
    return prediction.report(f"{__name__}:{name}", batches=(2,), **given)


def test_a_model_that_cannot_be_trained_privately_gets_no_prediction() -> None:
    with pytest.raises(UnsupportedModule, match="BatchNorm2d"):
        predicted("normalised")
    assert predicted("with_frozen_normalisation").facts["steps"][0]["seconds"] > 0


def doubled() -> tuple[nn.Module, Tensor]:
    return nn.Linear(4, 3).double(), torch.zeros(2, 4)


def built_in_float64() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3, dtype=torch.float64)), torch.zeros(2, 4)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        # torch refuses to convert fake parameters, or does it, as earlier tests left its cache.
        ("doubled", "(a conversion of its parameters|float64 in weight)"),
        ("built_in_float64", "float64 in 1.weight"),
    ],
)
def test_a_model_of_another_format_is_refused_and_not_counted_as_float32(
    name: str, says: str
) -> None:
    with pytest.raises(InvalidInput, match=f"{says}. .*float64 are not predicted"):
        predicted(name)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_example", "row_shape: .*Pass --row-shape"),
        ("nothing", "from nothing.., got NoneType"),
        ("a_list", "got Linear, list"),
        ("NO_FUNCTION", "a function NO_FUNCTION in .* got int"),
    ],
)
def test_a_callable_that_returns_no_model_is_refused_by_name(name: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        predicted(name)


class Named(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return {"logits": super().forward(x)}


def named() -> tuple[nn.Module, Tensor]:
    return Named(4, 3), torch.zeros(2, 4)


def one_number() -> tuple[nn.Module, Tensor]:
    return nn.Linear(4, 1), torch.zeros(2, 4)


@pytest.mark.parametrize(("name", "got"), [("named", "dict"), ("one_number", "shape .2, 1.")])
def test_a_model_without_logits_gets_no_prediction(name: str, got: str) -> None:
    with pytest.raises(InvalidInput, match=f"one tensor of logits .* got {got}"):
        predicted(name)


def test_steps_that_do_not_fit_into_the_memory_are_named() -> None:
    small = processors.load("h100")
    machine = {**small.machine, "memory_gb": 1e-5}
    report = predicted("linear", processor=replace(small, machine=machine))
    assert "Too large for its 1e-05 GB of memory: private steps of 2 samples." in report.summary
    assert "Too large" not in predicted("linear", processor=small).summary


@pytest.mark.parametrize(
    "line",
    ["cores = 0", "cores = 2.5", "bandwidth_gb_s = 0", "clock_ghz = 0", "product_share = 1.5"],
)
def test_figures_of_no_machine_are_refused(line: str) -> None:
    text = (processors._MACHINES / "zen4.toml").read_text()
    name = line.partition(" ")[0]
    kept = [each for each in text.splitlines() if not each.startswith(f"{name} =")]
    assert processors.parse(text, where="zen4.toml").machine
    changed = "\n".join(kept).replace("[machine]", f"[machine]\n{line}")
    with pytest.raises(InvalidInput, match=f"machine.{name}"):
        processors.parse(changed, where="zen4.toml")

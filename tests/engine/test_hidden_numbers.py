"""Numbers of samples that a loop leaves where the module, the criterion or a loss reads them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpkern.base.errors import UnsupportedModule
from dpkern.engine import occasions
from dpkern.engine.provenance.statistic import READ
from tests.engine.engine_run import DELTA, Run
from tests.engine.test_engine_escapes import Body, train

SETTINGS = {"temperature": 1.0}


class Config:
    def __init__(self) -> None:
        self.scale = 1.0
        self.parts = [1.0]


class Tempered(nn.Module):
    """A network whose outputs numbers scale that are kept in several places."""

    floor = 0.0
    table: ClassVar = {"scale": 1.0}

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop, self.outer = nn.Linear(4, 6), nn.Dropout(0.1), nn.Linear(6, 2)
        self.temperature = 1.0
        self.config = Config()
        self.scales = [1.0, 1.0]
        self.factor = torch.ones(())
        self.tensors = [torch.ones(())]
        self.large = torch.ones(100)
        self.array = np.ones(3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.outer(self.drop(self.inner(x)).tanh()) * self.temperature * self.config.scale
        scale = self.scales[0] * SETTINGS["temperature"] * self.table["scale"]
        h = h * self.tensors[0] * self.large[0] * float(self.array[0])
        return h * scale * self.factor * self.config.parts[0] + self.floor


def after_each(use: Callable[[Any, float, int], Any]) -> Body:
    """Call ``use`` with the module, the loss as a number, and the number of the step."""

    def body(run: Run, x: Tensor, y: Tensor, i: int) -> None:
        loss = F.cross_entropy(run.module(x), y)
        loss.backward()
        use(run.module, loss.item(), i)

    return body


KEPT: dict[str, Callable[[Any, float, int], Any]] = {
    "attribute": lambda m, v, i: setattr(m, "temperature", math.exp(-v)),
    "attribute that is the loss": lambda m, v, i: setattr(m, "temperature", v),
    "attribute of a part": lambda m, v, i: setattr(m.drop, "p", math.exp(-v)),
    "attribute of a configuration": lambda m, v, i: setattr(m.config, "scale", math.exp(-v)),
    "list of a configuration": lambda m, v, i: m.config.parts.__setitem__(0, math.exp(-v)),
    "list": lambda m, v, i: m.scales.__setitem__(0, math.exp(-v)),
    "global variable": lambda m, v, i: SETTINGS.update(temperature=math.exp(-v)),
    "table of the class": lambda m, v, i: m.table.update(scale=math.exp(-v)),
    "class": lambda m, v, i: setattr(Tempered, "floor", math.exp(-v)),
    "tensor": lambda m, v, i: setattr(m, "factor", torch.tensor(math.exp(-v))),
    "tensor in a list": lambda m, v, i: m.tensors[0].fill_(math.exp(-v)),
    "large tensor": lambda m, v, i: m.large.fill_(math.exp(-v)),
    "array": lambda m, v, i: m.array.__setitem__(0, math.exp(-v)),
    "tensor in place": lambda m, v, i: m.factor.fill_(math.exp(-v)),
}


@pytest.fixture(autouse=True)
def usual_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(occasions, "MEAN_GAP", 1 << 60)  # no secret probe looks
    monkeypatch.setitem(SETTINGS, "temperature", 1.0)
    monkeypatch.setitem(Tempered.table, "scale", 1.0)
    monkeypatch.setattr(Tempered, "floor", 0.0)


@pytest.mark.parametrize("name", KEPT)
def test_numbers_where_the_module_reads_them_are_a_condition(name: str) -> None:
    run = train(after_each(KEPT[name]), Tempered())
    assert READ in run.engine.step.ledger.conditions


HARMLESS: dict[str, Callable[[Any, float, int], Any]] = {
    "nothing": lambda m, v, i: None,
    "few digits": lambda m, v, i: setattr(m, "temperature", 0.5 + i / 8),
    "ratio": lambda m, v, i: setattr(m.config, "scale", 1 + i / 7),
    "list of ratios": lambda m, v, i: m.scales.__setitem__(0, 1 + i / 7),
    "the same many digits": lambda m, v, i: setattr(m, "temperature", float("0.12345678")),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_public_numbers_where_the_module_reads_them_are_no_condition(name: str) -> None:
    module = Tempered()
    module.temperature = 0.12345678
    run = train(after_each(HARMLESS[name]), module)
    assert READ not in run.engine.step.ledger.conditions


BY_SIZE: dict[str, Callable[[int], float]] = {
    "size": lambda n: n,
    "inverse": lambda n: 1 / n,
    "root": lambda n: n**0.5,
    "multiple": lambda n: n / 256,
}


def before_each(number: Callable[[int], float]) -> Body:
    def body(run: Run, x: Tensor, y: Tensor, i: int) -> None:
        run.module.temperature = number(len(x))
        F.cross_entropy(run.module(x), y).backward()

    return body


@pytest.mark.parametrize("name", BY_SIZE)
def test_attributes_that_follow_the_sizes_of_batches_are_a_condition(name: str) -> None:
    run = train(before_each(BY_SIZE[name]), Tempered())
    assert READ in run.engine.step.ledger.conditions


def test_attributes_that_do_not_follow_the_sizes_of_batches_are_no_condition() -> None:
    passes = iter(range(1, 1000))
    run = train(before_each(lambda n: next(passes) / 8), Tempered())
    assert READ not in run.engine.step.ledger.conditions


class Annealing(Tempered):
    """A network that anneals itself, by numbers of many digits."""

    def forward(self, x: Tensor) -> Tensor:
        self.passes = getattr(self, "passes", 0) + 1
        self.temperature = math.tanh(self.passes)
        return super().forward(x)


def test_a_module_that_anneals_itself_is_no_condition() -> None:
    run = train(after_each(lambda m, v, i: None), Annealing())
    assert READ not in run.engine.step.ledger.conditions


def test_a_number_kept_behind_the_last_pass_is_seen_by_the_report() -> None:
    run = train(after_each(lambda m, v, i: None), Tempered())
    assert READ not in run.engine.step.ledger.conditions
    SETTINGS["temperature"] = math.exp(-0.123456789)
    assert READ in str(run.engine.report(DELTA))


def smoothed(smoothing: Callable[[float, int], float]) -> Body:
    """Smooth labels by a function of the last loss."""
    last: list[float] = [1.0]

    def body(run: Run, x: Tensor, y: Tensor, i: int) -> None:
        loss = F.cross_entropy(run.module(x), y, label_smoothing=smoothing(last[-1], i))
        loss.backward()
        last.append(loss.item())

    return body


def by_the_criterion(run: Run, x: Tensor, y: Tensor, i: int) -> None:
    criterion = nn.CrossEntropyLoss(label_smoothing=math.exp(-3 * LAST[-1]))
    loss = criterion(run.module(x), y)
    loss.backward()
    LAST.append(loss.item())


LAST = [1.0]


def by_beta(run: Run, x: Tensor, y: Tensor, i: int) -> None:
    loss = F.smooth_l1_loss(run.module(x)[:, 0], y.float(), beta=math.exp(-LAST[-1]))
    loss.backward()
    LAST.append(loss.item())


@pytest.mark.parametrize(
    "body",
    [smoothed(lambda v, i: math.exp(-v) / 2), by_the_criterion, by_beta],
    ids=["label smoothing", "criterion", "beta"],
)
def test_numbers_that_losses_take_are_a_condition(body: Body) -> None:
    assert READ in train(body).engine.step.ledger.conditions


def test_a_number_of_samples_that_a_loss_takes_is_refused() -> None:
    with pytest.raises(UnsupportedModule, match="got item"):
        train(smoothed(lambda v, i: 0.1 * v if i else 0.1))


@pytest.mark.parametrize("value", [0.1, 0.123456789])
def test_constant_label_smoothing_is_no_condition(value: float) -> None:
    assert READ not in train(smoothed(lambda v, i: value)).engine.step.ledger.conditions


SCHEDULES: dict[str, Callable[[int], float]] = {
    "exponential": lambda i: math.exp(-i / 7),
    "power": lambda i: 0.7 * 0.99**i,
    "root": lambda i: 1 / math.sqrt(i + 1),
    "cosine": lambda i: math.cos(math.pi * i / 60),
    "half a cosine": lambda i: 0.5 * (1 + math.cos(math.pi * i / 60)),
}


def scheduled(scale: Callable[[int, float], float]) -> Body:
    """Multiply the loss by a number, and read the loss for a log."""
    last = [1.0]

    def body(run: Run, x: Tensor, y: Tensor, i: int) -> None:
        loss = F.cross_entropy(run.module(x), y) * scale(i, last[-1])
        loss.backward()
        last.append(loss.item())

    return body


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_beside_a_log_are_no_condition(name: str) -> None:
    body = scheduled(lambda i, v: SCHEDULES[name](i))
    assert READ not in train(body).engine.step.ledger.conditions


FUNCTIONS: dict[str, Callable[[float], float]] = {
    "exponential": lambda v: math.exp(-v),
    "exponential of a large one": lambda v: math.exp(-300 * v),
    "root": math.sqrt,
    "root of a large one": lambda v: math.sqrt(300 * v),
    "cosine": math.cos,
    "cosine of a large one": lambda v: math.cos(300 * v),
    "half a cosine": lambda v: 0.5 * (1 + math.cos(v)),
    "tangent": math.tanh,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_losses_are_a_condition(name: str) -> None:
    """Losses are numbers of 32 bits, of which large ones have few behind the point."""
    changed = scheduled(lambda i, v: FUNCTIONS[name](v))
    assert READ in train(changed).engine.step.ledger.conditions


def test_a_number_that_several_constants_multiply_is_a_condition() -> None:
    """A product of rounded losses has few digits in each factor."""
    scale = [0.7]

    def next_scale(i: int, v: float) -> float:
        scale[0] *= (9000 + int(v * 10000) % 1000) / 10000 if i else 1
        return scale[0]

    assert READ in train(scheduled(next_scale)).engine.step.ledger.conditions


def test_schedules_are_a_condition_once_counts_are_read() -> None:
    def body(run: Run, x: Tensor, y: Tensor, i: int) -> None:
        (F.cross_entropy(run.module(x), y) * math.exp(-i / 7)).backward()
        (y == 1).sum().item()

    assert READ in train(body).engine.step.ledger.conditions


SCALED: dict[str, Body] = {
    "inputs": lambda r, x, y, i: F.cross_entropy(r.module(x / len(x)), y).backward(),
    "outputs": lambda r, x, y, i: F.cross_entropy(r.module(x) * (8 / len(x)), y).backward(),
}


@pytest.mark.parametrize("name", SCALED)
def test_what_was_released_before_a_scale_by_the_size_showed_is_not_certified(name: str) -> None:
    run = Run(noise_multiplier=1.0, unsafe_seed=None)

    def train_on() -> None:
        for _ in range(9):
            for x, y in run.loader:
                run.optimizer.zero_grad()
                SCALED[name](run, x, y, 0)
                run.optimizer.step()

    with pytest.raises(UnsupportedModule, match="followed the number of samples"):
        train_on()
    assert run.engine.step.steps >= 2
    assert run.engine.get_epsilon(DELTA) == math.inf

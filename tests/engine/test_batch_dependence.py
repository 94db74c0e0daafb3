"""Rounding can make a record's gradient depend on its batch: how much, and which reports say so."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpkern import DPStep, InvalidInput
from dpkern.audit.subjects.model import sums_without_noise
from dpkern.engine.capture import Capture
from dpkern.engine.clipping import close_into, prepare
from dpkern.privacy.accounting import Ledger
from dpkern.privacy.accounting.history import (
    BATCHED_BITS,
    NOTHING,
    REAL_SUMS,
    RELEASED_BITS,
    scope_for_batched_gradients,
)
from dpkern.privacy.mechanisms import DPSGD, LaplaceSGD
from tests.engine.engine_run import DELTA, Run

EXACT = DPSGD(noise_multiplier=1.0, max_grad_norm=1.0, arithmetic="exact")
UNITS = 2.0**20
"""Units of the integer sums in a norm bound of 1 with noise 1."""


def weighted(outputs: Tensor, weights: Tensor) -> Tensor:
    """A loss whose gradients at the outputs are given, so that a model cannot round them."""
    return (outputs * weights).sum()


def moved(
    module: nn.Module, loss: Any, *, batch: int = 7, seed: int | None = None, auto: bool = False
) -> Tensor:
    """By how many units one more record moves the integer sums of ``batch`` others."""
    generator = torch.Generator().manual_seed(1)
    shape = (1, 8, 8) if any(isinstance(each, nn.Conv2d) for each in module.modules()) else (20,)
    x = torch.randn(batch + 1, *shape, generator=generator)
    given = loss is weighted
    y = torch.randn(batch + 1, 10, generator=generator) if given else torch.arange(batch + 1) % 10
    reduction = "sum" if given else loss.reduction

    def backward(rows: tuple[Tensor, Tensor]) -> None:
        with torch.random.fork_rng(devices=[]):
            if seed is not None:
                torch.manual_seed(seed)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=auto):
                outputs = module(rows[0])
            loss(outputs.float(), rows[1]).backward()

    def sums(rows: slice) -> Tensor:
        found = sums_without_noise(EXACT, module, reduction, None, backward, (x[rows], y[rows]))
        return torch.cat([total.flatten() for total in found]) * UNITS

    return sums(slice(None)) - sums(slice(batch)) - sums(slice(batch, None))


def network(*layers: nn.Module) -> nn.Module:
    """The layers with parameters from a fixed seed."""
    made = nn.Sequential(*layers)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in made.parameters():
            param.copy_(0.3 * torch.randn(param.shape, generator=generator))
    return made


MODELS = {
    "linear": lambda: network(nn.Linear(20, 10)),
    "mlp": lambda: network(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 10)),
    "conv": lambda: network(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 10)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_mean_over_the_batch_moves_the_others_by_rounding(name: str) -> None:
    """It divides every gradient by the batch size, and the clipping multiplies it back."""
    units = moved(MODELS[name](), nn.CrossEntropyLoss())
    # Integers of one position are products of vectors, of which an entry rarely rounds otherwise.
    assert int(units.count_nonzero()) > 0 or name != "conv"
    most = 8 if name == "conv" else 2**11
    assert float(units.abs().max()) <= 7 * most  # units for each record, of 2^20


def test_gradients_of_a_linear_layer_from_given_rows_depend_on_no_other() -> None:
    """Where input and output gradient are given, rows are products of rows."""
    assert not moved(network(nn.Linear(20, 10)), weighted).any()


def test_a_mean_in_16_bits_moves_them_much_further() -> None:
    single, half = (
        float(moved(MODELS["mlp"](), nn.CrossEntropyLoss(), auto=auto).norm() / UNITS)
        for auto in (False, True)
    )
    assert single < 1e-4 < 1e-3 < half


def test_masks_from_a_known_seed_move_them_without_limit_but_the_bound() -> None:
    """One record more and every mask behind the first layer is another."""
    made = network(nn.Linear(20, 64), nn.Dropout(), nn.Linear(64, 64), nn.Dropout(), *LAST)
    far = float(moved(made, nn.CrossEntropyLoss(reduction="sum"), seed=3).norm() / UNITS)
    assert 0.5 < far <= 2 * 7


LAST = (nn.Tanh(), nn.Linear(64, 10))


def rows(module: nn.Module, x: Tensor, *, auto: bool) -> list[Tensor]:
    """The per-sample gradients of one batch, with masks from one seed."""
    capture = Capture(module)
    params = [p.detach() for p in capture.parameters]
    step = DPStep(EXACT, params, expected_batch_size=1, sample_rate=1.0, gradients="batched")
    prepare(capture, lambda: step.plan)
    capture.attach()
    capture.begin_batch(len(x))
    with torch.random.fork_rng(devices=[]), torch.autocast("cpu", torch.bfloat16, auto):
        torch.manual_seed(3)
        outputs = module(x)
    nn.functional.cross_entropy(outputs.float(), torch.arange(len(x)) % 10).backward()
    found = [arrival.record.per_sample() for slot in capture.slots for arrival in slot.arrivals]
    capture.detach()
    return [gradient.flatten(1) for gradient in found]


@pytest.mark.parametrize("auto", [False, True], ids=["single", "autocast"])
@pytest.mark.parametrize("layers", [(), (nn.Dropout(),)], ids=["plain", "masks"])
def test_replacing_a_record_moves_no_other(layers: tuple[nn.Module, ...], auto: bool) -> None:
    """Rounding and masks go by sizes and positions, and these stay what they are."""
    module = network(nn.Linear(20, 64), *layers, nn.Linear(64, 64), *layers, *LAST)
    x = torch.randn(8, 20, generator=torch.Generator().manual_seed(1))
    other = torch.cat([x[:3], 50 * x[4:5], x[4:]])
    found = [rows(module, each, auto=auto) for each in (x, other)]
    for before, after in zip(*found, strict=True):
        changed = (before != after).any(1).nonzero().flatten().tolist()
        assert changed == [3]


@pytest.mark.parametrize(
    ("mechanism", "length"),
    [(EXACT, math.sqrt(44)), (LaplaceSGD(noise_multiplier=1.0, max_grad_norm=1.0), 44)],
    ids=["gaussian", "laplace"],
)
def test_an_engine_never_certifies_released_bits_as_such(mechanism: Any, length: float) -> None:
    run = Run(unsafe_seed=None, mechanism=mechanism, noise_multiplier=None, max_grad_norm=None)
    run.train(most=2)
    step = run.engine.step
    assert (step.plan.arithmetic, step.plan.dimension) == ("exact", 44)
    report = run.engine.report(DELTA)
    assert report["certificate"]["certified_for"] == BATCHED_BITS
    assert any("depend on the other records" in note for note in report["certificate"]["notes"])
    assert {e["certified_for"] for e in step.ledger.state_dict()["entries"]} == {BATCHED_BITS}
    batch = math.ceil(step.expected_batch_size)
    assert report["worst_case_batch_sensitivity"] == 1 + 2 * batch
    each = step.plan.noise_multiplier * batch * length / 2**20
    assert report["batch_sensitivity_per_unit"] == pytest.approx(each, rel=1e-12)


def test_the_same_step_on_given_gradients_is_certified_for_released_bits() -> None:
    numbers: dict[str, Any] = {"expected_batch_size": 4, "sample_rate": 0.1}
    epsilons = {}
    for gradients, words in (("given", RELEASED_BITS), ("batched", BATCHED_BITS)):
        step = DPStep(EXACT, [torch.zeros(3)], gradients=gradients, **numbers)
        step.add([torch.ones(2, 3)])
        step.finish()
        report = step.report(DELTA)
        epsilons[gradients] = report["epsilon_certified"]
        assert report["certificate"]["certified_for"] == words
        assert ("batch_sensitivity_per_unit" in report) == (gradients == "batched")
    assert epsilons["given"] == epsilons["batched"]
    with pytest.raises(InvalidInput, match="gradients"):
        DPStep(EXACT, [torch.zeros(3)], gradients="captured", **numbers)


def test_captured_gradients_are_no_given_ones() -> None:
    model = network(nn.Linear(20, 10))
    capture = Capture(model)
    params = [p.detach() for p in capture.parameters]
    step = DPStep(EXACT, params, expected_batch_size=4, sample_rate=0.1)
    with pytest.raises(InvalidInput, match="batched"):
        close_into(step, capture)


def test_an_old_checkpoint_loads_and_says_what_is_proved() -> None:
    """Before there were two statements its entries said released bits."""
    first, second = (
        Run(unsafe_seed=None, arithmetic="exact"),
        Run(unsafe_seed=None, arithmetic="exact"),
    )
    first.train(most=2)
    state = copy.deepcopy(first.engine.state_dict())
    for entry in state["step"]["ledger"]["entries"]:
        entry["certified_for"] = RELEASED_BITS
    second.engine.load_state_dict(state)
    assert second.engine.step.certify(DELTA).certified_for == BATCHED_BITS
    assert second.engine.get_epsilon(DELTA) == first.engine.get_epsilon(DELTA)


def test_the_weakest_statement_of_a_history_stands() -> None:
    ledger = Ledger(batched=True)
    ledger.record(EXACT, sample_rate=0.1)
    other = Ledger()
    other.record(EXACT, sample_rate=0.1)
    assert other.certify(DELTA).certified_for == RELEASED_BITS
    other.load_state_dict(ledger.state_dict())
    other.record(EXACT, sample_rate=0.1)
    assert other.certify(DELTA).certified_for == BATCHED_BITS
    float_sums = DPSGD(noise_multiplier=1.0, max_grad_norm=1.0, arithmetic="float")
    ledger.record(float_sums, sample_rate=0.1)
    assert ledger.certify(DELTA).certified_for == REAL_SUMS
    assert [scope_for_batched_gradients(kind) for kind in (REAL_SUMS, NOTHING)] == [
        REAL_SUMS,
        NOTHING,
    ]

"""Whole private steps: what is counted in a run of them equals the closed form, phase by phase."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from dpkern import DPStep, PrivacyEngine, survey
from dpkern.base.counts import Counts, Itemised
from dpkern.base.errors import InvalidInput
from dpkern.base.rng import Key, Purpose
from dpkern.cost import counting, step_systems, steps
from dpkern.cost.phases import CLIP, ELSEWHERE, LEARN, UPDATE, by_phase
from dpkern.privacy.mechanisms import (
    Directional,
    LabelMechanism,
    Mechanism,
    MechanismState,
    RandomizedResponse,
    SpectralDP,
)
from tests.cost.step_count_cases import CASES, Case

DRAWS = 50


def counted(case: Case) -> Itemised:
    """Count one run of the step."""
    torch.manual_seed(case.draw.randrange(2**31))
    step = case.step()
    given = case.given(step)
    return counting.count(lambda: case.run(step, given)).items


def form(case: Case) -> Itemised:
    """The same in closed form; after ``counted``, which draws the samples."""
    return by_phase(
        steps.form(
            case.mechanism,
            case.shapes,
            case.batch,
            dtype=case.dtype,
            rule=case.rule,
            clipped=case.clipped,
            number=case.number,
            samples=case.samples,
            moved=case.moved,
        )
    )


@pytest.mark.parametrize("name", CASES)
def test_counted_is_the_closed_form(name: str) -> None:
    draw = random.Random(name)
    for _ in range(DRAWS):
        case = CASES[name](draw)
        assert exact(counted(case)) == exact(form(case)), case


def exact(items: Itemised) -> dict[tuple[str, str], Counts]:
    """Return counts by phase and kind, without what depends on the noise."""
    return {(i.name, i.kind): i.counts for i in items.items if i.kind != "random"}


def test_randomized_response() -> None:
    draw = random.Random(0)
    for _ in range(DRAWS):
        k, n = draw.randint(2, 9), draw.randint(1, 30)
        mechanism = RandomizedResponse(
            epsilon=draw.uniform(0.1, 5.0),
            categories=k,
            mode=draw.choice(("published", "corrected")),
        )
        dtype = draw.choice((torch.uint8, torch.int32, torch.int64))
        values = torch.tensor([draw.randrange(k) for _ in range(n)], dtype=dtype)
        stream = Key.from_unsafe_seed(n).stream(Purpose.SYMBOLS, 0)

        def run(m: RandomizedResponse = mechanism, v: torch.Tensor = values) -> torch.Tensor:
            return m.estimate(m.randomize(v, stream=stream))  # noqa: B023

        found = counting.count(run).items
        assert exact(found) == exact(by_phase(steps.response(mechanism, n, dtype=dtype)))


def test_an_added_operation_is_seen() -> None:
    case = CASES["dpsgd flat"](random.Random(1))
    step = case.step()
    given = case.given(step)
    found = counting.count(lambda: (case.run(step, given), step.params[0] + 1)).items
    n = step.params[0].numel()
    assert exact(found) == exact(form(case)) | {
        (ELSEWHERE, "exact"): Counts(ADD=n, LOAD=n, STORE=n)
    }


@pytest.mark.parametrize("name", ["adaclip corrected", "directional elliptic", "pruned previous"])
def test_an_operation_added_to_a_mechanism_is_seen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name](random.Random(2))
    mechanism = type(case.mechanism)
    learn = mechanism.learn

    def more(self: Mechanism, memory: MechanismState, gradients: Sequence[torch.Tensor]) -> None:
        learn(self, memory, gradients)
        gradients[0].neg_()

    monkeypatch.setattr(mechanism, "learn", more)
    found, wanted = exact(counted(case)), exact(form(case))
    n = torch.Size(case.shapes[0]).numel()
    changed = {phase for phase in found if found[phase] != wanted[phase]}
    assert changed == {(LEARN, "exact")}
    added = found[LEARN, "exact"] - wanted.get((LEARN, "exact"), Counts())
    assert added == Counts(SUB=n, LOAD=n, STORE=n)


@pytest.mark.parametrize("name", step_systems.systems())
def test_a_system_is_the_step_that_it_names(name: str) -> None:
    n, code = 5, 3
    system = step_systems.systems()[name]
    mechanism = system.make(n, code)
    if isinstance(mechanism, LabelMechanism):
        assert system(n, code) == steps.response(mechanism, n)
        return
    shapes = [site.shape for site in system.sites(n, code)]
    torch.manual_seed(1)
    params = [torch.randn(shape) for shape in shapes]
    step = DPStep(
        mechanism,
        params,
        expected_batch_size=1,
        optimizer=step_systems.RULE,
        unsafe_seed=1,
        **(mechanism.sampling or {"sample_rate": 0.2}),
    )

    large = [torch.full((1, *shape), 1e4) for shape in shapes]

    def run() -> None:
        step.add(large)
        step.finish()
        mechanism.project(params)

    run()
    for parameter in params:
        parameter.mul_(100)  # outside of any ball
    assert exact(counting.count(run).items) == exact(by_phase(system(n, code)))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"batch": 0}, "batch"),
        ({"clipped": (1, 1)}, "clipped"),
        ({"clipped": 3}, "clipped"),
        ({"samples": "operands"}, "samples"),
        ({"dtype": torch.float16}, "dtype"),
        ({"mechanism": RandomizedResponse(epsilon=1.0)}, "mechanism"),
    ],
    ids=["batch", "groups", "clipped", "operands", "dtype", "symbols"],
)
def test_refused(changes: dict[str, Any], word: str) -> None:
    given: dict[str, Any] = {
        "mechanism": Directional(noise_multiplier=1.0, max_grad_norm=1.0, shape="elliptic"),
        "shapes": [(2, 3)],
        "batch": 2,
    }
    given |= changes
    with pytest.raises(InvalidInput, match=word):
        steps.form(given.pop("mechanism"), given.pop("shapes"), given.pop("batch"), **given)


@pytest.mark.parametrize("mode", ["published", "corrected"])
def test_a_step_of_the_engine_can_be_counted(mode: str) -> None:
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(2, 3, 3), torch.nn.Flatten(), torch.nn.Linear(12, 2)
    model = torch.nn.Sequential(*layers)
    inputs, labels = torch.randn(12, 2, 4, 4), torch.zeros(12, dtype=torch.long)
    mechanism = SpectralDP(
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sites=survey(model, inputs[:1]),
        mode=mode,
        clipping="flat",
    )
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(inputs, labels), batch_size=12),
        mechanism=mechanism,
    )
    x, y = next(iter(loader))
    torch.nn.functional.cross_entropy(model(x), y).backward()
    found = exact(counting.count(optimizer.step).items)
    # Sums are noised in their coordinates inside the update; those of integers come so from the
    # backward pass.
    assert {phase for phase, _ in found} == {CLIP, UPDATE}


def test_what_the_table_does_not_know_is_refused() -> None:
    x = torch.rand(3)
    with pytest.raises(InvalidInput, match=r"aten\.erfinv"):
        counting.count(lambda: torch.erfinv(x))

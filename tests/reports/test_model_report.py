"""The report of a real model's step: everything is attributed, and everything adds up."""

from __future__ import annotations

import gc
import json
import math
import sys
import types
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import cache
from itertools import count

import pytest
import torch
from torch import nn

from dpkern.base import dispatch
from dpkern.base.dispatch import OPS
from dpkern.base.errors import DPKernError, InvalidInput, UnsupportedModule
from dpkern.base.op_cost import Cost
from dpkern.base.rng import Key, Purpose
from dpkern.engine.parameter import PrivateParameter
from dpkern.engine.subject import BenchmarkModel, subject
from dpkern.ops import ghost, update
from dpkern.privacy.mechanisms import DPSGD
from dpkern.reports import layers, model, roofline
from dpkern.reports.measured import Measured, Side, fields_of, measure
from dpkern.reports.model import report
from dpkern.reports.trace import PHASES, REST, ROOT, StepTracer, phase_of

FLAT = DPSGD(noise_multiplier=1.0, max_grad_norm=1.0, arithmetic="float")
PER_LAYER = DPSGD(noise_multiplier=1.0, max_grad_norm=1.0, arithmetic="float", clipping="per_layer")
EXACT = DPSGD(noise_multiplier=1.0, max_grad_norm=1.0, arithmetic="exact")

ONE_LAYER = ("ghost.conv_", "ghost.linear_", "ghost.embedding_", "product.")


@pytest.fixture(scope="module", autouse=True)
def nothing_old_to_collect() -> None:
    """Leave out objects of earlier files: each measurement collects garbage first."""
    gc.freeze()


class Shortcut(nn.Module):
    """Two convolutions of one input, a normalisation, and a linear layer of many positions."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.point = nn.Conv2d(2, 4, 1)
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(64, 3)
        self.shift = nn.Parameter(torch.zeros(4, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.wide(x) + self.point(x) + self.shift
        return self.head(self.norm(y).relu().flatten(2).flatten(1))


class Words(nn.Module):
    """An embedding table, and logits at every position."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Linear(6, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        return self.head(self.attention(x, x, x, need_weights=False)[0])


def words() -> tuple[nn.Module, torch.Tensor]:
    return Words(), torch.arange(12).reshape(3, 4) % 7


@pytest.fixture(scope="module", autouse=True)
def words_module():
    """``report_words:words`` as a module that can be imported."""
    made = types.ModuleType("report_words")
    made.words, made.number, made.module = words, lambda: 3, Shortcut
    sys.modules["report_words"] = made
    yield
    del sys.modules["report_words"]


SUBJECTS = {
    "mlp": lambda: subject("mlp", batch_size=3),
    "shortcut": lambda: subject(Shortcut(), batch_size=3, row_shape=(2, 4, 4)),
    "words": lambda: subject("report_words:words", batch_size=4),
    "transformer": lambda: subject("transformer", batch_size=2),
}
CASES = [
    ("mlp", FLAT),
    ("mlp", EXACT),
    ("shortcut", FLAT),
    ("shortcut", PER_LAYER),
    ("shortcut", EXACT),
    ("words", FLAT),
    ("transformer", PER_LAYER),
]


QUICK = (0, 2, 3, 5)
"""Cases of the gate; the others are measured by ``make test-slow``."""


@pytest.fixture(scope="module")
def cases() -> Callable[[int], tuple[BenchmarkModel, Measured]]:
    """Each case is measured once, when a test asks for it."""

    @cache
    def measured(index: int) -> tuple[BenchmarkModel, Measured]:
        name, mechanism = CASES[index]
        made = SUBJECTS[name]()
        return made, measure(made, mechanism, rounds=1)

    return measured


@pytest.fixture(
    params=[
        i if i in QUICK else pytest.param(i, marks=pytest.mark.slow) for i in range(len(CASES))
    ],
    ids=lambda i: f"{CASES[i][0]}-{i}",
)
def case(request, cases) -> tuple[BenchmarkModel, Measured]:
    return cases(request.param)


def test_every_op_belongs_to_a_phase_or_to_where_it_is_called():
    anywhere = {name for name in OPS if phase_of(name) is None}
    assert anywhere == {
        "coef.descend",
        "coef.expanded",
        "coef.perturb",
        "coef.quadratic",
        "ghost.layer_norm_backward",
        "ghost.rms_norm_backward",
        "ghost.group_norm_backward",
        "product.matmul",
        "recurrent.gru",
        "recurrent.gru_backward",
        "recurrent.lstm",
        "recurrent.lstm_backward",
        "recurrent.rnn",
        "recurrent.rnn_backward",
        "spectral.circulant_product",
        "symbols.randomize",
    }
    assert {phase_of(name) for name in OPS} - {None} <= set(PHASES)


def test_phases_and_layers_add_up_to_the_step(case):
    made, measured = case
    rows = layers.rows_of(made.model, measured)
    for side, name in ((measured.private, "private_seconds"), (measured.plain, "plain_seconds")):
        step = sum(side.seconds.values())
        assert min(side.seconds.values()) >= 0
        assert {phase for phase, _ in side.seconds} <= set(PHASES)
        assert sum(getattr(row, name) for row in rows) == pytest.approx(step, rel=1e-9)
    inside = sum(call.seconds for call in measured.private.ops)
    assert 0 < inside < sum(measured.private.seconds.values())


def test_declared_numbers_of_layers_are_those_of_their_calls(case):
    made, measured = case
    side = measured.private
    rows = layers.rows_of(made.model, measured)
    for i, field in enumerate(fields(Cost)):
        declared = sum(fields_of(call.cost)[i] for call in side.ops)
        counted = {"bytes_read": "bytes", "flops": "flops"}.get(field.name)
        if counted:
            declared += sum(getattr(moved, counted) for moved in side.moved.values())
        assert sum(fields_of(row.private)[i] for row in rows) == declared
    assert sum(row.plain.bytes for row in rows) == sum(
        m.bytes for m in measured.plain.moved.values()
    )


def test_every_call_is_attributed(case):
    made, measured = case
    known = {row.layer for row in layers.rows_of(made.model, measured)} - {REST}
    for call in measured.private.ops:
        assert {layer for layer, _ in call.shares} <= known
        assert call.backend in dispatch.BACKENDS
        if call.op.startswith(ONE_LAYER):
            assert len(call.shares) == 1, call.op
    for parameterised in known:
        phases = {c.phase for c in measured.private.ops if parameterised in dict(c.shares)}
        assert {"sums", "update"} <= phases, parameterised


def test_noise_is_apart_from_the_update_and_both_are_the_fused_calls(case):
    _, measured = case
    side = measured.private
    split = {phase: sum(s for (p, _), s in side.seconds.items() if p == phase) for phase in PHASES}
    fused = sum(call.seconds for call in side.ops if call.op.startswith(("update.", "noise.")))
    assert fused > 0
    assert split["noise"] + split["update"] == pytest.approx(fused)


@pytest.mark.parametrize(("alone", "noise", "rest"), [(0.25, 0.75, 0.25), (4.0, 0.0, 1.0)])
def test_noise_of_an_update_is_what_it_takes_longer_than_without(monkeypatch, alone, noise, rest):
    model = torch.nn.Linear(6, 2, bias=False)
    tracer = StepTracer(model, clock=count().__next__)  # every call takes one second
    monkeypatch.setattr(tracer, "_without_noise", lambda *_: alone)
    rule = update.SGD(lr=0.1)
    params = [model.weight.detach()]
    with tracer.running("between ops"), tracer.watching():
        update.step(params, [torch.zeros(2, 6)], rule=rule, state=rule.init(params))
    booked = {phase: s for (phase, _), s in tracer.seconds.items()}
    assert booked.get("noise", 0.0) == noise
    assert booked["update"] == rest


@pytest.mark.parametrize("whole", [False, True])
def test_looking_at_an_update_without_its_noise_changes_nothing(whole):
    model, found = torch.nn.Linear(600, 2, bias=False), []
    rule = update.SGD(lr=0.1, momentum=0.9)
    for traced in (False, True):
        params = [model.weight.detach().clone()]
        sums = [torch.arange(1200, dtype=torch.float32).reshape(2, 600)]
        if whole:
            sums = [sums[0].to(torch.int32)]
        state = rule.init(params)
        noise = update.Noise(
            distribution="gaussian",
            scales=(2.0,),
            stream=Key.from_unsafe_seed(0).stream(Purpose.NOISE, 0),
            positions=(0,),
            rounding=Key.from_unsafe_seed(0).stream(Purpose.ROUNDING, 0),
        )
        tracer = StepTracer(model)
        with tracer.running("between ops"), tracer.watching() if traced else nullcontext():
            update.step(params, sums, rule=rule, state=state, noise=noise)
        assert len(tracer.calls) == traced
        found.append((params[0], sums[0], *state.buffers["momentum_buffer"]))
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


def test_layers_that_share_an_input_get_their_own_work(cases):
    for index in (2, 3):
        measured = cases(index)[1]
        x, g = torch.zeros(3, 2, 4, 4), torch.zeros(3, 4, 4, 4)
        for layer, kernel, padding in (("wide", 3, 1), ("point", 1, 0)):
            geometry = {"kernel_size": (kernel, kernel), "padding": (padding, padding)}
            geometry |= {"stride": (1, 1), "dilation": (1, 1), "groups": 1}
            names = ("ghost.conv_norm", "ghost.conv_gradient")
            mine = [
                call
                for call in measured.private.ops
                if call.op in names and [name for name, _ in call.shares] == [layer]
            ]
            assert len(mine) == 1
            assert mine[0].cost == OPS[mine[0].op].cost(x, g, **geometry)


def test_random_words_are_those_of_the_plan(case):
    _, measured = case
    declared = sum(call.cost.random_words for call in measured.private.ops)
    assert declared == measured.engine.step.plan.words["produced"]


def test_joint_work_is_divided_by_parameters(cases):
    _, measured = cases(0)
    shares = {call.op: dict(call.shares) for call in measured.private.ops}
    assert shares["update.step"] == {"1": 64 * 64 + 64, "3": 64 * 10 + 10}
    assert shares["ghost.contract"] == shares["ghost.explicit_norm"] == {"1": 64, "3": 10}
    words = {layer: cost.random_words for layer, cost in measured.private.by_layer().items()}
    assert words["1"] / words["3"] == pytest.approx(4160 / 650, rel=1e-3)


def test_flops_of_torch_are_those_of_its_products(cases):
    measured = cases(2)[1]
    flops = {layer: cost.flops for layer, cost in measured.plain.by_layer().items()}
    forward = 2 * 3 * 16 * 4 * 2  # B, positions, channels out and in
    assert flops["wide"] == 9 * 2 * forward  # forward and weight: the data have no gradient
    assert flops["point"] == 2 * forward
    assert flops["head"] == 3 * 2 * 3 * 64 * 3
    assert flops["norm"] == flops[ROOT] == flops[REST] == 0


def test_what_runs_inside_an_op_is_not_counted_again():
    with dispatch.use("reference"):
        measured = measure(subject("mlp", batch_size=3), FLAT, rounds=1)
    assert {call.backend for call in measured.private.ops} == {"reference"}
    assert sum(moved.flops for moved in measured.private.moved.values()) == 0
    assert sum(moved.flops for moved in measured.plain.moved.values()) > 0


def test_the_report_is_whole(monkeypatch):
    monkeypatch.setattr(roofline, "measure_limits", lambda: roofline.Limits(1e10, 1e11))
    made = Shortcut()
    before = [p.clone() for p in made.parameters()]
    found = report(made, batch_size=2, row_shape=(2, 4, 4), rounds=3, threads=1)
    assert all(torch.equal(a, b) for a, b in zip(before, made.parameters(), strict=True))
    assert not any(isinstance(p, PrivateParameter) for p in made.parameters())
    assert found.name == "model-Shortcut"
    for table in found.tables:
        assert table.rows
        assert {len(row) for row in table.rows} == {len(table.columns)}
    names = [figure.name for figure in found.figures]
    assert names == [
        *("phases", "layer-time", "layer-bytes", "layer-flops", "layer-ratios", "roofline"),
    ]
    for figure in found.figures:
        assert all(len(series.x) == len(series.y) > 0 for series in figure.series)
    facts = json.loads(json.dumps(found.facts, allow_nan=False))
    assert facts["batch_size"], facts["rounds"] == (2, 3)
    assert facts["parameters"] == sum(p.numel() for p in made.parameters())
    phases = facts["phases"]["private"]
    assert math.isclose(sum(phases.values()), facts["traced_seconds"]["private"], rel_tol=1e-9)
    whole = found.tables[0].rows[-1]  # the headline's numbers, and the table's
    assert whole[1] == pytest.approx(1e3 * facts["step_seconds"]["private"])
    assert whole[3] == pytest.approx(facts["ratio"])
    assert f"{whole[3]:.4g} times" in found.summary
    assert f"takes {whole[1]:.4g} ms" in found.summary
    assert f"the {whole[2]:.4g} ms" in found.summary
    assert len(facts["calls"]) == sum(op["calls"] for op in facts["ops"])
    assert [row["layer"] for row in facts["layers"]] == [
        *(ROOT, "wide", "point", "norm", "head", REST),
    ]
    for end in ("low", "high"):
        own = facts["energy"]["private"][end]
        parts = own["computing"] + own["random words"] + own["memory"]
        assert own["joules"] == pytest.approx(parts)
    assert bool(facts["hardware_counters"]["note"]) != bool(facts["hardware_counters"]["private"])


def test_a_mechanism_by_name_has_its_noise_attributed():
    made = subject("gredp-lenet5", batch_size=2, row_shape=(1, 12, 12))
    measured = measure(made, model._mechanism("spectral_dp", made), rounds=1)
    calls = measured.private.ops
    assert not [call for call in calls if call.op == "noise.add_noise"]
    updated = [call for call in calls if call.op == "update.step"]
    assert updated
    convolutions = {n for n, m in made.model.named_modules() if isinstance(m, nn.Conv2d)}
    assert all({name for name, _ in call.shares} >= convolutions for call in updated)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"model": "resnet1000"}, "model"),
        ({"model": "no_such_module:net"}, "model"),
        ({"model": "report_words:net"}, "model"),
        ({"model": "report_words:number"}, "model"),
        ({"model": "report_words:module"}, "row_shape"),
        ({"model": nn.Identity(), "row_shape": (1,)}, "model"),
        ({"model": "lenet5", "row_shape": (3, 5)}, "model"),
        ({"model": "mlp", "row_shape": ()}, "row_shape"),
        ({"model": "mlp", "row_shape": (0,)}, "row_shape"),
        ({"model": Shortcut(), "row_shape": (3, 4, 4)}, "row_shape"),
        ({"model": "mlp", "batch_size": 1}, "batch_size"),
        ({"model": "mlp", "rounds": 0}, "rounds"),
        ({"model": "mlp", "threads": 0}, "threads"),
        ({"model": "mlp", "mechanism": "nothing"}, "mechanism"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_measured_is_refused(arguments, name):
    with pytest.raises(InvalidInput) as caught:
        report(**arguments)
    assert caught.value.name == name


def test_the_engine_refuses_as_ever():
    mixing = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with pytest.raises(UnsupportedModule):
        measure(subject(mixing, batch_size=2, row_shape=(3,)), FLAT, rounds=1)
    with pytest.raises(DPKernError):
        report("mlp", mechanism="randomized_response", rounds=1)


def test_who_would_run_a_call_is_told_without_running_it():
    a, g = torch.ones(2, 3, 4), torch.ones(2, 3, 5)
    assert ghost.linear_norm.backend_of(a, g, backend="reference") == "reference"
    with dispatch.use("reference"):
        assert ghost.linear_norm.backend_of(a, g) == "reference"
    with pytest.raises(InvalidInput):
        ghost.linear_norm.backend_of(a, torch.ones(1))


def test_unsteady_times_are_said(case):
    made, measured = case
    side = Side(plain=[0.1, 0.11], traced=[{("forward", "0"): 0.12}], calls=[[]])
    slow = Side(plain=[0.1, 0.31], traced=[{("forward", "0"): 0.12}], calls=[[]])
    for plain, warned in ((side, False), (slow, True)):
        summary = model._summary(made, replace(measured, private=side, plain=plain), FLAT)
        assert ("3.1-fold" in summary) == warned

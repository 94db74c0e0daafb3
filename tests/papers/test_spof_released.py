"""The authors' protocol of SPOF: its gradient, its collapse, and the runs that they published."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dpkern.base.errors import InvalidInput
from dpkern.papers import ItemRequest, reproduce
from dpkern.papers.intervals import Interval
from dpkern.papers.pieces import CachedRun
from dpkern.papers.runner import ItemPlanned
from dpkern.papers.spof import (
    protocol_constants,
    protocol_corrected,
    protocol_verdicts,
    raw_results,
)
from dpkern.papers.spof.protocol_runs import (
    NOISY_SPOF,
    TABLE,
    Protocol,
    ProtocolRuns,
    as_released,
    protocol,
)
from dpkern.papers.spof.raw_results import EPSILONS
from dpkern.papers.spof.released import (
    CODE,
    CONSTANT,
    DPSGD,
    FEATURES,
    FM,
    LOSS,
    NON_PRIVATE,
    RECORD,
    SPOF,
    ReleasedMethod,
    ReleasedTraining,
    constant_accuracy,
    expanded,
)
from dpkern.papers.verdict import FAILS, HOLDS, UNDECIDED, Verdict, of_number


def some_rows(count: int) -> torch.Tensor:
    return torch.rand(count, FEATURES, generator=torch.Generator().manual_seed(1)).double() + 0.1


def training(method: ReleasedMethod, runs: int = 2, rows: int = 40) -> ReleasedTraining:
    data = expanded(some_rows(rows), 0, copies=())
    return ReleasedTraining(method, [1.0] * runs, range(runs), lambda seed: data)


def loss_by_autograd(
    made: ReleasedTraining, x: torch.Tensor, sensors: torch.Tensor | None, n: torch.Tensor | float
) -> torch.Tensor:
    """The gradient of the loss in the module's docstring, through the layers alone or whole."""
    method, now = made.method, made.now
    parts = [
        part.detach().clone().requires_grad_()
        for part in (now.encoder, now.encoder_bias, now.decoder, now.decoder_bias)
    ]
    encoder, encoder_bias, decoder, decoder_bias = parts
    e = torch.sigmoid(torch.einsum("rukf,rf->ruk", encoder, x) + encoder_bias)
    y = torch.sigmoid(torch.einsum("ruik,ruk->ri", decoder, e) + decoder_bias)
    if method.name == NON_PRIVATE:
        target = x if sensors is None else x + sensors
        total = torch.nn.functional.binary_cross_entropy_with_logits(y, target, reduction="none")
        total.mean(1).sum().backward()
        return torch.cat([p.grad.flatten(1) for p in parts], 1)
    weights = decoder if method.gradient == LOSS else decoder.detach()
    z = torch.einsum("ruik,ruk->rui", weights + method.constant, e)
    k: torch.Tensor | float = 1.0
    if sensors is not None:
        v = torch.einsum("rkf,rf->rk", encoder[:, 0].detach(), sensors)
        code = e[:, 0] if method.name != FM else e[:, 0].detach()
        k = (v.exp() / (1 + (v.exp() - 1) * code)).sum(1)[:, None, None]
    t = (y if method.target != RECORD else x)[:, None]
    total = (k * (0.5 - t) + n) * z + (k * (t / 2 - 0.25) + n) * z * z
    total.sum().backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parts]
    return torch.cat([g.flatten(1) for g in grads], 1)


@pytest.mark.parametrize("sigma", [0.0, 1.0])
@pytest.mark.parametrize(
    "method",
    [
        ReleasedMethod(name=SPOF),
        ReleasedMethod(name=SPOF, target=RECORD, gradient=LOSS),
        ReleasedMethod(name=SPOF, gradient=LOSS),
        ReleasedMethod(name=FM),
        ReleasedMethod(name=NON_PRIVATE),
    ],
)
def test_the_gradient_is_that_of_the_loss(method: ReleasedMethod, sigma: float) -> None:
    made = training(replace(method, sigma=sigma))
    x = made.rows[0][:2]
    sensors = torch.randn(2, FEATURES) if sigma else None
    private = None if method.name == NON_PRIVATE else torch.randn(2, method.users, FEATURES)
    made._backward(x, sensors, private)
    n: torch.Tensor | float = 0.0
    if private is not None:
        e = torch.sigmoid(torch.einsum("rukf,rf->ruk", made.now.encoder, x) + made.now.encoder_bias)
        n = private * made._loss_scale(e, made._factor(e, sensors)[0])[:, None, None]
    wanted = loss_by_autograd(made, x, sensors, n)
    torch.testing.assert_close(made.gradient.flat, wanted, rtol=2e-4, atol=2e-4)


def test_scales_of_the_noise() -> None:
    spof, fm = training(ReleasedMethod(name=SPOF)), training(ReleasedMethod(name=FM))
    half, k = torch.full((2, 2, CODE), 0.5), torch.ones(2, 1, 1)
    shift = CONSTANT * CODE / 2
    wanted = (21 + FEATURES * shift * (shift / 2 + 2)) / math.sqrt(2)
    assert float(spof._loss_scale(half, k)[0]) == pytest.approx(wanted)
    assert wanted == pytest.approx(567, rel=0.01)
    assert float(fm._loss_scale(half, k)[0]) == pytest.approx(14.85, rel=1e-3)
    sgd = training(ReleasedMethod(name=DPSGD))
    assert sgd.scale is not None
    assert float(sgd.scale[0]) == pytest.approx(420, rel=0.05)


def test_a_column_of_zeros_stays_one() -> None:
    rows = some_rows(8)
    rows[:, 3] = 0
    made = expanded(rows, 0, copies=(2,))
    assert bool(made.isfinite().all())
    assert not made[:, 3].any()


def test_the_earlier_script_leaves_the_constants_noise_undivided() -> None:
    def scale(epsilon: float) -> float:
        made = training(replace(NOISY_SPOF, sigma=0.0))
        made.epsilon = torch.full_like(made.epsilon, epsilon)
        return float(made._loss_scale(torch.full((2, 2, CODE), 0.5), torch.ones(2, 1, 1))[0])

    shift = CONSTANT * CODE / 2
    of_constant = FEATURES * shift * (shift / 2 + 2)
    assert scale(1e6) == pytest.approx(of_constant, rel=1e-4)
    assert scale(1.0) == pytest.approx(of_constant + 21 / math.sqrt(2))


def test_adam_is_torchs() -> None:
    made = training(ReleasedMethod(name=SPOF, noise=False), runs=1)
    start = made.now.flat.clone()
    parameter = torch.nn.Parameter(start)
    optimizer = torch.optim.Adam([parameter], lr=1e-3)
    for number in range(1, 6):
        made._backward(made.rows[0][number : number + 1], None, None)
        parameter.grad = made.gradient.flat.clone()
        made._adam(number)
        optimizer.step()
        torch.testing.assert_close(made.now.flat, parameter.detach(), rtol=1e-5, atol=1e-7)


def test_own_outputs_as_targets_collapse_and_records_do_not() -> None:
    rows = some_rows(60)
    data = expanded(rows, 0, copies=(40,))
    assert float(data.max()) == 1.0
    assert len(data) == 2400
    zeros = constant_accuracy(data, 0.0)
    found = {}
    for target, gradient in (("output", "layers"), (RECORD, LOSS)):
        method = ReleasedMethod(name=SPOF, target=target, gradient=gradient, noise=False)
        made = ReleasedTraining(method, [1.0], [0], lambda seed: data)
        made.steps = made.order.shape[1]
        for epoch in range(4):
            del epoch
            found[target] = made.run()
    assert found["output"].output_mean[0] < 0.1
    assert abs(found["output"].accuracy[0] - zeros) < 0.05
    assert found[RECORD].output_mean[0] > 0.2


def test_the_authors_runs_give_the_published_numbers(tmp_path: Path) -> None:
    def runs(*means: float) -> dict[str, object]:
        return {"by_epsilon_index": {str(i): [m - 0.5, m + 0.5] for i, m in enumerate(means)}}

    table = {
        "spof_noiseless": runs(4, 4, 4, 4, 4),
        "dpsgd_noiseless": runs(1, 2, 3, 4, 5),
        "spof_noisy_sigma5": runs(3, 3, 3, 3, 3),
        "dpsgd_noisy_sigma5": runs(2, 2, 2, 2, 2),
        "nonprivate": runs(5),
    }
    (tmp_path / raw_results.FILE).write_text(json.dumps({"accuracy": table, "seconds": table}))
    raw = raw_results.load(tmp_path)
    assert raw is not None
    assert raw.gain(0.0) == pytest.approx(100 * (4 / 3 - 1))
    assert raw.gains(0.0) == pytest.approx([300, 100, 100 / 3, 0, -20])
    spof = raw.seconds[SPOF, 5.0]
    assert raw.time_saved(raw.seconds[DPSGD, 5.0], spof) == pytest.approx(100 / 3)
    assert list(raw.accuracy[NON_PRIVATE, 5.0]) == [EPSILONS[0]]
    assert raw_results.load(tmp_path / "nowhere") is None
    (tmp_path / raw_results.FILE).write_text('{"accuracy": {}}')
    with pytest.raises(InvalidInput, match=raw_results.FILE):
        raw_results.load(tmp_path)


def test_published_means_are_compared_within_two_standard_errors() -> None:
    runs = [0.8, 0.81, 0.82, 0.81, 0.8, 0.81]
    theirs = {(SPOF, 0.0): dict.fromkeys(EPSILONS, runs), (NON_PRIVATE, 5.0): {EPSILONS[0]: runs}}
    raw = raw_results.RawResults(theirs, {})
    where = Protocol(rows=some_rows(50), copies=(2,), runs=6, data="own", raw=raw)

    def judged(shift: float) -> Verdict:
        values = {e: [run + shift for run in runs] for e in EPSILONS}
        ours = ProtocolRuns(accuracy=values, mean=values, spread=values, curve=())
        # Without privacy there is one group of runs, under another name than theirs.
        free = {1.0: values[1.0]}
        other = ProtocolRuns(accuracy=free, mean=free, spread=free, curve=())
        found = {as_released(SPOF, 0.0): ours, as_released(NON_PRIVATE, 5.0): other}
        return protocol_verdicts._published(where, raw, found)

    assert (judged(0.0).verdict, judged(0.0).ours) == (HOLDS, 6.0)
    away = judged(0.05)
    assert (away.verdict, away.ours) == (FAILS, 0.0)
    assert "non-private, sensors' noise 5" in away.reason
    assert protocol_verdicts._by_chance(31) == 4
    assert protocol_verdicts._by_chance(1) == 0


def test_corrected_runs_have_rows_of_their_own_and_one_epsilon() -> None:
    where = Protocol(rows=some_rows(101), copies=(2,), runs=2, data="own, expanded", raw=None)
    data = protocol_corrected.own_rows(where)
    assert (tuple(data.train.shape), tuple(data.test.shape)) == ((2, 40, 14), (2, 10, 14))
    every = torch.cat([data.train, data.test], 1).flatten(0, 1)
    assert len(every.unique(dim=0)) == 100
    assert data.copies == 1
    found = protocol_corrected.train(ItemRequest(), where)
    private = [one for one in found if one.certified is not None]
    assert len(private) == 10
    assert all(one.certified == pytest.approx(one.epsilon, rel=5e-3) for one in private)
    assert {one.epochs for one in found} == {4, 1}
    rows = protocol_corrected.rows(where, found)
    assert rows[0].epsilon_certified is None
    assert rows[0].data == "own, not expanded"
    assert protocol_corrected.verdict(where, found).verdict == UNDECIDED


def test_published_numbers_stand_beside_the_authors_table_only(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="CSV"):
        protocol(ItemRequest(data=str(tmp_path)))
    with pytest.raises(InvalidInput, match="rows"):
        protocol(ItemRequest(rows=5))
    lines = [",".join(str(float(v)) for v in row) for row in some_rows(457)]
    (tmp_path / TABLE).write_text("\n".join(lines) + "\n")
    found = protocol(ItemRequest(quick=False, data=str(tmp_path)))
    assert found.raw is None
    assert found.steps == 29_184
    assert protocol(ItemRequest(quick=True, data=str(tmp_path / TABLE))).steps == 7_296
    own = tmp_path / "own.csv"
    own.write_text("\n".join(lines[:50]) + "\n")
    assert protocol(ItemRequest(quick=False, data=str(own))).raw is None
    (tmp_path / TABLE).write_text("\n".join(lines[:50]) + "\n")
    with pytest.raises(InvalidInput, match="456 rows"):
        protocol(ItemRequest(data=str(tmp_path)))


def test_verdicts_need_runs_and_intervals() -> None:
    held = of_number("x", 2.9, Interval(2.8, 0.2), 10, unit="%")
    assert held.verdict == HOLDS
    assert "[2.6, 3]" in held.sentence
    assert of_number("x", 2.9, Interval(2.0, 0.2), 10, unit="%").verdict == FAILS
    few = of_number("x", 2.9, Interval(2.9, 0.2), 2, unit="%")
    assert (few.verdict, few.reason) == (UNDECIDED, "2 runs are too few, 5 are needed")


def test_a_run_that_overflowed_is_left_out_of_the_gain() -> None:
    def found(accuracy: float, first: float) -> ProtocolRuns:
        values = {e: [accuracy] * 6 for e in EPSILONS}
        values[20.0] = [first, *values[20.0][1:]]
        return ProtocolRuns(accuracy=values, mean=values, spread=values, curve=())

    both = {
        ReleasedMethod(name=SPOF): found(0.9, math.nan),
        ReleasedMethod(name=DPSGD): found(0.8, 0.8),
    }
    assert protocol_verdicts._gain(both, 0.0, 6).mean == pytest.approx(12.5)


def test_stored_sweeps_are_read_and_broken_ones_are_refused(tmp_path: Path) -> None:
    table = {"nonprivate": {"by_epsilon_index": {"0": [0.5, 0.6]}}}
    sweep = {
        "commit": "0123456789",
        "c": [0, 2.5],
        "mean_accuracy": [0.6, 0.9],
        "runs_per_point": 3,
    }
    content: dict[str, object] = {"accuracy": table, "seconds": table, "c_sweep": [sweep]}
    (tmp_path / raw_results.FILE).write_text(json.dumps(content))
    raw = raw_results.load(tmp_path)
    assert raw is not None
    (found,) = raw.sweeps
    assert (found.commit, found.runs, dict(found.accuracy)) == ("01234567", 3, {0: 0.6, 2.5: 0.9})
    for broken in ({**sweep, "c": [0]}, {**sweep, "mean_accuracy": [0.6, math.nan]}, {"c": []}):
        (tmp_path / raw_results.FILE).write_text(json.dumps({**content, "c_sweep": [broken]}))
        with pytest.raises(InvalidInput, match=raw_results.FILE):
            raw_results.load(tmp_path)


def test_a_flat_sweep_is_said_to_be_that_of_a_constant() -> None:
    def runs(accuracy: float, spread: float) -> ProtocolRuns:
        values, spreads = (dict.fromkeys(EPSILONS, [one] * 5) for one in (accuracy, spread))
        return ProtocolRuns(accuracy=values, mean=values, spread=spreads, curve=())

    raw = raw_results.RawResults({}, {})
    where = Protocol(rows=some_rows(50), copies=(2,), runs=5, data="own", raw=raw)
    swept = (0.0, 2.5, 5.0)
    column = [ReleasedMethod(name=SPOF, shift=c) for c in swept]

    def judged(last: float) -> Verdict:
        found = dict(zip(column, [runs(0.6, 0.1), runs(0.9, 1e-5), runs(last, 1e-5)], strict=True))
        return protocol_constants._flat(where, swept, column, found)

    flat = judged(0.9)
    assert (flat.verdict, flat.ours) == (HOLDS, 0.0)
    assert flat.reason.startswith("at c 2.5, 5 every run gives all records the same output")
    assert judged(0.95).verdict == FAILS
    few = protocol_constants._flat(
        replace(where, runs=2), swept, column, dict.fromkeys(column, runs(0.9, 0.1))
    )
    assert few.verdict == UNDECIDED


def test_every_constant_of_the_sweep_reaches_its_runs() -> None:
    pytest.importorskip("dp_accounting")
    pieces: list[CachedRun] = []
    with pytest.raises(ItemPlanned):
        reproduce("spof", "released-fig2", ItemRequest(quick=False, seeds=1, planned=pieces))
    assert [piece.key["method"]["shift"] for piece in pieces] == [*protocol_constants.CONSTANTS] * 2
    # The run at the printed constant is that of figure 3.
    other: list[CachedRun] = []
    with pytest.raises(ItemPlanned):
        reproduce("spof", "released", ItemRequest(quick=False, seeds=1, planned=other))
    keys = [dict(piece.key) for piece in other]
    assert sum(dict(piece.key) in keys for piece in pieces) == 2
    assert len({piece.label for piece in pieces}) == len(pieces)


@pytest.mark.slow
def test_the_quick_item_says_that_it_decides_nothing() -> None:
    result = reproduce("spof", "released", ItemRequest(quick=True))
    assert {verdict.verdict for verdict in result.verdicts} == {UNDECIDED}
    assert all(row.published is None for row in result.rows)

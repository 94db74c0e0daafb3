"""Predictions: what is traced without data, what the engine calls, limits, errors, refusals."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.kernel_shares import lines_of
from dpkern import PrivacyEngine
from dpkern.base import dispatch
from dpkern.base.counts import Counts, Item, Itemised
from dpkern.base.dispatch import OPS
from dpkern.base.errors import InvalidInput
from dpkern.bench.case import sized
from dpkern.bench.cases import FACTS
from dpkern.cost import processors
from dpkern.cost._ops import shaped
from dpkern.cost.forms import FORMS
from dpkern.cost.op_time import CoresAtWork, op_time
from dpkern.ops import update
from dpkern.reports import prediction, prediction_check
from dpkern.reports.fake_step import trace
from dpkern.reports.networks import ResNet, maker
from dpkern.reports.predicted_step import ordinary, private
from dpkern.reports.prediction_check import PLAIN
from dpkern.reports.private_calls import private_calls

ZEN4 = processors.load("zen4")
SGD = update.SGD(lr=0.1)
LINEAR = "ghost.linear_gradient"


class Branching(nn.Module):
    """A model whose step depends on the values of its data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out if x.sum() > 0 else -out


def branching() -> tuple[nn.Module, Tensor]:
    return Branching(), torch.zeros(1, 4)


class Attention(nn.Module):
    """Tokens, positions, one encoder layer and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(50, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 50)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(self.token(ids)))
        return out


def mlp() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 5)), torch.zeros(1, 20)


def resnet() -> tuple[nn.Module, Tensor]:
    return ResNet((8, 16), 4), torch.zeros(1, 3, 16, 16)


def attention() -> tuple[nn.Module, Tensor]:
    return Attention(), torch.zeros((1, 8), dtype=torch.int64)


def drawn(make: Any) -> Any:
    """What ``trace`` takes of a function that returns a model and an example."""

    def made() -> Any:
        model, example = make()
        return model, lambda batch: torch.zeros((batch, *example.shape[1:]), dtype=example.dtype)

    return made


def engine_calls(make: Any, batch: int) -> Counter[str]:
    """Ops that make the clipped sums, as the engine calls them in its third step."""
    torch.manual_seed(0)
    model, example = make()
    shape = (batch, *example.shape[1:])
    x = torch.randn(shape) if example.is_floating_point() else torch.randint(50, shape)
    engine = PrivacyEngine()
    model, optimizer, _ = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=None,
        mechanism=PLAIN,
        sample_rate=0.01,
        expected_batch_size=batch,
        dataset_size=100 * batch,
    )
    calls: list[str] = []

    def noting(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        calls.append(op.name)
        with dispatch.intercepted(None):
            return op(*args, **kwargs)

    for _ in range(3):
        calls.clear()
        with dispatch.intercepted(noting):
            out = model(x)
            labels = torch.zeros(out.shape[:-1], dtype=torch.int64)
            nn.functional.cross_entropy(out.flatten(0, -2), labels.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return Counter(name for name in calls if name.startswith("ghost."))


@pytest.mark.parametrize("make", [mlp, resnet, attention])
def test_a_predicted_step_calls_the_ops_that_the_engine_calls(make: Any) -> None:
    found = private_calls(trace(drawn(make), 16), device="cpu")
    assert Counter(call.op for call in found.calls) == engine_calls(make, 16)
    assert found.missing == []


def test_a_trace_holds_no_data_and_counts_products() -> None:
    step = trace(*maker("gpt2-small", batch=16))
    parameters = sum(math.prod(shape) for shape in step.shapes.values())
    assert parameters == 163_037_184  # 124 M, and a head of its own
    tokens, attended = 16 * 1024, 12 * 4 * 16 * 1024 * 1024 * 768
    embedded = (50257 + 1024) * 768
    forward = sum(c.flops for c in step.calls if c.phase == "forward")
    small = sum(math.prod(s) for s in step.shapes.values() if len(s) == 1)
    assert forward == 2 * tokens * (parameters - embedded - small) + attended
    backward = sum(c.flops for c in step.calls if c.phase == "backward")
    without = sum(c.flops for c in step.without_weights if c.phase == "backward")
    weights = 2 * tokens * (parameters - embedded - small)
    assert backward - without == weights


def test_the_largest_limit_decides() -> None:
    place = CoresAtWork.of(ZEN4, 1, bandwidth=1e10)

    def seconds(counts: Counts, read: int = 0) -> Any:
        items = Itemised((Item(name="x", counts=counts, bytes_read=read),))
        return op_time("noise.x", items, place, dtype=torch.float32)

    words, sums, moved = Counts(RNG=10**8), Counts(ADD=10**8), 10**9
    assert seconds(words).seconds == pytest.approx(10**8 * 61 / 32 / 3.7e9, rel=1e-3)
    assert seconds(sums).seconds == pytest.approx(10**8 / 16 / 3.7e9, rel=1e-3)
    assert seconds(Counts(), moved).seconds == pytest.approx(0.1, rel=1e-3)
    both = seconds(words + sums, moved)
    assert both.bound == "traffic"
    assert both.seconds == pytest.approx(0.1, rel=1e-3)
    # What shares the places to start in a clock adds up.
    assert seconds(words + sums).instructions > max(seconds(words).words, seconds(sums).compute)


def test_half_the_bandwidth_and_peak_take_twice_the_time() -> None:
    """The figures of [machine] are read."""
    step = trace(*maker("resnet18", batch=64))
    h100 = processors.load("h100")
    whole = ordinary(step, CoresAtWork.of(h100), rule=SGD).working
    slow = {"peak_gflops", "peak_tf32_gflops", "bandwidth_gb_s", "l2_bytes_per_clock"}
    figures = {k: v / 2 if k in slow else v for k, v in h100.machine.items()}
    figures |= {"launch_us": 2 * h100.machine["launch_us"]}
    half = ordinary(step, CoresAtWork.of(replace(h100, machine=figures)), rule=SGD).working
    assert half == pytest.approx(2 * whole, rel=0.01)


def test_a_rotation_is_one_instruction_where_the_machine_has_one() -> None:
    clocks = {
        name: processors.load(name).clocks({"RNG": 32})
        for name in ("zen4", "zen4:avx2", "h100", "icelake")
    }
    assert clocks["zen4"] == 61.0  # 32 lanes start in a clock: 21 + 20 + 20 for a word
    assert clocks["icelake"] == 61.0
    assert clocks["zen4:avx2"] == pytest.approx(81 * 32 / 20.8)
    assert clocks["h100"] == 61 * 32 / 64


@pytest.mark.parametrize("name", prediction_check.measured_names())
def test_predictions_of_measured_rows_keep_the_target(name: str) -> None:
    fact = next(f for f in prediction_check.facts() if f["processor"] == name)
    assert fact["median_error_percent"] <= prediction_check.TARGET
    assert fact["not_fitted_median_error_percent"] <= prediction_check.TARGET
    assert fact["not_fitted_rows"] >= 4


def test_a_wrong_price_is_seen_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    load = processors.load

    def wrong(source: Any) -> Any:
        machine = load(source)
        return replace(machine, costs={**machine.costs, "ROTATE": 3 * machine.costs["ROTATE"]})

    prediction_check.checked.cache_clear()
    monkeypatch.setattr(processors, "load", lambda s: load(s) if "avx2" in str(s) else wrong(s))
    rows = [r for r in prediction_check.checked("zen4") if r.processor == "zen4"]
    noise = sorted(abs(r.error) for r in rows if r.kind == "noise")
    assert noise[len(noise) // 2] > prediction_check.TARGET
    prediction_check.checked.cache_clear()


def test_a_kernel_s_share_divides_what_happens_in_a_core_and_not_memory() -> None:
    def seconds(share: float | None, batch: int) -> float:
        kernels = {} if share is None else {"clip.sample_norm": share}
        place = CoresAtWork.of(replace(ZEN4, kernels=kernels), 1)
        grads = shaped((batch, 1000), torch.float32)
        items = FORMS["clip.sample_norm"](grads)
        return op_time("clip.sample_norm", items, place, dtype=torch.float32).seconds

    call = 1e-6 * ZEN4.machine["launch_us"]
    small, large = 16, 1 << 20
    ratio = (seconds(0.1, small) - call) / (seconds(0.2, small) - call)
    assert ratio == pytest.approx(2.0)
    assert seconds(0.9, large) == seconds(None, large)  # memory decides
    assert seconds(0.01, large) > 2 * seconds(None, large)


def test_shares_of_kernels_are_of_ops_and_of_one_instruction_set() -> None:
    known = processors.load("icelake")
    assert known.kernels.keys() <= FORMS.keys()
    assert "kernel_shares" in known.kernels_source
    assert not processors.load("icelake:avx2").kernels
    text = Path(processors.__file__).parent.joinpath("machines/icelake.toml").read_text()
    with pytest.raises(InvalidInput, match=r"kernels\.clip\.clip_sum"):
        processors.parse(text.replace('"clip.clip_sum" = 0.232', '"clip.clip_sum" = 0'), where="x")


def test_lines_of_measured_cases_are_those_of_today_s_forms() -> None:
    """If this fails, take the lines of ``benchmarks.kernel_shares.lines_of`` into the file."""
    folder = Path(processors.__file__).parent / "machines" / "measured"
    rows = json.loads((folder / "icelake.json").read_text())["rows"]
    cases = [row for row in rows if row["kind"] == "op"]
    assert len(cases) > 100
    for row in cases:
        kind = row["dtype"] and getattr(torch, row["dtype"])
        case = sized(OPS[row["op"]], FACTS[row["op"]], row["case"], {}, kind)
        assert lines_of(case) == row["lines"], f"{row['op']} {row['case']}"


def test_a_wrong_share_is_seen_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    load = processors.load

    def wrong(source: Any) -> Any:
        machine = load(source)
        return replace(machine, kernels={op: 2 * s for op, s in machine.kernels.items()})

    prediction_check.checked.cache_clear()
    monkeypatch.setattr(processors, "load", wrong)
    rows = [r for r in prediction_check.checked("icelake") if r.kind == "op" and not r.fitted]
    errors = sorted(abs(r.error) for r in rows)
    assert errors[len(errors) // 2] > prediction_check.TARGET
    prediction_check.checked.cache_clear()


def test_a_report_states_its_error_and_what_never_ran() -> None:
    report = prediction.report("resnet14", processor="h200", batches=[32, 64])
    assert json.loads(json.dumps(report.facts)) == report.facts
    assert "Nothing of this has run on NVIDIA H200" in report.summary
    assert "Median error of such predictions" in report.summary
    steps, parts = report.tables[0], report.tables[1]
    assert [row[0] for row in steps.rows] == [32, 64]
    private_ms, plain_ms, ratio = steps.rows[0][1:4]
    for number in (private_ms, plain_ms, ratio):
        assert f"{number}" in report.summary
    assert parts.rows[-1][1:] == (private_ms, plain_ms)
    names = [row[0] for row in parts.rows]
    assert "noise" in names
    assert "update" in names
    zen4 = prediction.report("mlp-512", processor="zen4", batches=[256])
    assert "Nothing" not in zen4.summary


def test_parts_add_up_and_noise_does_not_grow_with_the_batch() -> None:
    place = CoresAtWork.of(ZEN4, 2)
    found = []
    for batch in (32, 256):
        step = private(trace(*maker("mlp-512", batch=batch)), place, PLAIN, rule=SGD)
        assert sum(step.by_part().values()) == pytest.approx(step.seconds)
        found.append(step.by_part())
    assert found[0]["noise"] == pytest.approx(found[1]["noise"])
    assert found[1]["sums"] > 4 * found[0]["sums"]


def test_an_operation_without_a_price_makes_a_lower_bound(tmp_path: Path) -> None:
    text = Path(processors.__file__).parent.joinpath("machines/zen4.toml").read_text()
    text = text.replace("CVT = 2     # pipes FP2, FP3\n", "").replace('"SUB", "CVT"', '"SUB"')
    mine = tmp_path / "mine.toml"
    mine.write_text(text)
    report = prediction.report("mlp-512", processor=mine, batches=[32], threads=1)
    assert "at least" in report.summary
    assert report.facts["steps"][0]["lower_bound"] is True
    assert any(note.startswith("A lower bound") and "CVT" in note for note in report.notes)
    whole = prediction.report("mlp-512", processor="zen4", batches=[32], threads=1)
    assert whole.facts["steps"][0]["lower_bound"] is False


class Recurrent(nn.Module):
    """An LSTM and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(16, 24, batch_first=True)
        self.head = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(x)[0][:, -1])
        return out


class Singular(nn.Module):
    """A layer whose singular values are read, which no count of bytes says the time of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.linalg.svdvals(self.layer(x).view(-1, 4, 4))
        return torch.special.erfcx(out)


def recurrent() -> tuple[nn.Module, Tensor]:
    return Recurrent(), torch.zeros(1, 10, 16)


def singular() -> tuple[nn.Module, Tensor]:
    return Singular(), torch.zeros(1, 16)


def test_products_of_recurrent_layers_are_counted() -> None:
    step = trace(lambda: (Recurrent(), lambda batch: torch.zeros(batch, 10, 16)), 8)
    rows, weights = 8 * 10, 4 * 24 * (16 + 24)

    def products(calls: Any) -> list[int]:
        return [call.flops for call in calls if "rnn_layer" in call.name]

    assert products(step.calls) == [2 * rows * weights, 4 * rows * weights]
    assert products(step.without_weights) == [2 * rows * weights, 2 * rows * weights]
    made = private_calls(step, device="cpu")
    of_state = [c for c in made.calls if c.parameter == "layer.weight_hh_l0"]
    assert {c.op for c in of_state} <= {"ghost.linear_norm", "ghost.linear_sum", LINEAR}
    report = prediction.report(f"{__name__}:recurrent", processor="zen4", batches=[8], threads=1)
    assert report.facts["steps"][0]["lower_bound"] is False


def test_what_torch_computes_beyond_its_bytes_makes_a_lower_bound() -> None:
    report = prediction.report(f"{__name__}:singular", processor="zen4", batches=[8], threads=1)
    assert report.facts["steps"][0]["lower_bound"] is True
    assert any("_linalg_svd, special_erfcx" in note for note in report.notes)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"processor": "k7"}, "processor: expected one whose file has .machine. with clock_ghz"),
        ({"threads": 500, "processor": "zen4"}, "threads: expected an int >= 1 and <= 96"),
        ({"threads": 2, "processor": "zen4"}, "threads: expected 1 on a CPU"),
        ({"batches": []}, "batch: expected at least one"),
        ({"batches": [0]}, "batch: expected an int >= 1"),
        ({"dtype": "int8"}, "dtype: expected one of"),
        ({"mechanism": "none"}, "mechanism: expected one of"),
        ({"positions": 8}, "seq: expected none with resnet14"),
        ({"model": "resnet9"}, "model: expected one of"),
        ({"model": "nothing.here:f"}, "model: expected package.module:callable"),
        ({"mechanism": "randomized_response"}, "mechanism: expected"),
    ],
)
def test_what_cannot_be_predicted_is_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        prediction.report(given.pop("model", "resnet14"), **given)


def test_a_model_of_the_user_s_is_predicted_from_its_example() -> None:
    report = prediction.report(f"{__name__}:mlp", processor="zen4", batches=[8, 16], threads=1)
    assert report.facts["parameters"] == 20 * 32 + 32 + 32 * 5 + 5
    assert [step["batch"] for step in report.facts["steps"]] == [8, 16]
    with pytest.raises(InvalidInput, match="model: expected a model whose step follows"):
        prediction.report(f"{__name__}:branching", processor="zen4", batches=[8])


@pytest.mark.parametrize("name", prediction.MECHANISMS)
def test_every_mechanism_has_a_prediction_or_a_lower_bound(name: str) -> None:
    report = prediction.report("lenet5-relu", processor="zen4", mechanism=name, batches=[16])
    (step,) = report.facts["steps"]
    assert step["seconds"] > 0
    counted = name in ("dpsgd", "directional", "gredp", "projected_sgd")
    assert step["lower_bound"] is not counted
    dpsgd = prediction.report("lenet5-relu", processor="zen4", batches=[16]).facts["steps"][0]
    if name == "gredp":  # in corrected mode it is DP-SGD
        assert step["seconds"] == pytest.approx(dpsgd["seconds"], rel=0.01)

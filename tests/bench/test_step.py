"""Whole steps: nothing is timed before its clipped sum is right, and absent peers say why."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpkern.base.errors import InvalidInput
from dpkern.bench import environment, peers, results, step
from dpkern.bench.outcome import failure
from dpkern.bench.peers import PeerAbsentError, PeerTask
from dpkern.cli import main
from dpkern.commands import bench
from dpkern.engine.subject import BenchmarkModel, subject
from dpkern.privacy.mechanisms import DPSGD

MECHANISMS = ("adaclip", "directional", "dpsgd", "gredp", "laplace_sgd", "pruned", "spectral_dp")


def net() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)), torch.randn(4, 6)


def _made(batch: int = 8) -> BenchmarkModel:
    return subject(net()[0], batch_size=batch, row_shape=(6,))


@pytest.mark.parametrize("name", MECHANISMS)
def test_clipped_sums_of_named_mechanisms_are_compared(name: str) -> None:
    made = subject("lenet5", batch_size=6)
    assert "clipped sums of 4 samples" in step.check_sums(made, step.mechanism_named(name, made))


@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])
@pytest.mark.parametrize("arithmetic", ["exact", "float"])
def test_every_clipping_and_arithmetic_is_compared(clipping: str, arithmetic: str) -> None:
    if clipping == "automatic" and arithmetic == "exact":
        arithmetic = "float"  # the only one it has
    bound: Any = [0.1, 0.2, 0.3, 0.4] if clipping == "per_layer" else 0.2
    chosen = DPSGD(
        noise_multiplier=1.0, max_grad_norm=bound, clipping=clipping, arithmetic=arithmetic
    )
    assert step.check_sums(_made(), chosen).endswith("per-sample gradients in float64")


@pytest.mark.parametrize("factor", [0.99, 1.01])
def test_a_sum_that_is_one_per_cent_off_gets_no_number(
    monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    right = step._sums

    def wrong(*args: Any) -> Any:
        sums, plan = right(*args)
        return [sums[0] * factor, *sums[1:]], plan

    monkeypatch.setattr(step, "_sums", wrong)
    plan = step.StepPlan(model=f"{__name__}:net", batch=8, peers=False, seconds=0.01)
    (row,) = step.rows(plan)
    assert "parameter 0 is off" in row["wrong"]
    assert "ms" not in row


def test_sums_of_a_mapped_mechanism_are_compared_with_the_references() -> None:
    made = subject("lenet5", batch_size=6)
    chosen = step.mechanism_named("spectral_dp", made)
    original = step._sums
    calls: list[int] = []

    def planted(*args: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            return original(*args)
        sums, plan = original(*args)
        return [1.05 * total for total in sums], plan

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "_sums", planted)
        with pytest.raises(AssertionError, match="is off by"):
            step.check_sums(made, chosen)


def test_rows_of_a_users_model_hold_all_ways_and_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opake", None)
    monkeypatch.setitem(sys.modules, "opake.dpsgd.clipping", None)
    plan = step.StepPlan(model=f"{__name__}:net", batch=8, quick=True, seconds=0.01)
    rows = {row["backend"]: row for row in step.rows(plan)}
    assert {"torch default", "torch fused", "dpkern", "torch.func"} <= rows.keys()
    assert rows["dpkern"]["checked"]
    assert rows["dpkern"]["arithmetic"] == "exact"
    assert all(rows[way]["ms"] > 0 for way in ("torch fused", "dpkern", "torch.func"))
    assert "not installed" in rows["Opake"]["absent"]
    assert "PyPI" in rows["FastDP"]["absent"]
    shown = "\n".join(results.step_tables(list(rows.values()), markdown=False))
    assert max(map(len, shown.splitlines())) <= 80
    assert "Opake: absent: opake is not installed" in shown


def test_a_peer_that_does_other_work_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    right = peers.torch_func

    def halved(task: PeerTask) -> Any:
        return right(PeerTask(**{**vars(task), "clip": task.clip / 2}))

    def failing(_: PeerTask) -> Any:
        raise ValueError("not this one")

    monkeypatch.setattr(step, "PEERS", {"halved": halved, "failing": failing, "right": right})
    found, left = step.checked_peers(_made())
    assert found.keys() == {"right"}
    assert "off by" in left["halved"]
    assert left["failing"] == "ValueError: not this one"


def test_opacus_is_left_out_of_what_it_does_not_train() -> None:
    pytest.importorskip("opacus")
    made = subject(
        nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).eval(), batch_size=8, row_shape=(6,)
    )
    with pytest.raises(PeerAbsentError, match="does not train"):
        peers.opacus(step.peer_task(made, made.fresh(), 4, 1.0), "hooks")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--mechanism", "gredp"], "--mechanism"),
        (["--batch", "8"], "--batch"),
        (["--model", "mlp", "--op", "clip"], "--op"),
        (["--model", "mlp", "--mechanism", "nothing"], "one of"),
        (["--model", "mlp", "--mechanism", "randomized_response"], "adds noise to gradients"),
        (["--model", "mlp", "--batch", "2"], "batch"),
        (["--model", "nowhere:net"], "nowhere"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    given: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *given]) == 2
    assert told in capsys.readouterr().err


def test_the_command_keeps_what_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def here(plan: step.StepPlan) -> Any:
        yield environment.environment()
        yield from step.rows(plan)

    monkeypatch.setattr(bench.worker, "measured", here)
    out = tmp_path / "run.json"
    part = ["--seconds", "0.01", "--quick", "--batch", "8", "--no-peers", "--out", str(out)]
    assert main(["bench", "--model", f"{__name__}:net", *part]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    content = json.loads(out.read_text())
    assert content["kind"] == "steps"
    assert [row["backend"] for row in content["rows"]] == ["torch default", "torch fused", "dpkern"]
    assert "| dpkern | 1 |" in out.with_suffix(".md").read_text()


def frozen() -> tuple[nn.Module, Tensor]:
    return net()[0].requires_grad_(False), torch.randn(4, 6)


class AsksItsRows(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


def asking() -> tuple[nn.Module, Tensor]:
    return AsksItsRows(6, 3), torch.randn(4, 6)


@pytest.mark.parametrize(
    ("name", "says"), [("frozen", "no parameter requires a gradient"), ("asking", "refused: ")]
)
def test_a_model_that_is_refused_says_why(name: str, says: str) -> None:
    plan = step.StepPlan(model=f"{__name__}:{name}", batch=8, quick=True, seconds=0.01)
    (row,) = step.rows(plan)
    shown = "\n".join(results.step_tables([row], markdown=False)).splitlines()
    assert says in " ".join(shown)
    assert max(map(len, shown)) <= 80


def test_lack_of_memory_is_not_called_wrong() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert failure(caught.value).keys() == {"no memory"}
    assert failure(MemoryError()).keys() == {"no memory"}
    assert failure(RuntimeError("sizes differ")).keys() == {"wrong"}


def test_numbers_out_of_range_are_refused() -> None:
    for threads in (0, 99_999):
        with pytest.raises(InvalidInput):
            step.check_plan(step.StepPlan(model="mlp", threads=(threads,)))

"""Whole steps as they are predicted: none becomes worse, none is faster than its kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import sass_steps
from dpkern.engine.device_cost import Work
from dpkern.ops.backends import _gram_shares

RESULTS = Path(__file__).parents[2] / "benchmarks/results/sass.json"
FOUND: dict[str, Any] = json.loads(RESULTS.read_text())
MOST = {"GPT-2 small": 1.20, "ViT-B": 1.25, "ResNet-18, 32 x 32, B 256, float32": 1.98,
        "ResNet-18, 32 x 32, B 256, bfloat16": 1.49}  # fmt: skip
"""Private over plain steps, as they are and a little more."""


@pytest.mark.parametrize("row", sass_steps.rows(FOUND["values"]), ids=lambda row: row["model"])
def test_no_prediction_is_worse_than_it_was(row: dict[str, Any]) -> None:
    (most,) = (value for name, value in MOST.items() if row["model"].startswith(name))
    assert 0.95 * most < row["ratio"] <= most  # else lower the gate
    (kept,) = (r for r in FOUND["steps"] if r["model"] == row["model"])
    assert kept["ratio"] == pytest.approx(row["ratio"], rel=1e-3)  # the table is today's


def test_a_vit_meets_its_target_by_norms_of_which_layers_share_launches() -> None:
    """With multiprocessors that are idle where no layer waits for another it would not."""
    step = sass_steps.steps()[1]
    (row,) = (row for row in FOUND["steps"] if row["model"] == step.title)
    left, stored, grams, reading = sass_steps.floors(step, row["update ms"]).values()
    assert row["ratio"] <= row["target"]
    assert reading < grams < left < stored
    norms = sum(Work.of(layer).norm for layer in step.layers) * 1e3
    assert grams - norms == pytest.approx(reading)
    assert reading + 2 * norms > left
    terms = sass_steps.layers(step)
    taken = sum(min(row["stored"], row["not stored"]) for row in terms)
    assert taken == pytest.approx(row["norms and sums ms"])
    for term in terms:
        parts = list(term.values())
        assert sum(parts[1:4]) == pytest.approx(term["stored"])
        assert sum(parts[4:7]) == pytest.approx(term["not stored"])


BOUND = {
    "linear_norm-wide-direct-bfloat16": (0, 0),
    "linear_sum-wide-bfloat16": (0, 0),
    "linear_sum-vit-bfloat16": (1, 2),
    "conv_gradient-block-bfloat16": (3, 1),
    "conv_gradient-block-float32": (2, 1),
}
"""A product's call at a real shape: the model and the layer of it that takes it."""


@pytest.mark.parametrize("call", BOUND)
def test_the_model_trusts_no_kernel_with_more_than_its_machine_code_allows(call: str) -> None:
    model, layer = BOUND[call]
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):  # scripts for GPUs forbid it
        work = Work.of(sass_steps.steps()[model].layers[layer])
    speed = work.keeping if call.startswith("conv") else work.speed
    (most,) = {row["TFLOP/s at most"] for row in FOUND["products"] if row["call"] == call
               and row["products"] != "float64"}  # fmt: skip
    assert 0.5 * most < speed / 1e12 < most


def test_the_model_trusts_gram_matrices_with_no_more_than_their_tiles_allow() -> None:
    work = Work.of(sass_steps.steps()[1].layers[0])
    call = "linear_norm-vit-gram-bfloat16"
    (most,) = (row["TFLOP/s at most"] for row in FOUND["products"] if row["call"] == call
               and row["kernel"] == "gram_samples_kernel")  # fmt: skip
    products = 2.0 * 64 * _gram_shares.ENTRIES * (768 + 2304)
    assert 0.5 * most < products / work.norm / 1e12 < most


def test_every_architecture_of_a_wheel_is_in_the_table() -> None:
    archs = {row["arch"] for row in FOUND["resources"]}
    assert archs == {75, 80, 86, 89, 90, 100}
    assert [r["kernel"] for r in FOUND["resources"] if r["spilled"] or r["local"]] == []

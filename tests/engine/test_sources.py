"""The models of the sources: their sizes, what they take, and that the engine takes all of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dpkern
from dpkern.base.errors import InvalidInput
from dpkern.engine import check_model
from dpkern.engine.demo.models import ALL_MODELS, example_rows
from dpkern.engine.demo.sources import SOURCES
from dpkern.engine.demo.sources import build as build_source
from dpkern.nn import BlockCirculantLinear
from dpkern.train import build

CONVOLUTIONS = {
    "gredp-lenet5": 2,
    "gredp-lenet5-16": 2,
    "gredp-resnet20": 19,
    "gredp-model3": 6,
    "gredp-alexnet": 5,
    "gredp-resnet18": 20,  # a stem, 16 in the blocks, 3 shortcuts
    "directional-lenet": 2,
    "directional-alexnet": 5,
    "directional-resnet18": 20,
}


def count(model: nn.Module, kind: type[nn.Module]) -> int:
    return sum(isinstance(part, kind) for part in model.modules())


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("norm", ["group", "none"])
def test_layers_are_those_of_the_tables(name: str, norm: str) -> None:
    rows = SOURCES[name].rows
    model = build_source(name, row_shape=rows, classes=10, norm=norm, width=0.125)
    assert count(model, nn.Conv2d) == CONVOLUTIONS[name]
    assert (count(model, nn.GroupNorm) > 0) == (norm == "group" and "lenet" not in name)
    assert model(torch.zeros(2, *rows)).shape == (2, 10)
    assert SOURCES[name].readings


def test_the_printed_sizes() -> None:
    sizes = {
        name: sum(
            p.numel() for p in build(name, row_shape=SOURCES[name].rows, classes=10).parameters()
        )
        for name in ("directional-lenet", "gredp-lenet5", "gredp-resnet20")
    }
    # 61706: the dimension that the source's own example of kappa has.
    assert sizes == {"directional-lenet": 61_706, "gredp-lenet5": 30_196, "gredp-resnet20": 269_722}


def test_circulant_layers_have_an_eighth_of_the_weights() -> None:
    rows = SOURCES["gredp-lenet5"].rows
    dense = build("gredp-lenet5", row_shape=rows, classes=10)
    circulant = build("gredp-lenet5", row_shape=rows, classes=10, linear="circulant")
    assert count(dense, nn.Linear) == count(circulant, BlockCirculantLinear) == 3
    sites = [site.kind for site in dpkern.survey(circulant, torch.zeros(2, *rows))]
    assert sites == ["conv", "other"] * 2 + ["circulant", "other"] * 3


@pytest.mark.parametrize("name", ["gredp-resnet20", "directional-resnet18", "gredp-alexnet"])
def test_the_engine_refuses_nothing_in_them(name: str) -> None:
    model = build_source(name, row_shape=SOURCES[name].rows, classes=10, width=0.125)
    assert [f for f in check_model.report(model) if f["severity"] == "refuse"] == []


def test_samples_of_a_batch_stay_apart() -> None:
    rows = SOURCES["gredp-resnet20"].rows
    model = build_source("gredp-resnet20", row_shape=rows, classes=10, width=0.25)
    x = torch.randn(4, *rows)
    assert torch.allclose(model(x)[:1], model(x[:1]), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "rows"),
    [("gredp-lenet5", (30,)), ("gredp-lenet5", (1, 8, 8)), ("gredp-alexnet", (1, 28, 28))],
)
def test_rows_that_do_not_fit_are_refused(name: str, rows: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInput, match="square images"):
        build(name, row_shape=rows, classes=10)


def test_options_of_sources_belong_to_sources() -> None:
    with pytest.raises(InvalidInput, match="linear, norm"):
        build("mlp", row_shape=(64,), classes=10, linear="circulant")
    with pytest.raises(InvalidInput, match="width"):
        build_source("gredp-lenet5", row_shape=(1, 28, 28), classes=10, width=2.0)
    assert {example_rows(name) for name in ALL_MODELS} == {(64,), (1, 28, 28), (3, 32, 32)}

"""Closed forms of ops that no counted kernel executes, and the costs that ops declare."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

import pytest
import torch

from dpkern.base import dispatch
from dpkern.cost.forms import FORMS
from dpkern.ops import ghost, spectral
from dpkern.ops.spectral._transform_flops import of_line, of_map
from tests.cost import counted_cases
from tests.cost.counted_layer_cases import CASES, Draw

SHAPES = 24
PARTLY_READ = {"ghost.embedding_sum", "ghost.embedding_integer_sum", "update.advance"}
"""Ops that read only the ids' rows of the table, or the powers of a step counter."""
RECORD = {
    "ghost.linear_norm": (27008, 392, 66547, 0),
    "ghost.linear_norms": (66428, 328, 202993, 0),
    "ghost.linear_gradient": (8380, 6484, 8412, 0),
    "ghost.linear_sum": (11868, 1908, 9842, 0),
    "ghost.conv_norm": (9708, 336, 22487, 0),
    "ghost.conv_gradient": (7752, 6892, 13903, 0),
    "ghost.conv_sum": (17044, 7184, 15543, 0),
    "ghost.embedding_norm": (13372, 512, 6970, 0),
    "ghost.embedding_sum": (6832, 1528, 1302, 0),
    "ghost.tied_cross": (15488, 488, 13851, 0),
    "ghost.layer_norm_backward": (9444, 7064, 7940, 0),
    "ghost.rms_norm_backward": (5724, 4288, 4144, 0),
    "ghost.group_norm_backward": (12380, 7716, 10715, 0),
    "spectral.conv_norm": (18192, 376, 103649, 0),
    "spectral.conv_bins": (15832, 63376, 189069, 0),
    "spectral.bins_sum": (27308, 3224, 109786, 0),
    "spectral.filtered": (5884, 14408, 253192, 0),
    "ghost.rounded_gradient": (5136, 2800, 5131, 0),
    "ghost.rounded_sum": (3804, 1324, 782, 0),
    "spectral.whitened_bins": (21432, 55480, 238592, 0),
    "spectral.whitened_norm": (18080, 280, 26006, 0),
    "spectral.circulant_norm": (20988, 320, 56986, 0),
    "spectral.circulant_product": (28164, 6284, 58065, 0),
    "spectral.circulant_gradient": (18020, 18456, 90505, 0),
    "spectral.circulant_sum": (34020, 15816, 83192, 0),
    "product.matmul": (6836, 2996, 6504, 0),
    "recurrent.gru": (11540, 8208, 15465, 0),
    "recurrent.gru_backward": (16796, 14252, 20875, 0),
    "recurrent.lstm": (13636, 12348, 27780, 0),
    "recurrent.lstm_backward": (16796, 8288, 16925, 0),
    "recurrent.rnn": (7852, 5464, 7632, 0),
    "recurrent.rnn_backward": (6464, 5528, 5648, 0),
    "clip.sample_norm": (77786, 1152, 31957, 0),
    "clip.clip_sum": (101970, 30500, 42753, 0),
    "coef.expanded": (98528, 24140, 1203445, 150016),
    "ghost.explicit_norm": (109880, 1336, 38835, 0),
    "ghost.contract": (134604, 27144, 39572, 0),
    "ghost.conv_integer_sum": (5360, 1496, 4690, 0),
    "ghost.conv_sum_error": (21872, 432, 10052, 0),
    "ghost.embedding_integer_sum": (7928, 1440, 877, 0),
    "ghost.linear_integer_sum": (9596, 2340, 5806, 0),
    "ghost.linear_integer_norm": (9100, 312, 8267, 0),
    "ghost.linear_sum_error": (7724, 264, 3770, 0),
    "ghost.tied_integer_sum": (27992, 5988, 20777, 0),
    "ghost.tied_sum_error": (37000, 560, 12806, 0),
    "ghost.explicit_integer_sum": (89928, 12832, 12775, 0),
    "update.advance": (1152, 1152, 96, 0),
    "update.project": (53644, 53644, 21002, 0),
}
"""Bytes read and written, floating operations and random words of all calls of each op."""

Given = tuple[tuple[Any, ...], dict[str, Any]]


def calls(name: str) -> Iterator[Given]:
    """The op's calls with random shapes."""
    if name in CASES:
        for seed in range(SHAPES):
            yield CASES[name](Draw(1000 * list(CASES).index(name) + seed))
        return
    for seed in range(2 * SHAPES):
        call = counted_cases.build(name.split(".")[1], seed)
        yield call.args, call.kwargs


OTHERS = {
    name: op for op in dispatch.OPS for name in counted_cases.OTHERS if op.endswith(f".{name}")
}
NAMES = [*CASES, *OTHERS.values()]


def held(value: Any) -> int:
    """Bytes of all tensors in a call's arguments."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if is_dataclass(value):
        return held(vars(value))
    parts = value.values() if isinstance(value, dict) else value
    return sum(map(held, parts)) if isinstance(value, (list, tuple, dict)) else 0


@pytest.mark.parametrize("name", NAMES)
def test_costs_of_record(name: str) -> None:
    costs = [dispatch.OPS[name].cost(*args, **kwargs) for args, kwargs in calls(name)]
    each = [(c.bytes_read, c.bytes_written, c.flops, c.random_words) for c in costs]
    assert tuple(map(sum, zip(*each, strict=True))) == RECORD[name]


@pytest.mark.parametrize("name", NAMES)
def test_no_more_bytes_are_declared_than_the_operands_hold(name: str) -> None:
    whole = 0
    for args, kwargs in calls(name):
        read, given = dispatch.OPS[name].cost(*args, **kwargs).bytes_read, held((args, kwargs))
        assert read <= given
        whole += read == given
    assert whole or name in PARTLY_READ


def test_every_route_is_drawn() -> None:
    routes: dict[str, set[str]] = {name: set() for name in ("linear", "conv", "circulant")}
    for args, kwargs in calls("ghost.linear_norm"):
        routes["linear"].add(ghost.linear.norm_route(*args, **kwargs))
    for args, kwargs in calls("ghost.conv_norm"):
        names = "kernel_size", "stride", "padding", "dilation", "groups"
        geometry = ghost.conv.Geometry.of(*args, *(kwargs[name] for name in names))
        routes["conv"].add(ghost.conv.norm_route(geometry, kwargs["route"]))
    for args, _ in calls("spectral.circulant_norm"):
        routes["circulant"].add(spectral.circulant.norm_route(*args))
    assert routes == {
        "linear": {"rank_one", "gram", "direct"},
        "conv": {"gram", "direct"},
        "circulant": {"rank_one", "positions", "spectrum"},
    }


def test_operands_of_16_bits() -> None:
    a = torch.zeros(2, 3, 4, dtype=torch.bfloat16)
    wide = FORMS["ghost.linear_norm"](a.float(), a.float())
    assert FORMS["ghost.linear_norm"](a, a).counts == wide.counts
    for name in ("ghost.linear_gradient", "ghost.conv_norm", "ghost.conv_gradient"):
        args, kwargs = CASES[name](Draw(1))
        half = [x.bfloat16() for x in args]
        form, cost = FORMS[name](*half, **kwargs), dispatch.OPS[name].cost(*half, **kwargs)
        assert cost.bytes_read == 2 * form.counts["LOAD"]
        assert cost.flops == sum(form.counts[p] for p in ("ADD", "MUL", "SQRT"))


def test_forms_take_what_the_data_decides_by_keyword() -> None:
    a, out, factors = torch.zeros(4, 2, 3), torch.zeros(3, 3), torch.tensor([1.0, 0, 1, 1])
    form = FORMS["ghost.linear_sum"]
    meta = (x.to("meta") for x in (a, a, factors, out))
    assert form(a, a, factors, out) == form(*meta, used=3) != form(a, a, factors, out, used=4)
    assert form(a, a, torch.ones(4), out) == form(*(x.to("meta") for x in (a, a, factors, out)))


def test_textbook_transforms() -> None:
    # Sorensen, Jones, Heideman, Burrus 1987; Duhamel, Hollmann 1984: tables of split-radix counts.
    assert [of_line(n, real=False).total for n in (1, 2, 4, 8, 16)] == [0, 4, 16, 56, 168]
    assert [of_line(n, real=True).total for n in (1, 2, 4, 8, 16)] == [0, 2, 6, 22, 70]
    assert of_line(16, real=False).products == 20
    assert of_line(16, real=True).products == 10
    assert of_line(6, real=False).total == pytest.approx(5 * 6 * 2.585, abs=2)
    plane = of_map((4, 8))
    assert plane == of_line(8, real=True) * 4 + of_line(4, real=False) * 5
    assert of_map((8,)) == of_line(8, real=True)


def test_a_transform_takes_more_where_the_grid_grows() -> None:
    x, g = torch.zeros(2, 3, 8, 8), torch.zeros(2, 4, 6, 6)
    cost = [
        spectral.conv_norm.cost(x, g, kernel_size=3, size=(n, n), band=spectral.Band((n, n))).flops
        for n in (8, 16, 32)
    ]
    assert all(a < b for a, b in itertools.pairwise(cost))

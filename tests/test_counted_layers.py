"""Layer ops: what a counted execution did, what the closed form says, what the cost declares."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dpkern import _dispatch
from dpkern.cost.counted import KERNELS, Tally, tally_of
from dpkern.cost.forms import FORMS
from dpkern.cost.primitives import PRIMITIVES, Counts
from dpkern.errors import InvalidInput
from dpkern.ops import ghost, spectral
from dpkern.ops.spectral._transform_flops import of_line, of_plane
from tests.counted_layer_cases import CASES, Call, Draw

SHAPES = 24
TOLERANCE = {torch.float32: 2e-4, torch.float64: 1e-9}


@pytest.fixture(autouse=True)
def _native() -> None:
    if not _dispatch.availability("cpu")[0]:
        pytest.skip("the kernels are not compiled")


def calls(name: str) -> Iterator[tuple[Draw, Call]]:
    """The op's calls with random shapes."""
    for seed in range(SHAPES):
        draw = Draw(1000 * list(CASES).index(name) + seed)
        yield draw, CASES[name](draw)


def copied(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Operands of an op that works in place."""
    return tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in args)


def tensors(result: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """What a call made: its result, or its last operand, which it added to."""
    if result is None:
        return [args[-1]]
    return [result] if isinstance(result, torch.Tensor) else list(result)


def check(name: str, call: Call) -> tuple[list[torch.Tensor], Tally]:
    """Counted, closed form and declared cost agree; what was made, and the tally."""
    op, (args, kwargs) = _dispatch.OPS[name], call
    form, cost = FORMS[name](*args, **kwargs), op.cost(*args, **kwargs)
    own = copied(args)
    result, tally = tally_of(op, own, kwargs)
    assert tally.counts == form.of("exact")
    assert tally.modelled == form.of("modelled")
    assert tally.random == Counts()
    assert tally.flops == sum(form.counts[p] for p in ("ADD", "SUB", "MUL", "DIV", "SQRT"))
    declared = cost.bytes_read, cost.bytes_written, cost.random_words, cost.flops
    assert declared == (tally.bytes_read, tally.bytes_written, tally.random_words, tally.flops)
    return tensors(result, own), tally


@pytest.mark.parametrize("name", CASES)
def test_counted_equals_closed_form_and_declared_cost(name: str) -> None:
    for draw, (args, kwargs) in calls(name):
        made, _ = check(name, (args, kwargs))
        own = copied(args)
        wanted = tensors(_dispatch.OPS[name](*own, **kwargs), own)
        tolerance = TOLERANCE[draw.dtype]
        for have, want in zip(made, wanted, strict=True):
            torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance)


def test_every_layer_op_is_counted() -> None:
    stems = {"ghost", "spectral", "product"}
    explicit = {"ghost.explicit_norm", "ghost.clip_factors", "ghost.contract"}
    wanted = {name for name in _dispatch.OPS if name.split(".")[0] in stems} - explicit
    assert wanted == set(CASES) == (wanted & set(KERNELS) & set(FORMS))


def test_every_route_is_counted() -> None:
    routes = {name: set() for name in ("linear", "conv", "circulant")}
    for _, (args, kwargs) in calls("ghost.linear_norm"):
        routes["linear"].add(ghost.linear.norm_route(*args, **kwargs))
    for _, (args, kwargs) in calls("ghost.conv_norm"):
        names = "kernel_size", "stride", "padding", "dilation", "groups"
        geometry = ghost.conv.Geometry.of(*args, *(kwargs[name] for name in names))
        routes["conv"].add(ghost.conv.norm_route(geometry, kwargs["route"]))
    for _, (args, _kwargs) in calls("spectral.circulant_norm"):
        routes["circulant"].add(spectral.circulant.norm_route(*args))
    assert routes == {
        "linear": {"rank_one", "gram", "direct"},
        "conv": {"gram", "direct"},
        "circulant": {"rank_one", "positions", "spectrum"},
    }


@pytest.mark.parametrize("name", CASES)
def test_an_added_operation_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = KERNELS[name]
    _, call = next(iter(calls(name)))

    def with_more(more: Tally) -> None:
        def slower(*args: Any, **kwargs: Any) -> tuple[Any, Tally]:
            result, tally = kernel(*args, **kwargs)
            return result, tally + more

        monkeypatch.setitem(KERNELS, name, slower)
        check(name, call)

    with_more(Tally())
    added = [Tally(counts=Counts({p: 1})) for p in PRIMITIVES]
    for more in (*added, Tally(flops=1), Tally(bytes_read=1), Tally(bytes_written=1)):
        with pytest.raises(AssertionError):
            with_more(more)


def test_operands_of_16_bits_have_closed_forms_only() -> None:
    a = torch.zeros(2, 3, 4, dtype=torch.bfloat16)
    with pytest.raises(InvalidInput, match="closed form"):
        tally_of(ghost.linear_norm, (a, a), {})
    wide = FORMS["ghost.linear_norm"](a.float(), a.float())
    assert FORMS["ghost.linear_norm"](a, a).counts == wide.counts
    for name in ("ghost.linear_gradient", "ghost.conv_norm", "ghost.conv_gradient"):
        args, kwargs = CASES[name](Draw(1))
        half = [x.bfloat16() for x in args]
        form, cost = FORMS[name](*half, **kwargs), _dispatch.OPS[name].cost(*half, **kwargs)
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
    plane = of_plane((4, 8))
    assert plane == of_line(8, real=True) * 4 + of_line(4, real=False) * 5
    assert of_plane((8,)) == of_line(8, real=True)


def test_a_transform_takes_more_where_the_grid_grows() -> None:
    x, g = torch.zeros(2, 3, 8, 8), torch.zeros(2, 4, 6, 6)
    cost = [
        spectral.conv_norm.cost(x, g, kernel_size=3, size=(n, n), band=spectral.Band((n, n))).flops
        for n in (8, 16, 32)
    ]
    assert all(a < b for a, b in itertools.pairwise(cost))

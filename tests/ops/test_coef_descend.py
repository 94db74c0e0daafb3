"""Runs of small autoencoders in one kernel: bits of a run, gradients, the limit, refusals."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dpkern.base.errors import InvalidInput
from dpkern.ops import coef
from dpkern.ops.backends import cpu
from dpkern.ops.coef.descent import _sigmoid
from dpkern.privacy.theory import spof_loss
from tests.ops.descents import RECORDS, STEPS, made, run

SHAPES = {"14 x 7": (3, 2, 14, 7), "16 x 8": (2, 1, 16, 8), "one": (1, 1, 1, 1)}
SHAPES |= {"two vectors": (2, 3, 17, 9), "three": (2, 1, 40, 20)}


@pytest.fixture(params=["baseline", "avx2", "avx512"])
def instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    best = cpu.isa()
    try:
        cpu.use_isa(request.param)
    except InvalidInput:
        pytest.skip(f"this processor has no {request.param}")
    yield
    cpu.use_isa(best)


def steps(given: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    """The call of some of the steps; it changes the same weights."""
    ahead = {k: given[k][:, begin:end].contiguous() for k in ("draws", "rounding")}
    return given | ahead | {"order": given["order"][:, begin:end].contiguous()}


@pytest.mark.parametrize("noise", ["growing", "constant", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_are_the_references(
    shape: str, dtype: torch.dtype, noise: str, instructions: None
) -> None:
    del instructions
    given = made(SHAPES[shape], dtype=dtype, noise=noise)
    assert torch.equal(run(given, "cpu"), run(given, "reference"))
    assert not torch.equal(run(given)[:, :-1], run(given | {"lr": 1e-9})[:, :-1])


def test_what_is_added_to_inputs_is_seen() -> None:
    given = made(SHAPES["14 x 7"])
    given["added"] = torch.randn(3, STEPS, 2, 14)
    assert torch.equal(run(given, "cpu"), run(given, "reference"))
    assert not torch.equal(run(given), run(given | {"added": None}))


def test_a_run_is_the_same_alone_and_in_calls_of_any_length() -> None:
    given = made(SHAPES["14 x 7"])
    whole = run(given, "cpu")
    for r in range(3):
        here = slice(r, r + 1)
        alone = {
            k: v[here].contiguous() if isinstance(v, Tensor) and len(v) == 3 else v
            for k, v in given.items()
        }
        assert torch.equal(run(alone, "cpu"), whole[here])
    parts = {k: v.clone() if isinstance(v, Tensor) else v for k, v in given.items()}
    for begin, end in ((0, 1), (1, 4), (4, STEPS)):
        coef.descend(**steps(parts, begin, end), backend="cpu")
    assert torch.equal(parts["encoder"].flatten(1), whole[:, : 2 * 14 * 7])


def test_threads_change_nothing() -> None:
    given = made((40, 2, 14, 7))
    before = torch.get_num_threads()
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(run(given, "cpu"))
    torch.set_num_threads(before)
    assert torch.equal(*found)


@pytest.mark.parametrize("form", coef.FORMS)
def test_a_step_follows_the_gradient_of_the_noisy_polynomial(form: str) -> None:
    given = made((2, 2, 14, 7), dtype=torch.float64) | {"form": form, "order": None}
    given["order"] = torch.tensor([[[1, 2]], [[3, 4]]])
    given |= {k: given[k][:, :1].contiguous() for k in ("draws", "rounding")}
    encoder, decoder = (given[k].clone().requires_grad_() for k in ("encoder", "decoder"))
    rows = given["order"][:, 0]
    x, t = given["inputs"][0][rows], given["targets"][torch.arange(2)[:, None], rows]
    hidden = torch.sigmoid(torch.einsum("rmn,rmnl->rml", x, encoder))
    shift = spof_loss.shift(hidden, 0.5)[..., None]
    z = torch.einsum("rml,rmln->rmn", hidden, decoder) + shift
    scale = (0.7 + 0.3 * (shift * (shift / 2 + 2))).detach()
    bits = (given["rounding"].long() & 0xFFFF)[:, 0].double() / 65536
    drawn = given["draws"][:, 0].double()
    a1, a2 = (
        scale / 64 * torch.floor((torch.floor(a / scale * 2**20 + b) + d) / 2**14)
        for a, b, d in zip(
            spof_loss.coefficients(t, form=form)[1:], bits.unbind(1), drawn.unbind(1), strict=True
        )
    )
    (z * (a1 + a2 * z)).sum().backward()
    own = {k: v.clone() if isinstance(v, Tensor) else v for k, v in given.items()}
    coef.descend(**own)
    for name, weights in (("encoder", encoder), ("decoder", decoder)):
        wanted = weights.detach() - 0.05 * weights.grad
        torch.testing.assert_close(own[name], wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("bad", [2000.0, math.nan, math.inf])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_run_beyond_the_limit_stops_before_its_step(backend: str, bad: float) -> None:
    given = made(SHAPES["14 x 7"])
    given["targets"][1] = 0.5
    given["decoder"][1, 1, 3, 13] = bad
    given["stopped"][2] = 1
    found = run(given, backend)
    assert found[:, -1].tolist() == [0, 1, 1]
    for r, kept in ((0, False), (1, True), (2, True)):
        before = torch.cat([given[k][r].flatten() for k in ("encoder", "decoder")])
        same = torch.equal(found[r, :-1].nan_to_num(), before.nan_to_num())
        assert same is kept


def test_a_run_that_leaves_the_limit_later_keeps_its_earlier_steps() -> None:
    given = made(SHAPES["14 x 7"], noise="none") | {"lr": 1.0, "limit": 30.0}
    found = run(given, "cpu")
    assert torch.equal(found, run(given, "reference"))
    assert found[:, -1].any()
    assert not torch.equal(found[:, : 2 * 98], given["encoder"].flatten(1))


def test_the_logistic_function_is_right_to_the_last_places() -> None:
    for dtype, ulps in ((torch.float32, 4e-7), (torch.float64, 1e-15)):
        x = torch.cat([torch.linspace(-60, 60, 20001), torch.tensor([0.0, -0.0])]).to(dtype)
        torch.testing.assert_close(_sigmoid(x), torch.sigmoid(x), rtol=ulps, atol=1e-30)
        ends = torch.tensor([-1e30, -math.inf, math.inf, math.nan], dtype=dtype)
        assert _sigmoid(ends).nan_to_num(7).tolist() == [0, 0, 1, 7]


WRONG: dict[str, Any] = {
    "order": lambda g: {"order": g["order"] + RECORDS},
    "targets": lambda g: {"targets": g["targets"] + 0.5},
    "rounding": lambda g: {"rounding": None},
    "scale": lambda g: {"scale": 0.0},
    "inputs": lambda g: {"inputs": torch.rand(2, RECORDS, 14)},
    "draws": lambda g: {"draws": g["draws"][:, 1:].contiguous()},
    "form": lambda g: {"form": "cubic"},
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_and_change_nothing(name: str) -> None:
    given = made(SHAPES["14 x 7"])
    before = given["encoder"].clone()
    with pytest.raises(InvalidInput, match=name):
        coef.descend(**(given | WRONG[name](given)))
    assert torch.equal(given["encoder"], before)

"""Recurrent layers in one call: torch's modules in float64, and bits that depend on one sample."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpkern.base.errors import InvalidInput
from dpkern.ops import recurrent, testing
from tests.ops.backends.every_backend import every_backend

KINDS = ("lstm", "gru", "tanh", "relu")
ROUNDING = {torch.float32: 2e-5, torch.float64: 1e-12}
ISAS = [isa for isa in testing.available_isas() if isa in ("baseline", "avx2", "avx512")]
SIZES = [(1, 1, 1, 1), (3, 4, 5, 7), (5, 3, 16, 16), (13, 2, 3, 33), (50, 3, 9, 20), (2, 40, 1, 64)]
"""B, T, D and H."""

Results = dict[str, Tensor]


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


class Layer:
    """One layer and direction: inputs, states, weights, and gradients by all that goes out."""

    def __init__(
        self, kind: str, sizes: tuple[int, int, int, int], dtype: torch.dtype, reverse: bool = False
    ) -> None:
        batch, steps, inputs, hidden = sizes
        rows = {"lstm": 4, "gru": 3}.get(kind, 1) * hidden
        self.kind, self.reverse, self.hidden = kind, reverse, hidden
        self.x = draw(batch, steps, inputs, seed=1, dtype=dtype)
        count = 2 if kind == "lstm" else 1
        self.states = [draw(batch, hidden, seed=2 + i, dtype=dtype) for i in range(count)]
        small = 1 / math.sqrt(hidden)
        self.weights = [
            small * draw(*shape, seed=4 + i, dtype=dtype)
            for i, shape in enumerate([(rows, inputs), (rows, hidden), (rows,), (rows,)])
        ]
        self.gy = draw(batch, steps, hidden, seed=8, dtype=dtype)
        self.g_ends = [draw(batch, hidden, seed=9 + i, dtype=dtype) for i in range(count)]

    def rows(self, samples: slice) -> Layer:
        """The layer on some of the samples."""
        part = object.__new__(Layer)
        part.__dict__ |= vars(self)
        part.x, part.gy = self.x[samples].contiguous(), self.gy[samples].contiguous()
        part.states = [h[samples].contiguous() for h in self.states]
        part.g_ends = [g[samples].contiguous() for g in self.g_ends]
        return part

    def run(self, backend: str | None = None) -> Results:
        """All results of both ops, by name."""
        options: dict[str, Any] = {"reverse": self.reverse, "backend": backend}
        given, back = (self.x, *self.states, *self.weights), (*self.weights[:2], self.gy)
        if self.kind == "lstm":
            y, before, gates, cells = recurrent.lstm(*given, **options)
            names = ("d", "sums_d", "dx", "dh", "dc")
            made = recurrent.lstm_backward(
                gates, cells, self.states[1], *back, *self.g_ends, **options
            )
            results = {"y": y, "before": before, "gates": gates, "cells": cells}
        elif self.kind == "gru":
            y, before, gates = recurrent.gru(*given, **options)
            made = recurrent.gru_backward(gates, before, *back, *self.g_ends, **options)
            names = ("d", "e", "sums_d", "sums_e", "dx", "dh")
            results = {"y": y, "before": before, "gates": gates}
        else:
            options["nonlinearity"] = self.kind
            y, before = recurrent.rnn(*given, **options)
            last = y[:, 0 if self.reverse else -1].contiguous()
            names = ("d", "sums_d", "dx", "dh")
            made = recurrent.rnn_backward(before, last, *back, *self.g_ends, **options)
            results = {"y": y, "before": before}
        return results | dict(zip(names, made, strict=True))

    def torch(self) -> Results:
        """What torch's module gives in float64, and gradients of its weights sample by sample."""
        made: Any = {"lstm": nn.LSTM, "gru": nn.GRU}.get(self.kind, nn.RNN)
        options = {} if self.kind in ("lstm", "gru") else {"nonlinearity": self.kind}
        module = made(self.x.shape[2], self.hidden, batch_first=True, **options).double()
        with torch.no_grad():
            for own, weight in zip(module.parameters(), self.weights, strict=True):
                own.copy_(weight)
        found: list[list[Tensor]] = []
        for b in range(len(self.x)):
            x = self.x[b : b + 1].double().requires_grad_()
            states = [h[None, b : b + 1].double().requires_grad_() for h in self.states]
            turned = x.flip(1) if self.reverse else x
            y, ends = module(turned, tuple(states) if self.kind == "lstm" else states[0])
            y = y.flip(1) if self.reverse else y
            outputs = [y, *(ends if self.kind == "lstm" else [ends])]
            given = [self.gy[b : b + 1], *(g[None, b : b + 1] for g in self.g_ends)]
            leaves = [x, *states, *module.parameters()]
            gradients = torch.autograd.grad(outputs, leaves, [g.double() for g in given])
            found.append(
                [y[0].detach(), gradients[0][0], *(g[0, 0] for g in gradients[1:][: len(states)])]
            )
            found[-1] += gradients[1 + len(states) :]
        names = ["y", "dx", "dh", *(["dc"] if self.kind == "lstm" else [])]
        names += ["w_ih", "w_hh", "b_ih", "b_hh"]
        return {
            n: torch.stack(some) for n, some in zip(names, zip(*found, strict=True), strict=True)
        }


def per_sample(layer: Layer, results: Results) -> Results:
    """Gradients of the weights, from what the ops return."""
    d, e = results["d"], results.get("e", results["d"])
    sums = results["sums_d"], results.get("sums_e", results["sums_d"])
    return {
        "w_ih": torch.einsum("btg,btd->bgd", d.double(), layer.x.double()),
        "w_hh": torch.einsum("btg,bth->bgh", e.double(), results["before"].double()),
        "b_ih": sums[0],
        "b_hh": sums[1],
    }


@every_backend
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("kind", KINDS)
def test_torchs_modules(kind: str, reverse: bool, dtype: torch.dtype, backend: str) -> None:
    for sizes in SIZES:
        layer = Layer(kind, sizes, dtype, reverse)
        results, want = layer.run(backend), layer.torch()
        results |= per_sample(layer, results)
        for name, expected in want.items():
            testing.assert_close(f"{sizes} {name}", results[name], expected, ROUNDING[dtype])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("kind", KINDS)
def test_every_instruction_set(kind: str, dtype: torch.dtype, isa: str) -> None:
    for sizes in SIZES:
        layer = Layer(kind, sizes, dtype, reverse=True)
        want = layer.run("reference")
        with testing.isa(isa):
            got = layer.run("cpu")
        for name, tensor in got.items():
            testing.assert_close(f"{sizes} {name}", tensor, want[name], ROUNDING[dtype])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_a_sample_depend_on_it_alone(kind: str, dtype: torch.dtype, isa: str) -> None:
    """Alone, at any place, among others, with any number of threads: the same bits."""
    whole = Layer(kind, (53, 6, 9, 37), dtype)
    with testing.isa(isa), testing.threads(1):
        want = whole.run("cpu")
    for first, count in ((0, 1), (52, 1), (7, 2), (3, 11), (30, 23), (4, 48)):
        for threads in (1, 2, 3):
            samples = slice(first, first + count)
            with testing.isa(isa), testing.threads(threads):
                got = whole.rows(samples).run("cpu")
            for name, tensor in got.items():
                assert torch.equal(tensor, want[name][samples]), (name, first, count, threads)


@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_the_others(kind: str) -> None:
    layer, other = (Layer(kind, (10, 5, 4, 19), torch.float32) for _ in range(2))
    for tensor in (other.x, other.gy, *other.states, *other.g_ends):
        tensor[:4] *= 1e4
        tensor[5] = math.nan
        tensor[6:] = 0
    one, two = layer.run("cpu"), other.run("cpu")
    for name, tensor in one.items():
        assert torch.equal(tensor[4], two[name][4]), name


BACKWARD: dict[str, Any] = {"lstm": recurrent.lstm_backward, "gru": recurrent.gru_backward}


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_asks_for_the_gradient_by_the_inputs(kind: str) -> None:
    """Without columns of ``w_ih`` there is none, and nothing else changes."""
    layer = Layer(kind, (5, 4, 3, 18), torch.float32)
    want = layer.run("cpu")
    given: dict[str, Any] = {"w_ih": layer.weights[0][:, :0], "w_hh": layer.weights[1]}
    given |= {"gy": layer.gy, "gh": layer.g_ends[0]}
    if kind == "lstm":
        given |= {"cells": want["cells"], "c": layer.states[1], "gc": layer.g_ends[1]}
    else:
        given |= {"before": want["before"]}
    if kind in BACKWARD:
        given |= {"gates": want["gates"]}
    else:
        given |= {"last": want["y"][:, -1].contiguous(), "nonlinearity": kind}
    made = BACKWARD.get(kind, recurrent.rnn_backward)(**given)
    dx = 4 if kind == "gru" else 2
    assert made[dx].shape == (5, 4, 0)
    assert torch.equal(made[0], want["d"])
    assert torch.equal(made[dx + 1], want["dh"])


SPECIAL = [0.0, -0.0, 1e-45, -1e-40, 1e-20, 0.3, -30.0, 87.5, -88.0, 200.0, -1e30, math.inf]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ROUNDING)
def test_saturated_and_tiny_gates(dtype: torch.dtype, isa: str) -> None:
    """tanh and the logistic function over the whole range: one unit whose weight is one."""
    x = torch.tensor([*SPECIAL, *(-v for v in SPECIAL), math.nan], dtype=dtype)[:, None, None]
    zero, one = torch.zeros(len(x), 1, dtype=dtype), torch.ones(1, 1, dtype=dtype)
    with testing.isa(isa):
        tanh, _ = recurrent.rnn(x, zero, one, 0 * one, None, None, backend="cpu")
        four = torch.ones(4, 1, dtype=dtype)
        _, _, gates, _ = recurrent.lstm(x, zero, zero, four, 0 * four, None, None, backend="cpu")
    unit, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
    for got, function in ((tanh[:, 0, 0], torch.tanh), (gates[:, 0, 0], torch.sigmoid)):
        want = function(x[:, 0, 0].double())
        assert torch.equal(got.isnan(), want.isnan())
        error = (got.double() - want).abs()[:-1]
        assert bool((error <= 4 * unit * want.abs()[:-1] + tiny).all()), (function, error)
    assert torch.equal(tanh[:4, 0, 0], x[:4, 0, 0])


@pytest.mark.parametrize("dtype", ROUNDING)
def test_functions_are_right_to_a_few_units(dtype: torch.dtype) -> None:
    reach = torch.linspace(-20, 20, 20001, dtype=torch.float64)
    x = torch.cat((reach, reach.sign() * torch.logspace(-9, 0, 20001, dtype=torch.float64)))
    x = x.to(dtype)[:, None, None]
    zero, one = torch.zeros(len(x), 1, dtype=dtype), torch.ones(1, 1, dtype=dtype)
    tanh, _ = recurrent.rnn(x, zero, one, 0 * one, None, None, backend="cpu")
    four = torch.ones(4, 1, dtype=dtype)
    _, _, gates, _ = recurrent.lstm(x, zero, zero, four, 0 * four, None, None, backend="cpu")
    # torch's own in float64 is right to about one unit; so a few more are allowed there.
    for got, function in ((tanh[:, 0, 0], torch.tanh), (gates[:, 0, 0], torch.sigmoid)):
        want = function(x[:, 0, 0].double())
        error = (
            (got.double() - want) / torch.finfo(dtype).eps / want.abs().clamp(min=1e-300)
        ).abs()
        assert float(error.nan_to_num().max()) < 4, function


@every_backend
def test_relu_keeps_nan_and_passes_its_gradient(backend: str) -> None:
    x = torch.tensor([math.nan, -1.0, 2.0])[:, None, None]
    zero, one = torch.zeros(3, 1), torch.ones(1, 1)
    options: dict[str, Any] = {"nonlinearity": "relu", "backend": backend}
    y, before = recurrent.rnn(x, zero, one, one, None, None, **options)
    assert [v if v == v else None for v in y.flatten().tolist()] == [None, 0.0, 2.0]
    d, *_ = recurrent.rnn_backward(
        before, y[:, 0].contiguous(), one, one, y * 0 + 1, None, **options
    )
    assert d.flatten().tolist()[1:] == [0.0, 1.0]


@every_backend
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5)])
def test_empty_sizes(kind: str, sizes: tuple[int, int, int, int], backend: str) -> None:
    layer = Layer(kind, sizes, torch.float32)
    if sizes[1] == 0:
        if kind in ("tanh", "relu"):
            return  # there is no last state
        results = layer.run(backend)
        assert torch.equal(results["dh"], layer.g_ends[0])
        assert float(results["sums_d"].abs().sum()) == 0
        return
    results, want = layer.run(backend), layer.run("reference")
    for name, tensor in results.items():
        testing.assert_close(name, tensor, want[name], 1e-5)


def test_refusals() -> None:
    x, h = torch.zeros(2, 3, 4), torch.zeros(2, 5)
    with pytest.raises(InvalidInput, match="4 rows for each of its 5 columns"):
        recurrent.lstm(x, h, h, torch.zeros(15, 4), torch.zeros(15, 5), None, None)
    with pytest.raises(InvalidInput, match="3 rows for each of its 5 columns"):
        recurrent.gru(x, h, torch.zeros(20, 4), torch.zeros(20, 5), None, None)
    with pytest.raises(InvalidInput, match="gates"):
        recurrent.gru_backward(
            *(torch.zeros(2, 3, 15), torch.zeros(2, 3, 5)),
            *(torch.zeros(15, 4), torch.zeros(15, 5), None, None),
        )

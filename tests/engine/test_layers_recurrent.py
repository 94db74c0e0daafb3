"""Recurrent networks written out: torch's results and gradients, the batch first throughout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from dpkern.base.errors import InvalidInput, UnsupportedModule
from dpkern.engine.layers import packed, recurrent

B, T, FEATURES, HIDDEN = 5, 4, 3, 6
TOLERANCE = {"rtol": 1e-12, "atol": 1e-13}
NETWORKS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
FUNCTIONS = (*NETWORKS, *(f"{name}_cell" for name in NETWORKS))
THEIRS = {getattr(torch._VF, name): getattr(recurrent, name) for name in FUNCTIONS}


def draw(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


class Watched(nn.Parameter):
    """A parameter that leads to the functions under test, in the way of the engine."""

    seen: list[tuple[int, ...]]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in THEIRS:
            return THEIRS[function](*args, **(kwargs or {}))
        if function is F.linear:
            cls.seen.append(tuple(args[0].shape))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


def watch(layer: nn.Module) -> list[tuple[int, ...]]:
    """From here on the module's parameters are watched; what they met is in the list."""
    for parameter in layer.parameters():
        parameter.__class__ = Watched
    for module in layer.modules():
        if isinstance(module, nn.RNNBase):
            module.register_forward_pre_hook(packed.note_order, with_kwargs=True)
            module.register_forward_hook(packed.forget_order, always_call=True)
    Watched.seen = []
    return Watched.seen


def network(kind: str, **options: Any) -> nn.RNNBase:
    made: dict[str, type[nn.RNNBase]] = {"lstm": nn.LSTM, "gru": nn.GRU}
    if kind.startswith("rnn"):
        options["nonlinearity"] = kind.removeprefix("rnn_")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return made.get(kind, nn.RNN)(FEATURES, HIDDEN, dtype=torch.float64, **options)


def flat(outputs: Any) -> Iterator[Tensor]:
    if isinstance(outputs, PackedSequence):
        yield outputs.data
    elif isinstance(outputs, Tensor):
        yield outputs
    else:
        for some in outputs:
            yield from flat(some)


def gradients(outputs: Any, wanted: list[Tensor]) -> list[Tensor]:
    loss = sum(
        ((x * draw(*x.shape, seed=9 + i)).sum() for i, x in enumerate(flat(outputs))),
        torch.zeros(()),
    )
    return list(torch.autograd.grad(loss, wanted, retain_graph=True))  # of the packing


def compare(layer: nn.Module, inputs: tuple[Any, ...], leaves: list[Tensor]) -> Any:
    """Run as torch does, then watched; returns the watched outputs."""
    wanted = [*leaves, *layer.parameters()]
    expected = layer(*inputs)
    expected_gradients = gradients(expected, wanted)
    watch(layer)
    found = layer(*inputs)
    for mine, other in zip(flat(found), flat(expected), strict=True):
        torch.testing.assert_close(mine, other, **TOLERANCE)
    for mine, other in zip(gradients(found, wanted), expected_gradients, strict=True):
        torch.testing.assert_close(mine, other, **TOLERANCE)
    return found


def states(kind: str, layer: nn.RNNBase, batch: int = B) -> tuple[Any, list[Tensor]]:
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    h = draw(count, batch, layer.proj_size or HIDDEN, seed=5).requires_grad_()
    if kind != "lstm":
        return h, [h]
    c = draw(count, batch, HIDDEN, seed=6).requires_grad_()
    return (h, c), [h, c]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no-bias": {"bias": False},
    "layers": {"num_layers": 3},
    "both-directions": {"bidirectional": True},
    "layers-directions-no-bias": {"num_layers": 2, "bidirectional": True, "bias": False},
}
PROJECTIONS = {
    "projection": {"proj_size": 2},
    "projection-layers-directions": {"proj_size": 2, "num_layers": 2, "bidirectional": True},
    "projection-no-bias": {"proj_size": 2, "bias": False},
}
CASES = [
    pytest.param(kind, options, id=f"{kind}-{name}")
    for kind in NETWORKS
    for name, options in (OPTIONS | (PROJECTIONS if kind == "lstm" else {})).items()
]
LENGTHS = [2, 4, 1, 4, 3]


@pytest.mark.parametrize("with_state", [False, True], ids=["zero", "state"])
@pytest.mark.parametrize("batch_first", [False, True], ids=["time-first", "batch-first"])
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_results_and_gradients_of_torch(
    kind: str, options: dict[str, Any], batch_first: bool, with_state: bool
) -> None:
    layer = network(kind, batch_first=batch_first, **options)
    shape = (B, T, FEATURES) if batch_first else (T, B, FEATURES)
    x = draw(*shape, seed=1).requires_grad_()
    hx, leaves = states(kind, layer) if with_state else (None, [])
    output, _ = compare(layer, (x, hx), [x, *leaves])
    assert output.is_contiguous()
    seen = set(Watched.seen)
    assert {shape[0] for shape in seen} == {B}
    assert {shape[1] for shape in seen if len(shape) == 3} == {T}


@pytest.mark.parametrize("with_state", [False, True], ids=["zero", "state"])
@pytest.mark.parametrize("is_sorted", [False, True], ids=["any-order", "sorted"])
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_packed_sequences(
    kind: str, options: dict[str, Any], is_sorted: bool, with_state: bool
) -> None:
    layer = network(kind, batch_first=True, **options)
    x = draw(B, T, FEATURES, seed=1).requires_grad_()
    lengths = sorted(LENGTHS, reverse=True) if is_sorted else LENGTHS
    given = pack_padded_sequence(x, torch.tensor(lengths), True, enforce_sorted=is_sorted)
    hx, leaves = states(kind, layer) if with_state else (None, [])
    output, _ = compare(layer, (given, hx), [x, *leaves])
    assert {shape[0] for shape in Watched.seen} == {B}
    padded, found = pad_packed_sequence(output, batch_first=True)
    assert found.tolist() == lengths
    assert padded.shape[:2] == (B, T)


def test_packed_samples_keep_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row b of what a weight meets depends on sample b and on no other."""
    layer = network("lstm", num_layers=2, bidirectional=True)
    watch(layer)
    met: list[Tensor] = []

    def run(x: Tensor) -> list[Tensor]:
        met.clear()
        layer(pack_padded_sequence(x, torch.tensor(LENGTHS), True, enforce_sorted=False))
        return list(met)

    original = torch._C._nn.linear
    monkeypatch.setattr(
        recurrent.F, "linear", lambda x, w, b=None: met.append(x) or original(x, w, b)
    )
    x = draw(B, T, FEATURES, seed=1)
    before = run(x)
    for sample in range(B):
        changed = x.clone()
        changed[sample] += 1.0
        differs = [
            (one - other).flatten(1).abs().amax(1) > 0
            for one, other in zip(before, run(changed), strict=True)
        ]
        assert any(d[sample] for d in differs)
        others = torch.arange(B) != sample
        assert not any(d[others].any() for d in differs)


def test_a_sample_that_is_not_finite_stays_alone() -> None:
    layer = network("lstm", bidirectional=True)
    watch(layer)
    x = draw(B, T, FEATURES, seed=1)
    x[1] = torch.nan  # the longest: its rows are the first of the packed data
    given = pack_padded_sequence(x, torch.tensor(LENGTHS), True, enforce_sorted=False)
    output, _ = layer(given)
    padded, _ = pad_packed_sequence(output, batch_first=True)
    assert [bool(row.isfinite().all()) for row in padded] == [True, False, True, True, True]


def test_packed_data_of_unknown_order() -> None:
    layer = network("gru")
    watch(layer)
    x = draw(B, T, FEATURES, seed=1)
    given = pack_padded_sequence(x, torch.tensor(LENGTHS), True, enforce_sorted=False)
    layer(given)
    with pytest.raises(UnsupportedModule, match="Call the module itself"):
        layer.forward(given)


@pytest.mark.parametrize("kind", NETWORKS)
def test_dropout_between_layers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def dropout(x: Tensor, p: float, training: bool) -> Tensor:
        calls.append((tuple(x.shape), p, training))
        return x * 2.0 if training else x

    monkeypatch.setattr(recurrent.F, "dropout", dropout)
    layer = network(kind, num_layers=3, dropout=0.25, batch_first=True, bidirectional=True)
    watch(layer)
    x = draw(B, T, FEATURES, seed=1)
    trained, _ = layer(x)
    evaluated, _ = layer.eval()(x)
    shape = (B, T, 2 * HIDDEN)
    assert calls == [(shape, 0.25, True)] * 2 + [(shape, 0.25, False)] * 2
    assert not torch.equal(trained, evaluated)


@pytest.mark.parametrize("kind", NETWORKS)
def test_dropout_of_everything_is_that_of_torch(kind: str) -> None:
    layer = network(kind, num_layers=2, dropout=1.0)
    x = draw(T, B, FEATURES, seed=1).requires_grad_()
    compare(layer, (x,), [])


CELLS = {
    "lstm": nn.LSTMCell,
    "gru": nn.GRUCell,
    "rnn_tanh": nn.RNNCell,
    "rnn_relu": lambda *sizes, **options: nn.RNNCell(*sizes, nonlinearity="relu", **options),
}


@pytest.mark.parametrize("with_state", [False, True], ids=["zero", "state"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("kind", NETWORKS)
def test_cells(kind: str, bias: bool, with_state: bool) -> None:
    layer = CELLS[kind](FEATURES, HIDDEN, bias=bias, dtype=torch.float64)
    x = draw(B, FEATURES, seed=1).requires_grad_()
    h, c = (draw(B, HIDDEN, seed=seed).requires_grad_() for seed in (5, 6))
    hx = None if not with_state else (h, c) if kind == "lstm" else h
    leaves = [] if not with_state else [h, c] if kind == "lstm" else [h]
    compare(layer, (x, hx), [x, *leaves])
    assert Watched.seen == [(B, FEATURES), (B, HIDDEN)]


def test_one_product_for_all_inputs() -> None:
    layer = network("gru", batch_first=True)
    seen = watch(layer)
    layer(draw(B, T, FEATURES, seed=1))
    assert seen == [(B, T, FEATURES)] + [(B, HIDDEN)] * T


@pytest.mark.parametrize("kind", NETWORKS)
def test_an_empty_batch(kind: str) -> None:
    layer = network(kind, batch_first=True, num_layers=2, bidirectional=True)
    watch(layer)
    output, hidden = layer(draw(0, T, FEATURES, seed=1))
    assert output.shape == (0, T, 2 * HIDDEN)
    assert all(h.shape == (4, 0, HIDDEN) for h in flat(hidden))


def test_bfloat16_autocast() -> None:
    for kind in NETWORKS:
        layer = network(kind, batch_first=True).float()
        x = draw(B, T, FEATURES, seed=1).float()
        expected, _ = layer(x)
        watch(layer)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found, _ = layer(x)
        torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_unbatched_input(name: str) -> None:
    cell = name.endswith("_cell")
    x = draw(FEATURES, seed=1) if cell else draw(T, FEATURES, seed=1)
    h = draw(HIDDEN, seed=2)
    call = (x, h, h, h) if cell else (x, h, [], True, 1, 0.0, True, False, False)
    with pytest.raises(UnsupportedModule, match="no sample axis"):
        getattr(recurrent, name)(*call)


def test_a_state_for_other_samples() -> None:
    layer = network("lstm", batch_first=True)
    h = torch.zeros(1, B + 1, HIDDEN, dtype=torch.float64)
    call = (layer._flat_weights, True, 1, 0.0, True, False, True)
    with pytest.raises(InvalidInput, match="a state for 5 samples"):
        recurrent.lstm(draw(B, T, FEATURES, seed=1), (h, h), *call)
    with pytest.raises(InvalidInput, match="a state for 5 samples"):
        recurrent.gru_cell(draw(B, FEATURES, seed=1), h[0], h[0], h[0])


def test_no_time_steps() -> None:
    h = torch.zeros(1, B, HIDDEN)
    with pytest.raises(InvalidInput, match="at least one time step"):
        recurrent.gru(torch.zeros(B, 0, 3), h, [], True, 1, 0.0, True, False, True)

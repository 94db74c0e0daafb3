"""Multi-head attention written out: torch's results and gradients, the batch first throughout."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpkern.base.errors import DPKernError, InvalidInput, UnsupportedModule
from dpkern.engine.layers import attention

N, L, S, E, HEADS = 3, 4, 5, 8, 2  # all different, so that a wrong axis has a wrong size
TOLERANCE = {"rtol": 1e-12, "atol": 1e-13}

theirs = F.multi_head_attention_forward
ours = attention.multi_head_attention_forward


def draw(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def module(seed: int = 0, **options: Any) -> nn.MultiheadAttention:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = nn.MultiheadAttention(E, HEADS, dtype=torch.float64, **options)
        for parameter in made.parameters():  # biases start at zero
            nn.init.normal_(parameter)
    return made


def outcome(
    monkeypatch: pytest.MonkeyPatch,
    function: Callable[..., Any],
    layer: nn.MultiheadAttention,
    inputs: tuple[Tensor, ...],
    call: dict[str, Any],
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Outputs, and gradients of inputs, masks and parameters, of a weighted sum of the outputs."""
    leaves: dict[int, Tensor] = {}

    def leaf(x: Tensor) -> Tensor:  # q is k is v must survive
        return leaves.setdefault(id(x), x.detach().clone().requires_grad_())

    inputs = tuple(leaf(x) for x in inputs)
    call = {
        name: leaf(value)
        if isinstance(value, Tensor) and value.is_floating_point() and value.isfinite().all()
        else value
        for name, value in call.items()
    }
    wanted = [*leaves.values(), *layer.parameters()]
    with monkeypatch.context() as patch, torch.random.fork_rng(devices=[]):
        patch.setattr(F, "multi_head_attention_forward", function)
        torch.manual_seed(7)
        output, weights = layer(*inputs, **call)
    outputs = [output] if weights is None else [output, weights]
    loss = sum(
        ((x * draw(*x.shape, seed=index)).sum() for index, x in enumerate(outputs)), torch.zeros(())
    )
    return outputs, list(torch.autograd.grad(loss, wanted, allow_unused=True))


def same(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            torch.testing.assert_close(mine, other, **TOLERANCE)


def self_inputs(time: int = L) -> tuple[Tensor, Tensor, Tensor]:
    x = draw(time, N, E, seed=1)
    return x, x, x


def cross_inputs() -> tuple[Tensor, Tensor, Tensor]:
    memory = draw(S, N, E, seed=2)
    return draw(L, N, E, seed=1), memory, memory


def apart_inputs(kdim: int = E, vdim: int = E) -> tuple[Tensor, Tensor, Tensor]:
    return draw(L, N, E, seed=1), draw(S, N, kdim, seed=2), draw(S, N, vdim, seed=3)


CAUSAL = torch.ones(L, L).triu(1).bool()
PADDED = torch.arange(S).expand(N, S) >= torch.tensor([[5], [3], [1]])
CASES: dict[str, tuple[dict[str, Any], tuple[Tensor, Tensor, Tensor], dict[str, Any]]] = {
    "self": ({}, self_inputs(), {}),
    "cross": ({}, cross_inputs(), {}),
    "three-inputs": ({}, apart_inputs(), {}),
    "query-is-key": ({}, (self_inputs()[0],) * 2 + (draw(L, N, E, seed=4),), {}),
    "query-is-value": ({}, (self_inputs()[0], draw(L, N, E, seed=4), self_inputs()[0]), {}),
    "no-bias": ({"bias": False}, self_inputs(), {}),
    "no-bias-cross": ({"bias": False}, cross_inputs(), {}),
    "kdim-vdim": ({"kdim": 6, "vdim": 7}, apart_inputs(6, 7), {}),
    "kdim-vdim-no-bias": ({"kdim": 6, "vdim": 7, "bias": False}, apart_inputs(6, 7), {}),
    "weights-per-head": ({}, cross_inputs(), {"average_attn_weights": False}),
    "padding-bool": ({}, cross_inputs(), {"key_padding_mask": PADDED}),
    "padding-float": ({}, cross_inputs(), {"key_padding_mask": draw(N, S, seed=5)}),
    "mask-bool": ({}, self_inputs(), {"attn_mask": CAUSAL}),
    "mask-float": ({}, cross_inputs(), {"attn_mask": draw(L, S, seed=6)}),
    "mask-per-sample": ({}, cross_inputs(), {"attn_mask": draw(N * HEADS, L, S, seed=6)}),
    "mask-and-padding": (
        {},
        cross_inputs(),
        {"attn_mask": torch.ones(L, S).triu(4).bool(), "key_padding_mask": PADDED},
    ),
    "causal": ({}, self_inputs(), {"attn_mask": CAUSAL, "is_causal": True}),
    "causal-and-padding": (
        {},
        self_inputs(S),
        {
            "attn_mask": torch.ones(S, S).triu(1).bool(),
            "is_causal": True,
            "key_padding_mask": PADDED,
        },
    ),
    "bias-kv": ({"add_bias_kv": True}, self_inputs(), {}),
    "bias-kv-masked": (
        {"add_bias_kv": True},
        cross_inputs(),
        {"attn_mask": draw(L, S, seed=6), "key_padding_mask": draw(N, S, seed=5)},
    ),
    "zero-attention": ({"add_zero_attn": True}, cross_inputs(), {}),
    "bias-kv-zero-attention-masked": (
        {"add_bias_kv": True, "add_zero_attn": True},
        cross_inputs(),
        {
            "attn_mask": draw(N * HEADS, L, S, seed=6),
            "key_padding_mask": torch.where(PADDED, -math.inf, 0.0).double(),
        },
    ),
    "causal-zero-attention": (
        {"add_zero_attn": True},
        self_inputs(),
        {"attn_mask": CAUSAL, "is_causal": True},
    ),
    "dropout": ({"dropout": 0.4}, cross_inputs(), {}),
}


@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no-weights"])
@pytest.mark.parametrize("batch_first", [False, True], ids=["time-first", "batch-first"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_results_and_gradients_of_torch(
    monkeypatch: pytest.MonkeyPatch,
    case: tuple[dict[str, Any], tuple[Tensor, Tensor, Tensor], dict[str, Any]],
    batch_first: bool,
    need_weights: bool,
) -> None:
    options, inputs, call = case
    if batch_first:
        turned = {id(x): x.transpose(0, 1).contiguous() for x in inputs}
        inputs = tuple(turned[id(x)] for x in inputs)  # type: ignore[assignment]
    layer = module(batch_first=batch_first, **options)
    call = {**call, "need_weights": need_weights}
    mine, grads = outcome(monkeypatch, ours, layer, inputs, call)
    other, other_grads = outcome(monkeypatch, theirs, layer, inputs, call)
    same(mine, other)
    same(grads, other_grads)


def test_evaluation_has_no_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = module(dropout=0.4).eval()
    mine, _ = outcome(monkeypatch, ours, layer, self_inputs(), {})
    other, _ = outcome(monkeypatch, theirs, layer, self_inputs(), {})
    same(mine, other)


def arguments(layer: nn.MultiheadAttention, inputs: tuple[Tensor, ...]) -> tuple[Any, ...]:
    return (
        *inputs,
        E,
        HEADS,
        layer.in_proj_weight,
        layer.in_proj_bias,
        layer.bias_k,
        layer.bias_v,
        layer.add_zero_attn,
        layer.dropout,
        layer.out_proj.weight,
        layer.out_proj.bias,
    )


@pytest.mark.parametrize("need_weights", [True, False])
def test_static_key_and_value(need_weights: bool) -> None:
    call = arguments(module(), cross_inputs())
    depth = E // HEADS
    static = {
        "static_k": draw(N * HEADS, 6, depth, seed=8),
        "static_v": draw(N * HEADS, 6, depth, seed=9),
        "need_weights": need_weights,
    }
    mine, other = ours(*call, **static), theirs(*call, **static)
    same(list(mine), list(other))


def test_static_key_alone() -> None:
    call = arguments(module(), cross_inputs())
    static = draw(N * HEADS, S, E // HEADS, seed=8)
    same(list(ours(*call, static_k=static)), list(theirs(*call, static_k=static)))


class Watched(nn.Parameter):
    """A parameter that notes the functions it is used in, in the way of the engine."""

    seen: list[tuple[str, tuple[int, ...]]]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is theirs:
            return ours(*args, **(kwargs or {}))
        if function in (F.linear, Tensor.expand):
            cls.seen.append((function.__name__, tuple(args[0].shape)))
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
        # A slice of a parameter is still the parameter.
        return result.as_subclass(cls) if function is Tensor.__getitem__ else result


def watch(layer: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    for parameter in layer.parameters():
        parameter.__class__ = Watched
    Watched.seen = []
    return Watched.seen


@pytest.mark.parametrize(
    ("batch_first", "need_weights"),
    [(False, False), (False, True), (True, False), (True, True)],
)
def test_parameters_meet_the_batch_first(batch_first: bool, need_weights: bool) -> None:
    layer = module(batch_first=batch_first)
    x = draw(N, L, E, seed=1) if batch_first else draw(L, N, E, seed=1)
    expected = layer(x, x, x, need_weights=need_weights)
    seen = watch(layer)
    found = layer(x, x, x, need_weights=need_weights)
    same(list(found), list(expected))
    assert seen == [("linear", (N, L, E)), ("linear", (N, L, E))]  # one product for q, k and v


def test_cross_attention_takes_slices() -> None:
    layer = module(add_bias_kv=True)
    seen = watch(layer)
    layer(*cross_inputs())
    linear = [shape for name, shape in seen if name == "linear"]
    assert sorted(linear) == sorted([(N, L, E), (N, S, E), (N, L, E)])  # key and value together
    assert [shape for name, shape in seen if name == "expand"] == [(1, 1, E)] * 2


def test_transformer_layers_come_here() -> None:
    x, memory = draw(N, L, E, seed=1), draw(N, S, E, seed=2)
    options: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "dtype": torch.float64}
    for layer, inputs in (
        (nn.TransformerEncoderLayer(E, HEADS, 16, **options), (x,)),
        (nn.TransformerDecoderLayer(E, HEADS, 16, **options), (x, memory)),
    ):
        expected = layer(*inputs)
        seen = watch(layer)
        same([layer(*inputs)], [expected])
        assert {shape[0] for _, shape in seen} == {N}


def test_a_learned_mask_is_expanded_over_the_batch() -> None:
    layer = module()
    seen = watch(layer)
    mask = Watched(draw(L, L, seed=6))
    layer(*self_inputs(), attn_mask=mask)
    assert ("expand", (L, L)) in seen


def test_the_batch_first_needs_no_copy() -> None:
    x = draw(N, L, E, seed=1)
    pointers = []

    def linear(x: Tensor, *rest: Tensor) -> Tensor:
        pointers.append(x.data_ptr())
        assert x.is_contiguous()
        return torch._C._nn.linear(x, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "linear", linear)
        patch.setattr(F, "multi_head_attention_forward", ours)
        module(batch_first=True)(x, x, x, need_weights=False)
    assert pointers[0] == x.data_ptr()


def test_the_layout_of_torch_where_time_is_first() -> None:
    output, _ = ours(*arguments(module(), self_inputs()))
    assert output.is_contiguous()  # callers fold it with view()


@pytest.mark.parametrize("need_weights", [True, False])
def test_an_empty_batch(need_weights: bool) -> None:
    layer = module()
    call = arguments(layer, tuple(x[:, :0] for x in cross_inputs()))
    padding = PADDED[:0]
    output, weights = ours(*call, key_padding_mask=padding, need_weights=need_weights)
    assert output.shape == (L, 0, E)
    assert weights is None or weights.shape == (0, L, S)
    grads = torch.autograd.grad(output.sum(), list(layer.parameters()))
    assert all(not grad.any() for grad in grads)


def test_bfloat16_autocast() -> None:
    layer = module().float()
    inputs = tuple(x.float() for x in cross_inputs())
    exact, _ = theirs(*arguments(layer, inputs), key_padding_mask=PADDED)
    errors = []
    for function in (ours, theirs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output, _ = function(*arguments(layer, inputs), key_padding_mask=PADDED)
        assert output.dtype == torch.bfloat16
        errors.append(float(((output - exact).norm() / exact.norm()).detach()))
    assert errors[0] < 0.05, errors


BAD: dict[str, tuple[type[DPKernError], str, dict[str, Any]]] = {
    "unbatched": (UnsupportedModule, "no sample axis", {"query": draw(L, E, seed=1)}),
    "key-2d": (InvalidInput, "key", {"key": draw(S, E, seed=1)}),
    "width": (InvalidInput, "width 8", {"query": draw(L, N, 6, seed=1)}),
    "batch": (InvalidInput, "key", {"key": draw(S, N + 1, E, seed=1)}),
    "value": (InvalidInput, "value", {"value": draw(L, N, E, seed=1)}),
    "causal-without-mask": (InvalidInput, "attn_mask", {"is_causal": True}),
    "integer-mask": (InvalidInput, "attn_mask", {"attn_mask": torch.ones(L, S, dtype=torch.int)}),
    "mask-2d": (InvalidInput, "attn_mask", {"attn_mask": torch.zeros(S, L)}),
    "mask-3d": (InvalidInput, "attn_mask", {"attn_mask": torch.zeros(N, L, S)}),
    "padding": (InvalidInput, "key_padding_mask", {"key_padding_mask": PADDED.t()}),
    "bias-k-alone": (InvalidInput, "bias_k", {"bias_k": draw(1, 1, E, seed=1)}),
    "no-weight": (InvalidInput, "in_proj_weight", {"in_proj_weight": None}),
    "no-q-weight": (InvalidInput, "q_proj_weight", {"use_separate_proj_weight": True}),
    "static": (InvalidInput, "static_k", {"static_k": draw(N, S, 4, seed=1)}),
}


@pytest.mark.parametrize(("error", "text", "change"), BAD.values(), ids=BAD)
def test_bad_calls(error: type[DPKernError], text: str, change: dict[str, Any]) -> None:
    names = list(F.multi_head_attention_forward.__annotations__)
    call = dict(zip(names, arguments(module(), cross_inputs()), strict=False))
    with pytest.raises(error, match=text):
        ours(**{**call, **change})


def test_the_signature_of_torch() -> None:
    mine, other = inspect.signature(ours), inspect.signature(theirs)
    assert list(mine.parameters) == list(other.parameters)
    defaults = [x.default for x in mine.parameters.values()]
    assert defaults == [x.default for x in other.parameters.values()]


def test_rows() -> None:
    assert attention.rows(draw(4, 2, seed=0), 1, 3).shape == (2, 2)
    assert math.isclose(float(attention.rows(torch.arange(4.0), 1, 3).sum()), 3.0)

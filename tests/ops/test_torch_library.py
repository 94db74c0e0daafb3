"""``torch.ops.dpkern``: every op as a PyTorch operator, with fakes, in graphs and in profiles."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

import dpkern
from dpkern import ops
from dpkern.base import dispatch
from dpkern.base import text as texts
from dpkern.base.errors import InvalidInput
from dpkern.base.rng import Key, Purpose
from dpkern.ops import coef, ghost, noise, spectral, update
from dpkern.ops._draws import SampleReads
from dpkern.ops._library import OPERATORS

KEY = Key.from_unsafe_seed(6)
STREAM, ROUNDING = KEY.stream(Purpose.NOISE, 1), KEY.stream(Purpose.ROUNDING, 1)
BAND = spectral.Band((8, 8), "shells", 0.5)
CONV = {"kernel_size": 3, "padding": 1}


def _draws() -> update.Draws:
    made = {"position": 0, "count": 1100}
    values = noise.lattice_draws(STREAM, **made)
    return update.Draws(0, values, noise.rounding_bits(ROUNDING, **made))


def _reads() -> SampleReads:
    return SampleReads(1, torch.arange(7, dtype=torch.int16), cursor=2, shift=10)


def _release() -> coef.Noise:
    return coef.Noise(scale=torch.rand(3) + 0.5, stream=STREAM, rounding=ROUNDING, draws=_draws())


def _update() -> tuple[tuple[Any, ...], dict[str, Any]]:
    params = [torch.randn(3), torch.randn(2, 2)]
    rule = update.AdamW(lr=0.1)
    made = update.Noise(
        distribution="gaussian", scales=(0.5, 1.5), stream=STREAM, positions=(0, 3), draws=_draws()
    )
    given = {"rule": rule, "state": rule.init(params), "gradient_scale": 0.25, "noise": made}
    return (params, [torch.randn_like(p) for p in params]), given


def _call(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


r = torch.rand
CALLS: dict[str, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "clip_sum": lambda: _call(
        [r(2, 3), r(2)], [0.5, 1.5], style="per_layer", arithmetic="exact", unit=[0.01, 0.02]
    ),
    "clip_sum.out": lambda: _call(r(2, 3), 0.5, style="per_layer", out=[r(3)]),
    "sample_norm": lambda: _call([r(2, 3), r(2)], scale=[r(3) + 1, r(()) + 1]),
    "descend": lambda: _call(
        *(r(2, 2, 5, 3), r(2, 2, 3, 5), torch.zeros(2).int(), torch.rand(1, 4, 5)),
        *(torch.rand(2, 4, 5), torch.ones(2, 3, 2).long()),
        form="taylor",
        lr=0.1,
        draws=torch.ones(2, 3, 2, 2, 5).int(),
        rounding=torch.ones(2, 3, 2, 2, 5).short(),
        scale=0.5,
    ),
    "expanded": lambda: _call(r(3, 4), r(3, 2), r(2, 4), noise=_release()),
    "expanded.out": lambda: _call(r(3, 4), r(3, 2), r(2, 4), out=(r(3).double(), r(2, 4), r(3, 4))),
    "perturb": lambda: _call(r(3, 4), form="taylor", noise=_release()),
    "perturb.out": lambda: _call(
        r(3, 4), form="printed", out=coef.QuadraticCoefficients(r(3, 4), r(3, 4))
    ),
    "quadratic": lambda: _call(r(3, 4), r(3, 4), form="taylor", shift=r(3), noise=_release()),
    "quadratic.out": lambda: _call(r(3, 4), r(3, 4), form="taylor", out=(r(3).double(), r(3, 4))),
    "clip_factors": lambda: _call([r(2).double()], 0.5, dtype=torch.float32, automatic=True),
    "contract": lambda: _call([r(2, 3), r(2)], r(2), [r(3), r(())]),
    "conv_gradient": lambda: _call(r(2, 4, 5, 5), r(2, 6, 5, 5), groups=2, **CONV),
    "conv_norm": lambda: _call(r(2, 4, 5), r(2, 6, 5), route="direct", **CONV),
    "conv_sum": lambda: _call(r(2, 4, 5, 5), r(2, 6, 5, 5), r(2), r(6, 4, 3, 3), **CONV),
    "embedding_norm": lambda: _call(torch.ones(2, 3, dtype=torch.int64), r(2, 3, 4), padding_idx=0),
    "embedding_sum": lambda: _call(
        torch.ones(2, 3, dtype=torch.int64), r(2, 3, 4), r(2), r(5, 4), padding_idx=0
    ),
    "explicit_norm": lambda: _call([r(2, 3), r(2)]),
    "group_norm_backward": lambda: _call(r(2, 4, 3), r(2, 4, 3), r(2, 2), r(2, 2) + 1, weight=None),
    "layer_norm_backward": lambda: _call(r(2, 3, 4), r(2, 3, 4), r(2, 3), r(2, 3), weight=r(4)),
    "rms_norm_backward": lambda: _call(r(2, 3, 4), r(2, 3, 4), r(2, 3), weight=r(4)),
    "linear_gradient": lambda: _call(r(2, 3, 4).bfloat16(), r(2, 3, 5).bfloat16()),
    "linear_norm": lambda: _call(r(2, 3, 4), r(2, 3, 5), route="gram"),
    "linear_norms": lambda: _call([r(2, 3, 4)] * 2, [r(2, 3, 5)] * 2),
    "rounded_gradient": lambda: _call(r(2, 3, 4).bfloat16(), r(2, 3, 5).bfloat16()),
    "rounded_sum": lambda: _call([r(2, 5, 4).bfloat16()], r(2), [r(5, 4)]),
    "linear_sum": lambda: _call(r(2, 3, 4), r(2, 3, 5), r(2), r(5, 4)),
    "tied_cross": lambda: _call(
        torch.ones(2, 3, dtype=torch.int64), r(2, 3, 4), r(2, 2, 4), r(2, 2, 5), padding_idx=None
    ),
    "conv_integer_sum": lambda: _call(
        r(2, 4, 5, 5), r(2, 6, 5, 5), r(2) * 1e4, torch.ones(6, 4, 3, 3).int(), **CONV
    ),
    "conv_sum_error": lambda: _call(r(2, 4, 5, 5), r(2, 6, 5, 5), groups=2, **CONV),
    "embedding_integer_sum": lambda: _call(
        *(torch.ones(2, 3, dtype=torch.int64), r(2, 3, 4), r(2) * 1e4, torch.ones(5, 4).int()),
        padding_idx=0,
    ),
    "explicit_integer_sum": lambda: _call(
        [r(2, 3), r(2)], r(2) * 1e4, [torch.ones(3).int(), torch.ones(()).int()]
    ),
    "linear_integer_sum": lambda: _call(
        r(2, 1, 4), r(2, 1, 5), r(2) * 1e4, torch.ones(5, 4).int(), rounding="factors"
    ),
    "linear_integer_norm": lambda: _call(r(2, 3, 4), r(2, 3, 5)),
    "linear_sum_error": lambda: _call(r(2, 3, 4), r(2, 3, 5)),
    "tied_integer_sum": lambda: _call(
        *(torch.ones(2, 3, dtype=torch.int64), r(2, 2, 4), r(2, 2, 5), r(2, 3, 4)),
        *(r(2) * 1e4, torch.ones(5, 4).int()),
        padding_idx=None,
    ),
    "tied_sum_error": lambda: _call(
        torch.ones(2, 3, dtype=torch.int64), r(2, 2, 4), r(2, 2, 5), r(2, 3, 4), padding_idx=0
    ),
    "add_noise": lambda: _call(
        r(3, 2), stream=STREAM, scale=r(3, 2) + 0.5, rounding=ROUNDING, draws=_draws()
    ),
    "keystream": lambda: _call(STREAM, first_block=1, blocks=2),
    "lattice_draws": lambda: _call(STREAM, position=3, count=5, distribution="laplace"),
    "lattice_draws.out": lambda: _call(STREAM, position=3, count=5, out=r(5).int()),
    "rounding_bits": lambda: _call(ROUNDING, position=3, count=5, device="cpu"),
    "rounding_bits.out": lambda: _call(ROUNDING, position=3, count=5, out=r(5).short()),
    "source_draws": lambda: _call(_draws(), position=3, count=5),
    "source_draws.out": lambda: _call(_reads(), position=3, count=5, out=r(5).int()),
    "matmul": lambda: _call(r(2, 3), r(4, 3).t(), bias=r(4)),
    "lstm": lambda: _call(
        *(r(2, 3, 5), r(2, 4), r(2, 4), r(16, 5), r(16, 4), r(16), r(16)), reverse=True
    ),
    "lstm_backward": lambda: _call(
        *(r(2, 3, 16), r(2, 3, 4), r(2, 4), r(16, 5), r(16, 4), r(2, 3, 4), r(2, 4), r(2, 4))
    ),
    "gru": lambda: _call(r(2, 3, 5), r(2, 4), r(12, 5), r(12, 4), b_ih=None, b_hh=None),
    "gru_backward": lambda: _call(
        *(r(2, 3, 16), r(2, 3, 4), r(12, 5), r(12, 4), r(2, 3, 4)), gh=None, reverse=True
    ),
    "rnn": lambda: _call(
        r(2, 3, 5), r(2, 4), r(4, 5), r(4, 4), r(4), b_hh=None, nonlinearity="relu"
    ),
    "rnn_backward": lambda: _call(
        *(r(2, 3, 4), r(2, 4), r(4, 5), r(4, 4)), gy=None, gh=r(2, 4), nonlinearity="relu"
    ),
    "bins_sum": lambda: _call(
        *spectral.conv_bins(r(2, 4, 5, 5), r(2, 6, 5, 5), band=BAND, **CONV)[:2],
        *(r(2), r(6, 4, 3, 3)),
        band=BAND,
    ),
    "circulant_gradient": lambda: _call(r(2, 3, 2, 8), r(2, 3, 1, 8)),
    "circulant_norm": lambda: _call(r(2, 3, 2, 8), r(2, 3, 1, 8), band=spectral.Band((8,), "all")),
    "circulant_product": lambda: _call(r(2, 3, 8), r(2, 3, 8), convention="column"),
    "circulant_sum": lambda: _call(r(2, 3, 2, 8), r(2, 3, 1, 8), r(2), r(1, 2, 8)),
    "conv_bins": lambda: _call(r(2, 4, 5, 5), r(2, 6, 5, 5), band=BAND, **CONV),
    "whitened_bins": lambda: _call(
        *(r(2, 4, 5, 5), r(2, 6, 5, 5), r(3, 9).double()), band=BAND, **CONV
    ),
    "spectral_conv_norm": lambda: _call(
        r(2, 4, 5, 5), r(2, 6, 5, 5), size=(8, 8), band=BAND, **CONV
    ),
    "filtered": lambda: _call(r(2, 4, 5, 5), padding=[1, 1], rows=[7, 6], band=BAND),
    "whitened_norm": lambda: _call(r(2, 3, 4, 2, 2), r(3, 4).double()),
    "randomize": lambda: _call(
        torch.arange(6) % 3, stream=KEY.stream(Purpose.SYMBOLS, 1), keep=2**63 + 7, categories=3
    ),
    "advance": lambda: _call(
        update.step_counter(update.Adam(lr=0.1), 3, "cpu"), rule=update.Adam(lr=0.1)
    ),
    "project": lambda: _call([r(3), r(2, 2)], update.Ball(0.1)),
    "step": _update,
}
TESTS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_static",
    "test_aot_dispatch_dynamic",
)


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.dpkern, packet), overload or "default")


def _op(name: str) -> Any:
    return OPERATORS[name].call


def _arguments(name: str) -> dict[str, Any]:
    args, kwargs = CALLS[name]()
    return OPERATORS[name].flat(*args, **kwargs)


def test_every_op_is_an_operator() -> None:
    assert set(CALLS) == set(OPERATORS)
    assert {made.call.name for made in OPERATORS.values()} == set(dispatch.OPS)


@pytest.mark.parametrize("name", CALLS)
def test_operator_does_what_the_op_does(name: str) -> None:
    args, kwargs = CALLS[name]()
    flat = OPERATORS[name].flat(*copy.deepcopy(args), **copy.deepcopy(kwargs))
    wanted = OPERATORS[name].results.of(_op(name)(*args, **kwargs))
    made = _operator(name)(**flat)
    made = () if made is None else made if isinstance(made, tuple) else (made,)
    torch.testing.assert_close(made, wanted[len(wanted) - len(made) :], rtol=0, atol=0)
    tensors = [_tensors(values) for values in (flat, OPERATORS[name].flat(*args, **kwargs))]
    torch.testing.assert_close(*tensors, rtol=0, atol=0)  # those that were written as well


def _tensors(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, torch.Tensor)
        or (isinstance(value, list) and value and isinstance(value[0], torch.Tensor))
    }


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str) -> None:
    torch.library.opcheck(_operator(name), (), _arguments(name), test_utils=TESTS)


def test_results_lie_as_graphs_expect_them() -> None:
    # The CPU's kernel leaves these gradients in another order than that of their dimensions.
    x, g = r(2, 3, 9, 9), r(2, 40, 9, 9)
    made, _ = torch.ops.dpkern.conv_gradient(x, g, kernel_size=3, padding=1)
    wanted, _ = ghost.conv_gradient(x, g, kernel_size=3, padding=1)
    assert made.is_contiguous()
    assert not wanted.is_contiguous()
    torch.testing.assert_close(made, wanted, rtol=0, atol=0)


def test_fake_tensors_have_shapes_and_refusals() -> None:
    with FakeTensorMode():
        squares = torch.ops.dpkern.linear_norm(torch.empty(2, 3, 4), torch.empty(2, 3, 5))
        assert squares.shape == (2,)
        assert squares.dtype is torch.float64
        empty = torch.ops.dpkern.linear_norm(torch.empty(0, 3, 4), torch.empty(0, 3, 5))
        assert empty.shape == (0,)
        with pytest.raises(InvalidInput, match="shape"):
            torch.ops.dpkern.linear_norm(torch.empty(2, 3, 4), torch.empty(2, 7, 5))


def _clipped(a: torch.Tensor, g: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    squares = torch.ops.dpkern.linear_norm(a.relu(), g)
    factors, norms = torch.ops.dpkern.clip_factors([squares], 1.0, dtype=torch.float32)
    torch.ops.dpkern.linear_sum(a.relu(), g, factors, out)
    made: torch.Tensor = norms + out.sum()
    return made


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_whole(backend: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(_clipped, backend=backend, fullgraph=True, dynamic=dynamic)
    for batch in (2, 5):
        a, g = torch.randn(batch, 3, 4), r(batch, 3, 5)
        outs = torch.zeros(5, 4), torch.zeros(5, 4)
        torch.testing.assert_close(compiled(a, g, outs[0]), _clipped(a, g, outs[1]))
        torch.testing.assert_close(*outs)


def test_the_snippet_of_the_page_on_ops() -> None:
    page = (Path(__file__).parents[2] / "docs" / "ops.md").read_text()
    snippets = [part.split("```")[0] for part in page.split("```python")[1:]]
    found: dict[str, Any] = {}
    exec(next(snippet for snippet in snippets if "torch.ops.dpkern" in snippet), found)
    torch.testing.assert_close(found["params"], [torch.full((3,), -0.1)])


@pytest.mark.parametrize("name", CALLS)
def test_no_operator_has_a_derivative(name: str) -> None:
    given = _arguments(name)
    written = {argument.name for argument in _operator(name)._schema.arguments if argument.is_write}
    for key, value in given.items():
        for tensor in value if isinstance(value, list) else [value]:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                tensor.requires_grad_(key not in written)
    with dpkern.use("reference"):
        made = _operator(name)(**given)
    parts = made if isinstance(made, tuple) else (made,)
    flat = [t for part in parts for t in (part if isinstance(part, list) else [part])]
    assert not any(tensor is not None and tensor.requires_grad for tensor in flat)


def test_autograd_sees_what_is_written() -> None:
    out, weight = torch.zeros(5, 4), torch.ones(5, 4).requires_grad_()
    loss = (out * weight).sum()
    torch.ops.dpkern.linear_sum(r(2, 3, 4), r(2, 3, 5), r(2), out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_text_holds_no_key() -> None:
    stream = Key.fresh().stream(Purpose.NOISE, 1)
    text, tensors = ops.flat(stream)
    assert not tensors
    assert text == ops.flat(stream)[0]  # a compiled graph meets the same text again
    assert stream.key.hex() not in text
    assert repr(stream.key) not in text
    unknown = text.replace(text.split('"')[7], "0" * 16)
    for other in (unknown, "", "[1]", '{"Key": {}}', '{"Stream": {"n0": 1}}', "{}"):
        with pytest.raises(InvalidInput, match=r"stream.*dpkern\.ops\.flat") as caught:
            torch.ops.dpkern.keystream(other, first_block=0, blocks=1)
        assert stream.key.hex() not in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [
        STREAM,
        BAND,
        update.SGD(lr=0.1, momentum=0.9),
        update.AdamW(lr=1e-3, betas=(0.1, 0.2)),
        update.Box(float("-1e300"), 0.1),
    ],
)
def test_text_is_the_object(value: Any) -> None:
    made = texts.read("value", *texts.flat(value), texts.classes_of(type(value)))
    assert made == value
    assert type(made) is type(value)


def test_what_is_no_argument_is_no_text() -> None:
    with pytest.raises(InvalidInput, match="Key"):
        ops.flat(Key.fresh())


def test_state_steps_are_the_caller_s() -> None:
    params, rule = [torch.zeros(2)], update.SGD(lr=1.0, momentum=0.5)
    state = rule.init(params)
    twin, twin_state = [torch.zeros(2)], rule.init(params)
    for _ in range(3):
        given = dict(zip(("state", "state_tensors"), ops.flat(state), strict=True))
        torch.ops.dpkern.step(params, [torch.ones(2)], rule=ops.flat(rule)[0], **given)
        state.steps += 1
        update.step(twin, [torch.ones(2)], rule=rule, state=twin_state)
    torch.testing.assert_close(params, twin, rtol=0, atol=0)


def test_profiles_name_every_op() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for name in CALLS:
            args, kwargs = CALLS[name]()
            _op(name)(*args, **kwargs)
    seen = {event.key for event in profiler.key_averages()}
    assert {f"dpkern::{name}" for name in CALLS if not name.endswith(".out")} <= seen

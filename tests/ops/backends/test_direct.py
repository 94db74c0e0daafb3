"""Calls that C++ looks at: it sees what Python's look sees, and leaves the rest to Python."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dpkern.base import dispatch, validate
from dpkern.base.dispatch import OPS
from dpkern.base.errors import DPKernError, InvalidInput
from dpkern.base.schema import BoundCall, Schema
from dpkern.base.signature import (
    Count,
    Double,
    Float,
    FloatDtype,
    Index,
    Int64,
    NonNegative,
    OneOrMore,
    Operand,
    Position,
    Positive,
    Sum,
    dense,
    strided,
    transposable,
    written,
)
from dpkern.bench.cases import FACTS
from dpkern.bench.outcome import bits
from dpkern.ops import clip, ghost, product
from dpkern.ops.backends import _direct, _extension, _native
from tests.ops.conformance.bad import bad_arguments
from tests.ops.conformance.calls import cases

pytestmark = pytest.mark.usefixtures("one_thread")
EXTENSION: Any = _extension.load_extension()
if isinstance(EXTENSION, str) or not _direct.connect(EXTENSION):
    pytest.skip("no compiled module that sees tensors", allow_module_level=True)


class Deferred(Exception):
    """C++ left the call to Python."""


def _defer(*args: Any, **kwargs: Any) -> Any:
    raise Deferred


Look = Callable[..., BoundCall]
Change = Callable[[dict[str, Any]], None]


def seeing(schema: Schema, change: Change | None = None) -> Look:
    """The look in C++ alone; ``change`` plants an error in what it is told of the signature."""
    described = _direct._described(schema)
    assert described is not None
    described["check"] = None
    if change is not None:
        change(described)
    found: Look = EXTENSION.binder(described, _defer)
    return found


def in_python(schema: Schema) -> Look:
    """The look in Python alone, and whatever stands behind it."""
    return Schema(schema.function, None).bind


def outcome(look: Look, args: dict[str, Any]) -> Any:
    """What is bound, in a form that can be compared; or the error's text."""
    try:
        bound = look(**args)
    except Deferred:
        return Deferred
    except DPKernError as error:
        return str(error)
    tensors = [id(a) for arg in bound.args for a in (arg if type(arg) is tuple else [arg])]
    kinds = [type(size) for size in bound.sizes]
    return tensors, [type(arg) for arg in bound.args], kinds, bound[1:]


def differences(schema: Schema, calls: Iterator[dict[str, Any]], look: Look) -> list[str]:
    """Calls that C++ binds and Python does not, or in another way."""
    wrong, python = [], in_python(schema)
    for args in calls:
        seen = outcome(look, args)
        if seen is not Deferred and seen != outcome(python, args):
            wrong.append(f"{schema.signature.name}: {args}")
    return wrong


def calls_of(name: str, *, bad: bool) -> Iterator[dict[str, Any]]:
    """Valid calls of an op, or what its signature refuses."""
    found = list(cases(OPS[name], FACTS[name]))
    if not bad:
        yield from (case.arguments() for case in found)
        return
    floating = (case for case in found if case.kind is not None and case.kind.is_floating_point)
    first = next(floating, found[0])
    for parameter, (_, _, value) in bad_arguments(first):
        yield first.arguments() | {parameter: value}


@pytest.mark.parametrize("name", sorted(OPS))
def test_it_binds_every_op_as_python_does(name: str) -> None:
    schema = OPS[name].schema
    look = seeing(schema)
    assert not differences(schema, calls_of(name, bad=False), look)
    assert not differences(schema, calls_of(name, bad=True), look)
    usual = [outcome(look, args) for args in calls_of(name, bad=False)]
    odd = sum("odd layout" in case.name for case in cases(OPS[name], FACTS[name]))
    # Only what is dense but not contiguous, and Python's objects for numbers, need Python.
    assert sum(seen is Deferred for seen in usual) <= max(odd, len(usual) // 4), name


@pytest.mark.parametrize("name", sorted(OPS))
def test_what_python_refuses_is_left_to_python(name: str) -> None:
    schema = OPS[name].schema
    look, python = seeing(schema), in_python(schema)
    refused = [args for args in calls_of(name, bad=True) if isinstance(outcome(python, args), str)]
    assert all(outcome(look, args) is Deferred for args in refused)
    assert refused or not list(schema.signature.tensors)


# What the signatures of ops hold, and more of it in one call.


def _one(
    a: Operand[Tensor, "B T d"],
    w: Operand[Tensor, "d p", transposable],
    sums: Sum[Tensor, "p"],
    other: Double[Tensor, "_ 3"] | None,
    out: Sum[Tensor, "p *S", written] | None = None,
    *,
    count: Count = 2,
    at: Index = 0,
    scale: Positive = 1.0,
    floor: NonNegative = 0.0,
    exact: bool = False,
) -> None: ...


def _many(
    ids: Int64[Tensor, "B ..."],
    grads: OneOrMore[Float[Tensor, "B *P", dense]],
    sums: list[Float[Tensor, "*P", written]] | Any,
    place: Position = 0,
) -> None: ...


def _listed(
    grads: OneOrMore[Float[Tensor, "B *P", strided]],
    *,
    dtype: FloatDtype = torch.float32,
    rest: Any = None,
) -> None: ...


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool)
sizes = st.integers(0, 3)


@st.composite
def tensors(draw: st.DrawFn, *shapes: tuple[int, ...]) -> Any:
    """A tensor near one of these shapes: its dtype, strides, class or what it is may be odd."""
    shape = list(draw(st.sampled_from(shapes)))
    if draw(st.integers(0, 9)) == 0:
        shape = draw(st.lists(sizes, max_size=4))
    dtype = DTYPES[0] if draw(st.integers(0, 3)) else draw(st.sampled_from(DTYPES))
    made = torch.zeros(shape, dtype=dtype)
    odd = draw(st.integers(0, 19))
    if odd == 0 and made.dim() > 1:
        return made.transpose(0, 1).contiguous().transpose(0, 1)
    if odd == 1:
        return torch.stack((made, made), -1)[..., 0]
    if odd == 2 and dtype.is_floating_point:
        return torch.nn.Parameter(made)
    if odd == 3 and dtype.is_floating_point:
        return made.requires_grad_() * 1
    if odd == 4 and dtype is torch.float32:
        return torch._neg_view(made)
    if odd == 5:
        return made.to("meta")
    if odd == 6:
        return made.as_subclass(Sub)
    if odd == 7:
        return draw(st.sampled_from([None, 1, "x", [made], made.to_sparse(), made.tolist()]))
    if odd == 8 and dtype is torch.float32:
        return torch._efficientzerotensor(shape)
    if odd == 9 and made.dim() > 0:
        return made[:1].expand(made.shape) if len(made) else made
    return made


class Sub(Tensor):
    """A subclass that changes nothing."""


numbers = st.sampled_from(
    [0, 1, 2, -1, 2**40, 2**62, 2**63, 2**70, 0.0, -0.0, 0.5, True, None, "1"]
)


@st.composite
def one_call(draw: st.DrawFn) -> dict[str, Any]:
    b, t, d, p = (draw(sizes) for _ in range(4))
    args: dict[str, Any] = {
        "a": draw(tensors((b, t, d))),
        "w": draw(tensors((d, p))),
        "sums": draw(tensors((p,))),
        "other": None if draw(st.booleans()) else torch.zeros(b, 3, dtype=torch.float64),
    }
    if draw(st.booleans()):
        args["w"] = torch.zeros(p, d).t()
    if draw(st.booleans()):
        args["out"] = draw(tensors((p,), (p, b)))
    for name in ("count", "at", "scale", "floor", "exact"):
        if draw(st.integers(0, 5)) == 0:
            args[name] = draw(numbers)
    if draw(st.integers(0, 19)) == 0:
        args.pop(draw(st.sampled_from(sorted(args))))
    return args


@st.composite
def many_calls(draw: st.DrawFn) -> dict[str, Any]:
    b, p, q = (draw(sizes) for _ in range(3))
    grads = [draw(tensors((b, p))), draw(tensors((b, p, q), (b,)))]
    kind = draw(st.sampled_from([list, tuple, lambda parts: parts[0], iter]))
    args = {
        "ids": draw(tensors((b,), (b, p))),
        "grads": kind(grads[: draw(st.integers(0, 2))] or grads),
    }
    if isinstance(args["ids"], Tensor) and draw(st.integers(0, 9)):
        args["ids"] = args["ids"].long() if not args["ids"].is_meta else args["ids"]
    return {**args, "sums": draw(st.sampled_from([None, [], grads])), "place": draw(numbers)}


def _agree(function: Callable[..., Any], args: dict[str, Any]) -> bool:
    """Whether C++ has seen the call; what it has seen is what Python sees."""
    schema = Schema(function, None)
    seen = outcome(seeing(schema), args)
    if seen is Deferred:
        return False
    assert seen == outcome(schema.bind, args)
    return True


@settings(max_examples=400, deadline=None)
@given(one_call())
def test_it_agrees_on_one_tensor_each(args: dict[str, Any]) -> None:
    if {"a", "w", "sums", "other"} <= {*args}:
        _agree(_one, args)
        return
    with pytest.raises(TypeError, match=r"_one\(\) missing"):  # Python says so
        Schema(_one, None).bind(**args)
    assert outcome(seeing(Schema(_one, None)), args) is Deferred


@settings(max_examples=300, deadline=None)
@given(many_calls())
def test_it_agrees_on_lists(args: dict[str, Any]) -> None:
    _agree(_many, args)
    _agree(_listed, {"grads": args["grads"]})


@settings(max_examples=300, deadline=None)
@given(st.data(), st.lists(st.lists(sizes, max_size=3), max_size=3), st.booleans())
def test_tensors_that_it_finds_alike_are(data: Any, shapes: Any, contiguous: bool) -> None:
    shapes = [torch.Size(shape) for shape in shapes]
    made = [data.draw(tensors(shape)) for shape in shapes]
    kind: dict[str, Any] = {"dtypes": (torch.float32, torch.int64), "contiguous": contiguous}
    if EXTENSION.alike(made, shapes, kind["dtypes"], contiguous):
        for shape, tensor in zip(shapes, made, strict=True):
            validate.tensor_at("made", tensor, shape=shape, device=torch.device("cpu"), **kind)


def test_it_finds_alike_what_is_alike() -> None:
    made, shapes = [torch.zeros(2, 3), torch.zeros(4)], [torch.Size((2, 3)), torch.Size((4,))]
    look, one = EXTENSION.alike, (torch.float32,)
    assert look(made, shapes, one, True)
    assert look([torch.nn.Parameter(made[0])], shapes[:1], (torch.int32, torch.float32), True)
    assert look([made[0].t()], [torch.Size((3, 2))], one, False)
    assert not look([made[0].t()], [torch.Size((3, 2))], one, True)
    assert not look(made, shapes[::-1], one, True)
    assert not look(made, shapes[:1], one, True)
    assert not look(made, shapes, (torch.float64,), True)
    assert not look([torch._neg_view(made[0]), made[1]], shapes, one, True)
    assert not look([made[0].to("meta"), made[1]], shapes, one, True)
    assert not look([made[0].as_subclass(Sub), made[1]], shapes, one, True)


def test_it_sees_what_is_usual() -> None:
    grads = [torch.zeros(4, 3), torch.zeros(4, 2, 5), torch.zeros(4)]
    args = {"a": torch.zeros(2, 3, 4), "w": torch.zeros(5, 4).t(), "sums": torch.zeros(5)}
    assert _agree(_one, {**args, "other": None})
    assert _agree(_one, {**args, "other": torch.zeros(9, 3).double(), "out": torch.zeros(5, 7, 1)})
    assert _agree(_many, {"ids": torch.zeros(4, 2).long(), "grads": grads, "sums": None})
    assert _agree(_listed, {"grads": grads[0]})
    assert _agree(_listed, {"grads": torch.nn.Parameter(grads[0])})


# A look that is wrong in one way is found by the comparison above.


def _set(place: int, **changes: Any) -> Change:
    def change(described: dict[str, Any]) -> None:
        described["parameters"][place].update(changes)

    return change


def _swap(described: dict[str, Any]) -> None:
    for place, last in enumerate((2, 3)):
        described["parameters"][place]["dims"] = [1, 0, last]


WRONG: dict[str, tuple[str, Change]] = {
    "strides": ("ghost.linear_norm", _set(0, layout=0)),
    "transposed": ("product.matmul", _set(1, layout=0)),
    "dtypes": ("noise.add_noise", _set(0, dtypes=[0, 1, 2, 3, 4, 5])),
    "one dtype": ("ghost.linear_norm", _set(1, group=0)),
    "dtype of sums": ("ghost.linear_sum", _set(2, group=0)),
    "sizes": ("ghost.linear_norm", _set(1, dims=[-1, 1, 3])),
    "swapped sizes": ("ghost.linear_norm", _swap),
    "dimensions": ("ghost.linear_norm", _set(1, rest=-2)),
    "a literal": ("update.advance", _set(0, literals=[-1])),
    "shapes of a list": ("ghost.contract", _set(2, rest=-2)),
    "an empty list": ("ghost.explicit_norm", _set(0, may_be_empty=True)),
    "one for a list": ("ghost.explicit_norm", _set(0, alone=True)),
    "None": ("ghost.linear_norm", _set(1, optional=True)),
    "a range": ("noise.lattice_draws", _set(1, least=-5)),
    "an option": ("ghost.linear_norm", _set(2, options=("auto", "gram", "direct", "nonsense"))),
    "trust": ("ghost.linear_norm", lambda described: described.update(trusts=True)),
}


def _odd_calls(name: str) -> Iterator[dict[str, Any]]:
    yield from calls_of(name, bad=False)
    yield from calls_of(name, bad=True)
    args = next(calls_of(name, bad=False))
    for key, value in args.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            yield args | {key: torch._neg_view(value.detach())}
            yield args | {key: value.detach()[..., None]}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_look_is_found(wrong: str) -> None:
    name, change = WRONG[wrong]
    schema = OPS[name].schema
    assert not differences(schema, _odd_calls(name), seeing(schema))
    assert differences(schema, _odd_calls(name), seeing(schema, change))


# Calls that are run by what was seen.

dispatch.availability("cpu")
DIRECT = [
    name
    for name, op in sorted(OPS.items())
    if name not in ("product.matmul", "update.step")  # another library; compared by its own tests
    and "cpu" in op.kernels
    and op.kernels["cpu"].direct is not None
]


def _results(made: Any) -> list[Tensor]:
    parts = made if isinstance(made, tuple) else [made]
    return [part for part in parts if isinstance(part, Tensor)]


@pytest.mark.parametrize("name", DIRECT)
def test_a_direct_call_does_what_the_checked_call_does(name: str) -> None:
    op, ran = OPS[name], 0
    kernel = op.kernels["cpu"]
    assert kernel.direct is not None
    for case in cases(op, FACTS[name]):
        mine, theirs = case.arguments(), case.arguments()
        before = [t._version for t in _tensors(mine)]
        made = kernel.direct(**mine)
        if made is NotImplemented:
            assert [t._version for t in _tensors(mine)] == before
            continue
        ran += 1
        bound = Schema(op.schema.function, op.schema.own_check).bind(**theirs)
        assert kernel.refuse is None or kernel.refuse(bound) is None
        want = kernel.run(bound)
        assert bits(mine) == bits(theirs), case
        assert [t._version for t in _tensors(mine)] == [t._version for t in _tensors(theirs)]
        for got, wanted in zip(_results(made), _results(want), strict=True):
            assert bits(got) == bits(wanted), case
            assert (got.dtype, got.stride()) == (wanted.dtype, wanted.stride()), case
            assert got.untyped_storage().nbytes() == wanted.untyped_storage().nbytes()
            assert not got.requires_grad
        assert type(made) is type(want)
    assert ran, name


def _tensors(args: dict[str, Any]) -> list[Tensor]:
    parts = (part for arg in args.values() for part in (arg if type(arg) is list else [arg]))
    return [part for part in parts if isinstance(part, Tensor)]


def test_a_module_that_was_built_of_another_signature_is_not_called() -> None:
    def linear_norm(
        a: Operand[Tensor, "B T d"], g: Operand[Tensor, "T B p"]
    ) -> Double[Tensor, "squares: B"]:
        raise NotImplementedError

    with pytest.raises(ValueError, match="another declaration"):
        _direct.caller(Schema(linear_norm, None), EXTENSION, lambda: 1)


def _norm(a: Tensor, g: Tensor) -> Tensor:
    return ghost.linear_norm(a, g)


A, G = torch.arange(24.0).view(4, 2, 3), torch.ones(4, 2, 5)


def test_other_ways_of_a_call_are_kept() -> None:
    want = _norm(A, G)
    seen: list[str] = []

    def intercept(op: Any, args: Any, kwargs: Any) -> Any:
        seen.append(op.name)
        with dispatch.intercepted(None):
            return op(*args, **kwargs)

    with dispatch.intercepted(intercept):
        assert torch.equal(_norm(A, G), want)
    assert seen == ["ghost.linear_norm"]
    with torch.profiler.profile() as profile:
        _norm(A, G)
    assert "dpkern::linear_norm" in {event.key for event in profile.key_averages()}
    marked = torch.full((4,), -1.0, dtype=torch.float64)
    with dispatch.replaced("cpu", [("ghost.linear_norm", lambda a, g, *, route: marked, None)]):
        assert _norm(A, G) is marked
    with dispatch.use("reference"):
        assert not torch.equal(_norm(A * 0.1, G), _norm.__globals__["ghost"].linear_norm(A, G))
    assert torch.equal(_norm(A.as_subclass(Sub), G), want)
    with pytest.raises(TypeError, match=r"linear_norm\(\) got an unexpected keyword"):
        ghost.linear_norm(A, G, rout="auto")
    with pytest.raises(TypeError, match=r"linear_norm\(\) missing"):
        ghost.linear_norm(A)


def test_tensors_without_memory_of_their_own_are_refused() -> None:
    out = torch._neg_view(torch.zeros(5, 3))
    for a, o in ((torch._neg_view(A), torch.zeros(5, 3)), (A, out)):
        with pytest.raises(InvalidInput, match="holds its numbers"):
            ghost.linear_sum(a, G, torch.ones(4), o)
    with pytest.raises(InvalidInput, match="zeros without memory"):
        _norm(torch._efficientzerotensor((4, 2, 3)), G)
    imaginary = (A * (1 + 2j)).conj().imag
    with pytest.raises(InvalidInput, match="holds its numbers"):
        clip.clip_sum([imaginary], 1.0)
    with pytest.raises(InvalidInput, match="holds its numbers"):
        clip.clip_sum([A], 1.0, out=[torch._neg_view(torch.zeros(2, 3))])
    assert clip.clip_sum([imaginary.resolve_neg()], 1e9).sums[0].sum() < 0


class Watch(TorchFunctionMode):
    """A mode that changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_modes_and_default_devices_change_nothing() -> None:
    want = _norm(A, G)
    with Watch():
        assert torch.equal(_norm(A, G), want)
    with torch.device("meta"):
        assert _norm(A, G).device.type == "cpu"
    with torch.inference_mode():
        assert torch.equal(_norm(A, G), want)


def test_a_product_without_inner_dimension_is_its_bias() -> None:
    from dpkern.ops.backends import cpu

    with cpu.use_own_products(True):
        for m in (0, 1, 7, 65):
            x, w, bias = torch.zeros(3, 0), torch.zeros(0, m), torch.arange(float(m))
            assert torch.equal(product.matmul(x, w, bias), bias.expand(3, m))
            assert torch.equal(product.matmul(x, torch.zeros(m, 0).t()), torch.zeros(3, m))


def test_lists_may_change_while_the_kernel_runs() -> None:
    grads = [torch.ones(64, 256, 64) for _ in range(4)]
    want = ghost.explicit_norm(list(grads))
    threads = [threading.Thread(target=grads.clear)]
    threads[0].start()
    try:
        made = ghost.explicit_norm(grads)
        assert torch.equal(made, want)
    except InvalidInput:  # it was cleared before
        pass
    threads[0].join()


def test_a_function_of_a_backend_is_called_directly() -> None:
    assert all(f.direct is not _native._never for f in _native._ALL if not _planned(f))


def _planned(function: Any) -> bool:
    return any(p.annotation == "Geometry" for p in function._schema.call.parameters.values())


def test_without_the_exchange_calls_go_through_python(monkeypatch: pytest.MonkeyPatch) -> None:
    want = _norm(A, G)
    monkeypatch.setattr(_direct, "connect", lambda extension: False)
    kernel = _native.kernel("ghost.linear_norm", EXTENSION, lambda: 1)
    assert kernel.direct is None
    bound = Schema(OPS["ghost.linear_norm"].schema.function, None).bind(A, G)
    assert torch.equal(kernel.run(bound), want)


@pytest.mark.parametrize("place", range(8))
def test_an_exchange_that_says_something_else_is_not_used(place: int) -> None:
    class Lying:
        """Every tensor is seen as another in one respect."""

        @staticmethod
        def viewed(tensor: Tensor) -> Any:
            seen = list(EXTENSION.viewed(tensor))
            seen[place] = (9, 9) if isinstance(seen[place], tuple) else seen[place] + 1
            return tuple(seen)

    assert _direct._is_seen(EXTENSION, torch.float32)
    assert not _direct._is_seen(Lying, torch.float32)

"""Ops that a compiled function carries out in one call: it does what Python's way does, or nothing.

Every call here is made twice, as users make it and with all looks in Python; results, errors and
what was written must be the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dpkern.base import dispatch
from dpkern.base.dispatch import OPS
from dpkern.base.errors import DPKernError
from dpkern.base.rng import Purpose
from dpkern.base.schema import Schema
from dpkern.ops import clip, testing, update
from dpkern.ops.backends import _clip, _direct, _extension, cpu

pytestmark = pytest.mark.usefixtures("one_thread")
EXTENSION: Any = _extension.load_extension()
if isinstance(EXTENSION, str) or not _direct.connect(EXTENSION):
    pytest.skip("no compiled module that sees tensors", allow_module_level=True)
dispatch.availability("cpu")

Call = tuple[str, dict[str, Any]]
Change = Callable[[dict[str, Any]], None]


def clipped(**changes: Any) -> Call:
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(4, *shape, generator=generator) for shape in ((6,), (2, 3), ())]
    return "clip.clip_sum", {"grads": grads, "max_grad_norm": 1.0, **changes}


def room(*dtypes: torch.dtype) -> list[Tensor]:
    shapes = ((6,), (2, 3), ())
    return [torch.ones(shape, dtype=d) for shape, d in zip(shapes, dtypes * 3, strict=False)]


EXACT: dict[str, Any] = {"arithmetic": "exact", "unit": 2.0**-10}
PARTS = (torch.float32, torch.float64)


def stepped(rule: Any = None, *, noised: bool = False, **changes: Any) -> Call:
    rule = update.SGD(lr=0.1, momentum=0.9) if rule is None else rule
    params = [torch.ones(3, 2), torch.full((5,), 2.0)]
    key = testing.KEY
    noise = update.Noise(
        distribution="gaussian",
        scales=(1.0, 2.0),
        stream=key.stream(Purpose.NOISE, 1),
        positions=(0, 512),
        rounding=key.stream(Purpose.ROUNDING, 1),
    )
    return "update.step", {
        "params": params,
        "sums": [torch.full_like(p, 3.0) for p in params],
        "rule": rule,
        "state": rule.init(params),
        "noise": noise if noised else None,
        **changes,
    }


def buffers(*made: Tensor) -> update.State:
    return update.State(0, {"momentum_buffer": [*made]})


def integers(dtype: torch.dtype = torch.int32) -> list[Tensor]:
    return [torch.full((3, 2), 7, dtype=dtype), torch.full((5,), -9, dtype=dtype)]


TAKEN: dict[str, Callable[[], Call]] = {
    "float": clipped,
    "float64": lambda: clipped(grads=[torch.ones(3, 2).double()]),
    "bfloat16": lambda: clipped(grads=[torch.ones(3, 2).bfloat16()]),
    "one tensor": lambda: clipped(grads=torch.ones(3, 2)),
    "no samples": lambda: clipped(grads=[torch.ones(0, 2)]),
    "a bad sample": lambda: clipped(grads=[torch.tensor([[1.0, float("nan")], [1.0, 2.0]])]),
    "exact": lambda: clipped(**EXACT),
    "exact, many": lambda: clipped(arithmetic="exact", unit=2.0**-24 * 1.5),
    "per layer": lambda: clipped(style="per_layer", max_grad_norm=[1.0, 2.0, 3.0]),
    "out": lambda: clipped(out=room(torch.float32)),
    "out, a tuple": lambda: clipped(out=tuple(room(torch.float32))),
    "exact out": lambda: clipped(out=room(torch.int32), **EXACT),
    "wide exact out": lambda: clipped(out=room(torch.int64), **EXACT),
    "sgd": lambda: stepped(update.SGD(lr=0.1)),
    "momentum": stepped,
    "adam": lambda: stepped(update.Adam(lr=0.1)),
    "adamw": lambda: stepped(update.AdamW(lr=0.1)),
    "noise": lambda: stepped(noised=True),
    "noise on integers": lambda: stepped(sums=integers(), noised=True),
}
LEFT: dict[str, Callable[[], Call]] = {
    "grads in odd strides": lambda: clipped(grads=[torch.ones(2, 3).t()]),
    "a negated gradient": lambda: clipped(grads=[torch._neg_view(torch.ones(3, 2))]),
    "no bound": lambda: clipped(max_grad_norm=0.0),
    "a unit alone": lambda: clipped(unit=1.0),
    "out is no list": lambda: clipped(out=torch.zeros(6)),
    "out is a number": lambda: clipped(out=3),
    "out is empty": lambda: clipped(out=[]),
    "out is short": lambda: clipped(out=room(torch.float32)[:2]),
    "out of two dtypes": lambda: clipped(out=room(*PARTS)),
    "out of another dtype": lambda: clipped(out=room(torch.float64)),
    "out of integers": lambda: clipped(out=room(torch.int32)),
    "exact out of floats": lambda: clipped(out=room(torch.float32), **EXACT),
    "exact out of two dtypes": lambda: clipped(out=room(torch.int32, torch.int64), **EXACT),
    "out of other shapes": lambda: clipped(out=room(torch.float32)[::-1]),
    "out in odd strides": lambda: clipped(grads=[torch.ones(4, 3, 2)], out=[torch.ones(2, 3).t()]),
    "out is negated": lambda: clipped(out=[torch._neg_view(part) for part in room(torch.float32)]),
    "out on another device": lambda: clipped(out=[p.to("meta") for p in room(torch.float32)]),
    "out without room": lambda: clipped(out=[p * (2**31 - 1) for p in room(torch.int32)], **EXACT),
    "no parameters": lambda: stepped(params=[], sums=[], state=buffers()),
    "sums are one tensor": lambda: stepped(sums=torch.ones(3, 2)),
    "sums are short": lambda: stepped(sums=[torch.ones(3, 2)]),
    "sums of other shapes": lambda: stepped(sums=[torch.ones(5), torch.ones(3, 2)]),
    "sums of integers without noise": lambda: stepped(sums=integers()),
    "sums of two dtypes": lambda: stepped(
        sums=[torch.ones(3, 2), torch.ones(5).double()], noised=True
    ),
    "sums are negated": lambda: stepped(sums=[torch._neg_view(torch.ones(3, 2)), torch.ones(5)]),
    "no rule": lambda: (stepped()[0], stepped()[1] | {"rule": None}),
    "no state": lambda: stepped(state=None),
    "buffers of other shapes": lambda: stepped(state=buffers(torch.ones(5), torch.ones(3, 2))),
    "buffers of another dtype": lambda: stepped(
        state=buffers(torch.ones(3, 2).double(), torch.ones(5).double())
    ),
    "buffers are short": lambda: stepped(state=buffers(torch.ones(3, 2))),
    "buffers in odd strides": lambda: stepped(state=buffers(torch.ones(2, 3).t(), torch.ones(5))),
    "buffers of another name": lambda: stepped(state=update.State(0, {"exp_avg": []})),
    "noise of fewer": lambda: stepped(
        noise=update.Noise(
            distribution="gaussian",
            scales=(1.0,),
            stream=testing.KEY.stream(Purpose.NOISE, 1),
            positions=(0,),
        )
    ),
}
CALLS = TAKEN | LEFT


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in tensors_of(part)]
    if isinstance(value, dict):
        return tensors_of([*value.values()])
    return tensors_of(vars(value)) if isinstance(value, (update.State, clip.ClipResult)) else []


def seen_of(value: Any) -> Any:
    """What can be compared of a value: of tensors bits, dtype, strides and version."""
    if isinstance(value, Tensor):
        entries = [] if value.is_meta else value.resolve_neg().flatten().double().tolist()
        facts = value.dtype, value.shape, value.stride(), value._version
        return [str(entry) for entry in entries], facts
    if isinstance(value, (list, tuple)):
        return [seen_of(part) for part in value]
    if isinstance(value, dict):
        return {name: seen_of(part) for name, part in value.items()}
    if isinstance(value, (update.State, clip.ClipResult)):
        return type(value), list(vars(value)), seen_of(vars(value))
    return value


def outcome(run: Callable[..., Any], args: dict[str, Any]) -> Any:
    """The result or the error, and everything that the call might have written."""
    try:
        made = seen_of(run(**args))
    except DPKernError as error:
        made = str(error)
    written = {name: args[name] for name in ("params", "sums", "state", "out") if name in args}
    return made, seen_of(written)


def in_python(name: str) -> Callable[..., Any]:
    """An op with all looks in Python."""
    op = OPS[name]
    schema = Schema(op.schema.function, op.schema.own_check, op.schema.plan)

    def run(**args: Any) -> Any:
        return op.kernels["cpu"].run(schema.bind(**args))

    return run


def direct(name: str) -> Callable[..., Any]:
    found = OPS[name].kernels["cpu"].direct
    assert found is not None
    return found


@pytest.mark.parametrize("kind", CALLS)
def test_a_call_does_what_it_does_in_python(kind: str) -> None:
    (name, mine), (_, theirs) = CALLS[kind](), CALLS[kind]()
    with dispatch.use("cpu"):
        assert outcome(OPS[name], mine) == outcome(in_python(name), theirs)


@pytest.mark.parametrize("kind", TAKEN)
def test_the_usual_call_needs_no_python(kind: str) -> None:
    name, args = TAKEN[kind]()
    _, theirs = TAKEN[kind]()
    want = outcome(in_python(name), theirs)
    assert outcome(direct(name), args) == want


@pytest.mark.parametrize("kind", LEFT)
def test_a_call_that_is_left_to_python_has_done_nothing(kind: str) -> None:
    (name, args), (_, untouched) = LEFT[kind](), LEFT[kind]()
    made, written = outcome(direct(name), args)
    assert made is NotImplemented or isinstance(made, str)  # or it is refused at once
    assert written == outcome(lambda **_: None, untouched)[1]


# Every part of the looks is needed.


def composed(name: str, change: Change) -> Callable[..., Any]:
    """The op's call; ``change`` plants an error in what C++ is told."""
    function, prepare, finish = cpu._COMPOSED[name]
    told: dict[str, Any] = {}

    class Told:
        composed = staticmethod(told.update)

    function._connection, before = (Told, _extension.threads), function._connection
    try:
        function.carrying_out(OPS[name].schema, prepare, finish)
    finally:
        function._connection = before
    change(told)
    found: Callable[..., Any] = EXTENSION.composed(told)
    return found


def _of_function(place: int, **changes: Any) -> Change:
    def change(told: dict[str, Any]) -> None:
        told["function"]["parameters"][place].update(changes)

    return change


def _trusting(told: dict[str, Any]) -> None:
    told["function"]["trusts"] = True


GRADS, SUMS, _NORMS = range(3)
PARAMS, UPDATED, BUFFERS = range(3)
WRONG: dict[str, tuple[str, Change]] = {
    "grads in odd strides": ("clip.clip_sum", _of_function(GRADS, layout=0)),
    "out of two dtypes": ("clip.clip_sum", _of_function(SUMS, one_dtype=False)),
    "out in odd strides": ("clip.clip_sum", _of_function(SUMS, layout=0)),
    "out is negated": ("clip.clip_sum", _trusting),
    "sums of two dtypes": ("update.step", _of_function(UPDATED, one_dtype=False)),
    "buffers of other shapes": ("update.step", _of_function(BUFFERS, rest=-2)),
    "buffers in odd strides": ("update.step", _of_function(BUFFERS, layout=0)),
    "buffers of another dtype": ("update.step", _of_function(BUFFERS, group=0, dtypes=[0, 1])),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_look_is_found(kind: str) -> None:
    name, change = WRONG[kind]
    assert composed(name, lambda told: None)(**LEFT[kind]()[1]) is NotImplemented
    assert composed(name, change)(**LEFT[kind]()[1]) is not NotImplemented


# Calls use the memory of those before them.


def test_a_call_knows_nothing_of_the_one_before() -> None:
    for first in TAKEN:
        for kind in ("float", "out", "sgd", "momentum", "noise on integers"):
            name, args = TAKEN[first]()
            direct(name)(**args)
            (name, mine), (_, theirs) = TAKEN[kind](), TAKEN[kind]()
            assert outcome(direct(name), mine) == outcome(in_python(name), theirs), first


def test_calls_at_once_and_calls_in_calls_keep_apart() -> None:
    name, args = clipped(grads=[torch.ones(64, 4096)])
    want = direct(name)(**args).sums[0]
    wrong: list[Any] = []

    def run() -> None:
        for _ in range(20):
            if not torch.equal(direct(name)(**args).sums[0], want):
                wrong.append(threading.get_ident())

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong

    def nested(*given: Any) -> Any:
        assert torch.equal(direct(name)(**args).sums[0], want)
        return _clip.prepare(*given)

    call = composed(name, lambda told: told["op"].update(check=nested))
    assert torch.equal(call(**args).sums[0], want)


def test_errors_that_are_not_ours_are_left_to_python() -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("x")

    def stopped(*_: Any) -> Any:
        raise KeyboardInterrupt

    name, args = clipped()
    call = composed(name, lambda told: told["op"].update(check=broken))
    assert call(**args) is NotImplemented
    call = composed(name, lambda told: told["op"].update(check=stopped))
    with pytest.raises(KeyboardInterrupt):
        call(**args)


def test_a_function_that_was_built_of_another_signature_is_not_called() -> None:
    with pytest.raises(ValueError, match="another declaration"):
        composed("update.step", lambda told: told["function"].update(declaration="0"))

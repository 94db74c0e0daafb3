"""Layers of torch's alone are recognised before they run, and nothing else is."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dpkern.base.errors import UnsupportedModule
from dpkern.engine.capture import Capture
from dpkern.engine.difference import DifferenceProbe
from dpkern.engine.layers_alone import _is_torchs, runs_layers_alone

B, D = 48, 6


def alone(module: nn.Module, *args: Any, **kwargs: Any) -> bool:
    return runs_layers_alone(module, args or (torch.randn(B, D),), kwargs)


def stack(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, D), nn.ReLU(), *middle, nn.Linear(D, 3))


class Named(nn.Sequential):
    """A sequence of layers that is made in a class of its own."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(1, 2, 3), nn.SiLU(), nn.Flatten(), nn.Linear(8, 2))


class OtherOrder(nn.Sequential):
    def __iter__(self) -> Any:
        return reversed([*self._modules.values()])


class Wrapped(nn.Linear):
    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h)


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, h: Tensor) -> Tensor:
        return self.layer(h)  # type: ignore[no-any-return]


class Counting(dict[str, Any]):
    """A table of modules that runs code when it is read."""


def with_counting_table() -> nn.Module:
    module = stack()
    object.__setattr__(module, "_modules", Counting(module._modules))
    return module


def with_own_forward() -> nn.Module:
    module = stack()
    layer = module[0]
    before = layer.forward
    object.__setattr__(layer, "forward", lambda h: before(h))
    return module


def with_hook(register: str, hook: Callable[..., Any]) -> nn.Module:
    module = stack()
    getattr(module[1], register)(hook)
    return module


class OwnParameter(nn.Parameter):
    pass


def with_own_parameter() -> nn.Module:
    module = stack()
    module[0].weight = OwnParameter(module[0].weight.detach())
    return module


class Recording(nn.Module):
    """Runs code around torch's own call; nothing of torch's is replaced."""

    def __call__(self, *args: Any) -> Any:
        vars(self).setdefault("bank", []).append(args[0])
        return super().__call__(*args)


class BehindSequence(nn.Sequential, Recording):
    pass


def with_own_call() -> nn.Module:
    module = stack()
    before = module[0]._call_impl
    object.__setattr__(module[0], "_call_impl", lambda *args: before(*args))
    return module


def with_forward_of_another() -> nn.Module:
    module = stack()
    capture = Capture(module)
    capture.attach()
    return copy.copy(module)


def compiled_part() -> nn.Module:
    module = stack()
    object.__setattr__(module[0], "_compiled_call_impl", lambda h: h)
    return module


def test_sequences_of_layers_are_alone() -> None:
    assert alone(stack())
    assert alone(stack(nn.Sequential(nn.Tanh(), nn.Linear(D, D, bias=False)), nn.GELU()))
    assert alone(Named(), torch.randn(B, 1, 4, 4))
    assert alone(nn.Linear(D, 2))
    module = stack()
    capture = Capture(module)
    capture.attach()
    assert alone(module)  # the engine's own hooks, parameters and forward aside
    capture.detach()


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "another order": lambda: OtherOrder(nn.Linear(D, D), nn.ReLU()),
    "a class around a layer": lambda: Wrapped(D, D),
    "a module of one's own": Module,
    "a part of one's own": lambda: stack(Module()),
    "a table of one's own": with_counting_table,
    "a forward of its own": with_own_forward,
    "a hook": lambda: with_hook("register_forward_hook", lambda m, x, out: None),
    "a hook before": lambda: with_hook("register_forward_pre_hook", lambda m, x: None),
    "a hook behind": lambda: with_hook("register_full_backward_hook", lambda m, g, h: None),
    "a parameter of one's own": with_own_parameter,
    "a parametrization": lambda: stack(parametrizations.weight_norm(nn.Linear(D, D))),
    "another layer": lambda: stack(nn.LayerNorm(D)),
    "random numbers": lambda: stack(nn.Dropout()),
    "writing in place": lambda: stack(nn.ReLU(inplace=True)),
    "a compiled part": compiled_part,
    "a class behind the sequence": lambda: BehindSequence(nn.Linear(D, D)),
    "a call of its own": with_own_call,
    "a forward of another module": with_forward_of_another,
    "a function around an input": lambda: nn.Sequential(
        nn.Conv1d(D, D, 3, padding=1, padding_mode="circular")
    ),
    "more than one output": lambda: stack(nn.MaxPool2d(2, return_indices=True)),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS.keys())
def test_nothing_else_is(make: Callable[[], nn.Module]) -> None:
    assert not alone(make())


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_other_calls_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = stack(), torch.randn(B, D)
    assert not runs_layers_alone(module, (), {"input": x})
    assert not runs_layers_alone(module, (x, x), {})
    assert not alone(module, nn.Parameter(x))
    assert not alone(module, x[:2])
    assert alone(module, x.to("meta"))  # a device that has no autocast
    assert not alone(module, x.long())
    with torch.autocast("cpu", torch.bfloat16):
        assert not alone(module)
    with torch.autograd.graph.save_on_cpu():
        assert not alone(module)
    with Functions():
        assert not runs_layers_alone(module, (x,), {})
    with Operations():
        assert not runs_layers_alone(module, (x,), {})
    handle = nn.modules.module.register_module_forward_hook(lambda m, x, out: None)
    assert not alone(module)
    handle.remove()
    assert alone(module)
    for place, name in (
        (F, "linear"),
        (F, "relu"),
        (nn.Linear, "forward"),
        (nn.Module, "__call__"),
        (nn.modules.linear, "F"),
        (nn.modules.conv._ConvNd, "_call_impl"),
        (nn.Linear, "weight"),
        (nn.Module, "__getattribute__"),
    ):
        with monkeypatch.context() as patch:
            own = name == "__getattribute__"
            patch.setattr(
                place,
                name,
                object.__getattribute__ if own else lambda *args: args[0],
                raising=False,
            )
            assert not alone(module), name
    assert alone(module)


def test_a_function_around_torchs_is_not_torchs_own() -> None:
    @functools.wraps(nn.Linear.forward)
    def forward(self: nn.Linear, h: Tensor) -> Tensor:
        return h

    assert _is_torchs(nn.Linear.forward)
    assert _is_torchs(F.linear)
    assert _is_torchs(Tensor.flatten)
    assert forward.__module__ == nn.Linear.forward.__module__
    assert not _is_torchs(forward)
    assert not _is_torchs(torch.no_grad()(forward))
    assert not _is_torchs(functools.partial(nn.Linear.forward))


def test_what_the_compiler_leaves_in_the_class_of_modules_is_no_code_of_a_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As ``torch._dynamo.mutation_guard`` does."""
    monkeypatch.setattr(nn.Module, "___needs_generation_tag_patch", False, raising=False)
    monkeypatch.setattr(nn.Module, "__setstate__", lambda self, state: None)
    assert alone(stack())


def test_code_around_the_call_of_a_layer_is_found_to_keep_samples() -> None:
    capture = Capture(nn.Sequential(BehindSequence(nn.Linear(D, D)), nn.ReLU()))
    capture.attach()
    with pytest.raises(UnsupportedModule, match="no trace of the samples"):
        capture.module(torch.randn(B, D))
    capture.detach()


def test_a_first_pass_of_layers_alone_takes_no_other_pass_on_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def probed(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a probe of samples that are replaced")

    monkeypatch.setattr(DifferenceProbe, "__init__", probed)
    capture = Capture(stack())
    capture.attach()
    before = [p.detach().clone() for p in capture.module.parameters()]
    state = torch.get_rng_state()
    x = torch.randn(B, D)
    given, after_drawing = x.clone(), torch.get_rng_state()
    capture.module(x).sum().backward()
    assert capture.guard.probes == 1
    assert torch.equal(torch.get_rng_state(), after_drawing)
    assert not torch.equal(state, after_drawing)
    assert torch.equal(x, given)
    assert all(map(torch.equal, before, capture.module.parameters()))
    capture.detach()


def test_what_layers_run_beside_their_own_code_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation that the recognition does not know of, as if torch had changed it."""
    monkeypatch.setattr("dpkern.engine.layers_alone._CALLED", ())
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda h, w, b=None: linear(h - h.mean(0).detach(), w, b))
    module = stack()
    assert alone(module)
    capture = Capture(module)
    capture.attach()
    with pytest.raises(UnsupportedModule, match="other outputs after other samples"):
        module(torch.randn(B, D))
    capture.detach()

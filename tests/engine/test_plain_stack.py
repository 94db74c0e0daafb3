"""Plain stacks of torch's layers are recognised, and nothing else is."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from dpkern.base.errors import UnsupportedModule
from dpkern.engine.capture import Capture
from dpkern.engine.difference import DifferenceProbe
from dpkern.engine.plain_stack import output_of_stack

B, D = 48, 6


def recognised(module: nn.Module, *inputs: Any, **named: Any) -> bool:
    found = output_of_stack(
        module, lambda given, see: see(module(*given[0], **given[1])), (inputs, named), B
    )
    if found is not None:
        torch.testing.assert_close(found, module(*inputs, **named).detach()[:3])
    return found is not None


def stack(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, D), nn.ReLU(), *middle, nn.Linear(D, 3))


class Between(nn.Module):
    """A function of a part of the module and its input."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.layer = nn.Linear(D, D)

    def forward(self, h: Tensor) -> Tensor:
        return self.function(self, h)


def images() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 3), nn.SiLU()),
        *(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 2)),
    )


def test_layers_one_after_the_other_are_plain() -> None:
    assert recognised(stack(), torch.randn(B, D))
    assert recognised(stack(nn.Sigmoid(), nn.Linear(D, D, bias=False)), torch.randn(B, D))
    assert recognised(images(), torch.randn(B, 1, 10, 10))
    module = stack(Between(lambda m, h: h))
    assert recognised(module, torch.randn(B, D))
    assert recognised(stack(nn.ReLU(inplace=True)), torch.randn(B, D))


class Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.relu()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g / g.norm()


class Operand:
    """What torch takes for a tensor without being one: its function replaces the operation."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        h, weight, own = args
        return func(h, weight, own.value.detach() + h[0].detach())


class OwnBias(nn.Parameter):
    """A parameter whose class does so."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear:
            return super().__torch_function__(func, types, args, kwargs or {})
        h, weight, own = args
        return func(h, weight, own.as_subclass(Tensor).detach() + h[0].detach())


def without_mode(function: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, Tensor], Tensor]:
    """Return the function as an extension would run it, whose operations no mode sees."""

    def run(m: nn.Module, h: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return function(h)

    return run


def hooked(m: nn.Module, h: Tensor) -> Tensor:
    h.register_hook(lambda g: g / g.norm())
    return h


def node_hooked(m: nn.Module, h: Tensor) -> Tensor:
    h.grad_fn.register_prehook(lambda g: (g[0] / g[0].norm(),))  # type: ignore[union-attr]
    return h


def saved_otherwise(m: nn.Module, h: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t - t.mean(0), lambda t: t):
        return torch.tanh(h)


def without_gradient(m: nn.Module, h: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.relu(h)


def in_a_script(m: nn.Module, h: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        script = torch.jit.CompilationUnit("def f(h):\n  return h + (h - h.mean(0)).detach()")
    return script.f(h)  # type: ignore[no-any-return]


OTHERS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "a residual": lambda m, h: h + torch.relu(h),
    "a detached part": lambda m, h: h.detach(),
    "no gradient": without_gradient,
    "a function of its own": lambda m, h: Custom.apply(h),
    "a hook of a tensor": hooked,
    "a hook of a node": node_hooked,
    "a size": lambda m, h: torch.relu(h) if h.shape[0] < 64 else h,
    "a length": lambda m, h: torch.relu(h) if len(h) < 64 else h,
    "a value": lambda m, h: torch.relu(h) if bool(h.any()) else h,
    "a mean": lambda m, h: h - h.mean(0),
    "weights that are none": lambda m, h: F.linear(h, torch.relu(m.layer.weight)),
    "weights made of samples": lambda m, h: F.linear(h, h),
    "weights of nobody": lambda m, h: F.linear(h, WEIGHTS),
    "other tensors kept for the backward pass": saved_otherwise,
    "a script": in_a_script,
    "what no mode sees": without_mode(lambda h: torch.relu(h)),
    "what no graph sees": without_mode(lambda h: h.detach()),
    "a sum that no mode sees": without_mode(lambda h: h + (h - h).detach()),
    "random numbers": lambda m, h: F.dropout(h),
    "data": lambda m, h: h.data,
    "an operand that replaces the operation": lambda m, h: F.linear(
        h, m.layer.weight, Operand(m.layer.bias)
    ),
}
WEIGHTS = nn.Parameter(torch.randn(D, D))


@pytest.mark.parametrize("function", OTHERS.values(), ids=OTHERS.keys())
def test_anything_else_is_not(function: Callable[[nn.Module, Tensor], Tensor]) -> None:
    assert not recognised(stack(Between(function)), torch.randn(B, D))
    assert not recognised(nn.Sequential(Between(function), *stack()), torch.randn(B, D))


def test_neither_are_other_layers_inputs_and_hooks() -> None:
    x = torch.randn(B, D)
    assert not recognised(stack(nn.LayerNorm(D)), x)
    assert not recognised(stack(nn.BatchNorm1d(D)), x)
    assert not recognised(stack(parametrizations.spectral_norm(nn.Linear(D, D))), x)
    assert not recognised(nn.Bilinear(D, D, 2), x, x)
    assert not recognised(nn.Embedding(9, D), torch.randint(9, (B,)))
    with torch.no_grad():
        assert not recognised(stack(), x)
    module = stack()
    module[0].bias = OwnBias(module[0].bias.detach(), requires_grad=False)
    assert not recognised(module, x)
    module = stack()
    module[0].register_full_backward_hook(lambda m, g, h: (g[0] / g[0].norm(),))
    assert not recognised(module, x)
    module = stack()
    module[0].register_full_backward_pre_hook(lambda m, g: (g[0] / g[0].norm(),))
    assert not recognised(module, x)
    module = stack()
    module[0].register_forward_hook(lambda m, x, out: out - out.mean(0))
    assert not recognised(module, x)


def test_a_probe_of_a_plain_stack_compares_a_few_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Probes of others run on the batch with samples replaced."""
    rows: list[int] = []
    run = DifferenceProbe._pass

    def noted(self: DifferenceProbe, arguments: Any, *more: Any) -> Any:
        rows.append(len(arguments[0][0]))
        return run(self, arguments, *more)

    monkeypatch.setattr(DifferenceProbe, "_pass", noted)

    def passes(*middle: nn.Module, full: bool) -> list[int]:
        module = stack(*middle)
        probe = DifferenceProbe(module, module, (torch.randn(B, D),), {}, B)
        rows.clear()
        if full:
            assert probe.wait()
            outcome = probe.run_after(0, module(*probe.arguments[0]))
        else:
            outcome = probe.run(0, full=False)
        assert outcome is not None
        assert outcome.told
        assert outcome.error() is None
        return rows[:]

    assert passes(full=True) == []
    assert passes(full=False) == [B]
    assert passes(nn.LayerNorm(D), full=True) == [B, B // 4, 1, 4]
    assert passes(nn.LayerNorm(D), full=False) == [B, B]


@pytest.mark.parametrize(("middle", "passes"), [((), []), ((nn.LayerNorm(D),), [B, B])])
def test_a_secret_probe_of_a_plain_stack_takes_the_loops_own_pass(
    middle: tuple[nn.Module, ...], passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = Capture(stack(*middle))
    capture.attach()
    reported: list[str] = []
    capture.guard.on_late_finding = reported.append
    for _ in range(3):
        capture.new_samples()
        capture.module(torch.randn(B, D)).sum().backward()
        capture.discard()
    rows: list[int] = []
    run = DifferenceProbe._pass

    def noted(self: DifferenceProbe, arguments: Any, *more: Any) -> Any:
        rows.append(len(arguments[0][0]))
        return run(self, arguments, *more)

    monkeypatch.setattr(DifferenceProbe, "_pass", noted)
    monkeypatch.setattr("dpkern.engine.difference.WHOLE", 1.0)
    guard, before = capture.guard, capture.guard.probes
    guard._occasions.gap = 1
    capture.new_samples()
    capture.module(torch.randn(B, D))
    assert (rows, guard.probes, reported) == (passes, before + 1, [])
    # What begins to mix unseen is found late, by a whole probe of the batch.
    guard._occasions.gap = 1
    mixing = capture.module[-1].forward
    vars(guard._occasions)["_same"] = lambda: True
    object.__setattr__(capture.module[-1], "forward", lambda h: mixing(h - h.mean(0).detach()))
    guard.state.quick = None
    capture.new_samples()
    with pytest.raises(UnsupportedModule):
        capture.module(torch.randn(B, D))
    assert len(reported) == 1
    capture.detach()


def test_a_capture_still_sees_what_a_plain_stack_keeps_of_its_samples() -> None:
    class Keeps(nn.Linear):
        last: Tensor | None = None

        def forward(self, h: Tensor) -> Tensor:
            self.register_buffer("last", h)
            return super().forward(h)

    module = nn.Sequential(Keeps(D, D), nn.ReLU())
    capture = Capture(module)
    capture.attach()
    capture.new_samples()
    with pytest.raises(Exception, match="last"):
        module(torch.randn(B, D))
    capture.detach()

"""A plain stack that is one node of the graph gives the bits of its parts, or lets them run."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dpkern.base.errors import DPKernError
from dpkern.engine.program import site
from dpkern.ops import direct
from dpkern.ops.backends import cpu

from .test_engine_program_quick import STEPS, Run

pytestmark = pytest.mark.skipif(direct.look("run_stack") is None, reason="no compiled module")

NODE = "_ReplayedStackBackward"


def layers(bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(6, 5, bias), nn.ReLU(), nn.Linear(5, 4), nn.Tanh()),
        *(nn.Linear(4, 4), nn.Linear(4, 5, bias), nn.Sigmoid(), nn.Linear(5, 3)),
    ).to(dtype)


def relu_stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def without_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "SHORT_CUT", [lambda *given: None])
    monkeypatch.setattr("dpkern.engine.program.program.SHORT_CUT", site.SHORT_CUT)


def node_of(output: Tensor) -> str:
    with torch._C.DisableTorchFunctionSubclass():
        assert output.grad_fn is not None
        return output.grad_fn.name()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("shape", [(6,), (5, 6)], ids=["rows", "positions"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "none"])
@pytest.mark.parametrize("own", [True, False], ids=["compiled", "library"])
def test_bits_are_those_of_its_parts(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    bias: bool,
    own: bool,
) -> None:
    with cpu.use_own_products(own):
        ours = Run(layers(bias, dtype), "poisson", shape)
        weights = ours.steps(STEPS)
        without_stacks(monkeypatch)
        others = Run(layers(bias, dtype), "poisson", shape)
        assert all(map(torch.equal, weights, others.steps(STEPS)))
    assert ours.program.replays == others.program.replays >= STEPS - 3


@pytest.mark.parametrize("make", [layers, relu_stack])
def test_a_stack_is_one_node(make: Callable[[], nn.Module]) -> None:
    run = Run(make())
    nodes: list[str] = []

    def seen(out: Tensor) -> Tensor:
        nodes.append(node_of(out))
        return out

    run.steps(STEPS, seen)
    assert run.program.reason == ""
    assert nodes[:2] == ["_LinearBackward"] * 2
    assert nodes[-3:] == [NODE] * 3
    calls = run.python_calls(3)
    assert not {"_gradient", "forward", "take"} & calls.keys()


def test_gradients_that_are_not_finite_are_those_of_its_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def edit(out: Tensor) -> Tensor:
        return out * torch.tensor([1.0, float("inf"), float("nan")])

    ours = Run(layers())
    weights = ours.steps(6) + ours.steps(2, edit)
    without_stacks(monkeypatch)
    others = Run(layers())
    for mine, theirs in zip(weights, others.steps(6) + others.steps(2, edit), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


class Seeing(TorchFunctionMode):
    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


Odd = Callable[["Steps", Tensor, Tensor, pytest.MonkeyPatch], Tensor]


class Steps:
    """Steps as usual, one that is odd, and usual ones again."""

    def __init__(self) -> None:
        self.run = Run(relu_stack())
        self.parts = self.run.module
        self.nodes: list[str] = []
        self.odd_nodes: list[str] = []
        self.said: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        out = self.parts(x)
        self.nodes.append(node_of(out))
        return out

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.forward(x), y)
        loss.backward()
        return loss

    def taken(self, odd: Odd, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
        for number in range(9):
            for x, y in self.run.batches(1):
                try:
                    with monkeypatch.context() as patched:
                        if number == 6:
                            before = len(self.nodes)
                            try:
                                odd(self, x, y, patched)
                            finally:
                                self.odd_nodes = self.nodes[before:]
                        else:
                            self.step(x, y)
                    self.run.optimizer.step()
                    self.said.append(self.run.program.reason)
                except (DPKernError, RuntimeError) as error:
                    self.said.append(f"{type(error).__name__}: {error}")
                    self.run.engine.drop()
                self.run.optimizer.zero_grad()
        return self.run.steps(0)


def hook_of_a_part(steps: Steps, x: Tensor, y: Tensor, patched: pytest.MonkeyPatch) -> Tensor:
    with_hook = steps.parts[1].register_forward_hook(lambda part, args, out: 2 * out)
    try:
        return steps.step(x, y)
    finally:
        with_hook.remove()


def pre_hook_of_a_part(steps: Steps, x: Tensor, y: Tensor, patched: pytest.MonkeyPatch) -> Tensor:
    with_hook = steps.parts[2].register_forward_pre_hook(lambda part, args: (args[0] / 2,))
    try:
        return steps.step(x, y)
    finally:
        with_hook.remove()


def backward_hook_of_a_part(
    steps: Steps, x: Tensor, y: Tensor, patched: pytest.MonkeyPatch
) -> Tensor:
    with_hook = steps.parts[1].register_full_backward_hook(lambda part, gx, g: (2 * gx[0],))
    try:
        return steps.step(x, y)
    finally:
        with_hook.remove()


def hook_of_all_modules(steps: Steps, x: Tensor, y: Tensor, patched: pytest.MonkeyPatch) -> Tensor:
    def double(part: nn.Module, args: Any, out: Tensor) -> Tensor | None:
        return 2 * out if type(part) is nn.ReLU else None

    with_hook = nn.modules.module.register_module_forward_hook(double)
    try:
        return steps.step(x, y)
    finally:
        with_hook.remove()


def pre_hook_of_all_modules(
    steps: Steps, x: Tensor, y: Tensor, patched: pytest.MonkeyPatch
) -> Tensor:
    def double(part: nn.Module, args: Any) -> Any:
        return (2 * args[0],) if type(part) is nn.ReLU else None

    with_hook = nn.modules.module.register_module_forward_pre_hook(double)
    try:
        return steps.step(x, y)
    finally:
        with_hook.remove()


def another_forward_of_a_part(
    steps: Steps, x: Tensor, y: Tensor, patched: pytest.MonkeyPatch
) -> Tensor:
    forward = types.MethodType(lambda part, x: 2 * torch.relu(x), steps.parts[1])
    patched.setattr(steps.parts[1], "forward", forward, raising=False)
    return steps.step(x, y)


def another_method_of(kind: type, name: str) -> Odd:
    def odd(steps: Steps, x: Tensor, y: Tensor, patched: pytest.MonkeyPatch) -> Tensor:
        own = getattr(kind, name)

        def doubled(part: Any, *args: Any) -> Any:
            out = own(part, *args)
            return 2 * out if isinstance(out, Tensor) and type(part) is nn.ReLU else out

        patched.setattr(kind, name, doubled)
        return steps.step(x, y)

    return odd


def another_function(namespace: Any, name: str) -> Odd:
    def odd(steps: Steps, x: Tensor, y: Tensor, patched: pytest.MonkeyPatch) -> Tensor:
        own = getattr(namespace, name)
        patched.setattr(namespace, name, lambda x, *args, **named: 2 * own(x, *args, **named))
        return steps.step(x, y)

    return odd


def another_namespace(place: Any, name: str) -> Odd:
    def odd(steps: Steps, x: Tensor, y: Tensor, patched: pytest.MonkeyPatch) -> Tensor:
        doubled = {name: lambda *args, **named: 2 * getattr(F, name)(*args, **named)}
        patched.setattr(place, "F", types.SimpleNamespace(**{**vars(F), **doubled}))
        return steps.step(x, y)

    return odd


def another_class_of_a_part(
    steps: Steps, x: Tensor, y: Tensor, patched: pytest.MonkeyPatch
) -> Tensor:
    class Doubled(nn.ReLU):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    patched.setattr(steps.parts[1], "__class__", Doubled)
    return steps.step(x, y)


def another_part(steps: Steps, x: Tensor, y: Tensor, patched: pytest.MonkeyPatch) -> Tensor:
    own = steps.parts[1]
    steps.parts[1] = nn.Tanh()
    try:
        return steps.step(x, y)
    finally:
        steps.parts[1] = own


def another_weight(steps: Steps, x: Tensor, y: Tensor, patched: pytest.MonkeyPatch) -> Tensor:
    held, own = steps.parts[2]._parameters, steps.parts[2].weight
    held["weight"] = nn.Parameter(2 * own.detach().as_subclass(Tensor))
    try:
        return steps.step(x, y)
    finally:
        held["weight"] = own


def parts_in_another_order(
    steps: Steps, x: Tensor, y: Tensor, patched: pytest.MonkeyPatch
) -> Tensor:
    patched.setattr(nn.Sequential, "__iter__", lambda self: iter([self[0], self[1], self[2]]))
    return steps.step(x, y)


def within(context: Callable[[], Any]) -> Odd:
    def odd(steps: Steps, x: Tensor, y: Tensor, patched: pytest.MonkeyPatch) -> Tensor:
        with context():
            out = steps.forward(x)
        loss = F.cross_entropy(out.float(), y)
        loss.backward()
        return loss

    return odd


def halved_when_saved() -> Any:
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t / 2)


def frozen(steps: Steps, x: Tensor, y: Tensor, patched: pytest.MonkeyPatch) -> Tensor:
    patched.setattr(steps.parts[2].bias, "requires_grad", False)
    return steps.step(x, y)


def moved(steps: Steps, x: Tensor, y: Tensor, patched: pytest.MonkeyPatch) -> Tensor:
    weight = steps.parts[2].weight
    weight.data = weight.data.clone()
    return steps.step(x, y)


def public(steps: Steps, x: Tensor, y: Tensor, patched: pytest.MonkeyPatch) -> Tensor:
    with steps.run.engine.public():
        (0.01 * steps.parts(torch.ones(8, 6))).sum().backward()
    return steps.step(x, y)


def evaluated(steps: Steps, x: Tensor, y: Tensor, patched: pytest.MonkeyPatch) -> Tensor:
    with torch.no_grad():
        steps.parts(torch.ones(8, 6))
    return steps.step(x, y)


def passed_twice(steps: Steps, x: Tensor, y: Tensor, patched: pytest.MonkeyPatch) -> Tensor:
    loss = F.cross_entropy(steps.forward(x) + steps.forward(x), y)
    loss.backward()
    return loss


def used_again(steps: Steps, x: Tensor, y: Tensor, patched: pytest.MonkeyPatch) -> Tensor:
    out = steps.forward(x)
    loss = F.cross_entropy(out + steps.parts[2](torch.relu(steps.parts[0](x))), y)
    loss.backward()
    return loss


def backward_twice(steps: Steps, x: Tensor, y: Tensor, patched: pytest.MonkeyPatch) -> Tensor:
    loss = F.cross_entropy(steps.forward(x), y)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def backward_under_autocast(
    steps: Steps, x: Tensor, y: Tensor, patched: pytest.MonkeyPatch
) -> Tensor:
    loss = F.cross_entropy(steps.forward(x), y)
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()
    return loss


def weight_written_before_backward(
    steps: Steps, x: Tensor, y: Tensor, patched: pytest.MonkeyPatch
) -> Tensor:
    loss = F.cross_entropy(steps.forward(x), y)
    with torch.no_grad():
        steps.parts[2].weight.mul_(1.0)
    loss.backward()
    return loss


def second_derivative(steps: Steps, x: Tensor, y: Tensor, patched: pytest.MonkeyPatch) -> Tensor:
    loss = F.cross_entropy(steps.forward(x), y)
    loss.backward(create_graph=True)
    return loss


RUN_THEMSELVES: dict[str, Odd] = {
    "hook": hook_of_a_part,
    "pre-hook": pre_hook_of_a_part,
    "backward hook": backward_hook_of_a_part,
    "global hook": hook_of_all_modules,
    "global pre-hook": pre_hook_of_all_modules,
    "forward of a part": another_forward_of_a_part,
    "forward of a class": another_method_of(nn.ReLU, "forward"),
    "call of modules": another_method_of(nn.Module, "_call_impl"),
    "relu": another_function(F, "relu"),
    "relu of torch": another_function(torch, "relu"),
    "relu in place": another_function(torch, "relu_"),
    "functions of activations": another_namespace(nn.modules.activation, "relu"),
    "functions of linear": another_namespace(nn.modules.linear, "linear"),
    "attributes": another_method_of(nn.Module, "__getattribute__"),
    "class of a part": another_class_of_a_part,
    "part": another_part,
    "weight": another_weight,
    "order of parts": parts_in_another_order,
    "function mode": within(Seeing),
    "dispatch mode": within(Dispatching),
    "saved tensors": within(halved_when_saved),
    "autocast": within(lambda: torch.autocast("cpu", torch.bfloat16)),
    "anomalies": within(lambda: torch.autograd.set_detect_anomaly(True)),
    "frozen": frozen,
    "moved": moved,
}
AS_USUAL: dict[str, Odd] = {
    "public": public,
    "evaluation": evaluated,
    "two passes": passed_twice,
    "parts again": used_again,
    "backward twice": backward_twice,
    "backward under autocast": backward_under_autocast,
    "written weight": weight_written_before_backward,
    "second derivative": second_derivative,
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", [*RUN_THEMSELVES, *AS_USUAL])
def test_odd_steps_are_those_of_its_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = {**RUN_THEMSELVES, **AS_USUAL}[name]
    ours, others = Steps(), Steps()
    weights = ours.taken(odd, monkeypatch)
    assert ours.nodes[5] == NODE
    if name in RUN_THEMSELVES:
        assert NODE not in ours.odd_nodes
    without_stacks(monkeypatch)
    theirs = others.taken(odd, monkeypatch)
    assert ours.said == others.said
    assert NODE not in others.nodes
    assert all(map(torch.equal, weights, theirs))


def test_hooks_of_the_loop_in_front_of_the_module_keep_it_as_it_is() -> None:
    run = Run(relu_stack())
    run.module.register_forward_pre_hook(lambda module, args: None)
    nodes: list[str] = []
    run.steps(STEPS, lambda out: (nodes.append(node_of(out)), out)[1])
    assert NODE not in nodes
    assert run.program.reason == ""


def test_a_list_with_other_operations_is_recorded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken() -> tuple[list[Tensor], list[str], str]:
        run, nodes, reasons = Run(relu_stack()), [""], []
        hook = run.module[1].register_forward_hook(lambda part, args, out: 2 * out)
        run.steps(6)
        hook.remove()
        for _ in range(6):
            weights = run.steps(1, lambda out: (nodes.append(node_of(out)), out)[1])
            reasons.append(run.program.reason)
        return weights, reasons, nodes[-1]

    ours, said, node = taken()
    assert node == NODE
    without_stacks(monkeypatch)
    others, theirs, node = taken()
    assert node != NODE
    assert said == theirs
    assert all(map(torch.equal, ours, others))


@pytest.mark.parametrize(
    "parts",
    [
        [nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 3)],
        [nn.Linear(6, 5), nn.ReLU(), nn.Dropout(0.0), nn.Linear(5, 3)],
        [nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3)],
        [nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3), nn.Tanh()],
        [nn.ReLU(), nn.Linear(6, 3)],
    ],
    ids=["another activation", "dropout", "norm", "activation behind", "activation in front"],
)
def test_other_stacks_run_themselves(parts: list[nn.Module]) -> None:
    run = Run(nn.Sequential(*parts))
    nodes: list[str] = []
    run.steps(STEPS, lambda out: (nodes.append(node_of(out)), out)[1])
    assert NODE not in nodes


def test_its_output_may_be_changed_in_place() -> None:
    ours = Run(relu_stack())
    ours.steps(STEPS, lambda out: out.mul_(2))
    assert ours.program.reason == ""


def test_a_frozen_bias_met_elsewhere_is_not_taken_for_a_layers_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = nn.Parameter(torch.full((5,), 3.0), requires_grad=False)

    def weights() -> list[Tensor]:
        parts = relu_stack()
        parts[0].bias.requires_grad_(False)
        run = Run(parts)
        run.steps(6)
        for x, y in run.batches(1):
            hidden = torch.relu(F.linear(x, parts[0].weight, other))
            F.cross_entropy(parts[2](hidden), y).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
        return run.steps(4)

    ours = weights()
    without_stacks(monkeypatch)
    assert all(map(torch.equal, ours, weights()))


def test_a_graph_is_freed_by_its_backward_pass() -> None:
    steps = Steps()
    for x, y in steps.run.batches(6):
        steps.step(x, y)
        steps.run.optimizer.step()
        steps.run.optimizer.zero_grad()
    for x, y in steps.run.batches(1):
        loss = F.cross_entropy(steps.forward(x), y)
        assert steps.nodes[-1] == NODE
        loss.backward()
        with pytest.raises((DPKernError, RuntimeError), match="backward"):
            loss.backward()
        steps.run.engine.drop()


def test_a_stack_does_not_outlive_its_model() -> None:
    run = Run(relu_stack())
    run.steps(STEPS)
    weight = weakref.ref(run.module[0].weight)
    del run
    gc.collect()
    assert weight() is None

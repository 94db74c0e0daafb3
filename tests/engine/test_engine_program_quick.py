"""Uses that C++ takes give the bits of those that Python takes, and cost it no functions."""

from __future__ import annotations

import cProfile
import gc
import pstats
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpkern
from dpkern.base.errors import DPKernError, UnsupportedModule
from dpkern.engine.program.site import UseSite
from dpkern.ops import direct
from dpkern.ops.backends import cpu
from tests.engine.replayed_loops import both

STEPS = 8
quick = pytest.mark.skipif(direct.look("quick") is None, reason="no compiled module")


def stack(layers: int, frozen: bool = False, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6)]
    model = nn.Sequential(*parts, nn.Linear(6, 3, bias=False)).to(dtype)
    if frozen:
        for part in model[::3]:
            if part.bias is not None:
                part.bias.requires_grad_(False)
    return model


class Run:
    """A training loop, and what C++ and Python have done of it."""

    def __init__(
        self, model: nn.Module, sampling: str = "fixed", shape: tuple[int, ...] = (6,)
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        dtype = next(model.parameters()).dtype
        x = torch.randn(32, *shape, generator=generator, dtype=dtype)
        y = torch.randint(3, (32,), generator=generator)
        engine = dpkern.PrivacyEngine()
        self.module, self.optimizer, self.loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            data_loader=DataLoader(TensorDataset(x, y), batch_size=8),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            sampling=sampling,
            unsafe_seed=1,
        )
        engine.capture.guard._occasions.gap = 1 << 60
        self.engine, self.program = engine, engine.capture.program

    def batches(self, steps: int) -> Any:
        taken = 0
        while True:
            for x, y in self.loader:
                if taken == steps:
                    return
                taken += 1
                yield x, y

    def steps(self, steps: int, edit: Callable[[Tensor], Tensor] = lambda out: out) -> list[Tensor]:
        for x, y in self.batches(steps):
            out = self.module(x)
            out = out if out.dim() == 2 else out.mean(1)
            F.cross_entropy(edit(out), y).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return [p.detach().clone().as_subclass(Tensor) for p in self.module.parameters()]

    def python_calls(self, steps: int) -> dict[str, float]:
        """How often a step has called each of Python's functions of a program."""
        profile = cProfile.Profile(builtins=False)
        profile.enable()
        self.steps(steps)
        profile.disable()
        rows = pstats.Stats(profile).stats  # type: ignore[attr-defined]
        found = {}
        for (file, _, name), row in rows.items():
            if "engine/program" in file or "nodes_between" in file:
                found[name] = row[1] / steps
        return found


def without_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UseSite, "compile", lambda self: None)


@quick
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen biases"])
def test_no_use_of_a_usual_step_costs_a_function(frozen: bool) -> None:
    with cpu.use_own_products(True):  # torch's are called by Python
        _costs_no_function(frozen)


def _costs_no_function(frozen: bool) -> None:
    few, many = (Run(stack(layers, frozen)) for layers in (2, 6))
    for run in (few, many):
        run.steps(6)
        assert run.program.reason == ""
    counts = few.python_calls(3), many.python_calls(3)
    assert counts[0] == counts[1], "functions for each use"
    for name in ("_gradient", "forward", "next_site", "kinds", "enter", "leave", "take"):
        assert name not in counts[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("shape", [(6,), (5, 6)], ids=["rows", "positions"])
@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
@pytest.mark.parametrize("own", [True, False], ids=["compiled", "library"])
def test_bits_are_those_of_python(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    sampling: str,
    own: bool,
) -> None:
    with cpu.use_own_products(own):
        ours = Run(stack(2, dtype=dtype), sampling, shape)
        weights = ours.steps(STEPS)
        without_cpp(monkeypatch)
        others = Run(stack(2, dtype=dtype), sampling, shape)
        assert all(map(torch.equal, weights, others.steps(STEPS)))
    assert ours.program.replays == others.program.replays >= STEPS - 3


@pytest.mark.parametrize("change", ["skips", "twice", "again", "edits", "moves"])
def test_changes_of_a_loop_are_seen_where_python_takes_all_uses(
    monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    without_cpp(monkeypatch)
    both(lambda run: setattr(run.module, change, True))


class Net(nn.Module):
    """Two layers with an operation between them that is no attribute, a norm and a head."""

    def __init__(self, between: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.register_buffer("table", torch.zeros(8, 6))
        self.hidden = [between]
        self.of_table = False

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.table if self.of_table else x
        first = self.first(self.table if self.of_table else x)
        out: Tensor = self.head(self.second(self.norm(self.hidden[-1](first)))) + x.sum(1, True)
        return out


class Odd:
    """Steps as usual, one that is odd, and usual ones again."""

    def __init__(self) -> None:
        self.run = Run(Net())
        self.reasons: list[str] = []

    def step(self, odd: Callable[[Run, Tensor, Tensor], None] | None = None) -> None:
        for x, y in self.run.batches(1):
            if odd is None:
                F.cross_entropy(self.run.module(x), y).backward()
            else:
                odd(self.run, x, y)
            self.run.optimizer.step()
            self.run.optimizer.zero_grad()
        self.reasons.append(self.run.program.reason)

    def taken(self, odd: Callable[[Run, Tensor, Tensor], None]) -> tuple[list[Tensor], list[str]]:
        for number in range(8):
            try:
                self.step(odd if number == 6 else None)
            except DPKernError as error:
                self.reasons.append(str(error))
                self.run.engine.drop()
        assert self.reasons[5] == ""
        return self.run.steps(0), self.reasons


def usual(run: Run, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(run.module(x), y).backward()


def between(operation: Callable[[Tensor], Tensor]) -> Callable[[Run, Tensor, Tensor], None]:
    def odd(run: Run, x: Tensor, y: Tensor) -> None:
        run.module.hidden[-1:] = [operation]
        usual(run, x, y)
        run.module.hidden[-1:] = [torch.tanh]

    return odd


def with_a_side_result(h: Tensor) -> Tensor:
    h.exp()
    return h.tanh()


def under_autocast(run: Run, x: Tensor, y: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        out = run.module(x)
    F.cross_entropy(out.float(), y).backward()


def with_another_eps(run: Run, x: Tensor, y: Tensor) -> None:
    run.module.norm.eps = 0.5
    usual(run, x, y)
    run.module.norm.eps = 1e-5


def after_a_public_pass(run: Run, x: Tensor, y: Tensor) -> None:
    with run.engine.public():
        (0.01 * run.module(torch.ones(8, 6))).sum().backward()
    usual(run, x, y)


def evaluated_before(run: Run, x: Tensor, y: Tensor) -> None:
    run.module.eval()
    run.module(torch.ones(3, 6))
    run.module.train()
    usual(run, x, y)


def of_a_buffer(run: Run, x: Tensor, y: Tensor) -> None:
    run.module.of_table = True
    try:
        usual(run, x, y)
    finally:
        run.module.of_table = False


@pytest.mark.parametrize(
    "odd",
    [
        between(torch.sigmoid),
        between(with_a_side_result),
        under_autocast,
        with_another_eps,
        after_a_public_pass,
        evaluated_before,
        of_a_buffer,
    ],
    ids=["kind", "number", "autocast", "eps", "public", "evaluation", "buffer"],
)
def test_odd_steps_are_those_of_python(
    monkeypatch: pytest.MonkeyPatch, odd: Callable[[Run, Tensor, Tensor], None]
) -> None:
    ours, reasons = Odd().taken(odd)
    without_cpp(monkeypatch)
    others, theirs = Odd().taken(odd)
    assert reasons == theirs
    assert all(map(torch.equal, ours, others))


def test_other_operations_between_uses_are_recorded() -> None:
    _, reasons = Odd().taken(between(torch.sigmoid))
    assert reasons[6] == "other operations between two uses"


def test_second_derivatives_are_refused() -> None:
    odd = Odd()
    for _ in range(6):
        odd.step()
    with pytest.raises(UnsupportedModule, match="differentiated again"):
        odd.step(lambda run, x, y: F.cross_entropy(run.module(x), y).backward(create_graph=True))


@quick
@pytest.mark.parametrize("own", [True, False], ids=["compiled", "library"])
@pytest.mark.parametrize("shape", [(6,), (5, 6)], ids=["rows", "positions"])
def test_products_of_either_kind_cost_no_function(own: bool, shape: tuple[int, ...]) -> None:
    with cpu.use_own_products(own):
        run = Run(stack(2), shape=shape)
        run.steps(6)
        calls = run.python_calls(1)
    assert run.program.reason == ""
    assert "_gradient" not in calls
    # Without a bias F.linear views what it returns.
    assert calls.get("forward", 0) == (not own and len(shape) == 2)


@pytest.mark.parametrize("own", [True, False], ids=["compiled", "library"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "none"])
@pytest.mark.parametrize("shape", [(6,), (5, 6)], ids=["rows", "positions"])
def test_outputs_may_be_changed_in_place(own: bool, bias: bool, shape: tuple[int, ...]) -> None:
    with cpu.use_own_products(own):
        run = Run(nn.Sequential(nn.Linear(6, 4, bias), nn.ReLU(True), nn.Linear(4, 3)), shape=shape)
        run.steps(6)
        assert run.program.reason == ""


@quick
def test_functions_of_python_stand_beside() -> None:
    used: list[str] = []

    def beside(*given: object) -> None:
        used.append("beside")

    make = direct.look("quick")
    assert make is not None
    for name in ("linear", "layer_norm", "linear_forward", "layer_norm_forward"):
        assert make(name, beside)(1, 2) is None
    assert used == ["beside"] * 4
    with pytest.raises(ValueError, match="no function of this name"):
        make("another", beside)


def test_operands_that_hooks_have_changed_are_read_as_they_are() -> None:
    def halved(tensor: Tensor) -> Tensor:
        return tensor.half() if tensor.shape == (8, 6) else tensor

    weights = []
    for replayed in (True, False):
        run = Run(stack(1))
        run.program.enabled = replayed
        run.steps(6)
        replays = run.program.replays
        with torch.autograd.graph.saved_tensors_hooks(halved, lambda tensor: tensor):
            weights.append(run.steps(1))
        assert run.program.replays == replays
    for ours, recorded in zip(*weights, strict=True):
        torch.testing.assert_close(ours, recorded, atol=1e-3, rtol=0)


@quick
def test_a_program_does_not_outlive_its_model() -> None:
    run = Run(stack(1))
    run.steps(6)
    assert all(site.compiled is not None for site in run.program.flat.sites)  # type: ignore[union-attr]
    weight = weakref.ref(run.module[0].weight)
    del run
    gc.collect()
    assert weight() is None

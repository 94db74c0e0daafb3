"""A thread evaluates the module while another trains it: both go on as if they were alone."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from dpkern.base.errors import PrivacyError, UnsupportedModule
from dpkern.engine import turns

from .engine_run import Run

OTHERS = torch.linspace(-1, 1, 20).reshape(5, 4)


@pytest.fixture(scope="module")
def alone() -> torch.Tensor:
    """Parameters after two epochs in which no other thread ran."""
    run = Run()
    run.train(2)
    return run.values()


def in_thread(work: Callable[[], Any]) -> Any:
    """Return what the work returns in a thread of its own, or raise what it raises."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(work).result(timeout=30)


def evaluated(run: Run) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = run.module(OTHERS)
    return output


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Let threads take turns every few bytecodes."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("eager_switches")
def test_evaluations_race_with_training(alone: torch.Tensor) -> None:
    for _ in range(5):
        run, over = Run(), threading.Event()

        def evaluate(run: Run = run, over: threading.Event = over) -> None:
            while not over.is_set():
                evaluated(run)

        with ThreadPoolExecutor(2) as threads:
            others = [threads.submit(evaluate) for _ in range(2)]
            try:
                run.train(2)
            finally:
                over.set()
        assert [each.exception() for each in others] == [None, None]
        assert torch.equal(run.values(), alone)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_evaluation_leaves_the_batch_before_its_step_alone(
    where: str, alone: torch.Tensor
) -> None:
    """Without a step between, the evaluation must not wait: the training thread may wait for it."""
    run, seen = Run(), []
    for _ in range(2):
        for x, y in run.loader:
            run.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(run.module(x), y)
            if where == "backward":
                loss.backward()
            seen.append(in_thread(lambda: evaluated(run)))
            if where == "forward":
                loss.backward()
            with torch.no_grad():
                wanted = nn.Sequential.forward(run.module, OTHERS)
            assert torch.equal(seen[-1], wanted)
            run.optimizer.step()
    assert torch.equal(run.values(), alone)


def test_a_pass_waits_for_the_pass_of_another_thread() -> None:
    inside, go_on, order = threading.Event(), threading.Event(), []

    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if threading.current_thread() is not threading.main_thread():
                inside.set()
                assert go_on.wait(timeout=30)
                order.append("evaluation")
            return x

    run = Run(module=nn.Sequential(nn.Linear(4, 6), Slow(), nn.Linear(6, 2)))
    thread = threading.Thread(target=evaluated, args=(run,))
    thread.start()
    assert inside.wait(timeout=30)
    threading.Timer(0.05, go_on.set).start()
    run.train(1, most=1)
    order.append("step")
    thread.join(timeout=30)
    assert order == ["evaluation", "step"]


def test_a_failed_pass_gives_its_turn_back() -> None:
    run = Run()
    run.train(1, most=1)

    def wrong() -> None:
        with torch.no_grad():
            run.module(torch.ones(3, 7))

    for call in (in_thread, in_thread, lambda work: work()):
        with pytest.raises(RuntimeError, match="shapes"):
            call(wrong)
    assert in_thread(lambda: evaluated(run)).shape == (5, 2)
    assert run.train(1) == 6


def test_a_refused_step_gives_its_turn_back() -> None:
    run = Run()
    run.train(1, most=1)
    with pytest.raises(PrivacyError, match="step"):
        run.optimizer.step()
    assert in_thread(lambda: evaluated(run)).shape == (5, 2)


class FailingHookError(Exception):
    """What a hook of the loop raises."""


@pytest.mark.parametrize("error", [FailingHookError, KeyboardInterrupt])
@pytest.mark.parametrize("lives", [True, False], ids=["alive", "ended"])
def test_nobody_waits_for_a_pass_that_a_hook_ended(error: type[BaseException], lives: bool) -> None:
    """Torch tells the engine of no such end, and the thread may never run the module again."""
    run = Run()
    run.train(1, most=1)

    def fail(module: nn.Module, args: Any, output: Any) -> None:
        raise error

    hook = run.module.register_forward_hook(fail, prepend=True)
    failed, leave = threading.Event(), threading.Event()

    def evaluate() -> None:
        with pytest.raises(error):
            evaluated(run)
        failed.set()
        if lives:
            leave.wait(timeout=30)

    thread = threading.Thread(target=evaluate)
    thread.start()
    assert failed.wait(timeout=30)
    hook.remove()
    if not lives:
        thread.join(timeout=30)
    assert run.engine.capture.passes.turns.holder == thread.ident  # torch told of no end
    assert run.train(1) == 6
    leave.set()
    thread.join(timeout=30)
    assert in_thread(lambda: evaluated(run)).shape == (5, 2)


@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_hook_of_the_step_may_evaluate(elsewhere: bool) -> None:
    run, seen = Run(), []
    run.optimizer.register_step_post_hook(
        lambda *_: seen.append(in_thread(lambda: evaluated(run)) if elsewhere else evaluated(run))
    )
    assert run.train(1) == 6
    assert [tuple(each.shape) for each in seen] == [(5, 2)] * 6


def test_a_pass_that_waits_for_an_evaluation_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    run.train(1, most=1)
    monkeypatch.setattr(turns, "PATIENCE", 0.1)
    hook = run.module[1].register_forward_hook(  # type: ignore[index]
        lambda *_: in_thread(lambda: evaluated(run))
    )
    with pytest.raises(UnsupportedModule, match="inside of a pass"):
        evaluated(run)
    hook.remove()
    assert run.train(1) == 6


class Remembers(nn.Module):
    """Keeps a mean over the samples that it evaluates."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        logits: torch.Tensor = self.layer(x - self.mean)
        return logits


def test_an_evaluation_between_batches_is_looked_at_in_every_thread() -> None:
    run = Run(module=Remembers())
    for x, _ in run.loader:
        run.module(x)
        break
    run.engine.drop()
    with pytest.raises(UnsupportedModule, match="mean"):
        in_thread(lambda: evaluated(run))


def test_an_evaluation_beside_a_batch_of_the_same_thread_is_looked_at() -> None:
    run = Run(module=Remembers())
    run.module(next(iter(run.loader))[0])
    with pytest.raises(UnsupportedModule, match="mean"):
        evaluated(run)


def test_what_an_evaluation_beside_a_batch_leaves_is_found_by_the_next_pass() -> None:
    run = Run(module=Remembers())
    batches = iter(run.loader)
    x, y = next(batches)
    loss = nn.functional.cross_entropy(run.module(x), y)
    in_thread(lambda: evaluated(run))
    loss.backward()
    run.optimizer.step()
    with pytest.raises(UnsupportedModule, match="mean"):
        run.module(next(batches)[0])

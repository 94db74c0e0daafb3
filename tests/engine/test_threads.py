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


def test_nobody_waits_for_an_interrupted_pass_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    run.train(1, most=1)
    monkeypatch.setattr(turns, "PATIENCE", 0.05)

    def interrupt(module: nn.Module, args: Any, output: Any) -> None:
        raise KeyboardInterrupt

    hook = run.module[1].register_forward_hook(interrupt)  # type: ignore[index]
    with pytest.raises(KeyboardInterrupt):
        evaluated(run)
    hook.remove()
    with pytest.raises(UnsupportedModule, match="another thread"):
        in_thread(lambda: evaluated(run))
    evaluated(run)  # as the remedy says
    assert in_thread(lambda: evaluated(run)).shape == (5, 2)

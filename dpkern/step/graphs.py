"""Record the update of a private step once as a CUDA graph, and replay it at every step.

Noise must be fresh at every replay, so whatever depends on the step is read from a step counter in
device memory, which the graph's last node advances. Recording runs nothing: it releases nothing.
Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..base.errors import InvalidInput, PrivacyError
from ..base.rng import Purpose
from ..ops import update
from ..ops.backends import cuda
from . import sums as summing
from .noise import noise_of
from .step import DPStep


class Recording:
    """The work on one device, recorded when this is made and run by every ``replay``.

    Args:
        prepare: loads and allocates whatever the work needs, on the recording's stream; what it
            returns stays alive as long as the recording.
        work: launches kernels on tensors that stay where they are.
        device: a CUDA device.
    """

    def __init__(
        self, prepare: Callable[[], Any], work: Callable[[], Any], device: torch.device
    ) -> None:
        self._graph = torch.cuda.CUDAGraph()
        stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._held = prepare()
        with torch.cuda.graph(self._graph, stream=stream):
            self._results = work()

    def replay(self) -> None:
        """Run the work on the current stream."""
        self._graph.replay()

    def close(self) -> None:
        """Forget the work and everything that it holds."""
        self._graph.reset()
        self._held = self._results = None


class UpdateGraph:
    """A CUDA graph of ``DPStep.finish``: noise, rule and step count, without Python launches.

    The parameters, their optimizer state, the rule's numbers, the noise scales and the key become
    part of the graph: where one of them changes, ``finish`` refuses, and a new graph is needed. SGD
    gives the same bits as ``DPStep.finish``; Adam's bias corrections are running products, which
    agree to 4 units in the last place. Close the graph to forget the key.

    Args:
        step: a private step on a CUDA device, with an ``optimizer`` and with noise.

    Raises:
        InvalidInput: a step whose update cannot be recorded.
        BackendError: no CUDA kernels on this machine.
    """

    def __init__(self, step: DPStep) -> None:
        rule, state = _recordable(step)
        self.step = step
        self._rule, self._plan, self._state = rule, step.plan, state
        device = step.params[0].device
        # Zeros of the widest dtype of sums: physical batches of any number fit.
        self._sums = summing.accumulators(None, step.params, step.plan, 0, wide=True)
        self._step_counter = update.step_counter(rule, state.steps, device)
        # The step counter counts the state's steps; the streams are those of its step 0.
        noise = noise_of(step.plan, step.key, step.steps + 1 - state.steps)
        assert noise is not None
        self._noise: update.Noise | None = replace(noise, step_counter=self._step_counter)
        self._addresses = self._places()
        self._steps = step.steps
        self._recording: Recording | None = Recording(self._prepare, self._work, device)

    def finish(self) -> None:
        """Release the samples added to the step and update its parameters (``DPStep.finish``).

        Raises:
            PrivacyError: noise that would be used twice, or a key that is gone.
            InvalidInput: something that the graph holds has changed. Nothing is released.
        """
        recording = self._check()
        # The ledger is written before anything runs.
        sums = self.step._begin(list(self.step._accumulators(0)))
        for mine, theirs in zip(self._sums, sums, strict=True):
            mine.copy_(theirs)
        recording.replay()
        increment_version(self.step.params)
        self._state.steps += 1
        self._steps = self.step.steps

    def close(self) -> None:
        """Forget the graph and the key in it; calling it twice changes nothing."""
        if self._recording is not None:
            self._recording.close()
            for total in self._sums:
                total.zero_()
        self._recording = self._noise = None

    def __enter__(self) -> UpdateGraph:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _arguments(self) -> dict[str, Any]:
        # A state of its own: recording must not count as a step.
        return {
            "rule": self._rule,
            "state": update.State(self._state.steps, self._state.buffers),
            "gradient_scale": self.step.gradient_scale,
            "noise": self._noise,
        }

    def _prepare(self) -> Any:
        return cuda.prepare_update(self.step.params, list(self._sums), **self._arguments())

    def _work(self) -> Any:
        wanted = self.step.backend or "cuda"
        bad = update.step(self.step.params, list(self._sums), backend=wanted, **self._arguments())
        update.advance(self._step_counter, rule=self._rule)
        return bad

    def _places(self) -> list[int]:
        buffers = [b for group in self._state.buffers.values() for b in group]
        return [t.data_ptr() for t in (*self.step.params, *buffers)]

    def _check(self) -> Recording:
        step, noise = self.step, self._noise
        if self._recording is None or noise is None:
            raise InvalidInput(
                "UpdateGraph",
                expected="an open graph",
                got="one that was closed",
                remedy="Make a new one; a closed graph has forgotten its key.",
            )
        if step.steps != self._steps:
            raise PrivacyError(
                "UpdateGraph",
                expected=f"step {self._steps}, where its step_counter stands",
                got=f"step {step.steps}: the step was finished without the graph",
                remedy="Make a new graph: this one would add an earlier step's noise again.",
            )
        key = step.key.stream(Purpose.NOISE, step.steps + 1).key
        if key != noise.stream.key:
            raise PrivacyError(
                "UpdateGraph",
                expected="the key that was recorded",
                got="another one, as after a fork",
                remedy="Make a new graph in this process.",
            )
        changed = {
            "optimizer": step.optimizer != self._rule,
            "mechanism": step.plan is not self._plan,
            "shards": step.shards is not None,
            "memory of parameters or optimizer state": self._places() != self._addresses,
        }
        names = [name for name, differs in changed.items() if differs]
        if names:
            raise InvalidInput(
                "UpdateGraph",
                expected="the step as it was recorded",
                got=f"a changed {', '.join(names)}",
                remedy="Close this graph and make a new one after the change.",
            )
        return self._recording


def _recordable(step: DPStep) -> tuple[update.Rule, update.State]:
    """Return the step's rule and state, if its update can be a graph."""
    rule, state = step.optimizer, step.optimizer_state
    problems = {
        "no optimizer": rule is None,
        "no noise": step.plan.distribution is None,
        "shards": step.shards is not None,
        "release coordinates or a memory": not step.plan.direct or step.memory is not None,
        "a noise source": step._supply.source is not None,
        "noise once per sample": step.plan.noise_point != "per_batch",
        "parameters on the CPU": any(not _on_device(p) for p in step.params),
    }
    found = [name for name, holds in problems.items() if holds]
    if rule is None or state is None or found:
        raise InvalidInput(
            "step",
            expected="a DPStep on a CUDA device with an optimizer and noise",
            got=f"one with {', '.join(found)}",
            remedy="Use DPStep.finish, which needs no recording.",
        )
    return rule, state


def _on_device(param: torch.Tensor) -> bool:
    return param.is_cuda


__all__ = ["UpdateGraph"]

"""Record a private step once as a CUDA graph, and replay it at every step.

What is recorded is the update, or all that comes after per-sample gradients at fixed places: norms,
clip factors and sums as well. Noise must be fresh at every replay, so whatever depends on the step
is read from a step counter in device memory. Each step writes it before its replay: the step's
number, the rule's powers, its learning rate, and that this step is due. The graph's last node takes
it past that step, so that a replay that was not announced changes nothing. Recording runs nothing:
it releases nothing. Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..base import validate as check
from ..base.closing import Closes
from ..base.errors import InvalidInput, PrivacyError
from ..base.rng import Purpose
from ..ops import _step_counter, update
from ..ops.backends import _tables, cuda
from . import sums as summing
from .checks import check_per_sample
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
        self._graph, self._device = torch.cuda.CUDAGraph(), device
        self._stream: torch.cuda.Stream | None = None
        stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._held = prepare()
        with _tables.written_late() as tables:
            with torch.cuda.graph(self._graph, stream=stream):
                self.results = work()
            tables.write()
        self._held = self._held, tables

    def join(self) -> None:
        """Let the current stream wait for the last replay, whose memory it is about to write."""
        now = torch.cuda.current_stream(self._device)
        if self._stream is not None and self._stream != now:
            now.wait_stream(self._stream)

    def replay(self) -> None:
        """Run the work on the current stream, behind the last replay."""
        self.join()
        self._graph.replay()
        self._stream = torch.cuda.current_stream(self._device)

    def close(self) -> None:
        """Forget the work and everything that it holds."""
        self._graph.reset()
        self._held = self.results = None


class UpdateGraph(Closes):
    """A CUDA graph of ``DPStep.finish``: noise, rule and step count, without Python launches.

    With ``per_sample`` it is one of ``DPStep.add`` as well: these gradients are normed, clipped and
    summed in the same graph, onto what was added to the step before.

    The parameters, their optimizer state, the rule's numbers beside its learning rate, the noise
    scales and the key become part of the graph: where one of them changes, ``finish`` refuses, and
    a new graph is needed. Results have the bits of ``DPStep.finish``. Close the graph to forget the
    key.

    Args:
        step: a private step on a CUDA device, with an ``optimizer`` and with noise.
        per_sample: contiguous gradients ``[B, *shape]``, one tensor per parameter, which are
            filled anew before every ``finish``; None records the update alone.

    Raises:
        InvalidInput: a step whose update, or whose clipping, cannot be recorded.
        BackendError: no CUDA kernels on this machine.
    """

    def __init__(self, step: DPStep, per_sample: Sequence[torch.Tensor] | None = None) -> None:
        rule, state = _recordable(step)
        if per_sample is not None:
            _check_clipped(step, per_sample)
        self.step = step
        self.per_sample = None if per_sample is None else list(per_sample)
        self._rule, self._plan, self._state = rule, step.plan, state
        device = step.params[0].device
        # Zeros of the widest dtype of sums: physical batches of any number fit.
        self._sums = summing.accumulators(None, step.params, step.plan, 0, wide=True)
        self._step_counter = update.step_counter(rule, state.steps, device)
        self._announce(_step_counter.NONE)
        # The step counter counts the state's steps; the streams are those of its step 0.
        noise = noise_of(step.plan, step.key, step.steps + 1 - state.steps)
        assert noise is not None
        self._noise: update.Noise | None = replace(noise, step_counter=self._step_counter)
        self._addresses = self._places()
        self._steps = step.steps
        self._recording: Recording | None = Recording(self._prepare, self._work, device)

    def finish(self, samples: int | None = None) -> None:
        """Release the step's samples and update its parameters (``DPStep.finish``).

        Args:
            samples: how many rows of ``per_sample`` are samples; those behind become zeros. None
                means all of them.

        Raises:
            PrivacyError: noise that would be used twice, or a key that is gone.
            InvalidInput: something that the graph holds has changed. Nothing is released.
        """
        recording = self._check()
        recording.join()
        most = len(self.per_sample[0]) if self.per_sample is not None else 0
        if samples is not None:
            check.integer(0, most, samples=samples)
            for gradient in self.per_sample or ():
                gradient[samples:].zero_()
        # The ledger is written before anything runs.
        if self.per_sample is not None and self.step.sums is None:
            self.step._begin([])
            torch._foreach_zero_(self._sums)
        else:
            sums = self.step._begin(list(self.step._accumulators(0)))
            for mine, theirs in zip(self._sums, sums, strict=True):
                mine.copy_(theirs)
        self._announce(self._state.steps + 1)
        recording.replay()
        if self.per_sample is not None:
            self.step._nonfinite = self.step._nonfinite + recording.results
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

    def _announce(self, due: int) -> None:
        """Write the step counter of the next update, and which one is due."""
        rule, steps = self.step.optimizer or self._rule, self._state.steps
        words = _step_counter.packed(rule, steps, rule.powers(steps + 1), due)
        _step_counter.write(self._step_counter, words)

    def _rule_now(self) -> update.Rule | None:
        """Return the rule of the next update, with the learning rate that was recorded."""
        rule = self.step.optimizer
        return None if rule is None else replace(rule, lr=self._rule.lr)

    def _arguments(self) -> dict[str, Any]:
        # A state of its own: recording must not count as a step.
        return {
            "rule": self._rule,
            "state": update.State(self._state.steps, self._state.buffers),
            "gradient_scale": self.step.gradient_scale,
            "noise": self._noise,
        }

    def _prepare(self) -> Any:
        update_needs = cuda.prepare_update(self.step.params, list(self._sums), **self._arguments())
        if self.per_sample is None:
            return update_needs
        return update_needs, cuda.prepare_clip(
            self.per_sample, self._sums, **summing.clip_arguments(self.step.plan)
        )

    def _work(self) -> Any:
        wanted = self.step.backend or "cuda"
        nonfinite: Any = 0
        if self.per_sample is not None:
            clipped = summing.clipped(self.per_sample, self.step.plan, self._sums, wanted)
            nonfinite = clipped.nonfinite
        update.step(self.step.params, list(self._sums), backend=wanted, **self._arguments())
        update.advance(self._step_counter, rule=self._rule)
        return nonfinite

    def _places(self) -> list[int]:
        buffers = [b for group in self._state.buffers.values() for b in group]
        return [t.data_ptr() for t in (*self.step.params, *buffers, *(self.per_sample or ()))]

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
                expected=f"step {self._steps}, where its noise stands",
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
            "optimizer beside its learning rate": self._rule_now() != self._rule,
            "mechanism": step.plan is not self._plan,
            "shards": step.shards is not None,
            "audit": self.per_sample is not None and step.watched,
            "memory of parameters, optimizer state or gradients": self._places() != self._addresses,
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


def _check_clipped(step: DPStep, per_sample: Sequence[torch.Tensor]) -> None:
    """Check that gradients at these places can be clipped in a graph.

    Raises:
        InvalidInput: gradients that do not fit, or a step that clips them otherwise.
    """
    plan = step.plan
    check_per_sample(per_sample, step.params, plan, released=False)
    problems = {
        "clipping by groups, for which the host waits": plan.clipping == "group",
        "gradients that are needed unclipped": plan.needs_raw,
        "several processes": step._reduce is not None,
        "an audit that sees the sums": step.watched,
        "parameters of several dtypes": len({p.dtype for p in step.params}) > 1,
        "gradients of float16": per_sample[0].dtype is torch.float16,
        "gradients of several dtypes": len({g.dtype for g in per_sample}) > 1,
        "gradients that are not contiguous": not all(g.is_contiguous() for g in per_sample),
        "no room for a sample": not len(per_sample[0]),
    }
    found = [name for name, holds in problems.items() if holds]
    if found:
        raise InvalidInput(
            "per_sample",
            expected="contiguous gradients of one dtype that a graph can clip",
            got=", ".join(found),
            remedy="Add them with DPStep.add, and record the update alone.",
        )


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

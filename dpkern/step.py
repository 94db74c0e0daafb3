"""One private step: owns the plan, the key, the step counter and the ledger.

``add`` and ``finish`` are the only calls that spend privacy. A logical step may add any number of
physical batches, or none (an empty Poisson draw): the noise is drawn once, in ``finish``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from . import _step_sums as summing
from . import _validate as check
from ._dispatch import BACKENDS
from ._step_checks import (
    check_optimizer,
    check_per_sample,
    check_saved,
    check_schedule,
    check_sum,
    check_updates,
    checked_key,
    checked_mechanism,
    checked_params,
    scheduled_values,
)
from ._step_noise import noise_of, part
from .accounting import Certificate, Ledger
from .errors import InvalidInput, PrivacyError
from .laws import SCALE_CELLS
from .mechanisms.base import Mechanism
from .ops import clip, noise, update
from .ops._count import Count
from .report import step_report
from .rng import Key

STATE_VERSION = 1

Updates = Sequence[tuple[Sequence[int], update.Rule, update.State]]
"""Which parameters a rule updates, and what it remembers of them."""


class DPStep:
    """Clip, sum, noise and update for a fixed list of parameters.

    Args:
        mechanism: a configuration such as ``mechanisms.DPSGD``.
        params: the trained parameters, floating, on one device; their order is frozen and decides
            where each one's noise stands in the stream. With ``optimizer`` they are contiguous and
            of one dtype, float32 or float64.
        expected_batch_size: public number by which the noisy sum is divided.
        average: False leaves that division out.
        sample_rate: probability with which each record joins a step; for the ledger.
        sampling: ``poisson``, ``fixed`` or ``shuffled``: how batches are really drawn.
        dataset_size: needed by ``fixed`` sampling; public.
        optimizer: an ``ops.update`` rule applied by ``finish``, or None to get gradients back. May
            be replaced between steps by one of the same kind (learning-rate schedules).
        unsafe_seed: reproducible noise; the certified epsilon is then infinite.
        key: a key that several processes share, instead of a new one.
        rounds: ChaCha rounds of a new key, 20, 12 or 8.
        reduce: called once in ``finish`` to add up the list of sums over processes, in place, or,
            with ``shards``, to leave this process's part of each; all of them then draw the same
            noise, from a shared ``key``.
        backend: who runs the ops; None leaves it to dpkern.

    Raises:
        InvalidInput: parameters or numbers that do not fit.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        params: Iterable[torch.Tensor],
        *,
        expected_batch_size: float,
        average: bool = True,
        sample_rate: float,
        sampling: str = "poisson",
        dataset_size: int | None = None,
        optimizer: update.Rule | None = None,
        unsafe_seed: int | None = None,
        key: Key | None = None,
        rounds: int = 20,
        reduce: Callable[[list[torch.Tensor]], None] | None = None,
        backend: str | None = None,
    ) -> None:
        self._mechanism = self._first_mechanism = checked_mechanism(mechanism)
        check_optimizer(optimizer)
        self.params = checked_params(params, fused=optimizer is not None)
        check.choice((None, *BACKENDS), backend=backend)
        self.plan = mechanism.plan([tuple(p.shape) for p in self.params])
        self.expected_batch_size = check.positive(expected_batch_size=expected_batch_size)
        self.gradient_scale = 1 / self.expected_batch_size if average else 1.0
        self.sampling: dict[str, Any] = {
            "sampling": sampling,
            "sample_rate": sample_rate,
            "dataset_size": dataset_size,
        }
        self.key = checked_key(key, unsafe_seed, rounds)
        self.ledger = Ledger(seeded=self.key.seeded)
        self.ledger.record(self.plan, count=0, **self.sampling)  # checks the sampling arguments
        self.backend = backend
        self.steps = 0
        self._nonfinite: Count = 0
        self.words = {"produced": 0, "consumed": 0}
        self.shards: summing.Shards | None = None
        """Set where ``params`` only show the shapes and each process updates its part."""
        self._reduce = reduce
        self._optimizer = optimizer
        self.optimizer_state = optimizer.init(self.params) if optimizer is not None else None
        self._sums: tuple[torch.Tensor, ...] | None = None
        self._added = 0

    @property
    def mechanism(self) -> Mechanism:
        """The configuration; a schedule may replace its noise and bounds between steps."""
        return self._mechanism

    @mechanism.setter
    def mechanism(self, mechanism: Mechanism) -> None:
        if mechanism == self._mechanism:
            return
        check_schedule(self._mechanism, mechanism)
        if self._sums is not None:
            raise PrivacyError(
                "mechanism",
                expected="a change between steps",
                got="sums that were clipped by the old configuration",
                remedy="Call finish() first.",
            )
        plan = mechanism.plan([block.shape for block in self.plan.blocks])
        self._mechanism, self.plan = mechanism, plan

    @property
    def nonfinite(self) -> int:
        """Samples dropped because a gradient was not finite (a diagnostic, not private)."""
        return int(self._nonfinite)  # on a device the host waits for the count here

    @property
    def unfinished(self) -> bool:
        """Whether samples have been added that ``finish`` has not released."""
        return self._sums is not None

    @property
    def optimizer(self) -> update.Rule | None:
        """The rule that ``finish`` applies."""
        return self._optimizer

    @optimizer.setter
    def optimizer(self, rule: update.Rule | None) -> None:
        check_optimizer(rule)
        old = self._optimizer
        same = rule is not None and old is not None and rule.buffer_names() == old.buffer_names()
        if not same:
            raise InvalidInput(
                "optimizer",
                expected=f"a rule with the buffers of {type(old).__name__}",
                got=type(rule).__name__,
                remedy="Change numbers with dataclasses.replace(step.optimizer, lr=...).",
            )
        self._optimizer = rule

    def add(
        self,
        per_sample: Sequence[torch.Tensor] | None = None,
        *,
        sum: clip.ClipResult | None = None,
    ) -> None:
        """Add the samples of one physical batch to the current step.

        Args:
            per_sample: gradients ``[B, *shape]``, one tensor per parameter; clipped here.
            sum: a clipped sum with its proved bound, made by ``ops.clip.clip_sum``; the first one
                of a step is taken over, not copied.

        Raises:
            InvalidInput: both or neither given, or tensors that do not fit the parameters.
            PrivacyError: a sum whose bound, unit or arithmetic is not the plan's.
        """
        if (per_sample is None) == (sum is None):
            raise InvalidInput(
                "add",
                expected="either per_sample= or sum=",
                got="both" if sum is not None else "neither",
                remedy="Pass per-sample gradients, or a ClipResult.",
            )
        if per_sample is not None:
            result = self._clipped(per_sample)
        else:
            assert sum is not None
            result = sum
            check_sum(result, self.params, self.plan)
            self._join(result)
        self._added += result.batch_size
        self._nonfinite = self._nonfinite + result.nonfinite

    def drop(self) -> None:
        """Forget the samples of the unfinished step; nothing of them is released."""
        self._sums, self._added = None, 0

    def finish(self, updates: Updates | None = None) -> list[torch.Tensor | None] | None:
        """Draw the step's noise, record the release, and update the parameters.

        ``gradient = gradient_scale * noisy sum``. Each parameter's noise is drawn once.

        Args:
            updates: without an ``optimizer`` of its own, the parameters (by index) that rules
                update in one pass over memory, each with its state.

        Returns:
            None if there is an optimizer, else the noisy gradients, with None in the place of
            parameters that ``updates`` names.

        Raises:
            InvalidInput: indices, rules or states that do not fit; nothing is released.
        """
        held = self.params if self.shards is None else list(self.shards.tensors)
        if updates is None and self._optimizer is not None:
            assert self.optimizer_state is not None
            updates = [(range(len(self.params)), self._optimizer, self.optimizer_state)]
        else:
            updates = check_updates(updates, held, self._optimizer)
        sums = self._begin()
        offsets = None if self.shards is None else self.shards.offsets
        noise_now = noise_of(self.plan, self.key, self.steps, offsets)
        left = set(range(len(sums)))
        for indices, rule, state in updates:
            update.step(
                [held[i] for i in indices],
                [sums[i] for i in indices],
                rule=rule,
                state=state,
                gradient_scale=self.gradient_scale,
                noise=part(noise_now, indices),
                backend=self.backend,
            )
            left.difference_update(indices)
        if self._optimizer is not None:
            return None
        return [
            self._gradient(sums[i], i, noise_now) if i in left else None for i in range(len(sums))
        ]

    def _begin(self) -> list[torch.Tensor]:
        """Record the release of the current step and hand over its sums, those of all processes."""
        sums = list(self._accumulators(0))
        self.steps += 1
        # Recorded first: a release that fails half-way counts as one that happened.
        self.ledger.record(self.plan, **self.sampling)
        self._sums, self._added = None, 0
        if self._reduce is not None:
            self._reduce(sums)
        for name, words in self.plan.words.items():
            self.words[name] += words
        return sums

    def certify(self, delta: float) -> Certificate:
        """The certificate of all steps so far (``accounting.Certificate``)."""
        return self.ledger.certify(delta)

    def epsilon(self, delta: float) -> float:
        """Certified epsilon so far; infinite without noise or with a known seed."""
        return self.ledger.epsilon(delta)

    def epsilon_if_seed_secret(self, delta: float) -> float:
        """Epsilon so far if nobody knew the seed."""
        return self.ledger.epsilon_if_seed_secret(delta)

    def report(self, delta: float) -> dict[str, Any]:
        """What was released and what is certified, as JSON values."""
        return step_report(self, delta)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: step counter, history, optimizer state; no key, no counts.

        Raises:
            PrivacyError: between ``add`` and ``finish``, where the state would hold sums without
                noise.
        """
        if self._sums is not None:
            raise PrivacyError(
                "state_dict",
                expected="a finished step",
                got="sums of samples without noise",
                remedy="Call finish() before saving.",
            )
        state = self.optimizer_state
        return {
            "version": STATE_VERSION,
            "fingerprint": self._fingerprint(),
            "steps": self.steps,
            "words": dict(self.words),
            "ledger": self.ledger.state_dict(),
            "mechanism": scheduled_values(self._mechanism),
            "optimizer": None if state is None else state.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a saved run: its history stays, an unseeded run goes on with its fresh key.

        Raises:
            InvalidInput: a state of other parameters, another mechanism or another seed.
            PrivacyError: this DPStep has steps of its own, which the loaded history would forget.
        """
        if self.steps or self._sums is not None:
            raise PrivacyError(
                "load_state_dict",
                expected="a DPStep without steps",
                got=f"one with {self.steps} steps" + (" and open sums" if self._added else ""),
                remedy="Make a new DPStep and load into that: releases cannot be taken back.",
            )
        check_saved(state, self.state_dict())
        # Everything is checked before anything changes.
        steps = check.integer(**{"state.steps": state["steps"]})
        saved = state["words"]
        words = {k: check.integer(**{f"state.words.{k}": saved.get(k)}) for k in self.words}
        if self.optimizer_state is not None:
            self.optimizer_state.check(state["optimizer"])
        mechanism = replace(self._first_mechanism, **state["mechanism"])  # type: ignore[type-var]
        plan = mechanism.plan([block.shape for block in self.plan.blocks])
        ledger = Ledger(seeded=self.key.seeded)
        ledger.load_state_dict(state["ledger"])
        if ledger.steps != steps:
            raise InvalidInput(
                "state.ledger",
                expected=f"a history of {steps} steps",
                got=f"one of {ledger.steps}",
                remedy="Pass what DPStep.state_dict() returned.",
            )
        if self.optimizer_state is not None:
            self.optimizer_state.load_state_dict(state["optimizer"])
        self.ledger, self.steps, self.words = ledger, steps, words
        self._mechanism, self.plan = mechanism, plan

    def _fingerprint(self) -> dict[str, Any]:
        rule = self._optimizer
        return {
            "mechanism": self._first_mechanism.fingerprint,
            "shapes": [list(p.shape) for p in self.params],
            "dtype": ", ".join(sorted({str(p.dtype) for p in self.params})),
            "expected_batch_size": self.expected_batch_size,
            "gradient_scale": self.gradient_scale,
            "optimizer": None if rule is None else type(rule).__name__,
            "unsafe_seed": self.key.unsafe_seed,
            "rounds": self.key.rounds,
            **self.sampling,
        }

    def _accumulators(self, more: int) -> summing.Sums:
        """The sums so far, or zeros, wide enough for ``more`` samples."""
        samples, wide = self._added + more, self._reduce is not None
        return summing.accumulators(self._sums, self.params, self.plan, samples, wide=wide)

    def _join(self, result: clip.ClipResult) -> None:
        if self._sums is None:
            self._sums = summing.adopted(result.sums, self.params, self.plan)
            return
        sums = self._accumulators(result.batch_size)
        for mine, theirs in zip(sums, result.sums, strict=True):
            mine.add_(theirs)
        self._sums = sums

    def _clipped(self, per_sample: Sequence[torch.Tensor]) -> clip.ClipResult:
        check_per_sample(per_sample, self.params, self.plan)
        if len({p.dtype for p in self.params}) > 1 or per_sample[0].dtype is torch.float16:
            alike = summing.common_dtype(per_sample)
            result = summing.clipped(alike, self.plan, None, self.backend)
            self._join(replace(result, sums=summing.adopted(result.sums, self.params, self.plan)))
            return result
        out = self._accumulators(int(per_sample[0].shape[0]))
        result = summing.clipped(per_sample, self.plan, out, self.backend)
        self._sums = out
        return result

    def _gradient(self, total: torch.Tensor, i: int, drawn: update.Noise | None) -> torch.Tensor:
        """The noisy gradient of parameter i, in its dtype."""
        dtype = self.params[i].dtype
        if drawn is None:
            return (total * self.gradient_scale).to(dtype)
        exact = self.plan.arithmetic == "exact"
        noisy = noise.add_noise(
            total,
            stream=drawn.stream,
            position=drawn.positions[i],
            distribution=drawn.distribution,
            scale=None if exact else drawn.scales[i],
            rounding=drawn.rounding,
            backend=self.backend,
        )
        factor = (drawn.scales[i] / SCALE_CELLS if exact else 1.0) * self.gradient_scale
        return (noisy.to(clip.sum_dtype(dtype)) * factor).to(dtype)

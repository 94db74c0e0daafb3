"""One private step: owns the plan, the key, the step counter and the ledger.

``add`` and ``finish`` are the only calls that spend privacy. A logical step may add any number of
physical batches, or none (an empty Poisson draw): the noise is drawn once, in ``finish``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from . import _validate as check
from ._dispatch import BACKENDS
from ._step_checks import (
    check_optimizer,
    check_per_sample,
    check_saved,
    check_sum,
    checked_mechanism,
    checked_params,
)
from .accounting import Certificate, Ledger
from .errors import InvalidInput, PrivacyError
from .laws import SCALE_CELLS
from .mechanisms.base import TILE, Mechanism
from .ops import clip, noise, update
from .report import step_report
from .rng import Key, Purpose

STATE_VERSION = 1
_INT32_MOST = 2**31 - 1
_NO_CLIPPING = 2.0**1000
"""A bound that no finite gradient reaches, for runs without privacy (C = infinity)."""


class DPStep:
    """Clip, sum, noise and update for a fixed list of parameters.

    Args:
        mechanism: a configuration such as ``mechanisms.DPSGD``.
        params: the trained parameters, contiguous, one floating dtype and device; their order is
            frozen and decides where each one's noise stands in the stream.
        expected_batch_size: public number by which the noisy sum is divided.
        sample_rate: probability with which each record joins a step; for the ledger.
        sampling: ``poisson``, ``fixed`` or ``shuffled``: how batches are really drawn.
        dataset_size: needed by ``fixed`` sampling; public.
        optimizer: an ``ops.update`` rule applied by ``finish``, or None to get gradients back. May
            be replaced between steps by one of the same kind (learning-rate schedules).
        unsafe_seed: reproducible noise; the certified epsilon is then infinite.
        rounds: ChaCha rounds, 20, 12 or 8.
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
        sample_rate: float,
        sampling: str = "poisson",
        dataset_size: int | None = None,
        optimizer: update.Rule | None = None,
        unsafe_seed: int | None = None,
        rounds: int = 20,
        backend: str | None = None,
    ) -> None:
        self.mechanism = checked_mechanism(mechanism)
        self.params = checked_params(params)
        check_optimizer(optimizer)
        check.choice((None, *BACKENDS), backend=backend)
        self.plan = mechanism.plan([tuple(p.shape) for p in self.params])
        self.expected_batch_size = check.positive(expected_batch_size=expected_batch_size)
        self.sampling: dict[str, Any] = {
            "sampling": sampling,
            "sample_rate": sample_rate,
            "dataset_size": dataset_size,
        }
        self.key = (
            Key.fresh(rounds) if unsafe_seed is None else Key.from_unsafe_seed(unsafe_seed, rounds)
        )
        self.ledger = Ledger(seeded=self.key.seeded)
        self.ledger.record(self.plan, count=0, **self.sampling)  # checks the sampling arguments
        self.backend = backend
        self.steps = 0
        self.nonfinite = 0
        """Samples dropped because a gradient was not finite (a diagnostic, not private)."""
        self.words = {"produced": 0, "consumed": 0}
        self._optimizer = optimizer
        self.optimizer_state = optimizer.init(self.params) if optimizer is not None else None
        self._sums: tuple[torch.Tensor, ...] | None = None
        self._added = 0

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
            sum: a clipped sum with its proved bound, made by ``ops.clip.clip_sum``.

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
            self._sums = result.sums
        else:
            assert sum is not None
            result = sum
            check_sum(result, self.params, self.plan)
            sums = self._accumulators(result.batch_size)
            for mine, theirs in zip(sums, result.sums, strict=True):
                mine.add_(theirs)
            self._sums = sums
        self._added += result.batch_size
        self.nonfinite += result.nonfinite

    def finish(self) -> list[torch.Tensor] | None:
        """Draw the step's noise, record the release, and update the parameters.

        ``gradient = noisy sum / expected_batch_size``.

        Returns:
            The noisy mean gradients if there is no optimizer, else None after the update.
        """
        sums = self._accumulators(0)
        scale = 1 / self.expected_batch_size
        self.steps += 1
        # Recorded first: a release that fails half-way counts as one that happened.
        self.ledger.record(self.plan, **self.sampling)
        self._sums, self._added = None, 0
        noise_now = self._noise()
        if self._optimizer is None:
            return [self._gradient(total, i, noise_now) for i, total in enumerate(sums)]
        assert self.optimizer_state is not None
        update.step(
            self.params,
            list(sums),
            rule=self._optimizer,
            state=self.optimizer_state,
            gradient_scale=scale,
            noise=noise_now,
            backend=self.backend,
        )
        return None

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

    def _fingerprint(self) -> dict[str, Any]:
        rule = self._optimizer
        return {
            "mechanism": repr(self.mechanism),
            "shapes": [list(p.shape) for p in self.params],
            "dtype": str(self.params[0].dtype),
            "expected_batch_size": self.expected_batch_size,
            "optimizer": None if rule is None else type(rule).__name__,
            "unsafe_seed": self.key.unsafe_seed,
            "rounds": self.key.rounds,
            **self.sampling,
        }

    def _accumulators(self, more: int) -> tuple[torch.Tensor, ...]:
        """The sums so far, or zeros, wide enough for ``more`` samples."""
        exact = self.plan.arithmetic == "exact"
        sums = self._sums
        if sums is None:
            dtype = torch.int32 if exact else clip.sum_dtype(self.params[0].dtype)
            sums = tuple(torch.zeros(p.shape, dtype=dtype, device=p.device) for p in self.params)
        if exact and sums[0].dtype is torch.int32:
            most = max(block.integer_bound or 0 for block in self.plan.blocks)
            if (self._added + more) * most > _INT32_MOST:
                sums = tuple(total.to(torch.int64) for total in sums)
        return sums

    def _clipped(self, per_sample: Sequence[torch.Tensor]) -> clip.ClipResult:
        check_per_sample(per_sample, self.params, self.plan)
        per_layer = self.plan.clipping == "per_layer"
        bounds = [min(bound, _NO_CLIPPING) for bound in self.plan.bounds]
        units = [unit for unit in self.plan.units if unit is not None]
        exact = self.plan.arithmetic == "exact"
        batch = int(per_sample[0].shape[0])
        return clip.clip_sum(
            per_sample,
            bounds if per_layer else bounds[0],
            style=self.plan.clipping,
            arithmetic=self.plan.arithmetic,
            unit=(units if per_layer else units[0]) if exact else None,
            out=self._accumulators(batch),
            backend=self.backend,
        )

    def _noise(self) -> update.Noise | None:
        """This step's noise; its words are counted."""
        law = self.plan.distribution
        if law is None:
            return None
        rounded = self.plan.arithmetic == "float"
        for block in self.plan.blocks:
            tiles = -(-block.size // TILE)
            words = noise.noise_words(block.size)
            words += noise.rounding_words(block.size) if rounded else 0
            self.words["consumed"] += words
            per_tile = noise.noise_words(TILE) + (noise.rounding_words(TILE) if rounded else 0)
            self.words["produced"] += tiles * per_tile
        purpose = Purpose.NOISE if law == "gaussian" else Purpose.LAPLACE
        return update.Noise(
            distribution=law,
            scales=self.plan.scales,
            stream=self.key.stream(purpose, self.steps),
            positions=self.plan.positions,
            rounding=self.key.stream(Purpose.ROUNDING, self.steps) if rounded else None,
        )

    def _gradient(self, total: torch.Tensor, i: int, drawn: update.Noise | None) -> torch.Tensor:
        """The noisy mean of parameter i, in its dtype."""
        dtype = self.params[i].dtype
        if drawn is None:
            return (total / self.expected_batch_size).to(dtype)
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
        factor = (drawn.scales[i] / SCALE_CELLS if exact else 1.0) / self.expected_batch_size
        return (noisy.to(clip.sum_dtype(dtype)) * factor).to(dtype)

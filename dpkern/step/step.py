"""Run private steps: own the plan, the key, the step counter and the ledger.

``add`` and ``finish`` are the only calls that spend privacy. A logical step may add any number of
physical batches, or none (an empty Poisson draw): the noise is drawn once, in ``finish``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..base import validate as check
from ..base.dispatch import BACKENDS, availability, wanted_backend
from ..base.errors import InvalidInput, PrivacyError
from ..base.phase import CLIP, LEARN, NOISE, UPDATE, phase
from ..base.rng import Key
from ..ops import clip, update
from ..ops._count import Count
from ..ops._pair_map import MOST_COORDINATES
from ..privacy.accounting import Certificate, Ledger
from ..privacy.mechanisms.base import Mechanism
from ..privacy.mechanisms.plan import Plan
from . import release as releasing
from . import sums as summing
from .checks import (
    check_optimizer,
    check_per_sample,
    check_schedule,
    check_sum,
    check_updates,
    checked_key,
    checked_mechanism,
    checked_params,
)
from .noise import Streams, noise_of, streams_of
from .noise_binding import NoiseBinding
from .noise_tables.source import NoiseSource
from .release_checks import check_importance, check_norms, check_ready, check_samples
from .report import step_report
from .state import load, state_of
from .watcher import WATCHED, Watcher

Updates = Sequence[tuple[Sequence[int], update.Rule, update.State]]
"""The parameters that a rule updates, and its state."""

_MAPPING = {"cpu": ("cpu", "reference"), "devices": ("cuda", "cupy"), "inline": ("triton",)}
"""Backends whose update takes maps: of any size, of ``MOST_COORDINATES``, and those that draw the
noise themselves."""

GRADIENTS = ("given", "batched")
"""Whether a sample's gradient is known to depend on its record alone."""


class DPStep:
    """A step that clips, sums, noises and updates a fixed list of parameters.

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
        backend: name of the backend. None selects the first one that supports the call; see
            ``dpkern info``.
        noise_source: source of the draws (``dpkern.noise_tables``), for this step alone. None
            draws inside the update.
        gradients: the origin of per-sample gradients. ``given``: row b depends on record b
            alone, to the last bit, which the caller vouches for. ``batched``: out of a model's
            passes over batches, where rounding may depend on the other records; exact sums are
            then certified under that condition (``accounting.history.BATCHED_BITS``).

    Raises:
        InvalidInput: parameters or numbers that do not fit.
        PrivacyError: a noise source that serves another step.
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
        noise_source: NoiseSource | None = None,
        gradients: str = "given",
    ) -> None:
        self._supply = NoiseBinding(noise_source)
        self._mechanism = self._first_mechanism = checked_mechanism(mechanism)
        check_optimizer(optimizer)
        self.params = checked_params(params, fused=optimizer is not None)
        check.choice((None, *BACKENDS), backend=backend)
        self.memory = mechanism.memory(self.params)
        """The memory learnt from noisy outputs. None means that the mechanism does not adapt."""
        self.plan = self._planned(mechanism)
        self.expected_batch_size = check.positive(expected_batch_size=expected_batch_size)
        self.gradient_scale = 1 / self.expected_batch_size if average else 1.0
        self.sampling: dict[str, Any] = {
            "sampling": sampling,
            "sample_rate": sample_rate,
            "dataset_size": dataset_size,
        }
        self.key = checked_key(key, unsafe_seed, rounds)
        check.choice(GRADIENTS, gradients=gradients)
        self.ledger = Ledger(seeded=self.key.seeded, batched=gradients == "batched")
        self._record(count=0)  # checks the sampling arguments
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
        self._unmapped = False
        """Whether the sums of mapped blocks are still those of gradients."""
        self._raw: list[torch.Tensor] | None = None
        self._importance: list[torch.Tensor] | None = None
        self._added = 0
        self._watcher: Watcher | None = None
        self.calibrated_to: str | None = None
        """The epsilon that the noise was calibrated to, if it was, for the report."""
        self._supply.bind(self)

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
        self._mechanism, self.plan = mechanism, self._planned(mechanism)

    @property
    def nonfinite(self) -> int:
        """Samples dropped because a gradient was not finite (a diagnostic, not private)."""
        return int(self._nonfinite)  # on a device the host waits for the count here

    @property
    def unfinished(self) -> bool:
        """Whether samples have been added that ``finish`` has not released."""
        return self._sums is not None

    @property
    def added(self) -> int:
        """Number of samples that have been added and that ``finish`` has not released."""
        return self._added

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
        released: bool = False,
    ) -> None:
        """Add the samples of one physical batch to the current step.

        Args:
            per_sample: gradients ``[B, *shape]``, one tensor per parameter; clipped here.
            sum: a clipped sum with its proved bound, made by ``ops.clip.clip_sum``; the first one
                of a step is taken over, not copied. Float sums have the parameters' shapes, exact
                ones those of the plan's release coordinates.
            released: ``per_sample`` holds release coordinates ``[B, *block.release_shape]``.

        Raises:
            InvalidInput: both or neither given, or tensors that do not fit the parameters.
            PrivacyError: a sum whose bound, unit or arithmetic is not the plan's, or a noise
                source that can make no draws.
        """
        if (per_sample is None) == (sum is None):
            raise InvalidInput(
                "add",
                expected="either per_sample= or sum=",
                got="both" if sum is not None else "neither",
                remedy="Pass per-sample gradients, or a ClipResult.",
            )
        self._supply.prepare(self)
        with phase(CLIP):
            if per_sample is not None:
                result = self._clipped(per_sample, released)
            else:
                assert sum is not None
                result = self._taken_over(sum)
        if self._watcher is not None:
            self._watcher.added(result)
        self._raw = releasing.joined(self._raw, result.raw)
        self._added += result.batch_size
        self._nonfinite = self._nonfinite + result.nonfinite

    @property
    def sums(self) -> summing.Sums | None:
        """The clipped sums of the unfinished step, without noise; None if nothing was added."""
        return self._sums

    def adopt(
        self, sums: summing.Sums, *, samples: int, nonfinite: int, clipped_as: object = None
    ) -> None:
        """Take over the sums of a program, whose bound, shapes and dtype it has checked.

        Args:
            sums: those of the physical batch and of all before it in this step; if integers, in
                int32 where that holds any sum of so many samples, and else in int64.
            samples: how many samples the batch has.
            nonfinite: how many of them were dropped.
            clipped_as: the release maps in front of which float sums were clipped.

        Raises:
            PrivacyError: a noise source that can make no draws, or sums that were clipped by
                other norms than the plan's.
        """
        if self.plan.arithmetic == "float":
            check_norms(clipped_as, self.plan)
        if self._supply.source is not None:
            self._supply.prepare(self)
        self._sums = sums
        self._unmapped = self.plan.mapped and self.plan.arithmetic == "float"
        self._added += samples
        self._nonfinite = self._nonfinite + nonfinite

    @property
    def maps_in_update(self) -> bool:
        """Whether the update noises sums in their coordinates, and leads them back."""
        return (
            self.plan.maps_in_update
            and self.memory is None
            and self._watcher is None
            and self._backend_maps()
        )

    def _backend_maps(self) -> bool:
        """Whether the backend of the update takes the plan's maps."""
        wanted = self.backend or wanted_backend()
        if wanted in _MAPPING["cpu"] or (wanted is None and self.params[0].is_cpu):
            return True
        able = _MAPPING["devices"]
        if self._supply.source is None:
            able += _MAPPING["inline"]
        names = able if wanted is None else (wanted,)
        ranks = (each.rank for each in self.plan.pair_maps.each if each is not None)
        fits = max(ranks, default=0) <= MOST_COORDINATES
        return fits and any(name in able and availability(name)[0] for name in names)

    @property
    def obstacle(self) -> str:
        """The reason why no program can prepare this step's update; empty if one can."""
        if why := self.release_obstacle:
            return why
        return "" if self.backend in (None, "cpu") else "another backend"

    @property
    def release_obstacle(self) -> str:
        """The reason why no program or recording can noise and apply the sums; empty if one can."""
        plan = self.plan
        if self._optimizer is not None:
            return "a rule of its own"
        if self._watcher is not None:
            return "an audit that sees the sums"
        if self._supply.source is not None:
            return "a noise source"
        if self._reduce is not None or self.shards is not None:
            return "several processes"
        if self.memory is not None:
            return "a mechanism that learns"
        if not (plan.direct or self.maps_in_update):
            return "a release that is mapped elsewhere, or without noise"
        if plan.importance is not None:
            return "a noise that is shaped by importance"
        if plan.noise_point != "per_batch":
            return "noise for each sample"
        return ""

    def begin_release(self) -> Streams | None:
        """Record the release of the current step and give law and streams of its noise away, once.

        The caller updates the parameters with it at once. Scales and places are the plan's.

        Raises:
            PrivacyError: a step with a ``release_obstacle``; nothing is released.
        """
        if why := self.release_obstacle:
            raise PrivacyError(
                "begin_release",
                expected="a step that a program can release",
                got=why,
                remedy="Call finish().",
            )
        self._begin([])
        return streams_of(self.plan, self.key, self.steps)

    def count_nonfinite(self, samples: Count) -> None:
        """Count samples of a step that was released already, which were dropped from its sums."""
        self._nonfinite = self._nonfinite + samples

    def drop(self) -> None:
        """Forget the samples of the unfinished step; nothing of them is released."""
        self._sums, self._raw, self._importance, self._added = None, None, None, 0
        self._unmapped = False

    @property
    def watched(self) -> bool:
        """Whether an audit sees the sums without noise; nothing is certified then."""
        return self._watcher is not None

    def watch(self, watcher: Watcher) -> None:
        """Show the sums of every step to an audit, before their noise.

        Raises:
            PrivacyError: a secret key: what it protects is certified.
        """
        if not self.key.seeded:
            raise PrivacyError(
                "watch",
                expected="a step with a known seed, which certifies nothing",
                got="a secret key",
                remedy="Pass unsafe_seed=: an audit sees sums without noise.",
            )
        self._watcher = watcher

    def set_importance(self, means: Sequence[torch.Tensor]) -> None:
        """Set the mean gradient that shapes the step's noise (``Importance.source`` "full").

        It is clipped and noised in ``finish``; nothing of it is kept or saved.

        Raises:
            InvalidInput: a mechanism that takes none, or tensors that do not fit the parameters.
        """
        check_importance(means, self.params, self.plan)
        self._importance = [mean.detach() for mean in means]

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
            DPKernError: whatever a noise source met with; nothing is released.
        """
        held = self.params if self.shards is None else list(self.shards.tensors)
        if updates is None and self._optimizer is not None:
            assert self.optimizer_state is not None
            updates = [(range(len(self.params)), self._optimizer, self.optimizer_state)]
        else:
            updates = check_updates(updates, held, self._optimizer)
        check_ready(self.plan, shards=self.shards is not None, importance=self._importance)
        with phase(NOISE):
            samples = self._samples()
        with phase(CLIP):
            sums = list(self._accumulators(0))
        draws = self._supply.take(self, samples)
        try:
            with phase(UPDATE):
                return self._finish(updates, held, sums, samples, draws)
        finally:
            self._supply.done()

    def _finish(
        self,
        updates: Updates,
        held: Sequence[torch.Tensor],
        sums: list[torch.Tensor],
        samples: int | None,
        draws: update.Draws | None,
    ) -> list[torch.Tensor | None] | None:
        """Release the step.

        ``draws`` must never have been used before; None draws from the step's own key streams.
        """
        unmapped = self._unmapped
        sums = self._begin(sums)
        offsets = None if self.shards is None else self.shards.offsets
        noise_now = noise_of(self.plan, self.key, self.steps, offsets, samples=samples, draws=draws)
        left = set(range(len(sums))).difference(*(indices for indices, _, _ in updates))
        maps = None
        if self.maps_in_update and noise_now is not None:
            maps = self.plan.pair_maps if unmapped else self.plan.pair_maps.only_back
            for i in left if unmapped else ():
                sums[i] = releasing.signal(sums[i], self.plan.blocks[i])
        elif unmapped:
            sums = releasing.signals(sums, self.plan)
        ready = self._gradients(sums, noise_now, left, mapped=maps is None)
        numbers: dict[str, Any] = {"scale": self.gradient_scale, "backend": self.backend}
        for group in updates:
            releasing.step_group(group, held, sums, ready, noise_now, maps, **numbers)
        if self._optimizer is not None:
            return None
        return [ready[i].to(p.dtype) if i in left else None for i, p in enumerate(self.params)]

    def _samples(self) -> int | None:
        """Return the samples of this step, where the noise depends on them.

        Raises:
            PrivacyError: another number than the plan was certified for; nothing is released.
        """
        if self.plan.noise_point == "per_batch":
            return None
        total = [torch.tensor([self._added], dtype=torch.int64, device=self.params[0].device)]
        if self._reduce is not None:
            self._reduce(total)
        samples = int(total[0])
        check_samples(samples, self.plan.samples)
        return samples if self.plan.noise_by_samples else None

    def _begin(self, sums: list[torch.Tensor]) -> list[torch.Tensor]:
        """Record the release of the current step; its sums are then those of all processes."""
        raw, means = self._raw, self._importance
        self.steps += 1
        # Recorded first: a release that fails half-way counts as one that happened.
        self._record()
        self.drop()
        if self._reduce is not None:
            self._reduce(sums)
        if self._watcher is not None:
            self._watcher.summed(sums)
        supply = self._supply
        made = self.plan.words if supply.source is None else supply.words(self.plan)
        for name, words in made.items():
            self.words[name] += words
        if self.plan.importance is not None:
            releasing.weigh(self, self.plan.importance, raw, means)
            sums = releasing.signals(sums, self.plan)
        return sums

    def _gradients(
        self,
        sums: Sequence[torch.Tensor],
        drawn: update.Noise | None,
        left: set[int],
        *,
        mapped: bool,
    ) -> dict[int, torch.Tensor]:
        """Return the noisy gradients for the caller and those beyond the fused update.

        ``mapped``: sums are in noised coordinates, which the update does not map by itself.
        """
        learns, direct = self.memory is not None, self.plan.direct
        if direct and not (learns or left):
            return {}

        def narrowed(i: int, gradient: torch.Tensor) -> torch.Tensor:
            # A model's mapped gradients in float64 would be twice its size.
            narrow = not learns and self.params[i].dtype is torch.float32
            return gradient.float() if narrow else gradient

        ready = {
            block.index: narrowed(
                block.index,
                releasing.gradient(
                    sums[block.index],
                    block,
                    drawn,
                    dtype=clip.sum_dtype(self.params[block.index].dtype),
                    exact=self.plan.arithmetic == "exact",
                    scale=self.gradient_scale,
                    backend=self.backend,
                ),
            )
            for block in self.plan.blocks
            if learns or block.index in left or (mapped and not (direct or block.fused))
        }
        if self.memory is not None:
            self.memory.to(self.params[0].device)
            with phase(LEARN):
                self._mechanism.learn(self.memory, list(ready.values()))
                self._replan()
        return ready

    def draw_as(self, sampling: str, sample_rate: float, dataset_size: int | None) -> None:
        """Draw batches otherwise from now on; earlier steps keep their entries in the ledger.

        Raises:
            InvalidInput: numbers out of range; nothing was changed.
        """
        before = self.sampling
        self.sampling = {
            "sampling": sampling,
            "sample_rate": sample_rate,
            "dataset_size": dataset_size,
        }
        try:
            self._record(count=0)  # checks the sampling arguments
        except InvalidInput:
            self.sampling = before
            raise

    def _record(self, count: int = 1) -> None:
        supply = self._supply
        covered = self.plan if supply.source is None else supply.covered(self.plan)
        self.ledger.record(covered, count=count, **self.sampling)

    def _planned(self, mechanism: Mechanism) -> Plan:
        return mechanism.plan([tuple(p.shape) for p in self.params], self.memory)

    def _replan(self) -> None:
        plan = self._planned(self.mechanism)
        releasing.check_same_event(self.plan, plan)
        self.plan = plan

    def taint(self, reason: str) -> None:
        """State that releases so far may not have been clipped and sampled as recorded.

        They are then certified for nothing, also after a checkpoint; nothing is changed where
        nothing was released.
        """
        if self.steps:
            self.ledger.taint(reason)

    def certify(self, delta: float) -> Certificate:
        """Return the certificate of all steps so far (``accounting.Certificate``)."""
        certificate = self.ledger.certify(delta)
        if self._watcher is None:
            return certificate
        return replace(certificate, notes=(WATCHED, *certificate.notes))

    def epsilon(self, delta: float) -> float:
        """Return the certified epsilon so far; infinite without noise or with a known seed."""
        return self.ledger.epsilon(delta)

    def epsilon_if_seed_secret(self, delta: float) -> float:
        """Return epsilon so far if the seed is secret."""
        return self.ledger.epsilon_if_seed_secret(delta)

    def report(self, delta: float) -> dict[str, Any]:
        """Return what was released and what is certified, as JSON values."""
        return step_report(self, delta)

    def provenance(self) -> dict[str, Any]:
        """Return where the noise came from: the source, and how its words were used."""
        return self._supply.provenance(self.words)

    @property
    def noise_warning(self) -> str:
        """The reason why the noise source protects nothing; empty where it does."""
        return self._supply.warning

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: counter, history, optimizer, memory; no key, no counts.

        Raises:
            PrivacyError: between ``add`` and ``finish``, where the state would hold sums without
                noise.
        """
        return state_of(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a saved run: its history stays, an unseeded run goes on with its fresh key.

        Raises:
            InvalidInput: a state of other parameters, another mechanism or another seed.
            PrivacyError: this DPStep has steps of its own, which the loaded history would forget.
        """
        load(self, state)

    def _accumulators(self, more: int) -> summing.Sums:
        """Return the sums so far, or zeros, wide enough for ``more`` samples."""
        samples, wide = self._added + more, self._reduce is not None
        return summing.accumulators(self._sums, self.params, self.plan, samples, wide=wide)

    def _join(self, result: clip.ClipResult, *, unmapped: bool = False) -> None:
        """Add sums to those of the step, both in the coordinates of one of them."""
        if self._sums is None:
            self._sums = summing.adopted(result.sums, self.params, self.plan)
            self._unmapped = unmapped
            return
        if unmapped and not self._unmapped:
            result = replace(result, sums=tuple(releasing.signals(result.sums, self.plan)))
        elif self._unmapped and not unmapped:
            self._map_sums()
        sums = self._accumulators(result.batch_size)
        for mine, theirs in zip(sums, result.sums, strict=True):
            mine.add_(theirs)
        self._sums = sums

    def _map_sums(self) -> None:
        """Map the sums so far to noised coordinates, which others will join."""
        if self._unmapped and self._sums is not None:
            self._sums = tuple(releasing.signals(self._sums, self.plan))
        self._unmapped = False

    def _taken_over(self, given: clip.ClipResult) -> clip.ClipResult:
        check_sum(given, self.params, self.plan)
        plan = self.plan
        if plan.arithmetic == "float" and self.maps_in_update:
            self._join(given, unmapped=True)
            return given
        if plan.mapped and plan.arithmetic == "float" and not plan.maps_late:
            given = replace(given, sums=tuple(releasing.signals(given.sums, plan)))
        self._join(given)
        return given

    def _clipped(self, per_sample: Sequence[torch.Tensor], released: bool) -> clip.ClipResult:
        plan = self.plan
        check_per_sample(per_sample, self.params, plan, released=released)
        if not released and (plan.mapped or plan.needs_raw):
            result = releasing.clipped(per_sample, plan, self.backend)
            self._join(result)
            return result
        if len({p.dtype for p in self.params}) > 1 or per_sample[0].dtype is torch.float16:
            alike = summing.common_dtype(per_sample)
            result = summing.clipped(alike, plan, None, self.backend)
            self._join(replace(result, sums=summing.adopted(result.sums, self.params, plan)))
            return result
        self._map_sums()
        out = self._accumulators(int(per_sample[0].shape[0]))
        result = summing.clipped(per_sample, plan, out, self.backend)
        self._sums = out
        return result

"""Prune gradients: release a share of the coordinates, remember the rest.

    published    p = mean_i clip_2(g_i + e)             out = prune(p) + noise where it kept
                 e = p - prune(p)
    corrected    y = sum_i clip_2(g_i[mask]) + noise    p = y / L + e
                 out = prune(p), e = p - out

``prune`` keeps the ``1 - ratio`` share of a parameter's coordinates that is largest in magnitude.
Published, these are chosen from the samples without noise, so which ones are released tells about
them: nothing is certified, and e, which holds unreleased numbers, is never saved. Corrected, the
mask is fixed before the step by noisy outputs or public coins, only its coordinates are clipped and
released, and e is made of released values: the wrapped mechanism's event holds.

Reference: directional noise for DP-SGD, section on pruning with error feedback.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from ...base.errors import InvalidInput
from ...base.rng import Key, Purpose
from ...base.validate import choice, half_open_unit, integer, positive
from ...ops import noise
from ..accounting import events
from ..accounting.events import EventSpec
from ..accounting.history import NOTHING
from ._pruned_release import SubsetMap, TopKMap, largest
from .base import Mechanism
from .dpsgd import DPSGD
from .examples import UNIT, Audit, Example
from .memory import MechanismState
from .notes import Note, notes
from .plan import Block, Plan, assign_positions
from .release import DiagonalMap, ReleaseMap
from .run_facts import RunFacts
from .work import OpAccount

MASKS = ("published", "previous", "random")
_OWN = frozenset({"error", "mask", "step"})
"""Names of a pruned release's own memory."""

_INNER = DPSGD(**UNIT)
_UNIT = {"inner": _INNER, "expected_batch_size": 1.0}


@dataclass(frozen=True, kw_only=True)
class Pruned(Mechanism):
    """A mechanism of which each step releases a share of the coordinates.

    Args:
        inner: what clips and noises: ``DPSGD``, or ``Directional`` with isotropic noise; with the
            printed mask ``Directional`` of any shape, whose noise goes to the kept coordinates.
        expected_batch_size: public number of samples of a step, which sums are divided by.
        ratio: share of each parameter's coordinates that is not released, in [0, 1).
        mask: ``published``: the largest of the clipped sum; ``previous``: the largest of the last
            noisy gradient, all of them in every ``refresh``-th step; ``random``: public coins.
        feedback: add what was left out to the next step.
        refresh: for ``previous``: how often everything is released.
        seed: of the public coins.
        noise_multiplier: replaces the inner one. None keeps that.
        max_grad_norm: replaces the inner one. None keeps that.

    Raises:
        InvalidInput: a field out of its range.
    """

    inner: Mechanism
    expected_batch_size: float
    ratio: float = 0.9
    mask: str = "previous"
    feedback: bool = True
    refresh: int = 10
    seed: int = 0
    noise_multiplier: float = None  # type: ignore[assignment]
    max_grad_norm: Any = None

    name: ClassVar[str] = "pruned"
    title: ClassVar[str] = "Pruned"
    source: ClassVar[str] = "directional noise for DP-SGD"
    examples: ClassVar[tuple[Example, ...]] = (
        Example(_UNIT),
        Example({**_UNIT, "mask": "random"}, "-random", " at random"),
        Example({**_UNIT, "mask": "published"}, "-published", " as published"),
    )
    audits: ClassVar[tuple[Audit, ...]] = (
        Audit(fields={"inner": _INNER, "ratio": 0.5}, published={"mask": "published"}),
    )
    derived: ClassVar[tuple[str, ...]] = ("inner",)

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Mechanism) or isinstance(self.inner, Pruned):
            raise InvalidInput(
                "inner",
                expected="a mechanism that is not pruned itself",
                got=type(self.inner).__name__,
                remedy="Wrap DPSGD(...).",
            )
        choice(MASKS, mask=self.mask)
        half_open_unit(ratio=self.ratio)
        positive(expected_batch_size=self.expected_batch_size)
        integer(1, refresh=self.refresh)
        integer(seed=self.seed)
        given = {"noise_multiplier": self.noise_multiplier, "max_grad_norm": self.max_grad_norm}
        changed = {name: value for name, value in given.items() if value is not None}
        inner: Any = replace(self.inner, **changed) if changed else self.inner  # type: ignore[type-var]
        object.__setattr__(self, "inner", inner)
        for name in given:
            object.__setattr__(self, name, getattr(inner, name))

    @property
    def mode(self) -> str:  # type: ignore[override]
        """``published`` if the mask or the wrapped mechanism is."""
        return "published" if self.mask == "published" else self.inner.mode

    @property
    def neighbouring(self) -> str:  # type: ignore[override]
        """The relation of the wrapped mechanism."""
        return self.inner.neighbouring

    @property
    def samples(self) -> int | None:
        """Number of samples that every step must have, if the wrapped mechanism says so."""
        samples: int | None = getattr(self.inner, "samples", None)
        return samples

    @property
    def clipping(self) -> str:
        """The clipping of the wrapped mechanism."""
        return str(getattr(self.inner, "clipping", "flat"))

    @property
    def certified_for(self) -> str:
        """``nothing`` with the printed mask, else what holds for the wrapped mechanism."""
        return NOTHING if self.mask == "published" else self.inner.certified_for

    @property
    def notes(self) -> tuple[Note, ...]:
        """The notes of the wrapped mechanism, and D5 with the printed mask."""
        return self.inner.notes + (notes("D5") if self.mask == "published" else ())

    @property
    def unsampled(self) -> EventSpec:
        """The event of the wrapped mechanism."""
        return self.inner.unsampled

    def event_spec(self, dimension: int | None = None) -> EventSpec:
        """Return the wrapped event, which fewer coordinates do not change; none as printed."""
        return events.non_private() if self._leaks else self.inner.event_spec(dimension)

    def claimed_event_spec(self, dimension: int | None = None) -> EventSpec:
        """Return the claim of the wrapped mechanism."""
        return self.inner.claimed_event_spec(dimension)

    def claim(
        self, *, steps: int, sample_rate: float, delta: float, dataset_size: int | None
    ) -> float | None:
        """Return the claim of the wrapped mechanism."""
        return self.inner.claim(
            steps=steps, sample_rate=sample_rate, delta=delta, dataset_size=dataset_size
        )

    @property
    def claim_text(self) -> str:
        """The claim of the wrapped mechanism."""
        return self.inner.claim_text if self.mode == self.inner.mode else super().claim_text

    def memory(self, params: Sequence[torch.Tensor]) -> MechanismState:
        """Return the memory: what was left out, the next mask, and the number of steps.

        The wrapped mechanism's own stands beside it.
        """
        inner = self.inner.memory(params)
        return MechanismState(
            {
                **({} if inner is None else inner.tensors),
                "error": [torch.zeros_like(p, dtype=torch.float64) for p in params],
                "mask": [torch.ones_like(p, dtype=torch.bool) for p in params],
                "step": [torch.zeros((), dtype=torch.int64)],
            },
            unsaved=frozenset({"error"} if self._leaks else ())
            | (frozenset() if inner is None else inner.unsaved),
        )

    def weigh(self, memory: MechanismState, importance: Sequence[torch.Tensor]) -> None:
        """Let the wrapped mechanism take over the released importance."""
        self.inner.weigh(memory, importance)

    def realised(self, memory: MechanismState | None) -> dict[str, float]:
        """Return the numbers of the wrapped mechanism, over all coordinates."""
        return self.inner.realised(memory)

    def learn(self, memory: MechanismState, gradients: Sequence[torch.Tensor]) -> None:
        """Choose the next mask and, but for the printed form, put the feedback into the update."""
        memory["step"][0] += 1
        if self._leaks:
            # A wrapped mechanism that does not adapt has no memory to learn into.
            if memory.tensors.keys() - _OWN:
                self.inner.learn(memory, gradients)
            return
        everything = int(memory["step"][0]) % self.refresh == 0
        held = zip(gradients, memory["mask"], memory["error"], strict=True)
        for gradient, mask, error in held:
            count = self._count(gradient.numel())
            if self.mask == "previous":
                mask.fill_(everything)
                mask.view(-1)[largest(gradient.flatten().double(), count)] = True
            if self.feedback:
                whole = gradient.double() + error
                kept = torch.zeros_like(whole)
                places = largest(whole.flatten(), count)
                kept.view(-1)[places] = whole.flatten()[places]
                error.copy_(whole - kept)
                gradient.copy_(kept)

    def plan(self, shapes: Sequence[Sequence[int]], memory: MechanismState | None = None) -> Plan:
        """Return the wrapped mechanism's plan on the coordinates that this step releases.

        Raises:
            InvalidInput: bad shapes, or a wrapped mechanism with release coordinates of its own.
        """
        inner = self.inner.plan(shapes) if memory is None else self.inner.plan(shapes, memory)
        if not all(self._can_wrap(block.release) for block in inner.blocks):
            raise InvalidInput(
                "inner",
                expected="a mechanism that releases gradients as they are",
                got=type(self.inner).__name__,
                remedy="Wrap DPSGD(...), or Directional(...) with isotropic noise.",
            )
        if memory is None:
            memory = self.memory([torch.empty(block.shape) for block in inner.blocks])
        blocks = assign_positions(
            replace(b, release=self._release(b, memory)) for b in inner.blocks
        )
        return replace(
            inner,
            mechanism=self.name,
            mode=self.mode,
            blocks=blocks,
            arithmetic="float" if self._leaks else inner.arithmetic,
            certified_for=self.certified_for,
            spec=events.non_private() if self._leaks else inner.spec,
            notes=self.notes,
        )

    @classmethod
    def fields_of_run(cls, run: RunFacts, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return DP-SGD inside; the printed mask in published mode, unless another one is named.

        Raises:
            InvalidInput: the printed mask in corrected mode.
        """
        published = given["mode"] == "published"
        mask = given.get("mask", "published" if published else "previous")
        if mask == "published" and not published:
            raise InvalidInput(
                "mask",
                expected="previous or random in corrected mode",
                got=mask,
                remedy="Pass --mode published: a mask chosen from the samples leaks.",
            )
        shared = {name: given[name] for name in ("noise_multiplier", "max_grad_norm", "mode")}
        return {"inner": DPSGD(**shared), "mask": mask, **super().fields_of_run(run, given)}

    @property
    def noise_moves(self) -> bool:
        """Whether noise moves: the mask ``previous`` releases everything now and then."""
        return self.mask == "previous"

    def plan_at(self, plan: Plan, step: int) -> Plan:
        """Return a plan of as many kept coordinates as the step releases."""
        blocks = []
        for block in plan.blocks:
            release = block.release
            if isinstance(release, SubsetMap):
                count = self._kept_at(math.prod(block.shape), step)
                release = replace(release, places=torch.empty(count, device="meta"))
            blocks.append(replace(block, release=release))
        return replace(plan, blocks=assign_positions(blocks))

    def _kept_at(self, size: int, step: int) -> int:
        """Return how many of so many coordinates step ``step`` (from 1) releases."""
        everything = self.mask == "previous" and (step - 1) % self.refresh == 0
        return size if everything else self._count(size)

    def count_learning(self, work: OpAccount, sizes: Sequence[int]) -> None:
        """Count the next mask and what the update leaves for later."""
        work.counts("number of the step", ADD=1, LOAD=1, STORE=1)
        if self._leaks:
            return
        work.read_out("number of the step")
        for n in sizes:
            k = self._count(n)
            if self.mask == "previous":
                work.filled("next mask", n)
                work.largest("next mask", n, k)
                work.scattered("next mask", k, 1)
            if self.feedback:
                work.each("error feedback", n, reads=2, ADD=1)
                work.filled("error feedback", n)
                work.largest("error feedback", n, k)
                work.gathered("error feedback", k)
                work.scattered("error feedback", k, k)
                work.each("error feedback", n, reads=2, SUB=1)
                for _ in ("error", "update"):
                    work.each("error feedback", n)

    def count_plan(self, work: OpAccount, sizes: Sequence[int], step: int) -> None:
        """Count the places of the next step, and the shape of printed noise."""
        if self._leaks and self.inner.plan([(1,)]).importance is not None:
            self.inner.count_plan(work, sizes, step)
        for n in sizes:
            if self._leaks and self.feedback:
                work.each("error feedback", n, SUB=1)
            elif self.mask == "previous":
                work.counts("next mask", LOAD=n, CMP=n, STORE=self._kept_at(n, step + 1))
            elif self.mask == "random":
                work.read_out("number of the step")
                coins = Key.from_unsafe_seed(0).stream(Purpose.SYMBOLS, 1)
                work.op("noise.keystream", coins, first_block=0, blocks=-(-n // 16))
                work.chosen("next mask", n, self._count(n))

    def _can_wrap(self, release: ReleaseMap | None) -> bool:
        """Whether coordinates of such a release can be left out: all of them as they are.

        The printed mask is chosen before noise, so noise of any shape may go to what it keeps.
        """
        if release is None:
            return True
        shaped = isinstance(release, DiagonalMap) and release.centre is None
        return self._leaks and shaped and release.norm == "gradient"

    @property
    def _leaks(self) -> bool:
        return self.mask == "published"

    def _count(self, size: int) -> int:
        return min(size, max(1, round((1 - self.ratio) * size)))

    def _release(self, block: Block, memory: MechanismState) -> ReleaseMap:
        count = self._count(math.prod(block.shape))
        if self._leaks:
            error = memory["error"][block.index] if self.feedback else None
            shaped = block.release
            return TopKMap(
                scale=shaped.scale if isinstance(shaped, DiagonalMap) else None,
                norm="release" if shaped is None else shaped.norm,
                centre=None if error is None else -error,
                count=count,
                error=error,
                batch=self.expected_batch_size,
            )
        mask = memory["mask"][block.index].flatten()
        if self.mask == "random":
            coins = Key.from_unsafe_seed(self.seed).stream(
                Purpose.SYMBOLS, int(memory["step"][0]), block.index
            )
            words = noise.keystream(coins, first_block=0, blocks=-(-mask.numel() // 16))
            places = words[: mask.numel()].topk(count).indices.sort().values
            return SubsetMap(places=places, parameter=block.shape)
        return SubsetMap(places=mask.nonzero().flatten(), parameter=block.shape)

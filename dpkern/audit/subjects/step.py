"""Audit a private step: ``DPStep`` with a mechanism, run after run, steps concatenated.

The canary is a record that is far above every bound, so that clipping puts it exactly where a
record does most; clip groups are at their bounds together. A mechanism that remembers nothing goes
on with one ``DPStep``, as training does; one that adapts begins anew in every run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...base.errors import InvalidInput
from ...base.laws import SCALE_CELLS
from ...base.validate import choice, integer
from ...ops import update
from ...privacy.accounting import events
from ...privacy.mechanisms.base import Mechanism
from ...privacy.mechanisms.plan import Block, Plan
from ...step.step import DPStep
from ...step.sums import clipped
from .. import bits, canaries, certified, claims, likelihood, sensitivity
from ..claims import Claim
from ..findings import Check
from ..subject import Pair, Subject
from . import batches
from .backend import check_backend, named, running

RELATIONS = ("add_remove", "zero_out", "replace_one")
"""Neighbours differ by one more record, by one of zero gradient, or by one of opposite gradient."""

FAR = 2.0**10
"""Norm of a canary's gradient over its bound, before clipping."""

BATCH = 4.0
"""Public expected batch size, a power of two."""

LOOKED_AT = 200
"""Runs whose bits are examined."""

Batch = tuple[Tensor, ...]
"""Per-sample gradients ``[B, *shape]`` of every parameter; B = 0 is an empty batch."""


@dataclass(frozen=True, kw_only=True)
class PrivateStep(Subject):
    """Steps of a ``DPStep``, with a record that takes part in each of them.

    Args:
        mechanism: its configuration.
        shapes: shapes of the parameters.
        steps: released together, noise fresh in each.
        backend: name of the backend, emulated where its device is missing. None selects the first
            one that supports the call; see ``dpkern info``.
        fused: read the gradient off an SGD update, which makes the noise in registers.
        dtype: dtype of the parameters.
        relation: neighbouring relation. None selects that of the mechanism's event; a fixed number
            of samples is kept by a gradient of zero for the missing record.

    Raises:
        InvalidInput: a field out of its range, or samples that only the engine can clip.
    """

    usual_runs: ClassVar[int] = 5_000

    mechanism: Mechanism
    shapes: tuple[tuple[int, ...], ...] = ((8,),)
    steps: int = 1
    backend: str | None = None
    fused: bool = False
    dtype: torch.dtype = torch.float32
    relation: str | None = None
    name: str = field(init=False)
    claimed: Claim = field(init=False)
    certified: Claim = field(init=False)

    def __post_init__(self) -> None:
        integer(1, steps=self.steps)
        check_backend(self.backend)
        choice((None, *RELATIONS), relation=self.relation)
        if self._operands:
            raise InvalidInput(
                "mechanism",
                expected="one that clips gradients, or coordinates that it releases",
                got="a bound on spectra, which only the engine can take",
                remedy="Audit a model with dpkern.audit.subjects.model, or a circulant layer.",
            )
        proved = claims.of_event(
            events.composed([self.plan.spec, self.plan.unsampled]),
            neighbouring="replace_one" if self._relation == "replace_one" else "add_remove",
            steps=self.steps,
        )
        made = {"claimed": self._claim(proved), "certified": proved, "name": self._name()}
        for each, value in made.items():
            object.__setattr__(self, each, value)

    def _name(self) -> str:
        parts = [self.mechanism.name, self.mechanism.mode, self.plan.arithmetic]
        parts += [f"{self.steps} steps"] if self.steps > 1 else []
        parts += ["update"] if self.fused else []
        return ", ".join([*parts, named(self.backend)])

    def _claim(self, proved: Claim) -> Claim:
        """Return the paper's claim for so many releases of the record; corrected: our own."""
        if self.mechanism.mode == "corrected":
            return proved
        one = self.mechanism.claimed_event_spec(self.plan.dimension)
        relation = "replace_one" if self._relation == "replace_one" else "add_remove"
        return claims.of_event(one, neighbouring=relation, steps=self.steps)

    @cached_property
    def plan(self) -> Plan:
        """The plan of the first step."""
        return self.mechanism.plan(self.shapes)

    @property
    def _relation(self) -> str:
        if self.relation is not None:
            return self.relation
        if self.plan.neighbouring == "replace_one":
            return "replace_one"
        return "add_remove" if self.plan.samples is None else "zero_out"

    @property
    def _operands(self) -> bool:
        """Whether norm or release coordinates need more than a gradient or its released part."""
        releases = [block.release for block in self.plan.blocks if block.release is not None]
        return any(each.needs_operands and each.norm != "release" for each in releases)

    @property
    def _released(self) -> bool:
        """Whether samples come as release coordinates, because a gradient is not enough."""
        releases = [block.release for block in self.plan.blocks if block.release is not None]
        return any(each.needs_operands for each in releases)

    @property
    def _sample_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of one sample, by parameter."""
        return [b.release_shape if self._released else b.shape for b in self.plan.blocks]

    def release(self, data: Sequence[Batch], runs: int, seed: int) -> Tensor:
        """Return ``[runs, steps d]``: the noisy mean gradients, flat, one step after another."""
        del seed  # keys are the operating system's
        size = sum(_sizes(self.shapes))
        out = torch.empty(runs, self.steps, size, dtype=self.dtype)
        with running(self.backend):
            step = self._step()
            for run in range(runs):
                if run and step.memory is not None:
                    step = self._step()
                for number, batch in enumerate(data):
                    self._one(step, batch, out[run, number])
        return out.flatten(1)

    @property
    def _fixed(self) -> bool:
        """Whether every batch has the same number of samples."""
        return self.plan.samples is not None or self.plan.neighbouring == "replace_one"

    def _step(self) -> DPStep:
        sampling: dict[str, Any] = {"sample_rate": 1.0}
        if self._fixed:
            samples = self.plan.samples or 1
            sampling = {"sampling": "fixed", "sample_rate": 1.0, "dataset_size": samples}
        return DPStep(
            self.mechanism,
            [torch.zeros(shape, dtype=self.dtype) for shape in self.shapes],
            expected_batch_size=BATCH,
            optimizer=update.SGD(lr=1.0) if self.fused else None,
            backend=self.backend,
            **sampling,
        )

    def _one(self, step: DPStep, batch: Batch, out: Tensor) -> None:
        """Write one release to ``out [d]``."""
        if self.plan.importance is not None and self.plan.importance.source == "full":
            step.set_importance([each.double().sum(0) / BATCH for each in batch])
        if len(batch[0]):
            step.add(batch, released=self._released)
        if not self.fused:
            gradients = step.finish()
            assert gradients is not None
            torch.cat([g.flatten() for g in gradients if g is not None], out=out)
            return
        for param in step.params:
            param.zero_()
        step.finish()
        torch.cat([param.flatten() for param in step.params], out=out)
        out.neg_()

    def noise_sd(self) -> Tensor | None:
        """Return the certified noise scales if Gaussian noise is on every gradient entry."""
        plan = self.plan
        once = self.steps == 1 or self.mechanism.memory([]) is None
        if not (plan.private and plan.distribution == "gaussian" and once):
            return None
        return None if plan.importance is not None else self._scales()

    def _scales(self) -> Tensor | None:
        """Return the noise scale of every gradient entry; None if entries mix."""
        found = []
        for block in self.plan.blocks:
            ones = torch.ones(block.shape, dtype=torch.float64)
            scales = ones if block.release is None else block.release.entry_scales(block.shape)
            if scales is None:
                return None
            found.append(block.noise_scale * scales.flatten())
        return torch.cat(found).repeat(self.steps) / BATCH

    def checks(self, *, quick: bool) -> Sequence[Check]:
        """Check the plan's numbers, bits of released numbers, batches, adversarial records."""
        found = [*certified.of_plan(self.plan)]
        if not quick:
            found += batches.checks(fixed=self._fixed)
        if self._on_a_lattice:
            cells = torch.cat(
                [_each(b, b.noise_scale / SCALE_CELLS / BATCH) for b in self.plan.blocks]
            )
            released = self.release(self.null(), LOOKED_AT, 0)
            found.append(bits.lattice(released, cells.repeat(self.steps)))
        # Records of any width: where the plan speaks of given layers there is no such plan.
        anywhere = getattr(self.mechanism, "sites", None) is None
        if anywhere and self._on_a_lattice and self.plan.clipping in ("flat", "automatic"):
            found += sensitivity.checks(self._summation(), quick=quick)
        return found

    @property
    def _on_a_lattice(self) -> bool:
        """Whether every entry is a multiple of its noise's cell, the same in every run."""
        return self.plan.private and not self.plan.mapped

    def _summation(self) -> sensitivity.Summation:
        """Return the clipping of records ``[B, d]`` of one parameter, by the step's functions."""
        block = self.plan.blocks[0]
        return sensitivity.Summation(
            summed=self._summed,
            bound=block.bound,
            p=self.plan.p,
            unit=block.unit if self.plan.arithmetic == "exact" else None,
            dtype=self.dtype,
        )

    def _summed(self, records: Tensor) -> Tensor:
        plan = self.mechanism.plan([(records.shape[1],)])
        with running(self.backend):
            return clipped([records], plan, None, self.backend).sums[0]

    def null(self) -> tuple[Batch, ...]:
        """Return the batches of bystanders alone."""
        return self._data(self._bystanders())

    def pairs(self, weakest: Tensor | None) -> Sequence[Pair]:
        """Return pairs with a record at all groups' bounds, the same in every step or weakest."""
        size = sum(_sizes(self._sample_shapes))
        # A record that comes alone shows noise that depends on how many there are.
        alone = {"coordinate"} if self._relation == "add_remove" else set()
        found = [
            self._pair(
                name,
                direction.expand(self.steps, size),
                None if name in alone else self._bystanders(),
            )
            for name, direction in canaries.directions(size).items()
            if name != "alternating"
        ]
        if any(block.mapped for block in self.plan.blocks):
            found.append(self._pair("strongest", self._strongest(), self._bystanders()))
        if weakest is not None:
            found.append(self._pair("weakest", self._led_back(weakest), self._bystanders()))
        if self.plan.importance is not None:
            found.append(self._shaped())
        return found

    def _pair(self, name: str, directions: Tensor, others: list[Tensor] | None) -> Pair:
        """Build the pair of a canary whose gradient points along ``directions [steps, d]``."""
        steps = [self._at_bounds(direction) for direction in directions]
        canary = [[FAR * part for part in parts] for parts in steps]
        zero = [[torch.zeros_like(part) for part in parts] for parts in steps]
        opposite = [[-part for part in parts] for parts in canary]
        missing = {"add_remove": None, "zero_out": zero, "replace_one": opposite}[self._relation]
        without, present = self._data(others, missing), self._data(others, canary)
        scale = self._scales()
        if self.plan.distribution != "laplace" or self.plan.mapped or scale is None:
            return Pair(name=name, without=without, present=present)
        # Bystanders are within their bounds, so their sum cancels in the ratio's two distances.
        moved = torch.stack([torch.cat([part.flatten() for part in parts]) for parts in steps])
        rest = 0.0 if others is None else torch.cat([part.flatten() for part in others])
        here = (rest + moved).flatten() / BATCH
        there = (rest - (moved if self._relation == "replace_one" else 0 * moved)).flatten() / BATCH
        score = likelihood.LaplaceRatio(there, here, scale)
        return Pair(name=name, without=without, present=present, score=score, layer="likelihood")

    def _shaped(self) -> Pair:
        """Build a pair: bystanders make one coordinate important, and a canary moves another."""
        size = sum(_sizes(self._sample_shapes))
        important = [FAR * part for part in self._split(torch.eye(1, size)[0].double())]
        canary = [self._at_bounds(torch.eye(1, size)[0].roll(-1))] * self.steps
        return Pair(
            name="shaped noise",
            without=self._data(important),
            present=self._data(important, canary),
        )

    def _data(
        self, others: list[Tensor] | None, record: Sequence[Sequence[Tensor]] | None = None
    ) -> tuple[Batch, ...]:
        """Return the batch of every step: bystanders, then the record's gradient in that step."""
        count = self._samples_beside if others is not None else 0
        drawn = []
        for number in range(self.steps):
            rows = [] if others is None else [others] * count
            rows = rows if record is None else [*rows, list(record[number])]
            drawn.append(
                tuple(
                    torch.stack([row[i] for row in rows]).to(self.dtype)
                    if rows
                    else torch.zeros(0, *shape, dtype=self.dtype)
                    for i, shape in enumerate(self._sample_shapes)
                )
            )
        return tuple(drawn)

    @property
    def _samples_beside(self) -> int:
        """The number of bystanders in every batch."""
        if self.plan.samples is not None:
            return self.plan.samples - 1
        return 0 if self.plan.neighbouring == "replace_one" else 1

    def _bystanders(self) -> list[Tensor]:
        """Return a gradient below all bounds."""
        size = sum(_sizes(self._sample_shapes))
        drawn = canaries.directions(size, seed=1)["random" if size > 1 else "coordinate"]
        return [part / 4 for part in self._at_bounds(drawn)]

    def _at_bounds(self, direction: Tensor) -> list[Tensor]:
        """Scale every clip group to its bound, in the norm of the bounds; without bound to 1."""
        parts = self._split(direction.double())
        for group, bound in zip(self.plan.groups, self.plan.group_bounds, strict=True):
            flat = torch.cat([parts[i].flatten() for i in group])
            if not flat.any():
                flat = torch.ones_like(flat)
            flat = flat * ((bound if math.isfinite(bound) else 1.0) / flat.norm(self.plan.p))
            pieces = torch.split(flat, [parts[i].numel() for i in group])
            for i, piece in zip(group, pieces, strict=True):
                parts[i] = piece.view(parts[i].shape)
        return parts

    def _split(self, flat: Tensor) -> list[Tensor]:
        shapes = self._sample_shapes
        parts = torch.split(flat, _sizes(shapes))
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _strongest(self) -> Tensor:
        """Return the gradient of norm 1 that is longest in each block's release coordinates."""
        parts = []
        for block, shape in zip(self.plan.blocks, self._sample_shapes, strict=True):
            size = torch.Size(shape).numel()
            basis = torch.eye(size, dtype=torch.float64)
            if block.release is not None and not self._released:
                basis = block.release.forward(basis.view(size, *shape)).reshape(size, -1)
            parts.append(torch.linalg.svd(basis)[0][:, 0])
        return torch.cat(parts).expand(self.steps, -1)

    def _led_back(self, weakest: Tensor) -> Tensor:
        """Map gradients ``[steps d]`` to directions of the samples, ``[steps, d']``."""
        steps = weakest.double().view(self.steps, -1)
        if not self._released:
            return steps
        return torch.stack([self._adjoint(direction) for direction in steps])

    def _adjoint(self, direction: Tensor) -> Tensor:
        """Apply ``back^T`` of every block."""
        found = []
        parts = torch.split(direction, _sizes(self.shapes))
        for block, part in zip(self.plan.blocks, parts, strict=True):
            if block.release is None:
                found.append(part)
                continue
            size = torch.Size(block.release_shape).numel()
            basis = torch.eye(size, dtype=torch.float64)
            rows = [
                block.release.to_gradient(row.view(block.release_shape)).flatten() for row in basis
            ]
            found.append(torch.stack(rows) @ part)
        return torch.cat(found)


def _sizes(shapes: Sequence[tuple[int, ...]]) -> list[int]:
    return [torch.Size(shape).numel() for shape in shapes]


def _each(block: Block, value: float) -> Tensor:
    """Return one number for every entry."""
    return torch.full((block.size,), value, dtype=torch.float64)

"""Audit a whole step of ``PrivacyEngine`` on a user's model, with and without one record.

Every run is a step as a training loop takes it: forward pass, backward pass, clipping, noise and
the fused update of SGD with learning rate 1. The release is the step's change of the parameters,
which are then restored. Only these numbers of a release are kept, each with noise of certified
standard deviation 1 (Laplace noise: sqrt(2)):

    z_j = <v_j / s_j, y_j / s_j> / ||v_j / s_j||     for parts j that the canary reaches
    z_i = y_i / s_i                                  for some single coordinates i, left out of v

``y`` is the noisy sum that the update shows, ``s`` the certified scale of its noise, and ``v`` the
difference that the canary makes to the sum without noise; a part is a parameter, or several that
follow each other where there are more than 64. The numbers are orthonormal in whitened coordinates
and hold all of the canary's signal, so the best linear test of ``y`` is one of ``z``.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from ...base.errors import DPKernError, InvalidInput
from ...base.threads import torch_threads
from ...engine import PrivacyEngine
from ...engine.capture import Capture
from ...engine.clipping import close_into, prepare
from ...privacy.mechanisms.base import Mechanism
from ...privacy.mechanisms.plan import Plan
from ...step.step import DPStep
from ..claims import Claim, of_event
from ..findings import Check
from ..scores import LinearScore
from ..subject import Pair, Subject
from .model_invariance import batch_invariance

Batch = tuple[Tensor, Tensor]
"""Inputs and targets, the samples along the first dimension."""

Loss = Callable[[Tensor, Tensor], Tensor]
"""A function from the model's outputs and the targets to the loss over all samples of the batch."""

PARTS = 64
"""Maximum of the parts of the canary's direction that are read apart."""

NEIGHBOURS = 4
"""Single coordinates are read in runs of so many, where a repeated lane would show."""


@dataclass(frozen=True, kw_only=True)
class ModelStep(Subject):
    """One step of an engine on a batch, or on the batch and a canary.

    Attributes:
        module: the model, as ``make_private`` takes it; it is copied. With layers that draw random
            numbers the releases vary more, which no certificate counts on.
        loss: picklable function of outputs and targets, such as ``torch.nn.CrossEntropyLoss()``.
        loss_reduction: ``mean`` or ``sum``, as the loss treats the samples.
        batch: the records of D.
        canary: one more record, that D does not hold.
        mechanism: mechanism with a plan that noises gradients as they are and does not adapt.
        magnified: the loss is multiplied by this, so that gradients reach their bounds.
        coordinates: single coordinates that are read besides.
        backend: name of the backend. None selects the first one that supports the call; see
            ``dpkern info``.
        claim: claim about one step. None selects the claim of the mechanism's paper.
        label: a name for reports.

    Raises:
        InvalidInput: tensors that are no such records, a mechanism that adapts or maps gradients.
        DPKernError: whatever ``make_private`` refuses.
    """

    module: nn.Module
    loss: Loss
    batch: Batch
    canary: Batch
    mechanism: Mechanism
    loss_reduction: str = "mean"
    magnified: float = 1.0
    coordinates: int = 16
    backend: str | None = None
    claim: Claim | None = None
    label: str = "model"

    def __post_init__(self) -> None:
        (x, y), (record, target) = self.batch, self.canary
        alike = record.shape[1:] == x.shape[1:] and target.shape[1:] == y.shape[1:]
        if not alike or len(x) != len(y) or not len(record) == len(target) == 1:
            raise InvalidInput(
                "canary",
                expected=f"one record of shape {list(x.shape[1:])}, like {len(x)} records with "
                f"{len(x)} targets",
                got=f"inputs {list(record.shape)} and targets {list(target.shape)} for a batch of "
                f"{list(x.shape)} and {list(y.shape)}",
                remedy="Pass batch=(x, y) and canary=(x[:1], y[:1]) with a batch dimension.",
            )
        if not direct(self.mechanism, self.module):
            raise InvalidInput(
                "mechanism",
                expected="one that noises gradients as they are and does not adapt",
                got=self.mechanism.name,
                remedy="Audit its step on tensors: dpkern.audit.subjects.step.PrivateStep.",
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields alone: engines and keys stay in their process."""
        return {name: self.__dict__[name] for name in self.__dataclass_fields__}

    @property
    def name(self) -> str:  # type: ignore[override]
        """The model, the mechanism and its groups."""
        plan = self._rig.plan
        return f"{self.label}, {plan.mechanism} {plan.mode}, {plan.clipping}, {plan.arithmetic}"

    @property
    def claimed(self) -> Claim:  # type: ignore[override]
        """The claim about one step."""
        if self.claim is not None:
            return self.claim
        return self._of(self.mechanism.claimed_event_spec(self._rig.plan.dimension))

    @property
    def certified(self) -> Claim:  # type: ignore[override]
        """The claim that the plan's event proves for one step."""
        return self._of(self._rig.plan.spec)

    def _of(self, spec: dict[str, Any]) -> Claim:
        return of_event(spec, neighbouring=self.mechanism.neighbouring)

    @cached_property
    def _rig(self) -> _EngineHarness:
        return _EngineHarness(self)

    def release(self, data: bool, runs: int, seed: int) -> Tensor:
        """Return ``[runs, d]`` float64 readings of as many steps; ``data`` adds the canary.

        The noise's key is the operating system's, whatever ``seed`` is. One thread works: more
        cores are for more processes.
        """
        del seed
        with torch_threads(1):
            return torch.stack([self._rig.step(data) for _ in range(runs)])

    def pairs(self, weakest: Tensor | None) -> Sequence[Pair]:
        """Return the pair of the batch, and the batch with the canary."""
        del weakest
        score = LinearScore(self._rig.shift, name="along the canary")
        return (Pair(name="canary", without=False, present=True, score=score),)

    def noise_sd(self) -> float | None:
        """Return 1 for Gaussian noise on every coordinate, else None."""
        plan = self._rig.plan
        everywhere = plan.distribution == "gaussian" and all(s > 0 for s in plan.scales)
        return 1.0 if everywhere else None

    def checks(self, *, quick: bool) -> Sequence[Check]:
        """Check the canary's contribution against its bound: alone, as a difference, twice.

        Of exact sums also whether gradients depend on their records alone.
        """
        del quick
        rig = self._rig
        found = (within_bound(rig.plan, rig.alone), rig.remove_one(), rig.given_twice())
        return (*found, rig.invariance) if rig.plan.arithmetic == "exact" else found


class _EngineHarness:
    """One engine in one process, and the readings of its releases."""

    def __init__(self, subject: ModelStep) -> None:
        x, y = subject.batch
        canary, target = subject.canary
        self.batches = {False: (x, y), True: (torch.cat([x, canary]), torch.cat([y, target]))}
        self.module = copy.deepcopy(subject.module)
        self.loss = subject.loss
        self.magnified = subject.magnified
        reduction = subject.loss_reduction
        sums = partial(
            sums_without_noise, subject.mechanism, self.module, reduction, subject.backend
        )
        with_canary = sums(self._backward, self.batches[True])
        self.without = sums(self._backward, self.batches[False])
        self.alone = sums(self._backward, subject.canary)
        self.twice = _or_refusal(partial(sums, self._backward_twice, subject.canary))
        self.difference = [a - b for a, b in zip(with_canary, self.without, strict=True)]
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=1.0)
        self.engine = PrivacyEngine()
        self.engine.make_private(
            module=self.module,
            optimizer=self.optimizer,
            data_loader=None,
            mechanism=subject.mechanism,
            loss_reduction=reduction,
            sample_rate=1.0,
            expected_batch_size=float(max(len(x), 1)),
            backend=subject.backend,
        )
        self.plan: Plan = self.engine.step.plan
        self.invariance = batch_invariance(self.engine, self.batches[True], self._magnified_loss)
        self.parameters = self.engine.capture.parameters
        self.start = [p.detach().clone() for p in self.parameters]
        self._aim(subject.coordinates)

    def _magnified_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(outputs, targets) * self.magnified

    def _backward(self, batch: Batch) -> None:
        x, y = batch
        self._magnified_loss(self.module(x), y).backward()  # type: ignore[no-untyped-call]

    def _backward_twice(self, batch: Batch) -> None:
        self._backward(batch)
        self._backward(batch)

    def _aim(self, coordinates: int) -> None:
        """Choose the readings: ``self.index`` of single coordinates, ``self.directions``."""
        sizes = [math.prod(block.shape) for block in self.plan.blocks]
        scales = torch.repeat_interleave(
            torch.tensor([sd or 1.0 for sd in self.plan.scales], dtype=torch.float64),
            torch.tensor(sizes),
        )
        total = len(scales)
        chosen = torch.Generator().manual_seed(total)  # public: which coordinates, not what noise
        starts = torch.randint(total, (-(-coordinates // NEIGHBOURS),), generator=chosen)
        index = (starts[:, None] + torch.arange(NEIGHBOURS)).flatten()[:coordinates]
        self.index = torch.unique(index[index < total])
        # Noisy sums in units of their noise, from gradients of the mean over the batch.
        self.scaling = 1 / self.engine.step.gradient_scale
        self.single = self.scaling / scales[self.index]
        signal = torch.cat([v.flatten() for v in self.difference]) / scales
        left = signal.clone()
        left[self.index] = 0
        self.directions: list[tuple[int, int, Tensor]] = []
        lengths: list[Tensor] = []
        for start, end in _parts(sizes):
            length = left[start:end].norm()
            if length > 0:
                along = left[start:end] / length / scales[start:end] * self.scaling
                self.directions.append((start, end, along))
                lengths.append(length)
        if not lengths:
            raise InvalidInput(
                "canary",
                expected="a record whose gradient is not 0",
                got="one without gradient",
                remedy="Pass another record, or another target for it.",
            )
        self.shift = torch.cat([torch.stack(lengths), signal[self.index]]).numpy()
        """The shift of a reading by the canary."""

    def step(self, present: bool) -> Tensor:
        """Take one step and read it; the parameters are put back."""
        self.engine.new_samples()
        self._backward(self.batches[present])
        self.optimizer.step()
        with torch.no_grad():
            now = [p.detach() for p in self.parameters]
            moved = torch.cat([s.flatten() for s in torch._foreach_sub(self.start, now)]).double()
            torch._foreach_copy_(now, self.start)
        along = [torch.dot(moved[a:b], v) for a, b, v in self.directions]
        return torch.cat([torch.stack(along), moved[self.index] * self.single])

    def remove_one(self) -> Check:
        """Whether the batch's sum grows by the canary's contribution and nothing else."""
        far = [
            (a - b).double().norm() / block.bound
            for a, b, block in zip(self.difference, self.alone, self.plan.blocks, strict=True)
        ]
        deviation = float(torch.stack(far).norm())
        size = 1 + len(self.batches[False][0])
        allowed = size * 2.0**-12
        return Check(
            layer="sensitivity",
            name="remove one",
            passed=deviation <= allowed,
            text=f"with and without the canary the clipped sums of {size - 1} records differ by "
            f"its own contribution, up to {deviation:.2g} of the bound ({allowed:.2g} allowed for "
            "rounding inside the model)",
            numbers={"deviation": deviation, "allowed": allowed},
        )

    def given_twice(self) -> Check:
        """Whether a record keeps its bound when a loop goes through the backward pass twice."""
        name = "backward twice"
        if isinstance(self.twice, DPKernError):
            text = f"refused: {self.twice.expected}"
            return Check(layer="sensitivity", name=name, passed=True, text=text)
        return replace(within_bound(self.plan, self.twice), name=name)


def _or_refusal(sums: Callable[[], list[Tensor]]) -> list[Tensor] | DPKernError:
    """Return the sums, or the error that refuses a loop which goes on as it should not."""
    try:
        return sums()
    except DPKernError as error:
        return error


def _parts(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return consecutive parameters of these sizes as at most ``PARTS`` ranges of coordinates."""
    each = -(-len(sizes) // PARTS)
    ends = [0, *itertools.accumulate(sizes)]
    places = [*range(0, len(sizes), each), len(sizes)]
    return [(ends[a], ends[b]) for a, b in itertools.pairwise(places)]


def sums_without_noise(
    mechanism: Mechanism,
    module: nn.Module,
    loss_reduction: str,
    backend: str | None,
    backward: Callable[[Batch], None],
    batch: Batch,
) -> list[Tensor]:
    """Return the clipped sums that one step would noise, float64, parameter by parameter.

    They are taken in front of the noise, where several processes would add theirs up.
    """
    found: list[Tensor] = []

    def keep(sums: list[Tensor]) -> None:
        found.extend(total.double() for total in sums)

    capture = Capture(module, loss_reduction=loss_reduction)
    plain = [p.detach() for p in capture.parameters]
    numbers: dict[str, Any] = {"expected_batch_size": 1.0, "sample_rate": 1.0}
    numbers["gradients"] = "batched"
    step = DPStep(mechanism, plain, reduce=keep, backend=backend, **numbers)
    prepare(capture, lambda: step.plan)
    capture.attach()
    try:
        capture.begin_batch(len(batch[0]))
        backward(batch)
        close_into(step, capture)
    finally:
        capture.detach()
    step.finish()
    if step.plan.arithmetic == "float":
        return found
    return [
        total * unit if unit is not None else total
        for total, unit in zip(found, step.plan.units, strict=True)
    ]


def within_bound(plan: Plan, alone: Sequence[Tensor]) -> Check:
    """Whether one record's contribution keeps the norm bound of every clip group.

    Exact sums are multiples of their units, and squares are added as fractions. Float sums may
    exceed the bound by the rounding of their norm: 2^-20 of it.
    """
    exact = plan.arithmetic == "exact"
    reached: list[float] = []
    kept = True
    for group, bound in zip(plan.groups, plan.group_bounds, strict=True):
        squares = [_square(alone[i], plan.units[i] if exact else None, plan.p) for i in group]
        total = sum(squares, Fraction(0))
        limit = Fraction(bound) ** (plan.p if exact else 1)
        if exact:
            kept = kept and total <= limit
        norm = float(total) ** (1 / plan.p)
        kept = kept and norm <= bound * (1 + 2.0**-20)
        reached.append(norm / bound)
    return Check(
        layer="sensitivity",
        name="bound",
        passed=kept,
        text=f"the canary's contribution has {max(reached):.6g} of its bound at most, "
        f"{min(reached):.6g} at least, over {len(reached)} clip groups"
        + (", in exact arithmetic" if exact else ""),
        numbers={"largest": max(reached), "least": min(reached), "groups": len(reached)},
    )


def _square(part: Tensor, unit: float | None, p: int) -> Fraction:
    """Return the p-th power of a part's p-norm."""
    if unit is None:
        return Fraction(float(part.abs().pow(p).sum()))
    counts = (part / unit).round().to(torch.int64).abs()
    return int(counts.pow(p).sum()) * Fraction(unit) ** p


def direct(mechanism: Mechanism, module: nn.Module) -> bool:
    """Whether the plan noises the gradients themselves and stays the same from step to step."""
    params = [p.detach() for p in module.parameters() if p.requires_grad]
    plan = mechanism.plan([tuple(p.shape) for p in params])
    adapts = plan.importance is not None or mechanism.memory(params) is not None
    return not (plan.mapped or adapts)

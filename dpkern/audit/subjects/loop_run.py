"""Run a user's training loop once under an audit's observer.

The first run, with all records, keeps the clipped sum of every step. Later runs compute sums of
their own and release the first run's in their place. So both have the same weights at every step,
as neighbours have that released the same: what still differs is what one record does to a sum, and
what the loop remembers besides its releases.
"""

from __future__ import annotations

import math
import random
import sys
import time
import traceback
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...base.errors import DPKernError, InvalidInput
from ...engine.arguments import MakePrivateOptions
from ...engine.capture import Capture
from ...engine.hooks import Hook
from ...engine.loader import PrivateLoader
from ...engine.observing import observed_by
from ...engine.optimizer import OptimizerAdapter
from ...ops import clip
from ...privacy.mechanisms.base import Mechanism
from ...privacy.mechanisms.plan import Plan
from ...step.step import DPStep
from .loop_draws import AlignedDraws, Sizes
from .loop_records import (
    SEED,
    AuditedRecords,
    Content,
    ForcedMasks,
    scales,
)
from .loop_script import as_script, printed, read
from .loop_state import Snapshot, frames_of, snapshot

LIMIT, RETURNED, REFUSED = "limit", "returned", "refused"
"""The ends of a run: it was stopped, ``main`` returned, or the engine refused to go on."""


LEAST = 2
"""Steps that a run takes however late it is: one with the record and one without it."""


@dataclass(frozen=True, kw_only=True)
class LoopSetting:
    """The setting of one run.

    Attributes:
        path, symbol: the script and its function.
        steps: it is stopped at the release of this many.
        quiet: without noise.
        targets: records that every even batch holds.
        removed: the target that is left out.
        contents: content of replaced records.
        seconds: it is stopped at a release so long after ``make_private``, but not at the first.
    """

    path: Path
    symbol: str
    steps: int
    quiet: bool = True
    targets: tuple[int, ...] = ()
    removed: int | None = None
    contents: Mapping[int, Content] = field(default_factory=dict)
    seconds: float = math.inf

    @property
    def label(self) -> str:
        """The loop's name in reports."""
        return f"{self.path.name}:{self.symbol}"


@dataclass
class LoopTrace:
    """The observations of a run.

    Attributes:
        sums: clipped sums of every step, by parameter, in the units of gradients.
        released: the sums that were released instead, as the step holds them.
        held: whether each step's batch was to hold the targets.
        sizes: samples of each step.
        fresh: whether each step had a batch of its own.
        elsewhere: whether each step was accounted by another sampling than the loader's.
        strays: forward passes in training without a yielded batch.
        generators: digests of the generators' states at each step.
        remembered: state after the last step whose batch held no target.
        final: model and optimizer, after ``main`` returned.
        norms: the largest norm of each record's gradient, as far as it was seen.
        ended: one of the three words above.
        refusal: the engine's error.
    """

    sums: list[list[Tensor]] = field(default_factory=list)
    released: list[list[Tensor]] = field(default_factory=list)
    held: list[bool] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    fresh: list[bool] = field(default_factory=list)
    elsewhere: list[bool] = field(default_factory=list)
    strays: int = 0
    generators: list[bytes] = field(default_factory=list)
    remembered: Snapshot | None = None
    final: Snapshot | None = None
    norms: dict[int, float] = field(default_factory=dict)
    draws: Sizes = field(default_factory=dict)
    ended: str = LIMIT
    refusal: DPKernError | None = None
    plan: Plan | None = None
    names: list[str] = field(default_factory=list)
    sampling: dict[str, Any] = field(default_factory=dict)
    records: int = 0
    scalable: bool = False
    quiet: bool = True
    epsilon: float | None = None
    seconds: float = 0.0

    @property
    def steps(self) -> int:
        """The number of releases."""
        return len(self.sums)


class CannotAudit(InvalidInput):
    """An error for a loop that this audit cannot judge."""


class LoopError(InvalidInput):
    """An error for a script that raises one of its own."""


class _Enough(BaseException):
    """An exception that ends ``main`` after the last step, past any ``except Exception``."""


class LoopObserver:
    """The observer of one run, and the watcher of its step.

    Args:
        setting: setting of the run.
        base: run with all records, which gives the sums to release. None means that this is that
            run.
    """

    def __init__(self, setting: LoopSetting, base: LoopTrace | None) -> None:
        self.setting, self.base = setting, base
        self.until = math.inf
        self.trace = LoopTrace()
        self.problem: CannotAudit | None = None
        self.script: types.ModuleType | None = None
        self._parts: tuple[Capture, DPStep, OptimizerAdapter, PrivateLoader] | None = None
        self._masks: ForcedMasks | None = None
        self._position = 0
        self._size = 0
        self._part = 0

    # What make_private asks.

    def options(self, options: MakePrivateOptions) -> MakePrivateOptions:
        """Return the options with a known seed."""
        if self._parts is not None:
            raise self._cannot(
                "one make_private in a loop",
                "a second one",
                "Audit each loop in a main() of its own.",
            )
        return replace(options, unsafe_seed=SEED)

    def mechanism(self, mechanism: Mechanism) -> Mechanism:
        """Return the mechanism, without noise in a quiet run where it can be."""
        self.trace.quiet = False
        if not self.setting.quiet:
            return mechanism
        changes: dict[str, Any] = {"noise_multiplier": 0.0}
        if getattr(mechanism, "arithmetic", "float") == "exact":
            changes["arithmetic"] = "float"  # exact sums have the noise's lattice
        try:
            silent = replace(mechanism, **changes)  # type: ignore[type-var]
        except (DPKernError, TypeError):
            return mechanism
        self.trace.quiet = True
        return silent

    def made(
        self,
        capture: Capture,
        step: DPStep,
        adapter: OptimizerAdapter,
        loader: PrivateLoader | None,
    ) -> None:
        """Take the parts of the engine, and put the audit's records into its loader."""
        if loader is None:
            raise self._cannot(
                "make_private(data_loader=...)",
                "data_loader=None, where nothing says what a record is",
                "Pass the loader, or audit one step: dpkern.audit.subjects.model.ModelStep.",
            )
        plan = step.plan
        if adapter.processes is not None or plan.importance or plan.noise_point != "per_batch":
            raise self._cannot(
                "one process, and a mechanism that releases noisy sums and nothing else",
                "several processes"
                if adapter.processes is not None
                else f"{plan.mechanism}, {plan.mode}",
                "Run main() in one process with DPSGD: a loop treats records the same way there.",
            )
        self._parts = capture, step, adapter, loader
        self.until = time.monotonic() + self.setting.seconds
        trace, setting = self.trace, self.setting
        trace.plan, trace.names, trace.records = plan, list(capture.names), loader.dataset_size
        trace.sampling = dict(step.sampling)
        records = AuditedRecords(loader.dataset, setting.contents)
        trace.scalable = scales(AuditedRecords(loader.dataset, {})[0])
        poisson = loader.sampling == "poisson"
        self._masks = ForcedMasks(setting.targets, setting.removed, trace.records, poisson=poisson)
        loader.edit(self._masks, records)
        step.watch(self)
        capture.module.register_forward_pre_hook(Hook(self._before_forward))

    # What the step shows.

    def added(self, result: clip.ClipResult) -> None:
        """Take note of norms, record by record."""
        _, _, _, loader = self._made
        assert self._masks is not None
        parts = self._masks.parts.get(loader.position - 1, [])
        part = parts[self._part] if self._part < len(parts) else []
        norms = result.norms.detach().double().nan_to_num(nan=0.0).tolist()
        if len(part) == len(norms):
            for record, norm in zip(part, norms, strict=True):
                self.trace.norms[record] = max(norm, self.trace.norms.get(record, 0.0))
        self._part += 1
        self._size += result.batch_size

    def summed(self, sums: list[Tensor]) -> None:
        """Keep the sums of a step, release the first run's, and stop after the last step."""
        capture, step, adapter, loader = self._made
        trace, position = self.trace, loader.position
        trace.plan = step.plan
        trace.held.append(position > self._position and (position - 1) % 2 == 0)
        trace.fresh.append(position > self._position)
        trace.elsewhere.append(dict(step.sampling) != trace.sampling)
        trace.sizes.append(self._size)
        self._position, self._size, self._part = position, 0, 0
        trace.generators.append(_generators())
        trace.sums.append(_in_gradients(sums, step.plan))
        if self.base is None:
            trace.released.append([total.clone() for total in sums])
        elif trace.steps <= self.base.steps:
            sums[:] = [total.clone() for total in self.base.released[trace.steps - 1]]
        if not trace.held[-1]:
            frames = frames_of(sys._getframe(1), self.setting.path.parent)
            module, optimizer = capture.module, adapter.optimizer
            trace.remembered = snapshot(module, optimizer, frames, self.script)
        late = trace.steps >= LEAST and time.monotonic() > self.until
        if late or trace.steps >= self.setting.steps:
            raise _Enough

    def finish(self) -> None:
        """Record the state that is left when ``main`` has returned."""
        if self._parts is None:
            return
        capture, _, adapter, _ = self._parts
        if self.trace.ended == RETURNED:
            self.trace.final = snapshot(capture.module, adapter.optimizer)

    def certified(self, delta: float) -> float | None:
        """Return the epsilon that the steps so far would certify with a secret key."""
        if self._parts is None or not self.trace.steps:
            return None
        return self._parts[1].epsilon_if_seed_secret(delta)

    def batch(self) -> int:
        """Return the number of the current batch."""
        return -1 if self._parts is None else self._parts[3].position - 1

    def place(self) -> int | None:
        """Return where the missing record would stand in the current batch."""
        return None if self._masks is None else self._masks.places.get(self.batch())

    @property
    def _made(self) -> tuple[Capture, DPStep, OptimizerAdapter, PrivateLoader]:
        assert self._parts is not None
        return self._parts

    def _before_forward(self, module: torch.nn.Module, *_: Any) -> None:
        fresh = self._made[3].position > self._position
        if module.training and torch.is_grad_enabled() and not fresh:
            self.trace.strays += 1

    def _cannot(self, expected: str, got: str, remedy: str) -> CannotAudit:
        self.problem = CannotAudit(self.setting.label, expected=expected, got=got, remedy=remedy)
        return self.problem


def run(
    setting: LoopSetting, base: LoopTrace | None, *, delta: float | None = None, silent: bool = True
) -> LoopTrace:
    """Run the loop once, from the reading of its file.

    Args:
        setting: setting of the run.
        base: the run whose sums are released instead of this one's.
        delta: delta of the epsilon that the steps would certify. None asks for no epsilon.
        silent: forget what the script prints.

    Raises:
        CannotAudit: a loop that this audit cannot speak of.
        LoopError: an error of the script's own, or a file without the function.
    """
    began = time.monotonic()
    observer = LoopObserver(setting, base)
    draws = AlignedDraws(observer.batch, None if base is None else base.draws, observer.place)
    with as_script(setting.path), printed(silent):
        try:
            module = observer.script = read(setting.path)
            function = getattr(module, setting.symbol)
            with observed_by(observer), draws:
                function()
            observer.trace.ended = RETURNED
        except _Enough:
            pass
        except (Exception, SystemExit) as error:
            fault = _judge(error, observer)
            if fault is not None:
                raise fault from error
        if observer.problem is not None:
            raise observer.problem
        observer.finish()
        if delta is not None:
            observer.trace.epsilon = observer.certified(delta)
    trace = observer.trace
    trace.draws, trace.seconds = draws.sizes, time.monotonic() - began
    if trace.plan is None and trace.ended != REFUSED:
        raise LoopError(
            setting.label,
            expected="a function of (records), of (records, runs), or a training loop without "
            "arguments that calls PrivacyEngine.make_private",
            got="a function without arguments that called no make_private",
            remedy="Name the function that makes the engine and takes its steps.",
        )
    return trace


def _judge(error: BaseException, observer: LoopObserver) -> LoopError | None:
    """Decide what ended ``main``: itself, the engine, or a fault, which is returned."""
    if observer.problem is not None:
        return None
    if isinstance(error, SystemExit) and error.code in (None, 0) and observer.trace.steps:
        observer.trace.ended = RETURNED
        return None
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, DPKernError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, DPKernError):
        observer.trace.ended, observer.trace.refusal = REFUSED, cause
        return None
    place = traceback.extract_tb(error.__traceback__)[-1]
    return LoopError(
        observer.setting.label,
        expected="a loop that runs to its end, or to the last step that is audited",
        got=f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})",
        remedy="Run the script by itself first, and repair it.",
    )


def _in_gradients(sums: list[Tensor], plan: Plan) -> list[Tensor]:
    """Copy sums in the units of gradients."""
    if plan.arithmetic != "exact":
        return [total.detach().clone() for total in sums]
    return [total.double() * (unit or 1.0) for total, unit in zip(sums, plan.units, strict=True)]


def _generators() -> bytes:
    _, key, place, _, _ = np.random.get_state()
    states = (torch.get_rng_state().numpy().tobytes(), np.asarray(key).tobytes())
    others = repr((place, random.getstate())).encode()
    return blake2b(b"".join((*states, others)), digest_size=16).digest()

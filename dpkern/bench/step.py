"""Measure whole training steps of a user's model: private, without privacy, and of other libraries.

All ways train copies of one model on one batch of generated rows with the same optimizer, in one
process, in turns. Before that each private way's clipped sum is compared on a small batch with the
definition, from per-sample gradients in float64; a way that differs gets no number.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from ..base import dispatch
from ..base.dispatch import OPS
from ..base.errors import DPKernError, InvalidInput, PrivacyError
from ..base.threads import torch_threads
from ..base.validate import choice, integer
from ..engine import PrivacyEngine, validate
from ..engine.exact_sums import factoring_error
from ..engine.named import NAMES, Run, make
from ..engine.optimizer import OptimizerAdapter
from ..engine.subject import BenchmarkModel, subject
from ..ops import clip
from ..privacy.mechanisms import DPSGD, Mechanism, Plan
from . import guard
from .measure import OURS, Row, burst_of, sampler
from .outcome import failure
from .paired import QUICK, Rounds, StopRule, collect
from .peers import PEERS, UNBUILT, PeerAbsentError, PeerTask, moved

OP = "step"
"""The word that stands in place of an op in rows of whole steps."""
CLIP, NOISE, LR, MOMENTUM = 1.0, 1.0, 1e-3, 0.9
CHECKED = 4
"""Samples of the batch on which a step is compared with the definition."""
TOLERANCE = 1e-3
"""Largest error of the clipped sum, relative to the root of its samples' squared norms."""
PLAIN: Mapping[str, dict[str, bool]] = {"torch default": {}, "torch fused": {"fused": True}}
"""Ways without privacy; the faster one is what others are compared with."""
WARM_UPS = 3
SAMPLE = 2e-3
"""Seconds of one sample at least."""
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The selection of a run of whole steps.

    Attributes:
        model: a name of the catalogue, or ``package.module:callable``.
        mechanisms: names that ``dpkern train --mechanism`` takes.
        batch: samples of a step.
        row_shape: shape of one sample; None for the model's usual one.
        threads: numbers of threads.
        peers: put other libraries beside.
        quick: stop early.
        seconds: most time of the samples of one mechanism; None leaves it to the stop rule.
    """

    model: str
    mechanisms: tuple[str, ...] = ("dpsgd",)
    batch: int = 32
    row_shape: tuple[int, ...] | None = None
    threads: tuple[int, ...] = (1,)
    peers: bool = True
    quick: bool = False
    seconds: float | None = None

    @property
    def rule(self) -> StopRule:
        """The rule by which sampling stops."""
        seconds = self.seconds or (2.0 if self.quick else 20.0)
        return StopRule(least=5 if self.quick else 12, seconds=seconds, half_width=_narrow(self))

    def as_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> StepPlan:
        """Return the plan that ``as_json`` wrote."""
        made: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in found.items()}
        return cls(**made)


def _narrow(plan: StepPlan) -> float:
    return QUICK.half_width if plan.quick else StopRule.half_width


def check_plan(plan: StepPlan) -> None:
    """Refuse what cannot be measured, before anything is.

    Raises:
        InvalidInput: an unknown mechanism, one that adds no noise to gradients, or numbers out of
            range. The model is looked at where it is measured.
    """
    for name in plan.mechanisms:
        choice(NAMES, mechanism=name)
        kind = Mechanism.named(name)
        numbers = {field.name for field in fields(kind)}  # type: ignore[arg-type]
        if kind.trained_by != "gradients" or "noise_multiplier" not in numbers:
            raise InvalidInput(
                "mechanism",
                expected="one that adds noise to gradients",
                got=name,
                remedy="Train as usual; this mechanism costs nothing at a step.",
            )
    integer(CHECKED, batch=plan.batch)
    for count in plan.threads:
        integer(1, 1024, threads=count)


def rows(plan: StepPlan) -> Iterator[Row]:
    """Yield a row for each mechanism, number of threads and way."""
    made = subject(plan.model, batch_size=plan.batch, row_shape=plan.row_shape)
    for name in plan.mechanisms:
        mechanism = mechanism_named(name, made)
        for threads in plan.threads:
            with torch_threads(threads):
                yield from _measured(plan, made, name, mechanism, threads)


def mechanism_named(name: str, made: BenchmarkModel) -> Mechanism:
    """Return the mechanism as a run of the model makes it, with clip 1 and noise 1."""
    run = Run(
        model=made.model,
        row_shape=made.rows,
        classes=made.classes,
        steps=1,
        sample_rate=1 / made.batch,
        rows=made.batch * made.batch,
        batch_size=made.batch,
        delta=1e-5,
        lr=LR,
    )
    mechanism, _ = make(name, run, mode="corrected", noise_multiplier=NOISE, max_grad_norm=CLIP)
    return mechanism


def sgd(parameters: Any, lr: float = LR, **options: bool) -> torch.optim.Optimizer:
    """Return the optimizer that every way has."""
    momentum = MOMENTUM if lr == LR else 0.0
    return torch.optim.SGD(list(parameters), lr=lr, momentum=momentum, **options)


def plain(made: BenchmarkModel, **options: bool) -> Callable[[], None]:
    """Return a step without privacy."""
    model = made.fresh()
    optimizer = sgd((p for p in model.parameters() if p.requires_grad), **options)

    def step() -> None:
        made.loss(model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def private(
    made: BenchmarkModel, mechanism: Mechanism
) -> tuple[Callable[[int | None], None], PrivacyEngine]:
    """Return dpkern's step on so many samples (None: all), and its engine."""
    engine, model = PrivacyEngine(), made.fresh()
    optimizer = sgd(p for p in model.parameters() if p.requires_grad)
    model, optimizer, _ = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=None,
        mechanism=mechanism,
        sample_rate=1e-3,
        expected_batch_size=made.batch,
        dataset_size=1000 * made.batch,
    )

    def step(samples: int | None = None) -> None:
        made.loss(model, samples).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step, engine


def gradients(made: BenchmarkModel, samples: int) -> list[Tensor]:
    """Return per-sample gradients, one sample at a time: float64 ``[B, *shape]`` by parameter."""
    model = made.fresh().double()
    each = len(made.labels) // made.batch
    trained = [p for p in model.parameters() if p.requires_grad]
    found: list[list[Tensor]] = [[] for _ in trained]
    for b in range(samples):
        x = made.x[b : b + 1]
        out = model(x.double() if x.is_floating_point() else x)
        labels = made.labels[b * each : (b + 1) * each]
        loss = nn.functional.cross_entropy(out.flatten(0, -2), labels)
        grads = torch.autograd.grad(loss, trained, allow_unused=True)
        for rows_, p, g in zip(found, trained, grads, strict=True):
            rows_.append(torch.zeros_like(p) if g is None else g)
    return [torch.stack(rows_).detach() for rows_ in found]


def check_sums(made: BenchmarkModel, mechanism: Mechanism) -> str:
    """Compare dpkern's clipped sums of a small batch with the definition, in float64.

    The sums are those that a step would have noised, in the arithmetic that is timed. Where a
    release needs more than the gradient (all lags of a convolution's correlation), they are
    compared with the same step on the reference of every op.

    Returns:
        What was compared, in words.

    Raises:
        AssertionError: the sums differ.
        DPKernError: the engine refuses the model or the mechanism.
    """
    count = min(CHECKED, made.batch)
    few = slice(0, count)
    sums, plan = _sums(made, mechanism, few)
    if any(b.release is not None and b.release.needs_operands for b in plan.blocks):
        with dispatch.replaced("cpu", [(name, op.reference, None) for name, op in OPS.items()]):
            wanted, _ = _sums(made, mechanism, few)
        scales = [float(w.norm()) for w in wanted]
        how = "sums of the same step with the reference of every op"
    else:
        wanted, scales = defined(gradients(made, count), plan)
        how = "per-sample gradients in float64"
    for i, (got, want, scale) in enumerate(zip(sums, wanted, scales, strict=True)):
        # Exact sums are whole numbers of units, each sample's rounded towards zero, or products.
        rounding = (plan.units[i] or 0.0) * count * got.numel() ** 0.5
        if got.dim() == 2:
            rounding += factoring_error(plan, i, got.numel(), count)
        error = float((got - want).norm())
        if not error <= TOLERANCE * scale + rounding + 1e-12:
            raise AssertionError(
                f"the clipped sum of parameter {i} is off by {error / max(scale, 1e-30):.2g}"
            )
    return f"clipped sums of {count} samples, against {how}"


def defined(samples: list[Tensor], plan: Plan) -> tuple[list[Tensor], list[float]]:
    """Return clipped sums from per-sample gradients, and the sizes of their terms together."""
    centred, signals = [], []
    for g, block in zip(samples, plan.blocks, strict=True):
        release = block.release
        if release is not None and release.centre is not None:
            g = g - release.centre.to(g)
        centred.append(g)
        signals.append(release.forward(g) if release is not None and block.mapped else g)
    sums, scales = [g[0] for g in signals], [0.0] * len(signals)
    for group in plan.groups:
        normed = [
            centred[i]
            if (r := plan.blocks[i].release) is None or r.norm == "gradient"
            else signals[i]
            for i in group
        ]
        norms = torch.cat([g.flatten(1) for g in normed], 1).norm(p=plan.p, dim=1)
        bound = plan.blocks[group[0]].bound
        if plan.clipping == "automatic":
            factors = bound / (norms + clip.GAMMA)
        else:
            factors = (bound / norms).clamp(max=1.0)
        for i in group:
            sums[i] = torch.tensordot(factors, signals[i].double(), dims=1)
            scales[i] = float((factors.unsqueeze(1) * signals[i].flatten(1)).norm())
    return sums, scales


def _sums(made: BenchmarkModel, mechanism: Mechanism, part: slice) -> tuple[list[Tensor], Plan]:
    """Return the sums of these samples that a step would noise, float64, and the plan."""
    each = len(made.labels) // made.batch
    few = BenchmarkModel(
        name=made.name,
        model=made.model,
        x=made.x[part],
        labels=made.labels[part.start * each : part.stop * each],
    )
    step, engine = private(few, mechanism)
    seen: list[Tensor] = []

    def look(adapter: OptimizerAdapter) -> None:
        dp = adapter.dp_step
        adapter.capture.program.give_sums_away()
        for total, unit in zip(dp.sums or (), dp.plan.units, strict=True):
            exact = not total.is_floating_point()
            seen.append(total.double() * (unit if exact and unit is not None else 1.0))
        dp.drop()

    with mock.patch.object(OptimizerAdapter, "_release", look):
        step(None)
    if not seen:
        raise PrivacyError(
            "step", expected="clipped sums", got="none", remedy="Train on rows that have gradients."
        )
    return seen, engine.step.plan


def peer_task(made: BenchmarkModel, model: nn.Module, samples: int, lr: float) -> PeerTask:
    """Return what the peers train: the first samples."""
    each = len(made.labels) // made.batch
    shape = (samples, each) if each > 1 else (samples,)

    def loss(out: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(out.flatten(0, -2), labels.flatten())

    return PeerTask(
        model=model,
        x=made.x[:samples],
        labels=made.labels[: samples * each].view(shape),
        loss=loss,
        optimizer=lambda parameters: sgd(parameters, lr),
        clip=CLIP,
        noise=NOISE,
    )


def checked_peers(made: BenchmarkModel) -> tuple[dict[str, Callable[[], None]], dict[str, str]]:
    """Return steps of peers that do the work of flat DP-SGD, and why others are left out."""
    found, left = {}, dict(UNBUILT)
    count = min(CHECKED, made.batch)
    samples = [g.flatten(1) for g in gradients(made, count)]
    whole = torch.cat(samples, 1)
    factors = (CLIP / whole.norm(dim=1)).clamp(max=1.0)
    want = torch.tensordot(factors, whole, dims=1) / count
    for name, peer in PEERS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of hooks and generators that are meant to be so
            outcome = _checked_peer(made, peer, count, want)
        if isinstance(outcome, str):
            left[name] = outcome
        else:
            found[name] = outcome
    return found, left


def _checked_peer(
    made: BenchmarkModel, peer: Callable[[PeerTask], Callable[[], None]], count: int, want: Tensor
) -> Callable[[], None] | str:
    """Return a peer's step after its check, or why it is left out."""
    try:
        got = moved(peer_task(made, made.fresh(), count, 1.0), peer)
        error = float((got - want).norm() / want.norm())
        if not error <= TOLERANCE:
            return f"wrong: its update is off by {error:.2g}"
        step = peer(peer_task(made, made.fresh(), made.batch, LR))
        step()
    except PeerAbsentError as refused:
        return str(refused)
    except Exception as raised:  # noqa: BLE001  # other libraries raise what they like
        return f"{type(raised).__name__}: {raised}".splitlines()[0][:200]
    return step


def _measured(
    plan: StepPlan, made: BenchmarkModel, name: str, mechanism: Mechanism, threads: int
) -> Iterator[Row]:
    count = sum(p.numel() for p in made.model.parameters() if p.requires_grad)
    common: Row = {
        "op": OP,
        "case": f"{made.name} {name}",
        "sizes": {"B": made.batch, "parameters": count, "row": list(made.rows)},
        "dtype": str(next(made.model.parameters()).dtype).removeprefix("torch."),
        "isa": None,
        "threads": threads,
        "cache": "warm",
    }
    try:
        validate.check(made.model)
        checked = check_sums(made, mechanism)
    except (AssertionError, RuntimeError) as error:
        yield {**common, "backend": OURS, **failure(error)}
        return
    except DPKernError as error:
        yield {**common, "backend": OURS, "refused": str(error)[:500]}
        return
    step, engine = private(made, mechanism)
    flat = mechanism == DPSGD(noise_multiplier=NOISE, max_grad_norm=CLIP)  # what peers do
    others, left = checked_peers(made) if plan.peers and flat else ({}, {})
    if plan.peers and not flat:
        left = dict.fromkeys(PEERS, "does not have this mechanism")
    ways: dict[str, Callable[[], Any]] = {
        **{way: plain(made, **options) for way, options in PLAIN.items()},
        OURS: lambda: step(None),
        **others,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hooks of other libraries warn at every step
        for work in ways.values():  # recording, compiling and checks of the first steps
            for _ in range(WARM_UPS):
                work()
        bursts = {way: burst_of(work, CPU, SAMPLE) for way, work in ways.items()}
        before = guard.counters()
        rounds = collect(
            {way: sampler(work, bursts[way], CPU) for way, work in ways.items()},
            plan.rule,
            lambda found: (OURS, found.fastest(list(PLAIN)) or OURS),
            time.perf_counter,
        )
        quiet = guard.verdict(before, guard.counters(), threads=threads)
    common |= {"arithmetic": engine.step.plan.arithmetic, "guard": quiet.as_json()}
    common["quiet"] = quiet.quiet
    yield from _rows(common, rounds, list(ways), bursts, checked)
    for way, reason in left.items():
        yield {**common, "backend": way, "absent": reason}


def _rows(
    common: Row, rounds: Rounds, ways: list[str], bursts: dict[str, int], checked: str
) -> Iterator[Row]:
    base = rounds.fastest(list(PLAIN))
    assert base is not None
    for way in ways:
        low, high = rounds.interval(way)
        row = {
            **common,
            "backend": way,
            "ms": 1e3 * rounds.median(way),
            "ms interval": [1e3 * low, 1e3 * high],
            "over": base,
            "calls per sample": bursts[way],
            "samples ms": [1e3 * s for s in rounds.seconds[way]],
        }
        if way == OURS:
            row["checked"] = checked
        if common["quiet"]:
            ratio = rounds.ratio(way, base)
            row |= {"ratio": ratio.value, "ratio interval": [ratio.low, ratio.high]}
        yield row

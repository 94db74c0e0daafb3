"""Report the predicted time and memory of private steps, on a processor that need not be here."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..base import validate as check
from ..base.errors import InvalidInput
from ..base.report import Report, ReportTable
from ..cost import processors
from ..cost._numbers import tidy
from ..cost.op_time import CoresAtWork, total
from ..cost.processors import Processor
from ..engine import named as by_name
from ..ops import update
from ..privacy.mechanisms import LabelMechanism, Mechanism, Site
from ..privacy.mechanisms.run_facts import RunFacts
from . import prediction_check
from .fake_step import FakeStep, Maker, trace
from .networks import ARCHITECTURES, maker
from .predicted_step import PredictedStep, ordinary, private
from .prediction_check import PLAIN

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OPTIMIZERS: dict[str, update.Rule] = {"sgd": update.SGD(lr=0.1), "adam": update.Adam(lr=1e-3)}
BATCHES = (32, 128, 512, 2048)
DELTA = 1e-5
MECHANISMS = tuple(
    name for name in by_name.NAMES if not issubclass(Mechanism.named(name), LabelMechanism)
)
"""Mechanisms that add noise to gradients; the others cost nothing at a step."""


def report(
    model: str,
    *,
    processor: str | Path | Processor = "h100",
    mechanism: str = "dpsgd",
    batches: Sequence[int] = BATCHES,
    positions: int | None = None,
    row_shape: Sequence[int] | None = None,
    dtype: str = "float32",
    optimizer: str = "sgd",
    threads: int | None = None,
) -> Report:
    """Predict private and ordinary steps of a model; nothing is executed.

    Args:
        model: a name of ``networks.ARCHITECTURES``, or ``package.module:callable``, which returns
            a module, or a module and an example input. The callable runs; the model does not.
        processor: a name in ``processors.available()``, one with an instruction set such as
            ``zen4:avx2``, a TOML file, or a ``Processor``. Its file has a ``[machine]`` table.
        mechanism: name of the mechanism of the private step.
        batches: samples of a step, in one physical batch.
        positions: positions of a sample of tokens. None takes the model's usual number.
        row_shape: shape of one sample, for a model that comes without an example.
        dtype: ``float32`` or ``bfloat16``, of parameters and activations.
        optimizer: ``sgd`` or ``adam``.
        threads: multiprocessors of a GPU at work; None takes all. On a CPU one core, no more.

    Raises:
        InvalidInput: something unknown, several threads of a CPU, a processor without figures of
            its memory and peak, or a model whose step does not follow from shapes.
    """
    check.choice(tuple(DTYPES), dtype=dtype)
    check.choice(tuple(OPTIMIZERS), optimizer=optimizer)
    check.choice(MECHANISMS, mechanism=mechanism)
    if not batches:
        raise InvalidInput(
            "batch", expected="at least one", got="none", remedy="Pass, for example, --batch 32."
        )
    place = _place(processors.load(processor), threads)
    made = _maker(model, positions, row_shape)
    steps = []
    for batch in sorted({check.integer(1, batch=batch) for batch in batches}):
        step = trace(made, batch, dtype=DTYPES[dtype])
        chosen = _mechanism(mechanism, step)
        rule = OPTIMIZERS[optimizer]
        mine, plain = private(step, place, chosen, rule=rule), ordinary(step, place, rule=rule)
        steps.append((step, mine, plain))
    errors = prediction_check.facts()
    machine = place.machine
    given = {
        "model": model,
        "parameters": sum(torch.Size(s).numel() for s in steps[0][0].shapes.values()),
        "processor": machine.name,
        "cores": place.cores,
        "mechanism": mechanism,
        "dtype": dtype,
        "optimizer": optimizer,
        "positions": positions,
    }
    return Report(
        name=f"predict-{model.replace(':', '-').replace('.', '-')}-{machine.name}",
        title=f"Predicted: a private step of {_title(model)} on {machine.title}",
        summary=_summary(model, place, steps, errors),
        facts={
            **given,
            "steps": [_fact(step, mine, plain) for step, mine, plain in steps],
            "errors": errors,
        },
        tables=[
            _batch_table(steps),
            _part_table(steps[0]),
            _op_table(steps[0]),
            _memory_table(steps[0]),
            prediction_check.table(errors),
        ],
        notes=_notes(place, steps, errors, dtype),
    )


def _place(machine: Processor, threads: int | None) -> CoresAtWork:
    """Return the processor at work: all of a GPU unless told otherwise, one core of a CPU.

    Dividing a step by its threads has been wrong on every measured step (docs/cost.md): libraries
    run parts of a step on one thread, and processors of a virtual machine may share a core.

    Raises:
        InvalidInput: more threads of a CPU than one, or than there are.
    """
    if machine.kind == "gpu":
        return CoresAtWork.of(machine, threads)
    place = CoresAtWork.of(machine, 1 if threads is None else threads)
    if place.cores > 1:
        raise InvalidInput(
            "threads",
            expected="1 on a CPU: steps on several threads do not get shorter by their number, "
            "and no measured one was predicted well",
            got=threads,
            remedy="Pass --threads 1, or measure on the machine with `dpkern cost model MODEL "
            f"--threads {threads}`.",
        )
    return place


_Steps = Sequence[tuple[FakeStep, PredictedStep, PredictedStep]]


def _title(model: str) -> str:
    return ARCHITECTURES[model].title if model in ARCHITECTURES else model


def _maker(model: str, positions: int | None, row_shape: Sequence[int] | None) -> Maker:
    if positions is not None:
        check.integer(1, seq=positions)
    if ":" not in model:
        check.choice(tuple(ARCHITECTURES), model=model)
        found = ARCHITECTURES[model]
        if row_shape is not None or (positions is not None and not found.positions):
            raise InvalidInput(
                "row_shape" if row_shape is not None else "seq",
                expected=f"none with {model}",
                got=list(row_shape) if row_shape is not None else positions,
                remedy="Leave it out, or name a model of your own.",
            )
        return maker(model, positions=positions)[0]
    place, _, attribute = model.partition(":")
    try:
        build = getattr(importlib.import_module(place), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidInput(
            "model",
            expected="package.module:callable that can be imported from here",
            got=f"{model} ({error})",
            remedy="Check its spelling.",
        ) from error
    if not callable(build) or isinstance(build, nn.Module):
        raise InvalidInput(
            "model",
            expected=f"a function {attribute} in {place}",
            got=type(build).__name__,
            remedy="Write a function without arguments that returns the model.",
        )

    def make() -> tuple[nn.Module, Callable[[int], Tensor]]:
        made = build()
        module, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(module, nn.Module) or not isinstance(example, Tensor | None):
            raise InvalidInput(
                "model",
                expected=f"an nn.Module, or one and an example tensor, from {attribute}()",
                got=", ".join(type(part).__name__ for part in (module, example)),
                remedy="Return the model, or the model and torch.zeros(1, *shape of one sample).",
            )
        if example is not None and row_shape is None:
            row = tuple(example.shape[1:])
            kind = example.dtype
        elif row_shape is not None:
            row, kind = tuple(row_shape), torch.get_default_dtype()
        else:
            raise InvalidInput(
                "row_shape",
                expected=f"the shape of one sample, for {attribute}() returns no example",
                got="none",
                remedy="Pass --row-shape 1,28,28, for example.",
            )
        if positions is not None:
            row = (positions, *row[1:])
        return module, lambda batch: torch.zeros((batch, *row), dtype=kind)

    return make


@dataclass(frozen=True, kw_only=True)
class _TracedRun(by_name.Run):
    """A run whose geometry follows from a trace instead of a forward pass."""

    step: FakeStep

    def facts(self) -> RunFacts:
        return replace(super().facts(), sites=lambda: sites_of(self.step))


def sites_of(step: FakeStep) -> tuple[Site, ...]:
    """Return the geometry of every parameter: kernels of one convolution each, and others."""
    times = Counter(use.parameter for use in step.uses)
    uses = {use.parameter: use for use in step.uses}
    found = []
    for name, shape in step.shapes.items():
        use = uses.get(name)
        if use is None or use.kind != "conv" or times[name] != 1 or not 3 <= len(shape) <= 4:
            found.append(Site(kind="other", shape=shape))
            continue
        given = {key: use.given[key] for key in ("stride", "padding", "dilation", "groups")}
        found.append(Site(kind="conv", shape=shape, input=use.x[2:], output=use.y[2:], **given))
    return tuple(found)


def _mechanism(name: str, step: FakeStep) -> Mechanism:
    if name == PLAIN.name:
        return PLAIN
    run = _TracedRun(
        model=None,
        row_shape=(1,),
        classes=2,
        steps=1000,
        sample_rate=1e-3,
        rows=1000 * step.batch,
        batch_size=step.batch,
        delta=DELTA,
        step=step,
    )
    made, _ = by_name.make(name, run, mode="corrected")
    if getattr(made, "arithmetic", "float") != "float":
        made = replace(made, arithmetic="float")  # type: ignore[type-var]  # as all the others
    return made


def _summary(
    model: str, place: CoresAtWork, steps: _Steps, errors: Sequence[dict[str, Any]]
) -> str:
    step, mine, plain = steps[0]
    bound = "at least " if mine.lower_bound else ""
    far = ", ".join(
        "{not_fitted_median_error_percent} % of {not_fitted_rows} rows on {processor}".format(**e)
        for e in errors
    )
    here = place.machine.name.partition(":")[0] in {e["processor"] for e in errors}
    never = "" if here else f" Nothing of this has run on {place.machine.title}."
    return (
        f"A private step of {_title(model)} on {step.batch} samples is predicted to take {bound}"
        f"{_ms(mine.seconds)} ms on {place.machine.title}, {_ratio(mine, plain)} times the "
        f"{_ms(plain.seconds)} ms of an ordinary one. Median error of such predictions, "
        f"where nothing was fitted: {far}."
        f"{never}{_too_large(place, steps)}"
    )


def _too_large(place: CoresAtWork, steps: _Steps) -> str:
    """Return the sentence that says which private steps do not fit into the memory."""
    limit = place.machine.machine.get("memory_gb")
    large = [s.batch for s, mine, _ in steps if limit and sum(mine.memory.values()) > 1e9 * limit]
    if not large:
        return ""
    batches = ", ".join(map(str, large))
    return f" Too large for its {limit} GB of memory: private steps of {batches} samples."


def _ms(seconds: float) -> int | float:
    return tidy(float(f"{1e3 * seconds:.4g}"))


def _gb(held: int) -> int | float:
    return tidy(float(f"{held / 1e9:.4g}"))


def _ratio(mine: PredictedStep, plain: PredictedStep) -> float:
    return round(mine.seconds / plain.seconds, 2)


def _fact(step: FakeStep, mine: PredictedStep, plain: PredictedStep) -> dict[str, Any]:
    return {
        "batch": step.batch,
        "seconds": mine.seconds,
        "ordinary_seconds": plain.seconds,
        "ratio": _ratio(mine, plain),
        "lower_bound": mine.lower_bound,
        "unpriced": mine.unpriced,
        "missing": mine.missing,
        "parts": mine.by_part(),
        "ordinary_parts": plain.by_part(),
        "host_seconds": mine.calling,
        "memory_bytes": mine.memory,
        "ordinary_memory_bytes": plain.memory,
        "calls": [
            {"name": c.name, "part": c.part, "bound": c.time.bound, **asdict(c.time)}
            for c in mine.calls
        ],
    }


def _batch_table(steps: _Steps) -> ReportTable:
    return ReportTable(
        title="Steps",
        columns=(
            *("batch", "private, ms", "ordinary, ms", "ratio", "samples/s"),
            *("private, GB", "ordinary, GB"),
        ),
        rows=[
            (
                step.batch,
                _ms(mine.seconds),
                _ms(plain.seconds),
                _ratio(mine, plain),
                tidy(float(f"{step.batch / mine.seconds:.4g}")),
                _gb(sum(mine.memory.values())),
                _gb(sum(plain.memory.values())),
            )
            for step, mine, plain in steps
        ],
        note="One physical batch each. Norms and sums grow with the samples; noise and update do "
        "not. Memory: what is held at once, without a library's workspaces.",
    )


def _part_table(first: tuple[FakeStep, PredictedStep, PredictedStep]) -> ReportTable:
    step, mine, plain = first
    own, theirs = mine.by_part(), plain.by_part()
    rows: list[tuple[str | int | float | None, ...]] = [
        (
            part,
            _ms(own[part]) if part in own else None,
            _ms(theirs[part]) if part in theirs else None,
        )
        for part in dict.fromkeys((*own, *theirs))
    ]
    if mine.overlapped:
        rows.append(("calls by the host, beside it", _ms(mine.calling), _ms(plain.calling)))
    rows.append(("step", _ms(mine.seconds), _ms(plain.seconds)))
    return ReportTable(
        title=f"Parts of a step of {step.batch} samples",
        columns=("part", "private, ms", "ordinary, ms"),
        rows=rows,
        note="Noise is apart from the update, though one kernel makes both: it is what the kernel "
        "would take for the noise alone. A host that calls kernels ahead is slower or hidden.",
    )


def _op_table(first: tuple[FakeStep, PredictedStep, PredictedStep]) -> ReportTable:
    step, mine, _ = first
    grouped: dict[tuple[str, str], list[Any]] = {}
    for call in mine.calls:
        grouped.setdefault((call.part, call.name), []).append(call.time)
    sums = [(part, name, len(times), total(times)) for (part, name), times in grouped.items()]
    sums.sort(key=lambda row: -row[3].seconds)
    return ReportTable(
        title=f"Ops of a private step of {step.batch} samples",
        columns=("part", "op", "calls", "ms", "compute", "integers", "words", "traffic", "bound"),
        rows=[
            (
                *(part, name, calls, _ms(time.seconds)),
                *(_ms(s) for s in (time.compute, time.integers, time.words, time.traffic)),
                time.bound,
            )
            for part, name, calls, time in sums[:_MOST_OPS]
        ],
        note="ms: the largest limit of each call, and its launch. compute, integers, words (the "
        f"cipher) and traffic: each alone, ms. The {_MOST_OPS} longest.",
    )


_MOST_OPS = 16


def _memory_table(first: tuple[FakeStep, PredictedStep, PredictedStep]) -> ReportTable:
    step, mine, plain = first
    return ReportTable(
        title=f"Memory of a step of {step.batch} samples",
        columns=("held", "private, GB", "ordinary, GB"),
        rows=[
            (
                name,
                *(
                    _gb(held.memory[name]) if name in held.memory else None
                    for held in (mine, plain)
                ),
            )
            for name in dict.fromkeys((*mine.memory, *plain.memory))
        ],
    )


def _notes(
    place: CoresAtWork, steps: _Steps, errors: Sequence[dict[str, Any]], dtype: str
) -> list[str]:
    machine = place.machine
    said = []
    mine = steps[0][1]
    if mine.unpriced:
        reasons = ", ".join(f"{p} ({machine.missing[p]})" for p in mine.unpriced)
        said.append(f"A lower bound: {machine.title} has no price for {reasons}.")
    if mine.missing:
        said.append(f"A lower bound, for these are not counted: {', '.join(mine.missing)}.")
    name = machine.name.partition(":")[0]
    if name not in {e["processor"] for e in errors}:
        said.append(
            f"Nothing has run on {machine.title}: no row of it was measured, and the error of its "
            "predictions is unknown. The table below says it of processors that were."
        )
    missed = [e["processor"] for e in errors if e["median_error_percent"] > prediction_check.TARGET]
    if missed:
        said.append(f"Target: {prediction_check.TARGET} %. Missed on {', '.join(missed)}.")
    if dtype == "bfloat16":
        said.append("Sums, noise and optimizer state are taken in float32.")
    units = "multiprocessors" if machine.kind == "gpu" else "core, one thread"
    said.append(f"{machine.title}, {place.cores} {units}. {machine.note}")
    said.append(f"Machine: {machine.machine_source}.")
    said += [f"Source: {source}." for source in machine.sources]
    return said


__all__ = ["BATCHES", "DTYPES", "OPTIMIZERS", "report"]

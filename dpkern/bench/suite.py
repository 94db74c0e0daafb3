"""Choose what a run of benchmarks measures, and measure it row by row."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from typing import Any

import torch

from ..base import dispatch
from ..base.dispatch import OPS, Op
from ..base.errors import BackendError, InvalidInput
from ..base.validate import choice, integer
from ..ops.testing import available_isas
from .case import SIZES, Case, dtypes_of, sized, timed_cases
from .cases import FACTS
from .measure import CACHES, BenchSettings, Row, identity, measure
from .paired import QUICK, StopRule
from .results import digest_of

REFERENCE = "reference"


@dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """The selection of a run.

    Attributes:
        ops: names, or stems such as ``ghost``; empty for all.
        backends: names; empty for every backend that is present and has a kernel, and the
            reference of ops without one.
        sizes: names of ``SIZES``.
        shape: sizes by name that replace those of a case, such as ``{"B": 64}``.
        dtypes: names; empty for each op's usual one.
        threads: numbers of threads.
        caches: names of ``CACHES``.
        isas: instruction sets of the compiled CPU kernels; empty for the best one.
        quick: stop early: a look, no evidence.
        compiled: time what ``torch.compile`` makes of every formulation too.
        seconds: most time of a row's samples; None leaves it to the stop rule.
        done: digests of rows that are there already (``results.digest_of``).
    """

    ops: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    sizes: tuple[str, ...] = SIZES
    shape: Mapping[str, int] | None = None
    dtypes: tuple[str, ...] = ()
    threads: tuple[int, ...] = (1,)
    caches: tuple[str, ...] = ("warm",)
    isas: tuple[str, ...] = ()
    quick: bool = False
    compiled: bool = False
    seconds: float | None = None
    done: tuple[str, ...] = ()

    @property
    def rule(self) -> StopRule:
        """The rule by which sampling of a row stops."""
        rule = QUICK if self.quick else StopRule(seconds=1.5)
        return rule if self.seconds is None else replace(rule, seconds=self.seconds)

    @property
    def complete(self) -> bool:
        """Whether all cases of all ops are measured, so that the result can stand for a table."""
        part = self.ops or self.backends or self.shape or self.dtypes or self.isas or self.quick
        part = part or self.seconds is not None or "warm" not in self.caches
        everywhere = set(torch_threads_here()) <= set(self.threads)
        return not part and everywhere and set(self.sizes) == set(SIZES)

    def as_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        found = asdict(self)
        if not self.done:
            del found["done"]
        return {k: list(v) if isinstance(v, tuple) else v for k, v in found.items()}

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> BenchPlan:
        """Return the plan that ``as_json`` wrote."""
        known = {f.name for f in fields(cls)}
        made: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in found.items() if k in known
        }
        return cls(**made)


def check_plan(plan: BenchPlan) -> None:
    """Refuse what cannot be measured, before anything is.

    Raises:
        InvalidInput: an unknown op, size, dtype, cache or number of threads; a shape that no op
            of the selection has.
        BackendError: a backend that is not available here.
    """
    wanted = ops_of(plan)
    for name in plan.sizes:
        choice(SIZES, size=name)
    for name in plan.caches:
        choice(CACHES, cache=name)
    for count in plan.threads:
        integer(1, os.cpu_count(), threads=count)
    for name in plan.isas:
        choice(available_isas(), isa=name)
    for name in plan.backends:
        choice(dispatch.BACKENDS, backend=name)
        available, reason = dispatch.availability(name)
        if not available:
            raise BackendError(
                f"backend {name!r}",
                expected="a backend that is available here",
                got=f"it {reason}",
                remedy="See `dpkern info` for the backends of this installation.",
            )
    known = {str(kind).removeprefix("torch.") for op in wanted for kind in dtypes_of(op)}
    for name in plan.dtypes:
        choice(tuple(sorted(known - {"None"})), dtype=name)
    for name in plan.shape or {}:
        choice(tuple(size_names(plan)), shape=name)


def ops_of(plan: BenchPlan) -> list[Op[..., Any]]:
    """Return the ops of a plan.

    Raises:
        InvalidInput: a name that is neither an op nor a stem.
    """
    stems = {name.split(".")[0] for name in OPS}
    short = {name.split(".")[1]: name for name in OPS}
    found: set[str] = set()
    for wanted in plan.ops:
        if wanted in OPS:
            found.add(wanted)
        elif wanted in stems:
            found |= {name for name in OPS if name.split(".")[0] == wanted}
        elif wanted in short:
            found.add(short[wanted])
        else:
            raise InvalidInput(
                "op",
                expected=f"an op, or one of {', '.join(sorted(stems))}",
                got=wanted,
                remedy=_nearest(wanted, [*stems, *short, *OPS]) + "`dpkern info` lists the ops.",
            )
    return [OPS[name] for name in sorted(found or OPS)]


def _nearest(wanted: str, known: list[str]) -> str:
    """Return the question whether a similar name was meant; empty where none is similar."""
    near = difflib.get_close_matches(wanted, sorted(known), n=1)
    return f"Did you mean {near[0]}? " if near else ""


def size_names(plan: BenchPlan) -> list[str]:
    """Return the names of sizes that the ops of a plan have."""
    return sorted({name for op in ops_of(plan) for name in _size_names(op)})


def _size_names(op: Op[..., Any]) -> set[str]:
    """Return the names of a benchmark's sizes that ``--shape`` may change, lists without a star."""
    facts = FACTS[op.name]
    found = {name for given in facts.timed.values() for name in {**facts.usual, **given}}
    sized_by = {dim for p in op.schema.signature.tensors for dim in p.dims}
    sized_by |= {*op.schema.signature.sizes}
    return {name.lstrip("*") for name in found if name in sized_by and name[0] != "."}


def backends_of(op: Op[..., Any], plan: BenchPlan) -> list[str]:
    """Return the backends of a row each: those asked for, or all with a kernel here."""
    if plan.backends:
        return [name for name in plan.backends if not isinstance(op._kernel(name), str)]
    able = [name for name in dispatch.BACKENDS if not isinstance(op._kernel(name), str)]
    return [name for name in able if name != REFERENCE] or [REFERENCE]


def cases_of(op: Op[..., Any], plan: BenchPlan) -> list[Case]:
    """Return the calls of an op that a plan measures."""
    known = {str(kind).removeprefix("torch."): kind for kind in dtypes_of(op)}
    kinds = [known[name] for name in plan.dtypes if name in known] if plan.dtypes else [None]
    found = []
    for kind in kinds:
        for case in timed_cases(op, FACTS[op.name], plan.sizes, kind):
            other = _changed_sizes(case, plan.shape or {})
            if plan.shape and not other:
                continue
            found.append(sized(op, FACTS[op.name], case.name, other, case.kind))
    return found


def _changed_sizes(case: Case, shape: Mapping[str, int]) -> dict[str, Any]:
    """Return the sizes of a case that are changed; a list of shapes becomes one flat shape."""
    found: dict[str, Any] = {}
    for name, number in shape.items():
        if name in case.sizes:
            found[name] = number
        elif f"*{name}" in case.sizes:
            lists = isinstance(case.sizes[f"*{name}"], list)
            found[f"*{name}"] = [(number,)] if lists else (number,)
    return found


def selected(plan: BenchPlan) -> Iterator[tuple[Case, str, BenchSettings]]:
    """Yield what a plan measures, in the order of the table."""
    for op in ops_of(plan):
        for case in cases_of(op, plan):
            for backend in backends_of(op, plan):
                isas = plan.isas if backend == "cpu" and plan.isas else (None,)
                for isa, threads, cache in product(isas, plan.threads, plan.caches):
                    settings = BenchSettings(
                        threads=threads,
                        cache=cache,
                        isa=isa,
                        rule=plan.rule,
                        compiled=plan.compiled or (False if plan.quick else None),
                    )
                    yield case, backend, settings


def dropped(plan: BenchPlan) -> dict[str, str]:
    """Return the ops that a plan names and does not measure, and why."""
    found: dict[str, str] = {}
    for op in ops_of(plan):
        if not cases_of(op, plan):
            dtypes = {str(kind).removeprefix("torch.") for kind in dtypes_of(op)}
            unknown = plan.dtypes and not dtypes & set(plan.dtypes)
            found[op.name] = "no such dtype" if unknown else "no such size"
        elif not backends_of(op, plan):
            found[op.name] = f"no kernel for {', '.join(plan.backends)}"
    return found


def rows(plan: BenchPlan) -> Iterator[Row]:
    """Measure what a plan selects; a case that no backend takes is measured by its reference."""
    taken: set[str] = set()
    for case, backend, settings in selected(plan):
        place = digest_of(identity(case, "", replace(settings, isa=None)))
        if digest_of(identity(case, backend, settings)) in plan.done:
            taken.add(place)
            continue
        changed = _changed_sizes(case, plan.shape or {})
        other = {"changed": {n.lstrip("*"): case.sizes[n] for n in changed}} if changed else {}
        row = measure(case, backend, settings) | other
        yield row
        if "refused" not in row:
            taken.add(place)
        is_last = backend == backends_of(case.op, plan)[-1]
        missing = digest_of(identity(case, REFERENCE, settings)) not in plan.done
        if is_last and missing and place not in taken and not plan.backends:
            yield measure(case, REFERENCE, settings) | other


def torch_threads_here() -> tuple[int, ...]:
    """Return the numbers of threads of a full run: one, and all that torch uses."""
    return tuple(sorted({1, torch.get_num_threads()}))

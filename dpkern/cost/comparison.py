"""Compute the numbers of a comparison: costs, reductions, crossovers, sensitivities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..base import validate as check
from ..base.counts import Counts
from ..base.errors import InvalidInput
from . import processors
from ._numbers import percent, tidy
from .autoencoder import PRINTED, VARIANTS, CountOptions
from .processors import Processor
from .sensitivity import crossovers, reduction, sensitivities
from .systems import SYSTEMS, CostModel, check_options, check_size


@dataclass(frozen=True, kw_only=True)
class ComparisonSpec:
    """The systems, processors and sizes that are compared.

    Attributes:
        systems: the last is the baseline.
        machines: processors.
        sizes: (n, l).
        options: way of counting.
    """

    systems: tuple[CostModel, ...]
    machines: tuple[Processor, ...]
    sizes: tuple[tuple[int, int], ...]
    options: CountOptions

    @property
    def baseline(self) -> CostModel:
        """The system that reductions refer to."""
        return self.systems[-1]

    @property
    def others(self) -> tuple[CostModel, ...]:
        """All systems except the baseline."""
        return self.systems[:-1]

    @property
    def largest(self) -> int:
        """The largest n that is searched for crossovers in n."""
        return min(system.largest for system in self.systems)

    def counts(self, system: CostModel, n: int, code: int) -> Counts:
        """Count the operations of a system."""
        return _counts(system, n, code, self.options)

    def price(self, system: CostModel, machine: Processor, n: int, code: int) -> float:
        """Return the price of a system's operations."""
        return machine.price(self.counts(system, n, code))


@lru_cache(maxsize=4096)
def _counts(system: CostModel, n: int, code: int, options: CountOptions) -> Counts:
    return system.form(n, code, options).counts


def asked(
    mechanisms: Sequence[str],
    sizes: Sequence[tuple[int, int]],
    sources: Sequence[str | Path | Processor],
    options: CountOptions | None,
) -> ComparisonSpec:
    """Build the question from names and sizes.

    Raises:
        InvalidInput: fewer than two mechanisms, nothing to compare them at, an unknown or repeated
            name, or options that change nothing.
    """
    names = [check.choice(tuple(SYSTEMS), mechanisms=name) for name in mechanisms]
    if len(set(names)) < 2 or len(set(names)) != len(names):
        raise InvalidInput(
            "mechanisms",
            expected="two or more different names",
            got=", ".join(names) or "none",
            remedy="Name two, or report one with `dpkern cost count`.",
        )
    for name, given in (("sizes", sizes), ("processors", sources)):
        if not given:
            raise InvalidInput(
                name, expected="at least one", got="none", remedy=f"Pass at least one of {name}."
            )
    for n, code in sizes:
        check_size(n, code)
    systems = tuple(SYSTEMS[name] for name in names)
    options = PRINTED if options is None else options
    check_options(systems, options)
    machines = tuple(processors.load(source) for source in sources)
    called = [machine.name for machine in machines]
    if len(set(called)) < len(called):
        raise InvalidInput(
            "processors",
            expected="different names",
            got=", ".join(called),
            remedy="Name each processor once, and give your own file a name of its own.",
        )
    return ComparisonSpec(
        systems=systems,
        machines=machines,
        sizes=tuple((n, code) for n, code in sizes),
        options=options,
    )


def rows(question: ComparisonSpec) -> list[dict[str, Any]]:
    """Return one entry per size and processor."""
    rows = []
    for n, code in question.sizes:
        counts = {s.name: question.counts(s, n, code) for s in question.systems}
        for machine in question.machines:
            place = {"processor": machine.name, "n": n, "l": code}
            prices = {name: machine.price(c) for name, c in counts.items()}
            base = prices[question.baseline.name]
            rows.append(
                {
                    **place,
                    "machine": machine,
                    "costs": [
                        {
                            "mechanism": name,
                            **place,
                            "cost": tidy(prices[name]),
                            "unit": machine.unit,
                            "counts": dict(c),
                            "operations": machine.operations(c),
                            "unpriced": machine.unpriced(c),
                        }
                        for name, c in counts.items()
                    ],
                    "reductions": [
                        {
                            "mechanism": s.name,
                            "baseline": question.baseline.name,
                            **place,
                            "reduction_percent": percent(reduction(prices[s.name], base)),
                        }
                        for s in question.others
                    ],
                }
            )
    return rows


def turns(question: ComparisonSpec) -> list[dict[str, Any]]:
    """Find crossovers in n, with a code of half the features, and in l at every requested n."""
    return [
        fact
        for machine in question.machines
        for system in question.others
        for fact in (
            turns_in_n(question, machine, system),
            *(turns_in_l(question, machine, system, n) for n in dict(question.sizes)),
        )
    ]


def turns_in_n(question: ComparisonSpec, machine: Processor, system: CostModel) -> dict[str, Any]:
    """Find crossovers of one mechanism and the baseline in n = 2 l."""
    axis = {"along": "n, l = n/2", "up_to": question.largest}
    last = question.largest // 2
    return _turns(question, machine, system, lambda code: (2 * code, code), last, 2, axis)


def turns_in_l(
    question: ComparisonSpec, machine: Processor, system: CostModel, n: int
) -> dict[str, Any]:
    """Find crossovers of one mechanism and the baseline in l, at n features."""
    axis = {"along": f"l, n = {n}", "up_to": n}
    return _turns(question, machine, system, lambda code: (n, code), n, 1, axis)


def _turns(
    question: ComparisonSpec,
    machine: Processor,
    system: CostModel,
    size: Callable[[int], tuple[int, int]],
    largest: int,
    step: int,
    axis: dict[str, Any],
) -> dict[str, Any]:
    """Find crossovers along ``size(1)`` to ``size(largest)``, ``step`` apart on the axis."""

    def price(code: int) -> float:
        return question.price(system, machine, *size(code))

    found = crossovers(
        _grid(largest),
        lambda code: price(code) - question.price(question.baseline, machine, *size(code)),
    )
    return {
        **_pair(question, machine, system),
        **axis,
        "points": [
            {
                "from": c.low * step,
                "to": c.high * step,
                "near": round(c.near * step, 2),
                "cost": tidy(price(c.low) + (c.near - c.low) * (price(c.high) - price(c.low))),
                "cheaper_below": c.cheaper_below,
            }
            for c in found
        ],
    }


def _grid(largest: int) -> list[int]:
    """Return 1 to ``largest``, each at most a quarter more than the one before."""
    grid = [1]
    while grid[-1] < largest:
        grid.append(min(largest, grid[-1] + max(1, grid[-1] // 4)))
    return grid


def _pair(question: ComparisonSpec, machine: Processor, system: CostModel) -> dict[str, str]:
    return {
        "mechanism": system.name,
        "baseline": question.baseline.name,
        "processor": machine.name,
    }


def weights(question: ComparisonSpec) -> list[dict[str, Any]]:
    """Return the reduction at the first size for every price."""
    n, code = question.sizes[0]
    base = question.counts(question.baseline, n, code)
    return [
        {
            **_pair(question, machine, system),
            "n": n,
            "l": code,
            "operation": s.operation,
            "cost": tidy(s.cost),
            "slope_points_per_percent": round(s.slope, 4),
            "reduction_if_free": percent(s.free),
            "reduction_if_halved": percent(s.halved),
            "reduction_if_doubled": percent(s.doubled),
        }
        for machine in question.machines
        for system in question.others
        for s in sensitivities(question.counts(system, n, code), base, machine)
    ]


def corrections(question: ComparisonSpec) -> list[dict[str, Any]]:
    """Recount in every way, at the first size and processor, where the options matter."""
    if not all(system.traced for system in question.systems):
        return []
    machine, (n, code) = question.machines[0], question.sizes[0]
    facts = []
    for name, options in VARIANTS.items():
        prices = {s.name: machine.price(s.form(n, code, options).counts) for s in question.systems}
        base = prices[question.baseline.name]
        facts.append(
            {
                "count": name,
                "options": asdict(options),
                "processor": machine.name,
                "n": n,
                "l": code,
                "costs": {s: tidy(price) for s, price in prices.items()},
                "reductions_percent": {
                    s.name: percent(reduction(prices[s.name], base)) for s in question.others
                },
            }
        )
    return facts


def system_fact(system: CostModel) -> dict[str, Any]:
    """Return a mechanism as JSON values."""
    return {
        "name": system.name,
        "title": system.title,
        "scope": system.scope,
        "source": system.source,
    }


def processor_fact(machine: Processor) -> dict[str, Any]:
    """Return a processor as JSON values."""
    return {
        "name": machine.name,
        "title": machine.title,
        "unit": machine.unit,
        "costs": dict(machine.costs),
        "made_of": {primitive: dict(parts) for primitive, parts in machine.made_of.items()},
        "sources": list(machine.sources),
        "note": machine.note,
    }


__all__ = [
    "ComparisonSpec",
    "asked",
    "corrections",
    "processor_fact",
    "rows",
    "system_fact",
    "turns",
    "turns_in_l",
    "weights",
]

"""Compute the numbers of a comparison: costs, reductions, sensitivities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from ..base import validate as check
from ..base.counts import Counts, Itemised
from ..base.errors import InvalidInput
from ..step.noise_tables.named import INLINE, SOURCES
from . import processors
from ._numbers import percent, tidy
from .autoencoder import PRINTED, VARIANTS, CountOptions
from .drawing import PRINTED_SOURCE
from .equal_work import equal_work
from .parts import by_part
from .processors import Processor
from .sensitivity import reduction, sensitivities
from .systems import (
    SYSTEMS,
    CostModel,
    CountWay,
    check_batch,
    check_layer,
    check_options,
    check_size,
)


@dataclass(frozen=True, kw_only=True)
class ComparisonSpec:
    """The systems, processors and sizes that are compared.

    Attributes:
        systems: the last is the baseline.
        machines: processors.
        sizes: (n, l).
        options: way of counting.
        sources: sources of the noise; tables and figures of one source show the first.
        layer: kind of layer at which whole steps are compared.
        batches: samples of a step; tables and figures of one batch show the first.
    """

    systems: tuple[CostModel, ...]
    machines: tuple[Processor, ...]
    sizes: tuple[tuple[int, int], ...]
    options: CountOptions
    sources: tuple[str, ...]
    layer: str | None
    batches: tuple[int, ...] = (1,)

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
        most = min(system.largest for system in self.systems)
        return min(most, _MOST_MAPS) if self.layer == "conv" else most

    @property
    def first(self) -> CountWay:
        """The way of counting with the first source."""
        return self.way(self.sources[0])

    @property
    def whole(self) -> bool:
        """Whether whole steps are compared, which have a batch and parts."""
        return all(system.batched for system in self.systems)

    def way(self, source: str, batch: int | None = None) -> CountWay:
        """Return the way of counting with this source of noise, and batch."""
        batch = self.batches[0] if batch is None else batch
        return CountWay(options=self.options, source=source, layer=self.layer, batch=batch)

    def items(self, system: CostModel, n: int, code: int, way: CountWay | None = None) -> Itemised:
        """Count a system line by line, with the first source and batch unless a way is given."""
        return _items(system, n, code, way or self.first)

    def counts(self, system: CostModel, n: int, code: int, source: str | None = None) -> Counts:
        """Count the operations of a system, with the first source unless one is named."""
        return self.items(system, n, code, self.way(source or self.sources[0])).counts

    def price(
        self, system: CostModel, machine: Processor, n: int, code: int, source: str | None = None
    ) -> float:
        """Return the price of a system's operations."""
        return machine.price(self.counts(system, n, code, source))


_MOST_MAPS = 32
"""The largest map of a convolution that crossovers are searched for: plans take transforms."""


@lru_cache(maxsize=4096)
def _items(system: CostModel, n: int, code: int, way: CountWay) -> Itemised:
    return system.form(n, code, way)


def asked(
    mechanisms: Sequence[str],
    sizes: Sequence[tuple[int, int]],
    processors_: Sequence[str | Path | Processor],
    options: CountOptions | None,
    noise: Sequence[str] | None = None,
    layer: str | None = None,
    batches: Sequence[int] = (1,),
) -> ComparisonSpec:
    """Build the question from names and sizes.

    Without ``noise`` the steps of Appendix G are counted with every source, the printed one first,
    and whole steps with noise that is drawn in place. Without ``layer`` whole steps of which one is
    in the frequency domain are counted at a convolution, others at a dense layer.

    Raises:
        InvalidInput: fewer than two mechanisms, nothing to compare them at, an unknown or repeated
            name, options that change nothing, a layer, batch or source that a mechanism does not
            have, or mechanisms of unequal work.
    """
    names = [check.choice(tuple(SYSTEMS), mechanisms=name) for name in mechanisms]
    if len(set(names)) < 2 or len(set(names)) != len(names):
        raise InvalidInput(
            "mechanisms",
            expected="two or more different names",
            got=", ".join(names) or "none",
            remedy="Name two, or report one with `dpkern cost count`.",
        )
    for name, given in (("sizes", sizes), ("processors", processors_), ("batch", batches)):
        if not given:
            raise InvalidInput(
                name, expected="at least one", got="none", remedy=f"Pass at least one of {name}."
            )
    for n, code in sizes:
        check_size(n, code)
    systems = tuple(SYSTEMS[name] for name in names)
    options = PRINTED if options is None else options
    check_options(systems, options)
    machines = tuple(processors.load(source) for source in processors_)
    called = [machine.name for machine in machines]
    if len(set(called)) < len(called):
        raise InvalidInput(
            "processors",
            expected="different names",
            got=", ".join(called),
            remedy="Name each processor once, and give your own file a name of its own.",
        )
    question = ComparisonSpec(
        systems=systems,
        machines=machines,
        sizes=tuple((n, code) for n, code in sizes),
        options=options,
        sources=_sources(systems, noise),
        layer=_layer(systems, layer),
        batches=tuple(dict.fromkeys(batches)),
    )
    for batch in question.batches:
        check_batch(systems, batch)
    for n, code in question.sizes:
        equal_work(systems, n, code, question.first)
    for source in question.sources:
        for system in systems:
            question.counts(system, *question.sizes[0], source)  # refuses what it does not have
    return question


def _sources(systems: Sequence[CostModel], noise: Sequence[str] | None) -> tuple[str, ...]:
    if noise is None:
        if all(system.presumed == PRINTED_SOURCE for system in systems):
            return (PRINTED_SOURCE, *(name for name in SOURCES if name != PRINTED_SOURCE))
        return (INLINE,)
    found = tuple(check.choice(SOURCES, noise=name) for name in noise)
    if not found or len(set(found)) < len(found):
        raise InvalidInput(
            "noise",
            expected="different names, at least one",
            got=", ".join(found) or "none",
            remedy=f"Name each source once, of {', '.join(SOURCES)}.",
        )
    return found


def _layer(systems: Sequence[CostModel], layer: str | None) -> str | None:
    """Return the one kind of layer that whole steps are compared at."""
    check_layer(systems, layer)
    if layer is None:
        return "conv" if any(system.spectral for system in systems) else None
    return layer


def rows(question: ComparisonSpec) -> list[dict[str, Any]]:
    """Return one entry per size, batch, noise source and processor."""
    rows = []
    for (n, code), batch, source in product(question.sizes, question.batches, question.sources):
        way = question.way(source, batch)
        items = {s.name: question.items(s, n, code, way) for s in question.systems}
        counts = {name: itemised.counts for name, itemised in items.items()}
        epsilons = {s.name: s.epsilon(n, code, way) for s in question.systems}
        parameters = equal_work(question.systems, n, code, way).parameters
        for machine in question.machines:
            place = {"processor": machine.name, "n": n, "l": code, "batch": batch, "noise": source}
            prices = {name: machine.price(c) for name, c in counts.items()}
            base = prices[question.baseline.name]
            rows.append(
                {
                    **place,
                    "machine": machine,
                    "epsilons": epsilons,
                    "costs": [
                        {
                            "mechanism": name,
                            **place,
                            "cost": tidy(prices[name]),
                            "unit": machine.unit,
                            "parameters": parameters,
                            "per_sample": tidy(prices[name] / batch),
                            "per_parameter": tidy(prices[name] / parameters),
                            "parts": _parts(items[name], machine) if question.whole else {},
                            "counts": dict(c),
                            "operations": machine.operations(c),
                            "unpriced": machine.unpriced(c),
                            "epsilon": asdict(epsilons[name]),
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


def _parts(items: Itemised, machine: Processor) -> dict[str, int | float]:
    return {part: tidy(machine.price(counts)) for part, counts in by_part(items).items()}


def pair_fact(question: ComparisonSpec, machine: Processor, system: CostModel) -> dict[str, str]:
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
            **pair_fact(question, machine, system),
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
        way = replace(question.first, options=options)
        prices = {s.name: machine.price(s.form(n, code, way).counts) for s in question.systems}
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
        "source": system.reference,
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
    "pair_fact",
    "processor_fact",
    "rows",
    "system_fact",
    "weights",
]

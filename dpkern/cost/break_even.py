"""The price of a private draw at which a mechanism that draws more costs as much as another.

A record of SPOF has 2 n noisy numbers, one of DP-SGD n. With A and B what both take without noise,
a and b how many numbers they noise, and z the price of noising one:

    A + a z = B + b z     at     z = (B - A) / (a - b)

A cheaper number leaves the advantage where it is printed, a dearer one turns it round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..base.counts import Counts
from ..base.report import Figure, Mark, ReportTable, Series
from ..ops.noise import TILE
from ..step.noise_tables.named import SOURCES
from . import drawing, processors
from ._numbers import percent, tidy
from .autoencoder import noise_sample
from .comparison import ComparisonSpec
from .drawing import PRINTED_SOURCE
from .processors import Processor
from .sensitivity import reduction
from .systems import CostModel

_POINTS = 33


@dataclass(frozen=True, kw_only=True)
class DrawPrices:
    """The prices of two systems as functions of the price of one noisy number.

    Attributes:
        mine, base: price without noise.
        draws, base_draws: noisy numbers of a record.
        each: price of a noisy number by source, of many.
        reductions: reduction in percent by source, of this record, whose counts are whole numbers.
    """

    mine: float
    base: float
    draws: int
    base_draws: int
    each: dict[str, float]
    reductions: dict[str, float | None]

    @classmethod
    def of(cls, question: ComparisonSpec, system: CostModel, machine: Processor) -> DrawPrices:
        """Return the prices at the question's first size."""
        size, baseline = question.sizes[0], question.baseline

        def price(one: CostModel, source: str) -> float:
            return question.price(one, machine, *size, source)

        draws, base_draws = (one.noise_draws(size[0]) for one in (system, baseline))
        read = machine.price(Counts(ADD=1) + noise_sample(question.options))
        drawn = {
            source: machine.price(drawing.coordinates(source, TILE).counts) / TILE
            for source in SOURCES
            if source != PRINTED_SOURCE
        }
        return cls(
            mine=price(system, PRINTED_SOURCE) - draws * read,
            base=price(baseline, PRINTED_SOURCE) - base_draws * read,
            draws=draws,
            base_draws=base_draws,
            each={PRINTED_SOURCE: read, **drawn},
            reductions={s: reduction(price(system, s), price(baseline, s)) for s in SOURCES},
        )

    @property
    def even(self) -> float | None:
        """The price of a noisy number at which both cost the same; None without one."""
        more = self.draws - self.base_draws
        found = (self.base - self.mine) / more if more else -1.0
        return found if found >= 0 else None

    def saved(self, each: float) -> float | None:
        """Return the reduction in percent if noising a number costs ``each``."""
        return reduction(self.mine + self.draws * each, self.base + self.base_draws * each)


def applies(question: ComparisonSpec) -> bool:
    """Whether all systems are records of Appendix G, counted as printed."""
    return all(s.traced for s in question.systems) and not question.options.omitted_terms


def facts(question: ComparisonSpec) -> list[dict[str, Any]]:
    """Return the break-even price of a noisy number for each system and processor."""
    if not applies(question):
        return []
    found = []
    for machine in question.machines:
        for system in question.others:
            prices = DrawPrices.of(question, system, machine)
            found.append(
                {
                    "mechanism": system.name,
                    "baseline": question.baseline.name,
                    "processor": machine.name,
                    "unit": machine.unit,
                    "noisy_numbers": prices.draws,
                    "baseline_noisy_numbers": prices.base_draws,
                    "price_by_source": {s: tidy(each) for s, each in prices.each.items()},
                    "reduction_percent_by_source": {
                        s: percent(less) for s, less in prices.reductions.items()
                    },
                    "break_even": None if prices.even is None else tidy(prices.even),
                    "unpriced": machine.unpriced({"RNG": 1}) != {},
                }
            )
    return found


def table(question: ComparisonSpec, found: Sequence[dict[str, Any]]) -> ReportTable:
    """Build the table of break-even prices."""
    titles = {system.name: system.title for system in question.systems}
    machines = {machine.name: machine.title for machine in question.machines}
    return ReportTable(
        title="Price of a noisy number, and where the saving ends",
        columns=("mechanism", "processor", *SOURCES, "break-even"),
        rows=[
            (
                titles[f["mechanism"]],
                machines[f["processor"]],
                *(_shown(f, s) for s in SOURCES),
                "none" if f["break_even"] is None else f["break_even"],
            )
            for f in found
        ],
        note=f"Draw, rounding bits and release together; the table's is one read and an addition. "
        f"Above the break-even the mechanism costs more than {question.baseline.title}.",
    )


def _shown(fact: dict[str, Any], source: str) -> float | str:
    """Return the price of a noisy number, where the processor prices random words."""
    if fact["unpriced"] and source != PRINTED_SOURCE:
        return "no price"
    price: float = fact["price_by_source"][source]
    return price


def figure(question: ComparisonSpec) -> Figure | None:
    """Draw the saving of the first system against the price of a noisy number, by processor.

    The processors are those requested, and every shipped one that prices random words.
    """
    if not applies(question):
        return None
    system = question.others[0]
    asked = {machine.name: machine for machine in question.machines}
    shipped = [processors.load(name) for name in processors.available() if name not in asked]
    machines = [m for m in (*asked.values(), *shipped) if not m.unpriced({"RNG": 1})]
    if not machines:
        return None
    series, marks = [], []
    for machine in machines:
        prices = DrawPrices.of(question, system, machine)
        unit = prices.each[PRINTED_SOURCE]
        last = max(prices.each.values()) / unit
        x = [last ** (k / (_POINTS - 1)) for k in range(_POINTS)]
        y = [percent(prices.saved(unit * place)) for place in x]
        series.append(Series(label=machine.title, x=[round(place, 4) for place in x], y=y))
        if machine is machines[0]:
            marks = _marks(question, system, prices, unit)
    n, code = question.sizes[0]
    return Figure(
        name="noise-price",
        title=f"What {system.title} saves against {question.baseline.title} as noise becomes real, "
        f"n = {n}, l = {code}",
        caption=f"Left: a table of samples that are read again and again, without any guarantee. "
        f"Right: noise that is drawn. Marked for {machines[0].title}: sources, epsilon claimed "
        "/ certified.",
        kind="lines",
        x_label="price of a noisy number / price of one from the table",
        y_label="% saved",
        series=series,
        marks=marks,
        log_x=True,
    )


def _marks(
    question: ComparisonSpec, system: CostModel, prices: DrawPrices, unit: float
) -> list[Mark]:
    """Mark the sources, of one price together, and the break-even."""
    n, code = question.sizes[0]
    together: dict[float, list[str]] = {}
    for source in (PRINTED_SOURCE, *(s for s in SOURCES if s != PRINTED_SOURCE)):
        together.setdefault(prices.each[source], []).append(source)
    marks = []
    for each, sources in together.items():
        saved = percent(prices.reductions[sources[0]])
        if saved is not None:
            epsilon = system.epsilon(n, code, question.way(sources[0]))
            text = f"{', '.join(sources)}: {f'{saved} %'.replace('-', '−')}, {epsilon.words}"
            marks.append(Mark(x=each / unit, y=saved, text=text))
    if prices.even is not None and prices.even > unit:
        even = prices.even / unit
        marks.append(Mark(x=even, y=0, text=f"break-even: {even:.1f}"))
    return marks


__all__ = ["DrawPrices", "applies", "facts", "figure", "table"]

"""Report what a noise table costs and what it leaks."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from ..base.counts import WALK
from ..base.errors import InvalidInput
from ..base.laws import SCALE_CELLS
from ..base.report import Figure, Report, ReportTable, Series
from ..base.rng import Key
from ..ops._cdt import WORDS_PER_DRAW
from ..privacy.accounting import shown_bound, shown_lower_bound
from ..step.noise_tables import curves
from ..step.noise_tables._cdt_law import CdtLaw
from ..step.noise_tables._table import TableShape, counted_reads
from ..step.noise_tables.curves import Masses
from ..step.noise_tables.sample import table_of

EPSILON = 4.377
"""The epsilon at which a Gaussian with noise multiplier 1 has delta 1e-5."""

WORD_BITS = (16, 20, 24, 32, 53, 64, 96)
_EPSILONS = tuple(k / 4 for k in range(49))
_COUNTED = 256


def cdt_report(*, law: str = "gaussian", word_bits: int = 32) -> Report:
    """Report a cumulative table of the certified law: entries, memory, distance, delta, floor.

    Raises:
        InvalidInput: an unknown law, or a word length outside 8 .. 124.
    """
    chosen = CdtLaw(law, word_bits)
    rows = [_cdt_row(CdtLaw(law, bits)) for bits in sorted({*WORD_BITS, word_bits})]
    ideal, mine = curves.certified(law), curves.table(chosen)
    facts: dict[str, Any] = {
        "kind": "cdt",
        "law": law,
        "word_bits": word_bits,
        "entries": len(chosen.cumulative),
        "table_bits": chosen.bits,
        "random_words_per_draw": WORDS_PER_DRAW,
        "total_variation": float(chosen.variation),
        "shift_cells": SCALE_CELLS,
        "epsilon": EPSILON,
        "delta": mine.delta(SCALE_CELLS, EPSILON),
        "delta_certified_law": ideal.delta(SCALE_CELLS, EPSILON),
        "floor": mine.floor(SCALE_CELLS),
        "by_word_bits": rows,
        **_literature(),
    }
    columns = ("word bits", "entries", "memory, bits", "total variation", "delta", "floor")
    series = [
        Series(label=f"{bits}-bit words", x=_EPSILONS, y=_curve(curves.table(CdtLaw(law, bits))))
        for bits in sorted({16, 24, word_bits})
    ]
    series.append(Series(label="certified law", x=_EPSILONS, y=_curve(ideal)))
    return Report(
        name=f"noise-table-cdt-{law}-{word_bits}",
        title=f"Cumulative table of the {law.capitalize()} law, {word_bits}-bit words",
        summary=(
            f"{len(chosen.cumulative)} entries of {word_bits} bits. A coordinate of the sum that "
            f"moves by one noise scale leaks delta {shown_bound(facts['delta'])} at epsilon "
            f"{EPSILON} (certified law {shown_bound(facts['delta_certified_law'])}); no epsilon "
            f"gets delta below {shown_lower_bound(facts['floor'])}. Certificates set "
            f"(1 + exp(epsilon)) {shown_bound(facts['total_variation'])} aside for each coordinate "
            "of each release."
        ),
        facts=facts,
        tables=(
            ReportTable(
                title=f"Word lengths: neighbours one noise scale apart, epsilon {EPSILON}",
                columns=columns,
                rows=[[row[key] for key in _CDT_KEYS] for row in rows],
                note="Floor: the mass that only one of two neighbours can give.",
            ),
        ),
        figures=(_curve_figure("cdt-curve", series), _floor_figure(rows)),
        notes=(
            "Indices are fresh and secret; the table may be public.",
            "One coordinate, exact integers; floors of many coordinates and releases add up.",
        ),
    )


_CDT_KEYS = ("word_bits", "entries", "table_bits", "total_variation", "delta", "floor")


def _cdt_row(law: CdtLaw) -> dict[str, Any]:
    masses = curves.table(law)
    return {
        "word_bits": law.word_bits,
        "entries": len(law.cumulative),
        "table_bits": law.bits,
        "total_variation": float(law.variation),
        "delta": masses.delta(SCALE_CELLS, EPSILON),
        "floor": masses.floor(SCALE_CELLS),
    }


def _literature() -> dict[str, Any]:
    """Return facts of a Gaussian of 16 cells by rounded probabilities, and of 4096 quantiles."""
    rounded = {bits: curves.rounded_gaussian(bits) for bits in (16, 20, 24, 32, 53)}
    return {
        "rounded_gaussian_16_cells": {
            str(bits): {"delta": m.delta(16, EPSILON), "floor": m.floor(16)}
            for bits, m in rounded.items()
        },
        "quantiles_4096_floor": curves.quantiles(4096).floor(16),
    }


def sample_report(shape: TableShape | None = None, *, coordinates: int = 1 << 20) -> Report:
    """Report a table of samples that is read repeatedly: reads, entropy, period, law, leakage.

    Args:
        shape: contents and reading order.
        coordinates: reads of one release.

    Raises:
        InvalidInput: fewer than one coordinate.
    """
    shape = TableShape() if shape is None else shape
    if coordinates < 1:
        raise InvalidInput(
            "coordinates",
            expected="at least 1",
            got=coordinates,
            remedy="Pass the number of parameters.",
        )
    # The law is that of any table of this shape; a known key makes the report reproducible.
    table = table_of(Key.from_unsafe_seed(0), shape).tolist()
    masses = Masses.of((value, 1) for value in table)
    one = 1 << shape.fraction_bits
    mean, variance = masses.moments()
    worst, finite = masses.worst_ratio(one)
    _, _, counted = counted_reads(shape, table, 0, _COUNTED)
    per_read = {name: count // _COUNTED for name, count in counted.items()}
    facts: dict[str, Any] = {
        "kind": "samples",
        "private": False,
        "guarantee": "no DP guarantee",
        "entries": shape.entries,
        "stride": shape.stride,
        "base": shape.base,
        "word_bits": shape.word_bits,
        "fraction_bits": shape.fraction_bits,
        "distribution": shape.distribution,
        "scrambled": shape.scrambled,
        "prescaled": shape.prescaled,
        "table_bits": shape.entries * shape.word_bits,
        "operations_per_read": per_read,
        "evidence": WALK,
        "macro_operations_per_read": sum(per_read.values()),
        "coordinates": coordinates,
        "reads_per_release": coordinates,
        "period_reads": shape.period,
        "period_releases": _period_releases(shape, coordinates),
        "release_entropy_bits": math.log2(shape.entries),
        "sample_entropy_bits": masses.entropy(),
        "distinct_values": len(masses.mass),
        "mean": mean / one,
        "variance": variance / one**2,
        "variance_of_the_law": 2.0 if shape.distribution == "laplace" else 1.0,
        "worst_probability_ratio": "inf" if math.isinf(worst) else worst,
        "worst_ratio_where_both_are_possible": finite,
        "one_coordinate_floor": masses.floor(one),
        "delta": 1.0,
    }
    return Report(
        name=f"noise-table-samples-{shape.entries}",
        title=f"Table of {shape.entries:,} {shape.distribution.capitalize()} samples, "
        "read again and again",
        summary=(
            f"No DP guarantee (delta = 1 against an adversary who knows the table). A read costs "
            f"{facts['macro_operations_per_read']} operations; a release of any length holds "
            f"{facts['release_entropy_bits']:.0f} bits of chance, and after "
            f"{facts['period_reads']} reads the same noise comes again."
        ),
        facts=facts,
        tables=(_sample_table(facts), _reads_table(per_read)),
        figures=(_law_figure(shape, masses), _sample_curve(shape, masses)),
        notes=(
            "Even one coordinate with a fresh index for each read has this curve: some entries "
            "only one neighbour can reach.",
            "Modelled from the published inventory: two additions, a 2:1 multiplexer, an idle "
            "shifter.",
        ),
    )


def _period_releases(shape: TableShape, coordinates: int) -> int:
    """Return the number of releases after which the pointer returns to its place."""
    return shape.entries // math.gcd(shape.stride * coordinates, shape.entries)


def _sample_table(facts: dict[str, Any]) -> ReportTable:
    names = {
        "entries": "entries",
        "table_bits": "memory, bits",
        "release_entropy_bits": "entropy of a release, bits",
        "sample_entropy_bits": "entropy of a sample, bits",
        "distinct_values": "distinct values",
        "period_reads": "reads until the same noise comes again",
        "period_releases": "releases until then, pointer included",
        "mean": "mean, noise scales",
        "variance": "variance, squared noise scales",
        "variance_of_the_law": "variance of the law",
        "worst_probability_ratio": "worst probability ratio, neighbours one scale apart",
        "worst_ratio_where_both_are_possible": "the same where both can give the value",
        "one_coordinate_floor": "mass that only one of them can give",
    }
    rows = [[text, facts[name]] for name, text in names.items()]
    return ReportTable(
        title="No DP guarantee",
        columns=("property", "value"),
        rows=rows,
        note="Table of samples reused: delta = 1 against an adversary who knows the table.",
    )


def _reads_table(per_read: dict[str, int]) -> ReportTable:
    rows: list[list[str | int]] = [[name, count] for name, count in per_read.items()]
    rows.append(["all", sum(per_read.values())])
    return ReportTable(
        title="Operations of one read, counted",
        columns=("primitive", "count"),
        rows=rows,
        note=f"Reference walk: counted over {_COUNTED} reads of the circuit in plain code.",
    )


def _curve(masses: Masses) -> list[float | None]:
    """Return delta by epsilon; zeros become None for logarithmic axes."""
    found = [masses.delta(SCALE_CELLS, epsilon) for epsilon in _EPSILONS]
    return [delta if delta > 0 else None for delta in found]


def _curve_figure(name: str, series: list[Series]) -> Figure:
    return Figure(
        name=name,
        title="Delta of one coordinate that moves by one noise scale",
        caption="Short words flatten the curve: what only one neighbour can give is lost for good.",
        kind="lines",
        x_label="epsilon",
        y_label="delta",
        series=series,
        log_y=True,
    )


def _floor_figure(rows: list[dict[str, Any]]) -> Figure:
    bits = [row["word_bits"] for row in rows]
    return Figure(
        name="cdt-floor",
        title="What each bit of a word buys",
        caption="Floor and total variation of one coordinate fall by about half with every bit.",
        kind="lines",
        x_label="word bits",
        y_label="probability",
        series=(
            Series(label="delta floor", x=bits, y=[row["floor"] for row in rows]),
            Series(label="total variation", x=bits, y=[row["total_variation"] for row in rows]),
        ),
        log_y=True,
    )


def _law_figure(shape: TableShape, masses: Masses) -> Figure:
    """Draw the table's samples against the law, in bins of a quarter of the scale."""
    one = 1 << shape.fraction_bits
    edges = [k / 4 for k in range(-24, 25)]
    centres = [edge + 0.125 for edge in edges[:-1]]
    held = [0] * len(centres)
    for value, count in masses.mass.items():
        bin_ = math.floor((value / one - edges[0]) * 4)
        if 0 <= bin_ < len(held):
            held[bin_] += count
    cdf = [_distribution(shape.distribution, edge) for edge in edges]
    law = [after - before for before, after in pairwise(cdf)]
    return Figure(
        name="samples-law",
        title="Samples in the table and their law",
        caption="How often samples occur, and how often they should; which one comes is no secret.",
        kind="lines",
        x_label="noise / scale",
        y_label="share",
        series=(
            Series(label="table", x=centres, y=[c / masses.total for c in held], points=True),
            Series(label=shape.distribution, x=centres, y=law),
        ),
    )


def _distribution(law: str, x: float) -> float:
    if law == "gaussian":
        return 0.5 * math.erfc(-x / math.sqrt(2))
    return 0.5 * math.exp(x) if x < 0 else 1 - 0.5 * math.exp(-x)


def _sample_curve(shape: TableShape, masses: Masses) -> Figure:
    one = 1 << shape.fraction_bits
    found = [masses.delta(one, epsilon) for epsilon in _EPSILONS]
    flat = [1.0] * len(_EPSILONS)
    return Figure(
        name="samples-curve",
        title="Delta of one read with a fresh secret index, and of the table as it is used",
        caption="No epsilon helps: values that only one neighbour can give stay; a whole release "
        "gives the neighbour away.",
        kind="lines",
        x_label="epsilon",
        y_label="delta",
        series=(
            Series(label="one read, fresh index", x=_EPSILONS, y=found),
            Series(label="release, table known", x=_EPSILONS, y=flat),
        ),
    )


__all__ = ["cdt_report", "sample_report"]

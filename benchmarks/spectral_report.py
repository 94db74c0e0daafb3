"""Run the spectral benchmark, worker by worker, and write its tables with their targets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .spectral_cases import BY_NAME, Case
from .step_report import HEAPS, Rows, worker

COLUMNS = ("N", "T", "ours", "G", "S", "W", "L2", "L1")
MEMORY = ("N", "T", "ours", "G", "S", "W", "L2")
RATIOS = ("L1/S", "L1/G", "L2/S", "ours/T", "G/T", "S/T", "W/T")


def targets(case: Case) -> dict[str, tuple[str, float]]:
    """Return the target of each ratio: at least or at most; none on the authors' grid but L1."""
    found: dict[str, tuple[str, float]] = {}
    least = min(case.ins, case.outs)
    if case.ins >= 6:
        found |= {"L1/S": (">=", 50), "L1/G": (">=", 20)}
    if least >= 16:
        found["L2/S"] = (">=", 5)
    if case.linear:
        return found
    found["ours/T"] = ("<=", 1.0)
    if case.stride == 1 and case.side >= 8:
        found["G/T"] = ("<=", 2.0)
    if case.stride == 1 and least in (32, 64):
        found["S/T"] = ("<=", 1.0 if least == 64 else 1.6)
    if case.stride == 1:
        found["W/T"] = ("<=", 1.6 if case.side >= 16 else 2.5)
    return found


def missed(case: Case, ratios: dict[str, float]) -> list[str]:
    """Return the ratios that do not reach their target."""
    return [
        ratio
        for ratio, (relation, bound) in targets(case).items()
        if (ratios[ratio] < bound if relation == ">=" else ratios[ratio] > bound)
    ]


def ratios_of(ways: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return the ratios of the fastest ways."""
    best = {column: min(found.values()) for column, found in ways.items()}
    pairs = (ratio.split("/") for ratio in RATIOS)
    return {f"{a}/{b}": best[a] / best[b] for a, b in pairs}


def speed(cases: list[str], threads: list[int], rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a row per case, thread count and allocator."""
    for case in cases:
        for heap in HEAPS:
            for count in threads:
                first = heap == "default" and count == threads[0]
                request = {"case": case, "threads": count, "rounds": rounds, "verify": first}
                row = worker("spectral_speed", request, heap)
                row |= {"heap": heap, "threads": count, "ratios": ratios_of(row["ways ms"])}
                yield row | {"missed": missed(BY_NAME[case], row["ratios"])}


def memory(rows: Rows) -> Iterator[dict[str, Any]]:
    """Yield peak memory of the ways that were fastest, each in a process of its own."""
    seen = {}
    for row in rows:
        seen.setdefault(row["case"], row)
    for case, row in seen.items():
        growth = {}
        for column in MEMORY:
            ways = row["ways ms"][column]
            request = {"case": case, "column": column, "way": min(ways, key=ways.__getitem__)}
            growth[column] = worker("spectral_memory", request)["growth"]
        yield {"case": case, "growth": growth}


STEPS = ("lenet", "resnet")


def steps(threads: int, rounds: int, with_memory: bool) -> Iterator[dict[str, Any]]:
    """Yield whole steps: times in one process, memory of each variant in one of its own."""
    from .spectral_step import VARIANTS

    for task in STEPS:
        request = {"task": task, "threads": threads, "rounds": rounds}
        row = worker("spectral_step", request, "retained")
        if with_memory:
            row["growth"] = {
                name: worker("spectral_step", request | {"variant": name})["growth"]
                for name in VARIANTS
            }
        yield row


def step_table(rows: Rows) -> list[str]:
    """Return milliseconds of a step, over non-private, and the literal forms over it; memory."""
    lines = []
    for row in rows:
        ms, growth = row["ms"], row.get("growth", {})
        for name, taken in ms.items():
            cells = [row["task"], name, _number(taken), _number(taken / ms["non-private"])]
            cells += [_number(ms[other] / taken) for other in ("literal batched", "literal")]
            cells.append(_number(growth[name] / 1e6) if growth else "-")
            lines.append(cells)
    head = ["model", "variant", "ms", "/ non-private", "literal batched / it", "literal / it", "MB"]
    return _table(head, lines)


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _table(columns: list[str], lines: list[list[str]]) -> list[str]:
    head = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return [*head, *("| " + " | ".join(line) + " |" for line in lines), ""]


def speed_table(rows: Rows) -> list[str]:
    """Return milliseconds, then ratios with their targets; a missed one is marked with (!)."""
    lines = []
    for row in rows:
        best = {column: min(ways.values()) for column, ways in row["ways ms"].items()}
        wanted = targets(BY_NAME[row["case"]])
        cells = [f"{row['case']} ({row['kept']:.2f})", str(row["threads"]), row["heap"]]
        cells += [_number(best[column]) for column in COLUMNS]
        for ratio in RATIOS:
            text = _number(row["ratios"][ratio])
            if ratio in wanted:
                relation, bound = wanted[ratio]
                text += f" ({relation} {bound:g}{'!' if ratio in row['missed'] else ''})"
            cells.append(text)
        lines.append(cells)
    return _table(["layer (kept)", "threads", "heap", *COLUMNS, *RATIOS], lines)


def memory_table(rows: Rows) -> list[str]:
    """Return MB over the operands."""
    lines = []
    for row in rows:
        growth = row["growth"]
        cells = [row["case"], *(_number(growth[c] / 1e6) for c in MEMORY)]
        lines.append([*cells, _number(growth["L2"] / max(1, growth["S"]))])
    return _table(["layer", *MEMORY, "L2/S"], lines)


def markdown(machine: dict[str, Any], speeds: Rows, memories: Rows, whole: Rows) -> str:
    """Return what is printed and committed."""
    lines = [
        f"dpkern {machine['dpkern']}, torch {machine['torch']}, {machine['processor']}, "
        f"{machine['cores']} cores. One convolution's release, from input and output gradient to "
        "the noisy weight gradient, float32: least of the repeats, ways in turns in one process. "
        "Every way was first compared, without noise, with the literal pipelines in float64.",
        "",
        "N torch's weight gradient, not private · T DP-SGD of torch operations (best of shifted "
        "products, unfolded products, Gram) · ours DP-SGD of dpkern, which GReDP with a cropped "
        "clip is · G GReDP, spectrum clip · S Spectral-DP, spectrum clip · W Spectral-DP, whitened "
        "clip · L2 literal Spectral-DP, batched, in chunks · L1 as published, sample by sample "
        "(timed on a few samples, its time is proportional to them). In brackets the target; ! "
        "marks a miss.",
        "",
        *speed_table(speeds),
    ]
    if memories:
        lines += ["## Peak memory over the operands, MB", "", *memory_table(memories)]
    if whole:
        lines += [
            "## Whole steps",
            "",
            "Least of the repeats, variants in turns in one process, the allocator keeps freed "
            "pages; flat clipping. The literal forms release convolutions only; their other "
            "parameters take ordinary gradients.",
            "",
            *step_table(whole),
        ]
    return "\n".join(lines)

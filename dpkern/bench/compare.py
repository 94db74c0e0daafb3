"""Compare two revisions: faster, slower, the same or unclear, case by case.

Both run today's cases in processes of their own that take turns, sample by sample, in random order.
Where code and data lie in memory differs from process to process, so every case is sampled in
several pairs of processes, and a verdict needs all of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from . import guard
from .guard import Counters, QuietLimits, QuietVerdict
from .paired import FASTER, MARGIN, SLOWER, UNCLEAR, Rounds, collect
from .revision import Revision
from .server import Server
from .suite import BenchPlan, selected
from .worker import variables

OLD, NEW = "old", "new"
LIMITS = QuietLimits(idle=0.25, waited=0.25, switches=2000)
"""Processes that take turns wait for each other: three to five times what a quiet machine shows."""


def compared(old: Revision, new: Revision, plan: BenchPlan, pairs: int = 3) -> list[dict[str, Any]]:
    """Return a row for each case of a plan, with the verdict on the new revision.

    Args:
        plan: its sizes, ops, backends and rule; one number of threads.
        pairs: of processes.

    Raises:
        DPKernError: a revision does not run.
    """
    cases = [
        {
            "op": case.op.name,
            "case": case.name,
            "dtype": str(case.kind).removeprefix("torch.") if case.kind else None,
            "backend": backend,
        }
        for case, backend, _ in selected(plan)
    ]
    found: list[list[dict[str, Any]]] = [[] for _ in cases]
    for pair in range(pairs):
        servers = partial(Server, threads=plan.threads[0], variables=variables())
        with servers(old.folder) as before, servers(new.folder) as after:
            for case, parts in zip(cases, found, strict=True):
                parts.append(_sampled(case, {OLD: before, NEW: after}, plan, pair))
    return [
        {**case, "threads": plan.threads[0], **judged(parts)}
        for case, parts in zip(cases, found, strict=True)
    ]


def _sampled(
    case: dict[str, Any], servers: dict[str, Server], plan: BenchPlan, seed: int
) -> dict[str, Any]:
    """Return the samples of one case from one pair of processes."""
    answers = {name: server.ask(prepare=case) for name, server in servers.items()}
    failed = {name: answer for name, answer in answers.items() if "burst" not in answer}
    if failed:
        return {"failed": failed}
    burst = max(answer["burst"] for answer in answers.values())
    ways = {name: partial(server.ask, sample=burst) for name, server in servers.items()}
    before = _counters(servers)
    rounds = collect(ways, plan.rule, lambda _: (NEW, OLD), time.perf_counter, seed)
    quiet = guard.verdict(before, _counters(servers), LIMITS, threads=plan.threads[0])
    return {"rounds": rounds, "quiet": quiet}


def _counters(servers: dict[str, Server]) -> Counters:
    """Return the counters of all processes of a comparison together."""
    own = guard.counters()
    others = [Counters(**server.ask(counters=True)) for server in servers.values()]
    sums = {}
    for name in ("cpu", "switches", "waited"):
        values = [getattr(each, name) for each in (own, *others)]
        sums[name] = None if None in values else sum(values)
    whole = {f.name: getattr(own, f.name) for f in fields(own)}
    return Counters(**whole | sums)


def judged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return ratio, interval and verdict of one case from all pairs of processes.

    The verdict is that of all samples together, and unclear where a pair's ratio lies on the other
    side. Pairs that a busy machine disturbed are left out if most were not; else nothing is clear.
    """
    failed = [part["failed"] for part in parts if "failed" in part]
    if failed:
        return {"verdict": UNCLEAR, "failed": failed[0]}
    calm = [part for part in parts if part["quiet"].quiet]
    used = calm if 2 * len(calm) > len(parts) else parts
    every: list[Rounds] = [part["rounds"] for part in used]
    pooled = Rounds(
        {name: [s for rounds in every for s in rounds.seconds[name]] for name in (OLD, NEW)}
    )
    ratio = pooled.ratio(NEW, OLD)
    alone = [rounds.ratio(NEW, OLD) for rounds in every]
    quiet: list[QuietVerdict] = [part["quiet"] for part in parts]
    flags = sorted({flag for part in used for flag in part["quiet"].flags})
    agreed = all(_allows(one.value, ratio.verdict) for one in alone)
    return {
        "old ms": 1e3 * pooled.median(OLD),
        "new ms": 1e3 * pooled.median(NEW),
        "ratio": ratio.value,
        "ratio interval": [ratio.low, ratio.high],
        "pairs": [{"ratio": one.value, "verdict": one.verdict} for one in alone],
        "verdict": ratio.verdict if agreed and not flags else UNCLEAR,
        "flags": flags,
        "guards": [each.as_json() for each in quiet],
        "samples ms": {name: [1e3 * s for s in each] for name, each in pooled.seconds.items()},
    }


def is_wrong(row: dict[str, Any]) -> bool:
    """Whether the new revision's results are not the reference's."""
    return "wrong" in row.get("failed", {}).get(NEW, {})


def _allows(ratio: float, verdict: str) -> bool:
    """Whether the ratio of one pair can stand beside the verdict on all.

    The placement of code in memory moves single pairs by a few per cent in either direction.
    """
    edge = 1 + MARGIN / 2
    return {SLOWER: ratio > edge, FASTER: ratio < 1 / edge}.get(verdict, True)


def lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a table of Markdown."""
    yield "| op and case | backend | old ms | new ms | new / old | 95 % interval | verdict |"
    yield "|" + "---|" * 7
    for row in rows:
        name = f"{row['op']} {row['case']}"
        if "failed" in row:
            (side, answer), *_ = row["failed"].items()
            reason = "; ".join(f"{k}: {v}" for k, v in answer.items())
            yield f"| {name} | {row['backend']} | - | - | - | - | {side} {reason} |"
            continue
        low, high = row["ratio interval"]
        busy = f" (disturbed: {', '.join(row['flags'])})" if row["flags"] else ""
        yield (
            f"| {name} | {row['backend']} | {row['old ms']:.3g} | {row['new ms']:.3g} | "
            f"{row['ratio']:.3f} | {low:.3f} to {high:.3f} | {row['verdict']}{busy} |"
        )

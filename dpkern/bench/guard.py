"""Tell whether the machine was quiet while a row was measured.

Another process that takes a core can make a call on two threads 450 times slower, and its smallest
sample too: no statistic of times shows it. The operating system's counters do. A row is disturbed
if one of them exceeds its limit; it is then marked and has no ratio.
"""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

PROC = Path("/proc")


@dataclass(frozen=True, kw_only=True)
class Counters:
    """The counters of the operating system at one moment; None where it keeps none.

    Attributes:
        wall: seconds.
        cpu: seconds that threads of this process have run.
        waited: seconds that they were ready to run and had no core.
        switches: how often they were interrupted.
        busy: seconds that all cores together have run anything.
        steal: seconds that the hypervisor gave to other machines.
    """

    wall: float
    cpu: float
    waited: float | None
    switches: int
    busy: float | None
    steal: float | None


@dataclass(frozen=True, kw_only=True)
class QuietLimits:
    """The largest shares of the wall time that a quiet machine shows.

    Attributes:
        idle: of time in which no thread of this process ran; a thread that measures alone never
            sleeps.
        idle_together: the same of a row on several threads, which sleep while they wait for one
            another.
        waited: of time that threads waited for a core.
        others: of a core that other processes used.
        steal: of a core that the hypervisor took.
        switches: interruptions per second, beyond the first ten.
    """

    idle: float = 0.05
    idle_together: float = 0.5
    waited: float = 0.05
    others: float = 0.10
    steal: float = 0.01
    switches: float = 200.0


LIMITS = QuietLimits()


@dataclass(frozen=True, kw_only=True)
class QuietVerdict:
    """The counters of one row, as shares of its wall time, and what exceeds its limit.

    Attributes:
        wall: seconds of the row.
        cpu_over_wall: threads of this process that ran at a time, on average.
        waited, others, steal, switches: see ``QuietLimits``; None where they are not known.
        flags: names of limits that were exceeded; empty on a quiet machine.
    """

    wall: float
    cpu_over_wall: float
    waited: float | None
    others: float | None
    steal: float | None
    switches: float
    flags: tuple[str, ...]

    @property
    def quiet(self) -> bool:
        """Whether nothing exceeded its limit."""
        return not self.flags

    def as_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return found | {"flags": list(self.flags)}


def counters(proc: Path = PROC) -> Counters:
    """Read the counters now."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    busy, steal = _all_cores(proc)
    return Counters(
        wall=time.perf_counter(),
        cpu=time.process_time(),
        waited=_waited(proc),
        switches=usage.ru_nivcsw,
        busy=busy,
        steal=steal,
    )


def _waited(proc: Path) -> float | None:
    """Return seconds that this process' threads have waited for a core."""
    total = 0
    try:
        for task in (proc / "self" / "task").iterdir():
            total += int((task / "schedstat").read_text().split()[1])
    except (OSError, IndexError, ValueError):  # no such file here, or a thread that ended
        return None
    return 1e-9 * total


def _all_cores(proc: Path) -> tuple[float | None, float | None]:
    """Return seconds that all cores have run something, and that were stolen from them."""
    try:
        words = (proc / "stat").read_text().split("\n", 1)[0].split()
        ticks = [int(word) for word in words[1:9]]
    except (OSError, ValueError):
        return None, None
    if words[0] != "cpu" or len(ticks) < 8 or not any(ticks):
        return None, None
    second = os.sysconf("SC_CLK_TCK")
    user, nice, system, _, _, irq, softirq, steal = ticks
    return (user + nice + system + irq + softirq) / second, steal / second


def verdict(
    before: Counters,
    after: Counters,
    limits: QuietLimits = LIMITS,
    *,
    threads: int,
    tick: float = 0.01,
) -> QuietVerdict:
    """Compare two readings with the limits.

    Args:
        before, after: the readings.
        limits: the largest shares.
        threads: the number of threads that the row may use.
        tick: resolution of the counters of all cores, in seconds.
    """
    wall = max(after.wall - before.wall, 1e-9)
    cpu = after.cpu - before.cpu

    def share(new: float | None, old: float | None, own: float = 0.0, slack: float = 0.0) -> Any:
        if new is None or old is None:
            return None
        return max(0.0, new - old - own - slack) / wall

    # Two ticks for each end of a counter that is read in ticks.
    others = share(after.busy, before.busy, cpu, 2 * tick)
    steal = share(after.steal, before.steal, 0.0, tick)
    waited = share(after.waited, before.waited)
    switches = after.switches - before.switches
    flags = {
        "idle": cpu / wall < 1 - (limits.idle if threads == 1 else limits.idle_together),
        "waited": waited is not None and waited > limits.waited,
        "others": others is not None and others > limits.others,
        "steal": steal is not None and steal > limits.steal,
        "switches": switches > 10 and (switches - 10) / wall > limits.switches,
    }
    return QuietVerdict(
        wall=wall,
        cpu_over_wall=cpu / wall,
        waited=waited,
        others=others,
        steal=steal,
        switches=switches / wall,
        flags=tuple(name for name, flagged in flags.items() if flagged),
    )

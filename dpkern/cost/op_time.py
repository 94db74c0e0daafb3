"""Predict the time of an op on a processor from its closed form: a roofline of five limits.

    seconds = max(compute, integers, random words, all instructions, traffic) + launches

``compute`` is a product's operations over the processor's peak, or the floating operations of
anything else on their execution units; ``integers`` and ``words`` are those of the lattice and of
the cipher. Instructions that share units or places to start in a clock add up (``clocks``).
``traffic`` is every declared byte over the bandwidth of the smallest memory that holds them all.

The first four are divided by the share that a processor's file says of the op's kernel, if it does.

A primitive without a price is left out, which makes the time a lower bound; ``unpriced`` names it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from ..base import validate as check
from ..base.counts import Itemised
from ..base.errors import InvalidInput
from .processors import Processor

PRODUCTS = ("product.", "ghost.linear_", "ghost.conv_")
"""Beginnings of the names of ops whose work is a matrix product."""
PASSES = {"clip.clip_sum": 2}
"""Number of times that an op reads its operands, where it is not once: norms, then sums."""
WIDE_LINES = ("norms", "squares", "release")
"""Lines whose arithmetic is in float64 where they convert: half as many lanes."""
_LOOKUPS = 2
"""Table reads of a draw, threshold and entry; its form leaves them out."""
_INTEGERS = ("NOT", "AND", "OR", "XOR", "SHIFT", "MUX")
_MOVED = ("LOAD", "STORE")
_NEEDED = ("clock_ghz", "cores", "bandwidth_gb_s", "peak_gflops")


@dataclass(frozen=True, kw_only=True)
class OpTime:
    """The predicted seconds of one op or of several; times add.

    Attributes:
        compute, integers, words, instructions, traffic: seconds of each limit alone.
        launch: seconds of launches or calls.
        seconds: sum of the largest limits, with launches.
        unpriced: primitives that are left out, and how many.
    """

    compute: float = 0.0
    integers: float = 0.0
    words: float = 0.0
    instructions: float = 0.0
    traffic: float = 0.0
    launch: float = 0.0
    seconds: float = 0.0
    unpriced: Mapping[str, int] = field(default_factory=dict)

    @property
    def bound(self) -> str:
        """The limit that decides."""
        limits = {
            "traffic": self.traffic,
            "compute": self.compute,
            "integers": self.integers,
            "random words": self.words,
            "instructions": self.instructions,
            "launches": self.launch,
        }
        return max(limits, key=limits.__getitem__)

    def __add__(self, other: OpTime) -> OpTime:
        unpriced = dict(self.unpriced)
        for primitive, times in other.unpriced.items():
            unpriced[primitive] = unpriced.get(primitive, 0) + times
        return OpTime(
            compute=self.compute + other.compute,
            integers=self.integers + other.integers,
            words=self.words + other.words,
            instructions=self.instructions + other.instructions,
            traffic=self.traffic + other.traffic,
            launch=self.launch + other.launch,
            seconds=self.seconds + other.seconds,
            unpriced=unpriced,
        )


def total(times: Iterable[OpTime]) -> OpTime:
    """Return the sum of times."""
    return sum(times, OpTime())


@dataclass(frozen=True, kw_only=True)
class CoresAtWork:
    """A processor with so many of its cores at work.

    Attributes:
        machine: processor; its file has a ``[machine]`` table.
        cores: cores, or multiprocessors.
        bandwidth: bytes per second that they read and write in memory.
        rounds: rounds of the cipher.
    """

    machine: Processor
    cores: int
    bandwidth: float
    rounds: int = 20

    @classmethod
    def of(
        cls, machine: Processor, cores: int | None = None, *, bandwidth: float | None = None
    ) -> CoresAtWork:
        """Return the processor with so many cores; None takes all.

        Args:
            machine: processor.
            cores: number of cores, at most the processor's.
            bandwidth: bytes per second, where they were measured.

        Raises:
            InvalidInput: a processor without clock, cores, bandwidth and peak, or too many cores.
        """
        figures = machine.machine
        absent = [name for name in _NEEDED if name not in figures]
        if absent:
            raise InvalidInput(
                "processor",
                expected=f"one whose file has [machine] with {', '.join(_NEEDED)}",
                got=f"{machine.name} without {', '.join(absent)}",
                remedy="Name another one, or a TOML file with these figures and their source.",
            )
        most = int(figures["cores"])
        used = most if cores is None else check.integer(1, most, threads=cores)
        if bandwidth is None:
            drawn = used * figures.get("core_bandwidth_gb_s", math.inf)
            share = figures.get("bandwidth_share", 1.0)
            bandwidth = 1e9 * min(drawn, share * figures["bandwidth_gb_s"])
        return cls(machine=machine, cores=used, bandwidth=bandwidth)

    def at_rounds(self, rounds: int) -> CoresAtWork:
        """Return the place with a cipher of so many rounds."""
        return replace(self, rounds=rounds)

    @property
    def clock(self) -> float:
        """Clocks of all cores together in a second."""
        return 1e9 * self.machine.machine["clock_ghz"] * self.cores

    def peak(self, dtype: torch.dtype) -> float:
        """Return the products' operations per second that kernels reach in this format."""
        figures = self.machine.machine
        peak = figures["peak_gflops"]
        if dtype is torch.float64:
            peak /= 2
        if dtype in (torch.bfloat16, torch.float16):
            peak = figures.get("peak_bf16_gflops", peak)
        share = figures.get("product_share", 1.0) * self.cores / figures["cores"]
        return 1e9 * peak * share

    def traffic(self, read: int, written: int) -> float:
        """Return the seconds of moving operands that the smallest memory that holds them keeps.

        A CPU's stores are overlapped with its loads: results in place, or past the caches.
        """
        figures, shared = self.machine.machine, self.machine.kind == "gpu"
        moved = read + written if shared else max(read, written)
        for level in ("l2", "l3"):
            size, rate = figures.get(f"{level}_kb"), figures.get(f"{level}_bytes_per_clock")
            if size is None or rate is None:
                continue
            each = 1 if shared else -(-self.cores // int(figures.get(f"{level}_cores", 1)))
            if moved <= 1024 * size * each / 2:  # something else lies beside them
                clocks = 1e9 * figures["clock_ghz"] * (1 if shared else self.cores)
                return moved / (rate * clocks * figures.get("cache_share", 1.0))
        return moved / self.bandwidth

    def cache_traffic(self, read: int, written: int) -> float:
        """Return the seconds of moving operands if they lay in the second cache."""
        figures = self.machine.machine
        rate = figures.get("l2_bytes_per_clock")
        if rate is None:
            return 0.0
        return max(read, written) / (rate * self.clock * figures.get("cache_share", 1.0))

    def seconds(self, counts: Mapping[str, int], lookups: int = 0) -> float:
        """Return the seconds of these operations, and of table reads, on their units."""
        rest = {p: n for p, n in counts.items() if p != "RNG"}
        words = counts.get("RNG", 0) * self.rounds / 20
        clocks = self.machine.clocks({**rest, "RNG": round(words)})
        clocks += lookups * self.machine.costs.get("LOOKUP", 0.0)
        return clocks / self.clock


def line_of(name: str) -> str:
    """Return the line of ``phase: line``."""
    return name.rsplit(": ", 1)[-1]


def op_time(
    op: str, items: Itemised, place: CoresAtWork, *, dtype: torch.dtype, launches: int = 1
) -> OpTime:
    """Predict one call of an op.

    Args:
        op: name of the op.
        items: its closed form.
        place: where it runs.
        dtype: format of its operands.
        launches: kernels or calls.
    """
    worked: dict[str, int] = {}
    for item in items.items:
        wide = 2 if line_of(item.name) in WIDE_LINES and item.counts["CVT"] else 1
        for primitive, times in item.counts.items():
            if primitive not in _MOVED:
                worked[primitive] = worked.get(primitive, 0) + times * wide
    looked_up = sum(_LOOKUPS * i.counts["XOR"] for i in items.items if line_of(i.name) == "draws")
    product = op.startswith(PRODUCTS)
    integers = {p: n for p, n in worked.items() if p in _INTEGERS}
    words = {p: n for p, n in worked.items() if p == "RNG"}
    floats = {p: n for p, n in worked.items() if p not in _INTEGERS and p != "RNG"}
    if product:
        flops = sum(item.floating for item in items.items)
        compute, instructions = flops / place.peak(dtype), 0.0
    else:
        compute = place.seconds(floats)
        instructions = place.seconds(worked, looked_up)
    read, written = (
        sum(getattr(item, f"bytes_{way}") for item in items.items) for way in ("read", "written")
    )
    passes, share = PASSES.get(op, 1), place.machine.kernels.get(op)
    if share is not None:  # measured in a cache, where it holds for moving too
        instructions = max(instructions, place.cache_traffic(read, written) * passes)
    inside = {
        "compute": compute,
        "integers": 0.0 if product else place.seconds(integers, looked_up),
        "words": place.seconds(words),
        "instructions": instructions,
    }
    limits = {name: seconds / (share or 1.0) for name, seconds in inside.items()}
    limits["traffic"] = place.traffic(read, written) * passes
    launch = 1e-6 * launches * place.machine.machine.get("launch_us", 0.0)
    return OpTime(
        **limits,
        launch=launch,
        seconds=max(limits.values()) + launch,
        unpriced={} if product else place.machine.unpriced(worked),
    )


__all__ = ["PRODUCTS", "CoresAtWork", "OpTime", "op_time", "total"]

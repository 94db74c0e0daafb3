"""Say what machine code takes on a GPU: how many blocks fit, and the time that its pipes need.

The rates of arithmetic are those of ``dpkern.cost.processors`` (``h100``, ``h200``); what no
processor's file prices is here. Not yet run on a GPU: everything is a prediction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dpkern.cost import processors

WARP = 32


@dataclass(frozen=True)
class Multiprocessor:
    """What limits the blocks of a multiprocessor.

    Attributes:
        threads, blocks: the most at a time.
        shared: bytes of shared memory for all of them, 1 KiB of which each block's system takes
            from compute capability 8.0 on.
        block_shared: bytes that one block may have.
    """

    threads: int
    blocks: int
    shared: int
    block_shared: int


REGISTERS = 65536
"""32-bit registers of a multiprocessor, given to warps 256 at a time."""
MULTIPROCESSORS = {
    75: Multiprocessor(1024, 16, 64 << 10, 64 << 10),
    80: Multiprocessor(2048, 32, 164 << 10, 163 << 10),
    86: Multiprocessor(1536, 16, 100 << 10, 99 << 10),
    89: Multiprocessor(1536, 24, 100 << 10, 99 << 10),
    90: Multiprocessor(2048, 32, 228 << 10, 227 << 10),
    100: Multiprocessor(2048, 32, 228 << 10, 227 << 10),
}
"""By compute capability (NVIDIA, CUDA C++ Programming Guide, "Technical Specifications per Compute
Capability")."""
LANES = {"fp64": 64.0, "lsu": 32.0, "control": 64.0, "uniform": 64.0, "tensor": 1.0}
"""Threads per clock of a multiprocessor that no processor's file prices: float64 of compute
capability 9.0 and load-store units (NVIDIA, H100 Tensor Core GPU Architecture); jumps and uniform
instructions, of which a warp issues one in half a clock. Products on tensor cores are priced by
their FLOPs instead."""
ISSUED = 128.0
"""Threads whose instruction four schedulers issue in a clock."""
TENSOR_FLOPS = 4096
"""Of a multiprocessor and clock, bfloat16, dense: 989 TFLOP/s of an H100."""
L2 = 5.5e12
"""Bytes per second out of the second-level cache, as others have measured on an H100."""


def blocks(capability: int, threads: int, registers: int, shared: int) -> int:
    """Return how many blocks of a kernel a multiprocessor holds at a time."""
    has = MULTIPROCESSORS[capability]
    warps = -(-threads // WARP)
    of_warp = -(-registers * WARP // 256) * 256
    by_registers = REGISTERS // max(1, of_warp * warps)
    reserved = 1024 if capability >= 80 else 0
    by_shared = has.shared // (shared + reserved) if shared + reserved else has.blocks
    return min(has.blocks, has.threads // (warps * WARP), by_registers, by_shared)


def occupancy(capability: int, threads: int, registers: int, shared: int) -> float:
    """Return the share of a multiprocessor's threads that run at a time."""
    held = blocks(capability, threads, registers, shared)
    return held * threads / MULTIPROCESSORS[capability].threads


@dataclass(frozen=True)
class Gpu:
    """A GPU's speeds.

    Attributes:
        name: of the processor.
        title: in words.
        clocks: cycles of all multiprocessors in a second.
        bandwidth: bytes per second, as its data sheet says.
        lanes: threads per clock of a multiprocessor, by pipe.
    """

    name: str
    title: str
    clocks: float
    bandwidth: float
    lanes: Mapping[str, float]

    @classmethod
    def load(cls, name: str) -> Gpu:
        """Load a processor of ``dpkern.cost``."""
        found = processors.load(name)
        integer, special = 1 / found.costs["INT"], 1 / found.costs["SFU"]
        lanes = {**LANES, "alu": integer, "xu": special, "fma": 1 / found.costs["MUL"]}
        clocks = found.machine["cores"] * found.machine["clock_ghz"] * 1e9
        return cls(name, found.title, clocks, found.machine["bandwidth_gb_s"] * 1e9, lanes)

    def cycles(self, pipes: Mapping[str, float], tensor_flops: float = 0.0) -> tuple[float, str]:
        """Return cycles of a multiprocessor per thread, and the pipe that takes them.

        Args:
            pipes: instructions of a thread by pipe.
            tensor_flops: a thread's share of products on tensor cores.
        """
        times = {pipe: n / self.lanes[pipe] for pipe, n in pipes.items() if pipe != "tensor"}
        times["issue"] = sum(pipes.values()) / ISSUED
        times["tensor"] = tensor_flops / TENSOR_FLOPS
        slowest = max(times, key=lambda pipe: times[pipe])
        return times[slowest], slowest

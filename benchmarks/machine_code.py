"""Read the machine code of device kernels: loops, instructions by pipe, widths of accesses.

Input is the text of ``cuobjdump -sass``. A loop goes from a jump back to where it leads. Pipes are
those of compute capability 9.0 (NVIDIA's profiling guide, "Pipelines"): integer and logic
instructions run in the ALU, float32 and integer products in the FMA units, conversions and roots in
the XU, float64 in a pipe of its own, memory instructions in the LSU, and what is the same for a
whole warp in the uniform datapath.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

_FUNCTION = re.compile(r"^\s*Function : ", re.MULTILINE)
_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+([^;]*?)\s*;")
_JUMP = re.compile(r"^BRA\S*\b.*?\b0x([0-9a-f]+)")

PIPES: dict[str, tuple[str, ...]] = {
    "tensor": ("HMMA", "IMMA", "DMMA", "HGMMA", "UTCHMMA"),
    "fp64": ("DADD", "DMUL", "DFMA", "DSETP"),
    "fma": ("FADD", "FMUL", "FFMA", "IMAD", "IMUL", "FADD2", "FMUL2", "FFMA2", "HFMA2", "HADD2",
            "HMUL2"),
    "xu": ("MUFU", "F2F", "F2I", "I2F", "FRND", "I2I", "POPC", "FLO", "BREV", "F2FP"),
    "lsu": ("LD", "ST", "LDG", "STG", "LDS", "STS", "LDSM", "STSM", "LDL", "STL", "LDC", "LDGSTS",
            "ATOM", "ATOMG", "ATOMS", "RED", "REDG", "SHFL"),
    "control": ("BRA", "BRX", "BSYNC", "BSSY", "CALL", "RET", "EXIT", "NOP", "BAR", "WARPSYNC",
                "DEPBAR", "LDGDEPBAR", "WARPGROUP", "SYNCS", "FENCE", "ERRBAR", "MEMBAR", "YIELD"),
}  # fmt: skip
_PIPE = {name: pipe for pipe, names in PIPES.items() for name in names}
_WIDTHS = {"8": 1, "U8": 1, "S8": 1, "16": 2, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        place: its address.
        name: opcode with its modifiers, without the predicate.
        text: with its operands.
    """

    place: int
    name: str
    text: str

    @property
    def base(self) -> str:
        """The opcode without modifiers."""
        return self.name.split(".")[0]

    @property
    def pipe(self) -> str:
        """The pipe that it runs in."""
        if self.base in _PIPE:
            return _PIPE[self.base]
        return "uniform" if self.base.startswith("U") or self.base == "R2UR" else "alu"

    @property
    def bytes(self) -> int:
        """Bytes that a thread moves, of memory instructions."""
        found = [_WIDTHS[part] for part in self.name.split(".")[1:] if part in _WIDTHS]
        return found[-1] if found else 4

    @property
    def target(self) -> int | None:
        """The place that a jump leads to."""
        found = _JUMP.match(self.text)
        return int(found[1], 16) if found else None


@dataclass(frozen=True)
class Code:
    """A kernel, or a part of it."""

    name: str
    instructions: tuple[Instruction, ...]

    def __len__(self) -> int:
        return len(self.instructions)

    @property
    def pipes(self) -> Counter[str]:
        """How many instructions by pipe."""
        return Counter(one.pipe for one in self.instructions)

    def count(self, *bases: str) -> int:
        """Return how many instructions have one of these opcodes."""
        return sum(one.base in bases for one in self.instructions)

    def widths(self, *bases: str) -> Counter[int]:
        """Return how many of these memory instructions move how many bytes."""
        return Counter(one.bytes for one in self.instructions if one.base in bases)

    @property
    def local(self) -> int:
        """How many instructions read or write local memory."""
        return self.count("LDL", "STL")

    @property
    def flushing(self) -> list[str]:
        """Instructions that take denormal numbers for zero, but for reciprocals and roots.

        Exact divisions and roots begin with an approximate one, and scale denormal numbers first.
        """
        return [one.text for one in self.instructions if ".FTZ" in one.name]

    @cached_property
    def loops(self) -> list[Code]:
        """All loops, by where they begin, outer ones first."""
        ends = {
            (one.target, one.place)
            for one in self.instructions
            if one.target is not None and one.target < one.place
        }
        return [
            Code(self.name, tuple(i for i in self.instructions if begin <= i.place <= end))
            for begin, end in sorted(ends, key=lambda loop: (loop[0], -loop[1]))
        ]

    def holds(self, other: Code) -> bool:
        """Whether another part of the kernel lies inside of this one, and is not all of it."""
        first, last = self.instructions[0].place, self.instructions[-1].place
        inner = other.instructions
        return first <= inner[0].place and inner[-1].place <= last and len(inner) < len(self)

    @property
    def outermost(self) -> list[Code]:
        """Loops that lie in no other loop."""
        return [one for one in self.loops if not any(o.holds(one) for o in self.loops)]

    @property
    def innermost(self) -> list[Code]:
        """Loops that hold no other loop."""
        return [one for one in self.loops if not any(one.holds(o) for o in self.loops)]

    @property
    def outside(self) -> Code:
        """What lies in no loop."""
        looped = {one.place for loop in self.outermost for one in loop.instructions}
        kept = tuple(one for one in self.instructions if one.place not in looped)
        return Code(self.name, kept)


def kernels(sass: str) -> list[Code]:
    """Return the kernels of a disassembly; a text without names is one kernel."""
    parts = _FUNCTION.split(sass)
    found = parts[1:] if len(parts) > 1 else parts
    return [Code(part.split("\n", 1)[0].strip(), tuple(_instructions(part))) for part in found]


def _instructions(text: str) -> Sequence[Instruction]:
    found = []
    for place, body in _LINE.findall(text):
        words = body.split()
        if words and words[0].startswith("@"):
            words = words[1:]
        if words:
            found.append(Instruction(int(place, 16), words[0], " ".join(words)))
    return found


def product_loop(code: Code) -> Code | None:
    """Return the innermost loop with the most products on tensor cores, else in float32 or float64.

    None where no loop multiplies.
    """
    for bases, least in ((PIPES["tensor"], 1), (("FFMA", "FFMA2"), 8), (("DFMA",), 8)):
        best = max(code.innermost, key=lambda loop: loop.count(*bases), default=None)
        if best is not None and best.count(*bases) >= least:
            return best
    return None


def scalar_loads(loop: Code) -> int:
    """Return how many loads of a loop move at most 4 bytes a thread from device memory."""
    widths = loop.widths("LDG", "LD", "LDGSTS")
    return sum(times for width, times in widths.items() if width <= 4)

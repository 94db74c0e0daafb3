"""Instructions and bytes per value of the CUDA kernels that touch every parameter or gradient.

A thread's instructions are those outside of loops, once; those of the cipher's loops, once for each
double round but the first, which stands before the loop (``core/chacha.h``); those of the main
loop, as often as the thread's values take. Loops that hardly any thread enters (escapes of a draw)
count nothing, and so do the other rules' loops of an update. What lies outside of loops is counted
whole although a part of it is jumped over: an upper bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from .machine_code import Code

CIPHER_TURNS = 9
"""Of the cipher's loop: ten double rounds, the first of which is made before it."""
TILE_VALUES = 32
"""Coordinates of a thread in a tile."""
HELD_VALUES = 64
"""Entries of a row that a thread holds."""
FLAT_VALUES = 8
"""Elements of a thread of an update that makes no noise."""


@dataclass(frozen=True)
class Case:
    """A kernel's instance at work.

    Attributes:
        title: name of the row.
        source: file of the kernel, without its ending.
        symbol: a part of its mangled name.
        bytes: moved for each value.
        main: finds the main loop among the kernel's.
        values: values of one turn of the main loop.
        thread_values: values of a thread; None where the loop's turns are not fixed.
    """

    title: str
    source: str
    symbol: str
    bytes: float
    main: Callable[[Code], Code]
    values: Callable[[Code], int]
    thread_values: int | None = TILE_VALUES


def is_cipher(loop: Code) -> bool:
    """Whether a loop is a double round of ChaCha: shifts and exclusive ors, no memory."""
    return loop.count("SHF") >= 30 and loop.count("LOP3") >= 30 and loop.pipes["lsu"] == 0


def escapes(loop: Code) -> bool:
    """Whether a loop makes the tail of draws again."""
    return "STG" not in {one.base for one in loop.instructions} and loop.count("LDS", "STS") > 0


def stores(loop: Code) -> int:
    """Return how many values a loop's turn writes to device memory."""
    return loop.count("STG", "ST")


def last_store(code: Code) -> Code:
    """Return the last loop that writes to device memory."""
    return [loop for loop in code.innermost if stores(loop)][-1]


def with_roots(code: Code) -> Code:
    """Return the loop of Adam's rule that writes the most to device memory."""
    loops = [loop for loop in code.loops if any(i.name == "MUFU.RSQ" for i in loop.instructions)]
    return max(loops, key=stored)


def stored(loop: Code) -> int:
    """Return how many bytes a loop's turn writes to device memory."""
    return sum(width * times for width, times in loop.widths("STG", "ST").items())


def adam_values(loop: Code) -> int:
    """Return how many float32 parameters a turn updates: each is written with its two states."""
    return stored(loop) // 12


def widest_loads(code: Code) -> Code:
    """Return the loop that loads the most bytes in accesses of at least 8."""

    def loaded(loop: Code) -> int:
        widths = loop.widths("LDG", "LD")
        return sum(width * times for width, times in widths.items() if width >= 8)

    return max(code.innermost, key=loaded)


def held_rows(code: Code) -> Code:
    """Return the loop over rows that a block holds.

    Of what lies between its barriers, which one warp of eight executes, every eighth instruction.
    """
    loop = max(code.outermost, key=len)
    first, last = (i for i, one in enumerate(loop.instructions) if one.base == "BAR")
    of_one_warp = loop.instructions[first + 1 : last : 8]
    return Code(
        code.name, (*loop.instructions[: first + 1], *of_one_warp, *loop.instructions[last:])
    )


def whole(code: Code) -> Code:
    """Return the kernel itself, where everything is unrolled."""
    return code


UPDATE = "update_tile_kernelIf{}NS_8GaussianE"
CASES = (
    Case("draws", "noise", "draws_kernelINS_8Gaussian", 4, whole, lambda _: TILE_VALUES),
    Case("add noise, int32", "noise", "add_noise_integer_kernelIiNS_8Gauss", 8, last_store, stores),
    Case("add noise, float32", "noise", "add_noise_float_kernelIfNS_8Gauss", 8, last_store, stores),
    Case(
        "add noise, a scale for each", "noise", "add_noise_scaled_kernelIfNS_8Gauss", 16,
        last_store, stores,
    ),
    Case(
        "update, Adam, int32 sums", "update", UPDATE.format("i"), 28, with_roots, adam_values,
    ),
    Case(
        "update, Adam, float32 sums", "update", UPDATE.format("f"), 28, with_roots, adam_values,
    ),
    Case(
        "update, Adam, int32 sums, ring", "update", "update_flat_kernelIfiLb1E", 32, with_roots,
        adam_values, FLAT_VALUES,
    ),
    Case(
        "update, Adam, float32 sums, ring", "update", "update_flat_kernelIffLb1E", 34, with_roots,
        adam_values, FLAT_VALUES,
    ),
    Case(
        "powers of rows, float32", "clip", "12power_kernelIf", 4, whole, lambda _: 16, None
    ),
    Case(
        "weighted sum of rows, float32", "clip", "sum_kernelIfff", 4, widest_loads,
        lambda loop: 4 * loop.widths("LDG", "LD")[16], None,
    ),
    Case(
        "clip and sum at one read, float32", "clip", "clip_held_kernelIffLi4ELb1E", 4, held_rows,
        lambda _: HELD_VALUES, None,
    ),
    Case(
        "clip and sum at one read, bfloat16", "clip", "clip_held_kernelINS0_8Bfloat16EfLi4ELb1E", 2,
        held_rows, lambda _: HELD_VALUES, None,
    ),
    Case(
        "powers of rows, bfloat16", "clip", "12power_kernelINS0_8Bfloat16E", 2, whole,
        lambda _: 16, None,
    ),
    Case(
        "weighted sum of rows, bfloat16", "clip", "sum_kernelINS0_8Bfloat16Eff", 2,
        widest_loads, lambda loop: 4 * loop.widths("LDG", "LD")[8], None,
    ),
    Case(
        "weighted sum of rows, bfloat16, exact", "clip", "sum_kernelINS0_8Bfloat16Eif", 2,
        widest_loads, lambda loop: 4 * loop.widths("LDG", "LD")[8], None,
    ),
)  # fmt: skip


def per_value(case: Case, code: Code) -> tuple[dict[str, float], Code]:
    """Return a thread's instructions per value by pipe, and the main loop."""
    main = case.main(code)
    each = case.values(main)
    if each < 1:
        raise ValueError(f"{case.title}: the main loop works on no value")
    if case.thread_values is None or (main is code and not code.loops):
        return {pipe: n / each for pipe, n in main.pipes.items()}, main
    total: Counter[str] = Counter(code.outside.pipes)
    for loop in code.outermost:
        if is_cipher(loop):
            times = float(CIPHER_TURNS)
        elif loop.instructions[0].place == main.instructions[0].place:
            times = case.thread_values / each
        else:
            times = 0.0
        for pipe, n in loop.pipes.items():
            total[pipe] += n * times  # type: ignore[assignment]
    return {pipe: n / case.thread_values for pipe, n in total.items()}, main

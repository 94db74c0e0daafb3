"""Time draws by their source: the certified law inline, prefetched, or read from a table.

A turn makes 2^24 draws, by pieces that stay in the cache (what a draw costs inside a kernel) or
into one array of 64 MiB. Sources take turns in one process; values are compared with the literal
circuit and the references first.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from dpkern.base.laws import Distribution
from dpkern.base.rng import Key, Purpose
from dpkern.ops import noise, update
from dpkern.ops._draws import Draws
from dpkern.ops.backends import cpu
from dpkern.step.noise_tables import CdtTable, Layout, SampleTable, TableShape
from dpkern.step.noise_tables.sample import POINTER, table_of

TOTAL, PIECE, UPDATED = 1 << 24, 1 << 17, 1 << 20
SEED, STEP = 1, 1
TABLE_BYTES = (1 << 12, 1 << 14, 1 << 16, 1 << 20)
WORD_BITS = (32, 64, 124)
Turns = dict[str, Callable[[], Any]]


def shape_of(size: int, law: str = "gaussian") -> TableShape:
    """Return a table of 16-bit samples of so many bytes, with a stride that no cache likes."""
    entries = size // 2
    return TableShape(entries=entries, stride=entries // 2 + 1, distribution=law)


def sources(count: int, law: Distribution = "gaussian") -> dict[str, Draws]:
    """Return draws of every source, at positions 0 to ``count``."""
    key = Key.from_unsafe_seed(SEED)
    layout = Layout.of(law, (0,), (count,), "cpu", rounding=False)
    tables = {f"table {size >> 10} KiB": SampleTable(shape_of(size, law)) for size in TABLE_BYTES}
    made: dict[str, Draws] = {}
    cumulative = {f"cdt {bits} bits": CdtTable(word_bits=bits) for bits in WORD_BITS}
    for name, source in {**tables, **cumulative}.items():
        source.bind(key, layout)
        made[name] = source.take(STEP)
    given: dict[str, Any] = {"position": 0, "count": count, "distribution": law}
    values = noise.lattice_draws(key.stream(Purpose.NOISE, STEP), **given)
    made["ring (a copy)"] = Draws(0, values)
    return made


def verify(made: dict[str, Draws], count: int) -> None:
    """Compare what kernels read with the circuit and the references.

    Raises:
        SystemExit: they differ; there are no figures then.
    """
    for name, draws in made.items():
        got = noise.source_draws(draws, position=0, count=count)
        if not torch.equal(
            got, noise.source_draws(draws, position=0, count=count, backend="reference")
        ):
            raise SystemExit(f"{name}: the kernel differs from the reference")
    key, shape = Key.from_unsafe_seed(SEED), shape_of(TABLE_BYTES[0])
    word = noise.keystream(key.stream(Purpose.TABLES, 0, POINTER), first_block=0, blocks=1)[0]
    indices, _ = shape.indices(int(word) & (shape.entries - 1), count)
    literal = table_of(key, shape)[indices] << (20 - shape.fraction_bits)
    first = made[f"table {TABLE_BYTES[0] >> 10} KiB"]
    if not torch.equal(noise.source_draws(first, position=0, count=count), literal.int()):
        raise SystemExit("the table differs from the literal circuit")


def drawing(made: dict[str, Draws], count: int, law: Distribution = "gaussian") -> Turns:
    """Return turns of ``TOTAL`` draws into an array of ``count``."""
    out = torch.empty(count, dtype=torch.int32)
    stream = Key.from_unsafe_seed(SEED).stream(Purpose.NOISE, STEP)
    place: dict[str, Any] = {"position": 0, "count": count, "out": out}

    def repeated(call: Callable[[], Any]) -> Callable[[], None]:
        def turn() -> None:
            for _ in range(TOTAL // count):
                call()

        return turn

    inline = repeated(lambda: noise.lattice_draws(stream, distribution=law, **place))
    turns: Turns = {"inline": inline}
    for name, draws in made.items():
        turns[name] = repeated(lambda draws=draws: noise.source_draws(draws, **place))
    return turns


def adding(made: dict[str, Draws], dtype: torch.dtype) -> Turns:
    """Return turns of noise on ``PIECE`` sums in place, ``TOTAL`` in all."""
    key = Key.from_unsafe_seed(SEED)
    x = torch.zeros(PIECE, dtype=dtype)
    given: dict[str, Any] = {"stream": key.stream(Purpose.NOISE, STEP)}
    if dtype.is_floating_point:
        given |= {"scale": 1.0, "rounding": key.stream(Purpose.ROUNDING, STEP)}

    def turn(draws: Draws | None) -> Callable[[], None]:
        def repeated() -> None:
            for _ in range(TOTAL // PIECE):
                noise.add_noise(x, draws=draws, **given)

        return repeated

    return {"inline": turn(None)} | {name: turn(draws) for name, draws in made.items()}


def updating(made: dict[str, Draws]) -> Turns:
    """Return turns of ``update.step`` by SGD on integer sums of ``UPDATED`` parameters."""
    key = Key.from_unsafe_seed(SEED)
    rule, params = update.SGD(lr=0.1), [torch.zeros(UPDATED)]
    sums, state = [torch.zeros(UPDATED, dtype=torch.int32)], rule.init(params)

    def turn(draws: Draws | None) -> Callable[[], None]:
        drawn = update.Noise(
            distribution="gaussian",
            scales=(1.0,),
            stream=key.stream(Purpose.NOISE, STEP),
            positions=(0,),
            draws=draws,
        )

        def repeated() -> None:
            for _ in range(TOTAL // UPDATED):
                update.step(params, sums, rule=rule, state=state, noise=drawn)

        return repeated

    return {"inline": turn(None)} | {name: turn(draws) for name, draws in made.items()}


def timed(turns: Turns, rounds: int) -> dict[str, float]:
    """Return the median nanoseconds of a draw."""
    taken: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name, turn in turns.items():
            start = time.perf_counter()
            turn()
            taken[name].append(time.perf_counter() - start)
    return {name: 1e9 * statistics.median(each) / TOTAL for name, each in taken.items()}


def measured(rounds: int) -> list[dict[str, Any]]:
    """Measure every source in every use, on one thread and each instruction set that is here."""
    before, isa = torch.get_num_threads(), cpu.isa()
    torch.set_num_threads(1)
    small, middle, large = sources(PIECE), sources(UPDATED), sources(TOTAL)
    laplace = sources(PIECE, "laplace")
    verify(small, PIECE)
    uses: dict[str, Turns] = {
        "draws, in the cache": drawing(small, PIECE),
        "Laplace draws, in the cache": drawing(laplace, PIECE, "laplace"),
        "draws, 64 MiB": drawing(large, TOTAL),
        "add_noise int32": adding(small, torch.int32),
        "add_noise float32": adding(small, torch.float32),
        "update.step int32 sums": updating(middle),
    }
    rows: list[dict[str, Any]] = []
    try:
        for name in reversed(cpu.ISAS[1 : cpu.ISAS.index(isa) + 1]):
            cpu.use_isa(name)
            for use, turns in uses.items():
                found = timed(turns, rounds)
                for source, ns in found.items():
                    row = {"isa": name, "use": use, "source": source, "ns": ns}
                    rows.append(row | {"/ inline": ns / found["inline"]})
    finally:
        cpu.use_isa(isa)
        torch.set_num_threads(before)
    return rows


def load() -> float:
    """Return how many processes were running on average in the last minute."""
    return os.getloadavg()[0]


def markdown(machine: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Return the table that is printed and committed: a row per use, a column per source."""
    names = list(dict.fromkeys(row["source"] for row in rows))
    lines = [
        f"dpkern {machine['dpkern']}, torch {machine['torch']}, {machine['processor']}, one "
        f"thread, load {machine['load']:.1f} before. {TOTAL} draws a turn, medians of turns; first "
        "column: ns of an inline draw (ChaCha20), others: parts of it.",
        "",
        "| ISA | use | " + " | ".join(names) + " |",
        "|" + "---|" * (len(names) + 2),
    ]
    for isa, use in dict.fromkeys((row["isa"], row["use"]) for row in rows):
        mine = {row["source"]: row for row in rows if (row["isa"], row["use"]) == (isa, use)}
        cells = [f"{mine['inline']['ns']:.3g} ns"]
        cells += [f"{mine[name]['/ inline']:.3f}" for name in names if name != "inline"]
        lines.append(f"| {isa} | {use} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"

"""Load what a primitive operation costs on a processor from data files that cite every number.

A file is TOML. ``[costs]`` gives units per instruction, ``[per_clock]`` instructions per clock (the
cost is one over it), ``lanes`` the numbers that one instruction works on, and ``[made_of.X]`` the
priced operations that a primitive consists of, such as a square root of seven Newton steps. A
primitive in none of them has no price; ``[missing]`` says why. ``[sets.X]`` gives the prices of
another instruction set: ``zen4:avx2`` is Zen 4 without AVX-512. ``[kernels]`` holds shares that
were measured. The other keys are the fields of ``Processor``. The files that ship are in
``machines/``.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..base.counts import PRIMITIVES
from ..base.errors import InvalidInput

_MACHINES = files(__package__) / "machines"
_TEXTS = ("name", "title", "kind", "unit", "note")
_TABLES = ("costs", "per_clock", "made_of", "missing", "machine", "pipes", "sets", "kernels")
_OF_A_SET = ("costs", "per_clock", "made_of", "pipes", "lanes", "issue")
_FIGURES = (
    *("clock_ghz", "cores", "bandwidth_gb_s", "core_bandwidth_gb_s", "memory_gb", "launch_us"),
    *("peak_gflops", "peak_tf32_gflops", "peak_bf16_gflops", "product_share", "bandwidth_share"),
    *("l2_kb", "l2_bytes_per_clock", "l3_kb", "l3_bytes_per_clock"),
    *("l2_cores", "l3_cores", "cache_share", "process_nm"),
    *("own_product_share", "convolution_share", "call_us", "own_call_us"),
)


@dataclass(frozen=True, kw_only=True)
class Processor:
    """Prices of operations.

    Attributes:
        name: name on the command line.
        title: name in words.
        kind: ``model``, ``cpu`` or ``gpu``.
        unit: meaning of a cost of 1, such as ``macro-operations``.
        sources: origins of the numbers; at least one.
        costs: units per number: of primitives, and of the operations that ``made_of`` names.
        made_of: primitive -> how many of which priced operations.
        missing: primitive -> why it has no price.
        note: note that a reader of a price needs.
        machine: figures that a source gives. ``clock_ghz``; ``cores`` (or multiprocessors);
            ``bandwidth_gb_s`` of the memory, and ``core_bandwidth_gb_s`` of it that one core
            draws; ``peak_gflops`` of products, float32 and others; the shares of peak and
            bandwidth that kernels reach; ``l2_kb`` and ``l3_kb`` of a core (or of all
            multiprocessors), with bytes per clock of each; ``launch_us`` of a kernel or call.
        machine_source: source of ``machine``.
        pipes: operations that share an execution unit, by its name. Others have one of their own.
        issue: instructions that start in a clock, times the lanes. None sets no bound.
        kernels: op -> the share of its limits within a core that its kernel reaches, as measured at
            a size that fits a cache. Above 1 where the kernel does less than the closed form.
        kernels_source: source of ``kernels``.
    """

    name: str
    title: str
    kind: str
    unit: str
    sources: tuple[str, ...]
    costs: Mapping[str, float]
    made_of: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    machine: Mapping[str, float] = field(default_factory=dict)
    machine_source: str = ""
    pipes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    issue: float | None = None
    kernels: Mapping[str, float] = field(default_factory=dict)
    kernels_source: str = ""

    def operations(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Return ``counts`` in the operations that have a price, in the file's order."""
        done = dict.fromkeys(self.costs, 0)
        for primitive, times in counts.items():
            for operation, each in self._parts(primitive).items():
                done[operation] += each * times
        return {operation: times for operation, times in done.items() if times}

    def price(self, counts: Mapping[str, int]) -> float:
        """Return what ``counts`` cost, in ``unit``; primitives without a price are left out."""
        return sum(self.costs[o] * times for o, times in self.operations(counts).items())

    def clocks(self, counts: Mapping[str, int]) -> float:
        """Return the clocks of one core that ``counts`` take at least, all units at work.

        The busiest execution unit decides, or the number of instructions that start in a clock.
        """
        done = self.operations(counts)
        shared = {o: pipe for pipe, members in self.pipes.items() for o in members}
        busy: dict[str, float] = {}
        for operation, times in done.items():
            pipe = shared.get(operation, operation)
            busy[pipe] = busy.get(pipe, 0.0) + self.costs[operation] * times
        started = sum(done.values()) / self.issue if self.issue else 0.0
        return max([started, *busy.values()])

    def unpriced(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Return the part of ``counts`` that ``price`` leaves out."""
        return {p: times for p, times in counts.items() if times and not self._parts(p)}

    def _parts(self, primitive: str) -> Mapping[str, int]:
        if primitive in self.made_of:
            return self.made_of[primitive]
        return {primitive: 1} if primitive in self.costs else {}


def available() -> tuple[str, ...]:
    """Return the names of the processors that ship: the paper's model first, then by name."""
    names = (f.name.removesuffix(".toml") for f in _MACHINES.iterdir() if f.name.endswith(".toml"))
    return tuple(sorted(names, key=lambda name: (name != "k7", name)))


def load(source: str | Path | Processor) -> Processor:
    """Load a processor by name, or from the user's own TOML file.

    Raises:
        InvalidInput: no such name or file, no TOML, an unknown key, a missing field, a cost that is
            no finite number >= 0, or a part that has no cost.
    """
    if isinstance(source, Processor):
        return source
    if isinstance(source, str):
        name, _, chosen = source.partition(":")
        if name in available():
            text = (_MACHINES / f"{name}.toml").read_text()
            return parse(text, where=f"{name}.toml", instructions=chosen)
    path = Path(source)
    if not path.is_file():
        raise InvalidInput(
            "processor",
            expected=f"one of {', '.join(available())}, or a TOML file",
            got=str(source),
            remedy="Name one of these, or give the path of a file such as those.",
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise _wrong(str(path), "a TOML file", str(error)) from error
    return parse(text, where=str(path))


def parse(text: str, *, where: str, instructions: str = "") -> Processor:
    """Parse a processor from the text of its file; ``where`` names the file in errors.

    Args:
        instructions: name of a table ``[sets.X]``, whose prices replace those of the file.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _wrong(where, "a TOML file", str(error)) from error
    for name in _TABLES:
        if not isinstance(data.get(name, {}), dict):
            raise _wrong(f"{where}: {name}", "a table", data[name])
    if instructions:
        data = _with_set(data, instructions, where)
    keys = (*_TEXTS, "sources", "lanes", "issue", *_TABLES)
    unknown = data.keys() - set(keys)
    if unknown:
        raise _wrong(where, f"the keys {', '.join(keys)}", min(unknown))
    for name in ("name", "title", "unit"):
        if not isinstance(data.get(name), str) or not data[name]:
            raise _wrong(f"{where}: {name}", "a text", data.get(name))
    kind = data.get("kind", "model")
    if kind not in ("model", "cpu", "gpu"):
        raise _wrong(f"{where}: kind", "model, cpu or gpu", kind)
    sources = data.get("sources")
    if not isinstance(sources, list) or not sources or not all(map(_is_text, sources)):
        raise _wrong(f"{where}: sources", "a list of texts, at least one", sources)
    costs = _costs(data, where)
    made_of = _made_of(data, costs, where)
    missing = data.get("missing", {})
    for primitive, reason in missing.items():
        if primitive not in PRIMITIVES or not _is_text(reason):
            raise _wrong(f"{where}: missing.{primitive}", "a primitive and why", reason)
    _check_names(costs, made_of, missing, where)
    machine = dict(data.get("machine", {}))
    machine_source = machine.pop("source", "")
    for name, value in machine.items():
        if name not in _FIGURES or not _is_cost(value) or not _is_text(machine_source):
            raise _wrong(f"{where}: machine.{name}", f"{', '.join(_FIGURES)}, a source", value)
        most = 1 if name.endswith("_share") else math.inf
        if not name.endswith("_us") and not 0 < value <= most:
            raise _wrong(f"{where}: machine.{name}", "a number > 0, a share <= 1", value)
        if name == "cores" and value != int(value):
            raise _wrong(f"{where}: machine.{name}", "a whole number", value)
    return Processor(
        name=data["name"],
        title=data["title"],
        kind=kind,
        unit=data["unit"],
        sources=tuple(sources),
        costs=costs,
        made_of=made_of,
        missing={p: missing.get(p, "not in the file") for p in _absent(costs, made_of)},
        note=data.get("note", ""),
        machine=machine,
        machine_source=machine_source,
        pipes=_pipes(data, costs, where),
        issue=_issue(data, where),
        **_kernels(data, where),
    )


def _kernels(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return shares by op and their source."""
    shares = dict(data.get("kernels", {}))
    source = shares.pop("source", "")
    for name, share in shares.items():
        if not _is_cost(share) or share == 0 or not _is_text(source):
            raise _wrong(f"{where}: kernels.{name}", "a finite number > 0, a source", share)
    return {"kernels": shares, "kernels_source": source}


def _with_set(data: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    """Return the file's data with the prices of an instruction set."""
    sets = data.get("sets", {})
    chosen = sets.get(name)
    if not isinstance(chosen, dict) or chosen.keys() - set(_OF_A_SET):
        known = ", ".join(sets) or "none"
        raise _wrong(f"{where}: sets.{name}", f"one of {known}, of {', '.join(_OF_A_SET)}", name)
    # Shares of kernels were measured with the instructions of the file.
    rest = {key: value for key, value in data.items() if key not in (*_OF_A_SET, "kernels")}
    named = {"name": f"{data.get('name')}:{name}", "title": f"{data.get('title')}, {name}"}
    return {**rest, **chosen, **named}


def _pipes(
    data: Mapping[str, Any], costs: Mapping[str, float], where: str
) -> dict[str, tuple[str, ...]]:
    """Return the execution units; each operation belongs to one at most."""
    found: dict[str, tuple[str, ...]] = {}
    for pipe, members in data.get("pipes", {}).items():
        before = {o for others in found.values() for o in others}
        fits = isinstance(members, list) and all(o in costs and o not in before for o in members)
        if not fits:
            raise _wrong(f"{where}: pipes.{pipe}", "priced operations of one unit each", members)
        found[pipe] = tuple(members)
    return found


def _issue(data: Mapping[str, Any], where: str) -> float | None:
    issue = data.get("issue")
    if issue is None:
        return None
    if not _is_cost(issue) or issue == 0:
        raise _wrong(f"{where}: issue", "a finite number > 0", issue)
    return float(issue * data.get("lanes", 1))


def _costs(data: Mapping[str, Any], where: str) -> dict[str, float]:
    lanes = data.get("lanes", 1)
    if type(lanes) is not int or lanes < 1:
        raise _wrong(f"{where}: lanes", "an int >= 1", lanes)
    costs: dict[str, float] = {}
    for operation, cost in data.get("costs", {}).items():
        if not _is_cost(cost):
            raise _wrong(f"{where}: costs.{operation}", "a finite number >= 0", cost)
        costs[operation] = cost
    for operation, rate in data.get("per_clock", {}).items():
        if not _is_cost(rate) or rate == 0:
            raise _wrong(f"{where}: per_clock.{operation}", "a finite number > 0", rate)
        if operation in costs:
            raise _wrong(f"{where}: per_clock.{operation}", "one price", "another under costs")
        costs[operation] = 1 / rate
    if not costs:
        raise _wrong(where, "a table [costs] or [per_clock]", "neither")
    return {o: cost / lanes for o, cost in costs.items()} if lanes > 1 else costs


def _made_of(
    data: Mapping[str, Any], costs: Mapping[str, float], where: str
) -> dict[str, dict[str, int]]:
    made_of: dict[str, dict[str, int]] = data.get("made_of", {})
    for primitive, parts in made_of.items():
        place = f"{where}: made_of.{primitive}"
        if primitive not in PRIMITIVES or primitive in costs:
            raise _wrong(place, "a primitive that has no price of its own", primitive)
        if not isinstance(parts, dict) or not parts:
            raise _wrong(place, "a table of operations and how many", parts)
        for operation, times in parts.items():
            if operation not in costs:
                raise _wrong(place, f"one of {', '.join(costs)}", operation)
            if type(times) is not int or times < 1:
                raise _wrong(f"{place}.{operation}", "an int >= 1", times)
    return made_of


def _check_names(
    costs: Mapping[str, float],
    made_of: Mapping[str, Mapping[str, int]],
    missing: Mapping[str, str],
    where: str,
) -> None:
    """Refuse a price that nothing uses, which is a misspelt primitive, and a contradiction."""
    used = {operation for parts in made_of.values() for operation in parts}
    for operation in costs:
        if operation not in (*PRIMITIVES, "LOOKUP") and operation not in used:
            raise _wrong(f"{where}: {operation}", f"one of {', '.join(PRIMITIVES)}", operation)
    for primitive in missing:
        if primitive in costs or primitive in made_of:
            raise _wrong(f"{where}: missing.{primitive}", "no price elsewhere", "one")


def _absent(costs: Mapping[str, float], made_of: Mapping[str, object]) -> list[str]:
    return [p for p in PRIMITIVES if p not in costs and p not in made_of]


def _is_cost(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value >= 0


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _wrong(name: str, expected: str, got: object) -> InvalidInput:
    return InvalidInput(name, expected=expected, got=got, remedy="Compare with machines/k7.toml.")


__all__ = ["Processor", "available", "load", "parse"]

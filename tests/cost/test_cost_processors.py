"""Processors: files with sources, prices of counts, the user's own file, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpkern.base.counts import CIPHER, PRIMITIVES, Counts
from dpkern.base.errors import InvalidInput
from dpkern.cost import processors

OWN = """
name = "own"
title = "My own"
unit = "ns"
sources = ["a stopwatch"]
[costs]
ADD = 2
SFU = 0.5
[per_clock]
MUL = 4
[made_of.SQRT]
SFU = 3
ADD = 1
"""


def test_the_source_model_comes_first_and_two_of_each_kind_ship() -> None:
    shipped = [processors.load(name) for name in processors.available()]
    assert shipped[0].name == "k7"
    assert [p.name for p in shipped] == list(processors.available())
    kinds = [p.kind for p in shipped]
    assert kinds.count("cpu") >= 2
    assert kinds.count("gpu") >= 2


@pytest.mark.parametrize("name", processors.available())
def test_every_number_that_ships_has_a_source_and_every_gap_a_reason(name: str) -> None:
    machine = processors.load(name)
    assert machine.sources
    assert all(len(source) > 20 for source in machine.sources)
    assert set(machine.missing) == {
        p for p in PRIMITIVES if p not in machine.costs and p not in machine.made_of
    }
    assert "not in the file" not in machine.missing.values()
    assert bool(machine.machine) == bool(machine.machine_source)


ROTATIONS = {
    "k7": {"ADD": 21, "OR": 20, "XOR": 20, "SHIFT": 40},
    "v100": {"INT": 21, "XOR": 20, "SHIFT": 20},
    "h100": {"INT": 61},
    "h200": {"INT": 61},
    "zen4": {"INT": 21, "XOR": 20, "ROTATE": 20},
    "icelake": {"INT": 21, "XOR": 20, "ROTATE": 20},
    "zen4:avx2": {"INT": 21, "XOR": 20, "SHUFFLE": 10, "SHIFT": 20, "OR": 10},
    "icelake:avx2": {"INT": 21, "XOR": 20, "SHUFFLE": 10, "SHIFT": 20, "OR": 10},
}
"""A word of the cipher where a rotation is one instruction, two shifts and an or, or a shuffle."""


@pytest.mark.parametrize("name", [*processors.available(), "zen4:avx2", "icelake:avx2"])
def test_a_random_word_is_a_sixteenth_of_the_cipher(name: str) -> None:
    machine = processors.load(name)
    if "RNG" in machine.missing:
        return
    word = {p: n // 16 for p, n in CIPHER[20].items()}
    assert word == ROTATIONS["k7"]
    assert dict(machine.made_of["RNG"]) == ROTATIONS[name]
    expected = sum(n * machine.costs[p] for p, n in ROTATIONS[name].items())
    assert machine.price({"RNG": 1}) == pytest.approx(expected, rel=1e-12)


def test_the_busiest_unit_or_the_start_decides() -> None:
    zen4 = processors.load("zen4")
    assert zen4.clocks({"ADD": 16, "MUL": 16}) == 1  # two units of their own
    assert zen4.clocks({"ADD": 16, "CVT": 16}) == 2  # one unit
    assert zen4.clocks({"INT": 0, "XOR": 32, "ADD": 16}) == 1.5  # 48 of 32 that start
    with pytest.raises(InvalidInput, match=r"sets.neon: expected one of avx2"):
        processors.load("zen4:neon")
    text = OWN + '[pipes]\nall = ["ADD", "TAN"]\n'
    with pytest.raises(InvalidInput, match=r"pipes.all: expected priced operations"):
        processors.parse(text, where="own.toml")
    with pytest.raises(InvalidInput, match="issue: expected a finite number > 0"):
        processors.parse("issue = 0\n" + OWN, where="own.toml")


def test_k7_is_the_source_s() -> None:
    k7 = processors.load("k7")
    listed = {"ADD": 1, "SUB": 1, "MUL": 3, "DIV": 32, "EXP": 0, "NOT": 1, "AND": 1, "OR": 1}
    assert {p: k7.costs[p] for p in listed} == listed
    assert k7.price(Counts(SQRT=1)) == 7 * (1 + 3 + 32) == 252
    assert k7.price(Counts(MUX=1)) == 4
    assert k7.unit == "macro-operations"


@pytest.mark.parametrize(
    ("name", "counts", "expected"),
    [
        ("zen4", Counts(ADD=4, DIV=1, SQRT=1), (2 + 3 + 5) / 8),
        ("icelake", Counts(MUL=2, SQRT=2, MUX=4), (1 + 24 + 2) / 16),
        ("v100", Counts(ADD=64, DIV=64), 1 + 4 + 1),
        ("h100", Counts(ADD=128, SQRT=8, AND=64), 1 + 1 + 1),
    ],
)
def test_prices_of_published_throughputs(name: str, counts: Counts, expected: float) -> None:
    assert processors.load(name).price(counts) == pytest.approx(expected, rel=1e-12)


def test_counts_become_priced_operations_and_the_rest_is_named() -> None:
    own = processors.parse(OWN, where="own.toml")
    counts = Counts(ADD=10, MUL=8, SQRT=2, DIV=5)
    assert own.operations(counts) == {"ADD": 12, "SFU": 6, "MUL": 8}
    assert own.price(counts) == 12 * 2 + 6 * 0.5 + 8 / 4
    assert own.unpriced(counts) == {"DIV": 5}
    assert own.missing["DIV"] == "not in the file"
    assert own.price(Counts()) == 0


def test_lanes_share_an_instruction() -> None:
    wide = processors.parse(OWN.replace('unit = "ns"', 'unit = "ns"\nlanes = 4'), where="own.toml")
    own = processors.parse(OWN, where="own.toml")
    counts = Counts(ADD=10, MUL=8, SQRT=2)
    assert wide.price(counts) == own.price(counts) / 4


def test_the_user_s_own_file(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(OWN)
    own = processors.load(file)
    assert own == processors.load(str(file))
    assert processors.load(own) is own
    assert own.kind == "model"


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(InvalidInput, match=r"processor: expected one of k7, .* or a TOML file"):
        processors.load("k8")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("ADD = 2", "ADD = -2", "own.toml: costs.ADD: expected a finite number >= 0"),
        ("ADD = 2", "ADD = inf", "costs.ADD"),
        ("ADD = 2", "ADD = true", "costs.ADD"),
        ("ADD = 2", "ADD = 2\nADDD = 1", "own.toml: ADDD: expected one of ADD"),
        ("MUL = 4", "MUL = 0", "per_clock.MUL: expected a finite number > 0"),
        ("MUL = 4", "ADD = 4", "per_clock.ADD: expected one price"),
        ("SFU = 3", "SFO = 3", "made_of.SQRT: expected one of ADD, SFU, MUL"),
        ("SFU = 3", "SFU = 1.5", "made_of.SQRT.SFU: expected an int >= 1"),
        ("SFU = 3", "SFU = 0", "made_of.SQRT.SFU"),
        ("[made_of.SQRT]", "[made_of.MUL]", "made_of.MUL: expected a primitive that has no price"),
        ("[made_of.SQRT]", "[made_of.ROOT]", "made_of.ROOT"),
        ('name = "own"', "", "own.toml: name: expected a text"),
        ('unit = "ns"', "unit = 3", "own.toml: unit"),
        ('unit = "ns"', 'unit = "ns"\nkind = "tpu"', "kind: expected model, cpu or gpu"),
        ('sources = ["a stopwatch"]', "", "sources: expected a list of texts"),
        ('sources = ["a stopwatch"]', "sources = []", "sources"),
        ('name = "own"', 'name = "own"\nclock = 3', "expected the keys name, .* got clock"),
        ('name = "own"', "name = ", "own.toml: expected a TOML file"),
        ('unit = "ns"', 'unit = "ns"\nlanes = 0', "own.toml: lanes: expected an int >= 1"),
        ('unit = "ns"', 'unit = "ns"\nlanes = 4.0', "own.toml: lanes"),
        ("[costs]", '[missing]\nADD = "why"\n[costs]', "missing.ADD: expected no price elsewhere"),
        ("[costs]", '[missing]\nFOO = "why"\n[costs]', "missing.FOO"),
        ("[costs]", "[machine]\nclock_ghz = 3\n[costs]", "machine.clock_ghz: .* a source"),
        ("[costs]", '[machine]\nsource = "x"\nvolts = 3\n[costs]', "machine.volts"),
    ],
)
def test_a_wrong_file_is_refused(old: str, new: str, message: str) -> None:
    assert old in OWN
    with pytest.raises(InvalidInput, match=message):
        processors.parse(OWN.replace(old, new), where="own.toml")


def test_a_file_without_prices_is_refused() -> None:
    text = OWN[: OWN.index("[costs]")]
    with pytest.raises(InvalidInput, match=r"a table \[costs\] or \[per_clock\]"):
        processors.parse(text, where="own.toml")


@pytest.mark.parametrize("text", [b'name = "x"\ncosts = 3\n', b"\xff\xfe\x00", b"costs = []"])
def test_what_is_not_a_processor_is_refused(text: bytes, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_bytes(text)
    with pytest.raises(InvalidInput, match=r"mine\.toml"):
        processors.load(file)

"""Tiles of Triton's products by trial: on a device that is not here, with a timer that is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dpkern.base.errors import InvalidInput
from dpkern.ops import ghost, testing

pytest.importorskip("triton")
from triton.errors import TritonError

from dpkern.ops.backends._triton import direct, operands, tuned, weighted
from dpkern.ops.backends._triton.tuned import Tile

SHIPPED = Tile(128, 128, 64, 8)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file of tiles, and a device for it."""
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path / "tiles.json"))
    monkeypatch.setattr(tuned, "_place", lambda _: "a device")
    tuned._table.cache_clear()
    yield tmp_path / "tiles.json"
    tuned._table.cache_clear()


def whole(*shape: int) -> torch.Tensor:
    """Return small integers, whose sums are exact in every order."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-3, 4, shape, generator=generator).float()


def timed(monkeypatch: pytest.MonkeyPatch, fastest: int) -> list[Any]:
    """Let the timer find that candidate the fastest; gives what it was asked to time."""
    asked: list[Any] = []

    def milliseconds(run: Any) -> float:
        asked.append(run)
        return 1.0 if len(asked) == fastest + 1 else 2.0

    monkeypatch.setattr(tuned, "_milliseconds", milliseconds)
    return asked


def test_candidates_never_exceed_what_ships_and_keep_its_chunks() -> None:
    tried = tuned.candidates(SHIPPED)
    assert tried[0] == SHIPPED
    assert len(tried) == len(set(tried)) == 6
    for tile in tried:
        assert tile.depth == SHIPPED.depth
        assert tile.rows <= SHIPPED.rows
        assert tile.columns <= SHIPPED.columns
        assert 4 <= tile.warps <= SHIPPED.warps
    assert min(tuned.candidates(Tile(16, 16, 16, 4))) == Tile(16, 16, 16, 4, 2)


def test_every_product_is_tried_once_and_found_in_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, g, factors = whole(3, 40, 70), whole(3, 40, 60), torch.ones(3)
    want = torch.einsum("btp,btd->bpd", g, a)
    used: list[Tile] = []
    keep = direct._store

    def store(given: Any, grads: Any, tile: Tile, tf32: bool) -> torch.Tensor:
        used.append(tile)
        return keep(given, grads, tile, tf32)

    monkeypatch.setattr(direct, "_store", store)
    asked = timed(monkeypatch, 4)

    def run(batch: int = 3) -> None:
        out = torch.zeros(60, 70)
        with testing.emulated("triton"):
            given: dict[str, Any] = {"backend": "triton"}
            squares = ghost.linear_norm(a[:batch], g[:batch], route="direct", **given)
            grads, _ = ghost.linear_gradient(a[:batch], g[:batch], **given)
            ghost.linear_sum(a[:batch], g[:batch], factors[:batch], out, **given)
        assert torch.equal(grads, want[:batch])
        assert torch.equal(out, want[:batch].sum(0))
        assert (squares / want[:batch].double().square().sum((1, 2)) - 1 < 1e-4).all()

    run()
    found = json.loads(file.read_text())["tiles"]
    assert sorted(key.split(";")[0] for key in found) == ["gradient", "norm", "sum"]
    assert all("a device" in key and "positions to 64" in key for key in found)
    first = len(asked)
    assert first == 18  # three products, six tiles
    used.clear()
    run(batch=2)  # another batch: the same tiles, or bits would depend on it
    tuned._table.cache_clear()
    run()
    assert len(asked) == first
    (chosen,) = {Tile(*tile) for key, tile in found.items() if key.startswith("gradient")}
    assert used == [chosen, chosen]


def test_the_fastest_tile_of_the_same_bits_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = torch.tensor([1.0, 2.0])
    tried = tuned.candidates(SHIPPED)

    def attempt(tile: Tile) -> torch.Tensor:
        if tile == tried[2]:
            raise TritonError("more shared memory than there is")
        return numbers * (1 + 2**-20) if tile == tried[1] else numbers.clone()

    times = iter((5.0, 4.0, 1.0, 2.0))  # of those that are left: 0, 3, 4, 5
    monkeypatch.setattr(tuned, "_milliseconds", lambda run: (run(), next(times))[1])
    assert tuned._fastest(tried, attempt) == tried[4]
    for kind in (torch.bfloat16, torch.float32):
        assert tuned._alike(numbers.to(kind), numbers.to(kind))
        assert not tuned._alike(-0.0 * numbers.to(kind), 0.0 * numbers.to(kind))
    assert tuned._alike(numbers.double() * (1 + 1e-5), numbers.double())
    assert not tuned._alike(numbers.double() * (1 + 1e-3), numbers.double())


def test_shares_of_a_sum_are_those_of_the_tile_that_ships(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped, grids = Tile(32, 32, 16, 4), []
    monkeypatch.setattr(weighted, "tile_of", lambda *_: shipped)
    monkeypatch.setattr(weighted, "_PROGRAMS", 8)  # so few that small tiles alone are enough
    monkeypatch.setattr(weighted, "_LEAST", 1)
    keep = weighted.launch

    def launch(kernel: Any, grid: int, *given: Any, **constants: Any) -> None:
        if "ROWS" in constants:
            grids.append((grid, constants["ROWS"], constants["COLUMNS"], given[-1]))
        keep(kernel, grid, *given, **constants)

    monkeypatch.setattr(weighted, "launch", launch)
    timed(monkeypatch, 5)
    a, g, out = whole(4, 16, 64), whole(4, 16, 64), torch.zeros(64, 64)
    with testing.emulated("triton"):
        ghost.linear_sum(a, g, torch.ones(4), out, backend="triton")
    splits, each = weighted.shares(operands.Operands.linear(a, g), shipped)
    assert splits == 2
    for grid, rows, columns, taken in grids:
        assert taken == each
        assert grid == splits * (64 // rows) * (64 // columns)
    assert len(grids) == 6 + 1  # the best again: the timer here runs nothing
    assert torch.equal(out, torch.einsum("btp,btd->pd", g, a))
    (tile,) = json.loads(file.read_text())["tiles"].values()
    assert tile == [16, 16, 16, 4, 3]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-40],
        lambda text: text.replace("128", "256", 1),
        lambda text: "",
        lambda text: "[]",
        lambda text: "[" * 100_000,
        lambda text: '{"sha256": "", "tiles": {"norm": "wide"}}',
    ],
)
def test_a_damaged_file_is_refused(file: Path, damage: Any) -> None:
    table = tuned.TileFile(str(file))
    table.remember("one", SHIPPED)
    again = tuned.TileFile(str(file))
    again.remember("two", SHIPPED)
    table.remember("three", SHIPPED)  # what another process has put there stays
    assert sorted(json.loads(file.read_text())["tiles"]) == ["one", "three", "two"]
    assert tuned.TileFile(str(file)).find("two", SHIPPED) == SHIPPED
    assert tuned.TileFile(str(file)).find("two", SHIPPED._replace(depth=32)) is None
    file.write_text(damage(file.read_text()))
    with pytest.raises(InvalidInput, match="damaged, edited, or another file"):
        tuned.TileFile(str(file))


def test_a_recording_takes_no_time(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "_recorded", lambda: True)
    given = operands.Operands.linear(whole(2, 4, 8), whole(2, 4, 8))
    kind = torch.float32
    assert tuned.tile("sum", given, kind, SHIPPED, lambda _: pytest.fail("it ran")) == SHIPPED
    assert not file.exists()
    name = tuned.key("sum", given, kind, SHIPPED, "a device")
    best = SHIPPED._replace(stages=2)
    tuned.TileFile(str(file)).remember(name, best)
    tuned._table.cache_clear()
    assert tuned.tile("sum", given, kind, SHIPPED, lambda _: pytest.fail("it ran")) == best


def test_nothing_is_tried_without_a_device_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = operands.Operands.linear(whole(2, 4, 8), whole(2, 4, 8))
    for path in ("", str(tmp_path / "tiles.json")):
        monkeypatch.setenv(tuned.VARIABLE, path)
        tuned._table.cache_clear()
        took = tuned.tile("sum", given, torch.float32, SHIPPED, lambda _: pytest.fail("it ran"))
        assert took == SHIPPED
    tuned._table.cache_clear()
    assert list(tmp_path.iterdir()) == []

"""Damaged checkpoints are refused and change nothing; two processes on one path break no read."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from dpkern.base import sealed
from dpkern.base.errors import DPKernError
from tests.engine.damage import Saved, cuts, flips

ENTRIES = 20_000
EVERY = 8
"""Reads between two writes of each process."""


def damaged(n: int) -> dict[str, Any]:
    """``n`` flipped bits, and those of the last 24 bytes; ``n / 5`` truncations, and the edges."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        saved = Saved(Path(folder) / "run.pt")
        found: dict[str, Any] = {"file_bytes": len(saved.content)}
        for name, copies in (
            ("flips", flips(saved.content, n)),
            ("truncations", cuts(saved.content, n // 5)),
        ):
            said: Counter[str] = Counter()
            loaded = []
            for place, content in copies:
                message = saved.refuses(content)
                if message is None:
                    loaded.append(place)
                    break  # the run is no longer fresh
                said[message.split("damaged.pt: ")[-1].split(".")[0]] += 1
            found[name] = {"tried": sum(said.values()) + len(loaded), "loaded": loaded}
            found[name]["refused_as"] = dict(said)
        # The same run, from the same file, undamaged.
        saved.load()
        found["sound_file_loads"] = bool(torch.equal(saved.run.values(), saved.first.values()))
    return found


def _take_part(path: Path, number: int, reads: int, results: Any) -> None:
    torch.set_num_threads(1)
    broken: list[str] = []
    seen = set()
    for i in range(reads):
        try:
            content = sealed.read(path, unsealed="")
            if not bool((content["x"] == content["value"]).all()):
                broken.append("mixed content")
            seen.add(content["value"])
            if i % EVERY == 0:
                value = number * reads + i
                sealed.write(path, {"value": value, "x": torch.full((ENTRIES,), float(value))})
        except DPKernError as error:
            broken.append(str(error))
    results.put((broken, len(seen)))


def shared(reads: int) -> dict[str, Any]:
    """Two processes that read and write one path."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shared.pt"
        sealed.write(path, {"value": 0, "x": torch.zeros(ENTRIES)})
        results: Any = context.Queue()
        both = [
            context.Process(target=_take_part, args=(path, number, reads // 2, results))
            for number in (1, 2)
        ]
        for process in both:
            process.start()
        ended = [results.get(timeout=600) for _ in both]
        for process in both:
            process.join()
        left = sorted(each.name for each in Path(folder).iterdir())
    return {
        "reads": reads,
        "writes": 2 * -(-(reads // 2) // EVERY),
        "broken": [message for broken, _ in ended for message in broken],
        "different_contents_seen": [seen for _, seen in ended],
        "left_in_folder": left,
    }


def run(n: int = 1000) -> dict[str, Any]:
    """``passed`` and ``figures``."""
    started = time.perf_counter()
    damage, two = damaged(n), shared(2 * n)
    return {
        "passed": not damage["flips"]["loaded"]
        and not damage["truncations"]["loaded"]
        and damage["sound_file_loads"]
        and not two["broken"]
        and two["left_in_folder"] == ["shared.pt"],
        "figures": {"damaged": damage, "two processes": two},
        "seconds": round(time.perf_counter() - started, 1),
    }


def headline(figures: dict[str, Any]) -> str:
    """One line."""
    damage, two = figures["damaged"], figures["two processes"]
    counts = [
        f"{damage[name]['tried'] - len(damage[name]['loaded'])} of {damage[name]['tried']} {name}"
        for name in ("flips", "truncations")
    ]
    return f"refused {', '.join(counts)}; {len(two['broken'])} of {two['reads']} reads broken"

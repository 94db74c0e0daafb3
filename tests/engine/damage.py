"""A small saved run, damaged copies of its checkpoint, and whether they are refused."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dpkern.base.errors import DPKernError
from dpkern.engine.schedulers import ExponentialNoise
from tests.engine.engine_run import Run


class Saved:
    """A run after two steps, in a file, and another one that has not begun."""

    def __init__(self, path: Path, **options: Any) -> None:
        given = {"kind": "Adam", "mechanism": None, **options}
        first, self.run = Run(**given), Run(**given)
        schedule = ExponentialNoise(first.optimizer, gamma=0.9)
        self.schedule = ExponentialNoise(self.run.optimizer, gamma=0.9)
        first.train(most=2)
        schedule.step()
        self.first, self.path = first, path
        first.engine.save_checkpoint(
            path=path,
            module=first.module,
            optimizer=first.optimizer,
            noise_scheduler=schedule,
            checkpoint_dict={"epoch": 3, "scores": [0.5, torch.arange(3)]},
        )
        self.content = path.read_bytes()

    def load(self, run: Run | None = None, path: Path | None = None) -> dict[str, Any]:
        """Load into the run that has not begun."""
        run = self.run if run is None else run
        return run.engine.load_checkpoint(
            path=self.path if path is None else path,
            module=run.module,
            optimizer=run.optimizer,
            noise_scheduler=self.schedule,
        )

    def state(self) -> bytes:
        """The bits of everything that loading could change."""
        run = self.run
        parts = (
            run.module.state_dict(),
            run.optimizer.state_dict(),
            run.engine.state_dict(),
            self.schedule.state_dict(),
            (run.optimizer.noise_multiplier, run.loader.position, run.loader._resumed),
        )
        return repr([[*map(str, _flat(part))] for part in copy.deepcopy(parts)]).encode()

    def refuses(self, content: bytes) -> str | None:
        """What the error says, and nothing changed; None if the content was loaded.

        An error of another type is not caught.
        """
        before = self.state()
        damaged = self.path.with_name("damaged.pt")
        damaged.write_bytes(content)
        try:
            self.load(path=damaged)
        except DPKernError as error:
            assert self.state() == before, "refused, and yet something has changed"
            return str(error)
        return None


def _flat(value: Any) -> Iterator[Any]:
    """Every number and name, tensors entry by entry."""
    if isinstance(value, torch.Tensor):
        yield value.detach().flatten().tolist()
    elif isinstance(value, dict):
        for key, part in value.items():
            yield key
            yield from _flat(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _flat(part)
    else:
        yield value


def flipped(content: bytes, bit: int) -> bytes:
    """The content with one bit changed."""
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def flips(content: bytes, count: int, seed: int = 0) -> Iterator[tuple[int, bytes]]:
    """Copies with one bit changed each: chosen ones, then all of the last 24 bytes."""
    bits = random.Random(seed).sample(range(8 * len(content)), count)
    for bit in [*bits, *range(8 * len(content) - 192, 8 * len(content))]:
        yield bit, flipped(content, bit)


def cuts(content: bytes, count: int, seed: int = 0) -> Iterator[tuple[int, bytes]]:
    """Copies that end early: chosen ones, empty, and around the end of the archive."""
    ends = random.Random(seed).sample(range(len(content)), count)
    archive = content.rindex(b"PK\x05\x06") + 22
    for end in [*ends, 0, 1, 21, 22, archive - 1, archive, archive + 1, len(content) - 1]:
        yield end, content[:end]

"""Audit processes that train together: equal noise on all, a batch mask of its own on each."""

from __future__ import annotations

import hashlib
import multiprocessing
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ...base.rng import Purpose
from ...engine.distributed import Processes
from ...engine.sampling import PoissonSampler
from ...ops import noise
from ..bits import LAYER
from ..findings import Check

RECORDS = 256
"""Number of records: masks of q = 1/2 are equal by chance with probability 2^-256."""

_TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class Rank:
    """The draws of one process, as digests.

    Attributes:
        noise: digest of the step's draws.
        mask: digest of its batch.
    """

    noise: str
    mask: str


def drawn(processes: Processes) -> Rank:
    """Return this process's draws with the keys that its group gives it; all ranks must call."""
    key = processes.noise_key(None, 20)
    draws = noise.lattice_draws(key.stream(Purpose.NOISE, 0), position=0, count=512)
    sampling = processes.sampling_key(None, 20)
    batches = PoissonSampler(dataset_size=RECORDS, sample_rate=0.5, steps=1, key=sampling)
    return Rank(_digest(draws), _digest(next(iter(batches))))


def _digest(values: torch.Tensor) -> str:
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()


def judged(ranks: Sequence[Rank]) -> Check:
    """Whether all noises are equal, and all masks different."""
    noises, masks = len({r.noise for r in ranks}), len({r.mask for r in ranks})
    return Check(
        layer=LAYER,
        name="ranks",
        passed=len(ranks) > 1 and noises == 1 and masks == len(ranks),
        text=f"{len(ranks)} processes draw {noises} noise(s) and {masks} batch mask(s)",
        numbers={"processes": len(ranks), "noises": noises, "masks": masks},
    )


def ranks(world: int = 2) -> Check:
    """Start processes on this machine, in a group of the gloo backend, and compare.

    Takes seconds: every process imports torch.

    Args:
        world: number of processes, at least 2.
    """
    if not dist.is_available() or not dist.is_gloo_available():
        return Check(layer=LAYER, name="ranks", passed=None, text="torch has no gloo backend here")
    with tempfile.TemporaryDirectory() as folder:
        # Spawned: a process that has run threads must not be forked.
        context = multiprocessing.get_context("spawn")
        started = [context.Process(target=_process, args=(i, world, folder)) for i in range(world)]
        for process in started:
            process.start()
        for process in started:
            process.join()
        if any(process.exitcode for process in started):
            return Check(layer=LAYER, name="ranks", passed=None, text="a process did not finish")
        found = [Rank(*Path(folder, str(i)).read_text().split()) for i in range(world)]
    return judged(found)


def _process(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    where = Path(folder, "store").as_uri()
    dist.init_process_group(
        "gloo", init_method=where, rank=rank, world_size=world, timeout=_TIMEOUT
    )
    try:
        mine = drawn(Processes(None, torch.device("cpu")))
        Path(folder, str(rank)).write_text(f"{mine.noise} {mine.mask}")
    finally:
        dist.destroy_process_group()


__all__ = ["Rank", "drawn", "judged", "ranks"]

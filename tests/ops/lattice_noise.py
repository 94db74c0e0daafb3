"""The sums of a peer with noise on the lattice: what an audit of precision must not contradict."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dpkern.audit import Claim
from dpkern.audit.subjects.peer import Peer
from dpkern.base.rng import Key, Purpose
from dpkern.ops import noise


@dataclass(frozen=True, kw_only=True)
class Lattice(Peer):
    """Noise from seeded keys, so that an audit can be repeated."""

    library: str = "torch"
    certified: Claim = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "name", "lattice noise")
        object.__setattr__(self, "certified", self.claimed)

    def release(self, data: torch.Tensor, runs: int, seed: int) -> torch.Tensor:
        key = Key.from_unsafe_seed(seed)
        sums = data.to(self.dtype).expand(runs, self.dimension).contiguous()
        streams = {p: key.stream(p, 0) for p in (Purpose.NOISE, Purpose.ROUNDING)}
        return noise.add_noise(
            sums,
            stream=streams[Purpose.NOISE],
            scale=self.noise_sd(),
            rounding=streams[Purpose.ROUNDING],
        )

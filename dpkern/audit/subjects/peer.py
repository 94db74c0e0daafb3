"""Audit the noise of other libraries as they add it: clipped sum plus floating-point noise.

The audit calls their arithmetic as their own code does; it attacks no key or seed. Two facts decide
what the precision of a float reveals: the grid of its noise and the grid of the sum of data and
noise. Opacus' remedy, four normal draws divided by 2, makes it harder to undo the noise's
computation; the sum that it is added to is a float as before.

Source: Opacus 1.6, ``optimizers/optimizer.py``, ``_generate_noise`` and ``add_noise``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch

from ...base import validate as check
from ...base.errors import MissingDependency
from ..bits import precision_pairs
from ..claims import Claim, GaussianDP, NoClaim
from ..subject import Pair, Subject

DTYPES = (torch.float32, torch.float64)
Draw = Callable[[float, torch.Tensor, int], torch.Tensor]
"""A function from ``(sd, like, seed)`` to noise of the shape and dtype of ``like``."""


def _torch(sd: float, like: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.normal(0.0, sd, like.shape, generator=generator, dtype=like.dtype)


def _numpy(sd: float, like: torch.Tensor, seed: int) -> torch.Tensor:
    generator = np.random.default_rng(seed)
    if like.dtype is torch.float32:
        drawn = np.float32(sd) * generator.standard_normal(tuple(like.shape), dtype=np.float32)
    else:
        drawn = generator.normal(0.0, sd, tuple(like.shape))
    return torch.from_numpy(drawn)


def _opacus(sd: float, like: torch.Tensor, seed: int, secure: bool = False) -> torch.Tensor:
    try:
        from opacus.optimizers.optimizer import _generate_noise
    except ModuleNotFoundError as error:
        raise MissingDependency(
            "opacus",
            expected="Opacus, whose noise is to be audited",
            got=str(error),
            remedy="Install it: pip install opacus",
        ) from error
    generator = torch.Generator().manual_seed(seed)
    drawn: torch.Tensor = _generate_noise(sd, like, generator, secure)
    return drawn


def _opacus_secure(sd: float, like: torch.Tensor, seed: int) -> torch.Tensor:
    return _opacus(sd, like, seed, secure=True)


LIBRARIES: dict[str, Draw] = {
    "opacus": _opacus,
    "opacus secure_mode": _opacus_secure,
    "torch": _torch,
    "numpy": _numpy,
}
"""Libraries by name.

Secure mode takes its generator from torchcsprng, which needs torch 1.8.1: an ordinary generator
runs the same arithmetic. Its noise is drawn in torch's default dtype, float32, for float64 too.
"""


@dataclass(frozen=True, kw_only=True)
class Peer(Subject):
    """Gaussian noise of a library on a sum of ``dimension`` coordinates.

    Attributes:
        library: one of ``LIBRARIES``.
        noise_multiplier: sd of the noise over ``bound``.
        bound: L2 norm of one record's contribution.
        dimension: coordinates of the sum. All runs are drawn as one tensor, as a large parameter
            is; torch draws fewer than 16 numbers in another way.
        dtype: float32 or float64.

    Raises:
        InvalidInput: an unknown library, or numbers out of range.
        MissingDependency: the library is not installed (at the first release).
    """

    usual_runs: ClassVar[int] = 100_000

    library: str
    noise_multiplier: float = 1.1
    bound: float = 1.0
    dimension: int = 1
    dtype: torch.dtype = torch.float32
    name: str = field(init=False)
    claimed: Claim = field(init=False)
    certified: Claim = field(init=False)

    def __post_init__(self) -> None:
        check.choice(tuple(LIBRARIES), library=self.library)
        check.positive(noise_multiplier=self.noise_multiplier)
        check.positive(bound=self.bound)
        check.integer(1, dimension=self.dimension)
        check.choice(DTYPES, dtype=self.dtype)
        kind = str(self.dtype).removeprefix("torch.")
        object.__setattr__(self, "name", f"{self.library} noise in {kind}")
        object.__setattr__(self, "claimed", GaussianDP(1 / self.noise_multiplier))
        object.__setattr__(self, "certified", NoClaim())

    def release(self, data: torch.Tensor, runs: int, seed: int) -> torch.Tensor:
        """Return ``[runs, dimension]``: the sum ``data`` plus noise, in the subject's dtype."""
        sums = data.to(self.dtype).expand(runs, self.dimension).contiguous()
        draw = LIBRARIES[self.library]
        return sums + draw(self.noise_multiplier * self.bound, sums, seed)

    def pairs(self, weakest: torch.Tensor | None) -> Sequence[Pair]:
        """Return a record in one coordinate of a sum of zeros: at the bound, and a bit below it.

        Independent noise of equal sd has no weakest direction. An audit compares the bits of the
        first pair; the canary a bit below the bound has the finest bits that its dtype allows,
        which noise on a coarser grid does not hide.
        """
        del weakest
        nobody = torch.zeros(self.dimension, dtype=self.dtype)
        somebody, fine = nobody.clone(), nobody.clone()
        somebody[0] = self.bound
        fine[0] = torch.nextafter(somebody[0], nobody[0])
        return (
            Pair(name="coordinate", without=nobody, present=somebody),
            *precision_pairs(nobody, fine, coordinates=(0,), name="precision, below the bound"),
        )

    def noise_sd(self) -> float:
        """Return the noise scale of every coordinate."""
        return self.noise_multiplier * self.bound


__all__ = ["LIBRARIES", "Peer"]

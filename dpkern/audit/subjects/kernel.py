"""Audit the noise kernels by themselves: many runs are the rows of one call.

``add_noise`` noises a tensor ``[runs, d]`` in place; ``update`` makes the same noise in registers,
inside SGD with learning rate 1 on parameters that are zero. Row r has the coordinates r d to
(r + 1) d - 1 of one stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ...base.laws import LAWS, SCALE_CELLS, SCALE_UNITS
from ...base.rng import Key, Purpose, Stream
from ...base.validate import choice, integer
from ...ops import noise, update
from ...privacy.mechanisms.base import checked_noise_multiplier
from ...privacy.mechanisms.certify import gaussian_spec, laplace_spec, lattice_bound
from ...privacy.mechanisms.plan import Block
from ...step.noise import purpose_of
from .. import bits, canaries, claims, likelihood, noise_reuse
from ..claims import Claim
from ..findings import Check
from ..subject import Pair, Subject
from .backend import check_backend, named, running

OPS = ("add_noise", "update")

LOOKED_AT = 10_000
"""Runs whose bits are examined."""


@dataclass(frozen=True, kw_only=True)
class NoiseKernel(Subject):
    """One noise kernel, with the sum of one record more or less.

    Args:
        op: ``add_noise`` or ``update``.
        distribution: ``gaussian`` or ``laplace``.
        noise_multiplier: noise scale / bound of one record.
        width: d.
        dtype: integers: an exact sum; floats: one that is rounded stochastically.
        backend: name of the backend, emulated where its device is missing. None selects the first
            one that supports the call; see ``dpkern info``.

    Raises:
        InvalidInput: a field out of its range.
        PrivacyError: a noise multiplier outside [2^-4, 2^10].
    """

    usual_runs: ClassVar[int] = 100_000

    op: str = "add_noise"
    distribution: str = "gaussian"
    noise_multiplier: float = 1.0
    width: int = 16
    dtype: torch.dtype = torch.int32
    backend: str | None = None
    name: str = field(init=False)
    claimed: Claim = field(init=False)
    certified: Claim = field(init=False)

    def __post_init__(self) -> None:
        choice(OPS, op=self.op)
        check_backend(self.backend)
        choice(LAWS, distribution=self.distribution)
        choice((*noise.INTEGERS, *noise.FLOATS), dtype=self.dtype)
        integer(1, width=self.width)
        checked_noise_multiplier(self.noise_multiplier)
        made = {"claimed": self._claim(), "certified": self._claim(), "name": self._name()}
        for each, value in made.items():
            object.__setattr__(self, each, value)

    def _name(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.op}, {self.distribution}, {kind}, {named(self.backend)}"

    @property
    def exact(self) -> bool:
        """Whether sums count lattice units."""
        return self.dtype in noise.INTEGERS

    @property
    def _block(self) -> Block:
        return Block(
            shape=(self.width,), clip_group=0, bound=1.0, noise_scale=self.noise_multiplier
        )

    def _claim(self) -> Claim:
        spec = gaussian_spec if self.distribution == "gaussian" else laplace_spec
        return claims.of_event(spec([self._block], "exact" if self.exact else "float"))

    def release(self, data: Tensor, runs: int, seed: int) -> Tensor:
        """Return ``[runs, d]``: counts of cells where sums are integers, else floats."""
        del seed  # the key is the operating system's
        key = Key.fresh()
        stream = key.stream(purpose_of(self.distribution), 1)
        rounding = None if self.exact else key.stream(Purpose.ROUNDING, 1)
        rows = data.expand(runs, self.width).clone(memory_format=torch.contiguous_format)
        with running(self.backend):
            if self.op == "add_noise":
                return noise.add_noise(
                    rows,
                    stream=stream,
                    distribution=self.distribution,
                    scale=None if self.exact else self.noise_multiplier,
                    rounding=rounding,
                    backend=self.backend,
                )
            return self._updated(rows, stream, rounding)

    def _updated(self, rows: Tensor, stream: Stream, rounding: Stream | None) -> Tensor:
        """Return ``0 - 1 noisy sum``, in units of the bound."""
        rule = update.SGD(lr=1.0)
        params = [torch.zeros(rows.shape, dtype=self._float)]
        drawn = update.Noise(
            distribution=self.distribution,
            scales=(self.noise_multiplier,),
            stream=stream,
            positions=(0,),
            rounding=rounding,
        )
        update.step(
            params,
            [rows],
            rule=rule,
            state=rule.init(params),
            noise=drawn,
            backend=self.backend,
        )
        return params[0].neg_()

    @property
    def _float(self) -> torch.dtype:
        return torch.float32 if self.exact else self.dtype

    def noise_sd(self) -> float | None:
        """Return the noise scale of Gaussian noise, in the units of ``release``."""
        return self._scale if self.distribution == "gaussian" else None

    def checks(self, *, quick: bool) -> Sequence[Check]:
        """Check the bits of released numbers, and noise that is used twice."""
        del quick
        # The same sum everywhere: equal numbers are then equal noise.
        released = self.release(torch.zeros(self.width, dtype=self.dtype), LOOKED_AT, 0)
        cell = self._scale / SCALE_CELLS
        found = [bits.lattice(released, cell), *noise_reuse.repeats(released)]
        counts = (released.double() / torch.tensor(cell).to(self._float).double()).round().long()
        uniform = 4 if self.distribution == "gaussian" else 2
        return [*found, bits.uniform_low_bits(counts, bits=uniform)]

    def null(self) -> Tensor:
        """Return the sum of the other records."""
        others = canaries.directions(self.width, seed=1)[
            "random" if self.width > 1 else "coordinate"
        ]
        return (others * self._reach).to(self.dtype)

    @property
    def _reach(self) -> float:
        """The bound, in units of the sums."""
        return lattice_bound(1.0, self.noise_multiplier) if self.exact else 1.0

    def pairs(self, weakest: Tensor | None) -> Sequence[Pair]:
        """Return pairs with one more record, at the bound."""
        found = canaries.directions(self.width, weakest=weakest)
        return [self._pair(name, direction) for name, direction in found.items()]

    def _pair(self, name: str, direction: Tensor) -> Pair:
        laplace = self.distribution == "laplace"
        moved = direction / direction.norm(1 if laplace else 2) * self._reach
        # Towards zero: a record's norm may not exceed the bound.
        canary = moved.trunc().to(self.dtype) if self.exact else moved.to(self.dtype)
        without = self.null()
        present = without + canary
        if not laplace:
            return Pair(name=name, without=without, present=present)
        shown = self._shown(without), self._shown(present)
        score = likelihood.LaplaceRatio(shown[0], shown[1], self._scale)
        return Pair(name=name, without=without, present=present, score=score, layer="likelihood")

    @property
    def _scale(self) -> float:
        """The noise scale, in the units of ``release``."""
        counts = self.exact and self.op == "add_noise"
        return float(SCALE_CELLS) if counts else self.noise_multiplier

    def _shown(self, sums: Tensor) -> Tensor:
        """Return sums without noise in the units of ``release``."""
        units = SCALE_UNITS / self._scale if self.exact else 1.0
        return sums.double() / units

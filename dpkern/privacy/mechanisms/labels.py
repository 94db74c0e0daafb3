"""Mechanisms that release labels once: training on what they release spends nothing more.

There is no plan and no noise in a step. A label is released by a channel that tells the truth with
probability p0 and each other category with probability q0.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NoReturn, Self

import torch

from ...base.errors import InvalidInput
from ...base.rng import Stream
from ..accounting.history import RELEASED_BITS
from .base import Mechanism
from .memory import Memory
from .plan import Plan
from .work import Work


class LabelMechanism(Mechanism):
    """Base of the configurations; subclasses are frozen keyword-only dataclasses.

    Attributes:
        epsilon: of one label, as it is asked for.
        categories: k, how many labels there are.
    """

    epsilon: float
    categories: int

    @property
    @abstractmethod
    def truth(self) -> float:
        """Probability of the truth, p0."""

    @property
    @abstractmethod
    def lie(self) -> float:
        """Probability of each lie, q0."""

    @property
    @abstractmethod
    def ldp_epsilon(self) -> float:
        """What one response really costs: at most ``epsilon``."""

    @abstractmethod
    def randomize(
        self, values: torch.Tensor, *, stream: Stream, position: int = 0, backend: str | None = None
    ) -> torch.Tensor:
        """The responses, a new tensor."""

    @abstractmethod
    def estimate(self, responses: torch.Tensor) -> torch.Tensor:
        """Unbiased frequencies of the categories, float64 ``[k]``."""

    @abstractmethod
    def count_response(self, work: Work, records: int, dtype: torch.dtype) -> None:
        """Book one response of each record, and the estimate of the frequencies from them."""

    @property
    def certified_for(self) -> str:
        """Integers only: the responses themselves."""
        return RELEASED_BITS

    def plan(self, shapes: Sequence[Sequence[int]], memory: Memory | None = None) -> Plan:
        """There is none.

        Raises:
            InvalidInput: always.
        """
        del shapes, memory
        self._no_gradients()

    def with_noise_multiplier(self, noise_multiplier: float) -> Self:
        """There is none.

        Raises:
            InvalidInput: always.
        """
        del noise_multiplier
        self._no_gradients()

    def _no_gradients(self) -> NoReturn:
        raise InvalidInput(
            "mechanism",
            expected="one that noises gradients",
            got=type(self).__name__,
            remedy=f"Release symbols with {type(self).__name__}.randomize(values, stream=...), or "
            "dpkern.ops.symbols.randomize, and train on them without noise.",
        )

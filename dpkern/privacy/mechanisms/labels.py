"""Mechanisms that release labels once: training on what they release spends nothing more.

There is no plan and no noise in a step. A label is released by a channel that gives the label with
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
from .memory import MechanismState
from .plan import Plan
from .work import OpAccount


class LabelMechanism(Mechanism):
    """The base of the configurations; subclasses are frozen keyword-only dataclasses.

    Attributes:
        epsilon: of one label, as it is asked for.
        categories: k, how many labels there are.
    """

    epsilon: float
    categories: int

    @property
    @abstractmethod
    def truth(self) -> float:
        """Probability of the label itself, p0."""

    @property
    @abstractmethod
    def lie(self) -> float:
        """Probability of each other category, q0."""

    @property
    @abstractmethod
    def ldp_epsilon(self) -> float:
        """The true cost of one response: at most ``epsilon``."""

    @abstractmethod
    def randomize(
        self, values: torch.Tensor, *, stream: Stream, position: int = 0, backend: str | None = None
    ) -> torch.Tensor:
        """Return the responses, a new tensor."""

    @abstractmethod
    def estimate(self, responses: torch.Tensor) -> torch.Tensor:
        """Return unbiased frequencies of the categories, float64 ``[k]``."""

    @abstractmethod
    def count_response(self, work: OpAccount, records: int, dtype: torch.dtype) -> None:
        """Count one response of each record, and the estimate of the frequencies from them."""

    @property
    def certified_for(self) -> str:
        """The scope of the certificate: integers only, the responses themselves."""
        return RELEASED_BITS

    def plan(self, shapes: Sequence[Sequence[int]], memory: MechanismState | None = None) -> Plan:
        """Raise: what releases labels has no plan.

        Raises:
            InvalidInput: always.
        """
        del shapes, memory
        self._no_gradients()

    def with_noise_multiplier(self, noise_multiplier: float) -> Self:
        """Raise: labels have no noise multiplier.

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

"""Algorithm 2: noise on the gradient by the outputs, or, corrected, on that of all weights.

With environmental noise the printed gradient is multiplied by b_j (14), and carried back through
the encoder's noisy code.

Source: SPOF, (14), (15), (24)-(27), algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..base.laws import Distribution
from ..base.rng import Key
from ..ops import coef, noise
from ..privacy.mechanisms import OutputSGD
from . import autoencoder, release
from .autoencoder import Gradients, Weights
from .rules import Visit, multipliers


class _Sgd:
    """The parts that both forms share: dL/dz, and a step's draws."""

    def __init__(
        self,
        method: OutputSGD,
        keys: Sequence[Key],
        *,
        width: int,
        distribution: Distribution = "laplace",
        sources: Sequence[release.BlockSource] = (),
    ) -> None:
        self._method = method
        given: dict[str, Any] = {"distribution": distribution, "sources": sources}
        self._ahead = release.PrefetchedDraws(keys, width=width, **given) if method.noised else None

    def _output(self, z: Tensor, targets: Tensor) -> Tensor:
        """Return dL/dz: exact, of the polynomial, or at the point 0."""
        kind = self._method.output_gradient
        if kind == "at_a":
            return 0.5 - targets
        if kind == "exact":
            return torch.sigmoid(z) - targets
        form: coef.Form = "printed" if self._method.mode == "published" else "taylor"
        return coef.quadratic(z, targets, form=form)[1]

    def _add(self, values: Tensor, scale: float | Tensor, step: int) -> Tensor:
        if self._ahead is None:
            return values
        # A scale of each record goes around the kernel, which has one for all.
        each = scale[:, None] if isinstance(scale, Tensor) else None
        made = noise.add_noise(
            values if each is None else values / each,
            stream=self._ahead.streams[0],
            rounding=self._ahead.roundings[0],
            distribution=self._ahead.distribution,
            scale=1.0 if isinstance(scale, Tensor) else scale,
            draws=self._ahead.take(step),
        )
        return made if each is None else made * each

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state: every visit is released anew."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Accept the empty state."""


class OutputNoise(_Sgd):
    """Steps 3 to 7 as printed, and with a constant scale in corrected mode."""

    def __init__(
        self,
        method: OutputSGD,
        keys: Sequence[Key],
        *,
        users: int,
        n: int,
        sources: Sequence[release.BlockSource] = (),
    ) -> None:
        super().__init__(method, keys, width=users * n, sources=sources)

    def direction(self, weights: Weights, visit: Visit) -> tuple[Tensor, Gradients | Tensor]:
        """Clip, noise, carry back."""
        passed = autoencoder.forward(weights, visit.seen(visit.clean))
        gradient = self._output(passed.z, visit.clean)
        total: Tensor | float = 1.0
        if visit.noise is not None and self._method.mode == "published":
            total = multipliers(weights, _hidden(weights, visit), visit.noise)
            gradient = total[:, None] * gradient
        norm = gradient.norm(2, 1)
        gradient = gradient / (norm / self._method.max_grad_norm).clamp_(min=1)[:, None]
        scale = self._method.scale(gradient.shape[1], norm, total)
        output = self._add(gradient, scale, visit.step)
        return passed.z, autoencoder.backward(weights, passed, output)


class ParameterNoise(_Sgd):
    """The corrected form, which clips and noises the gradient of all weights as one vector.

    The guard checks ``sum_r |What_ri|``, which no logit exceeds: whether a run stops must not
    depend on the record either.
    """

    def __init__(
        self,
        method: OutputSGD,
        keys: Sequence[Key],
        *,
        users: int,
        size: int,
        sources: Sequence[release.BlockSource] = (),
    ) -> None:
        law, width = method.distribution, users * size
        super().__init__(method, keys, width=width, distribution=law, sources=sources)
        self._norm = 1 if method.distribution == "laplace" else 2
        self._scale = method.mechanism.noise_multiplier * method.max_grad_norm

    def direction(self, weights: Weights, visit: Visit) -> tuple[Tensor, Gradients | Tensor]:
        """Return the noisy gradient ``[B, 2 n l]``; its norm comes from its factors."""
        passed = autoencoder.forward(weights, visit.seen(visit.clean))
        output = self._output(passed.z, visit.clean)
        gradients = autoencoder.backward(weights, passed, output)
        norms = gradients.norms(self._norm)
        factor = (self._method.max_grad_norm / norms).clamp_(max=1)
        reach = weights.pairs()[1].abs().sum(1)
        return reach, self._add(gradients.flat(factor), self._scale, visit.step)


def _hidden(weights: Weights, visit: Visit) -> Tensor:
    """Return the noiseless code."""
    return autoencoder.forward(weights, visit.clean).hidden

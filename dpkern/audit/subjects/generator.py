"""Audit this machine's noise generator: its kernels' releases, and every check of its words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ...privacy.mechanisms import DPSGD, LaplaceSGD, Mechanism
from ...step.step import DPStep
from .. import generator
from ..findings import Check
from .kernel import NoiseKernel
from .ranks import ranks
from .words import resume, words

_STEPS: tuple[Mechanism, ...] = (
    DPSGD(noise_multiplier=1.0, max_grad_norm=1.0),
    DPSGD(noise_multiplier=1.0, max_grad_norm=1.0, arithmetic="float"),
    LaplaceSGD(noise_multiplier=1.0, max_grad_norm=1.0),
)
"""Mechanisms of both laws, and one with sums that are rounded."""


@dataclass(frozen=True, kw_only=True)
class Generator(NoiseKernel):
    """A noise kernel with the checks of the generator behind it.

    Attributes:
        width: wide enough for every question about repeated noise.
        backends: backends that are compared by vectors and bits. None selects all names that dpkern
            knows.
    """

    width: int = 32
    backends: tuple[str, ...] | None = None

    def _name(self) -> str:
        return f"generator: {super()._name()}"

    def checks(self, *, quick: bool) -> Sequence[Check]:
        """Check the kernel, the generator, a step, and unless ``quick`` two processes."""
        found = [*super().checks(quick=quick)]
        found += generator.checks(backends=self.backends, quick=quick)
        for mechanism in _STEPS:
            step = _step(mechanism)
            label = f"{mechanism.name}, {step.plan.arithmetic}"
            of_step = words(step)
            found += [replace(check, name=f"{check.name}, {label}") for check in of_step]
        found.append(resume(lambda: _step(_STEPS[0])))
        return found if quick else [*found, ranks()]


def _step(mechanism: Mechanism) -> DPStep:
    params = [torch.zeros(700), torch.zeros(3, 5)]
    return DPStep(mechanism, params, expected_batch_size=8.0, sample_rate=0.1)


__all__ = ["Generator"]

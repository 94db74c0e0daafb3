"""The least noise for a target epsilon."""

from __future__ import annotations

from ....base.errors import InvalidInput
from ....base.validate import integer, probability
from ....privacy import accounting
from ....privacy.mechanisms import DPSGD
from .accountant import create_accountant


def get_noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    epochs: int | None = None,
    steps: int | None = None,
    accountant: str = "rdp",
) -> float:
    """Return the least noise multiplier of DP-SGD with Poisson batches that meets a target.

    Args:
        target_epsilon, target_delta: what the certificate may not exceed.
        sample_rate: probability with which each record joins a step.
        epochs: number of epochs: ``int(epochs / sample_rate)`` steps, as Opacus counts them, and
            no fewer than ``int(1 / sample_rate)`` an epoch.
        steps: number of steps; one of the two is given.
        accountant: ``rdp`` keeps to that bound; ``prv`` takes the best one.

    Raises:
        InvalidInput: an accountant that bounds nothing, both or none of epochs and steps, or an
            argument out of range.
        PrivacyError: no multiplier meets the target.
    """
    if (epochs is None) is (steps is None):
        raise InvalidInput(
            "steps",
            expected="either epochs or steps",
            got="both" if steps is not None else "neither",
            remedy="Give the number of epochs, or that of steps.",
        )
    bound = create_accountant(accountant)._bound
    if epochs is not None:
        integer(1, epochs=epochs)
        probability(sample_rate=sample_rate)
        steps = max(int(epochs / sample_rate), epochs * int(1 / sample_rate))
    found = accounting.calibrate(
        DPSGD(noise_multiplier=1.0, max_grad_norm=1.0),
        target_epsilon=target_epsilon,
        sample_rate=sample_rate,
        steps=steps or 0,
        delta=target_delta,
        accountant=bound,
    )
    return float(found.noise_multiplier)


__all__ = ["get_noise_multiplier"]

"""The least noise for a target epsilon."""

from __future__ import annotations

from ....base.errors import InvalidInput
from ....privacy import accounting
from ....privacy.mechanisms import DPSGD


def get_noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    epochs: int | None = None,
    steps: int | None = None,
    accountant: str = "prv",
) -> float:
    """Return the least noise multiplier of DP-SGD with Poisson batches that meets a target.

    Args:
        target_epsilon, target_delta: what the certificate may not exceed.
        sample_rate: probability with which each record joins a step.
        epochs: number of epochs, of ``int(1 / sample_rate)`` steps each.
        steps: number of steps; one of the two is given.
        accountant: ``rdp`` keeps to that bound; ``prv`` and others take the best one.

    Raises:
        InvalidInput: both or none of epochs and steps, or an argument out of range.
        PrivacyError: no multiplier meets the target.
    """
    if (epochs is None) is (steps is None):
        raise InvalidInput(
            "steps",
            expected="either epochs or steps",
            got="both" if steps is not None else "neither",
            remedy="Give the number of epochs, or that of steps.",
        )
    taken = steps if epochs is None else epochs * int(1 / sample_rate)
    found = accounting.calibrate(
        DPSGD(noise_multiplier=1.0, max_grad_norm=1.0),
        target_epsilon=target_epsilon,
        sample_rate=sample_rate,
        steps=taken or 0,
        delta=target_delta,
        accountant="RDP" if accountant == "rdp" else None,
    )
    return float(found.noise_multiplier)


__all__ = ["get_noise_multiplier"]

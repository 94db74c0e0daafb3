"""Train on labels that a mechanism has released once.

The labels are randomized once, before the first step, and only the responses are used: everything
after that costs nothing more. A loss is corrected so that its mean over the responses is the loss
of the true label (Natarajan et al., Learning with Noisy Labels, 2013): with p0 the probability of
the true label and q0 that of each other one,

    L(x, response) = ( loss(x, response) - q0 sum_v loss(x, v) ) / (p0 - q0)

It may become negative, and has no lower bound where p0 is close to q0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..base.rng import Key, Purpose
from ..privacy.accounting import Certificate
from ..privacy.mechanisms import DPSGD, LabelMechanism
from .data import Dataset

WITHOUT_NOISE = DPSGD(noise_multiplier=0.0, max_grad_norm=float("inf"), arithmetic="float")
"""The mechanism that trains on the responses: gradients are neither clipped nor noised."""

RELATION = "replace_one, local, labels only"


def released(mechanism: LabelMechanism, data: Dataset, key: Key) -> Dataset:
    """Return the data set with one response in the place of each training label.

    Held-out labels stay as they are: they are not protected.
    """
    stream = key.stream(Purpose.SYMBOLS, 0)
    return replace(data, y_train=mechanism.randomize(data.y_train.contiguous(), stream=stream))


def unbiased_loss(mechanism: LabelMechanism) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the corrected cross entropy of logits ``[B, k]`` and responses ``[B]``, summed."""
    truth, lie = mechanism.truth, mechanism.lie

    def loss(logits: Tensor, responses: Tensor) -> Tensor:
        losses = -torch.log_softmax(logits, 1)
        told = losses.gather(1, responses[:, None])[:, 0]
        return ((told - lie * losses.sum(1)) / (truth - lie)).sum()

    return loss


def report(mechanism: LabelMechanism, *, seeded: bool) -> dict[str, Any]:
    """Return the statements of a run's report that replace the step's: one release, of labels."""
    epsilon = mechanism.ldp_epsilon
    certificate = Certificate(
        epsilon=math.inf if seeded else epsilon,
        delta=0.0,
        relation=RELATION,
        accountant="exact probabilities",
        event=json.dumps(mechanism.event_spec(), sort_keys=True),
        bounds={},
        certified_for="the released labels; features are not protected",
    ).to_dict()
    facts: dict[str, Any] = {
        "mechanism": mechanism.name,
        "mode": mechanism.mode,
        "epsilon_claimed": mechanism.epsilon,
        "claim": "pure epsilon of one response",
        "epsilon_certified": certificate["epsilon"],
        "non_private": "the responses come from a known seed" if seeded else None,
        "notes": [],
        "blocks": [],
        "certificate": certificate,
    }
    return facts | ({"epsilon_if_seed_secret": epsilon} if seeded else {})

"""Comparison of two states of modules."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def are_state_dict_equal(sd1: Mapping[str, Tensor], sd2: Mapping[str, Tensor]) -> bool:
    """Return whether two ``state_dict`` have the same keys and the same values, bit for bit.

    NaN differs from itself. Args: sd1, sd2: what ``module.state_dict()`` returned.
    """
    return sd1.keys() == sd2.keys() and all(torch.equal(sd1[k], sd2[k]) for k in sd1)


__all__ = ["are_state_dict_equal"]

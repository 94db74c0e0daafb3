"""Clip groups of a module, for ``DPSGD(clipping="group", groups=...)``."""

from __future__ import annotations

from torch import nn


def by_owner(module: nn.Module) -> tuple[int, ...]:
    """Return one clip group for each module that owns parameters, such as a weight and its bias.

    Returns:
        The group of each trainable parameter, in the order of ``module.named_parameters()``. A
        shared parameter belongs to its first owner.
    """
    numbers: dict[str, int] = {}
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    return tuple(numbers.setdefault(name.rpartition(".")[0], len(numbers)) for name in names)

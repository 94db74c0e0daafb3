"""Check that a loss which the module computes itself keeps the samples apart.

A scalar has no rows to compare, but its gradient at the outputs of the module's parts has. If the
loss is a sum of per-sample terms, each row of that gradient depends on its own sample alone. The
module runs again with half of the samples replaced by one of them, and the rows of all other
samples must have the same gradients. Where samples have one whole number each, such as a class, the
samples with the least and the largest one take their turn: counts of classes change then, unless
all samples have the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..base.errors import UnsupportedModule
from .provenance.inner_loss import state_of_scalar
from .provenance.states import Mixed, YieldedBatch
from .random_state import RandomState
from .replaced_rows import by_one, fresh, replaced_rows, tensors_of
from .snapshot import Snapshot

_TOLERANCE = 1e-3
"""Tolerance relative to the largest gradient; rounding stays far below, and mixing far above."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def check_inner_losses(
    module: nn.Module, call: Callable[..., Any], arguments: Arguments, batch: int
) -> tuple[bool, frozenset[int]]:
    """Compare gradients of the module's scalar outputs, with and without other samples replaced.

    Args:
        module: the module, whose parameters are ordinary ones during a probe.
        call: runs the module.
        arguments: a batch, samples first.
        batch: number of samples, at least 2.

    Returns:
        Whether the module has scalar outputs with a gradient, and the inputs with classes of which
        all samples have the same (``uniform_classes``): of them the batch could not tell.

    Raises:
        UnsupportedModule: a sample's gradient changes when others are replaced.
    """
    devices = {t.device for t in tensors_of(arguments)} | {p.device for p in module.parameters()}
    draws, before = RandomState(devices), Snapshot(module, parameters=True)
    chosen = list(range(batch // 2))
    classes = list(_classes(arguments, batch))
    ends = {int(at) for _, numbers in classes for at in (numbers.argmin(), numbers.argmax())}
    places = dict.fromkeys((batch - 1, 0, *sorted(ends)))
    replacements = [replaced_rows(arguments, batch, chosen, by_one(i)) for i in places]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            one = _gradients(module, call, arguments, batch)
            for changed, different in replacements if one else ():
                before.restore()
                draws.restore()
                two = _gradients(module, call, changed, batch) if different else one
                for place, first in one.items():
                    second = two.get(place)
                    if second is not None and second.shape == first.shape:
                        _compare(place[0], first, second, batch, chosen)
    finally:
        before.restore()
        draws.restore()
    return bool(one), uniform_classes(arguments, batch)


def uniform_classes(arguments: Arguments, batch: int) -> frozenset[int]:
    """Return the places of inputs with one whole number of each sample, and always the same."""
    return frozenset(
        place
        for place, numbers in _classes(arguments, batch)
        if bool((numbers == numbers[0]).all())
    )


def _classes(arguments: Arguments, batch: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the inputs that have one whole number of each sample, with their places."""
    for place, tensor in enumerate(tensors_of(arguments)):
        if (
            tensor.dim()
            and tensor.shape[0] == tensor.numel() == batch
            and not (tensor.is_floating_point() or tensor.is_complex())
        ):
            yield place, tensor.reshape(batch).long()


def _compare(name: str, one: Tensor, two: Tensor, batch: int, chosen: Sequence[int]) -> None:
    kept = [b for b in range(batch) if b not in chosen]
    a = one.reshape(batch, -1)[kept].double()
    b = two.reshape(batch, -1)[kept].double()
    scale = float(a.abs().max()) if a.numel() else 0.0
    off = float((a - b).abs().max()) if a.numel() else 0.0
    if off > _TOLERANCE * scale:
        raise UnsupportedModule(
            f"the loss that {name or 'the module'} leads to",
            expected="a sum of terms of single samples",
            got="a gradient of one sample that changed when others were replaced",
            remedy="Compute the loss of each sample from its own outputs; return logits and take "
            "the mean in the loop.",
        )


def _gradients(
    module: nn.Module, call: Callable[..., Any], arguments: Arguments, batch: int
) -> dict[tuple[str, int], Tensor]:
    """Return the gradient of the sum of all scalar outputs at each output of the module's parts."""
    parts: dict[tuple[str, int], Tensor] = {}
    handles = []

    def watch(name: str, part: nn.Module) -> None:
        def leave(_: nn.Module, args: Any, output: Any) -> None:
            for tensor in tensors_of(output):
                rows = tensor.dim() and tensor.shape[0] and tensor.shape[0] % batch == 0
                if tensor.requires_grad and rows and tensor.is_floating_point():
                    parts[name, len(parts)] = tensor

        handles.append(part.register_forward_hook(leave))

    for name, part in module.named_modules():
        if name and not isinstance(part, torch.jit.ScriptModule):  # those take no hooks later
            watch(name, part)
    try:
        with torch.enable_grad():
            output = call(*fresh(arguments)[0], **fresh(arguments)[1])
            losses = [t for t in tensors_of(output) if t.dim() == 0 and t.requires_grad]
            if not losses or not parts:
                return {}
            followed = YieldedBatch(batch)
            records = np.arange(batch)
            states = [state_of_scalar(loss, followed, records)[1] for loss in losses]
            losses = [
                x for x, s in zip(losses, states, strict=True) if not isinstance(s, Mixed)
            ]  # others are refused when they are sent backward
            if not losses:
                return {}
            names = list(parts)
            found = torch.autograd.grad(
                torch.stack([x.float() for x in losses]).sum(),
                [parts[name] for name in names],
                allow_unused=True,
            )
    finally:
        for handle in handles:
            handle.remove()
    return {n: g.detach() for n, g in zip(names, found, strict=True) if g is not None}

"""Collect the facts about a use of parameters that must be the same in every step of a program."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..in_graph import TappedUse
from ..uses import CapturedOp, ParameterSource

if TYPE_CHECKING:
    from ..uses import GradientTarget


@dataclass(frozen=True)
class UseFacts:
    """Facts about one use, as the recorded path registers it in the forward pass.

    Attributes:
        operation: name of the operation.
        targets: targets of its gradients.
        key: its site in ``Capture``, which the batch-dimension probe verifies.
        fold: number of rows of the input that each sample has.
        tail: shape of the input after its first dimension.
        dtype: dtype of the input.
        differentiable: whether the input needs a gradient.
        saved: options of the operation, as pairs.
        nodes, kinds: autograd nodes between the use before and this one.
        obstacle: why no program can hold this use; empty if one can.
        tapped: the taps of a use inside a compiled graph; None outside of graphs.
        in_rows: whether the input lies in rows, where torch's function goes by that.
    """

    operation: str
    targets: tuple[GradientTarget | None, ...]
    key: tuple[Any, ...]
    fold: int
    tail: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool
    saved: tuple[tuple[str, Any], ...]
    nodes: int
    kinds: tuple[type[Any], ...]
    obstacle: str = ""
    tapped: TappedUse | None = None
    in_rows: bool = True

    @property
    def slots(self) -> list[ParameterSource | None]:
        """The parameters of the targets; None where a target is no parameter."""
        return [
            t.source if t and isinstance(t.source, ParameterSource) else None for t in self.targets
        ]


def facts_of(use: CapturedOp, x: Tensor, kinds: Collection[tuple[str, bool]]) -> UseFacts:
    """Return the facts of a use whose operation has this input.

    Args:
        use: the use, which has just been registered.
        x: the input, with the samples in its first dimension.
        kinds: operations that a program can replay, and whether it does so inside graphs.
    """
    batch = max(use.batch, 1)
    return UseFacts(
        operation=use.operation,
        targets=use.targets,
        key=use.site,
        fold=int(x.shape[0]) // batch,
        tail=tuple(x.shape[1:]),
        dtype=x.dtype,
        differentiable=x.requires_grad,
        saved=tuple(use.saved.items()),
        nodes=use.nodes,
        kinds=use.kinds,
        obstacle=_obstacle(use, x, kinds),
        in_rows=use.in_rows(x),
    )


def facts_in_graph(use: CapturedOp, tapped: TappedUse) -> UseFacts:
    """Return the facts of a use inside a compiled graph.

    Its kinds are those of no node, so that no use outside of graphs is taken for it.
    """
    kind = tapped.device.type
    return UseFacts(
        operation=use.operation,
        targets=use.targets,
        key=use.site,
        fold=tapped.fold,
        tail=tapped.tail,
        dtype=tapped.dtype,
        differentiable=tapped.differentiable,
        saved=tuple(use.saved.items()),
        nodes=0,
        kinds=(TappedUse,),
        obstacle="" if kind == "cpu" else f"{use.operation} runs on {kind}",
        tapped=tapped,
    )


def _obstacle(use: CapturedOp, x: Tensor, kinds: Collection[tuple[str, bool]]) -> str:
    if torch._C._current_graph_task_id() != -1:
        return f"{use.operation} runs again inside the backward pass"
    if use.moves:
        return f"{use.operation} sees rows that each batch may move in its own way"
    if (use.operation, False) not in kinds:
        return f"{use.operation} is not replayed"
    if torch.is_autocast_enabled(x.device.type):
        return f"{use.operation} runs under autocast"
    if not x.is_cpu:
        return f"{use.operation} runs on {x.device.type}"
    if use.batch == 0 or x.numel() == 0:
        return f"{use.operation} has no rows"
    if type(x) is not Tensor:
        return f"the input of {use.operation} is a {type(x).__name__}"
    for target in use.targets:
        if target is not None and (target.rows is not None or target.transposed):
            return f"{use.operation} uses a part of {target.source.name}"
        if target is not None and not isinstance(target.source, ParameterSource):
            return f"{use.operation} uses an expression of parameters, {target.source.name}"
    return ""

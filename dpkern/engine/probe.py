"""The batch-dimension probe: does every captured operation keep the samples apart?

One sample's part of the module's output is sent backward through the graph of the training step
itself. In every captured output gradient the rows of all other samples must be exactly zero. That
finds layers with the time first, batches folded the wrong way round and layers that mix samples,
also where the shapes happen to agree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import UnsupportedModule
from .parameter import tensors_in

if TYPE_CHECKING:
    from .capture import Use

Site = tuple[Any, ...]


class Probe:
    """One probe of the uses in ``fresh``.

    Args:
        batch: number of samples.
        fresh: the uses to check.
        idle: look at nothing: other processes probe and need this one in their backward passes.
        whole: one backward pass for each output, whatever is left to check.
    """

    def __init__(
        self, batch: int, fresh: Mapping[Site, str], *, idle: bool = False, whole: bool = False
    ) -> None:
        self.batch = batch
        self.idle = idle
        self.whole = whole
        self.sample = batch - 1
        self.waiting = set(fresh)
        self.seen: set[Site] = set()
        self.findings: dict[Site, str] = {}

    def look(self, use: Use, g: Tensor) -> None:
        """Check one captured output gradient."""
        if self.idle:
            return
        self.seen.add(use.site)
        self.waiting.discard(use.site)
        rows = g.reshape(self.batch, -1)
        if bool(rows[: self.sample].any()):
            self.findings[use.site] = f"{use.names} in {use.operation}"

    def run(self, output: Any, anchor: Tensor) -> None:
        """Send the last sample of the outputs backward, one output after the other."""
        for tensor in _outputs(output):
            rows = tensor.shape[0] if tensor.dim() else 0
            if not self.waiting and not self.whole:
                return
            if not tensor.requires_grad:
                continue
            if self.idle or rows == 0 or rows % self.batch:
                if self.whole:
                    self._backward(tensor.sum(), anchor, silent=True)
                continue
            each = rows // self.batch
            generator = torch.Generator().manual_seed(rows)
            part = tensor[self.sample * each :].flatten().float()
            # Random weights: a plain sum of a softmax, say, has no gradient.
            weights = torch.rand(part.shape, generator=generator) + 0.5
            self._backward((part * weights.to(part.device)).sum(), anchor)

    def error(self) -> UnsupportedModule | None:
        """One error for everything that was found."""
        if not self.findings:
            return None
        return UnsupportedModule(
            "; ".join(dict.fromkeys(self.findings.values())),
            expected="output gradients of one sample in that sample's rows only",
            got="gradients in the rows of other samples",
            remedy="Keep the batch first (batch_first=True; rows of one sample next to each other) "
            "and remove what mixes samples; dpkern.fix(model) replaces batch normalisation.",
        )

    def _backward(self, loss: Tensor, anchor: Tensor, *, silent: bool = False) -> None:
        before_idle, self.idle = self.idle, self.idle or silent
        try:
            self._pass(loss, anchor)
        finally:
            self.idle = before_idle

    def _pass(self, loss: Tensor, anchor: Tensor) -> None:
        leaves, checkpointed = _graph(loss)
        if not checkpointed:
            torch.autograd.backward(loss, inputs=[anchor], retain_graph=True)
            return
        # Reentrant checkpoints allow no chosen inputs: everything accumulates and is put back.
        before = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        try:
            torch.autograd.backward(loss, retain_graph=True)
        finally:
            for leaf, gradient in zip(leaves, before, strict=True):
                leaf.grad = gradient


def _graph(loss: Tensor) -> tuple[list[Tensor], bool]:
    """The leaves of the graph and whether it has reentrant checkpoints."""
    leaves: list[Tensor] = []
    checkpointed = False
    stack, met = [loss.grad_fn], {loss.grad_fn}
    while stack:
        node = stack.pop()
        if node is None:
            continue
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        checkpointed = checkpointed or "Checkpoint" in node.name()
        for following, _ in node.next_functions:
            if following is not None and following not in met:
                met.add(following)
                stack.append(following)
    return leaves, checkpointed


def _outputs(output: Any) -> Iterator[Tensor]:
    """The tensors of a module's output, also in dataclasses."""
    if dataclasses.is_dataclass(output) and not isinstance(output, (type, Mapping)):
        output = [getattr(output, field.name) for field in dataclasses.fields(output)]
    yield from tensors_in(output)

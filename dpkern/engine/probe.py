"""Probe the batch dimension: every captured operation must keep the samples apart.

All samples are sent backward through the graph of the training step itself, twice, the second time
each times a power of two: in every captured output gradient a sample's rows must be exactly that
multiple of what they were. Where operations round otherwise, or gradients reach a use from few
samples or other outputs, one sample is sent backward, and the rows of all others must be exactly
zero. That finds layers with the time first, batches folded the wrong way round and layers that mix
samples, also where the shapes happen to agree.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..base.errors import UnsupportedModule
from .heard import Heard
from .parameter import tensors_in

if TYPE_CHECKING:
    from .uses import CapturedOp

Site = tuple[Any, ...]

Scaled = tuple["CapturedOp", Tensor, Tensor]
"""A use, the scaled numbers of a pass, and the numbers of a pass of scaled samples."""

ATTEMPTS = 4
"""Maximum number of samples that are sent backward in turn while a use has only zero gradients.

After the first one they are those that reach such uses, as a pass of all samples shows: in packed
sequences only long samples reach the uses of late time steps.
"""

SCALES = tuple(sign * 2.0**power for sign in (1, -1) for power in range(-16, 17))
"""Factors of a sample's outputs: exact as powers of two."""

NEAR_SCALES = tuple(scale for scale in SCALES if 0.25 <= abs(scale) <= 4)
"""Those for numbers of 16 bits, which other factors would round."""

ROUNDS = 3
"""Passes with such factors where those of all SCALES are not exact: few pairs of samples share a
factor in all of them."""

_SECRET = random.SystemRandom()

GATHERED = 32
"""The same where a use sees the rows of some samples only: few of them may reach it."""

INPUT: Site = ("input",)
"""The site of the module's first argument, which is watched until everything is verified."""


class WatchedInput(torch.autograd.Function):
    """A copy of an input whose gradient the probe looks at, as samples may mix before any use."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, use: CapturedOp, x: Tensor) -> Tensor:
        ctx.use = use
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        probe = ctx.use.capture.verification.probe
        if probe is not None:
            probe.look(ctx.use, g)
        return None, None, g if ctx.needs_input_grad[2] else None


class Probe:
    """One probe of the uses in ``fresh``.

    A use counts as seen once a gradient that is not zero has reached it: behind a layer whose
    weights are zero, or an activation that is off for the sample, there is nothing to tell.

    Args:
        batch: number of samples.
        fresh: the uses to check.
        idle: whether to look at nothing and only take part in backward passes of other processes.
    """

    def __init__(self, batch: int, fresh: Sequence[CapturedOp], *, idle: bool = False) -> None:
        self.batch = batch
        self.idle = idle
        self.sample = batch - 1
        self.fresh = set(fresh)
        self.waiting: set[CapturedOp] = set(fresh)
        """Uses of the forward pass that no gradient has reached."""
        self.dull: set[Any] = set()
        """Uses, or sites in checkpoints that run again, where only zeros have arrived."""
        self.findings: dict[Site, str] = {}
        self._reach: dict[Any, Tensor] | None = None
        """The samples that reach each dull use, while all are sent backward at once."""
        self._heard: Heard | None = None
        """The numbers of each use, while two passes are compared."""
        self._told: set[Any] = set()
        self._seen: set[Site] = set()
        self._inconclusive: set[Site] = set()

    @property
    def seen(self) -> set[Site]:
        """The sites that keep the samples apart."""
        return self._seen - self._inconclusive - self._open

    @property
    def clouded(self) -> set[Site]:
        """The sites that keep this batch's finite samples apart; the next batch is probed again."""
        return self._seen & self._inconclusive - self._open

    @property
    def seen_uses(self) -> set[CapturedOp]:
        """The uses themselves that keep the samples apart."""
        return {use for use in self.fresh & self._told if use.site not in self._inconclusive}

    @property
    def _open(self) -> set[Site]:
        return {key.site if key in self.fresh else key for key in self.dull}

    def look(self, use: CapturedOp, g: Tensor) -> None:
        """Check one captured output gradient."""
        if self.idle:
            return
        each = g if use.owners is None else use.per_batch(g)
        rows = each.reshape(self.batch, -1)
        if self._heard is not None:
            self._heard.note(use, rows)
            return
        if self._reach is not None:
            self._note_reach(use, rows)
            return
        # A sample that is not finite has 0 * inf in its own rows.
        unknown = rows.isnan().any(1)
        touched = ((rows != 0) & ~rows.isnan()).any(1)
        own = torch.arange(self.batch, device=g.device) == self.sample
        if bool((touched & ~own).any()):
            self.findings[use.site] = (
                f"{use.names} in {use.operation}" if use.names else use.operation
            )
        key = use if use in self.fresh else use.site
        if not bool(((touched | unknown) & own).any()):
            if key not in self._told:
                self.dull.add(key)
            return
        self.dull.discard(key)
        self.waiting.discard(use)
        self._told.add(key)
        self._seen.add(use.site)
        if bool((unknown & ~own).any()):
            self._inconclusive.add(use.site)

    def run(
        self, output: Any, anchor: Tensor, anywhere: Callable[[bool], bool] | None = None
    ) -> None:
        """Send one sample of the outputs backward, one output after the other.

        Args:
            output: output of the module.
            anchor: leaf of the graph of every captured use.
            anywhere: tells whether any process has a pass left, where all must run the same ones.
                None runs this process's own.
        """
        outputs = [tensor for tensor in _outputs(output) if tensor.requires_grad]
        losses = iter(()) if self.idle else self._losses(outputs)
        if anywhere is None:
            for loss in losses:
                self._backward(loss, anchor)
            return
        while outputs:
            next_loss = next(losses, None)
            self.idle = next_loss is None
            if not anywhere(not self.idle):
                return
            # Every process needs the same graph; zeros add nothing to the gradients.
            zero = torch.stack([tensor.sum().float() * 0 for tensor in outputs]).sum()
            self._backward(zero if next_loss is None else next_loss + zero, anchor)

    def compare(self, output: Any, anchor: Tensor) -> bool:
        """Send all samples backward twice, the second time each with a factor of its own.

        What arrives in a sample's rows must be that factor times what arrived before. That shows
        rows of other samples, for all samples at once, and hooks and backward passes that are not
        linear, such as a division by the norm of all gradients. As the factors are powers of two,
        most operations give exactly that multiple, and nothing is left to ``run``.

        Returns:
            Whether every use is settled.
        """
        # Only the first output, since others may have something else in their first dimension.
        whole = self._whole([t for t in _outputs(output) if t.requires_grad])[:1]
        if not whole:
            return False
        plain = self._hear(whole, torch.ones(self.batch), anchor)
        if not plain.is_narrow:
            scales = self._scales(SCALES)
            scaled = self._hear(whole, scales, anchor)
            pairs = [*_pairs(plain, scaled, scales)]
            if all(map(_is_same, pairs)):
                settled = [self._settle(*pair) for pair in pairs]
                every = len(plain) == len(scaled) == len(pairs)
                return every and all(settled) and not self.waiting
        # Operations that round; numbers of 16 bits may also lie between uses, out of sight.
        for _ in range(1 if plain.is_narrow else ROUNDS):
            scales = self._scales(NEAR_SCALES)
            scale = scales.abs()
            for use, expected, got in _pairs(plain, self._hear(whole, scales, anchor), scales):
                off = ((expected - got) / scale).nan_to_num().abs().max()
                if bool(off > 1e-4 * (expected / scale).nan_to_num().abs().max()):
                    names = f"{use.names} in {use.operation}" if use.names else use.operation
                    self.findings[use.site] = names
        return bool(self.findings)

    def _scales(self, factors: Sequence[float]) -> Tensor:
        """Return a secret factor for each sample, which few others share."""
        found: list[float] = []
        while len(found) < self.batch:
            found += _SECRET.sample(factors, len(factors))
        return torch.tensor(found[: self.batch], dtype=torch.float64)

    def _hear(self, whole: Sequence[Tensor], scales: Tensor, anchor: Tensor) -> Heard:
        """Return the numbers of each use as all samples are sent backward, times their scales."""
        heard = self._heard = Heard()
        try:
            self._backward(torch.stack([self._weighted(t, scales) for t in whole]).sum(), anchor)
        finally:
            self._heard = None
        return heard

    def _settle(self, use: CapturedOp, expected: Tensor, got: Tensor) -> bool:
        """Note a use whose rows keep all samples apart; False if no gradient has reached it."""
        finite = bool((expected + got).isfinite().all())
        if finite and not bool(got[1].any()):
            return False
        self.waiting.discard(use)
        self._told.add(use if use in self.fresh else use.site)
        self._seen.add(use.site)
        if not finite:
            self._inconclusive.add(use.site)
        return True

    def _weighted(self, tensor: Tensor, scales: Tensor) -> Tensor:
        """Return a sum of the outputs with random weights, times each sample's scale."""
        each = tensor.shape[0] // self.batch
        generator = torch.Generator().manual_seed(tensor.shape[0])
        weights = torch.rand(tensor.shape, generator=generator) + 0.5
        shape = -1, *(1,) * (tensor.dim() - 1)
        weights *= scales.float().repeat_interleave(each).reshape(shape)
        return (tensor.float() * weights.to(tensor.device)).sum()

    def _whole(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs that have rows."""
        return [t for t in outputs if t.dim() and t.numel() and t.shape[0] % self.batch == 0]

    def _note_reach(self, use: CapturedOp, rows: Tensor) -> None:
        key = use if use in self.fresh else use.site
        if self._reach is not None and key in self.dull:
            reached = (rows != 0).any(1).cpu()
            before = self._reach.get(key)
            self._reach[key] = reached if before is None else before | reached

    def _losses(self, outputs: Sequence[Tensor]) -> Iterator[Tensor]:
        whole = self._whole(outputs)
        for number, tensor in enumerate(whole):
            if number and not self.waiting:
                break
            yield self._loss(tensor)
        if not self.dull:
            return
        reach: dict[Any, Tensor] = {}
        self._reach = reach
        yield torch.stack([self._weighted(t, torch.ones(self.batch)) for t in whole]).sum()
        self._reach = None
        gathered = any(use.owners is not None for use in self.fresh & self.dull)
        for _ in range(min(GATHERED if gathered else ATTEMPTS - 1, self.batch - 1)):
            left = [mask for key, mask in reach.items() if key in self.dull]
            counts = torch.stack(left).sum(0) if left else torch.zeros(self.batch)
            if not int(counts.max()):
                return  # what no sample reaches cannot be told
            self.sample = int(counts.argmax())
            for mask in left:
                mask[self.sample] = False
            for tensor in whole:
                yield self._loss(tensor)

    def _loss(self, tensor: Tensor) -> Tensor:
        each = tensor.shape[0] // self.batch
        part = tensor[self.sample * each : (self.sample + 1) * each].flatten().float()
        # The weights are random because a plain sum of a softmax, say, has no gradient.
        generator = torch.Generator().manual_seed(tensor.shape[0])
        weights = torch.rand(part.shape, generator=generator) + 0.5
        return (part * weights.to(part.device)).sum()

    def error(self) -> UnsupportedModule | None:
        """Return one error for everything that was found."""
        if not self.findings:
            return None
        return UnsupportedModule(
            "; ".join(dict.fromkeys(self.findings.values())),
            expected="output gradients of one sample in that sample's rows only",
            got="gradients in the rows of other samples",
            remedy="Keep the batch first (batch_first=True; rows of one sample next to each other) "
            "and remove what mixes samples; dpkern.fix(model) replaces batch normalisation.",
        )

    def _backward(self, loss: Tensor, anchor: Tensor) -> None:
        leaves, checkpointed = _graph(loss)
        if not checkpointed:
            try:
                torch.autograd.backward(loss, inputs=[anchor], retain_graph=True)
            except RuntimeError as error:
                if "modified by an inplace operation" not in str(error):
                    raise
                raise _written_in_place(error) from error
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


def _written_in_place(error: RuntimeError) -> UnsupportedModule:
    return UnsupportedModule(
        "the module",
        expected="a forward pass through which gradients lead back to its inputs",
        got=str(error).partition(":")[0],
        remedy="Write x = x / y for x /= y, or begin with x = x.clone(): samples are followed by "
        "gradients that reach the inputs, too.",
    )


def _pairs(one: Heard, two: Heard, scales: Tensor) -> Iterator[Scaled]:
    """Yield each use that both passes have, as checkpoints make new ones."""
    factors = torch.stack((scales, scales.abs()))  # of sums and of norms
    for (use, plain), (again, scaled) in zip(one, two, strict=False):
        if use is again:
            yield use, plain.cpu() * factors, scaled.cpu()


def _is_same(pair: Scaled) -> bool:
    _, expected, got = pair
    return torch.equal(expected.nan_to_num(), got.nan_to_num())


def _graph(loss: Tensor) -> tuple[list[Tensor], bool]:
    """Return the leaves of the graph, and whether it has reentrant checkpoints."""
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
    """Yield the tensors of a module's output, also in dataclasses."""
    if dataclasses.is_dataclass(output) and not isinstance(output, (type, Mapping)):
        output = [getattr(output, field.name) for field in dataclasses.fields(output)]
    yield from tensors_in(output)

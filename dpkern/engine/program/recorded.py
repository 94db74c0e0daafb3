"""Replay convolutions and embedding tables with the per-sample gradients of the recorded path."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..clip_norms import NormedGradients
from ..layers import conv, embedding
from ..layers.expression import is_buffer
from ..parameter import REPLAYED, fresh, refuse_double_backward
from ..per_sample_gradients import ConvolutionGradients, ExplicitGradients, PerSampleGradients
from ..release_norms import with_clip_norm
from ..tables import EmbeddingGradients
from ..uses import CapturedOp
from .facts import UseFacts
from .run import ReplayRun, next_site
from .site import NotReplayed, OperandSite, Part, apply_of, kind, skip_frames

if TYPE_CHECKING:
    from .arithmetic import Add
    from .flat import Flat

_differentiable = torch.is_grad_enabled


class RecordSite(OperandSite):
    """Use whose weight has lazy per-sample gradients: normed on arrival, summed at the close."""

    def __init__(self, facts: UseFacts, kept: Sequence[bool]) -> None:
        super().__init__(facts, kept)
        self.saved = dict(facts.saved)
        if facts.fold != 1:
            raise NotReplayed(f"{facts.operation} sees several rows of each sample")

    @property
    def weight_kind(self) -> tuple[bool, bool]:
        return False, True

    def place(self, flat: Flat) -> None:
        self.flat = flat

    def resize(self, flat: Flat, batch: int) -> None:
        super().resize(flat, batch)
        if self.bias_part is not None and not self.bias_part.joined:
            self.bias_rows = flat.memory.rows(self.bias_part.rows, batch)

    def admits(self, x: Tensor) -> bool:
        return self.differentiable or not is_buffer(x, self.weight)

    def expects(self, x: Tensor, g: Tensor) -> bool:
        return g.dtype is self.gradient_dtype and type(g) is Tensor

    @abstractmethod
    def record_of(self, x: Tensor, g: Tensor) -> PerSampleGradients:
        """Return the weight's per-sample gradients."""

    def sum_bias(self, g: Tensor, out: Tensor | None) -> Tensor:
        """Return the bias' gradients, written to ``out`` if it is not None."""
        return torch.sum(g.flatten(2), 2, out=out)

    def take(self, run: ReplayRun, x: Tensor, g: Tensor) -> None:
        """Take an output gradient: make the weight's per-sample gradients, and their norms."""
        record = self.record_of(x, g)
        slot = self.weight_part.slot
        if slot.release is not None:
            record = with_clip_norm(slot, record, slot.capture, kept=self._as_recorded)
        elif self.kept:
            record = self._as_recorded(record)
        square = None
        if not self.weight_part.joined:
            square = self.flat.arithmetic.squares(record)
            self.flat.calls.set_square(self.weight_part.square, square.data_ptr())
        rows = None
        if self.bias_part is not None:
            rows = None if self.bias_part.joined else self.bias_rows
            rows = self.sum_bias(g, rows)
        if isinstance(record, ConvolutionGradients):
            x, g = record.x, record.g
        versions = (0, 0) if self.kept else (x._version, g._version)
        operands = (None, None) if self.kept else (x, g)
        run.held[self.index] = (*operands, *versions, record, square, rows)
        run.order.append(self.index)

    def _as_recorded(
        self, record: PerSampleGradients, *, written: bool = False
    ) -> PerSampleGradients:
        """Return gradients as they are, or materialized, whatever the recorded step did."""
        del written
        if not self.kept:
            return record
        assert isinstance(record, ConvolutionGradients)
        return record.materialize()

    def gradients(self, part: Part, held: Any) -> PerSampleGradients:
        if part is self.bias_part:
            return ExplicitGradients(held[6])
        found: PerSampleGradients = held[4]
        return found

    sums_alone = True

    def add_sum(self, add: Add, part: Part, factors: Tensor, held: Any, place: Tensor) -> None:
        record: PerSampleGradients = held[4]
        if not isinstance(record, NormedGradients):  # whose sum may be of coordinates
            place = place.view(record.shape)
        add(record, factors, place)

    def deliver(self, use: CapturedOp, held: Any) -> None:
        use.arrive(0, held[4])
        if self.bias_part is not None:
            use.arrive(1, ExplicitGradients(held[6].clone()))


@kind
class ConvolutionSite(RecordSite):
    """Convolution that is not transposed."""

    operations = ("conv1d", "conv2d", "conv3d")
    places = (False, True)
    joined_as = "rows"
    any_layout = True

    def __init__(self, facts: UseFacts, kept: Sequence[bool]) -> None:
        super().__init__(facts, kept)
        self.kernel_size = tuple(self.plain_weight.shape[2:])
        names = ("stride", "padding", "dilation", "groups")
        self.geometry = {name: self.saved[name] for name in names}
        self.function = conv._DOWNWARDS[len(self.kernel_size) - 1]
        groups = self.geometry["groups"]
        if not math.prod(self.kernel_size) or self.plain_weight.shape[1] * groups != facts.tail[0]:
            raise NotReplayed("a convolution of other channels")

    def admits(self, x: Tensor) -> bool:
        return super().admits(x) and x.is_contiguous() is self.facts.in_rows

    def record_of(self, x: Tensor, g: Tensor) -> PerSampleGradients:
        return ConvolutionGradients(x, g, self.kernel_size, self.geometry)

    def record(self, use: CapturedOp, x: Tensor, g: Tensor) -> None:
        conv._arrive(use, x, self.plain_weight, g)

    def clips(self, part: Part) -> bool:
        return part is self.weight_part and not part.joined


@kind
class EmbeddingSite(RecordSite):
    """Embedding table in which each sample looks up its own ids."""

    operations = ("embedding",)
    places = (False, True)
    joined_as = "operands"

    def __init__(self, facts: UseFacts, kept: Sequence[bool]) -> None:
        super().__init__(facts, kept)
        if not facts.tail:
            raise NotReplayed("embedding looks up one id for each sample")
        self.padding_idx = self.saved["padding_idx"]

    def record_of(self, x: Tensor, g: Tensor) -> PerSampleGradients:
        each = g.reshape(self.batch, math.prod(self.facts.tail), g.shape[-1])
        flat = x.reshape(self.batch, each.shape[1]).to(torch.int64).contiguous()
        return EmbeddingGradients(flat, each, self.saved["rows"], self.saved["padding_idx"])

    def record(self, use: CapturedOp, x: Tensor, g: Tensor) -> None:
        embedding.deliver(use, x, g)


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, run: ReplayRun, site: ConvolutionSite, x: Tensor
    ) -> Tensor:
        ctx.run, ctx.site = run, site
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, site.plain_weight)
        weight = conv.beside(x, site.plain_weight)
        return fresh(site.function(x, weight, site.plain_bias, **site.geometry))

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if g is None:
            return None, None, None, None
        if _differentiable():
            refuse_double_backward()
        site: ConvolutionSite = ctx.site
        gx = None
        if ctx.needs_input_grad[3]:
            probed = ctx.run.program.capture.verification.probe is not None
            few = conv._probed if probed else conv._input_gradient
            gx = few(g, x.to(g.dtype), weight.to(g.dtype), site.saved).to(x.dtype)
        site.arrive(ctx.run, x, g)
        return None, None, None, gx


class _ReplayedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, run: ReplayRun, site: EmbeddingSite, ids: Tensor
    ) -> Tensor:
        ctx.run, ctx.site = run, site
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(ids)
        return fresh(F.embedding(ids, site.plain_weight))

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[None, ...]:
        (ids,) = ctx.saved_tensors
        if g is None:
            return None, None, None, None
        if _differentiable():
            refuse_double_backward()
        ctx.site.arrive(ctx.run, ids, g)
        return None, None, None, None


_apply_convolution = apply_of(_Convolve)
_apply_embedding = apply_of(_ReplayedEmbedding)
skip_frames(_Convolve)
skip_frames(_ReplayedEmbedding)


def _convolution(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a convolution as torch's modules call it; return None if it is not the next use."""
    if len(args) != 7 or kwargs:
        return None
    found = next_site(args[1], args[2], args[0], ConvolutionSite)
    if found is None:
        return None
    run, site = found
    geometry = site.geometry
    if (
        args[3] != geometry["stride"]
        or args[4] != geometry["padding"]
        or args[5] != geometry["dilation"]
        or args[6] != geometry["groups"]
    ):
        run.cursor -= 1
        return None
    return _apply_convolution(run.program.capture.anchor, run, site, args[0])


def _embedding(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run ``F.embedding`` as ``nn.Embedding`` calls it; return None if it is not the next use."""
    if len(args) != 2 or len(kwargs) != 5 or kwargs["max_norm"] is not None:
        return None
    if kwargs["scale_grad_by_freq"]:
        return None
    found = next_site(args[1], None, args[0], EmbeddingSite)
    if found is None:
        return None
    run, site = found
    if kwargs["padding_idx"] != site.saved["padding_idx"]:
        run.cursor -= 1
        return None
    return _apply_embedding(run.program.capture.anchor, run, site, args[0])


for _function in conv._DOWNWARDS:
    REPLAYED[_function] = _convolution
REPLAYED[F.embedding] = _embedding

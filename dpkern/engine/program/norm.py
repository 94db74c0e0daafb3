"""Replay layer, RMS and group norm with private scale and shift."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops import direct
from ..layers import norm as recorded
from ..parameter import REPLAYED, fresh, refuse_double_backward
from ..uses import CapturedOp
from .facts import UseFacts
from .quick import compiled_use, quick, quick_backward
from .run import ReplayRun, next_site
from .site import NotReplayed, UseSite, address, apply_of, kind, skip_frames, written_since

if TYPE_CHECKING:
    from .flat import Flat

_differentiable = torch.is_grad_enabled
_task = torch._C._current_graph_task_id
_empty = torch.empty
_POINTER = Tensor.data_ptr


class NormSite(UseSite):
    """Normalisation whose backward pass writes the per-sample gradients of scale and shift."""

    def __init__(self, facts: UseFacts, kept: Sequence[bool]) -> None:
        super().__init__(facts, kept)
        self.saved = dict(facts.saved)
        if facts.fold != 1:
            raise NotReplayed(f"{facts.operation} sees several rows of each sample")
        if not math.prod(facts.tail):
            raise NotReplayed(f"{facts.operation} is empty")
        self.weight_address = address(self.plain_weight)
        self.kernel = direct.kernel(f"{facts.operation}_backward", self.dtype)

    written: ClassVar[int] = 2
    """Number of per-sample gradients that the kernel writes."""

    sizes: tuple[int, ...]
    """Sizes of the kernel's operands, for the current batch."""

    @property
    def gradient_shape(self) -> tuple[int, ...]:
        """The shape of scale and shift."""
        return tuple(self.plain_weight.shape)

    @property
    def bias_shape(self) -> tuple[int, ...]:
        return self.gradient_shape

    @property
    def weight_kind(self) -> tuple[bool, bool]:
        return True, False

    def place(self, flat: Flat) -> None:
        self.weight_rows = flat.memory.rows_address(self.weight_part.rows)
        number = flat.spare_rows if self.bias_part is None else self.bias_part.rows
        self.rows = (self.weight_rows, flat.memory.rows_address(number))[: self.written]
        self.flat = flat
        self.compile()

    @abstractmethod
    def recorded_backward(
        self, x: Tensor, statistics: tuple[Tensor, ...], weight: Tensor, g: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the gradients of input, scale and shift as the recorded path computes them."""

    def hold(self, run: ReplayRun) -> None:
        """Record that the gradients are in the memory."""
        run.held[self.index] = ()
        run.order.append(self.index)

    def deliver(self, use: CapturedOp, held: Any) -> None:
        memory = self.flat.memory
        gradients = [memory.rows(self.weight_part.rows, use.batch).clone()]
        if self.bias_part is not None:
            gradients.append(memory.rows(self.bias_part.rows, use.batch).clone())
        recorded._deliver(use, self.gradient_shape, *(g.flatten(1) for g in gradients))


def _gradient(
    ctx: Any, x: Tensor, g: Tensor | None, entered: Any = None
) -> tuple[Tensor | None, ...]:
    """Take an output gradient of either norm, and return the input's.

    ``entered`` is what the run has said of the gradient, if it was asked.
    """
    if g is None:
        return None, None, None, None
    if _differentiable():
        refuse_double_backward()
    run: ReplayRun = ctx.run
    site: NormSite = ctx.site
    statistics, weight = ctx.statistics, site.plain_weight
    if weight._version != ctx.version:
        written_since()
    use: Any = entered
    if use is None:
        use = run.task == _task() or run.enters(site, g)
    if use is True:
        if run.held[site.index] is not None or not site.expects(x, g):
            use = run.repeated(site)
        else:
            x, g = direct.contiguous(x), direct.contiguous(g)
            dx = _empty(site.shape, dtype=site.dtype)
            site.kernel(
                *(g.data_ptr(), x.data_ptr(), *map(_POINTER, statistics)),
                *(site.weight_address, dx.data_ptr(), *site.rows, *site.sizes, run.threads),
            )
            site.hold(run)
            return None, None, None, dx
    dx, *gradients = site.recorded_backward(x, statistics, weight, g)
    if use is not False:
        recorded._deliver(use, site.gradient_shape, *gradients)
    return None, None, None, dx


class LastDimensionsSite(NormSite):
    """A normalisation over the last dimensions."""

    def resize(self, flat: Flat, batch: int) -> None:
        super().resize(flat, batch)
        size = math.prod(self.saved["shape"])
        self.sizes = (batch, math.prod(self.facts.tail) // size, size)


@kind
class LayerNormSite(LastDimensionsSite):
    """Mean and variance over the last dimensions."""

    operations = ("layer_norm",)

    def in_cpp(self) -> Any:
        saved = self.saved
        return compiled_use(
            *(self, _apply_layer_norm),
            kind="layer_norm",
            weight_address=self.weight_address,
            rows=self.rows,
            arguments=(saved["shape"], self.plain_weight, self.plain_bias, saved["eps"]),
            entries=math.prod(saved["shape"]),
        )

    def recorded_backward(
        self, x: Tensor, statistics: tuple[Tensor, ...], weight: Tensor, g: Tensor
    ) -> tuple[Tensor, ...]:
        mean, rstd = statistics
        return recorded.layer_norm_gradients(x, mean, rstd, weight, g, self.saved["shape"])


@kind
class RmsNormSite(LastDimensionsSite):
    """Root mean square over the last dimensions; there is no shift."""

    operations = ("rms_norm",)
    written = 1

    def recorded_backward(
        self, x: Tensor, statistics: tuple[Tensor, ...], weight: Tensor, g: Tensor
    ) -> tuple[Tensor, ...]:
        return recorded.rms_norm_gradients(x, statistics[0], weight, g, self.saved["shape"])


@kind
class GroupNormSite(NormSite):
    """Group norm, with mean and variance over groups of channels."""

    operations = ("group_norm",)

    def resize(self, flat: Flat, batch: int) -> None:
        super().resize(flat, batch)
        channels, groups = self.facts.tail[0], self.saved["groups"]
        self.sizes = (batch, channels, math.prod(self.facts.tail[1:]), groups)

    def recorded_backward(
        self, x: Tensor, statistics: tuple[Tensor, ...], weight: Tensor, g: Tensor
    ) -> tuple[Tensor, ...]:
        mean, rstd = statistics
        return recorded.group_norm_gradients(x, mean, rstd, weight, g)


class _ReplayedLayerNorm(torch.autograd.Function):
    @staticmethod
    @quick("layer_norm_forward")
    def forward(ctx: Any, anchor: Tensor, run: ReplayRun, site: LayerNormSite, x: Tensor) -> Tensor:
        ctx.run, ctx.site = run, site
        ctx.set_materialize_grads(False)
        weight, saved = site.plain_weight, site.saved
        out, mean, rstd = torch.native_layer_norm(
            x, saved["shape"], weight, site.plain_bias, saved["eps"]
        )
        ctx.save_for_backward(x)
        ctx.statistics, ctx.version = (mean, rstd), weight._version
        return out

    backward = staticmethod(quick_backward("layer_norm_backward", _gradient))


class _ReplayedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, run: ReplayRun, site: RmsNormSite, x: Tensor) -> Tensor:
        ctx.run, ctx.site = run, site
        ctx.set_materialize_grads(False)
        weight, shape, eps = site.plain_weight, site.saved["shape"], site.saved["eps"]
        out = fresh(F.rms_norm(x, shape, weight, eps))
        ctx.save_for_backward(x)
        ctx.version = weight._version
        ctx.statistics = (recorded.rms_norm_statistics(x, shape, eps),)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return _gradient(ctx, x, g)


class _ReplayedGroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, run: ReplayRun, site: GroupNormSite, x: Tensor) -> Tensor:
        ctx.run, ctx.site = run, site
        ctx.set_materialize_grads(False)
        weight, saved = site.plain_weight, site.saved
        x = direct.contiguous(x)
        rows, channels, size, groups = site.sizes
        out, mean, rstd = torch.native_group_norm(
            x, weight, site.plain_bias, rows, channels, size, groups, saved["eps"]
        )
        ctx.save_for_backward(x)
        ctx.statistics, ctx.version = (mean, rstd), weight._version
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return _gradient(ctx, x, g)


_apply_layer_norm = apply_of(_ReplayedLayerNorm)
_apply_group_norm = apply_of(_ReplayedGroupNorm)
_apply_rms_norm = apply_of(_ReplayedRmsNorm)
skip_frames(_ReplayedLayerNorm)
skip_frames(_ReplayedRmsNorm)
skip_frames(_ReplayedGroupNorm)


@quick("layer_norm")
def layer_norm(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run ``F.layer_norm`` as ``nn.LayerNorm`` calls it; return None if it is not the next use."""
    if len(args) != 2 or len(kwargs) != 3:
        return None
    found = next_site(kwargs["weight"], kwargs["bias"], args[0], LayerNormSite)
    if found is None:
        return None
    run, site = found
    if args[1] != site.saved["shape"] or kwargs["eps"] != site.saved["eps"]:
        run.cursor -= 1
        return None
    return _apply_layer_norm(run.program.capture.anchor, run, site, args[0])


def rms_norm(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run ``F.rms_norm`` as ``nn.RMSNorm`` calls it; None if it is not the next use."""
    if len(args) != 2 or len(kwargs) != 2:
        return None
    found = next_site(kwargs["weight"], None, args[0], RmsNormSite)
    if found is None:
        return None
    run, site = found
    if args[1] != site.saved["shape"] or kwargs["eps"] != site.saved["eps"]:
        run.cursor -= 1
        return None
    return _apply_rms_norm(run.program.capture.anchor, run, site, args[0])


def group_norm(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run ``F.group_norm`` as ``nn.GroupNorm`` calls it; return None if it is not the next use."""
    if len(args) != 2 or len(kwargs) != 3:
        return None
    found = next_site(kwargs["weight"], kwargs["bias"], args[0], GroupNormSite)
    if found is None:
        return None
    run, site = found
    if args[1] != site.saved["groups"] or kwargs["eps"] != site.saved["eps"]:
        run.cursor -= 1
        return None
    return _apply_group_norm(run.program.capture.anchor, run, site, args[0])


REPLAYED[F.layer_norm] = layer_norm
REPLAYED[F.rms_norm] = rms_norm
REPLAYED[F.group_norm] = group_norm

"""Handle expressions: tensors computed from parameters alone, such as ``w.t()`` or ``w + b @ a``.

After the backward pass their per-sample gradients are propagated to the parameters, for all samples
at once, through the expression's own graph. Rows of a parameter and its transpose need no such
step, because their gradient is a part of the parameter's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from ...base.errors import InvalidInput, UnsupportedModule
from ...ops.backends import _device
from ..merge import merge
from ..parameter import (
    PrivateExpression,
    is_private,
    plain,
    refuse,
    replaced,
    rule,
    source_of,
    tensors_in,
    without_torch_function,
)
from ..per_sample_gradients import ExplicitGradients, PerSampleGradients
from ..provenance.leaves import nodes_of
from ..tables import EmbeddingGradients
from ..uses import CapturedGradients, GradientSource, GradientTarget, ParameterSource

LARGEST = 1 << 28
"""The most bytes of per-sample copies of one tensor where no rule has a cheaper route."""


class Expression(GradientSource):
    """A source whose gradients are propagated to the parameters it was computed from."""

    def __init__(self, tensor: Tensor, name: str, slots: Sequence[ParameterSource]) -> None:
        super().__init__(slots[0].capture, name, tensor.shape)
        self.tensor = tensor
        self.slots = list(slots)
        self.view: GradientTarget | None = None
        """The target in the parameter, if this is a part of one or its transpose."""
        self.looked_up: tuple[Tensor, int, int | None] | None = None
        """The ids, rows and padding index of an embedding of ids that all samples share."""
        self.for_samples: Callable[[], Tensor] | None = None
        """Makes the same tensor with a part for each sample, if its first dimension may be that of
        the samples because something was repeated so often; None for other tensors."""
        self.capture.expressions.append(self)
        self.capture.recorded = True

    def count_use(self) -> None:
        """Count a use, also of an expression that was made before these samples came."""
        if self not in self.capture.expressions:
            self.uses = 0
            self._join()
        super().count_use()

    def take(self, arrival: CapturedGradients) -> None:
        """Add gradients, also of a pass that others have followed before its backward pass."""
        if self not in self.capture.expressions:
            self._join()
        super().take(arrival)

    def _join(self) -> None:
        """Be led back with the expressions of the current samples."""
        self.capture.expressions.append(self)
        if self.view is None:
            for slot in self.slots:
                slot.indirect = True

    @property
    def watched(self) -> bool:
        return any(slot.watched for slot in self.slots)

    @property
    def is_complex(self) -> bool:
        return self.tensor.is_complex()

    @property
    def operations(self) -> tuple[str, ...]:
        return tuple(sorted(node.name() for node in nodes_of(self.tensor.grad_fn)))

    def lead_back(self) -> None:
        """Turn the gradients captured for the expression into gradients of its parameters."""
        if not self.arrivals:
            return
        record = merge([arrival.record for arrival in self.arrivals])
        self.arrivals.clear()
        if self.looked_up is not None:
            ids, rows, padding_idx = self.looked_up
            g = record.per_sample().reshape(record.batch, ids.numel(), self.shape[-1])
            each = ids.reshape(1, -1).expand(record.batch, -1).long().contiguous()
            self.slots[0].arrivals.append(
                CapturedGradients(EmbeddingGradients(each, g, rows, padding_idx))
            )
            return
        for slot, gradients in zip(self.slots, self._pull_back(record), strict=True):
            if gradients is not None:
                slot.arrivals.append(CapturedGradients(ExplicitGradients(gradients)))

    def _pull_back(self, record: PerSampleGradients) -> Sequence[Tensor | None]:
        most = max(slot.used.numel() for slot in self.slots)
        check_size(self, record.batch * max(most, self.tensor.numel()))
        gradients = record.per_sample().to(self.tensor.dtype)
        with without_torch_function():
            if record.batch == 0:
                return [slot.used.detach().new_zeros((0, *slot.shape)) for slot in self.slots]
            try:
                # Anomaly mode looks at each gradient's values, which a batch of them cannot show.
                if not (self.capture.samples_apart or torch.is_anomaly_enabled()):
                    return self._gradients(gradients, is_grads_batched=True)
                each = [self._gradients(gradient.clone()) for gradient in gradients]
                return [
                    None if rows[0] is None else torch.stack(rows)
                    for rows in zip(*each, strict=True)
                ]
            except CheckpointError as error:
                raise UnsupportedModule(
                    self.name,
                    expected="an expression of parameters outside of checkpoint(use_reentrant="
                    "False)",
                    got="one inside, which does not run again as it ran",
                    remedy="Pass use_reentrant=True, or compute it in front of the checkpoint.",
                ) from error
            except RuntimeError as error:
                if "backward through the graph a second time" not in str(error):
                    raise
                raise UnsupportedModule(
                    self.name,
                    expected="an expression of parameters that is computed anew for every batch",
                    got="one whose graph a backward pass has used up",
                    remedy="Compute it in forward(), without torch.nn.utils.parametrize.cached(); "
                    "retain_graph=True keeps the graph of one that several batches use.",
                ) from error

    def _gradients(self, g: Tensor, **options: bool) -> Sequence[Tensor | None]:
        return torch.autograd.grad(
            self.tensor,
            [slot.used for slot in self.slots],
            g,
            retain_graph=True,
            allow_unused=True,
            **options,
        )


def check_size(source: GradientSource, numbers: int) -> None:
    """Refuse copies per sample that would take too much memory.

    Raises:
        UnsupportedModule: more than ``LARGEST`` bytes.
    """
    if 4 * numbers > LARGEST:
        raise UnsupportedModule(
            source.name,
            expected=f"per-sample gradients of at most {LARGEST >> 20} MiB",
            got=f"{4 * numbers >> 20} MiB, in an operation without a cheaper route",
            remedy="Use the parameter through F.linear, a convolution, an embedding or a "
            "normalisation; or pass a smaller max_physical_batch_size.",
        )


def slots_in(tree: Any) -> list[ParameterSource]:
    """Return the trained parameters behind private tensors in nested arguments, each once."""
    found: dict[int, ParameterSource] = {}
    for tensor in tensors_in(tree):
        if is_private(tensor):
            source = source_of(tensor)
            for slot in source.slots if isinstance(source, Expression) else [source]:
                assert isinstance(slot, ParameterSource)
                if slot.parameter.requires_grad:
                    found.setdefault(slot.index, slot)
    return list(found.values())


def is_of_parameters_alone(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether no tensor among the arguments can belong to a sample."""
    private = [t for t in tensors_in((args, kwargs)) if is_private(t)]
    batch = source_of(private[0]).capture.batch
    return not any(
        looks_like_samples(t, private, batch)
        for t in tensors_in((args, kwargs))
        if not is_private(t)
    )


def looks_like_samples(tensor: Tensor, private: Sequence[Tensor], batch: int | None) -> bool:
    """Whether a tensor may hold samples: it needs a gradient, or its first dimension is B."""
    if tensor.requires_grad:
        return True
    if tensor.dim() == 0 or tensor.shape[0] != batch or is_buffer(tensor, private[0]):
        return False
    given = source_of(private[0]).capture.passes.given(tensor)
    if not given and (_is_identity(tensor) or are_relative_positions(tensor)):
        return False
    # With one sample everything is its own, and constants do no harm as data. Whole numbers pick
    # entries, as many by chance as there are; masks and factors have the shape of parameters.
    if given or batch == 1 or tensor.dtype is torch.int64:
        return True
    with without_torch_function():
        return all(tensor.shape != p.shape for p in private)


def is_constant_operand(tensor: Tensor, private: Tensor) -> bool:
    """Whether a first operand can hold no samples, so that the result is of parameters alone.

    A constant whose rows cannot be shared out among the samples is none of theirs. Neither is the
    identity, by which weights are read out of layers.
    """
    if is_buffer(tensor, private):
        return True
    capture = source_of(private).capture
    if (
        tensor.requires_grad
        or not capture.batch
        or tensor.dim() == 0
        or capture.passes.given(tensor)
    ):
        return False
    if getattr(tensor, _SAMPLES, False):
        return False
    return tensor.shape[0] % capture.batch != 0 or _is_identity(tensor)


_SAMPLES = "_holds_samples"


def as_samples(tensor: Tensor) -> Tensor:
    """Return the tensor, noted as one row for each sample, whatever its values are."""
    setattr(tensor, _SAMPLES, True)
    return tensor


def check_readable(tensor: Tensor, kind: str) -> None:
    """Refuse to look at the contents of a tensor while a CUDA graph is recorded.

    Raises:
        InvalidInput: a graph is recorded.
    """
    if _device.capturing(tensor.device):
        raise InvalidInput(
            "StepGraph",
            expected="a pass that reads no values while it is recorded",
            got=f"{kind} of {tensor.shape[0]} rows, as many as the pass has: its values would tell "
            "whether they are samples",
            remedy="Record another number of rows, StepGraph(engine, loss, rows=...), which fills "
            "batches up.",
        )


def _is_identity(tensor: Tensor) -> bool:
    if tensor.dim() != 2 or tensor.shape[0] != tensor.shape[1] or not tensor.is_floating_point():
        return False
    check_readable(tensor, "a square constant")
    with without_torch_function():
        eye = torch.eye(tensor.shape[0], dtype=tensor.dtype, device=tensor.device)
        return tensor.shape[0] > 1 and torch.equal(tensor, eye)


def are_relative_positions(ids: Tensor) -> bool:
    """Whether indices follow the difference of their row and column, and nothing else.

    As many positions as samples look like samples, whose indices do not.
    """
    if ids.dim() != 2 or ids.shape[0] != ids.shape[1] or ids.is_floating_point():
        return False
    check_readable(ids, "indices")
    along = ids[1:, 1:] == ids[:-1, :-1]
    return bool(along.all()) and bool((ids != ids[:1, :1]).any())


def is_buffer(tensor: Tensor, private: Tensor) -> bool:
    """Whether a tensor shares the memory of a buffer, which belongs to no sample."""
    if tensor.requires_grad or source_of(private).capture.passes.given(tensor):
        return False
    place = tensor.untyped_storage().data_ptr()
    buffers = source_of(private).capture.module.buffers()
    return any(buffer.untyped_storage().data_ptr() == place for buffer in buffers)


def of(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Any:
    """Wrap the result of an operation on parameters alone."""
    slots = slots_in((args, kwargs))
    name = "+".join(slot.name for slot in slots) if len(slots) < 4 else f"{slots[0].name}+..."
    if isinstance(result, Tensor):
        if not result.requires_grad:
            return result
        expression = Expression(result, name, slots)
        expression.for_samples = _again_for_samples(func, args, kwargs)
        expression.view = _view_of(result, slots)
        if expression.view is None:
            for slot in slots:
                slot.indirect = True
        with without_torch_function():
            wrapped = result.as_subclass(PrivateExpression)
        wrapped._private = expression
        return wrapped
    if isinstance(result, (tuple, list)):
        return type(result)(of(func, args, kwargs, item) for item in result)
    raise refuse(
        func,
        slots,
        got=f"a {type(result).__name__}",
        remedy="Write the operation with functions that return tensors.",
    )


def with_samples(tree: Any) -> Any:
    """Return the same arguments with a part for each sample where a tensor can have one.

    None if there is no such tensor.
    """
    found = [t for t in tensors_in(tree) if _spread(t) is not None]
    for tensor in found:
        make = _spread(tensor)
        assert make is not None
        tree = replaced(tree, tensor, make())
    return tree if found else None


def _spread(tensor: Tensor) -> Callable[[], Tensor] | None:
    source = source_of(tensor) if is_private(tensor) else None
    return source.for_samples if isinstance(source, Expression) else None


def _again_for_samples(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Callable[[], Tensor] | None:
    """Return what runs the operation again with a part for each sample, if it can have one."""
    everything = (tuple(args), kwargs)
    private = [t for t in tensors_in(everything) if is_private(t)]
    batch = source_of(private[0]).capture.batch or 0
    constants = [t for t in tensors_in(everything) if not is_private(t)]
    repeated = [t for t in constants if batch > 1 and t.dim() and t.shape[0] == batch]
    repeated = [t for t in repeated if t.stride(0) == 0]
    if not repeated and all(_spread(t) is None for t in private):
        return None

    def again() -> Tensor:
        tree = with_samples(everything) or everything
        for constant in repeated:
            tree = replaced(tree, constant, constant.clone())  # no longer a buffer
        result: Tensor = func(*tree[0], **tree[1])
        return result

    return again


@rule(Tensor.to, Tensor.type_as, Tensor.view_as, Tensor.reshape_as)
def _like(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Use only the dtype, device or shape of the second tensor, which may hold samples."""
    first, *rest = args
    if not is_private(first):
        return func(first, *plain(tuple(rest)), **plain(kwargs))
    with without_torch_function():
        result = func(*args, **kwargs)
    return of(func, (first,), {}, result)


def target_of(tensor: Tensor) -> GradientTarget:
    """Return the target of a private tensor's gradient."""
    source = source_of(tensor)
    if isinstance(source, Expression):
        return source.view or GradientTarget(source)
    assert isinstance(source, ParameterSource)
    return source.target


def whole_target_of(tensor: Tensor) -> GradientTarget:
    """Return the target of a private tensor's gradient for rules that support no transposes."""
    target = target_of(tensor)
    return GradientTarget(source_of(tensor)) if target.transposed else target


def values(tensor: Tensor) -> Tensor:
    """Return a private tensor's values as an ordinary tensor."""
    result: Tensor = plain(tensor)
    return result


def _view_of(result: Tensor, slots: Sequence[ParameterSource]) -> GradientTarget | None:
    """Return the target of rows of one parameter, or of its transpose; None for other tensors.

    The gradient of such a view is that part of the parameter's gradient.
    """
    if len(slots) != 1 or result.numel() == 0:
        return None
    (slot,) = slots
    with without_torch_function():
        base: Tensor = slot.used.detach()
        same = result.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
        if not same or result.dtype is not base.dtype or not base.is_contiguous():
            return None
        whole = result.numel() == base.numel()
        if not result.is_contiguous():
            turned = result.dim() == 2 and whole and result.t().is_contiguous()
            if turned and result.t().shape == base.shape:
                return GradientTarget(slot, transposed=True)
            return None
        row = math.prod(base.shape[1:])
        first = result.storage_offset() - base.storage_offset()
        if whole:
            return GradientTarget(slot)
        if row == 0 or first % row or result.numel() % row:
            return None
        return GradientTarget(slot, (first // row, (first + result.numel()) // row))

"""Compute clipped sums in integers the way float sums are made: gradients stay in registers.

In units u of the noise lattice, with ``M = floor(C / u)`` of a clip group,

    f_b = min(1 / u, M (1 - 2^-21) / n_b),    q_b = trunc(f_b grad_b),    sum = sum_b q_b

where ``n_b`` bounds the norm of the numbers that are truncated; gradients of one position are
products of integer vectors instead. ``docs/exact.md`` proves that every ``|q_b| <= M``, so that no
norm of a sample's integers is looked at here. ``q_b`` depends on sample b alone: the
sums are the same for every order, every number of threads and every division into batches.

Of a parameter whose noise stands on whitened coordinates, the integers are those of each sample's
coordinates, which are written out in float32 (``NormedGradients.rows``).

Other plans (maps of other kinds, L1 norms, automatic clipping, float64, devices without Triton) are
clipped by ``ops.clip.clip_sum``, which looks at each sample's integers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import Literal

import torch
from torch import Tensor

from ..base.dispatch import availability, wanted_backend
from ..ops import clip, ghost
from ..ops._count import count
from ..privacy.mechanisms import Plan
from ..privacy.mechanisms.plan import Block
from ..privacy.mechanisms.release import Taps
from .attribution import attributed_to
from .clip_norms import NormedGradients
from .per_sample_gradients import (
    ConvolutionGradients,
    ExplicitGradients,
    LinearGradients,
    PerSampleGradients,
    operands,
    to_sum_dtype,
    to_sum_dtype_dense,
)
from .sum_store import SumStore
from .tables import EmbeddingGradients, TiedGradients
from .uses import CapturedGradients, ParameterSource

Part = tuple[ParameterSource, CapturedGradients]
MADE_IN_PLACE = (LinearGradients, ConvolutionGradients, EmbeddingGradients, TiedGradients)
"""Records whose integers are made without writing gradients out."""

_INT32_MOST = 2**31 - 1
FACTORED_MOST = 1 << 22
"""M below which gradients of one position are products of integer vectors."""


def sums_in_place(plan: Plan, slots: Sequence[ParameterSource]) -> bool:
    """Whether the plan's integer sums are made here, of these parameters."""
    return (
        plan.arithmetic == "exact"
        and plan.p == 2
        and plan.clipping != "automatic"
        and not plan.needs_raw
        and all(map(_has_integers_here, plan.blocks))
        and all(clip.sum_dtype(slot.parameter.dtype) is torch.float32 for slot in slots)
        and _have_kernels(slots)
    )


def _have_kernels(slots: Sequence[ParameterSource]) -> bool:
    """Whether parameters lie on a CPU, or on one device whose backend adds up integers."""
    if all(slot.parameter.is_cpu for slot in slots):
        return True
    devices = {slot.parameter.device for slot in slots}
    chosen = wanted_backend() in (None, "triton") and availability("triton")[0]
    return len(devices) == 1 and chosen and all(map(_multiplies_bytes, devices))


def _multiplies_bytes(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def _has_integers_here(block: Block) -> bool:
    """Whether the integers of a block are made here: of its gradients, or whitened coordinates."""
    release = block.release
    if release is None:
        return True
    whitened = isinstance(release, Taps) and release.norm == "release"
    return whitened and release.pair_map is not None


def most_samples(plan: Plan) -> int:
    """Return how many samples' integers int32 is sure to hold the sum of, at least 1."""
    return max(1, _INT32_MOST // max(1, plan.most_units))


@dataclass(frozen=True)
class Aim:
    """The norm in units that the clip factors of a group aim at, and what integers are made.

    Attributes:
        unit: u, the size of a unit.
        bound: what the norms are clipped to, before the slack of the factors.
        factored: whether gradients of one position become products of integer vectors.
    """

    unit: float
    bound: float
    factored: bool

    @classmethod
    def of(cls, block: Block) -> Aim:
        """Return the aim of a block's clip group."""
        assert block.unit is not None
        assert block.integer_bound is not None
        most = block.integer_bound
        return cls(block.unit, most, most < FACTORED_MOST)


def factoring_error(plan: Plan, index: int, entries: int, samples: int) -> float:
    """Return thrice the norm that sums of so many samples of one position are off by, usually.

    A sample's integers are off by about ``(d p)^(1/4) sqrt(M / 6)`` units, of d p entries
    (``docs/exact.md``, lemma 2), each in a direction of its own. 0 where they are truncated.
    """
    block = plan.blocks[index]
    if block.unit is None or block.integer_bound is None or not Aim.of(block).factored:
        return 0.0
    return 3 * block.unit * math.sqrt(samples * block.integer_bound / 6 * math.sqrt(entries))


def integer_sums(
    plan: Plan,
    slots: Sequence[ParameterSource],
    parts: Sequence[Part],
    *,
    batch: int,
    scale: float,
    store: SumStore,
    left_out: Tensor | None = None,
) -> clip.ClipResult:
    """Return the clipped sums of the current samples, in units of the plan's lattice.

    Args:
        plan: one that ``sums_in_place`` accepts.
        slots: all parameters, in the plan's order.
        parts: their gradients; no two parts touch the same entries.
        batch: number of samples.
        scale: factor from captured gradients to those of each sample's own loss.
        store: memory for the sums.
        left_out: marks rows that are no samples, whose factors and norms become 0.

    Returns:
        Sums in the parameters' shapes, or of their release coordinates: int32, or int64 where int32
        might overflow.
    """
    device = slots[0].parameter.device
    groups = [_IntegerGroup(plan, indices, parts) for indices in plan.groups]
    found = [group.factors(batch, scale, device) for group in groups]
    if left_out is not None:
        found = [tuple(each.masked_fill(left_out, 0.0) for each in pair) for pair in found]
    norms, factors = zip(*found, strict=True)
    total = norms[0] if len(norms) == 1 else torch.stack(norms).square().sum(0).sqrt()
    finite = torch.isfinite(total)
    if len(groups) > 1:  # a sample that is dropped from one group is dropped from all
        factors = tuple(each.where(finite, 0.0) for each in factors)
    shapes = [
        slot.shape if block.release is None else block.signal_shape
        for slot, block in zip(slots, plan.blocks, strict=True)
    ]
    most = most_samples(plan)
    if batch <= most:
        sums = store.zeros(shapes, torch.int32, device)
        for group, each in zip(groups, factors, strict=True):
            group.add(each, sums)
    else:
        # Parts that nobody holds: a graph that goes on adding to the store's memory would meet
        # the sums that are lent it next.
        fresh = [torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes]
        sums = _wide_sums(fresh, groups, factors, most)
    return clip.ClipResult(
        sums=tuple(sums),
        norm_bound=math.hypot(*plan.group_bounds),
        norms=total,
        nonfinite=count(~finite),
        batch_size=batch,
        arithmetic="exact",
        unit=tuple(unit for unit in plan.units if unit is not None),
        p=2,
        max_norms=plan.group_bounds,
        bounded_by="proved",
    )


def _wide_sums(
    narrow: list[Tensor], groups: Sequence[_IntegerGroup], factors: Sequence[Tensor], most: int
) -> list[Tensor]:
    """Return int64 sums of more samples than int32 can hold, added up ``most`` at a time."""
    sums = [torch.zeros_like(part, dtype=torch.int64) for part in narrow]
    batch = len(factors[0])
    for first in range(0, batch, most):
        chosen = torch.zeros(batch, dtype=torch.bool, device=narrow[0].device)
        chosen[first : first + most] = True
        for part in narrow:
            part.zero_()
        for group, each in zip(groups, factors, strict=True):
            group.add(each.where(chosen, 0.0), narrow)
        for total, part in zip(sums, narrow, strict=True):
            total.add_(part)
    return sums


class _IntegerGroup:
    """The gradients of the parameters of one clip group, to be clipped in integers."""

    def __init__(self, plan: Plan, indices: Sequence[int], parts: Sequence[Part]) -> None:
        mine = frozenset(indices)
        self.parts = [_with_rows(slot, arrival) for slot, arrival in parts if slot.index in mine]
        """Parameters and gradients, and the gradients as rows where they are written out."""
        self.aim = Aim.of(plan.blocks[indices[0]])

    def factors(self, batch: int, scale: float, device: torch.device) -> tuple[Tensor, ...]:
        """Return each sample's norm in the group, and its factor from gradient to clipped units."""
        squares = list(self._squares())
        if not squares:
            squares = [torch.zeros(batch, dtype=torch.float64, device=device)]
        # In units u the bound is M: the factor is min(1 / u, M (1 - 2^-21) / n).
        factors, norms = ghost.clip_factors(
            squares, self.aim.bound, dtype=torch.float32, scale=scale / self.aim.unit
        )
        return norms * self.aim.unit, factors

    def _squares(self) -> Iterator[Tensor]:
        """Yield upper bounds of the squared norms of the numbers that become integers."""
        for slot, arrival, rows in self.parts:
            if arrival.square is not None:
                yield arrival.square
            elif rows is None:
                with attributed_to(slot):
                    yield squared_norms_rounded(arrival.record)
        fresh = [(slot, rows) for slot, a, rows in self.parts if a.square is None]
        written = [(slot, rows) for slot, rows in fresh if rows is not None]
        if written:
            with attributed_to(*(slot for slot, _ in written)):
                yield ghost.explicit_norm([rows for _, rows in written])

    def add(self, factors: Tensor, sums: Sequence[Tensor]) -> None:
        """Add the samples' integers to the sums of all parameters."""
        written = []
        for slot, arrival, rows in self.parts:
            out = _place(sums, slot, arrival)
            if rows is not None:
                written.append((slot, rows, out))
                continue
            with attributed_to(slot):
                add_clipped(self.aim, arrival.record, factors, out)
        if written:
            with attributed_to(*(slot for slot, _, _ in written)):
                ghost.explicit_integer_sum(
                    [rows for _, rows, _ in written], factors, [out for _, _, out in written]
                )


def _with_rows(
    slot: ParameterSource, arrival: CapturedGradients
) -> tuple[ParameterSource, CapturedGradients, Tensor | None]:
    """Return gradients with rows ``[B, *shape]``, unless their integers are made in place."""
    record = arrival.record
    if isinstance(record, (*MADE_IN_PLACE, NormedGradients)):
        return slot, arrival, None
    if not isinstance(record, ExplicitGradients):
        arrival = CapturedGradients(record, arrival.rows)
    return slot, arrival, to_sum_dtype_dense(record.per_sample(), torch.float32)


def add_clipped(aim: Aim, record: PerSampleGradients, factors: Tensor, out: Tensor) -> None:
    """Add the integers that become of ``factors_b grad_b`` in a clip group with this aim."""
    if aim.factored and _has_one_position(record):
        add_factored(record, factors, out)
    else:
        add_integers(record, factors, out)


def add_factored(record: PerSampleGradients, factors: Tensor, out: Tensor) -> None:
    """Add products of integer vectors near ``factors_b grad_b``, of gradients of one position."""
    assert isinstance(record, LinearGradients)
    ghost.linear_integer_sum(*operands(record.a, record.g), factors, out, rounding="factors")


def _has_one_position(record: PerSampleGradients) -> bool:
    return isinstance(record, LinearGradients) and int(record.a.shape[1]) == 1


def _place(sums: Sequence[Tensor], slot: ParameterSource, arrival: CapturedGradients) -> Tensor:
    """Return the view of ``sums`` that these gradients are added to."""
    out = sums[slot.index]
    if isinstance(arrival.record, NormedGradients):
        return out  # of its coordinates
    out = out if arrival.rows is None else out[slice(*arrival.rows)]
    return out.view(arrival.record.shape)


def squared_norms_rounded(record: PerSampleGradients) -> Tensor:
    """Return upper bounds of the squared norms of the numbers that are truncated.

    Records that are written out for their sums count as they are.
    """
    if isinstance(record, LinearGradients) and record.integer_operands:
        return ghost.linear_integer_norm(to_sum_dtype(record.a), to_sum_dtype(record.g))
    if isinstance(record, NormedGradients):
        return ghost.explicit_norm([record.rows()])
    square = record.squared_norms()
    error = rounding_error(record) if isinstance(record, MADE_IN_PLACE) else None
    # 2^-40: more than these few operations lose.
    return square if error is None else (square.sqrt() + error).square() * (1 + 2.0**-40)


@singledispatch
def rounding_error(record: PerSampleGradients) -> Tensor | None:
    """Return bounds of the norm of (numbers that are truncated - gradient whose norm was taken).

    float64 ``[B]``; None where the norm bounds the very numbers that are truncated.
    """
    raise NotImplementedError(type(record))


@rounding_error.register
def _(record: LinearGradients) -> Tensor | None:
    if record.a.shape[1] == 1:
        return None
    a, g = operands(record.a, record.g)
    error = ghost.linear_sum_error(a, g)
    if wanted_backend() in (None, "cpu") or not availability("cpu")[0] or not a.is_cpu:
        return error
    # Tiles of bfloat16 numbers round more, and a step outside this backend's block may take them.
    return torch.maximum(error, ghost.linear_sum_error(a, g, backend="cpu"))


@rounding_error.register
def _(record: ConvolutionGradients) -> Tensor:
    return ghost.conv_sum_error(*operands(record.x, record.g), **record.options)


@rounding_error.register
def _(record: EmbeddingGradients) -> None:
    return None


@rounding_error.register
def _(record: TiedGradients) -> Tensor:
    table, (a, g) = record.table, operands(record.head.a, record.head.g)
    padding = table.padding_idx
    return ghost.tied_sum_error(table.ids, a, g, to_sum_dtype(table.g), padding_idx=padding)


@singledispatch
def add_integers(record: PerSampleGradients, factors: Tensor, out: Tensor) -> None:
    """Add ``sum_b trunc(factors_b grad_b)`` to ``out``; a factor of zero drops the sample."""
    raise NotImplementedError(type(record))


@add_integers.register
def _(record: ExplicitGradients, factors: Tensor, out: Tensor) -> None:
    ghost.explicit_integer_sum([to_sum_dtype_dense(record.grads, torch.float32)], factors, [out])


@add_integers.register
def _(record: NormedGradients, factors: Tensor, out: Tensor) -> None:
    ghost.explicit_integer_sum([record.rows()], factors, [out])


@add_integers.register
def _(record: LinearGradients, factors: Tensor, out: Tensor) -> None:
    a, g = operands(record.a, record.g)
    rounding: Literal["operands", "truncate"] = (
        "operands" if record.integer_operands else "truncate"
    )
    ghost.linear_integer_sum(a, g, factors, out, rounding=rounding)


@add_integers.register
def _(record: ConvolutionGradients, factors: Tensor, out: Tensor) -> None:
    ghost.conv_integer_sum(*operands(record.x, record.g), factors, out, **record.options)


@add_integers.register
def _(record: EmbeddingGradients, factors: Tensor, out: Tensor) -> None:
    padding = record.padding_idx
    ghost.embedding_integer_sum(
        record.ids, to_sum_dtype(record.g), factors, out, padding_idx=padding
    )


@add_integers.register
def _(record: TiedGradients, factors: Tensor, out: Tensor) -> None:
    table, (a, g) = record.table, operands(record.head.a, record.head.g)
    padding = table.padding_idx
    ghost.tied_integer_sum(
        table.ids, a, g, to_sum_dtype(table.g), factors, out, padding_idx=padding
    )


__all__ = [
    "Aim",
    "add_clipped",
    "add_factored",
    "add_integers",
    "factoring_error",
    "integer_sums",
    "most_samples",
    "rounding_error",
    "squared_norms_rounded",
    "sums_in_place",
]

"""Replace some samples in a module's inputs, and compare outputs in the rows of the others."""

from __future__ import annotations

import copy
import dataclasses
import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .contents import same_bits

LARGE = 1024.0
"""Factor of float entries that are replaced by large ones, on CPUs."""

_ROUNDING = {torch.float16: 4, torch.bfloat16: 4}
"""Maximum difference of rows in units in the last place, by dtype; 64 for other dtypes."""

Change = Callable[[Tensor, Tensor], Tensor]


def mapped(tree: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return the tree with every tensor replaced; containers are copied, never changed.

    Containers are tuples, lists, mappings, dataclasses and objects with tensors as attributes.
    """
    if isinstance(tree, PackedSequence):
        return tree
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, (tuple, list)):
        items = [mapped(item, function) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, Mapping):
        changed: Any = copy.copy(tree)
        for key, value in tree.items():
            if (new := mapped(value, function)) is not value:
                changed[key] = new
        return changed
    if _is_record(tree):
        result = copy.copy(tree)
        for name, value in vars(tree).items():
            if (new := mapped(value, function)) is not value:
                object.__setattr__(result, name, new)
        return result
    return tree


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors that ``mapped`` would visit."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, PackedSequence):
        yield tree.data
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from tensors_of(item)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from tensors_of(item)
    elif _is_record(tree):
        for item in vars(tree).values():
            yield from tensors_of(item)


def values_of(tree: Any) -> Iterator[str | bytes]:
    """Yield what the numbers, texts and arrays are that ``mapped`` would leave as they are."""
    if isinstance(tree, (bool, int, float, complex, str, np.generic)):
        yield str(tree)  # NaN, too, equals itself
    elif isinstance(tree, np.ndarray):
        yield tree.tobytes()
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from values_of(item)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from values_of(item)
    elif _is_record(tree):
        for item in vars(tree).values():
            yield from values_of(item)


def _index(rows: Sequence[int], device: torch.device) -> Tensor:
    """Return the numbers of samples as a tensor; from an array, as torch reads lists slowly."""
    numbers = array("q", rows)
    return (
        torch.frombuffer(numbers, dtype=torch.int64).to(device)
        if numbers
        else torch.empty(0, dtype=torch.int64, device=device)
    )


def _is_record(thing: Any) -> bool:
    """Whether this is a plain object that holds tensors, such as a dataclass."""
    if isinstance(thing, (type, torch.nn.Module)) or not hasattr(thing, "__dict__"):
        return False
    if dataclasses.is_dataclass(thing):
        return True
    return any(isinstance(v, (Tensor, Mapping, list)) for v in vars(thing).values()) and not (
        callable(thing)
    )


def fresh(tree: Any) -> Any:
    """Return the tree with copies of its tensors: a pass may write into its inputs."""
    return mapped(tree, _fresh)


def _fresh(tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def replaced_rows(tree: Any, batch: int, rows: Sequence[int], change: Change) -> tuple[Any, bool]:
    """Return the tree with these samples' rows replaced, and whether that changed anything.

    Args:
        tree: arguments of a module.
        batch: samples; a tensor has rows if its first dimension is a multiple of it.
        rows: samples that are replaced.
        change: returns, from a tensor ``[batch, ...]`` and indices of samples, their replacements.
    """
    different = False

    def put(tensor: Tensor) -> Tensor:
        nonlocal different
        if tensor.layout is not torch.strided or tensor.is_nested:
            return tensor
        new = tensor.detach().clone()
        if tensor.dim() and tensor.shape[0] and tensor.shape[0] % batch == 0:
            old = tensor.detach().reshape(batch, -1, *tensor.shape[1:])
            index = _index(rows, tensor.device)
            values = change(old, index)
            few = slice(0, 1)  # one sample tells in most batches
            different = (
                different
                or not same_bits(values[few], old[index[few]])
                or not same_bits(values, old[index])
            )
            # This writes in place where the layout allows it, else into a copy.
            new = new.reshape(old.shape).index_copy_(0, index, values).reshape(new.shape)
        return new.requires_grad_(tensor.requires_grad)

    return mapped(tree, put), different


def taken_rows(tree: Any, batch: int, rows: Sequence[int]) -> Any:
    """Return the tree with these samples' rows alone."""

    def take(tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided or tensor.is_nested or not tensor.dim():
            return tensor
        if not tensor.shape[0] or tensor.shape[0] % batch:
            return tensor
        old = tensor.detach().reshape(batch, -1, *tensor.shape[1:])
        new = old[_index(rows, tensor.device)].flatten(0, 1)
        return new.requires_grad_(tensor.requires_grad)

    return mapped(tree, take)


def by_copies(step: int, flat: bool = True) -> Change:
    """Replace a sample by the one ``step`` places before it, in every tensor alike.

    Args:
        flat: False leaves integers of one entry per sample (lengths, say) as they are.
    """

    def change(x: Tensor, rows: Tensor) -> Tensor:
        if not flat and not x.is_floating_point() and x[0].numel() <= 1:
            return x[rows]
        return _other_numbers(x, rows, x[(rows - step) % len(x)])

    return change


def _other_numbers(x: Tensor, rows: Tensor, copies: Tensor) -> Tensor:
    """Return the copies, with another sample's whole number where the copied one is the same.

    Classes repeat in a batch, and a copy of the same class shows nothing.
    """
    if x.is_floating_point() or x.is_complex() or x[0].numel() != 1:
        return copies
    known: Tensor = torch.unique(x)
    if len(known) < 2:
        return copies
    after = known[(torch.searchsorted(known, x.flatten()[rows].contiguous()) + 1) % len(known)]
    return torch.where(copies == x[rows], after.reshape(copies.shape), copies)


def by_one(place: int) -> Change:
    """Replace all by one sample, so that counts and averages over the batch change."""

    def change(x: Tensor, rows: Tensor) -> Tensor:
        return x[place].expand_as(x[rows])

    return change


def by_large_values(step: int, sign: int = 1, integers: bool = True) -> Change:
    """Replace all by one sample, its entries large where they are no whole numbers.

    One for all, so that they rank alike in whatever the batch is sorted by. Whole numbers may be
    ids, masks or classes, of which another sample's are valid ones. On accelerators, where an index
    out of range is no exception but the end of the process, large means the largest of the batch.
    """

    def change(x: Tensor, rows: Tensor) -> Tensor:
        one = x[step % len(x)]
        shape = (len(rows), *one.shape)
        if not x.is_floating_point():
            return _other_numbers(x, rows, one.expand(shape)) if integers else x[rows]
        if x.device.type == "cpu":
            large = (one * LARGE + 1) * sign
        else:
            known = x.nan_to_num(0, 0, 0)
            large = known.max() if sign > 0 else known.min()
        whole = one == one.round()
        if not whole.any():
            return large.expand(shape).contiguous()
        here = x[rows]
        taken = one if integers else here
        return torch.where(whole & (here == here.round()), taken, large)

    return change


def by_both(step: int) -> Change:
    """Replace some of the samples by copies, the others by negative large values."""
    copied, large = by_copies(step), by_large_values(step, -1)

    def change(x: Tensor, rows: Tensor) -> Tensor:
        middle = (len(rows) + 1) // 2
        return torch.cat([copied(x, rows[:middle]), large(x, rows[middle:])])

    return change


def differing(one: Any, other: Any, batch: int, kept: Sequence[int]) -> str | None:
    """Return what differs in rows of the samples ``kept``; None if nothing does.

    A tensor has its samples in any dimension of fitting size: it is clean if one reading is.

    Args:
        one, other: outputs of two passes.
    """
    if isinstance(one, PackedSequence) and isinstance(other, PackedSequence):
        return None
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return None if _clean(one, other, batch, kept) else f"of shape {list(one.shape)}"
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return _differing_items(one, other, batch, kept)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in one.keys() & other.keys():
            if found := differing(one[key], other[key], batch, kept):
                return f"{key!r} {found}"
        return None
    if _is_record(one) and type(one) is type(other):
        return differing(dict(vars(one)), dict(vars(other)), batch, kept)
    return None


def _differing_items(
    one: Sequence[Any], other: Sequence[Any], batch: int, kept: Sequence[int]
) -> str | None:
    for a, b in zip(one, other, strict=False):
        found = differing(a, b, batch, kept)
        if found is not None:
            break
    else:
        return None
    # In a list with one entry per sample, entries of other samples may be anything.
    if len(one) == len(other) == batch and all(_equal(one[i], other[i]) for i in kept):
        return None
    return found


def all_same(one: Any, other: Any, batch: int, kept: Sequence[int]) -> bool:
    """Whether all tensors have a row for each sample, and the same ones of those ``kept``.

    Args:
        one, other: outputs for ``batch`` samples, of passes over different numbers of them.
    """
    pairs = list(tensors_of(one)), list(tensors_of(other))
    if not pairs[0] or len(pairs[0]) != len(pairs[1]):
        return False
    return all(
        a.shape == b.shape
        and a.dtype is b.dtype
        and bool(a.dim() and a.shape[0] and a.shape[0] % batch == 0)
        and a.layout is b.layout is torch.strided
        and not a.is_nested
        and _clean(a, b, batch, kept)
        for a, b in zip(*pairs, strict=True)
    )


def _equal(one: Any, other: Any) -> bool:
    pairs = zip(tensors_of(one), tensors_of(other), strict=False)
    return all(same_bits(a, b) or _rounded(a, b) for a, b in pairs)


def has_rows(tree: Any, batch: int) -> bool:
    """Whether any tensor of the tree has the samples in its first dimension."""
    return any(t.dim() and t.shape[0] and t.shape[0] % batch == 0 for t in tensors_of(tree))


def _clean(one: Tensor, other: Tensor, batch: int, kept: Sequence[int]) -> bool:
    if one.layout is not torch.strided or one.is_nested or one.dim() != other.dim():
        return True
    one, other = one.detach(), other.detach()
    index = _index(kept, one.device)
    readings = 0
    for dim, size in enumerate(one.shape):
        fits = size % batch == 0 if dim == 0 else size == batch
        fits = fits and size > 0 and size == other.shape[dim]
        if not fits:
            continue
        readings += 1
        a, b = (_overlap(t.movedim(dim, 0), one, other, dim) for t in (one, other))
        for view in ((batch, -1), (-1, batch)) if size > batch else ((batch, -1),):
            split = [t.reshape(*view, *t.shape[1:]) for t in (a, b)]
            if view[0] == -1:
                split = [t.transpose(0, 1) for t in split]
            rows = [t.index_select(0, index) for t in split]
            if same_bits(*rows) or _rounded(*rows):
                return True
    return readings == 0


def _overlap(tensor: Tensor, one: Tensor, other: Tensor, dim: int) -> Tensor:
    """Return the part of ``tensor`` at positions that both have, since padding may differ."""
    sizes = [min(a, b) for a, b in zip(one.shape, other.shape, strict=True)]
    sizes.insert(0, sizes.pop(dim))
    for d, size in enumerate(sizes):
        tensor = tensor.narrow(d, 0, size)
    return tensor


def _rounded(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors differ by rounding at most."""
    if one.shape != other.shape or not one.is_floating_point() or one.dtype is not other.dtype:
        return False
    if not one.numel():
        return True
    limit = _ROUNDING.get(one.dtype, 64) * torch.finfo(one.dtype).eps
    if one.dtype in (torch.float32, torch.float64):
        off, largest = _largest(one - other), _largest(one)
        if math.isfinite(off + largest):
            return off <= limit * largest
    a, b = one.double(), other.double()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return False
    off, largest = (_largest(t.nan_to_num(0, 0, 0)) for t in (a - b, a))
    return off <= limit * largest


def _largest(tensor: Tensor) -> float:
    """Return the largest absolute entry; not finite if any entry is not."""
    least, most = tensor.aminmax()
    return max(-float(least), float(most))

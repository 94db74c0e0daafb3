"""A tensor and what it held, which can be compared and put back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from .contents import content_hash, readable, same_bits


@dataclasses.dataclass
class HeldTensor:
    """A tensor and its content at the time of a snapshot.

    Attributes:
        tensor: the tensor itself.
        data: an alias of the memory that it showed.
        copy: a copy of its content; None for what is large or cannot be read.
        hash: a hash of the content of what is large.
        version: its version counter; -1 without one.
    """

    tensor: Tensor
    data: Tensor
    copy: Tensor | None
    hash: int | None
    version: int = -1

    def same_place(self) -> bool:
        """Whether the tensor still shows the memory that it showed."""
        return self.tensor.data_ptr() == self.data.data_ptr()

    def unwritten(self) -> bool:
        """Whether place and version are what they were; ``.data`` writes change neither."""
        if self.version == -1 or self.tensor.is_inference():
            return False
        return self.same_place() and self.tensor._version == self.version

    def changed(self) -> bool:
        """Whether the tensor holds something else now."""
        if self.tensor.dtype is not self.data.dtype or self.tensor.shape != self.data.shape:
            return True
        if self.copy is not None:
            return not same_bits(self.tensor, self.copy)
        return self.hash is not None and content_hash(self.tensor) != self.hash

    def restore(self) -> bool:
        """Put the content back; return whether that was possible."""
        if not self.changed():
            return True
        if self.copy is None:
            return False
        if not self.same_place() or self.tensor.shape != self.data.shape:
            self.tensor.data = self.data
        self.tensor.data.copy_(self.copy)
        return True

    def differs(self, other: HeldTensor) -> bool:
        """Whether the other one held something else."""
        if self is other:
            return False
        if self.copy is not None and other.copy is not None:
            return not same_bits(self.copy, other.copy)
        return self._content_hash() != other._content_hash()

    def _content_hash(self) -> int | None:
        return content_hash(self.copy) if self.copy is not None else self.hash


def held_now(tensor: Tensor, room: int) -> HeldTensor:
    """Return what a tensor holds; as a hash where a copy would take more than ``room`` bytes."""
    copied, hashed = None, None
    version = -1 if tensor.is_inference() else tensor._version
    if readable(tensor):
        if tensor.nbytes <= room:
            copied = tensor.detach().clone(memory_format=torch.preserve_format)
        else:
            hashed = content_hash(tensor)
    return HeldTensor(tensor, tensor.detach(), copied, hashed, version)


def parts_of(tensor: Tensor) -> Sequence[Tensor] | None:
    """Return the memory of a tensor that has no one block of it; None for ordinary tensors."""
    if tensor.layout is torch.strided and not tensor.is_nested and not is_lazy(tensor):
        return None
    if is_lazy(tensor):
        return ()  # nothing yet
    own = tensor.detach()
    if own.is_nested:
        return own.unbind()
    if own.layout is torch.sparse_coo:
        return own._indices(), own._values()
    if own.layout in (torch.sparse_csr, torch.sparse_bsr):
        return own.crow_indices(), own.col_indices(), own.values()
    if own.layout in (torch.sparse_csc, torch.sparse_bsc):
        return own.ccol_indices(), own.row_indices(), own.values()
    return None

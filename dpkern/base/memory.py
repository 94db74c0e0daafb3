"""The layout of tensors in memory: without gaps, in which order, transposed."""

from __future__ import annotations

import torch


def memory_order(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions behind dim 0 from the outermost in memory to the innermost."""
    if tensor.is_contiguous():
        return list(range(1, tensor.dim()))
    strides = tensor.stride()
    return sorted(range(1, tensor.dim()), key=lambda i: (-strides[i], i))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no gaps in memory, with its first dimension outermost."""
    return tensor.is_contiguous() or (
        tensor.dim() > 0 and tensor.permute(0, *memory_order(tensor)).is_contiguous()
    )


def is_matrix(tensor: torch.Tensor) -> bool:
    """Whether a matrix is contiguous, or the transpose of a contiguous one."""
    return tensor.is_contiguous() or tensor.t().is_contiguous()


__all__ = ["is_dense", "is_matrix", "memory_order"]

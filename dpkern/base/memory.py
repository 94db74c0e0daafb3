"""The memory of tensors: whether they have any, without gaps, in which order, transposed."""

from __future__ import annotations

import torch

from .errors import InvalidInput


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a storage of its own that reaches to its last entry.

    Fake, functional and wrapper tensors have none, and FSDP frees those of its parameters.
    """
    span = tensor.numel()
    if span == 0:
        return True
    if not tensor.is_contiguous():
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        span = 1 + sum((size - 1) * stride for size, stride in steps)
    try:
        storage, end = tensor.untyped_storage(), tensor.storage_offset() + span
        return storage.data_ptr() != 0 and storage.nbytes() >= end * tensor.itemsize
    except RuntimeError:  # torch's answer for tensors that stand for others
        return False


def check_new_tensors(operator: str) -> None:
    """Refuse to run an op in a mode of torch in which new tensors have no memory.

    Raises:
        InvalidInput: the op's results would have none.
    """
    modes = torch._C._len_torch_dispatch_stack()
    if not modes and torch._C._functorch.peek_interpreter_stack() is None:
        return
    made = torch.empty(1, device="cpu")
    if type(made) is not torch.Tensor or not has_memory(made):
        raise InvalidInput(
            operator,
            expected="a mode of torch in which new tensors have memory",
            got=f"one that makes a {type(made).__name__} without memory",
            remedy=f"Leave the mode, or call torch.ops.dpkern.{operator} in it.",
        )


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


__all__ = ["check_new_tensors", "has_memory", "is_dense", "is_matrix", "memory_order"]

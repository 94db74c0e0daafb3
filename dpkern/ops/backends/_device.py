"""Streams, memory and refusals that every backend for CUDA devices needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache

import torch

from ...base.errors import BackendError, PrivacyError

OLDEST = (7, 5)
"""The oldest compute capability that the kernels are compiled for."""


def stream(device: torch.device) -> int:
    """Return the address of the device's current stream; 0 on the CPU."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.current_stream(device).cuda_stream)


@contextmanager
def guard(device: torch.device) -> Iterator[int]:
    """Make the device current, and yield its current stream. On the CPU this is nothing, and 0.

    Raises:
        BackendError: memory ran out inside the block.
    """
    try:
        if device.type != "cuda":
            yield 0
        else:
            with torch.cuda.device(device):
                yield stream(device)
    except torch.OutOfMemoryError as error:
        raise BackendError(
            "GPU memory",
            expected=f"room on {device} for results and intermediate sums",
            got=str(error).split(". ")[0],
            remedy="Use a smaller max_physical_batch_size.",
        ) from error


class Workspace:
    """Scratch arrays of one call, in one piece of torch's memory.

    Each has so many bytes and begins at a multiple of 16; ``workspace["name"]`` is an address.
    """

    def __init__(self, sizes: Mapping[str, int], device: torch.device) -> None:
        places, end = {}, 0
        for name, size in sizes.items():
            places[name], end = end, end + -(-size // 16) * 16
        self._memory = torch.empty(end, dtype=torch.uint8, device=device)
        begin = self._memory.data_ptr()
        self._addresses = {name: begin + place for name, place in places.items()}

    def __getitem__(self, name: str) -> int:
        return self._addresses[name]


def capturing(device: torch.device) -> bool:
    """Whether the current stream is recorded into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_noise_in_graphs(device: torch.device) -> None:
    """Refuse noise whose step number a graph would freeze.

    Raises:
        PrivacyError: a CUDA graph is being captured.
    """
    if capturing(device):
        raise PrivacyError(
            "CUDA graph",
            expected="noise outside of captures",
            got="a capture, whose every replay would use the same noise again",
            remedy="Capture the model's forward and backward only.",
        )


@cache
def _capability(index: int) -> tuple[int, int]:
    major, minor = torch.cuda.get_device_capability(index)
    return major, minor


def refusal(*tensors: torch.Tensor) -> str | None:
    """Return why kernels for CUDA devices cannot take these tensors, or None."""
    for tensor in tensors:
        if not tensor.is_cuda:
            return f"runs on CUDA devices, got a tensor on {tensor.device}"
    if torch.cuda._is_in_bad_fork():
        return "cannot use CUDA in a forked process: start workers with spawn"
    for tensor in tensors[:1]:
        found = _capability(tensor.get_device())
        if found < OLDEST:
            oldest, has = (".".join(map(str, version)) for version in (OLDEST, found))
            return f"needs compute capability {oldest} or later, {tensor.device} has {has}"
    return None

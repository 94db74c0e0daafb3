"""Hash and compare the bits of tensors.

Version counters miss writes through ``.data``; these functions read the bytes.
"""

from __future__ import annotations

import ctypes
import functools
import os

import torch
from torch import Tensor

from .local import local
from .parameter import without_torch_function

_WIDTH = 4096
_CHUNK = 1 << 22
"""Number of words that are hashed at once, which bounds the memory that hashing takes."""


def content_hash(tensor: Tensor) -> int:
    """Return a 64-bit hash of the tensor's bytes, dtype and shape.

        h = sum_i r_i w_i mod 2^64

    over its 32-bit words w, with secret random r, level by level (multilinear hashing). Two given
    contents of one shape collide with probability at most 2^-32 a level; the hash is the same on
    every device, and differs between processes.
    """
    words = _words(tensor)
    while True:
        words = _level(words)
        if len(words) == 1:
            break
        words = words.view(torch.int32)
    return hash((int(words), str(tensor.dtype), tuple(tensor.shape)))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits; NaN equals itself."""
    if one.dtype is not other.dtype or one.shape != other.shape or one.device != other.device:
        return False
    if not readable(one) or not readable(other):
        return one is other
    with without_torch_function():
        return _equal(as_integers(one), as_integers(other))


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of whole numbers of one shape are equal; C is fast at that."""
    if one.device.type != "cpu" or not (one.is_contiguous() and other.is_contiguous()):
        return torch.equal(one, other)
    return not int(_memcmp(one.data_ptr(), other.data_ptr(), one.nbytes))


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
_memcmp.restype = ctypes.c_int


def readable(tensor: Tensor) -> bool:
    """Whether the bytes of the tensor can be read."""
    part = local(tensor)
    return not part.is_meta and part.layout is torch.strided and not part.is_quantized


def as_integers(tensor: Tensor) -> Tensor:
    """Return the same bits as integers, detached; shapes of complex tensors gain a dimension."""
    part = local(tensor).detach().resolve_conj().resolve_neg()
    if part.is_complex():
        part = torch.view_as_real(part)
    kind = _INTEGERS.get(part.element_size(), torch.uint8)
    if not part.is_floating_point():
        return part
    return part.view(kind) if part.dim() else part.reshape(1).view(kind)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _words(tensor: Tensor) -> Tensor:
    """Return the bytes as int32 words, with zeros at the end."""
    with without_torch_function():
        data = as_integers(tensor).contiguous().reshape(-1)
        data = data.view(torch.uint8)
        if data.numel() % 4:
            data = torch.nn.functional.pad(data, (0, -data.numel() % 4))
        return data.view(torch.int32) if data.storage_offset() % 4 == 0 else _aligned(data)


def _aligned(data: Tensor) -> Tensor:
    return data.clone().view(torch.int32)


def _level(words: Tensor) -> Tensor:
    """Return one hash for every ``_WIDTH`` words."""
    factors = _factors(str(words.device))
    found = []
    for part in torch.split(words, _CHUNK):
        if part.numel() % _WIDTH:
            part = torch.nn.functional.pad(part, (0, -part.numel() % _WIDTH))
        rows = part.view(-1, _WIDTH).to(torch.int64)
        # Only CPUs have integer matrix products, which take one pass.
        found.append(rows @ factors if rows.device.type == "cpu" else (rows * factors).sum(1))
    return torch.cat(found) if found[0].numel() else words.new_zeros(1, dtype=torch.int64)


@functools.cache
def _factors(device: str) -> Tensor:
    return torch.frombuffer(bytearray(_SECRET), dtype=torch.int64).to(device)


_SECRET = os.urandom(8 * _WIDTH)

"""In which dtype torch may multiply matrices whose product must keep its operands' bits."""

from __future__ import annotations

import torch


def exact(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """float64 for float32 where torch was allowed to round operands to TF32 or bfloat16, else the
    dtype.

    A sum of rounded operands may hold a sample above its clipping bound. The permission is the
    process's, so it is looked at and never changed. On a CPU it is oneDNN's, which makes use of it
    where the processor multiplies such numbers.
    """
    if dtype is not torch.float32:
        return dtype
    library = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    allowed = library.matmul.fp32_precision
    return dtype if allowed in ("none", "ieee") else torch.float64


__all__ = ["exact"]

"""Choose the dtype in which torch may multiply matrices whose operands must keep their bits."""

from __future__ import annotations

import torch


def exact(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return float64 for float32 where torch may round operands, else the dtype.

    Torch may be allowed to round operands to TF32 or bfloat16.

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

"""Convert between distributed tensors and this process's part of them."""

from __future__ import annotations

from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a distributed tensor, or any other tensor itself."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def like(part: Tensor, whole: Tensor) -> Tensor:
    """Return a part as a distributed tensor laid out as ``whole``, or as it is if that is none."""
    if not hasattr(whole, "_local_tensor"):
        return part
    from torch.distributed.tensor import DTensor

    result: Tensor = DTensor.from_local(
        part,
        whole.device_mesh,  # type: ignore[attr-defined]
        whole.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    return result

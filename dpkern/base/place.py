"""Check devices of results, and refuse recordings that would repeat what must be fresh."""

from __future__ import annotations

import torch

from .errors import InvalidInput, PrivacyError


def check_recording(device: torch.device, *, step_counter: torch.Tensor | None = None) -> None:
    """Check that noise may be recorded by a CUDA graph.

    Every replay then takes its step from a step counter.

    Raises:
        PrivacyError: a recording that would add the same noise at every replay.
    """
    if device.type != "cuda" or step_counter is not None:
        return
    if torch.cuda.is_current_stream_capturing():
        raise PrivacyError(
            "CUDA graph",
            expected="noise with a step counter",
            got="a step number that every replay would use again",
            remedy="Record the update with dpkern.graphs.UpdateGraph.",
        )


def check_place(device: object) -> torch.device:
    """Return the device, which exists here and where no recording would repeat a result.

    Raises:
        InvalidInput: no such device.
        PrivacyError: a CUDA graph is recorded there.
    """
    found = _device(device)
    count = torch.cuda.device_count() if found is not None and found.type == "cuda" else 1
    if found is None or found.type == "meta" or (found.index or 0) >= count:
        raise InvalidInput(
            "device",
            expected="a device of this machine, such as 'cpu'",
            got=str(device),
            remedy="Pass the device of the tensor that the draws are for.",
        )
    check_recording(found)
    return found


def _device(device: object) -> torch.device | None:
    if not isinstance(device, str):
        return device if isinstance(device, torch.device) else None
    try:
        return torch.device(device)
    except RuntimeError:
        return None


__all__ = ["check_place", "check_recording"]

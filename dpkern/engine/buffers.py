"""Buffers that a forward pass writes to: they would carry data past the noise."""

from __future__ import annotations

from torch import Tensor, nn

from ..errors import UnsupportedModule

_FROM_WEIGHTS = ("_u", "_v", "weight_u", "weight_v")
"""Spectral norm's vectors, which depend on the weights alone."""


class BufferWatch:
    """Compares the floating-point buffers of a module before and after a forward pass."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._before: list[tuple[str, Tensor, int]] = []

    def note(self) -> None:
        """Remember the buffers and their versions."""
        self._before = [
            (name, buffer, buffer._version)
            for name, buffer in self.module.named_buffers()
            if buffer.is_floating_point() and name.rsplit(".", 1)[-1] not in _FROM_WEIGHTS
        ]

    def error(self) -> UnsupportedModule | None:
        """An error that names the buffers that were written to or replaced."""
        now = dict(self.module.named_buffers())
        changed = [
            name
            for name, buffer, version in self._before
            if now.get(name) is not buffer or buffer._version != version
        ]
        if not changed:
            return None
        return UnsupportedModule(
            f"buffer {', '.join(changed)}",
            expected="a forward pass that leaves floating-point buffers as they are",
            got="one that writes to them",
            remedy="What a buffer absorbs from the data reaches state_dict() without noise: keep "
            "such averages outside the model, or update them from public data under "
            "engine.public().",
        )

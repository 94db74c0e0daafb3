"""One file for module, optimizer, engine and schedules; the calls are Opacus'."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import InvalidInput
from .schedulers import Scheduler

if TYPE_CHECKING:
    from .privacy_engine import PrivacyEngine

ENGINE = "privacy_engine_state_dict"
_NAMES = {
    "module": "module_state_dict",
    "optimizer": "optimizer_state_dict",
    "noise_scheduler": "noise_scheduler_state_dict",
    "grad_clip_scheduler": "grad_clip_scheduler_state_dict",
}
"""Where each part stands in the file."""

Parts = Mapping[str, nn.Module | torch.optim.Optimizer | Scheduler | None]


def save(
    engine: PrivacyEngine,
    path: str | os.PathLike[str],
    parts: Parts,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Write everything; the file appears complete or not at all.

    Raises:
        PrivacyError: between a batch and its step.
    """
    content = dict(more or {})
    content |= {_NAMES[k]: part.state_dict() for k, part in parts.items() if part is not None}
    content[ENGINE] = engine.state_dict()
    target = Path(path)
    written = target.with_name(target.name + ".part")
    torch.save(content, written)
    os.replace(written, target)


def load(engine: PrivacyEngine, path: str | os.PathLike[str], parts: Parts) -> dict[str, Any]:
    """Read a file of ``save`` into the parts; returns its whole content.

    Raises:
        InvalidInput: a file without what was asked for, or of another run.
    """
    if not Path(path).is_file():
        raise InvalidInput(
            "path", expected="a checkpoint file", got=str(path), remedy="Check the path."
        )
    content: Any = torch.load(path, weights_only=True)
    wanted = [ENGINE, *(_NAMES[k] for k, part in parts.items() if part is not None)]
    missing = [name for name in wanted if not isinstance(content, dict) or name not in content]
    if missing:
        raise InvalidInput(
            "path",
            expected="a checkpoint of PrivacyEngine.save_checkpoint",
            got=f"{path} without {', '.join(missing)}",
            remedy="Load only what was saved.",
        )
    # First what may refuse: the engine knows whether this is its run.
    engine.load_state_dict(content[ENGINE])
    for name, part in parts.items():
        if part is not None:
            part.load_state_dict(content[_NAMES[name]])
    result: dict[str, Any] = content
    return result

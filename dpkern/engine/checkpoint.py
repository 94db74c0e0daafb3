"""Save module, optimizer, engine and schedules to one file, with Opacus' calls.

The file carries a checksum and appears complete or not at all (``base.sealed``). Loading checks
every part before it changes any, so a run goes on as saved or is left as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..base import sealed
from ..base.errors import InvalidInput
from . import restore
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
"""Keys of the parts in the file."""
_KINDS: dict[str, type[Any]] = {
    "module": nn.Module,
    "optimizer": torch.optim.Optimizer,
    "noise_scheduler": Scheduler,
    "grad_clip_scheduler": Scheduler,
}

_UNSEALED = (
    "torch.save writes such files, and dpkern did before it had checksums. If you trust this one: "
    f"content = torch.load(path, weights_only=True), engine.load_state_dict(content['{ENGINE}']), "
    "then load_state_dict of module and optimizer."
)

Part = nn.Module | torch.optim.Optimizer | Scheduler
Parts = Mapping[str, Part | None]


def save(
    engine: PrivacyEngine,
    path: sealed.Place,
    parts: Parts,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Write the engine's state and the parts' to a file, which appears complete or not at all.

    Args:
        engine: an engine after ``make_private``.
        path: path in a folder that exists. The file there, if any, is replaced. An open file of
            bytes, such as ``io.BytesIO``, gets all of it.
        parts: the parts by their names in ``save_checkpoint``; None leaves one out.
        more: entries of the user's own, of tensors and plain values; the parts' names are taken.

    Raises:
        PrivacyError: between a batch and its step.
        InvalidInput: a path that cannot be written, a part of another type, or content that could
            not be loaded again. The file that was there stands.
    """
    state = engine.state_dict()  # first: it refuses where nothing may be saved
    chosen = _chosen(parts)
    if more is not None and not isinstance(more, Mapping):
        raise InvalidInput(
            "checkpoint_dict",
            expected="a dict, or None",
            got=type(more).__name__,
            remedy="Name each value: checkpoint_dict={'epoch': 3}.",
        )
    content = dict(more or {})
    content |= {_NAMES[name]: part.state_dict() for name, part in chosen.items()}
    content[ENGINE] = state
    sealed.write(path, content)


def load(engine: PrivacyEngine, path: sealed.Place, parts: Parts) -> dict[str, Any]:
    """Read a file of ``save`` into the parts and return its whole content, tensors on the CPU.

    Raises:
        InvalidInput: a file that cannot be read, is damaged, lacks what was asked for, or is of
            another run; nothing has changed.
        PrivacyError: the engine has samples or steps of its own; nothing has changed.
    """
    chosen = _chosen(parts)
    content: Any = sealed.read(path, unsealed=_UNSEALED)
    wanted = [ENGINE, *(_NAMES[name] for name in chosen)]
    missing = [name for name in wanted if not isinstance(content, dict) or name not in content]
    if missing:
        raise InvalidInput(
            "path",
            expected="a checkpoint of PrivacyEngine.save_checkpoint",
            got=f"{path!s} without {', '.join(missing)}",
            remedy="Load only what was saved.",
        )
    engine.check_state(content[ENGINE])
    for name, part in chosen.items():
        restore.check(name, part, content[_NAMES[name]])
    # A part may load in a way of its own, which no check knows, so the engine comes after it.
    with restore.all_or_none(chosen.values()):
        for name, part in chosen.items():
            if not isinstance(part, Scheduler):
                restore.load(name, part, content[_NAMES[name]])
    engine.load_state_dict(content[ENGINE])
    for name, part in chosen.items():
        if isinstance(part, Scheduler):
            part.load_state_dict(content[_NAMES[name]])
    result: dict[str, Any] = content
    return result


def _chosen(parts: Parts) -> dict[str, Part]:
    """Return the parts that are not None, after a check of their types."""
    for name, part in parts.items():
        if part is not None and not isinstance(part, _KINDS[name]):
            raise InvalidInput(
                name,
                expected=f"a {_KINDS[name].__name__}, or None",
                got=type(part).__name__,
                remedy="Pass the object that this run was made with.",
            )
    return {name: part for name, part in parts.items() if part is not None}

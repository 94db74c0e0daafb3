"""Find the module in which two passes part: its inputs agree in some rows, its outputs do not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from .replaced_rows import differing, fresh

Call = tuple[str, Any, Any]
"""Name of a module, its inputs and its outputs."""


def first_apart(
    module: nn.Module,
    calls: Sequence[Sequence[Call]],
    batch: int,
    kept: Sequence[int],
    *,
    between: bool,
) -> str:
    """Return the first module whose inputs agree in these rows while its outputs do not.

    Args:
        module: the whole.
        calls: what ``recorded`` noted in each of two passes.
        batch: number of samples.
        kept: the samples that are the same in both.
        between: whether inputs that differ count too, as mixing in front of that module.
    """
    for (name, ins, outs), (again, other_ins, other_outs) in zip(*calls, strict=False):
        if not kept or name != again:
            continue
        if differing(ins, other_ins, batch, kept):
            if between:
                return f"the input of {name}"
            continue
        if differing(outs, other_outs, batch, kept):
            kind = type(module.get_submodule(name)).__name__
            return f"{name} ({kind})" if name else kind
    return ""


@contextmanager
def recorded(module: nn.Module) -> Iterator[list[tuple[str, Any, Any]]]:
    """Record every module's inputs and outputs, in the order in which calls end."""
    seen: list[tuple[str, Any, Any]] = []
    waiting: list[Any] = []
    handles: list[Any] = []

    def watch(name: str, part: nn.Module) -> None:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            waiting.append(fresh((args, kwargs)))

        def leave(_: nn.Module, args: Any, output: Any) -> None:
            if waiting:
                seen.append((name, waiting.pop(), fresh(output)))

        handles.append(part.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(part.register_forward_hook(leave))

    for name, part in module.named_modules():
        watch(name, part)
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()

"""Check all saved parts of a run before any is loaded, and put all back if one fails to load."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ..base import validate as check_value
from ..base.errors import DPKernError, InvalidInput, brief
from .hooks import Hook
from .parameter import without_torch_function
from .schedulers import Scheduler

_REMEDY = "Make the same parts as in the run that wrote the file."


def check(name: str, part: object, state: object) -> None:
    """Refuse a saved state that does not fit its part; changes nothing.

    Raises:
        DPKernError: names, shapes, dtypes or types differ. For a module or optimizer with a way of
            loading of its own, only ``load`` can tell.
    """
    if isinstance(part, nn.Module):
        _check_module(name, part, state)
    elif isinstance(part, torch.optim.Optimizer):
        _check_optimizer(name, part, state)
    elif isinstance(part, Scheduler):
        part.check_state(state)  # type: ignore[arg-type]


def load(name: str, part: nn.Module | torch.optim.Optimizer, state: Any) -> None:
    """Load a checked state.

    Raises:
        InvalidInput: the part's own way of loading refuses it.
    """
    try:
        part.load_state_dict(state)
    except (DPKernError, MemoryError):
        raise
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise _unlike(name, "a state that it loads", " ".join(lines)[:200]) from error


@contextmanager
def all_or_none(parts: Iterable[object]) -> Iterator[None]:
    """Put modules and optimizers back as they are now if the block fails."""
    undo = [_undo(part) for part in parts]
    try:
        yield
    except BaseException:
        with ExitStack() as stack:  # every one runs, whatever another raises
            for each in undo:
                stack.callback(each)
        raise


def _unlike(name: str, expected: str, got: str) -> InvalidInput:
    return InvalidInput(
        name,
        expected=expected,
        got=got,
        remedy=f"{_REMEDY} Nothing was loaded.",
    )


def _check_module(name: str, module: nn.Module, state: object) -> None:
    if not isinstance(state, Mapping):
        raise _unlike(name, "a module's state_dict in the file", type(state).__name__)
    with without_torch_function():
        own = module.state_dict()
    if _has_own_loading(module):
        return
    missing, foreign = own.keys() - state.keys(), [key for key in state if key not in own]
    if missing or foreign:
        raise _unlike(
            name,
            "a file with this module's parameters and buffers",
            f"missing {brief(sorted(missing))}, beyond them {brief(foreign)}",
        )
    for key, mine in own.items():
        if isinstance(mine, torch.Tensor) and not check_value.same_kind(state[key], mine):
            raise _unlike(f"{name}.{key}", _shown(mine), _shown(state[key]))


def _has_own_loading(module: nn.Module) -> bool:
    """Whether code outside torch decides what this module or a part of it loads."""
    return any(
        any(map(_is_foreign, part._load_state_dict_pre_hooks.values()))
        or any(
            not getattr(type(part), method).__module__.startswith("torch.nn.")
            for method in ("load_state_dict", "_load_from_state_dict")
        )
        for part in module.modules()
    )


def _is_foreign(hook: Any) -> bool:
    """Whether a hook, as torch has wrapped it, is not the engine's, which only looks."""
    return not isinstance(getattr(hook, "hook", hook), Hook)


def _check_optimizer(name: str, optimizer: torch.optim.Optimizer, state: object) -> None:
    with without_torch_function():
        own = optimizer.state_dict()
    fits = isinstance(state, Mapping) and {"state", "param_groups"} <= state.keys()
    groups = state["param_groups"] if fits else None  # type: ignore[index]
    saved = state["state"] if fits else None  # type: ignore[index]
    if (
        not isinstance(groups, list)
        or not isinstance(saved, Mapping)
        or not all(isinstance(g, Mapping) and isinstance(g.get("params"), list) for g in groups)
    ):
        raise _unlike(name, "an optimizer's state_dict in the file", brief(state))
    sizes = [len(group["params"]) for group in groups]
    mine = [len(group["params"]) for group in own["param_groups"]]
    if sizes != mine:
        raise _unlike(name, f"groups of {mine} parameters", f"groups of {brief(sizes)}")
    for place, (group, theirs) in enumerate(zip(own["param_groups"], groups, strict=True)):
        # Flags differ between versions of torch; numbers belong to the rule itself.
        lacking = [k for k in optimizer.defaults if k not in theirs and _is_number(group.get(k))]
        if lacking:
            raise _unlike(
                f"{name}.param_groups[{place}]",
                f"the settings of {type(optimizer).__name__}",
                f"a group without {', '.join(lacking)}",
            )
    if type(optimizer).__module__.startswith("torch.optim."):
        _check_slots(name, optimizer, groups, saved)


def _check_slots(
    name: str, optimizer: torch.optim.Optimizer, groups: list[Any], saved: Mapping[Any, Any]
) -> None:
    """Refuse state tensors other than scalars, and shapes of the parameter or of its reductions."""
    held = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = [number for group in groups for number in group["params"]]
    for number, param in zip(numbers, held, strict=True):
        slot = saved.get(number, {}) if type(number) is int else None
        if not isinstance(slot, Mapping):
            raise _unlike(name, "a state for each parameter's number", brief(number))
        for key, value in slot.items():
            if not isinstance(value, torch.Tensor) or not value.dim():
                continue
            sizes = zip(value.shape, param.shape, strict=False)
            if value.dim() != param.dim() or any(a not in (1, b) for a, b in sizes):
                expected = f"a tensor like its parameter, of shape {list(param.shape)}"
                raise _unlike(f"{name}.state[{number}].{key}", expected, _shown(value))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, tuple)) and not isinstance(value, bool)


def _shown(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    kind = " without data" if value.is_meta else ""
    return f"{value.dtype} of shape {list(value.shape)}, {value.layout}{kind}"


def _undo(part: object) -> Callable[[], None]:
    """Return a function that puts the part back as it is now."""
    if isinstance(part, nn.Module):
        return _undo_module(part)
    if isinstance(part, torch.optim.Optimizer):
        # Loading makes new lists and dicts, so these objects keep the present state.
        state, groups = part.state, part.param_groups

        def undo() -> None:
            part.state, part.param_groups = state, groups

        return undo
    return lambda: None


def _undo_module(module: nn.Module) -> Callable[[], None]:
    owners = [(m, dict(m._parameters), dict(m._buffers)) for m in module.modules()]
    held: dict[int, torch.Tensor | None] = {}
    for _, parameters, buffers in owners:
        held |= {id(t): t for t in (*parameters.values(), *buffers.values())}
    with without_torch_function(), torch.no_grad():
        values = [(t, t.detach().clone()) for t in held.values() if t is not None]
    default = nn.Module.get_extra_state
    extra = [
        (m, copy.deepcopy(m.get_extra_state()))
        for m, *_ in owners
        if type(m).get_extra_state is not default
    ]

    def undo() -> None:
        with without_torch_function(), torch.no_grad():
            for owner, parameters, buffers in owners:
                owner._parameters.clear()
                owner._parameters.update(parameters)
                owner._buffers.clear()
                owner._buffers.update(buffers)
            for tensor, value in values:
                tensor.copy_(value)
            for owner, state in extra:
                owner.set_extra_state(state)

    return undo

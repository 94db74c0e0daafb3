"""Keep the engine's own work out of compiled graphs, at no cost where nothing is compiled."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any

from torch import nn
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    get_eval_frame_callback,
    set_code_exec_strategy,
    set_eval_frame,
)
from torch._compile import _disable_dynamo  # the public one imports the compiler at once
from torch.compiler import is_dynamo_compiling, set_stance

Function = Callable[..., Any]

_DEPTH = [0]

_SUSPENDED: list[Any] = []
"""The interpreter's question before a compiled call that runs uncompiled, once it is known."""

_ALONE = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)


def no_graph_begins_with(function: Function) -> None:
    """Let no graph begin with this function's frame, as it would break at once.

    Inside other graphs it is traced.
    """
    set_code_exec_strategy(function.__code__, _ALONE)


def breaks_graphs(function: Function) -> Function:
    """Mark a function that no graph begins with and none holds: they break where it is called.

    It runs then, and what it calls may be compiled: it has to ask whether the compiler is at work.
    """
    no_graph_begins_with(function)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def uncompiled(function: Function) -> Function:
    """Return the function such that ``torch.compile`` breaks its graphs at it.

    Torch's own mark costs several calls each time; eager loops skip it.
    """
    return uncompiled_unless(None)(function)


_NEVER = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)


def never_compiled(function: Function) -> Function:
    """Mark a function that never runs inside a graph, nor what it calls."""
    set_code_exec_strategy(function.__code__, _NEVER)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def uncompiled_unless(inside: Function | None) -> Callable[[Function], Function]:
    """Decorate a function such that graphs break at it, unless they can hold something instead.

    Args:
        inside: traced in place of the function; it returns NotImplemented where the graph has to
            break. None breaks every graph.
    """

    def decorate(function: Function) -> Function:
        def outside(*args: Any, **kwargs: Any) -> Any:
            _DEPTH[0] += 1
            try:
                return function(*args, **kwargs)
            finally:
                _DEPTH[0] -= 1

        disabled = _disable_dynamo(outside)

        def run(*args: Any, **kwargs: Any) -> Any:
            # The compiler folds this condition to a constant and never traces the next one.
            if is_dynamo_compiling():
                if inside is not None:
                    result = inside(*args, **kwargs)
                    if result is not NotImplemented:
                        return result
            elif get_eval_frame_callback() is None:
                return function(*args, **kwargs)
            result = disabled(*args, **kwargs)
            if _SUSPENDED:
                _SUSPENDED[0] = _SUSPENDED[0] or set_eval_frame(None)
            return result

        no_graph_begins_with(run)
        return update_wrapper(run, function)

    return decorate


def in_compiled_call() -> bool:
    """Whether the engine's running work was called from a callable that torch compiles."""
    return _DEPTH[0] > 0


def suspend() -> None:
    """Run what remains of the compiled call uncompiled, from the engine's next return on."""
    _SUSPENDED[:] = [None]


def resume() -> None:
    """Compile again."""
    if _SUSPENDED and _SUSPENDED[0] is not None:
        set_eval_frame(_SUSPENDED[0])
    _SUSPENDED.clear()


@contextmanager
def nothing_compiled() -> Iterator[None]:
    """Parts of a module that are compiled by themselves run uncompiled in this block."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with set_stance("force_eager"):
        yield


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Whether this is what ``torch.compile(module)`` returns."""
    # By name: importing the compiler takes long.
    kind = type(module)
    return kind.__name__ == "OptimizedModule" and kind.__module__ == "torch._dynamo.eval_frame"


def within_wrapper(module: nn.Module) -> nn.Module:
    """Return the module inside of ``torch.compile(module)``, and any other module itself."""
    if not is_compiled_wrapper(module):
        return module
    inner: nn.Module = module._orig_mod  # type: ignore[assignment]
    return inner


def look_again(wrapper: nn.Module) -> None:
    """Let a wrapper of ``torch.compile`` see how its module is called now."""
    if is_compiled_wrapper(wrapper):
        wrapper._initialize()  # type: ignore[operator]


def show_forward(module: nn.Module) -> bool:
    """Let the compiler find a forward pass that the module has from torch.

    It begins no graph in torch's own files: an ``nn.Sequential`` that has hooks may run uncompiled.

    Returns:
        Whether the module's ``forward`` was set.
    """
    place = getattr(type(module).forward, "__module__", None) or ""  # None: made by exec()
    if not place.startswith("torch.nn.") or "forward" in vars(module):
        return False
    module.__dict__["forward"] = types.MethodType(forward, module)
    return True


SHORT_CUTS: list[Callable[..., Any]] = []
"""The call that runs the next forward pass, or returns None; none in compiled calls."""


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the forward pass of the module's class."""
    if SHORT_CUTS:
        made = SHORT_CUTS.pop()(self, args, kwargs)
        if made is not None:
            return made
    return type(self).forward(self, *args, **kwargs)

"""Take the usual uses of a program, and their gradients, in C++ (``csrc/bindings/uses.cpp``).

C++ looks first, and changes nothing unless all is as the program expects it. Everything else, and
everything where there is no compiled module, is what the functions that stand beside it say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from ...ops import direct
from ..parameter import PrivateParameter
from .run import ReplayRun
from .site import written_since

if TYPE_CHECKING:
    from .site import UseSite

F = TypeVar("F", bound=Callable[..., Any])

_connect = direct.look("connect_uses")
_quick = direct.look("quick")

_modules = torch.nn.modules.module


class NotedUse:
    """Stand-in for the node of one use, which has none of its own in a stack (``stack``)."""

    __slots__ = ("run", "saved_tensors", "site", "version")


if _connect is not None:
    _connect(
        {
            "parameter": PrivateParameter,
            "run": ReplayRun,
            "recording": torch.is_grad_enabled,
            "task": torch._C._current_graph_task_id,
            "autocast": torch._C._is_any_autocast_enabled,
            "transforms": torch._C._functorch.peek_interpreter_stack,
            "normalize": torch.native_layer_norm,
            "add_product": torch.addmm,
            "product": torch.mm,
            "written_since": written_since,
            "note": NotedUse,
            "saved_hooks": torch._C._autograd._top_saved_tensors_default_hooks,
            "global_hooks": [
                _modules._global_forward_hooks,
                _modules._global_forward_pre_hooks,
                _modules._global_backward_hooks,
                _modules._global_backward_pre_hooks,
            ],
            "unseen": [
                (torch._C._is_torch_function_enabled, True),
                (torch._C._is_torch_function_mode_enabled, False),
                (torch._C._len_torch_dispatch_stack, 0),
                (torch._C._get_tracing_state, None),
                (torch.is_anomaly_enabled, False),
                (get_eval_frame_callback, None),
            ],
        }
    )


def quick(name: str) -> Callable[[F], F]:
    """Decorate a function with the one in C++ that calls it where it does not know what to do."""

    def decorate(function: F) -> F:
        made: F = function if _quick is None else _quick(name, function)
        return made

    return decorate


def quick_backward(name: str, gradient: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``backward(ctx, g)``, which calls ``gradient(ctx, x, g)`` with the tensor saved."""
    if _quick is not None:
        found: Callable[..., Any] = _quick(name, gradient)
        return found

    def backward(ctx: Any, g: Any) -> Any:
        return gradient(ctx, *ctx.saved_tensors, g)

    return backward


def compiled_use(site: UseSite, apply: Callable[..., Any], **more: Any) -> Any:
    """Return a use as C++ takes it, or None where it has to be Python's.

    Args:
        site: the use, whose memory has its place.
        apply: runs it as an autograd function.
        more: what its kind needs.
    """
    facts = site.facts
    return direct.replayed_use(
        {
            "index": site.index,
            "weight": site.weight,
            "bias": site.bias,
            "plain_weight": site.plain_weight,
            "looks": site.unchanged.seen,
            "dtype": site.dtype,
            "apply": apply,
            "kinds": facts.kinds,
            "nodes": facts.nodes,
            "differentiable": site.differentiable,
            "fold": facts.fold,
            "tail": facts.tail,
            **more,
        }
    )


__all__ = ["compiled_use", "quick", "quick_backward"]

"""Replay a plain stack of layers as one node of autograd's graph (``csrc/bindings/stack.cpp``).

A ``torch.nn.Sequential`` of linear maps, each behind the other or behind an activation, makes a
node for each of them, and runs a dozen functions of Python for each. Where a program expects just
these uses, and nothing of the module has changed since that was found out, one call makes all of
them: with the same products, so that outputs, gradients and norms keep their bits. The module runs
itself wherever anything could tell the difference: hooks, functions that were replaced, modes that
see operations, saved tensors with hooks.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops import direct
from ..hooks import Hook
from ..uncompiled import forward
from .linear import LinearSite, _gradient
from .quick import quick, quick_backward
from .site import SHORT_CUT, UseSite, apply_of, skip_frames

if TYPE_CHECKING:
    from ..capture import Capture

_make, _run = direct.look("ReplayedStack"), direct.look("run_stack")


@dataclass(frozen=True)
class Activation:
    """An activation whose gradient is one of its output.

    Attributes:
        in_place: the function of torch's that writes over its operand.
        gradient: its gradient, given that of its output and the output.
        node: name of its node in autograd's graph.
        called: the functions that its module calls, by the namespace that they are looked up in.
    """

    in_place: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]
    node: str
    called: tuple[tuple[Any, str], ...]


def _relu_gradient(g: Tensor, out: Tensor) -> Tensor:
    made: Tensor = torch.ops.aten.threshold_backward(g, out, 0)
    return made


_ACTIVATIONS: Mapping[type[nn.Module], Activation] = {
    nn.ReLU: Activation(
        *(torch.relu_, _relu_gradient, "ReluBackward0"),
        ((F, "relu"), (torch, "relu"), (torch, "relu_")),
    ),
    nn.Tanh: Activation(
        *(torch.tanh_, torch.ops.aten.tanh_backward, "TanhBackward0"), ((torch, "tanh"),)
    ),
    nn.Sigmoid: Activation(
        *(torch.sigmoid_, torch.ops.aten.sigmoid_backward, "SigmoidBackward0"),
        ((torch, "sigmoid"),),
    ),
}

_METHODS = (
    *("__call__", "_wrapped_call_impl", "_call_impl", "forward", "__iter__"),
    *("__getattribute__", "__getattr__"),
)
"""Methods that run a module and its parts."""

_SHADOWS = ("weight", "bias", "inplace", "_modules", "_parameters")
"""Names that a class must not have, as it would answer for its instances."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _ReplayedStack(torch.autograd.Function):
    forward = staticmethod(quick("stack_forward")(lambda ctx, *given: None))
    backward = staticmethod(quick_backward("stack_backward", _gradient))


_apply = apply_of(_ReplayedStack)
skip_frames(_ReplayedStack)


def short_cut(capture: Capture, sites: Sequence[UseSite]) -> Callable[..., Any] | None:
    """Return what runs the module as a plain stack of a program's uses; None if it is none.

    Call it in a pass that finds the module as it is now. What is returned takes the module and its
    arguments, and returns None where the module has to run itself.
    """
    module = capture.module
    if _make is None or _run is None or type(module) is not nn.Sequential or not sites:
        return None
    shown = vars(module).get("forward")
    own = type(shown) is types.MethodType and shown.__func__ is forward
    before = module._forward_pre_hooks.values()
    # A hook of somebody else's may change the module once more before it runs.
    if not own or shown.__self__ is not module or any(type(hook) is not Hook for hook in before):  # type: ignore[union-attr]
        return None
    if module._backward_hooks or module._backward_pre_hooks:
        return None
    parts = [*module._modules.values()]
    between = _activations_between(parts, sites)
    if between is None:
        return None
    looks = [*_looks([module, *parts], between)]
    stack = _make(
        {
            "capture": capture,
            "sites": sites,
            "apply": _apply,
            "parts": [module, *parts],
            "biases": [site.bias for site in sites],
            "tables": [table for table, _ in looks],
            "entries": [entry for _, entry in looks],
            "between": [
                (None, None, False)
                if each is None
                else (each.in_place, each.gradient, each.in_place is torch.relu_)
                for each in between
            ],
        }
    )
    return partial(_run, stack)


def _activations_between(
    parts: Sequence[nn.Module | None], sites: Sequence[UseSite]
) -> list[Activation | None] | None:
    """Return the activation behind each map but the last; None if these are not their uses."""
    left = list(parts)
    between: list[Activation | None] = []
    for place, site in enumerate(sites):
        activation = None
        if place and left and type(left[0]) in _ACTIVATIONS:
            part = left.pop(0)
            assert part is not None
            if _is_changed(part):
                return None
            activation = _ACTIVATIONS[type(part)]
        layer = left.pop(0) if left else None
        names = tuple(kind.__name__ for kind in site.facts.kinds)
        expected = () if activation is None else (activation.node,)
        if not _is_use(layer, site) or names != expected or site.facts.nodes != len(expected):
            return None
        if place:
            between.append(activation)
    return None if left else between


def _is_use(layer: nn.Module | None, site: UseSite) -> bool:
    """Whether a site is the use of a linear layer that is run by torch alone."""
    if type(layer) is not nn.Linear or type(site) is not LinearSite or site.compiled is None:
        return False
    held = layer._parameters
    return (
        not _is_changed(layer)
        and held.get("weight") is site.weight
        and held.get("bias") is site.bias
    )


def _is_changed(part: nn.Module) -> bool:
    """Whether a part has hooks, or attributes in the place of its class's."""
    own = vars(part)
    shadowed = any(name in own for name in (*_METHODS, "weight", "bias"))
    return shadowed or own.get("_compiled_call_impl") is not None or any(map(own.get, _HOOKS))


def _looks(
    parts: Sequence[nn.Module], between: Sequence[Activation | None]
) -> Iterator[tuple[Any, tuple[str, Any]]]:
    """Yield classes and namespaces, with a name in each and what stands there now, or None."""
    for kind in dict.fromkeys(map(type, parts)):
        for name in (*_METHODS, *_SHADOWS):
            found = next((vars(c)[name] for c in kind.__mro__ if name in vars(c)), None)
            yield kind, (name, found)
    called: list[tuple[Any, str]] = [(F, "linear")]
    for place in {sys.modules[type(part).__module__] for part in parts}:
        called += [(place, name) for name in ("F", "torch") if name in vars(place)]
    for activation in filter(None, between):
        called += activation.called
    for namespace, name in dict.fromkeys(called):
        yield vars(namespace), (name, vars(namespace)[name])


SHORT_CUT[:] = [short_cut]

__all__ = ["short_cut"]

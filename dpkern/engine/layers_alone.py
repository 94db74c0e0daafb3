"""Recognise modules whose forward pass runs no code but torch's own layers, before it runs.

Such a pass writes nothing, neither into the module nor into its input, and draws nothing. A probe
needs no copy of either, and looks at the operations of a pass alone (``plain_stack``).
"""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from .cleared import zero_grad
from .hooks import Hook
from .outcome import ProbeOutcome
from .parameter import PrivateParameter
from .plain_stack import SAMPLES, Arguments, is_plain_stack, saves_itself
from .random_state import RandomState
from .uncompiled import forward

_IN_FUNCTIONAL = "linear conv1d conv2d conv3d max_pool2d avg_pool2d relu gelu silu"
_FUNCTIONS = (
    *((F, name) for name in _IN_FUNCTIONAL.split()),
    *((torch, name) for name in "conv1d conv2d conv3d max_pool2d relu tanh sigmoid".split()),
    *((torch._C._nn, "silu"), (Tensor, "flatten")),
)
"""Functions that the layers call, by the place at which they look them up."""

_LAYERS = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MaxPool2d, nn.AvgPool2d, nn.Flatten),
    *(nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid),
)

_TORCHS_CLASSES = {each for kind in (*_LAYERS, nn.Sequential) for each in kind.__mro__} - {object}

_SAID = frozenset(
    "__module__ __doc__ __init__ __setstate__ __annotations__ __firstlineno__ "
    "__static_attributes__ ___needs_generation_tag_patch".split()
)
"""Entries of a class that run nothing in a pass: how it is made, texts, a note of the compiler."""


def _held_by(kind: type) -> dict[str, Any]:
    """Return what a class holds itself, by name."""
    return {name: value for name, value in vars(kind).items() if name not in _SAID}


def _is_torchs(value: Any) -> bool:
    """Whether a function is torch's own, and not one around it that has taken its name."""
    if isinstance(value, types.FunctionType):
        place = str(value.__globals__.get("__name__"))
        return place.split(".")[0] == "torch" and not hasattr(value, "__wrapped__")
    place = getattr(value, "__module__", None) or "torch"  # methods of C's are nowhere
    return isinstance(value, _IN_C) and str(place).split(".")[0] == "torch"


_IN_C = (types.BuiltinFunctionType, types.MethodDescriptorType, types.GetSetDescriptorType)
_OWN = {kind: _held_by(kind) for kind in _TORCHS_CLASSES}
_CALLED = tuple((place, name, getattr(place, name)) for place, name in _FUNCTIONS)
_PLACES = tuple(
    (sys.modules[kind.__module__], name, place)
    for kind in _LAYERS
    for name, place in (("F", F), ("torch", torch))
    if name in vars(sys.modules[kind.__module__])
)
"""The places where the layers' own modules look them up."""
_CODE = tuple(
    (name, value)
    for own in _OWN.values()
    for name, value in own.items()
    if callable(value) or hasattr(value, "__get__")
)
_METHODS = frozenset(name for name, _ in _CODE)
_SHOWN = {"forward": forward, "zero_grad": zero_grad}
"""Methods that the engine puts in the place of a module's own."""
_FROM_TORCH = all(_is_torchs(value) for *_, value in (*_CODE, *_CALLED))
"""Whether nobody had replaced any of it when this was imported."""

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_PARAMETERS = (nn.Parameter, PrivateParameter, type(None))


def runs_layers_alone(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call runs layers of torch's, one after the other, and nothing else.

    Sequences of ``Linear``, convolutions, pooling over windows, element-wise activations and
    ``Flatten`` do, without hooks other than the engine's, with functions and methods that are still
    torch's, and with one ordinary tensor. Calls that are no plain stack anyway are not counted:
    their probe can begin with the user's own pass only if that is known before it.
    """
    return (
        _FROM_TORCH
        and len(args) == 1
        and not kwargs
        and type(args[0]) is Tensor
        and args[0].is_floating_point()
        and args[0].dim() > 0
        and args[0].shape[0] >= SAMPLES
        and saves_itself()
        and not torch._C._is_any_autocast_enabled()
        and not _has_any_global_hook()  # type: ignore[no-untyped-call]
        and torch._C._len_torch_function_stack() == 0
        and torch._C._len_torch_dispatch_stack() == 0
        and all(getattr(place, name) is known for place, name, known in (*_CALLED, *_PLACES))
        and all(_same(_held_by(kind), own) for kind, own in _OWN.items())
        and all(_is_layer_or_sequence(part) for part in module.modules())
    )


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(one[name] is other[name] for name in other)


def _is_layer_or_sequence(part: nn.Module) -> bool:
    kind: type = type(part)
    held = vars(part)
    if issubclass(kind, nn.Sequential):
        known = all(each in _OWN or not _held_by(each) for each in kind.__mro__[:-1])
    else:
        known = kind in _LAYERS
    return (
        known
        and not held.get("inplace", False)
        and not held.get("return_indices", False)
        and held.get("padding_mode", "zeros") == "zeros"
        and part._compiled_call_impl is None
        and all(map(partial(_is_shown, part), held.keys() & _METHODS))
        and type(part._parameters) is type(part._modules) is dict
        and all(type(p) in _PARAMETERS for p in part._parameters.values())
        and all(type(hook) is Hook for name in _HOOKS for hook in held[name].values())
    )


def _is_shown(part: nn.Module, name: str) -> bool:
    """Whether a method that a module holds itself is one that we showed."""
    own = vars(part)[name]
    return (
        type(own) is types.MethodType and own.__func__ is _SHOWN.get(name) and own.__self__ is part
    )


class LayersProbe:
    """A probe of layers alone, for which the user's own pass serves.

    Args:
        call: the module, uncompiled.
        module, arguments, batch: as ``DifferenceProbe`` has them.
    """

    def __init__(
        self, module: nn.Module, call: Callable[..., Any], arguments: Arguments, batch: int
    ) -> None:
        self.module = module
        self.call = call
        self.arguments = arguments
        self.batch = batch

    def run_after(self, number: int, output: Any) -> ProbeOutcome | None:
        """Return the outcome after the pass with this output; None if it was more than layers."""

        def run(arguments: Arguments, read: Callable[[Any], Any]) -> Any:
            torch.clear_autocast_cache()  # it may hold the graph of another pass
            try:
                return read(self.call(*arguments[0], **arguments[1]))
            finally:
                torch.clear_autocast_cache()

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plain = is_plain_stack(self.module, run, self.arguments, self.batch, output)
        return ProbeOutcome(told=True, is_plain=True) if plain else None

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """Restore the generators behind this block; before it there is nothing to take back."""
        now = RandomState({self.arguments[0][0].device})
        try:
            yield
        finally:
            now.restore()

"""Recognise modules whose forward pass runs no code but torch's own layers, before it runs.

Such a pass writes nothing, neither into the module nor into its input, and draws nothing. A probe
needs no copy of either, and looks at the operations of a pass alone (``plain_stack``).
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from .hooks import Hook
from .outcome import ProbeOutcome
from .parameter import PrivateParameter
from .plain_stack import Arguments, is_plain_stack
from .random_state import RandomState
from .uncompiled import forward as shown_forward

_IN_FUNCTIONAL = "linear conv1d conv2d conv3d max_pool2d avg_pool2d relu gelu silu"
_FUNCTIONS = (
    *((F, name) for name in _IN_FUNCTIONAL.split()),
    *((torch, name) for name in "conv1d conv2d conv3d max_pool2d relu tanh sigmoid".split()),
    (Tensor, "flatten"),
    *((nn.Module, name) for name in "__call__ _call_impl __getattr__ __setattr__".split()),
)
"""Functions that the layers call, by the place at which they look them up."""

_LAYERS = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MaxPool2d, nn.AvgPool2d, nn.Flatten),
    *(nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid),
)


def _methods(kind: type) -> dict[str, Any]:
    """Return what a class holds, by name."""
    return {name: value for name, value in vars(kind).items() if callable(value)}


def _is_torchs(value: Any) -> bool:
    place = getattr(value, "__module__", None) or "torch"  # functions of C's are nowhere
    return bool(place.split(".")[0] == "torch")


_OWN: dict[type, dict[str, Any]] = {kind: _methods(kind) for kind in (*_LAYERS, nn.Sequential)}
_CALLED = tuple((place, name, getattr(place, name)) for place, name in _FUNCTIONS)
_FROM_TORCH = all(
    _is_torchs(value)
    for value in (*(m for own in _OWN.values() for m in own.values()), *(c[2] for c in _CALLED))
)
"""Whether nobody had replaced any of it when this was imported."""

_SAID = frozenset(
    "__module__ __doc__ __init__ __annotations__ __parameters__ __orig_bases__ __firstlineno__ "
    "__static_attributes__".split()
)
"""Entries of a class of one's own that run nothing in a pass: how it is made, and texts."""

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_PARAMETERS = (nn.Parameter, PrivateParameter, type(None))


def runs_layers_alone(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call runs layers of torch's, one after the other, and nothing else.

    Sequences of ``Linear``, convolutions, pooling over windows, element-wise activations and
    ``Flatten`` do, without hooks other than the engine's, with functions and methods that are still
    torch's, and with one ordinary tensor.
    """
    return (
        _FROM_TORCH
        and len(args) == 1
        and not kwargs
        and type(args[0]) is Tensor
        and not _has_any_global_hook()  # type: ignore[no-untyped-call]
        and torch._C._len_torch_function_stack() == 0
        and torch._C._len_torch_dispatch_stack() == 0
        and all(getattr(place, name) is function for place, name, function in _CALLED)
        and all(_is_layer_or_sequence(part) for part in module.modules())
    )


def _is_layer_or_sequence(part: nn.Module) -> bool:
    kind: type = type(part)
    held = vars(part)
    if issubclass(kind, nn.Sequential):
        own = kind.__mro__[: kind.__mro__.index(nn.Sequential)]
        if any(vars(each).keys() - _SAID for each in own):
            return False
        kind = nn.Sequential
    methods = _OWN.get(kind)
    return (
        methods is not None
        and _methods(kind) == methods
        and not held.get("inplace", False)
        and part._compiled_call_impl is None
        and not (held.keys() & methods.keys() and not _shows_forward(held, methods))
        and type(part._parameters) is type(part._modules) is dict
        and all(type(p) in _PARAMETERS for p in part._parameters.values())
        and all(type(hook) is Hook for name in _HOOKS for hook in held[name].values())
    )


def _shows_forward(held: dict[str, Any], methods: dict[str, Any]) -> bool:
    """Whether the only method that an object holds itself is the ``forward`` that we showed."""
    own = held.get("forward")
    return (
        held.keys() & methods.keys() == {"forward"}
        and type(own) is types.MethodType
        and own.__func__ is shown_forward
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

"""Recognise modules that pass samples through a plain stack of torch's layers.

Each of these layers treats a sample like every other, with parameters of the module beside its one
input, and is differentiated truly. Where one follows the other and nothing else is done, outputs
and gradients of a sample depend on it alone, whatever the others are and however many. That takes
that no value and no size is read, nothing is combined or detached, and no hook or function of
somebody else's stands between. All of that shows in a pass on a few samples: as another operation,
or as another node of the graph, which has to lead back to the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from .fewer_rows import first_rows
from .parameter import PrivateParameter
from .replaced_rows import all_same, mapped, tensors_of

SAMPLES = 3
"""Number of samples that the module runs on."""

_LAYERS = frozenset(
    (
        *(F.linear, torch.conv1d, torch.conv2d, torch.conv3d, F.max_pool2d, F.avg_pool2d),
        *(F.relu, torch.relu, Tensor.relu, F.gelu, F.silu),
        *(torch.tanh, Tensor.tanh, torch.sigmoid, Tensor.sigmoid),
    )
)
"""Functions that make one node of the graph each.

Where one takes a batch for a single sample its graph has other nodes, and its parameters fit one
number of rows alone.
"""

_NODES = frozenset(
    f"{layer}Backward0"
    for layer in "Addmm Mm Convolution MaxPool2DWithIndices AvgPool2D Relu Gelu Silu Tanh "
    "Sigmoid".split()
)
"""Their nodes."""

_FLATTENED = frozenset((torch.flatten, Tensor.flatten))
_SHAPED = frozenset(f"{name}Backward0" for name in ("View", "ReshapeAlias", "UnsafeView", "T"))
"""Nodes of flattening, and of layers beside their own."""

_INPUT, _PARAMETER = "CloneBackward0", "torch::autograd::AccumulateGrad"

_TENSORS = (Tensor, nn.Parameter, PrivateParameter)

_saved_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def saves_itself() -> bool:
    """Whether autograd saves tensors as they are, without a hook."""
    return _saved_hooks is not None and _saved_hooks(True) is None


def output_of_stack(
    module: nn.Module,
    call: Callable[[Arguments, Callable[[Any], Any]], Any],
    arguments: Arguments,
    batch: int,
) -> Any:
    """Return the output for the first samples if they pass through a plain stack of layers.

    Args:
        module: the module.
        call: runs it, gives its output to a function, and puts its state back; returns what the
            function returns.
        arguments: a batch, samples first.
        batch: number of samples.

    Returns:
        The output, without its graph; None if the module does anything else, or does not run.
    """
    given = [*tensors_of(arguments)]
    if batch < SAMPLES or len(given) != 1 or not given[0].is_floating_point():
        return None
    if torch._C._len_torch_dispatch_stack():
        return None  # it may do anything beneath the graph
    few = first_rows(arguments, batch, SAMPLES)
    few = mapped(few, lambda tensor: tensor.requires_grad_().clone())

    def output_of(output: Any) -> Any:
        return mapped(output, Tensor.detach) if seen.were_layers(output) else None

    try:
        with _Operations(module) as seen:
            return call(few, output_of)
    except Exception:  # noqa: BLE001 - the real pass has another size
        return None


def is_plain_stack(
    module: nn.Module,
    call: Callable[[Arguments, Callable[[Any], Any]], Any],
    arguments: Arguments,
    batch: int,
    output: Any,
) -> bool:
    """Whether a few samples alone pass through layers, and come out as in the batch.

    Args:
        module, call, arguments, batch: as those of ``output_of_stack``.
        output: what the module has returned for the batch.
    """
    few = output_of_stack(module, call, arguments, batch)
    if few is None:
        return False
    expected = first_rows(mapped(output, Tensor.detach), batch, SAMPLES)
    return all_same(expected, few, SAMPLES, range(SAMPLES))


class _Operations(TorchFunctionMode):
    """Counts layers while it is entered, and notes whether there was anything else."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._parameters = {id(p) for p in module.parameters()}
        self._layers = 0
        self._others = False

    def __torch_function__(
        self, func: Any, _: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        self._others = self._others or not self._is_layer(func, args, named)
        return func(*args, **named)

    def _is_layer(self, func: Any, args: Sequence[Any], named: dict[str, Any]) -> bool:
        beside = [x for x in (*args[1:], *named.values()) if hasattr(x, "__torch_function__")]
        if any(type(x) not in _TENSORS for x in (*args[:1], *beside)):
            return False  # its class may run anything in place of the function
        try:
            if func in _FLATTENED:
                return True
            known = func in _LAYERS
        except TypeError:  # not hashable
            return False
        self._layers += 1
        return known and saves_itself() and all(id(x) in self._parameters for x in beside)

    def were_layers(self, output: Any) -> bool:
        """Whether this output comes from the input through the layers that were counted."""
        if self._others:
            return False
        layers = inputs = 0
        with torch._C.DisableTorchFunction():  # what is read here is no operation of the pass
            for node in _nodes([tensor.grad_fn for tensor in tensors_of(output)]):
                name = node.name()
                layers += name in _NODES
                inputs += name == _INPUT
                known = name in _NODES or name in _SHAPED or name in (_INPUT, _PARAMETER)
                if isinstance(node, BackwardCFunction) or not known:
                    return False
        return inputs == 1 and layers == self._layers


def _nodes(todo: list[Any]) -> Iterator[Any]:
    """Yield all nodes of the graph behind these."""
    seen = set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            todo += [behind for behind, _ in node.next_functions]

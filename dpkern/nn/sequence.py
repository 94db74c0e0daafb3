"""Run layers with samples first inside models whose tensors have time first."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor, nn

from ..base import validate as check
from ..base.errors import InvalidInput

Layer = TypeVar("Layer", bound=nn.Module)

_INPUTS: dict[type[nn.Module], tuple[str, ...]] = {
    nn.TransformerEncoderLayer: ("src",),
    nn.TransformerDecoderLayer: ("tgt", "memory"),
}
"""Inputs of the layers that have several, in their order."""

_SAME_EITHER_WAY = (nn.MultiheadAttention, nn.RNNBase)

_MIXES_POSITIONS = (*_SAME_EITHER_WAY, *_INPUTS)
"""Layers that must know which dimension is time."""

_FEATURES_LAST = (nn.Linear, nn.LayerNorm, *_INPUTS)
"""Layers whose input has features after time and batch."""


def batch_first(layer: Layer) -> Layer:
    """Let a layer see ``[batch, time, ...]`` where its model gives ``[time, batch, ...]``.

    Hooks transpose the first two dimensions of its input and of its output, so the model around
    it, parameters, names and results stay as they are. Per-sample gradients can then be taken:

        for layer in model.layers:
            dpkern.nn.batch_first(layer)

    It is for layers that treat every position by itself (linear maps, embeddings, layer norms),
    and for ``TransformerEncoderLayer`` and ``TransformerDecoderLayer`` with ``batch_first=False``,
    whose attention then has the batch first too. Attention and recurrent layers by themselves need
    nothing and are returned as they are; a second call changes nothing.

    Args:
        layer: the layer, which is changed in place and returned.

    Raises:
        InvalidInput: a transformer layer that has the batch first already, a module that contains
            attention or recurrent layers; on a call, an input without time and batch.
    """
    check.that(
        isinstance(layer, nn.Module),
        "layer",
        "a torch.nn.Module",
        type(layer).__name__,
        "Pass one layer of the model.",
    )
    if isinstance(layer, _SAME_EITHER_WAY) or _swap_inputs in layer._forward_pre_hooks.values():
        return layer
    if isinstance(layer, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        if layer.self_attn.batch_first:
            raise InvalidInput(
                "layer",
                expected="one with batch_first=False",
                got="one with the batch first",
                remedy="Leave it as it is.",
            )
        for part in layer.children():
            if isinstance(part, nn.MultiheadAttention):
                part.batch_first = True
    else:
        inner = [name for name, part in layer.named_modules() if isinstance(part, _MIXES_POSITIONS)]
        if inner:
            raise InvalidInput(
                "layer",
                expected="one that treats every position by itself, or one transformer layer",
                got=f"{type(layer).__name__}, which contains {inner[0]}",
                remedy="Call batch_first on each of its layers, or dpkern.fix(model) on the model.",
            )
    layer.register_forward_pre_hook(_swap_inputs, with_kwargs=True)
    layer.register_forward_hook(_swap_output)
    return layer


def is_time_first(part: nn.Module) -> bool:
    """Whether a transformer layer works on ``[time, batch, features]``."""
    layers = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    return isinstance(part, layers) and not part.self_attn.batch_first


def _swap_inputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    names = next((n for kind, n in _INPUTS.items() if isinstance(module, kind)), ("input",))
    least = 3 if isinstance(module, _FEATURES_LAST) else 2
    swapped = [_swapped(value, least) for value in args[: len(names)]]
    named = {k: _swapped(v, least) if k in names else v for k, v in kwargs.items()}
    return (*swapped, *args[len(names) :]), named


def _swap_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> Tensor:
    return _swapped(output, 2)


def _swapped(value: Any, least: int) -> Tensor:
    if not isinstance(value, Tensor) or value.dim() < least:
        raise InvalidInput(
            "input",
            expected=f"a tensor of shape [time, batch, ...] with {least} dimensions or more",
            got=str(list(value.shape)) if isinstance(value, Tensor) else type(value).__name__,
            remedy="Take the hooks of dpkern.nn.batch_first off this layer.",
        )
    return value.transpose(0, 1)

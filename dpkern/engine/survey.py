"""Find every trainable parameter's use from the shapes of one forward pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..base.errors import InvalidInput
from ..privacy.mechanisms.site import Site
from .capture import Capture
from .dry_run import as_before
from .layers.conv import sizes_exchanged
from .parameter import PrivateParameter, tensors_in
from .uses import CapturedOp, ParameterSource

Seen = tuple[CapturedOp, tuple[int, ...]]
"""A use and the shape of its input."""

CONVOLUTIONS = (
    *(f"conv{axes}d" for axes in (1, 2, 3)),
    *(f"conv_transpose{axes}d" for axes in (1, 2, 3)),
    "spectral_conv2d",
)


def survey(model: nn.Module, *example: Any) -> tuple[Site, ...]:
    """Return the sites of a model's trainable parameters, in the order of ``named_parameters``.

    Runs the model once, in evaluation mode, on ``example``; its values reach nothing but that
    forward pass, so zeros will do. Parameters, buffers, modes and random generators are as before
    afterwards.

    Args:
        model: the model, not private yet.
        example: arguments as in the training loop; the batch is the first dimension of the tensors.

    Returns:
        One site per parameter. Whatever is no whole kernel of one convolution, transposed or not,
        and not the blocks of one block-circulant product, is ``other``.

    Raises:
        InvalidInput: no batch in the example, or a model that is private already.
    """
    rows = next((int(t.shape[0]) for t in tensors_in(example) if t.dim()), 0)
    if rows < 1:
        raise InvalidInput(
            "example",
            expected="inputs whose first dimension is a batch of at least one sample",
            got=f"{rows} samples",
            remedy="Pass torch.zeros(2, *shape of one sample), for example.",
        )
    capture = Capture(model)
    if any(isinstance(p, PrivateParameter) for p in capture.parameters):
        raise InvalidInput(
            "model",
            expected="one that is not private yet",
            got="a module of make_private",
            remedy="Survey the model before make_private, or call engine.detach() first.",
        )
    seen: list[Seen] = []
    capture.on_use = lambda use, x: seen.append((use, tuple(x.shape)))
    with as_before(capture), _evaluating(model), torch.enable_grad():
        capture.attach()
        capture.begin_batch(rows)
        capture.collected = []  # make_private raises what is refused
        model(*example)
    return tuple(_site(slot, seen, rows) for slot in capture.slots)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def _site(slot: ParameterSource, seen: list[Seen], batch: int) -> Site:
    uses = [(use, shape, which) for use, shape in seen for which in _places(slot, use)]
    if len(uses) == 1 and not slot.indirect:
        use, shape, which = uses[0]
        if which == 0 and use.targets[0] == slot.target:
            if use.operation in CONVOLUTIONS and shape[0] == batch:
                return _convolution(slot.shape, shape, use.saved)
            if use.operation == "circulant" and len(slot.shape) == 3:
                spots = (math.prod(shape[:-2]) // batch,)
                return Site(kind="circulant", shape=slot.shape, input=spots, output=spots)
    return Site(kind="other", shape=slot.shape)


def _places(slot: ParameterSource, use: CapturedOp) -> list[int]:
    """Return the numbers of the use's targets that are the parameter or a part of it."""
    return [i for i, t in enumerate(use.targets) if t is not None and t.source is slot]


def _convolution(weight: tuple[int, ...], x: tuple[int, ...], options: dict[str, Any]) -> Site:
    """Return the site of a kernel ``weight`` over inputs ``x``, both given by their shapes."""
    groups, upwards = int(options["groups"]), bool(options["transposed"])
    channels = weight[0] if upwards else weight[1] * groups
    if len(weight) != len(x) or channels != x[1]:
        return Site(kind="other", shape=weight)  # used as a view of another shape
    geometry = {name: tuple(options[name]) for name in ("stride", "padding", "dilation")}
    sizes: dict[str, Any] = {"shape": weight, "groups": groups, **geometry}
    if upwards:
        given, sizes["padding"] = sizes_exchanged(x[2:], weight[2:], options)
        return Site(kind="conv", input=given, output=x[2:], **sizes)
    output = tuple(
        (n + 2 * p - t * (k - 1) - 1) // s + 1
        for n, k, s, p, t in zip(x[2:], weight[2:], *geometry.values(), strict=True)
    )
    return Site(kind="conv", input=x[2:], output=output, **sizes)

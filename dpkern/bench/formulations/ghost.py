"""Norms and sums of linear layers and convolutions with torch: einsum, Gram, unfold, autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.grad import conv2d_weight as _untyped_conv2d_weight

from ._formulation import Arguments, Formulation

Call = Callable[[], Any]
conv2d_weight: Callable[..., torch.Tensor] = _untyped_conv2d_weight


def _flat_squares(grads: torch.Tensor) -> Any:
    return torch.linalg.vector_norm(grads.flatten(1), dim=1).square()


# linear layers


def _gram(args: Arguments) -> Call:
    a, g = args["a"], args["g"]
    return lambda: (torch.bmm(a, a.mT) * torch.bmm(g, g.mT)).sum((1, 2))


def _rank_one(args: Arguments) -> Call:
    a, g = args["a"].flatten(1), args["g"].flatten(1)
    return lambda: a.square().sum(1) * g.square().sum(1)


def _rank_one_norms(args: Arguments) -> Call:
    a, g = args["a"].flatten(1), args["g"].flatten(1)
    norm = torch.linalg.vector_norm
    return lambda: (norm(a, dim=1) * norm(g, dim=1)).square_()


def _gram_in_buffers(args: Arguments) -> Call:
    a, g = args["a"], args["g"]
    batch, positions = a.shape[:2]
    first, second = (a.new_empty(batch, positions, positions) for _ in range(2))

    def call() -> Any:
        torch.bmm(a, a.mT, out=first)
        torch.bmm(g, g.mT, out=second)
        return torch.linalg.vecdot(first.flatten(1), second.flatten(1))

    return call


def _direct_in_buffer(args: Arguments) -> Call:
    a, g = args["a"], args["g"]
    made = a.new_empty(len(a), g.shape[2], a.shape[2])
    return lambda: _flat_squares(torch.bmm(g.mT, a, out=made))


def _direct(args: Arguments) -> Call:
    a, g = args["a"], args["g"]
    return lambda: _flat_squares(torch.bmm(g.mT, a))


def _gradients(args: Arguments) -> Call:
    a, g = args["a"], args["g"]

    def call() -> Any:
        grads = torch.bmm(g.mT, a)
        return grads, _flat_squares(grads)

    return call


def _gradients_in_buffer(args: Arguments) -> Call:
    a, g = args["a"], args["g"]
    made = a.new_empty(len(a), g.shape[2], a.shape[2])

    def call() -> Any:
        torch.bmm(g.mT, a, out=made)
        return made, _flat_squares(made)

    return call


def _gradients_by_sample(args: Arguments) -> Call:
    """Return each gradient's square while it is in the cache."""
    a, g = args["a"], args["g"]
    made, squares = a.new_empty(len(a), g.shape[2], a.shape[2]), a.new_empty(len(a))
    parts = list(zip(a, g.mT, made, made.flatten(1), squares, strict=True))

    def call() -> Any:
        for one, other, grad, row, square in parts:
            torch.mm(other, one, out=grad)
            torch.dot(row, row, out=square)
        return made, squares

    return call


def _gradients_by_einsum(args: Arguments) -> Call:
    a, g = args["a"], args["g"]

    def call() -> Any:
        grads = torch.einsum("bti,bto->boi", a, g)
        return grads, torch.einsum("boi,boi->b", grads, grads)

    return call


def _rounded(args: Arguments) -> Call:
    a, g = args["a"], args["g"]

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        grads = torch.bmm(g.mT, a)
        return grads, grads.double().square().sum((1, 2))

    return call


def _rounded_sum(args: Arguments) -> Call:
    grads, factors, out = args["grads"], args["factors"], args["out"]
    rows = grads.flatten(1).to(out.dtype)
    return lambda: out.view(-1).addmv_(rows.t(), factors)


def _rounded_sum_by_einsum(args: Arguments) -> Call:
    grads, factors, out = args["grads"], args["factors"], args["out"]
    return lambda: out.add_(torch.einsum("b,boi->oi", factors, grads.to(out.dtype)))


def _weighted(args: Arguments) -> Call:
    a, g, factors, out = args["a"], args["g"], args["factors"], args["out"]
    rows = a.flatten(0, 1)
    return lambda: out.addmm_((g * factors[:, None, None]).flatten(0, 1).t(), rows)


def _weighted_inputs(args: Arguments) -> Call:
    a, factors, out = args["a"], args["factors"][:, None, None], args["out"]
    rows, scaled = args["g"].flatten(0, 1).t(), torch.empty_like(a)
    return lambda: out.addmm_(rows, torch.mul(a, factors, out=scaled).flatten(0, 1))


def _weighted_by_einsum(args: Arguments) -> Call:
    a, g, factors, out = args["a"], args["g"], args["factors"], args["out"]
    return lambda: out.add_(torch.einsum("bto,bti,b->oi", g, a, factors))


def _whole(args: Arguments) -> Call:
    a, g, factors, out = args["a"], args["g"], args["factors"], args["out"]

    def call() -> None:
        grads = torch.bmm(g.mT * factors[:, None, None], a)
        out.add_(grads.to(torch.int32).sum(0, dtype=torch.int32))

    return call


def _whole_by_sample(args: Arguments) -> Call:
    a, g, factors, out = args["a"], args["g"], args["factors"], args["out"]

    def call() -> None:
        for one, other, factor in zip(a, g, factors, strict=True):
            out.add_(torch.mm((other * factor).t(), one).to(torch.int32))

    return call


def _whole_in_buffers(args: Arguments) -> Call:
    a, g, factors, out = args["a"], args["g"], args["factors"][:, None, None], args["out"]
    scaled, made = torch.empty_like(g), a.new_empty(len(a), *out.shape)
    whole = torch.empty_like(made, dtype=torch.int32)

    def call() -> None:
        torch.bmm(torch.mul(g, factors, out=scaled).mT, a, out=made)
        out.add_(whole.copy_(made).sum(0, dtype=torch.int32))

    return call


def _whole_by_sample_in_buffers(args: Arguments) -> Call:
    a, g, factors, out = args["a"], args["g"], args["factors"][:, None, None], args["out"]
    scaled, made, whole = torch.empty_like(g), a.new_empty(out.shape), torch.empty_like(out)
    parts = list(zip(a, scaled.mT, strict=True))

    def call() -> None:
        torch.mul(g, factors, out=scaled)
        for one, other in parts:
            out.add_(whole.copy_(torch.mm(other, one, out=made)))

    return call


def _whole_by_output(args: Arguments) -> Call:
    """Return the sum of one position output by output: products of all samples in the cache."""
    a, g, out = args["a"].flatten(1), args["g"].flatten(1), args["out"]
    factors, made = args["factors"], torch.empty_like(a)
    whole = torch.empty_like(a, dtype=torch.int32)

    def call() -> None:
        scaled = (g * factors[:, None]).t().contiguous()
        for row, total in zip(scaled[:, :, None], out, strict=True):
            whole.copy_(torch.mul(row, a, out=made))
            total.add_(whole.sum(0, dtype=torch.int32))

    return call


def _has_one_position(args: Arguments) -> bool:
    return bool(args["a"].shape[1] == 1)


# convolutions of two dimensions


def _geometry(args: Arguments) -> dict[str, Any]:
    names = ("stride", "padding", "dilation")
    return {name: args[name] for name in names}


def _kernel(args: Arguments) -> tuple[int, int]:
    size = args["kernel_size"]
    return (size, size) if isinstance(size, int) else tuple(size)


def _windows(args: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    columns = F.unfold(args["x"], _kernel(args), **_geometry(args))
    return columns, args["g"].flatten(2)


def _conv_gradients(args: Arguments) -> Call:
    shape = (args["g"].shape[1], args["x"].shape[1], *_kernel(args))

    def call() -> Any:
        columns, g = _windows(args)
        grads = torch.bmm(g, columns.mT)
        return grads.view(len(g), *shape), _flat_squares(grads)

    return call


def _strided_gradients(args: Arguments) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return gradients by windows that one copy fills, in buffers, for output gradients."""
    x, kernel, padding, outputs = args["x"], _kernel(args), args["padding"], args["g"].shape[2:]
    batch, channels = x.shape[:2]
    columns = x.new_empty(batch, channels, *kernel, *outputs)
    rows = columns.view(batch, -1, columns.shape[4] * columns.shape[5])
    made = x.new_empty(batch, args["g"].shape[1], rows.shape[1])
    stride, dilation = args["stride"], args["dilation"]

    def grads(g: torch.Tensor) -> torch.Tensor:
        padded = F.pad(x, (padding,) * 4)
        first, second, down, right = padded.stride()
        steps = (dilation * down, dilation * right, stride * down, stride * right)
        columns.copy_(padded.as_strided(columns.shape, (first, second, *steps)))
        return torch.bmm(g.flatten(2), rows.mT, out=made)

    return grads


def _conv_gradients_strided(args: Arguments) -> Call:
    grads, g = _strided_gradients(args), args["g"]
    shape = (len(g), g.shape[1], args["x"].shape[1], *_kernel(args))

    def call() -> Any:
        made = grads(g)
        return made.view(shape), _flat_squares(made)

    return call


def _conv_whole_strided(args: Arguments) -> Call:
    grads, g, out = _strided_gradients(args), args["g"], args["out"]
    factors, scaled = args["factors"][:, None, None, None], torch.empty_like(g)
    whole = torch.empty(len(g), g.shape[1], out[0].numel(), dtype=torch.int32)

    def call() -> None:
        whole.copy_(grads(torch.mul(g, factors, out=scaled)))
        out.add_(whole.sum(0, dtype=torch.int32).view_as(out))

    return call


def _conv_gradients_by_groups(args: Arguments) -> Call:
    """Return the gradients as one convolution with a group for each sample and channel pair."""
    x, g, kernel = args["x"], args["g"], _kernel(args)
    batch, channels = x.shape[:2]
    inputs = x.reshape(1, batch * channels, *x.shape[2:])

    def call() -> Any:
        filters = g.repeat_interleave(channels, dim=0)  # a stack of g for each input channel
        filters = filters.reshape(batch * channels * g.shape[1], 1, *g.shape[2:])
        made = F.conv2d(
            inputs,
            filters,
            padding=args["padding"],
            stride=args["dilation"],
            dilation=args["stride"],
            groups=batch * channels,
        )
        made = made.view(batch, channels, g.shape[1], *made.shape[2:])
        grads = made[..., : kernel[0], : kernel[1]].transpose(1, 2)
        return grads, _flat_squares(grads)

    return call


def _only_squares(prepare: Callable[[Arguments], Call]) -> Callable[[Arguments], Call]:
    def prepared(args: Arguments) -> Call:
        call = prepare(args)
        return lambda: call()[1]

    return prepared


def _conv_gram(args: Arguments) -> Call:
    def call() -> Any:
        columns, g = _windows(args)
        return (torch.bmm(columns.mT, columns) * torch.bmm(g.mT, g)).sum((1, 2))

    return call


def _conv_sum_by_autograd(args: Arguments) -> Call:
    out, factors = args["out"], args["factors"][:, None, None, None]

    def call() -> None:
        weighted = args["g"] * factors
        out.add_(conv2d_weight(args["x"], out.shape, weighted, **_geometry(args)))

    return call


def _conv_sum_by_windows(args: Arguments) -> Call:
    out, factors = args["out"], args["factors"][:, None, None]

    def call() -> None:
        columns, g = _windows(args)
        rows = (g * factors).transpose(0, 1).flatten(1)
        out.add_((rows @ columns.transpose(0, 1).flatten(1).t()).view_as(out))

    return call


def _conv_whole(args: Arguments) -> Call:
    out, factors = args["out"], args["factors"][:, None, None]

    def call() -> None:
        columns, g = _windows(args)
        grads = torch.bmm(g * factors, columns.mT).to(torch.int32)
        out.add_(grads.sum(0, dtype=torch.int32).view_as(out))

    return call


def _is_plain_plane(args: Arguments) -> bool:
    return bool(args["x"].dim() == 4 and args["groups"] == 1)


def _is_square(args: Arguments) -> bool:
    steps = (args[name] for name in ("stride", "padding", "dilation"))
    return _is_plain_plane(args) and all(isinstance(step, int) for step in steps)


FORMULATIONS = {
    "ghost.linear_norm": (
        Formulation("Gram", _gram, lambda args: args["a"].shape[1] > 1),
        Formulation("Gram, buffers", _gram_in_buffers, lambda args: args["a"].shape[1] > 1),
        Formulation("rank one", _rank_one, _has_one_position),
        Formulation("rank one, norms", _rank_one_norms, _has_one_position),
        Formulation("bmm, buffer", _direct_in_buffer),
        Formulation("bmm", _direct),
    ),
    "ghost.linear_gradient": (
        Formulation("bmm", _gradients),
        Formulation("bmm, buffer", _gradients_in_buffer),
        Formulation("mm, sample by sample", _gradients_by_sample),
        Formulation("einsum", _gradients_by_einsum),
    ),
    "ghost.rounded_gradient": (
        Formulation("bmm", _rounded),
        Formulation("bmm, buffer", _gradients_in_buffer),
    ),
    "ghost.rounded_sum": (
        Formulation("addmv", _rounded_sum),
        Formulation("einsum", _rounded_sum_by_einsum),
    ),
    "ghost.linear_sum": (
        Formulation("addmm", _weighted),
        Formulation("addmm of weighted inputs", _weighted_inputs),
        Formulation("einsum", _weighted_by_einsum),
    ),
    "ghost.linear_integer_sum": (
        Formulation("bmm, int32", _whole, compiles=True),
        Formulation("loop of samples", _whole_by_sample),
        Formulation("bmm, int32, buffers", _whole_in_buffers),
        Formulation("loop of samples, buffers", _whole_by_sample_in_buffers),
        Formulation("loop of outputs", _whole_by_output, _has_one_position),
    ),
    "ghost.conv_norm": (
        Formulation("unfold, bmm", _only_squares(_conv_gradients), _is_plain_plane),
        Formulation("unfold, Gram", _conv_gram, _is_plain_plane),
        Formulation("grouped", _only_squares(_conv_gradients_by_groups), _is_plain_plane),
        Formulation("strided windows, bmm", _only_squares(_conv_gradients_strided), _is_square),
    ),
    "ghost.conv_gradient": (
        Formulation("unfold, bmm", _conv_gradients, _is_plain_plane),
        Formulation("grouped", _conv_gradients_by_groups, _is_plain_plane),
        Formulation("strided windows, bmm", _conv_gradients_strided, _is_square),
    ),
    "ghost.conv_sum": (
        Formulation("conv2d_weight", _conv_sum_by_autograd, _is_plain_plane),
        Formulation("unfold, mm", _conv_sum_by_windows, _is_plain_plane),
    ),
    "ghost.conv_integer_sum": (
        Formulation("unfold, int32", _conv_whole, _is_plain_plane),
        Formulation("strided windows, int32", _conv_whole_strided, _is_square),
    ),
}

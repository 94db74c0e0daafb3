"""Calls of the layer ops with random shapes, samples that are left out and ids that repeat."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch

from dpkern.ops.spectral import Band
from dpkern.ops.spectral.bins import kept_bins

Call = tuple[tuple[Any, ...], dict[str, Any]]


class Draw:
    """Shapes by a seed; tensors of one dtype."""

    def __init__(self, seed: int) -> None:
        self.numbers = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = self.numbers.choice((torch.float32, torch.float64))

    def size(self, least: int, most: int) -> int:
        """An integer in between, both ends included."""
        return self.numbers.randint(least, most)

    def sizes(self, *most: int) -> list[int]:
        """One from 1 to each of these."""
        return [self.size(1, n) for n in most]

    def chance(self, share: float = 0.5) -> bool:
        """True as often as this."""
        return self.numbers.random() < share

    def tensor(self, *shape: int) -> torch.Tensor:
        """Normal numbers."""
        made = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return made.to(self.dtype)

    def factors(self, batch: int) -> torch.Tensor:
        """Some of them 0; now and then all."""
        kept = torch.rand(batch, generator=self.generator) < (0.7 if self.chance(0.9) else 0)
        return self.tensor(batch).abs() * kept

    def ids(self, batch: int, positions: int, rows: int) -> torch.Tensor:
        """Return ids with repetitions."""
        return torch.randint(rows, (batch, positions), generator=self.generator)


def linear_norm(draw: Draw) -> Call:
    batch, d, p = draw.sizes(3, 24, 24)
    positions = draw.numbers.choice((0, 1, 1, 2, 5, 9))
    operands = draw.tensor(batch, positions, d), draw.tensor(batch, positions, p)
    routes = ["auto", "gram", "direct"] + ["rank_one"] * (positions == 1)
    return operands, {"route": draw.numbers.choice(routes)}


def linear_norms(draw: Draw) -> Call:
    batch, positions, d, p, layers = draw.sizes(3, 9, 24, 24, 3)
    a, g = ([draw.tensor(batch, positions, n) for _ in range(layers)] for n in (d, p))
    return (a, g), {}


def linear_gradient(draw: Draw) -> Call:
    batch, positions, d, p = draw.size(0, 3), *draw.sizes(6, 9, 9)
    return (draw.tensor(batch, positions, d), draw.tensor(batch, positions, p)), {}


def linear_sum(draw: Draw) -> Call:
    batch, positions, d, p = draw.size(0, 5), *draw.sizes(6, 9, 9)
    operands = draw.tensor(batch, positions, d), draw.tensor(batch, positions, p)
    return (*operands, draw.factors(batch), draw.tensor(p, d)), {}


def rounded_sum(draw: Draw) -> Call:
    batch, d, p = draw.size(0, 5), *draw.sizes(9, 9)
    return ([draw.tensor(batch, p, d)], draw.factors(batch), [draw.tensor(p, d)]), {}


def matmul(draw: Draw) -> Call:
    rows, inner, columns = draw.size(0, 9), *draw.sizes(9, 9)
    w = draw.tensor(columns, inner).t() if draw.chance() else draw.tensor(inner, columns)
    bias = draw.tensor(columns) if draw.chance() else None
    return (draw.tensor(rows, inner), w, bias), {}


def _convolution(draw: Draw, spatial: int, most_groups: int = 2, most_stride: int = 3) -> Call:
    """Operands and sizes of a layer."""
    groups = draw.size(1, most_groups)
    batch, ins, outs = draw.size(1, 3), groups * draw.size(1, 3), groups * draw.size(1, 3)
    kernel = [draw.size(1, 3) for _ in range(spatial)]
    stride = [draw.size(1, most_stride) for _ in range(spatial)]
    dilation = [draw.size(1, 2) for _ in range(spatial)]
    padding = [draw.size(0, k - 1) for k in kernel]
    spans = [t * (k - 1) + 1 for k, t in zip(kernel, dilation, strict=True)]
    most = 6 if spatial < 3 else 2
    given = [max(1, s - 2 * p) + draw.size(0, most) for s, p in zip(spans, padding, strict=True)]
    axes = zip(given, padding, spans, stride, strict=True)
    output = [(n + 2 * p - span) // s + 1 for n, p, span, s in axes]
    arguments = {"kernel_size": kernel, "stride": stride, "padding": padding}
    arguments |= {"dilation": dilation, "groups": groups}
    return (draw.tensor(batch, ins, *given), draw.tensor(batch, outs, *output)), arguments


def conv_norm(draw: Draw) -> Call:
    alone = draw.chance()  # one group has a Gram route
    operands, arguments = _convolution(draw, draw.size(1, 2 if alone else 3), 1 if alone else 2)
    route = draw.numbers.choice(("gram", "gram", "auto", "direct")) if alone else "auto"
    return operands, {**arguments, "route": route}


def conv_gradient(draw: Draw) -> Call:
    return _convolution(draw, draw.size(1, 3))


def conv_sum(draw: Draw) -> Call:
    operands, arguments = _convolution(draw, draw.size(1, 3))
    x, g = operands
    kernel = arguments["kernel_size"]
    out = draw.tensor(g.shape[1], x.shape[1] // arguments["groups"], *kernel)
    return (*operands, draw.factors(len(x)), out), arguments


def embedding_norm(draw: Draw) -> Call:
    batch, positions, columns, rows = draw.sizes(4, 9, 9, 12)
    ids = draw.ids(batch, positions, rows)
    padding = draw.size(0, rows - 1) if draw.chance() else None
    return (ids, draw.tensor(batch, positions, columns)), {"padding_idx": padding}


def embedding_sum(draw: Draw) -> Call:
    (ids, g), arguments = embedding_norm(draw)
    out = draw.tensor(draw.size(12, 15), g.shape[2])
    return (ids, g, draw.factors(len(ids)), out), arguments


def tied_cross(draw: Draw) -> Call:
    (ids, e), arguments = embedding_norm(draw)
    rows, vocabulary = draw.size(0, 5), draw.size(12, 15)
    a, g = draw.tensor(len(ids), rows, e.shape[2]), draw.tensor(len(ids), rows, vocabulary)
    return (ids, e, a, g), arguments


def layer_norm_backward(draw: Draw) -> Call:
    batch, rows, columns = draw.size(0, 3), draw.size(0, 4), draw.size(1, 12)
    g, x = (draw.tensor(batch, rows, columns) for _ in range(2))
    weight = draw.tensor(columns) if draw.chance() else None
    return (g, x, draw.tensor(batch, rows), draw.tensor(batch, rows), weight), {}


def rms_norm_backward(draw: Draw) -> Call:
    (g, x, _, rstd, weight), _ = layer_norm_backward(draw)
    return (g, x, rstd, weight), {}


def group_norm_backward(draw: Draw) -> Call:
    batch, groups, channels, places = draw.size(0, 3), *draw.sizes(3, 3), draw.size(0, 9)
    g, x = (draw.tensor(batch, groups * channels, places) for _ in range(2))
    weight = draw.tensor(groups * channels) if draw.chance() else None
    return (g, x, draw.tensor(batch, groups), draw.tensor(batch, groups), weight), {}


def _on_a_grid(draw: Draw) -> tuple[Call, tuple[int, ...]]:
    """A layer and a grid on which its lags do not wrap."""
    (x, g), arguments = _convolution(draw, draw.size(1, 3), most_stride=2)
    if draw.chance(0.2):  # a single output position
        axes = zip(arguments["dilation"], arguments["kernel_size"], strict=True)
        x = draw.tensor(*x.shape[:2], *(t * (k - 1) + 1 for t, k in axes))
        g = draw.tensor(*g.shape[:2], *(1 for _ in g.shape[2:]))
        arguments |= {"padding": [0 for _ in g.shape[2:]]}
    sizes = []
    for n, p, s in zip(x.shape[2:], arguments["padding"], arguments["stride"], strict=True):
        padded = n + 2 * p
        sizes.append(padded + -padded % s if draw.chance() else padded + draw.size(0, 3))
    return ((x, g), arguments), tuple(sizes)


def spectral_norm(draw: Draw) -> Call:
    (operands, arguments), size = _on_a_grid(draw)
    kind = draw.numbers.choice(("shells", "rectangle"))
    band = Band(size, kind, draw.numbers.choice((0.2, 0.5))) if draw.chance() else None
    return operands, {**arguments, "size": size, "band": band}


def spectral_bins(draw: Draw) -> Call:
    (operands, arguments), size = _on_a_grid(draw)
    band = Band(size, "shells", draw.numbers.choice((0.2, 0.5, 0.9)))
    return operands, {**arguments, "band": band}


def whitened_bins(draw: Draw) -> Call:
    (operands, arguments), size = _on_a_grid(draw)
    taps = math.prod(arguments["kernel_size"])
    matrix = draw.tensor(draw.size(1, 5), taps).double()
    return (*operands, matrix), {**arguments, "band": Band(size, "shells", 0.5)}


def bins_sum(draw: Draw) -> Call:
    ((x, g), arguments), size = _on_a_grid(draw)
    band = Band(size, "shells", 0.5)
    kept, batch, groups = len(kept_bins(band)), len(x), arguments["groups"]
    x_bins, g_bins = (draw.tensor(kept, batch, 2, t.shape[1]) for t in (x, g))
    out = draw.tensor(g.shape[1], x.shape[1] // groups, *arguments["kernel_size"])
    given = {"dilation": arguments["dilation"], "groups": groups, "band": band}
    return (x_bins, g_bins, draw.factors(batch), out), given


def filtered(draw: Draw) -> Call:
    ((x, _), arguments), size = _on_a_grid(draw)
    padding = arguments["padding"]
    rows = [draw.size(1, n) for n in size]
    band = Band(size, draw.numbers.choice(("shells", "rectangle")), 0.5)
    return (x,), {"padding": padding, "rows": rows, "band": band}


def whitened_norm(draw: Draw) -> Call:
    batch, outs, ins, height, width, rank = draw.size(0, 3), *draw.sizes(5, 5, 3, 3, 9)
    grads = draw.tensor(batch, outs, ins, height, width)
    if draw.chance():
        grads = draw.tensor(batch, ins, height, width, outs).permute(0, 4, 1, 2, 3)
    matrix = draw.tensor(rank, height * width).double()
    return (grads, matrix), {}


def circulant(draw: Draw) -> Call:
    batch, positions = draw.size(0, 3), draw.numbers.choice((1, 1, 2, 3))
    ins, outs, block = draw.sizes(9, 9, 9)
    return (
        draw.tensor(batch, positions, ins, block),
        draw.tensor(batch, positions, outs, block),
    ), {}


def circulant_norm(draw: Draw) -> Call:
    operands, _ = circulant(draw)
    band = Band((operands[0].shape[3],), "shells", 0.5) if draw.chance() else None
    return operands, {"band": band}


def circulant_product(draw: Draw) -> Call:
    batch = draw.size(0, 3)
    ins, outs, block = draw.sizes(9, 9, 9)
    return (draw.tensor(batch, ins, block), draw.tensor(outs, ins, block)), {}


def circulant_sum(draw: Draw) -> Call:
    (x, g), arguments = circulant_norm(draw)
    out = draw.tensor(g.shape[2], x.shape[2], x.shape[3])
    return (x, g, draw.factors(len(x)), out), arguments


def _recurrent(draw: Draw, blocks: int) -> tuple[list[Any], list[Any], list[Any]]:
    """Sizes ``[B, T, D, H]``, both weights, and both biases or none."""
    sizes = [draw.size(0, 3), *draw.sizes(4, 6, 6)]
    rows = blocks * sizes[3]
    weights = [draw.tensor(rows, sizes[2]), draw.tensor(rows, sizes[3])]
    biases = [draw.tensor(rows), draw.tensor(rows)] if draw.chance() else [None, None]
    return sizes, weights, biases


def _layer(draw: Draw, blocks: int, states: int) -> Call:
    (b, t, d, h), weights, biases = _recurrent(draw, blocks)
    start = [draw.tensor(b, h) for _ in range(states)]
    return (draw.tensor(b, t, d), *start, *weights, *biases), {}


def lstm(draw: Draw) -> Call:
    return _layer(draw, 4, 2)


def gru(draw: Draw) -> Call:
    return _layer(draw, 3, 1)


def rnn(draw: Draw) -> Call:
    return _layer(draw, 1, 1)[0], {"nonlinearity": draw.numbers.choice(("tanh", "relu"))}


def _gradients(draw: Draw, *shapes: tuple[int, ...]) -> list[Any]:
    return [draw.tensor(*shape) if draw.chance() else None for shape in shapes]


def lstm_backward(draw: Draw) -> Call:
    (b, t, _, h), weights, _ = _recurrent(draw, 4)
    kept = draw.tensor(b, t, 4 * h), draw.tensor(b, t, h), draw.tensor(b, h)
    return (*kept, *weights, *_gradients(draw, (b, t, h), (b, h), (b, h))), {}


def gru_backward(draw: Draw) -> Call:
    (b, t, _, h), weights, _ = _recurrent(draw, 3)
    kept = draw.tensor(b, t, 4 * h), draw.tensor(b, t, h)
    return (*kept, *weights, *_gradients(draw, (b, t, h), (b, h))), {}


def rnn_backward(draw: Draw) -> Call:
    (b, t, _, h), weights, _ = _recurrent(draw, 1)
    kept = draw.tensor(b, t, h), draw.tensor(b, h)
    given = _gradients(draw, (b, t, h), (b, h))
    return (*kept, *weights, *given), {"nonlinearity": draw.numbers.choice(("tanh", "relu"))}


def _integers(call: Call) -> Call:
    """The same call with an integer sum, its last operand."""
    (*operands, out), arguments = call
    return (*operands, out.int()), arguments


def linear_integer_sum(draw: Draw) -> Call:
    (a, g, factors, out), _ = linear_sum(draw)
    if draw.chance():
        a, g = a[:, :1].contiguous(), g[:, :1].contiguous()
    whole = a.shape[1] == 1 and draw.chance()
    return (a, g, factors, out.int()), {"rounding": "factors" if whole else "truncate"}


def linear_sum_error(draw: Draw) -> Call:
    return linear_gradient(draw)


def conv_integer_sum(draw: Draw) -> Call:
    return _integers(conv_sum(draw))


def conv_sum_error(draw: Draw) -> Call:
    return conv_gradient(draw)


def embedding_integer_sum(draw: Draw) -> Call:
    return _integers(embedding_sum(draw))


def tied_integer_sum(draw: Draw) -> Call:
    (ids, *operands), arguments = tied_sum_error(draw)
    out = draw.tensor(operands[1].shape[2], operands[0].shape[2]).int()
    return (ids, *operands, draw.factors(len(ids)), out), arguments


def tied_sum_error(draw: Draw) -> Call:
    (ids, e, a, g), arguments = tied_cross(draw)
    return (ids, a, g, e), arguments


CASES: dict[str, Callable[[Draw], Call]] = {
    "ghost.linear_norm": linear_norm,
    "ghost.linear_gradient": linear_gradient,
    "ghost.linear_sum": linear_sum,
    "ghost.conv_norm": conv_norm,
    "ghost.conv_gradient": conv_gradient,
    "ghost.conv_sum": conv_sum,
    "ghost.embedding_norm": embedding_norm,
    "ghost.embedding_sum": embedding_sum,
    "ghost.tied_cross": tied_cross,
    "ghost.layer_norm_backward": layer_norm_backward,
    "ghost.rms_norm_backward": rms_norm_backward,
    "ghost.group_norm_backward": group_norm_backward,
    "spectral.conv_norm": spectral_norm,
    "spectral.conv_bins": spectral_bins,
    "spectral.bins_sum": bins_sum,
    "spectral.filtered": filtered,
    "spectral.whitened_norm": whitened_norm,
    "spectral.circulant_norm": circulant_norm,
    "spectral.circulant_gradient": circulant,
    "spectral.circulant_sum": circulant_sum,
    "product.matmul": matmul,
    "recurrent.gru": gru,
    "recurrent.gru_backward": gru_backward,
    "recurrent.lstm": lstm,
    "recurrent.lstm_backward": lstm_backward,
    "recurrent.rnn": rnn,
    "recurrent.rnn_backward": rnn_backward,
    "ghost.conv_integer_sum": conv_integer_sum,
    "ghost.conv_sum_error": conv_sum_error,
    "ghost.embedding_integer_sum": embedding_integer_sum,
    "ghost.linear_integer_sum": linear_integer_sum,
    "ghost.linear_sum_error": linear_sum_error,
    "ghost.tied_integer_sum": tied_integer_sum,
    "ghost.tied_sum_error": tied_sum_error,
    "spectral.whitened_bins": whitened_bins,
    "ghost.rounded_gradient": linear_gradient,
    "ghost.rounded_sum": rounded_sum,
    "spectral.circulant_product": circulant_product,
    "ghost.linear_norms": linear_norms,
    "ghost.linear_integer_norm": linear_sum_error,
}

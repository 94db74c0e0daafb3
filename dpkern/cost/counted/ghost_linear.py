"""Linear layers and the matrix product, counted.

Norms are computed in float64 with their rounding bound, as the references do, by the route that the
CPU's kernels take (``ops.ghost.linear.norm_route``). A Gram bound that is loose because a sample's
positions cancel stays loose here; the kernels do such samples again.
"""

from __future__ import annotations

import torch

from ...ops.ghost import linear
from ._layers import address, run
from ._tally import Kernel, Tally

_ROUTES = {"rank_one": 0, "gram": 1, "direct": 2}


def _linear_norm(
    a: torch.Tensor, g: torch.Tensor, *, route: str = "auto"
) -> tuple[torch.Tensor, Tally]:
    squares = torch.empty(len(a), dtype=torch.float64)
    code = _ROUTES[linear.norm_route(a, g, route)]
    return squares, run("linear_norm", a.dtype, a, g, *a.shape, g.shape[2], code, squares)


def _linear_gradient(
    a: torch.Tensor, g: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor], Tally]:
    grads = torch.empty(len(a), g.shape[2], a.shape[2], dtype=a.dtype)
    squares = torch.empty(len(a), dtype=torch.float64)
    tally = run("linear_gradient", a.dtype, a, g, *a.shape, g.shape[2], grads, squares)
    return (grads, squares), tally


def _linear_sum(
    a: torch.Tensor, g: torch.Tensor, factors: torch.Tensor, out: torch.Tensor
) -> tuple[None, Tally]:
    return None, run("linear_sum", a.dtype, a, g, *a.shape, g.shape[2], factors, out)


def _matmul(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, Tally]:
    out = x.new_empty(x.shape[0], w.shape[1], requires_grad=False)
    sizes = *x.shape, w.shape[1], not w.is_contiguous()
    return out, run("matmul", x.dtype, x, w, address(bias), *sizes, out)


KERNELS: dict[str, Kernel] = {
    "ghost.linear_norm": _linear_norm,
    "ghost.linear_gradient": _linear_gradient,
    "ghost.linear_sum": _linear_sum,
    "product.matmul": _matmul,
}

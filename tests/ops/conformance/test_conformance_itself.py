"""The suite can fail: kernels that are wrong in one way each are found, and by the right look."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dpkern.base import dispatch
from dpkern.base.dispatch import OPS
from dpkern.bench.cases import FACTS
from tests.ops.conformance.calls import cases
from tests.ops.conformance.check import check_samples, conform

norm, total = OPS["ghost.linear_norm"].reference, OPS["ghost.linear_sum"].reference
draws = OPS["noise.lattice_draws"].reference


def _half(a: Any, g: Any) -> Any:
    squares = norm(a, g)
    squares[-1:] *= 0.5
    return squares


def _unseen_sum(a: Any, g: Any, factors: Any, out: Any) -> None:
    kept = out.clone()
    total(a, g, factors, kept)
    out.data.copy_(kept)


def _scaling_sum(a: Any, g: Any, factors: Any, out: Any) -> None:
    total(a, g, factors, out)
    factors.data.mul_(0.5)


def _swapped_draws(stream: Any, **given: Any) -> Any:
    return draws(stream, **given).flip(0)


WRONG: dict[str, tuple[str, Callable[..., Any], str]] = {
    "dtype": ("ghost.linear_norm", lambda a, g, *, route: norm(a, g).float(), "is torch.float32"),
    "shape": ("ghost.linear_norm", lambda a, g, *, route: norm(a, g)[:, None], "has shape"),
    "value": ("ghost.linear_norm", lambda a, g, *, route: norm(a, g) * 1.01, "differs by"),
    "one value": ("ghost.linear_norm", lambda a, g, *, route: _half(a, g), "differs by"),
    "history": ("ghost.linear_norm", lambda a, g, *, route: (a.sum() * 0) + norm(a, g), "gradient"),
    "nothing written": ("ghost.linear_sum", lambda a, g, factors, out: None, "autograd does not"),
    "written unseen": ("ghost.linear_sum", _unseen_sum, "autograd does not see that out"),
    "an input written": ("ghost.linear_sum", _scaling_sum, "factors is changed"),
    "an input returned": (
        "ghost.embedding_norm",
        lambda ids, g, **_: g.detach()[:, 0, 0],
        "shares memory",
    ),
    "bits": ("noise.lattice_draws", _swapped_draws, "other bits"),
}


def _run(name: str, kernel: Callable[..., Any], look: Callable[[Any, str], Any]) -> None:
    with dispatch.replaced("cupy", [(name, kernel, None)]):
        for case in cases(OPS[name], FACTS[name]):
            look(case, "cupy")


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_kernel_is_found(wrong: str) -> None:
    name, kernel, says = WRONG[wrong]
    with pytest.raises((AssertionError, RuntimeError, ValueError), match=says):
        _run(name, kernel, conform)


def test_a_kernel_that_mixes_samples_is_found() -> None:
    def mixing(a: Any, g: Any, *, route: str) -> Any:
        squares = norm(a, g)
        return squares + 0 * squares.sum()

    _run("ghost.linear_norm", mixing, conform)
    with pytest.raises(AssertionError, match="of another sample"):
        _run("ghost.linear_norm", mixing, check_samples)


def test_a_kernel_that_multiplies_by_zero_is_found() -> None:
    def multiplying(a: Any, g: Any, factors: Any, out: Any) -> None:
        out.add_(torch.einsum("btp,btd,b->pd", g.to(out), a.to(out), factors))

    with pytest.raises(AssertionError, match="of factor 0"):
        _run("ghost.linear_sum", multiplying, check_samples)


def test_a_kernel_that_hides_nan_is_found() -> None:
    def hiding(a: Any, g: Any, *, route: str) -> Any:
        return norm(a, g).nan_to_num(0, 0, 0)

    with pytest.raises(AssertionError, match="by no means"):
        _run("ghost.linear_norm", hiding, check_samples)

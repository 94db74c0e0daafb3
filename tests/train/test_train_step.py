"""One training step of every preset against a loop over its rows."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpkern.engine.exact_sums import factoring_error
from dpkern.ops.clip import ClipResult
from dpkern.train import MODELS, Session
from dpkern.train.options import CLIPPINGS
from tests.train.test_train import arrays


def one_step(tmp_path: Path, **given: Any) -> Session:
    """A run of one step on all of its 48 rows, images of 4 x 4 pixels, in parts of 20."""
    x, y = arrays(features=16)
    np.savez(tmp_path / "images.npz", x=x, y=y)
    common = {
        "data": str(tmp_path / "images.npz"),
        "out": tmp_path / "out",
        "figure": False,
        "optimizer": "sgd",
        "lr": 1.0,
        "epochs": 1,
        "batch_size": 48,
        "sampling": "fixed",
        "max_physical_batch_size": 20,
    }
    return Session(common | given)


def gradients_in_a_loop(session: Session) -> tuple[list[str], list[list[torch.Tensor]]]:
    """Names of the parameters, and their gradients for one training row after the other."""
    model = copy.deepcopy(session.training.model).double()
    named = dict(model.named_parameters())
    data = session.data
    rows = []
    for x, y in zip(data.x_train.double(), data.y_train, strict=True):
        loss = torch.nn.functional.cross_entropy(model(x[None]), y[None])
        rows.append(list(torch.autograd.grad(loss, list(named.values()))))
    return list(named), rows


def assert_sums_equal(got: list[torch.Tensor], rows: list[list[torch.Tensor]]) -> None:
    for mine, *theirs in zip(got, *rows, strict=True):
        want = torch.stack(theirs).sum(0)
        torch.testing.assert_close(
            mine.double(), want, rtol=1e-4, atol=1e-4 * float(want.abs().max())
        )


@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("model", MODELS)
def test_a_step_moves_by_the_clipped_sum(model: str, clipping: str, tmp_path: Path) -> None:
    bound = 0.5
    session = one_step(
        tmp_path, model=model, clipping=clipping, max_grad_norm=bound, noise_multiplier=0.0
    )
    names, rows = gradients_in_a_loop(session)
    labels = {
        "per_layer": names,
        "group": [name.rpartition(".")[0] for name in names],
    }.get(clipping, ["all"] * len(names))
    for gradients in rows:
        for label in set(labels):
            members = [g for g, mine in zip(gradients, labels, strict=True) if mine == label]
            norm = float(torch.cat([g.flatten() for g in members]).norm())
            aim = bound / math.sqrt(len(set(labels)))
            factor = aim / (norm + 0.01) if clipping == "automatic" else min(1.0, aim / norm)
            for g in members:
                g.mul_(factor)
    before = [p.detach().clone() for p in session.training.model.parameters()]
    session.training.run()
    after = [p.detach() for p in session.training.model.parameters()]
    assert_sums_equal([48 * (b - a) for b, a in zip(before, after, strict=True)], rows)


@pytest.mark.parametrize("model", MODELS)
def test_exact_arithmetic_gets_every_rows_gradient(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = 0.5
    session = one_step(tmp_path, model=model, noise_multiplier=1.0, max_grad_norm=bound)
    _, rows = gradients_in_a_loop(session)
    norms = [float(torch.cat([g.flatten() for g in row]).norm()) for row in rows]
    step, seen = session.training.step, []
    add, found, units = step.add, [], []

    def watched(*, sum: ClipResult) -> None:
        assert len(sum.norms) <= 20
        assert sum.unit is not None
        assert max(sum.unit) < 1e-5 * bound
        units.extend(sum.unit)
        seen.append([part * unit for part, unit in zip(sum.sums, sum.unit, strict=True)])
        found.extend(sum.norms.tolist())
        add(sum=sum)

    monkeypatch.setattr(step, "add", watched)
    session.training.run()
    assert len(seen) == 3
    assert sorted(found) == pytest.approx(sorted(norms), rel=1e-4)
    for gradients, norm in zip(rows, norms, strict=True):
        for g in gradients:
            g.mul_(min(1.0, bound / norm))
    got = [torch.stack(parts).sum(0) for parts in zip(*seen, strict=True)]
    # Every row's part of a sum is whole numbers of units, or a product of two vectors of them.
    for i, (mine, *theirs) in enumerate(zip(got, *rows, strict=True)):
        want = torch.stack(theirs).sum(0)
        allowed = 1e-4 * float(want.norm()) + len(rows) * max(units) * want.numel() ** 0.5
        if want.dim() == 2:
            allowed += factoring_error(step.plan, i, want.numel(), len(rows))
        off = float((mine.double() - want).norm())
        assert off <= allowed < 0.25 * bound, f"sum {i} is off by {off:.2g}"

"""dpkern reproduce spectral: formulas against their digits, and the norms of a tiny network."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dpkern.ops import update
from dpkern.papers import ItemRequest, reproduce, spectral
from dpkern.papers.runner import RunSetting
from dpkern.train import data

pytestmark = pytest.mark.slow

QUICK = ItemRequest(quick=True)


def test_keep() -> None:
    """A kernel entry has variance K/N, as claimed of a whole map; directions differ by far."""
    rows = {(row.setting, row.quantity): row for row in reproduce("spectral", "keep", QUICK).rows}
    where = "5x5 on 14, keep 0.5: 101 of 196 frequencies"
    entry = rows[where, "variance of a kernel entry / unfiltered"]
    assert entry.ours == pytest.approx(entry.published, rel=1e-9)
    roughest = rows[where, "variance in the roughest direction / unfiltered"].ours
    assert roughest == pytest.approx(1.5e-3, rel=0.1)
    multipliers = {row.ours for (_, q), row in rows.items() if q == "certified multiplier / sigma"}
    assert list(multipliers) == pytest.approx([0.5**0.5] * len(multipliers))


def test_quirks() -> None:
    found = [
        row.ours
        for row in reproduce("spectral", "quirks", QUICK).rows
        if row.quantity == "certified multiplier / sigma"
    ]
    assert found == pytest.approx([0.7765, 0.5227, 0, 0.5, 500**-0.5], abs=6e-5)


@pytest.mark.usefixtures("one_thread")
def test_whitened_norms_are_near_the_gradient_and_spectra_are_not() -> None:
    digits = data.load("digits28")
    few = replace(digits, x_train=digits.x_train[:64], y_train=digits.y_train[:64])
    where = RunSetting(
        data=few,
        model=lambda seed: spectral.network(seed, few.row_shape, few.classes),
        epochs=1,
        batch_size=32,
        rule=update.SGD(lr=0.1),
    )
    sites = spectral.survey(where.model(0), torch.zeros(2, *few.row_shape))
    medians = [row.ours for row in spectral._norms(where, sites, 1)]
    full, kept, whitened = (medians[i::3] for i in range(3))
    for values in zip(whitened, kept, full, strict=True):
        assert sorted(values) == list(values)  # type: ignore[type-var]
        assert values[2] > 1.5 * values[0]  # type: ignore[operator]

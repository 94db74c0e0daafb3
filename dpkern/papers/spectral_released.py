"""Item of Spectral-DP in three columns: as printed, as its published code runs it, corrected.

The code differs from the text in five places, each one a row with its own column:

- bound: a layer of n is clipped to C / sqrt(n), with n = 8 for the perceptron of 4 layers;
- units: gradients of the batch's mean are clipped, so that C acts as B C on a sample's gradient;
- noise: one draw of sigma C / B for each sample, so that a sum has sd sigma C / sqrt(B);
- filter: all but the last of the bins that are not kept are zeroed; the last one has no noise;
- real part: taken without a word, which halves the noise.

Runs have one network, one sigma and one rate; a column is a mechanism. The authors' network for
MNIST has 6, 16 and 128 maps on images of 32 x 32; ours is the LeNet-5 that GReDP prints.

Source: Feng et al., Spectral-DP, 2023, and cfeng6/Spectral-DP, commit 3408303.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from ..engine.demo import models
from ..engine.survey import survey
from ..ops import update
from ..privacy import accounting
from ..privacy.accounting import shown_bound
from ..privacy.mechanisms import DPSGD, Site, SpectralDP
from . import runner
from .result import ComparisonRow, Panel, Paper, Result
from .runner import ItemRequest, RunSetting
from .seeded import (
    WITHOUT_PRIVACY,
    Control,
    SeededCell,
    SeededRuns,
    over,
    train,
    with_controls,
)
from .verdict import Verdict, exact, of_epsilon

EPSILON, DELTA = 2.0, 1e-5
EPOCHS, BATCH, LEARNING_RATE, CLIP = 30, 500, 0.001, 0.5
"""The released script for convolutions on MNIST."""
QUICK_EPOCHS, QUICK_BATCH, QUICK_ROWS, QUICK_RATE = 6, 60, 720, 0.05
"""Few steps need a larger rate."""
MOMENTUM = 0.9
NETWORK = "gredp-lenet5-16"
PRINTED, RELEASED, CORRECTED = "printed", "released code", "corrected"
CONTROL = "without privacy"
COLUMNS = (PRINTED, RELEASED, CORRECTED)
PERCEPTRON = 8 / 4
"""Layers that the released script for the perceptron divides by, over those that it has."""
PAPER = Paper("spectral", settings={"delta": DELTA, "epsilon": EPSILON})

NOTES = (
    "one network, sigma, rate and bound for all columns; sigma is DP-SGD's at the claimed epsilon, "
    "which is how the released code finds it",
    "released code: gradients of the mean loss are clipped, so that the bound acts as B C on a "
    "sample's gradient; the sum gets noise of sd sigma C / sqrt(B) in the same units",
    "infinite: the last bin of every convolution is released without noise (S6.3)",
    "the released script has Poisson batches and Nesterov's momentum; here its batches have a "
    "fixed size, which the noise of each sample is certified for, and momentum is the usual one",
    *runner.SEEDED,
)


def released(request: ItemRequest) -> Result:
    """Train the three columns at one sigma, and count what each certifies."""
    where = _setting(request)
    epsilon, clip = request.one_epsilon(EPSILON), request.max_grad_norm or CLIP
    sites = tuple(survey(where.model(0), torch.zeros(2, *where.data.row_shape)))
    sigma = accounting.calibrate(
        DPSGD(noise_multiplier=1.0, max_grad_norm=1.0, mode="published"),
        target_epsilon=epsilon,
        **where.accounting(),
    ).noise_multiplier
    made = columns(sigma, where.batch_size, sites, clip=clip)
    cells = [
        SeededCell(
            label=name,
            setting=_of_column(where, name, quick=request.quick),
            mechanism=mechanism,
            about={"paper": "spectral released", "model": NETWORK},
        )
        for name, mechanism in (made | {CONTROL: WITHOUT_PRIVACY}).items()
    ]
    *private, free = train(request, cells, request.repeats(1))
    found = dict(zip(made, private, strict=True))
    rows = [
        runs.row("released", f"{name}, sigma {sigma:.4g}", epsilon_claimed=epsilon)
        for name, runs in found.items()
    ]
    rows += _differences(where.batch_size, len(sites))
    curves = [runs.curve(name) for name, runs in found.items()]
    last = [
        replace(over(name, [float(place)], [runs]), points=True)
        for place, (name, runs) in enumerate(found.items(), start=1)
    ]
    panels = [
        Panel(title="over epochs", x_label="epoch", y_label="accuracy %", lines=curves),
        Panel(title="after the last epoch", y_label="accuracy %", lines=last, names=COLUMNS),
    ]
    result = PAPER.result(
        "released",
        "printed, released, corrected",
        rows,
        panels,
        NOTES,
        quick=request.quick,
        sigma=sigma,
        batch=where.batch_size,
        epochs=where.epochs,
        rule=repr(where.rule),
        clip=clip,
        epsilon=epsilon,
        delta=where.delta,
    )
    result = with_controls(result, [Control(ours=free.found.mean)])
    return result.judged(_verdicts(where, found, epsilon))


def _of_column(where: RunSetting, name: str, *, quick: bool) -> RunSetting:
    if name == RELEASED:
        # The noise of a step is known only where every step has as many samples.
        return replace(where, sampling="fixed")
    # The few steps of quick runs need a rate that gradients of no bound cannot take.
    return replace(where, rule=update.Adam(lr=0.01)) if quick and name == CONTROL else where


def columns(
    sigma: float, batch: int, sites: tuple[Site, ...], *, clip: float = CLIP
) -> dict[str, SpectralDP]:
    """Return the mechanism of every column, at one multiplier and bound."""
    same: dict[str, Any] = {"noise_multiplier": sigma, "max_grad_norm": clip, "sites": sites}
    return {
        PRINTED: SpectralDP(**same, mode="published", allow_time_domain=True),
        RELEASED: SpectralDP.as_coded(sigma, clip, batch, sites=sites, allow_time_domain=True),
        CORRECTED: SpectralDP(**same, mode="corrected", allow_time_domain=True),
    }


def _setting(request: ItemRequest) -> RunSetting:
    quick = request.quick or request.root("mnist") is None
    data = request.dataset(
        "digits28", rows=request.rows or (QUICK_ROWS if request.quick else None), kind="mnist"
    )
    return RunSetting(
        data=data,
        model=lambda seed: models.build(
            NETWORK,
            row_shape=data.row_shape,
            classes=data.classes,
            linear="circulant",
            init_seed=seed,
        ),
        epochs=request.epochs or (QUICK_EPOCHS if request.quick else EPOCHS),
        batch_size=min(request.batch_size or (QUICK_BATCH if quick else BATCH), len(data.x_train)),
        rule=update.SGD(
            lr=request.lr or (QUICK_RATE if quick else LEARNING_RATE),
            momentum=request.number("momentum", MOMENTUM),
        ),
        delta=request.delta or DELTA,
    )


def _differences(batch: int, layers: int) -> list[ComparisonRow]:
    """Return the five places where the code differs, a row for each column."""
    root = math.sqrt(batch)
    places = (
        ("bound of all layers together / C", (math.sqrt(layers), 1.0, 1.0), ""),
        (
            "bound of all layers together / C, perceptron of 4 layers",
            (2.0, math.sqrt(1 / PERCEPTRON), 1.0),
            "the script divides by the root of 8",
        ),
        ("gradient at which the clip begins / C", (1.0, float(batch), 1.0), "S6.5"),
        ("sd of the noise of a sum / (sigma times its bound)", (1.0, 1 / root, 1.0), "G4, S6.5"),
        ("bins that are kept without noise, of each axis", (0.0, 1.0, 0.0), "S6.3"),
        ("noise variance that the real part keeps", (0.5, 0.5, 1.0), "G2"),
    )
    return [
        ComparisonRow(item="released", setting=name, quantity=what, ours=value, note=note)
        for what, values, note in places
        for name, value in zip(COLUMNS, values, strict=True)
    ]


def _verdicts(where: RunSetting, found: dict[str, SeededRuns], epsilon: float) -> list[Verdict]:
    reasons = {
        PRINTED: "G2, G3: half of circular noise falls on the imaginary part, and every layer is "
        "clipped to C by itself",
        RELEASED: "S6.3, S6.5: bins without noise, and noise of sigma C / sqrt(B) for a bound of C",
    }
    root = where.batch_size**-0.5
    return [
        *(
            of_epsilon(
                f"{name}: the run spends epsilon {shown_bound(epsilon)}",
                epsilon,
                found[name].certified,
                reason,
            )
            for name, reason in reasons.items()
        ),
        exact(
            "the released code adds the noise of the sigma that its accountant gave",
            False,
            unit=f"sd of the noise of a sum / (sigma times its bound), batch {where.batch_size}",
            published=1.0,
            ours=root,
            reason="S6.5: a draw of sigma C / B for each of B samples, beside a bound of C",
        ),
    ]


__all__ = ["columns", "released"]

"""Items of Spectral-DP: the kept share, the published code, and the norm to clip.

No table that we know prints these numbers: "published" is the text's claim about a setting, a
variance of K/N or a certificate of sigma.

Source: Feng et al., Spectral-DP, 2023, as GReDP describes it, and its published code.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..engine.survey import survey
from ..ops import ghost, spectral, update
from ..ops.spectral import Band, pencil
from ..privacy import accounting
from ..privacy.mechanisms import DPSGD, Site, SpectralDP, WhitenedCrop
from ..privacy.mechanisms.base import Mechanism
from . import runner
from .result import ComparisonRow, Line, Panel, Paper, Result
from .runner import ItemRequest, RunSetting
from .seeded import WITHOUT_PRIVACY, Control, SeededCell, train, with_controls
from .verdict import TOO_QUICK, Verdict, exact, of_order

SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)
LAYERS = {"3x3 on 34": (34, 3), "5x5 on 14": (14, 5)}
CIRCULAR = math.sqrt(0.5)
EPSILON, DELTA = 3.0, 1e-5
PAPER = Paper("spectral", settings={"delta": DELTA, "epsilon": EPSILON})
SAMPLES = 64
"""Samples whose norms are compared."""


def keep(request: ItemRequest) -> Result:
    """Compute the noise on a released kernel over the kept share of frequencies (circular)."""
    rows, panels = [], []
    for name, (size, taps) in LAYERS.items():
        curves: dict[str, list[float]] = {"claimed K/N": [], "an entry": [], "smoothest": []}
        curves["roughest"] = []
        for share in SHARES:
            band = Band((size, size), "all" if share == 1 else "shells", share)
            law = pencil(band, (taps, taps), (1, 1), 1.0, 1.0)
            spread = np.linalg.eigvalsh(law.post @ law.post.T)
            entry = float(np.trace(law.post @ law.post.T)) / taps**2
            found = (band.count / size**2, entry, float(spread[-1]), float(max(0.0, spread[0])))
            for values, value in zip(curves.values(), found, strict=True):
                values.append(value)
            what = f"{name}, keep {share:g}: {band.count} of {size * size} frequencies"
            for quantity, printed, ours in (
                ("variance of a kernel entry / unfiltered", found[0], entry),
                ("variance in the roughest direction / unfiltered", None, found[3]),
                ("variance in the smoothest direction / unfiltered", None, found[2]),
            ):
                rows.append(
                    ComparisonRow(
                        item="keep", setting=what, quantity=quantity, published=printed, ours=ours
                    )
                )
            halved = pencil(band, (taps, taps), (1, 1), CIRCULAR, CIRCULAR)
            rows.append(
                ComparisonRow(
                    item="keep",
                    setting=what,
                    quantity="certified multiplier / sigma",
                    published=1.0,
                    ours=halved.multiplier,
                    note="G2: a public filter changes no guarantee; circular noise is weaker",
                )
            )
        lines = [Line(label=label, x=SHARES, y=values) for label, values in curves.items()]
        panels.append(Panel(title=name, x_label="share kept", y_label="variance", lines=lines))
    result = PAPER.result("keep", "noise that a filter leaves", rows, panels, quick=request.quick)
    return result.judged(_of_keep(rows))


def _of_keep(rows: Sequence[ComparisonRow]) -> list[Verdict]:
    """Judge the printed variance of K/N and the certificate of sigma, at half of the bins."""
    verdicts = []
    for row in rows:
        if "keep 0.5" not in row.setting or row.published is None:
            continue
        printed, ours = float(row.published), float(row.ours or 0.0)
        verdicts.append(
            exact(
                f"{row.setting.split(':')[0]}: {row.quantity} is {printed:.3g}",
                abs(ours - printed) <= 0.005 * printed,
                unit=row.quantity,
                published=printed,
                ours=ours,
                reason="G2: half of circular noise falls on the imaginary part" if row.note else "",
            )
        )
    return verdicts


def quirks(request: ItemRequest) -> Result:
    """Compute what the published code certifies, layer by layer of LeNet-5, in shares of sigma."""
    batch, sigma = 500, 40.0
    once: dict[str, Any] = {
        "gradient_units": "sum",
        "batch_size": None,
        "noise_point": "per_batch",
    }
    other = Site(kind="other", shape=(10,))
    circulant = Site(kind="circulant", shape=(1, 1, 8), input=(1,), output=(1,))
    layers = {
        "convolution 1, 5x5 on 32": (_conv(6, 1, 32), "S6.3", once),
        "convolution 2, 5x5 on 14": (_conv(16, 6, 14), "S6.3", once),
        "convolution 3, 5x5 on 5": (_conv(120, 16, 5), "S6.3", once),
        "block-circulant layer, block 8": (circulant, "S6.4", once),
        f"noise per sample, batch of {batch}, before the mask": (other, "S6.5", {}),
    }
    rows = []
    for name, (site, note, changes) in layers.items():
        dense = {"allow_time_domain": site is other}
        coded = SpectralDP.as_coded(sigma, 1.0, batch, sites=(site,), **dense)
        plan = replace(coded, **changes).plan([site.shape])
        rows.append(
            ComparisonRow(
                item="quirks",
                setting=name,
                quantity="certified multiplier / sigma",
                published=1.0,
                ours=plan.noise_multiplier / sigma,
                note=next((str(n) for n in plan.notes if n.id == note), note),
            )
        )
        if isinstance(plan.blocks[0].release, WhitenedCrop) and site.kind == "conv":
            band = coded.band(plan.blocks[0].release.size or ())
            rows.append(
                ComparisonRow(
                    item="quirks",
                    setting=name,
                    quantity="share of frequencies kept",
                    published=0.5,
                    ours=band.count / math.prod(band.size),
                    note=next(str(n) for n in plan.notes if n.id == "S6.2"),
                )
            )
    result = PAPER.result("quirks", "the published code, layer by layer", rows, quick=request.quick)
    return result.judged(
        [
            exact(
                f"{row.setting}: {row.quantity} is {row.published:g}",
                abs(float(row.ours or 0.0) - float(row.published)) <= 0.005,
                unit=row.quantity,
                published=float(row.published),
                ours=float(row.ours or 0.0),
                reason=row.note,
            )
            for row in rows
            if isinstance(row.published, float)
        ]
    )


def whitened(request: ItemRequest) -> Result:
    """Compare norms to clip: medians over a trained network's samples, accuracy at one epsilon."""
    data = request.dataset("digits28", rows=720)
    epochs = request.epochs or (3 if request.quick else 20)
    where = RunSetting(
        data=data,
        model=lambda seed: network(seed, data.row_shape, data.classes),
        epochs=epochs,
        batch_size=min(request.batch_size or 128, len(data.x_train)),
        rule=update.SGD(lr=request.lr or 0.25, momentum=0.9),
        delta=request.delta or DELTA,
    )
    sites = survey(where.model(0), torch.zeros(2, *data.row_shape))
    sigma = accounting.calibrate(
        DPSGD(noise_multiplier=1.0, max_grad_norm=1.0, arithmetic="float"),
        target_epsilon=request.one_epsilon(EPSILON),
        **where.accounting(),
    ).noise_multiplier
    fields: dict[str, Any] = {"noise_multiplier": sigma, "max_grad_norm": 1.0}
    fields["arithmetic"] = "float"
    made: dict[str, Mechanism] = {
        "DP-SGD": DPSGD(**fields),
        "Spectral-DP, whitened clip": SpectralDP(**fields, sites=sites),
        "Spectral-DP, spectrum clip": SpectralDP(**fields, sites=sites, clip_domain="spectrum"),
    }
    cells = [
        SeededCell(
            label=name,
            setting=where,
            mechanism=mechanism,
            about={"paper": "spectral", "model": "whitened"},
        )
        for name, mechanism in made.items()
    ]
    free = replace(cells[0], label="without privacy", mechanism=WITHOUT_PRIVACY)
    *found, control = train(request, [*cells, free], request.repeats(1 if request.quick else 5))
    rows = _norms(where, sites, epochs)
    rows += [
        runs.row("whitened", f"{name}, bound 1 over all layers, sigma {sigma:.4g}")
        for name, runs in zip(made, found, strict=True)
    ]
    result = PAPER.result(
        "whitened", "clip norms of a filtered layer", rows, (), runner.SEEDED, quick=request.quick
    )
    usual = found[0]
    return with_controls(result, [Control(ours=control.found.mean)]).judged(
        [
            of_order(
                f"{name} is more accurate than DP-SGD at equal certified epsilon",
                runs.last,
                usual.last,
                unit="points held out, mean over the seeds",
                hindrance=TOO_QUICK * request.quick or runs.spoiled or usual.spoiled,
            )
            for name, runs in zip(list(made)[1:], found[1:], strict=True)
        ]
    )


def network(seed: int, row_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build convolutions of 3x3 at full and half resolution and of 5x5, then one linear layer."""
    torch.manual_seed(seed)
    channels, height, width = row_shape
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(16, 16, 5, padding=2),
        nn.Tanh(),
        nn.AvgPool2d(4),
        nn.Flatten(),
        nn.Linear(16 * (height // 8) * (width // 8), classes),
    )


def _norms(where: RunSetting, sites: Sequence[Site], epochs: int) -> list[ComparisonRow]:
    """Return medians of full, kept and whitened norm over the norm of the kernel's gradient."""
    data, model = where.data, where.model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        order = torch.randperm(len(data.x_train), generator=generator)
        for rows in torch.split(order, 64):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(data.x_train[rows]), data.y_train[rows])
            torch.autograd.backward(loss)
            optimizer.step()
    mechanism = SpectralDP(noise_multiplier=1.0, max_grad_norm=1.0, sites=tuple(sites))
    blocks = mechanism.plan([site.shape for site in sites]).blocks
    convolutions = [block.release for block in blocks if isinstance(block.release, WhitenedCrop)]
    found = []
    for release, (x, g) in zip(convolutions, _operands(where, model), strict=True):
        site = release.site
        what = f"{'x'.join(map(str, site.kernel))} on {site.input[0]}, {site.shape[0]} channels"
        for norm, ratio in _ratios(release, x, g).items():
            found.append(
                ComparisonRow(
                    item="whitened",
                    setting=f"{what}, {norm}",
                    quantity="median of norm / norm of the kernel's gradient",
                    ours=statistics.median(ratio.tolist()),
                    data=data.source,
                )
            )
    return found


def _operands(where: RunSetting, model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Return input and output gradient of every convolution, for the first samples."""
    seen: list[tuple[Tensor, Tensor]] = []
    handles = [
        module.register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
        for module in model.modules()
        if isinstance(module, nn.Conv2d)
    ]
    x, y = where.data.x_train[:SAMPLES], where.data.y_train[:SAMPLES]
    loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
    for handle in handles:
        handle.remove()
    grads = torch.autograd.grad(loss, [out for _, out in seen])
    return [(x.detach(), g) for (x, _), g in zip(seen, grads, strict=True)]


def _ratios(release: WhitenedCrop, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    """Return norms per sample: of the spectrum, its kept part and the whitened coordinates."""
    site, band = release.site, release.band
    assert isinstance(band, Band)
    assert release.signal is not None
    geometry: dict[str, Any] = {
        "kernel_size": site.kernel,
        "stride": site.stride,
        "padding": site.padding,
        "dilation": site.dilation,
        "groups": site.groups,
    }
    x, g = x.contiguous(), g.contiguous()
    plain = ghost.conv_norm(x, g, **geometry)
    wide = spectral.filtered(x, padding=site.padding, rows=site.least, band=band)
    low, _ = ghost.conv_gradient(wide, g, **{**geometry, "padding": (0,) * len(site.kernel)})
    rows = release.forward(low.reshape(-1, *site.shape))
    squares = {
        "full spectrum": spectral.conv_norm(x, g, **geometry, size=band.size),
        "kept part": spectral.conv_norm(x, g, **geometry, size=band.size, band=band),
        "whitened": rows.flatten(1).square().sum(1),
    }
    return {name: (square / plain).sqrt() for name, square in squares.items()}


def _conv(out: int, channels: int, size: int) -> Site:
    """Return the site of a 5x5 convolution without padding."""
    return Site(
        kind="conv",
        shape=(out, channels, 5, 5),
        input=(size, size),
        output=(size - 4, size - 4),
        stride=(1, 1),
        padding=(0, 0),
        dilation=(1, 1),
    )

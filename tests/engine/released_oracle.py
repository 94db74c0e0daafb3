"""What a step in front of releases must give, every sample alone: norms and sums by definition."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import dpkern
from dpkern.engine.capture import Capture
from dpkern.engine.clipping import clipped_sums, prepare
from dpkern.nn import BlockCirculantLinear, SpectralConv2d
from dpkern.ops import clip
from dpkern.ops.spectral import Band
from dpkern.privacy.accounting import events
from dpkern.privacy.mechanisms.plan import Block, Plan, assign_positions
from dpkern.privacy.mechanisms.release import DiagonalMap, PartialNoiseMap, ReleaseMap, WhitenedCrop
from dpkern.privacy.mechanisms.site import Site
from tests.engine.engine_oracle import (
    TOLERANCE,
    cast,
    draw,
    make,
    reference_gradients,
    sample_losses,
)

B = 5


def plan_of(
    model: nn.Module,
    releases: Sequence[ReleaseMap | None],
    *,
    bound: float = 1.0,
    per_layer: bool = False,
    **options: Any,
) -> Plan:
    shapes = [tuple(p.shape) for p in model.parameters()]
    blocks = [
        Block(
            shape=shape,
            clip_group=i if per_layer else 0,
            bound=bound,
            noise_scale=0.1,
            release=release,
        )
        for i, (shape, release) in enumerate(zip(shapes, releases, strict=True))
    ]
    given: dict[str, Any] = {
        "mechanism": "test",
        "mode": "corrected",
        "blocks": assign_positions(blocks),
        "clipping": "per_layer" if per_layer else "flat",
        "arithmetic": "float",
        "distribution": "gaussian",
        "neighbouring": "add_remove",
        "certified_for": "",
        "spec": events.gaussian(1.0),
    }
    return Plan(**{**given, **options})


def released(
    model: nn.Module,
    inputs: Sequence[Tensor],
    plan: Plan,
    *,
    reduction: str = "sum",
    keep_budget: float = 0.25,
) -> Any:
    """One step of the engine."""
    capture = Capture(model, loss_reduction=reduction, keep_budget=keep_budget)
    prepare(capture, lambda: plan)
    capture.attach()
    try:
        losses = sample_losses(model(*inputs))
        (losses.mean() if reduction == "mean" else losses.sum()).backward()
        return clipped_sums(capture, plan)
    finally:
        capture.detach()


def maps_of(model: nn.Module, inputs: Sequence[Tensor], sites: Sequence[Site]) -> list[Tensor]:
    """Per parameter with a site: one sample's correlation map ``[B, O, C, *size]`` in float64."""
    model, inputs = copy.deepcopy(model).double(), cast(inputs, torch.float64)
    owners = dict(zip((n for n, _ in model.named_parameters()), sites, strict=True))
    found: dict[str, list[Tensor]] = {n: [] for n, s in owners.items() if s.kind != "other"}
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    for name in found:

        def note(_: Any, args: Any, out: Tensor, name: str = name) -> None:
            out.retain_grad()
            seen[name] = args[0], out

        model.get_submodule(name.rpartition(".")[0]).register_forward_hook(note)
    for b in range(len(inputs[0])):
        sample_losses(model(*(x[b : b + 1] for x in inputs))).sum().backward()
        for name, (x, out) in seen.items():
            assert out.grad is not None
            found[name].append(one_map(x.detach(), out.grad, owners[name]))
    return [torch.stack(found[n]) if n in found else torch.empty(0) for n in owners]


def one_map(x: Tensor, g: Tensor, site: Site) -> Tensor:
    """``R[o, c](u) = sum_a D[o](a) X[c](u + a)`` on the grid ``GRID[site]``, entry by entry in FFT
    terms: a circular correlation."""
    if site.kind == "circulant":
        p, q, d = site.shape
        blocks = torch.nn.functional.pad(x, (0, q * d - x.shape[-1])).reshape(-1, q, d)
        outs = torch.nn.functional.pad(g, (0, p * d - g.shape[-1])).reshape(-1, p, d)
        shifted = torch.stack([blocks.roll(-u, -1) for u in range(d)], dim=-1)
        return torch.einsum("tpr,tqru->pqu", outs, shifted)
    size, axes = grid(site), list(range(-site.axes, 0))
    pads = [p for n in reversed(site.padding) for p in (n, n)]
    padded = torch.nn.functional.pad(x[0], pads)
    padded = padded[(..., *(slice(n) for n in site.least))]
    spread = g.new_zeros(g.shape[1], *size)
    spread[
        (
            ...,
            *(slice(0, s * (n - 1) + 1, s) for s, n in zip(site.stride, site.output, strict=True)),
        )
    ] = g[0]
    xs = torch.fft.fftn(padded, s=size, dim=axes).unflatten(0, (site.groups, 1, -1))
    ds = torch.fft.fftn(spread, dim=axes).unflatten(0, (site.groups, -1, 1))
    return torch.fft.ifftn(ds.conj() * xs, dim=axes).real.flatten(0, 1)


def grid(site: Site) -> tuple[int, ...]:
    """One smaller than linear, so that negative lags wrap around: their place matters."""
    if site.kind == "circulant":
        return (site.block,)
    return tuple(max(n - 2, least) for n, least in zip(site.linear, site.least, strict=True))


def filtered(maps: Tensor, band: Band | None) -> Tensor:
    if band is None:
        return maps
    axes = list(range(-len(band.size), 0))
    return torch.fft.ifftn(torch.fft.fftn(maps, dim=axes) * torch.tensor(band.gains), dim=axes).real


def taps(maps: Tensor, site: Site) -> Tensor:
    """The entries at the kernel's lags."""
    if site.kind == "circulant":
        return maps
    step = (slice(0, t * (k - 1) + 1, t) for t, k in zip(site.dilation, site.kernel, strict=True))
    return maps[(..., *step)]


def expected(
    release: ReleaseMap | None, grads: Tensor, maps: Tensor, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Squared clip norms ``[B]`` and what is summed ``[B, *shape]``, of one parameter."""
    if release is None:
        return grads.flatten(1).square().sum(1), grads
    if isinstance(release, DiagonalMap):
        centre = 0 if release.centre is None else release.centre.double()
        moved = grads - centre
        bare = release.scale is None or release.norm == "gradient"
        shown = moved if bare else moved / release.scale.double()  # type: ignore[union-attr]
        return shown.flatten(1).square().sum(1), moved
    assert isinstance(release, (WhitenedCrop, PartialNoiseMap))
    band = release.band
    assert band is None or isinstance(band, Band)
    summed = taps(filtered(maps, band), release.site) if band is not None else grads
    clipped = {
        "gradient": grads,
        "spectrum": maps,
        "kept": filtered(maps, band),
        "release": release.forward(summed),
    }[release.norm]
    gain = 1.0 if release.norm == "release" else release.gain
    return clipped.flatten(1).square().sum(1) * gain**2, summed


def compare(
    model: nn.Module,
    inputs: Sequence[Tensor],
    releases: Sequence[ReleaseMap | None],
    sites: Sequence[Site],
    *,
    dtype: torch.dtype = torch.float64,
    per_layer: bool = False,
    **options: Any,
) -> None:
    """Norms and sums of the engine are those of the definitions."""
    model, inputs = model.to(dtype), cast(inputs, dtype)
    grads = reference_gradients(model, inputs)
    each = [
        expected(*three)
        for three in zip(releases, grads, maps_of(model, inputs, sites), strict=True)
    ]
    squares = torch.stack([square for square, _ in each])
    totals = squares if per_layer else squares.sum(0, keepdim=True)
    bound = float(totals.sqrt().median())
    result = released(
        model, inputs, plan_of(model, releases, bound=bound, per_layer=per_layer), **options
    )
    assert isinstance(result, clip.ClipResult)
    tolerance = TOLERANCE[dtype]
    norms = squares.sum(0).sqrt()
    assert ((result.norms - norms).abs() <= tolerance * norms).all()
    factors = (bound * clip.SLACK / totals.sqrt()).clamp(max=1).expand(len(each), -1)
    assert (factors < 1).any()
    assert (factors == 1).any()
    for total, c, (_, summed) in zip(result.sums, factors, each, strict=True):
        wanted = torch.einsum("b,b...->...", c, summed)
        size = float((c.square() * summed.flatten(1).square().sum(1)).sum().sqrt())
        assert float((total.double() - wanted).norm()) <= tolerance * size


def strided() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=(2, 1)),
        nn.Tanh(),
        nn.Conv2d(4, 6, (2, 3), dilation=(1, 2), padding=1, groups=2, bias=False),
        nn.Flatten(),
        nn.Linear(84, 3),
    )


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 5),
        nn.Tanh(),
        nn.AvgPool2d(2),
        SpectralConv2d(3, 4, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        BlockCirculantLinear(64, 10, 8),
        nn.Tanh(),
        nn.Linear(10, 4),
    )


def lines() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 3, 3, padding=1, stride=2),
        nn.Tanh(),
        BlockCirculantLinear(5, 6, 4, bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(18, 2),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "strided, grouped, dilated": (strided, (B, 2, 9, 8)),
    "lenet": (lenet, (B, 1, 12, 12)),
    "one dimension, positions": (lines, (B, 2, 10)),
}


def surveyed(name: str) -> tuple[nn.Module, list[Tensor], tuple[Site, ...]]:
    build, shape = MODELS[name]
    model = make(build)
    return model, [draw(*shape)], dpkern.survey(model, torch.zeros(shape))

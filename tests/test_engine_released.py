"""Sums in front of a release: every sample alone, its whole correlation map, by the definitions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dpkern
from dpkern.accounting import events
from dpkern.engine.capture import Capture
from dpkern.engine.clipping import clipped_sums, prepare
from dpkern.errors import PrivacyError, UnsupportedModule
from dpkern.mechanisms.plan import Block, Importance, Plan, laid_out
from dpkern.mechanisms.release import Crop, Diagonal, Open, Release
from dpkern.mechanisms.site import Site
from dpkern.nn import BlockCirculantLinear, SpectralConv2d
from dpkern.ops import clip
from dpkern.ops.spectral import Band, pencil
from tests.engine_oracle import TOLERANCE, Op, cast, draw, make, per_sample_gradients, sample_losses

B = 5


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The tensors are tiny: threads that wait for each other would take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def plan_of(
    model: nn.Module,
    releases: Sequence[Release | None],
    *,
    bound: float = 1.0,
    per_layer: bool = False,
    **options: Any,
) -> Plan:
    shapes = [tuple(p.shape) for p in model.parameters()]
    blocks = [
        Block(shape=shape, clip_group=i if per_layer else 0, bound=bound, sd=0.1, release=release)
        for i, (shape, release) in enumerate(zip(shapes, releases, strict=True))
    ]
    given: dict[str, Any] = {
        "mechanism": "test",
        "mode": "corrected",
        "blocks": laid_out(blocks),
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
    release: Release | None, grads: Tensor, maps: Tensor, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Squared clip norms ``[B]`` and what is summed ``[B, *shape]``, of one parameter."""
    if release is None:
        return grads.flatten(1).square().sum(1), grads
    if isinstance(release, Diagonal):
        centre = 0 if release.centre is None else release.centre.double()
        moved = grads - centre
        bare = release.scale is None or release.norm == "gradient"
        shown = moved if bare else moved / release.scale.double()  # type: ignore[union-attr]
        return shown.flatten(1).square().sum(1), moved
    assert isinstance(release, (Crop, Open))
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
    releases: Sequence[Release | None],
    sites: Sequence[Site],
    *,
    dtype: torch.dtype = torch.float64,
    per_layer: bool = False,
    **options: Any,
) -> None:
    """Norms and sums of the engine are those of the definitions."""
    model, inputs = model.to(dtype), cast(inputs, dtype)
    grads = per_sample_gradients(model, inputs)
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


def of_site(kind: str, site: Site) -> Release | None:
    """The release of a mechanism of this kind at a site."""
    if site.kind == "other":
        return None
    size = grid(site)
    spread = site.dilation if site.kind == "conv" else (1,)
    some, every = Band(size, "shells", 0.4), Band(size, "all")
    given: dict[str, Any] = {"site": site, "size": size}
    if kind == "spectrum":
        return Crop(**given, norm="spectrum")
    if kind == "spectrum, printed scaling":
        return Crop(**given, norm="spectrum", gain=0.3)
    if kind in ("spectrum, filtered", "kept", "gradient, filtered", "whitened"):
        # real noise: the coordinates are no plain rotation
        made = pencil(some, site.kernel, spread, 1.0, 0.5)
        norm = {"kept": "kept", "whitened": "release"}.get(kind, kind.partition(",")[0])
        return Crop(site=site, band=some, norm=norm, signal=made.signal, post=made.post)
    if kind == "coordinates":
        made = pencil(every, site.kernel, spread, 1.0, 0.0)
        keep = made.lam > 1e-3
        return Crop(site=site, signal=made.signal[keep], post=made.post[:, keep], gain=0.5)
    assert kind == "open"
    return Open(**given, norm="spectrum", noise=np.ones((site.taps, 2)))


KINDS = (
    "spectrum",
    "spectrum, printed scaling",
    "spectrum, filtered",
    "kept",
    "gradient, filtered",
    "whitened",
    "coordinates",
    "open",
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_norms_and_sums_are_those_of_one_sample_at_a_time(name: str, kind: str) -> None:
    model, inputs, sites = surveyed(name)
    compare(model, inputs, [of_site(kind, site) for site in sites], sites)


@pytest.mark.parametrize("kind", ["spectrum", "kept", "whitened"])
def test_also_in_float32_layer_by_layer_with_and_without_kept_gradients(kind: str) -> None:
    for keep_budget in (0.0, 100.0):
        model, inputs, sites = surveyed("lenet")
        releases = [of_site(kind, site) for site in sites]
        options: dict[str, Any] = {"per_layer": True, "keep_budget": keep_budget}
        compare(model, inputs, releases, sites, dtype=torch.float32, **options)
        compare(model, inputs, releases, sites, dtype=torch.float32, keep_budget=keep_budget)


def test_a_mean_loss_changes_nothing() -> None:
    model, inputs, sites = surveyed("strided, grouped, dilated")
    releases = [of_site("whitened", site) for site in sites]
    compare(model, inputs, releases, sites, reduction="mean")


@pytest.mark.parametrize("kind", ["whitened", "coordinates"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_exact_arithmetic_gets_release_coordinates(name: str, kind: str, reduction: str) -> None:
    model, inputs, sites = surveyed(name)
    model, inputs = model.double(), cast(inputs, torch.float64)
    releases = [of_site(kind, site) for site in sites]
    plan = plan_of(model, releases, arithmetic="exact")
    found = released(model, inputs, plan, reduction=reduction)
    grads, maps = per_sample_gradients(model, inputs), maps_of(model, inputs, sites)
    for mine, release, g, m, block in zip(found, releases, grads, maps, plan.blocks, strict=True):
        _, summed = expected(release, g, m)
        wanted = summed if release is None else release.forward(summed)
        assert mine.shape == (B, *block.release_shape)
        assert (mine - wanted).abs().max() <= 1e-10 * wanted.abs().max()


class Mixed(nn.Module):
    """Layers of many kinds, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.line = nn.Conv1d(6, 4, 2)
        self.norm = nn.LayerNorm(4)
        self.blocks = BlockCirculantLinear(4, 4, 4)
        self.head = nn.Linear(12, 3)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, tokens: Tensor) -> Tensor:
        y = self.line(self.table(tokens).transpose(1, 2)).transpose(1, 2)
        return self.head(self.blocks(self.norm(y)).flatten(1))


TOKENS = torch.tensor([[0, 1, 1, 2], [3, 3, 3, 3], [4, 5, 6, 0], [2, 2, 1, 0], [6, 1, 6, 1]])


def diagonal(shape: Sequence[int], number: int, *parts: str, norm: str = "release") -> Diagonal:
    scale = draw(*shape, seed=number).abs() + 0.2 if "scale" in parts else None
    centre = 0.3 * draw(*shape, seed=number + 50) if "centre" in parts else None
    return Diagonal(scale=scale, centre=centre, restore="scale" in parts, norm=norm)


DIAGONALS = [
    pytest.param(("scale",), "release", id="scale"),
    pytest.param(("centre",), "release", id="centre"),
    pytest.param(("scale", "centre"), "release", id="scale and centre"),
    pytest.param(("scale", "centre"), "gradient", id="scale after the clip"),
]


@pytest.mark.parametrize(("parts", "norm"), DIAGONALS)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_scaled_and_centred_gradients(parts: tuple[str, ...], norm: str, reduction: str) -> None:
    model = make(Mixed)
    sites = [Site(kind="other", shape=tuple(p.shape)) for p in model.parameters()]
    releases = [diagonal(p.shape, i, *parts, norm=norm) for i, p in enumerate(model.parameters())]
    for dtype in (torch.float64, torch.float32):
        for per_layer in (False, True):
            compare(
                model, [TOKENS], releases, sites,
                dtype=dtype, per_layer=per_layer, reduction=reduction,
            )  # fmt: skip
    model = model.double()
    found = released(model, [TOKENS], plan_of(model, releases, arithmetic="exact"))
    for mine, release, g in zip(
        found, releases, per_sample_gradients(model, [TOKENS]), strict=True
    ):
        wanted = release.forward(g if release.centre is None else g - release.centre)
        assert (mine - wanted).abs().max() <= 1e-10 * wanted.abs().max()


@pytest.mark.parametrize("per_layer", [False, True])
def test_clipping_by_the_l1_norm(per_layer: bool) -> None:
    for model, inputs in (
        (make(Mixed), [TOKENS]),
        (make(lenet), [draw(B, 1, 12, 12)]),
        (make(strided), [draw(B, 2, 9, 8)]),
        (make(lambda: Op(lambda m, x: x @ m.w[:3].T + (x @ m.w[3:].T).sum(1, keepdim=True),
                         w=(5, 4))), [draw(B, 4)]),
    ):  # fmt: skip
        model = model.double()
        grads = per_sample_gradients(model, inputs)
        each = torch.stack([g.flatten(1).abs().sum(1) for g in grads])
        totals = each if per_layer else each.sum(0, keepdim=True)
        bound = float(totals.median())
        plan = plan_of(model, [None] * len(grads), bound=bound, per_layer=per_layer, p=1)
        result = released(model, cast(inputs, torch.float64), plan)
        assert result.p == 1
        assert result.norm_bound == pytest.approx(bound * (len(grads) if per_layer else 1))
        assert torch.allclose(result.norms, each.sum(0), rtol=1e-10)
        assert (result.norms >= each.sum(0)).all()
        factors = (bound * clip.SLACK / totals).clamp(max=1).expand(len(grads), -1)
        for mine, g, c in zip(result.sums, grads, factors, strict=True):
            assert torch.allclose(mine, torch.einsum("b,b...->...", c, g), atol=1e-10)


def test_raw_sums_stand_beside_the_clipped_ones() -> None:
    model = make(Mixed).double()
    releases = [
        diagonal(p.shape, i, "centre", norm="gradient") for i, p in enumerate(model.parameters())
    ]
    importance = Importance(bound=1.0, sd=1.0)
    plan = plan_of(model, releases, bound=0.1, importance=importance)
    result = released(model, [TOKENS], plan, reduction="mean")
    for raw, g in zip(result.raw, per_sample_gradients(model, [TOKENS]), strict=True):
        assert torch.allclose(raw, g.sum(0), atol=1e-12)
    assert released(model, [TOKENS], plan_of(model, releases)).raw is None


def test_a_sample_that_is_not_finite_is_dropped() -> None:
    model, inputs, sites = surveyed("lenet")
    model = model.double()
    plan = plan_of(model, [of_site("whitened", site) for site in sites])
    clean = released(model, [inputs[0][1:]], plan)
    inputs[0][0, 0, 0, 0] = float("nan")
    result = released(model, inputs, plan)
    assert int(result.nonfinite) == 1
    for mine, theirs in zip(result.sums, clean.sums, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-12)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(2, 2, 3, padding=1, bias=False)
        self.times = 1

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.layer(x))
        return x


@pytest.mark.parametrize("arithmetic", ["float", "exact"])
def test_another_use_than_the_surveyed_one_is_refused(arithmetic: str) -> None:
    model = make(Twice).double()
    x = draw(B, 2, 6, 6)
    sites = dpkern.survey(model, x)
    release = of_site("whitened", sites[0])
    plan = plan_of(model, [release], arithmetic=arithmetic)
    assert released(model, [x], plan) is not None
    with pytest.raises(UnsupportedModule, match=r"layer\.weight.*survey"):
        released(model, [draw(B, 2, 7, 6)], plan)
    model.times = 2
    with pytest.raises(UnsupportedModule, match=r"layer\.weight.*survey"):
        released(model, [x], plan)


def test_a_release_may_not_change_between_backward_and_step() -> None:
    model, inputs, sites = surveyed("lenet")
    plan = plan_of(model, [of_site("whitened", site) for site in sites])
    capture = Capture(model.double(), loss_reduction="sum")
    prepare(capture, lambda: plan)
    capture.attach()
    sample_losses(model(*inputs)).sum().backward()
    same = replace(plan, blocks=tuple(
        block if block.release is None else replace(block, release=of_site("whitened", site))
        for block, site in zip(plan.blocks, sites, strict=True)
    ))  # fmt: skip
    other = plan_of(model, [of_site("kept", site) for site in sites])
    with pytest.raises(PrivacyError, match="another release"):
        clipped_sums(capture, other)
    assert clipped_sums(capture, same) is not None
    capture.detach()


def test_l1_bounds_speak_of_release_coordinates_or_are_refused() -> None:
    model, inputs, sites = surveyed("strided, grouped, dilated")
    model, inputs = model.double(), cast(inputs, torch.float64)
    grads = per_sample_gradients(model, inputs)
    scales = [0.5 + draw(*g.shape[1:]).double().abs() for g in grads]
    found = released(model, inputs, plan_of(model, [Diagonal(scale=s) for s in scales], p=1))
    pairs = zip(grads, scales, strict=True)
    wanted = torch.stack([(g / s).abs().flatten(1).sum(1) for g, s in pairs]).sum(0)
    assert (found.norms - wanted).abs().max() <= 1e-10 * wanted.max()

    centred = [Diagonal(centre=s) for s in scales]
    for releases in ([of_site("spectrum", site) for site in sites], centred):
        with pytest.raises(UnsupportedModule, match="L1"):
            released(model, inputs, plan_of(model, releases, p=1))

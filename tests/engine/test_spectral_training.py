"""Spectral mechanisms in ``make_private``: one step against the literal loop, sample by sample."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpkern
from dpkern.base.errors import InvalidInput
from dpkern.nn import BlockCirculantLinear
from dpkern.ops.spectral import Band, literal
from dpkern.privacy.mechanisms import DPSGD, GReDP, PartialNoiseMap, Site, SpectralDP, WhitenedCrop
from dpkern.privacy.mechanisms._spectral_plan import SpectralMechanism
from tests.engine.engine_run import Run

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH, RATE = 4, 0.1
GENERATOR = torch.Generator()


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(2, 4, 3, stride=2, groups=2),
        nn.Flatten(),
        nn.Tanh(),
        BlockCirculantLinear(36, 8, block=4),
        nn.Tanh(),
        nn.Linear(8, 3),
    ).double()


def examples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(BATCH, 1, 8, 8, generator=generator, dtype=torch.float64)
    return x, torch.arange(BATCH) % 3


SITES = dpkern.survey(network(), torch.zeros(2, 1, 8, 8, dtype=torch.float64))


class Layer:
    """What one sample does to one parameter: its gradient, filtered, and its clip norm."""

    def __init__(self, mechanism: SpectralMechanism, block: Any, site: Site, seen: Any) -> None:
        self.site, self.release = site, block.release
        self.x, self.g = seen
        self.mechanism = mechanism

    def contribution(self, gradient: Tensor) -> tuple[Tensor, float]:
        """What is summed (the filtered gradient) and the square of what is clipped."""
        gain, site = 1.0, self.site
        if site.kind == "other":
            return gradient, float(gradient.square().sum())
        spectrum, low = self._conv() if site.kind == "conv" else self._circulant()
        size = tuple(spectrum.shape[2:])
        if isinstance(self.mechanism, GReDP) and self.mechanism.unitary_scaling == "as_printed":
            gain = float(torch.tensor(size).prod()) ** -0.5
        square = spectrum.abs().square()
        domain = self.mechanism.clip_domain
        if domain == "spectrum":
            clipped = square.sum()
        elif domain == "kept":
            assert isinstance(self.mechanism, SpectralDP)
            clipped = (square * torch.tensor(self.mechanism.band(size).gains)).sum()
        elif domain == "cropped":
            clipped = gradient.square().sum()
            if isinstance(self.mechanism, SpectralDP):
                # The clipped kernel on an empty grid, filtered and cropped.
                low = self.release.to_gradient(self.release.forward(gradient))
        else:
            assert isinstance(self.release, WhitenedCrop)
            # Norm of the released coordinates; ``low`` is what they are led back to.
            given = gradient if site.kind == "circulant" else low
            clipped = self.release.forward(given).square().sum()
        return low * gain, float(clipped) * gain**2

    def _conv(self) -> tuple[Tensor, Tensor]:
        site = self.site
        band = None
        size = site.padded
        if isinstance(self.mechanism, SpectralDP):
            size = self.mechanism._grid(0, site)
            band = self.mechanism.band(size)
        config = literal.Pipeline(
            kernel=site.kernel,
            stride=site.stride,
            padding=site.padding,
            dilation=site.dilation,
            groups=site.groups,
            size=size,
            bound=1e9,
            band=band,
        )
        run = literal.gredp if band is None else literal.spectral_dp
        spectrum = next(literal._conv_spectra(self.x, self.g, config))
        return spectrum, run(self.x, self.g, config, GENERATOR)

    def _circulant(self) -> tuple[Tensor, Tensor]:
        p, q, d = self.site.shape
        x = nn.functional.pad(self.x, (0, q * d - self.x.shape[-1])).reshape(1, 1, q, d)
        g = nn.functional.pad(self.g, (0, p * d - self.g.shape[-1])).reshape(1, 1, p, d)
        band = self.mechanism.band((d,)) if isinstance(self.mechanism, SpectralDP) else None
        config = literal.Pipeline(kernel=(d,), size=(d,), bound=1e9, band=band)
        spectrum = next(literal._circulant_spectra(x, g))
        return spectrum, literal.circulant(x, g, config, GENERATOR)


def by_hand(mechanism: SpectralMechanism) -> tuple[list[Tensor], list[float]]:
    """The clipped sums, and how much of every clip group's norm was left, over all samples."""
    model, (x, y) = network(), examples()
    names = [name for name, _ in model.named_parameters()]
    plan = mechanism.plan([tuple(p.shape) for p in model.parameters()])
    seen: dict[str, Any] = {}
    for name, module in model.named_modules():

        def note(_: nn.Module, args: Any, out: Tensor, name: str = name) -> None:
            out.retain_grad()
            seen[name] = (args[0].detach(), out)

        module.register_forward_hook(note)
    totals = [torch.zeros_like(p) for p in model.parameters()]
    factors = []
    for b in range(BATCH):
        model.zero_grad()
        nn.functional.cross_entropy(model(x[b : b + 1]), y[b : b + 1]).backward()
        rows = []
        for name, p, block, site in zip(names, model.parameters(), plan.blocks, SITES, strict=True):
            owner = seen[name.rpartition(".")[0]]
            assert p.grad is not None
            layer = Layer(mechanism, block, site, (owner[0], owner[1].grad))
            rows.append(layer.contribution(p.grad))
        for group, bound in zip(plan.groups, plan.group_bounds, strict=True):
            norm = sum(rows[i][1] for i in group) ** 0.5
            factors.append(min(1.0, bound / norm))
            for i in group:
                totals[i] += rows[i][0] * factors[-1]
    return totals, factors


def trained(mechanism: Any, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A model after one step of SGD on the whole data set, and as it was."""
    model = network()
    before = copy.deepcopy(model)
    x, y = examples()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    dpkern.PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=None,
        sampling="shuffled",
        sample_rate=1.0,
        expected_batch_size=BATCH,
        dataset_size=BATCH,
        mechanism=mechanism,
        **options,
    )
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    return model, before


def gredp(**changes: Any) -> GReDP:
    fields = {"noise_multiplier": 0.0, "max_grad_norm": 0.3, "sites": SITES, "mode": "published"}
    return GReDP(**{**fields, **changes})


def spectral(**changes: Any) -> SpectralDP:
    fields = {"noise_multiplier": 0.0, "max_grad_norm": 0.3, "sites": SITES, "mode": "published"}
    return SpectralDP(**{**fields, **changes})


CASES = {
    "gredp": gredp(),
    "gredp flat": gredp(clipping="flat", max_grad_norm=1.0),
    "gredp real": gredp(noise_kind="real"),
    "gredp cropped": gredp(clip_domain="cropped"),
    "gredp as printed": gredp(unitary_scaling="as_printed", max_grad_norm=0.1),
    "gredp by layer": gredp(clipping="group", groups=(0, 0, 1, 1, 2, 2, 3, 3)),
    "spectral": spectral(),
    "spectral flat": spectral(clipping="flat", keep_fraction=0.2, mask="rectangle"),
    "spectral kept": spectral(clip_domain="kept"),
    "spectral cropped": spectral(clip_domain="cropped"),
    "spectral real": spectral(noise_kind="real"),
    "spectral slice": spectral(mask="authors_slice", fft_size="linear"),
    "whitened": spectral(mode="corrected", fft_size="padded"),
    "whitened linear": spectral(mode="corrected", fft_size="linear"),
    "whitened layers": spectral(clip_domain="whitened"),
    "corrected spectrum": spectral(mode="corrected", clip_domain="spectrum", max_grad_norm=1.0),
}


@pytest.mark.parametrize("name", CASES)
def test_one_step_is_the_literal_loop(name: str) -> None:
    mechanism = CASES[name]
    totals, factors = by_hand(mechanism)
    assert min(factors) < 0.9  # clipping is at work
    model, before = trained(mechanism)
    for p, old, total in zip(model.parameters(), before.parameters(), totals, strict=True):
        step = (old - p.detach()) * BATCH / RATE
        assert torch.allclose(step, total, rtol=0, atol=2e-4 * float(total.abs().max()))


def test_only_the_filter_and_the_clip_norm_differ() -> None:
    """Negative control: the sums of the cases are not each other's."""
    sums = {name: by_hand(mechanism)[0][0] for name, mechanism in CASES.items()}
    alike = {
        (one, other)
        for one in sums
        for other in sums
        if one < other and torch.allclose(sums[one], sums[other], rtol=1e-3)
    }
    # Noise off, its kind is not seen; clip groups are those of the first layer alone.
    assert alike <= {("gredp", "gredp real"), ("spectral", "spectral real")}


def test_corrected_gredp_trains_as_dpsgd_bit_for_bit() -> None:
    noisy = {"noise_multiplier": 0.7, "max_grad_norm": 0.3}
    for arithmetic in ("float", "exact"):
        ours = GReDP(**noisy, sites=SITES, arithmetic=arithmetic)
        theirs = DPSGD(**noisy, arithmetic=arithmetic)
        (one, _), (other, _) = (trained(m, unsafe_seed=5) for m in (ours, theirs))
        for p, q in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q)
        (third, _) = trained(replace(ours, noise_kind="circular", clipping="per_layer",
                                     arithmetic="float"), unsafe_seed=5)  # fmt: skip
        assert not torch.equal(next(iter(third.parameters())), next(iter(one.parameters())))


@pytest.mark.parametrize(
    "mechanism",
    [
        spectral(mode="corrected", noise_multiplier=1.0),
        spectral(noise_multiplier=1.0, noise_kind="real"),
        gredp(noise_multiplier=1.0),
        SpectralDP.as_coded(20.0, 0.3, 8, sites=SITES),
    ],
    ids=["whitened, exact", "open", "gredp", "as coded"],
)
def test_trains_with_noise_and_reports(mechanism: SpectralMechanism) -> None:
    """A loader, several steps: parameters move, nothing certified is better than claimed."""
    x, y = (t.repeat(4, *(1,) * (t.dim() - 1)) for t in examples())
    coded = mechanism.batch_size is not None
    run = Run(
        module=network(),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=8),
        mechanism=mechanism,
        noise_multiplier=None,
        max_grad_norm=None,
        unsafe_seed=None,
        sampling="fixed" if coded else "poisson",
    )
    before = run.values()
    assert run.train(most=2) == 2
    assert bool(torch.isfinite(run.values()).all())
    assert not torch.equal(before, run.values())
    plan = mechanism.plan([site.shape for site in SITES])
    opened = any(isinstance(block.release, PartialNoiseMap) for block in plan.blocks)
    assert run.engine.get_epsilon(1e-5) > 0
    assert (run.engine.get_epsilon(1e-5) == float("inf")) == (opened or not plan.private)


def test_needs_a_survey() -> None:
    with pytest.raises(InvalidInput, match=r"dpkern\.survey"):
        trained(spectral(sites=None))
    other = (*SITES[:-1], replace(SITES[-1], shape=(5,)))
    with pytest.raises(InvalidInput, match="sites"):
        trained(spectral(sites=other))


def test_survey_sees_what_is_filtered() -> None:
    kinds = ["conv", "other", "conv", "other", "circulant", "other", "other", "other"]
    assert [site.kind for site in SITES] == kinds
    plan = CASES["whitened"].plan([site.shape for site in SITES])
    bands = [b.release.band for b in plan.blocks if isinstance(b.release, WhitenedCrop)]
    assert bands == [Band((10, 10), "shells", 0.5), Band((8, 8), "shells", 0.5), None]

"""Random small private steps of every mechanism, for counting."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from dpkern import DPStep
from dpkern.base.phase import CLIP, phase
from dpkern.cost._step_operands import geometry
from dpkern.cost._step_operands import operands as _operands
from dpkern.engine.clip_norms import SpectrumNormed
from dpkern.engine.group_sums import GroupSums
from dpkern.engine.per_sample_gradients import (
    CirculantGradients,
    ConvolutionGradients,
    ExplicitGradients,
)
from dpkern.engine.uses import CapturedGradients
from dpkern.ops import clip, update
from dpkern.privacy.mechanisms import (
    DPSGD,
    AdaClip,
    Directional,
    GReDP,
    LaplaceSGD,
    Mechanism,
    ProjectedSGD,
    Pruned,
    Site,
    SpectralDP,
)

Shape = tuple[int, ...]
RULES: tuple[update.Rule | None, ...] = (
    None,
    update.SGD(lr=0.1),
    update.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    update.Adam(lr=0.1),
    update.AdamW(lr=0.1),
)


@dataclass
class Case:
    """One step: what it is given, and what its closed form is told."""

    mechanism: Mechanism
    shapes: list[Shape]
    draw: random.Random
    samples: str = "gradients"
    batch: int = 0
    dtype: torch.dtype = torch.float32
    rule: update.Rule | None = None
    number: int = 1
    moved: bool = True
    sampling: dict[str, Any] = field(default_factory=dict)
    clipped: list[int] = field(default_factory=list)
    means: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.batch = self.batch or self.draw.randint(1, 4)
        self.dtype = self.draw.choice((torch.float32, torch.float64))
        self.rule = self.draw.choice(RULES)
        self.number = self.draw.randint(1, 2)

    def step(self) -> DPStep:
        """A new one, with the steps before the counted one already made."""
        params = [torch.randn(shape, dtype=self.dtype) for shape in self.shapes]
        given: dict[str, Any] = {"expected_batch_size": 8.0, "sample_rate": 0.1} | self.sampling
        step = DPStep(self.mechanism, params, optimizer=self.rule, unsafe_seed=3, **given)
        for _ in range(self.number - 1):
            self.run(step, self.given(step))
        return step

    def given(self, step: DPStep) -> Any:
        """Samples that are far above their bound, or far below it, each clip group apart."""
        groups = step.plan.groups
        self.clipped = [0] * len(groups)
        released = self.samples == "released"
        samples = [
            torch.randn((self.batch, *(b.signal_shape if released else b.shape)), dtype=self.dtype)
            for b in step.plan.blocks
        ]
        for k, group in enumerate(groups):
            for b in range(self.batch):
                large = self.draw.random() < 0.5
                self.clipped[k] += large
                for i in group:
                    samples[i][b] *= 1e4 if large else 1e-5
        if step.plan.importance is not None and step.plan.importance.source == "full":
            self.means = [sample.mean(0) for sample in samples]
        if self.samples == "operands":
            return self.operands(step, samples)
        if self.samples != "sum":
            return samples
        one = clip.clip_sum(samples, 1.0)
        return self.result(step, one.sums, one.norms, 0)

    def operands(self, step: DPStep, samples: list[torch.Tensor]) -> list[Any]:
        """Records of spectral layers, whose gradients are large or small with the others'."""
        records: list[Any] = []
        for site, block, grads in zip(self.mechanism.sites, step.plan.blocks, samples, strict=True):
            if block.release is None:
                records.append(ExplicitGradients(grads))
                continue
            shapes = _operands(site, self.batch, self.dtype)
            x, g = (torch.randn(t.shape, dtype=self.dtype) for t in shapes)
            large = grads.flatten(1).norm(dim=1) > 1
            g *= torch.where(large, 1e4, 1e-5).view(-1, *(1,) * (g.dim() - 1))
            record = (
                CirculantGradients(x, g) if site.kind == "circulant" else _convolution(site, x, g)
            )
            records.append(SpectrumNormed(record, block.release))
        return records

    def summed(self, step: DPStep, records: list[Any]) -> clip.ClipResult:
        """The clipped sum of these records, made by the engine's own code."""
        sums: Any = object.__new__(GroupSums)
        sums.p, sums.style, sums.raw, sums.norms, sums.sums = 2, "flat", None, {}, {}
        slots: list[Any] = [
            SimpleNamespace(
                index=block.index,
                name=str(block.index),
                shape=block.shape,
                parameter=parameter,
                release=block.release,
                arrivals=[CapturedGradients(record)],
            )
            for block, parameter, record in zip(step.plan.blocks, step.params, records, strict=True)
        ]
        sums.groups = {k: [slots[i] for i in group] for k, group in enumerate(step.plan.groups)}
        sums.group_of = {slot.index: k for k, group in sums.groups.items() for slot in group}
        sums.bounds = dict(enumerate(step.plan.group_bounds))
        sums.capture = SimpleNamespace(
            slots=slots,
            loss_scale=1.0,
            loss_reduction="sum",
            arrived_batch=self.batch,
            filling=None,
        )
        with phase(CLIP):
            result: clip.ClipResult = sums.result()
        return result

    def result(
        self, step: DPStep, sums: Sequence[torch.Tensor], norms: torch.Tensor, dropped: Any
    ) -> clip.ClipResult:
        """Sums with the plan's bounds."""
        return clip.ClipResult(
            sums=tuple(sums),
            norm_bound=1.0,
            norms=norms,
            nonfinite=dropped,
            batch_size=self.batch,
            arithmetic="float",
            unit=None,
            p=2,
            max_norms=step.plan.group_bounds,
            clipped_as=tuple(block.release for block in step.plan.blocks),
        )

    def run(self, step: DPStep, given: Any) -> None:
        """One step."""
        if self.means:
            step.set_importance(self.means)
        if self.samples == "operands":
            step.add(sum=self.summed(step, given))
        elif self.samples == "sum":
            step.add(sum=given)
        else:
            step.add(given, released=self.samples == "released")
        step.finish()
        self.mechanism.project(step.params)


def _convolution(site: Site, x: torch.Tensor, g: torch.Tensor) -> ConvolutionGradients:
    given = geometry(site)
    return ConvolutionGradients(x, g, given.pop("kernel_size"), given)


def shapes(draw: random.Random) -> list[Shape]:
    """One to three parameters of at most twenty entries."""
    return [
        tuple(draw.randint(1, 5) for _ in range(draw.randint(0, 2)))
        for _ in range(draw.randint(1, 3))
    ]


def sigma(draw: random.Random) -> float:
    """A noise multiplier."""
    return draw.choice((0.5, 1.0, 2.0))


def arithmetic(draw: random.Random) -> str:
    return draw.choice(("exact", "float"))


def dpsgd(clipping: str) -> Callable[[random.Random], Case]:
    def make(draw: random.Random) -> Case:
        given = shapes(draw)
        groups = None
        if clipping == "group":
            groups = tuple(sorted(draw.randrange(2) for _ in given))
            groups = tuple(g - groups[0] for g in groups)
        mechanism = DPSGD(
            noise_multiplier=sigma(draw),
            max_grad_norm=1.0,
            clipping=clipping,
            groups=groups,
            arithmetic=arithmetic(draw),
        )
        return Case(mechanism, given, draw)

    return make


def per_sample(draw: random.Random) -> Case:
    fixed = draw.random() < 0.5
    mechanism = DPSGD(
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        arithmetic=arithmetic(draw),
        mode="published",
        noise_point="per_sample",
        batch_size=3 if fixed else None,
    )
    case = Case(mechanism, shapes(draw), draw, batch=3)
    if fixed:
        case.sampling = {"sampling": "fixed", "dataset_size": 30}
    return case


def without_noise(draw: random.Random) -> Case:
    return Case(DPSGD(noise_multiplier=0.0, max_grad_norm=1.0), shapes(draw), draw)


def laplace(mode: str) -> Callable[[random.Random], Case]:
    def make(draw: random.Random) -> Case:
        mechanism = LaplaceSGD(
            noise_multiplier=sigma(draw),
            max_grad_norm=1.0,
            clipping=draw.choice(("flat", "per_layer")),
            arithmetic="float" if mode == "published" else arithmetic(draw),
            mode=mode,
        )
        return Case(mechanism, shapes(draw), draw)

    return make


def adaclip(mode: str) -> Callable[[random.Random], Case]:
    def make(draw: random.Random) -> Case:
        mechanism = AdaClip(
            noise_multiplier=1.0,
            expected_batch_size=8.0,
            beta1=1 - 1e-9,  # the mean stays where it is, and with it who is clipped
            initial_scale=1.0,
            gamma=draw.choice((None, 0.5)),
            arithmetic=arithmetic(draw),
            mode=mode,
        )
        return Case(mechanism, shapes(draw), draw)

    return make


def directional(kind: str) -> Callable[[random.Random], Case]:
    def make(draw: random.Random) -> Case:
        options: dict[str, dict[str, Any]] = {
            "isotropic": {},
            "elliptic": {"shape": "elliptic"},
            "lot": {"mode": "published", "importance_multiplier": 1.0},
            "full": {"mode": "published", "importance_multiplier": 1.0, "w_source": "full"},
            "running": {"mode": "published", "w_source": "running"},
            "ours_w1": {"mode": "published", "generator": "ours_w1"},
        }
        more = options[kind]
        if "w_source" in more or kind == "lot":
            more["kappa_max"] = draw.choice((None, 3.0))
        mechanism = Directional(noise_multiplier=sigma(draw), max_grad_norm=1.0, **more)
        return Case(mechanism, shapes(draw), draw)

    return make


def projected(draw: random.Random) -> Case:
    small, large = update.Ball(1e-3), update.Ball(1e6)
    projection = draw.choice((None, small, large, update.Box(-0.1, 0.1), update.Simplex()))
    mechanism = ProjectedSGD(
        n=10, noise_multiplier=1.0, projection=projection, arithmetic=arithmetic(draw)
    )
    case = Case(mechanism, shapes(draw), draw, batch=1)
    case.rule = update.SGD(lr=0.1)
    case.moved = projection == small
    case.sampling = {"sampling": "fixed", "dataset_size": 10, "expected_batch_size": 1.0}
    return case


def pruned(mask: str) -> Callable[[random.Random], Case]:
    def make(draw: random.Random) -> Case:
        inner = DPSGD(noise_multiplier=1.0, max_grad_norm=1.0, arithmetic=arithmetic(draw))
        mechanism = Pruned(
            inner=inner,
            expected_batch_size=8.0,
            ratio=draw.choice((0.0, 0.5, 0.9)),
            mask=mask,
            feedback=draw.random() < 0.5,
            refresh=draw.randint(1, 3),
        )
        return Case(mechanism, shapes(draw), draw)

    return make


def conv(draw: random.Random) -> Site:
    """A convolution's geometry."""
    k, n, stride = draw.randint(1, 3), draw.randint(4, 6), draw.randint(1, 2)
    out = (n - k) // stride + 1
    return Site(
        kind="conv",
        shape=(draw.randint(1, 2), draw.randint(1, 2), k, k),
        input=(n, n),
        output=(out, out),
        stride=(stride, stride),
        padding=(0, 0),
        dilation=(1, 1),
    )


def circulant(draw: random.Random) -> Site:
    """A circulant layer's geometry."""
    return Site(
        kind="circulant",
        shape=(draw.randint(1, 2), draw.randint(1, 2), draw.randint(2, 5)),
        input=(1,),
        output=(1,),
    )


def spectral(kind: type[GReDP] | type[SpectralDP], mode: str) -> Callable[[random.Random], Case]:
    def make(draw: random.Random) -> Case:
        site = draw.choice((conv, circulant))(draw)
        sites = (site, Site(kind="other", shape=(draw.randint(1, 4),)))
        more: dict[str, Any] = {}
        if mode == "published":
            more["noise_kind"] = draw.choice(("circular", "real", "circular_full"))
            if kind is GReDP:
                more["unitary_scaling"] = draw.choice(("corrected", "as_printed"))
                more["clip_domain"] = draw.choice(("spectrum", "cropped"))
            else:
                more["mask"] = draw.choice(("shells", "rectangle"))
                more["keep_fraction"] = draw.choice((0.1, 0.5))
        mechanism = kind(noise_multiplier=1.0, max_grad_norm=1.0, sites=sites, mode=mode, **more)
        plan = mechanism.plan([s.shape for s in sites])
        release = plan.blocks[0].release
        how = "gradients"
        if release is not None and release.needs_operands:
            both = ("sum", "operands") if release.norm in ("spectrum", "kept") else ("sum",)
            how = "released" if release.norm == "release" else draw.choice(both)

        return Case(mechanism, [s.shape for s in sites], draw, samples=how)

    return make


CASES: dict[str, Callable[[random.Random], Case]] = {
    **{f"dpsgd {style}": dpsgd(style) for style in ("flat", "per_layer", "automatic", "group")},
    "dpsgd per sample": per_sample,
    "dpsgd without noise": without_noise,
    **{f"laplace_sgd {mode}": laplace(mode) for mode in ("published", "corrected")},
    **{f"adaclip {mode}": adaclip(mode) for mode in ("published", "corrected")},
    **{
        f"directional {kind}": directional(kind)
        for kind in ("isotropic", "elliptic", "lot", "full", "running", "ours_w1")
    },
    "projected_sgd": projected,
    **{f"pruned {mask}": pruned(mask) for mask in ("published", "previous", "random")},
    **{f"gredp {mode}": spectral(GReDP, mode) for mode in ("published", "corrected")},
    **{f"spectral_dp {mode}": spectral(SpectralDP, mode) for mode in ("published", "corrected")},
}

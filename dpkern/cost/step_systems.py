"""Private steps by name, on one layer of n features and l outputs, for counting and comparing.

A step has one sample, float32 parameters ``W [l, n]``, ``b [l]``, ``c [n]`` (an autoencoder with
tied weights), plain SGD, and every bound exceeded. The spectral mechanisms take the block-circulant
``W`` of the same outer sizes, in blocks of l.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..mechanisms import (
    DPSGD,
    AdaClip,
    Directional,
    GReDP,
    LaplaceSGD,
    Mechanism,
    ProjectedSGD,
    Pruned,
    RandomizedResponse,
    Site,
    SpectralDP,
)
from ..ops import update
from . import steps
from .primitives import Itemised

SCOPE = "one whole private step of one sample: norms, clipped sum, maps, noise, update, learning"

RULE = update.SGD(lr=0.1)


@dataclass(frozen=True)
class StepForm:
    """A mechanism's step as a function of sizes: ``form(n, l)``.

    Attributes:
        title: in tables and figures.
        source: of the mechanism.
        make: (n, l) -> its configuration.
    """

    title: str
    source: str
    make: Callable[[int, int], Mechanism]

    def __call__(self, n: int, code: int) -> Itemised:
        mechanism = self.make(n, code)
        if isinstance(mechanism, RandomizedResponse):
            return steps.response(mechanism, n)
        return steps.form(mechanism, shapes(mechanism, n, code), 1, rule=RULE)


def shapes(mechanism: Mechanism, n: int, code: int) -> list[tuple[int, ...]]:
    """Of the parameters that a mechanism trains."""
    weight, *biases = (site.shape for site in sites(n, code))
    return [weight if isinstance(mechanism, (SpectralDP, GReDP)) else (code, n), *biases]


def sites(n: int, code: int) -> tuple[Site, ...]:
    """Blocks of a circulant layer, its bias, and the bias of the features."""
    blocks = Site(kind="circulant", shape=(1, -(-n // code), code), input=(1,), output=(1,))
    return blocks, Site(kind="other", shape=(code,)), Site(kind="other", shape=(n,))


def systems() -> dict[str, StepForm]:
    """The steps by name; without a suffix in corrected mode."""
    return {**_plain(), **_shaped(), **_spectral()}


def _plain() -> dict[str, StepForm]:
    dpsgd = "Abadi et al., 2016"
    laplace = "stabilised perturbed loss, algorithm 2"
    return {
        "dpsgd": StepForm("DP-SGD", dpsgd, lambda *_: _dpsgd()),
        "dpsgd-per-layer": StepForm(
            "DP-SGD, per layer", dpsgd, lambda *_: _dpsgd(clipping="per_layer")
        ),
        "dpsgd-automatic": StepForm(
            "DP-SGD, automatic", "Bu et al., 2023", lambda *_: _dpsgd(clipping="automatic")
        ),
        "dpsgd-group": StepForm(
            "DP-SGD, group-wise", dpsgd, lambda *_: _dpsgd(clipping="group", groups=(0, 1, 1))
        ),
        "dpsgd-per-sample-noise": StepForm(
            "DP-SGD, noise per sample",
            "GReDP, algorithm 2",
            lambda *_: _dpsgd(mode="published", noise_point="per_sample"),
        ),
        "laplace_sgd": StepForm(
            "Laplace SGD", laplace, lambda *_: LaplaceSGD(noise_multiplier=1.0, max_grad_norm=1.0)
        ),
        "laplace_sgd-published": StepForm(
            "Laplace SGD as published",
            laplace,
            lambda *_: LaplaceSGD(noise_multiplier=1.0, max_grad_norm=1.0, mode="published"),
        ),
        "projected_sgd": StepForm(
            "Projected SGD",
            "lecture notes on private projected SGD",
            lambda n, _: ProjectedSGD(n=n, noise_multiplier=1.0, projection=update.Ball(1.0)),
        ),
        "randomized_response": StepForm(
            "Randomized response",
            "Warner, 1965",
            lambda _, code: RandomizedResponse(epsilon=1.0, categories=max(2, code)),
        ),
    }


def _shaped() -> dict[str, StepForm]:
    directional = "directional noise for DP-SGD"
    return {
        "adaclip": StepForm(
            "AdaClip",
            "Pichapati et al., 2019",
            lambda *_: AdaClip(noise_multiplier=1.0, expected_batch_size=1.0),
        ),
        "directional": StepForm("Directional, isotropic", directional, lambda *_: _directional()),
        "directional-elliptic": StepForm(
            "Directional, elliptic", directional, lambda *_: _directional(shape="elliptic")
        ),
        "directional-published": StepForm(
            "Directional as published",
            directional,
            lambda *_: _directional(mode="published", importance_multiplier=1.0),
        ),
        "pruned": StepForm("Pruned", directional, lambda *_: _pruned("previous")),
        "pruned-random": StepForm("Pruned at random", directional, lambda *_: _pruned("random")),
        "pruned-published": StepForm(
            "Pruned as published", directional, lambda *_: _pruned("published")
        ),
    }


def _spectral() -> dict[str, StepForm]:
    found = {}
    for kind, name, title, source in (
        (SpectralDP, "spectral_dp", "Spectral-DP", "Feng et al., 2023"),
        (GReDP, "gredp", "GReDP", "GReDP, algorithms 1 and 2"),
    ):
        for mode, suffix, words in (
            ("corrected", "", ""),
            ("published", "-published", " as published"),
        ):

            def make(
                n: int,
                code: int,
                kind: type[SpectralDP] | type[GReDP] = kind,
                mode: str = mode,
            ) -> Mechanism:
                return kind(
                    noise_multiplier=1.0, max_grad_norm=1.0, mode=mode, sites=sites(n, code)
                )

            found[name + suffix] = StepForm(title + words, source, make)
    return found


def _dpsgd(**more: object) -> DPSGD:
    return DPSGD(noise_multiplier=1.0, max_grad_norm=1.0, **more)  # type: ignore[arg-type]


def _directional(**more: object) -> Directional:
    return Directional(noise_multiplier=1.0, max_grad_norm=1.0, **more)  # type: ignore[arg-type]


def _pruned(mask: str) -> Pruned:
    return Pruned(inner=_dpsgd(), expected_batch_size=1.0, mask=mask)


__all__ = ["SCOPE", "StepForm", "shapes", "sites", "systems"]

"""Private steps by name, on one layer of n features and l outputs, for counting and comparing.

A step has one sample unless a batch is given, float32 parameters ``W``, ``b [l]``, ``c [n]``,
plain SGD, and every bound exceeded. The layer is that of ``ExampleLayer``:

    dense       ``W [l, n]`` of an autoencoder with tied weights, given as a per-sample gradient
    circulant   the block-circulant ``W`` of the same outer sizes, given likewise
    conv        a 3 x 3 convolution of l channels on maps of n x n, given by its input and output
                gradient, of which the engine makes norms and sums, transforms included

Mechanisms are compared at one layer. In a convolution all sums are floating-point ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from ..base import validate as check
from ..base.counts import Itemised
from ..base.errors import InvalidInput
from ..ops import update
from ..privacy.mechanisms import LabelMechanism, Mechanism, Site
from ..privacy.mechanisms.examples import LAYERS, Example, ExampleLayer
from ..privacy.mechanisms.plan import Plan
from ..privacy.mechanisms.release import Taps
from ..step.noise_tables.named import INLINE
from . import steps

SCOPE = "one whole private step of one sample: norms, clipped sum, maps, noise, update, learning"

RULE = update.SGD(lr=0.1)

LARGEST_MAP = 512
"""The largest map of a convolution: plans of the frequency domain list its n x n bins."""


@dataclass(frozen=True)
class StepForm:
    """A mechanism's step as a function of sizes: ``form(n, l)``.

    Attributes:
        title: name in tables and figures.
        source: source of the mechanism.
        kind: class of the mechanism.
        example: its fields.
    """

    title: str
    source: str
    kind: type[Mechanism]
    example: Example

    @property
    def spectral(self) -> bool:
        """Whether the mechanism works in the frequency domain of a layer."""
        return self.kind.frequency_domain

    def make(self, n: int, code: int, layer: str | None = None) -> Mechanism:
        """Return the mechanism at a layer, or at its own kind of layer."""
        given: dict[str, Any] = self.example.at(ExampleLayer(n, code, self.layer(layer)))
        made = self.kind(**given)
        if layer == "conv" and getattr(made, "arithmetic", "float") != "float":
            made = replace(made, arithmetic="float")  # type: ignore[type-var]
        return made

    def layer(self, layer: str | None = None) -> str:
        """Return the kind of layer, which is the mechanism's own unless it is chosen.

        Raises:
            InvalidInput: an unknown one, or a dense layer for a mechanism of the frequency domain.
        """
        if layer is None:
            return "circulant" if self.spectral else "dense"
        check.choice(LAYERS, layer=layer)
        if layer == "dense" and self.spectral:
            raise InvalidInput(
                "layer",
                expected=f"circulant or conv with {self.title}",
                got="dense, of which no parameter is in the frequency domain",
                remedy="Compare at a layer that it works on, for example --layer conv.",
            )
        return layer

    def __call__(
        self,
        n: int,
        code: int,
        source: str = INLINE,
        layer: str | None = None,
        batch: int = 1,
    ) -> Itemised:
        """Count one step of ``batch`` samples with noise of this source, at this kind of layer.

        Raises:
            InvalidInput: a layer or source that the mechanism's steps do not have.
        """
        if self.layer(layer) == "conv":
            self._check_map(n)
        mechanism = self.make(n, code, layer)
        if isinstance(mechanism, LabelMechanism):
            self._refuse_others(source, layer)
            return steps.response(mechanism, n)
        if mechanism.noise_moves and source != INLINE:
            self._refuse_source(source, "noise in other places at every step")
        sites = self.sites(n, code, layer)
        how: dict[str, Any] = {"rule": RULE, "source": source}
        if self.layer(layer) == "conv":
            self._check_conv(mechanism.plan([site.shape for site in sites]))
            how |= {"samples": "operands", "sites": sites}
        return steps.form(mechanism, [site.shape for site in sites], batch, **how)

    def sites(self, n: int, code: int, layer: str | None = None) -> tuple[Site, ...]:
        """Return the geometry of the parameters that the mechanism trains."""
        return ExampleLayer(n, code, self.layer(layer)).sites

    def work(self, n: int, code: int, layer: str | None = None) -> tuple[str, int]:
        """Return the kind of layer that a step trains, and how many parameters it has."""
        if issubclass(self.kind, LabelMechanism):
            return "label", 0
        sizes = (math.prod(site.shape) for site in self.sites(n, code, layer))
        return self.layer(layer), sum(sizes)

    def _check_map(self, n: int) -> None:
        if n > LARGEST_MAP:
            raise InvalidInput(
                "n",
                expected=f"<= {LARGEST_MAP} at a convolution, whose map has n x n positions",
                got=n,
                remedy="Pass a smaller -n, or --layer dense or circulant.",
            )

    def _check_conv(self, plan: Plan) -> None:
        """Refuse norms of a convolution that no form counts."""
        maps = [block.release for block in plan.blocks if block.release is not None]
        if plan.p == 2 and all(isinstance(release, Taps) for release in maps):
            return
        raise InvalidInput(
            "layer",
            expected=f"dense with {self.title}",
            got="conv, whose gradient it clips in L1 or in coordinates of its own: not counted",
            remedy="Pass --layer dense, and leave mechanisms of the frequency domain out.",
        )

    def _refuse_others(self, source: str, layer: str | None) -> None:
        if source != INLINE:
            self._refuse_source(source, "labels that are released without noise")
        if layer not in (None, "dense"):
            raise InvalidInput(
                "layer",
                expected=f"none with {self.title}",
                got=layer,
                remedy="Compare it without --layer and without mechanisms of the frequency domain: "
                "labels are released before any layer is trained.",
            )

    def _refuse_source(self, source: str, why: str) -> None:
        raise InvalidInput(
            "noise",
            expected=f"{INLINE} with {self.title}",
            got=f"{source}; the mechanism has {why}",
            remedy=f"Leave --noise out, or pass --noise {INLINE}.",
        )


def systems() -> dict[str, StepForm]:
    """Return the steps of every mechanism's examples by name; no suffix means corrected mode."""
    return {
        f"{kind.name}{example.suffix}": StepForm(
            f"{kind.title}{example.words}", example.source or kind.source, kind, example
        )
        for kind in Mechanism.all()
        for example in kind.examples
    }


__all__ = ["RULE", "SCOPE", "StepForm", "systems"]

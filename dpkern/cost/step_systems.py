"""Private steps by name, on one layer of n features and l outputs, for counting and comparing.

A step has one sample, float32 parameters ``W [l, n]``, ``b [l]``, ``c [n]`` (an autoencoder with
tied weights), plain SGD, and every bound exceeded. The spectral mechanisms take the block-circulant
``W`` of the same outer sizes, in blocks of l.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ..base.counts import Itemised
from ..ops import update
from ..privacy.mechanisms import LabelMechanism, Mechanism, Site
from ..privacy.mechanisms.examples import Example, ExampleLayer
from . import steps

SCOPE = "one whole private step of one sample: norms, clipped sum, maps, noise, update, learning"

RULE = update.SGD(lr=0.1)


@dataclass(frozen=True)
class StepForm:
    """A mechanism's step as a function of sizes: ``form(n, l)``.

    Attributes:
        title: name in tables and figures.
        source: source of the mechanism.
        make: (n, l) -> its configuration.
    """

    title: str
    source: str
    make: Callable[[int, int], Mechanism]

    def __call__(self, n: int, code: int) -> Itemised:
        mechanism = self.make(n, code)
        if isinstance(mechanism, LabelMechanism):
            return steps.response(mechanism, n)
        return steps.form(mechanism, shapes(mechanism, n, code), 1, rule=RULE)


def shapes(mechanism: Mechanism, n: int, code: int) -> list[tuple[int, ...]]:
    """Return the shapes of the parameters that ``mechanism`` trains."""
    weight, *biases = (site.shape for site in sites(n, code))
    return [weight if getattr(mechanism, "sites", None) else (code, n), *biases]


def sites(n: int, code: int) -> tuple[Site, ...]:
    """Return the sites: blocks of a circulant layer, its bias, and the bias of the features."""
    return ExampleLayer(n, code).sites


def systems() -> dict[str, StepForm]:
    """Return the steps of every mechanism's examples by name; no suffix means corrected mode."""
    return {
        f"{kind.name}{example.suffix}": StepForm(
            f"{kind.title}{example.words}",
            example.source or kind.source,
            partial(_made, kind, example),
        )
        for kind in Mechanism.all()
        for example in kind.examples
    }


def _made(kind: type[Mechanism], example: Example, n: int, code: int) -> Mechanism:
    return kind(**example.at(ExampleLayer(n, code)))


__all__ = ["SCOPE", "StepForm", "shapes", "sites", "systems"]

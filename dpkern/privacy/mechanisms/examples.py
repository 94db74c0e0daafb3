"""Examples of mechanisms for costs, audits, tests and docs, as plain values.

A mechanism says with which arguments it is shown and audited. Values that follow from the place
where an example is used (sizes, geometry, batch size) are functions, or are filled in by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .site import Site

Shapes = tuple[tuple[int, ...], ...]

UNIT: Mapping[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
"""Noise of the size of the bound."""

DENSE: Shapes = ((4, 3), (4,))
"""A small layer with its bias: two clip groups where layers are clipped apart."""
CIRCULANT: Shapes = ((1, 1, 8), (4,))
"""A block of a circulant layer, which releases every lag, and a bias."""
FEATURE: Shapes = ((1,),)
"""One feature: the whole of epsilon is spent on one number."""


LAYERS = ("dense", "circulant", "conv")
"""Kinds of layers whose step an example takes."""


@dataclass(frozen=True)
class ExampleLayer:
    """A layer whose step an example takes: weights ``W``, ``b [l]`` and ``c [n]``.

    Attributes:
        features, code: n and l.
        kind: one of ``LAYERS``. ``dense``: ``W [l, n]`` (an autoencoder with tied weights).
            ``circulant``: the block-circulant ``W`` of the same outer sizes, in blocks of l.
            ``conv``: a 3 x 3 convolution of l channels to l on maps of n x n, padded by 1.
    """

    features: int
    code: int
    kind: str = "circulant"

    @property
    def sites(self) -> tuple[Site, ...]:
        """The geometry of ``W``, ``b`` and ``c``."""
        n, code = self.features, self.code
        if self.kind == "dense":
            weights = Site(kind="other", shape=(code, n))
        elif self.kind == "conv":
            weights = Site(
                kind="conv",
                shape=(code, code, 3, 3),
                input=(n, n),
                output=(n, n),
                stride=(1, 1),
                padding=(1, 1),
                dilation=(1, 1),
            )
        else:
            shape = 1, -(-n // code), code
            weights = Site(kind="circulant", shape=shape, input=(1,), output=(1,))
        return weights, Site(kind="other", shape=(code,)), Site(kind="other", shape=(n,))


@dataclass(frozen=True)
class Example:
    """A way to configure a mechanism, whose step is counted, compared and tested.

    Attributes:
        fields: arguments of the class; a function is asked for the value at a ``ExampleLayer``.
        suffix: what follows the mechanism's name, such as ``-published``.
        words: what follows its title.
        source: the paper of this form. An empty text stands for the mechanism's.
    """

    fields: Mapping[str, Any | Callable[[ExampleLayer], Any]]
    suffix: str = ""
    words: str = ""
    source: str = ""

    def at(self, layer: ExampleLayer) -> dict[str, Any]:
        """Return the arguments for this layer."""
        return {
            name: value(layer) if callable(value) else value for name, value in self.fields.items()
        }


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The facts from which an audit makes its subject.

    ``mode``, ``sites`` and ``expected_batch_size`` are filled in where the class has such a field.

    Attributes:
        fields: arguments of the class that have another default here, or none there.
        published: those of published mode, which replace them.
        releases: what is looked at: ``step`` (of gradients), ``response`` (to one symbol),
            ``record`` (released once, or its coefficients), ``visits`` (weights after visits of a
            record), ``labelled record``, or ``sums`` over all records.
        suffix: what follows the mechanism's name.
        shapes: of the parameters, or ``((n,),)`` for records of n features.
        takes: options that the caller of the audit may choose.
        corrected: those of corrected mode, where they are fewer.
    """

    fields: Mapping[str, Any]
    published: Mapping[str, Any] = field(default_factory=dict)
    releases: str = "step"
    suffix: str = ""
    shapes: Shapes = DENSE
    takes: tuple[str, ...] = ("backend", "steps", "shapes")
    corrected: tuple[str, ...] | None = None

"""Subjects by name: noise kernels, every mechanism, the noise of other libraries."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from .. import mechanisms
from .._validate import choice, integer
from ..audit.subject import Subject
from ..errors import InvalidInput
from ..mechanisms import Site
from ..mechanisms._statement import MODES
from ..mechanisms.base import checked_shapes
from ..theory.adlm import FirstLayer, Setting
from .generator import Generator
from .kernel import NoiseKernel
from .labelled import LabelledRecord
from .local import Coefficients, Record, Response
from .peer import LIBRARIES, Peer
from .step import BATCH, PrivateStep
from .visits import Visits

Fields = dict[str, Any]
Shapes = tuple[tuple[int, ...], ...]

SHAPES: Shapes = ((4, 3), (4,))
"""A small layer with its bias: two clip groups where layers are clipped apart."""
CIRCULANT: Shapes = ((1, 1, 8), (4,))
"""A block of a circulant layer, which releases every lag, and a bias."""
FEATURES: Shapes = ((1,),)
"""One feature: the whole of epsilon is spent on one number."""

SETTING = Setting(
    name="small",
    layer=FirstLayer(features=3, maps=32),
    records=60_000,
    batch=1800,
    classes=10,
    hidden=25,
)
"""The sizes of AdLM's MNIST run, with a record of three features."""
FEW = replace(SETTING, classes=2, layer=FirstLayer(features=2, maps=32))
"""Sizes at which the whole of epsilon is seen often: that takes every part of the release."""


@dataclass(frozen=True)
class Entry:
    """How the subject of one name is made.

    Attributes:
        kind: the class whose fields settings name.
        build: from those fields and the audit's options to the subject.
        given: fields that have another default here than in the class, or none there.
        published: of them, those of published mode.
        shapes: of the parameters, or ``((n,),)`` for records of n features.
        takes: options of ``make`` that the caller may choose.
        corrected: those of corrected mode, where they are fewer.
    """

    kind: type[Any]
    build: Callable[[Any, Options], Subject]
    given: Mapping[str, Any]
    published: Mapping[str, Any]
    shapes: Shapes
    takes: tuple[str, ...] = ("backend", "steps", "shapes")
    corrected: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Options:
    """What an audit chooses besides the mechanism."""

    mode: str
    shapes: Shapes
    steps: int
    backend: str | None

    @property
    def features(self) -> int:
        """Of a record."""
        return math.prod(self.shapes[0])


def names() -> tuple[str, ...]:
    """What ``make`` knows."""
    return tuple(_ENTRIES)


def kind(name: str) -> type[Any]:
    """The class whose fields are the settings of a name.

    Raises:
        InvalidInput: an unknown name.
    """
    return _entry(name).kind


def make(
    name: str,
    *,
    mode: str = "corrected",
    settings: Mapping[str, Any] | None = None,
    backend: str | None = None,
    steps: int = 1,
    shapes: Sequence[Sequence[int]] | None = None,
) -> Subject:
    """A subject.

    Args:
        name: one of ``names()``.
        mode: ``corrected`` or ``published``; kernels have one mode.
        settings: fields of ``kind(name)``, typed.
        backend: who runs the ops, emulated where it has no device here; None: dpkern's choice.
        steps: released together; visits, where a record is visited.
        shapes: of the parameters; ``((n,),)`` for a record of n features.

    Raises:
        InvalidInput: an unknown name, setting or shape, or an option that this subject has not.
    """
    entry = _entry(name)
    choice(MODES, mode=mode)
    few = entry.corrected is not None and mode == "corrected"
    takes = entry.corrected if few else entry.takes
    asked = {"backend": backend, "steps": integer(1, steps=steps), "shapes": shapes}
    for option, value in asked.items():
        if value not in (None, 1) and option not in (takes or ()):
            raise InvalidInput(
                option,
                expected=f"none: {name} has no such choice in mode {mode!r}",
                got=value,
                remedy=f"Leave {option} out.",
            )
    chosen = entry.shapes if shapes is None else checked_shapes(shapes)
    options = Options(mode=mode, shapes=chosen, steps=steps, backend=backend)
    given: Fields = {**entry.given, **(entry.published if mode == "published" else {})}
    known = {field.name for field in fields(entry.kind) if field.init}
    if "mode" in known:
        given["mode"] = mode
    if "sites" in known:
        given["sites"] = tuple(_site(shape) for shape in chosen)
    for key in settings or {}:
        choice(tuple(sorted(known - {"mode", "sites"})), settings=key)
    return entry.build(entry.kind(**{**given, **(settings or {})}), options)


def _entry(name: str) -> Entry:
    choice(names(), name=name)
    return _ENTRIES[name]


def _site(shape: tuple[int, ...]) -> Site:
    """Three dimensions are a circulant layer's, four those of a convolution of an 8 x 8 image."""
    if len(shape) == 3:
        return Site(kind="circulant", shape=shape, input=(1,), output=(1,))
    if len(shape) == 4:
        output = tuple(9 - k for k in shape[2:])
        each: Fields = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)}
        return Site(kind="conv", shape=shape, input=(8, 8), output=output, **each)
    return Site(kind="other", shape=shape)


def _step(mechanism: mechanisms.Mechanism, options: Options) -> Subject:
    return PrivateStep(
        mechanism=mechanism, shapes=options.shapes, steps=options.steps, backend=options.backend
    )


def _kernel(kernel: NoiseKernel, options: Options) -> Subject:
    return NoiseKernel(
        **{
            **{field.name: getattr(kernel, field.name) for field in fields(kernel) if field.init},
            "backend": options.backend,
            "width": options.features,
        }
    )


def _generator(generator: Generator, options: Options) -> Subject:
    return replace(generator, backend=options.backend)


def _functional(mechanism: Any, options: Options) -> Subject:
    """Published: noisy coefficients; corrected: the record."""
    if options.mode == "published":
        features, visits = options.features, options.steps
        return Coefficients(
            mechanism=mechanism, features=features, visits=visits, backend=options.backend
        )
    return Record(mechanism=mechanism, features=options.features)


def _visits(mechanism: Any, options: Options) -> Subject:
    return Visits(mechanism=mechanism, features=options.features, visits=options.steps)


def _peer(peer: Peer, options: Options) -> Subject:
    return replace(peer, dimension=options.features)


def _labelled(mechanism: mechanisms.AdLM, options: Options) -> Subject:
    del options
    return LabelledRecord(mechanism=mechanism)


def _response(mechanism: mechanisms.RandomizedResponse, options: Options) -> Subject:
    return Response(mechanism=mechanism, backend=options.backend)


def _of_step(kind: type[Any], *, shapes: Shapes = SHAPES, published: Fields, **given: Any) -> Entry:
    noise = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
    return Entry(kind, _step, {**noise, **given}, published, shapes)


KERNEL = ("backend", "shapes")
_PUBLIC: Fields = {"relevance_from": "public"}
_ENTRIES: dict[str, Entry] = {
    "add_noise": Entry(NoiseKernel, _kernel, {"op": "add_noise"}, {}, ((16,),), KERNEL),
    "update": Entry(NoiseKernel, _kernel, {"op": "update"}, {}, ((16,),), KERNEL),
    "generator": Entry(Generator, _generator, {}, {}, FEATURES, ("backend",)),
    "adaclip": _of_step(mechanisms.AdaClip, published={"gamma": 0.01}, expected_batch_size=BATCH),
    "directional": _of_step(mechanisms.Directional, published={"importance_multiplier": 0.05}),
    "dpsgd": _of_step(mechanisms.DPSGD, published={}),
    "gredp": _of_step(mechanisms.GReDP, published={}, shapes=CIRCULANT),
    "laplace_sgd": _of_step(mechanisms.LaplaceSGD, published={}),
    "projected_sgd": _of_step(mechanisms.ProjectedSGD, published={}, n=10),
    "pruned": Entry(
        mechanisms.Pruned,
        _step,
        {
            "inner": mechanisms.DPSGD(noise_multiplier=1.0, max_grad_norm=1.0),
            "expected_batch_size": BATCH,
            "ratio": 0.5,
        },
        {"mask": "published"},
        SHAPES,
    ),
    "spectral_dp": _of_step(mechanisms.SpectralDP, published={}, shapes=CIRCULANT),
    "randomized_response": Entry(
        mechanisms.RandomizedResponse, _response, {"epsilon": 1.0}, {}, FEATURES, ("backend",)
    ),
    "spof": Entry(
        mechanisms.SPOF, _functional, {"epsilon": 1.0}, {}, FEATURES, corrected=("shapes",)
    ),
    "fm": Entry(mechanisms.FM, _functional, {"epsilon": 1.0}, {}, FEATURES, corrected=("shapes",)),
    "spof_training": Entry(
        mechanisms.SPOF, _visits, {"epsilon": 1.0}, {}, FEATURES, ("steps", "shapes")
    ),
    "fm_training": Entry(
        mechanisms.FM, _visits, {"epsilon": 1.0}, {}, FEATURES, ("steps", "shapes")
    ),
    # Corrected: a bound that the gradient of one record reaches.
    "output_sgd": Entry(
        mechanisms.OutputSGD,
        _visits,
        {"epsilon": 1.0, "max_grad_norm": 0.1},
        {"max_grad_norm": 4.0},
        FEATURES,
        ("steps", "shapes"),
    ),
    "adlm": Entry(
        mechanisms.AdLM,
        _labelled,
        {"epsilon": 1.0, "setting": FEW, **_PUBLIC},
        {"setting": SETTING},
        FEATURES,
        (),
    ),
    "ilm": Entry(
        mechanisms.ILM,
        _labelled,
        {"epsilon": 1.0, "setting": FEW},
        {"setting": SETTING},
        FEATURES,
        (),
    ),
    **{
        f"peer:{library.replace(' ', '_')}": Entry(
            Peer, _peer, {"library": library}, {}, FEATURES, ("shapes",)
        )
        for library in LIBRARIES
    },
}


__all__ = ["Options", "kind", "make", "names"]

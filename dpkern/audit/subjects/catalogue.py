"""Make subjects by name: noise kernels, every mechanism, the noise of other libraries."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ...base.errors import InvalidInput
from ...base.validate import choice, integer
from ...privacy.mechanisms import (
    AdLM,
    LabelMechanism,
    Mechanism,
    ObjectivePerturbation,
    ObjectiveRelease,
    Site,
)
from ...privacy.mechanisms._statement import MODES
from ...privacy.mechanisms.base import checked_shapes
from ...privacy.mechanisms.examples import FEATURE, Audit, Shapes
from ..subject import Subject
from .generator import Generator
from .kernel import NoiseKernel
from .labelled import LabelledRecord
from .local import CoefficientSubject, ReleasedRecordSubject, Response
from .peer import LIBRARIES, Peer
from .step import BATCH, PrivateStep
from .sums import SumsSubject
from .visits import VisitsSubject

Fields = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class SubjectOptions:
    """The choices of an audit besides the mechanism."""

    mode: str
    shapes: Shapes
    steps: int
    backend: str | None

    @property
    def features(self) -> int:
        """The number of features of a record."""
        return math.prod(self.shapes[0])


Build = Callable[[Any, SubjectOptions], Subject]
"""A function from a configuration and the audit's options to the subject."""


@dataclass(frozen=True)
class SubjectEntry:
    """The recipe for the subject of one name.

    Attributes:
        kind: the class whose fields settings name.
        build: function from those fields and the audit's options to the subject.
        audit: fields, shapes and options.
    """

    kind: type[Any]
    build: Build
    audit: Audit


def names() -> tuple[str, ...]:
    """Return the names that ``make`` knows."""
    return tuple(_ENTRIES)


def kind(name: str) -> type[Any]:
    """Return the class whose fields are the settings of a name.

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
    """Make the subject of a name.

    Args:
        name: one of ``names()``.
        mode: ``corrected`` or ``published``; kernels have one mode.
        settings: fields of ``kind(name)``, typed.
        backend: name of the backend, emulated where its device is missing. None selects the first
            one that supports the call; see ``dpkern info``.
        steps: released together; visits, where a record is visited.
        shapes: shapes of the parameters; ``((n,),)`` for a record of n features.

    Raises:
        InvalidInput: an unknown name, setting or shape, or an option that this subject has not.
    """
    entry = _entry(name)
    choice(MODES, mode=mode)
    audit = entry.audit
    few = audit.corrected is not None and mode == "corrected"
    takes = audit.corrected if few else audit.takes
    asked = {"backend": backend, "steps": integer(1, steps=steps), "shapes": shapes}
    for option, value in asked.items():
        if value not in (None, 1) and option not in (takes or ()):
            raise InvalidInput(
                option,
                expected=f"none: {name} has no such choice in mode {mode!r}",
                got=value,
                remedy=f"Leave {option} out.",
            )
    chosen = audit.shapes if shapes is None else checked_shapes(shapes)
    options = SubjectOptions(mode=mode, shapes=chosen, steps=steps, backend=backend)
    given: Fields = {**audit.fields, **(audit.published if mode == "published" else {})}
    known = {field.name for field in fields(entry.kind) if field.init}
    if "mode" in known:
        given["mode"] = mode
    if "sites" in known:
        given["sites"] = tuple(_site(shape) for shape in chosen)
    if "expected_batch_size" in known:
        given["expected_batch_size"] = BATCH
    for key in settings or {}:
        choice(tuple(sorted(known - {"mode", "sites"})), settings=key)
    return entry.build(entry.kind(**{**given, **(settings or {})}), options)


def _entry(name: str) -> SubjectEntry:
    choice(names(), name=name)
    return _ENTRIES[name]


def _site(shape: tuple[int, ...]) -> Site:
    """Return the site of a shape.

    Three dimensions are a circulant layer's, four those of a convolution of an 8 x 8 image.
    """
    if len(shape) == 3:
        return Site(kind="circulant", shape=shape, input=(1,), output=(1,))
    if len(shape) == 4:
        output = tuple(9 - k for k in shape[2:])
        each: Fields = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)}
        return Site(kind="conv", shape=shape, input=(8, 8), output=output, **each)
    return Site(kind="other", shape=shape)


def _step(mechanism: Mechanism, options: SubjectOptions) -> Subject:
    return PrivateStep(
        mechanism=mechanism, shapes=options.shapes, steps=options.steps, backend=options.backend
    )


def _kernel(kernel: NoiseKernel, options: SubjectOptions) -> Subject:
    return NoiseKernel(
        **{
            **{field.name: getattr(kernel, field.name) for field in fields(kernel) if field.init},
            "backend": options.backend,
            "width": options.features,
        }
    )


def _generator(generator: Generator, options: SubjectOptions) -> Subject:
    return replace(generator, backend=options.backend)


def _functional(mechanism: Any, options: SubjectOptions) -> Subject:
    """Make a functional mechanism's subject: noisy coefficients if published, else the record."""
    if options.mode == "published":
        features, visits = options.features, options.steps
        return CoefficientSubject(
            mechanism=mechanism, features=features, visits=visits, backend=options.backend
        )
    return ReleasedRecordSubject(mechanism=mechanism, features=options.features)


def _visits(mechanism: Any, options: SubjectOptions) -> Subject:
    return VisitsSubject(mechanism=mechanism, features=options.features, visits=options.steps)


def _peer(peer: Peer, options: SubjectOptions) -> Subject:
    return replace(peer, dimension=options.features)


def _labelled(mechanism: AdLM, options: SubjectOptions) -> Subject:
    del options
    return LabelledRecord(mechanism=mechanism)


def _sums(mechanism: ObjectiveRelease, options: SubjectOptions) -> Subject:
    del options
    return SumsSubject(mechanism=mechanism)


def _response(mechanism: LabelMechanism, options: SubjectOptions) -> Subject:
    return Response(mechanism=mechanism, backend=options.backend)


_RELEASED: Mapping[str, Build] = {
    "step": _step,
    "response": _response,
    "record": _functional,
    "visits": _visits,
    "labelled record": _labelled,
    "sums": _sums,
}
"""The audited part of each kind of mechanism; see ``Audit.releases``."""

_KERNEL = ("backend", "shapes")


def _entries() -> dict[str, SubjectEntry]:
    found = {
        "add_noise": SubjectEntry(
            NoiseKernel, _kernel, Audit(fields={"op": "add_noise"}, shapes=((16,),), takes=_KERNEL)
        ),
        "update": SubjectEntry(
            NoiseKernel, _kernel, Audit(fields={"op": "update"}, shapes=((16,),), takes=_KERNEL)
        ),
        "generator": SubjectEntry(
            Generator, _generator, Audit(fields={}, shapes=FEATURE, takes=("backend",))
        ),
    }
    for mechanism in (*Mechanism.all(), *ObjectivePerturbation.all()):
        for each in mechanism.audits:
            entry = SubjectEntry(mechanism, _RELEASED[each.releases], each)
            found[f"{mechanism.name}{each.suffix}"] = entry
    for library in LIBRARIES:
        looked = Audit(fields={"library": library}, shapes=FEATURE, takes=("shapes",))
        found[f"peer:{library.replace(' ', '_')}"] = SubjectEntry(Peer, _peer, looked)
    return found


_ENTRIES = _entries()

__all__ = ["SubjectOptions", "kind", "make", "names"]

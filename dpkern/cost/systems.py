"""Name what can be counted and compared, on an autoencoder of n features and a code of l."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..base import validate as check
from ..base.counts import Itemised
from ..base.errors import InvalidInput
from ..privacy.mechanisms import FM, SPOF, LabelMechanism, ObjectivePerturbation, OutputSGD
from ..privacy.mechanisms.examples import LAYERS
from ..step.noise_tables.named import INLINE
from . import autoencoder, claims, step_systems
from .autoencoder import PRINTED, CountOptions
from .claims import EpsilonFact
from .drawing import PRINTED_SOURCE

APPENDIX_G = "noise and clipping of one sample (the steps of SPOF's Appendix G)"


@dataclass(frozen=True, kw_only=True)
class CountWay:
    """The way to count a system.

    Attributes:
        options: corrections of Appendix G; whole steps are counted as they run.
        source: source of the noise, a name in ``step.noise_tables.named.SOURCES``. None takes the
            one that the system presumes.
        layer: kind of layer of a whole step, one of ``examples.LAYERS``. None takes the
            mechanism's own.
        batch: samples of a whole step; Appendix G counts one record.
    """

    options: CountOptions = PRINTED
    source: str | None = None
    layer: str | None = None
    batch: int = 1


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """A named mechanism with a closed form of its operations.

    Attributes:
        name: name on the command line.
        title: name in tables and figures.
        scope: work that is counted; only systems of one scope compare.
        reference: origin of the form.
        form: (n, code, way) -> itemised operations.
        epsilon: (n, code, way) -> epsilon of the work that is counted.
        work: (n, code, layer) -> kind of layer and number of its parameters.
        presumed: the noise source that it is counted with unless one is named.
        traced: whether ``trace.op_trace`` executes it.
        batched: whether a step of it takes several samples.
        spectral: whether it works in the frequency domain of a layer.
        largest: features up to which crossovers are searched.
    """

    name: str
    title: str
    scope: str
    reference: str
    form: Callable[[int, int, CountWay], Itemised]
    epsilon: Callable[[int, int, CountWay], EpsilonFact]
    work: Callable[[int, int, str | None], tuple[str, int]]
    presumed: str = INLINE
    traced: bool = False
    batched: bool = False
    spectral: bool = False
    largest: int = 4096

    def noise_draws(self, n: int) -> int:
        """Return the noisy numbers of a record, of a system that is ``traced``."""
        return autoencoder.draws_of(self.name, n)


def _appendix(name: str, title: str, reference: str, mechanism: ObjectivePerturbation) -> CostModel:
    def form(n: int, code: int, way: CountWay) -> Itemised:
        return autoencoder.op_count(name, n, code, way.options, way.source or PRINTED_SOURCE)

    def epsilon(n: int, code: int, way: CountWay) -> EpsilonFact:
        draws = autoencoder.draws_of(name, n)
        return claims.of_record(mechanism, draws, way.source or PRINTED_SOURCE)

    return CostModel(
        name=name,
        title=title,
        scope=APPENDIX_G,
        reference=reference,
        form=form,
        epsilon=epsilon,
        work=lambda n, code, _: ("tied autoencoder", n * code),
        presumed=PRINTED_SOURCE,
        traced=True,
    )


_PAPER: dict[str, Any] = {"epsilon": 1.0, "mode": "published"}
_APPENDIX = (
    _appendix("spof", "SPOF", "SPOF, Appendix G: Algorithm 1, Steps 3 and 5", SPOF(**_PAPER)),
    _appendix(
        "dpsgd-da",
        "DP-SGD for DA",
        "SPOF, Appendix G: Algorithm 2, Steps 4 and 6",
        OutputSGD(**_PAPER),
    ),
    _appendix("fm", "FM", "SPOF, 2.7: Algorithm 1 with one user and no constant", FM(**_PAPER)),
)


def _step(name: str, step: step_systems.StepForm) -> CostModel:
    def form(n: int, code: int, way: CountWay) -> Itemised:
        return step(n, code, way.source or INLINE, way.layer, way.batch)

    def epsilon(n: int, code: int, way: CountWay) -> EpsilonFact:
        mechanism = step.make(n, code, way.layer)
        if isinstance(mechanism, LabelMechanism):
            return claims.of_label(mechanism)
        shapes = [site.shape for site in step.sites(n, code, way.layer)]
        return claims.of_release(mechanism, shapes, way.source or INLINE)

    return CostModel(
        name=name,
        title=step.title,
        scope=step_systems.SCOPE,
        reference=step.source,
        form=form,
        epsilon=epsilon,
        work=step.work,
        batched=not issubclass(step.kind, LabelMechanism),
        spectral=step.spectral,
        largest=128,  # plans of spectral mechanisms hold matrices of that size
    )


def check_size(n: int, code: int) -> None:
    """Refuse sizes that no autoencoder of these mechanisms has.

    Raises:
        InvalidInput: unless 1 <= l <= n, with l = ``code``.
    """
    check.integer(1, n=n)
    check.integer(1, n, l=code)


def check_options(systems: Sequence[CostModel], options: CountOptions) -> None:
    """Refuse ways of counting that change nothing.

    Raises:
        InvalidInput: other options than the printed ones, without a system of Appendix G.
    """
    if options != PRINTED and not any(system.scope == APPENDIX_G for system in systems):
        raise InvalidInput(
            "options",
            expected="the printed ones, unless a mechanism of SPOF's Appendix G is counted",
            got=", ".join(system.name for system in systems),
            remedy="Leave --mode and --set out: whole steps are counted as they run.",
        )


def check_batch(systems: Sequence[CostModel], batch: int) -> None:
    """Refuse batches that the steps of a system do not have.

    Raises:
        InvalidInput: less than one sample, or several with a record of Appendix G or with labels.
    """
    check.integer(1, batch=batch)
    for system in systems:
        if batch > 1 and not system.batched:
            raise InvalidInput(
                "batch",
                expected=f"1 with {system.title}",
                got=batch,
                remedy="Leave --batch out, for its count is that of one record or response, or "
                "name mechanisms of whole steps: --mechanisms dpsgd,adaclip --batch 1,64.",
            )


def check_layer(systems: Sequence[CostModel], layer: str | None) -> None:
    """Refuse a kind of layer that is unknown, or that changes nothing.

    Raises:
        InvalidInput: as said.
    """
    if layer is None:
        return
    check.choice(LAYERS, layer=layer)
    if all(system.traced for system in systems):
        raise InvalidInput(
            "layer",
            expected="none with the steps of Appendix G",
            got=layer,
            remedy="Leave --layer out: they are those of an autoencoder.",
        )


SYSTEMS: dict[str, CostModel] = {
    **{system.name: system for system in _APPENDIX},
    **{name: _step(name, step) for name, step in step_systems.systems().items()},
}
"""Systems by name. ``CountOptions`` say how to count Appendix G; whole steps are counted as they
run."""

__all__ = [
    "APPENDIX_G",
    "SYSTEMS",
    "CostModel",
    "CountWay",
    "check_batch",
    "check_layer",
    "check_options",
    "check_size",
]

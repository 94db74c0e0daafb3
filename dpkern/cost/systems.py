"""What can be counted and compared by name, on an autoencoder of n features and a code of l."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..base import validate as check
from ..base.counts import Itemised
from ..base.errors import InvalidInput
from . import autoencoder, step_systems
from .autoencoder import PRINTED, Options

APPENDIX_G = "noise and clipping of one sample (the steps of SPOF's Appendix G)"


@dataclass(frozen=True, kw_only=True)
class System:
    """Something with a closed form of its operations.

    Attributes:
        name: on the command line.
        title: in tables and figures.
        scope: which work is counted; only systems of one scope compare.
        source: where the form comes from.
        form: (n, code, options) -> itemised operations.
        traced: whether ``trace.op_trace`` executes it.
        largest: features up to which crossovers are searched.
    """

    name: str
    title: str
    scope: str
    source: str
    form: Callable[[int, int, Options], Itemised]
    traced: bool = False
    largest: int = 4096


_APPENDIX = (
    System(
        name="spof",
        title="SPOF",
        scope=APPENDIX_G,
        source="SPOF, Appendix G: Algorithm 1, Steps 3 and 5",
        form=autoencoder.spof,
        traced=True,
    ),
    System(
        name="dpsgd-da",
        title="DP-SGD for DA",
        scope=APPENDIX_G,
        source="SPOF, Appendix G: Algorithm 2, Steps 4 and 6",
        form=autoencoder.dpsgd,
        traced=True,
    ),
    System(
        name="fm",
        title="FM",
        scope=APPENDIX_G,
        source="SPOF, 2.7: Algorithm 1 with one user and no constant",
        form=autoencoder.fm,
        traced=True,
    ),
)


def _step(name: str, step: step_systems.StepForm) -> System:
    return System(
        name=name,
        title=step.title,
        scope=step_systems.SCOPE,
        source=step.source,
        form=lambda n, code, _: step(n, code),
        largest=128,  # plans of spectral mechanisms hold matrices of that size
    )


def check_size(n: int, code: int) -> None:
    """Refuses sizes that no autoencoder of these mechanisms has.

    Raises:
        InvalidInput: unless 1 <= l <= n, with l = ``code``.
    """
    check.integer(1, n=n)
    check.integer(1, n, l=code)


def check_options(systems: Sequence[System], options: Options) -> None:
    """Refuses ways of counting where nothing can be counted otherwise.

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


SYSTEMS: dict[str, System] = {
    **{system.name: system for system in _APPENDIX},
    **{name: _step(name, step) for name, step in step_systems.systems().items()},
}
"""By name. ``Options`` say how to count Appendix G; the whole steps are counted as they run."""

__all__ = ["APPENDIX_G", "SYSTEMS", "System", "check_options", "check_size"]

"""Name what can be counted and compared, on an autoencoder of n features and a code of l."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..base import validate as check
from ..base.counts import Itemised
from ..base.errors import InvalidInput
from . import autoencoder, step_systems
from .autoencoder import PRINTED, CountOptions

APPENDIX_G = "noise and clipping of one sample (the steps of SPOF's Appendix G)"


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """A named mechanism with a closed form of its operations.

    Attributes:
        name: name on the command line.
        title: name in tables and figures.
        scope: work that is counted; only systems of one scope compare.
        source: origin of the form.
        form: (n, code, options) -> itemised operations.
        traced: whether ``trace.op_trace`` executes it.
        largest: features up to which crossovers are searched.
    """

    name: str
    title: str
    scope: str
    source: str
    form: Callable[[int, int, CountOptions], Itemised]
    traced: bool = False
    largest: int = 4096


_APPENDIX = (
    CostModel(
        name="spof",
        title="SPOF",
        scope=APPENDIX_G,
        source="SPOF, Appendix G: Algorithm 1, Steps 3 and 5",
        form=autoencoder.spof,
        traced=True,
    ),
    CostModel(
        name="dpsgd-da",
        title="DP-SGD for DA",
        scope=APPENDIX_G,
        source="SPOF, Appendix G: Algorithm 2, Steps 4 and 6",
        form=autoencoder.dpsgd,
        traced=True,
    ),
    CostModel(
        name="fm",
        title="FM",
        scope=APPENDIX_G,
        source="SPOF, 2.7: Algorithm 1 with one user and no constant",
        form=autoencoder.fm,
        traced=True,
    ),
)


def _step(name: str, step: step_systems.StepForm) -> CostModel:
    return CostModel(
        name=name,
        title=step.title,
        scope=step_systems.SCOPE,
        source=step.source,
        form=lambda n, code, _: step(n, code),
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


SYSTEMS: dict[str, CostModel] = {
    **{system.name: system for system in _APPENDIX},
    **{name: _step(name, step) for name, step in step_systems.systems().items()},
}
"""Systems by name. ``CountOptions`` say how to count Appendix G; whole steps are counted as they
run."""

__all__ = ["APPENDIX_G", "SYSTEMS", "CostModel", "check_options", "check_size"]

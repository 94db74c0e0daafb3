"""What can be counted and compared by name, on the autoencoder of n features and a code of l."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import autoencoder
from .autoencoder import Options
from .primitives import Itemised

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
    """

    name: str
    title: str
    scope: str
    source: str
    form: Callable[[int, int, Options], Itemised]
    traced: bool = False


SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
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
            title="DP-SGD",
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
}

__all__ = ["APPENDIX_G", "SYSTEMS", "System"]

"""Require that compared mechanisms do the same work: one scope, one layer, as many parameters.

A mechanism of fewer parameters, or of another layer, is cheaper whatever its kernels do. Such a
comparison has no headline: it is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..base.errors import InvalidInput
from .systems import CostModel, CountWay


@dataclass(frozen=True, kw_only=True)
class WorkSize:
    """The work of a mechanism in a comparison.

    Attributes:
        scope: work that is counted.
        layer: kind of layer.
        parameters: number of trained values.
    """

    scope: str
    layer: str
    parameters: int

    @property
    def words(self) -> str:
        """The size in words."""
        return f"{self.parameters:,} parameters of a {self.layer} layer, {self.scope}"


def work_of(system: CostModel, n: int, code: int, way: CountWay) -> WorkSize:
    """Return what ``system`` works on at these sizes."""
    layer, parameters = system.work(n, code, way.layer)
    return WorkSize(scope=system.scope, layer=layer, parameters=parameters)


def equal_work(systems: Sequence[CostModel], n: int, code: int, way: CountWay) -> WorkSize:
    """Return the one work of all systems.

    Raises:
        InvalidInput: two of them count another scope, train another kind of layer, or have another
            number of parameters.
    """
    first, *others = systems
    wanted = work_of(first, n, code, way)
    for system in others:
        found = work_of(system, n, code, way)
        if found != wanted:
            raise InvalidInput(
                "mechanisms",
                expected=f"equal work; {first.title}: {wanted.words}",
                got=f"{system.title}: {found.words}",
                remedy="Compare mechanisms of one kind, or report each with `dpkern cost count`.",
            )
    return wanted


__all__ = ["WorkSize", "equal_work", "work_of"]

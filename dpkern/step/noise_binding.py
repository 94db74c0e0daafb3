"""Bind a noise source to a ``DPStep``: take each release's draws, and what they certify."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from ..base.errors import InvalidInput, PrivacyError
from ..ops import update
from ..privacy.accounting import Accountable
from ..privacy.mechanisms.plan import Plan
from .noise_tables.source import Layout, NoiseSource, check_source

if TYPE_CHECKING:
    from .step import DPStep


class NoiseBinding:
    """A noise source bound to one step; without one, noise is drawn inside the update.

    Args:
        source: the source, or None.

    Raises:
        InvalidInput: something else.
    """

    def __init__(self, source: NoiseSource | None) -> None:
        check_source(source)
        self.source = source
        self._claimed = False
        self._checked: tuple[Plan, object] | None = None

    def bind(self, step: DPStep) -> None:
        """Claim the source for this step.

        Raises:
            PrivacyError: one that serves another step.
        """
        if self.source is not None:
            self._bound(step, self.source)

    def prepare(self, step: DPStep) -> None:
        """Announce that the next release will need its draws.

        Raises:
            PrivacyError: as ``take``.
        """
        if self.source is not None and self._bound(step, self.source):
            self.source.prepare(step.steps + 1)

    def take(self, step: DPStep, samples: int | None) -> update.Draws | None:
        """Return the draws of the next release. None means that it draws none, or its own.

        Raises:
            PrivacyError: a plan whose noise has another law or other places than at the start.
            InvalidInput: parameters that several processes hold in parts.
            DPKernError: whatever the source met with; nothing is released.
        """
        if self.source is None or samples == 0 or not self._bound(step, self.source):
            return None
        if step.shards is not None:
            refuse_shards()
        return self.source.take(step.steps + 1)

    def done(self) -> None:
        """Note that the update was launched, or never will be."""
        if self.source is not None and self._claimed:
            self.source.done()

    @property
    def warning(self) -> str:
        """The reason why nothing is certified because of the source; empty if it is no obstacle."""
        return "" if self.source is None else self.source.warning

    def covered(self, plan: Plan) -> Accountable:
        """Return what one release of this plan certifies."""
        return plan if self.source is None else self.source.covered(plan)

    def words(self, plan: Plan) -> dict[str, int]:
        """Return keystream words that one release of this plan needs."""
        return plan.words if self.source is None else self.source.words(plan)

    def provenance(self, words: dict[str, int]) -> dict[str, Any]:
        """Return where the noise came from; ``words`` are those of all releases."""
        if self.source is not None:
            return self.source.provenance()
        counted = {**words, "reused": 0, "discarded": words["produced"] - words["consumed"]}
        text = (
            f"fresh single-use; words produced {counted['produced']}, consumed "
            f"{counted['consumed']}, reused 0, discarded {counted['discarded']}"
        )
        return {"source": "inline", "words": counted, "text": text}

    def _bound(self, step: DPStep, source: NoiseSource) -> bool:
        """Bind the source to the step's noise; return False if there is none now."""
        plan, device = step.plan, step.params[0].device
        if self._checked is not None and self._checked[0] is plan and self._checked[1] == device:
            return True
        layout = Layout.of_plan(plan, device)
        if layout is None:
            return False
        if not self._claimed:
            source.bind(step.key, layout, backend=step.backend)
            self._claimed = True
        elif source.layout != layout:
            raise PrivacyError(
                "noise_source",
                expected=f"noise of law and places as at the start, {source.layout}",
                got=str(layout),
                remedy="Make a new DPStep: between steps only the noise's scale may change.",
            )
        self._checked = plan, device
        return True


def refuse_shards() -> NoReturn:
    """Refuse a noise source for shards of parameters: each process needs its part's draws only.

    Raises:
        InvalidInput: always.
    """
    raise InvalidInput(
        "noise_source",
        expected="parameters that every process holds whole",
        got="shards",
        remedy="Leave noise_source away: each process then draws the noise of its own part.",
    )


__all__ = ["NoiseBinding", "refuse_shards"]

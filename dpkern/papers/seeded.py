"""Train the cells of a table seed by seed, each kept as soon as it is done."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..base.devices import training_device
from ..privacy.mechanisms import DPSGD
from ..privacy.mechanisms.base import Mechanism
from ..train.loop import Loss, summed_cross_entropy
from . import runner
from .data_cache import digest
from .figure import withheld
from .intervals import Interval, interval
from .pieces import CachedRun, OnStep
from .result import ComparisonRow, Line, Result
from .runner import ItemRequest, RunSetting
from .verdict import spoiled

MARGIN = 1.0
"""Points that training without privacy may stay below its printed accuracy."""
SHARE, LEARNED = 0.9, 50.0
"""Share of its printed accuracy that training without privacy must reach for a figure to be drawn,
and the accuracy in per cent on other data, where nothing is printed."""


WITHOUT_PRIVACY = DPSGD(noise_multiplier=0.0, max_grad_norm=math.inf)
"""The mechanism of a control: nothing is clipped, and there is no noise."""


@dataclass(frozen=True, kw_only=True)
class SeededCell:
    """One training, to be repeated with several seeds.

    Attributes:
        label: label of the progress bar.
        setting: data, model and length.
        mechanism: mechanism of the run.
        about: what names the model and everything else that ``setting`` does not tell.
        loss: summed loss of a batch.
    """

    label: str
    setting: RunSetting
    mechanism: Mechanism
    about: Mapping[str, Any]
    loss: Loss = field(default=summed_cross_entropy, compare=False)

    def piece(self, seed: int) -> CachedRun:
        """Return the training with one seed."""
        where = self.setting
        key = {
            **self.about,
            "mechanism": self.mechanism.fingerprint,
            "data": where.data.source,
            "records": len(where.data.x_train),
            "held_out": len(where.data.x_test),
            "digest": digest(
                where.data.x_train, where.data.y_train, where.data.x_test, where.data.y_test
            ),
            "batch": where.batch_size,
            "sampling": where.sampling,
            "rule": repr(where.rule),
            "epochs": where.epochs,
            "delta": where.delta,
            "seed": seed,
            **({} if where.device.type == "cpu" else {"device": str(where.device)}),
        }

        def compute(on_step: OnStep) -> Mapping[str, Any]:
            one = runner.once(where, self.mechanism, seed, loss=self.loss, on_step=on_step)
            return {
                "accuracy": [100 * epoch.heldout_accuracy for epoch in one.history],
                "claimed": one.epsilon_claimed,
                "certified": one.epsilon_certified,
                "relation": one.relation,
                "ms_per_step": one.ms_per_step,
                "collapsed": one.collapsed,
            }

        label = f"{self.label}, seed {seed}"
        return CachedRun(label=label, key=key, compute=compute, steps=where.steps)


@dataclass(frozen=True, kw_only=True)
class SeededRuns:
    """Results of a cell's runs.

    Attributes:
        cell: the cell.
        accuracy: held-out accuracy in per cent, by seed, after every epoch.
        claimed, certified: epsilon of the whole run, the same for every seed.
        relation: relation of the certificate.
        ms_per_step: median over the seeds.
        collapsed: number of runs whose outputs are the same for every held-out record.
    """

    cell: SeededCell
    accuracy: tuple[tuple[float, ...], ...]
    claimed: float
    certified: float
    relation: str
    ms_per_step: float
    collapsed: int

    @property
    def last(self) -> list[float]:
        """Accuracy after the last epoch, by seed."""
        return [run[-1] for run in self.accuracy]

    @property
    def best(self) -> float:
        """Mean over seeds of the best epoch's accuracy, which was chosen by held-out rows."""
        return statistics.fmean(map(max, self.accuracy))

    @property
    def found(self) -> Interval:
        return interval(self.last)

    @property
    def spoiled(self) -> str:
        """The reason that these runs tell nothing of their method; empty where they do."""
        return spoiled(0, self.collapsed, len(self.accuracy))

    def curve(self, label: str, x: Sequence[float] | None = None) -> Line:
        """Draw the mean accuracy after every epoch, with a band of its 95 % interval."""
        each = [interval(values) for values in zip(*self.accuracy, strict=True)]
        return Line(
            label=label,
            x=range(1, len(each) + 1) if x is None else x,
            y=[one.mean for one in each],
            half=[one.half for one in each] if len(self.accuracy) > 1 else (),
            band=True,
        )

    def row(self, item: str, setting: str, **more: Any) -> ComparisonRow:
        """Return the row of the last accuracy; ``more`` fills or replaces other fields."""
        last = self.last
        content: dict[str, Any] = {
            "quantity": "accuracy %",
            "ours": statistics.fmean(last),
            "epsilon_claimed": self.claimed,
            "epsilon_certified": self.certified,
            "relation": self.relation,
            "data": self.cell.setting.data.source,
            "seeds": len(last),
            "spread": (max(last) - min(last)) / 2,
            "stopped": 0,
            "collapsed": self.collapsed,
        }
        return ComparisonRow(item=item, setting=setting, **{**content, **more})


def train(request: ItemRequest, cells: Sequence[SeededCell], seeds: int) -> list[SeededRuns]:
    """Train every seed of every cell, a piece each; what is finished is not computed again.

    Raises:
        BackendError: the requested device is not there.
    """
    device = training_device(request.device)
    cells = [replace(cell, setting=replace(cell.setting, device=device)) for cell in cells]
    pieces = [cell.piece(seed) for cell in cells for seed in range(seeds)]
    numbers = request.through(pieces)
    return [
        _runs(cell, numbers[index * seeds : (index + 1) * seeds])
        for index, cell in enumerate(cells)
    ]


@dataclass(frozen=True, kw_only=True)
class Control:
    """A training without privacy: where it fails, runs with privacy show nothing of a method.

    Attributes:
        name: what panels that it is for are titled by; empty for all panels.
        ours: accuracy in per cent.
        printed: the source's, a text where it is of other data; None for none.
        constant: what the best output reaches that is the same for every record, where that is the
            bar; None takes a share of the printed accuracy.
    """

    name: str = ""
    ours: float
    printed: float | str | None = None
    constant: float | None = None

    @property
    def bar(self) -> float:
        """The accuracy that it must reach, in per cent."""
        if self.constant is not None:
            return self.constant
        return SHARE * self.printed if isinstance(self.printed, float) else LEARNED

    @property
    def passed(self) -> bool:
        return self.ours >= self.bar

    @property
    def shortfall(self) -> str:
        """The reason that private runs of this length are not the source's; empty for none.

        They cannot be where training without privacy stays below what is printed for it.
        """
        if not isinstance(self.printed, float) or self.ours >= self.printed - MARGIN:
            return ""
        return (
            f"without privacy this rate and length reach {self.ours:.1f} %, {self.printed:g} are "
            "printed: they are not the source's"
        )

    @property
    def said(self) -> str:
        """The accuracy that it reached, beside the printed one and the one that it must reach."""
        text = f"{self.name} without privacy: {self.ours:.1f} %".strip()
        if isinstance(self.printed, float):
            text += f" (printed {self.printed:g})"
        if self.constant is not None:
            text += f" (the best constant output: {self.constant:.1f} %)"
        if not self.passed:
            return f"{text}, below the {self.bar:.1f} % that a control must reach"
        if self.shortfall:
            text += ", so private runs of this rate and length are not the source's either"
        return text


def with_controls(result: Result, controls: Sequence[Control]) -> Result:
    """Return the result with its controls; panels whose control failed are not drawn."""
    panels = list(result.panels)
    for one in controls:
        if not one.passed:
            panels = [
                withheld(panel.title, one.said) if panel.title.startswith(one.name) else panel
                for panel in panels
            ]
    said = "; ".join(one.said for one in controls)
    return replace(result, panels=panels, control=said)


def over(
    label: str, x: Sequence[float], found: Sequence[SeededRuns], *, best: bool = False
) -> Line:
    """Draw the cells' last accuracies over what the cells vary, with their 95 % intervals."""
    several = len(found[0].accuracy) > 1
    return Line(
        label=label,
        x=x,
        y=[one.best if best else one.found.mean for one in found],
        half=[one.found.half for one in found] if several and not best else (),
        spoiled=[bool(one.spoiled) for one in found],
    )


def _runs(cell: SeededCell, numbers: Sequence[Mapping[str, Any]]) -> SeededRuns:
    first = numbers[0]
    return SeededRuns(
        cell=cell,
        accuracy=tuple(tuple(map(float, one["accuracy"])) for one in numbers),
        claimed=float(first["claimed"]),
        certified=float(first["certified"]),
        relation=str(first["relation"]),
        ms_per_step=statistics.median(float(one["ms_per_step"]) for one in numbers),
        collapsed=sum(int(one["collapsed"]) for one in numbers),
    )

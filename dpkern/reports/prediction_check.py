"""Compare predictions with measured rows: how far off this code is, on which processor.

The rows are data files beside the processors (``cost/machines/measured``). They are predicted again
with the code and the prices of today whenever a report is made, so that its error is no memory of
an older one. Rows that prices or shares were fitted to are marked, and told apart.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

import torch

from ..base.counts import Counts, Item, Itemised
from ..base.report import ReportTable
from ..base.rng import Purpose
from ..cost import processors
from ..cost._ops import shaped, stream
from ..cost.forms import FORMS
from ..cost.op_time import CoresAtWork, OpTime, op_time
from ..cost.processors import Processor
from ..ops import update
from ..privacy.mechanisms import DPSGD
from .fake_step import trace
from .networks import maker
from .predicted_step import ordinary, private

TARGET = 20
"""The error that predictions should keep, in percent, by the median of the rows."""
PLAIN = DPSGD(noise_multiplier=1.0, max_grad_norm=1.0, arithmetic="float")
_MEASURED = files("dpkern.cost") / "machines" / "measured"
_RULES: Mapping[str, update.Rule] = {
    "sgd": update.SGD(lr=0.1),
    "momentum": update.SGD(lr=0.1, momentum=0.9),
    "adam": update.Adam(lr=1e-3),
}


@dataclass(frozen=True, kw_only=True)
class CheckedRow:
    """A measured row and its prediction.

    Attributes:
        case: name of the row.
        processor: name of the processor file, and instruction set.
        kind: ``noise``, ``clip``, ``update``, ``op`` (a case of the benchmark) or ``step``.
        threads: cores at work.
        measured, predicted: seconds.
        fitted: whether prices or shares were fitted to it.
    """

    case: str
    processor: str
    kind: str
    threads: int
    measured: float
    predicted: float
    fitted: bool

    @property
    def error(self) -> float:
        """Percent by which the prediction is off, below 0 where it is too short."""
        return 100 * (self.predicted / self.measured - 1)


def measured_names() -> tuple[str, ...]:
    """Return the processors with measured rows."""
    names = (f.name for f in _MEASURED.iterdir() if f.name.endswith(".json"))
    return tuple(sorted(name.removesuffix(".json") for name in names))


@cache
def checked(name: str) -> tuple[CheckedRow, ...]:
    """Predict every measured row of a processor."""
    data = json.loads((_MEASURED / f"{name}.json").read_text())
    return tuple(_checked(name, row) for row in data["rows"])


def _checked(name: str, row: Mapping[str, Any]) -> CheckedRow:
    machine = processors.load(f"{name}:{row['set']}" if row["set"] else name)
    return CheckedRow(
        case=" ".join(row[name] for name in ("op", "case") if name in row),
        processor=machine.name,
        kind=row["kind"],
        threads=row["threads"],
        measured=row["seconds"],
        predicted=_predicted(machine, row),
        fitted=row["fitted"],
    )


def _predicted(machine: Processor, row: Mapping[str, Any]) -> float:
    place = CoresAtWork.of(machine, row["threads"], bandwidth=row.get("bandwidth"))
    kind = row["kind"]
    if kind == "step":
        step = trace(*maker(row["model"]))
        if row["private"]:
            return private(step, place, PLAIN, rule=_RULES["sgd"]).seconds
        return ordinary(step, place, rule=_RULES["sgd"]).seconds
    if kind == "noise":
        dtype = getattr(torch, row["dtype"])
        purpose = Purpose.NOISE if row["distribution"] == "gaussian" else Purpose.LAPLACE
        given: dict[str, Any] = {"stream": stream(purpose), "position": 0}
        given |= {"distribution": row["distribution"]}
        if dtype.is_floating_point:
            given |= {"scale": 1.0, "rounding": stream(Purpose.ROUNDING)}
        items = FORMS["noise.add_noise"](shaped((row["count"],), dtype), **given)
        place = replace(place, rounds=row["rounds"])
        return op_time("noise.add_noise", items, place, dtype=dtype).seconds
    if kind == "op":
        return _op(place, row).seconds
    if kind == "clip":
        grads = [shaped((row["batch"], n), torch.float32) for n in row["columns"]]
        exact = {"arithmetic": row["arithmetic"]}
        unit = 2.0**-20 if row["arithmetic"] == "exact" else None
        items = FORMS["clip.clip_sum"](grads, 1.0, unit=unit, **exact)
        return op_time("clip.clip_sum", items, place, dtype=torch.float32).seconds
    return _update(place, row)


def _op(place: CoresAtWork, row: Mapping[str, Any]) -> OpTime:
    """Predict a case of the benchmark, with the copy or product that was measured beside it.

    Its lines are kept with it, for cases stand above this room; tests compare them with the form.
    """
    items = Itemised(
        tuple(Item(**{**line, "counts": Counts(line["counts"])}) for line in row["lines"])
    )
    figures = dict(place.machine.machine)
    if row["limit"] == "product":
        flops = sum(item.floating for item in items.items)
        peak = 1e-9 * flops / row["limit_seconds"]
        figures |= {"peak_gflops": peak * figures["cores"], "product_share": 1.0}
    else:  # of the caches only those that a core has alone
        ways = (sum(getattr(i, f"bytes_{way}") for i in items.items) for way in ("read", "written"))
        place = replace(place, bandwidth=max(ways) / row["limit_seconds"])
        figures.pop("l3_kb", None)
    machine = replace(place.machine, machine=figures)
    dtype = getattr(torch, row["dtype"] or "float32")
    return op_time(row["op"], items, replace(place, machine=machine), dtype=dtype)


def inside_seconds(processor: str, row: Mapping[str, Any]) -> tuple[float, float]:
    """Return what a kernel that reaches all of its limits takes within a core, and its call."""
    machine = processors.load(processor)
    machine = replace(machine, kernels={row["op"]: 1.0})
    time = _op(CoresAtWork.of(machine, 1), row)
    return max(time.compute, time.integers, time.words, time.instructions), time.launch


def _update(place: CoresAtWork, row: Mapping[str, Any]) -> float:
    tensors, size, kind = row["tensors"], row["size"], getattr(torch, row["sums"])
    if not row["noise"]:
        kind = torch.float32
    params = [shaped((size,), torch.float32) for _ in range(tensors)]
    sums = [shaped((size,), kind) for _ in range(tensors)]
    step = -(-size // 512) * 512
    noise = update.Noise(
        distribution="gaussian",
        scales=(1.0,) * tensors,
        stream=stream(Purpose.NOISE),
        positions=tuple(range(0, step * tensors, step)),
        rounding=stream(Purpose.ROUNDING),
    )
    given = noise if row["noise"] else None
    items = FORMS["update.step"](params, sums, rule=_RULES[row["rule"]], noise=given)
    return op_time("update.step", items, place, dtype=torch.float32, launches=tensors).seconds


def facts() -> list[dict[str, Any]]:
    """Return the errors of every processor with measured rows, all and not fitted ones."""
    return [_summary(name, checked(name)) for name in measured_names()]


def _summary(name: str, rows: Sequence[CheckedRow]) -> dict[str, Any]:
    data = json.loads((_MEASURED / f"{name}.json").read_text())
    errors = [abs(row.error) for row in rows]
    free = [abs(row.error) for row in rows if not row.fitted]
    worst = max(rows, key=lambda row: abs(row.error))
    return {
        "processor": name,
        "measured_on": data["processor"],
        "date": data["date"],
        "source": data["source"],
        "fitted_note": data["fitted"],
        "rows": len(rows),
        "median_error_percent": round(statistics.median(errors), 1),
        "not_fitted_rows": len(free),
        "not_fitted_median_error_percent": round(statistics.median(free), 1),
        "within_target": sum(error <= TARGET for error in errors),
        "worst": worst.case,
        "worst_error_percent": round(worst.error, 1),
    }


def table(found: Sequence[Mapping[str, Any]]) -> ReportTable:
    """Build the table of errors."""
    return ReportTable(
        title="Predicted against measured",
        columns=(
            *("processor", "rows", "median error (%)", "rows not fitted", "their median (%)"),
            *("within 20 %", "worst (%)"),
        ),
        rows=[
            (
                fact["processor"],
                fact["rows"],
                fact["median_error_percent"],
                fact["not_fitted_rows"],
                fact["not_fitted_median_error_percent"],
                fact["within_target"],
                fact["worst_error_percent"],
            )
            for fact in found
        ],
        note=" ".join(
            f"{f['processor']}: {f['measured_on']}, {f['date']}; {f['source']}. Fitted: "
            f"{f['fitted_note']}. Worst: {f['worst']}."
            for f in found
        ),
    )


__all__ = [
    "PLAIN",
    "TARGET",
    "CheckedRow",
    "checked",
    "facts",
    "inside_seconds",
    "measured_names",
    "table",
]

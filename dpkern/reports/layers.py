"""Report each layer's cost in a private step, and without privacy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ..base.op_cost import Cost
from ..base.report import Figure, ReportTable, Series
from .measured import Measured, Side, fields_of
from .trace import REST, ROOT, layer_of

SHOWN = 20
"""Maximum of layers in a figure; those that take less time are shown together."""
_NOTHING = Cost(0, 0, 0, 0, 0)


@dataclass(frozen=True)
class LayerRow:
    """A layer in both steps."""

    layer: str
    kind: str
    parameters: int
    private: Cost
    plain: Cost
    private_seconds: float
    plain_seconds: float
    calls: int

    @property
    def label(self) -> str:
        """The layer's name; with its kind where the name ends in a number, as in ``Sequential``."""
        numbered = self.kind and self.layer.rpartition(".")[2].isdigit()
        return f"{self.layer} {self.kind}" if numbered else self.layer

    @property
    def ratio(self) -> float | None:
        """Private time over time without privacy; None if the latter is zero."""
        return self.private_seconds / self.plain_seconds if self.plain_seconds else None


def rows_of(model: nn.Module, measured: Measured) -> list[LayerRow]:
    """Return the layers in the model's order, then what belongs to none of them."""
    sizes: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            sizes[layer_of(name)] = sizes.get(layer_of(name), 0) + parameter.numel()
    modules = dict(model.named_modules())
    costs = [side.by_layer() for side in (measured.private, measured.plain)]
    seconds = [_seconds(side) for side in (measured.private, measured.plain)]
    return [
        LayerRow(
            layer=layer,
            kind="" if layer == REST else type(modules["" if layer == ROOT else layer]).__name__,
            parameters=sizes.get(layer, 0),
            private=costs[0].get(layer, _NOTHING),
            plain=costs[1].get(layer, _NOTHING),
            private_seconds=seconds[0].get(layer, 0.0),
            plain_seconds=seconds[1].get(layer, 0.0),
            calls=sum(layer in dict(call.shares) for call in measured.private.ops),
        )
        for layer in (*sizes, REST)
    ]


def _seconds(side: Side) -> dict[str, float]:
    found: dict[str, float] = {}
    for (_, layer), seconds in side.seconds.items():
        found[layer] = found.get(layer, 0.0) + seconds
    return found


def facts(model: nn.Module, measured: Measured) -> list[dict[str, Any]]:
    """Return the layers as JSON values."""
    return [
        {
            "layer": row.layer,
            "kind": row.kind,
            "parameters": row.parameters,
            "calls": row.calls,
            "private": _cost_facts(row.private, row.private_seconds),
            "non-private": _cost_facts(row.plain, row.plain_seconds),
        }
        for row in rows_of(model, measured)
    ]


def _cost_facts(cost: Cost, seconds: float) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "bytes": cost.bytes,
        "flops": cost.flops,
        "random_words": cost.random_words,
        "launches": cost.launches,
    }


def table(model: nn.Module, measured: Measured) -> ReportTable:
    """Build a table with one row per layer."""
    rows = [
        (
            *(row.layer, row.kind, row.parameters, row.calls),
            *(1e3 * row.private_seconds, 1e3 * row.plain_seconds, row.ratio),
            *(row.private.bytes / 1e6, row.plain.bytes / 1e6),
            *(row.private.flops / 1e6, row.plain.flops / 1e6, row.private.random_words),
        )
        for row in rows_of(model, measured)
    ]
    return ReportTable(
        title="Layers",
        columns=(
            *("layer", "module", "parameters", "op calls"),
            *("private, ms", "non-private, ms", "ratio", "private, MB", "non-private, MB"),
            *("private, MFLOP", "non-private, MFLOP", "random words"),
        ),
        rows=rows,
        note="Time of a layer: its forward and backward pass and its part of norms, sums and "
        "update. Bytes and FLOPs: of dpkern's ops by formula, of torch's operations as seen.",
    )


def figures(model: nn.Module, measured: Measured) -> list[Figure]:
    """Draw bars per layer: time, bytes, FLOPs, and private over non-private."""
    rows = _shown(rows_of(model, measured))
    names = [row.label for row in rows]

    def bars(name: str, title: str, caption: str, unit: str, values: Any) -> Figure:
        return Figure(
            name=name,
            title=title,
            caption=caption,
            kind="bars",
            x_label="",
            y_label=unit,
            series=[Series(label=k, x=names, y=v) for k, v in values.items()],
            horizontal=True,
        )

    return [
        bars(
            "layer-time",
            "Time per layer",
            "Forward and backward pass, norms, sums, noise and update of each layer.",
            "milliseconds",
            {
                "non-private": [1e3 * row.plain_seconds for row in rows],
                "private": [1e3 * row.private_seconds for row in rows],
            },
        ),
        bars(
            "layer-bytes",
            "Memory traffic per layer",
            "Bytes at the edges of all operations, each operand once.",
            "megabytes",
            {
                "non-private": [row.plain.bytes / 1e6 for row in rows],
                "private": [row.private.bytes / 1e6 for row in rows],
            },
        ),
        bars(
            "layer-flops",
            "Floating-point operations per layer",
            "Products and convolutions of torch, and all that dpkern's ops declare.",
            "millions",
            {
                "non-private": [row.plain.flops / 1e6 for row in rows],
                "private": [row.private.flops / 1e6 for row in rows],
            },
        ),
        bars(
            "layer-ratios",
            "Private over non-private, per layer",
            "1 is no overhead.",
            "ratio",
            {
                "time": [row.ratio for row in rows],
                "bytes": [_over(row.private.bytes, row.plain.bytes) for row in rows],
                "FLOPs": [_over(row.private.flops, row.plain.flops) for row in rows],
            },
        ),
    ]


def _over(a: int, b: int) -> float | None:
    return a / b if b else None


def _shown(rows: list[LayerRow]) -> list[LayerRow]:
    """Return the layers that take most time, in the model's order, and all others as one."""
    if len(rows) <= SHOWN:
        return rows
    slowest = sorted(rows[:-1], key=lambda row: -row.private_seconds)[: SHOWN - 2]
    kept = [row for row in rows[:-1] if row in slowest]
    others = [row for row in rows[:-1] if row not in slowest]
    together = LayerRow(
        layer=f"({len(others)} further layers)",
        kind="",
        parameters=sum(row.parameters for row in others),
        private=_sum([row.private for row in others]),
        plain=_sum([row.plain for row in others]),
        private_seconds=sum(row.private_seconds for row in others),
        plain_seconds=sum(row.plain_seconds for row in others),
        calls=sum(row.calls for row in others),
    )
    return [*kept, together, rows[-1]]


def _sum(costs: list[Cost]) -> Cost:
    return Cost(*(sum(column) for column in zip(*map(fields_of, costs), strict=True)))

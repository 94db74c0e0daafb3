"""One record's effect on a clipped sum, with records made to break it.

*Exact tier*: the contribution of a record is what the sum is with it alone, in integers. Its norm,
in exact arithmetic, is at most C, and the sum of a batch minus the sum without the record equals
it. *Float tier*: the record's own term is at most C. What its removal does to the rounding of all
other terms is measured on cancelling batches and reported; that is no bound.

The same checks must refuse a naive float32 clip.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from dpkern.base.laws import SCALE_UNITS
from dpkern.ops import clip, testing

BATCH = 40
LONG_ROW = 1 << 25
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
SIGMAS = (2.0**-4, 0.3, 1.0, 1.1, 64.0, 2.0**10)
Row = Callable[[int, float, float, torch.Generator], torch.Tensor]
"""``(length, C, u, generator)`` -> one record in float64, before it is cast."""


def _normal(d: int, g: torch.Generator) -> torch.Tensor:
    return torch.randn(d, generator=g, dtype=torch.float64)


def _uniform(low: float, high: float, g: torch.Generator) -> float:
    return low + (high - low) * float(torch.rand(1, generator=g, dtype=torch.float64))


def _with_norm(x: torch.Tensor, norm: float) -> torch.Tensor:
    return x * (norm / max(float(x.norm()), 1e-300))


def _near(g: torch.Generator) -> float:
    """1 plus or minus anything from 1e-17 to 1e-5."""
    return 1 + (-1) ** int(_uniform(0, 2, g)) * 10 ** _uniform(-17, -5, g)


def _spike(d: int, c: float, u: float, g: torch.Generator) -> torch.Tensor:
    x = _normal(d, g) * c * 10 ** _uniform(-12, -1, g)
    x[int(_uniform(0, d, g))] = c * _near(g)
    return x


def _poisoned(d: int, c: float, u: float, g: torch.Generator) -> torch.Tensor:
    x = _normal(d, g)
    x[int(_uniform(0, d, g))] = (math.nan, math.inf, -math.inf)[int(_uniform(0, 3, g))]
    return x


def _bits(d: int, c: float, u: float, g: torch.Generator) -> torch.Tensor:
    words = torch.randint(-(2**31), 2**31, (d,), generator=g).to(torch.int32)
    x = words.view(torch.float32).double()
    return torch.where(torch.isfinite(x), x, torch.zeros_like(x))


ROWS: dict[str, Row] = {
    "normal": lambda d, c, u, g: _normal(d, g) * c * 10 ** _uniform(-4, 4, g),
    "norm near C": lambda d, c, u, g: _with_norm(_normal(d, g), c * _near(g)),
    "norm near the aim": lambda d, c, u, g: _with_norm(_normal(d, g), c * clip.SLACK * _near(g)),
    "equal entries": lambda d, c, u, g: torch.full(
        (d,), c / math.sqrt(d) * _near(g), dtype=torch.float64
    ),
    "alternating": lambda d, c, u, g: (
        c * 10 ** _uniform(-3, 3, g) * (1 - 2.0 * (torch.arange(d, dtype=torch.float64) % 2))
    ),
    "spike and dust": _spike,
    "lattice edges": lambda d, c, u, g: (
        torch.randint(-9, 10, (d,), generator=g).double() * u * _near(g)
    ),
    "half units": lambda d, c, u, g: (
        (torch.randint(-9, 10, (d,), generator=g).double() + 0.5) * u * _near(g)
    ),
    "huge": lambda d, c, u, g: (2 * torch.rand(d, generator=g, dtype=torch.float64) - 1) * 3.3e38,
    "1e38": lambda d, c, u, g: torch.full((d,), 1e38, dtype=torch.float64),
    "denormal": lambda d, c, u, g: _normal(d, g) * 1e-43,
    "all magnitudes": lambda d, c, u, g: (
        _normal(d, g) * 10 ** (torch.rand(d, generator=g, dtype=torch.float64) * 80 - 44)
    ),
    "random bits": _bits,
    "not finite": _poisoned,
    "zero": lambda d, c, u, g: torch.zeros(d, dtype=torch.float64),
    "C alone": lambda d, c, u, g: torch.nn.functional.pad(
        torch.tensor([c * _near(g)], dtype=torch.float64), (0, d - 1)
    ),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to clip: who runs it, how, with which bounds."""

    backend: str
    isa: str | None
    threads: int
    style: str
    p: int
    dtype: torch.dtype
    widths: tuple[int, ...]
    bounds: tuple[float, ...]
    sigma: float

    @contextmanager
    def active(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(testing.threads(self.threads))
            if self.isa is not None:
                stack.enter_context(testing.isa(self.isa))
            yield

    @property
    def units(self) -> tuple[float, ...]:
        return tuple(self.sigma * bound / SCALE_UNITS for bound in self.bounds)

    def clip(
        self,
        grads: Sequence[torch.Tensor],
        arithmetic: str,
        out: Sequence[torch.Tensor] | None = None,
    ) -> clip.ClipResult:
        each = self.style == "per_layer"
        unit = (list(self.units) if each else self.units[0]) if arithmetic == "exact" else None
        return clip.clip_sum(
            grads,
            list(self.bounds) if each else self.bounds[0],
            p=self.p,
            style=self.style,
            arithmetic=arithmetic,
            unit=unit,
            out=out,
            backend=self.backend,
        )

    def groups(self, sums: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, float, float]]:
        """``(flat contribution, C, u)`` per clip group."""
        if self.style == "per_layer":
            flat = [total.flatten() for total in sums]
            return list(zip(flat, self.bounds, self.units, strict=True))
        return [(torch.cat([t.flatten() for t in sums]), self.bounds[0], self.units[0])]


def random_setting(chance: random.Random, widest: int = 2000) -> Setting:
    isas = testing.available_isas()
    native = bool(isas) and chance.random() < 0.8
    widths = tuple(
        chance.choice((1, 2, 7, 33, 300, chance.randint(1, widest)))
        for _ in range(chance.choice((1, 1, 2, 3)))
    )
    if chance.random() < 0.03:
        widths = (9000, *widths)  # more than one block of columns, work for two threads
    style = chance.choice(clip.STYLES)
    sizes = [10 ** chance.uniform(-4, 4) for _ in widths]
    if chance.random() < 0.1:
        sizes = [chance.choice((2.0**-96, 2.0**-20, 1.0, 2.0**30, 2.0**96)) for _ in widths]
    return Setting(
        backend="cpu" if native else "reference",
        isa=chance.choice(isas) if native else None,
        threads=chance.choice((1, 2)),
        style=style,
        p=chance.choice((1, 2)),
        dtype=chance.choice(DTYPES),
        widths=widths,
        bounds=tuple(sizes) if style == "per_layer" else (sizes[0],) * len(widths),
        sigma=chance.choice(SIGMAS),
    )


def records(
    setting: Setting, count: int, chance: random.Random
) -> tuple[list[torch.Tensor], list[str]]:
    """``count`` records, each of a random family, as tensors ``[count, width]``."""
    g = torch.Generator().manual_seed(chance.randrange(2**62))
    names = [chance.choice(list(ROWS)) for _ in range(count)]
    length = sum(setting.widths)
    rows = [ROWS[name](length, setting.bounds[0], setting.units[0], g) for name in names]
    whole = torch.stack(rows).to(setting.dtype)
    return list(whole.split(list(setting.widths), dim=1)), names


def exact_power(q: torch.Tensor, p: int) -> int:
    """``sum |q|^p`` as a Python integer, without overflow for entries below 2^31."""
    magnitudes = q.to(torch.int64).abs()
    if q.numel() and int(magnitudes.max()) >= 1 << 31:
        raise AssertionError(f"an entry of {int(magnitudes.max())} units")
    if p == 1:
        return int(magnitudes.sum())
    low, high = magnitudes & 0xFFFF, magnitudes >> 16
    parts = [int((a * b).sum()) for a, b in ((high, high), (high, low), (low, low))]
    return (parts[0] << 32) + (parts[1] << 17) + parts[2]


def within(q: torch.Tensor, p: int, bound: float, unit: float) -> bool:
    """Whether ``||q||_p u <= C``, in rational arithmetic."""
    return exact_power(q, p) * Fraction(unit) ** p <= Fraction(bound) ** p


def relative_norm(term: torch.Tensor, p: int, bound: float) -> float:
    """``||term||_p / C`` in float64; its own rounding is below 1e-12, the margin is 4.8e-7."""
    scaled = term.double() / bound
    return float(scaled.abs().sum()) if p == 1 else math.sqrt(float(scaled.square().sum()))


@dataclass
class Tally:
    """The observations of the checks."""

    records: int = 0
    dropped: int = 0
    over: list[str] = field(default_factory=list)
    unequal: list[str] = field(default_factory=list)
    poisoned: list[str] = field(default_factory=list)
    float_over: list[str] = field(default_factory=list)
    settings: Counter[str] = field(default_factory=Counter)
    largest: float = 0.0
    float_largest: float = 0.0

    @property
    def passed(self) -> bool:
        return self.records > 0 and not (
            self.over or self.unequal or self.poisoned or self.float_over
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "records": self.records,
            "dropped as not finite": self.dropped,
            "exact: contributions above C": len(self.over),
            "exact: largest norm / C": self.largest,
            "exact: remove-one differences that are not the contribution": len(self.unequal),
            "non-finite records that contributed": len(self.poisoned),
            "float: own terms above C": len(self.float_over),
            "float: largest own norm / C": self.float_largest,
            "records by setting": dict(sorted(self.settings.items())),
            "faults": (self.over + self.unequal + self.poisoned + self.float_over)[:20],
        }


def _without(grads: Sequence[torch.Tensor], i: int) -> list[torch.Tensor]:
    return [torch.cat((g[:i], g[i + 1 :])) for g in grads]


def _wide(result: clip.ClipResult) -> list[torch.Tensor]:
    return [total.to(torch.int64) for total in result.sums]


def check_batch(
    setting: Setting, grads: Sequence[torch.Tensor], names: Sequence[str], tally: Tally
) -> None:
    """All checks on one batch; every record counts once."""
    batch = len(names)
    with setting.active():
        whole = _wide(setting.clip(grads, "exact"))
        rest = [torch.zeros_like(total) for total in whole]
        for i, name in enumerate(names):
            where = f"{name}: {setting}"
            alone = [g[i : i + 1] for g in grads]
            result = setting.clip(alone, "exact")
            own = _wide(result)
            for total, q in zip(rest, own, strict=True):
                total.add_(q)
            for q, bound, unit in setting.groups(own):
                if not within(q, setting.p, bound, unit):
                    tally.over.append(where)
                scaled = exact_power(q, setting.p) ** (1 / setting.p) * unit / bound
                tally.largest = max(tally.largest, scaled)
            term = setting.clip(alone, "float")
            for value, bound, _ in setting.groups(term.sums):
                relative = relative_norm(value, setting.p, bound)
                tally.float_largest = max(tally.float_largest, relative)
                if not relative <= 1:
                    tally.float_over.append(f"{relative} x C, {where}")
            finite = all(bool(torch.isfinite(g).all()) for g in alone)
            touched = any(bool(t.any()) for t in (*own, *term.sums))
            if not finite and (touched or result.nonfinite != 1 or term.nonfinite != 1):
                tally.poisoned.append(where)
            tally.dropped += result.nonfinite
        if any(not torch.equal(a, b) for a, b in zip(whole, rest, strict=True)):
            tally.unequal.append(f"sum of contributions: {setting}")
        for i in {0, batch // 2, batch - 1}:
            own = _wide(setting.clip([g[i : i + 1] for g in grads], "exact"))
            removed = _wide(setting.clip(_without(grads, i), "exact"))
            same = (torch.equal(a - b, q) for a, b, q in zip(whole, removed, own, strict=True))
            if not all(same):
                tally.unequal.append(f"{names[i]}: {setting}")
        halves = setting.clip([g[: batch // 2] for g in grads], "exact")
        sums = [total.to(torch.int64) for total in halves.sums]
        setting.clip([g[batch // 2 :] for g in grads], "exact", out=sums)
        if any(not torch.equal(a, b) for a, b in zip(whole, sums, strict=True)):
            tally.unequal.append(f"two physical batches: {setting}")
    tally.records += batch
    kinds = (setting.isa or setting.backend, setting.style, f"L{setting.p}", setting.dtype)
    names_of = [*map(str, kinds), f"{setting.threads} threads", f"{len(setting.widths)} tensors"]
    tally.settings.update(dict.fromkeys(names_of, batch))


def sweep(n: int, seed: int = 0, batch: int = BATCH) -> Tally:
    """``n`` adversarial records in batches, each batch under a random setting."""
    chance, tally = random.Random(seed), Tally()
    while tally.records < n:
        setting = random_setting(chance)
        grads, names = records(setting, min(batch, n - tally.records), chance)
        check_batch(setting, grads, names, tally)
    return tally


def long_rows(length: int = LONG_ROW, values: tuple[float, ...] = (1.0, -1e38, 1e-40)) -> Tally:
    """Records of ``length`` equal entries, one at a time: 0.1 GB each."""
    tally = Tally()
    isas = testing.available_isas()
    runners = [("reference", None, 1)]
    runners += [("cpu", isas[0], 1), ("cpu", isas[-1], 2)] if isas else []
    for dtype in (torch.float32, torch.bfloat16):
        for value in values:
            row = torch.full((1, length), value).to(dtype)
            for backend, isa, threads in runners:
                for p in (1, 2):
                    setting = Setting(
                        backend=backend,
                        isa=isa,
                        threads=threads,
                        style="flat",
                        p=p,
                        dtype=dtype,
                        widths=(length,),
                        bounds=(1.0,),
                        # Small units: many entries round to something.
                        sigma=2.0**-4,
                    )
                    _check_one(setting, row, value, tally)
    return tally


def _check_one(setting: Setting, row: torch.Tensor, value: float, tally: Tally) -> None:
    where = f"{row.shape[1]} times {value}: {setting}"
    with setting.active():
        q = setting.clip([row], "exact").sums[0]
        if not within(q, setting.p, setting.bounds[0], setting.units[0]):
            tally.over.append(where)
        size = exact_power(q, setting.p) ** (1 / setting.p) * setting.units[0]
        tally.largest = max(tally.largest, size / setting.bounds[0])
        del q
        term = setting.clip([row], "float").sums[0]
    relative = relative_norm(term, setting.p, setting.bounds[0])
    tally.float_largest = max(tally.float_largest, relative)
    if not relative <= 1:
        tally.float_over.append(f"{relative} x C, {where}")
    tally.records += 1


def naive_clip(row: torch.Tensor, bound: float) -> torch.Tensor:
    """The usual clip, all in float32."""
    return row * (bound / torch.linalg.vector_norm(row)).clamp(max=1.0)


def naive_over(n: int, seed: int = 0) -> dict[str, Any]:
    """Count how often, and how far, naive terms exceed C by the float tier's own check."""
    g = torch.Generator().manual_seed(seed)
    over, largest = 0, 0.0
    for _ in range(n):
        row = _normal(int(_uniform(1, 300, g)), g).float() * 5
        relative = relative_norm(naive_clip(row, 1.0), 2, 1.0)
        over += relative > 1
        largest = max(largest, relative)
    return {"records": n, "above C": over, "largest norm / C": largest}


def stagnant_norm(length: int = LONG_ROW) -> float:
    """``||term|| / C`` if squares are added in float32, one after another."""
    squares = np.ones(length, dtype=np.float32)
    last = float(np.add.accumulate(squares, out=squares)[-1])
    return math.sqrt(length / last)


def cancelling(kind: str, batch: int, d: int, g: torch.Generator) -> torch.Tensor:
    """Batches whose partial sums grow large and end near zero."""
    half = torch.randn(batch // 2, d, generator=g) * 10
    if kind == "half against half":
        return torch.cat((half.abs(), -half.abs()))
    if kind == "one direction and back":
        direction = torch.randn(d, generator=g) * 10
        signs = torch.ones(batch, 1)
        signs[batch // 2 :] = -1
        return direction * signs * (1 + 1e-3 * torch.rand(batch, 1, generator=g))
    if kind == "pairs":
        return torch.stack((half, -half), dim=1).flatten(0, 1)
    raise AssertionError(kind)


def rounding_trap(batch: int) -> torch.Tensor:
    """One coordinate, C = 1: with sample 0 the float32 sum stands just above 2^13, else below it.

    Above, the grid is twice as coarse. Then +3 and three times -1 (in units of the finer grid) come
    back to the start below 2^13, but every tie above it rounds upwards: the sums drift apart by
    four units per four samples.
    """
    unit = 2.0**-11
    climb = (1 << 24) // 2047
    rest = (batch - 1 - climb) // 4
    turns = torch.tensor([3.0, -1.0, -1.0, -1.0]).repeat(max(0, rest))
    return torch.cat((torch.full((1 + min(climb, batch - 1),), 2047.0), turns))[:, None] * unit


def removal_figures(batch: int, d: int = 64, removed: int = 6, seed: int = 0) -> dict[str, Any]:
    """``max ||sum - sum without i||_2 / C`` over some i: measured, not a bound."""
    g = torch.Generator().manual_seed(seed)
    kinds = ("half against half", "one direction and back", "pairs")
    batches = {kind: cancelling(kind, batch, d, g) for kind in kinds}
    batches["rounding trap (1 coordinate)"] = rounding_trap(batch)
    figures: dict[str, Any] = {"samples": batch, "coordinates": d}
    for kind, rows in batches.items():
        for backend in testing.available_backends():
            whole = clip.clip_sum(rows, 1.0, backend=backend).sums[0].double()
            worst = 0.0
            for i in torch.linspace(0, len(rows) - 1, removed).long().tolist():
                rest = clip.clip_sum(_without([rows], i), 1.0, backend=backend).sums[0].double()
                worst = max(worst, float((whole - rest).norm()))
            figures[f"{kind}, {backend}"] = worst
    return figures


def run(n: int = 10**5, seed: int = 0) -> dict[str, Any]:
    """``n`` adversarial records, long rows, negative controls, and the float tier's removals."""
    started = time.perf_counter()
    long = LONG_ROW if n >= 10**5 else 1 << 18
    records_seen, rows_seen = sweep(n, seed), long_rows(long)
    control = {"float32 clip": naive_over(min(n, 10**4), seed), "float32 norm": stagnant_norm()}
    return {
        "passed": records_seen.passed
        and rows_seen.passed
        and control["float32 clip"]["above C"] > 0
        and control["float32 norm"] > 1.4,
        "figures": {
            "records": records_seen.to_dict(),
            "long rows": {"entries": long, **rows_seen.to_dict()},
            "negative control": control,
            "float tier, removal of one sample / C (measured, no bound)": [
                removal_figures(batch, seed=seed) for batch in (64, 2000, 20_000)
            ],
        },
        "seconds": round(time.perf_counter() - started, 1),
    }


def headline(figures: dict[str, Any]) -> str:
    """One line for the table."""
    seen = figures["records"]
    removals = figures["float tier, removal of one sample / C (measured, no bound)"]
    worst = max(value for row in removals for name, value in row.items() if ", " in name)
    unequal = seen["exact: remove-one differences that are not the contribution"]
    return (
        f"above C: {seen['exact: contributions above C']} exact, "
        f"{seen['float: own terms above C']} float terms; {unequal} unequal removals; "
        f"float removal up to {worst:.3g} C"
    )


if __name__ == "__main__":
    import json
    import sys

    print(json.dumps(run(int(float(sys.argv[1])) if len(sys.argv) > 1 else 10**5), indent=2))

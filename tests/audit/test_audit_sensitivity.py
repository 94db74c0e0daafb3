"""One record's effect on a sum: sound sums pass, and every known mistake fails its question."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dpkern.audit.exact_norm import power_sum
from dpkern.audit.findings import Check
from dpkern.audit.sensitivity import Summation, Summed, checks
from dpkern.base.errors import InvalidInput, PrivacyError
from dpkern.ops import clip
from dpkern.privacy.mechanisms import DPSGD
from dpkern.step import sums as _step_sums

C = 0.7
UNIT = C * 1.1 / 2**20
WIDTHS = (1, 3, 1000)


def by_name(found: tuple[Check, ...]) -> dict[str, bool | None]:
    assert {check.layer for check in found} == {"sensitivity"}
    return {check.name: check.passed for check in found}


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize(
    "values",
    [
        torch.tensor([1e-45, -3.4e38, 0.1, -0.0, 1.0]),
        torch.tensor([5e-324, 1e200, -1 / 3], dtype=torch.float64),
        torch.tensor([2**24, -(2**24), 3], dtype=torch.int32),
        torch.tensor([-(2**63), 2**63 - 1, 2**54 - 1], dtype=torch.int64),
        torch.tensor([-(2**53), 2**54 - 1, 2**27, 2**27 - 1], dtype=torch.int64),
        torch.randn(3000, generator=torch.Generator().manual_seed(0)).bfloat16(),
        torch.full((700,), (1 << 54) - 1),
        torch.zeros(0),
    ],
    ids=["float32", "float64", "int32", "int64", "halves", "bfloat16", "rows", "none"],
)
def test_power_sums_are_exact(values: Tensor, p: int) -> None:
    each = values.tolist()
    assert power_sum(values, p) == sum((abs(Fraction(v)) ** p for v in each), Fraction(0))


def test_what_has_no_norm() -> None:
    with pytest.raises(InvalidInput, match="values: expected finite"):
        power_sum(torch.tensor([1.0, math.nan]), 2)
    with pytest.raises(InvalidInput, match="p: expected one of"):
        power_sum(torch.ones(2), 3)


def ours(arithmetic: str, p: int = 2, backend: str | None = None) -> Summed:
    unit = UNIT if arithmetic == "exact" else None

    def summed(records: Tensor) -> Tensor:
        result = clip.clip_sum(records, C, p=p, arithmetic=arithmetic, unit=unit, backend=backend)
        return result.sums[0]

    return summed


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("arithmetic", ["exact", "float"])
def test_our_clip_passes(arithmetic: str, dtype: torch.dtype, p: int, backend: str) -> None:
    unit = UNIT if arithmetic == "exact" else None
    found = checks(
        Summation(
            summed=ours(arithmetic, p, backend),
            bound=C,
            p=p,
            unit=unit,
            dtype=dtype,
            widths=(*WIDTHS, 9999),
        )
    )
    passed = by_name(found)
    assert passed.pop("batch given twice") is None
    assert all(passed.values()), found
    bounded = found[0].numbers
    assert 0.99999 < float(bounded["worst"]) <= 1
    assert int(bounded["records"]) > 100


SHAPES = [(3, 5), (7,), (40, 2)]
SIZES = [math.prod(shape) for shape in SHAPES]
STYLES: dict[str, dict[str, Any]] = {
    "flat": {"max_grad_norm": 0.7},
    "per-layer": {"max_grad_norm": (0.1, 0.2, 3.0), "clipping": "per_layer"},
    "group": {"max_grad_norm": (0.1, 0.5), "clipping": "group", "groups": (0, 1, 0)},
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("arithmetic", ["exact", "float"])
def test_the_sums_of_our_steps_pass(style: str, arithmetic: str) -> None:
    """All parameters together, as a step adds them: the groups' bounds as one."""
    plan = DPSGD(noise_multiplier=1.1, arithmetic=arithmetic, **STYLES[style]).plan(SHAPES)

    def summed(records: Tensor) -> Tensor:
        parts = zip(torch.split(records, SIZES, dim=1), SHAPES, strict=True)
        per_sample = [part.reshape(len(records), *shape) for part, shape in parts]
        result = _step_sums.clipped(per_sample, plan, None, None)
        return torch.cat([total.flatten() for total in result.sums])

    bound = math.hypot(*plan.group_bounds)
    unit = plan.units[0] if arithmetic == "exact" else None
    widths = (sum(SIZES),)
    found = checks(Summation(summed=summed, bound=bound, unit=unit, widths=widths, slack=1e-15))
    assert False not in by_name(found).values(), found
    # The sum is audited against the groups together: half of that is too little.
    less = checks(Summation(summed=summed, bound=bound / 2, unit=unit, widths=widths))
    assert by_name(less)["bounded norm"] is False


def factor(records: Tensor) -> Tensor:
    """Clip factors in float64, rounded to float32: the usual clip without our slack."""
    norms = records.double().norm(dim=1)
    return (C / norms).clamp(max=1).nan_to_num(0.0, 0.0, 0.0).float()[:, None]


def naive(records: Tensor) -> Tensor:
    return (records * (C / records.norm(dim=1)).clamp(max=1)[:, None]).sum(0)


def safe(records: Tensor) -> Tensor:
    """A sound float64 sum: an inch below the bound, finite records only."""
    wide = records.double()
    norms = wide.norm(dim=1)
    good = torch.isfinite(norms)
    scale = (C * (1 - 1e-12) / norms[good]).clamp(max=1)
    return (wide[good] * scale[:, None]).sum(0)


def without_slack(records: Tensor) -> Tensor:
    good = torch.isfinite(records).all(dim=1)
    return (records[good] * factor(records[good])).sum(0)


def sequential(records: Tensor) -> Tensor:
    """Squares added one by one in float32: the sum stops growing; an inch below the bound."""
    total = records.new_zeros(records.shape[1])
    for row in records[torch.isfinite(records.double().norm(dim=1))]:
        with np.errstate(over="ignore"):
            square = np.cumsum(np.square(row.numpy()), dtype=np.float32)[-1]
        total += row * min(1.0, C * (1 - 1e-5) / max(math.sqrt(float(square)), 1e-30))
    return total


def poisoned(records: Tensor) -> Tensor:
    """Records that are not finite get weight 0, and 0 times NaN is NaN."""
    return (records * factor(records)).sum(0) * (1 - 1e-6)


def normalised(records: Tensor) -> Tensor:
    """Records centred by their batch, as batch normalisation does."""
    return safe(
        records - records.nan_to_num().mean(0, keepdim=True) if len(records) > 1 else records
    )


def clip_of_the_mean(records: Tensor) -> Tensor:
    return safe(safe(records)[None] * 3) if len(records) else safe(records)


def of_position(records: Tensor) -> Tensor:
    """Later records count less."""
    return sum((safe(row[None]) / (1 + i) for i, row in enumerate(records)), safe(records[:0]))


def coarse(records: Tensor) -> Tensor:
    """Each call rounds its whole sum to a grid of its own."""
    return (safe(records) * 256).round() / 256 * (1 - 2**-6)


def mean(records: Tensor) -> Tensor:
    return safe(records) / len(records)


def refuses_nothing(records: Tensor) -> Tensor:
    if not len(records):
        raise InvalidInput("records", expected="records", got="none", remedy="Pass some.")
    return safe(records)


class Adding:
    """Adds to what the last call left behind."""

    def __init__(self) -> None:
        self.left: Tensor | None = None

    def __call__(self, records: Tensor) -> Tensor:
        total = safe(records)
        if self.left is not None and self.left.shape == total.shape:
            total = total + self.left
        self.left = total
        return total


BROKEN: list[tuple[str, Callable[[], Summed], set[str]]] = [
    ("naive", lambda: naive, {"bounded norm", "records that are not finite"}),
    ("without slack", lambda: without_slack, {"bounded norm"}),
    ("sequential", lambda: sequential, {"bounded norm"}),
    ("poisoned", lambda: poisoned, {"records that are not finite"}),
    ("normalised", lambda: normalised, {"remove one record"}),
    ("clip of the mean", lambda: clip_of_the_mean, {"remove one record", "parts of a batch"}),
    ("of position", lambda: of_position, {"order"}),
    ("coarse", lambda: coarse, {"parts of a batch"}),
    ("mean", lambda: mean, {"empty batch", "remove one record"}),
    ("refuses nothing", lambda: refuses_nothing, {"empty batch"}),
    ("adding", Adding, {"bounded norm", "repeated call"}),
]


@pytest.mark.parametrize(("make", "fails"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN])
def test_a_mistake_fails_its_question(make: Callable[[], Summed], fails: set[str]) -> None:
    widths = (*WIDTHS, 1 << 16) if make() is sequential else WIDTHS
    found = by_name(checks(Summation(summed=make(), bound=C, widths=widths)))
    assert fails <= {name for name, passed in found.items() if passed is False}, found


def test_a_sound_sum_passes() -> None:
    found = by_name(checks(Summation(summed=safe, bound=C, widths=WIDTHS)))
    assert False not in found.values()
    assert [name for name, passed in found.items() if passed is None] == ["batch given twice"]


def test_slack_is_a_part_of_the_bound() -> None:
    """Float32 exceeds by some 1e-7: not by a millionth."""
    loose = Summation(summed=without_slack, bound=C, widths=WIDTHS, slack=1e-6)
    assert by_name(checks(loose))["bounded norm"] is True


def test_integers_are_compared_exactly() -> None:
    """One unit more than M is an excess, of one record and of a difference."""
    exact = ours("exact")
    most = math.floor(Fraction(C) / Fraction(UNIT))
    one = Summation(summed=exact, bound=C, unit=UNIT)
    at, over = torch.tensor([most, 0]), torch.tensor([most, 1400])
    assert one.excess(at) <= 1 < one.excess(over)
    assert one.excess(torch.tensor([most + 1])) > 1

    def leaking(records: Tensor) -> Tensor:
        total = exact(records)
        total[0] += len(records) > 11
        return total

    found = by_name(checks(Summation(summed=leaking, bound=C, unit=UNIT, widths=WIDTHS)))
    assert {name for name, passed in found.items() if passed is False} == {
        "remove one record",
        "parts of a batch",
    }


def refused(records: Tensor) -> Tensor:
    raise PrivacyError("backward", expected="one pass", got="two", remedy="Release first.")


@pytest.mark.parametrize(
    ("twice", "passed"),
    [(lambda r: safe(torch.cat((r, r))), False), (refused, True), (safe, True), (None, None)],
    ids=["added", "refused", "ignored", "unknown"],
)
def test_a_batch_given_twice(twice: Summed | None, passed: bool | None) -> None:
    found = checks(Summation(summed=safe, bound=C, widths=WIDTHS, twice=twice))
    assert by_name(found)["batch given twice"] is passed


def test_a_refused_record_is_no_answer() -> None:
    def strict(records: Tensor) -> Tensor:
        if not bool(torch.isfinite(records).all()):
            raise InvalidInput("records", expected="finite", got="NaN", remedy="Clean them.")
        return safe(records)

    assert (
        by_name(checks(Summation(summed=strict, bound=C, widths=WIDTHS)))[
            "records that are not finite"
        ]
        is None
    )


@pytest.mark.parametrize(
    "change",
    [
        {"bound": 0.0},
        {"p": 3},
        {"unit": -1.0},
        {"widths": ()},
        {"widths": (0,)},
        {"dtype": torch.int32},
    ],
    ids=["bound", "p", "unit", "widths", "width", "dtype"],
)
def test_what_is_no_summation(change: dict[str, object]) -> None:
    with pytest.raises(InvalidInput):
        Summation(**{"summed": safe, "bound": C, **change})  # type: ignore[arg-type]

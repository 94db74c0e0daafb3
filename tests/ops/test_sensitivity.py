"""No record contributes more than C, and its removal takes away exactly what it contributed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpkern.base.laws import SCALE_UNITS
from dpkern.ops import clip, testing
from tests.evidence import sensitivity
from tests.evidence.sensitivity import ROWS, SIGMAS, Setting, Tally
from tests.ops.backends.every_backend import every_backend

RUNNERS = [("reference", None), *(("cpu", isa) for isa in testing.available_isas())]
BOUNDS = (2.0**-96, 1e-4, 0.37, 1.0, 8.0, 2.0**96)


def checked(setting: Setting, grads: list[torch.Tensor]) -> Tally:
    tally = Tally()
    names = [f"row {i}" for i in range(len(grads[0]))]
    sensitivity.check_batch(setting, grads, names, tally)
    return tally


@pytest.mark.parametrize(("backend", "isa"), RUNNERS)
@pytest.mark.parametrize("style", clip.STYLES)
@pytest.mark.parametrize("p", [1, 2])
def test_adversarial_records(backend: str, isa: str | None, style: str, p: int) -> None:
    bounds = (0.7, 0.02, 3.0) if style == "per_layer" else (0.7,) * 3
    setting = Setting(
        backend=backend,
        isa=isa,
        threads=2,
        style=style,
        p=p,
        dtype=torch.float32,
        widths=(40, 1, 9),
        bounds=bounds,
        sigma=1.1,
    )
    g = torch.Generator().manual_seed(p)
    rows = [row(50, 0.7, setting.units[0], g) for row in ROWS.values() for _ in range(2)]
    grads = list(torch.stack(rows).float().split([40, 1, 9], dim=1))
    tally = checked(setting, grads)
    assert tally.passed, tally.to_dict()
    assert tally.dropped >= 2
    assert 0.999 < tally.largest <= 1
    assert 0.999 < tally.float_largest <= 1


def test_random_settings() -> None:
    tally = sensitivity.sweep(800, seed=1, batch=20)
    assert tally.passed, tally.to_dict()
    assert tally.records == 800


floats = st.one_of(
    st.floats(width=32),
    st.sampled_from([0.0, -0.0, 1.0, 1e38, -3.4e38, 1e-45, -1e-40, 1e-30, 0.37, 1.0000001]),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 9).flatmap(
        lambda d: st.lists(st.lists(floats, min_size=d, max_size=d), min_size=1, max_size=5)
    ),
    bound=st.sampled_from(BOUNDS),
    sigma=st.sampled_from(SIGMAS),
    style=st.sampled_from(clip.STYLES),
    p=st.sampled_from([1, 2]),
    dtype=st.sampled_from(sensitivity.DTYPES),
    runner=st.sampled_from(RUNNERS),
    cut=st.integers(0, 9),
)
def test_any_records(
    rows: list[list[float]],
    bound: float,
    sigma: float,
    style: str,
    p: int,
    dtype: torch.dtype,
    runner: tuple[str, str | None],
    cut: int,
) -> None:
    whole = torch.tensor(rows, dtype=torch.float64).to(dtype)
    d = whole.shape[1]
    widths = (min(cut, d), d - min(cut, d))
    setting = Setting(
        backend=runner[0],
        isa=runner[1],
        threads=1,
        style=style,
        p=p,
        dtype=dtype,
        widths=widths,
        bounds=(bound, bound * (1.0 if style != "per_layer" else 0.5 + 0.5 * (bound < 1))),
        sigma=sigma,
    )
    tally = checked(setting, list(whole.split(list(widths), dim=1)))
    assert tally.passed, tally.to_dict()


@pytest.mark.parametrize("value", [1.0, -1e38, 1e-40])
def test_long_rows_of_equal_entries(value: float) -> None:
    tally = sensitivity.long_rows(1 << 16, values=(value,))
    assert tally.passed, tally.to_dict()


@every_backend
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("p", [1, 2])
def test_a_norm_does_not_depend_on_the_batch(backend: str, threads: int, p: int) -> None:
    """If it did, removing one record would move the clip factors of the others."""
    rows = torch.randn(3, 150_001, generator=torch.Generator().manual_seed(0))
    with testing.threads(threads):
        together = clip.sample_norm(rows, p=p, backend=backend)
        alone = [clip.sample_norm(rows[i : i + 1], p=p, backend=backend) for i in range(3)]
        pair = clip.sample_norm(rows[1:], p=p, backend=backend)
    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(together[1:], pair)


@every_backend
@pytest.mark.parametrize("arithmetic", clip.ARITHMETIC)
def test_scalar_parameters_and_empty_batches(backend: str, arithmetic: str) -> None:
    unit = 1.0 / SCALE_UNITS if arithmetic == "exact" else None
    given = {"arithmetic": arithmetic, "unit": unit, "backend": backend}
    grads = [torch.tensor([3.0, 0.1]), torch.tensor([[4.0], [0.2]])]
    result = clip.clip_sum(grads, 1.0, **given)
    one = unit or 1.0
    assert float(result.sums[0]) * one == pytest.approx(0.7, abs=1e-5)
    assert float(result.sums[1][0]) * one == pytest.approx(1.0, abs=1e-5)
    nothing = clip.clip_sum([g[:0] for g in grads], 1.0, **given)
    assert nothing.norms.shape == (0,)
    assert [int(total.count_nonzero()) for total in nothing.sums] == [0, 0]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(-(2**31) + 1, 2**31 - 1), min_size=1, max_size=40))
def test_exact_power_is_exact(entries: list[int]) -> None:
    q = torch.tensor(entries)
    assert sensitivity.exact_power(q, 1) == sum(abs(x) for x in entries)
    assert sensitivity.exact_power(q, 2) == sum(x * x for x in entries)


def test_one_unit_too_much_is_seen() -> None:
    unit = 2.0**-20
    assert sensitivity.within(torch.tensor([1 << 20]), 2, 1.0, unit)
    assert not sensitivity.within(torch.tensor([(1 << 20) + 1]), 2, 1.0, unit)
    assert not sensitivity.within(torch.tensor([1 << 20, 1]), 2, 1.0, unit)
    assert not sensitivity.within(torch.tensor([1 << 20, -1]), 1, 1.0, unit)


def test_a_naive_float32_clip_is_caught() -> None:
    assert sensitivity.naive_over(300)["above C"] > 30
    assert sensitivity.stagnant_norm(1 << 25) == pytest.approx(2**0.5)


@pytest.mark.parametrize("break_it", ["term", "difference"])
def test_a_broken_clip_is_caught(break_it: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = clip.clip_sum

    def broken(grads: list[torch.Tensor], *args: object, **given: object) -> clip.ClipResult:
        result = honest(grads, *args, **given)  # type: ignore[arg-type]
        if given["arithmetic"] == "exact" and (break_it == "term" or len(grads[0]) > 1):
            result.sums[0].view(-1)[0] += 2 if break_it == "term" else 1
        return result

    monkeypatch.setattr(clip, "clip_sum", broken)
    g = torch.Generator().manual_seed(0)
    rows = torch.stack([ROWS["C alone"](6, 1.0, 2.0**-20, g) for _ in range(5)]).float()
    setting = Setting(
        backend="reference",
        isa=None,
        threads=1,
        style="flat",
        p=2,
        dtype=torch.float32,
        widths=(6,),
        bounds=(1.0,),
        sigma=1.0,
    )
    tally = checked(setting, [rows])
    assert not tally.passed
    assert bool(tally.over) == (break_it == "term")
    assert tally.unequal


@pytest.mark.skipif("cpu" not in testing.available_backends(), reason="no compiled kernels")
def test_the_float_tier_has_no_removal_bound() -> None:
    """What the documentation says of it: removing one sample can move a float sum by many C."""
    rows = sensitivity.rounding_trap(20_000)
    whole, rest = (clip.clip_sum(r, 1.0, backend="cpu").sums[0] for r in (rows, rows[1:]))
    assert float(whole - rest) > 5
    unit = 1.0 / SCALE_UNITS
    exact = [
        clip.clip_sum(r, 1.0, arithmetic="exact", unit=unit).sums[0].long()
        for r in (rows, rows[1:])
    ]
    assert 0 <= int(exact[0] - exact[1]) <= SCALE_UNITS

"""DP-SGD's plan and event: positions, bounds, certified multipliers, and what it refuses."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from fractions import Fraction
from typing import Any

import pytest

from dpkern.base.errors import DPKernError, InvalidInput, MissingDependency, PrivacyError
from dpkern.base.laws import SCALE_UNITS
from dpkern.privacy.mechanisms import DPSGD, Plan

SHAPES = [(3, 5), (7,), (), (512,), (600, 2), (1,)]
POSITIONS = (0, 512, 1024, 1536, 2048, 3584)


def dpsgd(**changes: Any) -> DPSGD:
    return DPSGD(**{"noise_multiplier": 1.1, "max_grad_norm": 0.7, **changes})


def test_positions_are_tiles_in_frozen_order() -> None:
    plan = dpsgd().plan(SHAPES)
    assert plan.positions == POSITIONS
    assert [block.shape for block in plan.blocks] == SHAPES
    assert [block.index for block in plan.blocks] == list(range(len(SHAPES)))
    assert plan.dimension == sum(math.prod(shape) for shape in SHAPES)
    ends = [block.first_position + block.size for block in plan.blocks]
    assert all(end <= start for end, start in zip(ends, POSITIONS[1:], strict=False))


@pytest.mark.parametrize("clipping", ["flat", "automatic"])
def test_flat_plan(clipping: str) -> None:
    plan = dpsgd(clipping=clipping).plan(SHAPES)
    assert {block.clip_group for block in plan.blocks} == {0}
    assert set(plan.bounds) == {0.7}
    assert set(plan.scales) == {1.1 * 0.7}
    assert set(plan.units) == {1.1 * 0.7 / SCALE_UNITS}
    assert plan.distribution == "gaussian"


@pytest.mark.parametrize("sigma", [2.0**-4, 0.3, 1.0, 1.1, 7.77, 1023.0])
@pytest.mark.parametrize("bound", [1e-12, 0.1, 1.0, math.pi, 12345.678])
def test_integer_bound_is_the_largest_that_fits(sigma: float, bound: float) -> None:
    plan = dpsgd(noise_multiplier=sigma, max_grad_norm=bound).plan([(4,)])
    (block,) = plan.blocks
    unit = Fraction(block.noise_scale) / SCALE_UNITS
    assert block.unit == float(unit)
    assert block.integer_bound is not None
    assert block.integer_bound * unit <= Fraction(bound) < (block.integer_bound + 1) * unit
    # The multiplier is 2^20 / M, at least sigma and at most one unit in M above it.
    exact = Fraction(SCALE_UNITS, block.integer_bound)
    assert Fraction(plan.noise_multiplier) <= exact
    assert plan.noise_multiplier == pytest.approx(float(exact), rel=1e-15)
    assert sigma * (1 - 1e-15) <= plan.noise_multiplier <= sigma * (1 + 2 * sigma / SCALE_UNITS)


@pytest.mark.parametrize(
    ("bounds", "layers"),
    [(1.3, 1), (1.3, 4), (1.3, 1000), ((0.5, 2.0, 1e-3), 3), ((1.0,) * 7, 7)],
    ids=["one", "shared4", "shared1000", "unequal", "equal"],
)
@pytest.mark.parametrize("arithmetic", ["exact", "float"])
def test_per_layer_event(bounds: Any, layers: int, arithmetic: str) -> None:
    mechanism = dpsgd(max_grad_norm=bounds, clipping="per_layer", arithmetic=arithmetic)
    plan = mechanism.plan([(10,)] * layers)
    each = bounds if isinstance(bounds, tuple) else (bounds / math.sqrt(layers),) * layers
    total = math.sqrt(sum(bound**2 for bound in each))
    assert plan.bounds == pytest.approx(each, rel=1e-15)
    assert len(set(plan.scales)) == 1
    assert plan.scales[0] == pytest.approx(1.1 * total, rel=1e-14)
    assert [block.clip_group for block in plan.blocks] == list(range(layers))
    # mu^2 = sum (C_l / sd)^2: a sample moves every layer at once, so the multiplier is sigma again.
    mu = math.sqrt(sum((bound / plan.scales[0]) ** 2 for bound in each))
    assert plan.noise_multiplier == pytest.approx(1 / mu, rel=1e-4)
    if arithmetic == "exact":
        squares = sum((block.integer_bound or 0) ** 2 for block in plan.blocks)
        assert Fraction(plan.noise_multiplier) ** 2 * squares <= SCALE_UNITS**2
    else:
        assert plan.noise_multiplier < 1 / mu


@pytest.mark.parametrize(
    ("bounds", "each"),
    [(1.2, (1.2 / math.sqrt(3),) * 3), ((0.5, 2.0, 1e-3), (0.5, 2.0, 1e-3))],
    ids=["shared", "unequal"],
)
@pytest.mark.parametrize("arithmetic", ["exact", "float"])
def test_group_event(bounds: Any, each: tuple[float, ...], arithmetic: str) -> None:
    groups = (1, 0, 2, 1, 2, 2)
    mechanism = dpsgd(max_grad_norm=bounds, clipping="group", groups=groups, arithmetic=arithmetic)
    plan = mechanism.plan(SHAPES)
    assert tuple(block.clip_group for block in plan.blocks) == groups
    assert plan.bounds == pytest.approx([each[g] for g in groups], rel=1e-15)
    assert plan.groups == ((1,), (0, 3), (2, 4, 5))
    assert plan.group_bounds == pytest.approx(each, rel=1e-15)
    # A sample moves three groups, not six parameters.
    same = dpsgd(max_grad_norm=each, clipping="per_layer", arithmetic=arithmetic)
    three = same.plan([(plan.dimension - 2,), (1,), (1,)])
    assert plan.spec == three.spec
    assert set(plan.scales) == set(three.scales)
    assert mechanism.event_spec()["noise_multiplier"] <= plan.noise_multiplier


def test_same_bound_in_every_layer_costs_the_square_root_of_layers() -> None:
    """Noise sigma C with bound C in each of 4 layers would certify sigma / 2, so sd is doubled."""
    plan = dpsgd(max_grad_norm=(0.7,) * 4, clipping="per_layer").plan([(1,)] * 4)
    assert plan.scales[0] == pytest.approx(2 * 1.1 * 0.7)


@pytest.mark.parametrize("dimension", [1, 10**6, 10**9])
def test_float_rounding_enlarges_the_sensitivity(dimension: int) -> None:
    exact = 1 / 1.1
    mu = 1 / dpsgd(arithmetic="float").event_spec(dimension)["noise_multiplier"]
    unit_over_sd = 1 / SCALE_UNITS
    assert mu == pytest.approx(exact + 2**-16 * math.sqrt(dimension) * unit_over_sd, rel=1e-12)
    assert mu > exact


@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])
@pytest.mark.parametrize("arithmetic", ["exact", "float"])
def test_configuration_never_claims_more_than_its_plans(clipping: str, arithmetic: str) -> None:
    mechanism = dpsgd(clipping=clipping, arithmetic=arithmetic)
    without_shapes = mechanism.event_spec()["noise_multiplier"]
    for layers in (1, 3, 100):
        plan = mechanism.plan([(1000,)] * layers)
        assert without_shapes <= plan.noise_multiplier
        assert mechanism.event_spec(plan.dimension)["noise_multiplier"] <= plan.noise_multiplier
        assert plan.event_spec() == plan.spec


@pytest.mark.parametrize(
    ("changes", "certified_for"),
    [
        ({}, "released bits"),
        ({"arithmetic": "float"}, "real-number sums"),
        ({"noise_multiplier": 0}, "nothing"),
        ({"max_grad_norm": math.inf}, "nothing"),
        ({"max_grad_norm": (1.0, math.inf), "clipping": "per_layer"}, "nothing"),
    ],
    ids=["exact", "float", "no noise", "no clip", "one layer unclipped"],
)
def test_certified_for(changes: dict[str, Any], certified_for: str) -> None:
    mechanism = dpsgd(**changes)
    plan = mechanism.plan([(3,), (4,)])
    assert mechanism.certified_for == plan.certified_for == certified_for
    assert plan.private == mechanism.private == (certified_for != "nothing")
    if not plan.private:
        assert plan.distribution is None
        assert plan.arithmetic == "float"
        assert set(plan.scales) == {0.0}
        assert set(plan.units) == {None}
        assert plan.noise_multiplier == 0
        assert type(mechanism.event()).__name__ == "NonPrivateDpEvent"


def test_event_is_computed_and_nothing_can_be_changed() -> None:
    mechanism = dpsgd()
    plan = mechanism.plan([(3,)])
    assert type(plan.event).__name__ == "GaussianDpEvent"
    assert plan.event.noise_multiplier == plan.noise_multiplier
    assert mechanism.neighbouring == plan.neighbouring == "add_remove"
    for target, field in ((mechanism, "noise_multiplier"), (plan, "spec"), (plan.blocks[0], "sd")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(target, field, 5.0)
    other = mechanism.with_noise_multiplier(2)
    assert (other.noise_multiplier, other.max_grad_norm) == (2.0, 0.7)
    assert mechanism.noise_multiplier == 1.1


def test_published_claims_sigma() -> None:
    mechanism = dpsgd(mode="published")
    assert mechanism.claimed_event_spec()["noise_multiplier"] == 1.1
    assert mechanism.plan([(3,)]).mode == "published"


BAD_FIELDS: list[tuple[str, dict[str, Any], type[DPKernError], str]] = [
    ("negative noise", {"noise_multiplier": -1.0}, InvalidInput, "noise_multiplier"),
    ("nan noise", {"noise_multiplier": math.nan}, InvalidInput, "noise_multiplier"),
    ("infinite noise", {"noise_multiplier": math.inf}, InvalidInput, "noise_multiplier"),
    ("text noise", {"noise_multiplier": "1"}, InvalidInput, "noise_multiplier"),
    ("bool noise", {"noise_multiplier": True}, InvalidInput, "noise_multiplier"),
    ("noise below range", {"noise_multiplier": 0.0624}, PrivacyError, "noise_multiplier"),
    ("noise above range", {"noise_multiplier": 1024.1}, PrivacyError, "noise_multiplier"),
    ("zero bound", {"max_grad_norm": 0.0}, InvalidInput, "max_grad_norm"),
    ("negative bound", {"max_grad_norm": -1.0}, InvalidInput, "max_grad_norm"),
    ("nan bound", {"max_grad_norm": math.nan}, InvalidInput, "max_grad_norm"),
    ("denormal bound", {"max_grad_norm": 1e-310}, InvalidInput, "max_grad_norm"),
    ("no bound", {"max_grad_norm": None}, InvalidInput, "max_grad_norm"),
    ("many bounds, one group", {"max_grad_norm": (1.0, 2.0)}, InvalidInput, "max_grad_norm"),
    (
        "no bounds",
        {"max_grad_norm": (), "clipping": "per_layer"},
        InvalidInput,
        "max_grad_norm",
    ),
    (
        "zero among bounds",
        {"max_grad_norm": (1.0, 0.0), "clipping": "per_layer"},
        InvalidInput,
        "max_grad_norm",
    ),
    ("groups, flat", {"groups": (0, 1)}, InvalidInput, "groups"),
    ("group without groups", {"clipping": "group"}, InvalidInput, "groups"),
    ("no groups", {"clipping": "group", "groups": ()}, InvalidInput, "groups"),
    ("groups with a gap", {"clipping": "group", "groups": (0, 2)}, InvalidInput, "groups"),
    ("negative group", {"clipping": "group", "groups": (0, -1)}, InvalidInput, "groups"),
    ("groups as text", {"clipping": "group", "groups": "01"}, InvalidInput, "groups"),
    (
        "bounds for other groups",
        {"clipping": "group", "groups": (0, 1), "max_grad_norm": (1.0,)},
        InvalidInput,
        "max_grad_norm",
    ),
    ("unknown clipping", {"clipping": "layer"}, InvalidInput, "clipping"),
    ("unknown arithmetic", {"arithmetic": "double"}, InvalidInput, "arithmetic"),
    ("unknown mode", {"mode": "fast"}, InvalidInput, "mode"),
    (
        "published per layer",
        {"mode": "published", "clipping": "per_layer"},
        InvalidInput,
        "clipping",
    ),
]


@pytest.mark.parametrize(
    ("changes", "error", "name"),
    [row[1:] for row in BAD_FIELDS],
    ids=[row[0] for row in BAD_FIELDS],
)
def test_refuses_bad_fields(changes: dict[str, Any], error: type[DPKernError], name: str) -> None:
    with pytest.raises(error) as raised:
        dpsgd(**changes)
    assert type(raised.value) is error
    assert raised.value.name == name


@pytest.mark.parametrize(
    ("changes", "shapes", "name"),
    [
        ({}, [], "shapes"),
        ({}, None, "shapes"),
        ({}, [3, 4], "shapes"),
        ({}, [(3, -1)], "shapes"),
        ({}, [(2.5,)], "shapes"),
        ({"max_grad_norm": (1.0,), "clipping": "per_layer"}, [(2,), (3,)], "max_grad_norm"),
        ({"clipping": "group", "groups": (0, 1)}, [(2,)], "groups"),
        (
            {"max_grad_norm": (1.0, 1e-7), "clipping": "per_layer"},
            [(2,), (3,)],
            "max_grad_norm",
        ),
    ],
    ids=[
        "empty",
        "none",
        "ints",
        "negative",
        "float",
        "too few bounds",
        "groups",
        "bound below unit",
    ],
)
def test_refuses_bad_shapes(changes: dict[str, Any], shapes: Any, name: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        dpsgd(**changes).plan(shapes)
    assert raised.value.name == name


def test_dimension_must_be_positive() -> None:
    with pytest.raises(InvalidInput, match="dimension"):
        dpsgd(arithmetic="float").event_spec(0)


def test_works_without_dp_accounting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    plan = dpsgd().plan([(3,)])
    assert isinstance(plan, Plan)
    assert plan.noise_multiplier >= 1.1
    with pytest.raises(MissingDependency, match="pip install dp-accounting"):
        _ = plan.event


def test_import_needs_only_torch_and_numpy() -> None:
    code = (
        "import sys, dpkern.mechanisms, dpkern.accounting, dpkern.engine.sampling\n"
        "print([m for m in ('dp_accounting', 'scipy', 'opacus') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"

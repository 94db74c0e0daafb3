"""Plans: places by released coordinates, and events that bound what one sample can do."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import pytest
import torch

from dpkern.base.errors import InvalidInput
from dpkern.base.laws import SCALE_UNITS
from dpkern.privacy.accounting import events
from dpkern.privacy.mechanisms import DPSGD, Block, DiagonalMap, PartialNoiseMap, Site, WhitenedCrop
from dpkern.privacy.mechanisms.base import OPTIONAL_IN_CHECKPOINT
from dpkern.privacy.mechanisms.certify import gaussian_spec, laplace_spec, why_not
from dpkern.privacy.mechanisms.notes import Note, notes
from dpkern.privacy.mechanisms.plan import assign_positions
from tests.engine.released_cases import CONV, SHAPES, Made, crop


def block(bound: float = 1.0, sd: float = 2.0, group: int = 0, **more: object) -> Block:
    return Block(shape=(4,), clip_group=group, bound=bound, noise_scale=sd, **more)  # type: ignore[arg-type]


def test_places_and_words_count_released_coordinates() -> None:
    noisy = PartialNoiseMap(site=CONV, noise=np.ones((4, 6)))
    plan = Made(releases=(crop(3), None, None)).plan(SHAPES)
    assert [b.release_shape for b in plan.blocks] == [(20, 10, 3), (20,), (9, 7)]
    assert plan.positions == (0, 1024, 1536)  # 600, 20 and 63 coordinates
    assert plan.dimension == 683
    assert plan.words["consumed"] == 900 + 30 + 95 + 300 + 10 + 32
    assert Made(releases=(noisy, None, None)).plan(SHAPES).positions == (0, 1536, 2048)
    identity = Made().plan(SHAPES)
    assert identity.direct
    assert not plan.direct
    assert identity.positions == DPSGD(noise_multiplier=1, max_grad_norm=1).plan(SHAPES).positions


MIXED = [
    block(1.0, 2.0),
    block(1.0, 0.5, sensitivity_factor=0.3),
    block(3.0, 4.0, group=1),
    block(3.0, 7.0, group=1, sensitivity_factor=2.0),
]


@pytest.mark.parametrize("p", [1, 2])
def test_the_multiplier_is_the_worst_contribution_and_reached(p: int) -> None:
    """Contributions whose clip norms meet every bound, in units of the noise."""
    law = gaussian_spec if p == 2 else laplace_spec
    mu = 1 / law(MIXED, "float")["noise_multiplier"]
    draws = np.random.default_rng(0)
    shares = [np.array(row) for row in ((1.0, 0.0), (0.0, 1.0))]
    shares += [draws.dirichlet((0.5, 0.5)) for _ in range(20)]
    reached = []
    for first, second in itertools.product(shares, shares):
        moved = 0.0
        for group, share in ((MIXED[:2], first), (MIXED[2:], second)):
            norms = group[0].bound * share ** (1 / p)  # clip norms of the two blocks
            for norm, one in zip(norms, group, strict=True):
                moved += (norm * one.sensitivity_factor / one.noise_scale) ** p
        reached.append(moved ** (1 / p))
    assert max(reached) <= mu
    assert max(reached) > 0.999999 * mu


def test_flat_takes_the_worst_noise_and_layers_add_squares() -> None:
    flat = gaussian_spec([block(sd=2.0), block(sd=1.5)], "float")
    assert flat["noise_multiplier"] == pytest.approx(1.5, rel=1e-6)
    layers = gaussian_spec([block(sd=2.0), block(sd=1.5, group=1)], "float")
    assert layers["noise_multiplier"] == pytest.approx(1 / math.hypot(1 / 2, 1 / 1.5), rel=1e-6)
    eight = [block(sd=2**-0.5, group=k) for k in range(8)]
    assert gaussian_spec(eight, "float")["noise_multiplier"] == pytest.approx(0.25, rel=1e-6)
    both = laplace_spec([block(sd=2.0), block(sd=1.5, group=1)], "float")
    assert both["noise_multiplier"] == pytest.approx(1 / (1 / 2 + 1 / 1.5), rel=1e-6)


def test_exact_events_count_lattice_units() -> None:
    blocks = [block(1.0, 3.0), block(2.0, 5.0, group=1)]
    units = [math.floor(SCALE_UNITS / 3.0), math.floor(2 * SCALE_UNITS / 5.0)]
    two = gaussian_spec(blocks, "exact")["noise_multiplier"]
    assert two == pytest.approx(SCALE_UNITS / math.hypot(*units), rel=1e-14)
    one = laplace_spec(blocks, "exact")["noise_multiplier"]
    assert one == pytest.approx(SCALE_UNITS / sum(units), rel=1e-15)
    assert one * sum(units) <= SCALE_UNITS


def test_rounding_of_float_sums_adds_to_the_norm() -> None:
    d = 10**6
    blocks = [Block(shape=(d,), clip_group=0, bound=1.0, noise_scale=1.0)]
    two = 1 / gaussian_spec(blocks, "float")["noise_multiplier"]
    assert two == pytest.approx(1 + 2**-36 * math.sqrt(d), rel=1e-12)
    one = 1 / laplace_spec(blocks, "float")["noise_multiplier"]
    assert one == pytest.approx(1 + 2**-36 * d, rel=1e-12)


OPEN = PartialNoiseMap(site=CONV, noise=np.ones((4, 1)))
KERNEL = Block(shape=SHAPES[0], clip_group=1, bound=1.0, noise_scale=1.0)


@pytest.mark.parametrize(
    ("silent", "says"),
    [
        (block(sd=0.0, group=1), "without noise"),
        (block(bound=math.inf, group=1), "no bound"),
        (block(group=1, sensitivity_factor=math.inf), "no bound"),
        (replace(KERNEL, release=OPEN), "directions"),
    ],
    ids=["no noise", "no bound", "infinite stretch", "open"],
)
def test_one_unprotected_layer_makes_all_non_private(silent: Block, says: str) -> None:
    blocks = assign_positions([block(), silent])
    for law in (gaussian_spec, laplace_spec):
        assert law(blocks, "float") == events.non_private()
        assert law(blocks[:1], "float") != events.non_private()
    assert says in why_not(blocks)
    assert "parameter 1" in why_not(blocks)


def test_multipliers_below_the_certified_range_are_non_private() -> None:
    assert gaussian_spec([block(1.0, 2.0**-4)], "float") != events.non_private()
    assert (
        gaussian_spec([block(1.0, 2.0**-4, sensitivity_factor=1.001)], "float")
        == events.non_private()
    )
    assert gaussian_spec([block(1.0, 0.06)], "exact") == events.non_private()
    assert laplace_spec([block(1.0, 0.06)], "float") == events.non_private()


@pytest.mark.parametrize(
    "blocks",
    [
        [block(sensitivity_factor=2.0)],
        [block(sd=2.0), block(sd=3.0)],
        [replace(KERNEL, release=WhitenedCrop(site=CONV, norm="spectrum"))],
        [replace(block(), release=DiagonalMap(scale=torch.ones(4), norm="gradient"))],
    ],
    ids=["stretch", "two units", "spectrum", "gradient norm"],
)
def test_integer_sums_need_one_norm_and_one_unit(blocks: list[Block]) -> None:
    gaussian_spec(blocks, "float")
    for law in (gaussian_spec, laplace_spec):
        with pytest.raises(InvalidInput, match="arithmetic"):
            law(blocks, "exact")


def test_a_plan_without_a_certificate_is_float() -> None:
    with pytest.raises(InvalidInput, match="not private"):
        Made(silent=(1,), arithmetic="exact").plan(SHAPES)
    plan = Made(silent=(1,)).plan(SHAPES)
    assert plan.distribution == "gaussian"
    assert not plan.private
    assert plan.noise_multiplier == 0


@dataclass(frozen=True, kw_only=True)
class _Later(DPSGD):
    name: ClassVar[str] = "later"
    added: int = field(default=3, metadata=OPTIONAL_IN_CHECKPOINT)


def test_fingerprints_outlive_new_fields() -> None:
    old = DPSGD(noise_multiplier=1.0, max_grad_norm=1.0)
    # As checkpoints of the first version have it.
    assert old.fingerprint == (
        "DPSGD(noise_multiplier=1.0, max_grad_norm=1.0, clipping='flat', arithmetic='exact', "
        "mode='corrected', groups=None)"
    )
    new = _Later(noise_multiplier=1.0, max_grad_norm=1.0)
    assert new.fingerprint == old.fingerprint.replace("DPSGD", "_Later")
    changed = replace(new, added=4)
    assert changed.fingerprint == new.fingerprint.replace(")", ", added=4)")


def test_notes_are_known_by_id() -> None:
    (first, second) = notes("G1", "S6.3")
    assert (first.id, second.id) == ("G1", "S6.3")
    assert isinstance(first, Note)
    assert str(second).startswith("S6.3: ")
    with pytest.raises(InvalidInput, match="notes"):
        notes("G99")


def test_sites_know_their_transform_sizes() -> None:
    site = Site(
        kind="conv",
        shape=(16, 2, 3, 5),
        input=(32, 30),
        output=(15, 28),
        stride=(2, 1),
        padding=(0, 1),
        dilation=(1, 1),
        groups=3,
    )
    assert site.padded == (32, 32)
    assert site.least == (2 * 14 + 2 + 1, 27 + 4 + 1)
    assert site.linear == (32 + 28, 32 + 27)
    assert (site.kernel, site.taps, site.pairs, site.axes) == ((3, 5), 15, 32, 2)
    blocks = Site(kind="circulant", shape=(4, 6, 8), input=(1,), output=(1,))
    assert (blocks.kernel, blocks.block, blocks.pairs) == ((8,), 8, 24)


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "dense"},
        {"shape": (20, 10)},
        {"stride": (0, 1)},
        {"padding": (0,)},
        {"output": (9, 9)},
        {"groups": 0},
        {"input": 7},
        {"kind": "circulant"},
    ],
    ids=lambda changes: str(*changes),
)
def test_bad_sites_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match="site"):
        replace(CONV, **changes)

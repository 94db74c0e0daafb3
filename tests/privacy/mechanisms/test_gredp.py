"""GReDP: the law of its noise, its plans, and what they certify against what is claimed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dpkern import DPStep
from dpkern.base.errors import InvalidInput, PrivacyError
from dpkern.ops.spectral import literal
from dpkern.privacy.accounting import claimed_epsilon, epsilon
from dpkern.privacy.accounting.events import non_private
from dpkern.privacy.mechanisms import DPSGD, GReDP, PartialNoiseMap, WhitenedCrop
from tests.privacy.mechanisms.spectral_sites import NETWORK, circulant, conv, other, shapes

pytestmark = pytest.mark.usefixtures("one_thread")

S = math.sqrt(0.5)
AB = ("ab", 0.9, math.sqrt(0.19))
NOISES = {"real": (1.0, 0.0), "circular": (S, S), "ab": AB[1:], "circular_full": (1.0, 1.0)}


def gredp(**changes: Any) -> GReDP:
    fields = {"noise_multiplier": 1.1, "max_grad_norm": 0.7, "sites": NETWORK}
    return GReDP(**{**fields, **changes})


def published(**changes: Any) -> GReDP:
    return gredp(**{"mode": "published", **changes})


@pytest.mark.parametrize("noise", NOISES)
def test_variance_by_index(noise: str) -> None:
    """Blocks of 16, 200 000 draws: the table of noise kinds, with its self-conjugate indices."""
    x, g = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 200_000, 16)
    config = literal.Pipeline(
        kernel=(16,), size=(16,), bound=1.0, noise_multiplier=1.0, noise=NOISES[noise]
    )
    draws = literal.circulant(x, g, config, torch.Generator().manual_seed(5))[:, 0].numpy()
    own, generic, together = {
        "real": (1, 0.5, 1),
        "circular": (0.5, 0.5, 0),
        "ab": (0.81, 0.5, 0.62),
        "circular_full": (1, 1, 0),
    }[noise]
    expected = np.full(16, generic, dtype=float)
    expected[[0, 8]] = own
    assert draws.var(0) == pytest.approx(expected, rel=0.02)
    assert np.corrcoef(draws[:, 3], draws[:, 13])[0, 1] == pytest.approx(together, abs=0.01)


def test_real_noise_leaves_odd_parts_bare() -> None:
    """The difference of entries j and N - j is that of the clipped gradient, to rounding."""
    generator = torch.Generator().manual_seed(6)
    x, g = (torch.randn(3, 1, 2, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    config = literal.Pipeline(
        kernel=(8,), size=(8,), bound=0.5, noise_multiplier=100.0, noise=(1.0, 0.0)
    )
    clean = literal.circulant(x, g, replace(config, noise_multiplier=0.0), generator)
    noisy = literal.circulant(x, g, config, generator)
    mirror = [(8 - j) % 8 for j in range(8)]
    assert (noisy - clean).abs().max() > 1
    bare = (noisy - noisy[..., mirror]) - (clean - clean[..., mirror])
    assert bare.abs().max() < 1e-12
    circular = literal.circulant(x, g, replace(config, noise=(S, S)), generator)
    assert ((circular - circular[..., mirror]) - (clean - clean[..., mirror])).abs().max() > 1


def test_published_blocks_are_plain() -> None:
    """White noise on every layer: no map, only a clip norm that counts all lags."""
    plan = published().plan(shapes(NETWORK))
    assert [block.mapped for block in plan.blocks] == [False] * 5
    assert plan.scales == pytest.approx([1.1 * 0.7 * S, 0.77, 1.1 * 0.7 * S, 0.77, 1.1 * 0.7 * S])
    assert plan.bounds == (0.7,) * 5
    assert [block.clip_group for block in plan.blocks] == list(range(5))
    for block, size in ((plan.blocks[0], (32, 32)), (plan.blocks[2], (14, 14))):
        assert isinstance(block.release, WhitenedCrop)
        assert (block.release.norm, block.release.size) == ("spectrum", size)
        assert block.release.needs_operands
        assert block.release.is_identity
    # A circulant layer releases all lags: its spectrum's norm is its gradient's.
    assert plan.blocks[4].release is None
    assert (plan.arithmetic, plan.distribution, plan.p) == ("float", "gaussian", 2)
    mu = math.sqrt(3 * 2 + 2) / 1.1
    assert plan.noise_multiplier == pytest.approx(1 / mu, rel=1e-8)


@pytest.mark.parametrize(("clipping", "multiplier"), [("flat", S), ("per_layer", S / math.sqrt(8))])
@pytest.mark.parametrize(
    ("sigma", "claimed", "flat", "layers"),
    [
        (3.813, 1, 1.4972, 6.801),
        (2.127, 2, 3.1737, 34.774),
        (1.288, 4, 7.4748, 228.59),
        (0.8825, 8, 20.2818, 851.35),
    ],
)
def test_claimed_against_certified(
    clipping: str, multiplier: float, sigma: float, claimed: float, flat: float, layers: float
) -> None:
    """Rate .01, 10 000 steps, delta 1e-5: the document's 1.497 .. 20.28 and 6.80 .. 849."""
    sites = (circulant(1, 1, 8),) * 8
    mechanism = published(noise_multiplier=sigma, sites=sites, clipping=clipping)
    assert mechanism.event_spec()["noise_multiplier"] == pytest.approx(sigma * multiplier, rel=1e-8)
    run: Any = {"sample_rate": 0.01, "steps": 10_000, "delta": 1e-5}
    expected = flat if clipping == "flat" else layers
    assert epsilon(mechanism, **run) == pytest.approx(expected, rel=5e-3)
    if clipping == "flat":
        assert claimed_epsilon(mechanism, **run) == pytest.approx(claimed, rel=5e-3)


def _delta(eps: float, mu: float) -> float:
    def phi(t: float) -> float:
        return math.erfc(-t / math.sqrt(2)) / 2

    return phi(-eps / mu + mu / 2) - math.exp(eps) * phi(-eps / mu - mu / 2)


@pytest.mark.parametrize(("delta", "last"), [(1e-5, 0.365), (1e-6, 0.162), (1e-8, 0.026)])
def test_theorem_3_holds_by_slack_for_small_epsilon(delta: float, last: float) -> None:
    for eps, holds in ((last - 0.002, True), (last + 0.003, False), (0.5, False)):
        sigma = math.sqrt(2 * math.log(1.25 / delta)) / eps
        mechanism = published(
            noise_multiplier=sigma, clipping="flat", sites=NETWORK[:1], claim_rule="theorem3"
        )
        claim = mechanism.claim(steps=1, sample_rate=1.0, delta=delta, dataset_size=None)
        assert claim == pytest.approx(eps)
        assert "theorem 3" in mechanism.claim_text
        assert mechanism.claim(steps=2, sample_rate=1.0, delta=delta, dataset_size=9) is None
        mu = 1 / mechanism.event_spec()["noise_multiplier"]
        assert (_delta(eps, mu) <= delta) == holds
        if (eps, delta) == (0.5, 1e-5):
            assert _delta(0.5, mu) == pytest.approx(1.47e-5, rel=5e-3)
            assert _delta(0.5144, mu) == pytest.approx(delta, rel=3e-3)


def test_theorem_2_is_false_where_the_noise_is_not_circular() -> None:
    """Half the variance at generic indices only: the odd part has b^2 of it."""
    plan = published(noise_kind=AB, clipping="flat").plan(shapes(NETWORK))
    assert plan.noise_multiplier == pytest.approx(1.1 * AB[2], rel=1e-8)
    assert plan.blocks[0].sensitivity_factor == pytest.approx(math.sqrt(2), rel=1e-8)  # (0, 0)
    assert plan.blocks[4].sensitivity_factor == pytest.approx(1 / AB[2], rel=1e-8)
    # With a < b the corner entry, which is its own mirror, is the weakest.
    weak = published(noise_kind=("ab", 0.1, math.sqrt(0.99)), clipping="flat", sites=NETWORK[:1])
    assert weak.event_spec()["noise_multiplier"] == pytest.approx(0.11, rel=1e-8)


@pytest.mark.parametrize(
    ("site", "certified"),
    [
        (conv(2, 3, 3, 34), S),
        (conv(2, 3, 5, 8), S),
        (conv(2, 3, 5, 6), 0),
        (conv(2, 3, 5, 5), 0),
        (circulant(2, 2, 8), 0),
    ],
    ids=["3x3 on 34", "5x5 on 8", "5x5 on 6", "5x5 on 5", "circulant"],
)
def test_real_noise_is_decided_by_mirrored_lags(site: Any, certified: float) -> None:
    plan = published(noise_kind="real", sites=(site,)).plan([site.shape])
    assert plan.noise_multiplier == pytest.approx(1.1 * certified, rel=1e-8)
    assert isinstance(plan.blocks[0].release, WhitenedCrop if certified else PartialNoiseMap)
    assert plan.distribution == "gaussian"  # there is noise, whatever it protects
    assert (plan.spec == non_private()) == (certified == 0)
    assert plan.certified_for == ("real-number sums" if certified else "nothing")
    assert plan.arithmetic == "float"


def test_corrected_is_dpsgd() -> None:
    """Same blocks, same event: with one key the same bits."""
    ours = GReDP(noise_multiplier=1.1, max_grad_norm=0.7)
    theirs = DPSGD(noise_multiplier=1.1, max_grad_norm=0.7)
    sizes = shapes(NETWORK)
    for mechanism in (ours, gredp()):
        plan, same = mechanism.plan(sizes), theirs.plan(sizes)
        assert replace(plan, mechanism="dpsgd") == same
        assert (plan.arithmetic, plan.certified_for) == ("exact", "released bits")
        assert mechanism.event_spec() == theirs.event_spec() == mechanism.claimed_event_spec()
    assert gredp(noise_kind="circular").plan(sizes).noise_multiplier == pytest.approx(1.1 * S)


def test_cropped_norm_is_dpsgd_with_less_noise() -> None:
    plan = published(clip_domain="cropped").plan(shapes(NETWORK))
    assert [block.release for block in plan.blocks] == [None] * 5
    assert (plan.arithmetic, plan.certified_for) == ("exact", "released bits")
    flat = published(clip_domain="cropped", clipping="flat", sites=NETWORK[::2])
    assert flat.arithmetic == "float"  # noise of one scale only, but nobody said so
    exact = replace(flat, arithmetic="exact")
    assert exact.event_spec()["noise_multiplier"] == pytest.approx(1.1 * S, rel=1e-5)


def test_printed_scaling() -> None:
    plan = published(unitary_scaling="as_printed").plan(shapes(NETWORK))
    gains = [block.release.gain for block in plan.blocks if isinstance(block.release, WhitenedCrop)]
    assert gains == pytest.approx([1 / 32, 1 / 14, 1 / math.sqrt(8)])
    (block,) = (b for b in plan.blocks if b.shape == NETWORK[4].shape)
    assert block.mapped
    # Norm and signal shrink alike, so the guarantee is the same and the noise relatively larger.
    assert plan.spec == published().plan(shapes(NETWORK)).spec


def test_a_printed_scaling_is_in_the_norm_of_gradients_too() -> None:
    site = NETWORK[0]
    mechanism = published(
        sites=(site,), unitary_scaling="as_printed", clip_domain="cropped", clipping="flat"
    )
    step = DPStep(
        replace(mechanism, noise_multiplier=0.0),
        [torch.zeros(site.shape)],
        expected_batch_size=1.0,
        sample_rate=0.5,
    )
    release = step.plan.blocks[0].release
    assert release is not None
    assert release.gain < 1
    gradient = torch.randn(1, *site.shape, generator=torch.Generator().manual_seed(1))
    gradient *= 0.6 / release.gain / gradient.norm()  # of a bound of 0.7
    step.add(per_sample=[gradient])
    (found,) = step.finish() or ()
    assert found is not None
    torch.testing.assert_close(found.float(), gradient[0] * release.gain)


def test_a_certificate_for_steps_of_one_size_refuses_poisson_samples() -> None:
    mechanism = published(
        noise_kind="circular_full",
        clip_domain="cropped",
        clipping="flat",
        noise_point="per_sample",
        batch_size=16,
    )
    numbers: dict[str, Any] = {"sample_rate": 0.01, "steps": 10, "delta": 1e-5}
    with pytest.raises(PrivacyError, match="exactly 16 samples"):
        epsilon(mechanism, **numbers)
    assert epsilon(mechanism, sampling="fixed", dataset_size=1600, **numbers) < math.inf


def test_noise_per_sample() -> None:
    sizes = shapes(NETWORK)
    unknown = published(noise_point="per_sample", clipping="flat").plan(sizes)
    assert unknown.spec == non_private()
    assert unknown.distribution == "gaussian"
    assert unknown.scales == published(clipping="flat").plan(sizes).scales
    known = published(noise_point="per_sample", clipping="flat", batch_size=16)
    assert known.plan(sizes).samples == 16
    assert known.event_spec()["noise_multiplier"] == pytest.approx(4 * 1.1 * S, rel=1e-8)
    assert known.claimed_event_spec()["noise_multiplier"] == 1.1


def test_clip_groups_of_owners() -> None:
    """The papers count a layer and its bias as one."""
    plan = published(clipping="group", groups=(0, 0, 1, 1, 2)).plan(shapes(NETWORK))
    mu = math.sqrt(3 * 2) / 1.1
    assert plan.noise_multiplier == pytest.approx(1 / mu, rel=1e-8)
    assert plan.groups == ((0, 1), (2, 3), (4,))


def test_event_without_sites() -> None:
    """White noise under a flat clip certifies sigma / sqrt(2) whatever the layers are."""
    bare = published(sites=None, clipping="flat")
    assert bare.event_spec()["noise_multiplier"] == pytest.approx(1.1 * S, rel=1e-4)
    known = published(clipping="flat")
    dimension = known.plan(shapes(NETWORK)).dimension
    for bound in (bare.event_spec(), bare.event_spec(dimension)):
        assert bound["noise_multiplier"] <= known.event_spec()["noise_multiplier"]
    for changes in ({"clipping": "per_layer"}, {"noise_kind": "real", "clipping": "flat"}):
        with pytest.raises(InvalidInput, match=r"dpkern\.survey"):
            published(sites=None, **changes).event_spec()
    with pytest.raises(InvalidInput, match=r"dpkern\.survey"):
        bare.plan(shapes(NETWORK))


@pytest.mark.parametrize(
    ("changes", "ids"),
    [
        ({}, {"G2", "G3", "G5", "G6", "C1"}),
        ({"noise_kind": "real"}, {"G1", "G2", "G3", "G5", "G6", "C1"}),
        ({"clipping": "flat", "noise_kind": "circular_full"}, {"G6", "C1"}),
        ({"noise_point": "per_sample"}, {"G2", "G3", "G4", "G5", "G6", "C1"}),
        ({"claim_rule": "theorem3"}, {"G2", "G3", "G5", "G6", "G7", "C1"}),
        ({"mode": "corrected"}, set()),
        ({"mode": "corrected", "noise_kind": "circular"}, set()),
    ],
    # A set has another order in each process, and tests that two share need one name each.
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value),
)
def test_notes(changes: dict[str, Any], ids: set[str]) -> None:
    mechanism = published(**changes)
    assert {note.id for note in mechanism.notes} == ids
    assert mechanism.plan(shapes(NETWORK)).notes == mechanism.notes


def test_nothing_private_without_noise_or_bound() -> None:
    for changes in ({"noise_multiplier": 0}, {"max_grad_norm": math.inf}):
        plan = published(**changes).plan(shapes(NETWORK))
        assert (plan.spec, plan.distribution) == (non_private(), None)
        assert set(plan.scales) == {0.0}
        assert published(**changes).claimed_event_spec() == non_private()


def test_calibration_and_schedules_keep_the_options() -> None:
    louder = published(noise_kind="real", clipping="flat").with_noise_multiplier(2)
    assert (louder.noise_multiplier, louder.noise_kind, louder.clipping) == (2.0, "real", "flat")
    assert "noise_kind='real'" in louder.fingerprint
    assert louder != published(clipping="flat").with_noise_multiplier(2)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"mode": "paper"}, "mode"),
        ({"noise_kind": "complex"}, "noise_kind"),
        ({"noise_kind": ("ab", 0.9, 0.9)}, "noise_kind"),
        ({"noise_kind": "real"}, "noise_kind"),
        ({"noise_point": "per_sample"}, "noise_point"),
        ({"unitary_scaling": "as_printed"}, "unitary_scaling"),
        ({"claim_rule": "theorem3"}, "claim_rule"),
        ({"clip_domain": "whitened"}, "clip_domain"),
        ({"clipping": "automatic"}, "clipping"),
        ({"clipping": "group"}, "groups"),
        ({"groups": (0, 0, 0, 0, 0)}, "groups"),
        ({"clipping": "group", "groups": (0, 2, 0, 0, 0)}, "groups"),
        ({"clipping": "group", "groups": (0, 1)}, "groups"),
        ({"batch_size": 3}, "batch_size"),
        ({"sites": ()}, "sites"),
        ({"sites": ((3, 3),)}, "sites"),
        ({"fft_size": "large"}, "fft_size"),
        ({"fft_size": ((32, 32),)}, "fft_size"),
        ({"fft_size": ((31, 32), None, None, None, None)}, "fft_size"),
        ({"fft_size": ((32, 32), None, None, None, None), "sites": None}, "fft_size"),
        ({"arithmetic": "double"}, "arithmetic"),
        ({"arithmetic": "exact", "clip_domain": "spectrum"}, "arithmetic"),
        ({"arithmetic": "exact", "noise_kind": "circular"}, "arithmetic"),
        ({"max_grad_norm": 0}, "max_grad_norm"),
        ({"noise_multiplier": -1}, "noise_multiplier"),
    ],
    ids=str,
)
def test_refuses(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        gredp(**changes)
    assert raised.value.name == name


def test_refuses_other_noise_and_other_parameters() -> None:
    with pytest.raises(PrivacyError):
        gredp(noise_multiplier=0.01)
    with pytest.raises(InvalidInput, match="one site per parameter"):
        gredp().plan([(3, 3)])
    sizes = {"fft_size": ((40, 36), None, None, None, None), "clip_domain": "spectrum"}
    plan = gredp(**sizes).plan(shapes(NETWORK))
    releases = [block.release for block in plan.blocks]
    assert [r.size for r in releases if isinstance(r, WhitenedCrop)] == [(40, 36), (14, 14)]
    assert other(3).axes == 0

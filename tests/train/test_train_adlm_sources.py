"""``dpkern train --mechanism adlm|ilm --noise-source``: where the release's draws come from."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from dpkern import noise_tables
from dpkern.base.errors import InvalidInput
from dpkern.base.rng import Key
from dpkern.objective import adlm
from dpkern.objective.adlm_release import ReleasedDataset
from dpkern.privacy.accounting.tails import variation_cost
from dpkern.step.noise_tables.named import source_of
from dpkern.train.adlm import AdlmSession
from tests.train.test_train_adlm import FEATURES, options, started, table

__all__ = ["options"]
pytestmark = pytest.mark.usefixtures("one_thread")

PARTS = ("inputs", "relevance", "targets")


@pytest.fixture
def one_pretraining(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pre-train once: the public network is the same whatever the source of the draws."""
    made: list[torch.nn.Sequential] = []
    train = adlm.pretrained

    def pretrained(*args: Any, **kwargs: Any) -> torch.nn.Sequential:
        if not made:
            made.append(train(*args, **kwargs))
        return copy.deepcopy(made[0])

    monkeypatch.setattr(adlm, "pretrained", pretrained)


def released(session: AdlmSession) -> ReleasedDataset:
    (found,) = session.training.released
    return found


def same(one: ReleasedDataset, other: ReleasedDataset) -> dict[str, bool]:
    pairs = {name: (getattr(one, name), getattr(other, name)) for name in PARTS}
    return {name: torch.equal(a, b) for name, (a, b) in pairs.items() if a is not None}


@pytest.mark.usefixtures("one_pretraining")
@pytest.mark.parametrize("labels", ["laplace", "response"])
@pytest.mark.parametrize("mechanism", ["ilm", "adlm"])
def test_a_ring_releases_the_same_bits_and_tables_others(
    options: dict[str, Any], tmp_path: Path, mechanism: str, labels: str
) -> None:
    given = {**options, "mechanism": mechanism, "unsafe_seed": 3, "settings": [f"labels={labels}"]}
    if mechanism == "adlm":
        given["public_data"] = table(tmp_path / "public.npz", seed=1)
    inline = released(started(given))
    assert all(same(inline, released(started({**given, "noise_source": "ring"}))).values())
    for name in ("cdt", "table"):
        other = same(inline, released(started({**given, "noise_source": name})))
        # Randomized labels draw no lattice noise: they stay as they are.
        assert other.pop("targets") == (labels == "response")
        assert not any(other.values())


def test_a_cumulative_table_is_paid_for_in_delta(options: dict[str, Any]) -> None:
    inline = started(options).run()
    options["out"] = options["out"].with_name("cdt")
    found = started({**options, "noise_source": "cdt"}).run()
    assert found["noise"]["source"] == "cdt"
    assert found["epsilon_certified"] == inline["epsilon_certified"]
    draws = FEATURES + 2 * 3
    source = source_of("cdt")
    assert source is not None
    more = variation_cost(found["epsilon_certified"]) * draws * source.variation
    assert found["delta"] == pytest.approx(inline["delta"] + more, rel=1e-9)
    assert found["delta"] > inline["delta"]
    assert any(f"for each of {draws} draws" in note for note in found["certificate"]["notes"])


def test_a_table_of_samples_protects_nothing(options: dict[str, Any]) -> None:
    found = started({**options, "noise_source": "table"}).run()
    for name in ("epsilon_claimed", "epsilon_certified"):
        assert float(found[name]) == math.inf
    assert found["certified_for"] == "nothing"
    assert "no DP guarantee" in found["non_private"]
    assert "not private" in found["statement"]
    assert found["certificate"]["event"] == {"event": "NonPrivateDpEvent"}
    assert not found["epsilon_by_part"]
    assert not any("delta" in warning for warning in found["warnings"])


def test_short_words_leave_nothing_certified(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(name: str | None) -> noise_tables.NoiseSource:
        assert name == "cdt"
        return noise_tables.CdtTable(word_bits=8)

    monkeypatch.setattr("dpkern.step.noise_tables.named.source_of", short)
    found = started({**options, "noise_source": "cdt"}).run()
    assert float(found["epsilon_certified"]) == math.inf
    assert found["non_private"] == "the noise is too far from its law"


def test_a_resumed_run_keeps_the_source_of_its_release(options: dict[str, Any]) -> None:
    session = started({**options, "noise_source": "table"})
    session.training.advance()
    session.save()
    again = {"out": options["out"], "resume": True, "figure": False}
    with pytest.raises(InvalidInput, match="noise_source: expected table, which made"):
        started({**again, "mechanism": "ilm", "noise_source": "inline"})
    resumed = started({**again, "mechanism": "ilm"})
    assert all(same(released(session), released(resumed)).values())
    found = resumed.run()
    assert found["noise"]["source"] == "table"
    assert float(found["epsilon_certified"]) == math.inf


def test_labels_with_noise_at_every_visit_have_no_source(options: dict[str, Any]) -> None:
    given = {**options, "mode": "published", "settings": ["coefficient_form=feature_expanded"]}
    with pytest.raises(InvalidInput, match="noise_source: expected none with coefficient_form"):
        started({**given, "noise_source": "cdt"})
    assert not options["out"].exists()


@pytest.mark.parametrize("source", ["ring", "cdt", "table"])
def test_published_coefficients_take_their_draws_from_the_source(
    options: dict[str, Any], source: str
) -> None:
    """Linear and quadratic coefficients stand apart in the stream; the source gives both."""
    given = {**options, "mode": "published", "unsafe_seed": 3}
    inline = released(started(given)).coefficients
    other = released(started({**given, "noise_source": source})).coefficients
    assert inline is not None
    assert other is not None
    for name in ("linear", "quadratic"):
        a, b = getattr(inline, name), getattr(other, name)
        assert torch.isfinite(b).all()
        assert torch.equal(a, b) == (source == "ring")


def test_every_release_has_draws_of_its_own(options: dict[str, Any]) -> None:
    """The same positions of two releases must not share a draw."""
    seen: list[torch.Tensor] = []

    class Watched(noise_tables.CdtTable):
        def take(self, step: int) -> Any:
            draws = super().take(step)
            seen.append(draws.at(0, 12).clone())
            return draws

    session = started({**options, "settings": ["labels=laplace"]})
    key = Key.from_unsafe_seed(1)
    adlm.release(session.mechanism, session.data, key, source=Watched)
    assert len(seen) == 2
    assert not (seen[0] == seen[1]).any()

"""``dpkern train --mechanism objective-release``: released once, fitted, certified, refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dpkern import cli
from dpkern.base.errors import InvalidInput, PrivacyError
from dpkern.base.outputs import CHECKPOINT, FIGURE, REPORT
from dpkern.objective.moments import ReleasedMoments
from dpkern.train import checkpoint
from dpkern.train.moments import MomentsSession
from dpkern.train.session_factory import make_session

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    pytest.importorskip("sklearn")
    return {
        "mechanism": "objective-release",
        "epsilon": 1.0,
        "figure": False,
        "out": tmp_path / "out",
    }


def started(options: dict[str, Any]) -> MomentsSession:
    session = make_session(options)
    assert isinstance(session, MomentsSession)
    return session


@pytest.mark.parametrize(("epsilon", "least"), [(1.0, 87.6), (2.0, 90.4)])
def test_digits_are_learnt_at_small_epsilons(
    options: dict[str, Any], epsilon: float, least: float
) -> None:
    # The mean of 20 runs is 91.7 and 95.3, the range about 2 and 1 to either side.
    summary = started({**options, "epsilon": epsilon, "unsafe_seed": 1}).run()
    assert summary["test_accuracy"] >= least
    assert summary["epsilon_if_seed_secret"] <= epsilon


def test_a_run_is_certified_for_what_it_claims(options: dict[str, Any]) -> None:
    summary = started({**options, "figure": True}).run()
    assert summary["epsilon_certified"] <= summary["epsilon_claimed"] == 1
    assert summary["relation"] == "add_remove"
    assert summary["certified_for"] == "released bits"
    assert summary["delta"] == 1e-5
    written = json.loads((options["out"] / REPORT).read_text())
    assert written["settings"]["features"]["map"] == "scattering"
    assert (options["out"] / FIGURE).stat().st_size > 5000
    kept = checkpoint.read(options["out"] / CHECKPOINT, kind=None)
    again = ReleasedMoments.from_state(kept["training"]["released"])
    assert again.second.shape == (summary["settings"]["length"],) * 2


def test_a_known_seed_certifies_nothing_and_repeats_itself(
    options: dict[str, Any], tmp_path: Path
) -> None:
    first = started({**options, "unsafe_seed": 3}).run()
    second = started({**options, "unsafe_seed": 3, "out": tmp_path / "again"}).run()
    assert first["epsilon_certified"] == "inf"
    assert first["test_accuracy"] == second["test_accuracy"]
    assert first["statement"].startswith("not private against anyone who knows the seed")


def test_a_resumed_run_releases_nothing_twice(options: dict[str, Any]) -> None:
    session = started(options)
    released = session.steps.released
    session.save()
    resumed = started({"out": options["out"], "resume": True, "figure": False})
    assert torch.equal(resumed.steps.released.second, released.second)
    assert resumed.run()["steps"] == 1
    with pytest.raises(InvalidInput, match="complete"):
        make_session({"out": options["out"], "resume": True, "figure": False})
    with pytest.raises(PrivacyError, match="epsilon"):
        make_session({"out": options["out"], "resume": True, "figure": False, "epsilon": 2.0})


def test_maps_and_losses_are_options(options: dict[str, Any]) -> None:
    chosen = ("map=random", "size=40", "weight=2")
    session = started({**options, "settings": chosen, "surrogate": "logistic", "ridge": 0.5})
    assert session.mechanism.length == 40
    assert session.mechanism.weight == 2
    assert session.run()["steps"] == 1


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"epochs": 3}, "epochs"),
        ({"batch_size": 3}, "batch_size"),
        ({"lr": 0.1}, "lr"),
        ({"mode": "printed"}, "mode"),
        ({"settings": ("length=3",)}, "set"),
        ({"settings": ("size=none",)}, "set"),
        ({"surrogate": "hinge"}, "surrogate"),
        ({"ridge": 0.0}, "ridge"),
        ({"feature_scale": 1.0}, "x"),
    ],
)
def test_what_does_not_apply_is_refused_and_nothing_written(
    options: dict[str, Any], change: dict[str, Any], name: str
) -> None:
    with pytest.raises(InvalidInput, match=f"^{name}: expected"):
        make_session({**options, **change})
    assert not options["out"].exists()


def test_an_epsilon_is_required(options: dict[str, Any]) -> None:
    del options["epsilon"]
    with pytest.raises(InvalidInput, match=r"^epsilon: expected"):
        make_session(options)


def test_a_plan_costs_no_training(capsys: pytest.CaptureFixture[str]) -> None:
    words = "privacy --mechanism objective-release --epsilon 1 --row-shape 8,8 --json"
    assert cli.main(words.split()) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["epsilon_certified"] <= 1
    assert told["settings"]["length"] == 112
    assert cli.main("privacy --mechanism objective-release --epsilon 1".split()) != 0
    assert "row_shape" in capsys.readouterr().err

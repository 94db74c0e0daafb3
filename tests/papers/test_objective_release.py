"""Accuracy of the objective release by feature map: kept pieces, certified epsilons."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpkern.papers import ItemRequest, ResultCache, objective_release, reproduce

pytestmark = pytest.mark.usefixtures("one_thread")


def test_scattering_features_beat_pixels_at_the_same_epsilon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setattr(objective_release, "MAPS", ("centred", "scattering"))
    monkeypatch.setattr(objective_release, "QUICK_EPSILONS", (1.0,))
    request = ItemRequest(quick=True, seeds=3, finished=ResultCache(folder=tmp_path))
    found = reproduce("objective-release", None, request)
    accuracy = {row.setting.split(",")[0]: row.ours for row in found.rows}
    assert float(accuracy["scattering"] or 0) > float(accuracy["centred"] or 0) + 2
    assert all(0.95 < float(row.epsilon_certified or 0) <= 1 for row in found.rows)
    assert found.control.startswith("without privacy: ")
    assert len(list(tmp_path.iterdir())) == 4, "a control for each map"

    def never(*_: object) -> None:
        raise AssertionError("a kept piece was computed again")

    monkeypatch.setattr(objective_release, "_features", never)
    kept = ResultCache(folder=tmp_path, resume=True)
    again = reproduce("objective-release", None, ItemRequest(quick=True, seeds=3, finished=kept))
    assert [row.ours for row in again.rows] == [row.ours for row in found.rows]

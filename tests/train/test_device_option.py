"""--device: names, refusals without a device, and that model, rows and step go there.

No run here takes place on a device: none has been tried on one yet.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dpkern import cli
from dpkern.base import devices
from dpkern.base.errors import BackendError, InvalidInput
from dpkern.papers import ItemRequest, ResultCache, reproduce, runner
from dpkern.papers.gredp import cells
from dpkern.privacy.mechanisms import DPSGD
from dpkern.train import objective, session
from dpkern.train.session import Session
from dpkern.train.session_factory import make_session

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch report two devices."""
    monkeypatch.setattr(devices, "_count", lambda: 2)


@pytest.fixture
def none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_count", lambda: 0)


class StoppedError(Exception):
    """The step was made."""


def meta(name: str | None) -> torch.device:
    """Stand in for a device: tensors without values."""
    return torch.device("cpu" if name is None else "meta")


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:-1", "CUDA", "mps", "", "meta", 0])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match=r"^device: expected cpu, cuda or cuda:N"):
        devices.training_device(name)


@pytest.mark.usefixtures("none")
@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_a_missing_device_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="finds 0 CUDA devices"):
        devices.training_device(name)
    out = tmp_path / "out"
    for call in (
        ["train", "--epsilon", "3", "--device", name, "--out", str(out)],
        ["train", "--mechanism", "spof", "--epsilon", "3", "--device", name, "--out", str(out)],
        ["reproduce", "gredp", "table1", "--quick", "--device", name, "--out", str(out)],
        ["reproduce", "spof", "fig3", "--quick", "--device", name, "--out", str(out)],
    ):
        assert cli.main(call) == cli.REFUSED
    with pytest.raises(BackendError, match="finds 0 CUDA devices"):
        reproduce("gredp", "table1", ItemRequest(device=name))
    assert not out.exists()


@pytest.mark.usefixtures("two_devices")
def test_devices_are_found_by_their_number() -> None:
    assert devices.training_device("cuda:1") == torch.device("cuda:1")
    assert devices.training_device(None) == devices.training_device("cpu") == torch.device("cpu")
    with pytest.raises(BackendError, match="finds 2 CUDA devices"):
        devices.training_device("cuda:2")


def test_items_without_runs_on_a_device_take_none() -> None:
    for paper, item in (("spof", "released"), ("adlm", "fig2"), ("pnsgd", "table")):
        with pytest.raises(InvalidInput, match=r"^device: expected none"):
            reproduce(paper, item, ItemRequest(device="cpu"))


def test_the_processor_by_name_is_the_usual_run(tmp_path: Path) -> None:
    """The same pieces, so that a resumed run finds them."""
    where = cells.setting(ItemRequest(rows=60, epochs=1), "LeNet-5", "DP-SGD")
    planned = []
    for device in (None, "cpu"):
        pieces: list[runner.CachedRun] = []
        request = ItemRequest(device=device, planned=pieces, finished=ResultCache(folder=tmp_path))
        with pytest.raises(runner.ItemPlanned):
            reproduce("gredp", "table1", request)
        planned.append([piece.key for piece in pieces])
    assert planned[0] == planned[1]
    assert where.device == torch.device("cpu")


def test_a_reproduced_run_takes_model_and_rows_to_its_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where = cells.setting(ItemRequest(rows=60, epochs=1), "LeNet-5", "DP-SGD")
    seen: list[torch.Tensor] = []

    class Stepped:
        def __init__(self, mechanism: object, params: list[torch.Tensor], **_: object) -> None:
            seen.extend(params)

    def stop(*, data: runner.Dataset, **_: object) -> None:
        seen.extend([data.x_train, data.y_train, data.x_test, data.y_test])
        raise StoppedError

    monkeypatch.setattr(runner, "DPStep", Stepped)
    monkeypatch.setattr(runner, "TrainingSteps", stop)
    made = DPSGD(noise_multiplier=1.0, max_grad_norm=1.0)
    there = runner.replace(where, device=torch.device("meta"))
    monkeypatch.setattr(runner, "make_batches", lambda *_, **__: _Batches())
    with pytest.raises(StoppedError):
        runner.once(there, made, 0)
    assert len(seen) > 8
    assert {one.device.type for one in seen} == {"meta"}


class _Batches:
    expected_batch_size, sample_rate = 50.0, 0.5


def test_a_session_takes_model_and_rows_to_its_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[torch.Tensor] = []

    def step(mechanism: object, params: list[torch.Tensor], **_: object) -> None:
        seen.extend(params)
        raise StoppedError

    monkeypatch.setattr(session, "training_device", meta)
    monkeypatch.setattr(session, "DPStep", step)
    with pytest.raises(StoppedError):
        Session({"epsilon": 3.0, "epochs": 1, "out": tmp_path / "out", "device": "cpu"})
    assert {one.device.type for one in seen} == {"meta"}


@pytest.mark.usefixtures("two_devices")
def test_audit_and_device_exclude_each_other(tmp_path: Path) -> None:
    given = {"epsilon": 3.0, "out": tmp_path / "out", "device": "cuda", "audit": 100}
    with pytest.raises(InvalidInput, match=r"^device, audit: expected at most one"):
        Session(given)


def test_a_report_names_its_device(tmp_path: Path) -> None:
    given = {"epsilon": 3.0, "epochs": 1, "out": tmp_path / "out", "device": "cpu"}
    summary = Session({**given, "figure": False}).run()
    assert summary["device"] == "cpu"
    assert summary["backend"] is not None


def test_an_autoencoder_goes_to_its_device_where_one_kernel_takes_its_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = {"epsilon": 3.0, "mechanism": "spof", "samples": 8, "epochs": 1, "figure": False}
    found = make_session({**given, "device": "cpu", "out": tmp_path / "out"})
    assert found.run()["device"] == "cpu"
    seen: list[torch.device] = []

    def training(*_: object, device: torch.device, **__: object) -> None:
        seen.append(device)
        raise StoppedError

    monkeypatch.setattr(objective, "training_device", meta)
    with monkeypatch.context() as patch:
        patch.setattr(objective, "SpofTraining", training)
        with pytest.raises(StoppedError):
            make_session({**given, "device": "cpu", "out": tmp_path / "other"})
    assert seen == [meta("cpu")]
    kept = {"mode": "published", "settings": ("noise_schedule=once_per_record",)}
    with pytest.raises(InvalidInput, match="Leave the device out"):
        make_session({**given, **kept, "device": "cpu", "out": tmp_path / "third"})


@pytest.mark.usefixtures("two_devices")
def test_a_reproduction_takes_runs_of_one_kernel_to_its_device(tmp_path: Path) -> None:
    pieces: list[runner.CachedRun] = []
    request = ItemRequest(
        quick=True, device="cuda:1", planned=pieces, finished=ResultCache(folder=tmp_path)
    )
    with pytest.raises(runner.ItemPlanned):
        reproduce("spof", "fig3", request)
    there = {piece.label.split(",")[0] for piece in pieces if "device" in piece.key}
    assert there == {"SPOF", "FM"}
    assert {piece.key["device"] for piece in pieces if "device" in piece.key} == {"cuda:1"}
    assert all(piece.key["fused"] for piece in pieces if "device" in piece.key)

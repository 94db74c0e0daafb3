"""The GPU benchmarks without a GPU: they refuse in one typed line, and their code runs small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, gpu_bits, gpu_models, gpu_time

ROOT = Path(__file__).parents[1]
SMALL = ["--device", "cpu", "--scale", "0.00001"]
no_device = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@no_device
def test_the_script_refuses_in_one_line(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path)}
    done = subprocess.run(
        [str(ROOT / "benchmarks" / "gpu.sh"), "--part", "bits"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == gpu_time.NO_DEVICE
    assert done.stderr.startswith("BackendError: GPU: expected a CUDA device")
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@no_device
@pytest.mark.parametrize("main", [gpu.main, gpu_bits.main, gpu_models.main])
def test_every_part_refuses_in_one_line(main, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == gpu_time.NO_DEVICE
    assert capsys.readouterr().err.startswith("BackendError: GPU: expected")


@pytest.mark.parametrize("main", [gpu.main, gpu_bits.main], ids=["ops", "bits"])
def test_the_code_runs_on_the_cpu(main, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    before = set(gpu_time.FOLDER.iterdir())
    assert main(SMALL) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert not [row for row in rows if "failed" in row]
    assert [row for row in rows if row.get("ms") or row.get("values")]
    assert set(gpu_time.FOLDER.iterdir()) == before  # nothing that was not measured is kept


@pytest.mark.parametrize("which", [0, 1], ids=["decoder", "resnet"])
def test_a_model_runs_on_the_cpu(which: int) -> None:
    where = gpu_time.setting("", SMALL)
    task = gpu_models.tasks(where)[which]
    row = gpu_models.measured(gpu_models.variants()["dpkern"], task, where)
    assert row["ms"] > 0


def test_a_wrong_bit_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    original = gpu_bits.noise.lattice_draws

    def wrong(*args, backend=None, **kwargs):  # type: ignore[no-untyped-def]
        drawn = original(*args, **kwargs)
        if backend is not None:
            drawn[-1] ^= 1
        return drawn

    monkeypatch.setattr(gpu_bits.noise, "lattice_draws", wrong)
    row = gpu_time.attempt({}, lambda: gpu_bits.draws("cpu", "gaussian", 4096))
    assert row["failed"] == "AssertionError: 1 of 4096 values differ"
    assert gpu_time.exit_code([{}, row]) == 1


def test_results_are_merged_part_by_part() -> None:
    table = gpu_time.markdown(
        {"machine": {"device": "X"}, "parts": {"ops": [{"op": "copy", "GB/s": 1.5}, {"op": "a"}]}}
    )
    assert "| copy | 1.5 |" in table
    assert "| a | - |" in table

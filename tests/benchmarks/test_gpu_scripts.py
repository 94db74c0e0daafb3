"""The GPU benchmarks without a GPU: they refuse in one typed line, and their code runs small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import time
import zipfile
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from benchmarks import (
    gpu,
    gpu_bits,
    gpu_first,
    gpu_models,
    gpu_ready,
    gpu_smoke,
    gpu_tiles,
    gpu_time,
)
from dpkern.base import dispatch
from tests import gpu_run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
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
@pytest.mark.parametrize(
    "main",
    [gpu.main, gpu_bits.main, gpu_first.main, gpu_models.main, gpu_smoke.main, gpu_tiles.main],
)
def test_every_part_refuses_in_one_line(main, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == gpu_time.NO_DEVICE
    assert capsys.readouterr().err.startswith("BackendError: GPU: expected")


@pytest.mark.parametrize(
    "main", [gpu.main, gpu_bits.main, gpu_smoke.main], ids=["ops", "bits", "smoke"]
)
def test_the_code_runs_on_the_cpu(main, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    before = set(gpu_time.FOLDER.iterdir())
    assert main(SMALL) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert not [row for row in rows if "failed" in row]
    assert [row for row in rows if row.get("ms") or row.get("values") or row.get("tensors")]
    assert set(gpu_time.FOLDER.iterdir()) == before  # nothing that was not measured is kept


def test_every_model_runs_on_the_cpu() -> None:
    where = gpu_time.setting("", SMALL)
    tasks = gpu_models.tasks(where)
    assert {task.name.split()[0] for task in tasks} == {"decoder", "vit", "resnet18", "lstm"}
    assert {*gpu_models.MANY} <= {task.name for task in tasks}
    for task in tasks:
        row = gpu_models.measured(gpu_models.variants(task.name)["dpkern"], task, where)
        assert all(row[name] > 0 for name in ("ms", "forward ms", "backward ms", "update ms"))
        assert row["host ms"] >= row["forward ms"]


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


def test_the_first_contact_calls_every_op(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(gpu_smoke.calls(gpu_smoke.Inputs("cpu"), "reference")) == set(dispatch.OPS)
    monkeypatch.setattr(gpu_smoke, "forms", lambda inputs, backend: {})  # of 16 bits: devices' own
    where = gpu_time.setting("", SMALL)
    assert gpu_smoke.compared("ghost.linear_sum", "cpu", where) == {"tensors": 1}
    original = gpu_smoke.ghost.linear_sum

    def wrong(a, g, factors, out, *, backend):  # type: ignore[no-untyped-def]
        original(a, g, factors, out, backend=backend)
        out[0, 0] += 10 * (backend == "cpu")

    monkeypatch.setattr(gpu_smoke.ghost, "linear_sum", wrong)
    with pytest.raises(AssertionError, match=r"ghost\.linear_sum: differs by 10"):
        gpu_smoke.compared("ghost.linear_sum", "cpu", where)


def test_a_kernel_that_does_not_compile_is_one_failed_row() -> None:
    def fail() -> dict[str, object]:
        raise gpu_time.TritonError("no")

    assert gpu_time.attempt({"op": "a"}, fail) == {"op": "a", "failed": "TritonError: no"}


# whether the machine is ready


@no_device
def test_not_ready_without_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_ready.main(["check"]) == gpu_ready.NO_DEVICE
    assert capsys.readouterr().err.startswith("BackendError: GPU: expected a CUDA device")


@no_device
def test_not_ready_without_a_backend(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "X")
    assert gpu_ready.main(["check", "cpu,cuda,cupy"]) == gpu_ready.NOT_READY
    said = capsys.readouterr().err
    assert said.startswith("BackendError: backends: expected cpu, cuda, cupy, got cuda ")
    assert "; cupy needs CuPy" in said
    assert gpu_ready.main(["check", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("ready: X, torch ")


def wheel(folder: Path, *, ending: str, changed: str = "") -> None:
    """A wheel of the package's sources, one of them changed."""
    with zipfile.ZipFile(folder / "dpkern-0.1.0-cp3-cp3-linux_x86_64.whl", "w") as archive:
        archive.writestr(f"dpkern/_C{ending}", "module")
        for path in (ROOT / "csrc").rglob("*.*"):
            if path.suffix in (".h", ".cpp", ".cuh", ".cu"):
                name = path.relative_to(ROOT).as_posix()
                archive.writestr(f"dpkern/{name}", path.read_text() + changed * (name in changed))


ENDING = sysconfig.get_config_var("EXT_SUFFIX")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (None, "holds no wheel of dpkern"),
        ({"ending": ".cpython-27.so"}, "is for another Python"),
        ({"ending": ENDING, "changed": "// csrc/cuda/coef.cu"}, "was built of other sources"),
    ],
)
def test_another_wheel_is_not_unpacked(
    tmp_path: Path, given: dict[str, str] | None, reason: str
) -> None:
    if given is not None:
        wheel(tmp_path, **given)
    assert reason in gpu_ready.unpack(tmp_path)


def test_a_wheel_of_these_sources_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(tmp_path, ending=ENDING)
    (tmp_path / "csrc").symlink_to(ROOT / "csrc")
    monkeypatch.setattr(gpu_ready, "ROOT", tmp_path)
    assert gpu_ready.main(["unpack", str(tmp_path)]) == 0
    assert (tmp_path / "dpkern" / f"_C{ENDING}").read_text() == "module"


# tests of a device, in processes


@no_device
def test_no_test_starts_without_the_backends_that_it_needs() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--require-backends=cpu,cupy",
        "tests/base/test_rng.py",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--require-backends: cupy needs CuPy" in done.stderr


GOOD = "def test_a(): pass\n"
BAD = "def test_a(): assert False\n"
SLOW = "import time\ndef test_a(): time.sleep(600)\n"
SKIPPED = "import pytest\ndef test_a(): pytest.skip('not here')\n"


def run_files(folder: Path, seconds: float, **texts: str) -> tuple[int, gpu_run.Run]:
    """Test files of these texts."""
    paths = []
    for name, text in texts.items():
        paths.append(folder / f"test_{name}.py")
        paths[-1].write_text(text)
    run = gpu_run.Run("", time.monotonic() + seconds, folder / "junit.xml", ["-k", "test_a"])
    return run.all(paths, processes=2), run


def test_what_fails_or_is_skipped_is_no_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, run = run_files(tmp_path, 300, good=GOOD, bad=BAD, skipped=SKIPPED, none="")
    assert code == 1
    assert {each.name: each.wrong for each in run.outcomes} == {
        "test_bad": "exit 1",
        "test_skipped": "every test was skipped",
        "test_good": "",
        "test_none": "",
    }
    printed = capsys.readouterr().out
    assert "[test_bad] E   assert False" in printed
    assert printed.endswith("4 files, 2 tests ran, 2 files failed\n")
    suites = list(ElementTree.parse(tmp_path / "junit.xml").getroot())
    assert sorted(suite.get("name", "") for suite in suites) == sorted(
        each.name for each in run.outcomes
    )
    assert run_files(tmp_path, 300, good=GOOD)[0] == 0
    assert run_files(tmp_path, 300, none="")[0] == 1  # nothing ran


def test_what_is_not_finished_in_time_is_no_success(tmp_path: Path) -> None:
    for seconds, wrong in ((3, "not finished in time"), (0, "not started: no time was left")):
        code, run = run_files(tmp_path, seconds, slow=SLOW)
        assert (code, run.outcomes[0].wrong) == (1, wrong)


def test_files_of_a_device_are_found() -> None:
    found = {path.stem for path in gpu_run.files()}
    assert found >= {"test_gpu_kernels", "test_gpu_engine", "test_ops", "test_ghost_linear"}
    assert "test_accounting" not in found

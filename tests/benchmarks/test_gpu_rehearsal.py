"""The campaign rehearsed without a GPU: every part runs on emulated and interpreted kernels."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import pytest

from benchmarks import gpu, gpu_bits, gpu_first, gpu_models, gpu_smoke, gpu_tiles, gpu_time
from dpkern.ops.backends import _kernels, _triton
from tests.engine.device_path import Calls, Driver, device_path, needs_emulation
from tests.engine.recorded_work import recorded

pytestmark = [pytest.mark.slow, needs_emulation]

SMALL = ["--device", "cpu", "--scale", "0.00001"]
Main = Callable[[Sequence[str] | None], int]


def rehearsed(main: Main, capsys: pytest.CaptureFixture[str]) -> tuple[list[dict[str, Any]], Calls]:
    """The rows of a part, and the calls of ops that it made."""
    with device_path() as calls:
        assert main(SMALL) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line[0] == "{"]
    assert [row for row in rows if "failed" in row] == []
    return rows, calls


def test_first_contact_launches_every_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    """What it leaves out, no memory or race checker sees."""
    driver = Driver()
    with driver.on():
        assert gpu_smoke.main(SMALL) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line[0] == "{"]
    assert [row for row in rows if "failed" in row] == []
    assert {row["backend"] for row in rows if "not here" not in row} == {"cuda", "triton"}
    held = vars(_kernels).values()
    cuda = {kernel.name for kernel in held if isinstance(kernel, _kernels.CudaKernel)}
    assert cuda - driver.launches.keys() == set()
    assert triton_kernels() - driver.launches.keys() == set()


def triton_kernels() -> set[str]:
    """Names of all kernels of Triton."""
    found = set()
    for each in iter_modules(_triton.__path__):
        module = import_module(f"{_triton.__name__}.{each.name}")
        found |= {name for name in vars(module) if name.endswith("_kernel")}
    return found


@pytest.mark.parametrize("main", [gpu.main, gpu_bits.main], ids=lambda m: m.__module__)
def test_ops_run_on_both_backends(main: Main, capsys: pytest.CaptureFixture[str]) -> None:
    rows, _ = rehearsed(main, capsys)
    shown = [row for row in rows if "not here" not in row]
    assert {row["backend"] for row in shown if "backend" in row} >= {"cuda", "triton"}


def test_tiles_are_tried(capsys: pytest.CaptureFixture[str]) -> None:
    rows, calls = rehearsed(gpu_tiles.main, capsys)
    assert {row["work"].split(", ")[1] for row in rows} == {"norm", "sum", "gradient"}
    assert all(row["TFLOP/s"] > 0 for row in rows)
    assert calls.of("cuda") == []


def test_the_first_look(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the processes that compile: compilers of devices have tests of their own."""
    monkeypatch.setattr(gpu_first, "compiled", lambda where: [{"what": "compile"}])
    with device_path():
        assert gpu_first.main(SMALL) == 0
    out = capsys.readouterr().out
    for part in ("GB/s", "with norms TFLOP/s", "in 16 bits, with norms", '"kernel"'):
        assert part in out


def test_every_model_takes_its_steps_without_the_reference(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_models, "MANY", ())
    monkeypatch.setattr(gpu_models, "FEW", ("torch fused", "dpkern"))
    monkeypatch.setattr(gpu_time, "ROUNDS", 1)
    rows, calls = rehearsed(gpu_models.main, capsys)
    private = [row for row in rows if row["variant"] == "dpkern"]
    assert len(private) == len(gpu_models.tasks(gpu_time.setting("", SMALL)))
    assert all(row["of non-private"] > 0 for row in private)
    assert sum("predicted" in row for row in private) == len(gpu_models.PREDICTED)
    assert calls.of("reference") == []


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("lstm", "dpkern as a graph"),
        ("resnet18", "dpkern as a graph, Poisson"),
        ("resnet18", "dpkern exact as a graph"),
    ],
)
def test_a_recorded_step_is_measured(
    name: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_time, "ROUNDS", 1)
    where = gpu_time.setting("", SMALL)
    (task,) = (task for task in gpu_models.tasks(where) if task.name == name)
    with device_path(), recorded():
        row = gpu_models.measured(gpu_models.variants(name)[variant], task, where)
    assert min(row["ms"], row["backward ms"], row["host ms"]) > 0


def test_a_part_that_fails_is_noticed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: Any, **__: Any) -> Any:
        raise AssertionError("a wrong bit")

    monkeypatch.setattr(gpu_smoke, "compared", wrong)
    with device_path():
        assert gpu_smoke.main(SMALL) == 1
    assert "a wrong bit" in capsys.readouterr().out

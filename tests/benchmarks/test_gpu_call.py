"""``benchmarks/gpu.sh`` on machines that are not there: a stand-in for Python says what they have.

What matters most: no part is green on a machine where it could show nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = {
    "smoke": "-m benchmarks.gpu_smoke",
    "first": "-m benchmarks.gpu_first",
    "test": "-m tests.gpu_run --require cuda,triton,cupy",
    "models": "-m benchmarks.gpu_models",
    "tiles": "-m benchmarks.gpu_tiles",
    "bench": "-m benchmarks.gpu",
    "memcheck": "-m benchmarks.gpu_smoke --scale 0.5",
    "bits": "-m benchmarks.gpu_bits",
}
CALLS = {
    "1": ["smoke", "first"],
    "2": ["test"],
    "3": ["models"],
    "4": ["tiles", "bench"],
    "5": ["memcheck", "bits"],
}
"""The campaign: what breaks first, then tests, then steps, then what may be left out."""
PYTHON = """#!/bin/sh
echo "$*" >> "$STATE/calls"
case "$*" in
  "-m benchmarks.gpu_ready check ") exit "$DEVICE" ;;
  "-m benchmarks.gpu_ready check"*) test -e "$STATE/ready" || { echo "BackendError"; exit 4; } ;;
  "-m benchmarks.gpu_ready unpack"*) test -e "$STATE/wheel" && touch "$STATE/ready" ;;
  "-m pip install -e"*)
    echo "werror $DPKERN_WERROR cuda $DPKERN_CUDA archs $DPKERN_CUDA_ARCHS" >> "$STATE/calls"
    test -e "$STATE/compiler" || exit 1
    test -e "$STATE/no-cupy" || touch "$STATE/ready" ;;
  "-m benchmarks.gpu_bits"*) exit 1 ;;
  "-m benchmarks.gpu_smoke --scale"*) echo "caching ${PYTORCH_NO_CUDA_MEMORY_CACHING:-on}" ;;
esac
"""
SANITIZER = '#!/bin/sh\necho "$1 $2"\nshift 4\nexec "$@"\n'


@dataclass(frozen=True)
class Machine:
    """A machine with some of ``wheel``, ``compiler``, ``ready``, ``no-cupy``, ``sanitizer``."""

    state: Path

    @property
    def calls(self) -> list[str]:
        """The requests to its Python."""
        return (self.state / "calls").read_text().splitlines()

    @property
    def log(self) -> str:
        """The output of the parts."""
        return (self.state / "out" / "log.txt").read_text()

    def run(self, *options: str, device: int = 0) -> int:
        """The script's exit code."""
        environment = os.environ | {
            "PYTHON": str(self.state / "bin" / "python"),
            "PATH": f"{self.state / 'bin'}:/usr/bin:/bin",
            "OUT": str(self.state / "out"),
            "STATE": str(self.state),
            "DEVICE": str(device),
            "DPKERN_WERROR": "on",
        }
        command = [str(ROOT / "benchmarks" / "gpu.sh"), "--wheels", str(self.state), *options]
        return subprocess.run(command, env=environment, capture_output=True, check=False).returncode


@pytest.fixture
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Machine:
    """What the parameter names is there, nothing else."""
    (tmp_path / "bin").mkdir()
    tools = {"python": PYTHON, "nvidia-smi": "#!/bin/sh\necho 9.0\n"}
    if "sanitizer" in request.param:
        tools["compute-sanitizer"] = SANITIZER
    for name, text in tools.items():
        path = tmp_path / "bin" / name
        path.write_text(text)
        path.chmod(0o755)
    for name in request.param:
        (tmp_path / name).touch()
    return Machine(tmp_path)


def having(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "machine", [names], ids=["+".join(names) or "bare"], indirect=True
    )


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("machine", [(), ("compiler", "no-cupy")], indirect=True, ids=str)
def test_every_part_fails_where_its_build_or_a_backend_is_missing(
    machine: Machine, part: str
) -> None:
    assert machine.run("--part", part) == 4
    assert not [call for call in machine.calls if f"{call} ".startswith(f"{PARTS[part]} ")]
    assert "BackendError" in (machine.state / "out" / "build.txt").read_text()


@pytest.mark.parametrize("part", [part for part in PARTS if part not in ("bits", "memcheck")])
@having("compiler")
def test_every_part_builds_on_a_bare_machine(machine: Machine, part: str) -> None:
    assert machine.run("--part", part) == 0
    assert machine.calls[-1].startswith(PARTS[part])
    (built,) = (call for call in machine.calls if call.startswith("werror"))
    assert built == "werror off cuda on archs 90-real"


@having("wheel")
def test_a_wheel_that_travelled_is_enough(machine: Machine) -> None:
    assert machine.run("--part", "smoke") == 0
    assert not [call for call in machine.calls if call.startswith("-m pip")]


@having("wheel", "sanitizer")
def test_all_parts_run_after_one_that_fails(machine: Machine) -> None:
    assert machine.run() == 1  # bits
    summary = (machine.state / "out" / "summary.txt").read_text().splitlines()
    assert [line.split(":")[0] for line in summary] == [f"part {part}" for part in PARTS]
    assert [line for line in summary if "exit 0" not in line] == [summary[-1]]
    assert sum(path.is_file() for path in (machine.state / "out").rglob("*")) <= 8


@having("wheel", "sanitizer")
@pytest.mark.parametrize("call", CALLS)
def test_a_call_of_the_campaign_runs_its_parts_and_leaves_eight_files(
    machine: Machine, call: str
) -> None:
    assert machine.run("--call", call) == int("bits" in CALLS[call])
    summary = (machine.state / "out" / "summary.txt").read_text().splitlines()
    assert [line.split(":")[0] for line in summary] == [f"part {part}" for part in CALLS[call]]
    assert sum(path.is_file() for path in (machine.state / "out").rglob("*")) <= 8
    if call == "2":
        seconds = next(c for c in machine.calls if "gpu_run" in c).split("--seconds ")[1].split()[0]
        assert 400 < int(seconds) < 9 * 60


def test_the_calls_take_every_part_once() -> None:
    assert [part for parts in CALLS.values() for part in parts] == list(PARTS)


@having("wheel", "sanitizer")
def test_memory_is_checked_without_the_caching_allocator(machine: Machine) -> None:
    assert machine.run("--part", "memcheck") == 0
    assert machine.log.count("caching 1") == 2
    assert "--tool memcheck" in machine.log
    assert "--tool racecheck" in machine.log


@pytest.mark.skipif(
    shutil.which("compute-sanitizer", path="/usr/bin:/usr/local/cuda/bin") is not None,
    reason="compute-sanitizer is installed",
)
@having("wheel")
def test_a_missing_checker_is_no_success(machine: Machine) -> None:
    assert machine.run("--part", "memcheck") == 4
    assert "BackendError: compute-sanitizer: expected on PATH, found none" in machine.log


@having("wheel")
def test_other_packages_travel_with_the_call(machine: Machine) -> None:
    for name in ("opacus-1.6.0-py3-none-any.whl", "dpkern-0.1.0-cp312-cp312-linux_x86_64.whl"):
        (machine.state / name).touch()
    assert machine.run("--part", "smoke") == 0
    (call,) = (call for call in machine.calls if call.startswith("-m pip"))
    assert "--no-index" in call
    assert call.endswith("opacus-1.6.0-py3-none-any.whl")


@having("wheel")
@pytest.mark.parametrize(
    "options",
    [("--part", "everything"), ("--quick", "1"), ("--minutes", "ten"), ("--call", "6")],
    ids=str,
)
def test_unknown_options_are_refused(machine: Machine, options: tuple[str, str]) -> None:
    assert machine.run(*options) == 2
    assert not (machine.state / "calls").exists()


@having("wheel")
def test_without_a_device_nothing_is_built_or_written(machine: Machine) -> None:
    assert machine.run(device=3) == 3
    assert machine.calls == ["-m benchmarks.gpu_ready check "]
    assert not (machine.state / "out").exists()

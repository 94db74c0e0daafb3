"""Checkpoints that are damaged, cut off, foreign or hostile: refused, typed, nothing changed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dpkern.base import sealed
from dpkern.base.errors import DPKernError, InvalidInput, PrivacyError
from dpkern.ops import update
from dpkern.privacy.mechanisms.memory import MechanismState
from tests.engine.damage import Saved, cuts, flipped, flips
from tests.engine.engine_run import Run

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A checkpoint, and a run that nothing is ever loaded into."""
    return Saved(tmp_path_factory.mktemp("saved") / "run.pt")


def test_flipped_bits_are_refused(saved: Saved) -> None:
    for bit, content in flips(saved.content, 100):
        said = saved.refuses(content)
        assert said is not None, f"bit {bit} was not seen"
        assert said.startswith("path: "), said


def test_without_the_checksum_flipped_bits_would_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = Saved(tmp_path / "run.pt")
    monkeypatch.setattr(sealed, "_check_seal", lambda *given: None)
    assert any(saved.refuses(content) is None for _, content in flips(saved.content, 100))


def test_cut_files_are_refused(saved: Saved) -> None:
    for end, content in cuts(saved.content, 20):
        assert saved.refuses(content), f"{end} bytes were enough"
    assert saved.refuses(saved.content + b"\0")
    assert saved.refuses(b"")


def test_no_damage_makes_a_file_look_as_if_it_never_had_a_checksum(saved: Saved) -> None:
    archive = saved.content.rindex(b"PK\x05\x06") + 22
    said = saved.refuses(saved.content[:archive])
    assert said is not None
    assert "no checksum at its end" in said
    bare = saved.content[: archive - 2] + bytes(2)  # what torch.save wrote
    said = saved.refuses(bare)
    assert said is not None
    assert "torch.load(path, weights_only=True)" in said


def test_the_remedy_for_files_without_a_checksum_works(tmp_path: Path) -> None:
    saved = Saved(tmp_path / "run.pt")
    torch.save(torch.load(saved.path, weights_only=True), saved.path)
    with pytest.raises(InvalidInput, match="without a checksum"):
        saved.load()
    content = torch.load(saved.path, weights_only=True)
    run = saved.run
    run.engine.load_state_dict(content["privacy_engine_state_dict"])
    run.module.load_state_dict(content["module_state_dict"])
    run.optimizer.load_state_dict(content["optimizer_state_dict"])
    assert torch.equal(run.values(), saved.first.values())


def test_a_sound_file_loads_everything(tmp_path: Path) -> None:
    saved = Saved(tmp_path / "run.pt")
    assert torch.load(saved.path, weights_only=True).keys() == saved.load().keys()
    assert torch.equal(saved.run.values(), saved.first.values())
    assert saved.run.engine.state_dict() == saved.first.engine.state_dict()
    assert saved.run.optimizer.noise_multiplier == pytest.approx(0.9)


def test_extras_survive(saved: Saved) -> None:
    content = torch.load(saved.path, weights_only=True)
    assert content["epoch"] == 3
    assert content["scores"][0] == 0.5
    assert content["scores"][1].tolist() == [0, 1, 2]


def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    run, path = Run(), tmp_path / "run.pt"
    path.write_text("old")
    for bad, said in (
        ({"where": tmp_path}, "pathlib"),
        ({"how": lambda: 0}, "lambda"),
        ({"number": 1 << 20000}, "weights_only=True"),
        ([3], "checkpoint_dict"),
    ):
        with pytest.raises(InvalidInput, match=said):
            run.engine.save_checkpoint(path=path, module=run.module, checkpoint_dict=bad)  # type: ignore[arg-type]
        assert path.read_text() == "old"
        assert list(tmp_path.iterdir()) == [path]


def test_an_engine_that_has_advanced_is_refused_before_anything_changes(tmp_path: Path) -> None:
    saved = Saved(tmp_path / "run.pt")
    saved.run.train(most=1)
    before = saved.state()
    with pytest.raises(PrivacyError, match="1 batches"):
        saved.load()
    assert saved.state() == before


def test_an_engine_with_samples_at_hand_is_refused(tmp_path: Path) -> None:
    saved = Saved(tmp_path / "run.pt")
    run = saved.run
    x, y = next(iter(run.loader))
    nn.functional.cross_entropy(run.module(x), y).backward()
    before = run.values().clone()
    with pytest.raises(PrivacyError, match="Load right after make_private"):
        saved.load()
    assert torch.equal(run.values(), before)
    assert not run.engine.step.steps


def rewritten(saved: Saved, change: Any) -> bytes:
    """The file with its content changed on purpose, and a right checksum."""
    content = torch.load(saved.path, weights_only=True)
    change(content)
    path = saved.path.with_name("rewritten.pt")
    sealed.write(path, content)
    return path.read_bytes()


def endless() -> list[Any]:
    """A list that holds itself 2^40 times: short in a file, too long to look at."""
    value: list[Any] = [1]
    for _ in range(40):
        value = [value, value]
    return value


def put(value: Any, *keys: Any) -> Any:
    def change(content: Any) -> None:
        *path, last = keys
        for key in path:
            content = content[key]
        content[last] = value

    return change


MODULE, OPTIMIZER, ENGINE = (
    f"{name}_state_dict" for name in ("module", "optimizer", "privacy_engine")
)
STEP = (ENGINE, "step")
BAD = {
    "module-shape": put(torch.ones(6, 5), MODULE, "0.weight"),
    "module-dtype": put(torch.ones(6, 4, dtype=torch.float64), MODULE, "0.weight"),
    "module-meta": put(torch.ones(6, 4, device="meta"), MODULE, "0.weight"),
    "module-sparse": put(torch.ones(6, 4).to_sparse(), MODULE, "0.weight"),
    "module-entry": put(3, MODULE, "2.bias"),
    "module-missing": lambda c: c[MODULE].pop("2.bias"),
    "module-foreign": put(torch.ones(1), MODULE, "3.bias"),
    "module-key": put(torch.ones(1), MODULE, 7),
    "module-list": put([1], MODULE),
    "optimizer-none": put(None, OPTIMIZER),
    "optimizer-groups": put([], OPTIMIZER, "param_groups"),
    "optimizer-group": put([3], OPTIMIZER, "param_groups"),
    "optimizer-size": lambda c: c[OPTIMIZER]["param_groups"][0]["params"].pop(),
    "optimizer-kind": lambda c: c[OPTIMIZER]["param_groups"][0].pop("betas"),
    "optimizer-slot": put(torch.ones(2, 3), OPTIMIZER, "state", 0, "exp_avg"),
    "optimizer-slots": put(3, OPTIMIZER, "state", 0),
    "optimizer-number": put([[], 1, 2, 3], OPTIMIZER, "param_groups", 0, "params"),
    "schedule-keys": put({}, "noise_scheduler_state_dict"),
    "schedule-base": put([1.0, 2.0], "noise_scheduler_state_dict", "base"),
    "schedule-text": put("1", "noise_scheduler_state_dict", "base"),
    "schedule-negative": put(-1.0, "noise_scheduler_state_dict", "base"),
    "schedule-epoch": put(-1, "noise_scheduler_state_dict", "last_epoch"),
    "engine-none": put(None, ENGINE),
    "engine-version": put(torch.ones(2), ENGINE, "version"),
    "engine-endless": put(endless(), ENGINE, "step"),
    "ranks-float": put(1.5, ENGINE, "loader", "ranks"),
    "ranks-list": put([1], ENGINE, "loader", "ranks"),
    "ranks-tensor": put(torch.ones(2), ENGINE, "loader", "ranks"),
    "loader-set": put({1, 2}, ENGINE, "loader", "batches"),
    "loader-endless": put(endless(), ENGINE, "loader", "batches"),
    "loader-place": put(10**500, ENGINE, "loader", "place"),
    "steps-huge": put(10**500, *STEP, "steps"),
    "steps-other": put(7, *STEP, "steps"),
    "words-text": put("1", *STEP, "words", "produced"),
    "fingerprint-tensor": put(torch.ones(3), *STEP, "fingerprint", "dtype"),
    "fingerprint-key": put(1, *STEP, "fingerprint", 7),
    "mechanism-list": put([1.0], *STEP, "mechanism", "noise_multiplier"),
    "memory": put({"x": [torch.ones(1)]}, *STEP, "memory"),
    "ledger-rate": put(2.0, *STEP, "ledger", "entries", 0, "sample_rate"),
    "ledger-event": put({"event": 3}, *STEP, "ledger", "entries", 0, "event"),
    "ledger-count": put(10**300, *STEP, "ledger", "entries", 0, "count"),
    "ledger-multiplier": put(10**400, *STEP, "ledger", "entries", 0, "event", "noise_multiplier"),
    "ledger-ordered": put(OrderedDict(a=1), *STEP, "ledger", "entries", 0),
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD)
def test_bad_content_with_a_right_checksum_is_refused(change: Any, saved: Saved) -> None:
    content = rewritten(saved, change)
    started = time.perf_counter()
    said = saved.refuses(content)
    assert said is not None
    assert len(said) < 1000
    # Not a measurement: what this guards against took minutes, or never came back.
    assert time.perf_counter() - started < 20


@pytest.mark.parametrize("keys", [("step", "steps"), ("loader", "place"), ("loader", "steps")])
def test_numbers_without_a_decimal_form_are_refused(keys: tuple[str, str], saved: Saved) -> None:
    state: Any = saved.first.engine.state_dict()
    state[keys[0]][keys[1]] = 10**5000
    with pytest.raises(InvalidInput, match=r"huge int|6 batches"):
        saved.run.engine.load_state_dict(state)


class Slow(float):
    """A number that cannot be compared in any reasonable time."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError("asked to compare")

    __hash__ = float.__hash__


@pytest.mark.parametrize("keys", [("version",), ("loader", "ranks"), ("step", "words", "consumed")])
def test_foreign_types_are_not_asked_anything(keys: tuple[str, ...], saved: Saved) -> None:
    state = saved.first.engine.state_dict()
    put(Slow(1.0), *keys)(state)
    with pytest.raises(InvalidInput, match="a Slow in it"):
        saved.run.engine.load_state_dict(state)


class Own(nn.Linear):
    """A layer that takes its weights in its own way, and fails at the end."""

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state, prefix, *rest)
        raise KeyError("own")


@pytest.mark.parametrize("failing", ["module", "optimizer"])
def test_what_fails_while_loading_puts_everything_back(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = Saved(tmp_path / "run.pt")
    if failing == "module":
        saved.run.module[2].__class__ = Own  # type: ignore[operator, index, assignment]
    else:

        def fail(self: Any, state: Any) -> None:
            self.param_groups, self.state = [], {}
            raise ZeroDivisionError

        monkeypatch.setattr(torch.optim.Adam, "load_state_dict", fail)
    before = saved.state()
    with pytest.raises(InvalidInput, match=f"^{failing}: .*Nothing was loaded"):
        saved.load()
    assert saved.state() == before


def test_parts_of_another_type_are_refused(saved: Saved, tmp_path: Path) -> None:
    engine: Any = saved.run.engine
    for given in ({"module": None, "optimizer": 3}, {"module": "net"}):
        parts = {"module": saved.run.module, **{k: v for k, v in given.items() if v}}
        with pytest.raises(InvalidInput, match=next(reversed(given))):
            engine.load_checkpoint(path=saved.path, **parts)
        with pytest.raises(InvalidInput, match=next(reversed(given))):
            engine.save_checkpoint(path=tmp_path / "run.pt", **parts)


@pytest.mark.parametrize(
    "name",
    ["", "missing.pt", "folder", "new/", "no/where.pt", "a\0b", "x" * 300, 7, None, "/dev/null"],
)
def test_paths_that_hold_no_checkpoint(saved: Saved, tmp_path: Path, name: Any) -> None:
    (tmp_path / "folder").mkdir()
    path = os.path.join(tmp_path, name) if isinstance(name, str) else name
    with pytest.raises(InvalidInput, match=r"^path: "):
        saved.run.engine.load_checkpoint(path=path, module=saved.run.module)
    if name != "missing.pt":
        first = saved.first
        with pytest.raises(InvalidInput, match=r"^path: "):
            first.engine.save_checkpoint(path=path, module=first.module)
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no", b"hello", b"\0" * 5000])
def test_foreign_files_are_refused(saved: Saved, content: bytes) -> None:
    assert saved.refuses(content)


WRITER = """
import sys
import torch
from pathlib import Path
from dpkern.base import sealed as _sealed
print("imported", flush=True)
for i in range(int(sys.argv[2])):
    _sealed.write(Path(sys.argv[1]), {"i": i, "x": torch.full((2000,), float(i))})
"""


def test_two_processes_on_one_path(tmp_path: Path) -> None:
    path = tmp_path / "shared.pt"
    sealed.write(path, {"i": 0, "x": torch.zeros(2000)})
    command = [sys.executable, "-c", WRITER, str(path), "8"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "imported\n"
        reads, seen = 0, set()
        while writer.poll() is None:
            found = sealed.read(path, unsealed="")
            assert bool((found["x"] == found["i"]).all())
            if not reads % 100:
                sealed.write(path, found)
            reads += 1
            seen.add(found["i"])
        assert writer.returncode == 0
    assert reads > 0
    assert list(tmp_path.iterdir()) == [path]


def test_one_flip_in_a_training_checkpoint_is_refused(tmp_path: Path) -> None:
    from dpkern.train import checkpoint

    path = tmp_path / "deep" / "checkpoint.pt"
    keys = checkpoint._KEYS - {"format", "version"}
    checkpoint.write(path, dict.fromkeys(keys, 1))
    assert checkpoint.read(path)["seconds"] == 1
    content = path.read_bytes()
    for _, damaged in flips(content, 50):
        path.write_bytes(damaged)
        with pytest.raises(InvalidInput, match=r"^resume: "):
            checkpoint.read(path)
    torch.save({"format": "dpkern training checkpoint"}, path)
    with pytest.raises(InvalidInput, match="resume with the version that wrote"):
        checkpoint.read(path)
    path.write_bytes(flipped(content, 0))
    with pytest.raises(DPKernError):
        checkpoint.read(path)


def test_each_state_checks_types_on_its_own(saved: Saved) -> None:
    state = saved.first.loader.state_dict()
    for wrong in (Slow(1.0), 1.5, "1", [1], torch.ones(2)):
        with pytest.raises(InvalidInput, match=r"^state"):
            saved.run.loader.load_state_dict(state | {"ranks": wrong})
    for held in (MechanismState({"m": [torch.ones(2)]}), update.State(0, {"m": [torch.ones(2)]})):
        state = held.state_dict()
        for wrong in (torch.ones(2).double(), torch.ones(2, device="meta"), torch.ones(1), 3):
            bad = {"m": [wrong]}
            with pytest.raises(InvalidInput, match="dtypes"):
                held.load_state_dict(bad if "m" in state else state | {"buffers": bad})
    saved.run.engine.check_state(saved.first.engine.state_dict())


def test_states_of_numpy_numbers_are_plain(tmp_path: Path) -> None:
    run, other = (Run(noise_multiplier=np.float64(1.5)) for _ in range(2))
    run.train(most=1)
    run.engine.save_checkpoint(path=tmp_path / "run.pt", module=run.module)
    other.engine.load_checkpoint(path=tmp_path / "run.pt", module=other.module)
    assert other.engine.step.steps == 1

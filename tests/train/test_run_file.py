"""Run files: every option by its name, the command line wins, and a run writes its own."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from dpkern.base.errors import InvalidInput
from dpkern.cli import main
from dpkern.commands import train as command
from dpkern.train import run_file

TYPES = command.option_types()


def written(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def test_every_option_of_the_command_can_stand_in_a_file(tmp_path: Path) -> None:
    values = {str: '"x"', int: "2", float: "2", bool: "true", Path: '"x"', list[str]: '["x"]'}
    kinds = {
        name: next(k for k in values if k in (t, *getattr(t, "__args__", ())))
        for name, t in TYPES.items()
    }
    text = "".join(f"{run_file._shown(name)} = {values[kind]}\n" for name, kind in kinds.items())
    found = run_file.read(written(tmp_path, text), TYPES)
    assert found.keys() == TYPES.keys()
    assert {name: type(value) for name, value in found.items()} == {
        name: list if kind == list[str] else type(Path()) if kind is Path else kind
        for name, kind in kinds.items()
    }
    left_out = get_type_hints(command.command).keys() - TYPES.keys()
    assert left_out == {"config", "json", "return"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("epsilom = 3", "epsilom: .* Did you mean epsilon"),
        ("nothing-like-it = 3", "nothing-like-it: .* lists all options"),
        ("json = true", "json: expected an option"),
        ('epsilon = "3"', "epsilon: expected a number"),
        ("epsilon = true", "epsilon: expected a number"),
        ("epochs = 2.5", "epochs: expected a whole number"),
        ("diagnostics = 1", "diagnostics: expected true or false"),
        ("set = [1]", r"set\[0\]: expected a text"),
        ("lr = 0.1\nmax-grad-norm = 1\nmax_grad_norm = 2", "two spellings"),
        ("epsilon == 3", "TOML file"),
        ("[data]\nx = 1", "data: expected a text"),
    ],
)
def test_what_a_file_may_not_say_is_refused_by_name(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        run_file.read(written(tmp_path, text), TYPES)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"none\.toml"):
        run_file.read(tmp_path / "none.toml", TYPES)


def test_the_command_line_wins_also_over_the_other_way_to_say_it(tmp_path: Path) -> None:
    path = written(tmp_path, "epsilon = 3\nepochs = 5\nlr = 0.1")
    given = {"noise_multiplier": 1.0, "epochs": 2}
    assert run_file.merged(path, TYPES, given) == {
        "noise_multiplier": 1.0,
        "epochs": 2,
        "lr": 0.1,
    }


@pytest.mark.parametrize("name", ["ceiling", "diagnostics", "no-figure", "overwrite", "resume"])
def test_a_switch_of_a_file_is_turned_off_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    seen: list[dict[str, Any]] = []

    def stop(given: dict[str, Any], *_: Any) -> None:
        seen.append(given)
        raise InvalidInput("here", expected="nothing", got="options", remedy="None is needed.")

    monkeypatch.setattr(command, "make_session", stop)
    path = written(tmp_path, f"{name} = true\nepsilon = 3")
    off = "--figure" if name == "no-figure" else f"--no-{name}"
    assert main(["train", "--config", str(path)]) == 2
    assert main(["train", "--config", str(path), off]) == 2
    assert main(["train", "--epsilon", "3"]) == 2
    assert seen[0] != seen[1] == seen[2]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["train", "--json", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_run_writes_a_file_that_makes_the_same_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    text = (
        'epochs = 2\nepsilon = 8\nunsafe-seed = 1\nno-figure = true\nmode = "published"\n'
        'mechanism = "dpsgd"\nset = ["noise_point=per_batch"]\ntest-fraction = 0.25\n'
    )
    path = written(tmp_path, text)
    first = run(capsys, "--config", str(path), "--out", str(tmp_path / "a"), "--lr", "0.2")
    again = tmp_path / "a" / "config.toml"
    second = run(capsys, "--config", str(again), "--out", str(tmp_path / "b"))
    assert first["test_loss"] == second["test_loss"]
    assert first["options"] == second["options"]
    assert again.read_text() == (tmp_path / "b" / "config.toml").read_text()
    content = tomllib.loads(again.read_text())
    assert (content["lr"], content["epsilon"], content["no-figure"]) == (0.2, 8, True)
    assert first["config"] == str(again)


def test_texts_come_back_as_they_were(tmp_path: Path) -> None:
    for text in ('a "b" \\ c', "café \x7f\n\t", "C:\\data"):
        path = written(tmp_path, f"data = {run_file._toml(text)}\n")
        assert run_file.read(path, TYPES) == {"data": text}


def test_the_ceiling_is_flagged_and_only_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    options = ("--epsilon", "1", "--epochs", "10", "--no-figure", "--unsafe-seed", "1")
    without = run(capsys, *options, "--out", str(tmp_path / "a"))
    assert without["non_private_ceiling"] is None
    found = run(capsys, *options, "--ceiling", "--out", str(tmp_path / "b"))
    assert found["test_loss"] == without["test_loss"]
    ceiling = found["non_private_ceiling"]
    assert ceiling["test_accuracy"] > found["test_accuracy"]
    assert ceiling["test_accuracy"] > 0.9
    assert "not private" in ceiling["note"]
    assert any("no epsilon covers" in each for each in found["warnings"])
    assert not any("ceiling" in each for each in without["warnings"])


def test_runs_that_have_no_ceiling_refuse_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", "--mechanism", "spof", "--epsilon", "1", "--ceiling"]
    assert main([*arguments, "--out", str(tmp_path / "a")]) == 2
    assert "--ceiling" in capsys.readouterr().err


def test_a_mark_that_editors_put_first_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbfepochs = 2\n")
    assert run_file.read(path, TYPES) == {"epochs": 2}

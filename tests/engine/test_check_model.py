"""``dpkern check``: models by preset, file and module; what is said, and what cannot be loaded."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch import nn

from dpkern import cli
from dpkern.base.errors import InvalidInput
from dpkern.engine.check_model import load_model, report

PRESETS: dict[str, Callable[[], nn.Module]] = {"tiny": lambda: nn.Linear(2, 2)}

ZOO = """
from dataclasses import dataclass
from torch import nn
import layers

@dataclass(frozen=True)
class Size:
    width: int = 4

def good():
    print("making a model")
    return nn.Sequential(nn.Linear(Size().width, 4), layers.activation())

def bad():
    return nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.MultiheadAttention(4, 2),
        nn.TransformerEncoderLayer(4, 2, 8),
    )

def lazy():
    return nn.LazyLinear(4)

def needs(width):
    return nn.Linear(width, width)

def fails():
    import later
    return nn.Linear(later.WIDTH, 4)

def stops():
    raise SystemExit(3)

number = 3
model = nn.Linear(4, 4)
no_model = lambda: [nn.Linear(4, 4)]
"""


@pytest.fixture(autouse=True)
def _zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "zoo.py").write_text(ZOO)
    (folder / "layers.py").write_text("from torch import nn\nactivation = nn.ReLU\n")
    (folder / "broken.py").write_text("import no_such_package_at_all\n")
    (folder / "syntax.py").write_text("def model(:\n")
    package = tmp_path / "package_of_models"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text("from torch import nn\nmodel = lambda: nn.Linear(3, 3)\n")
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("layers", "package_of_models", "_checked_zoo"):
            del sys.modules[name]


def test_a_preset() -> None:
    assert isinstance(load_model("tiny", PRESETS), nn.Linear)


def test_a_file_and_its_neighbours() -> None:
    path = list(sys.path)
    model = load_model("models/zoo.py:good", PRESETS)
    assert [type(part) for part in model] == [nn.Linear, nn.ReLU]
    assert sys.path == path


def test_an_absolute_path(tmp_path: Path) -> None:
    assert len(load_model(f"{tmp_path}/models/zoo.py:good", PRESETS)) == 2


def test_a_module_of_the_working_directory() -> None:
    assert load_model("package_of_models.inner:model", PRESETS).in_features == 3


BAD: dict[str, tuple[str, str]] = {
    "unknown": ("resnet", "expected one of tiny, or path/to/file.py:callable"),
    "empty": ("", "expected one of tiny"),
    "no-callable": ("models/zoo.py:", "expected one of tiny"),
    "no-source": (":good", "expected one of tiny"),
    "no-file": ("models/none.py:good", "expected a Python file, got models/none.py"),
    "a-folder": ("models:good", "nothing of that name"),
    "no-module": ("package_of_models.none:model", "ModuleNotFoundError"),
    "not-there": ("models/zoo.py:nothing", "nothing of that name"),
    "a-number": ("models/zoo.py:number", "got int"),
    "the-model-itself": ("models/zoo.py:model", "got Linear"),
    "another-result": ("models/zoo.py:no_model", "got list"),
    "needs-arguments": ("models/zoo.py:needs", "TypeError: .*width"),
    "fails": ("models/zoo.py:fails", r"expected fails\(\) to run without an error"),
    "exits": ("models/zoo.py:stops", "SystemExit: 3"),
    "import-fails": ("models/broken.py:model", "no_such_package_at_all"),
    "syntax": ("models/syntax.py:model", "SyntaxError"),
}


@pytest.mark.parametrize(("spec", "text"), BAD.values(), ids=BAD)
def test_what_cannot_be_loaded(spec: str, text: str) -> None:
    path = list(sys.path)
    with pytest.raises(InvalidInput, match=text):
        load_model(spec, PRESETS)
    assert sys.path == path


def test_rows_of_the_report() -> None:
    rows = report(load_model("models/zoo.py:bad", PRESETS))
    assert [(row["severity"], row["name"], row["kind"]) for row in rows] == [
        ("refuse", "1", "BatchNorm1d"),
        ("refuse", "3", "TransformerEncoderLayer"),
        ("note", "2", "MultiheadAttention"),
        ("note", "3.self_attn", "MultiheadAttention"),
    ]
    assert all(row["what"] and row["remedy"] for row in rows)
    assert report(nn.Linear(2, 2)) == []


@pytest.mark.parametrize("model", ["linear", "mlp", "lenet5", "models/zoo.py:good"])
def test_good_models(capsys: pytest.CaptureFixture[str], model: str) -> None:
    assert cli.main(["check", model]) == 0
    assert f"{model}: nothing to refuse before it runs" in capsys.readouterr().out


def test_the_table_of_a_bad_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "models/zoo.py:bad"]) == 1
    out = capsys.readouterr().out
    assert "2 refused" in out
    assert "BatchNorm1d" in out
    assert "[batch, time," in " ".join(out.split())  # not taken for markup


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "models/zoo.py:bad", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["model"], found["refused"]) == ("models/zoo.py:bad", 2)
    assert found["trained_parameters"] > 0
    assert len(found["findings"]) == 4


def test_json_is_alone_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "models/zoo.py:good", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["findings"] == []
    assert "making a model" in captured.err


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_parameters_are_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "models/zoo.py:lazy", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["trained_parameters"] == 0
    assert {row["name"] for row in found["findings"]} == {"weight", "bias"}


def test_a_model_that_cannot_be_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "alexnet", "--json"]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["error"]["type"] == "InvalidInput"
    assert "dpkern" not in captured.err  # no traceback

"""Data and models of the training command: what is read, what is refused, which gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpkern.base.errors import InvalidInput
from dpkern.engine.demo.models import evaluate
from dpkern.train import MODELS, Session, build, load
from dpkern.train import data as data_module

ROWS, FEATURES, CLASSES = 60, 6, 3


def arrays(rows: int = ROWS, features: int = FEATURES) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    y = np.arange(rows) % CLASSES
    x = draw.normal(size=(rows, features)) + 2 * np.eye(CLASSES, features)[y]
    return x.astype(np.float32), y


def write_csv(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.fixture
def points(tmp_path: Path) -> Path:
    path = tmp_path / "points.npz"
    x, y = arrays()
    np.savez(path, x=x, y=y)
    return path


def test_digits_are_scaled_by_a_public_constant_and_split_by_a_public_seed() -> None:
    digits = load("digits")
    assert digits.row_shape == (8, 8)
    assert digits.classes == 10
    assert (len(digits.x_train), len(digits.x_test)) == (1438, 359)
    assert float(digits.x_train.min()) == 0
    assert float(digits.x_train.max()) == 1
    again, other = load("digits"), load("digits", split_seed=1)
    assert torch.equal(digits.x_test, again.x_test)
    assert not torch.equal(digits.x_test, other.x_test)


def test_npz_round_trip_with_test_rows_and_feature_scale(tmp_path: Path) -> None:
    x, y = arrays()
    path = tmp_path / "a.npz"
    np.savez(path, x=x[:40], y=y[:40], x_test=x[40:], y_test=y[40:])
    found = load(str(path), feature_scale=2.0)
    assert torch.equal(found.x_train, torch.from_numpy(x[:40] / np.float32(2)))
    assert torch.equal(found.y_test, torch.from_numpy(y[40:]))
    assert found.classes == CLASSES


@pytest.mark.parametrize(
    ("header", "label"),
    [(None, -1), ("a,b,c,d,e,f,target", -1), ("a,label,b,c,d,e,f", 1), ("0,label,1,2,3,4,5", 1)],
    ids=["no header", "last column", "label column", "numbered columns"],
)
def test_csv_round_trip(tmp_path: Path, header: str | None, label: int) -> None:
    x, y = arrays()
    table = np.insert(x.astype(float), label if label >= 0 else FEATURES, y, axis=1)
    lines = [",".join(repr(float(v)) for v in row) for row in table]
    path = write_csv(tmp_path / "a.csv", "\n".join(([header] if header else []) + lines) + "\n")
    from_csv = load(str(path))
    np.savez(tmp_path / "a.npz", x=x, y=y)
    from_npz = load(str(tmp_path / "a.npz"))
    assert torch.equal(from_csv.x_train, from_npz.x_train)
    assert torch.equal(from_csv.y_train, from_npz.y_train)


def test_folder_with_train_and_test(tmp_path: Path) -> None:
    x, y = arrays()
    np.savez(tmp_path / "train.npz", x=x[:40], y=y[:40])
    np.savez(tmp_path / "test.npz", x=x[40:], y=y[40:])
    found = load(str(tmp_path))
    assert (len(found.x_train), len(found.x_test)) == (40, 20)


def npz(**changes: Any) -> Callable[[Path], Path]:
    """A maker of an archive that differs from a good one; None leaves an array out."""

    def make(folder: Path) -> Path:
        x, y = arrays()
        content = {"x": x, "y": y} | changes
        path = folder / "a.npz"
        np.savez(path, **{name: value for name, value in content.items() if value is not None})
        return path

    return make


def text(name: str, content: str) -> Callable[[Path], Path]:
    return lambda folder: write_csv(folder / name, content)


def several(folder: Path) -> Path:
    write_csv(folder / "a.csv", "1,0\n2,1\n")
    return write_csv(folder / "b.csv", "1,0\n2,1\n").parent


X, Y = arrays()
BAD_DATA: dict[str, tuple[Callable[[Path], Path], str]] = {
    "no such file": (lambda folder: folder / "none.npz", "data"),
    "name too long": (lambda folder: folder / ("x" * 300 + ".npz"), "data"),
    "unknown suffix": (text("a.xlsx", "1,0"), "data"),
    "no Parquet file": (text("a.parquet", "1,0"), "data"),
    "empty folder": (lambda folder: folder, "data"),
    "two files in a folder": (several, "data"),
    "not an archive": (text("a.npz", "hello"), "data"),
    "empty archive file": (text("a.npz", ""), "data"),
    "no y": (npz(y=None), "data"),
    "x_test without y_test": (npz(x_test=X), "data"),
    "test rows of another shape": (npz(x_test=X[:, :2], y_test=Y), "x_test"),
    "pickled objects": (npz(x=np.array([[{}]] * ROWS, dtype=object)), "data"),
    "text features": (npz(x=X.astype(str)), "x"),
    "complex features": (npz(x=X.astype(complex)), "x"),
    "NaN": (npz(x=np.where(X[3, 2] == X, np.nan, X)), "x"),
    "infinity": (npz(x=np.where(X[3, 2] == X, np.inf, X)), "x"),
    "beyond float32": (npz(x=X.astype(float) * 1e300), "x"),
    "no rows": (npz(x=X[:0], y=Y[:0]), "x"),
    "no features": (npz(x=X[:, :0]), "x"),
    "flat x": (npz(x=X[:, 0]), "x"),
    "length mismatch": (npz(y=Y[:-1]), "y"),
    "labels in two columns": (npz(y=np.stack([Y, Y], 1)), "y"),
    "fractional label": (npz(y=Y + 0.5), "y"),
    "NaN label": (npz(y=np.where(Y == 1, np.nan, Y)), "y"),
    "negative label": (npz(y=Y - 1), "y"),
    "huge label": (npz(y=Y * 10**9), "y"),
    "one class": (npz(y=Y * 0), "y"),
    "csv: empty": (text("a.csv", ""), "data"),
    "csv: header only": (text("a.csv", "a,b,label\n"), "data"),
    "csv: one column": (text("a.csv", "1\n2\n"), "data"),
    "csv: word in a cell": (text("a.csv", "1,2,0\n1,red,1\n"), "data"),
    "csv: ragged": (text("a.csv", "1,2,0\n1,1\n"), "data"),
    "csv: heading of another width": (text("a.csv", "a,b,c,label\n1,2,0\n1,1,1\n"), "data"),
    "csv: two label columns": (text("a.csv", "label,label\n1,2\n"), "data"),
    "csv: NaN": (text("a.csv", "nan,0\n1,1\n"), "data"),
    "csv: fractional label": (text("a.csv", "1,0.5\n1,1\n"), "y"),
    "csv: one row": (text("a.csv", "1,0\n"), "test_fraction"),
}


@pytest.mark.parametrize(("make", "name"), BAD_DATA.values(), ids=BAD_DATA.keys())
def test_bad_data_is_refused(tmp_path: Path, make: Callable[[Path], Path], name: str) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    source = make(folder)
    with pytest.raises(InvalidInput) as caught:
        Session({"data": str(source), "noise_multiplier": 1.0, "out": tmp_path / "out"})
    assert caught.value.name == name
    assert not (tmp_path / "out").exists()


def test_a_refused_cell_is_named_by_the_line_that_it_stands_on(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", 'a,b,"la\nbel"\n\n1,2,0\n1,,1\n')
    with pytest.raises(InvalidInput, match=r"column 'b', got a blank .* line 5"):
        load(str(path))


def test_classes_may_be_declared_but_not_below_the_labels(points: Path) -> None:
    assert load(str(points), classes=7).classes == 7
    with pytest.raises(InvalidInput, match="classes"):
        load(str(points), classes=CLASSES - 1)


def test_zero_rows_held_out(points: Path) -> None:
    with pytest.raises(InvalidInput, match="test_fraction"):
        load(str(points), test_fraction=1e-3)


def test_pixels_of_digits_never_exceed_the_public_scale() -> None:
    assert data_module.DIGITS_SCALE == 16.0


@pytest.mark.parametrize(
    ("name", "row_shape"),
    [
        ("linear", (7,)),
        ("mlp", (7,)),
        ("mlp", (2, 3, 5)),
        *(
            (name, shape)
            for name in ("lenet5", "resnet")
            for shape in ((64,), (4, 4), (8, 8), (3, 17, 17), (28, 28), (32, 32))
        ),
        *(("transformer", shape) for shape in ((3,), (17,), (2, 1), (8, 9), (3, 8, 9), (1024, 2))),
    ],
    ids=str,
)
def test_model_shapes(name: str, row_shape: tuple[int, ...]) -> None:
    model = build(name, row_shape=row_shape, classes=5)
    assert model(torch.zeros(2, *row_shape)).shape == (2, 5)


def test_lenet5_on_32_pixels_is_the_published_size() -> None:
    # LeCun et al. 1998: 61 706 weights with full connections between the two convolutions.
    model = build("lenet5", row_shape=(32, 32), classes=10)
    assert sum(p.numel() for p in model.parameters()) == 61_706


@pytest.mark.parametrize("name", ["resnet", "transformer"])
def test_preset_sizes_on_digits(name: str) -> None:
    model = build(name, row_shape=(8, 8), classes=10)
    assert 4_000 < sum(p.numel() for p in model.parameters()) < 50_000


@pytest.mark.parametrize("name", ["lenet5", "resnet"])
@pytest.mark.parametrize(
    "row_shape", [(7,), (17,), (8, 9), (3, 8, 9), (3, 3), (2, 2, 8, 8)], ids=str
)
def test_image_models_refuse_what_is_no_square_image(name: str, row_shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInput, match=f"square images of at least 4 x 4 for {name}"):
        build(name, row_shape=row_shape, classes=2)


@pytest.mark.parametrize(
    "row_shape", [(), (0,), (1,), (2,), (1, 8), (0, 8), (1025, 2), (2, 2, 8, 8)], ids=str
)
def test_transformer_refuses_rows_without_tokens(row_shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInput, match="2 to 1024 tokens"):
        build("transformer", row_shape=row_shape, classes=2)


def test_transformer_tokens_are_the_rows_of_all_channels() -> None:
    model = build("transformer", row_shape=(3, 8, 5), classes=2)
    x = torch.rand(2, 3, 8, 5)
    seen: list[torch.Tensor] = []
    model.get_submodule("embed").register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(x)
    assert torch.equal(seen[0][1, 4], x[1, :, 4].flatten())


def test_transformer_fills_the_last_token_with_zeros() -> None:
    model = build("transformer", row_shape=(17,), classes=2)
    x = torch.rand(2, 17)
    seen: list[torch.Tensor] = []
    model.get_submodule("embed").register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(x)
    assert seen[0].shape == (2, 4, 5)
    assert torch.equal(seen[0].flatten(1), torch.nn.functional.pad(x, (0, 3)))


def test_init_seed_is_all_that_decides_the_start() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, two, other = (
        build("mlp", row_shape=(7,), classes=2, init_seed=seed) for seed in (3, 3, 4)
    )
    assert torch.equal(torch.get_rng_state(), before)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
    first, second = next(one.parameters()), next(other.parameters())
    assert not torch.equal(first, second)


@pytest.mark.parametrize("name", MODELS)
def test_no_model_mixes_the_samples_of_a_batch(name: str) -> None:
    model = build(name, row_shape=(8, 8), classes=4).double()
    x = torch.rand(5, 8, 8, dtype=torch.float64)
    alone = torch.cat([model(row[None]) for row in x])
    torch.testing.assert_close(model(x), alone, rtol=1e-10, atol=1e-12)


def test_evaluation_does_not_depend_on_the_chunk() -> None:
    model = build("linear", row_shape=(3,), classes=2)
    x, y = torch.randn(10, 3), torch.arange(10) % 2
    assert evaluate(model, x, y) == pytest.approx(evaluate(model, x, y, chunk=3))

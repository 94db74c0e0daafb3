"""The published file formats: what is read, what is refused, what is said about other bytes."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from dpkern.base.errors import InvalidInput
from dpkern.train import formats, load, synthetic_data
from dpkern.train.synthetic_data import SYNTHETIC_DATASETS

DRAW = np.random.default_rng(0)
PIXELS = DRAW.integers(0, 256, (7, 28, 28), dtype=np.uint8)
COLOURS = DRAW.integers(0, 256, (20, 3, 32, 32), dtype=np.uint8)
LABELS = np.arange(20, dtype=np.uint8) % 10


def idx(array: np.ndarray) -> bytes:
    return (
        bytes((0, 0, 8, array.ndim))
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )


def mnist(folder: Path, *, packed: bool) -> None:
    for stem, rows in (("train", slice(0, 5)), ("t10k", slice(5, 7))):
        for name, array in (("images-idx3", PIXELS[rows]), ("labels-idx1", LABELS[:7][rows])):
            path = folder / f"{stem}-{name}-ubyte"
            if packed:
                Path(f"{path}.gz").write_bytes(gzip.compress(idx(array)))
            else:
                path.write_bytes(idx(array))


def batches(write: Callable[[str, np.ndarray, np.ndarray], None]) -> None:
    """Five training batches of three images and a test batch of five."""
    for number in range(5):
        rows = slice(3 * number, 3 * number + 3)
        write(f"data_batch_{number + 1}", COLOURS[rows], LABELS[rows])
    write("test_batch", COLOURS[15:], LABELS[15:])


def cifar_binary(folder: Path) -> None:
    def write(name: str, x: np.ndarray, y: np.ndarray) -> None:
        table = np.concatenate([y[:, None], x.reshape(len(x), -1)], 1)
        (folder / f"{name}.bin").write_bytes(table.tobytes())

    batches(write)


def cifar_python(folder: Path) -> None:
    def write(name: str, x: np.ndarray, y: np.ndarray) -> None:
        content = {"data": x.reshape(len(x), -1), "labels": y.tolist(), "batch_label": "a batch"}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))

    batches(write)


def svhn(folder: Path) -> None:
    savemat = pytest.importorskip("scipy.io").savemat
    for name, rows in (("train", slice(0, 15)), ("test", slice(15, 20))):
        labels = np.where(LABELS[rows] == 0, 10, LABELS[rows])[:, None]
        savemat(
            folder / f"{name}_32x32.mat", {"X": COLOURS[rows].transpose(2, 3, 1, 0), "y": labels}
        )


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
def test_mnist(tmp_path: Path, packed: bool) -> None:
    (tmp_path / "MNIST/raw").mkdir(parents=True)
    mnist(tmp_path / "MNIST/raw", packed=packed)
    found = load(str(tmp_path))
    assert found.row_shape == (1, 28, 28)
    assert found.classes == 7
    assert torch.equal(found.x_train[:, 0], torch.from_numpy(PIXELS[:5] / np.float32(255)))
    assert found.y_test.tolist() == [5, 6]
    assert len(found.warnings) == 4
    assert "not the published file" in found.warnings[0]


@pytest.mark.parametrize("write", [cifar_binary, cifar_python, svhn])
def test_colour_images(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path)
    found = load(str(tmp_path))
    assert torch.equal(found.x_train, torch.from_numpy(COLOURS[:15] / np.float32(255)))
    assert torch.equal(found.x_test, torch.from_numpy(COLOURS[15:] / np.float32(255)))
    assert found.y_train.tolist() == LABELS[:15].tolist()
    assert found.y_test.tolist() == LABELS[15:].tolist()
    assert found.warnings


def test_published_bytes_give_no_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mnist(tmp_path, packed=True)
    for name in list(formats.PUBLISHED):
        if name.endswith("ubyte"):
            content = gzip.decompress((tmp_path / f"{name}.gz").read_bytes())
            monkeypatch.setitem(
                formats.PUBLISHED, name, formats.hashlib.sha256(content).hexdigest()
            )
    assert load(str(tmp_path)).warnings == ()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def wrong_magic(path: Path) -> None:
    path.write_bytes(b"\0\0\x0d\x03" + path.read_bytes()[4:])


def huge(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:4] + b"\xff" * 12 + path.read_bytes()[16:])


@pytest.mark.parametrize("damage", [cut, wrong_magic, huge, Path.unlink])
def test_damaged_idx_is_refused(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    mnist(tmp_path, packed=False)
    damage(tmp_path / "t10k-images-idx3-ubyte")
    with pytest.raises(InvalidInput, match="t10k-images"):
        load(str(tmp_path))


def test_labels_beyond_nine_are_refused(tmp_path: Path) -> None:
    mnist(tmp_path, packed=False)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.full(5, 10, np.uint8)))
    with pytest.raises(InvalidInput, match="labels from 10"):
        load(str(tmp_path))


class Malicious:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("raise SystemExit('this ran')",))


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps({"data": Malicious(), "labels": [0]}, protocol=2),
        pickle.dumps({"labels": [0]}, protocol=2),
        pickle.dumps(3),
        b"not a pickle",
        b"",
    ],
    ids=["code", "no data", "a number", "text", "empty"],
)
def test_a_pickle_can_hold_arrays_only(tmp_path: Path, content: bytes) -> None:
    cifar_python(tmp_path)
    (tmp_path / "data_batch_3").write_bytes(content)
    with pytest.raises(InvalidInput, match="data_batch_3"):
        load(str(tmp_path))


def test_the_codec_of_byte_strings_cannot_be_chosen() -> None:
    text = pickle.dumps(b"\x80abc", protocol=2)
    assert formats._ArraysOnly(io.BytesIO(text)).load() == b"\x80abc"
    with pytest.raises(pickle.UnpicklingError, match="codec"):
        formats._ArraysOnly(io.BytesIO(text.replace(b"latin1", b"rot_13"))).load()


def test_damaged_svhn_is_refused(tmp_path: Path) -> None:
    svhn(tmp_path)
    (tmp_path / "train_32x32.mat").write_bytes(b"no matrix")
    with pytest.raises(InvalidInput, match="train_32x32"):
        load(str(tmp_path))


@pytest.mark.parametrize("name", SYNTHETIC_DATASETS)
def test_substitutes_are_labelled_and_complete(name: str) -> None:
    found = load(name)
    assert found.source == name
    assert name in found.warnings[0]
    assert found.classes == 10
    assert found.row_shape in ((1, 28, 28), (3, 32, 32))
    assert found.x_train.min() == 0
    assert 0.9 < found.x_train.max() <= 1


@pytest.mark.parametrize(
    "make", [synthetic_data._mnist, synthetic_data._cifar, synthetic_data._svhn]
)
def test_generated_images_follow_from_their_seed_and_show_their_label(
    make: Callable[[int, torch.Generator], tuple[torch.Tensor, torch.Tensor]],
) -> None:
    (x, y), (again, _), (other, _) = (
        make(200, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(x, again)
    assert not torch.equal(x, other)
    # The contrasts of one label are more alike than those of two.
    contrast = (x - x.mean((-2, -1), keepdim=True)).abs().mean(1).flatten(1)
    spectrum = torch.fft.rfft2(contrast.unflatten(1, x.shape[-2:])).abs().flatten(1)
    means = torch.stack([spectrum[y == label].mean(0) for label in range(10)])
    nearest = torch.cdist(spectrum, means).argmin(1)
    assert (nearest == y).float().mean() > 0.3

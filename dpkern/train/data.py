"""Load training data: scikit-learn's digits, the papers' image sets, or the user's own files.

Everything that is decided here is decided by public constants: the feature scale, the split (a
seeded permutation of row indices) and the number of rows are not private, and nothing is
normalised by statistics of the rows. Only the training rows are protected by epsilon; the
held-out rows are used for the accuracy that is printed.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..base.errors import InvalidInput
from ..base.validate import require
from . import formats
from .encoding import Encoding, TableOptions
from .formats import Images
from .synthetic_data import SYNTHETIC_DATASETS
from .table import SUFFIXES as TABLES
from .table import Table, read_table

DIGITS = "digits"
DIGITS_SCALE = 16.0  # pixels of scikit-learn's digits are integers 0..16, by construction
MAX_CLASSES = 65_536  # a mistyped label must not size a model
SUFFIXES = (".npz", *TABLES)
_ENDINGS = " or ".join((", ".join(SUFFIXES[:-1]), SUFFIXES[-1]))
_BAD_ARCHIVE = (ValueError, EOFError, KeyError, TypeError, zipfile.BadZipFile, zlib.error)

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Rows for training and rows held out.

    ``x_*`` float32 ``[n, ...]`` with one row shape, ``y_*`` int64 ``[n]`` in ``[0, classes)``.
    """

    x_train: torch.Tensor
    y_train: torch.Tensor
    x_test: torch.Tensor
    y_test: torch.Tensor
    classes: int
    source: str
    encoding: Encoding | None = None
    warnings: tuple[str, ...] = ()

    def to(self, device: torch.device) -> Dataset:
        """Return the same rows on a device."""
        if self.x_train.device == device:
            return self
        return replace(
            self,
            x_train=self.x_train.to(device),
            y_train=self.y_train.to(device),
            x_test=self.x_test.to(device),
            y_test=self.y_test.to(device),
        )

    @property
    def majority_accuracy(self) -> float:
        """The share of the most frequent label among the held-out rows, which nothing protects."""
        return float(torch.bincount(self.y_test).max()) / len(self.y_test)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one row's features."""
        return tuple(self.x_train.shape[1:])

    def public_facts(self) -> dict[str, Any]:
        """Return what the privacy statement takes as public; a resumed run must agree with it.

        No checksum of the rows: a hash of private data is not covered by any epsilon.
        """
        return {
            "data": self.source,
            "training_rows": len(self.x_train),
            "heldout_rows": len(self.x_test),
            "row_shape": list(self.row_shape),
            "classes": self.classes,
            **({} if self.encoding is None else {"columns": self.encoding.public_facts()}),
        }


def load(
    source: str,
    *,
    feature_scale: float | None = None,
    classes: int | None = None,
    test_fraction: float = 0.2,
    split_seed: int = 0,
    table: TableOptions | None = None,
) -> Dataset:
    """Read, check and split.

    Args:
        source: ``"digits"``, one of ``SYNTHETIC_DATASETS``, a file that ends in one of
            ``SUFFIXES``, or a folder with one of them, with ``train.*`` and optionally ``test.*``,
            or with the files of MNIST, CIFAR-10 or SVHN (see ``formats``).
        feature_scale: public constant that features without a public range are divided by (digits:
            16, images: 255, else 1).
        classes: public number of classes; ``None`` takes the largest label + 1, which then
            counts as public.
        test_fraction: share of rows held out where the source has no test rows of its own.
        split_seed: public seed of the permutation that chooses them.
        table: what is said of the columns of a table.

    Raises:
        InvalidInput: whatever is wrong with the file, its arrays or the split.
        MissingDependency: digits without scikit-learn.
    """
    table = TableOptions() if table is None else table
    images, encoding = _known_images(source), None
    if source == DIGITS:
        bunch = require("sklearn.datasets").load_digits()
        raw: tuple[Array, ...] = (bunch.images, bunch.target)
        usual = DIGITS_SCALE
    elif images is not None:
        raw = (images.x_train, images.y_train, images.x_test, images.y_test)
        usual = formats.PIXEL_SCALE
    else:
        usual = 1.0
        raw, encoding = _read(Path(source), table, feature_scale or usual)
    if encoding is None:
        _refuse_table_options(table, source)
    scale = feature_scale or usual if encoding is None else 1.0  # tables are divided already
    if classes is None and encoding is not None and encoding.classes:
        classes = len(encoding.classes)
    private = () if encoding is None else encoding.private_places
    parts = [
        _check_rows(x, y, scale, names, private)
        for x, y, names in zip(
            raw[0::2], raw[1::2], (("x", "y"), ("x_test", "y_test")), strict=False
        )
    ]
    if len(parts) == 1:
        parts = _split(*parts[0], test_fraction, split_seed)
    (x_train, y_train), (x_test, y_test) = parts
    if x_train.shape[1:] != x_test.shape[1:]:
        raise InvalidInput(
            "x_test",
            expected=f"rows of shape {list(x_train.shape[1:])} as in x",
            got=str(list(x_test.shape[1:])),
            remedy="Give training and test rows the same features.",
        )
    return Dataset(
        x_train=x_train,
        y_train=y_train,
        x_test=x_test,
        y_test=y_test,
        classes=_count_classes(y_train, y_test, classes),
        source=source if source == DIGITS or source in SYNTHETIC_DATASETS else str(Path(source)),
        encoding=encoding,
        warnings=tuple(warning for each in (images, encoding) if each for warning in each.warnings),
    )


def _known_images(source: str) -> Images | None:
    """Return the image set of this name or in this folder, if there is one."""
    if source in SYNTHETIC_DATASETS:
        return SYNTHETIC_DATASETS[source]()
    if source == DIGITS or not os.path.isdir(source):
        return None
    read = formats.recognise(Path(source))
    return None if read is None else read()


def _read(
    path: Path, options: TableOptions, scale: float
) -> tuple[tuple[Array, ...], Encoding | None]:
    """Return ``(x, y)`` or ``(x, y, x_test, y_test)``, and how tables were encoded.

    Numbers of tables are divided by the scale, but for columns with a range.
    """
    try:
        if not path.exists():
            named = ", ".join((DIGITS, *SYNTHETIC_DATASETS))
            raise InvalidInput(
                "data",
                expected=f"one of {named}, or an existing file ({_ENDINGS}) or folder",
                got=str(path),
                remedy="Check the path.",
            )
        files = _files(path)
        contents = [_read_file(file, options.header) for file in files]
    except OSError as error:
        raise InvalidInput(
            "data",
            expected="a readable file",
            got=f"{path}: {error}",
            remedy="Check permissions and contents of the file.",
        ) from error
    tables = [content for content in contents if isinstance(content, Table)]
    arrays = [content for content in contents if not isinstance(content, Table)]
    if len(contents) == 2 and (len(tables) == 1 or any(len(each) == 4 for each in arrays)):
        raise InvalidInput(
            "data",
            expected="training and test rows in two files of one kind, or in one file",
            got=f"{files[0].name} and {files[1].name}, with a second set of test rows or as an "
            "archive beside a table",
            remedy="Keep either test.* or the x_test array, and both files of one kind.",
        )
    if not tables:
        return tuple(array for each in arrays for array in each), None
    encoding = Encoding.of(tables, options)
    encoded = [encoding.apply(each, scale) for each in tables]
    return tuple(array for each in encoded for array in each), encoding


def _refuse_table_options(options: TableOptions, source: str) -> None:
    """Refuse options that only tables have.

    Raises:
        InvalidInput: one was given.
    """
    for name in options.given:
        raise InvalidInput(
            name,
            expected="left out: the data are no table",
            got=f"--{name.replace('_', '-')} with {source}",
            remedy="Leave it out, or pass a .csv, .tsv or .parquet file.",
        )


def _files(path: Path) -> list[Path]:
    """Return the file with the rows, and the one with test rows if there is one."""
    if not path.is_dir():
        return [path]
    files = sorted(p for p in path.iterdir() if p.suffix.lower() in SUFFIXES)
    train = [p for p in files if p.stem == "train"]
    test = [p for p in files if p.stem == "test"]
    if len(train) == 1 and len(test) <= 1:
        return train + test
    if len(files) == 1:
        return files
    raise InvalidInput(
        "data",
        expected=f"a folder with one file ({_ENDINGS}), with one train.* and at most one test.*, "
        "or with the files of MNIST, CIFAR-10 or SVHN",
        got=f"{path} with {', '.join(p.name for p in files) or 'no such file'}",
        remedy="Name the file itself, or tidy the folder.",
    )


def _read_file(path: Path, header: str) -> Table | tuple[Array, ...]:
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES or not path.is_file():
        raise InvalidInput(
            "data",
            expected=f"a file that ends in {_ENDINGS}",
            got=str(path),
            remedy="Convert the data to one of these formats.",
        )
    return _read_npz(path) if suffix == ".npz" else read_table(path, header)


def _read_npz(path: Path) -> tuple[Array, ...]:
    try:
        # Never unpickle: a data file must not be able to run code.
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except _BAD_ARCHIVE as error:
        raise InvalidInput(
            "data",
            expected="a .npz archive of plain numeric arrays",
            got=f"{path}: {error}",
            remedy="Write it with numpy.savez(path, x=..., y=...).",
        ) from error
    has_test = "x_test" in arrays or "y_test" in arrays
    wanted = ("x", "y", "x_test", "y_test") if has_test else ("x", "y")
    missing = [name for name in wanted if name not in arrays]
    if missing:
        raise InvalidInput(
            "data",
            expected="arrays x and y, and optionally both x_test and y_test",
            got=f"{path} with {', '.join(sorted(arrays)) or 'no array'}",
            remedy=f"Add {', '.join(missing)}.",
        )
    return tuple(arrays[name] for name in wanted)


def _check_rows(
    x: Array, y: Array, scale: float, names: tuple[str, str], private: Sequence[int] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 features and integer labels; ``private`` ones are scaled and cut off later."""
    x_name, y_name = names
    for name, array in ((x_name, x), (y_name, y)):
        if array.dtype.kind not in "biuf":
            raise InvalidInput(
                name,
                expected="an array of real numbers",
                got=f"dtype {array.dtype}",
                remedy="Convert it to a numeric dtype.",
            )
    if x.ndim < 2 or x.size == 0:
        raise InvalidInput(
            x_name,
            expected="shape [rows, ...] with at least one row and one feature",
            got=str(list(x.shape)),
            remedy="Give one row per sample.",
        )
    if y.shape != x.shape[:1]:
        raise InvalidInput(
            y_name,
            expected=f"shape [{len(x)}], one label per row of {x_name}",
            got=str(list(y.shape)),
            remedy="Give exactly one integer label per row.",
        )
    if y.dtype.kind == "f" and not (np.isfinite(y).all() and (y == np.floor(y)).all()):
        raise InvalidInput(
            y_name,
            expected="integer labels",
            got="a fraction, NaN or infinity",
            remedy="Number the classes 0, 1, 2, ... In a table --label names their column.",
        )
    if y.min() < 0 or y.max() >= MAX_CLASSES:
        raise InvalidInput(
            y_name,
            expected=f"labels in 0 .. {MAX_CLASSES - 1}",
            got=f"labels from {y.min()} to {y.max()}",
            remedy="Number the classes 0, 1, 2, ...",
        )
    with np.errstate(over="ignore"):  # the check below names an overflow to float32
        features = (x / scale).astype(np.float32)
    bad = ~np.isfinite(features)
    bad[:, list(private)] = False
    if bad.any():
        raise InvalidInput(
            x_name,
            expected="finite features after division by the feature scale",
            got=f"{int(bad.sum())} NaN or infinite values",
            remedy="Impute or remove them, or pass a larger feature_scale.",
        )
    return torch.from_numpy(features), torch.from_numpy(y.astype(np.int64))


def _split(
    x: torch.Tensor, y: torch.Tensor, test_fraction: float, seed: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    held_out = round(len(x) * test_fraction)
    if not 0 < held_out < len(x):
        raise InvalidInput(
            "test_fraction",
            expected="at least one row for training and one held out",
            got=f"{held_out} of {len(x)} rows held out",
            remedy="Change test_fraction, or bring test rows of your own (x_test, y_test).",
        )
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    test, train = order[:held_out], order[held_out:]
    return [(x[train], y[train]), (x[test], y[test])]


def _count_classes(y_train: torch.Tensor, y_test: torch.Tensor, classes: int | None) -> int:
    largest = int(max(y_train.max(), y_test.max()))
    if classes is not None:
        if largest >= classes:
            raise InvalidInput(
                "classes",
                expected=f"more than the largest label, {largest}",
                got=classes,
                remedy=f"Pass classes={largest + 1} or more.",
            )
        return classes
    if len(torch.unique(y_train)) < 2:
        raise InvalidInput(
            "y",
            expected="at least two classes among the training rows",
            got="one class",
            remedy="Check the label column.",
        )
    return largest + 1

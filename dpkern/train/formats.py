"""Read MNIST, CIFAR-10 and SVHN as their authors publish them, from the user's folder.

Nothing is downloaded and nothing is executed: CIFAR-10's "python version" is a pickle, of which
only arrays, lists and strings are rebuilt. Files whose bytes are not the published ones are read
all the same, with a warning: it may be another data set in the same format.

=========  =========================================================  ==============
data set   files in the folder (or in the subfolder of its archive)   rows
=========  =========================================================  ==============
MNIST      ``train-images-idx3-ubyte`` and so on, also ``.gz``        ``[1, 28, 28]``
CIFAR-10   ``data_batch_1.bin`` .. or ``data_batch_1`` ..             ``[3, 32, 32]``
SVHN       ``train_32x32.mat``, ``test_32x32.mat`` (cropped digits)   ``[3, 32, 32]``
=========  =========================================================  ==============

Sources: LeCun, Cortes and Burges (the IDX format); Krizhevsky 2009; Netzer et al. 2011.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import os
import pickle
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.errors import InvalidInput
from ..base.validate import require

PIXEL_SCALE = 255.0
CLASSES = 10
SIDE = 32
MAX_BYTES = 1 << 31  # a header must not size an allocation

Array = npt.NDArray[Any]

PUBLISHED = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    "train_32x32.mat": "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
    "test_32x32.mat": "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
    "data_batch_1": "md5:c99cafc152244af753f735de768cd75f",
    "data_batch_2": "md5:d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "md5:54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "md5:634d18415352ddfa80567beed471001a",
    "data_batch_5": "md5:482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "md5:40351d587109b95175f43aff81a1287e",
}
"""SHA-256 digests of the contents, unpacked.

Of CIFAR-10's batches only the MD5 is published. None is known for the binary version.
"""


@dataclass(frozen=True, kw_only=True)
class Images:
    """A data set as it stands in its files.

    ``x_*`` uint8 ``[n, C, H, W]``, ``y_*`` int64 ``[n]`` in 0 .. 9.
    """

    name: str
    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array
    warnings: tuple[str, ...] = ()


@dataclass
class _Folder:
    """Files of one folder, and warnings about them."""

    path: Path
    warnings: list[str] = field(default_factory=list)

    def read(self, name: str) -> bytes:
        """Return the contents of ``name``, or of ``name.gz`` unpacked; checked by published digest.

        Raises:
            InvalidInput: no such file, not readable, damaged or larger than 2 GiB.
        """
        plain, packed = self.path / name, self.path / f"{name}.gz"
        try:
            with plain.open("rb") if plain.is_file() else gzip.open(packed) as file:
                content = file.read(MAX_BYTES + 1)
        except FileNotFoundError as error:
            raise InvalidInput(
                "data",
                expected=f"{name} or {name}.gz",
                got=f"{self.path} without it",
                remedy="Put all files of the data set into the folder.",
            ) from error
        except (OSError, EOFError, zlib.error) as error:
            raise damaged(self.path / name, str(error)) from error
        if len(content) > MAX_BYTES:
            raise damaged(self.path / name, f"more than {MAX_BYTES} bytes")
        self._compare(name, content)
        return content

    def _compare(self, name: str, content: bytes) -> None:
        wanted = PUBLISHED.get(name)
        if wanted is None:
            self.warnings.append(f"{name}: no published digest is known to compare with")
            return
        if wanted.startswith("md5:"):
            found = "md5:" + hashlib.md5(content, usedforsecurity=False).hexdigest()
        else:
            found = hashlib.sha256(content).hexdigest()
        if found != wanted:
            self.warnings.append(f"{name}: not the published file (its digest differs)")


def damaged(path: Path, what: str) -> InvalidInput:
    """Return the error for a file whose contents are not what its name says."""
    return InvalidInput(
        "data",
        expected="a whole file in the published format",
        got=f"{path}: {what}",
        remedy="Fetch the file again.",
    )


def recognise(folder: Path) -> Callable[[], Images] | None:
    """Return a reader of this folder, or None if it holds none of the known data sets."""
    found = _found(folder)
    if found is None:
        return None
    path, _, reader = found
    return lambda: reader(_Folder(path))


def kind_of(folder: Path) -> str | None:
    """Return ``mnist``, ``cifar10`` or ``svhn`` by the folder's files; None for none of them."""
    found = _found(folder)
    return None if found is None else found[1]


def _found(folder: Path) -> tuple[Path, str, Callable[[_Folder], Images]] | None:
    for marker, kind, subfolders, reader in _KNOWN:
        for path in (folder, *(folder / below for below in subfolders)):
            if os.path.isfile(path / marker) or os.path.isfile(path / f"{marker}.gz"):
                return path, kind, reader
    return None


def _mnist(folder: _Folder) -> Images:
    parts: list[Array] = []
    for stem in ("train", "t10k"):
        images = _idx(folder, f"{stem}-images-idx3-ubyte", axes=3)
        parts += [images[:, None], _idx(folder, f"{stem}-labels-idx1-ubyte", axes=1)]
    return _checked("MNIST", parts, folder)


def _idx(folder: _Folder, name: str, *, axes: int) -> Array:
    """Read an array of bytes: magic ``0 0 8 axes``, extents as big-endian uint32, the values."""
    content = folder.read(name)
    start = 4 + 4 * axes
    if content[:4] != bytes((0, 0, 8, axes)) or len(content) < start:
        raise damaged(folder.path / name, f"no IDX header of {axes} axes of bytes")
    shape = tuple(int(n) for n in np.frombuffer(content, ">u4", axes, 4))
    if math.prod(shape) != len(content) - start:
        raise damaged(folder.path / name, f"{len(content) - start} values for shape {list(shape)}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _cifar_binary(folder: _Folder) -> Images:
    """Read records of one label byte and 3 x 32 x 32 pixels."""

    def batch(name: str) -> tuple[Array, Array]:
        content = folder.read(name)
        record = 1 + 3 * SIDE * SIDE
        if not content or len(content) % record:
            raise damaged(folder.path / name, f"{len(content)} bytes, no multiple of {record}")
        table = np.frombuffer(content, np.uint8).reshape(-1, record)
        return table[:, 1:].reshape(-1, 3, SIDE, SIDE), table[:, 0]

    return _cifar(folder, batch, ".bin")


def _cifar_python(folder: _Folder) -> Images:
    def batch(name: str) -> tuple[Array, Array]:
        try:
            found = _ArraysOnly(io.BytesIO(folder.read(name)), encoding="latin1").load()
            x = np.asarray(found["data"]).reshape(-1, 3, SIDE, SIDE)
            return x, np.asarray(found["labels"])
        except _BAD_PICKLE as error:
            raise damaged(folder.path / name, str(error)) from error

    return _cifar(folder, batch, "")


def _cifar(folder: _Folder, batch: Callable[[str], tuple[Array, Array]], suffix: str) -> Images:
    parts = [batch(f"data_batch_{number}{suffix}") for number in range(1, 6)]
    x_train, y_train = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
    return _checked("CIFAR-10", [x_train, y_train, *batch(f"test_batch{suffix}")], folder)


class _ArraysOnly(pickle.Unpickler):
    """An unpickler of NumPy arrays and plain values, which looks up nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = {
            ("numpy.core.multiarray", "_reconstruct"): np.zeros(0).__reduce__()[0],
            ("numpy._core.multiarray", "_reconstruct"): np.zeros(0).__reduce__()[0],
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
            ("_codecs", "encode"): _encode,
        }
        if (module, name) not in allowed:
            raise pickle.UnpicklingError(f"refused to load {module}.{name}")
        return allowed[module, name]


def _encode(text: str, encoding: str) -> bytes:
    """Encode as Python 2 writes byte strings; no other codec may be named."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"refused the codec {encoding}")
    return text.encode("latin1")


_BAD_PICKLE = (pickle.UnpicklingError, EOFError, KeyError, IndexError, TypeError, ValueError)


def _svhn(folder: _Folder) -> Images:
    """Read MATLAB arrays ``X [32, 32, 3, n]`` and ``y [n, 1]``; the digit 0 is labelled 10."""
    matlab = require("scipy.io.matlab")
    parts: list[Array] = []
    for name in ("train_32x32.mat", "test_32x32.mat"):
        content = folder.read(name)
        try:
            found = matlab.loadmat(io.BytesIO(content), variable_names=["X", "y"])
            parts += [found["X"].transpose(3, 2, 0, 1), found["y"].reshape(-1) % CLASSES]
        except (matlab.MatReadError, KeyError, TypeError, ValueError, OSError, zlib.error) as error:
            raise damaged(folder.path / name, str(error)) from error
    return _checked("SVHN", parts, folder)


def _checked(name: str, parts: list[Array], folder: _Folder) -> Images:
    x_train, y_train, x_test, y_test = parts
    for x, y in ((x_train, y_train), (x_test, y_test)):
        fits = x.dtype == np.uint8 and x.ndim == 4 and y.dtype.kind in "iu" and len(x) == len(y)
        if not fits or x.shape[1:] != x_train.shape[1:] or len(x) == 0:
            raise damaged(folder.path, f"images {list(x.shape)} and labels {list(y.shape)}")
        if y.min() < 0 or y.max() >= CLASSES:
            raise damaged(folder.path, f"labels from {y.min()} to {y.max()}")
    return Images(
        name=name,
        x_train=x_train,
        y_train=y_train.astype(np.int64),
        x_test=x_test,
        y_test=y_test.astype(np.int64),
        warnings=tuple(folder.warnings),
    )


_KNOWN: tuple[tuple[str, str, tuple[str, ...], Callable[[_Folder], Images]], ...] = (
    ("train-images-idx3-ubyte", "mnist", ("MNIST/raw",), _mnist),
    ("data_batch_1.bin", "cifar10", ("cifar-10-batches-bin",), _cifar_binary),
    ("data_batch_1", "cifar10", ("cifar-10-batches-py",), _cifar_python),
    ("train_32x32.mat", "svhn", (), _svhn),
)
"""The file that identifies a data set, its name, the folder in its archive, and its reader."""

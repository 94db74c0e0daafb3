"""Load a model by name, file or module, and list what keeps it from being trained privately."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from ..base.errors import InvalidInput
from ..base.script_file import spec_of
from .validate import static_findings

ModelFactory = Callable[[], nn.Module]

_FORMS = "path/to/file.py:callable or package.module:callable"


def load_model(spec: str, presets: Mapping[str, ModelFactory]) -> nn.Module:
    """Return the model that ``spec`` names.

    Args:
        spec: a key of ``presets``, or ``path/to/file.py:callable``, or ``package.module:callable``.
            The callable takes no arguments and returns an ``nn.Module``. Importing runs the code
            of that file or module; its folder, or the working directory, is on the path meanwhile.
        presets: models known by a name.

    Raises:
        InvalidInput: no such preset, file, module or callable; code that fails; another result.
    """
    if spec in presets:
        return presets[spec]()
    # Split from the right, because a path may have a drive letter.
    source, colon, attribute = spec.rpartition(":")
    if not (colon and source and attribute):
        raise InvalidInput(
            "model",
            expected=f"one of {', '.join(presets)}, or {_FORMS}",
            got=spec,
            remedy="Name a function without arguments that returns the model.",
        )
    module = _import_file(Path(source)) if source.endswith(".py") else _import_module(source)
    factory = getattr(module, attribute, None)
    if not callable(factory) or isinstance(factory, nn.Module):
        raise InvalidInput(
            "model",
            expected=f"a function {attribute} in {source}",
            got="nothing of that name" if factory is None else type(factory).__name__,
            remedy="Write a function without arguments that returns the model.",
        )
    with _folder_of(source), _failing(f"{attribute}()"):
        model = factory()
    if not isinstance(model, nn.Module):
        raise InvalidInput(
            "model",
            expected=f"an nn.Module from {attribute}()",
            got=type(model).__name__,
            remedy="Return the model itself.",
        )
    return model


def report(model: nn.Module) -> list[dict[str, Any]]:
    """Return one row per finding, refused ones first: severity, name, kind, what, remedy."""
    rows = [asdict(finding) for finding in static_findings(model)]
    return sorted(rows, key=lambda row: row["severity"] != "refuse")


def _import_file(path: Path) -> ModuleType:
    # A name that no other import uses.
    name = f"_checked_{path.stem}"
    spec = spec_of(path, name)
    if spec is None or spec.loader is None:
        raise InvalidInput(
            "model",
            expected="a Python file",
            got=str(path),
            remedy="Check the path: it is relative to the working directory.",
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look their module up
    with _folder_of(str(path)), _failing(str(path)):
        spec.loader.exec_module(module)
    return module


def _import_module(name: str) -> ModuleType:
    with _folder_of(name), _failing(name):
        return importlib.import_module(name)


@contextmanager
def _folder_of(source: str) -> Iterator[None]:
    """Put first on the path what Python has there when it runs the file, or the module with -m."""
    folder = str(Path(source).resolve().parent if source.endswith(".py") else Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:  # the code may have changed the path itself
            sys.path.remove(folder)


@contextmanager
def _failing(what: str) -> Iterator[None]:
    """Turn any error of the user's code, even sys.exit(), into one InvalidInput that names it."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise InvalidInput(
            "model",
            expected=f"{what} to run without an error",
            got=f"{type(error).__name__}: {error}",
            remedy=f"Pass {_FORMS} whose code makes the model and does nothing else.",
        ) from error

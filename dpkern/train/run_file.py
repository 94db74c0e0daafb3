"""Run files: the options of ``dpkern train`` as TOML, read before a run and written beside it.

    epsilon = 3
    max-grad-norm = 0.5
    set = ["mode=1"]

Names are those of the command line without ``--``, with ``-`` or ``_``.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from ..base.errors import InvalidInput, brief
from .options import RunOptions, TrainOptions

ALTERNATIVES = ({"epsilon", "noise_multiplier"},)
"""Options of which one excludes the others; the command line's takes the place of the file's."""

_NAMES = {"set": "settings"}
_NOT_WRITTEN = ("out", "resume", "overwrite", "config")
"""Options that say which run this is, and not how it is made."""


def merged(path: Path, types: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a run file with those of the command line, which win.

    Args:
        path: the file.
        types: types of all options by name.
        given: options that the command line names.

    Raises:
        InvalidInput: the file cannot be read, or an option that is unknown or of another type.
    """
    found = read(path, types)
    for names in ALTERNATIVES:
        if names & given.keys():
            found = {name: value for name, value in found.items() if name not in names}
    return found | dict(given)


def read(path: Path, types: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a run file by name.

    Raises:
        InvalidInput: the file cannot be read, or an option that is unknown or of another type.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise InvalidInput(
            "--config",
            expected="a TOML file with options of dpkern train",
            got=f"{path}: {error}",
            remedy='Write lines such as epsilon = 3 or model = "mlp".',
        ) from None
    options: dict[str, Any] = {}
    for key, value in content.items():
        name = _NAMES.get(key, key.replace("-", "_"))
        if name not in types:
            raise InvalidInput(
                f"--config, {key}",
                expected="an option of dpkern train",
                got="an unknown one",
                remedy=_remedy(name, types),
            )
        if name in options:
            raise InvalidInput(
                f"--config, {key}",
                expected="every option once",
                got="two spellings of one option",
                remedy="Remove one of them.",
            )
        options[name] = _typed(key, value, types[name])
    return {name: value for name, value in options.items() if value is not False}


def _remedy(name: str, types: Mapping[str, Any]) -> str:
    shown = {_shown(known): known for known in types}
    near = difflib.get_close_matches(_shown(name), shown, n=1)
    if near:
        return f"Did you mean {near[0]}?"
    return "Remove the line; `dpkern train --help` lists all options."


def _shown(name: str) -> str:
    by_name = {name: key for key, name in _NAMES.items()}
    return by_name.get(name, name.replace("_", "-"))


def _typed(key: str, value: Any, wanted: Any) -> Any:
    """Return a value of TOML as the command line would have read it."""
    choices = get_args(wanted) if get_origin(wanted) in (Union, UnionType) else (wanted,)
    for kind in choices:
        if kind is Path and isinstance(value, str):
            return Path(value)
        if kind is float and type(value) in (int, float):
            return float(value)
        if kind in (int, str, bool) and type(value) is kind:
            return value
        if get_origin(kind) is list and isinstance(value, list):
            inner = get_args(kind)[0]
            return [_typed(f"{key}[{i}]", item, inner) for i, item in enumerate(value)]
    names = [_NAMES_OF_TYPES.get(get_origin(kind) or kind) for kind in choices]
    raise InvalidInput(
        f"--config, {key}",
        expected=" or ".join(name for name in names if name),
        got=brief(value),
        remedy="Write texts in quotation marks, numbers without, and flags as true or false.",
    )


_NAMES_OF_TYPES = {
    Path: "a text",
    str: "a text",
    float: "a number",
    int: "a whole number",
    bool: "true or false",
    list: "a list of texts",
}


def written(options: TrainOptions[Any, Any], known: set[str], made_by: str) -> str:
    """Return the effective options of a run as a run file.

    Args:
        options: all of them.
        known: names of the options that such a run has.
        made_by: version and commit, for the first line.
    """
    run = {f.name: getattr(options.run, f.name) for f in fields(RunOptions)}
    everything = {**asdict(options.privacy), **asdict(options.model), **run}
    everything["no_figure"] = not everything.pop("figure")
    lines = [f"# Effective options of a run of dpkern {made_by}."]
    for name, value in everything.items():
        if name in _NOT_WRITTEN or (name not in known and name != "no_figure"):
            continue
        if value is None or value is False or value == ():
            continue
        lines.append(f"{_shown(name)} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, (int, float)):
        return repr(value)
    # A text of JSON is one of TOML, but for the character that JSON leaves as it is.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")

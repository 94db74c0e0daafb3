"""Make the pages of the site that are written elsewhere: README, results, reference.

MkDocs runs this file as a hook. A link from a page to a file of the repository leads to a copy of
it under ``repository/``. The front page is README.md, and notebooks are pages too; the pages under
``reference/`` list what ``dpkern.__all__`` and ``dpkern.cli.COMMANDS`` list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from posixpath import normpath, relpath
from types import ModuleType
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import dpkern
from dpkern.cli import COMMANDS, load

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)#\s]+)(#[^)]*)?(?=\))")
ALWAYS = ("CHANGELOG.md", "SECURITY.md", "CONTRIBUTING.md")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made, and copies of what the pages link to."""
    _add(files, config, "index.md", (ROOT / "README.md").read_text(), "README.md")
    _add(files, config, "reference/python.md", python_reference())
    _add(files, config, "reference/cli.md", "\n".join(cli_reference()))
    listed = ["# Notebooks", ""]
    for notebook in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        page = notebook_page(notebook)
        listed.append(f"- [{page.splitlines()[0].lstrip('# ')}]({notebook.stem}.md)")
        _add(files, config, f"notebooks/{notebook.stem}.md", page)
    _add(files, config, "notebooks/index.md", "\n".join(listed))
    pages = [(file.src_uri, file.content_string) for file in files if file.src_uri.endswith(".md")]
    waiting = [*ALWAYS]
    for uri, text in pages:
        waiting += [path for path in _linked(_place(uri), text) if not path.startswith("docs/")]
    copied: set[str] = set()
    while waiting:
        path = waiting.pop()
        if path in copied or path == "README.md" or not (ROOT / path).exists():
            continue
        copied.add(path)
        if (ROOT / path).is_dir():
            files.append(File.generated(config, _target(path), content=programs(ROOT / path)))
            continue
        files.append(File.generated(config, f"repository/{path}", abs_src_path=str(ROOT / path)))
        if path.endswith(".md"):
            linked = _linked(path, (ROOT / path).read_text())
            waiting += [p for p in linked if not p.startswith("docs/")]
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links to the repository's files lead to their copies."""
    here = page.file.src_uri
    place = _place(here)

    def moved(match: re.Match[str]) -> str:
        path = normpath(f"{Path(place).parent.as_posix()}/{match[1]}")
        if not (ROOT / path).exists():
            return match[0]
        return relpath(_target(path), Path(here).parent.as_posix()) + (match[2] or "")

    return LINK.sub(moved, markdown)


def notebook_page(path: Path) -> str:
    """Return a notebook as a page: its text, and its code."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    where = f"This page is [a notebook]({path.name}): open it in Jupyter and run it."
    return "\n\n".join([*parts, where])


def programs(folder: Path) -> str:
    """Return the page of a folder's programs."""
    parts = [f"# {folder.name.capitalize()}"]
    for path in sorted(folder.glob("*.py")):
        parts.append(f"## {path.name}\n\n```python\n{path.read_text()}```")
    return "\n\n".join(parts)


def python_reference() -> str:
    """Return the page of everything that ``import dpkern`` offers."""
    offered = {name: getattr(dpkern, name) for name in dpkern.__all__}
    modules = {name: found for name, found in offered.items() if isinstance(found, ModuleType)}
    errors = {
        name: found
        for name, found in offered.items()
        if isinstance(found, type) and issubclass(found, Exception)
    }
    others = {name: found for name, found in offered.items() if callable(found)}
    lines = ["# Python", "All that `import dpkern` offers, with formulas, shapes and errors."]
    lines += ["## Classes and functions"]
    lines += [_entry(found) for name, found in others.items() if name not in errors]
    lines += ["## Errors and warnings", *map(_entry, errors.values())]
    for name, module in modules.items():
        public = [getattr(module, other) for other in getattr(module, "__all__", ())]
        written = [f for f in public if getattr(f, "__module__", "").startswith("dpkern")]
        lines += [f"## dpkern.{name}"]
        lines += [
            _entry(f) for f in written if hasattr(f, "__qualname__") and f not in errors.values()
        ]
    return "\n\n".join(lines)


def _entry(found: Any) -> str:
    """Return the directive that shows a class or function."""
    options = "\n    options: {inherited_members: true}" if found is dpkern.PrivacyEngine else ""
    return f"::: {found.__module__}.{found.__qualname__}{options}"


def cli_reference() -> Iterator[str]:
    """Yield the lines of the page of all commands."""
    yield "# Command line"
    yield ""
    for name in COMMANDS:
        yield from _command(f"dpkern {name}", load(name))


def _command(name: str, command: Any) -> Iterator[str]:
    yield f"## {name}"
    yield ""
    yield _plain(command.help or COMMANDS.get(name.removeprefix("dpkern "), ("", ""))[1])
    yield ""
    rows = [row for row in map(_row, command.params) if row]
    if rows:
        yield "| | | default |"
        yield "|---|---|---|"
        yield from rows
        yield ""
    for below in getattr(command, "commands", {}).values():
        yield from _command(f"{name} {below.name}", below)


def _row(parameter: Any) -> str:
    if parameter.hidden:
        return ""
    shown = parameter.opts + parameter.secondary_opts
    if parameter.param_type_name == "argument":
        shown = [parameter.name.upper()]
    text = _plain(getattr(parameter, "help", None) or "")
    usual = parameter.show_default
    if not isinstance(usual, str):
        given = parameter.default
        usual = "" if given in (None, False, (), []) or callable(given) else f"`{given}`"
    cells = " ".join(f"`{name}`" for name in shown), text, usual
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _plain(text: str) -> str:
    """Return a help text as one line, without the marks that keep its lines apart."""
    return " ".join(text.replace("\b", "").replace("<", "&lt;").split())


def _add(files: Files, config: MkDocsConfig, uri: str, text: str, place: str = "") -> None:
    file = File.generated(config, uri, content=text)
    if place:
        PLACES[uri] = place
    files.append(file)


PLACES: dict[str, str] = {}
"""Files of the repository that pages are made of, where they stand elsewhere."""


def _place(uri: str) -> str:
    """Return the path in the repository of a page's text."""
    if uri.startswith("repository/"):
        return uri.removeprefix("repository/")
    return PLACES.get(uri, f"docs/{uri}")


def _target(path: str) -> str:
    """Return where a file or folder of the repository stands on the site."""
    if path == "README.md":
        return "index.md"
    page = f"{path}/index.md" if (ROOT / path).is_dir() else path
    return page.removeprefix("docs/") if page.startswith("docs/") else f"repository/{page}"


def _linked(place: str, text: str) -> Iterator[str]:
    """Yield the paths in the repository of the files that a text links to."""
    for match in LINK.finditer(text):
        yield normpath(f"{Path(place).parent.as_posix()}/{match[1]}")

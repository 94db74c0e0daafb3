"""Write docs/constructs.md from the tested table: ``python -m tests.make_constructs``."""

from __future__ import annotations

from pathlib import Path

from tests.engine.constructs import CONSTRUCTS, Construct, Refused
from tests.engine.guards import kit, texts, wrapped
from tests.engine.guards.catalogue import TABLES

TARGET = Path(__file__).parent.parent / "docs" / "constructs.md"

HEAD = """\
# Constructs

What happens to {count} ways of writing a model and {loops} ways of writing a training loop.
`python -m tests.make_constructs` writes this page from the tables that the tests run.

## Models

*Correct*: norms and clipped sums equal those of ordinary autograd, one sample at a time. Otherwise:
the typed error that is raised before anything is trained, and why.
`tests/engine/test_engine_constructs.py` runs every row.

| construct | what happens |
|---|---|
"""

LOOPS_HEAD = """
## Loops

{right} of these {count} loops train, {refused} are refused. *Right*: with one record more or less
in its batch a step's clipped sum moves by C at most, for several hostile values of that record.
Records outside the batch move nothing, and no state that leaves the run without noise depends on a
record. Otherwise: the typed error that is raised before the release that it would spoil.
`tests/engine/test_guard_loops.py` runs every row; `tests/slow/test_guard_wrappers.py` those of
other packages, where they are installed.
"""

FAMILY = """
### {name}

| loop | what happens |
|---|---|
"""

WHY = {
    "sample": "one sample reaches the gradient of another",
    "batch": "the batch is not the first dimension",
    "its batch": "statistics of the batch",
    "buffer": "a buffer would carry data past the noise",
    "a change in place": "a tensor made of parameters is changed after it was used",
    "data that are written": "samples are written into a tensor made of parameters",
}
"""The words for each short part of a message."""


def page() -> str:
    """The page as it must be."""
    tables = [*TABLES, *wrapped.TABLES]
    loops = [loop for table in tables for loop in table.loops]
    rows = [f"| {c.name.replace('-', ' ')} | {_outcome(c)} |" for c in CONSTRUCTS]
    text = HEAD.format(count=len(CONSTRUCTS), loops=len(loops)) + "\n".join(rows) + "\n"
    right = sum(loop.expected == "right" for loop in loops)
    text += LOOPS_HEAD.format(right=right, count=len(loops), refused=len(loops) - right)
    for table in tables:
        lines = [f"| {loop.name} | {_loop_outcome(loop)} |" for loop in table.loops]
        name = table.family[0].upper() + table.family[1:]
        text += FAMILY.format(name=name) + "\n".join(lines) + "\n"
    return text


def _outcome(construct: Construct) -> str:
    if not isinstance(construct.expected, Refused):
        return construct.expected
    says = construct.expected.says
    return f"`{construct.expected.error.__name__}`: {WHY.get(says, says)}"


def _loop_outcome(loop: kit.Loop) -> str:
    if not isinstance(loop.expected, kit.Refused):
        return loop.expected
    says = texts.WORDS.get(loop.expected.says, loop.expected.says)
    if says.startswith("got "):
        says = f"`{says.removeprefix('got ')}` combines samples"
    return f"`{loop.expected.error.__name__}`: {says}"


if __name__ == "__main__":
    TARGET.write_text(page())

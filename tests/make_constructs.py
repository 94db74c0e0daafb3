"""Write docs/constructs.md from the table that the tests run: ``python -m tests.make_constructs``."""

from __future__ import annotations

from pathlib import Path

from tests.constructs import CONSTRUCTS, Construct, Refused

TARGET = Path(__file__).parent.parent / "docs" / "constructs.md"

HEAD = """\
# Model constructs

What happens to {count} ways of writing a model. *Correct*: norms and clipped sums equal those of
ordinary autograd, one sample at a time. Otherwise: the typed error that is raised before anything is
trained, and why. `tests/test_engine_constructs.py` runs every row; this page is
written by `python -m tests.make_constructs`.

| construct | what happens |
|---|---|
"""


def page() -> str:
    """The page as it must be."""
    rows = [
        f"| {construct.name.replace('-', ' ')} | {_outcome(construct)} |"
        for construct in CONSTRUCTS
    ]
    return HEAD.format(count=len(CONSTRUCTS)) + "\n".join(rows) + "\n"


def _outcome(construct: Construct) -> str:
    if isinstance(construct.expected, Refused):
        says = construct.expected.says
        return f"`{construct.expected.error.__name__}`: {WHY.get(says, says)}"
    return "correct"


if __name__ == "__main__":
    TARGET.write_text(page())

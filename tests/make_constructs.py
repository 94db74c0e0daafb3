"""Write docs/constructs.md from the tested table: ``python -m tests.make_constructs``."""

from __future__ import annotations

from pathlib import Path

from tests.constructs import CONSTRUCTS, Construct, Refused

TARGET = Path(__file__).parent.parent / "docs" / "constructs.md"

HEAD = """\
# Model constructs

What happens to {count} ways of writing a model. *Correct*: norms and clipped sums equal those of
ordinary autograd, one sample at a time. Otherwise: the typed error that is raised before anything
is trained, and why. `tests/test_engine_constructs.py` runs every row; `python -m
tests.make_constructs` writes this page.

| construct | what happens |
|---|---|
"""

WHY = {
    "sample": "one sample reaches the gradient of another",
    "batch": "the batch is not the first dimension",
    "its batch": "statistics of the batch",
    "buffer": "a buffer would carry data past the noise",
}
"""In words what a short part of a message stands for."""


def page() -> str:
    """The page as it must be."""
    rows = [f"| {c.name.replace('-', ' ')} | {_outcome(c)} |" for c in CONSTRUCTS]
    return HEAD.format(count=len(CONSTRUCTS)) + "\n".join(rows) + "\n"


def _outcome(construct: Construct) -> str:
    if not isinstance(construct.expected, Refused):
        return construct.expected
    says = construct.expected.says
    return f"`{construct.expected.error.__name__}`: {WHY.get(says, says)}"


if __name__ == "__main__":
    TARGET.write_text(page())

"""A processor between two instruction sets takes the kernels of the lower one, not scalar code."""

from __future__ import annotations

import re
from pathlib import Path

SOURCES = Path(__file__).parents[3] / "csrc" / "cpu"


def test_no_kernel_is_for_one_level_where_levels_lie_between_it_and_the_next() -> None:
    """``isa() == kAvx512`` left processors with VNNI, but without VBMI, to scalar draws."""
    enum = re.findall(r"k\w+(?= = \d)", (SOURCES / "isa.h").read_text())
    assert enum[1:3] == ["kAvx2", "kAvx512"]  # the second follows the first, nothing between them
    text = "".join(path.read_text() for path in sorted(SOURCES.glob("*.*")))
    assert {*re.findall(r"\bisa\(\) == Isa::(k\w+)", text)} == {"kAvx2"}

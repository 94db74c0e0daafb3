"""Structs of C++ as Python computes them: types, fields, offsets and bytes.

Only the standard library is used: the build runs this file before anything is installed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from .codes import Codes, name_of


class LayoutSize(int):
    """A number that kernels and their callers must agree on; C++ knows ``TILE`` as ``kTile``."""

    comment: str
    cpp: str

    def __new__(cls, value: int, comment: str, cpp: str = "int") -> LayoutSize:
        made = super().__new__(cls, value)
        made.comment, made.cpp = comment, cpp
        return made


@dataclass(frozen=True)
class Type:
    """The type of a field or of a kernel's parameter.

    Attributes:
        cpp: its name in C++.
        format: its name in numpy, of one entry.
        bytes: size of one entry, which is its alignment as well.
        count: how many entries a field is an array of, or None.
        comment: what the field means.
    """

    cpp: str
    format: str
    bytes: int
    count: int | None = None
    comment: str = ""

    def __call__(self, comment: str) -> Type:
        """Return the same type with a comment on the field."""
        return replace(self, comment=comment)

    def __getitem__(self, count: int) -> Type:
        """Return an array of this type."""
        return replace(self, count=count)

    @property
    def alignment(self) -> int:
        """The alignment in bytes."""
        return self.bytes

    @property
    def size(self) -> int:
        """The size in bytes, of all entries."""
        return self.bytes * (self.count or 1)

    @property
    def signature(self) -> str:
        """The kind of a kernel's parameter and its bytes, as the compiled module tells them."""
        kind = "p" if self.cpp.endswith("*") else "f" if self.format.startswith("f") else "i"
        return f"{kind}{self.bytes}"


I32, U32 = Type("std::int32_t", "i4", 4), Type("std::uint32_t", "u4", 4)
I64, U64 = Type("std::int64_t", "i8", 8), Type("std::uint64_t", "u8", 8)
F32, F64 = Type("float", "f4", 4), Type("double", "f8", 8)
BOOL = Type("bool", "?", 1)


def pointer(to: str) -> Type:
    """Return the type of a device address; Python gives it as an integer."""
    return Type(f"{to}*", "u8", 8)


def code(codes: Codes) -> Type:
    """Return the type of a field that holds one of these codes."""
    return Type(name_of(codes), "i4", 4)


class Struct:
    """A struct of C++: its fields in order, each at its own alignment."""

    def __init__(
        self, name: str, doc: str, *, template: str = "", comment: str = "", **fields: Type | Struct
    ) -> None:
        self.name, self.doc, self.template, self.comment = name, doc, template, comment
        self.fields = fields

    def __call__(self, comment: str) -> Struct:
        """Return the same struct with a comment on the field that it is."""
        same = Struct(self.name, self.doc, template=self.template, comment=comment)
        same.fields = self.fields
        return same

    @cached_property
    def alignment(self) -> int:
        """The largest alignment of a field."""
        return max(field.alignment for field in self.fields.values())

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Bytes from the beginning to each field, and to the end under the name ``""``."""
        found, end = {}, 0
        for name, field in self.fields.items():
            found[name] = end = -(-end // field.alignment) * field.alignment
            end += field.size
        return {**found, "": -(-end // self.alignment) * self.alignment}

    @property
    def size(self) -> int:
        """The size in bytes, padding included."""
        return self.offsets[""]

    @property
    def signature(self) -> str:
        """The kind and the bytes, in the form of ``Type.signature``."""
        return f"s{self.size}"

    def pack(self, *values: float | bytes) -> bytes:
        """Return the struct's bytes from its fields in order.

        Those of a struct are passed one by one, an array as its own bytes.
        """
        return self.packer.pack(*values)

    @cached_property
    def packer(self) -> struct.Struct:
        """The standard library's packer of the same bytes."""
        return struct.Struct("<" + "".join(self._formats()))

    def _formats(self) -> Iterator[str]:
        end = 0
        for name, field in self.fields.items():
            yield f"{self.offsets[name] - end}x"
            if isinstance(field, Struct):
                yield from field._formats()
            else:
                yield _PACKED[field.format] if field.count is None else f"{field.size}s"
            end = self.offsets[name] + field.size
        yield f"{self.size - end}x"


_PACKED = {"i4": "i", "u4": "I", "i8": "q", "u8": "Q", "f4": "f", "f8": "d", "?": "?"}
"""Names of numpy's formats in the standard library's ``struct``."""

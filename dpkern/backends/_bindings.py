"""Write the border between Python and the compiled CPU kernels from the ops' signatures.

For every op that ``cpu.COMPILED`` names: a struct of its arguments, the enums of its options, the
kernel's declaration ``void linear_norm(const LinearNorm<F>& call, int threads)``, and the kernel as
a function of Python's module, ``linear_norm_float32(...)``.

Tensors are pointers (null for None), options enums, sizes 64-bit integers that bear the signature's
names. An op whose tensors may be of more types than float and double receives ``void`` pointers and
the place of its dtype in its group. Only the standard library is used: the build runs this file
before anything is installed, and reads the sources of ops without importing them.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..base import signature

PACKAGE = Path(__file__).resolve().parents[1]
TYPES = {
    "Double": "double",
    "Int64": "std::int64_t",
    "Int32": "std::int32_t",
    "Int16": "std::int16_t",
}
TEMPLATED = ("Float", "Operand")
SCALARS = {"int": "std::int64_t", "float": "double", "bool": "bool"}
FLOATS = {"float32": "float", "float64": "double"}


def compiled() -> tuple[str, ...]:
    """Names of the ops with a compiled kernel, ``stem.function``."""
    source = Path(__file__).with_name("cpu.py").read_text()
    return tuple(_constants(ast.parse(source))["COMPILED"])


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Module-level names of literal tuples and of ``Literal[...]`` types."""
    found: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            target, value = node.target.id, node.value
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            target, value = node.targets[0].id, node.value
        else:
            continue
        if isinstance(value, ast.Subscript) and ast.unparse(value.value) == "Literal":
            value = value.slice if isinstance(value.slice, ast.Tuple) else ast.Tuple([value.slice])
        try:
            found[target] = ast.literal_eval(value) if value is not None else None
        except (ValueError, TypeError):
            continue
    return found


def ops() -> Iterator[Any]:
    """The signatures of the compiled ops, in the order of their names."""
    wanted = set(compiled())
    sources = sorted((PACKAGE / "ops").rglob("*.py"))
    trees = {source: ast.parse(source.read_text()) for source in sources}
    literals: dict[str, Any] = {}
    for tree in trees.values():
        literals.update(_constants(tree))
    for source, tree in trees.items():
        stem = source.relative_to(PACKAGE / "ops").with_suffix("").parts[0]
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and f"{stem}.{node.name}" in wanted:
                wanted.remove(f"{stem}.{node.name}")
                yield signature.read(node.name, _annotations(node), literals.get)
    if wanted:
        raise SystemExit(f"COMPILED names no op of dpkern/ops: {', '.join(sorted(wanted))}")


def _annotations(node: ast.FunctionDef) -> dict[str, str]:
    arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    found = {a.arg: ast.unparse(a.annotation) for a in arguments if a.annotation is not None}
    assert node.returns is not None
    return {**found, "return": ast.unparse(node.returns)}


def camel(name: str) -> str:
    """``linear_norm`` as ``LinearNorm``."""
    return "".join(part[:1].upper() + part[1:] for part in str(name).split("_"))


def is_templated(op: Any) -> bool:
    """Whether a kernel is a template on float and double."""
    return any(getattr(p, "group", None) in TEMPLATED for p in op.parameters)


def fields(op: Any) -> Iterator[tuple[str, str, str]]:
    """``(C++ type, type at the border, name)`` of a kernel's arguments, in the order of the call."""
    for parameter in signature.passed(op):
        if isinstance(parameter, signature.ChoiceParameter):
            kind = parameter.kind or camel(f"{op.name}_{parameter.name}")
            yield kind, "int", parameter.name
        elif isinstance(parameter, signature.NumberParameter):
            kind = SCALARS[parameter.type]
            kind = f"std::optional<{kind}>" if parameter.optional else kind
            yield kind, kind, parameter.name
        elif isinstance(parameter, signature.TensorParameter):
            const = "" if "written" in parameter.marks else "const "
            pointer = f"{const}{_type(op, parameter)}*"
            if parameter.many:
                yield f"std::vector<{pointer}>", "Addresses", parameter.name
            else:
                yield pointer, "Address", parameter.name
            if "transposable" in parameter.marks:
                yield "bool", "bool", f"{parameter.name}_transposed"
        else:
            struct = signature.STRUCTS[parameter.annotation]
            yield struct, "pybind11::object", parameter.name
    for result in op.results or ():
        yield f"{_type(op, result)}*", "Address", result.name
    lists = {dim for tensor in op.tensors if tensor.many for dim in tensor.dims}
    for size in op.sizes:
        if size[0] == "*":
            if size not in lists:
                raise SystemExit(f"{op.name}: a compiled kernel takes no {size} outside of lists")
            yield "std::vector<std::int64_t>", "Integers", size[1:]
        else:
            yield "std::int64_t", "std::int64_t", size


def _type(op: Any, tensor: Any) -> str:
    if tensor.group in TYPES:
        return TYPES[tensor.group]
    return "F" if is_templated(op) else "void"


def header(found: Sequence[Any]) -> Iterator[str]:
    """``ops.h``."""
    yield "#pragma once"
    yield "// Generated by the build from the signatures in dpkern/ops; do not edit."
    yield ""
    yield "#include <cstdint>"
    yield "#include <optional>"
    yield "#include <vector>"
    yield ""
    yield "namespace dpkern::cpu {"
    enums: dict[str, tuple[Any, ...]] = {}
    for op in found:
        for parameter in op.parameters:
            if isinstance(parameter, signature.ChoiceParameter):
                kind = parameter.kind or camel(f"{op.name}_{parameter.name}")
                if enums.setdefault(kind, parameter.options) != parameter.options:
                    raise SystemExit(f"{kind}: two lists of options with one name")
    for kind, options in enums.items():
        names = ", ".join(f"k{camel(option)}" for option in options)
        yield ""
        yield f"enum class {kind} : int {{ {names} }};"
    for op in found:
        template = "template <class F>" if is_templated(op) else ""
        struct = camel(op.name)
        yield ""
        if template:
            yield template
        yield f"struct {struct} {{"
        for kind, _, name in fields(op):
            yield f"  {kind} {name};"
        yield "};"
        if template:
            yield template
        yield f"void {op.name}(const {struct}{'<F>' if template else ''}& call, int threads);"
    yield ""
    yield "}  // namespace dpkern::cpu"


def source(found: Sequence[Any]) -> Iterator[str]:
    """``ops.cpp``."""
    yield "// Generated by the build from the signatures in dpkern/ops; do not edit."
    yield ""
    yield '#include "cpu/ops.h"'
    yield ""
    yield "#include <pybind11/stl.h>"
    yield ""
    yield '#include "bindings/bindings.h"'
    yield ""
    yield "namespace dpkern::bindings {"
    yield "namespace {"
    yield ""
    yield "using Address = std::uintptr_t;"
    for op in found:
        struct = f"cpu::{camel(op.name)}{'<F>' if is_templated(op) else ''}"
        yield ""
        if is_templated(op):
            yield "template <class F>"
        made = list(fields(op))
        taken = ", ".join(f"{_border(border)} {name}" for _, border, name in made)
        yield from _wrapped(f"void {op.name}(", f"{taken}, int threads", ") {")
        given = ", ".join(_converted(*field) for field in made)
        yield from _wrapped(f"  const {struct} call{{", given, "};")
        yield "  pybind11::gil_scoped_release release;"
        yield f"  cpu::{op.name}(call, threads);"
        yield "}"
    yield ""
    yield "}  // namespace"
    yield ""
    yield "void add_ops(pybind11::module_& m) {"
    for op in found:
        for kind, scalar in FLOATS.items() if is_templated(op) else (("", ""),):
            name = f"{op.name}_{kind}" if kind else op.name
            yield f'  m.def("{name}", &{op.name}{f"<{scalar}>" if scalar else ""});'
    yield "}"
    yield ""
    yield "}  // namespace dpkern::bindings"


def _wrapped(begin: str, items: str, end: str) -> Iterator[str]:
    """A list that may be longer than a line."""
    yield from textwrap.wrap(
        f"{begin}{items}{end}", 100, subsequent_indent=" " * len(begin), break_on_hyphens=False
    )


def _border(kind: str) -> str:
    by_reference = kind in ("Addresses", "Integers", "pybind11::object")
    return f"const {kind}&" if by_reference else kind


def _converted(kind: str, border: str, name: str) -> str:
    if border == "Address":
        return f"pointer<{kind[:-1]}>({name})"
    if border == "Addresses":
        inner = kind.removeprefix("std::vector<").removesuffix("*>")
        return f"pointers<{inner}>({name})"
    if border == "int":
        return f"static_cast<cpu::{kind}>({name})"
    if border == "pybind11::object":
        return f"from_python<{kind}>({name})"
    return name


def files() -> dict[str, str]:
    """Return the texts by the names under which sources include or CMake compiles them."""
    found = list(ops())
    return {
        "cpu/ops.h": "\n".join(header(found)) + "\n",
        "bindings/ops.cpp": "\n".join(source(found)) + "\n",
    }

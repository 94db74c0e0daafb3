"""Write the border between Python and the compiled CPU kernels from their signatures.

For every op that ``cpu.COMPILED`` names, and every function of a backend that is marked
``@compiled``: a struct of its arguments, the enums of its options, the kernel's declaration
``void linear_norm(const LinearNorm<F>& call, int threads)``, and the kernel as a function of
Python's module, ``linear_norm_float32(...)``. F is the dtype of the call, where it has one. A
kernel without a plan can also be called with what ``bindings/look.h`` has seen of an op's call.

Tensors are pointers (null for None), options enums, structs of ``layouts`` bytes. Sizes are 64-bit
integers that bear the signature's names: ``*S`` is the product of its sizes, in lists one for each
tensor. Only the standard library is used: the build runs this file before anything is installed,
and reads the sources of ops without importing them.
"""

from __future__ import annotations

import ast
import hashlib
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...base import codes, signature, signature_reader

PACKAGE = Path(__file__).resolve().parents[2]
TYPES = {
    "Double": "double",
    "Int64": "std::int64_t",
    "Int32": "std::int32_t",
    "Int16": "std::int16_t",
}
SHARED = {kind.name: kind.words for kind in codes.CODES if isinstance(kind, codes.OptionCodes)}
"""Options that ``core/layouts.h`` declares."""
SCALARS = {"int": "std::int64_t", "float": "double", "bool": "bool", "Word": "std::uint64_t"}
KINDS = {
    "float32": "float",
    "float64": "double",
    "uint8": "std::uint8_t",
    "int32": "std::int32_t",
    "int64": "std::int64_t",
    "bfloat16": "cpu::Bfloat16",
}


def compiled() -> dict[str, bool]:
    """Return names of the ops with a compiled kernel, ``stem.function``, and whether it counts."""
    found = _constants(ast.parse(Path(__file__).with_name("cpu.py").read_text()))
    return {name: name in found["COUNTING"] for name in found["COMPILED"]}


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Return the module-level names of literal tuples and of ``Literal[...]`` types."""
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


def declaration(op: signature.Signature) -> str:
    """Return a hash of a signature: a module that was built of another one would misread calls."""
    return hashlib.sha256(repr(op).encode()).hexdigest()[:16]


def kernels() -> Iterator[tuple[str, Any]]:
    """Yield the declaration and signature of every compiled kernel."""
    wanted = compiled()
    sources = sorted((PACKAGE / "ops").rglob("*.py"))
    sources += [PACKAGE / "base/laws.py", PACKAGE / "base/codes.py"]  # which options there are
    trees = {source: ast.parse(source.read_text()) for source in sources}
    literals: dict[str, Any] = {}
    for tree in trees.values():
        literals.update(_constants(tree))
    for source, tree in trees.items():
        stem = (*source.relative_to(PACKAGE).with_suffix("").parts, "")[1]
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef):
                continue
            counts = wanted.pop(f"{stem}.{node.name}", None)
            if counts is not None or "compiled" in _decorators(node):
                read = signature_reader.read(
                    node.name, _annotations(node), literals.get, _plan(node)
                )
                yield declaration(read), replace(read, number="int") if counts else read
    if wanted:
        raise SystemExit(f"COMPILED names no op of dpkern/ops: {', '.join(sorted(wanted))}")


def _decorators(node: ast.FunctionDef) -> list[str]:
    return [ast.unparse(decorator) for decorator in node.decorator_list]


def _plan(node: ast.FunctionDef) -> str | None:
    """Return the type of the plan of ``@op(..., plan=Geometry)``."""
    calls = (decorator for decorator in node.decorator_list if isinstance(decorator, ast.Call))
    given = (word for call in calls for word in call.keywords)
    return next((ast.unparse(word.value) for word in given if word.arg == "plan"), None)


def _annotations(node: ast.FunctionDef) -> dict[str, str]:
    arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    found = {a.arg: ast.unparse(a.annotation) for a in arguments if a.annotation is not None}
    assert node.returns is not None
    return {**found, "return": ast.unparse(node.returns)}


def camel(name: str) -> str:
    """Return the name in camel case: ``linear_norm`` as ``LinearNorm``."""
    return "".join(part[:1].upper() + part[1:] for part in str(name).split("_"))


def is_templated(op: Any) -> bool:
    """Whether a kernel is a template on its dtype."""
    return bool(signature.kinds(op))


def answer(op: Any) -> str:
    """Return the C++ type that a kernel returns."""
    return SCALARS[op.number] if op.number else "void"


def fields(op: Any) -> Iterator[tuple[str, str, str]]:
    """Yield ``(C++ type, type at the border, name)`` of a kernel's arguments in order."""
    for parameter in signature.passed(op):
        if isinstance(parameter, signature.ChoiceParameter):
            kind = parameter.kind or camel(f"{op.name}_{parameter.name}")
            yield kind, "int", parameter.name
        elif isinstance(parameter, signature.NumberParameter):
            kind = SCALARS.get(parameter.rule) or SCALARS[parameter.type]
            if parameter.many:
                kind = f"std::vector<{kind}>"
            kind = f"std::optional<{kind}>" if parameter.optional else kind
            yield kind, kind, parameter.name
        elif isinstance(parameter, signature.TensorParameter):
            const = "" if {"written", "filled"} & {*parameter.marks} else "const "
            pointer = f"{const}{_type(op, parameter)}*"
            if parameter.many:
                yield f"std::vector<{pointer}>", "Addresses", parameter.name
            else:
                yield pointer, "Address", parameter.name
            if "transposable" in parameter.marks:
                yield "bool", "bool", f"{parameter.name}_transposed"
            if parameter.group == "Summed":
                yield parameter.group, "int", f"{parameter.name}_kind"
        elif isinstance(parameter, signature.ObjectParameter):
            kind = parameter.annotation
            kind = f"std::vector<{kind}>" if parameter.many else kind
            yield kind, "pybind11::bytes", parameter.name
    for result in op.results or ():
        yield f"{_type(op, result)}*", "Address", result.name
    for size in op.sizes:
        if any(parameter.name == size for parameter in op.parameters):
            continue  # a count, which is passed as itself
        if size in op.lists and size[0] == "*":
            yield "std::vector<std::int64_t>", "Integers", size[1:]
        else:
            yield "std::int64_t", "std::int64_t", size.lstrip("*")


def _type(op: Any, tensor: Any) -> str:
    if tensor.group in TYPES:
        return TYPES[tensor.group]
    if tensor.group == "Summed":
        return "void"
    return "F" if is_templated(op) else "void"


def seen(op: Any) -> Iterator[str]:
    """Yield a kernel's arguments in order, as C++ expressions on the call that was checked.

    That call is ``Seen`` in C++.
    """
    places = {parameter.name: place for place, parameter in enumerate(op.parameters)}
    for parameter in signature.passed(op):
        place = places[parameter.name]
        if isinstance(parameter, signature.ChoiceParameter):
            kind = parameter.kind or camel(f"{op.name}_{parameter.name}")
            yield f"at.code<{_enum(kind)}>({place})"
        elif isinstance(parameter, signature.NumberParameter):
            yield f"at.{_reader(parameter)}({place})"
        elif isinstance(parameter, signature.TensorParameter):
            const = "" if {"written", "filled"} & {*parameter.marks} else "const "
            many = "s" if parameter.many else ""
            yield f"at.pointer{many}<{const}{_type(op, parameter)}>({place})"
            if "transposable" in parameter.marks:
                yield f"at.transposed({place})"
            if parameter.group == "Summed":
                yield f"at.kind<cpu::{parameter.group}>({place})"
        elif isinstance(parameter, signature.ObjectParameter):
            reader = "list_from_bytes" if parameter.many else "from_bytes"
            yield f"{reader}<{parameter.annotation}>(at.bytes({place}))"
    for place, result in enumerate(op.results or ()):
        yield f"at.result<{_type(op, result)}*>({place})"
    for place, size in enumerate(op.sizes):
        if size not in places:
            several = "products" if size in op.lists else "product"
            yield f"at.{several if size[0] == '*' else 'size'}({place})"


def _reader(parameter: signature.NumberParameter) -> str:
    if parameter.rule == "Word":
        return "word"
    if parameter.many:
        return "integers" if parameter.type == "int" else "numbers"
    name = {"int": "integer", "float": "number", "bool": "flag"}[parameter.type]
    return f"any_{name}" if parameter.optional else name


def _enum(kind: str) -> str:
    return kind if kind in SHARED else f"cpu::{kind}"


def header(found: Sequence[Any]) -> Iterator[str]:
    """Yield the lines of ``ops.h``."""
    yield "#pragma once"
    yield "// Generated by the build from the signatures in dpkern; do not edit."
    yield ""
    yield "#include <cstdint>"
    yield "#include <optional>"
    yield "#include <vector>"
    yield ""
    yield '#include "core/layouts.h"'
    yield ""
    yield "namespace dpkern::cpu {"
    enums: dict[str, tuple[Any, ...]] = {}
    for op in found:
        for parameter in op.parameters:
            if isinstance(parameter, signature.ChoiceParameter):
                kind = parameter.kind or camel(f"{op.name}_{parameter.name}")
                if enums.setdefault(kind, parameter.options) != parameter.options:
                    raise SystemExit(f"{kind}: two lists of options with one name")
            elif getattr(parameter, "group", None) == "Summed":
                enums["Summed"] = signature.GROUPS["Summed"]
    yield ""
    yield "struct Bfloat16;"
    for kind, options in enums.items():
        if kind in SHARED:
            if SHARED[kind] != options:
                raise SystemExit(f"{kind}: two lists of options with one name")
            continue
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
        given = f"const {struct}{'<F>' if template else ''}& call"
        yield f"{answer(op)} {op.name}({given}, int threads);"
    yield ""
    yield "}  // namespace dpkern::cpu"


def source(found: Sequence[Any], declarations: Sequence[str]) -> Iterator[str]:
    """Yield the lines of ``ops.cpp``, which binds the compiled kernels."""
    yield "// Generated by the build from the signatures in dpkern; do not edit."
    yield ""
    yield '#include "cpu/ops.h"'
    yield ""
    yield "#include <pybind11/stl.h>"
    yield ""
    yield '#include "bindings/bindings.h"'
    yield '#include "bindings/seen.h"'
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
        yield from _wrapped(f"{answer(op)} {op.name}(", f"{taken}, int threads", ") {")
        given = ", ".join(_converted(*field) for field in made)
        yield from _wrapped(f"  const {struct} call{{", given, "};")
        yield "  pybind11::gil_scoped_release release;"
        yield f"  return cpu::{op.name}(call, threads);"
        yield "}"
    rows = []
    for op, declared in zip(found, declarations, strict=True):
        if op.plan is not None:
            continue
        yield ""
        if is_templated(op):
            yield "template <class F>"
        yield f"std::int64_t seen_{op.name}(const Seen& at, int threads) {{"
        struct = f"cpu::{camel(op.name)}{'<F>' if is_templated(op) else ''}"
        yield from _wrapped(f"  const {struct} call{{", ", ".join(seen(op)), "};")
        yield "  const Unlocked unlocked;"
        if op.number:
            yield f"  return cpu::{op.name}(call, threads);"
        else:
            yield f"  cpu::{op.name}(call, threads);"
            yield "  return 0;"
        yield "}"
        names = [(f"{op.name}_{kind}", f"<{KINDS[kind]}>") for kind in signature.kinds(op)]
        for name, kind in names or [(op.name, "")]:
            rows.append(f'    {{"{name}", "{declared}", &seen_{op.name}{kind}}},')
    yield ""
    yield "constexpr Entry kEntries[] = {"
    yield from rows
    yield "};"
    yield ""
    yield "}  // namespace"
    yield ""
    yield "const Entry* entry(std::string_view name) {"
    yield "  for (const Entry& known : kEntries) {"
    yield "    if (name == known.name) return &known;"
    yield "  }"
    yield "  return nullptr;"
    yield "}"
    yield ""
    yield "void add_ops(pybind11::module_& m) {"
    for op in found:
        if not is_templated(op):
            yield f'  m.def("{op.name}", &{op.name});'
        for kind in signature.kinds(op):
            yield f'  m.def("{op.name}_{kind}", &{op.name}<{KINDS[kind]}>);'
    yield "}"
    yield ""
    yield "}  // namespace dpkern::bindings"


def _wrapped(begin: str, items: str, end: str) -> Iterator[str]:
    """Yield the lines of a list that may be longer than a line."""
    yield from textwrap.wrap(
        f"{begin}{items}{end}", 100, subsequent_indent=" " * len(begin), break_on_hyphens=False
    )


def _border(kind: str) -> str:
    by_reference = kind in ("Addresses", "Integers", "pybind11::bytes") or "vector" in kind
    return f"const {kind}&" if by_reference else kind


def _converted(kind: str, border: str, name: str) -> str:
    if border == "Address":
        return f"pointer<{kind[:-1]}>({name})"
    if border == "Addresses":
        inner = kind.removeprefix("std::vector<").removesuffix("*>")
        return f"pointers<{inner}>({name})"
    if border == "int":
        return f"static_cast<{_enum(kind)}>({name})"
    if border == "pybind11::bytes" and kind.startswith("std::vector"):
        return f"list_from_bytes<{kind[12:-1]}>({name})"
    if border == "pybind11::bytes":
        return f"from_bytes<{kind}>({name})"
    return name


def files() -> dict[str, str]:
    """Return the texts by the names under which sources include or CMake compiles them."""
    declarations, found = zip(*kernels(), strict=True)
    return {
        "cpu/ops.h": "\n".join(header(found)) + "\n",
        "bindings/ops.cpp": "\n".join(source(found, declarations)) + "\n",
    }

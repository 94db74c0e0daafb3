"""Triton's interpreter without its repetitions: what it computes stays the same.

It exchanges the functions of ``triton.language`` at every call of a device function, although the
launch around it has done so already; it finds types and shapes anew at every operation; and it
computes of every sum and product of integers whether it overflows, for an assertion that it makes
in debugging only. All of it takes two thirds of its time.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import cache
from typing import Any

import pytest


def without_repetitions(patch: pytest.MonkeyPatch) -> None:
    """Let it do what it repeats once, until ``patch`` is undone."""
    from triton.runtime import interpreter

    _exchange_once(patch, interpreter)
    _keep_types(patch, interpreter)
    options = interpreter.interpreter_builder.options
    if not options.debug:
        patch.setattr(
            interpreter.interpreter_builder, "options", replace(options, sanitize_overflow=False)
        )


def _exchange_once(patch: pytest.MonkeyPatch, interpreter: Any) -> None:
    """Each launch exchanges the functions of a module once."""
    language = interpreter.tl
    exchange, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    done: set[tuple[bool, ...]] = set()
    one_launch = threading.RLock()  # what is exchanged is there for all threads

    @cache
    def seen_by(fn: Any) -> tuple[bool, ...]:
        names = fn.__globals__.values()
        return tuple(any(x is module for x in names) for module in (language, language.core))

    def exchanged(fn: Any) -> Any:
        seen = seen_by(fn)
        if seen in done:
            return interpreter._LangPatchScope()
        done.add(seen)
        return exchange(fn)

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        with one_launch:
            done.clear()
            return launch(self, *args, **kwargs)

    patch.setattr(interpreter, "_patch_lang", exchanged)
    patch.setattr(interpreter.GridExecutor, "__call__", launched)


def _keep_types(patch: pytest.MonkeyPatch, interpreter: Any) -> None:
    """Types of numbers and shapes of blocks and tensors, which nothing changes, are made once."""
    core, semantic = interpreter.tl.core, interpreter.TritonSemantic
    any_type, any_shapes = interpreter._get_np_dtype, semantic.broadcast_impl_value
    new_block, new_tensor = core.block_type.__init__, core.tensor.__init__
    of_two, any_cast = semantic.computation_type_impl, semantic._cast_to_computation_type
    of_numbers = cache(any_type)

    def numpy_type(kind: Any) -> Any:
        kind = kind.element_ty if isinstance(kind, core.block_type) else kind
        return of_numbers(kind) if type(kind) is core.dtype else any_type(kind)

    @cache
    def kept(*sizes: Any) -> tuple[Any, str, Any]:
        block = object.__new__(core.block_type)
        new_block(block, core.int1, list(sizes))
        tensor = object.__new__(core.tensor)
        new_tensor(tensor, None, block)
        return block, str(block.shape), tensor

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        made, text, _ = kept(*(getattr(size, "value", size) for size in shape))
        self.element_ty, self.shape, self.numel = element_ty, made.shape, made.numel
        self.name = f"<{text}, {element_ty}>"

    def tensor(self: Any, handle: Any, type: Any) -> None:
        if not type.is_block():
            new_tensor(self, handle, type)
            return
        made = kept(*type.shape.values)[2]
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = made.shape, made.numel

    def broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        alike = lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape
        return (lhs, rhs) if alike else any_shapes(self, lhs, rhs)

    @cache
    def type_of_two(*kinds: Any) -> Any:
        return of_two(interpreter.interpreter_semantic, *kinds)

    def cast(self: Any, value: Any, dtype: Any) -> Any:
        return value if getattr(value, "dtype", None) is dtype else any_cast(self, value, dtype)

    patch.setattr(semantic, "broadcast_impl_value", broadcast)
    patch.setattr(semantic, "computation_type_impl", lambda self, *kinds: type_of_two(*kinds))
    patch.setattr(semantic, "_cast_to_computation_type", cast)
    patch.setattr(interpreter, "_get_np_dtype", numpy_type)
    patch.setattr(core.block_type, "__init__", block)
    patch.setattr(core.tensor, "__init__", tensor)

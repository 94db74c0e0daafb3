"""Exceptions of dpkern, which name what was expected, what came, and what to do; and a warning."""

from __future__ import annotations

import reprlib
from functools import partial
from typing import Any


class _Brief(reprlib.Repr):
    """A short text of any value, made in a time that does not grow with the value."""

    maxlevel = 2
    maxother = maxstring = 60

    def repr_int(self, value: int, level: int) -> str:
        # Longer ones have no decimal form (sys.set_int_max_str_digits).
        return super().repr_int(value, level) if value.bit_length() < 1 << 10 else "a huge int"


def brief(value: object) -> str:
    """Return at most 120 characters that show the value, whatever it is."""
    return _Brief().repr(value)[:120]


class DPKernError(Exception):
    """The base of every error that dpkern raises on purpose.

    Args:
        name: the argument, file or object that is wrong.
        expected: what would have been accepted.
        got: what came instead (its ``repr`` is shown unless it is a string).
        remedy: what the caller can do about it.
    """

    def __init__(self, name: str, *, expected: str, got: object, remedy: str) -> None:
        self.name = name
        self.expected = expected
        self.got = got if isinstance(got, str) else _shown(got)
        self.remedy = remedy
        # A list of findings ends with a line of its own, and its last sentence with a full stop.
        end = "\n" if "\n" in self.got else ". "
        super().__init__(f"{name}: expected {expected}, got {self.got}{end}{remedy}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the error by its fields, so that it arrives unchanged in another process."""
        return partial(type(self), **vars(self)), (self.name,)


def _shown(value: object) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):  # a huge int, or lists in lists without end
        return brief(value)


class InvalidInput(DPKernError, ValueError):
    """A value, shape, dtype, device, file or name that cannot be used; a ``ValueError`` too."""


class UnsupportedModule(DPKernError):
    """A model construct whose per-sample gradients cannot be computed correctly."""


class BackendError(DPKernError):
    """A backend that was asked for cannot run the operation; lists every refusal."""


class PrivacyError(DPKernError):
    """A request whose privacy guarantee would be wrong, void or spent twice."""


class MissingDependency(DPKernError):
    """An optional package is needed for this feature and is not installed."""


class PrivacyWarning(UserWarning):
    """A guarantee that holds and says less than its reader may think, such as delta >= 1/n."""


class CompileWarning(UserWarning):
    """A module that ``torch.compile`` compiles, and that runs without a graph all the same."""


class HookWarning(UserWarning):
    """A gradient hook of a private parameter, which private backward passes do not call."""


class LossWarning(UserWarning):
    """A loss whose terms have other weights than its reader may think."""

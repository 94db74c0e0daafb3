"""Check that the numbers of an update were not computed from samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..base.errors import PrivacyError
from .provenance.states import Mixed
from .provenance.statistic import READ_VALUES, origin_of

_PLAIN = frozenset({bool, int, type(None)})
_PLAIN_WITH_FLOATS = _PLAIN | {float}
"""Kinds of numbers that remember no samples, where no float was read from any."""


def check_settings(
    groups: Sequence[Mapping[str, Any]], others: Mapping[str, Any], names: Iterable[str]
) -> None:
    """Refuse learning rates and the like that remember samples, such as ``loss.item()``.

    Args:
        groups: the optimizer's ``param_groups``.
        others: attributes of the optimizer, with numbers of the mechanism.
        names: names of these numbers.

    Raises:
        PrivacyError: names the number and the operation that it came from.
    """
    plain = _PLAIN if READ_VALUES else _PLAIN_WITH_FLOATS
    for place, group in enumerate(groups):
        for name, value in group.items():
            if type(value) in plain or name == "params":
                continue
            if (found := origin_of(value)) is not None:
                raise _follows(f"optimizer.param_groups[{place}][{name!r}]", found)
    for name in names:
        value = others[name]
        if type(value) not in plain and (found := origin_of(value)) is not None:
            raise _follows(f"optimizer.{name}", found)


def _follows(name: str, found: Mixed) -> PrivacyError:
    return PrivacyError(
        name,
        expected="a number that does not depend on the samples",
        got=f"one from {found.operation}, which {found.how} ({found.where})",
        remedy="Set it by the number of the step, or by public or released values: the update "
        "would carry the samples past the noise.",
    )

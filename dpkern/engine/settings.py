"""Check that the numbers of an update were not computed from samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..base.errors import PrivacyError
from .provenance.states import Mixed
from .provenance.statistic import origin_of

_PLAIN = frozenset({bool, int, type(None)})


def check_settings(groups: Sequence[Mapping[str, Any]], others: Mapping[str, Any]) -> None:
    """Refuse learning rates and the like that remember samples, such as ``loss.item()``.

    Args:
        groups: the optimizer's ``param_groups``.
        others: numbers of the mechanism.

    Raises:
        PrivacyError: names the number and the operation that it came from.
    """
    for place, group in enumerate(groups):
        for name, value in group.items():
            if type(value) in _PLAIN or name == "params":
                continue
            if (found := origin_of(value)) is not None:
                raise _follows(f"optimizer.param_groups[{place}][{name!r}]", found)
    for name, value in others.items():
        if (found := origin_of(value)) is not None:
            raise _follows(f"optimizer.{name}", found)


def _follows(name: str, found: Mixed) -> PrivacyError:
    return PrivacyError(
        name,
        expected="a number that does not depend on the samples",
        got=f"one from {found.operation}, which {found.how} ({found.where})",
        remedy="Set it by the number of the step, or by public or released values: the update "
        "would carry the samples past the noise.",
    )

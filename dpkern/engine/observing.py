"""Let an audit of a whole training loop join ``make_private``; off unless a block turns it on.

Inside ``with observed_by(observer):`` every ``make_private`` asks the observer. It chooses a known
seed, so that another run can repeat noise and batches, and sees the private parts before they are
used. ``DPStep.watch`` accepts no step with a secret key: whatever is observed certifies nothing.
Outside such a block nothing is asked, and nothing here depends on data.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from ..base.errors import PrivacyError
from ..privacy.mechanisms.base import Mechanism

if TYPE_CHECKING:
    from ..step.step import DPStep
    from .arguments import MakePrivateOptions
    from .capture import Capture
    from .loader import PrivateLoader
    from .optimizer import OptimizerAdapter


class Observer(Protocol):
    """The methods that ``make_private`` calls on an observer, in this order."""

    def options(self, options: MakePrivateOptions) -> MakePrivateOptions:
        """Return the options to use: the user's, with a known seed."""

    def mechanism(self, mechanism: Mechanism) -> Mechanism:
        """Return the mechanism to use in place of the user's, such as the same without noise."""

    def made(
        self,
        capture: Capture,
        step: DPStep,
        adapter: OptimizerAdapter,
        loader: PrivateLoader | None,
    ) -> None:
        """Take the private parts, before they are attached."""


_current: Observer | None = None


def current() -> Observer | None:
    """Return the observer of this process; None outside ``observed_by``."""
    return _current


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Let an observer join every ``make_private`` of this block, in all threads.

    Raises:
        PrivacyError: a block inside another one.
    """
    global _current
    if _current is not None:
        raise PrivacyError(
            "observed_by",
            expected="one observer at a time",
            got="a block inside another one",
            remedy="End the first audit before the second begins.",
        )
    _current = observer
    try:
        yield
    finally:
        _current = None

"""Detect batches whose shapes depend on their longest record.

Padding to the longest record of a batch shows every sample the length of another one. That is
harmless where the model masks padding and the loss leaves it out, which cannot be seen from
outside. With ``masked_padding=True`` the caller states it, and the certificate names it as its
condition. Otherwise such batches are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from torch import Tensor

from ..base.errors import PrivacyError
from .collating import copied
from .empty import records_of
from .provenance.trees import tensors_of

MASKED = (
    "the model masks the padding of its inputs and the loss leaves it out, so that no sample "
    "depends on the longest record of its batch"
)
_RECORDS = 16
_SHAPE = attrgetter("shape")
_PLAIN = {Tensor}


class PaddingCheck:
    """A check whether the shapes of batches depend on their records.

    Args:
        allowed: whether the caller states that padding is masked.
        assume: callback that gets the condition of the certificate.
        taint: callback that gets the reason where earlier batches may have been padded already.
    """

    def __init__(
        self, *, allowed: bool, assume: Callable[[str], None], taint: Callable[[str], None]
    ) -> None:
        self.allowed = allowed
        self.assume = assume
        self.taint = taint
        self._known = False
        self._shapes: list[tuple[int, ...]] | None = None
        self.last: list[Any] | None = None
        """Shapes of the tensors of the last batch that was compared, if it was a list of them: most
        batches have the same, and need no look."""

    def try_records(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        """Collate single records: if their shapes differ, batches are padded to the longest.

        Raises:
            PrivacyError: they are, and nothing says that padding is masked.
        """
        count = len(dataset)
        chosen = sorted({i * (count - 1) // max(_RECORDS - 1, 1) for i in range(_RECORDS)})
        alone = [collate([copied(r)]) for r in records_of(dataset, chosen)]
        if len({tuple(_shapes(tree)) for tree in alone}) > 1:
            self._found()

    def look(self, tree: Any) -> None:
        """Compare the shapes of a batch with those of the first one.

        Raises:
            PrivacyError: they differ, and nothing says that padding is masked.
        """
        if self._known:
            return
        whole = None
        if (type(tree) is list or type(tree) is tuple) and {*map(type, tree)} == _PLAIN:
            whole = [*map(_SHAPE, tree)]
            if whole == self.last:
                return
        shapes = _shapes(tree)
        if self._shapes is None:
            self._shapes = shapes
        elif shapes != self._shapes:
            self._found(late=True)
        self.last = whole

    def _found(self, *, late: bool = False) -> None:
        if self.allowed:
            self._known = True
            self.assume(MASKED)
            return
        error = PrivacyError(
            "collate_fn",
            expected="batches of one shape, or padding that is said to be masked",
            got="shapes that depend on the records of the batch",
            remedy="Pad to a fixed length. If model and loss ignore padding, or shapes vary for "
            "reasons other than the records, pass masked_padding=True to make_private.",
        )
        if late:
            self.taint(str(error))
        raise error


def _shapes(tree: Any) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for item in tree if type(tree) in (tuple, list) else ():
        if type(item) is not Tensor or not item.dim():
            break
        found.append(item.shape[1:])
    else:
        if found:
            return found
    return [tuple(t.shape[1:]) for t, packed in tensors_of(tree) if t.dim() and not packed]

"""Convert packed sequences to padded tensors with the batch first, and back.

A ``PackedSequence`` holds its samples by decreasing length, step by step, and torch passes only the
data and the step sizes to a recurrent function. Only the module knows which sample a row belongs
to, so its forward pre-hook notes the order. A call without a note is refused: rows attributed to
the wrong sample would make the clipping bound false.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ...base.errors import UnsupportedModule


class _Noted(threading.local):
    packed: PackedSequence | None = None


_noted = _Noted()


def note_order(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note a packed input: forward pre-hook (``with_kwargs=True``) of every ``nn.RNNBase``."""
    del module
    given = args[0] if args else kwargs.get("input")
    _noted.packed = given if isinstance(given, PackedSequence) else None


def forget_order(module: nn.Module, args: Any, output: Any) -> None:
    """Forget the noted input: forward hook (``always_call=True``) of every ``nn.RNNBase``."""
    del module, args, output
    _noted.packed = None


@dataclass(frozen=True)
class Packing:
    """Positions of the rows of packed data in ``[B, T]``, in the order of the samples.

    Args:
        rows: ``[B, T]`` int64, the row of the packed data; 0 where there is none.
        valid: ``[B, T]`` bool, False after the end of a sample.
        cells: ``[rows of data]`` int64, the place of every row in the flattened ``[B, T]``.
        to_sorted, to_original: permutations of the samples between both orders, or None.
    """

    rows: Tensor
    valid: Tensor
    cells: Tensor
    to_sorted: Tensor | None
    to_original: Tensor | None

    @classmethod
    def of(cls, batch_sizes: Tensor, device: torch.device) -> Packing:
        """Return the packing of the running call.

        Raises:
            UnsupportedModule: the order of the samples was not noted.
        """
        packed = _noted.packed
        if packed is None or packed.batch_sizes is not batch_sizes:
            raise UnsupportedModule(
                "PackedSequence",
                expected="the call of an nn.LSTM, nn.GRU or nn.RNN module",
                got="packed data whose order of samples is unknown",
                remedy="Call the module itself and not its forward(), or pass a padded tensor.",
            )
        sizes = batch_sizes.to(device)
        samples = torch.arange(int(batch_sizes[0]), device=device).unsqueeze(1)
        valid = samples < sizes
        rows = torch.where(valid, sizes.cumsum(0) - sizes + samples, 0)
        to_original = packed.unsorted_indices
        if to_original is not None:
            valid, rows = valid[to_original], rows[to_original]
        cells = torch.empty(int(batch_sizes.sum()), dtype=torch.int64, device=device)
        cells[rows[valid]] = valid.flatten().nonzero().squeeze(1)
        return cls(rows, valid, cells, packed.sorted_indices, to_original)

    def pad(self, data: Tensor) -> Tensor:
        """Return packed ``[rows, F]`` as ``[B, T, F]``, zero after the end of a sample."""
        padded = data.index_select(0, self.rows.flatten())
        padded = padded.view(*self.rows.shape, *data.shape[1:])
        return torch.where(self.valid.unsqueeze(2), padded, 0.0)

    def gather(self, padded: Tensor) -> Tensor:
        """Return the packed rows of ``[B, T, F]``."""
        return padded.flatten(0, 1).index_select(0, self.cells)

    def unsort(self, state: Tensor) -> Tensor:
        """Return a state ``[K, B, H]`` in the order of the samples, given in the sorted order."""
        return state if self.to_original is None else state.index_select(1, self.to_original)

    def sort(self, state: Tensor) -> Tensor:
        """Return a state ``[K, B, H]`` in the sorted order: the inverse of ``unsort``."""
        return state if self.to_sorted is None else state.index_select(1, self.to_sorted)

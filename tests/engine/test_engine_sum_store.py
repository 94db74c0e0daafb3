"""The memory of sums is used again only when nobody shares it."""

from __future__ import annotations

import torch

from dpkern.engine.sum_store import KEPT, SumStore

SHAPES = ((3, 5), (), (7,))
CPU = torch.device("cpu")


def take(store: SumStore, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return store.zeros(SHAPES, dtype, CPU)


def test_zeros_of_the_shapes_that_do_not_overlap() -> None:
    sums = take(SumStore())
    assert [tuple(s.shape) for s in sums] == list(SHAPES)
    assert all(s.is_contiguous() for s in sums)
    for i, total in enumerate(sums):
        total.fill_(i + 1)
    assert [s.unique().tolist() for s in sums] == [[1.0], [2.0], [3.0]]


def test_freed_memory_is_used_again_and_zeroed() -> None:
    store = SumStore()
    sums = take(store)
    place = sums[0].data_ptr()
    sums[0].fill_(9)
    del sums
    again = take(store)
    assert again[0].data_ptr() == place
    assert not any(bool(s.any()) for s in again)


def test_held_memory_is_left_alone() -> None:
    store = SumStore()
    sums = take(store)
    kept = sums[0].view(-1)[2:5]  # a view of a view, the sums themselves are gone
    kept.fill_(4)
    del sums
    others = take(store)
    others[0].fill_(1)
    assert kept.tolist() == [4.0] * 3
    del kept, others
    assert not bool(take(store)[0].any())


def test_other_sizes_and_dtypes_have_memory_of_their_own() -> None:
    store = SumStore()
    assert take(store, torch.float64)[0].dtype is torch.float64
    assert take(store)[0].dtype is torch.float32
    assert take(store, torch.float64)[0].dtype is torch.float64


def test_large_sums_keep_their_memory_where_fresh_pages_cost() -> None:
    large = [(KEPT + 1,)]
    store = SumStore()
    place = store.zeros(large, torch.float32, CPU)[0].data_ptr()
    assert store.zeros(large, torch.float32, CPU)[0].data_ptr() == place
    meta = torch.device("meta")
    store.zeros(large, torch.float32, meta)
    assert store.zeros(large, torch.float32, CPU)[0].data_ptr() == place

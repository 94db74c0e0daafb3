"""Compiled looks at tensors agree with torch, and leave what is odd to it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dpkern.engine.provenance import losses
from dpkern.engine.provenance.states import YieldedBatch
from dpkern.engine.provenance.tensor import track
from dpkern.engine.table_entries import read_each
from dpkern.ops import direct

B = 300

any_negative = direct.look("any_negative")
holds_number = direct.look("holds_number")
read = direct.look("read")

pytestmark = pytest.mark.skipif(any_negative is None, reason="no compiled module")


@pytest.mark.parametrize("place", [None, 0, 128, B - 1])
@pytest.mark.parametrize("value", [-1, -100, -(2**63)])
def test_a_negative_class_is_found_wherever_it_stands(place: int | None, value: int) -> None:
    assert any_negative is not None
    targets = torch.randint(2**62, (B,))
    if place is not None:
        targets[place] = value
    tracked = track(targets, YieldedBatch(B).each)
    assert any_negative(targets) is (place is not None)
    assert any_negative(tracked) is (place is not None)
    assert losses._leaves_out_targets(tracked, -100) is (place is not None)


ODD: dict[str, Tensor] = {
    "int32": torch.tensor([1, -1], dtype=torch.int32),
    "bytes": torch.tensor([1, 255], dtype=torch.uint8),
    "probabilities": torch.tensor([0.5, -0.5]),
    "rows of classes": torch.tensor([[1, -1]]),
    "every other one": torch.tensor([1, 2, -1, 3])[::2],
    "one class": torch.tensor(-1),
    "of no device": torch.empty(3, dtype=torch.int64, device="meta"),
    "sparse": torch.tensor([0, -1]).to_sparse(),
}


@pytest.mark.parametrize("name", ODD)
def test_other_tensors_are_left_to_torch(name: str) -> None:
    assert any_negative is not None
    assert any_negative(ODD[name]) is None


def test_what_is_no_tensor_is_left_to_torch_too() -> None:
    assert any_negative is not None
    assert any_negative([1, -1]) is None


def test_no_class_is_negative_where_there_is_none() -> None:
    assert any_negative is not None
    assert any_negative(torch.empty(0, dtype=torch.int64)) is False


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_number_that_a_tensor_holds_is_told_from_others(dtype: torch.dtype) -> None:
    assert holds_number is not None
    tensor = torch.full((), 256.0, dtype=dtype)
    assert holds_number(tensor, 256) is True
    assert holds_number(tensor, 255) is False
    tensor.data.add_(1.0)  # which no version tells
    assert holds_number(tensor, 256) is False
    tensor.fill_(float("nan"))
    assert holds_number(tensor, 256) is False


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(1),
        torch.ones((), dtype=torch.bfloat16),
        torch.ones((), dtype=torch.int64),
        torch.ones((), device="meta"),
        1.0,
    ],
    ids=str,
)
def test_numbers_of_other_tensors_are_left_to_torch(tensor: object) -> None:
    assert holds_number is not None
    assert holds_number(tensor, 1) is None


@pytest.mark.parametrize("attribute", [Tensor._version, Tensor.requires_grad])
def test_attributes_of_many_tensors_are_read_at_once(attribute: object) -> None:
    assert read is not None
    tensors = [torch.zeros(2), nn.Parameter(torch.zeros(2)), torch.zeros(1, requires_grad=True)]
    tensors[0].add_(1)
    before = read(attribute, tensors)
    assert before == read_each(attribute, tensors)
    with torch.no_grad():
        for tensor in tensors:
            tensor.requires_grad_(not tensor.requires_grad).add_(1)
    after = read(attribute, tensors)
    assert after == read_each(attribute, tensors)
    assert all(one != two for one, two in zip(before, after, strict=True))


def test_errors_of_an_attribute_are_passed_on() -> None:
    assert read is not None
    with torch.inference_mode():
        odd = torch.zeros(2)
    with pytest.raises(RuntimeError, match="version"):
        read(Tensor._version, [torch.zeros(1), odd])
    with pytest.raises(TypeError):
        read(Tensor._version, ["no tensor"])
    with pytest.raises(TypeError):
        read(1, [])

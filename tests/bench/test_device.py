"""Arguments on their way to a device: every tensor is moved, nothing is shared, the rest stays."""

from __future__ import annotations

import pytest
import torch

from dpkern.base.dispatch import OPS
from dpkern.bench import device
from dpkern.bench.case import timed_cases
from dpkern.bench.cases import FACTS
from dpkern.bench.measure import BenchSettings, measure
from dpkern.bench.outcome import tensors_in
from dpkern.bench.paired import StopRule
from dpkern.ops import testing

META = torch.device("meta")


@pytest.mark.parametrize("name", sorted(OPS))
def test_every_tensor_of_every_case_is_moved(name: str) -> None:
    for case in timed_cases(OPS[name], FACTS[name], ("tiny",)):
        args = case.arguments()
        for argument, value in args.items():
            moved = device.placed(value, META)
            before = list(tensors_in(value, argument))
            after = list(tensors_in(moved, argument))
            assert [where for where, _ in after] == [where for where, _ in before]
            for (where, tensor), (_, old) in zip(after, before, strict=True):
                assert tensor.device == META, where
                assert (tensor.shape, tensor.dtype) == (old.shape, old.dtype)
                assert not tensor.requires_grad


def test_devices_in_arguments_are_replaced() -> None:
    found = device.arguments({"device": "cpu", "count": 3}, "cpu", {"device"})
    assert found == {"device": torch.device("cpu"), "count": 3}


def test_a_backend_of_devices_is_measured_in_its_emulation() -> None:
    if isinstance(testing.emulation("cuda"), str):
        pytest.skip("no emulation here")
    (case,) = timed_cases(OPS["noise.rounding_bits"], FACTS["noise.rounding_bits"], ("tiny",))
    rule = StopRule(least=2, most=2, seconds=0.0)
    with testing.emulated("cuda"):
        row = measure(case, "cuda", BenchSettings(rule=rule))
    assert row["ms"] > 0, row

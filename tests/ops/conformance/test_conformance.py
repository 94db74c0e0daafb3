"""Every op on every backend against its signature and its reference."""

from __future__ import annotations

import pytest
import torch

from dpkern.base import dispatch
from dpkern.base.dispatch import OPS
from dpkern.bench.cases import FACTS
from dpkern.ops import testing
from tests.ops.backends.every_backend import INTERPRETED, PARAMETERS
from tests.ops.conformance.calls import cases
from tests.ops.conformance.check import POISON, SAMPLE, check_samples, conform

pytestmark = pytest.mark.usefixtures("one_thread")


def _has_kernel(name: str, backend: str) -> bool:
    if dispatch.availability(backend)[0]:
        return backend in OPS[name].kernels
    kernels = testing.emulation(backend)
    return not isinstance(kernels, str) and any(name == kernel[0] for kernel in kernels)


EVERY = [
    pytest.param(
        name, backend.values[0], marks=backend.marks, id=f"{name}-{backend.id or backend.values[0]}"
    )
    for name in sorted(OPS)
    for backend in PARAMETERS
    if _has_kernel(name, backend.values[0])
]


@pytest.mark.parametrize(("name", "backend"), EVERY)
def test_kernels_conform(name: str, backend: str) -> None:
    found = list(cases(OPS[name], FACTS[name]))
    if backend in INTERPRETED:  # half a second for each
        found = found[:: max(1, len(found) // 4)]
    # A backend may refuse a call, but not all of them.
    assert sum(conform(case, backend) for case in found)


@pytest.mark.parametrize(("name", "backend"), [p for p in EVERY if FACTS[p.values[0]].samples])
def test_samples_stay_apart(name: str, backend: str) -> None:
    for case in cases(OPS[name], FACTS[name]):
        whole = case.profile in ("usual", "large")
        several = whole and case.sizes[FACTS[name].samples] > SAMPLE
        interpreted = backend in INTERPRETED
        if interpreted and (case.name != "0 usual" or case.kind is torch.float64):
            continue
        if several and case.example.get("noise") is None:
            check_samples(case, backend, POISON[:1] if interpreted else POISON)


@pytest.mark.parametrize("name", sorted(OPS))
def test_both_ways_of_binding_agree(name: str) -> None:
    for case in cases(OPS[name], FACTS[name]):
        args = case.arguments()
        schema = OPS[name].schema
        fast, slow = schema.bind(**args), schema.check(*args.values())
        assert len(fast.args) == len(slow.args)
        assert fast.sizes == slow.sizes, case
        assert (fast.kind, fast.device) == (slow.kind, slow.device), case

"""Mechanisms compared at one layer: what a convolution's step takes is what the engine calls."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from dpkern import PrivacyEngine, survey
from dpkern.base import dispatch
from dpkern.base.counts import Counts
from dpkern.base.errors import InvalidInput
from dpkern.cost import _step_operands, compare
from dpkern.cost.forms import FORMS
from dpkern.cost.step_systems import systems
from dpkern.privacy.mechanisms import Mechanism

SIZES = [(14, 7), (9, 3)]
AT_CONVOLUTIONS = (
    *("dpsgd", "dpsgd-per-layer", "dpsgd-automatic", "gredp", "gredp-published"),
    *("spectral_dp", "spectral_dp-published"),
)
TRANSFORMING = {f"spectral.{op}" for op in ("conv_norm", "conv_bins", "filtered", "whitened_bins")}


def engine_calls(mechanism: Mechanism, n: int, code: int) -> list[tuple[str, Counts]]:
    """Ops and their closed forms that clip one sample of a convolution, as the engine trains it."""
    torch.manual_seed(0)
    model = torch.nn.Conv2d(code, code, 3, padding=1, bias=False)
    inputs = torch.randn(1, code, n, n)
    if getattr(mechanism, "sites", None) is not None:
        mechanism = replace(mechanism, sites=survey(model, inputs))  # type: ignore[call-arg]
    data = TensorDataset(inputs, torch.zeros(1))
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=1),
        mechanism=mechanism,
        keep_budget=1 << 30,
    )
    calls: list[tuple[str, Counts]] = []

    def noting(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = {name: value for name, value in kwargs.items() if name != "backend"}
        if op.name.startswith(("ghost", "spectral", "clip")):
            calls.append((op.name, FORMS[op.name](*args, **given).counts))
        with dispatch.intercepted(None):
            return op(*args, **kwargs)

    x, _ = next(iter(loader))
    with dispatch.intercepted(noting):
        (1e4 * model(x).square().sum()).backward()
        optimizer.step()
    return calls


def form_calls(
    mechanism: Mechanism, name: str, n: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[str, Counts]]:
    """The same of the closed form, for the kernel alone."""
    called: list[tuple[str, Counts]] = []

    def noting(op: str, phase: str, *args: Any, **kwargs: Any) -> Any:
        called.append((op, FORMS[op](*args, **kwargs).counts))
        return []

    monkeypatch.setattr(_step_operands, "call", noting)
    site = systems()[name].sites(n, code, "conv")[0]
    if getattr(mechanism, "sites", None) is not None:
        mechanism = replace(mechanism, sites=(site,))  # type: ignore[call-arg]
    plan = mechanism.plan([site.shape])
    _step_operands.summing(plan, [1], 1, torch.float32, (site,))
    return called


@pytest.mark.parametrize(("n", "code"), SIZES)
@pytest.mark.parametrize("name", AT_CONVOLUTIONS)
def test_the_engine_calls_what_is_counted(
    name: str, n: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mechanism = systems()[name].make(n, code, "conv")
    found = engine_calls(mechanism, n, code)
    wanted = form_calls(mechanism, name, n, code, monkeypatch)
    assert Counter(found) == Counter(wanted)
    names = {op for op, _ in wanted}
    assert bool(names & TRANSFORMING) == (name in _TRANSFORMS)


_TRANSFORMS = ("gredp-published", "spectral_dp", "spectral_dp-published")


def test_the_transform_is_counted_at_equal_layers() -> None:
    """GReDP's norm needs transforms that DP-SGD has not; before, the two had other layers."""
    report = compare.report(["gredp-published", "dpsgd"], sizes=[(14, 7)], processors=["k7"])
    assert report.facts["layer"] == "conv"
    counts = {fact["mechanism"]: fact["counts"] for fact in report.facts["costs"]}
    (fact,) = report.facts["reductions"]
    assert fact["reduction_percent"] == pytest.approx(-9.7, abs=0.01)
    assert counts["gredp-published"]["RNG"] == counts["dpsgd"]["RNG"]  # as many parameters
    lines = systems()["gredp-published"](14, 7, layer="conv").items
    transforms = [item for item in lines if item.name.endswith("transforms")]
    assert [item.kind for item in transforms] == ["modelled"]
    assert transforms[0].counts["MUL"] > 0
    same = compare.report(["gredp", "dpsgd"], sizes=[(14, 7)])
    assert same.facts["reductions"][0]["reduction_percent"] == 0  # corrected GReDP is DP-SGD


@pytest.mark.parametrize("machine", ["k7", "zen4", "zen4:avx2", "icelake", "h100"])
def test_gredp_costs_what_dpsgd_costs_at_equal_layers(machine: str) -> None:
    """In corrected mode they tie at every batch; as published its transforms are dearer."""
    names = ["gredp", "gredp-published", "dpsgd"]
    for layer in ("conv", "circulant"):
        given: dict[str, Any] = {"sizes": [(14, 7)], "layer": layer, "processors": [machine]}
        facts = compare.report(names, batches=[1, 64], **given).facts
        found: dict[str, list[float]] = {}
        for fact in facts["reductions"]:
            found.setdefault(fact["mechanism"], []).append(fact["reduction_percent"])
        assert found["gredp"] == [0.0, 0.0]
        assert all(less < -2 for less in found["gredp-published"])


def test_maps_without_memory_for_their_bins_are_refused() -> None:
    for names in (["gredp", "dpsgd"], ["spectral_dp", "dpsgd"]):
        with pytest.raises(InvalidInput, match=r"n: expected <= 512 at a convolution.*got 2000000"):
            compare.report(names, sizes=[(2_000_000, 7)])


def test_circulant_layers_are_compared_with_each_other_alone() -> None:
    report = compare.report(["gredp", "dpsgd"], sizes=[(14, 7)], layer="circulant")
    assert report.facts["reductions"][0]["reduction_percent"] == 0
    shapes = [[s.shape for s in systems()[m].sites(14, 7, "circulant")] for m in ("gredp", "dpsgd")]
    assert shapes[0] == shapes[1] == [(1, 2, 7), (7,), (14,)]


@pytest.mark.parametrize(
    ("names", "given", "text"),
    [
        (["gredp", "dpsgd"], {"layer": "dense"}, "no parameter is in the frequency domain"),
        (["gredp", "adaclip"], {}, "layer: expected dense with AdaClip"),
        (["laplace_sgd", "dpsgd"], {"layer": "conv"}, "layer: expected dense with Laplace SGD"),
        (["randomized_response", "dpsgd"], {"layer": "conv"}, "mechanisms: expected equal work"),
        (["spof", "dpsgd-da"], {"layer": "conv"}, "layer: expected none with the steps"),
        (["dpsgd", "adaclip"], {"layer": "round"}, "layer: expected one of 'dense'"),
    ],
)
def test_layers_that_a_mechanism_does_not_have_are_refused(
    names: list[str], given: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidInput, match=text):
        compare.report(names, **given)

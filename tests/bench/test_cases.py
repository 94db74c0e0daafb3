"""Every op has cases, and a wrong kernel of any op gets no number."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

from dpkern.base import dispatch
from dpkern.base.dispatch import OPS
from dpkern.base.errors import BackendError
from dpkern.bench import suite
from dpkern.bench.case import SIZES, timed_cases
from dpkern.bench.cases import FACTS
from dpkern.bench.formulations import FORMULATIONS, WITHOUT, formulations_of
from dpkern.bench.measure import (
    BenchSettings,
    checked_formulations,
    identity,
    measure,
    screened,
    verify,
)
from dpkern.bench.outcome import changed, tensors_in
from dpkern.bench.paired import StopRule

ONE_LOOK = BenchSettings(rule=StopRule(least=2, most=2, seconds=0.0))
"""Settings that sample twice: what is measured is not looked at."""
PAIRED = "cupy"
"""A backend that is not here, whose kernels a test may choose."""


def _tiny(name: str) -> Any:
    return timed_cases(OPS[name], FACTS[name], ("tiny",))[0]


def test_every_op_has_a_tiny_a_typical_and_a_large_case() -> None:
    assert FACTS.keys() == OPS.keys()
    for name in OPS:
        found = {case.name.split(",")[0] for case in timed_cases(OPS[name], FACTS[name])}
        assert found == set(SIZES), name


@pytest.mark.parametrize("name", sorted(OPS))
def test_every_tiny_case_is_right_on_every_backend_that_is_here(name: str) -> None:
    for backend in suite.backends_of(OPS[name], suite.BenchPlan()):
        taken = 0
        for case in timed_cases(OPS[name], FACTS[name], ("tiny",)):
            with suppress(BackendError):  # of some cases, never of all
                verify(case, backend)
                taken += 1
        assert taken, f"{backend} takes no case of {name}"


def test_a_case_that_no_kernel_takes_is_measured_by_its_reference() -> None:
    refusing = ("ghost.clip_factors", lambda *_: None, lambda *_, **__: "takes no such call")
    plan = suite.BenchPlan(ops=("ghost.clip_factors",), sizes=("tiny",), seconds=0.01, quick=True)
    with dispatch.replaced("cpu", [refusing]), dispatch.replaced("numba", [refusing]):
        found = {row["backend"]: row for row in suite.rows(plan)}
    assert found["reference"]["ms"] > 0
    assert all("refused" in row for name, row in found.items() if name != "reference")


def _changing(name: str) -> Callable[..., Any]:
    """The reference, with one number changed, by a tenth of the largest beside it and 1."""
    reference = OPS[name].reference
    written = changed(_tiny(name))

    def kernel(*args: Any, **kwargs: Any) -> Any:
        result = reference(*args, **kwargs)
        given = OPS[name].schema.call.bind(*args, **kwargs)
        places = {"result": result, **{n: given.arguments.get(n) for n in written}}
        tensors = [t for n, tree in places.items() for _, t in tensors_in(tree, n) if t.numel()]
        target = max(tensors, key=torch.Tensor.numel).detach()
        flat = target.view(-1) if target.is_contiguous() else target.t().reshape(-1)
        last = flat[-1:]
        wrong = last + flat.abs().max() // 10 + 1
        last.copy_(1 - last if flat.dtype is torch.uint8 else wrong)
        return result

    return kernel


@pytest.mark.parametrize("name", ["clip.clip_sum", "ghost.linear_norm", "update.step"])
def test_a_kernel_that_is_right_once_gets_no_number(name: str) -> None:
    calls = iter([OPS[name].reference])

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return next(calls, _changing(name))(*args, **kwargs)

    with dispatch.replaced(PAIRED, [(name, kernel, None)]):
        assert "wrong" in measure(_tiny(name), PAIRED, ONE_LOOK)


@pytest.mark.parametrize("name", sorted(OPS))
def test_a_wrong_kernel_gets_no_number(name: str) -> None:
    with dispatch.replaced(PAIRED, [(name, _changing(name), None)]):
        row = measure(_tiny(name), PAIRED, ONE_LOOK)
    assert "ms" not in row
    assert "wrong" in row
    with dispatch.replaced(PAIRED, [(name, OPS[name].reference, None)]):
        row = measure(_tiny(name), PAIRED, ONE_LOOK)
    assert row["ms"] > 0, row


@pytest.mark.parametrize("name", sorted(n for n in OPS if FACTS[n].from_above))
def test_a_norm_that_is_a_millionth_too_small_gets_no_number(name: str) -> None:
    (place,) = FACTS[name].from_above

    def kernel(*args: Any, **kwargs: Any) -> Any:
        result = OPS[name].reference(*args, **kwargs)
        named = dict(tensors_in(result, "result"))
        named[place].sub_(1e-6 * named[place].abs())
        return result

    with dispatch.replaced(PAIRED, [(name, kernel, None)]):
        row = measure(_tiny(name), PAIRED, ONE_LOOK)
    assert "below the true value" in row["wrong"]


@pytest.mark.parametrize("name", ["ghost.embedding_norm", "ghost.tied_cross", "update.project"])
def test_an_error_beside_small_numbers_gets_no_number(name: str) -> None:
    """Errors are compared with the largest number of a result, however small that is."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        result = OPS[name].reference(*args, **kwargs)
        given = OPS[name].schema.call.bind(*args, **kwargs).arguments
        places = {"result": result, **{n: given.get(n) for n in changed(_tiny(name))}}
        for _, tensor in tensors_in(places, ""):
            flat = tensor.detach().view(-1)
            flat[flat.abs().argmax()] *= 1 + 1e-3
        return result

    with dispatch.replaced(PAIRED, [(name, kernel, None)]):
        row = measure(_tiny(name), PAIRED, ONE_LOOK)
    assert "differs by" in row["wrong"]


def test_ids_are_of_all_rows_of_a_table_that_no_operand_shows() -> None:
    (case,) = timed_cases(OPS["ghost.embedding_norm"], FACTS["ghost.embedding_norm"], ("large",))
    ids = case.arguments()["ids"]
    assert len(ids.unique()) > 10_000
    assert identity(case, "cpu", ONE_LOOK)["sizes"]["V"] == 30_000


def test_optimizers_of_torch_go_on_from_the_state_of_the_op() -> None:
    op, facts = OPS["update.step"], FACTS["update.step"]
    (case,) = (c for c in timed_cases(op, facts) if c.name == "large, adam, without noise")
    with torch.no_grad():
        found, left = checked_formulations(case, "reference", compiled=False)
    assert not left
    assert "fused optimizer" in found


@pytest.mark.parametrize("name", ["ghost.linear_integer_sum", "recurrent.lstm_backward"])
def test_parts_that_are_compiled_do_the_work_of_their_op(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda part, **_: parts.append(part) or part)
    (formulation,) = (one for one in FORMULATIONS[name] if one.in_parts is not None)
    cases = timed_cases(OPS[name], FACTS[name], ("tiny", "typical"))
    (*_, case) = (case for case in cases if formulation.fits(case.arguments()))
    with torch.no_grad():
        found, left = checked_formulations(case, "reference", compiled=None)
    assert not left
    assert f"{formulation.name}, compiled" in found
    assert parts


@pytest.mark.parametrize("name", sorted(OPS))
def test_a_kernel_that_writes_into_its_inputs_gets_no_number(name: str) -> None:
    def inputs(given: dict[str, Any]) -> list[torch.Tensor]:
        kept = (t for n, tree in given.items() for _, t in tensors_in(tree, n))
        return [t for t in kept if t.is_floating_point() and t.numel()]

    written = changed(_tiny(name))

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = OPS[name].schema.call.bind(*args, **kwargs).arguments
        result = OPS[name].reference(*args, **kwargs)
        for tensor in inputs({n: v for n, v in given.items() if n not in written})[:1]:
            tensor.detach().mul_(1 + 1e-3)
        return result

    if not inputs({n: v for n, v in _tiny(name).arguments().items() if n not in written}):
        pytest.skip("it only reads what it writes, or numbers")
    with dispatch.replaced(PAIRED, [(name, kernel, None)]):
        row = measure(_tiny(name), PAIRED, ONE_LOOK)
    assert "not declared as written" in row["wrong"]


@pytest.mark.parametrize("name", sorted(FORMULATIONS))
def test_formulations_do_the_work_of_their_op(name: str) -> None:
    with torch.no_grad():
        for case in timed_cases(OPS[name], FACTS[name], ("tiny", "typical")):
            found, left = checked_formulations(case, "reference", compiled=False)
            assert not left, left
            assert found, case


def test_hopeless_formulations_are_looked_at_once() -> None:
    ways = {"fast": lambda: time.sleep(0.002), "slow": lambda: time.sleep(0.2)}
    found, slow = screened(ways, torch.device("cpu"))
    assert found.keys() == {"fast"}
    assert slow.keys() == {"slow"}
    assert screened({}, torch.device("cpu")) == ({}, {})


def test_every_op_has_formulations_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {*FORMULATIONS, *WITHOUT} == OPS.keys()
    assert not FORMULATIONS.keys() & WITHOUT.keys()
    monkeypatch.delitem(FORMULATIONS, "ghost.linear_sum_error")
    monkeypatch.setitem(WITHOUT, "ghost.linear_sum_error", "a reason")
    row = measure(_tiny("ghost.linear_sum_error"), "cpu", ONE_LOOK)
    assert row["no torch"] == "a reason"
    assert row["torch"] is None


@pytest.mark.parametrize("name", sorted(FORMULATIONS))
def test_every_case_has_two_formulations_of_different_names(name: str) -> None:
    for case in timed_cases(OPS[name], FACTS[name], ("tiny", "typical")):
        names = [one.name for one in formulations_of(case)]
        assert len(names) >= 2, case
        assert len(set(names)) == len(names), names


def test_formulations_that_gain_by_it_are_compiled_in_all_but_quick_runs() -> None:
    (case,) = timed_cases(
        OPS["ghost.layer_norm_backward"], FACTS["ghost.layer_norm_backward"], ("tiny",)
    )
    plain, some, every = (
        {one.name for one in formulations_of(case, compiled)} for compiled in (False, None, True)
    )
    assert some - plain == {"formula, compiled"}
    assert every - plain == {f"{name}, compiled" for name in plain}
    for quick, compiled in ((True, False), (False, None)):
        plan = suite.BenchPlan(ops=("ghost.layer_norm_backward",), quick=quick)
        assert {settings.compiled for *_, settings in suite.selected(plan)} == {compiled}


def test_large_whitened_gradients_are_as_large_as_their_case_says() -> None:
    large = timed_cases(OPS["spectral.whitened_norm"], FACTS["spectral.whitened_norm"], ("large",))
    assert large[0].arguments()["grads"].shape == (64, 64, 64, 9)


def test_ops_that_a_selection_names_and_does_not_measure_are_listed() -> None:
    plan = suite.BenchPlan(ops=("ghost", "update.advance"), shape={"V": 8}, backends=("cpu",))
    left = suite.dropped(plan)
    measured = {case.op.name for case, _, _ in suite.selected(plan)}
    assert left["update.advance"] == "no such size"
    assert measured | left.keys() == {op.name for op in suite.ops_of(plan)}
    assert not measured & left.keys()
    assert "ghost.embedding_sum" in measured


def test_a_formulation_that_does_other_work_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    gram, *others = FORMULATIONS["ghost.linear_norm"]

    def half(args: dict[str, Any]) -> Callable[[], Any]:
        call = gram.prepare(args)
        return lambda: 0.9 * call()

    wrong = gram.__class__("nine tenths", half)
    monkeypatch.setitem(FORMULATIONS, "ghost.linear_norm", (wrong, *others))
    row = measure(_tiny("ghost.linear_norm"), "cpu", ONE_LOOK)
    assert "differs by" in row["left out"]["nine tenths"]
    assert "nine tenths" not in row["formulations ms"]


def test_a_backend_that_refuses_says_so_instead_of_a_number() -> None:
    refusing = ("ghost.linear_norm", lambda *_: None, lambda *_, **__: "takes no such call")
    with dispatch.replaced(PAIRED, [refusing]):
        row = measure(_tiny("ghost.linear_norm"), PAIRED, ONE_LOOK)
    assert row["refused"] == "it takes no such call"
    assert "ms" not in row


def test_cold_caches_are_named_and_slower() -> None:
    case = timed_cases(OPS["ghost.explicit_norm"], FACTS["ghost.explicit_norm"], ("typical",))[0]
    rule = StopRule(least=9, most=9, seconds=0.0)
    warm, cold = (
        measure(case, "cpu", BenchSettings(rule=rule, cache=cache)) for cache in ("warm", "cold")
    )
    assert (warm["cache"], cold["cache"]) == ("warm", "cold")
    assert min(cold["samples ms"]["dpkern"]) > min(warm["samples ms"]["dpkern"])

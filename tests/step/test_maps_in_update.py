"""Steps whose mapped sums are mapped and noised inside the update, against those before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from dpkern import DPStep
from dpkern.base import dispatch
from dpkern.base.errors import PrivacyError
from dpkern.ops import clip, testing, update
from dpkern.privacy.mechanisms import WhitenedCrop
from tests.engine.released_cases import CONV, SHAPES, Made, crop, gradients, make

RULE = update.SGD(lr=0.5, momentum=0.9)
RELEASES = (crop(3), None, None)
MAPPED = Made(releases=RELEASES)
STEPS = 3
CELL = MAPPED.noise_multiplier / 64 / 8
"""One cell of the noise in a mean: where a last bit moves a draw, one coordinate moves as far."""

Add = Callable[[DPStep, int], None]


def summed(mechanism: Made, seed: int) -> clip.ClipResult:
    """What the engine sums: gradients, clipped by the norm of their coordinates."""
    grads = gradients(6, seed)
    pairs = zip(grads, mechanism.releases, strict=True)
    coords = [g if r is None else r.forward(g).float() for g, r in pairs]
    norms = torch.cat([c.flatten(1) for c in coords], 1).double().norm(dim=1)
    factors = (clip.SLACK / norms).clamp(max=1).float()
    sums = tuple(torch.tensordot(factors, g, 1) for g in grads)
    result = clip.clip_sum(grads, 1.0)
    return replace(result, sums=sums, norms=norms, clipped_as=mechanism.releases)


def once(step: DPStep, seed: int) -> None:
    step.add(sum=summed(step.mechanism, seed))  # type: ignore[arg-type]


def twice(step: DPStep, seed: int) -> None:
    once(step, seed)
    once(step, seed + 50)


def coordinates_first(step: DPStep, seed: int) -> None:
    step.add(gradients(4, seed))
    once(step, seed + 50)


def coordinates_last(step: DPStep, seed: int) -> None:
    once(step, seed)
    step.add(gradients(4, seed + 50))


def adopted(step: DPStep, seed: int) -> None:
    given = summed(step.mechanism, seed)  # type: ignore[arg-type]
    step.adopt(given.sums, samples=6, nonfinite=0, clipped_as=given.clipped_as)


ADDED = {
    "one sum": once,
    "two sums": twice,
    "coordinates first": coordinates_first,
    "coordinates last": coordinates_last,
}


def called(run: Callable[[], Any]) -> list[str]:
    """Return the names of the ops that ran."""
    names: list[str] = []

    def record(op: Any, args: Any, kwargs: Any) -> Any:
        names.append(op.name)
        with dispatch.intercepted(None):
            return op(*args, **kwargs)

    with dispatch.intercepted(record):
        run()
    return names


def trained(add: Add, mechanism: Made = MAPPED, **more: Any) -> tuple[DPStep, list[str]]:
    step = make(mechanism, optimizer=RULE, **more)
    for k in range(STEPS):
        add(step, k)
        names = called(step.finish)
    return step, names


@pytest.mark.parametrize("name", ADDED)
@pytest.mark.parametrize("gain", [1.0, 0.25])
def test_parameters_are_those_of_maps_before_the_update(
    name: str, gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    mechanism = Made(releases=(crop(3, gain=gain), None, None))
    inside, names = trained(ADDED[name], mechanism)
    assert "noise.add_noise" not in names
    monkeypatch.setattr(DPStep, "maps_in_update", False)
    before, names = trained(ADDED[name], mechanism)
    assert "noise.add_noise" in names
    for mine, theirs in zip(inside.params, before.params, strict=True):
        # Three steps with momentum; rounding may move few coordinates by a cell.
        assert (mine - theirs).abs().max() < 8 * CELL / gain
        assert ((mine - theirs).abs() > 1e-5).float().mean() < 0.02
    assert inside.words == before.words
    assert inside.ledger.epsilon(1e-5) == before.ledger.epsilon(1e-5)


@pytest.mark.parametrize("gain", [1.0, 0.25])
def test_integers_are_led_back_inside_the_update(
    gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def added(step: DPStep, seed: int) -> None:
        step.add(gradients(4, seed))
        step.add(gradients(3, seed + 50))

    mechanism = Made(releases=(crop(3, gain=gain), None, None), arithmetic="exact")
    inside, names = trained(added, mechanism)
    assert "noise.add_noise" not in names
    monkeypatch.setattr(DPStep, "maps_in_update", False)
    before, names = trained(added, mechanism)
    assert "noise.add_noise" in names
    for mine, theirs in zip(inside.params, before.params, strict=True):
        # The same released integers: no rounding moves a cell.
        testing.assert_close("led back", mine, theirs, 1e-6)
    assert inside.words == before.words
    assert inside.certify(1e-5) == before.certify(1e-5)


@pytest.mark.parametrize("arithmetic", ["float", "exact"])
def test_cuda_maps_inside_the_update_as_well(arithmetic: str) -> None:
    reason = testing.emulation("cuda")
    if isinstance(reason, str):
        pytest.skip(f"cuda {reason}")
    mechanism = replace(MAPPED, arithmetic=arithmetic)
    add = once if arithmetic == "float" else lambda step, seed: step.add(gradients(6, seed))
    wanted, _ = trained(add, mechanism)
    with testing.emulated("cuda"):
        got, names = trained(add, mechanism, backend="cuda")
        assert got.maps_in_update
    assert "noise.add_noise" not in names
    for mine, theirs in zip(got.params, wanted.params, strict=True):
        assert torch.equal(mine, theirs)


def test_other_noise_is_another_result(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, _ = trained(once)
    monkeypatch.setattr(DPStep, "maps_in_update", False)
    other, _ = trained(once, seed=8)
    moved = (inside.params[0] - other.params[0]).abs()
    assert (moved > 1e-5).float().mean() > 0.9


def test_gradients_for_the_caller_are_mapped_before() -> None:
    step, same = make(MAPPED), make(MAPPED)
    once(step, 0)
    once(same, 0)
    given = step.finish() or []
    state = RULE.init(same.params)
    rest = same.finish([([1, 2], RULE, update.State(0, _of(state, (1, 2))))]) or []
    assert given[0] is not None
    assert rest[0] is not None
    assert torch.equal(given[0], rest[0])
    assert rest[1:] == [None, None]


def _of(state: update.State, chosen: tuple[int, ...]) -> dict[str, list[torch.Tensor]]:
    return {name: [held[i] for i in chosen] for name, held in state.buffers.items()}


def test_adopted_sums_are_mapped_too() -> None:
    taken, given = trained(adopted)[0], trained(once)[0]
    for mine, theirs in zip(taken.params, given.params, strict=True):
        assert torch.equal(mine, theirs)


def test_adopted_sums_must_have_been_clipped_by_the_plans_norms() -> None:
    step = make(MAPPED, optimizer=RULE)
    sums = summed(MAPPED, 0).sums
    for other in (None, (crop(3, seed=5), None, None)):
        with pytest.raises(PrivacyError, match="clipped by the norm"):
            step.adopt(sums, samples=6, nonfinite=0, clipped_as=other)
    assert not step.unfinished


@pytest.mark.parametrize(
    ("mechanism", "more"),
    [
        (replace(MAPPED, noise_multiplier=0.0), {}),
        (replace(MAPPED, silent=(0,)), {}),
        (Made(releases=(WhitenedCrop(site=CONV, gain=0.5), None, None)), {}),
        (MAPPED, {"backend": "numba"}),
    ],
    ids=["no noise", "a silent block", "no matrix", "another backend"],
)
def test_what_is_mapped_before_the_update(mechanism: Made, more: dict[str, Any]) -> None:
    assert make(MAPPED).maps_in_update
    assert not make(MAPPED).obstacle
    step = make(mechanism, **more)
    assert not step.maps_in_update
    assert "mapped elsewhere" in step.obstacle


def test_an_audit_sees_the_coordinates() -> None:
    seen: list[tuple[int, ...]] = []

    class Watcher:
        def added(self, result: clip.ClipResult) -> None:
            pass

        def summed(self, sums: list[torch.Tensor]) -> None:
            seen.extend(tuple(total.shape) for total in sums)

    step = make(MAPPED, optimizer=RULE)
    step.watch(Watcher())  # type: ignore[arg-type]
    once(step, 0)
    step.finish()
    assert seen == [(20, 10, 3), *SHAPES[1:]]


def test_an_empty_step_is_noise_alone() -> None:
    step = make(MAPPED, optimizer=RULE)
    before = [p.clone() for p in step.params]
    step.finish()
    moved = (step.params[0] - before[0]).flatten(2)
    post = RELEASES[0].post
    assert post is not None
    assert moved.abs().max() > 0
    # Noise of rank 3: the fourth direction of the taps holds nothing.
    away = torch.eye(4).double() - torch.tensor(post @ RELEASES[0].signal)
    testing.assert_close("left", moved.double() @ away.T, torch.zeros_like(moved), 1e-5)

"""Noise that a step count in memory selects, or that was prefetched: the same bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import dpkern
from dpkern import BackendError, InvalidInput, PrivacyError
from dpkern.base.rng import Purpose
from dpkern.ops import _lattice, _step_counter, noise, testing, update
from dpkern.ops._count import count
from dpkern.ops.backends._start import Device
from tests.ops.backends.every_backend import every_backend

SIZES = (700, 3, 0)
POSITIONS = (0, 1024, 1536)
RULES = {
    "sgd": update.SGD(lr=0.1),
    "momentum": update.SGD(lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.01),
    "adam": update.Adam(lr=0.01),
    "adamw": update.AdamW(lr=0.01, betas=(0.8, 0.99)),
}
STEPS = 3


def noise_at(step: int, *, floats: bool) -> update.Noise:
    return update.Noise(
        distribution="gaussian",
        scales=(0.5,) * len(SIZES),
        stream=testing.KEY.stream(Purpose.NOISE, step),
        positions=POSITIONS,
        rounding=testing.KEY.stream(Purpose.ROUNDING, step) if floats else None,
    )


def sums_of(step: int, *, floats: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    sums = [torch.randn(n, generator=generator) for n in SIZES]
    return sums if floats else [(1000 * total).to(torch.int32) for total in sums]


def trained(rule: update.Rule, given: Any, *, floats: bool, backend: str) -> list[torch.Tensor]:
    """Parameters after a few steps with the noise ``given(step)``."""
    params = [torch.ones(n) for n in SIZES]
    state = rule.init(params)
    for step in range(STEPS):
        step_noise = given(step)
        sums = sums_of(step, floats=floats)
        update.step(params, sums, rule=rule, state=state, noise=step_noise, backend=backend)
        if step_noise.step_counter is not None:
            update.advance(step_noise.step_counter, rule=rule)
    return params


def refused(backend: str, error: BackendError, word: str) -> None:
    """A backend may leave this to others, if it says so."""
    if word not in str(error.got) or backend in ("cpu", "reference"):
        raise error
    pytest.skip(f"{backend} {error.got}")


@every_backend
@pytest.mark.parametrize("floats", [False, True], ids=["integers", "floats"])
@pytest.mark.parametrize("rule", RULES)
def test_a_step_counter_selects_the_steps_noise(rule: str, floats: bool, backend: str) -> None:
    chosen = RULES[rule]
    step_counter = update.step_counter(chosen, 0, "cpu")
    base = replace(noise_at(5, floats=floats), step_counter=step_counter)
    try:
        got = trained(chosen, lambda _: base, floats=floats, backend=backend)
    except BackendError as error:
        refused(backend, error, "step counter")
    wanted = trained(
        chosen, lambda step: noise_at(5 + step, floats=floats), floats=floats, backend=backend
    )
    for mine, theirs in zip(got, wanted, strict=True):
        if "adam" in rule:  # the powers are products here and powers there
            torch.testing.assert_close(mine, theirs, rtol=4 * 2**-23, atol=4 * 2**-23)
        else:
            assert torch.equal(mine, theirs)
    assert _step_counter.read(step_counter)[0] == STEPS


@every_backend
@pytest.mark.parametrize("ahead", [False, True], ids=["rounding-from-stream", "rounding-ahead"])
@pytest.mark.parametrize("floats", [False, True], ids=["integers", "floats"])
def test_draws_made_ahead_are_the_streams_own(floats: bool, ahead: bool, backend: str) -> None:
    rule, first, total = RULES["momentum"], 0, POSITIONS[1] + SIZES[1]

    def made(step: int) -> update.Noise:
        own = noise_at(step, floats=floats)
        bits = None
        if floats and ahead:
            assert own.rounding is not None
            bits = _lattice.rounding_bits(own.rounding, first, total).to(torch.int16)
        values = noise.lattice_draws(own.stream, position=first, count=total)
        other = testing.KEY.stream(Purpose.SAMPLING, step)  # nothing may come from here
        return replace(own, stream=other, draws=update.Draws(first, values, bits))

    if floats and not ahead:
        own_streams = made

        def made(step: int) -> update.Noise:
            return replace(own_streams(step), rounding=noise_at(step, floats=True).rounding)

    got = trained(rule, made, floats=floats, backend=backend)
    wanted = trained(
        rule, lambda step: noise_at(step, floats=floats), floats=floats, backend=backend
    )
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@every_backend
@pytest.mark.parametrize(("position", "count"), [(0, 512), (511, 2), (2**33 - 5, 1100), (7, 0)])
def test_rounding_bits_are_the_references(position: int, count: int, backend: str) -> None:
    stream = testing.KEY.stream(Purpose.ROUNDING, 3)
    got = noise.rounding_bits(stream, position=position, count=count, backend=backend)
    assert got.dtype is torch.int16
    assert torch.equal(
        got.to(torch.int32) & 0xFFFF, _lattice.rounding_bits(stream, position, count)
    )


def test_draws_for_a_device_are_that_devices_to_make(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    recording = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recording[0])
    stream = testing.KEY.stream(Purpose.NOISE, 3)
    calls: list[Any] = [
        lambda device: noise.keystream.validate(stream, first_block=0, blocks=1, device=device),
        lambda device: noise.lattice_draws.validate(stream, position=0, count=1, device=device),
        lambda device: noise.rounding_bits.validate(stream, position=0, count=1, device=device),
    ]
    for call in calls:
        recording[0] = False
        assert call("cpu") == "cpu"
        assert call(torch.device("cuda", 1)) == call("cuda") == "cuda"
        with pytest.raises(InvalidInput, match="device"):
            call("cuda:2")
        recording[0] = True
        with pytest.raises(PrivacyError, match="every replay"):
            call("cuda")


def test_draws_are_made_where_the_kernels_run() -> None:
    starter: Any = None
    on_devices = Device(starter, "cuda", "cuda", lambda *_: None)
    assert on_devices.place("cuda:1") == torch.device("cuda", 1)
    assert on_devices.place("cpu") == torch.device("cuda")


def test_an_automatic_choice_finds_who_can_take_draws() -> None:
    rule = RULES["sgd"]
    own = noise_at(1, floats=False)
    values = noise.lattice_draws(own.stream, position=0, count=2048)
    params = [[torch.ones(n) for n in SIZES] for _ in range(2)]
    for held, given in zip(params, (own, replace(own, draws=update.Draws(0, values))), strict=True):
        sums = sums_of(1, floats=False)
        update.step(held, sums, rule=rule, state=rule.init(held), noise=given)
    assert all(torch.equal(a, b) for a, b in zip(*params, strict=True))


def test_advance_multiplies_the_powers() -> None:
    rule = RULES["adamw"]
    step_counter = update.step_counter(rule, 6, "cpu")
    assert _step_counter.read(step_counter) == (6, (0.8**7, 0.99**7), rule.lr, rule.shrink, 0)
    assert update.advance(step_counter, rule=rule) is step_counter
    powers = 0.8**7 * 0.8, 0.99**7 * 0.99
    assert _step_counter.read(step_counter) == (7, powers, rule.lr, rule.shrink, 0)


@every_backend
@pytest.mark.parametrize("rule", RULES)
def test_an_update_that_is_not_due_changes_nothing(rule: str, backend: str) -> None:
    """A counter names one step; behind it, and in front of it, the same call does nothing."""
    made, params = RULES[rule], [torch.ones(n) for n in SIZES]
    state, own = made.init(params), noise_at(5, floats=True)
    other = replace(made, lr=0.03)  # the counter's learning rate is the one in use
    for due, runs in ((_step_counter.NONE, False), (1, False), (2, True), (3, False)):
        words = bytearray(_step_counter.packed(other, 1, made.powers(2), due))
        counter = torch.frombuffer(words, dtype=torch.int64)
        before = [t.clone() for t in (*params, *(b for g in state.buffers.values() for b in g))]
        given = {"state": state, "backend": backend}
        try:
            update.step(
                params,
                sums_of(1, floats=True),
                rule=made,
                noise=replace(own, step_counter=counter),
                **given,
            )
        except BackendError as error:
            refused(backend, error, "step counter")
        now = [*params, *(b for g in state.buffers.values() for b in g)]
        assert all(map(torch.equal, before, now)) is not runs
        if runs:
            wanted, held = [torch.ones(n) for n in SIZES], made.init(params)
            held.steps = 1
            at = noise_at(6, floats=True)
            update.step(wanted, sums_of(1, floats=True), rule=other, state=held, noise=at)
            assert all(map(torch.equal, wanted, params))


DRAWS = update.Draws(0, torch.zeros(2048, dtype=torch.int32))
WRONG: dict[str, dict[str, Any]] = {
    "step_counter-of-floats": {"step_counter": torch.zeros(6)},
    "step_counter-too-short": {"step_counter": torch.zeros(1, dtype=torch.int64)},
    "draws-and-step_counter": {"step_counter": torch.zeros(6, dtype=torch.int64), "draws": DRAWS},
    "draws-end-early": {"draws": replace(DRAWS, values=DRAWS.values[:1000])},
    "draws-begin-late": {"draws": replace(DRAWS, first=1)},
    "draws-too-wide": {"draws": replace(DRAWS, values=DRAWS.values.long())},
    "few-rounding-bits": {"draws": replace(DRAWS, rounding=torch.zeros(3, dtype=torch.int16))},
}


@pytest.mark.parametrize("fields", WRONG.values(), ids=WRONG)
def test_noise_that_does_not_fit_is_refused(fields: dict[str, Any]) -> None:
    rule, params = RULES["sgd"], [torch.ones(n) for n in SIZES]
    wrong = replace(noise_at(1, floats=False), **fields)
    with pytest.raises(InvalidInput, match=r"noise"):
        update.step(
            params, sums_of(1, floats=False), rule=rule, state=rule.init(params), noise=wrong
        )
    assert all(bool((p == 1).all()) for p in params)


def test_a_recording_without_a_clock_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    device = torch.device("cuda")
    with pytest.raises(PrivacyError, match="every replay"):
        noise.check_recording(device)
    noise.check_recording(device, step_counter=update.step_counter(RULES["sgd"], 0, "cpu"))
    noise.check_recording(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    noise.check_recording(device)


@pytest.mark.parametrize("which", ["add_noise", "step"])
def test_noisy_ops_ask_whether_they_are_recorded(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refuse(device: torch.device, *, step_counter: torch.Tensor | None = None) -> None:
        asked.append(step_counter)
        raise PrivacyError("CUDA graph", expected="", got="", remedy="")

    monkeypatch.setattr(noise, "check_recording", refuse)
    monkeypatch.setattr("dpkern.ops._update_noise.check_recording", refuse)
    x, params = torch.zeros(700, dtype=torch.int32), [torch.zeros(700)]
    given = replace(noise_at(1, floats=False), scales=(0.5,), positions=(0,))
    rule = RULES["sgd"]
    state = rule.init(params)
    calls = {
        "add_noise": lambda: noise.add_noise(x, stream=given.stream),
        "step": lambda: update.step(params, [x], rule=rule, state=state, noise=given),
    }
    with pytest.raises(PrivacyError):
        calls[which]()
    assert asked == [None]
    assert not x.any()


def test_counts_stay_on_a_device() -> None:
    assert count(torch.tensor([True, False])) == 1
    kept = count(torch.ones(3, dtype=torch.bool, device="meta"))
    assert isinstance(kept, torch.Tensor)
    assert kept.device.type == "meta"


def test_a_step_reads_its_count_only_when_asked() -> None:
    mechanism = dpkern.mechanisms.DPSGD(noise_multiplier=1.0, max_grad_norm=1.0)
    step = dpkern.DPStep(
        mechanism, [torch.zeros(3)], expected_batch_size=4, sample_rate=0.1, unsafe_seed=0
    )
    bad = torch.tensor([[1.0, 2.0, float("nan")]])
    result = dpkern.ops.clip.clip_sum(
        [bad], step.plan.bounds[0], arithmetic="exact", unit=step.plan.units[0]
    )
    step.add(sum=replace(result, nonfinite=torch.tensor(1)))
    step.add(sum=result)
    assert isinstance(step._nonfinite, torch.Tensor)
    assert step.nonfinite == 2

"""Private steps whose noise a source makes ahead: the same bits, and none without noise."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from dpkern import DPStep, InvalidInput, PrivacyError
from dpkern.base.rng import Key
from dpkern.ops import noise, update
from dpkern.privacy.mechanisms import (
    DPSGD,
    AdaClip,
    Directional,
    LaplaceSGD,
    Mechanism,
)
from dpkern.step import noise_binding as _step_source
from dpkern.step import sums as _step_sums
from dpkern.step.noise_tables import (
    CdtTable,
    Layout,
    NoiseSource,
    RingPrefetch,
    SampleTable,
    _producers,
)
from dpkern.step.noise_tables import ring as ring_module
from tests.engine.engine_run import Run
from tests.engine.released_cases import Made, crop, gradients, make

SGD = update.SGD(lr=0.1, momentum=0.9)
ADAM = update.Adam(lr=0.01)
STEPS = 3

CASES: dict[str, tuple[Mechanism, update.Rule | None]] = {
    "float": (DPSGD(noise_multiplier=1.0, max_grad_norm=0.5, arithmetic="float"), SGD),
    "exact": (DPSGD(noise_multiplier=1.0, max_grad_norm=0.5, arithmetic="exact"), ADAM),
    "handed-out": (DPSGD(noise_multiplier=1.0, max_grad_norm=0.5, arithmetic="float"), None),
    "mapped": (Made(releases=(crop(), None, None)), SGD),
    "mapped-exact": (Made(releases=(crop(), None, None), arithmetic="exact"), ADAM),
    "laplace": (LaplaceSGD(noise_multiplier=1.0, max_grad_norm=0.5), SGD),
    "learning": (AdaClip(noise_multiplier=1.0, expected_batch_size=8.0), ADAM),
    "importance": (
        Directional(
            noise_multiplier=1.0,
            max_grad_norm=0.5,
            importance_multiplier=3.0,
            mode="published",
        ),
        SGD,
    ),
    "per-sample": (Made(noise_point="per_sample"), SGD),
}


def trained(step: DPStep, steps: int = STEPS) -> list[torch.Tensor]:
    """Parameters after steps of three physical batches, one of them empty; and gradients."""
    out: list[torch.Tensor] = []
    for k in range(steps):
        for batch in (2, 0, 1):
            step.add(gradients(batch, seed=10 * step.steps + k + batch))
        gradient = step.finish()
        out += [g for g in gradient or [] if g is not None]
    return [p.clone() for p in step.params] + out


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize(("mechanism", "rule"), CASES.values(), ids=CASES)
def test_a_ring_changes_no_bit(mechanism: Mechanism, rule: update.Rule | None) -> None:
    with RingPrefetch(depth=1 if rule is ADAM else 2) as ring:
        step = make(mechanism, optimizer=rule, noise_source=ring)
        got = trained(step)
        plain = make(mechanism, optimizer=rule)
        assert equal(got, trained(plain))
        assert step.words == plain.words
        assert step.state_dict()["ledger"] == plain.state_dict()["ledger"]
        assert not equal(got, trained(make(mechanism, optimizer=rule, seed=8)))


def in_memory(kind: type[NoiseSource]) -> NoiseSource:
    """A source whose draws are written to memory before the step's kernels read them."""

    class Written(kind):  # type: ignore[misc, valid-type]
        def _made(self, step: int) -> update.Draws:
            draws = super()._made(step)
            assert not draws.in_memory
            place: dict[str, Any] = {"position": draws.first, "count": self.layout.count}
            return update.Draws(draws.first, noise.source_draws(draws, **place))

    made: NoiseSource = Written()
    return made


@pytest.mark.parametrize("kind", [CdtTable, SampleTable])
@pytest.mark.parametrize(("mechanism", "rule"), CASES.values(), ids=CASES)
def test_kernels_that_read_a_table_have_the_bits_of_draws_in_memory(
    kind: type[NoiseSource], mechanism: Mechanism, rule: update.Rule | None
) -> None:
    got = trained(make(mechanism, optimizer=rule, noise_source=kind()))
    assert equal(got, trained(make(mechanism, optimizer=rule, noise_source=in_memory(kind))))
    assert not equal(got, trained(make(mechanism, optimizer=rule)))


@pytest.mark.parametrize("kind", [CdtTable, SampleTable])
def test_a_table_is_empty_for_whoever_keeps_its_draws(kind: type[NoiseSource]) -> None:
    with kind() as source:
        step = make(CASES["float"][0], optimizer=SGD, noise_source=source)
        kept = source.take(1)
        source.done()
        with pytest.raises(InvalidInput, match="a table that is in use"):
            noise.source_draws(kept, position=0, count=5)
        with pytest.raises(PrivacyError, match="a step after 1"):
            trained(step, 1)
        other = make(CASES["float"][0], optimizer=SGD, noise_source=kind())
        trained(other, 2)  # its table is the same memory, and still there


@pytest.mark.parametrize("kind", [CdtTable, SampleTable])
def test_a_table_in_a_run_that_is_resumed(kind: type[NoiseSource]) -> None:
    mechanism, rule = CASES["float"]
    wanted = trained(make(mechanism, optimizer=rule, noise_source=kind()), 5)
    begun = make(mechanism, optimizer=rule, noise_source=kind())
    trained(begun, 2)
    again = make(mechanism, optimizer=rule, noise_source=kind())
    for mine, theirs in zip(again.params, begun.params, strict=True):
        mine.copy_(theirs)
    again.load_state_dict(begun.state_dict())
    for k in range(2, 5):
        for batch in (2, 0, 1):
            again.add(gradients(batch, seed=10 * again.steps + k + batch))
        again.finish()
    assert equal(again.params, wanted)


@pytest.mark.parametrize("kind", [CdtTable, SampleTable])
def test_another_thread_gets_no_draws_of_a_step_under_way(kind: type[NoiseSource]) -> None:
    faults: list[BaseException] = []
    with kind() as source:
        layout = Layout.of("laplace", (0,), (100,), "cpu", rounding=False)
        source.bind(Key.from_unsafe_seed(1), layout)
        source.take(1)

        def other() -> None:
            try:
                source.take(2)
            except PrivacyError as fault:
                faults.append(fault)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert [str(fault).count("another thread") for fault in faults] == [1]


def test_what_the_producer_has_not_begun_is_made_by_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(self: object, fill: object) -> Future[None]:
        return Future()

    monkeypatch.setattr(_producers.SideThread, "submit", never)
    with RingPrefetch() as ring:
        step = make(CASES["float"][0], optimizer=SGD, noise_source=ring)
        assert equal(trained(step), trained(make(CASES["float"][0], optimizer=SGD)))
        words = step.provenance()["words"]
    assert words["produced"] == words["consumed"] == step.words["produced"]


def test_pieces_of_a_block_are_made_once_whoever_makes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[int, int, int]] = []
    together = threading.Barrier(2)
    honest = noise.lattice_draws

    def slow(stream: Any, **place: Any) -> torch.Tensor:
        made.append((threading.get_ident(), stream.n1, place["position"]))
        with suppress(threading.BrokenBarrierError):
            together.wait(0.2)  # the step's thread and the producer's meet in every piece
        return honest(stream, **place)

    monkeypatch.setattr(noise, "lattice_draws", slow)
    monkeypatch.setattr(ring_module, "PIECE", 512)
    with RingPrefetch(depth=1) as ring:
        step = make(CASES["float"][0], optimizer=SGD, noise_source=ring)
        got = trained(step, 1)
    assert len({thread for thread, *_ in made}) == 2
    places = [place for _, *place in made]
    assert len(places) == len({tuple(place) for place in places})
    assert equal(got, trained(make(CASES["float"][0], optimizer=SGD), 1))


def test_every_release_takes_a_block_and_no_block_serves_twice() -> None:
    made: list[tuple[int, int]] = []
    honest = noise.lattice_draws

    def seen(stream: Any, **place: Any) -> torch.Tensor:
        made.append((stream.n1, place["position"]))
        return honest(stream, **place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise, "lattice_draws", seen)
        ring = RingPrefetch()
        step = make(CASES["float"][0], optimizer=SGD, noise_source=ring)
        trained(step, 5)
        ring.close()
    assert len(made) == len(set(made))
    words = step.provenance()["words"]
    assert words["consumed"] == step.words["produced"]  # every size here fills its tiles
    assert words["produced"] == words["consumed"] + words["discarded"]
    assert words["reused"] == 0
    assert step.provenance()["text"].startswith("fresh single-use; words produced")


def test_the_report_of_inline_noise_says_the_same() -> None:
    step = make(CASES["exact"][0], optimizer=ADAM)
    trained(step, 1)
    found = step.report(1e-5)["noise"]["provenance"]
    assert found["words"] == {**step.words, "reused": 0, "discarded": found["words"]["discarded"]}
    assert found["words"]["produced"] - found["words"]["consumed"] == found["words"]["discarded"]


# what goes wrong


def broken(*_: Any, **__: Any) -> None:
    raise MemoryError("no room for draws")


def test_a_fault_releases_nothing_and_the_step_can_be_finished_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with RingPrefetch() as ring:
        step = make(CASES["float"][0], optimizer=SGD, noise_source=ring)
        before = [p.clone() for p in step.params]
        with monkeypatch.context() as patch:
            patch.setattr(noise, "lattice_draws", broken)
            step.add(gradients(2))
            with pytest.raises(MemoryError, match="no room"):
                step.finish()
        assert equal(before, step.params)
        assert (step.steps, step.ledger.steps, step.unfinished) == (0, 0, True)
        step.finish()
        plain = make(CASES["float"][0], optimizer=SGD)
        plain.add(gradients(2))
        plain.finish()
        assert equal(step.params, plain.params)


def test_a_closed_ring_ends_the_run() -> None:
    ring = RingPrefetch()
    step = make(CASES["float"][0], optimizer=SGD, noise_source=ring)
    trained(step, 1)
    step.add(gradients(2))
    ring.close()
    before = [p.clone() for p in step.params]
    for call in (step.finish, lambda: step.add(gradients(2))):
        with pytest.raises(PrivacyError, match="closed"):
            call()
    assert equal(before, step.params)
    assert step.steps == 1


def test_an_update_that_fails_uses_its_draws_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with RingPrefetch() as ring:
        step = make(CASES["float"][0], optimizer=SGD, noise_source=ring)
        step.add(gradients(2))
        with monkeypatch.context() as patch:
            patch.setattr(_step_source.update, "step", broken)
            with pytest.raises(MemoryError):
                step.finish()
        assert step.steps == 1  # counts as released
        assert ring._out is None
        step.add(gradients(2))
        step.finish()
        assert ring._taken == 2


def test_no_room_for_the_sums_costs_no_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that was not recorded can be finished: its draws have not been out."""
    with RingPrefetch() as ring:
        step = make(CASES["float"][0], optimizer=SGD, noise_source=ring)
        with monkeypatch.context() as patch:
            patch.setattr(_step_sums, "accumulators", broken)
            with pytest.raises(MemoryError):
                step.finish()
        assert (step.steps, step.ledger.steps) == (0, 0)
        step.finish()
        assert step.steps == 1


def test_dropped_samples_cost_no_draws() -> None:
    with RingPrefetch() as ring:
        step = make(CASES["float"][0], optimizer=SGD, noise_source=ring)
        step.add(gradients(2))
        step.drop()
        assert ring.provenance()["words"]["consumed"] == 0
        assert equal(trained(step), trained(make(CASES["float"][0], optimizer=SGD)))


def test_a_step_without_samples_skips_its_draws() -> None:
    mechanism, _ = CASES["per-sample"]
    results = []
    for source in (None, RingPrefetch()):
        step = make(mechanism, optimizer=SGD, noise_source=source)
        for batch in (2, 0, 2):
            step.add(gradients(batch))
            step.finish()
        results.append(step.params)
        if source is not None:
            words = source.provenance()["words"]
            assert source.layout is not None
            assert words["consumed"] == 2 * source.layout.words
            source.close()
    assert equal(*results)


def test_one_source_serves_one_step() -> None:
    with RingPrefetch() as ring:
        make(CASES["float"][0], optimizer=SGD, noise_source=ring)
        with pytest.raises(PrivacyError, match="has a user"):
            make(CASES["float"][0], optimizer=SGD, noise_source=ring)
        with pytest.raises(InvalidInput, match="noise_source"):
            make(CASES["float"][0], noise_source="ring")  # type: ignore[arg-type]


# going on


def test_a_resumed_run_goes_on_with_its_own_draws() -> None:
    mechanism, rule = CASES["exact"]
    whole = make(mechanism, optimizer=rule)
    wanted = trained(whole, 5)
    first = RingPrefetch()
    begun = make(mechanism, optimizer=rule, noise_source=first)
    trained(begun, 2)
    state, params = begun.state_dict(), [p.clone() for p in begun.params]
    first.close()
    with RingPrefetch() as ring:
        step = DPStep(
            mechanism,
            params,
            expected_batch_size=8.0,
            sample_rate=0.01,
            optimizer=rule,
            unsafe_seed=7,
            noise_source=ring,
        )
        step.add(gradients(2))  # a batch that is thought better of
        step.drop()
        step.load_state_dict(state)
        for k in range(2, 5):
            for batch in (2, 0, 1):
                step.add(gradients(batch, seed=10 * step.steps + k + batch))
            step.finish()
        assert equal(step.params, wanted)


def test_a_schedule_may_change_the_scale_and_nothing_else() -> None:
    results = []
    for source in (None, RingPrefetch()):
        step = make(CASES["float"][0], optimizer=SGD, noise_source=source)
        for sigma in (1.0, 2.0, 0.0, 0.5):
            step.mechanism = replace(step.mechanism, noise_multiplier=sigma)
            trained(step, 1)
        results.append([p.clone() for p in step.params])
    assert equal(*results)
    assert source is not None
    other = replace(step.plan, distribution="laplace")
    step.plan = other
    with pytest.raises(PrivacyError, match="places as at the start"):
        step.add(gradients(1))
    source.close()


def test_noise_that_begins_later_binds_later() -> None:
    with RingPrefetch() as ring:
        step = make(replace(CASES["float"][0], noise_multiplier=0.0), noise_source=ring)
        trained(step, 1)
        assert ring.layout is None
        step.mechanism = replace(step.mechanism, noise_multiplier=1.0)
        trained(step, 1)
        assert ring.provenance()["words"]["consumed"] > 0


def test_a_run_that_is_forgotten_leaves_no_thread() -> None:
    before = {t for t in threading.enumerate() if t.name.startswith("dpkern-ring")}
    step = make(CASES["float"][0], optimizer=SGD, noise_source=RingPrefetch())
    trained(step, 1)
    del step
    gc.collect()
    left = {t for t in threading.enumerate() if t.name.startswith("dpkern-ring")} - before
    for thread in left:
        thread.join(timeout=5)
    assert not any(thread.is_alive() for thread in left)


# the engine


@pytest.mark.parametrize("kind", ["SGD", "RMSprop"])
def test_the_engine_takes_a_source(kind: str) -> None:
    with RingPrefetch() as ring:
        private = Run(kind=kind, noise_source=ring, max_physical_batch_size=5)
        private.train(most=3)
        plain = Run(kind=kind, max_physical_batch_size=5)
        plain.train(most=3)
        assert torch.equal(private.values(), plain.values())
        words = private.engine.step.provenance()["words"]
        assert words["consumed"] > 0


def test_layouts_know_their_words() -> None:
    one = Layout.of("gaussian", (0, 512), (512, 1), "cpu", rounding=True)
    assert one.words == 2 * (768 + 256)
    assert Layout.of("laplace", (), (), "cpu", rounding=False).words == 0

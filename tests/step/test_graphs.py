"""``UpdateGraph``: its bookkeeping with a recording that the CPU replays, the real one on a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from dpkern import BackendError, DPStep, InvalidInput, PrivacyError
from dpkern.base import dispatch
from dpkern.ops import testing, update
from dpkern.ops.backends import _launch_clip, _tables, cuda
from dpkern.privacy.mechanisms import DPSGD
from dpkern.step import graphs

RULES = {
    "sgd": update.SGD(lr=0.1),
    "momentum": update.SGD(lr=0.1, momentum=0.9, nesterov=True),
    "adam": update.Adam(lr=0.01),
    "adamw": update.AdamW(lr=0.01),
}


class Replayed:
    """Records as CUDA does: nothing runs when it is made, and the same work at every replay."""

    def __init__(
        self, prepare: Callable[[], Any], work: Callable[[], Any], device: torch.device
    ) -> None:
        self.work: Callable[[], Any] | None = work
        self.results: Any = None

    def join(self) -> None:
        """Wait for nothing."""

    def replay(self) -> None:
        assert self.work is not None
        self.results = self.work()

    def close(self) -> None:
        self.work = None


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "Recording", Replayed)
    monkeypatch.setattr(graphs, "_on_device", lambda param: True)


def made(
    rule: str = "momentum", arithmetic: str = "exact", device: str = "cpu", **kw: Any
) -> DPStep:
    mechanism = DPSGD(noise_multiplier=1.0, max_grad_norm=1.0, arithmetic=arithmetic)
    params = [torch.ones(40, 30, device=device), torch.ones(30, device=device)]
    given = {"optimizer": RULES[rule], "unsafe_seed": 3, "backend": None, **kw}
    if device == "cpu":
        given["backend"] = given["backend"] or "cpu"
    return DPStep(mechanism, params, expected_batch_size=4, sample_rate=0.1, **given)


def batch(step: DPStep, number: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(4, *p.shape, generator=generator).to(p.device) for p in step.params]


def _change_rate(step: DPStep, lr: float) -> None:
    assert step.optimizer is not None
    step.optimizer = replace(step.optimizer, lr=lr)


def compared(plain: DPStep, recorded: DPStep, finish: Callable[[], Any]) -> None:
    """Compare three steps, each at another learning rate."""
    for number in range(3):
        _change_rate(plain, 0.1 / (1 + number))
        _change_rate(recorded, 0.1 / (1 + number))
        for step in (plain, recorded):
            if number != 1:  # an empty draw
                step.add(batch(step, number))
        plain.finish()
        finish()
    for mine, theirs in zip(recorded.params, plain.params, strict=True):
        assert torch.equal(mine, theirs)
    assert recorded.steps == plain.steps
    assert recorded.words == plain.words
    assert recorded.epsilon_if_seed_secret(1e-5) == plain.epsilon_if_seed_secret(1e-5)
    assert recorded.optimizer_state is not None
    assert recorded.optimizer_state.steps == plain.steps


@pytest.mark.usefixtures("replayed")
@pytest.mark.parametrize("arithmetic", ["exact", "float"])
@pytest.mark.parametrize("rule", RULES)
def test_replays_are_the_steps_without_a_graph(rule: str, arithmetic: str) -> None:
    plain, recorded = made(rule, arithmetic), made(rule, arithmetic)
    graph = graphs.UpdateGraph(recorded)
    assert recorded.steps == 0  # recording is no release
    compared(plain, recorded, graph.finish)


@pytest.mark.usefixtures("replayed")
@pytest.mark.parametrize("backend", ["cuda"])  # emulated: the kernels read the clock themselves
@pytest.mark.parametrize("arithmetic", ["exact", "float"])
@pytest.mark.parametrize("rule", RULES)
def test_kernels_read_the_clock(rule: str, arithmetic: str, backend: str) -> None:
    if isinstance(reason := testing.emulation(backend), str):
        pytest.skip(f"{backend} {reason}")
    plain, recorded = (made(rule, arithmetic, backend=backend) for _ in range(2))
    compared(plain, recorded, graphs.UpdateGraph(recorded).finish)


@pytest.mark.usefixtures("replayed")
def test_a_graph_made_later_goes_on_with_the_noise() -> None:
    plain, recorded = made(), made()
    for step in (plain, recorded):
        step.add(batch(step, 9))
        step.finish()
    compared(plain, recorded, graphs.UpdateGraph(recorded).finish)


@pytest.mark.usefixtures("replayed")
def test_the_ledger_is_written_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    step = made()
    graph = graphs.UpdateGraph(step)

    def fail(self: Replayed) -> None:
        raise RuntimeError("no device any more")

    monkeypatch.setattr(Replayed, "replay", fail)
    with pytest.raises(RuntimeError, match="no device"):
        graph.finish()
    assert step.ledger.steps == 1
    monkeypatch.undo()
    with pytest.raises(PrivacyError, match="finished without the graph"):
        graph.finish()  # the step's noise may be out already


def places(step: DPStep, rows: int = 4) -> list[torch.Tensor]:
    """Return room for gradients, with what must never be read in it."""
    return [torch.full((rows, *p.shape), torch.nan, device=p.device) for p in step.params]


def clipped_in_graph(
    plain: DPStep, recorded: DPStep, given: list[torch.Tensor]
) -> graphs.UpdateGraph:
    """Compare four steps: whole batches, two physical batches, an empty draw, a bad sample."""
    graph = graphs.UpdateGraph(recorded, given)
    for number, samples in enumerate((None, 3, 0, 2)):
        made, used = batch(plain, number), 4 if samples is None else samples
        if number == 3:
            made[0][1, 0, 0] = torch.inf
        for mine, theirs in zip(given, made, strict=True):
            mine.copy_(theirs)
        if number == 1:
            for step in (plain, recorded):
                step.add(batch(step, 7))
        plain.add([gradient[:used] for gradient in made])
        plain.finish()
        graph.finish(samples)
        for mine, theirs in zip(recorded.params, plain.params, strict=True):
            # Float sums of padded batches add zeros elsewhere.
            limit = 0.0 if plain.plan.arithmetic == "exact" else 1e-5
            torch.testing.assert_close(mine, theirs, rtol=limit, atol=limit)
    assert recorded.steps == plain.steps == 4
    assert recorded.nonfinite == plain.nonfinite == 1
    assert recorded.words == plain.words
    assert recorded.epsilon_if_seed_secret(1e-5) == plain.epsilon_if_seed_secret(1e-5)
    assert recorded.sums is None
    return graph


@pytest.mark.usefixtures("replayed")
@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@pytest.mark.parametrize("arithmetic", ["exact", "float"])
@pytest.mark.parametrize("rule", ["momentum", "adam"])
def test_norms_factors_and_sums_are_part_of_a_graph(
    rule: str, arithmetic: str, backend: str
) -> None:
    if backend == "cuda" and isinstance(reason := testing.emulation(backend), str):
        pytest.skip(f"{backend} {reason}")
    plain, recorded = (made(rule, arithmetic, backend=backend) for _ in range(2))
    clipped_in_graph(plain, recorded, places(recorded))


@pytest.mark.usefixtures("replayed")
def test_what_a_graph_cannot_clip_is_refused() -> None:
    step = made()
    with pytest.raises(InvalidInput, match="a list of 2 tensors"):
        graphs.UpdateGraph(step, places(step)[:1])
    with pytest.raises(InvalidInput, match="not contiguous"):
        graphs.UpdateGraph(step, [torch.zeros(4, 30, 40).mT, torch.zeros(4, 30)])
    with pytest.raises(InvalidInput, match="no room"):
        graphs.UpdateGraph(step, places(step, 0))
    mechanism = DPSGD(
        noise_multiplier=1.0, max_grad_norm=(1.0, 1.0), clipping="group", groups=(0, 1)
    )
    grouped = DPStep(
        mechanism, step.params, expected_batch_size=4, sample_rate=0.1, optimizer=RULES["sgd"]
    )
    with pytest.raises(InvalidInput, match="by groups"):
        graphs.UpdateGraph(grouped, places(step))
    given = places(step)
    graph = graphs.UpdateGraph(step, given)
    for samples in (-1, 5, 1.5):
        with pytest.raises(InvalidInput, match="samples"):
            graph.finish(samples)  # type: ignore[arg-type]
    given[0].data = torch.zeros_like(given[0])
    with pytest.raises(InvalidInput, match="recorded"):
        graph.finish()
    assert step.steps == step.ledger.steps == 0


class Recorded(Replayed):
    """Records with the emulated kernels: their launches are counted and none is started.

    Attributes:
        made: all recordings.
        launches: kernels of the recorded work.
    """

    made: ClassVar[list[Recorded]] = []

    def __init__(
        self, prepare: Callable[[], Any], work: Callable[[], Any], device: torch.device
    ) -> None:
        super().__init__(prepare, work, device)
        self.made.append(self)
        self.held = prepare()
        self.launches: Counter[str] = Counter()
        started: list[Any] = []

        def start(launcher: Any, kernel: Any, *arguments: Any) -> int:
            started.append(kernel.name)
            return 0

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cuda.ModuleLauncher, "start", start)
            patch.setattr(_tables._device, "capturing", lambda _: True)
            work()
        self.launches.update(started)


@pytest.mark.parametrize("arithmetic", ["exact", "float"])
def test_a_whole_step_of_gradients_is_one_graph_of_few_launches(
    arithmetic: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Nothing that it reads is copied while it is recorded, and a replay starts nothing itself."""
    module = cuda._emulated()
    if isinstance(module, str):
        pytest.skip(module)
    on = cuda.emulated_device(module)
    monkeypatch.setattr(cuda, "_loaded", lambda: on)
    monkeypatch.setattr(graphs, "Recording", Recorded)
    monkeypatch.setattr(graphs, "_on_device", lambda param: True)
    monkeypatch.setitem(dispatch.PREFERENCE, "cpu", ("cuda", "reference"))
    update.advance.forget()
    request.addfinalizer(update.advance.forget)
    with testing.emulated("cuda"):
        plain, recorded = (made("momentum", arithmetic, backend="cuda") for _ in range(2))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_launch_clip, "prepare", lambda *_: None)
            with pytest.raises(BackendError, match="new addresses"):
                graphs.UpdateGraph(recorded, places(recorded))
        clipped_in_graph(plain, recorded, places(recorded))
    launches = Recorded.made[-1].launches
    kernels = ["power_kernel", "factor_kernel", "sum_kernel", "update_tile_kernel"]
    repaired = ["repair_kernel"] if arithmetic == "exact" else []
    assert launches == Counter([*kernels, *repaired, "advance_kernel"])


def _changed_momentum(step: DPStep) -> None:
    assert isinstance(step.optimizer, update.SGD)
    step.optimizer = replace(step.optimizer, momentum=0.8)


def _changed_noise(step: DPStep) -> None:
    assert isinstance(step.mechanism, DPSGD)
    step.mechanism = replace(step.mechanism, noise_multiplier=2.0)


def _moved(step: DPStep) -> None:
    step.params[0].data = step.params[0].data.clone()


@pytest.mark.usefixtures("replayed")
@pytest.mark.parametrize("change", [_changed_momentum, _changed_noise, _moved])
def test_what_the_graph_holds_must_not_change(change: Callable[[DPStep], None]) -> None:
    step = made()
    graph = graphs.UpdateGraph(step)
    change(step)
    with pytest.raises(InvalidInput, match="recorded"):
        graph.finish()
    assert step.steps == step.ledger.steps == 0


@pytest.mark.usefixtures("replayed")
def test_noise_is_never_used_twice() -> None:
    step = made()
    graph = graphs.UpdateGraph(step)
    step.finish()
    with pytest.raises(PrivacyError, match="earlier step"):
        graph.finish()
    graph.close()
    graph.close()
    with pytest.raises(InvalidInput, match="closed"):
        graph.finish()


@pytest.mark.usefixtures("replayed")
def test_a_wiped_key_ends_the_graph() -> None:
    step = made(unsafe_seed=None)
    with graphs.UpdateGraph(step) as graph:
        step.key.wipe()
        with pytest.raises(PrivacyError, match="wiped"):
            graph.finish()
    assert graph._noise is None
    assert step.steps == 0


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        (lambda: made(), "CPU"),
        (lambda: made(optimizer=None), "optimizer"),
    ],
    ids=["on-the-cpu", "no-rule"],
)
def test_what_cannot_be_recorded_is_refused(step: Callable[[], DPStep], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        graphs.UpdateGraph(step())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("arithmetic", ["exact", "float"])
@pytest.mark.parametrize("rule", RULES)
def test_recorded_on_a_device(rule: str, arithmetic: str) -> None:
    plain, recorded = (made(rule, arithmetic, "cuda", backend="cuda") for _ in range(2))
    with graphs.UpdateGraph(recorded) as graph:
        compared(plain, recorded, graph.finish)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("arithmetic", ["exact", "float"])
def test_clipped_in_a_graph_on_a_device(arithmetic: str) -> None:
    plain, recorded = (made("momentum", arithmetic, "cuda", backend="cuda") for _ in range(2))
    clipped_in_graph(plain, recorded, places(recorded)).close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_step_recorded_by_hand_is_refused() -> None:
    step = made(device="cuda", backend="cuda")
    with (
        pytest.raises(PrivacyError, match="every replay"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        step.finish()


@pytest.mark.usefixtures("replayed")
@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_a_replay_that_no_step_announced_changes_nothing(backend: str) -> None:
    """Before the first step, behind one, and twice in one."""
    if backend == "cuda" and isinstance(reason := testing.emulation(backend), str):
        pytest.skip(f"{backend} {reason}")
    plain, recorded = (made("adamw", backend=backend) for _ in range(2))
    graph = graphs.UpdateGraph(recorded)
    recording: Any = graph._recording
    replay = recording.replay
    recording.replay = lambda: (replay(), replay())
    recording.replay()
    compared(plain, recorded, graph.finish)
    recording.replay()
    for mine, theirs in zip(recorded.params, plain.params, strict=True):
        assert torch.equal(mine, theirs)


class Stream:
    """A stream that knows which others it has waited for."""

    def __init__(self) -> None:
        self.waited: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other)


def test_a_replay_on_another_stream_waits_for_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at once would read one step counter, and draw the same noise."""
    first, second, runs = Stream(), Stream(), []
    recording: Any = object.__new__(graphs.Recording)
    recording._graph = SimpleNamespace(replay=lambda: runs.append(1))
    recording._device, recording._stream = torch.device("cuda"), None
    now: list[Stream] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: now[-1])
    for stream, waited in ((first, []), (first, []), (second, [first]), (second, [first])):
        now.append(stream)
        recording.replay()
        assert stream.waited == waited
    now.append(first)
    recording.join()
    assert first.waited == [second]
    assert len(runs) == 4

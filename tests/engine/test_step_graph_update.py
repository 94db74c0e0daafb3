"""Noise and update as a part of ``StepGraph``: fresh at every step, and only when one is due.

Every run is beside one without a graph. Where noise and update cannot be replayed they are made
beside the graph, with the same bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpkern import InvalidInput, PrivacyError, UnsupportedModule, mechanisms, noise_tables
from dpkern.engine.recorded_update import RecordedUpdate
from dpkern.graphs import StepGraph
from dpkern.ops import _step_counter
from tests.engine.device_path import needs_emulation
from tests.engine.recorded_work import RecordedWork
from tests.engine.test_step_graph import FIRST, Run, equal, loss_of, on_device, recorded_run
from tests.engine.test_step_graph_filled import Plain, sum_of

pytestmark = [needs_emulation, pytest.mark.usefixtures("on_device")]
__all__ = ["on_device"]

SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    """Two groups with learning rates of their own."""
    given = list(parameters)
    return ADAMW([{"params": given[:3], "lr": 0.2}, {"params": given[3:]}], lr=0.05)


RULES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(SGD, lr=0.1),
    "momentum": partial(SGD, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "nesterov": partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=0.1, weight_decay=1e-2),
    "adamw": partial(ADAMW, lr=0.1, weight_decay=0.1),
    "two groups": two_groups,
}


def state_of(run: Run) -> list[Tensor]:
    """Parameters and all tensors of the optimizer's state."""
    held = run.optimizer.state.values()
    return run.parameters() + [t.clone() for each in held for t in each.values() if t is not None]


def compare(change: Callable[[Run, int], None], steps: int = FIRST + 5, **options: Any) -> Run:
    """Take the steps with and without a graph, each behind a change; return the graphed run."""
    plain, graphed = Run(None, **options), Run(loss_of, **options)
    for run in (plain, graphed):
        torch.manual_seed(1)
        for number in range(steps):
            change(run, number)
            run.step()
    equal(graphed, plain)
    assert all(map(torch.equal, state_of(plain), state_of(graphed)))
    return graphed


def nothing(run: Run, number: int) -> None:
    """Change nothing."""


def follow_schedule(run: Run, number: int) -> None:
    """Change the learning rates."""
    for group in run.optimizer.param_groups:
        group["lr"] *= 0.9


@pytest.mark.parametrize("arithmetic", ["float", "exact"])
@pytest.mark.parametrize(
    "rule",
    [
        rule if rule in ("momentum", "adam") else pytest.param(rule, marks=pytest.mark.slow)
        for rule in RULES
    ],
)
def test_replays_with_noise_and_update_are_the_steps_without_a_graph(
    rule: str, arithmetic: str
) -> None:
    """Learning rates follow their schedule, Adam's powers have the bits of steps."""
    graphed = compare(follow_schedule, rule=RULES[rule], arithmetic=arithmetic)
    graph = graphed.graph
    assert graph is not None
    assert (graph.replays, graph.beside) == (5, "")
    assert graphed.engine.step.words["consumed"] > 0


def test_clip_groups_are_released_by_the_graph() -> None:
    none = dict.fromkeys(("arithmetic", "noise_multiplier", "max_grad_norm"))
    mechanism = mechanisms.DPSGD(
        noise_multiplier=0.5,
        max_grad_norm=[0.3, 0.4],
        clipping="group",
        groups=(0, 1, 1, 0, 0, 1),
        arithmetic="float",
    )
    options: tuple[dict[str, Any], ...] = (
        {"mechanism": mechanism, **none},
        {"clipping": "per_layer", "max_grad_norm": [0.3, 0.4, 0.5, 0.6, 0.7, 0.8]},
    )
    for each in options:
        graph = compare(nothing, **each).graph
        assert graph is not None
        assert graph.beside == ""


def test_a_replay_that_no_step_announced_releases_nothing() -> None:
    """Neither a second one, nor one before the first announcement."""
    plain, (run, graph) = Run(None, Plain), recorded_run(model=Plain)
    plain.steps(FIRST + 1)
    recording: Any = graph._recording
    assert isinstance(recording, RecordedWork)
    before = state_of(run)
    for _ in range(3):
        recording.replay()
    assert all(map(torch.equal, before, state_of(run)))
    replay = recording.replay
    recording.replay = lambda: (replay(), replay())
    run.steps(2)
    plain.steps(2)
    assert graph.beside == ""
    equal(run, plain)
    assert all(map(torch.equal, state_of(plain), state_of(run)))


def test_a_counter_without_a_due_step_would_repeat_noise() -> None:
    """The negative control: the same replay releases again where every step may run."""
    run, graph = recorded_run()
    recorded: Any = graph._update
    before = state_of(run)
    recorded._counters[:, -1] = _step_counter.EVERY
    graph._recording.replay()  # type: ignore[union-attr]
    assert not all(map(torch.equal, before, state_of(run)))


def test_every_step_announces_a_number_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replayed or not, in steps of one replay or several: no number comes twice, none is left."""
    run = Run(loss_of, Plain, sampling="poisson", rows=4)
    announced: list[tuple[int, int]] = []
    announce = RecordedUpdate.announce

    def noted(recorded: RecordedUpdate) -> None:
        announce(recorded)
        for counter in recorded._counters:
            found = _step_counter.read(counter)
            announced.append((found.steps + 1, found.due))

    monkeypatch.setattr(RecordedUpdate, "announce", noted)
    beside = []
    for _ in range(30):
        run.step()
        assert run.graph is not None
        beside.append("" if not run.graph.reason and not run.graph.beside else "beside")
    assert {"", "beside"} == set(beside)
    numbers = [k + 1 for k, each in enumerate(beside) if not each]
    assert announced == [(number, number) for number in numbers]


def test_poisson_draws_have_the_bits_of_steps_without_a_graph() -> None:
    """A draw of one replay is released by it, a larger one beside the graph."""
    options: dict[str, Any] = {"sampling": "poisson", "loss_reduction": "sum", "model": Plain}
    for arithmetic in ("float", "exact"):
        plain = Run(None, arithmetic=arithmetic, **options)
        run = Run(sum_of, arithmetic=arithmetic, rows=5, **options)
        found = set()
        for _ in range(16):
            plain.step(sum_of)
            run.step()
            assert run.graph is not None
            found.add(run.graph.reason or run.graph.beside)
        equal(run, plain)
        assert found >= {"", "a step of several replays", "one of the first steps"}


def test_physical_batches_are_released_beside_the_graph() -> None:
    plain, run = (Run(loss, max_physical_batch_size=2) for loss in (None, loss_of))
    for each in (plain, run):
        torch.manual_seed(1)
        each.steps(2 * FIRST + 4)
    equal(run, plain)
    assert run.graph is not None
    assert run.graph.beside == "a step of several replays"
    assert run.graph.replays > 0


def more_decay(run: Run, number: int) -> None:
    """Change another number of the optimizer once."""
    if number == FIRST + 2:
        run.optimizer.param_groups[0]["weight_decay"] = 0.3


def other_noise(run: Run, number: int) -> None:
    """Change the noise for one step."""
    run.optimizer.noise_multiplier = 2.0 if number == FIRST + 2 else 1.0


def other_state(run: Run, number: int) -> None:
    """Load the optimizer's own state, which makes new tensors."""
    if number == FIRST + 2:
        run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))


def other_ages(run: Run, number: int) -> None:
    """Let one parameter be younger than the others."""
    if number == FIRST + 2:
        for p in run.optimizer.param_groups[0]["params"][:1]:
            run.optimizer.state[p]["step"].fill_(1.0)


def hooked(run: Run, number: int) -> None:
    """Let a hook look at the gradients."""
    if number == FIRST + 2:
        run.optimizer.register_step_pre_hook(lambda *_: None)


def public_pass(run: Run, number: int) -> None:
    """Add a gradient of public data."""
    run.optimizer.zero_grad = lambda: None
    if number == FIRST + 2:
        with run.engine.public():
            run.model(torch.ones(2, 5, 6)).sum().backward()


BESIDE = {
    more_decay: "numbers of the optimizer beside its learning rate",
    other_state: "other groups or another state of the optimizer",
    other_ages: "parameters of different ages",
    hooked: "hooks of the optimizer",
    public_pass: "",
    other_noise: "",
}


@pytest.mark.parametrize("change", BESIDE, ids=lambda change: change.__name__)
def test_what_the_recording_does_not_hold_is_released_beside_it(
    change: Callable[[Run, int], None],
) -> None:
    """Only as long as it is so."""
    graph = compare(change).graph
    assert graph is not None
    looks = change is public_pass  # behind which the guards look at a pass
    assert (graph.replays, graph.beside) == (5 - looks, BESIDE[change])


def test_steps_go_on_from_a_checkpoint() -> None:
    """A run that was saved between replays continues in a new one, with a graph of its own."""
    runs = []
    for loss in (None, loss_of):
        first, later = Run(loss), Run(loss)
        torch.manual_seed(1)
        first.steps(FIRST + 3)
        saved = copy.deepcopy(
            (first.model.state_dict(), first.optimizer.state_dict(), first.engine.state_dict())
        )
        for held, state in zip((later.model, later.optimizer, later.engine), saved, strict=True):
            held.load_state_dict(state)
        later.steps(FIRST + 3)
        runs.append(later)
    equal(*runs)
    assert runs[1].graph is not None
    assert (runs[1].graph.replays, runs[1].graph.beside) == (3, "")
    assert runs[1].engine.step.steps == 2 * FIRST + 6


def test_the_model_may_be_loaded_between_replays() -> None:
    def load(run: Run, number: int) -> None:
        if number == FIRST + 2:
            state = {name: value.detach() * 0.5 for name, value in run.model.state_dict().items()}
            run.model.load_state_dict(state)

    graph = compare(load).graph
    assert graph is not None
    assert graph.beside == ""


def test_two_engines_have_graphs_of_their_own() -> None:
    alone = [Run(loss_of, unsafe_seed=seed) for seed in (1, 2)]
    together = [Run(loss_of, unsafe_seed=seed) for seed in (1, 2)]
    for run in alone:
        torch.manual_seed(1)
        run.steps(FIRST + 3)
    torch.manual_seed(1)
    random = [torch.get_rng_state()] * 2
    for _ in range(FIRST + 3):
        for k, run in enumerate(together):
            torch.set_rng_state(random[k])
            run.step()
            random[k] = torch.get_rng_state()
    for mine, theirs in zip(together, alone, strict=True):
        equal(mine, theirs)


@pytest.mark.parametrize("broken", ["replay", "announce"])
def test_a_replay_that_fails_is_a_step_in_the_ledger(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its samples had their step, its noise is not used again, and the graph is closed."""
    run, graph = recorded_run()
    recording, recorded = graph._recording, graph._update
    x, y = run.batch()
    before = state_of(run)

    def fail() -> None:
        raise RuntimeError("no device any more")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording if broken == "replay" else recorded, broken, fail)
        with pytest.raises(RuntimeError, match="no device"):
            graph.step(x, y)
    assert all(map(torch.equal, before, state_of(run)))
    assert run.engine.step.steps == run.engine.step.ledger.steps == FIRST + 2
    with pytest.raises(InvalidInput, match="closed"):
        graph.step(x, y)
    loss_of(run.model, x, y).backward()
    with pytest.raises(PrivacyError):
        run.optimizer.step()
    run.optimizer.zero_grad()
    run.graph = None
    run.step()
    assert run.engine.step.steps == FIRST + 3


def test_a_step_without_a_graph_that_fails_has_had_its_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(None)
    run.steps(2)
    x, y = run.batch()
    loss_of(run.model, x, y).backward()

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no device any more")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dpkern.step.release.step_group", fail)
        with pytest.raises(RuntimeError, match="no device"):
            run.optimizer.step()
    assert run.engine.step.ledger.steps == 3
    loss_of(run.model, x, y).backward()
    with pytest.raises(PrivacyError):
        run.optimizer.step()


def made(update: bool | None, **options: Any) -> Run:
    """A run whose graph was asked for with ``update=``."""
    run = Run(loss_of, **options)
    run.graph = StepGraph(run.engine, loss_of, update=update)
    run.steps(FIRST)
    return run


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another rule": ({"rule": partial(torch.optim.RMSprop, lr=0.1)}, "RMSprop"),
    "amsgrad": ({"rule": partial(ADAMW, lr=0.1, amsgrad=True)}, "its own step"),
    "a learning rate that is a tensor": (
        {"rule": partial(SGD, lr=torch.tensor(0.1))},
        "numbers of the rule that are tensors",
    ),
    "a noise source": ({"noise_source": noise_tables.CdtTable}, "a noise source"),
    "a mechanism that learns": (
        {
            "mechanism": mechanisms.AdaClip(
                noise_multiplier=1.0,
                expected_batch_size=4,
                h1=1.0,
                h2=1.0,
                arithmetic="float",
            ),
            **dict.fromkeys(("arithmetic", "noise_multiplier", "max_grad_norm")),
        },
        "a mechanism that learns",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_graph_can_update_is_refused_where_it_was_asked_for(name: str) -> None:
    """Else it runs beside the graph; either way the samples can take their step without one."""
    options, reason = REFUSED[name]

    def given() -> dict[str, Any]:
        source = options.get("noise_source")
        return options if source is None else {"noise_source": source()}

    run = made(True, **given())
    batch = run.batch()
    with pytest.raises(InvalidInput, match=reason):
        run.step(batch=batch)
    assert run.engine.step.steps == FIRST
    loss_of(run.model, *batch).backward()
    run.optimizer.step()
    run = made(None, **given())
    run.steps(2)
    assert run.graph is not None
    assert reason in run.graph.beside
    assert (run.graph.replays, run.graph.reason) == (2, "")


def test_the_update_may_stay_beside_the_graph() -> None:
    run = made(False)
    run.step()
    assert run.graph is not None
    assert (run.graph.replays, run.graph.beside) == (1, "update=False")
    with pytest.raises(InvalidInput, match="update"):
        StepGraph(run.engine, loss_of, update="yes")  # type: ignore[arg-type]


def test_a_wiped_key_ends_the_graphs_releases() -> None:
    run, graph = recorded_run(unsafe_seed=None)
    before = state_of(run)
    run.engine.step.key.wipe()
    with pytest.raises(PrivacyError, match="wiped"):
        run.step()
    assert all(map(torch.equal, before, state_of(run)))
    graph.close()
    assert graph._update is None


class Normed(nn.Module):
    """A module with a buffer that its passes read and the loop writes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x.mean(1)) * self.scale)
        return out


def test_a_buffer_that_was_written_between_steps_is_looked_at() -> None:
    """The guards refuse it, as they do without a graph; what ``load_state_dict`` writes is read."""

    def load(run: Run, number: int) -> None:
        if number == FIRST + 2:
            state = run.model.state_dict()
            run.model.load_state_dict({**state, "scale": 2 * state["scale"]})

    run = compare(load, model=Normed)
    before = state_of(run)
    run.model.scale.mul_(2)
    with pytest.raises(UnsupportedModule, match="scale"):
        run.step()
    assert all(map(torch.equal, before, state_of(run)))

"""Count a private step's launches on a device that is not here, and time what the host does.

    TRITON_INTERPRET=1 python -m benchmarks device-host [--json PATH]

The engine takes the ways that it takes on a device, with a driver that counts our launches and,
once the first steps have run on emulated kernels, starts none: what is left is the host's work.
Models have the layers of the targets, but few and narrow ones, so that torch's own operations,
which run on the CPU here, take next to no time of arithmetic. What a real driver and Triton's
launcher take for a launch come on top. Not yet run on a GPU.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpkern
from dpkern.engine import step_graph
from dpkern.ops import update
from dpkern.step import graphs as step_graphs

from .gpu_models import Decoder, VisionTransformer
from .step_models import ResNet

ROWS = 4
FIRST = 4
"""Steps that run on emulated kernels: the first ones are checked by passes of their own."""


class Recurrent(nn.Module):
    """Two LSTM layers over tokens, whose last output is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm = nn.Embedding(9, 8), nn.LSTM(8, 8, num_layers=2, batch_first=True)
        self.last = nn.Linear(8, 9)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.last(self.lstm(self.table(ids))[0])
        return out


@dataclass(frozen=True)
class Model:
    """A model and the shape of its input; ids below 9 where it has two dimensions."""

    title: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]

    def batch(self) -> Tensor:
        """Return an input."""
        if len(self.shape) == 2:
            return torch.randint(9, self.shape)
        return torch.randn(self.shape)


MODELS = {
    "gpt2": Model(
        "decoder of 2 layers",
        lambda: Decoder(vocabulary=9, length=8, width=8, heads=2, layers=2),
        (ROWS, 8),
    ),
    "vit": Model(
        "vision transformer of 2 layers",
        lambda: VisionTransformer(size=8, patch=4, width=8, heads=2, layers=2),
        (ROWS, 3, 8, 8),
    ),
    "resnet": Model("ResNet of 4 blocks", lambda: ResNet((4, 8), 2), (ROWS, 3, 8, 8)),
    "lstm": Model("LSTM of 2 layers", Recurrent, (ROWS, 8)),
}


def loss_of(out: Tensor) -> Tensor:
    """Return a loss of any output."""
    return F.cross_entropy(out.flatten(0, -2), torch.arange(out[..., 0].numel()) % out.shape[-1])


def measured(name: str, rounds: int) -> dict[str, Any]:
    """Return a model's launches, and microseconds of a step with and without privacy."""
    from tests.engine.device_path import Driver
    from tests.engine.recorded_work import recorded

    model = MODELS[name]
    torch.manual_seed(0)
    x, plain, driver = model.batch(), model.build(), Driver()
    usual = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    with driver.on(), recorded():
        step, _ = _private(model, x)
        graphed = _recorded(model, x)
        drawn = _recorded(model, torch.cat([x, x]), "poisson")

        def plain_step() -> float:
            usual.zero_grad()
            started = time.thread_time()
            loss_of(plain(x)).backward()
            usual.step()
            return time.thread_time() - started

        for _ in range(FIRST):
            step()
        driver.launches.clear()
        step()
        launches: Counter[str] = Counter(driver.launches)
        driver.launches.clear()
        graphed()
        beside = driver.launches.total()
        driver.starts = False
        times = [(step(), plain_step(), graphed(), drawn()) for _ in range(rounds)]
    with_privacy, without, replayed, filled = (
        1e6 * statistics.median(each) for each in zip(*times, strict=True)
    )
    parameters = len(list(plain.parameters()))
    return {
        "model": model.title,
        "parameters": parameters,
        "launches": launches.total(),
        "kernels": dict(launches.most_common()),
        "plain us": without,
        "private us": with_privacy,
        "added us": with_privacy - without,
        "added us per parameter": (with_privacy - without) / parameters,
        "launches beside the graph": beside,
        "us as a graph": replayed,
        "added us per parameter as a graph": (replayed - without) / parameters,
        "us as a graph, Poisson": filled,
        "added us per parameter as a graph, Poisson": (filled - without) / parameters,
    }


def _recorded(model: Model, x: Tensor, sampling: str = "fixed") -> Callable[[], float]:
    """Return a step of a new model that was recorded, whose replays start nothing."""
    step, engine = _private(model, x, sampling)
    graph = step_graph.StepGraph(
        engine,
        lambda module, given: loss_of(module(given)),
        rows=None if sampling == "fixed" else ROWS + 2,
    )
    while not graph.replays:
        step(graph)
    assert graph._recording is not None
    graph._recording.replay = lambda: None  # type: ignore[method-assign]
    return lambda: step(graph)


def _private(
    model: Model, x: Tensor, sampling: str = "fixed"
) -> tuple[Callable[..., float], dpkern.PrivacyEngine]:
    """Return a private step of a new model, given a graph or none, which tells its time."""
    module: Any = model.build()
    engine = dpkern.PrivacyEngine()
    module, optimizer, loader = engine.make_private(
        module=module,
        optimizer=torch.optim.AdamW(module.parameters(), lr=1e-3),
        data_loader=torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=ROWS),
        sampling=sampling,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        unsafe_seed=1,
        arithmetic="float",
    )
    engine.capture.guard._occasions.gap = 1 << 60  # no secret probe by chance

    def step(graph: step_graph.StepGraph | None = None) -> float:
        (given,) = next(iter(loader))
        optimizer.zero_grad()
        started = time.thread_time()
        if graph is None:
            loss_of(module(given)).backward()
            optimizer.step()
        else:
            graph.step(given)
        return time.thread_time() - started

    return step, engine


class Recording:
    """A recording of a ``graphs.UpdateGraph``, of which the driver has seen every launch.

    A replay would be one launch for all of them.
    """

    def __init__(self, prepare: Callable[[], Any], work: Callable[[], Any], _: Any) -> None:
        self.held, self.results = prepare(), 0
        work()

    def join(self) -> None:
        """Wait for nothing."""

    def replay(self) -> None:
        """Start nothing."""

    def close(self) -> None:
        """Forget nothing."""


def graphed(name: str, rounds: int) -> dict[str, Any]:
    """Return launches and host time of a step of explicit gradients, one by one and as a graph."""
    from dpkern.ops.backends import cuda
    from dpkern.ops.backends._start import Device
    from tests.engine.device_path import Driver

    torch.manual_seed(0)
    driver, shapes = Driver(), [p.shape for p in MODELS[name].build().parameters()]
    mechanism = dpkern.mechanisms.DPSGD(noise_multiplier=1.0, max_grad_norm=1.0)
    driver.starts = False
    with driver.on():
        one, whole = (
            dpkern.DPStep(
                mechanism,
                [torch.zeros(shape) for shape in shapes],
                expected_batch_size=ROWS,
                sample_rate=0.1,
                optimizer=update.AdamW(lr=1e-3),
                unsafe_seed=1,
            )
            for _ in range(2)
        )
        given = [torch.randn(ROWS, *shape) for shape in shapes]
        before = step_graphs.Recording, step_graphs._on_device, cuda._loaded
        on = Device(driver, "cuda", "cpu", lambda *_: None)
        step_graphs.Recording = Recording  # type: ignore[assignment,misc]
        step_graphs._on_device, cuda._loaded = lambda _: True, lambda: on
        try:
            graph = step_graphs.UpdateGraph(whole, given)
        finally:
            step_graphs.Recording, step_graphs._on_device, cuda._loaded = before  # type: ignore[misc]
        recorded = driver.launches.total()
        driver.launches.clear()

        def explicit() -> None:
            one.add(given)
            one.finish()

        explicit()
        launches = driver.launches.total()
        driver.launches.clear()
        times = [(_time(explicit), _time(graph.finish)) for _ in range(rounds)]
    explicit_us, graph_us = (1e6 * statistics.median(each) for each in zip(*times, strict=True))
    return {
        "model": MODELS[name].title,
        "parameters": len(shapes),
        "launches": launches,
        "us": explicit_us,
        "recorded": recorded,
        "us as a graph": graph_us,
    }


def _time(run: Callable[[], Any]) -> float:
    started = time.thread_time()
    run()
    return time.thread_time() - started


def _table(rows: list[dict[str, Any]], columns: list[str]) -> list[str]:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = (row[key] for key in columns)
        texts = (f"{c:.0f}" if isinstance(c, float) else str(c) for c in cells)
        lines.append("| " + " | ".join(texts) + " |")
    return lines


def markdown(
    machine: dict[str, Any], rows: list[dict[str, Any]], steps: list[dict[str, Any]]
) -> str:
    """Return the tables."""
    columns = [key for key in rows[0] if key != "kernels"]
    lines = [
        "# Launches and host time of a step on a device",
        "",
        f"dpkern {machine['dpkern']}, torch {machine['torch']}, {machine['processor']}, one "
        "thread. A driver that counts our kernels and starts none; **not yet run on a GPU**: what "
        "a real driver and Triton's launcher take comes on top. CPU time of the thread, medians. "
        "Columns with a graph are of `graphs.StepGraph`: a step is one launch, for which nothing "
        "is counted here; a draw of more rows than the graph has takes several, and its update "
        "runs beside them. Batches are fixed subsets, or Poisson "
        f"draws of {ROWS} records expected that are filled up. `TRITON_INTERPRET=1 python -m "
        "benchmarks device-host` makes this file.",
        "",
        *_table(rows, columns),
    ]
    lines += ["", "Kernels of a step:", ""]
    for row in rows:
        counted = ", ".join(f"{n} {name}" for name, n in row["kernels"].items())
        lines.append(f"- {row['model']}: {counted}")
    lines += [
        "",
        "## Explicit gradients",
        "",
        "`DPStep.add` and `finish` of per-sample gradients with the shapes of these models, and "
        "the same as a `graphs.UpdateGraph`, whose recorded kernels a device starts at one launch.",
        "",
        *_table(steps, list(steps[0])),
    ]
    return "\n".join(lines) + "\n"

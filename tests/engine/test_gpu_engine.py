"""The engine on a GPU: the CPU's results, nothing that waits, torch's memory only.

Everything marked ``gpu`` is skipped without a device and has not yet been run on one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpkern
from dpkern.base.rng import Purpose
from dpkern.graphs import StepGraph
from dpkern.ops import noise
from dpkern.ops.testing import KEY

on_device = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


class Small(nn.Module):
    """A convolution, an embedding, a norm and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4)
        self.table, self.last = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        seen = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        return self.last(seen + self.table(ids).mean(1))


class Run:
    """A private model with its data on a device."""

    def __init__(self, device: str, batches: int = 4) -> None:
        torch.manual_seed(0)
        rows = 8 * batches
        data = torch.randn(rows, 1, 6, 6), torch.randint(9, (rows, 5)), torch.arange(rows) % 3
        self.device = device
        model = Small().to(device)
        self.model, self.optimizer, self.loader = dpkern.PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            data_loader=DataLoader(TensorDataset(*data), batch_size=8),
            sampling="fixed",
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            unsafe_seed=1,
        )

    def batches(self) -> Iterator[list[Tensor]]:
        for batch in self.loader:
            yield [t.to(self.device) for t in batch]

    def step(self, batch: list[Tensor]) -> None:
        x, ids, y = batch
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(x, ids), y).backward()
        self.optimizer.step()

    def parameters(self) -> list[Tensor]:
        return [p.detach().cpu() for p in self.model.parameters()]


@contextmanager
def waiting_refused() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class TestOnADevice:
    pytestmark = on_device

    def test_steps_are_the_cpus(self) -> None:
        runs = [Run("cpu"), Run("cuda")]
        for run in runs:
            for batch in run.batches():
                run.step(batch)
        for mine, theirs in zip(runs[1].parameters(), runs[0].parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)

    def test_a_step_waits_for_nothing(self) -> None:
        run = Run("cuda")
        for i, batch in enumerate(run.batches()):
            if i < 2:  # the first one probes and loads kernels
                run.step(batch)
                continue
            torch.cuda.synchronize()
            with waiting_refused():
                run.step(batch)

    @pytest.mark.parametrize("sampling", ["fixed", "poisson"])
    def test_a_recorded_step_is_the_step(self, sampling: str) -> None:
        def loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(module(x), y)

        found = []
        for recorded in (False, True):
            torch.manual_seed(0)
            model, engine = nn.Linear(6, 3).cuda(), dpkern.PrivacyEngine()
            data = TensorDataset(torch.randn(64, 6), torch.arange(64) % 3)
            module, optimizer, loader = engine.make_private(
                module=model,
                optimizer=torch.optim.Adam(model.parameters(), lr=0.1),
                data_loader=DataLoader(data, batch_size=8),
                sampling=sampling,
                noise_multiplier=1.0,
                max_grad_norm=1.0,
                unsafe_seed=1,
            )
            graph = StepGraph(engine, loss) if recorded else None
            for x, y in (batch for _ in range(2) for batch in loader):
                if graph is not None:
                    graph.step(x.cuda(), y.cuda())
                    continue
                optimizer.zero_grad()
                loss(module, x.cuda(), y.cuda()).backward()
                optimizer.step()
            assert graph is None or graph.replays >= 4
            found.append([p.detach().cpu() for p in model.parameters()])
        for mine, theirs in zip(*found, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)

    def test_another_stream_gives_the_same(self) -> None:
        plain, moved = Run("cuda"), Run("cuda")
        stream = torch.cuda.Stream()
        for batch in plain.batches():
            plain.step(batch)
        for batch in moved.batches():
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                moved.step(batch)
            torch.cuda.current_stream().wait_stream(stream)
        for mine, theirs in zip(moved.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine, theirs)

    def test_noise_on_two_streams_is_ordered_by_events(self) -> None:
        given = {"stream": KEY.stream(Purpose.NOISE, 1)}
        x = torch.randint(-(10**6), 10**6, (1 << 20,), dtype=torch.int32)
        want = noise.add_noise(x.clone(), **given)
        side, there = torch.cuda.Stream(), x.cuda()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            noise.add_noise(there, **given)
        torch.cuda.current_stream().wait_stream(side)
        assert torch.equal(there.cpu(), want)

    def test_all_memory_comes_from_torch(self) -> None:
        run = Run("cuda", batches=6)
        outside = []
        for batch in run.batches():
            run.step(batch)
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()
            outside.append(total - free - torch.cuda.memory_reserved())
        # What the driver takes for kernels is taken at the first steps.
        assert outside[-1] == outside[2]

    def test_autocast_keeps_16_bits(self) -> None:
        run = Run("cuda")
        batch = next(run.batches())
        x, ids, y = batch
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(run.model(x, ids), y)
        loss.backward()
        run.optimizer.step()
        assert all(bool(torch.isfinite(p).all()) for p in run.parameters())

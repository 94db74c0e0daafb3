"""The parts of the model report: the clock's stack, torch's traffic, limits, counters, energy."""

from __future__ import annotations

import errno
import os
import random
import struct
import sys

import pytest
import torch
from torch import nn

from dpkern.base.counts import CIPHER
from dpkern.reports import energy_meter, machine, roofline
from dpkern.reports.energy import energy
from dpkern.reports.roofline import Limits, Point
from dpkern.reports.trace import BACKWARD, FORWARD, REST, ROOT, StepTracer, divided, layer_of
from dpkern.reports.traffic import Traffic


def test_parts_of_a_number_add_up():
    order = random.Random(0)
    for _ in range(200):
        shares = tuple((f"l{i}", order.randint(1, 1000)) for i in range(order.randint(1, 9)))
        total = order.randint(0, 10**6)
        parts = divided(total, shares)
        assert sum(parts.values()) == total
        whole = sum(size for _, size in shares)
        assert all(abs(parts[layer] - total * size / whole) < 1 for layer, size in shares)


def test_every_moment_has_one_owner():
    times = iter([0.0, 1.0, 3.0, 7.0])
    trace = StepTracer(nn.Linear(2, 2), clock=lambda: next(times))
    with trace.running(FORWARD), trace.running(BACKWARD, shares=(("a", 1), ("b", 3))):
        pass
    assert trace.seconds == {
        (FORWARD, REST): 1.0 + 4.0,
        (BACKWARD, "a"): 0.5,
        (BACKWARD, "b"): 1.5,
    }


def test_layers_are_the_modules_that_own_parameters():
    assert layer_of("encoder.layers.0.weight") == "encoder.layers.0"
    assert layer_of("positions") == ROOT


def test_nodes_belong_to_the_innermost_module():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    trace = StepTracer(model)
    with trace.watching(), trace.running(FORWARD):
        loss = model(torch.ones(2, 3)).sum()
        trace.watch_backward(loss)
        with trace.running(BACKWARD):
            loss.backward()
    assert {layer for phase, layer in trace.seconds if phase == BACKWARD} == {"0", "2", REST}
    seen = {type(node).__name__: trace._layer_of(node) for node in _nodes(loss)}
    assert (seen["SumBackward0"], seen["TanhBackward0"]) == (REST, REST)


def _nodes(loss: torch.Tensor) -> list[object]:
    found, waiting = [], [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None:
            found.append(node)
            waiting += [following for following, _ in node.next_functions]
    return found


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (lambda x: x + x, 2 * 400),
        (lambda x: x + 1.0, 2 * 400),
        (lambda x: x.t(), 0),
        (lambda x: x.detach(), 0),
        (lambda x: x.add_(1.0), 2 * 400),
        (lambda x: x.zero_(), 400),
        (lambda x: x.copy_(torch.ones(())), 404 + 4),  # and the one is written
        (lambda x: x.sum(), 404),
        (lambda x: x @ x, 2 * 400),
        (lambda x: torch.empty_like(x), 0),
        (lambda x: x[:1].expand(10, 10) * 1.0, 400 + 400),  # views of a storage of 400 bytes
    ],
    ids=range(11),
)
def test_bytes_of_torchs_operations(work, expected):
    x = torch.zeros(10, 10)
    trace = StepTracer(nn.Linear(1, 1))
    with torch.no_grad(), Traffic(trace) as traffic, trace.running(FORWARD):
        work(x)
    assert sum(moved.bytes for moved in traffic.moved.values()) == expected


def test_products_of_torch_have_flops():
    trace = StepTracer(nn.Linear(1, 1))
    with torch.no_grad(), Traffic(trace) as traffic, trace.running(FORWARD):
        torch.ones(2, 3) @ torch.ones(3, 5)
    assert traffic.moved[FORWARD, REST].flops == 2 * 2 * 3 * 5


def test_the_roofline():
    limits = Limits(bandwidth=10.0, peak=100.0)
    assert (limits.roof(2.0), limits.roof(50.0)) == (20.0, 100.0)
    kind = {"calls": 1, "words": 0, "launches": 1}
    copy = Point(name="copy", bytes=100, flops=0, seconds=20.0, **kind)
    product = Point(name="product", bytes=10, flops=1000, seconds=12.5, **kind)
    assert (copy.share(limits), product.share(limits)) == (0.5, 0.8)
    figure = roofline.figure([copy, product], limits)
    assert [series.label for series in figure.series] == ["limits of this machine", "product"]
    assert figure.series[0].x == (5.0, 10.0, 200.0)
    assert figure.series[1].y == [1000 / 12.5 / 1e9]


def test_the_energy_of_counted_work_is_a_range():
    block = sum(CIPHER[20].values())  # 32-bit operations for 16 words
    low, high = energy(bytes=8, flops=2, words=16, rounds=20)
    assert (low.flops, high.flops) == (pytest.approx(1.69e-12), pytest.approx(4.6e-12))
    assert (low.bytes, high.bytes) == (pytest.approx(14e-12), pytest.approx(1.3e-9))
    assert (low.words, high.words) == tuple(pytest.approx(block * e) for e in (0.03e-12, 0.1e-12))
    for found in (low, high):
        assert found.total == found.flops + found.words + found.bytes


def test_energy_counters_are_read_where_they_can_be(tmp_path, monkeypatch):
    monkeypatch.setattr(energy_meter, "_gpu_counters", dict)
    assert "this machine shows none" in energy_meter.EnergyMeter(tmp_path).reason
    zone = tmp_path / "intel-rapl:0"
    zone.mkdir()
    (zone / "name").write_text("package-0\n")
    meter = energy_meter.EnergyMeter(tmp_path)
    assert "only root" in meter.reason
    assert meter.measure(lambda: None, 3) == {}
    counter = zone / "energy_uj"
    counter.write_text("1000000\n")

    def work():
        counter.write_text(str(int(counter.read_text()) + 250_000))

    meter = energy_meter.EnergyMeter(tmp_path)
    assert meter.reason == ""
    assert meter.measure(work, 4) == {"intel-rapl:0": 0.25}
    (zone / "max_energy_range_uj").write_text("3000000")
    counter.write_text("2900000")
    again = meter.measure(lambda: counter.write_text("100000"), 1)  # began again at 0
    assert again == {"intel-rapl:0": pytest.approx(0.2)}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_sees_what_was_touched_and_given_back():
    size = 32 << 20
    rise, note = machine.peak_memory(lambda: torch.ones(size // 4).sum())
    assert note == ""
    assert rise is not None
    assert 0.9 * size < rise < 2 * size
    nothing, _ = machine.peak_memory(lambda: None)
    assert nothing is not None
    assert nothing < size / 4


def test_memory_that_cannot_be_read_says_why(monkeypatch):
    monkeypatch.setattr(machine.sys, "platform", "darwin")
    done = []
    assert machine.peak_memory(lambda: done.append(1))[0] is None
    assert done == [1]
    assert "darwin" in machine.HardwareCounters().reason


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("error", "words"),
    [(errno.EACCES, "not permitted"), (errno.ENOENT, "hidden"), (errno.EMFILE, "open files")],
)
def test_hardware_counters_say_why_not(monkeypatch, error, words):
    monkeypatch.setattr(machine, "_opened", lambda *_: (-1, error))
    counters = machine.HardwareCounters()
    assert words in counters.reason
    assert counters.read() == {}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_hardware_counters_add_up_over_threads(monkeypatch):
    def opened(number: int, config: int, thread: int) -> tuple[int, int]:
        reading, writing = os.pipe()
        os.write(writing, struct.pack("q", 10 + config))
        os.close(writing)
        return reading, 0

    monkeypatch.setattr(machine, "_opened", opened)
    counters = machine.HardwareCounters()
    threads = len(os.listdir("/proc/self/task"))
    found = counters.read()
    counters.close()
    assert counters.reason == ""
    assert {name: count // threads for name, count in found.items()} == {
        "cycles": 10,
        "instructions": 11,
        "cache misses": 13,
    }

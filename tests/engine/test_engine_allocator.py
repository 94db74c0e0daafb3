"""Pages that a step frees serve the next one: once per process, and only where nobody objects."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpkern
from dpkern.base.errors import InvalidInput
from dpkern.engine import allocator, clipping

STEPS, BLOCKS, BYTES = 8, 6, 16 << 20
"""Blocks that are held at once: together far more than glibc keeps by default."""

CHILD = f"""
import ctypes, resource, sys
import torch
from dpkern.engine import allocator

def step():
    blocks = [torch.ones({BYTES} // 4) for _ in range({BLOCKS})]
    del blocks

for _ in range(3):
    step()
kept = allocator.keep_freed_pages()
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({STEPS}):
    step()
print(int(kept), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

linux = pytest.mark.skipif(
    sys.platform != "linux" or not os.confstr("CS_GNU_LIBC_VERSION"),
    reason="sets glibc's allocator",
)


def faults(**settings: str) -> tuple[bool, int]:
    """Whether the thresholds were set, and page faults of some steps in a process of their own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", CHILD]
    done = subprocess.run(
        command, env=kept | settings, stdout=subprocess.PIPE, check=True, text=True
    )
    found, count = done.stdout.split()
    return found == "1", int(count)


@pytest.fixture
def first_call() -> Iterator[None]:
    allocator.keep_freed_pages.cache_clear()
    yield
    allocator.keep_freed_pages.cache_clear()


@linux
def test_freed_pages_serve_the_next_step() -> None:
    kept, few = faults()
    assert kept
    # Each block is mapped anew: the user's setting stays. Some kernels join pages.
    left_alone, many = faults(MALLOC_MMAP_THRESHOLD_="65536")
    assert not left_alone
    assert many > 10 * (few + 10)


@linux
def test_the_allocator_can_be_refused(monkeypatch: pytest.MonkeyPatch, first_call: None) -> None:
    monkeypatch.setattr(allocator, "user_has_chosen", lambda: False)
    monkeypatch.setenv(allocator.VARIABLE, "system")
    assert not allocator.keep_freed_pages()
    monkeypatch.setenv(allocator.VARIABLE, "keep")
    allocator.keep_freed_pages.cache_clear()
    assert allocator.keep_freed_pages()


@linux
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=131072"),
    ],
)
def test_settings_of_the_user_stay(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, first_call: None
) -> None:
    monkeypatch.setenv(name, value)
    assert allocator.user_has_chosen()
    assert not allocator.keep_freed_pages()


def test_other_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch, first_call: None) -> None:
    monkeypatch.delenv(allocator.VARIABLE, raising=False)
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: object())
    assert not allocator.keep_freed_pages()


def test_an_unknown_choice_is_refused_before_training(
    monkeypatch: pytest.MonkeyPatch, first_call: None
) -> None:
    monkeypatch.setenv(allocator.VARIABLE, "never")
    model = torch.nn.Linear(3, 2)
    with pytest.raises(InvalidInput, match=r"DPKERN_ALLOCATOR: expected 'keep'.*got never"):
        dpkern.PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=None,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            expected_batch_size=4,
            sample_rate=0.1,
        )
    with pytest.raises(InvalidInput, match="DPKERN_ALLOCATOR"):
        allocator.keep_freed_pages()


@pytest.mark.parametrize("choice", [None, "", "keep", "system"])
def test_known_choices(choice: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if choice is None:
        monkeypatch.delenv(allocator.VARIABLE, raising=False)
    else:
        monkeypatch.setenv(allocator.VARIABLE, choice)
    assert allocator.allocator_choice() == (choice or "keep")


def test_the_second_step_gives_back_what_probes_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = dpkern.PrivacyEngine()
    engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=None,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=1.0,
        expected_batch_size=8,
    )
    given: list[int] = []
    monkeypatch.setattr(clipping, "give_back_freed_pages", lambda: given.append(engine.step.steps))
    for _ in range(4):
        engine.new_samples()
        F.cross_entropy(model(torch.randn(8, 4)), torch.randint(2, (8,))).backward()
        optimizer.step()
    assert given == [1]

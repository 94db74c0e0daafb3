"""The same chance in every run of the tests, test by test; another one on request.

What is secret or drawn anew in use (times of probes, keys of noise, random states that a collation
is tried in, questions of hypothesis) decides in tests whether a check of probability 1 - p speaks.
So that a change is judged by what it changes, each test has a chance of its own, which follows
from its name and from ``DPKERN_TEST_CHANCE``: a number chooses another one for all tests, and
``fresh`` leaves everything to the system, as in use.
"""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch
from hypothesis import settings

VARIABLE = "DPKERN_TEST_CHANCE"
CHANCE = os.environ.get(VARIABLE, "0")
FRESH = CHANCE == "fresh"

settings.register_profile("the same questions", derandomize=True)


class Chance:
    """Bytes in place of the system's, and seeds of all shared generators."""

    def __init__(self) -> None:
        self._bytes = random.Random()

    def start(self, name: str) -> None:
        """Begin anew for the test of this name."""
        self._bytes.seed(f"{CHANCE} {name}")
        random.seed(self._bytes.getrandbits(64))
        np.random.seed(self._bytes.getrandbits(32))
        torch.manual_seed(self._bytes.getrandbits(63))

    def urandom(self, size: int, /) -> bytes:
        """As many bytes as ``os.urandom`` would return."""
        return self._bytes.randbytes(size)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Answer for the system: in ``os``, and for ``SystemRandom`` and ``secrets`` in Python.

        A forked child asks the system: it has the bytes that its parent and its siblings will draw.
        """
        patch.setattr(os, "urandom", self.urandom)
        patch.setattr(random, "_urandom", self.urandom)
        os.register_at_fork(after_in_child=patch.undo)

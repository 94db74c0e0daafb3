"""Measure peak memory of one way of one layer, over its operands: a worker.

Usage: ``python -m benchmarks.spectral_memory '{"case": ..., "column": ..., "way": ...}'``
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import torch

from .spectral_cases import BY_NAME, Work
from .step_cases import quiet
from .step_memory import reset_peak, resident


def main(request: dict[str, str]) -> dict[str, Any]:
    """Measure two samples first, so that lazily loaded code does not count."""
    torch.set_num_threads(2)
    case = BY_NAME[request["case"]]
    getattr(Work(replace(case, batch=4)), request["way"])()
    work = Work(case)
    before = reset_peak()
    getattr(work, request["way"])()
    return {**request, "growth": resident("VmHWM") - before}


if __name__ == "__main__":
    with quiet():
        print(json.dumps(main(json.loads(sys.argv[1]))))

"""Measure in a process of its own, whose threads wait passively for each other.

Threads that spin at a barrier make a call 450 times slower where another process takes their core,
and OpenMP reads its settings once, when it is loaded. ``python -m dpkern.bench.worker``
takes the kind of a plan and the plan as its arguments, and prints a line of JSON for the
environment, and one for each row.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from typing import Any

from ..base.errors import DPKernError, InvalidInput
from . import step, suite
from .environment import environment

PASSIVE = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}


def variables() -> dict[str, str]:
    """Return the variables of a worker; what the user has set stays."""
    return {**PASSIVE, **os.environ}


Plan = suite.BenchPlan | step.StepPlan
KINDS: dict[str, tuple[type[Plan], Callable[[Any], Iterator[dict[str, Any]]]]] = {
    "ops": (suite.BenchPlan, suite.rows),
    "steps": (step.StepPlan, step.rows),
}
"""The class of each kind of plan, and what measures it."""


REFUSED = "refused plan"
"""The key of a line that says why a plan cannot be measured."""


def kind_of(plan: Plan) -> str:
    """Return the kind of a plan, a key of ``KINDS``."""
    return next(name for name, (made, _) in KINDS.items() if isinstance(plan, made))


def measured(plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield the environment, then the rows of a plan, from a process of its own.

    Raises:
        InvalidInput: the plan names what is not there; only the process could find out.
        DPKernError: the process ended early.
    """
    command = [sys.executable, "-m", __name__, kind_of(plan), json.dumps(plan.as_json())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables()) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                found = json.loads(line)
                if REFUSED in found:
                    raise InvalidInput(**found[REFUSED])
                yield found
        finally:
            if process.poll() is None and not process.stdout.closed:
                process.stdout.close()
        code = process.wait()
    if code != 0:
        raise DPKernError(
            "bench",
            expected="a worker that measures every row",
            got=f"one that ended with code {code}",
            remedy="Read its error above; choose other ops with --op to go on without this one.",
        )


def main() -> None:
    """Measure the plan of the arguments."""
    lines = sys.stdout
    with redirect_stdout(sys.stderr):  # compilers may print
        print(json.dumps(environment()), file=lines, flush=True)
        made, rows = KINDS[sys.argv[1]]
        try:
            for row in rows(made.of_json(json.loads(sys.argv[2]))):
                print(json.dumps(row), file=lines, flush=True)
        except InvalidInput as error:
            print(json.dumps({REFUSED: vars(error)}), file=lines, flush=True)


if __name__ == "__main__":
    main()

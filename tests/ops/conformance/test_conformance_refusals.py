"""What a signature does not allow is refused by name, and nothing is written."""

from __future__ import annotations

import pytest

from dpkern.base.dispatch import OPS
from dpkern.base.errors import InvalidInput
from dpkern.bench.cases import FACTS
from dpkern.bench.outcome import bits
from tests.ops.conformance.bad import bad_arguments
from tests.ops.conformance.calls import cases


@pytest.mark.parametrize("name", sorted(OPS))
def test_bad_arguments_are_refused_by_name(name: str) -> None:
    wrong = []
    found = list(cases(OPS[name], FACTS[name]))
    first = next((c for c in found if c.kind is not None and c.kind.is_floating_point), found[0])
    for parameter, (what, where, value) in bad_arguments(first):
        args = first.arguments() | {parameter: value}
        others = {key: bits(arg) for key, arg in args.items() if key != parameter}
        try:
            OPS[name](**args)
        except InvalidInput as error:
            named = error.name == where or error.name.startswith((f"{where}[", f"{where}."))
            whole = str(error).startswith(f"{error.name}: expected ") and error.remedy[-1:] == "."
            if not (named and whole):
                wrong.append(f"{where}, {what}: {error}")
        except Exception as error:  # noqa: BLE001
            wrong.append(f"{where}, {what}: {type(error).__name__}: {error}")
        else:
            wrong.append(f"{where}, {what}: accepted")
        wrong += [
            f"{where}, {what}: {key} is written" for key in others if bits(args[key]) != others[key]
        ]
    assert not wrong, "\n".join([name, *wrong])

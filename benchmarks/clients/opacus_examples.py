"""Run Opacus' example scripts with ``dpkern.compat.opacus`` in the place of ``opacus``.

    pip install -r benchmarks/clients/requirements.txt
    pip download --no-deps --no-binary :all: opacus==1.6.0 && tar xf opacus-1.6.0.tar.gz
    python -m benchmarks.clients.opacus_examples opacus-1.6.0/examples

No script is part of this repository. Each runs twice, on generated data: with its imports changed
and nothing else, and with the edits that ``EDITS`` lists where dpkern refuses what it does. The
reasons stand beside them, and in ``benchmarks/results/opacus-examples.md``.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

RESULTS = Path(__file__).parent.parent / "results" / "opacus-examples.md"
RUNNER = "benchmarks.clients.opacus_world"
MINUTES = 5


@dataclass(frozen=True)
class Script:
    """A script, how it is called, and what has to be changed besides its imports."""

    name: str
    arguments: str
    refused: str = ""
    """What dpkern says to it as it stands; empty where it runs."""
    edits: tuple[tuple[str, str], ...] = ()
    why: str = ""
    environment: dict[str, str] = field(default_factory=dict)


CPU = "--device cpu"
SCRIPTS = (
    Script("mnist.py", f"{CPU} -n 1 --lr 0.5 --data-root data"),
    Script(
        "cifar10.py", f"{CPU} --epochs 1 --batch-size 64 --workers 0 --sigma 1.0 -c 1.0 "
        "--data-root data",
    ),
    Script(
        "cifar10.py", f"{CPU} --epochs 1 --batch-size 64 --workers 0 --sigma 1.0 -c 1.0 "
        "--data-root data --clip_per_layer",
    ),
    Script(
        "char-lstm-classification.py",
        f"{CPU} --data-root names --epochs 1 --batch-size 64",
        "masked_padding=True",
        (("[elem[0] for elem in batch], batch", "[nn.functional.pad(elem[0], (0, 12 - len("
          "elem[0]))) for elem in batch], batch"),),
        "names are padded to the longest of their batch, and the network reads the last place: one "
        "long name changes what all others contribute; padded to one length",
    ),
    Script(
        "imdb.py",
        f"{CPU} -n 1 --workers 0 --data-root data",
        "masked_padding=True",
        (('elem["input_ids"] for elem', 'nn.functional.pad(elem["input_ids"], (0, 16 - len('
          'elem["input_ids"]))) for elem'),),
        "reviews are padded to the longest of their batch, and the mean runs over the padding; "
        "padded to one length",
    ),
    Script(
        "dcgan.py",
        f"{CPU} --data-root data --workers 0 --epochs 1 --ndf 8 --ngf 8 --batch-size 32 --outf .",
        "engine.public()",
        (
            ("netD(fake.detach())", "netD(privacy_engine.adopt(fake.detach()))"),
            ("output_g = netD(fake)\n        errG = criterion(output_g, label_g)\n"
             "        errG.backward()",
             "with privacy_engine.public():\n            output_g = netD(fake)\n"
             "            errG = criterion(output_g, label_g)\n            errG.backward()"),
        ),
        "where a tensor comes from that no loader yielded is not known: a fake, or a record of "
        "another batch. Fake i is adopted, and clipped together with record i, as Opacus does; the "
        "generator's pass holds no record and stands in engine.public()",
    ),
    Script(
        "mnist_lightning.py",
        "",
        why="(the source of the training loader, its other imports and its metric are of Lightning "
        "1: with Lightning 2 it runs with no library, and the sweep stands in for them)",
        environment={"LIGHTNING_VANILLA": "true"},
    ),
)  # fmt: skip


def changed(text: str, edits: Sequence[tuple[str, str]] = ()) -> str:
    """Return a script that imports from the shim, with some edits."""
    text = re.sub(r"^(from|import) opacus\b", r"\1 dpkern.compat.opacus", text, flags=re.MULTILINE)
    for old, new in edits:
        if text.count(old) != 1:
            raise SystemExit(f"expected once, found {text.count(old)} times: {old!r}")
        text = text.replace(old, new)
    return text


def run(script: Script, text: str) -> tuple[bool, str]:
    """Run a script among generated data; return whether it ended well, and its last words."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / script.name).write_text(text)
        (place / "names").mkdir()
        for number, letters in enumerate(("abc", "klm", "xyz")):
            names = [letters[i % 3] * (3 + i % 5) + letters for i in range(60)]
            (place / "names" / f"language{number}.txt").write_text("\n".join(names))
        path = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-m", RUNNER, script.name, *script.arguments.split()],
            cwd=place,
            env={**os.environ, **script.environment, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=60 * MINUTES,
            check=False,
        )
    said = done.stdout + done.stderr
    kept = [line.strip() for line in re.split(r"[\r\n]+", said) if line.strip()]
    if done.returncode:
        return False, kept[-1]
    told = [line for line in kept if "ε" in line or "epsilon" in line]
    return True, told[-1] if told else kept[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("only", nargs="*", help="parts of names")
    given = parser.parse_args()
    rows, wrong = [], 0
    for script in SCRIPTS:
        if given.only and not any(part in script.name for part in given.only):
            continue
        text = (given.folder / script.name).read_text()
        well, said = run(script, changed(text))
        print(f"{script.name}, imports changed: {'runs' if well else 'stops'}: {said}", flush=True)
        expected = well if not script.refused else not well and script.refused in said
        outcome = "runs" if well else f"refused: `{said[:200]}`"
        if script.edits:
            well, said = run(script, changed(text, script.edits))
            print(f"{script.name}, edits: {said}", flush=True)
            expected = expected and well
            lines = f"{len(script.edits)} edit" + "s" * (len(script.edits) > 1)
            outcome += f"<br>with {lines}: {'runs' if well else 'STOPS'}"
        wrong += not expected
        said = " ".join(re.sub(r"\d+%\|.*", "", said).split())[-120:] if well else ""
        called = script.arguments.replace(CPU, "").strip()
        rows.append(f"| `{script.name} {called}` | {outcome} | {said} | {script.why} |")
    if not given.only:
        versions = ", ".join(f"{n} {metadata.version(n)}" for n in ("opacus", "torch", "lightning"))
        RESULTS.write_text(
            "# Opacus' example scripts\n\nRun on generated data with the imports changed to "
            "`dpkern.compat.opacus`, and with edits where dpkern refuses\nwhat they do. "
            f"`python -m benchmarks.clients.opacus_examples FOLDER` makes this page ({versions}).\n"
            "\n| script | outcome | last words | why |\n|---|---|---|---|\n"
            + "\n".join(rows)
            + "\n"
        )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

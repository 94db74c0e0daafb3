"""Run Opacus' public tests with ``dpkern.compat.opacus`` in the place of ``opacus``.

    pip install -r benchmarks/clients/requirements.txt
    python -m benchmarks.clients.opacus_tests [FOLDER]

FOLDER is the folder ``opacus/tests`` of Opacus' sources or of an installed Opacus (the default). No
test is part of this repository. Each file runs twice, with Opacus itself and with the shim, and
every test that the shim does not pass is listed with its reason in
``benchmarks/results/opacus-tests``. Exit code 1 if one fails for a reason that is not known.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "results" / "opacus-tests"
MINUTES = 20
"""Longest time of one file."""

PASS, INTERNAL, REFUSED, DIFFERS = "passes", "internal", "refused", "differs"
ABSENT, GAP = "not run here", "GAP"
MEANINGS = {
    PASS: "with Opacus' name for dpkern's object",
    INTERNAL: "the test is of a part of Opacus that scripts do not import, and the shim leaves out",
    REFUSED: "dpkern refuses on purpose, with a typed error",
    DIFFERS: "the test looks at something that dpkern does in another way, on purpose",
    ABSENT: "skipped by the test itself (GPUs, several processes), or it fails with Opacus too",
    GAP: "to be mended",
}

REASONS: tuple[tuple[str, str, str, str], ...] = (
    ("", "VALIDATORS|FIXERS", INTERNAL, "uses the registry of rules by layer class"),
    (
        "",
        "grad_sample|summed_grad|signal_skip_step",
        DIFFERS,
        "reads per-sample gradients or skips steps of DPOptimizer: sums are made without them",
    ),
    ("", "_module'", DIFFERS, "unwraps the module: make_private gives the module itself back"),
    (
        "compare_to_vanilla|data_seed_consistency",
        "AssertionError",
        DIFFERS,
        "expects the loader's own order with poisson_sampling=False: batches are shuffled secretly",
    ),
    (
        "deterministic_run",
        "AssertionError",
        DIFFERS,
        "expects torch.manual_seed to fix batches and noise: they come from a secure generator",
    ),
    (
        "validator_weight_update_check",
        "module only",
        DIFFERS,
        "is refused as with Opacus; the test asks for Opacus' words",
    ),
    ("batch_memory_manager", "AssertionError", DIFFERS, "len() counts logical batches"),
    (
        "privacy_engine_zero_grad",
        "not raised",
        DIFFERS,
        "expects an error without zero_grad(): gradients of released samples are forgotten anyway",
    ),
    (
        "accountants_test.*prv",
        "AssertionError",
        DIFFERS,
        "the certified epsilon is smaller than Opacus' approximation, by less than 0.2 %",
    ),
    (
        "accountants_test.*rdp",
        "AssertionError",
        DIFFERS,
        "noise on a lattice costs 0.01 % more; the test asks for equality to 4 or 7 digits",
    ),
    ("module_validator.*test_fix\\b", "greater than 0", DIFFERS, "expects a log of replacements"),
    ("fix_bn_with_args", "8 != 16", DIFFERS, "another number of groups: two channels in a group"),
    (
        "non_learnable_bn",
        "not true",
        REFUSED,
        "batch normalisation without parameters mixes samples too",
    ),
    (
        "validate_training_mode",
        "not false",
        DIFFERS,
        "expects a refusal of modules in eval(): they may be trained in either mode",
    ),
    (
        "CustomLayer.*noise_level",
        "delta",
        DIFFERS,
        "squares of about a hundred draws within 15 %, which fails at random: no seed fixes them",
    ),
    ("", "TooLong", ABSENT, "takes longer than a minute on this machine"),
)
"""Test, error (patterns), verdict and reason; the first that fits counts."""


def classify(test: str, row: Mapping[str, Any], peer: str | None) -> tuple[str, str]:
    """Return the verdict on one test with the shim, and its reason."""
    if row["outcome"] == "passed":
        return PASS, ""
    if row["outcome"] == "skipped":
        return ABSENT, "skipped"
    # Without places in memory and in temporary folders.
    says = re.sub(r" at 0x[0-9a-f]+|/\S*/(?=\w+\.py)", "", row.get("says", ""))
    kinds = row.get("kinds", [])
    if "NotInShim" in kinds:
        return INTERNAL, f"uses {says}"
    for pattern, error, verdict, reason in REASONS:
        if re.search(pattern, test) and re.search(error, f"{kinds[:1]} {says}"):
            return verdict, reason
    if "DPKernError" in kinds:
        return REFUSED, says
    if peer in ("failed", "skipped"):
        return ABSENT, f"with Opacus itself: {peer}"
    return GAP, f"{kinds[0] if kinds else 'error'}: {says}"


def run(folder: Path, *, peer: bool) -> dict[str, dict[str, Any]]:
    """Return the outcomes of the tests in a folder, by file and name."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as made:
        # Under another name: ``opacus.tests`` would import Opacus itself.
        shutil.copytree(folder, Path(made) / "tests", ignore=shutil.ignore_patterns("*.pyc"))
        for file in sorted((Path(made) / "tests").rglob("*_test.py")):
            outcomes = Path(made) / "outcomes.json"
            outcomes.unlink(missing_ok=True)
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
            command += ["-p", "benchmarks.clients.opacus_shim", f"--outcomes={outcomes}"]
            command += [*(["--opacus"] if peer else []), f"--rootdir={made}", str(file)]
            name = str(file.relative_to(Path(made) / "tests"))
            try:
                subprocess.run(command, timeout=60 * MINUTES, capture_output=True, check=False)
            except subprocess.TimeoutExpired:
                found[name] = {"outcome": "failed", "says": f"longer than {MINUTES} minutes"}
            rows = json.loads(outcomes.read_text()) if outcomes.exists() else {}
            found |= {test.removeprefix("tests/"): row for test, row in rows.items()}
            print(f"{name}: {dict(Counter(r['outcome'] for r in rows.values()))}", flush=True)
    return found


def judged(
    shim: Mapping[str, Mapping[str, Any]], peer: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, str]]:
    """Return a row for each test; a file that cannot be imported lends its tests its reason."""
    rows = []
    for test in sorted({*shim, *peer}):
        file = test.partition("::")[0]
        if "::" not in test and any(other.startswith(f"{test}::") for other in peer):
            continue
        with_opacus = peer.get(test, {}).get("outcome")
        ours = shim.get(test) or shim.get(file)
        if ours is None:
            verdict, reason = GAP, "it was not collected"
        else:
            verdict, reason = classify(test, ours, with_opacus)
        rows.append(
            {"test": test, "opacus": with_opacus or "-", "verdict": verdict, "reason": reason}
        )
    return rows


def page(rows: Sequence[Mapping[str, str]], versions: Mapping[str, str]) -> str:
    """Return the results as Markdown: counts, then tests that do not pass by their reason."""
    counts = Counter(row["verdict"] for row in rows)
    lines = [
        "# Opacus' public tests through `dpkern.compat.opacus`",
        "",
        f"{len(rows)} tests, {sum(r['opacus'] == 'passed' for r in rows)} of which pass with "
        "Opacus itself on this machine (CPU, two examples per property).",
        "`python -m benchmarks.clients.opacus_tests` makes this page with",
        ", ".join(f"{name} {version}" for name, version in versions.items()) + ".",
        "",
        "| verdict | tests | meaning |",
        "|---|---|---|",
        *(f"| {v} | {counts[v]} | {MEANINGS[v]} |" for v in MEANINGS if counts[v]),
        "",
        "| file | verdict | tests | reason |",
        "|---|---|---|---|",
    ]
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row["verdict"] != PASS:
            file, _, name = row["test"].partition("::")
            names = grouped.setdefault((file, row["verdict"], row["reason"]), [])
            names.append(name.rpartition("::")[2] or "all")
    for (file, verdict, reason), names in grouped.items():
        listed = ", ".join(f"{n} ({k})" if k > 1 else n for n, k in Counter(names).items())
        said = " ".join(reason.split()).replace("|", "\\|").replace("<", "&lt;")[:400]
        lines.append(f"| {file} | {verdict} | {listed} | {said} |")
    return "\n".join(lines) + "\n"


def write(shim: Mapping[str, Any], peer: Mapping[str, Any]) -> list[dict[str, str]]:
    """Write both result files, and return their rows."""
    rows = judged(shim, peer)
    versions = {name: metadata.version(name) for name in ("opacus", "torch")}
    data = {"versions": versions, "rows": rows}
    RESULTS.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(page(rows, versions))
    return rows


def installed() -> Path:
    """Return the folder of the tests of the installed Opacus."""
    spec = importlib.util.find_spec("opacus")
    if spec is None or spec.origin is None:
        raise SystemExit("opacus is not installed: give the folder of its tests")
    return Path(spec.origin).parent / "tests"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Run Opacus' tests through the shim.")
    parser.add_argument("folder", nargs="?", type=Path, help="default: the installed Opacus'")
    folder = parser.parse_args(arguments).folder or installed()
    rows = write(run(folder, peer=False), run(folder, peer=True))
    print(dict(Counter(row["verdict"] for row in rows)))
    return int(any(row["verdict"] == GAP for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

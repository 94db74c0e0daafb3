"""Sweep real architectures: is one private step's capture right, or refused, on each of them?

    pip install -r benchmarks/clients/requirements.txt
    python -m benchmarks.clients.architectures [part of a name ...]

``right`` means that every sample's norm and every clipped sum equal those of ordinary autograd, one
sample at a time. ``WRONG`` and ``crash`` must not happen. A model with batch normalisation goes
through ``dpkern.fix`` first. Opacus gets the same model, and its per-sample gradients are compared
with the same. Each row goes to ``benchmarks/results/architectures``.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dpkern
from dpkern.base.errors import DPKernError
from dpkern.engine.capture import Capture
from dpkern.engine.clipping import clipped_sums
from dpkern.engine.parameter import tensors_in
from dpkern.engine.validate import check
from dpkern.ops import clip
from dpkern.privacy.mechanisms import DPSGD

from .catalogue import Architecture, B, Inputs, architectures, available
from .time_limit import TooLong, time_limit

RESULTS = Path(__file__).parent.parent / "results" / "architectures"
TOLERANCE = {torch.float64: 1e-5, torch.float32: 5e-3}
"""Largest relative error; some models compute parts in float32 whatever their dtype."""
SECONDS = 120


@dataclasses.dataclass
class Row:
    """What happened to one architecture."""

    library: str
    name: str
    verdict: str
    says: str = ""
    fixed: bool = False
    parameters: int = 0
    opacus: str = ""
    """What Opacus' hooks make of the same model; empty where Opacus is not installed."""
    opacus_says: str = ""


def outputs(tree: Any) -> list[Tensor]:
    """The floating-point outputs that have one row, or several, per sample."""
    if dataclasses.is_dataclass(tree) and not isinstance(tree, (type, Mapping)):
        tree = [getattr(tree, field.name) for field in dataclasses.fields(tree)]
    found = [t for t in tensors_in(tree) if t.dim() and t.is_floating_point() and t.requires_grad]
    return found[:1]


def losses(tree: Any, batch: int) -> Tensor:
    """``[B]`` losses, each of which depends on its own rows only."""
    total = torch.zeros(batch, dtype=torch.float64)
    for output in outputs(tree):
        flat = output.reshape(batch, -1).double()
        weights = torch.linspace(0.5, 2.0, flat.shape[1], dtype=torch.float64)
        total = total + (flat * weights).sin().sum(1) / math.sqrt(flat.shape[1])
    return total


def call(model: nn.Module, inputs: Inputs) -> Any:
    return model(inputs["x"]) if list(inputs) == ["x"] else model(**inputs)


def prepare(architecture: Architecture, dtype: torch.dtype) -> tuple[nn.Module, Inputs]:
    """The model without dropout and without zeros behind which gradients hide, and its inputs."""
    torch.manual_seed(0)
    model = architecture.build().to(dtype).train()
    for part in model.modules():
        for name in ("p", "drop_prob", "drop_rate", "dropout_prob"):
            if isinstance(getattr(part, name, None), float):  # dropout, stochastic depth
                setattr(part, name, 0.0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and not parameter.any():
                parameter.normal_(std=0.1)
    inputs = architecture.inputs()
    cast = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    return model, cast


def one_by_one(model: nn.Module, inputs: Inputs) -> list[list[Tensor]]:
    """Each sample's gradients by ordinary autograd."""
    model = copy.deepcopy(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for b in range(B):
        model.zero_grad()
        losses(call(model, {k: v[b : b + 1] for k, v in inputs.items()}), 1).sum().backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]
        rows.append(grads)
    return rows


def captured(model: nn.Module, inputs: Inputs, bound: float) -> clip.ClipResult:
    """The engine's norms and clipped sums."""
    capture = Capture(model, loss_reduction="sum")
    mechanism = DPSGD(noise_multiplier=1.0, max_grad_norm=bound, arithmetic="float")
    plan = mechanism.plan([tuple(p.shape) for p in capture.parameters])
    capture.attach()
    try:
        losses(call(model, inputs), B).sum().backward()
        result = clipped_sums(capture, plan)
    finally:
        capture.detach()
    assert isinstance(result, clip.ClipResult)
    return result


def error_of(result: clip.ClipResult, rows: Sequence[Sequence[Tensor]], bound: float) -> float:
    """The largest relative error of norms and clipped sums."""
    squares = torch.stack([sum(g.double().square().sum() for g in row) for row in rows])
    norms = squares.sqrt()
    factors = (bound * clip.SLACK / norms).clamp(max=1.0)
    off = float(((result.norms.double() - norms).abs() / norms).max())
    scale = float((factors * norms).max())
    for index, mine in enumerate(result.sums):
        wanted = sum(c * row[index].double() for c, row in zip(factors, rows, strict=True))
        off = max(off, float((mine.double() - wanted).norm()) / scale)
    return off


def of_opacus(
    model: nn.Module, inputs: Inputs, rows: Sequence[Sequence[Tensor]], tolerance: float
) -> tuple[str, str]:
    """What Opacus' hooks make of the model, and what they say."""
    if not available("opacus"):
        return "", ""
    from opacus import GradSampleModule
    from opacus.validators import ModuleValidator

    model = copy.deepcopy(model)
    try:
        ModuleValidator.validate(model, strict=True)
        wrapped = GradSampleModule(model, batch_first=True, loss_reduction="sum")
        losses(call(wrapped, inputs), B).sum().backward()
        parameters = [p for p in model.parameters() if p.requires_grad]
        off = 0.0
        for index, parameter in enumerate(parameters):
            truth = torch.stack([row[index] for row in rows]).double()
            mine = parameter.grad_sample
            mine = torch.zeros_like(truth) if mine is None else mine.double()
            if mine.shape != truth.shape:
                raise TypeError(f"per-sample gradients {list(mine.shape)}, not {list(truth.shape)}")
            off = max(off, float((mine - truth).norm() / truth.norm().clamp(min=1e-9)))
    except TooLong:
        raise
    except Exception as error:  # noqa: BLE001 - Opacus raises ordinary errors
        last = traceback.extract_tb(error.__traceback__)[-1].filename
        verdict = "refused" if "/opacus/" in last else "crash"
        return verdict, _short(error)[:200]
    return ("right", f"{off:.1e}") if off <= tolerance else ("WRONG", f"off by {off:.1e}")


def needs_fix(model: nn.Module) -> bool:
    return any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in model.modules())


def examine(architecture: Architecture) -> Row:
    row = Row(architecture.library, architecture.name, "crash")
    dtype = torch.float64
    try:
        model, inputs = prepare(architecture, dtype)
        with torch.no_grad():
            call(copy.deepcopy(model).eval(), inputs)
    except (RuntimeError, TypeError):
        dtype = torch.float32
        model, inputs = prepare(architecture, dtype)
    row.parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    row.fixed = needs_fix(model)
    if row.fixed:
        model = dpkern.fix(model)
    try:
        check(model)
    except DPKernError as error:
        return dataclasses.replace(row, verdict="refused", says=_short(error))
    try:
        rows = one_by_one(model, inputs)
        bound = float(
            torch.stack([sum(g.double().square().sum() for g in r) for r in rows]).median().sqrt()
        )
    except TooLong:
        raise
    except Exception as error:  # noqa: BLE001 - the model itself cannot run on one sample
        return dataclasses.replace(row, verdict="unusable", says=_short(error))
    row.opacus, row.opacus_says = of_opacus(model, inputs, rows, TOLERANCE[dtype])
    try:
        result = captured(model, inputs, bound)
    except DPKernError as error:
        return dataclasses.replace(row, verdict="refused", says=_short(error))
    off = error_of(result, rows, bound)
    if not off <= TOLERANCE[dtype]:
        return dataclasses.replace(row, verdict="WRONG", says=f"off by {off:.1e}")
    return dataclasses.replace(row, verdict="right", says=f"{off:.1e}")


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:600]


def guarded(architecture: Architecture, *, verbose: bool) -> Row:
    """``examine``, with every other error as a crash."""
    try:
        with time_limit(SECONDS):
            return examine(architecture)
    except Exception as error:  # noqa: BLE001 - the sweep goes on, and counts it
        if verbose:
            traceback.print_exc()
        says = f"{type(error).__name__}: {_short(error)}"
        return Row(architecture.library, architecture.name, "crash", says)


def page(rows: Sequence[Row], versions: Mapping[str, str]) -> str:
    """The results as Markdown."""
    libraries = list(dict.fromkeys(row.library for row in rows))
    counts = {lib: Counter(r.verdict for r in rows if r.library == lib) for lib in libraries}
    verdicts = [
        v
        for v in ("right", "refused", "WRONG", "crash", "unusable")
        if any(r.verdict == v for r in rows)
    ]
    beside = Counter(row.opacus for row in rows if row.opacus)
    lines = [
        "# Real architectures",
        "",
        "One private step's capture on small configurations of real architectures, with",
        "random weights. *Right*: norms and clipped sums equal those of ordinary autograd, one",
        "sample at a time. Opacus' hooks get the same model, after `dpkern.fix` where ours does.",
        "`python -m benchmarks.clients.architectures` makes this page with",
        ", ".join(f"{name} {version}" for name, version in versions.items()) + ".",
        "",
        "| library | " + " | ".join(verdicts) + " |",
        "|---|" + "---|" * len(verdicts),
        *(
            f"| {lib} | " + " | ".join(str(counts[lib][v]) for v in verdicts) + " |"
            for lib in libraries
        ),
        "",
        f"Opacus' hooks on {sum(beside.values())} of them: "
        + ", ".join(f"{count} {verdict}" for verdict, count in sorted(beside.items()))
        + ".",
        "",
        "| architecture | what happens | Opacus |",
        "|---|---|---|",
    ]
    for row in rows:
        says = "" if row.verdict == "right" else ": " + row.says[:300].replace("|", "\\|")
        fixed = " after `dpkern.fix`" if row.fixed else ""
        peer = row.opacus + (f": {row.opacus_says}" if row.opacus == "WRONG" else "")
        lines.append(f"| {row.library} {row.name} | {row.verdict}{fixed}{says} | {peer} |")
    return "\n".join(lines) + "\n"


def main(names: Sequence[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows: list[Row] = []
    for architecture in architectures():
        if names and not any(
            n.lower() in f"{architecture.library}/{architecture.name}".lower() for n in names
        ):
            continue
        start = time.perf_counter()
        row = guarded(architecture, verbose=bool(names))
        took = time.perf_counter() - start
        who = f"{row.library:13s} {row.name:40s} {took:5.1f}s"
        print(f"{who} {row.verdict}: {row.says}", flush=True)
        rows.append(row)
        write(row)
    print(dict(Counter(row.verdict for row in rows)))


def write(new: Row) -> None:
    """Put one row in its place among the committed ones."""
    path = RESULTS.with_suffix(".json")
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    known = {(row["library"], row["name"]): Row(**row) for row in old}
    known[new.library, new.name] = new
    rows = [known[key] for a in architectures() if (key := (a.library, a.name)) in known]
    libraries = ["torch", *dict.fromkeys(row.library for row in rows)]
    versions = {library: metadata.version(library) for library in libraries}
    data = {"versions": versions, "rows": [dataclasses.asdict(row) for row in rows]}
    made = path.with_suffix(".part")
    made.write_text(json.dumps(data, indent=1) + "\n")
    made.replace(path)  # another sweep may read it
    RESULTS.with_suffix(".md").write_text(page(rows, versions))


if __name__ == "__main__":
    main(sys.argv[1:])

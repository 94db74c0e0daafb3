"""``dpkern bench``: time ops beside plain torch, with a check before every number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ..base.errors import InvalidInput
from ..base.exit_codes import CHECK_FAILED
from ..base.json import dumps
from ..base.validate import choice, require, that
from ..bench import compare as compare_revisions
from ..bench import history, results, revision, step, suite, text, worker
from ..bench import sweep as growth
from ..bench.case import SIZES
from ..bench.environment import environment
from ..bench.measure import CACHES, identity
from ..bench.paired import SLOWER
from ..engine.demo.models import ALL_MODELS
from ..engine.named import NAMES
from ..reports import files

app = typer.Typer(
    help="Time ops beside plain torch: checked first, paired samples, a guard against noise.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

Ops = Annotated[
    list[str] | None,
    typer.Option("--op", help="Op or stem, such as ghost; several with commas. Default: all."),
]
Quick = Annotated[bool, typer.Option("--quick", help="Stop early: a look, no evidence.")]


@app.callback(invoke_without_command=True)
def run(
    context: typer.Context,
    op: Ops = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(help="Backends, with commas. Default: all that are present."),
    ] = None,
    size: Annotated[
        list[str] | None, typer.Option(help=f"Some of {', '.join(SIZES)}, with commas.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="Other sizes of the cases, such as B=64,d=512.")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="Such as float32,float64. Default: the op's usual one.")
    ] = None,
    threads: Annotated[
        list[str] | None,
        typer.Option(help="Such as 1,2 or 1..4.", show_default="1 and all cores; --quick: 1"),
    ] = None,
    cache: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Some of {', '.join(CACHES)}: the same memory again and again, or caches "
            "overwritten before each call.",
            show_default="warm",
        ),
    ] = None,
    isa: Annotated[
        list[str] | None,
        typer.Option(
            help="Instruction sets of the compiled CPU kernels, such as avx2,avx512vbmi.",
            show_default="the best one",
        ),
    ] = None,
    quick: Quick = False,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Time torch.compile of every formulation too.")
    ] = False,
    seconds: Annotated[
        float | None, typer.Option(help="Most time of a row's samples.", min=0.01)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Time whole training steps instead: package.module:callable, which takes no "
            "arguments and returns a model, or a model and an example input; or one of "
            f"{', '.join(ALL_MODELS)}."
        ),
    ] = None,
    mechanism: Annotated[
        list[str] | None,
        typer.Option(
            help=f"With --model: some of {', '.join(NAMES)}, with commas.", show_default="dpsgd"
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="With --model: samples of a step.", show_default="32")
    ] = None,
    row_shape: Annotated[
        str | None,
        typer.Option(
            help="With --model: shape of one sample, such as 1,28,28.", show_default="the example's"
        ),
    ] = None,
    no_peers: Annotated[
        bool, typer.Option("--no-peers", help="With --model: no other libraries beside.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="JSON file of the result; its table goes beside it.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with --out: measure what is missing, was disturbed or has no number.",
        ),
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """Time ops, or whole steps of a model (--model), beside plain torch.

    Checked first, paired samples, a guard against noise.
    """
    if context.invoked_subcommand is not None:
        refuse_options(context)
        return
    counts = tuple(count for word in listed(threads) for count in span("threads", word))
    if model is not None:
        for_ops = ("op", "backend", "size", "shape", "dtype", "cache", "isa", "compiled", "resume")
        refuse_together("--model", for_ops, context)
        steps = step.StepPlan(
            model=model,
            mechanisms=listed(mechanism) or ("dpsgd",),
            batch=32 if batch is None else batch,
            row_shape=None
            if row_shape is None
            else tuple(number("row_shape", word) for word in listed([row_shape])),
            threads=counts or (1,),
            peers=not no_peers,
            quick=quick,
            seconds=seconds,
        )
        step.check_plan(steps)
        if out is not None:
            results.check_place(out, False)
        published(measure_steps(steps, Console(stderr=json, soft_wrap=True)), out, json)
        return
    for_steps = ("mechanism", "batch", "row_shape", "no_peers")
    refuse_together("no --model", for_steps, context)
    sizes = listed(size) or (SIZES[:2] if quick else SIZES)
    plan = suite.BenchPlan(
        ops=listed(op),
        backends=listed(backend),
        sizes=sizes,
        shape=None if shape is None else shapes(shape),
        dtypes=listed(dtype),
        threads=counts or ((1,) if quick else suite.torch_threads_here()),
        caches=listed(cache) or ("warm",),
        isas=listed(isa),
        quick=quick,
        compiled=compiled,
        seconds=seconds,
    )
    suite.check_plan(plan)
    console = Console(stderr=json, soft_wrap=True)
    if resume:
        that(
            out is not None,
            "resume",
            "the file to go on with",
            "no --out",
            "Name the result: --out run.json --resume.",
        )
        assert out is not None
        published(resumed(plan, out, console), out, json)
        return
    if out is not None:
        results.check_place(out, plan.complete)
    published(measure(plan, console, out), out, json)


def published(content: dict[str, Any], out: Path | None, json: bool) -> None:
    """Write a result where it is wanted; exit code 1 if anything was wrong."""
    if out is not None:
        results.write(out, content)
    if json:
        print(dumps(content), flush=True)
    if any("wrong" in row for row in content["rows"]):
        raise typer.Exit(CHECK_FAILED)


def refuse_together(what: str, names: Sequence[str], context: typer.Context) -> None:
    """Refuse options that mean nothing beside another one, or without it.

    Raises:
        InvalidInput: one of them was given.
    """
    given = [
        f"--{name.replace('_', '-')}"
        for name in names
        if context.params.get(name) not in (None, False, [], ())
    ]
    that(
        not given,
        "bench",
        f"options that go with {what}",
        ", ".join(given),
        "--model times whole steps, --op and the like single ops: choose one.",
    )


def refuse_options(context: typer.Context) -> None:
    """Refuse options before a command, which it would not see.

    Raises:
        InvalidInput: there are some.
    """
    given = [
        f"--{name}" for name, value in context.params.items() if value not in (None, False, [], ())
    ]
    that(
        not given,
        "bench",
        f"options of {context.invoked_subcommand} behind it",
        ", ".join(given),
        f"Write dpkern bench {context.invoked_subcommand} first, and its options after that.",
    )


@app.command()
def compare(
    old: Annotated[str, typer.Argument(help="Commit, branch or tag; . is the tree as it is.")],
    new: Annotated[str, typer.Argument(help="As OLD.")] = ".",
    op: Ops = None,
    backend: Annotated[str, typer.Option(help="Backend that both run.")] = "cpu",
    size: Annotated[
        list[str] | None, typer.Option(help=f"Some of {', '.join(SIZES)}, with commas.")
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads of both.", min=1)] = 1,
    pairs: Annotated[
        int, typer.Option(help="Pairs of processes; a verdict needs all of them.", min=1)
    ] = 3,
    quick: Quick = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """Compare two revisions case by case; exit code 1 if anything became slower, or is wrong.

    Builds what is not built yet (build/bench), then runs today's cases in both, in turns.
    """
    plan = suite.BenchPlan(
        ops=listed(op),
        backends=(backend,),
        sizes=listed(size) or ("typical",),
        threads=(threads,),
        quick=quick,
    )
    suite.check_plan(plan)
    before, after = revision.ready(old), revision.ready(new)
    rows = compare_revisions.compared(before, after, plan, pairs)
    if json:
        sides = {"old": before.commit, "new": after.commit}
        content = results.result(environment(), plan.as_json(), False, rows)
        print(dumps({**content, "kind": "compare", "revisions": sides}), flush=True)
    else:
        print("\n".join(compare_revisions.lines(rows)), flush=True)
    if any(row["verdict"] == SLOWER or compare_revisions.is_wrong(row) for row in rows):
        raise typer.Exit(CHECK_FAILED)


@app.command()
def sweep(
    op: Annotated[str, typer.Argument(help="Op or stem; several with commas.")],
    axis: Annotated[str, typer.Option(help="A size of the op, such as B, or threads.")],
    values: Annotated[str, typer.Option(help="Such as 32,64,128,256.")],
    backend: Annotated[
        list[str] | None,
        typer.Option(help="Backends, with commas. Default: all that are present."),
    ] = None,
    size: Annotated[str, typer.Option(help="Case whose other sizes stay.")] = "typical",
    threads: Annotated[int, typer.Option(help="Threads, if they are not the axis.", min=1)] = 1,
    quick: Quick = False,
    format: Annotated[
        str, typer.Option("--format", help=f"One of {', '.join(files.FORMATS)}.")
    ] = "text",
    out: Annotated[
        Path | None, typer.Option(help="File of the report.", show_default="standard output")
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(help="Write the picture as SVG and PNG to this folder too.")
    ] = None,
) -> None:
    """Show how time grows with a size or with threads: fitted exponents, a log-log picture."""
    plan = suite.BenchPlan(
        ops=listed([op]),
        backends=listed(backend),
        sizes=(size,),
        threads=(threads,),
        quick=quick,
    )
    choice(files.FORMATS, format=format)
    suite.check_plan(plan)
    growth.check_axis(axis, suite.size_names(plan))
    if format == "html" or figures is not None:
        require("matplotlib")
    places: list[dict[str, Any]] = []

    def measured(part: suite.BenchPlan) -> Iterator[dict[str, Any]]:
        found = worker.measured(part)
        places.append(next(found))
        return found

    numbers = [number("values", word) for word in listed([values])]
    that(bool(numbers), "values", "whole numbers, with commas", repr(values), "Such as 32,64,128.")
    rows = list(growth.swept(plan, axis, numbers, measured))
    report = growth.report(rows, axis, places[0])
    if figures is not None:
        files.write_figures(report, figures)
    if out is not None:
        files.write(report, format, out)
    else:
        print(files.render(report, format), end="", flush=True)


@app.command("history")
def show_history(
    files: Annotated[
        list[Path],
        typer.Argument(help="Results of dpkern bench. One file: its committed versions."),
    ],
    stale: Annotated[
        bool,
        typer.Option(
            "--stale",
            help="Only list kernel commits since tables were measured, those of python -m "
            "benchmarks too; exit code 1 if any.",
        ),
    ] = False,
) -> None:
    """Show how times of cases changed from result to result."""
    if stale:
        later = {file: commits_since(file) for file in files}
        for file, lines in later.items():
            if len(files) == 1:
                print("\n".join(lines or ["No commit changed kernels since."]), flush=True)
            else:
                print(f"{file}: {len(lines)} commits changed kernels since.", flush=True)
        if any(later.values()):
            raise typer.Exit(CHECK_FAILED)
        return
    found = history.committed(files[0]) if len(files) == 1 else history.results_of(files)
    print("\n".join(history.lines(found or history.results_of(files))), flush=True)


def commits_since(file: Path) -> list[str]:
    """Return the commits that changed kernels after a result was measured.

    Raises:
        InvalidInput: this is not known: no commit in the result, or none of this repository.
    """
    commit = history.measured_at(file)
    found = history.commits_since(commit)
    if found is None:
        raise InvalidInput(
            f"result {file}",
            expected="a commit of the repository that dpkern runs from",
            got=commit,
            remedy="Run this in the repository that the result was measured in.",
        )
    return found


def resumed(plan: suite.BenchPlan, out: Path, console: Console) -> dict[str, Any]:
    """Measure what a result does not have yet, and return the contents of both.

    Raises:
        InvalidInput: no such result, or one of other options, other code or another machine.
    """
    before = results.begun(out, plan.as_json())
    kept = [row for row in before["rows"] if results.is_done(row)]
    before = {**before, "rows": kept}
    left = replace(plan, done=tuple(results.digest_of(row) for row in kept))
    console.print(f"{len(kept)} rows are there.")
    return measure(left, console, out, before)


def measure(
    plan: suite.BenchPlan,
    console: Console,
    out: Path | None = None,
    before: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Measure a plan, print rows as they come, and return the contents of its result.

    Args:
        out: where what was measured is kept if the run is interrupted.
        before: an earlier part of the same result.

    Raises:
        InvalidInput: the plan selects nothing.
    """
    order = [
        results.digest_of(identity(case, backend, settings))
        for case, backend, settings in suite.selected(plan)
    ]
    found = worker.measured(plan)
    place = next(found)
    if before is not None:
        results.check_same_place(before["environment"], place)
    rows: list[dict[str, Any]] = []

    def content() -> dict[str, Any]:
        whole = plan.complete and set(order) <= {results.digest_of(row) for row in rows}
        made = results.result(place, plan.as_json(), whole, rows)
        if before is not None:
            made = results.merged(before, {**made, "complete": plan.complete}, order)
        return {**made, "left out": suite.dropped(plan)}

    try:
        for row in found:
            console.print(Text("\n".join(results.text_lines([row], title=not rows))))
            rows.append(row)
    except KeyboardInterrupt:
        if out is not None and rows:
            results.write(out, content())
            console.print(f"{len(rows)} rows are in {out}; --resume goes on.")
        raise
    if not rows and before is None:
        raise InvalidInput(
            "op",
            expected="a case with these sizes, dtypes and backends",
            got="none",
            remedy="Leave out --shape, --dtype or --backend; `dpkern info` shows who runs what.",
        )
    made = content()
    left = [f"Left out: {op}: {reason}." for op, reason in made["left out"].items()]
    notes = [*results.head(made), *results.why_not(made["rows"]), *left]
    console.print(Text("\n".join(part for line in notes for part in text.wrapped(line))))
    return made


def measure_steps(plan: step.StepPlan, console: Console) -> dict[str, Any]:
    """Measure whole steps, print their tables, and return the contents of the result."""
    place, *rows = worker.measured(plan)
    content = results.result(place, plan.as_json(), False, rows, kind="steps")
    lines = [part for line in results.step_head(content) for part in text.wrapped(line)]
    lines += results.step_tables(rows, markdown=False)
    console.print(Text("\n".join(lines)))
    return content


def listed(values: list[str] | None) -> tuple[str, ...]:
    """Return the words of an option that may be repeated and may hold commas."""
    return tuple(word.strip() for value in values or () for word in value.split(",") if word)


def span(name: str, text: str) -> tuple[int, ...]:
    """Return the whole numbers of ``3``, or of ``1..4``, both ends included.

    Raises:
        InvalidInput: another text.
    """
    first, dots, last = text.partition("..")
    low = number(name, first)
    high = number(name, last) if dots else low
    that(low <= high, name, "FIRST..LAST, going up", text, "Such as 1..4.")
    return tuple(range(low, high + 1))


def number(name: str, text: str) -> int:
    """Return a whole number.

    Raises:
        InvalidInput: another text.
    """
    if not text.isdecimal():
        raise InvalidInput(
            name, expected="whole numbers, with commas", got=text, remedy="Such as 1,2."
        )
    return int(text)


def shapes(text: str) -> dict[str, int]:
    """Return the sizes of ``B=64,d=512`` by name.

    Raises:
        InvalidInput: another text.
    """
    found = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not (name.strip() and equals):
            raise InvalidInput(
                "shape", expected="NAME=NUMBER, with commas", got=text, remedy="Such as B=64,d=512."
            )
        found[name.strip()] = number("shape", value.strip())
    return found

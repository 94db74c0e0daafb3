"""Every printed epsilon and delta, parsed back, is on the safe side of the certified number."""

from __future__ import annotations

import ast
import csv
import io
import json
import math
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from dpkern.audit import plan
from dpkern.audit import report as audit
from dpkern.audit.claims import ApproximateDP, Claim, GaussianDP, Laplace, PureDP
from dpkern.base.report import Report, ReportTable
from dpkern.commands import privacy as cli_privacy
from dpkern.drawing import number_format
from dpkern.papers import cli as cli_reproduce
from dpkern.papers.result import ComparisonRow, Result
from dpkern.privacy.accounting import Certificate, shown_bound, shown_lower_bound
from dpkern.privacy.accounting.shown import LowerBound, UpperBound, shown_exactly
from dpkern.reports import files
from dpkern.reports.page import tied
from dpkern.train import adlm_report, display, gradient_report, objective_report, report
from dpkern.train.session import Session
from tests.audit.audit_samples import evidence, findings

ROOT = Path(__file__).parents[1]
VALUES = 1000
NUMBER = r"(-?\d[\d.]*(?:e[+-]\d+)?)"


def values(seed: int) -> Iterator[float]:
    """Random bounds of all sizes that people meet, and the neighbours of short decimals."""
    draw = random.Random(seed)
    for _ in range(VALUES):
        value = math.exp(draw.uniform(math.log(1e-9), math.log(1e6)))
        short = float(f"{value:.3g}")
        yield draw.choice([value, short, math.nextafter(short, 0), math.nextafter(short, math.inf)])


def unit(value: float, digits: int = 5) -> float:
    """One unit of the last digit, with room for the float's own rounding."""
    return 10.0 ** (math.floor(math.log10(abs(value))) + 1 - digits) * (1 + 1e-6)


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(1, 17))
def test_rounded_to_the_safe_side(value: float, digits: int) -> None:
    above, below = shown_bound(value, digits), shown_lower_bound(value, digits)
    assert float(below) <= value <= float(above)
    if 1e-300 < abs(value) < 1e300:
        assert float(above) - float(below) <= 10 * unit(value, digits)
        assert float(above) - value <= 10 * unit(value, digits)
    assert float(shown_exactly(value)) == value


@pytest.mark.parametrize(
    ("value", "above", "below"),
    [
        (2.0, "2", "2"),
        (0.1, "0.1", "0.1"),
        (4.377175, "4.3772", "4.3771"),
        (2.99999999, "3", "2.9999"),
        (1e-5, "1e-05", "1e-05"),
        (1 / 1438, "0.00069542", "0.00069541"),
        (123456.0, "1.2346e+05", "1.2345e+05"),
        (99999.5, "1e+05", "99999"),
        (100.0, "100", "100"),
        (0.0, "0", "0"),
        (-0.0, "0", "0"),
        (5e-324, "5e-324", "5e-324"),
        (math.inf, "inf", "inf"),
        ("inf", "inf", "inf"),
    ],
)
def test_known_values(value: float | str, above: str, below: str) -> None:
    assert (shown_bound(value), shown_lower_bound(value)) == (above, below)


def test_nearest_is_too_low_half_of_the_time() -> None:
    """The defect that this file is about, as a negative control of its values."""
    low = sum(float(f"{value:.5g}") < value for value in values(1))
    assert VALUES / 8 < low < VALUES / 2
    assert all(float(shown_bound(value)) >= value for value in values(1))


def printed(draw: Callable[[Console], None]) -> str:
    """Return what a printer writes onto a wide terminal."""
    file = io.StringIO()
    draw(Console(file=file, width=300, color_system=None))
    return file.getvalue()


def found(pattern: str, text: str) -> float:
    """The number in the place of ``#``."""
    match = re.search(pattern.replace("#", NUMBER), text)
    assert match is not None, (pattern, text)
    return float(match[1])


def summary(value: float) -> dict[str, Any]:
    """Return the facts of a run: this number as an upper bound, its double as a lower one."""
    return {
        "mechanism": "m",
        "mode": "published",
        "claim": "",
        "statement": "",
        "epsilon_claimed": value,
        "epsilon_certified": value,
        "epsilon_if_seed_secret": value,
        "epsilon_audited": value,
        "epsilon_by_part": {"labels": value},
        "epsilon_if_bounds_public": value,
        "audit": {
            "contradicts_claim": False,
            "epsilon_if_gaussian": value,
            "runs": 1,
            "confidence": 0.9,
            "per_step": {"mu_lower": value, "mu_certified": value},
            "verdict": "",
        },
        "delta": value,
        "noise_multiplier": value,
        "warnings": [],
        "notes": [],
        "seconds": 1.0,
        "report": None,
        "checkpoint": None,
        "figure": None,
        "page": None,
        "majority_accuracy": 0.5,
        "non_private_ceiling": None,
        "options": {"model": "m", "unsafe_seed": None},
        "public": {"data": "d"},
    }


NOTHING_SHOWN = display.SummaryTable(title="", results=(), settings=(), data=())


def summarised(value: float) -> str:
    return printed(lambda console: display.print_summary(console, summary(value), NOTHING_SHOWN))


def certificate(value: float) -> Certificate:
    return Certificate(
        epsilon=value,
        delta=value,
        relation="add_remove",
        accountant="PLD",
        event="{}",
        bounds={"PLD": value},
        certified_for="x",
    )


def planned(value: float, monkeypatch: pytest.MonkeyPatch) -> str:
    """The table of ``dpkern privacy``."""
    file = io.StringIO()
    monkeypatch.setattr(cli_privacy, "Console", lambda **_: Console(file=file, width=300))
    result = {
        "epsilon_claimed": value,
        "epsilon_certified": value,
        "noise_multiplier": value,
        "delta": value,
        "bounds": {"PLD": value},
        "notes": [],
        "epsilon_by_part": {"labels": value},
    }
    cli_privacy._show(result, False)
    return file.getvalue()


def reproduced(value: float) -> str:
    row = ComparisonRow(
        item="i",
        setting="s",
        quantity="epsilon",
        ours=2 * value,
        epsilon_claimed=value,
        epsilon_certified=3 * value,
    )
    result = Result(paper="p", item="i", title="t", rows=[row], settings={})
    return printed(lambda console: cli_reproduce.show(console, result))


def described(value: float) -> str:
    epoch = gradient_report.Epoch(
        epoch=1, step=1, heldout_loss=1.0, heldout_accuracy=0.5, epsilon=value
    )
    options = SimpleNamespace(run=SimpleNamespace(diagnostics=False))
    return Session.describe(SimpleNamespace(history=[epoch], options=options), epoch)  # type: ignore[arg-type]


def stated(value: float) -> str:
    facts = {"non_private": None}
    return report.statement(facts, certificate(value).to_dict())


def drawn(value: float) -> report.FigureSpec:
    return gradient_report.drawn(summary(value), [])


def level(value: float, name: str) -> str:
    """The label of a line in the figure of a run."""
    return drawn(value).levels["certified epsilon"][name].shown()


RAISED = "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"


def parsed(text: str) -> str:
    """Powers of ten and thousands as Python writes them."""
    power = str.maketrans(RAISED, "-0123456789")
    text = text.replace("\N{NO-BREAK SPACE}", " ")
    text = re.sub(rf" × 10([{RAISED}]+)", lambda m: "e" + m[1].translate(power), text)
    text = re.sub(rf"10([{RAISED}]+)", lambda m: "1e" + m[1].translate(power), text)
    return re.sub(r"(\d)e(\d)", r"\1e+\2", text)


def tabled(value: float, kind: str) -> str:
    """A report's table with a bound of either side, after ``at most`` and ``at least``."""
    table = ReportTable(
        title="t",
        columns=("a", "b", "c", "d"),
        rows=[["at most:", UpperBound(value), "at least:", LowerBound(value)]],
    )
    text = files.render(
        Report(name="n", title="t", summary="s", facts={}, tables=(table,), figures=()), kind
    )
    text = re.sub(r"<[^>]*>|\s+", " ", text)
    return parsed(text)


UPPER: dict[str, tuple[Callable[[float], str], tuple[str, ...]]] = {
    "statement": (stated, (r"^\(#,", r", #\)-diff")),
    "summary": (
        summarised,
        (r"claimed #", r"certified #", r"seed secret\s*│ #", r"delta\s*│ #"),
    ),
    "bar": (described, (r"epsilon #",)),
    "gradient figure": (
        lambda v: f"{drawn(v).title} {level(v, 'claimed')}",
        (r"delta = #", r" #$"),
    ),
    "gradient audit": (lambda v: gradient_report._audit(summary(v)["audit"]), (r", # at most",)),
    "objective figure": (
        lambda v: objective_report.title(summary(v)),
        (r"claimed epsilon #", r"certified #"),
    ),
    "reproduced": (reproduced, ()),
    "claims": (
        lambda v: " ; ".join(
            claim.text for claim in (GaussianDP(v), Laplace(v), PureDP(v), ApproximateDP(v, 1e-5))
        ),
        (r"mu #", r"Laplace, epsilon #", r"; epsilon #", r"\(#, 1e-05\)"),
    ),
    "text table": (lambda v: tabled(v, "text"), (r"at most: #",)),
    "csv table": (lambda v: tabled(v, "csv"), (r"at most:,#",)),
    "page text": (
        lambda v: parsed(tied(f"delta {shown_bound(v)}")).replace(",", ""),
        (r"delta #",),
    ),
}


@pytest.mark.parametrize("name", UPPER)
def test_upper_bounds_are_never_printed_below(name: str) -> None:
    draw, patterns = UPPER[name]
    few = name in ("summary", "text table", "reproduced")
    for index, value in enumerate(values(2)):
        if few and index >= VALUES // 5:
            break
        text = draw(value)
        if name == "reproduced":
            cells = re.findall(NUMBER, text.split("┡")[1])
            seen = list(zip(map(float, cells), (2 * value, value, 3 * value), strict=True))
        else:
            seen = [(found(pattern, text), value) for pattern in patterns]
        for number, bound in seen:
            assert bound <= number <= bound + unit(bound), (text, bound)


LOWER: dict[str, tuple[Callable[[float], str], tuple[str, ...]]] = {
    "summary": (summarised, (r"audited #", r"else #")),
    "gradient audit": (lambda v: gradient_report._audit(summary(v)["audit"]), (r"mu # at least",)),
    "gradient figure": (lambda v: level(v, "audited"), (r"^#$",)),
    "claims": (
        lambda v: " ; ".join(
            claim.lower_text
            for claim in (GaussianDP(v), Laplace(v), PureDP(v), ApproximateDP(v, 1e-5))
        ),
        (r"mu #", r"Laplace, epsilon #", r"; epsilon #", r"\(#, 1e-05\)"),
    ),
    "text table": (lambda v: tabled(v, "text"), (r"at least: #",)),
    "csv table": (lambda v: tabled(v, "csv"), (r"at least:,#",)),
}


@pytest.mark.parametrize("name", LOWER)
def test_lower_bounds_are_never_printed_above(name: str) -> None:
    draw, patterns = LOWER[name]
    few = name in ("summary", "text table")
    for index, value in enumerate(values(3)):
        if few and index >= VALUES // 5:
            break
        text = draw(value)
        for pattern in patterns:
            number = found(pattern, text)
            assert value - unit(value) <= number <= value, (text, value)


def test_the_table_of_a_planned_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in list(values(4))[:200]:
        cells = [float(cell) for cell in re.findall(rf"│ {NUMBER} +│", planned(value, monkeypatch))]
        assert len(cells) == 6
        assert all(value <= cell <= value + unit(value) for cell in cells)


def test_tables_of_objectives() -> None:
    given = summary(0.123456789) | {
        "relation": "r",
        "certified_for": "c",
        "visits": 1,
        "steps": 1,
        "test_accuracy": 1.0,
        "test_mse": 1.0,
        "test_bce": 1.0,
        "data_notes": [],
        "data_warnings": [],
    }
    public = {
        "synthetic": False,
        "users": 1,
        "records_per_user": 1,
        "bounds": "",
        "heldout_rows": 1,
    }
    given["public"] = given["public"] | public
    given["noise"] = {
        "scale_at_least": 1.0,
        "scale_at_most": 1.0,
        "scale_depends_on_the_record": False,
        "source": "inline",
        "released": "",
        "schedule": "",
        "law": "",
        "key": "",
        "labels": "",
        "relevances": None,
        "inputs": {"least": 1.0, "most": 2.0},
    }
    assert dict(objective_report.shown(given).results)["epsilon if bounds public"] == "0.12346"
    assert dict(adlm_report.shown(given).results)["epsilon of labels"] == "0.12346"


def test_checks_of_plans() -> None:
    for value in values(5):
        statement = SimpleNamespace(epsilon=value, accountant="a", lower=lambda v=value: 1.5 * v)
        text = plan._epsilon(statement, certificate(2 * value)).text  # type: ignore[arg-type]
        assert found(r"epsilon #", text) >= value
        assert found(r"at least #", text) <= 1.5 * value
        statement.lower = lambda: 0.0
        text = plan._epsilon(statement, certificate(2 * value)).text  # type: ignore[arg-type]
        assert found(r"; # is certified", text) >= 2 * value


@pytest.mark.parametrize(
    "claim", [GaussianDP(1.0), Laplace(1.0), PureDP(1.0), ApproximateDP(1.0, 1e-5)]
)
def test_an_audits_page_rounds_its_bounds_apart(claim: Claim) -> None:
    draw = random.Random(6)
    for _ in range(50):
        a, b = draw.uniform(1e-4, 0.4), draw.uniform(1e-4, 0.4)
        one = evidence("p", (1, 1), (a, b), (0.0, 0.0))
        given = findings(claim, claim, (one,))
        shown = one.shows(claim, given.delta)
        (row, _) = audit.report(given).tables[0].rows
        assert float(number_format.cell(row[3])) >= claim.epsilon(given.delta)
        assert float(number_format.cell(row[5])) <= shown.epsilon(given.delta)
        assert found(r"at least \D*#", given.sentence) <= shown.number


def test_exact_numbers_stay_in_machine_formats() -> None:
    facts = json.loads(report.dumps({"epsilon": UpperBound(1 / 3), "lower": LowerBound(1 / 3)}))
    assert facts == {"epsilon": 1 / 3, "lower": 1 / 3}
    rows = [["x", UpperBound(1 / 3)]]
    table = ReportTable(title="t", columns=("a", "b"), rows=rows)
    text = files.render(
        Report(name="n", title="t", summary="s", facts={}, tables=(table,), figures=()), "csv"
    )
    assert list(csv.reader(io.StringIO(text)))[2] == ["x", str(1 / 3)]


# Printers that are not in the lists above, and those that somebody writes later.

WORD = re.compile(r"(?<![a-z])(eps|epsilon|epsilons|delta|mu|certified|claimed|audited)(?![a-z])")
BEFORE = re.compile(
    r"\b(epsilon1?|delta|mu|certified|claimed|audited)\W{0,4}(at least|at most)?\W*$"
)
ROUNDING = re.compile(r"\.?\d*[gGfFeE%n]$")
KNOWN = {
    (
        "dpkern/papers/spof/items.py",
        "delta",
    ): "the radius of a Taylor polynomial, no privacy parameter",
}


def sources() -> list[Path]:
    folders = ("dpkern", "examples", "docs", "benchmarks", "tests/evidence")
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(found) > 300
    return found


def by_hand(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Epsilons and deltas that an f-string, ``format`` or ``round`` rounds to nearest."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            before = ""
            for part in node.values:
                if isinstance(part, ast.Constant):
                    before = str(part.value)
                    continue
                assert isinstance(part, ast.FormattedValue)
                spec = "" if part.format_spec is None else ast.unparse(part.format_spec)[2:-1]
                source = ast.unparse(part.value)
                named = WORD.search(source.lower().replace("_", " ")) or BEFORE.search(before)
                if ROUNDING.search(spec) and named:
                    yield part.lineno, source
                before = ""
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            source = ast.unparse(node.args[0])
            if node.func.id in ("round", "format") and WORD.search(source.replace("_", " ")):
                yield node.lineno, source
        elif (
            isinstance(node, ast.BinOp)
            and isinstance(node.op, ast.Mod)
            and isinstance(node.left, ast.Constant)
            and isinstance(node.left.value, str)
            and WORD.search(ast.unparse(node.right).replace("_", " "))
        ):
            yield node.lineno, ast.unparse(node.right)


def test_nobody_rounds_an_epsilon_by_hand() -> None:
    wrong = []
    for path in sources():
        name = str(path.relative_to(ROOT))
        for line, source in by_hand(ast.parse(path.read_text())):
            if (name, source) not in KNOWN:
                wrong.append(f"{name}:{line}: {source}")
    assert not wrong, "print it by dpkern.accounting.shown_bound: " + "; ".join(wrong)


@pytest.mark.parametrize(
    "code",
    [
        'f"{epsilon:.3f}"',
        'f"epsilon {x:.4g}"',
        'f"epsilon >= {x:.4g}"',
        "f\"{facts['epsilon_audited']:.2f}\"",
        'f"{self.target_delta:g}"',
        'f"{certificate.epsilon:.3}g" f"{step.epsilon(d):.5g}"',
        "round(epsilon, 2)",
        'format(run.delta, ".3g")',
        '"%.3f" % epsilon',
    ],
)
def test_the_search_finds_printers(code: str) -> None:
    assert list(by_hand(ast.parse(code)))


@pytest.mark.parametrize("code", ['f"{steps:.3f}"', 'f"{epsilon}"', 'f"mu {x}"', "round(mumble)"])
def test_the_search_leaves_others_alone(code: str) -> None:
    assert not list(by_hand(ast.parse(code)))

"""Options of ``dpkern reproduce``: epsilons, clipping bounds and rates of one's own."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dpkern import cli
from dpkern.base.errors import InvalidInput, PrivacyError
from dpkern.base.json import plain
from dpkern.papers import ItemRequest, ResultCache, catalogue, data_cache, everything, numbers
from dpkern.papers.adlm import training as adlm_training
from dpkern.papers.adlm.setup import MNIST
from dpkern.papers.cli import _epsilons
from dpkern.papers.gredp import cells as gredp_cells
from dpkern.papers.gredp import training as gredp
from dpkern.papers.result import Result
from dpkern.papers.spof import setting as spof
from dpkern.papers.verdict import FAILS, UNDECIDED, exact, of_epsilon

SIZED = catalogue.SIZED
FORMULAS = {("pnsgd", item) for item in ("table", "rules", "bound", "plot")}
"""Items with a budget and without training."""
pytestmark = pytest.mark.usefixtures("one_thread")


def labels(paper: str, item: str, **options: Any) -> list[str]:
    """The trainings that an item would run."""
    request = ItemRequest(quick=True, **options)
    (planned,) = everything.plan([(paper, item)], lambda *_: request)
    return [piece.label for piece in planned.pieces]


@pytest.mark.parametrize(
    ("paper", "item"),
    sorted(
        pair
        for pair in catalogue.SIZED["epsilon"] - catalogue.NEEDS_WEIGHTS - FORMULAS
        if pair[1] not in ("fig5", "comparison")
    ),
)
@pytest.mark.slow  # plans of all items
def test_every_training_has_the_epsilon_that_was_asked_for(paper: str, item: str) -> None:
    pytest.importorskip("dp_accounting")
    rows = {"rows": 60 if paper == "spof" else 600} if (paper, item) in SIZED["rows"] else {}
    found = labels(paper, item, epsilon=(3.25,), **rows)
    free = (
        "plain",
        "unperturbed",
        "without noise",
        "without privacy",
        "non-private",
        "DP-SGD, noiseless",
    )
    named = [label for label in found if not any(word in label for word in free)]
    assert named
    unnamed = {("gredp", "fig4"), ("adlm", "released"), ("spectral", "released")}
    if (paper, item) not in {*unnamed, ("spectral", "whitened")}:
        assert all("3.25" in label for label in named), named


def planned(pair: tuple[str, str], **options: Any) -> everything.PlannedItem:
    (found,) = everything.plan([pair], lambda *_: ItemRequest(quick=True, **options))
    return found


@pytest.mark.parametrize(
    ("pair", "name"), [(pair, name) for pair, own in numbers.NUMBERS.items() for name in own]
)
def test_every_number_of_a_protocol_reaches_the_runs(pair: tuple[str, str], name: str) -> None:
    pytest.importorskip("dp_accounting")
    usual = numbers.NUMBERS[pair][name]
    same = numbers.read([f"{name}={usual:.17g}"])
    other = numbers.read([f"{name}={5 if isinstance(usual, int) else usual / 2:.17g}"])
    source = [dict(piece.key) for piece in planned(pair).pieces]
    assert [dict(piece.key) for piece in planned(pair, numbers=same).pieces] == source
    changed = [dict(piece.key) for piece in planned(pair, numbers=other).pieces]
    assert len(changed) == len(source)
    assert changed != source


@pytest.mark.parametrize(
    "pair", sorted(catalogue.SIZED["delta"] - catalogue.NEEDS_WEIGHTS - FORMULAS)
)
@pytest.mark.slow  # plans of all items
def test_another_delta_reaches_the_runs(pair: tuple[str, str]) -> None:
    pytest.importorskip("dp_accounting")
    source, other = (planned(pair, delta=delta).pieces for delta in (None, 1e-7))
    assert [dict(piece.key) for piece in source] != [dict(piece.key) for piece in other]


@pytest.mark.parametrize("pair", sorted(FORMULAS))
@pytest.mark.slow  # plans of all items
def test_formulas_have_the_budget_that_was_asked_for(pair: tuple[str, str]) -> None:
    pytest.importorskip("dp_accounting")
    asked = {"epsilon": (2.5,), "delta": 1e-7}
    usual, other, less = (
        planned(pair, **options).result for options in ({}, asked, {**asked, "delta": 1e-8})
    )
    assert usual is not None
    assert other is not None
    assert less is not None
    assert {row.epsilon_claimed for row in other.rows} <= {2.5, None}
    assert [row.ours for row in usual.rows] != [row.ours for row in other.rows]
    assert [row.ours for row in other.rows] != [row.ours for row in less.rows]
    # What is claimed is claimed of every budget.
    assert len(other.verdicts) == len(usual.verdicts)
    assert [one.verdict for one in other.verdicts] == [one.verdict for one in usual.verdicts]


def test_numbers_that_no_item_has_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for text, said in (
        ("c=1", "set: expected one of constant=2.5, sensor_noise=5, code=7, got c=1"),
        ("constant", "set: expected NAME=NUMBER"),
        ("constant=a", "set: expected NAME=NUMBER"),
        ("code=1.5", "code: expected an integer >= 1, got 1.5"),
        ("code=nan", "code: expected an integer >= 1, got nan"),
        ("constant=nan", "constant: expected a finite number >= 0"),
        ("constant=-1", "constant: expected a finite number >= 0"),
        ("sensor_noise=inf", "sensor_noise: expected a finite number > 0"),
    ):
        call = ["reproduce", "spof", "fig3", "--quick", "--set", text, "--out", str(tmp_path / "x")]
        assert cli.main(call) == cli.REFUSED
        assert said in " ".join(capsys.readouterr().err.split())
    with pytest.raises(InvalidInput, match="this item has no such number"):
        catalogue.reproduce("pnsgd", "table", ItemRequest(numbers=(("c", 1.0),)))
    for name, value in (("momentum", 1.0), ("momentum", -0.1)):
        with pytest.raises(InvalidInput, match="momentum"):
            numbers.check([("comparison", "")], ((name, value),))
    shares = (("relevance_share", 0.6), ("label_share", 0.5))
    with pytest.raises(InvalidInput, match=r"inputs get the rest, got 1\.1"):
        numbers.check([("adlm", "fig4")], shares)
    with pytest.raises(InvalidInput, match="inputs get the rest"):
        numbers.check([("adlm", "released")], (("relevance_share", 0.5),))
    numbers.check([("adlm", "fig4")], (("relevance_share", 0.6),))
    with pytest.raises(InvalidInput, match="every name once"):
        numbers.read(["code=1", "code=2"])
    assert cli.main(["reproduce", "gredp", "table1", "--delta", "0"]) == cli.REFUSED


def test_other_numbers_decide_nothing_but_an_epsilon() -> None:
    accuracy = exact("accuracy", True)
    spent = of_epsilon("epsilon", 1.0, 2.0)
    result = Result(
        paper="spof", item="fig3", title="t", rows=[], settings={}, verdicts=[accuracy, spent]
    )
    request = ItemRequest(numbers=(("constant", 1.0),))
    found = catalogue._with_numbers(result, ("spof", "fig3"), request)
    assert [one.verdict for one in found.verdicts] == [UNDECIDED, FAILS]
    assert found.verdicts[0].reason == "constant 1 instead of 2.5"
    assert found.settings == {"constant": 1.0}
    assert catalogue._with_numbers(result, ("spof", "fig3"), ItemRequest()) is result


@pytest.mark.parametrize(
    "pair",
    sorted(
        (paper, item)
        for paper, own in catalogue.PAPERS.items()
        for item in own
        if (paper, item) not in catalogue.NEEDS_WEIGHTS
    ),
)
@pytest.mark.slow  # plans of all items
def test_every_item_finds_its_finished_runs_again(pair: tuple[str, str], tmp_path: Path) -> None:
    """An interrupted run resumes: another process knows each setting, and no two are the same."""
    pytest.importorskip("dp_accounting")
    first = planned(pair)
    assert (first.result is None) == bool(first.pieces)
    kept = ResultCache(folder=tmp_path)
    for number, piece in enumerate(first.pieces):
        kept.keep(piece, {"number": number})
    names = {json.dumps(plain(dict(piece.key)), sort_keys=True) for piece in first.pieces}
    assert len(list(tmp_path.glob("*.json"))) == len(names)
    data_cache._loaded.cache_clear()
    later = ResultCache(folder=tmp_path, resume=True)
    assert all(later.find(piece) is not None for piece in planned(pair).pieces)


def test_items_with_one_epsilon_refuse_several() -> None:
    for paper, item in (("gredp", "table1"), ("directional", "fig6")):
        with pytest.raises(InvalidInput, match=r"^epsilon: expected one number"):
            labels(paper, item, epsilon=(1.0, 2.0), rows=600)


@pytest.mark.parametrize("text", ["", "a", "1,", "0", "-1", "nan", "inf", "1e9"])
def test_epsilons_that_are_none_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["reproduce", "gredp", "table1", "--quick", "--epsilon", text]) == cli.REFUSED
    assert "Example: --epsilon 0.5,1,2" in capsys.readouterr().err.replace("\n", " ")
    assert _epsilons("2,0.5,2") == (0.5, 2.0)


@pytest.mark.parametrize(
    ("paper", "item", "option", "value"),
    [
        ("gredp", "table8", "max_grad_norm", 1.0),
        ("directional", "fig6", "max_grad_norm", 1.0),
        ("spof", "rates", "lr", 0.1),
        ("spof", "released", "epsilon", (1.0,)),
        ("ldp", "channels", "epsilon", (1.0,)),
        ("spof", "fig4", "max_grad_norm", 1.0),
    ],
)
def test_what_an_item_fixes_is_refused(paper: str, item: str, option: str, value: Any) -> None:
    with pytest.raises(InvalidInput, match=rf"^{option}: expected none"):
        catalogue.reproduce(paper, item, ItemRequest(**{option: value}))


@pytest.mark.parametrize(
    ("item", "options", "said"),
    [
        ("fig3", {"epsilon": (0.001,)}, r"^epsilon: expected .* --epsilon that needs 2000"),
        ("comparison", {"epochs": 500}, r"^epochs: expected .* --epochs that needs 10000"),
    ],
)
def test_noise_that_cannot_be_certified_is_refused_by_the_options_name(
    item: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(PrivacyError, match=said):
        labels("spof", item, rows=3, seeds=1, **options)


def test_printed_accuracies_stand_beside_their_own_epsilon_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[gredp_cells.AccuracyCell] = []

    def note(item: str, found: Sequence[gredp_cells.AccuracyCell], request: ItemRequest) -> None:
        del item, request
        asked.extend(found)
        raise KeyboardInterrupt

    monkeypatch.setattr(gredp, "trained", note)

    def printed(item: str, *epsilons: float) -> set[tuple[float, float | None]]:
        asked.clear()
        with pytest.raises(KeyboardInterrupt):
            getattr(gredp, item)(ItemRequest(quick=True, epsilon=epsilons or None))
        return {(one.epsilon, one.printed) for one in asked if one.method == "GReDP"}

    assert printed("table1") == {(1.0, 96.5)}
    assert printed("table1", 3.0) == {(3.0, None)}
    assert printed("by_epsilon", 1.0, 3.0) == {(1.0, 96.5), (3.0, None)}
    assert printed("table8", 1.0, 3.0) == {(1.0, 96.43), (1.0, 96.5), (3.0, None)}
    assert printed("fig5", 3.0) == {(3.0, None)}


def test_a_clipping_bound_reaches_the_mechanism_and_decides_nothing() -> None:
    request = ItemRequest(quick=True, max_grad_norm=0.25)
    cell = gredp_cells.AccuracyCell(
        name="LeNet-5", method="DP-SGD", epsilon=1.0, what="", printed=None
    )
    made: Any = gredp_cells._seeded(cell, request).mechanism
    assert made.max_grad_norm == 0.25
    assert request.departure(max_grad_norm=1.0) == "max grad norm 0.25 instead of 1"


def test_spof_takes_another_rate_and_grid() -> None:
    where = spof.experiment(ItemRequest(quick=True, rows=5, lr=0.5, epsilon=(2.0,)))
    assert (where.lr, where.epsilons) == (0.5, (2.0,))
    assert where.settings()["lr"] == 0.5
    cell = spof.Cell(name=spof.OURS)
    keys = [
        spof._piece(where, one, "digest").key["lr"]
        for one in (cell, dataclasses.replace(cell, rate=0.1))
    ]
    assert keys == [0.5, 0.1]


@pytest.mark.parametrize(
    ("name", "options"), [("rows", {"rows": 8}), ("batch_size", {"batch_size": 1})]
)
def test_batches_without_moments_are_refused_before_training(
    name: str, options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidInput, match=rf"^{name}: expected batches of 2"):
        labels("adlm", "released", **options)


def test_adlm_draws_curves_at_epsilons_that_were_run() -> None:
    assert adlm_training.curves(MNIST, (0.25, 0.5, 8.0)) == [0.5]
    assert adlm_training.curves(MNIST, (1.0, 3.0, 8.0)) == [1.0, 8.0]
    assert adlm_training.averaged("MNIST", (0.25, 0.5, 8.0)) == [0.25, 0.5]
    assert adlm_training.averaged("MNIST", (3.0,)) == [3.0]


def test_adlm_has_three_lengths_of_one_training() -> None:
    assert adlm_training.lengths(9) == [1, 3, 9]
    assert adlm_training.lengths(1) == [1]
    here: Any = SimpleNamespace(
        experiment=MNIST,
        private=SimpleNamespace(source="digits"),
        epochs=9,
        genuine=False,
        control=97.0,
    )
    numbers = {
        "accuracy": [[10.0 * epoch for epoch in range(1, 10)]] * 2,
        "epochs": list(range(1, 10)),
        "diverged": 0,
        "collapsed": 1,
        "claimed": 0.5,
        "certified": 1.0,
        "relation": "local",
    }
    first, second = adlm_training.earlier("fig4", here, "AdLM", 0.5, numbers)
    assert (first.ours, second.ours) == (10.0, 30.0)
    assert second.setting == "AdLM, epsilon 0.5, after 3 of 9 epochs"
    assert (first.published, first.guard) == (None, "")

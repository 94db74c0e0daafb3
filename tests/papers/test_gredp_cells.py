"""GReDP's tables: data by name, everything checked first, kept seed by seed, and what GReDP is."""

from __future__ import annotations

import dataclasses
import gzip
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from dpkern import cli
from dpkern.base.errors import InvalidInput
from dpkern.papers import ItemRequest, ResultCache, data_cache, data_roots, reproduce, runner
from dpkern.papers.directional import cases as directional
from dpkern.papers.directional import training as directional_training
from dpkern.papers.figure import Line, Panel
from dpkern.papers.gredp import cells, training
from dpkern.papers.gredp.published import DROPS, EXPERIMENTS, METHODS, SAME, VARIED_AT
from dpkern.papers.result import Result
from dpkern.papers.seeded import WITHOUT_PRIVACY, Control, with_controls
from dpkern.papers.verdict import FAILS, UNDECIDED
from dpkern.privacy import accounting

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def mnist(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder in MNIST's format, with few images."""
    folder = tmp_path_factory.mktemp("mnist")
    generator = torch.Generator().manual_seed(0)
    for stem, count in (("train", 60), ("t10k", 20)):
        pixels = torch.randint(0, 256, (count, 28, 28), generator=generator, dtype=torch.uint8)
        images = struct.pack(">IIII", 0x803, count, 28, 28) + pixels.numpy().tobytes()
        labels = struct.pack(">II", 0x801, count) + bytes(n % 10 for n in range(count))
        for name, content in (("images-idx3", images), ("labels-idx1", labels)):
            (folder / f"{stem}-{name}-ubyte.gz").write_bytes(gzip.compress(content))
    return str(folder)


class FakeRuns:
    """Outcomes without training, and how many were asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[runner.RunSetting, Any, int]] = []
        self.interrupted_at: int | None = None
        self.free = 91.0

    def __call__(
        self, where: runner.RunSetting, made: Any, seed: int, **_: Any
    ) -> runner.RunOutcome:
        if len(self.calls) == self.interrupted_at:
            raise KeyboardInterrupt
        self.calls.append((where, made, seed))
        epochs = [
            runner.Epoch(
                epoch=n,
                step=n,
                heldout_loss=0.0,
                heldout_accuracy=seed / 100
                + (self.free / 100 if made == WITHOUT_PRIVACY else 0.1 * n),
            )
            for n in range(1, where.epochs + 1)
        ]
        return runner.RunOutcome(
            accuracy=100 * epochs[-1].heldout_accuracy,
            best=0.0,
            spread=0.0,
            seeds=1,
            epsilon_claimed=1.0,
            epsilon_certified=2.0,
            relation="add_remove",
            ms_per_step=1.0,
            history=tuple(epochs),
        )


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> FakeRuns:
    fake = FakeRuns()
    monkeypatch.setattr(runner, "once", fake)
    return fake


@pytest.fixture
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the few images for MNIST's own: no digest is missed."""
    loaded = data_cache.load
    monkeypatch.setattr(
        data_cache, "load", lambda name: dataclasses.replace(loaded(name), warnings=())
    )


def request_of(mnist: str, **more: Any) -> ItemRequest:
    return ItemRequest(quick=True, data=f"mnist={mnist}", **more)


def test_published_gredp_is_dp_sgd_with_less_noise(mnist: str) -> None:
    pytest.importorskip("dp_accounting")
    request = request_of(mnist)
    where = cells.setting(request, "LeNet-5", "GReDP")
    shapes = [tuple(p.shape) for p in where.model(0).parameters()]
    printed, same = (cells.mechanism(method, where, 1.0).plan(shapes) for method in ("GReDP", SAME))
    sigma = cells.mechanism("DP-SGD", where, 1.0).noise_multiplier
    for one, other, shape in zip(printed.blocks, same.blocks, shapes, strict=True):
        assert other.release is None, "real noise on a clipped gradient, and nothing else"
        assert one.bound == other.bound == 1
        assert one.noise_scale == other.noise_scale
        layer = len(shape) > 1  # biases have no spectrum and keep sigma
        assert one.noise_scale == pytest.approx(sigma / 2**0.5 if layer else sigma)
    run = where.accounting()
    certified = [accounting.certify(plan, **run).epsilon for plan in (printed, same)]
    assert certified[0] == pytest.approx(certified[1], rel=1e-4)
    assert certified[0] > 2


def test_a_table_stops_and_goes_on_where_it_stopped(
    mnist: str, runs: FakeRuns, tmp_path: Path
) -> None:
    runs.interrupted_at = 3
    given: dict[str, Any] = {"seeds": 2}
    kept = ResultCache(folder=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        reproduce("gredp", "table1", request_of(mnist, finished=kept, **given))
    assert len(list(tmp_path.iterdir())) == 3
    runs.interrupted_at = None
    again = ResultCache(folder=tmp_path, resume=True)
    found = reproduce("gredp", "table1", request_of(mnist, finished=again, **given))
    assert len(runs.calls) == 2 * (len(METHODS) + 1)
    assert [row.seeds for row in found.rows] == [2] * 5
    assert found.rows[0].ours == pytest.approx(91.5)
    assert found.rows[1].ours == pytest.approx(20.5)
    assert found.rows[0].spread == pytest.approx(0.5)
    # Another learning rate is another run.
    other = request_of(mnist, finished=ResultCache(folder=tmp_path, resume=True), lr=0.3, **given)
    reproduce("gredp", "table1", other)
    assert len(runs.calls) == 2 * (len(METHODS) + 1) + 2 * len(METHODS)  # plain has its own rate


def test_everything_is_checked_before_the_first_training(
    mnist: str, runs: FakeRuns, tmp_path: Path
) -> None:
    for data, name in (
        (f"mnist={mnist},cifar10={mnist}", "data"),
        (f"mnist={mnist},cifar10={tmp_path}", "data"),
        (mnist, "data"),  # one folder is not two data sets
    ):
        with pytest.raises(InvalidInput, match=f"^{name}: expected"):
            reproduce("gredp", "table1", ItemRequest(quick=False, data=data))
    assert not runs.calls


def test_another_data_set_does_not_stand_for_the_one_of_a_row(mnist: str) -> None:
    for data in (mnist, f"svhn={mnist}"):
        with pytest.raises(InvalidInput, match=r"^data: expected svhn"):
            directional.setting(ItemRequest(quick=True, data=data), "SVHN")


def test_a_full_table_of_one_data_set_has_its_models_only(mnist: str, runs: FakeRuns) -> None:
    pytest.importorskip("dp_accounting")
    full = ItemRequest(quick=False, data=f"mnist={mnist}")
    found = reproduce("gredp", "table1", full)
    assert all(row.setting.startswith("LeNet-5, ") for row in found.rows)
    where = runs.calls[0][0]
    assert (where.epochs, where.batch_size) == (cells.EPOCHS, 60)
    assert where.rule.lr == cells.LEARNING_RATE == 0.01
    chosen = ItemRequest(
        quick=False, data=f"mnist={mnist}", epochs=3, batch_size=20, lr=0.2, rows=40
    )
    reproduce("gredp", "table1", chosen)
    where = runs.calls[-1][0]
    assert (where.epochs, where.batch_size, where.rule.lr) == (3, 20, 0.2)
    assert len(where.data.x_train) == 40


def test_printed_values_stand_beside_the_same_data_only(
    mnist: str, runs: FakeRuns, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip("dp_accounting")
    others = reproduce("gredp", "table1", request_of(mnist))
    assert others.rows[1].published == "92.7 on other data (mnist)"
    request.getfixturevalue("trusted")
    real = reproduce("gredp", "table1", request_of(mnist))
    assert real.rows[1].published == EXPERIMENTS["LeNet-5"].printed["DP-SGD"]
    generated = reproduce("gredp", "table1", ItemRequest(quick=True))
    assert generated.rows[1].published == "92.7 on other data (mnist)"
    assert real.rows[-1].published is None


def test_accuracies_are_judged_at_the_sources_sizes_only(
    mnist: str, runs: FakeRuns, request: pytest.FixtureRequest
) -> None:
    """Fewer rows, other files, another length, batch or rate decide nothing."""
    pytest.importorskip("dp_accounting")
    runs.free = 98.0

    def open_reasons(**more: Any) -> set[str]:
        asked = ItemRequest(quick=False, data=f"mnist={mnist}", seeds=5, **more)
        found = reproduce("gredp", "table1", asked)
        judged = [one for one in found.verdicts if "accura" in one.claim]
        assert len(judged) == 7
        return {one.reason for one in judged if one.verdict == UNDECIDED}

    (others,) = open_reasons()
    assert others.endswith("not on all of mnist as published")
    request.getfixturevalue("trusted")
    assert open_reasons() <= {"the interval of the difference contains 0"}
    for more, said in (
        ({"epochs": 3}, "epochs 3 instead of 30"),
        ({"lr": 0.5}, "lr 0.5 instead of 0.01"),
        ({"batch_size": 20}, "batch size 20 instead of 500"),
        ({"max_grad_norm": 2.0}, "max grad norm 2 instead of 1"),
        ({"delta": 1e-6}, "delta 1e-06 instead of 1e-05"),
    ):
        assert open_reasons(**more) == {said}
    assert len(open_reasons(rows=40)) == 1
    assert not ItemRequest(epochs=30, batch_size=500).departure(epochs=30, batch_size=500)


@pytest.mark.parametrize("item", ["fig3", "fig4", "fig5", "by-eps", "table8"])
@pytest.mark.usefixtures("trusted")
def test_every_figure_is_made_of_kept_runs(mnist: str, runs: FakeRuns, item: str) -> None:
    pytest.importorskip("dp_accounting")
    kept = ResultCache()
    found = reproduce("gredp", item, request_of(mnist, finished=kept))
    before = len(runs.calls)
    # Batches above the number of rows are the same run; the control has no row of its own.
    assert len(found.rows) >= before - 1
    assert found.control.startswith("LeNet-5 without privacy: 91.0 %")
    reproduce("gredp", item, request_of(mnist, finished=kept))
    assert len(runs.calls) == before
    if item in ("fig4", "fig5"):
        (panel,) = found.panels
        assert [line.label for line in panel.lines] == ["ours", "published"]


def test_the_control_says_where_private_runs_cannot_be_the_sources() -> None:
    controls = [
        Control(name="A", ours=94.9, printed=98.72),
        Control(name="B", ours=97.0, printed=97.5),
        Control(name="C", ours=50.0, printed="98 on other data"),
        Control(ours=49.9),
        Control(name="D", ours=88.0, printed=98.72),
    ]
    assert [one.said for one in controls] == [
        "A without privacy: 94.9 % (printed 98.72), so private runs of this rate and length are "
        "not the source's either",
        "B without privacy: 97.0 % (printed 97.5)",
        "C without privacy: 50.0 %",
        "without privacy: 49.9 %, below the 50.0 % that a control must reach",
        "D without privacy: 88.0 % (printed 98.72), below the 88.8 % that a control must reach",
    ]
    assert [one.passed for one in controls] == [True, True, True, False, False]

    short = "without privacy this rate and length reach 94.9 %, 98.72 are printed"
    assert controls[0].shortfall.startswith(short)
    assert [bool(one.shortfall) for one in controls] == [True, False, False, False, True]


@pytest.mark.parametrize(("free", "words"), [(91.0, "without privacy this rate"), (98.6, "")])
def test_printed_accuracies_are_not_judged_by_a_rate_that_is_not_the_sources(
    free: float, words: str, runs: FakeRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("dp_accounting")
    monkeypatch.setattr(cells, "QUICK_ROWS", 60)
    monkeypatch.setattr(cells.TrainedCell, "hindrance", "")
    runs.free = free
    monkeypatch.setattr(ItemRequest, "genuine", lambda self, kind: True)
    found = reproduce("gredp", "table1", ItemRequest(quick=True, seeds=5)).verdicts
    of_what = {one.claim: one for one in found if "accuracy" in one.claim}
    private = of_what["LeNet-5, GReDP, claimed epsilon 1: accuracy 96.5 %"]
    assert private.verdict == (UNDECIDED if words else FAILS)
    assert private.reason.startswith(words)
    # What is printed of the control itself is judged as it is.
    plain = of_what["LeNet-5, plain, claimed epsilon 1: accuracy 98.72 %"]
    assert plain.verdict != UNDECIDED


def test_quick_runs_take_the_data_set_that_was_named() -> None:
    cifar = ItemRequest(quick=True, data="cifar10=folder")
    assert training._available(cifar) == ("ResNet-20",)
    assert directional_training._names(cifar) == ("CIFAR-10",)
    assert training._available(ItemRequest(quick=True)) == ("LeNet-5",)
    both = ItemRequest(quick=False, data="svhn=a,mnist=b")
    assert directional_training._names(both) == ("MNIST", "SVHN")


def test_a_row_names_the_start_that_adaclip_was_asked_for() -> None:
    asked = ItemRequest(numbers=(("adaclip_start", 0.5),))
    assert directional.shown(directional.ADACLIP_TRAINS, asked) == "AdaClip, scales start at 0.5"
    assert directional.shown(directional.ADACLIP, asked) == "AdaClip"


def test_an_autoencoder_must_beat_the_best_constant_output() -> None:
    assert Control(ours=88.6, constant=88.0).passed
    failed = Control(ours=87.4, constant=88.0)
    assert not failed.passed
    assert failed.said.endswith("below the 88.0 % that a control must reach")


def test_figures_are_judged_for_every_model_and_dynamics_at_the_printed_epsilon(
    monkeypatch: pytest.MonkeyPatch, runs: FakeRuns
) -> None:
    pytest.importorskip("dp_accounting")
    monkeypatch.setattr(cells, "QUICK_ROWS", 60)
    names = ("LeNet-5", "Model-3")
    monkeypatch.setattr(training, "_available", lambda request: names)
    found = reproduce("gredp", "fig4", ItemRequest(quick=True)).verdicts
    fallen = [one for one in found if "falls with the batch size" in one.claim]
    assert [one.published for one in fallen] == [DROPS[name] for name in names]
    request = ItemRequest(quick=True, epochs=3, epsilon=(0.5, VARIED_AT))
    found = reproduce("gredp", "fig3", request).verdicts
    early = [one for one in found if "is spent of" in one.claim]
    assert [one.published for one in early] == [78.37, 33.38, 68.78]
    passed = [one for one in found if "passes" in one.claim]
    assert [one.published for one in passed] == [24.0, 2.0, 11.0, 16.0]
    # The runs are faked and gain 10 points an epoch: none is above 45 % after three.
    assert all(one.ours is not None and math.isnan(one.ours) for one in passed)
    assert {one.verdict for one in (*early, *passed)} == {UNDECIDED}
    other = reproduce("gredp", "fig3", ItemRequest(quick=True, epsilon=(0.5,))).verdicts
    assert not [one for one in other if "is spent of" in one.claim or "passes" in one.claim]


def test_panels_whose_control_failed_are_not_drawn() -> None:
    line = Line(label="ours", x=[1.0], y=[2.0])
    panels = [Panel(title=title, lines=[line]) for title in ("A, epsilon 1", "D, epsilon 1")]
    result = Result(paper="p", item="i", title="t", rows=[], panels=panels, settings={})
    passed, failed = Control(name="A", ours=94.9), Control(name="D", ours=8.0)
    found = with_controls(result, [passed, failed])
    assert found.panels[0] is panels[0]
    assert found.panels[1].title == "D, epsilon 1"
    assert not found.panels[1].lines
    (box,) = found.panels[1].boxes
    assert " ".join(box.text.split()) == f"not drawn: {failed.said}"
    assert found.control == f"{passed.said}; {failed.said}"
    (first, second) = with_controls(result, [Control(ours=8.0)]).panels
    assert first.boxes
    assert second.boxes


@pytest.mark.usefixtures("trusted")
def test_the_control_stands_below_the_figure(mnist: str, runs: FakeRuns) -> None:
    pytest.importorskip("dp_accounting")
    found = reproduce("gredp", "table1", request_of(mnist))
    assert found.footer.startswith("LeNet-5 without privacy: 91.0 % (printed 98.72), so private")
    runs.free = 80.0
    found = reproduce("gredp", "table1", request_of(mnist))
    assert "80.0 % (printed 98.72), below the 88.8 % that a control must reach" in found.footer
    assert all(panel.boxes and not panel.lines for panel in found.panels)
    assert found.footer.endswith(found.guard)


def test_names_and_folders_are_read() -> None:
    assert data_roots.read(None) is None
    assert data_roots.read("some/folder") is None
    assert data_roots.read("mnist=a,svhn=b") == {"mnist": "a", "svhn": "b"}
    for text in ("mnist=a,mnist=b", "mnist=", "mnist=a,imagenet=b", "mnist=a,b"):
        with pytest.raises(InvalidInput, match=r"^data: expected"):
            data_roots.read(text)
    with pytest.raises(InvalidInput, match="this item takes any data"):
        ItemRequest(data="mnist=a").dataset("digits")


@pytest.mark.parametrize(
    "words",
    ["gredp fig4 --batch-size 5", "gredp fig5 --lr 1", "pnsgd table --lr 1", "gredp table1 --lr 0"],
)
def test_sizes_that_an_item_lacks_are_refused(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["reproduce", *words.split(), "--quick"]) == cli.REFUSED
    assert list(tmp_path.iterdir()) == []

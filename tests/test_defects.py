"""The register of defects: published modes do what is printed and say so, corrected ones do not."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import dpkern
from dpkern import DPStep
from dpkern.errors import InvalidInput, PrivacyError
from dpkern.mechanisms import (
    DPSGD,
    AdaClip,
    Directional,
    GReDP,
    LaplaceSGD,
    Mechanism,
    ProjectedSGD,
    Pruned,
    SpectralDP,
)
from dpkern.mechanisms.notes import notes
from dpkern.papers import Request, reproduce, runner
from dpkern.papers.runner import Outcome
from dpkern.train import build

MODEL = build("gredp-lenet5", row_shape=(1, 28, 28), classes=10, linear="circulant")
SITES = dpkern.survey(MODEL, torch.zeros(2, 1, 28, 28))
SHAPES = [tuple(p.shape) for p in MODEL.parameters()]
NOISE: dict[str, Any] = {"noise_multiplier": 2.0, "max_grad_norm": 1.0}
SPECTRAL = NOISE | {"sites": SITES}
BUDGET: dict[str, Any] = {"epsilon": 2.0, "delta": 1e-5, "steps": 100, "sample_rate": 0.01}

REGISTER = {
    *("N1", "N2", "G1", "G2", "G3", "G4", "G5", "G6", "G7", "G8"),
    *("D1", "D2", "D3", "D4", "D5", "D6", "D7", "C1"),
    *("S6.2", "S6.3", "S6.4", "S6.5", "S6.6"),
}
"""What concerns these mechanisms; the others of the register belong to other systems."""

PUBLISHED: dict[str, tuple[Mechanism, set[str]]] = {
    "notes": (ProjectedSGD(n=100, **NOISE, mode="published"), {"N1", "N2"}),
    "gredp": (GReDP(**SPECTRAL, mode="published"), {"G2", "G3", "G5", "G6"}),
    "gredp real": (GReDP(**SPECTRAL, noise_kind="real", mode="published"), {"G1", "G5"}),
    "gredp per sample": (
        GReDP(**SPECTRAL, noise_point="per_sample", mode="published"),
        {"G4"},
    ),
    "gredp theorem 3": (GReDP(**SPECTRAL, claim_rule="theorem3", mode="published"), {"G7"}),
    "dpsgd per sample": (DPSGD(**NOISE, noise_point="per_sample", mode="published"), {"G4"}),
    "directional": (
        Directional(max_grad_norm=1.0, **BUDGET, mode="published"),
        {"D1", "D2", "D3", "D4"},
    ),
    "adaclip": (
        AdaClip(noise_multiplier=2.0, expected_batch_size=8.0, gamma=0.01, mode="published"),
        {"D7"},
    ),
    "laplace": (LaplaceSGD(**NOISE, mode="published"), {"C1"}),
    "pruned": (
        Pruned(inner=DPSGD(**NOISE, mode="published"), expected_batch_size=8, mask="published"),
        {"D5"},
    ),
    "spectral as coded": (
        SpectralDP.as_coded(2.0, 1.0, 8, sites=SITES),
        {"S6.2", "S6.3", "S6.4", "S6.5", "S6.6", "G4"},
    ),
}

CORRECTED: dict[str, Mechanism] = {
    "notes": ProjectedSGD(n=100, **NOISE),
    "gredp": GReDP(**SPECTRAL),
    "spectral": SpectralDP(**SPECTRAL),
    "dpsgd": DPSGD(**NOISE),
    "directional": Directional(**NOISE),
    "elliptic": Directional(**NOISE, shape="elliptic"),
    "adaclip": AdaClip(noise_multiplier=2.0, expected_batch_size=8.0),
    "laplace": LaplaceSGD(**NOISE),
    "pruned": Pruned(inner=DPSGD(**NOISE), expected_batch_size=8),
}


def plan_of(mechanism: Mechanism) -> Any:
    return mechanism.plan(SHAPES, mechanism.memory([p.detach() for p in MODEL.parameters()]))


@pytest.mark.parametrize(("mechanism", "ids"), PUBLISHED.values(), ids=PUBLISHED)
def test_a_published_plan_names_its_defects(mechanism: Mechanism, ids: set[str]) -> None:
    found = {note.id for note in plan_of(mechanism).notes}
    assert ids <= found


@pytest.mark.parametrize("mechanism", CORRECTED.values(), ids=CORRECTED)
def test_a_corrected_plan_has_none_and_claims_what_it_certifies(mechanism: Mechanism) -> None:
    plan = plan_of(mechanism)
    assert plan.notes == ()
    assert plan.private
    assert mechanism.claimed_event_spec(plan.dimension) == mechanism.event_spec(plan.dimension)


def certified(mechanism: Mechanism) -> float:
    """The certified multiplier of a step; 0 without one."""
    plan = plan_of(mechanism)
    return plan.noise_multiplier if plan.private else 0.0


# A note stands where its defect is, and the defect is in the numbers: (id, with it, its certified
# multiplier, the same without it, that one's). The multiplier that is claimed is 2 every time.
ALONE = GReDP(**SPECTRAL, mode="published", clipping="flat", noise_kind="circular_full")
SPECTRAL_ALONE = SpectralDP(
    **SPECTRAL, mode="published", clipping="flat", noise_kind="circular_full"
)
PLAIN = DPSGD(**NOISE, mode="published")
EFFECTS: list[tuple[str, Mechanism, float, Mechanism, float]] = [
    ("G1", replace(ALONE, noise_kind="real"), 0.0, ALONE, 2.0),
    ("G2", replace(ALONE, noise_kind="circular"), math.sqrt(2), ALONE, 2.0),
    ("G3", replace(ALONE, clipping="per_layer"), 2 / math.sqrt(len(SHAPES)), ALONE, 2.0),
    ("G4", replace(ALONE, noise_point="per_sample"), 0.0, ALONE, 2.0),
    ("G4", replace(PLAIN, noise_point="per_sample"), 0.0, PLAIN, 2.0),
    ("D5", Pruned(inner=PLAIN, expected_batch_size=8, mask="published"), 0.0,
     Pruned(inner=PLAIN, expected_batch_size=8), 2.0),
    ("C1", LaplaceSGD(**NOISE, mode="published"), 0.0, LaplaceSGD(**NOISE), 2.0),
    ("S6.5", replace(SPECTRAL_ALONE, gradient_units="mean", noise_point="per_sample", batch_size=4),
     1.0, SPECTRAL_ALONE, 2.0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "mechanism", "multiplier", "other", "others"), EFFECTS, ids=lambda v: str(v)[:12]
)
def test_a_defect_lowers_the_certificate_and_not_the_claim(
    name: str, mechanism: Mechanism, multiplier: float, other: Mechanism, others: float
) -> None:
    assert name in {note.id for note in plan_of(mechanism).notes}
    assert name not in {note.id for note in plan_of(other).notes}
    assert certified(mechanism) == pytest.approx(multiplier, rel=1e-4)
    assert certified(other) == pytest.approx(others, rel=1e-4)
    assert mechanism.claimed_event_spec() == other.claimed_event_spec()
    assert mechanism.claimed_event_spec()["noise_multiplier"] == 2.0


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (GReDP, {"noise_kind": "real"}),
        (GReDP, {"noise_point": "per_sample"}),
        (GReDP, {"unitary_scaling": "as_printed"}),
        (GReDP, {"claim_rule": "theorem3"}),
        (SpectralDP, {"noise_kind": ("ab", 0.6, 0.8)}),
        (SpectralDP, {"noise_point": "per_sample"}),
        (SpectralDP, {"mask": "authors_slice", "noise_band": "block"}),
        (SpectralDP, {"mask": "authors_slice"}),
        (SpectralDP, {"gradient_units": "mean", "noise_point": "per_sample", "batch_size": 8}),
        (SpectralDP, {"layer_bound": "c_over_sqrt_layers"}),
        (DPSGD, {"noise_point": "per_sample"}),
    ],
    ids=str,
)
def test_corrected_modes_refuse_what_is_printed_wrongly(kind: Any, change: dict[str, Any]) -> None:
    given = (NOISE if kind is DPSGD else SPECTRAL) | change
    assert kind(**given, mode="published").mode == "published"
    with pytest.raises(InvalidInput):
        kind(**given)


@pytest.mark.parametrize(("mechanism", "ids"), PUBLISHED.values(), ids=PUBLISHED)
def test_the_report_says_so(mechanism: Mechanism, ids: set[str]) -> None:
    params = [p.detach().clone() for p in MODEL.parameters()]
    exactly = plan_of(mechanism).samples
    sampling: dict[str, Any] = {"sample_rate": 0.1, "expected_batch_size": 8}
    if isinstance(mechanism, ProjectedSGD):
        sampling |= {"sample_rate": 0.01, "sampling": "fixed", "dataset_size": 100}
    elif exactly is not None:
        with pytest.raises(PrivacyError):  # Poisson batches have any size
            DPStep(mechanism, params, **sampling).report(1e-5)
        sampling |= {"sampling": "fixed", "dataset_size": 80}
    step = DPStep(mechanism, params, **sampling)
    if not step.plan.private:
        step.finish()
    report = step.report(1e-5)
    assert ids <= {note["id"] for note in report["notes"]}
    assert report["mode"] == "published"
    if not step.plan.private:
        assert report["epsilon_certified"] == "inf"
        assert report["non_private"]
        assert report["epsilon_claimed"] != "inf"


ITEMS = [
    ("directional", "fig2", {"D6"}),
    ("directional", "kappa", {"D1"}),
    ("gredp", "variance", {"G5"}),
    ("gredp", "checks", {"G7"}),
    ("pnsgd", "table", {"N1", "N2"}),
    ("spectral", "quirks", {"S6.2", "S6.3", "S6.4", "S6.5"}),
]
TRAINING = [("directional", "fig6", {"D4", "D7"}), ("gredp", "fig5", {"G8"})]


def told(paper: str, item: str) -> str:
    result = reproduce(paper, item, Request(quick=True))
    return " ".join([*result.notes, *(row.note for row in result.rows)])


@pytest.mark.parametrize(("paper", "item", "ids"), ITEMS)
def test_reproduced_items_name_the_others(paper: str, item: str, ids: set[str]) -> None:
    notes_of_it = told(paper, item)
    assert all(f"{name}:" in notes_of_it for name in ids)


@pytest.mark.parametrize(("paper", "item", "ids"), TRAINING)
def test_items_that_train_name_what_their_papers_print_wrongly(
    paper: str, item: str, ids: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = Outcome(
        accuracy=0, best=0, spread=0, seeds=1, epsilon_claimed=1, epsilon_certified=1,
        relation="", ms_per_step=0, history=(),
    )  # fmt: skip
    monkeypatch.setattr(runner, "run", lambda *_, **__: nothing)
    notes_of_it = told(paper, item)
    assert all(f"{name}:" in notes_of_it for name in ids)


def test_every_row_of_the_register_is_somewhere() -> None:
    shown = [ids for _, ids in PUBLISHED.values()] + [ids for _, _, ids in ITEMS + TRAINING]
    assert set().union(*shown) == REGISTER
    assert {note.id for note in notes(*sorted(REGISTER))} == REGISTER

"""The register of defects: published modes do what is printed and say so, corrected ones do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dpkern
from dpkern.mechanisms import (
    DPSGD,
    AdaClip,
    Directional,
    GReDP,
    LaplaceSGD,
    Mechanism,
    ProjectedSGD,
    SpectralDP,
)
from dpkern.papers import Request, reproduce
from dpkern.train import build

MODEL = build("gredp-lenet5", row_shape=(1, 28, 28), classes=10, linear="circulant")
SITES = dpkern.survey(MODEL, torch.zeros(2, 1, 28, 28))
SHAPES = [tuple(p.shape) for p in MODEL.parameters()]
NOISE: dict[str, Any] = {"noise_multiplier": 2.0, "max_grad_norm": 1.0}
SPECTRAL = NOISE | {"sites": SITES}
BUDGET: dict[str, Any] = {"epsilon": 2.0, "delta": 1e-5, "steps": 100, "sample_rate": 0.01}

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
    "spectral as coded": (
        SpectralDP.as_coded(2.0, 1.0, 8, sites=SITES),
        {"S6.2", "S6.3", "S6.5", "S6.6", "G4"},
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


@pytest.mark.parametrize(
    ("paper", "item", "ids"),
    [
        ("directional", "fig2", {"D6"}),
        ("pnsgd", "table", {"N1", "N2"}),
    ],
)
def test_reproduced_items_name_the_others(paper: str, item: str, ids: set[str]) -> None:
    result = reproduce(paper, item, Request())
    told = " ".join([*result.notes, *(row.note for row in result.rows)])
    assert all(f"{name}:" in told for name in ids)


def test_items_that_train_name_what_their_papers_print_wrongly() -> None:
    from dpkern.papers import directional_runs, gredp

    assert any(note.startswith("G8:") for note in gredp.NOTES)
    assert any(note.startswith("D7:") for note in directional_runs.NOTES)

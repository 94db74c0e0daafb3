"""The register of defects: published modes do what is printed and say so, corrected ones do not."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dpkern
from dpkern import DPStep
from dpkern.base.errors import InvalidInput, PrivacyError
from dpkern.papers import ItemRequest, claims_local, reproduce, runner
from dpkern.papers.runner import RunOutcome
from dpkern.papers.spof import training as spof_runs
from dpkern.privacy.mechanisms import (
    DPSGD,
    FM,
    ILM,
    SPOF,
    AdaClip,
    AdLM,
    Directional,
    GReDP,
    LaplaceSGD,
    Mechanism,
    ObjectivePerturbation,
    OutputSGD,
    ProjectedSGD,
    Pruned,
    SpectralDP,
)
from dpkern.privacy.mechanisms.notes import notes
from dpkern.privacy.theory.adlm import MNIST
from dpkern.train import build

ROOT = Path(__file__).parents[2]
MODEL = build("gredp-lenet5", row_shape=(1, 28, 28), classes=10, linear="circulant")
SITES = dpkern.survey(MODEL, torch.zeros(2, 1, 28, 28))
SHAPES = [tuple(p.shape) for p in MODEL.parameters()]
NOISE: dict[str, Any] = {"noise_multiplier": 2.0, "max_grad_norm": 1.0}
SPECTRAL = NOISE | {"sites": SITES}
BUDGET: dict[str, Any] = {"epsilon": 2.0, "delta": 1e-5, "steps": 100, "sample_rate": 0.01}

LOSSES = {*(f"S{row}" for row in range(1, 16)), *(f"A{row}" for row in range(1, 7))}
"""Defects of mechanisms that perturb a loss, and of what their papers say beside that."""
REGISTER = {
    *LOSSES,
    *("N1", "N2", "G1", "G2", "G3", "G4", "G5", "G6", "G7", "G8"),
    *("D1", "D2", "D3", "D4", "D5", "D6", "D7", "C1"),
    *("S6.2", "S6.3", "S6.4", "S6.5", "S6.6"),
}
"""Every row of the register of defects, and those of the published Spectral-DP code."""

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


ONE: dict[str, Any] = {"epsilon": 1.0, "mode": "published"}
OF_LOSSES: dict[str, tuple[ObjectivePerturbation, set[str], ObjectivePerturbation]] = {
    "spof": (
        SPOF(**ONE),
        {"S1", "S2", "S4", "S5", "S6", "S7", "S8", "S10", "S13"},
        SPOF(epsilon=1.0),
    ),
    "spof's sgd": (OutputSGD(**ONE), {"S6", "S7", "S12", "S13"}, OutputSGD(epsilon=1.0)),
    "fm": (FM(**ONE), {"S1", "S2", "S4", "S6", "S7", "S8", "S10", "S13"}, FM(epsilon=1.0)),
    "adlm": (
        AdLM(**ONE, setting=MNIST),
        {"A1", "A2", "A3", "A4", "A5", "A6"},
        AdLM(epsilon=1.0, setting=MNIST),
    ),
    "ilm": (ILM(**ONE, setting=MNIST), {"A1", "A3", "A4", "A5"}, ILM(epsilon=1.0, setting=MNIST)),
}


@pytest.mark.parametrize(("published", "ids", "corrected"), OF_LOSSES.values(), ids=OF_LOSSES)
def test_perturbed_losses_name_their_defects_and_corrected_ones_keep_their_claim(
    published: ObjectivePerturbation, ids: set[str], corrected: ObjectivePerturbation
) -> None:
    assert {note.id for note in published.notes} == ids
    assert corrected.notes == ()
    assert published.epsilon_claimed() == corrected.epsilon_claimed() == 1.0
    assert published.epsilon_certified() > 4  # infinite but for ILM, which sees no relevances
    assert corrected.epsilon_certified() == pytest.approx(1.0, abs=1e-4)


# Of each row a test in which what is printed does it, and what is corrected does not.
SHOWN = {
    "S1": "theory_spof.test_coefficients_at_zero_s1",
    "S2": "spof_training.test_s2_the_printed_loss_diverges_and_taylors_does_not",
    "S3": "theory_spof.test_printed_polynomial_is_off_in_the_second_order_s3",
    "S4": "objective.test_s4_a_visit_costs_sqrt_2_epsilon_and_a_joint_scale_epsilon",
    "S5": "theory_spof.test_printed_rewriting_of_the_shift_is_another_function_v7_s5",
    "S6": "objective."
    "test_s5_s6_the_printed_scale_follows_every_record_and_corrected_steps_have_none",
    "S7": "objective."
    "test_s7_published_gradients_show_the_code_and_corrected_weights_the_release_only",
    "S8": "objective.test_s8_theorem_1_jumps_where_the_environment_is_still_and_corrected_does_not",
    "S9": "theory_spof_noise.test_only_the_correct_density_is_that_of_draws_v10_s9",
    "S10": "theory_spof_noise.test_largest_of_many_v11_s10",
    "S11": "theory_spof.test_the_definition_57_is_the_corrected_curve_and_not_58_s11",
    "S12": "objective.test_s12_the_printed_gradient_ignores_the_weights_and_4_never_clips",
    "S13": "objective."
    "test_s13_the_constant_moves_logits_by_its_product_with_the_code_and_is_no_part_of_what",
    "S14": "cost_autoencoder.test_s14_what_the_source_leaves_out_is_itemised",
    "S15": "noise_tables.test_s15_reuse_cancels_without_knowing_the_table_and_fresh_noise_does_not",
    "A1": "adlm.test_a1_one_record_shows_more_than_claimed",
    "A2": "theory_adlm.test_a2_one_record_moves_everybodys_relevance",
    "A3": "theory_adlm.test_a3_readings_of_the_first_layer",
    "A4": "theory_adlm.test_a4_lemma_7_is_no_bound_of_what_it_says",
    "A5": "bounded_layers.test_a5_printed_sign_and_power",
    "A6": "adlm.test_a6_floor_of_shares",
}


@pytest.mark.parametrize(("row", "where"), SHOWN.items(), ids=SHOWN)
def test_every_row_of_the_losses_has_a_test_that_bears_its_name(row: str, where: str) -> None:
    module, name = where.split(".")
    assert row.lower() in name.split("_")
    (file,) = ROOT.glob(f"tests/**/test_{module}.py")
    place = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    assert callable(getattr(importlib.import_module(place), name))


def test_rows_about_counts_and_tables_stand_where_they_are_priced() -> None:
    assert spof_runs._operations().note.startswith("S14:")
    assert any(row.note.startswith("S15:") for row in claims_local.local())


ITEMS = [
    ("spof", "losses", {"S1", "S2", "S3", "S5"}),
    ("spof", "audit", {"S4", "S6", "S7"}),
    ("spof", "fig5", {"S9", "S10"}),
    ("spof", "fig6", {"S11"}),
    ("adlm", "sensitivity", {"A1", "A2", "A3", "A6"}),
    ("adlm", "lemma7", {"A4", "A5"}),
    ("directional", "fig2", {"D6"}),
    ("directional", "kappa", {"D1"}),
    ("gredp", "variance", {"G5"}),
    ("gredp", "checks", {"G7"}),
    ("pnsgd", "table", {"N1", "N2"}),
    ("spectral", "quirks", {"S6.2", "S6.3", "S6.4", "S6.5"}),
]
TRAINING = [("directional", "fig6", {"D4", "D7"}), ("gredp", "fig5", {"G8"})]


def told(paper: str, item: str) -> str:
    result = reproduce(paper, item, ItemRequest(quick=True))
    return " ".join([*result.notes, *(row.note for row in result.rows)])


@pytest.mark.slow
@pytest.mark.parametrize(("paper", "item", "ids"), ITEMS)
def test_reproduced_items_name_the_others(paper: str, item: str, ids: set[str]) -> None:
    notes_of_it = told(paper, item)
    assert all(f"{name}:" in notes_of_it for name in ids)


@pytest.mark.slow
@pytest.mark.parametrize(("paper", "item", "ids"), TRAINING)
def test_items_that_train_name_what_their_papers_print_wrongly(
    paper: str, item: str, ids: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = RunOutcome(
        accuracy=0, best=0, spread=0, seeds=1, epsilon_claimed=1, epsilon_certified=1,
        relation="", ms_per_step=0, history=(),
    )  # fmt: skip
    monkeypatch.setattr(runner, "run", lambda *_, **__: nothing)
    notes_of_it = told(paper, item)
    assert all(f"{name}:" in notes_of_it for name in ids)


def test_every_row_of_the_register_is_somewhere() -> None:
    shown = [ids for _, ids in PUBLISHED.values()] + [ids for _, _, ids in ITEMS + TRAINING]
    shown += [ids for _, ids, _ in OF_LOSSES.values()]
    assert set().union({"S14", "S15"}, *shown) == REGISTER
    assert set(SHOWN) == LOSSES
    assert {note.id for note in notes(*sorted(REGISTER))} == REGISTER

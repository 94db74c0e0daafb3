"""Rows of the table of claims for local mechanisms: one release of each record, pure epsilon.

Sources: the stabilised perturbed loss (SPOF); AdLM; the lecture notes on private projected SGD.
"""

from __future__ import annotations

import math
from typing import Any

from ..privacy.mechanisms import FM, ILM, SPOF, AdLM, ObjectivePerturbation, OutputSGD
from ..privacy.theory.adlm import CIFAR10, MNIST
from .pnsgd import divergence
from .result import ComparisonRow

VISITS = 20
"""Epochs of SPOF's training: visits of each record."""


def row(
    setting: str, claimed: float | None, found: tuple[float, str], note: str = "", **more: Any
) -> ComparisonRow:
    """Build one line of the table; ``found`` is ``(certified epsilon, relation)``."""
    epsilon, relation = found
    return ComparisonRow(
        item="claims",
        setting=setting,
        quantity="certified epsilon",
        ours=epsilon,
        epsilon_claimed=claimed,
        epsilon_certified=epsilon,
        relation=relation if math.isfinite(epsilon) else "-",
        note=note,
        **more,
    )


def _perturbed_losses() -> list[ComparisonRow]:
    """Return SPOF, FM and algorithm 2 at epsilon 1: pure epsilon of one record over its visits."""
    spof = SPOF(epsilon=1.0, mode="published")
    bare = SPOF(epsilon=1.0, mode="published", constant=0.0)
    fm = FM(epsilon=1.0, mode="published")
    joint = FM(epsilon=1.0, mode="published", joint=True)
    alone = "as the target of one visit only, without the constant"
    return [
        row(
            f"SPOF, coefficients released once, epsilon 1, {alone}",
            1.0,
            (bare.epsilon_audited(), bare.relation),
            "S4: two Laplace draws of scale Delta / (sqrt(2) epsilon) each",
        ),
        row(
            "SPOF, gradients of encoder and decoder",
            *_trained(spof, 1),
            "S7: codes and inputs enter the gradients without noise",
        ),
        row(
            f"SPOF as published, autoencoder after {VISITS} visits",
            *_trained(spof, VISITS),
            "S6, S7: scales depend on the record, and fresh noise at every visit adds up",
        ),
        row(
            f"SPOF corrected, record released once, autoencoder after {VISITS} visits",
            *_trained(SPOF(epsilon=1.0), VISITS),
            "with public bounds of the features; training afterwards is post-processing",
        ),
        row(
            f"SPOF corrected, target only, autoencoder after {VISITS} visits",
            *_trained(SPOF(epsilon=1.0, release="coefficients"), VISITS),
            "S7: the encoder still sees the record",
        ),
        row(
            f"FM as published, {alone}",
            1.0,
            (fm.epsilon_audited(), fm.relation),
            "S4: as SPOF's",
        ),
        row(
            f"FM with the classic joint scale, {alone}",
            1.0,
            (joint.epsilon_audited(), joint.relation),
            "scale (3n/2) / epsilon",
        ),
        row(
            f"FM as published, autoencoder after {VISITS} visits",
            *_trained(fm, VISITS),
            "S7: as SPOF's",
        ),
        row(
            f"FM corrected, record released once, autoencoder after {VISITS} visits",
            *_trained(FM(epsilon=1.0), VISITS),
        ),
        row(
            f"DP-SGD of SPOF's algorithm 2 as published, {VISITS} visits",
            *_trained(OutputSGD(epsilon=1.0, mode="published"), VISITS),
            "S6, S7: the scale switches on the private norm, codes and inputs have no noise",
        ),
        row(
            f"DP-SGD of SPOF's algorithm 2, whole gradient clipped in L1, {VISITS} visits",
            *_trained(OutputSGD(epsilon=1.0), VISITS),
            "epsilon of one visit is 1",
        ),
        row(
            "SPOF corrected, columns divided by their maxima over the data",
            1.0,
            (math.inf, "-"),
            "a maximum depends on every record: replacing one may move all others",
        ),
    ]


def _trained(mechanism: ObjectivePerturbation, visits: int) -> tuple[float, tuple[float, str]]:
    """Return the claimed and the certified epsilon, with its relation, of what is trained."""
    certified = mechanism.epsilon_certified(visits=visits)
    return mechanism.epsilon_claimed(), (certified, mechanism.relation)


def _adlm() -> list[ComparisonRow]:
    """Return AdLM and ILM as wholes at epsilon 1 in thirds, for any number of epochs."""
    public = {"mode": "published", "relevance_from": "public_network"}
    cases: list[tuple[type[AdLM], str, str, dict[str, Any]]] = [
        (
            AdLM,
            "as published",
            "A2: relevances by a network trained on the same records without noise",
            {"mode": "published"},
        ),
        (
            AdLM,
            "as published but a public network",
            "A1: |L| epsilon2 / (2 |h0|) + 2 |L| epsilon3 / Delta_F + epsilon1 / 2",
            public,
        ),
        (
            AdLM,
            "a public network, one draw shared by all records",
            "A1: differences of records are released exactly",
            public | {"noise_sharing": "shared_per_feature"},
        ),
        (
            AdLM,
            "a public network, coefficients with the hidden layer",
            "A3: gradients pass through their clean part",
            public | {"coefficient_form": "feature_expanded"},
        ),
        (ILM, "as published", "A1: as AdLM, without relevances", {"mode": "published"}),
        (AdLM, "corrected, a public network", "", {}),
        (ILM, "corrected", "", {}),
    ]
    return [
        row(
            f"{kind.__name__} {what}, {setting.name}, epsilon 1",
            *_trained(kind(epsilon=1.0, setting=setting, **fields), VISITS),
            note,
        )
        for setting in (MNIST, CIFAR10)
        for kind, what, note, fields in cases
    ]


def local() -> list[ComparisonRow]:
    """Return randomized response, SPOF and its baselines, AdLM, and noise that is read again."""
    lie = 1 / (1 + math.e)
    response = divergence.ldp_epsilon([[1 - lie, lie], [lie, 1 - lie]])
    local = "replace_one, local"
    relevance = {"MNIST": 1800 / (2 * 32), "CIFAR-10": 7200 / (2 * 128)}
    labels = {"MNIST": 2 * 1800 / 1812.5, "CIFAR-10": 2 * 7200 / 2550}
    rows = [
        row(
            "Randomized response, epsilon 1",
            1.0,
            (response, local),
            "lies with probability 1 / (1 + e)",
        ),
        *_perturbed_losses(),
    ]
    for name, factor in relevance.items():
        rows.append(
            row(
                f"AdLM, {name}: inputs at epsilon 1, one draw per tuple",
                1.0,
                (factor, local),
                "A1: |L| epsilon / (2 |h0|)",
            )
        )
    for name, factor in labels.items():
        rows.append(
            row(
                f"AdLM, {name}: labels at epsilon 1, one draw per tuple",
                1.0,
                (factor, local),
                "A1: 2 |L| epsilon / Delta_F",
            )
        )
    rows += _adlm()
    rows.append(
        row(
            "Noise from a reused table of samples",
            None,
            (math.inf, "-"),
            "S15: whoever knows the table reads the noise off",
        )
    )
    return rows

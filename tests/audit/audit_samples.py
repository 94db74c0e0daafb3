"""Findings made by hand: what an audit's report is tried on."""

from __future__ import annotations

from typing import Any

from dpkern.audit.claims import Claim, GaussianDP, NoClaim, PureDP
from dpkern.audit.findings import Check, Evidence, Findings

PASSED = Check(layer="bits", name="lattice", passed=True, text="every output is a multiple of 1/64")
FAILED = Check(layer="bits", name="repeats", passed=False, text="releases 3 and 17 are equal")
UNASKED = Check(
    layer="sensitivity", name="norms", passed=None, text="the subject has no sum without noise"
)


def evidence(
    pair: str,
    counts: tuple[int, int],
    upper: tuple[float, float],
    bounds: tuple[float, float],
    *,
    layer: str = "canary",
    runs: int = 20_000,
) -> Evidence:
    """One test."""
    return Evidence(
        pair=pair,
        layer=layer,
        score="fisher",
        runs=runs,
        false_positives=counts[0],
        false_negatives=counts[1],
        fpr_upper=upper[0],
        fnr_upper=upper[1],
        mu_lower=bounds[0],
        epsilon_lower=bounds[1],
    )


def findings(
    claimed: Claim, certified: Claim, tests: tuple[Evidence, ...], **changes: Any
) -> Findings:
    """An audit that found these tests."""
    given = {
        "subject": "a release",
        "claimed": claimed,
        "certified": certified,
        "delta": 1e-5,
        "confidence": 0.999,
        "runs": 20_000,
        "total_runs": 260_000,
        "seconds": 0.25,
        "evidence": tests,
        "checks": (PASSED, UNASKED),
        "spectrum": tuple(0.97 + 0.06 * i / 15 for i in range(16)),
        "settings": {"workers": 1, "seed": 1, "spectrum_in_certified_variances": True},
    }
    return Findings(**{**given, **changes})


SOUND = findings(
    GaussianDP(1.0),
    GaussianDP(1.0),
    (
        evidence("weakest", (480, 16_800), (0.0275, 0.8495), (0.884, 3.1)),
        evidence("weakest", (3173, 9960), (0.1675, 0.5110), (0.9366, 3.3)),
        evidence("weakest", (9967, 3166), (0.5114, 0.1672), (0.9364, 3.3)),
        evidence("uniform", (3160, 10_050), (0.1669, 0.5155), (0.9278, 3.2)),
        evidence("coordinate", (3201, 10_007), (0.1690, 0.5134), (0.9245, 3.2)),
    ),
)
"""A Gaussian mechanism that keeps its promise."""

BROKEN = findings(
    GaussianDP(0.9),
    NoClaim(),
    (
        evidence("weakest", (0, 3), (5.9e-4, 8.1e-4), (6.39, 7.2)),
        evidence("uniform", (3800, 9100), (0.1995, 0.469), (0.921, 3.1)),
    ),
    subject="real noise on a spectrum",
    checks=(PASSED, FAILED),
    settings={},
    spectrum=tuple([0.0] * 7 + [0.98 + 0.01 * i for i in range(9)]),
)
"""No noise in some directions."""

PURE = findings(
    PureDP(1.0),
    PureDP(1.0),
    (
        evidence("one-hot", (3640, 9300), (0.1911, 0.4895), (0.900, 0.96), layer="likelihood"),
        evidence("one-hot", (900, 17_300), (0.0503, 0.8744), (0.494, 0.91), layer="likelihood"),
    ),
    spectrum=(),
)
"""A Laplace mechanism that keeps its promise."""

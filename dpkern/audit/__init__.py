"""Test our claims: recompute the proofs of the noise distributions, and audit whatever releases.

``run`` audits a ``Subject``; the subjects of this package are in ``dpkern.subjects``.
``certificate`` recomputes the proofs of the noise distributions. ``docs/audit.md`` explains the way
from claim to proof to audit.
"""

from ..base.renamed import old_names
from .auditing import run
from .claims import OLD_NAMES, ApproximateDP, Claim, GaussianDP, Laplace, NoClaim, PureDP, of_event
from .findings import LAYERS, Check, Evidence, Findings
from .subject import Pair, Score, Subject

__all__ = [
    "LAYERS",
    "ApproximateDP",
    "Check",
    "Claim",
    "Evidence",
    "Findings",
    "GaussianDP",
    "Laplace",
    "NoClaim",
    "Pair",
    "PureDP",
    "Score",
    "Subject",
    "of_event",
    "run",
]

__getattr__ = old_names(__name__, OLD_NAMES)

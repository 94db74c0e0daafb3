"""What tests our claims: proofs of the noise laws recomputed, and audits of anything that releases.

``run`` audits a ``Subject``; ``dpkern.subjects`` has those of this package, ``docs/audit.md`` the
way from claim to proof to audit. ``certificate`` recomputes what is proved of the noise laws.
"""

from .auditing import run
from .claims import Approximate, Claim, Gaussian, Laplace, Nothing, Pure, of_event
from .findings import LAYERS, Check, Evidence, Findings
from .subject import Pair, Score, Subject

__all__ = [
    "LAYERS",
    "Approximate",
    "Check",
    "Claim",
    "Evidence",
    "Findings",
    "Gaussian",
    "Laplace",
    "Nothing",
    "Pair",
    "Pure",
    "Score",
    "Subject",
    "of_event",
    "run",
]

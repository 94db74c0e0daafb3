"""Certify epsilon at a delta, with the relation, the accountant and the event behind it.

``epsilon`` and ``certify`` answer for a planned run, ``calibrate`` finds the noise for a target,
and a ``Ledger`` keeps the history of a run as it happens. Read from a mechanism are its event, what
it releases of all records besides, and its remarks (see ``dpkern.privacy.mechanisms.base``); for
a claim also what its paper says. dp-accounting does the arithmetic and is imported when the first
epsilon is asked for.

How batches are drawn decides what may be claimed:

============  ============  ====================================================================
sampling      relation      one step is
============  ============  ====================================================================
``poisson``   add_remove    a release from a Poisson sample of rate ``sample_rate``
``fixed``     replace_one   a release from a uniform subset; the dataset size is public
``shuffled``  zero_out      one release per *epoch* for each record, never amplified
``with_replacement``  --    not certified: epsilon is infinite
============  ============  ====================================================================

Delta has to be well below 1 / number of records (``delta_warning``). ``shown_bound`` prints an
epsilon or a delta and never rounds it down.

A mechanism with a stronger relation of its own (``replace_one``) keeps it. A certificate covers
the pseudo-random generator only as far as ChaCha is one, and only what is released: parameters and
noised values, not losses, accuracies or realised batch sizes.
"""

from __future__ import annotations

from .accountants import RELATIONS
from .delta import delta_warning
from .history import MAX_DIMENSION, SAMPLING, Accountable, Certificate
from .ledger import Ledger
from .planning import Calibratable, ClaimedMechanism, calibrate, certify, claimed_epsilon, epsilon
from .shown import shown_bound, shown_lower_bound

__all__ = [
    "MAX_DIMENSION",
    "RELATIONS",
    "SAMPLING",
    "Accountable",
    "Calibratable",
    "Certificate",
    "ClaimedMechanism",
    "Ledger",
    "calibrate",
    "certify",
    "claimed_epsilon",
    "delta_warning",
    "epsilon",
    "shown_bound",
    "shown_lower_bound",
]

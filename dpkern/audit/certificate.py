"""Run and print the proofs of the two noise distributions that dpkern ships.

Run ``python -m dpkern.audit.certificate [--exact]``; the exit status is 1 if a law fails.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import replace

from ..base.laws import GAUSSIAN, LAPLACE, Law
from ..privacy.laws import certificate, exact_certificate
from ..privacy.laws.certificate import LawCheck


def committed(*, exact: bool = False) -> tuple[LawCheck, LawCheck]:
    """Return certificates of the Gaussian and the Laplace distribution that dpkern ships.

    Args:
        exact: prove the Gaussian with integers and interval arithmetic (needs python-flint).

    Raises:
        MissingDependency: ``exact`` without python-flint.
    """
    if exact:
        first = exact_certificate.gaussian()
    else:
        first = certificate.gaussian()
    return _identified(first, GAUSSIAN), _identified(certificate.laplace(), LAPLACE)


def _identified(proved: LawCheck, law: Law) -> LawCheck:
    """Add the faults of the numbers that are not those committed, whatever they prove."""
    faults = proved.faults + certificate.table_faults(law, law.table)
    if proved.tail_sha256 != certificate.TAIL_SHA256[law.name]:
        faults += (f"tail hash {proved.tail_sha256} is not {certificate.TAIL_SHA256[law.name]}",)
    return replace(proved, faults=faults)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the certificates of both laws; 0 if both passed."""
    parser = argparse.ArgumentParser(
        prog="python -m dpkern.audit.certificate", description="Prove dpkern's two noise laws."
    )
    parser.add_argument("--exact", action="store_true", help="interval arithmetic for the Gaussian")
    started = time.perf_counter()
    certificates = committed(exact=parser.parse_args(arguments).exact)
    for c in certificates:
        print(
            f"{c.law}: {'PASSED' if c.passed else 'REJECTED'} ({c.method})\n"
            f"  worst ratio {c.worst_ratio:.9f} at {c.worst_at:.4g}, {c.vertices} inequalities in "
            f"{c.intervals} phase interval(s)\n"
            f"  total variation to the idealised law <= 2^{math.ceil(100 * c.cut_log2) / 100:.2f}\n"
            f"  standard deviation {c.sd_cells:.6f} cells\n"
            f"  alias table sha256 {c.table_sha256}\n"
            f"  tail sha256 {c.tail_sha256}"
        )
        for fault in c.faults:
            print(f"  FAULT: {fault}")
    print(f"{time.perf_counter() - started:.1f} s")
    return 0 if all(c.passed for c in certificates) else 1


if __name__ == "__main__":
    raise SystemExit(main())

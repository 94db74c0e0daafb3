"""Check whether a delta means anything for a data set of this size."""

from __future__ import annotations

from .shown import shown_exactly


def delta_warning(
    delta: float, *, dataset_size: int | None = None, sample_rate: float | None = None
) -> str | None:
    """Return why ``delta`` is too large, in a sentence; None if it is below 1 / records.

    Publishing one whole record, drawn at random from n, is (0, 1/n)-differentially private. A
    guarantee with delta >= 1/n therefore does not exclude it, whatever its epsilon.

    Args:
        delta: of (epsilon, delta).
        dataset_size: number of records n.
        sample_rate: expected batch size / n, where n is unknown: batches of one record or more
            mean n >= 1 / sample_rate, so a delta of at least the rate is too large for certain.

    Reference: Dwork and Roth, The Algorithmic Foundations of Differential Privacy, 2014, section
    2.3.
    """
    if dataset_size is not None:
        if not dataset_size or delta < 1 / dataset_size:
            return None
        limit = f"1/n = 1/{dataset_size}"
    elif sample_rate is not None and delta >= sample_rate:
        limit = f"the sample rate {shown_exactly(sample_rate)}, so not below 1/n"
    else:
        return None
    return (
        f"delta {shown_exactly(delta)} is not below {limit}: such a guarantee allows publishing "
        "a whole record drawn at random. Choose a delta well below 1 / number of records."
    )


__all__ = ["delta_warning"]

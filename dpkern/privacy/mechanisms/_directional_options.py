"""Check the options of directional noise that depend on each other."""

from __future__ import annotations

from ...base.errors import InvalidInput
from ...base.validate import choice, integer

GENERATORS = ("ours", "ours_w1", "gaussian")
SOURCES = ("lot", "full", "running")
TARGETS = ("sum", "average")
SHAPES = ("isotropic", "elliptic")


def check_shape(*, generator: str, w_source: str, shape: str, mode: str) -> None:
    """Check what shapes the noise: generator, source of importances, and corrected shape.

    Raises:
        InvalidInput: an unknown option, or one that this mode does not have.
    """
    if generator == "adaclip":
        raise InvalidInput(
            "generator",
            expected=f"one of {', '.join(GENERATORS)}",
            got=generator,
            remedy="Use dpkern.mechanisms.AdaClip: it clips and adapts by rules of its own.",
        )
    choice(GENERATORS, generator=generator)
    choice(SOURCES, w_source=w_source)
    if choice(SHAPES, shape=shape) == "elliptic" and mode == "published":
        raise InvalidInput(
            "shape",
            expected="'isotropic' with mode='published'",
            got=shape,
            remedy="Leave shape out, or pass mode='corrected': generator is the printed shape.",
        )


def check_target(*, noise_target: str, lot: int | None, mode: str) -> None:
    """Check that noise meant for the average comes with the size of a lot.

    Raises:
        InvalidInput: an unknown option, or one that this mode does not have.
    """
    average = choice(TARGETS, noise_target=noise_target) == "average"
    if average and (mode != "published" or lot is None):
        raise InvalidInput(
            "noise_target",
            expected="'sum', or 'average' with mode='published' and lot=",
            got=noise_target,
            remedy="Pass lot=, the public size, with mode='published', or noise_target='sum'.",
        )
    if lot is not None:
        integer(1, lot=lot)


def no_budget(name: str, expected: str, got: object) -> InvalidInput:
    """Return the error for a number that neither was given nor follows from a budget."""
    return InvalidInput(
        name,
        expected=expected,
        got=got,
        remedy="Pass either the noise, or epsilon=, delta=, steps= and sample_rate=.",
    )

"""Options of a run that perturbs its loss; see ``options`` for the three types."""

from __future__ import annotations

from dataclasses import dataclass

from ..base import validate
from ..base.errors import InvalidInput
from ..objective.records import GENERATED, Bounds
from ..privacy.mechanisms import ObjectivePerturbation
from .options import MAX_SEED, ReleaseOptions, required


@dataclass(frozen=True, kw_only=True)
class RecordOptions(ReleaseOptions):
    """Everything that the privacy statement of such a run depends on.

    ``epsilon`` is what the mechanism calls so, for one release of one record. ``users`` None is 2,
    and 1 for fm. ``columns`` and ``bounds`` are texts with commas. ``samples`` None takes the rows;
    of generated data it is the number of records, 1000 unless it is given.
    """

    NAMES = ObjectivePerturbation.names(trained_by="records")

    data: str = GENERATED
    mechanism: str = "spof"
    epochs: int = 20
    users: int | None = None
    features: int = 14
    columns: str | None = None
    user_column: str | None = None
    bounds: str | None = None
    samples: int | None = None
    sigma: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        required(self.epsilon, what="one release of a record")
        alone = ObjectivePerturbation.named(self.mechanism).single_user
        if self.users is None:
            object.__setattr__(self, "users", 1 if alone else 2)
        validate.integer(1, users=self.users)
        if alone and self.users != 1:
            raise InvalidInput(
                "users",
                expected="1: the functional mechanism trains a single autoencoder",
                got=self.users,
                remedy="Pass --users 1, or --mechanism spof.",
            )
        validate.integer(2, features=self.features)
        if self.samples is not None:
            validate.integer(1, samples=self.samples)
        validate.non_negative(sigma=self.sigma)
        if self.unsafe_seed is not None:
            validate.integer(0, MAX_SEED, unsafe_seed=self.unsafe_seed)
        read_bounds(self.bounds)
        if self.data == GENERATED:
            for name in ("columns", "user_column", "bounds"):
                if getattr(self, name) is not None:
                    raise InvalidInput(
                        name,
                        expected=f"none: {GENERATED} records have no file",
                        got=getattr(self, name),
                        remedy=f"Leave --{name.replace('_', '-')} out, or pass --data FILE.csv.",
                    )

    @property
    def headings(self) -> tuple[str, ...] | None:
        """The headings of the chosen columns."""
        return None if self.columns is None else tuple(split(self.columns))


@dataclass(frozen=True, kw_only=True)
class CodeOptions:
    """The autoencoder and its steps. The code length is the paper's, the other defaults ours."""

    code: int = 7
    lr: float = 0.05
    init_seed: int = 0

    def __post_init__(self) -> None:
        validate.integer(1, code=self.code)
        validate.positive(lr=self.lr)
        validate.integer(0, MAX_SEED, init_seed=self.init_seed)


def split(text: str) -> list[str]:
    """Return the parts between commas."""
    return [part.strip() for part in text.split(",")]


def read_bounds(text: str | None) -> Bounds | None:
    """Parse ``40``, ``40,50`` or ``Steps=40,Calories=50``.

    Raises:
        InvalidInput: neither of these.
    """
    if text is None:
        return None
    try:
        if "=" in text:
            pairs = [part.rpartition("=") for part in split(text)]
            return {heading: float(bound) for heading, _, bound in pairs}
        numbers = [float(part) for part in split(text)]
    except ValueError:
        raise InvalidInput(
            "bounds",
            expected="a number, numbers with commas, or HEADING=NUMBER with commas",
            got=text,
            remedy="Give public largest values, such as --bounds Steps=50000,Calories=6000.",
        ) from None
    return numbers[0] if len(numbers) == 1 else numbers

"""What a run that perturbs its loss is asked to do; see ``options`` for the three types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .. import _validate
from ..errors import InvalidInput, PrivacyError
from ..objective.records import GENERATED, MAX_SEED, Bounds
from .mechanism import MODES
from .options import ROUNDS, RunOptions, check_unchanged, only

NAMES = ("fm", "spof")
RUN_OPTIONS = ("out", "resume", "overwrite", "figure", "backend", "threads")
"""Those of ``RunOptions`` that such a run has."""


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """Everything that the privacy statement of such a run depends on.

    ``epsilon`` is what the mechanism calls so, for one release of one record. ``users`` None is 2,
    and 1 for fm. ``columns`` and ``bounds`` are texts with commas. ``samples`` None takes the rows;
    of generated data it is the number of records, 1000 unless it is given.
    """

    data: str = GENERATED
    mechanism: str = "spof"
    mode: str = "corrected"
    settings: tuple[str, ...] = ()
    epsilon: float | None = None
    epochs: int = 20
    users: int = 2
    features: int = 14
    columns: str | None = None
    user_column: str | None = None
    bounds: str | None = None
    samples: int | None = None
    test_fraction: float = 0.2
    split_seed: int = 0
    sigma: float = 0.0
    unsafe_seed: int | None = None
    rounds: int = 20

    def __post_init__(self) -> None:
        _validate.choice(NAMES, mechanism=self.mechanism)
        _validate.choice(MODES, mode=self.mode)
        object.__setattr__(self, "settings", tuple(self.settings))
        if self.epsilon is None:
            raise InvalidInput(
                "epsilon",
                expected="the epsilon of one release of a record",
                got="none",
                remedy="Pass --epsilon; the noise of the coefficients follows from it.",
            )
        _validate.positive(epsilon=self.epsilon)
        _validate.integer(1, epochs=self.epochs)
        _validate.integer(1, users=self.users)
        if self.mechanism == "fm" and self.users != 1:
            raise InvalidInput(
                "users",
                expected="1: the functional mechanism trains a single autoencoder",
                got=self.users,
                remedy="Pass --users 1, or --mechanism spof.",
            )
        _validate.integer(2, features=self.features)
        if self.samples is not None:
            _validate.integer(1, samples=self.samples)
        _validate.open_unit(test_fraction=self.test_fraction)
        _validate.integer(0, MAX_SEED, split_seed=self.split_seed)
        _validate.non_negative(sigma=self.sigma)
        if self.unsafe_seed is not None:
            _validate.integer(0, MAX_SEED, unsafe_seed=self.unsafe_seed)
        _validate.choice(ROUNDS, rounds=self.rounds)
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
        """The chosen columns."""
        return None if self.columns is None else tuple(split(self.columns))


@dataclass(frozen=True, kw_only=True)
class CodeOptions:
    """The autoencoder and its steps. The code length is the source's, the other defaults ours."""

    code: int = 7
    lr: float = 0.05
    init_seed: int = 0

    def __post_init__(self) -> None:
        _validate.integer(1, code=self.code)
        _validate.positive(lr=self.lr)
        _validate.integer(0, MAX_SEED, init_seed=self.init_seed)


@dataclass(frozen=True, kw_only=True)
class ObjectiveOptions:
    """All options of one run."""

    privacy: RecordOptions
    model: CodeOptions = field(default_factory=CodeOptions)
    run: RunOptions = field(default_factory=RunOptions)

    @classmethod
    def from_given(cls, given: Mapping[str, Any]) -> ObjectiveOptions:
        """From the options that the caller named; the others take their defaults."""
        named = only(RecordOptions, given)
        if named.get("mechanism") == "fm":
            named = {"users": 1, **named}
        return cls(
            privacy=RecordOptions(**named),
            model=CodeOptions(**only(CodeOptions, given)),
            run=RunOptions(**only(RunOptions, given)),
        )

    @classmethod
    def from_saved(cls, saved: Mapping[str, Any], given: Mapping[str, Any]) -> ObjectiveOptions:
        """The saved options of a run; naming one again is allowed only with its saved value.

        Raises:
            PrivacyError: a privacy option differs: epsilon would describe neither session.
            InvalidInput: a model option differs: the checkpoint would not fit.
        """
        check_unchanged({RecordOptions: PrivacyError, CodeOptions: InvalidInput}, saved, given)
        return cls(
            privacy=RecordOptions(**only(RecordOptions, saved)),
            model=CodeOptions(**only(CodeOptions, saved)),
            run=RunOptions(**only(RunOptions, given)),
        )

    def saved(self) -> dict[str, Any]:
        """What a checkpoint keeps: privacy and model options, as plain values."""
        return asdict(self.privacy) | asdict(self.model)


def split(text: str) -> list[str]:
    """The parts between commas."""
    return [part.strip() for part in text.split(",")]


def read_bounds(text: str | None) -> Bounds | None:
    """``40``, ``40,50`` or ``Steps=40,Calories=50``.

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

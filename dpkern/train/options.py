"""Options of a run, in three types that a resumed run treats differently.

``PrivacyOptions`` change what is released about the rows, so resuming with others is refused;
``ModelOptions`` change what is trained, so the checkpoint would not fit; ``RunOptions`` change
neither for the steps of another session, and may differ from one to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from ..base import validate
from ..base.devices import training_device
from ..base.errors import DPKernError, InvalidInput, PrivacyError
from ..base.rng import Key
from ..engine.demo.models import ALL_MODELS
from ..engine.demo.sources import LINEAR, NORMS
from ..engine.named import MODES, NAMES, parsed
from ..ops.update import SGD, Adam, AdamW
from ..privacy.accounting import shown_bound
from ..step.noise_tables.named import SOURCES
from .data import DIGITS, Dataset, load
from .encoding import TableOptions

SAMPLINGS = ("poisson", "fixed", "shuffled")
CLIPPINGS = ("flat", "per_layer", "automatic", "group")
ARITHMETICS = ("exact", "float")
ROUNDS = (20, 12, 8)
DEFAULT_BATCH_SIZE = 400
MIN_RANGES_EPSILON = 0.01
MAX_SEED = 2**63 - 1

Rule = SGD | Adam | AdamW

OPTIMIZERS: dict[str, Callable[[float], Rule]] = {
    "sgd": lambda lr: SGD(lr=lr),
    "momentum": lambda lr: SGD(lr=lr, momentum=0.9),
    "nesterov": lambda lr: SGD(lr=lr, momentum=0.9, nesterov=True),
    "adam": lambda lr: Adam(lr=lr),
    "adamw": lambda lr: AdamW(lr=lr),
}


@dataclass(frozen=True, kw_only=True)
class ReleaseOptions:
    """The options that the privacy statement of every run depends on.

    ``settings`` are fields of the mechanism as ``KEY=VALUE``.
    """

    NAMES: ClassVar[tuple[str, ...]]
    """The mechanisms that such a run may have."""

    data: str
    mechanism: str
    mode: str = "corrected"
    settings: tuple[str, ...] = ()
    epsilon: float | None = None
    epochs: int
    test_fraction: float = 0.2
    split_seed: int = 0
    unsafe_seed: int | None = None
    rounds: int = 20

    @classmethod
    def in_words(cls) -> str:
        """Return the mechanisms for help texts, the usual one first."""
        usual = str(vars(cls)["mechanism"])
        return " and ".join([usual, *(name for name in cls.NAMES if name != usual)])

    def __post_init__(self) -> None:
        validate.choice(self.NAMES, mechanism=self.mechanism)
        validate.choice(MODES, mode=self.mode)
        object.__setattr__(self, "settings", tuple(self.settings))
        if self.epsilon is not None:
            validate.positive(epsilon=self.epsilon)
        validate.integer(1, epochs=self.epochs)
        validate.open_unit(test_fraction=self.test_fraction)
        validate.integer(0, MAX_SEED, split_seed=self.split_seed)
        if self.unsafe_seed is not None:
            validate.integer(0, unsafe_seed=self.unsafe_seed)
        validate.choice(ROUNDS, rounds=self.rounds)

    def key(self) -> Key:
        """Return the key of all noise of one session: secret and new, unless seeded."""
        if self.unsafe_seed is None:
            return Key.fresh(self.rounds)
        return Key.from_unsafe_seed(self.unsafe_seed, self.rounds)


@dataclass(frozen=True, kw_only=True)
class RowOptions(ReleaseOptions):
    """The privacy options of a run on rows with labels.

    ``batch_size`` is the expected one; default: 400, or all training rows where they are fewer.
    ``label``, ``drop``, ``header`` and ``ranges`` are those of ``encoding.TableOptions``.
    """

    data: str = DIGITS
    label: str | None = None
    drop: tuple[str, ...] = ()
    header: str = "auto"
    ranges: str | None = None
    feature_scale: float | None = None
    classes: int | None = None
    batch_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "drop", tuple(self.drop))
        self.table()  # checks what it is made of
        if self.feature_scale is not None:
            validate.positive(feature_scale=self.feature_scale)
        if self.classes is not None:
            validate.integer(2, classes=self.classes)
        if self.batch_size is not None:
            validate.integer(1, batch_size=self.batch_size)

    def load(self, source: str) -> Dataset:
        """Load these rows, checked and split."""
        return load(
            source,
            feature_scale=self.feature_scale,
            classes=self.classes,
            test_fraction=self.test_fraction,
            split_seed=self.split_seed,
            table=self.table(),
        )

    def table(self) -> TableOptions:
        """Return what these options say of a table."""
        names = {f.name for f in fields(TableOptions)}
        return TableOptions(**{name: getattr(self, name) for name in names & vars(self).keys()})

    def batch_of(self, rows: int) -> int:
        """Return the expected batch size with so many training rows.

        Raises:
            InvalidInput: more than there are.
        """
        if self.batch_size is None:
            return min(DEFAULT_BATCH_SIZE, rows)
        if self.batch_size > rows:
            raise InvalidInput(
                "batch_size",
                expected=f"at most the {rows} training rows",
                got=self.batch_size,
                remedy="Pass a smaller --batch-size.",
            )
        return self.batch_size


@dataclass(frozen=True, kw_only=True)
class PrivacyOptions(RowOptions):
    """Everything that the privacy statement of a run with private gradients depends on.

    An epoch is ``rows // batch_size`` steps. Exactly one of ``epsilon`` (the noise is
    calibrated to it) and ``noise_multiplier`` is given. ``clipping`` and ``arithmetic`` None are
    the mechanism's own defaults. ``private_ranges`` is the part of epsilon that is paid for ranges
    of a table's columns (``private_ranges.RangeCounts``).
    """

    NAMES = NAMES

    mechanism: str = "dpsgd"
    epochs: int = 30
    noise_multiplier: float | None = None
    private_ranges: float | None = None
    delta: float = 1e-5
    max_grad_norm: float = 1.0
    clipping: str | None = None
    arithmetic: str | None = None
    sampling: str = "poisson"

    def __post_init__(self) -> None:
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise InvalidInput(
                "epsilon, noise_multiplier",
                expected="exactly one of them",
                got="neither" if self.epsilon is None else "both",
                remedy="Pass --epsilon to calibrate the noise, or --noise-multiplier to set it.",
            )
        super().__post_init__()
        self._check_private_ranges()
        if self.noise_multiplier is not None:
            validate.non_negative(noise_multiplier=self.noise_multiplier)
        validate.open_unit(delta=self.delta)
        validate.positive(max_grad_norm=self.max_grad_norm)
        validate.choice((None, *CLIPPINGS), clipping=self.clipping)
        validate.choice((None, *ARITHMETICS), arithmetic=self.arithmetic)
        parsed(self.mechanism, self.settings)
        validate.choice(SAMPLINGS, sampling=self.sampling)

    def _check_private_ranges(self) -> None:
        """Check what is paid for ranges, and that the rest of the run can pay it.

        Raises:
            InvalidInput: no number from 0.01 on, or an option that speaks of the same columns.
            PrivacyError: as much as the whole run may spend, or a claim that knows of no ranges.
        """
        wanted = self.private_ranges
        if wanted is None:
            return
        validate.that(
            validate.positive(private_ranges=wanted) >= MIN_RANGES_EPSILON,
            "private_ranges",
            f"an epsilon of at least {MIN_RANGES_EPSILON}",
            wanted,
            "Pass a larger one; a sixth of --epsilon is a good start.",
        )
        validate.that(
            self.feature_scale is None,
            "private_ranges, feature_scale",
            "at most one of them",
            "both",
            "Leave --feature-scale out: columns with a private range are scaled by it.",
        )
        if self.epsilon is not None and wanted >= self.epsilon:
            raise PrivacyError(
                "private_ranges",
                expected=f"less than --epsilon {shown_bound(self.epsilon)}, which covers all",
                got=wanted,
                remedy="Pass a smaller one; a sixth of --epsilon is a good start.",
            )
        if self.mode == "published":
            raise PrivacyError(
                "private_ranges",
                expected="--mode corrected: a paper's claim covers its steps alone",
                got="--mode published",
                remedy="Give public ranges with --ranges.",
            )


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Model and optimizer. The defaults of all three types were tuned on the public digits."""

    model: str = "mlp"
    linear: str = "dense"
    norm: str = "group"
    init_seed: int = 0
    optimizer: str = "momentum"
    lr: float = 0.3

    def __post_init__(self) -> None:
        validate.choice(ALL_MODELS, model=self.model)
        validate.choice(LINEAR, linear=self.linear)
        validate.choice(NORMS, norm=self.norm)
        validate.integer(0, MAX_SEED, init_seed=self.init_seed)
        validate.choice(tuple(OPTIMIZERS), optimizer=self.optimizer)
        validate.positive(lr=self.lr)

    def rule(self) -> Rule:
        """Return the update rule that the names stand for."""
        return OPTIMIZERS[self.optimizer](self.lr)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The conditions of a run, which may differ from one session of it to the next.

    Only ``noise_source`` may change a distribution: what each step's noise certifies is recorded
    with the step.
    """

    out: Path | None = None
    resume: bool = False
    overwrite: bool = False
    figure: bool = True
    diagnostics: bool = False
    ceiling: bool = False
    backend: str | None = None
    device: str | None = None
    max_physical_batch_size: int = 256
    threads: int | None = None
    noise_source: str | None = None
    audit: int | None = None

    def __post_init__(self) -> None:
        validate.choice((None, *SOURCES), noise_source=self.noise_source)
        if training_device(self.device).type != "cpu" and self.audit is not None:
            raise InvalidInput(
                "device, audit",
                expected="at most one of them: the audit runs on the processor",
                got="both",
                remedy="Leave --audit out, or train without --device.",
            )
        if self.audit is not None:
            validate.integer(100, audit=self.audit)
        if self.threads is not None:
            validate.integer(1, 1024, threads=self.threads)
        validate.integer(1, max_physical_batch_size=self.max_physical_batch_size)
        if self.resume and self.out is None:
            raise InvalidInput(
                "out",
                expected="the directory of the interrupted run",
                got="none",
                remedy="Pass --out DIR together with --resume.",
            )
        if self.resume and self.overwrite:
            raise InvalidInput(
                "resume, overwrite",
                expected="at most one of them",
                got="both",
                remedy="Resume the run in --out, or start over there with --overwrite.",
            )


P = TypeVar("P", bound=ReleaseOptions)
M = TypeVar("M")


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Generic[P, M]):
    """All options of one run."""

    privacy: P
    model: M
    run: RunOptions

    @classmethod
    def read(
        cls,
        kinds: tuple[type[P], type[M]],
        given: Mapping[str, Any],
        saved: Mapping[str, Any] | None = None,
    ) -> TrainOptions[P, M]:
        """Build the options from those that the caller named; the others take their defaults.

        Args:
            kinds: classes of the privacy and model options.
            given: options by name.
            saved: all options of the run that is resumed; naming one of them again is allowed only
                with its saved value.

        Raises:
            PrivacyError: a privacy option differs: epsilon would describe neither session.
            InvalidInput: a model option differs: the checkpoint would not fit.
        """
        privacy, model = kinds
        if saved is not None:
            check_unchanged({privacy: PrivacyError, model: InvalidInput}, saved, given)
        chosen = given if saved is None else saved
        return cls(
            privacy=privacy(**only(privacy, chosen)),
            model=model(**only(model, chosen)),
            run=RunOptions(**only(RunOptions, given)),
        )

    def saved(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: privacy and model options, as plain values."""
        kept: tuple[Any, Any] = self.privacy, self.model
        return {name: value for part in kept for name, value in asdict(part).items()}


def required(epsilon: float | None, *, what: str) -> float:
    """Return the epsilon that all noise of a run follows from.

    Raises:
        InvalidInput: none.
    """
    if epsilon is None:
        raise InvalidInput(
            "epsilon",
            expected=f"the epsilon of {what}",
            got="none",
            remedy="Pass --epsilon; all noise follows from it.",
        )
    return epsilon


def only(kind: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``given`` that are fields of ``kind``."""
    names = {f.name for f in fields(kind)}
    return {name: value for name, value in given.items() if name in names}


def check_unchanged(
    kinds: Mapping[type[Any], type[DPKernError]],
    saved: Mapping[str, Any],
    given: Mapping[str, Any],
) -> None:
    """Refuse saved options that are not those of ``kinds``, and given ones that differ from them.

    Args:
        kinds: classes of options, and what to raise where one of theirs differs.
        saved: all options of the run.
        given: options that were named again.

    Raises:
        InvalidInput: saved by another version.
    """
    names = {f.name for kind in kinds for f in fields(kind)}
    if set(saved) != names:
        raise InvalidInput(
            "resume",
            expected="a checkpoint with the options of this version",
            got=", ".join(sorted(names ^ set(saved))) + " added or missing",
            remedy="Start a new run, or use the version of dpkern that wrote the file.",
        )
    for kind, error in kinds.items():
        _refuse_changes(only(kind, given), saved, error)


def _refuse_changes(
    given: Mapping[str, Any], saved: Mapping[str, Any], error: type[DPKernError]
) -> None:
    for name, value in given.items():
        if value != saved[name]:
            raise error(
                name,
                expected=f"{saved[name]!r}, as when the run was started",
                got=value,
                remedy="Resume without this option, or start a new run.",
            )

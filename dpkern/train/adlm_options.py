"""What a run of AdLM or ILM is asked to do; see ``options`` for the three types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .. import _validate
from ..errors import InvalidInput, PrivacyError
from ..objective.adlm_networks import ARCHITECTURES
from .data import DIGITS
from .mechanism import MODES
from .options import ROUNDS, RunOptions, check_unchanged, only

NAMES = ("adlm", "ilm")
PREFIX = "adlm-"
MODELS = tuple(PREFIX + name for name in ARCHITECTURES)
RUN_OPTIONS = ("out", "resume", "overwrite", "figure", "threads")
"""Those of ``RunOptions`` that such a run has."""

MAX_SEED = 2**40


@dataclass(frozen=True, kw_only=True)
class LabelledOptions:
    """Everything that the privacy statement of such a run depends on.

    ``epsilon`` is that of relevances, inputs and labels together. ``batch_size`` enters the printed
    noise; None is 400, or all rows where they are fewer. ``public_data`` are records of the same
    kind that nothing protects: relevances that do not come from the training rows come from them.
    """

    data: str = DIGITS
    public_data: str | None = None
    feature_scale: float | None = None
    classes: int | None = None
    test_fraction: float = 0.2
    split_seed: int = 0
    mechanism: str = "adlm"
    mode: str = "corrected"
    settings: tuple[str, ...] = ()
    epsilon: float | None = None
    batch_size: int | None = None
    epochs: int = 60
    unsafe_seed: int | None = None
    rounds: int = 20

    def __post_init__(self) -> None:
        _validate.choice(NAMES, mechanism=self.mechanism)
        _validate.choice(MODES, mode=self.mode)
        object.__setattr__(self, "settings", tuple(self.settings))
        if self.epsilon is None:
            raise InvalidInput(
                "epsilon",
                expected="the epsilon of one record's release",
                got="none",
                remedy="Pass --epsilon; all noise follows from it.",
            )
        _validate.positive(epsilon=self.epsilon)
        if self.feature_scale is not None:
            _validate.positive(feature_scale=self.feature_scale)
        if self.classes is not None:
            _validate.integer(2, classes=self.classes)
        if self.batch_size is not None:
            _validate.integer(1, batch_size=self.batch_size)
        if self.unsafe_seed is not None:
            _validate.integer(0, unsafe_seed=self.unsafe_seed)
        _validate.open_unit(test_fraction=self.test_fraction)
        _validate.integer(0, 2**63 - 1, split_seed=self.split_seed)
        _validate.integer(1, epochs=self.epochs)
        _validate.choice(ROUNDS, rounds=self.rounds)


@dataclass(frozen=True, kw_only=True)
class BoundedOptions:
    """Network and steps; ``model`` None goes by the shape of a row. The defaults are ours."""

    model: str | None = None
    lr: float = 0.1
    init_seed: int = 0

    def __post_init__(self) -> None:
        _validate.choice((None, *MODELS), model=self.model)
        _validate.positive(lr=self.lr)
        _validate.integer(0, MAX_SEED, init_seed=self.init_seed)

    def architecture(self, row_shape: tuple[int, ...]) -> str:
        """Name in ``ARCHITECTURES``."""
        if self.model is not None:
            return self.model.removeprefix(PREFIX)
        known = {(8, 8): "digits", (28, 28): "mnist", (1, 28, 28): "mnist", (3, 32, 32): "cifar10"}
        return known.get(row_shape, "dense")


@dataclass(frozen=True, kw_only=True)
class AdlmOptions:
    """All options of one run."""

    privacy: LabelledOptions
    model: BoundedOptions = field(default_factory=BoundedOptions)
    run: RunOptions = field(default_factory=RunOptions)

    @classmethod
    def from_given(cls, given: Mapping[str, Any]) -> AdlmOptions:
        """From the options that the caller named; the others take their defaults."""
        return cls(
            privacy=LabelledOptions(**only(LabelledOptions, given)),
            model=BoundedOptions(**only(BoundedOptions, given)),
            run=RunOptions(**only(RunOptions, given)),
        )

    @classmethod
    def from_saved(cls, saved: Mapping[str, Any], given: Mapping[str, Any]) -> AdlmOptions:
        """The saved options of a run; naming one again is allowed only with its saved value.

        Raises:
            PrivacyError: a privacy option differs: epsilon would describe neither session.
            InvalidInput: a model option differs: the checkpoint would not fit.
        """
        check_unchanged({LabelledOptions: PrivacyError, BoundedOptions: InvalidInput}, saved, given)
        return cls(
            privacy=LabelledOptions(**only(LabelledOptions, saved)),
            model=BoundedOptions(**only(BoundedOptions, saved)),
            run=RunOptions(**only(RunOptions, given)),
        )

    def saved(self) -> dict[str, Any]:
        """What a checkpoint keeps: privacy and model options, as plain values."""
        return asdict(self.privacy) | asdict(self.model)

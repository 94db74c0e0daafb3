"""List the protocol numbers that ``dpkern reproduce --set NAME=NUMBER`` replaces.

Sizes that many items share, such as epochs and rates, are options of their own; these are the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..base.errors import InvalidInput
from ..base.validate import half_open_unit, non_negative, open_unit, positive
from . import comparison, objective_release, spectral_released
from .adlm import released, setup
from .directional import cases
from .spof import items as spof
from .spof import setting as spof_setting

Pair = tuple[str, str]
Numbers = tuple[tuple[str, float], ...]


def _adlm(experiment: setup.AdlmExperiment) -> dict[str, float]:
    return {
        "pretraining_epochs": experiment.pretraining,
        "relevance_share": setup.RELEVANCE_SHARE,
        "label_share": setup.LABEL_SHARE,
        "psgd_lr": setup.PSGD_LR,
        "psgd_lot": experiment.lot,
    }


_ADLM_RELEASED = {
    "pretraining_epochs": setup.MNIST.pretraining,
    "relevance_share": released.SHARES[0],
    "label_share": released.SHARES[2],
}
_SPOF = {
    "constant": spof.CONSTANT,
    "sensor_noise": spof_setting.SENSOR_NOISE,
    "code": spof.CODE,
}
_SPOF_OTHERS = {name: value for name, value in _SPOF.items() if name != "constant"}
NUMBERS: Mapping[Pair, Mapping[str, float]] = {
    ("adlm", "fig4"): _adlm(setup.MNIST),
    ("adlm", "fig5"): _adlm(setup.CIFAR10),
    ("adlm", "readings"): {
        name: value for name, value in _adlm(setup.MNIST).items() if "psgd" not in name
    },
    ("adlm", "released"): _ADLM_RELEASED,
    **{
        ("directional", item): {"adaclip_start": cases.ADACLIP_START}
        for item in ("table2", "fig3", "fig4", "fig5")
    },
    ("comparison", ""): {"momentum": comparison.MOMENTUM},
    ("objective-release", ""): {
        f"ridge{number}": value for number, value in enumerate(objective_release.RIDGES, start=1)
    },
    ("spectral", "released"): {"momentum": spectral_released.MOMENTUM},
    # Figure 2 is about the constant.
    ("spof", "fig2"): _SPOF_OTHERS,
    **{("spof", item): _SPOF for item in ("fig3", "comparison")},
    ("spof", "rates"): {name: _SPOF[name] for name in ("constant", "code")},
    ("spof", "released"): {name: value for name, value in _SPOF.items() if name != "code"},
}
"""Numbers by item, with the source's values, or ours where it has none."""


_COUNTS = ("pretraining_epochs", "psgd_lot", "code")
_RANGES: Mapping[str, Callable[..., float]] = {
    "relevance_share": open_unit,
    "label_share": open_unit,
    "momentum": half_open_unit,
    "constant": non_negative,
}
"""Checks of numbers that are not just positive."""


def read(texts: list[str] | None) -> Numbers:
    """Return names and numbers of ``NAME=NUMBER`` texts.

    Raises:
        InvalidInput: a text of another form, or a name that is given twice.
    """
    found: dict[str, float] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        try:
            number = float(value)
        except ValueError:
            equals = ""
        if not equals or name in found:
            raise InvalidInput(
                "set",
                expected="NAME=NUMBER, every name once",
                got=text,
                remedy="Example: --set constant=1.25",
            )
        found[name] = number
    return tuple(found.items())


def of_item(pair: Pair, given: Numbers) -> Numbers:
    """Return the numbers that the item takes and that are not the source's."""
    known = NUMBERS.get(pair, {})
    return tuple((name, value) for name, value in given if known.get(name) not in (None, value))


def check(pairs: list[Pair], given: Numbers) -> None:
    """Refuse a name that none of these items takes, and a number out of its range.

    Raises:
        InvalidInput: such a name or number.
    """
    known = {name: value for pair in pairs for name, value in NUMBERS.get(pair, {}).items()}
    for name, value in given:
        if name not in known:
            listed = ", ".join(f"{each}={usual:g}" for each, usual in known.items())
            raise InvalidInput(
                "set",
                expected=f"one of {listed}" if known else "none: this item has no such number",
                got=f"{name}={value:g}",
                remedy="Choose one of these." if known else "Leave --set out.",
            )
        if name in _COUNTS and not (value.is_integer() and value >= 1):
            raise InvalidInput(
                name, expected="an integer >= 1", got=f"{value:g}", remedy="Pass a whole number."
            )
        checked: Callable[..., float] = _RANGES.get(name, positive)
        checked(**{name: value})
    _check_shares(known, dict(given))


def _check_shares(known: Mapping[str, float], given: Mapping[str, float]) -> None:
    """Refuse parts of epsilon for relevances and labels that leave nothing to the inputs."""
    parts = [each for each in ("relevance_share", "label_share") if each in given]
    spent = sum(
        given.get(each, known.get(each, 0.0)) for each in ("relevance_share", "label_share")
    )
    if parts and spent >= 1:
        raise InvalidInput(
            parts[0],
            expected="shares of relevances and labels below 1 together: inputs get the rest",
            got=f"{spent:g} together",
            remedy="Pass smaller shares.",
        )


__all__ = ["NUMBERS", "check", "of_item", "read"]

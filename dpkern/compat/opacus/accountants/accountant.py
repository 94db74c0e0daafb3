"""Accountants that stand alone: steps are told to them, over the ledger of dpkern.

    accountant = RDPAccountant()
    accountant.step(noise_multiplier=1.1, sample_rate=0.01)
    accountant.get_epsilon(delta=1e-5)

An engine has an accountant of its own, which reads the steps that were taken
(``engine.accountant``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ....base.errors import InvalidInput
from ....base.validate import choice, integer, open_unit
from ....privacy.accounting import Ledger
from ....privacy.mechanisms import DPSGD


class _History(list[tuple[float, float, int]]):
    """A list that refuses changes in place: they would be missing in the next epsilon."""

    def _refused(self, *_: object, **__: object) -> NoReturn:
        raise InvalidInput(
            "history",
            expected="steps that are told to the accountant",
            got="a change of the list that history returned",
            remedy="Call step(), or assign to history a list with all entries.",
        )

    append = extend = insert = pop = remove = clear = reverse = sort = _refused
    __setitem__ = __delitem__ = __imul__ = _refused

    def __iadd__(self, entries: Any) -> list[tuple[float, float, int]]:  # type: ignore[override,misc]
        """Return another list, which ``accountant.history += entries`` assigns."""
        return [*self, *entries]

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are plain lists."""
        return list, ([*self],)


class IAccountant:
    """History of DP-SGD's steps on Poisson batches, and the epsilon that is proved for it.

    Neighbouring data sets differ in one record, which is added or removed.
    """

    _bound: str | None = None
    """The accountant whose bound counts; None takes the least that any of them proves."""
    _name = ""

    def __init__(self) -> None:
        self._ledger = Ledger()

    def step(self, *, noise_multiplier: float, sample_rate: float, num_steps: int = 1) -> None:
        """Add steps to the history.

        Args:
            noise_multiplier: standard deviation of the noise over the clipping bound, >= 0.
            sample_rate: probability with which each record joins a step, in (0, 1].
            num_steps: number of equal steps, >= 0.

        Raises:
            InvalidInput: an argument out of range; the history is unchanged.
        """
        self._record(self._ledger, noise_multiplier, sample_rate, num_steps)

    @staticmethod
    def _record(ledger: Ledger, noise_multiplier: float, sample_rate: float, steps: int) -> None:
        ledger.record(
            DPSGD(noise_multiplier=noise_multiplier, max_grad_norm=1.0, arithmetic="float"),
            sample_rate=sample_rate,
            count=integer(minimum=0, num_steps=steps),
        )

    def get_epsilon(self, delta: float) -> float:
        """Return an upper bound of epsilon for the history; 0 if it is empty.

        Args:
            delta: delta of the guarantee, in (0, 1).

        Raises:
            InvalidInput: delta outside (0, 1).
            MissingDependency: dp-accounting is not installed.
        """
        open_unit(delta=delta)
        return self._ledger.certify(delta).epsilon_by(self._bound) if len(self) else 0.0

    def __len__(self) -> int:
        """Return the number of entries of ``history``."""
        return len(self.history)

    @property
    def history(self) -> list[tuple[float, float, int]]:
        """Runs of equal steps as ``(noise multiplier, sample rate, number of steps)``, in order.

        The multiplier is the certified one: rounding makes it a little smaller than the one told.
        Another list replaces the history; the one that is returned refuses changes in place.

        Raises:
            InvalidInput: an entry out of range; the history is unchanged.
        """
        entries = self._ledger.state_dict()["entries"]
        # The event of a step without noise has no multiplier.
        return _History(
            (e["event"].get("noise_multiplier", 0.0), e["sample_rate"], e["count"]) for e in entries
        )

    @history.setter
    def history(self, entries: Sequence[tuple[float, float, int]]) -> None:
        ledger = Ledger()
        for noise_multiplier, sample_rate, steps in entries:
            self._record(ledger, noise_multiplier, sample_rate, steps)
        self._ledger = ledger

    def state_dict(self, destination: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the history as plain values, for ``load_state_dict``.

        Args:
            destination: entries that the result has besides. None adds none.
        """
        history = {"history": [*self.history], "ledger": self._ledger.state_dict()}
        return {**(destination or {}), **history, "mechanism": self.mechanism()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace the history by a saved one.

        Raises:
            InvalidInput: the state of another accountant, or none; the history is unchanged.
        """
        name = state_dict.get("mechanism")
        if name != self.mechanism() or "ledger" not in state_dict:
            raise InvalidInput(
                "state_dict",
                expected=f"what state_dict() of a {self.mechanism()} accountant returned",
                got=f"one of {name!r} with {', '.join(sorted(state_dict)) or 'nothing'}",
                remedy="Make the accountant of that name with create_accountant.",
            )
        ledger = Ledger()
        ledger.load_state_dict(state_dict["ledger"])
        self._ledger = ledger

    @classmethod
    def mechanism(cls) -> str:
        """Return the accountant's name, ``rdp`` or ``prv``."""
        return cls._name


class RDPAccountant(IAccountant):
    """Accountant by Renyi divergences (Mironov 2017), with the best order of those tried."""

    _bound = "RDP"
    _name = "rdp"


class PRVAccountant(IAccountant):
    """Accountant that reports the least epsilon that any of dpkern's accountants proves.

    Opacus approximates it by privacy random variables (Gopi, Lee and Wutschitz 2021) with an error
    term; here the convolution is of privacy losses that are rounded up.
    """

    _name = "prv"


class GaussianAccountant(IAccountant):
    """Refused: Gaussian differential privacy's limit theorem bounds nothing.

    Raises:
        InvalidInput: always.
    """

    def __init__(self) -> None:
        create_accountant("gdp")


def create_accountant(mechanism: str) -> IAccountant:
    """Return a new accountant by its name, ``rdp`` or ``prv``.

    Raises:
        InvalidInput: another name; ``gdp``, whose epsilon is no upper bound.
    """
    if mechanism == "gdp":
        raise InvalidInput(
            "mechanism",
            expected="an accountant whose epsilon is an upper bound",
            got="gdp, which approximates by the central limit theorem",
            remedy="Use 'prv' or 'rdp'.",
        )
    kinds: dict[str, type[IAccountant]] = {"rdp": RDPAccountant, "prv": PRVAccountant}
    return kinds[choice(tuple(kinds), mechanism=mechanism)]()


__all__ = [
    "GaussianAccountant",
    "IAccountant",
    "PRVAccountant",
    "RDPAccountant",
    "create_accountant",
]

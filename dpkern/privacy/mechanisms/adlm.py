"""AdLM and ILM: noise on relevances, inputs and labels, once, before anything is trained.

    epsilon = eps1 + eps2 + eps3       relevances, inputs of the first layer, labels

``published`` draws with the printed scales, which are divided by the batch size |L|. With one draw
per record a record really costs, for replacing it,

    |L| rho eps2 / (2 |h_0|)  +  2 |L| eps3 / D_F  +  eps1 / 2      (relevances in [0, 1]),

the last only with a network that does not depend on the records; otherwise, with shared draws and
with coefficients that contain the hidden layer, nothing is certified. ``corrected`` is local: input
j gets ``Lap(rho d / (eps2 beta_j))``, the label a randomized response, and epsilon is the sum.

Reference: AdLM, algorithm 1, lemmas 1-6, theorem 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...base.choices import RELEVANCE_RANGES
from ...base.errors import InvalidInput
from ...base.validate import choice, integer, probability
from ..accounting.events import EventSpec
from ..accounting.history import NOTHING
from ..theory import adlm
from ..theory.adlm import AdlmSetting, FirstLayer
from . import _adlm_certificate as certificate
from ._statement import MODES
from .examples import FEATURE, Audit
from .notes import Note, notes
from .objective import ObjectivePerturbation, checked_epsilon
from .randomized_response import RandomizedResponse

RELEVANCE_FROM = ("trained_on_data", "public_network", "public")
"""A network trained on the records, and theirs; a public network, their relevances; both public."""

LABELS = ("coefficients", "response", "laplace")
"""Lines 18-19 (published); k-ary randomized response; ``onehot + Lap(2 / eps3)``."""

RELEVANCE_TARGETS = ("label", "predicted")
"""The score that is propagated: the true class', or the predicted one's."""

COEFFICIENT_FORMS = ("label_scalar", "feature_expanded")

_SETTING = AdlmSetting(
    name="small",
    layer=FirstLayer(features=3, maps=32),
    records=60_000,
    batch=1800,
    classes=10,
    hidden=25,
)
"""The sizes of AdLM's MNIST run, with a record of three features."""

_AUDIT = Audit(
    releases="labelled record",
    # Sizes at which all of epsilon is seen often: that takes every part of the release.
    fields={
        "epsilon": 1.0,
        "setting": replace(_SETTING, classes=2, layer=FirstLayer(features=2, maps=32)),
    },
    published={"setting": _SETTING},
    shapes=FEATURE,
    takes=(),
)


@dataclass(frozen=True, kw_only=True)
class AdLM(ObjectivePerturbation):
    """The adaptive Laplace mechanism: noise on relevances, inputs and labels, once.

    Args:
        epsilon: of everything together, as the paper counts it; infinity adds no noise.
        setting: the sizes that scales depend on.
        shares: of relevances, inputs and labels in epsilon; where relevances cost nothing, the
            others are enlarged in proportion.
        mode: ``published`` or ``corrected``.
        noise_sharing: ``iid_per_example``, or, published only, ``shared_per_feature``.
        h0_count: reading of |h_0|, published only; see ``theory.adlm.COUNTS``.
        coefficient_form: ``label_scalar``, or, published only, ``feature_expanded``: fresh noise
            at every visit, on coefficients that contain the hidden layer.
        input_range: ``unit`` or ``unit_l2``; see ``theory.adlm.reach``.
        beta_min: floor of a feature's share of the budget. None is 0 published, 0.1 corrected.
        relevance_target: ``label`` or ``predicted``.
        relevance_range: ``as_formula`` or ``signed``.
        relevance_from: see ``RELEVANCE_FROM``. None is ``trained_on_data`` published,
            ``public_network`` corrected.
        labels: ``coefficients`` published; ``response`` or ``laplace`` corrected. None is
            ``coefficients`` or ``response``.

    Raises:
        InvalidInput: a field out of its range, or one that its mode does not have.
    """

    name: ClassVar[str] = "adlm"
    trained_by: ClassVar[str | None] = "labelled rows"
    audits: ClassVar[tuple[Audit, ...]] = (
        replace(_AUDIT, fields={**_AUDIT.fields, "relevance_from": "public"}),
    )
    adaptive: ClassVar[bool] = True

    epsilon: float
    setting: AdlmSetting
    shares: tuple[float, float, float] = (1 / 3, 1 / 3, 1 / 3)
    mode: str = "corrected"
    noise_sharing: str = "iid_per_example"
    h0_count: str = "maps"
    coefficient_form: str = "label_scalar"
    input_range: str = "unit"
    beta_min: float | None = None
    relevance_target: str = "label"
    relevance_range: str = "as_formula"
    relevance_from: str | None = None
    labels: str | None = None

    def __post_init__(self) -> None:
        choice(MODES, mode=self.mode)
        published = self.mode == "published"
        defaults: dict[str, Any] = {
            "beta_min": 0.0 if published else 0.1,
            "relevance_from": RELEVANCE_FROM[0 if published else 1],
            "labels": LABELS[0 if published else 1],
        }
        for field, value in defaults.items():
            if getattr(self, field) is None:
                object.__setattr__(self, field, value)
        object.__setattr__(self, "epsilon", checked_epsilon(self.epsilon))
        object.__setattr__(self, "shares", _shares(self.shares))
        if self.beta_min != 0:
            probability(beta_min=self.beta_min)
        choice(adlm.NOISE_SHARING, noise_sharing=self.noise_sharing)
        choice(adlm.COUNTS, h0_count=self.h0_count)
        choice(COEFFICIENT_FORMS, coefficient_form=self.coefficient_form)
        choice(adlm.INPUT_RANGES, input_range=self.input_range)
        choice(RELEVANCE_TARGETS, relevance_target=self.relevance_target)
        choice(RELEVANCE_RANGES, relevance_range=self.relevance_range)
        choice(RELEVANCE_FROM, relevance_from=self.relevance_from)
        choice(LABELS, labels=self.labels)
        self._check_setting()
        self._check_mode(published)

    def _check_mode(self, published: bool) -> None:
        if published:
            if self.labels != "coefficients":
                raise _only("labels", self.labels, "corrected")
            return
        given = {
            "noise_sharing": (self.noise_sharing, "iid_per_example"),
            "h0_count": (self.h0_count, "maps"),
            "coefficient_form": (self.coefficient_form, "label_scalar"),
        }
        for field, (value, only) in given.items():
            if value != only:
                raise _only(field, value, "published")
        if self.labels == "coefficients":
            raise _only("labels", self.labels, "published")
        if self.adaptive and self.relevance_from == "trained_on_data":
            raise _only("relevance_from", self.relevance_from, "published")
        if self.labels == "response" and self.noisy:
            _ = self.channel  # which may refuse this epsilon

    def _check_setting(self) -> None:
        if not isinstance(self.setting, AdlmSetting):
            raise InvalidInput(
                "setting",
                expected="a theory.adlm.Setting",
                got=type(self.setting).__name__,
                remedy="Make one with objective.adlm_networks.setting(network, ...).",
            )
        integer(2, **{"setting.classes": self.setting.classes})
        integer(1, **{"setting.hidden": self.setting.hidden})
        integer(1, **{"setting.records": self.setting.records})
        integer(1, self.setting.records, **{"setting.batch": self.setting.batch})
        least = 2 * certificate.ROUNDING * max(self.setting.layer.features, self.setting.classes)
        spent = self.budgets if self.releases_relevance else self.budgets[1:]
        if min(spent) < least:
            raise InvalidInput(
                "epsilon",
                expected=f"at least {least:.2g} for each release",
                got=f"{min(spent):.2g}",
                remedy="Raise epsilon or its shares: the lattice of the noise is not finer.",
            )

    @property
    def noisy(self) -> bool:
        """Whether there is any noise."""
        return math.isfinite(self.epsilon)

    @property
    def releases_relevance(self) -> bool:
        """Whether the records' relevances are released with noise, and cost eps1."""
        return self.adaptive and self.relevance_from != "public"

    @property
    def budgets(self) -> tuple[float, float, float]:
        """eps1, eps2 and eps3; eps1 is 0 where relevances cost nothing."""
        first, second, third = self.shares
        used = first if self.releases_relevance else 0.0
        total = used + second + third
        return (
            self.epsilon * used / total,
            self.epsilon * second / total,
            self.epsilon * third / total,
        )

    @property
    def reach(self) -> float:
        """rho, the largest normalised input."""
        return adlm.reach(self.input_range, self.setting.layer.features)

    @property
    def channel(self) -> RandomizedResponse:
        """Randomized response of one label with eps3."""
        return RandomizedResponse(epsilon=self.budgets[2], categories=self.setting.classes)

    @property
    def relevance_scale(self) -> float:
        """Noise scale of every relevance: ``D_R / eps1``, corrected with the exact sensitivity."""
        features, records = self.setting.layer.features, self.setting.records
        if self.mode == "published":
            bound = adlm.relevance_sensitivity(features, records)
        else:
            bound = adlm.exact_relevance_sensitivity(
                features, records, relevance_range=self.relevance_range
            )
            return bound / certificate.left(self, "relevances")
        return bound / self.budgets[0]

    def betas(self, relevance: Tensor) -> Tensor:
        """Return ``[d]``, float64: every feature's share of the budget, with mean 1."""
        assert self.beta_min is not None
        return adlm.budget_shares(relevance, beta_min=self.beta_min)

    def input_scales(self, betas: Tensor) -> Tensor:
        """Return ``[d]``, float64: the noise scale of every feature."""
        if self.mode == "corrected":
            left = certificate.left(self, "inputs")
            return adlm.local_scales(betas, epsilon=left, reach=self.reach)
        return adlm.input_scales(
            betas,
            layer=self.setting.layer,
            batch=self.setting.batch,
            epsilon=self.budgets[1],
            h0_count=self.h0_count,
        )

    @property
    def bias_scale(self) -> float | None:
        """Noise scale of line 14. None in corrected mode: a bias is no data."""
        if self.mode == "corrected":
            return None
        return adlm.bias_scale(
            layer=self.setting.layer,
            batch=self.setting.batch,
            epsilon=self.budgets[1],
            h0_count=self.h0_count,
        )

    @property
    def label_scale(self) -> float | None:
        """Noise scale of coefficients (published) or targets. None with randomized response."""
        if self.labels == "response":
            return None
        if self.labels == "laplace":
            return adlm.LABEL_SENSITIVITY / certificate.left(self, "labels")
        return adlm.label_scale(
            classes=self.setting.classes,
            hidden=self.setting.hidden,
            batch=self.setting.batch,
            epsilon=self.budgets[2],
        )

    def costs(self) -> Mapping[str, float]:
        """Return the pure epsilon that each part of one record's release costs; inf if unprotected.

        For replacing the record. Exact in real numbers; ``epsilon_certified`` adds the reserve.
        """
        return MappingProxyType(certificate.costs(self))

    def tail(self) -> float:
        """Return the delta of the cut noise tails of everything that one record's release draws."""
        return certificate.tail(self)

    def epsilon_certified(self, *, visits: int = 1) -> float:
        """Return the proved epsilon of one record, however often its release is used.

        Pure up to ``tail()`` in delta; infinite where some part is not protected, or where that is
        more than 2^-40.
        """
        integer(0, visits=visits)
        return certificate.epsilon(self)

    @property
    def noisy_coordinates(self) -> int:
        """Most coordinates with Laplace noise of one record's release that depend on the record."""
        features, classes = self.setting.layer.features, self.setting.classes
        relevances = features if self.releases_relevance else 0
        return relevances + features + 2 * classes

    def certified_delta(self, *, visits: int = 1, coordinates: int = 0) -> float:
        """Return ``tail()`` where something is certified, with the known number of coordinates."""
        del coordinates
        return self.tail() if math.isfinite(self.epsilon_certified(visits=visits)) else 0.0

    def event_spec(self, *, visits: int = 1) -> EventSpec:
        """Return the event of one record's release, replace-one, as ``events`` writes it."""
        integer(0, visits=visits)
        return certificate.event(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as JSON values; infinity is the string ``"inf"``."""
        return {
            **super().to_dict(),
            "setting": asdict(self.setting),
            "shares": list(self.shares),
            "budgets": ["inf" if math.isinf(each) else each for each in self.budgets],
        }

    @property
    def relation(self) -> str:
        """The neighbouring relation: relevances are averaged by a party that has all records."""
        return "replace_one, one record" if self.releases_relevance else super().relation

    @property
    def certified_for(self) -> str:
        """The scope of the certificate."""
        if math.isinf(self.epsilon_certified()):
            return NOTHING
        first = "relevances, " if self.releases_relevance else ""
        return f"the released {first}inputs and labels, and all that is trained on them"

    @property
    def notes(self) -> tuple[Note, ...]:
        """The notes on what is wrong in what this configuration does."""
        if self.mode == "corrected":
            return ()
        found = ["A1"]
        if self.releases_relevance and self.relevance_from == "trained_on_data":
            found.append("A2")
        found += ["A3", "A4", "A5"]
        if self.adaptive and not self.beta_min:
            found.append("A6")
        return notes(*found)


@dataclass(frozen=True, kw_only=True)
class ILM(AdLM):
    """The identical Laplace mechanism: AdLM with equal shares, beta_j = 1, without relevances.

    Fields that speak of relevances have no part in it, and eps1 goes to inputs and labels.
    """

    name: ClassVar[str] = "ilm"
    audits: ClassVar[tuple[Audit, ...]] = (_AUDIT,)
    adaptive: ClassVar[bool] = False

    def betas(self, relevance: Tensor | None = None) -> Tensor:
        """Return ones."""
        del relevance
        return torch.ones(self.setting.layer.features, dtype=torch.float64)


def _shares(given: Any) -> tuple[float, float, float]:
    """Return three shares, none negative, those of inputs and labels positive, with sum 1."""
    numbers = tuple(float(share) for share in given) if isinstance(given, (tuple, list)) else ()
    good = (
        len(numbers) == 3
        and all(math.isfinite(share) for share in numbers)
        and numbers[0] >= 0
        and min(numbers[1:]) > 0
        and abs(sum(numbers) - 1) <= 1e-9
    )
    if not good:
        raise InvalidInput(
            "shares",
            expected="three shares of epsilon with sum 1, those of inputs and labels positive",
            got=given,
            remedy="Give the shares of relevances, inputs and labels, such as (0.2, 0.5, 0.3).",
        )
    return numbers[0], numbers[1], numbers[2]


def _only(field: str, value: object, mode: str) -> InvalidInput:
    return InvalidInput(
        field,
        expected=f"{value!r} in mode={mode!r} only",
        got=f"{field}={value!r} in the other mode",
        remedy=f"Leave {field} out, or set mode={mode!r}.",
    )

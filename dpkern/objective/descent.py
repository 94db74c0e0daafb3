"""Many steps of many runs in one kernel: polynomials with fresh noise, released records, no noise.

What it takes is said by ``fits``; ``rules`` takes any method's steps, one by one, as operations on
tensors, and the same draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..base.rng import Key
from ..ops import coef
from ..privacy.mechanisms.functional import Functional
from . import release
from .autoencoder import Weights
from .methods import Method, NonPrivate
from .rules import ReleasedRecords, released_once


def fits(method: Method, *, sigma: float) -> bool:
    """Whether one kernel takes all steps of a method, with this noise of the environment.

    It has neither the cross-entropy's slope nor a gradient's noise; the multipliers of theorem 1
    and coefficients that are kept stay with ``rules``.
    """
    if isinstance(method, NonPrivate):
        return method.loss != "bce"
    if not isinstance(method, Functional) or (sigma and method.noisy_loss == "printed"):
        return False
    kept = method.noise_schedule == "once_per_record" and not released_once(method)
    return not (kept and method.noised)


class KernelSteps:
    """The steps of runs that ``fits`` takes: see ``rules.Rule`` for what it keeps."""

    def __init__(
        self,
        method: Functional | NonPrivate,
        train: Tensor,
        keys: Sequence[Key],
        code: int,
        *,
        lr: float,
        firsts: Tensor | None = None,
        sources: Sequence[release.BlockSource] = (),
    ) -> None:
        users, _, n = train.shape
        if isinstance(method, Functional):
            form, constant = str(method.form), method.constant_entry
        else:
            form, constant = method.loss, method.constant
        self._train = train.flatten(0, 1)[None]
        self._settings: dict[str, Any] = {
            "form": coef.form_of(form),
            "constant": constant,
            "lr": lr,
            "limit": coef.LOGIT_LIMIT,
        }
        self._released: ReleasedRecords | None = None
        self._ahead: release.StepDraws | None = None
        if isinstance(method, Functional) and method.noised:
            if released_once(method):
                self._released = ReleasedRecords(method, train, keys, firsts, sources)
            else:
                self._ahead = release.StepDraws(keys, users=users, n=n, sources=sources)
                self._settings |= _scales(method, n, code)

    def room(self, step: int) -> int:
        """Return how many steps from this one on can be taken together."""
        return 1 << 20 if self._ahead is None else self._ahead.room(step)

    def descend(
        self, weights: Weights, stopped: Tensor, step: int, order: Tensor, added: Tensor | None
    ) -> None:
        """Take the steps whose records ``order`` ``[R, S, m]`` names, in place.

        Args:
            weights: weights of all runs.
            stopped: int32 ``[R]``, as of ``coef.descend``.
            step: the number of the first of them.
            order: rows of all users' records.
            added: noise of the environment, ``[R, S, m, n]``.
        """
        inputs = targets = self._train
        if self._released is not None:
            targets = self._released.all()
            targets = targets.view(weights.runs, -1, weights.features)
            inputs = self._train if self._released.alone else targets
        given: dict[str, Any] = {}
        if self._ahead is not None:
            made = self._ahead.take(step, order.shape[1], stopped)
            given = dict(zip(("draws", "rounding"), made, strict=True))
        place = weights.encoder.device
        tensors = {"inputs": inputs, "targets": targets, "order": order, "added": added, **given}
        coef.descend(
            weights.encoder,
            weights.decoder,
            stopped,
            **{n: t if t is None else t.to(place).contiguous() for n, t in tensors.items()},
            **self._settings,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the released records."""
        return {} if self._released is None else self._released.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the released records: nothing may be released twice."""
        if self._released is not None:
            self._released.load_state_dict(state)


def _scales(method: Functional, n: int, code: int) -> dict[str, float]:
    """Return the noise scale, and how it grows with a record's c_j."""
    if getattr(method, "shift", "none") == "bound":
        return {"scale": float(method.scale(n, method.constant_entry * code))}
    scale = float(method.scale(n))
    if getattr(method, "shift", "none") != "current":
        return {"scale": scale}
    at_one = float(method.scale(n, 1.0))  # c_j (c_j / 2 + 2) is 5/2 there
    return {"scale": scale, "growth": (at_one - scale) / 2.5}

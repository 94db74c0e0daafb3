"""Turn one visit of one record of every run and user into the direction of descent.

The direction is dL/dz at the outputs, carried back by ``autoencoder.backward``. With environmental
noise the encoder sees x + n_j; by theorem 1 the printed loss is then, with w = z - t/b = zhat / b,

    b [ (alpha_2 + N_2 / b) w + (alpha_3 + N_3 / b) w^2 ],      dL/dzhat = alpha_2 + N_2 / b
                                                                  + 2 (alpha_3 + N_3 / b) w

so that the fused polynomial of ``coef.quadratic`` serves it with scale Dhat^[N] / b. The multiplier
b_j is taken as a number that the environment gives: no gradient passes through it.

Source: SPOF, algorithm 1 and its note on gradients, theorem 1, (34)-(42).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..base.rng import Key
from ..ops import coef
from ..privacy.mechanisms.functional import Functional
from ..privacy.theory import environment
from . import autoencoder, release
from .autoencoder import Gradients, Weights
from .methods import NonPrivate

_SMALLEST, _LARGEST = 2.0**-40, 2.0**40
"""Multipliers of runs that leave all bounds are kept in here until the guard stops them."""


@dataclass
class Visit:
    """The records and noise of one step.

    Attributes:
        step: its number, from 0.
        first: whether every record is visited for the first time in this epoch.
        places: rows of the records in ``[R m N, n]``, ``[B]``.
        clean: the records, ``[B, n]``.
        noise: the environment's, ``[B, n]``, or None.
    """

    step: int
    first: bool
    places: Tensor
    clean: Tensor
    noise: Tensor | None

    def seen(self, inputs: Tensor) -> Tensor:
        """Return what the encoder sees of these inputs."""
        return inputs if self.noise is None else inputs + self.noise


class Rule(Protocol):
    """The protocol by which a method gives its direction."""

    def direction(self, weights: Weights, visit: Visit) -> tuple[Tensor, Gradients | Tensor]:
        """Return the logits that the divergence guard checks, and the direction of descent."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what was released so far."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what was released: nothing may be released twice."""
        ...


class Plain:
    """The rule without noise: the cross-entropy, or its polynomial."""

    def __init__(self, method: NonPrivate) -> None:
        self._loss, self._constant = method.loss, method.constant

    def direction(self, weights: Weights, visit: Visit) -> tuple[Tensor, Gradients | Tensor]:
        """Return dL/dz at the noisy logit, z + c_j."""
        passed = autoencoder.forward(weights, visit.seen(visit.clean))
        z, _ = autoencoder.stabilised(passed, self._constant)
        if self._loss == "bce":
            output = torch.sigmoid(z) - visit.clean
        else:
            _, output = coef.quadratic(z, visit.clean, form=coef.form_of(self._loss))
        return z, autoencoder.backward(weights, passed, output, self._constant)

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Accept the empty state."""


def released_once(method: Functional) -> bool:
    """Whether a method's noise is that of one release of every record, or of its target alone."""
    # Taylor's quadratic coefficient depends on no record: its target is all that is released.
    alone = not method.published and method.form == "taylor"
    return alone or method.release == "record"


class ReleasedRecords:
    """The rule of records that were released once: input and target, or target only.

    Samples that are one record, drawn more than once, share its one release: ``firsts`` ``[m, N]``
    names the first sample of each one's record. None means that every sample is its own record.
    """

    def __init__(
        self,
        method: Functional,
        train: Tensor,
        keys: Sequence[Key],
        firsts: Tensor | None = None,
        sources: Sequence[release.BlockSource] = (),
    ) -> None:
        self._method, self._train, self._keys = method, train, keys
        self._firsts = firsts
        self._sources: Sequence[release.BlockSource | None] = sources or [None] * len(keys)
        self._targets: Tensor | None = None
        self.alone = method.release == "coefficients"

    def direction(self, weights: Weights, visit: Visit) -> tuple[Tensor, Gradients | Tensor]:
        """Return the polynomial of the released targets, at the noisy logit."""
        targets = self.all().index_select(0, visit.places)
        inputs = visit.clean if self.alone else targets
        return _polynomial(weights, visit, inputs, targets, self._method)

    def all(self) -> Tensor:
        """Return every run's released records, ``[R m N, n]``; the first call releases them."""
        if self._targets is None:
            clip = not self.alone
            made = [
                release.record(self._method, self._train, key, clip=clip, source=source)
                for key, source in zip(self._keys, self._sources, strict=True)
            ]
            whole = torch.stack(made)
            if self._firsts is not None:
                # A second draw for the same record would be a second release of it.
                index = self._firsts[None, :, :, None].expand(whole.shape)
                whole = whole.gather(2, index)
            self._targets = whole.flatten(0, 2)
        return self._targets

    def state_dict(self) -> dict[str, Any]:
        """Return the released records."""
        return {} if self._targets is None else {"targets": self._targets.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the released records."""
        self._targets = state["targets"].clone() if state else None


class Perturbed:
    """The rule of coefficients with their own noise, fresh at every visit or kept from the first.

    What is kept of a record serves all samples that are this record: see ``ReleasedRecords``.
    """

    def __init__(
        self,
        method: Functional,
        keys: Sequence[Key],
        shape: tuple[int, int, int],
        code: int,
        firsts: Tensor | None = None,
        sources: Sequence[release.BlockSource] = (),
    ) -> None:
        users, records, n = shape
        self._method, self._n, self._code = method, n, code
        self._rows = len(keys) * users * records
        self._firsts = torch.arange(self._rows)
        if firsts is not None:
            of_pairs = torch.arange(len(keys) * users)[:, None] * records
            self._firsts = (of_pairs + firsts.repeat(len(keys), 1)).flatten()
        self._kept: tuple[Tensor, Tensor] | None = None
        self._known = torch.zeros(self._rows, dtype=torch.bool)
        self._once = method.noise_schedule == "once_per_record"
        self._ahead = (
            release.PrefetchedDraws(keys, width=users * n, parts=2, sources=sources)
            if method.noised
            else None
        )

    def direction(self, weights: Weights, visit: Visit) -> tuple[Tensor, Gradients | Tensor]:
        """Take one step of algorithm 1."""
        c = self._method.constant_entry
        passed = autoencoder.forward(weights, visit.seen(visit.clean))
        z, shift = autoencoder.stabilised(passed, c)
        total = None
        if visit.noise is not None and self._method.noisy_loss == "printed":
            clean = autoencoder.forward(weights, visit.clean)
            total = multipliers(weights, clean.hidden, visit.noise)
            _, shift = autoencoder.stabilised(clean, c)
        output = self._output(visit, z, shift, total)
        return z, autoencoder.backward(weights, passed, output, c)

    def _output(
        self, visit: Visit, z: Tensor, shift: Tensor | float, total: Tensor | None
    ) -> Tensor:
        """Return dL/dzhat."""
        form = coef.form_of(str(self._method.form))
        w = z if total is None else z / total[:, None]
        if not self._once:
            noise = self._noise(visit, shift, total)
            return coef.quadratic(w, visit.clean, form=form, noise=noise)[1]
        places = self._firsts[visit.places]
        if visit.first:
            made = coef.perturb(visit.clean, form=form, noise=self._noise(visit, shift, total))
            fresh = ~self._known[places]
            for kept, new in zip(self._keep(z), made, strict=True):
                kept[places[fresh]] = (new if total is None else new * total[:, None])[fresh]
            self._known[places] = True
        a1, a2 = (kept.index_select(0, places) for kept in self._keep(z))
        output = a1 + 2 * a2 * w
        return output if total is None else output / total[:, None]

    def _keep(self, like: Tensor) -> tuple[Tensor, Tensor]:
        if self._kept is None:
            shape = (self._rows, self._n)
            self._kept = (like.new_zeros(shape), like.new_zeros(shape))
        return self._kept

    def _noise(
        self, visit: Visit, shift: Tensor | float, total: Tensor | None
    ) -> coef.Noise | None:
        if self._ahead is None:
            return None
        if getattr(self._method, "shift", "none") == "bound":
            shift = self._method.constant_entry * self._code
        scale = self._method.scale(self._n, shift, total)
        return coef.Noise(
            scale=scale if total is None else scale / total,
            stream=self._ahead.streams[0],
            draws=self._ahead.take(visit.step),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the coefficients that are kept."""
        if self._kept is None:
            return {}
        return {"coefficients": [k.clone() for k in self._kept], "known": self._known.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the coefficients."""
        kept = state.get("coefficients")
        self._kept = None if kept is None else (kept[0].clone(), kept[1].clone())
        self._known = torch.zeros(self._rows, dtype=torch.bool)
        if kept is not None:
            self._known = state["known"].clone()


def multipliers(weights: Weights, hidden: Tensor, noise: Tensor) -> Tensor:
    """Return b_j (36) of each record, ``[B]``, from its noiseless code."""
    encoder, _ = weights.pairs()
    projected = torch.bmm(noise[:, None, :], encoder)[:, 0]
    total = environment.multipliers(hidden, projected).sum(1)
    return total.nan_to_num(nan=_LARGEST).clamp_(_SMALLEST, _LARGEST)


def _polynomial(
    weights: Weights, visit: Visit, inputs: Tensor, targets: Tensor, method: Functional
) -> tuple[Tensor, Gradients]:
    c = method.constant_entry
    passed = autoencoder.forward(weights, visit.seen(inputs))
    z, _ = autoencoder.stabilised(passed, c)
    _, output = coef.quadratic(z, targets, form=coef.form_of(str(method.form)))
    return z, autoencoder.backward(weights, passed, output, c)

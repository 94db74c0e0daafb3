"""Many small autoencoders at once: forward and gradients by hand, for R runs of m users.

    h = s(W^T x),    z = (What + c)^T h,    xhat = s(z)

with W ``[n, l]`` and What ``[l, n]`` of each run and user, no biases. A user's encoder and block of
the decoder meet no other user's. The R m pairs of one step are therefore independent, and one
record of each passes through them together.

Source: SPOF, equation (3), steps 3, 6 and 7 of algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..base.validate import integer, one_each, tensor
from ..privacy.theory import spof_loss

FLOATS = (torch.float32, torch.float64)


@dataclass
class Weights:
    """Encoders and decoder blocks of R runs of m users; updated in place.

    Attributes:
        encoder: ``[R, m, n, l]``.
        decoder: ``[R, m, l, n]``.
    """

    encoder: Tensor
    decoder: Tensor

    def __post_init__(self) -> None:
        tensor(encoder=self.encoder, shape=(None,) * 4, dtypes=FLOATS, contiguous=True)
        runs, users, n, code = self.encoder.shape
        kind = (self.encoder.dtype,)
        tensor(decoder=self.decoder, shape=(runs, users, code, n), dtypes=kind, contiguous=True)

    @property
    def runs(self) -> int:
        """The number of runs, R."""
        return self.encoder.shape[0]

    @property
    def users(self) -> int:
        """The number of users, m."""
        return self.encoder.shape[1]

    @property
    def features(self) -> int:
        """The number of features, n."""
        return self.encoder.shape[2]

    @property
    def code(self) -> int:
        """The length of the code, l."""
        return self.encoder.shape[3]

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Return views ``[R m, n, l]`` and ``[R m, l, n]``."""
        return self.encoder.flatten(0, 1), self.decoder.flatten(0, 1)

    def clone(self) -> Weights:
        """Return a copy with memory of its own."""
        return Weights(self.encoder.clone(), self.decoder.clone())

    def to(self, device: torch.device) -> Weights:
        """Return the weights on this device."""
        return Weights(self.encoder.to(device), self.decoder.to(device))


def xavier(
    runs: int,
    users: int,
    features: int,
    code: int,
    generators: Sequence[torch.Generator],
    *,
    dtype: torch.dtype = torch.float32,
) -> Weights:
    """Draw Xavier-uniform weights: within ``sqrt(6 / (n + l))`` of 0; one generator for each run.

    Raises:
        InvalidInput: a size below 1, or another number of generators than runs.
    """
    integer(1, users=users)
    integer(1, features=features)
    integer(1, code=code)
    one_each("generators", generators, integer(1, runs=runs))
    bound = math.sqrt(6 / (features + code))
    encoder = torch.empty(runs, users, features, code, dtype=dtype)
    decoder = torch.empty(runs, users, code, features, dtype=dtype)
    for run, generator in enumerate(generators):
        encoder[run].uniform_(-bound, bound, generator=generator)
        decoder[run].uniform_(-bound, bound, generator=generator)
    return Weights(encoder, decoder)


class Passed(NamedTuple):
    """The values that a forward pass leaves behind, for B pairs with one record each.

    Attributes:
        inputs: the encoder's inputs, ``[B, n]``.
        hidden: h, ``[B, l]``.
        z: logits without the stabilisation constant, ``[B, n]``.
    """

    inputs: Tensor
    hidden: Tensor
    z: Tensor


class Gradients(NamedTuple):
    """A record's gradient in its factors: products of ``[B, n]`` or ``[B, l]`` vectors.

    dL/dWhat = hidden (x) output,    dL/dW = inputs (x) code

    Attributes:
        inputs: ``[B, n]``.
        code: dL/d(W^T x), ``[B, l]``.
        hidden: ``[B, l]``.
        output: dL/dz, ``[B, n]``.
    """

    inputs: Tensor
    code: Tensor
    hidden: Tensor
    output: Tensor

    def norms(self, p: int) -> Tensor:
        """Return the p-norm (1 or 2) of each record's gradient ``[B]``, of all its weights.

        The norm of a product of vectors is the product of their norms.
        """
        first = self.inputs.norm(p, 1) * self.code.norm(p, 1)
        second = self.hidden.norm(p, 1) * self.output.norm(p, 1)
        return first + second if p == 1 else torch.hypot(first, second)

    def flat(self, factor: Tensor | None = None) -> Tensor:
        """Return all entries ``[B, 2 n l]``, encoder first, times each record's factor ``[B]``."""
        left, right = self.inputs, self.hidden
        if factor is not None:
            left, right = left * factor[:, None], right * factor[:, None]
        encoder = left[:, :, None] * self.code[:, None, :]
        decoder = right[:, :, None] * self.output[:, None, :]
        return torch.cat((encoder.flatten(1), decoder.flatten(1)), 1)


def forward(weights: Weights, inputs: Tensor) -> Passed:
    """Pass one record of each run and user through its pair.

    Args:
        inputs: ``[R m, n]``, run by run.
    """
    encoder, decoder = weights.pairs()
    hidden = torch.sigmoid(torch.bmm(inputs[:, None, :], encoder)[:, 0])
    return Passed(inputs, hidden, torch.bmm(hidden[:, None, :], decoder)[:, 0])


def stabilised(passed: Passed, constant: float) -> tuple[Tensor, Tensor | float]:
    """Return ``z + c_j`` and c_j (``spof_loss.shift``), for a constant c on the whole decoder."""
    if not constant:
        return passed.z, 0.0
    shift = spof_loss.shift(passed.hidden, constant)
    return passed.z + shift[:, None], shift


def backward(weights: Weights, passed: Passed, output: Tensor, constant: float = 0.0) -> Gradients:
    """Return the gradient by all weights from dL/dz ``[B, n]``, through What + c.

    The derivative by What is that by What + c (step 3 of algorithm 1 makes a temporary).
    """
    _, decoder = weights.pairs()
    back = torch.bmm(decoder, output[:, :, None])[:, :, 0]
    if constant:
        back += constant * output.sum(1, keepdim=True)
    h = passed.hidden
    return Gradients(passed.inputs, back * (h - h * h), h, output)


def descend(weights: Weights, gradients: Gradients, lr: float) -> None:
    """Update ``W -= lr g`` in place, without writing the gradient."""
    encoder, decoder = weights.pairs()
    g = gradients
    encoder.addcmul_(g.inputs[:, :, None], g.code[:, None, :], value=-lr)
    decoder.addcmul_(g.hidden[:, :, None], g.output[:, None, :], value=-lr)


def descend_flat(weights: Weights, gradients: Tensor, lr: float) -> None:
    """Update ``W -= lr g`` in place, for gradients ``[B, 2 n l]`` as ``Gradients.flat`` gives."""
    encoder, decoder = weights.pairs()
    size = encoder[0].numel()
    encoder.sub_(gradients[:, :size].view_as(encoder), alpha=lr)
    decoder.sub_(gradients[:, size:].view_as(decoder), alpha=lr)


def logits(weights: Weights, inputs: Tensor, constant: float = 0.0) -> Tensor:
    """Return logits ``[R, m, K, n]`` of K records of each user, ``[R or 1, m, K, n]``."""
    hidden = torch.sigmoid(inputs @ weights.encoder)
    z = hidden @ weights.decoder
    if constant:
        z += spof_loss.shift(hidden, constant)[..., None]
    return z

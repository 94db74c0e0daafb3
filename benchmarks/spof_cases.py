"""Training steps of a distributed autoencoder, SPOF's and DP-SGD's, by dpkern and by torch.

One user has one encoder W ``[n, l]`` and one block V ``[l, n]`` of the decoder, without biases:
``z = V^T s(W^T x)``. A step visits one record of every user, or ``batch`` records of each.

    SPOF    a step on (alpha_2 + Lap(b)) z + (alpha_3 + Lap(b)) z^2, b = Dhat / (sqrt(2) epsilon)
    DP-SGD  a step on the cross-entropy's gradient, clipped record by record, + Lap(2 C / epsilon)

Source: SPOF, algorithms 1 and 2; book-keeping and group clipping as its sources have them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from dpkern import PrivacyEngine
from dpkern.objective import Method, NonPrivate, SpofTraining, VisitSchedule
from dpkern.ops import testing
from dpkern.privacy.mechanisms import SPOF, LaplaceSGD, OutputSGD
from dpkern.privacy.theory.spof_sensitivity import spof_scale

USERS, FEATURES, CODE = 2, 14, 7
BATCH = 64
CONSTANT = 2.5


@dataclass(frozen=True)
class Setting:
    """The records ``[m, N, n]``, and how they are trained on.

    Attributes:
        epsilon: of one visit; infinite: no noise.
        clip: C.
        lr: in timings so small that no run diverges, since a stopped one takes another time.
    """

    train: Tensor
    test: Tensor
    epsilon: float = 1.0
    clip: float = 4.0
    lr: float = 1e-9


def setting(records: int) -> Setting:
    """Make uniform records: how long a step takes does not depend on them."""
    made = torch.rand(USERS, records + 1, FEATURES, generator=torch.Generator().manual_seed(0))
    return Setting(made[:, :records].contiguous(), made[:, records:].contiguous())


def start(given: Setting) -> list[tuple[Tensor, Tensor]]:
    """Return the first run's weights, user by user, that every variant begins with."""
    weights = SpofTraining(given, NonPrivate(), seeds=(0,), code=CODE).weights
    return [(w.clone(), v.clone()) for w, v in zip(*weights.pairs(), strict=True)]


def laplace(shape: torch.Size, scale: Tensor | float) -> Tensor:
    """Return torch's quickest Laplace draws: the difference of two exponential variables."""
    return torch.empty(shape).exponential_().sub_(torch.empty(shape).exponential_()).mul_(scale)


class Variant(ABC):
    """A step, and what it did.

    Attributes:
        visits: records that one step visits, of all runs and users.
    """

    visits: int

    @abstractmethod
    def step(self) -> None:
        """Take it."""

    @abstractmethod
    def values(self) -> Tensor:
        """Return all weights of the first run, flat."""


class Ours(Variant):
    """A trainer of many runs by dpkern, with operations on tensors: as the others are made."""

    def __init__(self, given: Setting, method: Method, runs: int) -> None:
        endless = VisitSchedule(lr=given.lr, epochs=10**9)
        self._training = SpofTraining(
            given, method, endless, seeds=range(runs), code=CODE, fused=False
        )
        self.visits = runs * len(given.train)

    def step(self) -> None:
        self._training.step()

    def values(self) -> Tensor:
        weights = self._training.weights
        pairs = zip(weights.encoder[0], weights.decoder[0], strict=True)
        return torch.cat([x.flatten() for pair in pairs for x in pair])


class Torch(Variant):
    """A trainer that goes user by user, ``batch`` records at a time, updating weights in place."""

    def __init__(self, given: Setting, batch: int) -> None:
        self.given, self.batch = given, batch
        self.pairs = [(w.requires_grad_(), v.requires_grad_()) for w, v in start(given)]
        self.visits = batch * len(self.pairs)
        self._next = 0

    def step(self) -> None:
        if self._next + self.batch > self.given.train.shape[1]:
            self._next = 0
        here = slice(self._next, self._next + self.batch)
        self._next += self.batch
        for user, (w, v) in enumerate(self.pairs):
            by_w, by_v = self.gradients(self.given.train[user, here], w, v)
            with torch.no_grad():
                w.sub_(by_w, alpha=self.given.lr)
                v.sub_(by_v, alpha=self.given.lr)

    @abstractmethod
    def gradients(self, x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return what W and V descend along, for records ``[batch, n]``."""

    def values(self) -> Tensor:
        return torch.cat([x.detach().flatten() for pair in self.pairs for x in pair])


class Perturbed(Torch):
    """A trainer by algorithm 1, record by record: autograd of the perturbed polynomial."""

    def gradients(self, x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.sigmoid(x @ w)
        z = h @ (v + CONSTANT)
        linear, quadratic = 0.5 - x, 0.5 * x - 0.25
        if self.given.epsilon < math.inf:
            shift = CONSTANT * h.detach().sum(1, keepdim=True)
            scale = spof_scale(x.shape[1], self.given.epsilon, shift)
            linear = linear + laplace(x.shape, scale)
            quadratic = quadratic + laplace(x.shape, scale)
        return torch.autograd.grad((z * (linear + quadratic * z)).sum(), (w, v))  # type: ignore[return-value]


class Noised(Torch):
    """A trainer by DP-SGD: what the subclass clipped, with noise."""

    def gradients(self, x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        found = self.clipped(x, w, v)
        if self.given.epsilon == math.inf:
            return found
        scale = 2 * self.given.clip / self.given.epsilon
        return found[0] + laplace(w.shape, scale), found[1] + laplace(v.shape, scale)

    @abstractmethod
    def clipped(self, x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return sums of clipped gradients of the records ``[batch, n]``."""


class PerSample(Noised):
    """A trainer with a backward pass for each record, one clip norm for all weights."""

    def clipped(self, x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        by_w, by_v = torch.zeros_like(w), torch.zeros_like(v)
        for row in x:
            z = torch.sigmoid(row @ w) @ v
            loss = binary_cross_entropy_with_logits(z, row, reduction="sum")
            first, second = torch.autograd.grad(loss, (w, v))
            norm = torch.linalg.vector_norm(torch.stack((first.norm(), second.norm())))
            factor = (self.given.clip / norm).clamp_(max=1)
            by_w.addcmul_(first, factor)
            by_v.addcmul_(second, factor)
        return by_w, by_v


class BookKeeping(Noised):
    """A trainer like FastDP: inputs and output gradients are kept, and norms come from them.

    One product per layer gives the clipped sum; each layer has a bound ``C / sqrt(2)`` (group
    clipping).
    """

    def clipped(self, x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        code = x @ w
        h = torch.sigmoid(code)
        z = h @ v
        loss = binary_cross_entropy_with_logits(z, x, reduction="sum")
        by_code, by_z = torch.autograd.grad(loss, (code, z))
        bound = self.given.clip / math.sqrt(2)
        sums = []
        for inputs, outputs in ((x, by_code), (h.detach(), by_z)):
            norms = inputs.norm(dim=1) * outputs.norm(dim=1)
            factors = (bound / norms).clamp_(max=1)
            sums.append(inputs.T @ (outputs * factors[:, None]))
        return sums[0], sums[1]


class Autoencoder(nn.Module):
    """One user's encoder and decoder, as a module."""

    def __init__(self, w: Tensor, v: Tensor) -> None:
        super().__init__()
        self.encoder = nn.Linear(w.shape[0], w.shape[1], bias=False)
        self.decoder = nn.Linear(v.shape[0], v.shape[1], bias=False)
        self.encoder.weight.data.copy_(w.T)
        self.decoder.weight.data.copy_(v.T)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(torch.sigmoid(self.encoder(x)))  # type: ignore[no-any-return]


class Engine(Variant):
    """A trainer by dpkern's engine, one model for each user: Laplace SGD with group clipping."""

    def __init__(self, given: Setting, batch: int) -> None:
        self.given, self.batch, self._next = given, batch, 0
        noised = given.epsilon < math.inf
        mechanism = LaplaceSGD(
            noise_multiplier=2 / given.epsilon,
            max_grad_norm=given.clip if noised else math.inf,
            clipping="per_layer",
            arithmetic="float",
        )
        self._models: list[tuple[Autoencoder, torch.optim.Optimizer]] = []
        for user, pair in enumerate(start(given)):
            model = Autoencoder(*pair)
            optimizer = torch.optim.SGD(model.parameters(), lr=given.lr)
            PrivacyEngine().make_private(
                module=model,
                optimizer=optimizer,
                data_loader=None,
                mechanism=mechanism,
                unsafe_seed=user,
                sample_rate=batch / given.train.shape[1],
                expected_batch_size=1,  # the sum of the gradients, as the other variants have it
                loss_reduction="sum",
            )
            self._models.append((model, optimizer))
        self.visits = batch * len(self._models)

    def step(self) -> None:
        if self._next + self.batch > self.given.train.shape[1]:
            self._next = 0
        here = slice(self._next, self._next + self.batch)
        self._next += self.batch
        for user, (model, optimizer) in enumerate(self._models):
            x = self.given.train[user, here]
            optimizer.zero_grad()
            binary_cross_entropy_with_logits(model(x), x, reduction="sum").backward()
            optimizer.step()

    def values(self) -> Tensor:
        weights = [p.detach().T.flatten() for model, _ in self._models for p in model.parameters()]
        return torch.cat(weights)


@dataclass(frozen=True)
class Case:
    """A variant by name.

    Attributes:
        loss: the clean loss that it descends along: ``bce``, ``printed`` or ``taylor``.
        make: from a setting.
        batch: records of a user in a step.
    """

    name: str
    loss: str
    make: Callable[[Setting], Variant]
    batch: int = 1


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs together"


def _spof(given: Setting, *, mode: str, runs: int) -> Variant:
    return Ours(given, SPOF(epsilon=given.epsilon, mode=mode, constant=CONSTANT), runs)


def _sgd(given: Setting, *, mode: str, runs: int) -> Variant:
    bound = given.clip if given.epsilon < math.inf else math.inf
    return Ours(given, OutputSGD(epsilon=given.epsilon, mode=mode, max_grad_norm=bound), runs)


_FORMS = {"published": "printed", "corrected": "taylor"}

CASES = (
    Case("SPOF, torch, record by record", "printed", partial(Perturbed, batch=1)),
    *(
        Case(f"SPOF {mode}, {_runs(runs)}", form, partial(_spof, mode=mode, runs=runs))
        for runs in (1, 100)
        for mode, form in _FORMS.items()
    ),
    Case("DP-SGD, torch, per-sample loop", "bce", partial(PerSample, batch=1)),
    Case("DP-SGD, torch, book-keeping", "bce", partial(BookKeeping, batch=1)),
    Case(
        f"DP-SGD, torch, book-keeping, B = {BATCH}", "bce", partial(BookKeeping, batch=BATCH), BATCH
    ),
    Case("DP-SGD, engine", "bce", partial(Engine, batch=1)),
    Case(f"DP-SGD, engine, B = {BATCH}", "bce", partial(Engine, batch=BATCH), BATCH),
    *(
        Case(f"DP-SGD {mode}, {_runs(runs)}", "bce", partial(_sgd, mode=mode, runs=runs))
        for runs in (1, 100)
        for mode in _FORMS
    ),
)
BY_NAME = {case.name: case for case in CASES}


def plain(given: Setting, loss: str, steps: int) -> Tensor:
    """Return the weights after so many steps on all records, without noise and clipping."""
    found = []
    for (w, v), x in zip(start(given), given.train, strict=True):
        w.requires_grad_()
        v.requires_grad_()
        for _ in range(steps):
            h = torch.sigmoid(x @ w)
            if loss == "bce":
                total = binary_cross_entropy_with_logits(h @ v, x, reduction="sum")
            else:
                z = h @ (v + CONSTANT)
                quadratic = 0.5 * x - 0.25 if loss == "printed" else torch.full_like(x, 1 / 8)
                total = (z * (0.5 - x + quadratic * z)).sum()
            by_w, by_v = torch.autograd.grad(total, (w, v))
            with torch.no_grad():
                w.sub_(by_w, alpha=given.lr)
                v.sub_(by_v, alpha=given.lr)
        found += [w.detach().flatten(), v.detach().flatten()]
    return torch.cat(found)


def verify(case: Case, steps: int = 3) -> None:
    """Check that the variant without noise and clipping is plain descent on its loss.

    Raises:
        AssertionError: it is not; then nothing may be timed.
    """
    given = replace(setting(case.batch), epsilon=math.inf, clip=math.inf, lr=0.01)
    variant = case.make(given)
    before = variant.values()
    for _ in range(steps):
        variant.step()
    wanted = plain(given, case.loss, steps)
    if torch.equal(before, variant.values()):
        raise AssertionError(f"{case.name}: nothing moved")
    testing.assert_close(case.name, variant.values(), wanted, 1e-5)

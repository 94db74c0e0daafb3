"""Train (distributed) autoencoders by SPOF, FM, algorithm 2 or no noise, many runs at once.

One step takes one record of every user in every run, each user's records in an order of the run's
own. Blocks of the decoder belong to one user each, so that the users of the printed inner loop are
independent and go through a step together.

A run whose logits leave [-1000, 1000] is marked and stays as it is; the others go on. What
``descent.fits`` says takes many steps in one kernel, on a device too; other methods go step by
step, as operations on tensors.

Source: SPOF, algorithms 1 and 2, section VI; schedule, accuracy and guard are defaults of ours.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ..base.collapse import OutputSpread, of_outputs
from ..base.errors import InvalidInput, PrivacyError
from ..base.rng import Key
from ..base.threads import limited
from ..base.validate import integer, non_negative, tensor_at
from ..ops.coef import LOGIT_LIMIT, check_targets
from ..privacy.mechanisms import ObjectivePerturbation
from ..privacy.mechanisms.functional import Functional
from ..privacy.theory.spof_loss import cross_entropy
from . import autoencoder, release
from .autoencoder import Gradients, Weights
from .descent import KernelSteps, fits
from .dpsgd import OutputNoise, ParameterNoise
from .methods import Method, NonPrivate, VisitSchedule
from .records import Records
from .rules import Perturbed, Plain, ReleasedRecords, Rule, Visit, released_once

CODE = 7

_ENTRIES_AT_ONCE = 1 << 21


class UserRecords(Protocol):
    """Records by user: float32 ``[m, N, n]`` to train on and ``[m, K, n]`` held out, in [0, 1]."""

    @property
    def train(self) -> Tensor: ...

    @property
    def test(self) -> Tensor: ...


R = TypeVar("R")


def pooled(records: R) -> R:
    """Return all users' records as one user's, as the functional mechanism takes them."""
    if isinstance(records, Records):
        return records.pooled()  # type: ignore[return-value]  # R is Records
    train, test = (getattr(records, name).flatten(0, 1)[None] for name in ("train", "test"))
    return replace(records, train=train, test=test)  # type: ignore[type-var]


@dataclass
class SpofOutcome:
    """The outcome of R runs, on held-out records.

    Attributes:
        accuracy: ``100 (1 - mean |x - xhat|)``, ``[R]``, percent.
        mse: mean of ``||x - xhat||^2``, ``[R]``.
        bce: mean cross-entropy (4) of a record, ``[R]``.
        diverged: runs that were stopped, ``[R]``.
        seconds_per_epoch: seconds of an epoch of all runs together.
        visits: visits of each sample; a record drawn k times has k times as many
            (``Records.copies``).
    """

    accuracy: Tensor
    mse: Tensor
    bce: Tensor
    diverged: Tensor
    seconds_per_epoch: float
    visits: int


class SpofTraining:
    """The training of R runs, one for each seed, that differ in weights, order and noise.

    Args:
        records: records to train on.
        method: ``SPOF``, ``FM``, ``OutputSGD`` or ``NonPrivate``.
        schedule: learning rate and epochs.
        seeds: one for each run: of initial weights, order, and noise where there are no keys.
        sigma: standard deviation of the environmental noise at the encoder's input, in training and
            in tests.
        code: l.
        keys: one secret key for each run. None derives keys from the seeds, which certify nothing.
        noise_source: makes the source of each run's draws, such as ``noise_tables.CdtTable``; None
            draws them from the key. Environmental noise is always drawn from the key.
        device: where weights stand and steps are taken.
        fused: whether the kernel takes the steps of methods that it fits. Without it every step is
            made of operations on tensors; draws are the same, rounding is not.

    Raises:
        InvalidInput: records of the wrong shape or outside [0, 1], FM with several users, a number
            out of its range, or a source for a method without noise.
        PrivacyError: a secret key for several runs, whose noise would be the same.
    """

    def __init__(
        self,
        records: UserRecords,
        method: Method,
        schedule: VisitSchedule | None = None,
        *,
        seeds: Sequence[int],
        sigma: float = 0.0,
        code: int = CODE,
        keys: Sequence[Key] | None = None,
        noise_source: release.MakeSource | None = None,
        device: torch.device | str = "cpu",
        fused: bool = True,
    ) -> None:
        self.method, self.schedule = method, schedule or VisitSchedule()
        self.seeds = tuple(integer(seeds=seed) for seed in seeds)
        integer(1, **{"number of seeds": len(self.seeds)})
        self.sigma = non_negative(sigma=sigma)
        self._train, self._test = _checked(records, method)
        self._firsts = records.firsts if isinstance(records, Records) else None
        self.keys = [Key.from_unsafe_seed(s) for s in self.seeds] if keys is None else list(keys)
        if len(self.keys) != len(self.seeds):
            raise InvalidInput(
                "keys",
                expected=f"{len(self.seeds)} keys, one for each seed",
                got=len(self.keys),
                remedy="Pass one Key.fresh() for each run.",
            )
        secret = [id(key) for key in self.keys if not key.seeded]
        if len(set(secret)) < len(secret):
            raise PrivacyError(
                "keys",
                expected="a key of its own for each run",
                got="one key for several runs",
                remedy="Pass one Key.fresh() for each run.",
            )
        self.seeded = any(key.seeded for key in self.keys)
        users, self.records_each, n = self._train.shape
        runs = len(self.seeds)
        starts = [_generator(seed, "weights") for seed in self.seeds]
        self.device = torch.device(device)
        self.fused = fused and fits(method, sigma=self.sigma)
        if self.device.type != "cpu" and not self.fused:
            raise InvalidInput(
                "device",
                expected="cpu, where steps of this method are operations on tensors",
                got=str(self.device),
                remedy="Leave the device out: its kernel takes polynomials that are noised afresh "
                "at every visit or released once, without theorem 1's multipliers.",
            )
        made = autoencoder.xavier(runs, users, n, integer(1, code=code), starts)
        self.weights = made.to(self.device)
        self._stopped = torch.zeros(runs, dtype=torch.int32, device=self.device)
        self._any_stopped = False
        self.step_number, self.seconds = 0, 0.0
        self._flat = self._train.flatten(0, 1)
        if noise_source is not None and (isinstance(method, NonPrivate) or not method.noised):
            raise InvalidInput(
                "noise_source",
                expected="a method that draws noise",
                got=type(method).__name__ + " without noise",
                remedy="Leave noise_source away.",
            )
        self.sources = [] if noise_source is None else [noise_source() for _ in self.keys]
        self._rule = self._make_descent() if self.fused else self._make_rule()
        self._nature = (
            release.Environment(self.keys, self.sigma, width=users * n) if self.sigma else None
        )
        self._epoch = -1
        self._orders = torch.empty(0, dtype=torch.int64)
        self._places = torch.empty(0, dtype=torch.int64)

    def _make_descent(self) -> KernelSteps:
        assert isinstance(self.method, Functional | NonPrivate)
        return KernelSteps(
            self.method,
            self._train,
            self.keys,
            self.weights.code,
            lr=self.schedule.lr,
            firsts=self._firsts,
            sources=self.sources,
        )

    def _make_rule(self) -> Rule:
        users, records, n = self._train.shape
        method, keys, sources = self.method, self.keys, self.sources
        if isinstance(method, NonPrivate):
            return Plain(method)
        if not isinstance(method, Functional):
            if not method.full_parameter:
                return OutputNoise(method, keys, users=users, n=n, sources=sources)
            size = 2 * n * self.weights.code
            return ParameterNoise(method, keys, users=users, size=size, sources=sources)
        if released_once(method) and method.noised:
            return ReleasedRecords(method, self._train, keys, self._firsts, sources)
        shape = (users, records, n)
        return Perturbed(method, keys, shape, self.weights.code, self._firsts, sources)

    @property
    def steps(self) -> int:
        """The number of steps of the whole schedule."""
        return self.schedule.epochs * self.records_each

    @property
    def visits(self) -> int:
        """The number of visits of every record, an epoch that has begun included."""
        return -(-self.step_number // self.records_each)

    @property
    def diverged(self) -> Tensor:
        """The runs that were stopped, ``[R]``."""
        return self._stopped.bool().cpu()

    def step(self) -> None:
        """Train one record of every user in every run."""
        self.advance(1)

    def advance(self, most: int) -> int:
        """Take the next steps, at most so many and all of one epoch; return how many they were."""
        begun = time.perf_counter()
        if isinstance(self._rule, KernelSteps):
            count = self._descend_together(self._rule, most)
        else:
            count = 1
            # What a step does is too small to be shared out.
            with limited(1):
                shown, direction = self._rule.direction(self.weights, self._visit())
                self._guard(shown)
                self._descend(direction)
        self.step_number += count
        self.seconds += time.perf_counter() - begun
        return count

    def run(self, on_step: Callable[[int, int], None] | None = None) -> SpofOutcome:
        """Run the rest of the schedule; ``on_step(done, of)`` is called behind every few steps."""
        while self.step_number < self.steps:
            self.advance(self.steps)
            if on_step is not None:
                on_step(self.step_number, self.steps)
        return self.outcome()

    def _descend_together(self, rule: KernelSteps, most: int) -> int:
        number = self._place_in_epoch()
        rooms = [most, self.records_each - number, rule.room(self.step_number)]
        if self._nature is not None:
            rooms.append(self._nature.room(self.step_number))
        count, runs = min(rooms), len(self.seeds)
        order = self._orders[number : number + count].view(count, runs, -1).transpose(0, 1)
        added = None
        if self._nature is not None:
            nature = self._nature.take(self.step_number, count)
            added = nature.view(count, runs, -1, self._train.shape[2]).transpose(0, 1)
        rule.descend(self.weights, self._stopped, self.step_number, order, added)
        return count

    def _place_in_epoch(self) -> int:
        """Return the number of the step in its epoch; make the epoch's order."""
        epoch, number = divmod(self.step_number, self.records_each)
        if epoch != self._epoch:
            self._orders, self._places = self._ordered(epoch)
            self._epoch = epoch
        return number

    def _visit(self) -> Visit:
        number = self._place_in_epoch()
        nature = None
        if self._nature is not None:
            nature = self._nature.take(self.step_number).view(-1, self._train.shape[2])
        clean = self._flat.index_select(0, self._orders[number])
        return Visit(self.step_number, self._epoch == 0, self._places[number], clean, nature)

    def _ordered(self, epoch: int) -> tuple[Tensor, Tensor]:
        """Return rows of ``[m N, n]`` and of ``[R m N, n]``, ``[N, R m]``: step by step."""
        users, each, _ = self._train.shape
        rows = torch.empty(each, len(self.seeds), users, dtype=torch.int64)
        for run, seed in enumerate(self.seeds):
            generator = _generator(seed, f"order {epoch}")
            for user in range(users):
                rows[:, run, user] = user * each + torch.randperm(each, generator=generator)
        places = rows + torch.arange(len(self.seeds))[:, None] * (users * each)
        return rows.flatten(1), places.flatten(1)

    def _guard(self, shown: Tensor) -> None:
        """Mark runs beyond the limit; NaN is beyond it."""
        largest = torch.linalg.vector_norm(shown.view(len(self.seeds), -1), math.inf, 1)
        inside = largest <= LOGIT_LIMIT
        if not bool(inside.all()):
            self._stopped |= ~inside
            self._any_stopped = True

    def _descend(self, direction: Gradients | Tensor) -> None:
        lr = self.schedule.lr
        if self._any_stopped:
            stopped = self._stopped.bool().repeat_interleave(self.weights.users)[:, None]
            direction = _held(direction, stopped)
        if isinstance(direction, Gradients):
            autoencoder.descend(self.weights, direction, lr)
        else:
            autoencoder.descend_flat(self.weights, direction, lr)

    def outcome(self) -> SpofOutcome:
        """Measure the outcome on the held-out records as they are now."""
        sums = torch.zeros(3, len(self.seeds), dtype=torch.float64)
        users, count, n = self._test.shape
        for z, x in self._test_logits():
            error = (x - torch.sigmoid(z)).double()
            sums[0] += error.abs().sum((1, 2, 3))
            sums[1] += error.square().sum((1, 2, 3))
            sums[2] += cross_entropy(z.double(), x.double()).sum((1, 2, 3))
        absolute, square, bce = sums / (users * count)
        epochs = self.step_number / self.records_each
        return SpofOutcome(
            accuracy=100 * (1 - absolute / n),
            mse=square,
            bce=bce,
            diverged=self.diverged,
            seconds_per_epoch=self.seconds / epochs if epochs else 0.0,
            visits=self.visits,
        )

    def spread(self) -> list[OutputSpread]:
        """Return how far each run's outputs differ between the held-out records of a user."""
        pieces = [torch.sigmoid(z) for z, _ in self._test_logits()]
        outputs = torch.cat(pieces, 2).transpose(1, 2)
        return [of_outputs(run) for run in outputs]

    def _test_logits(self) -> list[tuple[Tensor, Tensor]]:
        """Return logits ``[R, m, K', n]`` and clean records ``[1, m, K', n]``, in pieces."""
        users, count, n = self._test.shape
        rows = max(1, _ENTRIES_AT_ONCE // (len(self.seeds) * users * n))
        constant = getattr(self.method, "constant", 0.0)
        if not getattr(self.method, "constant_at_inference", True):
            constant = 0.0
        inputs = self._test[None]
        if self.sigma:
            nature = release.Environment(
                self.keys, self.sigma, width=users * count * n, use=release.TEST
            )
            inputs = inputs + nature.block(0, 1)[0].view(-1, users, count, n)
        weights, pieces = self.weights.to(torch.device("cpu")), []
        for start in range(0, count, rows):
            here = slice(start, start + rows)
            z = autoencoder.logits(weights, inputs[:, :, here], constant)
            pieces.append((z, self._test[None, :, here]))
        return pieces

    @property
    def fingerprint(self) -> str:
        """The configuration that must agree for a state to be loaded."""
        settings = self.method.fingerprint, self.schedule, self.seeds, self.sigma
        text = f"{settings} {tuple(self._train.shape)} {self.weights.code}"
        # A prefetched draw is the stream's own: such a run may go on with and without the source.
        other = {str(s.settings) for s in self.sources if s.warning or s.variation}
        return " ".join([text, *other])

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a later process needs, released records included; no key."""
        return {
            "fingerprint": self.fingerprint,
            "encoder": self.weights.encoder.to("cpu", copy=True),
            "decoder": self.weights.decoder.to("cpu", copy=True),
            "diverged": self.diverged,
            "step_number": self.step_number,
            "seconds": self.seconds,
            "rule": self._rule.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state.

        Raises:
            InvalidInput: the state of another training.
            PrivacyError: steps were taken already: secret noise would be used twice.
        """
        if self.step_number and not self.seeded:
            raise PrivacyError(
                "state",
                expected="a training that has not begun",
                got=f"{self.step_number} steps with the same keys",
                remedy="Make a new Training with fresh keys and load the state into that.",
            )
        if state.get("fingerprint") != self.fingerprint:
            raise InvalidInput(
                "state",
                expected=self.fingerprint,
                got=state.get("fingerprint"),
                remedy="Resume with the settings that the state was made with.",
            )
        self.weights = Weights(state["encoder"].clone(), state["decoder"].clone()).to(self.device)
        self._stopped = state["diverged"].to(self.device, torch.int32)
        self._any_stopped = bool(self.diverged.any())
        self.step_number, self.seconds = state["step_number"], state["seconds"]
        self._rule.load_state_dict(state["rule"])


def _checked(records: UserRecords, method: Method) -> tuple[Tensor, Tensor]:
    train, test = records.train, records.test
    kind: dict[str, Any] = {"dtypes": (torch.float32,)}
    tensor_at("records.train", train, shape=(None, None, None), **kind)
    users, _, n = train.shape
    tensor_at("records.test", test, shape=(users, None, n), **kind)
    for name, part in (("records.train", train), ("records.test", test)):
        for what, size in zip(
            ("users", "records of each user", "features"), part.shape, strict=True
        ):
            integer(1, **{f"{what} of {name}": size})
        check_targets(name, part)
    if isinstance(method, ObjectivePerturbation) and method.single_user and users != 1:
        raise InvalidInput(
            "records",
            expected=f"one user with {type(method).__name__}, which trains a single autoencoder",
            got=f"{users} users",
            remedy="Use dpkern.objective.pooled(records).",
        )
    return train.contiguous(), test.contiguous()


def _generator(seed: int, use: str) -> torch.Generator:
    """Return a generator for what is no secret: initial weights and orders."""
    number = random.Random(f"dpkern {seed} {use}").getrandbits(63)
    return torch.Generator().manual_seed(number)


def _held(direction: Gradients | Tensor, stopped: Tensor) -> Gradients | Tensor:
    """Return the direction, 0 for pairs of stopped runs, ``[B, 1]``."""
    if isinstance(direction, Tensor):
        return direction.masked_fill(stopped, 0.0)
    code, output = direction.code, direction.output
    return direction._replace(
        code=code.masked_fill(stopped, 0.0), output=output.masked_fill(stopped, 0.0)
    )

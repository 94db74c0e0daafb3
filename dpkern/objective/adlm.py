"""Train AdLM and ILM networks on released inputs and labels, all Monte Carlo runs at once.

    released = [release(mechanism, data, key, relevance=relevance) for key in keys]
    outcome = AdlmTraining(data, released, networks, Schedule(), seeds=seeds).run()

``monte_carlo`` does this for a list of known seeds; results then hold as if the seeds were secret.
A step is one batch of |L| records of every run, plain gradient descent on the mean loss (line 29).
Training spends nothing: any number of epochs on released values is post-processing.

Source: AdLM, algorithm 1, lines 20-30.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..base.collapse import OutputSpread, of_scores
from ..base.errors import InvalidInput
from ..base.rng import Key, Purpose
from ..base.validate import integer, probability
from ..nn.polynomial import PowerCoefficients
from ..privacy.mechanisms.adlm import ILM, AdLM
from . import adlm_loss
from .adlm_data import Labelled
from .adlm_networks import ARCHITECTURES, Architecture, build, setting
from .adlm_release import (
    VISITS,
    ReleasedDataset,
    check_source,
    release,
    relevance_of,
    scored,
)
from .adlm_schedule import AdlmOutcome, AdlmSchedule
from .adlm_stack import Stack
from .adlm_steps import WeightSteps

CPU = torch.device("cpu")
LARGEST_SCORE = 1e3
"""The divergence limit.

A run whose scores, or weights of the output layer, exceed it has diverged: noise can make the
polynomial open downwards.
"""


class AdlmTraining:
    """The training of R networks on R releases.

    Args:
        data: only its held-out records are read, and in the ``feature_expanded`` form nothing more.
        released: one release per run, of one configuration, on the device to train on.
        networks: one per run, of one architecture, on the same device.
        schedule: the training's ``AdlmSchedule``.
        seeds: seeds of every run's batches.
        keys: keys of every run's noise at each visit; for ``feature_expanded`` only.

    Raises:
        InvalidInput: lists of different lengths, different configurations, missing keys.
    """

    def __init__(
        self,
        data: Labelled,
        released: Sequence[ReleasedDataset],
        networks: Sequence[nn.Sequential],
        schedule: AdlmSchedule,
        *,
        seeds: Sequence[int],
        keys: Sequence[Key] | None = None,
    ) -> None:
        _check(released, networks, seeds, keys)
        self.data, self.released, self.schedule = data, list(released), schedule
        self.mechanism = released[0].mechanism
        self.seeds = [integer(0, 2**40, seeds=seed) for seed in seeds]
        self.keys = None if keys is None else list(keys)
        self.stack = Stack(networks)
        self.rule = WeightSteps(self.stack.parameters, lr=schedule.lr, optimizer=schedule.optimizer)
        biases = [each.bias_noise for each in released]
        if biases[0] is not None:
            self.stack.offset = torch.stack([bias for bias in biases if bias is not None])
        self.batch = self.mechanism.setting.batch
        self.steps_per_epoch = len(released[0].inputs) // self.batch
        self.step = 0
        device = released[0].inputs.device
        self.diverged = torch.zeros(len(released), dtype=torch.bool, device=device)
        self._loss = torch.zeros(len(released), dtype=torch.float64, device=device)
        self._orders: tuple[int, list[Tensor]] = (-1, [])
        self._epochs: list[int] = []
        self._accuracy: list[Tensor] = []
        self._losses: list[Tensor] = []
        self._seconds = 0.0
        made = data.inputs(data.x_test, self.mechanism.input_range)
        self._test = made.to(released[0].inputs)
        self._truth = data.y_test.to(device)

    @property
    def total_steps(self) -> int:
        """The number of steps of the whole schedule."""
        return self.schedule.epochs * self.steps_per_epoch

    @property
    def finished(self) -> bool:
        """Whether no step is left, or every run has diverged."""
        return self.step >= self.total_steps or bool(self.diverged.all())

    def run(
        self,
        *,
        on_step: Callable[[int], None] | None = None,
        on_epoch: Callable[[int, Tensor], None] | None = None,
    ) -> AdlmOutcome:
        """Take all steps that are left, until every run has diverged.

        A ``KeyboardInterrupt`` between steps leaves a state to save.

        Args:
            on_step: called with the number of steps done.
            on_epoch: called with the epoch and accuracies ``[R]`` wherever they are measured.
        """
        while not self.finished:
            accuracy = self.advance()
            if accuracy is not None and on_epoch is not None:
                on_epoch(self._epochs[-1], accuracy)
            if on_step is not None:
                on_step(self.step)
        return self.outcome()

    def advance(self) -> Tensor | None:
        """Take one step; return accuracies ``[R]`` where it ends an epoch that is measured."""
        self.one_step()
        if self.step % self.steps_per_epoch and not self.finished:
            return None
        epoch, accuracy = -(-self.step // self.steps_per_epoch), None
        if epoch % self.schedule.evaluate_every == 0 or self.finished:
            accuracy = self.accuracy()
            self._epochs.append(epoch)
            self._accuracy.append(accuracy)
            self._losses.append(self._loss.clone())
        self._loss.zero_()
        return accuracy

    def one_step(self) -> None:
        """Train one batch of every run; runs that have diverged stay as they are."""
        begin = time.perf_counter()
        epoch, place = divmod(self.step, self.steps_per_epoch)
        if epoch != self._orders[0]:
            self._orders = epoch, [self._order(seed, epoch) for seed in self.seeds]
        rows = [order[place] for order in self._orders[1]]
        x = self._gather([each.inputs for each in self.released], rows)
        hidden = self.stack.hidden(x, training=True)
        scores = self.stack.output(hidden)
        with torch.no_grad():
            for size in (scores, self.stack.last):  # NaN exceeds everything
                self.diverged |= ~(size.abs().amax((1, 2)) <= LARGEST_SCORE)
        loss = self._loss_of(hidden, scores, rows)
        self.rule.take(self.step + 1, ~self.diverged)
        self._loss += loss / self.steps_per_epoch
        self.step += 1
        self._seconds += time.perf_counter() - begin

    def accuracy(self) -> Tensor:
        """Return ``[R]``, per cent of held-out records, with no noise but what all records share.

        The draw of ``shared_per_feature`` and the bias' belong to the network that was trained.
        """
        right = torch.zeros(len(self.released), device=self._test.device)
        for begin, found in self._scores():
            truth = self._truth[begin : begin + self.batch]
            right += (found.argmax(2) == truth).sum(1)
        return (100 * right / len(self._test)).cpu()

    def spread(self) -> list[OutputSpread]:
        """Return how far each run's outputs differ between held-out records."""
        scores = torch.cat([found for _, found in self._scores()], 1)
        return [of_scores(each) for each in scores.cpu()]

    @torch.no_grad()
    def _scores(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the first record and the scores ``[R, |L|, classes]`` of held-out batches."""
        offsets = [each.offset for each in self.released]
        for begin in range(0, len(self._test), self.batch):
            x = self._test[begin : begin + self.batch].expand(len(offsets), -1, -1)
            if offsets[0] is not None:
                x = x + torch.stack([o for o in offsets if o is not None])[:, None]
            scores = self.stack.scores(x.contiguous(), training=False, ranges=self.schedule.ranges)
            yield begin, scores

    def outcome(self) -> AdlmOutcome:
        """Return what has been measured so far."""
        none = torch.zeros(len(self.released), 0)
        return AdlmOutcome(
            epochs=list(self._epochs),
            accuracy=torch.stack(self._accuracy, 1) if self._accuracy else none,
            loss=torch.stack(self._losses, 1).cpu() if self._losses else none,
            diverged=self.diverged.cpu().clone(),
            seconds_per_epoch=self._seconds * self.steps_per_epoch / max(1, self.step),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return everything that changes; the releases are the caller's to keep."""
        return {
            "fingerprint": self._fingerprint,
            "step": self.step,
            "weights": self.stack.state_dict(),
            "rule": self.rule.state_dict(),
            "diverged": self.diverged.clone(),
            "loss": self._loss.clone(),
            "epochs": list(self._epochs),
            "accuracy": list(self._accuracy),
            "losses": list(self._losses),
            "seconds": self._seconds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state_dict`` was taken.

        Raises:
            InvalidInput: the state of another run.
        """
        if state["fingerprint"] != self._fingerprint:
            raise InvalidInput(
                "state",
                expected=self._fingerprint,
                got=state["fingerprint"],
                remedy="Resume with the mechanism, schedule and seeds that the run began with.",
            )
        self.step, self._seconds = state["step"], state["seconds"]
        self.stack.load_state_dict(state["weights"])
        self.rule.load_state_dict(state["rule"])
        self.diverged, self._loss = state["diverged"].clone(), state["loss"].clone()
        self._epochs = list(state["epochs"])
        self._accuracy, self._losses = list(state["accuracy"]), list(state["losses"])

    @property
    def _fingerprint(self) -> str:
        return f"{self.mechanism.fingerprint} {self.schedule} {self.seeds} {self.stack.template}"

    def _order(self, seed: int, epoch: int) -> Tensor:
        """Return row numbers of an epoch's batches, ``[steps, |L|]``, from seed and epoch."""
        generator = torch.Generator().manual_seed((seed << 22) + epoch)
        count = len(self.released[0].inputs)
        kept = torch.randperm(count, generator=generator)[: self.steps_per_epoch * self.batch]
        return kept.view(self.steps_per_epoch, self.batch)

    @staticmethod
    def _gather(values: Sequence[Tensor], rows: Sequence[Tensor]) -> Tensor:
        return torch.stack([each[row] for each, row in zip(values, rows, strict=True)])

    def _loss_of(self, hidden: Tensor, scores: Tensor, rows: list[Tensor]) -> Tensor:
        """Return mean losses ``[R]``; gradients are left at the parameters."""
        made = [each.coefficients for each in self.released]
        if made[0] is not None:
            known = [each for each in made if each is not None]
            linear = self._gather([each.linear for each in known], rows)
            quadratic = self._gather([each.quadratic for each in known], rows)
            return adlm_loss.with_coefficients(
                scores, PowerCoefficients(known[0].constant, linear, quadratic)
            )
        targets = self._gather([t.targets for t in self.released if t.targets is not None], rows)
        if self.schedule.loss == "cross_entropy":
            return adlm_loss.cross_entropy(scores, targets)
        scale = self.released[0].visit_scale
        if scale is None:
            return adlm_loss.with_targets(scores, targets)
        assert self.keys is not None  # checked
        visit = [
            (
                key.stream(Purpose.LAPLACE, 1 + self.step, stream=VISITS),
                key.stream(Purpose.ROUNDING, 1 + self.step, stream=VISITS),
            )
            for key in self.keys
        ]
        return adlm_loss.expanded(hidden, self.stack.last, targets, scale=scale, streams=visit)


def clean(
    data: Labelled, *, batch: int, network: nn.Sequential, input_range: str
) -> ReleasedDataset:
    """Return the records themselves in the form of a release: nothing is protected."""
    sizes = setting(network, data.row_shape, records=len(data.x), batch=batch)
    free = ILM(epsilon=float("inf"), setting=sizes, input_range=input_range)
    return release(free, data, Key.from_unsafe_seed(0))


def pretrained(
    data: Labelled,
    architecture: str | Architecture = "mnist",
    *,
    epochs: int = 12,
    lr: float = 0.01,
    batch: int = 50,
    least_steps: int = 1000,
    bar: float = 0.9,
    seed: int = 0,
    input_range: str = "unit",
) -> nn.Sequential:
    """Train the network that relevances come from on the cross entropy (23), without noise.

    It trains on these records, and is public where they are: the bar is tested on them alone, so
    that a refusal tells nothing about others. Relevance begins with the score of a record's class.
    Where that is negative, pixels that speak for the class get the least relevance and constant
    ones the larger budget.

    Args:
        data: the records.
        architecture: name or sizes of the network.
        epochs: the paper trains 12 (MNIST) or 50 (CIFAR-10); more where they are too few steps.
        lr, batch: of Adam's steps; not in the source.
        least_steps: number of steps that few records are repeated for.
        bar: share of these records that must be classified right, and of those whose class must
            have a positive score.
        seed: public seed of weights and order.
        input_range: ``unit`` or ``unit_l2``.

    Raises:
        InvalidInput: the network stays below the bar.
    """
    probability(bar=bar)
    network = build(architecture, data.row_shape, data.classes, seed=seed)
    released = clean(data, batch=min(batch, len(data.x)), network=network, input_range=input_range)
    each = len(data.x) // min(batch, len(data.x))
    epochs = max(epochs, -(-least_steps // each))
    schedule = AdlmSchedule(
        lr=lr, optimizer="adam", epochs=epochs, loss="cross_entropy", evaluate_every=epochs
    )
    training = AdlmTraining(data, [released], [network], schedule, seeds=[seed])
    training.run()
    made = training.stack.network(0)
    right, positive = scored(made, released.inputs, data.y)
    if not min(right, positive) >= bar:
        raise InvalidInput(
            "pretraining",
            expected=f"a network with at least {bar:.0%} of its own records right, and of their "
            "classes' scores positive: relevance is upside down where they are negative",
            got=f"{right:.1%} right, {positive:.1%} positive after {epochs} epochs",
            remedy="Give more or easier public records, more epochs, or --mechanism ilm, which "
            "needs no relevances.",
        )
    return made


def monte_carlo(
    mechanism: AdLM,
    data: Labelled,
    architecture: str | Architecture,
    schedule: AdlmSchedule,
    *,
    seeds: Sequence[int],
    relevance: Tensor | None = None,
    device: torch.device = CPU,
) -> AdlmTraining:
    """Start R runs from known seeds: weights, batches and noise of run r from ``seeds[r]``.

    Releases are made on the processor, training takes place on ``device``.
    """
    keys = [Key.from_unsafe_seed(seed) for seed in seeds]
    return AdlmTraining(
        data,
        [release(mechanism, data, key, relevance=relevance).to(device) for key in keys],
        [build(architecture, data.row_shape, data.classes, seed=seed).to(device) for seed in seeds],
        schedule,
        seeds=seeds,
        keys=keys,
    )


def _check(
    released: Sequence[ReleasedDataset],
    networks: Sequence[nn.Sequential],
    seeds: Sequence[int],
    keys: Sequence[Key] | None,
) -> None:
    counts = {len(released), len(networks), len(seeds)} | (
        {len(keys)} if keys is not None else set()
    )
    if len(counts) != 1 or not released:
        raise InvalidInput(
            "released",
            expected="as many releases as networks, seeds and keys, at least one",
            got=f"{len(released)}, {len(networks)} and {len(seeds)}",
            remedy="Pass one release, network, seed and key for every run.",
        )
    if len({each.mechanism.fingerprint for each in released}) != 1:
        raise InvalidInput(
            "released",
            expected="releases of one configuration",
            got="several",
            remedy="Train each configuration by itself.",
        )
    if released[0].visit_scale is not None and keys is None:
        raise InvalidInput(
            "keys",
            expected="a key per run: the feature_expanded form draws at every visit",
            got="None",
            remedy="Pass the keys of the releases.",
        )


__all__ = [
    "ARCHITECTURES",
    "AdlmOutcome",
    "AdlmSchedule",
    "AdlmTraining",
    "Architecture",
    "Labelled",
    "ReleasedDataset",
    "build",
    "check_source",
    "clean",
    "monte_carlo",
    "pretrained",
    "release",
    "relevance_of",
    "setting",
]

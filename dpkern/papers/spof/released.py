"""Train SPOF's autoencoder as its authors' released code trains it.

Two encoders see the same record and one decoder reads both codes; every layer has a bias and a
sigmoid. Batch 1, Adam, one epoch of 80 % of the rows. For user ``u`` and output ``i`` the loss of a
record is

    L = sum_ui log 2 + (k (1/2 - t_i) + n_ui) z_ui + (k (t_i / 2 - 1/4) + n_ui) z_ui^2,
    z_ui = sum_r e_ur (D_uir + c)

with codes ``e``, decoder weights ``D`` and Laplace noise ``n``, one draw for both coefficients. The
target ``t`` is the network's own output ``y``; printed is the record. The gradient is rebuilt from
the inputs and output gradients of the layers, so ``D`` is trained through ``y`` alone and the noise
of the loss never reaches it. Every method, DP-SGD too, trains on this loss; ``target`` and
``gradient`` undo the two choices. The scale of the noise is not differentiated.

The scale of that noise has two terms, and the stored script divides both by epsilon. An earlier
script left the constant's term undivided: the published noisy runs of SPOF, which are the same at
every epsilon, come out with that one only (``constant_over_epsilon``). Training without privacy was
published once, in runs with the sensors' noise in its targets.

These runs reproduce numbers; the noise of the loss protects nothing: its scale follows the record.

Source: the repository theorycoder/distributedautoencoders, commits b92bab58 and 43dea567.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

FEATURES, CODE = 14, 7
CLIP, CONSTANT = 4.0, 2.5
RATE, BETAS, TINY = 1e-3, (0.9, 0.999), 1e-8
SPOF, DPSGD, FM, NON_PRIVATE = "SPOF", "DP-SGD", "FM", "non-private"
METHODS = (SPOF, DPSGD, FM, NON_PRIVATE)
OUTPUT, RECORD = "output", "record"
LAYERS, LOSS = "layers", "loss"
BLOCK = 128
"""Steps whose random numbers are drawn at once."""


@dataclass(frozen=True, kw_only=True)
class ReleasedMethod:
    """A method of the released code, and what may be undone in it.

    Attributes:
        name: one of ``METHODS``.
        sigma: standard deviation of the sensors' noise; 0 for the noiseless condition.
        target: ``"output"``, as released, or ``"record"``, as printed.
        gradient: ``"layers"``, rebuilt from the layers as released, or that of the ``"loss"``.
        noise: whether the mechanism's noise is added.
        constant_over_epsilon: whether the constant's term of SPOF's scale is divided by epsilon, as
            in the stored script, not in an earlier one.
        shift: c of every method but FM.
        clip: clipping bound of DP-SGD.
        rate: of Adam's steps.
    """

    name: str
    sigma: float = 0.0
    target: str = OUTPUT
    gradient: str = LAYERS
    noise: bool = True
    constant_over_epsilon: bool = True
    shift: float = CONSTANT
    clip: float = CLIP
    rate: float = RATE

    @property
    def users(self) -> int:
        """The number of encoders: FM has one."""
        return 1 if self.name == FM else 2

    @property
    def constant(self) -> float:
        return 0.0 if self.name == FM else self.shift

    @property
    def factor_sigma(self) -> float:
        """The standard deviation behind the factor ``k``; 0 means that k is 1."""
        if self.name == DPSGD:
            return self.sigma or 1.0
        return self.sigma


@dataclass(frozen=True, kw_only=True)
class ReleasedOutcome:
    """The results of runs, one entry per run, over all rows: those of training included.

    Attributes:
        accuracy: 1 - mean squared error; NaN for a run that overflowed.
        output_mean: mean output.
        output_spread: standard deviation of an output over the records, mean over the outputs.
        spreads: ``output_spread`` of the first run on some rows, by step.
    """

    accuracy: tuple[float, ...]
    output_mean: tuple[float, ...]
    output_spread: tuple[float, ...]
    spreads: tuple[tuple[int, float], ...]


def expanded(rows: torch.Tensor, seed: int, *, copies: Sequence[int] = (20, 4)) -> torch.Tensor:
    """Return float32 rows, each stage ``c`` times as many, divided by the maxima of their columns.

    A stage keeps its rows and appends rows drawn from them, every entry times ``1 + N(0, .02^2)``.
    """
    generator = torch.Generator().manual_seed(seed)
    for times in copies:
        drawn = torch.randint(len(rows), (len(rows) * (times - 1),), generator=generator)
        noise = torch.randn(len(drawn), rows.shape[1], generator=generator, dtype=rows.dtype)
        rows = torch.cat([rows, rows[drawn] * (1 + 0.02 * noise)])
    largest = rows.max(0).values
    return (rows / torch.where(largest > 0, largest, 1.0)).float()


class _Parameters:
    """Parameters of all runs in one tensor ``[R, P]``, and views of its parts."""

    def __init__(self, flat: torch.Tensor, users: int) -> None:
        self.flat = flat
        runs, code = len(flat), CODE
        sizes = [users * code * FEATURES, users * code, users * FEATURES * code, FEATURES]
        parts = torch.split(flat, sizes, 1)
        self.encoder = parts[0].view(runs, users, code, FEATURES)
        self.encoder_bias = parts[1].view(runs, users, code)
        self.decoder = parts[2].view(runs, users, FEATURES, code)
        self.decoder_bias = parts[3]

    @staticmethod
    def count(users: int) -> int:
        """Return the number of parameters of a run."""
        return users * CODE * (2 * FEATURES + 1) + FEATURES


def _initial(users: int, seeds: Sequence[int]) -> torch.Tensor:
    """Return weights and biases, uniform in +-1 / sqrt(number of a layer's inputs)."""
    inputs = torch.full((_Parameters.count(users),), float(FEATURES))
    inputs[users * CODE * (FEATURES + 1) :] = users * CODE
    drawn = [
        torch.rand(len(inputs), generator=torch.Generator().manual_seed(seed)) for seed in seeds
    ]
    return (2 * torch.stack(drawn) - 1) / inputs.sqrt()


class ReleasedTraining:
    """All runs of one method, as one batched computation.

    Args:
        method: the method.
        epsilons: epsilon of each run's single step, float64 ``[R]``.
        seeds: seed of each run: its first weights, its order of the rows and its noise.
        data: rows that each seed trains on, float32 ``[N, 14]``, in [0, 1].
    """

    def __init__(
        self,
        method: ReleasedMethod,
        epsilons: Sequence[float],
        seeds: Sequence[int],
        data: Callable[[int], torch.Tensor],
    ) -> None:
        self.method = method
        self.epsilon = torch.tensor(epsilons, dtype=torch.float32)[:, None]
        self.seeds = tuple(seeds)
        known = {seed: data(seed) for seed in dict.fromkeys(seeds)}
        self.rows = torch.stack(list(known.values()))
        self.place = torch.tensor([list(known).index(seed) for seed in seeds])
        self.steps = int(0.8 * self.rows.shape[1])
        self.generator = torch.Generator().manual_seed(1 + max(seeds))
        order = {
            seed: torch.randperm(
                self.rows.shape[1], generator=torch.Generator().manual_seed(1000 + seed)
            )[: self.steps]
            for seed in known
        }
        self.order = torch.stack([order[seed] for seed in seeds])
        self.now = _Parameters(_initial(method.users, seeds), method.users)
        self.gradient = _Parameters(torch.zeros_like(self.now.flat), method.users)
        self.moments = torch.zeros_like(self.now.flat), torch.zeros_like(self.now.flat)
        self.scale = self._gradient_scale() if method.name == DPSGD else None

    def run(self, on_step: Callable[[int], None] | None = None) -> ReleasedOutcome:
        """Train, and evaluate on all rows."""
        spreads = []
        for first in range(0, self.steps, BLOCK):
            some = min(BLOCK, self.steps - first)
            records = self.rows[self.place[:, None], self.order[:, first : first + some]]
            sensors, private = self._sensors(some), self._laplace(some)
            if first % (16 * BLOCK) == 0:
                spreads.append((first, float(self._outputs(0, self.rows[0][:2000]).std(0).mean())))
            for i in range(some):
                at = None if sensors is None else sensors[i]
                self._step(
                    first + i + 1, records[:, i], at, None if private is None else private[i]
                )
            if on_step is not None:
                on_step(first + some)
        return self._outcome(spreads)

    def _step(
        self,
        number: int,
        x: torch.Tensor,
        sensors: torch.Tensor | None,
        private: torch.Tensor | None,
    ) -> None:
        self._backward(x, sensors, private)
        if self.scale is not None:
            flat = self.gradient.flat
            flat.mul_((self.method.clip / (flat.norm(dim=1, keepdim=True) + TINY)).clamp_(max=1))
            if private is not None:
                flat.addcmul_(private, self.scale)
        self._adam(number)

    def _backward(
        self, x: torch.Tensor, sensors: torch.Tensor | None, private: torch.Tensor | None
    ) -> None:
        """Write the gradient of each run's record into ``self.gradient``."""
        method, now, to = self.method, self.now, self.gradient
        e = torch.sigmoid((now.encoder @ x[:, None, :, None])[..., 0] + now.encoder_bias)
        products = (now.decoder @ e[..., None])[..., 0]
        y = torch.sigmoid(products.sum(1) + now.decoder_bias)
        if method.name == NON_PRIVATE:
            noisy = x if sensors is None else x + sensors
            dy, de = (torch.sigmoid(y) - noisy) / FEATURES, torch.zeros_like(e)
            dz = None
        else:
            c = method.constant
            z = products + c * e.sum(2, keepdim=True)
            t = (y if method.target == OUTPUT else x)[:, None]
            k, slope = self._factor(e, sensors)
            n: torch.Tensor | float = 0.0
            if private is not None and self.scale is None:
                n = private * self._loss_scale(e, k)[:, None, None]
            linear, square = 0.5 - t, t / 2 - 0.25
            dz = k * linear + n + 2 * z * (k * square + n)
            dy = (k * (z * z / 2 - z)).sum(1)
            de = (now.decoder * dz[..., None]).sum(2) + c * dz.sum(2, keepdim=True)
            if slope is not None:
                de[:, 0] += (z * linear + z * z * square).sum((1, 2))[:, None] * slope
        through_y = method.target == OUTPUT or method.name == NON_PRIVATE
        da = dy * y * (1 - y) if through_y else torch.zeros_like(y)
        de += (now.decoder * da[:, None, :, None]).sum(2)
        torch.mul(da[:, None, :, None], e[:, :, None, :], out=to.decoder)
        if method.gradient == LOSS and dz is not None:
            to.decoder += dz[..., None] * e[:, :, None, :]
        to.decoder_bias.copy_(da)
        before = de * e * (1 - e)
        torch.mul(before[..., None], x[:, None, None, :], out=to.encoder)
        to.encoder_bias.copy_(before)

    def _factor(
        self, e: torch.Tensor, sensors: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ``k [R, 1, 1]`` and its derivative by the first encoder's code, or None.

        k is 1 without noise of the sensors, else ``sum_r exp(v_r) / (1 + (exp(v_r) - 1) e_1r)``
        with ``v = W_1 N``, ``N`` the noise of the sensors.
        """
        if sensors is None or not self.method.factor_sigma:
            return torch.ones(len(e), 1, 1), None
        v = (self.now.encoder[:, 0] @ sensors[..., None])[..., 0]
        code = e[:, 0]
        if self.method.name == FM:
            grown = v.clamp(-20, 20).exp()
            code = code.clamp(1e-6, 1 - 1e-6)
            factor = (grown / (1 + (grown - 1) * code)).sum(1).clamp(1e-6, 1e6)
            return factor[:, None, None], None
        grown = v.exp()
        parts = grown / (1 + (grown - 1) * code)
        return parts.sum(1)[:, None, None], -(grown - 1) * parts * parts / grown

    def _loss_scale(self, e: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Return the scale ``[R]`` of the noise in the loss: its terms over sqrt(2) epsilon."""
        shift = self.method.constant * e[:, 0].sum(1)
        of_constant = FEATURES * shift * (shift / 2 + 2)
        over = math.sqrt(2) * self.epsilon[:, 0]
        if self.method.constant_over_epsilon:
            return (1.5 * FEATURES * k[:, 0, 0] + of_constant) / over
        return 1.5 * FEATURES * k[:, 0, 0] / over + of_constant

    def _gradient_scale(self) -> torch.Tensor:
        """Return the scale ``[R, 1]`` of DP-SGD's noise; the clipping bound enters it twice."""
        factors = []
        for run, place in enumerate(self.place.tolist()):
            rows = self.rows[place][:: max(1, self.rows.shape[1] // 2000)]
            sensors = self.method.factor_sigma * torch.randn(rows.shape, generator=self.generator)
            code = torch.sigmoid(rows @ self.now.encoder[run, 0].T + self.now.encoder_bias[run, 0])
            grown = (sensors @ self.now.encoder[run, 0].T).exp()
            factors.append((grown / (1 + (grown - 1) * code)).sum(1).mean())
        mean = torch.stack(factors)[:, None]
        clip = self.method.clip
        return clip * (FEATURES * mean + 2 * FEATURES * clip) / (2 * self.epsilon)

    def _sensors(self, steps: int) -> torch.Tensor | None:
        sigma = self.method.factor_sigma
        if not sigma:
            return None
        shape = (steps, len(self.seeds), FEATURES)
        return sigma * torch.randn(shape, generator=self.generator)

    def _laplace(self, steps: int) -> torch.Tensor | None:
        """Return Laplace draws of scale 1 for the steps' losses or gradients."""
        if not self.method.noise or self.method.name == NON_PRIVATE:
            return None
        runs, users = len(self.seeds), self.method.users
        each = (users, FEATURES) if self.scale is None else (_Parameters.count(users),)
        two = torch.empty(2, steps, runs, *each).exponential_(generator=self.generator)
        return two[0] - two[1]

    def _adam(self, number: int) -> None:
        first, second = self.moments
        g = self.gradient.flat
        first.lerp_(g, 1 - BETAS[0])
        second.mul_(BETAS[1]).addcmul_(g, g, value=1 - BETAS[1])
        scale = second.sqrt().div_(math.sqrt(1 - BETAS[1] ** number)).add_(TINY)
        self.now.flat.addcdiv_(first, scale, value=-self.method.rate / (1 - BETAS[0] ** number))

    def _outputs(self, run: int, rows: torch.Tensor) -> torch.Tensor:
        """Return a run's outputs for these rows."""
        now = self.now
        codes = torch.sigmoid(
            torch.einsum("ukf,nf->unk", now.encoder[run], rows) + now.encoder_bias[run][:, None]
        )
        out = torch.einsum("uik,unk->ni", now.decoder[run], codes)
        return torch.sigmoid(out + now.decoder_bias[run])

    def _outcome(self, spreads: Sequence[tuple[int, float]]) -> ReleasedOutcome:
        accuracy, mean, spread = [], [], []
        for run, place in enumerate(self.place.tolist()):
            clean = self.rows[place]
            given = clean
            if self.method.sigma:
                noise = torch.randn(clean.shape, generator=self.generator)
                given = clean + self.method.sigma * noise
            out = self._outputs(run, given)
            accuracy.append(1 - float((out - clean).square().mean()))
            mean.append(float(out.mean()))
            spread.append(float(out.std(0).mean()))
        return ReleasedOutcome(
            accuracy=tuple(accuracy),
            output_mean=tuple(mean),
            output_spread=tuple(spread),
            spreads=tuple(spreads),
        )


def constant_accuracy(rows: torch.Tensor, value: torch.Tensor | float) -> float:
    """Return the accuracy of outputs that are the same for every row."""
    return 1 - float((rows - value).double().square().mean())

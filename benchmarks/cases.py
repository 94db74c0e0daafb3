"""Cases shared by the tests and the benchmarks.

A case makes inputs, runs the op on a backend, runs the best torch formulation of the same work with
preallocated buffers, and compares the op with its reference. Tests use the small ones, benchmarks
the large ones; a benchmark verifies its case before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dpkern._dispatch import Cost
from dpkern.mechanisms import RandomizedResponse
from dpkern.ops import clip, coef, noise, symbols, update
from dpkern.rng import Key, Purpose
from dpkern.testing import KEY, assert_close


@dataclass(frozen=True)
class Work:
    """One case made concrete: callables without arguments that reuse their buffers.

    Attributes:
        ours: the op on the backend asked for.
        torch: the best torch formulation of the same work, or None where torch has none.
        cost: what the op says one call costs.
    """

    ours: Callable[[], Any]
    torch: Callable[[], Any] | None
    cost: Cost


def _random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)


@dataclass(frozen=True, kw_only=True)
class NoiseCase:
    """Noise added to ``count`` coordinates; beside ``Tensor.normal_``, which adds nothing."""

    count: int
    dtype: torch.dtype = torch.int32
    distribution: str = "gaussian"
    rounds: int = 20

    @property
    def name(self) -> str:
        """A readable identifier."""
        law = f"{self.distribution}{self.rounds}"
        return f"noise-{law}-{str(self.dtype).removeprefix('torch.')}-{self.count}"

    def _arguments(self) -> dict[str, Any]:
        key = Key.from_unsafe_seed(0, self.rounds)
        purpose = Purpose.NOISE if self.distribution == "gaussian" else Purpose.LAPLACE
        given: dict[str, Any] = {
            "stream": key.stream(purpose, 1),
            "distribution": self.distribution,
            "position": 512,
        }
        if self.dtype in noise.FLOATS:
            given |= {"scale": 1.5, "rounding": key.stream(Purpose.ROUNDING, 1)}
        return given

    def _input(self) -> torch.Tensor:
        return (_random((self.count,), torch.float32, 1) * 1000).to(self.dtype)

    def work(self, backend: str | None = None) -> Work:
        """Buffers and callables for timing."""
        x, given = self._input(), self._arguments()
        z = torch.empty(self.count)
        law = z.normal_ if self.distribution == "gaussian" else None
        return Work(
            ours=lambda: noise.add_noise(x, backend=backend, **given),
            torch=law,
            cost=noise.add_noise.cost(x, **given),
        )

    def verify(self, backend: str | None = None) -> None:
        """The backend gives the reference's bits.

        Raises:
            AssertionError: it does not.
        """
        x, given = self._input(), self._arguments()
        got = noise.add_noise(x.clone(), backend=backend, **given)
        want = noise.add_noise(x.clone(), backend="reference", **given)
        if not torch.equal(got, want):
            raise AssertionError(f"{self.name}: {int((got != want).sum())} values differ")


@dataclass(frozen=True, kw_only=True)
class ClipCase:
    """Norms and clipped sum of ``batch`` gradients; beside ``vector_norm`` and ``c @ g``."""

    batch: int
    columns: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    style: str = "flat"
    arithmetic: str = "float"
    p: int = 2

    @property
    def name(self) -> str:
        """A readable identifier."""
        shape = "+".join(str(c) for c in self.columns)
        kind = f"{self.style}-{self.arithmetic}-l{self.p}"
        return f"clip-{kind}-{str(self.dtype).removeprefix('torch.')}-{self.batch}x{shape}"

    def _gradients(self) -> list[torch.Tensor]:
        return [_random((self.batch, c), self.dtype, c) for c in self.columns]

    def _arguments(self) -> dict[str, Any]:
        n = len(self.columns)
        bound, unit = 1.5, 1.5 * 2.0**-20
        each = self.style == "per_layer"
        given: dict[str, Any] = {"style": self.style, "arithmetic": self.arithmetic, "p": self.p}
        given["max_grad_norm"] = [bound] * n if each else bound
        if self.arithmetic == "exact":
            given["unit"] = [unit] * n if each else unit
        return given

    def work(self, backend: str | None = None) -> Work:
        """Buffers and callables for timing."""
        grads, given = self._gradients(), self._arguments()
        sums = list(clip.clip_sum(grads, backend=backend, **given).sums)
        comparable = len(grads) == 1 and self.style == "flat" and self.p == 2
        norms = torch.empty(self.batch)
        factors = torch.empty(self.batch)
        total = torch.empty(self.columns[0])

        def formulation() -> None:
            torch.linalg.vector_norm(grads[0], dim=1, out=norms)
            torch.div(1.5, norms, out=factors).clamp_(max=1.0)
            torch.mv(grads[0].t(), factors, out=total)

        return Work(
            # The accumulators start at zero each time, as torch's formulation does.
            ours=lambda: clip.clip_sum(
                grads, out=[s.zero_() for s in sums], backend=backend, **given
            ),
            torch=formulation if comparable else None,
            cost=clip.clip_sum.cost(grads, **given),
        )

    def verify(self, backend: str | None = None) -> None:
        """Norms and sums agree with the float64 reference; exact sums to the last bit.

        Raises:
            AssertionError: they do not.
        """
        grads, given = self._gradients(), self._arguments()
        got = clip.clip_sum(grads, backend=backend, **given)
        wide = grads if self.arithmetic == "exact" else [g.double() for g in grads]
        want = clip.clip_sum(wide, backend="reference", **given)
        assert_close(f"{self.name} norms", got.norms, want.norms, 1e-12)
        tolerance = {torch.float64: 1e-12}.get(self.dtype, 1e-5)
        for i, (a, b) in enumerate(zip(got.sums, want.sums, strict=True)):
            exact = self.arithmetic == "exact"
            assert_close(f"{self.name} sums[{i}]", a, b, 0.0 if exact else tolerance)


RULES: dict[str, update.Rule] = {
    "sgd": update.SGD(lr=0.1),
    "momentum": update.SGD(lr=0.1, momentum=0.9, dampening=0.1, weight_decay=1e-3),
    "nesterov": update.SGD(lr=0.1, momentum=0.9, nesterov=True),
    "adam": update.Adam(lr=1e-3, weight_decay=1e-3),
    "adamw": update.AdamW(lr=1e-3),
}


@dataclass(frozen=True, kw_only=True)
class UpdateCase:
    """Noise, division and an optimizer step; beside ``normal_``, ``add_`` and torch's own rule."""

    sizes: tuple[int, ...]
    rule: str = "sgd"
    sums: torch.dtype = torch.int32
    dtype: torch.dtype = torch.float32
    noise: bool = True

    @property
    def name(self) -> str:
        """A readable identifier."""
        kind = str(self.sums).removeprefix("torch.") if self.noise else "no-noise"
        where = "" if self.dtype is torch.float32 else "-float64"
        alike = len(set(self.sizes)) == 1 and len(self.sizes) > 1
        shape = f"{len(self.sizes)}x{self.sizes[0]}" if alike else "+".join(map(str, self.sizes))
        return f"update-{self.rule}-{kind}{where}-{shape}"

    def _tensors(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        params = [_random((s,), self.dtype, s) for s in self.sizes]
        spread = 1e5 if self.sums in noise.INTEGERS else 1.0
        sums = [(_random((s,), torch.float64, s + 1) * spread).to(self.sums) for s in self.sizes]
        return params, sums

    def _noise(self) -> update.Noise | None:
        if not self.noise:
            return None
        positions, following = [], 0
        for size in self.sizes:
            positions.append(following)
            following += -(-size // 512) * 512
        return update.Noise(
            distribution="gaussian",
            scales=tuple(1.0 + i for i in range(len(self.sizes))),
            stream=KEY.stream(Purpose.NOISE, 1),
            positions=tuple(positions),
            rounding=KEY.stream(Purpose.ROUNDING, 1),
        )

    def work(self, backend: str | None = None) -> Work:
        """Buffers and callables for timing."""
        params, sums = self._tensors()
        rule, drawn = RULES[self.rule], self._noise()
        state = rule.init(params)
        given: dict[str, Any] = {
            "rule": rule,
            "state": state,
            "noise": drawn,
            "gradient_scale": 1 / 64,
        }
        return Work(
            ours=lambda: update.step(params, sums, backend=backend, **given),
            torch=self._formulation(),
            cost=update.step.cost(params, sums, **given),
        )

    def _formulation(self) -> Callable[[], None]:
        """Preallocated: one buffer for the noise, torch's fused optimizer for the rest."""
        params, _ = self._tensors()
        leaves = [torch.nn.Parameter(p) for p in params]
        sums = [_random((s,), self.dtype, s + 1) for s in self.sizes]
        buffers = [torch.empty_like(p) for p in params]
        rule = RULES[self.rule]

        def noisy() -> None:
            for z, g in zip(buffers, sums, strict=True):
                if self.noise:
                    z.normal_().add_(g)
                else:
                    z.copy_(g)

        if rule == update.SGD(lr=rule.lr):

            def plain() -> None:
                noisy()
                for p, z in zip(params, buffers, strict=True):
                    p.add_(z, alpha=-rule.lr / 64)

            return plain
        optimizer = torch_optimizer(rule, leaves)
        for leaf, z in zip(leaves, buffers, strict=True):
            leaf.grad = z

        def stepped() -> None:
            noisy()
            for z in buffers:
                z.mul_(1 / 64)
            optimizer.step()

        return stepped

    def verify(self, backend: str | None = None) -> None:
        """Two steps agree with the reference.

        Raises:
            AssertionError: they do not.
        """
        results = []
        for runner in (backend, "reference"):
            params, sums = self._tensors()
            rule = RULES[self.rule]
            state = rule.init(params)
            for _ in range(2):
                update.step(
                    params,
                    sums,
                    rule=rule,
                    state=state,
                    gradient_scale=1 / 64,
                    noise=self._noise(),
                    backend=runner,
                )
            results.append((params, state))
        tolerance = 1e-6 if self.dtype is torch.float32 else 1e-14
        for i, (a, b) in enumerate(zip(results[0][0], results[1][0], strict=True)):
            assert_close(f"{self.name} params[{i}]", a, b, tolerance)


def torch_optimizer(rule: update.Rule, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """torch's optimizer of the same meaning, in its fused form."""
    if isinstance(rule, update.SGD):
        return torch.optim.SGD(
            params,
            lr=rule.lr,
            momentum=rule.momentum,
            dampening=rule.dampening,
            nesterov=rule.nesterov,
            weight_decay=rule.weight_decay,
            fused=True,
        )
    kind = torch.optim.AdamW if rule.decoupled else torch.optim.Adam
    return kind(
        params,
        lr=rule.lr,
        betas=rule.betas,
        eps=rule.eps,
        weight_decay=rule.weight_decay,
        fused=True,
    )


@dataclass(frozen=True, kw_only=True)
class SymbolCase:
    """Randomized response on ``count`` symbols; beside torch's coins, whose odds are rounded."""

    count: int
    categories: int = 2
    dtype: torch.dtype = torch.uint8

    @property
    def name(self) -> str:
        """A readable identifier."""
        kind = str(self.dtype).removeprefix("torch.")
        return f"symbols-{self.categories}-{kind}-{self.count}"

    def _input(self) -> torch.Tensor:
        return (torch.arange(self.count) % self.categories).to(self.dtype)

    def _arguments(self) -> dict[str, Any]:
        mechanism = RandomizedResponse(epsilon=1.0, categories=self.categories)
        stream = Key.from_unsafe_seed(0).stream(Purpose.SYMBOLS, 1)
        return {"stream": stream, "keep": mechanism.keep, "categories": self.categories}

    def work(self, backend: str | None = None) -> Work:
        """Buffers and callables for timing."""
        x, given = self._input(), self._arguments()
        u, lie, out = torch.empty(self.count), torch.empty_like(x), torch.empty_like(x)
        truth = given["keep"] / 2**64

        def formulation() -> None:
            lie.random_(1, self.categories)
            torch.where(u.uniform_() < truth, x, (x + lie) % self.categories, out=out)

        return Work(
            ours=lambda: symbols.randomize(x, backend=backend, **given),
            torch=formulation,
            cost=symbols.randomize.cost(x, **given),
        )

    def verify(self, backend: str | None = None) -> None:
        """The same symbols as the reference.

        Raises:
            AssertionError: they are not.
        """
        x, given = self._input(), self._arguments()
        got = symbols.randomize(x, position=13, backend=backend, **given)
        wanted = symbols.randomize(x, position=13, backend="reference", **given)
        assert_close(self.name, got.double(), wanted.double(), 0.0)


@dataclass(frozen=True, kw_only=True)
class CoefCase:
    """Noisy coefficients of a polynomial loss; beside torch's exponential draws.

    Attributes:
        rows, columns: of the targets; each has two coefficients.
        loss: evaluate loss and slope, nothing else is written; else the coefficients.
        ahead: the noise was made before, so that the memory sets the pace.
    """

    rows: int
    columns: int
    form: str = "printed"
    loss: bool = False
    ahead: bool = False
    scaled: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        """A readable identifier."""
        kind = f"{'loss' if self.loss else 'perturb'}-{self.form}"
        kind += ("-ahead" if self.ahead else "") + ("-scaled" if self.scaled else "")
        dtype = str(self.dtype).removeprefix("torch.")
        return f"coef-{kind}-{dtype}-{self.rows}x{self.columns}"

    def _tensors(self) -> tuple[torch.Tensor, ...]:
        """Logits (of the loss only) and targets."""
        shape = (self.rows, self.columns)
        x = torch.rand(shape, generator=torch.Generator().manual_seed(1), dtype=self.dtype)
        return (_random(shape, self.dtype, 2), x) if self.loss else (x,)

    def _arguments(self) -> dict[str, Any]:
        key, first = Key.from_unsafe_seed(0), 100
        stream, rounding = key.stream(Purpose.LAPLACE, 1), key.stream(Purpose.ROUNDING, 1)
        draws = None
        if self.ahead:
            n = self.rows * self.columns
            place = {"position": first, "count": coef.quadratic_position(first, n) + n - first}
            values = noise.lattice_draws(stream, distribution="laplace", **place)
            draws = coef.Draws(first, values, noise.rounding_bits(rounding, **place))
        scale = torch.linspace(0.5, 2, self.rows) if self.scaled else 1.5
        given = {"scale": scale, "stream": stream, "rounding": rounding, "position": first}
        return {"form": self.form, "noise": coef.Noise(draws=draws, **given)}

    def _op(self) -> Any:
        return coef.quadratic if self.loss else coef.perturb

    def work(self, backend: str | None = None) -> Work:
        """Buffers and callables for timing."""
        tensors, given = self._tensors(), self._arguments()
        x, out = tensors[-1], self._op()(*tensors, backend=backend, **given)
        a1, a2, u, w = (torch.empty_like(x) for _ in range(4))

        def coefficients() -> None:
            torch.sub(0.5, x, out=a1)
            torch.mul(x, 0.5, out=a2).sub_(0.25)
            if self.ahead:
                a1.add_(u)
                a2.add_(w)
                return
            for values in (a1, a2):  # the difference of two exponential variables is Laplace's
                values.add_(u.exponential_()).sub_(u.exponential_())

        def evaluated() -> None:
            coefficients()
            z = tensors[0]
            torch.addcmul(a1, a2, z, out=w).mul_(z).sum(1)
            torch.addcmul(a1, a2, z, value=2, out=w)

        return Work(
            ours=lambda: self._op()(*tensors, out=out, backend=backend, **given),
            torch=evaluated if self.loss else coefficients,
            cost=self._op().cost(*tensors, **given),
        )

    def verify(self, backend: str | None = None) -> None:
        """The backend gives the reference's bits.

        Raises:
            AssertionError: it does not.
        """
        tensors, given = self._tensors(), self._arguments()
        got = self._op()(*tensors, backend=backend, **given)
        want = self._op()(*tensors, backend="reference", **given)
        for mine, theirs in zip(got, want, strict=True):
            if not torch.equal(mine, theirs):
                raise AssertionError(f"{self.name}: {int((mine != theirs).sum())} values differ")


@dataclass(frozen=True, kw_only=True)
class FeatureCase:
    """The loss whose H + H^2 noisy coefficients of each class are never written.

    Attributes:
        records, classes, width: of the targets and the hidden layer.
    """

    records: int
    classes: int
    width: int
    scaled: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        """A readable identifier."""
        dtype = str(self.dtype).removeprefix("torch.") + ("-scaled" if self.scaled else "")
        return f"coef-expanded-{dtype}-{self.records}x{self.classes}x{self.width}"

    def _tensors(self) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(1)
        shape = (self.records, self.width)
        hidden = torch.rand(shape, generator=generator, dtype=self.dtype)
        labels = torch.randint(self.classes, (self.records,), generator=generator)
        one_hot = torch.nn.functional.one_hot(labels, self.classes).to(self.dtype)
        return hidden, one_hot, _random((self.classes, self.width), self.dtype, 2)

    def _noise(self) -> coef.Noise:
        key = Key.from_unsafe_seed(0)
        scale = torch.linspace(0.5, 2, self.records) if self.scaled else 1.5
        given = {"stream": key.stream(Purpose.LAPLACE, 1), "position": 100}
        return coef.Noise(scale=scale, rounding=key.stream(Purpose.ROUNDING, 1), **given)

    def work(self, backend: str | None = None) -> Work:
        """Buffers and callables for timing."""
        (hidden, targets, weights), noised = self._tensors(), self._noise()
        out = coef.expanded(hidden, targets, weights, noise=noised, backend=backend)
        linear = targets.new_empty(*targets.shape, self.width)
        quadratic = linear.new_empty(*linear.shape, self.width)
        u, v = torch.empty_like(linear), torch.empty_like(quadratic)

        def evaluated() -> None:
            torch.mul((0.5 - targets)[:, :, None], hidden[:, None], out=linear)
            quadratic.copy_((hidden[:, :, None] * (hidden / 8)[:, None])[:, None])
            for values, room in ((linear, u), (quadratic, v)):
                values.add_(room.exponential_()).sub_(room.exponential_())
            rows = linear + torch.einsum("bmeg,mg->bme", quadratic, weights)
            torch.einsum("bme,me->b", rows, weights)
            (rows + torch.einsum("bmeg,me->bmg", quadratic, weights)).sum(0)
            (0.5 - targets + hidden @ weights.t() / 4) @ weights

        return Work(
            ours=lambda: coef.expanded(
                hidden, targets, weights, noise=noised, out=out, backend=backend
            ),
            torch=evaluated,
            cost=coef.expanded.cost(hidden, targets, weights, noise=noised),
        )

    def verify(self, backend: str | None = None) -> None:
        """The backend gives the reference's bits.

        Raises:
            AssertionError: it does not.
        """
        tensors, noised = self._tensors(), self._noise()
        got = coef.expanded(*tensors, noise=noised, backend=backend)
        want = coef.expanded(*tensors, noise=noised, backend="reference")
        for mine, theirs in zip(got, want, strict=True):
            if not torch.equal(mine, theirs):
                raise AssertionError(f"{self.name}: {int((mine != theirs).sum())} values differ")


Case = NoiseCase | ClipCase | UpdateCase | SymbolCase | CoefCase | FeatureCase

_F32, _F64, _BF16 = torch.float32, torch.float64, torch.bfloat16
_I32, _I64 = torch.int32, torch.int64

SMALL_CASES: tuple[Case, ...] = (
    *(
        NoiseCase(count=count, dtype=dtype, distribution=law)
        for law in ("gaussian", "laplace")
        for dtype in (_I32, _I64, _F32, _F64)
        for count in (0, 1, 511, 5000)
    ),
    *(NoiseCase(count=3000, rounds=rounds) for rounds in (12, 8)),
    *(
        ClipCase(batch=7, columns=columns, dtype=dtype, style=style, arithmetic=arithmetic, p=p)
        for columns in ((33,), (5000, 1, 70))
        for dtype in (_F32, _F64, _BF16)
        for style in clip.STYLES
        for arithmetic in clip.ARITHMETIC
        for p in (1, 2)
    ),
    ClipCase(batch=0, columns=(10,)),
    ClipCase(batch=1, columns=(1,), arithmetic="exact"),
    ClipCase(batch=37, columns=(9000, 31)),
    ClipCase(batch=37, columns=(9000, 31), arithmetic="exact"),
    *(
        UpdateCase(sizes=(1025, 1), rule=rule, sums=sums)
        for rule in RULES
        for sums in (_I32, _I64, _F32)
    ),
    *(UpdateCase(sizes=(1000, 77), rule=rule, sums=_F64, dtype=_F64) for rule in RULES),
    *(UpdateCase(sizes=(1000, 77), rule=rule, sums=_F32, noise=False) for rule in RULES),
    SymbolCase(count=3000),
    SymbolCase(count=3000, categories=10, dtype=_I64),
    *(
        CoefCase(rows=9, columns=170, form=form, loss=loss, scaled=loss, dtype=dtype)
        for form in coef.FORMS
        for loss in (False, True)
        for dtype in (_F32, _F64)
    ),
    *(
        FeatureCase(records=18, classes=3, width=19, scaled=scaled, dtype=dtype)
        for scaled, dtype in ((False, _F32), (True, _F64))
    ),
)

LARGE_CASES: tuple[Case, ...] = (
    *(
        NoiseCase(count=1 << 20, dtype=dtype, rounds=rounds)
        for dtype in (_I32, _F32)
        for rounds in (20, 12, 8)
    ),
    NoiseCase(count=1 << 20, distribution="laplace"),
    NoiseCase(count=1 << 14),
    *(
        ClipCase(batch=batch, columns=(columns,), arithmetic=arithmetic)
        for batch, columns in ((256, 100_000), (64, 1_000_000), (256, 10_000))
        for arithmetic in clip.ARITHMETIC
    ),
    *(UpdateCase(sizes=(10_000_000,), rule="sgd", sums=sums) for sums in (_I32, _F32)),
    *(UpdateCase(sizes=(10_000_000,), rule="adam", sums=sums) for sums in (_I32, _F32)),
    UpdateCase(sizes=(10_000_000,), rule="adam", sums=_F32, noise=False),
    UpdateCase(sizes=(1000,) * 1000, rule="momentum", sums=_I32),
    SymbolCase(count=4_000_000),
    SymbolCase(count=4_000_000, categories=10),
    # 10^7 coefficients.
    *(
        CoefCase(rows=5000, columns=1000, loss=loss, ahead=ahead)
        for loss in (False, True)
        for ahead in (True, False)
    ),
    # A batch of AdLM's on MNIST: 11.7 million coefficients.
    FeatureCase(records=1800, classes=10, width=25),
)

"""Private projected SGD: projections, the notes' noise, its certificate, and its utility bound."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dpkern import DPStep
from dpkern.base.errors import InvalidInput
from dpkern.ops import testing, update
from dpkern.ops.update import Ball, Box, Projection, Simplex
from dpkern.privacy import accounting
from dpkern.privacy.mechanisms import DPSGD, ProjectedSGD
from dpkern.privacy.theory import pnsgd
from tests.ops.backends.every_backend import every_backend

SETS: list[Projection] = [Ball(0.7), Box(-0.2, 0.5), Simplex(), Simplex(3.0)]


def inside(x: torch.Tensor, onto: Projection, slack: float = 1e-9) -> bool:
    if isinstance(onto, Ball):
        return float(x.norm()) <= onto.radius + slack
    if isinstance(onto, Box):
        return bool(((x >= onto.low - slack) & (x <= onto.high + slack)).all())
    return bool((x >= -slack).all()) and abs(float(x.sum()) - onto.total) <= 1e-6


def random_point(onto: Projection, size: int, generator: torch.Generator) -> torch.Tensor:
    x = torch.randn(size, generator=generator, dtype=torch.float64)
    if isinstance(onto, Ball):
        share = torch.rand(1, generator=generator, dtype=torch.float64)
        return x / x.norm() * onto.radius * share ** (1 / size)
    if isinstance(onto, Box):
        return onto.low + (onto.high - onto.low) * torch.rand(size, generator=generator).double()
    falling = torch.rand(size, generator=generator, dtype=torch.float64).log().neg()
    return onto.total * falling / falling.sum()


@pytest.mark.parametrize("onto", SETS, ids=str)
@pytest.mark.parametrize("far", [0.01, 1.0, 100.0])
def test_projections_are_the_nearest_points(onto: Projection, far: float) -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (1, 2, 9):
        x = far * torch.randn(size, generator=generator, dtype=torch.float64)
        params = [x[: size // 2].clone(), x[size // 2 :].clone()]
        update.project(params, onto)
        y = torch.cat(params)
        assert inside(y, onto)
        # Nearest in a convex set: no point of it lies beyond the hyperplane through y.
        for _ in range(200):
            z = random_point(onto, size, generator)
            assert inside(z, onto)
            assert float((x - y) @ (z - y)) <= 1e-9 * (1 + far * float((z - y).norm()))
        again = [p.clone() for p in params]
        update.project(again, onto)
        assert torch.allclose(torch.cat(again), y, atol=1e-12)


@every_backend
@pytest.mark.parametrize("onto", [*SETS, Ball(1e3)], ids=str)
@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
@pytest.mark.usefixtures("one_thread")
def test_projections_are_those_of_one_vector(backend: str, onto: Projection, bad: float) -> None:
    if isinstance(onto, Simplex) and math.isinf(bad):
        return  # no point is the nearest
    generator = torch.Generator().manual_seed(3)
    start = [torch.randn(n, generator=generator) for n in ((3, 40), (), (0,), (5000,))]
    start[1].fill_(bad)
    mine = [part.clone() for part in start]
    update.project(mine, onto, backend=backend)
    whole = torch.cat([part.double().flatten() for part in start])
    if isinstance(onto, Ball):
        norm = float(whole.norm())
        want = whole if norm <= onto.radius else whole * (onto.radius / norm)
    elif isinstance(onto, Box):
        want = whole.clamp(onto.low, onto.high)
    else:
        want = (whole - _threshold(whole, onto.total)).clamp(min=0)
    got = torch.cat([part.flatten() for part in mine])
    assert torch.equal(got.isnan(), want.isnan())
    testing.assert_close("point", got.nan_to_num(), want.nan_to_num(), 1e-6)
    if isinstance(onto, Ball) and not bad:
        assert torch.equal(got, want.float())


def _threshold(whole: torch.Tensor, total: float) -> float:
    """By halving; NaN and inf leave none."""
    low, high = float(whole.min()) - total, float(whole.max())
    if not math.isfinite(low + high):
        return math.nan
    for _ in range(200):
        middle = (low + high) / 2
        above = float((whole - middle).clamp(min=0).sum()) > total
        low, high = (middle, high) if above else (low, middle)
    return low


def test_threads_change_no_bit() -> None:
    start = torch.randn(300_000, generator=torch.Generator().manual_seed(4))
    for onto in (Ball(3.0), Simplex(50.0)):
        results = []
        for count in (1, 2):
            params = [start[:7].clone(), start[7:].clone()]
            with testing.threads(count):
                update.project(params, onto)
            results.append(torch.cat(params))
        assert torch.equal(*results)


def test_what_is_inside_keeps_its_bits() -> None:
    x = torch.tensor([0.1, -0.1, 0.3])
    for onto in (Ball(1.0), Box(-1.0, 1.0)):
        params = [x.clone()]
        update.project(params, onto)
        assert torch.equal(params[0], x)


@pytest.mark.parametrize("onto", SETS, ids=str)
def test_diameters(onto: Projection) -> None:
    generator = torch.Generator().manual_seed(1)
    points = [random_point(onto, 4, generator) for _ in range(50)]
    furthest = max(float((p - q).norm()) for p in points for q in points)
    assert 0.3 * onto.diameter(4) < furthest <= onto.diameter(4)


def test_what_projections_refuse() -> None:
    for call, name in (
        (lambda: update.project([], Ball(1.0)), "params"),
        (lambda: update.project([torch.zeros(2, dtype=torch.int64)], Ball(1.0)), "params"),
        (lambda: update.project([torch.zeros(2)], 1.0), "onto"),
        (lambda: Ball(0.0), "radius"),
        (lambda: Box(1.0, 1.0), "low"),
        (lambda: Simplex(-1.0), "total"),
    ):
        with pytest.raises(InvalidInput, match=name):
            call()
    with pytest.raises(InvalidInput, match="a number below"):
        Box(2.0, 1.0)


@pytest.mark.parametrize(("n", "epsilon", "certified"), [(1000, 1.0, 0.0473), (1000, 4.0, 0.2211),
                                                         (100, 1.0, 0.0508)])  # fmt: skip
def test_the_notes_noise_is_far_more_than_needed(n: int, epsilon: float, certified: float) -> None:
    mechanism = ProjectedSGD.from_budget(n, 1.0, epsilon, 1e-5, mode="published")
    assert mechanism.sigma == pytest.approx(pnsgd.pnsgd_sigma(n, 1.0, epsilon, 1e-5))
    found = accounting.certify(
        mechanism.plan([(10,)]), sample_rate=1 / n, steps=n * n, delta=1e-5, sampling="fixed",
        dataset_size=n,
    )  # fmt: skip
    assert found.relation == "replace_one"
    assert found.epsilon == pytest.approx(certified, rel=2e-3)
    claim = {"steps": n * n, "sample_rate": 1 / n, "delta": 1e-5, "dataset_size": n}
    assert mechanism.claim(**claim) == pytest.approx(epsilon)
    assert [note.id for note in mechanism.notes] == ["N1", "N2"]


def test_rules_of_the_claim() -> None:
    claim = {"steps": 10**6, "sample_rate": 1e-3, "delta": 1e-5, "dataset_size": 1000}
    for rule, wanted in (("full_advanced", 1.04097), ("exact_amplification", 0.53749)):
        mechanism = ProjectedSGD.from_budget(1000, 1.0, 1.0, 1e-5, mode="published", rule=rule)
        assert mechanism.claim(**claim) == pytest.approx(wanted, rel=1e-5)


def test_the_plan_is_one_clipped_gradient() -> None:
    mechanism = ProjectedSGD(n=50, noise_multiplier=20.0, max_grad_norm=0.4)
    plan = mechanism.plan([(3,), (2, 2)])
    wanted = DPSGD(noise_multiplier=20.0, max_grad_norm=0.4).plan([(3,), (2, 2)])
    assert (plan.spec, plan.blocks) == (wanted.spec, wanted.blocks)
    assert plan.neighbouring == "replace_one"
    assert mechanism.sigma == pytest.approx(20 * 50 * 0.4)


def test_step_sizes_of_the_bound() -> None:
    mechanism = ProjectedSGD(n=50, noise_multiplier=20.0, max_grad_norm=2.0, projection=Ball(1.0))
    bound = math.sqrt(50**2 * 2.0**2 + 7 * mechanism.sigma**2)
    assert mechanism.step_size(9, 7) == pytest.approx(2 / (bound * 3))
    constant = ProjectedSGD(n=50, noise_multiplier=20.0, steps="constant", learning_rate=0.1)
    assert constant.step_size(9, 7) == 0.1
    with pytest.raises(InvalidInput, match="diameter"):
        ProjectedSGD(n=50, noise_multiplier=20.0).step_size(1, 7)
    with pytest.raises(InvalidInput, match="learning_rate"):
        ProjectedSGD(n=50, noise_multiplier=20.0, steps="constant")


def losses(kind: str, n: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    x /= x.norm(dim=1, keepdim=True)
    y = (x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)).sign()

    def logistic(theta: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.softplus(-y * (x @ theta)).sum()

    def squares(theta: torch.Tensor) -> torch.Tensor:
        # |x| = |y| = 1 and |theta| <= 1: the gradient (x.theta - y) x / 2 has norm at most 1.
        return ((x @ theta - y) ** 2 / 4).sum()

    return {"logistic": logistic, "squares": squares}[kind], x, y


@pytest.mark.parametrize("kind", ["logistic", "squares"])
def test_measured_excess_risk_is_below_the_bound(kind: str) -> None:
    n, steps = 100, 500
    loss, x, y = losses(kind, n)
    mechanism = ProjectedSGD.from_budget(n, 1.0, 1.0, 1e-5, projection=Ball(1.0))
    theta = torch.zeros(3, dtype=torch.float64)
    rule = update.SGD(lr=1.0)
    step = DPStep(
        mechanism, [theta], expected_batch_size=1, sample_rate=1 / n, sampling="fixed",
        dataset_size=n, unsafe_seed=1, optimizer=rule,
    )  # fmt: skip
    picks = torch.randint(0, n, (steps,), generator=torch.Generator().manual_seed(0)).tolist()
    for t, i in enumerate(picks, start=1):
        margin = x[i] @ theta
        slope = -y[i] * torch.sigmoid(-y[i] * margin) if kind == "logistic" else (margin - y[i]) / 2
        step.optimizer = update.SGD(lr=n * mechanism.step_size(t, 3))
        step.add(per_sample=[(slope * x[i])[None]])
        step.finish()
        mechanism.project([theta])
        assert float(theta.norm()) <= 1 + 1e-12
    best = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    for _ in range(300):
        (gradient,) = torch.autograd.grad(loss(best), best)
        with torch.no_grad():
            best -= 0.05 * gradient
            update.project([best], Ball(1.0))
    best = best.detach()
    excess = float(loss(theta) - loss(best))
    bound = pnsgd.utility_bound(n, 1.0, 3, mechanism.sigma, 2.0, steps=steps)
    assert 0 <= excess < bound
    assert excess < float(loss(-best) - loss(best))

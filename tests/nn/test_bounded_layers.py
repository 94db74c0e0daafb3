"""Bounded normalisations and the polynomial loss that needs them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkern import PrivacyEngine
from dpkern.base.errors import InvalidInput, UnsupportedModule
from dpkern.nn import BatchMinMax, BoundedResponseNorm, normalise, polynomial
from dpkern.papers.adlm import loss as adlm_loss
from dpkern.privacy.theory import adlm

pytestmark = pytest.mark.usefixtures("one_thread")


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(h: Tensor, q: float, size: int, alpha: float, beta: float) -> Tensor:
    """(22) as printed, map by map."""
    maps, out = h.shape[1], torch.empty_like(h)
    for k in range(maps):
        first, last = max(0, k - size // 2), min(maps - 1, k + size // 2)
        squares = sum(h[:, m] ** 2 for m in range(first, last + 1))
        out[:, k] = h[:, k] / torch.maximum(h[:, k], (q + alpha * squares) ** beta)
    return out


def test_v31_response_norm_is_bounded_and_as_printed() -> None:
    # Small and huge activations: both sides of the maximum.
    h = (drawn(3, 9, 4, 2) * torch.logspace(-2, 4, 9).double()[:, None, None]).relu()
    found = BoundedResponseNorm()(h)
    assert torch.allclose(found, by_hand(h, 2, 5, 1e-4, 0.75), rtol=1e-12)
    assert 0 <= float(found.min()) <= float(found.max()) == 1
    other = {"q": 1.5, "size": 4, "alpha": 0.3, "beta": 0.4}
    assert torch.allclose(BoundedResponseNorm(**other)(h), by_hand(h, 1.5, 4, 0.3, 0.4))


def test_response_norm_is_torchs_where_the_bound_is_not_reached() -> None:
    h = drawn(2, 7, 3).relu() / 10
    theirs = F.local_response_norm(h, 5, alpha=5 * 0.3, beta=0.75, k=2.0)
    assert torch.allclose(normalise.bounded_response_norm(h, alpha=0.3), theirs, rtol=1e-12)


def test_gradients_of_the_normalisations() -> None:
    layer = BoundedResponseNorm(alpha=0.3)
    h = (drawn(2, 6, 2).abs() * 3 + 0.1).requires_grad_()
    assert torch.autograd.gradcheck(layer, (h,))
    # Forward remembers ranges, without influence on the result.
    assert torch.autograd.gradcheck(BatchMinMax(3).double(), (drawn(5, 3).requires_grad_(),))
    zero = torch.zeros(2, 6, 2, requires_grad=True)
    for each, x in ((layer, zero), (BatchMinMax(12), zero.flatten(1))):
        (gradient,) = torch.autograd.grad(each(x).sum(), zero, retain_graph=True)
        assert bool(gradient.isfinite().all())


def test_batch_range_mixes_samples_in_training_only() -> None:
    layer, h = BatchMinMax(3).double(), drawn(4, 3)
    h[:, 2] = 7
    found = layer(h)
    for unit in range(2):
        column = h[:, unit]
        expected = (column - column.min()) / (column.max() - column.min())
        assert torch.allclose(found[:, unit], expected)
    assert found[:, 2].tolist() == [0] * 4
    moved = h.clone()
    moved[0] += 5
    assert not torch.allclose(layer(moved)[1:, :2], found[1:, :2])
    layer.eval()
    assert torch.equal(layer(moved)[1:], layer(h)[1:])
    assert torch.equal(layer(h[:1]), layer(h)[:1])
    assert 0 <= float(layer(100 * h).min()) <= float(layer(100 * h).max()) <= 1


def test_running_range() -> None:
    layer = BatchMinMax(1, momentum=0.25)
    layer(torch.tensor([[1.0], [3.0]]))
    assert (float(layer.low), float(layer.high)) == (1, 3)
    layer(torch.tensor([[5.0], [11.0]]))
    assert (float(layer.low), float(layer.high)) == (2, 5)
    other = BatchMinMax(1)
    other.load_state_dict(layer.state_dict())
    assert other.eval()(torch.tensor([[3.5]])).item() == 0.5


def test_the_engine_refuses_what_it_remembers_and_what_it_mixes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def step(between: nn.Module) -> None:
        model = nn.Sequential(nn.Linear(4, 3), between, nn.Linear(3, 2))
        rows = torch.utils.data.TensorDataset(drawn(8, 4).float(), torch.arange(8) % 2)
        model, optimizer, loader = PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=torch.utils.data.DataLoader(rows, batch_size=4),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
        )
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    step(BoundedResponseNorm())
    with pytest.raises(UnsupportedModule, match=r"low, .*high|other samples"):
        step(BatchMinMax(3))
    monkeypatch.setattr(BatchMinMax, "_remember", lambda *_: None)
    with pytest.raises(UnsupportedModule, match="other samples"):
        step(BatchMinMax(3))


def test_bad_layers_and_inputs_are_refused() -> None:
    for call in (
        lambda: BatchMinMax(3)(torch.ones(2, 4)),
        lambda: BatchMinMax(3)(torch.ones(0, 3)),
        lambda: BatchMinMax(3).eval()(torch.ones(2, 3)),
        lambda: BatchMinMax(0),
        lambda: BatchMinMax(3, momentum=0.0),
        lambda: BoundedResponseNorm(q=0.0)(torch.ones(2, 3)),
        lambda: BoundedResponseNorm(size=0)(torch.ones(2, 3)),
        lambda: BoundedResponseNorm()(torch.ones(3)),
        lambda: polynomial.label_coefficients(torch.ones(3)),
        lambda: polynomial.cross_entropy(torch.ones(2, 3), torch.ones(2, 4)),
        lambda: polynomial.feature_coefficients(torch.ones(3, 5), torch.ones(2, 4)),
        lambda: polynomial.label_scalar(
            torch.ones(2, 3), polynomial.label_coefficients(torch.ones(2, 4))
        ),
        lambda: polynomial.feature_expanded(
            torch.ones(4, 3), polynomial.feature_coefficients(torch.ones(2, 5), torch.ones(2, 4))
        ),
    ):
        with pytest.raises(InvalidInput):
            call()


def batch(hidden_units: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    hidden = drawn(6, hidden_units).sigmoid()
    weight = drawn(4, hidden_units, seed=2) / hidden_units
    targets = F.one_hot(torch.arange(6) % 4, 4).double()
    return hidden, weight, targets


def test_both_coefficient_forms_are_the_same_loss() -> None:
    hidden, weight, targets = (t.requires_grad_() for t in batch())
    scores = hidden @ weight.T
    one = polynomial.label_scalar(scores, polynomial.label_coefficients(targets))
    other = polynomial.feature_expanded(weight, polynomial.feature_coefficients(hidden, targets))
    hand = (math.log(2) + (0.5 - targets) * scores + scores**2 / 8).sum(1)
    assert torch.allclose(one, hand, rtol=1e-13)
    assert torch.allclose(other, hand, rtol=1e-13)
    for mine, theirs in zip(
        torch.autograd.grad(one.sum(), (hidden, weight), retain_graph=True),
        torch.autograd.grad(other.sum(), (hidden, weight)),
        strict=True,
    ):
        assert torch.allclose(mine, theirs, rtol=1e-12)


def test_the_expansion_is_as_close_as_its_bound() -> None:
    hidden, weight, targets = batch()
    scores = hidden @ weight.T
    exact = polynomial.cross_entropy(scores, targets)
    near = polynomial.label_scalar(scores, polynomial.label_coefficients(targets))
    error = exact - near
    bound = 4 * adlm_loss.corrected_bound(float(scores.abs().max()))
    assert float(error.abs().max()) <= bound
    each = torch.tensor([[adlm_loss.remainder(float(s)) for s in row] for row in scores])
    assert torch.allclose(error, each.double().sum(1), rtol=0, atol=1e-7)
    both = F.binary_cross_entropy_with_logits(scores, targets, reduction="none").sum(1)
    assert torch.allclose(exact, both)


def test_v28_is_the_largest_distance_of_coefficients() -> None:
    """Lemma 5 at hidden units of 1: attained but for the part that both records share."""
    hidden, classes, targets = torch.ones(1, 5).double(), 4, torch.ones(1, 4).double()
    found = polynomial.feature_coefficients(hidden, targets)
    norm = float(found.linear.abs().sum() + found.quadratic.abs().sum())
    assert 2 * norm == adlm.loss_sensitivity(classes, 5)
    # A5: without the absolute value, as printed, a positive label counts as less than nothing.
    assert 2 * float(found.linear.sum() + found.quadratic.sum()) < adlm.loss_sensitivity(4, 5)
    labels = polynomial.label_coefficients(torch.eye(4).double()[:2])
    moved = (labels.linear[0] - labels.linear[1]).abs().sum()
    assert float(moved) == adlm.LABEL_SENSITIVITY
    assert torch.equal(labels.quadratic[0], labels.quadratic[1])


def test_a5_printed_sign_and_power() -> None:
    hidden, weight, targets = batch()
    scores = hidden @ weight.T * 20
    # (24): a minus in front of the second line. Far off, the loss falls without end.
    far = torch.full((1, 1), 50.0).double()
    printed = (0 * F.softplus(-far) - 1 * F.softplus(far)).item()
    assert printed < -49
    assert polynomial.cross_entropy(far, torch.zeros(1, 1).double()).item() > 49
    # Line 27: (phi2 s)^2 is an eighth of phi2 s^2, and no expansion of anything.
    phi = polynomial.label_coefficients(targets)
    read = phi.quadratic * scores**2
    assert torch.allclose((phi.quadratic * scores) ** 2, read / 8)
    near = polynomial.cross_entropy(scores / 100, targets)
    wrong = math.log(2) + phi.linear * scores / 100 + (phi.quadratic * scores / 100) ** 2
    right = polynomial.label_scalar(scores / 100, phi)
    assert float((near - wrong.sum(1)).abs().max()) > 5 * float((near - right).abs().max())

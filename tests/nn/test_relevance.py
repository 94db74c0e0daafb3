"""Relevance: conservation, the rules by hand, normalisation, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dpkern.base.errors import InvalidInput, UnsupportedModule
from dpkern.nn import (
    BatchMinMax,
    BlockCirculantLinear,
    BoundedResponseNorm,
    SpectralConv2d,
    relevance,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network(bias: bool = False) -> nn.Sequential:
    """Every kind of layer, weights drawn, float64, evaluated."""
    torch.manual_seed(5)
    model = nn.Sequential(
        nn.Sequential(
            nn.Conv2d(2, 6, 3, padding=1, bias=bias),
            nn.ReLU(),
            BoundedResponseNorm(),
            nn.MaxPool2d(2),
        ),
        nn.Conv2d(6, 4, 3, stride=2, padding=2, dilation=2, groups=2, bias=bias),
        nn.ReLU(),
        nn.AvgPool2d(2, padding=1),
        SpectralConv2d(4, 4, 2, bias=bias),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(16, 8, bias=bias),
        nn.ReLU(),
        BlockCirculantLinear(8, 8, 4, bias=bias),
        nn.Linear(8, 5, bias=bias),
        nn.Sigmoid(),
    )
    return model.double().eval()


@pytest.mark.parametrize("labels", [None, torch.tensor([0, 1, 4])], ids=["predicted", "true"])
def test_v30_every_layer_sums_to_the_score(labels: Tensor | None) -> None:
    model, x = network(), drawn(3, 2, 12, 12)
    score, layers = relevance.propagate(model, x, labels=labels, mu=0.0)
    with torch.no_grad():
        outputs = model(x)
    chosen = outputs.argmax(1) if labels is None else labels
    assert torch.equal(score, outputs[torch.arange(3), chosen])
    assert len(layers) == 4 + 12 + 1
    assert layers[0].shape == x.shape
    for each in layers:
        assert torch.allclose(each.flatten(1).sum(1), score, rtol=1e-9, atol=0)


def test_biases_and_the_stabiliser_keep_relevance_back() -> None:
    x = drawn(3, 2, 12, 12)
    for model, mu in ((network(bias=True), 0.0), (network(), 0.01)):
        score, layers = relevance.propagate(model, x, mu=mu)
        assert float((layers[0].flatten(1).sum(1) - score).abs().max()) > 1e-4


def by_hand(value: Tensor, weight: Tensor, bias: Tensor, above: Tensor, mu: float) -> Tensor:
    """(4)-(7) for one record, as printed."""
    below = torch.zeros_like(value)
    for m in range(len(weight)):
        z = sum(float(value[p] * weight[m, p]) for p in range(len(value))) + float(bias[m])
        divisor = z + mu * (1 if z >= 0 else -1)
        for p in range(len(value)):
            if divisor:
                below[p] += value[p] * weight[m, p] / divisor * above[m]
    return below


@pytest.mark.parametrize("mu", [0.0, 0.01, 2.0])
def test_linear_rule_is_the_printed_one(mu: float) -> None:
    first, last = nn.Linear(4, 3).double(), nn.Linear(3, 2).double()
    with torch.no_grad():
        first.weight[0] = 0
        first.bias[0] = 0  # z_m = 0
        last.bias -= 3  # negative scores: sgn = -1
    model = nn.Sequential(first, nn.ReLU(), last).eval()
    x = drawn(1, 4)
    score, layers = relevance.propagate(model, x, labels=torch.tensor([1]), mu=mu)
    with torch.no_grad():
        hidden = first(x).relu()
        top = torch.stack([torch.zeros(()).double(), score[0]])
        middle = by_hand(hidden[0], last.weight, last.bias, top, mu)
        bottom = by_hand(x[0], first.weight, first.bias, middle, mu)
    assert torch.allclose(layers[1][0], middle, rtol=1e-12)
    assert torch.allclose(layers[0][0], bottom, rtol=1e-12)


def test_convolution_is_its_sparse_affine_map() -> None:
    conv = nn.Conv2d(2, 3, 3, stride=2, padding=1).double().eval()
    x = drawn(1, 2, 4, 4)
    model = nn.Sequential(conv, nn.Flatten(), nn.Linear(12, 2).double()).eval()
    _, layers = relevance.propagate(model, x, mu=0.1)
    with torch.no_grad():
        bias = conv(torch.zeros_like(x)).flatten()
        basis = torch.eye(32).double().view(32, 2, 4, 4)
        matrix = (conv(basis).flatten(1) - bias).T
    assert torch.allclose(
        layers[0].flatten(), by_hand(x.flatten(), matrix, bias, layers[1].flatten(), 0.1)
    )


def test_pooling_goes_to_the_winner_or_in_proportion() -> None:
    x = torch.tensor([[[[1.0, 3.0], [0.0, 4.0]]]])
    last = nn.Linear(1, 1, bias=False)
    for pool, share in ((nn.MaxPool2d(2), [0, 0, 0, 1]), (nn.AvgPool2d(2), [1 / 8, 3 / 8, 0, 0.5])):
        model = nn.Sequential(pool, nn.Flatten(), last).eval()
        # The stabiliser is not for pooling.
        _, layers = relevance.propagate(model, x, mu=0.5)
        total = layers[2].sum()
        assert torch.allclose(layers[0].flatten(), total * torch.tensor(share))


def test_a5_relevance_range() -> None:
    found = relevance.normalised(torch.tensor([[2.0, -2.0, 0.0], [7.0, 7.0, 7.0]]))
    assert found.tolist() == [[1, 0, 0.5], [0, 0, 0]]  # the formula's range, not the text's
    signed = relevance.normalised(
        torch.tensor([[2.0, -2.0, 0.0], [7.0, 7.0, 7.0]]), relevance_range="signed"
    )
    assert signed.tolist() == [[1, -1, 0], [0, 0, 0]]


def test_mean_relevance_does_not_depend_on_the_batch() -> None:
    model, x, labels = network(), drawn(5, 2, 12, 12), torch.tensor([0, 1, 2, 3, 4])
    whole = relevance.mean_relevance(model, x, labels)
    assert whole.shape == (288,)
    assert torch.allclose(whole, relevance.mean_relevance(model, x, labels, batch=2), rtol=1e-9)
    bottoms = relevance.propagate(model, x, labels=labels).layers[0]
    assert torch.allclose(whole, relevance.normalised(bottoms).mean(0))
    assert 0 <= float(whole.min()) <= float(whole.max()) <= 1
    assert not torch.allclose(whole, relevance.mean_relevance(model, x))


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize(
    ("model", "error"),
    [
        (nn.Sequential(nn.Linear(4, 2)).train(), InvalidInput),
        (nn.Sequential(nn.Linear(4, 4), BatchMinMax(4)).train(), InvalidInput),
        (nn.Sequential(nn.Linear(4, 2), nn.Softplus()).eval(), UnsupportedModule),
        (nn.Sequential(Doubled(4, 2)).eval(), UnsupportedModule),
        (nn.Sequential(nn.Unflatten(1, (2, 2))).eval(), InvalidInput),
    ],
    ids=["training", "batch in training", "no rule", "a subclass", "no scores"],
)
def test_what_cannot_be_attributed_is_refused(model: nn.Sequential, error: type[Exception]) -> None:
    with pytest.raises(error):
        relevance.propagate(model, torch.ones(3, 4))


def test_bad_input_is_refused() -> None:
    model, x = nn.Sequential(nn.Linear(4, 2)).eval(), torch.ones(3, 4)
    for call in (
        lambda: relevance.propagate(model, x * torch.nan),
        lambda: relevance.propagate(model, x, mu=-1.0),
        lambda: relevance.propagate(model, x, labels=torch.tensor([0, 1, 2])),
        lambda: relevance.propagate(model, x, labels=torch.tensor([0, 1])),
        lambda: relevance.mean_relevance(model, x, torch.tensor([0, 1])),
        lambda: relevance.mean_relevance(model, x[:0]),
        lambda: relevance.normalised(x, relevance_range="other"),
        lambda: relevance.normalised(x[:, :0]),
    ):
        with pytest.raises(InvalidInput):
            call()

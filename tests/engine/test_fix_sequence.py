"""Models that have time first are trained after ``fix`` as their twins with the batch first."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpkern
from dpkern.base.errors import InvalidInput, UnsupportedModule
from dpkern.nn import batch_first

ROWS, TIME, WIDTH = 12, 5, 8


class Model(nn.Module):
    """A model that has time first inside: attention over memory if there is a decoder."""

    def __init__(self, body: nn.Module, *, decodes: bool = False) -> None:
        super().__init__()
        self.inner, self.body = nn.Linear(4, WIDTH), body
        self.out, self.decodes = nn.Linear(WIDTH, 3), decodes

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x).transpose(0, 1)
        h = self.body(h, memory=h.flip(0)) if self.decodes else self.body(h)
        return self.out(h[-1])


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False)


def decoder() -> nn.Module:
    return nn.TransformerDecoderLayer(WIDTH, 2, 16, dropout=0.0)


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))


BODIES = [encoder_layer, encoder, decoder, linear]


def made(body: Callable[[], nn.Module]) -> Model:
    torch.manual_seed(0)
    return Model(body(), decodes=body is decoder)


def fixed(model: Model) -> Model:
    changed = dpkern.fix(copy.deepcopy(model))
    if isinstance(model.body, nn.Sequential):
        for layer in changed.body:  # type: ignore[union-attr]
            batch_first(layer)
    return changed  # type: ignore[return-value]


def clipped_sum(model: nn.Module, x: Tensor, y: Tensor, bound: float) -> list[Tensor]:
    """Return the clipped sum from one ordinary backward pass per sample, in float64."""
    model = copy.deepcopy(model).double()
    parameters = list(model.parameters())
    sums = [torch.zeros_like(p) for p in parameters]
    for i in range(len(x)):
        loss = nn.functional.cross_entropy(model(x[i : i + 1].double()), y[i : i + 1])
        each = torch.autograd.grad(loss, parameters)
        norm = torch.sqrt(sum(((g**2).sum() for g in each), torch.zeros((), dtype=torch.float64)))
        for total, g in zip(sums, each, strict=True):
            total += g * min(1.0, bound / float(norm))
    return sums


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_the_step_after_the_fix_is_that_of_the_samples_one_by_one(
    body: Callable[[], nn.Module],
) -> None:
    plain = made(body)
    model = fixed(plain)
    torch.manual_seed(1)
    x, y = torch.randn(ROWS, TIME, 4), torch.randint(3, (ROWS,))
    expected = clipped_sum(plain, x, y, 0.5)
    before = [p.detach().clone() for p in model.parameters()]
    engine = dpkern.PrivacyEngine()
    _, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=ROWS),
        noise_multiplier=0.0,
        max_grad_norm=0.5,
        sampling="fixed",
        arithmetic="float",
    )
    for inputs, targets in loader:
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    for parameter, start, total in zip(model.parameters(), before, expected, strict=True):
        moved = (start - parameter.detach()).double() * ROWS
        assert torch.allclose(moved, total, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
@pytest.mark.parametrize("training", [True, False])
def test_names_and_results_stay(body: Callable[[], nn.Module], training: bool) -> None:
    plain = made(body).train(training)
    model = fixed(plain)
    assert model.state_dict().keys() == plain.state_dict().keys()
    for rows in (TIME, 3):  # as many rows as times hide a mistake of axes
        x = torch.randn(rows, TIME, 4)
        with torch.no_grad():
            assert torch.allclose(model(x), plain(x), rtol=1e-5, atol=1e-6)


def test_masks_of_positions_and_of_padding_mean_the_same() -> None:
    plain, model = encoder(), dpkern.fix(encoder())
    model.load_state_dict(plain.state_dict())
    causal = torch.ones(TIME, TIME, dtype=torch.bool).triu(1)
    for rows in (TIME, 3):
        padding = torch.zeros(rows, TIME, dtype=torch.bool)
        padding[0, -2:] = True
        x = torch.randn(TIME, rows, WIDTH)
        for training in (True, False):
            plain.train(training)
            model.train(training)
            with torch.no_grad():
                found = model(x, causal, src_key_padding_mask=padding)
                expected = plain(x, causal, src_key_padding_mask=padding)
            assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)


def one_pass(model: nn.Module, data: TensorDataset) -> None:
    _, _, loader = dpkern.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(data, batch_size=ROWS // 2),
        noise_multiplier=1.0,
        max_grad_norm=0.5,
        sampling="fixed",
    )
    model(next(iter(loader))[0])


def test_without_the_fix_both_are_refused_with_it() -> None:
    for body, remedy in ((encoder, r"dpkern\.fix\(model\)"), (linear, r"nn\.batch_first\(layer\)")):
        model = made(body)
        data = TensorDataset(torch.randn(ROWS, TIME, 4), torch.randint(3, (ROWS,)))
        with pytest.raises(UnsupportedModule, match=remedy):
            one_pass(model, data)


def test_a_second_call_changes_nothing() -> None:
    model = dpkern.fix(made(encoder))
    layer = model.body.layers[0]  # type: ignore[union-attr, index]
    assert batch_first(layer) is layer
    dpkern.fix(model)
    assert len(layer._forward_pre_hooks) == len(layer._forward_hooks) == 1  # type: ignore[union-attr]
    attention = nn.MultiheadAttention(4, 2)
    assert not batch_first(attention)._forward_hooks


def test_what_has_the_batch_first_is_refused() -> None:
    with pytest.raises(InvalidInput, match="batch_first=False"):
        batch_first(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True))
    with pytest.raises(InvalidInput, match=r"\[time, batch, \.\.\.\]"):
        batch_first(nn.Linear(4, 2))(torch.randn(4))


@pytest.mark.parametrize(
    "make",
    [
        encoder,
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LSTM(WIDTH, WIDTH)),
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 2, 16), 1),
    ],
)
def test_a_module_that_contains_layers_with_time_is_refused(make: Callable[[], nn.Module]) -> None:
    module = make()
    with pytest.raises(InvalidInput, match="on each of its layers"):
        batch_first(module)
    assert not any(part._forward_pre_hooks for part in module.modules())


@pytest.mark.parametrize("layer", [encoder_layer(), nn.Linear(WIDTH, WIDTH)])
def test_an_input_without_time_and_batch_is_refused(layer: nn.Module) -> None:
    with pytest.raises(InvalidInput, match="3 dimensions or more"):
        batch_first(layer)(torch.randn(WIDTH, WIDTH))


def test_only_layers_are_changed() -> None:
    with pytest.raises(InvalidInput, match="got str"):
        batch_first("layer")  # type: ignore[type-var]

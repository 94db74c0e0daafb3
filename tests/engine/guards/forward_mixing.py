"""Models in which samples meet on ways that no gradient shows."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpkern.base.errors import UnsupportedModule
from tests.engine.guards import texts
from tests.engine.guards.kit import Table, World
from tests.engine.guards.models import HIDDEN, Between, Reader, cross_entropy, fit, mlp
from tests.engine.guards.records import CLASSES, FEATURES, ROWS, TOKENS, WORDS

TABLE = Table("forward mixing")

MIXES = ""


def detached_mean(m: nn.Module, h: Tensor) -> Tensor:
    return h - h.mean(0).detach()


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def centred_by_a_detached_mean(w: World) -> None:
    fit(w, Between(detached_mean))


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def standardised_under_no_grad(w: World) -> None:
    def middle(m: nn.Module, h: Tensor) -> Tensor:
        with torch.no_grad():
            mean, deviation = h.mean(0), h.std(0) + 1e-3
        return (h - mean) / deviation

    fit(w, Between(middle))


@TABLE.refused(UnsupportedModule, texts.OTHER_GRADIENTS)
def frozen_batch_norm_back_in_training(w: World) -> None:
    """The evaluation between two epochs ends with ``model.train()``."""
    norm = nn.BatchNorm1d(HIDDEN).requires_grad_(False).eval()
    model = Between(lambda m, h: m.norm(h), norm=norm)
    model, optimizer, loader = w.private(model)
    model.eval()
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def fake_quantised_by_the_largest_entry(w: World) -> None:
    def middle(m: nn.Module, h: Tensor) -> Tensor:
        scale = h.detach().abs().max() / 7
        return h + ((h / scale).round() * scale - h).detach()

    fit(w, Between(middle))


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def scaled_by_the_batch_norm(w: World) -> None:
    fit(w, Between(lambda m, h: h / h.detach().norm()))


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def expert_with_room_for_two(w: World) -> None:
    """Rows beyond an expert's capacity are dropped, the least confident first."""

    def middle(m: nn.Module, h: Tensor) -> Tensor:
        chosen = h.detach()[:, 0].topk(min(2, len(h))).indices
        mask = torch.zeros(len(h), 1)
        mask[chosen] = 1.0
        return h * mask

    fit(w, Between(middle))


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def gated_by_the_batch_median(w: World) -> None:
    fit(w, Between(lambda m, h: h * (h.detach() > h.detach().median(0).values)))


@TABLE.refused(UnsupportedModule, MIXES)
def branch_on_the_batch_mean(w: World) -> None:
    fit(w, Between(lambda m, h: h.tanh() if float(h.mean()) > 0 else h.relu()))


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def temperature_from_the_batch(w: World) -> None:
    fit(w, Between(lambda m, h: h / (0.1 + h.std().item())))


@TABLE.refused(UnsupportedModule, MIXES)
def divided_by_the_batch_size(w: World) -> None:
    """A batch of one record fewer scales all others, though no row looks at another."""
    fit(w, Between(lambda m, h: h * 4 / len(h)))


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def ranks_within_the_batch(w: World) -> None:
    def middle(m: nn.Module, h: Tensor) -> Tensor:
        ranks = h.detach().argsort(0).argsort(0)
        return h + 0.5 * ranks

    fit(w, Between(middle))


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def nearest_neighbour_in_the_batch(w: World) -> None:
    def middle(m: nn.Module, h: Tensor) -> Tensor:
        with torch.no_grad():
            apart = torch.cdist(h, h) + 1e3 * torch.eye(len(h))
            near = h[apart.argmin(1)]
        return h + near

    fit(w, Between(middle))


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def whitened_under_no_grad(w: World) -> None:
    def middle(m: nn.Module, h: Tensor) -> Tensor:
        with torch.no_grad():
            spread = h.T @ h / len(h) + 0.1 * torch.eye(h.shape[1])
            values, vectors = torch.linalg.eigh(spread)
            root = vectors @ torch.diag(values.rsqrt()) @ vectors.T
        return h @ root

    fit(w, Between(middle))


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def nearest_centre_of_the_batch(w: World) -> None:
    def middle(m: nn.Module, h: Tensor) -> Tensor:
        with torch.no_grad():
            centres = torch.stack([h[: len(h) // 2].mean(0), h[len(h) // 2 :].mean(0)])
            own = centres[torch.cdist(h, centres).argmin(1)]
        return h - own

    fit(w, Between(middle))


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def attention_weights_without_gradient(w: World) -> None:
    def middle(m: nn.Module, h: Tensor) -> Tensor:
        weights = (h @ h.T).softmax(-1).detach()
        return h + weights @ h.detach()

    fit(w, Between(middle))


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def label_of_the_neighbour_as_second_input(w: World) -> None:
    def middle(m: nn.Module, h: Tensor, y: Tensor) -> Tensor:
        return h + F.one_hot(y.roll(1, 0), HIDDEN)

    fit(w, Between(middle), lambda model, x, y: F.cross_entropy(model(x, y), y))


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def context_by_keyword(w: World) -> None:
    def middle(m: nn.Module, h: Tensor, *, context: Tensor) -> Tensor:
        return h * context[:, :1].mean(0)

    fit(w, Between(middle), lambda model, x, y: F.cross_entropy(model(x, context=x), y))


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def context_in_a_dictionary(w: World) -> None:
    def middle(m: nn.Module, h: Tensor, more: dict[str, Tensor]) -> Tensor:
        return h * more["context"][:, :1].abs().amax(0)

    fit(w, Between(middle), lambda model, x, y: F.cross_entropy(model(x, {"context": x}), y))


@TABLE.refused(UnsupportedModule, "every sample has its own part")
def gate_that_starts_at_zero(w: World) -> None:
    """Nothing mixes until the gate has learnt: after the first step it is open."""
    model = Between(lambda m, h: h + m.gate * h.mean(0), gate=nn.Parameter(torch.zeros(())))
    fit(w, model)


@TABLE.refused(UnsupportedModule, texts.OTHER_GRADIENTS, after=1)
def batch_norm_from_the_second_step_on(w: World) -> None:
    model = Between(lambda m, h: F.batch_norm(h, None, None, training=True) if m.late else h)
    model.late = False
    model, optimizer, loader = w.private(model)
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
        model.late = True


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS, after=3)
def centred_from_the_second_epoch_on(w: World) -> None:
    model = Between(lambda m, h: detached_mean(m, h) if m.warm else h)
    model.warm = False
    model, optimizer, loader = w.private(model)
    for _ in range(2):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model, x, y).backward()
            optimizer.step()
        model.eval()
        model.warm = True


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def mixup_inside_the_model(w: World) -> None:
    def middle(m: nn.Module, h: Tensor) -> Tensor:
        return 0.7 * h + 0.3 * h.detach()[torch.randperm(len(h))]

    fit(w, Between(middle))


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def neighbours_only_while_training(w: World) -> None:
    fit(w, Between(lambda m, h: h + h.roll(1, 0).detach() if m.training else h))


@TABLE.refused(UnsupportedModule, MIXES)
def dropout_rate_of_the_batch(w: World) -> None:
    def middle(m: nn.Module, h: Tensor) -> Tensor:
        keep = torch.rand(HIDDEN, generator=torch.Generator().manual_seed(0))
        return h * (keep > h.detach().mean().sigmoid())

    fit(w, Between(middle))


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def hook_that_centres(w: World) -> None:
    model = mlp()
    model[0].register_forward_hook(lambda m, args, output: output - output.mean(0).detach())
    fit(w, model)


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS, kind=TOKENS)
def words_weighted_by_their_rarity_in_the_batch(w: World) -> None:
    def middle(m: nn.Module, ids: Tensor, h: Tensor) -> Tensor:
        counts = torch.bincount(ids.flatten(), minlength=WORDS)
        return h / counts[ids].unsqueeze(-1)

    fit(w, Reader(middle))


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS, kind=TOKENS)
def rolled_words(w: World) -> None:
    fit(w, Reader(lambda m, ids, h: h * m.table(ids.roll(1, 0)).detach()))


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS, kind=TOKENS)
def unique_words_of_the_batch(w: World) -> None:
    """Words are numbered by their place among those that occur."""

    def middle(m: nn.Module, ids: Tensor, h: Tensor) -> Tensor:
        _, place = ids.unique(return_inverse=True)
        return h * (1 + place.unsqueeze(-1))

    fit(w, Reader(middle))


@TABLE.refused(UnsupportedModule, texts.OTHER_GRADIENTS)
def probe_sized_inputs(w: World) -> None:
    """A second network over the mean of the batch says how to scale every row."""

    class Conditioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
            self.body = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x * self.scale(x.mean(0, keepdim=True)).sigmoid())

    fit(w, Conditioned())


@TABLE.refused(UnsupportedModule, "got log", kind=ROWS)
def logits_adjusted_by_the_batch(w: World) -> None:
    """Class frequencies of the batch, subtracted outside the model."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        frequencies = F.one_hot(y, CLASSES).float().mean(0) + 0.01
        return F.cross_entropy(model(x) + frequencies.log(), y)

    fit(w, mlp(), loss)

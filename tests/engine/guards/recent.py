"""Recent code: functional calls, fills, ranks, hooks, settings, windows, teachers of one module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.data import DataLoader, default_collate

from dpkern.base.errors import InvalidInput, PrivacyError, UnsupportedModule
from tests.engine.guards import texts
from tests.engine.guards.kit import Table, World
from tests.engine.guards.losses import of_outputs
from tests.engine.guards.models import HIDDEN, Between, Language, Reader, cross_entropy, fit, mlp
from tests.engine.guards.records import CLASSES, FEATURES, IMAGES, TARGET, TOKENS, WORDS

TABLE = Table("recent code")


def _each(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, reduction="none")


@TABLE.refused(UnsupportedModule, "got full_like")
def filled_with_the_mean(w: World) -> None:
    """Outputs are drawn to their mean over the batch."""

    def loss(z: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(z, torch.full_like(z, z.detach().mean()))  # type: ignore[arg-type]

    fit(w, mlp(), of_outputs(loss))


@TABLE.refused(UnsupportedModule, "got max")
def new_full_of_the_largest(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(z, z.new_full((1, CLASSES), z.detach().max()).expand_as(z))  # type: ignore[arg-type]

    fit(w, mlp(), of_outputs(loss))


@TABLE.refused(UnsupportedModule, "got max")
def new_tensor_of_the_largest(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(z, z.new_tensor([z.detach().max()] * CLASSES).expand_as(z))

    fit(w, mlp(), of_outputs(loss))


@TABLE.refused(UnsupportedModule, "got mul")
def losses_weighted_by_their_ranks(w: World) -> None:
    """As the Lovasz extension of a loss of sets."""

    def loss(z: Tensor, y: Tensor) -> Tensor:
        ordered = _each(z, y).sort(descending=True).values
        return (ordered * torch.linspace(1, 0, len(y))).mean()

    fit(w, mlp(), of_outputs(loss))


@TABLE.refused(UnsupportedModule, "got dot")
def product_with_weights_of_ranks(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        return torch.dot(_each(z, y).sort().values, torch.linspace(0, 1, len(y)))

    fit(w, mlp(), of_outputs(loss), loss_reduction="sum")


@TABLE.refused(UnsupportedModule, "got a factor of 1.732 in a batch of 3", after=1)
def sum_over_the_root_of_the_size(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z, y, reduction="sum") / len(y) ** 0.5

    fit(w, mlp(), of_outputs(loss), draws=((0, 1, 2, 3, TARGET), (4, 5, 6), (8, TARGET)))


@TABLE.refused(UnsupportedModule, "changes each sample's gradient by itself")
def gradient_hook_that_reads_the_losses(w: World) -> None:
    """Only losses above their mean go backward."""

    def loss(z: Tensor, y: Tensor) -> Tensor:
        each = _each(z, y)
        each.register_hook(lambda g: g * (each.detach() > each.detach().mean()))
        return each.mean()

    fit(w, mlp(), of_outputs(loss))


def _with_setting(w: World, name: str, value: Any) -> None:
    model, optimizer, loader = w.private(mlp())
    for x, y in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model, x, y)
        loss.backward()
        for group in optimizer.param_groups:
            group[name] = value(loss)
        optimizer.step()


@TABLE.refused(PrivacyError, "param_groups[0]['lr']: " + texts.SETTING)
def learning_rate_by_the_loss(w: World) -> None:
    """Polyak's step size."""
    _with_setting(w, "lr", lambda loss: 0.01 * loss.item())


@TABLE.refused(PrivacyError, "param_groups[0]['lr']: " + texts.SETTING)
def learning_rate_that_is_the_loss(w: World) -> None:
    _with_setting(w, "lr", lambda loss: loss.detach())


@TABLE.refused(PrivacyError, "param_groups[0]['weight_decay']: " + texts.SETTING)
def weight_decay_by_the_loss(w: World) -> None:
    _with_setting(w, "weight_decay", lambda loss: 0.01 * loss.item())


class _Scaling(DataLoader[Any]):
    def __iter__(self) -> Any:
        return ((2 * x, y) for x, y in super().__iter__())


@TABLE.refused(InvalidInput, "which iterates in a way of its own")
def loader_class_with_its_own_iteration(w: World) -> None:
    """What it does to the batches would be lost."""
    fit(w, mlp(), loader=_Scaling(w.data, batch_size=4, shuffle=True))


@TABLE.refused(InvalidInput, "changed when one was left out")
def collate_that_scales_by_their_number(w: World) -> None:
    def collate(records: list[Any]) -> Any:
        x, y = default_collate(records)
        return x / len(records), y

    fit(w, mlp(), loader=w.loader(collate_fn=collate))


def _windows(records: list[Any]) -> Any:
    x, y = default_collate(records)
    return x.unfold(1, 3, 1).flatten(0, 1), y.repeat_interleave(4)


@TABLE.refused(InvalidInput, "views=4: first rows of all records, then second ones")
def windows_of_a_record_next_to_each_other(w: World) -> None:
    """The rows of one record follow each other: with ``views`` they would count as others'."""
    fit(w, mlp(inputs=3), loader=w.loader(collate_fn=_windows), views=4)


@TABLE.refused(UnsupportedModule, texts.CONTENTS)
def scale_written_before_the_first_pass(w: World) -> None:
    model, optimizer, loader = w.private(Between(lambda m, h: h * m.scale, scale=torch.ones(())))
    for step, (x, y) in enumerate(loader):
        if not step:
            model.scale.fill_(x.std().item())
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()


@TABLE.refused(UnsupportedModule, "whose graph a backward pass has used up")
def weights_cached_over_passes(w: World) -> None:
    model = mlp()
    parametrizations.weight_norm(model[0])
    model, optimizer, loader = w.private(model)
    for x, y in loader:
        optimizer.zero_grad()
        with parametrize.cached():
            cross_entropy(model, x, y).backward()
        optimizer.step()


@TABLE.refused(UnsupportedModule, "modified by an inplace operation")
def inputs_normalised_in_place(w: World) -> None:
    class Normalising(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            x -= x.mean(1, keepdim=True)
            x /= x.std(1, keepdim=True) + 1e-3
            return self.inner(x)

    fit(w, Normalising())


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS, kind=IMAGES)
def capsules_that_route_over_the_batch(w: World) -> None:
    fit(w, _Capsules(over_batch=True))


@TABLE.right(kind=IMAGES)
def capsules_that_route_by_themselves(w: World) -> None:
    fit(w, _Capsules(over_batch=False))


class _Capsules(nn.Module):
    def __init__(self, *, over_batch: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(8, CLASSES, 4, 4))
        self.over_batch = over_batch

    def forward(self, x: Tensor) -> Tensor:
        votes = torch.einsum("bip,iopq->bioq", x.reshape(len(x), 8, 4), self.weight)
        logits = torch.zeros(8, CLASSES) if self.over_batch else torch.zeros(len(x), 8, CLASSES)
        for _ in range(2):
            out = (logits.softmax(-1)[..., None] * votes).sum(1)
            with torch.no_grad():
                agreement = (votes * out[:, None]).sum(-1)
                logits = logits + (agreement.mean(0) if self.over_batch else agreement)
        return out.norm(dim=-1)


@TABLE.refused(UnsupportedModule, "whose first dimension is the batch", kind=TOKENS)
def experts_that_choose_tokens_of_the_batch(w: World) -> None:
    fit(w, _choosing(lambda ids, h: h.flatten(0, 1)[None], w))


@TABLE.right(kind=TOKENS)
def experts_that_choose_tokens_of_each_record(w: World) -> None:
    fit(w, _choosing(lambda ids, h: h, w))


def _choosing(groups: Any, w: World) -> nn.Module:
    """Expert choice routing: each expert takes half of the tokens of every group."""

    def middle(m: Any, ids: Tensor, h: Tensor) -> Tensor:
        tokens = groups(ids, h)
        scores, out = (tokens @ m.gate).softmax(-1), torch.zeros_like(tokens)
        for number, expert in enumerate(m.experts):
            value, place = scores[..., number].topk(tokens.shape[1] // 2, 1)
            place = place[..., None].expand(-1, -1, HIDDEN)
            out = out.scatter_add(1, place, value[..., None] * expert(tokens.gather(1, place)))
        return out.view_as(h)

    model = Reader(middle)
    model.gate = nn.Parameter(torch.randn(HIDDEN, 2))
    model.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(2))
    return model


@TABLE.refused(UnsupportedModule, texts.OTHER_GRADIENTS)
def saved_tensors_rounded_by_the_largest(w: World) -> None:
    def pack(tensor: Tensor) -> Tensor:
        scale = tensor.detach().abs().max() / 7 + 1e-6
        return (tensor.detach() / scale).round() * scale

    model, optimizer, loader = w.private(mlp())
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = model(x)
        F.cross_entropy(output, y).backward()
        optimizer.step()


@TABLE.right()
def saved_tensors_on_the_cpu(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autograd.graph.save_on_cpu():
            loss = cross_entropy(model, x, y)
        loss.backward()
        optimizer.step()


@TABLE.right()
def functional_call_of_weights_with_an_offset(w: World) -> None:
    """The weights are expressions that were made before the samples entered."""

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        other = {name: p + 0.01 for name, p in model.named_parameters()}
        return F.cross_entropy(torch.func.functional_call(model, other, (x,)), y)

    fit(w, mlp(), loss)


@TABLE.right()
def teacher_by_functional_call(w: World) -> None:
    """The student's own module runs with averaged weights."""
    model, optimizer, loader = w.private(mlp())
    generator = torch.Generator().manual_seed(5)
    average = {
        name: p.detach() + 0.3 * torch.randn(p.shape, generator=generator)
        for name, p in model.named_parameters()
    }
    for x, _ in loader:
        optimizer.zero_grad()
        with torch.no_grad():
            targets = torch.func.functional_call(model, average, (x,)).softmax(1)
        F.cross_entropy(model(x), targets).backward()
        optimizer.step()
        for name, p in model.named_parameters():
            average[name].lerp_(p.detach(), 0.1)


@TABLE.right()
def preferences_by_log_sigmoid(w: World) -> None:
    fit(w, mlp(), of_outputs(lambda z, y: -F.logsigmoid(z[:, 0] - z[:, 1]).mean()))


@TABLE.right(random=True)
def sorted_rows_with_noise(w: World) -> None:
    """Numbers of one's own that meet sorted inputs are no weights of ranks."""

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        order = x.norm(dim=1).argsort()
        return F.cross_entropy(model(x[order] + 0.1 * torch.randn(len(x), FEATURES)), y[order])

    fit(w, mlp(), loss)


@TABLE.refused(UnsupportedModule, "cuts samples at a number computed over others", kind=TOKENS)
def cut_to_the_longest_of_the_batch(w: World) -> None:
    """How many words count, for a record, depends on the others."""
    fit(w, Reader(), lambda m, x, y: F.cross_entropy(m(x[:, : _lengths(x).max()]), y))


@TABLE.refused(UnsupportedModule, "cuts samples at a number computed over others", kind=TOKENS)
def cut_to_the_length_of_the_first(w: World) -> None:
    fit(w, Reader(), lambda m, x, y: F.cross_entropy(m(x[:, : _lengths(x)[0]]), y))


@TABLE.refused(UnsupportedModule, "writes where the values of samples say", kind=TOKENS)
def padded_from_the_length_of_the_first(w: World) -> None:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone()
        for i in range(len(x)):
            x[i, _lengths(x)[0] :] = 0
        return F.cross_entropy(model(x), y)

    fit(w, Reader(), loss)


@TABLE.right(kind=TOKENS)
def padded_from_each_records_own_length(w: World) -> None:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        x, lengths = x.clone(), _lengths(x)
        for i in range(len(x)):
            x[i, lengths[i] :] = 0
        return F.cross_entropy(model(x), y)

    fit(w, Reader(), loss)


@TABLE.right(kind=TOKENS)
def cut_to_each_records_own_length(w: World) -> None:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        rows = [torch.cat([x[i, :n], x.new_zeros(5)])[:5] for i, n in enumerate(_lengths(x))]
        return F.cross_entropy(model(torch.stack(rows)), y)

    fit(w, Reader(), loss)


def _lengths(x: Tensor) -> Tensor:
    return (x > WORDS // 2).sum(1).clamp(min=1)


@TABLE.right(kind=TOKENS)
def masked_words_picked_by_a_mask(w: World) -> None:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        mask = torch.zeros_like(x, dtype=torch.bool)
        mask[:, 1::2] = True
        return F.cross_entropy(model(x.masked_fill(mask, 1))[mask], x[mask])

    fit(w, Language(), loss)


@TABLE.right()
def windows_in_the_loop(w: World) -> None:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x.unfold(1, 3, 1).flatten(0, 1)), y.repeat_interleave(4))

    fit(w, mlp(inputs=3), loss)


@TABLE.right()
def windows_joined_by_the_collate_function(w: World) -> None:
    def collate(records: list[Any]) -> Any:
        x, y = default_collate(records)
        return x.unfold(1, 3, 1).transpose(0, 1).flatten(0, 1), y.repeat(4)

    fit(w, mlp(inputs=3), loader=w.loader(collate_fn=collate), views=4)

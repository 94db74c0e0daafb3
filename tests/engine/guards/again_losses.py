"""Losses, steps and passes once more: what projects write and the first tables do not have."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpkern.base.errors import HookWarning, PrivacyError, UnsupportedModule
from tests.engine.guards import texts
from tests.engine.guards.kit import WIDE, Table, World
from tests.engine.guards.losses import of_outputs
from tests.engine.guards.models import HIDDEN, Between, Reader, cross_entropy, fit, mlp
from tests.engine.guards.records import CLASSES, FEATURES, IMAGES, SCALARS, TOKENS

TABLE = Table("losses and passes once more", bounds=WIDE)


@TABLE.refused(UnsupportedModule, "got eq")
def supervised_contrastive(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        z = F.normalize(z)
        logits = torch.einsum("id,jd->ij", z, z)
        same = (y[:, None] == y).float()
        return -(same * logits.log_softmax(1)).sum(1).mean()

    fit(w, mlp(), of_outputs(loss))


@TABLE.refused(UnsupportedModule, "got clamp")
def focal_normalised_by_positives(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        target = F.one_hot(y, CLASSES).float()
        each = F.binary_cross_entropy_with_logits(z, target, reduction="none")
        each = each * (1 - (-each).exp()) ** 2
        return each.sum() / (y > 0).sum().clamp(min=1)

    fit(w, mlp(), of_outputs(loss))


@TABLE.refused(UnsupportedModule, "got mean")
def online_hard_examples_by_sorting(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(z, y, reduction="none")
        return each.sort(descending=True).values[:2].mean()

    fit(w, mlp(), of_outputs(loss))


@TABLE.refused(UnsupportedModule, "got gt")
def losses_above_their_mean(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(z, y, reduction="none")
        return each[each > each.mean()].mean()

    fit(w, mlp(), of_outputs(loss))


@TABLE.refused(UnsupportedModule, "got topk")
def hardest_by_their_places(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(z, y, reduction="none")
        return each[each.topk(2).indices].mean()

    fit(w, mlp(), of_outputs(loss))


@TABLE.refused(UnsupportedModule, "got argsort")
def hardest_by_index_select(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(z, y, reduction="none")
        return each.index_select(0, each.argsort(descending=True)[:2]).sum()

    fit(w, mlp(), of_outputs(loss), loss_reduction="sum")


@TABLE.refused(UnsupportedModule, "got argmax")
def hardest_one_by_its_place(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(z, y, reduction="none")
        return each[each.argmax()]

    fit(w, mlp(), of_outputs(loss), loss_reduction="sum")


@TABLE.refused(UnsupportedModule, "got sum")
def smaller_half_masked_after_sorting(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(z, y, reduction="none").sort().values
        return each[: len(each) // 2].sum()

    fit(w, mlp(), of_outputs(loss), loss_reduction="sum")


@TABLE.refused(UnsupportedModule, "got argsort")
def hardest_inputs_beside_an_accuracy(w: World) -> None:
    """A mask of own values elsewhere does not allow to choose rows by an order."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        assert len(x[y == 1]) >= 0
        order = x.norm(dim=1).argsort(descending=True)[:2]
        return F.cross_entropy(model(x[order]), y[order], reduction="sum")

    fit(w, mlp(), loss, loss_reduction="sum")


@TABLE.refused(UnsupportedModule, "got sum")
def hardest_after_all_were_ordered(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(z, y, reduction="none")
        return each[each.argsort(descending=True)][:2].sum()

    fit(w, mlp(), of_outputs(loss), loss_reduction="sum")


@TABLE.refused(UnsupportedModule, "got __getitem__")
def hardest_one_after_sorting(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z, y, reduction="none").sort(descending=True).values[0]

    fit(w, mlp(), of_outputs(loss), loss_reduction="sum")


@TABLE.refused(PrivacyError, "expected all records of the batch in the module")
def largest_inputs_beside_an_accuracy(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        assert len(x[y == 1]) >= 0
        order = x.norm(dim=1).argsort(descending=True)
        return F.cross_entropy(model(x[order][:2]), y[order][:2], reduction="sum")

    fit(w, mlp(), loss, loss_reduction="sum")


@TABLE.refused(UnsupportedModule, "got unbind")
def losses_ordered_and_unbound(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(z, y, reduction="none").sort(descending=True).values
        one, two, *_ = each.unbind()
        return one + two

    fit(w, mlp(), of_outputs(loss), loss_reduction="sum")


@TABLE.right()
def all_losses_sorted(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z, y, reduction="none").sort().values.mean()

    fit(w, mlp(), of_outputs(loss))


@TABLE.right()
def losses_above_a_constant(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(z, y, reduction="none")
        return (each * (each > 0.7)).mean()

    fit(w, mlp(), of_outputs(loss))


@TABLE.right()
def mean_of_losses_above_a_constant(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(z, y, reduction="none")
        return each[each > 0.7].mean()

    fit(w, mlp(), of_outputs(loss))


@TABLE.right()
def dice_of_each_record(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        p, t = z.softmax(1), F.one_hot(y, CLASSES).float()
        return (1 - (2 * (p * t).sum(1) + 1) / (p.sum(1) + t.sum(1) + 1)).mean()

    fit(w, mlp(), of_outputs(loss))


@TABLE.refused(UnsupportedModule, "got index_add")
def scatter_by_class(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(z, y, reduction="none")
        sums = torch.zeros(CLASSES).index_add(0, y, each)
        return sums.square().sum()

    fit(w, mlp(), of_outputs(loss))


@TABLE.refused(UnsupportedModule, "got index_add")
def sums_by_class_added(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(z, y, reduction="none")
        return torch.zeros(CLASSES).index_add(0, y, each).sum()

    fit(w, mlp(), of_outputs(loss))


@TABLE.right()
def connectionist_temporal(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        z = model(x).view(len(x), 3, CLASSES).log_softmax(-1).transpose(0, 1)
        lengths = torch.full((len(x),), 3), torch.ones(len(x), dtype=torch.long)
        return F.ctc_loss(z, y.clamp(min=1)[:, None], *lengths, reduction="sum", zero_infinity=True)

    fit(w, mlp(3 * CLASSES), loss, loss_reduction="sum")


@TABLE.right()
def connectionist_temporal_mean(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        z = model(x).view(len(x), 3, CLASSES).log_softmax(-1).transpose(0, 1)
        lengths = torch.full((len(x),), 3), torch.ones(len(x), dtype=torch.long)
        return F.ctc_loss(z, y.clamp(min=1)[:, None], *lengths)

    fit(w, mlp(3 * CLASSES), loss)


@TABLE.refused(UnsupportedModule, "got log")
def activation_regulariser_of_the_batch_mean(w: World) -> None:
    """A sparsity target for the mean activity of each unit."""

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        z = model(x)
        p = z.sigmoid().mean(0)
        return F.cross_entropy(z, y) + F.kl_div(p.log(), torch.full_like(p, 0.1), reduction="sum")

    fit(w, mlp(), loss)


@TABLE.refused(UnsupportedModule, "got mul")
def load_balancing_of_experts(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        p = z.softmax(1)
        share = F.one_hot(p.argmax(1), CLASSES).float().mean(0)
        return F.cross_entropy(z, y) + 0.1 * CLASSES * (share * p.mean(0)).sum()

    fit(w, mlp(), of_outputs(loss))


@TABLE.right()
def gradient_norm_logged(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        assert not norms
        optimizer.step()


@TABLE.right()
def gradient_clipping_before_the_step(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@TABLE.right()
def distillation_from_a_moving_teacher(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    teacher = mlp().requires_grad_(False)
    for x, _ in loader:
        optimizer.zero_grad()
        F.kl_div(model(x).log_softmax(1), teacher(x).softmax(1), reduction="batchmean").backward()
        optimizer.step()


@TABLE.refused(UnsupportedModule, "got sub", after=1)
def teacher_centred_as_in_dino(w: World) -> None:
    """The centre is the average of the teacher's outputs over batches."""
    model, optimizer, loader = w.private(mlp())
    teacher = copy.deepcopy(model).requires_grad_(False)
    centre = torch.zeros(CLASSES)
    for x, _ in loader:
        optimizer.zero_grad()
        t = teacher(x)
        (-((t - centre) / 0.1).softmax(1) * model(x).log_softmax(1)).sum(1).mean().backward()
        optimizer.step()
        centre = 0.5 * centre + 0.5 * t.mean(0)


@TABLE.refused(UnsupportedModule, "got gt")
def pseudo_labels_with_a_batch_threshold(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        confidence, label = z.detach().softmax(1).max(1)
        keep = (confidence > confidence.mean()).float()
        return (F.cross_entropy(z, label, reduction="none") * keep).mean()

    fit(w, mlp(), of_outputs(loss))


@TABLE.right()
def pseudo_labels_with_a_public_threshold(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        confidence, label = z.detach().softmax(1).max(1)
        keep = (confidence > 0.34).float()
        return (F.cross_entropy(z, label, reduction="none") * keep).mean()

    fit(w, mlp(), of_outputs(loss))


@TABLE.refused(UnsupportedModule, "got sub", kind=SCALARS)
def targets_standardised_over_the_batch(w: World) -> None:
    fit(w, mlp(1), of_outputs(lambda z, y: F.mse_loss(z, (y - y.mean()) / (y.std() + 1e-3))))


@TABLE.refused(UnsupportedModule, texts.OTHER_GRADIENTS)
def custom_function_inside_the_model(w: World) -> None:
    class Normed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, z: Tensor) -> Tensor:
            return z.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g / (g.norm() + 1e-3)

    fit(w, Between(lambda m, h: Normed.apply(h)))


@TABLE.right()
def gradient_reversal(w: World) -> None:
    class Reversed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, z: Tensor) -> Tensor:
            return z.view_as(z)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return -g

    fit(w, Between(lambda m, h: Reversed.apply(h)))


@TABLE.refused(UnsupportedModule, texts.OTHER_GRADIENTS)
def tensor_hook_inside_the_model(w: World) -> None:
    """``register_hook`` on activations divides by the norm over the batch."""

    def middle(m: Any, h: Tensor) -> Tensor:
        if h.requires_grad:
            h.register_hook(lambda g: g - g.mean(0))
        return h

    fit(w, Between(middle))


@TABLE.refused(UnsupportedModule, texts.OTHER_GRADIENTS)
def full_backward_hook_that_mixes(w: World) -> None:
    model = mlp()
    model[1].register_full_backward_hook(lambda m, gi, go: (gi[0] - gi[0].mean(0),))
    fit(w, model)


@TABLE.right()
def hook_on_parameters(w: World) -> None:
    model = mlp()
    seen: list[Tensor] = []
    for p in model.parameters():
        p.register_hook(seen.append)
    with pytest.warns(HookWarning, match="do not call"):
        fit(w, model)
    assert not seen


@TABLE.right()
def post_accumulate_hook(w: World) -> None:
    model = mlp()
    seen: list[Tensor] = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda q: seen.append(q.grad.clone()))
    with pytest.warns(HookWarning, match="do not call"):
        fit(w, model)
    for i, g in enumerate(seen):
        w.released[str(i)] = g


@TABLE.right(random=True)
def alpha_dropout(w: World) -> None:
    fit(
        w,
        nn.Sequential(
            nn.Linear(FEATURES, HIDDEN), nn.SELU(), nn.AlphaDropout(0.2), nn.Linear(HIDDEN, CLASSES)
        ),
    )


@TABLE.right(kind=IMAGES, random=True)
def channels_dropped(w: World) -> None:
    fit(
        w,
        nn.Sequential(nn.Conv2d(2, 3, 3), nn.Dropout2d(0.3), nn.Flatten(), nn.Linear(12, CLASSES)),
    )


@TABLE.right()
def dropout_of_the_same_units_for_all(w: World) -> None:
    """Variational dropout: one mask for the batch."""
    fit(w, Between(lambda m, h: h * (torch.rand(1, h.shape[1]) > 0.3).float()))


@TABLE.right()
def fake_quantised_by_a_fixed_scale(w: World) -> None:
    fit(w, Between(lambda m, h: torch.fake_quantize_per_tensor_affine(h, 0.05, 0, -128, 127)))


@TABLE.refused(UnsupportedModule, "keeps the range of what it sees")
def fake_quantised_by_an_observer(w: World) -> None:
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    fake = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
    fit(w, Between(lambda m, h: m.fake(h), fake=fake))


@TABLE.right()
def fake_quantised_row_by_row(w: World) -> None:
    def middle(m: Any, h: Tensor) -> Tensor:
        scale = h.detach().abs().amax(1, keepdim=True) / 127 + 1e-6
        return h + ((h / scale).round() * scale - h).detach()

    fit(w, Between(middle))


@TABLE.right()
def functional_call_of_the_inner_module(w: World) -> None:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        inner = dict(model.named_parameters())
        return F.cross_entropy(torch.func.functional_call(model, inner, (x,)), y)

    fit(w, mlp(), loss)


@TABLE.right()
def orthogonal_weights(w: World) -> None:
    model = mlp()
    nn.utils.parametrizations.orthogonal(model[0])
    fit(w, model)


@TABLE.right()
def weight_norm_by_parametrization(w: World) -> None:
    model = mlp()
    nn.utils.parametrizations.weight_norm(model[0])
    fit(w, model)


@TABLE.right()
def checkpoint_in_the_middle(w: World) -> None:
    from torch.utils.checkpoint import checkpoint

    fit(
        w,
        Between(
            lambda m, h: checkpoint(m.more, h, use_reentrant=False), more=nn.Linear(HIDDEN, HIDDEN)
        ),
    )


@TABLE.refused(UnsupportedModule, "whose first dimension is the batch", after=1)
def experts_by_sort_and_split(w: World) -> None:
    def middle(m: Any, h: Tensor) -> Tensor:
        choice = h.argmax(1) % 2
        order = choice.argsort(stable=True)
        parts = h[order].split(torch.bincount(choice, minlength=2).tolist())
        out = torch.cat([expert(part) for expert, part in zip(m.experts, parts, strict=True)])
        return out[order.argsort()]

    fit(w, Between(middle, experts=nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(2))))


@TABLE.right()
def experts_by_index_copy(w: World) -> None:
    def middle(m: Any, h: Tensor) -> Tensor:
        choice, out = h.argmax(1) % 2, torch.zeros_like(h)
        for number, expert in enumerate(m.experts):
            rows = (choice == number).nonzero().flatten()
            out = out.index_copy(0, rows, expert(h[rows]))
        return out

    fit(w, Between(middle, experts=nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(2))))


@TABLE.right()
def rows_unbound_and_stacked(w: World) -> None:
    fit(w, Between(lambda m, h: torch.stack([row / (1 + row.norm()) for row in h.unbind()])))


@TABLE.right()
def rows_in_chunks(w: World) -> None:
    fit(w, Between(lambda m, h: torch.cat([m.more(part) for part in h.chunk(2)]), more=nn.Tanh()))


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS, kind=TOKENS)
def words_of_the_next_record(w: World) -> None:
    fit(w, Reader(lambda m, ids, h: h + m.table(ids.roll(1, 0)).detach()))


@TABLE.right(kind=TOKENS)
def positions_by_cumulative_sum_of_the_mask(w: World) -> None:
    def middle(m: Any, ids: Tensor, h: Tensor) -> Tensor:
        return h + (ids != 3).long().cumsum(1)[..., None] / 10

    fit(w, Reader(middle))


@TABLE.right()
def learning_rate_by_plateau(w: World) -> None:
    """The schedule follows the training loss; a rate of 0 stays 0."""
    model, optimizer, loader = w.private(mlp())
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    for x, y in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model, x, y)
        loss.backward()
        optimizer.step()
        schedule.step(0.5)


@TABLE.refused(UnsupportedModule, "got item")
def scaled_by_its_own_number(w: World) -> None:
    """``loss / loss.item()``."""

    def loss(z: Tensor, y: Tensor) -> Tensor:
        found = F.cross_entropy(z, y)
        return found / found.item()

    fit(w, mlp(), of_outputs(loss))


@TABLE.refused(UnsupportedModule, "got div")
def uncertainty_weight_by_a_detached_mean(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        one, two = F.cross_entropy(z, y), z.square().mean()
        return one + two * (one.detach() / two.detach())

    fit(w, mlp(), of_outputs(loss))


@TABLE.refused(UnsupportedModule, "got square")
def moment_matching(w: World) -> None:
    fit(w, mlp(), of_outputs(lambda z, y: F.cross_entropy(z, y) + z.mean(0).square().sum()))


@TABLE.right()
def maximum_mean_discrepancy_to_constants(w: World) -> None:
    fixed = torch.randn(4, CLASSES, generator=torch.Generator().manual_seed(3))

    def loss(z: Tensor, y: Tensor) -> Tensor:
        return -(-(z[:, None] - fixed).square().sum(-1)).exp().mean()

    fit(w, mlp(), of_outputs(loss))


@TABLE.refused(UnsupportedModule, texts.OTHER_GRADIENTS)
def mixed_in_complex_numbers(w: World) -> None:
    fit(w, Between(lambda m, h: torch.fft.ifft(torch.fft.fft(h, dim=0) * 0.5, dim=0).real))


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def temperature_from_the_largest_record(w: World) -> None:
    fit(w, Between(lambda m, h: h / h.detach().norm(dim=1).max().clamp(min=50.0) * 50.0))

"""Losses: sums over records with constant factors, or refused; against replaced records."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import dpkern
import dpkern.nn.losses
from dpkern.base.errors import UnsupportedModule
from dpkern.engine.provenance import YieldedBatch, track
from dpkern.engine.provenance.states import Mixed, PerRecord, RecordSum
from dpkern.engine.provenance.tensor import state_of
from tests.engine.provenance_truth import check_states

B = 6


LOSSES = {
    # code: state
    "cross entropy": ("F.cross_entropy(z, y)", "mean"),
    "cross entropy, sum": ("F.cross_entropy(z, y, reduction='sum')", "sum"),
    "cross entropy, none": ("F.cross_entropy(z, y, reduction='none').mean()", "mean"),
    "weights of rows": ("(F.cross_entropy(z, y, reduction='none') * w).mean()", "mean"),
    "label smoothing": ("F.cross_entropy(z, y, label_smoothing=0.1)", "mean"),
    "class weights": ("F.cross_entropy(z, y, weight=torch.rand(5))", "mean"),
    "class weights, smoothed": (
        "F.cross_entropy(z, y, weight=torch.rand(5), label_smoothing=0.1)",
        "mean",
    ),
    "ignored targets": ("F.cross_entropy(z, y, ignore_index=2)", "mean"),
    "tokens": ("F.cross_entropy(h.flatten(0, 1), t.flatten())", "mean"),
    "tokens, classes second": ("F.cross_entropy(h.transpose(1, 2), t)", "mean"),
    "next token": ("F.cross_entropy(h[:, :-1].reshape(-1, 4), t[:, 1:].reshape(-1))", "mean"),
    "ignored tokens": ("F.cross_entropy(h.flatten(0, 1), t.flatten(), ignore_index=0)", "mean"),
    "focal": ("p = F.cross_entropy(z, y, reduction='none'); ((1 - (-p).exp()) ** 2 * p).mean()",
              "mean"),
    "distillation": (
        "F.kl_div(z.log_softmax(1), teacher.softmax(1), reduction='batchmean') * 4", "mean"),
    "entropy bonus": (
        "F.cross_entropy(z, y) - 0.1 * -(z.softmax(1) * z.log_softmax(1)).sum(1).mean()", "mean"),
    "two losses": ("F.cross_entropy(z, y) + 0.5 * F.mse_loss(h, torch.zeros(6, 7, 4))", "mean"),
    "scaled": ("F.cross_entropy(z, y) * 1024.0", "mean"),
    "sum over rows by hand": ("F.cross_entropy(z, y, reduction='sum') / len(y)", "sum"),
    "row by row": ("sum(F.cross_entropy(a[None], b[None]) for a, b in zip(z, y)) / len(y)", "mean"),
    "huber": ("F.huber_loss(z, torch.zeros(6, 5))", "mean"),
    "binary": ("F.binary_cross_entropy_with_logits(z[:, 0], (y > 1).float())", "mean"),
    "squared error": ("(z[:, 0] - y).pow(2).mean()", "mean"),
    "variational": (
        "F.mse_loss(h, torch.zeros(6, 7, 4), reduction='sum') / 6 "
        "- 0.5 * (1 + z - z.pow(2) - z.exp()).sum() / 6", "sum"),
    "policy gradient": ("-(dist.Categorical(logits=z).log_prob(y) * w).mean()", "mean"),
    "pairs within a record": ("F.cosine_similarity(h[:, 0], h[:, 1]).neg().mean()", "mean"),
    "contrast within a record": (
        "F.cross_entropy(h @ h[:, :1].transpose(1, 2), torch.zeros(6, 1, dtype=torch.long))",
        "mean"),
    "triplets of views": ("F.triplet_margin_loss(h[:, 0], h[:, 1], h[:, 2])", "mean"),
    "margins": ("F.multi_margin_loss(z, y)", "mean"),
    "own normalisation": ("(h.sum(2) * m).sum(1).div(m.sum(1).clamp(min=1)).mean()", "mean"),
    "rows that count": ("F.cross_entropy(z, y, reduction='none')[y > 1].mean()", "mean"),
    "dpkern.losses": ("losses.per_sample_cross_entropy(h, t, ignore_index=0).mean()", "mean"),
    "ctc": ("F.ctc_loss(h.log_softmax(2).transpose(0, 1), 1 + t[:, :1] % 3, (7,) * 6, (1,) * 6)",
            "mean"),
    "root of a mean": ("F.mse_loss(z, torch.zeros(6, 5)).sqrt()", "mixed"),
    "logarithm of a mean": ("F.cross_entropy(z, y).log()", "mixed"),
    "InfoNCE": (
        "F.cross_entropy(z @ h[:, 0].repeat(1, 2)[:, :5].t(), torch.arange(6))", "mixed"),
    "Barlow": ("(z.t() @ z / 6 - torch.eye(5)).pow(2).sum()", "mixed"),
    "rolled triplets": (
        "F.triplet_margin_loss(z, h[:, 0, :1].expand(6, 5), z.roll(1, 0))", "mixed"),
    "correlation": ("((z[:, 0] - z[:, 0].mean()) * w).mean()", "mixed"),
    "variance over the batch": ("z.var(0).sum()", "mixed"),
    "centre over the batch": ("(z - z.mean(0)).pow(2).mean()", "mixed"),
    "standardised batch": ("((z - z.mean(0)) / z.std(0)).abs().mean()", "mixed"),
    "hardest rows": ("F.cross_entropy(z, y, reduction='none').topk(3).values.mean()", "mixed"),
    "worst row": ("F.cross_entropy(z, y, reduction='none').max()", "mixed"),
    "dice": ("1 - 2 * (z.sigmoid() * w[:, None]).sum() / (z.sigmoid().sum() + w.sum())", "mixed"),
    "total as a number": (
        "q = F.cross_entropy(z, y, reduction='none'); q.sum() / q.sum().item()", "mixed"),
    "detached total": (
        "q = F.cross_entropy(z, y, reduction='none'); (q / q.sum().detach()).sum()",
                       "mixed"),
    "normalised weights": (
        "(F.cross_entropy(z, y, reduction='none') * w).sum() / w.sum()", "mixed"),
    "all pairs": ("(z[:, :1] - z[:, :1].t()).relu().mean()", "mixed"),
    "cdist": ("torch.cdist(z, z).mean()", "mixed"),
    "softmax over the batch": ("(z.softmax(0)[:, 0] * w).sum()", "mixed"),
    "square of a sum": ("z.sum().square()", "mixed"),
    "product of means": ("z.mean() * h.mean()", "mixed"),
    "median": ("z.sum(1).median()", "mixed"),
    "mean tokens of the batch": ("(h.sum(2) * m).sum() / m.sum()", "mixed"),
    "a mean beside a sum": ("z.mean() + h.sum()", "mixed"),
    "broadcast target": ("F.mse_loss(z[:, :1], w)", "mixed"),
    "margin against all": (
        "F.margin_ranking_loss(w, z[:, 0].roll(1), torch.ones(6))", "mixed"),
    "own distance": ("F.triplet_margin_with_distance_loss(z, z, z, distance_function=apart)",
                     "mixed"),
    "weights of classes in the batch": (
        "F.cross_entropy(z, y, weight=F.one_hot(y, 5).double().mean(0))", "mixed"),
    "targets of other records": ("F.cross_entropy(z, y.roll(1))", "mixed"),
    "outputs of other records": ("F.cross_entropy(z.roll(1, 0), y)", "mixed"),
}  # fmt: skip


@pytest.mark.parametrize(("code", "expected"), LOSSES.values(), ids=LOSSES)
def test_losses(code: str, expected: str) -> None:
    """Losses are sums over records or mixed; sums are additive, also with replaced targets."""
    random = torch.Generator().manual_seed(5)
    teacher = torch.randn(B, 5, generator=random)
    names = "z y h t w m".split()
    tensors = [
        torch.randn(B, 5, generator=random, dtype=torch.float64),
        torch.tensor([0, 1, 2, 3, 2, 4]),
        torch.randn(B, 7, 4, generator=random, dtype=torch.float64),
        torch.randint(4, (B, 7), generator=random),
        torch.randn(B, generator=random, dtype=torch.float64),
        torch.rand(B, 7, generator=random) < 0.5,
    ]

    def operation(*values: Any) -> Any:
        scope = {
            "torch": torch, "F": F, "dist": torch.distributions, "losses": dpkern.losses,
            "teacher": teacher.double(), "apart": lambda a, b: (a - b.mean(0)).norm(dim=1),
            **dict(zip(names, values, strict=True)),
        }  # fmt: skip
        *lines, last = code.split("; ")
        exec("\n".join(lines), scope)
        return eval(last, scope)

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check_states(operation, tensors, [0] * 6, B)
            batch = YieldedBatch(B)
            given = [track(t.clone(), PerRecord(batch, batch.all)) for t in tensors]
            state = state_of(operation(*given))
    finally:
        torch.set_default_dtype(before)
    assert (state.reduction if isinstance(state, RecordSum) else "mixed") == expected
    if expected == "mixed":
        assert isinstance(state, Mixed)
        assert state.how


def _train(loss: Any, reduction: str, steps: int = 12) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 5)
    data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randint(5, (64,)))
    _, optimizer, loader = dpkern.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=torch.utils.data.DataLoader(data, batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        loss_reduction=reduction,
    )
    for _ in range(steps // 8 + 1):
        for x, y in loader:
            optimizer.zero_grad()
            loss(model, x, y).backward()
            optimizer.step()


RIGHT_SCALES: dict[str, tuple[Any, str]] = {
    "sum by hand": (lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum") / len(x), "mean"),
    "half of it": (lambda m, x, y: 0.5 * m(x).square().sum() / len(x), "mean"),
    "loss scale": (lambda m, x, y: F.cross_entropy(m(x), y) * 1024, "mean"),
    "sum by a constant": (lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum") / 8, "sum"),
    "two passes": (lambda m, x, y: F.cross_entropy(m(x), y) + 0.1 * m(x).square().mean(), "mean"),
}  # fmt: skip

FOLLOWING_SCALES: dict[str, tuple[Any, str]] = {
    "sum by the expected size": (
        lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum") / 8, "mean"),
    "sum alone, by a tensor": (
        lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum") / torch.tensor(8.0), "mean"),
    "mean times size": (lambda m, x, y: F.cross_entropy(m(x), y) * len(x), "mean"),
    "mean by size": (lambda m, x, y: F.cross_entropy(m(x), y) / len(x), "mean"),
    "sum by size": (lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum") / len(x), "sum"),
    "one term of two": (
        lambda m, x, y: F.cross_entropy(m(x), y) + F.cross_entropy(m(x), y) / len(x), "mean"),
}  # fmt: skip


@pytest.mark.parametrize(("loss", "reduction"), RIGHT_SCALES.values(), ids=RIGHT_SCALES)
def test_constants_scale_losses(loss: Any, reduction: str) -> None:
    _train(loss, reduction)


@pytest.mark.parametrize(("loss", "reduction"), FOLLOWING_SCALES.values(), ids=FOLLOWING_SCALES)
def test_factors_that_follow_the_number_of_records_are_refused(loss: Any, reduction: str) -> None:
    with pytest.raises(UnsupportedModule, match=r"a factor of .* in a batch of .*"):
        _train(loss, reduction)


def test_a_write_through_a_view_is_found_at_the_entrance() -> None:
    def loss(model: Any, x: Any, y: Any) -> Any:
        if len(x) > 1:
            x[0].copy_(x[1])
        return F.cross_entropy(model(x), y)

    with pytest.raises(UnsupportedModule, match="through another view"):
        _train(loss, "mean")


@pytest.mark.parametrize("turned", ["targets", "outputs"])
def test_the_usual_loss_in_a_loop_is_that_of_each_record_with_its_own_target(turned: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    data = TensorDataset(torch.randn(32, 4), torch.randint(0, 3, (32,)))
    module, _, loader = dpkern.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, 16),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    x, y = next(iter(loader))
    z = module(x)
    z, y = (z, y.roll(1)) if turned == "targets" else (z.roll(1, 0), y)
    loss = F.cross_entropy(z, y)
    with pytest.raises(dpkern.UnsupportedModule, match="rows of different samples"):
        loss.backward()

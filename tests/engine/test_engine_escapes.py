"""Ways around the states of tensors: shared memory, hooks, public passes, writes, places."""

from __future__ import annotations

import math
import queue
import random
import statistics
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dpkern.base.errors import DPKernError, PrivacyError, UnsupportedModule
from dpkern.engine.guard import KEPT
from dpkern.engine.optimizer import PUBLIC
from dpkern.engine.provenance.boundary import WRITTEN
from dpkern.engine.provenance.divisors import _RETURNS, _ScaleBySize
from dpkern.engine.provenance.leaves import OWN_FUNCTIONS
from dpkern.engine.provenance.places import PLACES
from dpkern.engine.provenance.rules import NODES
from dpkern.engine.provenance.statistic import DECIDED, READ
from tests.engine.engine_run import Run

Body = Callable[[Run, Tensor, Tensor, int], Any]


def train(body: Body, module: nn.Module | None = None) -> Run:
    run = Run(noise_multiplier=1.0, unsafe_seed=None, **({"module": module} if module else {}))
    for i, (x, y) in enumerate(run.loader):
        run.optimizer.zero_grad()
        body(run, x, y, i)
        run.optimizer.step()
    return run


def plain(run: Run, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(run.module(x), y).backward()


def hooked(hook: Callable[[Tensor], Tensor | None]) -> Body:
    def body(run: Run, x: Tensor, y: Tensor, i: int) -> None:
        out = run.module(x)
        out.register_hook(hook)
        F.cross_entropy(out, y).backward()

    return body


def public(loss: Callable[[Run, Tensor, Tensor], Tensor]) -> Body:
    def body(run: Run, x: Tensor, y: Tensor, i: int) -> None:
        plain(run, x, y)
        with run.engine.public():
            loss(run, x, y).backward()

    return body


def written(write: Callable[[nn.Linear, Tensor], Any]) -> Body:
    def body(run: Run, x: Tensor, y: Tensor, i: int) -> None:
        with torch.no_grad():
            write(run.module[0], x)  # type: ignore[index]
        plain(run, x, y)

    return body


def added_later(add: Callable[[nn.Module], Any]) -> Body:
    def body(run: Run, x: Tensor, y: Tensor, i: int) -> None:
        if i == 1:
            add(run.module[1])  # type: ignore[index]
        plain(run, x, y)

    return body


def after(use: Callable[[Run, Any], Any], scale: Any = lambda seen: 1.0) -> Body:
    """Take ``loss.item()`` of each batch after its backward pass.

    Args:
        use: called with the number.
        scale: factor of the loss, given the numbers of earlier batches.
    """
    seen: list[Any] = []

    def body(run: Run, x: Tensor, y: Tensor, i: int) -> None:
        if not i:
            seen.clear()
        loss = F.cross_entropy(run.module(x), y) * scale(seen)
        loss.backward()
        seen.append(loss.item())
        with torch.no_grad():
            use(run, seen[-1])

    return body


def late_weights() -> Body:
    """Weigh the loss by the last one, with no number in the first batch."""
    last: list[float] = []

    def body(run: Run, x: Tensor, y: Tensor, i: int) -> None:
        loss = F.cross_entropy(run.module(x), y)
        if i:
            loss = loss * math.exp(-last[-1])
        loss.backward()
        last.append(loss.item())

    return body


def weighted_by_gradients() -> Body:
    """Weigh the loss by a number that a gradient hook of the batch before has read."""
    norms = [1.0]

    def note(gradient: Tensor) -> None:
        norms.append(float(gradient.norm()))

    def body(run: Run, x: Tensor, y: Tensor, i: int) -> None:
        out = run.module(x)
        out.register_hook(note)
        (F.cross_entropy(out, y) * norms[-1]).backward()

    return body


def weighted_rows(weight: Callable[[float], complex]) -> Body:
    """Weigh the samples by a function of the last loss."""
    last: list[float] = []

    def body(run: Run, x: Tensor, y: Tensor, i: int) -> None:
        loss = F.cross_entropy(run.module((x * (weight(last[-1]) if i else 1j)).real), y)
        loss.backward()
        last.append(loss.item())

    return body


def written_constant(write: Callable[[Tensor, float], Any]) -> Body:
    """Weigh the features by a tensor that is written between steps, where torch does not count."""
    weights, last = torch.ones(4), [1.0]

    def body(run: Run, x: Tensor, y: Tensor, i: int) -> None:
        write(weights, math.exp(-last[-1]) if i else 1.0)
        loss = F.cross_entropy(run.module(x * weights), y)
        loss.backward()
        last.append(loss.item())

    return body


def times(factor: Callable[[Tensor, Tensor], Any]) -> Body:
    """Multiply the samples by a number."""
    return lambda r, x, y, i: plain(r, x * factor(x, y), y)


def first(run: Run) -> nn.Linear:
    return run.module[0]  # type: ignore[no-any-return, index]


def mean_row(x: Tensor) -> Tensor:
    return x.mean(0).expand(6, 4).clone()


REFUSED: dict[str, Body] = {
    "hook by the spread of the batch": hooked(lambda g: g / (g.std(0) + 1e-3)),
    "hook by the norm of the batch": hooked(lambda g: g / g.norm()),
    "hook that centres": hooked(lambda g: g - g.mean(0)),
    "hook that flips": hooked(lambda g: g.flip(0)),
    "module hook that flips, added later": added_later(
        lambda m: m.register_full_backward_hook(lambda m, gi, go: (gi[0].flip(0),))
    ),
    "module hook by the norm, added later": added_later(
        lambda m: m.register_full_backward_hook(lambda m, gi, go: (gi[0] / gi[0].norm(),))
    ),
    "parameter on samples in public": public(lambda r, x, y: F.linear(x, r.module[0].weight).sum()),
    "penalty towards the samples in public": public(
        lambda r, x, y: (r.module[0].weight - x.mean(0)).square().sum()
    ),
    "labels of samples in public": public(
        lambda r, x, y: F.cross_entropy(r.module(torch.ones(len(x), 4)), y)
    ),
    "copy into a parameter": written(lambda m, x: m.weight.copy_(mean_row(x))),
    "copy into its data": written(lambda m, x: m.weight.data.copy_(mean_row(x))),
    "average into a parameter": written(lambda m, x: m.weight.lerp_(mean_row(x), 0.1)),
    "data set": written(lambda m, x: setattr(m.weight, "data", mean_row(x))),
    "first rows only": lambda r, x, y, i: F.cross_entropy(r.module(x[:1]), y[:1]).backward(),
    "output gradients of other samples": lambda r, x, y, i: F.cross_entropy(
        r.module(x), y, reduction="none"
    ).backward(y.float() / (1 + y.sum())),
    "loss filled into a parameter": after(lambda r, v: first(r).weight.fill_(v)),
    "loss as initial value": after(lambda r, v: nn.init.constant_(first(r).weight, v)),
    "parameter drawn by a number of the loss": after(
        lambda r, v: first(r).weight.lerp_(torch.zeros(6, 4), 0.1 * v)
    ),
    "next loss times a number without its mark": after(
        lambda r, v: None, lambda seen: float(seen[-1] / 2) if seen else 1.0
    ),
    "parameters times the loss at once": after(
        lambda r, v: torch._foreach_mul_(list(r.module.parameters()), v)
    ),
    "parameters plus losses at once": after(
        lambda r, v: torch._foreach_add_(
            [*r.module.parameters()], [v for _ in r.module.parameters()]
        )
    ),
    "parameters plus samples at once": written(
        lambda m, x: torch._foreach_add_([m.weight], [x.mean()])
    ),
    "checkpointed loss": lambda r, x, y, i: checkpoint(
        lambda z: F.cross_entropy(z, y), r.module(x), use_reentrant=True
    ).backward(),
    "other model calibrated": lambda r, x, y, i: F.batch_norm(
        x, torch.zeros(4), torch.ones(4), training=True
    ),
}


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("name", REFUSED)
def test_samples_do_not_get_around_the_clipping(name: str) -> None:
    with pytest.raises(DPKernError):
        train(REFUSED[name])


def test_memory_given_to_others_is_a_copy() -> None:
    run = Run()
    x, _ = next(iter(run.loader))
    before = x.sum().item()
    array = x.numpy()
    array -= array.mean(0)
    torch.from_dlpack(x).zero_()
    x.as_subclass(Tensor).zero_()
    assert x.sum().item() == before


CONDITIONS: dict[str, tuple[Body, str]] = {
    "decision": (lambda r, x, y, i: plain(r, -x if (x.max() > 9).any() else x, y), DECIDED),
    "weights by place": (
        lambda r, x, y, i: (
            (F.cross_entropy(r.module(x), y, reduction="none") * torch.arange(len(x)))
            .mean()
            .backward()
        ),
        PLACES,
    ),
    "part of the losses by place": (
        lambda r, x, y, i: F.cross_entropy(r.module(x)[:2], y[:2]).backward(),
        PLACES,
    ),
    "number read as float": (lambda r, x, y, i: plain(r, x * (float(x.max()) / 3), y), READ),
    "root of a number": (
        lambda r, x, y, i: (
            (loss := F.cross_entropy(r.module(x), y)) * math.sqrt(loss.item() + 1)
        ).backward(),
        READ,
    ),
    "size of the chosen rows": (times(lambda x, y: 1 + y[y == 1].shape[0]), READ),
    "length of the chosen rows": (times(lambda x, y: 1 + len(x[y == 1])), READ),
    "number of the chosen entries": (times(lambda x, y: 1 + x[x > 0].numel()), READ),
    "bytes of the chosen rows": (times(lambda x, y: 1 + y[y == 1].nbytes), READ),
    "number of classes in the batch": (times(lambda x, y: y.unique().numel()), READ),
    "number of the chosen rows by a function": (times(lambda x, y: torch.numel(y[y == 1])), READ),
    "number of the chosen rows by a loop": (times(lambda x, y: sum(1 for _ in y[y == 1])), READ),
    "number of pieces of the chosen rows": (times(lambda x, y: len(x[y == 1].chunk(9))), READ),
    "stride of the chosen rows": (times(lambda x, y: x[y == 1].T.contiguous().stride(0)), READ),
    "number of entries that are not zero": (times(lambda x, y: x.relu().to_sparse()._nnz()), READ),
    "rows up to a count": (times(lambda x, y: 1 + len(x[: (y == 1).sum()])), READ),
    "rows narrowed to a count": (times(lambda x, y: 1 + len(x.narrow(0, 0, (y > 0).sum()))), READ),
    "rows repeated as counts say": (times(lambda x, y: len(torch.repeat_interleave(y))), READ),
    "first byte of the storage": (times(lambda x, y: x.untyped_storage()[0]), READ),
    "number of positions": (times(lambda x, y: 1 + (y == 1).nonzero().size(0)), READ),
    "number of positions by where": (times(lambda x, y: 1 + len(torch.where(y == 1)[0])), READ),
    "entries of a statistic by a mask": (
        times(lambda x, y: 1 + x.mean(0)[x.mean(0) > 0].numel()),
        READ,
    ),
    "weights of the next loss": (
        after(lambda r, v: None, lambda seen: math.exp(-seen[-1]) if seen else 1.0),
        READ,
    ),
    "weights of the next loss by numpy": (
        after(lambda r, v: None, lambda seen: np.exp(-seen[-1]) if seen else 1.0),
        READ,
    ),
    "weights of the next loss of 32 bits": (
        after(lambda r, v: None, lambda seen: np.float32(np.exp(-seen[-1])) if seen else 1.0),
        READ,
    ),
    "weights of the next loss by a number of numpy": (
        after(lambda r, v: None, lambda seen: np.exp(-seen[-1]) if seen else 1.0),
        READ,
    ),
    "weights of the next loss by a mean": (
        after(lambda r, v: None, lambda seen: statistics.mean(seen) if seen else 1.0),
        READ,
    ),
    "weights of the next loss from the second batch on": (late_weights(), READ),
    "weights by the norm of the gradient before": (weighted_by_gradients(), READ),
    "complex weights of the next batch": (weighted_rows(lambda v: complex(v, 0.0)), READ),
    "constant written by numpy": (written_constant(lambda t, v: t.numpy().fill(v)), READ),
    "constant written through data": (written_constant(lambda t, v: t.data.fill_(v)), READ),
    "lowest loss": (after(lambda r, v: min(v, 0.5)), DECIDED),
    "decision by a rounded loss": (after(lambda r, v: round(v, 3) > 1), DECIDED),
    "schedule by the loss": (
        after(lambda r, v: torch.optim.lr_scheduler.ReduceLROnPlateau(r.optimizer).step(v)),
        DECIDED,
    ),
    "weights of the next loss by whole numbers": (
        after(lambda r, v: None, lambda seen: int(1000 * seen[-1]) / 701 if seen else 1.0),
        READ,
    ),
    "weights of the next loss by a number cut": (
        after(lambda r, v: None, lambda seen: math.floor(1000 * seen[-1]) / 701 if seen else 1.0),
        READ,
    ),
    "decision by a count": (
        lambda r, x, y, i: (plain(r, x, y), 1 if (y > 0).sum().item() else 2),
        DECIDED,
    ),
    "parameter filled by a function of the loss": (
        after(lambda r, v: first(r).weight.fill_(math.exp(-v))),
        WRITTEN,
    ),
    "parameter as the target of a product": (
        after(lambda r, v: torch.mul(first(r).weight, 0.5, out=first(r).weight)),
        WRITTEN,
    ),
    "parameter cut at a function of the loss": (
        after(lambda r, v: first(r).weight.clamp_(max=math.exp(v))),
        WRITTEN,
    ),
    "parameters loaded between steps": (
        after(lambda r, v: r.module.load_state_dict(r.module.state_dict())),
        WRITTEN,
    ),
    "decision by item": (lambda r, x, y, i: plain(r, -x if (x > 9).any().item() else x, y), READ),
    "array of the outputs": (
        lambda r, x, y, i: (
            F.cross_entropy(z := r.module(x), y) * float(z.detach().numpy().max() > 0)
        ).backward(),
        READ,
    ),
    "hook on a node": (
        lambda r, x, y, i: (
            (z := r.module(x)).grad_fn.register_prehook(lambda g: (g[0] / g[0].norm(),)),
            F.cross_entropy(z, y).backward(),
        ),
        NODES,
    ),
    "rows overwritten": (
        lambda r, x, y, i: (
            x.__setitem__(slice(2), torch.zeros(2, x.shape[1])),
            plain(r, x, y),
        ),
        PLACES,
    ),
    "label at a place": (lambda r, x, y, i: (y.__setitem__(0, 1), plain(r, x, y)), PLACES),
    "row cleared through a view": (lambda r, x, y, i: (x[0].zero_(), plain(r, x, y)), PLACES),
    "tensor that torch fills with a statistic": (
        lambda r, x, y, i: plain(r, x * torch.full((1,), x.std().detach()), y),  # type: ignore[arg-type]
        READ,
    ),
    "sum of constants with a factor of samples": (
        lambda r, x, y, i: plain(
            r, x * torch.add(torch.ones(1), torch.ones(1), alpha=x.std().detach()), y
        ),
        READ,
    ),
    "penalty in public": (public(lambda r, x, y: r.module[0].weight.square().sum()), PUBLIC),
}


@pytest.mark.filterwarnings("ignore::dpkern.LossWarning")  # of means over slices
@pytest.mark.parametrize("name", CONDITIONS)
def test_what_cannot_be_followed_is_a_condition(name: str) -> None:
    body, condition = CONDITIONS[name]
    assert condition in train(body).engine.step.ledger.conditions
    assert condition not in train(lambda r, x, y, i: plain(r, x, y)).engine.step.ledger.conditions


@pytest.mark.parametrize(
    "use",
    [
        lambda r, v: [p.clamp_(-0.01, 0.01) for p in r.module.parameters()],
        lambda r, v: first(r).weight.renorm_(2, 0, 1.0),
        lambda r, v: print((first(r).weight * v).norm(), first(r).weight.abs().max()),
    ],
    ids=["cut", "largest norm", "printed beside the loss"],
)
def test_parameters_changed_by_constants_or_printed_are_no_condition(use: Any) -> None:
    assert WRITTEN not in train(after(use)).engine.step.ledger.conditions


def test_numbers_that_are_printed_are_no_condition() -> None:
    def show(run: Run, value: Any) -> None:
        shown.append(f"{value:.3f} {round(value, 2)} {statistics.mean([value, value])}")
        shown.append(f"{float(value)} {int(100 * value)} {np.float32(value)} {np.mean([value])}")

    shown: list[str] = []
    conditions = train(after(show, lambda seen: 0.5)).engine.step.ledger.conditions
    assert shown
    assert not {READ, DECIDED, WRITTEN} & set(conditions)


@pytest.mark.parametrize(
    "scale", [lambda i: 0.5 + i / 7, lambda i: 1 - i / 7, lambda i: 100 / (i + 9)]
)
def test_ratios_of_a_schedule_are_no_condition(scale: Callable[[int], float]) -> None:
    assert (
        READ
        not in train(
            after(lambda r, v: None, lambda seen: scale(len(seen)))
        ).engine.step.ledger.conditions
    )


def test_ratios_are_a_condition_once_counts_are_read() -> None:
    def body(run: Run, x: Tensor, y: Tensor, i: int) -> None:
        (F.cross_entropy(run.module(x), y) * ((i + 1) / 7)).backward()
        (y == 1).sum().item()

    assert READ in train(body).engine.step.ledger.conditions


def test_percentages_of_a_metric_are_no_condition() -> None:
    def body(run: Run, x: Tensor, y: Tensor, i: int) -> None:
        plain(run, x, y)
        right = (run.module(x).detach().argmax(1) == y).float()
        right.sum(0, keepdim=True).mul_(100.0 / 7 / len(x)).item()

    assert READ not in train(body).engine.step.ledger.conditions


AVERAGES: dict[str, Callable[[list[Tensor], list[nn.Parameter]], Any]] = {
    "one by one": lambda mine, p: [
        a.mul_(0.9).add_(b, alpha=0.1) for a, b in zip(mine, p, strict=True)
    ],
    "copied": lambda mine, p: [a.copy_(b) for a, b in zip(mine, p, strict=True)],
    "all at once": lambda mine, p: torch._foreach_lerp_(mine, p, 0.1),
}


@pytest.mark.parametrize("name", AVERAGES)
def test_averages_of_weights_are_no_condition(name: str) -> None:
    mine: list[Tensor] = []

    def average(run: Run, value: float) -> None:
        weights = list(run.module.parameters())
        mine[:] = mine or [p.detach().clone() for p in weights]
        AVERAGES[name](mine, weights)

    assert WRITTEN not in train(after(average)).engine.step.ledger.conditions


def test_sizes_that_no_values_choose_are_no_condition() -> None:
    run = train(times(lambda x, y: x[:, y.dim() :].numel() / len(x) / x.size(1)))
    assert READ not in run.engine.step.ledger.conditions


def test_sizes_of_a_loss_are_no_condition() -> None:
    def body(run: Run, x: Tensor, y: Tensor, i: int) -> None:
        loss = F.cross_entropy(run.module(x), y)
        loss.backward()
        y[y == 1].sum()
        assert loss.shape == ()
        assert loss.numel() == 1

    assert READ not in train(body).engine.step.ledger.conditions


class Scaling(nn.Module):
    """A linear layer whose outputs an argument scales."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: Tensor, scale: float | Tensor = 1.0) -> Tensor:
        return self.inner(x) * scale


class Keeping(Scaling):
    """It keeps the spread of its outputs until the next pass."""

    def forward(self, x: Tensor, scale: float | Tensor = 1.0) -> Tensor:
        output = super().forward(x, scale)
        self.spread = output.detach().std()
        return output


class Telling(Scaling):
    """It returns the spread of its outputs as a number."""

    def forward(self, x: Tensor, scale: float | Tensor = 1.0) -> Any:
        output = super().forward(x, scale)
        return output, float(output.detach().std())


def by_what_is_kept(run: Run, x: Tensor, y: Tensor, i: int) -> None:
    (F.cross_entropy(run.module(x), y) / run.module.spread).backward()  # type: ignore[operator]


def by_what_is_told(run: Run, x: Tensor, y: Tensor, i: int) -> None:
    output, spread = run.module(x)
    (F.cross_entropy(output, y) / spread).backward()


def by_what_torch_fills(run: Run, x: Tensor, y: Tensor, i: int) -> None:
    scale = torch.full((), x.std().detach())  # type: ignore[arg-type]
    F.cross_entropy(run.module(x, scale), y).backward()


@pytest.mark.parametrize(
    ("module", "body", "condition"),
    [
        (Scaling, by_what_torch_fills, READ),
        (Keeping, by_what_is_kept, KEPT),
        (Telling, by_what_is_told, READ),
    ],
)
def test_statistics_that_the_module_takes_or_hands_out_are_a_condition(
    module: type[nn.Module], body: Body, condition: str
) -> None:
    assert condition in train(body, module()).engine.step.ledger.conditions
    usual = train(lambda r, x, y, i: plain(r, x, y), Scaling())
    assert condition not in usual.engine.step.ledger.conditions


def scaled_by_the_last_loss(change: Callable[[float], Any]) -> Body:
    last: list[float] = [0.0]

    def body(run: Run, x: Tensor, y: Tensor, i: int) -> None:
        loss = F.cross_entropy(run.module(x, change(last[0]) if i else 1.0), y)
        loss.backward()
        last[0] = loss.item()

    return body


def test_a_number_of_samples_is_no_input() -> None:
    with pytest.raises(UnsupportedModule, match=r"input 1 of the module.*got item"):
        train(scaled_by_the_last_loss(lambda v: v), Scaling())


def test_an_input_made_of_a_number_of_samples_is_a_condition() -> None:
    run = train(scaled_by_the_last_loss(math.tanh), Scaling())
    assert READ in run.engine.step.ledger.conditions


@pytest.mark.parametrize("value", [0.07, 1 / 3])
def test_constants_are_no_condition(value: float) -> None:
    """Numbers with few digits may be made anew for every batch, others once."""
    once = torch.tensor(value)

    def body(run: Run, x: Tensor, y: Tensor, i: int) -> None:
        plain(run, x / (torch.tensor(value) if value == 0.07 else once), y)

    assert READ not in train(body).engine.step.ledger.conditions


def test_a_scale_that_returns_with_the_size_follows_it() -> None:
    sizes = [5, 4, 3] * 5
    scales = _ScaleBySize(1 / 4, (5, 5))
    found = [scales.other_size(1 / (size - 1), (size, size)) for size in sizes]
    assert next(place for place, other in enumerate(found) if other) == 2 + _RETURNS


@pytest.mark.parametrize("seed", range(20))
def test_random_scales_follow_no_size(seed: int) -> None:
    draw = random.Random(seed)
    scales = _ScaleBySize(1.0, (8, 8))
    for _ in range(200):
        size = draw.randint(6, 10)
        assert scales.other_size(draw.choice([1.0, 0.3]), (size, size)) is None


def test_a_loss_that_is_read_after_its_backward_pass_is_no_condition() -> None:
    def body(run: Run, x: Tensor, y: Tensor, i: int) -> None:
        loss = F.cross_entropy(run.module(x), y)
        loss.backward()
        assert loss.item() > 0

    assert READ not in train(body).engine.step.ledger.conditions


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g / g.norm()


def test_several_passes_of_the_same_samples_are_no_condition() -> None:
    """The engine's own functions stand behind the outputs of each."""

    def body(run: Run, x: Tensor, y: Tensor, i: int) -> None:
        one, other = run.module(x), run.module(x + 0.01)
        (F.cross_entropy(one, y) + (one - other).square().mean()).backward()

    assert OWN_FUNCTIONS not in train(body).engine.step.ledger.conditions


def test_autograd_functions_of_the_loop_are_a_condition() -> None:
    def body(run: Run, x: Tensor, y: Tensor, i: int) -> None:
        F.cross_entropy(Doubled.apply(run.module(x)), y).backward()

    try:
        conditions = train(body).engine.step.ledger.conditions
    except (PrivacyError, UnsupportedModule):
        return  # or refused, where its result cannot be followed
    assert OWN_FUNCTIONS in conditions


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor, mix: bool = False) -> Tensor:
        h = self.first(x).tanh()
        return self.last(h - h.mean(0).detach() if mix else Doubled.apply(h))


class Careful(Normed):
    def forward(self, x: Tensor, mix: bool = False) -> Tensor:
        h = self.first(x).tanh()
        if torch.isnan(h).any():
            h = torch.zeros_like(h)
        return self.last(h - h.mean(0).detach() if mix else h)


def test_backward_passes_that_are_not_linear_are_refused() -> None:
    with pytest.raises(UnsupportedModule, match="other samples"):
        train(lambda r, x, y, i: plain(r, x, y), Normed())


def test_samples_that_are_not_finite_must_not_change_others() -> None:
    with pytest.raises(UnsupportedModule, match="not finite"):
        train(lambda r, x, y, i: plain(r, x, y), Careful())


@pytest.mark.parametrize("by_name", [False, True])
def test_a_flag_of_the_pass_is_another_pass(by_name: bool) -> None:
    class Flagged(Normed):
        def forward(self, x: Tensor, mix: bool = False) -> Tensor:
            h = self.first(x).tanh()
            return self.last(h - h.mean(0).detach() if mix else h)

    def body(run: Run, x: Tensor, y: Tensor, i: int) -> None:
        out = run.module(x, mix=i > 2) if by_name else run.module(x, i > 2)
        F.cross_entropy(out, y).backward()

    with pytest.raises(UnsupportedModule, match="other samples"):
        train(body, Flagged())


def test_a_thread_may_read_the_loader_ahead() -> None:
    run = Run()
    batches: queue.Queue[Any] = queue.Queue(2)

    def feed() -> None:
        for batch in run.loader:
            batches.put(batch)
        batches.put(None)

    thread = threading.Thread(target=feed)
    thread.start()
    while (batch := batches.get(timeout=30)) is not None:
        run.optimizer.zero_grad()
        plain(run, *batch)
        run.optimizer.step()
    thread.join()
    assert run.engine.step.steps == 6


def test_the_collation_of_a_run_stays() -> None:
    run = Run()
    with pytest.raises(PrivacyError, match="collate_fn"):
        run.loader.collate_fn = list


def test_hooks_that_look_or_scale_each_row_are_fine() -> None:
    assert train(hooked(lambda g: None)).engine.step.steps == 6
    by_row = hooked(lambda g: g / (g.norm(dim=1, keepdim=True) + 1e-3))
    assert train(by_row).engine.step.steps == 6


def repeated(run: Run, x: Tensor, y: Tensor, i: int) -> None:
    """The first sample's loss again and again, by logits and targets that were picked together."""
    logits = run.module(x)
    targets = F.one_hot(y, logits.shape[1]).to(logits.dtype)
    picked = torch.cat([logits, targets], 1)[torch.zeros(len(x), dtype=torch.int64)]
    classes = logits.shape[1]
    F.cross_entropy(picked[:, :classes], picked[:, classes:]).backward()


@pytest.mark.filterwarnings("ignore::dpkern.LossWarning")  # some rows at their places, too
def test_rows_picked_together_with_their_targets_are_refused() -> None:
    with pytest.raises(UnsupportedModule, match="entries of each sample"):
        train(repeated)


def test_weights_that_stay_in_the_place_of_trained_ones_are_refused() -> None:
    """A pass without gradients may have others for itself, as a teacher by functional_call has."""

    def body(run: Run, x: Tensor, y: Tensor, i: int) -> None:
        layer = next(m for m in run.module.modules() if isinstance(m, nn.Linear))
        if i == 1:
            assert layer.bias is not None
            statistic = torch.full_like(layer.bias.detach(), 0.125)
            layer.bias = nn.Parameter(statistic, requires_grad=False)
        with torch.no_grad():
            run.module(x)
        plain(run, x, y)

    with pytest.raises(UnsupportedModule, match="written between forward passes"):
        train(body)

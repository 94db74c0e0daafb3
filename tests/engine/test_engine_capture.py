"""What the capture makes of batches, passes, reductions, clipping styles and checkpoints."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpkern.base.errors import PrivacyError
from dpkern.engine import layers  # noqa: F401  (registers the rules)
from dpkern.engine.capture import Capture
from dpkern.engine.clipping import clipped_sums
from dpkern.engine.group_sums import GroupSums
from dpkern.ops import clip
from tests.engine.engine_oracle import (
    Language,
    agree,
    check,
    draw,
    make,
    mlp,
    plan_for,
    reference_gradients,
    run,
    sample_losses,
    squares,
    tokens,
    total,
    truth,
)

B = 4


def image() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.GroupNorm(2, 6),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 4, 3, stride=2, groups=2, bias=False),
        nn.Flatten(),
        nn.Linear(4 * 4, 5),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "mlp": (mlp, lambda b: draw(b, 5)),
    "sequence": (mlp, lambda b: draw(b, 6, 5)),
    "language": (Language, lambda b: tokens(b, 7)),
    "image": (image, lambda b: draw(b, 3, 6, 6)),
    "lstm": (lambda: Recurrent(), lambda b: draw(b, 4, 5)),
}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.r = nn.LSTM(5, 4, batch_first=True, bidirectional=True)
        self.t = nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.r(x)[0] * self.t


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("batch", [0, 1, 2, 3, 8])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_batch_sizes_and_reductions(
    model: tuple[Callable[[], nn.Module], Callable[[int], Tensor]], batch: int, reduction: str
) -> None:
    build, inputs = model
    check(make(build), (inputs(batch),), reduction=reduction)


def test_an_empty_batch_gives_zeros() -> None:
    module = make(image).double()
    result = run(module, (draw(0, 3, 6, 6),), plan_for(module))
    assert result.batch_size == 0
    assert not any(bool(s.any()) for s in result.sums)


@pytest.mark.parametrize("keep_budget", [0, 1 << 30], ids=["keep-nothing", "keep-all"])
@pytest.mark.parametrize("time", [1, 2, 17, 130, 1024])
def test_lengths(time: int, keep_budget: int) -> None:
    module = make(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    for dtype in (torch.float32, torch.float64):
        check(module, (draw(2, time, 3),), dtype=dtype, keep_budget=keep_budget)


STYLES: dict[str, dict[str, Any]] = {
    "flat": {"bound": 0.4},
    "flat-tiny": {"bound": 1e-6},
    "flat-infinite": {"bound": math.inf},
    "per-layer": {"clipping": "per_layer", "bound": 0.5},
    "per-layer-bounds": {"clipping": "per_layer", "bound": (0.3, 0.1, 2.0, 0.5, 0.2, 0.1)},
    "automatic": {"clipping": "automatic", "bound": 0.7},
    "group": {"clipping": "group", "groups": (0, 1, 1, 0, 2, 2), "bound": 0.6},
    "group-bounds": {"clipping": "group", "groups": (0, 0, 0, 1, 1, 1), "bound": (0.5, 0.1)},
}


@pytest.mark.parametrize("time", [None, 6], ids=["rows", "sequences"])
@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
def test_clipping_styles(style: dict[str, Any], time: int | None) -> None:
    shape = (B, 5) if time is None else (B, time, 5)
    check(make(mlp), (draw(*shape),), **style)


@pytest.mark.parametrize("early", [False, True], ids=["at-the-end", "inside-backward"])
@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
@pytest.mark.parametrize("model", ["sequence", "language", "image"])
def test_every_term_is_bounded(model: str, style: dict[str, Any], early: bool) -> None:
    build, inputs = MODELS[model]
    module = make(build).float()
    style = dict(style)
    bound = style.pop("bound")
    count = len([*module.parameters()])
    if "groups" in style:
        style["groups"] = tuple(i % (max(style["groups"]) + 1) for i in range(count))
    elif isinstance(bound, tuple):
        bound = (bound * count)[:count]
    plan = plan_for(module, bound, **style)
    x = inputs(3)
    x = x.float() if x.is_floating_point() else x
    for b in range(3):
        capture = Capture(module, loss_reduction="mean")
        capture.attach()
        if early:
            capture.make_backward_clipper = lambda c=capture: GroupSums(c, plan)
        sample_losses(module(x[b : b + 1])).mean().backward()
        result = clipped_sums(capture, plan)
        capture.detach()
        assert isinstance(result, clip.ClipResult)
        for group in {block.clip_group for block in plan.blocks}:
            blocks = [block for block in plan.blocks if block.clip_group == group]
            norm = math.sqrt(
                sum(float(result.sums[k.index].double().square().sum()) for k in blocks)
            )
            assert norm <= blocks[0].bound * (1 + 1e-6)


def test_groups_finished_early_are_the_same() -> None:
    module, x = make(image).double(), draw(B, 3, 6, 6)
    plan = plan_for(module, 0.3, clipping="per_layer")
    capture = Capture(module, loss_reduction="sum")
    capture.attach()
    capture.make_backward_clipper = lambda: GroupSums(capture, plan)
    total(module(x)).backward()
    assert not any(slot.arrivals for slot in capture.slots)  # finished inside backward
    result = clipped_sums(capture, plan)
    capture.detach()
    assert isinstance(result, clip.ClipResult)
    agree(result, truth(reference_gradients(module, (x,)), plan), 1e-10)


def test_exact_arithmetic_gets_every_gradient() -> None:
    module, x = make(Language).double(), tokens(B, 7)
    expected = reference_gradients(module, (x,))
    capture = Capture(module, loss_reduction="mean")
    capture.attach()
    sample_losses(module(x)).mean().backward()
    found = clipped_sums(capture, plan_for(module, arithmetic="exact"))
    capture.detach()
    assert isinstance(found, list)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)


def test_a_loss_scale_is_divided_out() -> None:
    module, x = make(mlp).double(), draw(B, 6, 5)
    plan = plan_for(module, 0.5)
    capture = Capture(module, loss_reduction="sum")
    capture.attach()
    capture.loss_scale = 1024.0
    (total(module(x)) * 1024).backward()
    result = clipped_sums(capture, plan)
    capture.detach()
    assert isinstance(result, clip.ClipResult)
    agree(result, truth(reference_gradients(module, (x,)), plan), 1e-10)


class Dropping(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(5, 6), nn.Dropout(p), nn.ReLU(inplace=True), nn.Linear(6, 3)
        )
        self.block = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(p), nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda h: self.block(self.net(h)), x, use_reentrant=False)  # type: ignore[no-any-return]


def test_dropout_of_nothing() -> None:
    module = make(lambda: Dropping(0.0))
    check(module, (draw(B, 6, 5),))


@pytest.mark.parametrize("verified", [False, True], ids=["probed", "verified"])
def test_dropout_draws_what_it_would_have_drawn(verified: bool) -> None:
    module, x = make(lambda: Dropping(0.5)).double(), draw(B, 6, 5)
    reference = copy.deepcopy(module)
    torch.manual_seed(3)
    output = reference(x)
    total(output).backward()
    after = torch.rand(())
    plan = plan_for(module, math.inf)
    capture = Capture(module, loss_reduction="sum")
    capture.attach()
    if verified:
        module(x)
    torch.manual_seed(3)
    mine = module(x)
    torch.testing.assert_close(mine, output)
    total(mine).backward()
    assert torch.equal(torch.rand(()), after)
    result = clipped_sums(capture, plan)
    capture.detach()
    assert isinstance(result, clip.ClipResult)
    for s, p in zip(result.sums, reference.parameters(), strict=True):
        torch.testing.assert_close(s, p.grad, rtol=1e-9, atol=1e-12)


def two_losses(module: nn.Module, x: Tensor, capture: Capture) -> None:
    capture.begin_batch(len(x))
    total(module(x)).backward()
    total(module(2 * x)).backward()


def test_losses_on_the_same_samples_are_one_gradient() -> None:
    module, x = make(mlp).double(), draw(B, 6, 5)
    plan = plan_for(module, 0.5)
    once = reference_gradients(module, (x,))
    twice = reference_gradients(Doubled(module), (x,))
    capture = Capture(module, loss_reduction="sum")
    capture.attach()
    two_losses(module, x, capture)
    result = clipped_sums(capture, plan)
    capture.detach()
    assert isinstance(result, clip.ClipResult)
    gradients = [a + b for a, b in zip(once, twice, strict=True)]
    agree(result, truth(gradients, plan), 1e-10)


class Doubled(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(2 * x)  # type: ignore[no-any-return]


def test_a_retained_graph_counts_twice() -> None:
    module, x = make(mlp).double(), draw(B, 5)
    plan = plan_for(module, 0.5)
    capture = Capture(module, loss_reduction="sum")
    capture.attach()
    loss = total(module(x))
    loss.backward(retain_graph=True)
    loss.backward()
    result = clipped_sums(capture, plan)
    capture.detach()
    assert isinstance(result, clip.ClipResult)
    agree(result, truth([2 * g for g in reference_gradients(module, (x,))], plan), 1e-10)


def test_gradients_of_inputs_alone_leave_parameters_out() -> None:
    module, x = make(mlp).double(), draw(B, 5).requires_grad_()
    plan = plan_for(module, 0.5)
    capture = Capture(module, loss_reduction="sum")
    capture.attach()
    capture.begin_batch(B)
    (mine,) = torch.autograd.grad(total(module(x)), x)
    assert not capture.captured
    moved = (x + 0.1 * mine.sign()).detach()
    total(module(moved)).backward()
    result = clipped_sums(capture, plan)
    capture.detach()
    (theirs,) = torch.autograd.grad(total(module(x)), x)
    torch.testing.assert_close(mine, theirs)
    assert isinstance(result, clip.ClipResult)
    agree(result, truth(reference_gradients(module, (moved,)), plan), 1e-10)


def test_input_gradients_are_the_ordinary_ones() -> None:
    module, x = make(image).double(), draw(B, 3, 6, 6).requires_grad_()
    (theirs,) = torch.autograd.grad(total(module(x)), x)
    capture = Capture(module)
    capture.attach()
    total(module(x)).backward()
    capture.detach()
    torch.testing.assert_close(x.grad, theirs)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e200], ids=str)
@pytest.mark.parametrize("model", ["mlp", "sequence", "image", "lstm"])
def test_samples_that_are_not_finite_are_dropped(model: str, bad: float) -> None:
    build, inputs = MODELS[model]
    module, x = make(build).double(), inputs(B)
    x[1].view(-1)[3] = bad
    rest = x[torch.tensor([0, 2, 3])]
    gradients = reference_gradients(module, (rest,))
    plan = plan_for(module, float(squares(gradients).sum(0).sqrt().median()))
    result = run(module, (x,), plan)
    if bad == 1e200:  # squashed to something finite, perhaps
        assert result.nonfinite in (0, 1)
        if result.nonfinite == 0:
            return
    assert result.nonfinite == 1
    assert not math.isfinite(float(result.norms[1]))
    expected = truth(gradients, plan)
    for mine, other in zip(result.sums, expected.sums, strict=True):
        assert float((mine - other).norm()) <= 1e-10 * expected.scale


def test_public_gradients_are_kept_apart() -> None:
    module, x, fake = make(mlp).double(), draw(B, 5), draw(7, 5, seed=4)
    plan = plan_for(module, 0.5)
    expected = reference_gradients(module, (x,))
    ordinary = torch.autograd.grad(total(module(fake)), [*module.parameters()])
    capture = Capture(module, loss_reduction="sum")
    capture.attach()
    total(module(x)).backward()
    for _ in range(2):
        with capture.public():
            total(module(fake)).backward()
    assert all(p.grad is None for p in module.parameters())
    for index, gradient in enumerate(ordinary):
        torch.testing.assert_close(capture.public_gradients[index], 2 * gradient)
    result = clipped_sums(capture, plan)
    assert isinstance(result, clip.ClipResult)
    agree(result, truth(expected, plan), 1e-10)
    capture.discard()
    assert not capture.public_gradients
    capture.detach()


def test_parameters_frozen_later_get_nothing() -> None:
    module, x = make(lambda: nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3))).double(), draw(B, 5)
    plan = plan_for(module, 0.5)
    capture = Capture(module, loss_reduction="sum")
    capture.attach()
    module[1].weight.requires_grad_(False)
    total(module(x)).backward()
    result = clipped_sums(capture, plan)
    capture.detach()
    assert isinstance(result, clip.ClipResult)
    assert not result.sums[2].any()
    expected = reference_gradients(module, (x,))
    norms = squares(expected).sum(0).sqrt()
    torch.testing.assert_close(result.norms, norms)


def test_nothing_arrived() -> None:
    module = make(mlp).float()
    capture = Capture(module)
    capture.attach()
    assert clipped_sums(capture, plan_for(module)) is None
    module(draw(B, 5).float())
    assert clipped_sums(capture, plan_for(module)) is None
    capture.detach()


def test_more_gradients_for_a_finished_group_are_refused() -> None:
    module, x = make(mlp).double(), draw(B, 5)
    plan = plan_for(module, 0.3, clipping="per_layer")
    capture = Capture(module, loss_reduction="sum")
    capture.attach()
    capture.make_backward_clipper = lambda: GroupSums(capture, plan)
    with pytest.raises(PrivacyError, match="backward once"):
        two_losses(module, x, capture)
    capture.detach()


def test_a_loss_scale_that_comes_too_late() -> None:
    module, x = make(mlp).double(), draw(B, 5)
    plan = plan_for(module, 0.3, clipping="per_layer")
    capture = Capture(module, loss_reduction="sum")
    capture.attach()
    capture.make_backward_clipper = lambda: GroupSums(capture, plan)
    (total(module(x)) * 1024).backward()
    capture.loss_scale = 1024.0  # as a GradScaler does in its step
    with pytest.raises(PrivacyError, match="flat clipping"):
        clipped_sums(capture, plan)
    capture.detach()


def test_gradients_that_are_all_zero_count_as_arrived() -> None:
    module = make(mlp).double()
    capture = Capture(module)
    capture.attach()
    (total(module(draw(B, 5))) * 0).backward()
    result = clipped_sums(capture, plan_for(module))
    capture.detach()
    assert isinstance(result, clip.ClipResult)
    assert result.batch_size == B
    assert not any(bool(s.any()) for s in result.sums)


def test_inputs_in_mappings() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, *, given: Any) -> Any:
            return {"logits": self.layer(given["x"][0]), "extra": None}

    module, x = make(Named).double(), draw(B, 5)
    plan = plan_for(module, 0.5)
    capture = Capture(module, loss_reduction="sum")
    capture.attach()
    given = defaultdict(list, {"x": [x]})
    total(module(given=given)["logits"]).backward()
    assert given["x"][0] is x
    result = clipped_sums(capture, plan)
    capture.detach()
    assert isinstance(result, clip.ClipResult)
    agree(result, truth(reference_gradients(module.layer, (x,)), plan), 1e-10)


def test_labels_that_look_like_positions() -> None:
    check(make(Labelled), (torch.arange(B), draw(B, 5)))


class Labelled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.layer = nn.Linear(5, 6)

    def forward(self, label: Tensor, x: Tensor) -> Tensor:
        return (self.layer(x) + self.table(label)).tanh()

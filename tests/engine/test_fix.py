"""Replacing batch normalisation: what changes, and everything that must not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from dpkern.engine.fix import Fix, fix, fixes


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 48, 3),
        nn.BatchNorm2d(48, eps=1e-3),
        nn.ReLU(),
        nn.InstanceNorm2d(48, affine=True, track_running_stats=True),
        nn.Flatten(),
        nn.Linear(48 * 4, 16),
        nn.BatchNorm1d(16),
        nn.LayerNorm(16),
    )


@pytest.mark.parametrize(
    ("norm", "groups"),
    [
        (nn.BatchNorm2d(64), 32),
        (nn.BatchNorm2d(48), 24),
        (nn.BatchNorm2d(16), 8),
        (nn.BatchNorm2d(100), 25),
        (nn.BatchNorm2d(37), 1),
        (nn.BatchNorm2d(3), 1),
        (nn.BatchNorm2d(2), 1),
        (nn.BatchNorm2d(1), 1),
        (nn.BatchNorm3d(128), 32),
        (nn.SyncBatchNorm(12), 6),
        (nn.BatchNorm1d(512), 32),
        (nn.BatchNorm1d(64), 8),
        (nn.BatchNorm1d(10), 1),
    ],
    ids=lambda value: repr(value).partition(",")[0],
)
def test_groups(norm: nn.Module, groups: int) -> None:
    made = fix(norm)
    assert isinstance(made, nn.GroupNorm)
    assert made.num_groups == groups
    assert made.num_channels % groups == 0


def test_replaced_in_place() -> None:
    given = model()
    parameters = dict(given.named_parameters())
    kept = {index: given[index] for index in (0, 2, 3, 4, 5, 7)}
    assert fix(given) is given
    assert [type(part).__name__ for part in given] == [
        "Conv2d",
        "GroupNorm",
        "ReLU",
        "InstanceNorm2d",
        "Flatten",
        "Linear",
        "GroupNorm",
        "LayerNorm",
    ]
    assert all(given[index] is part for index, part in kept.items())
    assert given[1].eps == 1e-3
    # The same parameters under the same names, so optimizer and checkpoint stay valid.
    now = dict(given.named_parameters())
    assert list(now) == list(parameters)
    assert all(now[name] is parameter for name, parameter in parameters.items())
    assert dict(given.named_buffers()) == {}
    assert given(torch.randn(2, 3, 4, 4)).shape == (2, 16)


def test_samples_do_not_meet_any_more() -> None:
    given = model()
    x = torch.randn(3, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    changed = x.clone()
    changed[0] += 1.0
    assert not torch.allclose(given(x)[1:], given(changed)[1:])
    fix(given)
    torch.testing.assert_close(given(x)[1:], given(changed)[1:])


def test_scale_and_shift_act_as_before() -> None:
    norm = nn.BatchNorm1d(8)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x = torch.randn(4, 8, 5)
    expected = nn.functional.group_norm(x, 1, norm.weight, norm.bias, norm.eps)
    torch.testing.assert_close(fix(norm)(x), expected)


def test_everything_else_is_kept() -> None:
    given = model().to(torch.float64)
    given[1].requires_grad_(False)
    given[1].weight.requires_grad_(True)
    given.eval()
    given[6].train()
    fix(given)
    assert given[1].weight.dtype == torch.float64
    assert given[1].weight.requires_grad
    assert not given[1].bias.requires_grad
    assert not given[1].training
    assert given[6].training


def test_without_scale_and_shift() -> None:
    made = fix(nn.BatchNorm2d(8, affine=False))
    assert list(made.parameters()) == []
    assert made(torch.randn(2, 8, 3, 3)).shape == (2, 8, 3, 3)
    assert "affine=False" in repr(made)


def test_instance_norm_uses_its_own_statistics_in_eval_too() -> None:
    given = nn.InstanceNorm2d(4, track_running_stats=True)
    x = torch.randn(2, 4, 3, 3)
    expected = nn.InstanceNorm2d(4)(x)
    assert fix(given) is given
    torch.testing.assert_close(given.train()(x), expected)
    torch.testing.assert_close(given.eval()(x), expected)
    assert given.state_dict() == {}


def test_the_report() -> None:
    given = model()
    before = copy.deepcopy(given.state_dict())
    found = fixes(given)
    assert [entry.name for entry in found] == ["1", "3", "6"]
    assert isinstance(found[0], Fix)
    assert found[0].before.startswith("BatchNorm2d(48")
    assert found[0].after.startswith("GroupNorm(24, 48")
    assert "track_running_stats=False" in found[1].after
    assert given.state_dict().keys() == before.keys()  # a report changes nothing
    fix(given)
    assert [repr(given[int(entry.name)]) for entry in found] == [entry.after for entry in found]


def test_a_second_call_changes_nothing() -> None:
    given = fix(model())
    parts = list(given.modules())
    assert fixes(given) == []
    assert fix(given) is given
    assert all(one is other for one, other in zip(parts, given.modules(), strict=True))


def test_shared_modules_stay_shared() -> None:
    norm = nn.BatchNorm1d(16)
    given = nn.ModuleDict({"a": norm, "b": nn.Sequential(nn.Linear(16, 16), norm)})
    fix(given)
    assert isinstance(given["a"], nn.GroupNorm)
    assert given["b"][1] is given["a"]


def test_frozen_layers_are_left_alone() -> None:
    given = model()
    given[1].eval()
    given[3].eval()
    fix(given)
    assert isinstance(given[1], nn.BatchNorm2d)
    assert given[3].track_running_stats
    assert isinstance(given[6], nn.GroupNorm)


class Activated(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu()


class Renamed(nn.BatchNorm2d):
    pass


def test_layers_that_do_more_are_left_alone() -> None:
    hooked, wrapped = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
    hooked.register_forward_hook(lambda module, x, y: y * 2)
    nn.utils.parametrizations.weight_norm(wrapped, "bias", dim=0)
    given = nn.Sequential(Activated(4), hooked, wrapped, Renamed(4))
    assert [entry.name for entry in fixes(given)] == ["3"]
    fix(given)
    assert [isinstance(part, nn.GroupNorm) for part in given] == [False, False, False, True]


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_layers_are_left_alone() -> None:
    assert fixes(nn.Sequential(nn.LazyBatchNorm2d())) == []


def test_nothing_to_fix() -> None:
    given = nn.Linear(2, 2)
    assert fix(given) is given
    assert fixes(given) == []


class NormAct(nn.BatchNorm2d):
    """A batch norm that runs dropout and activation, written as in timm."""

    def __init__(self, channels: int, *, square: bool = False) -> None:
        super().__init__(channels)
        self.drop = nn.Dropout(0.3)
        self.act = nn.SiLU(inplace=True)
        self.square = square

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.num_batches_tracked.add_(1)  # type: ignore[union-attr]
        x = nn.functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training
        )
        x = self.act(self.drop(x))
        return x.square() if self.square else x


def test_submodules_behind_the_norm_are_kept() -> None:
    given = nn.Sequential(nn.Conv2d(3, 8, 1), NormAct(8))
    norm = given[1]
    before = copy.deepcopy(norm.state_dict())
    with torch.random.fork_rng():
        torch.manual_seed(5)
        state = torch.get_rng_state()
        (entry,) = fixes(given)
        fix(given)
        assert torch.equal(torch.get_rng_state(), state)
    assert repr(given[1]) == entry.after
    assert given[1].act is norm.act
    assert given[1].weight is norm.weight
    assert given[1].drop is norm.drop
    for name, value in norm.state_dict().items():
        assert torch.equal(value, before[name])  # the trial ran on a copy
    x = torch.randn(2, 3, 4, 4)
    given.eval()
    expected = nn.functional.silu(nn.functional.group_norm(given[0](x), 4, norm.weight, norm.bias))
    torch.testing.assert_close(given(x), expected)
    assert fixes(given) == []


def test_a_norm_that_does_more_than_its_submodules_is_left_alone() -> None:
    given = nn.Sequential(NormAct(8, square=True))
    assert fixes(given) == []
    assert isinstance(fix(given)[0], NormAct)


def test_the_norm_of_timm() -> None:
    layers = pytest.importorskip("timm.layers", exc_type=ImportError)
    given = nn.Sequential(layers.BatchNormAct2d(8), layers.BatchNormAct2d(8, apply_act=False))
    assert [entry.after.split("(")[0] for entry in fixes(given)] == ["GroupNormAct"] * 2

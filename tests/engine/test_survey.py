"""``dpkern.survey``: the geometry of every parameter's use, and nothing changed by looking."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpkern
from dpkern.base.errors import InvalidInput
from dpkern.engine.capture import Capture
from dpkern.nn import BlockCirculantLinear, SpectralConv2d
from dpkern.privacy.mechanisms.site import Site


class Everything(nn.Module):
    """One of each: convolutions, circulant blocks, and what has no site of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, (5, 3), stride=(2, 1), padding=(2, 1), groups=1)
        self.norm = nn.GroupNorm(2, 4)
        self.spectral = SpectralConv2d(4, 6, 3, dilation=2, groups=2, bias=False)
        self.twice = nn.Conv2d(6, 6, 1, bias=False)
        self.made = nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.both = nn.Conv2d(6, 6, 1, bias=False)
        self.frozen = nn.Conv2d(6, 6, 1).requires_grad_(False)
        self.head = BlockCirculantLinear(6, 5, 4, bias=False)
        self.line = nn.Conv1d(5, 2, 2, padding=1)
        self.unused = nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.spectral(self.norm(self.conv(x)))
        y = self.frozen(self.twice(torch.tanh(self.twice(y))))
        y = torch.conv2d(y, self.made.weight * 2, padding=1)
        y = torch.conv2d(self.both(y), self.both.weight * 2)
        y = self.head(y.flatten(2).transpose(1, 2))
        return self.line(y.transpose(1, 2))


def test_every_parameter_has_its_site() -> None:
    model = Everything()
    sites = dpkern.survey(model, torch.zeros(2, 3, 12, 9))
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    found = dict(zip(names, sites, strict=True))
    assert found["conv.weight"] == Site(
        kind="conv",
        shape=(4, 3, 5, 3),
        input=(12, 9),
        output=(6, 9),
        stride=(2, 1),
        padding=(2, 1),
        dilation=(1, 1),
    )
    assert found["spectral.weight"] == Site(
        kind="conv",
        shape=(6, 2, 3, 3),
        input=(6, 9),
        output=(2, 5),
        stride=(1, 1),
        padding=(0, 0),
        dilation=(2, 2),
        groups=2,
    )
    assert found["head.weight"] == Site(
        kind="circulant", shape=(2, 2, 4), input=(10,), output=(10,)
    )
    assert (found["line.weight"].kind, found["line.weight"].output) == ("conv", (11,))
    others = ("conv.bias", "norm.weight", "twice.weight", "made.weight", "both.weight")
    for name in (*others, "unused.weight"):
        assert found[name] == Site(kind="other", shape=tuple(model.get_parameter(name).shape))


def test_sizes_do_not_depend_on_the_batch() -> None:
    one, five = (dpkern.survey(Everything(), torch.zeros(b, 3, 12, 9)) for b in (1, 5))
    assert one == five


def test_a_fold_of_positions_is_other() -> None:
    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image = nn.Conv2d(2, 2, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y = x.transpose(1, 2).flatten(0, 1)  # several images of one sample
            return self.image(y).reshape(len(x), -1)

    (site,) = dpkern.survey(Folded(), torch.zeros(2, 2, 3, 4, 4))
    assert site.kind == "other"


def test_a_volume_has_a_site_of_three_axes() -> None:
    model = nn.Conv3d(4, 6, (3, 2, 3), stride=(1, 2, 1), padding=1, groups=2, bias=False)
    (site,) = dpkern.survey(model, torch.zeros(2, 4, 5, 6, 7))
    assert (site.kind, site.shape) == ("conv", (6, 2, 3, 2, 3))
    assert (site.input, site.output, site.groups) == ((5, 6, 7), (5, 4, 7), 2)


TRANSPOSED: dict[str, Any] = {
    "plain": {"kernel_size": 3},
    "stride": {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1},
    "positions beyond": {"kernel_size": 2, "stride": 2, "dilation": 3, "output_padding": 2},
    "padded beyond": {"kernel_size": 3, "dilation": 2, "output_padding": 1, "padding": 2},
    "both": {"kernel_size": 3, "stride": 2, "dilation": 3, "output_padding": 2, "padding": 2},
    "nothing left": {"kernel_size": 1, "dilation": 3, "output_padding": 2, "padding": 1},
    "groups": {"kernel_size": 4, "stride": 3, "groups": 2},
}


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("name", TRANSPOSED)
def test_a_transposed_convolution_is_one_from_its_output_to_its_input(name: str, axes: int) -> None:
    """Its kernel's gradient is that of the site's convolution."""
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[axes - 1]
    model = kind(4, 6, **TRANSPOSED[name], bias=False).double()
    x = torch.randn(1, 4, *(5, 4, 3)[:axes], dtype=torch.float64)
    (site,) = dpkern.survey(model, x)
    assert (site.kind, site.shape, site.output) == ("conv", tuple(model.weight.shape), x.shape[2:])
    out = model(x)
    g = torch.randn_like(out)
    (want,) = torch.autograd.grad(out, model.weight, g)
    before = model.padding[0] - site.padding[0]
    cut = [n for have, size in zip(g.shape[2:], site.input, strict=True)
           for n in (size - before - have, before)]  # fmt: skip
    taken = nn.functional.pad(g, cut[::-1])
    weight = torch.zeros_like(model.weight, requires_grad=True)
    convolve = (torch.conv1d, torch.conv2d, torch.conv3d)[axes - 1]
    down = convolve(taken, weight, None, site.stride, site.padding, site.dilation, site.groups)
    assert down.shape[2:] == site.output
    (got,) = torch.autograd.grad(down, weight, x)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_nothing_is_changed() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(0.5), nn.Flatten(), nn.Linear(64, 2))
    model[1].eval()
    before, state = copy.deepcopy(model), torch.random.get_rng_state()
    dpkern.survey(model, torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.random.get_rng_state(), state)
    for (name, mine), (_, theirs) in zip(
        model.named_parameters(), before.named_parameters(), strict=True
    ):
        assert type(mine) is nn.Parameter, name
        assert mine.grad is None
        assert torch.equal(mine, theirs)
    assert [m.training for m in model.modules()] == [m.training for m in before.modules()]


def test_what_cannot_be_surveyed_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    with pytest.raises(InvalidInput, match="at least one sample"):
        dpkern.survey(model)
    capture = Capture(model)
    capture.attach()
    with pytest.raises(InvalidInput, match="not private yet"):
        dpkern.survey(model, torch.zeros(2, 3, 6, 6))
    capture.detach()

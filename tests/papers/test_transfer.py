"""GReDP's table VII: the user's ResNet-18, of which the last convolutions train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dpkern import cli
from dpkern.base.errors import InvalidInput
from dpkern.papers.gredp import resnet18
from dpkern.papers.gredp.resnet18 import FrozenNorm, Trunk

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights in torchvision's layout, drawn."""
    torch.manual_seed(0)
    state = Trunk().state_dict()
    for name, value in state.items():
        if name.endswith("running_mean"):
            state[name] = 0.1 * torch.randn_like(value)
    state["bn1.num_batches_tracked"] = torch.tensor(3)
    state |= {"fc.weight": torch.zeros(1000, 512), "fc.bias": torch.zeros(1000)}
    path = tmp_path_factory.mktemp("weights") / "resnet18.pt"
    torch.save(state, path)
    return path


def test_the_layout_is_torchvisions(weights: Path) -> None:
    state = torch.load(weights, weights_only=True)
    buffers = ("running_mean", "running_var", "num_batches_tracked")
    count = sum(v.numel() for name, v in state.items() if not name.endswith(buffers))
    assert count == 11_689_512
    names = ("layer1.0.bn2.weight", "layer4.0.downsample.0.weight", "layer3.1.conv2.weight")
    assert set(names) <= set(state)


def test_frozen_normalisation_is_that_of_an_evaluated_layer() -> None:
    layer, frozen = torch.nn.BatchNorm2d(5).eval(), FrozenNorm(5)
    with torch.no_grad():
        for name in ("weight", "bias", "running_mean"):
            getattr(layer, name).normal_()
            getattr(frozen, name).copy_(getattr(layer, name))
        layer.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
        frozen.running_var.copy_(layer.running_var)  # type: ignore[arg-type]
    x = torch.randn(3, 5, 4, 4)
    torch.testing.assert_close(frozen(x), layer(x))
    assert not list(frozen.parameters())


@pytest.mark.parametrize(("count", "trained"), [(1, 1), (2, 2)])
def test_only_the_last_convolutions_and_the_output_train(
    weights: Path, count: int, trained: int
) -> None:
    trunk = resnet18.load(str(weights))
    head = trunk.head(10, count, seed=0)
    free = [name for name, p in head.named_parameters() if p.requires_grad]
    assert len([name for name in free if "conv" in name]) == trained
    assert free[-2:] == ["3.weight", "3.bias"]
    assert not any(p.requires_grad for p in trunk.parameters())


def test_features_stand_for_the_rows(weights: Path) -> None:
    trunk = resnet18.load(str(weights))
    x = torch.rand(5, 3, 32, 32)
    assert trunk.features(x).shape == (5, 512, 1, 1)
    torch.testing.assert_close(trunk.features(x, chunk=2), trunk.features(x), rtol=1e-4, atol=1e-5)


def broken(path: Path, kind: str, weights: Path) -> Any:
    state = torch.load(weights, weights_only=True)
    if kind == "missing":
        return None
    if kind == "text":
        path.write_text("no weights")
        return None
    if kind == "another network":
        torch.save({"a": torch.zeros(3)}, path)
    elif kind == "no tensors":
        torch.save({"a": 3}, path)
    elif kind == "another shape":
        torch.save(state | {"conv1.weight": torch.zeros(3)}, path)
    else:
        torch.save(state | {"bn1.weight": torch.full((64,), torch.nan)}, path)
    return None


@pytest.mark.parametrize(
    "kind", ["missing", "text", "another network", "no tensors", "another shape", "NaN"]
)
def test_other_files_are_refused_by_name(tmp_path: Path, weights: Path, kind: str) -> None:
    path = tmp_path / "weights.pt"
    broken(path, kind, weights)
    with pytest.raises(InvalidInput, match=r"^weights: expected a file of the state_dict"):
        resnet18.load(str(path))


@pytest.mark.parametrize(
    "words",
    ["gredp table7", "gredp table7 --train-last 3 --weights x", "gredp table1 --weights x"],
)
def test_the_command_asks_for_weights(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["reproduce", *words.split(), "--quick", "--no-figure"]) == cli.REFUSED
    assert list(tmp_path.iterdir()) == []

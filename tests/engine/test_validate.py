"""What is said about a model without running it: all of it at once, and nothing about others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpkern import PrivacyEngine
from dpkern.base.errors import InvalidInput, UnsupportedModule
from dpkern.engine import validate
from dpkern.engine.fix import fix
from dpkern.engine.validate import Finding, check, static_findings


def beside(part: nn.Module) -> nn.Module:
    """The part inside a model that is otherwise fine."""
    return nn.Sequential(nn.Linear(4, 4), part)


def frozen(part: nn.Module) -> nn.Module:
    model = beside(part)
    part.eval()
    return model


def with_parameter(parameter: nn.Parameter) -> nn.Module:
    model = beside(nn.Identity())
    model.register_parameter("extra", parameter)
    return model


def hooked() -> nn.Module:
    model = beside(nn.Identity())
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return model


class FakeQuantizeBase(nn.Module):
    """Stands for the observers of torch.ao.quantization."""


class GradSampleModule(nn.Module):
    """Stands for the wrapper of another library."""

    def __init__(self) -> None:
        super().__init__()
        self._module = nn.Linear(4, 4)


def encoder(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 8, **options)


# name, severity and a part of the text of the one finding about each model
CASES: dict[str, tuple[Callable[[], nn.Module], str, str, str]] = {
    "batch-norm-1d": (lambda: beside(nn.BatchNorm1d(4)), "1", "refuse", "its batch"),
    "batch-norm-2d": (lambda: beside(nn.BatchNorm2d(4)), "1", "refuse", "its batch"),
    "batch-norm-3d": (lambda: beside(nn.BatchNorm3d(4)), "1", "refuse", "its batch"),
    "sync-batch-norm": (lambda: beside(nn.SyncBatchNorm(4)), "1", "refuse", "its batch"),
    "batch-norm-without-statistics": (
        lambda: frozen(nn.BatchNorm1d(4, track_running_stats=False)),
        "1",
        "refuse",
        "its batch",
    ),
    "batch-norm-frozen": (lambda: frozen(nn.BatchNorm1d(4)), "1", "note", "frozen"),
    "batch-norm-in-a-model-in-eval": (
        lambda: beside(nn.BatchNorm1d(4)).eval(),
        "1",
        "refuse",
        "its batch",
    ),
    "instance-norm-tracking": (
        lambda: beside(nn.InstanceNorm2d(4, track_running_stats=True)),
        "1",
        "refuse",
        "running statistics",
    ),
    "instance-norm-frozen": (
        lambda: frozen(nn.InstanceNorm2d(4, track_running_stats=True)),
        "1",
        "note",
        "frozen",
    ),
    "embedding-max-norm": (
        lambda: beside(nn.Embedding(5, 4, max_norm=1.0)),
        "1",
        "refuse",
        "max_norm=1.0",
    ),
    "frozen-embedding-max-norm": (
        lambda: beside(nn.Embedding(5, 4, max_norm=1.0).requires_grad_(False)),
        "1",
        "refuse",
        "max_norm=1.0",
    ),
    "embedding-by-frequency": (
        lambda: beside(nn.Embedding(5, 4, scale_grad_by_freq=True)),
        "1",
        "refuse",
        "scale_grad_by_freq",
    ),
    "embedding-sparse": (lambda: beside(nn.Embedding(5, 4, sparse=True)), "1", "refuse", "sparse"),
    "embedding-bag-sparse": (
        lambda: beside(nn.EmbeddingBag(5, 4, sparse=True)),
        "1",
        "refuse",
        "sparse",
    ),
    "time-first-encoder": (lambda: beside(encoder()), "1", "refuse", "batch_first=True"),
    "time-first-decoder": (
        lambda: beside(nn.TransformerDecoderLayer(4, 2, 8)),
        "1",
        "refuse",
        "batch_first=True",
    ),
    "time-first-attention": (lambda: beside(nn.MultiheadAttention(4, 2)), "1", "note", "by itself"),
    "time-first-lstm": (lambda: beside(nn.LSTM(4, 4)), "1", "note", "by itself"),
    "lazy": (lambda: nn.LazyLinear(4, bias=False), "weight", "refuse", "lazy"),
    "data-parallel": (lambda: nn.DataParallel(nn.Linear(4, 4)), "", "refuse", "splits a batch"),
    "compiled": (
        lambda: torch.compile(nn.Linear(4, 4), backend="eager"),
        "",
        "refuse",
        "_orig_mod",
    ),
    "another-library": (GradSampleModule, "", "refuse", "_module"),
    "observer": (lambda: beside(FakeQuantizeBase()), "1", "refuse", "the range of what it sees"),
    "spectral-norm": (
        lambda: beside(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))),
        "1.parametrizations.weight.0",
        "note",
        "power iteration",
    ),
    "spectral-norm-by-hook": (
        lambda: beside(nn.utils.spectral_norm(nn.Linear(4, 4))),
        "1",
        "note",
        "power iteration",
    ),
    "complex": (
        lambda: with_parameter(nn.Parameter(torch.zeros(2, dtype=torch.complex64))),
        "extra",
        "refuse",
        "complex64",
    ),
    "sparse-layout": (
        lambda: with_parameter(nn.Parameter(torch.zeros(2, 2).to_sparse())),
        "extra",
        "refuse",
        "to_dense",
    ),
    "devices": (
        lambda: with_parameter(nn.Parameter(torch.zeros(2, device="meta"))),
        "extra",
        "refuse",
        "meta device",
    ),
    "gradient-hook": (hooked, "0.weight", "note", "hooks"),
    "nothing-to-train": (
        lambda: nn.Linear(4, 4).requires_grad_(False),
        "",
        "refuse",
        "no parameter requires a gradient",
    ),
}

FINE: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 4),
    "instance-norm": lambda: beside(nn.InstanceNorm2d(4, affine=True)),
    "group-norm": lambda: beside(nn.GroupNorm(2, 4)),
    "embedding": lambda: beside(nn.Embedding(5, 4, padding_idx=0)),
    "frozen-sparse-embedding": lambda: beside(
        nn.Embedding(5, 4, sparse=True).requires_grad_(False)
    ),
    "encoder": lambda: beside(encoder(batch_first=True)),
    "lstm": lambda: beside(nn.LSTM(4, 4, batch_first=True)),
    "weight-norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    "dropout": lambda: beside(nn.Dropout()),
    "frozen-integers": lambda: with_parameter(
        nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)
    ),
    "frozen-on-another-device": lambda: with_parameter(
        nn.Parameter(torch.zeros(2, device="meta"), requires_grad=False)
    ),
    "bfloat16": lambda: nn.Linear(4, 4).bfloat16(),
}


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature", "ignore:.*weight_norm")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("make", "name", "severity", "text"), CASES.values(), ids=CASES)
def test_findings(make: Callable[[], nn.Module], name: str, severity: str, text: str) -> None:
    found = static_findings(make())
    about = [finding for finding in found if finding.name == name and text in str(finding)]
    assert [finding.severity for finding in about] == [severity]
    # Several devices are a second finding about the model with a parameter that holds no values.
    same = [finding for finding in found if finding.severity == severity]
    assert len(same) == (2 if text == "meta device" else 1)


@pytest.mark.parametrize("make", FINE.values(), ids=FINE)
def test_nothing_is_said_about_good_models(make: Callable[[], nn.Module]) -> None:
    assert static_findings(make()) == []
    assert check(make()) == []


def test_several_devices_name_one_parameter_each() -> None:
    found = static_findings(with_parameter(nn.Parameter(torch.zeros(2, device="meta"))))
    assert "extra on meta, 0.weight on cpu" in str(found[-1])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules() -> None:
    scripted = torch.jit.script(nn.Linear(4, 4))
    assert ["TorchScript" in finding.what for finding in static_findings(scripted)] == [True]


def test_check_raises_once_for_everything() -> None:
    model = nn.Sequential(
        nn.Embedding(5, 4, sparse=True), nn.BatchNorm1d(4), nn.LSTM(4, 4), nn.BatchNorm1d(4)
    )
    with pytest.raises(UnsupportedModule) as caught:
        check(model)
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("got 3 findings:")
    starts = ["1. 0 (Embedding): ", "2. 1 (BatchNorm1d): ", "3. 3 (BatchNorm1d): "]
    for line, start in zip(lines[1:4], starts, strict=True):
        assert line.startswith(start)
    assert "Use GroupNorm" in lines[2]
    assert "LSTM" not in str(caught.value)  # a note is no reason to refuse


def test_check_returns_the_notes() -> None:
    (note,) = check(nn.LSTM(4, 4))
    assert note.severity == "note"
    assert str(note).startswith("LSTM: batch_first=False")


def test_findings_from_elsewhere_join_the_same_error() -> None:
    model = beside(nn.BatchNorm1d(4))
    dynamic = [
        Finding("0.weight", "parameter", "is used in an operation without a rule", "Use F.linear."),
        Finding("0.bias", "parameter", "was not used", "Nothing to do.", "note"),
    ]
    with pytest.raises(UnsupportedModule, match="2 findings") as caught:
        validate.refuse(model, [*static_findings(model), *dynamic])
    assert "2. 0.weight (parameter): is used in an operation" in str(caught.value)
    assert validate.refuse(model, dynamic[1:]) is None


def test_what_fix_returns_passes() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.InstanceNorm2d(8, 1e-5, 0.1))
    model.append(nn.InstanceNorm2d(8, track_running_stats=True))
    with pytest.raises(UnsupportedModule, match=r"dpkern\.fix"):
        check(model)
    assert check(fix(model)) == []


def test_only_models_are_checked() -> None:
    with pytest.raises(InvalidInput, match=r"an nn\.Module"):
        static_findings([nn.Linear(4, 4)])  # type: ignore[arg-type]


def test_inputs_in_the_place_of_the_function_are_refused() -> None:
    model, x = nn.Linear(4, 2), torch.zeros(4, 4)
    engine = PrivacyEngine()
    engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(x), batch_size=2),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    with pytest.raises(InvalidInput, match=r"engine\.validate\(None, x\)"):
        engine.validate(x)  # type: ignore[arg-type]
    engine.validate(None, x)

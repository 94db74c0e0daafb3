"""Private models under torch.compile: whole runs come out as without it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import dpkern

# The compiler makes an object of every autograd function and looks at .grad of the taps: torch
# warns of both.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]
needs_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


class Residual(nn.Module):
    """A parameter of its own, a checkpointed part, and parts without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(8, 16), nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.linspace(0.5, 2.0, 16))
        self.last = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x)) * 2 + 1
        h = h + checkpoint(self.inner, h, use_reentrant=False) * self.scale
        return self.last(torch.tanh(h).square() - h)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        ids = (x[:, :5].abs() * 2).long().clamp(max=6)
        return self.last(self.layer(self.table(ids)).mean(1))


MODELS = {"residual": Residual, "attention": Attention}


def trained(kind: str, compiler: str | None, *, device: str = "cpu") -> list[Tensor]:
    """Parameters after one epoch of batches of varying size."""
    torch.manual_seed(0)
    model = MODELS[kind]().to(device)
    x, y = torch.randn(24, 8, device=device), torch.arange(24, device=device) % 3
    model, optimizer, loader = dpkern.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=12),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        unsafe_seed=1,
    )
    forward = model if compiler is None else torch.compile(model, backend=compiler)
    for data, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(forward(data), labels).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.parametrize(
    ("kind", "compiler"),
    [
        ("residual", "eager"),
        ("residual", "aot_eager"),
        # What "eager" captures is what "aot_eager" goes on with.
        pytest.param("attention", "eager", marks=pytest.mark.slow),
        ("attention", "aot_eager"),
    ],
)
def test_a_compiled_model_is_trained_as_the_plain_one(
    kind: str, compiler: str, record_property: pytest.RecordProperty
) -> None:
    plain = trained(kind, None)
    got = trained(kind, compiler)
    for mine, theirs in zip(got, plain, strict=True):
        torch.testing.assert_close(mine, theirs)  # graphs may round otherwise
    breaks = sum(counters["graph_break"].values())
    record_property("graph_breaks", breaks)
    print(f"{kind}, {compiler}: {breaks} graph breaks, {dict(counters['stats'])}")
    assert counters["stats"]["unique_graphs"] > 0  # something was compiled


@pytest.mark.gpu
@needs_device
@pytest.mark.parametrize("kind", MODELS)
def test_inductor_agrees(kind: str) -> None:
    plain = trained(kind, None, device="cuda")
    got = trained(kind, "inductor", device="cuda")
    for mine, theirs in zip(got, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)

"""Complex numbers that are made of real parameters: refused, and what helps is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpkern
from dpkern.base.errors import UnsupportedModule


class Filter(nn.Module):
    """A filter of one weight for each frequency, whose real and imaginary parts are trained."""

    def __init__(self, filtered: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 2))
        self.head = nn.Linear(8, 3)
        self.filtered = filtered

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.fft.irfft(self.filtered(torch.fft.rfft(x), self.w), n=8))
        return out


def of_parts(z: Tensor, w: Tensor) -> Tensor:
    (a, b), (c, d) = (z.real, z.imag), w.unbind(1)
    return torch.complex(a * c - b * d, a * d + b * c)


FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a product": lambda z, w: z * torch.view_as_complex(w),
    "of two parts": lambda z, w: z * torch.complex(w[:, 0], w[:, 1]),
    "a sum": lambda z, w: z.real + torch.view_as_complex(w),
    "a sum over frequencies": lambda z, w: torch.einsum("bf,f->bf", z, torch.view_as_complex(w)),
    "a linear map": lambda z, w: F.linear(z, torch.diag(torch.view_as_complex(w))),
}


def train(filtered: Callable[[Tensor, Tensor], Tensor], private: bool = True) -> Any:
    torch.manual_seed(0)
    module: Any = Filter(filtered)
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
    loader: Any = DataLoader(
        TensorDataset(torch.randn(8, 8), torch.randint(0, 3, (8,))), batch_size=8
    )
    if private:
        module, optimizer, loader = dpkern.PrivacyEngine().make_private(
            module=module,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=0.0,
            max_grad_norm=1e6,
            sampling="fixed",
        )
    for x, y in loader:
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
    return module.w.detach()


@pytest.mark.parametrize("form", FORMS)
def test_complex_numbers_are_refused(form: str) -> None:
    with pytest.raises(UnsupportedModule, match="real and imaginary parts"):
        train(FORMS[form])


def test_the_remedy_is_right() -> None:
    assert torch.allclose(train(of_parts), train(FORMS["a product"], private=False), atol=1e-4)


def test_complex_numbers_that_stay_in_an_expression_are_taken() -> None:
    def filtered(z: Tensor, w: Tensor) -> Tensor:
        return z * torch.fft.ifft(torch.view_as_complex(w)).abs()

    assert torch.allclose(train(filtered), train(filtered, private=False), atol=1e-4)

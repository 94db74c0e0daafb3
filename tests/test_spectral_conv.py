"""Spectral norms and sums of convolutions against correlation maps made by plain sums."""

from __future__ import annotations

import pytest
import torch

from dpkern import testing
from dpkern.ops import spectral
from tests.spectral_cases import CASES, Case, correlation_map, taps, through

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@every_case
def test_norms_and_sums_are_those_of_the_correlation_map(case: Case) -> None:
    x, g = case.operands(2, torch.float64)
    maps = correlation_map(case, x, g)
    sizes = case.sizes | {"size": case.size}
    want = maps.flatten(1).square().sum(1)
    factors = torch.tensor([0.7, -0.3], dtype=torch.float64)
    for backend in ("reference", *(["cpu"] if "cpu" in testing.available_backends() else [])):
        got = spectral.conv_norm(x, g, **sizes, backend=backend)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
        assert bool((got >= want * (1 - 1e-15)).all())
        for kind in ("shells", "rectangle"):
            band = case.band(kind)
            filtered = through(band, maps)
            got = spectral.conv_norm(x, g, **sizes, band=band, backend=backend)
            kept = filtered.flatten(1).square().sum(1)
            torch.testing.assert_close(got, kept, rtol=1e-12, atol=0)
            crop = taps(case, filtered)
            total = torch.einsum("b,b...->...", factors, crop)
            for route in ("filter", "bins"):
                out = torch.ones_like(total)
                spectral.conv_sum(
                    x, g, factors, out, **sizes, band=band, route=route, backend=backend
                )
                testing.assert_close(route, out, 1 + total, 1e-12)
        out = torch.zeros_like(total)
        spectral.conv_sum(x, g, factors, out, **sizes, backend=backend)
        plain = torch.einsum("b,b...->...", factors, taps(case, maps))
        testing.assert_close("plain", out, plain, 1e-12)

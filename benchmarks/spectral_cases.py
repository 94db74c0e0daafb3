"""Run one convolution's release, from input and output gradient to noisy weight gradient.

Columns of the tables, all on the same operands, bound 1 and noise multiplier 1:

    N       torch's own weight gradient, not private
    T       DP-SGD of torch operations: the best of three ways (``torch_ways``)
    ours    DP-SGD of dpkern's kernels; GReDP with a cropped clip is this by definition
    G       GReDP, spectrum clip: norm by transforms, ordinary weighted weight gradient, white noise
    S       Spectral-DP, spectrum clip: the better of the routes ``bins`` and ``filter``
    W       Spectral-DP, whitened clip
    L2      the literal pipeline, batched, chunked, half spectra, noise and inverse once
    L1      the literal pipeline as published: sample by sample, noise and inverse for each
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dpkern.base.rng import Purpose
from dpkern.ops import ghost, noise, spectral
from dpkern.ops.spectral import Band, literal
from dpkern.ops.spectral._sizes import ConvolutionGrid, fast
from dpkern.ops.spectral.conv_sum import conv_filtered
from dpkern.ops.testing import KEY

BOUND = 1.0
LITERAL_SAMPLES = 4
"""Samples of which the published loop is timed; its time is proportional to them."""


@dataclass(frozen=True)
class Case:
    """A layer of the tables.

    Attributes:
        batch, ins, outs, side, kernel, stride, padding: the convolution of a square input.
        linear: on the authors' grid, the size of the full linear correlation.
        keep: least share of the bins that Spectral-DP keeps, in whole shells.
    """

    batch: int
    ins: int
    outs: int
    side: int
    kernel: int = 3
    stride: int = 1
    padding: int = 1
    linear: bool = False
    keep: float = 0.25

    @property
    def name(self) -> str:
        """Identifier, such as ``B64 16->32 3x3@32 s2``."""
        stride = f" s{self.stride}" if self.stride > 1 else ""
        grid = f" P{self.size[0]}" if self.linear else ""
        k = self.kernel
        return f"B{self.batch} {self.ins}->{self.outs} {k}x{k}@{self.side}{stride}{grid}"

    @property
    def output(self) -> int:
        """Positions per axis."""
        return (self.side + 2 * self.padding - self.kernel) // self.stride + 1

    @property
    def size(self) -> tuple[int, int]:
        """The grid."""
        padded = self.side + 2 * self.padding
        if self.linear:
            n = padded + self.stride * (self.output - 1)
        else:
            n = fast(padded, self.stride)
        return n, n

    @property
    def geometry(self) -> dict[str, Any]:
        """The arguments of ghost ops."""
        return {"kernel_size": self.kernel, "stride": self.stride, "padding": self.padding}

    @cached_property
    def band(self) -> Band:
        """The band that Spectral-DP keeps."""
        return Band(self.size, "shells", self.keep)

    @property
    def pencil(self) -> spectral.WhitenedBasis:
        """The release of its crop under circular noise."""
        kernel = (self.kernel, self.kernel)
        return spectral.pencil(self.band, kernel, (1, 1), *literal.CIRCULAR)

    def pipeline(self, band: Band | None, noise_point: str, sigma: float) -> literal.Pipeline:
        """Return the pipeline of the literal forms."""
        return literal.Pipeline(
            kernel=(self.kernel, self.kernel),
            stride=(self.stride, self.stride),
            padding=(self.padding, self.padding),
            size=self.size,
            bound=BOUND,
            noise_multiplier=sigma,
            band=band,
            noise_point=noise_point,
        )


CASES = [
    Case(256, 1, 6, 32, kernel=5, padding=0),
    Case(256, 6, 16, 14, kernel=5, padding=0),
    Case(256, 16, 128, 5, kernel=5, padding=0),
    Case(64, 16, 16, 32),
    Case(64, 32, 32, 32),
    Case(64, 64, 64, 32),
    Case(64, 32, 32, 16),
    Case(64, 64, 64, 16),
    Case(64, 64, 64, 8),
    Case(64, 16, 32, 32, stride=2),
    Case(256, 16, 16, 32),
    Case(256, 32, 32, 32),
    Case(256, 64, 64, 32),
    Case(64, 16, 16, 32, linear=True),
    Case(64, 32, 32, 32, linear=True),
]
BY_NAME = {case.name: case for case in CASES}


class Work:
    """The operands of a case and every column as a function of nothing."""

    def __init__(self, case: Case, sigma: float = 1.0) -> None:
        self.case = case
        self.sigma = sigma
        generator = torch.Generator().manual_seed(0)
        shape = (case.batch, case.ins, case.side, case.side)
        self.x = torch.randn(shape, generator=generator)
        shape = (case.batch, case.outs, case.output, case.output)
        self.g = torch.randn(shape, generator=generator) / case.output
        self.out = torch.zeros(case.outs, case.ins, case.kernel, case.kernel)
        self.layer = ConvolutionGrid.of(
            self.x, self.g, case.kernel, case.stride, case.padding, 1, 1, case.size
        )
        taps = case.kernel**2
        self.rows = torch.empty(taps, case.batch, case.outs, case.ins)
        self.generator = generator
        self.signal = torch.tensor(case.pencil.signal)
        self.post = torch.tensor(case.pencil.post)
        self.step = 0

    def columns(self) -> dict[str, list[Callable[[], Tensor]]]:
        """Return the ways of each column, of which the fastest counts."""
        few = self.case.output <= 8  # Gram matrices of more positions are no competitor
        return {
            "N": [self.non_private],
            "T": [self.shifted, self.unfolded, *([self.gram] if few else [])],
            "ours": [self.kept, self.ghost],
            "G": [self.gredp],
            "S": [self.spectral_bins, self.spectral_filter],
            "W": [self.whitened],
            "L2": [self.batched],
            "L1": [self.published],
        }

    def non_private(self) -> Tensor:
        """Run torch's weight gradient."""
        case = self.case
        _, weight, _ = torch.ops.aten.convolution_backward(
            self.g, self.x, self.out, None, [case.stride] * 2, [case.padding] * 2, [1, 1], False,
            [0, 0], 1, [False, True, False],
        )  # fmt: skip
        return weight

    def _noisy(self, total: Tensor, scale: float = 1.0) -> Tensor:
        self.step += 1
        if not self.sigma:
            return total
        return noise.add_noise(
            total,
            stream=KEY.stream(Purpose.NOISE, step=self.step),
            rounding=KEY.stream(Purpose.ROUNDING, step=self.step),
            scale=scale * self.sigma * BOUND,
        )

    def _white(self, total: Tensor) -> Tensor:
        return total.add(torch.randn_like(total), alpha=self.sigma * BOUND)

    def _factors(self, squares: Tensor) -> Tensor:
        return ghost.clip_factors([squares], BOUND, dtype=torch.float32)[0]

    def shifted(self) -> Tensor:
        """Make per-sample gradients by one batched product per tap, kept and contracted."""
        case = self.case
        x = torch.nn.functional.pad(self.x, (case.padding,) * 4)
        span, s = case.stride * (case.output - 1) + 1, case.stride
        g = self.g.flatten(2)
        for i in range(case.kernel):
            for j in range(case.kernel):
                window = x[:, :, i : i + span : s, j : j + span : s].flatten(2)
                torch.bmm(g, window.mT, out=self.rows[i * case.kernel + j])
        flat = self.rows.flatten(2)
        norms = torch.linalg.vector_norm(flat, dim=(0, 2))
        factors = (BOUND / norms).clamp(max=1)
        total = (factors @ flat).view(case.kernel, case.kernel, case.outs, case.ins)
        return self._white(total).permute(2, 3, 0, 1)

    def unfolded(self) -> Tensor:
        """Make per-sample gradients by one batched product over unfolded windows."""
        case = self.case
        windows = torch.nn.functional.unfold(
            self.x, case.kernel, padding=case.padding, stride=case.stride
        )
        grads = torch.bmm(self.g.flatten(2), windows.mT).flatten(1)
        factors = (BOUND / torch.linalg.vector_norm(grads, dim=1)).clamp(max=1)
        total = (factors @ grads).view_as(self.out)
        return self._white(total)

    def gram(self) -> Tensor:
        """Run norms by Gram matrices over positions, then torch's weight gradient."""
        case = self.case
        windows = torch.nn.functional.unfold(
            self.x, case.kernel, padding=case.padding, stride=case.stride
        )
        g = self.g.flatten(2)
        squares = ((windows.mT @ windows) * (g.mT @ g)).flatten(1).sum(1)
        factors = (BOUND / squares.clamp(min=0).sqrt()).clamp(max=1)
        weighted = self.g * factors.view(-1, 1, 1, 1)
        _, total, _ = torch.ops.aten.convolution_backward(
            weighted, self.x, self.out, None, [case.stride] * 2, [case.padding] * 2, [1, 1], False,
            [0, 0], 1, [False, True, False],
        )  # fmt: skip
        return self._white(total)

    def ghost(self) -> Tensor:
        """Run DP-SGD by dpkern's kernels, per-sample gradients made twice."""
        squares = ghost.conv_norm(self.x, self.g, **self.case.geometry)
        total = torch.zeros_like(self.out)
        ghost.conv_sum(self.x, self.g, self._factors(squares), total, **self.case.geometry)
        return self._noisy(total)

    def kept(self) -> Tensor:
        """Run DP-SGD by dpkern's kernels, per-sample gradients kept."""
        grads, squares = ghost.conv_gradient(self.x, self.g, **self.case.geometry)
        total = torch.zeros_like(self.out)
        ghost.contract([grads], self._factors(squares), [total])
        return self._noisy(total)

    def gredp(self) -> Tensor:
        """Run GReDP: clip norm of the whole spectrum."""
        geometry = self.case.geometry
        squares = spectral.conv_norm(self.x, self.g, size=self.case.size, **geometry)
        total = torch.zeros_like(self.out)
        ghost.conv_sum(self.x, self.g, self._factors(squares), total, **geometry)
        return self._noisy(total, math.sqrt(0.5))

    def _released(self, total: Tensor) -> Tensor:
        """Return coordinates of the crop, noised, and mapped back."""
        coordinates = (total.flatten(2).double() @ self.signal.T).float()
        noisy = self._noisy(coordinates, self.case.pencil.scale)
        return (noisy.double() @ self.post.T).float().view_as(total)

    def spectral_bins(self) -> Tensor:
        """Run Spectral-DP by products of retained bins."""
        case = self.case
        x_bins, g_bins, squares = spectral.conv_bins(
            self.x, self.g, band=case.band, **case.geometry
        )
        total = torch.zeros_like(self.out)
        spectral.bins_sum(x_bins, g_bins, self._factors(squares), total, band=case.band)
        return self._released(total)

    def spectral_filter(self) -> Tensor:
        """Run Spectral-DP by filtered activations."""
        case = self.case
        squares = spectral.conv_norm(self.x, self.g, size=case.size, **case.geometry)
        inputs = conv_filtered(self.x, self.layer, case.band)
        total = torch.zeros_like(self.out)
        geometry = case.geometry | {"padding": 0}
        ghost.conv_sum(inputs, self.g, self._factors(squares), total, **geometry)
        return self._released(total)

    def whitened(self) -> Tensor:
        """Run Spectral-DP that clips the whitened crop, as the engine does."""
        case, geometry = self.case, self.case.geometry
        options = {"rank": len(self.signal), "size": case.size, "band": case.band}
        if spectral.norm_by_bins(self.x, self.g, **options, **geometry):
            x_bins, g_bins, squares = spectral.whitened_bins(
                self.x, self.g, self.signal, band=case.band, **geometry
            )
            total = torch.zeros_like(self.out)
            spectral.bins_sum(x_bins, g_bins, self._factors(squares), total, band=case.band)
            return self._released(total)
        inputs = conv_filtered(self.x, self.layer, self.case.band)
        geometry = self.case.geometry | {"padding": 0}
        grads, _ = ghost.conv_gradient(inputs, self.g, **geometry)
        squares = spectral.whitened_norm(grads, self.signal)
        total = torch.zeros_like(self.out)
        ghost.contract([grads], self._factors(squares), [total])
        return self._released(total)

    def batched(self) -> Tensor:
        """Run Spectral-DP, literal and batched."""
        pipeline = self.case.pipeline(self.case.band, "per_batch", self.sigma)
        return literal.batched(self.x, self.g, pipeline, self.generator)

    def published(self) -> Tensor:
        """Run Spectral-DP as published, of a few samples."""
        pipeline = self.case.pipeline(self.case.band, "per_sample", self.sigma)
        few = slice(LITERAL_SAMPLES)
        return literal.spectral_dp(self.x[few], self.g[few], pipeline, self.generator)


def verify(case: Case, samples: int = 4, tolerance: float = 1e-3) -> None:
    """Verify every way on a few samples without noise, against literal pipelines in float64.

    Raises:
        AssertionError: one of them is another map.
    """
    work = Work(replace(case, batch=min(case.batch, samples)), sigma=0.0)
    x, g = work.x.double(), work.g.double()
    pipelines = [case.pipeline(band, "per_batch", 0.0) for band in (None, case.band)]
    whole, filtered = (
        run(x, g, pipeline, work.generator)
        for run, pipeline in zip((literal.gredp, literal.spectral_dp), pipelines, strict=True)
    )
    grads, squares = ghost.conv_gradient(x, g, **case.geometry)
    plain = torch.einsum("b,b...->...", (BOUND / squares.sqrt()).clamp(max=1), grads)
    rows, squares = spectral.conv_release(
        x, g, matrix=work.signal, size=case.size, band=case.band, **case.geometry
    )
    whitened = torch.einsum("b,b...->...", (BOUND / squares.sqrt()).clamp(max=1), rows)
    wants = {"T": plain, "ours": plain, "G": whole, "S": filtered, "L2": filtered, "L1": filtered}
    wants["W"] = (whitened @ work.post.T).view_as(plain)
    for column, ways in work.columns().items():
        for way in ways if column in wants else ():
            got, want = way().double(), wants[column]
            error = float((got - want).norm() / want.norm())
            if not error <= tolerance:
                raise AssertionError(f"{case.name}, {column} ({way.__name__}): off by {error:.2g}")


__all__ = ["BY_NAME", "CASES", "LITERAL_SAMPLES", "Case", "Work", "verify"]

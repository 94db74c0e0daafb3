"""Checked arguments of the ops become calls of launchers, for every backend that has CUDA kernels.

Launchers are the functions of ``csrc/cuda/launch.h``: compiled, emulated on the CPU, or the same
sources compiled at run time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import increment_version

from ...base.errors import BackendError
from ...base.rng import Stream
from .. import clip, update
from .._count import Count, known
from ..ghost import explicit
from . import _device, _launch_coef, _launch_symbols, _library, _numbers, _tables
from ._launch_update import LAW_CODES, SUM_CODES, Planned, refuse

Tensors = Sequence[torch.Tensor]
Refusal = Callable[..., "str | None"]

_NOISED_CODES = {torch.int32: 0, torch.int64: 1, torch.float32: 2, torch.float64: 3}
_GRAD_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}
_STYLE_CODES = {style: code for code, style in enumerate(clip.STYLES)}


@dataclass(frozen=True)
class Rows:
    """A list of per-sample gradients as the launchers take it: ``RowTable``."""

    tasks: torch.Tensor
    count: int
    chunks: int
    columns: int

    @classmethod
    def of(cls, grads: Tensors, columns: Sequence[int], sums: Tensors = ()) -> Rows:
        """The table in the memory of the gradients' device."""
        addresses = [part.data_ptr() for part in grads]
        targets = [total.data_ptr() for total in sums] or [0] * len(addresses)
        table = _tables.rows(addresses, targets, columns)
        chunks = int(sum(-(-n // _tables.CHUNK) for n in columns))
        tasks = _tables.device_table(table, grads[0].device)
        return cls(tasks, len(addresses), chunks, sum(columns))

    def packed(self) -> tuple[int, int, int, int]:
        """Address and sizes."""
        return self.tasks.data_ptr(), self.count, self.chunks, self.columns


@dataclass(frozen=True)
class Launch:
    """The ops on one set of launchers.

    Attributes:
        to: the launchers.
        name: the backend, for messages.
        device: the type of device that it runs on.
        refusal: why tensors cannot be taken, or None.
    """

    to: Any
    name: str
    device: str
    refusal: Refusal

    def kernels(self) -> tuple[tuple[str, Callable[..., Any], Refusal], ...]:
        """``(op, run, refuse)``."""
        return (
            ("noise.keystream", self.keystream, self._refuse_nothing),
            ("noise.lattice_draws", self.lattice_draws, self._refuse_nothing),
            ("noise.rounding_bits", self.rounding_bits, self._refuse_nothing),
            ("noise.add_noise", self.add_noise, self._refuse_add_noise),
            ("clip.sample_norm", self.sample_norm, self._refuse_sample_norm),
            ("clip.clip_sum", self.clip_sum, self._refuse_gradients),
            ("update.step", self.update_step, self._refuse_update),
            ("update.advance", self.advance, self._refuse_clock),
            ("ghost.explicit_norm", self.explicit_norm, self._refuse_lists),
            ("ghost.clip_factors", self.clip_factors, self._refuse_lists),
            ("ghost.contract", self.contract, self._refuse_lists),
            ("symbols.randomize", self.randomize, self._refuse_first),
            *_launch_coef.kernels(self.to, self._check, self.refusal),
            *((name, run, self._refuse_first) for name, run in _library.KERNELS),
        )

    def _check(self, error: int) -> None:
        if error:
            raise BackendError(
                f"{self.name} kernel",
                expected="a successful launch",
                got=f"error {error}, {self.to.error_text(error)}",
                remedy="Run again with CUDA_LAUNCH_BLOCKING=1 to find the first call that fails.",
            )

    # refusals

    def _refuse_nothing(self, *_: Any, **__: Any) -> str | None:
        return self.refusal()

    def _refuse_add_noise(self, x: torch.Tensor, **kwargs: Any) -> str | None:
        if isinstance(kwargs.get("scale"), torch.Tensor):
            return "has one scale per call, got one per coordinate"
        if kwargs.get("draws") is not None:
            return "makes its draws in registers, got draws made ahead"
        return self.refusal(x)

    def _refuse_sample_norm(self, grads: clip.Gradients, **kwargs: Any) -> str | None:
        if kwargs.get("scale") is not None or kwargs.get("center") is not None:
            return "has no per-coordinate scale or centre"
        return self._refuse_gradients(grads)

    def _refuse_gradients(self, grads: clip.Gradients, *_: Any, **__: Any) -> str | None:
        return self.refusal(*clip.tensors_of(grads))

    def _refuse_lists(self, tensors: Tensors, *_: Any, **__: Any) -> str | None:
        return self.refusal(*tensors)

    def _refuse_update(self, params: Tensors, sums: Tensors, **kwargs: Any) -> str | None:
        return self.refusal(*params) or refuse(sums, kwargs.get("noise"))

    def _refuse_clock(self, clock: torch.Tensor, **_: Any) -> str | None:
        return self.refusal(clock)

    def _refuse_first(self, first: torch.Tensor | Tensors, *_: Any, **__: Any) -> str | None:
        return self.refusal(first if isinstance(first, torch.Tensor) else first[0])

    # noise

    def _at(self, device: torch.device | str) -> torch.device:
        """Where a result for ``device`` is made: there, if the kernels run there."""
        wanted = torch.device(device)
        return wanted if wanted.type == self.device else torch.device(self.device)

    def keystream(
        self,
        stream: Stream,
        *,
        first_block: int,
        blocks: int,
        device: torch.device | str = "cpu",
        backend: str | None = None,
    ) -> torch.Tensor:
        out = torch.empty(16 * blocks, dtype=torch.int32, device=self._at(device))
        with _device.guard(out.device) as cuda:
            packed = _tables.stream(stream).tobytes()
            self._check(self.to.keystream(packed, first_block, blocks, out.data_ptr(), cuda))
        return out.to(device)

    def lattice_draws(
        self,
        stream: Stream,
        *,
        position: int,
        count: int,
        distribution: str = "gaussian",
        device: torch.device | str = "cpu",
        out: torch.Tensor | None = None,
        backend: str | None = None,
    ) -> torch.Tensor:
        made = torch.empty(count, dtype=torch.int32, device=self._at(device))
        with _device.guard(made.device) as cuda:
            what = _tables.stream(stream).tobytes(), LAW_CODES[distribution], position, count
            self._check(self.to.lattice_draws(*what, made.data_ptr(), cuda))
        return made.to(device) if out is None else out.copy_(made)

    def rounding_bits(
        self,
        stream: Stream,
        *,
        position: int,
        count: int,
        device: torch.device | str = "cpu",
        out: torch.Tensor | None = None,
        backend: str | None = None,
    ) -> torch.Tensor:
        made = torch.empty(count, dtype=torch.int16, device=self._at(device))
        with _device.guard(made.device) as cuda:
            packed = _tables.stream(stream).tobytes()
            self._check(self.to.rounding_bits(packed, position, count, made.data_ptr(), cuda))
        return made.to(device) if out is None else out.copy_(made)

    def add_noise(
        self,
        x: torch.Tensor,
        *,
        stream: Stream,
        position: int = 0,
        distribution: str = "gaussian",
        scale: float | None = None,
        rounding: Stream | None = None,
        draws: None = None,
        backend: str | None = None,
    ) -> torch.Tensor:
        _device.refuse_noise_in_graphs(x.device)
        numbers = 0.0, 0.0
        if scale is not None:
            numbers = _numbers.per_unit(scale, x.dtype), _numbers.cell(scale, x.dtype)
        with _device.guard(x.device) as cuda:
            nonfinite = torch.zeros(1, dtype=torch.int64, device=x.device)
            error = self.to.add_noise(
                _tables.stream(stream).tobytes(),
                _tables.stream(rounding or stream).tobytes(),
                LAW_CODES[distribution],
                position,
                x.numel(),
                _NOISED_CODES[x.dtype],
                *numbers,
                x.data_ptr(),
                nonfinite.data_ptr(),
                cuda,
            )
            self._check(error)
        increment_version(x)
        return x

    def randomize(self, symbols: torch.Tensor, **given: Any) -> torch.Tensor:
        given.pop("backend", None)
        out, error = _launch_symbols.randomize(self.to, symbols, **given)
        self._check(error)
        return out

    # clip

    def _clip(
        self,
        request: clip.Request,
        code: int,
        sums: Tensors = (),
        per_units: Sequence[float] | None = None,
    ) -> torch.Tensor:
        """Run the clip kernels; norms per sample and tensor, float64 ``[B, tensors]``."""
        batch, count = request.batch_size, len(request.tensors)
        device = request.tensors[0].device
        with _device.guard(device) as cuda:
            held = [part.contiguous() for part in request.tensors]
            rows = Rows.of(held, [math.prod(part.shape[1:]) for part in held], sums)
            bounds = np.zeros(count, _tables.CLIP_BOUND)
            bounds["max_norm"], bounds["unit_bound"] = request.max_norms, request.unit_bounds
            bounds["per_unit"] = 1.0 if per_units is None else per_units
            plan = _tables.one(
                _tables.CLIP_PLAN,
                rows=batch,
                p=request.p,
                style=_STYLE_CODES[request.style],
                arithmetic=code,
            ).tobytes()
            what = plan, _GRAD_CODES[held[0].dtype], *rows.packed()
            places = (
                _tables.device_table(bounds, device),
                torch.zeros(batch, count, dtype=torch.float64, device=device),
                _device.workspace(self.to.clip_workspace(*what), device),
            )
            self._check(self.to.clip_sum(*what, *(place.data_ptr() for place in places), cuda))
        return places[1]

    def sample_norm(self, grads: clip.Gradients, *, p: int = 2, **_: Any) -> torch.Tensor:
        request = clip.Request.of(grads, 1.0, p, "flat", "float", None)
        return clip.combine_norms(self._clip(request, 0), p)

    def clip_sum(
        self,
        grads: clip.Gradients,
        max_grad_norm: float | tuple[float, ...],
        *,
        p: int = 2,
        style: str = "flat",
        arithmetic: str = "float",
        unit: float | tuple[float, ...] | None = None,
        out: list[torch.Tensor] | None = None,
        backend: str | None = None,
    ) -> clip.ClipResult:
        request = clip.Request.of(grads, max_grad_norm, p, style, arithmetic, unit)
        sums = request.accumulators(out)
        code = 1 if arithmetic == "float" else (2 if sums[0].dtype is torch.int32 else 3)
        norms = self._clip(request, code, sums, [1.0 / u for u in request.units])
        increment_version(list(sums))
        return request.result(sums, clip.combine_norms(norms, p))

    # update

    def update_step(
        self,
        params: list[torch.Tensor],
        sums: list[torch.Tensor],
        *,
        rule: update.Rule,
        state: update.State,
        gradient_scale: float = 1.0,
        noise: update.Noise | None = None,
        backend: str | None = None,
    ) -> Count:
        if not params:
            return 0
        device = params[0].device
        if noise is not None and noise.clock is None:
            _device.refuse_noise_in_graphs(device)
        with _device.guard(device) as cuda:
            nonfinite = torch.zeros(1, dtype=torch.int64, device=device)
            planned = Planned.of(
                params, sums, rule=rule, state=state, gradient_scale=gradient_scale, noise=noise
            )
            error = self.to.update_step(
                planned.plan, planned.tasks.data_ptr(), nonfinite.data_ptr(), cuda
            )
            self._check(error)
        increment_version(params)
        state.steps += 1
        return 0 if sums[0].dtype in SUM_CODES else known(nonfinite[0])

    def prepare_update(self, params: list[torch.Tensor], *arguments: Any, **named: Any) -> Planned:
        """Whatever ``update.step`` with these arguments loads and copies, without launching it, so
        that a CUDA graph may record the launch; the result must live as long as the graph."""
        with _device.guard(params[0].device):
            self._check(self.to.preload())
            return Planned.of(params, *arguments, **named)

    def advance(
        self, clock: torch.Tensor, *, rule: update.Rule, backend: str | None = None
    ) -> torch.Tensor:
        betas = rule.betas if isinstance(rule, update.Adam) else (1.0, 1.0)
        with _device.guard(clock.device) as cuda:
            self._check(self.to.advance(clock.data_ptr(), *betas, cuda))
        increment_version(clock)
        return clock

    # gradients that exist anyway

    def explicit_norm(self, grads: Tensors, *, backend: str | None = None) -> torch.Tensor:
        batch, wide = grads[0].shape[0], grads[0].dtype is torch.float64
        device = grads[0].device
        with _device.guard(device) as cuda:
            rows = Rows.of(grads, _columns(grads)).packed()
            squares = torch.zeros(batch, dtype=torch.float64, device=device)
            room = _device.workspace(self.to.explicit_norm_workspace(*rows, batch), device)
            places = squares.data_ptr(), room.data_ptr()
            self._check(self.to.explicit_norm(*rows, wide, batch, *places, cuda))
        return squares

    def clip_factors(
        self,
        squares: Tensors,
        max_grad_norm: float,
        *,
        dtype: torch.dtype,
        scale: float = 1.0,
        automatic: bool = False,
        backend: str | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        batch, device = squares[0].shape[0], squares[0].device
        numbers: dict[str, Any] = {"max_norm": float(max_grad_norm), "scale": float(scale)}
        rule = _tables.one(_tables.CLIP_RULE, automatic=automatic, **numbers).tobytes()
        with _device.guard(device) as cuda:
            addresses = np.array([part.data_ptr() for part in squares], np.uint64)
            table = _tables.device_table(addresses, device)
            norms = torch.empty(batch, dtype=torch.float64, device=device)
            factors = torch.empty(batch, dtype=dtype, device=device)
            sizes = table.data_ptr(), len(squares), batch
            places = norms.data_ptr(), factors.data_ptr()
            wide = dtype is torch.float64
            self._check(self.to.clip_factors(*sizes, rule, wide, *places, cuda))
        return factors, norms

    def contract(
        self, grads: Tensors, factors: torch.Tensor, outs: Tensors, *, backend: str | None = None
    ) -> None:
        batch, device, wide = len(factors), factors.device, factors.dtype is torch.float64
        with _device.guard(device) as cuda:
            # A gradient in another order of entries is summed in that order, then put right.
            flat = [
                out if part.is_contiguous() else torch.zeros_like(out).view(-1)
                for part, out in zip(grads, outs, strict=True)
            ]
            rows = Rows.of(grads, _columns(grads), flat).packed()
            room = _device.workspace(self.to.contract_workspace(*rows, wide, batch), device)
            places = factors.data_ptr(), wide, batch, room.data_ptr()
            self._check(self.to.contract(*rows, *places, cuda))
        for part, out, total in zip(grads, outs, flat, strict=True):
            if total is out:
                increment_version(out)
                continue
            order = [i - 1 for i in explicit.memory_order(part)]
            with torch.no_grad():
                out.permute(order).add_(total.view([out.shape[i] for i in order]))


def _columns(grads: Tensors) -> list[int]:
    return [part[0].numel() if len(part) else 0 for part in grads]

"""The compiled CPU kernels: marshal checked arguments to ``dpkern._C``."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch
from torch.autograd.graph import increment_version

from .. import _dispatch
from .._threads import allowed
from ..errors import InvalidInput
from ..laws import LAWS
from ..ops import clip, noise, update
from ..ops._draws import Draws
from ..rng import Stream
from . import (
    _coef,
    _explicit,
    _ghost_conv,
    _native,
    _product,
    _project,
    _spectral,
    _symbols,
)

ISAS = ("baseline", "avx2", "avx512", "avx512vbmi")
_LAW_CODES = {name: code for code, name in enumerate(LAWS)}
_GRAD_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}
_STYLE_CODES = {style: code for code, style in enumerate(clip.STYLES)}
_SUM_CODES = {torch.int32: 0, torch.int64: 1}

COMPILED = (
    "ghost.clip_factors",
    "ghost.contract",
    "ghost.embedding_norm",
    "ghost.embedding_sum",
    "ghost.explicit_norm",
    "ghost.group_norm_backward",
    "ghost.layer_norm_backward",
    "ghost.linear_gradient",
    "ghost.linear_norm",
    "ghost.linear_sum",
    "ghost.rms_norm_backward",
    "ghost.tied_cross",
    "product.matmul",
)
"""Ops with a compiled kernel ``csrc/cpu`` of their name; the build writes its binding."""

_C: Any = None


def _extension() -> ModuleType | str:
    try:
        from dpkern import _C as extension  # type: ignore[attr-defined, unused-ignore]
    except ImportError as error:
        return (
            f"has no compiled module ({error}): build with a C++17 compiler and cmake, "
            "pip install . without DPKERN_NATIVE=off"
        )
    return extension  # type: ignore[no-any-return, unused-ignore]


def load() -> tuple[bool, str]:
    """Import the extension and register its kernels; or say why not."""
    global _C
    extension = _extension()
    if isinstance(extension, str):
        return False, extension
    _C = extension
    for name in COMPILED:
        compiled = _native.kernel(name, _C, _threads)
        _dispatch.register(name, "cpu", _AROUND.get(name, lambda kernel: kernel)(compiled))
    for name, run, refuse in (
        *_KERNELS,
        *_ghost_conv.KERNELS,
        *_project.KERNELS,
        *_coef.KERNELS,
        *_symbols.KERNELS,
        *_spectral.KERNELS,
    ):
        _dispatch.register(name, "cpu", run, refuse)
    return True, ""


def build_config() -> dict[str, Any]:
    """What the extension was built with and which instruction set it uses; empty if absent."""
    ok, reason = _dispatch.availability("cpu")
    if not ok:
        return {"native": False, "reason": reason}
    config = dict(_C.build_config())
    config["native"] = True
    config["detected_isa"] = ISAS[config["detected_isa"]]
    config["isa"] = isa()
    config["products"] = "dpkern" if _product.own() else "torch"
    return config


def isa() -> str:
    """The instruction set in use, one of ``ISAS``."""
    return ISAS[_C.isa()]


def use_isa(name: str) -> None:
    """Use a lower instruction set than the processor's best (results never depend on it)."""
    if name not in ISAS or not _C.use_isa(ISAS.index(name)):
        raise InvalidInput(
            "isa",
            expected=f"one of {', '.join(ISAS)} that this processor has",
            got=name,
            remedy="`dpkern info` shows the processor's best.",
        )


def use_own_products(wanted: bool) -> AbstractContextManager[None]:
    """Matrix products in the compiled kernel, or in torch's library, whichever is faster here."""
    return _product.use_own(wanted)


_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_after_fork)


def _threads() -> int:
    # The OpenMP team of the parent does not exist in a forked child, which would wait for it.
    return 1 if _forked else allowed()


def _on_cpu(*tensors: torch.Tensor) -> str | None:
    for tensor in tensors:
        if not tensor.is_cpu:
            return f"runs on the CPU, got a tensor on {tensor.device}"
    return None


def _refuse_first(first: Any, *_: Any, **__: Any) -> str | None:
    """Why not, for a call whose first argument is a tensor or a list of them."""
    return _on_cpu(first if isinstance(first, torch.Tensor) else first[0])


def _keystream(
    stream: Stream,
    *,
    first_block: int,
    blocks: int,
    device: torch.device | str = "cpu",
    backend: str | None = None,
) -> torch.Tensor:
    out = torch.empty(16 * blocks, dtype=torch.int32)
    _C.keystream(out.data_ptr(), stream.packed(), first_block, blocks, _threads())
    return out.to(device)


def _lattice_draws(
    stream: Stream,
    *,
    position: int,
    count: int,
    distribution: str = "gaussian",
    device: torch.device | str = "cpu",
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    made = torch.empty(count, dtype=torch.int32) if out is None else out
    law = _LAW_CODES[distribution]
    _C.lattice_draws(made.data_ptr(), stream.packed(), law, position, count, _threads())
    increment_version(made)
    return made.to(device)


def _rounding_bits(
    stream: Stream,
    *,
    position: int,
    count: int,
    device: torch.device | str = "cpu",
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    made = torch.empty(count, dtype=torch.int16) if out is None else out
    _C.rounding_draws(made.data_ptr(), stream.packed(), position, count, _threads())
    increment_version(made)
    return made.to(device)


def _made(draws: Draws | None) -> tuple[int, int, int]:
    """Where draws made ahead are, for a kernel; zeros: there are none."""
    if draws is None:
        return 0, 0, 0
    bits = 0 if draws.rounding is None else draws.rounding.data_ptr()
    return draws.values.data_ptr(), bits, draws.first


def _refuse_add_noise(x: torch.Tensor, **kwargs: Any) -> str | None:
    if isinstance(kwargs.get("scale"), torch.Tensor):
        return "has one scale per call, got one per coordinate"
    return _on_cpu(x)


def _add_noise(
    x: torch.Tensor,
    *,
    stream: Stream,
    position: int = 0,
    distribution: str = "gaussian",
    scale: float | None = None,
    rounding: Stream | None = None,
    draws: Draws | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    law, n, threads = _LAW_CODES[distribution], x.numel(), _threads()
    made = _made(draws)
    if x.dtype in noise.INTEGERS:
        wide = x.dtype is torch.int64
        _C.add_noise_integer(x.data_ptr(), wide, stream.packed(), law, made, position, n, threads)
        increment_version(x)
        return x
    wide = x.dtype is torch.float64
    streams = stream.packed(), (rounding or stream).packed()
    _C.add_noise_float(x.data_ptr(), wide, *streams, law, made, position, n, scale, threads)
    increment_version(x)
    return x


def _refuse_sample_norm(grads: clip.Gradients, **kwargs: Any) -> str | None:
    if kwargs.get("scale") is not None or kwargs.get("center") is not None:
        return "has no per-coordinate scale or centre"
    return _on_cpu(*clip.tensors_of(grads))


def _power_matrix(
    tensors: tuple[torch.Tensor, ...], p: int, call: tuple[int, int], items: tuple[list[Any], ...]
) -> torch.Tensor:
    """Run the clip kernel; norms per sample and tensor, float64 ``[B, tensors]``."""
    style, arithmetic = call
    sums, max_norms, per_units, unit_bounds = items
    batch = tensors[0].shape[0]
    norms = torch.zeros(batch, len(tensors), dtype=torch.float64)
    held = [t.contiguous() for t in tensors]
    _C.clip_sum(
        batch,
        p,
        style,
        arithmetic,
        _GRAD_CODES[tensors[0].dtype],
        [t.data_ptr() for t in held],
        sums,
        [t[0].numel() if batch else 0 for t in held],
        max_norms,
        per_units,
        unit_bounds,
        norms.data_ptr(),
        _threads(),
    )
    return norms


def _sample_norm(grads: clip.Gradients, *, p: int = 2, **_: Any) -> torch.Tensor:
    tensors = clip.tensors_of(grads)
    zeros = [0] * len(tensors)
    ones = [1.0] * len(tensors)
    norms = _power_matrix(tensors, p, (0, 0), (zeros, ones, ones, zeros))
    return clip.combine_norms(norms, p)


def _refuse_clip_sum(grads: clip.Gradients, *_: Any, **__: Any) -> str | None:
    return _on_cpu(*clip.tensors_of(grads))


def _clip_sum(
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
    items: tuple[list[Any], ...] = (
        [s.data_ptr() for s in sums],
        list(request.max_norms),
        [1.0 / u for u in request.units],
        list(request.unit_bounds),
    )
    norms = _power_matrix(request.tensors, p, (_STYLE_CODES[style], code), items)
    return request.result(sums, clip.combine_norms(norms, p))


def _refuse_update(params: Any, sums: Any, **kwargs: Any) -> str | None:
    if params and params[0].dtype not in noise.FLOATS:
        return f"updates float32 and float64 parameters, got {params[0].dtype}"
    return _on_cpu(*params)


def _update_step(
    params: list[torch.Tensor],
    sums: list[torch.Tensor],
    *,
    rule: update.Rule,
    state: update.State,
    gradient_scale: float = 1.0,
    noise: update.Noise | None = None,
    backend: str | None = None,
) -> int:
    if not params:
        return 0
    dtype = params[0].dtype
    noise, t, powers = update.at_clock(noise, rule, state.steps)
    buffers = [state.buffers[name] for name in rule.buffer_names()]
    none = [0] * len(params)
    addresses = [[b.data_ptr() for b in group] for group in buffers] + [none, none]
    packed: tuple[Any, ...] | None = None
    positions, scales = none, [0.0] * len(params)
    if noise is not None:
        rounding = noise.rounding.packed() if noise.rounding is not None else None
        streams = noise.stream.packed(), rounding
        packed = (_LAW_CODES[noise.distribution], *streams, _made(noise.draws))
        positions, scales = list(noise.positions), list(noise.scales)
    bad: int = _C.update_step(
        rule.packed(t, powers),
        packed,
        _SUM_CODES.get(sums[0].dtype, 2),
        dtype is torch.float64,
        gradient_scale,
        [t.data_ptr() for t in params],
        [t.data_ptr() for t in sums],
        addresses[0],
        addresses[1],
        [t.numel() for t in params],
        positions,
        scales,
        _threads(),
    )
    # Autograd must know that these changed, as it would after an in-place torch operation.
    increment_version(params)
    state.steps += 1
    return bad


_AROUND = {"ghost.contract": _explicit.contract, "product.matmul": _product.matmul}
"""What stands around a compiled kernel."""


def _always(*_: Any, **__: Any) -> None:
    return None


_KERNELS: tuple[tuple[str, Any, Any], ...] = (
    ("noise.keystream", _keystream, _always),
    ("noise.lattice_draws", _lattice_draws, _always),
    ("noise.rounding_bits", _rounding_bits, _always),
    ("noise.add_noise", _add_noise, _refuse_add_noise),
    ("clip.sample_norm", _sample_norm, _refuse_sample_norm),
    ("clip.clip_sum", _clip_sum, _refuse_clip_sum),
    ("update.step", _update_step, _refuse_update),
)

"""The compiled CPU kernels of ``dpkern._C``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from ...base import dispatch, validate
from ...base.errors import InvalidInput
from ...base.kernel import Kernel
from ...base.schema import BoundCall
from .. import noise
from . import (
    _circulant,
    _clip,
    _coef,
    _direct,
    _explicit,
    _ghost_conv,
    _native,
    _product,
    _project,
    _spectral,
    _update,
)
from ._extension import ISAS, compiled, isa, load_extension, threads

COMPILED = (
    "coef.descend",
    "coef.expanded",
    "coef.perturb",
    "coef.quadratic",
    "ghost.clip_factors",
    "ghost.contract",
    "ghost.conv_gradient",
    "ghost.conv_integer_sum",
    "ghost.conv_norm",
    "ghost.conv_sum",
    "ghost.conv_sum_error",
    "ghost.embedding_integer_sum",
    "ghost.embedding_norm",
    "ghost.embedding_sum",
    "ghost.explicit_integer_sum",
    "ghost.explicit_norm",
    "ghost.group_norm_backward",
    "ghost.layer_norm_backward",
    "ghost.linear_gradient",
    "ghost.linear_integer_norm",
    "ghost.linear_integer_sum",
    "ghost.linear_norm",
    "ghost.linear_sum",
    "ghost.linear_sum_error",
    "ghost.rms_norm_backward",
    "ghost.tied_cross",
    "ghost.tied_integer_sum",
    "ghost.tied_sum_error",
    "noise.add_noise",
    "noise.keystream",
    "noise.lattice_draws",
    "noise.rounding_bits",
    "noise.source_draws",
    "product.matmul",
    "recurrent.gru",
    "recurrent.gru_backward",
    "recurrent.lstm",
    "recurrent.lstm_backward",
    "recurrent.rnn",
    "recurrent.rnn_backward",
    "symbols.randomize",
)
"""Ops with a compiled kernel ``csrc/cpu`` of their name; the build writes its binding."""

_COMPOSED: dict[str, tuple[Any, ...]] = {
    "clip.clip_sum": (_clip.clip_rows, _clip.prepare, _clip.finish),
    "update.step": (_update.update_tensors, _update.prepare, _update.finish),
}
"""Ops that a compiled function carries out, and what stands before and behind its call."""

COUNTING = ("coef.perturb", "coef.quadratic")
"""Those whose kernel returns how many entries it refuses."""


def load() -> tuple[bool, str]:
    """Import the extension and register its kernels; or say why not."""
    extension = load_extension()
    if isinstance(extension, str):
        return False, extension
    _native.connect(extension, threads)
    for name in COMPILED:
        made = _native.kernel(name, extension, threads, _RESULTS.get(name), _coef.FOUND.get(name))
        around = _AROUND.get(name)
        dispatch.register(name, "cpu", made if around is None else around(made))
    direct = _direct.connect(extension)
    for name, kernel in {**_clip.KERNELS, **_update.KERNELS}.items():
        if direct and name in _COMPOSED:
            function, prepare, finish = _COMPOSED[name]
            call = function.carrying_out(dispatch.OPS[name].schema, prepare, finish)
            kernel = replace(kernel, direct=call)
        dispatch.register(name, "cpu", kernel)
    for name, run, refuse in (*_project.KERNELS, *_circulant.KERNELS, *_spectral.KERNELS):
        dispatch.register(name, "cpu", run, refuse)
    if direct:
        validate.see_by(extension.alike)
        for op in dispatch.OPS.values():
            op.schema.look_by(lambda schema: _direct.binder(schema, extension))
    return True, ""


def build_config() -> dict[str, Any]:
    """Return how the extension was built and which instruction set it uses; empty if absent."""
    ok, reason = dispatch.availability("cpu")
    if not ok:
        return {"native": False, "reason": reason}
    config = dict(compiled().build_config())
    config["native"] = True
    config["detected_isa"] = ISAS[config["detected_isa"]]
    config["isa"] = isa()
    config["products"] = "dpkern" if _product.is_own(torch.float32, sys.maxsize) else "torch"
    return config


def use_isa(name: str) -> None:
    """Use a lower instruction set than the processor's best (results never depend on it)."""
    if name not in ISAS or not compiled().use_isa(ISAS.index(name)):
        raise InvalidInput(
            "isa",
            expected=f"one of {', '.join(ISAS)} that this processor has",
            got=name,
            remedy="Pass the one that `dpkern info` shows, or a lower one.",
        )


def use_own_products(wanted: bool) -> AbstractContextManager[None]:
    """Choose whether the compiled kernel or torch's library multiplies: the faster one here."""
    return _product.use_own(wanted)


def _one_scale(kernel: Kernel) -> Kernel:
    """Run ``noise.add_noise``."""

    def refuse(bound: BoundCall) -> str | None:
        if isinstance(bound.args[_SCALE], torch.Tensor):
            return "has one scale per call, got one per coordinate"
        return kernel.refuse(bound) if kernel.refuse is not None else None

    return Kernel(kernel.run, refuse, kernel.direct)


def _on_cpu(kernel: Kernel) -> Kernel:
    """Run ``noise.source_draws``."""

    def refuse(bound: BoundCall) -> str | None:
        place = bound.args[0].values.device
        if place.type != "cpu":
            return f"reads tables in the CPU's memory, got one on {place}"
        return kernel.refuse(bound) if kernel.refuse is not None else None

    return Kernel(kernel.run, refuse)


_SCALE = [parameter.name for parameter in noise.add_noise.schema.signature.parameters].index(
    "scale"
)
_AROUND: dict[str, Callable[[Kernel], Kernel]] = {
    "ghost.contract": _explicit.contract,
    "ghost.conv_gradient": _ghost_conv.planar,
    "ghost.conv_norm": _ghost_conv.norm,
    "ghost.conv_integer_sum": _ghost_conv.planar,
    "ghost.conv_sum": _ghost_conv.planar,
    "ghost.conv_sum_error": _ghost_conv.planar,
    "ghost.explicit_integer_sum": _explicit.contract,
    "noise.add_noise": _one_scale,
    "noise.source_draws": _on_cpu,
    "product.matmul": _product.matmul,
}
"""Wrappers of compiled kernels."""

_RESULTS = {"ghost.conv_gradient": {"grads": _ghost_conv.gradients}}
"""Results that lie in memory as their kernel wants it."""

"""Find everything that keeps a model from being trained privately, without running it.

``check`` raises one error that lists every finding. What shows only when the model runs (samples
mixed by an operation, an operation without a rule, buffers written by a custom module) is found by
the capture; its findings are of the same kind and go into the same error with ``refuse``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils import parametrizations
from torch.nn.utils.spectral_norm import SpectralNorm

from ..base.errors import InvalidInput, UnsupportedModule
from .parameter import has_hooks

TRAINABLE_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

_Said = tuple[Literal["refuse", "note"], str, str]


@dataclass(frozen=True)
class Finding:
    """One thing to know about a model.

    Args:
        name: path of the module or parameter; empty for the model itself.
        kind: class of the module, or ``parameter``.
        what: what is wrong, or worth knowing.
        remedy: what to do about it.
        severity: ``refuse`` where training would be wrong, else ``note``.
    """

    name: str
    kind: str
    what: str
    remedy: str
    severity: Literal["refuse", "note"] = "refuse"

    def __str__(self) -> str:
        where = f"{self.name} ({self.kind})" if self.name else self.kind
        return f"{where}: {self.what}. {self.remedy}"


def static_findings(module: nn.Module) -> list[Finding]:
    """Return all findings from module classes, their options and the parameters, in model order.

    Raises:
        InvalidInput: it is no module.
    """
    if not isinstance(module, nn.Module):
        raise InvalidInput(
            "module",
            expected="an nn.Module",
            got=type(module).__name__,
            remedy="Pass the model itself.",
        )
    found = []
    for name, part in module.named_modules():
        for rule in _MODULE_RULES:
            said = rule(part, module)
            if said is not None:
                severity, what, remedy = said
                found.append(Finding(name, type(part).__name__, what, remedy, severity))
    return [*found, *_parameter_findings(module)]


def check(module: nn.Module) -> list[Finding]:
    """Raise for everything in ``static_findings`` that is refused; return the notes.

    Raises:
        UnsupportedModule: one error for all findings, one numbered line each.
    """
    findings = static_findings(module)
    refuse(module, findings)
    return [finding for finding in findings if finding.severity == "note"]


def refuse(module: nn.Module, findings: Iterable[Finding]) -> None:
    """Raise one ``UnsupportedModule`` with all refused findings, if there are any."""
    refused = [finding for finding in findings if finding.severity == "refuse"]
    if not refused:
        return
    lines = [f"{number}. {finding}" for number, finding in enumerate(refused, 1)]
    raise UnsupportedModule(
        type(module).__name__,
        expected="a model whose per-sample gradients can be computed correctly",
        got="\n".join([f"{len(refused)} finding{'s' if len(refused) > 1 else ''}:", *lines]),
        remedy="Follow the advice of each finding. Nothing was changed or trained.",
    )


def is_frozen(part: nn.Module, root: nn.Module) -> bool:
    """Whether a normalisation layer was put into eval mode on purpose, in a model that trains.

    Such a layer uses and keeps the statistics that it has.
    """
    tracked = getattr(part, "running_mean", None) is not None
    return tracked and root.training and not part.training


def _batch_norm(part: nn.Module, root: nn.Module) -> _Said | None:
    if not isinstance(part, _BatchNorm):
        return None
    if is_frozen(part, root):
        return _FROZEN
    return (
        "refuse",
        "normalises every sample with the statistics of its batch and keeps them in buffers",
        "Use GroupNorm (dpkern.fix(model) replaces plain layers), or train the model "
        "with this layer in eval() and statistics that need no privacy.",
    )


def _instance_norm(part: nn.Module, root: nn.Module) -> _Said | None:
    if not isinstance(part, _InstanceNorm) or not part.track_running_stats:
        return None
    if is_frozen(part, root):
        return _FROZEN
    return (
        "refuse",
        "keeps running statistics of the samples, without noise, in buffers",
        "Pass track_running_stats=False, or call dpkern.fix(model).",
    )


_FROZEN: _Said = (
    "note",
    "is frozen: uses the running statistics that it came with",
    "Keep it in eval(), also after model.train(); its statistics must need no privacy.",
)


def _embedding(part: nn.Module, root: nn.Module) -> _Said | None:
    if not isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
        return None
    # max_norm rewrites rows in the forward pass, also those that are not trained.
    if part.max_norm is not None:
        return (
            "refuse",
            f"max_norm={part.max_norm} rewrites, without noise, the rows that a batch looks up",
            "Leave max_norm out; normalise the output of the layer instead.",
        )
    if not part.weight.requires_grad:
        return None
    if part.scale_grad_by_freq:
        return (
            "refuse",
            "scale_grad_by_freq divides a sample's gradient by counts over the whole batch",
            "Leave scale_grad_by_freq out.",
        )
    if part.sparse:
        return (
            "refuse",
            "sparse gradients: the noise covers all rows, so the gradient is dense",
            "Leave sparse=True out, and use an optimizer for dense gradients.",
        )
    return None


def _time_first(part: nn.Module, root: nn.Module) -> _Said | None:
    if isinstance(part, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        if part.self_attn.batch_first:
            return None
        return (
            "refuse",
            "batch_first=False: its linear and normalisation layers see time and not samples first",
            "Call dpkern.fix(model), or pass batch_first=True and inputs of shape "
            "[batch, time, features].",
        )
    if isinstance(part, (nn.MultiheadAttention, nn.RNNBase)) and not part.batch_first:
        return (
            "note",
            "batch_first=False: correct by itself",
            "Keep the batch first in the layers around it; batch_first=True saves transpositions.",
        )
    return None


def _wrapper(part: nn.Module, root: nn.Module) -> _Said | None:
    # Compared by name, because importing the classes of rarely used parts of torch takes long.
    kind = f"{type(part).__module__}.{type(part).__name__}"
    for suffix, what, remedy in _WRAPPERS:
        if kind.endswith(suffix):
            return "refuse", what, remedy
    if isinstance(part, nn.DataParallel):
        return (
            "refuse",
            "splits a batch over threads, which cannot be told apart",
            "Use one process per device, with DistributedDataParallel or without a wrapper.",
        )
    if isinstance(part, torch.jit.ScriptModule):
        return (
            "refuse",
            "is compiled by TorchScript, inside which no parameter can be watched",
            "Pass the Python module that was scripted or traced.",
        )
    return None


_WRAPPERS = (
    (
        "_dynamo.eval_frame.OptimizedModule",
        "is compiled by torch.compile, inside which no parameter can be watched",
        "Pass the module that was compiled (its _orig_mod).",
    ),
    (
        "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel",
        "flattens the parameters of many layers into one",
        "Use torch.distributed.fsdp.fully_shard.",
    ),
    (
        "GradSampleModule",
        "is wrapped already, for another library's per-sample gradients",
        "Pass the module inside (its _module), free of that library's hooks.",
    ),
)


def _observer(part: nn.Module, root: nn.Module) -> _Said | None:
    """Refuse observers of quantisation-aware training, which keep ranges of activations."""
    names = {cls.__name__ for cls in type(part).__mro__}
    if not names & {"FakeQuantizeBase", "ObserverBase"}:
        return None
    return (
        "refuse",
        "keeps the range of what it sees, without noise, in buffers",
        "Train without observers and quantise afterwards.",
    )


def _spectral_norm(part: nn.Module, root: nn.Module) -> _Said | None:
    hooks = part._forward_pre_hooks.values()
    old = any(isinstance(hook, SpectralNorm) for hook in hooks)
    if not old and not isinstance(part, parametrizations._SpectralNorm):
        return None
    return (
        "note",
        "spectral norm: its power iteration reads weights only, so its buffers hold no data",
        "Nothing to do.",
    )


_MODULE_RULES: tuple[Callable[[nn.Module, nn.Module], _Said | None], ...] = (
    _batch_norm,
    _instance_norm,
    _embedding,
    _time_first,
    _wrapper,
    _observer,
    _spectral_norm,
)


def _parameter_findings(module: nn.Module) -> Iterator[Finding]:
    devices: dict[torch.device, str] = {}
    trainable = False
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            trainable = True
            yield _of_parameter(
                name,
                "has no shape yet: its module is lazy",
                "Run one batch of made-up data through the model first.",
            )
            continue
        if not parameter.requires_grad:
            continue
        trainable = True
        devices.setdefault(parameter.device, name)
        yield from _unusable(name, parameter)
    if not trainable:
        yield Finding(
            "",
            type(module).__name__,
            "no parameter requires a gradient",
            "Call requires_grad_() on what is to be trained.",
        )
    if len(devices) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in devices.items())
        yield Finding(
            "",
            type(module).__name__,
            f"trained parameters on several devices: {places}",
            "Move the model to one device with .to(device).",
        )


def _unusable(name: str, parameter: nn.Parameter) -> Iterator[Finding]:
    if parameter.is_meta:
        yield _of_parameter(
            name, "is on the meta device and holds no values", "Load the model onto a device."
        )
    if parameter.layout != torch.strided:
        yield _of_parameter(
            name, f"has layout {parameter.layout}", "Make it dense with .to_dense()."
        )
    if parameter.dtype not in TRAINABLE_DTYPES:
        listed = ", ".join(str(dtype) for dtype in TRAINABLE_DTYPES)
        yield _of_parameter(
            name, f"has dtype {parameter.dtype}", f"Cast it to one of {listed}, or freeze it."
        )
    if has_hooks(parameter):
        yield _of_parameter(
            name,
            "has gradient hooks, which are not called: there is no gradient in .grad to hook",
            "Change the optimizer or the loss instead.",
            "note",
        )


def _of_parameter(
    name: str, what: str, remedy: str, severity: Literal["refuse", "note"] = "refuse"
) -> Finding:
    return Finding(name, "parameter", what, remedy, severity)

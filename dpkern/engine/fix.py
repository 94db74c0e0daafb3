"""Replace normalisation that mixes samples by normalisation that does not; put the batch first.

A model that was trained with batch normalisation behaves differently afterwards: scale and shift
are kept, running statistics are dropped. Fine-tune it, or keep its layers frozen instead.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils import parametrize

from ..nn.sequence import batch_first, is_time_first
from .validate import is_frozen

MOST_GROUPS = 32

# A group's statistics need several values. Behind BatchNorm1d there may be nothing but channels,
# and two values normalised by themselves are always 1 and -1.
LEAST_CHANNELS = 2
LEAST_CHANNELS_1D = 8

_FORWARDS = (nn.BatchNorm2d.forward, nn.SyncBatchNorm.forward)


@dataclass(frozen=True)
class Fix:
    """One replacement: the path of the module, what it is, and what ``fix`` puts there."""

    name: str
    before: str
    after: str


def fixes(model: nn.Module) -> list[Fix]:
    """Return the replacements that ``fix(model)`` would make; the model stays as it is."""
    found = []
    for name, part in model.named_modules():
        if _is_replaceable(part, model):
            found.append(Fix(name, repr(part), repr(_group_norm(part))))
        elif is_time_first(part):
            found.append(Fix(name, f"{type(part).__name__}(batch_first=False)", "batch first"))
        elif _is_tracking(part, model):
            after = repr(part).replace("track_running_stats=True", "track_running_stats=False")
            found.append(Fix(name, repr(part), after))
    return found


def fix(model: nn.Module) -> nn.Module:
    """Replace batch normalisation by ``GroupNorm`` and stop the tracking of running statistics.

    - ``BatchNorm1d/2d/3d`` and ``SyncBatchNorm`` of C channels become ``GroupNorm`` with the
      largest number of groups that divides C, is at most 32 (Wu and He 2018) and leaves two
      channels in a group, eight for ``BatchNorm1d``; one group if there is none. ``weight`` and
      ``bias`` stay the same parameters, so an optimizer that holds them stays valid.
    - Subclasses that run their submodules behind the normalisation, as timm's ``BatchNormAct2d``
      does with dropout and activation, become a ``GroupNorm`` that runs the same submodules
      (``GroupNormAct``). A copy runs on random numbers first, and must give what this says.
    - ``InstanceNorm`` with ``track_running_stats`` stops tracking.
    - ``TransformerEncoderLayer`` and ``TransformerDecoderLayer`` with ``batch_first=False`` work
      with the batch first inside (``dpkern.nn.batch_first``); inputs, outputs and results stay.

    Two kinds of normalisation stay: those frozen in eval() within a model that trains, and those
    with any other forward, hooks or parametrisations, which ``validate.check`` refuses.
    Training mode, device, dtype, ``requires_grad`` and sharing of modules are kept. A second call
    changes nothing.

    Returns:
        ``model``, changed in place; another module only if the model itself is such a layer.
    """
    made: dict[nn.Module, nn.Module] = {}
    # All paths of a shared module are visited, because the replacement must stay shared.
    for path, part in list(model.named_modules(remove_duplicate=False)):
        if _is_replaceable(part, model):
            if part not in made:
                made[part] = _group_norm(part)
            if path:
                model.set_submodule(path, made[part])
        elif is_time_first(part):
            batch_first(part)
        elif _is_tracking(part, model):
            part.track_running_stats = False
            part.running_mean = part.running_var = part.num_batches_tracked = None
    return made.get(model, model)


def _is_replaceable(part: nn.Module, root: nn.Module) -> TypeGuard[_BatchNorm]:
    return (
        isinstance(part, _BatchNorm)
        and part.num_features > 0  # a lazy one knows its channels after the first batch
        and not parametrize.is_parametrized(part)
        and not part._forward_hooks
        and not part._forward_pre_hooks
        and not is_frozen(part, root)
        and (_has_plain_forward(part) or _runs_children_behind(part))
    )


def _has_plain_forward(part: nn.Module) -> bool:
    return getattr(part.forward, "__func__", None) in _FORWARDS


def _runs_children_behind(part: _BatchNorm) -> bool:
    """Whether a copy does nothing but normalise and run its submodules in their order."""
    if not list(part.children()) or part.weight is None or part.weight.is_meta:
        return False
    if any(isinstance(child, _BatchNorm) for child in part.children()):
        return False
    other = copy.deepcopy(part)
    dims = 2 if isinstance(part, nn.BatchNorm1d) else 5 if isinstance(part, nn.BatchNorm3d) else 4
    place, kind = part.weight.device, part.weight.dtype
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for tensor in (other.weight, other.bias, other.running_mean):
            if tensor is not None:
                tensor.normal_()
        if other.running_var is not None:
            other.running_var.uniform_(0.5, 2.0)
        for training in (True, False):
            other.train(training)
            x = torch.randn(3, part.num_features, *(2,) * (dims - 2)).to(place, kind)
            found = []
            for own in (False, True):
                plain = copy.deepcopy(other)
                torch.manual_seed(1)  # for dropout
                try:
                    made = plain(x.clone()) if own else _normalised_then_children(plain, x)
                except (RuntimeError, ValueError, TypeError, AssertionError, NotImplementedError):
                    return False  # it takes other inputs
                found.append(made)
            expected, got = found
            if not (isinstance(got, Tensor) and got.shape == expected.shape):
                return False
            close = 1e-5 if torch.finfo(kind).bits >= 32 else 1e-2
            if not torch.allclose(expected.float(), got.float(), rtol=close, atol=close):
                return False
    return True


def _normalised_then_children(part: _BatchNorm, x: Tensor) -> Tensor:
    made = nn.functional.batch_norm(
        x,
        part.running_mean,
        part.running_var,
        part.weight,
        part.bias,
        training=part.training or part.running_mean is None,
        eps=part.eps,
    )
    for child in part.children():
        made = child(made)
    return made


class GroupNormAct(nn.GroupNorm):
    """Group normalisation and what follows it: its submodules, in their order."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised input behind all submodules."""
        x = super().forward(x)
        for child in self.children():
            x = child(x)
        return x


def _is_tracking(part: nn.Module, root: nn.Module) -> TypeGuard[_InstanceNorm]:
    return (
        isinstance(part, _InstanceNorm) and part.track_running_stats and not is_frozen(part, root)
    )


def _group_norm(norm: _BatchNorm) -> nn.GroupNorm:
    least = LEAST_CHANNELS_1D if isinstance(norm, nn.BatchNorm1d) else LEAST_CHANNELS
    channels = norm.num_features
    groups = max(
        count
        for count in range(1, min(MOST_GROUPS, channels) + 1)
        if channels % count == 0 and (count == 1 or channels // count >= least)
    )
    kind = nn.GroupNorm if _has_plain_forward(norm) else GroupNormAct
    made = kind(groups, channels, eps=norm.eps, affine=False)
    made.affine = norm.affine
    made.weight, made.bias = norm.weight, norm.bias
    made.training = norm.training
    for name, child in norm.named_children():
        made.add_module(name, child)
    return made

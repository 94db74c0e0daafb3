"""Replace normalisation that mixes samples by normalisation that does not.

A model that was trained with batch normalisation behaves differently afterwards: scale and shift
are kept, running statistics are dropped. Fine-tune it, or keep its layers frozen instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils import parametrize

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
    - ``InstanceNorm`` with ``track_running_stats`` stops tracking.

    Two kinds of layers stay: those frozen in eval() within a model that trains, and those with
    another forward, hooks or parametrisations, which ``validate.check`` refuses.
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
        elif _is_tracking(part, model):
            part.track_running_stats = False
            part.running_mean = part.running_var = part.num_batches_tracked = None
    return made.get(model, model)


def _is_replaceable(part: nn.Module, root: nn.Module) -> TypeGuard[_BatchNorm]:
    return (
        isinstance(part, _BatchNorm)
        and getattr(part.forward, "__func__", None) in _FORWARDS
        and part.num_features > 0  # a lazy one knows its channels after the first batch
        and not parametrize.is_parametrized(part)
        and not part._forward_hooks
        and not part._forward_pre_hooks
        and not is_frozen(part, root)
    )


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
    made = nn.GroupNorm(groups, channels, eps=norm.eps, affine=False)
    made.affine = norm.affine
    made.weight, made.bias = norm.weight, norm.bias
    return made.train(norm.training)

"""Train parameters that ``torch.distributed.fsdp.fully_shard`` divides among processes.

FSDP swaps each sharded parameter for a full-size one while its module runs. The full-size one is
the private parameter; the optimizer keeps the shard. Full sums are reduced and cut, and the owner
of a shard makes the noise of its positions in the full parameter.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..base.errors import InvalidInput, PrivacyError, UnsupportedModule
from ..step.step import DPStep
from ..step.sums import Shards
from .capture import Capture
from .distributed import Processes
from .local import local
from .parameter import PrivateParameter


class ShardedModule:
    """The trainable parameters of a module under ``fully_shard``.

    Args:
        module: the root of the sharded modules.

    Raises:
        UnsupportedModule: shards that are no runs of rows over one group of all processes.
        PrivacyError: full-size parameters that are private already.
    """

    def __init__(self, module: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule

        self.parts: list[Any] = [part for part in module.modules() if isinstance(part, FSDPModule)]
        self.reshard()
        by_shard = {id(p.sharded_param): p for part in self.parts for p in _params_of(part)}
        named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        self._check(named, by_shard)
        self._params = [by_shard[id(p)] for _, p in named]
        self.shards = [p for _, p in named]

    def processes(self) -> Processes:
        """Return the processes that hold the shards."""
        group = self._params[0].mesh_info.shard_process_group
        return Processes(group, local(self.shards[0]).device)

    def bind(self, capture: Capture, processes: Processes) -> None:
        """Let the capture see the full-size parameters.

        Raises:
            PrivacyError: they are private already.
        """
        self._scatter = processes.scatter
        # FSDP makes full-size parameters at the first gathering; one module at a time saves memory.
        for part in self.parts:
            part.unshard()
            part.reshard()
        full: list[nn.Parameter] = [p._unsharded_param for p in self._params]
        for slot, parameter in zip(capture.slots, full, strict=True):
            slot.used = parameter
        capture.any_rank = lambda needed: bool(processes.max_over_ranks([needed])[0])
        if any(isinstance(p, PrivateParameter) for p in full):
            raise PrivacyError(
                "module",
                expected="one that is not private yet",
                got="a module of another make_private",
                remedy="Call detach() on that engine first.",
            )

    @staticmethod
    def _check(named: Sequence[tuple[str, nn.Parameter]], by_shard: dict[int, Any]) -> None:
        for name, parameter in named:
            known = by_shard.get(id(parameter))
            if known is None:
                got = "a parameter outside every fully_shard"
            elif known.fsdp_placement.dim != 0:
                got = f"shards along dimension {known.fsdp_placement.dim}"
            elif known.mesh_info.mesh.ndim != 1 or known.is_dtensor:
                got = f"a mesh of {known.mesh_info.mesh.ndim} dimensions or tensor parallelism"
            elif known.mesh_info.mesh.size() != dist.get_world_size():
                got = f"a mesh of {known.mesh_info.mesh.size()} of the processes"
            elif known.offload_to_cpu:
                got = "shards offloaded to the CPU"
            else:
                continue
            raise UnsupportedModule(
                name,
                expected="rows of the parameter, divided by fully_shard over all processes",
                got=got,
                remedy="Call fully_shard on the root too, with a one-dimensional mesh, the "
                "default placement and no offloading.",
            )

    def stand_ins(self) -> list[Tensor]:
        """Return tensors of the full parameters' shapes and dtypes, without their memory."""
        return [
            torch.zeros((), dtype=p.dtype, device=p.device).expand(p.shape) for p in self.shards
        ]

    def held(self) -> Shards:
        """Return this process's shards, as tensors whose change is the parameter's.

        Full-size values are freed: they would be outdated after the update.
        """
        self.reshard()
        parts = [local(p.detach()) for p in self.shards]
        return Shards(parts, [_offset(p) for p in self._params])

    def reduce(self, sums: list[Tensor]) -> None:
        """Add up every process' full sums and leave this process's part of each."""
        self._scatter(sums, [_share(param) for param in self._params])
        for i, shard in enumerate(self.shards):
            sums[i] = sums[i].view(local(shard).shape)

    def unshard(self) -> None:
        """Gather the full-size values."""
        for part in self.parts:
            part.unshard()

    def reshard(self) -> None:
        """Free the full-size values: the next update is one of the shards."""
        for part in self.parts:
            part.reshard()


def check_plan(step: DPStep) -> None:
    """Refuse mechanisms that need a parameter's whole sum at once.

    Raises:
        InvalidInput: release coordinates, or a state of the mechanism.
    """
    if step.plan.direct and step.memory is None:
        return
    raise InvalidInput(
        "mechanism",
        expected="one that adds its noise to gradients as they are, with fully_shard",
        got=f"{step.plan.mechanism}, with release coordinates or a memory",
        remedy="Use DistributedDataParallel or one process: each shard is noised by its owner.",
    )


def is_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on the module or a part of it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # it is slow to import
    if fsdp is None or not isinstance(module, nn.Module):
        return False
    return any(isinstance(part, fsdp.FSDPModule) for part in module.modules())


def _params_of(part: Any) -> list[Any]:
    # FSDP has no public way to its full-size parameters.
    groups = part._get_fsdp_state()._fsdp_param_groups
    return [param for group in groups for param in group.fsdp_params]


def _share(param: Any) -> int:
    """Return the number of entries in the shard of every process but the last ones: whole rows."""
    rows, entries = int(param._orig_size[0]), int(param._orig_size.numel())
    return -(-rows // int(param.mesh_info.shard_mesh_size)) * (entries // max(rows, 1))


def _offset(param: Any) -> int:
    first = int(param.mesh_info.shard_mesh_rank) * _share(param)
    return min(first, int(param._orig_size.numel()))

"""Train one model in several processes: add up the clipped sums once, then add noise once.

Every process draws from its own shard of the records with a key of its own. The sums of all
processes are reduced before the noise, and every process makes the same noise from the group's key,
by position: no noise travels and replicas stay equal bit for bit.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from ..base.errors import InvalidInput, PrivacyError
from ..base.rng import KEY_BYTES, Key, Purpose
from .local import local

BUCKET_BYTES = 25 << 20
"""Maximum size of a bucket. Smaller sums share one; a larger sum is reduced without a copy."""

_IN_FLIGHT = 2
_INT32_MOST = 2**31 - 1


class Processes:
    """The processes that train one model together.

    Args:
        group: their process group. None selects the default one.
        device: device of the tensors in collectives.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def max_over_ranks(self, numbers: Sequence[int]) -> list[int]:
        """Return the elementwise maximum over all processes, as int64."""
        tensor = torch.tensor(list(numbers), dtype=torch.int64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        largest: list[int] = tensor.tolist()
        return largest

    def noise_key(self, unsafe_seed: int | None, rounds: int) -> Key:
        """Return one key for all processes: the seed's, or one that the first process sends."""
        if unsafe_seed is not None:
            return Key.from_unsafe_seed(unsafe_seed, rounds)
        group = self.group or dist.distributed_c10d._get_default_group()
        first = dist.get_global_rank(group, 0)
        secret = list(os.urandom(KEY_BYTES)) if self.rank == 0 else [0] * KEY_BYTES
        sent = torch.tensor(secret, dtype=torch.uint8, device=self.device)
        dist.broadcast(sent, first, group=self.group)
        key = Key(bytes(sent.tolist()), rounds=rounds)
        sent.zero_()
        return key

    def sampling_key(self, seed: int | None, rounds: int) -> Key:
        """Return a key of this process alone: fresh, or derived from a seed and the rank."""
        if seed is None:
            return Key.fresh(rounds)
        digest = hashlib.sha256(f"dpkern sampling {seed} {self.rank}".encode()).digest()
        return Key.from_unsafe_seed(int.from_bytes(digest[:8], "little") >> 1, rounds)

    def check_start(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, settings: object
    ) -> None:
        """Check that all processes start from the same parameters, buffers and settings.

        Shards are not compared, for they differ.

        Raises:
            InvalidInput: on every process, if one of them has others.
        """
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        shapes = [(name, t.shape, t.dtype, t.requires_grad) for name, t in tensors.items()]
        numbers = (type(optimizer).__qualname__, numbers_of(optimizer))
        whole = {n: t for n, t in tensors.items() if local(t) is t}
        self.check_alike(
            module=repr(shapes).encode(),
            settings=repr((settings, numbers)).encode(),
            parameters=content(whole),
        )

    def check_alike(self, **parts: bytes) -> None:
        """Check that all processes have the same bytes under every name.

        Raises:
            InvalidInput: on every process, if one of them has others.
        """
        digests = b"".join(hashlib.sha256(part).digest() for part in parts.values())
        mine = torch.tensor(list(digests), dtype=torch.uint8, device=self.device)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everyone, mine, group=self.group)
        table = torch.stack(everyone).cpu().view(self.size, len(parts), -1)
        for i, name in enumerate(parts):
            differ = [r for r in range(self.size) if not torch.equal(table[r, i], table[0, i])]
            if differ:
                raise InvalidInput(
                    name,
                    expected="the same on every process",
                    got=f"others than on rank 0 on {_ranks(differ)}",
                    remedy="Seed the model's initialisation alike or wrap it in "
                    "DistributedDataParallel, which copies rank 0's parameters; pass the same "
                    "optimizer, data set and arguments everywhere.",
                )

    def agree(self, settings: object, key: Key, public: bool) -> bool:
        """Check before a release that all processes agree on it.

        Args:
            settings: everything that decides the update besides the sums; its ``repr`` is compared.
            key: key of the noise; a process that forked has lost the group's.
            public: whether this process has gradients of data-independent passes.

        Returns:
            Whether any process has such gradients.

        Raises:
            PrivacyError: on every process, if one is at another step or has other numbers.
        """
        secret = key.stream(Purpose.NOISE, 0).key
        digest = hashlib.sha256(repr(settings).encode() + secret).digest()
        number = int.from_bytes(digest[:7], "little")
        highest, lowest, any_public = self.max_over_ranks([number, -number, public])
        if highest != -lowest:
            raise PrivacyError(
                "optimizer.step",
                expected="the same step, noise, bounds and learning rates on every process",
                got=f"something else on another process than {settings!r}"[:400],
                remedy="Run the same schedules and loops everywhere.",
            )
        return bool(any_public)

    def mean(self, public: Mapping[int, Tensor], params: Sequence[Tensor]) -> dict[int, Tensor]:
        """Average public gradients over the processes, as DistributedDataParallel would.

        Absent ones count as zero.
        """
        anywhere = self.max_over_ranks([i in public for i in range(len(params))])
        places = [i for i, has in enumerate(anywhere) if has]
        zero = torch.zeros_like
        sums = [(public[i] if i in public else zero(params[i])).contiguous() for i in places]
        self.reduce(sums)
        return {i: total / self.size for i, total in zip(places, sums, strict=True)}

    def reduce(self, sums: list[Tensor]) -> None:
        """Add up every process' sums, in place.

        Buckets are reduced while the next one is packed. Integers travel as int32 wherever the
        total of all processes fits.
        """
        narrow = self._narrow(sums)

        def launch(bucket: Sequence[int]) -> Callable[[], None]:
            parts = [sums[i] for i in bucket]
            alone = len(parts) == 1 and parts[0].is_contiguous() and not narrow
            flat = parts[0] if alone else torch.cat([_sent(t, narrow).flatten() for t in parts])
            work = dist.all_reduce(flat, group=self.group, async_op=True)

            def land() -> None:
                work.wait()
                if not alone:
                    received = torch.split(flat, [t.numel() for t in parts])
                    for total, part in zip(parts, received, strict=True):
                        total.copy_(part.view(total.shape))

            return land

        _overlapped(sums, launch)

    def scatter(self, sums: list[Tensor], shares: Sequence[int]) -> None:
        """Add up every process' sums and leave this process's share of each in the list, flat.

        Args:
            sums: contiguous tensors, the same on every process.
            shares: entries of each tensor that belong to one process; the last may have fewer.
        """
        narrow = self._narrow(sums)
        scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

        def launch(bucket: Sequence[int]) -> Callable[[], None]:
            dtype = sums[bucket[0]].dtype
            rows = [
                nn.functional.pad(
                    _sent(sums[i], narrow).view(-1), (0, shares[i] * self.size - sums[i].numel())
                ).view(self.size, -1)
                for i in bucket
            ]
            packed = torch.cat(rows, 1)
            mine = packed.new_empty(packed.shape[1])
            work = scatter(mine, packed.view(-1), group=self.group, async_op=True)
            ends = [max(0, min(shares[i], sums[i].numel() - shares[i] * self.rank)) for i in bucket]

            def land() -> None:
                work.wait()
                received = torch.split(mine, [shares[i] for i in bucket])
                for i, part, end in zip(bucket, received, ends, strict=True):
                    sums[i] = part[:end].to(dtype)

            return land

        _overlapped(sums, launch)

    def _narrow(self, sums: Sequence[Tensor]) -> bool:
        """Whether the total of all processes fits int32 in every place."""
        if not sums or sums[0].dtype is not torch.int64:
            return False
        ends = [end for total in sums if total.numel() for end in total.aminmax()]
        largest = int(torch.stack(ends).abs().max()) if ends else 0
        return self.max_over_ranks([largest])[0] * self.size <= _INT32_MOST


def processes_of(module: nn.Module) -> Processes | None:
    """Return the processes that train this module: its wrapper's group, or all of them.

    None if this process trains alone, also in a DistributedDataParallel over one process.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    group = module.process_group if isinstance(module, DistributedDataParallel) else None
    if dist.get_world_size(group) <= 1:
        return None
    first = next(module.parameters(), None)
    return Processes(group, torch.device("cpu") if first is None else first.device)


def in_use() -> bool:
    """Whether this process is one of several."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside a DistributedDataParallel, or the module itself without one."""
    if isinstance(module, DistributedDataParallel):
        inner: nn.Module = module.module
        return inner
    return module


def refuse_wrapper(wrapper: nn.Module, in_use: Callable[[], bool]) -> None:
    """Make the wrapper's forward pass raise ``PrivacyError`` while its module is private.

    The wrapper would wait for gradients that only the engine reduces.
    """

    def refuse(*_: Any) -> None:
        if in_use():
            raise PrivacyError(
                "module",
                expected="the module that make_private returned",
                got="the DistributedDataParallel around it",
                remedy="Write model, optimizer, loader = engine.make_private(...) and call that "
                "model: the engine does the only reduction.",
            )

    wrapper.register_forward_pre_hook(refuse)


def check_shards(loader: DataLoader[Any], sampling: str, processes: Processes) -> None:
    """Check that the loader's records can be divided among the processes.

    Raises:
        InvalidInput: another sampling than Poisson, fewer records than processes, or a
            DistributedSampler of other processes.
    """
    if sampling != "poisson":
        raise InvalidInput(
            "sampling",
            expected="'poisson' on several processes",
            got=sampling,
            remedy="Pass sampling='poisson' and no poisson_sampling=False: each process draws from "
            "its own shard, and only independent draws of each record are those of the whole "
            "data set.",
        )
    records = len(loader.dataset)  # type: ignore[arg-type]
    if records < processes.size:
        raise InvalidInput(
            "data_loader",
            expected=f"at least one record for each of {processes.size} processes",
            got=str(records),
            remedy="Use fewer processes.",
        )
    sampler: Any = loader.batch_sampler
    sampler = sampler.sampler if isinstance(sampler, BatchSampler) else sampler
    if isinstance(sampler, DistributedSampler):
        theirs = (sampler.rank, sampler.num_replicas)
        if theirs != (processes.rank, processes.size):
            raise InvalidInput(
                "data_loader",
                expected=f"a DistributedSampler of rank {processes.rank} of {processes.size}",
                got=f"one of rank {theirs[0]} of {theirs[1]}",
                remedy="Make it for the process group of the model.",
            )


def content(tensors: Mapping[str, Tensor]) -> bytes:
    """Return a digest of names, dtypes, shapes and values."""
    total = hashlib.sha256()
    for name, tensor in tensors.items():
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        total.update(values.numpy().data)
    return total.digest()


def numbers_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the options of the optimizer's parameter groups, without the parameters."""
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


def _overlapped(
    sums: Sequence[Tensor], launch: Callable[[Sequence[int]], Callable[[], None]]
) -> None:
    """Launch one bucket after the other, and wait for the oldest when too many are in flight."""
    landing: deque[Callable[[], None]] = deque()
    for bucket in _buckets(sums):
        landing.append(launch(bucket))
        if len(landing) > _IN_FLIGHT:
            landing.popleft()()
    while landing:
        landing.popleft()()


def _buckets(sums: Sequence[Tensor]) -> list[list[int]]:
    """Return the indices of the tensors in each bucket: consecutive and of one dtype."""
    buckets: list[list[int]] = []
    size = 0
    for i, total in enumerate(sums):
        size += total.nbytes
        if not buckets or size > BUCKET_BYTES or total.dtype is not sums[i - 1].dtype:
            buckets.append([])
            size = total.nbytes
        buckets[-1].append(i)
    return buckets


def _sent(total: Tensor, narrow: bool) -> Tensor:
    return total.to(torch.int32) if narrow and total.dtype is torch.int64 else total


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

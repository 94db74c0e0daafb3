"""Two processes that train together: run as ``python distributed_worker.py folder``.

Every check returns tensors or strings, which are written to ``folder/rank.pt`` and compared by
``test_engine_distributed.py``, which also runs the single-process side of some of them.
"""

from __future__ import annotations

import datetime
import multiprocessing
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from dpkern import PrivacyEngine, survey
from dpkern.audit.subjects.ranks import drawn
from dpkern.base.errors import DPKernError
from dpkern.engine import distributed
from dpkern.nn import BlockCirculantLinear
from dpkern.privacy.mechanisms import SpectralDP
from dpkern.step.noise_tables import RingPrefetch

WORLD, STEPS, ROWS = 2, 3, 37
KINDS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "AdamW": {"lr": 0.01},
    "RMSprop": {"lr": 0.01},  # no fused rule
}


class LowRank(nn.Module):
    """A weight that is computed from three parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.randn(7, 7) / 3)
        self.down = nn.Parameter(torch.randn(2, 7) / 3)
        self.up = nn.Parameter(torch.randn(7, 2) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.base + self.up @ self.down)


class Attention(nn.Module):
    """A checkpointed transformer layer, tied weights and a parameter of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.ends = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
        self.ends[1].weight = self.ends[0].weight
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        tokens = nn.functional.pad(x, (0, 3))[:, None].repeat(1, 3, 1)
        h = checkpoint(self.block, self.ends[0](tokens), use_reentrant=False)
        result: Tensor = self.ends[1](h * self.scale).mean(1)
        return result


def attention(*, sharded: bool = False) -> Attention:
    torch.manual_seed(1)
    module = Attention()
    if sharded:
        fully_shard(module.block)
        fully_shard(module, reshard_after_forward=False)
    return module


def model(*, low_rank: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    middle: list[nn.Module] = [LowRank()] if low_rank else []
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Tanh(), *middle, nn.Linear(7, 3))


def sharded_model(*, low_rank: bool = False, **given: Any) -> nn.Sequential:
    module = model(low_rank=low_rank)
    for part in module:
        if any(True for _ in part.parameters()):
            fully_shard(part, **given)
    fully_shard(module, **given)
    return module


def samples(step: int) -> Tensor:
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(step))


def values(module: nn.Module) -> Tensor:
    """All parameters, gathered if they are sharded."""
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in module.parameters()]
    return torch.cat([p.detach().flatten() for p in whole]).clone()


def data() -> TensorDataset:
    x = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(9))
    return TensorDataset(x, torch.arange(ROWS))


def private(module: nn.Module, kind: str = "SGD", **given: Any) -> Any:
    """``(engine, module, optimizer, loader)`` after ``make_private``."""
    optimizer = getattr(torch.optim, kind)(module.parameters(), **KINDS[kind])
    engine = PrivacyEngine()
    rates = {"sample_rate": 0.1, "expected_batch_size": 8}
    options = {"noise_multiplier": 1.0, "max_grad_norm": 0.5, "unsafe_seed": 3} | given
    options |= rates if options.setdefault("data_loader", None) is None else {}
    made = engine.make_private(module=module, optimizer=optimizer, **options)
    return engine, *made


def train(module: nn.Module, parts: Sequence[Sequence[slice]], **given: Any) -> Tensor:
    """Steps on the seeded samples, each in these parts; the parameters afterwards."""
    engine, module, optimizer, _ = private(module, **given)
    for step in range(STEPS):
        mine = parts[step % len(parts)]
        for i, part in enumerate(mine):
            x = samples(step)[part]
            engine.adapter.begin_batch(len(x), first=i == 0, final=i == len(mine) - 1)
            module(x).square().sum(1).mean().backward()
            optimizer.step()
    return values(module)


def epoch(module: nn.Module, optimizer: Any, loader: Any, taken: list[Any] | None = None) -> None:
    for x, index in loader:
        if taken is not None and not x._state.batch.placeholder:  # record 0, of an empty draw
            taken.append(index.tolist())
        optimizer.zero_grad()
        module(x).square().sum(1).mean().backward()
        optimizer.step()


HALVES = ([slice(0, 4)], [slice(4, 8)])
UNEVEN = ([slice(0, 0)], [slice(0, 4), slice(4, 6), slice(6, 8)])
"""What the two ranks train on in a step."""


def alike(rank: int) -> dict[str, Any]:
    """The same samples as one process, for every kind of optimizer and both tiers."""
    result = {}
    for kind in KINDS:
        for tier in ("exact", "float"):
            wrapped = DistributedDataParallel(model())
            given = {"kind": kind, "arithmetic": tier}
            result[f"{kind} {tier}"] = train(wrapped, [HALVES[rank]], **given)
    result["per_layer"] = train(model(), [HALVES[rank]], clipping="per_layer")
    return result


def images() -> nn.Sequential:
    """Samples as images: a convolution and circulant blocks."""
    torch.manual_seed(2)
    image = nn.Unflatten(1, (1, 1, 5))
    conv = nn.Conv2d(1, 3, (1, 3), padding=(0, 1))
    head = BlockCirculantLinear(15, 4, 4)
    return nn.Sequential(image, conv, nn.Tanh(), nn.Flatten(), head)


def spectral(arithmetic: str) -> SpectralDP:
    return SpectralDP(
        noise_multiplier=1.0,
        max_grad_norm=0.5,
        sites=survey(images(), samples(0)),
        arithmetic=arithmetic,
    )


def released(rank: int) -> dict[str, Any]:
    """Whitened clips and release coordinates."""
    given = {"noise_multiplier": None, "max_grad_norm": None}
    result = {}
    for tier in ("exact", "float"):
        wrapped = DistributedDataParallel(images())
        result[tier] = train(wrapped, [HALVES[rank]], mechanism=spectral(tier), **given)
    return result


def ahead(rank: int) -> dict[str, Any]:
    """The steps of ``alike`` and ``released`` with draws made ahead, a ring on every rank."""
    result = {}
    spectra = {"noise_multiplier": None, "max_grad_norm": None}
    for tier in ("exact", "float"):
        for kind in ("SGD", "RMSprop"):
            with RingPrefetch() as ring:
                given = {"kind": kind, "arithmetic": tier, "noise_source": ring}
                wrapped = DistributedDataParallel(model())
                result[f"{kind} {tier}"] = train(wrapped, [HALVES[rank]], **given)
                result[f"words {kind} {tier}"] = ring.provenance()["words"]
        with RingPrefetch() as ring:
            given = {"mechanism": spectral(tier), "noise_source": ring} | spectra
            wrapped = DistributedDataParallel(images())
            result[tier] = train(wrapped, [HALVES[rank]], **given)
    return result


def uneven(rank: int) -> dict[str, Any]:
    """An empty rank and ranks with other numbers of parts, in turn."""
    turns = [UNEVEN[rank], UNEVEN[1 - rank]]
    return {tier: train(model(), turns, arithmetic=tier) for tier in ("exact", "float")}


def sharded(rank: int) -> dict[str, Any]:
    result = {}
    for kind in KINDS:
        for tier in ("exact", "float"):
            given = {"kind": kind, "arithmetic": tier}
            result[f"{kind} {tier}"] = train(sharded_model(), [HALVES[rank]], **given)
    result["per_layer"] = train(sharded_model(), [HALVES[rank]], clipping="per_layer")
    low_rank = train(sharded_model(low_rank=True), [HALVES[rank]], arithmetic="exact")
    result["low rank"] = low_rank
    result["attention"] = train(attention(sharded=True), [HALVES[rank]], arithmetic="exact")
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    result["bfloat16"] = train(sharded_model(mp_policy=half), [HALVES[rank]])
    one_empty = ([slice(0, 0)], [slice(0, 8)])[rank]
    result["empty"] = train(sharded_model(), [one_empty], arithmetic="exact")
    return result


def sharded_loader(rank: int) -> dict[str, Any]:
    """Batches from the loader, split into parts of which ranks have different numbers."""
    loader = DataLoader(data(), batch_size=12)
    given = {"data_loader": loader, "max_physical_batch_size": 2, "arithmetic": "exact"}
    _, module, optimizer, loader = private(sharded_model(), "AdamW", **given)
    taken: list[Any] = []
    epoch(module, optimizer, loader, taken)
    module.eval()
    module(samples(0))
    module.train()
    epoch(module, optimizer, loader, taken)
    _, again, optimizer, loader = private(model(), "AdamW", **given | {"data_loader": loader_of()})
    for _ in range(2):
        epoch(again, optimizer, loader)
    return {"values": values(module), "plain": values(again), "taken": taken}


def loader_of(batch_size: int = 12, **given: Any) -> DataLoader[Any]:
    return DataLoader(data(), batch_size=batch_size, **given)


def sampling(rank: int) -> dict[str, Any]:
    """Unseeded: every rank draws from its own shard; replicas stay equal."""
    sampler = DistributedSampler(data(), num_replicas=WORLD, rank=rank)
    loader = loader_of(6, sampler=sampler)
    given = {"data_loader": loader, "unsafe_seed": None}
    wrapped = DistributedDataParallel(model())
    engine, module, optimizer, loader = private(wrapped, "RMSprop", **given)
    taken: list[Any] = []
    epoch(module, optimizer, loader, taken)
    return {
        "values": values(module),
        "start": values(wrapped.module) if module is not wrapped.module else "same object",
        "taken": taken,
        "rate": loader.sample_rate,
        "expected": engine.step.expected_batch_size,
        "global": private(model(), data_loader=loader_of(12))[0].step.expected_batch_size,
        "ledger": engine.step.ledger.state_dict(),
        "sampling key": loader.batches._key._secret.hex(),
        "noise key": engine.step.key._secret.hex(),
    }


def fresh(rank: int) -> dict[str, Any]:
    """Digests of the noise and of the batch mask that this process draws without a seed."""
    del rank
    mine = drawn(distributed.Processes(None, torch.device("cpu")))
    return {"noise": mine.noise, "mask": mine.mask}


def resume(rank: int) -> dict[str, Any]:
    """Two epochs, and one epoch, save, load, another."""
    runs = []
    for made, split in ((model, False), (model, True), (sharded_model, True)):
        engine, module, optimizer, loader = private(made(), "AdamW", data_loader=loader_of())
        epoch(module, optimizer, loader)
        state = engine.state_dict()
        if split:
            saved = module.state_dict(), optimizer.state_dict()
            again = private(made(), "AdamW", data_loader=loader_of())
            engine, module, optimizer, loader = again
            module.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            states: list[Any] = [state]
            dist.broadcast_object_list(states)  # rank 0's serves everyone
            engine.load_state_dict(states[0])
        epoch(module, optimizer, loader)
        runs.append(values(module))
    return {"runs": runs, "state": repr(state)}


def public(rank: int) -> dict[str, Any]:
    """A penalty that only rank 0 computes still moves every replica alike."""
    engine, module, optimizer, _ = private(model())
    engine.adapter.begin_batch(4)
    module(samples(0)[:4]).square().sum(1).mean().backward()
    if rank == 0:
        with engine.public():
            module[0].weight.square().sum().backward()
    optimizer.step()
    without = train_once()
    return {
        "values": values(module),
        "moved": not torch.equal(values(module), without),
        "everywhere": train_once(penalty=True),
        "sharded": train_once(sharded_model(), penalty=True),
    }


def train_once(module: nn.Module | None = None, *, penalty: bool = False) -> Tensor:
    engine, module, optimizer, _ = private(module or model())
    engine.adapter.begin_batch(4)
    module(samples(0)[:4]).square().sum(1).mean().backward()
    if penalty:
        with engine.public():
            module(samples(1)).square().mean().backward()
    optimizer.step()
    return values(module)


def reduction(rank: int) -> dict[str, Any]:
    """Small buckets, several dtypes, integers within and beyond int32, big and empty tensors."""
    processes = distributed.processes_of(nn.Linear(1, 1))
    assert processes is not None
    before = distributed.BUCKET_BYTES
    result = {}
    try:
        for size in (64, before):
            distributed.BUCKET_BYTES = size
            for name, dtype in (("int64", torch.int64), ("float64", torch.float64)):
                sums = [torch.arange(n).to(dtype) * (rank + 1) for n in (3, 0, 40, 5, 1)]
                sums += [torch.ones(2, 3, dtype=torch.float32) * (rank + 1)]
                processes.reduce(sums)
                result[f"{name} {size}"] = sums
            wide = [torch.full((4,), 2**31 - 1 - rank), torch.full((2,), -(2**40))]
            processes.reduce(wide)
            result[f"wide {size}"] = wide
            # The last process has fewer entries of one, none of the other.
            shares = [
                torch.arange(7.0) * (rank + 1),
                torch.ones(3, dtype=torch.int64),
                torch.ones(1),
            ]
            processes.scatter(shares, [4, 2, 1])
            result[f"shares {size}"] = shares
    finally:
        distributed.BUCKET_BYTES = before
    return result


def refused(rank: int) -> dict[str, Any]:
    """Typed errors, on both ranks."""

    def other_start() -> None:
        module = model()
        with torch.no_grad():
            module[0].weight[0, 0] += rank
        private(module)

    def other_rate() -> None:
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1 + rank)
        PrivacyEngine().make_private(
            module=module,
            optimizer=optimizer,
            data_loader=loader_of(),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )

    def other_noise() -> None:
        engine, module, optimizer, _ = private(model())
        optimizer.noise_multiplier = 1.0 + rank
        engine.adapter.begin_batch(4)
        module(samples(0)[:4]).sum(1).mean().backward()
        optimizer.step()

    def other_key() -> None:
        engine, module, optimizer, _ = private(model(), unsafe_seed=None)
        if rank:
            engine.step.key._process = -1  # as after a fork
        engine.adapter.begin_batch(4)
        module(samples(0)[:4]).sum(1).mean().backward()
        optimizer.step()

    def wrapper() -> None:
        wrapped = DistributedDataParallel(model())
        private(wrapped)
        wrapped(samples(0))

    def other_sampler() -> None:
        sampler = DistributedSampler(data(), num_replicas=WORLD, rank=1 - rank)
        private(model(), data_loader=loader_of(6, sampler=sampler))

    def fixed() -> None:
        private(model(), data_loader=loader_of(), sampling="fixed")

    def columns() -> None:
        module = nn.Linear(4, 4)
        fully_shard(module, shard_placement_fn=lambda p: Shard(p.dim() - 1))
        private(module)

    def partly() -> None:
        module = model()
        fully_shard(module[0])
        private(module)

    def hybrid() -> None:
        module = nn.Linear(4, 4)
        fully_shard(module, mesh=init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("r", "s")))
        private(module)

    def offloaded() -> None:
        module = nn.Linear(4, 4)
        fully_shard(module, offload_policy=CPUOffloadPolicy(pin_memory=False))
        private(module)

    def twice() -> None:
        module = sharded_model()
        private(module)
        private(module)

    def coordinates() -> None:
        module = images()
        for part in (module[1], module[4]):
            fully_shard(part)
        fully_shard(module)
        mechanism = spectral("float")
        private(module, mechanism=mechanism, noise_multiplier=None, max_grad_norm=None)

    def one_source() -> None:
        private(model(), noise_source=RingPrefetch() if rank else None)

    def sharded_source() -> None:
        private(sharded_model(), noise_source=RingPrefetch())

    def one_sharded_source() -> None:
        private(sharded_model(), noise_source=RingPrefetch() if rank else None)

    result = {}
    checks: tuple[Callable[[], None], ...] = (
        *(one_source, sharded_source, one_sharded_source),
        *(other_start, other_rate, other_noise, other_key, wrapper, other_sampler, fixed),
        *(columns, partly, hybrid, offloaded, twice, coordinates),
    )
    for check in checks:
        try:
            check()
            result[check.__name__] = "nothing was raised"
        except DPKernError as error:
            result[check.__name__] = f"{type(error).__name__} {error.name}"
    return result


CHECKS: tuple[Callable[[int], dict[str, Any]], ...] = (
    *(
        alike,
        released,
        ahead,
        uneven,
        sharded,
        sharded_loader,
        sampling,
        fresh,
        resume,
        public,
        reduction,
        refused,
    ),
)


def main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's own, inside FSDP
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=60),
    )
    results = {check.__name__: check(rank) for check in CHECKS}
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    # Forked before torch has run anything: the imports take as long as half of the checks.
    forked = multiprocessing.get_context("fork")
    ranks = [forked.Process(target=main, args=(rank, sys.argv[1])) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in ranks))

"""Two processes train one private model with ``DistributedDataParallel`` (gloo, CPU).

Every process samples its own part of the data; clipped sums are reduced once and the noise is added
once, to the reduced sum, so the replicas stay equal bit for bit. Pass the module wrapped as usual.

Run: python examples/ddp.py [--epsilon 3] [--epochs 20] [--batch-size 125] [--quick]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import dpkern
from dpkern.accounting import shown_bound

PROCESSES, DELTA = 2, 1e-5


def work(rank: int, options: argparse.Namespace, folder: str) -> None:
    """What one process does; rank 0 writes the results."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=PROCESSES
    )
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, held_out = order[:1500], order[1500:]

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    loader = DataLoader(TensorDataset(x[train], y[train]), batch_size=options.batch_size)

    engine = dpkern.PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        target_epsilon=options.epsilon,
        target_delta=DELTA,
        epochs=options.epochs,
        max_grad_norm=1.0,
    )
    criterion = nn.CrossEntropyLoss()
    for _ in range(options.epochs):
        for rows, classes in loader:
            optimizer.zero_grad()
            criterion(model(rows), classes).backward()
            optimizer.step()

    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    everywhere = [torch.empty_like(weights) for _ in range(PROCESSES)]
    distributed.all_gather(everywhere, weights)
    with torch.no_grad():
        right = model(x[held_out]).argmax(1) == y[held_out]
    if rank == 0:
        results: dict[str, Any] = {
            "epsilon": engine.get_epsilon(DELTA),
            "accuracy": right.float().mean().item(),
            "equal": all(torch.equal(weights, other) for other in everywhere),
        }
        Path(folder, "results.json").write_text(json.dumps(results))
    distributed.barrier()  # no process leaves while another one still hears from it
    distributed.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train, print and return epsilon, held-out accuracy and whether the replicas are equal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=125, help="over all processes")
    parser.add_argument("--quick", action="store_true", help="a few seconds")
    options = parser.parse_args(argv)
    if options.quick:
        options.epochs = 8

    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(work, args=(options, folder), nprocs=PROCESSES)
        results: dict[str, Any] = json.loads(Path(folder, "results.json").read_text())
    print(
        f"epsilon {shown_bound(results['epsilon'])} at delta {DELTA}, held-out accuracy "
        f"{results['accuracy']:.3f}, replicas {'equal' if results['equal'] else 'DIFFER'}"
    )
    return results


if __name__ == "__main__":
    main()

"""Private steps of other libraries on one batch: what ``dpkern bench --model`` puts beside dpkern.

All clip every sample's gradient flat in L2, add Gaussian noise and leave the update to the same
optimizer. None is needed to run dpkern; one that is not installed says so.
"""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

RowLoss = Callable[[Tensor, Tensor], Tensor]
"""Mean loss of outputs ``[B, ...]`` and labels ``[B, ...]``."""
Step = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class PeerTask:
    """The model, batch and numbers that a peer trains with.

    Attributes:
        model: trained in place.
        x, labels: the batch, rows first.
        loss: of outputs and labels; the mean over the rows.
        optimizer: makes the optimizer of parameters.
        clip: largest L2 norm of a sample's gradient.
        noise: standard deviation of the noise on the sum / ``clip``.
    """

    model: nn.Module
    x: Tensor
    labels: Tensor
    loss: RowLoss
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    clip: float
    noise: float

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The trainable parameters by name."""
        return {n: p for n, p in self.model.named_parameters() if p.requires_grad}


class PeerAbsentError(Exception):
    """The peer is not installed here, or does not train this model; the text says which."""


def _needed(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise PeerAbsentError(f"{module.split('.')[0]} is not installed ({error})") from error


def _row_loss(task: PeerTask) -> Callable[..., Tensor]:
    """Return the loss of one row without batch dimension, as a function of the parameters."""
    fixed = {n: p.detach() for n, p in task.model.named_parameters() if not p.requires_grad}
    fixed |= dict(task.model.named_buffers())

    def loss(params: dict[str, Tensor], x: Tensor, label: Tensor) -> Tensor:
        out = functional_call(task.model, {**fixed, **params}, (x.unsqueeze(0),))
        return task.loss(out, label.unsqueeze(0))

    return loss


def torch_func(task: PeerTask) -> Step:
    """Make per-sample gradients with ``torch.func.vmap(grad)``, as torch's tutorial does."""
    trained = task.trained
    optimizer = task.optimizer(list(trained.values()))
    each = vmap(grad(_row_loss(task)), in_dims=(None, 0, 0), randomness="different")

    def step() -> None:
        with torch.no_grad():
            found = each({n: p.detach() for n, p in trained.items()}, task.x, task.labels)
            norms = torch.stack([g.flatten(1).norm(dim=1) for g in found.values()]).norm(dim=0)
            factors = (task.clip / norms).clamp(max=1.0)
            for name, p in trained.items():
                total = torch.tensordot(factors, found[name], dims=1)
                noise = torch.randn_like(total).mul_(task.noise * task.clip)
                p.grad = total.add_(noise).div_(len(task.x))
        optimizer.step()
        optimizer.zero_grad()

    return step


def opake(task: PeerTask) -> Step:
    """Make the step of Opake (distributions opake-engine and opake-dpsgd on PyPI)."""
    clipping, noising = _needed("opake.dpsgd.clipping"), _needed("opake.dpsgd.noise")
    random = _needed("opake.random")
    trained = task.trained
    optimizer = task.optimizer(list(trained.values()))
    gradients, clipped = clipping.clipped_grad(
        _row_loss(task),
        clipping_norm=task.clip,
        batch_argnums=(1, 2),
        normalize_by=float(len(task.x)),
    )
    noise, state = noising.gaussian_noise(noise_multiplier=task.noise, key=random.key(0))

    def step() -> None:
        nonlocal clipped, state
        params = {n: p.detach() for n, p in trained.items()}
        found, clipped = gradients(params, task.x, task.labels, state=clipped)
        noisy, state = noise(found, state)
        for name, p in trained.items():
            p.grad = noisy.pytree[name]
        optimizer.step()
        optimizer.zero_grad()

    return step


def opacus(task: PeerTask, mode: str) -> Step:
    """Make the step of Opacus, with torch's generator (its secure mode needs another package)."""
    engine = _needed("opacus")
    fixed = _needed("opacus.validators").ModuleValidator
    if fixed.validate(task.model, strict=False):
        raise PeerAbsentError("Opacus does not train this model as it is (ModuleValidator)")
    optimizer = task.optimizer(list(task.trained.values()))
    rows = torch.utils.data.TensorDataset(task.x, task.labels)
    loader = torch.utils.data.DataLoader(rows, batch_size=len(task.x))

    class Loss(nn.Module):
        reduction = "mean"

        def forward(self, out: Tensor, labels: Tensor) -> Tensor:
            if self.reduction == "mean":
                return task.loss(out, labels)
            each = nn.functional.cross_entropy(
                out.flatten(0, -2), labels.flatten(), reduction="none"
            )
            return each.view(len(out), -1).mean(1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, stepper, *rest = engine.PrivacyEngine(secure_mode=False).make_private(
            module=task.model.train(),
            optimizer=optimizer,
            data_loader=loader,
            criterion=Loss(),
            noise_multiplier=task.noise,
            max_grad_norm=task.clip,
            poisson_sampling=False,
            grad_sample_mode=mode,
        )
    criterion = rest[0] if mode == "ghost" else task.loss

    def step() -> None:
        criterion(model(task.x), task.labels).backward()
        stepper.step()
        stepper.zero_grad()

    return step


PEERS: dict[str, Callable[[PeerTask], Step]] = {
    "torch.func": torch_func,
    "Opacus hooks": lambda task: opacus(task, "hooks"),
    "Opacus ghost": lambda task: opacus(task, "ghost"),
    "Opake": opake,
}
UNBUILT = {
    "FastDP": "not on PyPI, and its sources name torch <= 1.11 (github.com/awslabs/"
    "fast-differential-privacy); it was not built",
}
"""Peers that are not run at all, and why."""


def moved(task: PeerTask, peer: Callable[[PeerTask], Step]) -> Tensor:
    """Return by how much one step without noise moves a copy's parameters; flat, float64.

    Raises:
        PeerAbsentError: not installed, or not for this model.
    """
    model = copy.deepcopy(task.model)
    tried = PeerTask(**{**vars(task), "model": model, "noise": 0.0})
    before = [p.detach().clone() for p in tried.trained.values()]
    trained = list(tried.trained.values())
    peer(tried)()
    pairs = zip(before, trained, strict=True)
    return torch.cat([(b - p.detach()).flatten() for b, p in pairs]).double()

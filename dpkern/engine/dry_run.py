"""Run one forward pass under capture, which lists all findings and trains nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..base.errors import InvalidInput, PrivacyError, UnsupportedModule
from .capture import Capture
from .parameter import tensors_in, without_torch_function
from .validate import Finding


def dry_run(
    capture: Capture, function: Callable[..., Any] | None, *inputs: Any, **named: Any
) -> list[Finding]:
    """Run ``function`` (default: the module) on a batch and list what training would refuse.

    Uses that pass count as verified from then on: this is how parameters that are used outside the
    module's own forward pass are admitted. Random generators, buffers and gradients are as before
    afterwards.

    Args:
        capture: the model's capture, which is attached for the dry run if it is not.
        function: the function that the training loop calls. It returns tensors whose first
            dimension is the batch. None selects the module.
        inputs, named: a batch of at least two samples, in the first dimension of the first tensor.

    Raises:
        InvalidInput: fewer than two samples, or inputs in the place of the function.
        PrivacyError: gradients of a training step are pending.
    """
    if function is not None and not callable(function):
        raise InvalidInput(
            "function",
            expected="what the training loop calls, or None for the module",
            got=type(function).__name__,
            remedy="Write None in front of the inputs: engine.validate(None, x).",
        )
    rows = next((int(t.shape[0]) for t in tensors_in((inputs, named)) if t.dim()), 0)
    if rows < 2:
        raise InvalidInput(
            "inputs",
            expected="a batch of at least 2 samples, in the first dimension of the first tensor",
            got=f"{rows} samples",
            remedy="Pass at least two samples: one cannot show whether samples are kept apart.",
        )
    if capture.captured:
        raise PrivacyError(
            "validate",
            expected="no pending gradients",
            got="gradients that no optimizer.step() has seen",
            remedy="Call validate before training, or after optimizer.step().",
        )
    run = capture.module if function is None else function
    with as_before(capture), torch.enable_grad():
        capture.attach()
        capture.begin_batch(rows)
        collected: list[UnsupportedModule] = []
        capture.collected = collected
        if function is not None:
            capture.guard.probe_function(run, inputs, named, rows)
        output = run(*inputs, **named)
        capture.verify(output)
    return [
        Finding(
            error.name, "operation", f"expected {error.expected}, got {error.got}", error.remedy
        )
        for error in {str(error): error for error in collected}.values()
    ]


@contextmanager
def as_before(capture: Capture) -> Iterator[None]:
    """Put back, after the block, what a forward and a probing backward pass change."""
    attached, batch, handed_out = capture.attached, capture.batch, capture.handed_out
    buffers = [(b, b.detach().clone()) for b in capture.module.buffers()]
    with without_torch_function():
        gradients = [(p, p.grad) for p in capture.module.parameters()]
    devices = {p.device for p in capture.parameters if p.is_cuda}
    with torch.random.fork_rng(devices=list(devices)):
        try:
            yield
        finally:
            capture.collected = None
            capture.discard()
            if not attached:
                capture.detach()
            capture.batch, capture.handed_out = batch, handed_out
            with without_torch_function(), torch.no_grad():
                for buffer, saved in buffers:
                    buffer.copy_(saved)
                for parameter, gradient in gradients:
                    parameter.grad = gradient

"""Make the private parts of a run: the capture, the step, the adapter of the optimizer, the loader.

They are made as one or not at all: nothing of the user's objects changes until they are attached.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader

from ..privacy.mechanisms.base import Mechanism
from ..step.noise_binding import refuse_shards
from ..step.step import DPStep
from . import distributed, observing, validate
from .arguments import MakePrivateOptions, loader_of, sampling_of
from .assumed_norms import AssumedNorms
from .capture import Capture
from .default_arithmetic import choose_arithmetic
from .loader import PrivateLoader, check_loader
from .optimizer import OptimizerAdapter, adapter_of, check_optimizer
from .padding import PaddingCheck
from .sharded import ShardedModule, check_plan, is_sharded
from .uncompiled import within_wrapper

log = logging.getLogger("dpkern")

OWN_BATCHES = "the caller draws batches as stated, and each row of a forward pass is another record"
"""The condition of certificates of a run without a private loader."""

Choose = Callable[[MakePrivateOptions, Sequence[str], dict[str, Any]], Mechanism]
"""The choice of a mechanism from the options, the parameters' names and the facts of the run."""


class Parts(NamedTuple):
    """The private parts of one run.

    Attributes:
        capture: the per-sample gradients of the current samples.
        step: plan, key, step counter and ledger.
        adapter: what makes the optimizer private.
        loader: the private loader; None where the caller draws the batches.
        views: rows of each record in a batch.
    """

    capture: Capture
    step: DPStep
    adapter: OptimizerAdapter
    loader: PrivateLoader | None
    views: int


def make_parts(
    wrapper: nn.Module,
    optimizer: torch.optim.Optimizer,
    data_loader: DataLoader[Any] | None,
    options: MakePrivateOptions,
    choose: Choose,
    *,
    given: Mechanism | None,
) -> Parts:
    """Return the private parts for a module, alone or in a wrapper for several processes.

    Args:
        wrapper, optimizer, data_loader, options: the user's.
        choose: function that makes the mechanism.
        given: the user's mechanism, which has an arithmetic of its own. None where ``choose``
            makes DP-SGD of the options.

    Raises:
        DPKernError: something that cannot be private.
    """
    observer = observing.current()
    if observer is not None:
        options = observer.options(options)
    module = distributed.unwrapped(wrapper)
    sharded = ShardedModule(module) if is_sharded(module) else None
    processes = distributed.processes_of(wrapper) if sharded is None else sharded.processes()
    capture = Capture(
        module, loss_reduction=options.loss_reduction, keep_budget=options.keep_budget
    )
    loader = loader_of(data_loader, options, processes)
    sampling = sampling_of(loader, options)
    run = {
        "steps": None if loader is None else len(loader),
        "dimension": sum(p.numel() for p in capture.parameters),
        **sampling,
    }
    expected = options.expected_batch_size if loader is None else loader.expected_batch_size
    options, why_float = choose_arithmetic(options, capture, mechanism=given)
    mechanism = choose(options, capture.names, run)
    if observer is not None:
        mechanism = observer.mechanism(mechanism)
    shared: dict[str, Any] = {"unsafe_seed": options.unsafe_seed, "rounds": options.rounds}
    if processes is not None:
        source = None if options.noise_source is None else options.noise_source.settings
        settings = (mechanism, expected, run, shared, options.loss_reduction, source)
        processes.check_start(module, optimizer, settings)
        if sharded is not None and options.noise_source is not None:
            refuse_shards()  # every process at once: none is left waiting
        shared = {"key": processes.noise_key(**shared), "reduce": processes.reduce}
    if sharded is not None and processes is not None:
        sharded.bind(capture, processes)
        shared["reduce"] = sharded.reduce
        if loader is not None:
            loader.max_over_ranks = processes.max_over_ranks
    step = DPStep(
        mechanism,
        capture.parameters if sharded is None else sharded.stand_ins(),
        expected_batch_size=expected,  # type: ignore[arg-type]
        average=options.loss_reduction == "mean",
        backend=options.backend,
        noise_source=options.noise_source,
        gradients="batched",
        **shared,
        **sampling,
    )
    if sharded is not None:
        check_plan(step)
    if why_float:
        log.info("%s", why_float)
        step.ledger.state_invariance(False, (why_float,))
    adapter = OptimizerAdapter(optimizer, capture, step, processes=processes, sharded=sharded)
    adapter.assumed = AssumedNorms(step, capture.parameters[0].device, options.backend)
    if wrapper is not module:
        distributed.refuse_wrapper(wrapper, lambda: capture.attached)
    capture.guard.on_late_finding = step.taint
    if loader is None:
        step.ledger.assume(OWN_BATCHES)
    else:

        def assume_masked(condition: str) -> None:
            step.ledger.assume(condition)
            capture.use_counts.follow_records = True  # on how many positions they are

        loader.padding = PaddingCheck(
            allowed=options.masked_padding, assume=assume_masked, taint=step.taint
        )
    if observer is not None:
        observer.made(capture, step, adapter, loader)
    return Parts(capture, step, adapter, loader, options.views)


def attach(parts: Parts) -> None:
    """Make the user's objects private; calling it twice changes nothing."""
    capture, _, adapter, loader, views = parts
    if adapter_of(adapter.optimizer) is not adapter:
        check_optimizer(adapter.optimizer, capture)
    capture.attach()
    adapter.attach()
    adapter.batches.boundary.has_loader = loader is not None
    adapter.batches.boundary.views = views
    if loader is not None:
        loader.on_batch = adapter.batches.expect
        loader.boundary = adapter.batches.boundary
        loader.views = views
        loader.placeholders = adapter.sharded is None


def check_objects(
    module: nn.Module | None,
    optimizer: torch.optim.Optimizer | None = None,
    data_loader: DataLoader[Any] | None = None,
) -> None:
    """Refuse what cannot be private; changes nothing.

    Raises:
        UnsupportedModule: lists everything that was found.
        InvalidInput: an optimizer or a loader that cannot be private.
    """
    if module is not None:
        module = distributed.unwrapped(within_wrappers(module))
        for note in validate.check(module):
            # A frozen layer that trains again mixes samples; the others are for information.
            frozen = note.what.startswith("is frozen")
            log.log(logging.WARNING if frozen else logging.INFO, "%s", note)
        if optimizer is not None:
            check_optimizer(optimizer, Capture(module))
    made_before = isinstance(data_loader, PrivateLoader) and data_loader.ready
    if data_loader is not None and not made_before:
        check_loader(data_loader, distributed=distributed.in_use())


def within_wrappers(module: nn.Module) -> nn.Module:
    """Return the module that was compiled, unless a wrapper for several processes is around it."""
    inner = within_wrapper(module)
    return inner if distributed.unwrapped(inner) is inner else module

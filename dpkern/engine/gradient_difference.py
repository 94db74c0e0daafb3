"""Check that the gradients of a sample's outputs do not depend on the other samples.

Outputs can be each sample's own while their gradients are not: a backward pass may divide by the
norm of the batch, or scale by its size. The module therefore runs forward and backward on three
samples and two others with large values, with gradients at the outputs of the three alone, and then
on the three alone. They must have the same gradients both times, at the outputs of all parts of the
module and at small parameters, up to the rounding of kernels that are blocked by size; the others
must have none. Modules that draw random numbers draw others for another number of samples: they run
on the five samples as they are, too, and with constants in the place of all draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ..base.errors import UnsupportedModule
from .fewer_rows import first_rows
from .parameter import without_torch_function
from .random_state import RandomState
from .replaced_rows import by_copies, by_large_values, replaced_rows, tensors_of
from .steady_draws import SteadyDraws

_TOLERANCE = 0.05
"""Tolerance relative to a tensor's largest gradient: far above rounding, also in 16 bits."""

_NEGLIGIBLE = 0.01
"""Gradients below this part of the largest one are compared with that part of it."""

_SMALL = 1 << 14
"""Number of entries up to which parameters are compared, where the parts have outputs."""

_MOST = 5
"""Number of samples that the module runs on."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Gradients = dict[tuple[str, int], Tensor]
"""Gradients by the name and the number of an output, or by a parameter's number, without name."""


def check_gradients(
    module: nn.Module,
    call: Callable[[Arguments, Callable[[Any], Any]], Any],
    arguments: Arguments,
    batch: int,
    draws: RandomState,
) -> UnsupportedModule | None:
    """Compare gradients of a few samples, with and without other samples beside them.

    Args:
        module: the module that the error names.
        call: runs the module from the same state each time, gives its output to a function, and
            puts that state back; returns what the function returns.
        arguments: a batch, samples first.
        batch: number of samples.
        draws: the random state that ``call`` begins with.

    Returns:
        The error; None if the gradients agree or cannot be compared.
    """
    more = min(_MOST, batch)
    kept = more - more // 2
    trained = [p for p in module.parameters() if p.requires_grad]
    if more < 2 or not trained:
        return None

    rows: dict[int, torch.Size] = {}  # shapes of a row, by output that has one for each sample

    def run(chosen: Arguments, samples: int) -> Gradients:
        def backward(output: Any) -> Gradients:
            outputs = list(tensors_of(output))
            if not rows:
                rows.update(_with_rows(outputs, samples))
            for i in [i for i in rows if outputs[i].shape != (samples, *rows[i])]:
                del rows[i]  # as large by chance
            return _gradients([outputs[i] for i in rows], parts, trained, kept)

        try:
            with _recorded(module, samples) as parts, _without_hooks(trained), _SafeGroupNorm():
                return call(chosen, backward)  # type: ignore[no-any-return]
        except Exception:  # noqa: BLE001 - the real pass has another size
            return {}

    first = first_rows(arguments, batch, kept)
    with SteadyDraws(high=False) as steady:
        run(first, kept)
    drawn = steady.drawn > 0
    alone, known = run(first, kept), len(rows)
    beside = first_rows(arguments, batch, more)
    one: Gradients = {}
    for change in (by_large_values(0), by_copies(kept)):
        others = replaced_rows(beside, more, range(kept, more), change)[0]
        one = run(others, more)
        if one and all(bool(g.isfinite().all()) for g in one.values()):
            break
    else:
        return None
    if len(rows) != known:
        alone = run(first, kept)
    if not _has_none(one, alone, kept):
        return _found(module, "in rows of other samples")
    # Other random numbers for another number of samples, or no pass.
    if drawn or draws.changed() or draws.elsewhere or not alone:
        if not _agree(one, run(beside, more), kept):
            return _found(module, "when other samples were replaced")
        if not drawn or steady.unknown or draws.elsewhere:
            return None
        with steady:
            alone, one = run(first, kept), run(others, more)
    if alone and not _agree(one, alone, kept):
        return _found(module, "without other samples")
    return None


def _found(module: nn.Module, when: str) -> UnsupportedModule:
    return UnsupportedModule(
        type(module).__name__,
        expected="gradients of one sample's outputs that depend on that sample alone",
        got=f"other gradients {when}",
        remedy="Scale gradients by constants, in hooks and backward functions too; every sample is "
        "clipped by itself anyway.",
    )


@contextmanager
def _recorded(module: nn.Module, samples: int) -> Iterator[Gradients]:
    """Record outputs of the module's parts with one row for each sample, while the block runs."""
    parts: Gradients = {}
    handles = []

    def watch(name: str, part: nn.Module) -> None:
        calls = 0

        def leave(_: nn.Module, args: Any, output: Any) -> None:
            nonlocal calls
            for tensor in tensors_of(output):
                calls += 1
                if _has_rows(tensor, samples):
                    parts[name, calls] = tensor

        handles.append(part.register_forward_hook(leave))

    for name, part in module.named_modules():
        if name and not isinstance(part, torch.jit.ScriptModule):  # those take no hooks later
            watch(name, part)
    try:
        yield parts
    finally:
        for handle in handles:
            handle.remove()


def _has_rows(tensor: Tensor, samples: int) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] == samples and tensor.requires_grad


def _with_rows(outputs: Sequence[Tensor], samples: int) -> dict[int, torch.Size]:
    return {i: t.shape[1:] for i, t in enumerate(outputs) if _has_rows(t, samples)}


class _SafeGroupNorm(TorchFunctionMode):
    """Runs group norms whose input needs no gradient on contiguous inputs.

    On a CPU, torch's backward pass of such a norm crashes the process where channels are last.
    """

    def __torch_function__(
        self, func: Any, _: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func in (nn.functional.group_norm, torch.group_norm):
            args, named = tree_map_only(
                Tensor, lambda t: t if t.requires_grad else t.contiguous(), (tuple(args), named)
            )
        return func(*args, **named)


@contextmanager
def _without_hooks(trained: Sequence[Tensor]) -> Iterator[None]:
    """Call no hooks of the parameters in this block."""
    with without_torch_function():
        hooked = [(p, p._backward_hooks) for p in trained if p._backward_hooks]
        for p, _ in hooked:
            p._backward_hooks = None
    try:
        yield
    finally:
        with without_torch_function():
            for p, hooks in hooked:
                p._backward_hooks = hooks


def _gradients(
    outputs: Sequence[Tensor], parts: Gradients, trained: Sequence[Tensor], kept: int
) -> Gradients:
    """Return the gradients of weighted outputs of the first samples; none without outputs.

    Of parts they are norms of rows, the largest first: a module may sort its samples.
    """
    if not outputs:
        return {}
    starts = []
    for place, tensor in enumerate(outputs):
        weights = torch.zeros_like(tensor, requires_grad=False)
        each = torch.arange(place, place + weights[:kept].numel(), device=weights.device)
        weights[:kept] = (1.5 - each % 3).reshape(weights[:kept].shape)
        starts.append(weights)
    chosen = dict(parts)
    for i, p in enumerate(trained):
        if p.numel() <= _SMALL or not parts:
            chosen["", i] = p
    found = torch.autograd.grad(outputs, list(chosen.values()), starts, allow_unused=True)
    return {
        place: _row_norms(g.detach()) if place[0] else g.detach().to_dense()
        for place, g in zip(chosen, found, strict=True)
        if g is not None
    }


def _row_norms(gradient: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(gradient.flatten(1).float(), dim=1)
    return norms.sort(descending=True).values


def _agree(one: Gradients, two: Gradients, kept: int) -> bool:
    """Whether gradients of samples and of parameters are the same in two passes."""
    size_of = _sizes(one)
    for place, a in one.items():
        b = two.get(place)
        if b is None or (not place[0] and a.shape != b.shape):
            continue
        if place[0]:
            a, b = a[:kept], b[:kept]
        if a.numel() and not float((a - b).abs().max()) <= _TOLERANCE * size_of[place]:
            return False
    return True


def _has_none(one: Gradients, alone: Gradients, kept: int) -> bool:
    """Whether other samples have no gradients, where passes show which rows are samples'."""
    size_of = _sizes(one)
    return all(
        float(one[place][kept:].abs().max()) <= _TOLERANCE * size_of[place]
        for place in one.keys() & alone.keys()
        if place[0] and len(alone[place]) == kept and len(one[place]) > kept
    )


def _sizes(gradients: Gradients) -> dict[tuple[str, int], float]:
    sizes = {k: float(g.abs().max()) if g.numel() else 0.0 for k, g in gradients.items()}
    least = _NEGLIGIBLE * max(sizes.values(), default=0.0)
    return {k: max(size, least) for k, size in sizes.items()}

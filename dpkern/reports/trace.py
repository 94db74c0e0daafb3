"""Attribute the time of a step: every moment belongs to one phase and one layer.

A stack holds the running work. Modules push their layer in the forward pass, nodes of the autograd
graph theirs in the backward pass (a node belongs to the module that made it, by its sequence
number), every call of an op its phase and its layers. The top of the stack is charged, so that the
seconds of all phases and layers add up to the step.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..base.dispatch import Op, intercepted
from ..base.op_cost import Cost
from ..engine.attribution import attributed_parameters

REST = "(rest of the model)"
"""The layer of everything that belongs to no module with parameters of its own."""
ROOT = "(model itself)"
"""The layer of parameters that the outermost module owns."""

FORWARD, BACKWARD, NORMS, FACTORS = "forward", "backward", "norms", "factors"
SUMS, ENGINE, NOISE, UPDATE = "sums", "between ops", "noise", "update"
PHASES = (FORWARD, BACKWARD, NORMS, FACTORS, SUMS, ENGINE, NOISE, UPDATE)
_FOR_NORMS = ("conv_bins", "whitened_bins", "filtered", "tied_cross")

Shares = tuple[tuple[str, int], ...]
"""Layers, and the proportion of the work that belongs to each: positive numbers."""


@dataclass(frozen=True)
class TracedCall:
    """One call of an op: its backend, its phase and layers, and its declared cost."""

    op: str
    phase: str
    shares: Shares
    backend: str
    cost: Cost
    seconds: float


def phase_of(op: str) -> str | None:
    """Return the phase that an op belongs to by its name; None means the one it is called in."""
    stem, _, name = op.partition(".")
    if stem in ("noise", "update"):
        return NOISE if stem == "noise" else UPDATE
    if name == "clip_factors":
        return FACTORS
    if name.endswith(("_sum", "_sum_error")) or name == "contract":
        return SUMS
    if name.endswith(("_norm", "_norms", "_gradient")) or name in _FOR_NORMS:
        return NORMS
    return None


def divided(total: int, shares: Shares) -> dict[str, int]:
    """Divide ``total`` into whole parts, in proportion to the shares; the parts add up to it."""
    parts: dict[str, int] = {}
    before, given, whole = 0, 0, sum(size for _, size in shares)
    for layer, size in shares:
        before += size
        upto = total * before // whole
        parts[layer] = parts.get(layer, 0) + upto - given
        given = upto
    return parts


def layer_of(parameter: str) -> str:
    """Return the layer of a parameter: the module that owns it."""
    return parameter.rpartition(".")[0] or ROOT


class StepTracer:
    """A trace of the steps of one model.

    Args:
        model: model with its parameters as they are trained.
        positions: position in the noise stream of each parameter's noise, by name.
        clock: seconds now.
    """

    def __init__(
        self,
        model: nn.Module,
        positions: Mapping[str, int] | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model = model
        self.trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.sizes = {name: p.numel() for name, p in self.trained.items()}
        self.everything = self._shares_of(tuple(self.trained))
        self.seconds: dict[tuple[str, str], float] = {}
        self.calls: list[TracedCall] = []
        self.inside_op = False
        self._clock = clock
        self._last = 0.0
        self._stack: list[tuple[str, Shares]] = []
        self._layer_of_node: dict[int, str] = {}
        self._starts: list[int] = []
        self._by_pointer = {p.data_ptr(): name for name, p in self.trained.items()}
        self._by_position: dict[int, str] = {}
        for name, position in (positions or {}).items():
            self._by_position.setdefault(position, name)

    @property
    def top(self) -> tuple[str, Shares]:
        """The phase and layers that run now."""
        return self._stack[-1]

    @contextmanager
    def running(self, phase: str, shares: Shares | None = None) -> Iterator[None]:
        """Charge the block to this phase, and to these layers where nothing else is known."""
        self._push(phase, ((REST, 1),) if shares is None else shares)
        try:
            yield
        finally:
            self._pop()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the model's modules and all ops."""
        hooks = []
        own = {layer_of(name) for name in self.trained}
        for name, module in self.model.named_modules():
            layer = (name or ROOT) if (name or ROOT) in own else REST
            hooks.append(module.register_forward_pre_hook(self._enter(layer)))
            hooks.append(module.register_forward_hook(self._leave(layer)))
        try:
            with intercepted(self._call):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def watch_backward(self, loss: Tensor) -> None:
        """Watch the backward pass to come, node by node."""
        seen: set[Any] = set()
        waiting = [loss.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
            shares = ((self._layer_of(node), 1),)
            node.register_prehook(self._begin(shares))
            node.register_hook(self._end)

    def _layer_of(self, node: Any) -> str:
        variable = getattr(node, "variable", None)  # of a leaf, where gradients accumulate
        if variable is not None and variable.data_ptr() in self._by_pointer:
            return layer_of(self._by_pointer[variable.data_ptr()])
        return self._layer_of_node.get(node._sequence_nr(), REST)

    def _enter(self, layer: str) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self._push(self.top[0], ((layer, 1),))
            self._starts.append(torch._C._autograd._get_sequence_nr())

        return enter

    def _leave(self, layer: str) -> Callable[..., None]:
        def leave(*_: Any) -> None:
            first = self._starts.pop()
            now = torch._C._autograd._get_sequence_nr()
            for number in range(first, now):  # the modules inside have taken theirs
                self._layer_of_node.setdefault(number, layer)
            self._pop()

        return leave

    def _begin(self, shares: Shares) -> Callable[..., None]:
        def begin(*_: Any) -> None:
            self._push(BACKWARD, shares)

        return begin

    def _end(self, *_: Any) -> None:
        self._pop()

    def _call(self, op: Op[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        phase = phase_of(op.name) or self.top[0]
        shares = self._shares(args, kwargs)
        with intercepted(None):
            chosen = {**kwargs}
            backend = op.backend_of(*args, **chosen)
            chosen.pop("backend", None)
            cost = op.cost(*args, **chosen)
            alone = self._without_noise(op, args, kwargs)
            self._push(phase, shares)
            started = self._last
            self.inside_op = True
            try:
                result = op(*args, **kwargs)
            finally:
                self.inside_op = False
                self._pop()
        seconds = self._last - started
        if alone is not None and seconds > alone:
            self._move(seconds - alone, shares)
        self.calls.append(TracedCall(op.name, phase, shares, backend, cost, seconds))
        return result

    def _without_noise(
        self, op: Op[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> float | None:
        """Return the seconds of a fused update of copies without its noise.

        None for other calls, and for updates that map sums.

        Nothing of it is charged. The first of two calls meets new pages, and is not timed.
        """
        if op.name != "update.step" or kwargs.get("noise") is None or len(args) != 2:
            return None
        if kwargs.get("maps") is not None:  # without noise there is nothing to map to
            return None
        self._charge()
        seconds = 0.0
        given = {name: value for name, value in kwargs.items() if name not in ("noise", "state")}
        params = [p.detach().clone() for p in args[0]]
        sums = [s.to(p.dtype) for p, s in zip(params, args[1], strict=True)]
        state = copy.deepcopy(kwargs["state"])
        for _ in range(2):
            begun = self._clock()
            op(params, sums, **given, state=state, noise=None)
            seconds = self._clock() - begun
        self._last = self._clock()
        return seconds

    def _move(self, seconds: float, shares: Shares) -> None:
        """Book seconds of the last call under noise that were charged to the update."""
        whole = sum(size for _, size in shares)
        for layer, size in shares:
            part = seconds * size / whole
            self.seconds[UPDATE, layer] -= part
            self.seconds[NOISE, layer] = self.seconds.get((NOISE, layer), 0.0) + part

    def _shares(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Shares:
        """Return the layers of a call: those of the engine, of its parameters, or that run now."""
        names = tuple(name for name in attributed_parameters() if name in self.sizes)
        if not names and args and isinstance(args[0], (list, tuple)):
            found = (self._by_pointer.get(t.data_ptr()) for t in args[0] if isinstance(t, Tensor))
            names = tuple(name for name in found if name is not None)
        if not names and kwargs.get("position") in self._by_position:
            names = (self._by_position[kwargs["position"]],)
        if names:
            return self._shares_of(names)
        shares = self.top[1]
        known = self.top[0] in (FORWARD, BACKWARD)
        return shares if known and shares[0][0] != REST else self.everything

    def _shares_of(self, names: Sequence[str]) -> Shares:
        sizes: dict[str, int] = {}
        for name in names:
            sizes[layer_of(name)] = sizes.get(layer_of(name), 0) + self.sizes[name]
        return tuple((layer, max(1, size)) for layer, size in sizes.items())

    def _push(self, phase: str, shares: Shares) -> None:
        self._charge()
        self._stack.append((phase, shares))

    def _pop(self) -> None:
        self._charge()
        self._stack.pop()

    def _charge(self) -> None:
        """Charge the time since the last change to the top of the stack."""
        now = self._clock()
        if self._stack:
            phase, shares = self._stack[-1]
            whole = sum(size for _, size in shares)
            for layer, size in shares:
                part = (now - self._last) * size / whole
                self.seconds[phase, layer] = self.seconds.get((phase, layer), 0.0) + part
        self._last = now

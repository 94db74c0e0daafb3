"""Choose an op's backend: the one asked for, or the first capable one in the device's order.

An op is a function whose body is its reference. Backends register kernels for it with a predicate
that says why it refuses a call. Choice: ``backend=``, else ``with use(...)``, else the environment
variable ``DPKERN_BACKEND``, else the device's order. An explicit choice that cannot run raises
``BackendError`` with every reason; an automatic one falls back and logs the reason once.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, Generic, ParamSpec, TypeVar, overload

import torch

from . import interop
from .errors import BackendError, InvalidInput
from .kernel import Kernel
from .memory import check_new_tensors
from .op_cost import Cost
from .schema import BoundCall, Schema

P = ParamSpec("P")
R = TypeVar("R")
log = logging.getLogger("dpkern")

PREFERENCE: dict[str, tuple[str, ...]] = {
    "cpu": ("cpu", "numba", "reference"),
    "cuda": ("cuda", "triton", "cupy", "reference"),
}
"""The order of choice per device, set by measurement (on CUDA devices: expected, not measured)."""

BACKENDS = ("cpu", "numba", "cuda", "triton", "cupy", "reference")


class _Order:
    """The kernels that were tried already, and the backends that come after them."""

    def __init__(self, names: Sequence[str]) -> None:
        self.found: list[tuple[str, Kernel]] = []
        self.left = list(names)


class Op(Generic[P, R]):
    """An op: its declaration, reference, and the kernels that backends registered for it.

    A call takes the reference's arguments and ``backend``: the name of a backend, or None for the
    first that supports the call.

    Attributes:
        name: ``stem.function``.
        operator: its name in ``torch.ops.dpkern`` and in profiles: the function's, behind the stem
            if another op has taken it.
    """

    def __init__(
        self,
        reference: Callable[P, R],
        check: Callable[..., Any] | None,
        plan: type | None = None,
    ) -> None:
        stem = reference.__module__.split(".ops.", 1)[-1].split(".")[0]
        self.name = f"{stem}.{reference.__name__}"
        taken = any(other.operator == reference.__name__ for other in OPS.values())
        self.operator: str = f"{stem}_{reference.__name__}" if taken else reference.__name__
        self.reference = reference
        self.schema = Schema(inspect.unwrap(reference), check, plan)
        self.kernels: dict[str, Kernel] = {"reference": self.kernel(reference)}
        self._orders: dict[torch.device, _Order] = {}
        self._direct: dict[str | None, Callable[..., Any] | None] = {}
        self.__doc__ = reference.__doc__
        self.__wrapped__ = reference
        OPS[self.name] = self

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    @overload
    def __call__(self, *args: Any, backend: str | None, **kwargs: Any) -> R: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _interceptor is not None and not _passing.on:
            return _interceptor(self, args, kwargs)
        if "cupy" in _modules and interop.has_arrays(args, kwargs):
            return interop.call(self, *args, **kwargs)
        wanted = kwargs.pop("backend", None) if kwargs else None
        if not wanted:
            wanted = _wanted.get() or environment_choice()
        direct, profiled = self._direct.get(wanted), _is_profiled()
        if direct is not None and not profiled:
            made = direct(*args, **kwargs)
            if made is not NotImplemented:
                return made
        check_new_tensors(self.operator)
        bound = self.schema.bind(*args, **kwargs)
        kernel = self._chosen(wanted, bound)[1]
        if profiled:
            with torch.profiler.record_function(f"dpkern::{self.operator}"):
                return kernel.run(bound)
        return kernel.run(bound)

    def kernel(
        self, function: Callable[..., Any], refuse: Callable[..., str | None] | None = None
    ) -> Kernel:
        """Make a kernel from a function, and reasons for refusal, of the op's own arguments."""
        code = self.schema.function.__code__  # quicker to read than a signature, for all ops
        first = code.co_argcount
        names = code.co_varnames[first : first + code.co_kwonlyargcount]
        planned = function is not self.reference and (
            "plan" in inspect.signature(function).parameters
        )

        def call(called: Callable[..., Any], bound: BoundCall) -> Any:
            if not names:
                return called(*bound.args)
            args = bound.args
            return called(*args[:first], **dict(zip(names, args[first:], strict=True)))

        def run(bound: BoundCall) -> Any:
            if planned:
                return call(partial(function, plan=bound.plan), bound)
            return call(function, bound)

        return Kernel(run, None if refuse is None else partial(call, refuse))

    def validate(self, *args: Any, **kwargs: Any) -> str:
        """Check a call without running it; return the type of the device that it would run on."""
        return self.schema.bind(*args, **kwargs).device.type

    def cost(self, *args: Any, **kwargs: Any) -> Cost:
        """Return what this call moves and computes; it is not run."""
        if self.name not in _costs:
            importlib.import_module(_places["costs"])
        return _costs[self.name](*args, **kwargs)

    def backend_of(self, *args: Any, **kwargs: Any) -> str:
        """Return the name of the backend that would run this call; it is not run."""
        wanted = kwargs.pop("backend", None) or wanted_backend()
        return self._chosen(wanted, self.schema.bind(*args, **kwargs))[0]

    def _chosen(self, wanted: str | None, bound: BoundCall) -> tuple[str, Kernel]:
        """Return the backend of a checked call, by name and kernel."""
        if wanted is not None:
            return wanted, self._asked_for(wanted, bound)
        order = self._orders.get(bound.device)
        if order is None:
            names = PREFERENCE.get(bound.device.type, ("reference",))
            order = self._orders[bound.device] = _Order(names)
        for found in order.found:
            refuse = found[1].refuse
            reason = None if refuse is None else refuse(bound)
            if reason is None:
                return found
            _log_once(f"{self.name}: backend {found[0]} not used: it {reason}")
        self._load_next(order, bound.device.type)
        return self._chosen(None, bound)

    def _asked_for(self, wanted: str, bound: BoundCall) -> Kernel:
        kernel = self._kernel(wanted)
        if isinstance(kernel, str):
            reason: str | None = kernel
        else:
            reason = None if kernel.refuse is None else kernel.refuse(bound)
            if reason is None:
                self._direct[wanted] = kernel.direct
                return kernel
        raise BackendError(
            f"backend {wanted!r} for {self.name}",
            expected="a backend that can run this call",
            got=f"it {reason}",
            remedy=f"Leave backend out, or choose another one: {self._others(wanted, bound)}.",
        )

    def _load_next(self, order: _Order, device: str) -> None:
        """Load the next backend in order of preference whose turn has come."""
        assert order.left, "the reference refuses nothing"
        name = order.left.pop(0)
        kernel = self._kernel(name)
        if isinstance(kernel, str):
            _log_once(f"{self.name}: backend {name} not used: it {kernel}")
            return
        if name == "reference" and device != "cpu":
            _warn_once(f"{self.name} runs in its slow reference on {device}: see dpkern info")
        if device == "cpu" and not order.found:
            self._direct[None] = kernel.direct
        order.found.append((name, kernel))

    def forget(self) -> None:
        """Forget the chosen kernels, because some have been added or removed."""
        self._orders.clear()
        self._direct.clear()

    def _kernel(self, name: str) -> Kernel | str:
        """Return the backend's kernel, or the reason why there is none."""
        kernel = self.kernels.get(name)
        if kernel is not None:
            return kernel
        ok, reason = availability(name)
        if not ok:
            return reason
        return self.kernels.get(name, "has no kernel for this op")

    def _others(self, wanted: str, bound: BoundCall) -> str:
        """Return the other backends of this op, each with whether it takes this call."""
        found = []
        for name in BACKENDS:
            kernel = self._kernel(name)
            reason: str | None = kernel if isinstance(kernel, str) else None
            if not isinstance(kernel, str) and kernel.refuse is not None:
                reason = kernel.refuse(bound)
            if name != wanted:
                found.append(f"{name} ({reason or 'available'})")
        return ", ".join(found)


_modules = sys.modules
_is_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled
OPS: dict[str, Op[..., Any]] = {}
_costs: dict[str, Callable[..., Cost]] = {}
_wanted: ContextVar[str | None] = ContextVar("dpkern_backend", default=None)
_availability: dict[str, tuple[bool, str]] = {"reference": (True, "")}
_logged: set[str] = set()

Interceptor = Callable[["Op[..., Any]", tuple[Any, ...], dict[str, Any]], Any]
_interceptor: Interceptor | None = None


class _Passing(threading.local):
    """A flag of this thread: its calls come from the interceptor, and pass by it."""

    on = False


_passing = _Passing()


def op(
    *, check: Callable[..., Any] | None = None, plan: type | None = None
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Make a function an op: its signature is the declaration (``base.signature``).

    Args:
        check: looks at what the signature cannot say, with every argument in the signature's order.
            It may return a plan, which kernels receive behind the arguments.
        plan: its type, where compiled kernels receive it as a struct of this name.
    """

    def decorate(reference: Callable[P, R]) -> Op[P, R]:
        return Op(reference, check, plan)

    return decorate


def register(
    name: str,
    backend: str,
    run: Callable[..., Any] | Kernel,
    refuse: Callable[..., str | None] | None = None,
) -> None:
    """Register a backend's kernel for the op ``name`` (``stem.function``).

    Args:
        run: a ``Kernel`` of checked calls, or a function of the op's arguments as its reference has
            them; where the op's check makes a plan, a parameter ``plan`` receives it.
        refuse: gives a reason against these arguments, or None; None instead of it refuses none.
    """
    found = OPS[name]
    found.kernels[backend] = run if isinstance(run, Kernel) else found.kernel(run, refuse)
    found.forget()


def register_costs(costs: Mapping[str, Callable[..., Cost]]) -> None:
    """Register what calls of these ops cost, by the op's name: from their arguments alone."""
    _costs.update(costs)


_places: dict[str, str] = {}


def look_in(*, backends: str, costs: str) -> None:
    """Say which modules register backends and costs when these are first asked for.

    They stand above the dispatcher, so ``dpkern`` itself says it.
    """
    _places.update(backends=backends, costs=costs)


def availability(backend: str) -> tuple[bool, str]:
    """Return whether a backend can be used on this machine and, if not, why; probed once."""
    found = _availability.get(backend)
    if found is None:
        _require_known(backend)
        module = importlib.import_module(f"{_places['backends']}.{backend}")
        found = _availability[backend] = module.load()
    return found


Kernels = Sequence[tuple[str, Any, Callable[..., "str | None"] | None]]
"""``(op, run, refuse)``: what a backend registers."""


@contextmanager
def replaced(backend: str, kernels: Kernels) -> Iterator[None]:
    """Make these kernels the backend's, and available, inside the block: for tests."""
    before = _availability.get(backend), {name: op.kernels.get(backend) for name, op in OPS.items()}
    try:
        _availability[backend] = True, ""
        for op in OPS.values():
            op.kernels.pop(backend, None)
            op.forget()
        for name, run, refuse in kernels:
            register(name, backend, run, refuse)
        yield
    finally:
        _availability.pop(backend)
        if before[0] is not None:
            _availability[backend] = before[0]
        for name, op in OPS.items():
            op.kernels.pop(backend, None)
            op.forget()
            old = before[1][name]
            if old is not None:
                op.kernels[backend] = old


@contextmanager
def use(backend: str) -> Iterator[None]:
    """Run every op inside the block on this backend, or fail."""
    _require_known(backend)
    token = _wanted.set(backend)
    try:
        yield
    finally:
        _wanted.reset(token)


@contextmanager
def intercepted(interceptor: Interceptor | None) -> Iterator[None]:
    """Hand every call of an op in the block, on any thread, to ``interceptor(op, args, kwargs)``.

    What it returns is the call's result. It runs the op itself under ``intercepted(None)``, which
    lets the calls of its own thread pass. For counters and clocks; calls are not checked before it
    sees them.
    """
    global _interceptor
    before, passed = _interceptor, _passing.on
    _passing.on = interceptor is None
    if interceptor is not None:
        _interceptor = interceptor
    try:
        yield
    finally:
        _passing.on = passed
        if interceptor is not None:
            _interceptor = before


def observed() -> bool:
    """Whether calls of ops are intercepted or profiled now."""
    return _interceptor is not None or torch._C._autograd._profiler_enabled()


def runs_compiled() -> bool:
    """Whether calls on the CPU run in the compiled kernels, and nothing looks at them."""
    found = _availability.get("cpu")
    wanted = _wanted.get() or environment_choice()
    usual = found is not None and found[0] and wanted in _COMPILED
    return usual and _interceptor is None and not _is_profiled()


_COMPILED = (None, "cpu")


def wanted_backend() -> str | None:
    """Return the backend that calls without ``backend`` must run on.

    None selects the first backend that supports the call.
    """
    return _wanted.get() or environment_choice()


def table() -> list[dict[str, Any]]:
    """Return rows ``op, backend, available, reason`` for every op and backend."""
    rows = []
    for name, current in sorted(OPS.items()):
        for backend in BACKENDS:
            kernel = current._kernel(backend)
            reason = kernel if isinstance(kernel, str) else ""
            rows.append({"op": name, "backend": backend, "available": not reason, "reason": reason})
    return rows


def _require_known(backend: str) -> None:
    if backend not in BACKENDS:
        raise InvalidInput(
            "backend",
            expected=f"one of {', '.join(BACKENDS)}",
            got=backend,
            remedy="See `dpkern info` for the backends of this installation.",
        )


@cache
def environment_choice() -> str | None:
    """Return ``DPKERN_BACKEND``, read at the first call of an op."""
    name = os.environ.get("DPKERN_BACKEND")
    if name:
        _require_known(name)
    return name or None


def _log_once(message: str, level: int = logging.INFO) -> None:
    if message not in _logged:
        _logged.add(message)
        log.log(level, message)


def _warn_once(message: str) -> None:
    _log_once(message, logging.WARNING)

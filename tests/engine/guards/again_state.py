"""State that a module reaches in other ways: helpers, globals, slots, caches, weak references."""

from __future__ import annotations

import copy
import functools
import itertools
import threading
import types
import weakref
from collections import UserList, deque
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from dpkern.base.errors import PrivacyError, UnsupportedModule
from tests.engine.guards import texts
from tests.engine.guards.kit import Table, World
from tests.engine.guards.models import HIDDEN, Between, cross_entropy, fit, mlp
from tests.engine.guards.records import CLASSES

TABLE = Table("state in other places")


def _fit_twice(w: World, model: nn.Module) -> None:
    """The usual loop over two epochs."""
    model, optimizer, loader = w.private(model)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model, x, y).backward()
            optimizer.step()


_FIRST: dict[str, Tensor] = {}


def _centred(h: Tensor) -> Tensor:
    if "mean" not in _FIRST:
        _FIRST["mean"] = h.detach().mean(0)
    return h - _FIRST["mean"]


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def helper_with_a_global_dictionary(w: World) -> None:
    """The mean of the first batch, kept by a function of the model's file."""
    _FIRST.clear()
    fit(w, Between(lambda m, h: _centred(h)))


class _Normaliser:
    def __init__(self) -> None:
        self.mean: Tensor | None = None

    def __call__(self, h: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = h.detach().mean(0)
        return h - self.mean


_NORMALISER = _Normaliser()


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def global_object(w: World) -> None:
    _NORMALISER.mean = None
    fit(w, Between(lambda m, h: _NORMALISER(h)))


_MEAN = np.zeros(HIDDEN, dtype=np.float32)


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def global_numpy_array(w: World) -> None:
    _MEAN[:] = 0

    def middle(m: Any, h: Tensor) -> Tensor:
        if not _MEAN.any():
            _MEAN[:] = h.detach().mean(0).numpy()
        return h - torch.from_numpy(_MEAN)

    fit(w, Between(middle))


@dataclass(slots=True)
class _Slotted:
    mean: Tensor | None = None
    seen: int = 0


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def dataclass_with_slots(w: World) -> None:
    def middle(m: Any, h: Tensor) -> Tensor:
        if m.stats.mean is None:
            m.stats.mean = h.detach().mean(0)
        return h - m.stats.mean

    model = Between(middle)
    model.stats = _Slotted()
    fit(w, model)


@TABLE.refused(UnsupportedModule, texts.TRACE)
def running_mean_in_slots(w: World) -> None:
    def middle(m: Any, h: Tensor) -> Tensor:
        mean = h.detach().mean(0)
        m.stats.mean = mean if m.stats.mean is None else 0.9 * m.stats.mean + 0.1 * mean
        m.stats.seen += 1
        return h

    model = Between(middle)
    model.stats = _Slotted()
    fit(w, model)
    w.released["mean"] = model.stats.mean


@TABLE.right()
def counter_in_slots(w: World) -> None:
    def middle(m: Any, h: Tensor) -> Tensor:
        m.stats.seen += 1
        return h / (1 + 0.1 * m.stats.seen)

    model = Between(middle)
    model.stats = _Slotted()
    fit(w, model)


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def function_attribute(w: World) -> None:
    def middle(m: Any, h: Tensor) -> Tensor:
        if not hasattr(middle, "mean"):
            middle.mean = h.detach().mean(0)  # type: ignore[attr-defined]
        return h - middle.mean  # type: ignore[attr-defined]

    fit(w, Between(middle))


def _scaled(h: Tensor) -> Tensor:
    scale = getattr(_scaled, "scale", None)
    if scale is None:
        scale = _scaled.scale = 1 / h.detach().abs().max()  # type: ignore[attr-defined]
    return h * scale


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def attribute_of_a_helper(w: World) -> None:
    vars(_scaled).clear()
    fit(w, Between(lambda m, h: _scaled(h)))


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def cached_by_lru_cache(w: World) -> None:
    """The first batch's mean: the cache knows the method's other arguments only."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, HIDDEN)
            self.head = nn.Linear(HIDDEN, CLASSES)
            self.h = torch.zeros(1)

        @functools.lru_cache  # noqa: B019
        def mean(self) -> Tensor:
            return self.h.detach().mean(0)

        def forward(self, x: Tensor) -> Tensor:
            self.h = self.layer(x)
            return self.head(self.h - self.mean())

    fit(w, Net())


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def closure_with_lru_cache(w: World) -> None:
    now: dict[str, Tensor] = {}

    @functools.cache
    def mean(width: int) -> Tensor:
        return now["h"].mean(0)

    def middle(m: Any, h: Tensor) -> Tensor:
        now["h"] = h.detach()
        return h - mean(h.shape[1])

    fit(w, Between(middle))


@TABLE.right()
def positions_by_lru_cache(w: World) -> None:
    @functools.lru_cache(maxsize=4)
    def places(width: int) -> Tensor:
        return torch.linspace(0, 1, width)

    fit(w, Between(lambda m, h: h + places(h.shape[1])))


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def cached_property(w: World) -> None:
    class Net(Between):
        @functools.cached_property
        def mean(self) -> Tensor:
            return self.h.detach().mean(0)

    def middle(m: Any, h: Tensor) -> Tensor:
        m.h = h
        return h - m.mean

    fit(w, Net(middle))


@TABLE.refused(UnsupportedModule, texts.GENERATOR)
def generator_that_averages(w: World) -> None:
    """The running mean lives in a suspended function."""

    def running() -> Any:
        mean = torch.zeros(HIDDEN)
        while True:
            h = yield mean
            mean = 0.9 * mean + 0.1 * h.mean(0)

    def middle(m: Any, h: Tensor) -> Tensor:
        return h - 3 * m.stats.send(h.detach())

    model = Between(middle)
    model.stats = running()
    next(model.stats)
    fit(w, model)


@TABLE.refused(UnsupportedModule, texts.GENERATOR)
def generator_of_the_first_batch(w: World) -> None:
    def once() -> Any:
        h = yield torch.zeros(HIDDEN)
        mean = h.mean(0)
        while True:
            yield mean

    model = Between(lambda m, h: h - m.stats.send(h.detach()))
    model.stats = once()
    next(model.stats)
    fit(w, model)


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def counter_by_itertools(w: World) -> None:
    model = Between(lambda m, h: h / (1 + 0.1 * next(m.steps)))
    model.steps = itertools.count()
    fit(w, model)


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def thread_local(w: World) -> None:
    local = threading.local()

    def middle(m: Any, h: Tensor) -> Tensor:
        if not hasattr(local, "mean"):
            local.mean = h.detach().mean(0)
        return h - local.mean

    fit(w, Between(middle))


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def weak_reference(w: World) -> None:
    stats = _Normaliser()

    def middle(m: Any, h: Tensor) -> Tensor:
        found = m.stats()
        return found(h)

    model = Between(middle)
    model.stats = weakref.ref(stats)
    fit(w, model)


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def weak_dictionary(w: World) -> None:
    means: Any = weakref.WeakKeyDictionary()

    def middle(m: Any, h: Tensor) -> Tensor:
        if m not in means:
            means[m] = h.detach().mean(0)
        return h - means[m]

    fit(w, Between(middle))


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def simple_namespace(w: World) -> None:
    def middle(m: Any, h: Tensor) -> Tensor:
        if m.state.mean is None:
            m.state.mean = h.detach().mean(0)
        return h - m.state.mean

    model = Between(middle)
    model.state = types.SimpleNamespace(mean=None)
    fit(w, model)


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def partial_with_a_table(w: World) -> None:
    def centred(h: Tensor, *, table: dict[str, Tensor]) -> Tensor:
        if not table:
            table["mean"] = h.detach().mean(0)
        return h - table["mean"]

    model = Between(lambda m, h: m.centred(h))
    model.centred = functools.partial(centred, table={})
    fit(w, model)


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def default_argument(w: World) -> None:
    def middle(m: Any, h: Tensor, table: list[Tensor] = []) -> Tensor:  # noqa: B006
        if not table:
            table.append(h.detach().mean(0))
        return h - table[0]

    fit(w, Between(middle))


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def static_method_with_a_default(w: World) -> None:
    class Net(Between):
        @staticmethod
        def centred(h: Tensor, table: list[Tensor] = []) -> Tensor:  # noqa: B006
            if not table:
                table.append(h.detach().mean(0))
            return h - table[0]

    fit(w, Net(lambda m, h: m.centred(h)))


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def property_with_a_closure(w: World) -> None:
    table: list[Tensor] = []

    class Net(Between):
        @property
        def shift(self) -> Tensor:
            if not table:
                table.append(self.h.detach().mean(0))
            return table[0]

    def middle(m: Any, h: Tensor) -> Tensor:
        m.h = h
        return h - m.shift

    fit(w, Net(middle))


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def class_method_and_class_attribute(w: World) -> None:
    class Shared:
        mean: ClassVar[Tensor | None] = None

        @classmethod
        def centred(cls, h: Tensor) -> Tensor:
            if cls.mean is None:
                cls.mean = h.detach().mean(0)
            return h - cls.mean

    fit(w, Between(lambda m, h: Shared.centred(h)))


class _Registry:
    mean: ClassVar[Tensor | None] = None


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def attribute_of_a_global_class(w: World) -> None:
    _Registry.mean = None

    def middle(m: Any, h: Tensor) -> Tensor:
        if _Registry.mean is None:
            _Registry.mean = h.detach().mean(0)
        return h - _Registry.mean

    fit(w, Between(middle))


HELPERS = types.ModuleType("helpers_of_a_user")
HELPERS.mean = None  # type: ignore[attr-defined]


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def variable_of_another_file(w: World) -> None:
    """``import config``, and the loop or the model writes ``config.mean``."""
    HELPERS.mean = None  # type: ignore[attr-defined]

    def middle(m: Any, h: Tensor) -> Tensor:
        if HELPERS.mean is None:  # type: ignore[attr-defined]
            HELPERS.mean = h.detach().mean(0)  # type: ignore[attr-defined]
        return h - HELPERS.mean  # type: ignore[attr-defined]

    fit(w, Between(middle))


_SHARED = nn.Linear(HIDDEN, HIDDEN, bias=False).requires_grad_(False)


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def global_module_initialised_by_data(w: World) -> None:
    with torch.no_grad():
        _SHARED.weight.zero_()

    def middle(m: Any, h: Tensor) -> Tensor:
        with torch.no_grad():
            if not _SHARED.weight.any():
                _SHARED.weight[0] = h.mean(0)
        return h - _SHARED.weight[0]

    fit(w, Between(middle))


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def user_list(w: World) -> None:
    def middle(m: Any, h: Tensor) -> Tensor:
        if not m.kept:
            m.kept.append(h.detach().mean(0))
        return h - m.kept[0]

    model = Between(middle)
    model.kept = UserList()
    fit(w, model)


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def deque_of_means(w: World) -> None:
    def middle(m: Any, h: Tensor) -> Tensor:
        m.kept.append(h.detach().mean(0))
        return h - m.kept[0]

    model = Between(middle)
    model.kept = deque(maxlen=1)
    fit(w, model)


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def number_kept_as_text(w: World) -> None:
    def middle(m: Any, h: Tensor) -> Tensor:
        if not m.note:
            m.note = repr(float(h.detach().mean()))
        return h - float(m.note)

    model = Between(middle)
    model.note = ""
    fit(w, model)


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def object_array(w: World) -> None:
    def middle(m: Any, h: Tensor) -> Tensor:
        if m.table[0] is None:
            m.table[0] = h.detach().mean(0)
        return h - m.table[0]

    model = Between(middle)
    model.table = np.empty(1, dtype=object)
    fit(w, model)


@TABLE.refused(UnsupportedModule, texts.TRACE)
def replaced_numpy_array(w: World) -> None:
    def middle(m: Any, h: Tensor) -> Tensor:
        m.mean = 0.9 * m.mean + 0.1 * h.detach().mean(0).numpy()
        return h

    model = Between(middle)
    model.mean = np.zeros(HIDDEN, dtype=np.float32)
    fit(w, model)
    w.released["mean"] = torch.from_numpy(model.mean)


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def structured_numpy(w: World) -> None:
    def middle(m: Any, h: Tensor) -> Tensor:
        if not m.table["ready"][0]:
            m.table["mean"][0] = h.detach().mean(0).numpy()
            m.table["ready"][0] = True
        return h - torch.from_numpy(m.table["mean"][0].copy())

    model = Between(middle)
    model.table = np.zeros(1, dtype=[("ready", "?"), ("mean", "f4", (HIDDEN,))])
    fit(w, model)


@TABLE.right()
def parametrization_that_remembers(w: World) -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm: Tensor | None = None

        def forward(self, weight: Tensor) -> Tensor:
            if self.norm is None:
                self.norm = weight.detach().norm()
            return weight / self.norm

    model = mlp()
    nn.utils.parametrize.register_parametrization(model[0], "weight", Shifted())
    fit(w, model)


@TABLE.right()
def exponential_average_by_swa_utils(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    average = torch.optim.swa_utils.AveragedModel(
        copy.deepcopy(model), multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
        average.update_parameters(model)
    w.released["average"] = next(average.parameters())


@TABLE.refused(PrivacyError, texts.STATISTICS, after=3)
def running_statistics_of_an_averaged_copy(w: World) -> None:
    """``update_bn`` on the training batches, into a copy that is released."""
    net = nn.Sequential(nn.Linear(6, HIDDEN), nn.GroupNorm(1, HIDDEN), nn.Linear(HIDDEN, CLASSES))
    copied = nn.Sequential(nn.Linear(6, HIDDEN), nn.BatchNorm1d(HIDDEN))
    model, optimizer, loader = w.private(net)
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
    torch.optim.swa_utils.update_bn(loader, copied)
    w.released["mean"] = copied[1].running_mean


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS, after=1)
def module_replaced_between_steps(w: World) -> None:
    model, optimizer, loader = w.private(Between(lambda m, h: h))
    for step, (x, y) in enumerate(loader):
        if step == 1:
            model.after[0] = _Relu()
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()


class _Relu(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h.relu() - h.detach().mean(0)


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS, after=1)
def method_replaced_between_steps(w: World) -> None:
    model, optimizer, loader = w.private(Between(lambda m, h: h))
    for step, (x, y) in enumerate(loader):
        if step == 1:
            model.after[0].forward = lambda h: h.tanh() - h.detach().mean(0)
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()


_MODE = "plain"

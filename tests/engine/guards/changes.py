"""Loops that behave well for two epochs and then change: no guard may rest on what it saw."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dpkern.base.errors import InvalidInput, PrivacyError, UnsupportedModule
from tests.engine.guards import texts
from tests.engine.guards.kit import Table, World
from tests.engine.guards.models import HIDDEN, Between, mlp
from tests.engine.guards.records import CLASSES

TABLE = Table("changes")

GOOD, EPOCHS = 6, 4
"""Steps before the change; epochs of three steps."""

Turn = Callable[[nn.Module, Tensor, Tensor, list[Any]], Tensor | None]
"""Make the loss of a step after the change; ``kept`` has the batches before it."""


def usual(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def late(
    w: World,
    turn: Turn,
    model: nn.Module | None = None,
    begin: Callable[[nn.Module], Any] = lambda model: None,
) -> None:
    """Train as usual, then call ``begin`` once, and let ``turn`` make the loss of each step."""
    model, optimizer, loader = w.private(mlp() if model is None else model)
    kept: list[Any] = []
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            if len(kept) == GOOD:
                begin(model)
            loss = usual(model, x, y) if len(kept) < GOOD else turn(model, x, y, kept)
            if loss is not None:
                loss.backward()
            optimizer.step()
            kept.append((x, y))


def same(model: nn.Module, x: Tensor, y: Tensor, kept: list[Any]) -> Tensor:
    return usual(model, x, y)


def centred(x: Tensor) -> Tensor:
    return x - x.mean(0).detach()


def right(function: Turn) -> Turn:
    """Add a loop that stays right."""

    def run(w: World) -> None:
        late(w, function)

    run.__name__ = function.__name__
    TABLE.right()(run)
    return function


def refused(error: Any, says: str) -> Callable[[Turn], Turn]:
    """Add a loop that is refused at the change."""

    def add(function: Turn) -> Turn:
        def run(w: World) -> None:
            late(w, function)

        run.__name__ = function.__name__
        TABLE.refused(error, says, after=GOOD)(run)
        return function

    return add


# still right


@right
def augmentation(model: nn.Module, x: Tensor, y: Tensor, kept: list[Any]) -> Tensor:
    return usual(model, x * 0.9 + 0.1, y)


@right
def label_smoothing(model: nn.Module, x: Tensor, y: Tensor, kept: list[Any]) -> Tensor:
    return F.cross_entropy(model(x), y, label_smoothing=0.1)


@right
def another_loss(model: nn.Module, x: Tensor, y: Tensor, kept: list[Any]) -> None:
    F.mse_loss(model(x), F.one_hot(y, CLASSES).float()).backward()


@right
def ignored_targets(model: nn.Module, x: Tensor, y: Tensor, kept: list[Any]) -> Tensor:
    return usual(model, x, y.masked_fill(y == 0, -100))


@right
def class_weights(model: nn.Module, x: Tensor, y: Tensor, kept: list[Any]) -> Tensor:
    return F.cross_entropy(model(x), y, weight=torch.tensor([1.0, 2.0, 3.0]))


@right
def two_views(model: nn.Module, x: Tensor, y: Tensor, kept: list[Any]) -> None:
    usual(model, torch.cat([x, x.flip(1)]), torch.cat([y, y])).backward()


@right
def turned_rows(model: nn.Module, x: Tensor, y: Tensor, kept: list[Any]) -> Tensor:
    return usual(model, x.flip(0), y.flip(0))


@right
def inputs_with_a_gradient(model: nn.Module, x: Tensor, y: Tensor, kept: list[Any]) -> Tensor:
    return usual(model, x.requires_grad_(), y)


@right
def evaluation_mode(model: nn.Module, x: Tensor, y: Tensor, kept: list[Any]) -> Tensor:
    return usual(model.train(len(kept) % 2 == 0), x, y)


@right
def pieces(model: nn.Module, x: Tensor, y: Tensor, kept: list[Any]) -> None:
    for rows, targets in zip(x.split(2), y.split(2), strict=True):
        usual(model, rows, targets).backward()


@right
def edit_in_place(model: nn.Module, x: Tensor, y: Tensor, kept: list[Any]) -> Tensor:
    return usual(model, x.mul_(0.5), y)


@right
def in_a_thread(model: nn.Module, x: Tensor, y: Tensor, kept: list[Any]) -> None:
    worker = threading.Thread(target=lambda: usual(model, x, y).backward())
    worker.start()
    worker.join()


@TABLE.right()
def a_hook_that_only_looks(w: World) -> None:
    seen: list[Any] = []
    late(w, same, begin=lambda model: model.register_forward_hook(lambda *a: seen.append(0)))


# rows that are others, or mix


@refused(UnsupportedModule, "rows that come from one record each")
def mixup(model: nn.Module, x: Tensor, y: Tensor, kept: list[Any]) -> Tensor:
    return usual(model, 0.7 * x + 0.3 * x.flip(0), y)


@refused(UnsupportedModule, "rows that come from one record each")
def standardisation(model: nn.Module, x: Tensor, y: Tensor, kept: list[Any]) -> Tensor:
    return usual(model, (x - x.mean(0)) / x.std(0), y)


@refused(PrivacyError, "equally many rows of each record")
def a_row_written_over_another(model: nn.Module, x: Tensor, y: Tensor, kept: list[Any]) -> Tensor:
    x[0] = x[1]
    return usual(model, x, y)


@refused(UnsupportedModule, "rows that come from one record each")
def a_write_through_a_view(model: nn.Module, x: Tensor, y: Tensor, kept: list[Any]) -> Tensor:
    x[0].copy_(x[1])
    return usual(model, x, y)


@refused(UnsupportedModule, "rows that come from one record each")
def an_edit_without_gradients(model: nn.Module, x: Tensor, y: Tensor, kept: list[Any]) -> Tensor:
    with torch.no_grad():
        x.sub_(x.mean(0))
    return usual(model, x, y)


@refused(UnsupportedModule, "rows that come from one record each")
def a_write_through_data(model: nn.Module, x: Tensor, y: Tensor, kept: list[Any]) -> Tensor:
    x.data.copy_(x.flip(0) + x)
    return usual(model, x, y)


@refused(PrivacyError, "samples that the private loader yielded")
def a_round_trip_through_numpy(model: nn.Module, x: Tensor, y: Tensor, kept: list[Any]) -> Tensor:
    return usual(model, torch.from_numpy(x.numpy()), y)


@refused(PrivacyError, "samples of the loader's current batch")
def a_batch_again(model: nn.Module, x: Tensor, y: Tensor, kept: list[Any]) -> Tensor:
    return usual(model, *kept[0])


@refused(UnsupportedModule, "samples of several batches")
def two_batches(model: nn.Module, x: Tensor, y: Tensor, kept: list[Any]) -> Tensor:
    model(torch.cat([x, kept[0][0]]))
    return usual(model, x, y)


@TABLE.refused(PrivacyError, "samples that the private loader yielded", after=GOOD)
def another_loader(w: World) -> None:
    x_own, y_own = w.batches()[1]
    late(w, lambda model, x, y, kept: usual(model, x_own, y_own))


# losses


@refused(UnsupportedModule, "by the same number in every batch")
def another_number_of_terms(model: nn.Module, x: Tensor, y: Tensor, kept: list[Any]) -> Tensor:
    return F.mse_loss(model(x), F.one_hot(y, CLASSES).float())


@refused(UnsupportedModule, "a sum or a mean over samples")
def targets_of_other_records(model: nn.Module, x: Tensor, y: Tensor, kept: list[Any]) -> Tensor:
    return usual(model, x, y.flip(0))


@refused(UnsupportedModule, "a sum or a mean over samples")
def targets_of_another_batch(model: nn.Module, x: Tensor, y: Tensor, kept: list[Any]) -> Tensor:
    return usual(model, x[:4], kept[1][1])


@refused(UnsupportedModule, "a sum or a mean over samples")
def a_root_of_the_mean(model: nn.Module, x: Tensor, y: Tensor, kept: list[Any]) -> Tensor:
    return usual(model, x, y).sqrt()


@refused(UnsupportedModule, "a sum or a mean over samples")
def centred_outputs(model: nn.Module, x: Tensor, y: Tensor, kept: list[Any]) -> Tensor:
    return F.cross_entropy(centred(model(x)), y)


@refused(InvalidInput, "loss_reduction")
def a_sum_instead_of_a_mean(model: nn.Module, x: Tensor, y: Tensor, kept: list[Any]) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="sum")


@refused(PrivacyError, "no trained tensor besides the parameters")
def a_trained_temperature(model: nn.Module, x: Tensor, y: Tensor, kept: list[Any]) -> Tensor:
    return F.cross_entropy(model(x) * torch.ones((), requires_grad=True), y)


@refused(PrivacyError, "no trained tensor besides the parameters")
def a_trained_head(model: nn.Module, x: Tensor, y: Tensor, kept: list[Any]) -> Tensor:
    return F.cross_entropy(nn.Linear(CLASSES, CLASSES)(model(x)), y)


@refused(PrivacyError, "no trained tensor besides the parameters")
def a_trained_term_in_place(model: nn.Module, x: Tensor, y: Tensor, kept: list[Any]) -> Tensor:
    loss = usual(model, x, y)
    loss += nn.Parameter(torch.ones(()))
    return loss


@refused(PrivacyError, "no trained tensor besides the parameters")
def outputs_scaled_in_place(model: nn.Module, x: Tensor, y: Tensor, kept: list[Any]) -> Tensor:
    output = model(x)
    output.mul_(nn.Parameter(torch.ones(())))
    return F.cross_entropy(output, y)


@refused(PrivacyError, "no trained tensor besides the parameters")
def targets_with_trained_weights(model: nn.Module, x: Tensor, y: Tensor, kept: list[Any]) -> Tensor:
    weights = nn.Parameter(torch.ones(CLASSES))
    return F.cross_entropy(model(x), F.one_hot(y, CLASSES).float() * weights)


# the module


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS, after=GOOD)
def a_hook_that_mixes(w: World) -> None:
    late(w, same, begin=lambda model: model.register_forward_hook(lambda m, a, o: centred(o)))


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS, after=GOOD)
def a_hook_in_front_that_mixes(w: World) -> None:
    def mixing(module: nn.Module, args: Any) -> Any:
        return (centred(args[0]),)

    late(w, same, begin=lambda model: model[2].register_forward_pre_hook(mixing))


def hooked_everywhere(w: World, register: Callable[..., Any], hook: Callable[..., Any]) -> None:
    """Let torch call a hook for every module from the change on."""
    handles: list[Any] = []
    try:
        late(w, same, begin=lambda model: handles.append(register(hook)))
    finally:
        for handle in handles:
            handle.remove()


def of_tanh(change: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda module, given, *out: (
        change((out or given)[0]) if type(module) is nn.Tanh else None
    )


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS, after=GOOD)
def a_hook_of_all_modules_that_mixes(w: World) -> None:
    hooked_everywhere(w, register_module_forward_hook, of_tanh(centred))


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS, after=GOOD)
def a_hook_in_front_of_all_modules_that_mixes(w: World) -> None:
    hooked_everywhere(w, register_module_forward_pre_hook, of_tanh(lambda x: (centred(x),)))


@TABLE.right()
def a_hook_of_all_modules_that_only_looks(w: World) -> None:
    seen: list[Any] = []
    hooked_everywhere(w, register_module_forward_hook, lambda *given: seen.append(given[0]))
    assert seen


class FunctionsCentred(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        return centred(out) if func is torch.tanh else out


class KernelsCentred(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        return centred(out) if func is torch.ops.aten.tanh.default else out


class KernelsCounted(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {})


def through(mode: type[Any]) -> Turn:
    """Make the passes after the change go through a mode of torch's."""

    def turn(model: nn.Module, x: Tensor, y: Tensor, kept: list[Any]) -> Tensor:
        with mode():
            output = model(x)
        return F.cross_entropy(output, y)

    return turn


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS, after=GOOD)
def a_mode_of_functions_that_mixes(w: World) -> None:
    late(w, through(FunctionsCentred))


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS, after=GOOD)
def a_mode_of_kernels_that_mixes(w: World) -> None:
    late(w, through(KernelsCentred))


@TABLE.right()
def a_mode_of_kernels_that_only_looks(w: World) -> None:
    late(w, through(KernelsCounted))


class Centring(nn.Module):
    """Subtracts the mean of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return centred(x)


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS, after=GOOD)
def a_module_in_anothers_place(w: World) -> None:
    late(w, same, begin=lambda model: setattr(model, "1", Centring()))


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS, after=GOOD)
def another_forward(w: World) -> None:
    def begin(model: nn.Module) -> None:
        own = model[1].forward
        model[1].forward = lambda x: own(centred(x))

    late(w, same, begin=begin)


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS, after=GOOD)
def a_mode_that_mixes(w: World) -> None:
    middle = Between(lambda m, h: h if m.training else centred(h))
    late(w, same, middle, begin=lambda model: model.eval())


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS, after=GOOD)
def a_flag_that_mixes(w: World) -> None:
    middle = Between(lambda m, h: centred(h) if m.mixing else h, mixing=False)
    late(w, same, middle, begin=lambda model: setattr(model, "mixing", True))


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS, after=GOOD)
def an_argument_that_mixes(w: World) -> None:
    middle = Between(lambda m, h, mixing=False: centred(h) if mixing else h)
    late(w, lambda model, x, y, kept: F.cross_entropy(model(x, mixing=True), y), middle)


@TABLE.refused(UnsupportedModule, "contents that only", after=GOOD)
def another_buffer(w: World) -> None:
    def turn(model: nn.Module, x: Tensor, y: Tensor, kept: list[Any]) -> Tensor:
        model.shift = torch.ones(HIDDEN)
        return usual(model, x, y)

    late(w, turn, Between(lambda m, h: h + m.shift, shift=torch.zeros(HIDDEN)))


@TABLE.refused(UnsupportedModule, "contents that only", after=GOOD)
def a_buffer_written_between(w: World) -> None:
    def turn(model: nn.Module, x: Tensor, y: Tensor, kept: list[Any]) -> Tensor:
        model.shift.add_(1.0)
        return usual(model, x, y)

    late(w, turn, Between(lambda m, h: h + m.shift, shift=torch.zeros(HIDDEN)))


@TABLE.refused(UnsupportedModule, "contents that depend on the samples", after=GOOD)
def a_flag_that_remembers(w: World) -> None:
    def middle(m: nn.Module, h: Tensor) -> Tensor:
        if m.remembering:
            m.shift.copy_(h.detach().mean(0))
        return h

    model = Between(middle, shift=torch.zeros(HIDDEN), remembering=False)
    late(w, same, model, begin=lambda model: setattr(model, "remembering", True))


def writing(write: Callable[[nn.Module, Tensor], Any]) -> Callable[[World], None]:
    """Make a loop whose module writes in its passes, once nothing that is an attribute says so."""

    def run(w: World) -> None:
        armed: list[bool] = []

        def middle(m: nn.Module, h: Tensor) -> Tensor:
            if armed:
                with torch.no_grad():
                    write(m, h.detach())
            return h

        late(w, same, Between(middle, shift=torch.zeros(HIDDEN)), lambda _: armed.append(True))

    return run


@TABLE.refused(UnsupportedModule, texts.CONTENTS, after=GOOD)
def a_buffer_written_within(w: World) -> None:
    writing(lambda m, h: m.shift.copy_(h.mean(0)))(w)


@TABLE.refused(UnsupportedModule, texts.CONTENTS, after=GOOD)
def a_buffer_replaced_within(w: World) -> None:
    writing(lambda m, h: setattr(m, "shift", h.mean(0)))(w)


@TABLE.refused(UnsupportedModule, texts.CONTENTS, after=GOOD)
def a_parameter_written_within(w: World) -> None:
    writing(lambda m, h: m.before.bias.add_(h.mean(0)))(w)


@TABLE.right()
def evaluation_between(w: World) -> None:
    def turn(model: nn.Module, x: Tensor, y: Tensor, kept: list[Any]) -> Tensor:
        with torch.no_grad():
            model(x)
        return usual(model, x, y)

    late(w, turn)


@TABLE.right()
def weights_loaded_between(w: World) -> None:
    def turn(model: nn.Module, x: Tensor, y: Tensor, kept: list[Any]) -> Tensor:
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
        return usual(model, x, y)

    late(w, turn, Between(lambda m, h: h + m.shift, shift=torch.zeros(HIDDEN)))

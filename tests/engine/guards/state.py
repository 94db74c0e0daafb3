"""State that absorbs records and leaves the run without noise."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpkern.base.errors import PrivacyError, UnsupportedModule
from tests.engine.guards import texts
from tests.engine.guards.kit import Table, World
from tests.engine.guards.models import HIDDEN, Between, Reader, cross_entropy, fit, mlp
from tests.engine.guards.records import CLASSES, TOKENS, WORDS

TABLE = Table("state")

ABSORBS = ""


def _saved(w: World, model: nn.Module, *attributes: str) -> None:
    """What ``torch.save(model)`` writes besides the state."""
    for name in attributes:
        value = getattr(model, name)
        values = value if isinstance(value, (list, tuple)) else [value]
        w.released[name] = torch.cat([torch.as_tensor(v).flatten().double() for v in values])


@TABLE.refused(UnsupportedModule, texts.TRACE)
def running_mean_through_data(w: World) -> None:
    def middle(m: Any, h: Tensor) -> Tensor:
        m.average.data.mul_(0.9).add_(0.1 * h.detach().mean(0))
        return h

    fit(w, Between(middle, average=torch.zeros(HIDDEN)))


@TABLE.refused(UnsupportedModule, texts.TRACE)
def codebook_as_frozen_parameter(w: World) -> None:
    def middle(m: Any, h: Tensor) -> Tensor:
        with torch.no_grad():
            nearest = torch.cdist(h, m.codes).argmin(1)
            for row, code in zip(h, nearest.tolist(), strict=True):
                m.codes[code] += 0.1 * (row - m.codes[code])
        return h

    codes = nn.Parameter(torch.randn(3, HIDDEN), requires_grad=False)
    fit(w, Between(middle, codes=codes))


@TABLE.refused(UnsupportedModule, texts.TRACE, kind=TOKENS)
def word_counts(w: World) -> None:
    def middle(m: Any, ids: Tensor, h: Tensor) -> Tensor:
        m.counts += torch.bincount(ids.flatten(), minlength=WORDS)
        return h

    model = Reader(middle)
    model.register_buffer("counts", torch.zeros(WORDS, dtype=torch.int64))
    fit(w, model)


@TABLE.refused(UnsupportedModule, texts.TRACE)
def complex_spectrum(w: World) -> None:
    def middle(m: Any, h: Tensor) -> Tensor:
        m.spectrum.copy_(torch.fft.fft(h.detach()).mean(0))
        return h

    fit(w, Between(middle, spectrum=torch.zeros(HIDDEN, dtype=torch.complex64)))


@TABLE.refused(UnsupportedModule, texts.TRACE)
def vector_named_like_spectral_norms(w: World) -> None:
    def middle(m: Any, h: Tensor) -> Tensor:
        m.weight_u.copy_(h.detach().mean(0))
        return h

    fit(w, Between(middle, weight_u=torch.zeros(HIDDEN)))


@TABLE.refused(UnsupportedModule, texts.TRACE)
def buffer_that_joins_later(w: World) -> None:
    def middle(m: Any, h: Tensor) -> Tensor:
        if not hasattr(m, "late"):
            m.register_buffer("late", h.detach().mean(0))
        return h

    fit(w, Between(middle))


@TABLE.refused(UnsupportedModule, texts.TRACE)
def statistics_gathered_under_no_grad(w: World) -> None:
    """Calibrated by a pass over the training batches, before ``state_dict`` is taken."""

    def middle(m: Any, h: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            m.range.copy_(h.abs().amax(0))
        return h

    model = Between(middle, range=torch.zeros(HIDDEN))
    model, optimizer, loader = w.private(model)
    for x, y in loader:
        with torch.no_grad():
            model(x)
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()


@TABLE.refused(UnsupportedModule, texts.CONTENTS, after=1)
def buffer_written_after_a_warm_up(w: World) -> None:
    def middle(m: Any, h: Tensor) -> Tensor:
        m.calls += 1
        if m.calls > 1:
            m.average.copy_(h.detach().mean(0))
        return h

    fit(w, Between(middle, average=torch.zeros(HIDDEN), calls=torch.zeros((), dtype=torch.long)))


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def layer_initialised_by_the_first_batch(w: World) -> None:
    """Activation normalisation: scale and shift start as the first batch's statistics."""

    def middle(m: Any, h: Tensor) -> Tensor:
        if not m.ready:
            m.shift.data.copy_(-h.detach().mean(0))
            m.ready = True
        return h + m.shift

    model = Between(middle, shift=nn.Parameter(torch.zeros(HIDDEN)))
    model.ready = False
    fit(w, model)


@TABLE.refused(UnsupportedModule, texts.TRACE)
def memory_bank_as_attribute(w: World) -> None:
    def middle(m: Any, h: Tensor) -> Tensor:
        m.bank = torch.cat([m.bank, h.detach()])[-8:]
        return h

    model = Between(middle)
    model.bank = torch.zeros(8, HIDDEN)
    fit(w, model)
    _saved(w, model, "bank")


@TABLE.refused(UnsupportedModule, texts.TRACE)
def queue_in_a_list(w: World) -> None:
    def middle(m: Any, h: Tensor) -> Tensor:
        m.queue.append(h.detach().mean(0))
        return h

    model = Between(middle)
    model.queue = []
    fit(w, model)
    _saved(w, model, "queue")


@TABLE.refused(UnsupportedModule, ABSORBS)
def largest_value_as_number(w: World) -> None:
    def middle(m: Any, h: Tensor) -> Tensor:
        m.largest = max(m.largest, float(h.abs().max()))
        return h

    model = Between(middle)
    model.largest = 0.0
    fit(w, model)
    _saved(w, model, "largest")


@TABLE.refused(UnsupportedModule, texts.TRACE)
def statistics_in_numpy(w: World) -> None:
    def middle(m: Any, h: Tensor) -> Tensor:
        m.mean *= 0.9
        m.mean += 0.1 * h.detach().mean(0).numpy()
        return h

    model = Between(middle)
    model.mean = np.zeros(HIDDEN)
    fit(w, model)
    _saved(w, model, "mean")


@TABLE.refused(UnsupportedModule, texts.TRACE)
def hook_that_observes(w: World) -> None:
    model = mlp()
    model[0].register_buffer("seen", torch.zeros(HIDDEN))

    def observe(m: Any, args: Any, output: Tensor) -> None:
        m.seen.lerp_(output.detach().amax(0), 0.1)

    model[0].register_forward_hook(observe)
    fit(w, model)


@TABLE.refused(UnsupportedModule, ABSORBS)
def extra_state(w: World) -> None:
    class Tracking(Between):
        total = 0.0

        def get_extra_state(self) -> Any:
            return torch.tensor(self.total)

        def set_extra_state(self, state: Any) -> None:
            self.total = float(state)

    def middle(m: Any, h: Tensor) -> Tensor:
        m.total += float(h.sum())
        return h

    fit(w, Tracking(middle))


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def batch_norm_by_hand(w: World) -> None:
    """Normalised by the running statistics alone, which the batch updates first."""

    def middle(m: Any, h: Tensor) -> Tensor:
        with torch.no_grad():
            m.mean += 0.1 * (h.mean(0) - m.mean)
        return h - m.mean

    fit(w, Between(middle, mean=torch.zeros(HIDDEN)))


@TABLE.refused(UnsupportedModule, texts.OTHER_OUTPUTS)
def buffer_outside_the_state_dict(w: World) -> None:
    """Not saved, but the next batches see it."""

    def middle(m: Any, h: Tensor) -> Tensor:
        with torch.no_grad():
            m.mean += 0.1 * (h.mean(0) - m.mean)
        return h - 3 * m.mean

    model = Between(middle)
    model.register_buffer("mean", torch.zeros(HIDDEN), persistent=False)
    fit(w, model)


@TABLE.refused(PrivacyError, texts.WRITTEN, after=1)
def prototypes_written_by_the_loop(w: World) -> None:
    model = Between(lambda m, h: h, prototypes=torch.zeros(CLASSES, HIDDEN))
    model, optimizer, loader = w.private(model)
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
        with torch.no_grad():
            model.prototypes[y] = model.before(x)


@TABLE.refused(PrivacyError, ABSORBS)
def bias_set_by_the_loop(w: World) -> None:
    """The output starts at the log frequencies of the first batch's classes."""
    model, optimizer, loader = w.private(mlp())
    for step, (x, y) in enumerate(loader):
        if step == 0:
            frequencies = F.one_hot(y, CLASSES).float().mean(0) + 0.01
            model[2].bias.data.copy_(frequencies.log())
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()


@TABLE.refused(UnsupportedModule, texts.CONTENTS, after=1)
def average_kept_after_the_step(w: World) -> None:
    """A feature average beside the model, fed through a buffer after the update."""
    model = Between(lambda m, h: h - m.centre, centre=torch.zeros(HIDDEN))
    model, optimizer, loader = w.private(model)
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
        model.centre = 0.9 * model.centre + 0.1 * model.before(x).detach().mean(0)


@TABLE.right()
def counter_of_calls(w: World) -> None:
    def middle(m: Any, h: Tensor) -> Tensor:
        m.calls += 1
        return h

    fit(w, Between(middle, calls=torch.zeros((), dtype=torch.int64)))


@TABLE.right()
def schedule_by_step_number(w: World) -> None:
    def middle(m: Any, h: Tensor) -> Tensor:
        m.rate.mul_(0.5)
        m.steps += 1
        return h * (1 - m.rate)

    model = Between(middle, rate=torch.full((), 0.5))
    model.steps = 0
    fit(w, model)


@TABLE.right()
def frozen_batch_norm_in_evaluation_mode(w: World) -> None:
    norm = nn.BatchNorm1d(HIDDEN).requires_grad_(False).eval()
    fit(w, Between(lambda m, h: m.norm(h), norm=norm))


@TABLE.right()
def positions_cached_at_first_use(w: World) -> None:
    def middle(m: Any, h: Tensor) -> Tensor:
        if m.places is None:
            m.places = torch.linspace(0, 1, h.shape[1])
        return h + m.places

    model = Between(middle)
    model.places = None
    fit(w, model)


@TABLE.right()
def spectral_norm(w: World) -> None:
    model = mlp()
    torch.nn.utils.parametrizations.spectral_norm(model[0])
    fit(w, model)

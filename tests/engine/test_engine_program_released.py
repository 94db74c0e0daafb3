"""Replayed steps whose convolutions are clipped by norms of their own and released by maps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpkern.base.errors import PrivacyError
from dpkern.engine.program.recorded import RecordSite
from dpkern.engine.program.releases import Releases
from dpkern.privacy.mechanisms import GReDP, SpectralDP
from tests.engine.replayed_loops import STEPS, Loop, both, loop


class Images(nn.Module):
    """Convolutions over planes, of one channel and of several, one with a stride."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(1, 4, 3, padding=1)
        self.two = nn.Conv2d(4, 6, 3, stride=2, bias=False)
        self.wide = nn.Conv2d(6, 40, (1, 2))
        self.head = nn.Linear(40, 3)
        self.twice = False

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.one(x.unsqueeze(1)))
        y = self.two(y) + self.two(y / 2) if self.twice else self.two(y)
        y = torch.tanh(y)
        return self.head(torch.tanh(self.wide(y)).mean((2, 3)))


spectral = partial(SpectralDP, keep_fraction=0.3, arithmetic="float", clipping="flat")
published = partial(SpectralDP, mode="published", clipping="flat")
gredp = partial(GReDP, mode="published", clipping="flat")
MECHANISMS: dict[str, Callable[..., Any]] = {
    "GReDP, cropped": partial(GReDP, arithmetic="float"),
    "GReDP, spectrum": gredp,
    "GReDP, spectrum, circular noise": partial(gredp, noise_kind="circular"),
    "GReDP, spectrum, real noise": partial(gredp, noise_kind="real"),
    "GReDP, printed scaling": partial(gredp, unitary_scaling="as_printed"),
    "GReDP, cropped, circular noise": partial(gredp, clip_domain="cropped", noise_kind="circular"),
    "Spectral-DP, whitened": partial(spectral, clip_domain="whitened"),
    "Spectral-DP, whitened, integers": partial(SpectralDP, keep_fraction=0.3, clipping="flat"),
    "Spectral-DP, whitened, integers of each layer": partial(SpectralDP, clipping="per_layer"),
    "Spectral-DP, spectrum": partial(spectral, clip_domain="spectrum"),
    "Spectral-DP, published": published,
    "Spectral-DP, kept": partial(published, clip_domain="kept"),
    "Spectral-DP, cropped": partial(published, clip_domain="cropped"),
    "Spectral-DP, the authors' mask": partial(published, mask="authors_slice", noise_band="block"),
}


def images(**options: Any) -> dict[str, Any]:
    return {"make": Images, "length": 9, **options}


@pytest.mark.parametrize("name", MECHANISMS)
def test_replay_gives_the_bits_of_the_recorded_path(name: str) -> None:
    both(**images(mechanism=MECHANISMS[name]))


@pytest.mark.parametrize("keep", [0, 0.25, 1e6])
def test_kept_gradients_are_kept_by_both(keep: float) -> None:
    mechanism = MECHANISMS["Spectral-DP, whitened"]
    both(**images(mechanism=mechanism, keep_budget=keep, batch=32))


def quieter(run: Loop) -> None:
    run.optimizer.noise_multiplier = 0.1


def tighter(run: Loop) -> None:
    run.optimizer.max_grad_norm = 0.01


def twice(run: Loop) -> None:
    run.module.twice = True


def other_maps(run: Loop) -> None:
    """What no schedule may do, and a plan could."""
    step = run.engine.adapter.dp_step
    step._mechanism = replace(step.mechanism, keep_fraction=0.5)
    step.plan = step._planned(step._mechanism)


CHANGES = {"noise": quieter, "bound": tighter}


@pytest.mark.parametrize("change", CHANGES)
def test_schedules_go_on_being_replayed(change: str) -> None:
    run = both(CHANGES[change], **images(mechanism=MECHANISMS["Spectral-DP, spectrum"]))
    assert run.replays == STEPS - 3, run.reasons


def test_a_step_with_other_maps_is_recorded_once_more() -> None:
    run = both(other_maps, **images(mechanism=MECHANISMS["Spectral-DP, whitened"]))
    assert [reason for reason in run.reasons if "another release" in reason]
    assert run.replays == STEPS - 4, run.reasons


def test_maps_that_change_in_front_of_the_step_are_refused() -> None:
    for replayed in (True, False):
        run = loop(replayed, **images(mechanism=MECHANISMS["Spectral-DP, whitened"]))
        run.train(5)
        run.between = partial(other_maps, run)
        with pytest.raises(PrivacyError, match="in force in the backward pass"):
            run.train(1)


def test_a_release_that_is_not_compared_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Releases, "are_of", lambda self, plan: True)
    run = loop(True, **images(mechanism=MECHANISMS["Spectral-DP, whitened"]))
    run.train(5)
    run.between = partial(other_maps, run)
    with pytest.raises(PrivacyError, match="clipped by the norm"):
        run.train(1)


def test_a_layer_that_is_suddenly_used_twice_is_refused_as_when_recorded() -> None:
    messages = []
    for replayed in (True, False):
        run = loop(replayed, **images(mechanism=MECHANISMS["GReDP, spectrum"]))
        with pytest.raises(Exception, match=r"two\.weight") as raised:
            run.train(STEPS, twice)
        messages.append((type(raised.value), str(raised.value)))
    assert messages[0] == messages[1]


def test_another_batch_size_is_replayed() -> None:
    both(**images(mechanism=MECHANISMS["Spectral-DP, whitened"], rows=60, batch=16))


def test_a_norm_of_its_own_that_is_forgotten_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = RecordSite.take

    def take(self: RecordSite, run: Any, x: Tensor, g: Tensor) -> None:
        slot = self.weight_part.slot
        release, slot.release = slot.release, None
        plain(self, run, x, g)
        slot.release = release

    monkeypatch.setattr(RecordSite, "take", take)
    with pytest.raises(AssertionError):
        both(**images(mechanism=MECHANISMS["GReDP, spectrum"]))

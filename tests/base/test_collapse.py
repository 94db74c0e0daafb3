"""Collapsed outputs are found, and outputs that differ between records are not."""

from __future__ import annotations

import math

import pytest
import torch

from dpkern.base import collapse
from dpkern.base.collapse import OutputSpread, of_facts, of_outputs, of_scores


def test_one_output_for_every_record_is_a_constant() -> None:
    same = torch.rand(1, 14).expand(50, 14)
    assert of_outputs(same).collapsed
    assert of_outputs(same + 1e-5 * torch.rand(50, 14)).collapsed
    assert not of_outputs(torch.rand(50, 14)).collapsed
    # One output that moves is enough.
    moved = same.clone()
    moved[:, 3] = torch.linspace(0, 1, 50)
    assert not of_outputs(moved).collapsed


def test_one_class_for_every_record_is_a_constant_however_sure() -> None:
    scores = torch.rand(50, 10, generator=torch.Generator().manual_seed(0))
    assert not of_scores(scores).collapsed
    found = of_scores(scores + 2 * (torch.arange(10) == 4))
    assert found.spread > collapse.SAME, "probabilities vary, the class does not"
    assert (found.told, found.collapsed) == (1, True)


@pytest.mark.parametrize("outputs", [torch.full((9, 2), math.nan), torch.rand(1, 3)])
def test_what_cannot_be_told_is_no_model(outputs: torch.Tensor) -> None:
    assert of_outputs(outputs).collapsed


def test_facts_and_sentence_say_the_same() -> None:
    for found in (
        OutputSpread(spread=0.2, told=7),
        OutputSpread(spread=0.2, told=1),
        OutputSpread(spread=0.1 * collapse.SAME),
    ):
        assert of_facts(found.facts()) == found
        assert found.sentence.startswith("COLLAPSED") == found.collapsed
    assert of_facts({}) is None

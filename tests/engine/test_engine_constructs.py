"""Every model construct of the table: exact per-sample gradients, or the typed error it names."""

from __future__ import annotations

import pytest
import torch

from dpkern.engine.capture import Capture
from dpkern.engine.clipping import clipped_sums
from dpkern.engine.validate import check
from dpkern.ops import clip
from dpkern.privacy import mechanisms
from tests.engine.constructs import CONSTRUCTS, Construct, Refused
from tests.make_constructs import TARGET, page

CORRECT = [c for c in CONSTRUCTS if c.expected == "correct"]
REFUSED = [c for c in CONSTRUCTS if isinstance(c.expected, Refused)]


def name_of(construct: Construct) -> str:
    return construct.name


def engine_run(construct: Construct, max_grad_norm: float) -> tuple[Capture, clip.ClipResult]:
    """One captured step: check, forward, backward, clip."""
    model = construct.model()
    check(model)
    capture = Capture(model, loss_reduction="sum")
    mechanism = mechanisms.DPSGD(
        noise_multiplier=1.0, max_grad_norm=max_grad_norm, arithmetic="float"
    )
    plan = mechanism.plan([tuple(p.shape) for p in capture.parameters])
    capture.attach()
    try:
        capture.begin_batch(len(construct.inputs[0]))
        output = model(*construct.inputs)
        construct.losses(output, construct.inputs).sum().backward()
        result = clipped_sums(capture, plan)
    finally:
        capture.detach()
    assert isinstance(result, clip.ClipResult)
    return capture, result


def loop(construct: Construct) -> list[torch.Tensor]:
    """Per-sample gradients by ordinary autograd, one sample at a time."""
    model = construct.model()
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows: list[list[torch.Tensor]] = []
    for b in range(len(construct.inputs[0])):
        alone = tuple(x[b : b + 1] for x in construct.inputs)
        for p in parameters:
            p.grad = None
        construct.losses(model(*alone), alone).sum().backward()
        rows.append([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])
    return [torch.stack([row[i] for row in rows]) for i in range(len(parameters))]


@pytest.mark.parametrize("construct", CORRECT, ids=name_of)
def test_the_clipped_sum_is_that_of_one_sample_at_a_time(construct: Construct) -> None:
    gradients = loop(construct)
    norms = torch.stack([g.double().flatten(1).square().sum(1) for g in _flat(gradients)]).sum(0)
    norms = norms.sqrt()
    bound = float(norms.median())
    _, result = engine_run(construct, bound)
    factors = (bound * clip.SLACK / norms).clamp(max=1.0)
    tolerance = max(construct.tolerance, 1e-10)
    assert torch.allclose(result.norms, norms, rtol=10 * tolerance, atol=tolerance)
    largest = max(float(g.abs().max()) for g in gradients)
    for mine, g in zip(result.sums, gradients, strict=True):
        wanted = torch.einsum("b,b...->...", factors, g.double())
        assert (mine.double() - wanted).abs().max() <= 20 * tolerance * max(largest, 1e-30)


def _flat(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    return [g.reshape(len(g), -1) for g in gradients]


@pytest.mark.parametrize("construct", REFUSED, ids=name_of)
def test_what_cannot_be_correct_is_refused(construct: Construct) -> None:
    assert isinstance(construct.expected, Refused)
    with pytest.raises(construct.expected.error) as caught:
        engine_run(construct, 1.0)
    assert construct.expected.says in str(caught.value)


def test_the_documented_table_is_this_one() -> None:
    assert TARGET.read_text() == page()

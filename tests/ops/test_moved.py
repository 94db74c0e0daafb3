"""The test harness for real devices: what a kernel changes and returns comes back."""

from __future__ import annotations

import torch

from dpkern.base import dispatch
from dpkern.base.rng import Purpose
from dpkern.ops import clip, ghost, noise, testing, update
from tests.ops.moved import moved

STREAM = testing.KEY.stream(Purpose.NOISE, 1)


def test_results_and_changes_in_place_come_back() -> None:
    given = [(name, op.kernels["reference"], None) for name, op in dispatch.OPS.items()]
    with dispatch.replaced("cuda", given), moved("cuda", "cpu"):
        x = torch.arange(50, dtype=torch.int32)
        got = noise.add_noise(x, stream=STREAM, backend="cuda")
        assert got is x
        want = noise.add_noise(torch.arange(50, dtype=torch.int32), stream=STREAM)
        assert torch.equal(x, want)
        params, rule = [torch.ones(5)], update.SGD(lr=0.1, momentum=0.9)
        state = rule.init(params)
        update.step(params, [torch.ones(5)], rule=rule, state=state, backend="cuda")
        assert state.steps == 1
        torch.testing.assert_close(params[0], torch.full((5,), 0.9))
        torch.testing.assert_close(state.buffers["momentum_buffer"][0], torch.ones(5))
        result = clip.clip_sum(torch.tensor([[3.0, 4.0]]), 1.0, backend="cuda")
        assert result.norms.tolist() == [5.0]
        out, before = torch.zeros(2), 0
        before = out._version
        ghost.contract([torch.ones(3, 2)], torch.ones(3), [out], backend="cuda")
        assert out.tolist() == [3.0, 3.0]
        assert out._version > before

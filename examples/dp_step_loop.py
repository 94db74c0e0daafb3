"""A training loop of your own around ``dpkern.DPStep``: logistic regression on made-up points.

You draw the batches and compute per-sample gradients; ``add`` clips and sums them, ``finish`` adds
the noise once and updates the parameters. Run: python examples/dp_step_loop.py
"""

import torch

import dpkern
from dpkern.accounting import shown_bound
from dpkern.engine.sampling import make_batches
from dpkern.ops.update import SGD

ROWS, BATCH, STEPS, DELTA = 2000, 200, 60, 1e-5

torch.manual_seed(0)  # public: the data and the start, not the noise
x = torch.cat([torch.randn(ROWS, 2), torch.ones(ROWS, 1)], dim=1)
y = (x @ torch.tensor([2.0, -1.0, 0.5]) > 0).float()
weights = torch.zeros(3)

mechanism = dpkern.accounting.calibrate(
    dpkern.mechanisms.DPSGD(noise_multiplier=1.0, max_grad_norm=1.0),
    target_epsilon=1.0,
    sample_rate=BATCH / ROWS,
    steps=STEPS,
    delta=DELTA,
)
step = dpkern.DPStep(
    mechanism,
    [weights],
    expected_batch_size=BATCH,
    sample_rate=BATCH / ROWS,
    optimizer=SGD(lr=1.0, momentum=0.5),
)
for rows in make_batches("poisson", dataset_size=ROWS, batch_size=BATCH, steps=STEPS):
    error = torch.sigmoid(x[rows] @ weights) - y[rows]
    step.add(per_sample=[error[:, None] * x[rows]])  # one gradient [B, 3] per parameter
    step.finish()

accuracy = ((x @ weights > 0) == (y > 0)).float().mean().item()
print(f"accuracy {accuracy:.3f} on the training rows (a diagnostic, not covered by epsilon)")
print(f"certified epsilon {shown_bound(step.epsilon(DELTA))} at delta {DELTA}")

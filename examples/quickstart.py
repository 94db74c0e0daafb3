"""Handwritten digits with a small network: the snippet of the README as a program.

Run: python examples/quickstart.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpkern

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
loader = DataLoader(data, batch_size=400)
loss_fn = nn.CrossEntropyLoss()

# README: from here
engine = dpkern.PrivacyEngine()
model, optimizer, loader = engine.make_private_with_epsilon(
    module=model, optimizer=optimizer, data_loader=loader,
    target_epsilon=3, target_delta=1e-5, epochs=20, max_grad_norm=1.0,
)  # fmt: skip
for _ in range(20):
    for x, y in loader:  # Poisson batches now
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()  # clip, sum, add noise, update
dpkern.explain(engine)  # epsilon, whom it protects, what it does not cover

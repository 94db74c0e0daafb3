"""AdLM's printed accuracies.

Source: AdLM, figures 4 and 5, section on experiments.
"""

from __future__ import annotations

PSGD, PLAIN = "pSGD", "polynomial loss without noise"

PRINTED: dict[tuple[str, str, float], float] = {
    ("MNIST", "AdLM", 0.25): 90.2,
    ("MNIST", "ILM", 0.25): 88.46,
    ("MNIST", PSGD, 0.25): 82.09,
    ("MNIST", "AdLM", 0.5): 93.66,
    ("MNIST", "ILM", 0.5): 92.39,
    ("MNIST", PSGD, 0.5): 88.59,
}
"""Printed accuracies in per cent; at 0.5 after 500 epochs."""

MEANS: dict[str, dict[str, float]] = {
    "MNIST": {"AdLM": 91.62, PSGD: 83.93},
    "CIFAR-10": {"AdLM": 77.0, PSGD: 71.1},
}
GAINS = {
    "MNIST": {PSGD: (7.7, "p < 0.01"), "ILM": (2.0, "p < 0.05")},
    "CIFAR-10": {PSGD: (5.9, "p < 0.01"), "ILM": (5.0, "p < 0.05")},
}

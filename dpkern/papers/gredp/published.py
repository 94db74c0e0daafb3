"""GReDP's experiments and the accuracies that it prints, in per cent.

Source: GReDP, tables I and VIII, section on experiments.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GredpExperiment:
    """A column of table I.

    Attributes:
        model: name in ``engine.demo.sources``.
        kind: its data set, as ``--data KIND=FOLDER`` names it.
        substitute: the data where the user gives none.
        epsilon: epsilon of table I.
        printed: accuracy of table I by method.
        width: width of the network in quick runs.
    """

    model: str
    kind: str
    substitute: str
    epsilon: float
    printed: dict[str, float]
    width: float


EXPERIMENTS = {
    "LeNet-5": GredpExperiment(
        model="gredp-lenet5",
        kind="mnist",
        substitute="synthetic-mnist",
        epsilon=1.0,
        printed={"plain": 98.72, "DP-SGD": 92.7, "Spectral-DP": 95.3, "GReDP": 96.5},
        width=1.0,
    ),
    "ResNet-20": GredpExperiment(
        model="gredp-resnet20",
        kind="cifar10",
        substitute="synthetic-cifar10",
        epsilon=1.5,
        printed={"plain": 70.44, "DP-SGD": 29.3, "Spectral-DP": 54.9, "GReDP": 59.45},
        width=0.25,
    ),
    "Model-3": GredpExperiment(
        model="gredp-model3",
        kind="cifar10",
        substitute="synthetic-cifar10",
        epsilon=2.0,
        printed={"plain": 79.17, "DP-SGD": 46.47, "Spectral-DP": 63.52, "GReDP": 67.87},
        width=0.125,
    ),
    "AlexNet": GredpExperiment(
        model="gredp-alexnet",
        kind="cifar10",
        substitute="synthetic-cifar10",
        epsilon=2.0,
        printed={"plain": 64.58, "DP-SGD": 20.54, "Spectral-DP": 52.92, "GReDP": 57.39},
        width=0.0625,
    ),
}
METHODS = ("plain", "DP-SGD", "Spectral-DP", "GReDP")
SAME = "DP-SGD at sigma / sqrt 2, per layer"
"""The mechanism that published GReDP is."""

BY_EPSILON = {
    ("ResNet-20", "GReDP"): (49.06, 57.36, 59.45, 59.49),
    ("ResNet-20", "Spectral-DP"): (45.03, 52.87, 54.9, 55.98),
    ("ResNet-20", "DP-SGD"): (29.55, 31.35, 31.91, 32.1),
    ("Model-3", "GReDP"): (56.15, 63.93, 66.3, 67.87),
    ("Model-3", "Spectral-DP"): (50.53, 60.15, 62.27, 63.52),
    ("Model-3", "DP-SGD"): (42.93, 45.78, 46.27, 46.47),
    ("AlexNet", "GReDP"): (51.93, 55.8, 56.89, 57.39),
    ("AlexNet", "DP-SGD"): (22.86, 21.11, 20.78, 20.54),
    ("LeNet-5", "GReDP"): (95.68, 96.5, 96.65, 96.73),
}
EPSILONS = (0.5, 1.0, 1.5, 2.0)
VARIED_AT = 2.0
"""Epsilon of figures 4 and 5, and of the run whose dynamics the text describes."""
DROPS = {"LeNet-5": 4.16, "Model-3": 9.12, "ResNet-20": 22.32, "AlexNet": 23.46}
"""Points that the largest batch of figure 4 loses against the smallest."""
EARLY = {"GReDP": 78.37, "DP-SGD": 33.38, "Spectral-DP": 68.78}
EARLY_AT = 0.31
"""LeNet-5's accuracies in figure 3 where about this epsilon is spent of 2."""
PASSES = {("DP-SGD", 45.0): 24, ("GReDP", 45.0): 2, ("GReDP", 60.0): 11, ("Spectral-DP", 60.0): 16}
"""The epochs after which Model-3 passes an accuracy in figure 3."""
CLIP_0_1 = {
    "LeNet-5": (95.47, 96.43, 96.42, 96.4),
    "ResNet-20": (45.54, 45.24, 45.08, 45.57),
    "Model-3": (60.2, 60.56, 60.31, 60.2),
    "AlexNet": (52.25, 52.49, 52.44, 52.44),
}
"""Table VIII at clipping norm 0.1; its other column is that of ``BY_EPSILON``."""

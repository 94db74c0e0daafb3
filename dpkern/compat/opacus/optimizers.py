"""Refusals for Opacus' optimizer classes: the user's own optimizer becomes private."""

from ._refused import refusals

OWN = (
    "Pass an ordinary torch.optim optimizer to make_private; the same object comes back, with "
    "noise_multiplier, max_grad_norm and expected_batch_size. make_private(clipping=..., "
    "mechanism=...) chooses how gradients are clipped."
)
__getattr__ = refusals(
    __name__,
    dict.fromkeys(
        (
            "AdaClipDPOptimizer",
            "DPOptimizer",
            "DPOptimizerFastGradientClipping",
            "DPPerLayerOptimizer",
            "DistributedDPOptimizer",
            "DistributedPerLayerOptimizer",
            "get_optimizer_class",
        ),
        OWN,
    ),
)

__all__: list[str] = []

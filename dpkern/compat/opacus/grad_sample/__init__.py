"""Refusals for Opacus' other ways to per-sample gradients: there is one way here."""

from .._refused import UNWRAPPED, refusals
from . import functorch

RULES = (
    "Leave it out: gradients are captured by operation, so custom modules need no rule. What "
    "cannot be captured is refused with its name; see docs/samples.md."
)
__getattr__ = refusals(
    __name__,
    dict.fromkeys(
        ("AbstractGradSampleModule", "GradSampleModule", "GradSampleModuleFastGradientClipping"),
        UNWRAPPED,
    )
    | dict.fromkeys(("register_grad_sampler", "register_norm_sampler"), RULES),
)

__all__ = ["functorch"]

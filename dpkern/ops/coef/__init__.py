"""Coefficients of a polynomial loss: perturbed, or evaluated with their noise in registers."""

from ...base.codes import CoefForm as Form
from .._coef_noise import CoefNoise as Noise
from .._coef_noise import quadratic_position
from .._draws import Draws
from .descent import LOGIT_LIMIT, descend
from .features import RUN, empty_results, expanded
from .polynomial import (
    FORMS,
    LANES,
    QuadraticCoefficients,
    check_release,
    check_targets,
    form_of,
    perturb,
    quadratic,
    refuse_release,
)

__all__ = [
    "FORMS",
    "LANES",
    "LOGIT_LIMIT",
    "RUN",
    "Draws",
    "Form",
    "Noise",
    "QuadraticCoefficients",
    "check_release",
    "check_targets",
    "descend",
    "empty_results",
    "expanded",
    "form_of",
    "perturb",
    "quadratic",
    "quadratic_position",
    "refuse_release",
]

"""Check and normalise labelled records as AdLM takes them: flat, with a public domain."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..base.errors import InvalidInput
from ..base.validate import integer, tensor_at
from ..privacy.theory.adlm import normalised_inputs


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """Records with labels, and held-out ones that nothing protects.

    Args:
        x, x_test: ``[n, ...]``, float32 or float64, all of one row shape.
        y, y_test: int64 ``[n]``, from 0 to ``classes - 1``.
        classes: M, public.
        low, high: ends of every attribute's domain, public.
        source: origin of the records, for reports.
        synthetic: whether they were generated.

    Raises:
        InvalidInput: no records, NaN, an entry outside the domain, a label that is no class, or
            training records of a single class.
    """

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int
    low: float = 0.0
    high: float = 1.0
    source: str = ""
    synthetic: bool = False
    row_shape: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        integer(2, classes=self.classes)
        floats = (torch.float32, torch.float64)
        for name, x, y in (("x", self.x, self.y), ("x_test", self.x_test, self.y_test)):
            if not isinstance(x, Tensor) or x.dim() < 2 or not x.numel():
                raise InvalidInput(
                    name,
                    expected="a tensor [n, ...] with at least one record and one feature",
                    got=str(list(x.shape)) if isinstance(x, Tensor) else type(x).__name__,
                    remedy="Give both training and held-out records.",
                )
            tensor_at(name, x, shape=(None, *self.x.shape[1:]), dtypes=floats)
            label = "y" + name[1:]
            tensor_at(label, y, shape=(len(x),), dtypes=(torch.int64,))
            if not bool(((y >= 0) & (y < self.classes)).all()):
                raise InvalidInput(
                    label,
                    expected=f"classes from 0 to {self.classes - 1}",
                    got=f"{int(y.min())} to {int(y.max())}",
                    remedy="Number the classes from 0 on.",
                )
            normalised_inputs(x.flatten(1), self.low, self.high)
        if bool((self.y == self.y[0]).all()):
            raise InvalidInput(
                "y",
                expected="training records of at least two classes",
                got=f"class {int(self.y[0])} only",
                remedy="Give records of every class; there is nothing to tell apart.",
            )
        object.__setattr__(self, "row_shape", tuple(self.x.shape[1:]))

    @property
    def features(self) -> int:
        """The number of features d."""
        return self.x[0].numel()

    def inputs(self, x: Tensor, input_range: str) -> Tensor:
        """Return inputs ``[n, d]``, normalised to [0, rho]."""
        return normalised_inputs(x.flatten(1), self.low, self.high, input_range=input_range)

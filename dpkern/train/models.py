"""The three demonstration models and their per-sample gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from .._validate import choice
from ..errors import InvalidInput

MODELS = ("linear", "mlp", "lenet5")
MLP_WIDTH = 64
SMALLEST_IMAGE = 4

PerSampleGradients = Callable[[Tensor, Tensor], tuple[list[Tensor], Tensor]]


def build(name: str, *, row_shape: tuple[int, ...], classes: int, init_seed: int = 0) -> nn.Module:
    """A freshly initialised model that maps ``[B, *row_shape]`` to logits ``[B, classes]``.

    The initial parameters come from a public seed and leave the caller's generator as it was.
    No model mixes the samples of a batch (no batch normalisation).

    - ``linear``: multinomial logistic regression.
    - ``mlp``: one hidden layer of 64 tanh units.
    - ``lenet5``: LeNet-5 (LeCun et al. 1998: tanh, average pooling, 6 and 16 maps, 120-84
      units). Images under 18 pixels get a 3 x 3 second convolution, those under 32 pixels
      padding, because two 5 x 5 convolutions would leave nothing of them.

    Raises:
        InvalidInput: an unknown name, or ``lenet5`` for rows that are not square images.
    """
    choice(MODELS, model=name)
    features = math.prod(row_shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(init_seed)
        if name == "linear":
            return nn.Sequential(nn.Flatten(), nn.Linear(features, classes))
        if name == "mlp":
            return nn.Sequential(
                nn.Flatten(),
                nn.Linear(features, MLP_WIDTH),
                nn.Tanh(),
                nn.Linear(MLP_WIDTH, classes),
            )
        return _lenet5(*_image(row_shape), classes)


def _image(row_shape: tuple[int, ...]) -> tuple[int, int]:
    """``(channels, side)`` of square rows ``[H, W]``, ``[C, H, W]`` or flattened ``[H * W]``."""
    shape = row_shape
    if len(shape) == 1:
        side = math.isqrt(shape[0])
        shape = (side, shape[0] // side)
    square = (
        len(shape) in (2, 3)
        and shape[-1] == shape[-2]
        and math.prod(shape) == math.prod(row_shape)  # 17 features are no 4 x 4 image
    )
    if not square or shape[-1] < SMALLEST_IMAGE:
        raise InvalidInput(
            "model",
            expected=f"square images of at least {SMALLEST_IMAGE} x {SMALLEST_IMAGE} for lenet5: "
            "rows [H, W], [C, H, W] or flattened [H * W]",
            got=f"rows of shape {list(row_shape)}",
            remedy="Choose linear or mlp, or reshape the rows to images.",
        )
    return (shape[0] if len(shape) == 3 else 1), shape[-1]


def _lenet5(channels: int, side: int, classes: int) -> nn.Module:
    padding = 0 if side >= 32 else 2
    middle = (side - 4 + 2 * padding) // 2
    second = nn.Conv2d(6, 16, 5) if middle >= 9 else nn.Conv2d(6, 16, 3, padding=1)
    last = (middle - 4 if middle >= 9 else middle) // 2
    return nn.Sequential(
        nn.Flatten(),
        nn.Unflatten(1, (channels, side, side)),
        nn.Conv2d(channels, 6, 5, padding=padding),
        nn.Tanh(),
        nn.AvgPool2d(2),
        second,
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * last * last, 120),
        nn.Tanh(),
        nn.Linear(120, 84),
        nn.Tanh(),
        nn.Linear(84, classes),
    )


def per_sample_gradients(model: nn.Module) -> PerSampleGradients:
    """A function ``(x [B, ...], y [B]) -> (gradients, losses)`` of cross entropy, sample by sample.

    ``gradients`` is a list with one ``[B, *parameter.shape]`` tensor per parameter in the order
    of ``model.parameters()``, ``losses`` is ``[B]``. The parameters are read at every call, so
    updates in place are seen.
    """
    buffers = dict(model.named_buffers())

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        logits = functional_call(model, {**parameters, **buffers}, (x.unsqueeze(0),))
        return nn.functional.cross_entropy(logits, y.unsqueeze(0))

    batched = vmap(grad_and_value(loss), in_dims=(None, 0, 0))

    def run(x: Tensor, y: Tensor) -> tuple[list[Tensor], Tensor]:
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        gradients, losses = batched(parameters, x, y)
        return list(gradients.values()), losses

    return run


@torch.no_grad()
def evaluate(model: nn.Module, x: Tensor, y: Tensor, *, chunk: int = 1024) -> tuple[float, float]:
    """Mean cross entropy and accuracy over all rows."""
    loss, correct = 0.0, 0
    for start in range(0, len(x), chunk):
        labels = y[start : start + chunk]
        logits = model(x[start : start + chunk])
        loss += float(nn.functional.cross_entropy(logits, labels, reduction="sum"))
        correct += int((logits.argmax(1) == labels).sum())
    return loss / len(x), correct / len(x)

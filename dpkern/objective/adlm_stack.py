"""Networks of one architecture with weights of their own, computed together.

Convolutions of R networks are one grouped convolution, linear layers one batched product; min-max
normalisation takes each network's own batch. Equal to the networks one by one up to rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.errors import InvalidInput, UnsupportedModule
from ..nn.normalise import BatchMinMax, BoundedResponseNorm
from .adlm_norm import bounded_response_norm

_KNOWN = (
    nn.Unflatten,
    nn.Flatten,
    nn.Conv2d,
    nn.Linear,
    nn.ReLU,
    nn.MaxPool2d,
    BoundedResponseNorm,
    BatchMinMax,
)


CACHED = 3 << 18
"""Entries of a layer's maps that are computed at a time on a processor."""


class Stack:
    """A stack of R networks.

    Args:
        networks: ``nn.Sequential`` of one architecture, from ``adlm_networks.build``.

    Attributes:
        parameters: leaves ``[R, ...]`` by name that require gradients.
        buffers: tensors ``[R, ...]`` by name.
        offset: ``[R, maps]``, added to the output of the first affine layer (line 14), or None.

    Raises:
        InvalidInput: no networks, or different ones.
        UnsupportedModule: a layer without a stacked form.
    """

    def __init__(self, networks: Sequence[nn.Sequential]) -> None:
        if not networks or len({str(network) for network in networks}) != 1:
            raise InvalidInput(
                "networks",
                expected="at least one network, all of one architecture",
                got=f"{len(networks)} networks",
                remedy="Make them with objective.adlm_networks.build and seeds of their own.",
            )
        self.template = copy.deepcopy(networks[0])
        self.runs = len(networks)
        for layer in self.template:
            if type(layer) not in _KNOWN:
                raise UnsupportedModule(
                    type(layer).__name__,
                    expected="a layer that a stack has a form for",
                    got="a layer without one",
                    remedy=f"Use {', '.join(sorted(kind.__name__ for kind in _KNOWN))}.",
                )
        states = [network.state_dict() for network in networks]
        joined = {name: torch.stack([state[name] for state in states]) for name in states[0]}
        trained = {name for name, _ in self.template.named_parameters()}
        self.parameters = {n: t.requires_grad_() for n, t in joined.items() if n in trained}
        self.buffers = {n: t for n, t in joined.items() if n not in trained}
        self.offset: Tensor | None = None

    def hidden(self, x: Tensor, *, training: bool, ranges: str = "batch") -> Tensor:
        """Return ``hbar``, ``[R, B, H]``, of rows ``[R, B, d]``.

        Args:
            x: rows of every network.
            training: whether running ranges are updated.
            ranges: ranges of min-max normalisation: ``batch``, or ``running``, which does not mix
                records.
        """
        layers = list(self.template.named_children())[:-1]
        # Records meet in min-max normalisation only, which comes after the convolutions.
        flat = [place for place, (_, layer) in enumerate(layers) if isinstance(layer, nn.Flatten)]
        apart = flat[0] + 1 if flat else 0
        parts = [
            self._through(layers[:apart], part, training, ranges)
            for part in torch.split(x, self._at_once(x), 1)
        ]
        h = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return self._through(layers[apart:], h, training, ranges, first=not flat)

    def _through(
        self,
        layers: Sequence[tuple[str, nn.Module]],
        h: Tensor,
        training: bool,
        ranges: str,
        *,
        first: bool = True,
    ) -> Tensor:
        """Return what layers make of ``h``; ``first`` says that they have the first affine one."""
        for name, layer in layers:
            h = self._layer(name, layer, h, training, ranges)
            if first and isinstance(layer, (nn.Conv2d, nn.Linear)):
                first = False
                h = h if self.offset is None else _with_offset(h, self.offset)
        return h

    def _at_once(self, x: Tensor) -> int:
        """Return the number of records whose first maps stay in the processor's caches."""
        convolutions = [each for each in self.template if isinstance(each, nn.Conv2d)]
        if not convolutions or not x.is_cpu:
            return max(1, x.shape[1])
        first = convolutions[0]
        each = self.runs * x.shape[2] // first.in_channels * first.out_channels
        return max(1, CACHED // each)

    def output(self, hidden: Tensor) -> Tensor:
        """Return ``s = hbar W^T``, ``[R, B, M]``."""
        return torch.bmm(hidden, self.last.mT)

    @property
    def last(self) -> Tensor:
        """The weights of the output layer, ``[R, M, H]``."""
        return self.parameters[f"{len(self.template) - 1}.weight"]

    def scores(self, x: Tensor, *, training: bool, ranges: str = "batch") -> Tensor:
        """Return scores ``[R, B, M]``; see ``hidden``."""
        return self.output(self.hidden(x, training=training, ranges=ranges))

    def _layer(self, name: str, layer: nn.Module, h: Tensor, training: bool, ranges: str) -> Tensor:
        runs = self.runs
        if isinstance(layer, nn.Unflatten):
            shape = tuple(layer.unflattened_size)
            joined = h.transpose(0, 1).reshape(h.shape[1], runs * shape[0], *shape[1:])
            return joined.contiguous()
        if isinstance(layer, nn.Flatten):
            return h.reshape(len(h), runs, -1).transpose(0, 1)
        if isinstance(layer, nn.Conv2d):
            weight, bias = self._weights(name)
            return F.conv2d(
                h,
                weight.flatten(0, 1),
                None if bias is None else bias.flatten(),
                padding=layer.padding,
                groups=runs,
            )
        if isinstance(layer, nn.Linear):
            weight, bias = self._weights(name)
            product = torch.bmm(h, weight.mT)
            return product if bias is None else product + bias[:, None]
        if isinstance(layer, BoundedResponseNorm):
            apart = h.reshape(len(h) * runs, -1, *h.shape[2:])
            return bounded_response_norm(apart, layer).reshape(h.shape)
        if isinstance(layer, BatchMinMax):
            return self._minmax(name, layer, h, training, ranges)
        made: Tensor = layer(h)  # ReLU, pooling: entry by entry, map by map
        return made

    def _weights(self, name: str) -> tuple[Tensor, Tensor | None]:
        return self.parameters[f"{name}.weight"], self.parameters.get(f"{name}.bias")

    def _minmax(
        self, name: str, layer: BatchMinMax, h: Tensor, training: bool, ranges: str
    ) -> Tensor:
        """Apply ``BatchMinMax`` to every network's own batch."""
        low, high = self.buffers[f"{name}.low"], self.buffers[f"{name}.high"]
        if ranges == "running":
            return _scaled(h, low[:, None], high[:, None]).clamp(0, 1)
        lowest, highest = h.amin(1), h.amax(1)
        if training:
            seen = self.buffers[f"{name}.batches"]
            weight = 1 - (1 - layer.momentum) * (seen > 0).to(low)[:, None]
            low.lerp_(lowest.detach(), weight)
            high.lerp_(highest.detach(), weight)
            seen += 1
        return _scaled(h, lowest[:, None], highest[:, None])

    def network(self, run: int) -> nn.Sequential:
        """Return one network as a module of its own, in evaluation mode; without ``offset``."""
        made = copy.deepcopy(self.template)
        state = {**self.parameters, **self.buffers}
        made.load_state_dict({name: tensor[run].detach() for name, tensor in state.items()})
        return made.eval()

    def state_dict(self) -> dict[str, Tensor]:
        """Return weights and ranges, copied."""
        state = {**self.parameters, **self.buffers}
        return {name: tensor.detach().clone() for name, tensor in state.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over what ``state_dict`` gave."""
        with torch.no_grad():
            for name, tensor in {**self.parameters, **self.buffers}.items():
                tensor.copy_(state[name])


def _with_offset(h: Tensor, offset: Tensor) -> Tensor:
    if h.dim() == 4:
        return h + offset.flatten()[:, None, None]
    return h + offset[:, None]


def _scaled(h: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Scale as ``BatchMinMax`` does: no quotient of zeros, whose gradient would be NaN."""
    width = high - low
    constant = width == 0
    return ((h - low) / width.masked_fill(constant, 1)).masked_fill(constant, 0)

"""Trace an ordinary step of a model without executing it: shapes alone, no memory, no time.

Tensors have shapes and no data (``FakeTensorMode``). A dispatch mode sees every operation of torch
in the forward and backward pass, and which parameter it uses how. The backward pass is traced
twice: as torch does it, and without weight gradients, as a private step needs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ..base.errors import DPKernError, InvalidInput
from ..engine import validate
from ..engine.subject import check_logits
from .traffic import bytes_of

FORWARD, BACKWARD = "forward", "backward"
_FREE = ("device", "_unsafe_view", "size", "stride")
"""Operations that move nothing, whatever their schema says."""
_MOVES = frozenset(
    {
        *("arange", "as_strided_scatter", "cat", "clone", "copy", "cumsum", "constant_pad_nd"),
        *("diagonal_scatter", "embedding", "embedding_dense", "empty", "eye", "fill", "flip"),
        *("full", "full_like", "fused_rms_norm", "gather", "glu", "grid_sampler_2d", "index"),
        *("index_add", "index_copy", "index_put", "index_select", "lift_fresh", "lift_fresh_copy"),
        *("local_scalar_dense", "masked_fill", "masked_scatter", "native_batch_norm"),
        *("native_batch_norm_legit", "native_dropout", "native_group_norm", "native_layer_norm"),
        *("new_empty", "new_full", "new_ones", "new_zeros", "nll_loss", "nll_loss_forward"),
        *("nll_loss2d", "nll_loss2d_forward", "normal", "ones", "ones_like", "pixel_shuffle"),
        *("pixel_unshuffle", "rand", "randn", "repeat", "roll", "scalar_tensor", "scatter"),
        *("scatter_add", "select", "select_scatter", "slice_scatter", "softmax", "log_softmax"),
        *("split_with_sizes_copy", "stack", "std", "to_copy", "tril", "triu", "uniform", "var"),
        *("var_mean", "zero", "zeros", "zeros_like", "bernoulli", "empty_like", "unfold"),
        *("transpose", "unsafe_split", "unsafe_split_with_sizes", "resize", "set", "squeeze"),
    }
)
"""Operations that take no longer than their operands travel, without underscores and gradients."""
_MOVING = ("pool", "pad", "upsample", "interpolate")
"""Parts of names of such operations."""
_COSTLY = ("special_", "igamma", "lgamma", "digamma", "polygamma", "erfinv", "mvlgamma")
"""First parts of names of functions of one entry that take longer."""
_RECURRENT = ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward")
_SEEN = ("t", "view", "transpose", "detach", "expand", "permute", "unsqueeze", "alias", "slice")


@dataclass(frozen=True, kw_only=True)
class TorchCall:
    """One operation of torch.

    Attributes:
        name: name of the operation.
        phase: ``forward`` or ``backward``.
        bytes: operands and results, each once.
        flops: operations of a product or convolution, by torch's own formula.
        dtype: format of the result.
        priced: whether its bytes and products say how long it takes.
    """

    name: str
    phase: str
    bytes: int
    flops: int
    dtype: torch.dtype
    priced: bool = True


@dataclass(frozen=True, kw_only=True)
class ParameterUse:
    """One use of a parameter in the forward pass.

    Attributes:
        parameter: its name.
        kind: ``linear``, ``conv``, ``embedding``, ``layer_norm``, ``group_norm``, ``bias`` or
            ``other``.
        x: shape of the input, without the weight.
        y: shape of the output.
        given: a convolution's geometry, or the groups of a normalisation.
    """

    parameter: str
    kind: str
    x: tuple[int, ...]
    y: tuple[int, ...]
    given: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FakeStep:
    """The operations and parameter uses of one step.

    Attributes:
        batch: samples.
        shapes: shape of each trained parameter.
        calls: torch's operations of an ordinary step, without the optimizer.
        without_weights: those of a step whose backward pass makes no weight gradients.
        uses: uses of parameters, in the forward pass.
        saved: bytes that the forward pass keeps for the backward pass.
        dtype: format of the parameters.
    """

    batch: int
    shapes: dict[str, tuple[int, ...]]
    calls: list[TorchCall]
    without_weights: list[TorchCall]
    uses: list[ParameterUse]
    saved: int
    dtype: torch.dtype


Maker = Callable[[], tuple[nn.Module, Callable[[int], Tensor]]]
"""A function that returns a model, and a function from a batch size to an input."""


def trace(make: Maker, batch: int, *, dtype: torch.dtype = torch.float32) -> FakeStep:
    """Trace a step of the model on ``batch`` samples.

    Raises:
        InvalidInput: a model that needs the values of its data, or takes other inputs.
        UnsupportedModule: one that cannot be trained privately.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), _default_dtype(dtype):
        try:
            model, draw = make()
            if not model.training:  # layers that are frozen in a training model stay so
                model.train()
            validate.check(model)
            trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
            _check_formats(trained, dtype)
            x = draw(batch)
            x = x.to(dtype) if x.is_floating_point() else x
            uses, saved, calls = _traced(model, x, trained)
            for parameter in trained.values():
                parameter.requires_grad_(False)
            with _outputs_need_gradients(model, set(map(id, trained.values()))):
                _, _, without = _traced(model, x, {})
        except DPKernError:
            raise
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            if "_apply()" in str(error):  # .double(), .half() and .to(dtype) in the maker
                raise _other_format("a conversion of its parameters", dtype) from error
            raise InvalidInput(
                "model",
                expected="a model whose step follows from shapes alone",
                got=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
                remedy="Use `dpkern cost model`, which runs it, or pass another shape of samples.",
            ) from error
    return FakeStep(
        batch=batch,
        shapes={name: tuple(p.shape) for name, p in trained.items()},
        calls=calls,
        without_weights=without,
        uses=uses,
        saved=saved,
        dtype=dtype,
    )


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _traced(
    model: nn.Module, x: Tensor, trained: dict[str, nn.Parameter]
) -> tuple[list[ParameterUse], int, list[TorchCall]]:
    recorder = _ShapeRecorder(trained)
    kept: dict[int, int] = {}
    own = {p.untyped_storage()._cdata for p in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = min(storage.nbytes(), tensor.nbytes)
        return tensor

    with recorder:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = model(x)
            check_logits(out, len(x))
            labels = torch.zeros(out.shape[:-1], dtype=torch.int64)
            loss = nn.functional.cross_entropy(out.flatten(0, -2).float(), labels.flatten())
        recorder.phase = BACKWARD
        loss.backward()  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        parameter.grad = None
    return recorder.uses, sum(kept.values()), recorder.calls


@contextmanager
def _outputs_need_gradients(model: nn.Module, trained: set[int]) -> Iterator[None]:
    """Let outputs of the first trained layers need gradients, as their norms need them."""

    def need(module: nn.Module, args: Any, out: Any) -> None:
        del module, args
        if isinstance(out, Tensor) and out.is_floating_point() and not out.requires_grad:
            out.requires_grad_()

    def need_input(module: nn.Module, args: Any) -> Any:
        """Let the gradient go back through time, as the weights of a first layer need it."""
        del module
        x, *rest = args
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.requires_grad:
            return None
        return (x.detach().requires_grad_(), *rest)

    mine = [m for m in model.modules() if any(id(p) in trained for p in m.parameters(False))]
    hooks = [module.register_forward_hook(need) for module in mine]
    looped = (module for module in mine if isinstance(module, nn.RNNBase))
    hooks += [module.register_forward_pre_hook(need_input) for module in looped]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _ShapeRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that notes operations and uses of parameters."""

    def __init__(self, trained: dict[str, nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = FORWARD
        self.calls: list[TorchCall] = []
        self.uses: list[ParameterUse] = []
        self._names = {p.untyped_storage()._cdata: name for name, p in trained.items()}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch would otherwise load its compiler, which takes seconds."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = dict(kwargs or {})
        out = func(*args, **named)
        name = func._overloadpacket.__name__
        moved = bytes_of(func, args, named, out)
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        if self.phase == FORWARD and isinstance(first, Tensor):
            self._note_uses(name, args, first)
        if moved and name not in _FREE:
            flops = _flops(func, name, args, named, out, weights=bool(self._names))
            self.calls.append(
                TorchCall(
                    name=name,
                    phase=self.phase,
                    bytes=moved,
                    flops=flops,
                    dtype=first.dtype if isinstance(first, Tensor) else torch.float32,
                    priced=flops > 0 or _is_moving(func, name),
                )
            )
        return out

    def _name(self, value: Any) -> str | None:
        if not isinstance(value, Tensor):
            return None
        return self._names.get(value.untyped_storage()._cdata)

    def _note_uses(self, name: str, args: tuple[Any, ...], out: Tensor) -> None:
        found = [(i, self._name(a)) for i, a in enumerate(args)]
        used = {i: parameter for i, parameter in found if parameter is not None}
        if not used or name in _SEEN:
            return
        y = tuple(out.shape)
        for place, parameter in used.items():
            kind, x, given = _kind(name, place, args, y)
            self.uses.append(ParameterUse(parameter=parameter, kind=kind, x=x, y=y, given=given))


def _kind(
    name: str, place: int, args: tuple[Any, ...], y: tuple[int, ...]
) -> tuple[str, tuple[int, ...], dict[str, Any]]:
    """Return the kind of use of the parameter at this place, its input and what else matters."""
    x = next((tuple(a.shape) for i, a in enumerate(args) if i != place and _is(a)), y)
    if name in ("mm", "bmm") and place == 1:
        return "linear", tuple(args[0].shape), {}
    if name == "addmm":
        return ("linear", tuple(args[1].shape), {}) if place == 2 else ("bias", y, {})
    if name == "convolution":
        names = ("stride", "padding", "dilation")
        given: dict[str, Any] = {n: tuple(args[3 + i]) for i, n in enumerate(names)}
        given |= {"kernel_size": tuple(args[1].shape[2:]), "groups": args[8]}
        if place == 2 or args[6]:
            return ("bias" if place == 2 else "other"), y, {}
        return "conv", tuple(args[0].shape), given
    if name == _RECURRENT[0]:
        if place > 2:
            return "bias", y, {}
        return "linear", (*args[0].shape[:-1], args[place].shape[1]), {}
    if name == "embedding":
        return "embedding", tuple(args[1].shape), {}
    if name == "native_layer_norm":
        return ("layer_norm" if place == 2 else "norm_bias"), tuple(args[0].shape), {}
    if name == "native_group_norm":
        kind = "group_norm" if place == 1 else "norm_bias"
        return kind, tuple(args[0].shape), {"groups": args[6]}
    return "other", x, {}


def _is(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _is_moving(func: Any, name: str) -> bool:
    """Whether an operation takes about as long as its operands travel."""
    stem = name.strip("_").removesuffix("_data").removesuffix("_backward")
    if stem.startswith(_COSTLY):
        return False
    if torch.Tag.pointwise in func.tags or torch.Tag.reduction in func.tags:
        return True
    known = stem in _MOVES or any(part in stem for part in _MOVING)
    return known or (name.endswith("_backward") and _is_pointwise(stem))


def _is_pointwise(stem: str) -> bool:
    """Whether the operation that a gradient belongs to works entry by entry."""
    packet = getattr(torch.ops.aten, stem, None)
    named = () if packet is None else packet.overloads()
    return any(torch.Tag.pointwise in getattr(packet, one).tags for one in named)


def _flops(func: Any, name: str, args: Any, kwargs: Any, out: Any, *, weights: bool) -> int:
    if name in _RECURRENT:  # every row of the input takes both products, and twice as many back
        x, by_input, by_state = args[:3]
        products = 2 * math.prod(x.shape[:-1]) * (by_input.numel() + by_state.numel())
        return int(products * (1 + weights if name.endswith("backward") else 1))
    formula = flop_registry.get(func._overloadpacket)
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=out))
    if "scaled_dot_product" in name:  # of a CPU, which torch's table leaves out
        shapes = [a.shape for a in args if isinstance(a, Tensor) and a.dim() == 4]
        query, key = shapes[1:3] if name.endswith("backward") else shapes[:2]
        products = 2 * query[0] * query[1] * query[2] * key[2] * query[3]
        return int(products * (5 if name.endswith("backward") else 2))
    return 0


def _check_formats(trained: dict[str, nn.Parameter], dtype: torch.dtype) -> None:
    """Refuse parameters of another format, whose bytes and operations would be counted wrong."""
    for name, parameter in trained.items():
        if parameter.dtype != dtype:
            raise _other_format(f"{parameter.dtype} in {name}", dtype)


def _other_format(got: str, dtype: torch.dtype) -> InvalidInput:
    return InvalidInput(
        "model",
        expected=f"a model that is built in the default format, {dtype} here",
        got=got,
        remedy="Leave dtype=, .double() and .to(...) out and name the format with --dtype. Steps "
        "in float64 are not predicted; `dpkern cost model` measures them.",
    )


__all__ = ["BACKWARD", "FORWARD", "FakeStep", "Maker", "ParameterUse", "TorchCall", "trace"]

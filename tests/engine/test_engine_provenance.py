"""The states that operations of the user's code leave, against what replaced records change."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dpkern.engine.provenance import YieldedBatch, track
from dpkern.engine.provenance.aliases import is_stale
from dpkern.engine.provenance.naming import name_of
from dpkern.engine.provenance.states import NO_RECORD, Mixed, OneRecord, PerRecord, RecordSum
from dpkern.engine.provenance.tensor import TrackedTensor, state_of
from tests.engine.provenance_expressions import EXPRESSIONS, compiled, operands
from tests.engine.provenance_truth import check_states

B = 6

SKIPPED = ("out of bounds", "out of range", "within the support")
"""Replaced whole numbers may be no index: nothing to compare then."""


@pytest.fixture
def _doubles() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_doubles")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("text", EXPRESSIONS)
def test_no_state_claims_more_than_is_true(text: str) -> None:
    operation = compiled(text)
    tried = 0
    for records, ndim in ((3, 1), (3, 2), (3, 3), (3, 4), (0, 2)):
        for dim in range(ndim):
            tensors, dims = operands(ndim, dim, records)
            try:
                torch.manual_seed(7)
                operation(*[t.clone() for t in tensors])
            except Exception:  # noqa: BLE001
                continue
            try:
                check_states(operation, tensors, dims, records)
            except (RuntimeError, IndexError, ValueError) as error:
                if not any(text in str(error) for text in SKIPPED):
                    raise
            tried += 1
    assert tried


CHAINED = """
    x.transpose(0, 1)
    x.flip(0)
    x.reshape(-1, 3)
    x.flatten(0, 1)
    x[None]
    x[:, None]
    x.repeat(2, 1)
    x[[2, 0, 1]]
    x[:2]
    x.mean(-1)
    x.sum(0)
    x.softmax(-1)
    x * 2
    x - x.mean(-1, keepdim=True)
    x + x.transpose(0, 1)
    x @ x.mT
    x.mT @ x
    x.unsqueeze(-1)
    x.squeeze()
    torch.cat([x, x])
    torch.cat([x, x], -1)
    torch.stack([x, x], 1)
    x[0]
    x.expand(2, *x.shape)
    x.chunk(2)[0]
    x.cumsum(0)
    x.mean()
    x.view(-1)
    x ** 2
    x[x[..., 0] > 0]
    x.repeat_interleave(2, 0)
    x.movedim(0, -1)
    F.normalize(x, dim=0)
    torch.einsum('...ij,...kj->...ik', x, x)
    x.sort(0).values
    x / 2
    x.sum()
""".strip().splitlines()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from(CHAINED), min_size=1, max_size=5),
    st.integers(1, 3).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1))),
    st.integers(1, 4),
)
def test_chains_of_operations_keep_their_promise(
    texts: list[str], place: tuple[int, int], records: int
) -> None:
    steps = [eval(f"lambda x: {text}", {"torch": torch, "F": F}) for text in texts]

    def operation(x: Any) -> Any:
        for step in steps:
            x = step(x)
        return x

    tensors, dims = operands(*place, records)
    try:
        operation(tensors[0].clone())
    except Exception:  # noqa: BLE001 (shapes that do not fit)
        assume(False)
    check_states(operation, tensors[:1], dims[:1], records)


def _scope() -> dict[str, Any]:
    batch = YieldedBatch(B)
    random = torch.Generator().manual_seed(3)

    def rows(tensor: torch.Tensor) -> TrackedTensor:
        return track(tensor, PerRecord(batch, batch.all))

    return {
        "torch": torch, "F": F, "np": np, "B": B,
        "x": rows(torch.randn(B, 3, 8, 8, generator=random)),
        "y": rows(torch.randint(5, (B,), generator=random)),
        "ids": rows(torch.randint(9, (B, 7), generator=random)),
        "h": rows(torch.randn(B, 7, 4, generator=random)),
        "z": rows(torch.randn(B, 5, generator=random)),
        "lengths": rows(torch.tensor([7, 3, 5, 1, 2, 4])),
        "wave": rows(torch.randn(B, 64, generator=random)),
        "perm": torch.tensor([3, 1, 0, 5, 4, 2]),
        "mean": torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1),
        "table": torch.randn(9, 4, generator=random),
        "rnn": torch.nn.utils.rnn, "dist": torch.distributions,
    }  # fmt: skip


def _after(code: str) -> Any:
    scope = _scope()
    *lines, last = code.strip().split("; ")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec("\n".join(lines), scope)
        result = eval(last, scope)
    while isinstance(result, (tuple, list)):
        result = result[0]
    if isinstance(result, torch.Tensor) and is_stale([result]):
        return "mixed"
    state = state_of(result)
    names = {
        PerRecord: "rows", OneRecord: "one", RecordSum: "sum", Mixed: "mixed", type(None): "nothing"
    }  # fmt: skip
    if isinstance(state, PerRecord) and state.dim == 0 and NO_RECORD not in state.ids:
        counts = np.unique(state.ids, return_counts=True)[1]
        return f"{len(counts)}x{counts[0]}" if len(set(counts)) == 1 else "uneven rows"
    return "beside fakes" if isinstance(state, PerRecord) and state.dim == 0 else names[type(state)]


LEGITIMATE_INPUTS = {
    "normalised by constants": "(x - mean) / 0.2",
    "normalised in place": "x.sub_(mean).div_(0.2); x",
    "channels last": "x.to(memory_format=torch.channels_last)",
    "half and back": "x.half().float()",
    "non blocking": "x.to('cpu', non_blocking=True)",
    "contiguous": "x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)",
    "random flip by row": "c = torch.rand(B, 1, 1, 1); torch.where(c < 0.5, x.flip(-1), x)",
    "noise": "x + 0.1 * torch.randn_like(x)",
    "random crop": "F.pad(x, (2, 2, 2, 2), mode='reflect')[:, :, 1:9, 3:11]",
    "random affine": "t = torch.eye(2, 3).expand(B, 2, 3); "
    "F.grid_sample(x, F.affine_grid(t, list(x.shape), align_corners=False), align_corners=False)",
    "random erasing": "m = torch.rand(B, 1, 8, 8) < 0.1; x.masked_fill(m, 0.0)",
    "erasing in place": "x[:, :, 2:4, 2:4] = 0.0; x",
    "interpolated": "F.interpolate(x, size=(4, 4), mode='bilinear')",
    "patches": "x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(1, 2)",
    "F.unfold": "F.unfold(x, 4, stride=4).transpose(1, 2)",
    "own mean": "x - x.mean(dim=(1, 2, 3), keepdim=True)",
    "own standardisation": "(x - x.mean((1, 2, 3), True)) / x.std((1, 2, 3), keepdim=True)",
    "own maximum": "x / x.flatten(1).amax(1).view(-1, 1, 1, 1)",
    "grey": "x.mean(1, keepdim=True).expand(-1, 3, -1, -1)",
    "blur": "F.conv2d(x, torch.ones(3, 1, 3, 3) / 9, groups=3, padding=1)",
    "permuted": "x[perm]",
    "permuted by sorting": "x[lengths.argsort(descending=True)]",
    "sorted lengths": "o = lengths.sort(descending=True); o.values",
    "stack of rows": "torch.stack([row.flip(-1) for row in x])",
    "indices": "torch.stack([x[i] for i in range(B)])",
    "row by row": "torch.cat([x[i:i+1] * 2 for i in range(B)])",
    "row with a batch of one": "torch.cat([row[None] for row in x])",
    "one-hot": "F.one_hot(y, 5).float()",
    "one-hot by scatter": "torch.zeros(B, 5).scatter_(1, y[:, None], 1.0)",
    "padding mask": "ids != 0",
    "position ids": "ids * 0 + torch.arange(7).expand(B, 7)",
    "own number": "x[:, :, :int(lengths[3].item())]; x * lengths[0].item()",
    "positions of non-padding": "(ids != 0).long().cumsum(1)",
    "shift right": "s = ids.new_zeros(B, 7); s[:, 1:] = ids[:, :-1]; s",
    "shift by cat": "torch.cat([torch.zeros(B, 1, dtype=torch.long), ids[:, :-1]], 1)",
    "CLS first": "torch.cat([torch.full((B, 1), 2), ids], dim=1)",
    "padded to a length": "F.pad(ids, (0, 9), value=0)",
    "masked tokens": "m = torch.rand(B, 7) < 0.15; ids.masked_fill(m, 3)",
    "masked tokens by index": "i = ids.clone(); i[torch.rand(B, 7) < 0.15] = 3; i",
    "random words": "torch.where(torch.rand(B, 7) < 0.1, torch.randint(9, (B, 7)), ids)",
    "labels where masked": "l = ids.clone(); l[l != 3] = -100; l",
    "label noise": "torch.where(torch.rand(B) < 0.1, torch.randint(5, (B,)), y)",
    "smooth labels": "F.one_hot(y, 5) * 0.9 + 0.02",
    "look-up": "table[ids]",
    "F.embedding": "F.embedding(ids, table)",
    "random masks of patches": "k = torch.rand(B, 7).argsort(dim=1)[:, :3]; "
    "h.gather(1, k[..., None].expand(-1, -1, 4))",
    "noise schedule": "t = torch.randint(9, (B,)); a = torch.rand(9)[t].view(-1, 1, 1, 1); "
    "a * x + (1 - a) * torch.randn_like(x)",
    "schedule from t of samples": "a = torch.rand(9).gather(-1, y).view(-1, 1, 1, 1); a * x",
    "spectrogram": "torch.stft(wave, 16, return_complex=True, window=torch.ones(16)).abs()",
    "spectrum": "torch.fft.rfft(wave).abs().log1p()",
    "preemphasis": "wave[:, 1:] - 0.97 * wave[:, :-1]",
    "split and joined": "torch.cat(x.split(2))",
    "last state": "h[torch.arange(B), lengths - 1]",
    "mean over tokens": "m = (ids != 0)[..., None]; (h * m).sum(1) / m.sum(1).clamp(min=1)",
    "time first and back": "h.transpose(0, 1).contiguous().transpose(0, 1)",
    "uint8": "(x * 255).clamp(0, 255).byte().float() / 255",
    "autocast dtype": "x.bfloat16()",
    "detached copy": "x.detach().clone().requires_grad_(True)",
    "deep copy": "__import__('copy').deepcopy(x)",
    "flattened": "x.view(B, -1)",
    "top classes": "z.topk(3, dim=1).indices",
    "predictions": "z.argmax(1) == y",
    "sorted within": "z.sort(dim=1).values",
    "quantiles": "z.quantile(0.9, dim=1, keepdim=True)",
    "log-probability": "dist.Categorical(logits=z).log_prob(y)",
    "reparametrised": "dist.Normal(z, F.softplus(z)).rsample()",
    "filled rows": "b = torch.zeros(B, 5)\nfor i, r in enumerate(z): b[i] = r; b",
    "filled parts of rows": "b = torch.zeros(B, 9)\nfor i, r in enumerate(z): b[i, :5] = r; b",
    "packed": "rnn.pack_padded_sequence(h, lengths, batch_first=True, enforce_sorted=False); h",
}


@pytest.mark.parametrize("code", LEGITIMATE_INPUTS.values(), ids=LEGITIMATE_INPUTS)
def test_preparation_of_each_sample_keeps_its_row(code: str) -> None:
    assert _after(code) == f"{B}x1"


SEVERAL_ROWS = {
    "two views": ("torch.cat([x, x.flip(-1)])", "6x2"),
    "views by stack": ("torch.stack([x, x.flip(-1)], 1).flatten(0, 1)", "6x2"),
    "multi-crop": ("torch.cat([x[..., :4], x[..., 4:], x[..., 2:6]])", "6x3"),
    "repeated": ("x.repeat(3, 1, 1, 1)", "6x3"),
    "next to each other": ("y.repeat_interleave(4)", "6x4"),
    "patches as rows": ("x.unfold(2, 4, 4).permute(0, 2, 1, 3, 4).flatten(0, 1)", "6x2"),
    "tokens as rows": ("h.reshape(-1, 4)", "6x7"),
    "micro-batch": ("x[:2]", "2x1"),
    "every second": ("x[1::2]", "3x1"),
    "chunk": ("x.chunk(3)[1]", "2x1"),
    "tokens that count": ("h[ids != 0]", "uneven rows"),
    "one sample": ("x[3]", "one"),
    "fakes appended": ("torch.cat([x, torch.randn(2, 3, 8, 8)])", "beside fakes"),
    "a row overwritten": ("x[0] = torch.zeros(3, 8, 8); x", "6x1"),
    "time first": ("h.transpose(0, 1)", "rows"),
    "new constants": ("x.new_zeros(3)", "nothing"),
    "cast constants": ("mean.to(x)", "nothing"),
}


@pytest.mark.parametrize(("code", "rows"), SEVERAL_ROWS.values(), ids=SEVERAL_ROWS)
def test_rows_are_counted_by_record(code: str, rows: str) -> None:
    assert _after(code) == rows


HOSTILE_INPUTS = {
    "mixup": "0.7 * x + 0.3 * x[perm]",
    "mixup with flip": "x + x.flip(0)",
    "mixup with roll": "x.mul(0.5).add(x.roll(1, 0), alpha=0.5)",
    "mixup by lerp": "torch.lerp(x, x[perm], 0.3)",
    "CutMix": "x[:, :, 2:6, 2:6] = x[perm][:, :, 2:6, 2:6]; x",
    "CutMix by view": "x[:, :, 2:6, 2:6].copy_(x[perm][:, :, 2:6, 2:6]); x",
    "CutMix by where": "m = torch.zeros(8, 8, dtype=torch.bool); torch.where(m, x[perm], x)",
    "standardised over the batch": "(x - x.mean(0)) / x.std(0)",
    "global standard deviation": "x / x.std()",
    "batch maximum": "x / x.max()",
    "batch maximum detached": "x / x.detach().abs().amax()",
    "batch norm": "F.batch_norm(x, None, None, training=True)",
    "centred in place": "x.sub_(x.mean(0)); x",
    "centred through data": "x.data.sub_(x.mean(0)); x",
    "centred by out": "torch.sub(x, x.mean(0), out=x); x",
    "softmax over rows": "z.softmax(0)",
    "sorted over rows": "z.sort(0).values",
    "cumulated over rows": "z.cumsum(0)",
    "gram": "z @ z.t()",
    "gram by einsum": "torch.einsum('id,jd->ij', z, z)",
    "gram by cdist": "torch.cdist(z, z)",
    "whitened": "z @ torch.linalg.inv(z.t() @ z)",
    "attention over rows": "F.scaled_dot_product_attention(z, z, z)",
    "folded batch": "x.reshape(2, -1, 8, 8)",
    "transposed view": "z.t().reshape(6, 5)",
    "normalised over rows": "F.normalize(z, dim=0)",
    "padded rows": "F.pad(z, (0, 0, 1, 0))[:-1] + z",
    "top rows": "x[z.sum(1).topk(3).indices]",
    "rows above the mean": "x[z.sum(1) > z.sum()]",
    "another's row": "x[0] = x[1] + x[0]; x",
    "another's row by view": "x[0].copy_(x[1]); x",
    "another's row in place": "x[0].add_(x[1]); x",
    "another's row through unbind": "a, *_ = x.unbind(); a.add_(x[1]); x",
    "another's row through chunk": "a, b = x.chunk(2); a.copy_(b); x",
    "rows stacked crosswise": "torch.stack([x[i] + x[i - 1] for i in range(B)])",
    "neighbours side by side": "torch.cat([z, z.flip(0)], 1)",
    "broadcast against": "z.sum(1) + z.sum(1)[:, None]",
    "samples as weights": "F.conv2d(x, x)",
    "samples as a linear map": "F.linear(z, z)",
    "samples as a table": "F.embedding(ids.clamp(max=5), z)",
    "picked by another": "z[y]",
    "frequencies over the batch": "F.one_hot(ids, 9) / F.one_hot(ids, 9).sum((0, 1))",
    "classes of the batch": "F.one_hot(y).float()",
    "dequantised by the batch": "s = x.abs().max() / 127; (x / s).round() * s",
    "outer product": "torch.outer(z.sum(1), z.sum(1))",
    "fft over rows": "torch.fft.fft(z, dim=0).real",
    "windows over rows": "z.unfold(0, 2, 1)",
    "a buffer of others": "b = torch.zeros(B, 5); b[0].copy_(z[1]); z - b",
    "assigned data": "a = x.clone(); a.data = x - x.mean(0); a",
    "a statistic as a number": "x / x.std().item()",
    "a statistic in a formula": "s = 1 / (2 * x.std().item() + 1e-6); x * -s",
    "a statistic as a keyword": "torch.clamp(x, max=x.mean().item())",
    "no rule": "torch.linalg.svdvals(z)",
}


@pytest.mark.parametrize("code", HOSTILE_INPUTS.values(), ids=HOSTILE_INPUTS)
def test_samples_that_meet_are_mixed(code: str) -> None:
    assert _after(code) in ("mixed", "sum")  # both are refused as inputs


PLAIN_USES = {
    "numbers in reports": "s = x.std().item()\n"
    "(f'{s:.3f}', round(s, 2), __import__('json').dumps({'s': s}), np.mean([s, s]), s < 3, "
    "int(s), max(s, 0.0), __import__('pickle').loads(__import__('pickle').dumps(s)), "
    "torch.tensor([s]), torch.ones(2).mul(s), '%.2f' % s, __import__('math').log(s))",
    "format": "f'{x.sum():.2f} {x}'",
    "item": "x.sum().item()",
    "numpy": "x.detach().cpu().numpy()",
    "list": "y.tolist()",
    "accuracy": "float((z.argmax(1) == y).float().mean())",
    "counts": "torch.bincount(y)",
    "confusion": "m = torch.zeros(5, 5)\nfor a, b in zip(z.argmax(1), y): m[a, b] += 1\nm",
    "running sum": "t = torch.zeros(())\nt += x.mean()\nt / 2",
    "representation": "repr(x)",
    "comparison": "bool(x.mean() < 3)",
    "pickle": "__import__('pickle').loads(__import__('pickle').dumps(x))",
    "array": "np.asarray(x.detach())",
    "shape": "(x.shape, x.dtype, x.device, len(x), x.numel(), x.dim())",
}


@pytest.mark.parametrize("code", PLAIN_USES.values(), ids=PLAIN_USES)
def test_looking_at_samples_never_fails(code: str) -> None:
    *lines, last = code.split("\n")
    scope = _scope()
    exec("\n".join(lines), scope)
    eval(last, scope)


def test_names_are_found_for_all_spellings() -> None:
    x = torch.ones(2)
    for spelled in (torch.Tensor.add, torch.Tensor.add_, torch.add, torch.Tensor.__radd__):
        assert name_of(spelled) == "add"
    assert name_of(torch.Tensor.__rtruediv__) == "div"
    assert name_of(torch.Tensor.T.__get__) == "T.get"
    assert name_of(x.__class__.__floordiv__) == "floor_divide"

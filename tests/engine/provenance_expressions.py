"""List expressions over samples and constants, tried with every position of the rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

NAMES = ("x", "y", "n", "w", "c", "v", "m", "k")
"""x, y: samples; n: whole numbers; w: one number for each sample; c, v: constants; m: mask."""

EXPRESSIONS = [
    line.strip()
    for line in """
    x + y
    x - w
    w + x
    x * c
    c * x
    2 - x
    2 / x
    2 ** x
    x / v
    x + v
    torch.add(x, y, alpha=2)
    x.sub(other=y)
    torch.rsub(x, 1)
    x.add_(y)
    x.mul_(w)
    c.add_(x)
    torch.mul(x, y, out=torch.empty_like(c))
    x + x.flip(0)
    x - x.roll(1, 0)
    x.roll(1)
    x.roll(1, -1)
    x.roll((1, 1), (0, 1))
    x.flip(-1)
    x.flip((0, 1))
    x.flip(0, 1)
    x.fliplr()
    torch.flipud(x)
    x.rot90()
    x.rot90(1, (1, 2))
    x.mean()
    x.sum()
    x.mean(0)
    x.mean(1)
    x.mean(-1)
    x.mean((-1, -2))
    x.mean(dim=[0, 1])
    x.mean(0, True)
    x.mean(1, keepdim=True)
    x.mean(0).mean()
    x.sum(1).mean()
    x.sum() / 3
    3 / x.sum()
    x.sum() * 2 + y.sum()
    x.mean() * y.mean()
    x.mean() ** 2
    x.mean() + x.sum()
    x.std()
    x.std(0)
    x.std(-1)
    x.std(1, keepdim=True)
    x.var(False)
    x.var(dim=1, unbiased=False)
    torch.var_mean(x, dim=-1)
    torch.std_mean(x, 0)
    x.norm()
    x.norm(dim=1)
    x.norm(2, 1)
    x.norm(p=1, dim=-1, keepdim=True)
    torch.norm(x, 2, -1)
    torch.linalg.norm(x, dim=-1)
    torch.linalg.norm(x)
    torch.linalg.vector_norm(x, 2, -1)
    torch.linalg.matrix_norm(x)
    x.max()
    x.max(0)
    x.max(1)
    x.max(-1, True)
    torch.max(x, y)
    x.min(w)
    x.amax((0, 1))
    x.amax(-1)
    x.amin(dim=0)
    x.aminmax(dim=1)
    x.argmax(-1)
    x.argmax()
    x.median(-1)
    x.quantile(0.5, -1)
    x.quantile(0.5, 0)
    x.quantile(0.5, dim=-1, keepdim=True)
    x.logsumexp(-1)
    x.logsumexp(0)
    x.prod(0)
    x.prod(1)
    x.all()
    (x > 0).any(-1)
    (x > 0).float().mean()
    x.count_nonzero(-1)
    x.mode(-1)
    x.kthvalue(1, -1)
    x.cumsum(0)
    x.cumsum(-1)
    torch.cummax(x, dim=1)
    x.softmax(0)
    x.softmax(-1)
    F.softmax(x, dim=1)
    torch.log_softmax(x, -1)
    F.log_softmax(x, 0)
    F.gumbel_softmax(x, dim=-1)
    F.normalize(x)
    F.normalize(x, dim=0)
    F.normalize(x, dim=-1)
    x.renorm(2, 0, 1.0)
    x.renorm(2, 1, 1.0)
    x.sort()
    x.sort(0)
    x.sort(dim=-1, descending=True)
    x.sort(descending=True)
    x.argsort(-1)
    x.argsort(0)
    x.msort()
    x.topk(1)
    x.topk(1, 0)
    x.topk(k=1, dim=1)
    w[w.argsort()]
    x[w.argsort()]
    x.index_select(0, w.argsort())
    x[w.argsort()[:2]]
    x[w.topk(1).indices]
    x.gather(1, n)
    x.gather(0, n)
    x.gather(-1, n)
    c.gather(-1, n)
    c.gather(0, n)
    v.gather(0, k)
    v.gather(-1, k).reshape(-1, 1)
    torch.take_along_dim(x, n, 1)
    c.scatter(1, n, x)
    c.scatter(0, n, x)
    c.scatter(-1, n, 1.0)
    x.scatter_(1, n, 0.0)
    c.scatter_add(-1, n, x)
    torch.zeros(len(x), 3).scatter_(1, k[:, None], 1.0)
    x.index_add(0, k, y)
    x.index_add(1, k, y)
    x.index_fill(1, torch.tensor([0]), 0.0)
    x.index_fill(0, k, 0.0)
    x.index_copy(0, torch.tensor([0]), y[:1])
    x.diff()
    x.diff(dim=0)
    torch.fft.fft(x).abs()
    torch.fft.fft(x, dim=0).abs()
    torch.fft.rfft(x, dim=-1).real
    torch.fft.fft2(x).abs()
    torch.fft.fftn(x).abs()
    torch.fft.fftshift(x)
    torch.fft.fftshift(x, 1)
    torch.fft.ifft(torch.fft.fft(x), dim=-1).real
    F.cosine_similarity(x, y)
    F.cosine_similarity(x, y, dim=-1)
    F.cosine_similarity(x, y, dim=0)
    F.cosine_similarity(x[:, None], y[None], dim=-1)
    F.cosine_similarity(x[:, None], c, dim=-1)
    F.pairwise_distance(x, y)
    F.pairwise_distance(x, y, keepdim=True)
    F.pairwise_distance(x, c)
    torch.cdist(x, y)
    torch.cdist(x, c)
    x @ c
    c @ x
    x @ y
    x @ y.T
    x.T @ y
    x @ x.mT
    x.mT @ x
    x @ v
    v @ x
    w @ x
    w @ c
    w @ w
    w.dot(w)
    c.matmul(x)
    torch.matmul(x, c)
    torch.bmm(x, y)
    torch.bmm(x, y.transpose(1, 2))
    torch.mm(x, c)
    x.mv(v)
    torch.outer(w, w)
    torch.outer(w, v)
    torch.outer(v, w)
    torch.inner(x, y)
    torch.kron(x, y)
    torch.tensordot(x, y)
    torch.addmm(c, x, y)
    torch.addmm(c, x, c)
    F.linear(x, c)
    F.linear(c, x)
    F.linear(x, y)
    F.linear(x, c, v)
    F.linear(x, c, w)
    F.linear(v, x, w)
    F.linear(x, v)
    F.linear(w, c, w)
    torch.einsum("ij,jk->ik", x, c)
    torch.einsum("ij,kj->ik", x, y)
    torch.einsum("ij,ij->i", x, y)
    torch.einsum("ij,ij->", x, y)
    torch.einsum("ij,ij->j", x, y)
    torch.einsum("ij,ik->jk", x, y)
    torch.einsum("ij->ji", x)
    torch.einsum("ii->i", x)
    torch.einsum("...i,ij->...j", x, c)
    torch.einsum("...i,...i->...", x, y)
    torch.einsum("i...,i...->...", x, y)
    torch.einsum("i...->...i", x)
    torch.einsum("ij,jk", x, c)
    torch.einsum("ij,kj", x, y)
    torch.einsum("b...,...b->...", x, y)
    torch.einsum("...ij,...jk->...ik", [x, y])
    x.view(-1)
    x.reshape(-1, 3)
    x.reshape(3, -1)
    x.reshape(-1, 1)
    x.reshape(1, -1)
    x.reshape(len(x), -1)
    x.flatten()
    x.flatten(1)
    x.flatten(0, 1)
    x.flatten(0, 1).mean()
    x.flatten(0, 1).view(x.shape)
    x.flatten(0, 1).reshape(3, 3, -1)
    x.unflatten(0, (3, 1))
    x.unflatten(-1, (1, 3))
    x.ravel()
    x.squeeze()
    x.squeeze(0)
    x.squeeze(-1)
    x.unsqueeze(0)
    x.unsqueeze(1)
    x.unsqueeze(-1)
    x.unsqueeze(0).transpose(0, 1)
    x[None].squeeze(0)
    x[:, None]
    x[..., None]
    x[None].expand(3, *x.shape)
    torch.atleast_2d(x)
    torch.atleast_3d(x)
    x.view_as(c)
    x.view(torch.int32)
    x.permute(*range(x.dim())[::-1])
    x.permute(dims=tuple(range(1, x.dim())) + (0,))
    x.transpose(0, 1)
    torch.transpose(x, -1, 0)
    x.swapaxes(0, -1)
    x.movedim(0, -1)
    x.T
    x.mT
    x.t()
    x.adjoint()
    x.expand(3, *x.shape)
    x.unsqueeze(1).expand(-1, 3, *x.shape[1:])
    x[:1].expand(3, *x.shape[1:])
    x.expand_as(c)
    x.repeat(2, *[1] * (x.dim() - 1))
    x.repeat(1, *[2] * (x.dim() - 1))
    x.repeat(2, *[1] * x.dim())
    x.tile(2)
    x.tile((2, 1))
    x.broadcast_to(2, *x.shape)
    x.repeat_interleave(2)
    x.repeat_interleave(2, 0)
    x.repeat_interleave(2, dim=-1)
    x.repeat_interleave(torch.arange(len(x)), 0)
    x.repeat_interleave(k, 0)
    torch.broadcast_tensors(x, v)[0]
    torch.meshgrid(w, w, indexing="ij")[0]
    x[0]
    x[-1]
    x[0, 0]
    x[:2]
    x[1::2]
    x[:, 0]
    x[:, :2]
    x[..., 0]
    x[..., -1:]
    x[:, ::2]
    x[[2, 0, 1]]
    x[[0, 0]]
    x[:, [2, 0]]
    x[[0, 1], [1, 2]]
    x[[0, 1], :, [1, 2]]
    x[:, [0, 1], [1, 2]]
    x[0, :, [1, 2]]
    x[:, 0, [1, 2]]
    x[[0, 1], 0]
    x[[[0, 1], [1, 2]]]
    x[torch.tensor([2, 0])]
    x[torch.arange(len(x)), k]
    x[torch.arange(len(x))[:, None], n]
    x[torch.arange(len(x)), :, k]
    x[k]
    x[n]
    x[0, k]
    x[:, k]
    x[m]
    x[w > 0]
    x[x > 0]
    x[m].mean()
    x[torch.tensor([True, False, True])]
    x[:, torch.tensor([True, False, True])]
    c[k]
    c[:, k]
    c[k, k]
    c[n]
    c[k, 0]
    v[n]
    c[w > 0]
    x[k[0]]
    c[k[0]]
    x[()]
    x[True]
    x.select(0, 0)
    x.select(1, 0)
    x.select(-1, 2)
    x.narrow(0, 0, 2)
    x.narrow(1, 0, 2)
    x.index_select(0, torch.tensor([2, 0]))
    x.index_select(1, torch.tensor([2, 0]))
    x.index_select(0, k)
    c.index_select(0, k)
    c.index_select(1, k)
    x.masked_select(m)
    x.take(k)
    x.chunk(2)
    x.chunk(2, 1)
    x.chunk(2)[0] + x.chunk(2)[1]
    x.split(2)
    x.split([1, 2])
    x.split([1, 2], dim=1)
    torch.split(x, 1, -1)
    x.tensor_split(2)
    x.unbind()
    x.unbind(1)
    list(x)
    list(reversed(x))
    [row * 2 for row in x]
    torch.stack([row - row.mean() for row in x])
    torch.stack([row - x[0] for row in x])
    torch.stack([x, y])
    torch.stack([x, y], 1)
    torch.stack([x, y], -1).mean(-1)
    torch.stack([x, c])
    torch.stack([x.mean(), y.mean()]).sum()
    torch.stack(list(x), 1)
    torch.cat([x, y])
    torch.cat([x, y], 1)
    torch.cat([x, y], -1)
    torch.cat([x, c])
    torch.cat([x, c], 1)
    torch.cat([x, y.flip(0)], 1)
    torch.cat([x, y.flip(0)], 0)
    torch.cat([x[:1], x[1:]])
    torch.cat((c[:, :1], x), dim=1)
    torch.hstack([x, y])
    torch.vstack([x, y])
    torch.vstack(list(x))
    torch.hstack(list(x))
    torch.where(x > 0, x, y)
    torch.where(x > x.mean(), x, y)
    torch.where(w > 0, x, c)
    torch.where(m, x, 0.0)
    torch.where(m)
    torch.where(m)[0].double()
    m.nonzero()
    x.masked_fill(m, 0.0)
    x.masked_fill_(w > 0, 0.0)
    x.masked_scatter(m, y)
    x.clamp(0, 1)
    x.clamp(min=w)
    x.clamp(max=x.mean())
    x.lerp(y, 0.5)
    torch.addcmul(x, y, c)
    torch.bucketize(x, v.sort().values)
    torch.bucketize(v, w.sort().values)
    torch.searchsorted(v.sort().values, x)
    torch.searchsorted(x, v)
    torch.polar(x.abs(), y).real
    torch.complex(x, y).angle()
    torch.view_as_real(torch.complex(x, y))
    x.nan_to_num()
    torch.tril(x)
    x.relu()
    F.gelu(x)
    F.leaky_relu(x, inplace=True)
    F.dropout(x)
    F.dropout2d(x)
    F.dropout1d(x)
    F.alpha_dropout(x)
    F.feature_alpha_dropout(x)
    x + torch.randn_like(x)
    x + torch.rand_like(x) * x.std()
    torch.bernoulli(x.sigmoid())
    x.sigmoid().multinomial(1)
    x.clone().uniform_()
    x.zero_()
    F.conv1d(x, torch.ones(3, 3, 1))
    F.conv1d(c, x)
    F.conv1d(x, y)
    F.conv1d(x, torch.ones(3, 3, 1), w)
    F.conv2d(x, torch.ones(3, 3, 1, 1))
    F.conv_transpose1d(x, torch.ones(3, 3, 1))
    F.max_pool1d(x, 1)
    F.max_pool2d(x, 1)
    F.avg_pool1d(x, 2)
    F.avg_pool2d(x, 2)
    F.adaptive_avg_pool1d(x, 1)
    F.adaptive_avg_pool2d(x, 1)
    F.adaptive_max_pool1d(x, 1)
    F.lp_pool1d(x, 2, 1)
    F.interpolate(x, scale_factor=2)
    F.grid_sample(x, torch.zeros(len(x), 2, 2, 2, dtype=x.dtype), align_corners=False)
    F.pixel_shuffle(x, 1)
    F.unfold(x, 1)
    F.fold(x[..., :1], 1, 1)
    x.unfold(0, 2, 1)
    x.unfold(-1, 2, 1)
    x.unfold(1, 2, 1)
    F.pad(x, (1, 1))
    F.pad(x, (0, 0, 1, 0))
    F.pad(x, (1, 1, 0, 0))
    F.pad(x, (1, 1), value=1.0)
    F.pad(x, (1, 1), mode="reflect")
    F.layer_norm(x, x.shape[-1:])
    F.layer_norm(x, x.shape[1:])
    F.layer_norm(x, x.shape)
    F.layer_norm(x, (3,), w)
    F.rms_norm(x, (3,))
    F.group_norm(x, 1)
    F.group_norm(x, 1, w)
    F.instance_norm(x)
    F.batch_norm(x, torch.zeros(3), torch.ones(3))
    F.batch_norm(x, None, None, training=True)
    F.batch_norm(x, w, w.abs())
    F.local_response_norm(x, 2)
    F.scaled_dot_product_attention(x, y, x)
    F.scaled_dot_product_attention(x, c, c)
    F.prelu(x, torch.ones(1))
    F.prelu(x, w)
    F.glu(torch.cat([x, y], -1))
    F.one_hot(n, 3)
    F.one_hot(n)
    F.one_hot(k, 3).double()
    F.embedding(n, c)
    F.embedding(n, x)
    F.embedding(k, c)
    F.embedding_bag(n, c)
    F.embedding_bag(k, c, torch.tensor([0, 1]))
    F.bilinear(x, y, torch.ones(2, 3, 3, dtype=x.dtype))
    torch.stft(x, 2, 1, return_complex=True, window=torch.ones(2, dtype=x.dtype)).abs()
    torch.bincount(k)
    torch.histc(x)
    torch.unique(n)
    torch.corrcoef(x)
    torch.cov(x)
    torch.linalg.svd(x)[1]
    torch.linalg.inv(x @ x.mT + 1)
    torch.trace(x)
    torch.diagonal(x)
    x.zeros_like() if hasattr(x, "zeros_like") else torch.zeros_like(x)
    x.to(torch.float32)
    x.half().float()
    x.type_as(c)
    c.type_as(x)
    v.to(x)
    x.detach()
    x.data
    x.contiguous()
    x.new_zeros(3) + x
    x.is_floating_point()
    setitem(x, 0, y[0])
    setitem(x, 0, y[1])
    setitem(x, 0, 0.0)
    setitem(x, slice(None), y)
    setitem(x, slice(0, 2), y[1:3])
    setitem(x, slice(0, 2), y[:2])
    setitem(x, (slice(None), 0), y[:, 0])
    setitem(x, (slice(None), 0), y[:, 0].flip(0))
    setitem(x, (slice(None), 0), w)
    setitem(x, (0, slice(None)), w)
    setitem(x, (Ellipsis, 0), 0.0)
    setitem(x, m, 0.0)
    setitem(x, w > 0, 0.0)
    setitem(x, m, x.mean())
    setitem(x, x > x.mean(), 0.0)
    setitem(x, [0, 0], y[[0, 1]])
    setitem(x, [0, 1], y[[1, 0]])
    setitem(x, ([0, 1], [0, 1]), y[[0, 1], [0, 1]])
    setitem(x, ([0, 1], [0, 1]), y[[1, 0], [0, 1]])
    setitem(c, slice(0, 2), x[:2])
    setitem(c, 0, x[0])
    setitem(c, (slice(None), 0), x[:, 0])
    setitem(c, 0, w)
    setitem(c, slice(None), w)
    setitem(c, k, x)
    setitem(c, 0, x.mean())
    written(x[0].copy_(y[1]), x)
    written(x[0].mul_(2), x)
    written(x[:, 0].copy_(y[:, 0].flip(0)), x)
    written(x[:, 0].copy_(y[:, 0]), x)
    written(x.chunk(2)[0].add_(1), x)
    written(x.detach().flip(0).copy_(y), x)
    written(x.detach()[:1].copy_(y[1:2]), x)
    written(x.view(-1)[:1].copy_(y.view(-1)[-1:]), x)
    written(c[0].copy_(x[0]), x - c)
    written(c.detach().copy_(x.flip(0)), x - c)
    written(x.t().copy_(y), x)
    written(c.copy_(x), c)
    written(x.copy_(y.flip(0)), x)
    torch.index_put(x, (torch.tensor([0]),), y[1])
    x.vander() if hasattr(x, "vander") else x.exp()
    F.cross_entropy(x, k)
    F.cross_entropy(x, n[:, 0])
    F.cross_entropy(x, k, reduction="sum")
    F.cross_entropy(x, k, reduction="none")
    F.cross_entropy(x, k, weight=v.abs())
    F.cross_entropy(x, k, weight=w.abs())
    F.cross_entropy(x, k, weight=v.abs(), label_smoothing=0.1)
    F.cross_entropy(x, k, ignore_index=1)
    F.cross_entropy(x, k, ignore_index=1, reduction="sum")
    F.cross_entropy(x, n[:, 0], ignore_index=1)
    F.cross_entropy(x, y.softmax(1))
    F.cross_entropy(x, torch.tensor(1))
    F.cross_entropy(x.flatten(0, 1), n.flatten(0, 1)[:, 0], ignore_index=1)
    F.nll_loss(x.log_softmax(1), k)
    F.nll_loss(x, k, v.abs())
    F.mse_loss(x, y)
    F.mse_loss(x, w)
    F.mse_loss(x, c, reduction="sum")
    F.mse_loss(x[:, :1], w)
    F.mse_loss(x, y, reduction="none").mean()
    F.mse_loss(x, y).sqrt()
    F.l1_loss(x, y)
    F.smooth_l1_loss(x, y)
    F.huber_loss(x, y)
    F.huber_loss(x, y, "sum")
    F.binary_cross_entropy_with_logits(x, y.sigmoid())
    F.binary_cross_entropy_with_logits(x, y.sigmoid(), pos_weight=v.abs())
    F.binary_cross_entropy_with_logits(x, y.sigmoid(), w.abs())
    F.binary_cross_entropy(x.sigmoid(), y.sigmoid())
    F.kl_div(x, y.softmax(1), reduction="batchmean")
    F.kl_div(x, y.softmax(-1), reduction="mean")
    F.poisson_nll_loss(x, y.abs())
    F.gaussian_nll_loss(x, y, y.abs() + 1)
    F.gaussian_nll_loss(x, y, w.abs() + 1)
    F.soft_margin_loss(x, y.sign())
    F.hinge_embedding_loss(x, y.sign())
    F.margin_ranking_loss(x, y, c.sign())
    F.margin_ranking_loss(w, x[:, 0], v.sign())
    F.cosine_embedding_loss(x, y, w.sign())
    F.triplet_margin_loss(x, y, c)
    F.triplet_margin_loss(x, y, y.roll(1, 0))
    F.triplet_margin_with_distance_loss(x, y, c)
    F.triplet_margin_with_distance_loss(x, y, c, distance_function=gap)
    F.multi_margin_loss(x, k)
    F.multilabel_margin_loss(x, n)
    F.multilabel_soft_margin_loss(x, y.sigmoid())
    F.ctc_loss(x.log_softmax(-1), n[:, :, 0], (3,) * 3, (1,) * 3)
    (x.mean(1) * w).mean()
    (x.mean(1) * w).sum() / w.sum()
    (x.mean(1) * m.double().view(-1)[:3]).sum()
    x[m].sum()
    w[w > 0].mean()
    w[[0, 0, 1]].mean()
    w.masked_fill(w > 0, 0.0).sum()
    w.topk(2).values.mean()
    w.max() - w.min()
    (w - w.mean()).square().mean()
    (w.softmax(0) * w).sum()
    -w.sigmoid().log().mean()
    (w.unsqueeze(0) - w.unsqueeze(1)).relu().mean()
    torch.stack([w, w ** 2], 1).mean(1).sum()
    sum(row.sum() for row in x)
    sum(row.sum() for row in x) / len(x)
    sum([row.mean() for row in x]) ** 2
    w.sum() - w.sum().detach()
    w.sum() * w.sum().detach()
    w.sum().square()
    w.mean().exp()
    w @ v
    (w * 3).dot(v)
    torch.distributions.Normal(x, 1.0).log_prob(y)
    torch.distributions.Normal(x, y.exp()).rsample()
    torch.distributions.Categorical(logits=x).log_prob(k)
    torch.distributions.Categorical(logits=x).entropy().mean()
    torch.distributions.Bernoulli(logits=x).log_prob((y > 0).double()).sum(-1)
    torch.distributions.kl_divergence(normal(x, 1.0), normal(y, 1.0))
    """.strip().splitlines()
]  # fmt: skip


def setitem(target: Any, index: Any, value: Any) -> Any:
    target[index] = value
    return target


def written(_: Any, target: Any) -> Any:
    return target


def gap(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).square().mean(0).expand(len(a), -1).mean(1)


def compiled(text: str) -> Callable[..., Any]:
    """Return the expression as a function of its operands."""
    scope = {
        "torch": torch,
        "F": F,
        "setitem": setitem,
        "written": written,
        "gap": gap,
        "normal": torch.distributions.Normal,
    }
    function: Callable[..., Any] = eval(f"lambda {', '.join(NAMES)}: {text}", scope)
    return function


def operands(ndim: int, dim: int, records: int) -> tuple[list[Tensor], list[int | None]]:
    """Return values for the names and the dimension of their rows; other sizes are 3."""
    random = torch.Generator().manual_seed(17)
    shape = [3] * ndim
    shape[dim] = records

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=random, dtype=torch.float64)

    whole = torch.randint(3, shape, generator=random)
    mask = normal(*shape) > 0
    tensors = [
        normal(*shape), normal(*shape), whole, normal(records), normal(*shape), normal(3), mask,
        torch.randint(3, (records,), generator=random),
    ]  # fmt: skip
    return tensors, [dim, dim, dim, 0, None, None, dim, 0]

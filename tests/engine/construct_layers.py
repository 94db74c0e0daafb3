"""Constructs made of torch's own layers and their options."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from dpkern.nn import BlockCirculantLinear, SpectralConv2d
from tests.engine.construct_kit import (
    HEADS,
    IMAGE,
    MEMORY,
    ROWS,
    SEQUENCE,
    SIGNAL,
    TOKENS,
    VOCABULARY,
    VOLUME,
    B,
    Construct,
    E,
    Model,
    T,
    draw,
    of_next_token,
    parameter,
)

CAUSAL = torch.ones(T, T).triu(1).bool()
LENGTHS = torch.tensor([2, 3, 1, 3])  # unsorted: packing changes the order of the samples


def attention(**options: object) -> nn.MultiheadAttention:
    return nn.MultiheadAttention(E, HEADS, **{"batch_first": True, **options})  # type: ignore[arg-type]


def cross(m: Model, x: Tensor, memory: Tensor) -> Tensor:
    return m.attention(x, memory, memory)[0]


def padded(m: Model, x: Tensor, padding: Tensor) -> Tensor:
    return m.attention(x, x, x, key_padding_mask=padding)[0]


def time_first(m: Model, x: Tensor) -> Tensor:
    y = x.transpose(0, 1)
    return m.attention(y, y, y, need_weights=False)[0].transpose(0, 1)


def transformer(kind: type[nn.Module], **options: object) -> nn.Module:
    return kind(E, HEADS, 2 * E, dropout=0.0, batch_first=True, **options)


def outputs(m: Model, *inputs: Tensor) -> Tensor:
    """All outputs and the last hidden state of a recurrent layer."""
    output, hidden = m.layer(*inputs)
    hidden = hidden if isinstance(hidden, Tensor) else torch.cat(hidden, dim=2)
    return torch.cat([output.flatten(1), hidden.transpose(0, 1).flatten(1)], dim=1)


def packed(m: Model, x: Tensor, lengths: Tensor) -> Tensor:
    given = pack_padded_sequence(m.before(x), lengths, batch_first=True, enforce_sorted=False)
    output, _ = m.layer(given)
    return m.after(pad_packed_sequence(output, batch_first=True, total_length=T)[0])


def unrolled(m: Model, x: Tensor) -> Tensor:
    state = None
    for step in x.unbind(1):
        state = m.cell(step, state)
    return torch.cat(state, dim=1) if isinstance(state, tuple) else state


def recurrent_time_first(m: Model, x: Tensor) -> Tensor:
    return m.layer(x.transpose(0, 1))[0].transpose(0, 1)


def image(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(E, 6, 3, padding=1), nn.Tanh(), layer)


LINEAR = [
    Construct("linear", lambda: nn.Linear(E, 5), ROWS),
    Construct("linear-no-bias", lambda: nn.Linear(E, 5, bias=False), ROWS),
    Construct("linear-sequence", lambda: nn.Linear(E, 5), SEQUENCE),
    Construct("linear-4d", lambda: nn.Linear(5, 4), IMAGE),
    Construct(
        "bilinear", lambda: Model(lambda m, x: m.layer(x, x * x), layer=nn.Bilinear(E, E, 3)), ROWS
    ),
    Construct("prelu", lambda: nn.Sequential(nn.Linear(E, 5), nn.PReLU()), ROWS),
    Construct("prelu-per-channel", lambda: image(nn.PReLU(6)), IMAGE),
]

CONVOLUTION = [
    Construct("conv2d", lambda: nn.Conv2d(E, 4, 3), IMAGE),
    Construct("conv2d-1x1", lambda: nn.Conv2d(E, 4, 1), IMAGE),
    Construct("conv2d-no-bias", lambda: nn.Conv2d(E, 4, 3, bias=False), IMAGE),
    Construct("conv2d-strided", lambda: nn.Conv2d(E, 4, 3, stride=2, padding=(2, 1)), IMAGE),
    Construct("conv2d-dilated", lambda: nn.Conv2d(E, 4, (2, 3), dilation=(3, 2)), IMAGE),
    Construct("conv2d-grouped", lambda: nn.Conv2d(E, 6, 3, groups=2), IMAGE),
    Construct("conv2d-depthwise", lambda: nn.Conv2d(E, 2 * E, 3, groups=E), IMAGE),
    Construct("conv2d-same", lambda: nn.Conv2d(E, 4, (5, 3), padding="same"), IMAGE),
    *(
        Construct(
            f"conv2d-{mode}",
            lambda mode=mode: nn.Conv2d(E, 4, 3, padding=(2, 1), padding_mode=mode),
            IMAGE,
        )
        for mode in ("circular", "reflect", "replicate")
    ),
    Construct("conv1d", lambda: nn.Conv1d(E, 4, 3, stride=2, padding=1), SIGNAL),
    Construct("conv3d", lambda: nn.Conv3d(2, 4, (2, 3, 1), padding=1), VOLUME),
    Construct("conv1d-transposed", lambda: nn.ConvTranspose1d(E, 4, 3, stride=2), SIGNAL),
    Construct(
        "conv2d-transposed",
        lambda: nn.ConvTranspose2d(E, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        IMAGE,
    ),
    Construct(
        "channels-last",
        lambda: image(nn.Conv2d(6, 3, 3)).to(memory_format=torch.channels_last),
        (IMAGE[0].to(memory_format=torch.channels_last),),
    ),
]

SPECTRAL = [
    Construct("block-circulant", lambda: BlockCirculantLinear(E, 6, 4), ROWS),
    Construct(
        "block-circulant-padded", lambda: BlockCirculantLinear(E, 5, 3, convention="column"), ROWS
    ),
    Construct("block-circulant-sequence", lambda: BlockCirculantLinear(E, E, 4), SEQUENCE),
    Construct(
        "block-circulant-twice",
        lambda: Model(
            lambda m, x: m.layer(torch.tanh(m.layer(x))), layer=BlockCirculantLinear(E, E, 4)
        ),
        ROWS,
    ),
    Construct("spectral-conv2d", lambda: SpectralConv2d(E, 4, 3, stride=2, padding=(2, 1)), IMAGE),
    Construct(
        "spectral-conv2d-grouped",
        lambda: SpectralConv2d(E, 6, (2, 3), dilation=(2, 1), groups=2, bias=False),
        IMAGE,
    ),
]

NORMALISATION = [
    Construct("group-norm", lambda: image(nn.GroupNorm(3, 6)), IMAGE),
    Construct("layer-norm", lambda: nn.Sequential(nn.Linear(E, 6), nn.LayerNorm(6)), SEQUENCE),
    Construct("layer-norm-no-bias", lambda: nn.LayerNorm(E, bias=False), SEQUENCE),
    Construct("layer-norm-2d", lambda: image(nn.LayerNorm((6, 5))), IMAGE),
    Construct("instance-norm", lambda: image(nn.InstanceNorm2d(6, affine=True)), IMAGE),
    Construct("rms-norm", lambda: nn.Sequential(nn.Linear(E, 6), nn.RMSNorm(6)), SEQUENCE),
]

EMBEDDING = [
    Construct("embedding", lambda: nn.Embedding(VOCABULARY, E), TOKENS),
    Construct("embedding-one-id", lambda: nn.Embedding(VOCABULARY, E), (TOKENS[0][:, 0],)),
    Construct("embedding-padding", lambda: nn.Embedding(VOCABULARY, E, padding_idx=0), TOKENS),
    *(
        Construct(
            f"embedding-bag-{mode}",
            lambda mode=mode: nn.EmbeddingBag(VOCABULARY, E, mode=mode),
            TOKENS,
        )
        for mode in ("sum", "mean", "max")
    ),
    Construct(
        "tied-embedding-and-head",
        lambda: Model(
            lambda m, tokens: torch.tanh(m.table(tokens)) @ m.table.weight.t(),
            table=nn.Embedding(VOCABULARY, E),
        ),
        TOKENS,
        losses=of_next_token,
    ),
    Construct(
        "tied-by-assignment",
        lambda: tied(nn.Embedding(VOCABULARY, E), nn.Linear(E, VOCABULARY)),
        TOKENS,
        losses=of_next_token,
    ),
]


def tied(table: nn.Embedding, head: nn.Linear) -> nn.Module:
    head.weight = table.weight
    return nn.Sequential(table, nn.Tanh(), head)


ATTENTION = [
    Construct(
        "attention-self",
        lambda: Model(lambda m, x: m.attention(x, x, x)[0], attention=attention()),
        SEQUENCE,
    ),
    Construct("attention-cross", lambda: Model(cross, attention=attention()), MEMORY),
    Construct(
        "attention-three-inputs",
        lambda: Model(
            lambda m, x, y: m.attention(x, y, y * 2, need_weights=False)[0], attention=attention()
        ),
        MEMORY,
    ),
    Construct(
        "attention-other-widths",
        lambda: Model(
            lambda m, x, y: m.attention(x, y[..., :6], y[..., :7])[0],
            attention=attention(kdim=6, vdim=7),
        ),
        MEMORY,
    ),
    Construct(
        "attention-causal",
        lambda: Model(
            lambda m, x: m.attention(x, x, x, attn_mask=m.mask, is_causal=True)[0],
            attention=attention(),
            mask=CAUSAL,
        ),
        SEQUENCE,
    ),
    Construct(
        "attention-padded",
        lambda: Model(padded, attention=attention()),
        (*SEQUENCE, torch.arange(T).expand(B, T) >= LENGTHS.unsqueeze(1)),
    ),
    Construct(
        "attention-learned-mask",
        lambda: Model(
            lambda m, x: m.attention(x, x, x, attn_mask=m.mask)[0],
            attention=attention(),
            mask=parameter(T, T),
        ),
        SEQUENCE,
    ),
    Construct(
        "attention-bias-kv",
        lambda: Model(cross, attention=attention(add_bias_kv=True, add_zero_attn=True)),
        MEMORY,
    ),
    Construct(
        "attention-time-first",
        lambda: Model(time_first, attention=attention(batch_first=False)),
        SEQUENCE,
    ),
    Construct("encoder-layer", lambda: transformer(nn.TransformerEncoderLayer), SEQUENCE),
    Construct(
        "encoder-layer-norm-first",
        lambda: transformer(nn.TransformerEncoderLayer, norm_first=True, activation="gelu"),
        SEQUENCE,
    ),
    Construct("decoder-layer", lambda: transformer(nn.TransformerDecoderLayer), MEMORY),
]

RECURRENT = [
    Construct("lstm", lambda: Model(outputs, layer=nn.LSTM(E, 5, batch_first=True)), SEQUENCE),
    Construct(
        "lstm-deep",
        lambda: Model(
            outputs, layer=nn.LSTM(E, 5, num_layers=2, bidirectional=True, batch_first=True)
        ),
        SEQUENCE,
    ),
    Construct(
        "lstm-projected",
        lambda: Model(outputs, layer=nn.LSTM(E, 5, proj_size=2, batch_first=True)),
        SEQUENCE,
    ),
    Construct(
        "lstm-packed",
        lambda: Model(
            packed,
            before=nn.Linear(E, E),
            layer=nn.LSTM(E, 5, bidirectional=True, batch_first=True),
            after=nn.Linear(10, 3),
        ),
        (*SEQUENCE, LENGTHS),
    ),
    Construct(
        "lstm-time-first", lambda: Model(recurrent_time_first, layer=nn.LSTM(E, 5)), SEQUENCE
    ),
    Construct("gru", lambda: Model(outputs, layer=nn.GRU(E, 5, batch_first=True)), SEQUENCE),
    Construct("rnn", lambda: Model(outputs, layer=nn.RNN(E, 5, batch_first=True)), SEQUENCE),
    Construct("lstm-cell", lambda: Model(unrolled, cell=nn.LSTMCell(E, 5)), SEQUENCE),
    Construct("gru-cell", lambda: Model(unrolled, cell=nn.GRUCell(E, 5)), SEQUENCE),
    Construct("rnn-cell", lambda: Model(unrolled, cell=nn.RNNCell(E, 5)), SEQUENCE),
    Construct(
        "lstm-given-state",
        lambda: Model(
            lambda m, x, h: m.layer(x, (m.start(h).unsqueeze(0), h.unsqueeze(0)))[0],
            layer=nn.LSTM(E, 5, batch_first=True),
            start=nn.Linear(5, 5),
        ),
        (*SEQUENCE, draw(B, 5, seed=3)),
    ),
]

LAYERS = [*LINEAR, *CONVOLUTION, *SPECTRAL, *NORMALISATION, *EMBEDDING, *ATTENTION, *RECURRENT]

"""Layers that Opacus replaces: here PyTorch's own, which are captured as they are."""

from torch import nn

DPMultiheadAttention = nn.MultiheadAttention
DPRNN = nn.RNN
DPGRU = nn.GRU
DPLSTM = nn.LSTM

__all__ = ["DPGRU", "DPLSTM", "DPRNN", "DPMultiheadAttention"]

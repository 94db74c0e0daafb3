"""Recurrent layers by the module path that Opacus' scripts import."""

from . import DPGRU, DPLSTM, DPRNN

__all__ = ["DPGRU", "DPLSTM", "DPRNN"]

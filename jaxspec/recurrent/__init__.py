"""Layers whose state accumulates: how they reach it, the gated delta rule of Gated DeltaNet and of Kimi Delta Attention
with its gate, and the short convolution before both."""

from jaxspec.recurrent.carry import commit, recur, take_pending
from jaxspec.recurrent.conv import short_conv
from jaxspec.recurrent.delta import gated_delta
from jaxspec.recurrent.gates import kda_gate

__all__ = ["commit", "gated_delta", "kda_gate", "recur", "short_conv", "take_pending"]

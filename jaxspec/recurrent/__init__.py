"""Layers whose state accumulates: how they reach it, Gated DeltaNet, and the short convolution before it."""

from jaxspec.recurrent.carry import commit, recur, take_pending
from jaxspec.recurrent.conv import short_conv
from jaxspec.recurrent.delta import gated_delta

__all__ = ["commit", "gated_delta", "recur", "short_conv", "take_pending"]

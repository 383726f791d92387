"""Layers whose state accumulates: Gated DeltaNet and the short convolution before it."""

from jaxspec.recurrent.conv import short_conv
from jaxspec.recurrent.delta import gated_delta

__all__ = ["gated_delta", "short_conv"]

"""Attention of D query rows a request over the paged cache."""

from jaxspec.attention.paged import attend, paged_attention

__all__ = ["attend", "paged_attention"]

"""Attention of D query rows a request over the paged cache: to all of it, or to a selection."""

from jaxspec.attention.heads import Heads
from jaxspec.attention.kpool import Selection, attend_pooled, attend_selected
from jaxspec.attention.paged import attend, paged_attention
from jaxspec.attention.pooling import IndexRows

__all__ = ["Heads", "IndexRows", "Selection", "attend", "attend_pooled", "attend_selected", "paged_attention"]

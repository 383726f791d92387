"""Fused metadata kernels for speculative decoding over paged caches, in Pallas, each with a jnp reference.

    decode_metadata      lengths, prefix sums, FULL and SWA page tables of a forward
    decode_lengths       the lengths alone (decode_lengths_packed: into a packed buffer)
    draft_write_window   virtual, FULL and SWA write locations, positions, anchor tokens

Destinations are DecodeTables and WindowBuffers (separate arrays) or PackedMetadata (one buffer of a MetadataLayout),
and results alias them when they are donated. This package knows nothing of jaxspec.
"""

from pallas_kernels.backend import BACKENDS, BackendChoice, explain_backends
from pallas_kernels.buffers import DecodeTables, MetadataLayout, PackedMetadata, WindowBuffers
from pallas_kernels.decode import (
    decode_lengths,
    decode_lengths_packed,
    decode_lengths_reference,
    decode_metadata,
    decode_metadata_reference,
)
from pallas_kernels.window import draft_write_window, draft_write_window_reference

__all__ = [
    "BACKENDS",
    "BackendChoice",
    "DecodeTables",
    "MetadataLayout",
    "PackedMetadata",
    "WindowBuffers",
    "decode_lengths",
    "decode_lengths_packed",
    "decode_lengths_reference",
    "decode_metadata",
    "decode_metadata_reference",
    "draft_write_window",
    "draft_write_window_reference",
    "explain_backends",
]

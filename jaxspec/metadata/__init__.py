"""What a forward needs to know about its rows, built on the device from live tables."""

from jaxspec.metadata.build import (
    StateTable,
    decode_step,
    draft_extend_metadata,
    draft_window,
    verify_layout,
    verify_metadata,
)
from jaxspec.metadata.chain import ChainMetadata, chain_metadata
from jaxspec.metadata.ids import Ids
from jaxspec.metadata.kpool import KPool, KPoolMetadata, KPoolWritePlan
from jaxspec.metadata.types import DecodeMetadata, DraftExtendMetadata, ForwardMetadata, VerifyMetadata, WriteWindow

__all__ = [
    "ChainMetadata",
    "DecodeMetadata",
    "DraftExtendMetadata",
    "ForwardMetadata",
    "Ids",
    "KPool",
    "KPoolMetadata",
    "KPoolWritePlan",
    "StateTable",
    "VerifyMetadata",
    "WriteWindow",
    "chain_metadata",
    "decode_step",
    "draft_extend_metadata",
    "draft_window",
    "verify_layout",
    "verify_metadata",
]

"""Where a draft that follows the target's page tables keeps its K and V.

    own      static memory: buffers of its own, addressed by FULL slots
    fused    unified memory: lanes of the target's entries, which live and move with its pages
    private  unified memory where that cannot be: buffers of its own, addressed by virtual ids

Virtual pages are never moved and never shared by two kinds, so a private pool needs neither a map nor an allocator: it
has a row for each virtual slot, and its page table is the request table itself.

A draft's sliding layers go to SWA entries if the target has such pages and keeps them long enough. If not they are
*folded*: they lie in FULL entries, addressed like any layer there, and only their reads are cut to the window.
"""

import dataclasses
from collections.abc import Iterable

import jax.numpy as jnp

from jaxspec.cache.layers import POSITION, LayerSpec, StateSpec
from jaxspec.cache.layout import ROW_BYTES

OWN, FUSED, PRIVATE = "own", "fused", "private"


@dataclasses.dataclass(frozen=True)
class Placement:
    """The decision, and why. Static and hashable.

    Attributes:
      where: "own", "fused" or "private".
      layers: the draft's layers, their storages decided. Those of buffers of its own are all in "full".
      reason: why the draft is private, in words; empty otherwise.
      notes: a line on each layer that is folded.
    """

    where: str
    layers: tuple[LayerSpec, ...]
    reason: str = ""
    notes: tuple[str, ...] = ()

    @property
    def lanes(self) -> tuple[LayerSpec, ...]:
        """What the draft keeps in the target's entries: its layers where it is fused, otherwise nothing."""
        return self.layers if self.where == FUSED else ()

    def token_bytes(self, dtype) -> int:
        """Bytes a token takes in the draft's own buffers; 0 where it is fused."""
        widths = 0 if self.where == FUSED else sum(spec.key_width + spec.value_width for spec in self.layers)
        return widths * jnp.dtype(dtype).itemsize


def place_draft(
    layers: Iterable[LayerSpec],
    dtype: str,
    target_layers: Iterable[LayerSpec | StateSpec],
    target_dtype: str,
    *,
    memory: str,
) -> Placement:
    """Where a draft's layers go. A pure function of static descriptions.

    Args:
      layers: the draft's; where they say they are stored does not matter, their windows do.
      dtype: of the draft's K and V.
      target_layers, target_dtype: the target's.
      memory: "static" or "unified".

    Returns:
      A `Placement`. On unified memory the draft is fused unless its K and V have another dtype than the target's, or a
      row of them is no multiple of 16 bytes.

    Source: the placement of draft KV in SGLang's unified memory pools.

    Example:
      >>> target = (LayerSpec(2, 64), LayerSpec(2, 64, 8, "swa"))
      >>> draft = (LayerSpec(1, 64), LayerSpec(1, 64, 8), LayerSpec(1, 64, 9))
      >>> placement = place_draft(draft, "bfloat16", target, "bfloat16", memory="unified")
      >>> placement.where, [spec.storage for spec in placement.layers]
      ('fused', ['full', 'swa', 'full'])
      >>> placement.notes
      ('draft layer 2 is folded into FULL entries: its window of 9 is longer than the 8 of the target',)
      >>> place_draft(draft, "float32", target, "bfloat16", memory="unified").reason
      "the draft keeps K and V in float32, the target's entries hold bfloat16"
    """
    layers = tuple(layers)
    in_full = tuple(dataclasses.replace(spec, storage="full") for spec in layers)
    if memory == "static":
        return Placement(OWN, in_full)
    if reason := _declined(layers, jnp.dtype(dtype), jnp.dtype(target_dtype)):
        return Placement(PRIVATE, in_full, reason)
    reach = max(
        (spec.window for spec in target_layers if spec.carries == POSITION and spec.storage == "swa"), default=0
    )
    placed, notes = [], []
    for index, spec in enumerate(in_full):
        if spec.window is None or 0 < spec.window <= reach:
            placed.append(spec if spec.window is None else dataclasses.replace(spec, storage="swa"))
            continue
        why = (
            f"its window of {spec.window} is longer than the {reach} of the target"
            if reach
            else "the target has no sliding-window pages"
        )
        placed.append(spec)
        notes.append(f"draft layer {index} is folded into FULL entries: {why}")
    return Placement(FUSED, tuple(placed), notes=tuple(notes))


def _declined(layers: tuple[LayerSpec, ...], dtype, target_dtype) -> str:
    """Why the layers cannot be lanes of the target's entries; empty if they can."""
    if dtype != target_dtype:
        return f"the draft keeps K and V in {dtype.name}, the target's entries hold {target_dtype.name}"
    for index, spec in enumerate(layers):
        for name, width in (("K", spec.key_width), ("V", spec.value_width)):
            size = width * dtype.itemsize
            if size % ROW_BYTES:
                return (
                    f"{name} of draft layer {index} has rows of {size} bytes, and rows of an entry are multiples of "
                    f"{ROW_BYTES}"
                )
    return ""

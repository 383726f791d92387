"""Metadata of draft steps built once and used again: by all steps of a chain, and by steps that want a copy of their
own.

Metadata are *fresh* while the arrays that they were made of are the ones at hand. Inside a traced program that can be
asked exactly: an array is the same if it is the same object, and whatever has been through a loop, a jitted call or the
state of a step comes out as another one. `ChainMetadata` therefore holds on to its inputs, and it is no pytree: it
cannot be put into a state, returned from a compiled function or carried by a loop, so metadata of an earlier round
cannot turn up in a later one. What is not fresh, or was built for other shapes, is built anew, with the values that a
copy would have had.
"""

import dataclasses

import jax

from jaxspec.metadata.build import read_chain, write_chain
from jaxspec.metadata.ids import Ids
from jaxspec.metadata.kpool import KPool
from jaxspec.metadata.types import DecodeMetadata
from pallas_kernels import PackedMetadata

Array = jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class ChainMetadata:
    """Metadata of a draft chain, with what they were made of. Not a pytree, on purpose.

    Attributes:
      metadata: for all steps of the chain.
      packed: the buffer that they are views of.
      made_of: the arrays that went in.
      settings: everything else that went in, hashable.
    """

    metadata: DecodeMetadata
    packed: PackedMetadata
    made_of: tuple
    settings: tuple

    def serves(self, made_of: tuple, settings: tuple) -> bool:
        """Whether a build from these arrays and settings would give these values.

        The same NumPy array may hold something else by now, so only arrays of jax count as the same.
        """
        pairs = zip(self.made_of, made_of, strict=True)
        return self.settings == settings and all(a is b and isinstance(a, jax.Array) for a, b in pairs)


def chain_metadata(
    seq_lens: Array,
    req_rows: Array,
    page_rows: Array | Ids,
    v2p: Array,
    packed: PackedMetadata,
    *,
    page_size: int,
    limit: int,
    kpool: KPool,
    state_slots: Array | Ids | None = None,
    backend: str | None = None,
    source: ChainMetadata | None = None,
) -> ChainMetadata:
    """Metadata of all steps of a draft chain over sparse layers, computed once: MTP precompute.

    The steps share everything but the column of the window that each writes: what they attend to was selected when the
    newest committed row was computed. A step that wants a buffer of its own names the metadata of another one as
    `source`, and gets a copy of them if they are fresh.

    Args:
      seq_lens: int32[B], committed tokens L; the chain's rows are at positions L, L + 1, ...
      packed: the destination: D rows a request in the window, one that has lengths. Donated, it is written in place,
        and it is never replaced by the source's buffer.
      source: metadata of another step. Used if they are fresh and compatible; otherwise, and for None, all is built.
      req_rows, page_rows, v2p, page_size, limit, kpool, state_slots, backend: as in `verify_metadata`.

    Returns:
      The metadata, whose lengths are those of a decode at L, and whose window has the D rows of the chain; equal to the
      last bit with and without a source.

    Source: the reuse of fresh draft metadata in SGLang's KPool metadata fusion.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxspec.metadata import KPool, verify_layout
      >>> kpool = KPool(pool=4, topk=16)
      >>> layout = verify_layout(batch_size=1, num_rows=2, pages_per_row=2, swa=False, kpool=kpool, lengths=1)
      >>> of = jnp.array([9]), jnp.array([1]), jnp.array([[0, 0], [1, 2]]), jnp.array([[0, 0], [3, 0], [5, 0]])
      >>> how = dict(page_size=8, limit=16, kpool=kpool)
      >>> first = chain_metadata(*of, PackedMetadata.zeros(layout), **how)
      >>> second = chain_metadata(*of, PackedMetadata.zeros(layout), **how, source=first)      # a copy
      >>> second.metadata.window.full_loc.tolist(), second.metadata.kpool.dsa_cache_seqlens.tolist()
      ([[41, 42]], [9])
    """
    made_of = (seq_lens, req_rows, page_rows.value if isinstance(page_rows, Ids) else page_rows, v2p)
    how = dict(page_size=page_size, limit=limit, kpool=kpool)
    settings = (*how.values(), packed.layout)
    if source is not None and source.serves(made_of, settings):
        packed = dataclasses.replace(packed, buffer=packed.buffer.at[:].set(source.packed.buffer))
    else:
        packed = write_chain(seq_lens, req_rows, page_rows, v2p, packed, backend=backend, **how)
    metadata = read_chain(seq_lens, req_rows, page_rows, packed, state_slots=state_slots, backend=backend, **how)
    return ChainMetadata(metadata, packed, made_of, settings)

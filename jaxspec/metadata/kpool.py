"""Metadata of compressed sparse attention (KPool): what a forward of such a model needs besides lengths and tables.

A *pool* is `pool` consecutive tokens of a request, aligned: token t is in pool t // pool. A pool is *closed* once it is
complete; the tokens behind the last closed pool are the *live tail*. A row sees the best topk // pool closed pools and
the whole tail, so of E visible tokens it attends to

    selected(E) = min(E // pool * pool, topk) + E % pool

which is no steady function: at pool 4, topk 2048, it is 2051 for E = 2051 and 2048 for E = 2052.

B requests, D rows a request, C = ceil(D / pool) pools that D rows can close, P pages a row. An allocator page of
`page_size` tokens holds page_size // pool pools; attention pages are as many tokens. All integers are int32.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from pallas_kernels import KPoolShape, PackedMetadata

Array = jax.Array

SPLIT = 256  # pools that the scoring schedule counts as one piece of work


@dataclasses.dataclass(frozen=True)
class KPool:
    """How a model's sparse layers select, and who prepares it (static).

    Attributes:
      pool: tokens a pool.
      topk: tokens of closed pools that a row may attend to.
      fused: whether one kernel writes all metadata of a forward, or each operation its own part. No value depends on
        it.
    """

    pool: int
    topk: int
    fused: bool = False

    def shape(self, rows: int) -> KPoolShape:
        """The sections of a packed buffer for `rows` rows a request that have lengths."""
        return KPoolShape(pool=self.pool, rows=rows)


@flax.struct.dataclass
class KPoolWritePlan:
    """Where the keys of pools that this forward may close go.

    Attributes:
      req_rows: int32[B], request row of each lane; 0 for padding.
      write_start: int32[B], position of the first row.
      tail_logical_start: int32[B], position at which the pool of that row begins.
      write_loc: int32[B, C], place of candidate c's key, allocator page * pools a page + place in the page. Candidate c
        is pool write_start // pool + c; 0, a place in the sink page, where no row of this forward is in such a pool.
      count: int32[B], rows that are tokens to stay, as far as this forward knows: all D in a verify, whose rejected
        rows are written again; the accepted ones, the bonus included, in a draft extend; 0 for padding. Of the
        candidates, (write_start + count) // pool - write_start // pool are closed.
    """

    req_rows: Array
    write_start: Array
    tail_logical_start: Array
    write_loc: Array
    count: Array


@flax.struct.dataclass
class KPoolMetadata:
    """What sparse layers read. Row r = b * D + j is row j of request b; decode and draft chains have one row a request.

    Tables are the same for all rows of a request and stored once: row r reads them at r // D. `expanded` repeats them.

    Attributes:
      seqlens_expanded: int32[B * D], E, tokens visible to each row, its own included.
      dsa_cache_seqlens: int32[B * D], tokens each row attends to, selected(E).
      dsa_cu_seqlens_k: int32[B * D + 1], exclusive prefix sums of dsa_cache_seqlens.
      pool_seqlens: int32[B * D], closed pools visible to each row, E // pool.
      real_page_table: int32[B, P * pool], physical attention page of each column.
      pooled_page_table: int32[B, P], physical allocator page of each column, which names index pages too; the forward's
        `page_table`.
      write_plan: where new index keys go.
      schedule: int32[S + 1, 2], for each of S processors the row, and the piece of 256 pools in it, at which its share
        of the scoring begins.
      pool, topk: as in `KPool` (static).
    """

    seqlens_expanded: Array
    dsa_cache_seqlens: Array
    dsa_cu_seqlens_k: Array
    pool_seqlens: Array
    real_page_table: Array
    pooled_page_table: Array
    write_plan: KPoolWritePlan
    schedule: Array
    pool: int = flax.struct.field(pytree_node=False)
    topk: int = flax.struct.field(pytree_node=False)

    def expanded(self) -> tuple[Array, Array]:
        """Both tables with a row for every row of the forward: int32[B * D, P * pool] and int32[B * D, P]."""
        rows = self.seqlens_expanded.shape[0] // max(self.real_page_table.shape[0], 1)
        return jnp.repeat(self.real_page_table, rows, axis=0), jnp.repeat(self.pooled_page_table, rows, axis=0)


def from_packed(
    kpool: KPool, packed: PackedMetadata, page_table: Array, req_rows: Array, count: Array
) -> KPoolMetadata:
    """The metadata that `pallas_kernels.forward_metadata` has written to a packed buffer.

    Args:
      page_table, req_rows, count: as the fields that they become.
    """
    sections = packed.kpool()
    plan = KPoolWritePlan(
        req_rows=req_rows,
        write_start=sections.write_start,
        tail_logical_start=sections.tail_logical_start,
        write_loc=sections.write_loc,
        count=count,
    )
    return KPoolMetadata(
        seqlens_expanded=sections.seqlens_expanded,
        dsa_cache_seqlens=sections.dsa_cache_seqlens,
        dsa_cu_seqlens_k=sections.dsa_cu_seqlens_k,
        pool_seqlens=sections.pool_seqlens,
        real_page_table=sections.real_page_table,
        pooled_page_table=page_table,
        write_plan=plan,
        schedule=sections.schedule,
        pool=kpool.pool,
        topk=kpool.topk,
    )


def ordinary_metadata(
    kpool: KPool,
    page_table: Array,
    req_rows: Array,
    count: Array,
    *,
    visible: Array,
    start: Array,
    end: Array,
    page_size: int,
    sms: int = KPoolShape.sms,
) -> KPoolMetadata:
    """The same metadata by separate operations, from tables that are there already.

    Args:
      kpool: pool and topk.
      page_table: int32[B, P], physical allocator pages.
      req_rows, count: int32[B], as in `KPoolWritePlan`.
      visible: int32[B, D], E of each row.
      start: int32[B], position of the first row.
      end: int32[B], tokens cached after the forward, at most the context's end.
      page_size: tokens an allocator page.
      sms: processors of the schedule (static).
    """
    pool, (_, D), P = kpool.pool, visible.shape, page_table.shape[1]
    pools_a_page = page_size // pool  # and tokens an attention page
    lengths = visible.reshape(-1)
    closed = lengths // pool
    selected = jnp.minimum(closed * pool, kpool.topk) + lengths % pool
    sums = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(selected, dtype=jnp.int32)])

    part = jnp.arange(pool, dtype=jnp.int32)
    attention_pages = (page_table[:, :, None] * pool + part).reshape(-1, P * pool)
    column = jnp.arange(P * pool, dtype=jnp.int32)
    attention_pages = jnp.where(column * pools_a_page < end[:, None], attention_pages, 0)

    candidate, exists = _candidates(pool, start, end, -(-D // pool))
    column = jnp.where(exists, candidate // pools_a_page, 0)
    page = jnp.take_along_axis(page_table, column, axis=1, mode="promise_in_bounds")
    place = jnp.where(exists, page * pools_a_page + candidate % pools_a_page, 0)
    plan = KPoolWritePlan(
        req_rows=req_rows, write_start=start, tail_logical_start=start // pool * pool, write_loc=place, count=count
    )
    return KPoolMetadata(
        seqlens_expanded=lengths,
        dsa_cache_seqlens=selected,
        dsa_cu_seqlens_k=sums,
        pool_seqlens=closed,
        real_page_table=attention_pages,
        pooled_page_table=page_table,
        write_plan=plan,
        schedule=_schedule(closed, sms),
        pool=pool,
        topk=kpool.topk,
    )


def _candidates(pool: int, start: Array, end: Array, count: int) -> tuple[Array, Array]:
    """Pools that rows from `start` may close, int32[B, count], and which of them begin before `end`."""
    candidate = (start // pool)[:, None] + jnp.arange(count, dtype=jnp.int32)
    return candidate, candidate * pool < end[:, None]


def _schedule(pool_seqlens: Array, sms: int) -> Array:
    """int32[sms + 1, 2]: the pieces of all rows in one line, cut into shares of equal size; the last ones have one
    more."""
    pieces = -(-jnp.maximum(pool_seqlens, 1) // SPLIT)
    ends = jnp.cumsum(pieces, dtype=jnp.int32)
    rows, total = pieces.shape[0], pieces.sum(dtype=jnp.int32)
    processor = jnp.arange(sms + 1, dtype=jnp.int32)
    first = processor * (total // sms) + jnp.maximum(processor - (sms - total % sms), 0)
    # All compared at once: a binary search is a loop, and a loop of tiny kernels takes long on a GPU.
    row = jnp.searchsorted(ends, first, side="right", method="compare_all").astype(jnp.int32)
    inside = jnp.minimum(row, max(rows - 1, 0))
    if rows == 0:
        return jnp.zeros((sms + 1, 2), jnp.int32)
    piece = jnp.where(row < rows, first - (ends[inside] - pieces[inside]), 0)
    return jnp.stack([row, piece], axis=1)

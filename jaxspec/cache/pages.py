"""Page allocation on the device, a pool for each kind of page: fixed shapes, no host read, usable inside a jitted loop.

A request row owns *virtual* pages, one for each `page_size` tokens, listed in `page_table`. `v2p` maps a virtual page
to the physical page of each storage kind: column 0 FULL, column 1 SWA. The same virtual page names both, and the two
bindings live and die apart: an SWA page is *retired* once every window has moved past it, while the FULL page stays
until the request ends.

Free pages are kept on three stacks (virtual ids, FULL pages, SWA pages), rows of one array. Every index follows the
library's rule that 0 is the sink: row 0 of the page table, page 0 of every kind, cell 0 of every stack. A lane with
nothing to do writes 0 there, so all scatters have in-range indices and need no drop mode.

Worked row, page_size 4, a request of 6 tokens that grows to 9: it owns virtual pages [5, 3] and needs 3, so one page,
say 8, is popped from each stack: page_table row [5, 3, 8, 0, ...], v2p[8] = (FULL page, SWA page).
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = jax.Array
VIRTUAL, FULL, SWA = 0, 1, 2
UNBOUND = -1


def read_first(values: Array, table: Array) -> tuple[Array, Array]:
    """Both as they are, and what is written to the table from here on is written after the values were read from it.

    Left to itself, XLA may move a read behind a write, and must then copy the whole table. For the same reason writes
    of `v2p` take from the values read which lanes are dead: some versions heed nothing else.
    """
    return lax.optimization_barrier((values, table))


def run_if(condition: Array, function, *operands):
    """`function(*operands)` where bool[] `condition`, else the operands as they are, which the result must resemble.

    Not a loop of at most one turn, which would copy less: captured inside another loop, one that ends by a flag that it
    carries took more turns than it should on an H200 (jax 0.11.2).
    """
    return lax.cond(condition, function, lambda *operands: operands, *operands)


@flax.struct.dataclass
class Pages:
    """Who owns which page. R request rows (row 0 is the sink row), P pages a row, NV virtual pages.

    Attributes:
      page_table: int32[R, P], virtual page of each `page_size` tokens of a row; 0 where none is owned.
      v2p: int32[NV, 2], physical FULL and SWA page of a virtual page; -1 unbound; row 0 is (0, 0).
      free: int32[3, NV], stacks of free virtual, FULL and SWA pages; live entries are at 1 .. count, cell 0 is the
        sink.
      free_count: int32[3], how many entries of each stack are live.
      rows: int32[2, R], pages a row owns, and its first page that is still bound in SWA; those before it are retired.
      page_size: tokens a page (static).
      has_swa: whether new virtual pages are bound in SWA too (static).
    """

    page_table: Array
    v2p: Array
    free: Array
    free_count: Array
    rows: Array
    page_size: int = flax.struct.field(pytree_node=False)
    has_swa: bool = flax.struct.field(pytree_node=False)

    @property
    def num_pages(self) -> Array:
        """int32[R], pages a row owns."""
        return self.rows[0]

    @property
    def swa_start(self) -> Array:
        """int32[R], first page of a row that is still bound in SWA."""
        return self.rows[1]

    def fits(self, full: Array, swa: Array, state: Array | int = 0) -> Array:
        """bool[], whether so many pages of each kind are free. States have places of their own, one a row."""
        enough = full <= self.free_count[FULL]
        return enough & (swa <= self.free_count[SWA]) if self.has_swa else enough

    def allocate(
        self, cache, req_rows: Array, lengths: Array, *, max_new: int, least: Array | None = None, backend=None
    ) -> tuple["Pages", Any, Array]:
        """Gives each row the pages it lacks to hold `lengths` tokens; all rows or none.

        Args:
          cache: the K/V buffers, which no allocation of separate pools touches.
          req_rows: int32[B], request row of each lane, all different; 0 asks for nothing.
          lengths: int32[B], tokens each row must have room for; at most P * page_size.
          max_new: most pages one row can lack (static).
          least, backend: as in `UnifiedPages.allocate`; here `lengths` decide, and there is no kernel.

        Returns:
          The pages after, the cache, and bool[], whether there were enough pages. If not, all is as it was.

        Example:
          >>> pages = init_pages(rows=2, pages_per_row=4, num_pages=5, num_swa_pages=0, page_size=4)
          >>> pages, _, ok = pages.allocate(None, jnp.array([1]), jnp.array([5]), max_new=2)
          >>> bool(ok), int(pages.num_pages[1]), pages.page_table[1].tolist()
          (True, 2, [4, 3, 0, 0])
        """
        owned = self.num_pages[req_rows]
        lacking = -(-lengths // self.page_size) - owned
        lacking = jnp.where(req_rows > 0, jnp.maximum(lacking, 0), 0)
        total = lacking.sum(dtype=jnp.int32)  # with x64 on, sums of int32 are int64 unless told
        ok = self.fits(total, total) & (lacking <= max_new).all()
        taken = jnp.where(ok, lacking, 0)

        lane = jnp.arange(max_new, dtype=jnp.int32)
        wanted = lane < taken[:, None]  # [B, max_new]
        nth = (jnp.cumsum(taken, dtype=jnp.int32) - taken)[:, None] + lane  # rank among all pages handed out

        def pop(kind):
            return self.free[kind, jnp.where(wanted, self.free_count[kind] - nth, 0)]

        virtual, full = pop(VIRTUAL), pop(FULL)
        bound = jnp.stack([full, pop(SWA) if self.has_swa else jnp.where(wanted, UNBOUND, 0)], -1)
        used = taken.sum(dtype=jnp.int32) * jnp.array([1, 1, int(self.has_swa)], jnp.int32)
        row, column = jnp.where(wanted, req_rows[:, None], 0), jnp.where(wanted, owned[:, None] + lane, 0)
        after = self.replace(
            page_table=self.page_table.at[row, column].set(virtual),
            v2p=self.v2p.at[virtual].set(bound),
            free_count=self.free_count - used,
            rows=self.rows.at[0, req_rows].add(taken),
        )
        return after, cache, ok

    def retire(
        self, req_rows: Array, lengths: Array, window: int, *, max_retired: int, prefix_sharing: bool = False
    ) -> "Pages":
        """Frees the SWA pages that lie wholly before what later queries of the row can see.

        Args:
          req_rows: int32[B], request row of each lane, all different; 0 retires nothing.
          lengths: int32[B], committed tokens L of each.
          window: tokens a query sees, itself included.
          max_retired: most pages a row retires in this call (static); the rest follows in later calls.
          prefix_sharing: see `retirement_threshold` (static).

        Returns:
          The pages after: the SWA binding of retired pages is -1, their virtual id and FULL page are as they were.
        """
        start = self.swa_start[req_rows]
        threshold = retirement_threshold(lengths, window, self.page_size, prefix_sharing)
        stop = jnp.minimum(threshold // self.page_size, self.num_pages[req_rows])
        stop = jnp.where(req_rows > 0, jnp.clip(stop, start, start + max_retired), start)
        column = start[:, None] + jnp.arange(max_retired, dtype=jnp.int32)
        due = column < stop[:, None]
        virtual = jnp.where(due, self.page_table[req_rows[:, None], jnp.where(due, column, 0)], 0)
        bound, v2p = read_first(self.v2p[virtual, 1], self.v2p)
        free, count = _push(self, (SWA,), (bound,), (due,))
        return self.replace(
            v2p=v2p.at[virtual, 1].set(jnp.where(bound == 0, 0, UNBOUND)),
            free=free,
            free_count=count,
            rows=self.rows.at[1, req_rows].set(stop),
        )

    def release(self, ended: Array) -> "Pages":
        """Takes back every page of the rows that ended.

        Args:
          ended: bool[R], rows whose pages return to the stacks; the sink row never has any.

        Returns:
          The pages after; ended rows own nothing and their page-table rows are 0.
        """
        column = jnp.arange(self.page_table.shape[1], dtype=jnp.int32)
        owned = ended[:, None] & (column < self.num_pages[:, None])  # [R, P]
        virtual = jnp.where(owned, self.page_table, 0)
        physical, v2p = read_first(self.v2p[virtual], self.v2p)
        full, windowed = physical[..., 0], physical[..., 1]
        if self.has_swa:
            kinds, ids = (VIRTUAL, FULL, SWA), (virtual, full, windowed)
            free, count = _push(self, kinds, ids, (owned, owned, owned & (windowed > 0)))
        else:
            free, count = _push(self, (VIRTUAL, FULL), (virtual, full), (owned, owned))
        return self.replace(
            page_table=jnp.where(ended[:, None], 0, self.page_table),
            v2p=v2p.at[virtual].set(jnp.where(physical == 0, 0, UNBOUND)),
            free=free,
            free_count=count,
            rows=jnp.where(ended, 0, self.rows),
        )


def retirement_threshold(lengths: Array, window: int, page_size: int, prefix_sharing: bool) -> Array:
    """int32[B], the position before which SWA pages are retired, rounded down to a page by the caller.

    With L committed tokens the next queries see keys from L - window on. Where finished sequences leave their pages to
    others, a sequence may be cut at floor(L / page) pages and continued from there, so the window behind that cut has
    to stay: whole pages of it, hence L - ceil_to(max(window, page), page).

    Worked example, window 6, page 4, L = 15: the cut is at 12 and needs keys from 6. 15 - 6 = 9 would retire pages 0
    and 1 (keys 0 .. 7); with prefix sharing the threshold is 15 - 8 = 7, which retires page 0 alone.
    """
    kept = -(-max(window, page_size) // page_size) * page_size if prefix_sharing else window
    return jnp.maximum(lengths - kept, 0)


def init_pages(
    *, rows: int, pages_per_row: int, num_pages: int, num_swa_pages: int, page_size: int, seed: int | None = None
) -> Pages:
    """All pages free, every row empty.

    Args:
      rows: R, the sink row included.
      pages_per_row: P.
      num_pages: virtual pages, which is also the number of FULL pages; the sink included.
      num_swa_pages: SWA pages, the sink included; 0 when no layer uses the kind.
      page_size: tokens a page, a power of two.
      seed: None hands pages out in descending order; a number shuffles each stack, which must not change any result.
    """
    rng = None if seed is None else np.random.default_rng(seed)
    free = np.zeros((3, num_pages), np.int32)
    counts = []
    for kind, pages in ((VIRTUAL, num_pages), (FULL, num_pages), (SWA, min(max(num_swa_pages, 1), num_pages))):
        ids = np.arange(1, pages, dtype=np.int32)
        free[kind, 1:pages] = ids if rng is None else rng.permutation(ids)
        counts.append(pages - 1)
    v2p = np.full((num_pages, 2), UNBOUND, np.int32)
    v2p[0] = 0
    return Pages(
        page_table=jnp.zeros((rows, pages_per_row), jnp.int32),
        v2p=jnp.asarray(v2p),
        free=jnp.asarray(free),
        free_count=jnp.asarray(counts, jnp.int32),
        rows=jnp.zeros((2, rows), jnp.int32),
        page_size=page_size,
        has_swa=num_swa_pages > 0,
    )


def _push(pages: Pages, kinds: tuple[int, ...], ids: tuple[Array, ...], live: tuple[Array, ...]) -> tuple[Array, Array]:
    """Puts the live ids on the stacks of their kinds, in one scatter; dead lanes write 0 into cell 0. Returns stacks
    and counts."""
    ids = jnp.stack([each.reshape(-1) for each in ids])
    live = jnp.stack([each.reshape(-1) for each in live])
    rank = jnp.cumsum(live, axis=1, dtype=jnp.int32)
    cell = jnp.where(live, jnp.stack([pages.free_count[kind] for kind in kinds])[:, None] + rank, 0)
    free = pages.free.at[jnp.array(kinds)[:, None], cell].set(jnp.where(live, ids, 0))
    added = [rank[kinds.index(kind), -1] if kind in kinds else jnp.int32(0) for kind in (VIRTUAL, FULL, SWA)]
    return free, pages.free_count + jnp.stack(added)

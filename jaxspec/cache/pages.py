"""Page allocation on the device: fixed shapes, no host read, usable inside a jitted loop.

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

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
VIRTUAL, FULL, SWA = 0, 1, 2
UNBOUND = -1


@flax.struct.dataclass
class Pages:
    """Who owns which page. R request rows (row 0 is the sink row), P pages a row, NV virtual pages.

    Attributes:
      page_table: int32[R, P], virtual page of each `page_size` tokens of a row; 0 where none is owned.
      v2p: int32[NV, 2], physical FULL and SWA page of a virtual page; -1 unbound; row 0 is (0, 0).
      free: int32[3, NV], stacks of free virtual, FULL and SWA pages; live entries are at 1 .. count, cell 0 is the
        sink.
      free_count: int32[3], how many entries of each stack are live.
      num_pages: int32[R], pages a row owns.
      swa_start: int32[R], first page of a row that is still bound in SWA; pages before it are retired.
    """

    page_table: Array
    v2p: Array
    free: Array
    free_count: Array
    num_pages: Array
    swa_start: Array


def init_pages(*, rows: int, pages_per_row: int, num_pages: int, num_swa_pages: int, seed: int | None = None) -> Pages:
    """All pages free, every row empty.

    Args:
      rows: R, the sink row included.
      pages_per_row: P.
      num_pages: virtual pages, which is also the number of FULL pages; the sink included.
      num_swa_pages: SWA pages, the sink included; 0 or 1 when no layer uses the kind.
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
        num_pages=jnp.zeros((rows,), jnp.int32),
        swa_start=jnp.zeros((rows,), jnp.int32),
    )


def allocate(
    pages: Pages, req_rows: Array, lengths: Array, *, page_size: int, max_new: int, swa: bool
) -> tuple[Pages, Array]:
    """Gives each row the pages it lacks to hold `lengths` tokens; all rows or none.

    Args:
      pages: the state before.
      req_rows: int32[B], request row of each lane, all different; 0 asks for nothing.
      lengths: int32[B], tokens each row must have room for; at most P * page_size.
      page_size: tokens a page.
      max_new: most pages one row can lack (static).
      swa: whether new virtual pages are bound in SWA too (static).

    Returns:
      The state after and bool[], whether there were enough pages. When there were not, the state is as it was.

    Example:
      >>> pages = init_pages(rows=2, pages_per_row=4, num_pages=5, num_swa_pages=0)
      >>> pages, ok = allocate(pages, jnp.array([1]), jnp.array([5]), page_size=4, max_new=2, swa=False)
      >>> bool(ok), int(pages.num_pages[1]), pages.page_table[1].tolist()
      (True, 2, [4, 3, 0, 0])
    """
    owned = pages.num_pages[req_rows]
    lacking = jnp.where(req_rows > 0, jnp.maximum((lengths + page_size - 1) // page_size - owned, 0), 0)
    total = lacking.sum(dtype=jnp.int32)  # with x64 on, sums of int32 are int64 unless told
    ok = (total <= pages.free_count[VIRTUAL]) & (lacking <= max_new).all()
    if swa:
        ok &= total <= pages.free_count[SWA]
    taken = jnp.where(ok, lacking, 0)

    lane = jnp.arange(max_new, dtype=jnp.int32)
    wanted = lane < taken[:, None]  # [B, max_new]
    nth = (jnp.cumsum(taken, dtype=jnp.int32) - taken)[:, None] + lane  # rank of the page among all that are handed out

    def pop(kind):
        return pages.free[kind, jnp.where(wanted, pages.free_count[kind] - nth, 0)]

    virtual, full = pop(VIRTUAL), pop(FULL)
    bound = jnp.stack([full, pop(SWA) if swa else jnp.where(wanted, UNBOUND, 0)], -1)
    used = taken.sum(dtype=jnp.int32) * jnp.array([1, 1, int(swa)], jnp.int32)
    return pages.replace(
        page_table=pages.page_table.at[
            jnp.where(wanted, req_rows[:, None], 0), jnp.where(wanted, owned[:, None] + lane, 0)
        ].set(virtual),
        v2p=pages.v2p.at[virtual].set(bound),
        free_count=pages.free_count - used,
        num_pages=pages.num_pages.at[req_rows].add(taken),
    ), ok


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


def retire(pages: Pages, req_rows: Array, first_key: Array, *, page_size: int, max_retired: int) -> Pages:
    """Frees the SWA pages that lie wholly before the first key any later query of the row can see.

    Args:
      pages: the state before.
      req_rows: int32[B], request row of each lane, all different; 0 retires nothing.
      first_key: int32[B], position of that key: committed length - window + 1; values below 0 count as 0.
      page_size: tokens a page.
      max_retired: most pages a row retires in this call (static); the rest follows in later calls.

    Returns:
      The state after: the pages' SWA binding is -1, their virtual id and FULL page are as they were.
    """
    start = pages.swa_start[req_rows]
    stop = jnp.minimum(jnp.maximum(first_key, 0) // page_size, pages.num_pages[req_rows])
    stop = jnp.where(req_rows > 0, jnp.clip(stop, start, start + max_retired), start)
    column = start[:, None] + jnp.arange(max_retired, dtype=jnp.int32)
    due = column < stop[:, None]
    virtual = jnp.where(due, pages.page_table[req_rows[:, None], jnp.where(due, column, 0)], 0)
    free, count = _push(pages, (SWA,), (pages.v2p[virtual, 1],), (due,))
    return pages.replace(
        v2p=pages.v2p.at[virtual, 1].set(jnp.where(due, UNBOUND, 0)),
        free=free,
        free_count=count,
        swa_start=pages.swa_start.at[req_rows].set(stop),
    )


def release(pages: Pages, ended: Array, *, swa: bool) -> Pages:
    """Takes back every page of the rows that ended.

    Args:
      pages: the state before.
      ended: bool[R], rows whose pages return to the stacks; the sink row never has any.
      swa: whether the SWA kind is in use (static).

    Returns:
      The state after; ended rows own nothing and their page-table rows are 0.
    """
    column = jnp.arange(pages.page_table.shape[1], dtype=jnp.int32)
    owned = ended[:, None] & (column < pages.num_pages[:, None])  # [R, P]
    virtual = jnp.where(owned, pages.page_table, 0)
    physical = pages.v2p[virtual]
    full, windowed = physical[..., 0], physical[..., 1]
    if swa:
        free, count = _push(
            pages, (VIRTUAL, FULL, SWA), (virtual, full, windowed), (owned, owned, owned & (windowed > 0))
        )
    else:
        free, count = _push(pages, (VIRTUAL, FULL), (virtual, full), (owned, owned))
    return Pages(
        page_table=jnp.where(ended[:, None], 0, pages.page_table),
        v2p=pages.v2p.at[virtual].set(jnp.where(owned[..., None], UNBOUND, 0)),
        free=free,
        free_count=count,
        num_pages=jnp.where(ended, 0, pages.num_pages),
        swa_start=jnp.where(ended, 0, pages.swa_start),
    )

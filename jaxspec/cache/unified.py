"""Page allocation in one pool that all kinds of page share: fixed shapes, no host read, usable inside a jitted loop.

A request row owns *virtual* pages, as in `jaxspec.cache.pages`; `v2p` maps each to a FULL and, until it is retired, to
an SWA page. Here both kinds lie in one buffer, and what one of them frees the other can have:

    unit 0 | sinks | SWA, growing up -> |        gap        | <- FULL, growing down | end of the pool

The *span* of a kind is the memory between its end of the pool and its frontier. Pages freed inside are *holes*, kept on
a stack and handed out again first. When the gap is too narrow, the kind that has holes to spare gives up its span page
by page: a page that is alive at the frontier moves into a hole, its bytes with it. So nothing is ever lost to
fragmentation, and whether a demand can be met is one comparison: its units against all that is neither alive nor sink.

Worked row, FULL pages of 3 units, SWA of 2, the gap 4 units wide, three holes in SWA: 2 pages of each kind take 6 units
for FULL, as there are no holes, and two of the holes. The gap lacks 2 units, so SWA gives up one page. It spared one.

Every index follows the library's rule that 0 is the sink: row 0 of the page table, virtual page 0, physical page 0 of
each kind, cell 0 of each stack. A lane with nothing to do writes 0 there.
"""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.cache.kv import PoolCache
from jaxspec.cache.layout import PoolLayout
from jaxspec.cache.pages import UNBOUND, retirement_threshold

Array = jax.Array
OWNER, HOLE, PLACE = 0, 1, 2  # rows of UnifiedPages.physical
FULL, SWA = 0, 1  # columns of v2p, and order of the kinds everywhere


def _page_units(layout: PoolLayout) -> np.ndarray:
    """int32[K], units a page of each kind."""
    return np.array([layout.page_units(kind) for kind in layout.kinds], np.int32)


def _ends(layout: PoolLayout) -> tuple[np.ndarray, np.ndarray]:
    """int32[K] twice: the first page that each kind hands out of an empty pool, and the way its span grows."""
    first = [layout.num_pages("full") - 1] + ([layout.min_page("swa")] if "swa" in layout.kinds else [])
    return np.array(first, np.int32), np.array([-1, 1], np.int32)[: len(first)]


def _room(layout: PoolLayout) -> int:
    """Units between the two ends of an empty pool."""
    lowest = layout.kinds[-1]
    return layout.num_pages("full") * layout.page_units("full") - layout.min_page(lowest) * layout.page_units(lowest)


def _columns(layout: PoolLayout) -> np.ndarray:
    """int32[K], column of each kind's page 0 in `UnifiedPages.physical`."""
    return np.array([0, layout.num_pages("full")], np.int32)[: len(layout.kinds)]


def _each(kinds: np.ndarray | Array, like: Array) -> np.ndarray | Array:
    """A value for each kind, [K], as the first axis of [K, ...] arrays whose other axes are those of `like`."""
    return kinds.reshape(-1, *[1] * like.ndim)


def _read_first(values: Array, table: Array) -> tuple[Array, Array]:
    """Both as they are, and what is written to the table from here on is written after the values were read from it.

    Left to itself, XLA may move a read behind a write, and must then copy the whole table. For the same reason writes
    of `v2p` take from the values read which lanes are dead: some versions heed nothing else.
    """
    return lax.optimization_barrier((values, table))


def _before(counts: Array) -> Array:
    """How many the earlier lanes have: exclusive prefix sums along the last axis."""
    return jnp.cumsum(counts, axis=-1, dtype=jnp.int32) - counts


@flax.struct.dataclass
class UnifiedPages:
    """Who owns which page of a pool.

    R request rows (row 0 is the sink row), P pages a row, NV virtual pages, NF and NS physical pages, K kinds (2, or 1
    where no layer is stored in SWA pages; NS is 0 then).

    Attributes:
      page_table: int32[R, P], virtual page of each `page_size` tokens of a row; 0 where none is owned.
      v2p: int32[NV, 2], physical FULL and SWA page of a virtual page; -1 unbound; row 0 is (0, 0).
      rows: int32[2, R]: pages a row owns; its first page that is still bound in SWA.
      free_virtual: int32[NV], stack of free virtual pages, alive at 1 .. count.
      physical: int32[3, NF + NS], a column for each FULL page, then for each SWA page. Its virtual page, -1 for none;
        the stack of the kind's holes, alive at 1 .. count of the kind's columns; where in that stack a hole is.
      counters: int32[1 + 2 K]: free virtual pages, pages in the span of each kind, holes of each kind.
      layout: the pool's layout (static).
    """

    page_table: Array
    v2p: Array
    rows: Array
    free_virtual: Array
    physical: Array
    counters: Array
    layout: PoolLayout = flax.struct.field(pytree_node=False)

    @property
    def num_pages(self) -> Array:
        """int32[R], pages a row owns."""
        return self.rows[0]

    @property
    def swa_start(self) -> Array:
        """int32[R], first page of a row that is still bound in SWA; pages before it are retired."""
        return self.rows[1]

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.layout.page_size

    @property
    def has_swa(self) -> bool:
        """Whether there are SWA pages."""
        return "swa" in self.layout.kinds

    @property
    def free_units(self) -> Array:
        """int32[], units that are neither a page in use nor below the first page that may be: the gap and all holes."""
        return self._gap + (self._holes * _page_units(self.layout)).sum(dtype=jnp.int32)

    def free_pages(self) -> Array:
        """int32[1 + K]: free virtual pages, and pages of each kind that there is room for if no other kind gets any."""
        return jnp.concatenate([self.counters[:1], self.free_units // _page_units(self.layout)])

    def fits(self, full: Array | int, swa: Array | int = 0) -> Array:
        """Whether so many pages of each kind would be granted together: exact, and elementwise on int32 arrays."""
        full, swa = jnp.asarray(full, jnp.int32), jnp.asarray(swa, jnp.int32)
        enough, room = full <= self.counters[0], self.free_units
        wanted = (full, swa) if self.has_swa else (full,)
        for count, units in zip(wanted, _page_units(self.layout), strict=True):
            # Divided, not multiplied: a demand that does not fit may not fit int32 either.
            enough &= count <= room // units
            room = room - jnp.where(enough, count, 0) * units
        return enough

    def allocate(
        self, cache: PoolCache, req_rows: Array, lengths: Array, *, max_new: int
    ) -> tuple["UnifiedPages", PoolCache, Array]:
        """Gives each row the pages it lacks to hold `lengths` tokens, zeroed; all rows or none.

        Args:
          cache: the pool whose pages these are.
          req_rows: int32[B], request row of each lane, all different; 0 asks for nothing.
          lengths: int32[B], tokens each row must have room for.
          max_new: most pages one row can lack (static).

        Returns:
          The state and the pool after, and bool[], whether there was room. There is none if the pages do not fit, or a
          row lacks more than `max_new` or needs more than P pages: then nothing has changed, no byte of the pool
          either. Otherwise every new page is zero over its whole length, and others may have moved: `v2p` says where
          to, their bytes are the same. In place where state and pool are donated.

        Example:
          >>> from jaxspec.cache import LayerSpec, init_pool
          >>> layout = PoolLayout.for_pages([LayerSpec(1, 4), LayerSpec(1, 4, 8, "swa")], full=3, swa=3, page_size=4)
          >>> pages, cache = init_unified(layout, rows=2, pages_per_row=4), init_pool(layout)
          >>> allocate = jax.jit(UnifiedPages.allocate, static_argnames="max_new")
          >>> pages, cache, ok = allocate(pages, cache, jnp.array([1]), jnp.array([9]), max_new=3)
          >>> bool(ok), pages.page_table[1].tolist(), pages.v2p[4:].tolist(), bool(pages.fits(1, 1))
          (True, [6, 5, 4, 0], [[4, 3], [5, 2], [6, 1]], False)
        """
        columns = self.page_table.shape[1]
        owned = self.num_pages[req_rows]
        lacking = jnp.where(req_rows > 0, jnp.maximum(-(-lengths // self.page_size) - owned, 0), 0)
        total = jnp.minimum(lacking, max_new).sum(dtype=jnp.int32)
        ok = self.fits(total, total) & ((lacking <= max_new) & (owned + lacking <= columns)).all()
        taken, total = jnp.where(ok, lacking, 0), jnp.where(ok, total, 0)

        pages, buffer = self._make_room(cache.buffer, total)
        order = jnp.arange(max(lacking.size * max_new, 1), dtype=jnp.int32)
        handed, tables = pages._next(order)
        handed = jnp.where(order < total, handed, 0)  # [K, B * max_new], in the order of the ranks below
        buffer = _zero(self.layout, buffer, handed, total)
        lane = jnp.arange(max_new, dtype=jnp.int32)
        wanted = lane < taken[:, None]  # [B, max_new]
        rank = jnp.where(wanted, _before(taken)[:, None] + lane, 0)
        top = jnp.where(wanted, pages.counters[0] - rank, 0)
        virtual, free_virtual = _read_first(pages.free_virtual[top], pages.free_virtual)
        physical = jnp.where(wanted, handed[:, rank], 0)  # [K, B, max_new]
        bound = physical if self.has_swa else jnp.stack([physical[0], jnp.where(wanted, UNBOUND, 0)])
        column = jnp.where(wanted, _each(_columns(self.layout), wanted) + physical, 0)
        recycled = jnp.minimum(total, pages._holes)
        return (
            pages.replace(
                page_table=pages.page_table.at[
                    jnp.where(wanted, req_rows[:, None], 0), jnp.where(wanted, owned[:, None] + lane, 0)
                ].set(virtual),
                v2p=pages.v2p.at[virtual].set(jnp.moveaxis(bound, 0, -1)),
                rows=pages.rows.at[0, req_rows].add(taken),
                free_virtual=free_virtual,
                physical=tables.at[OWNER, column].set(virtual),
                counters=pages.counters + jnp.concatenate([-total[None], total - recycled, -recycled]),
            ),
            cache.replace(buffer=buffer),
            ok,
        )

    def retire(
        self, req_rows: Array, lengths: Array, window: int, *, max_retired: int, prefix_sharing: bool = False
    ) -> "UnifiedPages":
        """Frees the SWA pages that lie wholly before what later queries of the row can see.

        Args:
          req_rows: int32[B], request row of each lane, all different; 0 retires nothing.
          lengths: int32[B], committed tokens L of each.
          window: tokens a query sees, itself included: the most of any layer of the kind (static).
          max_retired: most pages a row retires in this call (static); the rest follows in later calls.
          prefix_sharing: see `jaxspec.cache.pages.retirement_threshold` (static).

        Returns:
          The state after: the SWA binding of retired pages is -1, their virtual and FULL pages are as they were.
        """
        if not self.has_swa:
            return self
        start = self.swa_start[req_rows]
        stop = retirement_threshold(lengths, window, self.page_size, prefix_sharing) // self.page_size
        stop = jnp.clip(stop, start, jnp.minimum(self.num_pages[req_rows], start + max_retired))
        count = stop - start
        lane = jnp.arange(max_retired, dtype=jnp.int32)
        due = lane < count[:, None]  # [B, max_retired]
        virtual = self.page_table[jnp.where(due, req_rows[:, None], 0), jnp.where(due, start[:, None] + lane, 0)]
        rank = _before(count)[:, None] + lane
        bound, v2p = _read_first(self.v2p[virtual, SWA], self.v2p)
        freed = self._add_holes([SWA], bound[None], due[None], rank[None])
        return self.replace(
            v2p=v2p.at[virtual, SWA].set(jnp.where(bound > 0, UNBOUND, 0)),
            rows=self.rows.at[1, req_rows].set(stop),
            physical=freed,
            counters=self.counters.at[-1].add(count.sum(dtype=jnp.int32)),
        )

    def release(self, ended: Array) -> "UnifiedPages":
        """Takes back every page of the rows that ended.

        Args:
          ended: bool[R]; the sink row never has any pages.

        Returns:
          The state after; ended rows own nothing and their page-table rows are 0.
        """
        owned, start = jnp.where(ended, self.rows, 0)
        column = jnp.arange(self.page_table.shape[1], dtype=jnp.int32)
        live = column < owned[:, None]  # [R, P]
        virtual = jnp.where(live, self.page_table, 0)
        # What a row owns are its first columns, and what is bound in SWA the last of those: ranks need no scan of them.
        first = jnp.stack([jnp.zeros_like(start), start])[: len(self.layout.kinds)]  # [K, R]
        rank = _before(owned - first)[..., None] + column - first[..., None]
        bound, v2p = _read_first(self.v2p[virtual], self.v2p)  # [R, P, 2]
        returned = (owned - first).sum(axis=1, dtype=jnp.int32)
        return self.replace(
            page_table=jnp.where(ended[:, None], 0, self.page_table),
            v2p=v2p.at[virtual].set(jnp.where(bound == 0, 0, UNBOUND)),
            rows=jnp.where(ended, 0, self.rows),
            free_virtual=self.free_virtual.at[jnp.where(live, self.counters[0] + 1 + rank[FULL], 0)].set(virtual),
            physical=self._add_holes(
                range(len(first)), jnp.moveaxis(bound, -1, 0)[: len(first)], live & (column >= first[..., None]), rank
            ),
            counters=self.counters + jnp.concatenate([returned[:1], jnp.zeros_like(returned), returned]),
        )

    @property
    def _span(self) -> Array:
        """int32[K], pages between the kind's end of the pool and its frontier."""
        return self.counters[1 : 1 + len(self.layout.kinds)]

    @property
    def _holes(self) -> Array:
        """int32[K], free pages among those."""
        return self.counters[1 + len(self.layout.kinds) :]

    @property
    def _gap(self) -> Array:
        """int32[], units between the frontiers."""
        return _room(self.layout) - (self._span * _page_units(self.layout)).sum(dtype=jnp.int32)

    def _next(self, rank: Array) -> tuple[Array, Array]:
        """int32[K, ...], the page of each kind that is handed out after `rank` others, holes first, then the gap; and
        `physical`, to be written after it was read here."""
        first, step = (_each(end, rank) for end in _ends(self.layout))
        span, holes = _each(self._span, rank), _each(self._holes, rank)
        recycled = rank < holes
        cell = jnp.where(recycled, _each(_columns(self.layout), rank) + holes - rank, 0)
        hole, physical = _read_first(self.physical[HOLE, cell], self.physical)
        return jnp.where(recycled, hole, first + step * (span + rank - holes)), physical

    def _make_room(self, buffer: Array, count: Array) -> tuple["UnifiedPages", Array]:
        """Widens the gap until `count` pages of each kind can be handed out, given that they fit."""
        if not self.has_swa:
            return self, buffer
        units = _page_units(self.layout)
        spare = self._holes - count
        lacking = (jnp.maximum(-spare, 0) * units).sum(dtype=jnp.int32) - self._gap
        # At most one kind has to give: while one lacks pages, only the other can have holes to spare.
        moves = jnp.where(spare > 0, -(-jnp.maximum(lacking, 0) // units), 0)
        kind = jnp.where(moves[SWA] > 0, SWA, FULL)

        def turn(carry):
            left, pages, buffer = carry
            pages, buffer = pages._retreat(buffer, kind)
            return left - 1, pages, buffer

        _, pages, buffer = lax.while_loop(lambda carry: carry[0] > 0, turn, (moves.max(), self, buffer))
        return pages, buffer

    def _retreat(self, buffer: Array, kind: Array) -> tuple["UnifiedPages", Array]:
        """Takes one page off the span of a kind that has a hole, moving what lives there."""
        (first, step), origin = _ends(self.layout), jnp.asarray(_columns(self.layout))[kind]
        frontier = jnp.asarray(first)[kind] + jnp.asarray(step)[kind] * (self._span[kind] - 1)
        found, physical = _read_first(
            self.physical[jnp.array([OWNER, PLACE, HOLE]), origin + jnp.stack([frontier, frontier, self._holes[kind]])],
            self.physical,
        )
        # A page that is alive fills the hole on top of the stack. A hole leaves the stack, and the top takes its cell.
        owner, cell, top = found
        alive = owner > 0
        rows = jnp.array([OWNER, OWNER, HOLE, PLACE])
        column = origin + jnp.stack([frontier, top, cell, top])
        value = jnp.stack([jnp.int32(UNBOUND), owner, top, cell])
        written = jnp.stack([alive, alive, ~alive, ~alive])
        pages = self.replace(
            v2p=self.v2p.at[jnp.where(alive, owner, 0), kind].set(jnp.where(alive, top, 0)),
            physical=physical.at[rows, jnp.where(written, column, 0)].set(jnp.where(written, value, 0)),
            counters=self.counters.at[jnp.array([1, 1 + len(self.layout.kinds)]) + kind].add(-1),
        )
        for each, units in enumerate(_page_units(self.layout)):
            moved = alive & (kind == each)  # if not, page 0 is copied onto itself
            source, place = jnp.where(moved, frontier, 0) * units, jnp.where(moved, top, 0) * units
            content = lax.dynamic_slice(buffer, (source, jnp.int32(0)), (units, buffer.shape[1]))
            buffer = lax.dynamic_update_slice(buffer, content, (place, jnp.int32(0)))
        return pages, buffer

    def _add_holes(self, kinds, page: Array, live: Array, rank: Array) -> Array:
        """`physical` with the live pages on the hole stacks of their kinds: [len(kinds), ...] arrays, ranks from 0."""
        kinds = list(kinds)
        origin = _each(_columns(self.layout)[kinds], page[0])
        cell = _each(self._holes[np.array(kinds)], page[0]) + 1 + rank
        rows = _each(jnp.array([OWNER, HOLE, PLACE]), page)
        column = jnp.where(live, origin + jnp.stack([page, cell, page]), 0)
        return self.physical.at[rows, column].set(
            jnp.where(live, jnp.stack([jnp.full_like(page, UNBOUND), page, cell]), 0)
        )


def _zero(layout: PoolLayout, buffer: Array, pages: Array, count: Array) -> Array:
    """Zeroes the first `count` of int32[K, N] pages, in as many turns, whatever N is."""

    def turn(rank, buffer):
        for page, units in zip(pages[:, rank], _page_units(layout), strict=True):
            zeros = jnp.zeros((units, buffer.shape[1]), buffer.dtype)
            buffer = lax.dynamic_update_slice(buffer, zeros, (page * units, jnp.int32(0)))
        return buffer

    return lax.fori_loop(jnp.int32(0), count, turn, buffer)


def init_unified(layout: PoolLayout, *, rows: int, pages_per_row: int, seed: int | None = None) -> UnifiedPages:
    """All pages free, every row empty.

    Args:
      layout: the pool's.
      rows: R, the sink row included.
      pages_per_row: P.
      seed: None hands pages out from the ends of the pool inwards; a number scatters virtual and physical pages (half
        of the pool starts as shuffled holes of each kind), which must not change any result.
    """
    full, columns, kinds = layout.num_pages("full"), _columns(layout), len(layout.kinds)
    rng = None if seed is None else np.random.default_rng(seed)
    free_virtual = np.arange(full - layout.min_page("full") + 1, dtype=np.int32)
    physical = np.zeros((3, sum(map(layout.num_pages, layout.kinds))), np.int32)
    span = np.zeros(kinds, np.int32)
    for kind, (name, column, first, step) in enumerate(zip(layout.kinds, columns, *_ends(layout), strict=True)):
        physical[OWNER, column + layout.min_page(name) : column + layout.num_pages(name)] = UNBOUND
        if rng is not None:
            span[kind] = _room(layout) // kinds // layout.page_units(name)
            cells = np.arange(1, span[kind] + 1, dtype=np.int32)
            holes = first + step * rng.permutation(cells - 1)
            physical[HOLE, column + cells] = holes
            physical[PLACE, column + holes] = cells
    if rng is not None:
        free_virtual[1:] = rng.permutation(free_virtual[1:])
    v2p = np.full((len(free_virtual), 2), UNBOUND, np.int32)
    v2p[0] = 0
    return UnifiedPages(
        page_table=jnp.zeros((rows, pages_per_row), jnp.int32),
        v2p=jnp.asarray(v2p),
        rows=jnp.zeros((2, rows), jnp.int32),
        free_virtual=jnp.asarray(free_virtual),
        physical=jnp.asarray(physical),
        counters=jnp.asarray(np.concatenate([[len(free_virtual) - 1], span, span]), jnp.int32),
        layout=layout,
    )

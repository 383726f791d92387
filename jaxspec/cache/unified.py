"""Page allocation in one pool that all kinds of page share: fixed shapes, no host read, usable inside a jitted loop.

A request row owns *virtual* pages, as in `jaxspec.cache.pages`; `v2p` maps each to a FULL and, until it is retired, to
an SWA page. Where layers have states the row also owns a virtual *slot*, which names the page of its state. Here all
kinds lie in one buffer, and what one of them frees the others can have:

    unit 0 | sinks | states, growing up -> | SWA, growing up -> |     gap     | <- FULL, growing down | end of the pool

The *span* of a kind is the memory from its first page to its last. Pages freed inside are *holes*, kept on a stack and
handed out again first; then the span grows. Where it cannot, `jaxspec.cache.compaction` moves pages out of the way. So
nothing is ever lost to fragmentation, and whether a demand can be met is one comparison, `PoolLayout.holds`.

Every index follows the library's rule that 0 is the sink: row 0 of the page table, virtual page 0, slot 0, physical
page 0 of each kind, cell 0 of each stack. A lane with nothing to do writes 0 there.
"""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache.compaction import FREE, FULL, HOLE, MAP, OWNER, PLACE, SWA, columns, make_room
from jaxspec.cache.layout import PoolLayout
from jaxspec.cache.pages import UNBOUND, read_first, retirement_threshold
from jaxspec.cache.pool import PoolCache
from pallas_kernels import page_zero

Array = jax.Array


def each(kinds: np.ndarray | Array, like: Array) -> np.ndarray | Array:
    """A value for each kind, [K], as the first axis of [K, ...] arrays whose other axes are those of `like`."""
    return kinds.reshape(-1, *[1] * like.ndim)


def _before(counts: Array) -> Array:
    """How many the earlier lanes have: exclusive prefix sums along the last axis."""
    return jnp.cumsum(counts, axis=-1, dtype=jnp.int32) - counts


@flax.struct.dataclass
class UnifiedPages:
    """Who owns which page of a pool.

    R request rows (row 0 is the sink row), P pages a row, NV virtual pages, K kinds in the order of `layout.kinds`.

    Attributes:
      page_table: int32[R, P], virtual page of each `page_size` tokens of a row; 0 where none is owned.
      v2p: int32[NV, 2], physical FULL and SWA page of a virtual page; -1 unbound; row 0 is (0, 0).
      rows: int32[3, R]: pages a row owns; its first page that is still bound in SWA; its state's slot, 0 for none.
      free_virtual: int32[NV], stack of free virtual pages, alive at 1 .. count.
      slots: int32[2, R]: the page of each slot's state, -1 for none; the stack of free slots, alive at 1 .. count.
        int32[2, 1] where no layer has a state.
      physical: int32[3, pages of all kinds], a column for each page, kind after kind. Its virtual page or slot, -1 for
        none; the stack of the kind's holes, alive at 1 .. count of the kind's columns; where in that stack a hole is.
      counters: int32[3 + 2 K]: free virtual pages, free slots, the first page of the SWA span, pages in the span of
        each kind, holes of each kind.
      layout: the pool's layout (static).
    """

    page_table: Array
    v2p: Array
    rows: Array
    free_virtual: Array
    slots: Array
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
    def state_slot(self) -> Array:
        """int32[R], the slot of a row's state, 0 where it has none."""
        return self.rows[2]

    @property
    def state_v2p(self) -> Array:
        """int32[R], the page of kind "state" that a slot names, -1 for none; slot 0 is in page 0."""
        return self.slots[MAP]

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.layout.page_size

    @property
    def has_swa(self) -> bool:
        """Whether there are SWA pages."""
        return "swa" in self.layout.kinds

    @property
    def has_state(self) -> bool:
        """Whether there are pages of states."""
        return "state" in self.layout.kinds

    @property
    def swa_low(self) -> Array:
        """int32[], first page of the SWA span."""
        return self.counters[2]

    @property
    def span(self) -> Array:
        """int32[K], pages from the first to the last of each kind, holes included."""
        return self.counters[3 : 3 + len(self.layout.kinds)]

    @property
    def holes(self) -> Array:
        """int32[K], free pages among those."""
        return self.counters[3 + len(self.layout.kinds) :]

    def counts(self, full, swa=0, state=0) -> dict[str, Array]:
        """The given numbers as int32 arrays, by kind, of the kinds that there are."""
        given = {"full": full, "swa": swa, "state": state}
        return {kind: jnp.asarray(given[kind], jnp.int32) for kind in self.layout.kinds}

    def fits(self, full: Array | int, swa: Array | int = 0, state: Array | int = 0) -> Array:
        """Whether so many pages of each kind would be granted together: exact, and elementwise on int32 arrays."""
        counts = self.counts(full, swa, state)
        alive = dict(zip(self.layout.kinds, self.span - self.holes, strict=True))
        enough = counts["full"] <= self.counters[0]
        for kind, count in counts.items():
            enough &= count <= self.layout.num_pages(kind) - self.layout.min_page(kind) - alive[kind]
        if self.has_state:
            enough &= counts["state"] <= self.counters[1]
        wanted = {kind: alive[kind] + jnp.where(enough, count, 0) for kind, count in counts.items()}
        return enough & self.layout.holds(**wanted)

    def short(self, asked: Array, lengths: Array) -> Array:
        """bool[], whether a row lacks pages to hold so many tokens, or a slot for its state.

        Args:
          asked: bool[R], which rows are looked at; not the sink row.
          lengths: int32[R], tokens.
        """
        lacks = self.num_pages * self.page_size < lengths
        if self.has_state:
            lacks |= self.state_slot == 0
        return (asked & lacks).any()

    def allocate(
        self,
        cache: PoolCache,
        req_rows: Array,
        lengths: Array,
        *,
        max_new: int,
        least: Array | None = None,
        backend: str | None = None,
    ) -> tuple["UnifiedPages", PoolCache, Array]:
        """Gives each row the pages it lacks to hold `lengths` tokens, zeroed, and a slot for its state; all or none.

        Args:
          cache: the pool whose pages these are.
          req_rows: int32[B], request row of each lane, all different; 0 asks for nothing.
          lengths: int32[B], tokens each row gets room for.
          max_new: most pages one row can lack (static).
          least: int32[B], at most `lengths`: tokens that each row gets room for if `lengths` do not fit.
          backend: who zeroes the pages, see `pallas_kernels` (static).

        Returns:
          The state and the pool after, and bool[], whether there was room. There is none if the pages do not fit, or a
          row lacks more than `max_new` or needs more than P pages: then no table and no byte of the pool has
          changed. Otherwise every new FULL and SWA page is zero over its whole length (a new state holds anything), and
          others may have moved: `v2p` says where to, their bytes are the same. In place where state and pool are
          donated.

        Example:
          >>> from jaxspec.cache import LayerSpec, init_pool
          >>> layout = PoolLayout.for_pages([LayerSpec(1, 4), LayerSpec(1, 4, 8, "swa")], full=3, swa=3, page_size=4)
          >>> pages, cache = init_unified(layout, rows=2, pages_per_row=4), init_pool(layout)
          >>> allocate = jax.jit(UnifiedPages.allocate, static_argnames="max_new")
          >>> pages, cache, ok = allocate(pages, cache, jnp.array([1]), jnp.array([9]), max_new=3)
          >>> bool(ok), pages.page_table[1].tolist(), pages.v2p[4:].tolist(), bool(pages.fits(1, 1))
          (True, [6, 5, 4, 0], [[4, 3], [5, 2], [6, 1]], False)
        """
        real = req_rows > 0
        owned = self.num_pages[req_rows]
        stateless = real & (self.state_slot[req_rows] == 0) if self.has_state else jnp.zeros_like(real)
        states = stateless.sum(dtype=jnp.int32)
        ok, taken = jnp.bool_(False), jnp.zeros_like(owned)
        for tokens in [lengths] if least is None else [least, lengths]:  # the last that fits
            lacking = jnp.where(real, jnp.maximum(-(-tokens // self.page_size) - owned, 0), 0)
            total = jnp.minimum(lacking, max_new).sum(dtype=jnp.int32)
            fits = self.fits(total, total, states)
            fits &= ((lacking <= max_new) & (owned + lacking <= self.page_table.shape[1])).all()
            ok, taken = ok | fits, jnp.where(fits, lacking, taken)
        total, states, stateless = taken.sum(dtype=jnp.int32), jnp.where(ok, states, 0), stateless & ok

        demand = jnp.stack(list(self.counts(total, total, states).values()))
        pages, buffer = make_room(self, cache.buffer, demand)
        order = jnp.arange(max(owned.size * max(max_new, 1), 1), dtype=jnp.int32)
        handed, tables = pages._next(order)
        handed = jnp.where(order < each(demand, order), handed, 0)  # [K, B * max_new], in the order of the ranks below
        of_tokens = 1 + self.has_swa
        units = tuple(map(self.layout.page_units, self.layout.kinds[:of_tokens]))
        buffer = page_zero(buffer, handed[:of_tokens], page_units=units, backend=backend)
        lane = jnp.arange(max_new, dtype=jnp.int32)
        wanted = lane < taken[:, None]  # [B, max_new]
        rank = jnp.where(wanted, _before(taken)[:, None] + lane, 0)
        top = jnp.where(wanted, pages.counters[0] - rank, 0)
        virtual, free_virtual = read_first(pages.free_virtual[top], pages.free_virtual)
        bound = [jnp.where(wanted, handed[kind, rank], 0) for kind in range(of_tokens)]
        column = jnp.stack([jnp.where(wanted, columns(self.layout)[kind] + b, 0) for kind, b in enumerate(bound)])
        owners = tables.at[OWNER, column].set(virtual)
        bound = bound if self.has_swa else [*bound, jnp.where(wanted, UNBOUND, 0)]
        slot, slots = jnp.zeros_like(req_rows), pages.slots
        if self.has_state:
            rank_of_state = jnp.where(stateless, _before(stateless.astype(jnp.int32)), 0)
            state = jnp.where(stateless, handed[-1, rank_of_state], 0)
            slot, slots = read_first(slots[FREE, jnp.where(stateless, pages.counters[1] - rank_of_state, 0)], slots)
            slots = slots.at[MAP, slot].set(state)
            owners = owners.at[OWNER, jnp.where(stateless, columns(self.layout)[-1] + state, 0)].set(slot)
        recycled = jnp.minimum(demand, pages.holes)
        used = jnp.concatenate([jnp.stack([-total, -states, jnp.int32(0)]), demand - recycled, -recycled])
        after = pages.replace(
            page_table=pages.page_table.at[
                jnp.where(wanted, req_rows[:, None], 0), jnp.where(wanted, owned[:, None] + lane, 0)
            ].set(virtual),
            v2p=pages.v2p.at[virtual].set(jnp.stack(bound, axis=-1)),
            rows=pages.rows.at[:, req_rows].add(jnp.stack([taken, jnp.zeros_like(taken), slot])),
            free_virtual=free_virtual,
            slots=slots,
            physical=owners,
            counters=pages.counters + used,
        )
        return after, cache.replace(buffer=buffer), ok

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
        bound, v2p = read_first(self.v2p[virtual, SWA], self.v2p)
        return self.replace(
            v2p=v2p.at[virtual, SWA].set(jnp.where(bound > 0, UNBOUND, 0)),
            rows=self.rows.at[1, req_rows].set(stop),
            physical=self._add_holes([SWA], bound[None], due[None], rank[None]),
            counters=self.counters.at[3 + len(self.layout.kinds) + SWA].add(count.sum(dtype=jnp.int32)),
        )

    def release(self, ended: Array) -> "UnifiedPages":
        """Takes back every page and the state of the rows that ended.

        Args:
          ended: bool[R]; the sink row never has any pages.

        Returns:
          The state after; ended rows own nothing and their page-table rows are 0.
        """
        owned, start, slot = jnp.where(ended, self.rows, 0)
        column = jnp.arange(self.page_table.shape[1], dtype=jnp.int32)
        live = column < owned[:, None]  # [R, P]
        virtual = jnp.where(live, self.page_table, 0)
        # What a row owns are its first columns, and what is bound in SWA the last of those: ranks need no scan of them.
        first = jnp.stack([jnp.zeros_like(start), start][: 1 + self.has_swa])  # [1 or 2, R]
        rank = _before(owned - first)[..., None] + column - first[..., None]
        bound, v2p = read_first(self.v2p[virtual], self.v2p)  # [R, P, 2]
        returned = (owned - first).sum(axis=1, dtype=jnp.int32)
        after = self.replace(
            page_table=jnp.where(ended[:, None], 0, self.page_table),
            v2p=v2p.at[virtual].set(jnp.where(bound == 0, 0, UNBOUND)),
            rows=jnp.where(ended, 0, self.rows),
            free_virtual=self.free_virtual.at[jnp.where(live, self.counters[0] + 1 + rank[FULL], 0)].set(virtual),
            physical=self._add_holes(
                range(len(first)), jnp.moveaxis(bound, -1, 0)[: len(first)], live & (column >= first[..., None]), rank
            ),
        )
        stateful = jnp.int32(0)
        if self.has_state:
            dead = slot > 0
            rank_of_state = _before(dead.astype(jnp.int32))
            state, slots = read_first(self.slots[MAP, slot], self.slots)
            slots = slots.at[MAP, slot].set(jnp.where(state > 0, UNBOUND, 0))
            slots = slots.at[FREE, jnp.where(dead, self.counters[1] + 1 + rank_of_state, 0)].set(slot)
            kind = len(self.layout.kinds) - 1
            holes = after._add_holes([kind], state[None], dead[None], rank_of_state[None])
            after, stateful = after.replace(slots=slots, physical=holes), dead.sum(dtype=jnp.int32)
        freed = list(self.counts(returned[FULL], returned[-1], stateful).values())
        added = jnp.stack([returned[FULL], stateful, jnp.int32(0), *[jnp.int32(0)] * len(freed), *freed])
        return after.replace(counters=self.counters + added)

    def _next(self, rank: Array) -> tuple[Array, Array]:
        """int32[K, ...], the page of each kind that is handed out after `rank` others, holes first, then those beside
        the span; and `physical`, to be written after it was read here."""
        span, holes = each(self.span, rank), each(self.holes, rank)
        recycled = rank < holes
        cell = jnp.where(recycled, each(columns(self.layout), rank) + holes - rank, 0)
        hole, physical = read_first(self.physical[HOLE, cell], self.physical)
        beside = span + rank - holes
        first = {"full": self.layout.num_pages("full") - 1, "swa": self.swa_low}
        if self.has_state:
            first["state"] = self.layout.min_page("state")
        fresh = [
            first[kind] + (-new if kind == "full" else new) for kind, new in zip(self.layout.kinds, beside, strict=True)
        ]
        return jnp.where(recycled, hole, jnp.stack(fresh)), physical

    def _add_holes(self, kinds, page: Array, live: Array, rank: Array) -> Array:
        """`physical` with the live pages on the hole stacks of their kinds: [len(kinds), ...] arrays, ranks from 0."""
        kinds = list(kinds)
        origin = each(columns(self.layout)[kinds], page[0])
        cell = each(self.holes[np.array(kinds)], page[0]) + 1 + rank
        rows = each(jnp.array([OWNER, HOLE, PLACE]), page)
        column = jnp.where(live, origin + jnp.stack([page, cell, page]), 0)
        return self.physical.at[rows, column].set(
            jnp.where(live, jnp.stack([jnp.full_like(page, UNBOUND), page, cell]), 0)
        )


def init_unified(layout: PoolLayout, *, rows: int, pages_per_row: int, seed: int | None = None) -> UnifiedPages:
    """All pages free, every row empty.

    Args:
      layout: the pool's.
      rows: R, the sink row included.
      pages_per_row: P.
      seed: None hands pages out from the ends of the pool inwards; a number scatters virtual and physical pages (most
        of the pool starts as shuffled holes of each kind), which must not change any result.
    """
    kinds = layout.kinds
    rng = None if seed is None else np.random.default_rng(seed)
    shuffled = (lambda ids: ids) if rng is None else rng.permutation
    free_virtual = np.arange(layout.num_pages("full") - layout.min_page("full") + 1, dtype=np.int32)
    free_virtual[1:] = shuffled(free_virtual[1:])
    slots = np.full((2, rows if "state" in kinds else 1), UNBOUND, np.int32)
    slots[MAP, 0] = 0
    slots[FREE] = np.arange(slots.shape[1], dtype=np.int32)
    slots[FREE, 1:] = shuffled(slots[FREE, 1:])

    span = dict.fromkeys(kinds, 0)
    floor = layout.above_states(0)
    share = (layout.num_pages("full") * layout.page_units("full") - floor) // len(kinds)  # of each kind, scattered
    first = {"state": layout.min_page("state")} if "state" in kinds else {}
    if rng is not None:
        span["full"] = share // layout.page_units("full")
        if "state" in kinds:
            span["state"] = share // layout.page_units("state")
    if "swa" in kinds:
        units = layout.page_units("swa")
        first["swa"] = -(-layout.above_states(span.get("state", 0)) // units)
        if rng is not None:
            span["swa"] = max((floor + share * (len(kinds) - 1)) // units - first["swa"], 0)
    first["full"] = layout.num_pages("full") - span["full"]
    physical = np.zeros((3, sum(map(layout.num_pages, kinds))), np.int32)
    for kind, column in zip(kinds, columns(layout), strict=True):
        physical[OWNER, column + layout.min_page(kind) : column + layout.num_pages(kind)] = UNBOUND
        cells = np.arange(1, span[kind] + 1, dtype=np.int32)
        holes = first[kind] + shuffled(cells - 1)
        physical[HOLE, column + cells] = holes
        physical[PLACE, column + holes] = cells
    v2p = np.full((len(free_virtual), 2), UNBOUND, np.int32)
    v2p[0] = 0
    counters = [len(free_virtual) - 1, slots.shape[1] - 1, first.get("swa", 0), *span.values(), *span.values()]
    return UnifiedPages(
        page_table=jnp.zeros((rows, pages_per_row), jnp.int32),
        v2p=jnp.asarray(v2p),
        rows=jnp.zeros((3, rows), jnp.int32),
        free_virtual=jnp.asarray(free_virtual),
        slots=jnp.asarray(slots),
        physical=jnp.asarray(physical),
        counters=jnp.asarray(counters, jnp.int32),
        layout=layout,
    )

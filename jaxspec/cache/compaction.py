"""Making room in a unified pool: pages move into holes until every kind can have what it is about to be given.

The three spans lie side by side, states at the bottom, SWA above them, FULL at the top, and only holes and the gap
between SWA and FULL are free (see `jaxspec.cache.unified`). One turn of the loop does one of these:

    FULL, SWA or states give up the page at the free end of their span
    SWA gives up its lowest page, where the states are to grow
    SWA takes in the page below its span, where the states no longer are; it is a hole then

A page that is given up and alive moves into a hole of its kind, its bytes with it; one that is a hole leaves the stack.

Worked row, FULL pages of 3 units, SWA of 2, the gap 4 units wide, three holes in SWA: 2 pages of each kind take 6 units
for FULL, as there are no holes, and two of the holes. The gap lacks 2 units, so SWA gives up one page. It spared one.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.cache.layout import PoolLayout
from jaxspec.cache.pages import UNBOUND, read_first

Array = jax.Array
OWNER, HOLE, PLACE = 0, 1, 2  # rows of UnifiedPages.physical
FULL, SWA = 0, 1  # columns of UnifiedPages.v2p
MAP, FREE = 0, 1  # rows of UnifiedPages.slots


def columns(layout: PoolLayout) -> np.ndarray:
    """int32[K], column of each kind's page 0 in `UnifiedPages.physical`."""
    pages = [layout.num_pages(kind) for kind in layout.kinds]
    return np.cumsum([0, *pages[:-1]], dtype=np.int32)


def make_room(pages, buffer: Array, demand: Array) -> tuple:
    """Moves pages until `demand` of each kind can be handed out of holes and next to the spans, given that it fits.

    Args:
      pages: `UnifiedPages`.
      buffer: the pool.
      demand: int32[K], pages of each kind.

    Returns:
      Pages and pool after. No page has changed its owner or a byte of its content. The loop has as many turns as pages
      are given up or taken in, none in the common case.
    """
    layout = pages.layout
    if layout.kinds == ("full",):
        return pages, buffer

    def busy(carry):
        lacking, vacating, *_ = _judge(carry[0], demand)
        return lacking | vacating

    pages, buffer = lax.while_loop(busy, lambda carry: _turn(*carry, demand), (pages, buffer))
    return pages.replace(counters=pages.counters.at[2].set(_swa_low(pages, demand))), buffer


def _states_end(pages, demand: Array) -> Array | int:
    """The unit at which the states' span will end."""
    if not pages.has_state:
        return pages.layout.above_states(0)
    return pages.layout.above_states(pages.span[-1] + jnp.maximum(demand[-1] - pages.holes[-1], 0))


def _lowest(pages, demand: Array) -> Array:
    """The lowest SWA page that the states' span will leave free."""
    return -(-_states_end(pages, demand) // pages.layout.page_units("swa"))


def _swa_low(pages, demand: Array) -> Array:
    """The first page of the SWA span. One without pages is wherever it is wanted, above the states."""
    if not (pages.has_swa and pages.has_state):
        return pages.swa_low
    return jnp.where(pages.span[SWA] == 0, _lowest(pages, demand), pages.swa_low)


def _judge(pages, demand: Array) -> tuple[Array, Array, Array, Array]:
    """Four bool[]: whether the kinds still lack room between them; whether SWA must leave its lowest page to the
    states; whether it could spare a hole; whether it could take one in."""
    layout, spare = pages.layout, pages.holes - demand
    full = layout.num_pages("full") - pages.span[FULL] + jnp.minimum(spare[FULL], 0)
    room = full * layout.page_units("full")
    no = jnp.bool_(False)
    if not pages.has_swa:
        return _states_end(pages, demand) > room, no, no, no
    lowest, low, span = _lowest(pages, demand), _swa_low(pages, demand), pages.span[SWA]
    # The pages that it must leave cost as many holes, or as many new pages at the other end.
    left = jnp.minimum(jnp.maximum(lowest - low, 0), span)
    kept = spare[SWA] - left
    end = jnp.maximum(low, lowest) + span - left + jnp.maximum(-kept, 0)
    return end > room // layout.page_units("swa"), lowest > low, kept > 0, lowest < low


def _turn(pages, buffer: Array, demand: Array) -> tuple:
    """One page less, or one more, in one of the spans; nothing if there is nothing to do."""
    layout, kinds = pages.layout, len(pages.layout.kinds)
    lacking, vacating, sparing, taking = _judge(pages, demand)
    from_full = lacking & (pages.holes[FULL] > demand[FULL])
    from_swa = lacking & ~from_full & sparing
    takes = lacking & ~from_full & ~from_swa & taking
    leaves, due = ~lacking & vacating, lacking | vacating
    from_states = lacking & ~(from_full | from_swa | takes)

    kind = jnp.where(from_full, FULL, jnp.where(from_states, kinds - 1, SWA if pages.has_swa else FULL))
    span, holes, low = pages.span[kind], pages.holes[kind], pages.swa_low
    states_low = layout.min_page("state") if pages.has_state else 0
    page = jnp.where(from_full, layout.num_pages("full") - span, jnp.where(from_states, states_low, low) + span - 1)
    page = jnp.where(leaves, low, jnp.where(takes, low - 1, page))

    origin = jnp.asarray(columns(layout))[kind]
    rows = jnp.array([OWNER, PLACE, HOLE])
    found, physical = read_first(pages.physical[rows, origin + jnp.stack([page, page, holes])], pages.physical)
    owner, cell, top = found
    alive = (owner > 0) & ~takes & due
    fresh = leaves & (holes == 0)  # no hole to move to: the page above the span becomes one
    top = jnp.where(fresh, low + span, jnp.where(takes, page, top))
    cell = jnp.where(takes, holes + 1, cell)
    # A page that is alive fills the hole on top of the stack. A hole leaves the stack, and the top takes its cell. One
    # that is taken in goes on top.
    column = origin + jnp.stack([page, top, cell, top])
    value = jnp.stack([jnp.int32(UNBOUND), owner, top, cell])
    written = jnp.stack([alive, alive, ~alive, ~alive]) & due
    physical = physical.at[jnp.array([OWNER, OWNER, HOLE, PLACE]), jnp.where(written, column, 0)].set(
        jnp.where(written, value, 0)
    )
    change = jnp.where(fresh | ~due, 0, jnp.where(takes, 1, -1))
    lower = leaves.astype(jnp.int32) - takes.astype(jnp.int32)
    pages = pages.replace(
        physical=physical,
        counters=pages.counters.at[jnp.stack([2 + 0 * kind, 3 + kind, 3 + kinds + kind])].add(
            jnp.stack([lower, change, change])
        ),
    )
    in_state = (kind == kinds - 1) & pages.has_state
    of_tokens, of_state = alive & ~in_state, alive & in_state
    pages = pages.replace(
        v2p=pages.v2p.at[jnp.where(of_tokens, owner, 0), jnp.where(of_tokens, kind, 0)].set(
            jnp.where(of_tokens, top, 0)
        )
    )
    if pages.has_state:
        slots = pages.slots.at[MAP, jnp.where(of_state, owner, 0)].set(jnp.where(of_state, top, 0))
        pages = pages.replace(slots=slots)
    for each, name in enumerate(layout.kinds):
        moved, units = alive & (kind == each), layout.page_units(name)  # if not, page 0 is copied onto itself
        source, place = jnp.where(moved, page, 0) * units, jnp.where(moved, top, 0) * units
        content = lax.dynamic_slice(buffer, (source, jnp.int32(0)), (units, buffer.shape[1]))
        buffer = lax.dynamic_update_slice(buffer, content, (place, jnp.int32(0)))
    return pages, buffer

"""The metadata kernels as plain jnp: what they must compute, and what runs where no kernel does.

Each function takes a kernel's static description, its inputs and its flat destination buffers, and returns the buffers.
Every index is made valid before it is used (row 0 or page 0 in place of what is out of range), and the value masked
after, since XLA clamps or wraps an index out of range without a word.
"""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.buffers import read


def lengths(spec, inputs: tuple, buffers: tuple) -> tuple:
    """cache_seqlens and cu_seqlens_k."""
    length = inputs[0] + spec.seq_len_delta
    sums = lax.cumsum(length, axis=0)
    prefix = jnp.concatenate([jnp.zeros(1, jnp.int32), sums])
    return spec.destination.write(buffers, {"cache_seqlens": length, "cu_seqlens_k": prefix})


def decode(spec, inputs: tuple, buffers: tuple) -> tuple:
    """Lengths and the page tables."""
    seq_lens, req_rows, source, *tables = inputs
    description, shift, pages = spec.source, spec.source.shift, spec.max_pages
    column = lax.iota(jnp.int32, pages)[None, :]
    length = (seq_lens + spec.seq_len_delta)[:, None]
    live = column < (jnp.maximum(length, 0) + (1 << shift) - 1) >> shift
    position = column << shift
    page, offset = _pages(description, source, req_rows[:, None], position, live)
    values = {}
    for name, page_map in (("page_table", spec.full), ("swa_page_table", spec.swa)):
        if page_map is not None:
            section = spec.destination[name]
            old = read(buffers[section.buffer], section)
            new = jnp.maximum(_lookup(page_map, tables, page, offset, shift), 0)
            tail = 0 if spec.zero_tail else old[:, :pages]
            values[name] = jnp.concatenate([jnp.where(live, new, tail), old[:, pages:]], axis=1)
    return spec.destination.write(lengths(spec, inputs, buffers), values)


def window(spec, inputs: tuple, buffers: tuple) -> tuple:
    """Write locations, positions and the anchor column."""
    start, req_rows, source, *rest = inputs
    tables, rest = rest[: spec.map_operands], rest[spec.map_operands :]
    description, shift = spec.source, spec.source.shift
    position = start[:, None] + lax.iota(jnp.int32, spec.D)[None, :]
    live = jnp.ones(position.shape, bool)
    if spec.limit is not None:
        live = position < (rest[-1][0] if spec.limit == "operand" else spec.limit)
    column = description.column(position)
    live &= (column >= 0) & (column < description.columns)
    entry = _entries(description, source, req_rows[:, None], column, live)
    page, offset = description.split(entry, position)
    values = {"positions": position, "virtual_loc": jnp.where(live, description.virtual(entry, offset), 0)}
    for name, page_map in (("full_loc", spec.full), ("swa_loc", spec.swa)):
        if page_map is not None:
            physical = _lookup(page_map, tables, page, offset, shift)
            values[name] = jnp.where(physical < 0, 0, (physical << shift) + offset)
    if spec.has_anchor:
        section = spec.destination["anchor_ids"]
        values["anchor_ids"] = read(buffers[section.buffer], section).at[:, 0].set(rest[0])
    return spec.destination.write(buffers, values)


def _pages(description, source, req_rows, position, live):
    """(page, offset) of positions; page -1 where not live or past the source."""
    column = description.column(position)
    live = live & (column < description.columns)
    return description.split(_entries(description, source, req_rows, column, live), position)


def _entries(description, source, req_rows, column, live):
    """source[row, column] where live, else -1."""
    row = description.row(req_rows)
    return jnp.where(live, source[row, jnp.where(live, column, 0)], -1)


def _lookup(page_map, tables, page, offset, shift):
    """Physical page, or -1 for what is unbound, negative or out of range."""
    index, inside = page_map.key(page, offset, shift)
    if page_map.style == "identity":
        return jnp.where(inside, page, -1)
    index = jnp.where(inside, index, 0)
    table = tables[page_map.operand]
    value = table[index, page_map.column] if page_map.style == "pair" else table[index]
    return jnp.where(inside, page_map.page(value, shift), -1)

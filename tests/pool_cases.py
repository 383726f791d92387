"""Small unified pools, and the allocator's calls on them as compiled programs that many tests share."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import quick_compile

from jaxspec.cache import LayerSpec, PoolLayout, StatePart, StateSpec, init_pool, init_unified
from jaxspec.cache.pages import run_if

LANES = 40  # of `grow`, most of them padding, so that one program serves many cases


def pool(page_size, full_layers, swa_layers, state_units=0, *, full=9, swa=7, states=2, extra=0):
    """A layer takes two units of a token's entry. A state takes `state_units`, an even number; 0 for a model without
    states. `extra` units at the top are no whole page."""
    layers = [LayerSpec(1, 4)] * full_layers + [LayerSpec(1, 4, 8, "swa")] * swa_layers
    if state_units:
        layers.append(StateSpec((StatePart("conv", (4,)), StatePart("temporal", (state_units - 1, 4)))))
    layout = PoolLayout.for_pages(layers, full=full, swa=swa, state=states, page_size=page_size)
    return dataclasses.replace(layout, units=layout.units + extra)


def state(layout, *, rows=3, columns=5, seed=None):
    return init_unified(layout, rows=rows, pages_per_row=columns, seed=seed), init_pool(layout)


@functools.partial(jax.jit, static_argnames="max_new", compiler_options=quick_compile.options())
def give(pages, cache, rows, lengths, *, max_new):
    return pages.allocate(cache, rows, lengths, max_new=max_new)


def grow(pages, cache, wishes, *, ok=True, max_new=12):
    """Asks for {row: length}, says whether that must be granted, and returns state and pool."""
    lanes = np.zeros((2, LANES), np.int32)
    lanes[:, : len(wishes)] = list(wishes), list(wishes.values())
    pages, cache, granted = give(pages, cache, *lanes, max_new=max_new)
    assert granted == ok
    return pages, cache


@functools.partial(jax.jit, static_argnums=2, static_argnames="max_retired", compiler_options=quick_compile.options())
def retire(pages, lanes, window, *, max_retired):
    return pages.retire(*lanes, window, max_retired=max_retired)


@functools.partial(jax.jit, compiler_options=quick_compile.options())
def release(pages, ended):
    return pages.release(ended)


def end(pages, row):
    return release(pages, np.arange(pages.page_table.shape[0]) == row)


def same(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


def asked(pages, rows, lengths):
    """What lanes ask `short` for, by row: bool[R] and int32[R]."""
    none = jnp.zeros(pages.page_table.shape[0], jnp.int32)
    return none.at[rows].set(1).at[0].set(0) > 0, none.at[rows].set(lengths)


def round_of_pages(carried, rows, lengths, ended, backend=None):
    """What a round does to the pages."""

    def allocate(pages, cache, _):
        return pages.allocate(cache, rows, lengths, max_new=3, backend=backend)

    short = carried[0].short(*asked(carried[0], rows, lengths - 4))
    pages, cache, ok = run_if(short, allocate, *carried, jnp.bool_(True))
    pages = pages.retire(rows, lengths, 6, max_retired=2, prefix_sharing=True)
    return (pages.release(ended), cache), ok

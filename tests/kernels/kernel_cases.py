"""Running a metadata kernel in a test: quick compilation, poisoned destinations, wider buffers, request tables."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick_compile

from pallas_kernels import DecodeTables, MetadataLayout, PackedMetadata, View, WindowBuffers, checked, mosaic

STALE = -7  # in every destination cell before a call
GUARD = -99  # in the cells of a wider buffer that belong to none of its views

GPU = [
    pytest.param("triton", marks=pytest.mark.gpu),
    pytest.param("mosaic", marks=[pytest.mark.gpu, pytest.mark.skipif(bool(mosaic.unavailable()), reason="old jax")]),
]
BACKENDS = ["reference", "interpret", "checked", *GPU]
QUICK = ["reference", "checked", *GPU]  # for sweeps over shapes, each of which the interpreter compiles for a second
EVERY_BACKEND = [*BACKENDS, pytest.param(None, marks=pytest.mark.gpu)]


def run(function, out, **arguments):
    """function(out=out, ...), compiled once for its static arguments and its forms; arrays and Views are operands.

    A buffer that several Views share is one operand. 'checked' runs eagerly; it must not read around a View.
    """
    arrays = {k: v for k, v in arguments.items() if isinstance(v, np.ndarray | jax.Array | View)}
    static = {k: v for k, v in arguments.items() if k not in arrays}
    if static.get("backend") == "checked":
        dead = {name: ~_cells(array) for name, array in arrays.items() if isinstance(array, View)}
        with checked.declare(dead=dead):
            return jax.tree.map(np.asarray, function(**arguments, out=out))
    leaves, tree = jax.tree.flatten((arrays, out))
    operands = list({id(leaf): leaf for leaf in leaves}.values())
    numbers = {id(leaf): number for number, leaf in enumerate(operands)}
    order = tuple(numbers[id(leaf)] for leaf in leaves)
    return jax.tree.map(np.asarray, _compiled(function, tuple(sorted(static.items())), tree, order)(operands))


@functools.cache
def _compiled(function, static, tree, order):
    def call(operands):
        arrays, out = jax.tree.unflatten(tree, [operands[number] for number in order])
        return function(**arrays, out=out, **dict(static))

    return jax.jit(call, compiler_options=quick_compile.options())


def in_buffers(arrays: dict, places: dict) -> dict:
    """The arrays with those that have a place as Views of wider buffers, all other cells of which are guards.

    A place is (name of the buffer, its columns or None for one dimension, offset, strides).
    """
    cells = {}
    for name, (buffer, *_) in places.items():
        cells.setdefault(buffer, []).append(_linear(np.shape(arrays[name]), *places[name][2:]))
    buffers = {}
    for name, (buffer, columns, *_) in places.items():
        size = 1 + max(int(c.max(initial=0)) for c in cells[buffer]) + 4
        flat = buffers.setdefault(buffer, np.full(-(-size // (columns or 1)) * (columns or 1), GUARD, np.int32))
        flat[_linear(np.shape(arrays[name]), *places[name][2:])] = arrays[name]
    shapes = {buffer: (-1,) if columns is None else (-1, columns) for buffer, columns, *_ in places.values()}
    placed = {buffer: jnp.asarray(flat.reshape(shapes[buffer])) for buffer, flat in buffers.items()}
    views = {
        name: View(placed[buffer], offset, np.shape(arrays[name]), strides)
        for name, (buffer, _, offset, strides) in places.items()
    }
    return arrays | views


def _linear(shape, offset, strides):
    """Cell of the buffer in which each entry lies."""
    return offset + sum(i * stride for i, stride in zip(np.indices(shape), strides, strict=True))


def _cells(view):
    """True in the cells of the buffer that belong to the view."""
    mine = np.zeros(view.buffer.size, bool)
    mine[_linear(view.shape, view.offset, view.strides)] = True
    return mine.reshape(view.buffer.shape)


def assert_buffers_equal(actual: dict, expected: dict):
    """Whole buffers of Views, guard cells and all; arrays as they are."""
    assert {n for n, a in actual.items() if a is not None} == {n for n, a in expected.items() if a is not None}
    for name, array in actual.items():
        if array is not None:
            cells = [x.buffer if isinstance(x, View) else x for x in (array, expected[name])]
            np.testing.assert_array_equal(*cells, err_msg=name)


def int32(*values):
    return np.array(values, np.int32)


def sparse(rows, entries, fill=-1):
    """int32[rows] of `fill` but for the entries {index: value}."""
    table = np.full(rows, fill, np.int32)
    for index, value in entries.items():
        table[index] = value
    return table


def stale(*shape):
    return jnp.full(shape, STALE, jnp.int32)


def decode_out(batch, pages, has_swa):
    swa = stale(batch, pages) if has_swa else None
    return DecodeTables(stale(batch), stale(batch + 1), stale(batch, pages), swa)


def window_out(batch, rows, has_swa, has_anchor=True):
    columns = [stale(batch, rows) for _ in range(5)]
    return WindowBuffers(*columns[:2], columns[2] if has_swa else None, columns[3], columns[4] if has_anchor else None)


def packed_out(layout: MetadataLayout):
    return PackedMetadata(stale(layout.size), layout)


def to_dict(out):
    """A destination as writable NumPy arrays by name, for the oracle."""
    return {k: None if v is None else np.array(v) for k, v in out._asdict().items()}


def assert_equal(actual, expected: dict):
    for name, value in actual._asdict().items():
        if value is None:
            assert expected.get(name) is None, name
        else:
            np.testing.assert_array_equal(value, expected[name], err_msg=name)


def request_table(rng, rows, columns, virtual_pages, bad=0.15):
    """int32[rows, columns] of virtual pages, some -1 and some past every map; row 0 is the sink row."""
    table = rng.integers(0, virtual_pages, (rows, columns))
    wrong = rng.choice([-1, virtual_pages, virtual_pages + 5], table.shape)
    table = np.where(rng.random(table.shape) < bad, wrong, table)
    table[0] = 0
    return table.astype(np.int32)


def page_map(rng, virtual_pages, unbound):
    """int32[virtual_pages]: a permutation of the pages with some unbound; page 0 is the sink."""
    table = 1 + rng.permutation(virtual_pages)
    table = np.where(rng.random(virtual_pages) < unbound, -1, table)
    table[0] = 0
    return table.astype(np.int32)


def as_tokens(pages, page_size):
    """The token-granular form of a page-granular table; a negative page gives negative tokens."""
    tokens = pages[:, :, None].astype(np.int64) * page_size + np.arange(page_size)
    return np.where(pages[:, :, None] < 0, pages[:, :, None], tokens).reshape(len(pages), -1).astype(np.int32)


def edge_lengths(page_size, full, batch):
    """Lengths around the edges of a page and of the cache, as many as the batch has rows."""
    edges = [page_size, 0, full, page_size + 1, 1, page_size - 1, full - 1]
    return np.array([min(max(edges[b % len(edges)], 0), full) for b in range(batch)], np.int32)


def problem(page_size, batch, columns, seed=0):
    """Edge lengths, padded rows and bad ids over a random page-granular table."""
    rng = np.random.default_rng(seed)
    virtual_pages = 2 * columns + 3
    rows = np.arange(1, batch + 1, dtype=np.int32)
    rows[1::3] = 0
    return {
        "lengths": edge_lengths(page_size, columns * page_size, batch),
        "rows": rows,
        "pages": request_table(rng, batch + 1, columns, virtual_pages),
        "full": page_map(rng, virtual_pages, 0.1),
        "swa": page_map(rng, virtual_pages - 2, 0.4),
    }

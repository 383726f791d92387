"""Paged attention against float64 loops, with wild values in every cell that must not matter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from jaxspec.attention import paged_attention

PAGE, P = 4, 6
HEADS, KV_HEADS, WIDTH = 4, 2, 8
LENGTHS = (0, 1, 3, 4, 5, 7, 8, 9, 11, 12, 13, 16)  # committed tokens, around the edges of pages and windows
WINDOWS = (None, 1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 100)


@functools.cache
def compiled(window, page_size=PAGE, scale=None):
    return jax.jit(functools.partial(paged_attention, page_size=page_size, window=window, scale=scale))


def problem(seed, D, committed=LENGTHS, *, page_size=PAGE, heads=HEADS, kv_heads=KV_HEADS, window=None):
    """Queries behind each request's committed tokens, rows scattered over shuffled pages, and wild values elsewhere.

    Lane 0 is padding: no keys, and a table of zeros. Columns of the table that no query needs name any page in range.
    """
    rng = np.random.default_rng(seed)
    B, pages = len(committed), 1 + len(committed) * P
    committed = np.array(committed)
    q = rng.standard_normal((B, D, heads, WIDTH)).astype(np.float32)
    positions = (committed[:, None] + np.arange(D)).astype(np.int32)
    lengths = np.where(committed > 0, committed + D, 0).astype(np.int32)
    table = (1 + rng.permutation(pages - 1)).reshape(B, P).astype(np.int32)
    table[committed == 0] = 0

    kv = np.full((pages * page_size, 2, kv_heads, WIDTH), np.nan, np.float32)
    kv[rng.random(len(kv)) < 0.5] = 3e38
    for b in range(B):
        start = 0 if window is None else max(0, committed[b] - window + 1)
        for p in range(start, lengths[b]):
            kv[table[b, p // page_size] * page_size + p % page_size] = rng.standard_normal((2, kv_heads, WIDTH))
        needed = range(start // page_size, -(-lengths[b] // page_size))
        stale = [column for column in range(P) if column not in needed]
        table[b, stale] = rng.integers(0, pages, len(stale))
    return q, kv, table, positions, lengths


def check(arguments, *, page_size=PAGE, window=None, scale=None):
    out = np.asarray(compiled(window, page_size, scale)(*arguments))
    want = oracles.attention(*arguments, page_size=page_size, window=window, scale=scale)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=2e-6)
    return out


@pytest.mark.parametrize("D", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("window", WINDOWS)
def test_ragged_lengths(D, window):
    arguments = problem(D, D, window=window)
    out = check(arguments, window=window)
    assert (out[0] == 0).all()  # padding sees no key


@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("window", [None, 3])
def test_page_sizes(page_size, window):
    committed = (0, 1, 2) if page_size == 1 else (0, page_size - 1, page_size, page_size + 1, 3 * page_size)
    check(problem(1, 3, committed, page_size=page_size, window=window), page_size=page_size, window=window)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 1), (6, 3)])
def test_head_groups(heads, kv_heads):
    check(problem(2, 3, heads=heads, kv_heads=kv_heads))


def test_scale():
    arguments = problem(3, 2)
    assert not np.allclose(check(arguments, scale=1.0), check(arguments, scale=0.25), atol=1e-3)


@pytest.mark.parametrize("window", [None, 1, 5])
def test_where_the_pages_lie_does_not_matter(window):
    """All pages moved and the table with them: equal to the last bit."""
    q, kv, table, positions, lengths = problem(4, 4, window=window)
    to = np.random.default_rng(0).permutation(len(kv) // PAGE)
    moved = np.empty_like(kv.reshape(-1, PAGE, *kv.shape[1:]))
    moved[to] = kv.reshape(moved.shape)
    here = compiled(window)(q, kv, table, positions, lengths)
    there = compiled(window)(q, moved.reshape(kv.shape), to[table].astype(np.int32), positions, lengths)
    np.testing.assert_array_equal(here, there)


def test_each_request_by_itself():
    """A request's rows do not depend on who else is in the batch, or in which lane it is."""
    arguments = problem(5, 3, window=PAGE)
    out = check(arguments, window=PAGE)
    q, kv, table, positions, lengths = arguments
    order = np.random.default_rng(1).permutation(len(lengths))
    again = compiled(PAGE)(q[order], kv, table[order], positions[order], lengths[order])
    np.testing.assert_array_equal(out[order], again)


def test_bfloat16_keeps_its_type():
    """Scores and sums are float32 inside: the error is that of rounding inputs and output."""
    q, kv, table, positions, lengths = problem(6, 2)
    short = [np.asarray(x.astype(jnp.bfloat16).astype(np.float32)) for x in (jnp.asarray(q), jnp.asarray(kv))]
    out = compiled(None)(jnp.asarray(q, jnp.bfloat16), jnp.asarray(kv, jnp.bfloat16), table, positions, lengths)
    assert out.dtype == jnp.bfloat16
    want = oracles.attention(*short, table, positions, lengths, page_size=PAGE)
    np.testing.assert_allclose(np.asarray(out.astype(jnp.float32)), want, rtol=0.02, atol=0.02)


def test_heads_that_do_not_divide():
    q, kv, table, positions, lengths = problem(7, 1, heads=3, kv_heads=2)
    with pytest.raises(ValueError, match="3 heads, kv 2"):
        paged_attention(q, kv, table, positions, lengths, page_size=PAGE)

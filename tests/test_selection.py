"""Scores, selection, expansion and attention of pooled rows against loops, with wild values behind every live part."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.attention.selection import expand_pools, pool_scores, select_pools, selected_attention

WILD = np.array([np.nan, np.inf, -np.inf, 3e38], np.float32)


def wild(rng, *shape):
    return rng.choice(WILD, shape)


# Scores ---------------------------------------------------------------------------------------------------------------


def score_problem(seed, B, D, n, heads=3, width=128):
    rng = np.random.default_rng(seed)
    query, keys = (
        jnp.asarray(rng.standard_normal(s) * 100, jnp.float8_e4m3fn) for s in ((B, D, heads, width), (B, n, width))
    )
    weights = rng.standard_normal((B, D, heads)).astype(np.float32)
    return query, weights, keys, (2.0 ** rng.integers(-9, 3, (B, n))).astype(np.float32)


def oracle_scores(query, weights, keys, scales):
    query, keys = (np.asarray(x.astype(jnp.float32), np.float64) for x in (query, keys))
    out = np.zeros((*query.shape[:2], keys.shape[1]))
    for b, d, h in np.ndindex(*query.shape[:3]):
        out[b, d] += float(weights[b, d, h]) * np.maximum(keys[b] @ query[b, d, h], 0)
    return out * np.asarray(scales, np.float64)[:, None]


@pytest.mark.parametrize(("B", "D", "n"), [(1, 1, 1), (2, 3, 70), (3, 1, 5), (2, 2, 0), (0, 2, 4)])
def test_scores(B, D, n):
    arguments = score_problem(n, B, D, n)
    got, want = jax.jit(pool_scores)(*arguments), oracle_scores(*arguments)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6 * np.abs(want).max(initial=1e-9))


def test_scores_of_keys_from_bytes():
    query, weights, keys, scales = score_problem(1, 2, 2, 9)
    cells = jax.lax.bitcast_convert_type(keys, jnp.uint8)
    again = jax.jit(lambda x: pool_scores(query, weights, jax.lax.bitcast_convert_type(x, jnp.float8_e4m3fn), scales))
    np.testing.assert_array_equal(again(cells), jax.jit(pool_scores)(query, weights, keys, scales))


def test_a_wild_key_spoils_its_own_score_only():
    query, weights, keys, scales = score_problem(2, 2, 3, 20)
    clean = np.array(jax.jit(pool_scores)(query, weights, keys, scales))
    dirty = jax.jit(pool_scores)(query, weights, keys.at[:, 7:].set(jnp.nan), scales)
    np.testing.assert_array_equal(dirty[..., :7], clean[..., :7])


@pytest.mark.parametrize("B", [1, 9])
def test_bits_of_a_score_do_not_depend_on_other_rows(B):
    """A row scores the same when it is decoded alone and when it is verified among others."""
    query, weights, keys, scales = score_problem(3, B, 6, 50)
    whole = jax.jit(pool_scores)(query, weights, keys, scales)
    for rows in (slice(0, 1), slice(3, 4), slice(2, 6)):
        np.testing.assert_array_equal(
            jax.jit(pool_scores)(query[:, rows], weights[:, rows], keys, scales), whole[:, rows]
        )
    if B > 1:
        part = jax.jit(pool_scores)(query[2:5], weights[2:5], keys[2:5], scales[2:5])
        np.testing.assert_array_equal(part, whole[2:5])


# Selection ------------------------------------------------------------------------------------------------------------


@functools.cache
def selected(budget):
    return jax.jit(functools.partial(select_pools, budget=budget))


def oracle_select(scores, lens, budget):
    out = np.full((*lens.shape, budget), -1)
    for b, d in np.ndindex(*lens.shape):
        row = [float(x) for x in scores[b, d, : lens[b, d]]]
        best = sorted(range(len(row)), key=lambda g: (np.isnan(row[g]), 0.0 if np.isnan(row[g]) else -row[g], g))
        chosen = sorted(best[:budget])
        out[b, d, : len(chosen)] = chosen
    return out


def check_selected(scores, lens, budget):
    scores, lens = np.asarray(scores, np.float32), np.asarray(lens, np.int32)
    got = selected(budget)(scores, lens)
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, oracle_select(scores, lens, budget))
    return got


@pytest.mark.parametrize("budget", [1, 2, 8, 9, 40])
@pytest.mark.parametrize("n", [1, 8, 9, 33])
def test_selection_at_every_length(n, budget):
    rng = np.random.default_rng(n)
    lens = np.arange(n + 1).reshape(-1, 1).repeat(2, axis=1)
    scores = rng.standard_normal((n + 1, 2, n)).astype(np.float32)
    behind = np.arange(n) >= lens[..., None]
    check_selected(np.where(behind, wild(rng, *scores.shape), scores), lens, budget)


def test_ties_go_to_the_first():
    check_selected([[[2, 1, 2, 3, 2, 2]]], [[6]], 3)
    assert check_selected(np.zeros((1, 1, 300)), [[300]], 5).tolist() == [[[0, 1, 2, 3, 4]]]
    assert check_selected([[[-0.0, 0.0, -0.0, 0.0]]], [[4]], 2).tolist() == [[[0, 1]]]
    rng = np.random.default_rng(0)
    check_selected(rng.integers(-2, 3, (3, 4, 50)), rng.integers(0, 51, (3, 4)), 7)


def test_numbers_before_nan():
    nan, inf = np.nan, np.inf
    scores = [[[nan, -inf, 1, nan, inf, -3e38, nan]], [[nan] * 7], [[-nan, nan, 0, -inf, -inf, nan, -nan]]]
    for budget in (1, 3, 6):
        for length in range(8):
            check_selected(scores, [[length]] * 3, budget)


def test_neighbouring_floats_are_told_apart():
    """Also the smallest: around zero, around one, at the ends."""
    points = np.array([-3e38, -1, -1e-30, 1e-30, 1, 3e38], np.float32)
    row = np.unique(np.concatenate([points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(9))]))
    row = np.random.default_rng(1).permutation(row)[None, None]
    for budget in (2, 5, 9, row.size - 1):
        check_selected(row, [[row.size]], budget)


def test_no_pools_at_all():
    assert selected(4)(jnp.zeros((2, 3, 0)), jnp.zeros((2, 3), jnp.int32)).tolist() == [[[-1] * 4] * 3] * 2
    assert selected(4)(jnp.zeros((0, 3, 5)), jnp.zeros((0, 3), jnp.int32)).shape == (0, 3, 4)


# Expansion ------------------------------------------------------------------------------------------------------------


@functools.cache
def expanded(pool):
    return jax.jit(functools.partial(expand_pools, pool=pool))


@pytest.mark.parametrize(("pool", "budget"), [(1, 4), (2, 3), (4, 8), (8, 2)])
def test_every_length(pool, budget):
    """Over three times the budget: the count is dsa_len, and the tokens are those of the pools and the live tail."""
    rng = np.random.default_rng(pool)
    lengths = np.arange(3 * pool * budget + pool + 1, dtype=np.int32)
    scores = rng.standard_normal((lengths.size, 1, 4 * budget)).astype(np.float32)
    pools = selected(budget)(scores, lengths[:, None] // pool)
    pools, tokens, count = map(np.asarray, (pools, *expanded(pool)(pools, lengths[:, None])))
    assert tokens.dtype == count.dtype == jnp.int32 and tokens.shape == (lengths.size, 1, pool * budget + pool - 1)
    for length, row, chosen, found in zip(lengths, tokens[:, 0], pools[:, 0], count[:, 0], strict=True):
        want = [pool * g + i for g in chosen if g >= 0 for i in range(pool)]
        want += range(length - length % pool, length)
        assert row.tolist() == want + [-1] * (len(row) - len(want))
        assert found == len(want) == min(length // pool * pool, pool * budget) + length % pool
        assert want == sorted(set(want)) and all(t < length for t in want)


def test_lengths_of_the_public_configuration():
    lengths = [0, 3, 4, 63, 2044, 2047, 2048, 2049, 2051, 2052, 2055, 2056, 65536, 1000003]
    pools = jnp.broadcast_to(jnp.arange(512), (1, len(lengths), 512))
    tokens, count = expanded(4)(pools, jnp.array([lengths]))
    assert count.tolist() == [[0, 3, 4, 63, 2044, 2047, 2048, 2049, 2051, 2048, 2051, 2048, 2048, 2051]]
    assert ((np.asarray(tokens) >= 0).sum(axis=-1) == count).all()
    assert tokens[0, -1, 2048:].tolist() == [1000000, 1000001, 1000002]


def test_negative_lengths_are_empty():
    tokens, count = expanded(4)(jnp.full((1, 1, 2), -1), jnp.array([[-3]]))
    assert count.tolist() == [[0]] and (np.asarray(tokens) == -1).all()


# Attention ------------------------------------------------------------------------------------------------------------


def attention_problem(seed, B, D, M, heads, kv_heads, width, value_width=None):
    """A count for every length up to M, over and over; wild values behind it."""
    rng = np.random.default_rng(seed)
    count = (np.arange(B * D) % (M + 1)).reshape(B, D).astype(np.int32)
    q = rng.standard_normal((B, D, heads, width)).astype(np.float32)

    def rows(width):
        live = np.arange(M)[:, None, None] < count[..., None, None, None]
        shape = (B, D, M, kv_heads, width)
        return np.where(live, rng.standard_normal(shape).astype(np.float32), wild(rng, *shape))

    return q, rows(width), None if value_width is None else rows(value_width), count


def oracle_attention(q, keys, values, count, scale):
    values = keys if values is None else values
    out = np.zeros((*q.shape[:3], values.shape[-1]))
    for b, d, h in np.ndindex(*q.shape[:3]):
        if n := count[b, d]:
            head = h // (q.shape[2] // keys.shape[3])
            logits = scale * np.asarray(keys[b, d, :n, head], np.float64) @ np.asarray(q[b, d, h], np.float64)
            weights = np.exp(logits - logits.max())
            out[b, d, h] = weights / weights.sum() @ np.asarray(values[b, d, :n, head], np.float64)
    return out


@functools.cache
def attended(scale):
    return jax.jit(functools.partial(selected_attention, scale=scale))


@pytest.mark.parametrize("value_width", [None, 5, 24])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (4, 2), (3, 3)])
def test_attention(heads, kv_heads, value_width):
    q, keys, values, count = attention_problem(heads, 4, 3, 11, heads, kv_heads, 16, value_width)
    got = attended(0.25)(q, keys, values, count)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, oracle_attention(q, keys, values, count, 0.25), rtol=1e-5, atol=2e-6)
    assert not np.asarray(got[0, 0]).any()  # it sees nothing


def test_attention_over_nothing():
    q, keys, _, count = attention_problem(0, 1, 2, 0, 2, 1, 8)
    assert attended(1.0)(q, keys, None, count).tolist() == np.zeros((1, 2, 2, 8)).tolist()


def test_attention_in_bfloat16():
    q, keys, _, count = attention_problem(1, 3, 3, 11, 4, 1, 16)
    q, keys = (jnp.asarray(x, jnp.bfloat16) for x in (q, keys))
    got = attended(0.25)(q, keys, None, count)
    assert got.dtype == jnp.bfloat16
    want = oracle_attention(*(np.asarray(x.astype(jnp.float32)) for x in (q, keys)), None, count, 0.25)
    np.testing.assert_allclose(np.asarray(got.astype(jnp.float32)), want, rtol=0.03, atol=0.03)


def test_attention_in_float64():
    with jax.enable_x64(True):
        q, keys, values, count = attention_problem(2, 3, 3, 11, 4, 2, 16, 6)
        q, keys, values = (jnp.asarray(x, jnp.float64) for x in (q, keys, values))
        got = attended(0.25)(q, keys, values, count)
        assert got.dtype == jnp.float64
        np.testing.assert_allclose(got, oracle_attention(q, keys, values, count, 0.25), rtol=1e-12)
        scores = jax.jit(pool_scores)(*score_problem(0, 1, 2, 3))
        assert scores.dtype == jnp.float32
        assert selected(2)(scores.astype(jnp.float64), jnp.array([[3, 2]])).dtype == jnp.int32
        tokens, counts = expanded(4)(jnp.array([[[0, 1]]]), jnp.array([[9]]))
        assert tokens.dtype == counts.dtype == jnp.int32


def test_bits_of_a_row_do_not_depend_on_other_rows():
    arguments = attention_problem(3, 9, 4, 17, 4, 2, 16, 16)
    whole = attended(0.25)(*arguments)
    for rows in np.s_[:1, :], np.s_[:1, 3:], np.s_[2:7, 1:2], np.s_[3:, :3]:
        np.testing.assert_array_equal(attended(0.25)(*(x[rows] for x in arguments)), whole[rows])


def test_heads_must_divide():
    with pytest.raises(ValueError, match="q has 4 heads, keys 3"):
        selected_attention(jnp.zeros((1, 1, 4, 8)), jnp.zeros((1, 1, 2, 3, 8)), None, jnp.zeros((1, 1), jnp.int32), 1.0)

"""A sparse layer over its cache, against attention over whole texts in NumPy; and its metadata, fused and ordinary.

The oracle has no cache: it makes the index key of a pool from the four tokens that are in it, scores all pools that a
row sees, and attends to the tokens of the best.
"""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxspec.attention import IndexRows, attend_pooled
from jaxspec.cache import KPoolSpec, LayerSpec, init_cache
from jaxspec.metadata import KPool, draft_extend_metadata, verify_layout, verify_metadata
from pallas_kernels import PackedMetadata

POOL, TOPK, PAGE, X, HI, WIDTH, HEADS, D, T = 4, 12, 8, 16, 2, 8, 2, 6, 72
KPOOL = KPool(POOL, TOPK)
SPEC = KPoolSpec(1, WIDTH, value_dim=0, pool=POOL, topk=TOPK, index_dim=X).with_rows(D)
B, P = 3, T // PAGE
SHAPE = {"batch_size": B, "pages_per_row": P, "swa": False, "states": True}


# The oracle


def rounded(x, dtype):
    return np.asarray(x).astype(dtype).astype(np.float64)


def eight_bits(x):
    """Values and scale of a vector in 8 bits, the scale a power of two."""
    scale = 2.0 ** np.ceil(np.log2(max(np.abs(x).max(), 1e-4) / 448))
    return rounded(np.clip(x / scale, -448, 448), ml_dtypes.float8_e4m3fn), scale


def turned(x):
    """The Hadamard transform, rounded to bfloat16."""
    size = x.shape[-1]
    signs = np.array([[(-1) ** bin(i & j).count("1") for j in range(size)] for i in range(size)])
    return rounded(x @ signs / size**0.5, ml_dtypes.bfloat16)


def oracle(text, position):
    """[HEADS, WIDTH] of the row at `position`, and the tokens it sees."""
    keys, scores = (rounded(text[name], ml_dtypes.bfloat16) for name in ("key", "score"))
    pools = (position + 1) // POOL
    query = turned(rounded(text["query"][position], ml_dtypes.bfloat16))
    logits = np.zeros(pools)
    for pool in range(pools):
        member = slice(pool * POOL, (pool + 1) * POOL)
        logit = scores[member] + text["ape"]
        weight = np.exp(logit - logit.max(axis=0))
        key = rounded((weight * keys[member]).sum(axis=0) / weight.sum(axis=0), ml_dtypes.bfloat16)
        key, scale = eight_bits(turned(key))
        for head in range(HI):
            values, factor = eight_bits(query[head])
            logits[pool] += text["weight"][position, head] * factor * X**-0.5 * scale * max(values @ key, 0)
    best = np.sort(np.argsort(-logits, kind="stable")[: TOPK // POOL])
    seen = np.concatenate([best[:, None] * POOL + np.arange(POOL)]).reshape(-1)
    seen = np.concatenate([seen, np.arange(pools * POOL, position + 1)]).astype(int)
    rows = text["k"][seen].astype(np.float64)
    logits = text["q"][position].astype(np.float64) @ rows.T * WIDTH**-0.5
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True) @ rows, seen


# Forwards over a cache


def texts(seed):
    rng = np.random.default_rng(seed)
    shapes = {
        "q": (HEADS, WIDTH),
        "k": (WIDTH,),
        "query": (HI, X),
        "weight": (HI,),
        "key": (X,),
        "score": (X,),
    }
    text = {name: rng.standard_normal((B, T + D, *shape)).astype(np.float32) for name, shape in shapes.items()}
    return text | {"ape": rng.standard_normal((POOL, X)).astype(np.float32)}


def tables(rng):
    """(page_rows, v2p): request rows 1 .. B in any order of pages, row 0 the sink's."""
    pages = 1 + rng.permutation(B * P)
    page_rows = np.zeros((B + 1, P), np.int32)
    page_rows[1:] = pages.reshape(B, P)
    v2p = np.zeros((B * P + 1, 2), np.int32)
    v2p[1:, 0] = 1 + rng.permutation(B * P)
    return jnp.asarray(page_rows), jnp.asarray(v2p)


@jax.jit
def forward(cache, rows, metadata):
    """The layer over rows [B, D, ...] of `texts`."""
    index = IndexRows(rows["query"], rows["weight"], rows["key"], rows["score"], rows["ape"])
    return attend_pooled(cache, 0, rows["q"], rows["k"][:, :, None], None, index, metadata)


def rows_at(text, start, count):
    """Rows at positions start[b] .. start[b] + count - 1 of each request."""
    place = np.asarray(start)[:, None] + np.arange(count)
    return {name: text[name] if name == "ape" else text[name][np.arange(B)[:, None], place] for name in text}


def check(text, out, selection, start, count):
    for lane in range(B):
        for row in range(count[lane]):
            wanted, seen = oracle({k: v if k == "ape" else v[lane] for k, v in text.items()}, start[lane] + row)
            tokens = np.asarray(selection.tokens[lane, row])
            np.testing.assert_array_equal(tokens[tokens >= 0], seen, err_msg=f"lane {lane}, row {row}")
            np.testing.assert_allclose(out[lane, row], wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_layer_equals_attention_over_whole_texts(seed):
    """A prompt in two chunks, then rounds whose last rows are rejected: they were garbage, and the next round has
    others in their places."""
    rng, text = np.random.default_rng(seed), texts(seed)
    page_rows, v2p = tables(rng)
    # What was never written is NaN, or all ones in 8 bits.
    cache = init_cache([SPEC], page_size=PAGE, num_pages=B * P + 1, num_swa_pages=1, num_states=B + 1)
    cache = jax.tree.map(lambda x: jnp.full_like(x, 0xFF if x.dtype == jnp.uint8 else jnp.nan), cache)
    lanes = jnp.arange(1, B + 1, dtype=jnp.int32)
    common = {"page_size": PAGE, "kpool": KPOOL}
    length, chunk = np.zeros(B, np.int32), 11
    packed = PackedMetadata.zeros(verify_layout(num_rows=chunk, kpool=KPOOL, **SHAPE))
    for extend in ([11, 3, 0], [7, 0, 1]):
        extend = np.array(extend, np.int32)
        metadata, packed = draft_extend_metadata(
            jnp.asarray(length), jnp.asarray(extend), lanes, page_rows, v2p, packed, **common
        )
        out, cache, selection = forward(cache, rows_at(text, length, chunk), metadata)
        check(text, out, selection, length, extend)
        length += extend
    packed = PackedMetadata.zeros(verify_layout(num_rows=D, kpool=KPOOL, **SHAPE))
    for _ in range(9):
        metadata, packed = verify_metadata(
            jnp.asarray(length), lanes, page_rows, v2p, jnp.zeros(B, jnp.int32), packed, limit=T, **common
        )
        accepted = rng.integers(1, D + 1, B).astype(np.int32)
        rows = rows_at(text, length, D)
        garbage = np.arange(D) >= accepted[:, None]
        for name in ("k", "key", "score"):
            noise = 5 * rng.standard_normal(rows[name].shape).astype(np.float32)
            rows[name] = np.where(garbage[..., None], noise, rows[name])
        out, cache, selection = forward(cache, rows, metadata)
        check(text, out, selection, length, np.minimum(accepted, T - length))
        np.testing.assert_array_equal(selection.count.reshape(-1), metadata.kpool.dsa_cache_seqlens)
        length = np.minimum(length + accepted, T - 1)


def test_padding_gives_nothing_and_leaves_everything():
    rng, text = np.random.default_rng(0), texts(0)
    page_rows, v2p = tables(rng)
    cache = init_cache([SPEC], page_size=PAGE, num_pages=B * P + 1, num_swa_pages=1, num_states=B + 1)
    packed = PackedMetadata.zeros(verify_layout(num_rows=5, kpool=KPOOL, **SHAPE))
    none = jnp.zeros(B, jnp.int32)
    metadata, _ = draft_extend_metadata(none, none, none, page_rows, v2p, packed, page_size=PAGE, kpool=KPOOL)
    assert metadata.state_slots.tolist() == [-1] * B
    out, after, selection = forward(cache, rows_at(text, [0] * B, 5), metadata)
    assert (np.asarray(out) == 0).all() and (np.asarray(selection.count) == 0).all()
    buffers, before = after.buffers[0], cache.buffers[0]
    np.testing.assert_array_equal(buffers.rows[PAGE:], before.rows[PAGE:])
    np.testing.assert_array_equal(buffers.index[1:], before.index[1:])
    np.testing.assert_array_equal(buffers.tail[1:], before.tail[1:])


def test_layers_of_another_kind_are_told_apart():
    cache = init_cache([LayerSpec(1, WIDTH)], page_size=PAGE, num_pages=2, num_swa_pages=1)
    with pytest.raises(TypeError, match=r"layer 0 selects nothing.*jaxspec\.attend"):
        attend_pooled(cache, 0, *[jnp.zeros((1, 1, 1, WIDTH))] * 3, None, None)


# Metadata


FUSED = dataclasses.replace(KPOOL, fused=True)
BIG = 64 * POOL  # tokens of a page that fused metadata take


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_fused_metadata_equal_ordinary_ones(backend):
    """Every field, over rounds with other lengths, rows and pages, into buffers full of wild ids."""
    rng = np.random.default_rng(0)
    lengths = [[0, 64, 255], [1, 255, 256], [3, 130, 260], [249, 2047, 2045], [256, 5, 0]]
    pages, limit = 8, 2048
    shape = SHAPE | {"pages_per_row": pages}
    wild = jnp.int32(2**30)

    def packed(kpool):
        zeros = PackedMetadata.zeros(verify_layout(num_rows=D, kpool=kpool, **shape))
        return dataclasses.replace(zeros, buffer=jnp.full_like(zeros.buffer, wild))

    def both(build):
        functions = {kpool: jax.jit(lambda *a, kpool=kpool: build(*a, kpool)) for kpool in (KPOOL, FUSED)}
        buffers = {kpool: packed(kpool) for kpool in functions}

        def run(*arguments):
            found = []
            for kpool, function in functions.items():
                metadata, buffers[kpool] = function(*arguments, buffers[kpool])
                found.append(metadata)
            return found

        return run

    page_rows = np.zeros((B + 2, pages), np.int32)
    settings = {"page_size": BIG, "limit": limit, "backend": backend}
    verify = both(lambda n, r, t, m, packed, kpool: verify_metadata(n, r, t, m, n, packed, kpool=kpool, **settings))
    extend = both(
        lambda n, q, c, r, t, m, packed, kpool: draft_extend_metadata(
            n, q, r, t, m, packed, count=c, kpool=kpool, **settings
        )
    )
    prompt = both(
        lambda n, q, r, t, m, packed, kpool: draft_extend_metadata(
            n, q, r, t, m, packed, kpool=kpool, page_size=BIG, backend=backend
        )
    )
    for nth, length in enumerate(lengths):
        page_rows[1:] = 1 + rng.permutation((B + 1) * pages).reshape(B + 1, pages)
        v2p = np.zeros(((B + 1) * pages + 1, 2), np.int32)
        v2p[1:, 0] = 1 + rng.permutation((B + 1) * pages)
        rows = rng.permutation(B + 1)[:B] + 1
        length = np.array(length, np.int32)
        if nth == len(lengths) - 1:
            rows[-1] = length[-1] = 0  # a padded lane
        tables = jnp.asarray(page_rows), jnp.asarray(v2p)
        lanes = jnp.asarray(rows, jnp.int32)
        new = np.where(rows > 0, rng.integers(0, D + 1, B), 0).astype(np.int32)
        kept = rng.integers(0, new + 1).astype(np.int32)
        if nth == 1:
            new[1:] = 1, 0  # up to the end of a page, and nothing behind it
            kept = np.minimum(kept, new)
        fits = np.minimum(new, limit - length)
        for ordinary, fused in (
            verify(jnp.asarray(length), lanes, *tables),
            extend(jnp.asarray(length), jnp.asarray(new), jnp.asarray(kept), lanes, *tables),
            prompt(jnp.asarray(length), jnp.asarray(fits), lanes, *tables),
        ):
            np.testing.assert_array_equal(ordinary.cu_seqlens_k, [0, *np.cumsum(ordinary.cache_seqlens)])
            assert ordinary.kpool.pooled_page_table.shape == (B, pages)
            for (path, left), right in zip(
                jax.tree_util.tree_leaves_with_path(ordinary), jax.tree.leaves(fused), strict=True
            ):
                assert (np.abs(left) < wild).all(), path
                np.testing.assert_array_equal(left, right, err_msg=jax.tree_util.keystr(path))


def test_tables_for_every_row():
    rng = np.random.default_rng(0)
    page_rows, v2p = tables(rng)
    packed = PackedMetadata.zeros(verify_layout(num_rows=D, kpool=KPOOL, **SHAPE))
    lanes = jnp.arange(1, B + 1, dtype=jnp.int32)
    length = jnp.array([0, 9, 30])
    metadata, _ = verify_metadata(length, lanes, page_rows, v2p, length, packed, page_size=PAGE, limit=T, kpool=KPOOL)
    attention, pooled = metadata.kpool.expanded()
    for row in range(B * D):
        np.testing.assert_array_equal(attention[row], metadata.kpool.real_page_table[row // D])
        np.testing.assert_array_equal(pooled[row], metadata.page_table[row // D])
        live = int(length[row // D]) + D
        for column in range(-(-live // (PAGE // POOL))):
            page = v2p[page_rows[row // D + 1, column // POOL], 0]
            assert attention[row, column] == page * POOL + column % POOL

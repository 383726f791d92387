"""Metadata of draft chains: fused and ordinary, copied while they are fresh and built anew when they are not."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick_compile

from jaxspec.metadata import Ids, KPool, chain_metadata, verify_layout
from pallas_kernels import PackedMetadata

PAGE, PAGES, ROWS, LIMIT = 256, 3, 3, 702
KPOOL = KPool(pool=4, topk=64)
HOW = {"page_size": PAGE, "limit": LIMIT, "kpool": KPOOL, "backend": "reference"}
LENGTHS = (0, 1, 3, 4, 255, 256, 257, 511, 512, 699, 701, 702, 0)  # the last lane has no request


def inputs(lengths=LENGTHS, add=0):
    """seq_lens, req_rows, page_rows, v2p: every request has all its pages, in no order."""
    B, rng = len(lengths), np.random.default_rng(0)
    pages = 1 + rng.permutation(B * PAGES)
    page_rows = np.zeros((B + 1, PAGES), np.int32)
    page_rows[1:] = pages.reshape(B, PAGES)
    v2p = np.zeros((B * PAGES + 1, 2), np.int32)
    v2p[1:, 0] = 1 + rng.permutation(B * PAGES)
    rows = np.arange(1, B + 1) * (np.arange(B) < B - 1)
    return tuple(jnp.asarray(x, jnp.int32) for x in (np.array(lengths) + add, rows, page_rows, v2p))


def buffer(kpool=KPOOL, *, rows=ROWS, fill=0):
    shape = dict(batch_size=len(LENGTHS), num_rows=rows, pages_per_row=PAGES, swa=False)
    layout = verify_layout(**shape, kpool=kpool, lengths=1)
    packed = PackedMetadata.zeros(layout)
    return dataclasses.replace(packed, buffer=jnp.full_like(packed.buffer, fill))


def build(of, packed=None, **how):
    return chain_metadata(*of, buffer() if packed is None else packed, **(HOW | how))


def spoiled(chain):
    """The same metadata with 7 in every cell: whoever copies them has it too."""
    packed = dataclasses.replace(chain.packed, buffer=jnp.full_like(chain.packed.buffer, 7))
    return dataclasses.replace(chain, packed=packed)


def was_copied(chain):
    return bool((chain.packed.buffer == 7).all())


def assert_equal(left, right):
    """Field by field."""
    left, right = (jax.tree_util.tree_flatten_with_path(jax.device_get(x.metadata))[0] for x in (left, right))
    assert [path for path, _ in left] == [path for path, _ in right] and len(left) > 12
    for (path, a), (_, b) in zip(left, right, strict=True):
        assert a.dtype == b.dtype == np.int32, path
        np.testing.assert_array_equal(a, b, str(path))


def test_fused_equals_ordinary_field_by_field():
    of, fused = inputs(), dataclasses.replace(KPOOL, fused=True)

    @functools.partial(jax.jit, compiler_options=quick_compile.options())
    def both(of, packed):
        chain = build(of, packed, kpool=fused, backend="interpret")
        return chain.metadata, chain.packed

    metadata, packed = both(of, buffer(fill=-5))
    ordinary = build(of, buffer(fill=-9))
    assert_equal(dataclasses.replace(ordinary, metadata=metadata, packed=packed), ordinary)


def test_a_worked_chain():
    """256 tokens committed: 64 pools are closed, rows go to the second page, and nothing is in the next pool."""
    of = inputs()
    chain, (_, rows, page_rows, v2p) = build(of), map(np.asarray, of)
    lane = LENGTHS.index(256)
    first, second = (v2p[page_rows[rows[lane], column], 0] for column in (0, 1))
    kpool, window = chain.metadata.kpool, chain.metadata.window
    assert window.positions[lane].tolist() == [256, 257, 258]
    assert window.full_loc[lane].tolist() == [second * PAGE + j for j in range(3)]
    assert (kpool.pool_seqlens[lane], kpool.dsa_cache_seqlens[lane]) == (64, 64)
    assert chain.metadata.page_table[lane].tolist()[:1] == [first]
    assert kpool.write_plan.write_loc[lane].tolist() == [0]
    at_end, nobody = LENGTHS.index(701), len(LENGTHS) - 1
    assert window.full_loc[at_end].tolist()[1:] == [0, 0]
    assert (window.full_loc[nobody] < PAGE).all()  # in the sink page
    assert not kpool.write_plan.count.any()  # a chain closes no pool


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_copy_of_fresh_metadata_equals_a_full_build(fused, marked):
    of, kpool = inputs(), dataclasses.replace(KPOOL, fused=fused)
    if marked:
        of = (*of[:2], Ids(of[2], "virtual"), of[3])
    first = build(of, kpool=kpool)
    copy = build(of, buffer(fill=-5), kpool=kpool, source=first)
    assert_equal(copy, build(of, buffer(fill=-9), kpool=kpool))
    np.testing.assert_array_equal(copy.packed.buffer, first.packed.buffer)
    assert was_copied(build(of, kpool=kpool, source=spoiled(first)))


def test_a_copy_keeps_its_own_donated_buffer_and_never_the_source_s():
    @functools.partial(jax.jit, donate_argnums=(1, 2))
    def two(of, mine, other):
        first = build(of, other)
        second = build(of, mine, source=first)
        assert first.serves(second.made_of, second.settings)
        return second.packed, first.packed, second.metadata

    mine, other = buffer(fill=-5), buffer(fill=-9)
    places = [packed.buffer.unsafe_buffer_pointer() for packed in (mine, other)]
    second, first, metadata = two(inputs(), mine, other)
    assert [packed.buffer.unsafe_buffer_pointer() for packed in (second, first)] == places
    assert places[0] != places[1] and mine.buffer.is_deleted() and other.buffer.is_deleted()
    full = build(inputs())
    assert_equal(dataclasses.replace(full, metadata=metadata), full)


def test_a_copy_leaves_the_source_alone():
    of, source = inputs(), buffer(fill=-5)
    first = build(of, source)
    before, copy = np.array(first.packed.buffer), build(of, source=first)
    assert copy.packed.buffer is not first.packed.buffer
    np.testing.assert_array_equal(first.packed.buffer, before)


@pytest.mark.parametrize("changed", range(4), ids=["seq_lens", "req_rows", "page_rows", "v2p"])
def test_another_array_with_the_same_values_makes_a_source_stale(changed):
    of = inputs()
    other = tuple(jnp.array(x) if i == changed else x for i, x in enumerate(of))
    chain = build(other, source=spoiled(build(of)))
    assert not was_copied(chain)
    assert_equal(chain, build(of))


def test_the_source_of_another_round_is_stale():
    source = spoiled(build(inputs()))
    lengths = tuple(min(length + 2, LIMIT) for length in LENGTHS[:-1])
    later = inputs((*lengths, 0))
    assert_equal(build(later, source=source), build(later))


def test_a_source_from_outside_a_compiled_function_is_stale_in_it():
    of = inputs()
    source = spoiled(build(of))

    @jax.jit
    def inside(of):
        chain = build(of, source=source)
        return chain.metadata, chain.packed

    metadata, packed = inside(of)
    assert_equal(dataclasses.replace(source, metadata=metadata, packed=packed), build(of))


def test_a_source_from_before_a_loop_is_stale_in_its_next_turn():
    of = inputs()

    @jax.jit
    def turns(of):
        source = spoiled(build(of))

        def turn(i, carry):
            seq_lens, *rest = carry[0]
            chain = build((seq_lens, *rest), source=source)
            return (jnp.minimum(seq_lens + 1, LIMIT), *rest), chain.packed

        return jax.lax.fori_loop(0, 3, turn, (of, buffer()))[1]

    seq_lens, *rest = of
    last = build((jnp.minimum(seq_lens + 2, LIMIT), *rest))
    np.testing.assert_array_equal(turns(of).buffer, last.packed.buffer)


def test_a_numpy_array_may_have_changed_and_is_never_fresh():
    seq_lens, *rest = (np.array(x) for x in inputs())
    source = build((seq_lens, *rest))
    seq_lens[:4] += 5
    assert_equal(build((seq_lens, *rest), source=source), build((seq_lens.copy(), *rest)))


@pytest.mark.parametrize(
    "changes",
    [
        {"packed": functools.partial(buffer, rows=ROWS + 1)},
        {"kpool": KPool(pool=4, topk=128)},
        {"kpool": KPool(pool=8, topk=64)},
        {"kpool": dataclasses.replace(KPOOL, fused=True)},
        {"page_size": PAGE // 2},
        {"limit": LIMIT - 10},
    ],
    ids=["layout", "topk", "pool", "fusion", "page_size", "limit"],
)
def test_an_incompatible_source_is_not_used(changes):
    changes = dict(changes)
    make = changes.pop("packed", functools.partial(buffer, changes.get("kpool", KPOOL)))
    of = inputs(tuple(min(length, PAGE // 2 * PAGES) for length in LENGTHS))
    source = spoiled(build(of))
    chain = build(of, make(), **changes, source=source)
    assert not was_copied(chain)
    assert_equal(chain, build(of, make(), **changes))


def test_chain_metadata_cannot_leave_a_compiled_function():
    of = inputs()
    with pytest.raises(TypeError, match="ChainMetadata"):
        jax.jit(lambda *of: build(of))(*of)
    with pytest.raises(TypeError, match="ChainMetadata"):
        jax.jit(lambda chain: chain.packed.buffer)(build(of))

"""Destinations and views: where packed sections lie, what a View holds, what is written in place, what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import kernel_cases as cases
import numpy as np
import pytest
from kernel_cases import int32

from pallas_kernels import (
    DecodeTables,
    KPoolShape,
    MetadataLayout,
    PackedMetadata,
    View,
    WindowBuffers,
    decode_lengths,
    decode_metadata,
    kv_read_table,
)

# Packed metadata -----------------------------------------------------------------------------------------------------


def test_layout_sections_are_aligned_disjoint_and_cover_every_field():
    layout = MetadataLayout(B=3, D=5, P=7, has_swa=True)
    names = {*DecodeTables._fields, *WindowBuffers._fields}
    assert set(layout.sections) == names
    assert set(MetadataLayout(3, 5, 7, False).sections) == names - {"swa_page_table", "swa_loc"}
    end = 0
    for section in layout.sections.values():
        assert section.offset % 32 == 0 and section.offset >= end
        end = section.offset + int(np.prod(section.shape))
    assert layout.size % 32 == 0 and layout.size >= end
    assert hash(layout) == hash(MetadataLayout(3, 5, 7, True))


def test_packed_metadata_is_one_leaf_with_a_static_layout():
    packed = PackedMetadata.zeros(MetadataLayout(B=2, D=2, P=2, has_swa=False))
    leaves, tree = jax.tree.flatten(packed)
    assert len(leaves) == 1 and leaves[0].shape == (packed.layout.size,)
    assert jax.tree.unflatten(tree, leaves).layout == packed.layout
    assert packed.decode_tables().swa_page_table is None and packed.window().swa_loc is None


def test_packed_fields_are_the_cells_of_their_sections():
    layout = MetadataLayout(B=2, D=3, P=4, has_swa=True)
    packed = PackedMetadata(jnp.arange(layout.size, dtype=jnp.int32), layout)
    for name, array in (packed.decode_tables()._asdict() | packed.window()._asdict()).items():
        section = layout.sections[name]
        assert array.shape == section.shape and array.dtype == jnp.int32
        assert array.ravel().tolist() == list(range(section.offset, section.offset + array.size))


def test_sections_of_pooled_attention_come_behind_the_others():
    layout, plain = (MetadataLayout(3, 5, 7, False, kpool) for kpool in (KPoolShape(4, 5, sms=9), None))
    assert list(layout.sections.items())[: len(plain.sections)] == list(plain.sections.items())
    packed = PackedMetadata(jnp.arange(layout.size, dtype=jnp.int32), layout)
    shapes = {n: a.shape for n, a in packed.kpool()._asdict().items() if a is not None}
    assert shapes == {
        "cache_seqlens": (3,), "cu_seqlens_k": (4,), "seqlens_expanded": (15,), "dsa_cache_seqlens": (15,),
        "dsa_cu_seqlens_k": (16,), "pool_seqlens": (15,), "real_page_table": (3, 28), "page_table": (3, 7),
        "write_start": (3,), "tail_logical_start": (3,), "write_loc": (3, 2), "schedule": (10, 2),
    }  # fmt: skip
    cells = np.concatenate([np.ravel(a) for n, a in packed.kpool()._asdict().items() if n in shapes])
    assert len(set(cells.tolist())) == len(cells)
    with pytest.raises(ValueError, match=r"has no sections of pooled attention: give it kpool=KPoolShape"):
        PackedMetadata.zeros(plain).kpool()


@pytest.mark.parametrize("sizes", [{"pool": 0}, {"pool": 4.0}, {"rows": -1}, {"sms": 0}, {"sms": True}])
def test_shapes_of_pools_refuse_what_is_no_size(sizes):
    with pytest.raises(ValueError, match=r"KPoolShape .*: it must be a Python integer >= "):
        KPoolShape(**({"pool": 4, "rows": 1} | sizes))


@pytest.mark.parametrize("sizes", [{"B": -1}, {"P": 2.0}, {"D": True}, {"B": 2**16, "P": 2**15}])
def test_layout_refuses_sizes_it_cannot_index(sizes):
    with pytest.raises(ValueError, match=r"MetadataLayout.*(sizes are Python integers >= 0|more than an int32 can)"):
        MetadataLayout(**({"B": 1, "D": 1, "P": 1, "has_swa": False} | sizes))


@pytest.mark.parametrize("buffer", [jnp.zeros(64, jnp.int32), jnp.zeros(352)])
def test_packed_buffer_of_another_size_or_type_is_refused(buffer):
    layout = MetadataLayout(B=2, D=1, P=1, has_swa=True)
    with pytest.raises(
        ValueError, match=rf"out.buffer is .*: {layout.__class__.__name__}.* needs int32\[{layout.size}"
    ):
        decode_lengths(int32(1, 2), PackedMetadata(buffer, layout))


# What a View holds ---------------------------------------------------------------------------------------------------


CELLS_OF_VIEWS = [  # shape of the buffer, which counts from 0; offset, shape, strides; what the View holds
    ((24,), (5, (3,), None), [5, 6, 7]),
    ((24,), (5, (3,), (4,)), [5, 9, 13]),
    ((24,), (2, (2, 3), None), [[2, 3, 4], [5, 6, 7]]),
    ((24,), (2, (2, 3), (10, 2)), [[2, 4, 6], [12, 14, 16]]),
    ((24,), (2, (3, 2), (1, 10)), [[2, 12], [3, 13], [4, 14]]),  # transposed
    ((24,), (7, (2, 3), (0, 1)), [[7, 8, 9], [7, 8, 9]]),
    ((24,), (99, (0,), None), []),
    ((4, 6), (0, (4, 6), None), np.arange(24).reshape(4, 6).tolist()),
    ((4, 6), (8, (2, 3), (6, 1)), [[8, 9, 10], [14, 15, 16]]),
    ((4, 6), (1, (2, 3), (12, 2)), [[1, 3, 5], [13, 15, 17]]),
    ((4, 6), (3, (4,), (6,)), [3, 9, 15, 21]),
    ((4, 6), (1, (3,), (7,)), [1, 8, 15]),  # a diagonal
]


def test_view_reads_its_cells():
    @jax.jit
    def read():
        cells = jnp.arange(24, dtype=jnp.int32)
        return [View(cells.reshape(shape), *place).read() for shape, place, _ in CELLS_OF_VIEWS]

    for (shape, place, expected), actual in zip(CELLS_OF_VIEWS, read(), strict=True):
        assert actual.tolist() == expected, (shape, place)


def test_view_is_one_leaf_whose_place_is_static():
    view = View(jnp.zeros((4, 6), jnp.int32), 8, (2, 3), (6, 1))
    leaves, tree = jax.tree.flatten(view)
    assert len(leaves) == 1 and leaves[0] is view.buffer
    assert tree == jax.tree.structure(dataclasses.replace(view, buffer=leaves[0] + 1))
    assert tree != jax.tree.structure(dataclasses.replace(view, offset=9))
    assert (view.ndim, view.shape, view.dtype) == (2, (2, 3), jnp.int32)


@pytest.mark.parametrize("backend", cases.BACKENDS)
def test_an_input_may_repeat_cells(backend):
    one = jnp.array([99, 6], jnp.int32)
    table = cases.run(
        kv_read_table,
        cases.stale(3, 3),
        seq_lens=View(one, 1, (3,), (0,)),
        req_rows=int32(0, 1, 2),
        source=View(jnp.array([5, 9, 2, 99], jnp.int32), 0, (3, 3), (0, 1)),
        page_size=4,
        zero_tail=False,
        backend=backend,
    )
    assert table.tolist() == [[5, 9, -7]] * 3


# Several views of one buffer -----------------------------------------------------------------------------------------

DECODE = {"seq_lens": int32(6, 1), "req_rows": int32(1, 0), "source": int32([0, 0, 0], [5, 9, 2]), "page_size": 4}
DECODE |= {"full_v2p": np.arange(10) + 20, "swa_v2p": np.arange(10) + 40, "zero_tail": True}


def everything_in(buffer):
    """Each field of a decode in turn in one vector: lengths, prefix sums, and two tables whose columns take turns."""
    tables = [View(buffer, 9 + column, (2, 3), (8, 2)) for column in (0, 1)]
    return DecodeTables(View(buffer, 1, (2,)), View(buffer, 4, (3,)), *tables)


EVERYTHING = [-7, 6, 1, -7, 0, 6, 7, -7, -7, 25, 45, 29, 49, 0, 0, -7, -7, 20, 40, 0, 0, 0, 0, -7, -7]


@pytest.mark.parametrize("backend", cases.BACKENDS)
def test_a_whole_decode_in_one_buffer(backend):
    tables = cases.run(decode_metadata, everything_in(cases.stale(25)), **DECODE, backend=backend)
    for field in tables[:4]:
        assert field.buffer.tolist() == EVERYTHING


@pytest.mark.parametrize("backend", ["reference", "checked"])
def test_views_of_one_buffer_still_share_it_afterwards(backend):
    tables = decode_metadata(**DECODE, out=everything_in(cases.stale(25)), backend=backend)
    assert len({id(field.buffer) for field in tables[:4]}) == 1


@pytest.mark.parametrize("backend", ["reference", "checked"])
def test_a_view_changes_with_its_buffer_although_it_was_not_written(backend):
    lengths = decode_lengths(int32(6, 1), everything_in(cases.stale(25)), backend=backend)
    assert lengths.page_table.buffer is lengths.cache_seqlens.buffer
    assert lengths.cu_seqlens_k.read().tolist() == [0, 6, 7] and (lengths.swa_page_table.read() == -7).all()


# In place ------------------------------------------------------------------------------------------------------------

COMPILED = [backend for backend in cases.EVERY_BACKEND if backend != "checked"]


@pytest.mark.parametrize("backend", COMPILED)
def test_a_donated_buffer_is_written_in_place(backend):
    def call(buffer):
        tables = decode_metadata(**DECODE, out=everything_in(buffer), backend=backend)
        return tables.page_table.buffer

    buffer = cases.stale(25)
    place = buffer.unsafe_buffer_pointer()
    after = jax.jit(call, donate_argnums=0)(buffer)
    assert buffer.is_deleted() and after.unsafe_buffer_pointer() == place
    assert after.tolist() == EVERYTHING


@pytest.mark.parametrize("backend", COMPILED)
def test_a_donated_view_is_written_in_place(backend):
    def call(out):
        options = {"page_size": 4, "zero_tail": False, "backend": backend}
        return kv_read_table(DECODE["seq_lens"], DECODE["req_rows"], DECODE["source"], out, **options)

    out = View(cases.stale(4, 6), 8, (2, 3), (6, 1))
    place = out.buffer.unsafe_buffer_pointer()
    after = jax.jit(call, donate_argnums=0)(out)
    assert out.buffer.is_deleted() and after.buffer.unsafe_buffer_pointer() == place
    assert after.buffer.tolist() == [[-7] * 6, [-7, -7, 5, 9, -7, -7], [-7, -7, 0, -7, -7, -7], [-7] * 6]


# What is refused -----------------------------------------------------------------------------------------------------

NUMBERS = "give integers >= 0, and as many strides as dimensions, one or more"
CELLS = "so that entries share cells: a destination's larger stride must step over everything the smaller one reaches"


@pytest.mark.parametrize(
    ("buffer", "place", "message"),
    [
        ((30,), (-1, (2, 3), None), rf"View of offset -1, shape \(2, 3\), strides None: {NUMBERS}"),
        ((30,), (1.0, (2, 3), None), f"offset 1.0.*{NUMBERS}"),
        ((30,), (0, (2, 3), (3,)), NUMBERS),
        ((30,), (0, (2, 3), (3, -1)), NUMBERS),
        ((1, 2, 15), (0, (2, 3), None), r"out is a View of int32\[1, 2, 15\]: its buffer must be int32, 1-D or 2-D"),
        ((30,), (25, (2, 3), None), "out ends at cell 30 of a buffer of 30: make offset, shape or strides smaller"),
        ((30,), (0, (2, 3), (26, 2)), "out ends at cell 30 of a buffer of 30"),
        ((5, 6), (24, (2, 3), (6, 1)), "out ends at cell 32 of a buffer of 30"),
        ((5, 6), (4, (2, 3), (6, 1)), "out runs past the 6 columns of its buffer: offset 4, .* or reshape the buffer"),
        ((5, 6), (0, (2, 3), (6, 3)), "out runs past the 6 columns"),
        ((5, 6), (0, (2, 3), (4, 1)), "out runs past the 6 columns"),
        ((30,), (0, (2, 3), (0, 1)), rf"out has shape \(2, 3\) and strides \(0, 1\), {CELLS}"),
        ((30,), (0, (2, 3), (2, 1)), CELLS),
        ((30,), (0, (2, 3), (1, 1)), CELLS),
    ],
)
def test_refused_as_a_destination(buffer, place, message):
    source, ones = np.zeros((3, 3), np.int32), int32(1, 1)
    with pytest.raises(ValueError, match=message):
        kv_read_table(ones, ones, source, View(cases.stale(*buffer), *place), page_size=4, zero_tail=True)


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (View(np.zeros(30, np.int64), 0, (3, 3)), r"source is a View of int64\[30\]: its buffer must be int32"),
        (View(np.zeros(30), 0, (3, 3)), "source is float64: it must be an array of integers"),
        (View(np.zeros(30, np.int32), 22, (3, 3)), "source ends at cell 30 of a buffer of 30"),
        (View(np.zeros((5, 6), np.int32), 4, (3, 3), (6, 1)), "source runs past the 6 columns of its buffer"),
        (View(np.zeros(30, np.int32), 0, (9,)), r"source has shape \(9,\): it must have 2 dimensions"),
    ],
)
def test_refused_as_an_input(view, message):
    with pytest.raises(ValueError, match=message):
        kv_read_table(int32(1), int32(1), view, cases.stale(1, 3), page_size=4, zero_tail=True)


def test_a_destination_of_another_shape_is_refused():
    tables = cases.decode_out(2, 4, has_swa=True)._replace(swa_page_table=View(cases.stale(30), 0, (2, 3)))
    message = r"out.swa_page_table is a View of int32\[2, 3\]: a destination must be int32\[2, 4\]"
    with pytest.raises(ValueError, match=message):
        decode_metadata(**DECODE, out=tables)


def test_a_buffer_of_more_cells_than_an_int32_can_index_has_two_dimensions():
    def table(buffer):
        out = View(buffer, 2**31 + 8, (1, 3))
        return kv_read_table(int32(1), int32(1), np.zeros((2, 3), np.int32), out, page_size=4, zero_tail=True)

    with pytest.raises(ValueError, match=r"out is a View of 2147483712 cells in one dimension, .* reshape the buffer"):
        jax.eval_shape(table, jax.ShapeDtypeStruct((2**31 + 64,), jnp.int32))
    assert jax.eval_shape(table, jax.ShapeDtypeStruct((2**25 + 1, 64), jnp.int32)).buffer.shape == (2**25 + 1, 64)


@pytest.mark.parametrize("places", [(0, 0), (0, 5), (5, 0), (0, 11)])
def test_destinations_that_share_cells_are_refused(places):
    """The same cells, some of them, or the last one alone."""
    buffer = cases.stale(40)
    tables = [View(buffer, offset=place, shape=(2, 6)) for place in places]
    out = DecodeTables(cases.stale(2), cases.stale(3), *tables)
    ones = int32(1, 1)
    call = {"seq_lens": ones, "req_rows": ones, "source": np.zeros((3, 3), np.int32), "page_size": 4}
    with pytest.raises(ValueError, match=r"out\.swa_page_table and out\.page_table share cells of their buffer"):
        decode_metadata(**call, zero_tail=True, swa_v2p=np.zeros(3, np.int32), out=out)

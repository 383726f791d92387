"""store_heads for CUDA: one launch, in place, in whole threads, at 64-bit offsets; and on a GPU."""

import collections
import re

import jax
import jax.numpy as jnp
import kernel_aot as aot
import kernel_ptx as ptx
import numpy as np
import pytest
import test_store_rows
from jax import lax
from kernel_attention import Pool
from test_store_heads import Problem

from pallas_kernels import PagedRows, RowPlace, View, store_heads

SHAPES = {  # settings of `shapes_of`
    "own": {},
    "pool": {"pool": Pool(64, before=2048, behind=4096, section=66)},
    "divided": {"K": 4096, "pool": Pool(64, before=2048, behind=4096, section=66)},
    "a chunk": {"B": 1, "D": 2048},
    "one row": {"B": 1, "D": 1, "pool": Pool(64)},
    "words": {"dtype": "float32", "pool": Pool(64, before=64)},
    "no norm": {"scales": False},
    "cast": {"dtype": "float32", "cache": "bfloat16"},
    "cast, half floats": {"cache": "float16", "pool": Pool(64, section=2)},
    "cast to words": {"cache": "float32"},
    "a quarter turned": {"heads": 16, "half": 32, "sizes": (2, 256, 256)},
    "latent": {"half": 32, "sizes": (1, 576, 0), "pool": Pool(64, before=64), "K": 7168},
    "masks": {"heads": 9, "half": 10, "sizes": (3, 24, 40), "pool": Pool(8, before=8, behind=8, section=1), "K": 77},
    "odd": {"heads": 3, "half": 2, "sizes": (1, 7, 5), "page_size": 3},
}
VECTORS = ["own", "pool", "divided", "a chunk", "one row", "words", "no norm"]  # of whole threads a row
each_shape = pytest.mark.parametrize("name", SHAPES)


def shapes_of(*, B=8, D=1, heads=32, half=None, scales=True, K=None, cache=None, dtype="bfloat16", **settings_):
    """(place, operands), the first of which, the buffer, is donated."""
    place, (buffer, slots, k, *v) = test_store_rows.shapes_of(
        B=B, D=D, of_rows=dtype, dtype=cache or dtype, **settings_
    )
    N, head_dim = B * D, place.head_dim
    rows = [((N, heads, head_dim), dtype), *(((N, *x.shape[2:]), dtype) for x in (k, *v))]
    angles = [((N, half or head_dim // 2), "float32")] * 2
    more = [((head_dim,), dtype)] * 2 * scales + ([((N, K), dtype)] if K else [])
    return place, [buffer, slots, *(jax.ShapeDtypeStruct(*x) for x in (*rows, *angles, *more))]


def function_of(place, backend):
    def call(buffer, slots, q, k, *others):
        v, others = (None, others) if place.values_are_keys else (others[0], others[1:])
        cos, sin, *others = others
        divisor = others.pop() if len(others) % 2 else None
        q_scale, k_scale = others or (None, None)
        scales = {"q_scale": q_scale, "k_scale": k_scale}
        rows = PagedRows(buffer, place)
        q, rows = store_heads(rows, slots, q, k, v, cos, sin, **scales, divisor=divisor, backend=backend)
        return rows.buffer, q

    return call


@pytest.mark.parametrize("backend", ["triton", None])
@each_shape
def test_lowers_for_cuda_as_one_launch_in_place(name, backend):
    place, arrays = shapes_of(**SHAPES[name])
    text = aot.lower_text(function_of(place, backend), *arrays)
    assert text.count('name = "store_heads"') == 1 and "scatter" not in text
    assert len(re.findall(r"output_operand_alias<output_tuple_indices = \[1\], operand_index = 0", text)) == 1
    buffer = re.search(r"@main\((%\w+): tensor<\S+> \{[^}]*\}", text)[0]
    assert "tf.aliasing_output = 0" in buffer or "jax.buffer_donor = true" in buffer


@pytest.mark.parametrize("change", [{"B": 0}, {"heads": 0}, {"sizes": (0, 8, 8), "rows": 0}], ids=str)
def test_nothing_is_launched_for_nothing(change):
    place, arrays = shapes_of(**change)
    for backend in ("triton", None):
        assert "custom_call" not in aot.lower_text(function_of(place, backend), *arrays)


def wide(access):
    """Of 16 bytes, or of 8, where a program has threads for heads of values that are twice as wide as a half."""
    return ".v4.b32" in access or ".v2.b32" in access


@each_shape
def test_compiles_for_sm_90(name, tmp_path):
    """One launch, and nothing beside it: the buffer is a result. Threads wait for each other for a divisor alone."""
    if reason := aot.missing():
        pytest.skip(reason)
    place, arrays = shapes_of(**SHAPES[name])
    program = aot.compile_for_h200(function_of(place, None), *arrays, dump=tmp_path)
    assert aot.launches(program) == collections.Counter({"custom-call": 1}), program.as_text()
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == arrays[0].size * arrays[0].dtype.itemsize
    assert memory.temp_size_in_bytes < 1024
    text = aot.ptx(tmp_path)["store_heads"]
    assert not re.search(r"\b(atom|red)\.", text)
    if name in VECTORS:
        stores, loads = (re.findall(rf"\b{kind}\.global\S*", text) for kind in ("st", "ld"))
        assert stores and all(wide(store) for store in stores), stores
        assert [load for load in loads if not wide(load)] == ["ld.global.b32"], loads  # that of the slot
        assert ("bar.sync" in text) == (name == "divided")


@pytest.mark.parametrize("divided", [False, True])
def test_columns_of_one_product_are_read_where_they_lie(divided, tmp_path):
    """Compiled for sm_90: nothing cuts queries, keys and values out of the rows that hold them."""
    if reason := aot.missing():
        pytest.skip(reason)
    place, (buffer, slots, *_) = shapes_of(pool=Pool(64))

    def call(buffer, slots, joint, cos, sin, scale, divisor):
        q, k, v = (
            View(joint, at * 128, (8, heads, 128), (48 * 128, 128, 1)) for at, heads in ((0, 32), (32, 8), (40, 8))
        )
        more = {"q_scale": scale, "k_scale": scale, "divisor": divisor if divided else None}
        q, rows = store_heads(PagedRows(buffer, place), slots, q, k, v, cos, sin, **more)
        return rows.buffer, q

    shapes = ((8, 48 * 128), jnp.bfloat16), *[((8, 64), jnp.float32)] * 2, ((128,), jnp.bfloat16)
    arrays = [jax.ShapeDtypeStruct(*shape) for shape in (*shapes, ((8, 4096), jnp.bfloat16))]
    program = aot.compile_for_h200(call, buffer, slots, *arrays, dump=tmp_path)
    assert aot.launches(program) == collections.Counter({"custom-call": 1})
    accesses = re.findall(r"\b(?:ld|st)\.global\S*", aot.ptx(tmp_path)["store_heads"])
    assert [access for access in accesses if not wide(access)] == ["ld.global.b32"], accesses


@pytest.mark.parametrize("name", test_store_rows.LARGE)
def test_slots_past_2_to_the_31_cells_have_64_bit_offsets(name, tmp_path):
    """All that moves an address by a row or more counts rows, in int32, until the number has 64 bits."""
    if reason := aot.missing():
        pytest.skip(reason)
    place, arrays = shapes_of(**test_store_rows.LARGE[name])
    row, result = arrays[0].shape[1] * arrays[0].dtype.itemsize, len(arrays) + 1
    assert arrays[0].size > 2**31
    aot.compile_for_h200(function_of(place, None), *arrays, dump=tmp_path)
    text = aot.ptx(tmp_path)["store_heads"]
    assert ptx.row_offset_bits(text, result, row) == 64
    assert {unit for step, unit in ptx.address_steps(text)[result] if step >= row} == {row}


@pytest.mark.parametrize("name", ["own", "pool", "divided"])
def test_in_a_loop_the_buffer_stays_where_it_is(name):
    if reason := aot.missing():
        pytest.skip(reason)
    place, (buffer, slots, *arrays) = shapes_of(**SHAPES[name])
    function = function_of(place, None)

    def call(carry, slots, q, *arrays):
        def turn(carry):
            left, buffer, out = carry
            buffer, turned = function(buffer, slots + left, q, *arrays)
            return left - 1, buffer, out + turned

        return lax.while_loop(lambda carry: carry[0] > 0, turn, carry)

    carry = jax.ShapeDtypeStruct((), jnp.int32), buffer, arrays[0]
    memory = aot.compile_for_h200(call, carry, slots, *arrays).memory_analysis()
    assert memory.alias_size_in_bytes >= buffer.size * buffer.dtype.itemsize + 4
    assert memory.temp_size_in_bytes < 2**20


@pytest.mark.gpu
@each_shape
def test_on_a_gpu(name):
    settings_ = dict(SHAPES[name])
    sizes = dict(zip(("kv_heads", "head_dim", "value_dim"), settings_.pop("sizes", (8, 128, 128)), strict=True))
    normed = settings_.pop("scales", True)
    settings_ = {"B": 8, "D": 1, "heads": 32, "page_size": 16, "padding": 0.9 if name == "a chunk" else 0.3} | settings_
    scale_dtype = settings_.get("dtype", "bfloat16") if normed else None
    Problem(np.random.default_rng(15), **sizes, **settings_, scale_dtype=scale_dtype).check("triton")


@pytest.mark.gpu
def test_the_last_slot_past_2_to_the_31_cells():
    place, shape = RowPlace(1, 64, 64, 4, 8, 2, 0, 64, "bfloat16"), (2**26, 64)
    last = shape[0] // place.page_rows * 4 - 1
    arrays = [jnp.full((1, 1, 64), x, jnp.bfloat16) for x in (3, 1, 2)]
    call = jax.jit(function_of(place, "triton"), donate_argnums=0)
    angles = jnp.ones((1, 32)), jnp.zeros((1, 32))
    after, q = call(jnp.full(shape, 7, jnp.uint16), jnp.full((1, 1), last, jnp.int32), *arrays, *angles)
    found = np.asarray(lax.bitcast_convert_type(after[-2:], jnp.bfloat16)).ravel()
    assert (found == np.repeat([1, 2], 64)).all() and (after[:-2] == 7).all() and (np.asarray(q) == 3).all()

"""Destinations are written in place, and a CUDA program holds one launch a kernel and no copy, on every GPU backend."""

import functools
import re

import jax
import jax.numpy as jnp
import kernel_aot as aot
import kernel_calls
import kernel_ptx as ptx
import pytest
from jax import lax
from kernel_calls import CALLS, int32
from kernel_small import Small

from pallas_kernels import (
    DecodeTables,
    KPoolTables,
    RaggedLayout,
    decode_metadata,
    explain_backends,
    kpool_decode,
    kpool_ragged_layout,
    kv_read_table,
    mosaic,
)
from pallas_kernels import backend as backends
from pallas_kernels.aot import read_program

each_call = pytest.mark.parametrize("name", CALLS)
MOSAIC = pytest.param("mosaic", marks=pytest.mark.skipif(mosaic.unavailable() is not None, reason="no Mosaic GPU"))
each_gpu_backend = pytest.mark.parametrize("backend", ["triton", MOSAIC])


def of(name, backend):
    """(function of the destination and the operands, its shapes, launches it may take)."""
    call, arguments, launches = CALLS[name]
    return functools.partial(call, backend=backend), arguments, launches


def size(out):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(out))


@pytest.mark.parametrize(
    ("name", "backend"),
    [("decode, packed", None), ("decode, separate", None), ("decode, views", None)]
    + [("decode, packed", backend) for backend in ("interpret", "reference")],
)
def test_donated_destination_is_consumed(name, backend):
    function, _, _ = of(name, backend)
    out, *operands = kernel_calls.values(name)
    result = jax.jit(function, donate_argnums=0)(out, *operands)
    assert all(x.is_deleted() for x in jax.tree.leaves(out))
    assert type(result) is type(out) and not any(x.is_deleted() for x in jax.tree.leaves(result))


# Without a GPU: lowering needs no plugin ------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["triton", MOSAIC])
@pytest.mark.parametrize(("pages", "rows"), [(0, 3), (3, 0)])
def test_an_array_without_cells_among_others_lowers(pages, rows, backend):
    def call(out, *arguments):
        return kpool_ragged_layout(*arguments, out, pool=4, backend=backend)

    out = RaggedLayout(int32(pages), int32(rows), int32(rows))
    text = aot.lower_text(call, out, int32(2, 4), *[int32(2)] * 4, int32(rows))
    assert text.count("custom_call") == 1 and f"tensor<{rows}xi32>" in text


LEFT_TO_XLA = ("replay", "commit track", "commit track, chain")  # unless a backend is named


@each_call
@pytest.mark.parametrize("backend", [None, "triton", MOSAIC])
def test_lowers_for_cuda_without_a_plugin(name, backend):
    function, arguments, launches = of(name, backend)
    text = aot.lower_text(function, *arguments)
    if backend is None and name in LEFT_TO_XLA:
        assert "custom_call" not in text
        return
    target = "mosaic_gpu_v2" if backend == "mosaic" else "__gpu$xla.gpu.triton"
    assert text.count(f"@{target}") == launches
    main = next(line for line in text.splitlines() if "func.func public @main" in line)
    assert main.count("tf.aliasing_output") == len(jax.tree.leaves(arguments[0]))


def test_a_cpu_program_holds_no_trace_of_the_gpu_kernel():
    function, arguments, _ = of("verify, packed", None)
    text = jax.jit(function, donate_argnums=0).lower(*arguments).as_text()
    assert "triton" not in text and "mosaic" not in text and "tf.aliasing_output" in text


# Without a GPU: compiled for sm_90 through the CUDA plugin -----------------------------------------------------------


@each_call
@each_gpu_backend
def test_one_launch_no_copy_and_everything_in_place_on_sm_90(name, backend):
    if reason := aot.missing():
        pytest.skip(reason)
    function, arguments, launches = of(name, backend)
    compiled = aot.compile_for_h200(function, *arguments)
    assert aot.launches(compiled).total() == launches, compiled.as_text()
    assert compiled.memory_analysis().alias_size_in_bytes == size(arguments[0])


def test_the_launch_count_sees_the_copies_of_a_destination_that_is_not_donated():
    if reason := aot.missing():
        pytest.skip(reason)
    function, arguments, _ = of("decode, separate", None)
    compiled = aot.compile_for_h200(lambda _, out, *rest: function(out, *rest), int32(1), *arguments)
    found = aot.launches(compiled)
    assert any("copy" in kind for kind in found), found


# Beside a call that takes them as they are, XLA leaves slices of so many bytes, and of multiples, where they lie.
PART = 256
ROWS, WIDTH = PART // 4, 4


def table(lens, rows, source, out, backend):
    return kv_read_table(lens, rows, source, out, page_size=16, zero_tail=True, backend=backend)


def sliced_input(out, packed, rows, source, *, at, backend):
    return table(packed[at : at + ROWS], rows, source, out, backend)


def sliced_destination(packed, lens, rows, source, *, at, backend):
    part = slice(at, at + ROWS * WIDTH)
    out = table(lens, rows, source, packed[part].reshape(ROWS, WIDTH), backend)
    return packed.at[part].set(out.ravel())


def result_put_into_another(packed, out, lens, rows, source, *, at, backend):
    return lax.dynamic_update_slice(packed, table(lens, rows, source, out, backend).ravel(), (at,))


def result_put_by_a_loop(packed, lens, rows, source, *, at, backend):
    def turn(i, packed):
        out = table(lens, rows, source, jnp.full((ROWS, WIDTH), i), backend)
        return lax.dynamic_update_slice(packed, out.ravel(), (at + ROWS * WIDTH * i,))

    return lax.fori_loop(0, 3, turn, packed)


PARTS = {
    sliced_input: (int32(ROWS, WIDTH), int32(1000)),
    sliced_destination: (int32(1000), int32(ROWS)),
    result_put_into_another: (int32(1000), int32(ROWS, WIDTH), int32(ROWS)),
    result_put_by_a_loop: (int32(1000), int32(ROWS)),
}


@each_gpu_backend
@pytest.mark.parametrize("at", [1, 32], ids=["4 bytes from the start", "128 bytes from the start"])
@pytest.mark.parametrize("function", PARTS)
def test_operands_and_results_are_no_parts_of_other_arrays(function, at, backend, tmp_path):
    """Mosaic demands addresses that are multiples of 256, which only whole arrays have. And where the result was not
    the destination's memory, the cells that the kernel leaves alone would be lost."""
    if reason := aot.missing():
        pytest.skip(reason)
    arguments = *PARTS[function], int32(ROWS), int32(9, WIDTH)
    compiled = aot.compile_for_h200(functools.partial(function, at=at, backend=backend), *arguments, dump=tmp_path)
    # Where XLA passes on an address inside an array, slice and call are one fusion.
    kinds = [launch.kind for launch in read_program(compiled).launches]
    assert kinds.count("custom-call") == 1, compiled.as_text()
    (text,) = [path.read_text() for path in tmp_path.glob("*-buffer-assignment.txt")]
    places = [int(offset) for offset in re.findall(r"\(size=\d+,offset=(\d+)\)", text)]
    assert places and not any(place % 256 for place in places)


@each_gpu_backend
@pytest.mark.parametrize(("batch", "pages"), [(1, 33), (300, 33), (2, 1)])
def test_tables_of_any_width_compile(batch, pages, backend):
    if reason := aot.missing():
        pytest.skip(reason)
    out = DecodeTables(int32(batch), int32(batch + 1), int32(batch, pages), int32(batch, pages))

    def call(out, seq_lens, rows, source, v2p):
        return decode_metadata(seq_lens, rows, source, out, page_size=16, zero_tail=True, v2p=v2p, backend=backend)

    compiled = aot.compile_for_h200(call, out, int32(batch), int32(batch), int32(batch, pages), int32(50, 2))
    assert aot.launches(compiled).total() == 1


@each_gpu_backend
@pytest.mark.parametrize("use", ["maximum", "minimum", "less", "div"])
def test_a_choice_of_a_scalar_keeps_its_sign(use, backend, tmp_path):
    """Numbers that the compiler knows nothing of are clamped, compared and divided as signed ones."""
    if reason := aot.missing():
        pytest.skip(reason)
    uses = {
        "maximum": lambda lanes, x: lanes.maximum(x, 5),
        "minimum": lambda lanes, x: lanes.minimum(x, 5),
        "less": lambda lanes, x: lanes.where(x < 5, 1, x),
        "div": lambda lanes, x: lanes.div(x, 3),
    }

    def write(lanes, program, ins, outs):
        lane = lanes.iota(128)
        live = lane <= program
        chosen = lanes.where(live, lanes.load(ins[0], (program,)), lanes.load(ins[0], (lane,), lane < 128))
        lanes.store(outs[0], (lane,), uses[use](lanes, chosen), live)

    def call(out, values):
        return backends.run(Small(write), backend, (values,), (out,))[0]

    aot.compile_for_h200(call, int32(128), int32(128), dump=tmp_path)
    (text,) = aot.ptx(tmp_path).values()
    instruction = {
        "maximum": r"max\.%s32",
        "minimum": r"min\.%s32",
        "less": r"setp\.l[te]\.%s32",
        "div": r"mul\.hi\.%s32",
    }
    assert re.search(instruction[use] % "s", text) and not re.search(instruction[use] % "u", text)


@each_gpu_backend
@pytest.mark.parametrize("where", ["source", "destination"])
def test_rows_of_a_table_past_2_to_the_31_cells_have_64_bit_offsets(where, backend, tmp_path):
    if reason := aot.missing():
        pytest.skip(reason)
    rows, columns = 2_000_000, 4096  # more than 2^32: below that an unsigned 32-bit offset is right, and LLVM finds it
    big, small = (rows, columns), (8, columns)
    batch = rows if where == "destination" else 8
    source, out = (big, small) if where == "source" else (small, big)

    def call(out, seq_lens, req_rows, source):
        return kv_read_table(seq_lens, req_rows, source, out, page_size=1, zero_tail=False, backend=backend)

    aot.compile_for_h200(call, int32(*out), int32(batch), int32(batch), int32(*source), dump=tmp_path)
    (text,) = aot.ptx(tmp_path).values()
    inputs = 3  # then come the destinations, in Triton's own order: as operands and again as results
    parameter = 2 if where == "source" else inputs + (backend == "triton")
    assert ptx.row_offset_bits(text, parameter, 4 * columns) == 64


@each_gpu_backend
@pytest.mark.parametrize("where", ["source", "destination"])
def test_rows_of_a_wide_table_past_2_to_the_31_cells_have_64_bit_offsets(where, backend, tmp_path):
    if reason := aot.missing():
        pytest.skip(reason)
    rows, columns = 2_000_000, 4096
    big, small = (rows, columns), (8, columns)
    batch = rows if where == "destination" else 8
    source, out = (big, small) if where == "source" else (small, big)

    def call(out, seq_lens, req_rows, source):
        tables = KPoolTables(page_table_1=out)
        return kpool_decode(seq_lens, req_rows, source, tables, pool=4, topk=2048, backend=backend).page_table_1

    aot.compile_for_h200(call, int32(*out), int32(batch), int32(batch), int32(*source), dump=tmp_path)
    (text,) = aot.ptx(tmp_path).values()
    parameter = 2 if where == "source" else 3 + (backend == "triton")
    assert ptx.row_offset_bits(text, parameter, 4 * columns) == 64


# On a GPU ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@each_call
@each_gpu_backend
def test_device_pointers_stay_over_many_calls(name, backend):
    function, _, _ = of(name, backend)
    step = jax.jit(function, donate_argnums=0)
    out, *operands = kernel_calls.values(name)
    pointers = lambda out: [x.unsafe_buffer_pointer() for x in jax.tree.leaves(out)]  # noqa: E731
    before = pointers(out)
    for _ in range(5):
        out = step(out, *operands)
    assert pointers(out) == before


@pytest.mark.gpu
def test_a_gpu_gets_a_compiled_kernel_by_default():
    chosen = {c.kernel: c.backend for c in explain_backends()}
    left = {name for name, backend in chosen.items() if backend == "reference"}
    assert left == {"replay_state_indices", "commit_track_indices", "store_rows"} and set(chosen.values()) == {
        "reference",
        "triton",
    }


@pytest.mark.gpu
@each_gpu_backend
def test_the_last_row_of_a_table_past_2_to_the_31_cells(backend):
    """Read and written at 64-bit offsets: a 32-bit one would wrap around to cells near the start."""
    rows, columns = 2200, 1_000_003
    source = jnp.full((rows, columns), 7, jnp.int32).at[rows - 1, columns - 1].set(5)
    call = functools.partial(kv_read_table, page_size=1, zero_tail=False, backend=backend)
    read = call(jnp.array([columns]), jnp.array([rows - 1]), source, jnp.zeros((1, columns), jnp.int32))
    assert read[0, -2:].tolist() == [7, 5]
    del source, read

    lengths = jnp.zeros(rows, jnp.int32).at[rows - 1].set(columns)
    out = jnp.full((rows, columns), -7, jnp.int32)
    step = jax.jit(lambda out, *rest: call(*rest, out), donate_argnums=0)
    out = step(out, lengths, jnp.zeros(rows, jnp.int32), jnp.arange(1, columns + 1, dtype=jnp.int32)[None])
    assert out[rows - 1, -1] == columns and out[rows - 1, 0] == 1
    assert (out[:-1] == -7).all()

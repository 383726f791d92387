"""The tools that prove things of compiled kernels without a GPU do see what they look for."""

import os

import jax
import jax.numpy as jnp
import kernel_aot as aot
import kernel_ptx as ptx
import pytest
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import aot as compiler
from pallas_kernels import mosaic, triton

ROWS, WIDTH = 3_000_000, 1024  # more than 2^31 cells
ROW_BYTES = 4 * WIDTH
LANES = 128


def int32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def pick_rows(cell):
    """out[b] = the first cells of row rows[b] of a table; `cell(row, columns)` is an index of the table."""

    def kernel(rows, table, _, out):
        b, columns = pl.program_id(0), jnp.arange(LANES, dtype=jnp.int32)
        out[b, columns] = table[cell(rows[b], columns)]

    def call(out, rows, table):
        return pl.pallas_call(
            kernel,
            grid=(len(rows),),
            out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
            input_output_aliases={2: 0},
            compiler_params=triton.pltriton.CompilerParams(num_warps=4, num_stages=1),
            name="pick_rows",
        )(rows, table, out)

    return call


by_row_and_column = pick_rows(lambda row, columns: (row, columns))
flat = pick_rows(lambda row, columns: (row * WIDTH + columns,))
ARGUMENTS = (int32(4, LANES), int32(4))


def pick_first(out, rows, table):
    """The first cell of each row, in Mosaic GPU."""
    from jax.experimental.pallas import mosaic_gpu

    def kernel(rows, table, out):
        b = lax.axis_index("program")
        out[b] = table[rows[b], 0]

    ref = jax.new_ref(out)
    lane = mosaic_gpu.CompilerParams(lowering_semantics=mosaic_gpu.LoweringSemantics.Lane)
    mosaic_gpu.kernel(kernel, out_type=(), grid=out.shape, grid_names=("program",), compiler_params=lane)(
        rows, table, ref
    )
    return jax.freeze(ref)


@pytest.fixture
def plugin():
    if reason := aot.missing():
        pytest.skip(reason)


# Finding the compiler -------------------------------------------------------------------------------------------------


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Empty folders in the place of PATH, of the toolkit and of the wheel."""
    folders = {name: tmp_path / name for name in ("path", "toolkit", "wheel")}
    for folder in folders.values():
        (folder / "bin").mkdir(parents=True)
    monkeypatch.setenv("PATH", str(folders["path"] / "bin"))
    monkeypatch.setattr(compiler, "TOOLKITS", [folders["toolkit"]])
    monkeypatch.setattr(compiler, "wheels", lambda: [folders["wheel"]])
    return folders


def put(folder, script="#!/bin/sh\n"):
    program = folder / "bin" / "ptxas"
    program.write_text(script)
    program.chmod(0o755)
    return program


def test_ptxas_is_looked_for_on_path_then_in_the_toolkit_then_in_the_wheel(places):
    assert aot.ptxas() is None
    for name in ("wheel", "toolkit", "path"):
        program = put(places[name])
        assert aot.ptxas() == program


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("place", ["path", "toolkit", "wheel"])
def test_the_ptxas_that_was_found_compiles(place, request):
    real = aot.ptxas().resolve()
    folder = request.getfixturevalue("places")[place]
    put(folder, f'#!/bin/sh\necho "$@" >> {folder}/calls\nexec {real} "$@"\n')
    aot.compile_for_h200(by_row_and_column, *ARGUMENTS, int32(8, WIDTH))
    assert "-arch=sm_90a" in (folder / "calls").read_text()


def test_one_line_says_what_is_missing(places, monkeypatch):
    monkeypatch.setattr(compiler, "plugin", lambda: None)
    everything = aot.missing()
    assert all(word in everything for word in ("CUDA plugin", "ptxas", "libdevice", "nvidia-cuda-nvcc"))
    monkeypatch.setattr(compiler, "plugin", lambda: 12)
    put(places["path"])
    assert aot.missing() == (
        f"compiling for sm_90 needs libdevice (in {places['toolkit']} or from nvidia-cuda-nvcc-cu12)"
    )
    assert "\n" not in everything


# What the host starts ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("plugin")
def test_thunks_are_kernels_and_copies(tmp_path):
    aot.compile_for_h200(by_row_and_column, *ARGUMENTS, int32(8, WIDTH), dump=tmp_path / "donated")
    assert aot.thunks(tmp_path / "donated") == ["kCustomKernel"]

    def kept(_, *arguments):
        return by_row_and_column(*arguments)

    aot.compile_for_h200(kept, int32(), *ARGUMENTS, int32(8, WIDTH), dump=tmp_path / "kept")
    found = aot.thunks(tmp_path / "kept")
    assert sorted(found) == ["kCopy", "kCustomKernel"], found


@pytest.mark.usefixtures("plugin")
def test_a_dump_leaves_the_environment_as_it_was(tmp_path):
    before = dict(os.environ)
    aot.compile_for_h200(by_row_and_column, *ARGUMENTS, int32(8, WIDTH), dump=tmp_path)
    assert os.environ == before


# How wide an offset is -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    ("call", "shape", "bits"),
    [(by_row_and_column, (ROWS, WIDTH), 64), (flat, (ROWS * WIDTH,), 32)],
    ids=["row and column", "flat int32 index"],
)
def test_triton_row_offsets(call, shape, bits, tmp_path):
    """A table of more than 2^31 cells: an index in int32 cells wraps around, and the tool says so."""
    aot.compile_for_h200(call, *ARGUMENTS, int32(*shape), dump=tmp_path)
    (text,) = aot.ptx(tmp_path).values()
    assert ptx.row_offset_bits(text, 1, ROW_BYTES) == bits
    with pytest.raises(LookupError, match="parameter 0"):  # the vector of row numbers has no such rows
        ptx.row_offset_bits(text, 0, ROW_BYTES)


@pytest.mark.usefixtures("plugin")
@pytest.mark.skipif(mosaic.unavailable() is not None, reason=str(mosaic.unavailable()))
def test_mosaic_row_offsets(tmp_path):
    aot.compile_for_h200(pick_first, int32(4), int32(4), int32(ROWS, WIDTH), dump=tmp_path)
    (text,) = aot.ptx(tmp_path).values()
    assert ptx.row_offset_bits(text, 1, ROW_BYTES) == 64


def kernel(*lines):
    """PTX that reads one cell at %rd9 of parameter 1."""
    head = ["ld.param::entry.b64 %rd1, [pick_param_1];", "cvta.to.global.u64 %rd2, %rd1;", "mov.u32 %r1, %ctaid.x;"]
    return "\n".join(f"\t{line}" for line in (*head, *lines, "@%p1 ld.global.b32 { %r9 }, [ %rd9 + 0 ];"))


ROW = ["mul.wide.u32 %rd3, %r1, 4096;", "add.s64 %rd9, %rd2, %rd3;"]
CELL = ["mul.wide.s32 %rd3, %r2, 4;", "add.s64 %rd9, %rd2, %rd3;"]


@pytest.mark.parametrize(
    ("lines", "bits"),
    [
        (ROW, 64),
        (["mad.wide.s32 %rd9, %r1, 4096, %rd2;"], 64),
        (["cvt.s64.s32 %rd4, %r1;", "shl.b64 %rd3, %rd4, 12;", "add.s64 %rd9, %rd2, %rd3;"], 64),
        (["mul.lo.s32 %r2, %r1, 5;", "mul.wide.s32 %rd3, %r2, 4096;", "add.s64 %rd9, %rd2, %rd3;"], 64),
        (["shl.b32 %r2, %r1, 10;", *CELL], 32),
        (["mul.lo.s32 %r2, %r1, 1024;", *CELL], 32),
        (["mov.b32 %r3, 1024;", "mad.lo.s32 %r2, %r1, %r3, %r4;", *CELL], 32),
        (["shl.b32 %r3, %r1, 10;", "selp.b32 %r2, %r3, 0, %p1;", *CELL], 32),
        (["mov.b32 %r2, 0;", "add.s32 %r2, %r2, 1024;", *CELL], 32),
        ([*ROW, "add.s64 %rd9, %rd9, 4096;"], 64),
    ],
)
def test_row_offsets_of_written_kernels(lines, bits):
    """Products in 64 bits; rows counted in 32 bits; cells counted in 32 bits, by a product or by steps of a loop."""
    assert ptx.row_offset_bits(kernel(*lines), 1, 4096) == bits


def test_address_steps_name_the_numbers():
    text = kernel("shl.b32 %r2, %r1, 10;", "add.s32 %r3, %r2, %tid.x;", "mad.wide.s32 %rd9, %r3, 4, %rd2;")
    assert ptx.address_steps(text) == {1: {(4096, 4), (4, 4)}}


@pytest.mark.parametrize("line", ["prmt.b32 %r2, %r1, %r3, 5;", "mul.lo.s32 %r2, %r1, %r3;"])
def test_what_is_not_understood_is_an_error(line):
    with pytest.raises(ValueError, match=r"not known|run-time"):
        ptx.address_steps(kernel(line, *CELL))

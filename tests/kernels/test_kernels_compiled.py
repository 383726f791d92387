"""Destinations are written in place, and a CUDA program holds one launch a kernel and no copy."""

import jax
import jax.numpy as jnp
import kernel_aot as aot
import pytest

from pallas_kernels import (
    KERNELS,
    DecodeTables,
    MetadataLayout,
    PackedMetadata,
    WindowBuffers,
    decode_lengths,
    decode_metadata,
    draft_write_window,
    explain_backends,
)

B, D, P, NV = 5, 4, 300, 99
LAYOUT = MetadataLayout(B, D, P, has_swa=True)


def int32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


PACKED = PackedMetadata(int32(LAYOUT.size), LAYOUT)
TABLES = DecodeTables(int32(B), int32(B + 1), int32(B, P), int32(B, P))
BUFFERS = WindowBuffers(*(int32(B, D) for _ in range(5)))
ROWS = (int32(B), int32(B), int32(7, P))


def decode(backend):
    def call(out, seq_lens, rows, source, v2p):
        return decode_metadata(
            seq_lens, rows, source, out, page_size=64, seq_len_delta=D, v2p=v2p, zero_tail=True, backend=backend
        )

    return call


def decode_static(backend):
    def call(out, seq_lens, rows, source, full, slots):
        maps = {"full_v2p": full, "full_to_swa": slots}
        return decode_metadata(
            seq_lens, rows, source, out, page_size=64, granularity="token", zero_tail=False, backend=backend, **maps
        )

    return call


def lengths(backend):
    def call(out, seq_lens):
        return decode_lengths(seq_lens, out, backend=backend)

    return call


def window(backend):
    def call(out, start, rows, source, v2p, anchor, limit):
        options = {"page_size": 64, "v2p": v2p, "anchor": anchor, "limit": limit, "backend": backend}
        return draft_write_window(start, rows, source, out, **options)

    return call


def window_separate(backend):
    def call(out, start, rows, source, full, swa):
        maps = {"full_v2p": full, "swa_v2p": swa}
        return draft_write_window(
            start, rows, source, out, page_size=1, granularity="token", limit=512, backend=backend, **maps
        )

    return call


def verify(backend):
    def call(out, lens, rows, source, v2p, anchor, limit):
        out = decode(backend)(out, lens, rows, source, v2p)
        return window(backend)(out, lens, rows, source, v2p, anchor, limit)

    return call


WINDOW_OPERANDS = (*ROWS, int32(NV, 2), int32(B), int32())
CALLS = {  # name: (function of a backend, destination and operands, launches it may take)
    "decode, packed": (decode, (PACKED, *ROWS, int32(NV, 2)), 1),
    "decode, separate": (decode, (TABLES, *ROWS, int32(NV, 2)), 1),
    "decode, static SWA map": (decode_static, (TABLES, *ROWS, int32(NV), int32(NV * 64)), 1),
    "lengths, packed": (lengths, (PACKED, int32(B)), 1),
    "lengths, separate": (lengths, (DecodeTables(int32(B), int32(B + 1)), int32(B)), 1),
    "window, packed": (window, (PACKED, *WINDOW_OPERANDS), 1),
    "window, separate": (window, (BUFFERS, *WINDOW_OPERANDS), 1),
    "window, separate maps": (window_separate, (BUFFERS._replace(anchor_ids=None), *ROWS, int32(NV), int32(NV)), 1),
    "verify, packed": (verify, (PACKED, *WINDOW_OPERANDS), 2),
}
each_call = pytest.mark.parametrize("name", CALLS)


def size(out):
    return sum(x.size * 4 for x in jax.tree.leaves(out))


@pytest.mark.parametrize(("packed", "backend"), [(True, None), (False, None), (True, "interpret"), (True, "reference")])
def test_donated_destination_is_consumed(packed, backend):
    out = jax.tree.map(lambda x: jnp.full(x.shape, -7, x.dtype), PACKED if packed else TABLES)
    operands = [jnp.zeros(x.shape, x.dtype) for x in (*ROWS, int32(NV, 2))]
    result = jax.jit(decode(backend), donate_argnums=0)(out, *operands)
    assert all(x.is_deleted() for x in jax.tree.leaves(out))
    assert type(result) is type(out) and not any(x.is_deleted() for x in jax.tree.leaves(result))


@each_call
@pytest.mark.parametrize("backend", [None, "triton"])
def test_lowers_for_cuda_without_a_plugin(name, backend):
    make, arguments, kernels = CALLS[name]
    text = aot.lower_text(make(backend), *arguments)
    assert text.count("@__gpu$xla.gpu.triton") == kernels
    main = next(line for line in text.splitlines() if "func.func public @main" in line)
    assert main.count("tf.aliasing_output") == len(jax.tree.leaves(arguments[0]))


def test_a_cpu_program_holds_no_trace_of_the_gpu_kernel():
    make, arguments, _ = CALLS["verify, packed"]
    text = jax.jit(make(None), donate_argnums=0).lower(*arguments).as_text()
    assert "triton" not in text and "tf.aliasing_output" in text


@each_call
@pytest.mark.parametrize("backend", [None, "triton"])
def test_one_launch_no_copy_and_everything_in_place_on_sm_90(name, backend):
    if reason := aot.missing():
        pytest.skip(reason)
    make, arguments, kernels = CALLS[name]
    compiled = aot.compile_for_h200(make(backend), *arguments)
    assert aot.launches(compiled).total() == kernels, compiled.as_text()
    assert compiled.memory_analysis().alias_size_in_bytes == size(arguments[0])


def test_the_launch_count_sees_the_copies_of_a_destination_that_is_not_donated():
    if reason := aot.missing():
        pytest.skip(reason)
    make, arguments, _ = CALLS["decode, separate"]
    compiled = aot.compile_for_h200(lambda _, out, *rest: make(None)(out, *rest), int32(1), *arguments)
    found = aot.launches(compiled)
    assert any("copy" in kind for kind in found), found


def test_explain_backends_names_every_kernel_and_a_reason():
    choices = explain_backends()
    assert [c.kernel for c in choices] == list(KERNELS)
    if jax.default_backend() == "cpu":
        assert {c.backend for c in choices} == {"reference"}
        assert all("need a CUDA device" in c.reason and "cpu" in c.reason for c in choices)


@pytest.mark.gpu
def test_device_pointers_stay_over_many_calls():
    assert {c.backend for c in explain_backends()} == {"triton"}
    make, arguments, _ = CALLS["verify, packed"]
    step = jax.jit(make(None), donate_argnums=0)
    out, *operands = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), arguments)
    before = out.buffer.unsafe_buffer_pointer()
    for _ in range(5):
        out = step(out, *operands)
    assert out.buffer.unsafe_buffer_pointer() == before

"""Both kernels against the recorded outputs of the public kernels whose contract they share."""

import json
import pathlib

import jax.numpy as jnp
import kernel_cases as cases
import numpy as np
import pytest

from pallas_kernels import DecodeTables, decode_lengths, decode_metadata, draft_write_window

ARCHIVE = np.load(pathlib.Path(__file__).parents[1] / "data" / "translated.npz")
META = json.loads(bytes(ARCHIVE["meta"]).decode())


def select(kernel, **conditions):
    return [
        i
        for i, m in enumerate(META)
        if m["kernel"] == kernel and all(m[name] == value for name, value in conditions.items())
    ]


def arrays(case, kind):
    prefix = f"{case}/{kind}/"
    return {name.removeprefix(prefix): ARCHIVE[name] for name in ARCHIVE.files if name.startswith(prefix)}


def maps(inputs):
    return {name: inputs[name] for name in ("full_v2p", "swa_v2p", "full_to_swa") if name in inputs}


def test_archive_has_the_expected_cases():
    lengths, tables = (select("decode_metadata", skip_page_table=skip) for skip in (True, False))
    assert (len(tables), len(lengths), len(select("draft_write_window"))) == (32, 4, 16)


@pytest.mark.parametrize("backend", cases.BACKENDS)
@pytest.mark.parametrize("case", select("decode_metadata", skip_page_table=False))
def test_decode_metadata(case, backend):
    meta, inputs, expected = META[case], arrays(case, "in"), arrays(case, "out")
    out = cases.decode_out(*expected["page_table"].shape, has_swa="swa_page_table" in expected)
    actual = cases.run(
        decode_metadata,
        out,
        seq_lens=inputs["seq_lens"],
        req_rows=inputs["req_pool_indices"],
        source=inputs["req_to_token"],
        granularity="token",
        page_size=meta["page_size"],
        seq_len_delta=meta["seq_len_delta"],
        max_pages=meta["max_seq_pages"],
        zero_tail=meta["zero_tail"],
        backend=backend,
        **maps(inputs),
    )
    cases.assert_equal(actual, expected)  # whole arrays: what was not written is -7 in both


@pytest.mark.parametrize("backend", cases.BACKENDS)
@pytest.mark.parametrize("case", select("decode_metadata", skip_page_table=True))
def test_decode_lengths(case, backend):
    inputs, expected = arrays(case, "in"), arrays(case, "out")
    out = [jnp.full(expected[name].shape, cases.STALE, jnp.int32) for name in ("cache_seqlens", "cu_seqlens_k")]
    lengths, prefix, *_ = decode_lengths(
        inputs["seq_lens"], DecodeTables(*out), seq_len_delta=META[case]["seq_len_delta"], backend=backend
    )
    np.testing.assert_array_equal(lengths, expected["cache_seqlens"])
    np.testing.assert_array_equal(prefix, expected["cu_seqlens_k"])


@pytest.mark.parametrize("backend", cases.BACKENDS)
@pytest.mark.parametrize("case", select("draft_write_window"))
def test_draft_write_window(case, backend):
    inputs, expected = arrays(case, "in"), arrays(case, "out")
    shape = expected["positions"].shape
    actual = cases.run(
        draft_write_window,
        cases.window_out(*shape, has_swa="swa_loc" in expected),
        start=inputs["start"],
        req_rows=inputs["req_pool_indices"],
        source=inputs["req_to_token"],
        granularity="token",
        page_size=META[case]["page_size"],
        anchor=inputs["anchor"],
        backend=backend,
        **maps(inputs),
    )
    expected = {name: value.reshape(shape) for name, value in expected.items()}
    cases.assert_equal(actual, expected | {"anchor_ids": expected["anchor"]})

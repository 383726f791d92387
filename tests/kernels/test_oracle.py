"""The oracle against the recorded outputs of the public kernels, and by hand where the recordings have no case."""

import json
import pathlib

import kernel_oracle as oracle
import numpy as np
import pytest

STALE = -7
ARCHIVE = np.load(pathlib.Path(__file__).parents[1] / "data" / "translated.npz")
META = json.loads(bytes(ARCHIVE["meta"]).decode())


def arrays(case, kind):
    prefix = f"{case}/{kind}/"
    return {name.removeprefix(prefix): ARCHIVE[name] for name in ARCHIVE.files if name.startswith(prefix)}


def pick(mapping, *names):
    return {name: mapping[name] for name in names if name in mapping}


def decode_metadata(out, request, meta, inputs):
    if meta["skip_page_table"]:
        return oracle.lengths(out, request["seq_lens"], seq_len_delta=meta["seq_len_delta"])
    arguments = pick(meta, "page_size", "seq_len_delta", "zero_tail") | {"max_pages": meta["max_seq_pages"]}
    return oracle.decode(out, **request, **arguments, **pick(inputs, "full_v2p", "swa_v2p", "full_to_swa"))


def draft_extend_metadata(out, request, meta, inputs):
    arguments = pick(inputs, "extend_seq_lens", "full_to_swa")
    oracle.draft_extend(out, **request, page_size=meta["page_size"], **arguments)
    if "out_cache_loc" in inputs:  # the same translation as that of a stream of pages of one token
        tokens = inputs["out_cache_loc"]
        oracle.read_stream(
            out["swa_out_cache_loc"], [len(tokens)], [0], tokens[None], [0, len(tokens)], page_size=1,
            granularity="token", full_to_swa=inputs["full_to_swa"],
        )  # fmt: skip


def kv_read_table(out, request, meta, inputs):
    arguments = pick(meta, "page_size", "zero_tail", "seq_len_delta", "max_pages") | pick(inputs, "v2p")
    oracle.read_table(out["out"], **request, **arguments)


def kv_read_stream(out, request, meta, inputs):
    arguments = pick(inputs, "indptr", "kv_start", "v2p")
    oracle.read_stream(out["out"], **request, page_size=meta["page_size"], **arguments)


def draft_write_window(out, request, meta, inputs):
    names = {"anchor": "anchor_ids"}
    shape = -1, meta["num_draft_tokens"]
    views = {names.get(name, name): array.reshape(shape) for name, array in out.items()}
    arguments = pick(inputs, "anchor", "full_v2p", "swa_v2p")
    oracle.window(views, **request, page_size=meta["page_size"], **arguments)


def extend_cache_locs(out, request, meta, inputs):
    oracle.extend_locs(out["out"], **request)


CALLS = {
    call.__name__: call
    for call in (
        decode_metadata,
        draft_extend_metadata,
        kv_read_table,
        kv_read_stream,
        draft_write_window,
        extend_cache_locs,
    )
}


@pytest.mark.parametrize("case", range(len(META)))
def test_equals_the_recorded_outputs(case):
    meta, inputs, expected = META[case], arrays(case, "in"), arrays(case, "out")
    request = pick(inputs, "seq_lens", "start", "end")
    request |= {"req_rows": inputs["req_pool_indices"], "source": inputs["req_to_token"], "granularity": "token"}
    out = {name: np.full(array.shape, STALE) for name, array in expected.items()}
    CALLS[meta["kernel"]](out, request, meta, inputs)
    for name, array in expected.items():  # whole arrays: what was not written is -7 in both
        np.testing.assert_array_equal(out[name], array, err_msg=name)


def test_every_recorded_case_is_here():
    kernels = [meta["kernel"] for meta in META]
    assert {name: kernels.count(name) for name in kernels} == {
        "decode_metadata": 36,
        "draft_extend_metadata": 14,
        "kv_read_table": 16,
        "kv_read_stream": 16,
        "draft_write_window": 16,
        "extend_cache_locs": 16,
    }


# Two requests; row 1 holds virtual pages 5, 9, -1, 2, row 0 is the sink row. Page 9 is unbound, page 12 past the map.
SOURCE = np.array([[0, 0, 0, 0], [5, 9, -1, 2], [12, 5, 0, 0]])
V2P = np.array([0, 3, 4, 6, 8, 7, 1, 2, 9, -1])


def stale(*shape):
    return np.full(shape, STALE)


def as_tokens(pages, page_size):
    tokens = pages[:, :, None] * page_size + np.arange(page_size)
    return np.where(pages[:, :, None] < 0, -1, tokens).reshape(len(pages), -1)


each_granularity = pytest.mark.parametrize("granularity", ["page", "token"])


def source_and(granularity):
    """SOURCE, page_size 4, in either granularity."""
    source = SOURCE if granularity == "page" else as_tokens(SOURCE, 4)
    return {"source": source, "granularity": granularity, "page_size": 4}


@each_granularity
def test_table(granularity):
    lengths, rows = [13, 5, 1], [1, 2, 77]  # row 77 reads row 0
    common = source_and(granularity) | {"v2p": V2P, "max_pages": 5}
    out = stale(3, 6)
    oracle.read_table(out, lengths, rows, zero_tail=False, **common)
    assert out.tolist() == [[7, 0, 0, 4, -7, -7], [0, 7, -7, -7, -7, -7], [0, -7, -7, -7, -7, -7]]
    oracle.read_table(out, lengths, rows, zero_tail=True, seq_len_delta=4, **common)
    assert out.tolist() == [[7, 0, 0, 4, 0, -7], [0, 7, 0, 0, 0, -7], [0, 0, 0, 0, 0, -7]]


@each_granularity
def test_table_by_static_map(granularity):
    """The token is translated, then divided: slots 22 and 9 of tokens 20 and 36 lie in pages 5 and 2."""
    slots = np.full(40, -1)
    slots[[20, 36]] = 22, 9
    out = stale(2, 2)
    oracle.read_table(out, [8, 8], [1, 2], zero_tail=False, full_to_swa=slots, **source_and(granularity))
    assert out.tolist() == [[5, 2], [0, 5]]  # token 48 is past the map


@each_granularity
def test_stream(granularity):
    """A window that starts inside a page; the second request is cut at its indptr, the third at the end."""
    call = source_and(granularity) | {"indptr": [0, 5, 7, 10], "kv_start": [2, 6, 12], "v2p": V2P}
    out = stale(9)
    oracle.read_stream(out, [5, 4, 3], [1, 2, 1], **call)
    assert out.tolist() == [30, 31, 0, 1, 2, 30, 31, 16, 17]


@each_granularity
def test_window(granularity):
    out = {name: stale(2, 3) for name in ("virtual_loc", "full_loc", "positions", "anchor_ids")}
    oracle.window(out, [3, 14], [1, 1], anchor=[8, 9], full_v2p=V2P, **source_and(granularity))
    assert {name: array.tolist() for name, array in out.items()} == {
        "virtual_loc": [[23, 36, 37], [10, 11, 0]],
        "full_loc": [[31, 0, 0], [18, 19, 0]],
        "positions": [[3, 4, 5], [14, 15, 16]],
        "anchor_ids": [[8, -7, -7], [9, -7, -7]],
    }


@each_granularity
def test_extend(granularity):
    """Positions 7 8 9 of row 1, none (the end lies before the start), 15 of row 2, 14 15 16 of row 0."""
    start, end, rows = [7, 2, 15, 14], [10, 1, 16, 17], [1, 1, 2, -1]
    out = stale(9)
    oracle.extend_locs(out, start, end, rows, **source_and(granularity))
    assert out.tolist() == [39, -1, -1, 3, 2, 3, 0, -7, -7]
    out = stale(2)
    oracle.extend_locs(out, [7], [11], [1], **source_and(granularity))
    assert out.tolist() == [39, -1]


def test_draft_extend_by_hand():
    out = {"cache_seqlens": stale(2), "cu_seqlens_k": stale(3), "cu_seqlens_q": stale(3), "page_table": stale(2, 3)}
    oracle.draft_extend(out, [9, 4], [3, 1], [1, 2], SOURCE, page_size=4, full_v2p=V2P)
    assert {name: array.tolist() for name, array in out.items()} == {
        "cache_seqlens": [9, 4],
        "cu_seqlens_k": [0, 9, 13],
        "cu_seqlens_q": [0, 3, 4],
        "page_table": [[7, 0, 0], [0, -7, -7]],
    }

"""Adapters of recorded kernels to the one launch of a forward, forward_metadata, that does what they do.

A recorded call becomes a forward with the same lengths, tables and maps. All sections of its buffer are destinations;
those that were recorded are compared. Where the contract of a forward differs, what was recorded is changed first.
"""

from collections.abc import Iterator

import numpy as np
from conformance_cases import STALE, Call, Case, Failed
from conformance_kpool import PLAN, live_prefix, pooled

import pallas_kernels as pk


def forward(arguments: dict, layout: pk.MetadataLayout) -> Iterator[Call]:
    before = {name: np.full(s.shape, STALE, np.int32) for name, s in layout.sections.items()}
    yield Call(pk.forward_metadata, arguments, before, None, ("packed",), layout)


def sections(case: Case, layout: pk.MetadataLayout, tail) -> None:
    """Recorded tables as wide as the buffer has them; what it has more is `tail`."""
    for name, array in case.expected.items():
        if array.ndim == 2 and name in layout.sections:
            width = layout.sections[name].shape[1]
            missing = max(width - array.shape[1], 0)
            case.expected[name] = np.pad(array[:, :width], ((0, 0), (0, missing)), constant_values=tail)


def maps(case: Case, page: int) -> dict:
    """The maps of a case by page; one by token has the tokens of a page beside each other."""
    arrays = case.arrays("full_v2p", "swa_v2p")
    for slots in case.arrays("full_to_swa").values():
        arrays["swa_v2p"] = slots[::page] // page
    return arrays


def fused_decode_metadata(case: Case) -> Iterator[Call]:
    """A verify of as many rows as were added to the lengths; without any, a draft chain."""
    rows, page, zero_tail = (case.meta.pop(name) for name in ("seq_len_delta", "page_size", "zero_tail"))
    lengths, skip, width = case.inputs.pop("seq_lens"), case.meta.pop("skip_page_table"), case.meta.pop("max_seq_pages")
    arguments = {"seq_lens": lengths, "mode": "verify" if rows else "chain", "page_size": page, "zero_tail": zero_tail}
    arguments |= case.requests() | maps(case, page)
    if skip:  # the tables have no columns then
        width = 0
    elif not zero_tail:
        case.expect_stale_past(lengths + rows, page)
    layout = pk.MetadataLayout(len(lengths), rows or 1, width, "swa_v2p" in arguments)
    sections(case, layout, STALE)
    return forward(arguments, layout)


def fused_draft_extend_metadata(case: Case) -> Iterator[Call]:
    page, lengths, new = case.meta.pop("page_size"), case.inputs.pop("seq_lens"), case.inputs.pop("extend_seq_lens")
    arguments = {"seq_lens": lengths - new, "extend_lens": new, "mode": "draft_extend", "page_size": page}
    arguments |= case.requests() | maps(case, page) | {"zero_tail": False}
    case.arrays("out_cache_loc")  # a translation of any tokens, which is not of a forward
    case.expected.pop("swa_out_cache_loc", None)
    case.expect_stale_past(lengths, page)
    width = case.expected["page_table"].shape[1]
    return forward(arguments, pk.MetadataLayout(len(lengths), int(new.max(initial=0)), width, "swa_v2p" in arguments))


def fused_draft_write_window(case: Case) -> Iterator[Call]:
    rows, lengths = case.meta.pop("num_draft_tokens"), case.inputs.pop("start")
    arguments = {"seq_lens": lengths, "mode": "verify"} | case.options("page_size")
    arguments |= case.requests() | case.arrays("anchor", "full_v2p", "swa_v2p")
    names = {"anchor": "anchor_ids"}
    shape = len(lengths), rows
    case.expected = {names.get(name, name): array.reshape(shape).copy() for name, array in case.expected.items()}
    case.expected["anchor_ids"][:, 1:] = 0
    return forward(arguments, pk.MetadataLayout(*shape, 3, "swa_v2p" in arguments))


def fused_replay_state_indices(case: Case) -> Iterator[Call]:
    """A forward of no rows, padded by requests of row 0, of which a forward has no state; nor has it of slot 0."""
    rows, valid = case.inputs.pop("req_pool_indices").copy(), case.meta.pop("valid_bs")
    rows[valid:] = 0
    tables = {"slot_of_req": case.inputs.pop("slot_of_req")}
    if "v2p" in case.inputs:
        tables["state_v2p"] = case.inputs.pop("v2p")
    none = (rows <= 0) | (tables["slot_of_req"][rows] <= 0)
    case.expected.pop("req_pool_indices")
    case.expected = {"state_slots": np.where(none, -1, case.expected["state_indices"])}
    arguments = {"seq_lens": np.zeros(len(rows), np.int32), "req_rows": rows, "source": np.zeros((1, 1), np.int32)}
    layout = pk.MetadataLayout(len(rows), 0, 0, False, has_state=True)
    return forward(arguments | tables | {"mode": "verify", "page_size": 1}, layout)


def forward_pooled(case: Case, arguments: dict, rows: int, page: int, tokens: int) -> Iterator[Call]:
    batch, pool = len(arguments["seq_lens"]), arguments["pool"]
    layout = pk.MetadataLayout(batch, rows, -(-tokens // (page * pool)), False, pk.KPoolShape(pool, rows))
    sections(case, layout, 0)
    return forward(arguments | {"granularity": "token", "page_size": page * pool}, layout)


def fused_pooled(case: Case) -> Iterator[Call]:
    call, extended = pooled(case), case.arrays("extend_seq_lens")
    case.meta.pop("static", None)
    batch, expected = len(call.cached), case.expected
    lens = expected.pop("paged_mqa_ctx_lens_2d", expected["cache_seqlens"][:, None])
    if (lens != expected["cache_seqlens"][:, None]).any():
        raise Failed("paged_mqa_ctx_lens_2d was recorded that is not cache_seqlens")
    # The buffer holds the rows of a request padded to `rows`, and tables once a request.
    new = np.bincount(call.requests, minlength=batch)
    ends = np.concatenate([[0], np.cumsum(new)])
    row = np.arange(call.rows)
    live, recorded = row < new[:, None], ends[:-1, None] + np.minimum(row, np.maximum(new[:, None] - 1, 0))
    for name in {"seqlens_expanded", "dsa_cache_seqlens"} & expected.keys():
        padded = np.append(expected[name], 0)[np.minimum(recorded, len(expected[name]))]
        expected[name] = np.where(live, padded, 0).ravel()
    sums = expected["dsa_cu_seqlens_k"]
    after = sums[ends[:-1, None] + np.minimum(row + 1, new[:, None])]
    expected["dsa_cu_seqlens_k"] = np.append(sums[:1], after)
    # Without a row of its own, a request's table is taken from the source.
    source, rows = call.arguments["source"], call.arguments["req_rows"]
    table = source[rows][:, :: call.attention] // call.attention
    wide, compact = (expected.pop(name, None) for name in ("page_table_1", "real_page_table"))
    for array in (wide if call.attention == 1 else None, compact):
        if array is not None:
            table[new > 0] = array[ends[:-1][new > 0]]
    expected["real_page_table"] = live_prefix(table, call.cached, call.attention, 0)
    before = call.cached - new  # tokens before the forward
    arguments = call.arguments | {"seq_lens": before, "mode": "draft_extend" if extended else "verify"}
    arguments |= {"extend_lens": extended["extend_seq_lens"]} if extended else {}
    return forward_pooled(case, arguments, call.rows, call.attention, source.shape[1])


def fused_kpool_decode(case: Case) -> Iterator[Call]:
    """A verify of one row."""
    return fused_pooled(case)


def fused_kpool_verify(case: Case) -> Iterator[Call]:
    return fused_pooled(case)


def fused_kpool_draft_extend(case: Case) -> Iterator[Call]:
    return fused_pooled(case)


def fused_kpool_write_plan(case: Case) -> Iterator[Call]:
    """A verify forward whose request table holds the tokens of the recorded pages."""
    rows, page = case.meta.pop("num_draft_tokens"), case.meta.pop("index_page_size")
    case.expected = {PLAN.get(name, name): array for name, array in case.expected.items()}
    if (case.expected.pop("req_rows") != case.inputs.pop("req_pool_indices")).any():
        raise Failed("req was recorded that is not req_pool_indices")
    pages, lengths = case.inputs.pop("real_page_table")[::rows], case.inputs.pop("write_start")
    tokens = (pages[:, :, None] * page + np.arange(page)).reshape(len(pages), -1)
    arguments = {
        "seq_lens": lengths,
        "req_rows": np.arange(len(lengths)),
        "source": tokens,
        "mode": "verify",
        "topk": 1,
    }
    return forward_pooled(case, arguments | case.options("pool"), rows, page, tokens.shape[1])


FUSED_ADAPTERS = (
    fused_decode_metadata,
    fused_draft_extend_metadata,
    fused_draft_write_window,
    fused_replay_state_indices,
    fused_kpool_decode,
    fused_kpool_verify,
    fused_kpool_draft_extend,
    fused_kpool_write_plan,
)

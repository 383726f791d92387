"""Adapters of the recorded kernels of pooled attention, and of the one launch into which a forward fuses them."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from conformance_cases import STALE, Call, Case, Failed

import pallas_kernels as pk


def live_prefix(table: np.ndarray, lengths: np.ndarray, page_size: int, tail) -> np.ndarray:
    """A recorded table whose columns past the live ones are `tail`."""
    return np.where(np.arange(table.shape[1]) * page_size < lengths[:, None], table, tail)


class Pooled(NamedTuple):
    """A recorded call of kpool_decode, kpool_verify or kpool_draft_extend.

    rows        rows a request at most
    requests    request of each recorded row
    cached      tokens in the cache of each request
    attention   tokens of an attention page
    arguments   of the public function, but for its modes
    """

    rows: int
    requests: np.ndarray
    cached: np.ndarray
    attention: int
    arguments: dict


def pooled(case: Case) -> Pooled:
    """Takes what all three kernels have out of a case; past their live columns its tables must stay as they were."""
    lengths, page = case.inputs.pop("seq_lens"), case.meta.pop("page_size")
    rows = case.meta.pop("num_draft_tokens", None) or case.meta.pop("max_extend_len", 1)
    batch = len(lengths)
    new = case.inputs.get("extend_seq_lens", np.full(batch, rows))
    requests = np.repeat(np.arange(batch), new)
    cached = lengths + (rows if "paged_mqa_ctx_lens_2d" in case.expected else 0)
    source = case.inputs.pop("req_to_token")[:, : case.meta.pop("max_len")]
    arguments = {"seq_lens": lengths, "req_rows": case.inputs.pop("req_pool_indices"), "source": source}
    for name, columns in (("page_table_1", 1), ("real_page_table", page)):
        if name in case.expected:
            case.expected[name] = live_prefix(case.expected[name], cached[requests], columns, STALE)
    if page == 1 and (case.expected.pop("real_page_table") != STALE).any():  # the wide table is its page table
        raise Failed("real_page_table was recorded for pages of one token")
    return Pooled(rows, requests, cached, page, arguments | case.options("pool", "topk"))


def kpool(case: Case, function: Callable, call: Pooled, **arguments) -> Iterator[Call]:
    before = case.before(*pk.KPoolTables._fields)
    arguments |= call.arguments | {"page_size": call.attention}
    yield Call(function, arguments, before, pk.KPoolTables, ("separate", "views"))


def kpool_decode(case: Case) -> Iterator[Call]:
    return kpool(case, pk.kpool_decode, pooled(case))


def kpool_verify(case: Case) -> Iterator[Call]:
    call = pooled(case)
    return kpool(case, pk.kpool_verify, call, rows=call.rows)


def kpool_draft_extend(case: Case) -> Iterator[Call]:
    call = pooled(case)
    rows = {"rows": call.rows, "padded": case.meta.pop("static")}
    return kpool(case, pk.kpool_draft_extend, call, extend_lens=case.inputs.pop("extend_seq_lens"), **rows)


PLAN = {"req": "req_rows", "seqlens_per_q": "seqlens_expanded", "pool_seqlens_per_q": "pool_seqlens"}


def kpool_write_plan(case: Case) -> Iterator[Call]:
    case.expected = {PLAN.get(name, name): array for name, array in case.expected.items()}
    arguments = case.arrays("write_start", "real_page_table") | {"req_rows": case.inputs.pop("req_pool_indices")}
    arguments |= {"rows": case.meta.pop("num_draft_tokens"), "page_size": case.meta.pop("index_page_size")}
    before = case.before(*pk.KPoolTables._fields)
    forms = ("separate", "views")
    yield Call(pk.kpool_write_plan, arguments | case.options("pool"), before, pk.KPoolTables, forms)


def fused(case: Case, arguments: dict, rows: int, page: int, tokens: int) -> Iterator[Call]:
    """The launch of a forward. All sections of its buffer are destinations; those that were recorded are compared."""
    batch, pool = len(arguments["seq_lens"]), arguments["pool"]
    layout = pk.MetadataLayout(batch, rows, -(-tokens // (page * pool)), False, pk.KPoolShape(pool, rows))
    for name, array in case.expected.items():  # tables are as wide as the buffer has them
        if array.ndim == 2 and name in layout.sections:
            missing = layout.sections[name].shape[1] - array.shape[1]
            case.expected[name] = np.pad(array, ((0, 0), (0, missing)))
    before = {name: np.full(s.shape, STALE, np.int32) for name, s in layout.sections.items()}
    options = {"granularity": "token", "page_size": page * pool}
    yield Call(pk.kpool_metadata, arguments | options, before, None, ("packed",), layout)


def fused_pooled(case: Case, mode: str) -> Iterator[Call]:
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
    arguments = call.arguments | {"mode": mode}
    arguments |= {"extend_lens": extended["extend_seq_lens"]} if extended else {}
    return fused(case, arguments, call.rows, call.attention, source.shape[1])


def fused_kpool_decode(case: Case) -> Iterator[Call]:
    return fused_pooled(case, "decode")


def fused_kpool_verify(case: Case) -> Iterator[Call]:
    return fused_pooled(case, "verify")


def fused_kpool_draft_extend(case: Case) -> Iterator[Call]:
    return fused_pooled(case, "draft_extend")


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
    return fused(case, arguments | case.options("pool"), rows, page, tokens.shape[1])


KPOOL_ADAPTERS = (
    kpool_decode,
    kpool_verify,
    kpool_draft_extend,
    kpool_write_plan,
    fused_kpool_decode,
    fused_kpool_verify,
    fused_kpool_draft_extend,
    fused_kpool_write_plan,
)

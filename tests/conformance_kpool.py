"""Adapters of the recorded kernels of pooled attention."""

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


KPOOL_ADAPTERS = (kpool_decode, kpool_verify, kpool_draft_extend, kpool_write_plan)

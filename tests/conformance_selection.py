"""Adapters of the recorded kernels around the selection of pools."""

from collections.abc import Iterator

from conformance_cases import Call, Case, Failed

import pallas_kernels as pk


def kpool_append_tail(case: Case) -> Iterator[Call]:
    topk = case.meta.pop("topk")
    arguments = case.arrays("topk_result", "seq_lens", "pool_lens", "page_table") | case.options("pool")
    if arguments["topk_result"].shape[1] != topk:
        raise Failed(f"topk={topk}, but topk_result has {arguments['topk_result'].shape[1]} columns")
    yield Call(pk.kpool_append_tail, arguments, case.before("out"), None, ("separate", "views"))


def kpool_ragged_layout(case: Case) -> Iterator[Call]:
    names = "page_table", "cu_pages_excl", "pool_pages", "cu_q_len_excl", "q_len", "pooled_seq_lens"
    arguments = case.arrays(*names) | case.options("pool", "index_page_size")
    before = case.before(*pk.RaggedLayout._fields)
    yield Call(pk.kpool_ragged_layout, arguments, before, pk.RaggedLayout, ("separate", "views"))


SELECTION_ADAPTERS = (kpool_append_tail, kpool_ragged_layout)

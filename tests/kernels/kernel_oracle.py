"""The metadata kernels' contract as plain Python loops over NumPy arrays; shares no code with the package.

Destinations are dictionaries of arrays and are written in place; a key that is absent or None is not wanted.
"""

import numpy as np


def entry(source, row, column):
    """Table entry, or None past its last column or before its first; an unknown row is row 0."""
    rows, columns = source.shape
    row = int(row) if 0 <= row < rows else 0
    return int(source[row, column]) if 0 <= column < columns else None


def virtual_page(source, granularity, page_size, row, position):
    """(virtual page, offset) of the token at a position; None when there is none."""
    if granularity == "token":
        token = entry(source, row, position)
        return None if token is None or token < 0 else divmod(token, page_size)
    page = entry(source, row, position // page_size)
    return None if page is None or page < 0 else (page, position % page_size)


def physical_page(table, page):
    """Physical page of a virtual one, None where unbound or past the table; without a table they are equal."""
    if table is None:
        return page
    return int(table[page]) if page < len(table) and table[page] >= 0 else None


def split_maps(v2p, full_v2p, swa_v2p):
    """(FULL map, SWA map) by page."""
    return (full_v2p, swa_v2p) if v2p is None else (np.asarray(v2p)[:, 0], np.asarray(v2p)[:, 1])


def decode(
    out, seq_lens, req_rows, source, *, page_size, zero_tail, granularity="page", seq_len_delta=0, max_pages=None,
    v2p=None, full_v2p=None, swa_v2p=None, full_to_swa=None,
):  # fmt: skip
    full, swa = split_maps(v2p, full_v2p, swa_v2p)
    total = 0
    out["cu_seqlens_k"][0] = 0
    for b, committed in enumerate(seq_lens):
        length = int(committed) + seq_len_delta
        total += length
        out["cache_seqlens"][b], out["cu_seqlens_k"][b + 1] = length, total
        columns = out["page_table"].shape[1] if max_pages is None else max_pages
        for c in range(columns):
            if c * page_size >= length:
                if zero_tail:
                    out["page_table"][b, c] = 0
                    if out.get("swa_page_table") is not None:
                        out["swa_page_table"][b, c] = 0
                continue
            found = virtual_page(source, granularity, page_size, req_rows[b], c * page_size)
            out["page_table"][b, c] = 0 if found is None else physical_page(full, found[0]) or 0
            if out.get("swa_page_table") is None:
                continue
            if found is None:
                out["swa_page_table"][b, c] = 0
            elif full_to_swa is not None:
                token = found[0] * page_size + found[1]
                slot = int(full_to_swa[token]) if token < len(full_to_swa) else -1
                out["swa_page_table"][b, c] = slot // page_size if slot >= 0 else 0
            else:
                out["swa_page_table"][b, c] = physical_page(swa, found[0]) or 0


def window(
    out, start, req_rows, source, *, page_size, granularity="page", anchor=None,
    v2p=None, full_v2p=None, swa_v2p=None, limit=None,
):  # fmt: skip
    full, swa = split_maps(v2p, full_v2p, swa_v2p)
    for b, first in enumerate(start):
        if anchor is not None:
            out["anchor_ids"][b, 0] = anchor[b]
        for j in range(out["positions"].shape[1]):
            position = int(first) + j
            out["positions"][b, j] = position
            raw = entry(source, req_rows[b], position if granularity == "token" else position // page_size)
            if limit is not None and position >= limit:
                raw = None
            if raw is None:
                virtual = 0
            elif granularity == "token" or raw < 0:
                virtual = raw
            else:
                virtual = raw * page_size + position % page_size
            out["virtual_loc"][b, j] = virtual
            for name, table in (("full_loc", full), ("swa_loc", swa)):
                if out.get(name) is not None:
                    page = None if raw is None or raw < 0 else physical_page(table, virtual // page_size)
                    out[name][b, j] = 0 if page is None else page * page_size + virtual % page_size

"""The metadata kernels' contract as plain Python loops over NumPy arrays; shares no code with the package.

Destinations are arrays, or dictionaries of arrays in which a key that is absent or None is not wanted; they are written
in place.
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


def virtual_token(source, granularity, page_size, row, position):
    """Virtual token id at a position, negative entries as they are; None when the source does not reach it."""
    raw = entry(source, row, position if granularity == "token" else position // page_size)
    if raw is None or raw < 0 or granularity == "token":
        return raw
    return raw * page_size + position % page_size


def physical_page(table, page):
    """Physical page of a virtual one, None where unbound or past the table; without a table they are equal."""
    if table is None:
        return page
    return int(table[page]) if page < len(table) and table[page] >= 0 else None


def table_page(found, page_size, v2p, full_to_swa):
    """What a page table holds for a `virtual_page`: a physical page by one of the two maps, or page 0, the sink."""
    if found is None:
        return 0
    page, offset = found
    if full_to_swa is None:
        return physical_page(v2p, page) or 0
    token = page * page_size + offset
    slot = int(full_to_swa[token]) if token < len(full_to_swa) else -1
    return slot // page_size if slot >= 0 else 0


def split_maps(v2p, full_v2p, swa_v2p):
    """(FULL map, SWA map) by page."""
    return (full_v2p, swa_v2p) if v2p is None else (np.asarray(v2p)[:, 0], np.asarray(v2p)[:, 1])


def prefix_sums(out, values):
    total = 0
    out[0] = 0
    for b, value in enumerate(values):
        total += int(value)
        out[b + 1] = total


def lengths(out, seq_lens, *, seq_len_delta=0):
    """cache_seqlens and cu_seqlens_k."""
    extended = [int(committed) + seq_len_delta for committed in seq_lens]
    for b, length in enumerate(extended):
        out["cache_seqlens"][b] = length
    prefix_sums(out["cu_seqlens_k"], extended)


def read_table(
    out, seq_lens, req_rows, source, *, page_size, zero_tail, granularity="page", seq_len_delta=0, max_pages=None,
    v2p=None, full_to_swa=None,
):  # fmt: skip
    """One page table; v2p has one dimension."""
    for b, committed in enumerate(seq_lens):
        length = int(committed) + seq_len_delta
        for c in range(out.shape[1] if max_pages is None else max_pages):
            if c * page_size < length:
                found = virtual_page(source, granularity, page_size, req_rows[b], c * page_size)
                out[b, c] = table_page(found, page_size, v2p, full_to_swa)
            elif zero_tail:
                out[b, c] = 0


def decode(
    out, seq_lens, req_rows, source, *, page_size, zero_tail, granularity="page", seq_len_delta=0, max_pages=None,
    v2p=None, full_v2p=None, swa_v2p=None, full_to_swa=None,
):  # fmt: skip
    """Lengths and both page tables."""
    lengths(out, seq_lens, seq_len_delta=seq_len_delta)
    full, swa = split_maps(v2p, full_v2p, swa_v2p)
    for name, table, tokens in (("page_table", full, None), ("swa_page_table", swa, full_to_swa)):
        if out.get(name) is not None:
            read_table(
                out[name], seq_lens, req_rows, source, page_size=page_size, zero_tail=zero_tail,
                granularity=granularity, seq_len_delta=seq_len_delta, max_pages=max_pages, v2p=table,
                full_to_swa=tokens,
            )  # fmt: skip


def draft_extend(out, seq_lens, extend_seq_lens, req_rows, source, *, zero_tail=False, **arguments):
    """As decode without a delta, and the prefix sums of the new rows."""
    decode(out, seq_lens, req_rows, source, zero_tail=zero_tail, **arguments)
    prefix_sums(out["cu_seqlens_q"], extend_seq_lens)


def read_stream(
    out, seq_lens, req_rows, source, indptr, *, page_size, granularity="page", kv_start=None, v2p=None,
    full_to_swa=None,
):  # fmt: skip
    """Physical token ids, one request after the other; v2p has one dimension."""
    for b, length in enumerate(seq_lens):
        first = 0 if kv_start is None else int(kv_start[b])
        for i in range(int(length)):
            cell, position = int(indptr[b]) + i, first + i
            if not 0 <= cell < min(int(indptr[b + 1]), len(out)):
                continue
            page_start = position // page_size * page_size
            found = virtual_page(source, granularity, page_size, req_rows[b], page_start)
            out[cell] = table_page(found, page_size, v2p, full_to_swa) * page_size + position % page_size


def window(
    out, start, req_rows, source, *, page_size, granularity="page", anchor=None,
    v2p=None, full_v2p=None, swa_v2p=None, limit=None,
):  # fmt: skip
    """Write locations, positions and anchors."""
    full, swa = split_maps(v2p, full_v2p, swa_v2p)
    for b, first in enumerate(start):
        if anchor is not None:
            out["anchor_ids"][b, 0] = anchor[b]
        for j in range(out["positions"].shape[1]):
            position = int(first) + j
            out["positions"][b, j] = position
            virtual = virtual_token(source, granularity, page_size, req_rows[b], position)
            if virtual is None or (limit is not None and position >= limit):
                virtual, bound = 0, False
            else:
                bound = virtual >= 0
            out["virtual_loc"][b, j] = virtual
            for name, table in (("full_loc", full), ("swa_loc", swa)):
                if out.get(name) is not None:
                    page = physical_page(table, virtual // page_size) if bound else None
                    out[name][b, j] = 0 if page is None else page * page_size + virtual % page_size


def extend_locs(out, start, end, req_rows, source, *, granularity="token", page_size=1):
    """Virtual token ids of positions start .. end - 1, one request after the other."""
    cell = 0
    for b, (first, last) in enumerate(zip(start, end, strict=True)):
        for position in range(int(first), int(last)):
            if cell < len(out):
                virtual = virtual_token(source, granularity, page_size, req_rows[b], position)
                out[cell] = 0 if virtual is None else virtual
            cell += 1


def replay(out, req_rows, slot_of_req, *, valid, v2p=None):
    """State slots; clears the padded rows of req_rows. `valid` is a mask or a number of requests."""
    for b, row in enumerate(req_rows):
        real = b < valid if np.ndim(valid) == 0 else valid[b]
        slot = slot_of_req[row] if real and 0 <= row < len(slot_of_req) else -1
        if v2p is not None:
            slot = v2p[slot] if 0 <= slot < len(v2p) else -1
        out[b] = slot if slot >= 0 else -1
        if not real:
            req_rows[b] = 0


def commit_track(accept_lens, seq_lens, *, num_draft_tokens, interval=None, accept_index=None):
    """(last_step, track_step), found by walking over the accepted tokens one by one."""
    last, track = [], []
    for b, (accepted, length) in enumerate(zip(accept_lens, seq_lens, strict=True)):
        last.append(-1)
        track.append(-1)
        for i in range(int(accepted)):
            node = i if accept_index is None else int(accept_index[b][i]) - b * num_draft_tokens
            last[b] = node
            if interval is not None and (int(length) + i + 1) % interval == 0:
                track[b] = node
    return last, track


def scatter_states(out, src, step, dst_index):
    """out[l, slot] = src[l, b, step]; out has the shape [L, slots, *inner]."""
    layers, _, rows = src.shape[:3]
    for b, (kept, slot) in enumerate(zip(step, dst_index, strict=True)):
        if 0 <= kept < rows and 0 <= slot < out.shape[1]:
            for layer in range(layers):
                out[layer, slot] = src[layer, b, kept]


def zero_pages(buffer, pages, page_units):
    """Pages 1 and on of each kind, where they lie inside the buffer."""
    for listed, units in zip(pages, page_units, strict=True):
        for page in map(int, listed):
            if page > 0 and (page + 1) * units <= len(buffer):
                for unit in range(page * units, (page + 1) * units):
                    buffer[unit] = 0

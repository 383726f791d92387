"""The contract of pooled attention's metadata as plain Python loops over NumPy arrays, and destinations for it.

Shares no code with the package. Destinations are a dictionary of arrays, written in place.
"""

import jax.numpy as jnp
import kernel_oracle as oracle
import numpy as np

from pallas_kernels import KPoolTables

STALE = -7


def attended(seen, pool, topk):
    """Tokens that a row which sees `seen` of them attends to."""
    closed, tail = divmod(seen, pool)
    return min(closed * pool, topk) + tail


def share_out(pools, processors):
    """[processor + 1, 2]: the first block of each, found by dealing out a list of all blocks."""
    blocks = [(row, block) for row, n in enumerate(pools) for block in range(-(-max(n, 1) // 256))]
    least, more = divmod(len(blocks), processors)
    starts, at = [], 0
    for processor in range(processors):
        starts.append(at)
        at += least + (processor >= processors - more)
    return [blocks[s] if s < len(blocks) else (len(pools), 0) for s in [*starts, at]]


def forward(
    out, seq_lens, req_rows, source, *, mode, rows, pool, topk, page, extend_lens=None, packed=False
):  # fmt: skip
    """What kpool_decode, kpool_verify and kpool_draft_extend write; `page`: tokens of an attention page."""
    lines, cached, starts = [], [], []
    for b, length in enumerate(map(int, seq_lens)):
        new = rows if extend_lens is None else int(extend_lens[b])
        starts.append(length if mode == "verify" else length - new)
        cached.append(length + rows if mode == "verify" else length)
        for j in range(new if packed else rows):
            lines.append((b, max(starts[b] + j + 1, 0) if j < new else 0))

    def slot(b, position):
        found = oracle.virtual_page(source, "token", page, req_rows[b], position)
        return None if found is None else found[0] * page + found[1]

    write_all(
        out, req_rows, lines, cached, starts, slot, rows=rows, pool=pool, topk=topk, page=page, packed=packed,
        tokens=source.shape[1],
    )  # fmt: skip


def write_all(
    out, req_rows, lines, cached, starts, slot, *, rows, pool, topk, page, tokens, packed=False, zero_tail=False,
    reached=False,
):  # fmt: skip
    """Everything that a destination is there for.

    lines     (request, tokens seen) of each row of the forward
    cached    tokens in the cache of each request; starts: position of its first new token
    slot      slot of (request, position) or None
    tokens    that a row of the request table holds
    reached   whether pools that start behind the tokens cached or behind the table have no place
    """

    def write(name, values):
        if out.get(name) is not None:
            for i, value in enumerate(values):
                out[name][i] = value

    def write_sums(name, values):
        if out.get(name) is not None:
            oracle.prefix_sums(out[name], values)

    write("cache_seqlens", cached)
    write_sums("cu_seqlens_k", cached)
    write("seqlens_expanded", [seen for _, seen in lines])
    write("pool_seqlens", [seen // pool for _, seen in lines])
    write("dsa_cache_seqlens", [attended(seen, pool, topk) for _, seen in lines])
    write_sums("dsa_cu_seqlens_k", [attended(seen, pool, topk) for _, seen in lines])
    write("paged_mqa_ctx_lens_2d", [[c] * rows for c in cached])
    write("schedule", share_out([seen // pool for _, seen in lines], len(out.get("schedule", "..")) - 1))
    write("req_rows", req_rows)
    write("write_start", starts)
    write("tail_logical_start", [start // pool * pool for start in starts])

    if out.get("write_loc") is not None:
        columns = -(-tokens // page)
        for b, start in enumerate(starts):
            for m in range(out["write_loc"].shape[1]):
                g = start // pool + m
                column = g // page * pool
                allowed = not reached or (0 <= g * pool < cached[b] and column < columns)
                found = slot(b, min(max(column, 0), columns - 1) * page) if allowed else None
                out["write_loc"][b, m] = 0 if found is None else found // page // pool * page + g % page

    for name, size in (("page_table_1", 1), ("real_page_table", page), ("page_table", page * pool)):
        table = out.get(name)
        if table is None or not cached:
            continue
        alone = not packed and len(table) == len(cached)
        for r, b in enumerate(range(len(cached)) if alone else [b for b, _ in lines]):
            for c in range(table.shape[1]):
                if c * size < cached[b]:
                    found = slot(b, c * size)
                    table[r, c] = 0 if found is None else found // size
                elif zero_tail:
                    table[r, c] = 0


def append_tail(out, topk_result, seq_lens, pool_lens, *, pool, page_table=None):
    """The tokens of selected pools, those behind the last closed pool, then -1."""
    columns = topk_result.shape[1]
    for r in range(len(seq_lens)):
        closed, seen = int(pool_lens[r]), int(seq_lens[r])
        row = [int(topk_result[r, c]) for c in range(pool * min(closed, columns // pool))]
        for t in range(pool * closed, seen):
            if page_table is not None:
                t = int(page_table[r, t]) if t < page_table.shape[1] else 0
            row.append(t)
        out[r] = row + [-1] * (columns + pool - 1 - len(row))


def ragged(
    out, page_table, cu_pages_excl, pool_pages, cu_q_len_excl, q_len, pooled_seq_lens, *, pool, index_page_size=64
):
    """Index pages of the requests one behind the other, and the pools that each query row sees."""
    for b, first in enumerate(map(int, cu_pages_excl)):
        for i in range(pool_pages[b]):
            if first + i < len(out["concat_page_table"]):
                entry = page_table[b, i * pool] if i * pool < page_table.shape[1] else 0
                out["concat_page_table"][first + i] = max(entry, 0) // pool
        end = index_page_size * (first + int(pool_pages[b]))
        for r in range(cu_q_len_excl[b], cu_q_len_excl[b] + q_len[b]):
            if r < len(out["q_start"]):
                out["q_start"][r] = index_page_size * first
                out["q_end"][r] = min(index_page_size * first + int(pooled_seq_lens[r]), end)


def tables(batch, rows, *, lines=None, height=None, page=64, pool=4, columns=0, processors=3, **absent):
    """KPoolTables of stale arrays. `lines`: rows of the forward; `height`: rows of page tables; `columns` of the wide
    one, in tokens; names given as None are left out."""
    lines = batch * rows if lines is None else lines
    height = lines if height is None else height
    shapes = {
        "cache_seqlens": batch, "cu_seqlens_k": batch + 1, "seqlens_expanded": lines, "dsa_cache_seqlens": lines,
        "dsa_cu_seqlens_k": lines + 1, "pool_seqlens": lines, "page_table_1": (height, columns),
        "real_page_table": (height, -(-columns // page)), "page_table": (height, -(-columns // page // pool)),
        "paged_mqa_ctx_lens_2d": (batch, rows), "req_rows": batch, "write_start": batch, "tail_logical_start": batch,
        "write_loc": (batch, -(-rows // pool)), "schedule": (processors + 1, 2),
    }  # fmt: skip
    return KPoolTables(**{n: jnp.full(s, STALE, jnp.int32) for n, s in shapes.items() if n not in absent})


def slots(rng, rows, tokens, page):
    """int32[rows, tokens]: slots of pages of `page` tokens in any order; row 0 is the sink row."""
    pages = -(-tokens // page)
    table = 1 + rng.permutation(rows * pages).reshape(rows, pages)
    table = (table[:, :, None] * page + np.arange(page)).reshape(rows, -1)[:, :tokens]
    table[0] = 0
    return table.astype(np.int32)

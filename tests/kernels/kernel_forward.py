"""The contract of forward_metadata as plain Python loops over NumPy arrays, its destinations, and its parts in turn.

The loops share no code with the package. Destinations are a dictionary of arrays, written in place.
"""

import jax.numpy as jnp
import kernel_kpool as kpool
import kernel_oracle as oracle
import numpy as np

from pallas_kernels import (
    DecodeTables,
    KPoolShape,
    KPoolTables,
    MetadataLayout,
    PackedMetadata,
    WindowBuffers,
    decode_metadata,
    draft_extend_metadata,
    draft_write_window,
    kpool_decode,
    kpool_draft_extend,
    kpool_verify,
    replay_state_indices,
)

STALE = -7
MODES = ("verify", "draft_extend", "chain")
PLAN = ("write_start", "tail_logical_start", "write_loc")
ENDLESS = 2**30  # no context is so long
ROWS = 4096  # more than any request table of a test has


def metadata(
    out, seq_lens, req_rows, source, *, mode, page_size, granularity="page", extend_lens=None, anchor=None, v2p=None,
    full_v2p=None, swa_v2p=None, limit=None, zero_tail=True, pool=None, topk=None, slot_of_req=None, state_v2p=None,
):  # fmt: skip
    """All sections, one after the other."""
    rows, end = out["positions"].shape[1], ENDLESS if limit is None else int(limit)
    full, swa = oracle.split_maps(v2p, full_v2p, swa_v2p)
    starts, tokens, cached = list(map(int, seq_lens)), [], []
    for b, length in enumerate(starts):
        tokens.append(rows if extend_lens is None else int(extend_lens[b]))
        cached.append(min(length + (0 if mode == "chain" else tokens[b]), end))

    for b, keys in enumerate(cached):
        out["cache_seqlens"][b] = keys
    oracle.prefix_sums(out["cu_seqlens_k"], cached)
    if extend_lens is not None:
        oracle.prefix_sums(out["cu_seqlens_q"], tokens)
    of = {"page_size": page_size, "granularity": granularity}
    for name, table in (("page_table", full), ("swa_page_table", swa)):
        if name in out:
            oracle.read_table(out[name], cached, req_rows, source, zero_tail=zero_tail, v2p=table, **of)

    first = anchor if rows else None  # without rows there is no column to hold it
    oracle.window(out, starts, req_rows, source, full_v2p=full, swa_v2p=swa, anchor=first, limit=limit, **of)
    for b, count in enumerate(tokens):
        for name in {"virtual_loc", "full_loc", "swa_loc"} & out.keys():
            out[name][b, count:] = 0
        if anchor is not None:
            out["anchor_ids"][b, 1:] = 0

    for b, row in enumerate(req_rows if "state_slots" in out else ()):
        out["state_slots"][b] = state_slot(int(row), slot_of_req, state_v2p)

    if pool is not None:
        lines = []  # (request, tokens seen)
        for b, length in enumerate(starts):
            for j in range(1 if mode == "chain" else rows):
                seen = {"chain": length, "verify": length + j + 1, "draft_extend": max(length + j + 1, 0)}[mode]
                lines.append((b, min(seen, end) if j < tokens[b] or mode == "chain" else 0))

        def slot(b, position):
            found = oracle.virtual_page(source, granularity, page_size, req_rows[b], position)
            physical = None if found is None else oracle.physical_page(full, found[0])
            return None if physical is None else physical * page_size + found[1]

        pooled = {name: out[name] for name in KPoolTables._fields if name in out}
        held = source.shape[1] * (page_size if granularity == "page" else 1)
        kpool.write_all(
            pooled, req_rows, lines, cached, starts, slot, rows=rows, pool=pool, topk=topk, page=page_size // pool,
            tokens=held, zero_tail=zero_tail, reached=True,
        )  # fmt: skip


def state_slot(row, slot_of_req, state_v2p):
    """Physical state slot of a request row, -1 for none."""
    if row <= 0:
        return -1
    slot = row
    if slot_of_req is not None:
        slot = int(slot_of_req[row]) if row < len(slot_of_req) else -1
    if slot <= 0 or state_v2p is None:
        return max(slot, 0) or -1
    return max(int(state_v2p[slot]), -1) if slot < len(state_v2p) else -1


def packed(batch, rows, pages, *, swa=False, pool=None, mode="verify", state=False, processors=3):
    """A stale PackedMetadata; with `pool` its layout has the sections of pooled attention."""
    shape = None if pool is None else KPoolShape(pool, 1 if mode == "chain" else rows, processors)
    layout = MetadataLayout(batch, rows, pages, swa, shape, state)
    return PackedMetadata(jnp.full(layout.size, STALE, jnp.int32), layout)


def sections(out: PackedMetadata) -> dict:
    """The sections as writable arrays by name."""
    return {name: np.array(place.read((out.buffer,))) for name, place in out.layout.sections.items()}


def in_parts(
    seq_lens, req_rows, source, out: PackedMetadata, *, mode, anchor=None, extend_lens=None, limit=None, zero_tail=True,
    pool=None, topk=None, slot_of_req=None, state_v2p=None, backend=None, **of,
) -> dict:  # fmt: skip
    """The sections of `out` after the single operations that write them, one launch after the other; arrays of NumPy.

    What they do not do is done here: they know no rows that are no tokens, and those of pooled attention take physical
    slots and no limit.
    """
    after, rows = sections(out), out.layout.D

    def put(kind, names, function, *arguments, **options):
        fields = {name: jnp.asarray(after[name]) for name in names if name in after}
        found = function(*arguments, out=kind(**dict.fromkeys(kind._fields) | fields), **options, backend=backend)
        after.update({name: np.array(getattr(found, name)) for name in fields})

    new = np.full(len(seq_lens), 0 if mode == "chain" else rows, np.int32) if extend_lens is None else extend_lens
    keys = np.minimum(seq_lens + new, ENDLESS if limit is None else np.asarray(limit).item()).astype(np.int32)
    if pool is not None:
        assert limit is None
        for name in ("page_table", "real_page_table") if zero_tail else ():
            after[name][:] = 0
        slots = physical_slots(source, **of)
        shape = {"pool": pool, "topk": topk, "page_size": of["page_size"] // pool}
        lengths = [name for name in KPoolTables._fields if name not in PLAN]
        if mode == "verify":
            put(KPoolTables, KPoolTables._fields, kpool_verify, seq_lens, req_rows, slots, rows=rows, **shape)
        elif mode == "chain":  # sees the tokens of a decode, and starts behind them
            put(KPoolTables, lengths, kpool_decode, seq_lens, req_rows, slots, **shape)
            put(KPoolTables, PLAN, kpool_verify, seq_lens, req_rows, slots, rows=1, **shape)
        else:
            arguments = keys, new, req_rows, slots
            put(KPoolTables, KPoolTables._fields, kpool_draft_extend, *arguments, rows=rows, padded=True, **shape)
        pools = seq_lens[:, None] // pool + np.arange(after["write_loc"].shape[1])
        first = pools // shape["page_size"] * of["page_size"]  # token of the index page of each
        reached = (pools * pool < keys[:, None]) & (first < slots.shape[1])
        after["write_loc"] = np.where(reached, after["write_loc"], 0)
        if mode == "draft_extend":
            oracle.prefix_sums(after["cu_seqlens_q"], new)
    elif mode == "draft_extend":
        names = DecodeTables._fields
        put(DecodeTables, names, draft_extend_metadata, keys, new, req_rows, source, zero_tail=zero_tail, **of)
    else:
        names = [name for name in DecodeTables._fields if name != "cu_seqlens_q"]
        put(DecodeTables, names, decode_metadata, keys, req_rows, source, zero_tail=zero_tail, **of)

    names = [name for name in WindowBuffers._fields if name != "anchor_ids" or anchor is not None]
    put(WindowBuffers, names, draft_write_window, seq_lens, req_rows, source, anchor=anchor, limit=limit, **of)
    if mode == "draft_extend":
        for name in {"virtual_loc", "full_loc", "swa_loc"} & after.keys():
            after[name] = np.where(np.arange(rows) < new[:, None], after[name], 0)
    if anchor is not None:
        after["anchor_ids"][:, 1:] = 0

    if out.layout.has_state:
        table = np.arange(ROWS, dtype=np.int32) if slot_of_req is None else slot_of_req
        inside = (req_rows > 0) & (req_rows < len(table))
        valid = inside & (table[np.where(inside, req_rows, 0)] > 0)
        found, _ = replay_state_indices(
            jnp.asarray(req_rows), table, jnp.asarray(after["state_slots"]), valid=valid, v2p=state_v2p, backend=backend
        )
        after["state_slots"] = np.array(found)
    return after


def physical_slots(source, *, page_size, granularity="page", v2p=None, full_v2p=None, **_):
    """int32[R, tokens]: the FULL slot of each token of each row of a request table, -1 for none."""
    full, _ = oracle.split_maps(v2p, full_v2p, None)
    slots = np.full((len(source), source.shape[1] * (page_size if granularity == "page" else 1)), -1, np.int32)
    for row, position in np.ndindex(slots.shape):
        found = oracle.virtual_page(source, granularity, page_size, row, position)
        physical = None if found is None else oracle.physical_page(full, found[0])
        slots[row, position] = -1 if physical is None else physical * page_size + found[1]
    return slots

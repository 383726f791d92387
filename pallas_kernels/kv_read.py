"""kv_read_table and kv_read_stream: where the keys of a batch lie in one pool, as a page table or as a stream of slots.

Kernel and reference are `Tables` in tables.py and `Stream` in streams.py.
"""

import jax.numpy as jnp

from pallas_kernels import backend as backends
from pallas_kernels import buffers, operands
from pallas_kernels.operands import Inputs
from pallas_kernels.streams import Stream
from pallas_kernels.tables import Count, Rows, Tables
from pallas_kernels.views import Array


def kv_read_table(
    seq_lens: Array,
    req_rows: Array,
    source: Array,
    out: Array,
    *,
    page_size: int,
    zero_tail: bool,
    granularity: str = "page",
    seq_len_delta=0,
    max_pages: int | None = None,
    v2p: Array | None = None,
    full_to_swa: Array | None = None,
    backend: str | None = None,
) -> Array:
    """Write the page table of one pool, the table of `decode_metadata` without its lengths.

    For row b and column c, with n = seq_lens[b] + seq_len_delta and t the virtual token at position c * page_size:

        out[b, c] = physical page of t                             for c < min(cdiv(n, page_size), max_pages)
                  = 0 with zero_tail, untouched without            for the other c < max_pages

    Columns from max_pages on are never written. Whatever has no physical page becomes page 0, the sink.

    Args:
      seq_lens, req_rows, source, page_size, zero_tail, granularity, seq_len_delta, max_pages, backend: as in
        decode_metadata.
      out: int32[B, P], the destination, an array or a View.
      v2p: int[NV], physical page of each virtual page, -1 where unbound (of an interleaved [NV, 2] map a View of one
        column); or instead
      full_to_swa: int[N], physical SWA token of each virtual token. Without either, physical pages are virtual ones.

    Returns:
      `out` after, in place when it is donated.

    Raises:
      ValueError: for arguments against these rules; the message names the argument and the rule.

    Source: the plan table of SGLang's unified KV memory, its contract restated; the design is our own.

    >>> import jax.numpy as jnp
    >>> pages, v2p = jnp.array([[0, 0, 0], [5, 9, 2]]), jnp.array([0, 0, 3, 0, 0, 7, 0, 0, 0, -1])
    >>> out = jnp.full((1, 3), -7, jnp.int32)
    >>> kv_read_table(jnp.array([6]), jnp.array([1]), pages, out, page_size=4, zero_tail=False, v2p=v2p).tolist()
    [[7, 0, -7]]
    """
    backends.check(backend)
    operands.check_integers("seq_lens", seq_lens, 1)
    batch = seq_lens.shape[0]
    _check_out(out, 2, batch)
    flat, destination = buffers.flatten({"out": out}, ("out",))
    inputs = Inputs()
    count = Count(inputs.add("seq_lens", seq_lens, 1, batch), inputs.scalar("seq_len_delta", seq_len_delta, 0))
    rows = inputs.add("req_rows", req_rows, 1, batch)
    table = operands.make_source(inputs, source, granularity, page_size)
    maps = (("out", operands.make_map(inputs, v2p, full_to_swa)),)
    columns = operands.check_max_pages(max_pages, out.shape[1])
    if batch * columns == 0:
        return out
    entries = Rows(rows, table, maps, columns, bool(zero_tail))
    operation = Tables("kv_read_table", batch, tuple(inputs.labels), destination, (count,), entries)
    return buffers.unflatten({"out": out}, backends.run(operation, backend, inputs.arrays, flat), destination)["out"]


def kv_read_stream(
    seq_lens: Array,
    req_rows: Array,
    source: Array,
    indptr: Array,
    out: Array,
    *,
    page_size: int,
    granularity: str = "page",
    kv_start: Array | None = None,
    v2p: Array | None = None,
    full_to_swa: Array | None = None,
    backend: str | None = None,
) -> Array:
    """Write the token slots that each request reads in one pool, request after request, as ragged attention takes them.

    For row b and i < min(seq_lens[b], indptr[b + 1] - indptr[b]), at position p = kv_start[b] + i:

        out[indptr[b] + i] = physical page of p's page * page_size + p % page_size

    A page without a physical one counts as page 0, the sink. Cells of `out` that belong to no token stay as they are.

    Args:
      seq_lens: int[B], tokens each request reads.
      req_rows, source, page_size, granularity, backend: as in decode_metadata.
      indptr: int[B + 1], where each request's slots begin, not decreasing.
      out: int32[N], the destination, an array or a View. What would lie past its end is not written.
      kv_start: int[B], position of the first token read, for a sliding window; 0 if left out.
      v2p, full_to_swa: as in kv_read_table.

    Returns:
      `out` after, in place when it is donated.

    Raises:
      ValueError: for arguments against these rules; the message names the argument and the rule.

    Source: the token stream of SGLang's unified KV memory, its contract restated; the design is our own.

    >>> import jax.numpy as jnp
    >>> pages, indptr, start = jnp.array([[0, 0], [5, 9]]), jnp.array([0, 3]), jnp.array([2])
    >>> out = jnp.full(4, -7, jnp.int32)
    >>> kv_read_stream(jnp.array([3]), jnp.array([1]), pages, indptr, out, page_size=4, kv_start=start).tolist()
    [22, 23, 36, -7]
    """
    backends.check(backend)
    operands.check_integers("seq_lens", seq_lens, 1)
    batch = seq_lens.shape[0]
    _check_out(out, 1)
    flat, destination = buffers.flatten({"out": out}, ("out",))
    inputs = Inputs()
    counts = inputs.add("seq_lens", seq_lens, 1, batch)
    rows = inputs.add("req_rows", req_rows, 1, batch)
    table = operands.make_source(inputs, source, granularity, page_size)
    offsets = inputs.add("indptr", indptr, 1)
    if offsets.shape[0] != batch + 1:
        raise ValueError(
            f"indptr has {offsets.shape[0]} entries for a batch of {batch}: it needs {batch + 1}, the beginning of "
            "each request and the end of the last"
        )
    starts = None if kv_start is None else inputs.add("kv_start", kv_start, 1, batch)
    page_map = operands.make_map(inputs, v2p, full_to_swa)
    if batch * out.shape[0] == 0:
        return out
    operation = Stream(
        "kv_read_stream", batch, tuple(inputs.labels), destination, rows, table, counts, starts, offsets, page_map
    )
    return buffers.unflatten({"out": out}, backends.run(operation, backend, inputs.arrays, flat), destination)["out"]


def _check_out(out: Array, rank: int, batch: int | None = None) -> None:
    wanted = {1: "int32[N]", 2: f"int32[{batch}, P]"}[rank]
    rows_differ = rank == 2 and getattr(out, "ndim", 0) == 2 and out.shape[0] != batch
    if getattr(out, "ndim", None) != rank or out.dtype != jnp.int32 or rows_differ:
        raise ValueError(f"out is {buffers.describe(out)}: a destination must be {wanted}")

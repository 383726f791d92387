"""extend_cache_locs: the virtual token ids of a ragged run of positions of each request.

Kernel and reference are `Stream` in streams.py.
"""

import jax.numpy as jnp

from pallas_kernels import backend as backends
from pallas_kernels import buffers, operands
from pallas_kernels.operands import Inputs
from pallas_kernels.streams import Stream
from pallas_kernels.views import Array


def extend_cache_locs(
    start: Array,
    end: Array,
    req_rows: Array,
    source: Array,
    out: Array,
    *,
    granularity: str = "token",
    page_size: int = 1,
    backend: str | None = None,
) -> Array:
    """Write the virtual token ids at positions start[b] .. end[b] - 1 of each request, request after request.

    For i < n[b], with n[b] = max(end[b] - start[b], 0) and o[b] the sum of n over the requests before:

        out[o[b] + i] = virtual token id at position start[b] + i

    A negative entry keeps its value; a position that the table does not reach has 0, the sink. The cells of `out` past
    the last token stay as they are.

    Args:
      start, end: int[B], first position of each request's run and the one after its last.
      req_rows: int[B], row of `source` of each request. Padded rows use row 0, and end == start.
      source: the request table, int[R, columns]: virtual token ids ('token') or virtual pages ('page').
      out: int32[N], the destination, an array or a View. What would lie past its end is not written.
      granularity, page_size, backend: as in decode_metadata. The page size matters to a table of pages only.

    Returns:
      `out` after, in place when it is donated.

    Raises:
      ValueError: for arguments against these rules; the message names the argument and the rule.

    Source: the cache locations of an extend in SGLang's speculative workers, their contract restated.

    >>> import jax.numpy as jnp
    >>> tokens, out = jnp.array([[0, 0, 0, 0], [20, 21, 22, 23], [4, 5, 6, 7]]), jnp.full(5, -7, jnp.int32)
    >>> extend_cache_locs(jnp.array([1, 0]), jnp.array([4, 1]), jnp.array([1, 2]), tokens, out).tolist()
    [21, 22, 23, 4, -7]
    """
    backends.check(backend)
    operands.check_integers("start", start, 1)
    batch = start.shape[0]
    if getattr(out, "ndim", None) != 1 or out.dtype != jnp.int32:
        raise ValueError(f"out is {buffers.describe(out)}: a destination must be int32[N]")
    flat, destination = buffers.flatten({"out": out}, ("out",))
    inputs = Inputs()
    starts, ends = inputs.add("start", start, 1), inputs.add("end", end, 1, batch)
    rows = inputs.add("req_rows", req_rows, 1, batch)
    table = operands.make_source(inputs, source, granularity, page_size)
    if batch * out.shape[0] == 0:
        return out
    operation = Stream("extend_cache_locs", batch, tuple(inputs.labels), destination, rows, table, ends, starts)
    return buffers.unflatten({"out": out}, backends.run(operation, backend, inputs.arrays, flat), destination)["out"]

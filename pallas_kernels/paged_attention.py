"""paged_attention: D query rows a request over a paged cache, where its rows lie."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import paged_kernel
from pallas_kernels.dispatch import dispatch
from pallas_kernels.paged_plan import Plan
from pallas_kernels.paged_rows import PagedRows, attend_rows, check_heads, readable_slots

Array = jax.Array
DTYPES = ("float32", "bfloat16", "float16")  # of queries and rows that the kernel takes; the reference takes any


def backend_for(backend: str | None, q: Array, rows: PagedRows) -> str | None:
    """`backend`, or where none is named 'reference' for dtypes that the kernel does not take."""
    return "reference" if backend is None and not {q.dtype.name, rows.place.dtype} <= set(DTYPES) else backend


def paged_attention(
    q: Array,
    rows: PagedRows,
    page_table: Array,
    positions: Array,
    cache_seqlens: Array,
    *,
    granularity: str = "page",
    window: int | None = None,
    causal: bool = True,
    scale: float | None = None,
    backend: str | None = None,
) -> Array:
    """Attention of each request's query rows over its own pages, read where they lie.

    Row j of request b sees the keys at positions p with p <= positions[b, j], p < cache_seqlens[b] and, with a window,
    p > positions[b, j] - window. Decoding is D = 1, a chunk of a prompt a larger D. Query heads are grouped: G
    neighbouring ones share a K/V head. Scores and sums are float32, whatever the dtype. A context is read once for all
    rows and heads that share it, up to 64, and nothing is read that no row sees: all other memory may hold anything,
    NaN included, and so may columns of the table behind a request's last key.

    Args:
      q: [B, D, H, head_dim].
      rows: K and V; H is a multiple of their heads.
      page_table: int32[B, P], the page of each page_size tokens of a request; or, by 'token', the slot of each.
      positions: int32[B, D], in tokens, consecutive: positions[b, j] = positions[b, 0] + j; or -1 in the last rows of a
        request, or all, which are padding.
      cache_seqlens: int32[B], keys of each request, those of the query rows included; as many as the table has room for
        at most.
      granularity: 'page' or 'token' (static). By token, rows may attend to selections: each is a request of its own,
        and positions count what was selected.
      window: None, or how many keys a query sees, itself included (static).
      causal: False drops the first condition, so that rows also see the rows after them, as in a block draft (static).
      scale: factor on the scores; head_dim ** -0.5 by default (static).
      backend: 'triton', 'interpret' or 'reference'; None takes the kernel on CUDA and the reference elsewhere. Of
        dtypes other than float32, bfloat16 and float16 None takes the reference.

    Returns:
      [B, D, H, out_dim] in q's dtype. A row that sees no key, or is padding, gives zeros. What a request gets depends
      on nothing of the others, to the last bit.

    Raises:
      ValueError: shapes that do not fit, heads that do not divide, or a backend that cannot run it.

    Source: FlashAttention's sums over blocks (arXiv 2205.14135), and over parts of a context that meet in a second
    step, as in Flash-Decoding; the pages of PagedAttention (arXiv 2309.06180).

    >>> import jax.numpy as jnp
    >>> kv = jnp.zeros((8, 8)).at[4:6, 4:].set(3.0)              # page 1 of size 4 holds two values
    >>> rows = PagedRows.of(kv, kv_heads=1, head_dim=4, value_dim=4, page_size=4)
    >>> out = paged_attention(jnp.ones((1, 1, 2, 4)), rows, jnp.array([[1, 0]]), jnp.array([[1]]), jnp.array([2]))
    >>> out[0, 0, 0].tolist()
    [3.0, 3.0, 3.0, 3.0]
    """
    place = rows.place
    _check(q, rows, page_table, positions, cache_seqlens)
    B, D, H, head_dim = q.shape
    scale = float(head_dim**-0.5 if scale is None else scale)
    if granularity not in ("page", "token"):
        raise ValueError(f"granularity={granularity!r}: a table is by 'page' or by 'token'")
    how = dict(by_slot=granularity == "token", window=window, causal=causal, scale=scale)
    if q.size == 0 or page_table.size == 0:
        return jnp.zeros((B, D, H, place.out_dim), q.dtype)
    plan = Plan(B=B, D=D, H=H, P=page_table.shape[1], rows=place, dtype=q.dtype.name, **how)
    return dispatch(
        "paged_attention",
        backend_for(backend, q, rows),
        functools.partial(paged_kernel.attend, plan),
        functools.partial(_reference, **how),
        (q, rows, page_table, positions, cache_seqlens),
    )


def _reference(q, rows, page_table, positions, cache_seqlens, *, by_slot, window, causal, scale):
    page_size = 1 if by_slot else rows.place.page_size
    slots, at, readable = readable_slots(
        page_table, positions, cache_seqlens, page_size=page_size, window=window, causal=causal
    )
    keys, values = rows.read(slots)
    values = keys if rows.place.values_are_keys else values
    return attend_rows(q, keys, values, positions, at, readable, window=window, causal=causal, scale=scale)


def _check(q, rows, page_table, positions, cache_seqlens) -> None:
    place = rows.place
    if q.ndim != 4 or q.shape[3] != place.head_dim:
        raise ValueError(f"q has shape {q.shape}: the rows take [B, D, H, {place.head_dim}]")
    B, D, H, _ = q.shape
    check_heads(H, place.kv_heads)
    wanted = {"page_table": (B, None), "positions": (B, D), "cache_seqlens": (B,)}
    found = {"page_table": page_table, "positions": positions, "cache_seqlens": cache_seqlens}
    for name, shape in wanted.items():
        array = found[name]
        fits = array.ndim == len(shape) and all(n in (None, m) for n, m in zip(shape, array.shape, strict=True))
        if not fits or array.dtype != jnp.int32:
            expected = ", ".join("P" if n is None else str(n) for n in shape)
            raise ValueError(
                f"{name} is {array.dtype}{list(array.shape)}: with q of shape {q.shape} give int32[{expected}]"
            )

"""Requests whose attention `bench attention` times, the ways to compute it, and what is right in float64.

B requests of D query rows each, over keys and values in one pool, a `KVCache` of one layer. Every shape of a run reads
the same pool, which is as large as the largest of them needs.

A shape whose live keys and values are few would be read from the cache of the device after the first turn. So it has
several *regions*, as many as make 256 MB of different pages: region r of R of a shape with n live pages is

    page 1 + R * i + r    for live page number i of the batch, in random order

so that a turn goes from one region to the next by adding 1 to the page table. Columns of the table that no row sees,
behind a request's last key or before its window, hold any live page.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec import attention
from jaxspec.cache.kv import KVCache, init_cache
from jaxspec.cache.layers import LayerSpec
from jaxspec.errors import InputError
from pallas_kernels import PagedRows, paged_attention

Array = jax.Array
Attend = Callable[[Array, Array, Array, Array, Array], Array]  # q, pool, page_table, positions, cache_seqlens -> out

FLOOR, KERNEL, XLA = "floor", "kernel", "xla"
LIMITS = {"bfloat16": 1e-2, "float32": 1e-5}  # relative errors
PIECE = 1 << 24  # most elements of a pool that are drawn at a time
SAMPLES = 3  # K/V heads of requests that are compared


@dataclasses.dataclass(frozen=True)
class Problem:
    """Attention of D new rows for each of B requests whose keys, those of the new rows included, are `context`.

    Attributes:
      B, context, D: requests, keys of each, rows a request.
      ragged: lengths drawn evenly from D .. context instead.
      window: None, or how many keys a row sees, itself included.
      dtype: of queries, keys and values.
      page_size: tokens a page.
      kv_heads, group, head_dim: K/V heads, query heads of each, elements of a head.
    """

    B: int
    context: int
    D: int
    ragged: bool = False
    window: int | None = None
    dtype: str = "bfloat16"
    page_size: int = 64
    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128

    def __post_init__(self):
        if self.context < self.D:
            raise InputError(f"shape {self}: a context of {self.context} has no room for {self.D} rows")

    @property
    def H(self) -> int:
        """Query heads."""
        return self.kv_heads * self.group

    @property
    def P(self) -> int:
        """Columns of the page table."""
        return -(-self.context // self.page_size)

    @property
    def token_bytes(self) -> int:
        """K and V of a token."""
        return 2 * self.kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.B},{self.context}{',ragged' if self.ragged else ''}"

    @property
    def label(self) -> str:
        """What tells it from the others of a run."""
        return f"{self} D={self.D} window {self.window or 'none'}"

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """int32[B], keys of each request."""
        if not self.ragged:
            return np.full(self.B, self.context, np.int32)
        return np.random.default_rng(1).integers(self.D, self.context, self.B, dtype=np.int32, endpoint=True)

    @property
    def positions(self) -> np.ndarray:
        """int32[B, D]: the new rows are the last ones."""
        return (self.lengths[:, None] - self.D + np.arange(self.D)).astype(np.int32)

    @property
    def first(self) -> np.ndarray:
        """int32[B], the first key of each request that some row sees."""
        seen = self.lengths if self.window is None else np.minimum(self.lengths, self.window + self.D - 1)
        return self.lengths - seen

    @property
    def live_tokens(self) -> int:
        """Keys that some row sees."""
        return int((self.lengths - self.first).sum())

    @property
    def live_bytes(self) -> int:
        """Of K and V that some row sees: what has to be read once, whoever computes it."""
        return self.live_tokens * self.token_bytes

    @property
    def gathered_bytes(self) -> int:
        """Of K and V that XLA gathers: all columns, or those that a window may touch."""
        columns = self.P
        if self.window is not None:
            columns = min(columns, -(-(self.window + self.D - 1) // self.page_size) + 1)
        return self.B * columns * self.page_size * self.token_bytes

    @functools.cached_property
    def live(self) -> np.ndarray:
        """bool[B, P], columns of which some row sees a key."""
        column = np.arange(self.P)
        return (column >= self.first[:, None] // self.page_size) & (column * self.page_size < self.lengths[:, None])

    def regions(self, spread: int) -> int:
        """R, regions that hold at least `spread` bytes of live K and V together."""
        return max(1, -(-spread // self.live_bytes))

    def pages(self, spread: int) -> int:
        """Pages of the smallest pool, page 0, the sink, included."""
        return 1 + self.regions(spread) * int(self.live.sum())

    def table(self, regions: int) -> np.ndarray:
        """int32[B, P], the page table of region 0."""
        rng, count = np.random.default_rng(0), int(self.live.sum())
        number = rng.integers(0, count, self.live.shape)
        number[self.live] = rng.permutation(count)
        return (1 + regions * number).astype(np.int32)

    def queries(self) -> np.ndarray:
        """float32[B, D, H, head_dim]."""
        return np.random.default_rng(2).standard_normal((self.B, self.D, self.H, self.head_dim), np.float32)

    def cache(self, pages: int) -> jax.ShapeDtypeStruct:
        """What the K and V of a layer are in a `KVCache` of so many pages."""
        make = functools.partial(
            init_cache, (self.layer,), page_size=self.page_size, num_pages=pages, num_swa_pages=1, dtype=self.dtype
        )
        return jax.eval_shape(make).buffers[0]

    @property
    def layer(self) -> LayerSpec:
        return LayerSpec(self.kv_heads, self.head_dim, self.window)


# The arms


def by_kernel(problem: Problem, backend: str) -> Attend:
    """`pallas_kernels.paged_attention`, which reads K and V where they lie."""

    def attend(q, pool, page_table, positions, cache_seqlens):
        head = problem.head_dim
        sizes = dict(kv_heads=problem.kv_heads, head_dim=head, value_dim=head, page_size=problem.page_size)
        rows, of = PagedRows.of(pool, **sizes), (page_table, positions, cache_seqlens)
        return paged_attention(q, rows, *of, window=problem.window, backend=backend)

    return attend


def by_xla(problem: Problem) -> Attend:
    """What a step does without the kernel: K and V are gathered from the cache, then attended to."""

    def attend(q, pool, page_table, positions, cache_seqlens):
        cache = KVCache(buffers=(pool,), layers=(problem.layer,), page_size=problem.page_size)
        reader, of = functools.partial(cache.read, 0), (page_table, positions, cache_seqlens)
        return attention.paged_attention(q, reader, *of, page_size=problem.page_size, window=problem.window)

    return attend


def arms(problem: Problem, backend: str, gather_limit: float = np.inf) -> dict[str, Attend | None]:
    """All arms of a problem by name; None does nothing. No XLA path where it would gather more than `gather_limit`
    bytes."""
    found = {FLOOR: None, KERNEL: by_kernel(problem, backend)}
    return found if problem.gathered_bytes > gather_limit else found | {XLA: by_xla(problem)}


def chained(attend: Attend | None, turns: int) -> Callable:
    """`f(q, place, out, fixed) -> (q, place, out)`: turns of a loop on the device, in each of which

        q      q + 2^-24 * out, so that a turn needs all of the one before and starts from nearly the same numbers
        table  that of the next region, so that nothing read can be kept from turn to turn
        out    attention of both; None leaves it

    Args:
      place: the page table int32[B, P], and the region's number, int32[].
      fixed: R as int32[], the pool, positions, cache_seqlens; they are only read.
    """

    def chain(q, place, out, fixed):
        regions, pool, positions, cache_seqlens = fixed

        def turn(_, carry):
            q, (table, region), out = carry
            q = q + out * jnp.asarray(2.0**-24, out.dtype)
            last = region + 1 == regions  # also of a single one: the compiler does not know that the table stays
            table, region = table + jnp.where(last, 1 - regions, 1), jnp.where(last, 0, region + 1)
            return q, (table, region), out if attend is None else attend(q, pool, table, positions, cache_seqlens)

        return lax.fori_loop(0, turns, turn, (q, place, out))

    return chain


def carried(problem: Problem, regions: int) -> tuple:
    """What the chain of an arm starts from: q, place and out."""
    q = jnp.asarray(problem.queries(), problem.dtype)
    return q, (jnp.asarray(problem.table(regions)), jnp.zeros((), jnp.int32)), jnp.zeros_like(q)


def fixed(problem: Problem, regions: int, pool: Array) -> tuple:
    """What the chain of an arm only reads."""
    return jnp.asarray(regions, jnp.int32), pool, jnp.asarray(problem.positions), jnp.asarray(problem.lengths)


@functools.partial(jax.jit, static_argnums=(0, 1))
def random_pool(shape: tuple[int, int], dtype: str) -> Array:
    """[slots, width] normal numbers, drawn in place piece by piece."""
    rows = min(shape[0], max(1, PIECE // shape[1]))

    def draw(i, pool):
        first = jnp.minimum(i * rows, shape[0] - rows)
        piece = jax.random.normal(jax.random.fold_in(jax.random.key(0), i), (rows, shape[1]), dtype)
        return lax.dynamic_update_slice(pool, piece, (first, 0))

    return lax.fori_loop(0, -(-shape[0] // rows), draw, jnp.zeros(shape, dtype))


# What is right


def relative_error(problem: Problem, chain_state: tuple, pool: Array) -> float:
    """Of the output that a chain ends with, against attention in float64 of the queries and the table of its last turn.

    For the first request, the last and the longest of the others, all rows of one K/V head: of each row and query head
    the largest difference over the largest value, and the worst of them. Infinite if any output of any request is no
    number.
    """
    q, (table, _), out = chain_state
    table, q, out = np.asarray(table), np.asarray(q, np.float32), np.asarray(out, np.float32)
    if not np.isfinite(out).all():
        return float("inf")
    worst = 0.0
    for request, head in samples(problem):
        keys, values = read(problem, pool, table[request], request, head)
        group = slice(head * problem.group, (head + 1) * problem.group)
        expected = attend_float64(
            q[request, :, group],
            keys,
            values,
            positions=problem.positions[request],
            first=int(problem.first[request]),
            window=problem.window,
        )
        apart = np.abs(out[request, :, group] - expected).max(axis=-1) / np.abs(expected).max(axis=-1)
        worst = max(worst, float(apart.max()))
    return worst


def samples(problem: Problem) -> Iterator[tuple[int, int]]:
    """(request, K/V head) that are compared."""
    inner = problem.lengths[1:-1]
    requests = [0, problem.B - 1, *([1 + int(inner.argmax())] if inner.size else [])]
    heads = [0, problem.kv_heads - 1, problem.kv_heads // 2]
    yield from dict.fromkeys(zip(requests, heads[:SAMPLES], strict=False))


def read(problem: Problem, pool: Array, table: np.ndarray, request: int, head: int) -> tuple[np.ndarray, np.ndarray]:
    """float64[n, head_dim] keys and values of a request that its rows see."""
    length, first = int(problem.lengths[request]), int(problem.first[request])
    most = problem.context if problem.window is None else min(problem.context, problem.window + problem.D - 1)
    token = np.minimum(first + np.arange(most), length - 1)  # of one size for all requests: compiled once
    slots = table[token // problem.page_size] * problem.page_size + token % problem.page_size
    width = problem.kv_heads * problem.head_dim
    cells = (head * problem.head_dim + np.arange(problem.head_dim)).astype(np.int32)
    keys, values = (np.asarray(_cells(pool, slots.astype(np.int32), cells + part)) for part in (0, width))
    return keys[: length - first].astype(np.float64), values[: length - first].astype(np.float64)


@jax.jit
def _cells(pool: Array, slots: Array, cells: Array) -> Array:
    return pool.at[slots[:, None], cells].get(mode="promise_in_bounds").astype(jnp.float32)


def attend_float64(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    *,
    positions: np.ndarray,
    first: int,
    window: int | None,
) -> np.ndarray:
    """float64[D, G, head_dim]: each row of q [D, G, head_dim] at its position over the keys from `first` on."""
    at, positions = first + np.arange(len(keys)), positions[:, None, None]
    seen = at <= positions
    if window is not None:
        seen &= at > positions - window
    # One product for all rows: each goes through all keys, which are 134 MB of 128K tokens.
    scores = (q.reshape(-1, q.shape[-1]).astype(np.float64) @ keys.T).reshape(*q.shape[:2], -1)
    scores = np.where(seen, scores / np.sqrt(q.shape[-1]), -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return (weights.reshape(-1, len(keys)) @ values).reshape(q.shape)

"""Problems for `paged_attention`, in any storage, what they should give in float64, and how executors are run on them.

K and V of a problem are kept twice: token by token in float64, for the oracle, and in a buffer in which all else is
poison. The buffer is written by flat offsets in elements, which share nothing with the rows and cells of a `RowPlace`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import quick_compile

from pallas_kernels import PagedRows, RowPlace, paged_attention, paged_kernel
from pallas_kernels.paged_plan import SIZES, Plan

# Contexts of a hundred keys then have several parts of several blocks, and eight queries several tiles.
SMALL = SIZES._replace(waves=(10**4, 10**4), least_keys=32, most_keys=2**30, block_bytes=1, tile=16, chunk=2)
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}  # relative, in the 2-norm of a row of a head


@dataclasses.dataclass(frozen=True)
class Pool:
    """A buffer [units, unit] that others share: elements of an entry before the K rows, between them and the V rows,
    and behind these; units of a section behind the entries of a page; whether it holds bits as unsigned integers."""

    unit: int
    before: int = 0
    between: int = 0
    behind: int = 0
    section: int = 0
    bits: bool = True


@dataclasses.dataclass
class Problem:
    """A call. `keys` and `values` are float64[B, tokens, kv_heads, ...]; NaN where nobody may look."""

    q: np.ndarray
    buffer: np.ndarray
    place: RowPlace
    table: np.ndarray
    positions: np.ndarray
    lengths: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    window: int | None
    causal: bool
    scale: float

    @property
    def arguments(self):
        rows = PagedRows(jnp.asarray(self.buffer), self.place)
        return (jnp.asarray(self.q), rows, *map(jnp.asarray, (self.table, self.positions, self.lengths)))

    @property
    def settings(self):
        return {"window": self.window, "causal": self.causal, "scale": self.scale}


def queries_of(lengths, D):
    """int32[B, D]: the last D tokens of each request; where it has fewer, all of them and padding."""
    lengths = np.asarray(lengths)[:, None]
    positions = np.maximum(lengths - D, 0) + np.arange(D)
    return np.where(positions < lengths, positions, -1).astype(np.int32)


def visible(position, length, window, causal):
    """The positions of the keys that a query sees."""
    if position < 0:
        return []
    return [
        p for p in range(length) if (not causal or p <= position) and (window is None or not p <= position - window)
    ]


def place_of(pool, *, kv_heads, head_dim, value_dim, page_size, dtype):
    """(place, elements of an entry, elements of a page, shape of a row of the buffer)"""
    sizes = dict(kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim, page_size=page_size, dtype=dtype)
    if pool is None:
        width = kv_heads * (head_dim + value_dim)
        places = dict(page_rows=page_size, entry_rows=1, key=0, value=kv_heads * head_dim)
        return RowPlace(**sizes, **places), width, page_size * width, width
    value = pool.before + kv_heads * head_dim + pool.between
    units = -(-(value + kv_heads * value_dim + pool.behind) // pool.unit)
    page_units = page_size * units + pool.section
    places = dict(page_rows=page_units, entry_rows=units, key=pool.before, value=value)
    return RowPlace(**sizes, **places), units * pool.unit, page_units * pool.unit, pool.unit


def problem(
    rng,
    lengths,
    D=1,
    *,
    columns,
    heads=4,
    kv_heads=2,
    head_dim=16,
    value_dim=16,
    page_size=4,
    window=None,
    causal=True,
    scale=None,
    dtype="float32",
    q_dtype=None,
    pool=None,
    positions=None,
    wild=(2**30, 2**31 - 1, -1, -(2**31)),
):
    """Requests of these lengths on shuffled pages. All memory that no query sees is poison, the sink too. Columns of
    the table before a window name any page, those behind the last key any page or anything (`wild`)."""
    lengths = np.asarray(lengths, np.int32)
    B, pages = len(lengths), 1 + len(lengths) * columns
    positions = queries_of(lengths, D) if positions is None else np.asarray(positions, np.int32)
    sizes = dict(kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim, page_size=page_size)
    place, entry, page, width = place_of(pool, **sizes, dtype=dtype)
    number = jnp.dtype(dtype)

    flat = np.full(pages * page + (3 * width if pool else 0), np.nan, number)
    flat[rng.random(flat.size) < 0.5] = jnp.finfo(number).max
    table = 1 + rng.permutation(pages - 1).reshape(B, columns)
    keys = np.full((B, columns * page_size, kv_heads, head_dim), np.nan)
    values = keys if value_dim == 0 else np.full((*keys.shape[:3], value_dim), np.nan)
    for b in range(B):
        seen = sorted({p for at in positions[b] for p in visible(at, lengths[b], window, causal)})
        for p in seen:
            start = table[b, p // page_size] * page + p % page_size * entry
            for rows, first in ((keys, place.key), (values, place.value)):
                row = rng.standard_normal(rows.shape[2:]).astype(number)
                flat[start + first : start + first + row.size] = row.reshape(-1)
                rows[b, p] = row
                if values is keys:
                    break
        first, end = (seen[0] // page_size, seen[-1] // page_size + 1) if seen else (0, 0)
        table[b, :first] = rng.integers(0, pages, first)
        behind = rng.integers(0, pages, columns - end)
        table[b, end:] = np.where(rng.random(columns - end) < 0.5, behind, rng.choice(wild, columns - end))
    q = rng.standard_normal((B, D, heads, head_dim)).astype(jnp.dtype(q_dtype or dtype))
    q[positions < 0] = np.nan  # a padded row's query may be anything, too
    buffer = flat.view(f"uint{8 * number.itemsize}") if pool and pool.bits else flat
    scale = head_dim**-0.5 if scale is None else scale
    arrays = q, buffer.reshape(-1, width), place, table.astype(np.int32), positions, lengths
    return Problem(*arrays, keys, values, window, causal, scale)


def attention(call: Problem):
    """float64[B, D, H, out_dim], query by query, of the keys alone that it sees."""
    B, D, heads, _ = call.q.shape
    group = heads // call.keys.shape[2]
    out = np.zeros((B, D, heads, call.values.shape[3]))
    for b, j in np.ndindex(B, D):
        keys = visible(int(call.positions[b, j]), int(call.lengths[b]), call.window, call.causal)
        for h in range(heads if keys else 0):
            scores = call.keys[b, keys, h // group] @ call.q[b, j, h].astype(np.float64) * call.scale
            weights = np.exp(scores - scores.max())
            out[b, j, h] = weights @ call.values[b, keys, h // group] / weights.sum()
    return out


def plan_of(call: Problem, sizes=SIZES) -> Plan:
    B, D, H, _ = call.q.shape
    return Plan(
        B=B,
        D=D,
        H=H,
        P=call.table.shape[1],
        by_slot=False,
        rows=call.place,
        dtype=call.q.dtype.name,
        sizes=sizes,
        **call.settings,
    )


@functools.cache
def compiled(plan, executor):
    """f(q, rows, table, positions, lengths) of an executor: the public function, unless the sizes are others."""

    def own(*arguments):
        return paged_kernel.attend(plan, *arguments, interpret=executor == "interpret")

    def public(*arguments):
        settings = {"window": plan.window, "causal": plan.causal, "scale": plan.scale}
        return paged_attention(*arguments, **settings, backend=executor)

    call = own if plan.sizes != SIZES and executor in ("interpret", "triton") else public
    return jax.jit(call, compiler_options=quick_compile.options())


def run(call: Problem, executor, sizes=SMALL):
    out = compiled(plan_of(call, sizes), executor)(*call.arguments)
    assert out.dtype == call.q.dtype
    return np.asarray(out)


def assert_near(found, want):
    """Each row of a head by itself; zeros exactly."""
    assert found.shape == want.shape
    tolerance = TOLERANCE[found.dtype.name]
    found, size = found.astype(np.float64), np.linalg.norm(want, axis=-1)
    assert np.isfinite(found).all(), f"not finite at [b, j, h, x] = {np.argwhere(~np.isfinite(found))[0]}"
    assert (found[size == 0] == 0).all()
    error = np.linalg.norm(found - want, axis=-1) / np.where(size == 0, 1, size)
    worst = np.unravel_index(np.argmax(error), error.shape) if error.size else ()
    assert (error < tolerance).all(), f"off by {error[worst]} at [b, j, h] = {worst}"


def check(call: Problem, executor, sizes=SMALL):
    found = run(call, executor, sizes)
    assert_near(found, attention(call))
    return found

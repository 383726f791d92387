"""Attention for training: whole texts, differentiable, the fastest that works where it runs.

`choose_attend` tries what is there on a small batch, compares each candidate's values and gradients with the reference
and times it; full and sliding layers are chosen apart. On CPU nothing is tried: blocks for sliding layers, a scan over
query blocks for full ones.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxspec.models.checkpoint import Config
from jaxspec.models.rows import Attend

# kernel(q [B, T, Hq, hd], k [B, T, Hkv, hd], v [B, T, Hkv, hd], window or None) -> out [B, T, Hq, hd]; causal
Kernel = Callable[[jax.Array, jax.Array, jax.Array, int | None], jax.Array]

_QUERY_BLOCK = 512
_TOLERANCE = 0.03  # relative error in norm; bfloat16 operands give about 0.005


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array, window: int | None) -> jax.Array:
    """cuDNN's fused attention; bfloat16 on an NVIDIA GPU only."""
    local = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=local, implementation="cudnn")


def blocks(q: jax.Array, k: jax.Array, v: jax.Array, window: int | None) -> jax.Array:
    """Plain XLA: a sliding layer in blocks of W queries against 2 W keys, a full one 512 queries at a time.

    Scores of a full layer are computed again in the backward pass, so that memory grows with T and not with T * T.
    """
    return _full_blocks(q, k, v) if window is None or window >= q.shape[1] else _local_blocks(q, k, v, window)


def _full_blocks(q, k, v):
    batch, rows, heads, head_dim = q.shape
    size = min(_QUERY_BLOCK, rows)
    padded = jnp.pad(q, ((0, 0), (0, -rows % size), (0, 0), (0, 0)))
    queries = padded.reshape(batch, -1, size, heads, head_dim).swapaxes(0, 1)

    @jax.checkpoint
    def one(block):
        index, query = block
        row = index * size + jnp.arange(size)[:, None]
        visible = jnp.arange(rows)[None, :] <= row
        return jax.nn.dot_product_attention(query, k, v, mask=visible[None, None], implementation="xla")

    out = jax.lax.map(one, (jnp.arange(queries.shape[0]), queries))
    return out.swapaxes(0, 1).reshape(padded.shape)[:, :rows]


def _local_blocks(q, k, v, window):
    batch, rows, heads, head_dim = q.shape
    q, k, v = (jnp.pad(x, ((0, 0), (0, -rows % window), (0, 0), (0, 0))) for x in (q, k, v))
    count = q.shape[1] // window

    def with_block_before(x):  # [B, n, 2 W, heads, hd]: block i - 1, then block i; zeros stand before block 0
        x = x.reshape(batch, count, window, -1, head_dim)
        before = jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0), (0, 0)))
        return jnp.concatenate([before, x], axis=2)

    # Query a of a block stands at key index a + W: it sees the W keys a + 1 ... a + W.
    query, key = jnp.arange(window)[:, None], jnp.arange(2 * window)[None, :]
    visible = (key > query) & (key <= query + window)
    exists = (jnp.arange(count)[:, None, None] > 0) | (key >= window)
    attend = functools.partial(jax.nn.dot_product_attention, implementation="xla")
    out = jax.vmap(lambda q, k, v, mask: attend(q, k, v, mask=mask[None, None]), in_axes=(1, 1, 1, 0), out_axes=1)(
        q.reshape(batch, count, window, heads, head_dim), with_block_before(k), with_block_before(v), visible & exists
    )
    return out.reshape(q.shape)[:, :rows]


KERNELS: dict[str, Kernel] = {"cudnn": cudnn, "blocks": blocks}


def attend_with(windows: tuple[int | None, ...], sliding: str, full: str) -> Attend:
    """The `attend` argument of a module that runs kernel `sliding` in layers with a window and `full` in the others."""

    def attend(layer, q, k, v, cache):
        window = windows[layer]
        return KERNELS[full if window is None else sliding](q, k, v, window).astype(q.dtype), cache

    return attend


def choose_attend(config: Config, length: int, dtype, *, report: Callable[[str], None] = print) -> dict[str, str]:
    """`{"sliding": name, "full": name}`: for each kind of layer the fastest kernel that is right where it runs.

    Args:
      config: heads and windows of the model.
      length: T of the training sequences.
      dtype: what the model computes in.
      report: called with one line a candidate.
    """
    chosen = {"sliding": "blocks", "full": "blocks"}
    if jax.default_backend() == "cpu" or jnp.dtype(dtype) != jnp.bfloat16:
        return chosen
    widths = {"full" if window is None else "sliding": window for window in config.windows}
    keys = jax.random.split(jax.random.key(0), 4)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    q, k, v, weight = (
        jax.random.normal(key, (4, length, n, config.head_dim), dtype)
        for key, n in zip(keys, (heads, kv_heads, kv_heads, heads), strict=True)
    )
    for kind, window in widths.items():
        candidates = {name: functools.partial(KERNELS[name], window=window) for name in ("blocks", "cudnn")}
        chosen[kind] = fastest_right(f"{kind} layers", candidates, q, k, v, weight, report)
    return chosen


def fastest_right(
    kind: str,
    candidates: dict[str, Callable[[jax.Array, jax.Array, jax.Array], jax.Array]],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    weight: jax.Array,
    report: Callable[[str], None],
) -> str:
    """The name of the fastest candidate whose values and gradients are those of the first one, or the first one's."""
    reference, best, chosen = None, float("inf"), next(iter(candidates))
    for name, kernel in candidates.items():
        try:
            result, seconds = _try(kernel, q, k, v, weight)
            reference = result if reference is None else reference
            error = max(_relative_error(a, b) for a, b in zip(result, reference, strict=True))
        except Exception as failure:  # whatever a kernel dies of, another one serves
            report(f"attention, {kind}: {name} does not run here: {' '.join(str(failure).split())[:300]}")
            continue
        right = error < _TOLERANCE
        report(
            f"attention, {kind}: {name} {1e3 * seconds:.2f} ms forward and backward on {q.shape[0]} x {q.shape[1]} "
            f"tokens, relative error {error:.4f}{'' if right else ': refused'}"
        )
        if right and seconds < best:
            chosen, best = name, seconds
    return chosen


def _try(kernel, q, k, v, weight):
    """Output and gradients of the kernel, and the seconds of its fastest run of five."""

    @jax.jit
    def run(q, k, v):
        def weighted(q, k, v):
            out = kernel(q, k, v)
            return (out * weight).astype(jnp.float32).sum(), out

        gradients, out = jax.grad(weighted, argnums=(0, 1, 2), has_aux=True)(q, k, v)
        return out, *gradients

    result = jax.block_until_ready(run(q, k, v))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(run(q, k, v))
        seconds.append(time.perf_counter() - start)
    return result, min(seconds)


def _relative_error(value, reference) -> float:
    value, reference = value.astype(jnp.float32), reference.astype(jnp.float32)
    error = float(jnp.linalg.norm(value - reference) / jnp.linalg.norm(reference))
    return error if error == error else float("inf")

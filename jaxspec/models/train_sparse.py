"""Training of a model with sparse layers and of its MTP blocks: everything in one run and in one compiled step.

Three losses that do not disturb each other. The model learns the text. Each indexer learns, on rows that it does not
move, to score pools as its layer's attention weighs them. The MTP blocks learn, on the model's finished rows, what the
model itself would say next.

A run begins dense: attention sees everything, and the indexer learns from all of it. Later, by a switch that is an
array, a row attends to the pools that the indexer picks, and the indexer learns from those alone. The best pools are
found by bisection of the scores' bits: two dozen passes over them cost far less than sorting them would.

Attention itself is one fused kernel with the selection as its mask. What the indexer is to learn from, the weights of
attention, is computed again without gradients, for every eighth row only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.attention.pooling import softmax_pool
from jaxspec.models.contract import blocks_of_glm
from jaxspec.models.glm import AttendPooled, Glm
from jaxspec.models.glm_config import GlmConfig
from jaxspec.models.train_attention import fastest_right
from jaxspec.models.train_delta import training_recur
from jaxspec.models.train_step import Settings, run_steps, wide_logits

Array = jax.Array

_STRIDE = 8  # the indexer learns from one row in so many, other ones each step
_QUERY_BLOCK = 512
_NOT = -1e30  # the score of what a row does not see


class Carried(NamedTuple):
    """What goes from one sparse layer to the next: the indexers' loss, and which keys the last layer's rows saw."""

    index_nats: Array  # float32 []
    seen: Array | None  # bool [B, 1, T, T]


def schedule(settings: Settings, progress: np.ndarray, step: np.ndarray) -> dict[str, np.ndarray]:
    """What a step is told besides its learning rate: whether attention is sparse, and which rows the indexer sees."""
    return {"sparse": progress >= settings.dense_share, "row": (step % _STRIDE).astype(np.int32)}


def cudnn(q: Array, k: Array, v: Array, seen: Array, scale: float) -> Array:
    """cuDNN's fused attention with a mask; bfloat16 on an NVIDIA GPU only."""
    # As a bias the selection would get a gradient, which costs more than the others together.
    return jax.nn.dot_product_attention(q, k, v, mask=seen, scale=scale, is_causal=True, implementation="cudnn")


def blocks(q: Array, k: Array, v: Array, seen: Array, scale: float) -> Array:
    """Plain XLA, 512 queries at a time; scores are computed again in the backward pass."""
    batch, rows, heads, width = q.shape
    size = min(_QUERY_BLOCK, rows)
    short = -rows % size

    def cut(x, axis):  # [..., T, ...] -> [N, ..., 512, ...]
        # The rows that are added see everything: one that sees nothing would give NaN, and NaN gradients.
        x = jnp.pad(x, [(0, short if i == axis else 0) for i in range(4)], constant_values=x.dtype.type(1))
        return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :]), axis, 0)

    @jax.checkpoint
    def one(block):
        return jax.nn.dot_product_attention(block[0], k, v, mask=block[1], scale=scale, implementation="xla")

    out = jnp.moveaxis(lax.map(one, (cut(q, 1), cut(seen, 2))), 0, 1)
    return out.reshape(batch, -1, heads, width)[:, :rows]


KERNELS = {"cudnn": cudnn, "blocks": blocks}


def choose_masked(config: GlmConfig, length: int, dtype, *, report: Callable[[str], None] = print) -> dict[str, str]:
    """`{"masked": name}`: the fastest kernel with a mask that is right where it runs; nothing is tried on a CPU."""
    if jax.default_backend() == "cpu" or jnp.dtype(dtype) != jnp.bfloat16:
        return {"masked": "blocks"}
    keys = jax.random.split(jax.random.key(0), 3)
    shape = 4, length, config.num_attention_heads, config.kv_lora_rank
    q, weight = (jax.random.normal(key, shape, dtype) for key in keys[:2])
    k = jax.random.normal(keys[2], (4, length, 1, config.kv_lora_rank), dtype)

    def masked(kernel):
        def run(q, k, v):
            row = jnp.arange(length)
            seen = (row[:, None] * 7 + row // config.index_kpool) % 3 == 0  # a third of the pools, and the row itself
            seen = (seen | (row[:, None] == row)) & (row <= row[:, None])
            return kernel(q, k, v, jnp.broadcast_to(seen, (4, 1, length, length)), config.softmax_scale)

        return run

    candidates = {name: masked(KERNELS[name]) for name in ("blocks", "cudnn")}
    return {"masked": fastest_right("sparse layers", candidates, q, k, k, weight, report)}


def pool_logits(query: Array, weight: Array, keys: Array) -> Array:
    """Scores of pools, float32 [B, R, n], for rows query [B, R, HI, X] and weight [B, R, HI] of keys [B, n, X].

    Those that are served, but for the rounding to 8 bits; the Hadamard transform changes no product.
    """
    products = jnp.einsum("brhx,bnx->brhn", query, keys.astype(query.dtype), preferred_element_type=jnp.float32)
    return jnp.sum(jax.nn.relu(products) * (weight * query.shape[-1] ** -0.5)[..., None], axis=2)


def best(scores: Array, live: Array, budget: int) -> Array:
    """The `budget` best of the live ones in each row, or all of them if there are no more: bool, shaped as both.

    Scores are compared as bfloat16; of equal ones the first count.

    Example:
      >>> scores = jnp.array([3.0, 5.0, 5.0, 5.0, 9.0])
      >>> best(scores, jnp.arange(5) < 4, 2).tolist()
      [False, True, True, False, False]
    """
    bits = lax.bitcast_convert_type(scores.astype(jnp.bfloat16), jnp.int16)
    bits = jnp.where(bits == -(2**15), 0, bits)  # the bits of -0
    rank = jnp.where(live, jnp.where(bits < 0, bits ^ 0x7FFF, bits), jnp.int16(-(2**15)))
    column = lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)

    def largest(lowest, steps, holds):
        """The largest number from `lowest` on of which `holds` is true, for a property that larger ones lose."""

        def one(i, found):
            tried = found + (steps >> i)
            return jnp.where(holds(tried[..., None]), tried, found)

        start = jnp.full(scores.shape[:-1], lowest, jnp.int32)
        return lax.fori_loop(0, steps.bit_length(), one, start)[..., None]

    def count(chosen):
        return jnp.sum(chosen, axis=-1, dtype=jnp.int32)

    least = largest(-(2**15), 2**15, lambda tried: count(rank >= tried) >= budget)
    above, equal = rank > least, rank == least
    short = budget - count(above)
    steps = 1 << scores.shape[-1].bit_length()
    end = largest(0, steps, lambda tried: count(equal & (column < tried)) <= short)
    return live & (above | (equal & (column < end)))


def indexed_attend(config: GlmConfig, kernel: Callable[..., Array], sparse: Array, row: Array) -> AttendPooled:
    """The `attend` argument of a `Glm` in training; its cache is `Carried`.

    Args:
      config: of the model.
      kernel: `kernel(q, k, v, seen, scale)`.
      sparse: bool [], whether rows see what the indexer picks or everything before them.
      row: int32 [], the first row that the indexers learn from.
    """
    pool, budget = config.index_kpool, config.index_topk // config.index_kpool

    def attend(layer, q, k, v, index, carried, *, scale):
        batch, rows = q.shape[:2]
        whole = rows // pool
        closed = jnp.arange(1, rows + 1) // pool  # pools that a row may pick

        def pools(x):
            return x[:, : whole * pool].reshape(batch, whole, pool, -1)

        keys = softmax_pool(pools(index.key), pools(index.score), index.ape)  # [B, n, X]
        still = lax.stop_gradient((index.query, index.weight, keys))
        live = jnp.broadcast_to(jnp.arange(whole) < closed[:, None], (batch, rows, whole))
        picked = live & (best(pool_logits(*still), live, budget) | ~sparse)
        column = jnp.arange(rows)
        seen = jnp.repeat(jnp.pad(picked, ((0, 0), (0, 0), (0, 1))), pool, axis=-1)[..., :rows]
        seen = ((seen | (column // pool >= closed[:, None])) & (column <= column[:, None]))[:, None]
        out = kernel(q, k, k, seen, scale).astype(q.dtype)

        some = rows_from(row, rows)
        weights = _pool_weights(some(q), k[:, :, 0], some(seen[:, 0]), scale, pool)
        logits = pool_logits(some(index.query), some(index.weight), keys)
        nats = _divergence(weights, logits, some(picked))
        return out, Carried(carried.index_nats + nats, seen)

    return attend


def again_attend(kernel: Callable[..., Array]) -> AttendPooled:
    """The same for further steps of an MTP block: a row sees what its first step saw, and itself."""

    def attend(layer, q, k, v, index, carried, *, scale):
        del index
        itself = jnp.eye(q.shape[1], dtype=bool)
        return kernel(q, k, k, carried.seen | itself, scale).astype(q.dtype), carried

    return attend


def rows_from(row: Array, rows: int) -> Callable[[Array], Array]:
    """A function that takes one row in eight of arrays [B, T, ...], from `row` (0 to 7) on."""
    stride = _STRIDE if rows >= _STRIDE else 1

    def some(x):
        x = x[:, : rows // stride * stride].reshape(x.shape[0], -1, stride, *x.shape[2:])
        return lax.dynamic_index_in_dim(x, row % stride, axis=2, keepdims=False)

    return some


def _pool_weights(q, latent, seen, scale, pool):
    """Share of attention, all heads together, that each row [B, R] gives to each whole pool, float32 [B, R, n]."""
    q, latent = lax.stop_gradient((q, latent))
    scores = jnp.einsum("brhl,btl->bhrt", q, latent, preferred_element_type=jnp.float32) * scale
    weights = jnp.mean(jax.nn.softmax(jnp.where(seen[:, None], scores, _NOT), axis=-1), axis=1)
    whole = weights.shape[-1] // pool
    return weights[..., : whole * pool].reshape(*weights.shape[:2], whole, pool).sum(axis=-1)


def _divergence(weights, logits, picked):
    """Mean over rows of the Kullback-Leibler divergence of the logits' softmax from the weights, among the picked."""
    weights = jnp.where(picked, weights, 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    wanted = weights / jnp.maximum(total, 1e-20)
    spread = jax.nn.log_softmax(jnp.where(picked, logits, _NOT), axis=-1)
    apart = jnp.where(wanted > 0, wanted * (jnp.log(jnp.maximum(wanted, 1e-30)) - spread), 0)
    return jnp.mean(jnp.sum(apart, axis=-1))


def make_sparse_dispatch(module: Glm, settings: Settings, masked: str) -> Callable:
    """The jitted `dispatch(state, None, data, control) -> (state, figures)`, as `make_dispatch` makes it.

    `state.params` is `{"params": tree, "mtp": blocks}`; control has `rate` and what `schedule` gives.

    Figures of a step: `nats` of the text; `index`, the indexers' mean divergence; `ahead`, nats of the text that the
    MTP blocks give, mean over their steps; `agree_1`, `agree_2`, ...: how often a step's best id is the model's own.
    """
    config, kernel = module.config, KERNELS[masked]
    depths = config.num_nextn_predict_layers
    # One block is run again on its own rows; several are run one after the other.
    steps = [0] * settings.chain if depths == 1 else list(range(depths))
    indexers = len(config.sparse_layers) + depths

    def loss(params, teacher_params, sequences, control):
        tokens, head = sequences[:, :-1], params["params"]["embed_tokens"]
        attend = indexed_attend(config, kernel, control["sparse"], control["row"])
        carried = Carried(jnp.zeros((), jnp.float32), None)
        _, hidden, carried = module.apply(
            {"params": params["params"]}, tokens, tokens, attend, carried, recur=training_recur
        )
        scores = _scores(hidden, head)
        nats = jnp.mean(_nats(scores, sequences[:, 1:]))
        figures = {"nats": nats}
        ahead, carried = _look_ahead(params, sequences, hidden, scores, attend, carried, figures)
        figures["index"] = carried.index_nats / indexers
        return nats + settings.mtp_weight * ahead + figures["index"], figures

    def _look_ahead(params, sequences, hidden, scores, attend, carried, figures):
        if not steps:
            return 0.0, carried
        embedding = lax.stop_gradient(params["params"]["embed_tokens"])
        frozen = {"blocks": params["mtp"], "embed_tokens": embedding}
        apply, told = blocks_of_glm(module).apply, lax.stop_gradient(scores)
        hidden, total, text = lax.stop_gradient(hidden), 0.0, 0.0
        for number, block in enumerate(steps, 1):
            # Row p of step 1 gets token p + 1 and predicts token p + 2, which row p + 1 of the model predicts.
            following = jnp.pad(sequences[:, number:], ((0, 0), (0, number - 1)))
            again = depths == 1 and number > 1
            _, hidden, carried = apply(
                frozen, block, following, hidden, None, again_attend(kernel) if again else attend, carried
            )
            guess = _scores(hidden, embedding)[:, :-number]
            model = told[:, number:]
            own = _nats(guess, sequences[:, number + 1 :])
            soft = jax.nn.logsumexp(guess, axis=-1) - jnp.sum(jax.nn.softmax(model, axis=-1) * guess, axis=-1)
            share = settings.distill_weight
            total += jnp.mean((1 - share) * own + share * soft) / len(steps)
            text += jnp.mean(own) / len(steps)
            figures[f"agree_{number}"] = jnp.mean(jnp.argmax(guess, axis=-1) == jnp.argmax(model, axis=-1))
        figures["ahead"] = text
        return total, carried

    return run_steps(loss, settings)


def _scores(hidden: Array, head: Array) -> Array:
    """Logits, float32 [B, T, V]."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    return wide_logits(rows, head.astype(hidden.dtype)).reshape(*hidden.shape[:-1], -1)


def _nats(scores: Array, labels: Array) -> Array:
    picked = jnp.take_along_axis(scores, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(scores, axis=-1) - picked

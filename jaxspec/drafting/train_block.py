"""The loss of block drafts, DSPARK and DFLASH: the network that decodes, over many anchors of whole texts at once.

Keys and values of the context are made of the target's features once a text. From each anchor one block starts, and its
rows attend to the context in front of the anchor and to their block. Everything per row is `BlockDraft`'s own
functions; only attention is written for training, as one product of all blocks' rows with the whole context, masked.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.drafting.base import Drafter
from jaxspec.drafting.block import DFlashDrafter, DSparkDrafter
from jaxspec.drafting.train_common import Batch, DraftSettings, draw_anchors, follow_target, rows_after
from jaxspec.models.block_config import BlockDraftConfig
from jaxspec.models.block_draft import BlockDraft
from jaxspec.models.checkpoint import Checkpoint
from jaxspec.models.draft_checkpoint import load_draft, random_draft_params, save_draft
from jaxspec.models.hybrid import Hybrid
from jaxspec.models.qwen3 import rotary_angles, rotate
from jaxspec.models.rows import rms_norm

Array = jax.Array

_NOT = -1e30  # the score of what a row does not see


@dataclasses.dataclass(frozen=True)
class BlockLearner:
    """A DSPARK or DFLASH draft under training; its weights are `{"draft": tree, "scales": float32[m]}`.

    The tree's `fc` is learned for features of root mean square 1: those of the target differ by an order of magnitude
    from layer to layer. It is divided by `scales`, which stay as they are, wherever the network runs.

    Fields:
      draft: the network.
    """

    draft: BlockDraft

    @property
    def kind(self) -> str:
        return self.draft.config.algorithm

    @property
    def taps(self) -> tuple[int, ...]:
        return self.draft.config.target_layer_ids

    @property
    def num_drafts(self) -> int:
        return self.draft.config.num_drafts

    def init(self, key: Array, target: Checkpoint, scales: Array) -> Any:
        """Fresh weights: `fc` passes the last tap on, the last norm is the target's, made smaller so that nothing is
        said too firmly, and what writes into the residual stream starts small."""
        config = self.draft.config
        seed = int(jax.random.randint(key, (), 0, 2**31 - 1))
        tree = random_draft_params(config, seed, jnp.float32)
        small = {"o_proj": (2 * config.num_hidden_layers) ** -0.5, "fc": 0.3, "markov_w2": 0.1}
        small["down_proj"] = small["o_proj"]

        def start(path, leaf):
            return jnp.ones_like(leaf) if leaf.ndim == 1 else leaf * small.get(path[-1].key, 1.0)

        tree = jax.tree_util.tree_map_with_path(start, tree)
        top = (len(self.taps) - 1) * config.hidden_size
        tree["fc"] = tree["fc"].at[top:].add(jnp.eye(config.hidden_size))
        norm = jnp.array(target.params["params"]["norm"], jnp.float32)
        tree["norm"] = 0.4 * (1 + norm if isinstance(target.module, Hybrid) else norm)
        return {"draft": tree, "scales": scales}

    def loss(self, params: Any, batch: Batch, key: Array, settings: DraftSettings) -> tuple[Array, dict[str, Array]]:
        size, length = batch.tokens.shape
        anchors = draw_anchors(key, size, length, settings.anchors, self.num_drafts)
        return follow_target(self.ahead(params, batch, anchors), self._wanted(batch, anchors), settings)

    def same(self, params: Any, batch: Batch, anchors: Array) -> Array:
        scores = self.ahead(params, batch, anchors)
        return jnp.argmax(scores, axis=-1) == jnp.argmax(self._wanted(batch, anchors), axis=-1)

    def _wanted(self, batch, anchors):
        return rows_after(batch.logits, anchors, self.num_drafts)

    def ahead(self, params: Any, batch: Batch, anchors: Array) -> Array:
        """Logits float32[B, A, gamma, V] of the drafts from each anchor int32[B, A]; the Markov head sees the text."""
        draft, gamma = self.draft, self.num_drafts
        config, weights = draft.config, self.network_params(params, batch.shared)
        size, count = anchors.shape
        rows = config.num_rows
        ids = jnp.full((size, count, rows), config.mask_token_id, jnp.int32)
        ids = ids.at[:, :, 0].set(jnp.take_along_axis(batch.tokens, anchors, axis=1, mode="promise_in_bounds"))
        positions = anchors[:, :, None] + jnp.arange(rows, dtype=jnp.int32)
        attend = attend_blocks(draft, weights, batch.features, anchors)
        flat = (size * count, rows)
        hidden, _ = draft.rows(weights, ids.reshape(flat), positions.reshape(flat), attend, None)
        scores = draft.logits(weights, hidden[:, rows - gamma :])
        if self.kind == "dspark":
            previous = rows_after(batch.tokens, anchors, gamma)
            bias = draft.markov(weights, previous.reshape(-1))
            scores = (scores + bias.reshape(scores.shape)).astype(draft.dtype).astype(jnp.float32)
        return scores.reshape(size, count, gamma, -1)

    def network_params(self, params: Any, shared: dict[str, Array]) -> dict[str, Any]:
        """The network's own parameters, in float32: `scales` are in `fc`."""
        scales = jnp.repeat(lax.stop_gradient(params["scales"]), params["draft"]["fc"].shape[0] // len(self.taps))
        return {"draft": {**params["draft"], "fc": params["draft"]["fc"] / scales[:, None]}, **shared}

    def drafter(self) -> Drafter:
        return (DSparkDrafter if self.kind == "dspark" else DFlashDrafter)(self.draft)

    def decode_params(self, params: Any, shared: dict[str, Array], dtype: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(dtype), self.network_params(params, {})) | shared

    def save(self, folder: pathlib.Path, params: Any, target: Checkpoint) -> None:
        tree = jax.device_get(self.network_params(params, {})["draft"])
        save_draft(folder, self.draft.config, tree, jnp.bfloat16)

    def restore(self, folder: pathlib.Path, target: Checkpoint) -> Any:
        tree = load_draft(folder, target, jnp.float32).params["draft"]
        return {"draft": jax.tree.map(jnp.asarray, tree), "scales": jnp.ones((len(self.taps),), jnp.float32)}


def make_learner(
    kind: str,
    target: Checkpoint,
    shape: dict[str, int],
    num_drafts: int,
    taps: tuple[int, ...] | None,
    attention: dict[str, str],
) -> BlockLearner:
    """A draft of `kind` for a target, see `jaxspec.drafting.train_common`.

    By default it taps three layers, the last one among them. Its mask is the id with the shortest embedding: what a row
    of a block starts from should weigh little beside what the layers add.
    """
    del attention
    embedding = np.asarray(target.params["params"]["embed_tokens"], np.float32)
    layers, size = target.config.num_hidden_layers, target.config.hidden_size
    dspark = kind == "dspark"
    config = BlockDraftConfig(
        algorithm=kind,
        block_size=num_drafts if dspark else num_drafts + 1,
        target_layer_ids=taps or tuple(sorted({layers // 4, (layers + 1) // 2, layers - 1})),
        mask_token_id=int(np.argmin(np.square(embedding).sum(axis=1))),
        vocab_size=target.config.vocab_size,
        hidden_size=size,
        rms_norm_eps=target.config.rms_norm_eps,
        max_position_embeddings=target.config.max_position_embeddings,
        sample_from_anchor=dspark,
        num_target_layers=layers,
        **{**shape, "markov_rank": shape["markov_rank"] if dspark else 0},
    )
    return BlockLearner(BlockDraft(config, target.module.dtype))


def attend_blocks(draft: BlockDraft, params: Any, features: Array, anchors: Array):
    """The `attend` argument of `BlockDraft.rows` for the blocks of whole texts.

    Args:
      draft, params: the network.
      features: [B, T, m * H].
      anchors: int32[B, A]; the rows come as B * A blocks.

    A row sees the keys of its text in front of its block's anchor, cut by the layer's window, and its block: all of it,
    or, in a causal layer, the rows up to itself.
    """
    config, dtype = draft.config, draft.dtype
    size, length = features.shape[:2]
    count = anchors.shape[1]
    keys, values = draft.context(params, features)
    norms = draft.key_norms(params)
    cos, sin = rotary_angles(jnp.arange(length)[None], config.head_dim, config.rope_theta)
    precision = lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None

    def product(equation, left, right):
        return jnp.einsum(equation, left, right, precision=precision, preferred_element_type=jnp.float32)

    def attend(layer, q, k, v, cache):
        rows, heads, width = q.shape[1:]
        shared = k.shape[2]
        group, window = heads // shared, draft.layers[layer].window
        key = rotate(rms_norm(keys[:, :, layer], norms[layer], config.rms_norm_eps, dtype), cos, sin)

        # Rows as [B, Hkv, A * rows * group, hd]: each head's products with the context are one.
        query = q.reshape(size, count * rows, shared, group, width).swapaxes(1, 2)
        far = product("bhnd,bthd->bhnt", query.reshape(size, shared, -1, width), key) * width**-0.5
        far = far.reshape(size, shared, count, rows, group, length)
        own = query.reshape(size, shared, count, rows * group, width)
        k, v = (x.reshape(size, count, rows, shared, width) for x in (k, v))
        near = product("bhand,bajhd->bhanj", own, k) * width**-0.5
        near = near.reshape(size, shared, count, rows, group, rows)

        column, row = jnp.arange(length), jnp.arange(rows)
        seen = column < anchors[:, :, None, None]  # [B, A, 1, T]
        inside = row[None, :] <= row[:, None] if draft.causal(layer) else jnp.ones((rows, rows), bool)
        if window is not None:
            seen = seen & (column > anchors[:, :, None, None] + row[:, None] - window)
            inside = inside & (row[None, :] > row[:, None] - window)
        far = jnp.where(seen[:, None, :, :, None, :], far, _NOT)
        near = jnp.where(inside[:, None, :], near, _NOT)
        most = lax.stop_gradient(jnp.maximum(far.max(axis=-1), near.max(axis=-1)))[..., None]
        far, near = jnp.exp(far - most), jnp.exp(near - most)
        total = far.sum(axis=-1) + near.sum(axis=-1)
        far, near = far.astype(dtype), near.astype(dtype)
        out = product("bhnt,bthd->bhnd", far.reshape(size, shared, -1, length), values[:, :, layer])
        out = out.reshape(size, shared, count, -1, width)
        out = out + product("bhanj,bajhd->bhand", near.reshape(size, shared, count, -1, rows), v)
        out = out / total.reshape(size, shared, count, -1, 1)
        out = out.reshape(size, shared, count * rows, group, width).swapaxes(1, 2)
        return out.reshape(q.shape).astype(q.dtype), cache

    return attend

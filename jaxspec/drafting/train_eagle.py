"""The loss of EAGLE-3 drafts: the network that decodes, in chains on its own hidden rows.

The layer runs over whole texts once, on the target's features. From each anchor a chain goes on as it does in a round,
with the text's own tokens: its rows see the rows of features in front of the anchor, and those of their own chain.
Everything per row is `Eagle3`'s own functions; only attention is written for training.

A fresh draft's first hidden row is the target's last one, normed as the target's head has it. That head scores it, and
would be sure of the wrong token, the one before: so the draft's last norm starts low, and its rows are scored without
much conviction.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.drafting.base import Drafter
from jaxspec.drafting.eagle import Eagle3Drafter
from jaxspec.drafting.train_common import Batch, DraftSettings, draw_anchors, follow_target, rows_after
from jaxspec.models.checkpoint import Checkpoint
from jaxspec.models.draft_checkpoint import load_draft, random_draft_params, save_draft
from jaxspec.models.eagle import Eagle3
from jaxspec.models.eagle_config import Eagle3Config
from jaxspec.models.hybrid import Hybrid
from jaxspec.models.rows import Attend
from jaxspec.models.train_attention import attend_with

Array = jax.Array

_NOT = -1e30  # the score of what a row does not see
# What a fresh draft has of the usual size: features other than the last, what writes into the stream, the last norm.
_OTHERS, _WRITES, _SCORED = 0.1, 0.7, 0.4


@dataclasses.dataclass(frozen=True, eq=False)
class Eagle3Learner:
    """An EAGLE-3 draft under training; its weights are the draft's own tree. The head is the target's and stays as it
    is.

    Fields:
      draft: the network.
      num_drafts: gamma, rows of a chain.
      last_norm: float32[H], scale of the target's last norm.
      kernel: attention kernel of the rows of features, a key of `jaxspec.models.train_attention.KERNELS`.
    """

    draft: Eagle3
    num_drafts: int
    last_norm: Array
    kernel: str = "blocks"
    kind = "eagle3"

    @property
    def taps(self) -> tuple[int, ...]:
        return self.draft.config.target_layer_ids

    def init(self, key: Array, target: Checkpoint, scales: Array) -> Any:
        """Fresh weights: `fc` passes the last tap on, normed by the target's own norm."""
        config = self.draft.config
        tree = random_draft_params(config, int(jax.random.randint(key, (), 0, 2**31 - 1)), jnp.float32)
        layer = {name: jnp.ones_like(leaf) if leaf.ndim == 1 else leaf for name, leaf in tree["layer"].items()}
        layer |= {name: _WRITES * layer[name] for name in ("o_proj", "down_proj")}
        norms = {f"fc_norm_{index}": jnp.ones_like(self.last_norm) for index in range(len(self.taps))}
        norms[f"fc_norm_{len(self.taps) - 1}"] = jnp.array(self.last_norm)  # a copy: the training state is donated
        identity = jnp.eye(config.hidden_size, dtype=jnp.float32)
        fc = (_OTHERS * tree["fc"]).at[-config.hidden_size :].set(identity)
        norm = jnp.full_like(tree["norm"], _SCORED * jnp.sqrt(jnp.mean(self.last_norm**2)))
        return {**norms, "fc": fc, "layer": layer, "norm": norm}

    def loss(self, params: Any, batch: Batch, key: Array, settings: DraftSettings) -> tuple[Array, dict[str, Array]]:
        anchors = draw_anchors(key, *batch.tokens.shape, settings.anchors, self.num_drafts)
        return follow_target(self.ahead(params, batch, anchors), self._wanted(batch, anchors), settings)

    def same(self, params: Any, batch: Batch, anchors: Array) -> Array:
        scores = self.ahead(params, batch, anchors)
        return jnp.argmax(scores, axis=-1) == jnp.argmax(self._wanted(batch, anchors), axis=-1)

    def _wanted(self, batch, anchors):
        return rows_after(batch.logits, anchors, self.num_drafts)

    def ahead(self, params: Any, batch: Batch, anchors: Array) -> Array:
        """Logits float32[B, A, gamma, V] of the drafts from each anchor int32[B, A]; chains are given the text."""
        draft, weights, tokens = self.draft, {"draft": params, **batch.shared}, batch.tokens
        attend_text = attend_with((None,), sliding=self.kernel, full=self.kernel)

        def attend(layer, q, k, v, cache):
            return attend_text(layer, q, k, v, None)[0], (k, v)

        # The row at position p gets token p + 1; behind the text's end there is none, and no anchor.
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        rows, hidden, text = draft.rows(
            weights, jnp.roll(tokens, -1, axis=1), draft.fuse(weights, batch.features), positions, attend
        )
        before = anchors - 1
        rows, hidden = (rows_after(x, before, 1)[:, :, 0] for x in (rows, hidden))
        given = rows_after(tokens, anchors, self.num_drafts)
        found, chain = [rows], ()
        for step in range(1, self.num_drafts):
            attend = attend_chain(text, chain, anchors)
            rows, hidden, chain = draft.rows(weights, given[:, :, step], hidden, before + step, attend)
            found.append(rows)
        return draft.spread(weights, draft.logits(weights, jnp.stack(found, axis=2)))

    def drafter(self) -> Drafter:
        return Eagle3Drafter(self.draft)

    def decode_params(self, params: Any, shared: dict[str, Array], dtype: Any) -> Any:
        return {"draft": jax.tree.map(lambda leaf: leaf.astype(dtype), params), **shared}

    def save(self, folder: pathlib.Path, params: Any, target: Checkpoint) -> None:
        save_draft(folder, self.draft.config, jax.device_get(params), jnp.bfloat16)

    def restore(self, folder: pathlib.Path, target: Checkpoint) -> Any:
        return load_draft(folder, target, jnp.float32).params["draft"]


def make_learner(
    kind: str,
    target: Checkpoint,
    shape: dict[str, int],
    num_drafts: int,
    taps: tuple[int, ...] | None,
    attention: dict[str, str],
) -> Eagle3Learner:
    """An EAGLE-3 draft for a target, see `jaxspec.drafting.train_common`.

    It taps three layers by default; the last one that is tapped should be the target's last. It has one layer, whatever
    the shape says, with an MLP as wide as half as many layers again would have together.
    """
    del kind
    config, layers = target.config, target.config.num_hidden_layers
    draft = Eagle3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        target_hidden_size=config.hidden_size,
        intermediate_size=shape["intermediate_size"] * shape["num_hidden_layers"] * 3 // 2,
        num_attention_heads=shape["num_attention_heads"],
        num_key_value_heads=shape["num_key_value_heads"],
        head_dim=shape["head_dim"],
        target_layer_ids=taps or tuple(sorted({layers // 4, (layers + 1) // 2, layers - 1})),
        feature_norm="each",
        norm_output=True,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=getattr(config, "rope_theta", Eagle3Config.rope_theta),
        max_position_embeddings=config.max_position_embeddings,
    )
    scale = target.params["params"]["norm"].astype(jnp.float32)
    scale = 1 + scale if isinstance(target.module, Hybrid) else scale
    network = Eagle3(draft, jnp.dtype(target.module.dtype).name)
    return Eagle3Learner(network, num_drafts, scale, attention.get("full", "blocks"))


def attend_chain(text: tuple[Array, Array], chain: tuple[tuple[Array, Array], ...], anchors: Array) -> Attend:
    """The `attend` argument of `Eagle3.rows` for a step of the chains of whole texts; rows are [B, A].

    Args:
      text: keys and values [B, T, Hkv, hd] of the rows of features.
      chain: those of the chains' earlier steps, [B, A, Hkv, hd] each.
      anchors: int32[B, A]; a row sees the rows of features in front of its anchor, and its own chain's.

    Returns:
      The function; what it gives as cache is `chain` with one more step.
    """

    def attend(layer, q, k, v, cache):
        own = (*chain, (k, v))
        keys, values = (jnp.stack(parts, axis=2) for parts in zip(*own, strict=True))  # [B, A, steps, Hkv, hd]
        size, count, heads, width = q.shape
        shared = k.shape[2]
        query = q.reshape(size, count, shared, heads // shared, width)
        precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

        def product(equation, left, right):
            return jnp.einsum(equation, left, right, precision=precision, preferred_element_type=jnp.float32)

        far = product("bahgd,bthd->bhgat", query, text[0]) * width**-0.5
        near = product("bahgd,bashd->bhgas", query, keys) * width**-0.5
        seen = jnp.arange(far.shape[-1]) < anchors[:, None, None, :, None]
        weights = jax.nn.softmax(jnp.concatenate([jnp.where(seen, far, _NOT), near], axis=-1), axis=-1).astype(q.dtype)
        far, near = weights[..., : far.shape[-1]], weights[..., far.shape[-1] :]
        out = product("bhgat,bthd->bahgd", far, text[1]) + product("bhgas,bashd->bahgd", near, values)
        return out.reshape(q.shape).astype(q.dtype), own

    return attend

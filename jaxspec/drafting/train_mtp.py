"""The loss of a target's prediction blocks (MTP), trained alone: the model itself stays as it is."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.drafting.base import Drafter
from jaxspec.drafting.mtp import MTPDrafter
from jaxspec.drafting.train_common import Batch, DraftSettings, follow_target
from jaxspec.errors import InputError
from jaxspec.models.checkpoint import Checkpoint, load, save
from jaxspec.models.contract import blocks_of_glm
from jaxspec.models.glm import Glm
from jaxspec.models.train_sparse import KERNELS, Carried, again_attend, indexed_attend

Array = jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class MTPLearner:
    """A target's prediction blocks under training; its weights are `{"blocks_0": tree, ...}`.

    One block is run again and again on its own rows; of several each gives one draft. A run starts from the blocks that
    the target has. Besides the drafts' loss there is that of each block's indexer, as in the training of the whole
    model.

    Fields:
      module: the target.
      blocks: weights to start from.
      num_drafts: gamma; with several blocks their number.
      masked: attention kernel, a key of `jaxspec.models.train_sparse.KERNELS`.
    """

    module: Glm
    blocks: dict[str, Any]
    num_drafts: int
    masked: str = "blocks"
    kind = "mtp"
    taps: tuple[int, ...] = ()

    def init(self, key: Array, target: Checkpoint, scales: Array) -> Any:
        # Copies: the training state is donated.
        return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), self.blocks)

    def loss(self, params: Any, batch: Batch, key: Array, settings: DraftSettings) -> tuple[Array, dict[str, Array]]:
        row = jax.random.randint(key, (), 0, 8)
        scores, index_nats = self._ahead(params, batch, row)
        total, figures = follow_target(scores, self._wanted(batch), settings)
        return total + index_nats, figures

    def same(self, params: Any, batch: Batch, anchors: Array) -> Array:
        scores, _ = self._ahead(params, batch, jnp.int32(0))
        same = jnp.argmax(scores, axis=-1) == jnp.argmax(self._wanted(batch), axis=-1)
        # The row in front of the anchor is the one that has been given the anchor.
        return jnp.take_along_axis(same, anchors[:, :, None] - 1, axis=1)

    def _wanted(self, batch):
        """What the target says of what each row and step predicts: [B, T - gamma, gamma, V]."""
        rows, gamma = batch.tokens.shape[1] - self.num_drafts, self.num_drafts
        return jnp.stack([batch.logits[:, j : j + rows] for j in range(1, gamma + 1)], axis=2)

    def _ahead(self, params, batch, row):
        """Logits float32[B, T - gamma, gamma, V], step j of row p being of token p + 1 + j, and the indexers' loss."""
        config, kernel, gamma = self.module.config, KERNELS[self.masked], self.num_drafts
        apply, depths = blocks_of_glm(self.module).apply, config.num_nextn_predict_layers
        weights, hidden = {"blocks": params, **batch.shared}, batch.features
        carried = Carried(jnp.zeros((), jnp.float32), None)
        first = indexed_attend(config, kernel, jnp.bool_(True), row)
        scores = []
        for step in range(gamma):
            tokens = jnp.pad(batch.tokens[:, step + 1 :], ((0, 0), (0, step + 1)))
            again = depths == 1 and step > 0
            attend = again_attend(kernel) if again else first
            logits, hidden, carried = apply(weights, 0 if depths == 1 else step, tokens, hidden, None, attend, carried)
            scores.append(logits[:, : batch.tokens.shape[1] - gamma])
        return jnp.stack(scores, axis=2), carried.index_nats / depths

    def drafter(self) -> Drafter:
        return MTPDrafter(blocks_of_glm(self.module))

    def decode_params(self, params: Any, shared: dict[str, Array], dtype: Any) -> Any:
        # Each array in the type that the target's own has: the format keeps small ones in float32.
        blocks = jax.tree.map(lambda leaf, own: leaf.astype(own.dtype), params, self.blocks)
        return {"blocks": blocks, **shared}

    def save(self, folder: pathlib.Path, params: Any, target: Checkpoint) -> None:
        """Writes the whole target with these blocks."""
        params = {**jax.device_get(target.params), "mtp": jax.device_get(params)}
        tokenizer = target.tokenizer if (target.folder / "tokenizer.json").is_file() else None
        save(folder, target.config, params, jnp.bfloat16, tokenizer)
        for name in ("tokenizer_config.json", "generation_config.json"):
            if (target.folder / name).is_file():
                shutil.copyfile(target.folder / name, folder / name)

    def restore(self, folder: pathlib.Path, target: Checkpoint) -> Any:
        return jax.tree.map(jnp.asarray, load(folder).blocks)


def make_learner(
    kind: str,
    target: Checkpoint,
    shape: dict[str, int],
    num_drafts: int,
    taps: tuple[int, ...] | None,
    attention: dict[str, str],
) -> MTPLearner:
    """The blocks of a target, see `jaxspec.drafting.train_common`; their shape and what they see are the target's.

    Raises:
      InputError: the target has none, or taps are named.
    """
    del kind, shape
    if taps:
        raise InputError("taps go with the other drafters: prediction blocks take the target's last rows")
    depths = len(target.mtp.layers)
    if 1 < depths != num_drafts:
        raise InputError(f"num_drafts={num_drafts}: {target.name!r} has {depths} blocks, one a draft; give {depths}")
    return MTPLearner(target.module, target.blocks, num_drafts, attention["masked"])

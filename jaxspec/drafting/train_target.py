"""The frozen target of a draft under training: its rows over whole texts, and texts that it writes itself.

A draft is judged by what its target says, so part of what it learns from is the target's own text, greedy and sampled,
continued from pieces of the corpus by `jaxspec.generate`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import SpecConfig
from jaxspec.drafting.train_common import Batch
from jaxspec.generation import generate
from jaxspec.models.checkpoint import Checkpoint
from jaxspec.models.corpus import END_OF_TEXT_ID
from jaxspec.models.draft_checkpoint import shared_arrays
from jaxspec.models.glm import Glm
from jaxspec.models.hybrid import Hybrid
from jaxspec.models.train_attention import attend_with
from jaxspec.models.train_delta import training_recur
from jaxspec.models.train_sparse import KERNELS, Carried, indexed_attend
from jaxspec.steps import Params

Array = jax.Array

TEMPERATURES = (0.0, 0.0, 0.7, 1.0)  # of the target's own texts, in turn


def make_batch(target: Checkpoint, taps: tuple[int, ...], attention: dict[str, str]) -> Callable[[Any, Array], Batch]:
    """`batch(params, tokens int32[B, T]) -> Batch`: the target over whole texts, once.

    Args:
      target: the target; `params` are its own.
      taps: layers whose streams are the features; () for the final normed rows.
      attention: kernels, as `jaxspec.models.train_attention.choose_attend` (of sparse layers `choose_masked`) names
        them.
    """
    module = target.module

    def batch(params, tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        cache, carried = None, {} if not isinstance(module, Hybrid | Glm) else {"recur": training_recur}
        if isinstance(module, Glm):
            attend = indexed_attend(module.config, KERNELS[attention["masked"]], jnp.bool_(True), jnp.int32(0))
            cache = Carried(jnp.zeros((), jnp.float32), None)
        else:
            attend = attend_with(module.config.windows, **attention)
        logits, rows, _ = module.apply(params, tokens, positions, attend, cache, taps=taps, **carried)
        return jax.lax.stop_gradient(Batch(tokens, rows, logits, shared_arrays(params)))

    return batch


def feature_scales(features: Array, taps: tuple[int, ...]) -> Array:
    """Root mean square of each tap, float32[m], of features [B, T, m * H]; 1 for what is normed already."""
    if not taps:
        return jnp.ones((1,), jnp.float32)
    wide = features.astype(jnp.float32).reshape(-1, len(taps), features.shape[-1] // len(taps))
    return jnp.sqrt(jnp.mean(wide * wide, axis=(0, 2)) + 1e-12)


@dataclasses.dataclass(frozen=True)
class Writer:
    """Has the target write texts: pieces of the corpus, and what the target makes of them.

    Short texts follow each other in a sequence, as documents do in the corpus: what writing costs is the number of
    forwards, one a token, however many texts there are.

    Fields:
      target: who writes.
      tokens: uint16[N], the stream of the corpus, on the host.
      length: T, tokens of a sequence.
      batch: sequences written together.
      seed: of pieces and of sampling.
      text_length: most tokens of one text.
    """

    target: Checkpoint
    tokens: np.ndarray
    length: int
    batch: int
    seed: int
    text_length: int = 512

    def write(self, number: int) -> np.ndarray:
        """Chunk number `number`, uint16[batch, T], the same whenever it is asked for.

        Of the tokens of a text an eighth to a half are the corpus's. The end of a document is no stop: the next one
        follows.
        """
        rng = np.random.default_rng((self.seed, number))
        size = min(self.text_length, self.length)
        count = self.batch * -(-self.length // size)
        given = rng.integers(max(size // 8, 1), max(size // 2, 2), count)
        starts = rng.integers(0, len(self.tokens) - size, count)
        prompts = [self.tokens[start : start + n].astype(np.int32) for start, n in zip(starts, given, strict=True)]
        config = SpecConfig(
            batch_size=count,
            num_draft_tokens=1,
            context_len=size,
            max_new_tokens=size,
            page_size=min(64, 1 << max((size // 4).bit_length() - 1, 0)),
            prefill_chunk=min(256, size),
            sampling="match" if max(TEMPERATURES) else None,
        )
        result = generate(
            self.target.model,
            Params(self.target.params),
            prompts,
            config=config,
            max_new_tokens=[size - len(prompt) for prompt in prompts],
            temperature=[TEMPERATURES[i % len(TEMPERATURES)] for i in range(count)],
            seed=[int(n) for n in rng.integers(0, 2**31 - 1, count)],
        )
        texts = [[*prompt, *ids] for prompt, ids in zip(prompts, result.token_ids, strict=True)]
        texts = np.asarray(texts, np.uint16)
        if count > self.batch:
            texts[:, -1] = END_OF_TEXT_ID
        return texts.reshape(self.batch, -1)[:, : self.length]

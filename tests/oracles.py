"""What the tests compare against: the same results by plainer means.

The code shares nothing with the implementation but the network itself: `GreedyOracle` runs the flax module over whole
texts with `dense_attend`, with no cache, page, metadata or step. That the module is right is for the parity tests.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models import dense_attend


class GreedyOracle:
    """Greedy continuations without a cache: every token comes from a forward over the whole text before it.

    One program serves all prompts: texts are padded at their end to `length`, where causality hides the padding.
    """

    BATCH = 8

    def __init__(self, module, params, length):
        self.params, self.length, self._texts = params, length, {}
        attend = dense_attend(module.config.windows)
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (self.BATCH, length))

        @jax.jit
        def complete(params, tokens, known):
            def write_next(i, tokens):
                logits, _, _ = module.apply(params, tokens, positions, attend)
                following = jnp.argmax(logits[:, i - 1], axis=-1).astype(jnp.int32)
                return tokens.at[:, i].set(jnp.where(i >= known, following, tokens[:, i]))

            return jax.lax.fori_loop(known.min(), length, write_next, tokens)

        self._complete = complete

    def __call__(self, prompt, count):
        """The first `count` ids that follow `prompt`, fewer if the text would grow past `length`."""
        if prompt not in self._texts:
            self.prepare([prompt])
        return self._texts[prompt][len(prompt) :][:count]

    def prepare(self, prompts):
        """Completes several prompts together, which costs as much as one."""
        missing = sorted({p for p in prompts if p not in self._texts}, key=len)
        for start in range(0, len(missing), self.BATCH):
            group = missing[start : start + self.BATCH]
            tokens = np.zeros((self.BATCH, self.length), np.int32)
            known = np.full(self.BATCH, self.length, np.int32)
            for row, ids in enumerate(group):
                tokens[row, : len(ids)], known[row] = ids, len(ids)
            for ids, text in zip(group, np.asarray(self._complete(self.params, tokens, known)), strict=False):
                self._texts[ids] = text.tolist()


def next_ids(module, params, texts, length):
    """For each text, the greedy id after each of its tokens, from one forward over all of it: a list of arrays."""
    tokens = np.zeros((len(texts), length), np.int32)
    for row, ids in enumerate(texts):
        tokens[row, : len(ids)] = ids
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
    logits, _, _ = jax.jit(module.apply, static_argnums=3)(
        params, tokens, positions, dense_attend(module.config.windows)
    )
    following = np.asarray(jnp.argmax(logits, axis=-1))
    return [row[: len(ids)] for ids, row in zip(texts, following, strict=True)]


def attention(q, kv, page_table, positions, lengths, *, page_size, window=None, scale=None):
    """Attention over pages in float64, query by query, of the visible keys alone; arguments of `paged_attention`."""
    B, D, heads, width = q.shape
    group = heads // kv.shape[2]
    out = np.zeros(q.shape)
    for b in range(B):
        for j in range(D):
            here = int(positions[b, j])
            first = 0 if window is None else max(0, here - window + 1)
            keys = range(first, min(here + 1, int(lengths[b])))
            slots = [int(page_table[b, p // page_size]) * page_size + p % page_size for p in keys]
            for h in range(heads if slots else 0):
                rows = kv[slots, :, h // group].astype(np.float64)
                scores = rows[:, 0] @ q[b, j, h].astype(np.float64) * (width**-0.5 if scale is None else scale)
                weights = np.exp(scores - scores.max())
                out[b, j, h] = weights @ rows[:, 1] / weights.sum()
    return out


def lookup(sequence, count, longest, shortest):
    """What prompt lookup proposes: text search for the sequence's ending, the longest first, then the latest place."""
    text = "".join(chr(0x100 + token) for token in sequence)
    for size in range(min(longest, len(text) - 1), shortest - 1, -1):
        # The occurrence may overlap the ending but must end before it.
        place = text.rfind(text[-size:], 0, len(text) - 1)
        if place >= 0:
            following = text[place + size :]
            return [ord(following[i % len(following)]) - 0x100 for i in range(count)]
    return []

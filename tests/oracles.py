"""What the tests compare against: the same results by plainer means, in code that shares nothing with the implementation.

The one exception is the network itself: `GreedyOracle` runs the flax module, but over whole texts with `dense_attend`, so that no cache,
page, metadata or step is involved. That the module is right is the business of the parity tests.
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

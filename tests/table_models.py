"""Models that are a table: the logits behind a token depend on that token alone. The step around them is the real one,
and their law is known exactly.
"""

import dataclasses

import numpy as np
from law_oracle import probs
from tiny_models import FAST_COMPILE

import jaxspec

V = 3


@dataclasses.dataclass(frozen=True)
class Table:
    """params: float32[V, V], a row of logits behind each token. Counts how often it is traced."""

    traced: list = dataclasses.field(default_factory=list, hash=False, compare=False)

    def __call__(self, params, tokens, positions, cache, metadata):
        self.traced.append(tokens.shape)
        hidden = params[tokens]
        logits = hidden
        if metadata.logit_rows is not None:
            logits = params[tokens[np.arange(len(tokens))[:, None], metadata.logit_rows]]
        return logits, hidden, cache


APPLY = Table()
LAYERS = (jaxspec.LayerSpec(num_kv_heads=1, head_dim=8),)
TARGET = jaxspec.Model(APPLY, LAYERS, vocab_size=V, context_len=64)
DRAFT = jaxspec.DraftLM(jaxspec.Model(Table(), LAYERS, vocab_size=V, context_len=64))


def params():
    """Logits of the target and of a draft that is like it."""
    rng = np.random.default_rng(11)
    target = rng.normal(size=(V, V)).astype(np.float32)
    return jaxspec.Params(target, target + rng.normal(size=(V, V)).astype(np.float32))


def step(verifier, *, batch, D=4, new=8, drafter=DRAFT, context=32, **others):
    config = jaxspec.SpecConfig(
        batch_size=batch,
        num_draft_tokens=D,
        context_len=context,
        max_new_tokens=new,
        page_size=16,
        prefill_chunk=4,
        sampling=verifier,
        **others,
    )
    return jaxspec.make_spec_step(TARGET, drafter, config, options=FAST_COMPILE)


def law(depth, **settings):
    """float64[V] * depth: the target's law of the tokens behind token 0."""
    table = [probs(row, **settings) for row in params().target]
    out = np.zeros((V,) * depth)
    for run in np.ndindex(out.shape):
        out[run] = np.prod([table[a][b] for a, b in zip((0, *run), run, strict=False)])
    return out

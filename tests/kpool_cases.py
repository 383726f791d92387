"""What the tests of sparse layers under the step share: a model of such layers alone, and hands for its memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from hybrid_cases import Scripted, live_slots, scripts, state_places
from tiny_models import CONTEXT, FAST_COMPILE, VOCAB, prompt
from unified_cases import run

import jaxspec
from jaxspec.attention import IndexRows, attend_pooled
from jaxspec.cache import KPoolSpec, PoolCache

POOL, TOPK, NEW, CHUNK = 4, 16, 24, 20
WIDTH, HEADS, INDEX_DIM, INDEX_HEADS, LATENT = 32, 2, 16, 2, 16
EDGES = (1, 2, 3, 4, 5, 7, 8, 9, TOPK, TOPK + 5, CHUNK, 64, CONTEXT - 9)  # around pools, topk, chunks, pages, the end


@dataclasses.dataclass(frozen=True)
class Apply:
    """Two sparse layers over rows of K and V (grouped heads), or over latent rows that are both."""

    latent: bool = True

    def __call__(self, params, tokens, positions, cache, metadata):
        return self.run(attend_pooled, params, tokens, positions, cache, metadata)

    def run(self, attend, params, tokens, positions, cache, metadata):
        """The model with another function in place of `attend_pooled`."""
        x = params["embed"][tokens] + 0.3 * jnp.sin(positions[..., None] * params["turns"])
        rows = tokens.shape
        for layer, weights in enumerate(params["layers"]):
            q = (x @ weights["q"]).reshape(*rows, HEADS, LATENT)
            k = (x @ weights["k"])[:, :, None]
            v = None if self.latent else (x @ weights["v"])[:, :, None]
            index = IndexRows(
                (x @ weights["query"]).reshape(*rows, INDEX_HEADS, INDEX_DIM),
                x @ weights["weight"],
                x @ weights["key"],
                x @ weights["score"],
                weights["ape"][: metadata.kpool.pool],
            )
            out, cache, _ = attend(cache, layer, q, k, v, index, metadata)
            x = x + out.reshape(*rows, -1) @ weights["out"]
            x = x + jnp.tanh(x @ weights["up"]) @ weights["down"]
        hidden = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
        wanted = hidden
        if metadata.logit_rows is not None:
            wanted = jnp.take_along_axis(hidden, metadata.logit_rows[:, :, None], axis=1)
        return (wanted @ params["embed"].T).astype(jnp.float32), hidden, cache


def sparse_model(*, latent=True, pool=POOL, topk=TOPK):
    spec = KPoolSpec(1, LATENT, value_dim=0 if latent else None, pool=pool, topk=topk, index_dim=INDEX_DIM)
    return jaxspec.Model(Apply(latent), (spec, spec), VOCAB, CONTEXT)


@functools.cache
def sparse_params():
    rng = np.random.default_rng(0)

    def matrix(*shape):
        return jnp.asarray(1.5 * rng.standard_normal(shape) / np.sqrt(shape[0]), jnp.float32)

    def layer():
        shapes = {
            "q": (WIDTH, HEADS * LATENT),
            "k": (WIDTH, LATENT),
            "v": (WIDTH, LATENT),
            "query": (WIDTH, INDEX_HEADS * INDEX_DIM),
            "weight": (WIDTH, INDEX_HEADS),
            "key": (WIDTH, INDEX_DIM),
            "score": (WIDTH, INDEX_DIM),
            "ape": (POOL, INDEX_DIM),
            "out": (HEADS * LATENT, WIDTH),
            "up": (WIDTH, 48),
            "down": (48, WIDTH),
        }
        return {name: matrix(*shape) for name, shape in shapes.items()}

    embed = jnp.asarray(rng.standard_normal((VOCAB, WIDTH)), jnp.float32)
    turns = jnp.asarray(rng.uniform(0.01, 2, WIDTH), jnp.float32)
    return {"embed": embed, "turns": turns, "layers": [layer(), layer()]}


PROMPTS = [prompt(n) for n in EDGES]


@functools.cache
def plain_texts(model):
    """What plain decoding, one token a forward, says after the prompts."""
    spec = jaxspec.make_spec_step(model, None, settings(model, 1), options=FAST_COMPILE)
    return [result.token_ids for result in run(spec, jaxspec.Params(sparse_params()), PROMPTS)]


def settings(model, rows, *, memory="static", page=8, **others):
    shape = dict(batch_size=len(EDGES), num_draft_tokens=rows, context_len=CONTEXT, max_new_tokens=NEW, page_size=page)
    return jaxspec.SpecConfig(**shape, prefill_chunk=CHUNK, memory=memory, check_ids=True, **others)


@functools.cache
def scripted_step(model, rows, **others):
    """A step whose drafter is right as often as told."""
    return jaxspec.make_spec_step(model, Scripted(), settings(model, rows, **others), options=FAST_COMPILE)


def script_params(model, rows):
    """Weights for the prompts, with drafts that follow the plain text for a while."""
    text = np.zeros((len(PROMPTS), CONTEXT), np.int32)
    for lane, (ids, told) in enumerate(zip(PROMPTS, plain_texts(model), strict=True)):
        text[lane, : len(ids) + len(told)] = [*ids, *told]
    return jax.device_put(jaxspec.Params(sparse_params(), (text, scripts(rows - 1, len(PROMPTS)))))


def poison(state):
    """The state with NaN, or what comes close, wherever the next forward has no business: free pages and rings, sinks,
    rows past the committed length, index keys of pools that are not closed, ring rows of closed pools."""
    cache, requests = state.cache, jax.device_get(jaxspec.requests_of(state))
    lengths = {row: int(requests.seq_len[row]) for row in state_places(state)}
    places = state_places(state)
    pages = jax.device_get(state.pages)
    page_size = cache.page_size

    def joined(pairs):
        pairs = [(np.zeros(0, int),) * 2, *pairs]
        return tuple(np.concatenate(arrays) for arrays in zip(*pairs, strict=True))

    def pools_of(spec):
        """Physical page of each closed pool, and its place there."""
        found = []
        for row, length in lengths.items():
            pool, a_page = np.arange(length // spec.pool), page_size // spec.pool
            found.append((pages.v2p[pages.page_table[row, pool // a_page], 0], pool % a_page))
        return joined(found)

    def tail_of(spec):
        """State slot of each token of a live tail, and its row of the ring."""
        found = []
        for row, length in lengths.items():
            tail = np.arange(length - length % spec.pool, length)
            found.append((np.full(tail.shape, places[row]), tail % spec.ring))
        return joined(found)

    if not isinstance(cache, PoolCache):
        buffers = []
        for spec, buffer in zip(cache.layers, cache.buffers, strict=True):
            rows, index, tail = (np.asarray(part) for part in buffer)
            slots, (page, place), (slot, column) = live_slots(state, spec), pools_of(spec), tail_of(spec)
            spoiled_rows, spoiled_tail = np.full_like(rows, np.nan), np.full_like(tail, np.nan)
            spoiled_rows[slots] = rows[slots]
            spoiled_tail[slot, column] = tail[slot, column]
            spoiled_index = np.full_like(index, 0xFF)  # NaN in 8 bits and in 32
            for offset, size in ((place * spec.index_dim, spec.index_dim), (keys_end(spec, page_size) + 4 * place, 4)):
                cells = offset[:, None] + np.arange(size)
                spoiled_index[page[:, None], cells] = index[page[:, None], cells]
            buffers.append(type(buffer)(*map(jnp.asarray, (spoiled_rows, spoiled_index, spoiled_tail))))
        return state.replace(cache=cache.replace(buffers=tuple(buffers)))

    layout, live = cache.layout, np.zeros(cache.layout.nbytes, bool)
    full, entry = layout.entries["full"], layout.entries["state"]
    for number, spec in enumerate(cache.layers):
        slots, (page, place), (slot, column) = live_slots(state, spec), pools_of(spec), tail_of(spec)
        for span in (span for span in full.spans if span.owner == ("layers", number)):
            start = slots // page_size * full.page_bytes + slots % page_size * full.size + span.start
            live[start[:, None] + np.arange(span.size)] = True
        (section,) = (span for span in full.section_spans if span.owner == ("layers", number))
        start = page * full.page_bytes + page_size * full.size + section.start
        live[(start + place * spec.index_dim)[:, None] + np.arange(spec.index_dim)] = True
        live[(start + keys_end(spec, page_size) + 4 * place)[:, None] + np.arange(4)] = True
        (ring,) = (span for span in entry.spans if span.owner == ("layers", number))
        row_bytes = ring.size // spec.ring
        live[(slot * entry.size + ring.start + column * row_bytes)[:, None] + np.arange(row_bytes)] = True
    raw = np.where(live, np.asarray(cache.buffer).reshape(-1).view(np.uint8), np.uint8(0xFF))
    buffer = jnp.asarray(raw.view(cache.buffer.dtype).reshape(cache.buffer.shape))
    return state.replace(cache=cache.replace(buffer=buffer))


def keys_end(spec, page_size):
    """Bytes of an index page before its scales."""
    return page_size // spec.pool * spec.index_dim

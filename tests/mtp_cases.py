"""What the tests of the MTP drafter share: a tiny target with blocks, generation by phases, and two independent views
of it: what the blocks say without a cache, and which bytes of the memory the next round may read.
"""

import dataclasses
import functools

import jax

# jax 0.11 imports it when a kernel is first interpreted, and then compiles all programs anew: better before them.
import jax.experimental.pallas.tpu
import jax.numpy as jnp
import numpy as np
from hybrid_cases import live_slots, running_rows, state_places
from tiny_models import FAST_COMPILE, GLM_CONFIG, prompt

import jaxspec
from jaxspec import models
from jaxspec.cache import KPoolSpec, PoolCache
from jaxspec.generation.results import read_requests
from jaxspec.models.contract import blocks_of_glm

T, NEW = 64, 24
ALL = 64  # a budget of tokens with which no row drops any
FUSED = {"page_size": 256, "kernel_backend": "interpret", "kpool_metadata_fusion": True}


@functools.cache
def target(topk=8, blocks=1):
    """(module, weights): those of the blocks come with the model's embedding and head."""
    config = dataclasses.replace(GLM_CONFIG, index_topk=topk, num_nextn_predict_layers=blocks)
    tree = models.random_params(config, seed=0)
    tree = jax.tree.map(lambda x: 2 * x if x.ndim == 2 else x, tree)  # else a greedy text soon repeats one token
    shared = {name: tree["params"][name] for name in ("embed_tokens", "lm_head")}
    return models.Glm(config), jaxspec.Params({"params": tree["params"]}, {"blocks": tree["mtp"], **shared})


def make_step(*, topk=8, blocks=1, D=4, **others):
    """A step of the target that its blocks draft for, and its weights."""
    module, params = target(topk, blocks)
    shape = {"batch_size": 5, "num_draft_tokens": D, "context_len": T, "max_new_tokens": NEW, "page_size": 8}
    how = {"prefill_chunk": 16, "check_ids": True, "kernel_backend": "reference"}
    config = jaxspec.SpecConfig(**(shape | how | others))
    drafter = jaxspec.MTPDrafter(blocks_of_glm(module))
    return jaxspec.make_spec_step(models.from_glm(module), drafter, config, options=FAST_COMPILE), params


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2, compiler_options=FAST_COMPILE)
def round_by_phases(spec, params, state, text, right):
    """A round in which `right` int32[B] drafts of each lane are those of `text` int32[B, T] and wrong ones follow; the
    drafter's own if it is negative. Returns the state, and rows, lengths and proposals of the lanes, and the output."""
    state, plan = jaxspec.prepare(spec, state)
    state, drafts = jaxspec.draft(spec, params, state, plan)
    column = jnp.arange(drafts.tokens.shape[1], dtype=jnp.int32)
    told = jnp.take_along_axis(text, jnp.minimum(plan.seq_lens[:, None] + 1 + column, text.shape[1] - 1), axis=1)
    script = jnp.where(column < right[:, None], told, (told + 1) % spec.target.vocab_size)
    script = drafts.replace(tokens=jnp.where(right[:, None] < 0, drafts.tokens, script))
    state, verdict = jaxspec.verify(spec, params, state, plan, script)
    state = jaxspec.extend(spec, params, state, plan, verdict)
    state, output = jaxspec.commit(spec, state, plan, script, verdict)
    return state, (plan.req_rows, plan.seq_lens, drafts, output)


def generate(spec, params, prompts, texts=None, *, meddle=lambda state: state):
    """Prefill and rounds, with `meddle(state)` before each of them.

    With `texts`, {prompt: prompt and completion}, all requests but `OWN` have none, some or all of their drafts right,
    by turns; otherwise they keep those of the blocks.

    Returns:
      the results of the requests, and [(prompt, length, proposals, accepted)] of all rounds and requests.
    """
    state = jaxspec.init_state(spec.target, spec.drafter, spec.config, prompts)
    state, status = spec.prefill(params, meddle(state))
    B, most, seen = spec.config.batch_size, spec.config.num_draft_tokens - 1, []
    text = np.zeros((B, T), np.int32)
    for lane, ids in enumerate(prompts if texts else ()):
        text[lane, : len(texts[ids])] = texts[ids]
    assert status == 0
    for turn in range(NEW):
        if not running_rows(state).size:
            return read_requests(state, prompts), seen
        right = [-1 if ids == OWN or not texts else (most, 0, 1, 2, most, 1)[(turn + len(ids)) % 6] for ids in prompts]
        right = np.array([*right, *[0] * (B - len(prompts))], np.int32)
        state, seen_now = round_by_phases(spec, params, meddle(state), text, right)
        rows, lengths, drafts, output = jax.device_get(seen_now)
        assert output.status == 0 and ((drafts.tokens >= 0) & (drafts.tokens < spec.target.vocab_size)).all()
        assert (drafts.count[rows == 0] == 0).all() and (rows[len(prompts) :] == 0).all()
        for lane in np.flatnonzero(rows):
            ids = drafts.tokens[lane, : drafts.count[lane]].tolist()
            seen.append((prompts[lane], int(lengths[lane]), ids, int(output.accepted[lane])))
    raise AssertionError("a request did not end")


class Reference:
    """Texts and proposals without a cache: target and blocks over whole texts, whose rows are the keys.

    One program serves all texts: they are padded at their end, where causality hides the padding.
    """

    LANES = 32

    def __init__(self, topk=8, blocks=1):
        self.module, self.params = target(topk, blocks)
        config, look = self.module.config, models.dense_attend_pooled(self.module.config)

        def visible(index, start):
            """bool[N, T, T], what each row sees. Rows from `start` on are a chain: they see what the row before it
            does, and each other."""
            N, row = len(start), jnp.arange(T)
            each = jnp.broadcast_to(jnp.eye(T)[None, :, None], (N, T, 1, T))  # row j is the j-th unit vector
            seen = look(0, jnp.zeros((N, T, 1, T)), each, None, index, None, scale=1.0)[0][:, :, 0] > 0
            last = jnp.take_along_axis(seen, start[:, None, None] - 1, axis=1)
            later = row >= start[:, None]
            return jnp.where(later[..., None], last | later[:, None], seen) & (row <= row[:, None])

        def block(params, depth, ids, hidden, start):
            def attend(layer, q, k, v, index, cache, *, scale):
                scores = jnp.einsum("bihl,bjl->bhij", q, k[:, :, 0], precision="highest") * scale
                weights = jax.nn.softmax(jnp.where(visible(index, start)[:, None], scores, -jnp.inf), axis=-1)
                return jnp.einsum("bhij,bjl->bihl", weights, k[:, :, 0], precision="highest"), cache

            module, weights = models.GlmMTP(config, depth=depth), {"params": params["blocks"][f"blocks_{depth}"]}
            logits, hidden, _ = module.apply(weights, params["embed_tokens"], params["lm_head"], ids, hidden, attend)
            return jnp.argmax(logits, axis=-1), hidden

        def at(rows, place):
            return jnp.take_along_axis(rows, place[:, None], axis=1)[:, 0]

        def follow(params, tokens):
            logits, hidden, _ = self.module.apply(params, tokens, tokens, look)
            return jnp.argmax(logits, axis=-1), hidden

        def chain(params, tokens, start):
            (_, hidden), ids = follow(params.target, tokens), jnp.roll(tokens, -1, axis=1)

            def one(carry, place):
                ids, hidden = carry
                best, own = block(params.draft, 0, ids, hidden, start)
                draft, here = at(best, start - 1 + place), jnp.arange(T) == start[:, None] + place
                ids = jnp.where(here, draft[:, None], ids)
                return (ids, jnp.where(here[..., None], jnp.roll(own, 1, axis=1), hidden)), draft

            return jax.lax.scan(one, (ids, hidden), jnp.arange(3))[1].T

        def by_depth(params, tokens, first, start, shifted):
            (_, hidden), row = follow(params.target, tokens), jnp.arange(T)
            shifted, drafts = [*shifted], []
            for depth in range(blocks):
                best, hidden = block(params.draft, depth, shifted[depth], hidden, jnp.full_like(start, T))
                drafts.append(at(best, start - 1))
                for more in range(
                    depth + 1, blocks
                ):  # the token at start + 1 + depth, which row p sees as p + 1 + more
                    guess = (row == (start + depth - more)[:, None]) & (row >= first)
                    shifted[more] = jnp.where(guess, drafts[-1][:, None], shifted[more])
            return jnp.stack(drafts, axis=1), jnp.stack(shifted)

        compiled = functools.partial(jax.jit, compiler_options=FAST_COMPILE)
        self._follow, self._chain, self._by_depth = compiled(follow), compiled(chain), compiled(by_depth)

    def _padded(self, texts):
        tokens = np.zeros((self.LANES, T), np.int32)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
        return tokens

    @functools.cached_property
    def texts(self):
        """{prompt: prompt and greedy completion} of `PROMPTS`."""
        texts = {ids: [*ids] for ids in PROMPTS}
        for _ in range(NEW):
            following = np.asarray(self._follow(self.params.target, self._padded(texts.values()))[0])
            for text, row in zip(texts.values(), following, strict=False):
                if len(text) < T:
                    text.append(int(row[len(text) - 1]))
        return texts

    def chains(self, texts):
        """Three proposals for each text, whose last token is the anchor, of one block."""
        found = []
        for first in range(0, len(texts), self.LANES):
            some = texts[first : first + self.LANES]
            start = np.ones(self.LANES, np.int32)
            start[: len(some)] = [len(text) - 1 for text in some]
            found += np.asarray(self._chain(self.params, self._padded(some), start))[: len(some)].tolist()
        return found

    def depths(self, text, ends):
        """Proposals of a block for each depth, after extends that end before each of `ends` in turn.

        A row keeps what it saw when its own extend ran: where that was a draft, it stays one.
        """
        blocks, tokens = self.module.config.num_nextn_predict_layers, self._padded([text])
        shifted = np.zeros((blocks, self.LANES, T), np.int32)
        found, first = [], 0
        for end in ends:
            for depth in range(blocks):
                shifted[depth, 0, first:end] = np.roll(tokens[0], -1 - depth)[first:end]
            start = np.full(self.LANES, end, np.int32)
            drafts, after = jax.device_get(self._by_depth(self.params, tokens, first, start, shifted))
            found.append(drafts[0].tolist())
            shifted, first = after.copy(), end
        return found


@functools.cache
def reference(topk=8, blocks=1):
    return Reference(topk, blocks)


OWN = prompt(17)  # the request that keeps the drafts of the blocks
END = tuple(prompt(n) for n in (33, T - 5, T - 2, T - 1))


def around(chunk):
    """Prompts of one token, and of a chunk less one, as it is and with one more."""
    return tuple(prompt(n) for n in (1, chunk - 1, chunk, chunk + 1))


PROMPTS = tuple(dict.fromkeys((*around(5), *around(16), *around(32), *END)))


# Memory


def poison(state):
    """The state with NaN wherever the next forward has no business: free pages, sinks, padding, rows past the committed
    length, index keys of pools that are not closed, ring rows of closed ones; and with garbage for scratch."""
    lengths = dict(enumerate(np.asarray(jaxspec.requests_of(state).seq_len)))
    places, tables = state_places(state), jax.device_get(state.pages)
    page_size = state.cache.page_size

    def live_of(spec):
        """Of one layer: slots; (page, byte) of the index keys; (state, ring row)."""
        index, ring, here = [np.zeros((0, 2), int)], [np.zeros((0, 2), int)], page_size // spec.pool
        for row, place in places.items():
            pools = np.arange(lengths[row] // spec.pool)
            page = tables.v2p[tables.page_table[row, pools // here], 0]
            key = (pools % here * spec.index_dim)[:, None] + np.arange(spec.index_dim)
            scale = (here * spec.index_dim + 4 * (pools % here))[:, None] + np.arange(4)
            cells = np.concatenate([key, scale], axis=1)
            index.append(np.stack(np.broadcast_arrays(page[:, None], cells), axis=-1).reshape(-1, 2))
            tail = np.arange(len(pools) * spec.pool, lengths[row]) % spec.ring
            ring.append(np.stack(np.broadcast_arrays(place, tail), axis=-1))
        return live_slots(state, spec), np.concatenate(index), np.concatenate(ring)

    def scratch(packed):
        return dataclasses.replace(packed, buffer=jnp.full_like(packed.buffer, -(2**30)))

    draft = state.draft.replace(extend=scratch(state.draft.extend), chain=scratch(state.draft.chain))
    state = state.replace(metadata=scratch(state.metadata), draft=draft)
    if isinstance(state.cache, PoolCache):
        return state.replace(cache=_poison_pool(state.cache, live_of, places))

    def spoil(part, *live):
        part = np.asarray(part)
        spoiled = np.frombuffer(b"\xff" * part.nbytes, part.dtype).reshape(part.shape).copy()
        spoiled[live] = part[live]
        return jnp.asarray(spoiled)

    def spoil_cache(cache):
        buffers = []
        for spec, buffer in zip(cache.layers, cache.buffers, strict=True):
            if isinstance(spec, KPoolSpec):
                slots, index, ring = live_of(spec)
                buffers.append(
                    type(buffer)(spoil(buffer.rows, slots), spoil(buffer.index, *index.T), spoil(buffer.tail, *ring.T))
                )
            else:
                buffers.append(tuple(spoil(part, [*places.values()]) for part in buffer))
        return cache.replace(buffers=tuple(buffers))

    return state.replace(
        cache=spoil_cache(state.cache), draft=state.draft.replace(cache=spoil_cache(state.draft.cache))
    )


def _poison_pool(cache, live_of, places):
    layout, live = cache.layout, np.zeros(cache.layout.nbytes, bool)
    full, states, page_size = layout.entries["full"], layout.entries["state"], cache.page_size

    def keep(starts, size):
        live[np.asarray(starts, int).reshape(-1, 1) + np.arange(size)] = True

    for name, layers in (("layers", layout.layers), ("draft_layers", layout.draft_layers)):
        for number, spec in enumerate(layers):
            spans = [span for span in (*full.spans, *full.section_spans, *states.spans) if span.owner == (name, number)]
            for span in spans:
                if not isinstance(spec, KPoolSpec):
                    keep(np.array([*places.values()]) * states.size + span.start, span.size)
                    continue
                slots, index, ring = live_of(spec)
                if span.part == "index":
                    keep(index[:, 0] * full.page_bytes + page_size * full.size + span.start + index[:, 1], 1)
                elif span.part == "tail":
                    row = span.size // spec.ring
                    keep(ring[:, 0] * states.size + span.start + ring[:, 1] * row, row)
                else:
                    keep(slots // page_size * full.page_bytes + slots % page_size * full.size + span.start, span.size)
    raw = np.where(live, np.asarray(cache.buffer).reshape(-1).view(np.uint8), np.uint8(0xFF))
    return cache.replace(buffer=jnp.asarray(raw.view(cache.buffer.dtype).reshape(cache.buffer.shape)))

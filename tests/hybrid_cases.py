"""What the tests of a hybrid under the step share: a model, a drafter that is right as often as told, and eyes and
hands for the memory of both kinds, static and unified, with states in it.

Memory is looked at by its static description in bytes, not through the views that the library reads it by.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import quick_compile
import recurrent_oracle
from tiny_models import CONTEXT, FAST_COMPILE, HYBRID_CONFIG, VOCAB

import jaxspec
from jaxspec import models
from jaxspec.cache import PoolCache
from jaxspec.generation.results import read_requests
from jaxspec.models import dense_attend
from jaxspec.steps.state import RUNNING

NEW, CHUNK, PAGE, D, BATCH = 40, 20, 4, 4, 3
CHUNKS = {"static": 2, "unified": CHUNK}  # of the steps below: less than the convolution looks back, and more

# Two recurrent layers, one of them behind attention: its state depends on rows that were read out of pages.
DEEP_MODULE = models.Hybrid(
    dataclasses.replace(
        HYBRID_CONFIG,
        layer_types=("linear_attention", "sliding_attention", "linear_attention", "full_attention"),
    )
)


@functools.cache
def deep_params():
    """Random weights, scaled up like those of the other tiny models."""
    return jax.tree.map(lambda x: 3 * x if x.ndim == 2 else x, models.random_params(DEEP_MODULE.config, seed=0))


CALLS = []  # of the model below


@dataclasses.dataclass(frozen=True)
class Counted:
    """A model's function that notes its calls: there is one whenever a program with the model in it is traced."""

    apply: object

    def __call__(self, params, tokens, *rest):
        CALLS.append(tokens.shape)
        return self.apply(params, tokens, *rest)


_DEEP = models.from_hybrid(DEEP_MODULE)
DEEP_TARGET = dataclasses.replace(_DEEP, apply=Counted(_DEEP.apply))


# A drafter for tests


@dataclasses.dataclass(frozen=True)
class Scripted:
    """Proposes the text that is in its weights, wrong from one draft on.

    Its weights are `text`, int32[B, T], all tokens of each lane's request, and `right`, int32[B, N], how many drafts of
    its n-th round are right. Its state counts the rounds of each lane.
    """

    algorithm: ClassVar[str] = "ngram"

    def init(self, config):
        return jnp.zeros((config.batch_size,), jnp.int32)

    def prefill(self, params, state, tokens, metadata):
        return state

    def propose(self, params, state, context, num_drafts):
        text, right = params
        column = jnp.arange(num_drafts, dtype=jnp.int32)
        position = jnp.minimum(context.seq_lens[:, None] + 1 + column, text.shape[1] - 1)
        told = jnp.take_along_axis(text, position, axis=1)
        good = jnp.take_along_axis(right, jnp.minimum(state, right.shape[1] - 1)[:, None], axis=1)
        tokens = jnp.where(column < good, told, (told + 1) % VOCAB)
        count = jnp.full(state.shape, num_drafts, jnp.int32)
        return state + (context.req_rows > 0), jaxspec.Drafts(tokens=tokens, count=count)


def scripts(num_drafts, batch):
    """int32[B, NEW], right drafts in each round: nothing after everything, every number in turn, nothing at all, or
    at random."""
    every = np.arange(num_drafts + 1)
    random = np.random.default_rng(num_drafts).integers(0, num_drafts + 1, NEW)
    patterns = [np.array([num_drafts, 0, num_drafts, 0, 0]), every, random, np.zeros(1, int), every[::-1]]
    return np.stack([np.resize(patterns[lane % len(patterns)], NEW) for lane in range(batch)]).astype(np.int32)


def weights(params, greedy, prompts, right):
    """The step's weights: those of the target, and the script for these prompts."""
    greedy.prepare(prompts)
    text = np.zeros((len(right), CONTEXT), np.int32)
    for lane, ids in enumerate(prompts):
        told = [*ids, *greedy(ids)]
        text[lane, : len(told)] = told
    return jax.device_put(jaxspec.Params(params, (text, np.asarray(right))))


@functools.cache
def deep_step(memory, *, num_drafts=D - 1, chunk=None):
    """The step of most of these tests: three lanes, pages of 4 tokens, the scripted drafter."""
    config = jaxspec.SpecConfig(
        batch_size=BATCH,
        num_draft_tokens=num_drafts + 1,
        context_len=CONTEXT,
        max_new_tokens=NEW,
        page_size=PAGE,
        prefill_chunk=chunk or CHUNKS[memory],
        memory=memory,
        check_ids=True,
    )
    return jaxspec.make_spec_step(DEEP_TARGET, Scripted(), config, options=FAST_COMPILE)


def nothing(state, *_):
    return state


def run_by_rounds(spec, params, state, *, meddle=nothing, watch=nothing):
    """Prefill and single rounds, with `meddle(state)` before each of them and `watch(state)` after."""
    state, status = spec.prefill(params, meddle(state))
    assert status == 0
    watch(state)
    return run_on(spec, params, state, meddle=meddle, watch=watch)


def run_on(spec, params, state, *, meddle=nothing, watch=nothing):
    """Rounds until all requests have ended."""
    for _ in range(NEW):
        state, output = spec(params, meddle(state))
        assert output.status == 0
        watch(state)
        if not output.unfinished:
            return state
    raise AssertionError("a request did not end")


def token_ids(state, prompts):
    """The emitted ids of each request."""
    return [result.token_ids for result in read_requests(state, prompts)]


# What is in the memory


def running_rows(state):
    """Rows whose requests are running: those that the next round takes part in."""
    return np.flatnonzero(np.asarray(jaxspec.requests_of(state).status) == RUNNING)


def live_slots(state, layer):
    """Physical slots of an attention layer that the next round may read: of positions up to L - 1, in the window."""
    requests, pages = jax.device_get((jaxspec.requests_of(state), state.pages))
    page, slots = state.cache.page_size, [np.zeros(0, int)]
    for row in running_rows(state):
        end = int(requests.seq_len[row])
        position = np.arange(0 if layer.window is None else max(end - layer.window + 1, 0), end)
        physical = pages.v2p[pages.page_table[row, position // page], int(layer.storage == "swa")]
        assert (physical > 0).all(), f"row {row} still needs positions whose pages are gone"
        slots.append(physical * page + position % page)
    return np.concatenate(slots)


def state_places(state):
    """{row: where its state is} of the running rows: a page of the pool, or the row itself."""
    if not isinstance(state.cache, PoolCache):
        return {row: row for row in running_rows(state)}
    _, _, slot = np.asarray(state.pages.rows)
    places = {row: int(np.asarray(state.pages.slots)[0, slot[row]]) for row in running_rows(state)}
    assert all(place > 0 for place in places.values()) and len(set(places.values())) == len(places)
    return places


def read_states(state):
    """{(row, layer): [array, ...]}, the states of the running rows."""
    layers, found = state.cache.layers, {}
    for row, place in state_places(state).items():
        for index, layer in enumerate(layers):
            if layer.carries != "accumulated":
                continue
            if isinstance(state.cache, PoolCache):
                entry = state.cache.layout.entries["state"]
                raw = np.asarray(state.cache.buffer).reshape(-1).view(np.uint8)[place * entry.size :]
                spans = {span.part: span for span in entry.spans if span.owner == ("layers", index)}
                found[row, index] = [
                    raw[spans[part.name].start :][: spans[part.name].size].view(part.dtype).reshape(part.shape)
                    for part in layer.parts
                ]
            else:
                found[row, index] = [np.asarray(buffer[place]) for buffer in state.cache.buffers[index]]
    return found


def live_bytes(state):
    """bool[bytes of the pool]: what the next round may read."""
    cache, layout = state.cache, state.cache.layout
    live = np.zeros(layout.nbytes, bool)
    for kind, entry in layout.entries.items():
        for span in entry.spans:
            places = np.array([*state_places(state).values()], int)
            if kind != "state":
                places = live_slots(state, cache.layers[span.owner[1]])
            live[(places * entry.size + span.start)[:, None] + np.arange(span.size)] = True
    return live


def poison(state):
    """The state with NaN where the next forward has no business: free memory, sinks, padding, stale rows and states."""
    cache = state.cache
    if isinstance(cache, PoolCache):
        raw = np.where(live_bytes(state), np.asarray(cache.buffer).reshape(-1).view(np.uint8), np.uint8(0xFF))
        buffer = jnp.asarray(raw.view(cache.buffer.dtype).reshape(cache.buffer.shape))
        return state.replace(cache=cache.replace(buffer=buffer))

    def spoil(buffer, live):
        spoiled = np.full(buffer.shape, np.nan, buffer.dtype)
        spoiled[live] = np.asarray(buffer)[live]
        return jnp.asarray(spoiled)

    rows = [*state_places(state)]
    buffers = [
        tuple(spoil(part, rows) for part in buffer)
        if isinstance(buffer, tuple)
        else spoil(buffer, live_slots(state, layer))
        for layer, buffer in zip(cache.layers, cache.buffers, strict=True)
    ]
    return state.replace(cache=cache.replace(buffers=tuple(buffers)))


def with_cell_of_a_state(state, value):
    """The state with one number of the first running row's first recurrent state changed."""
    cache, (row, place) = state.cache, next(iter(state_places(state).items()))
    index = next(i for i, layer in enumerate(cache.layers) if layer.carries == "accumulated")
    if isinstance(cache, PoolCache):
        span = [s for s in cache.layout.entries["state"].spans if s.owner == ("layers", index)][-1]
        raw = np.array(cache.buffer).reshape(-1).view(np.uint8)
        first = place * cache.layout.entries["state"].size + span.start
        raw[first : first + 4] = np.float32([value]).view(np.uint8)
        buffer = jnp.asarray(raw.view(cache.buffer.dtype).reshape(cache.buffer.shape))
        return state.replace(cache=cache.replace(buffer=buffer))
    buffers = list(cache.buffers)
    *first, last = buffers[index]
    buffers[index] = (*first, last.at[row, 0, 0, 0].set(value))
    return state.replace(cache=cache.replace(buffers=tuple(buffers)))


def move_pages(state, rng):
    """The state with all pages of each kind elsewhere in the memory that the kind holds, tables following."""
    pages, layout, buffer = jax.device_get(state.pages), state.cache.layout, np.array(state.cache.buffer)
    v2p, slots, physical = pages.v2p.copy(), pages.slots.copy(), pages.physical.copy()
    column = 0
    for index, kind in enumerate(layout.kinds):
        count, span, holes = layout.num_pages(kind), pages.span[index], pages.holes[index]
        first = {"full": count - span, "swa": pages.swa_low, "state": layout.min_page(kind)}[kind]
        to = np.arange(count)  # page p moves to to[p]
        to[first : first + span] = first + rng.permutation(span)
        owner, hole, place = (physical[i, column : column + count] for i in range(3))
        owner[to], place[to] = owner.copy(), place.copy()
        hole[1 : 1 + holes] = to[hole[1 : 1 + holes]]
        owned = slots[0] if kind == "state" else v2p[:, index]  # views
        owned[:] = np.where(owned > 0, to[np.maximum(owned, 0)], owned)
        content = buffer[: count * layout.page_units(kind)].reshape(count, -1)
        content[to] = content.copy()
        column += count
    return state.replace(
        cache=state.cache.replace(buffer=jnp.asarray(buffer)),
        pages=state.pages.replace(v2p=jnp.asarray(v2p), slots=jnp.asarray(slots), physical=jnp.asarray(physical)),
    )


# What text and states should be


def _row_by_row(q, k, v, log_decay, beta, state, *, real, keep):
    """The gated delta rule from its formula, in float32."""
    heads = v.shape[2] // k.shape[2]
    matvec = functools.partial(jnp.einsum, "bhvk,bhk->bhv", precision=jax.lax.Precision.HIGHEST)

    def step(state, row):
        q, k, v, log_decay, beta = row
        q, k = (x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
        q, k = (jnp.repeat(x, heads, axis=1) for x in (q * q.shape[-1] ** -0.5, k))
        state = jnp.exp(log_decay)[..., None, None] * state
        write = beta[..., None] * (v - matvec(state, k))
        state = state + write[..., None] * k[:, :, None, :]
        return state, matvec(state, q)

    state, out = jax.lax.scan(step, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v, log_decay, beta)))
    return jnp.moveaxis(out, 0, 1), state


class Oracle:
    """Greedy texts, and the states they lead to, from forwards over whole texts: no cache, page, metadata or step.

    One program serves all texts: they are padded at their end, where causality hides the padding.
    """

    LANES = 16  # more cost little: most of the time goes to 160 small steps one after the other

    def __init__(self):
        self._texts = {}
        attend = dense_attend(DEEP_MODULE.config.windows)
        positions = jnp.broadcast_to(jnp.arange(CONTEXT, dtype=jnp.int32), (self.LANES, CONTEXT))

        def forward(params, tokens):
            seen = {}

            def recur(layer, update, cache):
                def rule(*inputs, **how):
                    seen[layer] = inputs[:5]
                    return _row_by_row(*inputs, **how)

                out, (windows, _) = update(None, None, "rows", delta=rule)
                seen[layer] = windows, seen[layer]
                return out, cache

            logits, _, _ = DEEP_MODULE.apply(params, tokens, positions, attend, recur=recur)
            return jnp.argmax(logits, axis=-1), seen

        self._forward = jax.jit(forward, compiler_options=quick_compile.options())

    def _run(self, texts):
        tokens = np.zeros((self.LANES, CONTEXT), np.int32)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
        return self._forward(deep_params(), tokens)

    def prepare(self, prompts):
        """Completes several prompts together, which costs as much as one."""
        missing = [ids for ids in dict.fromkeys(prompts) if ids not in self._texts]
        for start in range(0, len(missing), self.LANES):
            texts = [list(ids) for ids in missing[start : start + self.LANES]]
            for _ in range(NEW):
                following = np.asarray(self._run(texts)[0])
                for row, text in enumerate(texts):
                    if len(text) < CONTEXT:
                        text.append(int(following[row, len(text) - 1]))
            for text, ids in zip(texts, missing[start:], strict=False):
                self._texts[ids] = text

    def __call__(self, ids, count=NEW):
        """The first ids that follow a prompt, as many as the context holds."""
        self.prepare([ids])
        return self._texts[ids][len(ids) :][:count]

    def states(self, texts):
        """{layer: (windows [B, T, W - 1, C], states float64[B, T, HV, V, K])} after each token of each text: the
        recurrence row by row in float64."""
        found = {}
        for layer, (windows, inputs) in jax.device_get(self._run(texts)[1]).items():
            inputs = [x[: len(texts)] for x in inputs]
            start = np.zeros((len(texts), *DEEP_TARGET.layers[layer].parts[1].shape))
            found[layer] = windows, recurrent_oracle.gated_delta(*inputs, start)[1]
        return found

"""What the tests of block drafts share: tiny drafts with random weights, generation by phases with as many right drafts
as wanted, and what a draft should remember and propose, in float64, from the text alone: no cache, no pages, no step.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from hybrid_cases import move_pages, running_rows, state_places
from mtp_cases import round_by_phases
from mtp_cases import target as glm_target
from tiny_models import (
    FAST_COMPILE,
    HYBRID_MODULE,
    HYBRID_TARGET,
    MODULE,
    TARGET,
    VOCAB,
    WINDOW,
    hybrid_params,
    prompt,
    target_params,
)

import jaxspec
from jaxspec import models
from jaxspec.cache import KPoolSpec, PoolCache
from jaxspec.generation.results import read_requests
from jaxspec.models.block_config import BlockDraftConfig
from jaxspec.models.block_draft import BlockDraft
from jaxspec.models.contract import from_glm
from jaxspec.models.draft_checkpoint import random_draft_params

T, NEW, BATCH, GAMMA = 96, 40, 6, 15
FIRST = tuple(prompt(n) for n in (1, 7, 17, 33, 40))  # one lane stays padding
END = tuple(prompt(n) for n in (T - 1, T - 2, T - 9, T - 30))
PROMPTS = (*FIRST, *END)


@functools.cache
def target(name):
    """(model, module, weights, attention over whole texts, tapped layers)."""
    if name == "kpool":
        module, params = glm_target()
        return from_glm(module), module, params.target, models.dense_attend_pooled(module.config), (1, 0)
    if name == "hybrid":
        return HYBRID_TARGET, HYBRID_MODULE, hybrid_params(), models.dense_attend(HYBRID_MODULE.config.windows), (0, 2)
    return TARGET, MODULE, target_params(), models.dense_attend(MODULE.config.windows), (0, 1)


# Drafts

SHAPES = {
    "both": {"windows": (WINDOW, None)},
    "far": {"windows": (WINDOW + 3, None)},  # looks back further than the target's pages of sliding windows last
    "slim": {"windows": (WINDOW, None), "num_key_value_heads": 1, "head_dim": 2},  # rows of 8 bytes
    "causal": {"windows": (None, None), "causal": (True, True)},
    "late": {"windows": (None, WINDOW), "sample_from_anchor": False},  # a row for the anchor that predicts nothing
    "table": {"windows": (WINDOW, None)},  # the program of "both"
}


@functools.cache
def draft(algorithm="dspark", name="windows", shape="both"):
    """(configuration, parameters) of a draft for a target. That of shape "table" says what follows a token most
    often, and so is right at times."""
    _, module, params, _, taps = target(name)
    more = {"dspark": {"block_size": GAMMA, "markov_rank": VOCAB}, "dflash": {"block_size": GAMMA + 1}}[algorithm]
    if algorithm == "dflash":
        more["sample_from_anchor"] = False
    config = BlockDraftConfig(
        **{
            "algorithm": algorithm,
            "target_layer_ids": taps,
            "mask_token_id": 7,
            "vocab_size": VOCAB,
            "hidden_size": module.config.hidden_size,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 256,
            **more,
            **SHAPES[shape],
        }
    )
    tree = random_draft_params(config, seed=3)
    if shape == "table":
        follows = np.zeros((VOCAB, VOCAB), np.float32)
        for ids in FIRST:
            text = texts(name).of[ids]
            np.add.at(follows, (text[1:], text[:-1]), 100)
        tree |= {"markov_w1": np.eye(VOCAB, dtype=np.float32), "markov_w2": follows}
    shared = {key: value for key, value in params["params"].items() if key in ("embed_tokens", "lm_head")}
    return config, {"draft": tree, **shared}


def make_step(algorithm="dspark", name="windows", shape="both", *, D=4, dtype="float32", **how):
    """A step of a target that a block drafts for, and its weights."""
    model, _, params, *_ = target(name)
    config, weights = draft(algorithm, name, shape)
    kind = {"dspark": jaxspec.DSparkDrafter, "dflash": jaxspec.DFlashDrafter}[algorithm]
    sizes = {"batch_size": BATCH, "num_draft_tokens": D, "context_len": T, "max_new_tokens": NEW, "page_size": 8}
    sizes |= {"prefill_chunk": 16, "check_ids": True, "kernel_backend": "reference", **how}
    drafter = kind(BlockDraft(config, dtype))
    spec = jaxspec.make_spec_step(model, drafter, jaxspec.SpecConfig(**sizes), options=FAST_COMPILE)
    return spec, jax.device_put(jaxspec.Params(params, weights))


# What should come out


class Texts:
    """Greedy texts of `PROMPTS` and the features of their tokens, by forwards over whole texts."""

    def __init__(self, name):
        _, module, params, attend, taps = target(name)
        place = np.broadcast_to(np.arange(T, dtype=np.int32), (len(PROMPTS), T))

        @functools.partial(jax.jit, compiler_options=FAST_COMPILE)
        def forward(tokens):
            logits, features, _ = module.apply(params, tokens, place, attend, taps=taps)
            return jnp.argmax(logits, axis=-1), features

        tokens, lengths = np.zeros((len(PROMPTS), T), np.int32), [len(ids) for ids in PROMPTS]
        for row, ids in enumerate(PROMPTS):
            tokens[row, : len(ids)] = ids
        for _ in range(NEW):
            following, _ = jax.device_get(forward(tokens))
            for row, length in enumerate(lengths):
                if length < T:
                    tokens[row, length], lengths[row] = following[row, length - 1], length + 1
        features = np.asarray(forward(tokens)[1], np.float64)
        self.of = {ids: tokens[row, : lengths[row]].tolist() for row, ids in enumerate(PROMPTS)}
        self.features = {ids: features[row] for row, ids in enumerate(PROMPTS)}


@functools.cache
def texts(name):
    return Texts(name)


class Oracle:
    """A draft from its formulas, in float64."""

    def __init__(self, algorithm, name, shape):
        self.config, params = draft(algorithm, name, shape)
        params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
        self.tree, self.embedding = params["draft"], params["embed_tokens"]
        self.head = params.get("lm_head", self.embedding)
        self.texts = texts(name)
        self.context = {ids: self._context(features) for ids, features in self.texts.features.items()}

    def _norm(self, x, scale):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.config.rms_norm_eps) * scale

    def _heads(self, x, norm=None):
        """[rows, heads, hd], normed where a scale is given."""
        x = x.reshape(len(x), -1, self.config.head_dim)
        return x if norm is None else self._norm(x, norm)

    def _turn(self, x, position):
        half = self.config.head_dim // 2
        angle = position[:, None, None] * self.config.rope_theta ** (-np.arange(half) / half)
        first, second = x[..., :half], x[..., half:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def _context(self, features):
        """[(K, V), ...], a pair a layer, [T, heads, hd] each."""
        rows, layers = self._norm(features @ self.tree["fc"], self.tree["hidden_norm"]), []
        for layer in range(self.config.num_hidden_layers):
            block = self.tree[f"layers_{layer}"]
            k = self._turn(self._heads(rows @ block["k_proj"], block["k_norm"]), np.arange(len(rows)))
            layers.append((k, self._heads(rows @ block["v_proj"])))
        return layers

    def proposals(self, ids, length, count):
        """What a round proposes after the first `length` tokens of the text of a prompt and the anchor behind them."""
        config, anchor = self.config, self.texts.of[ids][length]
        rows = count + (not config.sample_from_anchor)
        x = self.embedding[[anchor] + [config.mask_token_id] * (rows - 1)]
        here, there = np.arange(length, length + rows), np.arange(length + rows)
        for layer in range(config.num_hidden_layers):
            block, (keys, values) = self.tree[f"layers_{layer}"], self.context[ids][layer]
            h = self._norm(x, block["input_layernorm"])
            q = self._turn(self._heads(h @ block["q_proj"], block["q_norm"]), here)
            k = self._turn(self._heads(h @ block["k_proj"], block["k_norm"]), here)
            k = np.concatenate([keys[:length], k])
            v = np.concatenate([values[:length], self._heads(h @ block["v_proj"])])
            seen = np.broadcast_to(there < T, (rows, len(there))).copy()
            if config.causal[layer]:
                seen &= there <= here[:, None]
            if config.windows[layer] is not None:
                seen &= there > here[:, None] - config.windows[layer]
            group = q.shape[1] // k.shape[1]
            scores = np.einsum("ihx,jhx->hij", q, np.repeat(k, group, axis=1)) * config.head_dim**-0.5
            weights = np.exp(np.where(seen, scores - scores.max(-1, keepdims=True), -np.inf))
            total = weights.sum(-1, keepdims=True)  # 0 of a row so far past the context that its window is empty
            weights /= np.where(total == 0, 1, total)
            out = np.einsum("hij,jhx->ihx", weights, np.repeat(v, group, axis=1))
            x = x + out.reshape(rows, -1) @ block["o_proj"]
            h = self._norm(x, block["post_attention_layernorm"])
            gate = h @ block["gate_proj"]
            x = x + (gate / (1 + np.exp(-gate)) * (h @ block["up_proj"])) @ block["down_proj"]
        logits = (self._norm(x, self.tree["norm"]) @ self.head.T)[rows - count :]
        tokens = []
        for row in logits:
            if config.markov_rank:
                row = row + self.tree["markov_w2"] @ self.tree["markov_w1"][(tokens or [anchor])[-1]]
            tokens.append(int(row.argmax()))
        return tokens


@functools.cache
def oracle(algorithm="dspark", name="windows", shape="both"):
    return Oracle(algorithm, name, shape)


# Memory


def slots_by_row(state, spec, *, virtual=False):
    """{row: (positions, slots)} of a layer's rows that the next round may read: up to L - 1, in the window."""
    requests, pages = jax.device_get((jaxspec.requests_of(state), state.pages))
    found, page = {}, state.cache.page_size
    for row in running_rows(state):
        end = int(requests.seq_len[row])
        position = np.arange(0 if spec.window is None else max(end - spec.window + 1, 0), end)
        owner = pages.page_table[row, position // page]
        owner = owner if virtual else pages.v2p[owner, int(spec.storage == "swa")]
        assert (owner > 0).all(), f"row {row} still needs positions whose pages are gone"
        found[row] = position, owner * page + position % page
    return found


def live_slots(state, spec, **how):
    return np.concatenate([np.zeros(0, int), *(slots for _, slots in slots_by_row(state, spec, **how).values())])


def draft_layers(spec):
    """Layers of the step's draft, where they were placed, and whether by virtual ids."""
    placement = spec.drafter.placement
    return placement.layers, placement.where == "private"


def bytes_of(layout, kind, slots, span):
    """Indices of the bytes of a row in the entries of some slots, [slots, bytes]."""
    entry = layout.entries[kind]
    start = slots // entry.per_page * entry.page_bytes + slots % entry.per_page * entry.size + span.start
    return start[:, None] + np.arange(span.size)


def context_rows(spec, state):
    """{row: [(positions, K and V side by side), ...], a pair a layer}: what the memory holds of the context."""
    layers, virtual = draft_layers(spec)
    found = {row: [] for row in running_rows(state)}
    for index, layer in enumerate(layers):
        for row, (position, slots) in slots_by_row(state, layer, virtual=virtual).items():
            if state.draft is not None and getattr(state.draft, "cache", None) is not None:
                rows = np.asarray(state.draft.cache.buffers[index])[slots]
            else:
                layout, raw = state.cache.layout, np.asarray(state.cache.buffer).reshape(-1).view(np.uint8)
                spans = [s for s in layout.entries[layer.storage].spans if s.owner == ("draft_layers", index)]
                parts = [raw[bytes_of(layout, layer.storage, slots, span)] for span in spans]
                rows = np.concatenate(parts, axis=-1).view(layout.dtype)
            found[row].append((position, rows.astype(np.float64)))
    return found


def poison(spec, state):
    """The state with NaN wherever the next round has no business: free pages, sinks, padding, noise of rejected drafts,
    stale rows and states; and with garbage for scratch. What layers with compressed keys keep is left alone."""
    state = state.replace(
        metadata=dataclasses.replace(state.metadata, buffer=jnp.full_like(state.metadata.buffer, -(2**30)))
    )
    (layers, virtual), cache = draft_layers(spec), state.cache

    def spoil(buffer, live):
        spoiled = np.full(buffer.shape, np.nan, buffer.dtype)
        spoiled[live] = np.asarray(buffer)[live]
        return jnp.asarray(spoiled)

    if state.draft.cache is not None:
        own = state.draft.cache
        pairs = zip(own.buffers, layers, strict=True)
        buffers = tuple(spoil(buffer, live_slots(state, layer, virtual=virtual)) for buffer, layer in pairs)
        state = state.replace(draft=state.draft.replace(cache=own.replace(buffers=buffers)))
    if not isinstance(cache, PoolCache):
        buffers = []
        for buffer, layer in zip(cache.buffers, cache.layers, strict=True):
            if layer.carries == "accumulated":
                buffer = tuple(spoil(part, [*state_places(state)]) for part in buffer)
            elif not isinstance(layer, KPoolSpec):
                buffer = spoil(buffer, live_slots(state, layer))
            buffers.append(buffer)
        return state.replace(cache=cache.replace(buffers=tuple(buffers)))
    layout = cache.layout
    lists, live = {"layers": layout.layers, "draft_layers": layout.draft_layers}, np.zeros(layout.nbytes, bool)
    for kind, entry in layout.entries.items():
        for span in entry.spans:
            layer = lists[span.owner[0]][span.owner[1]]
            if isinstance(layer, KPoolSpec):
                slots = np.arange(layout.num_pages(kind) * entry.per_page)
            elif kind == "state":
                slots = np.array([*state_places(state).values()], int)
            else:
                slots = live_slots(state, layer)
            live[bytes_of(layout, kind, slots, span)] = True
        section = np.arange(entry.section)
        live[
            (np.arange(layout.num_pages(kind)) * entry.page_bytes)[:, None] + entry.per_page * entry.size + section
        ] = True
    raw = np.where(live, np.asarray(cache.buffer).reshape(-1).view(np.uint8), np.uint8(0xFF))
    buffer = jnp.asarray(raw.view(cache.buffer.dtype).reshape(cache.buffer.shape))
    return state.replace(cache=cache.replace(buffer=buffer))


def upset(spec, state):
    """`poison`, and all pages of a pool elsewhere."""
    state = poison(spec, state)
    return move_pages(state, np.random.default_rng(0)) if isinstance(state.cache, PoolCache) else state


# Generation


def schedule(D):
    """Right drafts of each lane's rounds, int[BATCH, NEW]: together all numbers from none to all, and so all lengths of
    a commit, in changing order."""
    return (np.arange(BATCH)[:, None] + len(FIRST) * np.arange(NEW)) % D


def generate(
    spec, params, prompts, of, right, *, meddle=lambda spec, state: state, watch=lambda spec, state: None, seed=None
):
    """Prefill and rounds, with `meddle(spec, state)` before each of them and `watch(spec, state)` after.

    Args:
      of: {prompt: its text}.
      right: int[BATCH, rounds], how many drafts of each lane's rounds are those of the text, a wrong one behind them;
        the draft's own where it is negative.

    Returns:
      results of the requests, and [(prompt, length, proposals, accepted)] of all rounds and requests.
    """
    config = dataclasses.replace(spec.config, pool_seed=seed)
    state = jaxspec.init_state(spec.target, spec.drafter, config, prompts)
    state, status = spec.prefill(params, meddle(spec, state))
    assert status == 0
    watch(spec, state)
    text, seen = np.zeros((BATCH, T), np.int32), []
    for lane, ids in enumerate(prompts):
        text[lane, : len(of[ids])] = of[ids]
    for turn in range(NEW):
        if not running_rows(state).size:
            return read_requests(state, prompts), seen
        script = np.asarray(right[:, turn % right.shape[1]], np.int32)
        state, now = round_by_phases(spec, params, meddle(spec, state), text, script)
        rows, lengths, drafts, output = jax.device_get(now)
        assert output.status == 0 and ((drafts.tokens >= 0) & (drafts.tokens < VOCAB)).all()
        assert (drafts.count[rows == 0] == 0).all() and (rows[len(prompts) :] == 0).all()
        for lane in np.flatnonzero(rows):
            own = drafts.tokens[lane, : drafts.count[lane]].tolist()
            seen.append((prompts[lane], int(lengths[lane]), own, int(output.accepted[lane])))
        watch(spec, state)
    raise AssertionError("a request did not end")

"""What the tests of EAGLE-3 share: tiny drafts, and the network again in NumPy, float64 and without a cache."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from hybrid_cases import live_slots, state_places
from mtp_cases import NEW, T
from tiny_models import (
    FAST_COMPILE,
    HYBRID_MODULE,
    HYBRID_TARGET,
    MODULE,
    TARGET,
    VOCAB,
    hybrid_params,
    target_params,
)

import jaxspec
from jaxspec.cache import PoolCache
from jaxspec.models import dense_attend
from jaxspec.models.eagle import Eagle3, Eagle3Config, eagle3_tensors

# A vocabulary of its own, of 23 ids that grow faster than those of the draft.
IDS = np.sort(np.random.default_rng(0).permutation(VOCAB)[:23])
DRAFT = Eagle3Config(
    vocab_size=VOCAB,
    draft_vocab_size=len(IDS),
    hidden_size=32,
    target_hidden_size=32,
    intermediate_size=40,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    target_layer_ids=(1, 0),
    feature_norm="each",
    rms_norm_eps=1e-5,
    rope_theta=100.0,
    max_position_embeddings=256,
)
# The head of the target scores all its ids, and a chain goes on with normed rows.
WHOLE = dataclasses.replace(
    DRAFT, draft_vocab_size=None, feature_norm="joint", norm_output=True, bias=True, target_layer_ids=(0, 2, 2)
)
TARGETS = {"swa": (TARGET, MODULE, target_params), "hybrid": (HYBRID_TARGET, HYBRID_MODULE, hybrid_params)}


@functools.cache
def draft_params(config, seed=0):
    """A tree of random weights, without an embedding of its own."""
    rng, tree = np.random.default_rng(seed), {}
    for tensor in eagle3_tensors(config).values():
        if tensor.integer:
            value = IDS - np.arange(len(IDS))
        elif len(tensor.shape) == 1:
            value = 1 + 0.2 * rng.standard_normal(tensor.shape)
        else:
            value = 1.5 * rng.standard_normal(tensor.shape) / np.sqrt(tensor.shape[-1])
        if not (tensor.optional and tensor.path == ("embed_tokens",)):
            place = tree
            for key in tensor.path[:-1]:
                place = place.setdefault(key, {})
            place[tensor.path[-1]] = jnp.asarray(tensor.to_tree(value, "float32"))
    return tree


def params_for(name, config):
    """Weights of a step of a target and a draft."""
    target = TARGETS[name][2]()
    shared = {key: target["params"][key] for key in ("embed_tokens", "lm_head") if key in target["params"]}
    return jaxspec.Params(target, {"draft": draft_params(config), **shared})


def make_step(name="swa", config=DRAFT, *, D=4, **others):
    """A step of a tiny target that an EAGLE-3 draft drafts for, and its weights."""
    shape = {"batch_size": 5, "num_draft_tokens": D, "context_len": T, "max_new_tokens": NEW, "page_size": 4}
    how = {"prefill_chunk": 16, "check_ids": True, "kernel_backend": "reference"}
    settings = jaxspec.SpecConfig(**(shape | how | others))
    drafter = jaxspec.Eagle3Drafter(Eagle3(config))
    return jaxspec.make_spec_step(TARGETS[name][0], drafter, settings, options=FAST_COMPILE), params_for(name, config)


def norm(x, scale, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


class Oracle:
    """The draft over one text: keys and values of its rows, in lists. Weights are those of the file's layout."""

    def __init__(self, config, params):
        self.config = config
        self.tree = jax.tree.map(lambda x: np.asarray(x, np.int64 if x.dtype == jnp.int32 else np.float64), params)
        self.keys, self.values = [], []

    def fused(self, features):
        """[m * H] -> [Hd]."""
        config, tree = self.config, self.tree["draft"]
        if config.feature_norm == "joint":
            features = norm(features, tree["input_norm"], config.rms_norm_eps)
        if config.feature_norm == "each":
            parts = features.reshape(len(config.target_layer_ids), -1)
            features = np.concatenate(
                [norm(part, tree[f"fc_norm_{i}"], config.rms_norm_eps) for i, part in enumerate(parts)]
            )
        return features @ tree["fc"] + (tree["fc_bias"] if config.bias else 0)

    def row(self, token, hidden, position):
        """Adds a row; returns the scores of the draft's ids and the hidden row to go on with."""
        config, tree, eps = self.config, self.tree["draft"], self.config.rms_norm_eps
        layer, group = tree["layer"], config.num_attention_heads // config.num_key_value_heads
        embedding = tree.get("embed_tokens", self.tree["embed_tokens"])
        both = np.concatenate(
            [norm(embedding[token], layer["input_layernorm"], eps), norm(hidden, layer["hidden_norm"], eps)]
        )

        def turned(heads):  # channel i and channel i + half are a complex number
            half = config.head_dim // 2
            angle = position * config.rope_theta ** (-np.arange(half) / half)
            pairs = (heads[:, :half] + 1j * heads[:, half:]) * np.exp(1j * angle)
            return np.concatenate([pairs.real, pairs.imag], axis=-1)

        q = turned((both @ layer["q_proj"]).reshape(-1, config.head_dim))
        self.keys.append(turned((both @ layer["k_proj"]).reshape(-1, config.head_dim)))
        self.values.append((both @ layer["v_proj"]).reshape(-1, config.head_dim))
        keys, values = (np.repeat(np.stack(rows), group, axis=1) for rows in (self.keys, self.values))
        scores = np.einsum("hd,jhd->jh", q, keys) / np.sqrt(config.head_dim)
        weights = np.exp(scores - scores.max(0))
        seen = np.einsum("jh,jhd->hd", weights / weights.sum(0), values).ravel()
        x = hidden + seen @ layer["o_proj"]
        inner = norm(x, layer["post_attention_layernorm"], eps)
        gate = inner @ layer["gate_proj"]
        x = x + (gate / (1 + np.exp(-gate)) * (inner @ layer["up_proj"])) @ layer["down_proj"]
        normed = norm(x, tree["norm"], eps)
        head = tree.get("lm_head", self.tree.get("lm_head", self.tree["embed_tokens"]))
        return head @ normed, normed if config.norm_output else x

    def chain(self, features, text, count, given=()):
        """`count` proposals to follow a text whose last token is the anchor, and the scores of each [Vd]; `features`
        [L, m * H] are those of all other tokens. A chain goes on with the ids that are given, or its own."""
        for position, (token, row) in enumerate(zip(text[1:], features, strict=True)):
            scores, hidden = self.row(token, self.fused(np.asarray(row, np.float64)), position)
        drafts, all_scores = [], [scores]
        offsets = self.tree["draft"].get("d2t", np.zeros(len(scores), int))
        for step in range(count):
            best = int(np.argmax(all_scores[-1]))
            drafts.append(best + int(offsets[best]))
            if step < count - 1:
                token = given[step] if given else drafts[-1]
                scores, hidden = self.row(token, hidden, len(features) + step)
                all_scores.append(scores)
        return drafts, all_scores


class Reference:
    """Greedy texts and the target's features, from forwards over whole texts."""

    LANES = 16

    def __init__(self, name):
        _, self.module, params = TARGETS[name]
        self.params, look = params(), dense_attend(self.module.config.windows)

        @functools.partial(jax.jit, compiler_options=FAST_COMPILE)
        def follow(params, tokens):
            position = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), tokens.shape)
            every = tuple(range(self.module.config.num_hidden_layers))
            logits, features, _ = self.module.apply(params, tokens, position, look, taps=every)
            return jnp.argmax(logits, axis=-1), features.reshape(*features.shape[:2], len(every), -1)

        self._follow, self.texts = follow, {}

    def prepare(self, prompts):
        """Greedy texts of prompts, and their features, in `texts`: {prompt: (tokens, [T, layers, H])}."""
        texts = [[*ids] for ids in prompts if ids not in self.texts]
        names = [ids for ids in prompts if ids not in self.texts]
        while any(len(text) < min(len(ids) + NEW, T) for ids, text in zip(names, texts, strict=True)):
            for text, row in zip(texts, self._run(texts)[0], strict=False):
                if len(text) < T:
                    text.append(int(row[len(text) - 1]))
        if texts:
            for ids, text, features in zip(names, texts, self._run(texts)[1], strict=False):
                self.texts[ids] = text, features
        return {ids: self.texts[ids][0] for ids in prompts}

    def features(self, text):
        """[T, layers, H] of any text."""
        return self._run([text])[1][0]

    def _run(self, texts):
        tokens = np.zeros((self.LANES, T), np.int32)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
        return jax.device_get(self._follow(self.params, tokens))

    def chain(self, config, params, ids, length, count):
        """Proposals and scores of `Oracle.chain` where `length` tokens of the text after prompt `ids` are committed."""
        text, features = self.texts[ids]
        return Oracle(config, params).chain(tapped(config, features[:length]), text[: length + 1], count)


def tapped(config, features):
    """[L, m * H] of features [L, layers, H] of all layers."""
    return features[:, list(config.target_layer_ids)].reshape(len(features), -1)


@functools.cache
def reference(name):
    return Reference(name)


def poison(state):
    """The state with NaN wherever the next forward has no business: free pages, sinks, padding, and rows from the
    committed length on, of the target and of the draft."""
    cache = state.cache
    if isinstance(cache, PoolCache):
        layout, live = cache.layout, np.zeros(cache.layout.nbytes, bool)
        for kind, entry in layout.entries.items():
            for span in entry.spans:
                name, number = span.owner
                if kind == "state":
                    places = np.array([*state_places(state).values()], int)
                else:
                    places = live_slots(state, getattr(layout, name)[number])
                live[(places * entry.size + span.start)[:, None] + np.arange(span.size)] = True
        raw = np.where(live, np.asarray(cache.buffer).reshape(-1).view(np.uint8), np.uint8(0xFF))
        return state.replace(
            cache=cache.replace(buffer=jnp.asarray(raw.view(cache.buffer.dtype).reshape(cache.buffer.shape)))
        )

    def spoil(buffer, live):
        spoiled = np.full(buffer.shape, np.nan, buffer.dtype)
        spoiled[live] = np.asarray(buffer)[live]
        return jnp.asarray(spoiled)

    def spoil_all(cache):
        buffers = zip(cache.layers, cache.buffers, strict=True)
        return cache.replace(buffers=tuple(spoil(buffer, live_slots(state, layer)) for layer, buffer in buffers))

    return state.replace(cache=spoil_all(cache), draft=state.draft.replace(cache=spoil_all(state.draft.cache)))

"""Block drafts: the network against its formulas, row by row over the tensors of a file; config.json."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draft_files import DFLASH_FILE, DSPARK_FILE, SIZES, SLIDES, H, V, dflash, dspark, file_with, target, tensors_of

from jaxspec import models
from jaxspec.errors import InputError
from jaxspec.models.block_config import BlockDraftConfig
from jaxspec.models.block_draft import BlockDraft
from jaxspec.models.block_format import default_target_layers, read_block_config
from jaxspec.models.qwen3 import rotary_angles, rotate
from jaxspec.models.rows import rms_norm

# The network


class Oracle:
    """A draft in float64 from the tensors of its file, for one text whose features are given."""

    def __init__(self, config, tensors, target, windows, causal):
        self.config, self.windows, self.causal = config, windows, causal
        self.file = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
        self.embedding, self.head = (np.asarray(target["params"][n], np.float64) for n in ("embed_tokens", "lm_head"))

    def norm(self, x, name):
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.config.rms_norm_eps) * self.file[name]

    def heads(self, layer, which, x):
        out = x @ self.file[f"layers.{layer}.self_attn.{which}_proj.weight"].T
        return out.reshape(len(x), -1, self.config.head_dim)

    def rotated(self, x, positions):
        half = self.config.head_dim // 2
        out = np.zeros_like(x)
        for i in range(half):
            angle = positions[:, None] * self.config.rope_theta ** (-i / half)
            one, two = x[:, :, i], x[:, :, i + half]
            out[:, :, i] = one * np.cos(angle) - two * np.sin(angle)
            out[:, :, i + half] = two * np.cos(angle) + one * np.sin(angle)
        return out

    def key(self, layer, x, positions):
        return self.rotated(self.norm(self.heads(layer, "k", x), f"layers.{layer}.self_attn.k_norm.weight"), positions)

    def block(self, features, anchor, rows):
        """Hidden rows and logits of a block behind a text."""
        config, length = self.config, len(features)
        context = self.norm(features @ self.file["fc.weight"].T, "hidden_norm.weight")
        before, here = np.arange(length), length + np.arange(rows)
        x = self.embedding[[anchor] + [config.mask_token_id] * (rows - 1)]
        for layer in range(config.num_hidden_layers):
            prefix = f"layers.{layer}."
            normed = self.norm(x, f"{prefix}input_layernorm.weight")
            q = self.norm(self.heads(layer, "q", normed), f"{prefix}self_attn.q_norm.weight")
            q = self.rotated(q, here)
            k = np.concatenate([self.key(layer, context, before), self.key(layer, normed, here)])
            v = np.concatenate([self.heads(layer, "v", context), self.heads(layer, "v", normed)])
            out = np.zeros((rows, config.num_attention_heads, config.head_dim))
            for row in range(rows):
                last = row if self.causal[layer] else rows - 1
                first = 0 if self.windows[layer] is None else max(length + row - self.windows[layer] + 1, 0)
                seen = slice(first, length + last + 1)
                for head in range(config.num_attention_heads):
                    group = head * config.num_key_value_heads // config.num_attention_heads
                    weights = np.exp(k[seen, group] @ q[row, head] / np.sqrt(config.head_dim))
                    out[row, head] = weights / weights.sum() @ v[seen, group]
            x = x + out.reshape(rows, -1) @ self.file[f"{prefix}self_attn.o_proj.weight"].T
            normed = self.norm(x, f"{prefix}post_attention_layernorm.weight")
            gate = normed @ self.file[f"{prefix}mlp.gate_proj.weight"].T
            up = normed @ self.file[f"{prefix}mlp.up_proj.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ self.file[f"{prefix}mlp.down_proj.weight"].T
        hidden = self.norm(x, "norm.weight")
        return hidden, hidden @ self.head.T


def dense(draft, params, features, lengths):
    """The `attend` of blocks behind texts of some lengths, without a cache: context keys and values as they come."""
    config = draft.config
    keys, values = draft.context(params, features)
    positions = jnp.broadcast_to(jnp.arange(features.shape[1]), features.shape[:2])
    cos, sin = rotary_angles(positions, config.head_dim, config.rope_theta)
    norms = draft.key_norms(params)

    def attend(layer, q, k, v, cache):
        assert cache == layer  # every layer once, in order
        context = rotate(rms_norm(keys[:, :, layer], norms[layer], config.rms_norm_eps, draft.dtype), cos, sin)
        window, rows = draft.layers[layer].window, q.shape[1]
        out = np.zeros(q.shape, np.float32)
        for b, length in enumerate(lengths):
            all_k = np.concatenate([np.asarray(context[b, :length], np.float64), np.asarray(k[b], np.float64)])
            all_v = np.concatenate([np.asarray(values[b, :length, layer], np.float64), np.asarray(v[b], np.float64)])
            place, mine = np.arange(length + rows), length + np.arange(rows)[:, None]
            seen = place <= mine if draft.causal(layer) else place <= length + rows
            if window is not None:
                seen = seen & (place > mine - window)
            group = q.shape[2] // k.shape[2]
            scores = np.einsum("ihd,jhd->hij", np.asarray(q[b], np.float64), np.repeat(all_k, group, axis=1))
            weights = np.where(seen, np.exp(scores / np.sqrt(config.head_dim)), 0)
            weights /= weights.sum(axis=-1, keepdims=True)
            out[b] = np.einsum("hij,jhd->ihd", weights, np.repeat(all_v, group, axis=1))
        return jnp.asarray(out, draft.dtype), cache + 1

    return attend


NETWORKS = {
    "all of the block": (dspark(), (None, None), (False, False)),
    "sliding, a row for the anchor": (
        dspark(sample_from_anchor=False, block_size=4, **SLIDES),
        (None, 4),
        (False, True),
    ),
    "rows alone": (dflash(), (None, None), (False, False)),
    "causal": (dflash(dflash_config={**DFLASH_FILE["dflash_config"], "is_causal": True}), (None, None), (True, True)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_network_equals_the_loop_over_the_file(tmp_path, name):
    config, windows, causal = NETWORKS[name]
    folder = models.save_draft(tmp_path / "one", config, models.random_draft_params(config, 1), jnp.float32)
    loaded = models.load_draft(folder, target())
    draft, params, lengths = loaded.draft, loaded.params, (9, 2)
    rng = np.random.default_rng(0)
    features = rng.normal(0, 3, (2, max(lengths), 2 * H)).astype(np.float32)
    anchors, q = [11, 29], config.num_rows
    tokens = np.full((2, q), 3, np.int32)
    tokens[:, 0] = anchors
    positions = jnp.asarray(lengths)[:, None] + jnp.arange(q)
    attend = dense(draft, params, jnp.asarray(features), lengths)
    hidden, count = draft.rows(params, jnp.asarray(tokens), positions, attend, 0)
    logits = draft.logits(params, hidden)
    assert count == 2 and hidden.shape == (2, q, H) and (logits.shape, logits.dtype) == ((2, q, V), jnp.float32)

    oracle = Oracle(config, tensors_of(folder), target().params, windows, causal)
    for b, length in enumerate(lengths):
        expected, scores = oracle.block(features[b, :length].astype(np.float64), anchors[b], q)
        np.testing.assert_allclose(hidden[b], expected, atol=2e-5)
        np.testing.assert_allclose(logits[b], scores, atol=2e-4)
    if config.algorithm == "dspark":
        first, second = (oracle.file[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
        bias = draft.markov(params, jnp.asarray([11, 29, 0, V - 1]))
        assert bias.dtype == jnp.float32
        np.testing.assert_allclose(bias, [second @ first[i] for i in (11, 29, 0, V - 1)], atol=1e-5)


def test_context_rows_stand_side_by_side_by_layer_and_the_dtype_is_kept(tmp_path):
    config = dspark()
    draft = BlockDraft(config, "bfloat16")
    assert draft == BlockDraft(config, jnp.bfloat16) and hash(draft) == hash(BlockDraft(config, jnp.bfloat16))
    tree = models.random_draft_params(config, 1, jnp.bfloat16)
    params = {"draft": tree, **target().params["params"]}
    features = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 2 * H)), jnp.float32)
    k, v = draft.context(params, features)
    assert (k.shape, v.shape, k.dtype, v.dtype) == ((2, 3, 2, 2, 8), (2, 3, 2, 2, 8), jnp.bfloat16, jnp.bfloat16)
    np.testing.assert_array_equal(draft.key_norms(params), [tree[f"layers_{i}"]["k_norm"] for i in (0, 1)])
    rows = np.asarray(features.astype(jnp.bfloat16), np.float64) @ np.asarray(tree["fc"], np.float64)
    rows = rows / np.sqrt((rows * rows).mean(axis=-1, keepdims=True) + 1e-3) * np.asarray(tree["hidden_norm"])
    for layer in (0, 1):
        for found, name in ((k, "k_proj"), (v, "v_proj")):
            expected = rows @ np.asarray(tree[f"layers_{layer}"][name], np.float64)
            np.testing.assert_allclose(np.asarray(found[:, :, layer], np.float64).reshape(2, 3, -1), expected, atol=0.1)
    # A proposal is drawn from rounded logits, whatever the products were added up in.
    logits = jax.jit(draft.logits)(params, jnp.ones((1, 2, H), jnp.bfloat16))
    assert logits.dtype == jnp.float32
    np.testing.assert_array_equal(logits, np.asarray(logits).astype(jnp.bfloat16).astype(np.float32))


# config.json


def test_a_plain_file_of_each_kind_gives_every_field():
    shape = {key: value for key, value in SIZES.items()}
    common = {"target_layer_ids": (1, 0), "mask_token_id": 3, "windows": (None, None), "causal": (False, False)}
    assert dspark() == BlockDraftConfig(
        algorithm="dspark", block_size=5, markov_rank=6, sample_from_anchor=True, **common, **shape
    )
    assert dflash() == BlockDraftConfig(
        algorithm="dflash", block_size=5, sample_from_anchor=False, num_target_layers=2, **common, **shape
    )
    newer = {**DFLASH_FILE, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_theta": None}
    assert read_block_config(newer).rope_theta == 7.0
    assert dspark(architectures=["DSparkDraftModel"]) == dspark()


def test_block_size_counts_drafts_in_one_kind_and_rows_in_the_other():
    assert (dspark(block_size=8).num_drafts, dspark(block_size=8).num_rows) == (8, 8)
    late = dspark(block_size=8, sample_from_anchor=False)
    assert (late.num_drafts, late.num_rows) == (8, 9)
    assert (dflash(block_size=8).num_drafts, dflash(block_size=8).num_rows) == (7, 8)


NESTED = ("dspark_config", "dflash_config", "text_config")


@pytest.mark.parametrize(
    ("name", "prefixed", "values"),
    [
        ("block_size", "dspark_block_size", (3, 4, 5, 6, 7)),
        ("markov_rank", "dspark_markov_rank", (3, 4, 5, 6, 7)),
        ("mask_token_id", "dspark_noise_token_id", (0, 4, 5, 6, 7)),
        ("target_layer_ids", "dspark_target_layer_ids", ([0], [1], [2], [3], [4])),
        ("sample_from_anchor", "dspark_sample_from_anchor", (False, True, False, True, False)),
        ("num_target_layers", "dspark_num_target_layers", (5, 6, 7, 8, 9)),
    ],
)
def test_settings_of_drafting_are_looked_for_in_order(name, prefixed, values):
    wanted = [tuple(value) if isinstance(value, list) else value for value in values]
    places = [
        {prefixed: values[0]},
        *({place: {name: value}} for place, value in zip(NESTED, values[1:], strict=False)),
    ]
    settings = {**DSPARK_FILE, name: values[-1]}
    for place, value in reversed(list(zip([*places, {}], wanted, strict=True))):
        settings |= place  # from the last place to the first: each goes before those already there
        assert getattr(read_block_config(settings), name) == value, place
    assert getattr(read_block_config({**settings, prefixed: None}), name) == wanted[1]  # null is absent


def test_a_dflash_file_keeps_to_its_own_places():
    mine = {**DFLASH_FILE["dflash_config"], "block_size": 6}
    settings = {**DFLASH_FILE, "dflash_config": mine, "dspark_block_size": 9, "dspark_config": {"block_size": 10}}
    assert read_block_config(settings).block_size == 6
    assert dflash(text_config={"block_size": 7}).block_size == 7
    # Sizes of the backbone are the draft's own, whatever the target's configuration that was copied in says.
    assert dspark(text_config={"num_hidden_layers": 64, "head_dim": 256}) == dspark()


def test_what_absent_settings_mean():
    assert read_block_config(file_with("dflash", "block_size")).block_size == 16
    assert read_block_config(file_with("dspark", "rms_norm_eps", "rope_theta")).rms_norm_eps == 1e-6
    bare = file_with("dflash", dflash_config={"mask_token_id": 3}, num_target_layers=36, num_hidden_layers=5)
    assert read_block_config(bare).target_layer_ids == (1, 9, 17, 25, 33)
    bare = file_with("dflash", "num_target_layers", dflash_config={"mask_token_id": 3}, num_hidden_layers=1)
    assert read_block_config(bare, 36).target_layer_ids == (18,)
    for layers in range(6, 90):
        expected = tuple(int(x) for x in np.round(np.linspace(1, layers - 3, 3)))
        assert default_target_layers(3, layers) == expected


@pytest.mark.parametrize(
    ("changes", "windows", "causal"),
    [
        ({}, (None, None), (False, False)),
        ({"layer_types": None}, (None, None), (False, False)),
        (SLIDES, (None, 4), (False, True)),
        ({**SLIDES, "is_causal": True}, (None, 4), (True, True)),
        ({"is_causal": True}, (None, None), (True, True)),
        ({"is_causal": False}, (None, None), (False, False)),
        ({"use_sliding_window": True, "sliding_window": 9}, (None, None), (False, False)),
    ],
)
def test_layers_are_full_and_look_both_ways_unless_they_slide(changes, windows, causal):
    for read in (dspark, dflash):
        config = read(**changes)
        assert (config.windows, config.causal) == (windows, causal)
        draft = BlockDraft(config)
        assert [spec.window for spec in draft.layers] == list(windows)
        assert [draft.causal(layer) for layer in (0, 1)] == list(causal)
        assert {(spec.storage, spec.num_kv_heads, spec.head_dim) for spec in draft.layers} == {("full", 2, 8)}


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("dspark", {"architectures": ["Qwen3ForCausalLM"]}, "a block draft names one of DFlashDraftModel"),
        ("dspark", {"architectures": ["DFlashDraftModel"]}, "say which it is"),
        ("dspark", {"architectures": ["DFlashDraftModel", "DSparkDraftModel"]}, "names one of"),
        ("dspark", {"speculators_model_type": "dspark"}, "speculators"),
        ("dspark", {"markov_head_type": "gated"}, "'gated': only 'vanilla'"),
        ("dspark", {"dspark_markov_head_type": "rnn"}, "'rnn': only 'vanilla'"),
        ("dspark", {"markov_rank": 0}, "markov_rank is 0"),
        ("dspark", {"markov_rank": None}, "markov_rank is 0"),
        ("dspark", {"block_size": None}, "block_size is None"),
        ("dspark", {"target_layer_ids": None}, "target_layer_ids is missing"),
        ("dspark", {"target_layer_ids": [1, 1]}, "each once"),
        ("dspark", {"target_layer_ids": [-1]}, "counted from 0"),
        ("dspark", {"target_layer_ids": []}, "at least one"),
        ("dspark", {"target_layer_ids": 3}, "must be a list"),
        ("dspark", {"mask_token_id": V}, f"an id of 0 to {V - 1}"),
        ("dspark", {"mask_token_id": None}, "mask_token_id is missing"),
        ("dspark", {"mask_token_id": None, "mask_token": "<mask>"}, "'<mask>', give the id"),
        ("dspark", {"draft_vocab_size": V - 1}, "all of the target's vocabulary"),
        ("dspark", {"attention_bias": True}, "attention_bias is true"),
        ("dspark", {"quantization_config": {"quant_method": "fp8"}}, "'fp8'"),
        ("dspark", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "'yarn'"),
        ("dspark", {"rope_is_neox_style": False}, "rope_is_neox_style"),
        ("dspark", {"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ("dspark", {"sample_from_anchor": "no"}, "sample_from_anchor is 'no'"),
        ("dspark", {"dflash_config": [1]}, "an object with the draft's settings"),
        ("dflash", {"dflash_config": {**DFLASH_FILE["dflash_config"], "projector_type": "domino"}}, "'domino'"),
        ("dflash", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ("dflash", {"block_size": 1}, "at least 2"),
        ("dflash", {"num_target_layers": None, "dflash_config": {"mask_token_id": 3}}, "target_layer_ids is missing"),
        ("dflash", {**SLIDES, "is_causal": False}, "layer 1 slides and is not causal"),
        ("dflash", {**SLIDES, "sliding_window": None}, "sliding_window is None"),
        ("dflash", {"layer_types": ["full_attention"]}, "one entry for each of 2 layers"),
        ("dflash", {"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ("dflash", {"is_causal": "yes"}, "is_causal is 'yes'"),
        ("dflash", {"head_dim": None, "num_attention_heads": 5, "num_key_value_heads": 5}, "give head_dim"),
        ("dflash", {"num_key_value_heads": 3}, "a multiple of num_key_value_heads"),
        ("dflash", {"intermediate_size": None}, "intermediate_size is None"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_name(kind, changes, words):
    with pytest.raises(InputError, match=words) as caught:
        read_block_config(file_with(kind, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        dspark(),
        dspark(**SLIDES, sample_from_anchor=False, num_target_layers=2, intermediate_size=36),
        dflash(),
        dflash(**SLIDES, is_causal=True),
        dflash(is_causal=True),
    ],
)
def test_a_written_file_reads_back(config):
    settings = json.loads(json.dumps(config.to_dict()))
    assert read_block_config(settings) == config
    # Where other software looks.
    assert settings["dflash_config"]["target_layer_ids"] == list(config.target_layer_ids)
    assert (settings["block_size"], settings["dflash_config"]["mask_token_id"]) == (5, 3)
    if config.algorithm == "dspark":
        assert settings["architectures"] == ["DSparkDraftModel"]
        assert (settings["dspark_block_size"], settings["dspark_noise_token_id"]) == (5, 3)
        assert (settings["markov_rank"], settings["markov_head_type"]) == (6, "vanilla")
        assert settings["enable_confidence_head"] is False
    else:
        assert settings["architectures"] == ["DFlashDraftModel"]
        assert not any("markov" in key or key.startswith("dspark") for key in settings)


def test_shapes_that_a_file_has_no_room_for():
    with pytest.raises(InputError, match=r"windows \[3, 4\]"):
        dataclasses.replace(dspark(), windows=(3, 4), causal=()).to_dict()
    with pytest.raises(InputError, match=r"causal is \[True, False\]"):
        dataclasses.replace(dspark(), causal=(True, False)).to_dict()
    with pytest.raises(InputError, match="no Markov head"):
        dataclasses.replace(dflash(), markov_rank=4)

"""Block drafts: the network against its formulas, row by row over the tensors of a file; config.json; folders."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from tiny_models import CONFIG, HYBRID_CONFIG, HYBRID_MODULE, MODULE, hybrid_params, target_params

from jaxspec import models
from jaxspec.errors import InputError
from jaxspec.models.block_config import BlockDraftConfig
from jaxspec.models.block_draft import BlockDraft
from jaxspec.models.block_format import block_tensors, default_target_layers, read_block_config
from jaxspec.models.eagle import Eagle3Config
from jaxspec.models.qwen3 import rms_norm, rotary_angles, rotate

V, H = CONFIG.vocab_size, CONFIG.hidden_size
TARGET = models.Checkpoint(MODULE, target_params(), CONFIG, pathlib.Path("tiny"))
HYBRID = models.Checkpoint(HYBRID_MODULE, hybrid_params(), HYBRID_CONFIG, pathlib.Path("hybrid"))

SIZES = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-3,
    "rope_theta": 50.0,
    "max_position_embeddings": 256,
}
DSPARK_FILE = {
    **SIZES,
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "block_size": 5,
    "target_layer_ids": [1, 0],
    "mask_token_id": 3,
    "markov_rank": 6,
    "markov_head_type": "vanilla",
}
DFLASH_FILE = {
    **SIZES,
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 5,
    "num_target_layers": 2,
    "dflash_config": {"target_layer_ids": [1, 0], "mask_token_id": 3},
}
SLIDES = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4}
EAGLE = Eagle3Config(
    vocab_size=V,
    draft_vocab_size=20,
    hidden_size=H,
    target_hidden_size=H,
    intermediate_size=40,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    target_layer_ids=(1, 0),
)


def dspark(**changes):
    return read_block_config({**DSPARK_FILE, **changes})


def dflash(**changes):
    return read_block_config({**DFLASH_FILE, **changes})


def file_with(kind, *absent, **changes):
    settings = {"dspark": DSPARK_FILE, "dflash": DFLASH_FILE}[kind]
    return {key: value for key, value in {**settings, **changes}.items() if key not in absent}


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
    loaded = models.load_draft(folder, TARGET)
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

    oracle = Oracle(config, tensors_of(folder), TARGET.params, windows, causal)
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
    params = {"draft": tree, **TARGET.params["params"]}
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


# Folders


def tensors_of(folder):
    return safetensors.numpy.load_file(pathlib.Path(folder) / "model.safetensors")


def edit(folder, change):
    tensors = tensors_of(folder)
    change(tensors)
    (folder / "model.safetensors").write_bytes(safetensors.numpy.save(tensors, metadata={"format": "pt"}))


def settle(folder, **changes):
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, **changes}))


def assert_same(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


def stored(array):
    """What is left of an array by a file of bfloat16; ids stay as they are."""
    array = np.asarray(array)
    return array if array.dtype == np.int32 else array.astype(jnp.bfloat16).astype(array.dtype)


@pytest.fixture
def folder(tmp_path):
    return models.save_draft(tmp_path / "draft", dspark(), models.random_draft_params(dspark(), 0), jnp.float32)


@pytest.mark.parametrize("config", [dspark(), dflash(**SLIDES), EAGLE], ids=["dspark", "dflash", "eagle3"])
def test_a_saved_folder_loads_to_the_same_arrays(tmp_path, config):
    tree = models.random_draft_params(config, 0)
    folder = models.save_draft(tmp_path / "draft", config, tree)
    loaded = models.load_draft(folder, TARGET)
    assert (loaded.kind, loaded.draft.config, loaded.notes, loaded.folder) == (
        getattr(config, "algorithm", "eagle3"),
        config,
        (),
        folder,
    )
    assert_same(loaded.params["draft"], jax.tree.map(stored, tree))
    # Embedding and head are the target's own arrays, not copies.
    assert loaded.params["embed_tokens"] is TARGET.params["params"]["embed_tokens"]
    assert loaded.params["lm_head"] is TARGET.params["params"]["lm_head"]
    half = models.load_draft(folder, TARGET, jnp.bfloat16, kind=loaded.kind)
    assert jnp.dtype(half.draft.dtype) == jnp.bfloat16
    assert {x.dtype.name for x in jax.tree.leaves(half.params["draft"])} <= {"bfloat16", "int32"}
    again = models.save_draft(tmp_path / "again", config, half.params["draft"])
    assert_same(tensors_of(again), tensors_of(folder))


def test_tensors_have_the_public_names_and_shapes(folder):
    shapes = {name: value.shape for name, value in tensors_of(folder).items()}
    assert len(shapes) == 2 * 11 + 3 + 2
    assert shapes["fc.weight"] == (H, 2 * H)
    assert shapes["layers.1.self_attn.k_proj.weight"] == (16, H)
    assert shapes["layers.0.mlp.down_proj.weight"] == (H, 20)
    assert shapes["markov_head.markov_w1.weight"] == shapes["markov_head.markov_w2.weight"] == (V, 6)
    public = dflash(num_hidden_layers=5)
    assert len(block_tensors(public)) == 58


def test_other_spellings_of_names_load_to_the_same_draft(folder):
    expected = models.load_draft(folder, TARGET).params

    def respell(tensors):
        tensors["encoder.fc.weight"] = tensors.pop("fc.weight")
        tensors["encoder.output_norm_enc.weight"] = tensors.pop("hidden_norm.weight")
        for name in [name for name in tensors if not name.startswith("encoder.")]:
            tensors[f"model.{name}"] = tensors.pop(name)

    edit(folder, respell)
    assert_same(models.load_draft(folder, TARGET).params, expected)
    edit(folder, lambda tensors: tensors.update({"fc.weight": np.zeros((H, 2 * H), np.float32)}))
    with pytest.raises(InputError, match=r"under two names: encoder.fc.weight and fc.weight"):
        models.load_draft(folder, TARGET)


def test_shards_load_as_one_file_does(folder):
    expected, tensors = models.load_draft(folder, TARGET).params, tensors_of(folder)
    names = sorted(tensors)
    index = {}
    for shard, part in (("a.safetensors", names[::2]), ("b.safetensors", names[1::2])):
        (folder / shard).write_bytes(safetensors.numpy.save({name: tensors[name] for name in part}))
        index |= dict.fromkeys(part, shard)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert_same(models.load_draft(folder, TARGET).params, expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("layers.1.mlp.up_proj.weight"), r"lacks tensors: layers.1.mlp.up_proj.weight"),
        (lambda t: t.pop("markov_head.markov_w2.weight"), r"lacks tensors: markov_head.markov_w2.weight"),
        (lambda t: t.update(more=np.zeros(1, np.float32)), r"kind dspark has no place for: more"),
        (
            lambda t: t.update({"markov_head.gate_proj.weight": np.zeros((6, 6), np.float32)}),
            r"no place for: markov_head.gate_proj.weight",
        ),
        (
            lambda t: t.update({"fc.weight": np.zeros((H, 3 * H), np.float32)}),
            rf"fc.weight \({H}, {3 * H}\) instead of \({H}, {2 * H}\)",
        ),
        (lambda t: t.update({"norm.weight": np.zeros(H, np.int32)}), r"not floating point: norm.weight \(I32\)"),
    ],
)
def test_wrong_tensors_are_named(folder, change, words):
    edit(folder, change)
    with pytest.raises(InputError, match=words):
        models.load_draft(folder, TARGET)


def test_tensors_that_are_passed_over_are_named(folder):
    expected = models.load_draft(folder, TARGET)
    edit(
        folder,
        lambda tensors: tensors.update(
            {
                "confidence_head.proj.weight": np.zeros((1, H + 6), np.float32),
                "model.confidence_head.proj.bias": np.zeros(1, np.float32),
                "lm_head.weight": np.zeros((V, H), np.float32),
            }
        ),
    )
    settle(folder, enable_confidence_head=True, confidence_head_with_markov=True)
    loaded = models.load_draft(folder, TARGET)
    assert loaded.notes == ("not read: confidence_head.proj.bias, confidence_head.proj.weight, lm_head.weight",)
    assert_same(loaded.params, expected.params)


def test_layers_by_default_are_said(tmp_path):
    # The default of 2 draft layers and 5 target layers is (1, 2); here it would repeat a layer.
    config = dataclasses.replace(dflash(), num_hidden_layers=1, windows=(), causal=(), target_layer_ids=(1,))
    folder = models.save_draft(tmp_path / "draft", config, models.random_draft_params(config, 0))
    assert models.load_draft(folder, TARGET).notes == ()
    settle(folder, dflash_config={"mask_token_id": 3})
    loaded = models.load_draft(folder, TARGET)
    assert loaded.draft.config.target_layer_ids == (1,)
    assert loaded.notes == ("target_layer_ids is absent: those of the default are taken",)


def test_a_draft_of_another_target_is_refused(tmp_path, folder):
    assert models.load_draft(folder, HYBRID).kind == "dspark"  # same sizes: nothing tells them apart
    settle(folder, num_target_layers=3)
    with pytest.raises(InputError, match="num_target_layers is 3 and that of the target 2"):
        models.load_draft(folder, TARGET)
    assert models.load_draft(folder, HYBRID).draft.config.num_target_layers == 3
    for changes, words in (
        ({"vocab_size": V + 3}, f"vocab_size is {V + 3} and that of the target {V}"),
        ({"hidden_size": 2 * H}, f"hidden_size is {2 * H} and that of the target {H}"),
        ({"target_layer_ids": [0, 3]}, r"\[0, 3\] and the target has 3 layers"),
    ):
        config = dspark(**changes)
        other = models.save_draft(tmp_path / words[:6], config, models.random_draft_params(config, 0))
        with pytest.raises(InputError, match=words) as caught:
            models.load_draft(other, HYBRID)
        assert str(other) in str(caught.value)


def test_architectures_decides_the_kind(tmp_path, folder):
    eagle = models.save_draft(tmp_path / "eagle", EAGLE, models.random_draft_params(EAGLE, 0))
    assert models.load_draft(eagle, TARGET, kind="eagle3").kind == "eagle3"
    with pytest.raises(InputError, match="kind 'eagle3', and 'dspark' is asked for"):
        models.load_draft(eagle, TARGET, kind="dspark")
    with pytest.raises(InputError, match="kind 'dspark', and 'eagle3' is asked for"):
        models.load_draft(folder, TARGET, kind="eagle3")
    # Another name on the same weights does not make another draft of them.
    settle(folder, architectures=["LlamaForCausalLMEagle3"])
    with pytest.raises(InputError, match="num_hidden_layers is 2"):
        models.load_draft(folder, TARGET)
    settle(folder, architectures=["DFlashDraftModel"])
    with pytest.raises(InputError, match="say which it is"):
        models.load_draft(folder, TARGET)
    settle(eagle, architectures=["DSparkDraftModel"])
    with pytest.raises(InputError, match="draft_vocab_size is 20"):
        models.load_draft(eagle, TARGET)
    model = models.save(tmp_path / "model", CONFIG, target_params())
    with pytest.raises(InputError, match=r"\['Qwen3ForCausalLM'\]: a draft's folder names one of"):
        models.load_draft(model, TARGET)


def test_folders_that_are_none_and_types_that_are_not_computed(tmp_path, folder):
    with pytest.raises(InputError, match=r"no config.json"):
        models.load_draft(tmp_path / "nowhere", TARGET)
    with pytest.raises(InputError, match="float32 or bfloat16"):
        models.load_draft(folder, TARGET, jnp.float16)
    (folder / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"config.json cannot be read"):
        models.load_draft(folder, TARGET)


def test_save_refuses_what_it_cannot_write_and_writes_nothing(tmp_path):
    tree = models.random_draft_params(dspark(), 0)
    new = tmp_path / "new"
    for params, words in (
        ({**tree, "layers_0": {}}, "lack: layers_0/"),
        ({**tree, "lm_head": jnp.zeros((V, H))}, "unknown: lm_head"),
        ({**tree, "norm": jnp.zeros(H + 1)}, rf"norm.weight \({H + 1},\) instead of \({H},\)"),
    ):
        with pytest.raises(InputError, match=words):
            models.save_draft(new, dspark(), params)
    assert not new.exists()


def test_random_params_follow_the_seed():
    assert_same(models.random_draft_params(dspark(), 3), models.random_draft_params(dspark(), 3))
    one, other = (models.random_draft_params(dspark(), seed)["fc"] for seed in (3, 4))
    assert not np.array_equal(one, other)


def test_the_drafts_that_ship_are_small_and_belong_to_their_targets():
    drafts = models.embedded_path("target").parent / "drafts"
    folders = sorted(path.parent for path in drafts.glob("*/config.json"))
    if not folders:
        pytest.skip("no draft ships")
    assert sum(path.stat().st_size for path in drafts.rglob("*") if path.is_file()) <= 8_000_000
    for folder in folders:
        kind, _, name = folder.name.partition("_")
        assert models.embedded_draft(kind, name) == folder
        loaded = models.load_draft(folder, models.load(name, jnp.bfloat16), jnp.bfloat16, kind=kind)
        assert loaded.notes == ()

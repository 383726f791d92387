"""Configuration, folders and dense attention of the Qwen3 family."""

import dataclasses
import json
import math
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tokenizers

from jaxspec import models
from jaxspec.errors import InputError

HF_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
SLIDING = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]


def parse(*absent, **changes):
    return models.Qwen3Config.from_dict({k: v for k, v in {**HF_CONFIG, **changes}.items() if k not in absent})


def small_config(**changes):
    return dataclasses.replace(parse(), **{"num_hidden_layers": 2, "windows": (4, None), **changes})


# The configuration file


def test_plain_file_gives_every_field():
    assert parse() == models.Qwen3Config(
        vocab_size=61,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        windows=(None, None, None, None),
        eos_token_ids=(2,),
    )
    assert hash(parse()) == hash(parse())


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        pytest.param({}, (None,) * 4, id="nothing said"),
        pytest.param(
            {"layer_types": SLIDING, "use_sliding_window": True, "sliding_window": 16}, (16, 16, 16, None), id="types"
        ),
        pytest.param(
            {"layer_types": SLIDING, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0},
            (16, 16, 16, None),
            id="types win over max_window_layers",
        ),
        pytest.param(
            {"layer_types": ["full_attention"] * 4, "use_sliding_window": False, "sliding_window": None},
            (None,) * 4,
            id="all full",
        ),
        pytest.param(
            {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}, (16,) * 4, id="from 0"
        ),
        pytest.param(
            {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3}, (None,) * 3 + (16,), id="from 3"
        ),
        pytest.param(
            {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 4}, (None,) * 4, id="from beyond"
        ),
        pytest.param(
            {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 0}, (None,) * 4, id="switched off"
        ),
        pytest.param(
            {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 28}, (None,) * 4, id="released"
        ),
    ],
)
def test_windows(changes, windows):
    assert parse(**changes).windows == windows


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({"rope_scaling": None}, 5e5),
        ({"rope_scaling": {"type": "default"}}, 5e5),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6),
        ({"rope_parameters": {"rope_type": "default"}}, 5e5),
        ({"rope_parameters": None}, 5e5),
    ],
)
def test_rope_theta(changes, theta):
    assert parse(**changes).rope_theta == theta


def test_absent_keys():
    config = parse("head_dim", "num_key_value_heads", "rope_theta", "tie_word_embeddings", "eos_token_id")
    assert config.head_dim == 24 // 4
    assert config.num_key_value_heads == 4
    assert config.rope_theta == 10_000.0
    assert not config.tie_word_embeddings
    assert config.eos_token_ids == ()
    assert parse(eos_token_id=[5, 2]).eos_token_ids == (5, 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "llama"}, "'llama'"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM"),
        ({"model_type": None, "architectures": None}, "neither model_type nor architectures"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "'fp8'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}}, "'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear'"),
        ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {}, "sliding_attention": {}}}, "by layer type"),
        ({"layer_types": SLIDING, "use_sliding_window": False, "sliding_window": 16}, "use_sliding_window"),
        ({"layer_types": SLIDING, "sliding_window": 16}, "use_sliding_window"),
        ({"layer_types": SLIDING, "use_sliding_window": True, "sliding_window": None}, "sliding_window is None"),
        ({"layer_types": SLIDING, "use_sliding_window": True, "sliding_window": 0}, "sliding_window is 0"),
        ({"use_sliding_window": True, "max_window_layers": 2}, "2 layers slide"),
        ({"layer_types": SLIDING[:3], "use_sliding_window": True, "sliding_window": 16}, "3 entries"),
        ({"layer_types": [*SLIDING[:3], "linear_attention"]}, "linear_attention"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"hidden_size": "24"}, "hidden_size is '24'"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"head_dim": None, "hidden_size": 25}, "give head_dim"),
        ({"eos_token_id": 61}, "61"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
    ],
)
def test_unusable_file_is_refused_by_name(changes, words):
    with pytest.raises(InputError, match=words) as caught:
        parse(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("eos", [(), (2,), (5, 2)])
@pytest.mark.parametrize("windows", [(None,) * 4, (16, 16, 16, None), (None, None, 3, 3)])
@pytest.mark.parametrize("tied", [True, False])
def test_written_file_reads_back(eos, windows, tied):
    config = dataclasses.replace(parse(), windows=windows, eos_token_ids=eos, tie_word_embeddings=tied)
    written = json.loads(json.dumps(config.to_dict()))
    assert models.Qwen3Config.from_dict(written) == config
    assert written["use_sliding_window"] is (windows != (None,) * 4)


def test_two_window_widths_cannot_be_written():
    with pytest.raises(InputError, match=r"\[3, 16\]"):
        dataclasses.replace(parse(), windows=(16, 3, None, None)).to_dict()


# Folders


@pytest.fixture
def folder(tmp_path):
    config = small_config()
    return models.save(tmp_path / "small", config, models.random_params(config, 0), jnp.float32)


def edit_tensors(folder, edit):
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    edit(tensors)
    (folder / "model.safetensors").write_bytes(safetensors.numpy.save(tensors, metadata={"format": "pt"}))


def assert_same_params(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stored", [jnp.float32, jnp.bfloat16])
def test_saved_folder_loads_to_the_same_arrays(tmp_path, stored, tied):
    config = small_config(tie_word_embeddings=tied)
    params = models.random_params(config, 0)
    models.save(tmp_path / "new" / "small", config, params, stored)
    loaded = models.load(tmp_path / "new" / "small")
    assert loaded.config == config
    assert loaded.name == "small"
    expected = jax.tree.map(lambda array: np.asarray(array).astype(jnp.dtype(stored)).astype(np.float32), params)
    assert_same_params(loaded.params, expected)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded.params)} == {jnp.dtype("float32")}
    assert sorted(os.listdir(tmp_path / "new" / "small")) == ["config.json", "model.safetensors"]


def test_module_takes_the_loaded_params(folder):
    """What init would make and what the loader returns are the same tree."""
    loaded = models.load(folder, jnp.bfloat16)
    tokens = jnp.zeros((1, 3), jnp.int32)
    attend = models.dense_attend(loaded.config.windows)
    made = jax.eval_shape(lambda: loaded.module.init(jax.random.key(0), tokens, tokens, attend))
    assert jax.tree.map(jnp.shape, loaded.params) == jax.tree.map(lambda leaf: leaf.shape, made)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded.params)} == {jnp.dtype("bfloat16")}
    logits, hidden = jax.jit(lambda params: loaded.module.apply(params, tokens, tokens, attend)[:2])(loaded.params)
    assert (logits.shape, logits.dtype) == ((1, 3, 61), jnp.float32)
    assert (hidden.shape, hidden.dtype) == ((1, 3, 24), jnp.bfloat16)


def test_shards_load_as_one_file_does(folder):
    whole = models.load(folder)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    names, weight_map = sorted(tensors), {}
    for shard, part in enumerate((names[:5], names[5:])):
        file = f"model-0000{shard + 1}-of-00002.safetensors"
        safetensors.numpy.save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert_same_params(models.load(folder).params, whole.params)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InputError, match="model-00002-of-00002"):
        models.load(folder)


def test_stop_ids_of_the_generation_config_win(folder):
    assert models.load(folder).config.eos_token_ids == (2,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert models.load(folder).config.eos_token_ids == (7, 9)
    (folder / "generation_config.json").write_text('{"do_sample": true}')
    assert models.load(folder).config.eos_token_ids == (2,)


def test_rotary_frequencies_and_a_tied_head_are_tolerated(folder):
    before = models.load(folder).params

    def add(tensors):
        tensors["model.rotary_emb.inv_freq"] = np.ones(4, np.float32)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    edit_tensors(folder, add)
    assert_same_params(models.load(folder).params, before)


def drop(*names):
    return lambda tensors: [tensors.pop(name) for name in names]


def put(name, value):
    return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (drop("model.layers.1.self_attn.q_norm.weight"), "lacks tensors: model.layers.1.self_attn.q_norm.weight"),
        (put("model.layers.0.self_attn.q_proj.bias", np.zeros(32, np.float32)), "no place for: .*q_proj.bias"),
        (put("model.layers.2.mlp.up_proj.weight", np.zeros((40, 24), np.float32)), "no place for: .*layers.2"),
        (put("model.norm.weight", np.zeros(25, np.float32)), r"model.norm.weight \(25,\) instead of \(24,\)"),
        (put("model.norm.weight", np.zeros(24, np.int8)), r"not floating point: model.norm.weight \(I8\)"),
        (lambda tensors: [tensors.pop(name) for name in list(tensors)[:20]], "and 15 more"),
    ],
)
def test_wrong_tensors_are_named(folder, edit, words):
    edit_tensors(folder, edit)
    with pytest.raises(InputError, match=words) as caught:
        models.load(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).count(".weight") <= 5


def test_untied_model_needs_its_head(folder):
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": False}))
    with pytest.raises(InputError, match=r"lacks tensors: lm_head\.weight"):
        models.load(folder)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", None, "has no config.json"),
        ("config.json", "{", "config.json cannot be read"),
        ("config.json", "[1]", "config.json holds a list"),
        ("config.json", '{"model_type": "bert"}', "'bert'"),
        ("generation_config.json", '{"eos_token_id": 61}', "61"),
        ("model.safetensors", None, "neither model.safetensors nor"),
        ("model.safetensors", "short", "model.safetensors cannot be read"),
    ],
)
def test_broken_folder_is_named(folder, name, content, words):
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(InputError, match=words) as caught:
        models.load(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_model_and_dtype(folder):
    with pytest.raises(InputError, match="'no-such-model' is neither an embedded model"):
        models.load("no-such-model")
    with pytest.raises(InputError, match="'no-such-model' is no embedded model"):
        models.embedded_path("no-such-model")
    with pytest.raises(InputError, match="dtype is int32"):
        models.load(folder, jnp.int32)


def word_tokenizer(words):
    vocabulary = {f"w{i}": i for i in range(words)}
    return tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))


def test_tokenizer_is_read_when_asked_for(folder):
    with pytest.raises(InputError, match=r"has no tokenizer\.json"):
        _ = models.load(folder).tokenizer
    config = small_config()
    models.save(folder, config, models.random_params(config, 0), tokenizer=word_tokenizer(config.vocab_size))
    loaded = models.load(folder)
    assert loaded.tokenizer.encode("w7").ids == [7]
    assert loaded.tokenizer is loaded.tokenizer
    models.save(folder, config, loaded.params, tokenizer=word_tokenizer(config.vocab_size + 1))
    with pytest.raises(InputError, match=r"62 ids .* vocab_size is 61"):
        _ = models.load(folder).tokenizer
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer\.json cannot be read"):
        _ = models.load(folder).tokenizer


def test_save_refuses_what_it_cannot_write_and_writes_nothing(tmp_path):
    config = small_config()
    params = models.random_params(config, 0)
    with pytest.raises(InputError, match=r"params lack: layers_0/down_proj, .* and 6 more"):
        models.save(tmp_path / "new", config, {"params": {**params["params"], "layers_0": {}}})
    with pytest.raises(InputError, match="unknown: lm_head"):
        models.save(tmp_path / "new", config, {"params": {**params["params"], "lm_head": jnp.zeros((61, 24))}})
    with pytest.raises(InputError, match=r"model.norm.weight \(23,\) instead of \(24,\)"):
        models.save(tmp_path / "new", config, {"params": {**params["params"], "norm": jnp.zeros(23)}})
    assert not (tmp_path / "new").exists()


def test_interrupted_save_keeps_the_old_folder(folder, monkeypatch):
    before = models.load(folder)
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        models.save(folder, before.config, models.random_params(before.config, 9))
    assert_same_params(models.load(folder).params, before.params)
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]


def test_random_params_follow_the_seed():
    config = small_config()
    assert_same_params(models.random_params(config, 3), models.random_params(config, 3))
    one, other = models.random_params(config, 3)["params"], models.random_params(config, 4)["params"]
    assert not np.array_equal(one["embed_tokens"], other["embed_tokens"])


# Attention over whole texts, and what the module promises about rows


def oracle_attention(q, k, v, window):
    """One query, one head, one key at a time."""
    out = np.zeros(q.shape)
    group = q.shape[2] // k.shape[2]
    for b in range(q.shape[0]):
        for i in range(q.shape[1]):
            for h in range(q.shape[2]):
                keys = [j for j in range(i + 1) if window is None or i - window < j]
                scores = [float(q[b, i, h] @ k[b, j, h // group]) / math.sqrt(q.shape[3]) for j in keys]
                weights = [math.exp(score - max(scores)) for score in scores]
                for weight, j in zip(weights, keys, strict=True):
                    out[b, i, h] += weight / sum(weights) * v[b, j, h // group]
    return out


@pytest.mark.parametrize("window", [1, 2, 5, 6, 7, 8, None])
@pytest.mark.parametrize("rows", [1, 7])
def test_dense_attention_equals_the_loop(window, rows):
    rng = np.random.default_rng(rows)
    q = rng.standard_normal((2, rows, 4, 8))
    k, v = rng.standard_normal((2, 2, rows, 2, 8))
    attend = jax.jit(lambda *rows: models.dense_attend((None, window))(1, *rows, None)[0])
    out = attend(*(jnp.asarray(array, jnp.float32) for array in (q, k, v)))
    np.testing.assert_allclose(out, oracle_attention(q, k, v, window), atol=2e-6)


@pytest.fixture(scope="module")
def run():
    """A small random model, compiled: tokens, positions and perhaps logit_rows in, logits and hidden rows out."""
    config = small_config()
    module, params, attend = models.Qwen3(config), models.random_params(config, 0), models.dense_attend(config.windows)
    return jax.jit(lambda *rows, **wanted: module.apply(params, *rows, attend, **wanted)[:2])


def random_rows(batch, rows):
    tokens = np.random.default_rng(rows).integers(0, 61, (batch, rows))
    return jnp.asarray(tokens, jnp.int32), jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32), (batch, rows))


def test_logit_rows_pick_rows(run):
    tokens, positions = random_rows(2, 9)
    every, hidden = run(tokens, positions)
    some, again = run(tokens, positions, logit_rows=jnp.asarray([[8, 0], [2, 2]], jnp.int32))
    np.testing.assert_allclose(some[0], every[0][jnp.asarray([8, 0])], atol=1e-5)
    np.testing.assert_allclose(some[1], every[1][jnp.asarray([2, 2])], atol=1e-5)
    np.testing.assert_allclose(hidden, again, atol=1e-5)


def test_rows_after_a_text_do_not_reach_it(run):
    tokens, positions = random_rows(2, 9)
    logits, _ = run(tokens, positions)
    others, _ = run(tokens.at[:, 5:].set(60), positions)
    np.testing.assert_array_equal(logits[:, :5], others[:, :5])
    assert not np.array_equal(logits[:, 5:], others[:, 5:])


def test_only_distances_between_positions_matter(run):
    """Rotary embedding: a text moved by 1000 positions has the same logits."""
    tokens, positions = random_rows(2, 9)
    near, _ = run(tokens, positions)
    np.testing.assert_allclose(near, run(tokens, positions + 1000)[0], atol=2e-3)
    assert np.abs(near - run(tokens, 3 * positions)[0]).max() > 0.05


def test_one_request_of_a_batch_equals_the_request_alone(run):
    tokens, positions = random_rows(2, 9)
    batch, _ = run(tokens, positions)
    alone, _ = run(tokens[1:], positions[1:])
    np.testing.assert_allclose(batch[1:], alone, atol=1e-5)


def test_attend_sees_each_layer_once_and_threads_the_cache():
    config = small_config()
    module, params, seen = models.Qwen3(config), models.random_params(config, 0), []

    def spy(layer, q, k, v, cache):
        seen.append((layer, q.shape, k.shape, v.shape))
        return q, cache + 1

    rows = jnp.zeros((2, 3), jnp.int32)
    cache = jax.jit(lambda: module.apply(params, rows, rows, spy, 0)[2])()
    assert seen == [(layer, (2, 3, 4, 8), (2, 3, 2, 8), (2, 3, 2, 8)) for layer in (0, 1)]
    assert cache == 2

"""The hybrid family: its configuration, its folders, linear layers against a loop, states kept by the caller."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tiny_models

import jaxspec
from jaxspec import models
from jaxspec.cache import LayerSpec, StatePart, StateSpec
from jaxspec.errors import InputError

LINEAR, SLIDING, FULL = "linear_attention", "sliding_attention", "full_attention"
HF_CONFIG = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "layer_types": [LINEAR, SLIDING, FULL],
    "sliding_window": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 3,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "num_experts": 0,
    "eos_token_id": 2,
}


def parse(*absent, **changes):
    return models.HybridConfig.from_dict({k: v for k, v in HF_CONFIG.items() if k not in absent} | changes)


def compiled(function):
    return jax.jit(function, compiler_options=tiny_models.FAST_COMPILE)


# The configuration file


def test_plain_file_gives_every_field():
    assert parse() == models.HybridConfig(
        vocab_size=61,
        hidden_size=24,
        intermediate_size=40,
        layer_types=(LINEAR, SLIDING, FULL),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=4,
        linear_value_head_dim=5,
        linear_conv_kernel_dim=3,
        sliding_window=4,
        partial_rotary_factor=0.5,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        eos_token_ids=(2,),
    )
    assert hash(parse()) == hash(parse())
    assert parse().windows == (None, 4, None)
    assert parse().conv_channels == 2 * 2 * 4 + 6 * 5


def test_absent_keys():
    config = parse(
        "layer_types", "linear_conv_kernel_dim", "partial_rotary_factor", "rope_theta", "eos_token_id",
        num_hidden_layers=9,
    )  # fmt: skip
    assert config.layer_types == ((LINEAR,) * 3 + (FULL,)) * 2 + (LINEAR,)
    assert (config.linear_conv_kernel_dim, config.partial_rotary_factor, config.rope_theta) == (4, 0.25, 10_000.0)
    assert config.sliding_window is None  # the file names one, but no layer slides
    assert config.eos_token_ids == ()
    assert parse("layer_types", full_attention_interval=2).layer_types == (LINEAR, FULL, LINEAR)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}},
        {"partial_rotary_factor": 0.5, "rope_theta": 5e5, "rope_scaling": None},
        {"partial_rotary_factor": 0.5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ],
    ids=["new", "old", "both"],
)
def test_spellings_of_the_rotary_embedding(rope):
    assert parse("partial_rotary_factor", "rope_theta", **rope) == parse()


@pytest.mark.parametrize(
    ("dense", "mixtures"),
    [
        ({"num_experts": 0}, None),
        ({"num_experts": 8, "mlp_only_layers": [0, 1, 2]}, None),
        ({"num_experts": 8, "decoder_sparse_step": 4}, None),
        ({"num_experts": 8}, "layers 0, 1, 2 is a mixture of 8 experts"),
        ({"num_experts": 8, "mlp_only_layers": [0, 2]}, "layers 1 is a mixture of 8"),
        ({"num_experts": 8, "decoder_sparse_step": 2}, "layers 1 is a mixture of 8"),
        ({}, "mixture of 512"),  # what the public class assumes
    ],
)
def test_layers_with_a_mixture_of_experts_are_refused(dense, mixtures):
    if mixtures is None:
        assert parse("num_experts", **dense) == parse()
    else:
        with pytest.raises(InputError, match=mixtures):
            parse("num_experts", **dense)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "qwen3"}, "'qwen3'"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "Qwen3ForCausalLM"),
        ({"attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"quant_method": "fp8"}}, "'fp8'"),
        ({"layer_types": [LINEAR, FULL]}, "one a layer"),
        ({"layer_types": [LINEAR, FULL, "mamba"]}, "'mamba'"),
        ({"full_attention_interval": 0, "layer_types": None}, "full_attention_interval is 0"),
        ({"sliding_window": None}, "sliding_window is None"),
        ({"linear_num_value_heads": 3}, "multiple of linear_num_key_heads"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
        ({"linear_key_head_dim": None}, "linear_key_head_dim is None"),
        ({"linear_conv_kernel_dim": 1}, "one tap"),
        ({"partial_rotary_factor": 0.4}, "turns 3 channels"),
        ({"partial_rotary_factor": 2}, "turns 16 channels"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"num_experts": "many"}, "num_experts is 'many'"),
        ({"eos_token_id": 61}, "61"),
    ],
)
def test_unusable_file_is_refused_by_name(changes, words):
    with pytest.raises(InputError, match=words) as caught:
        parse(**changes)
    assert "\n" not in str(caught.value)


def test_a_window_that_no_layer_has_is_refused():
    with pytest.raises(InputError, match="sliding_window is 4 but no layer slides"):
        dataclasses.replace(parse(), layer_types=(LINEAR, FULL))


@pytest.mark.parametrize("kinds", [(LINEAR, SLIDING, FULL), (FULL, LINEAR)])
@pytest.mark.parametrize("eos", [(), (2,), (5, 2)])
def test_written_file_reads_back(kinds, eos):
    window = 4 if SLIDING in kinds else None
    config = dataclasses.replace(parse(), layer_types=kinds, sliding_window=window, eos_token_ids=eos)
    assert models.HybridConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


# Folders

LINEAR_TENSORS = {
    "linear_attn.in_proj_qkvz.weight": (2 * (4 + 4 + 3 * 5 + 3 * 5), 24),
    "linear_attn.in_proj_ba.weight": (12, 24),
    "linear_attn.conv1d.weight": (46, 1, 3),
    "linear_attn.A_log": (6,),
    "linear_attn.dt_bias": (6,),
    "linear_attn.norm.weight": (5,),
    "linear_attn.out_proj.weight": (24, 30),
}
ATTENTION_TENSORS = {
    "self_attn.q_proj.weight": (2 * 32, 24),
    "self_attn.k_proj.weight": (16, 24),
    "self_attn.v_proj.weight": (16, 24),
    "self_attn.q_norm.weight": (8,),
    "self_attn.k_norm.weight": (8,),
    "self_attn.o_proj.weight": (24, 32),
}
MLP_TENSORS = {
    "input_layernorm.weight": (24,),
    "post_attention_layernorm.weight": (24,),
    "mlp.gate_proj.weight": (40, 24),
    "mlp.up_proj.weight": (40, 24),
    "mlp.down_proj.weight": (24, 40),
}


@pytest.fixture
def folder(tmp_path):
    return models.save(tmp_path / "mixed", parse(), models.random_params(parse(), 0), jnp.float32)


def tensors_of(folder):
    return safetensors.numpy.load_file(folder / "model.safetensors")


def put_tensor(folder, name, value):
    tensors = {**tensors_of(folder), name: value}
    (folder / "model.safetensors").write_bytes(safetensors.numpy.save(tensors, metadata={"format": "pt"}))


def test_tensors_have_the_public_names_and_shapes(folder):
    expected = {"model.embed_tokens.weight": (61, 24), "model.norm.weight": (24,)}
    for layer, own in enumerate((LINEAR_TENSORS, ATTENTION_TENSORS, ATTENTION_TENSORS)):
        expected |= {f"model.layers.{layer}.{name}": shape for name, shape in {**own, **MLP_TENSORS}.items()}
    assert {name: value.shape for name, value in tensors_of(folder).items()} == expected


@pytest.mark.parametrize("stored", [jnp.float32, jnp.bfloat16])
def test_saved_folder_loads_to_the_same_arrays_with_decays_in_float32(tmp_path, stored):
    config = parse(tie_word_embeddings=False)
    params = models.random_params(config, 0)
    loaded = jaxspec.load_model(models.save(tmp_path / "new", config, params, stored))
    assert loaded.config == config
    assert isinstance(loaded.module, models.Hybrid)

    def rounded(path, array):
        exact = path[-1].key in ("A_log", "dt_bias")
        return np.asarray(array).astype(np.float32 if exact else jnp.dtype(stored)).astype(np.float32)

    assert jax.tree.structure(loaded.params) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, jax.tree_util.tree_map_with_path(rounded, params))
    narrow = jaxspec.load_model(tmp_path / "new", jnp.bfloat16).params["params"]["layers_0"]
    assert {name for name, leaf in narrow.items() if leaf.dtype != jnp.bfloat16} == {"A_log", "dt_bias"}


def test_wrong_tensors_are_named_and_a_draft_head_is_passed_over(folder):
    before = models.load(folder).params
    put_tensor(folder, "mtp.fc.weight", np.zeros((24, 48), np.float32))
    jax.tree.map(np.testing.assert_array_equal, models.load(folder).params, before)
    put_tensor(folder, "model.layers.0.linear_attn.conv1d.weight", np.zeros((46, 3), np.float32))
    with pytest.raises(InputError, match=r"conv1d.weight \(46, 3\) instead of \(46, 1, 3\)"):
        models.load(folder)
    put_tensor(folder, "model.layers.1.mlp.gate.weight", np.zeros((8, 24), np.float32))
    with pytest.raises(InputError, match=r"no place for: model.layers.1.mlp.gate.weight"):
        models.load(folder)


def test_folder_with_experts_is_refused_by_its_name(folder):
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"num_experts": 4, "mlp_only_layers": []}))
    with pytest.raises(InputError, match="mixture of 4 experts") as caught:
        jaxspec.load_model(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_model_says_what_its_layers_keep(folder, dtype):
    model = jaxspec.load_model(folder, jnp.dtype(dtype)).model
    assert model.layers == (
        StateSpec((StatePart("conv", (2, 46), dtype), StatePart("temporal", (6, 5, 4), "float32"))),
        LayerSpec(2, 8, 4, storage="swa"),
        LayerSpec(2, 8),
    )
    assert (model.vocab_size, model.context_len, model.dtype, model.swa_window) == (61, 64, dtype, 4)


def test_a_hybrid_model_cannot_draft(folder):
    with pytest.raises(InputError, match=r"'mixed' cannot draft: its layers \[0\] accumulate a state"):
        _ = jaxspec.load_model(folder).draft_model


# A linear layer, token by token


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def unit(x):
    return x / np.sqrt((x * x).sum() + 1e-6)


def oracle_delta_net(config, tensors, x):
    """Output rows of the linear layer for input rows x [T, H], from the tensors as the file has them, in float64."""
    w = {name.removesuffix(".weight"): np.asarray(value, np.float64) for name, value in tensors.items()}
    HK, HV = config.linear_num_key_heads, config.linear_num_value_heads
    K, V, taps = config.linear_key_head_dim, config.linear_value_head_dim, config.linear_conv_kernel_dim
    share = HV // HK
    group = 2 * K + 2 * share * V
    states, past, out = np.zeros((HV, K, V)), [np.zeros(config.conv_channels)] * taps, []
    for row in x:
        qkvz, ba = w["in_proj_qkvz"] @ row, w["in_proj_ba"] @ row
        q, k, v, z = [], [], [], []
        for g in range(HK):
            part = qkvz[g * group : (g + 1) * group]
            q.append(part[:K])
            k.append(part[K : 2 * K])
            v.append(part[2 * K : 2 * K + share * V])
            z.append(part[2 * K + share * V :])
        past = [*past[1:], np.concatenate([*q, *k, *v])]
        mixed = sum(w["conv1d"][:, 0, tap] * past[tap] for tap in range(taps))
        mixed = mixed * sigmoid(mixed)
        heads = []
        for h in range(HV):
            g, inner = divmod(h, share)
            b, a = ba[g * 2 * share + inner], ba[g * 2 * share + share + inner]
            query = unit(mixed[g * K : (g + 1) * K]) / np.sqrt(K)
            key = unit(mixed[HK * K + g * K : HK * K + (g + 1) * K])
            value = mixed[2 * HK * K + h * V : 2 * HK * K + (h + 1) * V]
            states[h] *= np.exp(-np.exp(w["A_log"][h]) * np.log1p(np.exp(a + w["dt_bias"][h])))
            states[h] += np.outer(key, sigmoid(b) * (value - states[h].T @ key))
            read = states[h].T @ query
            read = read / np.sqrt((read * read).mean() + config.rms_norm_eps) * w["norm"]
            gate = np.concatenate(z)[h * V : (h + 1) * V]
            heads.append(read * gate * sigmoid(gate))
        out.append(w["out_proj"] @ np.concatenate(heads))
    return np.array(out)


def test_a_linear_layer_equals_the_loop_over_its_file(tmp_path):
    """A model of one linear layer whose MLP gives nothing, so that its hidden rows are the normed layer alone."""
    config = dataclasses.replace(parse(), layer_types=(LINEAR,), sliding_window=None)
    params = models.random_params(config, 3)
    params["params"]["layers_0"]["down_proj"] *= 0
    tensors = tensors_of(models.save(tmp_path / "one", config, params, jnp.float32))
    tokens = np.random.default_rng(0).integers(0, 61, 40)
    own = {n.partition("linear_attn.")[2]: t for n, t in tensors.items() if "linear_attn." in n}

    def norm(x, weight):
        x = x.astype(np.float64)
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + config.rms_norm_eps) * (1 + weight.astype(np.float64))

    stream = tensors["model.embed_tokens.weight"][tokens].astype(np.float64)
    normed = norm(stream, tensors["model.layers.0.input_layernorm.weight"])
    stream = stream + oracle_delta_net(config, own, normed)
    expected = norm(stream, tensors["model.norm.weight"])
    loaded, rows = models.load(tmp_path / "one"), jnp.asarray(tokens, jnp.int32)[None]
    attend = models.dense_attend(config.windows)
    hidden = compiled(lambda params: loaded.module.apply(params, rows, rows, attend)[1])(loaded.params)
    np.testing.assert_allclose(hidden[0], expected, atol=2e-5)


# What the module promises about rows, and about who keeps what


def stateful_recur(layer, update, cache):
    """Keeps each layer's parts in a dictionary."""
    out, parts = update(cache.get(layer), None, "last")
    return out, {**cache, layer: parts}


@pytest.fixture(scope="module")
def two_linear_layers():
    config = dataclasses.replace(parse(), layer_types=(LINEAR, LINEAR), sliding_window=None)
    return models.Hybrid(config), models.random_params(config, 5)


def test_a_text_in_two_pieces_equals_the_text_at_once(two_linear_layers):
    (module, params), first = two_linear_layers, 2
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 61, (2, 6)), jnp.int32)

    @compiled
    def run(tokens, cache):
        logits, _, cache = module.apply(params, tokens, tokens, None, cache, recur=stateful_recur)
        return logits, cache

    whole, after = run(tokens, {})
    left, cache = run(tokens[:, :first], {})
    right, pieces = run(tokens[:, first:], cache)
    np.testing.assert_allclose(jnp.concatenate([left, right], axis=1), whole, atol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), pieces, after)
    assert [part.shape for part in after[0]] == [(2, 2, 46), (2, 6, 5, 4)]


def test_rows_that_are_not_real_leave_the_state_and_every_row_can_be_kept(two_linear_layers):
    module, params = two_linear_layers
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, 61, (1, 5)), jnp.int32)

    def keeping(keep, real=None):
        def recur(layer, update, cache):
            zeros = jnp.zeros((1, 2, 46)), jnp.zeros((1, 6, 5, 4))
            out, parts = update(zeros, real, keep)
            return out, {**cache, layer: parts}

        return compiled(lambda tokens: module.apply(params, tokens, tokens, None, {}, recur=recur)[2])

    every = keeping("rows")(tokens)
    assert [part.shape for part in every[1]] == [(1, 5, 2, 46), (1, 5, 6, 5, 4)]
    short = keeping("last")(tokens[:, :3])
    masked = keeping("last", jnp.arange(5)[None] < 3)(tokens)
    for layer in (0, 1):
        for a, b, c in zip(short[layer], masked[layer], every[layer], strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4)
            np.testing.assert_allclose(a, c[:, 2], atol=1e-4)


def test_attend_and_recur_see_their_layers_in_order_and_thread_the_cache():
    config, seen = parse(layer_types=[LINEAR, SLIDING, LINEAR, FULL], num_hidden_layers=4), []
    module, params = models.Hybrid(config), models.random_params(config, 0)

    def attend(layer, q, k, v, cache):
        seen.append((layer, q.shape, k.shape, v.shape))
        return q, cache + 1

    def recur(layer, update, cache):
        out, _ = update(None, None, "last")
        seen.append((layer, out.shape))
        return out, cache + 10

    rows = jnp.zeros((2, 3), jnp.int32)
    cache = compiled(lambda: module.apply(params, rows, rows, attend, 0, recur=recur)[2])()
    heads = (2, 3, 4, 8), (2, 3, 2, 8), (2, 3, 2, 8)
    assert seen == [(0, (2, 3, 6, 5)), (1, *heads), (2, (2, 3, 6, 5)), (3, *heads)]
    assert cache == 22


def test_a_cache_without_a_place_for_states_is_refused():
    config = parse()
    rows = jnp.zeros((1, 2), jnp.int32)
    with pytest.raises(ValueError, match="layer 0 carries a state and a cache is given"):
        jax.eval_shape(lambda: models.Hybrid(config).init(jax.random.key(0), rows, rows, None, {}))


@pytest.fixture(scope="module")
def run():
    config = parse()
    module, params, attend = models.Hybrid(config), models.random_params(config, 0), models.dense_attend(config.windows)
    return compiled(lambda *rows, **wanted: module.apply(params, *rows, attend, **wanted)[:2])


def test_rows_after_a_text_and_other_requests_do_not_reach_it(run):
    tokens = jnp.asarray(np.random.default_rng(9).integers(0, 61, (2, 9)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(9, dtype=jnp.int32), (2, 9))
    logits, _ = run(tokens, positions)
    others, _ = run(tokens.at[:, 5:].set(60).at[0].set(1), positions)
    np.testing.assert_allclose(logits[1, :5], others[1, :5], atol=1e-4)
    assert np.abs(logits[1, 5:] - others[1, 5:]).max() > 0.05
    some, _ = run(tokens, positions, logit_rows=jnp.asarray([[8, 0], [2, 2]], jnp.int32))
    np.testing.assert_allclose(some[0], logits[0][jnp.asarray([8, 0])], atol=1e-4)


def test_bfloat16_module_takes_the_loaded_params(folder):
    loaded = models.load(folder, jnp.bfloat16)
    tokens = jnp.zeros((1, 3), jnp.int32)
    attend = models.dense_attend(loaded.config.windows)
    made = jax.eval_shape(lambda: loaded.module.init(jax.random.key(0), tokens, tokens, attend))
    assert jax.tree.map(jnp.shape, loaded.params) == jax.tree.map(lambda leaf: leaf.shape, made)
    logits, hidden = compiled(lambda params: loaded.module.apply(params, tokens, tokens, attend)[:2])(loaded.params)
    assert (logits.shape, logits.dtype) == ((1, 3, 61), jnp.float32)
    assert (hidden.shape, hidden.dtype) == ((1, 3, 24), jnp.bfloat16)
    assert np.isfinite(logits).all()

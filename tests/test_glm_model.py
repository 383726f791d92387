"""The GLM family: configuration, folders, layers against a loop over the file, MTP blocks, what layers keep."""

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
from jaxspec.attention import pooling
from jaxspec.cache import KPoolSpec, StatePart, StateSpec
from jaxspec.errors import InputError

LINEAR, SPARSE = "linear_attention", "deepseek_sparse_attention"
HF_CONFIG = {
    "architectures": ["Glm5NextForCausalLM"],
    "model_type": "glm5_next_text",
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "layer_types": [LINEAR, SPARSE],
    "mlp_layer_types": ["dense", "dense"],
    "first_k_dense_replace": 2,
    "linear_attn_config": {
        "num_heads": 3,
        "head_dim": 8,
        "short_conv_kernel_size": 3,
        "gate_lower_bound": -4.0,
        "kda_layers": [0],
        "full_attn_layers": [1],
    },
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 12,
    "kv_lora_rank": 20,
    "qk_head_dim": 6,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 0,
    "v_head_dim": 10,
    "mla_use_nope": True,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,
    "index_kpool": 4,
    "index_kpool_always_select_tail": True,
    "index_kpool_compress": True,
    "index_share_for_mtp_iteration": True,
    "indexer_types": ["full", "full"],
    "num_nextn_predict_layers": 2,
    "mhc": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def parse(*absent, **changes):
    return models.GlmConfig.from_dict({k: v for k, v in HF_CONFIG.items() if k not in absent} | changes)


def linear(**changes):
    return {"linear_attn_config": HF_CONFIG["linear_attn_config"] | changes}


def compiled(function):
    return jax.jit(function, compiler_options=tiny_models.FAST_COMPILE)


# The configuration file


def test_plain_file_gives_every_field():
    assert parse() == models.GlmConfig(
        vocab_size=61,
        hidden_size=24,
        intermediate_size=40,
        layer_types=(LINEAR, SPARSE),
        num_attention_heads=2,
        q_lora_rank=12,
        kv_lora_rank=20,
        qk_nope_head_dim=6,
        v_head_dim=10,
        linear_num_heads=3,
        linear_head_dim=8,
        linear_conv_kernel_dim=3,
        gate_lower_bound=-4.0,
        index_n_heads=2,
        index_head_dim=16,
        index_topk=8,
        index_kpool=4,
        num_nextn_predict_layers=2,
        index_share_for_mtp_iteration=True,
        rms_norm_eps=1e-4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        eos_token_ids=(2,),
    )
    assert hash(parse()) == hash(parse())
    assert (parse().sparse_layers, parse().conv_channels, parse().softmax_scale) == ((1,), 72, 6**-0.5)


def test_absent_keys():
    config = parse(
        "layer_types", "mlp_layer_types", "indexer_types", "qk_rope_head_dim", "mla_use_nope", "rms_norm_eps",
        "num_nextn_predict_layers", "index_share_for_mtp_iteration", "eos_token_id",
        num_hidden_layers=9, first_k_dense_replace=9,
    )  # fmt: skip
    assert config.layer_types == ((LINEAR,) * 3 + (SPARSE,)) * 2 + (LINEAR,)
    assert (config.rms_norm_eps, config.num_nextn_predict_layers, config.eos_token_ids) == (1e-5, 0, ())
    assert not config.index_share_for_mtp_iteration
    assert parse(**linear(gate_lower_bound=None)).gate_lower_bound is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "glm5_next"}, "'glm5_next'"),
        ({"architectures": ["Glm5NextForConditionalGeneration"]}, "Glm5NextForConditionalGeneration"),
        ({"attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"quant_method": "fp8"}}, "'fp8'"),
        ({"layer_types": [LINEAR]}, "one a layer"),
        ({"layer_types": [LINEAR, "full_attention"]}, "'full_attention'"),
        ({"mlp_layer_types": ["dense", "sparse"]}, "layers 1 is a mixture of experts"),
        ({"mlp_layer_types": None, "first_k_dense_replace": 0}, "layers 0, 1 is a mixture"),
        ({"mlp_layer_types": None, "first_k_dense_replace": None}, "first_k_dense_replace is None"),
        ({"mhc": True}, "one residual stream"),
        ({"swiglu_limit": 10.0}, "swiglu_limit is 10.0"),
        ({"qk_rope_head_dim": 64}, "qk_rope_head_dim is 64"),
        ({"mla_use_nope": False}, "mla_use_nope is False"),
        ({"index_kpool_compress": False}, "index_kpool_compress is False"),
        ({"index_kpool_always_select_tail": None}, "always_select_tail is None"),
        ({"indexer_types": ["full", "shared"]}, "indexer_types"),
        ({"index_topk_freq": 2}, "index_topk_freq is 2"),
        ({"index_topk": 10}, "multiple of index_kpool"),
        ({"index_kpool": 3, "index_topk": 9}, "index_kpool is 3"),
        ({"index_kpool": 1}, "index_kpool is 1"),
        ({"index_head_dim": 24}, "index_head_dim is 24"),
        ({"index_n_heads": None}, "index_n_heads is None"),
        ({"linear_attn_config": None}, "linear_attn_config is None"),
        (linear(num_heads=0), "linear_attn_config: num_heads is 0"),
        (linear(short_conv_kernel_size=1), "one tap"),
        (linear(gate_lower_bound=5.0), "gate_lower_bound is 5.0"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers is -1"),
        ({"eos_token_id": 61}, "61"),
    ],
)
def test_unusable_file_is_refused_by_name(changes, words):
    with pytest.raises(InputError, match=words) as caught:
        parse(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("absent", ["mhc", "index_kpool_compress", "index_kpool_always_select_tail", "q_lora_rank"])
def test_keys_that_a_file_must_have(absent):
    with pytest.raises(InputError, match=absent):
        parse(absent)
    with pytest.raises(InputError, match="gate_lower_bound"):
        parse(linear_attn_config={"num_heads": 3, "head_dim": 8})


@pytest.mark.parametrize("bound", [None, -4.0])
@pytest.mark.parametrize("eos", [(), (2,), (5, 2)])
def test_written_file_reads_back(bound, eos):
    config = dataclasses.replace(parse(), gate_lower_bound=bound, eos_token_ids=eos)
    assert models.GlmConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


# Folders

LINEAR_TENSORS = {
    **{f"self_attn.{name}_proj.weight": (24, 24) for name in "qkv"},
    **{f"self_attn.{name}_conv1d.weight": (24, 1, 3) for name in "qkv"},
    "self_attn.b_proj.weight": (3, 24),
    "self_attn.f_a_proj.weight": (8, 24),
    "self_attn.f_b_proj.weight": (24, 8),
    "self_attn.g_a_proj.weight": (8, 24),
    "self_attn.g_b_proj.weight": (24, 8),
    "self_attn.A_log": (1, 1, 3, 1),
    "self_attn.dt_bias": (24,),
    "self_attn.o_norm.weight": (8,),
    "self_attn.o_proj.weight": (24, 24),
}
SPARSE_TENSORS = {
    "self_attn.q_a_proj.weight": (12, 24),
    "self_attn.q_a_layernorm.weight": (12,),
    "self_attn.q_b_proj.weight": (2 * 6, 12),
    "self_attn.kv_a_proj_with_mqa.weight": (20, 24),
    "self_attn.kv_a_layernorm.weight": (20,),
    "self_attn.kv_b_proj.weight": (2 * (6 + 10), 20),
    "self_attn.o_proj.weight": (24, 2 * 10),
    "self_attn.indexer.wq_b.weight": (2 * 16, 12),
    "self_attn.indexer.wk.weight": (16, 24),
    "self_attn.indexer.weights_proj.weight": (2, 24),
    "self_attn.indexer.k_norm.weight": (16,),
    "self_attn.indexer.k_norm.bias": (16,),
    "self_attn.indexer.index_kpool_compress_ape": (4, 16),
    "self_attn.indexer.index_kpool_compress_gate": (16, 24),
}
MLP_TENSORS = {
    "input_layernorm.weight": (24,),
    "post_attention_layernorm.weight": (24,),
    "mlp.gate_proj.weight": (40, 24),
    "mlp.up_proj.weight": (40, 24),
    "mlp.down_proj.weight": (24, 40),
}
BLOCK_TENSORS = {
    "eh_proj.weight": (24, 48),
    "enorm.weight": (24,),
    "hnorm.weight": (24,),
    "shared_head.norm.weight": (24,),
}
FLOAT32 = ("A_log", "dt_bias", "q_conv1d", "k_conv1d", "v_conv1d", "weights_proj", "k_norm", "k_norm_bias")
FLOAT32 += ("index_kpool_compress_ape",)


@pytest.fixture
def folder(tmp_path):
    return models.save(tmp_path / "pooled", parse(), models.random_params(parse(), 0), jnp.float32)


def tensors_of(folder):
    return safetensors.numpy.load_file(folder / "model.safetensors")


def put_tensor(folder, name, value):
    tensors = {**tensors_of(folder), name: value}
    (folder / "model.safetensors").write_bytes(safetensors.numpy.save(tensors, metadata={"format": "pt"}))


def test_tensors_have_the_public_names_and_shapes_blocks_behind_the_layers(folder):
    expected = {"model.embed_tokens.weight": (61, 24), "model.norm.weight": (24,)}
    for layer, own in enumerate((LINEAR_TENSORS, SPARSE_TENSORS, *[SPARSE_TENSORS | BLOCK_TENSORS] * 2)):
        expected |= {f"model.layers.{layer}.{name}": shape for name, shape in {**own, **MLP_TENSORS}.items()}
    assert {name: value.shape for name, value in tensors_of(folder).items()} == expected


@pytest.mark.parametrize("stored", [jnp.float32, jnp.bfloat16])
def test_saved_folder_loads_to_the_same_arrays_with_small_ones_in_float32(tmp_path, stored):
    config = parse(tie_word_embeddings=False)
    params = models.random_params(config, 0)
    loaded = jaxspec.load_model(models.save(tmp_path / "new", config, params, stored))
    assert loaded.config == config
    assert isinstance(loaded.module, models.Glm)

    def rounded(path, array):
        exact = path[-1].key in FLOAT32
        return np.asarray(array).astype(np.float32 if exact else jnp.dtype(stored)).astype(np.float32)

    everything = {**loaded.params, "mtp": loaded.blocks}
    assert jax.tree.structure(everything) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, everything, jax.tree_util.tree_map_with_path(rounded, params))
    narrow = jaxspec.load_model(tmp_path / "new", jnp.bfloat16)
    for tree in (narrow.params, narrow.blocks):
        wide = {path[-1].key for path, x in jax.tree_util.tree_leaves_with_path(tree) if x.dtype != jnp.bfloat16}
        assert wide <= set(FLOAT32)
    assert narrow.mtp_params["embed_tokens"] is narrow.params["params"]["embed_tokens"]
    assert narrow.mtp_params["lm_head"] is narrow.params["params"]["lm_head"]


def test_wrong_tensors_are_named_and_copies_of_shared_ones_are_passed_over(folder):
    before = models.load(folder).params
    put_tensor(folder, "model.layers.2.shared_head.head.weight", np.zeros((61, 24), np.float32))
    put_tensor(folder, "model.layers.3.embed_tokens.weight", np.zeros((61, 24), np.float32))
    jax.tree.map(np.testing.assert_array_equal, models.load(folder).params, before)
    put_tensor(folder, "model.layers.0.self_attn.A_log", np.zeros((3,), np.float32))
    with pytest.raises(InputError, match=r"A_log \(3,\) instead of \(1, 1, 3, 1\)"):
        models.load(folder)
    put_tensor(folder, "model.layers.1.mlp.gate.weight", np.zeros((8, 24), np.float32))
    with pytest.raises(InputError, match=r"no place for: model.layers.1.mlp.gate.weight"):
        models.load(folder)


def test_params_of_a_block_that_are_missing_are_named(tmp_path):
    params = models.random_params(parse(), 0)
    del params["mtp"]["blocks_1"]["eh_proj"]
    with pytest.raises(InputError, match="params lack: mtp/blocks_1/eh_proj"):
        models.save(tmp_path / "new", parse(), params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_model_and_blocks_say_what_their_layers_keep(folder, dtype):
    loaded = jaxspec.load_model(folder, jnp.dtype(dtype))
    latent = KPoolSpec(num_kv_heads=1, head_dim=20, value_dim=0, pool=4, topk=8, index_dim=16)
    model, blocks = loaded.model, loaded.mtp
    assert model.layers == (
        StateSpec((StatePart("conv", (2, 72), dtype), StatePart("temporal", (3, 8, 8), "float32"))),
        latent,
    )
    assert (model.vocab_size, model.context_len, model.dtype, model.swa_window) == (61, 64, dtype, None)
    assert model.has_state and model.sparse == latent
    assert (blocks.layers, blocks.hidden_size, blocks.vocab_size, blocks.dtype) == ((latent,) * 2, 24, 61, dtype)
    assert hash(blocks) == hash(jaxspec.load_model(folder, jnp.dtype(dtype)).mtp)


def test_a_model_without_blocks_and_a_draft_of_its_own_are_refused(tmp_path):
    config = parse(num_nextn_predict_layers=0)
    params = models.random_params(config, 0)
    assert set(params) == {"params"}
    loaded = jaxspec.load_model(models.save(tmp_path / "bare", config, params))
    with pytest.raises(InputError, match="'bare' has no MTP block"):
        _ = loaded.mtp
    with pytest.raises(InputError, match="'bare' cannot draft as a model of its own"):
        _ = loaded.draft_model


# The layers, row by row, from the tensors as the file has them, in float64


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def norm(x, weight, eps=1e-4):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def oracle_delta_attention(config, w, x):
    heads, K, taps = config.linear_num_heads, config.linear_head_dim, config.linear_conv_kernel_dim
    states = np.zeros((heads, K, K))
    past = {name: [np.zeros(heads * K)] * taps for name in "qkv"}
    rows = []
    for row in x:
        mixed = {}
        for name in "qkv":
            past[name] = [*past[name][1:], w[f"{name}_proj"] @ row]
            total = sum(w[f"{name}_conv1d"][:, 0, tap] * past[name][tap] for tap in range(taps))
            mixed[name] = (total * sigmoid(total)).reshape(heads, K)
        forget = (w["f_b_proj"] @ (w["f_a_proj"] @ row) + w["dt_bias"]).reshape(heads, K)
        beta, gate = sigmoid(w["b_proj"] @ row), sigmoid(w["g_b_proj"] @ (w["g_a_proj"] @ row)).reshape(heads, K)
        out = []
        for h in range(heads):
            rate = np.exp(w["A_log"][0, 0, h, 0])
            if config.gate_lower_bound is None:
                decay = -rate * np.log1p(np.exp(forget[h]))
            else:
                decay = config.gate_lower_bound * sigmoid(rate * forget[h])
            q, k = (mixed[n][h] / np.sqrt((mixed[n][h] ** 2).sum() + 1e-6) for n in "qk")
            states[h] *= np.exp(decay)[:, None]
            states[h] += np.outer(k, beta[h] * (mixed["v"][h] - states[h].T @ k))
            out.append(norm(states[h].T @ q / np.sqrt(K), w["o_norm"]) * gate[h])
        rows.append(w["o_proj"] @ np.concatenate(out))
    return np.array(rows)


def oracle_latent_attention(config, w, x):
    """Unabsorbed: every head has keys and values of its own, made of the latent rows; all earlier rows are seen."""
    heads, inner, outer = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim
    latents = norm(x @ w["q_a_proj"].T, w["q_a_layernorm"])
    q = (latents @ w["q_b_proj"].T).reshape(-1, heads, inner)
    rows = norm(x @ w["kv_a_proj_with_mqa"].T, w["kv_a_layernorm"])
    both = (rows @ w["kv_b_proj"].T).reshape(-1, heads, inner + outer)
    out = []
    for t in range(len(x)):
        heads_out = []
        for h in range(heads):
            scores = both[: t + 1, h, :inner] @ q[t, h] / np.sqrt(inner)
            weights = np.exp(scores - scores.max())
            heads_out.append(weights / weights.sum() @ both[: t + 1, h, inner:])
        out.append(w["o_proj"] @ np.concatenate(heads_out))
    return np.array(out)


def oracle_layer(config, tensors, prefix, kind, x):
    own = {n.removeprefix(prefix): np.asarray(t, np.float64) for n, t in tensors.items() if n.startswith(prefix)}
    own = {n.removesuffix(".weight").removeprefix("self_attn.").removeprefix("mlp."): t for n, t in own.items()}
    attend = oracle_latent_attention if kind == SPARSE else oracle_delta_attention
    x = x + attend(config, own, norm(x, own["input_layernorm"]))
    inner = norm(x, own["post_attention_layernorm"])
    gate = inner @ own["gate_proj"].T
    return x + (gate * sigmoid(gate) * (inner @ own["up_proj"].T)) @ own["down_proj"].T


@pytest.mark.parametrize("bound", [-4.0, None])
def test_the_model_and_its_blocks_equal_the_loop_over_the_file(tmp_path, bound):
    config = dataclasses.replace(parse(), gate_lower_bound=bound)
    folder = models.save(tmp_path / "one", config, models.random_params(config, 3), jnp.float32)
    tensors, loaded = tensors_of(folder), models.load(folder)
    tokens = np.random.default_rng(0).integers(0, 61, 30)
    embedding = tensors["model.embed_tokens.weight"].astype(np.float64)
    stream = embedding[tokens[:-1]]
    for layer, kind in enumerate(config.layer_types):
        stream = oracle_layer(config, tensors, f"model.layers.{layer}.", kind, stream)
    expected = norm(stream, tensors["model.norm.weight"])
    rows, following = (jnp.asarray(x, jnp.int32)[None] for x in (tokens[:-1], tokens[1:]))

    @compiled
    def run(params, block_params):
        attend = models.dense_attend_pooled(config, sparse=False)
        logits, hidden, _ = loaded.module.apply(params, rows, rows, attend)
        first = loaded.mtp.apply(block_params, 0, following, hidden, rows, attend)
        second = loaded.mtp.apply(block_params, 1, following, first[1], rows, attend, None, jnp.asarray([[4, 0]]))
        return (logits, hidden), first[:2], second[:2]

    found = run(loaded.params, loaded.mtp_params)
    wanted = [expected]
    for layer in (2, 3):
        prefix = f"model.layers.{layer}."
        own = {name: tensors[f"{prefix}{name}.weight"] for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")}
        embedded = norm(embedding[tokens[1:]], own["enorm"])
        stream = np.concatenate([embedded, norm(wanted[-1], own["hnorm"])], axis=-1) @ own["eh_proj"].T
        stream = oracle_layer(config, tensors, prefix, SPARSE, stream)
        wanted.append(norm(stream, own["shared_head.norm"]))
    for (logits, hidden), rows_wanted in zip(found, wanted, strict=True):
        np.testing.assert_allclose(hidden[0], rows_wanted, atol=5e-5)
        picked = rows_wanted if logits.shape[1] == 29 else rows_wanted[[4, 0]]
        np.testing.assert_allclose(logits[0], picked @ embedding.T, atol=2e-4)


# The indexer, and what rows see


def test_the_indexer_equals_its_formulas_and_attention_sees_what_it_picks(folder):
    loaded, tensors = models.load(folder), tensors_of(folder)
    config, seen = loaded.config, []
    tokens = jnp.asarray(np.random.default_rng(5).integers(0, 61, (2, 23)), jnp.int32)
    sparse = models.dense_attend_pooled(config)

    def attend(layer, q, k, v, index, cache, *, scale):
        assert (layer, v, scale) == (1, None, 6**-0.5)
        assert (q.shape, k.shape) == ((2, 23, 2, 20), (2, 23, 1, 20))
        out, cache = sparse(layer, q, k, v, index, cache, scale=scale)
        seen.append((q, k, index, out))
        return out, cache

    @compiled
    def run(params):
        loaded.module.apply(params, tokens, tokens, attend)
        return seen.pop()

    q, k, index, out = run(loaded.params)
    own = {
        n.removeprefix("model.layers.1.self_attn.indexer.").removesuffix(".weight"): t.astype(np.float64)
        for n, t in tensors.items()
        if n.startswith("model.layers.1.self_attn.indexer.")
    }
    np.testing.assert_array_equal(index.ape, own["index_kpool_compress_ape"])
    assert isinstance(index, pooling.IndexRows)
    assert [part.shape for part in index] == [(2, 23, 2, 16), (2, 23, 2), (2, 23, 16), (2, 23, 16), (4, 16)]
    # The key is a layer norm: centred, of length 1 a channel, before weight and bias.
    plain = (np.asarray(index.key, np.float64) - own["k_norm.bias"]) / own["k_norm"]
    np.testing.assert_allclose(plain.mean(axis=-1), 0, atol=1e-5)
    np.testing.assert_allclose((plain**2).mean(axis=-1), 1, atol=1e-3)

    # Row by row: pools scored in float64, the best two and the live tail attended to.
    query, weight, key, score = (np.asarray(x, np.float64) for x in index[:4])
    logits = score[:, :20].reshape(2, 5, 4, 16) + own["index_kpool_compress_ape"]
    shares = np.exp(logits) / np.exp(logits).sum(axis=2, keepdims=True)
    pools = (shares * key[:, :20].reshape(2, 5, 4, 16)).sum(axis=2)
    clear = 0
    for b in range(2):
        for t in range(23):
            closed = (t + 1) // 4
            products = np.maximum(np.einsum("hx,nx->hn", query[b, t], pools[b, :closed]), 0)
            scores = weight[b, t] @ products / 4
            order = np.argsort(-scores, kind="stable")
            if closed > 2 and scores[order[1]] - scores[order[2]] < 0.1 * np.abs(scores).max():
                continue  # too close for 8-bit keys to agree
            clear += 1
            tokens_seen = [4 * g + i for g in sorted(order[:2]) for i in range(4)] + list(range(4 * closed, t + 1))
            latent = np.asarray(k[b, tokens_seen, 0], np.float64)
            for h in range(2):
                weights = np.exp(latent @ np.asarray(q[b, t, h], np.float64) / np.sqrt(6))
                np.testing.assert_allclose(out[b, t, h], weights / weights.sum() @ latent, atol=2e-5)
    assert clear > 30


def test_what_an_indexer_learns_moves_nothing_else(folder):
    loaded = models.load(folder)
    tokens = jnp.arange(6, dtype=jnp.int32)[None]

    def indexed(layer, q, k, v, index, cache, *, scale):
        return q, cache + sum(jnp.sum(part.astype(jnp.float32) ** 2) for part in index)

    def loss(params):
        recur = lambda layer, update, cache: (update(None, None, "last")[0], cache)  # noqa: E731
        return loaded.module.apply(params, tokens, tokens, indexed, 0.0, recur=recur)[2]

    moved = {
        path[-1].key
        for path, g in jax.tree_util.tree_leaves_with_path(compiled(jax.grad(loss))(loaded.params))
        if np.abs(g).max() > 0
    }
    assert moved == {"wq_b", "wk", "weights_proj", "k_norm", "k_norm_bias"} | {
        "index_kpool_compress_gate",
        "index_kpool_compress_ape",
    }


def test_bfloat16_module_takes_the_loaded_params(folder):
    loaded = models.load(folder, jnp.bfloat16)
    tokens = jnp.zeros((1, 5), jnp.int32)
    attend = models.dense_attend_pooled(loaded.config)
    made = jax.eval_shape(lambda: loaded.module.init(jax.random.key(0), tokens, tokens, attend))
    assert jax.tree.map(jnp.shape, loaded.params) == jax.tree.map(lambda leaf: leaf.shape, made)

    @compiled
    def run(params, block_params):
        logits, hidden, _ = loaded.module.apply(params, tokens, tokens, attend)
        return logits, hidden, *loaded.mtp.apply(block_params, 0, tokens, hidden, tokens, attend)[:2]

    found = run(loaded.params, loaded.mtp_params)
    for logits, hidden in (found[:2], found[2:]):
        assert (logits.shape, logits.dtype) == ((1, 5, 61), jnp.float32)
        assert (hidden.shape, hidden.dtype) == ((1, 5, 24), jnp.bfloat16)
        assert np.isfinite(logits).all()

"""Logits equal those of Hugging Face transformers (torch, CPU, float32, eager attention) on the very same folders."""

import inspect
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import models

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the reference's own imports
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

TOLERANCE = 1e-4


def reference_model(folder):
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return model.eval()


def reference_logits(folder, tokens):
    with torch.no_grad():
        return reference_model(folder)(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()


def our_logits(folder, tokens):
    model = models.load(folder)
    tokens = jnp.asarray(tokens, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    attend = models.dense_attend(model.config.windows)
    run = jax.jit(lambda params: model.module.apply(params, tokens, positions, attend)[0])
    return np.asarray(run(model.params))


def small_config(**changes):
    settings = {
        "vocab_size": 211,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,  # 6 * 16 is not 48, on purpose
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "windows": (8, 8, None),
        "eos_token_ids": (3,),
    }
    return models.Qwen3Config(**{**settings, **changes})


def random_tokens(config, length=41, batch=2):
    return np.random.default_rng(5).integers(0, config.vocab_size, (batch, length))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="sliding, sliding, full; tied"),
        pytest.param({"tie_word_embeddings": False}, id="untied head"),
        pytest.param({"windows": (None, None, None)}, id="full layers only"),
        pytest.param({"windows": (1, None, 1)}, id="window of one key"),
        pytest.param({"num_key_value_heads": 6, "rope_theta": 1e6, "rms_norm_eps": 1e-2}, id="no sharing, theta, eps"),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["stored bf16", "stored f32"])
def test_random_model_has_the_reference_logits(tmp_path, changes, dtype):
    config = small_config(**changes)
    models.save(tmp_path, config, models.random_params(config, 1), dtype)
    tokens = random_tokens(config)
    expected = reference_logits(tmp_path, tokens)
    assert expected.std() > 0.3  # the comparison is about numbers of size one
    np.testing.assert_allclose(our_logits(tmp_path, tokens), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("windows", "older"),
    [
        pytest.param(
            (None, 8, 8),
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            id="max_window_layers",
        ),
        pytest.param(
            (None, None, None),
            {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1},
            id="window switched off",
        ),
    ],
)
def test_older_spelling_of_the_configuration_means_the_same(tmp_path, windows, older):
    """Folders written before layer_types and rope_parameters existed."""
    config = small_config(windows=windows, rope_theta=50_000.0)
    models.save(tmp_path, config, models.random_params(config, 2), jnp.float32)
    settings = json.loads((tmp_path / "config.json").read_text())
    del settings["layer_types"], settings["rope_parameters"]
    settings |= older | {"rope_theta": 50_000.0, "rope_scaling": None}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    tokens = random_tokens(config)
    assert models.load(tmp_path).config.windows == windows
    np.testing.assert_allclose(our_logits(tmp_path, tokens), reference_logits(tmp_path, tokens), atol=TOLERANCE, rtol=0)


def test_comparison_sees_a_window_that_is_one_key_off(tmp_path):
    """The tolerance is tight enough to tell 8 visible keys from 9."""
    config = small_config()
    models.save(tmp_path, config, models.random_params(config, 1), jnp.float32)
    tokens = random_tokens(config)
    expected = reference_logits(tmp_path, tokens)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"sliding_window": 9}))
    assert np.abs(our_logits(tmp_path, tokens) - expected)[:, 8:].max() > 100 * TOLERANCE


def hybrid_config(**changes):
    settings = {
        "vocab_size": 211,
        "hidden_size": 48,
        "intermediate_size": 80,
        "layer_types": ("linear_attention", "full_attention", "linear_attention"),
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "eos_token_ids": (3,),
    }
    return models.HybridConfig(**{**settings, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="three value heads a key head"),
        pytest.param({"linear_num_value_heads": 2, "linear_conv_kernel_dim": 2}, id="no sharing, two taps"),
        pytest.param(
            {"tie_word_embeddings": False, "partial_rotary_factor": 0.5, "rope_theta": 1e6}, id="untied, rope"
        ),
        pytest.param({"layer_types": ("full_attention",), "partial_rotary_factor": 1.0}, id="a gated layer alone"),
    ],
)
def test_random_hybrid_model_has_the_reference_logits(tmp_path, changes):
    """Full and linear layers; the reference refuses sliding ones, and linear ones alone. The text is longer than the
    rule's chunks."""
    config = hybrid_config(**changes)
    models.save(tmp_path, config, models.random_params(config, 1), jnp.float32)
    tokens = random_tokens(config, length=75)
    expected = reference_logits(tmp_path, tokens)
    assert expected.std() > 0.3
    np.testing.assert_allclose(our_logits(tmp_path, tokens), expected, atol=TOLERANCE, rtol=0)


def test_reader_agrees_on_the_written_hybrid_configuration(tmp_path):
    config = hybrid_config(eos_token_ids=(3, 7), partial_rotary_factor=0.5)
    models.save(tmp_path, config, models.random_params(config, 1))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert theirs.layer_types == list(config.layer_types)
    assert theirs.rope_parameters == {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    assert models.HybridConfig.from_dict(theirs.to_dict()) == config
    plain = transformers.Qwen3NextConfig(num_hidden_layers=8, num_experts=0)
    read = models.HybridConfig.from_dict(plain.to_dict())
    assert (list(read.layer_types), read.partial_rotary_factor) == (plain.layer_types, 0.25)
    assert read.linear_num_value_heads == 32


def test_reader_agrees_on_the_written_configuration(tmp_path):
    config = small_config(eos_token_ids=(3, 7))
    models.save(tmp_path, config, models.random_params(config, 1))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert theirs.layer_types == ["sliding_attention", "sliding_attention", "full_attention"]
    assert theirs.sliding_window == 8
    assert theirs.rope_parameters == {"rope_type": "default", "rope_theta": 10_000.0}
    assert theirs.eos_token_id == [3, 7]
    assert models.Qwen3Config.from_dict(theirs.to_dict()) == config
    assert models.Qwen3Config.from_dict(json.loads(theirs.to_json_string())) == config


@pytest.mark.parametrize("name", ["target", "draft"])
def test_embedded_model_has_the_reference_logits_on_real_code(name):
    """Longer than the sliding window, so that every kind of layer is compared beyond it."""
    folder = models.embedded_path(name)
    model = models.load(name)
    text = inspect.getsource(json.encoder)
    tokens = np.asarray([model.tokenizer.encode(text).ids[:600]])
    longest = max((window for window in model.config.windows if window is not None), default=0)
    assert tokens.shape[1] > longest
    np.testing.assert_allclose(our_logits(folder, tokens), reference_logits(folder, tokens), atol=TOLERANCE, rtol=0)


def reference_greedy(folder, prompt, count):
    """Greedy continuation by the reference's own `generate`, its cache and all; end-of-text ids do not stop it."""
    with torch.no_grad():
        ids = reference_model(folder).generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            eos_token_id=None,
            pad_token_id=0,
        )
    return ids[0, len(prompt) :].tolist()


def our_greedy(checkpoint, prompts, count, **drafting):
    params = jaxspec.Params(checkpoint.params, drafting.pop("draft_params", ()))
    return jaxspec.generate(checkpoint.model, params, prompts, max_new_tokens=count, **drafting).token_ids


def test_plain_and_speculative_decoding_of_a_random_model_give_the_reference_ids(tmp_path):
    config = small_config(tie_word_embeddings=False)
    models.save(tmp_path, config, models.random_params(config, 4), jnp.float32)
    prompts = [row[:length].tolist() for row, length in zip(random_tokens(config), (9, 41), strict=True)]
    expected = [reference_greedy(tmp_path, prompt, 48) for prompt in prompts]
    assert len({*expected[0]}) > 4  # not one token over and over
    checkpoint = models.load(tmp_path)
    assert our_greedy(checkpoint, prompts, 48) == expected
    assert our_greedy(checkpoint, prompts, 48, drafter=jaxspec.NgramDrafter(), num_draft_tokens=4) == expected


def test_plain_decoding_of_the_embedded_target_gives_the_reference_ids():
    checkpoint = models.load("target")
    prompts = [checkpoint.encode(inspect.getsource(member).rstrip())[:300] for member in (json.encoder, json.decoder)]
    expected = [reference_greedy(checkpoint.folder, prompt, 64) for prompt in prompts]
    assert our_greedy(checkpoint, prompts, 64) == expected

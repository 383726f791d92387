"""Tapped models: the streams behind chosen layers, whole texts and in the step."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick_compile
from tiny_models import (
    CONFIG,
    CONTEXT,
    FAST_COMPILE,
    GLM_CONFIG,
    HYBRID_CONFIG,
    MODULE,
    TARGET,
    prompt,
    target_params,
)

import jaxspec
from jaxspec import models
from jaxspec.errors import InputError
from jaxspec.generation.results import read_requests

FAMILIES = {
    "qwen3": (models.Qwen3, dataclasses.replace(CONFIG, num_hidden_layers=3, windows=(8, None, 4)), (2, 0, 1)),
    "hybrid": (models.Hybrid, HYBRID_CONFIG, (2, 0, 1)),
    "glm": (models.Glm, dataclasses.replace(GLM_CONFIG, num_nextn_predict_layers=0), (1, 0)),
}


def first_layers(config, count):
    """The configuration of a model that ends after `count` layers."""
    if isinstance(config, models.Qwen3Config):
        return dataclasses.replace(config, num_hidden_layers=count, windows=config.windows[:count])
    kinds = config.layer_types[:count]
    shorter = {"layer_types": kinds}
    if isinstance(config, models.HybridConfig) and "sliding_attention" not in kinds:
        shorter["sliding_window"] = None
    return dataclasses.replace(config, **shorter)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_feature_of_a_layer_is_what_a_model_that_ends_there_has_before_its_norm(family):
    kind, config, taps = FAMILIES[family]
    # With an epsilon of the size of what is normed, a normed row says how long the row was.
    config = dataclasses.replace(config, rms_norm_eps=0.5)
    params = models.random_params(config, 0)
    assert len(taps) == config.num_hidden_layers
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 61, (2, 14)), jnp.int32)
    rows = jnp.broadcast_to(jnp.arange(14, dtype=jnp.int32), tokens.shape)

    def attend(config):
        if family == "glm":
            return models.dense_attend_pooled(config, sparse=False)
        return models.dense_attend(config.windows)

    @jax.jit
    def run(params):
        def apply(config, **how):
            own = {key: value for key, value in params["params"].items() if not key.startswith("layers_")}
            own |= {f"layers_{i}": params["params"][f"layers_{i}"] for i in range(config.num_hidden_layers)}
            return kind(config).apply({"params": own}, tokens, rows, attend(config), **how)

        short = [apply(first_layers(config, count))[1] for count in range(1, len(taps) + 1)]
        return short, apply(config), apply(config, taps=taps), apply(config, taps=taps[-1:])

    short, plain, tapped, one = run.lower(params).compile(quick_compile.options())(params)
    scale = params["params"]["norm"] + (1 if family == "hybrid" else 0)
    assert tapped[1].shape == (2, 14, len(taps) * config.hidden_size)
    for layer, feature in zip(taps, np.split(np.asarray(tapped[1], np.float64), len(taps), axis=-1), strict=True):
        normed = feature / np.sqrt((feature**2).mean(axis=-1, keepdims=True) + 0.5) * np.asarray(scale, np.float64)
        np.testing.assert_allclose(short[layer], normed, atol=1e-5)
    np.testing.assert_array_equal(one[1], tapped[1][..., -config.hidden_size :])
    # Taps change what is looked at, and nothing that is computed.
    np.testing.assert_allclose(tapped[0], plain[0], atol=1e-5)
    assert plain[1].shape == (2, 14, config.hidden_size)


def test_a_tapped_model_is_another_one_and_equal_ones_are_equal():
    tapped = TARGET.tapped((1, 0))
    assert tapped != TARGET and tapped == TARGET.tapped([1, 0]) and hash(tapped) == hash(TARGET.tapped((1, 0)))
    assert tapped != TARGET.tapped((0, 1))
    assert (tapped.layers, tapped.vocab_size, tapped.dtype) == (TARGET.layers, TARGET.vocab_size, TARGET.dtype)
    assert tapped.tapped((0,)) == TARGET.tapped((0,))  # layers are those of the model, not of what was tapped before


@pytest.mark.parametrize("layers", [(2,), (-1,), (0, 5), ()])
def test_layers_that_are_not_there(layers):
    with pytest.raises(InputError, match="the target has 2, counted from 0"):
        TARGET.tapped(layers)


def test_a_function_that_says_nothing_of_its_layers_cannot_be_tapped():
    with pytest.raises(InputError, match="give its Model a `tap`"):
        dataclasses.replace(TARGET, tap=None).tapped((0,))


# In the step


@dataclasses.dataclass(frozen=True)
class Recorder:
    """A drafter that writes down the features of committed rows, [R, T, m * H], and proposes what its params tell it,
    int32[R, T]."""

    taps: tuple[int, ...]
    width: int
    algorithm: ClassVar[str] = "dflash"

    def init(self, config):
        return jnp.full((config.rows, config.context_len, len(self.taps) * self.width), jnp.nan)

    def extend(self, params, state, context):
        column = jnp.arange(context.hidden.shape[1])
        stays = column < context.count[:, None]
        row = jnp.where(stays, context.req_rows[:, None], 0)
        place = jnp.where(stays, context.seq_lens[:, None] + column, 0)
        return state.at[row, place].set(context.hidden)

    def propose(self, params, state, context, num_drafts):
        place = context.seq_lens[:, None] + 1 + jnp.arange(num_drafts)
        tokens = params[context.req_rows[:, None], jnp.minimum(place, params.shape[1] - 1)]
        return state, jaxspec.Drafts(tokens=tokens, count=jnp.full(tokens.shape[:1], num_drafts, jnp.int32))


def test_rows_of_prompts_and_of_rounds_have_the_features_of_the_whole_text():
    taps, prompts = (1, 0), [prompt(3), prompt(50), prompt(20)]
    config = jaxspec.SpecConfig(
        batch_size=4,  # one lane is padding
        num_draft_tokens=4,
        context_len=CONTEXT,
        max_new_tokens=24,
        page_size=4,
        prefill_chunk=20,
        kernel_backend="reference",
    )
    spec = jaxspec.make_spec_step(TARGET, Recorder(taps, CONFIG.hidden_size), config, options=FAST_COMPILE)
    assert spec.target == TARGET.tapped(taps)

    def run(guesses):
        params = jaxspec.Params(target_params(), jnp.asarray(guesses, jnp.int32))
        state = jaxspec.init_state(spec.target, spec.drafter, config, prompts)
        state, status = spec.prefill(params, state)
        assert status == 0
        for _ in range(24):
            state, output = spec(params, state)
            assert output.status == 0
            if not output.unfinished:
                return read_requests(state, prompts), np.asarray(state.draft), jaxspec.requests_of(state).seq_len
        raise AssertionError("a request did not end")

    alone, _, _ = run(np.zeros((5, CONTEXT)))
    texts = np.zeros((5, CONTEXT), np.int32)
    for row, (ids, result) in enumerate(zip(prompts, alone, strict=True), start=1):
        texts[row, : len(ids) + 24] = [*ids, *result.token_ids]
    wrong = np.random.default_rng(0).random(texts.shape) < 0.3
    results, found, lengths = run(np.where(wrong, (texts + 1) % 61, texts))
    assert [r.token_ids for r in results] == [r.token_ids for r in alone]
    assert {count for result in results for count in result.accepted_drafts} >= {0, 1, 3}

    rows = jnp.broadcast_to(jnp.arange(CONTEXT, dtype=jnp.int32), texts.shape)
    attend = models.dense_attend(CONFIG.windows)
    whole = jax.jit(lambda p, t: MODULE.apply(p, t, rows, attend, taps=taps)[1], compiler_options=FAST_COMPILE)
    expected = np.asarray(whole(target_params(), texts))
    for row, ids in enumerate(prompts, start=1):
        length = int(lengths[row])
        assert length >= len(ids) + 20
        np.testing.assert_allclose(found[row, :length], expected[row, :length], atol=2e-3)
        assert np.isnan(found[row, length + 4 :]).all()

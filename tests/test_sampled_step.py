"""Sampling through the whole step: the law of what is said, and what it may not depend on."""

import dataclasses
import functools

import jax

# jax 0.11 imports it when a kernel is first interpreted, and then compiles all programs anew: better before them.
import jax.experimental.pallas.tpu
import jax.numpy as jnp
import numpy as np
import pytest
import table_models
import tiny_models
from tiny_models import FAST_COMPILE, GLM_CONFIG, prompt

import jaxspec
from jaxspec import models
from jaxspec.errors import InputError
from jaxspec.generation.generate import default_verifier
from jaxspec.generation.loops import run_to_end
from jaxspec.generation.results import read_requests
from jaxspec.models.contract import blocks_of_glm
from jaxspec.steps.round import run_round
from jaxspec.steps.settings import lane_settings
from jaxspec.steps.step import jit_with_state
from jaxspec.verification import RULE_NAMES

VERIFIERS = ["match", "rejection", "block"]
SETTINGS = [
    {"temperature": 0.7},
    {"temperature": 1.5},
    {"temperature": 1.0, "top_k": 2},
    {"temperature": 0.7, "top_p": 0.75},
    {"temperature": 1.5, "top_k": 2, "top_p": 0.8},
    {"temperature": 0.0},
]


def columns(settings):
    """Settings of requests, as keywords that hold one value a request."""
    defaults = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0}
    return {name: [each.get(name, default) for each in settings] for name, default in defaults.items()}


def finish(step, params, prompts, **settings):
    """The state after a whole generation in one dispatch."""
    state = jaxspec.init_state(step.target, step.drafter, step.config, prompts, **settings)
    state, status = jit_with_state(run_to_end, step.options)(step, params, state)
    assert status == 0
    return state


def results(step, params, prompts, **settings):
    return read_requests(finish(step, params, prompts, **settings), prompts, step.config.sampling)


def texts(*args, **settings):
    return [result.token_ids for result in results(*args, **settings)]


def deviation(counts, expected):
    """Chi-square of counts against what is expected, in standard deviations above its mean; cells in which little is
    expected are one."""
    assert (counts[expected == 0] == 0).all()
    small = expected < 4
    counts, expected = (np.append(x[~small], x[small].sum()) for x in (counts, expected))
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = max(len(expected) - 1, 1)
    return (((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom)


def difference(ours, theirs):
    """The same for two samples of equal size: int[N] each."""
    a, b = (np.bincount(x, minlength=max(ours.max(), theirs.max()) + 1) for x in (ours, theirs))
    small = a + b < 10
    a, b = (np.append(x[~small], x[small].sum()) for x in (a, b))
    a, b = a[a + b > 0], b[a + b > 0]
    freedom = max(len(a) - 1, 1)
    return (((a - b) ** 2 / (a + b)).sum() - freedom) / np.sqrt(2 * freedom)


# The law ----------------------------------------------------------------------------------------------------------


@functools.cache
def table_state(verifier, lanes):
    """Requests that differ in settings and seed alone, all from token 0, with a draft that is like the target."""
    step = table_models.step(verifier, batch=lanes, new=5)
    settings = columns([SETTINGS[lane % len(SETTINGS)] | {"seed": lane} for lane in range(lanes)])
    return finish(step, table_models.params(), [[0]] * lanes, **settings)


@pytest.mark.parametrize("lanes", [4096 * len(SETTINGS), pytest.param(1 << 18, marks=pytest.mark.slow)])
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_the_law_of_mixed_requests_is_the_targets(verifier, lanes):
    """The first from prefill, the others from rounds, all settings in one batch; what has no chance is never said."""
    said = np.asarray(table_state(verifier, lanes).tokens)[1:, 1:5]
    for i, settings in enumerate(SETTINGS):
        mine = np.ravel_multi_index(said[i :: len(SETTINGS)].T, (table_models.V,) * 4)
        expected = table_models.law(4, **settings).ravel() * len(mine)
        assert deviation(np.bincount(mine, minlength=expected.size), expected) < 4, settings


def test_drafts_are_accepted_and_a_block_further():
    logs = {verifier: np.asarray(table_state(verifier, 4096 * len(SETTINGS)).round_log) for verifier in VERIFIERS}
    kept = {verifier: [log[1 + i :: len(SETTINGS), 0, 0].mean() for i in (0, 1)] for verifier, log in logs.items()}
    for i in (0, 1):
        assert kept["block"][i] > kept["rejection"][i] > 1
    assert kept["rejection"][1] > kept["match"][1]


# What a request says does not depend on -------------------------------------------------------------------------------

PROMPTS = [prompt(7), prompt(13), prompt(30), prompt(8)]
MIXED = [
    {"temperature": 0.7, "seed": 1},
    {"temperature": 0.0, "seed": 2},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": 2**32 - 1},
    {"temperature": 1.3, "top_p": 0.8, "seed": 4},
]


@functools.cache
def alone(verifier, drafter):
    """Each request in a batch of its own, and what rule decided it."""
    D = 1 if drafter == "plain" else 4
    step, params = tiny_models.make_step(drafter, D=D, new=12, sampling=verifier)
    out = [results(step, params, [ids], **x)[0] for ids, x in zip(PROMPTS, MIXED, strict=True)]
    return [x.token_ids for x in out], [x.rule for x in out]


def together(drafter, verifier, **others):
    """All of them in rows 1 .. 4, and then in others, beside requests that come and go; yields (order, texts)."""
    step, params = tiny_models.make_step(drafter, new=12, sampling=verifier, batch=5, **others)
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2]):
        prompts, settings = [PROMPTS[i] for i in order], columns([MIXED[i] for i in order])
        yield order, texts(step, params, prompts, max_new_tokens=12, **settings)


ANYWHERE = {"memory": "unified", "pool_seed": 3}


@pytest.mark.parametrize(
    ("drafter", "how"),
    [
        ("ngram", ANYWHERE),
        ("draft_lm", {}),
        pytest.param("plain", ANYWHERE | {"D": 1}, marks=pytest.mark.slow),
        pytest.param("draft_lm", ANYWHERE, marks=pytest.mark.slow),
        pytest.param("self", {"D": 8, "pool_seed": 1}, marks=pytest.mark.slow),
    ],
)
def test_matching_is_plain_sampling(drafter, how):
    """Token by token, whoever drafts: alone or not, in any row, bucket, memory and page."""
    expected, rules = alone("match", "plain")
    assert rules == ["match", "greedy", "match", "match"]
    for order, said in together(drafter, "match", **how):
        assert said == [expected[i] for i in order]


@pytest.mark.parametrize(
    ("verifier", "how"),
    [
        ("rejection", ANYWHERE),
        pytest.param("rejection", {"pool_seed": 5, "page": 16}, marks=pytest.mark.slow),
        pytest.param("block", ANYWHERE, marks=pytest.mark.slow),
    ],
)
def test_a_seeded_request_says_the_same_anywhere(verifier, how):
    expected, rules = alone(verifier, "draft_lm")
    assert rules == [verifier, "greedy", verifier, verifier]
    for order, said in together("draft_lm", verifier, **how):
        assert said == [expected[i] for i in order]
    # The greedy one says what it says in plain decoding.
    assert expected[1] == alone("match", "plain")[0][1]
    assert expected[0] != expected[3]


def test_more_seeds_say_more():
    step, params = tiny_models.make_step("draft_lm", new=12, sampling="rejection", batch=5, **ANYWHERE)
    said = texts(step, params, [PROMPTS[0]] * 5, temperature=1.0, seed=[1, 2, 3, 1, 2**31])
    assert said[0] == said[3] and len({tuple(x) for x in said}) == 4


# Prediction blocks ----------------------------------------------------------------------------------------------------


GLM_LANES = 2048


@functools.cache
def glm_texts(verifier, blocks=0, lanes=GLM_LANES, seed=0, **others):
    """(int[lanes, 4], accepted drafts of the first round) of requests that differ in their seed alone; with no blocks
    by plain decoding. Four tokens of vocabulary, so that runs can be counted."""
    config = dataclasses.replace(GLM_CONFIG, vocab_size=4, num_nextn_predict_layers=max(blocks, 1))
    tree = jax.tree.map(lambda x: 2 * x if x.ndim == 2 else x, models.random_params(config, seed=0))
    shared = {name: tree["params"][name] for name in ("embed_tokens", "lm_head")}
    module, params = models.Glm(config), jaxspec.Params({"params": tree["params"]}, {"blocks": tree["mtp"], **shared})
    config = jaxspec.SpecConfig(
        batch_size=lanes,
        num_draft_tokens=3 if blocks else 1,
        context_len=16,
        max_new_tokens=4,
        page_size=8,
        prefill_chunk=4,
        kernel_backend="reference",
        sampling=verifier,
        **others,
    )
    drafter = jaxspec.MTPDrafter(blocks_of_glm(module)) if blocks else None
    step = jaxspec.make_spec_step(models.from_glm(module), drafter, config, options=FAST_COMPILE)
    seeds = [seed + lane for lane in range(lanes)]
    state = finish(step, params, [[1, 3, 2]] * lanes, temperature=2.0, seed=seeds)
    return np.asarray(state.tokens)[1:, 3:7], np.asarray(state.round_log)[1:, 0, 0]


def test_matching_of_prediction_blocks_is_plain_sampling():
    said, accepted = glm_texts("match", 1)
    np.testing.assert_array_equal(said, glm_texts("match")[0])
    assert accepted.mean() > 0.2


@pytest.mark.parametrize(
    ("verifier", "blocks", "lanes", "how"),
    [
        ("rejection", 1, GLM_LANES, {}),
        pytest.param("block", 1, 1 << 14, ANYWHERE, marks=pytest.mark.slow),
        pytest.param("rejection", 2, 1 << 14, {}, marks=pytest.mark.slow),
        pytest.param("block", 2, 1 << 14, ANYWHERE, marks=pytest.mark.slow),
    ],
)
def test_the_law_of_prediction_blocks(verifier, blocks, lanes, how):
    """The first draft of a round was drawn in the round before, with its law; then a chain, or a block for each."""
    said, accepted = glm_texts(verifier, blocks, lanes, seed=10**6, **how)
    runs = [np.ravel_multi_index(x.T, (4,) * 4) for x in (said, glm_texts("match", lanes=lanes)[0])]
    assert difference(*runs) < 4
    assert 0.2 < accepted.mean() < 1.95


# Embedded models ------------------------------------------------------------------------------------------------------


def embedded(name, lanes, verifier, drafts=True):
    checkpoint = jaxspec.load_model(name)
    drafter, weights = None, ()
    if drafts and name == "kpool":
        drafter, weights = jaxspec.MTPDrafter(checkpoint.mtp), checkpoint.mtp_params
    elif drafts:
        draft = jaxspec.load_model("draft")
        drafter, weights = jaxspec.DraftLM(draft.draft_model), draft.params
    config = jaxspec.SpecConfig(
        batch_size=lanes,
        num_draft_tokens=3 if drafts else 1,
        context_len=16,
        max_new_tokens=3,
        page_size=16,
        prefill_chunk=8,
        sampling=verifier,
    )
    step = jaxspec.make_spec_step(checkpoint.model, drafter, config)
    return step, jaxspec.Params(checkpoint.params, weights), checkpoint.encode("import os\nimport")[-8:]


def first_tokens(name, draws, lanes, verifier, seed, drafts=True):
    """int[draws, 3] of requests that differ in their seed alone."""
    step, params, ids = embedded(name, lanes, verifier, drafts)
    out = []
    for start in range(seed, seed + draws, lanes):
        seeds = [start + i for i in range(lanes)]
        state = finish(step, params, [ids] * lanes, temperature=0.8, top_p=0.95, seed=seeds)
        out.append(np.asarray(state.tokens)[1:, len(ids) : len(ids) + 3])
    return np.concatenate(out)[:draws]


@pytest.mark.usefixtures("untuned")
@pytest.mark.parametrize(
    ("name", "verifier", "draws", "lanes"),
    [
        pytest.param("target", "rejection", 4096, 1024, marks=pytest.mark.slow),
        *(
            pytest.param(name, verifier, 100_000, 4096, marks=[pytest.mark.slow, pytest.mark.gpu])
            for name in ("target", "kpool")
            for verifier in VERIFIERS
        ),
    ],
)
def test_embedded_models_follow_the_law(name, verifier, draws, lanes):
    """Plain against speculative decoding: the law of the first three tokens, and of each of them."""
    if draws > 10_000 and jax.default_backend() != "gpu":
        pytest.skip("no NVIDIA GPU")
    plain = first_tokens(name, draws, lanes, "match", 10**6, drafts=False)
    said = first_tokens(name, draws, lanes, verifier, 0)
    for i in range(3):
        assert difference(said[:, i], plain[:, i]) < 4
    _, joint = np.unique(np.concatenate([said, plain]), axis=0, return_inverse=True)
    assert difference(joint.ravel()[:draws], joint.ravel()[draws:]) < 4


# Edges ----------------------------------------------------------------------------------------------------------------

EDGES = {"batch": 4, "context": 8, "new": 8, "logprobs": True}
FOUR = columns([SETTINGS[0] | {"seed": 5}, SETTINGS[5], SETTINGS[2] | {"seed": 7}, SETTINGS[1] | {"seed": 2**32 - 1}])
IDS = [[0], [2], [1, 0, 1, 2], [1]]


@functools.cache
def edge_step(verifier):
    return table_models.step(verifier, **EDGES)


@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_to_the_end_of_the_context(verifier):
    """The last rounds have room for two drafts, for one, for none."""
    out = results(edge_step(verifier), table_models.params(), IDS, **FOUR)
    assert [x.finish_reason for x in out] == ["context"] * 4
    assert [len(x.token_ids) for x in out] == [7, 7, 4, 7]


@pytest.mark.parametrize("limit", [0, 1, 2, 3])
def test_with_few_tokens_left(limit):
    """A request that may say less says the beginning of what it says otherwise."""
    step, params = edge_step("rejection"), table_models.params()
    full = texts(step, params, IDS, **FOUR)
    assert texts(step, params, IDS, max_new_tokens=limit, **FOUR) == [x[:limit] for x in full]


def test_no_request_and_requests_that_are_all_greedy():
    step, params = edge_step("rejection"), table_models.params()
    assert texts(step, params, []) == []
    out = results(step, params, IDS, seed=9)
    assert [x.rule for x in out] == ["greedy"] * 4
    assert [x.token_ids for x in out] == texts(table_models.step(None, **EDGES), params, IDS)


def test_the_step_says_who_decided():
    step, params = edge_step("block"), table_models.params()
    state = jaxspec.init_state(step.target, step.drafter, step.config, IDS[:3], **columns(SETTINGS[3:]))
    state, _ = step.prefill(params, state)
    state, out = step(params, state)
    assert [RULE_NAMES[i] for i in out.rule] == ["block", "block", "greedy", "none"]
    assert lane_settings(state).top_p.tolist() == pytest.approx([0.75, 0.8, 1, 1])


def test_no_setting_compiles_anything():
    step, params = edge_step("rejection"), table_models.params()
    texts(step, params, IDS, **FOUR)
    before = len(table_models.APPLY.traced)
    texts(step, params, IDS, **columns(SETTINGS[:4]))
    texts(step, params, IDS[:1], temperature=0.3, top_p=0.1)
    assert before > 0 and len(table_models.APPLY.traced) == before


def test_greedy_steps_keep_nothing_of_sampling():
    states = []
    for verifier in (None, "match"):
        step = table_models.step(verifier, **EDGES)
        states.append(jaxspec.init_state(step.target, step.drafter, step.config, IDS))
    greedy, sampled = (len(jax.tree.leaves(state)) for state in states)
    assert states[0].settings is None and sampled == greedy + 1


def test_log_probabilities_are_the_targets_own():
    """At temperature 1 and of all tokens, whatever the request samples with."""
    step, params = edge_step("rejection"), table_models.params()
    table = np.asarray(jax.nn.log_softmax(params.target, axis=-1))
    for ids, result in zip(IDS, results(step, params, IDS, **FOUR), strict=True):
        before = [ids[-1], *result.token_ids[:-1]]
        np.testing.assert_allclose(result.logprobs, table[before, result.token_ids], atol=1e-5)


# Memory ---------------------------------------------------------------------------------------------------------------

WIDE, TOKENS = 64, 150_000


@dataclasses.dataclass(frozen=True)
class Row:
    """Logits behind a token: params, float32[V], turned by its id."""

    def __call__(self, params, tokens, positions, cache, metadata):
        if metadata.logit_rows is not None:
            tokens = tokens[:, :1]
        return params * jnp.cos(tokens[..., None].astype(jnp.float32)), tokens[..., None], cache


@pytest.mark.parametrize(
    "verifier", ["rejection", *(pytest.param(rule, marks=pytest.mark.slow) for rule in ("match", "block"))]
)
def test_a_round_keeps_logits_and_what_drafts_were_drawn_from_once(verifier):
    """At 64 requests, 8 rows, 150,000 tokens: [B, D, V] of the target, [B, D - 1, V] of the draft, and few [B, V]."""
    model = jaxspec.Model(Row(), table_models.LAYERS, vocab_size=TOKENS, context_len=64)
    config = jaxspec.SpecConfig(
        batch_size=WIDE, num_draft_tokens=8, context_len=64, max_new_tokens=16, page_size=64, sampling=verifier
    )
    step = jaxspec.make_spec_step(model, jaxspec.DraftLM(model), config, options=FAST_COMPILE)
    row = jax.ShapeDtypeStruct((TOKENS,), jnp.float32)
    state = jax.eval_shape(lambda: jaxspec.init_state(step.target, step.drafter, config, []))
    compiled = jit_with_state(run_round, step.options).lower(step, jaxspec.Params(row, row), state).compile()
    kept = 8 + (7 if config.asks_probs else 0)
    assert compiled.memory_analysis().temp_size_in_bytes < (kept + 9) * WIDE * TOKENS * 4


# What a user may ask --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.5}, r"temperature=-0.5: must be a finite number of at least 0"),
        ({"temperature": float("nan")}, r"temperature=nan: must be"),
        ({"temperature": [0.5, float("inf")]}, r"temperature=inf: must be"),
        ({"temperature": "hot"}, r"temperature='hot': give one number, or one for each of 2"),
        ({"top_p": 0.0}, r"top_p=0.0: must be above 0 and at most 1"),
        ({"top_p": 1.5}, r"top_p=1.5: must be"),
        ({"top_p": float("nan")}, r"top_p=nan: must be"),
        ({"top_k": -1}, r"top_k=-1: must be an integer of at least 0"),
        ({"top_k": 1.5}, r"top_k=1.5: must be an integer"),
        ({"seed": -1}, r"seed=-1: must be an integer in 0 .. 4294967295"),
        ({"seed": 2**32}, r"seed=4294967296: must be"),
        ({"seed": [1, 2, 3]}, r"seed=\[1, 2, 3\]: give one number, or one for each of 2 prompts"),
        ({"verifier": "typical"}, r"sampling='typical': must be None, all requests greedy, or one of 'rejection', 'b"),
    ],
)
def test_a_setting_that_is_none_is_refused(settings, message):
    with pytest.raises(InputError, match=message):
        jaxspec.generate(
            table_models.TARGET,
            table_models.params(),
            [[0], [1]],
            drafter=table_models.DRAFT,
            max_new_tokens=4,
            **({"temperature": 1.0} | settings),
        )


def test_nothing_falls_back_silently():
    make = table_models.step
    with pytest.raises(
        InputError, match=r"sampling='block' asks .* NgramDrafter cannot say .* choose sampling='match'"
    ):
        make("block", batch=1, drafter=jaxspec.NgramDrafter())
    with pytest.raises(InputError, match=r"plain decoding cannot say"):
        make("rejection", batch=1, drafter=None)
    greedy = make(None, batch=1)
    with pytest.raises(InputError, match=r"temperature=0.7: the configuration says sampling=None"):
        jaxspec.init_state(greedy.target, greedy.drafter, greedy.config, [[0]], temperature=0.7)
    args = table_models.TARGET, table_models.params(), [[0]]
    with pytest.raises(InputError, match=r"sampling='match': the configuration says None"):
        jaxspec.generate(*args, config=greedy.config, drafter=table_models.DRAFT, verifier="match")
    with pytest.raises(InputError, match=r"temperature=0.7: the configuration says sampling=None"):
        jaxspec.generate(*args, config=greedy.config, drafter=table_models.DRAFT, temperature=0.7)

    @dataclasses.dataclass(frozen=True)
    class Silent(jaxspec.NgramDrafter):
        has_probs = True

    silent = make("rejection", batch=1, drafter=Silent())
    with pytest.raises(TypeError, match=r"drafts.probs is None"):
        texts(silent, table_models.params(), [[0]], temperature=1.0)


@pytest.mark.parametrize(
    ("drafter", "temperature", "verifier"),
    [
        (table_models.DRAFT, 0.8, "rejection"),
        (table_models.DRAFT, [0.0, 0.8], "rejection"),
        (table_models.DRAFT, np.zeros(2), None),
        (jaxspec.NgramDrafter(), np.array([0.0, 0.8]), "match"),
        (None, 1, "match"),
    ],
)
def test_who_verifies_where_nobody_says(drafter, temperature, verifier):
    assert default_verifier(drafter, temperature) == verifier


def test_generate_says_which_rule_it_used():
    out = jaxspec.generate(
        table_models.TARGET,
        table_models.params(),
        [[0], [1, 2]],
        drafter=table_models.DRAFT,
        num_draft_tokens=3,
        max_new_tokens=4,
        temperature=np.array([0.8, 0.0]),
        seed=[7, 8],
        top_k=2,
    )
    assert [x.rule for x in out.requests] == ["rejection", "greedy"]
    assert [len(x) for x in out.token_ids] == [4, 4]
    assert out.to_json()["requests"][0]["rule"] == "rejection"

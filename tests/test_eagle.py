"""EAGLE-3: the network, its format, greedy text, and, as that hides what a drafter gets wrong, its proposals in every
round."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from eagle_cases import DRAFT, IDS, WHOLE, Oracle, draft_params, make_step, params_for, poison, reference, tapped
from mtp_cases import END, NEW, around, generate
from tiny_models import CONFIG, FAST_COMPILE, MODULE, TARGET, VOCAB, target_params

import jaxspec
from jaxspec.benchmarks import launches
from jaxspec.errors import InputError
from jaxspec.generation.results import read_requests
from jaxspec.models import Checkpoint, dense_attend
from jaxspec.models.draft_checkpoint import load_draft, random_draft_params, save_draft
from jaxspec.models.eagle import Eagle3, Eagle3Config
from jaxspec.steps.state import RUNNING

FIRST = around(16)
UNIFIED = {"memory": "unified", "prefill_chunk": 5, "pool_seed": 1}  # all that must not matter
MIXED = {"swa": DRAFT, "hybrid": WHOLE}  # which draft goes with which target


@functools.cache
def generated(name, prompts, how, meddle):
    spec, params = make_step(name, MIXED[name], **dict(how))
    return generate(
        spec, params, prompts, reference(name).prepare(prompts), **({} if meddle is None else {"meddle": meddle})
    )


def run(name, prompts, meddle=None, **how):
    """`generate` with a step of these settings; each run is made once."""
    return generated(name, tuple(prompts), tuple(sorted(how.items())), meddle)


def check(name, prompts, meddle=None, **how):
    """The texts are greedy, and all proposals of all rounds are those of the network over the whole text."""
    (results, seen), config = run(name, prompts, meddle, **how), MIXED[name]
    texts, params = reference(name).prepare(prompts), params_for(name, config).draft
    for ids, result in zip(prompts, results, strict=True):
        assert result.token_ids == texts[ids][len(ids) :], f"after a prompt of {len(ids)}"
    for ids, length, drafts, _ in seen:
        told, _ = reference(name).chain(config, params, ids, length, how.get("D", 4) - 1)
        assert drafts == told[: len(drafts)], f"prompt of {len(ids)}, {length} tokens committed"
    return results, seen


# The network


@pytest.mark.parametrize("config", [DRAFT, WHOLE, dataclasses.replace(DRAFT, feature_norm="none")])
def test_network(config):
    """Over a text without a cache, far from its start, with an embedding of its own."""
    rng, draft = np.random.default_rng(3), Eagle3(config)
    params = params_for("swa", config).draft
    params = {**params, "draft": {**params["draft"], "embed_tokens": params["embed_tokens"][::-1]}}
    tokens, features = rng.integers(0, VOCAB, 9), rng.standard_normal((9, config.feature_size)).astype(np.float32)
    position = np.arange(9, dtype=np.int32)[None] + 70

    @functools.partial(jax.jit, compiler_options=FAST_COMPILE)
    def run(params, tokens, features):
        rows, hidden, _ = draft.rows(params, tokens, draft.fuse(params, features), position, dense_attend((None,)))
        return draft.logits(params, rows)[0], hidden[0]

    logits, hidden = run(params, tokens.astype(np.int32)[None], features[None])
    oracle = Oracle(config, params)
    told = [
        oracle.row(token, oracle.fused(row.astype(float)), 70 + i)
        for i, (token, row) in enumerate(zip(tokens, features, strict=True))
    ]
    np.testing.assert_allclose(logits, [scores for scores, _ in told], rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(hidden, [row for _, row in told], rtol=2e-4, atol=2e-4)


def test_ids_of_the_draft_and_of_the_target():
    draft, params = Eagle3(DRAFT), params_for("swa", DRAFT).draft
    assert draft.target_ids(params, jnp.arange(len(IDS))).tolist() == IDS.tolist()
    scores = np.random.default_rng(0).standard_normal((2, len(IDS))).astype(np.float32)
    wide = np.full((2, VOCAB), -np.inf, np.float32)
    wide[:, IDS] = scores
    np.testing.assert_array_equal(draft.spread(params, jnp.asarray(scores)), wide)
    whole = jnp.asarray(wide)
    assert Eagle3(WHOLE).spread(params_for("swa", WHOLE).draft, whole) is whole


@pytest.mark.parametrize("width", [32, 63, 65, 96])
def test_features_of_another_width(width):
    """One layer's rows where two are joined, say: such a draft would run and never be right."""
    with pytest.raises(ValueError, match=rf"features has shape \(1, 3, {width}\).* 2 layers of 32.* must be 64"):
        Eagle3(DRAFT).fuse(params_for("swa", DRAFT).draft, jnp.zeros((1, 3, width)))


# Texts and proposals


@pytest.mark.parametrize(
    ("name", "how"),
    [("swa", {}), ("hybrid", UNIFIED), pytest.param("hybrid", {}, marks=pytest.mark.slow)],
    ids=["swa", "hybrid", "hybrid-static"],
)
def test_texts_are_greedy_and_drafts_those_of_the_network(name, how):
    """Rounds accept none, some and all of the drafts."""
    _, seen = check(name, FIRST, **how)
    assert {accepted for *_, accepted in seen} == {0, 1, 2, 3}


def test_drafts_are_ids_that_the_draft_knows():
    _, seen = run("swa", FIRST)
    proposed = {draft for _, _, drafts, _ in seen for draft in drafts}
    assert proposed <= {*IDS.tolist()} and len(proposed) > 5


def test_the_end_of_the_context():
    """The last rounds have room for two drafts, or for one."""
    results, seen = check("swa", END)
    assert {len(drafts) for *_, drafts, _ in seen} == {1, 2, 3}
    assert [len(result.token_ids) for result in results] == [NEW, 5, 2, 1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["swa", "hybrid"])
def test_neither_memory_nor_chunks_change_anything(name):
    """Nor the number of rounds."""
    assert run(name, FIRST, **UNIFIED) == run(name, FIRST)


def test_requests_in_another_order():
    (results, seen), (others, those) = run("swa", FIRST), run("swa", FIRST[::-1])
    assert results == others[::-1]
    assert sorted(seen) == sorted(those)


@pytest.mark.parametrize(
    ("name", "how"),
    [("swa", {}), ("hybrid", UNIFIED), pytest.param("swa", UNIFIED, marks=pytest.mark.slow)],
    ids=["static", "unified", "unified-swa"],
)
@pytest.mark.parametrize("prompts", [FIRST, END], ids=["first", "end"])
def test_nothing_else_in_memory_matters(name, how, prompts):
    """NaN in free pages and states, sinks and rows past the committed length, before every round."""
    assert run(name, prompts, poison, **how) == run(name, prompts, **how)


def test_damage_in_the_drafts_memory_shows():
    """The tests above can fail: rows of committed tokens matter, and only to proposals."""

    def damage(state):
        (buffer,) = state.draft.cache.buffers
        noise = jnp.asarray(np.random.default_rng(0).standard_normal(buffer.shape), buffer.dtype)
        return state.replace(draft=state.draft.replace(cache=state.draft.cache.replace(buffers=(noise,))))

    (results, seen), (others, those) = run("swa", FIRST, damage), run("swa", FIRST)
    assert [result.token_ids for result in results] == [result.token_ids for result in others]
    assert [drafts for *_, drafts, _ in seen] != [drafts for *_, drafts, _ in those]


@pytest.mark.slow
@pytest.mark.parametrize("D", [1, 2, 6])
def test_numbers_of_drafts(D):
    _, seen = check("swa", FIRST, D=D)
    assert all(len(drafts) == D - 1 for *_, drafts, _ in seen)


@pytest.mark.parametrize("memory", ["static", "unified"])
def test_launches_of_a_round(memory):
    """Metadata of the verify, and nothing else for extend and chain."""
    found = launches.trace(launches.Arm("", "", "", *make_step(memory=memory, kernel_backend=None)))
    metadata, others = found["metadata"], found["other_kernels"]
    assert metadata["verify"] == {"forward_metadata": 1}
    for phase in ("draft", "extend"):
        assert not metadata[phase] and not others[phase]


# Sampling


@functools.cache
def sampled(memory):
    """Results, and what each lane's drafts of each round were drawn from, of sampled and greedy requests together."""
    spec, params = make_step(sampling="rejection", **(UNIFIED if memory == "unified" else {}))
    settings = {"temperature": [0.0, 0.8, 1.2, 0.8], "seed": [1, 2, 3, 2], "top_k": [0, 0, 5, 0]}
    state = jaxspec.init_state(spec.target, spec.drafter, spec.config, FIRST, **settings)
    state, _ = spec.prefill(params, state)
    rounds = []
    while (jaxspec.requests_of(state).status == RUNNING).any():
        state, plan, drafts = drafted(spec, params, state)
        rounds.append(jax.device_get((plan.seq_lens, drafts)))
    return read_requests(state, FIRST, "rejection"), rounds, np.asarray(state.tokens)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2, compiler_options=FAST_COMPILE)
def drafted(spec, params, state):
    """A round; returns the state after, the plan and the drafts."""
    state, plan = jaxspec.prepare(spec, state)
    state, drafts = jaxspec.draft(spec, params, state, plan)
    state, verdict = jaxspec.verify(spec, params, state, plan, drafts)
    state = jaxspec.extend(spec, params, state, plan, verdict)
    return jaxspec.commit(spec, state, plan, drafts, verdict)[0], plan, drafts


def test_drafts_are_drawn_from_what_the_drafter_says():
    """It is the network's distribution under the request's settings, after the drafts before; one-hot if greedy."""
    _, rounds, texts = sampled("unified")
    params, checked = params_for("swa", DRAFT), 0
    for lengths, drafts in rounds[:6]:
        for lane, (length, temperature) in enumerate(zip(lengths, (0.0, 0.8), strict=False)):
            if not length:
                continue
            text = texts[lane + 1, : length + 1].tolist()
            features = tapped(DRAFT, reference("swa").features(text)[:length])
            ids, probs = drafts.tokens[lane].tolist(), drafts.probs[lane]
            _, told = Oracle(DRAFT, params.draft).chain(features, text, len(ids), ids)
            wanted = np.zeros_like(probs)
            for row, scores in enumerate(told):
                weights = np.exp((scores - scores.max()) / temperature) if temperature else scores == scores.max()
                wanted[row, IDS] = weights / weights.sum()
            np.testing.assert_allclose(probs, wanted, atol=1e-4)
            assert (probs[np.arange(len(ids)), ids] > 0).all()
            checked += 1
    assert checked >= 6


def test_rules_of_requests():
    results, *_ = sampled("unified")
    assert [result.rule for result in results] == ["greedy", "rejection", "rejection", "rejection"]
    assert results[0].token_ids == reference("swa").prepare(FIRST)[FIRST[0]][1:]


@pytest.mark.slow
def test_a_seed_gives_the_same_text_in_both_memories():
    (static, *_), (unified, *_) = sampled("static"), sampled("unified")
    assert static == unified


# What does not fit


def test_drafts_of_another_target():
    config = make_config()
    for change, words in (
        ({"vocab_size": VOCAB + 1}, f"is for {VOCAB + 1} tokens, and the target has {VOCAB}"),
        ({"max_position_embeddings": 63}, "context of 63 is below context_len=64"),
        ({"target_layer_ids": (0, 2)}, r"layers=\(0, 2\): the target has 2"),
    ):
        drafter = jaxspec.Eagle3Drafter(Eagle3(dataclasses.replace(DRAFT, **change)))
        with pytest.raises(InputError, match=words):
            jaxspec.make_spec_step(TARGET, drafter, config)
    untapped = dataclasses.replace(TARGET, tap=None)
    with pytest.raises(InputError, match="cannot be tapped"):
        jaxspec.make_spec_step(untapped, jaxspec.Eagle3Drafter(Eagle3(DRAFT)), config)


def test_unified_memory_takes_drafts_that_fuse():
    drafter = jaxspec.Eagle3Drafter(Eagle3(DRAFT, "bfloat16"))
    assert jaxspec.make_spec_step(TARGET, drafter, make_config()).drafter.cache_layers == ()
    with pytest.raises(InputError, match=r"algorithm='eagle' on memory='unified'.*keeps K and V in bfloat16"):
        jaxspec.make_spec_step(TARGET, drafter, make_config(memory="unified"))
    drafter = jaxspec.Eagle3Drafter(Eagle3(DRAFT))
    assert jaxspec.make_spec_step(TARGET, drafter, make_config(memory="unified")).drafter.cache_layers


def test_only_networks_of_its_kind():
    with pytest.raises(ValueError, match="draft is a Eagle3Config: an Eagle3Drafter runs EAGLE-3 drafts"):
        jaxspec.Eagle3Drafter(DRAFT)


def make_config(**how):
    shape = {"batch_size": 1, "num_draft_tokens": 4, "context_len": 64, "max_new_tokens": 8}
    return jaxspec.SpecConfig(**shape, **how)


# The format


def settings_for(config=DRAFT, **changes):
    """The parsed config.json of a draft with other values; those that are None are left out."""
    settings = {**config.to_dict(), **changes}
    return {key: value for key, value in settings.items() if key not in changes or value is not None}


@pytest.mark.parametrize("config", [DRAFT, dataclasses.replace(WHOLE, target_layer_ids=(0, 1))])
def test_a_configuration_and_back(config):
    assert Eagle3Config.from_dict(config.to_dict(), CONFIG) == config


def test_what_a_file_may_leave_out():
    """Llama's defaults, in the spelling of older files."""
    keys = ("head_dim", "num_key_value_heads", "target_hidden_size", "rms_norm_eps", "rope_theta", "eagle_config")
    keys = (*keys, "norm_output", "bias", "num_aux_hidden_states", "fc_norm", "max_position_embeddings")
    settings = settings_for(**dict.fromkeys(keys), use_aux_norm=True)
    deep = dataclasses.replace(CONFIG, num_hidden_layers=9, windows=(None,) * 9)
    found = Eagle3Config.from_dict(settings, deep)
    assert (found.head_dim, found.num_key_value_heads, found.feature_norm) == (8, 4, "each")
    assert (found.rms_norm_eps, found.rope_theta, found.max_position_embeddings) == (1e-6, 10_000.0, 2048)


@pytest.mark.parametrize(("layers", "after"), [(32, (1, 15, 28)), (9, (1, 3, 5)), (4, (1, 1, 0))])
def test_default_layers_are_entered_and_named_ones_are_left(layers, after):
    """[2, L // 2, L - 3] is what enters those layers: the stream after the ones before."""
    target = dataclasses.replace(CONFIG, num_hidden_layers=layers, windows=(None,) * layers)
    settings = settings_for(eagle_config=None, num_aux_hidden_states=None)
    assert Eagle3Config.from_dict(settings, target).target_layer_ids == after
    settings["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [2, layers - 1]}
    assert Eagle3Config.from_dict(settings, target).target_layer_ids == (2, layers - 1)


LAYERS = {"eagle_aux_hidden_state_layer_ids": [1, 0]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architectures is .*LlamaForCausalLM.*: an EAGLE-3 draft has"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "llama3"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": 1}}, "is 1: it must be a list"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0]}}, "num_aux_hidden_states is 2 .* names 1"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2]}}, r"is \[0, 2\] and the target has 2 layers"),
        ({"eagle_config": {}, "num_aux_hidden_states": None}, "its default reaches before the first"),
        ({"eagle_config": {}}, "num_aux_hidden_states is 2 and .* is absent"),
        ({"eagle_config": {**LAYERS, "norm_before_fc": True}}, "fc_norm and norm_before_fc are both true"),
        ({"vocab_size": 60}, "vocab_size is 60 and the target's vocab_size 61"),
        ({"target_hidden_size": 64}, "target_hidden_size is 64 and the target's hidden_size 32"),
        ({"draft_vocab_size": VOCAB + 1}, "draft_vocab_size is 62"),
        ({"draft_vocab_size": None, "hidden_size": 64}, "hidden_size is 64 and the target's 32: the target's head"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"intermediate_size": None}, "intermediate_size is missing"),
    ],
)
def test_configurations_that_are_refused(changes, words):
    settings = settings_for(**{"head_dim": 8, **changes})
    with pytest.raises(InputError, match=words):
        Eagle3Config.from_dict(settings, CONFIG)


def folder_for(path, config=DRAFT, *, rename=lambda name: name, lacks=(), **more):
    """A folder with a draft, its tensors renamed, some left out and others added."""
    save_draft(path, config, draft_params(config))
    tensors = safetensors.numpy.load_file(path / "model.safetensors")
    tensors = {rename(name): value for name, value in tensors.items() if name not in lacks} | more
    safetensors.numpy.save_file(tensors, path / "model.safetensors")
    return path


@functools.cache
def checkpoint():
    return Checkpoint(MODULE, target_params(), CONFIG, Path("tiny"))


def older(name):
    heights = {"0": "low", "1": "mid", "2": "high"}
    if name.startswith("fc_norm."):
        return f"model.aux_norm_{heights[name[8]]}.weight"
    return "model." + name.replace("layers.0.", "midlayer.")


@pytest.mark.parametrize("rename", [lambda name: name, older], ids=["names", "older names"])
def test_a_folder(tmp_path, rename):
    """What nobody reads may be there, and the target's arrays come with the draft."""
    own = np.random.default_rng(0).standard_normal((VOCAB, 32)).astype(np.float32)
    more = {"t2d": np.zeros(VOCAB, bool), rename("embed_tokens.weight"): own}
    found = load_draft(folder_for(tmp_path, rename=rename, **more), checkpoint())
    assert (found.kind, found.draft) == ("eagle3", Eagle3(DRAFT))
    np.testing.assert_array_equal(found.params["draft"].pop("embed_tokens"), own)
    wanted = params_for("swa", DRAFT).draft
    assert jax.tree.structure(found.params) == jax.tree.structure(wanted)
    for ours, told in zip(*map(jax.tree.leaves, (found.params["draft"], wanted["draft"])), strict=True):
        np.testing.assert_array_equal(ours, told.astype(jnp.bfloat16) if told.dtype == jnp.float32 else told)
    assert found.params["lm_head"] is checkpoint().params["params"]["lm_head"]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"lacks": ("d2t",)}, "lacks tensors: d2t"),
        ({"lacks": ("fc.weight", "lm_head.weight")}, "lacks tensors: fc.weight, lm_head.weight"),
        ({"fc_norm.2.weight": np.ones(32, np.float32)}, "no place for: fc_norm.2.weight"),
        ({"fc.weight": np.zeros((32, 96), np.float32)}, r"fc.weight \(32, 96\) instead of \(32, 64\)"),
        ({"d2t": IDS.astype(np.int64)}, "d2t leads to id .* outside the target's 61: it holds what is added"),
        ({"d2t": np.r_[1, np.zeros(22, np.int64)]}, "d2t leads from two ids"),
        ({"d2t": np.zeros(23, np.float32)}, "not integers: d2t"),
    ],
)
def test_folders_that_are_refused(tmp_path, how, words):
    with pytest.raises(InputError, match=words):
        load_draft(folder_for(tmp_path, **how), checkpoint())


def test_a_vocabulary_of_the_targets_size(tmp_path):
    """Then ids may be the target's own, without a map."""
    config = dataclasses.replace(DRAFT, draft_vocab_size=VOCAB)
    found = load_draft(save_draft(tmp_path, config, random_draft_params(config, 0)), checkpoint())
    assert "d2t" not in found.params["draft"] and found.params["draft"]["lm_head"].shape == (VOCAB, 32)
    assert found.draft.target_ids(found.params, jnp.arange(VOCAB)).tolist() == [*range(VOCAB)]


def test_other_kinds(tmp_path):
    folder = folder_for(tmp_path)
    with pytest.raises(InputError, match="kind 'eagle3', and 'dflash' is asked for"):
        load_draft(folder, checkpoint(), kind="dflash")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "architectures": ["DFlashDraftModel"]}))
    with pytest.raises(InputError, match=str(folder)):
        load_draft(folder, checkpoint())

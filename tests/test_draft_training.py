"""Training of drafts: small, on the CPU, for a target whose text is known: each token is followed by the next one of a
short cycle."""

import dataclasses
import functools
import json
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")
pytest.importorskip("matplotlib")  # of the extra `train`; flax brings the rest of it along

from test_training import SOURCES, made_file
from tiny_models import FAST_COMPILE, GLM_CONFIG

import jaxspec
from jaxspec.drafting import train, train_block, train_common, train_mtp, train_target
from jaxspec.drafting.train_common import SHAPES, DraftSettings
from jaxspec.errors import InputError
from jaxspec.models import corpus
from jaxspec.models.checkpoint import Checkpoint, load, random_params, save
from jaxspec.models.config import Qwen3Config
from jaxspec.models.draft_checkpoint import load_draft, shared_arrays
from jaxspec.models.glm import Glm

VOCAB, CYCLE, GAMMA = 320, 8, 3
CONFIG = Qwen3Config(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    windows=(8, None),
    max_position_embeddings=128,
    tie_word_embeddings=False,
)
SETTINGS = DraftSettings(
    length=40, batch=8, anchors=16, own_share=0.5, steps_a_dispatch=20, warmup=5, adam_rate=2e-2, seed=3
)
PLAN = train.Plan(
    "dspark",
    preset="tiny",
    num_drafts=GAMMA,
    own_batch=8,
    renew_every=2,
    rounds_every=5,
    rounds_prompts=2,
    rounds_length=12,
    rounds_new=25,  # the first token, and six whole rounds of four
    eval_tokens=200,
    keep_seconds=1000.0,
)
BLOCKS = {"sliding": "blocks", "full": "blocks"}


@pytest.fixture(scope="module", autouse=True)
def greedy():
    """The target writes greedily: a program that samples takes three times as long to compile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_target, "TEMPERATURES", (0.0,))
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A mini corpus."""
    out = tmp_path_factory.mktemp("corpus")
    documents = [corpus.Document("made", f"pkg/file_{i}.py", made_file(i)) for i in range(60)]
    corpus.build(out, documents, SOURCES, vocab_size=VOCAB, share=0.1, seed=0, num_prompts=1)
    return out


@pytest.fixture(scope="module")
def target(text, tmp_path_factory):
    """Token 8 n + i is followed by 8 n + (i + 1) % 8: the head's row of a token is the embedding of the one before."""
    params = random_params(CONFIG, seed=0)
    tree = params["params"]
    token = np.arange(VOCAB)
    for layer in range(CONFIG.num_hidden_layers):  # too faint to say otherwise
        for name in ("o_proj", "down_proj"):
            tree[f"layers_{layer}"][name] *= 0.02
    tree["lm_head"] = 4 * tree["embed_tokens"][token // CYCLE * CYCLE + (token - 1) % CYCLE]
    folder = tmp_path_factory.mktemp("target")
    save(folder, CONFIG, params, jnp.float32, corpus.Tokenizer.from_file(str(text / "tokenizer.json")))
    return load(folder)


def run(target, text, out, plan=PLAN, settings=SETTINGS, **more):
    lines = []
    record = train.train(target, text, out, plan, settings, options=FAST_COMPILE, report=lines.append, **more)
    return record, lines


@pytest.fixture(scope="module")
def trained(target, text, tmp_path_factory):
    out = tmp_path_factory.mktemp("draft")
    return out, *run(target, text, out, steps=200)


def test_a_draft_of_repetitive_text_is_accepted(target, text, trained):
    _, record, _ = trained
    first, last = record["curve"][0], record["curve"][-1]
    assert last["nats"] < 0.5 * first["nats"]
    assert record["rounds"][0]["accept_length"] < 2
    assert record["heldout"]["rounds"]["accept_length"] > 0.75 * (GAMMA + 1)
    assert min(record["heldout"]["rounds"]["acceptance"]) > 0.6
    assert record["heldout"]["teacher_forced"]["tokens_per_verify"] > 2


def test_what_is_written(target, text, trained):
    out, record, lines = trained
    assert sorted(path.name for path in out.iterdir()) == [
        "checkpoints", "config.json", "model.safetensors", "training.json", "training.png",
    ]  # fmt: skip
    assert json.loads((out / "training.json").read_text()) == json.loads(json.dumps(record))
    assert record["finished"] and record["settings"]["seed"] == 3 and record["device"] and record["versions"]["jax"]
    assert [point["step"] for point in record["curve"]] == list(range(20, 201, 20))
    assert [point["step"] for point in record["rounds"]] == [0, 100, 200]
    assert any("ETA" in line for line in lines)
    draft = load_draft(out, target)
    assert draft.kind == "dspark" and draft.draft.config.num_drafts == GAMMA and not draft.notes


def test_a_stopped_run_keeps_what_there_is_and_resumes_to_the_same_weights(target, text, trained, tmp_path):
    def stop(line):
        if line.startswith("step    80"):
            os.kill(os.getpid(), signal.SIGTERM)

    plan, before = dataclasses.replace(PLAN, keep_seconds=0.0), signal.getsignal(signal.SIGTERM)
    record = train.train(target, text, tmp_path, plan, SETTINGS, steps=200, options=FAST_COMPILE, report=stop)
    reached = record["curve"][-1]["step"]
    assert signal.getsignal(signal.SIGTERM) == before
    assert not record["finished"] and reached in (80, 100, 120)
    assert load_draft(tmp_path, target).kind == "dspark"
    with pytest.raises(InputError, match="--resume"):
        run(target, text, tmp_path, plan, steps=200)
    with pytest.raises(InputError, match="batch"):
        run(target, text, tmp_path, plan, dataclasses.replace(SETTINGS, batch=4), steps=200, resume=True)

    record, lines = run(target, text, tmp_path, PLAN, steps=200, resume=True)
    assert f"resumed at step {reached}" in lines
    assert (tmp_path / "model.safetensors").read_bytes() == (trained[0] / "model.safetensors").read_bytes()
    whole = trained[1]
    assert [point["nats"] for point in record["curve"]] == [point["nats"] for point in whole["curve"]]
    assert record["heldout"] == whole["heldout"]


@pytest.mark.parametrize(
    ("kind", "windows"), [("dspark", (None,)), pytest.param("dflash", (6,), marks=pytest.mark.slow)]
)
def test_the_loss_computes_what_decoding_computes(target, kind, windows):
    learner = train_block.make_learner(kind, target, SHAPES["tiny"], GAMMA, None, BLOCKS)
    config = dataclasses.replace(learner.draft.config, windows=windows, causal=())
    learner = train_block.BlockLearner(dataclasses.replace(learner.draft, config=config))
    params = learner.init(jax.random.key(0), target, jnp.full((len(learner.taps),), 3.0))
    seen = []

    class Watched(type(learner.drafter())):
        def choose(self, params, logits, *others):
            jax.debug.callback(lambda rows: seen.append(np.asarray(rows)), logits)
            return super().choose(params, logits, *others)

    shared = shared_arrays(target.params)
    weights = learner.decode_params(params, shared, jnp.float32)
    prompt = np.random.default_rng(1).integers(0, VOCAB, 13)
    shape = {"batch_size": 1, "context_len": 64, "max_new_tokens": 6, "page_size": 4, "prefill_chunk": 8}
    config = jaxspec.SpecConfig(num_draft_tokens=GAMMA + 1, **shape)
    step = jaxspec.make_spec_step(target.model, Watched(learner.draft), config, options=FAST_COMPILE)
    weights = jaxspec.Params(target.params, weights)
    state, _ = step.prefill(weights, jaxspec.init_state(target.model, step.drafter, config, [prompt]))
    lengths = []
    for _ in range(2):
        lengths.append(int(jaxspec.requests_of(state).seq_len[1]))
        state, _ = step(weights, state)
    jax.effects_barrier()
    tokens = np.asarray(state.tokens)[1:, :24]
    batch = train_target.make_batch(target, learner.taps, BLOCKS)(target.params, jnp.asarray(tokens))
    scores = np.asarray(learner.ahead(params, batch, jnp.asarray([lengths], jnp.int32)))[0]
    for length, decoded, trained in zip(lengths, seen, scores, strict=True):
        if kind == "dspark":
            previous = jnp.asarray(tokens[0, length : length + GAMMA])
            decoded = decoded + np.asarray(learner.draft.markov(weights.draft, previous))
        np.testing.assert_allclose(decoded[0], trained, rtol=0, atol=2e-5)


def test_prediction_blocks_are_trained_alone(tmp_path):
    params = random_params(GLM_CONFIG, seed=0)
    blocks = params.pop("mtp")
    target = Checkpoint(Glm(GLM_CONFIG), params, GLM_CONFIG, tmp_path, blocks)
    learner = train_mtp.make_learner("mtp", target, SHAPES["tiny"], 2, None, {"masked": "blocks"})
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, GLM_CONFIG.vocab_size, (2, 24)))
    state = learner.init(jax.random.key(0), target, jnp.ones(1))
    settings = dataclasses.replace(SETTINGS, adam_rate=1e-2)

    @functools.partial(jax.jit, compiler_options=FAST_COMPILE)
    def losses(state):
        batch = train_target.make_batch(target, (), {"masked": "blocks"})(target.params, tokens)

        def one(state, key):
            gradients, figures = jax.grad(learner.loss, has_aux=True)(state, batch, key, settings)
            return jax.tree.map(lambda p, g: p - 0.3 * g, state, gradients), figures["nats"]

        state, nats = jax.lax.scan(one, state, jax.random.split(jax.random.key(1), 30))
        return state, nats, learner.same(state, batch, jnp.arange(1, 23).reshape(1, -1).repeat(2, axis=0))

    state, nats, same = losses(state)
    assert nats[-1] < 0.9 * nats[0] and same.shape == (2, 22, 2)
    learner.save(tmp_path / "out", state, target)
    stored = learner.restore(tmp_path / "out", target)
    assert jax.tree.structure(stored) == jax.tree.structure(state)
    written = load(tmp_path / "out").params["params"]["layers_0"]["down_proj"]
    np.testing.assert_array_equal(written, np.asarray(params["params"]["layers_0"]["down_proj"].astype(jnp.bfloat16)))


def test_position_weights_follow_the_expected_run():
    chance = jnp.array([[0.5, 0.25, 0.5]])
    gain = [1 + 0.25 * 1.5, 0.5 * 1.5, 0.5 * 0.25]
    weights = train_common.position_weights(chance, DraftSettings(reach_share=1.0))
    np.testing.assert_allclose(weights[0], np.array(gain) / np.mean(gain), rtol=1e-6)
    plain = train_common.position_weights(chance, DraftSettings(reach_share=0.0, position_decay=2.0))
    np.testing.assert_allclose(plain[0, 1:] / plain[0, :-1], np.exp([-0.5, -0.5]), rtol=1e-6)
    np.testing.assert_allclose(plain.mean(), 1, rtol=1e-6)


def test_own_text_is_the_targets_and_the_same_again(target, text):
    stream = corpus.read_tokens(text / "train.tokens.xz")
    writer = train_target.Writer(target, stream, length=40, batch=8, seed=0)  # the shapes of the runs above
    sequences = writer.write(0)
    assert sequences.shape == (8, 40) and sequences.dtype == np.uint16
    np.testing.assert_array_equal(writer.write(0), sequences)
    assert (writer.write(1) != sequences).any()
    written = sequences[:, 19:].astype(int)  # at most 19 tokens are the corpus's
    assert (written[:, 1:] == written[:, :-1] // CYCLE * CYCLE + (written[:, :-1] + 1) % CYCLE).all()


@pytest.mark.slow
def test_short_texts_follow_each_other(target, text):
    stream = corpus.read_tokens(text / "train.tokens.xz")
    sequences = train_target.Writer(target, stream, length=38, batch=4, seed=0, text_length=20).write(0)
    assert sequences.shape == (4, 38)
    assert (sequences[:, 19] == corpus.END_OF_TEXT_ID).all()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "2", "--minutes", "1"], "exactly one of"),
        ([], "exactly one of"),
        (["--steps", "2", "--drafter", "medusa"], "medusa"),
        (["--steps", "2", "--anchors", "0"], "anchors=0"),
        (["--steps", "2", "--length", "4096"], "context"),
        (["--steps", "2", "--own_share", "2"], "own_share"),
        (["--steps", "2", "--taps", "1,x"], "taps"),
        (["--steps", "2", "--taps", "1,9"], "9"),
        (["--steps", "2", "--drafter", "mtp"], "MTP"),
        (["--steps", "2", "--resume"], "resume"),
        (["--steps", "many"], "steps"),
        (["--steps", "2", "--target", "nothing"], "nothing"),
        (["--steps", "2", "--corpus", "nowhere"], "nowhere"),
    ],
)
def test_bad_flags_give_one_line(target, text, tmp_path, capsys, words, message):
    given = ["--drafter", "dspark", "--target", str(target.folder), "--corpus", str(text), "--out", str(tmp_path / "o")]
    shape = ["--preset", "tiny", "--length", "40", "--anchors", "8", "--rounds_length", "12", "--rounds_new", "24"]
    assert train.main([*given, *shape, *words]) == 2
    _, err = capsys.readouterr()
    assert message in err and err.startswith("error: ") and err.count("\n") == 1, err


def test_a_corpus_cut_otherwise_is_refused(target, text, tmp_path):
    other = Checkpoint(target.module, target.params, target.config, tmp_path)
    train._tokenizer(text, other)  # a target without a tokenizer takes any that fits
    documents = [corpus.Document("made", f"{i}.py", made_file(1000 + i)) for i in range(20)]
    corpus.build(tmp_path / "c", documents, SOURCES, vocab_size=VOCAB, share=0.1, seed=0, num_prompts=1)
    with pytest.raises(InputError, match="other tokens"):
        train._tokenizer(tmp_path / "c", target)

"""What a recurrent layer is given and what becomes of its answer, in both kinds of memory; and a layer kind of one's
own under the step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hybrid_cases import NEW, read_states, run_by_rounds
from tiny_models import FAST_COMPILE, VOCAB, prompt
from unified_cases import initial

import jaxspec
from jaxspec.cache import LayerSpec, PoolLayout, StatePart, StateSpec, init_cache, init_pool
from jaxspec.generation.results import read_requests
from jaxspec.metadata import DecodeMetadata, DraftExtendMetadata, Ids, VerifyMetadata, WriteWindow
from jaxspec.recurrent import commit, take_pending
from jaxspec.steps import run_round
from pallas_kernels import CommitSteps, commit_track_indices

# Caches with states of several dtypes: entries of two layers, and one in between that has none.

PARTS = StatePart("short", (3, 8), "bfloat16"), StatePart("long", (2, 4, 4)), StatePart("seen", (8,), "int32")
SPEC = StateSpec(PARTS)
LAYERS = (SPEC, LayerSpec(2, 8), SPEC)
SLOTS = 6


def cache_of(memory, dtype):
    """An empty cache with addresses for at least SLOTS states."""
    if memory == "static":
        return init_cache(LAYERS, page_size=4, num_pages=3, num_swa_pages=1, num_states=SLOTS, dtype=dtype)
    layout = PoolLayout.for_pages(LAYERS, full=2, state=SLOTS, page_size=4, dtype=dtype)
    assert layout.num_pages("state") >= SLOTS
    assert layout.storage == {"bfloat16": "uint16", "float32": "uint32"}[dtype]
    return init_pool(layout)


MEMORIES = [("static", "float32"), ("unified", "bfloat16")]


@pytest.fixture(params=MEMORIES, ids=" ".join)
def cache(request):
    """A cache whose states all hold something."""
    cache = cache_of(*request.param)
    for layer in (0, 2):
        cache = cache.write_state(layer, jnp.arange(SLOTS), random_parts(layer, (SLOTS,)))
    return cache


def random_parts(seed, axes):
    """[*axes, *shape] of each part. Any bit may be set, those of a NaN and of denormal numbers included, but for the
    short floats: a CPU has none and computes with long ones, so that of a NaN among them bits are lost."""
    rng, arrays = np.random.default_rng(seed), []
    for part in PARTS:
        raw = rng.integers(0, 256, (*axes, part.nbytes), np.uint8)
        if part.dtype == "bfloat16":
            raw[..., 1::2] &= 0xBF
        arrays.append(raw.view(jnp.dtype(part.dtype)).reshape(*axes, *part.shape))
    return tuple(arrays)


def assert_same_bits(got, want):
    """Also of NaN."""
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def metadata(kind, slots, positions, **others):
    """What `recur` looks at."""
    positions = jnp.asarray(positions, jnp.int32)
    none = dict.fromkeys(field.name for field in dataclasses.fields(kind))
    window = WriteWindow(virtual_loc=None, full_loc=None, swa_loc=None, positions=positions)
    slots = None if slots is None else jnp.asarray(slots, jnp.int32)
    return kind(**none | {"window": window, "state_slots": slots} | others)


def prefill(slots, starts, lengths, width=4):
    positions = np.asarray(starts)[:, None] + np.arange(width)
    return metadata(DraftExtendMetadata, slots, positions, extend_lens=jnp.asarray(lengths, jnp.int32))


def verify(slots, starts, width=3):
    return metadata(VerifyMetadata, slots, np.asarray(starts)[:, None] + np.arange(width))


def changed(arrays, **values):
    """Copies of arrays [slots, ...] with other values in some slots, named as `slot3`."""
    copies = [np.array(array) for array in arrays]
    for name, parts in values.items():
        for copy, part in zip(copies, parts, strict=True):
            copy[int(name[4:])] = part
    return copies


def spy(after):
    """An update that answers with `after`, and what it was asked."""
    asked, after = {}, tuple(map(jnp.asarray, after))

    def update(parts, real, keep):
        asked.update(parts=parts, real=np.asarray(real).tolist(), keep=keep)
        return jnp.float32(7), after

    return update, asked


# recur


def test_a_prefill_stores_the_state_after_the_last_row(cache):
    """Four lanes: one goes on, one begins, one is padding that looks as if it began, one has no token in this chunk."""
    before = cache.read_state(2, jnp.arange(SLOTS))
    after = random_parts(5, (4,))
    update, asked = spy(after)
    out, cache = jaxspec.recur(cache, 2, update, prefill([3, 1, -1, 4], [9, 0, 0, 6], [2, 4, 0, 0]))
    assert out == 7 and asked["keep"] == "last" and not cache.pending
    assert asked["real"] == [[True, True, False, False], [True] * 4, [False] * 4, [False] * 4]
    for part, stored in zip(asked["parts"], before, strict=True):
        assert_same_bits([part[0], part[3]], [stored[3], stored[4]])
        assert not np.asarray(part[1:3]).any()  # no NaN is not zero
    want = changed(before, slot3=[part[0] for part in after], slot1=[part[1] for part in after])
    now = cache.read_state(2, jnp.arange(SLOTS))
    assert_same_bits([part[1:] for part in now], [part[1:] for part in want])  # the sink holds anything


def test_a_verify_stores_nothing_and_keeps_every_row(cache):
    """Lengths have no say in who takes part: a request of length 0 does, padding of any length does not."""
    before = jax.tree.leaves(cache)
    stored = cache.read_state(0, jnp.array([5, 2]))
    rows = random_parts(6, (4, 3))
    update, asked = spy(rows)
    out, cache = jaxspec.recur(cache, 0, update, verify([5, 2, -1, -1], [8, 0, 0, 8]))
    assert out == 7 and asked["keep"] == "rows"
    assert asked["real"] == [[True] * 3, [True] * 3, [False] * 3, [False] * 3]
    for part, was in zip(asked["parts"], stored, strict=True):
        assert_same_bits([part[0]], [was[0]])
        assert not np.asarray(part[1:]).any()
    cache, pending = take_pending(cache)
    assert_same_bits(jax.tree.leaves(cache), before)
    assert [*pending] == [0]
    assert_same_bits(pending[0], rows)


def test_commit_stores_the_row_it_is_told(cache):
    """-1 for the row or for the slot stores nothing, in no slot and not in the sink; other layers' states stay."""
    update = {layer: random_parts(20 + layer, (4, 3)) for layer in (0, 2)}
    before = {layer: cache.read_state(layer, jnp.arange(SLOTS)) for layer in (0, 2)}
    for layer, rows in update.items():
        _, cache = jaxspec.recur(cache, layer, spy(rows)[0], verify([5, 2, 1, -1], [8, 3, 4, 0]))
    cache, pending = take_pending(cache)
    assert [*pending] == [0, 2]
    cache = commit(cache, pending, jnp.array([5, 2, 1, -1]), jnp.array([2, 0, -1, 1]))
    for layer, rows in update.items():
        want = changed(before[layer], slot5=[part[0, 2] for part in rows], slot2=[part[1, 0] for part in rows])
        assert_same_bits(cache.read_state(layer, jnp.arange(SLOTS)), want)


def test_a_state_at_a_grid_point_can_be_kept_too(cache):
    """Tracking: a second commit of the same rows, to slots of its own. 62 + 3 tokens pass the grid point 64 in row 1,
    63 + 1 reach it in row 0, 64 + 4 pass none; the last lane is padding, and the third one's slot is gone."""
    lengths, accepted = jnp.array([62, 63, 64, 0]), jnp.array([3, 1, 4, 0])
    out = CommitSteps(jnp.full(4, -7), jnp.full(4, -8))
    steps = commit_track_indices(accepted, lengths, out, num_draft_tokens=4, interval=64)
    before, rows = cache.read_state(2, jnp.arange(SLOTS)), random_parts(8, (4, 4))
    _, cache = jaxspec.recur(cache, 2, spy(rows)[0], verify([5, 2, 1, -1], [62, 63, 64, 0], width=4))
    cache, pending = take_pending(cache)
    cache = commit(cache, pending, jnp.array([5, 2, 1, -1]), steps.last_step)
    cache = commit(cache, pending, jnp.array([3, 4, -1, -1]), steps.track_step)
    places = {"slot5": (0, 2), "slot2": (1, 0), "slot1": (2, 3), "slot3": (0, 1), "slot4": (1, 0)}
    want = changed(before, **{slot: [part[place] for part in rows] for slot, place in places.items()})
    assert_same_bits(cache.read_state(2, jnp.arange(SLOTS)), want)


def test_states_leave_the_rest_of_the_pool_alone():
    """Written by each of the two ways, every byte that is not the state's keeps its value."""
    cache = cache_of("unified", "bfloat16")
    marks = np.random.default_rng(0).integers(0, 256, cache.layout.nbytes, np.uint8)
    cache = cache.replace(buffer=jnp.asarray(marks.view(cache.layout.storage).reshape(cache.buffer.shape)))
    entry = cache.layout.entries["state"]
    mine = np.zeros(len(marks), bool)
    for span in entry.spans:
        if span.owner == ("layers", 2):
            mine[4 * entry.size + span.start :][: span.size] = True
    parts = tuple(map(jnp.asarray, random_parts(1, (1, 2))))
    written = cache.write_state(2, jnp.array([4]), tuple(part[:, 0] for part in parts))
    committed = cache.commit_state(2, jnp.array([4]), jnp.array([1]), parts)
    for after in (written, committed):
        other = np.asarray(after.buffer).reshape(-1).view(np.uint8) != marks
        assert other[mine].mean() > 0.9 and not other[~mine].any()


def test_metadata_that_no_state_can_run_on_are_refused(cache):
    update, asked = spy(())
    with pytest.raises(TypeError, match="state_slots is None: they were built for a model without recurrent layers"):
        jaxspec.recur(cache, 0, update, verify(None, [3]))
    with pytest.raises(TypeError, match="DecodeMetadata: a recurrent layer runs in a verify or a prefill"):
        jaxspec.recur(cache, 0, update, metadata(DecodeMetadata, [1], [[3]]))
    with pytest.raises(TypeError, match="layer 1 is an attention layer: it has rows and no state"):
        jaxspec.recur(cache, 1, update, verify([1], [3]))
    wrong = verify([1], [3]).replace(state_slots=Ids(jnp.array([1]), "full"))
    with pytest.raises(TypeError, match="ids are 'full' where 'state' ones are needed"):
        jaxspec.recur(cache, 0, update, wrong)
    assert not asked


def test_states_of_another_shape_are_refused(cache):
    """As many numbers in another order would be other numbers."""
    short, long, seen = random_parts(5, (1,))
    update, _ = spy((short.swapaxes(1, 2), long, seen))
    with pytest.raises(
        ValueError, match=r"layer 0: update returned parts of shapes \[\(1, 8, 3\), .* they are \[\(1, 3, 8\)"
    ):
        jaxspec.recur(cache, 0, update, prefill([3], [9], [2]))
    with pytest.raises(ValueError, match=r"with keep='rows' they are \[\(1, 3, 3, 8\), "):
        jaxspec.recur(cache, 0, spy((short, long, seen))[0], verify([3], [9]))


# A layer kind of one's own: all that the step knows of it is its StateSpec


WIDTH = 8
AVERAGE = StateSpec((StatePart("mean", (WIDTH,)), StatePart("tokens", (8,), "int32")))


def averaged(params, mean, count, token):
    """One token into the average, which the number of tokens before turns a little; what the layer says after it."""
    mean = 0.75 * jnp.roll(mean, 1, axis=-1) + params["embed"][token] * (1 + count[..., :1] % 5)
    return mean, count + 1


@dataclasses.dataclass(frozen=True)
class Averages:
    """A model of nothing but a moving average of its tokens, and a count of them."""

    def __call__(self, params, tokens, positions, cache, metadata):
        def update(parts, real, keep):
            def step(parts, row):
                token, real = row
                after = averaged(params, *parts, token)
                parts = tuple(jnp.where(real[:, None], new, old) for new, old in zip(after, parts, strict=True))
                return parts, parts

            last, rows = jax.lax.scan(step, parts, (tokens.T, real.T))
            rows = jax.tree.map(lambda part: jnp.moveaxis(part, 0, 1), rows)
            return rows[0], rows if keep == "rows" else last

        hidden, cache = jaxspec.recur(cache, 0, update, metadata)
        wanted = hidden
        if metadata.logit_rows is not None:
            wanted = jnp.take_along_axis(hidden, metadata.logit_rows[:, :, None], axis=1)
        return wanted @ params["head"], hidden, cache


def average_params():
    rng = np.random.default_rng(0)
    return {"embed": rng.normal(size=(VOCAB, WIDTH)).astype("f4"), "head": rng.normal(size=(WIDTH, VOCAB)).astype("f4")}


def average_text(params, ids, count):
    """Token by token, in float64."""
    mean, said = np.zeros(WIDTH), []
    for seen in range(len(ids) + count - 1):
        token = [*ids, *said][seen]
        mean = 0.75 * np.roll(mean, 1) + params["embed"][token].astype(float) * (1 + seen % 5)
        if seen >= len(ids) - 1:
            said.append(int(np.argmax(mean @ params["head"])))
    return said


def test_a_state_that_the_model_leaves_alone_is_an_error():
    """It would never be committed, and its text would be wrong without a word."""

    def apply(params, tokens, positions, cache, metadata):
        hidden = params["embed"][tokens]
        return hidden @ params["head"], hidden, cache

    model = jaxspec.Model(apply, (AVERAGE,), VOCAB, 128)
    config = jaxspec.SpecConfig(batch_size=1, num_draft_tokens=2, context_len=64, max_new_tokens=4)
    spec = jaxspec.make_spec_step(model, jaxspec.NgramDrafter(), config)
    params = jaxspec.Params(jax.tree.map(jnp.asarray, average_params()))
    state = jaxspec.init_state(model, spec.drafter, config, [prompt(5)])
    with pytest.raises(TypeError, match=r"has called jaxspec.recur for layers \[\]; those with a state are \[0\]"):
        jax.eval_shape(lambda state: run_round(spec, params, state), state)


@pytest.mark.parametrize(("memory", "dtype"), MEMORIES)
def test_a_layer_kind_of_ones_own(memory, dtype):
    """Declared by a StateSpec it runs, is committed and rolled back under the step as it is."""
    model = jaxspec.Model(Averages(), (AVERAGE,), VOCAB, 128, dtype)
    config = jaxspec.SpecConfig(
        batch_size=3,
        num_draft_tokens=4,
        context_len=128,
        max_new_tokens=NEW,
        page_size=8,
        prefill_chunk=16,
        memory=memory,
    )
    spec = jaxspec.make_spec_step(model, jaxspec.NgramDrafter(), config, options=FAST_COMPILE)
    params, prompts = average_params(), [prompt(n) for n in (17, 1, 40)]
    counts = []

    def watch(state):
        lengths = np.asarray(jaxspec.requests_of(state).seq_len)
        for (row, _), (_, tokens) in read_states(state).items():
            counts.append((tokens == lengths[row]).all())

    state = run_by_rounds(spec, jaxspec.Params(params), initial(spec, prompts), watch=watch)
    results = read_requests(state, prompts)
    want = [average_text(params, ids, NEW) for ids in prompts]
    assert [r.token_ids for r in results] == want and min(len(set(text)) for text in want) >= 10
    assert all(counts) and len(counts) > NEW
    accepted = {n for r in results for n in r.accepted_drafts}
    assert 0 in accepted and len(accepted) > 1

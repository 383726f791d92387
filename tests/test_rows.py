"""Rows and weights: what a layer hands to kernels, that it says the same with and without them, and who hands over."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
from tiny_models import CONFIG, FAST_COMPILE, VOCAB

import jaxspec
from jaxspec import models
from jaxspec.attention.heads import Heads
from jaxspec.attention.paged import store
from jaxspec.benchmarks import launches
from jaxspec.cache import LayerSpec, init_cache
from jaxspec.generation.loops import run_to_end
from jaxspec.generation.results import read_requests
from jaxspec.models.block_draft import BlockDraft
from jaxspec.models.draft_checkpoint import random_draft_params
from jaxspec.models.qwen3 import rotary_angles
from jaxspec.models.rows import PLAIN, Rows
from jaxspec.steps.step import jit_with_state
from pallas_kernels.dispatch import supported

KERNELS = Rows("interpret")
ONE_LAYER = dataclasses.replace(CONFIG, num_hidden_layers=1, windows=(None,))
FEW = {"row_products": 2, "row_sums": 1}  # launches a layer of what few rows in bfloat16 go through
ALONE, STORED = FEW | {"head_rotary": 1}, FEW | {"store_heads": 1}  # without a cache and with one
each_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def tokens_of(batch, rows):
    return jnp.asarray(np.random.default_rng(rows).integers(0, VOCAB, (batch, rows)), jnp.int32)


def forward(params, tokens, rows, dtype, config=CONFIG):
    """(logits, hidden) of whole texts; without `rows` the module's default."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    given = {} if rows is None else {"rows": rows}
    attend = models.dense_attend(config.windows)
    return models.Qwen3(config, jnp.dtype(dtype)).apply(params, tokens, positions, attend, **given)[:2]


@functools.cache
def compiled(rows, dtype):
    return jax.jit(functools.partial(forward, rows=rows, dtype=dtype), compiler_options=FAST_COMPILE)


def run_forward(tokens, rows, dtype):
    return compiled(rows, dtype)(tiny_models.target_params(), tokens)


def kernels_of(function, *arguments):
    """{kernel: launches} of a function lowered for CUDA."""
    found, loops = launches.kernels(jax.make_jaxpr(function)(*arguments).jaxpr)
    assert not loops
    total = collections.Counter()
    for (_, name), times in found.items():
        total[name] += times
    return dict(total)


def near(found, want, bound):
    """Within `bound` of the largest number."""
    found, want = np.asarray(found, np.float64), np.asarray(want, np.float64)
    np.testing.assert_allclose(found, want, rtol=0, atol=bound * np.abs(want).max())


# The operations -------------------------------------------------------------------------------------------------------


class Layer:
    """Rows [B, T, 200] at positions of their own, and the weights of a layer."""

    K, HEADS, KV_HEADS, HEAD_DIM, INNER = 200, 3, 1, 24, 72
    EPS, SIZES = 0.25, {"page_size": 4, "num_pages": 9, "num_swa_pages": 1}  # an eps that is felt

    def __init__(self, B=4, T=2, weight_dtype="float32"):
        rng = np.random.default_rng(0)
        self.widths = self.HEADS * self.HEAD_DIM, *(self.KV_HEADS * self.HEAD_DIM,) * 2
        shapes = [(self.K, width) for width in (*self.widths, self.INNER, self.INNER)]
        shapes.append((self.widths[0], self.K))
        draw = [rng.normal(size=shape) / np.sqrt(shape[0]) for shape in shapes]
        self.x = jnp.asarray(rng.normal(size=(B, T, self.K)) * rng.uniform(0.1, 3, (B, T, 1)), jnp.float32)
        self.weights = tuple(jnp.asarray(weight, jnp.dtype(weight_dtype)) for weight in draw)
        self.positions = jnp.asarray(rng.integers(0, 1000, (B, T)), jnp.int32)
        self.scales = tuple(jnp.asarray(rng.uniform(0.5, 2, self.HEAD_DIM), jnp.float32) for _ in range(2))
        self.norm = jnp.asarray(rng.uniform(0.5, 2, self.K), jnp.float32)

    def run(self, rows, dtype, chosen=slice(None), *, cached=False):
        """q, k, v, what is added and the gated rows, of some requests.

        cached: k and v go to a cache, as in a step, and come from it.
        """
        spec = LayerSpec(self.KV_HEADS, self.HEAD_DIM)

        @functools.partial(jax.jit, compiler_options=FAST_COMPILE)
        def call(x, positions):
            x = x.astype(dtype)
            heads = Heads(*rotary_angles(positions, self.HEAD_DIM, 1e4), self.scales, self.EPS)
            # A page, and more, of the sink is in front of them.
            slots = 5 + jnp.arange(positions.size, dtype=jnp.int32).reshape(positions.shape)
            seen = {}

            def attend(layer, q, k, v, cache, heads=None):
                if cached:
                    q, cache = store(cache, layer, slots, q, k, v, heads=heads, backend=supported(rows.backend))
                    k, v = cache.read(layer, slots)
                seen["heads"] = q, k, v
                return q, cache

            rows_ = dataclasses.replace(rows, turns=cached)
            norm, *weights = (self.norm, self.EPS), *self.weights
            projected, heads = rows_.projected(x, norm, tuple(weights[:3]), self.HEAD_DIM, heads, dtype)
            out, _ = rows_.attend(0, projected, heads, attend, init_cache([spec], dtype=dtype, **self.SIZES))
            added, normed = rows_.added(x, out.reshape(*x.shape[:2], self.widths[0]), weights[5], norm, dtype)
            return *seen["heads"], added, rows_.gated(normed, *weights[3:5], dtype)

        found = call(self.x[chosen], self.positions[chosen])
        assert all(y.dtype == dtype for y in found)
        return [np.asarray(y, np.float64) for y in found]

    def oracle(self, dtype):
        """float64, of rows and weights as they are in the dtype."""
        x, *weights = (np.asarray(jnp.asarray(y, dtype), np.float64) for y in (self.x, *self.weights))

        def normed(y, scale):
            mean = np.square(y).mean(axis=-1, keepdims=True)
            return y / np.sqrt(mean + self.EPS) * np.asarray(scale, np.float64)

        q, k, v = (normed(x, self.norm) @ weight for weight in weights[:3])
        q, k, v = (y.reshape(*x.shape[:2], -1, self.HEAD_DIM) for y in (q, k, v))
        frequency = 1e4 ** (-np.arange(0, self.HEAD_DIM, 2) / self.HEAD_DIM)
        turn = np.exp(1j * np.asarray(self.positions)[..., None, None] * frequency)

        def turned(y, scale):
            y = normed(y, scale)
            pairs = (y[..., : self.HEAD_DIM // 2] + 1j * y[..., self.HEAD_DIM // 2 :]) * turn
            return np.concatenate([pairs.real, pairs.imag], axis=-1)

        q = turned(q, self.scales[0])
        added = x + q.reshape(*x.shape[:2], -1) @ weights[5]
        gate, up = (normed(added, self.norm) @ weight for weight in weights[3:5])
        return q, turned(k, self.scales[1]), v, added, gate / (1 + np.exp(-gate)) * up


@pytest.mark.parametrize(
    "rows", [PLAIN, KERNELS, Rows("mosaic"), Rows("checked"), pytest.param(Rows(None), marks=pytest.mark.gpu)], ids=str
)
@pytest.mark.parametrize("weight_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cached", [False, True])
@each_dtype
def test_what_a_layer_asks_for(rows, weight_dtype, dtype, cached):
    """Also on executors that run other kernels of a program; and in the dtype of the model, not of its weights."""
    layer = Layer(weight_dtype=weight_dtype)
    shapes = (4, 2, 3, 24), (4, 2, 1, 24), (4, 2, 1, 24), (4, 2, 200), (4, 2, 72)
    # Angles are float32, of up to 1000 radians. In bfloat16 v is rounded twice, what is added and gated most often.
    bounds = [2e-4] * 5 if dtype == "float32" else [0.015, 0.015, 0.008, 0.015, 0.025]
    found, wanted = layer.run(rows, dtype, cached=cached), layer.oracle(dtype)
    for y, want, shape, bound in zip(found, wanted, shapes, bounds, strict=True):
        assert y.shape == shape
        near(y, want, bound)


@pytest.mark.parametrize("rows", [KERNELS, pytest.param(Rows(None), marks=pytest.mark.gpu)], ids=str)
@pytest.mark.parametrize("cached", [False, True])
def test_a_row_is_its_own_alone(rows, cached):
    """In bfloat16, whose products are the kernels': the same to the bit alone and among 8 rows."""
    layer = Layer(B=8, T=1)
    whole = layer.run(rows, "bfloat16", cached=cached)
    for chosen in ([3], [5, 6, 2, 1, 4]):
        for y, z in zip(layer.run(rows, "bfloat16", np.array(chosen), cached=cached), whole, strict=True):
            np.testing.assert_array_equal(y, z[chosen])


@each_dtype
@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_no_rows(shape, dtype):
    layer = Layer()
    layer.x, layer.positions = jnp.zeros((*shape, layer.K)), jnp.zeros(shape, jnp.int32)
    assert [y.shape for y in layer.run(KERNELS, dtype)] == [
        (*shape, 3, 24),
        (*shape, 1, 24),
        (*shape, 1, 24),
        (*shape, 200),
        (*shape, 72),
    ]


# A model --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8, 1), (1, 8), (2, 40)])  # the last one's rows are left to XLA
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-6), ("bfloat16", 0.02)])
def test_a_model_says_the_same_with_kernels(shape, dtype, bound):
    tokens = tokens_of(*shape)
    for found, want in zip(run_forward(tokens, KERNELS, dtype), run_forward(tokens, PLAIN, dtype), strict=True):
        near(found, want, bound)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="on a GPU XLA may cut its products by their rows")
def test_a_row_of_a_model_is_its_own_alone():
    """To the bit, up to the head, whose product is XLA's."""
    tokens = tokens_of(8, 1)
    _, hidden = run_forward(tokens, KERNELS, "bfloat16")
    for row in (0, 3, 7):
        np.testing.assert_array_equal(run_forward(tokens[row : row + 1], KERNELS, "bfloat16")[1], hidden[row : row + 1])


@pytest.mark.parametrize(
    ("dtype", "shape", "expected"),
    [
        ("bfloat16", (8, 1), ALONE),
        ("bfloat16", (2, 4), ALONE),
        ("bfloat16", (4, 16), ALONE),
        ("bfloat16", (5, 13), {"head_rotary": 1}),  # 65 rows
        ("float32", (8, 1), {"head_rotary": 1}),
    ],
)
def test_launches_of_a_layer(dtype, shape, expected):
    params = models.random_params(ONE_LAYER, 0)
    call = functools.partial(forward, rows=Rows(None), dtype=dtype, config=ONE_LAYER)
    assert kernels_of(call, params, tokens_of(*shape)) == expected


def test_launches_of_a_models_layers():
    call = functools.partial(forward, rows=Rows(None), dtype="bfloat16")
    expected = {name: CONFIG.num_hidden_layers * times for name, times in ALONE.items()}
    assert kernels_of(call, tiny_models.target_params(), tokens_of(2, 4)) == expected


# Who hands them over --------------------------------------------------------------------------------------------------


@each_dtype
def test_training_sees_no_kernel(dtype):
    """The default of a module is plain jax: nothing in it, nor in its gradient, is a kernel."""
    call = functools.partial(forward, rows=None, dtype=dtype)
    tokens = tokens_of(2, 4)

    def loss(params):
        return call(params, tokens)[0].sum()

    for function in (loss, jax.grad(loss)):
        assert kernels_of(function, tiny_models.target_params()) == {}


@each_dtype
def test_training_gathers_embeddings_alone(dtype):
    """Of rows that XLA multiplies jointly heads are cut out, not gathered: a gradient would scatter them."""
    tokens = tokens_of(4, 32)

    def loss(params):
        return forward(params, tokens, None, dtype)[0].sum()

    program = str(jax.make_jaxpr(jax.grad(loss))(tiny_models.target_params()))
    assert program.count(" gather[") == 1 and program.count(" scatter-add[") == 1


@pytest.mark.parametrize(
    ("rows", "dtype", "count", "ended"),
    [
        (Rows(None, turns=True), "bfloat16", 64, False),
        (Rows(None, turns=True), "bfloat16", 65, True),
        (Rows(None, turns=True), "float32", 8, True),
        (Rows(None, turns=True), "float16", 8, True),  # may not hold rows times a scale
        (Rows("reference", turns=True), "bfloat16", 8, True),
        (Rows(None), "bfloat16", 8, True),
    ],
)
@pytest.mark.parametrize("wide", [False, True])
def test_who_ends_the_norm_in_front_of_heads(monkeypatch, rows, dtype, count, ended, wide):
    """What turns them, of few rows in bfloat16 that are not too wide for the registers of a program."""
    layer = Layer(B=count, T=1)
    monkeypatch.setattr("jaxspec.models.rows.WIDEST", layer.K - wide)
    heads = Heads(*rotary_angles(layer.positions, layer.HEAD_DIM, 1e4), layer.scales)
    how = (layer.norm, layer.EPS), layer.weights[:3], layer.HEAD_DIM, heads, dtype
    found = jax.eval_shape(lambda x: rows.projected(x, *how)[1], layer.x.astype(dtype))
    assert (found.rows is None) == (ended or wide)
    assert found.rows is None or (found.rows.shape, found.rows_eps) == ((count, layer.K), layer.EPS)


def test_training_of_a_block_draft_sees_no_kernel():
    config = tiny_models.trained_draft("dflash")
    draft, tree = BlockDraft(config, "bfloat16"), random_draft_params(config, 0)
    shared = {"embed_tokens": jnp.ones((config.vocab_size, config.hidden_size))}
    tokens = tokens_of(2, 4)
    attend = models.dense_attend((None,) * config.num_hidden_layers)

    def rows(tree, **given):
        positions = jnp.broadcast_to(jnp.arange(4), (2, 4))
        return draft.rows({"draft": tree, **shared}, tokens, positions, attend, **given)[0]

    assert kernels_of(rows, tree) == {}
    found = kernels_of(functools.partial(rows, kernels=Rows(None)), tree)
    assert found == {name: config.num_hidden_layers * times for name, times in ALONE.items()}


def test_the_default_has_a_gradient():
    """By every weight that `Rows` sees, along the gradient itself, against a difference of two losses."""
    names = *(f"{name}_proj" for name in (*"qkv", "gate", "up")), "q_norm", "k_norm"
    tokens, params = tokens_of(2, 6), tiny_models.target_params()
    weight = np.random.default_rng(1).normal(size=(2, 6, VOCAB)).astype(np.float32)
    layer = params["params"]["layers_0"]

    @functools.partial(jax.jit, compiler_options=FAST_COMPILE)
    @jax.value_and_grad
    def loss(moves):
        moved = layer | {name: layer[name] + move for name, move in moves.items()}
        logits, _ = forward({"params": params["params"] | {"layers_0": moved}}, tokens, None, "float32")
        return jnp.sum(weight * jax.nn.log_softmax(logits))

    here = {name: np.zeros_like(layer[name]) for name in names}
    _, slopes = loss(here)
    for name in names:
        length, size = np.linalg.norm(slopes[name]), 3e-3 * np.linalg.norm(layer[name])
        step = size / length * slopes[name]
        (above, _), (below, _) = loss(here | {name: step}), loss(here | {name: -step})
        np.testing.assert_allclose((above - below) / (2 * size), length, rtol=0.02, err_msg=name)


def make_step(model, **how):
    target = jaxspec.from_qwen3(models.Qwen3(model, jnp.bfloat16))
    sizes = {"batch_size": 2, "num_draft_tokens": 4, "context_len": 64, "max_new_tokens": 12, "page_size": 16}
    config = jaxspec.SpecConfig(**sizes, prefill_chunk=20, **how)
    return jaxspec.make_spec_step(target, jaxspec.NgramDrafter(), config, options=FAST_COMPILE)


def test_a_step_with_kernels_says_the_same():
    """In bfloat16; of these texts the largest logit is 0.3 or more above the next, four times what kernels change."""
    prompts, said = [tiny_models.prompt(n) for n in (20, 28)], []
    for backend in ("interpret", "reference"):
        spec, params = make_step(ONE_LAYER, kernel_backend=backend), jaxspec.Params(tiny_models.target_params())
        state = jaxspec.init_state(spec.target, spec.drafter, spec.config, prompts)
        state, _ = jit_with_state(run_to_end, spec.options)(spec, params, state)
        said.append([result.token_ids for result in read_requests(state, prompts)])
    assert said[0] == said[1]
    assert all(len(ids) == 12 and len(set(ids)) > 4 for ids in said[0])


@pytest.mark.parametrize(("backend", "expected"), [(None, STORED), ("reference", {})])
def test_a_step_hands_over_its_kernels(backend, expected):
    """To every forward of its target: those of a verify are counted, and of a prompt's chunk."""
    arm = launches.Arm(
        "", "", "", make_step(CONFIG, kernel_backend=backend), jaxspec.Params(tiny_models.target_params())
    )
    traced = launches.trace(arm)
    for phase in ("verify", "prefill chunk"):
        found = {name: times for name, times in traced["other_kernels"][phase].items() if name in STORED}
        assert found == {name: CONFIG.num_hidden_layers * times for name, times in expected.items()}

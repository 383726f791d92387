"""The gated delta rule with a decay for each key channel against a float64 loop, and the bits of few rows."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick_compile
import recurrent_oracle
from delta_cases import CHUNK, HK, NAMES, K, V, assert_close, check, compiled, gradients, poisoned, sequential
from delta_cases import problem as scalar_problem

from jaxspec.models.train_delta import chunked_delta
from jaxspec.recurrent import gated_delta, kda_gate

problem = functools.partial(scalar_problem, channels=True)


@pytest.mark.parametrize("kind", ["mild", "strong", "alike"])
@pytest.mark.parametrize("T", [0, 1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_outputs_and_last_state(T, kind):
    check(problem(T, T, kind=kind))


@pytest.mark.parametrize("kind", ["mild", "strong", "alike"])
def test_chunk_of_64(kind):
    check(problem(1, 2 * 64 + 37, kind=kind, B=1, width=16), chunk=64)


@pytest.mark.parametrize("chunk", [1, 3, 24])
def test_chunks_of_any_size(chunk):
    check(problem(2, 43, kind="alike", B=1), chunk=chunk)


@pytest.mark.parametrize("ratio", [1, 4])
def test_value_heads_of_a_key_head(ratio):
    check(problem(3, CHUNK + 1, ratio=ratio))


@pytest.mark.parametrize("D", [1, 2, 8, 16, 17])
def test_state_after_each_row(D):
    for kind in ("mild", "strong", "alike"):
        arguments = problem(D, D, kind=kind)
        want, states = recurrent_oracle.gated_delta(*arguments)
        out, rows = compiled("rows")(*arguments)
        assert_close(out, want)
        assert_close(rows, states)


def test_channels_that_agree_are_a_decay_of_the_head():
    arguments = scalar_problem(4, 3 * CHUNK)
    wide = [*arguments]
    wide[3] = np.broadcast_to(arguments[3][..., None], (*arguments[3].shape, K))
    for one, other in zip(compiled()(*wide), compiled()(*arguments), strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("chunk", [16, 64])
def test_small_decay_after_large_ones(chunk):
    """exp(-0.001) to seven digits in channels whose sum before it is -1e6: prefix sums would have lost it."""
    T = 34
    arguments = list(problem(5, T, B=1))
    arguments[3] = np.full_like(arguments[3], -0.001)
    arguments[3][:, 3 : T - 4, :, ::2] = -3e4
    check(arguments, chunk=chunk)


@pytest.mark.parametrize("keep", ["last", "rows"])
@pytest.mark.parametrize("least", [-np.inf, -3e38])
def test_a_channel_that_forgets_everything(least, keep):
    """What came before reaches no output through it: its state may have held anything."""
    for T in (3, CHUNK + 3):
        arguments = list(problem(6, T))
        arguments[3][:, 2, :, 1] = least
        check(arguments)
        changed = [*arguments]
        changed[5] = arguments[5].copy()
        arguments[3][:, 0, :, 1] = changed[3][:, 0, :, 1] = least
        changed[5][..., 1] *= 100
        for one, other in zip(compiled(keep)(*arguments), compiled(keep)(*changed), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("T", [1, CHUNK, 2 * CHUNK + 3])
def test_rows_that_are_not_real(T):
    """A prefix, none, and anywhere; NaN in such rows reaches nothing."""
    rng = np.random.default_rng(T)
    real = np.stack([np.arange(T) < T // 2, np.zeros(T, bool), rng.random(T) < 0.6])
    arguments = problem(6, T)
    out, last, _, states = check(poisoned(arguments, real), real)
    assert not np.asarray(out)[~real].any()
    np.testing.assert_array_equal(last[1], arguments[5][1])
    out, rows = compiled("rows")(*poisoned(arguments, real), real=jnp.asarray(real))
    assert not np.asarray(out)[~real].any()
    assert_close(rows, states)
    np.testing.assert_array_equal(rows[1], np.broadcast_to(arguments[5][1], rows[1].shape))


@pytest.mark.parametrize("first", [1, CHUNK - 1, 2 * CHUNK + 1])
def test_split_equals_one_go(first):
    arguments = problem(7, 3 * CHUNK + 2, kind="strong")
    want, states = recurrent_oracle.gated_delta(*arguments)
    head, state = compiled()(*(x[:, :first] for x in arguments[:5]), arguments[5])
    tail, state = compiled()(*(x[:, first:] for x in arguments[:5]), state)
    assert_close(np.concatenate([head, tail], axis=1), want)
    assert_close(state, states[:, -1])


@pytest.mark.parametrize("channels", [True])
@pytest.mark.parametrize("compiler_options", [{}, quick_compile.options()], ids=["optimized", "quick"])
def test_bits_of_few_rows_depend_on_no_later_row(channels, compiler_options):
    """Eight rows at once, one at a time and five with three: the same bits, in a request of many and in one alone."""
    rule = jax.jit(functools.partial(gated_delta, keep="rows"), compiler_options=compiler_options)
    *rows, state = scalar_problem(8, 8, kind="strong", channels=channels, width=16, B=5)
    out, states = rule(*rows, state)
    for cuts in ([0, *range(1, 9)], [0, 5, 8]):
        last, outs, after = state, [], []
        for first, end in itertools.pairwise(cuts):
            got = rule(*(x[:, first:end] for x in rows), last)
            outs.append(got[0])
            after.append(got[1])
            last = got[1][:, -1]
        np.testing.assert_array_equal(np.concatenate(outs, axis=1), out)
        np.testing.assert_array_equal(np.concatenate(after, axis=1), states)
    changed = [np.where(np.arange(8).reshape(1, 8, *[1] * (x.ndim - 2)) < 5, x, np.nan) for x in rows]
    got = rule(*changed, state)
    np.testing.assert_array_equal(got[0][:, :5], out[:, :5])
    np.testing.assert_array_equal(got[1][:, :5], states[:, :5])


@pytest.mark.parametrize(("T", "chunk"), [(1, 8), (21, 8), (150, 64)])
def test_gradients(T, chunk):
    """Of every argument, equal to those of the scan over rows, also with NaN in the rows that are not real."""
    rng = np.random.default_rng(9)
    real = np.stack([np.ones(T, bool), np.arange(T) < T // 2, rng.random(T) < 0.7])
    weights = rng.standard_normal((3, T, 2 * HK, V)).astype(np.float32)
    for kind in ("mild", "strong"):
        arguments = problem(8, T, kind=kind)
        want = gradients(sequential)(weights, real, *arguments)
        got = gradients(gated_delta, chunk=chunk)(weights, real, *poisoned(arguments, real))
        for name, g, w in zip(NAMES, got, want, strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-4, atol=2e-5 * np.abs(w).max(), err_msg=name)


def test_gradients_where_the_state_after_each_row_is_kept():
    arguments = problem(9, 4)

    def total(keep):
        def loss(*arguments):
            out, state = gated_delta(*arguments, keep=keep)
            return jnp.sum(out**2) + jnp.sum(jnp.sin(state if keep == "last" else state[:, -1]))

        return jax.jit(jax.grad(loss, range(6)), compiler_options=quick_compile.options())(*arguments)

    for name, g, w in zip(NAMES, total("rows"), total("last"), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=2e-5 * np.abs(w).max(), err_msg=name)


def test_gradients_of_a_channel_that_forgets_everything_are_numbers():
    arguments = list(problem(10, CHUNK + 3))
    arguments[3][:, 2, :, 1] = -np.inf
    weights, real = np.ones((3, CHUNK + 3, 2 * HK, V), np.float32), np.ones((3, CHUNK + 3), bool)
    for g in gradients(gated_delta, chunk=8)(weights, real, *arguments):
        assert np.isfinite(g).all()


@pytest.mark.parametrize("scale", [1, 25, 1000])
def test_the_training_rule_where_decays_are_of_any_size(scale):
    """To the float32 of the largest output: what falls below e^-16 in one row is rounded to it."""
    arguments = list(problem(13, 150, B=2))
    arguments[3] = scale * arguments[3]
    arguments[3][:, 70, :, 0] = -np.inf
    with jax.default_matmul_precision("highest"):
        out, last = jax.jit(chunked_delta, compiler_options=quick_compile.options())(*arguments)
    want, states = recurrent_oracle.gated_delta(*arguments)
    for got, exact in ((out, want), (last, states[:, -1])):
        np.testing.assert_allclose(got, exact, rtol=0, atol=1e-6 * np.abs(exact).max())


def test_bfloat16_rows_give_bfloat16_and_a_float32_state():
    arguments = [jnp.asarray(x, jnp.bfloat16) for x in problem(11, 5)[:5]] + [problem(11, 5)[5]]
    _, states = recurrent_oracle.gated_delta(*arguments)
    for keep, want in (("last", states[:, -1]), ("rows", states)):
        out, state = compiled(keep)(*arguments)
        assert out.dtype == jnp.bfloat16 and state.dtype == jnp.float32
        assert_close(state, want)


def test_a_decay_of_another_shape_is_refused():
    arguments = list(problem(12, 3))
    arguments[3] = arguments[3][..., :-1]
    with pytest.raises(ValueError, match=r"log_decay has shape .*\(3, 3, 4\), or \(3, 3, 4, 8\) for a decay of each"):
        gated_delta(*arguments)


@pytest.mark.parametrize("bound", [None, -5.0])
def test_gate(bound):
    rng = np.random.default_rng(0)
    f, A_log, dt_bias = 4 * rng.standard_normal((2, 3, 4, 5)), rng.standard_normal(4), rng.standard_normal((4, 5))
    f[0, 0, 0, :2] = 300, -300
    rate, step = np.exp(A_log)[:, None], f + dt_bias
    with np.errstate(over="ignore"):
        want = -rate * np.logaddexp(0, step) if bound is None else bound / (1 + np.exp(-rate * step))
    got = kda_gate(*(jnp.asarray(x, jnp.float32) for x in (f, A_log, dt_bias)), lower_bound=bound)
    assert got.dtype == jnp.float32 and (got <= 0).all()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-30)


def test_gate_of_wrong_shapes_and_bounds():
    with pytest.raises(ValueError, match=r"\[HV\] and \[HV, K\], here \(4,\) and \(4, 5\)"):
        kda_gate(jnp.zeros((2, 4, 5)), jnp.zeros(4), jnp.zeros(20))
    with pytest.raises(ValueError, match="lower_bound is 5"):
        kda_gate(jnp.zeros((4, 5)), jnp.zeros(4), jnp.zeros((4, 5)), lower_bound=5)

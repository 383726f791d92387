"""The gated delta rule in chunks and the short convolution against float64 loops, row by row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recurrent_oracle
from delta_cases import CHUNK, HK, NAMES, K, V, assert_close, check, compiled, gradients, poisoned, problem, sequential

from jaxspec.recurrent import gated_delta, short_conv


@pytest.mark.parametrize("kind", ["mild", "strong", "alike"])
@pytest.mark.parametrize("T", [0, 1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_outputs_and_last_state(T, kind):
    check(problem(T, T, kind=kind))


@pytest.mark.parametrize("kind", ["mild", "strong", "alike"])
def test_chunk_of_64(kind):
    check(problem(1, 2 * 64 + 37, kind=kind, B=1, width=16), chunk=64)


@pytest.mark.parametrize("chunk", [3, 17, 24, 40])
def test_chunks_of_any_size(chunk):
    check(problem(2, 43, kind="alike", B=1), chunk=chunk)


@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("T", [CHUNK, CHUNK + 1])
def test_value_heads_of_a_key_head(T, ratio):
    check(problem(3, T, ratio=ratio))


@pytest.mark.parametrize("D", range(2, 10))
def test_state_after_each_row(D):
    for kind in ("mild", "strong"):
        arguments = problem(D, D, kind=kind)
        want, states = recurrent_oracle.gated_delta(*arguments)
        out, rows = compiled("rows", CHUNK if D % 2 else 64)(*arguments)
        assert_close(out, want)
        assert_close(rows, states)


def test_small_decay_after_large_ones():
    """exp(-0.001) to seven digits, though the sum before it is -600: prefix sums would have lost it."""
    T = 34
    arguments = list(problem(4, T, B=1))
    arguments[3] = np.full_like(arguments[3], -0.001)
    arguments[3][:, : T - 4] = -20
    check(arguments, chunk=64)


def test_infinite_decay_forgets():
    for T in (3, CHUNK + 3):
        arguments = list(problem(5, T))
        arguments[3][:, 2] = -np.inf
        out, _, _, _ = check(arguments)
        arguments[5] = 100 * arguments[5]
        again, _ = compiled()(*arguments)
        np.testing.assert_array_equal(out[:, 2:], again[:, 2:])


@pytest.mark.parametrize("T", [1, CHUNK, 2 * CHUNK + 3])
def test_rows_that_are_not_real(T):
    """A prefix, none, and anywhere; NaN in such rows reaches nothing."""
    rng = np.random.default_rng(T)
    real = np.stack([np.arange(T) < T // 2, np.zeros(T, bool), rng.random(T) < 0.6])
    arguments = problem(6, T)
    out, last, _, states = check(poisoned(arguments, real), real)
    assert not np.asarray(out)[~real].any()
    np.testing.assert_array_equal(last[1], arguments[5][1])
    _, rows = compiled("rows")(*poisoned(arguments, real), real=jnp.asarray(real))
    assert_close(rows, states)
    np.testing.assert_array_equal(rows[1], np.broadcast_to(arguments[5][1], rows[1].shape))


@pytest.mark.parametrize("first", [1, CHUNK - 1, CHUNK, 2 * CHUNK + 1])
def test_split_equals_one_go(first):
    T = 3 * CHUNK + 2
    arguments = problem(7, T, kind="strong")
    want, states = recurrent_oracle.gated_delta(*arguments)
    head, state = compiled()(*(x[:, :first] for x in arguments[:5]), arguments[5])
    tail, state = compiled()(*(x[:, first:] for x in arguments[:5]), state)
    assert_close(np.concatenate([head, tail], axis=1), want)
    assert_close(state, states[:, -1])


@pytest.mark.parametrize(("T", "chunk"), [(1, 8), (6, 8), (21, 8), (18, 18)])
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


def test_bfloat16_rows_give_bfloat16_and_a_float32_state():
    arguments = [jnp.asarray(x, jnp.bfloat16) for x in problem(10, 5)[:5]] + [problem(10, 5)[5]]
    out, state = compiled()(*arguments)
    assert out.dtype == jnp.bfloat16 and state.dtype == jnp.float32
    _, states = recurrent_oracle.gated_delta(*arguments)
    assert_close(state, states[:, -1])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"v": (3, 4, 3, V)}, "HV a multiple of HK = 2"),
        ({"beta": (3, 4, 2)}, r"beta has shape \(3, 4, 2\)"),
        ({"state": (3, 4, K, V)}, "state has shape"),
        ({"real": (3,)}, "real has shape"),
        ({"k": (3, 4, 1, K)}, "both must be"),
    ],
)
def test_wrong_shapes(change, words):
    arguments = dict(zip(NAMES, problem(11, 4), strict=True)) | {name: np.ones(shape) for name, shape in change.items()}
    with pytest.raises(ValueError, match=words):
        gated_delta(**arguments)


def test_wrong_settings():
    arguments = problem(12, 2)
    with pytest.raises(ValueError, match="keep is 'all'"):
        gated_delta(*arguments, keep="all")
    with pytest.raises(ValueError, match="chunk is 0"):
        gated_delta(*arguments, chunk=0)
    with pytest.raises(ValueError, match="keep is 'all'"):
        short_conv(np.ones((1, 2, 3)), np.ones((1, 3, 3)), np.ones((3, 4)), keep="all")
    with pytest.raises(ValueError, match=r"\[B, W - 1, C\]"):
        short_conv(np.ones((1, 2, 3)), np.ones((1, 2, 3)), np.ones((3, 4)))


def conv_problem(T, W, C=5):
    rng = np.random.default_rng(T * 10 + W)
    return tuple(rng.standard_normal(shape).astype(np.float32) for shape in [(3, T, C), (3, W - 1, C), (C, W)])


@pytest.mark.parametrize("W", [1, 2, 4])
@pytest.mark.parametrize("T", [0, 1, 2, 3, 9])
def test_short_conv(T, W):
    x, window, weight = conv_problem(T, W)
    prefix = np.arange(T) < np.array([[T], [T // 2], [0]])
    for real in (None, prefix):
        poisoned = x if real is None else np.where(real[..., None], x, np.nan)
        want, windows = recurrent_oracle.short_conv(x, window, weight, real)
        y, last = short_conv(poisoned, window, weight, real=real)
        again, rows = short_conv(poisoned, window, weight, real=real, keep="rows")
        np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(y, again)
        np.testing.assert_array_equal(rows, windows)
        np.testing.assert_array_equal(last, windows[:, -1] if T else window)


def test_short_conv_gives_the_same_bits_in_one_go_and_split():
    x, window, weight = conv_problem(9, 4)
    x, window = jnp.asarray(x), jnp.asarray(window, jnp.bfloat16)  # a narrow window, too: rounded before it is used
    whole, last = short_conv(x, window, weight)
    for first in (0, 1, 3, 4, 9):
        head, between = short_conv(x[:, :first], window, weight)
        tail, end = short_conv(x[:, first:], between, weight)
        np.testing.assert_array_equal(jnp.concatenate([head, tail], axis=1), whole)
        np.testing.assert_array_equal(end, last)


def test_short_conv_gradients_ignore_rows_that_are_not_real():
    x, window, weight = conv_problem(5, 4)
    real = np.arange(5) < np.array([[5], [3], [0]])

    def loss(x, window, weight):
        y, last = short_conv(x, window, weight, real=jnp.asarray(real))
        return jnp.sum(y**2) + jnp.sum(last**2)

    clean = jax.grad(loss, argnums=(0, 1, 2))(x, window, weight)
    wild = jax.grad(loss, argnums=(0, 1, 2))(np.where(real[..., None], x, np.nan), window, weight)
    for a, b in zip(clean, wild, strict=True):
        assert np.isfinite(b).all()
        np.testing.assert_array_equal(a, b)
    assert not np.asarray(wild[0])[~real].any()

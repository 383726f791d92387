"""Index keys of pools against float64 loops with their own bfloat16 and 8-bit floats."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.attention.pooling import compress, hadamard, quantize, quantize_query, softmax_pool

FLOAT8 = np.array([m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)][:127])


def round_bfloat16(x):
    """To 8 significant bits, ties to even; of numbers in bfloat16's normal range."""
    mantissa, exponent = np.frexp(np.asarray(x, np.float64))
    return np.ldexp(np.rint(mantissa * 256) / 256, exponent)


def round_float8(x):
    """float64 to the nearest of FLOAT8, of two equally near the one with an even code; 448 beyond."""
    x = np.asarray(x, np.float64)
    distance = np.abs(np.minimum(np.abs(x), 448.0)[..., None] - FLOAT8)
    nearest = distance == distance.min(axis=-1, keepdims=True)
    code = np.where(nearest, np.arange(127) + 1000 * (np.arange(127) % 2), 10000).min(axis=-1) % 1000
    return np.copysign(FLOAT8[code], x)


def sylvester(width):
    matrix = np.ones((1, 1))
    while len(matrix) < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def exact_scale(peak):
    """The smallest power of two with peak <= 448 * scale, by trying them."""
    return next(2.0**e for e in range(-30, 200) if max(peak, np.float32(1e-4)) <= 448 * 2.0**e)


def oracle_pool(keys, scores, ape):
    logits = np.asarray(scores, np.float64) + np.asarray(ape, np.float64)
    weights = np.exp(logits - logits.max(axis=-2, keepdims=True))
    return (weights * np.asarray(keys, np.float64)).sum(axis=-2) / weights.sum(axis=-2)


def oracle_quantize(x):
    x = np.asarray(x, np.float64)
    scale = np.array([exact_scale(row) for row in np.abs(x).max(axis=-1).reshape(-1)]).reshape(x.shape[:-1])
    return round_float8(x / scale[..., None]), scale


def oracle_rotate(x):
    x = round_bfloat16(x)
    return round_bfloat16(x @ sylvester(x.shape[-1]) * x.shape[-1] ** -0.5)


def numbers(x):
    return np.asarray(x.astype(jnp.float32), np.float64)


def problem(seed, *batch, pool=4, width=128, dtype=jnp.bfloat16):
    rng = np.random.default_rng(seed)
    keys, scores = (jnp.asarray(3 * rng.standard_normal((*batch, pool, width)), dtype) for _ in range(2))
    return keys, scores, jnp.asarray(rng.standard_normal((pool, width)), jnp.float32)


# Hadamard -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2, 4, 64, 128])
@pytest.mark.parametrize("batch", [(), (0,), (3, 2)])
def test_hadamard(width, batch):
    x = np.random.default_rng(width).standard_normal((*batch, width))
    got = jax.jit(hadamard)(jnp.asarray(x, jnp.float32))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, x @ sylvester(width) * width**-0.5, atol=1e-6)
    np.testing.assert_allclose(hadamard(got), x, atol=1e-6)


def test_hadamard_is_in_natural_order():
    for i in range(8):
        row = hadamard(jnp.eye(8)[i]) * 8**0.5
        want = [(-1) ** (i & j).bit_count() for j in range(8)]
        np.testing.assert_allclose(row, want, rtol=1e-6)


@pytest.mark.parametrize("width", [0, 3, 96])
def test_hadamard_needs_a_power_of_two(width):
    with pytest.raises(ValueError, match=f"x has {width} entries.*power of two"):
        hadamard(jnp.zeros((2, width)))


# 8 bits ---------------------------------------------------------------------------------------------------------------


@functools.cache
def quantized(pow2=True):
    return jax.jit(functools.partial(quantize, pow2=pow2))


def test_every_float8_is_kept():
    x = np.concatenate([FLOAT8, -FLOAT8])[:, None] * np.ones(2)
    x[:, 1] = 448  # so that the scale is 1
    values, scale = quantized()(jnp.asarray(x, jnp.float32))
    assert (np.asarray(scale) == 1).all()
    np.testing.assert_array_equal(numbers(values), x)
    assert (np.signbit(numbers(values)) == np.signbit(x)).all()


def test_values_are_rounded_to_the_nearest_and_ties_to_even():
    """Between all neighbours: the middle, and the float32 on either side of it, which float16 cannot tell from it."""
    middle = ((FLOAT8[1:] + FLOAT8[:-1]) / 2).astype(np.float32)
    x = np.stack([middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(1e9))])
    x = np.concatenate([x, -x])[..., None] * np.array([1, 0], np.float32) + np.array([0, 448], np.float32)
    values, scale = quantized()(jnp.asarray(x))
    assert (np.asarray(scale) == 1).all()
    np.testing.assert_array_equal(numbers(values), round_float8(x))
    assert (round_float8(x)[:3, :2, 0] * 2**9).T.tolist() == [[0, 0, 1], [2, 1, 2]]


def test_scale_at_exact_powers():
    """A peak of 448 * 2^e has the scale 2^e, the next float32 twice that."""
    exponent = np.arange(-20, 100)
    peak = (448 * 2.0**exponent).astype(np.float32)
    for x, want in ((peak, exponent), (np.nextafter(peak, np.float32(np.inf)), exponent + 1)):
        values, scale = quantized()(jnp.asarray(-x[:, None]))
        np.testing.assert_array_equal(scale, 2.0**want)
        np.testing.assert_array_equal(numbers(values)[:, 0], round_float8(-x / 2.0**want))


def test_rows_of_zeros_have_the_least_scale():
    values, scale = quantized()(jnp.zeros((2, 4)))
    assert not numbers(values).any() and np.asarray(scale).tolist() == [2.0**-22] * 2 == [exact_scale(0)] * 2
    _, scale = quantized(False)(jnp.zeros((1, 4)))
    assert np.asarray(scale).tolist() == [np.float32(1e-4) / np.float32(448)]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_random_rows(dtype):
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((40, 128)) * 10.0 ** rng.integers(-6, 6, (40, 1)), dtype)
    for got, want in zip(quantized()(x), oracle_quantize(x), strict=True):
        np.testing.assert_array_equal(numbers(got), want)


def test_scale_that_is_no_power():
    x = np.random.default_rng(2).standard_normal((9, 64)).astype(np.float32)
    values, scale = quantized(False)(jnp.asarray(x))
    np.testing.assert_allclose(scale, np.abs(x).max(axis=1) / 448, rtol=1e-6)
    assert (np.abs(numbers(values)).max(axis=1) == 448).all()
    np.testing.assert_array_equal(numbers(values), round_float8(x / np.asarray(scale)[:, None]))


def test_nan_and_infinity():
    values, _ = quantized()(jnp.array([[1.0, jnp.nan], [jnp.inf, -jnp.inf]]))
    assert np.isnan(numbers(values)[0, 1]) and numbers(values)[1].tolist() == [448, -448]


# Pools ----------------------------------------------------------------------------------------------------------------


def test_four_unit_vectors():
    unit = jnp.zeros((4, 128), jnp.bfloat16).at[:, 0].set(1)
    key, scale = jax.jit(compress)(unit, jnp.zeros_like(unit), jnp.zeros((4, 128)))
    assert key.dtype == jnp.float8_e4m3fn and scale.dtype == jnp.float32
    assert float(scale) == 2**-12 and numbers(key).tolist() == [352] * 128


@pytest.mark.parametrize("pool", [1, 2, 4, 8])
def test_pool_is_a_softmax_of_its_own_in_each_channel(pool):
    keys, scores, ape = problem(pool, 5, pool=pool, width=32)
    got = softmax_pool(keys, scores, ape)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, oracle_pool(numbers(keys), numbers(scores), ape), rtol=2e-5, atol=1e-6)


def test_large_scores_pick_a_token():
    keys = jnp.arange(8.0).reshape(4, 2)
    scores = jnp.full((4, 2), -3e38).at[1, 0].set(3e38).at[3, 1].set(3e38)
    assert softmax_pool(keys, scores, jnp.zeros((4, 2))).tolist() == [2.0, 7.0]


def check_compressed(got, keys, scores, ape):
    """Equal but for few, where float32 and float64 fell on two sides of a bfloat16."""
    key, scale = got
    values, want_scale = oracle_quantize(oracle_rotate(oracle_pool(keys, scores, ape)))
    np.testing.assert_array_equal(scale, want_scale)
    difference = np.abs(numbers(key) - values)
    assert (difference == 0).mean() > 0.99
    assert (difference <= np.maximum(np.abs(values) / 8, 0.25) * 1.01).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("pool", [2, 4])
def test_compressed_keys(dtype, pool):
    keys, scores, ape = problem(3, 6, 5, pool=pool, dtype=dtype)
    check_compressed(jax.jit(compress)(keys, scores, ape), numbers(keys), numbers(scores), ape)


def test_equal_weights_are_exact():
    rng = np.random.default_rng(4)
    keys = jnp.asarray(4 * rng.integers(-4, 5, (7, 4, 128)), jnp.bfloat16)
    ape = jnp.zeros((4, 128))
    key, scale = jax.jit(compress)(keys, jnp.ones_like(keys), ape)
    for got, want in zip((key, scale), oracle_quantize(oracle_rotate(numbers(keys).mean(axis=1))), strict=True):
        np.testing.assert_array_equal(numbers(got), want)


def test_queries_are_turned_as_keys_are():
    q = jnp.asarray(np.random.default_rng(5).standard_normal((3, 2, 4, 128)), jnp.bfloat16)
    values, scale = jax.jit(quantize_query)(q)
    for got, want in zip((values, scale), oracle_quantize(oracle_rotate(numbers(q))), strict=True):
        np.testing.assert_allclose(numbers(got), want, rtol=0.13)
    restored = numbers(values) * np.asarray(scale)[..., None]
    np.testing.assert_allclose(hadamard(jnp.asarray(restored, jnp.float32)), numbers(q), atol=0.2)


def test_no_pools():
    keys, scores, ape = problem(6, 0, 2)
    key, scale = jax.jit(compress)(keys, scores, ape)
    assert key.shape == (0, 2, 128) and scale.shape == (0, 2)


def test_bits_of_a_pool_do_not_depend_on_the_others():
    keys, scores, ape = problem(7, 37)
    call = jax.jit(compress)
    whole = call(keys, scores, ape)
    for rows in (slice(0, 1), slice(5, 6), slice(3, 20)):
        for part, all_ in zip(call(keys[rows], scores[rows], ape), whole, strict=True):
            np.testing.assert_array_equal(numbers(part), numbers(all_[rows]))
    one = call(keys[:, None, None], scores[:, None, None], ape)  # another shape of the batch
    np.testing.assert_array_equal(numbers(one[0])[:, 0, 0], numbers(whole[0]))


def test_nan_stays_in_its_pool():
    keys, scores, ape = problem(8, 3)
    clean = jax.jit(compress)(keys, scores, ape)
    key, scale = jax.jit(compress)(keys.at[1, 2, 5].set(jnp.nan), scores, ape)
    for row in (0, 2):
        np.testing.assert_array_equal(numbers(key[row]), numbers(clean[0][row]))
        assert scale[row] == clean[1][row]


def test_float64():
    with jax.enable_x64(True):
        rng = np.random.default_rng(9)
        keys, scores, ape = (jnp.asarray(rng.standard_normal(s)) for s in ((6, 4, 128), (6, 4, 128), (4, 128)))
        assert keys.dtype == jnp.float64
        np.testing.assert_allclose(softmax_pool(keys, scores, ape), oracle_pool(keys, scores, ape), rtol=1e-12)
        turned = np.asarray(keys) @ sylvester(128) * 128**-0.5
        np.testing.assert_allclose(jax.jit(hadamard)(keys), turned, atol=1e-13)
        key, scale = jax.jit(compress)(keys, scores, ape)
        assert key.dtype == jnp.float8_e4m3fn and scale.dtype == jnp.float32
        check_compressed((key, scale), keys, scores, ape)
        values, scale = jax.jit(quantize_query)(keys)
        assert values.dtype == jnp.float8_e4m3fn and scale.dtype == jnp.float32


def test_softmax_pool_can_be_trained():
    keys, scores, ape = problem(10, 3, width=8, dtype=jnp.float32)
    weights = np.arange(1.0, 9)
    gradient = jax.grad(lambda ape: jnp.sum(weights * hadamard(softmax_pool(keys, scores, ape))))(ape)
    step = 1e-3 * np.eye(8)[2] * np.eye(4)[:, 1:2]
    more, less = (oracle_pool(keys, scores, np.asarray(ape) + s) @ sylvester(8) * 8**-0.5 for s in (step, -step))
    np.testing.assert_allclose(gradient[1, 2], (weights * (more - less)).sum() / 2e-3, rtol=1e-3)

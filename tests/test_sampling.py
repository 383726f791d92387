"""Distributions against a float64 oracle that sorts; draws and coins at their edges."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32
from law_oracle import LAST_COIN, probs

from jaxspec.verification import Sampling, block_coins, chain_coins, draft_noise, inverse_cdf, target_probs
from jaxspec.verification.coins import ACCEPT, DRAFT, DRAW, VERIFY, threefry, uniform

NAN, INF = float("nan"), float("inf")
law = jax.jit(target_probs)
sample = jax.jit(inverse_cdf)


def one(logits, temperature=1.0, top_k=0, top_p=1.0, mask=None):
    """One row of at most 8 logits, through the program of a batch of 4 rows of 8 that also has a greedy request."""
    row = np.pad(np.asarray(logits, np.float32), (0, 8 - len(logits)), constant_values=-INF)
    allowed = np.arange(8) < len(logits) if mask is None else np.pad(mask, (0, 8 - len(mask)))
    settings = Sampling.of(
        4, temperature=[0.0, temperature, 1.3, 0.7], top_k=[0, top_k, 2, 0], top_p=[1, top_p, 1, 0.5]
    )
    out = np.asarray(law(jnp.tile(row, (4, 1)), settings, jnp.tile(allowed, (4, 1))))
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out.sum(axis=1), 1, atol=1e-6)
    return out[1, : len(logits)]


@pytest.mark.parametrize("temperature", [-1.0, 0.0, NAN])
def test_a_request_without_a_temperature_is_greedy(temperature):
    """Though others of its batch sample, and whatever its other settings."""
    assert one([5, 1, 0], temperature).tolist() == [1, 0, 0]
    assert one([1, 5, 5], temperature, top_k=3, top_p=0.5).tolist() == [0, 1, 0]


def test_temperature_comes_before_top_p():
    np.testing.assert_allclose(one(np.log([0.85, 0.10, 0.05]), 2.0, top_p=0.8), [0.7446, 0.2554, 0], atol=5e-5)


def test_top_p_is_of_what_top_k_has_left():
    """Of .4 .3 .2 .1 the first two have .7 of all, but .4 alone has .57 of the first two."""
    p = np.log([0.4, 0.3, 0.2, 0.1])
    np.testing.assert_allclose(one(p, top_k=2, top_p=0.55), [1, 0, 0, 0], atol=1e-6)
    np.testing.assert_allclose(one(p, top_p=0.55), [4 / 7, 3 / 7, 0, 0], atol=1e-6)


def test_what_top_k_cuts_has_no_mass_at_all():
    assert one([5, 4, 0, 0, 0], top_k=2)[2:].tolist() == [0, 0, 0]


def test_ties_at_the_edge_go_to_the_lowest_ids():
    np.testing.assert_allclose(one([1, 2, 1, 1], top_k=3)[[0, 2, 3]] > 0, [True, True, False])
    assert one([3, 3, 3, 3], top_k=1).tolist() == [1, 0, 0, 0]
    assert one([3, 3, 3, 3], top_p=0.5).tolist() == [0.5, 0.5, 0, 0]
    assert one([3, 3, 3, 3], top_k=3, top_p=0.5).tolist() == [0.5, 0.5, 0, 0]
    assert one([3, 3, 3, 3], top_k=2, top_p=0.9).tolist() == [0.5, 0.5, 0, 0]
    assert one([0.0, -0.0, 0.0], top_k=2).tolist() == [0.5, 0.5, 0]


@pytest.mark.parametrize("top_p", [0.0, -1.0, NAN, 1e-45])
def test_the_most_likely_token_is_always_kept(top_p):
    assert one([1, 2, 2], top_p=top_p).tolist() == [0, 1, 0]


@pytest.mark.parametrize("settings", [{"top_k": 0}, {"top_k": -1}, {"top_k": 99}, {"top_p": 1.0}, {"top_p": 7.0}])
def test_settings_that_cut_nothing(settings):
    np.testing.assert_allclose(one([1, 2, 0], **settings), probs([1, 2, 0]), atol=1e-6)


def test_logits_that_are_not_numbers():
    assert one([NAN, 1, -INF, 1]).tolist() == [0, 0.5, 0, 0.5]
    assert one([NAN, 1, -INF, 1], INF).tolist() == [0, 0.5, 0, 0.5]
    assert one([INF, 1, INF, 1]).tolist() == [0.5, 0, 0.5, 0]
    assert one([NAN, NAN]).tolist() == [0.5, 0.5]
    assert one([-INF, -INF]).tolist() == [0.5, 0.5]
    assert one([3e38, -3e38], 1e-42).tolist() == [1, 0]


def test_a_mask_comes_before_everything():
    np.testing.assert_allclose(one([9, 1, 1, 1], top_k=2, mask=[False, True, False, True]), [0, 0.5, 0, 0.5])
    for temperature, other in ((0.0, NAN), (1.0, NAN), (0.0, -INF), (1.0, -INF)):
        assert one([9, 1, other], temperature, mask=[False, False, True]).tolist() == [0, 0, 1]
    assert one([9, 1, 2], mask=[False] * 3).tolist() == [1, 0, 0]


@pytest.mark.parametrize("ties", [False, True])
def test_against_sorting(ties):
    """Rows longer than a tile of the search, each with settings of its own, several rows of each request."""
    rng = np.random.default_rng(ties)
    B, D, V = 24, 2, 1300
    logits = rng.normal(size=(B, D, V)).astype(np.float32) * 2
    if ties:
        logits = np.round(logits)
    settings = {
        "temperature": rng.choice([0.0, 0.3, 0.7, 1.0, 1.5], B),
        "top_k": rng.choice([0, 1, 5, 700, 1299], B),
        "top_p": rng.choice([0.1, 0.5, 0.95, 1.0], B),
    }
    got = np.asarray(law(logits, Sampling.of(B, **settings)))
    for b in range(B):
        mine = {name: x[b] for name, x in settings.items()}
        for d in range(D):
            want = probs(logits[b, d], **mine)
            # float32 may place the edge of top-p a token further where a sum comes close to it.
            moved = [probs(logits[b, d], **mine | {"top_p": mine["top_p"] + x}) for x in (-1e-5, 1e-5)]
            if all(((x > 0) == (want > 0)).all() for x in moved):
                np.testing.assert_array_equal(got[b, d] > 0, want > 0, err_msg=str(mine))
                np.testing.assert_allclose(got[b, d], want, rtol=1e-4, atol=1e-7)


def test_settings_are_one_for_all_or_one_for_each():
    with pytest.raises(ValueError, match=r"top_k has shape \(2,\): give one number, or one for each of 3"):
        Sampling.of(3, top_k=[1, 2])
    with pytest.raises(ValueError, match=r"mask has shape \(2, 4\)"):
        target_probs(jnp.zeros((3, 4)), Sampling.of(3), jnp.ones((2, 4), bool))


# Draws ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("V", [4, 1300])
def test_a_draw_is_the_inverse_of_the_cdf(V):
    rng = np.random.default_rng(V)
    weights = rng.random((64, V)).astype(np.float32) * (rng.random((64, V)) < 0.5)
    weights[:, 1] += 0.1
    coin = rng.random(64).astype(np.float32)
    got = np.asarray(sample(weights, coin))
    running = np.cumsum(weights.astype(np.float64), axis=1)
    goal = coin * running[:, -1]
    rows = np.arange(64)
    assert (weights[rows, got] > 0).all()
    assert (running[rows, got] > goal - 1e-3).all()
    assert (running[rows, got] - weights[rows, got] < goal + 1e-3).all()


@pytest.mark.parametrize("coin", [0.0, LAST_COIN, 1.0])
def test_the_smallest_and_the_largest_coin_draw_what_has_mass(coin):
    weights = np.zeros((64, 1300), np.float32)
    rng = np.random.default_rng(0)
    for row in weights:
        row[rng.choice(np.arange(3, 1290), 40, replace=False)] = rng.choice([1e-30, 1e-7, 0.1, 3.0], 40)
    got = np.asarray(sample(weights, np.full(64, coin, np.float32)))
    assert (weights[np.arange(64), got] > 0).all()
    if coin == 0:
        np.testing.assert_array_equal(got, (weights > 0).argmax(axis=1))


def test_a_row_without_mass_draws_token_0():
    weights = jnp.zeros((64, 1300))
    assert (sample(weights, jnp.full(64, 0.5)) == 0).all()


# Coins ---------------------------------------------------------------------------------------------------------------


def test_bits_are_those_of_threefry():
    rng = np.random.default_rng(0)
    key, counter = rng.integers(0, 2**32, 2, np.uint32), rng.integers(0, 2**32, 6, np.uint32)
    want = threefry_2x32(jnp.asarray(key), jnp.asarray(counter))
    got = threefry((jnp.uint32(key[0]), jnp.uint32(key[1])), (jnp.asarray(counter[:3]), jnp.asarray(counter[3:])))
    np.testing.assert_array_equal(np.concatenate(got), want)


def test_coins_are_uniform_and_below_one():
    seed, position = jnp.arange(400, dtype=jnp.uint32)[:, None], jnp.arange(500)
    for stream, column in ((VERIFY, DRAW), (VERIFY, ACCEPT), (DRAFT, ACCEPT)):
        coins = np.asarray(uniform(seed, position, column, stream)).ravel()
        assert coins.min() >= 0 and coins.max() <= LAST_COIN
        assert (coins * 2**24 == np.floor(coins * 2**24)).all()
        counts = np.histogram(coins, bins=50, range=(0, 1))[0]
        assert ((counts - 4000) ** 2 / 4000).sum() < 95  # 49 degrees of freedom: one in 10^4


def test_streams_and_columns_are_independent():
    seed, position = jnp.arange(200, dtype=jnp.uint32)[:, None], jnp.arange(500)
    named = [uniform(seed, position, c, s) for s in (VERIFY, DRAFT) for c in (DRAW, ACCEPT, ACCEPT + 1)]
    named += [uniform(seed + 1, position, DRAW, VERIFY), uniform(seed, position + 1, DRAW, VERIFY)]
    table = np.corrcoef(np.stack([np.asarray(x).ravel() for x in named]))
    assert np.abs(table - np.eye(len(named))).max() < 0.02  # 6 standard deviations


def test_noise_of_drafts_is_exponential():
    """Also its smallest values, one of a million among them, which decide the draws over a large vocabulary."""
    noise = np.asarray(draft_noise(jnp.arange(40, dtype=jnp.uint32), jnp.arange(40) % 7, 3, 1 << 17)).astype(np.float64)
    assert noise.min() > 0 and np.isfinite(noise).all()
    u = np.sort(1 - np.exp(-noise.ravel()))
    for scale in (1.0, 2.0**-10, 2.0**-20):
        part = u[u < scale] / scale
        n = len(part)
        assert abs(n - noise.size * scale) < 4 * np.sqrt(noise.size * scale) + 1
        assert np.abs(part - np.arange(n) / n).max() < 2 / np.sqrt(n)  # Kolmogorov: one in 1500


def test_a_coin_depends_on_its_request_alone():
    """Not on the lane, nor on how many rows a round has. Only a block's acceptance depends on the round."""
    seed, lens = jnp.array([3, 9, 4], jnp.uint32), jnp.array([10, 20, 30])
    for make in (chain_coins, block_coins):
        full, part = make(seed, lens, 5), make(seed[1:2], lens[1:2], 3)
        np.testing.assert_array_equal(full.draw[1, :3], part.draw[0])
        np.testing.assert_array_equal(full.accept[1, :2], part.accept[0])
    np.testing.assert_array_equal(draft_noise(seed, lens, 4, 9)[1, :5], draft_noise(seed[1:2], lens[1:2], 4, 5)[0])
    now, later = chain_coins(seed, lens, 5), chain_coins(seed, lens + 2, 5)
    np.testing.assert_array_equal(now.draw[:, 2:], later.draw[:, :3])
    np.testing.assert_array_equal(now.accept[:, 2:], later.accept[:, :2])
    assert not np.isin(block_coins(seed, lens + 2, 5).accept, block_coins(seed, lens, 5).accept).any()

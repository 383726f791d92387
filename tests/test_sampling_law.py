"""Every verifier's output law is the target's, to 1e-6: drafts enumerated, coins integrated exactly.

All problems go through one compiled function of 3 drafts and 5 tokens: a smaller vocabulary has logits of -inf behind
it, a shorter chain has nodes that are not real. So the rows of a call are a batch of mixed settings and lengths.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from law_oracle import Problem, block_jumps, cdf, pieces, probs, product, rejection_jumps

from jaxspec.drafting import propose_token
from jaxspec.verification import (
    BLOCK,
    GREEDY,
    MATCH,
    REJECTION,
    Coins,
    Sampling,
    chain_coins,
    chain_nodes,
    inverse_cdf,
    target_probs,
    verify_block,
    verify_match,
    verify_rejection,
)

D, V, LANES = 4, 5, 1 << 14
SETTINGS = [
    {"temperature": 0.7},
    {"temperature": 1.5},
    {"temperature": 1.0, "top_k": 2},
    {"temperature": 0.7, "top_p": 0.75},
    {"temperature": 1.5, "top_k": 3, "top_p": 0.8},
    {"temperature": 0.0},
]


@functools.cache
def problems():
    rng = np.random.default_rng(5)
    out = [Problem.random(rng, v, s, x) for v, s in ((3, 3), (4, 2), (5, 2)) for x in SETTINGS]
    # A draft that is cut like the target cannot say what the target can, and the other way round.
    out += [Problem.random(rng, 4, 2, {"temperature": 1.0, "top_p": 0.9}, {"top_k": 2})]
    out += [Problem.random(rng, 4, 2, {"temperature": 1.0, "top_k": 2}, {"top_k": 3})]
    # The draft is the target: nothing is left of p - q.
    same = Problem.random(rng, 3, 2, {"temperature": 1.0})
    same.q = {x: probs(same.logits[x]).astype(np.float32) for x in same.q}
    return [*out, same]


def rejection_case(problem, draft):
    accept, draws = rejection_jumps(problem, draft)
    return shared_draw(problem, accept, draws)


def block_case(problem, draft):
    accept, draws = block_jumps(problem, draft)
    return shared_draw(problem, accept, draws)


def shared_draw(problem, accept, draws):
    """A run draws once, so all rows may share a coin, which jumps where any of them does."""
    if problem.settings["temperature"] == 0:  # the draft's distribution has no say
        accept, draws = [[]] * problem.S, [[]]
    piece, coins, weight = product([*map(pieces, accept), pieces(list(itertools.chain(*draws)))])
    return piece, coins[:, :-1], np.repeat(coins[:, -1:], problem.S + 1, axis=1), weight


def match_case(problem, draft):
    draws = [cdf(problem.p[draft[:i]]) for i in range(problem.S + 1)]
    piece, coins, weight = product([*map(pieces, draws)])
    return piece, np.full((len(piece), problem.S), 0.5), coins, weight


RULES = {
    "rejection": (verify_rejection, REJECTION, rejection_case),
    "block": (verify_block, BLOCK, block_case),
    "match": (lambda *a: verify_match(*a[:4], coins=a[-1]), MATCH, match_case),
}


@functools.cache
def integrate(rule):
    """[{draft: (law of the next S + 1 tokens, mean accepted)}] of each problem."""
    verify, code, make = RULES[rule]
    jobs = [(n, d, *make(x, d)) for n, x in enumerate(problems()) for d, _ in x.drafts()]
    lanes = {"token": [], "count": [], "logits": [], "q": [], "accept": [], "draw": [], "settings": []}
    for n, draft, piece, accept, draw, _ in jobs:
        x = problems()[n]
        logits, q = np.full((D, V), -np.inf), np.zeros((D - 1, V))
        for i in range(x.S + 1):
            logits[i, : x.V] = x.logits[draft[:i]]
            if i < x.S:
                q[i, : x.V] = x.q[draft[:i]]
        logits[x.S + 1 :] = 0
        setting = [x.settings["temperature"], x.settings.get("top_k", 0), x.settings.get("top_p", 1.0)]
        fixed = {"token": [*draft, *[0] * (D - 1 - x.S)], "count": x.S, "logits": logits, "q": q, "settings": setting}
        for name, value in fixed.items():
            lanes[name].append(np.repeat(np.asarray(value)[None], len(piece), axis=0))
        lanes["accept"].append(np.pad(accept, ((0, 0), (0, D - 1 - x.S))))
        lanes["draw"].append(np.pad(draw, ((0, 0), (0, D - 1 - x.S))))
    lanes = {name: np.concatenate(x) for name, x in lanes.items()}

    @jax.jit
    def run(x):
        sampling = Sampling.of(
            LANES,
            temperature=x["settings"][:, 0],
            top_k=x["settings"][:, 1].astype(jnp.int32),
            top_p=x["settings"][:, 2],
        )
        nodes = chain_nodes(jnp.zeros(LANES, jnp.int32), x["token"], x["count"])
        coins = Coins(x["accept"], x["draw"])
        return verify(nodes, x["logits"], sampling, jnp.zeros(LANES, jnp.int32), x["q"], None, coins)

    outs = []
    for start in range(0, len(lanes["count"]), LANES):
        part = {name: x[start : start + LANES] for name, x in lanes.items()}
        short = LANES - len(part["count"])
        part = {name: np.pad(x, [(0, short)] + [(0, 0)] * (x.ndim - 1)) for name, x in part.items()}
        part = {name: x.astype(np.int32 if name in ("token", "count") else np.float32) for name, x in part.items()}
        outs.append([np.asarray(y)[: LANES - short] for y in jax.tree.leaves(run(part))])
    accepted, count, tokens, nodes, used = (np.concatenate(x) for x in zip(*outs, strict=True))

    sampled = lanes["settings"][:, 0] > 0
    np.testing.assert_array_equal(used, np.where(sampled, code, GREEDY))
    np.testing.assert_array_equal(count, accepted + 1)
    np.testing.assert_array_equal(nodes, np.where(np.arange(D) < count[:, None], np.arange(D), 0))

    results, at = [{} for _ in problems()], 0
    for n, draft, piece, _, _, weight in jobs:
        x, mine = problems()[n], slice(at, at + len(piece))
        at += len(piece)
        kept, said = accepted[mine], tokens[mine]
        _, first, of = np.unique(piece, return_index=True, return_inverse=True)
        jumps = (said != said[first][of]).any(axis=1) & (weight > 1e-5)
        assert not jumps.any(), f"{rule}, problem {n}, draft {draft}: a run jumps inside a piece"
        law = np.zeros((x.V,) * (x.S + 1))
        for run_, mass in zip(*merge(said, kept, weight), strict=True):
            x.extend(run_, mass, law)
        results[n][draft] = law, (kept * weight).sum()
    return results


def merge(said, kept, weight):
    """Runs that occur, each once, and their mass."""
    table, of = np.unique(np.concatenate([kept[:, None], said], axis=1), axis=0, return_inverse=True)
    return [tuple(row[1 : row[0] + 2].tolist()) for row in table], np.bincount(of.ravel(), weight)


@pytest.mark.parametrize("rule", RULES)
def test_the_output_law_is_the_targets(rule):
    for problem, laws in zip(problems(), integrate(rule), strict=True):
        law = sum(weight * laws[draft][0] for draft, weight in problem.drafts())
        np.testing.assert_allclose(law, problem.target_law(), rtol=0, atol=1e-6, err_msg=str(problem.settings))


def test_matching_keeps_the_law_whatever_the_draft_is():
    for problem, laws in zip(problems(), integrate("match"), strict=True):
        for draft, (law, _) in laws.items():
            np.testing.assert_allclose(law, problem.target_law(), rtol=0, atol=1e-6, err_msg=str(draft))


def accepted_on_average(rule):
    return [
        sum(weight * laws[draft][1] for draft, weight in problem.drafts())
        for problem, laws in zip(problems(), integrate(rule), strict=True)
    ]


def test_a_block_is_accepted_at_least_as_far():
    block, single, match = (np.array(accepted_on_average(rule)) for rule in ("block", "rejection", "match"))
    assert (block >= single - 1e-6).all() and (block > single + 1e-3).any()
    # A draft from the target itself is always kept by both, but not by a match with a draw of its own.
    assert block[-1] == pytest.approx(2, abs=1e-5) and single[-1] == pytest.approx(2, abs=1e-5) and match[-1] < 1.5


# Rounds with the requests' own coins ---------------------------------------------------------------------------------

SEEDS, TOKENS = 1 << 16, 3


@functools.cache
def chain_of_tokens():
    """(target, draft): float32[3, 3], the logits behind each token; the draft is like the target, but not it."""
    rng = np.random.default_rng(11)
    target = rng.normal(size=(TOKENS, TOKENS)).astype(np.float32)
    return target, target + rng.normal(size=(TOKENS, TOKENS)).astype(np.float32)


def seeded_rounds(rule, proposer=propose_token, coins_of=None):
    """int[SEEDS, 4], what requests that differ in their seed alone say behind token 0."""
    verify = {"rejection": verify_rejection, "block": verify_block, "match": None}[rule]
    target, guess = (jnp.asarray(x) for x in chain_of_tokens())
    sampling = Sampling.of(SEEDS, temperature=0.8, seed=jnp.arange(SEEDS))

    @jax.jit
    def round_(last, lens):
        tokens, q = [last], []
        for i in range(2):
            token, probs = proposer(guess[tokens[-1]], sampling, lens, i)
            tokens.append(token)
            q.append(probs)
        tokens, q = jnp.stack(tokens, axis=1), jnp.stack(q, axis=1)
        nodes = chain_nodes(last, tokens[:, 1:], jnp.full(SEEDS, 2))
        given = None if coins_of is None else coins_of(sampling.seed, lens, 3)
        if verify is None:
            return verify_match(nodes, target[tokens], sampling, lens, None, given)
        return verify(nodes, target[tokens], sampling, lens, q, None, given)

    said = np.zeros((SEEDS, 8), int)
    lens, lane = np.zeros(SEEDS, int), np.arange(SEEDS)
    while lens.min() < 4:
        out = round_(jnp.asarray(said[lane, lens], jnp.int32), jnp.asarray(lens, jnp.int32))
        count = np.where(lens < 4, out.count, 0)
        for j in range(3):
            live = j < count
            said[lane[live], lens[live] + 1 + j] = np.asarray(out.tokens)[live, j]
        lens = lens + count
    return said[:, 1:5]


def excess(said):
    """Chi-square of the 81 runs against the exact law, in standard deviations above its mean."""
    p = np.stack([probs(row, 0.8) for row in chain_of_tokens()[0]])
    law = np.einsum("a,ab,bc,cd->abcd", p[0], p, p, p).ravel() * len(said)
    counts = np.bincount(np.ravel_multi_index(said.T, (TOKENS,) * 4), minlength=law.size)
    return (((counts - law) ** 2 / law).sum() - 80) / np.sqrt(160)


@pytest.mark.parametrize("rule", RULES)
def test_rounds_of_seeded_requests_follow_the_law(rule):
    """Over rounds, with the coins that requests have: no coin is used twice in a way that shows."""
    assert excess(seeded_rounds(rule)) < 4


def test_coins_that_are_used_twice_show():
    """The check above can fail: drafts from the coins of the verdict, and a block that reads the coins of a chain."""

    def careless(logits, sampling, lens, index):
        probs = target_probs(logits, sampling)
        return inverse_cdf(probs, chain_coins(sampling.seed, lens, 3).accept[:, index]), probs

    assert excess(seeded_rounds("rejection", careless)) > 50
    assert excess(seeded_rounds("block", coins_of=chain_coins)) > 6

"""Every rule on recorded cases, at its edges, in mixed batches, and on what a run may not depend on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from law_oracle import LAST_COIN
from quick_compile import options

from jaxspec.verification import (
    BLOCK,
    GREEDY,
    MATCH,
    NO_RULE,
    REJECTION,
    Coins,
    Nodes,
    Sampling,
    chain_coins,
    chain_nodes,
    end_run,
    greedy_token,
    target_probs,
    verify_block,
    verify_greedy,
    verify_match,
    verify_rejection,
)
from jaxspec.verification.stopping import STOP

B, D, V = 8, 4, 12
NAN = float("nan")


def with_q(verify):
    return lambda nodes, logits, sampling, lens, q, mask, coins: verify(nodes, logits, sampling, lens, q, mask, coins)


RULES = {
    "greedy": (GREEDY, lambda nodes, logits, sampling, lens, q, mask, coins: verify_greedy(nodes, logits, mask)),
    "match": (
        MATCH,
        lambda nodes, logits, sampling, lens, q, mask, coins: verify_match(nodes, logits, sampling, lens, mask, coins),
    ),
    "rejection": (REJECTION, with_q(verify_rejection)),
    "block": (BLOCK, with_q(verify_block)),
}
SAMPLED = ["match", "rejection", "block"]
WITH_Q = ["rejection", "block"]
COMPILED = {name: jax.jit(f, compiler_options=options()) for name, (_, f) in RULES.items()}


def verify(rule, requests, *, coins=True, lanes=B, rows=D):
    """Runs requests as the first lanes of a batch, the others being padding that holds rubbish.

    A request is a dictionary: drafts; logits of the rows 0 .. len(drafts), at most V long; q of the drafts; settings of
    `Sampling`; accept, draw: coins of all drafts, of all rows; seq_len. coins=False takes the request's own.
    """
    rng = np.random.default_rng(0)
    tokens, q = rng.integers(0, V, (lanes, rows - 1)), rng.random((lanes, rows - 1, V)).astype(np.float32)
    logits = rng.normal(size=(lanes, rows, V)).astype(np.float32)
    logits[len(requests) :] = NAN
    settings = {"temperature": np.ones(lanes), "top_k": np.zeros(lanes, int), "top_p": np.ones(lanes)}
    settings["seed"] = np.arange(lanes)
    accept, draw = rng.random((lanes, rows - 1)), rng.random((lanes, rows))
    count, lens = np.zeros(lanes, int), np.zeros(lanes, int)
    for lane, request in enumerate(requests):
        drafts = request.get("drafts", [])
        count[lane], lens[lane] = len(drafts), request.get("seq_len", 7)
        tokens[lane, : len(drafts)] = drafts
        for j, row in enumerate(request["logits"]):
            logits[lane, j] = -np.inf
            logits[lane, j, : len(row)] = row
        for j, row in enumerate(request.get("q", [])):
            q[lane, j] = 0
            q[lane, j, : len(row)] = row
        for name in settings:
            settings[name][lane] = request.get(name, settings[name][lane])
        accept[lane], draw[lane] = request.get("accept", 0.5), request.get("draw", 0.5)
    nodes = chain_nodes(
        jnp.zeros(lanes, jnp.int32), jnp.asarray(tokens, jnp.int32), count, jnp.arange(lanes) < len(requests)
    )
    given = Coins(jnp.asarray(accept, jnp.float32), jnp.asarray(draw, jnp.float32)) if coins else None
    args = nodes, logits, Sampling.of(lanes, **settings), jnp.asarray(lens, jnp.int32), jnp.asarray(q), None, given
    return jax.tree.map(np.asarray, COMPILED[rule](*args))


def runs(result):
    return [row[:n].tolist() for row, n in zip(result.tokens, result.count, strict=True)]


def peak(*tokens):
    """Logits of rows with these argmaxes."""
    return (9 * np.eye(V)[list(tokens)]).tolist()


def log(*rows):
    with np.errstate(divide="ignore"):
        return [np.log(row).tolist() for row in rows]


def greedy_request(**other):
    return {"drafts": [5, 6], "logits": peak(5, 6, 9), "temperature": 0.0, **other}


@pytest.mark.parametrize("rule", RULES)
def test_ragged_bonus(rule):
    """The first request loses both drafts, the second keeps both and gets its bonus. Padding says nothing."""
    result = verify(rule, [greedy_request(drafts=[1, 4], logits=peak(3, 4, 8)), greedy_request()])
    assert runs(result) == [[3], [5, 6, 9]] + [[]] * (B - 2)
    assert result.rule.tolist() == [GREEDY] * 2 + [NO_RULE] * (B - 2)
    assert result.accepted.tolist() == [0, 2] + [0] * (B - 2)
    assert (result.tokens[2:] == 0).all() and (result.nodes[2:] == 0).all()
    assert result.nodes[1].tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize("rule", RULES)
def test_lengths_grow_by_what_was_emitted(rule):
    """A padding row beside a run of 3: lengths [7, 0] become [10, 0]."""
    assert (np.array([7] + [0] * (B - 1)) + verify(rule, [greedy_request()]).count).tolist() == [10] + [0] * (B - 1)


@pytest.mark.parametrize("rule", RULES)
def test_no_request_at_all(rule):
    result = verify(rule, [])
    assert all((x == 0).all() for x in jax.tree.leaves(result))


@pytest.mark.parametrize("rule", RULES)
def test_every_number_of_drafts(rule):
    """Drafts per request 0 3 0 1, all kept: flat, a request's rows start at 0 1 5 6 and its bonus is behind 0 4 5 7."""
    result = verify(
        rule, [greedy_request(drafts=list(range(1, n + 1)), logits=peak(*range(1, n + 2))) for n in (0, 3, 0, 1)]
    )
    starts = np.concatenate([[0], np.cumsum(result.count[:4])])
    assert starts.tolist() == [0, 1, 5, 6, 8]
    last = np.take_along_axis(result.nodes, np.maximum(result.count - 1, 0)[:, None], axis=1)[:4, 0]
    assert (starts[:-1] + last).tolist() == [0, 4, 5, 7]
    assert runs(result)[:4] == [[1], [1, 2, 3, 4], [1], [1, 2]]


@pytest.mark.parametrize("rule", SAMPLED)
@pytest.mark.parametrize("temperature", [-1.0, 0.0, NAN])
def test_greedy_requests_of_a_batch_that_samples(rule, temperature):
    """Coins and the draft's distribution have no say; the request beside it samples and is told so."""
    rows = [[5, 1, 0]] * 3
    for coin in (0.0, LAST_COIN):
        request = {"drafts": [0, 1], "logits": rows, "temperature": temperature, "accept": coin, "draw": coin}
        result = verify(
            rule,
            [
                {**request, "q": [[NAN] * 3] * 2},
                {**request, "q": [[1, 0, 0], [0, 1, 0]]},
                {**request, "temperature": 1.0, "q": [[0.4, 0.3, 0.3]] * 2},
            ],
        )
        assert runs(result)[:2] == [[0, 0]] * 2
        assert result.rule[:3].tolist() == [GREEDY, GREEDY, RULES[rule][0]]


@pytest.mark.parametrize("rule", SAMPLED)
def test_a_token_that_top_k_cuts_is_never_accepted(rule):
    """With a coin of 0: accept if u < p, and p is 0."""
    result = verify(
        rule,
        [
            {
                "drafts": [4],
                "logits": [[5, 4, 0, 0, 0]] * 2,
                "top_k": 2,
                "q": [[0, 0, 0, 0, 1]],
                "accept": 0.0,
                "draw": coin,
            }
            for coin in (0.0, LAST_COIN)
        ],
    )
    assert runs(result)[:2] == [[0], [1]]


@pytest.mark.parametrize("rule", WITH_Q)
def test_acceptance_and_what_is_drawn_behind_it(rule):
    """p .5 .3 .2 and q .2 .5 .3: drafts 1 and 2 pass with .6 and .667, and only token 0 is left of p - q."""
    p, q = [0.5, 0.3, 0.2], [0.2, 0.5, 0.3]
    edges = [(0, LAST_COIN, 1), (1, 0.599, 1), (1, 0.601, 0), (2, 0.666, 1), (2, 0.667, 0)]
    requests = [{"drafts": [d], "logits": log(p, p), "q": [q], "accept": u, "draw": LAST_COIN} for d, u, _ in edges]
    result = verify(rule, requests)
    assert runs(result)[:5] == [[d, 2] if kept else [0] for d, _, kept in edges]
    assert sum(x * min(1, y / x) for x, y in zip(q, p, strict=True)) == pytest.approx(0.70)


@pytest.mark.parametrize("rule", WITH_Q)
@pytest.mark.parametrize("q", [0.0, -0.5, 1.5, NAN, float("inf")])
def test_a_draft_that_its_own_law_does_not_know_is_rejected(rule, q):
    request = {"drafts": [1, 0], "logits": log([0.5, 0.5], [0.5, 0.5], [0.5, 0.5]), "q": [[0.5, q], [0.5, 0.5]]}
    result = verify(rule, [{**request, "accept": 0.0, "draw": u} for u in (0.0, LAST_COIN)])
    assert result.accepted[:2].tolist() == [0, 0]
    assert runs(result)[1] == [1]


@pytest.mark.parametrize("rule", SAMPLED)
def test_coins_at_both_ends_draw_what_may_be_said(rule):
    """Zeros at both ends of p: a coin of 0 draws the first token with mass, the largest coin the last one."""
    p, q = [0, 0.3, 0, 0.3, 0.4, 0], [0.1, 0.1, 0.5, 0.1, 0.1, 0.1]
    result = verify(
        rule, [{"drafts": [2], "logits": log(p, p), "q": [q], "accept": 0.0, "draw": u} for u in (0.0, LAST_COIN)]
    )
    assert runs(result)[:2] == [[1], [4]]


@pytest.mark.parametrize("rule", WITH_Q)
def test_a_draft_from_the_target_itself_is_always_kept(rule):
    """q is p, to the bit or not; where rounding rejects there is no p - q to draw from, and p is drawn from."""
    logits = log([0.2, 0.5, 0.3], [0.6, 0.1, 0.3], [1, 1, 1])
    p = [np.exp(x) / np.exp(x).sum() for x in np.array(logits)]
    requests = [
        {"drafts": [1, 0], "logits": logits, "q": [x * s for x in p[:2]], "accept": u, "draw": 0.5}
        for s in (1, 1 + 1e-6)
        for u in (0.0, 0.9)
    ]
    assert runs(verify(rule, requests))[:4] == [[1, 0, 1]] * 4
    request = {**requests[2], "accept": LAST_COIN}
    assert set(runs(verify(rule, [request]))[0]) <= {0, 1, 2}


@pytest.mark.parametrize("rule", RULES)
def test_ties_go_to_the_lowest_id(rule):
    rows = [[1, 3, 3, 3]] * 3
    result = verify(
        rule,
        [
            {"drafts": [1, 2], "logits": rows, "temperature": 0.0},
            {"drafts": [1, 2], "logits": rows, "top_k": 1, "q": [[0.2, 0.4, 0.2, 0.2]] * 2, "accept": LAST_COIN},
        ],
    )
    assert runs(result)[:2] == [[1, 1]] * 2


@pytest.mark.parametrize("rule", RULES)
def test_a_run_is_cut_by_a_stop_and_by_the_budget(rule):
    result = verify(rule, [greedy_request(drafts=[10, 11, 2], logits=peak(10, 11, 2, 3))] * 4)
    ending = end_run(
        jnp.asarray(result.tokens[:4]),
        jnp.asarray(result.count[:4]),
        jnp.full((4, 1), 2),
        jnp.array([5, 2, 0, 3]),
        vocab_size=100,
    )
    assert ending.keep.tolist() == [3, 2, 0, 3]
    assert [reason == STOP for reason in ending.reason.tolist()] == [True, False, False, True]


@pytest.mark.parametrize("rule", RULES)
def test_a_chain_rule_sees_no_branch(rule):
    """Node 2 hangs on the anchor: only the chain 0 - 1 counts, though the branch would be kept."""
    nodes = Nodes(jnp.array([[0, 1, 2, 3]] * B), jnp.array([[0, 0, 0, 2]] * B), jnp.full(B, 4))
    logits = jnp.asarray([peak(1, 2, 3, 4)] * B)
    args = Sampling.of(B), jnp.full(B, 7), jnp.full((B, D - 1, V), 1 / V), None, None
    result = COMPILED[rule](nodes, logits, *args)
    assert result.tokens.tolist() == [[1, 2, 0, 0]] * B


# What a run does not depend on ---------------------------------------------------------------------------------------


def sampled_requests(count, drafts=1):
    """Requests with settings, seeds and lengths of their own."""
    rng = np.random.default_rng(3)
    out = []
    for i in range(count):
        q = rng.dirichlet(np.ones(V), drafts).astype(np.float32)
        out.append(
            {
                "drafts": [int(rng.choice(V, p=x / x.sum())) for x in q.astype(np.float64)],
                "q": q,
                "logits": rng.normal(size=(drafts + 1, V)).astype(np.float32),
                "temperature": [0.7, 1.5, 0.0][i % 3],
                "top_k": [0, 3][i % 2],
                "top_p": [1.0, 0.8][i % 4 // 2],
                "seed": 100 + i,
                "seq_len": 10 + i,
            }
        )
    return out


@pytest.mark.parametrize("rule", SAMPLED)
def test_a_seeded_request_says_the_same_anywhere(rule):
    """Alone or with others, in any lane, in a bucket of any size, with more rows than it has drafts or not."""
    requests = sampled_requests(B - 1)
    together = runs(verify(rule, requests, coins=False))
    assert len({tuple(x) for x in together}) > 3
    assert runs(verify(rule, requests[::-1], coins=False))[: B - 1][::-1] == together[: B - 1]
    for i in (1, 4):
        assert runs(verify(rule, requests[i : i + 1], coins=False))[0] == together[i]
    assert runs(verify(rule, requests[:3], coins=False, lanes=3, rows=2)) == together[:3]


def test_matching_says_what_plain_decoding_says():
    """Whatever the drafts are: with row i's logits a table of the token before, 40 tokens of one seed are the same."""
    table = np.random.default_rng(1).normal(size=(V, V)).astype(np.float32) * 2

    def generate(propose):
        said = [[3] for _ in range(B)]
        rounds = 0
        while min(map(len, said)) < 40:
            drafts = [propose(x) for x in said]
            result = verify(
                "match",
                [
                    {
                        "drafts": d,
                        "logits": table[[x[-1], *d]],
                        "temperature": 0.9,
                        "top_k": 6,
                        "seed": i,
                        "seq_len": len(x),
                    }
                    for i, (x, d) in enumerate(zip(said, drafts, strict=True))
                ],
                coins=False,
            )
            for x, run in zip(said, runs(result), strict=True):
                x += run
            rounds += 1
        return [x[:40] for x in said], rounds

    def likely(x):
        first = int(table[x[-1]].argmax())
        return [first, int(table[first].argmax())]

    plain, slow = generate(lambda x: [])
    fast, quick = generate(likely)
    assert plain == fast and quick < slow
    assert len({tuple(x) for x in plain}) == B


def test_greedy_agrees_with_the_greedy_token():
    logits = np.random.default_rng(0).normal(size=(B, 1, V)).astype(np.float32)
    result = verify("greedy", [{"logits": x} for x in logits])
    np.testing.assert_array_equal(result.tokens[:, 0], greedy_token(jnp.asarray(logits[:, 0])))


def test_a_draft_of_another_vocabulary_is_refused():
    nodes = chain_nodes(jnp.zeros(2, jnp.int32), jnp.zeros((2, 3), jnp.int32), jnp.full(2, 3))
    args = nodes, jnp.zeros((2, 4, 9)), Sampling.of(2), jnp.zeros(2, jnp.int32), jnp.zeros((2, 3, 5))
    for rule in (verify_rejection, verify_block):
        with pytest.raises(ValueError, match=r"draft_probs has shape \(2, 3, 5\): it must be \(2, 3, 9\)"):
            rule(*args)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_types_do_not_depend_on_x64(rule, x64):
    with jax.enable_x64(x64):
        ints, wide = jnp.zeros(2, jnp.int32), jnp.zeros((2, 3), jnp.int32)
        logits, q = jnp.zeros((2, 3, 5), jnp.bfloat16), jnp.zeros((2, 2, 5), jnp.float32)
        sampling = Sampling.of(2)
        mask = jnp.ones((2, 5), bool)
        out = jax.eval_shape(RULES[rule][1], Nodes(wide, wide, ints), logits, sampling, ints, q, mask, None)
        assert {x.dtype for x in jax.tree.leaves(out)} == {jnp.dtype("int32")}
        assert jax.eval_shape(target_probs, logits, sampling, mask).dtype == jnp.float32
        assert {x.dtype for x in jax.eval_shape(lambda: chain_coins(sampling.seed, ints, 3))} == {jnp.dtype("float32")}


@pytest.mark.parametrize("rule", RULES)
def test_temporaries_are_of_the_size_of_one_row(rule):
    """At 64 requests, 8 rows and 150,000 tokens: a few [B, V], so no copy of the logits beside them."""
    lanes, rows, size = 64, 8, 150_000
    table = jax.ShapeDtypeStruct((lanes, rows, size), jnp.float32)
    q = jax.ShapeDtypeStruct((lanes, rows - 1, size), jnp.float32)
    ints = jax.ShapeDtypeStruct((lanes,), jnp.int32)
    wide = jax.ShapeDtypeStruct((lanes, rows), jnp.int32)
    sampling = jax.eval_shape(lambda: Sampling.of(lanes))
    compiled = COMPILED[rule].lower(Nodes(wide, wide, ints), table, sampling, ints, q, None, None).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 9 * lanes * size * 4

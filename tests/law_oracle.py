"""Exact output laws of verifiers: drafts enumerated, coins integrated piece by piece, all in float64.

A verifier's run is piecewise constant in its coins. The places where it jumps are computed here from the published
rule; the verifier under test is then evaluated just inside both ends of every piece. If it says the same at both, the
piece is constant, so its volume times that run is an exact integral.
"""

import itertools
from dataclasses import dataclass, field

import numpy as np

EDGE = 1e-6  # how far inside a piece its ends are looked at
LAST_COIN = 1 - 2.0**-24


def probs(logits, temperature=1.0, top_k=0, top_p=1.0):
    """One row, by sorting."""
    logits = np.asarray(logits, np.float64)
    order = np.argsort(-logits, kind="stable")
    if not temperature > 0:
        return np.eye(len(logits))[order[0]]
    p = np.exp((logits - logits.max()) / temperature)
    p /= p.sum()
    if 0 < top_k < len(p):
        p[order[top_k:]] = 0
        p /= p.sum()
    if top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        p[order[1:][before[1:] >= top_p]] = 0
        p /= p.sum()
    return p


@dataclass
class Problem:
    """Target and draft over V tokens, S drafts; tables are indexed by the prefix as a tuple.

    logits[prefix], of 0 .. S tokens: the target's; p and q: the distributions; settings: of `Sampling`.
    """

    V: int
    S: int
    logits: dict
    q: dict
    settings: dict
    p: dict = field(init=False)

    def __post_init__(self):
        self.p = {prefix: probs(row, **self.settings) for prefix, row in self.logits.items()}

    @classmethod
    def random(cls, rng, V, S, settings, draft_settings=None):
        """A draft that is like the target, but not it; with settings of its own where they are given."""
        logits, q = {}, {}
        for depth in range(S + 1):
            for prefix in itertools.product(range(V), repeat=depth):
                logits[prefix] = rng.normal(size=V).astype(np.float32)
                if depth < S:
                    guess = logits[prefix] + rng.normal(size=V)
                    q[prefix] = probs(guess, **(draft_settings or {})).astype(np.float32)
        return cls(V, S, logits, q, settings)

    def drafts(self):
        """(drafts, their probability) for all that can be drawn."""
        for draft in itertools.product(range(self.V), repeat=self.S):
            weight = np.prod([np.float64(self.q[draft[:i]][draft[i]]) for i in range(self.S)])
            if weight > 0:
                yield draft, weight

    def target_law(self):
        """float64[V] * (S + 1): the target's own law of the next S + 1 tokens."""
        law = np.zeros((self.V,) * (self.S + 1))
        for run in np.ndindex(law.shape):
            law[run] = np.prod([self.p[run[:i]][run[i]] for i in range(self.S + 1)])
        return law

    def extend(self, run, weight, law):
        """Adds a run of this weight to the law, with the target's own tokens behind it."""
        if len(run) == self.S + 1:
            law[run] += weight
            return
        for token, p in enumerate(self.p[run]):
            if p > 0:
                self.extend((*run, token), weight * p, law)


def rejection_jumps(problem, draft):
    """(jumps of each accept coin, jumps of the draw coin of each row)."""
    p, q, S = problem.p, problem.q, problem.S
    prefixes = [draft[:i] for i in range(S + 1)]
    accept = [[p[x][d] / q[x][d]] for x, d in zip(prefixes, draft, strict=False)]
    draws = [cdf(np.maximum(p[x] - q[x], 0)) for x in prefixes[:S]]
    return accept, [*draws, cdf(p[draft])]


def block_jumps(problem, draft):
    p, q, S = problem.p, problem.q, problem.S
    h = [1.0]
    for i in range(S):
        h.append(min(h[-1] * p[draft[:i]][draft[i]] / q[draft[:i]][draft[i]], 1))
    accept = []
    for i in range(1, S + 1):
        rate = h[i]
        if i < S and 0 < rate < 1:
            rest = np.maximum(h[i] * p[draft[:i]] - q[draft[:i]], 0).sum()
            rate = rest / (rest + 1 - h[i])
        accept.append([rate])
    draws = [cdf(np.maximum(h[i] * p[draft[:i]] - q[draft[:i]], 0)) for i in range(S)]
    return accept, [*draws, cdf(p[draft])]


def cdf(weights):
    total = weights.sum()
    return list(np.cumsum(weights) / total) if total > 0 else []


def pieces(jumps):
    """[(piece, coin, weight)] of one coin: the ends of every piece between jumps, each with half its length."""
    edges = np.unique(np.clip([0.0, 1.0, *jumps], 0, 1))
    out = []
    for piece, (low, high) in enumerate(itertools.pairwise(edges)):
        if high - low > 4 * EDGE:
            first = low + EDGE if low > 0 else 0.0
            last = high - EDGE if high < 1 else LAST_COIN
            out += [(piece, first, (high - low) / 2), (piece, last, (high - low) / 2)]
        else:
            out.append((piece, (low + high) / 2, high - low))
    return out


def product(coins):
    """Pieces of several coins: (piece int[n], coins float[n, number], weight float[n])."""
    sizes = [len(c) for c in coins]
    index = np.indices(sizes).reshape(len(sizes), -1)
    values = np.stack([np.array([x[1] for x in c])[i] for c, i in zip(coins, index, strict=True)], axis=1)
    weight = np.prod([np.array([x[2] for x in c])[i] for c, i in zip(coins, index, strict=True)], axis=0)
    piece = np.zeros(index.shape[1], int)
    for c, i in zip(coins, index, strict=True):
        piece = piece * len(c) + np.array([x[0] for x in c])[i]
    return piece, values, weight

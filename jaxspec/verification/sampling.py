"""The distribution that a request samples from: temperature, then top-k, then top-p.

A row of logits is described by a `Law`, five numbers that give any token's probability, so that a verifier that needs
the probability of a few tokens makes no array of the size of the logits:

    weight(token) = exp((logit - peak) / temperature) if the token is kept, else 0;  probability = weight / total

Tokens are ordered by logit, the lowest id first among equals. The kept ones are the first of that order: all above a
cutoff and, of those equal to it, all up to a last id. The cutoff is found by a search over the bits of a float, two of
them a pass over the row, and only if a request in the batch asks for it.

Verifiers go through their D rows one after the other, `each_row`, so their temporaries are of the size of one, [B, V].
"""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.verification.draws import first_above

Array = jax.Array

_LARGEST = float(jnp.finfo(jnp.float32).max)
_SMALLEST = float(jnp.finfo(jnp.float32).tiny)
_HOTTEST = 1e30  # at which a logit that is not a number still weighs nothing beside one that is


@flax.struct.dataclass
class Sampling:
    """How each request samples. All are arrays: a change compiles nothing.

    Attributes:
      temperature: float32[B]; the request is greedy unless it is above 0.
      top_k: int32[B], the most tokens that are kept; not above 0 for all.
      top_p: float32[B], the least mass that is kept, as the fewest most likely tokens that have it; from 1 on all. The
        most likely token is kept whatever it is.
      seed: uint32[B], of the request's coins; see `jaxspec.verification.coins`.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    seed: Array

    @classmethod
    def of(cls, batch: int, *, temperature=0.0, top_k=0, top_p=1.0, seed=0) -> "Sampling":
        """Each of the settings may be a number for all requests or one for each.

        Example:
          >>> Sampling.of(2, temperature=[0.0, 0.7], seed=5).temperature.tolist() == [0.0, jnp.float32(0.7)]
          True
        """
        named = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
        types = {"temperature": jnp.float32, "top_k": jnp.int32, "top_p": jnp.float32, "seed": jnp.uint32}
        arrays = {}
        for name, value in named.items():
            array = jnp.asarray(value, types[name])
            if array.shape not in ((), (batch,)):
                raise ValueError(
                    f"{name} has shape {array.shape}: give one number, or one for each of {batch} requests"
                )
            arrays[name] = jnp.broadcast_to(array, (batch,))
        return cls(**arrays)

    @property
    def greedy(self) -> Array:
        """bool[B], the requests that take the most likely token; a temperature that is not a number is one."""
        return ~(self.temperature > 0)


@flax.struct.dataclass
class Law:
    """The distribution of each row; see the head of this module.

    Fields are [B], or [B, D] for all rows of a round.

    Attributes:
      peak: float32, the largest logit.
      temperature: float32, above 0.
      cutoff: float32, all tokens with a larger logit are kept.
      last: int32, of the tokens whose logit is the cutoff those up to this id are kept.
      total: float32, sum of the weights.
    """

    peak: Array
    temperature: Array
    cutoff: Array
    last: Array
    total: Array

    def weigh(self, logits: Array, index: Array) -> Array:
        """float32[..., n], weights of the tokens with ids `index` and `clean` logits, both [..., n]."""
        peak, temperature, cutoff, last = (x[..., None] for x in (self.peak, self.temperature, self.cutoff, self.last))
        # The peak is -inf where nothing may be said, and from that nothing can be subtracted.
        scaled = jnp.where(logits == peak, 0, (logits - peak) / temperature)
        kept = (logits > cutoff) | ((logits == cutoff) & (index <= last))
        return jnp.where(kept, jnp.exp(scaled), 0)

    def probs(self, logits: Array, index: Array) -> Array:
        """float32[..., n], probabilities of the same tokens."""
        return self.weigh(logits, index) / self.total[..., None]


@flax.struct.dataclass
class Rows:
    """Rows of logits as they come from a model; they are cleaned where they are read.

    Attributes:
      logits: float[B, V], or [B, D, V] for all rows of a round.
      mask: bool[B, V], or [B, D, V] or [B, 1, V], the tokens that may be said, or None for all of them.
    """

    logits: Array
    mask: Array | None = None

    @property
    def size(self) -> int:
        return self.logits.shape[-1]

    def all(self) -> tuple[Array, Array]:
        """(clean logits float32[..., V], ids int32[..., V])."""
        return clean(self.logits, self.mask), lax.broadcasted_iota(jnp.int32, self.logits.shape, self.logits.ndim - 1)

    def at(self, index: Array) -> tuple[Array, Array]:
        """(clean logits float32[..., n], ids): those at index int32[..., n], all in range."""
        mask = None if self.mask is None else jnp.take_along_axis(self.mask, index, axis=-1)
        return clean(jnp.take_along_axis(self.logits, index, axis=-1), mask), index


def rows_of(logits: Array, mask: Array | None) -> Rows:
    """`Rows`; a mask of [B, V] holds for all D rows of a request."""
    if mask is None:
        return Rows(logits)
    B, V = logits.shape[0], logits.shape[-1]
    if mask.shape not in ((B, V), logits.shape):
        raise ValueError(
            f"mask has shape {mask.shape} with logits of {logits.shape}: give one row of {V} for each of the {B} "
            f"requests, or one for each row of logits"
        )
    if mask.ndim < logits.ndim:
        mask = mask[:, None]
    return Rows(logits, mask)


def each_row(f: Callable, *rounds: Any) -> Any:
    """f for one row of each request after the other.

    Args:
      f: takes what is left of `rounds` without axis 1, returns arrays [B].
      rounds: pytrees of arrays [B, D, ...]; where axis 1 is shorter the last entry stands for those behind it.

    Returns:
      What f returns, [B, D].
    """

    def row(j):
        return f(*jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, jnp.minimum(j, x.shape[1] - 1), 1, False), rounds))

    D = max(x.shape[1] for x in jax.tree.leaves(rounds))
    column = jnp.arange(D, dtype=jnp.int32)

    def put(j, tables):
        # A masked write, not a slice, which would keep the loop out of a command buffer.
        return jax.tree.map(lambda table, x: jnp.where(column == j, x[:, None], table), tables, row(j))

    empty = jax.tree.map(lambda x: jnp.zeros((len(x), D), x.dtype), jax.eval_shape(row, jnp.int32(0)))
    return lax.fori_loop(0, D, put, empty)


def pick_row(rounds: Any, row: Array) -> Any:
    """One row of each request: arrays [B, D, ...] and row int32[B] give [B, ...]; axis 1 may be shorter as above."""

    def pick(x):
        index = jnp.minimum(row, x.shape[1] - 1).reshape((-1,) + (1,) * (x.ndim - 1))
        return jnp.take_along_axis(x, index, axis=1)[:, 0]

    return jax.tree.map(pick, rounds)


def clean(logits: Array, mask: Array | None) -> Array:
    """float32 logits that are finite, with one 0, and -inf only for what may not be said.

    NaN and -inf become the smallest finite number: they weigh nothing beside any other logit, but where the mask leaves
    nothing else they may be said and the rest may not.
    """
    logits = logits.astype(jnp.float32)
    logits = jnp.where(jnp.isnan(logits), -_LARGEST, jnp.clip(logits, -_LARGEST, _LARGEST))
    logits = jnp.where(jnp.abs(logits) < _SMALLEST, 0, logits)
    return logits if mask is None else jnp.where(mask, logits, -jnp.inf)


def law_of(rows: Rows, sampling: Sampling) -> Law:
    """The law of each row.

    Args:
      rows: of [B, V].
      sampling: `Sampling` of the B requests.

    Returns:
      `Law` with fields [B].
    """
    logits, _ = rows.all()
    peak, best = logits.max(axis=-1), jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # Where nothing may be said there is nothing to draw from: such a row says token 0.
    greedy = sampling.greedy | (peak == -jnp.inf)
    law = Law(
        peak=peak,
        temperature=jnp.where(greedy, 1, jnp.clip(sampling.temperature, _SMALLEST, _HOTTEST)),
        cutoff=jnp.full_like(peak, -jnp.inf),
        last=jnp.full_like(best, rows.size - 1),
        total=jnp.zeros_like(peak),
    )
    top_k, top_p = sampling.top_k, sampling.top_p
    by_count = ~greedy & (top_k > 0) & (top_k < rows.size)
    by_mass = ~greedy & ~(top_p >= 1)
    law = lax.cond(by_count.any(), lambda law: _keep_count(rows, law, top_k, by_count), lambda law: law, law)
    law = lax.cond(by_mass.any(), lambda law: _keep_mass(rows, law, top_p, by_mass), lambda law: law, law)
    law = law.replace(cutoff=jnp.where(greedy, peak, law.cutoff), last=jnp.where(greedy, best, law.last))
    return law.replace(total=law.weigh(*rows.all()).sum(axis=-1))


def target_probs(logits: Array, sampling: Sampling, mask: Array | None = None) -> Array:
    """What each row's token is drawn from: temperature, then top-k, then top-p of what top-k has left.

    Args:
      logits: float[B, V] or [B, D, V]. NaN weighs nothing beside a number; a row of nothing else is uniform.
      sampling: `Sampling` of the B requests. A greedy request gets all mass on its most likely token.
      mask: bool[B, V] or of the shape of the logits, the tokens that may be said; None for all of them. A row in which
        nothing may be said gets all mass on token 0.

    Returns:
      float32 of the shape of the logits, rows that sum to 1. Ties go to the lowest id, also at the edge of top-k and
      of top-p.

    Example:
      >>> logits = jnp.log(jnp.array([[0.85, 0.10, 0.05], [0.2, 0.4, 0.4]]))
      >>> probs = target_probs(logits, Sampling.of(2, temperature=[2.0, 0.0], top_p=0.8))
      >>> [[f"{p:.4f}" for p in row] for row in probs.tolist()]
      [['0.7446', '0.2554', '0.0000'], ['0.0000', '1.0000', '0.0000']]
    """
    rows = rows_of(logits, mask)
    if logits.ndim == 2:
        law = law_of(rows, sampling)
    else:
        law = each_row(lambda rows: law_of(rows, sampling), rows)
    return law.probs(*rows.all())


def draw(rows: Rows, law: Law, coin: Array) -> Array:
    """int32[B], a token of each row [B, V] by its law; coin float32[B] in [0, 1)."""

    def part(index):
        return law.weigh(*(rows.all() if index is None else rows.at(index)))

    return first_above(part, rows.size, coin)


def _keep_count(rows: Rows, law: Law, top_k: Array, active: Array) -> Law:
    """Cuts the rows that are `active` to their top_k best tokens."""
    cutoff = _cutoff(rows, lambda logits, index: jnp.float32(1), top_k.astype(jnp.float32))
    above = (rows.all()[0] > cutoff[..., None]).sum(axis=-1, dtype=jnp.int32)
    return _cut(rows, law, cutoff, top_k - above, active)


def _keep_mass(rows: Rows, law: Law, top_p: Array, active: Array) -> Law:
    """Cuts the rows that are `active` to the best tokens whose mass reaches top_p."""
    logits, index = rows.all()
    # At least the most likely token stays, though its share of a request for nothing, or for NaN, were enough.
    wanted = jnp.where(top_p > _SMALLEST, top_p, _SMALLEST) * law.weigh(logits, index).sum(axis=-1)
    cutoff = jnp.minimum(_cutoff(rows, law.weigh, wanted), law.peak)
    weights = law.weigh(logits, index)
    above = jnp.where(logits > cutoff[..., None], weights, 0).sum(axis=-1)
    each = law.replace(cutoff=jnp.full_like(cutoff, -jnp.inf)).weigh(cutoff[..., None], 0)[..., 0]
    ties = jnp.ceil((wanted - above) / jnp.maximum(each, _SMALLEST))
    return _cut(rows, law, cutoff, jnp.clip(ties, 1, rows.size).astype(jnp.int32), active)


def _cut(rows: Rows, law: Law, cutoff: Array, ties: Array, active: Array) -> Law:
    """Moves the cutoff of `active` rows, and keeps `ties` of the tokens that are equal to it."""

    def part(index):
        logits, _ = rows.all() if index is None else rows.at(index)
        return (logits == cutoff[..., None]).astype(jnp.float32)

    # The running count of ties exceeds ties - 1/2 at the last one that is kept.
    last = first_above(part, rows.size, None, goal=ties.astype(jnp.float32) - 0.5)
    last = jnp.where(cutoff == law.cutoff, jnp.minimum(last, law.last), last)
    return law.replace(cutoff=jnp.where(active, cutoff, law.cutoff), last=jnp.where(active, last, law.last))


def _cutoff(rows: Rows, weigh, wanted: Array) -> Array:
    """float32[...], the largest logit such that the tokens at and above it weigh `wanted`; -inf if all of them do not.

    weigh(logits, index) gives weights of at least 0.
    """

    def probe(step, found):
        # Two bits at once: what is at and above the three next limits is summed in one pass over the row.
        logits, index = rows.all()
        order, weights = _order(logits), weigh(logits, index)
        shift = (30 - 2 * step).astype(jnp.uint32)
        passed = jnp.zeros_like(found)
        for digit in (1, 2, 3):
            limit = found | (jnp.uint32(digit) << shift)
            weight = jnp.where(order >= limit[..., None], weights, 0).sum(axis=-1)
            passed = passed + (weight >= wanted).astype(jnp.uint32)
        return found | (passed << shift)

    found = lax.fori_loop(0, 16, probe, jnp.zeros(wanted.shape, jnp.uint32))
    return _number(jnp.maximum(found, _order(jnp.float32(-jnp.inf))))


def _order(logits: Array) -> Array:
    """uint32 in the order of clean logits."""
    bits = lax.bitcast_convert_type(logits, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _number(order: Array) -> Array:
    """The inverse of `_order`."""
    sign = jnp.uint32(1 << 31)
    return lax.bitcast_convert_type(jnp.where(order >= sign, order ^ sign, ~order), jnp.float32)

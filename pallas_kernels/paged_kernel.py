"""The launches of `paged_attention` in Pallas Triton: parts of contexts, then their combination.

The rows that share a K/V head are packed into tiles: row r of a head's is query d = r // G, head g = r % G of the G
that share it. A program takes one tile and one *part* of the request's context, and goes through its keys in blocks:
scores, their running maximum, the sum of their powers and the weighted sum of V rows, all float32. How many parts there
are at most is known at compile time, how many a context has follows from its length:

    keys lo .. hi of the tile       1000 .. 5096, 4096 keys
    parts, one for 128 keys begun   min(plan.usual_parts, ceil(4096 / 128)) = 4, say: 1024 keys each, in whole blocks

Programs of parts that are not there end at once. The launch so depends on shapes alone, and no bit of a request's
result depends on the other requests. Parts meet in a second launch, a program a row; a single part writes the result
itself.

Nothing is read that no row sees: lanes of keys outside lo .. hi are masked, in the page table too. A spare row or lane
has an index of its own, past the end perhaps, and a mask by which it touches no memory: where a store is interpreted,
the old value goes back through masked lanes, so no two may share an index.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.lanes import power
from pallas_kernels.paged_plan import Plan
from pallas_kernels.paged_rows import PagedRows, RowPlace, as_dtype
from pallas_kernels.triton import pltriton

Array = jax.Array

NEVER = np.float32(-1e30)  # the score of a key that is not seen; finite, so that differences of two are numbers
LOG2E = math.log2(math.e)


def _tile_of(plan: Plan, program, inner: int):
    """(request, part, tile, K/V head) of a program; the heads of a page's tokens are neighbours in time."""
    heads, tiles = np.int32(plan.rows.kv_heads), np.int32(plan.tiles)
    rest, head = lax.div(program, heads), lax.rem(program, heads)
    rest, tile = lax.div(rest, tiles), lax.rem(rest, tiles)
    return lax.div(rest, np.int32(inner)), lax.rem(rest, np.int32(inner)), tile, head


def _span(plan: Plan, positions, lens, request, tile):
    """Of a tile: positions int32[tile] of its rows, -1 of spare ones; lo and hi, the keys that some row sees; keys
    a part, in whole blocks."""
    row = lax.iota(jnp.int32, plan.tile) + tile * plan.tile
    live = row < plan.D * plan.group
    d = lax.div(row, np.int32(plan.group))
    at = pltriton.load(positions.at[request, jnp.where(live, d, 0)], mask=live, other=np.int32(-1))
    length, newest = lens[request], jnp.max(at)
    if plan.causal:
        hi = jnp.minimum(length, newest + 1)
    else:
        hi = jnp.where(newest < 0, 0, length)
    hi = jnp.minimum(hi, plan.capacity)
    lo = jnp.int32(0)
    if plan.window is not None:
        oldest = jnp.min(jnp.where(at < 0, np.int32(2**30), at))
        lo = jnp.minimum(jnp.maximum(oldest - (plan.window - 1), 0), hi)
    count = hi - lo
    usual = min(plan.usual_parts, plan.parts)
    parts = jnp.clip(_cdiv(count, plan.sizes.least_keys), 1, usual)
    parts = jnp.clip(_cdiv(count, plan.sizes.most_keys), parts, plan.parts)
    blocks = _cdiv(count, plan.block)
    return at, lo, hi, jnp.maximum(lax.div(blocks + parts - 1, parts), 1) * plan.block


def _cdiv(x, n: int):
    """x / n, rounded up, of x >= 0."""
    return lax.div(x + np.int32(n - 1), np.int32(n))


def attend(plan: Plan, q: Array, rows: PagedRows, page_table: Array, positions: Array, lens: Array, *, interpret: bool):
    """[B, D, H, out_dim] of q [B, D, H, head_dim] over `rows`; see `paged_attention`."""
    B, D, H, parts, each = plan.B, plan.D, plan.H, plan.parts, plan.programs
    result = jax.ShapeDtypeStruct((B * D * H, plan.rows.out_dim), q.dtype)
    sums = jax.ShapeDtypeStruct((each * parts * plan.tile, plan.out), jnp.float32)
    scalars = jax.ShapeDtypeStruct((each * plan.tile, parts), jnp.float32)

    def first(*refs):
        _attend_part(plan, interpret, *refs[:5], refs[5:])

    found = pl.pallas_call(
        first,
        grid=(each * parts,),
        name="paged_attention",
        out_shape=[result] if parts == 1 else [result, sums, scalars, scalars],
        compiler_params=pltriton.CompilerParams(num_warps=plan.warps, num_stages=plan.stages),
        interpret=interpret,
    )(q.reshape(B * D * H, q.shape[3]), rows.buffer, page_table, positions, lens)
    if parts > 1:
        found = pl.pallas_call(
            lambda *refs: _combine(plan, *refs),
            grid=(B * D * H,),
            name="paged_attention_combine",
            out_shape=[result],
            input_output_aliases={0: 0},
            compiler_params=pltriton.CompilerParams(num_warps=plan.combine_warps, num_stages=1),
            interpret=interpret,
        )(*found, positions, lens)
    return found[0].reshape((*q.shape[:3], plan.rows.out_dim))


def _attend_part(plan: Plan, interpret: bool, q, buffer, table, positions, lens, outs: tuple) -> None:
    """A tile of rows over one part of a context."""
    request, part, tile, head = _tile_of(plan, pl.program_id(0), plan.parts)
    at, lo, hi, share = _span(plan, positions, lens, request, tile)
    start = lo + part * share
    inside = lax.iota(jnp.int32, plan.tile)
    row = inside + tile * plan.tile
    real = row < plan.D * plan.group
    place = request * (plan.D * plan.H) + lax.div(row, np.int32(plan.group)) * plan.H
    place += head * plan.group + lax.rem(row, np.int32(plan.group))

    def work():
        end = jnp.minimum(start + share, hi)
        queries = _load(q, place, 0, plan.rows.head_dim, plan.key, real)
        step = _block(plan, interpret, buffer, table, request, head, at, queries, lo, end)
        turns = _cdiv(end - start, plan.block)
        peak = jnp.full((plan.tile,), NEVER, jnp.float32)
        carry = peak, jnp.zeros((plan.tile,), jnp.float32), jnp.zeros((plan.tile, plan.out), jnp.float32)
        # Blocks that every row sees whole need no masks. A window has few of them: not worth a loop of their own.
        whole = jnp.int32(0)
        if plan.window is None:
            oldest = jnp.min(jnp.where(real, at, np.int32(2**30)))
            seen = jnp.minimum(end, oldest + 1) if plan.causal else jnp.where(oldest < 0, 0, end)
            whole = lax.div(jnp.maximum(seen - start, 0), np.int32(plan.block))
            carry = lax.fori_loop(0, whole, lambda i, carry: step(start + i * plan.block, carry, False), carry)
        carry = lax.fori_loop(whole, turns, lambda i, carry: step(start + i * plan.block, carry, True), carry)
        peak, total, sums = carry

        def alone():
            result = sums / jnp.where(total == 0, 1.0, total)[:, None]
            _store(outs[0], place, plan.rows.out_dim, plan.out, result, real)

        def beside_others():
            base = (request * plan.tiles + tile) * plan.rows.kv_heads + head
            _store(outs[1], (base * plan.parts + part) * plan.tile + inside, plan.out, plan.out, sums, real)
            for out, value in zip(outs[2:], (peak, total), strict=True):
                index = base * plan.tile + inside, jnp.full_like(inside, 0) + part
                pltriton.store(out.at[index], value, mask=real)

        if plan.parts == 1:
            alone()
        else:
            pl.when(hi - lo <= share)(alone)
            pl.when(hi - lo > share)(beside_others)

    # The first part is there even where nothing is seen: it writes zeros.
    pl.when((part == 0) | (start < hi))(work)


def _block(plan: Plan, interpret: bool, buffer, table, request, head, at, queries, lo, end):
    """step(first key, (peak, total, sums)): the sums with one more block of keys, up to `end`."""
    rows, factor = plan.rows, np.float32(plan.scale * LOG2E)

    def part(entry, there, first, width, lanes):
        grain = math.gcd(first, width)
        return _load(buffer, entry, first + head * width, width, lanes, there, rows, grain).astype(queries.dtype)

    def step(first, carry, masked):
        peak, total, sums = carry
        key = first + lax.iota(jnp.int32, plan.block)
        there = key < end if masked else None
        key_there = jnp.where(there, key, lo) if masked else key
        column, offset = (key_there, None) if plan.by_slot else _div(key_there, rows.page_size)
        index = jnp.zeros_like(column) + request, column
        page = pltriton.load(table.at[index], mask=there, other=np.int32(0) if masked else None)
        if plan.by_slot:
            page, offset = _div(page, rows.page_size)
        entry = page * rows.page_rows + offset * rows.entry_rows
        keys = part(entry, there, rows.key, rows.head_dim, plan.key)
        values = keys
        # Where no other block is on its way, V is asked for before K is waited for.
        if plan.stages == 1 and not rows.values_are_keys:
            values = part(entry, there, rows.value, rows.value_dim, plan.out)
        scores = _product(queries, keys, 1, interpret) * factor
        if masked:
            seen = there[None] & (key[None] <= at[:, None] if plan.causal else at[:, None] >= 0)
            if plan.window is not None:
                seen &= key[None] > at[:, None] - plan.window
            scores = jnp.where(seen, scores, NEVER)
        higher = jnp.maximum(peak, jnp.max(scores, axis=1))
        weights = jnp.exp2(scores - higher[:, None])
        if masked:
            weights = jnp.where(seen, weights, 0.0)
        fade = jnp.exp2(peak - higher)
        if plan.stages > 1 and not rows.values_are_keys:
            values = part(entry, there, rows.value, rows.value_dim, plan.out)
        sums = sums * fade[:, None] + _product(weights.astype(queries.dtype), values, 0, interpret)
        return higher, total * fade + jnp.sum(weights, axis=1), sums

    return step


def _combine(plan: Plan, before, sums, peaks, totals, positions, lens, out) -> None:
    """One row's parts become its result; that of a single part is there, and stays."""
    del before
    program = pl.program_id(0)
    query, head = lax.div(program, np.int32(plan.H)), lax.rem(program, np.int32(plan.H))
    request, d = lax.div(query, np.int32(plan.D)), lax.rem(query, np.int32(plan.D))
    row = d * plan.group + lax.rem(head, np.int32(plan.group))
    tile, inside = lax.div(row, np.int32(plan.tile)), lax.rem(row, np.int32(plan.tile))
    base = (request * plan.tiles + tile) * plan.rows.kv_heads + lax.div(head, np.int32(plan.group))
    _, lo, hi, share = _span(plan, positions, lens, request, tile)
    parts = lax.div(hi - lo + share - 1, share)
    chunk = min(power(plan.parts), plan.sizes.chunk)

    def step(i, carry):
        highest, total, result = carry
        part = lax.iota(jnp.int32, chunk) + i * chunk
        there = part < parts
        part = jnp.where(there, part, 0)
        index = jnp.zeros_like(part) + (base * plan.tile + inside), part
        peak = pltriton.load(peaks.at[index], mask=there, other=NEVER)
        each = pltriton.load(totals.at[index], mask=there, other=np.float32(0))
        found = _load(sums, (base * plan.parts + part) * plan.tile + inside, 0, plan.out, plan.out, there)
        higher = jnp.maximum(highest, jnp.max(peak))
        weight, fade = jnp.exp2(peak - higher), jnp.exp2(highest - higher)
        result = result * fade + jnp.sum(found * weight[:, None], axis=0)
        return higher, total * fade + jnp.sum(each * weight), result

    def work():
        carry = NEVER + jnp.float32(0), jnp.float32(0), jnp.zeros((plan.out,), jnp.float32)
        turns = _cdiv(parts, chunk)
        _, total, result = lax.fori_loop(0, turns, step, carry)
        lane = lax.iota(jnp.int32, plan.out)
        result = (result / jnp.where(total == 0, 1.0, total)).astype(out.dtype)
        index = jnp.zeros_like(lane) + program, lane
        pltriton.store(out.at[index], result, mask=lane < plan.rows.out_dim)

    pl.when(parts > 1)(work)


def _load(ref, row, first, width: int, lanes: int, real, place: RowPlace | None = None, grain: int = 1):
    """[rows, lanes] of a 2-D array: `width` cells from `first` on of each row that is real, zeros elsewhere. Without
    `real` all are.

    With `place` the array is a buffer of K and V, whose entries may fill several of its rows; `first` is then a
    multiple of `grain`.
    """
    lane, W = lax.iota(jnp.int32, lanes), ref.shape[1]
    shape, mask = (row.shape[0], lanes), None
    row = jnp.broadcast_to(row[:, None], shape)
    if real is not None:
        mask = jnp.broadcast_to(real[:, None], shape)
    if width < lanes:
        inside = jnp.broadcast_to((lane < width)[None], shape)
        mask = inside if mask is None else mask & inside
    cell = lane + first
    if place is not None and place.end > W:
        more, cell = cells_of(first, lane, width, W, grain)
        row += more if more.ndim == 0 else more[None]
    index = row, jnp.broadcast_to(cell[None], shape)
    found = pltriton.load(ref.at[index], mask=mask, other=None if mask is None else ref.dtype.type(0))
    return found if place is None else as_dtype(found, place.dtype)


def cells_of(first, lane, width: int, W: int, grain: int):
    """Rows to go down and columns of the cells first + lane, W a row.

    In the two usual cases the columns are seen to be neighbours, and many are loaded by one instruction.
    """
    size = np.int32(W)
    if grain % W == 0:
        return lax.div(first, size) + lax.div(lane, size), lax.rem(lane, size)
    if W % width == 0 and grain % width == 0:
        return lax.div(first, size), lax.rem(first, size) + lane
    return lax.div(first + lane, size), lax.rem(first + lane, size)


def _store(ref, row, width: int, lanes: int, value, real) -> None:
    """The first `width` lanes of each real row of [rows, lanes] to a row of a 2-D array."""
    lane = lax.iota(jnp.int32, lanes)
    mask = jnp.broadcast_to(real[:, None], value.shape)
    if width < lanes:
        mask &= (lane < width)[None]
    index = jnp.broadcast_to(row[:, None], value.shape), jnp.broadcast_to(lane[None], value.shape)
    pltriton.store(ref.at[index], value.astype(ref.dtype), mask=mask)


def _div(x, n: int):
    """Quotient and remainder of x >= 0 by a constant."""
    if n & (n - 1):
        return lax.div(x, np.int32(n)), lax.rem(x, np.int32(n))
    return lax.shift_right_logical(x, np.int32(n.bit_length() - 1)), x & np.int32(n - 1)


def _product(a, b, contracted: int, interpret: bool):
    """float32[m, n]: a [m, k] by b, its axis `contracted` summed over. On the device a
    float32 operand is split into two numbers of 11 bits, and three of their products are summed."""
    precision = None
    if a.dtype == jnp.float32:
        precision = lax.Precision.HIGHEST if interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    dimensions = (((1,), (contracted,)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)

"""Runs calls on a GPU backend, for compute-sanitizer to watch: `python sanitized.py BACKEND [--planted | NAME ...]`.

    XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async compute-sanitizer --tool memcheck --error-exitcode 99 \
        python sanitized.py triton

with the repository and its tests/ on PYTHONPATH.

XLA's own allocator hands out parts of one large allocation, in which an overrun stays unseen. The platform allocator of
jax 0.11 maps whole pages of 2 MB, whose unused end hides one as well: an overrun by 512 bytes was reported with
cuda_async, whose buffers memcheck knows to the byte, and not with platform. `--planted` runs a kernel that stores one
vector past the end of its buffer instead. NAMEs are the first letters of the calls that are run;
without any, all are that the backend runs.

Buffers of calls of kernels with products end with the last live key or page, and ids of pages that nobody sees are
wild.
"""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import kernel_attention as attention
import kernel_calls
import numpy as np
import test_head_rotary
import test_pool_scores
import test_row_products
import test_row_sums
import test_store_heads
import test_store_rows
import test_top_ids

from pallas_kernels import backend as backends
from pallas_kernels import head_rotary, paged_attention, paged_kernel, pool_scores, top_ids
from pallas_kernels.dispatch import LANES_ONLY
from pallas_kernels.paged_plan import SIZES

WILD = 2**30, 2**30 + 99_999  # pages; of 4 rows the first starts at row 0 in 32 bits, the second far outside


@dataclasses.dataclass(frozen=True)
class Overrun:
    """Stores one vector behind a buffer of 128 cells."""

    name = "overrun"
    programs = 1
    labels = ("values",)
    reference_is_faster = False

    def body(self, lanes, program, ins, outs):
        lane = lanes.iota(128)
        value = lanes.load(ins[0], (lane,), lane < 128)
        lanes.store(outs[0], (lane + 128,), value, lane < 128)

    def reference(self, inputs, outputs):
        return outputs


def snug(call: attention.Problem) -> attention.Problem:
    """The same call; the page of the last request's last key is the last one, and the buffer ends with that key."""
    place, last = call.place, int(call.lengths[-1]) - 1
    pages = 1 + call.table.size
    order = np.arange(pages)
    swapped = call.table[-1, last // place.page_size], pages - 1
    order[list(swapped)] = swapped[::-1]
    known = (call.table >= 0) & (call.table < pages)
    table = np.where(known, order[np.where(known, call.table, 0)], call.table)
    each = call.buffer[: pages * place.page_rows].reshape(pages, place.page_rows, -1)[order]
    end = (pages - 1) * place.page_rows + last % place.page_size * place.entry_rows
    end += -(-place.end // call.buffer.shape[1])
    buffer = each.reshape(-1, call.buffer.shape[1])[:end]
    return dataclasses.replace(call, buffer=buffer, table=table.astype(np.int32))


def attend(backend, lengths, D, *, parts, sizes=SIZES, slots=False, **settings):
    """The kernel's launches one by one, so that what parts leave to the second one lies in buffers of its own."""
    call = snug(attention.problem(np.random.default_rng(0), lengths, D, wild=WILD, **settings))
    plan = attention.plan_of(call, sizes)
    if slots:
        page_size = call.place.page_size
        table = np.where(call.table >= 2**30, 2**30, call.table * page_size)[..., None] + np.arange(page_size)
        call = dataclasses.replace(call, table=table.reshape(len(table), -1).astype(np.int32))
        plan = dataclasses.replace(plan, by_slot=True, P=call.table.shape[1])
    assert (plan.parts > 1) == parts, plan.parts
    granularity = "token" if slots else "page"
    expected = paged_attention(*call.arguments, **call.settings, granularity=granularity, backend="reference")
    actual = paged_kernel.attend(plan, *call.arguments, interpret=backend == "interpret")
    attention.assert_near(np.asarray(actual), np.asarray(expected, np.float64))


def score(backend, storage, **sizes):
    """The second request sees a part of its last page; rows behind the last page in use are cut off."""
    problem = test_pool_scores.Problem(np.random.default_rng(0), storage=storage, **sizes)
    problem.lens = np.int32([[0, 9, 3], [17, problem.P * problem.pools - 3, 16]])
    live = problem.live_pages()
    problem.poison()
    query, weights, index, table, lens = problem.arguments()
    last = int(problem.table[live].max())
    stored = problem.pools * (problem.X + 4) // index.packed  # cells
    end = last * index.page_rows + index.first_row + -(-stored // index.buffer.shape[1])
    index = dataclasses.replace(index, buffer=index.buffer[:end])
    readable = jnp.where(live, table, last)  # the reference reads all pages of its table
    expected = pool_scores(query, weights, index, readable, lens, backend="reference")
    actual = pool_scores(query, weights, index, table, lens, backend=backend)
    seen = ~np.isnan(problem.oracle())
    np.testing.assert_array_equal(np.asarray(actual)[seen], np.asarray(expected)[seen])


def turn(backend, in_rows=False, **sizes):
    """In rows, those of k end with the buffer."""
    problem = test_head_rotary.Problem(np.random.default_rng(0), **sizes)
    problem = problem.in_rows("vqk") if in_rows else problem
    arguments = jax.tree.map(jnp.asarray, (problem.q, problem.k, problem.cos, problem.sin))
    scales = {name: jnp.asarray(getattr(problem, name)) for name in ("q_scale", "k_scale")}
    expected = head_rotary(*arguments, **scales, backend="reference")
    actual = head_rotary(*arguments, **scales, backend=backend)
    test_head_rotary.assert_near(*(tuple(map(np.asarray, found)) for found in (actual, expected)))


def multiply(backend, N, K, widths, gated, blocks=None):
    """Every array ends where the last of its cells that are read or written does."""
    problem = test_row_products.Problem(np.random.default_rng(0), N, K, widths, gated, blocks=blocks)
    arrays = jax.tree.map(jnp.asarray, (problem.x, problem.weights, problem.squares))
    problem.check(problem.run(backend, *arrays))


def cut(problem):
    """The buffer ends with the last entry's last cell, up to its row of the buffer, and that entry is stored."""
    place, (page, token) = problem.place, divmod(int(problem.slots[-1, -1]), problem.page_size)
    end = page * place.page_rows + token * place.entry_rows - (-place.end // problem.before.shape[1])
    problem.before = problem.before[:end]
    return problem


def store(backend, **sizes):
    cut(test_store_rows.Problem(np.random.default_rng(0), **sizes)).check(backend)


def turn_and_store(backend, in_rows=None, **sizes):
    """In rows, those of the last one named end with their buffer."""
    problem = cut(test_store_heads.Problem(np.random.default_rng(0), **sizes))
    problem.store.before = problem.before
    problem.check(backend, problem.in_rows(in_rows) if in_rows else None)


def add(backend, **sizes):
    test_row_sums.Problem(np.random.default_rng(0), **sizes).check(backend)


def select(backend, count, budget):
    """Lengths below nothing and past the end, too; NaN behind the live scores."""
    rng = np.random.default_rng(count)
    lens = test_top_ids.edges(budget, count)
    scores = test_top_ids.random_scores(rng, len(lens), count)
    scores[np.arange(count) >= lens[:, None]] = np.nan
    arguments = jnp.asarray(scores), jnp.asarray(lens)
    expected = top_ids(*arguments, budget=budget, backend="reference")
    np.testing.assert_array_equal(top_ids(*arguments, budget=budget, backend=backend), expected)


# Blocks of 16 keys and tiles of 16 rows, parts of 32 keys or more: the second launch has several turns.
MANY = {"parts": True, "sizes": attention.SMALL}
BF16 = {"dtype": "bfloat16", "columns": 24, "page_size": 16}
PRODUCTS = {  # name: call of a backend, which compares it with the reference; 'mosaic' runs none of them
    "attention, one part": functools.partial(
        attend, lengths=(0, 1, 64, 65, 97), D=2, parts=False, **BF16 | {"columns": 8}
    ),
    "attention, parts": functools.partial(attend, lengths=(1, 128, 257, 384, 371), D=2, parts=True, **BF16),
    "attention, small parts": functools.partial(
        attend, lengths=(0, 5, 33, 100, 90), D=9, columns=25, dtype="bfloat16", **MANY
    ),
    "attention, float32": functools.partial(
        attend, lengths=(0, 3, 96, 70), D=3, columns=24, heads=3, kv_heads=3, head_dim=24, value_dim=40, **MANY
    ),
    "attention, window": functools.partial(attend, lengths=(2, 63, 128, 101), D=4, window=40, parts=False, **BF16),
    "attention, pool": functools.partial(
        attend,
        lengths=(0, 16, 100, 90),
        D=2,
        columns=25,
        dtype="bfloat16",
        head_dim=32,
        value_dim=32,
        pool=attention.Pool(64, before=64, section=2),
        **MANY,
    ),
    "attention, slots": functools.partial(
        attend, lengths=(0, 7, 65, 118), D=1, columns=30, slots=True, dtype="bfloat16", **MANY
    ),
    "attention, K alone": functools.partial(
        attend,
        lengths=(0, 1, 64, 117),
        D=2,
        parts=False,
        heads=6,
        kv_heads=3,
        head_dim=40,
        value_dim=0,
        **BF16 | {"columns": 8},
    ),
    "pool scores": functools.partial(score, storage="bytes, a page a row", P=3, pools=64),
    "pool scores, short rows": functools.partial(score, storage="pairs, half a key a row"),
    "head rotary": functools.partial(turn, Hq=32, Hkv=8, head_dim=128, half=64),
    "head rotary, masks": functools.partial(turn, Hq=9, Hkv=3, head_dim=43, half=10, dtype="float16"),
    "head rotary, rows": functools.partial(turn, in_rows=True, Hq=9, Hkv=3, head_dim=40, half=10),
    # Blocks of columns end with the matrices; pieces of K, of 64 and of 128, do not, and there are spare rows.
    "row products, gated": functools.partial(multiply, N=5, K=200, widths=(256, 256), gated=True),
    "row products, several": functools.partial(multiply, N=18, K=200, widths=(128, 64, 192), gated=False),
    "row products, masks": functools.partial(multiply, N=33, K=77, widths=(70, 1), gated=False),
    "row products, divided": functools.partial(multiply, N=5, K=200, widths=(256, 256), gated=True, blocks=3),
    "row products, divided, masks": functools.partial(multiply, N=33, K=77, widths=(70, 1), gated=False, blocks=5),
    # Masked lanes of the last columns lie behind parts, x and the scale.
    "row sums": functools.partial(add, N=5, M=1024, S=3),
    "row sums, masks": functools.partial(add, N=3, M=515, S=2, dtype="float16"),
    # Masked lanes of the last rows lie behind k, v and the buffer.
    "store rows": functools.partial(store, kv_heads=3, head_dim=24, value_dim=40, B=3, D=9),
    "store rows, pool": functools.partial(
        store, head_dim=24, value_dim=40, B=3, D=9, pool=attention.Pool(8, before=8, section=1)
    ),
    "store heads": functools.partial(
        turn_and_store, heads=32, kv_heads=8, head_dim=128, value_dim=128, B=2, D=4, K=4096
    ),
    "store heads, masks": functools.partial(
        turn_and_store,
        heads=9,
        kv_heads=3,
        head_dim=43,
        value_dim=37,
        half=10,
        B=3,
        D=5,
        K=77,
        dtype="float16",
        padding=0.5,
        pool=attention.Pool(8, before=8, section=1),
    ),
    "store heads, rows": functools.partial(
        turn_and_store, in_rows="qkv", heads=9, kv_heads=3, head_dim=24, value_dim=40, half=5, B=3, D=9
    ),
}
SELECTIONS = {
    "top ids": functools.partial(select, count=300, budget=7),
    "top ids, long rows": functools.partial(select, count=33000, budget=40),  # read again for each bit
}
CHECKS = PRODUCTS | SELECTIONS


def compare(found, expected, name):
    """What is moved is equal. Rows of a context are computed, in float32 in another order of their sums."""
    if name.startswith("context rows") and np.issubdtype(found.dtype, np.floating):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6, err_msg=name)
    else:
        np.testing.assert_array_equal(found, expected, err_msg=name)


def main(backend: str, *words: str) -> None:
    if words == ("--planted",):
        buffers = jnp.arange(128, dtype=jnp.int32), jnp.zeros(128, jnp.int32)
        jax.block_until_ready(backends.run(Overrun(), backend, buffers[:1], buffers[1:]))
        return
    chosen = {name: call for name, (call, _, _) in kernel_calls.CALLS.items() if name.startswith(words or "")}
    for name, call in chosen.items():
        print(name, flush=True)  # the last one is known if the process dies
        for seed in range(3):
            arguments = kernel_calls.values(name, seed)
            expected = call(*arguments, backend="reference")
            actual = jax.jit(call, static_argnames="backend", donate_argnums=0)(*arguments, backend=backend)
            for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
                compare(np.asarray(x), np.asarray(y), f"{name}, seed {seed}")
    checks = SELECTIONS if backend in LANES_ONLY else CHECKS
    checks = {name: check for name, check in checks.items() if name.startswith(words or "")}
    for name, check in checks.items():
        print(name, flush=True)
        check(backend)
    print(f"{len(chosen) + len(checks)} calls on {backend} equal the reference")


if __name__ == "__main__":
    main(*sys.argv[1:])

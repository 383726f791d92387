"""What a round of page allocation costs in a small and in a large unified pool, with the same pages alive in both.

A round gives every request a page, retires the SWA pages behind its window and takes back the requests that end; their
rows begin anew in the next round. Nothing of that should depend on how many pages there are beside those. The pools
have all three kinds of page, and the pages lie at the same distance from the pools' ends: what is compared is the work,
not the caches of a processor.

    outputs      the same rounds in both pools: the tables must say the same, counted from the ends
    warm-up      a run in each
    runs         the pools in turn; a run is one dispatch of `rounds` rounds in a loop on the device
"""

import dataclasses
import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec import InputError
from jaxspec.benchmarks.base import Report, Task, quiet, setting
from jaxspec.cache import LayerSpec, PoolCache, PoolLayout, StatePart, StateSpec, UnifiedPages, init_pool, init_unified

SUMMARY = "Times a round of page allocation in a small and in a large unified pool with the same pages alive."

LIMIT = 1.2  # of the ratio of the medians
CYCLE = 16  # rounds from a request's first to its last, so most pages it has
WINDOW = 2  # pages that stay in SWA
UNITS = 64  # floats a token has in a page


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes, and how often they are timed."""

    small_pages: int = setting(1000, "Size of the small pool in FULL pages.", least=2)
    large_pages: int = setting(1_000_000, "Size of the large pool in FULL pages.", least=2)
    num_requests: int = setting(40, "Requests that live at a time, each with 1 to 16 pages and a state.", least=1)
    page_size: int = setting(1, "Tokens a page, a power of two; a token takes 256 bytes.", least=1)
    rounds: int = setting(500, "Rounds a run.", least=1)
    runs: int = setting(20, "Runs in each pool that are timed.", least=10)


@dataclasses.dataclass
class Arm:
    """A pool, what is in it, and how many rounds it has seen."""

    layout: PoolLayout
    carried: tuple[UnifiedPages, PoolCache]
    first: int = 1


def run(settings: Settings, task: Task = quiet) -> Report:
    """Compares, then times.

    Raises:
      InputError: a pool cannot be, or the requests do not fit the small one.
    """
    sizes = {"small": settings.small_pages, "large": settings.large_pages}
    with task("pools", "compiling"):
        arms = {name: prepare(settings, pages) for name, pages in sizes.items()}
        for arm in arms.values():
            advance(arm, settings)
    told = {name: tell(arm) for name, arm in arms.items()}
    failures = [f"{key} differ" for key in told["small"] if not np.array_equal(*(t[key] for t in told.values()))]
    times = {name: [] for name in arms}
    with task("runs", f"{settings.runs} in each pool"):
        for number in range(1 + settings.runs):
            for name, arm in arms.items():
                seconds = advance(arm, settings)
                if number:  # the first is the warm-up
                    times[name].append(seconds / settings.rounds * 1e6)
    return report(arms, times, failures)


def prepare(settings: Settings, num_pages: int) -> Arm:
    """A pool of the size of `num_pages` FULL pages with the requests in it, each at another point of its life."""
    token = LayerSpec(1, UNITS // 2)
    state = StateSpec((StatePart("conv", (UNITS,)), StatePart("temporal", (3, UNITS))))
    layers = (token, dataclasses.replace(token, window=WINDOW * settings.page_size, storage="swa"), state)
    try:
        layout = PoolLayout.for_pages(layers, full=1, swa=1, state=1, page_size=settings.page_size)
        layout = dataclasses.replace(layout, units=num_pages * layout.page_units("full"))
    except ValueError as error:
        raise InputError(f"pool of {num_pages} pages: {error}") from None
    pages = init_unified(layout, rows=settings.num_requests + 1, pages_per_row=CYCLE)
    carried, ok = _begin((pages, init_pool(layout)))
    if not ok:
        raise InputError(
            f"{num_pages} pages have no room for num_requests={settings.num_requests}, some {CYCLE // 2} pages each: "
            "take fewer requests or larger pools"
        )
    return Arm(layout, carried)


def advance(arm: Arm, settings: Settings) -> float:
    """One run: the seconds it took."""
    jax.block_until_ready(arm.carried)
    start = time.perf_counter()
    arm.carried, ok = jax.block_until_ready(_rounds(arm.carried, np.int32(arm.first), np.int32(settings.rounds)))
    seconds = time.perf_counter() - start
    if not ok:
        raise InputError(f"the pool of {arm.layout.nbytes} bytes is too small for its requests: take fewer, or larger")
    arm.first += settings.rounds
    return seconds


def _lengths(pages: UnifiedPages, number: jax.Array | int) -> tuple[jax.Array, jax.Array]:
    """Rows of all requests, and how many tokens each has in a round: one page more than in the one before, or one."""
    rows = jnp.arange(1, pages.page_table.shape[0], dtype=jnp.int32)
    return rows, (1 + (rows + number) % CYCLE) * pages.page_size


@functools.partial(jax.jit, donate_argnums=0)
def _begin(carried):
    pages, cache = carried
    pages, cache, ok = pages.allocate(cache, *_lengths(pages, 0), max_new=CYCLE)
    return (pages, cache), ok


@functools.partial(jax.jit, donate_argnums=0)
def _rounds(carried, first, count):
    def turn(number, carry):
        (pages, cache), granted = carry
        rows, lengths = _lengths(pages, number)
        pages, cache, ok = pages.allocate(cache, rows, lengths, max_new=1)
        pages = pages.retire(rows, lengths, WINDOW * pages.page_size, max_retired=CYCLE)
        ended = jnp.pad(lengths == CYCLE * pages.page_size, (1, 0))
        return (pages.release(ended), cache), granted & ok

    return lax.fori_loop(first, first + count, turn, (carried, jnp.bool_(True)))


def tell(arm: Arm) -> dict[str, Any]:
    """What the tables say; virtual and FULL pages counted from the end of the pool, the others from its beginning."""
    pages = jax.device_get(arm.carried[0])
    owned = np.arange(CYCLE) < pages.num_pages[:, None]
    full, swa = np.moveaxis(pages.v2p[pages.page_table], -1, 0)
    virtual = len(pages.v2p)
    return {
        "rows": pages.rows,
        "virtual pages": np.where(owned, virtual - pages.page_table, 0),
        "FULL pages": np.where(owned, arm.layout.num_pages("full") - full, 0),
        "SWA pages": np.where(owned, swa, 0),
        "states": pages.state_v2p,
        "pages alive": pages.span - pages.holes,
    }


def report(arms: dict[str, Arm], times: dict[str, list[float]], failures: list[str]) -> Report:
    """Medians, their spread and their ratio."""
    median = {name: statistics.median(values) for name, values in times.items()}
    ratio = median["large"] / median["small"]
    if ratio > LIMIT:
        failures = [*failures, f"a round in the large pool takes {ratio:.3f} times as long, more than {LIMIT}"]
    alive = (arms["small"].carried[0].span - arms["small"].carried[0].holes).tolist()
    kinds = arms["small"].layout.kinds
    rows = [("us a round", *arms)]
    rows.append(("FULL pages in the pool", *(str(arm.layout.num_pages("full")) for arm in arms.values())))
    rows.append(("bytes", *(str(arm.layout.nbytes) for arm in arms.values())))
    rows.append(("median", *(f"{median[name]:.2f}" for name in arms)))
    rows.append(("least", *(f"{min(times[name]):.2f}" for name in arms)))
    rows.append(("most", *(f"{max(times[name]):.2f}" for name in arms)))
    rows.append(("large / small, medians", "", f"{ratio:.4f}"))
    rows.append(("equal tables", "", "NO" if any("differ" in line for line in failures) else "yes"))
    rows.append((f"pages alive: {', '.join(f'{n} {kind}' for kind, n in zip(kinds, alive, strict=True))}",))
    results = {
        name: {
            "full_pages": arm.layout.num_pages("full"),
            "bytes": arm.layout.nbytes,
            "us_a_round": times[name],
            "median": median[name],
            "spread": (max(times[name]) - min(times[name])) / median[name],
        }
        for name, arm in arms.items()
    }
    results |= {"ratio": ratio, "limit": LIMIT, "pages_alive": dict(zip(kinds, alive, strict=True))}
    return Report(tables=[rows], results=results, failures=failures)
